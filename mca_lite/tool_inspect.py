"""A run before it begins: its data, and with --check everything up to its first step.

python -m mca_lite inspect config.yaml [key=value ...] [options]
    samples as the model reads them, trained tokens marked (in colour in a terminal, else in «»);
    bad, truncated and label-less records; duplicates, double BOS, turns without an end; lengths,
    and the samples of some packed rows. Tokenised data stays in cache_dir for the run. Large data:
    max_samples=10000. No weights here: train_from_scratch=true

python -m mca_lite inspect --check config.yaml [key=value ...] [--gpus N]
    configuration, weights' names and shapes, adapters, data, schedule and the checkpoint to resume;
    the tensors of each rank and the batches of its first step. Nothing of the run is written. Not
    tried: memory (see `plan`), devices, messages between ranks

Exit code: 0, or 2 for a run that would not begin, with the reason.
"""

import collections
import inspect
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from . import world
from .args import parse_args
from .cli import USER_ERROR, at_least, finish, parser_of
from .errors import refuse
from .files import write_file
from .tool_page import render

_MAX_CHARS = 1500  # the longest piece of a sample in the terminal, and below on the page
_MAX_PAGE_CHARS = 20_000


def has_colors() -> bool:
    """True if a command may print in colours: stdout is a terminal, and NO_COLOR is not set."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def main(words: list[str]) -> int:
    """Print facts about a run's data, or with --check do its dry run -> exit code. Ranks other than
    0 only check the options."""
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
        return 0  # rank 0 prints for all ranks
    return finish(_check if options.check else _inspect, words, options)


def _check(words: list[str], options: Any) -> None:
    with world.planned_world(options.gpus):
        arguments = _arguments(words)
        from .tool_inspection import (
            check,  # imports torch, which takes seconds, so typing errors show first
        )

        check(arguments)


def _inspect(words: list[str], options: Any) -> int | None:
    plan, stop = _read(words)
    from .run import data_summary
    from .tool_inspection import PROBLEMS, DataInspector

    inspector = DataInspector(plan, options.samples)
    facts = {
        "facts": {"model": plan.arguments.model.model_name_or_path, **data_summary(plan)},
        "report": plan.data.report,
        "stop": stop,
        "records": inspector.records(),
        "parts": list(inspector.parts()),
        "problems": PROBLEMS,
    }
    marks = ("\x1b[32m", "\x1b[0m") if has_colors() else "«»"
    terminal = jinja2.Template(_TERMINAL, trim_blocks=True)
    print(terminal.render(facts, marks=marks, visible=partial(visible, most=_MAX_CHARS)))
    if options.html:
        text = render(
            _PAGE, **facts, title="inspect", visible=partial(visible, most=_MAX_PAGE_CHARS)
        )
        Path(options.html).parent.mkdir(parents=True, exist_ok=True)
        write_file(options.html, text)
        print(f"\nthe page is in {options.html}")
    return USER_ERROR if stop else None


def _read(words: list[str]) -> tuple[Any, str]:
    """Plan the run that the command line `words` configures, to look at its data -> (run.Plan,
    message for a bad record that would stop a run, or ""). If there is such a record, the plan
    skips bad records. ConfigError for a run with streaming, ValueError if too many records are bad
    or something else would stop the run."""
    arguments = _arguments(words)
    if arguments.streaming:
        remedy = "streaming=false max_samples=1000"
        refuse("streaming", True, "every sample is looked at", remedy)
    from .run import make_plan

    try:
        return make_plan(arguments), ""
    except ValueError as error:
        arguments = parse_args([*words, "on_bad_record=skip"], needs_world=False)
        return make_plan(arguments), f"a run would stop: {error}"


def _arguments(words: list[str]) -> Any:
    """Parse command line words into RunArguments, and print its warnings, such as keys without
    effect."""
    arguments = parse_args(words, needs_world=False)
    for line in arguments.warnings:
        print(f"note: {line}")
    return arguments


def visible(text: str, most: int) -> str:
    """The text with escape codes for invisible and control characters except line breaks. If it is
    longer than `most` characters, " ... " replaces its middle."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


# -- the facts in the terminal, and on a page

