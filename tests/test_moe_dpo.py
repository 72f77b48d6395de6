"""Preference training of mixtures of experts: balancing losses beside DPO and ORPO, the same in every layout."""

import pytest

from tests import tiny_moe, world
from tests.dpo_tools import OBJECTIVES, curve_of, differences, our_run
from tests.test_moe import AUX, CP2, EP2, NUMBERS, TP2
from tests.test_parity import PP2

RUNS = {
    "sigmoid": ("sigmoid", dict(per_device_train_batch_size=2)),
    "packed": ("sigmoid", dict(per_device_train_batch_size=2, sequence_packing=True)),
    "orpo": ("orpo", dict(per_device_train_batch_size=1, sequence_packing=True)),
}
LAYOUTS = {
    "torch_on_two": (2, dict(backend="torch")),
    "ep2": (2, EP2),
    "tp2": (2, TP2),
    "cp2ep2": (2, {**CP2, **EP2}),
    "ep2pp2": (4, {**EP2, **PP2}),
}


def curves(path: str, out: str, keys: dict) -> dict:
    """{run: metrics, gradient norm and the routers' numbers of each step}"""
    found = {}
    for name, (objective, own) in RUNS.items():
        trainer = our_run(path, f"{out}/{name}", OBJECTIVES[objective], **{**AUX, **own, **keys})
        numbers = [{k: line[k] for k in NUMBERS if k in line} for line in trainer.state.log_history if "loss" in line]
        found[name] = [{**step, **of_routers} for step, of_routers in zip(curve_of(trainer), numbers, strict=True)]
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    path = tiny_moe.save_model(folder / "model", "qwen3_moe")
    return path, world.run(curves, 1, path, str(folder / "torch"), dict(backend="torch"))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_preferences_train_as_on_torch(layout, made, tmp_path):
    path, wanted = made
    ranks, keys = LAYOUTS[layout]
    for got in world.run(curves, ranks, path, str(tmp_path), keys):
        for name, curve in wanted.items():
            assert "load_balancing_loss" in curve[0]
            assert not differences(got[name], curve), name
