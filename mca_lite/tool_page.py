"""A run as its folder shows it, and its pages: report.html for one or several runs, and the loss
plot.

A page needs no other file, no script and no network. It is HTML that is also XML. Curves are
stretched SVGs with HTML text around them, so they can be read at any width.
"""

import functools
import io
import itertools
import json
import math
import os
import re
import reprlib
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2
import psutil

from .args_values import read_config_file
from .files import (
    GENERATIONS_NAME,
    LOSS_PLOT_NAME,
    PAGE_NAME,
    RUN_CONFIG_NAME,
    RUN_SUMMARY_NAME,
    TRAINER_LOG_NAME,
    PathLike,
    describe_error,
    is_there,
    printable,
    read_json,
    write_file,
)
from .log_metrics import (
    METRICS,
    MOST,
    Metric,
    format_duration,
    is_count,
    is_number,
    log_line,
    metric_of,
    read_lines,
)

# -- reading a run

NO_RUN = "no run yet"
# A run counts as hung if its log gets no line for _FIRST_LINE_S seconds (it may compile, or score
# its data), or after the first line for _SILENCE_S seconds, or for _SILENT_LINES times the time
# between two lines, whichever is longer.
_FIRST_LINE_S = 900
_SILENCE_S = 120
_SILENT_LINES = 5


def _is_sections(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(part, dict) for part in value.values())


# key of run_summary.json -> (what its value must be, a test of that)
_SUMMARY: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "state": ("a text", lambda value: isinstance(value, str)),
    "max_steps": ("a number of steps", is_count),
    "first_step": ("a number of steps", is_count),
    "resumes": ("steps", lambda value: isinstance(value, list) and all(map(is_count, value))),
    "started": ("seconds since 1970", lambda value: is_number(value) and 0 <= value <= MOST),
    "host": ("a text", lambda value: isinstance(value, str)),
    "pid": ("a process", lambda value: is_count(value) and value < 2**31),
    "sections": ("names with their facts", _is_sections),
}


def _texts(values: dict[str, Any]) -> dict[str, str]:
    """Values as text: text as it is, others as JSON, so that no digit is lost. Keys with None are
    left out."""
    texts = {}
    for key, value in values.items():
        if isinstance(value, str):
            texts[key] = value
        elif value is not None:
            texts[key] = json.dumps(value, skipkeys=True, default=str)
    return texts


def read_summary(path: Path) -> dict[str, Any]:
    """Read run_summary.json, which a run writes about its state -> {key: value} for the keys of
    _SUMMARY that the file has; "sections" is {} if the file lacks it. A missing file counts as an
    empty one. Raises ValueError if the file or a value is damaged."""
    record = read_json(path) if is_there(path) else {}
    values: dict[str, Any] = {"sections": {}}
    for key, (wanted, fits) in _SUMMARY.items():
        value = record.get(key)
        if value is None:
            continue
        if not fits(value):
            raise ValueError(f"{path}: {key}: expected {wanted}, got {reprlib.repr(value)}")
        values[key] = value
    return values