_TERMINAL = """{% for line in report if not line.startswith("  first ") %}
{{ line }}
{% endfor %}

records:
{%- for name, count in records.items() %} {{ "{:,} {}".format(count, name) }}
{%- if not loop.last %},{% endif %}
{% endfor %}

{% for part in parts %}

{{ part.name }}: {{ facts[part.name] }}
{% for name, numbers in part.problems.items() %}
  {{ "{:16}{:7,}".format(name, numbers|length) }}
{%- if numbers %}  {{ numbers[:5]|join(", ") }}{% endif %}
{%- if numbers|length > 5 %}, ...{% endif %}

{% endfor %}
{% if part.pictures %}
  {{ part.pictures }}
{% endif %}
{% if part.bars %}
  tokens of a document
{% set most = part.bars|map(attribute=1)|max %}
{% for lengths, count in part.bars %}
  {{ "{:>13}{:>10,} {}".format(lengths, count, "█" * (40 * count // most))|trim("\n ") }}
{% endfor %}
{% endif %}
  {{ part.packing }}
{% for row in part.rows %}
  row {{ "{:<7}".format(row.number) }}{{ row.samples|sum(attribute=1) }} of {{ row.capacity }}:
{%- for name, _ in row.samples[:8] %} {{ name }}{% if not loop.last %},{% endif %}{% endfor %}
{%- if row.samples|length > 8 %}, ...{% endif %}

{% endfor %}
{% for sample in part.samples %}
{% for side in sample.sides %}
{% if loop.first %}

{% endif %}
  {{ side.name }}
{%- if loop.first and sample.problems %} - {{ sample.problems|join(", ") }}{% endif %}

    {% for text, is_trained in side.runs %}
{{- marks[0] if is_trained }}{{ visible(text)|indent(4, blank=true) }}{{ marks[1] if is_trained }}
{%- endfor %}

{% for _, caption in side.pictures %}
    {{ visible(caption) }}
{% endfor %}
{% endfor %}
{% endfor %}
{% endfor %}
{{ stop }}"""

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
figure { display: inline-block; margin: .6rem .8rem 0 0; font-size: .8rem }
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
{% for url, caption in side.pictures %}
<figure><img src='{{ url }}' alt=''><figcaption>{{ visible(caption) }}</figcaption></figure>
{% endfor %}
{% endmacro %}

{% macro row(r) %}
{% set free = r.capacity - r.samples|sum(attribute=1) %}
<div class='row'><span>{{ r.number }}</span>
{%- for name, size in r.samples %}
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
{% if stop %}<p class='c5'>{{ visible(stop) }}</p>{% endif %}
<p><mark>Marked</mark> tokens are trained: they carry loss. The others are read.</p>
{% for part in parts %}
{% set id = loop.index0 %}
{% set shown = part.samples|map(attribute="number")|list %}
<h2>{{ part.name }}</h2><p>{{ facts[part.name] }}</p>
{% if part.pictures %}<p>{{ part.pictures }}</p>{% endif %}<div class='tiles'>
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


# -- parity

DIFFERS = 3  # exit code
_WORST = 10

# keyed by the last or first word in the name of the first difference
_CAUSES = {
    "embedding": "the rows of the embedding, their scale, or how the vocabulary is cut",
    "attention": "rotary base or scaling, the size or the groups of heads, the mask or window, "
    "norms of queries and keys, or the weights of q, k, v and o",
    "mlp": "the activation, the order of gate and up, their weights; with experts the router's "
    "scores, its choice, or the way of tokens to experts and back",
    "layer": "what stands between attention and MLP: norms after them, a multiplier of residuals",
    "norm": "the weight or epsilon of the last norm",
    "logits": "the head's weight, its tie to the embedding, a scale or cap of logits",
    "micro-batch": "labels, the mask of trained tokens, or what the loss is a mean over",
    "gradients": "the forward pass agrees to its bounds: the backward pass of these modules, or "
    "the sum of their gradients over ranks (tensor, sequence, context, expert or data parallel)",
}


