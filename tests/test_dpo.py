"""DPO and ORPO in every layout train as plain transformers and torch do: 8 metrics and gradient
norm, for whole curves.
"""

import functools
import itertools

import pytest
import torch

from tests.shared import tiny, world
from tests.shared.dpo_tools import (
    BETAS,
    COUNT,
    DECAY,
    EPS,
    GLOBAL_BATCH,
    KEYS,
    OBJECTIVES,
    RATE,
    Pairs,
    curve_of,
    differences,
    make_oracles,
    oracle_curve,
    our_run,
)
from tests.shared.layouts import CP2, DIST_OPT, OVERLAP, PACKED, PP2, SP, TP2, VPP2

PADDED = dict(per_device_train_batch_size=2)
# objective, what is trained, rows; each objective in padded and packed rows, and both with and
# without adapters
HALF = [
    ("sigmoid", "full", "packed"),
    ("sigmoid", "lora", "padded"),
    ("smoothed", "full", "padded"),
    ("smoothed", "lora", "packed"),
    ("orpo", "full", "padded"),
    ("orpo", "lora", "packed"),
]
FEW = [("sigmoid", "full", "packed"), ("smoothed", "lora", "padded"), ("orpo", "lora", "packed")]
LAYOUTS = {
    "dp2": (2, {}, FEW),
    "tp2": (2, TP2, FEW),
    "pp2": (2, PP2, FEW),
    "pp2_vpp2": (2, {**PP2, **VPP2}, HALF),
    "cp2": (2, CP2, FEW),
    "tp2pp2": (4, {**TP2, **PP2}, FEW),
    "torch_on_two": (2, dict(backend="torch"), FEW),
    "dp2_overlap": (2, OVERLAP, FEW),
    "tp2sp_cp2": (4, {**TP2, **SP, **CP2}, FEW),
    "cp2pp2_dist_opt": (4, {**CP2, **PP2, **DIST_OPT}, FEW),
    "pp2_vpp2_variable": (2, {**PP2, **VPP2, "variable_seq_lengths": True}, FEW),
}
# Logits are cut by tp and metrics sent over stages, each alone at tp2 and pp2; messages of any
# length between virtual stages know nothing of pairs: test_packed_layouts.
PRODUCTS = ("tp2pp2", "pp2_vpp2_variable", "cp2pp2_dist_opt")
WHOLE_PRODUCT = ("dp2", "tp2", "pp2", "pp2_vpp2", "cp2", "tp2pp2")
ALL = [*itertools.product(OBJECTIVES, ("full", "lora"), ("padded", "packed"))]


@pytest.fixture(scope="module")
def dpo_oracles(tmp_path_factory):
    """(model folder, folder of the adapter to start from, {(objective, kind): curve})"""
    folder = tmp_path_factory.mktemp("dpo")
    path = tiny.save_model(folder / "model", "qwen3")
    [curves] = world.run(make_oracles, 1, path, str(folder), timeout_s=120)
    return path, f"{folder}/start", curves


def cells_of(path, adapter, out, cells, keys) -> list:
    """[(cell, curve)] of several runs in one world."""
    found = []
    for objective, kind, rows in cells:
        trainer = our_run(
            path, f"{out}/{objective}-{kind}-{rows}", OBJECTIVES[objective],
            adapter if kind == "lora" else None,
            **{**(PACKED if rows == "packed" else PADDED), **keys},
        )  # fmt: skip
        found.append(((objective, kind, rows), curve_of(trainer)))
    return found


@pytest.mark.parametrize(
    "layout, cells",
    [
        pytest.param(layout, cells, marks=[pytest.mark.full] if layout in PRODUCTS else [])
        for layout, (_, _, cells) in LAYOUTS.items()
    ]
    + [
        pytest.param(
            layout, [c for c in ALL if c not in LAYOUTS[layout][2]], marks=pytest.mark.full
        )
        for layout in WHOLE_PRODUCT
    ],
)
def test_every_objective_trains_as_plain_torch(layout, cells, dpo_oracles, tmp_path):
    path, adapter, curves = dpo_oracles
    ranks, keys, _ = LAYOUTS[layout]
    if "pp2_vpp2" in layout:  # virtual stages want two micro-batches
        keys = {**keys, "per_device_train_batch_size": 1}
    wrong = []
    for rank, found in enumerate(
        world.run(cells_of, ranks, path, adapter, str(tmp_path), cells, keys, timeout_s=120)
    ):
        for (objective, kind, rows), curve in found:
            wrong += [
                f"rank {rank} {objective} {kind} {rows}: {d}"
                for d in differences(curve, curves[objective, kind])
            ]
            assert curve[-1]["consumed_tokens"] == Pairs().num_tokens, (
                "both sides, once, without padding"
            )
    assert not wrong, "\n".join(wrong[:20])


