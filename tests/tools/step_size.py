"""The code of one training step as a reader meets it: python -m tests.tools.step_size

Functions of the package that the second step of packed rows enters on rank 0 at tp2 with sequence
parallelism, and their lines, docstrings among them. A function within another counts as its part.
"""

import ast
import functools
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

from tests.shared import tiny, world
from tests.shared.layouts import PACKED, TP2_SP
from tests.shared.training import train
from tests.tools.rings import functions_of

PACKAGE = Path(__file__).parents[2] / "mca_lite"


def entered(path: str, out: str) -> set[tuple[str, int]]:
    """(module, first line) of the functions that the second training_step of a run enters."""
    from mca_lite import McaTrainer

    seen: set = set()

    def note(frame, event, arg):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.parent == PACKAGE:
            seen.add((file.stem, frame.f_code.co_firstlineno))

    class Watched(McaTrainer):
        def training_step(self, *args):
            step = functools.partial(super().training_step, *args)
            if not self.state.global_step:
                return step()
            threading.setprofile(note)
            sys.setprofile(note)
            try:
                return step()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)

    train(path, out, steps=2, trainer_class=Watched, **TP2_SP, **PACKED)
    return seen


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.save_model(Path(folder) / "model", "qwen3")
        seen, _ = world.run(entered, 2, path, f"{folder}/run")
    functions: Counter = Counter()
    lines: Counter = Counter()
    for module in {module for module, _ in seen}:
        tree = ast.parse((PACKAGE / f"{module}.py").read_text())
        for firsts, span in functions_of(tree):
            if any((module, first) in seen for first in firsts):
                functions[module] += 1
                lines[module] += len(span)
    for module, count in lines.most_common():
        print(f"{module:20} {functions[module]:3} functions, {count:4} lines")
    print(f"a step enters {functions.total()} functions, {lines.total():,} lines")


if __name__ == "__main__":
    main()
