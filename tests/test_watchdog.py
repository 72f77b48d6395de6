"""A rank that hangs or dies is named, and all leave: in plain objects with a clock of their own,
and in small worlds.
"""

import datetime
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mca_lite import watchdog
from mca_lite.watchdog import BETWEEN_STEPS, HANG_EXIT_CODE, RankFailed, Watchdog
from tests.shared import tiny, world
from tests.shared.fixtures import saved_model
from tests.shared.layouts import PP2, TP2
from tests.shared.records import record

# -- in this process: several ranks, one store, one clock


class Ranks:
    """Watchdogs of one world; those in `stopped` never look."""

    def __init__(
        self, size: int = 3, hang_timeout: float = 10, ddp_timeout: float = 60, stages=(), **keys
    ):
        from torch.distributed import HashStore

        self.codes, store = {}, HashStore()
        self.stopped: set[int] = set()
        self.all = [
            Watchdog(
                store,
                rank,
                size,
                hang_timeout,
                ddp_timeout,
                lambda code, rank=rank: self.codes.setdefault(rank, code),
                stage=lambda rank=rank: dict(enumerate(stages)).get(rank, 0),
                **keys,
            )
            for rank in range(size)
        ]

    def note(self, phase: str, step: int, but: int | None = None) -> None:
        for number, rank in enumerate(self.all):
            if number != but:
                rank.note(phase, step)

    def settle(self) -> None:
        """The first step is over."""
        self.note(BETWEEN_STEPS, 1)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            for number, rank in enumerate(self.all):
                if number not in self.stopped and number not in self.codes:
                    rank.look()


def test_the_rank_that_has_noted_less_is_named_and_all_leave_at_ddp_timeout(capsys):
    ranks = Ranks()
    ranks.settle()
    ranks.note("reading data", 1)
    ranks.note("running the model", 1, but=2)
    ranks.wait(9)
    assert not capsys.readouterr().err
    ranks.wait(5)
    said = capsys.readouterr().err
    assert said.count("warning: ") == 1 and "1 of 3 ranks behind" in said
    assert f"rank 2 on {os.uname().nodename} (process {os.getpid()}): after step 1, reading" in said
    assert "in test_the_rank_that_has_noted_less" in said, "the stack of its thread"
    assert "ranks 0, 1: after step 1, running the model" in said
    ranks.wait(40)
    assert not ranks.codes and not capsys.readouterr().err
    ranks.wait(60 - 54)
    assert ranks.codes == dict.fromkeys(range(3), HANG_EXIT_CODE)
    said = capsys.readouterr().err
    assert said.startswith("error: rank 2 on ") and said.count("\n") == 1


def test_a_rank_that_does_not_answer_is_named_though_it_has_noted_as_much(capsys):
    ranks = Ranks()
    ranks.settle()
    ranks.stopped = {1}
    ranks.wait(16)
    said = capsys.readouterr().err
    assert "rank 1 on" in said and "does not answer: its process is stopped or gone" in said
    ranks.wait(44)
    assert ranks.codes == {0: HANG_EXIT_CODE, 2: HANG_EXIT_CODE}


def test_ranks_that_all_wait_with_none_behind_leave_at_ddp_timeout(capsys):
    ranks = Ranks()
    ranks.settle()
    ranks.wait(50)
    said = capsys.readouterr().err
    assert said.count("warning: ") == 1 and "0 of 3 ranks behind" in said and not ranks.codes
    ranks.wait(12)
    assert ranks.codes == dict.fromkeys(range(3), HANG_EXIT_CODE)
    assert "error: all ranks, none behind the others, hung for 58 s" in capsys.readouterr().err


def test_ranks_that_all_save_are_left_alone(capsys):
    """Files may take longer than ddp_timeout."""
    ranks = Ranks()
    ranks.settle()
    ranks.note(watchdog.SAVING, 1)
    ranks.wait(200)
    assert "0 of 3 ranks behind" in capsys.readouterr().err and not ranks.codes


def test_ranks_that_all_work_are_told_of_and_left_alone(capsys, monkeypatch):
    """A callback of every rank may take longer than ddp_timeout."""
    monkeypatch.setattr(watchdog, "may_wait", lambda frame: False)
    ranks = Ranks()
    ranks.settle()
    ranks.wait(200)
    said = capsys.readouterr().err
    assert said.count("warning: ") == 1 and "0 of 3 ranks behind" in said and not ranks.codes


