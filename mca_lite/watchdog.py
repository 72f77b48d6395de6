"""Watchdog: report a rank that hangs or dies, and stop the others.

Each rank notes its phases: the count of phases is the same on all ranks, and a note is a few
assignments. A thread watches the count of its rank. After hang_timeout seconds without progress it
asks all ranks, through the process group's store, for count, phase and Python stack, and prints the
late ranks. After ddp_timeout seconds all ranks leave. A rank that dies of an exception leaves its
message in the store for ranks that lose their connection to it.

No collective is added; without a hang each rank reads two small keys of the store now and then.

A rank stops as at SIGTERM if its torchrun has gone: it saves and leaves. A data loader's worker
ends with its rank.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from .errors import UserError
from .files import first_of
from .world import tell_torchrun

HANG_EXIT_CODE = 87  # of a run with a hanging rank
# phases of unknown length, like all before the end of the first step: reported at half of
# ddp_timeout
STARTING = "starting"
SAVING = "saving a checkpoint"
ENDING = "ending the run, with its export"
BETWEEN_STEPS = "between steps"
_LONG = (STARTING, SAVING, ENDING)
_SHOWN = 3  # stacks that are printed
_FRAMES = 25  # the innermost ones of a stack
_LEAVE_S = 10.0  # for a rank to end by itself after another one died
SILENT = {  # the answer of a rank without one
    "count": -1,
    "is_waiting": False,
    "text": "does not answer: its process is stopped or gone, or lets no Python run; it cannot "
    "show its stack",
}
ANSWER_S = 3.0  # for the store to answer a rank without its connection
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_LOST = (  # words of gloo or nccl about a lost rank
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exiting",
    "Connection was likely closed",
    "wait timeout after",  # of the store, about a rank without an address
)


class RankFailed(UserError, RuntimeError):
    """This rank lost its connection to a failed rank. The text names that rank and its error."""

    same_on_all_ranks = True

    def __init__(self, text: str, exit_code: int = 1):
        super().__init__(text)
        self.exit_code = exit_code


def lost_a_rank(error: BaseException) -> bool:
    """True for an error about the connection to a lost rank."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


