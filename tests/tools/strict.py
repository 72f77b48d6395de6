"""Types of the package by `mypy --strict`: python -m tests.tools.strict [--list]

Prints the number of errors and of definitions without types, and fails above LIMITS or if an
argument of a rule is Any. --list prints the errors too. A limit is what was measured.
"""

import ast
import sys
from pathlib import Path

from mypy import api

PACKAGE = Path(__file__).parents[2] / "mca_lite"
LIMITS = {"errors": 606, "untyped definitions": 100, "Any in rules": 0}


def arguments_of_rules() -> list[str]:
    """module:line of the arguments typed Any, or not at all, in the modules of rules."""
    found = []
    for path in sorted(PACKAGE.glob("*_rules*.py")):
        functions = [
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)
        ]
        for arg in (
            a for function in functions for a in ast.walk(function.args) if isinstance(a, ast.arg)
        ):
            kind = ast.unparse(arg.annotation) if arg.annotation else "Any"
            if kind == "Any" and arg.arg not in ("self", "cls"):
                found.append(f"{path.name}:{arg.lineno}: {arg.arg}")
    return found


def main() -> int:
    report, faults, _ = api.run(["--strict", "--cache-dir=.mypy_cache/strict", str(PACKAGE)])
    lines = [line for line in report.splitlines() if ": error: " in line]
    rules = arguments_of_rules()
    if "--list" in sys.argv:
        print(*lines, *rules, sep="\n")
    counts = {
        "errors": len(lines),
        "untyped definitions": sum(line.endswith("[no-untyped-def]") for line in lines),
        "Any in rules": len(rules),
    }
    print(
        *(f"{name}: {count} (at most {LIMITS[name]})" for name, count in counts.items()), sep="\n"
    )
    return bool(faults) or any(counts[name] > LIMITS[name] for name in LIMITS)


if __name__ == "__main__":
    sys.exit(main())
