"""Watchdog: report a rank that hangs or dies, and stop the others.

Each rank notes its phases: the count of phases is the same on all ranks, and a note is a few
assignments. A thread watches the count of its rank. After hang_timeout seconds without progress it
asks all ranks, through the process group's store, for count, phase, micro-batches, Python stack and
collectives, and prints the late ranks. After ddp_timeout seconds all ranks leave. A second thread
does so alone if the store does not answer. A rank that dies of an exception leaves its message in
the store for ranks that lose their connection to it.

No collective is added; without a hang each rank reads two small keys of the store now and then.

A rank stops as at SIGTERM if its torchrun has gone: it saves and leaves. A data loader's worker
ends with its rank.
"""

import contextlib
import ctypes
import json
import os
import pickle
import re
import signal
import socket
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
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
    "ticks": 0,
    "stage": 0,
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


_RECORDS = "flight_recorder"  # a folder in output_dir
_CALLS_SHOWN = 4
_RECENT = 8  # calls of a group
_TORCH = re.compile(r"[/\\]torch[/\\]|^<")
_OF_LIBRARIES = re.compile(
    r"[/\\]megatron[/\\]core[/\\]|^" + re.escape(os.path.dirname(os.path.abspath(__file__)))
)
_EVEN = re.compile("reduce|broadcast|gather")  # with the same sizes on all ranks
_PEERS = re.compile(r"(\d+)(?:->|<-)(\d+)")


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
        store,
        parallel.rank(),
        parallel.world_size(),
        args.hang_timeout,
        args.ddp_timeout,
        dump=lambda rank: dump_calls(f"{args.output_dir}/{_RECORDS}", rank),
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
    """The notes of one rank, and its part in the search for late ranks.

    store: that of the ranks, as torch.distributed's. The stack of the thread that makes a
    Watchdog is shown. Another thread calls look() every `poll_s` seconds; all times are counted in
    such calls, so a suspended process does not wait. A third one calls mind_store() as often.

    dump: rank -> the summary of its collectives. stage: -> the pipeline stage of this rank.
    """

    def __init__(
        self,
        store,
        rank: int,
        size: int,
        hang_timeout: float,
        ddp_timeout: float,
        leave: Callable[[int], Any] = os._exit,
        dump: Callable[[int], dict] = lambda rank: {},
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
        self._ticks_before = 0  # this phase
        self._looks = 0
        self._minded = (0, 0, 0)  # looks, count and ticks when the store was minded
        self._silent_s = 0.0  # without any of them
        self._has_store = True
        self._dumped: str | None = None  # the question that has the record of this rank
        self._is_settled = False  # a step is done: kernels are compiled, groups are connected
        self._thread_id = threading.get_ident()
        self._seen = (0, 0)
        self._question: str | None = None  # put by this rank, ...
        self._answers_due = 0.0  # ... the time limit of its answers, ...
        self._late: str | None = None  # ... and the late ranks according to them
        self._will_leave = False  # at ddp_timeout, according to them
        self._since_verdict = 0.0
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=run, name="watchdog", daemon=True)
            for run in (self._run, self._run_beside)
        ]
        self._parent = os.getppid()  # torchrun, under it
        self._name = f"rank {rank} on {socket.gethostname()} (process {os.getpid()})"
        store.set(f"name/{rank}", self._name)

    def note(self, phase: str, step: int | None = None) -> None:
        """Begin a phase: see note() of this module."""
        self.phase = phase
        self.step = self.step if step is None else step
        self.count += 1
        self._ticks_before = self.ticks
        self._is_settled |= phase == BETWEEN_STEPS

    def start(self) -> None:
        self._holder = "torchrun on the first machine"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._holder = self.store.get("name/0").decode()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=1.0)  # it may wait for a lost store

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
        """Name the holder of a store without answers, and leave at ddp_timeout, while this rank
        makes no progress either."""
        now = (self._looks, self.count, self.ticks)
        if now != self._minded:
            self._minded = now
            self._silent_s = 0.0
            return
        limit_s = self.ddp_timeout
        if not self._has_store and now[1:] == self._seen:  # it waited before the store went
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
        """Seconds without progress before the ranks are searched."""
        half = self.ddp_timeout / 2
        is_short = self._is_settled and self.phase not in _LONG
        return min(self.hang_timeout, half) if is_short else half

    def look(self) -> None:
        """Answer a question, ask one if this rank makes no progress, and leave with all ranks. The
        last look finds that the store has gone with its holder."""
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
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _answer(self) -> None:
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

    def _calls(self) -> dict:
        try:
            return self._dump(self.rank)
        except Exception as error:  # a full disk, another form of torch's record
            _print(f"warning: rank {self.rank} has no record of its collectives: {error!r}")
            return {}

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
        elif self._will_leave and self.waited >= self.ddp_timeout - 2 * self.poll_s:
            late = self._late or "all ranks, none behind the others,"
            self._judge(f"{late} hung for {self.waited:.0f} s (ddp_timeout): see above")
            # now: the store may end with the next rank that leaves
            self._obey(json.loads(self._read("verdict")))

    def _report(self) -> None:
        """Print the answers of the ranks."""
        ranks = range(self.size)
        names = [self._read(f"name/{rank}") or f"rank {rank}" for rank in ranks]
        texts = [self._read(f"answer/{self._question}/{rank}") for rank in ranks]
        answers = [json.loads(text) if text else SILENT for text in texts]
        records = {rank: self._read(f"record/{self._question}/{rank}") for rank in ranks}
        summaries = {rank: json.loads(text) for rank, text in records.items() if text}
        late_in_calls, calls = differing_calls(summaries)
        late = ranks_behind(answers) or late_in_calls
        self._late = first_of([names[rank] for rank in late], _SHOWN)
        all_wait = all(answer["is_waiting"] for answer in answers)
        # files of a long phase may be read and written by all ranks, which looks alike
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
    """Ranks without an answer, else those with the fewest phases, among them those without a wait
    for others, and among them those with the fewest micro-batches of their pipeline stage; [] if no
    rank is late."""
    progress = [(answer["count"], answer["is_waiting"]) for answer in answers]
    late = [rank for rank, own in enumerate(progress) if own == min(progress)]
    most = {}
    for rank in late:
        stage = answers[rank]["stage"]
        most[stage] = max(most.get(stage, 0), answers[rank]["ticks"])
    slowest = [rank for rank in late if answers[rank]["ticks"] < most[answers[rank]["stage"]]]
    late = slowest or late
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


