"""How a command ends that went wrong: one line that says what to do, and an exit code.

What a user can cause (configuration, data, files, folders, a full disk, too little memory) ends
with its own words and code 2. Everything else is a defect of this package: its traceback goes into
a file, to be sent with a report, and the code is 1.

Under torchrun the words stand last: they go into the file of torchrun's summary too.
"""

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from .files import describe_error
from .watchdog import lost_a_rank
from .world import tell_torchrun

USER_ERROR = 2  # exit code for what a user can put right
DEFECT = 1
WAIT_S = 1.0  # in which torchrun ends the ranks whose words would repeat others'
_ALIKE = (
    "CheckpointError",
    "OutputFolderError",
    "NotFiniteError",
    "RankFailed",
)  # every rank has them, with the same text
_MEMORY = ("MemoryError", "OutOfMemoryError")
_REQUIRED = ("torch", "megatron", "transformers", "safetensors", "numpy", "yaml", "filelock")


def end(error: Exception, output_dir: str | None) -> int:
    """Print why a run ends, once a machine where its ranks agree -> the exit code.

    output_dir: where a traceback is kept (None, or a folder that is not there or full: the
    temporary folder). No collectives.
    """
    kind = type(error).__name__
    is_lost = lost_a_rank(error) or kind == "RankFailed"
    text, code = user_words(error), getattr(error, "exit_code", USER_ERROR)
    if text is None:
        kept, code = _keep_traceback(error, output_dir), DEFECT
        first = f"{kind}: {error}".splitlines()[0]
        text = f"{first} (a defect of mca_lite; the traceback is in {kept})"
        if is_lost:
            text = f"another rank is gone, and its own words say why: {first} ({kept})"
    if text.startswith("disk full") and output_dir and output_dir not in text:
        text += f" (output_dir is {output_dir})"
    if not lost_a_rank(error):
        tell_torchrun(text)
    rank = os.environ.get("RANK", "0")
    if is_lost or os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(WAIT_S)  # the first rank to leave ends the others
        text = f"rank {rank}: {text}"
    if rank == "0" or kind not in _ALIKE:
        print(f"error: {text}", file=sys.stderr, flush=True)
    return code


def user_words(error: Exception) -> str | None:
    """What to tell of an error that a user can put right, None of a defect."""
    kind = type(error).__name__
    if kind in _MEMORY or "can't allocate memory" in str(error):
        return f"out of memory: {str(error) or kind}"
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
