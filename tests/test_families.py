"""Families with more than a plain decoder has: each against transformers' own class, all of them in one world a layout."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny, world
from tests.test_convert import assert_same_bytes, tensors
from tests.test_packed import CP2, PACKED
from tests.test_parity import DIST_OPT, PP2, SP, TP2, assert_same_curve
from tests.training import train

FAMILIES = list(tiny.MORE_KEYS)
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, TP2),
    "tp2_sp": (2, {**TP2, **SP, **DIST_OPT}),
    "pp2_packed": (2, {**PP2, **PACKED}),
    "cp2": (2, CP2),
    "cp2_packed": (2, {**CP2, **PACKED}),
}
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 53, 58, 60, 0], [27, 18, 28, 18, 28, 45, 9, 0, 4, 52, 35, 36]]


def train_all(paths: dict, out: str, keys: dict, backend="megatron") -> dict:
    """{family: curve} on this rank; exports to out/family."""
    keys = dict(keys, backend=backend, export=True, steps=3, count=19, adam_epsilon=1e-4)
    return {name: train(path, f"{out}/{name}", **keys) for name, path in paths.items()}


def round_trip(paths: dict, out: str, keys: dict) -> dict:
    """Each model read and written again; its logits, where one rank has them all."""
    from mca_lite import AutoModel, TrainingArguments

    args, logits = TrainingArguments(output_dir="unused", **keys), {}
    for name, path in paths.items():
        models = AutoModel.from_pretrained(path, args).eval()
        models.save_pretrained(f"{out}/{name}")
        if len(models) == 1 and args.pipeline_model_parallel_size == 1:
            with torch.no_grad():
                logits[name] = models.gather_logits(models(torch.tensor(TOKENS))).tolist()
    return logits


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.save_model(folder / name, name) for name in FAMILIES}


@pytest.fixture(scope="module")
def wanted(paths, tmp_path_factory):
    """The torch backend on one rank: ({family: curve}, folder of its exports)"""
    out = tmp_path_factory.mktemp("torch")
    return world.run(train_all, 1, paths, str(out), {}, backend="torch")[0], out


@pytest.fixture(scope="module")
def trained(paths, tmp_path_factory):
    """trained(layout) -> ({family: curve} of each rank, folder of the exports); each layout runs once."""

    @functools.cache
    def run(layout: str):
        out, (ranks, keys) = tmp_path_factory.mktemp(layout), LAYOUTS[layout]
        return world.run(train_all, ranks, paths, str(out), keys), out

    return run


@pytest.fixture(scope="module")
def trips(paths, tmp_path_factory):
    @functools.cache
    def run(ranks: int, **keys):
        out = tmp_path_factory.mktemp("trips")
        return world.run(round_trip, ranks, paths, str(out), keys)[0], out

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_family_trains_as_torch_on_one_rank(name, layout, wanted, trained):
    (curves, folder), (ranks, out) = wanted, trained(layout)
    for got in ranks:
        assert_same_curve(got[name], curves[name])
    ours, theirs = tensors(out / name), tensors(folder / name)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-5, msg=lambda m, n=key: f"{n}: {m}")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, paths, trips):
    got, _ = trips(1)
    model = AutoModelForCausalLM.from_pretrained(paths[name]).eval()
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS)).logits
    torch.testing.assert_close(torch.tensor(got[name]), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_gives_the_same_bytes(name, paths, trips):
    _, out = trips(4, **TP2, **PP2)
    assert_same_bytes(tensors(out / name), tensors(paths[name]))
