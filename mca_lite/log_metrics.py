"""Metrics of the log: their names and forms, and the lines of trainer_log.jsonl."""

import contextlib
import json
import math
import operator
import os
import statistics
from collections.abc import Callable, Sequence
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

    chart: the title of its chart on the page, None for none. figure: the number that stands for all
    values of a run, on the page and in `watch`. least: the least value that the progress line
    shows.
    """

    key: str
    name: str
    form: Callable[[Any], str] = "{:.4f}".format
    chart: str | None = None
    figure: Callable[[Sequence[Any]], Any] = operator.itemgetter(-1)
    least: float = -math.inf


_LOSS = "Loss"
_REWARDS = "Rewards"
_LOGPS = "Log-probabilities of answers"
_LOADS = "Experts' load over the layer's mean"
_LAGS = "Seconds a step by which the slowest rank is behind the fastest"
_percent = "{:.1%}".format
_load = "{:.2f} x mean".format
_count = "{:,}".format
_lag = "+{:.2f} s".format
PHASES = ("data", "model", "update", "save", "callbacks")  # of a step, without waits for ranks
# In the order of the progress line, and of the page. A key without a row is shown as it is, and has
# a chart of its own.
PROGRESS = (
    Metric("epoch", "epoch", "{:.2f}".format),
    Metric("loss", "loss", chart=_LOSS),
    Metric("eval_loss", "eval_loss", chart=_LOSS),
    Metric("rewards/chosen", "reward chosen", chart=_REWARDS),
    Metric("rewards/rejected", "reward rejected", chart=_REWARDS),
    Metric("rewards/margins", "reward margin", chart=_REWARDS),
    Metric(
        "rewards/accuracies",
        "ranked right",
        _percent,
        "Pairs ranked right; in KTO answers with rewards of their label",
    ),
    Metric("logps/chosen", "logp chosen", "{:.2f}".format, _LOGPS),
    Metric("logps/rejected", "logp rejected", "{:.2f}".format, _LOGPS),
    Metric("grad_norm", "grad_norm", "{:.2f}".format, "Gradient norm, before clipping"),
    Metric("learning_rate", "lr", "{:.1e}".format, "Learning rate"),
    Metric("expert_load_max", "experts, most", _load, _LOADS),
    Metric("expert_load_min", "experts, least", _load, _LOADS),
    Metric("tokens_per_second", "tokens/s", format_rate, "Tokens per second", statistics.median),
    Metric("mfu", "MFU", _percent, "Share of the peak (MFU)", statistics.median),
    Metric("slowest_rank", "slowest rank", str, figure=statistics.mode),
    *(
        Metric(f"lag_{name}_s", f"in {name}", _lag, _LAGS, statistics.median, least=0.005)
        for name in PHASES
    ),
)
METRICS = (
    *PROGRESS,
    Metric("step_time_s", "step time", "{:.2f} s".format, "Seconds per step", statistics.median),
    Metric(
        "reduction_s",
        "reduction",
        "{:.2f} s".format,
        "Seconds per step of reducing gradients",
        statistics.median,
    ),
    Metric(
        "padding_fraction",
        "padding",
        _percent,
        "Padding, share of all positions",
        statistics.median,
    ),
    Metric(
        "peak_memory_gib", "memory", "{:.2f} GiB".format, "Peak memory of the main rank, GiB", max
    ),
    Metric("consumed_tokens", "tokens", _count),
    Metric("consumed_samples", "samples", _count),
    # their curves have the shape of tokens_per_second's
    Metric(
        "tokens_per_second_per_device", "tokens/s a device", format_rate, figure=statistics.median
    ),
    Metric("tflops_per_device", "TFLOP/s a device", "{:.1f}".format, figure=statistics.median),
)


def metric_of(key: str) -> Metric:
    """The row of a key, or a new one. An evaluation's key (eval_loss, eval_<data set>_loss) has the
    row of the key in training."""
    name = key.removeprefix("eval_")
    for metric in METRICS:
        of_data_set = name != key and name.endswith(f"_{metric.key}")
        if name == metric.key or of_data_set:
            return metric
    return Metric(name, name, "{:.4g}".format, name)


# -- lines of a file


def is_number(value: Any) -> bool:
    """True for a finite number whose differences and quotients with others are finite too."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and (value == 0 or 1e-300 <= abs(value) <= 1e300)


def is_count(value: Any) -> bool:
    """True for a whole number from 0 to MOST."""
    return type(value) is int and 0 <= value <= MOST


def log_line(record: dict) -> dict[str, Any]:
    """A line of the log: its step, and the keys that have numbers; {} without step."""
    if not is_count(record.get("step")):
        return {}
    return {key: value for key, value in record.items() if is_number(value)}


def read_lines(path: str | os.PathLike, convert: Callable[[dict], dict] = dict) -> list[dict]:
    """The records of a .jsonl file that another process may be writing, [] without a file.

    convert: from a line's object to its record, an empty one for none. Lines that are no objects,
    as a last one without its end, are left out. OSError or ValueError where it cannot be read.
    """
    path = Path(path)
    if not is_there(path):
        return []
    records = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):  # JSON, UTF-8; nested too deep
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(convert(record))
    return list(filter(None, records))
