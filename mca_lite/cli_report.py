"""The page of a run, report.html, drawn again; or several runs compared on one page.

python -m mca_lite report OUTPUT_DIR... [--output FILE]
    one folder:      its report.html, with what came into it since, such as generations.jsonl
    several folders: their curves, numbers, configurations and answers beside each other
    --output: the file to write (of several runs: comparison.html here)
"""

import argparse
import os
import sys

from .cli_errors import end
from .constants import PAGE_NAME, TRAINER_LOG_NAME
from .files import write_file
from .log_html import page
from .log_read import RunFolder


def main(argv: list[str] | None = None) -> int:
    """Write the page that `argv` (None: the command line) asks for -> exit code."""
    parser = argparse.ArgumentParser(
        prog="mca_lite report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="+", metavar="OUTPUT_DIR")
    parser.add_argument("--output", metavar="FILE")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        runs = [RunFolder(folder) for folder in options.folders]
        for run in runs:
            if not run.records:
                raise ValueError(
                    f"{run.name}: expected a run's folder with {TRAINER_LOG_NAME}, and it has "
                    "none, or one without lines"
                )
        path = options.output or "comparison.html"
        if options.output is None and len(runs) == 1:
            path = os.path.join(options.folders[0], PAGE_NAME)
        write_file(path, page(runs))
    except Exception as error:
        return end(error, None)
    print(path)
    return 0
