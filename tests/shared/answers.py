"""Set-up that the tests of labelled answers and of reward models share: layouts, a run of a trainer
in any of them, and the steps of plain torch as the oracle.
"""

import math

import numpy as np
import pytest
import torch

from tests.shared import world
from tests.shared.dpo_tools import (
    BETAS,
    CLIP,
    COUNT,
    DECAY,
    EPS,
    GLOBAL_BATCH,
    KEYS,
    RATE,
    curve_of,
    differences,
)
from tests.shared.layouts import CP2, DIST_OPT, OVERLAP, PACKED, PP2, SP, TP2, VPP2

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
CELLS = [f"{kind} {rows}" for kind in ("full", "lora") for rows in ROWS]


def cells_of_layouts(usual: dict[str, tuple[str, ...]]) -> list:
    """(layout, its cells "full packed" and so on): those of `make test`, and the others as full."""
    others = [
        pytest.param(
            layout,
            [cell for cell in CELLS if cell not in usual.get(layout, ())],
            marks=pytest.mark.full,
        )
        for layout in LAYOUTS
    ]
    return [*usual.items(), *others]


# -- runs of ours; `run` is the kto_run or the rm_run of a test


def trained(
    trainer_class,
    config,
    path,
    output_dir,
    data: dict,
    adapter=None,
    backend="megatron",
    pack=0,
    ref=False,
    before=None,
    **changes,
):
    """The trainer after a run; the arguments are those of dpo_tools.our_run. data: the trainer's
    other keywords, by default."""
    from mca_lite import AutoModel, TrainingArguments
    from mca_lite.data_batches import Packs
    from mca_lite.model import load_torch_model
    from mca_lite.part_lora import load_adapter

    data = {name: changes.pop(name, default) for name, default in data.items()}
    args = TrainingArguments(output_dir, **{**KEYS, **changes})

    def load():
        if backend == "megatron":
            return AutoModel.from_pretrained(path, args)
        return load_torch_model(path)

    model = load_adapter(load(), adapter) if adapter else load()
    if pack:
        sets = {name: data[name] for name in ("train_dataset", "eval_dataset")}
        data |= {name: dataset and Packs(dataset, pack) for name, dataset in sets.items()}
    if ref:
        data["ref_model"] = load()
    trainer = trainer_class(model, config, args=args, **data)
    if before is not None:
        before(trainer)
    trainer.train()
    return trainer


def curves_of_cells(run, path, adapter, out, cells, keys) -> list:
    """[(cell, curve)] of several runs in one world."""
    found = []
    for cell in cells:
        kind, rows = cell.split()
        start = adapter if kind == "lora" else None
        given = {**ROWS[rows], **keys, "max_steps": STEPS}
        found.append((cell, curve_of(run(path, f"{out}/{kind}-{rows}", start, **given))))
    return found


def wrong_cells(found: list, curves: dict) -> list[str]:
    """Differences of curves_of_cells' on each rank from {"full" or "lora": curve}."""
    return [
        f"rank {rank} {cell}: {difference}"
        for rank, of_rank in enumerate(found)
        for cell, curve in of_rank
        for difference in differences(curve, curves[cell.split()[0]])
    ]


def curve_of_run(run, path, out, keys) -> list:
    return curve_of(run(path, out, **keys))


def wrong_of_layout(run, layout: str, cells, oracles: tuple, out) -> str:
    """The first differences of a layout's cells from oracles, (model's folder, that of the adapter
    to start from, {"full" or "lora": curve})."""
    path, adapter, curves = oracles
    ranks, keys = LAYOUTS[layout]
    args = (run, path, adapter, str(out), cells, keys)
    found = world.run(curves_of_cells, ranks, *args, timeout_s=120)
    return "\n".join(wrong_cells(found, curves)[:20])


def assert_every_rank_has(wanted: list, ranks: int, run, path, out, keys) -> None:
    """Check the curve of a run on each of its ranks."""
    for got in world.run(curve_of_run, ranks, run, path, str(out), keys):
        assert not differences(got, wanted)


OF_PACKS = dict(pack=35, sequence_packing=True, max_steps=2)


def packs_of(samples) -> list[list[int]]:
    """The numbers of the samples in each pack of a run with OF_PACKS."""
    from mca_lite.data_batches import Packs

    packs = [pack.tolist() for pack in Packs(samples, OF_PACKS["pack"]).packs]
    assert len({len(pack) for pack in packs}) > 1, "rows with other numbers of samples are wanted"
    return packs


def assert_resumed_bit_for_bit(run, path, out, keys) -> None:
    """Check a run at pp2 that goes on after its second step."""
    args = (run, path, str(out), {**PP2, **keys})
    whole, parts = world.run(whole_and_resumed, 2, *args)[0]
    assert parts == whole and len(whole) == 3


def whole_and_resumed(run, path, out, keys) -> tuple:
    """(curve of a run, curve of a run that goes on from a checkpoint after its second step)"""
    keys = {**keys, "attention_dropout": 0.1}
    whole = curve_of(run(path, f"{out}/whole", max_steps=3, **keys))
    saving = dict(save_strategy="steps", save_steps=2, max_steps=2)
    run(path, f"{out}/parts", **{**keys, **saving})
    checkpoint = f"{out}/parts/checkpoint-2"
    resumed = run(path, f"{out}/parts", max_steps=3, resume_from_checkpoint=checkpoint, **keys)
    return whole, curve_of(resumed)


# -- the oracle


def curve_of_steps(model, numbers, steps: int, packs=None) -> list[dict]:
    """The curve for such a run: one sample after another, torch's AdamW, the trainer's permutation.

    numbers: (model, numbers of a batch's samples) -> (losses, metrics). packs: the numbers of the
    samples of each pack.
    """
    model.eval()
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)
    packs = [[i] for i in range(COUNT)] if packs is None else packs
    per_epoch = math.ceil(len(packs) / GLOBAL_BATCH)
    curve = []
    for step in range(steps):
        epoch, i = divmod(step, per_epoch)
        order = np.random.default_rng([7, epoch]).permutation(len(packs))
        chosen = [j for p in order[i * GLOBAL_BATCH : (i + 1) * GLOBAL_BATCH] for j in packs[p]]
        losses, metrics = numbers(model, chosen)
        optimizer.zero_grad()
        losses.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        curve.append({**metrics, "grad_norm": float(norm)})
    return curve
