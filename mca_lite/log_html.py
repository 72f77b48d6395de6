"""A run as its folder shows it, and its pictures: report.html of one or several, the loss plot.

Pages need no other file, no script and no net. They are HTML that is XML too. Curves are stretched
SVGs with texts of HTML round them, and so can be read at every width.
"""

import io
import itertools
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
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import psutil

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
from .log_metrics import METRICS, MOST, LineFile, format_duration, is_count, is_number, log_line

# -- reading a run

# Without a new line for so long a run counts as hung: before its first line (compiling, the pass of
# a reference), and later at least, or as many times the time from one line to the next.
_FIRST_LINE_S = 900
_SILENCE_S = 120
_SILENT_LINES = 5


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MOST


def _is_process(value: Any) -> bool:
    return is_count(value) and value < 2**31


def _is_sections(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(part, dict) for part in value.values())


# keys of run_summary.json -> the kind of their values, and its test
_SUMMARY: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "state": ("a text", _is_text),
    "max_steps": ("a number of steps", is_count),
    "first_step": ("a number of steps", is_count),
    "started": ("seconds since 1970", _is_time),
    "host": ("a text", _is_text),
    "pid": ("a process", _is_process),
    "sections": ("names with their facts", _is_sections),
}


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


def _sample(record: dict) -> dict[str, str]:
    keys = ("prompt", "answer", "before", "expected")
    return {key: record[key] for key in keys if _is_text(record.get(key))}


def read_summary(path: Path) -> dict[str, Any]:
    """The keys of _SUMMARY that log.Report wrote beside the log. ValueError for a damaged file."""
    record = read_json(path) if is_there(path) else {}
    values = {key: record[key] for key in _SUMMARY if record.get(key) is not None}
    for key, value in values.items():
        wanted, fits = _SUMMARY[key]
        if not fits(value):
            raise ValueError(f"{path}: {key}: expected {wanted}, got {reprlib.repr(value)}")
    sections = values.get("sections", {})
    return {**values, "sections": {name: _texts(part) for name, part in sections.items()}}


def read_config(path: Path) -> dict[str, str]:
    """Key -> text of a config.yaml, {} without one. ValueError for a damaged or too large one."""
    try:
        return _texts(read_config_file(path)) if is_there(path) else {}
    except ConfigError as error:
        raise ValueError(f"{path}: {error.problems[0].reason}") from None


