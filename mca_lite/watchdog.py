"""Watchdog: report ranks that hang or die, and stop the others.

Each rank counts its phases, the same ones on all ranks; noting a phase costs a few assignments. A
thread of each rank watches its count. After hang_timeout seconds without progress (at most half of
ddp_timeout; always that half in long phases and before the first step ends), it asks all ranks for
count, phase, micro-batches, Python stack and collectives, through the process group's store, and
prints the ranks that are late. If there are any, or outside long phases all wait for each other,
all ranks exit after ddp_timeout seconds. If the store does not answer, a second thread makes its
rank exit alone. A rank that dies from an exception leaves a message in the store, for ranks that
lose their connection to it.

Steps get no further collectives. Without a hang, each rank now and then reads two small keys of the
store.

If its torchrun has gone, a rank stops as at SIGTERM: it saves and exits. On Linux, data loader
workers end with their rank."""

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
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from . import parts
from .errors import UserError
from .files import first_of
from .world import tell_torchrun

HANG_EXIT_CODE = 87  # exit code of a run with a hanging rank
# phases of unknown length: a hang is reported at half of ddp_timeout, as it is before the end of
# the first step
STARTING = "starting"
SAVING = "saving a checkpoint"
ENDING = "ending the run, with its export"
BETWEEN_STEPS = "between steps"
_LONG = (STARTING, SAVING, ENDING)
_SHOWN = 3  # how many stacks are printed
_FRAMES = 25  # how many of a stack's innermost frames are printed
_LEAVE_S = 10.0  # time for a rank to end by itself after another rank died
SILENT: dict[str, Any] = {  # stands for the answer of a rank that gives none
    "count": -1,
    "ticks": 0,
    "stage": 0,
    "is_waiting": False,
    "text": "does not answer: its process is stopped or gone, or stuck outside Python; it cannot "
    "show its stack",
}
ANSWER_S = 3.0  # time for the store to answer a rank that lost its connection
_PR_SET_PDEATHSIG = 1  # a constant for Linux's prctl
_LOST = (  # in messages of gloo and nccl about a lost rank
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exiting",
    "Connection was likely closed",
    "wait timeout after",  # the store's message about a rank without an address
)


_RECORDS = "flight_recorder"  # folder in output_dir


class RankFailed(UserError, RuntimeError):
    """Raised on a rank that lost its connection to another. The text says what is known of the
    cause, such as the failed rank and its error."""

    same_on_all_ranks = True

    def __init__(self, text: str, exit_code: int = 1):
        super().__init__(text)
        self.exit_code = exit_code


def lost_a_rank(error: BaseException) -> bool:
    """True if the error is a RuntimeError with a text by which gloo, nccl or the store reports a
    lost connection to a rank."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


def end_with_rank(worker: int) -> None:
    """Let the kernel kill this data loader worker when its rank's process ends. A worker_init_fn;
    `worker`, its number, has no effect. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# -- called by the training loop; outside watch(), or with one rank, these do nothing

_current: "Watchdog | None" = None


class _NoRecorder:
    """Stands in for part_recorder.py if that file is gone: nothing is known about collectives."""

    @staticmethod
    def dump_calls(folder: str, rank: int) -> dict[str, Any]:
        return {}

    @staticmethod
    def differing_calls(summaries: Mapping[int, Any]) -> tuple[list[int], list[str]]:
        return [], []


def _recorder() -> Any:
    """The module that reads torch's record of collectives: part_recorder, or _NoRecorder."""
    return parts.module_of("part_recorder") or _NoRecorder


def note(phase: str, step: int | None = None) -> None:
    """Begin a phase of this rank's work, such as "reading data". step: steps finished so far; None:
    as before.

    All ranks must call it equally often: a rank with fewer calls counts as late."""
    if _current is not None:
        _current.note(phase, step)


def alive() -> None:
    """Report progress within a phase, such as a micro-batch. Ranks may call it differently
    often."""
    if _current is not None:
        _current.ticks += 1


