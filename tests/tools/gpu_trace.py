"""The time of a step on a GPU, from torch's profiler: kernels by kind, exposed messages, idle time.

TRACE=1 in the environment adds it to each line of bench_gpus.py and bench_gpu.py.
"""

import re
from collections import defaultdict

import torch

# in this order
KINDS = {
    "messages": "nccl",
    "copies": "Memcpy|Memset|CatArray|direct_copy|copy_kernel",
    "attention": "sdpa|flash|fmha|fprop_f16|dgrad_f16|bprop_f16",
    "products": "gemm|cutlass|nvjet|xmma|cublas|splitK",
    "optimizer": "multi_tensor|adam|Adam",
    "fused by torch.compile": "^triton_",
}
OTHERS = "other kernels"


def profiler() -> torch.profiler.profile:
    """A profiler of the device alone, which slows the host little; without one, of the host."""
    kinds = torch.profiler.ProfilerActivity
    kind = kinds.CUDA if torch.cuda.is_available() else kinds.CPU
    return torch.profiler.profile(activities=[kind])


def kind_of(name: str) -> str:
    """The kind of a kernel by its name."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, name):
            return kind
    return OTHERS


def union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans (start, end) in order, joined where they overlap."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def length(spans: list[tuple[int, int]]) -> int:
    """The length of spans, what overlaps counted once."""
    return sum(end - start for start, end in union(spans))


def account(profile) -> dict:
    """Milliseconds of the profiled span of this rank: `span`; `busy`, any kernel running;
    `idle`, none; `exposed`, messages alone; and the sums by kind. `launches` is a count."""
    spans = defaultdict(list)
    launches = 0
    for event in profile.profiler.kineto_results.events():
        name = event.name()
        launches += bool(re.match("cu(da)?Launch|cudaGraphLaunch", name))
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns():
            start = event.start_ns()
            spans[kind_of(name)].append((start, start + event.duration_ns()))
    everything = [span for of_kind in spans.values() for span in of_kind]
    if not everything:
        return {}
    computing = [span for kind in spans if kind != "messages" for span in spans[kind]]
    whole = max(end for _, end in everything) - min(start for start, _ in everything)
    found = {kind: sum(end - start for start, end in spans[kind]) for kind in (*KINDS, OTHERS)}
    found.update(
        span=whole,
        busy=length(everything),
        idle=whole - length(everything),
        exposed=length(everything) - length(computing),
    )
    return {**{name: round(ns / 1e6, 1) for name, ns in found.items()}, "launches": launches}
