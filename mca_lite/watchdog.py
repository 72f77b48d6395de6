"""A rank that hangs or dies is named, and no rank stays behind.

Each rank notes what it does: a count of phases that is the same on all ranks, a few assignments a
step. A thread looks at its own rank's count. Where that stands still for hang_timeout seconds, the
ranks are asked through the process group's store for their count, phase and Python stack, and the
ranks that are behind are printed. Where it stands still for ddp_timeout, all leave. A rank that
dies of an exception leaves its words in the store for those who then lose their connection to it.

No collective is added, and a run that does not hang asks the store two small things now and then.

A rank whose torchrun has gone stops as at SIGTERM: it saves and leaves. A data loader's worker ends
with its rank.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from .errors import UserError
from .world import tell_torchrun

HANG_EXIT_CODE = 87  # of a run in which a rank hung
# phases that take as long as they take, as everything before the first step's end does: told of at
# half of ddp_timeout
STARTING = "starting"
SAVING = "saving a checkpoint"
ENDING = "ending the run, with its export"
BETWEEN_STEPS = "between steps"
_LONG = (STARTING, SAVING, ENDING)
_SHOWN = 3  # ranks whose stacks are printed
_FRAMES = 25  # the innermost ones of a stack
_LEAVE_S = 10.0  # in which a rank ends by itself after another one died
_ANSWER_S = 3.0  # in which the store answers a rank that has lost another one
# what is said, by gloo or nccl, of a rank that is gone
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exiting",
    "Connection was likely closed",
    "wait timeout after",  # of a store that a rank left before it gave its address
)


class RankFailed(UserError, RuntimeError):
    """Another rank failed, and this one lost it. The text names that rank, and its error."""

    same_on_all_ranks = True

    def __init__(self, text: str, exit_code: int = 1):
        super().__init__(text)
        self.exit_code = exit_code


def lost_a_rank(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


def end_with_rank(worker: int) -> None:
    """Let the kernel end this process, the `worker`th of a data loader, where its rank ends, in
    whatever way; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# -- what the loop calls; without a watch, or in a world of one rank, nothing is done

_current: "Watchdog | None" = None


def note(phase: str, step: int | None = None) -> None:
    """Say that this rank begins a phase, after `step` steps (None: as before). All ranks must call
    it alike: a rank that has called it fewer times than others is behind."""
    if _current is not None:
        _current.note(phase, step)


def alive() -> None:
    """Say that the phase goes on; ranks may call it as often as they like."""
    if _current is not None:
        _current.ticks += 1


@contextlib.contextmanager
def watch(args) -> Iterator[None]:
    """Watch this rank while it is entered; may be entered again within. args: TrainingArguments.

    RankFailed in place of an error that only says that another rank is gone, where that rank has
    said why. Collective on entry.
    """
    from . import parallel  # brings torch

    global _current
    if _current is not None or parallel.world_size() == 1:
        yield
        return
    # a restarted run, or another one in this world, must not read what this one leaves
    store = parallel.own_store(parallel.on_main(lambda: f"watch-{uuid.uuid4().hex}"))
    _current = watchdog = Watchdog(
        store, parallel.rank(), parallel.world_size(), args.hang_timeout, args.ddp_timeout
    )
    watchdog.start()
    try:
        yield
    except Exception as error:
        failed = watchdog.tell(error)
        if failed is not None:
            raise failed from error
        raise
    finally:
        _current = None
        watchdog.stop()