class RunFolder:
    """The run of an output folder; read() takes what was added since.

    records: the lines of its log, see log_line. problems: file name -> why it cannot be read. A
    folder that does not exist, or not yet, is a run without lines.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.name = printable(str(folder).rstrip("/") or "/", kept="")
        self._log = LineFile(self.folder / TRAINER_LOG_NAME, log_line)
        self.read()

    def read(self) -> "RunFolder":
        self.problems: dict[str, str] = {}
        self.summary = self._try(RUN_SUMMARY_NAME, read_summary, {})
        self.records = self._try(TRAINER_LOG_NAME, lambda path: self._log.read(), [])
        return self

    def _try(self, name: str, read: Callable[[Path], Any], otherwise: Any) -> Any:
        """`read` of a file, or `otherwise` and a problem."""
        try:
            return read(self.folder / name)
        except (OSError, ValueError) as error:
            self.problems[name] = printable(describe_error(error), kept="")
            return otherwise

    def may_hold_a_run(self) -> bool:
        """False for a file, and for a folder of other files."""
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            return not isinstance(error, NotADirectoryError)
        runs = {RUN_CONFIG_NAME, RUN_SUMMARY_NAME, TRAINER_LOG_NAME}
        return not names or not runs.isdisjoint(names)

    def config(self) -> dict[str, str]:
        """Key -> text of config.yaml; {} without one."""
        return self._try(RUN_CONFIG_NAME, read_config, {})

    def samples(self) -> list[dict[str, str]]:
        """The answers in generations.jsonl: prompt, answer, and where known before, expected."""
        return self._try(GENERATIONS_NAME, lambda path: LineFile(path, _sample).read(), [])

    def points(self, key: str) -> list[tuple[int, Any]]:
        """(step, value) of each line with the key."""
        return [(line["step"], line[key]) for line in self.records if key in line]

    def last(self, key: str) -> Any:
        """The key's newest value, None where no line has one."""
        return next((line[key] for line in reversed(self.records) if key in line), None)

    @property
    def step(self) -> int:
        return self.last("step") or 0

    @property
    def max_steps(self) -> int | None:
        return self.summary.get("max_steps")

    @property
    def seconds(self) -> float | None:
        """From the run's start, or its last resumption, to its last line."""
        started = self.summary.get("started")
        if started is None or self._log.changed_at is None:
            return None
        return self._log.changed_at - started

    def silence_s(self) -> float:
        """Seconds since the last line, or since the start before there is one."""
        since = self._log.changed_at
        if not self.records:
            since = self.summary.get("started", since)
        return 0.0 if since is None else time.time() - since

    def eta_s(self) -> float | None:
        """The seconds left at the mean speed since the start."""
        if self.seconds is None or self.max_steps is None:
            return None
        done = self.step - self.summary.get("first_step", 0)
        if done <= 0 or self.step >= self.max_steps:
            return None
        return max(0.0, self.seconds / done * (self.max_steps - self.step) - self.silence_s())

    def state(self) -> str:
        """no run yet, running, hung?, failed, "cannot be read" with the reason, unknown (of a log
        alone), or the end that the run wrote: finished, interrupted."""
        if self.problems:
            return f"cannot be read: {'; '.join(self.problems.values())}"
        state = self.summary.get("state")
        if state is None:
            return "unknown" if self.records else "no run yet"
        if state != "running":
            return printable(state, kept="")
        is_here = self.summary.get("host") == socket.gethostname()
        if is_here and not psutil.pid_exists(self.summary.get("pid", os.getpid())):
            return "failed"
        limit = _FIRST_LINE_S
        if self.records:
            steps = [line["step"] for line in self.records[-2:]]
            between = (steps[-1] - steps[0]) * (self.last("step_time_s") or 0)
            limit = max(_SILENCE_S, _SILENT_LINES * between)
        return "hung?" if self.silence_s() > limit else "running"


# -- pictures of a run


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


def smooth(values: Iterable[float], weight: float = 0.9) -> list[float]:
    """The running mean in which a value counts `weight` times less with each step since.

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
_COLORS = 6  # of the loop above
_PAGES = jinja2.Environment(
    autoescape=True, trim_blocks=True, loader=jinja2.DictLoader({"base": _BASE})
)


def render(template: str, **context) -> str:
    """A page: a jinja2 template with {% extends "base" %} and the blocks style and body, filled.

    context: `title`, `refreshes` (the browser loads the page again) and the template's names. Texts
    are escaped; characters that XML does not allow are replaced.
    """
    text = _PAGES.from_string(template).render(context)
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


_REPORT = """{% extends "base" %}
{% block style %}
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
{% endblock %}

{% macro table(rows) %}
<table>{% if several %}<tr><th></th>{% for run in labels %}<th>{{ run }}</th>{% endfor %}</tr>
{% endif %}
{% for name, texts, differ in rows %}
<tr><th>{{ name }}</th>{% for text in texts %}
<td>{% if differ %}<b>{{ text }}</b>{% else %}{{ text }}{% endif %}</td>
{%- endfor %}</tr>
{% endfor %}</table>
{% endmacro %}

{% macro chart(c) %}
<div class='card'><h3>{{ c.title }}</h3><div class='legend'>
{% for curve in c.curves if curve.name %}
<span class='c{{ curve.color }}'><i></i>{{ curve.name }} <b>{{ curve.last }}</b></span>
{%- endfor %}</div>
<div class='plot'><svg viewBox='0 0 1000 1000' preserveAspectRatio='none'><g class='grid'>
{% for y, _ in c.marks %}<line x1='0' x2='1000' y1='{{ y }}' y2='{{ y }}'/>{% endfor %}</g>
{% for curve in c.curves %}
<path class='c{{ curve.color }} {{ curve.style }}' d='{{ curve.path }}'/>
{% endfor %}
{% for x, left, right, texts in c.strips %}
<g class='hit'><title>{{ texts|join("\n") }}</title>
<rect x='{{ left }}' width='{{ "%.1f"|format(right - left) }}' height='1000'/>
<line x1='{{ x }}' x2='{{ x }}' y1='0' y2='1000'/></g>
{% endfor %}</svg>
<span class='y' style='top: calc(100% + .85rem)'>step</span>
{% for y, text in c.marks %}<span class='y' style='top: {{ y / 10 }}%'>{{ text }}</span>{% endfor %}
{% for x, text in c.steps %}<span class='x' style='left: {{ x / 10 }}%'>{{ text }}</span>
{%- endfor %}</div></div>
{% endmacro %}

