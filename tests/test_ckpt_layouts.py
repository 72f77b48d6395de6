"""A checkpoint of one layout loads in any other, and the run goes on as the one that
never stopped.
"""

import shutil
from pathlib import Path

import pytest

from tests.shared import tiny, world
from tests.shared.layouts import CP2, DIST_OPT, PP2, SP, TP2, VPP2
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


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny.save_model(
        tmp_path_factory.mktemp("layouts") / "model", "qwen2"
    )  # tied, with biases


@pytest.fixture(scope="module")
def undisturbed(model_path, tmp_path_factory):
    return world.run(train, 1, model_path, str(tmp_path_factory.mktemp("whole")), steps=STEPS)[0]


@pytest.fixture(scope="module")
def saved(model_path, tmp_path_factory):
    """layout -> the output directory of a run that ended after SAVED_AT steps; each layout runs
    once.
    """
    folders = {}

    def of(layout: str) -> Path:
        if layout not in folders:
            ranks, keys = LAYOUTS[layout]
            folders[layout] = tmp_path_factory.mktemp(layout)
            keys = dict(keys, save_strategy="steps", save_steps=SAVED_AT, num_train_epochs=5)
            world.run(train, ranks, model_path, str(folders[layout]), steps=STEPS, **keys)
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
    model_path, undisturbed, saved, tmp_path, before, after
):
    checkpoint = saved(before) / f"checkpoint-{SAVED_AT}"
    ranks, keys = LAYOUTS[after]
    keys = dict(keys, resume_from_checkpoint=str(checkpoint))
    got = world.run(train, ranks, model_path, str(tmp_path), steps=STEPS, **keys)[0]
    assert_same_curve(got, undisturbed, 5e-6)
