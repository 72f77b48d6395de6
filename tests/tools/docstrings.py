"""Draw docstrings to test a reader with: python -m tests.tools.docstrings [--where] [COMMIT]

Prints 60 functions and classes of the package at COMMIT (default: HEAD), each as its signature and
docstring alone, drawn with the commit's hash as the seed: who writes them cannot choose them. The
reader says what each one does; then --where prints where each one stands, and the code judges the
answers. Asked: 40 understood at first reading, 55 right, none that disagrees with its code.
"""

import ast
import io
import random
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.tools.house import DOCUMENTED

ROOT = Path(__file__).parents[2]
COUNT = 60


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def definitions(commit: str) -> list[tuple[str, str]]:
    """(file:line name, signature and docstring) of each documented function and class."""
    found = []
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit, "mca_lite"))) as archive:
        for file in sorted(archive.getnames()):
            if file.endswith(".py"):
                module = ast.parse(archive.extractfile(file).read())
                found += [(f"{file}:{where}", text) for where, text in documented(module, [])]
    return found


def documented(node: ast.AST, outer: list[str]) -> list[tuple[str, str]]:
    """(line and dotted name, signature and docstring) of the definitions inside `node`."""
    found = []
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, DOCUMENTED):
            found += documented(child, outer)
            continue
        names = [*outer, child.name]
        inner = documented(child, names)
        if ast.get_docstring(child):
            header = f"# in {'.'.join(outer)}\n" if outer else ""
            found.append((f"{child.lineno} {'.'.join(names)}", header + without_body(child)))
        found += inner
    return found


def without_body(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The text of a definition whose body becomes its docstring; a class keeps its fields."""
    is_class = isinstance(node, ast.ClassDef)
    fields = [n for n in node.body if is_class and isinstance(n, ast.AnnAssign)]
    node.body = [node.body[0], *fields]
    return ast.unparse(node)


def draw(commit: str) -> list[tuple[str, str]]:
    """The definitions that `commit` draws, in a random order."""
    digest = git("rev-parse", commit).decode().strip()
    return random.Random(digest).sample(definitions(digest), COUNT)


if __name__ == "__main__":
    commits = [word for word in sys.argv[1:] if word != "--where"]
    for number, (where, text) in enumerate(draw(*(commits or ["HEAD"])), 1):
        print(f"{number}. {where}" if "--where" in sys.argv else f"## {number}\n{text}\n")
