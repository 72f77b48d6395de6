"""The command line of training: read the arguments, check them, train.

torchrun --nproc_per_node N train.py config.yaml [key=value ...]
"""

import argparse
import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

from . import world
from .args import parse_args
from .data_records import check_first
from .errors import UserError
from .files import describe_error, lost_stdout, printable, users_place, write_file
from .tables import objective_of
from .watchdog import RankFailed, lost_a_rank
from .world import tell_torchrun

USER_ERROR = UserError.exit_code  # for an error that the user can fix
DEFECT = 1
INTERRUPTED = 130  # for Ctrl-C with nothing to save
NOT_READ = 141  # for a pipe that the reader (`| head`) has closed, as in other programs
WAIT_S = 1.0  # time for torchrun to end ranks that have the same error
_MEMORY = "out of memory: python -m mca_lite plan CONFIG --memory GIB names layouts that fit"
_REMEDIES = {  # text in errors of the operating system and of torch -> remedy
    "DataLoader worker (pid": "the system ended it, most often for want of memory: set "
    "dataloader_num_workers to less, or give the job more memory",
    "Too many open files": "raise the limit, ulimit -n 65536",
    "can't start new thread": "raise the limits of threads and processes, ulimit -u and the job's",
    "Resource temporarily unavailable": "raise the limits of threads and processes, ulimit -u",
    "can't allocate memory": _MEMORY,
    "out of memory": _MEMORY,
    "MemoryError": _MEMORY,
}


def main(argv: list[str] | None = None) -> int:
    """Train with the words of a command line -> exit code. argv: the words, such as
    ["config.yaml", "max_steps=10"]; None: those of this process. Without words the usage is
    printed, for --version the version."""
    words = sys.argv[1:] if argv is None else argv
    if not words:
        print(__doc__.strip() + "\n\n--help lists the keys.")
        return 0
    if words == ["--version"]:
        print(import_module(__package__).__version__)
        return 0
    # names in the data and library warnings may contain control characters
    with (
        contextlib.redirect_stdout(_Printable(sys.stdout)),
        contextlib.redirect_stderr(_Printable(sys.stderr)),
    ):
        return finish(_train, words)


def _train(words: list[str]) -> int:
    world.end_second_run()
    world.settle()
    world.watch_meeting()
    arguments = parse_args(words)
    here = world.current()
    if here.is_main:
        for line in arguments.warnings:
            print(f"note: {line}", flush=True)
        check_first(arguments.data, objective_of(arguments.finetuning.stage))
        ranks = "1 rank" if here.size == 1 else f"{here.size} ranks"
        print(f"mca_lite starts on {ranks}: it loads torch and megatron-core first", flush=True)
    arguments.training.notes.clear()  # they were printed above
    try:
        # imported after the keys are checked, because these take seconds
        with _no_collections():
            from . import log, run, tool_generation, tool_page
            from .ckpt_folder import check_new

        if arguments.training.do_train and arguments.training.resume_from_checkpoint is None:
            check_new(arguments.training)  # checked here already, before anything is tokenised
        plan = run.make_plan(arguments)
        run.train(plan, [tool_generation.Answers(), log.Pictures(tool_page.draw)])
    except Exception as error:
        return end(error, arguments.training.output_dir)
    return 0


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """A context without automatic garbage collection, for imports: their objects are kept anyway,
    and looking through them repeatedly takes a sixth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# -- options


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints an error in one line, and exits with USER_ERROR, as for a wrong
    configuration key."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"error: {message}: see --help\n")


def parser_of(command: str, doc: str | None) -> argparse.ArgumentParser:
    """An ArgumentParser whose --help shows a command's docstring. Options cannot be abbreviated,
    because an abbreviation may be a configuration key."""
    program = f"python -m {__package__} {command}"  # the package may be vendored under another name
    return _Parser(
        prog=program,
        usage=argparse.SUPPRESS,
        description=(doc or "").replace(f"python -m mca_lite {command}", program),
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )


def at_least(least: float, kind: type = int) -> Callable[[str], float]:
    """Make a function for argparse's `type` that reads a finite number of type `kind`. It raises
    ArgumentTypeError if the text is no such number, or a number below `least`."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if least <= value < float("inf"):
                return value
        numbers = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"expected {numbers} of at least {least}, got {text!r}")

    return read


# -- the end of a command