def main_parity(words: list[str]) -> int:
    """Compare the first step of a layout with plain torch: losses, outputs of layers, gradients.

    torchrun --nproc_per_node N -m mca_lite parity config.yaml [key=value ...]
        losses, outputs of layers, logits and gradients by parameter, beside transformers' model in
        a higher precision on rank 0; the first part of the model that differs, and its most likely
        cause. One rank needs no torchrun: python -m mca_lite parity config.yaml

    A smaller step shows as much: global_batch_size=8 cutoff_len=512. The model on rank 0 computes
    in float32 for a run in bf16, in float64 for one in float32, and once more in the run's own
    precision: the difference is rounding. A layout may be three times as far off, plus 1e-4. In
    bf16 the rounding of a loss counts as 1e-3 or more, and with experts other roundings count as
    one token or more, which may go to another expert. Rank 0 needs 8 bytes for each parameter of
    the whole model beside its part of the layout, and the activations of a micro-batch in float32,
    twice that for a run in float32; in host memory 4 bytes for each parameter. Dropout and
    multi-token prediction are off; adapters that would begin at 0 get small values. Nothing of the
    run is written but its tokenised data, into cache_dir.

    Exit code: 0 where they agree, 3 where they differ; the same on every rank.
    """
    _, words = parser_of("parity", inspect.getdoc(main_parity)).parse_known_args(words)
    return finish(_compare, words)


def _compare(words: list[str]) -> int:
    world.settle()
    arguments = parse_args(words)
    _leave_out_chance(arguments)
    from . import parallel, tool_parity
    from .run import make_plan

    plan = make_plan(arguments)
    if plan.model.source is None and not plan.model.from_scratch:
        reason = "transformers cannot read a checkpoint of this package"
        remedy = "a Hugging Face folder of it, python -m mca_lite convert"
        refuse("model_name_or_path", str(plan.model.folder), reason, remedy)
    rows = tool_parity.compare(plan)
    if rows:
        verdict = _verdict(rows, arguments.training.bf16)
        print("\n".join([*_table(rows), "", *verdict]), flush=True)
    return max(parallel.gather(DIFFERS * any(row.differs for row in rows)))


def _leave_out_chance(arguments: Any) -> None:
    """Switch off the adapters' dropout in the arguments, and on megatron-core also other dropout
    and multi-token prediction, so that two runs compute the same; refuse fp16 and fp8."""
    args = arguments.training
    for key in ("fp16", "fp8"):
        value = getattr(args, key)
        if value:
            refuse(key, value, "its rounding is not measured here", "bf16: true, or float32")
    if arguments.backend.use_mca:
        args.attention_dropout = args.hidden_dropout = 0.0
        args.mtp_num_layers = 0
    if "lora" in arguments.parts:
        arguments.parts["lora"].lora_dropout = 0.0


def _table(rows: Any) -> list[str]:
    gradients = [row for row in rows if row.kind == "gradients"]
    gradients.sort(key=lambda row: row.distance / row.bound)
    worst = {row.group: row for row in gradients}
    counts = collections.Counter(row.group for row in gradients)
    return [
        f"{'':52}{'size':>10}{'distance':>10}{'rounding':>10}{'bound':>10}",
        *(_line(row, row.name) for row in rows if row.kind != "gradients"),
        f"gradients: the worst of each kind, of {len(gradients)}",
        *(_line(row, f"{group} ({counts[group]})") for group, row in reversed(worst.items())),
        "the worst of all",
        *(_line(row, row.name) for row in reversed(gradients[-_WORST:])),
    ]


def _line(row: Any, name: str) -> str:
    numbers = (row.size, row.distance, row.noise, row.bound)
    line = f"  {name:50}" + "".join(f"{number:10.1e}" for number in numbers)
    return line + "  differs" * row.differs


def _verdict(rows: Any, bf16: bool) -> list[str]:
    lines = ["right: the layout computes what plain torch does, to rounding"]
    wrong = [row for row in rows if row.differs]
    if wrong:
        gradients = [row for row in rows if row.kind == "gradients"]
        count = sum(row.differs for row in gradients)
        lines = [
            f"wrong: {wrong[0].name} differs first, by {wrong[0].distance:.1e} where rounding "
            f"explains {wrong[0].bound:.1e}; {count} of {len(gradients)} gradients differ",
            f"most likely: {_cause(wrong, gradients)}",
        ]
    if bf16:
        hidden = max(row.bound for row in rows if row.kind == "outputs")
        hint = f"rounding hides errors below {hidden:.1e} of an output"
        lines.append(f"{hint}: bf16=false shows smaller ones")
    return lines


def _cause(wrong: list[Any], gradients: list[Any]) -> str:
    first = wrong[0]
    if first.kind != "gradients":
        words = first.name.split()
        return _CAUSES.get(words[-1]) or _CAUSES[words[0]]
    shares = [row.distance for row in gradients]
    if wrong == gradients and max(shares) < 1.05 * min(shares):
        return f"every gradient is off by {shares[0]:.0%}: the mean over ranks or over tokens"
    return _CAUSES["gradients"]
