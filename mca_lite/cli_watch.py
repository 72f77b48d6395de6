"""Runs as they train, beside each other in the terminal: numbers of their logs, and their past.

python -m mca_lite watch OUTPUT_DIR... [options]
    reads the folders' logs alone: from another machine that sees them, and before they exist;
    leaves on Ctrl-C, and when all runs have ended; one frame of folders without a run: exit code 2
"""

import inspect
import itertools
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from .cli import USER_ERROR, at_least, finish, has_colors, parser_of
from .files import PAGE_NAME, TRAINER_LOG_NAME, write_file
from .log_html import RunFolder, page
from .log_metrics import METRICS, format_duration

# -- watch

_WIDTH = 42  # of a run's column, in characters
_GAP = 2
_BLOCKS = "▁▂▃▄▅▆▇█"
_COLORS = {"running": 32, "finished": 36, "interrupted": 33, "hung?": 33, "failed": 31}
_FAINT = 2
_BOLD = 1
_ENDED = ("finished", "interrupted", "failed")
_SHOWN = [metric for metric in METRICS if metric.in_line or metric.tiles]


def main(words: list[str]) -> int:
    """Watch the runs -> exit code."""
    parser = parser_of("watch", __doc__)
    parser.add_argument("folders", nargs="+", metavar="OUTPUT_DIR", help="of a run")
    seconds = at_least(0, float)
    parser.add_argument(
        "--every", type=seconds, default=2.0, metavar="SECONDS", help="to the next frame (2)"
    )
    parser.add_argument(
        "--once", action="store_true", help="one frame, as where stdout is no terminal"
    )
    return finish(_watch, parser.parse_args(words))


def _watch(options) -> int | None:
    runs = [RunFolder(folder) for folder in options.folders]
    # other folders of output/* are left out, unless there is nothing else
    runs = [run for run in runs if run.may_hold_a_run()] or runs
    is_last = options.once or not sys.stdout.isatty()
    try:
        while True:
            size = shutil.get_terminal_size((100, 40))
            lines = frame([run.read() for run in runs], size.columns, has_colors())
            text = "\n".join(lines)
            if not is_last:  # from the top left, over the frame before, the rest of it cleared
                text = "\033[K\n".join(lines[: size.lines - 1])
                text = f"\033[H{text}\033[K\033[J"
            print(text, flush=True)
            if is_last and not any(run.records or "state" in run.summary for run in runs):
                return USER_ERROR
            if is_last or all(run.state() in _ENDED for run in runs):
                return None
            time.sleep(max(0.1, options.every))
    except KeyboardInterrupt:  # the way to leave
        return None


def frame(runs: Sequence[RunFolder], columns: int, has_colors: bool = False) -> list[str]:
    """The runs as lines of at most `columns` characters, as many beside each other as fit."""
    width = min(_WIDTH, columns)
    per_line = max(1, (columns + _GAP) // (width + _GAP))
    lines: list[str] = []
    for start in range(0, len(runs), per_line):
        cards = [_card(run, width) for run in runs[start : start + per_line]]
        lines += [""] * bool(lines)
        for cells in itertools.zip_longest(*cards, fillvalue=("", 0)):
            padded = [_painted(text, width, color * has_colors) for text, color in cells]
            lines.append((" " * _GAP).join(padded).rstrip())
    return lines


def _painted(text: str, width: int, color: int) -> str:
    """The text, cut or padded to `width`, in a colour of the terminal (0: none)."""
    if len(text) > width:
        text = f"{text[: width - 3]}..."
    padding = " " * (width - len(text))
    return f"\033[{color}m{text}\033[0m{padding}" if color else text + padding


def _card(run: RunFolder, width: int) -> list[tuple[str, int]]:
    """(text, colour) of a run's lines."""
    state = run.state()
    name = run.name
    if len(name) > width:
        name = f"...{name[3 - width :]}"
    lines = [(name, _BOLD)]
    if run.problems:
        lines += [(line, _COLORS["failed"]) for line in textwrap.wrap(state, width)]
    else:
        lines.append((_progress(run, state), _COLORS.get(state, _FAINT)))
    if not run.records:
        return lines
    for metric in _SHOWN:
        past = [value for _, value in run.points(metric.key)]
        if past:
            head = f"{metric.name:<15}{metric.form(past[-1]):<13}"
            lines.append((head + sparkline(past, width - len(head)), 0))
    return [*lines, (f"last line {format_duration(run.silence_s())} ago", _FAINT)]


def _progress(run: RunFolder, state: str) -> str:
    words = [state]
    eta = run.eta_s()
    if run.max_steps:
        words.append(f"step {run.step:,}/{run.max_steps:,} {run.step / run.max_steps:.0%}")
    elif run.records:
        words.append(f"step {run.step:,}")
    if state == "running" and eta is not None:
        words.append(f"eta {format_duration(eta)}")
    elif run.seconds is not None and run.records:
        words.append(f"after {format_duration(run.seconds)}")
    elif "state" in run.summary:
        words.append(f"no line for {format_duration(run.silence_s())}")
    return "  ".join(words)


def sparkline(values: Sequence[float], width: int) -> str:
    """Blocks of eight heights, `width` of them: the values from the first to the last."""
    low = min(values)
    span = max(values) - low or 1.0
    places = (i * (len(values) - 1) // max(1, width - 1) for i in range(width))
    return "".join(_BLOCKS[int(7 * (values[place] - low) / span)] for place in places)


# -- report


def main_report(words: list[str]) -> int:
    """Draw report.html of a run, or compare several runs on one page.

    python -m mca_lite report OUTPUT_DIR... [options]
        one folder:      its report.html, with files of later, such as generations.jsonl
        several folders: their curves, numbers, configurations and answers beside each other
    """
    parser = parser_of("report", inspect.getdoc(main_report))
    parser.add_argument("folders", nargs="+", metavar="OUTPUT_DIR", help="of a run")
    parser.add_argument(
        "--output", metavar="FILE", help="the page (of several runs: comparison.html here)"
    )
    return finish(_report, parser.parse_args(words))


def _report(options) -> int:
    runs = [RunFolder(folder) for folder in options.folders]
    drawn = [run for run in runs if run.records]
    missing = [f"{run.name}: {_why_not(run)}" for run in runs if not run.records]
    if not drawn:
        raise ValueError("\n".join(missing))
    path = Path("comparison.html")
    if len(runs) == 1:
        path = runs[0].folder / PAGE_NAME
    path = Path(options.output or path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, page(drawn))
    compared = f": {', '.join(run.name for run in drawn)}" if len(drawn) > 1 else ""
    print(f"{path.absolute()}{compared}")
    for line in missing:
        print(f"left out: {line}", file=sys.stderr)
    return USER_ERROR if missing else 0


def _why_not(run: RunFolder) -> str:
    if run.problems:
        return run.state()
    return f"expected a run's folder with {TRAINER_LOG_NAME}, and it has none, or one without lines"