class RunFolder:
    """A run as the files in its output folder describe it; read() reads them again. A folder that
    does not exist (yet) is a run without log lines.

    records: its log lines, as dicts. problems: file name -> why the file cannot be read.
    """

    def __init__(self, folder: PathLike) -> None:
        self.folder = Path(folder)
        self.name = printable(str(self.folder), kept="")
        self.read()

    def read(self) -> "RunFolder":
        self.problems: dict[str, str] = {}
        self.summary = self._try(RUN_SUMMARY_NAME, read_summary, {"sections": {}})
        log = self.folder / TRAINER_LOG_NAME
        self.changed_at = log.stat().st_mtime if log.exists() else None  # seconds since 1970
        self.records = self._try(TRAINER_LOG_NAME, lambda path: read_lines(path, log_line), [])
        return self

    def _try(self, name: str, read: Callable[[Path], Any], otherwise: Any) -> Any:
        """Read a file of the run's folder -> the result of read(path). If that fails, returns
        `otherwise`, and notes the reason in `problems`. name: the file's name."""
        try:
            return read(self.folder / name)
        except (OSError, ValueError, RecursionError) as error:  # nested too deep
            words = describe_error(error).split()
            self.problems[name] = printable(" ".join(words), kept="")
            return otherwise

    @property
    def notes(self) -> list[str]:
        return [f"{self.name} cannot be read: {reason}" for reason in self.problems.values()]

    def config(self) -> dict[str, str]:
        """{key: text} from the run's config.yaml; {} if there is no such file or it
        cannot be read."""
        if not (self.folder / RUN_CONFIG_NAME).exists():
            return {}
        return self._try(RUN_CONFIG_NAME, lambda path: _texts(read_config_file(path)), {})

    def samples(self) -> list[dict[str, str]]:
        """The lines of generations.jsonl: prompt and answer, and if known the answer before
        training ("before") and the expected one."""
        return self._try(GENERATIONS_NAME, lambda path: read_lines(path, _texts), [])

    def points(self, key: str) -> list[tuple[int, Any]]:
        """[(step, value)] from the log lines that have the key."""
        return [(line["step"], line[key]) for line in self.records if key in line]

    def values(self, key: str) -> list[Any]:
        return [value for _, value in self.points(key)]

    @property
    def step(self) -> int:
        return self.records[-1]["step"] if self.records else 0

    @property
    def seconds(self) -> float | None:
        """Seconds from the run's start, or its last resumption, to the last change of its log; None
        if unknown."""
        started = self.summary.get("started")
        if started is None or self.changed_at is None:
            return None
        return self.changed_at - started

    def silence_s(self) -> float:
        """Seconds since the log changed: since its last line, or since a resumption, which writes
        it anew. Before the first line, since the start; 0 if unknown."""
        since = self.changed_at
        if not self.records:
            since = self.summary.get("started", since)
        return 0.0 if since is None else time.time() - since

    def eta_s(self) -> float | None:
        """Estimated seconds until the run ends, at its mean speed since its start or last
        resumption; None if unknown, or after the last step."""
        left = self.summary.get("max_steps", 0) - self.step
        done = self.step - self.summary.get("first_step", 0)
        if self.seconds is None or left <= 0 or done <= 0:
            return None
        return max(0.0, self.seconds / done * left - self.silence_s())

    def state(self) -> str:
        """The run's state: "no run yet", "running", "hung?" (no log line for too long), "failed"
        (its process on this machine is gone), "cannot be read", "unknown" (there is only a log), or
        the end that the run noted, "finished" or "interrupted"."""
        if self.problems:
            return "cannot be read"
        state = self.summary.get("state")
        if state is None:
            return "unknown" if self.records else NO_RUN
        if state != "running":
            return printable(state, kept="")
        is_here = self.summary.get("host") == socket.gethostname()
        if is_here and not psutil.pid_exists(self.summary.get("pid", os.getpid())):
            return "failed"
        limit = _FIRST_LINE_S
        if self.records:
            before = self.records[-2:][0]["step"]
            step_time_s = next(reversed(self.values("step_time_s")), 0)
            limit = max(_SILENCE_S, _SILENT_LINES * (self.step - before) * step_time_s)
        return "hung?" if self.silence_s() > limit else "running"


# the figures to look at first
FIRST = ("state", "step", "time left", "loss", "tokens/s")


def metrics_of(run: RunFolder) -> list[Metric]:
    """The metrics (log keys with a name and format) to show for a run: those in METRICS, and the
    loss of each dataset in the run's log."""
    keys = dict.fromkeys(itertools.chain(*run.records))
    return [*METRICS, *(metric_of(key) for key in keys if key.startswith("loss/"))]


def figures(run: RunFolder) -> dict[str, str]:
    """A run in a few figures, as {name: text}: its state, step and times, and one figure for each
    of metrics_of() that its log has."""
    texts = {"state": run.state(), "step": f"{run.step:,}"}
    if "max_steps" in run.summary:
        texts["step"] += f" of {run.summary['max_steps']:,}"
    times = {"time": run.seconds}
    if run.state() == "running":
        times |= {"time left": run.eta_s(), "last line": run.silence_s()}
    for name, seconds in times.items():
        if seconds is not None:
            texts[name] = format_duration(seconds)
    for metric in metrics_of(run):
        values = run.values(metric.key)
        if values:
            texts[metric.name] = metric.form(metric.figure(values))
    return texts


def beside(columns: Iterable[dict[str, str]]) -> dict[str, list[str]]:
    """Join several {name: text} into one table -> {name: [its text in each column]}. columns: one
    {name: text} each. The text is "" if a column lacks the name."""
    columns = list(columns)
    names = dict.fromkeys(itertools.chain(*columns))
    return {name: [column.get(name, "") for column in columns] for name in names}


