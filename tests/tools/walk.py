"""A walk of a command line through the package: how many files, and how many changes of file, from
cli.main to the first training step.

python -m tests.tools.walk config.yaml [key=value ...]

A stop is the first call of a function: who reads the code in the order in which it runs reads each
function once. Code that runs while modules are imported, lambdas and comprehensions are no stops.
"""

import sys
from pathlib import Path


class _FirstStep(Exception):
    pass


def walk(words: list[str]) -> list[str]:
    """The files of the functions that were called for the first time, in order."""
    import mca_lite
    from mca_lite import cli

    package, files, seen = str(Path(mca_lite.__file__).parent), [], set()

    def is_import(frame) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(package):
                return True
            frame = frame.f_back
        return False

    def note(frame, event, arg):
        code = frame.f_code
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
    return files


if __name__ == "__main__":
    way = walk(sys.argv[1:])
    stops = [name for i, name in enumerate(way) if i == 0 or way[i - 1] != name]
    print(f"{len(way)} functions, {len(set(way))} files, {len(stops) - 1} changes of file")
    print(" ".join(stops))
