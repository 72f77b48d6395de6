"""What inspect_data.py found as one HTML page that needs nothing besides itself."""

from collections.abc import Iterable

from .inspect_data import FOUND, Part, Row, Sample, Side, visible
from .log_html import document, esc, tiles
from .run import data_summary

_MAX_CHARS = 20_000  # of a piece of a sample
_STYLE = """
:root { --mark: #c9f0d3; --ink: #0b3d1c; }
@media (prefers-color-scheme: dark) { :root { --mark: #1d4d2e; --ink: #c8f5d5; } }
a { color: inherit }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem } dd { margin: 0 }
h3 { margin-top: 1.2rem } details { margin: .6rem 0 }
.tiles span.c5 { color: var(--c5); font-size: inherit }
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
"""


def page(title: str, plan, report: list[str], records: dict[str, int], parts: list[Part]) -> str:
    """The page of a run.Plan. report: lines about its files; records, parts: as DataInspector has
    them."""
    facts = {"model": plan.arguments.model.model_name_or_path}
    told = [part.name for part in parts]
    facts |= {name: text for name, text in data_summary(plan).items() if name not in told}
    rows = (f"<dt>{esc(name)}</dt><dd>{esc(text)}</dd>" for name, text in facts.items())
    read = _text("\n".join(report))
    body = [
        f"<h1>inspect {esc(title)}</h1><dl>{''.join(rows)}</dl><h3>Records of the files</h3>",
        tiles((name, _count(count, name != "read")) for name, count in records.items()),
        f"<details><summary>what was read</summary><pre class='card'>{read}</pre></details>",
        "<p><mark>Marked</mark> tokens are trained: they carry loss. The others are read.</p>",
        *(html for number, part in enumerate(parts) for html in _part(number, part)),
    ]
    return document(f"inspect {title}", _STYLE, body)


def _count(count: int, is_bad: bool) -> str:
    return f"<span class='c5'>{count:,}</span>" if count and is_bad else f"{count:,}"


def _part(number: int, part: Part) -> Iterable[str]:
    yield f"<h2>{esc(part.name)}</h2><p>{esc(part.summary)}</p>"
    shown = {sample.number for sample in part.samples}
    found = []
    for name, numbers in part.found.items():
        links = [f'<a href="#{number}-{n}">{n}</a>' if n in shown else str(n) for n in numbers[:5]]
        where = ": " + ", ".join(links) if links else ""
        found.append((name, f"{_count(len(numbers), True)}<small>{FOUND[name]}{where}</small>"))
    yield tiles(found)
    yield "<h3>Samples</h3>"
    yield from (_sample(number, sample) for sample in part.samples)
    if part.bars:
        yield '<h3>Tokens of a document</h3>\n<div class="bars">'
        most = max(count for _, count in part.bars)
        for lengths, count in part.bars:
            width = 100 * count / most
            yield f'<span>{lengths}</span><i style="width:{width:.2f}%"></i><span>{count:,}</span>'
        yield "</div>"
    yield f"<h3>Rows</h3><p>{esc(part.packing)}</p>"
    yield from map(_row, part.rows)


def _row(row: Row) -> str:
    blocks, used = [], 0
    for name, size in row.documents:
        used += size
        what = esc(f"{name}: {size:,} tokens")
        blocks.append(f'<i style="flex:{size} 0 0" title="{what}">{esc(name)}</i>')
    if free := row.capacity - used:
        blocks.append(f'<s style="flex:{free} 0 0" title="{free:,} free"></s>')
    return f'<div class="row"><span>{row.number}</span>{"".join(blocks)}</div>'


def _sample(part: int, sample: Sample) -> str:
    found = f' <b class="c5">{", ".join(sample.found)}</b>' if sample.found else ""
    first, *others = map(_side, sample.sides)
    body = first.replace("</h4>", f"{found}</h4>", 1)
    if others:
        body += f'<div class="sides"><div>{"</div><div>".join(others)}</div></div>'
    return f'<article class="card" id="{part}-{sample.number}">{body}</article>'


def _side(side: Side) -> str:
    text = ""
    for run, is_trained in side.runs:
        text += f"<mark>{_text(run)}</mark>" if is_trained else _text(run)
    return f'<h4>{side.name}</h4><div class="text">{text}</div>'


def _text(text: str) -> str:
    return esc(visible(text, _MAX_CHARS))
