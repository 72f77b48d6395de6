"""Parity and plans on GPUs: `make gpu` on a machine with CUDA, or a part of it:

    python -m tests.tools.gpu [kernels | memory | plan | parity | compiled | families | pictures |
                               deterministic | hangs | session | te]

kernels: the Triton kernels against their formulas (gpu_kernels.py).

memory: what stays on the GPU of a run that ended, of two in one process.

parity: differences from the torch backend on one GPU there. Each family in every mode that fits one
GPU; experts and the other families there too; and where there are several GPUs every layout of the
suite that they can hold, over nccl. float32 agrees to rounding, bf16 to its own. The worst float32
difference decides the exit code. A compilation takes as long as ten of these runs: the lines named
"compiled" have one, the others none; compiled ones of all families are the next part.

compiled: two steps of every family and objective at its default keys, compiled
(gpu_compiled.py), of which further words choose some: compiled text, compiled experts, compiled
pictures, compiled objectives, each under 8 minutes.

families: 20 steps of every family in bf16, and of transformers' class (gpu_families.py), of which
further words choose some; on a CPU too by that name.

pictures: models with pictures on one GPU, against transformers' own in plain torch on the CPU.

plan: the memory that `python -m mca_lite plan` tells, beside that of a few steps (gpu_plan.py).

deterministic: runs with deterministic: true, twice and resumed, bit for bit
(gpu_deterministic.py), of which further words choose some.

hangs: who is named where ranks hang over nccl (gpu_hangs.py), of which further words choose some.

session: memory that leaves with Session.to, and the same bits afterwards (gpu_session.py), of which
further words choose some.

te: the cases of Transformer Engine (gpu_te.py), of which further words choose some.
"""

import contextlib
import gc
import io
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import ChainMap
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from tests import test_model_families, test_moe
from tests.shared import pictures, tiny, tiny_moe, world
from tests.shared.layouts import AUX, CUT, DENSE, DIST_OVERLAP, EXPERTS, PACKED, PACKED_LAYOUTS
from tests.shared.training import most, train
from tests.tools import (
    bench_gpu,
    gpu_compiled,
    gpu_deterministic,
    gpu_families,
    gpu_hangs,
    gpu_kernels,
    gpu_plan,
    gpu_session,
    gpu_te,
)

CASES = {
    "megatron": {},
    "packed": PACKED,
    "overlap": DIST_OVERLAP,
    "recomputed": dict(recompute_granularity="full"),
    "offloaded": dict(optimizer_cpu_offload=True),
    "torch, packed": dict(backend="torch", **PACKED),
}
HALF = {
    "megatron": {},
    "packed": PACKED,
    "packed, recomputed": dict(recompute_granularity="full", **PACKED),
}
# of models with pictures; in bf16 their attention is one kernel, and differs by rounding
PICTURES = {
    "rows": {},
    "packed": PACKED,
    "bf16": dict(bf16=True),
    "bf16, packed, recomputed": dict(bf16=True, recompute_granularity="full", **PACKED),
}
# families whose kernels differ: norms of heads, a bias; and of those that in_worlds() trains a cap
# on scores, latent attention, experts
COMPILED = dict(torch_compile=True)
COMPILED_CASES = {
    ("qwen3", "float32"): {"compiled": COMPILED, "compiled, packed": {**COMPILED, **PACKED}},
    ("qwen3", "bf16"): {"compiled, packed": {**COMPILED, **PACKED}},
    ("qwen2", "float32"): {"compiled": COMPILED},
}
ALSO_COMPILED = ("gemma2", "deepseek_v3", "qwen2_moe, experts")
# parts with cases to choose
CHOOSES = ("compiled", "deterministic", "families", "hangs", "session", "te")
TOLERANCE = 1e-5
PROCESSES = 8  # of one rank that share a GPU
LEFT_OVER = 0.3  # GiB: workspaces of libraries; the weights alone are 0.9
WIDE = dict(global_batch_size=8, count=22)  # two samples on each of four ranks


def quiet(*args, **kwargs) -> list:
    """The curve of a run, not compiled unless it says so."""
    kwargs = {**WIDE, "torch_compile": False, **kwargs}
    if kwargs["torch_compile"]:
        torch.compiler.reset()  # after some kinds of a function torch compiles no more of them
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return train(*args, **kwargs)


def layouts() -> dict:
    """{name: (ranks, keys)} of the suite's layouts that need more than one GPU and no more than
    there are.
    """
    packed = {
        f"{name}, packed": (n, {**keys, **PACKED}) for name, (n, keys) in PACKED_LAYOUTS.items()
    }
    everything = {**DENSE, **CUT, **packed}
    for name in ("tp2_sp", "pp2_vpp2, packed"):
        ranks, keys = everything[name]
        everything[f"{name}, compiled"] = (ranks, {**keys, **COMPILED})
    return {
        name: (n, keys)
        for name, (n, keys) in everything.items()
        if 1 < n <= torch.cuda.device_count()
    }


