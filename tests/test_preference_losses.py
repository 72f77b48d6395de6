"""Every preference loss, and every switch of them, trains in a layout as plain torch does: 8
metrics and the gradient's norm of each step, over global batches of 4 and 3 pairs.
"""

import re
from pathlib import Path

import pytest
import torch

from mca_lite.part_dpo_keys import LOSSES
from tests.shared import preference_oracle, tiny, tiny_moe, world
from tests.shared.dpo_tools import Pairs, curve_of, differences, our_run
from tests.shared.layouts import CP2, DIST_OPT, EP2, OVERLAP, PACKED, PP2, TP2, TP2_SP, VPP2

PAGE = Path(__file__).parents[1] / "configs/PREFERENCES.md"
STEPS = 3
PADDED = dict(per_device_train_batch_size=2)
NUMBERS = {
    "sigmoid": dict(label_smoothing=0.2),
    "robust": dict(label_smoothing=0.1),
    "exo_pair": dict(label_smoothing=0.1),
    "aot": dict(label_smoothing=0.1),
    "simpo": dict(beta=2.0, simpo_gamma=1.2, label_smoothing=0.1),
    "cpo": dict(cpo_alpha=0.7),
    "discopop": dict(discopop_tau=0.3),
}
ROWS = {name: dict(beta=0.3, pref_loss=name) | NUMBERS.get(name, {}) for name in LOSSES}
MPO = dict(beta=0.3, pref_loss=["sigmoid", "bco_pair", "sft"], pref_loss_weights=[0.8, 0.2, 1.0])
MORE = {
    "MPO": MPO,
    "rpo": dict(beta=0.3, ftx=0.4, pref_loss="sigmoid"),
    "forward_kl": dict(beta=0.3, pref_loss="sigmoid", f_divergence_type="forward_kl"),
    "js": dict(beta=0.3, pref_loss="ipo", f_divergence_type="js_divergence"),
    "alpha": dict(
        beta=0.3,
        pref_loss="sigmoid_norm",
        f_divergence_type="alpha_divergence",
        f_alpha_divergence_coef=0.3,
    ),
    "ld": dict(beta=0.3, pref_loss=["sigmoid", "sft"], ld_alpha=0.4),
    "wpo": dict(beta=0.3, pref_loss=["sigmoid", "hinge"], use_weighting=True, ftx=0.2),
    "columns": dict(beta=0.3, pref_loss=["sigmoid", "simpo", "cpo"], ftx=0.2),
}
# several rows in one run: their sum, with weights that tell them apart
OF_REFERENCE = [name for name in LOSSES if LOSSES[name].has_reference]
SUMS = {
    "with a reference": dict(
        beta=0.3,
        label_smoothing=0.1,
        pref_loss=OF_REFERENCE,
        pref_loss_weights=[0.05 + 0.01 * i for i in range(len(OF_REFERENCE))],
    ),
    "without": dict(beta=1.1, pref_loss=["simpo", "orpo", "cpo", "sft"]),
    **{name: MORE[name] for name in ("ld", "wpo", "columns", "alpha")},
}
ALL = ROWS | MORE | SUMS
LAYOUTS = {
    "one": (1, PADDED),
    "tp2pp2": (4, {**TP2, **PP2, **PADDED}),
    "cp2 packed": (2, {**CP2, **PACKED}),
    "dp2": (2, {**DIST_OPT, **PADDED}),
}


MORE_LAYOUTS = {
    "dp2": (2, {}),
    "dp2_overlap": (2, OVERLAP),
    "tp2_sp": (2, TP2_SP),
    "pp2": (2, PP2),
    "pp2_vpp2": (2, {**PP2, **VPP2}),
    "cp2": (2, CP2),
    "cp2pp2": (4, {**CP2, **PP2}),
    "torch_on_two": (2, dict(backend="torch")),
}


class PairsWithColumns(Pairs):
    """Pairs with weights and margins."""

    def __init__(self):
        super().__init__()
        for i, pair in enumerate(self.pairs):
            pair.update(pair_weight=0.5 + 0.25 * i, pair_margin=0.1 * i)


def pairs_of(name: str) -> Pairs:
    return PairsWithColumns() if name == "columns" else Pairs()


def oracles(path, names, adapter=None) -> dict:
    from transformers import AutoModelForCausalLM

    from tests.shared.lora_tools import peft_model

    found = {}
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if adapter:
            model = peft_model(path)
            model.save_pretrained(adapter)
        found[name] = preference_oracle.curve(model, ALL[name], pairs_of(name).pairs, STEPS)
    return found


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """(model folder, {name: curve of plain torch})"""
    path = tiny.save_model(tmp_path_factory.mktemp("losses") / "model", "qwen3")
    return path, world.run(oracles, 1, path, [*ALL], timeout_s=240)[0]