def test_a_rank_with_fewer_micro_batches_than_others_of_its_stage_is_named(capsys):
    """As one whose GPU never ends a kernel: its host waits in torch, as the hosts of others do."""
    ranks = Ranks(size=4, stages=[0, 0, 1, 1])
    ranks.settle()
    ranks.note("running the model", 1)
    for rank, ticks in zip(ranks.all, (4, 3, 2, 2), strict=True):
        rank.ticks += ticks
    ranks.wait(15)
    said = capsys.readouterr().err
    assert "1 of 4 ranks behind" in said and "\nrank 1 on" in said
    ranks.wait(50)
    assert ranks.codes == dict.fromkeys(range(4), HANG_EXIT_CODE)


def test_the_rank_of_a_collective_alone_is_named_by_the_flight_recorder(capsys):
    records = {
        0: record(("dp", 5, "all_reduce", 8, "lib.py")),
        1: record(("world", 9, "all_reduce", 3, "users.py")),
    }
    ranks = Ranks(size=2, dump=records.__getitem__)
    ranks.settle()
    ranks.wait(15)
    said = capsys.readouterr().err
    assert "1 of 2 ranks behind" in said and "\nrank 1 on" in said
    assert "ranks 1: call 9 of group world, all_reduce" in said and "users.py:7" in said


def test_a_store_of_a_stopped_process_is_named_and_the_rank_leaves(capsys):
    [rank] = Ranks(1).all
    rank.start()
    rank.stop()
    rank.note(BETWEEN_STEPS, 3)
    for _ in range(10):
        rank.mind_store()
    assert not capsys.readouterr().err
    rank.mind_store()
    said = capsys.readouterr().err
    assert "rank 0 waits after step 3, between steps; the store of the ranks has not" in said
    assert f"its holder, rank 0 on {os.uname().nodename} (process {os.getpid()})" in said
    rank.note("reading data")  # it goes on without the store
    for _ in range(60):
        rank.mind_store()
    assert "has not answered for 10 s" in capsys.readouterr().err
    rank.mind_store()
    assert "error: rank 0 leaves: the store of the ranks" in capsys.readouterr().err