def worst(got: list, wanted: list) -> tuple[float, float]:
    """Largest differences of loss, and of gradient norm relative to it."""
    pairs = list(zip(got, wanted, strict=True))
    norms = most(abs(a[1] - b[1]) / max(b[1], 1e-9) for a, b in pairs)
    return most(abs(a[0] - b[0]) for a, b in pairs), norms


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


def say(name: str, gpus: int, loss: float, norm: float, start: float) -> None:
    words = f"{name:48} {gpus} GPUs  d loss {loss:.1e}  d norm {norm:.1e}"
    print(f"{words}  {time.time() - start:4.1f} s", flush=True)


def on_one_gpu(folder: str) -> list[float]:
    limits = []
    for family in tiny.FAMILY_KEYS:
        path = tiny.save_model(f"{folder}/{family}", family)
        for dtype, cases in (("float32", CASES), ("bf16", HALF)):
            precision = dict(bf16=dtype == "bf16")
            wanted = quiet(path, f"{folder}/{family}-{dtype}", backend="torch", **precision)
            for name, keys in {**cases, **COMPILED_CASES.get((family, dtype), {})}.items():
                start, out = time.time(), f"{folder}/{family}-{dtype}-{name}"
                loss, norm = worst(quiet(path, out, **keys, **precision), wanted)
                say(f"{family:8} {dtype:8} {name}", 1, loss, norm, start)
                limits += [loss, norm] if dtype == "float32" else []
    for name, keys in (
        ("float32", {}),
        ("bf16, packed, overlap", dict(bf16=True, **PACKED, **DIST_OVERLAP)),
    ):
        start = time.time()
        loss, norm = resumed(path, f"{folder}/{name}", **keys)
        say(f"resumed, {name}", 1, loss, norm, start)
        limits += [loss, norm]
    return limits


def with_pictures(folder: str) -> list[float]:
    """Models with pictures against transformers' own in plain torch on the CPU."""
    limits = []
    for family in pictures.FAMILIES:
        path = pictures.save_model(f"{folder}/{family}", family)
        wanted = pictures.train_plain(path, f"{folder}/{family}-plain")
        for name, keys in PICTURES.items():
            start = time.time()
            out = f"{folder}/{family}-{name}"
            with contextlib.redirect_stdout(io.StringIO()):
                curve = pictures.train_ours(path, out, **keys)
            loss, norm = worst(curve, wanted)
            say(f"{family:12} {name}", 1, loss, norm, start)
            limits += [loss, norm] if name in ("rows", "packed") else []
    return limits


def in_turn(cells: dict, wanted: dict, folder: str, end: float = float("inf")) -> dict:
    """In a world of nccl ranks, for cells {name: (model folder, name of its reference, keys)}:
    {name: differences from the reference's curve}, infinite where it failed, or had not begun at
    `end`, by time.time(); where wanted is {}, {name: curve}.
    """
    out, world_size = {}, dist.get_world_size()
    for name, (path, reference, keys) in cells.items():
        start = time.time()
        try:
            world.expect_time(end)
            curve = quiet(path, f"{folder}/{name}", **keys)
            out[name] = worst(curve, wanted[reference]) if wanted else curve
        except Exception as error:
            if not isinstance(error, TimeoutError):
                traceback.print_exc()
            elif dist.get_rank() == 0:
                print(f"{name}: {error}", flush=True)
            out[name] = (float("inf"), float("inf"))
        if dist.get_rank() == 0 and wanted:
            say(name, world_size, *out[name], start)
        world.leave_layout()
    return out


def jobs(folder: str) -> list[tuple[str, str, dict, dict]]:
    """(name, model folder, keys of both backends, layouts) of what is trained in worlds of as many
    ranks as there are GPUs, or fewer."""
    tiny_folder = tiny.save_model(f"{folder}/layouts", "qwen3")
    work = [
        (dtype, tiny_folder, dict(bf16=dtype == "bf16"), layouts()) for dtype in ("float32", "bf16")
    ]
    one, single = {"one": (1, {})}, {"one": (1, {}), "one, packed": (1, PACKED)}
    for name in (*test_moe.FAMILIES, *tiny_moe.UNBALANCED):
        if not tiny.is_known(tiny_moe.MODELS[name][0]):
            continue
        path, keys = tiny_moe.save_model(f"{folder}/{name}-experts", name), dict(adam_epsilon=1e-4)
        balanced = {**keys, **AUX}  # of a micro-batch: packing changes these losses
        work.append((f"{name}, experts", path, balanced, {**one, **EXPERTS}))
        work.append(
            (f"{name}, experts, bf16", path, {**balanced, "bf16": True}, {**one, **EXPERTS})
        )
        packed = {name: (n, {**more, **PACKED}) for name, (n, more) in {**one, **EXPERTS}.items()}
        work.append((f"{name}, experts, packed", path, keys, packed))
    for name in tiny.MORE_KEYS:
        path = tiny.save_model(f"{folder}/{name}", name)
        few = {**single, **test_model_families.LAYOUTS}
        work.append((name, path, dict(adam_epsilon=1e-4), few))
    return [
        (
            name,
            path,
            keys,
            {
                **({"compiled": (1, COMPILED)} if name in ALSO_COMPILED else {}),
                **{k: pair for k, pair in where.items() if pair[0] <= torch.cuda.device_count()},
            },
        )
        for name, path, keys, where in work
    ]


