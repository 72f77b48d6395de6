"""Packed rows with documents of one token, at the borders of context parallelism, and beside those
of the gated delta net's chunks: families with states, sinks, and two sizes of heads, against the
same documents one by one on plain torch. Products of what other files test by parts: all `full`.
"""

import pytest
import torch

from tests.shared import tiny, tiny_moe, world
from tests.shared.cells import asked_for, shared_worlds, train_all
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.layouts import CP2, CP4, DIST_OPT, EP2, ETP1, PACKED, PP2, SAVE, TP2_SP
from tests.shared.training import BRIEF, assert_same_curve, train

pytestmark = pytest.mark.full

LENGTHS = {
    "one_token": (1, 7, 1, 1, 9, 1, 3, 2),
    "at_borders": (4, 4, 8, 8, 4, 12, 8, 8),
    "beside_chunks": (65, 1, 63, 64, 127, 2, 70, 58),  # a chunk has 64 tokens
}
FAMILIES = ("qwen3_next", "qwen3_5_text", "gpt_oss", "gemma4_text")
# ranks that share a query group: 2 groups, 4 key heads of the delta net
TP4_SP = dict(tensor_model_parallel_size=4, sequence_parallel=True)
LAYOUTS = {
    "one": (1, PACKED),
    "cp2": (2, {**CP2, **PACKED}),
    "pp2": (2, {**PP2, **PACKED}),
    "tp2_sp": (2, {**TP2_SP, **PACKED}),
    "cp4": (4, {**CP4, **PACKED}),
    "tp4_sp": (4, {**TP4_SP, **PACKED}),
    "cp2tp2_sp": (4, {**CP2, **TP2_SP, **PACKED}),
}
KEYS = dict(steps=BRIEF["steps"], warmup_steps=0, adam_epsilon=1e-4)


def documents(lengths) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, tiny.VOCAB, (n + 1,), generator=generator) for n in lengths]
    return [{"input_ids": row[:-1], "labels": row[1:].clone()} for row in rows]


def save_model(folder, name: str) -> str:
    if name in tiny_moe.MODELS:
        return tiny_moe.save_model(folder, name, num_hidden_layers=2)
    return tiny.save_model(folder, name)


def family_of(case: str) -> str:
    return case.split("-")[0]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_model(folder / name, name) for name in (*FAMILIES, "qwen3_5_moe_text")}


@pytest.fixture(scope="module")
def run_of(paths):
    """run_of(case) -> (arguments, keys) of train_all"""

    def run(case: str):
        data = documents(LENGTHS[case.split("-")[1]])
        return (paths[family_of(case)],), dict(data=data)

    return run


@pytest.fixture(scope="module")
def wanted(request, run_of, tmp_path_factory):
    """The torch backend, a document a row: ({case: curve}, folder of its exports)"""
    out = tmp_path_factory.mktemp("torch")
    runs = {case: run_of(case) for case in asked_for(request)}
    return world.run(train_all, 1, runs, str(out), backend="torch", timeout_s=120, **KEYS)[0], out


@pytest.fixture(scope="module")
def trained(request, run_of, tmp_path_factory):
    return shared_worlds(request, tmp_path_factory, LAYOUTS, run_of, **KEYS)


CASES = [f"{name}-{lengths}" for name in FAMILIES for lengths in LENGTHS]
# two sizes of heads need as many query groups as ranks
CELLS = [
    (case, layout)
    for case in CASES
    for layout in LAYOUTS
    if (family_of(case), layout) != ("gemma4_text", "tp4_sp")
]


@pytest.mark.parametrize("case, layout", CELLS)
def test_documents_train_as_one_by_one_on_torch(case, layout, wanted, trained):
    curves, folder = wanted
    ranks, out = trained(layout)
    for got in ranks:
        assert_same_curve(got[case], curves[case])
    assert_same_tensors(tensors(out / case), tensors(folder / case))


# (layout of the first two steps, layout of the others), each with its number of ranks
OTHERS = {
    "tp2_sp-pp2": ((2, TP2_SP), (2, PP2)),
    "cp2-tp2_sp": ((2, {**CP2, **DIST_OPT}), (2, TP2_SP)),
    "ep2-tp2_sp": ((2, EP2), (2, TP2_SP)),
    "one-ep2tp2etp1": ((1, {}), (2, {**EP2, **TP2_SP, **ETP1})),
}
OF_EXPERTS = ("qwen3_next", "gpt_oss", "qwen3_5_moe_text")


@pytest.mark.parametrize(
    "name, layouts",
    [(n, pair) for n in (*FAMILIES[:3], "qwen3_5_moe_text") for pair in OTHERS
     if n in OF_EXPERTS or "ep2" not in pair],
)  # fmt: skip
def test_a_run_goes_on_in_another_layout(name, layouts, paths, tmp_path):
    (ranks, first), (more, then) = OTHERS[layouts]
    path = paths[name]
    [whole] = world.run(train, 1, path, str(tmp_path / "whole"))
    world.run(train, ranks, path, str(tmp_path / "first"), **{**SAVE, "steps": 4, **first})
    then = dict(then, resume_from_checkpoint=str(tmp_path / "first/checkpoint-2"))
    for got in world.run(train, more, path, str(tmp_path / "then"), **then):
        assert_same_curve(got, whole, 5e-6)