{% macro loads(step, layers) %}
{% set height = layers|length * 1.1 %}
<p>Step {{ "{:,}".format(step) }}: a row for each layer, a column for each expert. Orange: more
than the layer's mean, blue: less; full colour at four times it, or a quarter.</p>
<svg viewBox='0 0 {{ layers|map("length")|max }} {{ layers|length }}' width='100%'
preserveAspectRatio='none' style='height: {{ [24, [3, height]|max]|min }}rem'>
{% for layer in layers %}
{% set values = layer|map(attribute=0)|list %}
<g transform='translate(0 {{ loop.index0 }})'><title>layer {{ loop.index0 }} of those with experts:
{{- " most %g"|format(values|max) }} (expert {{ values.index(values|max) }}), least
{{- " %g"|format(values|min) }} (expert {{ values.index(values|min) }})</title>
{% for value, shift in layer %}
<rect class='{{ "over" if shift > 0 else "under" }}' x='{{ loop.index0 }}' width='1' height='1'
opacity='{{ "%.2f"|format([1, shift|abs / 2]|min) }}'/>
{% endfor %}</g>
{% endfor %}</svg>
{% endmacro %}

{% block body %}
<h1>{{ title }}</h1><p>Drawn on {{ drawn }}.</p>
{% if several %}<h2>The runs</h2><div class='card'>{{ table(figures) }}</div>
{% else %}<div class='tiles'>
{% for name, texts, _ in figures %}
<div class='card'><span>{{ name }}</span><b>{{ texts[0] }}</b></div>
{%- endfor %}</div>
{% endif %}
{% if charts %}<h2>Curves</h2><div class='charts'>
{% for one in charts %}{{ chart(one) }}{% endfor %}</div>
{% endif %}
{% for name, step, layers in experts %}
<h2>Load of experts{% if several %}: {{ name }}{% endif %}</h2>
<div class='card'>{{ loads(step, layers) }}</div>
{% endfor %}
{% if answers %}<h2>Answers before and after</h2><div class='card'><table>
<tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in answers %}<tr>{% for head in heads %}
{% set expected = row.get("expected", "")|trim %}
{% set is_right = expected and loop.index > 2 and row.get(head, "")|trim == expected %}
<td{% if is_right %} class='right'{% endif %}>{{ row.get(head, "") }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endif %}
{% if sections %}<h2>The run as it began</h2><div class='charts'>
{% for name, rows in sections if rows %}
<div class='card'><h3>{{ name|capitalize }}</h3>{{ table(rows) }}</div>
{%- endfor %}</div>
{% endif %}
{% if config %}<h2>{{ "Keys that differ" if several else "Configuration" }}</h2>
<div class='card'>{{ table(config) }}</div>
{% endif %}
{% endblock %}
"""
_STATISTICS = {
    "last": operator.itemgetter(-1),
    "best": min,
    "median": statistics.median,
    "peak": max,
}


def page(runs: Sequence[RunFolder]) -> str:
    """The page of one run, or of several beside each other."""
    named = _labels(runs)
    several = len(runs) > 1
    config = _beside(run.config() for run in runs)
    heads, answers = _answers(named)  # before the figures, which name what could not be read
    sections = [run.summary.get("sections", {}) for run in runs]
    names = dict.fromkeys(itertools.chain(*sections))
    return render(
        _REPORT,
        title=f"{len(runs)} runs" if len(runs) > 2 else " and ".join(run.name for run in runs),
        refreshes=any(run.state() == "running" for run in runs),
        drawn=time.strftime("%Y-%m-%d %H:%M:%S"),
        several=several,
        labels=list(named),
        figures=_beside(_figures(run) for run in runs),
        charts=_charts(named),
        experts=[(name, *_loads(run)) for name, run in named.items() if run.last("expert_load")],
        heads=heads,
        answers=answers,
        sections=[(name, _beside(of.get(name, {}) for of in sections)) for name in names],
        config=[row for row in config if row.differ or not several],
    )


def _labels(runs: Sequence[RunFolder]) -> dict[str, RunFolder]:
    """Label -> run: of several the part of the path that not all have."""
    if len(runs) == 1:
        return {runs[0].name: runs[0]}
    paths = [os.path.abspath(run.folder) for run in runs]
    common = os.path.commonpath(paths)
    return {os.path.relpath(path, common): run for path, run in zip(paths, runs, strict=True)}


class _Row(NamedTuple):
    """A row of a table with a column for each run."""

    name: str
    texts: list[str]
    differ: bool


def _beside(columns: Iterable[dict[str, str]]) -> list[_Row]:
    columns = list(columns)
    rows = []
    for name in dict.fromkeys(itertools.chain(*columns)):
        texts = [column.get(name, "") for column in columns]
        rows.append(_Row(name, texts, len(set(texts)) > 1))
    return rows


def _figures(run: RunFolder) -> dict[str, str]:
    """The texts of a run's tiles: its state, and statistics of its log."""
    figures = {"state": run.state(), "step": f"{run.step:,}"}
    if run.max_steps is not None:
        figures["step"] += f" of {run.max_steps:,}"
    if run.seconds is not None:
        figures["time"] = format_duration(run.seconds)
    for metric in METRICS:
        values = [value for _, value in run.points(metric.key)]
        for word in metric.tiles if values else ():
            figures[f"{metric.name}, {word}"] = metric.form(_STATISTICS[word](values))
    return figures


