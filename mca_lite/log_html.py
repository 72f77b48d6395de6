"""report.html: one or several runs on a page; and what all pages have in common, which need nothing
but themselves, no script and no net.

Curves are stretched SVGs with texts of HTML round them, so that they can be read at every width.
"""

import html
import io
import json
import math
import operator
import os
import re
import reprlib
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .args_values import read_config_file
from .errors import ConfigError
from .files import (
    GENERATIONS_NAME,
    LOSS_PLOT_NAME,
    PAGE_NAME,
    RUN_CONFIG_NAME,
    RUN_SUMMARY_NAME,
    TRAINER_LOG_NAME,
    describe_error,
    is_there,
    printable,
    read_json,
    write_file,
)
from .log_metrics import MOST, LineFile, format_duration, format_rate, is_count, is_number, log_line

# -- reading a run

# Without a new line for so long a run counts as hung: before its first line (compiling, the pass of
# a reference), and later at least, or as many times what it needs from one line to the next.
_FIRST_LINE_S = 900
_QUIET_S = 120
_QUIET_LINES = 5


def smooth(values: Iterable[float], weight: float = 0.9) -> list[float]:
    """Returns the running mean in which a value counts `weight` times less with each step since.

    m_t = sum_i w^(t-i) x_i / sum_i w^(t-i): the first values are not pulled to zero.
    """
    total = 0.0
    norm = 0.0
    means = []
    for value in values:
        total = weight * total + value
        norm = weight * norm + 1.0
        means.append(total / norm)
    return means


# -- what somebody's files hold: checked once, here


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MOST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_sections(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(part, dict) for part in value.values())


def _sample(record: Any) -> dict[str, str]:
    keys = ("prompt", "answer", "before", "expected")
    found = ((key, record.get(key)) for key in keys)
    return {key: value for key, value in found if _is_text(value)}