@contextlib.contextmanager
def watch(args: Any) -> Iterator[None]:
    """Watch this rank for hangs inside the context. Entering it again inside, or in a run of one
    rank, has no effect. args: TrainingArguments.

    An error that leaves the context is stored for the other ranks, unless it is a lost connection.
    If the reason of a lost connection is known, RankFailed replaces it. Collective on entry."""
    from . import parallel  # imported late, because it imports torch

    global _current
    if _current is not None or parallel.world_size() == 1:
        yield
        return
    # a new prefix for each run: a restarted or later run must not read the keys of this one
    store = parallel.own_store(parallel.on_main(lambda: f"watch-{uuid.uuid4().hex}"))
    _current = watchdog = Watchdog(
        store,
        parallel.rank(),
        parallel.world_size(),
        args.hang_timeout,
        args.ddp_timeout,
        dump=lambda rank: _recorder().dump_calls(f"{args.output_dir}/{_RECORDS}", rank),
        stage=parallel.pipeline_rank,
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
    """The progress of one rank, and its part in the search for late ranks.

    store: the ranks' key-value store, of torch.distributed.
    dump: function of a rank that returns the summary of its collectives.
    stage: function that returns this rank's pipeline stage.
    leave: function that exits the process with a code.

    The thread that creates a Watchdog is the one whose stack is shown. One thread calls look()
    every `poll_s` seconds, another calls mind_store(). Waiting is counted in such calls, so a
    suspended process does not count as waiting.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        hang_timeout: float,
        ddp_timeout: float,
        leave: Callable[[int], Any] = os._exit,
        dump: Callable[[int], dict[str, Any]] = lambda rank: {},
        stage: Callable[[], int] = lambda: 0,
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
        self._dump = dump
        self._stage = stage
        self._ticks_before = 0  # ticks when this phase began
        self._looks = 0
        self._minded = (0, 0, 0)  # looks, count and ticks at the last change seen by mind_store
        self._silent_s = 0.0  # seconds since that change
        self._has_store = True
        self._dumped: str | None = None  # last question for which this rank stored its record
        self._is_settled = False  # a step is done: kernels are compiled, groups are connected
        self._thread_id = threading.get_ident()
        self._seen = (0, 0)
        self._question: str | None = None  # asked by this rank
        self._answers_due = 0.0  # answers are read when `waited` reaches this
        self._late: str | None = None  # the late ranks according to the answers
        self._will_leave = False  # True if, by the answers, all ranks must exit at ddp_timeout
        self._since_verdict = 0.0
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=run, name="watchdog", daemon=True)
            for run in (self._run, self._run_beside)
        ]
        self._parent = os.getppid()  # torchrun, if it started this rank
        self._name = f"rank {rank} on {socket.gethostname()} (process {os.getpid()})"
        store.set(f"name/{rank}", self._name)

    def note(self, phase: str, step: int | None = None) -> None:
        """Begin a phase of this rank. step: steps finished so far; None: as before."""
        self.phase = phase
        self.step = self.step if step is None else step
        self.count += 1
        self._ticks_before = self.ticks
        self._is_settled |= phase == BETWEEN_STEPS

    def start(self) -> None:
        """Start the threads that watch this rank and the store."""
        self._holder = "torchrun on the first machine"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._holder = self.store.get("name/0").decode()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads that watch this rank and the store, waiting at most 1 s for each."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=1.0)  # a thread may be waiting for a lost store

    def _run(self) -> None:
        while not self._stopped.wait(self.poll_s):
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._parent:
                _print(f"warning: rank {self.rank} stops: torchrun ({self._parent}) has gone")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if self._has_store:
                self.look()

    def _run_beside(self) -> None:
        while not self._stopped.wait(self.poll_s):
            self.mind_store()

    def mind_store(self) -> None:
        """Guard against a store (the ranks' shared key-value store) that no longer answers; called
        regularly. If neither the store's answers nor this rank make progress, print who holds the
        store, and exit the process once ddp_timeout is over."""
        now = (self._looks, self.count, self.ticks)
        if now != self._minded:
            self._minded = now
            self._silent_s = 0.0
            return
        limit_s = self.ddp_timeout
        if not self._has_store and now[1:] == self._seen:  # count the wait before the store ended
            limit_s = max(ANSWER_S, limit_s - self.waited)
        before = self._silent_s
        self._silent_s += self.poll_s
        text = (
            f"the store of the ranks has not answered for {self._silent_s:.0f} s; its holder, "
            f"{self._holder}, is stopped, has ended or cannot be reached: look at its process"
        )
        if before < self.limit_s <= self._silent_s:
            left = max(0, limit_s - self._silent_s)
            place = f"rank {self.rank} waits after step {self.step}, {self.phase}"
            _print(f"warning: {place}; {text}; this rank leaves in {left:.0f} s (ddp_timeout)")
        if self._silent_s >= limit_s:
            tell_torchrun(text)
            _print(f"error: rank {self.rank} leaves: {text}")
            self._leave(HANG_EXIT_CODE)

    @property
    def limit_s(self) -> float:
        """Seconds without progress before this rank asks the others: hang_timeout or half of
        ddp_timeout, whichever is less. Before the end of the first step and in long phases, half of
        ddp_timeout."""
        half = self.ddp_timeout / 2
        is_short = self._is_settled and self.phase not in _LONG
        return min(self.hang_timeout, half) if is_short else half

    def look(self) -> None:
        """Look at this rank and, through the ranks' shared store, at the others; called regularly.
        Answers a rank that asks what the ranks do, asks them itself if this rank makes no progress,
        and exits if all ranks must. An error from the store means that its holder has ended; look()
        is not called again then."""
        try:
            self._look()
        except RuntimeError:
            self._has_store = False

    def _look(self) -> None:
        self._looks += 1
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
        """The text under a key in the store; "" if there is none."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _answer(self) -> None:
        """If a rank has asked, through the store, what the ranks are doing, store this rank's
        answer: its phase and stack, and once per question its record of collectives."""
        question = self._read("question")
        if question:
            stack, is_waiting = stack_of(self._thread_id)
            place = f"after step {self.step}, {self.phase}"
            text = f"{place} for {self.waited:.0f} s\n{stack.rstrip()}"
            answer = dict(
                count=self.count,
                ticks=self.ticks - self._ticks_before,
                stage=self._stage(),
                is_waiting=is_waiting,
                place=place,
                text=text,
            )
            self.store.set(f"answer/{question}/{self.rank}", json.dumps(answer))
        if question and question != self._dumped:
            self._dumped = question
            self.store.set(f"record/{question}/{self.rank}", json.dumps(self._calls()))

    def _calls(self) -> dict[str, Any]:
        """The summary of this rank's collectives, as part_recorder.calls_of makes it. {} if the
        file part_recorder.py is missing; also {}, with a printed warning, if the summary cannot be
        made."""
        try:
            return self._dump(self.rank)
        except Exception as error:  # a full disk, or a new format of torch's record
            _print(f"warning: rank {self.rank} has no record of its collectives: {error!r}")
            return {}

    # -- the search for late ranks: one rank asks and prints

    def _investigate(self) -> None:
        """Find out why this rank makes no progress. A first call asks all ranks what they do, a
        later one prints their answers. Shortly before ddp_timeout all ranks are made to exit, if
        the answers show a hang. One rank at a time does so: the first to ask."""
        if self._question is None:
            question = f"{self.rank} at {self._seen}"
            if self.store.compare_set("question", "", question).decode() == question:
                self._question = question
                self._answers_due = self.waited + max(1.0, 3 * self.poll_s)
        elif self._late is None:
            if self.waited >= self._answers_due:
                self._report()
        elif self._will_leave and self.waited >= self.ddp_timeout - 2 * self.poll_s:
            late = self._late or "all ranks, none behind the others,"
            self._judge(f"{late} hung for {self.waited:.0f} s (ddp_timeout): see above")
            # exit now: the store may end with the next rank that exits
            self._obey(json.loads(self._read("verdict")))

    def _report(self) -> None:
        """Print the ranks' answers: which ranks are late, and in which phase the others wait. Store
        a summary for ranks that lose a connection."""
        ranks = range(self.size)
        names = [self._read(f"name/{rank}") or f"rank {rank}" for rank in ranks]
        texts = [self._read(f"answer/{self._question}/{rank}") for rank in ranks]
        answers = [json.loads(text) if text else SILENT for text in texts]
        records = {rank: self._read(f"record/{self._question}/{rank}") for rank in ranks}
        summaries = {rank: json.loads(text) for rank, text in records.items() if text}
        late_in_calls, calls = _recorder().differing_calls(summaries)
        late = ranks_behind(answers) or late_in_calls
        self._late = first_of([names[rank] for rank in late], _SHOWN)
        all_wait = all(answer["is_waiting"] for answer in answers)
        # in a long phase all ranks may be reading or writing files, which looks like waiting
        self._will_leave = bool(late) or all_wait and self.phase not in _LONG
        text = "\n".join([describe(late, answers, names), *calls])
        summary = "no rank was behind the others when they were asked: see above"
        if self._will_leave:
            left = max(0, self.ddp_timeout - self.waited)
            text += f"\nall ranks leave in {left:.0f} s (ddp_timeout) unless it goes on"
        if late:
            summary = f"{self._late} hung: see above"
        waited = f"rank {self.rank} has waited {self.waited:.0f} s"
        _print(f"warning: {waited} after step {self.step}, {self.phase}; {text}")
        self.store.set("report", summary)

    def _go_on(self) -> None:
        """This rank makes progress again: withdraw its question, if it asked one, and count its
        waiting from 0."""
        # keys are emptied, not deleted: a rank between check() and get() would wait forever
        if self._question is not None:
            self.store.set("report", "")
            self.store.set("question", "")
        self._question = None
        self._late = None
        self.waited = 0.0

    # -- the end of all ranks

    def _judge(self, text: str, code: int = HANG_EXIT_CODE) -> None:
        """Decide that all ranks must exit: store the reason `text` and the exit code where the
        ranks' look() finds them. If a reason is stored already, nothing changes."""
        verdict = json.dumps({"rank": self.rank, "text": text, "code": code})
        self.store.compare_set("verdict", "", verdict)

    def _obey(self, verdict: dict[str, Any]) -> None:
        """Exit as another rank or this one decided in _judge(), because a waiting rank cannot
        receive an exception. verdict: {"rank": who decided, "text": the reason, "code": the exit
        code}. If a rank failed with an error, the first calls do nothing, so that this rank has
        time to end by itself."""
        self._since_verdict += self.poll_s
        if verdict["code"] != HANG_EXIT_CODE and self._since_verdict < _LEAVE_S:
            return
        tell_torchrun(verdict["text"])
        if verdict["rank"] == self.rank:
            _print(f"error: {verdict['text']}; all ranks leave")
        self._leave(verdict["code"])

    def tell(self, error: Exception) -> RankFailed | None:
        """Handle an error that ends this rank's run. If the error is this rank's own, it is stored,
        so that the other ranks learn of it, and the result is None. If this rank has lost the
        connection to another, the result is the RankFailed to raise instead, when the store knows a
        reason or is lost itself; otherwise None."""
        failed: list[RankFailed] = []

        def ask() -> None:
            try:
                failed.extend(self._tell(error))
            except RuntimeError:  # the store has gone with its holder
                if lost_a_rank(error):
                    words = f"{self._holder}, which held the store of the ranks, is gone"
                    failed.append(RankFailed(words))
                    failed[0].same_on_all_ranks = False  # the main rank may be the lost one

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER_S)
        if thread.is_alive() and lost_a_rank(error):
            alone = RankFailed(
                "the store of the ranks does not answer: the process that holds it (rank 0, or "
                "torchrun on the first machine) is stopped or cannot be reached",
                HANG_EXIT_CODE,
            )
            alone.same_on_all_ranks = False  # the lost rank may be the main rank
            return alone
        return failed[0] if failed else None

    def _tell(self, error: Exception) -> Iterator[RankFailed]:
        """The part of tell() that uses the ranks' store; tell() limits its time. error: if it is
        this rank's own, it is stored for the other ranks. If it is a lost connection, yield the
        RankFailed to raise instead, when the store has a reason."""
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


def ranks_behind(answers: list[dict[str, Any]]) -> list[int]:
    """Indices of the late ranks by their answers; [] if no rank is behind the others. answers: one
    per rank, as Watchdog._answer() stores it, or SILENT for a rank without an answer.

    Three filters, one after another: ranks that have begun the fewest phases (-1 without an
    answer); of these, ranks that do not wait for others, if there are any; of these, ranks with
    fewer micro-batches than another late rank of their pipeline stage, if there are any."""
    progress = [(answer["count"], answer["is_waiting"]) for answer in answers]
    late = [rank for rank, own in enumerate(progress) if own == min(progress)]
    most: dict[int, int] = {}
    for rank in late:
        stage = answers[rank]["stage"]
        most[stage] = max(most.get(stage, 0), answers[rank]["ticks"])
    slowest = [rank for rank in late if answers[rank]["ticks"] < most[answers[rank]["stage"]]]
    late = slowest or late
    return late if len(late) < len(answers) else []


def describe(late: list[int], answers: list[dict[str, Any]], names: list[str]) -> str:
    """Text about late ranks: phase, host and stack of the first few, as far as they answered, then
    the phases of the other ranks. late: the indices of the late ranks; if it is empty, the first
    few of all ranks are described, then all phases. answers: one per rank, as in ranks_behind().
    names: each rank's name, with its host."""
    lines = [f"{len(late)} of {len(names)} ranks behind:"]
    for rank in (late or range(len(names)))[:_SHOWN]:
        lines.append(f"{names[rank]}: {answers[rank]['text']}")
    ranks_at: dict[str, list[str]] = {}
    for rank in set(range(len(names))).difference(late):
        ranks_at.setdefault(answers[rank]["place"], []).append(str(rank))
    lines += [f"ranks {first_of(ranks, 8)}: {place}" for place, ranks in ranks_at.items()]
    return "\n".join(lines)


def stack_of(thread_id: int) -> tuple[str, bool]:
    """(the innermost frames of a thread's Python stack, as text, innermost last; True if it may be
    waiting for other ranks)."""
    frame = sys._current_frames()[thread_id]
    return "".join(traceback.format_stack(frame)[-_FRAMES:]), may_wait(frame)


def may_wait(frame: FrameType) -> bool:
    """True if a stack's innermost frame is in torch, megatron-core or this package: such code may
    be waiting for other ranks."""
    module = frame.f_globals.get("__name__", "")
    return module.startswith(("torch.", "megatron.", f"{__package__}."))


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
