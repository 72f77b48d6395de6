"""Parity on GPUs: `make gpu` on a machine with CUDA. Prints differences from the torch backend on one GPU there.

One GPU: each family in every mode that fits. Several: every layout of the suite that they can hold, over nccl.

float32 agrees to rounding; bf16 and fp16 agree to theirs. The worst float32 difference decides the exit code.
"""

import contextlib
import io
import shutil
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist

from tests import gpu_moe, test_packed, test_parity, tiny, world
from tests.training import train

PACKED = dict(sequence_packing=True, per_device_train_batch_size=2)
OVERLAP = dict(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
CASES = {
    "megatron": {},
    "packed": PACKED,
    "overlap": OVERLAP,
    "recomputed": dict(recompute_granularity="full"),
    "offloaded": dict(optimizer_cpu_offload=True),
    "torch, packed": dict(backend="torch", **PACKED),
}
HALF = {"megatron": {}, "packed": PACKED, "packed, recomputed": dict(recompute_granularity="full", **PACKED)}
TOLERANCE = 1e-5


def quiet(*args, **kwargs) -> list:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return train(*args, **kwargs)


def layouts() -> dict:
    """{name: (ranks, keys)} of the suite's layouts that need more than one GPU and no more than there are."""
    packed = {f"{name}, packed": (n, {**keys, **PACKED}) for name, (n, keys) in test_packed.PACKED_LAYOUTS.items()}
    everything = {**test_parity.LAYOUTS, **test_packed.CUT, **packed}
    return {name: (n, keys) for name, (n, keys) in everything.items() if 1 < n <= torch.cuda.device_count()}


def worst(got: list, wanted: list) -> tuple[float, float]:
    """Largest differences of loss, and of gradient norm relative to it."""
    losses = max(abs(a[0] - b[0]) for a, b in zip(got, wanted, strict=True))
    return losses, max(abs(a[1] - b[1]) / max(b[1], 1e-9) for a, b in zip(got, wanted, strict=True))


def resumed(path: str, folder: str, **keys) -> tuple[float, float]:
    """A run of five steps against one that died after the second."""
    saves = dict(save_strategy="steps", save_steps=2, num_train_epochs=5, steps=5)
    whole = quiet(path, f"{folder}/whole", steps=5, **keys)
    quiet(path, f"{folder}/parts", **saves, **keys)
    for step in (4, 5):
        shutil.rmtree(f"{folder}/parts/checkpoint-{step}", ignore_errors=True)
    return worst(quiet(path, f"{folder}/parts", resume_from_checkpoint="auto", **saves, **keys), whole)


def on_one_gpu(folder: str) -> list[float]:
    limits = []
    for family in tiny.FAMILY_KEYS:
        path = tiny.save_model(f"{folder}/{family}", family)
        for dtype, cases in (("float32", CASES), ("bf16", HALF)):
            precision = dict(bf16=dtype == "bf16")
            wanted = quiet(path, f"{folder}/{family}-{dtype}", backend="torch", **precision)
            for name, keys in cases.items():
                loss, norm = worst(quiet(path, f"{folder}/{family}-{dtype}-{name}", **keys, **precision), wanted)
                print(f"{family:8} {dtype:8} {name:20} d loss {loss:.1e}  d norm {norm:.1e}", flush=True)
                limits += [loss, norm] if dtype == "float32" else []
    for name, keys in (("float32", {}), ("bf16, packed, overlap", dict(bf16=True, **PACKED, **OVERLAP))):
        loss, norm = resumed(path, f"{folder}/{name}", **keys)
        print(f"resumed, {name}: d loss {loss:.1e}  d norm {norm:.1e}", flush=True)
        limits += [loss, norm]
    return limits


def in_turn(path: str, folder: str, cells: dict, wanted: list) -> dict:
    """In a world of nccl ranks: {cell: its differences from the wanted curve}, infinite where it failed."""
    from megatron.core import parallel_state as mpu

    out = {}
    for name, keys in cells.items():
        try:
            out[name] = worst(quiet(path, f"{folder}/{name}", **keys), wanted)
        except Exception:
            traceback.print_exc()
            out[name] = (float("inf"), float("inf"))
        if dist.get_rank() == 0:
            print(
                f"{name:36} {dist.get_world_size()} GPUs  d loss {out[name][0]:.1e}  d norm {out[name][1]:.1e}",
                flush=True,
            )
        mpu.destroy_model_parallel()
    return out


def mixtures(folder: str) -> list[float]:
    """Experts: one GPU in several modes, and two in the layouts of gpu_moe.py."""
    limits, paths = [], gpu_moe.save_models(folder)
    for name, path in paths.items():
        for dtype in ("float32", "bf16"):
            shared = dict(gpu_moe.AUX, bf16=dtype == "bf16")
            [wanted] = world.run(
                quiet, 1, path, f"{folder}/{name}-{dtype}", backend="torch", timeout_s=120, **shared
            )
            for ranks, cases in ((1, gpu_moe.ONE), (2, gpu_moe.LAYOUTS)):
                if ranks > torch.cuda.device_count():
                    continue
                cells = {f"{name}, {dtype}, {case}": {**keys, **shared} for case, keys in cases.items()}
                for differences in world.run(in_turn, ranks, path, folder, cells, wanted, timeout_s=300):
                    whole = [number for pair in differences.values() for number in pair]
                    limits += whole if dtype == "float32" else [number for number in whole if number == float("inf")]
    return limits


def on_several_gpus(folder: str) -> list[float]:
    limits, path = [], tiny.save_model(f"{folder}/layouts", "qwen3")
    for dtype in ("float32", "bf16"):
        precision = dict(bf16=dtype == "bf16")
        [wanted] = world.run(quiet, 1, path, f"{folder}/one-{dtype}", backend="torch", timeout_s=120, **precision)
        for ranks in sorted({n for n, _ in layouts().values()}):
            cells = {f"{name}, {dtype}": {**k, **precision} for name, (n, k) in layouts().items() if n == ranks}
            for differences in world.run(in_turn, ranks, path, folder, cells, wanted, timeout_s=400):
                whole = [number for pair in differences.values() for number in pair]
                limits += whole if dtype == "float32" else [number for number in whole if number == float("inf")]
    return limits


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA here: the CPU's tests are `make test`")
        return 2
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        limits = on_several_gpus(folder) if torch.cuda.device_count() > 1 else []
        limits += on_one_gpu(folder)
        limits += mixtures(folder)
    print(f"worst {max(limits):.1e}, expected at most {TOLERANCE}")
    return int(max(limits) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
