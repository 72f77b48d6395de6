"""Several GPUs: training speed by layout, and parity over nccl.

    torchrun --standalone --nproc_per_node 2 -m tests.tools.bench_gpus [parity] [CASE ...] [limit=S]

On a machine with two GPUs or more; about a minute of imports and kernels, then 10 to 20 s a case.
One process a rank runs all cases in turn. Each is the model of bench_gpu.py's "1.5B short steps"
(or "experts"), with as many rows a GPU, so that tokens a second and GPU can be put beside that
case's: `python -m tests.tools.bench_gpu "1.5B short steps" experts ours` on one GPU. fsdp2 is
torch's fully_shard over transformers' model with Liger kernels, where they are installed, float32
master weights and bf16 products.

parity: small models in float32 in layouts of two GPUs, against the torch backend on one, and a run
that stopped at a checkpoint of many buckets against one that did not. limit=S: what has not begun
after S seconds is named and not run.
"""

import contextlib
import gc
import os
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

from tests.shared import layouts, tiny, tiny_moe, world
from tests.shared.layouts import CP2, DIST_OPT, DIST_OVERLAP, EP2, PACKED, PP2, TP2, TP2_SP, VPP2

from . import bench_gpu, gpu

TP2_HIDDEN = dict(TP2_SP, tp_comm_overlap=True)
JOINED = dict(sequence_packing=True)
AUTO = dict(pipeline_model_parallel_layout="auto")
EIGHT_BITS = bench_gpu.CASES["8B 8 bits"]["keys"]
AWAY = bench_gpu.CASES["LoRA 8B 262k"]["keys"]
FEW = dict(steps=2)  # as many as there is time for
# name: (shape, rows a micro-batch, replicas of the data on two GPUs, keys[, tokens of a row[, words
# of bench_gpu.run_ours]]); on one GPU those of dp2 and of rows are one GPU's
CASES = {
    "dp2": ("1.5B", 4, 2, {}),
    "dp2 distributed optimizer": ("1.5B", 4, 2, DIST_OPT),
    "dp2 overlap": ("1.5B", 4, 2, DIST_OVERLAP),
    "packed rows": ("1.5B", 4, 2, JOINED),
    "packed dp2 overlap": ("1.5B", 4, 2, {**JOINED, **DIST_OVERLAP}),
    "fsdp2": ("1.5B", 4, 2, None),
    "tp2": ("1.5B", 4, 1, TP2),
    "tp2 sequence parallel": ("1.5B", 4, 1, TP2_SP),
    "tp2 sequence parallel, overlapped": ("1.5B", 4, 1, TP2_HIDDEN),
    # as large as one GPU's products: its memory holds twice the rows, of half a model
    "tp2, 8 rows": ("1.5B", 8, 1, TP2),
    "tp2 sequence parallel, 8 rows": ("1.5B", 8, 1, TP2_SP),
    "cp2, 8 rows": ("1.5B", 8, 1, CP2),
    "pp2": ("1.5B", 2, 1, PP2),
    "pp2 vpp2": ("1.5B", 2, 1, {**PP2, **VPP2}),
    "pp2 auto": ("1.5B", 2, 1, {**PP2, **AUTO}),
    "pp2 vpp2 auto": ("1.5B", 2, 1, {**PP2, **VPP2, **AUTO}),
    "4B rows": ("4B", 2, 2, {}),
    "4B dp2 overlap": ("4B", 2, 2, DIST_OVERLAP),
    "4B tp2 sequence parallel": ("4B", 2, 1, TP2_SP),
    "4B tp2 sequence parallel, overlapped": ("4B", 2, 1, TP2_HIDDEN),
    "8B dp2 overlap": ("8B", 2, 2, DIST_OVERLAP),
    "8B tp2 sequence parallel": ("8B", 2, 1, TP2_SP),
    "8B tp2 sequence parallel, overlapped": ("8B", 2, 1, TP2_HIDDEN),
    "8B fsdp2": ("8B", 2, 2, None),
    "cp2": ("1.5B", 4, 1, CP2),
    "rows of 16,384": ("1.5B", 1, 2, {}, 16384),
    "cp2, rows of 16,384": ("1.5B", 1, 1, CP2, 16384),
    "rows of 32,768": ("1.5B", 1, 2, {}, 32768),
    "cp2, rows of 32,768": ("1.5B", 1, 1, CP2, 32768),
    "experts dp2 overlap": ("experts", 4, 2, DIST_OVERLAP),
    "experts ep2": ("experts", 4, 2, {**EP2, **DIST_OVERLAP}),
    "experts fsdp2": ("experts", 4, 2, None),
    "32B tp2 sequence parallel, 8 bits": ("32B", 1, 1, {**TP2_SP, **EIGHT_BITS}, 4096, FEW),
    "8B LoRA, rows of 524,288, cp2": ("8B", 1, 1, {**CP2, **AWAY}, 1 << 19, {**FEW, "lora": 16}),
}
TOKENS = 32768  # a GPU and step


