"""The folder that a run writes to: one run at a time has it, and every node of the run sees it."""

import contextlib
import datetime
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from . import parallel
from .files import is_there, printable, read_json, write_json

LOCK_NAME = ".run.lock"
OWNER_NAME = ".run.json"  # who has the lock; the lock's own file is emptied by whoever tries it
# A rank of a run that was killed may live for a moment; a shared file system may be late
_WAIT_S, _SEE_S = 3.0, 5.0


class OutputFolderError(ValueError):
    """A folder that this run cannot write to. Every rank raises it, with the same text."""


@contextlib.contextmanager
def hold(output_dir: str | os.PathLike) -> Iterator[None]:
    """Keep other runs out of output_dir while this context is open; make the folder where it is not
    there.

    The main rank holds a lock of the operating system, which ends with the process. May be entered
    again within. OutputFolderError where another run has the folder, where it cannot be written,
    and where the nodes do not share it. Collective on entry.
    """
    folder = Path(output_dir)
    with contextlib.ExitStack() as held:
        is_new = parallel.on_main(lambda: _take(folder, held), OutputFolderError)
        if is_new and parallel.world_size() > 1:
            _check_shared(folder)
        yield


def _take(folder: Path, held: contextlib.ExitStack) -> bool:
    """Lock the folder until `held` closes -> whether this process did not have it yet."""
    # one object for a path in a process, so that taking it twice counts instead of waiting
    lock = FileLock(folder.absolute() / LOCK_NAME, is_singleton=True)
    if lock.is_locked:
        held.enter_context(lock)
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_WAIT_S)
        held.callback(lock.release)
        now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": now}
        write_json(folder / OWNER_NAME, owner)
        held.callback(_leave, folder)
    except Timeout:
        raise OutputFolderError(
            f"another run trains in {folder}: {_owner(folder)}. Two runs would delete each "
            "other's checkpoints: set another output_dir, or end that run first"
        ) from None
    except NotImplementedError:  # filelock's error where the file system knows no flock
        print(f"note: the file system of {folder} has no locks: let no other run write there")
    except OSError as error:
        raise OutputFolderError(
            f"output_dir {folder} cannot be written ({error.strerror or error}): set it to a "
            "folder that can"
        ) from None
    return True


def _leave(folder: Path) -> None:
    """Before the lock is given back. A run that was refused leaves no folder behind."""
    with contextlib.suppress(OSError):  # the folder may have been closed or have gone since
        (folder / OWNER_NAME).unlink()
        if [path.name for path in folder.iterdir()] == [LOCK_NAME]:
            (folder / LOCK_NAME).unlink()
            folder.rmdir()


def _owner(folder: Path) -> str:
    path = folder / OWNER_NAME
    try:
        owner = read_json(path) if is_there(path) else {}
        text = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
        return printable(text, kept="")
    except (OSError, ValueError, KeyError):
        return "a process that has not said yet who it is"


def _check_shared(folder: Path) -> None:
    """OutputFolderError on every rank where one does not see what the main rank writes. Collective.

    Without it a run over several nodes would find out at its first checkpoint.
    """
    token = folder / parallel.on_main(lambda: _write_token(folder), OutputFolderError)
    # the path of each rank: a relative one depends on the folder that the rank was started in
    answers = parallel.gather((socket.gethostname(), str(folder.absolute()), _sees(token)))
    if parallel.is_main():
        token.unlink()
    blind = [
        f"rank {rank} on {host} in {path}"
        for rank, (host, path, sees) in enumerate(answers)
        if not sees
    ]
    if blind:
        more = f", and {len(blind) - 3} more" if len(blind) > 3 else ""
        raise OutputFolderError(
            f"output_dir is not shared by all nodes: rank 0 on {answers[0][0]} wrote a file to "
            f"{answers[0][1]}, and it was not found by {'; '.join(blind[:3])}{more}. Set "
            "output_dir to one folder of a file system that all of them mount"
        )


def _write_token(folder: Path) -> str:
    token = folder / f".probe-{uuid.uuid4().hex}"
    token.touch()
    return token.name


def _sees(token: Path) -> bool:
    end = time.monotonic() + _SEE_S
    while not token.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
