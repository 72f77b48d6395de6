"""The log's metrics: their names and formats, and the lines of trainer_log.jsonl."""

import contextlib
import json
import math
import operator
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .files import PathLike, is_there

MOST = 10**15  # the largest count of steps or tokens, or seconds since 1970


def format_duration(seconds: float) -> str:
    """Seconds as 58s, 1m20s or 2h05m."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minute}m{second:02d}s" if minutes else f"{second}s"


def format_rate(per_second: float) -> str:
    """A rate as 850, 12.3k or 1.2M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if per_second >= limit:
            return f"{per_second / limit:.1f}{unit}"
    return f"{per_second:.0f}"


class Metric(NamedTuple):
    """One value of the log, and its display. key: its key in the log. name, form: its name for a
    reader, and a function that formats it.

    chart: the title of its chart on the page of runs; None: no chart. figure: computes, from all
    values of a run, the one that stands for the run, on the page and in `watch`. least: smaller
    values are not shown in the progress line."""

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
PHASES = (
    "data",
    "model",
    "update",
    "save",
    "callbacks",
)  # the phases of a step, without waiting for other ranks
# In the order of the progress line and of the page. metric_of() makes rows for other keys.
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
    # no charts, because these curves look like tokens_per_second's
    Metric(
        "tokens_per_second_per_device", "tokens/s a device", format_rate, figure=statistics.median
    ),
    Metric("tflops_per_device", "TFLOP/s a device", "{:.1f}".format, figure=statistics.median),
)


# parts of a loss, with a chart each
_PARTS = [Metric(key, key, "{:.4g}".format, key) for key in ("kd_loss", "sft_loss", "mtp_loss")]


def metric_of(key: str) -> Metric:
    """Find how a value of the log is shown -> its Metric, mostly a row of METRICS. key: in the log.
    An evaluation's key, such as eval_loss or eval_<dataset>_loss, gets the row for the key in which
    it ends. kd_loss, sft_loss and mtp_loss have charts of their own, with their evaluations.

    There are new rows for the loss of a dataset (loss/<dataset>), drawn in the chart of the loss,
    and for an unknown key: its name and chart are the key without eval_."""
    name = key.removeprefix("eval_")
    if name.startswith("loss/"):
        return Metric(name, name, chart=_LOSS)
    for metric in (*_PARTS, *METRICS):
        of_data_set = name != key and name.endswith(f"_{metric.key}")
        if name == metric.key or of_data_set:
            return metric
    return Metric(name, name, "{:.4g}".format, name)


# -- lines of a file


def is_number(value: Any) -> bool:
    """True for an int or float, but no bool, that is 0 or has a magnitude from 1e-300 to 1e300. So
    NaN, infinity, and numbers whose sums might overflow are not taken from a log."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and (value == 0 or 1e-300 <= abs(value) <= 1e300)


def is_count(value: Any) -> bool:
    """True for an int from 0 to MOST."""
    return type(value) is int and 0 <= value <= MOST


def log_line(record: dict[str, Any]) -> dict[str, Any]:
    """Pick the numbers out of a line of trainer_log.jsonl, the step included -> {key: number}; {}
    if the line has no valid step. record: the line's JSON object."""
    if not is_count(record.get("step")):
        return {}
    return {key: value for key, value in record.items() if is_number(value)}


def read_lines(
    path: PathLike, convert: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> list[dict[str, Any]]:
    """Read a .jsonl file that another process may still be writing -> its records; [] if there is
    no file. A line that is not a JSON object, such as an unfinished last line, is skipped.

    convert: turns a line's object into its record; empty records are left out. OSError if the file
    cannot be read, ValueError for a folder, pipe or device."""
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
