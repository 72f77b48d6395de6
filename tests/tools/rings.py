"""The rings of the package, core <- parts <- tools: python -m tests.tools.rings [--run] [CHECKOUT]

The tree in mca_lite/README.md has them: a heading row such as `| **part: lora** | |` holds for the
rows below it. Printed are each ring's code tokens, the imports against the order, and the smear of
each capability: the tokens of statements that name it outside of its files. --run adds the share of
the core that a packed SFT run at tp2 executes, in about a minute.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from mca_lite.parts import PARTS, with_needs
from tests.tools import house

DEPTH = {"core": 0, "part": 1, "tool": 2}
WORDS = {  # capability -> identifiers and strings that name it
    "lora": r"(?<!q_)(?<!kv_)lora|(?<!mcore_)adapter|spec_of|modules_to_save|merger|PEFT",
    "freeze": r"freez|trained_modules|trained_of|lowest_layer|\btrains\b",
    "pictures": r"vision|picture|image|tower|pixel|\brope_[thw]\b|mrope|slots?\b",
    "mtp": r"mtp|Prediction|predicts_ahead|of_ahead|AHEAD",
    "stream": r"stream(?!ed_optimizer)|TokenStream|buffer_size",
    "delta": r"delta|linear_attention|linear_layers",
    "sinks": r"sink",
    "dpo": r"dpo|preference|pref_|ref_model|reference|\bpairs?\b|rejected",
    "kto": r"kto|desirable|answer_label|ANSWER_LABEL",
    "rm": r"\brm\b|RM_|value_head|has_scores|Reward|center_rewards",
    "distill": r"distill|teacher",
    "experts": r"moe|expert|router",
    "te": r"transformer_engine|\bTE[A-Z_]|why_unusable|fp8",
    "llamafactory": r"LLAMA_FACTORY|BUILT_IN|NOT_BUILT_IN|alpaca|sharegpt|ForeignKey|FOREIGN_KEYS",
}
RUN = (
    "configs/sft.yaml tensor_model_parallel_size=2 sequence_parallel=true neat_packing=true "
    "max_steps=4 global_batch_size=16 per_device_train_batch_size=4 eval_steps=2 save_steps=2 "
    "logging_steps=1 overwrite_output_dir=true"
).split()


def rings_of(package: Path) -> dict[str, tuple[str, str]]:
    """Module -> (core, part or tool; the name after it in the heading)."""
    rings = {}
    heading = None
    for line in (package / "README.md").read_text().splitlines():
        if match := re.match(r"\| \*\*(core|part|tool)s?: ([\w ]+)\*\* \|", line):
            heading = (match[1], match[2])
        elif heading and (match := re.match(r"\| `(\w+)\.py`", line)):
            rings[match[1]] = heading
    return rings


def tokens_of(package: Path) -> dict[str, int]:
    """Ring -> its code tokens; "all" -> those of the package."""
    counts = dict.fromkeys((*DEPTH, "all"), 0)
    for module, (ring, _) in rings_of(package).items():
        tokens = house.measure(package / f"{module}.py").tokens
        counts[ring] += tokens
        counts["all"] += tokens
    return counts


def against_the_order(package: Path) -> list[tuple[str, str]]:
    """(module, the one it imports), for imports of an outer ring, or of a part not needed."""
    rings = rings_of(package)
    found = []
    for module, (ring, part) in rings.items():
        if module == "__init__":  # it imports by name, when a public name is used
            continue
        nodes = house.nodes_of(package / f"{module}.py")
        for other in sorted(house.relative_imports(nodes) & rings.keys()):
            other_ring, other_part = rings[other]
            is_of_parts = ring == other_ring == "part"
            may_use = with_needs(part) if part in PARTS else [part]
            if DEPTH[other_ring] > DEPTH[ring] or (is_of_parts and other_part not in may_use):
                found.append((module, other))
    return found


# -- smear


def header_lines(node: ast.stmt) -> range:
    """The lines of a statement without its blocks."""
    last = node.end_lineno
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        last = max(node.lineno, body[0].lineno - 1)
    return range(node.lineno, last + 1)


def words_of(node: ast.AST) -> str:
    """The names and strings of a node, without those of the statements inside of it."""
    found = []
    waiting = [node]
    while waiting:
        now = waiting.pop()
        found += [value for _, value in ast.iter_fields(now) if isinstance(value, str)]
        waiting += [c for c in ast.iter_child_nodes(now) if not isinstance(c, ast.stmt)]
    return " ".join(found)


def smear_of(tree: ast.Module, pattern: re.Pattern, of_lines: dict[int, int]) -> int:
    """Tokens of the statements that name a capability; of functions with its name, all."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and pattern.search(node.name):
            lines |= set(range(node.lineno, node.end_lineno + 1))
        elif pattern.search(words_of(node)):
            lines |= set(header_lines(node))
    return sum(of_lines[line] for line in lines)


