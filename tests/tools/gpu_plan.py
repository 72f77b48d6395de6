"""Compare `plan` with a few steps of runs on one GPU: `make gpu ARGS=plan`.

The shapes of bench_gpu.py with weights that are drawn, its rows and micro-batches, two of
them a step. Memory within TOLERANCE of the peak decides the exit code; speed is only printed.
"""

import time
from dataclasses import replace

import torch

from tests.shared import world

from . import bench_gpu

CASES = "1.5B", "4B"
TOLERANCE = 0.1  # of the peak
STEPS, SKIP = 6, 3
GIB = 2**30


def planned(name: str, world_size: int = 1, **keys):
    """(arguments, config, RankMemory) of a case of bench_gpu.py, keys of TrainingArguments beside
    its own."""
    from mca_lite import TrainingArguments, part_lora, tool_plan_memory
    from mca_lite.model_config import from_hf_config

    case = bench_gpu.CASES[name]
    finetuning = None
    own = dict(
        bf16=True,
        transformer_impl="local",
        per_device_train_batch_size=case["mbs"],
        gradient_accumulation_steps=case["rows"] // case["mbs"],
    )
    args = TrainingArguments(output_dir="unused", **{**own, **keys})
    config = from_hf_config(bench_gpu.hf_config(case["shape"]), args)
    if case.get("lora"):
        spec = part_lora.plan(config, part_lora.LoraSpec(rank=case["lora"]))
        finetuning = part_lora.Lora(spec)
    tensors = tool_plan_memory.ModelTensors(config, finetuning)
    length = case.get("s", 4096) * (2 if "pairs" in case else 1)
    memory = tool_plan_memory.rank_memory(args, config, tensors, 0, length, world_size, True)
    if "pairs" in case:
        memory = replace(memory, reference=memory.weights)
    return args, config, memory


def held(name: str) -> tuple[float, float]:
    """On one rank: (bytes at the peak, seconds of a step) of a case, trained for a few steps."""
    case = bench_gpu.CASES[name]
    clock, *_ = bench_gpu.run_ours(
        case["shape"],
        case["mbs"],
        2 * case["mbs"],
        64 if bench_gpu.TINY else 4096,
        STEPS,
        keys=dict(transformer_impl="local"),
    )
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else float("nan")
    return peak, clock.median(SKIP)


def speeds(args, config, memory, seconds: float) -> str:
    """Tokens a second as planned, where the GPU's rates are known, and as measured."""
    from mca_lite.tool_plan import RATES, step_time

    tokens, gpu = args.train_global_batch_size * 4096, torch.cuda.get_device_name()
    rates = next((rates for name, rates in RATES.items() if name in gpu), None)
    told = "not planned on this GPU"
    if rates is not None:
        told = f"planned {tokens / step_time(args, config, memory, [4096], 1, rates).total:,.0f}"
    return f"tokens/s {told}, measured {tokens / seconds:,.0f}"


def line(name: str, total: float, peak: float) -> tuple[bool, str]:
    """(True if the plan is right, the words) of a case that was planned and held so many bytes."""
    off = total / peak - 1
    words = f"plan {name:5} planned {total / GIB:6.2f} GiB, held {peak / GIB:6.2f} ({off:+.1%})"
    return abs(off) <= TOLERANCE, words


def main() -> int:
    """Train the cases that fit this GPU -> 1 where the plan of one is wrong, or none fits."""
    room, right = torch.cuda.get_device_properties(0).total_memory, []
    for name in CASES:
        start = time.time()
        args, config, memory = planned(name, gradient_accumulation_steps=2)
        if memory.total > 0.94 * room:
            need = f"{memory.total / GIB:.0f} of {room / GIB:.0f} GiB"
            print(f"plan {name:5} left out: it needs {need}", flush=True)
            continue
        [(peak, seconds)] = world.run(held, 1, name, timeout_s=150)
        is_right, words = line(name, memory.total, peak)
        right.append(is_right)
        words += f", {speeds(args, config, memory, seconds)}"
        print(f"{words}, {time.time() - start:.0f} s", flush=True)
    print(f"plan: {sum(right)} of {len(right)} within {TOLERANCE:.0%}", flush=True)
    return int(not right or not all(right))