def _as_text(value: Any) -> str:
    """A value as JSON, so that true is no text and no digit is lost; text as it is."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, skipkeys=True, default=str)
    except RecursionError:
        raise ValueError("a value is nested too deep to be shown") from None


def _texts(values: dict) -> dict[str, str]:
    return {key: _as_text(value) for key, value in values.items() if value is not None}


@dataclass(frozen=True)
class RunSummary:
    """run_summary.json, which log.Report keeps beside the log; None for what it does not say."""

    state: str | None = None
    max_steps: int | None = None
    first_step: int | None = None
    started: float | None = None  # seconds since 1970
    host: str | None = None
    pid: int | None = None
    sections: dict[str, dict[str, str]] | None = None


_SUMMARY: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "state": ("a text", _is_text),
    "max_steps": ("a number of steps", is_count),
    "first_step": ("a number of steps", is_count),
    "started": ("seconds since 1970", _is_time),
    "host": ("a text", _is_text),
    "pid": ("a process", is_count),
    "sections": ("names with their facts", _is_sections),
}


def read_summary(path: Path) -> RunSummary:
    """Returns what a run_summary.json says, nothing where there is none. ValueError where it is
    damaged or holds something else."""
    record = read_json(path) if is_there(path) else {}
    values = {name: record.get(name) for name in _SUMMARY}
    for name, (wanted, fits) in _SUMMARY.items():
        if values[name] is not None and not fits(values[name]):
            came = reprlib.repr(values[name])
            raise ValueError(f"{path}: {name}: expected {wanted}, got {came}")
    if values["sections"] is not None:
        values["sections"] = {name: _texts(part) for name, part in values["sections"].items()}
    return RunSummary(**values)


def read_config(path: Path) -> dict[str, str]:
    """Returns key -> text of a config.yaml, nothing where there is none. ValueError where it is
    damaged or stands for too much."""
    try:
        return _texts(read_config_file(path)) if is_there(path) else {}
    except ConfigError as error:
        raise ValueError(f"{path}: {error.problems[0].reason}") from None


class RunFolder:
    """What an output folder says of its run; call read() for what is new.

    records: the lines of its log, see log_line. problems: file name -> why it cannot be read, of
    those that were tried since. A folder that does not exist, or not yet, is a run without lines.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.name = printable(str(folder).rstrip("/") or "/", kept="")
        self._log = LineFile(self.folder / TRAINER_LOG_NAME, log_line)
        self.read()

    def read(self) -> "RunFolder":
        self.problems: dict[str, str] = {}
        self.summary = self._try(RUN_SUMMARY_NAME, read_summary, RunSummary())
        self.records = self._try(TRAINER_LOG_NAME, lambda path: self._log.read(), [])
        return self

    def _try(self, name: str, read: Callable[[Path], Any], otherwise: Any) -> Any:
        """What `read` makes of a file, or `otherwise` and a problem."""
        try:
            return read(self.folder / name)
        except (OSError, ValueError) as error:
            self.problems[name] = printable(describe_error(error), kept="")
            return otherwise

    def may_hold_a_run(self) -> bool:
        """False for a file, and for a folder with files none of which is a run's."""
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            return not isinstance(error, NotADirectoryError)
        runs = {RUN_CONFIG_NAME, RUN_SUMMARY_NAME, TRAINER_LOG_NAME}
        return not names or not runs.isdisjoint(names)

    def config(self) -> dict[str, str]:
        """config.yaml as it was written; {} where there is none."""
        return self._try(RUN_CONFIG_NAME, read_config, {})

    def samples(self) -> list[dict[str, str]]:
        """The answers in generations.jsonl: prompt, answer, and where known before, expected."""
        return self._try(GENERATIONS_NAME, lambda path: LineFile(path, _sample).read(), [])

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of each line where the key has a finite number."""
        return [(line["step"], line[key]) for line in self.records if key in line]

    def last(self, key: str) -> Any:
        """The key's newest value, None where no line has one."""
        return next((line[key] for line in reversed(self.records) if key in line), None)

    def keys(self) -> list[str]:
        """Every key of the log that has numbers, in the order in which they came up."""
        keys = dict.fromkeys(key for line in self.records for key in line)
        return [key for key in keys if key not in ("step", "epoch", "expert_load")]

    @property
    def step(self) -> int:
        return self.records[-1]["step"] if self.records else 0

    @property
    def max_steps(self) -> int | None:
        return self.summary.max_steps

    @property
    def seconds(self) -> float | None:
        """From the run's start, or its last resumption, to its last line."""
        if self.summary.started is None or self._log.changed_at is None:
            return None
        return self._log.changed_at - self.summary.started

    def quiet_s(self) -> float:
        """Since the last line, or since the start before there is one."""
        since = self._log.changed_at
        if not self.records and self.summary.started is not None:
            since = self.summary.started
        return 0.0 if since is None else time.time() - since

    def eta_s(self) -> float | None:
        """The seconds left, where every step takes what the steps since the start took."""
        if self.seconds is None or self.max_steps is None:
            return None
        done = self.step - (self.summary.first_step or 0)
        if done <= 0 or self.step >= self.max_steps:
            return None
        return max(0.0, self.seconds / done * (self.max_steps - self.step) - self.quiet_s())

    def state(self) -> str:
        """no run yet, running, hung?, failed, cannot be read and why, or how the run says that it
        ended: finished, interrupted; unknown of a log alone."""
        if self.problems:
            return f"cannot be read: {'; '.join(self.problems.values())}"
        state = self.summary.state
        pid = self.summary.pid
        if state is None:
            return "unknown" if self.records else "no run yet"
        if state != "running":
            return printable(state, kept="")
        is_here = self.summary.host == socket.gethostname()
        if is_here and pid is not None and not _lives(pid):
            return "failed"
        limit = _FIRST_LINE_S
        if self.records:
            steps = [line["step"] for line in self.records[-2:]]
            between = (steps[-1] - steps[0]) * (self.last("step_time_s") or 0)
            limit = max(_QUIET_S, _QUIET_LINES * between)
        return "hung?" if self.quiet_s() > limit else "running"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # or no number of a process
        return False
    except OSError:  # another user's
        pass
    return True


