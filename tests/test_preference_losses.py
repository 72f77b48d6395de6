"""Every preference loss, and every switch of them, trains in a layout as plain torch does: 8
metrics and the gradient's norm of each step, over global batches of 4 and 3 pairs.
"""

import re
from pathlib import Path

import pytest
import torch

from mca_lite.tables import LOSSES
from tests.shared import preference_oracle, tiny, world
from tests.shared.dpo_tools import Pairs, curve_of, differences, our_run
from tests.shared.layouts import CP2, PACKED, PP2, TP2

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
}


class PairsWithColumns(Pairs):
    """Pairs with weights and margins."""

    def __init__(self):
        super().__init__()
        for i, pair in enumerate(self.pairs):
            pair.update(pair_weight=0.5 + 0.25 * i, pair_margin=0.1 * i)


def pairs_of(name: str) -> Pairs:
    return PairsWithColumns() if name == "columns" else Pairs()


def oracles(path) -> dict:
    from transformers import AutoModelForCausalLM

    found = {}
    for name, objective in ALL.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        found[name] = preference_oracle.curve(model, objective, pairs_of(name).pairs, STEPS)
    return found


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """(model folder, {name: curve of plain torch})"""
    path = tiny.save_model(tmp_path_factory.mktemp("losses") / "model", "qwen3")
    [curves] = world.run(oracles, 1, path, timeout_s=240)
    return path, curves


def curves_of(path, out, names, keys) -> dict:
    found = {}
    for i, name in enumerate(names):
        keys = dict(keys, train_dataset=pairs_of(name), max_steps=STEPS)
        found[name] = curve_of(our_run(path, f"{out}/{i}", ALL[name], **keys))
    return found


def check(start, out, names, ranks, keys) -> None:
    path, wanted = start
    for found in world.run(curves_of, ranks, path, str(out), names, keys, timeout_s=240):
        wrong = {name: differences(found[name], wanted[name]) for name in names}
        assert not any(wrong.values()), wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_loss_trains_as_plain_torch(layout, start, tmp_path):
    names = [*ROWS, *MORE] if layout == "one" else [*SUMS]
    check(start, tmp_path, names, *LAYOUTS[layout])


def test_the_page_has_the_rows_of_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \| ([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    found = {name: (word == "yes", {*re.findall(r"\w+_\w+", keys)}) for name, word, keys in rows}
    wanted = {name: (row.has_reference, {*row.keys}) for name, row in LOSSES.items()}
    assert found == wanted
