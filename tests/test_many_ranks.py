"""Growth with the number of ranks, counted: one rank of a faked world of 1,024, worlds of up to 64
forked ranks over gloo, and the watchdog's store. Each number has its bound here.
"""

import collections
import os
import pickle
import resource
import zlib

import pytest

from mca_lite import watchdog
from mca_lite.watchdog import BETWEEN_STEPS, Watchdog
from tests.shared import tiny, world
from tests.shared.fixtures import saved_model

model_path = saved_model("llama")


# -- one rank of a faked world: its collectives do nothing


def a_rank_of(size: int, path: str, out: str, keys: dict) -> dict:
    """Train two steps as rank 0 of a faked world -> collectives by name, bytes of this rank's
    longest object, its groups, lines of the log."""
    import torch.distributed as dist

    from mca_lite import AutoModel, McaTrainer, TrainingArguments

    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE="8")
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    counts = collections.Counter()
    objects = ("all_gather_object", "broadcast_object_list")
    for name in ("all_reduce", "broadcast", "all_gather", "barrier", *objects):
        real = getattr(dist, name)

        def counted(*args, _name=name, _real=real, **keys):
            counts[_name] += 1
            if _name in objects:
                counts["longest"] = max(counts["longest"], len(pickle.dumps(args[-1])))
            return _real(*args, **keys)

        setattr(dist, name, counted)
    args = TrainingArguments(
        output_dir=out, max_steps=2, global_batch_size=size, per_device_train_batch_size=1,
        logging_steps=1, save_strategy="no", disable_tqdm=True, **keys,
    )  # fmt: skip
    trainer = McaTrainer(
        AutoModel.from_pretrained(path, args), args, train_dataset=tiny.samples() * size
    )
    trainer.train()
    with open(f"{out}/trainer_log.jsonl") as file:
        lines = len(file.readlines())
    return dict(counts=dict(counts), groups=len(dist.distributed_c10d._world.pg_map), lines=lines)


def test_a_rank_of_1024_calls_and_logs_as_often_as_one_of_16(model_path, tmp_path):
    keys = dict(tensor_model_parallel_size=2)
    [few], [many] = (
        world.run(a_rank_of, 1, size, model_path, str(tmp_path / str(size)), keys)
        for size in (16, 1024)
    )
    assert many == few
    assert many["counts"]["longest"] < 500 and many["groups"] < 25 and many["lines"] == 2


# -- forked ranks


def load_and_export(path: str, out: str, keys: dict) -> dict:
    """Load and export -> bytes read here, bytes of objects from each call, the weights' hashes."""
    import torch.distributed as dist

    from mca_lite import AutoModel, TrainingArguments
    from mca_lite.weights_files import SafetensorsSource

    num_read = [0]
    objects = []
    read = SafetensorsSource.read

    def counted(self, *args):
        part = read(self, *args)
        num_read[0] += part.nbytes
        return part

    gather = dist.all_gather_object
    broadcast = dist.broadcast_object_list

    def gathered(values, value, *args):
        gather(values, value, *args)
        objects.append(len(values) * max(len(pickle.dumps(one)) for one in values))

    def sent(values, *args, **keys):
        broadcast(values, *args, **keys)
        objects.append(len(pickle.dumps(values)))

    SafetensorsSource.read = counted
    dist.all_gather_object = gathered
    dist.broadcast_object_list = sent
    models = AutoModel.from_pretrained(path, TrainingArguments(output_dir=out, **keys))
    models.save_pretrained(out)
    hashes = {n: zlib.crc32(p.detach().numpy().tobytes()) for n, p in models.named_parameters()}
    return dict(read=num_read[0], objects=objects, hashes=hashes)


@pytest.mark.parametrize("ranks", [4, pytest.param(64, marks=pytest.mark.full)])
def test_the_files_are_read_once_and_places_are_told_once(ranks, model_path, tmp_path):
    from safetensors.torch import load_file

    wanted = load_file(f"{model_path}/model.safetensors")
    runs = world.run(load_and_export, ranks, model_path, str(tmp_path), {}, timeout_s=300)
    assert sum(run["read"] for run in runs) == sum(t.nbytes for t in wanted.values())
    for run in runs:
        assert run["hashes"] == runs[0]["hashes"]
        # small objects of each rank; the places of all tensors, once
        assert sum(run["objects"]) < 60 * ranks * len(run["objects"]) + 200 * len(wanted)
    got = load_file(tmp_path / "model.safetensors")
    assert {n: t.tolist() for n, t in got.items()} == {n: t.tolist() for n, t in wanted.items()}


