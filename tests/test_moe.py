"""Mixtures of experts train in every layout as on plain torch: loss, gradient norm, weights and the
routers' numbers.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.shared import tiny_moe, world
from tests.shared.cells import train_all
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.layouts import (
    AUX,
    BIAS,
    CP2,
    DIST_OPT,
    EP2,
    ETP1,
    EXPERTS,
    LOOP,
    OVERLAP,
    PP2,
    TP2_SP,
    VPP2,
)
from tests.shared.training import NUMBERS, assert_same_curve, read_log

FAMILIES = ("qwen3_moe_dense_layers", "mixtral", "qwen2_moe", "olmoe", "glm4_moe")
LOOPED = ("mixtral", "qwen2_moe")  # without and with shared experts
# Routers and dispatch know of the layout, a family's rows and attention do not: shared experts with
# a gate, and groups with a bias that chooses, in every layout; the other families where experts and
# attention are cut, and the one with tied embeddings where they lie on two stages.
EVERYWHERE = ("qwen2_moe", "glm4_moe")
MORE = {"ep2tp2": FAMILIES, "ep2pp2": ("qwen3_moe_dense_layers",)}
LATENT = (
    "deepseek_v2",
    "deepseek_v3",
)  # test_model_families.py trains them without balancing losses


def variants_of(name: str) -> dict[str, tuple[dict, dict]]:
    """{variant: (keys of both backends, keys of the layouts alone)}"""
    aux = {**AUX, **BIAS} if name.startswith("glm") else AUX
    return {"aux": (aux, {}), "plain": ({}, LOOP)}


WIDE = dict(global_batch_size=8, per_device_train_batch_size=2)  # two samples on each of four ranks
# as BRIEF of shared/training.py: two updates, the second of a window that is half filled
SHORT = dict(WIDE, steps=2, count=12, warmup_steps=0, adam_epsilon=1e-5)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    made = {
        name: tiny_moe.save_model(folder / name, name, num_hidden_layers=2) for name in FAMILIES
    }
    for name in (*LATENT, "minimax_m2"):
        made[name] = tiny_moe.save_model(folder / name, name, num_hidden_layers=2)
    made["skewed"] = tiny_moe.save_model(
        folder / "skewed", "glm4_moe", skew=True, num_hidden_layers=2
    )
    made["four_layers"] = tiny_moe.save_model(folder / "four", "qwen3_moe_sparse_step")
    return made


@pytest.fixture(scope="module")
def torch_runs(paths, tmp_path_factory):
    """run(model, **keys) -> (curve, folder) of the torch backend on one rank; each is made once."""
    done = {}

    def run(model: str, **keys):
        key = model, *sorted(keys.items())
        if key not in done:
            out = str(tmp_path_factory.mktemp("torch"))
            runs = {"run": ((paths[model],), keys)}
            [curves] = world.run(train_all, 1, runs, out, backend="torch", **SHORT)
            done[key] = curves["run"], f"{out}/run"
        return done[key]

    return run


def assert_same(curve, folder, reference):
    """Curve, exported weights and what the log says of the routers."""
    wanted, theirs = reference
    assert_same_curve(curve, wanted)
    assert_same_tensors(tensors(folder), tensors(theirs))
    for own, other in zip(read_log(folder), read_log(theirs), strict=True):
        for key in NUMBERS:
            assert (key in own) == (key in other)
            assert own.get(key, 0) == pytest.approx(other.get(key, 0), rel=1e-4), key


def check(torch_runs, paths, tmp_path, ranks, layout, runs):
    """runs: {name: (model, keys of both backends, keys of the layout alone)}, in one world."""
    ours = {
        name: ((paths[model],), {**layout, **shared, **own})
        for name, (model, shared, own) in runs.items()
    }
    answers = world.run(train_all, ranks, ours, str(tmp_path), **SHORT)
    for name, (model, shared, _) in runs.items():
        for curves in answers:
            assert_same(curves[name], f"{tmp_path}/{name}", torch_runs(model, **shared))


def runs_of_families(layout: str) -> tuple[dict, dict]:
    """(what `make test` trains in a layout, the rest of the product): each family with balancing
    losses and grouped experts, and without, in a loop of experts after the other dispatcher.
    """
    runs = {(m, v): (m, *both) for m in FAMILIES for v, both in variants_of(m).items()}
    short = [
        (m, v)
        for m, v in runs
        if m in (*EVERYWHERE, *MORE.get(layout, ())) and (v == "aux" or m in LOOPED)
    ]
    of_short = {f"{m}-{v}": runs[m, v] for m, v in short}
    return of_short, {f"{m}-{v}": run for (m, v), run in runs.items() if (m, v) not in short}


@pytest.mark.parametrize("layout", EXPERTS)
def test_families_train_as_on_torch(layout, torch_runs, paths, tmp_path):
    ranks, keys = EXPERTS[layout]
    check(torch_runs, paths, tmp_path, ranks, keys, runs_of_families(layout)[0])


@pytest.mark.full
@pytest.mark.parametrize("layout", EXPERTS)
def test_more_families_train_as_on_torch(layout, torch_runs, paths, tmp_path):
    ranks, keys = EXPERTS[layout]
    check(torch_runs, paths, tmp_path, ranks, keys, runs_of_families(layout)[1])


MEAN = dict(AUX, calculate_per_token_loss=False)
SEQ = dict(AUX, moe_router_load_balancing_type="seq_aux_loss")
PACKED = dict(AUX, sequence_packing=True)
SETTINGS = {"mean": MEAN, "seq": SEQ, "packed": PACKED}


@pytest.mark.parametrize(
    "ranks, layout",
    [
        (1, {}),
        (2, {**TP2_SP, **ETP1}),
        (2, {**TP2_SP, **EP2, **ETP1}),
        pytest.param(4, {**EP2, **CP2, **DIST_OPT}, marks=pytest.mark.full),
        (4, {**EP2, **TP2_SP, **OVERLAP}),
    ],
)
def test_losses_and_packed_rows_train_as_on_torch(ranks, layout, torch_runs, paths, tmp_path):
    """The other loss mode, losses of each row, and packed rows; experts that get no token, on whole
    ranks too.
    """
    runs = {name: ("qwen2_moe", keys, {}) for name, keys in SETTINGS.items()}
    check(torch_runs, paths, tmp_path, ranks, layout, {**runs, "skew": ("skewed", AUX, {})})


def test_experts_of_odd_sizes_train_as_on_torch(torch_runs, paths, tmp_path):
    """torch has no grouped product for rows that are no multiple of 16 bytes."""
    paths["odd"] = tiny_moe.save_model(
        tmp_path / "odd", "mixtral", num_hidden_layers=1, intermediate_size=18
    )
    check(torch_runs, paths, tmp_path, 1, {}, {"run": ("odd", {}, {})})


def test_virtual_stages_and_fillers_train_as_on_torch(torch_runs, paths, tmp_path):
    """Four layers, every second of them dense, in four chunks. The last window of an epoch has
    three micro-batches on each rank, and the schedule fills them up to four with one that must not
    count.
    """
    three = dict(per_device_train_batch_size=1, count=14)
    runs = {
        name: ("four_layers", {**keys, **three}, {})
        for name, keys in {"aux": AUX, **SETTINGS}.items()
    }
    check(torch_runs, paths, tmp_path, 4, {**EP2, **PP2, **VPP2}, runs)


def test_latent_attention_and_a_bias_of_the_block_are_balanced_as_on_torch(
    torch_runs, paths, tmp_path
):
    """minimax_m2's bias is no tensor of its router."""
    shared = dict.fromkeys(("deepseek_v3", "minimax_m2"), {**AUX, **BIAS})
    shared["deepseek_v2"] = SEQ
    check(
        torch_runs,
        paths,
        tmp_path,
        4,
        {**EP2, **TP2_SP},
        {name: (name, keys, {}) for name, keys in shared.items()},
    )


