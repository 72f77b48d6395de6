"""DPO of a mixture of experts in expert-parallel layouts trains as plain transformers and
torch do.
"""

import pytest

from tests.shared import tiny_moe, world
from tests.shared.dpo_tools import OBJECTIVES, curve_of, differences, oracle_curve, our_run
from tests.shared.layouts import AUX, CP2, DIST_OPT, EP2, PACKED, PP2, SP, TP2
from tests.shared.training import NUMBERS

SMOOTHED = OBJECTIVES["smoothed"]
RUNS = {
    "padded": dict(per_device_train_batch_size=2),
    "packed, second model": dict(PACKED, ref=True),
    "packs, balanced": dict(AUX, pack=35, sequence_packing=True),
    "padded, balanced": dict(AUX, per_device_train_batch_size=2),
}
BOTH = {name: RUNS[name] for name in ("packed, second model", "padded, balanced")}
LAYOUTS = {
    "ep2": (2, {**EP2, **DIST_OPT}),
    "ep2pp2": (4, {**EP2, **PP2}),
    "cp2ep2": (2, {**CP2, **EP2}),
    "ep2tp2": (4, {**EP2, **TP2, **SP}),
}


def moe_oracle_curve(path) -> list:
    import torch
    from transformers import AutoModelForCausalLM

    return oracle_curve(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), SMOOTHED)


def curves_of_runs(path, out, runs=RUNS, **keys) -> dict:
    """{run: metrics, gradient norm and what the log says of the routers, of each step}"""
    found = {}
    for name, own in runs.items():
        trainer = our_run(path, f"{out}/{name}", SMOOTHED, **{**keys, **own})
        of_routers = [
            {k: line[k] for k in NUMBERS if k in line}
            for line in trainer.state.log_history
            if "loss" in line
        ]
        steps = zip(
            curve_of(trainer),
            of_routers if "balanced" in name else [{}] * len(of_routers),
            strict=True,
        )
        found[name] = [{**step, **numbers} for step, numbers in steps]
    return found


@pytest.fixture(scope="module")
def moe_curves(tmp_path_factory):
    """(model folder, the curve of plain torch, {run: curve of the torch backend on one rank})"""
    folder = tmp_path_factory.mktemp("dpo_moe")
    path = tiny_moe.save_model(folder / "model", "qwen3_moe", num_hidden_layers=2)
    [plain] = world.run(moe_oracle_curve, 1, path)
    # of pairs in rows, the last step has fillers, and of packed ones none
    runs = {**RUNS, "packed, balanced": dict(AUX, **PACKED)}
    [ours] = world.run(curves_of_runs, 1, path, str(folder), runs, backend="torch")
    assert not differences(ours["padded, balanced"], ours["packed, balanced"])
    assert differences(ours["padded, balanced"], plain), (
        "the balancing losses are not felt on this data"
    )
    return path, plain, ours


@pytest.mark.parametrize(
    "layout, runs",
    [
        ("ep2", RUNS),
        ("cp2ep2", RUNS),
        # how rows are filled and weighed knows of data and context ranks alone
        ("ep2pp2", BOTH),
        ("ep2tp2", BOTH),
        pytest.param("ep2pp2", RUNS, marks=pytest.mark.full),
        pytest.param("ep2tp2", RUNS, marks=pytest.mark.full),
    ],
    ids="ep2 cp2ep2 ep2pp2 ep2tp2 ep2pp2-all ep2tp2-all".split(),
)
def test_experts_train_as_plain_torch(layout, runs, moe_curves, tmp_path):
    path, plain, of_torch = moe_curves
    ranks, keys = LAYOUTS[layout]
    for got in world.run(curves_of_runs, ranks, path, str(tmp_path), runs, **keys):
        assert "load_balancing_loss" in got["padded, balanced"][0]
        for name, curve in got.items():
            reference = of_torch[name] if "balanced" in name else plain
            assert not differences(curve, reference), name
