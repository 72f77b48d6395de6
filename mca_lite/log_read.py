"""A run as its output folder shows it, while it is written too: lines of the log, state, figures.

Nothing here imports torch, so that `watch` and `report` answer at once.
"""

import json
import os
import reprlib
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .args_values import ConfigError, read_config_file
from .constants import GENERATIONS_NAME, RUN_CONFIG_NAME, RUN_SUMMARY_NAME, TRAINER_LOG_NAME
from .files import describe_error, is_there, printable, read_json

# Without a new line for so long a run counts as hung: before its first line (compiling, the pass of
# a reference), and later at least, or as many times what it needs from one line to the next.
_FIRST_LINE_S, _QUIET_S, _QUIET_LINES = 900, 120, 5
_MOST = 10**15  # steps, processes, seconds since 1970


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


# -- what somebody's files hold: checked once, here


def _is_number(value: Any) -> bool:
    """Whether a page can draw it: finite, and so are differences and quotients of such numbers."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and (value == 0 or 1e-300 <= abs(value) <= 1e300)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= _MOST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_sections(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(part, dict) for part in value.values())


def _is_loads(value: Any) -> bool:
    rows = value if isinstance(value, list) else []
    whole = (isinstance(row, list) and row and all(map(_is_number, row)) for row in rows)
    return bool(rows) and all(whole)


def _object(record: Any) -> dict | None:
    return record if isinstance(record, dict) else None


def log_line(record: Any) -> dict[str, Any] | None:
    """Returns a line of the log: its step, the keys that have numbers, and expert_load; None for
    what has no step."""
    if not isinstance(record, dict) or not _is_count(record.get("step")):
        return None
    line = {key: value for key, value in record.items() if _is_number(value)}
    line.pop("expert_load", None)
    if _is_loads(record.get("expert_load")):
        line["expert_load"] = record["expert_load"]
    return line


def _sample(record: Any) -> dict[str, str]:
    keys = ("prompt", "answer", "before", "expected")
    found = ((key, record.get(key)) for key in keys if isinstance(record, dict))
    return {key: value for key, value in found if _is_text(value)}


def _as_text(value: Any) -> str:
    """A value as JSON, so that true is no text and no digit is lost; text as it is."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, skipkeys=True, default=str)
    except RecursionError:
        raise ValueError("a value is nested too deep to be shown") from None


def _texts(values: dict) -> dict[str, str]:
    return {key: _as_text(value) for key, value in values.items() if value is not None}


@dataclass(frozen=True)
class RunSummary:
    """run_summary.json, which log.Report keeps beside the log; None for what it does not say."""

    state: str | None = None
    max_steps: int | None = None
    first_step: int | None = None
    started: float | None = None  # seconds since 1970
    host: str | None = None
    pid: int | None = None
    sections: dict[str, dict[str, str]] | None = None


_SUMMARY: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "state": ("a text", _is_text),
    "max_steps": ("a number of steps", _is_count),
    "first_step": ("a number of steps", _is_count),
    "started": ("seconds since 1970", _is_time),
    "host": ("a text", _is_text),
    "pid": ("a process", _is_count),
    "sections": ("names with their facts", _is_sections),
}


def read_summary(path: Path) -> RunSummary:
    """Returns what a run_summary.json says, nothing where there is none. ValueError where it is
    damaged or holds something else."""
    record = read_json(path) if is_there(path) else {}
    values = {name: record.get(name) for name in _SUMMARY}
    for name, (wanted, fits) in _SUMMARY.items():
        if values[name] is not None and not fits(values[name]):
            came = reprlib.repr(values[name])
            raise ValueError(f"{path}: {name}: expected {wanted}, got {came}")
    if values["sections"] is not None:
        values["sections"] = {name: _texts(part) for name, part in values["sections"].items()}
    return RunSummary(**values)


def read_config(path: Path) -> dict[str, str]:
    """Returns key -> text of a config.yaml, nothing where there is none. ValueError where it is
    damaged or stands for too much."""
    try:
        return _texts(read_config_file(path)) if is_there(path) else {}
    except ConfigError as error:
        raise ValueError(f"{path}: {error.problems[0].reason}") from None