def test_recomputation_and_overlap_change_no_number(torch_runs, paths, tmp_path):
    full = dict(recompute_granularity="full")
    block = dict(
        full, recompute_method="block", recompute_num_layers=1
    )  # the second layer is not recomputed
    modules = dict(recompute_granularity="selective", recompute_modules=["moe"])
    overlap = dict(moe_shared_expert_overlap=True)
    own = {"full": full, "block": block, "moe": modules, "overlap": overlap}
    runs = {name: ("qwen2_moe", AUX, keys) for name, keys in own.items()}
    check(torch_runs, paths, tmp_path, 2, {**EP2, **TP2_SP, **ETP1}, runs)


def test_torch_on_two_ranks_trains_as_on_one(torch_runs, paths, tmp_path):
    runs = {f"{m}-{name}": (m, keys, {}) for m, name, keys in (
        ("glm4_moe", "bias", {**AUX, **BIAS}), ("qwen2_moe", "mean", MEAN), ("qwen2_moe", "packed",
            PACKED))}  # fmt: skip
    check(torch_runs, paths, tmp_path, 2, dict(backend="torch"), runs)


def test_the_bias_moves_away_from_busy_experts(torch_runs, paths):
    """By hand: each update changes the bias by the rate, and the busiest expert's goes down."""
    _, folder = torch_runs("glm4_moe", **AUX, **BIAS)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    steps = (tensors(folder)[name] - tensors(paths["glm4_moe"])[name]) / 0.01
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
    assert steps.abs().max() == pytest.approx(2, abs=1e-4), (
        "two steps, and an expert that was always too busy or too idle"
    )


def test_the_export_is_what_transformers_writes(torch_runs, paths, tmp_path):
    """The torch backend's files have save_pretrained's names and shapes, and load without a
    complaint.
    """
    from transformers import AutoModelForCausalLM

    for name in FAMILIES:
        _, folder = torch_runs(name, **variants_of(name)["aux"][0])
        ours, theirs = tensors(folder), tensors(paths[name])
        assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
        _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert (
            json.loads((Path(folder) / "config.json").read_text())["model_type"]
            == tiny_moe.MODELS[name][0]
        )
