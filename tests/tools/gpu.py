"""Parity on GPUs: `make gpu` on a machine with CUDA. Prints differences from the torch backend on
one GPU there.

Each family in every mode that fits one GPU; experts and the other families there too; and where
there are several GPUs every layout of the suite that they can hold, over nccl.

float32 agrees to rounding; bf16 and fp16 agree to theirs. The worst float32 difference decides the
exit code.
"""

import contextlib
import io
import os
import shutil
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist

from tests import test_model_families, test_moe
from tests.shared import tiny, tiny_moe, world
from tests.shared.layouts import AUX, CUT, DENSE, EXPERTS, PACKED, PACKED_LAYOUTS
from tests.shared.training import train
from tests.tools import gpu_te

OVERLAP = dict(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
CASES = {
    "megatron": {},
    "packed": PACKED,
    "overlap": OVERLAP,
    "recomputed": dict(recompute_granularity="full"),
    "offloaded": dict(optimizer_cpu_offload=True),
    "torch, packed": dict(backend="torch", **PACKED),
}
HALF = {
    "megatron": {},
    "packed": PACKED,
    "packed, recomputed": dict(recompute_granularity="full", **PACKED),
}
TOLERANCE = 1e-5
WIDE = dict(global_batch_size=8, count=22)  # two samples on each of four ranks


def quiet(*args, **kwargs) -> list:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return train(*args, **{**WIDE, **kwargs})


def layouts() -> dict:
    """{name: (ranks, keys)} of the suite's layouts that need more than one GPU and no more than
    there are.
    """
    packed = {
        f"{name}, packed": (n, {**keys, **PACKED}) for name, (n, keys) in PACKED_LAYOUTS.items()
    }
    everything = {**DENSE, **CUT, **packed}
    return {
        name: (n, keys)
        for name, (n, keys) in everything.items()
        if 1 < n <= torch.cuda.device_count()
    }


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
    return worst(
        quiet(path, f"{folder}/parts", resume_from_checkpoint="auto", **saves, **keys), whole
    )


def on_one_gpu(folder: str) -> list[float]:
    limits = []
    for family in tiny.FAMILY_KEYS:
        path = tiny.save_model(f"{folder}/{family}", family)
        for dtype, cases in (("float32", CASES), ("bf16", HALF)):
            precision = dict(bf16=dtype == "bf16")
            wanted = quiet(path, f"{folder}/{family}-{dtype}", backend="torch", **precision)
            for name, keys in cases.items():
                loss, norm = worst(
                    quiet(path, f"{folder}/{family}-{dtype}-{name}", **keys, **precision), wanted
                )
                print(
                    f"{family:8} {dtype:8} {name:20} d loss {loss:.1e}  d norm {norm:.1e}",
                    flush=True,
                )
                limits += [loss, norm] if dtype == "float32" else []
    for name, keys in (
        ("float32", {}),
        ("bf16, packed, overlap", dict(bf16=True, **PACKED, **OVERLAP)),
    ):
        loss, norm = resumed(path, f"{folder}/{name}", **keys)
        print(f"resumed, {name}: d loss {loss:.1e}  d norm {norm:.1e}", flush=True)
        limits += [loss, norm]
    return limits


def in_turn(cells: dict, wanted: dict, folder: str, end: float = float("inf")) -> dict:
    """In a world of nccl ranks, for cells {name: (model folder, name of its reference, keys)}:
    {name: differences from the reference's curve}, infinite where it failed, or had not begun at
    `end`, by time.time(); where wanted is {}, {name: curve}.
    """
    from megatron.core import parallel_state as mpu

    out, world_size = {}, dist.get_world_size()
    for name, (path, reference, keys) in cells.items():
        try:
            if world.is_late(end):
                raise TimeoutError("not run: no time was left")
            curve = quiet(path, f"{folder}/{name}", **keys)
            out[name] = worst(curve, wanted[reference]) if wanted else curve
        except Exception as error:
            if not isinstance(error, TimeoutError):
                traceback.print_exc()
            elif dist.get_rank() == 0:
                print(f"{name}: {error}", flush=True)
            out[name] = (float("inf"), float("inf"))
        if dist.get_rank() == 0 and wanted:
            print(
                f"{name:48} {world_size} GPUs  d loss {out[name][0]:.1e}  d norm "
                f"{out[name][1]:.1e}",
                flush=True,
            )
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
    return out


def jobs(folder: str) -> list[tuple[str, str, dict, dict]]:
    """(name, model folder, keys of both backends, layouts) of what is trained on several GPUs."""
    tiny_folder = tiny.save_model(f"{folder}/layouts", "qwen3")
    work = [
        (dtype, tiny_folder, dict(bf16=dtype == "bf16"), layouts()) for dtype in ("float32", "bf16")
    ]
    single = {"one": (1, {}), "one, packed": (1, PACKED)}
    experts = {name: pair for name, pair in EXPERTS.items() if pair[0] <= torch.cuda.device_count()}
    for name in (*test_moe.FAMILIES, *test_model_families.EXPERTS.values()):
        path, keys = tiny_moe.save_model(f"{folder}/{name}-experts", name), dict(adam_epsilon=1e-4)
        balanced = {**keys, **AUX}  # of a micro-batch: packing changes these losses
        work.append((f"{name}, experts", path, balanced, {"one": (1, {}), **experts}))
        work.append(
            (
                f"{name}, experts, bf16",
                path,
                {**balanced, "bf16": True},
                {"one": (1, {}), **experts},
            )
        )
        packed = {name: (n, {**more, **PACKED}) for name, (n, more) in experts.items()}
        work.append((f"{name}, experts, packed", path, keys, {"one": (1, PACKED), **packed}))
    for name in tiny.MORE_KEYS:
        few = {
            n: pair
            for n, pair in test_model_families.LAYOUTS.items()
            if pair[0] <= torch.cuda.device_count()
        }
        work.append(
            (
                name,
                tiny.save_model(f"{folder}/{name}", name),
                dict(adam_epsilon=1e-4),
                {**single, **few},
            )
        )
    return work


def in_worlds(folder: str) -> list[float]:
    """Every job's layouts, those of as many GPUs in one world, against the torch backend on one."""
    work, limits = jobs(folder), []
    references = {name: (path, name, {**keys, "backend": "torch"}) for name, path, keys, _ in work}
    [wanted] = world.run(in_turn, 1, references, {}, f"{folder}/torch", timeout_s=400)
    for ranks in sorted({n for *_, where in work for n, _ in where.values()}):
        cells = {
            f"{name}: {layout}": (path, name, {**shared, **keys})
            for name, path, shared, where in work
            for layout, (n, keys) in where.items()
            if n == ranks
        }
        for differences in world.run(in_turn, ranks, cells, wanted, folder, timeout_s=500):
            for name, pair in differences.items():
                limits += [
                    number for number in pair if "bf16" not in name or number == float("inf")
                ]
    return limits


def main(words: list[str]) -> int:
    """ "te" and further words: the cases of Transformer Engine alone, or those of gpu_te.py that
    the words choose.
    """
    if not torch.cuda.is_available():
        print("no CUDA here: the CPU's tests are `make test`")
        return 2
    world.end_when_told()
    if words[:1] == ["te"]:
        return gpu_te.main(words[1:])
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    # a world of many layouts keeps all its communicators: with buffers for small messages they fit
    # one GPU
    os.environ.setdefault("NCCL_BUFFSIZE", str(2**16))
    os.environ.setdefault("NCCL_MAX_CTAS", "1")
    with tempfile.TemporaryDirectory() as folder:
        limits = in_worlds(folder) + on_one_gpu(folder)
    print(f"worst {max(limits):.1e}, expected at most {TOLERANCE}")
    return int(max(limits) > TOLERANCE) or gpu_te.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
