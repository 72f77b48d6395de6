"""The docstrings of the public names as pages in build/docs, by pdoc: `make docs`."""

import re
import sys
from pathlib import Path

import pdoc

import mca_lite

FOLDER = Path(__file__).parents[2] / "build" / "docs"


def as_markdown(docstring: str) -> str:
    """A docstring whose shapes at the start of a line, as in `[n, h]: ...`, stay: Markdown takes
    them for definitions of links and drops them.
    """
    return re.sub(r"^(\s*)\[(?=[^]\n]*\]:)", r"\1\\[", docstring, flags=re.MULTILINE)


def main() -> int:
    # pdoc reads a module's __dict__; the package imports a name when it is first used
    vars(mca_lite).update({name: getattr(mca_lite, name) for name in mca_lite.__all__})
    pdoc.render.configure(show_source=False)
    pdoc.render.env.filters["to_markdown"] = as_markdown
    pdoc.pdoc("mca_lite", output_directory=FOLDER)
    print(f"{len(mca_lite.__all__)} public names in {FOLDER}/mca_lite.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
