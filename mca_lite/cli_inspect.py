"""What a run will train on, and, with --check, all that it does before its first step.

python -m mca_lite inspect config.yaml [key=value ...] [options]
    samples as the model reads them, trained tokens marked (in colour in a terminal, else in «»);
    records that are bad, truncated or without labels; duplicates, double BOS, turns without their
    end; lengths, and which samples lie in which row. Tokenised data is kept in cache_dir, where the
    run finds it. Large data: max_samples=10000. No weights here: train_from_scratch=true

python -m mca_lite inspect --check config.yaml [key=value ...] [--gpus N]
    configuration, weights' names and shapes, adapters, data, schedule and what would be resumed;
    the tensors that each rank would hold and the batches of its first step. Nothing is written.
    Not tried: memory (`plan` says it), devices, messages between ranks

Exit code: 0, or 2 where the run would not begin: `error:` says why.
"""

from pathlib import Path

from . import world
from .args import parse_args
from .cli import USER_ERROR, at_least, finish, has_colors, parser_of
from .errors import refuse
from .files import write_file
from .log_html import render

_MAX_CHARS = 1500  # of a piece of a sample in the terminal, and on the page
_MAX_PAGE_CHARS = 20_000
_WIDTH = 60
_TRAINED = "\x1b[32m"
_PLAIN = "\x1b[0m"


def main(words: list[str]) -> int:
    """Inspect a run's data, or do its dry run -> exit code."""
    parser = parser_of("inspect", __doc__)
    here = world.current()
    parser.add_argument(
        "--samples", type=at_least(0), default=3, metavar="N", help="shown of each dataset (3)"
    )
    parser.add_argument("--html", metavar="FILE", help="the same and more, as one page")
    parser.add_argument("--check", action="store_true", help="the dry run")
    parser.add_argument(
        "--gpus", type=at_least(1), default=here.size, metavar="N", help="ranks of the dry run (1)"
    )
    options, words = parser.parse_known_args(words)
    if options.check and options.html:
        parser.error("--check has no page: leave out --html")
    if not here.is_main:
        return 0  # each rank would say the same of all
    return finish(_check if options.check else _inspect, words, options)


def _check(words: list[str], options) -> None:
    with world.planned_world(options.gpus):
        arguments = _arguments(words)
        from .inspection import check  # torch: seconds, after typing errors

        check(arguments)


def _inspect(words: list[str], options) -> int:
    plan, refused = _read(words)
    from .inspection import PROBLEMS, DataInspector
    from .run import data_summary

    inspector = DataInspector(plan, options.samples)
    records = inspector.records()
    parts = list(inspector.parts())
    report = [line for line in plan.data.report if not line.startswith("  first ")]
    stops = [f"a run would stop: {refused}"] if refused is not None else []
    print("\n".join(report))
    print("\nrecords: " + ", ".join(f"{count:,} {name}" for name, count in records.items()))
    for part in parts:
        print("\n".join(_part_lines(part, has_colors())))
    if options.html:
        title = next((word for word in words if word.endswith((".yaml", ".yml", ".json"))), "run")
        names = {part.name for part in parts}
        facts = {name: text for name, text in data_summary(plan).items() if name not in names}
        text = render(
            _PAGE,
            title=f"inspect {title}",
            facts={"model": plan.arguments.model.model_name_or_path, **facts},
            records=records,
            report=stops + report,
            parts=parts,
            problems=PROBLEMS,
            visible=lambda text: visible(text, _MAX_PAGE_CHARS),
        )
        Path(options.html).parent.mkdir(parents=True, exist_ok=True)
        write_file(options.html, text)
        print(f"\nthe page is in {options.html}")
    for line in stops:
        print(f"\n{line}")
    return USER_ERROR if stops else 0


