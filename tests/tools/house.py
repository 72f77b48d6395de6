"""The size of the package as a reader meets it: python -m tests.tools.house [FOLDER]

tokens: names, numbers, strings and operators; docstrings and comments are none, an f-string is one.
decisions: branches, loops, handlers, comprehensions and their ifs, `and`, `or`, assert, with.
tests/test_structure.py holds the limits; tests.tools.rings has the figures by ring.
"""

import ast
import functools
import io
import re
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert, ast.With)
BRANCHES += (ast.comprehension, ast.match_case)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
RELATIVE_OPENING = re.compile(r"(What|Whether|How|Where|Which|Whose|That|Who|When)\b")
RELATIVE_WORDS = {"that", "which", "where", "what", "whose"}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENDMARKER, tokenize.ENCODING}


@dataclass
class Module:
    """One file, counted."""

    tokens: int
    decisions: int
    parallel_assignments: int
    conditional_expressions: int
    docstrings: list[str]
    prose: list[str]  # docstrings and comments
    private_reads: list[str]  # of other objects' attributes
    takes_trainer: list[str]  # functions that do first


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The nodes of a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))


def docstrings_of(nodes: list[ast.AST]) -> list[str]:
    return [text for n in nodes if isinstance(n, DOCUMENTED) and (text := ast.get_docstring(n))]


@functools.cache
def measure(path: Path) -> Module:
    """Count one file."""
    nodes = nodes_of(path)
    tokens = read_tokens(path)
    docstrings = docstrings_of(nodes)
    comments = [t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT]
    return Module(
        tokens=sum(tokens_by_line(tokens, nodes).values()),
        decisions=sum(map(count_decisions, nodes)),
        parallel_assignments=sum(map(is_parallel_assignment, nodes)),
        conditional_expressions=sum(isinstance(n, ast.IfExp) for n in nodes),
        docstrings=docstrings,
        prose=docstrings + comments,
        private_reads=private_reads(nodes),
        takes_trainer=[n.name for n in nodes if takes_trainer(n)],
    )


def read_tokens(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))


def tokens_by_line(tokens: list[tokenize.TokenInfo], nodes: list[ast.AST]) -> Counter[int]:
    """Line -> its code tokens: a string with fields counts once on every Python."""
    documented = [n for n in nodes if isinstance(n, DOCUMENTED) and ast.get_docstring(n)]
    prose = {i for n in documented for i in range(n.body[0].lineno, n.body[0].end_lineno + 1)}
    begins = getattr(tokenize, "FSTRING_START", None)
    ends = getattr(tokenize, "FSTRING_END", None)
    counts: Counter[int] = Counter()
    nesting = 0
    for token in tokens:
        if token.type == ends:
            nesting -= 1
        elif not nesting and token.type not in (*LAYOUT, tokenize.COMMENT):
            counts[token.start[0]] += token.start[0] not in prose
        nesting += token.type == begins
    return counts


def count_decisions(node: ast.AST) -> int:
    count = int(isinstance(node, BRANCHES))
    if isinstance(node, ast.comprehension):
        count += len(node.ifs)
    if isinstance(node, ast.BoolOp):
        count += len(node.values) - 1
    return count


def is_parallel_assignment(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def takes_trainer(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and [a.arg for a in node.args.args[:1]] == ["trainer"]


def private_reads(nodes: list[ast.AST]) -> list[str]:
    """Uses of `_name` of objects other than self, cls, super() and imported modules."""
    imports = [n for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom))]
    imported = {a.asname or a.name.split(".")[0] for n in imports for a in n.names}
    found = []
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not re.match(r"_(?!_)", node.attr):
            continue
        owner = ast.unparse(node.value)
        if owner not in ("self", "cls", "super()") and re.split(r"[.(]", owner)[0] not in imported:
            found.append(f"{owner}.{node.attr}")
    return found


def relative_imports(nodes: list[ast.AST], *_: str) -> set[str]:
    """The modules of the package that its import statements name. Further arguments are ignored:
    scripts outside of this repository still pass the source."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {a.name for a in node.names}
    return found


def house(package: Path) -> dict[str, float]:
    """Figure -> value of a package. Rates are per 1,000 code tokens, words per 100 words of prose,
    docstrings in percent."""
    modules = {path.stem: measure(path) for path in sorted(package.glob("*.py"))}
    rooms = modules.values()
    tokens = sum(m.tokens for m in rooms)
    docstrings = [text for m in rooms for text in m.docstrings]
    words = [w for m in rooms for text in m.prose for w in re.findall(r"[A-Za-z']+", text)]
    return {
        "modules": len(modules),
        "tokens": tokens,
        "decisions": sum(m.decisions for m in rooms),
        "decisions a 1,000 tokens": 1000 * sum(m.decisions for m in rooms) / tokens,
        "parallel assignments": 1000 * sum(m.parallel_assignments for m in rooms) / tokens,
        "conditional expressions": 1000 * sum(m.conditional_expressions for m in rooms) / tokens,
        "docstrings": len(docstrings),
        "docstrings with a relative opening": sum(
            bool(RELATIVE_OPENING.match(t)) for t in docstrings
        ),
        "relative words": 100 * sum(w.lower() in RELATIVE_WORDS for w in words) / len(words),
        "private reads": sum(len(m.private_reads) for m in rooms),
        "functions that take trainer": sum(len(m.takes_trainer) for m in rooms),
    }


if __name__ == "__main__":
    default = Path(__file__).parents[2] / "mca_lite"
    for figure, value in house(Path(sys.argv[1]) if sys.argv[1:] else default).items():
        print(f"{figure:36} {value:10,.2f}".rstrip("0").rstrip("."))