@pytest.fixture(scope="module")
def adapted(start):
    """(model folder, adapter's folder, {name: curve of plain torch and peft})"""
    path, adapter = start[0], f"{start[0]}-adapter"
    return path, adapter, world.run(oracles, 1, path, [*SUMS], adapter, timeout_s=240)[0]


def curves_of(path, out, names, keys, adapter=None) -> dict:
    found = {}
    for i, name in enumerate(names):
        keys = dict(keys, train_dataset=pairs_of(name), max_steps=STEPS)
        found[name] = curve_of(our_run(path, f"{out}/{i}", ALL[name], adapter, **keys))
    return found


def check(path, wanted, out, names, ranks, keys, adapter=None) -> None:
    given = (path, str(out), names, keys, adapter)
    for found in world.run(curves_of, ranks, *given, timeout_s=240):
        wrong = {name: differences(found[name], wanted[name]) for name in names}
        assert not any(wrong.values()), wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_loss_trains_as_plain_torch(layout, start, tmp_path):
    names = {"one": [*ROWS, *MORE], "dp2": ["with a reference", "wpo"]}.get(layout, [*SUMS])
    check(*start, tmp_path, names, *LAYOUTS[layout])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2pp2", "cp2 packed"])
def test_each_loss_alone_trains_as_plain_torch_in_a_layout(layout, start, tmp_path):
    check(*start, tmp_path, [*ROWS, *MORE], *LAYOUTS[layout])


@pytest.mark.full
@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_sums_of_losses_train_as_plain_torch(layout, rows, start, tmp_path):
    ranks, keys = MORE_LAYOUTS[layout]
    keys = {**(PACKED if rows == "packed" else PADDED), **keys}
    if "vpp2" in layout:  # virtual stages want two micro-batches
        keys["per_device_train_batch_size"] = 1
    check(*start, tmp_path, [*SUMS], ranks, keys)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS | MORE_LAYOUTS)
def test_sums_of_losses_train_adapters_as_peft(layout, adapted, tmp_path):
    path, adapter, wanted = adapted
    ranks, keys = {**LAYOUTS, **MORE_LAYOUTS}[layout]
    size = 1 if "vpp2" in layout else 2
    keys = {"per_device_train_batch_size": size, **keys}
    check(path, wanted, tmp_path, [*SUMS], ranks, keys, adapter)


@pytest.mark.full
@pytest.mark.parametrize("keys", [{**EP2, **DIST_OPT}, {**EP2, **CP2}], ids=["ep2", "cp2ep2"])
def test_sums_of_losses_train_experts_as_plain_torch(keys, tmp_path):
    path = tiny_moe.save_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)
    [wanted] = world.run(oracles, 1, path, [*SUMS], timeout_s=240)
    check(path, wanted, tmp_path, [*SUMS], 2, {**PADDED, **keys})


def parts_of_a_run(path, out) -> tuple:
    """(the lines of a run of 4 steps with evaluations; of one that is saved after 2 and goes on;
    what the loss kept beyond a step, of both)"""
    keys = dict(PADDED, train_dataset=Pairs(), save_strategy="steps", save_steps=2)
    looks = dict(eval_strategy="steps", eval_steps=1, eval_dataset=Pairs(seed=5))
    whole = our_run(path, f"{out}/whole", MPO, **keys, **looks, max_steps=4)
    assert "eval_loss" in whole.state.log_history[-1]  # and it leaves no trace in the mean
    our_run(path, f"{out}/parts", MPO, **keys, max_steps=2)
    keys |= dict(max_steps=4, resume_from_checkpoint="auto", overwrite_output_dir=False)
    resumed = our_run(path, f"{out}/parts", MPO, **keys)
    return curve_of(whole), curve_of(resumed), whole.state.objective, resumed.state.objective


def test_a_resumed_run_has_the_running_mean_of_the_whole_one(start, tmp_path):
    [(whole, resumed, kept, kept_by_resumed)] = world.run(
        parts_of_a_run, 1, start[0], str(tmp_path)
    )
    assert resumed == whole and len(whole) == 4
    assert kept == kept_by_resumed and kept["bco_steps"] == 4 and kept["bco_mean"] != 0


def forgotten_column(path, out) -> str:
    """The refusal of pairs that have a margin here and none there."""
    data = PairsWithColumns()
    del data.pairs[3]["pair_margin"]
    try:
        our_run(path, out, MORE["columns"], train_dataset=data, max_steps=2)
    except ValueError as error:
        return str(error)
    return ""


def test_a_column_of_some_pairs_alone_is_refused(start, tmp_path):
    [text] = world.run(forgotten_column, 1, start[0], str(tmp_path))
    assert "some pairs have pair_margin, and others have not" in text


def test_the_page_has_the_rows_of_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \| ([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    found = {name: (word == "yes", {*re.findall(r"\w+_\w+", keys)}) for name, word, keys in rows}
    wanted = {name: (row.has_reference, {*row.keys}) for name, row in LOSSES.items()}
    assert found == wanted
