"""Wrong changes of the package, each tried alone in a copy of the tree: a test must notice it.

python -m tests.tools.mutations [words of a row's name]

A row survives if its tests pass with the change. It is stale if its text is not in the package
exactly once; modules may be renamed and merged, so a row names none.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = "mca_lite tests configs train.py setup.cfg pyproject.toml README.md CHANGELOG.md".split()

# (what is wrong, text of the package, the text in its place, tests that fail then)
ROWS: list[tuple[str, str, str, str]] = []


def copy_tree(folder: Path) -> None:
    skipped = shutil.ignore_patterns("__pycache__", ".*")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=skipped)
        else:
            shutil.copy(ROOT / name, folder / name)


def run_tests(folder: Path, tests: list[str]) -> subprocess.CompletedProcess:
    """pytest on the copy; its exit code is 0 if all pass and 1 if one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"tests/{test}" for test in tests]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(folder)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a change may leave a file's size and second
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def verdict(folder: Path, old: str, new: str, tests: str) -> str:
    """"noticed", "SURVIVES", or why the row shows nothing; the copy is as before then."""
    modules = {path: path.read_text() for path in (folder / "mca_lite").glob("**/*.py")}
    count = sum(text.count(old) for text in modules.values())
    if count != 1:
        return f"STALE: its text is there {count} times"
    [(path, text)] = [item for item in modules.items() if old in item[1]]
    path.write_text(text.replace(old, new))
    code = run_tests(folder, tests.split()).returncode
    path.write_text(text)
    return {0: "SURVIVES", 1: "noticed"}.get(code, f"STALE: pytest ends with {code}")


def main(words: list[str]) -> int:
    rows = [row for row in ROWS if not words or any(word in row[0] for word in words)]
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        unchanged = run_tests(folder, sorted({test for row in rows for test in row[3].split()}))
        if unchanged.returncode:
            print(unchanged.stdout, "the tests do not pass without a change", sep="\n")
            return 2
        for what, *row in rows:
            found = verdict(folder, *row)
            failed += found != "noticed"
            print(f"{found:10} {what}", flush=True)
    print(f"{len(rows) - failed} of {len(rows)} wrong changes noticed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