# -- collectives: torch keeps the last calls of nccl and gloo in a ring buffer, its flight recorder.
# A rank writes the buffer for torch's analyser (torchfrtrace), and a few kilobytes about unfinished
# calls into the store: no rank has to read the files of a thousand. gloo records no messages
# between two ranks


def dump_calls(folder: str | os.PathLike, rank: int) -> dict[str, Any]:
    """Write this rank's record to a file of the folder -> its summary (see calls_of()). OSError if
    the file cannot be written."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    def ranks_of(group: str) -> list[int]:
        return dist.get_process_group_ranks(c10d._resolve_process_group(group))

    kind = "nccl" if dist.get_backend() == "nccl" else "fr"
    record = getattr(c10d, f"_dump_{kind}_trace")()
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"rank_{rank}").write_bytes(record)
    return calls_of(pickle.loads(record), ranks_of)  # of this process


def calls_of(
    record: Mapping[str, Any], ranks_of: Callable[[str], list[int]]
) -> dict[str, dict[str, Any]]:
    """{"calls": the first unfinished call of each group, by its name, in a rank's record; "recent":
    its last collectives}. ranks_of: group name -> global ranks."""
    calls: dict[str, dict] = {}
    recent: dict[str, list[dict]] = {}
    for entry in record["entries"]:
        name = entry["process_group"][0]
        is_batch = entry["profiling_name"].endswith(":coalesced")  # it has an earlier call's number
        if not entry["is_p2p"] and not is_batch:
            ended = _call(entry, [])
            recent[name] = [*recent.get(name, [])[1 - _RECENT :], ended]
        if entry["retired"] or entry["state"] == "completed":
            calls.pop(name, None)  # torch never ends the record of a message in a batch
            continue
        call = _call(entry, ranks_of(name))
        first = calls.setdefault(name, call)
        first["has_begun"] |= call["has_begun"]  # of a batch its last entry alone
        if first["is_message"] and call["is_message"]:
            first["ranks"] = sorted({*first["ranks"], *call["ranks"]})
    return {"calls": calls, "recent": recent}


def _call(entry: Mapping[str, Any], ranks: list[int]) -> dict[str, Any]:
    backend, _, operation = entry["profiling_name"].partition(":")
    pair = _PEERS.search(operation)
    if entry["is_p2p"] and pair:
        ranks = [ranks[int(index)] for index in pair.groups()]
    callers = [f"{frame['filename']}:{frame['line']}" for frame in entry.get("frames", ())]
    place = next((caller for caller in callers if not _TORCH.search(caller)), "")
    sizes = f" of {entry['input_sizes']} {entry['input_dtypes']}"
    return {
        "number": entry["collective_seq_id"],
        "backend": backend,
        "is_message": entry["is_p2p"],
        "operation": operation + sizes,
        "form": operation + sizes * bool(_EVEN.search(operation)),
        "ranks": ranks,
        "words": entry["process_group"][1],
        "has_begun": entry["state"] == "started",
        "place": place,
        "is_users": bool(place) and not _OF_LIBRARIES.search(place),
    }


def differing_calls(summaries: Mapping[int, Mapping[str, Any]]) -> tuple[list[int], list[str]]:
    """Compare the summaries of ranks -> (late ranks, lines about calls that differ).

    Late is a rank others wait for, with no unfinished call or with one its GPU has not begun while
    other GPUs began theirs. If each such rank waits for another one, or may do so in a message of
    gloo, late are those of a call from code of the user, outside of torch, megatron-core and this
    package. Late first of all are ranks of an ended call unlike those of others.
    """
    late, lines = _unlike(summaries)
    waiting, found = _waiting(summaries)
    return sorted(late or waiting), [*lines, *found][:_CALLS_SHOWN]


def _unlike(summaries: Mapping[int, Mapping[str, Any]]) -> tuple[set[int], list[str]]:
    """(ranks of the rarer form, a line) of the first call of a group with several forms."""
    forms: dict[tuple, dict[str, list[int]]] = {}
    calls: dict[tuple, dict] = {}
    for rank, about in summaries.items():
        for group, recent in about.get("recent", {}).items():
            for call in recent:
                key = (group, call["number"])
                forms.setdefault(key, {}).setdefault(call["form"], []).append(rank)
                calls[key, rank] = call
    for key in sorted(forms):
        rarest, *others = sorted(forms[key].values(), key=len)
        if others:
            heads = {ranks[0]: ranks for ranks in (rarest, *others)}
            late = rarest
            if len(others[0]) == len(rarest):
                of_users = [rank for rank in heads if calls[key, rank]["is_users"]]
                late = heads[of_users[0]] if of_users else []
            words = [f"ranks {_shown(heads[r])}: {_in_words(calls[key, r])}" for r in heads]
            return set(late), [f"calls differ: {'; '.join(words[:_CALLS_SHOWN])}"]
    return set(), []


def _waiting(summaries: Mapping[int, Mapping[str, Any]]) -> tuple[set[int], list[str]]:
    """(late ranks, lines) of unfinished calls without some of their ranks."""
    open_calls = {rank: about.get("calls", {}) for rank, about in summaries.items()}
    some_began = any(c["has_begun"] for calls in open_calls.values() for c in calls.values())
    waits_for: dict[int, set[int]] = {}
    alone = set()
    of_gloo = False
    lines: dict[str, list[int]] = {}
    for rank, calls in open_calls.items():
        for group, call in calls.items():
            if some_began and not call["has_begun"]:  # it waits for the GPU of its rank
                continue
            others = summaries.keys() & set(call["ranks"]) - {rank}
            absent = sorted(r for r in others if not _takes_part(group, call, summaries[r]))
            if absent:
                waits_for.setdefault(rank, set()).update(absent)
                of_gloo |= call["backend"] == "gloo"
                if call["is_users"]:
                    alone.add(rank)
                without = f"; ranks without it: {_shown(absent)}"
                lines.setdefault(_in_words(call) + without, []).append(rank)
    awaited = set().union(*waits_for.values())
    late = awaited - waits_for.keys()
    is_few = 2 * len(alone) <= len(summaries)
    if not late or of_gloo and alone and is_few:
        late = alone
    if late == summaries.keys():
        late = set()
    return late, [f"ranks {_shown(ranks)}: {words}" for words, ranks in lines.items()]


def _shown(ranks: list[int]) -> str:
    return first_of([str(rank) for rank in ranks], 8)


def _takes_part(group: str, call: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """True if another rank, with this summary, has begun the call of the group, or ended it."""
    same = about.get("calls", {}).get(group)
    if call["is_message"]:
        return same is not None and same["is_message"] and same["has_begun"]
    if same is None or same["is_message"] or call["number"] < same["number"]:
        recent = about.get("recent", {}).get(group, [])
        return any(own["number"] >= call["number"] for own in recent)
    return all(same[key] == call[key] for key in ("number", "form", "has_begun"))


def _in_words(call: Mapping[str, Any]) -> str:
    place = f" at {call['place']}" * bool(call["place"])
    return f"call {call['number']} of group {call['words']}, {call['operation']}{place}"


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
