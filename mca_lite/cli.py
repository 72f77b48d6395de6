"""The command line of training: reads the arguments, checks everything that can be checked alone,
then trains.

torchrun --nproc_per_node N train.py config.yaml [key=value ...]
"""

import argparse
import contextlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from . import world
from .args import parse_args
from .files import describe_error, printable, users_place
from .watchdog import lost_a_rank
from .world import tell_torchrun

# -- how a command ends

USER_ERROR = 2  # exit code for what a user can put right
DEFECT = 1
INTERRUPTED = 130  # of Ctrl-C where there is nothing to save
NOT_READ = 141  # as of other programs, whose reader (`| head`) has seen enough
WAIT_S = 1.0  # in which torchrun ends the ranks whose words would repeat others'
_ALIKE = (
    "CheckpointError",
    "OutputFolderError",
    "NotFiniteError",
    "RankFailed",
)  # every rank has them, with the same text
_MEMORY = ("MemoryError", "OutOfMemoryError")
_LIMITS = {  # of the system -> what to set
    "Too many open files": "raise the limit, ulimit -n 65536",
    "can't start new thread": "raise the limits of threads and processes, ulimit -u and the job's",
    "Resource temporarily unavailable": "raise the limits of threads and processes, ulimit -u",
}
_REQUIRED = (
    "torch megatron transformers huggingface_hub jinja2 numpy packaging safetensors yaml psutil "
    "filelock tqdm"
).split()  # the modules of setup.cfg's install_requires


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong with an option as commands say what is wrong with a key."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"error: {message}: see --help\n")


def parser_of(command: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the text of a command's module, which says how it is used, and the
    options. These are whole words: what begins like one may be a key of the configuration."""
    return _Parser(
        prog=f"python -m mca_lite {command}",
        usage=argparse.SUPPRESS,
        description=doc,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )


def at_least(least: int, kind: type = int) -> Callable[[str], float]:
    """The type of an option that is a number from `least` on, of this kind."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if least <= value < float("inf"):
                return value
        numbers = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"expected {numbers} of at least {least}, got {text!r}")

    return read


def has_colors() -> bool:
    """Whether a command may print in colours: in a terminal, unless NO_COLOR is set."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def finish(work: Callable[..., int | None], *args) -> int:
    """Do the work of a command that trains nothing -> the exit code that it returns (None: 0), or
    that of what went wrong, after saying so."""
    try:
        code = work(*args) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return end(error, None)


def _lost_reader() -> bool:
    """Whether nobody reads what is printed any more, which is let go then."""
    poll = select.poll()
    with contextlib.suppress(OSError):  # no file
        poll.register(sys.stdout.fileno(), 0)
    if not poll.poll(0):
        return False
    # for what Python flushes when it ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def end(error: Exception, output_dir: str | None) -> int:
    """Print why a run ends, once a machine where its ranks agree -> the exit code.

    output_dir: where a traceback is kept; where it is None, not there or full the temporary folder
    is taken. With None nothing is trained, and a reader that has left (`| head`) is no error. No
    collectives.
    """
    if output_dir is None and isinstance(error, BrokenPipeError) and _lost_reader():
        return NOT_READ
    kind = type(error).__name__
    is_lost = lost_a_rank(error) or kind == "RankFailed"
    text = user_words(error)
    code = getattr(error, "exit_code", USER_ERROR)
    place = None
    if not is_lost and (text is None or isinstance(error, (ValueError, OSError))):
        place = users_place(error)
    if text is None or place:
        code = DEFECT if text is None else code
        kept = _keep_traceback(error, output_dir)
        first = _first_line(error)
        text = f"{first} (a defect of mca_lite; the traceback is in {kept})"
        if place:
            text = f"in your {place}: {first} (the traceback is in {kept})"
        elif is_lost:
            text = f"another rank is gone, and its own words say why: {first} ({kept})"
    if text.startswith("disk full") and output_dir and output_dir not in text:
        text += f" (output_dir is {output_dir})"
    if not lost_a_rank(error):
        tell_torchrun(text)
    rank = os.environ.get("RANK", "0")
    if is_lost or os.environ.get("LOCAL_RANK", "0") != "0":
        _wait_for_the_first()
        text = f"rank {rank}: {text}"
    if rank == "0" or kind not in _ALIKE:
        print(f"error: {printable(text)}", file=sys.stderr, flush=True)
    return code


def _wait_for_the_first() -> None:
    """Give the rank that leaves first the time to end this one, without a place for it in the
    summary of torchrun, which takes a rank that it ended for a failure."""
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(WAIT_S)
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def user_words(error: Exception) -> str | None:
    """What to tell of an error that a user can put right, None of a defect."""
    kind = type(error).__name__
    if kind in _MEMORY or "can't allocate memory" in str(error):
        return f"out of memory: {str(error) or kind}"
    if limit := next((words for words in _LIMITS if words in str(error)), None):
        return f"{str(error).splitlines()[0]}: {_LIMITS[limit]}"
    if kind in ("NotFiniteError", "RankFailed"):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] in _REQUIRED:
        return (
            f"{error.name} is not installed for {sys.executable}: activate the environment that "
            "has it (source .venv/bin/activate), or install the requirements (make install)"
        )
    is_file = kind == "SafetensorError" or "inline_container" in str(error)
    if is_file or isinstance(error, (ValueError, OSError)):
        # a text that cannot be coded comes without the name of its file
        return None if isinstance(error, UnicodeError) else describe_error(error)
    return None


def _first_line(error: BaseException) -> str:
    """The type and the first line of an error; of a data loader's worker, those of its error."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[-1] if "in DataLoader worker" in lines[0] else lines[0]


def _keep_traceback(error: Exception, output_dir: str | None) -> str:
    """Write the traceback to a file -> its path, or why there is none."""
    text = "".join(traceback.format_exception(error))
    name = f"traceback-rank{os.environ.get('RANK', '0')}.txt"
    problem: OSError | None = None
    for folder in filter(None, (output_dir, tempfile.gettempdir())):
        path = Path(folder) / (name if folder == output_dir else f"mca_lite-{os.getpid()}-{name}")
        try:
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return str(path)
        except OSError as failed:
            problem = failed
    return f"no file, since {problem}"


# -- training from the command line


def main(argv: list[str] | None = None) -> int:
    """Train as `argv` (None: the command line) says -> exit code, which cli.py explains."""
    words = sys.argv[1:] if argv is None else argv
    if not words:
        print(__doc__.strip() + "\n\n--help lists the keys.")
        return 0
    if words == ["--version"]:
        print(import_module(__package__).__version__)
        return 0
    output_dir = None
    world.end_second_run()
    try:
        world.settle()
        arguments = parse_args(words)
        output_dir = arguments.training.output_dir
        if os.environ.get("RANK", "0") == "0":
            for line in arguments.warnings:
                print(f"note: {line}", flush=True)
        arguments.training.notes.clear()  # the summary need not say them again
        # torch, transformers and megatron-core: seconds, and a typing error is told by now
        from .ckpt_folder import check_new
        from .run import make_plan, train

        if arguments.training.do_train and arguments.training.resume_from_checkpoint is None:
            check_new(arguments.training)  # here too, before anything is tokenised
        train(make_plan(arguments))
    except KeyboardInterrupt:  # outside of the loop, which saves on it
        if os.environ.get("RANK", "0") == "0":
            print("interrupted outside of training: nothing was saved", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return end(error, output_dir)
    return 0