def at_once(cells: dict, wanted: dict, folder: str) -> dict:
    """in_turn of cells on one rank, in several processes of the first GPU, each with its share."""
    count = min(max(os.cpu_count() // 2, 1), PROCESSES)
    shares = [dict(list(cells.items())[i::count]) for i in range(count)]

    def run(share: dict) -> dict:
        return world.run(in_turn, 1, share, wanted, folder, timeout_s=400)[0]

    with ThreadPoolExecutor(count) as pool:
        return dict(ChainMap(*pool.map(run, filter(None, shares))))


def in_worlds(folder: str) -> list[float]:
    """Every job's layouts, those of as many GPUs in one world, against the torch backend on one."""
    work, limits = jobs(folder), []
    references = {name: (path, name, {**keys, "backend": "torch"}) for name, path, keys, _ in work}
    wanted = at_once(references, {}, f"{folder}/torch")
    for ranks in sorted({n for *_, where in work for n, _ in where.values()}):
        cells = {
            f"{name}: {layout}": (path, name, {**shared, **keys})
            for name, path, shared, where in work
            for layout, (n, keys) in where.items()
            if n == ranks
        }
        if ranks == 1:
            answers = [at_once(cells, wanted, folder)]
        else:
            answers = world.run(in_turn, ranks, cells, wanted, folder, timeout_s=500)
        for differences in answers:
            for name, pair in differences.items():
                limits += [
                    number for number in pair if "bf16" not in name or not number < float("inf")
                ]
    return limits


def left_over() -> list[float]:
    """GiB of this GPU that are in use after each of two runs, whose trainers are gone."""
    left = []
    for _ in range(2):
        bench_gpu.run_ours("0.5B", mbs=1, rows=2, s=64 if bench_gpu.TINY else 1024, steps=2)
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_allocated() / 2**30)
    return left


def memory() -> int:
    [left] = world.run(left_over, 1, timeout_s=200)
    words = " and ".join(f"{gib:.2f}" for gib in left)
    print(f"memory: {words} GiB stay of two runs, expected at most {LEFT_OVER}", flush=True)
    return int(max(left) > LEFT_OVER)


def parity() -> int:
    from mca_lite.kernels import why_no_kernels, why_no_torch_compile

    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if reason := why_no_kernels() or why_no_torch_compile():
        print(f"the lines named compiled would not be: {reason}")
        return 1
    # a world of many layouts keeps all its communicators: with buffers for small messages they fit
    # one GPU
    os.environ.setdefault("NCCL_BUFFSIZE", str(2**16))
    os.environ.setdefault("NCCL_MAX_CTAS", "1")
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        limits = on_one_gpu(folder) + in_worlds(folder)
    seconds = time.time() - start
    print(f"worst {most(limits):.1e}, expected at most {TOLERANCE}, {seconds:.0f} s", flush=True)
    return int(not most(limits) <= TOLERANCE)


def of_pictures() -> int:
    with tempfile.TemporaryDirectory() as folder:
        return int(not most(with_pictures(folder)) <= TOLERANCE)


def main(words: list[str]) -> int:
    """The name of a part, some with further words: that part; none: all of them -> the worst exit
    code."""
    parts = dict(
        kernels=gpu_kernels.main,
        memory=memory,
        plan=gpu_plan.main,
        parity=parity,
        compiled=lambda: gpu_compiled.main(words[1:]),
        families=lambda: gpu_families.main(words[1:]),
        pictures=of_pictures,
        deterministic=lambda: gpu_deterministic.main(words[1:]),
        hangs=lambda: gpu_hangs.main(words[1:]),
        session=lambda: gpu_session.main(words[1:]),
        te=lambda: gpu_te.main(words[1:]),
    )
    if words and words[0] not in parts or words[1:] and words[0] not in CHOOSES:
        print(__doc__)
        return 0 if words in (["--help"], ["-h"]) else 2
    if not torch.cuda.is_available():
        print("no CUDA here: the CPU's tests are `make test`")
        return 2
    world.end_when_told()
    return max(part() for name, part in parts.items() if name in words[:1] or not words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