def run_fsdp(shape, mbs, rows, s, steps):
    """transformers' model under torch's fully_shard, rows of this rank: as bench_gpu.run_theirs."""
    import transformers
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    config, clock, logs = bench_gpu.hf_config(shape), bench_gpu.Clock(), []
    data, tokens, squares = bench_gpu.dataset(config, s, rows, packed=False)
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    more = {"experts_implementation": "grouped_mm"} if hasattr(config, "num_experts") else {}
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **more)
    bench_gpu.fill(model.named_parameters())
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        if cuda:
            _apply_liger_kernel_to_instance(model)
    mixed = MixedPrecisionPolicy(torch.bfloat16 if cuda else None, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=mixed)
    fully_shard(model, mp_policy=mixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1, fused=cuda)
    clock.begin()
    for _ in range(steps):
        total = 0.0
        for start in range(0, rows, mbs):
            batch = data[start : start + mbs]
            ids = torch.stack([row["input_ids"] for row in batch]).to(device)
            model.set_requires_gradient_sync(start + mbs >= rows)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss * mbs / rows
            loss.backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logs.append(dict(loss=float(total), grad_norm=float(norm.full_tensor())))
        clock.tick()
    return clock, logs, tokens, squares


def measure(name: str, folder: str, steps: int = 8, skip: int = 4) -> dict:
    """Train one case on all ranks -> its line."""
    shape, mbs, replicas, keys, *others = CASES[name]
    s, words = [*others, *(4096, {})[len(others) :]]
    steps, skip = words.get("steps", steps), min(skip, words.get("steps", steps) - 1)
    ranks = dist.get_world_size()
    rows_of_gpu = TOKENS // s
    if bench_gpu.TINY:
        s //= 64
    replicas = ranks if replicas == 2 else ranks // 2
    rows = rows_of_gpu * ranks or 1
    shared = {**words, **dict(shape=shape, mbs=mbs, s=s, steps=steps)}
    if keys is None:
        clock, logs, tokens, squares = run_fsdp(**shared, rows=rows_of_gpu)
        tokens, squares = tokens * ranks, squares * ranks
    else:
        keys = {**keys, "gradient_accumulation_steps": rows // mbs // replicas}
        packed = "sequence_packing" in keys
        found = bench_gpu.run_ours(**shared, rows=rows, keys=keys, packed=packed, folder=folder)
        clock, logs, tokens, squares = found
    median = clock.median(skip)
    work = bench_gpu.flops(bench_gpu.hf_config(shape), tokens, squares, words.get("lora", 0))
    return dict(
        case=name,
        gpus=ranks,
        tokens_per_second_per_gpu=round(tokens / median / ranks),
        mfu=round(work / median / ranks / bench_gpu.PEAK, 4),
        peak_gib=bench_gpu.peak_gib(),
        step_ms=[round(1e3 * t) for t in clock.times],
        losses=[round(float(log["loss"]), 5) for log in logs],
        **({"trace": clock.account} if clock.account else {}),
    )


def in_turn(names: list[str], folder: str, end: float) -> int:
    """Measure the cases in this world of ranks -> how many failed, or had not begun at `end`."""
    failed = 0
    for name in names:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            world.expect_time(end)
            line = measure(name, f"{folder}/{name}")
        except Exception as error:
            traceback.print_exc()
            failed, line = failed + 1, dict(case=name, failed=f"{type(error).__name__}: {error}")
        if dist.get_rank() == 0:
            bench_gpu.write(line)
        world.leave_layout()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        dist.barrier()
    return failed


EXPERT_KEYS = dict(adam_epsilon=1e-4)
PARITY = {
    "dense": "dp2_overlap tp2 tp2_sp_overlap pp2_variable cp2".split(),
    "experts": "ep2 tp2 pp2 cp2ep2".split(),
    "packed": "dp2_overlap tp2_sp pp2_vpp2 cp2".split(),
}

# the others run uncompiled, which takes a tenth of the time
COMPILED_CELLS = ("dense: tp2", "experts: ep2", "packed: pp2_vpp2")


def parity_on_one(folder: str) -> dict:
    """{kind of model: curve of the torch backend on one GPU}, of models that it writes."""
    dense = tiny.save_model(f"{folder}/dense", "qwen3")
    experts = tiny_moe.save_model(f"{folder}/experts", "qwen3_moe")
    backend = dict(backend="torch")
    references = {
        "dense": (dense, "dense", backend),
        "experts": (experts, "experts", {**EXPERT_KEYS, **backend}),
    }
    return world.run(gpu.in_turn, 1, references, {}, f"{folder}/one", timeout_s=200)[0]


def parity(folder: str, curves: dict, end: float) -> float:
    """The largest float32 difference from curves, of loss or relative of the gradient norm, over
    the suite's layouts of as many ranks as there are; of those of two ranks the ones whose
    messages differ from the others'. Infinite where one had not begun at `end`.
    """
    ranks, cells = dist.get_world_size(), {}
    for kind, where, keys in (
        ("dense", {**layouts.DENSE, **layouts.CUT}, {}),
        ("experts", layouts.EXPERTS, EXPERT_KEYS),
        ("packed", layouts.PACKED_LAYOUTS, PACKED),
    ):
        model = "experts" if kind == "experts" else "dense"
        for name, (needed, own) in where.items():
            if needed == ranks and (ranks > 2 or name in PARITY[kind]):
                cell = f"{kind}: {name}"
                compiled = gpu.COMPILED if cell in COMPILED_CELLS else {}
                cells[cell] = (f"{folder}/{model}", model, {**keys, **own, **compiled})
    worst = max(max(pair) for pair in gpu.in_turn(cells, curves, folder, end).values())
    start, keys = time.time(), dict(layouts.OVERLAP, async_save=True)
    resumed = gpu.resumed(f"{folder}/dense", f"{folder}/resumed", **keys)
    if dist.get_rank() == 0:
        gpu.say("resumed, dp overlap", ranks, *resumed, start)
    return max(worst, *resumed)


def main(names: list[str]) -> int:
    limits = [float(name.removeprefix("limit=")) for name in names if name.startswith("limit=")]
    end = time.time() + min(limits, default=3600.0)
    names = [name for name in names if not name.startswith("limit=")]
    unknown = [name for name in names if name not in CASES and name != "parity"]
    if unknown or "LOCAL_RANK" not in os.environ:
        print(f"{__doc__}\nunknown: {unknown}; cases: parity, {', '.join(CASES)}")
        return 2
    world.end_when_told()
    cases = [name for name in CASES if name in names or not names]
    folder = f"{tempfile.gettempdir()}/bench_gpus-{os.environ['MASTER_PORT']}"
    with_parity, curves = "parity" in names or not names, [None]
    if with_parity and os.environ["RANK"] == "0":  # in a process of its own, while others wait
        curves = [parity_on_one(folder)]
    from mca_lite import parallel

    parallel.start_process_group(600)
    failed = in_turn(cases, folder, end)
    if with_parity:
        dist.broadcast_object_list(curves)
        worst = parity(folder, curves[0], end)
        failed += not worst <= gpu.TOLERANCE
        if dist.get_rank() == 0:
            print(f"parity: worst {worst:.1e}, expected at most {gpu.TOLERANCE}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # tearing down the groups of thirteen layouts takes half a minute
