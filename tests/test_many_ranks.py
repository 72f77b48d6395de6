"""Growth with the number of ranks, counted: one rank of a faked world of 1,024, worlds of up to 64
forked ranks over gloo, and the watchdog's store. Each number has its bound here.
"""

import collections
import json
import os
import resource

import pytest

from mca_lite import watchdog
from mca_lite.watchdog import BETWEEN_STEPS, Watchdog
from tests.shared import tiny, world
from tests.shared.fixtures import saved_model

model_path = saved_model("llama")


# -- one rank of a faked world: its collectives do nothing


def a_rank_of(size: int, path: str, out: str, keys: dict) -> dict:
    """Train two steps as rank 0 of a faked world -> collectives by name, those over objects with
    their lengths, groups of this rank, lines of the log."""
    import torch.distributed as dist

    from mca_lite import AutoModel, McaTrainer, TrainingArguments

    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE="8")
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    counts = collections.Counter()
    names = ("all_reduce", "broadcast", "all_gather", "barrier", "batch_isend_irecv")
    objects = ("all_gather_object", "broadcast_object_list", "gather_object")
    for name in (*names, *objects, "all_gather_into_tensor", "reduce_scatter_tensor"):
        real = getattr(dist, name)

        def counted(*args, _name=name, _real=real, **keys):
            counts[_name] += 1
            return _real(*args, **keys)

        setattr(dist, name, counted)
    args = TrainingArguments(
        output_dir=out, max_steps=2, global_batch_size=size, per_device_train_batch_size=1,
        logging_steps=1, save_strategy="no", disable_tqdm=True, **keys,
    )  # fmt: skip
    trainer = McaTrainer(AutoModel.from_pretrained(path, args), args, train_dataset=tiny.samples())
    trainer.train()
    with open(f"{out}/trainer_log.jsonl") as file:
        lines = len(file.readlines())
    return dict(counts=dict(counts), groups=len(dist.distributed_c10d._world.pg_map), lines=lines)


KEYS = dict(tensor_model_parallel_size=2)


def test_a_rank_of_1024_calls_and_logs_as_often_as_one_of_16(model_path, tmp_path):
    """The calls themselves, not only their number, are bounded: see the objects below."""
    [few], [many] = (
        world.run(a_rank_of, 1, size, model_path, str(tmp_path / str(size)), KEYS)
        for size in (16, 1024)
    )
    assert many == few
    print(many)