class NoStore:
    """A store of a process that has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")


def test_a_rank_that_has_waited_leaves_soon_after_the_holder_of_the_store():
    ranks = Ranks(1)
    [rank] = ranks.all
    rank.start()
    rank.stop()
    ranks.settle()
    ranks.wait(55)
    rank.store = NoStore()
    ranks.wait(1)
    for _ in range(5):
        rank.mind_store()
    assert not ranks.codes
    rank.mind_store()
    assert ranks.codes == {0: watchdog.HANG_EXIT_CODE}


class GoesOnBetween:
    """A store for one rank: just after it has seen the question, the rank that asked goes on."""

    def __init__(self, store, asker: Watchdog):
        self.store, self.asker = store, asker

    def __getattr__(self, name: str):
        return getattr(self.store, name)

    def check(self, keys: list[str]) -> bool:
        found = self.store.check(keys)
        if found and keys == ["question"] and self.store.get("question"):
            self.asker.note("running the model", 2)
            self.asker.look()
        return found


def test_a_question_that_is_taken_back_while_it_is_read_stops_no_rank():
    ranks = Ranks(size=2)
    ranks.settle()
    asker, reader = ranks.all
    reader.store.set_timeout(datetime.timedelta(seconds=1))
    reader.store = GoesOnBetween(reader.store, asker)
    asker.look()
    asker.waited = 60.0
    asker.look()
    assert asker.store.get("question")
    reader.look()  # get() of a key that is gone waits, and raises
    assert not asker.store.get("question")


def test_the_next_wait_of_a_rank_that_goes_on_is_a_new_one(capsys):
    ranks = Ranks()
    ranks.settle()
    ranks.note("reading data", 1, but=0)
    ranks.wait(20)
    ranks.note("reading data", 1)
    ranks.wait(5)
    capsys.readouterr()
    ranks.note("running the model", 1, but=1)
    ranks.wait(20)
    assert "rank 1 on" in capsys.readouterr().err


@pytest.mark.parametrize("phase", [watchdog.STARTING, watchdog.SAVING, watchdog.ENDING])
def test_long_phases_and_the_first_step_are_told_of_at_half_of_ddp_timeout(capsys, phase):
    ranks = Ranks()
    if phase != watchdog.STARTING:
        ranks.note(BETWEEN_STEPS, 1, but=1)
        ranks.all[1].note("reading data", 1)
    ranks.note(phase, 1, but=1)
    ranks.all[1].note("running the model", 1)  # its first step: it compiles
    ranks.wait(29)
    assert not capsys.readouterr().err
    ranks.wait(8)
    assert "warning: " in capsys.readouterr().err


def test_micro_batches_are_progress_and_a_suspended_process_has_not_waited(capsys):
    ranks = Ranks()
    ranks.settle()
    for _ in range(10):
        ranks.wait(8)
        for rank in ranks.all:
            rank.ticks += 1
    ranks.wait(7)  # Ctrl-Z, fg: a suspended process does not look
    assert not capsys.readouterr().err and not ranks.codes


def test_ranks_of_which_one_died_leave_after_a_while_with_its_words(capsys):
    ranks = Ranks()
    ranks.settle()
    assert ranks.all[1].tell(KeyError("lora")) is None
    assert ranks.all[2].tell(ValueError("later")) is None  # the first word stands
    ranks.stopped = {1, 2}
    lost = ranks.all[0].tell(RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]"))
    assert isinstance(lost, RankFailed) and re.fullmatch(
        r"rank 1 on \S+ \(process \d+\) failed: KeyError: 'lora'", str(lost)
    )
    ranks.wait(9)
    assert not ranks.codes
    ranks.wait(5)
    assert ranks.codes == {0: 1}


def test_a_rank_that_lost_one_that_said_nothing_keeps_its_error():
    ranks = Ranks()
    assert ranks.all[0].tell(RuntimeError("Connection reset by peer")) is None
    assert not ranks.all[1].store.check(["verdict"])


class SlowStore:
    """A store that is stopped: each of its answers takes a second."""

    def check(self, keys: list[str]) -> bool:
        time.sleep(1)
        return False


def test_a_store_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.2)
    [rank] = Ranks(1).all
    rank.store = SlowStore()
    lost = rank.tell(RuntimeError("Timed out waiting 8000ms for recv operation to complete"))
    assert "the store of the ranks does not answer" in str(lost)
    assert not lost.same_on_all_ranks, "rank 0, which speaks for all, may be the lost one"


def answer(count: int, is_waiting: bool, ticks: int = 0, stage: int = 0) -> dict:
    return {"count": count, "is_waiting": is_waiting, "ticks": ticks, "stage": stage}


@pytest.mark.parametrize(
    "answers, behind",
    [
        ([answer(5, True), answer(4, True), answer(5, False)], [1]),
        ([answer(4, True), answer(4, False), answer(5, True)], [1]),  # 0 waits for 1
        ([answer(5, True), answer(5, True), answer(5, False)], [2]),
        ([answer(5, True), answer(5, True), answer(5, True)], []),
        ([answer(5, False), answer(5, False), answer(5, False)], []),
        ([answer(5, True), watchdog.SILENT, answer(4, False)], [1]),
        ([answer(5, True, 2), answer(5, True, 1), answer(5, True, 2)], [1]),
        ([answer(5, True, 2), answer(5, True, 1, stage=1)], []),  # of a pipeline
        ([answer(5, True, 2), answer(5, True, 1, 1), answer(5, True, 0, 1)], [2]),
    ],
)
def test_who_is_behind(answers, behind):
    assert watchdog.ranks_behind(answers) == behind


def test_a_thread_waits_where_its_innermost_call_is_torchs_or_ours():
    from mca_lite import parallel

    def is_waiting(function) -> bool:
        ready, end = threading.Event(), threading.Event()

        def stay(*_):
            ready.set()
            end.wait()
            return 0

        thread = threading.Thread(target=function, args=(stay,))
        thread.start()
        ready.wait()
        stack, waits = watchdog.stack_of(thread.ident)
        assert "in stay" in stack
        end.set()
        thread.join()
        return waits

    assert not is_waiting(lambda stay: stay())
    frame = sys._getframe()
    assert not watchdog.may_wait(frame)
    for module in ("torch.distributed.x", "megatron.core.x", parallel.__name__):
        inner = eval("__import__('sys')._getframe()", {"__name__": module})
        assert watchdog.may_wait(inner)


def test_without_a_world_nothing_is_watched_and_a_note_costs_nothing_to_speak_of(tmp_path):
    from mca_lite import TrainingArguments

    with watchdog.watch(TrainingArguments(output_dir=str(tmp_path))):
        assert "watchdog" not in {thread.name for thread in threading.enumerate()}
    [rank] = Ranks(1).all
    started = time.thread_time()
    for _ in range(10_000):
        rank.note("running the model", 1)
    assert time.thread_time() - started < 10_000 * 5e-6  # it takes half a microsecond


# -- small worlds


def groups_wait(out: str) -> list[float]:
    import torch
    from megatron.core import parallel_state as mpu

    from mca_lite import TrainingArguments, parallel

    parallel.initialize(TrainingArguments(output_dir=out, ddp_timeout=89))
    groups = [mpu.get_data_parallel_group(), mpu.get_tensor_model_parallel_group()]
    cpu = torch.device("cpu")
    return [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]


def test_megatrons_groups_wait_for_seconds_not_for_rounded_minutes(tmp_path):
    assert world.run(groups_wait, 1, str(tmp_path)) == [[89.0, 89.0]]


LEAVE_S = 8
# The groups' own timeout is ddp_timeout too, and the watchdog only just before it: on a loaded
# machine either may be first. Here one of them is far ahead.
TIMES = dict(hang_timeout=2, ddp_timeout=60)
GROUPS_FIRST = dict(ddp_timeout=10, leave_s=60)


class Watched(Watchdog):
    """A watchdog whose ddp_timeout is `leave_s` once a step is done."""

    leave_s: float

    def __init__(self, store, rank, size, hang_timeout, ddp_timeout, **keys):
        super().__init__(store, rank, size, hang_timeout, 60, **keys)

    def note(self, phase: str, step: int | None = None) -> None:
        super().note(phase, step)
        if phase == BETWEEN_STEPS:
            self.ddp_timeout = self.leave_s


def meet_at_rank_0() -> None:
    """Put the store into rank 0, as srun without torchrun does."""
    import torch.distributed as dist

    rank = dist.get_rank()
    store = None
    port = [0]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def hang(path: str, out: str, backend: str, how: str, leave_s: float = LEAVE_S, **keys) -> None:
    """A run of which a rank sleeps, stops or dies after two steps; what ranks say is in files."""
    import torch

    from mca_lite import AutoModel, McaTrainer, TrainingArguments
    from mca_lite.cli import end
    from mca_lite.model import load_torch_model

    Watched.leave_s, watchdog.Watchdog = leave_s, Watched
    rank = os.environ["RANK"]
    sys.stderr = open(f"{out}/said-{rank}", "w")  # noqa: SIM115 - until the process is gone
    victim = "1"
    if how == "stops with the store":
        victim = "0"
        meet_at_rank_0()
    # of a module of torch: as a host that waits for a kernel without end
    stay = eval("lambda time: time.sleep(600)", {"__name__": "torch.cuda"})

    def is_time(trainer) -> bool:
        return rank == victim and trainer.state.global_step == 2 and trainer.models[0].training

    class Samples(list):
        def __getitem__(self, number):
            if is_time(trainer) and how == "sleeps":
                time.sleep(600)
            if is_time(trainer) and how.startswith("stops"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if is_time(trainer) and how == "dies":
                raise KeyError("what rank 1 died of")
            return super().__getitem__(number)

    class Trainer(McaTrainer):
        def _pre_compute_loss(self, batch, inputs):
            if is_time(self) and how == "sleeps in the forward pass":
                time.sleep(600)
            if is_time(self) and how == "waits for its GPU":
                stay(Clock)
            if is_time(self) and how == "calls alone":
                torch.distributed.all_reduce(torch.zeros(3))
            return super()._pre_compute_loss(batch, inputs)

        def _post_compute_loss(self, labels, losses):
            if is_time(self) and how == "sleeps in the backward pass":
                losses.register_hook(lambda gradient: time.sleep(600))
            return super()._post_compute_loss(labels, losses)

    args = TrainingArguments(
        output_dir=f"{out}/run", max_steps=4, global_batch_size=8, save_strategy="no",
        per_device_train_batch_size=2, disable_tqdm=True, **{**TIMES, **keys},
    )  # fmt: skip
    load = load_torch_model if backend == "torch" else lambda p: AutoModel.from_pretrained(p, args)
    try:
        trainer = Trainer(load(path), args, train_dataset=Samples(tiny.samples()))
        trainer.train()
    except Exception as error:
        os._exit(end(error, out))


class Clock:
    """time, of which a sleep is no frame of this file."""

    sleep = staticmethod(time.sleep)


model_path = saved_model("llama")


def said_by(tmp_path, rank: int) -> str:
    return (tmp_path / f"said-{rank}").read_text()


HANGING = {
    "megatron": ("megatron", "sleeps", {}),
    "torch": ("torch", "sleeps", {}),
    "tp2": ("megatron", "sleeps", TP2),
    "pp2, forward": ("megatron", "sleeps in the forward pass", PP2),
    "torch, forward": ("torch", "sleeps in the forward pass", {}),
    "tp2, backward": ("megatron", "sleeps in the backward pass", TP2),
}
HANGS = {
    **HANGING,
    "stopped": ("megatron", "stops", {}),
    "groups first": ("megatron", "sleeps", {**TP2, **GROUPS_FIRST}),
    "kernel": ("megatron", "waits for its GPU", {}),
    "alone": ("megatron", "calls alone", {}),
    "alone, pp2": ("megatron", "calls alone", PP2),
    "stopped with the store": ("megatron", "stops with the store", {}),
}


@pytest.fixture(scope="module")
def ended(request, model_path, tmp_path_factory):
    """{name of HANGS: (exit codes, what each rank said)} of those that this session asks for, five
    at a time: their ranks do nothing but wait."""
    specs = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    asked = sorted({spec.params["hang"] for spec in specs if "hang" in spec.params})

    def one(name: str):
        out = tmp_path_factory.mktemp("hang")
        backend, how, keys = HANGS[name]
        left = {"stops": [0], "stops with the store": [1]}
        more = dict(keys, wait_for=left.get(how))
        codes, _ = world.exits(hang, 2, model_path, str(out), backend, how, **more)
        return codes, [said_by(out, rank) for rank in range(2)]

    with ThreadPoolExecutor(5) as pool:
        return dict(zip(asked, pool.map(one, asked), strict=True))


def named_with_its_stack(hang: str, ended: dict) -> str:
    """The words of the ranks, after rank 1 was named and all left."""
    codes, said = ended[hang]
    assert codes == [HANG_EXIT_CODE] * 2
    said = "".join(said)
    phase = "reading data" if HANGS[hang][1] == "sleeps" else "running the model"
    assert re.search(rf"rank 1 on \S+ \(process \d+\): after step 2, {phase} for \d+ s", said), said
    assert "1 of 2 ranks behind" in said and "time.sleep(600)" in said
    assert "Traceback" not in said
    return said


# at tp2 in the backward pass too, and the torch backend's phases are those of megatron's
@pytest.mark.parametrize(
    "hang",
    [
        pytest.param(name, marks=pytest.mark.full if name in ("tp2", "torch, forward") else ())
        for name in HANGING
    ],
)
def test_a_rank_that_hangs_is_named_with_its_stack_and_all_leave(hang, ended):
    said = named_with_its_stack(hang, ended)
    words = r"error: rank 1 on \S+ \(process \d+\) hung for (\d+) s .*all ranks leave"
    assert LEAVE_S - 1 <= int(re.search(words, said)[1]) < TIMES["ddp_timeout"], said


@pytest.mark.parametrize("hang", ["groups first"])
def test_it_is_named_too_where_the_ranks_that_wait_for_it_give_up_first(hang, ended):
    said = named_with_its_stack(hang, ended)
    assert re.search(r"error: (rank 0: )?rank 1 on \S+ \(process \d+\) hung: see above", said), said


@pytest.mark.parametrize("hang", ["stopped"])
def test_a_rank_that_is_stopped_is_named_without_a_stack(hang, ended):
    codes, (said, _) = ended[hang]
    assert codes[0] == HANG_EXIT_CODE and "rank 1 on" in said
    assert "does not answer: its process is stopped or gone" in said and "Traceback" not in said


@pytest.mark.parametrize("hang", ["kernel", "alone", "alone, pp2"])
def test_a_rank_that_waits_in_torch_as_others_do_is_named_and_all_leave(hang, ended):
    codes, said = ended[hang]
    assert codes == [HANG_EXIT_CODE] * 2, said
    said = "".join(said)
    assert "1 of 2 ranks behind" in said
    assert re.search(r"\nrank 1 on \S+ \(process \d+\): after step 2, running the model", said), (
        said
    )
    if hang != "kernel":
        call = r"ranks 1: call \d+ of group default_pg, all_reduce of \[\[3\]\]"
        assert re.search(
            rf"{call} \['Float'\] at {re.escape(__file__)}:\d+; ranks without it: 0", said
        )


@pytest.mark.parametrize("hang", ["stopped with the store"])
def test_a_stopped_rank_with_the_store_is_named_and_the_others_leave(hang, ended):
    codes, (_, said) = ended[hang]
    assert codes[1] == HANG_EXIT_CODE
    words = "the store of the ranks has not answered for . s; its holder, rank 0 on"
    assert re.search(rf"warning: rank 1 waits after step 2, .*; {words}", said), said
    assert "error: rank 1 leaves" in said and "Traceback" not in said


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_a_rank_that_dies_of_an_exception_has_the_last_word(model_path, tmp_path, backend):
    codes, _ = world.exits(hang, 2, model_path, str(tmp_path), backend, "dies")
    first, last = said_by(tmp_path, 1), said_by(tmp_path, 0)
    assert codes == [1, 1] and first.startswith("error: rank 1: in your __getitem__ (")
    assert f"{__file__}:" in first and "): KeyError: 'what rank 1 died of'" in first
    assert re.fullmatch(
        r"error: rank 0: rank 1 on \S+ \(process \d+\) failed: KeyError: 'what rank 1 died of'\n",
        last,
    )
    assert not (tmp_path / "traceback-rank0.txt").exists()
    assert "what rank 1 died of" in (tmp_path / "traceback-rank1.txt").read_text()


# -- a rank and its processes


def test_a_rank_whose_torchrun_has_gone_stops_as_at_sigterm(monkeypatch, capsys):
    signals = []
    monkeypatch.setattr(os, "kill", lambda *sent: signals.append(sent))
    rank = Ranks().all[0]
    rank.poll_s = 0.01
    monkeypatch.setattr(os, "getppid", lambda: 1)
    rank.start()
    time.sleep(0.1)
    assert not signals, "no torchrun started it"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for _ in range(2000):
        if signals:
            break
        time.sleep(0.01)
    rank.stop()
    assert signals == [(os.getpid(), signal.SIGTERM)]
    assert "torchrun (" in capsys.readouterr().err


def collate_for_ever(samples):
    with open(samples[0], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def leave_with_a_busy_worker(path: str) -> None:
    from mca_lite.data_batches import BatchPlan, make_loader

    plan = BatchPlan(1, 1, 1, dp_rank=0, dp_size=1, seed=0)
    batches = make_loader([path], collate_for_ever, plan, num_workers=1)
    threading.Thread(target=lambda: next(iter(batches)), daemon=True).start()
    while not (os.path.exists(path) and open(path).read()):  # noqa: SIM115
        time.sleep(0.02)
    os._exit(HANG_EXIT_CODE)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends it")
def test_a_worker_of_the_data_loader_ends_with_its_rank(tmp_path):
    codes, _ = world.exits(leave_with_a_busy_worker, 1, str(tmp_path / "pid"))
    assert codes == [HANG_EXIT_CODE]
    worker = int((tmp_path / "pid").read_text())
    for _ in range(400):
        if not os.path.exists(f"/proc/{worker}"):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {worker} is still there")