class Watchdog:
    """What one rank notes of itself, and its part in finding out who is behind.

    store: the ranks' own, as torch.distributed's. The thread that makes it is the one whose stack
    is shown. look() is called every `poll_s` seconds by a thread of its own.
    """

    def __init__(
        self,
        store,
        rank: int,
        size: int,
        hang_timeout: float,
        ddp_timeout: float,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], Any] = os._exit,
    ):
        self.store = store
        self.rank = rank
        self.size = size
        self._clock = clock
        self._leave = leave
        self.hang_timeout = hang_timeout
        self.ddp_timeout = ddp_timeout
        self.poll_s = min(5.0, max(0.2, min(hang_timeout, ddp_timeout / 2) / 10))
        self.count = 0
        self.step = 0
        self.phase = STARTING
        self.ticks = 0
        self._is_settled = False  # a step is done: what is compiled or connected once, is
        self._thread_id = threading.get_ident()
        self._seen = (0, 0)
        self.waited = 0.0
        self._looked = clock()
        self._answered: str | None = None  # the last question that this rank has answered
        self._asked: str | None = None  # this rank's own question, ...
        self._answers_due = 0.0  # ... the time by which it is to be answered, ...
        self._behind: list[int] | None = None  # ... and the ranks that the answers show behind
        self._leave_at: float | None = None  # once there is a verdict
        self._stopped = threading.Event()
        self._thread = None
        self._parent = os.getppid()  # torchrun, under it
        store.set(f"host/{rank}", f"on {socket.gethostname()} (process {os.getpid()})")

    def note(self, phase: str, step: int | None = None) -> None:
        self.phase = phase
        self.step = self.step if step is None else step
        self.count += 1
        if phase == BETWEEN_STEPS:
            self._is_settled = True

    # -- the thread

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=1.0)  # it may be waiting for a store that is gone

    def _run(self) -> None:
        has_store = True
        while not self._stopped.wait(self.poll_s):
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._parent:
                _say(f"warning: rank {self.rank} stops: torchrun (process {self._parent}) has gone")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                if has_store:
                    self.look()
            except RuntimeError:  # the store is gone: as its owner is, which the loop finds out
                has_store = False

    @property
    def limit_s(self) -> float:
        """How long the count may stand still before the ranks are asked."""
        half = self.ddp_timeout / 2
        is_short = self._is_settled and self.phase not in _LONG
        return min(self.hang_timeout, half) if is_short else half

    def look(self) -> None:
        """Answer who asks, ask where this rank stands still, and leave where the ranks leave."""
        now = self._clock()
        # a process that was suspended has not waited all that time
        elapsed = min(now - self._looked, 2 * self.poll_s)
        self._looked = now
        if (self.count, self.ticks) == self._seen:
            self.waited += elapsed
        else:
            self._seen = self.count, self.ticks
            self._go_on()
        self._answer()
        verdict = self._read("verdict")
        if verdict is not None:
            self._obey(json.loads(verdict), now)
        elif self.waited >= self.limit_s:
            self._investigate(now)

    def _read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _answer(self) -> None:
        question = self._read("question")
        if question in (None, "", self._answered):
            return
        self._answered = question
        stack, is_waiting = stack_of(self._thread_id)
        answer = dict(count=self.count, step=self.step, phase=self.phase, waited=self.waited)
        answer |= dict(stack=stack, is_waiting=is_waiting)
        self.store.set(f"answer/{question}/{self.rank}", json.dumps(answer))

    # -- who is behind: one rank asks and prints

    def _investigate(self, now: float) -> None:
        if self._asked is None:
            mine = f"{self.rank} at {self._seen}"
            if self.store.compare_set("question", "", mine).decode() == mine:
                self._asked, self._answers_due = mine, now + max(1.0, 3 * self.poll_s)
        elif self._behind is None:
            keys = [f"answer/{self._asked}/{rank}" for rank in range(self.size)]
            if now >= self._answers_due or self.store.check(keys):
                self._report(list(map(self._read, keys)))
        elif self._behind and self.waited >= self.ddp_timeout - 2 * self.poll_s:
            names = self._names(self._behind)
            self._judge(f"{names} hung for {self.waited:.0f} s (ddp_timeout): see above")
            self._obey(json.loads(self._read("verdict")), now)

    def _report(self, found: list[str | None]) -> None:
        """Print what the ranks have answered; None: no answer."""
        answers = {rank: json.loads(text) for rank, text in enumerate(found) if text is not None}
        self._behind = who_is_behind(answers, self.size)
        text = describe(self._behind, answers, [self._name(rank) for rank in range(self.size)])
        summary = "no rank was behind the others when they were asked: see above"
        if self._behind:
            left = max(0, self.ddp_timeout - self.waited)
            text += f"\nall ranks leave in {left:.0f} s (ddp_timeout) unless it goes on"
            summary = f"{self._names(self._behind)} hung: see above"
        waited = f"rank {self.rank} has waited {self.waited:.0f} s"
        _say(f"warning: {waited} after step {self.step}, {self.phase}; {text}")
        self.store.set("report", summary)

    def _go_on(self) -> None:
        # nothing is deleted: a rank that has just seen a key would wait for it in get()
        if self._behind is not None:
            _say(f"note: rank {self.rank} goes on after {self.waited:.0f} s")
            self.store.set("report", "")
        if self._asked is not None:
            self.store.set("question", "")
        self._asked = None
        self._behind = None
        self.waited = 0.0

    def _name(self, rank: int) -> str:
        return f"rank {rank} {self._read(f'host/{rank}') or ''}"

    def _names(self, ranks: list[int]) -> str:
        more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
        return ", ".join(map(self._name, ranks[:_SHOWN])) + more

    # -- the end of all ranks

    def _judge(self, text: str, code: int = HANG_EXIT_CODE) -> None:
        """Say to all ranks why they end; the first word stands."""
        verdict = json.dumps({"rank": self.rank, "text": text, "code": code})
        self.store.compare_set("verdict", "", verdict)

    def _obey(self, verdict: dict, now: float) -> None:
        """Leave, as the rank that the others wait for cannot be reached by an exception."""
        if self._leave_at is None:
            # after an error of another rank this one may see for itself, and end as it likes
            self._leave_at = now if verdict["code"] == HANG_EXIT_CODE else now + _LEAVE_S
        if now < self._leave_at:
            return
        tell_torchrun(verdict["text"])
        if verdict["rank"] == self.rank:
            _say(f"error: {verdict['text']}; all ranks leave")
        self._leave(verdict["code"])

    def tell(self, error: Exception) -> RankFailed | None:
        """Tell the ranks that this one ends of an error; where it is one that only says that
        another rank is gone -> what to raise in its place, None where that rank said nothing."""
        found: list[RankFailed | None] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # a store that is gone as well
                found.append(self._tell(error))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_ANSWER_S)
        if asking.is_alive() and lost_a_rank(error):
            return RankFailed(
                "the store of the ranks does not answer: the process that holds it (rank 0, or "
                "torchrun on the first machine) is stopped or cannot be reached",
                HANG_EXIT_CODE,
            )
        return found[0] if found else None

    def _tell(self, error: Exception) -> RankFailed | None:
        if not lost_a_rank(error):
            words = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self._judge(f"{self._name(self.rank)} failed: {words}", code=1)
            return None
        verdict = self._read("verdict")
        report = self._read("report")
        if verdict is not None:
            record = json.loads(verdict)
            return RankFailed(record["text"], record["code"])
        if report:
            self._judge(report)
            return RankFailed(report, HANG_EXIT_CODE)
        return None


