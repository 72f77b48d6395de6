"""A run as its output folder shows it, while it is written too: lines of the log, state, figures.

Nothing here imports torch, so that `watch` and `report` answer at once.
"""

import json
import math
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from .constants import GENERATIONS_NAME, RUN_CONFIG_NAME, RUN_SUMMARY_NAME, TRAINER_LOG_NAME

# Without a new line for so long a run counts as hung: before its first line (compiling, the pass of
# a reference), and later at least, or as many times what it needs from one line to the next.
_FIRST_LINE_S, _QUIET_S, _QUIET_LINES = 900, 120, 5


def format_duration(seconds: float) -> str:
    """Returns 58s, 1m20s or 2h05m."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def format_rate(per_second: float) -> str:
    """Returns 850, 12.3k or 1.2M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if per_second >= limit:
            return f"{per_second / limit:.1f}{unit}"
    return f"{per_second:.0f}"


def smooth(values: Iterable[float], weight: float = 0.9) -> list[float]:
    """Returns the running mean in which a value counts `weight` times less with each step since.

    m_t = sum_i w^(t-i) x_i / sum_i w^(t-i): the first values are not pulled to zero.
    """
    total, norm, means = 0.0, 0.0, []
    for value in values:
        total, norm = weight * total + value, weight * norm + 1.0
        means.append(total / norm)
    return means


def read_log(path: str) -> list[dict]:
    """Returns the records of a trainer_log.jsonl; a last line that a crash left unfinished is
    passed over. ValueError where another line is no JSON."""
    records = []
    with open(path, encoding="utf-8") as file:
        lines = file.readlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}:{number}: expected a JSON object, but {error}: remove the line"
                ) from None
    return records


class LineFile:
    """The records of a .jsonl file that another process may be writing.

    read() takes what was added since: a last line without its end waits for the next call, lines
    that are no JSON objects are passed over, and a file in the place of the one before (of a
    resumed run, or a new one) is read from its beginning. No file has no records.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.records: list[dict] = []
        self.changed_at: float | None = None  # seconds since 1970; None without a file
        self._inode, self._offset = 0, 0

    def read(self) -> list[dict]:
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self.records, self._inode, self._offset = [], found.st_ino, 0
                file.seek(self._offset)
                whole, end, _ = file.read().rpartition(b"\n")
        except OSError:
            self.records, self.changed_at, self._inode, self._offset = [], None, 0, 0
            return self.records
        self.changed_at = found.st_mtime
        self._offset += len(whole + end)
        for line in whole.split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:  # of JSON, or of UTF-8
                continue
            if isinstance(record, dict):
                self.records.append(record)
        return self.records


class RunFolder:
    """What an output folder says of its run; call read() for what is new.

    records: the lines of its log that have a step. summary: what Report keeps beside the log, {}
    where there is none. A folder that does not exist, or not yet, is a run without lines.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder, self.name = Path(folder), str(folder).rstrip("/") or "/"
        self._log = LineFile(self.folder / TRAINER_LOG_NAME)
        self.read()

    def read(self) -> "RunFolder":
        self.summary = _mapping(self.folder / RUN_SUMMARY_NAME)
        lines = self._log.read()
        self.records = [line for line in lines if isinstance(line.get("step"), int)]
        return self

    def may_hold_a_run(self) -> bool:
        """False for a file, and for a folder with files none of which is a run's."""
        if self.folder.is_file():
            return False
        if not self.folder.is_dir() or not any(self.folder.iterdir()):
            return True
        return bool(self.summary or self.records or (self.folder / RUN_CONFIG_NAME).is_file())

    def config(self) -> dict[str, Any]:
        """config.yaml as it was written; {} where there is none."""
        return _mapping(self.folder / RUN_CONFIG_NAME)

    def samples(self) -> list[dict]:
        """The answers in generations.jsonl: prompt, answer, and where known before, expected."""
        return LineFile(self.folder / GENERATIONS_NAME).read()

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of each line where the key has a finite number."""
        found = ((line["step"], line.get(key)) for line in self.records)
        return [(step, value) for step, value in found if _is_number(value)]

    def last(self, key: str) -> Any:
        """The key's newest value, None where no line has one."""
        values = (line[key] for line in reversed(self.records) if line.get(key) is not None)
        return next(values, None)

    def keys(self) -> list[str]:
        """Every key of the log that has numbers, in the order in which they came up."""
        keys = {key: None for line in self.records for key in line if _is_number(line[key])}
        return [key for key in keys if key not in ("step", "epoch")]

    @property
    def step(self) -> int:
        return self.records[-1]["step"] if self.records else 0

    @property
    def max_steps(self) -> int | None:
        return self.summary.get("max_steps")

    @property
    def seconds(self) -> float | None:
        """From the run's start, or its last resumption, to its last line."""
        if "started" not in self.summary or self._log.changed_at is None:
            return None
        return self._log.changed_at - self.summary["started"]

    def quiet_s(self) -> float:
        """Since the last line, or since the start before there is one."""
        since = self._log.changed_at
        if not self.records:
            since = self.summary.get("started", since)
        return 0.0 if since is None else time.time() - since

    def eta_s(self) -> float | None:
        """The seconds left, where every step takes what the steps since the start took."""
        if self.seconds is None or self.max_steps is None:
            return None
        done = self.step - self.summary.get("first_step", 0)
        if done <= 0 or self.step >= self.max_steps:
            return None
        return max(0.0, self.seconds / done * (self.max_steps - self.step) - self.quiet_s())

    def state(self) -> str:
        """no run yet, running, hung?, failed, or how the run says that it ended: finished,
        interrupted; unknown of a log alone."""
        if not self.summary:
            return "unknown" if self.records else "no run yet"
        state = self.summary.get("state", "unknown")
        if state != "running":
            return state
        if self.summary.get("host") == socket.gethostname() and not _lives(self.summary["pid"]):
            return "failed"
        limit = _FIRST_LINE_S
        if self.records:
            steps = [line["step"] for line in self.records[-2:]]
            between = (steps[-1] - steps[0]) * (self.last("step_time_s") or 0)
            limit = max(_QUIET_S, _QUIET_LINES * between)
        return "hung?" if self.quiet_s() > limit else "running"


def _is_number(value: Any) -> bool:
    is_bool = isinstance(value, bool)
    return isinstance(value, (int, float)) and not is_bool and math.isfinite(value)


def _mapping(path: Path) -> dict:
    """A YAML or JSON file's mapping; {} where there is none, or half of one."""
    read = json.loads if path.suffix == ".json" else yaml.safe_load
    try:
        found = read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True
