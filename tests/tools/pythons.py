"""The versions of Python and megatron-core: `make pythons` writes the table in tests/README.md.

python -m tests.tools.pythons [PYTHON ...]

Each interpreter (default: python3.10 to python3.13, those on PATH) resolves this package and its
test extra under constraints.txt by pip, without installing; this one has run the suite.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "tests" / "README.md"
BEGIN, END = "<!-- pythons: written by make pythons -->", "<!-- pythons: end -->"
MINORS = range(10, 14)
SHOWN = ("megatron-core", "torch", "transformers", "numpy")
HEAD = f"| Python | {' | '.join(SHOWN)} | shown by |\n|{' --- |' * (len(SHOWN) + 2)}"


def resolve(python: str) -> dict[str, str]:
    """{package: version} that pip would install for an interpreter. Exits with pip's error."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        report = Path(folder) / "report.json"
        pip = f"{folder}/bin/python -m pip install -q --dry-run --report {report}".split()
        words = [*pip, "-c", "constraints.txt", ".[test,plot,parquet]"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{python}: {done.stderr}")
        installed = json.loads(report.read_text())["install"]
    return {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in installed}


def row(python: str) -> str:
    """The line of an interpreter."""
    version = subprocess.check_output([python, "-c", "import sys; print(sys.version.split()[0])"])
    name = ".".join(version.decode().split(".")[:2])
    versions = resolve(python)
    is_own = name == ".".join(map(str, sys.version_info[:2]))
    how = "`make test`" if is_own else "`pip install --dry-run`: the suite was not run"
    return f"| {name} | {' | '.join(versions[package] for package in SHOWN)} | {how} |"


def main(pythons: list[str]) -> int:
    """Write the table of the interpreters into tests/README.md -> 0."""
    known = (shutil.which(f"python3.{minor}") for minor in MINORS)
    rows = [row(python) for python in pythons or filter(None, known)]
    text = README.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    table = "\n".join([HEAD, *rows])
    README.write_text(pattern.sub(lambda _: f"{BEGIN}\n{table}\n{END}", text))
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
