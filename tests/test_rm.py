"""Reward models in every layout train as transformers' models for sequence classification do: loss,
metrics and gradient norm of whole curves, files, scores.
"""

import pytest

from mca_lite.data_batches import Collator
from tests.shared import world
from tests.shared.chats import load_files, write_records
from tests.shared.commands import error_of
from tests.shared.dpo_tools import curve_of, differences
from tests.shared.layouts import CP2, DIST_OPT, OVERLAP, PACKED, PP2, SP, TP2, VPP2
from tests.shared.rm_tools import make_oracles, rm_run, save_model

STEPS = 3
ROWS = {"padded": dict(per_device_train_batch_size=2), "packed": PACKED}
LAYOUTS = {
    "one": (1, {}),
    "tp2pp2": (4, {**TP2, **PP2}),
    "cp2": (2, CP2),
    "torch": (1, dict(backend="torch")),
    "dp2": (2, DIST_OPT),
    "dp2_overlap": (2, OVERLAP),
    "tp2sp": (2, {**TP2, **SP}),
    "pp2": (2, PP2),
    "pp2_vpp2": (2, {**PP2, **VPP2, "per_device_train_batch_size": 1}),
    "pp2_variable": (2, {**PP2, "variable_seq_lengths": True}),
    "tp2sp_cp2": (4, {**TP2, **SP, **CP2}),
    "cp2pp2_dist_opt": (4, {**CP2, **PP2, **DIST_OPT}),
    "torch_on_two": (2, dict(backend="torch")),
}
USUAL = {
    "one": ("full padded", "lora packed"),
    "tp2pp2": ("full padded", "lora packed"),
    "cp2": ("full packed",),
    "torch": ("lora padded",),
    "tp2sp": ("full packed",),
}
CELLS = [f"{kind} {rows}" for kind in ("full", "lora") for rows in ROWS]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    """(model folder, folder of the adapter to start from, {kind: curve})"""
    folder = tmp_path_factory.mktemp("rm")
    path = save_model(folder / "model")
    [curves] = world.run(make_oracles, 1, path, str(folder), STEPS, timeout_s=120)
    return path, f"{folder}/start", curves


def cells_of(path, adapter, out, cells, keys) -> list:
    """[(cell, curve)] of several runs in one world."""
    found = []
    for cell in cells:
        kind, rows = cell.split()
        start = adapter if kind == "lora" else None
        trainer = rm_run(
            path, f"{out}/{kind}-{rows}", start, **{**ROWS[rows], **keys, "max_steps": STEPS}
        )
        found.append((cell, curve_of(trainer)))
    return found


@pytest.mark.parametrize(
    "layout, cells",
    [(layout, cells) for layout, cells in USUAL.items()]
    + [
        pytest.param(
            layout,
            [cell for cell in CELLS if cell not in USUAL.get(layout, ())],
            marks=pytest.mark.full,
        )
        for layout in LAYOUTS
    ],
)
def test_a_reward_model_trains_as_plain_torch(layout, cells, oracles, tmp_path):
    path, adapter, curves = oracles
    ranks, keys = LAYOUTS[layout]
    found = world.run(cells_of, ranks, path, adapter, str(tmp_path), cells, keys, timeout_s=120)
    wrong = [
        f"rank {rank} {cell}: {difference}"
        for rank, of_rank in enumerate(found)
        for cell, curve in of_rank
        for difference in differences(curve, curves[cell.split()[0]])
    ]
    assert not wrong, "\n".join(wrong[:20])


# -- pairs of files


def test_pairs_of_files_are_whole_and_have_margins_and_weights(tmp_path):
    record = {"prompt": "a", "chosen": "good", "rejected": "bad", "gap": 0.5, "trust": 2}
    path = write_records(tmp_path / "a.jsonl", record, {**record, "gap": 0})
    keys = dict(stage="rm", pair_margin="gap", pair_weight="trust")
    dataset = load_files(tmp_path, path, **keys).train
    batch = Collator(0)(list(dataset))
    assert batch["pair_margin"].tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert set(batch["pair_weight"].flatten().tolist()) == {2.0}
    ends = [side["input_ids"][-1] for side in dataset[0]]
    assert ends[0] == ends[1], "the last token of the template is an input"
    path = write_records(tmp_path / "b.jsonl", {**record, "gap": None})
    assert "gap" in error_of(load_files, tmp_path, path, **keys)


def test_margins_are_refused_where_no_pair_is(tmp_path):
    path = write_records(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b", "label": 1})
    said = error_of(load_files, tmp_path, path, stage="kto", pair_margin="gap")
    assert "stage kto has no pairs" in said