def finish(work: Callable[..., int | None], *args: Any) -> int:
    """Call work(*args), the body of a command -> its exit code. This is the result of `work`, with
    None as 0. After an Exception, end() reports the error and gives the code. After Ctrl-C the main
    rank prints a note, and the code is INTERRUPTED."""
    try:
        code = work(*args) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:  # outside the training loop there is nothing to save
        if world.current().is_main:
            print("interrupted: nothing was saved", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return end(error, None)


def end(error: Exception, output_dir: str | None) -> int:
    """Print the error that ends a run -> the exit code. Not collective.

    If the error has same_on_all_ranks, only the main rank prints it. Ranks other than a machine's
    first one wait WAIT_S before they print, and torchrun may end them in this time; the first rank
    waits too if it failed because another rank is gone.

    output_dir: folder for the traceback; if it is None or cannot be written, the temporary folder
    is used. None also means that nothing is trained: then a closed pipe (`| head`) is no error, and
    nothing is printed."""
    if output_dir is None and isinstance(error, BrokenPipeError) and lost_stdout():
        return NOT_READ
    code = getattr(error, "exit_code", USER_ERROR)
    text = user_words(error)
    if text is None:
        code = DEFECT
    if text is None or isinstance(error, (ValueError, OSError)):
        text = _with_traceback(error, text, output_dir)
    if text.startswith("disk full") and output_dir and output_dir not in text:
        text += " (of stdout)" if lost_stdout() else f" (output_dir is {output_dir})"
    if not lost_a_rank(error):
        tell_torchrun(text)
    here = world.current()
    if here.local_rank != 0 or lost_a_rank(error) or isinstance(error, RankFailed):
        # once the first rank exits, torchrun ends this one by SIGTERM, which its summary must not
        # list
        before = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(WAIT_S)
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        text = f"rank {here.rank}: {text}"
    if here.is_main or not getattr(error, "same_on_all_ranks", False):
        print(f"error: {printable(text)}", file=sys.stderr, flush=True)
    return code


def user_words(error: Exception) -> str | None:
    """The text to print for an error that the user can fix; some texts have a remedy. None for any
    other error, which counts as a defect of this package."""
    text = str(error) or type(error).__name__
    remedies = [remedy for words, remedy in _REMEDIES.items() if words in text]
    if remedies and not isinstance(error, UserError):
        auto = sys.modules.get(f"{__package__}.part_long_auto")
        if auto is not None and auto.next_choice and remedies[0] == _MEMORY:
            return f"{text.splitlines()[0]}: {auto.next_choice}; {_MEMORY.partition(': ')[2]}"
        return f"{text.splitlines()[0]}: {remedies[0]}"
    is_ours = str(getattr(error, "name", "")).startswith(__package__)
    if isinstance(error, ModuleNotFoundError) and not is_ours:
        return (
            f"{error.name} is not installed for {sys.executable}: activate the environment that "
            "has it (source .venv/bin/activate), or install the requirements (make install)"
        )
    if isinstance(error, UnicodeError):  # its text does not name the file
        return None
    from safetensors import SafetensorError

    is_users = isinstance(error, (UserError, ValueError, OSError, SafetensorError))
    return describe_error(error) if is_users or "inline_container" in text else None


def _with_traceback(error: Exception, text: str | None, output_dir: str | None) -> str:
    """The text to print for an error. For a defect of this package, an error in the user's code, or
    a lost rank, the traceback is written to a file by _keep_traceback(), and the text names the
    file. For any other error it is `text`. text: the result of user_words(error), None for an error
    that the user cannot fix."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    in_worker = "in DataLoader worker" in lines[0]  # the last line names the worker's error
    first = lines[-1] if in_worker else lines[0]
    if lost_a_rank(error):
        kept = _keep_traceback(error, output_dir)
        return f"another rank is gone, and its message says why: {first} ({kept})"
    place = users_place(error)
    if text is not None and place is None:
        return text
    kept = _keep_traceback(error, output_dir)
    if place is not None:
        return f"in your {place}: {first} (the traceback is in {kept})"
    return f"{first} (a defect of mca_lite; the traceback is in {kept})"


def _keep_traceback(error: Exception, output_dir: str | None) -> str:
    """Write an error's traceback to a file -> the file's path. The folder is output_dir or, if that
    is None or cannot be written, the system's temporary folder. If that fails too, the result is a
    text that says why there is no file."""
    lines = "".join(traceback.format_exception(error))
    text = lines.encode(errors="backslashreplace")
    name = f"traceback-rank{world.current().rank}.txt"
    if output_dir:
        with contextlib.suppress(OSError):
            write_file(Path(output_dir, name), text)
            return f"{output_dir}/{name}"
    try:  # all users share the folder: make a new file, and follow nobody's link
        descriptor, path = tempfile.mkstemp(f"-{name}", "mca_lite-")
        with open(descriptor, "wb") as file:
            file.write(text)
        return path
    except OSError as problem:
        return f"no file, since {problem}"


class _Printable:
    """Wraps a text stream: write() replaces characters that are not printable by U+FFFD, except
    newlines, tabs and carriage returns. Other attributes are those of `stream`."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.write(printable(text, kept="\n\t\r"))