# -- pictures of a run


def draw(args: Any) -> None:
    """Write report.html and training_loss.png into a run's output_dir, if its TrainingArguments ask
    for them."""
    run = RunFolder(args.output_dir)
    if args.plot_loss:
        plot_loss(run, run.folder / LOSS_PLOT_NAME)
    if args.html_report:
        write_file(run.folder / PAGE_NAME, page([run]))


def _smoothed(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Exponential moving average of (step, value) points: 0.9 x the last mean + 0.1 x the new
    value."""
    return list(itertools.accumulate(points, lambda a, b: (b[0], 0.9 * a[1] + 0.1 * b[1])))


def plot_loss(run: RunFolder, path: Path) -> None:
    """Write a PNG plot of loss, smoothed loss and eval_loss over the steps to `path`. Needs
    matplotlib."""
    # Figure and Agg are used directly: pyplot would choose a backend for the whole process and keep
    # every figure in memory.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss per token")
    trained = run.points("loss")
    for label, points, color in (
        ("loss", trained, "lightsteelblue"),
        ("loss, smoothed", _smoothed(trained), "tab:blue"),
        ("eval_loss", run.points("eval_loss"), "tab:orange"),
    ):
        if points:
            axes.plot(*zip(*points, strict=True), color=color, label=label, marker=".")
            axes.legend()
    axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    write_file(path, picture.getvalue())


# -- pages

_BASE = """<!DOCTYPE html>
<html lang='en'><head><meta charset='utf-8'/>
{%- if refreshes %}<meta http-equiv='refresh' content='30'/>{% endif %}
<meta name='viewport' content='width=device-width, initial-scale=1'/>
<title>{{ title }}</title><style>
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
{% for i in range(6) %}.c{{ i }} { color: var(--c{{ i }}); }
{% endfor %}
{% block style %}{% endblock %}
</style></head>
<body>{% block body %}{% endblock %}</body></html>
"""
_PAGES = jinja2.Environment(
    autoescape=True, trim_blocks=True, loader=jinja2.DictLoader({"base": _BASE})
)

_compiled = functools.cache(_PAGES.from_string)


def render(template: str, **context: Any) -> str:
    """Fill in a jinja2 template of a page -> the page's HTML. template: a text that has {% extends
    "base" %} and the blocks style and body.

    context: `title`, `refreshes` (True: the browser reloads the page) and the template's names.
    Texts are escaped; characters that XML does not allow are replaced."""
    text = _compiled(template).render(context)
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


_REPORT = """{% extends "base" %}
{% block style %}
.charts { display: grid; gap: .8rem;
 grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); }
.leading { grid-template-columns: repeat(auto-fill, minmax(min(100%, 34rem), 1fr)); }
.leading .card:first-child { grid-column: 1 / -1; }
.leading .card:first-child .plot { height: 24rem; }
summary { cursor: pointer; margin: 1.5rem 0 .6rem; font-size: 1.1rem; font-weight: 600; }
.legend, .plot { color: var(--soft); }
.legend { font-size: .82rem; }
.legend span { margin-right: .9rem; display: inline-block; }
.legend b { color: var(--text); }
.plot { position: relative; height: 11rem; margin: .5rem .6rem 1.5rem 5.5rem; font-size: .75rem; }
.plot svg { position: absolute; width: 100%; height: 100%; overflow: visible; }
.x, .y { position: absolute; white-space: nowrap; }
.y { right: 100%; margin-right: .4rem; transform: translateY(50%); }
.x { top: 100%; margin-top: .2rem; transform: translateX(-50%); }
path { fill: none; stroke: currentColor; stroke-width: 1.8px; stroke-linejoin: round;
 stroke-linecap: round; vector-effect: non-scaling-stroke; }
.grid { stroke: var(--line); stroke-width: 1px; }
.raw { opacity: .5; stroke-width: 1px; }
.resume { stroke: var(--soft); stroke-width: 1px; stroke-dasharray: 4 4; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; font-weight: 400;
 border-top: 1px solid var(--line); min-width: 5rem; white-space: pre-wrap; }
tr > th:first-child { width: 14rem; }
.charts tr > th:first-child { width: 36%; }
.right { color: var(--c2); font-weight: 600; }
{% endblock %}

