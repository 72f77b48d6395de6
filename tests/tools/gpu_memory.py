"""GPU memory at the peak of a step: how much each line of this package allocated of it."""

import collections
from typing import Any

import torch

_EVENTS = 1_000_000  # allocations and frees kept
_at_start = 0


def watch() -> None:
    """Record each allocation from now on. Tensors allocated before count as one number."""
    global _at_start
    torch.cuda.synchronize()
    _at_start = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(
        enabled="all", context="alloc", stacks="python", max_entries=_EVENTS
    )


def line_of(frames: list[dict[str, Any]]) -> str:
    """ "file:line function" of the innermost frame that is in mca_lite; else "elsewhere"."""
    for frame in frames:
        _, found, path = frame["filename"].rpartition("mca_lite/")
        if found:
            return f"{path}:{frame['line']} {frame['name']}"
    return "elsewhere"


def at_peak(events: list[dict[str, Any]], start: int) -> tuple[int, dict[str, int]]:
    """(bytes allocated at the peak, {line of code: bytes of them}), from the allocator's events.
    Bytes that were allocated before the events are named "before". start: their number."""
    sizes: dict[int, tuple[int, str]] = {}
    now = most = start
    before = start
    peak: dict[str, int] = {}
    held: collections.Counter[str] = collections.Counter()
    rises = False  # a peak is copied once memory falls
    for event in events:
        size, address = event["size"], event["addr"]
        if event["action"] == "alloc":
            line = line_of(event.get("frames", []))
            sizes[address] = size, line
            held[line] += size
            now += size
            if now > most:
                most, rises = now, True
        elif event["action"] == "free_requested":
            if rises:
                peak = {"before": before, **held}
                rises = False
            now -= size
            if address in sizes:
                held[sizes.pop(address)[1]] -= size
            else:
                before -= size
    if rises:
        peak = {"before": before, **held}
    return most, peak


def say(rows: int = 24) -> None:
    """Print the peak since watch(), and the lines of code that hold most of it, in GiB."""
    torch.cuda.synchronize()
    [events, *_] = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(enabled=None)
    most, peak = at_peak(events, _at_start)
    print(f"peak {most / 2**30:.2f} GiB in {len(events)} events")
    for line, size in sorted(peak.items(), key=lambda pair: -pair[1])[:rows]:
        print(f"  {size / 2**30:8.3f}  {line}", flush=True)
