"""Watch runs side by side in the terminal while they train: values in their logs, and how these
changed.

python -m mca_lite watch OUTPUT_DIR... [options]
    reads only files in the folders: also from another machine that sees them, and before they
    exist; ends on Ctrl-C, or when all runs have ended. Exit code 2 for a single frame without a run
"""

import inspect
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cli import USER_ERROR, at_least, finish, parser_of
from .files import PAGE_NAME, TRAINER_LOG_NAME, write_file
from .tool_page import FIRST, NO_RUN, RunFolder, beside, figures, metrics_of, page

# -- watch

_NAME = 18  # width of the metrics' names; _COLUMN: of a run's column with its gap
_COLUMN = 32
_BLOCKS = "▁▂▃▄▅▆▇█"
_ENDED = ("finished", "interrupted", "failed")


def main(words: list[str]) -> int:
    """Show runs in the terminal as the command line says -> exit code."""
    parser = parser_of("watch", __doc__)
    parser.add_argument("folders", nargs="+", metavar="OUTPUT_DIR", help="of a run")
    seconds = at_least(0.1, float)
    parser.add_argument(
        "--every", type=seconds, default=2.0, metavar="SECONDS", help="to the next frame (2)"
    )
    parser.add_argument(
        "--once", action="store_true", help="one frame, as where stdout is no terminal"
    )
    return finish(_watch, parser.parse_args(words))


def _watch(options: Any) -> int | None:
    runs = [RunFolder(folder) for folder in options.folders]
    is_last = options.once or not sys.stdout.isatty()
    while True:
        # folders without a run (from output/*) are skipped, unless there is nothing else
        begun = [run for run in runs if run.read().state() != NO_RUN]
        size = shutil.get_terminal_size((100, 40))
        shown = begun or runs
        lines = frame(shown, size.columns)
        if is_last:
            print("\n".join(lines))
            return None if begun else USER_ERROR
        # from the top left of a cleared screen
        print("\033[H\033[J" + "\n".join(lines[: size.lines - 1]), flush=True)
        if all(run.state() in _ENDED for run in shown):
            return None
        time.sleep(options.every)


def frame(runs: Sequence[RunFolder], columns: int) -> list[str]:
    """One screen as text lines: runs as columns, as many side by side as fit into `columns`
    characters, but at least one."""
    per_line = max(1, (columns - _NAME) // _COLUMN)
    width = min(_COLUMN, max(2, columns - _NAME))
    lines: list[str] = []
    for start in range(0, len(runs), per_line):
        rows = beside(_cells(run, width - 2) for run in runs[start : start + per_line])
        for name, texts in rows.items():
            cells = [f"{text[: width - 2]:<{width}}" for text in texts]
            lines.append(f"{name:<{_NAME}}{''.join(cells)}".rstrip())
    for run in runs:
        for note in run.notes:
            lines += textwrap.wrap(note, columns)
    return lines


def _cells(run: RunFolder, width: int) -> dict[str, str]:
    """The lines of a run's column on the screen: {line name: text}, with important lines at the
    top. A metric with values has its figure (the value that stands for the run) and a sparkline, a
    small curve of the values. width: characters of the column; frame() cuts longer texts."""
    found = figures(run)
    first = {name: found[name] for name in FIRST if name in found}
    cells = {"": run.name[-width:], **first, " ": "", **found}
    for metric in metrics_of(run):
        past = run.values(metric.key)
        if past:
            newest = f"{cells[metric.name]:<14}"
            cells[metric.name] = newest + sparkline(past, width - len(newest))
    return cells


def sparkline(values: Sequence[float], width: int) -> str:
    """A text of `width` block characters, with eight heights, that shows the values from first to
    last."""
    low = min(values)
    span = max(values) - low or 1.0
    places = (i * (len(values) - 1) // max(1, width - 1) for i in range(width))
    return "".join(_BLOCKS[int(7 * (values[place] - low) / span)] for place in places)


# -- report


def main_report(words: list[str]) -> int:
    """Draw report.html of a run, or compare several runs on one page.

    python -m mca_lite report OUTPUT_DIR... [options]
        one folder:      its report.html, also with files written later, such as generations.jsonl
        several folders: their curves, values, configurations and answers side by side
    """
    parser = parser_of("report", inspect.getdoc(main_report))
    parser.add_argument("folders", nargs="+", metavar="OUTPUT_DIR", help="of a run")
    parser.add_argument(
        "--output", metavar="FILE", help="the page (of several runs: comparison.html here)"
    )
    return finish(_report, parser.parse_args(words))


def _report(options: Any) -> None:
    runs = [RunFolder(folder) for folder in options.folders]
    drawn = [run for run in runs if run.records]
    path = runs[0].folder / PAGE_NAME
    if len(runs) > 1:
        path = Path("comparison.html")
    if options.output:
        path = Path(options.output)
    if drawn:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, page(drawn))
        print(path.absolute())
    missing = []
    for run in runs:
        if not run.records:
            expected = f"{run.name}: expected a run's folder, with lines in {TRAINER_LOG_NAME}"
            missing += run.notes or [expected]
    if missing:
        raise ValueError("\n".join(missing))
