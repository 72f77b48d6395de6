"""The page of a run, report.html, drawn again; or several runs compared on one page.

python -m mca_lite report OUTPUT_DIR... [--output FILE]
    one folder:      its report.html, with what came into it since, such as generations.jsonl
    several folders: their curves, numbers, configurations and answers beside each other
    --output: the file to write (of several runs: comparison.html here)
"""

import os

from .cli_errors import finish, parser_of
from .constants import PAGE_NAME, TRAINER_LOG_NAME
from .files import write_file
from .log_html import page
from .log_read import RunFolder


def main(argv: list[str] | None = None) -> int:
    """Write the page that `argv` (None: the command line) asks for -> exit code."""
    parser = parser_of("report", __doc__)
    parser.add_argument("folders", nargs="+", metavar="OUTPUT_DIR")
    parser.add_argument("--output", metavar="FILE")
    options = parser.parse_args(argv)
    return finish(_report, options.folders, options.output)


def _report(folders: list[str], output: str | None) -> None:
    runs = [RunFolder(folder) for folder in folders]
    for run in runs:
        if not run.records:
            raise ValueError(
                f"{run.name}: expected a run's folder with {TRAINER_LOG_NAME}, and it has none, or "
                "one without lines"
            )
    path = output or "comparison.html"
    if output is None and len(runs) == 1:
        path = os.path.join(folders[0], PAGE_NAME)
    write_file(path, page(runs))
    print(path)
