"""The log names the slowest rank and the phase in which the others wait for it."""

import json
import time

import pytest
import torch

from mca_lite import parallel, tool_page, tool_watch
from mca_lite.log import format_progress
from mca_lite.trainer_events import Phases
from tests.shared import tiny, world
from tests.shared.fixtures import saved_model
from tests.shared.layouts import PP2, TP2
from tests.shared.training import train

model_path = saved_model("llama")
SLEEP_S = 0.1  # of the first attempt
LAGS = ["lag_data_s", "lag_model_s", "lag_update_s", "lag_save_s", "lag_callbacks_s"]


def train_with_a_slow_rank(path: str, out: str, cases: dict, sleep_s: float) -> dict:
    """{name: the last line of the log} of runs in which rank `slow` sleeps in a phase, at least
    twice a step: for each sample or micro-batch, or in two callbacks or hooks."""
    import torch.distributed as dist

    from mca_lite import McaTrainer
    from mca_lite.callbacks import TrainerCallback

    def sleep(*_) -> None:
        time.sleep(sleep_s)

    answers = {}
    for name, (slow, where, keys) in cases.items():
        is_slow = dist.get_rank() == slow

        class Samples(list):
            def __getitem__(self, number):
                if is_slow and where == "data":  # noqa: B023 - used at once
                    sleep()
                return super().__getitem__(number)

        class Slow(McaTrainer):
            def _pre_compute_loss(self, batch, inputs):
                if is_slow and where == "forward":  # noqa: B023
                    sleep()
                return super()._pre_compute_loss(batch, inputs)

            def _post_compute_loss(self, labels, losses):
                if is_slow and where == "backward":  # noqa: B023
                    losses.register_hook(sleep)
                return super()._post_compute_loss(labels, losses)

            def create_optimizer(self):
                optimizer = super().create_optimizer()
                inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
                if is_slow and where == "update":  # noqa: B023
                    for _ in range(2):
                        getattr(inner, "optimizer", inner).register_step_pre_hook(sleep)
                return optimizer

        class Callback(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if is_slow and where == "callbacks":  # noqa: B023
                    sleep()

        trainers = []

        class Kept(Slow):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                trainers.append(self)  # noqa: B023
                self.train_dataset = Samples(tiny.samples(16))

        train(
            path, f"{out}/{name}", trainer_class=Kept, callbacks=[Callback(), Callback()],
            **{"steps": 2, "count": 16, "logging_steps": 2, **keys},
        )  # fmt: skip
        answers[name] = trainers[0].state.log_history[-1]
        world.leave_layout()
    return answers


# the line of steps 3 and 4: DDP joins its buckets anew in the second forward pass, where the other
# rank waits for the slow one, in the phase that is counted
TORCH = dict(backend="torch", steps=4)
CASES = {
    "data": (1, "data", {}),
    "data of rank 0": (0, "data", {}),
    "forward": (1, "forward", {}),
    "backward": (0, "backward", {}),
    "update": (1, "update", {}),
    "callbacks": (0, "callbacks", {}),
    "overlap": (1, "backward", dict(use_distributed_optimizer=True, overlap_grad_reduce=True)),
    "pp2 data": (1, "data", PP2),
    "pp2 forward": (0, "forward", PP2),
    "pp2 backward": (1, "backward", PP2),
    "tp2 data": (1, "data", TP2),
    "torch data": (0, "data", TORCH),
    "torch forward": (0, "forward", TORCH),
    "torch backward": (1, "backward", TORCH),
    "torch update": (1, "update", TORCH),
}


@pytest.fixture(scope="module")
def lines(model_path, tmp_path_factory):
    """A function: seconds of a sleep, names of cases -> {name: the last line of its log}."""

    def of(sleep_s: float, *names: str) -> dict:
        out = str(tmp_path_factory.mktemp("slow"))
        cases = {name: CASES[name] for name in names}
        words = model_path, out, cases, sleep_s
        return world.run(train_with_a_slow_rank, 2, *words, timeout_s=300)[0]

    return of


@pytest.fixture(scope="module")
def first_lines(lines) -> dict:
    return lines(SLEEP_S, *CASES)


def wrong_fields(name: str, line: dict, sleep_s: float) -> dict:
    """Those of the line that a case with a slow rank should not have."""
    slow, where, _ = CASES[name]
    phase = {"forward": "model", "backward": "model"}.get(where, where)
    lags = {key: line[key] for key in LAGS}
    longest = max(lags, key=lags.get)
    is_right = {
        "slowest_rank": line["slowest_rank"] == slow,
        longest: longest == f"lag_{phase}_s" and lags[longest] > 1.5 * sleep_s,
        "reduction_s": line["reduction_s"] < sleep_s,  # the slow rank waits for nobody
    }
    return {key: line[key] for key, is_so in is_right.items() if not is_so}


@pytest.mark.parametrize("name", CASES)
def test_the_slowest_rank_is_named_with_its_phase(name, lines, first_lines):
    """A busy machine holds the other rank up as long now and then: then both try again, with a
    longer sleep."""
    found = wrong_fields(name, first_lines[name], SLEEP_S)
    for sleep_s in (2 * SLEEP_S, 4 * SLEEP_S, 8 * SLEEP_S):
        found = found and wrong_fields(name, lines(sleep_s, name)[name], sleep_s)
    assert not found


class Rank(Phases):
    """The phases of a rank that has taken these seconds."""

    def __init__(self, waits_in_model: bool = False, **seconds: float):
        super().__init__(waits_in_model)
        self.steps = 2
        self.seconds = seconds

    def numbers(self) -> list[int]:
        for name, phase in self.of.items():
            phase.seconds = lambda name=name: self.seconds.get(name, 0.0)
        return super().numbers()


def compared(monkeypatch, *ranks: Rank, step_time_s: float = 0.0) -> dict:
    """The fields of the log of these ranks."""
    numbers = []
    for number, rank in enumerate(ranks):
        monkeypatch.setattr(parallel, "rank", lambda number=number: number)
        numbers.append(rank.numbers())
    monkeypatch.setattr(parallel, "world_size", lambda: len(ranks))
    ranks[0].compare([max(of_ranks) for of_ranks in zip(*numbers, strict=True)])
    return {key: value for key, value in ranks[0].take(step_time_s).items() if value}


def test_seconds_behind_the_fastest_are_of_a_step_and_ranks_above_a_thousand_are_kept(monkeypatch):
    ranks = [Rank(data=0.5, model=90000.0) for _ in range(1100)]
    ranks[1099] = Rank(data=0.75, model=90003.0)
    ranks[7] = Rank(data=2.5, model=90000.0)
    line = compared(monkeypatch, *ranks)
    assert line == {"slowest_rank": 1099, "lag_data_s": 1.0, "lag_model_s": 1.5}


def test_a_wait_for_late_data_within_a_layer_is_no_slow_pass(monkeypatch):
    """Rank 1 reads for 2 s; within the first layer rank 0 waits for it."""
    early, late = dict(data=0.5, model=3.0), dict(data=2.5, model=1.0)
    line = compared(monkeypatch, Rank(True, **early), Rank(True, **late))
    assert line == {"slowest_rank": 1, "lag_data_s": 1.0}
    # two more ranks, another replica, whose passes take 4 s longer
    ranks = [Rank(True, **x) for x in (early, late, dict(data=0.5, model=7.0))]
    line = compared(monkeypatch, *ranks)
    assert line == {"slowest_rank": 2, "lag_data_s": 1.0, "lag_model_s": 1.0}


def test_the_time_of_a_reduction_is_that_of_the_rank_that_waits_least(monkeypatch):
    ranks = Rank(reduction=0.5), Rank(reduction=0.3)
    assert compared(monkeypatch, *ranks) == {"slowest_rank": 1, "reduction_s": 0.15}


class Event:
    """A GPU's event: it takes place when `now` reaches it."""

    now = 0.0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now + 2.0  # the queue is two seconds long

    def query(self) -> bool:
        return self.at <= Event.now

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "this would wait"
        return 1000 * (end.at - self.at)


def test_a_gpus_work_is_read_once_it_is_done_and_never_waited_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(parallel, "device", lambda: torch.device("cuda"))
    phase = Phases(waits_in_model=False).timer("forward-compute", log_level=2)
    for seconds in (0.25, 0.5):
        phase.start()
        Event.now += seconds
        phase.stop()
    assert phase.seconds() == 0.0
    Event.now = 2.5  # the first ended at 2.25, the second ends at 2.75
    assert phase.seconds() == 0.25
    Event.now = 3.0
    assert phase.seconds() == 0.75
    phase.reset()
    assert phase.seconds() == 0.0


def test_watch_and_the_page_show_who_is_slow_most_often_and_each_phase(tmp_path):
    lines = [
        {"step": step, "slowest_rank": rank, "lag_data_s": lag, "lag_model_s": 0.01}
        for step, rank, lag in ((1, 3, 0.5), (2, 0, 0.002), (3, 3, 0.7))
    ]
    (tmp_path / "trainer_log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    run = tool_page.RunFolder(tmp_path)
    shown = {row.split()[0]: row.split() for row in tool_watch.frame([run], 80)[1:] if row}
    assert tool_page.figures(run)["slowest rank"] == "3"
    assert tool_page.figures(run)["in data"] == "+0.50 s"
    assert {"slowest", "in"} <= shown.keys()
    drawn = tool_page.page([run])
    assert drawn.count("Seconds a step by which the slowest rank is behind the fastest") == 1
    for key in ("lag_data_s", "lag_model_s"):
        assert f"{key} <b>" in drawn


def test_one_rank_is_compared_with_nobody(monkeypatch):
    assert compared(monkeypatch, Rank(data=1.0)) == {}


def test_a_rank_behind_by_less_than_two_percent_of_a_step_is_not_named(monkeypatch):
    """As a healthy run has it in nearly each step: 0.01 s of 0.51."""
    for step_time_s, named in ((0.51, False), (0.49, True)):
        ranks = Rank(data=1.0), Rank(data=1.02)  # over two steps
        line = compared(monkeypatch, *ranks, step_time_s=step_time_s)
        assert ("slowest_rank" in line) == named and line["lag_data_s"] == pytest.approx(0.01)
        shown = format_progress({"step": 1, **line}, max_steps=4)
        assert shown == "step 1/4" + "  slowest rank 1  in data +0.01 s" * named


def test_the_progress_line_leaves_out_what_costs_no_hundredth_of_a_second():
    line = format_progress(
        {"step": 1, "slowest_rank": 0, "lag_data_s": 0.0049, "lag_model_s": 0.052}, max_steps=4
    )
    assert line == "step 1/4  slowest rank 0  in model +0.05 s"