{% macro table(rows, only_differing=false) %}
<table>{% if several %}<tr><th></th>{% for run in runs %}<th>{{ run.name }}</th>{% endfor %}</tr>
{% endif %}
{% for name, texts in rows.items() if not only_differing or texts|unique(true)|list|length > 1 %}
<tr><th>{{ name }}</th>{% for text in texts %}
<td>{% if texts|unique(true)|list|length > 1 %}<b>{{ text }}</b>{% else %}{{ text }}{% endif %}</td>
{%- endfor %}</tr>
{% endfor %}</table>
{% endmacro %}

{% macro tiles(names) %}
<div class='tiles'>{% for name in names if name in figures %}
<div class='card'><span>{{ name }}</span><b>{{ figures[name][0] }}</b></div>
{%- endfor %}</div>
{% endmacro %}

{% macro chart(c) %}
<div class='card'><h3>{{ c.title }}</h3><div class='legend'>
{% for name, newest, _ in c.curves %}
<span class='c{{ loop.index0 % 6 }}'>&#8212; {{ name }} <b>{{ newest }}</b></span>
{%- endfor %}</div>
<div class='plot'><svg viewBox='0 0 1000 1000' preserveAspectRatio='none'>
{% for place, _ in c.y %}<path class='grid' d='M0 {{ 1000 - place * 10 }}h1000'/>{% endfor %}
{% for run in runs %}{% for step in run.summary.resumes if 0 < step - c.first < c.width %}
<path class='resume' d='M{{ 1000 * (step - c.first) / c.width }} 0v1000'/>
{% endfor %}{% endfor %}
{% set names = c.curves|map(attribute=0)|list %}
{% for name, _, path in c.curves %}
<path class='c{{ loop.index0 % 6 }}{% if name ~ ", smoothed" in names %} raw{% endif %}'
 d='M{{ path }}h0'/>
{% endfor %}</svg>
{% for place, mark in c.y %}
<span class='y' style='bottom: {{ place }}%'>{{ mark }}</span>
{% endfor %}
{% for place, mark in c.x %}
<span class='x' style='left: {{ place }}%'>{{ mark }}</span>
{% endfor %}</div></div>
{% endmacro %}

{% block body %}
{% set leading = ["Loss", "Gradient norm, before clipping", "Learning rate"] %}
<h1>{{ title }}</h1><p>Drawn on {{ drawn }}.
{%- if runs|map(attribute="summary.resumes")|select|list %} Dashed lines: the run was resumed.
{%- endif %}</p>
{% for run in runs %}{% for note in run.notes %}<p class='c5'>{{ note }}</p>{% endfor %}{% endfor %}
{% if several %}<h2>The runs</h2><div class='card'>{{ table(figures) }}</div>
{% else %}{{ tiles(first) }}
{% endif %}
{% if charts %}<h2>Curves over the steps</h2><div class='charts leading'>
{% for one in charts if one.title in leading %}{{ chart(one) }}{% endfor %}</div>
<details><summary>All numbers and curves</summary>
{% if not several %}{{ tiles(figures) }}{% endif %}
<h2>Other curves</h2><div class='charts'>
{% for one in charts if one.title not in leading %}{{ chart(one) }}{% endfor %}</div></details>
{% endif %}
{% if answers %}<h2>Answers before and after</h2><div class='card'><table>
<tr><th>prompt</th><th>expected</th><th>before</th>
{% for run in runs %}<th>after{% if several %}, {{ run.name }}{% endif %}</th>{% endfor %}</tr>
{% for prompt, row in answers.items() %}
<tr><td>{{ prompt }}</td><td>{{ row.expected }}</td><td>{{ row.before }}</td>
{% for run in runs %}
{% set is_right = row.expected and row[run.name]|trim == row.expected|trim %}
<td{% if is_right %} class='right'{% endif %}>{{ row[run.name] }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endif %}
{% if sections %}<h2>The run as it began</h2><div class='charts'>
{% for name, rows in sections if rows %}
<div class='card'><h3>{{ name|capitalize }}</h3>{{ table(rows) }}</div>
{%- endfor %}</div>
{% endif %}
{% if config %}<h2>{{ "Keys that differ" if several else "Configuration" }}</h2>
<div class='card'>{{ table(config, several) }}</div>
{% endif %}
{% endblock %}
"""


def page(runs: Sequence[RunFolder]) -> str:
    """The HTML text of a page about one run, or about several side by side."""
    several = len(runs) > 1
    config = beside([run.config() for run in runs])
    answers = _answers(runs)  # before the problems, which name what could not be read
    sections = [run.summary["sections"] for run in runs]
    names = dict.fromkeys(itertools.chain(*sections))
    return render(
        _REPORT,
        title=", ".join(run.name for run in runs),
        refreshes=any(run.state() == "running" for run in runs),
        drawn=time.strftime("%Y-%m-%d %H:%M:%S"),
        several=several,
        runs=runs,
        figures=beside(map(figures, runs)),
        first=FIRST,
        charts=_charts(runs),
        answers=answers,
        sections=[(name, beside(_texts(of.get(name, {})) for of in sections)) for name in names],
        config=config,
    )


def _answers(runs: Sequence[RunFolder]) -> dict[str, dict[str, str]]:
    """Join the answers that several runs generated, to compare them -> {prompt: {"expected": ...,
    "before": ..., run name: its answer}}. A prompt's dict also has the other keys of the generated
    samples."""
    rows: dict[str, dict[str, str]] = {}
    for run in runs:
        for sample in run.samples():
            row = rows.setdefault(sample.get("prompt", ""), {})
            row |= sample
            row[run.name] = sample.get("answer", "")
    return rows


# -- curves

_STRETCHES = 200
_FEW = 20  # a curve with at most this many points is not smoothed


def _charts(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Make the charts of a page -> one dict per chart, for the page's template. A chart has the
    curves of all runs. Charts of METRICS come first, in its order, then those of other metrics."""
    charts: dict[str | None, list[Any]] = {metric.chart: [] for metric in METRICS}
    rows: dict[str | None, Metric] = {}
    for run in runs:
        for key in dict.fromkeys(itertools.chain(*run.records)):
            metric = metric_of(key)
            name = f"{run.name}: {key}" if len(runs) > 1 else key
            curves = charts.setdefault(metric.chart, [])
            points = run.points(key)
            curves.append((name, points))
            if key == "loss" and len(points) > _FEW:
                curves.append((f"{name}, smoothed", _smoothed(points)))
            rows[metric.chart] = metric
    for title in (None, "step"):
        charts.pop(title, None)
    return [_chart(rows[title], curves) for title, curves in charts.items() if curves]


