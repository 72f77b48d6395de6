"""Runs as they train, beside each other in the terminal: curves and numbers of their logs.

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
from .log_html import RunFolder, page, smooth
from .log_metrics import format_duration, format_rate

# -- watch

_WIDTH, _GAP, _CURVE_HEIGHT = 42, 2, 5  # of a run's column, in characters
_COLORS = {"running": 32, "finished": 36, "interrupted": 33, "hung?": 33, "failed": 31}
_ENDED = ("finished", "interrupted", "failed")
# key of the log -> its name and form in a column, beside the curve of its past
_ROWS = {
    "loss": ("loss", "{:.4f}".format),
    "eval_loss": ("eval_loss", "{:.4f}".format),
    "rewards/accuracies": ("pairs ahead", "{:.1%}".format),
    "grad_norm": ("grad norm", "{:.3f}".format),
    "learning_rate": ("lr", "{:.2e}".format),
    "tokens_per_second": ("tokens/s", format_rate),
    "mfu": ("MFU", "{:.1%}".format),
    "padding_fraction": ("padding", "{:.1%}".format),
    "peak_memory_gib": ("memory", "{:.2f} GiB".format),
    "expert_load_max": ("experts, most", "{:.2f} x mean".format),
    "expert_load_min": ("experts, least", "{:.2f} x mean".format),
}


def main(words: list[str]) -> int:
    """Watch as the words say -> exit code."""
    parser = parser_of("watch", __doc__)
    parser.add_argument("folders", nargs="+", metavar="OUTPUT_DIR", help="of a run")
    seconds = at_least(0, float)
    parser.add_argument(
        "--every", type=seconds, default=2.0, metavar="SECONDS", help="to the next frame (2)"
    )
    parser.add_argument(
        "--once", action="store_true", help="one frame; what is no terminal gets one too"
    )
    return finish(_watch, parser.parse_args(words))


def _watch(options) -> int | None:
    runs = [RunFolder(folder) for folder in options.folders]
    is_terminal = sys.stdout.isatty()
    # of output/* what holds other things is left out, unless there is nothing else
    runs = [run for run in runs if run.may_hold_a_run()] or runs
    is_last = options.once or not is_terminal
    try:
        while True:
            size = shutil.get_terminal_size((100, 40))
            lines = frame([run.read() for run in runs], size.columns, has_colors())
            if not is_last:  # from the top left; what an earlier frame left is cleared
                lines = [f"{line}\033[K" for line in lines[: size.lines - 1]]
                lines[0], lines[-1] = f"\033[H{lines[0]}", f"{lines[-1]}\033[J"
            print("\n".join(lines), flush=True)
            if is_last and not any(run.records or run.summary.state for run in runs):
                return USER_ERROR
            if is_last or all(run.state() in _ENDED for run in runs):
                return None
            time.sleep(max(0.1, options.every))
    except KeyboardInterrupt:  # the way to leave
        return None


def frame(runs: Sequence[RunFolder], columns: int, has_colors: bool = False) -> list[str]:
    """The runs as lines: as many beside each other as `columns` characters hold."""
    width = min(_WIDTH, columns)
    per_line = max(1, (columns + _GAP) // (width + _GAP))
    lines: list[str] = []
    for start in range(0, len(runs), per_line):
        cards = [_card(run, width, has_colors) for run in runs[start : start + per_line]]
        lines += [""] if lines else []
        for cells in itertools.zip_longest(*cards, fillvalue=("", 0)):
            padded = (text + " " * (width - size) for text, size in cells)
            lines.append((" " * _GAP).join(padded).rstrip())
    return lines


def _card(run: RunFolder, width: int, has_colors: bool) -> list[tuple[str, int]]:
    """A run's lines, each with the characters that it takes on the screen."""
    state = run.state()
    lines = []

    def add(text: str, code: int | None = None) -> None:
        text = text if len(text) <= width else f"{text[: width - 3]}..."
        colored = f"\033[{code}m{text}\033[0m" if has_colors and code is not None else text
        lines.append((colored, len(text)))

    add(run.name if len(run.name) <= width else "..." + run.name[3 - width :], 1)
    if run.problems:
        for line in textwrap.wrap(state, width):
            add(line, 31)
    else:
        add(_progress(run, state), _COLORS.get(state, 2))
    points = [value for _, value in run.points("loss")]
    if not points:
        return lines
    for line in curve(smooth(points, 0.5), width, _CURVE_HEIGHT):
        add(line, 34)
    for key, (label, form) in _ROWS.items():
        past = [value for _, value in run.points(key)]
        if past:
            head = f"{label:<15}{form(past[-1]):<13}"
            add(head + curve(past, max(0, width - len(head)), 1)[0])
    add(f"last line {format_duration(run.quiet_s())} ago", 2)
    return lines


def _progress(run: RunFolder, state: str) -> str:
    words = [state]
    if run.max_steps:
        words.append(f"step {run.step:,}/{run.max_steps:,} {run.step / run.max_steps:.0%}")
    elif run.records:
        words.append(f"step {run.step:,}")
    eta = run.eta_s()
    if state == "running" and eta is not None:
        words.append(f"eta {format_duration(eta)}")
    elif run.seconds is not None and run.records:
        words.append(f"after {format_duration(run.seconds)}")
    elif run.summary.state is not None:
        words.append(f"no line for {format_duration(run.quiet_s())}")
    return "  ".join(words)


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Lines of braille: a curve of the values from the left to the right, each character two dots
    wide and four high; a constant lies in the middle."""
    # braille's bits, by row and column of a character's dots
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    low = min(values)
    high = max(values)
    dots = 4 * height
    cells = [[0x2800] * width for _ in range(height)]
    above = None
    for x in range(2 * width):
        place = x * (len(values) - 1) / max(1, 2 * width - 1)
        left = int(place)
        right = min(left + 1, len(values) - 1)
        value = values[left] + (place - left) * (values[right] - values[left])
        share = (high - value) / (high - low) if high > low else 0.5
        y = round(share * (dots - 1))
        # down or up to the one before, so that a steep curve has no holes
        ends = sorted((y, y if above is None else above))
        for row in range(ends[0], ends[1] + 1):
            cells[row // 4][x // 2] |= bits[row % 4][x % 2]
        above = y
    return ["".join(map(chr, line)) for line in cells]


# -- report


def main_report(words: list[str]) -> int:
    """Draw report.html of a run again, or compare several runs on one page.

    python -m mca_lite report OUTPUT_DIR... [options]
        one folder:      its report.html, with what came into it since, such as generations.jsonl
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
    left = [f"{run.name}: {_why_not(run)}" for run in runs if not run.records]
    if not drawn:
        raise ValueError("\n".join(left))
    own = drawn[0].folder / PAGE_NAME if len(runs) == 1 else "comparison.html"
    path = Path(options.output or own)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, page(drawn))
    compared = f": {', '.join(run.name for run in drawn)}" if len(drawn) > 1 else ""
    print(f"{path.absolute()}{compared}")
    for line in left:
        print(f"left out: {line}", file=sys.stderr)
    return USER_ERROR if left else 0


def _why_not(run: RunFolder) -> str:
    if run.problems:
        return run.state()
    return f"expected a run's folder with {TRAINER_LOG_NAME}, and it has none, or one without lines"
