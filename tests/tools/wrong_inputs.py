"""Wrong inputs: each ends in words that name what is wrong, with its exit code, and never as a
defect of this package.

    make wrong-inputs                        all of them
    make wrong-inputs ARGS="config world"    those whose names begin with one of the words

A case is a row of tests/shared/wrong_cases.py: files and words of a command, an environment or
limits, or a call from Python. It runs in a process of its own, forked from one that has imported
everything; those that only read a configuration or a model share a process.
"""

import contextlib
import importlib
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from tests.shared import world
from tests.shared.commands import ROOT
from tests.shared.wrong_cases import MODEL, Case, cases

PER_PROCESS = 24  # cases that share a process
LIMIT_S = 60.0  # of a process of one case; one that reads takes a part of it
DEFECTS = ("a defect of mca_lite", "Traceback (most recent call last)")


class Taken(BaseException):
    """A case was read and planned without a complaint."""


class Hung(BaseException):
    """A case that shares its process has taken too long."""


def run(chosen: list[Case], folder: Path, lanes: int = 2) -> dict[str, str]:
    """{name of a case: what is wrong with its end} of those that do not end as they should."""
    readers = [case for case in chosen if case.door == "read"]
    groups = [readers[at : at + PER_PROCESS] for at in range(0, len(readers), PER_PROCESS)]
    groups += [[case] for case in chosen if case.door != "read"]
    with ThreadPoolExecutor(lanes) as lane:
        found = list(lane.map(lambda group: _run_group(group, folder), groups))
    return {name: problem for part in found for name, problem in part.items()}


def _run_group(group: list[Case], folder: Path) -> dict[str, str]:
    ends: dict[tuple[str, int], tuple[int | None, str]] = {}
    many = [(case, rank) for case in group for rank in range(len(case.ranks))]
    if group[0].door == "read":
        many = [(group, 0)]
    processes = []
    for part, rank in many:
        out = tempfile.NamedTemporaryFile(dir=folder, delete=False)  # noqa: SIM115
        process = world.server().Process(target=_process, args=(part, rank, folder, out.name))
        process.start()
        processes.append((process, part, rank, Path(out.name)))
    end = time.monotonic() + LIMIT_S
    for process, part, rank, path in processes:
        process.join(max(0.0, end - time.monotonic()))
        hung = process.is_alive()
        process.kill()
        process.join()
        text = path.read_text(errors="replace")
        if isinstance(part, Case):
            ends[part.name, rank] = None if hung else process.exitcode, text
        else:
            for name, code, said in _parts(text):
                ends[name, 0] = code, said
    problems = {}
    for case in group:
        for rank, expected in enumerate(case.ranks):
            problem = judge(case, expected, *ends.get((case.name, rank), (None, "")))
            if problem:
                problems[case.name] = f"rank {rank}: {problem}" if rank else problem
    return problems


def judge(case: Case, expected: tuple[int, ...], code: int | None, said: str) -> str | None:
    """The fault of an end in words, None for a right one."""
    shown = " | ".join(line for line in said.splitlines()[-12:] if line.strip())[-900:]
    if code is None:
        return f"did not end: {shown}"
    if found := [words for words in DEFECTS if words in said]:
        return f"{found[0]} (code {code}): {shown}"
    if code not in expected:
        return f"code {code}, expected {' or '.join(map(str, expected))}: {shown}"
    if code and (missing := [name for name in case.names if name not in said]):
        return f"does not name {', '.join(missing)}: {shown}"
    return None


# -- in a process of its own

_MARK = "\x1e"  # between the ends of cases that share a process


def _parts(text: str) -> Iterator[tuple[str, int, str]]:
    for part in text.split(_MARK)[1:]:
        name, code, said = part.split("\n", 2)
        yield name, int(code), said


def _process(part: Case | list[Case], rank: int, folder: Path, out: str) -> None:
    from mca_lite import parallel

    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    multiprocessing.set_start_method(None, force=True)  # the platform's, as of a command
    if isinstance(part, Case):
        code = end_of(part, folder / part.name.replace("/", "-"), rank)
        _flush()
        os._exit(code)
    for case in part:
        _flush()
        at = os.fstat(1).st_size
        code = end_of(case, folder / case.name.replace("/", "-"), rank)
        parallel.shutdown()  # a world of one that a command has started
        _flush()
        said = Path(out).read_bytes()[at:]
        os.truncate(out, at)
        os.write(1, f"{_MARK}{case.name}\n{code}\n".encode() + said)
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def end_of(case: Case, folder: Path, rank: int = 0) -> int:
    """The exit code of a case in this process; its words are printed."""
    os.chdir(ROOT)
    write(case, folder)
    environment = {"MCA_LITE_CACHE": str(folder / "cache")}
    environment |= {k: v.format(rank=rank) for k, v in case.environment.items()}
    for name, value in case.limits.get(rank, {}).items():
        resource.setrlimit(getattr(resource, name), (value, value))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        own = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT TORCH_GLOO_LAZY_INIT"
        for name in own.split():
            if name not in environment:
                os.environ.pop(name, None)
        if case.door == "read":
            stack.enter_context(_only_planned())
        try:
            code = _door(case)(case, folder)
        except SystemExit as error:
            code = error.code
        except Hung:
            code = 124
        except BaseException:
            traceback.print_exc()
            code = 1
        return code or 0


def write(case: Case, folder: Path) -> None:
    """The files of a case, beside the model that it edits and the data that it trains on."""
    if folder.exists():  # another rank's
        return
    temporary = Path(f"{folder}.{os.getpid()}")
    shutil.copytree(ROOT / "configs" / "tiny" / "model", temporary / "model")
    for name, content in {**MODEL, **case.files}.items():
        path = temporary / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with contextlib.suppress(OSError):
        temporary.rename(folder)


@contextlib.contextmanager
def _only_planned() -> Iterator[None]:
    from mca_lite import run

    def train(*arguments):
        raise Taken

    def alarm(number, frame):
        raise Hung

    before = signal.signal(signal.SIGALRM, alarm)
    signal.alarm(20)
    try:
        with mock.patch.object(run, "train", train):
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _door(case: Case):
    return {"read": _command, "train": _command, "python": _python}[case.door]


def _command(case: Case, folder: Path) -> int:
    from mca_lite.__main__ import main

    words = [word.replace("{}", str(folder)) for word in case.words]
    given = folder / "stdin"
    if given.exists():
        sys.stdin = open(given, encoding="utf-8")  # noqa: SIM115
    try:
        return main(words)
    except Taken:
        return 0


def _python(case: Case, folder: Path) -> int:
    from mca_lite.cli import end

    module, _, name = case.call.partition(":")
    try:
        getattr(importlib.import_module(module), name)(folder)
    except TypeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        return end(error, None)
    return 0


def main(words: list[str]) -> int:
    """Run the cases that the words name (none: all) -> 0, or 1 where one does not end as it
    should."""
    chosen = [case for case in cases() if not words or case.name.startswith(tuple(words))]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        problems = run(chosen, Path(folder))
    for name, problem in problems.items():
        print(f"{name}: {problem}")
    defects = sum(problem.startswith(DEFECTS) for problem in problems.values())
    groups = itertools.groupby(chosen, lambda case: case.name.partition("/")[0])
    counts = ", ".join(f"{name} {len(list(group))}" for name, group in groups)
    print(f"{len(chosen)} wrong inputs ({counts}) in {time.monotonic() - start:.0f} s: ", end="")
    print(f"{defects} defects, {len(problems) - defects} that end otherwise than they should")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
