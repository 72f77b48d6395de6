"""The page of a run, report.html, drawn again; or several runs compared on one page.

python -m mca_lite report OUTPUT_DIR... [options]
    one folder:      its report.html, with what came into it since, such as generations.jsonl
    several folders: their curves, numbers, configurations and answers beside each other
"""

import sys
from pathlib import Path

from .cli_errors import USER_ERROR, finish, parser_of
from .constants import PAGE_NAME, TRAINER_LOG_NAME
from .files import write_file
from .log_html import page
from .log_read import RunFolder


def main(words: list[str]) -> int:
    """Write the page that the words ask for -> exit code."""
    parser = parser_of("report", __doc__)
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