def _read(words: list[str]):
    """(run.Plan, the ValueError of a record at which a run would stop, or None). With such a record
    the plan is of the others."""
    arguments = _arguments(words)
    if arguments.data.streaming:
        remedy = "streaming=false max_samples=1000"
        refuse("streaming", True, "every sample is looked at", remedy)
    from .run import make_plan

    try:
        return make_plan(arguments), None
    except ValueError as error:
        if arguments.data.on_bad_record == "skip":
            raise
        try:
            plan = make_plan(parse_args([*words, "on_bad_record=skip"], needs_world=False))
        except ValueError:
            raise error from None
        return plan, error


def _arguments(words: list[str]):
    """Parse the RunArguments, and print their notes."""
    arguments = parse_args(words, needs_world=False)
    for line in arguments.warnings:
        print(f"note: {line}")
    return arguments


# -- the facts in the terminal


def visible(text: str, most: int) -> str:
    """The text with codes for invisible characters and those that control a terminal, without its
    middle where it is longer than `most`."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _part_lines(part, is_coloured: bool) -> list[str]:
    lines = ["", f"{part.name}: {part.summary}"]
    for name, numbers in part.problems.items():
        lines.append(f"  {name:16}{len(numbers):>7,}  {_first(numbers, 5)}".rstrip())
    if part.bars:
        lines.append("  tokens of a document")
    for lengths, count in part.bars:
        bar = "█" * round(40 * count / max(part.bars, key=lambda bar: bar[1])[1])
        lines.append(f"  {lengths:>13}{count:>10,} {bar}".rstrip())
    lines.append(f"  {part.packing}")
    lines += [f"  row {row.number:<7}{_row_line(row)}" for row in part.rows]
    for sample in part.samples:
        lines += ["", *_sample_lines(sample, is_coloured)]
    return lines


def _first(items: list, most: int) -> str:
    return ", ".join(map(str, items[:most])) + ", ..." * (len(items) > most)


def _row_line(row) -> str:
    """A picture of a row, then its documents' names."""
    picture = ""
    at = 0
    for i, (_, size) in enumerate(row.documents):
        at += size
        picture += "▓▒"[i % 2] * (round(_WIDTH * at / row.capacity) - len(picture))
    names = _first([name for name, _ in row.documents], 8)
    return f"{picture:·<{_WIDTH}} {at:,} of {row.capacity:,}: {names}"


def _sample_lines(sample, is_coloured: bool) -> list[str]:
    problems = " - " * bool(sample.problems) + ", ".join(sample.problems)
    lines = []
    for side in sample.sides:
        text = "".join(_marked(*run, is_coloured) for run in side.runs)
        lines += [f"  {side.name}{problems}", *(f"    {line}" for line in text.split("\n"))]
        problems = ""  # once for a pair
    return lines


def _marked(text: str, is_trained: bool, is_coloured: bool) -> str:
    """A run of tokens in the terminal, in colour or in «» where it is trained."""
    text = visible(text, _MAX_CHARS)
    before, after = (_TRAINED, _PLAIN)
    if not is_coloured:
        text = text.replace("«", "\\«").replace("»", "\\»")
        before, after = "«»"
    return f"{before}{text}{after}" if is_trained else text


# -- the facts on a page