# -- the executed share


def profile(out: str, words: list[str]) -> None:
    """Train, and write which functions of the package this rank enters."""
    seen: set = set()

    def note(frame, event, arg):
        if event == "call" and "mca_lite" in frame.f_code.co_filename:
            seen.add((Path(frame.f_code.co_filename).stem, frame.f_code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    from mca_lite import cli

    code = cli.main(words)
    sys.setprofile(None)
    Path(out, f"seen{os.environ.get('RANK', 0)}.json").write_text(json.dumps(sorted(seen)))
    sys.exit(code)


def entered(root: Path) -> set[tuple[str, int]]:
    """(module, first line) of the functions that RUN enters on either rank."""
    with tempfile.TemporaryDirectory() as out:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        command += ["--standalone", "--local_addr", "127.0.0.1", "-m", "tests.tools.rings"]
        command += ["--profile", out, *RUN, f"output_dir={out}/run", f"cache_dir={out}/cache"]
        subprocess.run(command, cwd=root, env=env, check=True, stdout=subprocess.DEVNULL)
        seen = [json.loads(path.read_text()) for path in Path(out).glob("seen*.json")]
    return {tuple(row) for rows in seen for row in rows}


def functions_of(tree: ast.Module) -> Iterator[tuple[set[int], range]]:
    """(lines that may count as the first one, all lines) of each outermost function."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                yield {first, node.lineno}, range(first, node.end_lineno + 1)
            else:
                waiting.append(node)


def print_executed(root: Path, trees: dict, of_lines: dict, rings: dict) -> None:
    """Print the executed share of each ring, and the modules of the core that lack most."""
    seen = entered(root)
    totals: dict[str, int] = defaultdict(int)
    executed: dict[str, int] = defaultdict(int)
    idle: dict[str, int] = defaultdict(int)
    for module, tree in trees.items():
        ring = rings[module][0]
        for firsts, span in functions_of(tree):
            size = sum(of_lines[module][line] for line in span)
            is_entered = any((module, first) in seen for first in firsts)
            totals[ring] += size
            executed[ring] += size * is_entered
            if ring == "core":
                idle[module] += size * (not is_entered)
    for ring, size in totals.items():
        share = 100 * executed[ring] / size
        print(f"executed in {ring}: {executed[ring]:,} of {size:,}, {share:.0f} %")
    most = sorted(idle, key=idle.__getitem__, reverse=True)[:15]
    print("core, most tokens not run:", ", ".join(f"{m} {idle[m]:,}" for m in most))


def main(root: Path, with_run: bool) -> None:
    package = root / "mca_lite"
    rings = rings_of(package)
    trees = {}
    of_lines = {}
    for module in rings:
        path = package / f"{module}.py"
        trees[module] = house.nodes_of(path)[0]
        of_lines[module] = house.tokens_by_line(house.read_tokens(path), house.nodes_of(path))
    counts = tokens_of(package)
    for ring in DEPTH:
        names = [module for module in rings if rings[module][0] == ring]
        print(f"{ring}: {len(names)} modules, {counts[ring]:,} tokens")
    print(f"all: {len(rings)} modules, {counts['all']:,} tokens")
    wrong = against_the_order(package)
    late: dict[str, set[str]] = defaultdict(set)
    for module, other in wrong:
        late[rings[other][1]].add(module)
    users = ", ".join(f"{part} in {len(modules)} modules" for part, modules in late.items())
    print(f"imports against the order: {len(wrong)}: {users}")
    print(f"{'capability':14} {'its files':>9} {'smeared':>8} {'core':>6} modules (core)")
    for name, words in WORDS.items():
        pattern = re.compile(words)
        its_own = [module for module in rings if rings[module][1] == name]
        others = [module for module in rings if module not in its_own]
        smear = {module: smear_of(trees[module], pattern, of_lines[module]) for module in others}
        smear = {module: size for module, size in smear.items() if size}
        core = {module: size for module, size in smear.items() if rings[module][0] == "core"}
        size = sum(sum(of_lines[module].values()) for module in its_own)
        numbers = f"{size:9,} {sum(smear.values()):8,} {sum(core.values()):6,}"
        print(f"{name:14} {numbers} {len(smear)} ({len(core)})")
    if with_run:
        print_executed(root, trees, of_lines, rings)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--profile"]:
        profile(sys.argv[2], sys.argv[3:])
    given = [word for word in sys.argv[1:] if word != "--run"]
    main(Path(given[0] if given else ".").resolve(), "--run" in sys.argv)