def steps_by_hand(path, out, backend, ref, keys) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the steps of an oracle's curve, each by training_step alone."""
    from mca_lite import AutoModel, DPOConfig, DPOTrainer, TrainingArguments
    from mca_lite.model import load_torch_model

    args = TrainingArguments(out, **{**KEYS, **keys})
    from_hf = load_torch_model
    if backend == "megatron":
        from_hf = functools.partial(AutoModel.from_pretrained, args=args)
    model, given = from_hf(path), dict(optimizer=None, lr_scheduler=None)
    if backend == "torch":
        matrices = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        groups = [dict(params=matrices, weight_decay=DECAY), dict(params=rest, weight_decay=0.0)]
        optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        given = dict(optimizer=optimizer, lr_scheduler=scheduler)
    trainer = DPOTrainer(
        model=model,
        train_config=DPOConfig(0.3, "sigmoid"),
        ref_model=from_hf(path) if ref else None,
        args=args,
        train_dataset=Pairs(),
        **given,
    )
    batches, found = iter(trainer.get_train_dataloader()), []
    for count in (GLOBAL_BATCH, COUNT - GLOBAL_BATCH):
        loss, metrics, skipped, grad_norm, num_zeros = trainer.training_step(
            models=trainer.models, data_iterator=itertools.islice(batches, count), seq_length=2048
        )
        assert skipped == 0 and len(metrics) in (0, count)
        found.append((float(loss), grad_norm))
    return found


@pytest.mark.parametrize(
    ("ranks", "backend", "ref", "keys"),
    [
        (1, "torch", True, {}),
        (1, "megatron", True, {}),
        (1, "megatron", False, dict(sequence_packing=True)),
        (2, "megatron", False, {**PP2, "max_steps": -1, "num_train_epochs": 1}),
    ],
)
def test_steps_by_hand_of_a_train_dataloader_are_those_of_a_run(
    ranks, backend, ref, keys, dpo_oracles, tmp_path
):
    path, _, curves = dpo_oracles
    *_, found = world.run(steps_by_hand, ranks, path, str(tmp_path), backend, ref, keys)
    wanted = [(line["loss"], line["grad_norm"]) for line in curves["sigmoid", "full"]]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def oracle_of_packs(path, objective, capacity) -> list:
    """The packs are those of mca_lite's packer, whose own test is in test_packed_rows."""
    import torch
    from transformers import AutoModelForCausalLM

    from mca_lite.data_batches import Packs

    packs = [pack.tolist() for pack in Packs(Pairs(), capacity).packs]
    assert sorted(j for pack in packs for j in pack) == list(range(len(Pairs()))), (
        "every pair is in one pack"
    )
    assert len({len(pack) for pack in packs}) > 1, "rows with other numbers of pairs are wanted"
    return oracle_curve(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), objective, packs=packs
    )


def curve_of_packs(path, out, objective, capacity, keys) -> list:
    return curve_of(our_run(path, out, objective, pack=capacity, sequence_packing=True, **keys))


@pytest.mark.parametrize(
    "ranks, keys",
    [
        (2, dict(backend="torch")),
        (2, CP2),
        (2, {**PP2, **VPP2}),
        # rows of pairs that sequence and context parallelism cut: "packed" of LAYOUTS["tp2sp_cp2"]
        pytest.param(4, {**TP2, **SP, **CP2, **DIST_OPT}, marks=pytest.mark.full),
    ],
    ids=["torch", "cp2", "pp2_vpp2", "tp2sp_cp2"],
)
def test_packs_of_pairs_weigh_every_pair_alike(ranks, keys, dpo_oracles, tmp_path):
    """Rows hold other numbers of pairs: the mean is over pairs, not over rows."""
    path, capacity = dpo_oracles[0], 35
    [wanted] = world.run(oracle_of_packs, 1, path, OBJECTIVES["smoothed"], capacity)
    for got in world.run(
        curve_of_packs, ranks, path, str(tmp_path), OBJECTIVES["smoothed"], capacity, keys
    ):
        assert not differences(got, wanted)