# -- answers, stacks: plain functions


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def who_is_behind(answers: dict[int, dict], size: int) -> list[int]:
    """Ranks that did not answer, else those that have noted fewer phases than others, and among
    them those that wait for nobody; [] where no rank is behind."""
    silent = [rank for rank in range(size) if rank not in answers]
    if silent:
        return silent
    least = min(answer["count"] for answer in answers.values())
    late = [rank for rank, answer in answers.items() if answer["count"] == least]
    late = [rank for rank in late if not answers[rank]["is_waiting"]] or late
    return late if len(late) < size else []


def describe(behind: list[int], answers: dict[int, dict], names: list[str]) -> str:
    """The ranks behind with phase, host and stack, and what the others do, in lines."""
    places = {
        rank: f"after step {answer['step']}, {answer['phase']}" for rank, answer in answers.items()
    }
    lines = [f"{len(behind)} of {len(names)} ranks behind:"]
    if not behind:
        lines = [f"none of {len(names)} ranks is behind the others:"]
    for rank in (behind or list(answers))[:_SHOWN]:
        if rank in answers:
            waited = answers[rank]["waited"]
            stack = answers[rank]["stack"].rstrip()
            lines += [f"{names[rank]}: {places[rank]} for {waited:.0f} s", stack]
        else:
            lines.append(
                f"{names[rank]} does not answer: its process is stopped or gone, or lets no Python "
                "run; it cannot show its stack"
            )
    others = [rank for rank in answers if rank not in behind]
    for place in dict.fromkeys(places[rank] for rank in others):
        there = [str(rank) for rank in others if places[rank] == place]
        more = f" and {len(there) - 8} more" if len(there) > 8 else ""
        noun = "rank" if len(there) == 1 else "ranks"
        lines.append(f"{noun} {', '.join(there[:8])}{more}: {place}")
    return "\n".join(lines)


def stack_of(thread_id: int) -> tuple[str, bool]:
    """(a thread's Python stack, the innermost call last; whether it may be waiting for other ranks,
    which all wait in torch, megatron-core or this package)."""
    frames = sys._current_frames()
    frame = frames[thread_id]
    stack = "".join(traceback.format_stack(frame)[-_FRAMES:])
    if "_engine_run_backward" in stack.rpartition("File ")[2]:
        # on a GPU the backward pass runs in threads of torch's own
        known = {thread.ident for thread in threading.enumerate()}
        for number, other in frames.items():
            if number not in known:
                frame = other
                stack += "".join(["  in the backward pass:\n", *traceback.format_stack(other)])
    return stack, _may_wait(frame)


def _may_wait(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.startswith(("torch.", "megatron.", f"{__package__}."))
