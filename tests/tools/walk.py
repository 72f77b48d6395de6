"""A walk of a command line through the package: how many files, and how many changes of file, from
cli.main to the first training step, and of these as far as the plan.

python -m tests.tools.walk config.yaml [key=value ...]

A stop is the first call of a function: who reads the code in the order in which it runs reads each
function once. Code that runs while modules are imported, lambdas and comprehensions are no stops.
"""

import sys
from pathlib import Path


class _FirstStep(Exception):
    pass


def walk(words: list[str]) -> tuple[list[str], int]:
    """(The files of the functions that were called for the first time, in order; how many of them
    until run.make_plan was done.)"""
    import mca_lite
    from mca_lite import cli

    package, files, seen = str(Path(mca_lite.__file__).parent), [], set()
    planned = []

    def is_import(frame) -> bool:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False

    def note(frame, event, arg):
        code = frame.f_code
        if event == "return" and code.co_name == "make_plan":
            planned.append(len(files))
        if event != "call" or code in seen or not code.co_filename.startswith(package):
            return
        if code.co_name == "training_step":
            sys.setprofile(None)
            raise _FirstStep
        if not code.co_name.startswith("<") and not is_import(frame):
            seen.add(code)
            files.append(Path(code.co_filename).stem)

    sys.setprofile(note)
    try:
        cli.main(words)
    except _FirstStep:
        pass
    finally:
        sys.setprofile(None)
    return files, planned[0]


def changes(files: list[str]) -> list[str]:
    """The files, those that follow themselves once."""
    return [name for i, name in enumerate(files) if i == 0 or files[i - 1] != name]


if __name__ == "__main__":
    way, until_plan = walk(sys.argv[1:])
    for name, part in (("to the plan", way[:until_plan]), ("to the first step", way)):
        print(
            f"{name}: {len(part)} functions, {len(set(part))} files, "
            f"{len(changes(part)) - 1} changes of file"
        )
    print(" ".join(changes(way)))