class LineFile:
    """The records of a .jsonl file that another process may be writing.

    convert: from what a line holds to its record, None for none. read() takes what was added since:
    a last line without its end waits for the next call, lines that are no JSON are passed over, and
    a file in the place of the one before (of a resumed run, or a new one) is read from its
    beginning. No file has no records. OSError or ValueError where it cannot be read.
    """

    def __init__(self, path: str | os.PathLike, convert: Callable[[Any], dict | None] = _object):
        self.path, self._convert = Path(path), convert
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self.records: list[dict] = []
        self.changed_at: float | None = None  # seconds since 1970; None without a file
        self._inode, self._offset = inode, 0

    def read(self) -> list[dict]:
        if not is_there(self.path):
            self._begin(0)
            return self.records
        with open(self.path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._begin(found.st_ino)
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
        self.changed_at = found.st_mtime
        self._offset += len(whole + end)
        for line in whole.split(b"\n"):
            try:
                record = self._convert(json.loads(line))
            except (ValueError, RecursionError):  # of JSON, or of UTF-8; nested too deep
                continue
            if record:
                self.records.append(record)
        return self.records


class RunFolder:
    """What an output folder says of its run; call read() for what is new.

    records: the lines of its log, see log_line. problems: file name -> why it cannot be read, of
    those that were tried since. A folder that does not exist, or not yet, is a run without lines.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.name = printable(str(folder).rstrip("/") or "/", kept="")
        self._log = LineFile(self.folder / TRAINER_LOG_NAME, log_line)
        self.read()

    def read(self) -> "RunFolder":
        self.problems: dict[str, str] = {}
        self.summary = self._try(RUN_SUMMARY_NAME, read_summary, RunSummary())
        self.records = self._try(TRAINER_LOG_NAME, lambda path: self._log.read(), [])
        return self

    def _try(self, name: str, read: Callable[[Path], Any], otherwise: Any) -> Any:
        """What `read` makes of a file, or `otherwise` and a problem."""
        try:
            return read(self.folder / name)
        except (OSError, ValueError) as error:
            self.problems[name] = printable(describe_error(error), kept="")
            return otherwise

    def may_hold_a_run(self) -> bool:
        """False for a file, and for a folder with files none of which is a run's."""
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            return not isinstance(error, NotADirectoryError)
        runs = {RUN_CONFIG_NAME, RUN_SUMMARY_NAME, TRAINER_LOG_NAME}
        return not names or not runs.isdisjoint(names)

    def config(self) -> dict[str, str]:
        """config.yaml as it was written; {} where there is none."""
        return self._try(RUN_CONFIG_NAME, read_config, {})

    def samples(self) -> list[dict[str, str]]:
        """The answers in generations.jsonl: prompt, answer, and where known before, expected."""
        return self._try(GENERATIONS_NAME, lambda path: LineFile(path, _sample).read(), [])

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of each line where the key has a finite number."""
        return [(line["step"], line[key]) for line in self.records if key in line]

    def last(self, key: str) -> Any:
        """The key's newest value, None where no line has one."""
        return next((line[key] for line in reversed(self.records) if key in line), None)

    def keys(self) -> list[str]:
        """Every key of the log that has numbers, in the order in which they came up."""
        keys = dict.fromkeys(key for line in self.records for key in line)
        return [key for key in keys if key not in ("step", "epoch", "expert_load")]

    @property
    def step(self) -> int:
        return self.records[-1]["step"] if self.records else 0

    @property
    def max_steps(self) -> int | None:
        return self.summary.max_steps

    @property
    def seconds(self) -> float | None:
        """From the run's start, or its last resumption, to its last line."""
        if self.summary.started is None or self._log.changed_at is None:
            return None
        return self._log.changed_at - self.summary.started

    def quiet_s(self) -> float:
        """Since the last line, or since the start before there is one."""
        since = self._log.changed_at
        if not self.records and self.summary.started is not None:
            since = self.summary.started
        return 0.0 if since is None else time.time() - since

    def eta_s(self) -> float | None:
        """The seconds left, where every step takes what the steps since the start took."""
        if self.seconds is None or self.max_steps is None:
            return None
        done = self.step - (self.summary.first_step or 0)
        if done <= 0 or self.step >= self.max_steps:
            return None
        return max(0.0, self.seconds / done * (self.max_steps - self.step) - self.quiet_s())

    def state(self) -> str:
        """no run yet, running, hung?, failed, cannot be read and why, or how the run says that it
        ended: finished, interrupted; unknown of a log alone."""
        if self.problems:
            return f"cannot be read: {'; '.join(self.problems.values())}"
        state, pid = self.summary.state, self.summary.pid
        if state is None:
            return "unknown" if self.records else "no run yet"
        if state != "running":
            return printable(state, kept="")
        is_here = self.summary.host == socket.gethostname()
        if is_here and pid is not None and not _lives(pid):
            return "failed"
        limit = _FIRST_LINE_S
        if self.records:
            steps = [line["step"] for line in self.records[-2:]]
            between = (steps[-1] - steps[0]) * (self.last("step_time_s") or 0)
            limit = max(_QUIET_S, _QUIET_LINES * between)
        return "hung?" if self.quiet_s() > limit else "running"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # or no number of a process
        return False
    except OSError:  # another user's
        pass
    return True
