"""Files that one process makes while the others wait: the operating system's lock, a temporary
folder, one rename.

Nothing here is collective: whoever sees the same file system takes part, from this machine or
another.
"""

import contextlib
import errno
import json
import os
import shutil
import socket
import sys
import time
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

from .files import sync

POLL_S, SAY_EVERY_S = 0.2, 10.0


def _say(text: str) -> None:
    # One line a machine is enough, whichever of its processes is the one at work.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _read(path: Path) -> str:
    """The text of a file, "" where there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def build_once(target: Path, build, what: str, ready=None) -> None:
    """Make `target` exist: one process runs build(temporary path, progress), the others wait until
    it is renamed.

    The operating system frees the lock when its owner dies, and the next process builds. what: told
    to those who wait. ready: says whether target is good as it is (default: where it exists); if
    not, it is replaced.
    Raises: what build raises, in the process that builds and (ValueError or RuntimeError, the same
    text) in those who wait for it; ValueError where the folder cannot be written.
    """
    ready = ready or target.exists
    if ready():
        return
    error_file = _beside(target, ".error")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The lock's file stays: without it, those who wait and those who come would hold different
        # locks.
        lock, told_before = FileLock(_beside(target, ".lock")), _read(error_file)
        _wait_for(lock, target, what)
    except OSError as error:
        raise _not_writable(target.parent, error) from error
    try:
        told = _read(error_file)
        if ready():  # by the process that we waited for
            return
        if told != told_before:  # it failed, and so should we
            error = json.loads(told)
            raise (ValueError if error["kind"] == "ValueError" else RuntimeError)(error["text"])
        _build_and_rename(target, build, what, ready)
    finally:
        lock.release()


def _wait_for(lock: FileLock, target: Path, what: str) -> None:
    """Take the lock; meanwhile say now and then who holds it, and how far it is."""
    while True:
        try:
            lock.acquire(timeout=SAY_EVERY_S, poll_interval=POLL_S)
            return
        except Timeout:
            _say(f"waiting for {_read(_beside(target, '.progress')) or 'a process'}, {what}")


def _not_writable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"the cache folder {folder} cannot be written ({error.strerror or error}): set cache_dir, "
        "or the environment variable MCA_LITE_CACHE, to a folder that can, with room"
    )


def _build_and_rename(target: Path, build, what: str, ready) -> None:
    """Build beside the target, then rename. The caller holds the lock."""
    host, now = socket.gethostname(), time.monotonic()
    progress_file, error_file = _beside(target, ".progress"), _beside(target, ".error")
    temporary = _beside(target, f".{host}-{os.getpid()}.tmp")
    times = {"wrote": now - SAY_EVERY_S, "said": now}

    def progress(text: str) -> None:
        now = time.monotonic()
        if now - times["wrote"] >= 2:
            times["wrote"] = now
            progress_file.write_text(f"process {host}:{os.getpid()} ({text})")
        if now - times["said"] >= SAY_EVERY_S:
            times["said"] = now
            _say(f"{what}: {text}")

    try:
        # Who left these is dead, since we hold the lock. Where locks do not reach other machines,
        # theirs may be alive.
        for left in target.parent.glob(f"{target.name}.{host}-*.tmp"):
            _remove(left)
        progress("starting")
        build(temporary, progress)
        if (
            not ready()
        ):  # true where another machine's process, which locks did not reach, was faster
            _remove(target)
            os.replace(temporary, target)
            sync(target.parent)
        error_file.unlink(missing_ok=True)
    except Exception as error:
        if isinstance(error, OSError) and _is_of(target.parent, error):
            error = _not_writable(target.parent, error)
        told = {"kind": type(error).__name__, "text": str(error), "id": uuid.uuid4().hex}
        with contextlib.suppress(OSError):  # a full disk takes no file
            error_file.write_text(json.dumps(told))
        raise error
    finally:
        progress_file.unlink(missing_ok=True)
        _remove(temporary)


def _is_of(folder: Path, error: OSError) -> bool:
    """Whether an error comes from writing to the folder, and not from reading data."""
    is_inside = str(error.filename or "").startswith(str(folder))
    return is_inside or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