def _chart(metric: Metric, curves: list[tuple[str, list[Any]]]) -> dict[str, Any]:
    """Make one chart -> a dict for the page's template: curves as SVG paths in thousandths of the
    chart's width and height, and ticks in percent. metric: gives title and number format. curves:
    (name, [(step, value)]) each."""
    points = itertools.chain(*(points for _, points in curves))
    steps, values = zip(*points, strict=True)
    first = min(steps)
    low = min(values)
    high = max(values)
    if metric.chart != "Loss":
        low = min(low, 0.0)  # the axis begins at 0, to show changes in proportion
    width = max(steps) - first or 1
    height = high - low or abs(high) or 1.0
    high = low + height
    drawn = []
    for name, points in curves:
        places = [
            f"{1000 * (step - first) / width:.1f} {1000 * (high - value) / height:.1f}"
            for step, value in _thin(points)
        ]
        drawn.append((name, metric.form(points[-1][1]), "L".join(places)))
    return {
        "title": metric.chart,
        "curves": drawn,
        "y": _ticks(low, height, metric.form),
        "x": _ticks(first, width, "{:,.0f}".format, 1),
        "first": first,
        "width": width,
    }


def _ticks(
    low: float, size: float, form: Callable[[Any], str], least: int = 0
) -> list[tuple[float, str]]:
    """Choose two to six round numbers as ticks of a chart's axis -> (position in percent of the
    axis, text) each. low, size: the number at which the axis begins, and its length. form(number):
    returns a tick's text. least: two ticks are at least so far apart."""
    power = 10.0 ** math.floor(math.log10(size / 5))
    apart = max(least, next(power * i for i in (1, 2, 5, 10) if size / (power * i) <= 5))
    first = math.ceil(low / apart)
    marks = [apart * i for i in range(first, first + 6) if apart * i <= low + size]
    return [(100 * (mark - low) / size, form(mark)) for mark in marks]


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most about 400 of a curve's points: the least and greatest of each stretch, so that no
    spike is lost, and both ends."""
    size = math.ceil(len(points) / _STRETCHES)
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        part = points[start : start + size]
        kept |= {min(part, key=itemgetter(1)), max(part, key=itemgetter(1))}
    return sorted(kept)
