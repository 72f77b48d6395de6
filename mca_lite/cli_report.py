"""The page of a run, report.html, drawn again; or several runs compared on one page.

python -m mca_lite report OUTPUT_DIR... [options]
    one folder:      its report.html, with what came into it since, such as generations.jsonl
    several folders: their curves, numbers, configurations and answers beside each other
"""

from pathlib import Path

from .cli_errors import finish, parser_of
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


def _report(options) -> None:
    runs = [RunFolder(folder) for folder in options.folders]
    for run in runs:
        if not run.records:
            raise ValueError(
                f"{run.name}: expected a run's folder with {TRAINER_LOG_NAME}, and it has none, or "
                "one without lines"
            )
    own = runs[0].folder / PAGE_NAME if len(runs) == 1 else "comparison.html"
    path = Path(options.output or own)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, page(runs))
    compared = f": {', '.join(run.name for run in runs)}" if len(runs) > 1 else ""
    print(f"{path.absolute()}{compared}")
