"""A checkpoint of one layout loads in any other, and the run goes on as the one that
never stopped.
"""

import itertools
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.shared import world
from tests.shared.fixtures import saved_model
from tests.shared.layouts import CP2, DIST_OPT, OVERLAP, PP2, SP, TP2, VPP2
from tests.shared.training import assert_same_curve, train

SAVED_AT, STEPS = (
    2,
    4,
)  # an epoch has three steps: the rest goes through a partial window and a new permutation
LAYOUTS = {
    "one": (1, {}),
    "one_dist_opt": (1, DIST_OPT),
    "dp2": (2, {}),
    "dp2_dist_opt": (2, DIST_OPT),
    "tp2_sp": (2, {**TP2, **SP}),
    "pp2": (2, PP2),
    "pp2_vpp2_dist_opt": (2, {**PP2, **VPP2, **DIST_OPT}),
    "cp2": (2, CP2),
    "cp2_dist_opt": (2, {**CP2, **DIST_OPT}),
    "tp2_dp2_dist_opt": (4, {**TP2, **DIST_OPT}),
    "cp2_dp2_dist_opt": (4, {**CP2, **DIST_OPT}),
    "tp2_pp2": (4, {**TP2, **PP2}),
}
PAIRS = {
    "one": "dp2_dist_opt cp2 tp2_pp2",
    "dp2_dist_opt": "one_dist_opt tp2_sp pp2 cp2_dist_opt",
    "cp2_dist_opt": "one dp2 pp2_vpp2_dist_opt",
    "pp2_vpp2_dist_opt": "tp2_sp dp2_dist_opt cp2",
    "tp2_dp2_dist_opt": "pp2 cp2_dp2_dist_opt one",
}


tied_model_path = saved_model("qwen2")  # tied, with biases


@pytest.fixture(scope="module")
def whole_curve(tied_model_path, tmp_path_factory):
    return world.run(train, 1, tied_model_path, str(tmp_path_factory.mktemp("whole")), steps=STEPS)[
        0
    ]


@pytest.fixture(scope="module")
def saved_runs(tied_model_path, tmp_path_factory):
    """layout -> the output directory of a run that ended after SAVED_AT steps; each layout runs
    once.
    """
    folders = {}

    def of(layout: str) -> Path:
        if layout not in folders:
            ranks, keys = LAYOUTS[layout]
            folders[layout] = tmp_path_factory.mktemp(layout)
            keys = dict(keys, save_strategy="steps", save_steps=SAVED_AT, num_train_epochs=5)
            world.run(train, ranks, tied_model_path, str(folders[layout]), steps=STEPS, **keys)
            shutil.rmtree(folders[layout] / f"checkpoint-{STEPS}")
        return folders[layout]

    return of


@pytest.mark.parametrize(
    "before, after",
    [
        pytest.param(before, after, marks=[pytest.mark.full] if number > 1 else [])
        for before, row in PAIRS.items()
        for number, after in enumerate(row.split())
    ],
)
def test_another_layout_goes_on_with_the_same_curve(
    tied_model_path, whole_curve, saved_runs, tmp_path, before, after
):
    checkpoint = saved_runs(before) / f"checkpoint-{SAVED_AT}"
    ranks, keys = LAYOUTS[after]
    keys = dict(keys, resume_from_checkpoint=str(checkpoint))
    got = world.run(train, ranks, tied_model_path, str(tmp_path), steps=STEPS, **keys)[0]
    assert_same_curve(got, whole_curve, 5e-6)


def messages_of_a_save(model_path: str, folder: str) -> tuple[int, int, int, int]:
    """Of a run that saves in the background: (messages that are not in a batch, batches, the most
    bytes that received tensors take at once, bytes of the largest parameter)."""
    import torch.distributed as dist

    alone, batches, held, sizes, batch = [], [0], [], [0], dist.batch_isend_irecv

    def in_a_batch(messages):
        batches[0] += 1
        received = [m.tensor._base for m in messages if m.op is dist.irecv]
        held.extend(weakref.ref(tensor) for tensor in {id(t): t for t in received}.values())
        sizes.append(sum(t.nbytes for t in (reference() for reference in held) if t is not None))
        return batch(messages)

    def adapt(model):
        largest.append(max(p.nbytes for p in model.parameters()))
        return model

    largest = []
    dist.batch_isend_irecv = in_a_batch
    dist.send = dist.recv = lambda *args, **kwargs: alone.append(args)
    keys = dict(OVERLAP, save_strategy="steps", save_steps=SAVED_AT, num_train_epochs=5)
    train(model_path, folder, steps=STEPS, adapt=adapt, async_save=True, **keys)
    return len(alone), batches[0], max(sizes), largest[0]


def test_a_save_sends_in_batches_of_one_state_and_holds_no_two_of_them(
    tied_model_path, whole_curve, tmp_path
):
    found = world.run(messages_of_a_save, 4, tied_model_path, str(tmp_path / "four"))
    assert [alone for alone, *_ in found] == 4 * [0]
    assert sum(batches for _, batches, *_ in found) > 20
    assert all(0 < most <= largest for *_, most, largest in found)
    keys = dict(resume_from_checkpoint=str(tmp_path / f"four/checkpoint-{SAVED_AT}"))
    got = world.run(train, 1, tied_model_path, str(tmp_path / "one"), steps=STEPS, **keys)[0]
    assert_same_curve(got, whole_curve, 5e-6)


# hidden, intermediate, layers, width of queries, keys and values, vocabulary
SHAPES = {"1.5B": (1536, 8960, 28, 2048, 151936), "8B": (4096, 12288, 36, 6144, 151936)}


def cut_optimizer(shape: tuple, ranks: int):
    """(models, optimizer) as megatron cuts them for data parallel ranks, of which this is one."""
    h, f, layers, qkv, vocabulary = shape
    sizes = [vocabulary * h, *layers * [h, h * qkv, qkv, h * h, h, 2 * f * h, f * h], h]
    parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    buckets, places, start, at = [], {}, 0, 0
    for parameter in reversed(parameters):
        places[parameter] = at, at + parameter.numel(), len(buckets)
        at += parameter.numel()
        if at - start >= max(40_000_000, 1_000_000 * ranks) or parameter is parameters[0]:
            at = -(-at // ranks) * ranks
            grads = torch.empty(at - start, device="meta")
            buckets.append(SimpleNamespace(offset=start, grad_data=grads))
            start = at
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    buffer = SimpleNamespace(param_index_map=places, buckets=buckets)
    part = SimpleNamespace(gbuf_ranges=[], buffers=[buffer], data_parallel_group=group)
    return SimpleNamespace(parameters=lambda: parameters), part


@pytest.mark.parametrize("ranks", [2, 8, 64, 256])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_no_rank_writes_more_than_its_share_and_one_bucket(monkeypatch, shape, ranks):
    from mca_lite import ckpt_megatron, parallel

    models, optimizer = cut_optimizer(SHAPES[shape], ranks)
    monkeypatch.setattr(parallel, "replica_group", lambda of_expert: optimizer.data_parallel_group)
    holders, written = ckpt_megatron.holders_of_all(models, optimizer), [0] * ranks
    for parameter in models.parameters():
        group, writer, pieces = holders[id(parameter)]
        pieces = sorted(pieces.values())
        assert pieces[0][0] == 0 and pieces[-1][1] == parameter.numel()
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        written[writer] += parameter.numel()
    largest = max(bucket.grad_data.numel() for bucket in optimizer.buffers[0].buckets)
    assert max(written) <= sum(written) / ranks + largest
