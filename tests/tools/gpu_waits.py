"""Lines in which the host waits for the GPU: WAITS=1 python -m tests.tools.bench_gpu "0.5B" ours

torch warns of each synchronisation it knows: reads of numbers, copies from memory without pinning.
A wait for an event is none of these: parallel.HostCopy's is one on purpose, once or twice a step.
"""

import sys
import traceback
import warnings
from collections import Counter

import torch

found: Counter = Counter()


def watch() -> None:
    """Print each new place of a wait from here on, to stderr."""
    warnings.simplefilter("always")
    warnings.showwarning = _show
    torch.cuda.set_sync_debug_mode("warn")


def _show(message, *args, **kwargs) -> None:
    if "synchronizing CUDA operation" not in str(message):
        return
    frames = [
        frame for frame in traceback.extract_stack() if "-packages/torch" not in frame.filename
    ]
    place = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in frames[-2:-6:-1])
    found[place] += 1
    if found[place] == 1:
        print(f"wait: {place}: {frames[-2].line}", file=sys.stderr, flush=True)