def end_with_rank(worker: int) -> None:
    """Let the kernel end this process, the `worker`th of a data loader, with its rank. On Linux
    alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# -- for the loop; without a watch, or in a world of one rank, these do nothing

_current: "Watchdog | None" = None


def note(phase: str, step: int | None = None) -> None:
    """Begin a phase of this rank, after `step` steps (None: as before). All ranks must call it
    equally often: a rank with fewer calls is late."""
    if _current is not None:
        _current.note(phase, step)


def alive() -> None:
    """Report progress within a phase; ranks may call it differently often."""
    if _current is not None:
        _current.ticks += 1


@contextlib.contextmanager
def watch(args) -> Iterator[None]:
    """Watch this rank within the context; may be nested. args: TrainingArguments.

    Raises RankFailed in place of a lost connection, if the lost rank left its message. Collective
    on entry.
    """
    from . import parallel  # brings torch

    global _current
    if _current is not None or parallel.world_size() == 1:
        yield
        return
    # keys of this run are not for a restarted run, or another one in this world
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
    """The notes of one rank, and its part in the search for late ranks.

    store: that of the ranks, as torch.distributed's. The stack of the thread that makes a
    Watchdog is shown. Another thread calls look() every `poll_s` seconds; all times are counted in
    such calls, so a suspended process does not wait.
    """

    def __init__(
        self,
        store,
        rank: int,
        size: int,
        hang_timeout: float,
        ddp_timeout: float,
        leave: Callable[[int], Any] = os._exit,
    ):
        self.store = store
        self.rank = rank
        self.size = size
        self.hang_timeout = hang_timeout
        self.ddp_timeout = ddp_timeout
        self.poll_s = min(5.0, max(0.2, min(hang_timeout, ddp_timeout / 2) / 10))
        self.count = 0
        self.step = 0
        self.phase = STARTING
        self.ticks = 0
        self.waited = 0.0  # seconds without progress
        self._leave = leave
        self._is_settled = False  # a step is done: kernels are compiled, groups are connected
        self._thread_id = threading.get_ident()
        self._seen = (0, 0)
        self._question: str | None = None  # put by this rank, ...
        self._answers_due = 0.0  # ... the time limit of its answers, ...
        self._late: str | None = None  # ... and the late ranks according to them
        self._since_verdict = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._parent = os.getppid()  # torchrun, under it
        self._name = f"rank {rank} on {socket.gethostname()} (process {os.getpid()})"
        store.set(f"name/{rank}", self._name)

    def note(self, phase: str, step: int | None = None) -> None:
        """Begin a phase: see note() of this module."""
        self.phase = phase
        self.step = self.step if step is None else step
        self.count += 1
        self._is_settled |= phase == BETWEEN_STEPS

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=1.0)  # it may wait for a lost store

    def _run(self) -> None:
        has_store = True
        while not self._stopped.wait(self.poll_s):
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._parent:
                _print(f"warning: rank {self.rank} stops: torchrun ({self._parent}) has gone")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                if has_store:
                    self.look()
            except RuntimeError:  # the store has gone with its owner: the loop will notice
                has_store = False

    @property
    def limit_s(self) -> float:
        """Seconds without progress before the ranks are searched."""
        half = self.ddp_timeout / 2
        is_short = self._is_settled and self.phase not in _LONG
        return min(self.hang_timeout, half) if is_short else half

    def look(self) -> None:
        """Answer a question, ask one if this rank makes no progress, and leave with all ranks."""
        progress = (self.count, self.ticks)
        if progress == self._seen:
            self.waited += self.poll_s
        else:
            self._seen = progress
            self._go_on()
        self._answer()
        verdict = self._read("verdict")
        if verdict:
            self._obey(json.loads(verdict))
        elif self.waited >= self.limit_s:
            self._investigate()

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _answer(self) -> None:
        question = self._read("question")
        if question:
            stack, is_waiting = stack_of(self._thread_id)
            place = f"after step {self.step}, {self.phase}"
            text = f"{place} for {self.waited:.0f} s\n{stack.rstrip()}"
            answer = dict(count=self.count, is_waiting=is_waiting, place=place, text=text)
            self.store.set(f"answer/{question}/{self.rank}", json.dumps(answer))

    # -- late ranks: one rank asks and prints

    def _investigate(self) -> None:
        if self._question is None:
            question = f"{self.rank} at {self._seen}"
            if self.store.compare_set("question", "", question).decode() == question:
                self._question = question
                self._answers_due = self.waited + max(1.0, 3 * self.poll_s)
        elif self._late is None:
            if self.waited >= self._answers_due:
                self._report()
        elif self._late and self.waited >= self.ddp_timeout - 2 * self.poll_s:
            self._judge(f"{self._late} hung for {self.waited:.0f} s (ddp_timeout): see above")
            # now: the store may end with the next rank that leaves
            self._obey(json.loads(self._read("verdict")))

    def _report(self) -> None:
        """Print the answers of the ranks."""
        ranks = range(self.size)
        names = [self._read(f"name/{rank}") or f"rank {rank}" for rank in ranks]
        texts = [self._read(f"answer/{self._question}/{rank}") for rank in ranks]
        answers = [json.loads(text) if text else SILENT for text in texts]
        late = ranks_behind(answers)
        self._late = first_of([names[rank] for rank in late], _SHOWN)
        text = describe(late, answers, names)
        summary = "no rank was behind the others when they were asked: see above"
        if late:
            left = max(0, self.ddp_timeout - self.waited)
            text += f"\nall ranks leave in {left:.0f} s (ddp_timeout) unless it goes on"
            summary = f"{self._late} hung: see above"
        waited = f"rank {self.rank} has waited {self.waited:.0f} s"
        _print(f"warning: {waited} after step {self.step}, {self.phase}; {text}")
        self.store.set("report", summary)

    def _go_on(self) -> None:
        # nothing is deleted: get() of a rank between check() and get() would wait
        if self._question is not None:
            self.store.set("report", "")
            self.store.set("question", "")
        self._question = None
        self._late = None
        self.waited = 0.0

    # -- the end of all ranks

    def _judge(self, text: str, code: int = HANG_EXIT_CODE) -> None:
        """Give all ranks the reason of their end, unless there is one."""
        verdict = json.dumps({"rank": self.rank, "text": text, "code": code})
        self.store.compare_set("verdict", "", verdict)

    def _obey(self, verdict: dict) -> None:
        """Leave: no exception reaches a waiting rank. After an error of another rank this one may
        notice, and end in its way."""
        self._since_verdict += self.poll_s
        if verdict["code"] != HANG_EXIT_CODE and self._since_verdict < _LEAVE_S:
            return
        tell_torchrun(verdict["text"])
        if verdict["rank"] == self.rank:
            _print(f"error: {verdict['text']}; all ranks leave")
        self._leave(verdict["code"])

    def tell(self, error: Exception) -> RankFailed | None:
        """Leave the message of this rank's last error for the others. For a lost connection
        -> the error to raise in its place, None if the lost rank left no message."""
        failed: list[RankFailed] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone too
                failed.extend(self._tell(error))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER_S)
        if thread.is_alive() and lost_a_rank(error):
            alone = RankFailed(
                "the store of the ranks does not answer: the process that holds it (rank 0, or "
                "torchrun on the first machine) is stopped or cannot be reached",
                HANG_EXIT_CODE,
            )
            alone.same_on_all_ranks = False  # the main rank may be the lost one
            return alone
        return failed[0] if failed else None

    def _tell(self, error: Exception) -> Iterator[RankFailed]:
        if not lost_a_rank(error):
            line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self._judge(f"{self._name} failed: {line}", code=1)
            return
        report = self._read("report")
        if report:
            self._judge(report)
        verdict = self._read("verdict")
        if verdict:
            about = json.loads(verdict)
            yield RankFailed(about["text"], about["code"])


# -- answers and stacks


def ranks_behind(answers: list[dict]) -> list[int]:
    """Ranks without an answer, else those with the fewest phases, and among them those without a
    wait for others; [] if no rank is late."""
    progress = [(answer["count"], answer["is_waiting"]) for answer in answers]
    late = [rank for rank, own in enumerate(progress) if own == min(progress)]
    return late if len(late) < len(answers) else []


def describe(late: list[int], answers: list[dict], names: list[str]) -> str:
    """The late ranks with phase, host and stack (those of any if none is late), and the phases of
    the others, in lines."""
    lines = [f"{len(late)} of {len(names)} ranks behind:"]
    for rank in (late or range(len(names)))[:_SHOWN]:
        lines.append(f"{names[rank]}: {answers[rank]['text']}")
    ranks_at: dict[str, list[str]] = {}
    for rank in set(range(len(names))).difference(late):
        ranks_at.setdefault(answers[rank]["place"], []).append(str(rank))
    lines += [f"ranks {first_of(ranks, 8)}: {place}" for place, ranks in ranks_at.items()]
    return "\n".join(lines)


def stack_of(thread_id: int) -> tuple[str, bool]:
    """(a thread's Python stack, the innermost call last; True if it may wait for other ranks, as
    code of torch, megatron-core and this package does)."""
    frame = sys._current_frames()[thread_id]
    return "".join(traceback.format_stack(frame)[-_FRAMES:]), may_wait(frame)


def may_wait(frame: FrameType) -> bool:
    """True for a frame of a module with collectives."""
    module = frame.f_globals.get("__name__", "")
    return module.startswith(("torch.", "megatron.", f"{__package__}."))


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
