"""torch's profiler over some steps of a run: a trace of each rank, and a table by kind of kernel.

On a GPU the history of its memory is recorded until then too, with the place of each allocation in
the code: memory_rank0.pickle has it, of the last profiled step or of the moment when memory ran
out. Runs without profile_steps record nothing and are not slowed down.
"""

import re
import time
from pathlib import Path

import torch

from . import parallel
from .trainer_callbacks import TrainerCallback

FOLDER = "profile"  # in output_dir
_MAX_ALLOCATIONS = 200_000  # the last ones, whose places are kept
_OTHER = "other"
# the kind of a kernel, or of an operation of the CPU, by its name: the first row that fits counts.
# A rank of gloo waits within the autograd function that communicates.
_KINDS = (
    ("communication", "nccl|gloo|c10d|ParallelRegion|AsyncCommunication"),
    ("attention", "attention|flash|fmha|sdpa"),
    ("matmul", r"gemm|nvjet|cutlass|::(add|baddb|b)?mm\b|matmul|linear\b|grouped_mm"),
    ("optimizer", "adam|sgd|optimizer|multi_tensor|foreach"),
    ("norm, elementwise", "triton_"),  # their names say copy too
    ("copy", r"memcpy|memset|copy|\bcat\b|CatArray|clone|contiguous|::fill_|FillFunctor"),
    (
        "norm, elementwise",
        "norm|elementwise|reduce|silu|swiglu|softmax|TokenLosses|::(mul|add|sub|div|pow|sum|mean"
        "|neg|exp|log|rsqrt|sqrt|where|masked_fill|max|min|gelu)",
    ),
)


class Profiler(TrainerCallback):
    """Profiles the steps from `first` to `last`, counted from 1, on every rank."""

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self.running: torch.profiler.profile | None = None
        self.began = self.since = 0

    def on_train_begin(self, args, state, control, **kwargs):
        if torch.cuda.is_available() and state.global_step < self.last:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MAX_ALLOCATIONS)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.running is None and self.first <= state.global_step + 1 <= self.last:
            self.running = torch.profiler.profile(acc_events=True)  # False warns
            self.running.start()
            self.began, self.since = time.perf_counter(), state.global_step

    def on_step_end(self, args, state, control, trainer, **kwargs):
        if state.global_step >= self.last:
            self.on_train_end(args, state, control, trainer)

    def on_train_end(self, args, state, control, trainer, **kwargs):
        if self.running is None:
            return
        folder = Path(args.output_dir) / FOLDER
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds, profile, self.running = time.perf_counter() - self.began, self.running, None
        profile.stop()
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"trace_rank{parallel.rank()}.json.gz"))
        dump_memory(folder)
        if parallel.is_main():
            steps = f"profile of steps {self.since + 1} to {state.global_step}, rank 0"
            head = f"{steps}, {seconds:.2f} s; traces of all ranks are in {folder}"
            trainer.report.print("\n".join([head, *table(profile.key_averages(), seconds)]))


def dump_memory(folder: Path) -> Path | None:
    """Write what this rank's GPU memory holds, with its history where that is recorded, which ends
    here -> the file, which pytorch.org/memory_viz shows; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"memory_rank{parallel.rank()}.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(None)  # a process that ends while it goes on crashes
    return path


def kind_of(name: str) -> str:
    """The kind of a kernel or an operation by its name."""
    fitting = (kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE))
    return next(fitting, _OTHER)


def table(events, seconds: float) -> list[str]:
    """Lines: the time of each kind with its share of `seconds`, and its longest kernel; of kernels
    where a GPU was seen, else of operations without those that they call."""
    cuda = torch.autograd.DeviceType.CUDA
    on_gpu = [one for one in events if one.device_type == cuda and not one.is_user_annotation]
    times: dict[str, dict[str, float]] = {}
    for one in on_gpu or events:
        spent = (one.self_device_time_total if on_gpu else one.self_cpu_time_total) / 1e6
        of_kind = times.setdefault(kind_of(one.key), {})
        of_kind[one.key] = of_kind.get(one.key, 0.0) + spent
    sums = {kind: sum(of_kind.values()) for kind, of_kind in times.items()}
    lines = []
    for kind in sorted(sums, key=lambda kind: -sums[kind]):
        longest = max(times[kind], key=lambda name: times[kind][name])
        share = sums[kind] / seconds
        lines.append(f"  {kind:18} {sums[kind] * 1e3:9,.1f} ms {share:6.1%}  {longest:.60}")
    between = max(0.0, seconds - sum(sums.values()))
    idle = "no kernel runs" if on_gpu else "Python between them"
    return [*lines, f"  {idle:18} {between * 1e3:9,.1f} ms {between / seconds:6.1%}"]