def read_badly(path: str, out: str) -> str:
    import torch.distributed as dist

    from mca_lite import AutoModel, TrainingArguments
    from mca_lite.weights_files import SafetensorsSource

    def fails(self, name, *args):
        raise OSError(f"the disk of rank {dist.get_rank()} is gone")

    SafetensorsSource.read = fails
    with pytest.raises(ValueError) as raised:
        AutoModel.from_pretrained(path, TrainingArguments(output_dir=out))
    return str(raised.value)


def test_what_one_replica_cannot_read_is_refused_on_every_rank(model_path, tmp_path):
    said = world.run(read_badly, 3, model_path, str(tmp_path))
    assert len(set(said)) == 1
    assert said[0].startswith("the weights cannot be used (rank 0: ")
    assert "the disk of rank 0 is gone" in said[0] and "rank 1" not in said[0]


def fail_alike() -> str:
    from mca_lite import parallel

    def fails():
        raise OSError("no disk")

    with pytest.raises(ValueError) as raised:
        parallel.on_all(fails, ValueError, "not read")
    return str(raised.value)


def test_a_problem_of_many_ranks_takes_one_line():
    said = world.run(fail_alike, 10)
    assert said[3].startswith("not read (rank 0, 1, 2, 3, 4, 5, 6, 7, and 2 more: ")
    assert said[3].endswith(": no disk)") and said[3].count("no disk") == 1


# -- the store


class CountingStore:
    """A store that counts its requests."""

    def __init__(self):
        from torch.distributed import HashStore

        self.store = HashStore()
        self.requests = 0
        self.bytes = 0

    def __getattr__(self, name: str):
        def request(*args):
            self.requests += 1
            self.bytes += sum(len(str(arg)) for arg in args)
            return getattr(self.store, name)(*args)

        return request


def test_the_watchdogs_traffic_is_bounded(capsys):
    size = 1024
    store = CountingStore()
    of_world = dict(number=1, backend="nccl", is_message=False, operation="all_reduce")
    of_world.update(form="all_reduce", ranks=list(range(size)), words="world", has_begun=True)
    calls = {"0": dict(of_world, place="", is_users=False)}
    record = {"calls": calls, "recent": {}}
    ranks = [
        Watchdog(store, rank, size, 10, 60, lambda code: None, dump=lambda rank: record)
        for rank in range(size)
    ]
    assert store.requests == size  # names
    for rank in ranks:
        rank.note(BETWEEN_STEPS, 1)
        rank.look()
    assert store.requests <= size * 3  # without a hang: question and verdict, every poll_s seconds
    store.requests = 0
    for _ in range(30):
        for rank in ranks[1:]:  # 0 hangs
            rank.waited += 1
            rank.look()
        if "ranks behind" in capsys.readouterr().err:
            break
    # a rank: two checks, the question, an answer, a record; the one that asks reads all once
    looks = round(ranks[1].waited)
    assert store.requests < looks * size * 5 + 6 * size
    assert store.bytes < 20_000 * size


def test_many_ranks_that_hang_take_few_lines(capsys):
    answers = [
        dict(count=5 - (rank % 2), ticks=0, stage=0, is_waiting=True, place="at x", text="stack")
        for rank in range(1024)
    ]
    late = watchdog.ranks_behind(answers)
    text = watchdog.describe(late, answers, [f"rank {rank}" for rank in range(1024)])
    assert len(late) == 512 and len(text.splitlines()) == 5 and len(text) < 500


def test_a_run_raises_its_limit_of_open_files(monkeypatch):
    from mca_lite import world as launched

    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 20000))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append((which, pair)))
    launched.raise_open_files()
    assert limits == [(resource.RLIMIT_NOFILE, (20000, 20000))]


def test_ranks_without_enough_open_files_are_refused(monkeypatch):
    from mca_lite import world as launched

    monkeypatch.setattr(resource, "getrlimit", lambda which: (32, 32))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: None)
    launched.raise_open_files()  # a world of one
    for name, value in dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="at least 64, got 32; set ulimit -n"):
        launched.raise_open_files()
