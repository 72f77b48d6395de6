"""Files that one process makes while the others wait: a lock file that outlives no dead owner, then one rename.

Nothing here talks to other ranks: whoever sees the same file system takes part, from this node or another.
"""

import json
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil

POLL_S, REFRESH_S, STALE_S, SAY_EVERY_S = 0.5, 5.0, 60.0, 10.0


def _say(text: str) -> None:
    # One line a node is enough, whichever of its processes is the one at work.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _replace_text(path: Path, text: str) -> None:
    temporary = _beside(path, f".{uuid.uuid4().hex}")
    temporary.write_text(text)
    os.replace(temporary, path)


class _Lock:
    """A lock file that holds host:pid:nonce and is touched every REFRESH_S while its owner lives."""

    def __init__(self, path: Path):
        self.path = path
        self.token = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}"
        self._done = threading.Event()

    def acquire(self) -> bool:
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w") as file:
            file.write(self.token)
        threading.Thread(target=self._refresh, daemon=True).start()
        return True

    def _refresh(self) -> None:
        while not self._done.wait(REFRESH_S):
            try:
                os.utime(self.path)
            except (
                FileNotFoundError
            ):  # taken over by a process that thought us dead: both write the same, one wins
                return

    def release(self) -> None:
        self._done.set()
        try:
            if self.path.read_text() == self.token:
                self.path.unlink()
        except FileNotFoundError:
            pass


class _Waiter:
    """What a process knows about the writer that it waits for."""

    def __init__(self, target: Path, what: str):
        self.target, self.what = target, what
        self.lock = _beside(target, ".lock")
        self.token, self.seen = "", None
        self.changed = self.said = time.monotonic()

    def check(self) -> None:
        """Raises the writer's error, removes a dead writer's lock, prints the progress now and then."""
        self._raise_writers_error()
        try:
            # Reading before stat makes a network file system look at the server instead of its cache.
            seen = (self.lock.read_text(), self.lock.stat().st_mtime_ns)
        except FileNotFoundError:
            return
        now = time.monotonic()
        if seen != self.seen:  # our clock, not the file's: clocks of two hosts differ
            self.seen, self.changed = seen, now
        self.token = seen[0] or self.token
        if now - self.changed > STALE_S or self._owner_is_gone():
            self.lock.unlink(missing_ok=True)
        elif now - self.said >= SAY_EVERY_S:
            self.said = now
            try:
                state = _beside(self.target, ".progress").read_text()
            except FileNotFoundError:
                state = "starting"
            _say(f"waiting for process {self.token.rpartition(':')[0]}, {self.what}: {state}")

    def _owner_is_gone(self) -> bool:
        host, _, rest = self.token.partition(":")
        return (
            bool(rest)
            and host == socket.gethostname()
            and not psutil.pid_exists(int(rest.partition(":")[0]))
        )

    def _raise_writers_error(self) -> None:
        try:
            error = json.loads(_beside(self.target, ".error").read_text())
        except FileNotFoundError:
            return
        if error["token"] == self.token:  # an error of an earlier run is not ours
            raise (ValueError if error["kind"] == "ValueError" else RuntimeError)(error["text"])


def build_once(target: Path, build, what: str, ready=None) -> None:
    """Makes `target` exist: one process runs build(temporary_path, progress), the others poll until it is renamed.

    ready: says whether target is good as it is (default: where it exists); if not, it is replaced.
    Raises: what build raises, in the writer and (ValueError or RuntimeError, the same text) in those who wait.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    waiter, ready = _Waiter(target, what), ready or target.exists
    while not ready():
        lock = _Lock(_beside(target, ".lock"))
        if not lock.acquire():
            waiter.check()
            time.sleep(POLL_S)
            continue
        try:
            if not ready():  # somebody may have finished just before we got the lock
                shutil.rmtree(target, ignore_errors=True)
                _build_and_rename(target, build, what)
        except Exception as error:
            report = {"token": lock.token, "kind": type(error).__name__, "text": str(error)}
            _replace_text(_beside(target, ".error"), json.dumps(report))
            raise
        finally:
            lock.release()


def _build_and_rename(target: Path, build, what: str) -> None:
    temporary, progress_file = (
        _beside(target, f".{uuid.uuid4().hex}.tmp"),
        _beside(target, ".progress"),
    )
    last = {"wrote": 0.0, "said": time.monotonic()}

    def progress(text: str) -> None:
        now = time.monotonic()
        if now - last["wrote"] >= 2:
            last["wrote"] = now
            _replace_text(progress_file, text)
        if now - last["said"] >= SAY_EVERY_S:
            last["said"] = now
            _say(f"{what}: {text}")

    try:
        build(temporary, progress)
        os.rename(temporary, target)
        for left_by_a_dead_writer in target.parent.glob(f"{target.name}.*.tmp"):
            shutil.rmtree(left_by_a_dead_writer, ignore_errors=True)
        _beside(target, ".error").unlink(missing_ok=True)
    except OSError:
        if (
            not target.exists()
        ):  # otherwise somebody who took over was faster: the content is the same
            raise
    finally:
        progress_file.unlink(missing_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)
