"""The worlds that tests run in: a rank that fails or hangs fails its test by name, and the next
test is not touched.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.shared import world
from tests.shared.commands import ROOT


def fail_on_rank_1():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError("lost")
    dist.barrier()


def hang_on_rank_1():
    import torch.distributed as dist

    time.sleep(600 if dist.get_rank() == 1 else 0)


def die_on_rank_1():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(30)


def test_a_failing_rank_fails_the_test_with_its_traceback():
    with pytest.raises(AssertionError, match="(?s)rank 1 failed.*KeyError: 'lost'"):
        world.run(fail_on_rank_1, 2)


def test_a_hanging_rank_is_named_and_ended():
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[1\] still run"):
        world.run(hang_on_rank_1, 2, timeout_s=8)
    assert time.monotonic() - started < 60


def test_a_dead_rank_is_named():
    with pytest.raises(RuntimeError, match=r"ranks \[1\] died without an answer, exit codes \[7\]"):
        world.run(die_on_rank_1, 2)


def start_and_stop(tp: int) -> dict:
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    from mca_lite import TrainingArguments, parallel

    args = TrainingArguments(output_dir="unused", tensor_model_parallel_size=tp)
    parallel.initialize(args)
    parallel.initialize(args)  # the same layout again changes nothing
    running = dict(tp=mpu.get_tensor_model_parallel_world_size(), threads=threading.active_count())
    running["twins"] = [n for n, value in vars(mpu).items() if n.endswith("_GLOO") and value]
    try:
        args.tensor_model_parallel_size = 1
        parallel.initialize(args)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    parallel.shutdown()
    return dict(
        running,
        refused=refused,
        left=dist.is_initialized(),
        mpu=mpu.model_parallel_is_initialized(),
    )


def test_a_world_starts_once_and_stops_clean():
    for answer in world.run(start_and_stop, 2, 2):
        assert answer["tp"] == 2
        assert answer["twins"] == []  # of gloo, beside the groups that train
        assert "shutdown()" in answer["refused"]
        assert answer["left"] is False and answer["mpu"] is False


@pytest.mark.parametrize("host, named", [("127.0.0.1", "timed out"), ("no.invalid", "no.invalid")])
def test_ranks_wait_for_a_rank_0_that_never_comes_no_longer_than_ddp_timeout(
    monkeypatch, host, named
):
    from mca_lite import parallel

    names = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR=host, MASTER_PORT="28311")
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"(?s)rank 1 of 2 could not meet .*{named}"):
        parallel.start_process_group(timeout_s=8)
    assert time.monotonic() - start < 15, "torch itself would try for 8 s twice"


def test_ranks_wait_an_hour_for_each_other_where_ddp_timeout_is_years(monkeypatch):
    from datetime import timedelta

    from mca_lite import parallel

    asked = []

    def meet(*words, timeout: timedelta, **options):
        asked.append(timeout)
        raise ValueError("enough")

    monkeypatch.setattr("torch.distributed.TCPStore", meet)
    names = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="28312")
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    for rank, seconds in (("0", 3600), ("1", 1800)):
        monkeypatch.setenv("RANK", rank)
        asked.clear()
        with pytest.raises(ValueError, match="enough"):
            parallel.start_process_group(timeout_s=timedelta(days=2000).total_seconds())
        assert asked == [timedelta(seconds=seconds)]


WORLD = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
SLEEPER = "import time; from mca_lite import world; world.watch_meeting(); time.sleep(600)"


@pytest.fixture
def start(tmp_path):
    """Starts a rank without torchrun, as a process that is killed after the test."""
    started = []

    def start(rank: int, port: str, *words: str) -> subprocess.Popen:
        env = os.environ | WORLD | dict(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port)
        command = [sys.executable, *words, f"output_dir={tmp_path / 'out'}"]
        options = dict(cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(rank: int, port: str) -> None:
    """Wait until a rank of WORLD can be seen by others of this machine."""
    name = f"mca_lite-127.0.0.1:{port}-{rank}\n"
    end = time.monotonic() + 60
    while name not in Path("/proc/net/unix").read_text(errors="replace"):
        assert time.monotonic() < end, "it did not start"
        time.sleep(0.1)


@pytest.mark.parametrize("survivor, port", [(0, "28313"), (1, "28314")])
def test_without_torchrun_a_rank_leaves_soon_when_another_is_killed_before_they_met(
    start, survivor, port
):
    other = start(1 - survivor, port, "-c", SLEEPER)
    wait_for(1 - survivor, port)
    rank = start(survivor, port, "train.py", "configs/sft.yaml")
    wait_for(survivor, port)
    other.send_signal(signal.SIGKILL)
    # after 7 s; it would wait for the other one until ddp_timeout, half an hour
    _, error = rank.communicate(timeout=90)
    assert rank.returncode == 2
    assert f"rank {survivor}: rank {1 - survivor} on " in error, error
    assert "ended before the ranks met" in error


def test_ranks_that_never_come_are_named(monkeypatch):
    from mca_lite import parallel

    for name, value in (WORLD | dict(WORLD_SIZE="4", RANK="0", MASTER_PORT="28315")).items():
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    with pytest.raises(ValueError, match="rank 0 of 4 could not meet .*ranks 1, 2, 3 did not come"):
        parallel.start_process_group(timeout_s=2)
    assert time.monotonic() - start < 15