_PAGE = """{% extends "base" %}
{% block style %}
:root { --mark: #c9f0d3; --ink: #0b3d1c; }
@media (prefers-color-scheme: dark) { :root { --mark: #1d4d2e; --ink: #c8f5d5; } }
a { color: inherit }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem } dd { margin: 0 }
h3 { margin-top: 1.2rem } details { margin: .6rem 0 }
.tiles small { display: block; font-weight: 400; color: var(--soft) }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 2px .7rem;
  font-size: .85rem } .bars i, .row i { background: var(--c0); border-radius: 0 3px 3px 0 }
.row { display: flex; height: 1.25rem; line-height: 1.25rem; margin: 2px 0;
  font-size: .7rem; gap: 1px; color: var(--back) }
.row span { width: 3rem; flex: none; color: var(--soft) }
.row i { overflow: hidden; text-align: center; font-style: normal; min-width: 0 }
.row i:nth-child(odd) { opacity: .7 } .row s { border: 1px dashed var(--line); min-width: 0 }
article { margin: .7rem 0 } article h4 { margin: 0 0 .3rem; font-size: .9rem }
.text, pre { font: .85rem/1.55 ui-monospace, monospace; white-space: pre-wrap;
  max-height: 28rem; overflow-y: auto; margin: 0 }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: .8rem; margin-top: .6rem;
  border-top: 1px dashed var(--soft); padding-top: .5rem }
mark { background: var(--mark); color: var(--ink); border-radius: 3px }
{% endblock %}

{% macro tile(name, count, is_bad=true) %}
<div class='card'><span>{{ name }}</span>
<b{% if count and is_bad %} class='c5'{% endif %}>{{ "{:,}".format(count) }}</b>
{%- if caller %}<small>{{ caller() }}</small>{% endif %}</div>
{% endmacro %}

{% macro text(side, problems) %}
<h4>{{ side.name }}{% if problems %} <b class='c5'>{{ problems|join(", ") }}</b>{% endif %}</h4>
<div class='text'>
{%- for run, is_trained in side.runs %}
{% if is_trained %}<mark>{{ visible(run) }}</mark>{% else %}{{ visible(run) }}{% endif %}
{% endfor %}</div>
{% endmacro %}

{% macro row(r) %}
{% set free = r.capacity - r.documents|sum(attribute=1) %}
<div class='row'><span>{{ r.number }}</span>
{%- for name, size in r.documents %}
<i style='flex:{{ size }} 0 0' title='{{ name }}: {{ "{:,}".format(size) }} tokens'>{{ name }}</i>
{%- endfor %}
{% if free %}<s style='flex:{{ free }} 0 0' title='{{ "{:,}".format(free) }} free'></s>{% endif %}
</div>
{% endmacro %}

{% block body %}
<h1>{{ title }}</h1>
<dl>{% for name, fact in facts.items() %}<dt>{{ name }}</dt><dd>{{ fact }}</dd>{% endfor %}</dl>
<h3>Records of the files</h3><div class='tiles'>
{% for name, count in records.items() %}{{ tile(name, count, name != "read") }}{% endfor %}</div>
<details><summary>what was read</summary>
<pre class='card'>{{ visible(report|join("\n")) }}</pre></details>
<p><mark>Marked</mark> tokens are trained: they carry loss. The others are read.</p>
{% for part in parts %}
{% set id = loop.index0 %}
{% set shown = part.samples|map(attribute="number")|list %}
<h2>{{ part.name }}</h2><p>{{ part.summary }}</p><div class='tiles'>
{% for name, numbers in part.problems.items() %}
{% call tile(name, numbers|length) %}{{ problems[name] }}{% for number in numbers[:5] %}
{{ ": " if loop.first else ", " }}
{%- if number in shown %}<a href='#{{ id }}-{{ number }}'>{{ number }}</a>
{%- else %}{{ number }}{% endif %}
{% endfor %}{% endcall %}
{% endfor %}</div>
<h3>Samples</h3>
{% for sample in part.samples %}
<article class='card' id='{{ id }}-{{ sample.number }}'>{{ text(sample.sides[0], sample.problems) }}
{% if sample.sides[1:] %}<div class='sides'>
{% for side in sample.sides[1:] %}<div>{{ text(side) }}</div>{% endfor %}</div>{% endif %}
</article>
{% endfor %}
{% if part.bars %}
{% set most = part.bars|map(attribute=1)|max %}
<h3>Tokens of a document</h3><div class='bars'>
{% for lengths, count in part.bars %}
<span>{{ lengths }}</span><i style='width:{{ "%.2f"|format(100 * count / most) }}%'></i>
<span>{{ "{:,}".format(count) }}</span>
{% endfor %}</div>
{% endif %}
<h3>Rows</h3><p>{{ part.packing }}</p>
{% for r in part.rows %}{{ row(r) }}{% endfor %}
{% endfor %}
{% endblock %}
"""