def _answers(named: dict[str, RunFolder]) -> tuple[list[str], list[dict[str, str]]]:
    """(heads, rows by head): a row for each prompt with the expected answer, and those before and
    after training."""
    heads = ["prompt", "expected", "before"]
    rows: dict[str, dict[str, str]] = {}
    for name, run in named.items():
        after = f"after, {name}" if len(named) > 1 else "after"
        heads.append(after)
        for sample in run.samples():
            row = rows.setdefault(sample.get("prompt", ""), {"prompt": ""})
            row |= {after if key == "answer" else key: text for key, text in sample.items()}
    return [head for head in heads if any(head in row for row in rows.values())], [*rows.values()]


def _loads(run: RunFolder) -> tuple[int, list[list[tuple[float, float]]]]:
    """(step, (load, its base-2 logarithm) of each expert of each layer) of the newest
    expert_load."""
    step, layers = run.points("expert_load")[-1]
    return step, [[(load, math.log2(max(load, 0.25))) for load in loads] for loads in layers]


# -- curves

_MOST_POINTS = 300
_SMOOTHED_FROM = 60


class _Curve(NamedTuple):
    """A line of a chart. name: "" for one beside another of the same name, without a legend.
    color: c0 to c5. style: of the page, "" for a line."""

    name: str
    points: list[tuple[int, float]]
    color: int
    style: str = ""


def _charts(named: dict[str, RunFolder]) -> list[dict]:
    """The charts of the page, for its template, in the order of METRICS."""
    records = (line for run in named.values() for line in run.records)
    keys = dict.fromkeys(itertools.chain.from_iterable(records))
    titles = {key: key for key in keys} | {metric.key: metric.chart for metric in METRICS}
    of_title: dict[str | None, list[str]] = {metric.chart: [] for metric in METRICS}
    for key in keys:
        of_title.setdefault(_title(key, titles), []).append(key)
    del of_title[None]
    charts = []
    for title, keys in of_title.items():
        curves = []
        for i, (label, run) in enumerate(named.items()):
            for j, key in enumerate(keys):
                if len(named) > 1:
                    look = (f"{label}: {key}", i % _COLORS, "dash" if j else "")
                else:
                    look = (key, j % _COLORS, "")
                curves += _curves(run.points(key), *look, key.startswith("eval_"))
        if any(value for curve in curves for _, value in curve.points):
            charts.append(_chart(title, curves))
    return charts