# -- pictures


def draw(args) -> None:
    """Draw report.html and training_loss.png of a run, as its TrainingArguments set them."""
    run = RunFolder(args.output_dir)
    if args.plot_loss:
        plot_loss(run, run.folder / LOSS_PLOT_NAME)
    if args.html_report:
        write_file(run.folder / PAGE_NAME, page([run]))


def plot_loss(run: RunFolder, path: Path) -> None:
    """Write a picture of loss, smoothed loss and eval_loss over the steps; needs matplotlib."""
    # Figure and Agg directly: pyplot would choose a backend for the whole process and keep every
    # figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss per token")
    trained = run.points("loss")
    evaluated = run.points("eval_loss")
    if trained:
        steps, losses = zip(*trained, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, label="loss")
        axes.plot(steps, smooth(losses), color="tab:blue", label="loss, smoothed")
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), color="tab:orange", marker="o", label="eval_loss")
    if trained or evaluated:
        axes.legend()
    axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    write_file(path, picture.getvalue())


# -- the page

# Title -> keys of the log; others get one each
_CHARTS = {
    "Loss": ("loss",),
    "Rewards": ("rewards/chosen", "rewards/rejected", "rewards/margins"),
    "Pairs with the chosen answer ahead": ("rewards/accuracies",),
    "Log-probabilities of answers": ("logps/chosen", "logps/rejected"),
    "Gradient norm, before clipping": ("grad_norm",),
    "Learning rate of the next step": ("learning_rate",),
    "Experts' load over the layer's mean": ("expert_load_max", "expert_load_min"),
    "Tokens per second": ("tokens_per_second",),
    "Share of the peak (MFU)": ("mfu",),
    "Seconds per step": ("step_time_s",),
    "Padding, share of all positions": ("padding_fraction",),
    "Peak memory of the main rank, GiB": ("peak_memory_gib",),
}
_NO_CHART = (  # shapes that others have already
    *("consumed_samples", "consumed_tokens"),
    *("tokens_per_second_per_device", "tflops_per_device"),
)
_MOST_POINTS = 300
_SMOOTHED_FROM = 60
_COLORS = 6

# of every page; its words are those of HTML that is XML too
_COMMON_STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --text: #1c2430; --soft: #5b6675;
 --line: #dfe3e8; --c0: #1f66d1; --c1: #c2570c; --c2: #0f7b4f; --c3: #a324a8; --c4: #0e7490;
 --c5: #b4232f; }
