"""Metrics of the log: their names and forms, and the lines of trainer_log.jsonl."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .files import is_there

MOST = 10**15  # steps, tokens, seconds since 1970


def format_duration(seconds: float) -> str:
    """58s, 1m20s or 2h05m."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minute}m{second:02d}s" if minutes else f"{second}s"


def format_rate(per_second: float) -> str:
    """850, 12.3k or 1.2M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if per_second >= limit:
            return f"{per_second / limit:.1f}{unit}"
    return f"{per_second:.0f}"


class Metric(NamedTuple):
    """A number of the log: its key there, its name and form for a reader.

    chart: the title of its chart on the page, None for none. tiles: the statistics of the page's
    tiles. in_line: shown in the progress line.
    """

    key: str
    name: str
    form: Callable[[Any], str] = "{:.4f}".format
    chart: str | None = None
    tiles: tuple[str, ...] = ()
    in_line: bool = True


_LOSS = "Loss"
_REWARDS = "Rewards"
_LOGPS = "Log-probabilities of answers"
_LOADS = "Experts' load over the layer's mean"
_percent = "{:.1%}".format
_load = "{:.2f} x mean".format
_count = "{:,}".format
# In the order of the progress line and of the page. A key without a row is shown as it is, and has
# a chart of its own.
METRICS = (
    Metric("step", "step", in_line=False),
    Metric("epoch", "epoch", "{:.2f}".format),
    Metric("loss", "loss", chart=_LOSS, tiles=("last",)),
    Metric("eval_loss", "eval_loss", chart=_LOSS, tiles=("last", "best")),
    Metric("rewards/chosen", "reward chosen", chart=_REWARDS),
    Metric("rewards/rejected", "... rejected", chart=_REWARDS),
    Metric("rewards/margins", "... margin", chart=_REWARDS),
    Metric(
        "rewards/accuracies",
        "pairs ahead",
        _percent,
        "Pairs with the chosen answer ahead",
        ("last",),
    ),
    Metric("logps/chosen", "logp chosen", "{:.2f}".format, _LOGPS),
    Metric("logps/rejected", "... rejected", "{:.2f}".format, _LOGPS),
    Metric("grad_norm", "grad_norm", "{:.2f}".format, "Gradient norm, before clipping"),
    Metric("learning_rate", "lr", "{:.1e}".format, "Learning rate of the next step"),
    Metric("expert_load_max", "experts, most", _load, _LOADS),
    Metric("expert_load_min", "experts, least", _load, _LOADS),
    Metric("expert_load", "experts", in_line=False),  # [layers, experts], a picture on the page
    Metric("tokens_per_second", "tokens/s", format_rate, "Tokens per second", ("median",)),
    Metric("mfu", "MFU", _percent, "Share of the peak (MFU)", ("median",)),
    Metric("step_time_s", "step", "{:.2f} s".format, "Seconds per step", in_line=False),
    Metric(
        "padding_fraction",
        "padding",
        _percent,
        "Padding, share of all positions",
        ("median",),
        in_line=False,
    ),
    Metric(
        "peak_memory_gib",
        "memory",
        "{:.2f} GiB".format,
        "Peak memory of the main rank, GiB",
        ("peak",),
        in_line=False,
    ),
    Metric("consumed_tokens", "tokens", _count, tiles=("last",), in_line=False),
    Metric("consumed_samples", "samples", _count, in_line=False),
    # their curves have the shape of tokens_per_second's
    Metric("tokens_per_second_per_device", "tokens/s a device", format_rate, in_line=False),
    Metric("tflops_per_device", "TFLOP/s a device", "{:.1f}".format, in_line=False),
)


# -- lines of a file


def is_number(value: Any) -> bool:
    """True for a finite number whose differences and quotients with others are finite too."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and (value == 0 or 1e-300 <= abs(value) <= 1e300)


def is_count(value: Any) -> bool:
    """True for a whole number from 0 to MOST."""
    return type(value) is int and 0 <= value <= MOST


def _is_loads(value: Any) -> bool:
    """True for numbers [layers, experts], at least one of each."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(row, list) and row and all(map(is_number, row)) for row in value)


def log_line(record: dict) -> dict[str, Any]:
    """A line of the log: its step, the keys that have numbers, and expert_load; {} without step."""
    if not is_count(record.get("step")):
        return {}
    fits = {"expert_load": _is_loads}
    return {key: value for key, value in record.items() if fits.get(key, is_number)(value)}


class LineFile:
    """The records of a .jsonl file that another process may be writing.

    convert: from a line's object to its record, an empty one for none. read() takes what was added:
    a last line without its end waits for the next call, lines that are no objects are left out, and
    a file in the place of the one before (of a resumed run, or a new one) is read from its
    beginning. No file has no records. OSError or ValueError where it cannot be read.
    """

    def __init__(self, path: str | os.PathLike, convert: Callable[[dict], dict] = dict):
        self.path = Path(path)
        self._convert = convert
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self.records: list[dict] = []
        self.changed_at: float | None = None  # seconds since 1970; None without a file
        self._inode = inode
        self._offset = 0

    def read(self) -> list[dict]:
        if not is_there(self.path):
            self._begin(0)
            return self.records
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._begin(status.st_ino)
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
        self.changed_at = status.st_mtime
        self._offset += len(whole + end)
        for line in whole.split(b"\n"):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # of JSON, or of UTF-8; nested too deep
                continue
            record = self._convert(record) if isinstance(record, dict) else None
            if record:
                self.records.append(record)
        return self.records