def _title(key: str, titles: dict[str, str | None]) -> str | None:
    """The title of a key's chart: eval_loss and eval_<data set>_loss stand beside loss."""
    if key.startswith("eval_"):
        name = key.removeprefix("eval_")
        endings = (known for known in titles if name.endswith(f"_{known}"))
        key = next(known for known in (name, *endings, key) if known in titles)
    return titles[key]


def _curves(points: list, name: str, color: int, style: str, is_evaluation: bool) -> list[_Curve]:
    """The curves of a key: an evaluation's has dots; many points that go up and down are faint,
    below their mean."""
    if not points:
        return []
    thin = _thin(points)
    curve = _Curve(name, thin, color, style)
    if is_evaluation:
        return [curve, _Curve("", thin, color, "dots")]
    steps, values = zip(*points, strict=True)
    way = sum(abs(b - a) for a, b in itertools.pairwise(values))
    if len(points) < _SMOOTHED_FROM or way < 3 * (max(values) - min(values)):
        return [curve]
    means = zip(steps, smooth(values, 1 - _SMOOTHED_FROM / len(points)), strict=True)
    return [_Curve(name, thin, color, "raw"), _Curve("", _thin([*means]), color, style)]


def _chart(title: str, curves: list[_Curve]) -> dict:
    """A chart for the template, in units of a thousandth of its width and height."""
    values = [value for curve in curves for _, value in curve.points]
    steps = sorted({step for curve in curves for step, _ in curve.points})
    low = min(values)
    high = max(values)
    scale: Callable[[float], float] = float
    if "loss" not in title.lower():
        low = min(low, 0.0)  # shows a change in proportion
    marks = _ticks(low, high)
    if low > 0 and high / low > 100:
        title += ", on a logarithmic scale"
        scale = math.log10
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [float(f"1e{power}") for power in powers]
    bottom = scale(marks[0])
    top = scale(marks[-1])
    first = steps[0]
    last = max(steps[-1], first + 1)

    def x(step: float) -> float:
        return round(1000 * (step - first) / (last - first), 1)

    def y(value: float) -> float:
        return round(1000 * (top - scale(value)) / (top - bottom), 1)

    shown = [step for step in _ticks(first, last, 5) if first <= step <= last]
    return {
        "title": title,
        "marks": [(y(value), _short(value)) for value in marks],
        "steps": [(x(step), _short(step)) for step in shown if step == int(step)],
        "curves": [_drawn(curve, x, y) for curve in curves],
        "strips": _strips(curves, x),
    }


def _drawn(curve: _Curve, x: Callable, y: Callable) -> dict:
    """A curve for the template: a path of lines, or of dots, as lines of no length with round
    ends."""
    places = [f"{x(step)} {y(value)}" for step, value in curve.points]
    look = {"name": curve.name, "color": curve.color, "last": _number(curve.points[-1][1])}
    if curve.style == "dots" or len(places) == 1:
        return {**look, "style": "dots", "path": "".join(f"M{place}h0" for place in places)}
    return {**look, "style": curve.style, "path": "M" + "L".join(places)}


def _strips(curves: list[_Curve], x: Callable) -> list[tuple]:
    """(x, left, right, texts) of each step: a strip that shows its numbers under the pointer."""
    at: dict[int, list[str]] = {}
    for curve in curves:
        for step, value in curve.points if curve.name else ():
            at.setdefault(step, [f"step {step:,}"]).append(f"{curve.name} {_number(value)}")
    places = [x(step) for step in sorted(at)]
    ends = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(places)), 1000.0]
    texts = [at[step] for step in sorted(at)]
    return list(zip(places, ends[:-1], ends[1:], texts, strict=True))


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """About _MOST_POINTS: of each stretch the least and the most, so that no spike is lost."""
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    kept = {points[-1]}
    for start in range(0, len(points), size):
        part = sorted(points[start : start + size], key=operator.itemgetter(1))
        kept |= {part[0], part[-1]}
    return sorted(kept)


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` steps apart."""
    size = max(abs(low), abs(high)) or 1.0
    if high - low < 1e-6 * size:  # a constant lies in the middle
        low -= size / 2
        high += size / 2
    rough = (high - low) / count
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    return [float(f"{step * i:.12g}") for i in range(first, math.ceil(high / step - 1e-9) + 1)]


def _number(value: float) -> str:
    """Four digits that count."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _short(value: float) -> str:
    for least, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
