"""What inspect_data.py found as one HTML page that needs nothing besides itself."""

from collections.abc import Iterable
from html import escape

from .inspect_data import FOUND, Part, Row, Sample, Side, visible
from .run import data_summary

_MAX_CHARS = 20_000  # of a piece of a sample
_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1d2430; --dim: #667085;
  --line: #dde1e8; --mark: #c9f0d3; --ink: #0b3d1c; --a: #7aa2f7; --b: #a9c2fb; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --card: #1c2027; --text: #e4e7ec;
  --dim: #98a2b3; --line: #323843; --mark: #1d4d2e; --ink: #c8f5d5; --a: #3f63b8; --b: #2d4887;
  --bad: #ff8a7a; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.4rem } h2 { margin: 2.2rem 0 .2rem; font-size: 1.2rem }
h3 { margin: 1.2rem 0 .4rem; font-size: 1rem } p { margin: .2rem 0 .8rem } a { color: inherit }
.dim, dt { color: var(--dim) } .bad b { color: var(--bad) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem } dd { margin: 0 }
.tiles { display: grid; gap: .6rem; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)) }
details { margin: .6rem 0 }
.tiles div, article, pre { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: .5rem .8rem }
.tiles b { display: block; font-size: 1.3rem } .tiles small { color: var(--dim); display: block }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 2px .7rem;
  font-size: .85rem } .bars i { background: var(--a); border-radius: 0 3px 3px 0 }
.row { display: flex; height: 1.25rem; line-height: 1.25rem; margin: 2px 0;
  font-size: .7rem; gap: 1px }
.row span { width: 3rem; flex: none; color: var(--dim) }
.row i { background: var(--a); overflow: hidden; text-align: center; font-style: normal;
  min-width: 0 } .row i:nth-child(odd) { background: var(--b) }
.row s { border: 1px dashed var(--line); min-width: 0 }
article { margin: .7rem 0 } article h4 { margin: 0 0 .3rem; font-size: .9rem }
.text, pre { font: .85rem/1.55 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 28rem; overflow-y: auto; margin: 0 }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: .8rem; margin-top: .6rem;
  border-top: 1px dashed var(--dim); padding-top: .5rem }
mark { background: var(--mark); color: var(--ink); border-radius: 3px }
"""


def page(title: str, plan, report: list[str], records: dict[str, int], parts: list[Part]) -> str:
    """The page of a run.Plan. report: lines about its files; records, parts: as DataInspector has
    them."""
    head, lines = f"inspect {escape(title)}", _text("\n".join(report))
    facts = {"model": plan.arguments.model.model_name_or_path}
    told = [part.name for part in parts]
    facts |= {name: text for name, text in data_summary(plan).items() if name not in told}
    tiles = [(name, count, name != "read", "") for name, count in records.items()]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{head}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{head}</h1>\n<dl>",
            *(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items()),
            "</dl>\n<h3>Records of the files</h3>",
            _tiles(tiles),
            f"<details><summary>what was read</summary><pre>{lines}</pre></details>",
            "<p><mark>Marked</mark> tokens are trained: they carry loss. The others are read.</p>",
            *(html for number, part in enumerate(parts) for html in _part(number, part)),
            "</body>\n</html>\n",
        ]
    )


def _part(number: int, part: Part) -> Iterable[str]:
    yield f'<h2>{escape(part.name)}</h2>\n<p class="dim">{escape(part.summary)}</p>'
    shown = {sample.number for sample in part.samples}
    tiles = []
    for name, numbers in part.found.items():
        links = [f'<a href="#{number}-{n}">{n}</a>' if n in shown else str(n) for n in numbers[:5]]
        where = ": " + ", ".join(links) if links else ""
        tiles.append((name, len(numbers), True, f"<small>{FOUND[name]}{where}</small>"))
    yield _tiles(tiles)
    yield "<h3>Samples</h3>"
    yield from (_sample(number, sample) for sample in part.samples)
    if part.bars:
        yield '<h3>Tokens of a document</h3>\n<div class="bars">'
        most = max(count for _, count in part.bars)
        for lengths, count in part.bars:
            width = 100 * count / most
            yield f'<span>{lengths}</span><i style="width:{width:.2f}%"></i><span>{count:,}</span>'
        yield "</div>"
    yield f'<h3>Rows</h3>\n<p class="dim">{escape(part.packing)}</p>'
    yield from map(_row, part.rows)


def _tiles(tiles: list[tuple[str, int, bool, str]]) -> str:
    """(name, count, whether a count above 0 is bad, HTML below it) of each."""
    divs = []
    for name, count, is_bad, below in tiles:
        kind = ' class="bad"' if is_bad and count else ""
        divs.append(f"<div{kind}><b>{count:,}</b>{escape(name)}{below}</div>")
    return f'<div class="tiles">{"".join(divs)}</div>'


def _row(row: Row) -> str:
    blocks, used = [], 0
    for name, size in row.documents:
        used += size
        what = escape(f"{name}: {size:,} tokens")
        blocks.append(f'<i style="flex:{size} 0 0" title="{what}">{escape(name)}</i>')
    if free := row.capacity - used:
        blocks.append(f'<s style="flex:{free} 0 0" title="{free:,} free"></s>')
    return f'<div class="row"><span>{row.number}</span>{"".join(blocks)}</div>'


def _sample(part: int, sample: Sample) -> str:
    found = f' <span class="bad"><b>{", ".join(sample.found)}</b></span>' if sample.found else ""
    first, *others = map(_side, sample.sides)
    body = first.replace("</h4>", f"{found}</h4>", 1)
    if others:
        body += f'<div class="sides"><div>{"</div><div>".join(others)}</div></div>'
    return f'<article id="{part}-{sample.number}">{body}</article>'


def _side(side: Side) -> str:
    text = ""
    for run, is_trained in side.runs:
        text += f"<mark>{_text(run)}</mark>" if is_trained else _text(run)
    return f'<h4>{side.name}</h4><div class="text">{text}</div>'


def _text(text: str) -> str:
    return escape(visible(text, _MAX_CHARS))