@media (prefers-color-scheme: dark) { :root { --back: #12161c; --card: #1b212a; --text: #e6eaf0;
 --soft: #9aa6b5; --line: #313a46; --c0: #6ea8ff; --c1: #f6a04d; --c2: #4cc38a; --c3: #d68bf0;
 --c4: #45c5dd; --c5: #ff8389; } }
body { margin: 0 auto; max-width: 80rem; padding: 1.25rem; background: var(--back);
 color: var(--text); font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 1.75rem 0 .6rem; }
h3 { font-size: .95rem; margin: 0 0 .3rem; }
p { margin: .2rem 0 1rem; }
p, th, dt, .tiles span { color: var(--soft); }
.tiles { display: grid; gap: .8rem;
 grid-template-columns: repeat(auto-fit, minmax(min(10rem, 44%), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
 padding: .7rem .9rem; min-width: 0; overflow-x: auto; }
.tiles b { display: block; font-size: 1.1rem; }
.tiles span { font-size: .82rem; }
""" + "".join(f".c{i} {{ color: var(--c{i}); }}\n" for i in range(_COLORS))

_STYLE = """
.charts { display: grid; gap: .8rem;
 grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); }
.legend, .plot { color: var(--soft); }
.legend { font-size: .82rem; }
.legend span { margin-right: .9rem; display: inline-block; }
.legend i { display: inline-block; width: .8rem; height: .2rem; margin-right: .35rem;
 vertical-align: middle; background: currentColor; }
.legend b { color: var(--text); }
.plot { position: relative; height: 11rem; margin: .5rem .6rem 1.5rem 3.1rem; font-size: .75rem; }
.plot svg { position: absolute; width: 100%; height: 100%; overflow: visible; }
.x, .y { position: absolute; white-space: nowrap; }
.y { right: 100%; margin-right: .4rem; transform: translateY(-50%); }
.x { top: 100%; margin-top: .2rem; transform: translateX(-50%); }
path, line { fill: none; stroke: currentColor; stroke-width: 1.8px; stroke-linejoin: round;
 vector-effect: non-scaling-stroke; }
.raw { opacity: .35; stroke-width: 1.2px; }
.dash { stroke-dasharray: 6 4; }
.dots { stroke-width: 7px; stroke-linecap: round; }
.grid line { stroke: var(--line); stroke-width: 1px; }
.hit rect { fill: transparent; }
.hit line { visibility: hidden; stroke-width: 1px; }
.hit:hover line { visibility: visible; }
.over { fill: var(--c1); }
.under { fill: var(--c0); }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; font-weight: 400;
 border-top: 1px solid var(--line); min-width: 5rem; white-space: pre-wrap; }
tr > th:first-child { width: 14rem; }
.charts tr > th:first-child { width: 36%; }
.right { color: var(--c2); font-weight: 600; }
"""


class _Curve(NamedTuple):
    name: str
    points: list[tuple[int, float]]
    color: int
    style: str = ""


def page(runs: Sequence[RunFolder]) -> str:
    """The page of one run, or of several beside each other, as HTML that is XML too."""
    named = _labels(runs)
    title = " and ".join(run.name for run in runs)
    several = len(named) > 1
    configs = {name: run.config() for name, run in named.items()}
    answers = _samples(named)  # before the figures, which say what could not be read
    if len(runs) > 2:
        title = f"{len(runs)} runs"
    drawn = time.strftime("%Y-%m-%d %H:%M:%S")
    parts = [f"<h1>{esc(title)}</h1><p>Drawn on {drawn}.</p>"]
    if several:
        figures = {name: _figures(run) for name, run in named.items()}
        parts.append(_section("The runs", _beside(figures)))
    else:
        parts.append(tiles((name, esc(text)) for name, text in _figures(runs[0]).items()))
    parts.append(_cards("Curves", _charts(named)))
    for name, run in named.items():
        of = f": {name}" if several else ""
        parts.append(_section(f"Load of experts{of}", _loads(run)))
    parts.append(_section("Answers before and after", answers))
    facts = {name: run.summary.sections or {} for name, run in named.items()}
    tables = []
    for part in dict.fromkeys(part for sections in facts.values() for part in sections):
        if table := _beside({name: found.get(part, {}) for name, found in facts.items()}):
            tables.append(f"<h3>{esc(part.capitalize())}</h3>{table}")
    parts.append(_cards("The run as it began", tables))
    heading = "Keys that differ" if several else "Configuration"
    parts.append(_section(heading, _beside(configs, only_differing=several)))
    again = ""
    if any(run.state() == "running" for run in runs):
        again = "<meta http-equiv='refresh' content='30'/>"
    return document(title, _STYLE, parts, again)


def document(title: str, style: str, parts: Iterable[str], head: str = "") -> str:
    """A page that needs nothing besides itself, light or dark as its reader's screen is. style:
    beside what all pages have; parts: HTML of its body."""
    return (
        f"<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'/>{head}"
        "<meta name='viewport' content='width=device-width, initial-scale=1'/>"
        f"<title>{esc(title)}</title><style>{_COMMON_STYLE}{style}</style></head>\n"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _labels(runs: Sequence[RunFolder]) -> dict[str, RunFolder]:
    """Label -> run: of several the part of the path that not all have."""
    if len(runs) == 1:
        return {runs[0].name: runs[0]}
    paths = [os.path.abspath(run.folder) for run in runs]
    common = os.path.commonpath(paths)
    return {os.path.relpath(path, common): run for path, run in zip(paths, runs, strict=True)}


def _figures(run: RunFolder) -> dict[str, str]:
    """What a run's tiles say: its state, and where its log's numbers have come to."""
    out = {"state": run.state(), "step": f"{run.step:,}"}
    if run.max_steps is not None:
        out["step"] += f" of {run.max_steps:,}"
    if run.seconds is not None:
        out["time"] = format_duration(run.seconds)
    for name, key, choose, form in _FIGURES:
        values = [value for _, value in run.points(key)]
        if values:
            out[name] = form(choose(values))
    return out


def _number(value: float) -> str:
    """A number of the log as the page writes it: four digits that count."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


_last = operator.itemgetter(-1)
# name -> key of the log, which of its values, how that is written
_FIGURES = (
    ("last loss", "loss", _last, _number),
    ("last eval_loss", "eval_loss", _last, _number),
    ("best eval_loss", "eval_loss", min, _number),
    ("pairs ahead", "rewards/accuracies", _last, "{:.1%}".format),
    ("tokens", "consumed_tokens", _last, "{:,}".format),
    ("tokens/s, median", "tokens_per_second", statistics.median, format_rate),
    ("MFU, median", "mfu", statistics.median, "{:.1%}".format),
    ("padding, median", "padding_fraction", statistics.median, "{:.1%}".format),
    ("peak memory", "peak_memory_gib", max, "{:.2f} GiB".format),
)


def esc(text: Any) -> str:
    """Text as HTML; what no page may hold (control characters, halves of pairs) is replaced."""
    plain = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "\ufffd", str(text))
    return html.escape(plain)


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Cards of (name, HTML) beside each other."""
    cards = "".join(
        f"<div class='card'><span>{esc(name)}</span><b>{body}</b></div>" for name, body in figures
    )
    return f"<div class='tiles'>{cards}</div>"


def _section(title: str, body: str) -> str:
    return f"<h2>{esc(title)}</h2><div class='card'>{body}</div>" if body else ""


def _cards(title: str, bodies: list[str]) -> str:
    cards = "".join(f"<div class='card'>{body}</div>" for body in bodies)
    return f"<h2>{esc(title)}</h2><div class='charts'>{cards}</div>" if bodies else ""


def _beside(columns: dict[str, dict[str, str]], only_differing: bool = False) -> str:
    """A table with a row for each name and a column for each run; what differs is bold."""
    rows = []
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        values = [column.get(name, "") for column in columns.values()]
        differs = any(value != values[0] for value in values)
        if only_differing and not differs:
            continue
        tag = "b" if differs else "span"
        cells = "".join(f"<td><{tag}>{esc(text)}</{tag}></td>" for text in values)
        rows.append(f"<tr><th>{esc(name)}</th>{cells}</tr>")
    if rows and len(columns) > 1:
        heads = "".join(f"<th>{esc(run)}</th>" for run in columns)
        rows.insert(0, f"<tr><th></th>{heads}</tr>")
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _samples(named: dict[str, RunFolder]) -> str:
    """A row for each prompt: what was expected, the answer before training, that of each run."""
    rows: dict[str, dict[str, str]] = {}
    after = {name: f"after, {name}" if len(named) > 1 else "after" for name in named}
    for name, run in named.items():
        for sample in run.samples():
            row = rows.setdefault(sample.get("prompt", ""), {})
            keys = {"expected": "expected", "before": "before", after[name]: "answer"}
            row.update((head, sample[key]) for head, key in keys.items() if key in sample)
    if not rows:
        return ""
    heads = ["expected", "before", *after.values()]
    heads = [head for head in heads if any(head in row for row in rows.values())]
    lines = ["<tr>" + "".join(f"<th>{esc(head)}</th>" for head in ("prompt", *heads)) + "</tr>"]
    for prompt, row in rows.items():
        cells = [f"<td>{esc(prompt)}</td>"]
        for head in heads:
            text = row.get(head, "")
            kind = ""
            if head != "expected" and text.strip() == row.get("expected", "").strip() != "":
                kind = " class='right'"
            cells.append(f"<td{kind}>{esc(text)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _loads(run: RunFolder) -> str:
    """The last line's expert_load: a row of cells for each layer, even ones without colour."""
    line = next((line for line in reversed(run.records) if "expert_load" in line), None)
    if line is None:
        return ""
    layers = line["expert_load"]
    groups = []
    for i, loads in enumerate(layers):
        cells = []
        for expert, load in enumerate(loads):
            shift = math.log2(max(load, 0.25))  # four times the mean, or a quarter: full colour
            kind = "over" if shift > 0 else "under"
            strength = min(1.0, abs(shift) / 2)
            cells.append(f"<rect class='{kind}' x='{expert}' width='1' height='1' "
                         f"opacity='{strength:.2f}'/>")  # fmt: skip
        most = loads.index(max(loads))
        least = loads.index(min(loads))
        text = f"layer {i} of those with experts: most {loads[most]:g} (expert {most}), "
        text += f"least {loads[least]:g} (expert {least})"
        groups.append(f"<g transform='translate(0 {i})'><title>{text}</title>{''.join(cells)}</g>")
    width = max(map(len, layers))
    height = len(layers)
    return (
        f"<p>Step {line['step']:,}: a row for each layer, a column for each expert. Orange: more "
        "than the layer's mean, blue: less; full colour at four times it, or a quarter.</p>"
        f"<svg viewBox='0 0 {width} {height}' width='100%' preserveAspectRatio='none' "
        f"style='height: {min(24, max(3, 1.1 * height)):g}rem'>{''.join(groups)}</svg>"
    )


# -- curves


def _charts(named: dict[str, RunFolder]) -> list[str]:
    keys = dict.fromkeys(key for run in named.values() for key in run.keys())
    known = {key: key for key in keys} | {k: title for title, ks in _CHARTS.items() for k in ks}
    found: dict[str, list[str]] = {title: [] for title in _CHARTS}
    for key in keys:
        title = known[key]
        if key.startswith("eval_"):  # beside the training's: eval_loss, and eval_<data set>_loss
            own = key.removeprefix("eval_")
            if own not in known:
                own = next((one for one in known if own.endswith(f"_{one}")), key)
            title = known[own]
        if key not in _NO_CHART:
            found.setdefault(title, []).append(key)
    charts = []
    for title, keys in found.items():
        curves = []
        for i, (label, run) in enumerate(named.items()):
            for j, key in enumerate(keys):
                # one run has a colour for each key; of several each has its own
                name = key
                color = j
                style = ""
                if len(named) > 1:
                    name = f"{label}: {key}"
                    color = i
                    style = "dash" if j else ""
                curves += _curves(key, run.points(key), name, color % _COLORS, style)
        if any(value for curve in curves for _, value in curve.points):
            charts.append(_chart(title, curves))
    return charts


def _curves(key: str, points: list, name: str, color: int, style: str) -> list[_Curve]:
    """The curves of a key: an evaluation's has dots; many points that go up
    and down are faint, below their mean."""
    if not points:
        return []
    if key.startswith("eval_"):
        return [_Curve(name, points, color, style), _Curve("", points, color, "dots")]
    steps, values = zip(*points, strict=True)
    way = sum(abs(b - a) for a, b in zip(values, values[1:], strict=False))
    if len(points) < _SMOOTHED_FROM or way < 3 * (max(values) - min(values)):
        return [_Curve(name, points, color, style)]
    means = smooth(values, 1 - _SMOOTHED_FROM / len(points))
    mean = _Curve("", list(zip(steps, means, strict=True)), color, style)
    return [_Curve(name, points, color, "raw"), mean]


def _chart(title: str, curves: list[_Curve]) -> str:
    drawn = [curve._replace(points=_thin(curve.points)) for curve in curves]
    steps = [step for curve in drawn for step, _ in curve.points]
    values = [value for curve in drawn for _, value in curve.points]
    low = min(values)
    high = max(values)
    scale = float
    if "loss" not in title.lower():
        low = min(low, 0.0)  # a change is seen for what it is
    marks = _ticks(low, high)
    if low > 0 and high / low > 100:
        title = f"{title}, on a logarithmic scale"
        scale = math.log10
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [float(f"1e{power}") for power in powers]
    bottom = scale(marks[0])
    top = scale(marks[-1])
    first = min(steps)
    last = max(max(steps), min(steps) + 1)

    def x(step: float) -> float:
        return round(1000 * (step - first) / (last - first), 1)

    def y(value: float) -> float:
        return round(1000 * (top - scale(value)) / (top - bottom), 1)

    lines = "".join(f"<line x1='0' x2='1000' y1='{y(v)}' y2='{y(v)}'/>" for v in marks)
    texts = ["<span class='y' style='top: calc(100% + .85rem)'>step</span>"]
    texts += [f"<span class='y' style='top: {y(v) / 10:g}%'>{_short(v)}</span>" for v in marks]
    for step in _ticks(first, last, 5):
        if first <= step <= last and step == int(step):
            texts.append(f"<span class='x' style='left: {x(step) / 10:g}%'>{_short(step)}</span>")
    names = "".join(
        f"<span class='c{c.color}'><i></i>{esc(c.name)} <b>{_number(c.points[-1][1])}</b></span>"
        for c in curves
        if c.name
    )
    paths = "".join(_path(curve, x, y) for curve in drawn)
    return (
        f"<h3>{esc(title)}</h3><div class='legend'>{names}</div>"
        "<div class='plot'><svg viewBox='0 0 1000 1000' preserveAspectRatio='none'>"
        f"<g class='grid'>{lines}</g>{paths}{_hits(drawn, x)}</svg>{''.join(texts)}</div>"
    )


def _path(curve: _Curve, x: Callable, y: Callable) -> str:
    """A curve as a path: a line, or dots, which are lines of no length with round ends."""
    kind = curve.style
    places = [f"{x(step)} {y(value)}" for step, value in curve.points]
    if len(places) == 1:
        kind = "dots"
    way = "M" + "L".join(places)
    if kind == "dots":
        way = "".join(f"M{place}h0" for place in places)
    return f"<path class='c{curve.color} {kind}' d='{way}'/>"


def _hits(curves: list[_Curve], x: Callable) -> str:
    """A strip for each step, which shows a line and the numbers there under the pointer."""
    at: dict[int, list[str]] = {}
    for curve in curves:
        for step, value in curve.points if curve.name else ():
            at.setdefault(step, [f"step {step:,}"]).append(f"{curve.name} {_number(value)}")
    steps = sorted(at)
    strips = []
    middles = [0.0, *((x(a) + x(b)) / 2 for a, b in zip(steps, steps[1:], strict=False)), 1000.0]
    for i, step in enumerate(steps):
        strips.append(
            f"<g class='hit'><title>{esc(chr(10).join(at[step]))}</title>"
            f"<rect x='{middles[i]:.1f}' width='{middles[i + 1] - middles[i]:.1f}' height='1000'/>"
            f"<line x1='{x(step)}' x2='{x(step)}' y1='0' y2='1000'/></g>"
        )
    return "".join(strips)


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """About _MOST_POINTS: of each stretch the least and the most, so that no spike is lost."""
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    kept = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` steps apart."""
    size = max(abs(low), abs(high)) or 1.0
    if high - low < 1e-6 * size:  # a constant lies in the middle
        low = low - size / 2
        high = high + size / 2
    rough = (high - low) / count
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    return [float(f"{step * i:.12g}") for i in range(first, math.ceil(high / step - 1e-9) + 1)]


def _short(value: float) -> str:
    for least, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
