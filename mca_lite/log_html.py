"""report.html: one or several runs on a page; and what all pages have in common, which need nothing
but themselves, no script and no net.

Curves are stretched SVGs with texts of HTML round them, so that they can be read at every width.
"""

import html
import math
import operator
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .log_read import RunFolder, format_duration, format_rate, smooth

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
_MOST_POINTS, _SMOOTHED_FROM = 300, 60
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
    named, title = _labels(runs), " and ".join(run.name for run in runs)
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
            text, kind = row.get(head, ""), ""
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
    layers, groups = line["expert_load"], []
    for i, loads in enumerate(layers):
        cells = []
        for expert, load in enumerate(loads):
            shift = math.log2(max(load, 0.25))  # four times the mean, or a quarter: full colour
            kind, strength = ("over" if shift > 0 else "under"), min(1.0, abs(shift) / 2)
            cells.append(f"<rect class='{kind}' x='{expert}' width='1' height='1' "
                         f"opacity='{strength:.2f}'/>")  # fmt: skip
        most, least = loads.index(max(loads)), loads.index(min(loads))
        text = f"layer {i} of those with experts: most {loads[most]:g} (expert {most}), "
        text += f"least {loads[least]:g} (expert {least})"
        groups.append(f"<g transform='translate(0 {i})'><title>{text}</title>{''.join(cells)}</g>")
    width, height = max(map(len, layers)), len(layers)
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
                name, color, style = key, j, ""
                if len(named) > 1:
                    name, color, style = f"{label}: {key}", i, "dash" if j else ""
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
    low, high, scale = min(values), max(values), float
    if "loss" not in title.lower():
        low = min(low, 0.0)  # a change is seen for what it is
    marks = _ticks(low, high)
    if low > 0 and high / low > 100:
        title, scale = f"{title}, on a logarithmic scale", math.log10
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [float(f"1e{power}") for power in powers]
    bottom, top = scale(marks[0]), scale(marks[-1])
    first, last = min(steps), max(max(steps), min(steps) + 1)

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
    kind, places = curve.style, [f"{x(step)} {y(value)}" for step, value in curve.points]
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
    steps, strips = sorted(at), []
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
    size, kept = math.ceil(2 * len(points) / _MOST_POINTS), []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` steps apart."""
    size = max(abs(low), abs(high)) or 1.0
    if high - low < 1e-6 * size:  # a constant lies in the middle
        low, high = low - size / 2, high + size / 2
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
