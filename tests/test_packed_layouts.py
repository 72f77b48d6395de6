"""Packed rows and context parallelism train as every sample alone does on plain torch, in every
layout.
"""

import pytest
import torch

from tests.shared import tiny, world
from tests.shared.cells import thinned
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.fixtures import torch_references, trained_references
from tests.shared.layouts import (
    CP2,
    CUT,
    DIST_OPT,
    FULL,
    PACKED,
    PACKED_LAYOUTS,
    PP2,
    SP,
    TP2,
    VPP2,
)
from tests.shared.training import BRIEF, assert_same_curve, train

EVERYWHERE = ["qwen3"]  # as in test_parity.py
FEW = ["tp2_sp", "cp2"]
# Beside them stand the same with sequence parallelism; stages that cp cuts, and messages of any
# length between virtual stages. How a padded row is cut knows of cp alone.
ELSEWHERE = ["cp2tp2", "cp2pp2_variable", "cp2pp2_vpp2"]
ELSEWHERE_PADDED = [name for name in CUT if name not in ("cp2", "cp4")]
LAYOUTS = {
    **{name: (ranks, {**keys, **PACKED}) for name, (ranks, keys) in PACKED_LAYOUTS.items()},
    **{f"{name}, padded": pair for name, pair in CUT.items()},
}


references = torch_references(**BRIEF)
trained = trained_references(LAYOUTS, **BRIEF)


def assert_same_run(references, family, curves, folder):
    _, curve, weights = references[family]
    for got in curves:
        assert_same_curve(got, curve)
    assert_same_tensors(tensors(folder), weights)


@pytest.mark.parametrize(
    "case, layout",
    thinned(tiny.FAMILY_KEYS, [n for n in PACKED_LAYOUTS if n not in ELSEWHERE], EVERYWHERE, FEW)
    + thinned(tiny.FAMILY_KEYS, ELSEWHERE, [], []),
)
def test_packed_rows_train_as_single_samples(case, layout, references, trained):
    """Two samples a row, other rows in each micro-batch, the last step of the epoch
    partly filled.
    """
    curves, folder = trained(layout)
    assert_same_run(references, case, [got[case] for got in curves], folder / case)


@pytest.mark.parametrize(
    "case, layout",
    thinned(
        ["llama", "qwen3"],
        [f"{n}, padded" for n in CUT if n not in ELSEWHERE_PADDED],
        EVERYWHERE,
        [],
    )
    + thinned(["llama", "qwen3"], [f"{n}, padded" for n in ELSEWHERE_PADDED], [], []),
)
def test_context_parallel_rows_train_as_whole_ones(case, layout, references, trained):
    curves, folder = trained(layout)
    assert_same_run(references, case, [got[case] for got in curves], folder / case)


def check(references, family, tmp_path, ranks, keys):
    keys = {**BRIEF, **keys, "export": True}
    got = world.run(train, ranks, references[family][0], str(tmp_path), **keys)
    assert_same_run(references, family, got, tmp_path)


def test_the_torch_backend_packs_with_the_same_numbers(references, tmp_path):
    check(references, "qwen3", tmp_path, 2, dict(PACKED, backend="torch"))


@pytest.mark.parametrize(
    "keys",
    [dict(FULL, **TP2, **SP), dict(recompute_granularity="selective", **CP2), dict(FULL, **CP2)],
)
def test_recomputation_of_packed_rows_changes_no_number(references, tmp_path, keys):
    ranks = 2
    check(references, "qwen3", tmp_path, ranks, {**keys, **PACKED})


MEAN = dict(PACKED, **BRIEF, calculate_per_token_loss=False)


@pytest.fixture(scope="module")
def means_on_torch(references, tmp_path_factory):
    path, out = references["qwen3"][0], str(tmp_path_factory.mktemp("means"))
    return world.run(train, 1, path, out, backend="torch", **MEAN)[0]


@pytest.mark.parametrize(
    "ranks, keys",
    [
        (1, {}),
        (2, CP2),
        (2, {**PP2, **VPP2}),
        (4, {**CP2, **DIST_OPT}),
        # rows are counted by cp, and means are collected over stages: the cells before
        pytest.param(4, {**CP2, **PP2}, marks=pytest.mark.full),
    ],
)
def test_mean_of_packed_micro_batches_agrees_with_torch(
    references, means_on_torch, tmp_path, ranks, keys
):
    """The other loss mode: rows are means of their own, so the same rows are packed on
    both sides.
    """
    path, wanted = references["qwen3"][0], means_on_torch
    assert abs(wanted[1][1] - references["qwen3"][1][1][1]) > 1e-3, (
        "the two loss modes do not differ on this data"
    )
    for got in world.run(train, ranks, path, str(tmp_path), **keys, **MEAN):
        assert_same_curve(got, wanted)


# -- token by token


def documents() -> list[dict]:
    return tiny.samples(5, seed=7)


def token_losses(path: str, cp: int = 1) -> dict:
    """Losses of five documents in one packed row, alone, and in a row in which the third document
    was changed.
    """
    import torch.distributed as dist

    from mca_lite import AutoModel, McaTrainer, TrainingArguments

    args = TrainingArguments(output_dir="unused", context_parallel_size=cp, sequence_packing=True)
    trainer = McaTrainer(AutoModel.from_pretrained(path, args), args)
    trainer.backend.train_mode(False)

    def run(docs):
        batch = trainer.data_collator(docs)
        with torch.no_grad():
            inputs = trainer._prepare_train_inputs(iter([batch]))
            local = trainer.models[0](**inputs)[0]
        layout = inputs["packed_seq_params"].layout
        whole = torch.zeros(len(local) * cp)
        whole[layout.index] = local
        if cp > 1:
            dist.all_reduce(whole)
        borders = inputs["packed_seq_params"].cu_seqlens_q.tolist()
        return [
            whole[a : a + len(d["labels"])].tolist() for a, d in zip(borders, docs, strict=False)
        ]

    changed = documents()
    changed[2]["input_ids"] = (changed[2]["input_ids"] + 1) % tiny.VOCAB
    return dict(
        packed=run(documents()),
        alone=[run([document])[0] for document in documents()],
        contaminated=run(changed),
    )


def token_losses_of_all(paths: dict, cp: int) -> dict:
    return {family: token_losses(path, cp) for family, path in paths.items()}


@pytest.mark.parametrize("cp", [1, 2])
def test_packed_equals_alone_token_by_token_and_no_document_moves_another(cp, references):
    paths = {family: reference[0] for family, reference in references.items()}
    for got in world.run(token_losses_of_all, cp, paths, cp)[0].values():
        for i, (packed, alone, contaminated) in enumerate(
            zip(got["packed"], got["alone"], got["contaminated"], strict=True)
        ):
            assert packed == pytest.approx(alone, rel=0, abs=1e-6)
            assert (packed == contaminated) == (i != 2)


def forget_the_borders(path: str) -> str:
    from mca_lite import AutoModel, McaTrainer, TrainingArguments

    args = TrainingArguments(output_dir="unused", sequence_packing=True)
    trainer = McaTrainer(AutoModel.from_pretrained(path, args), args)
    with pytest.raises(ValueError) as error:
        trainer.models[0](
            input_ids=torch.ones(1, 8, dtype=torch.long), labels=torch.ones(1, 8, dtype=torch.long)
        )
    return str(error.value)


def test_a_stage_without_the_borders_of_packed_rows_is_refused(references):
    assert "packed_seq_params" in world.run(forget_the_borders, 1, references["llama"][0])[0]


def packs_of(path: str, out: str, **keys) -> list:
    """A run over a dataset that is packed beforehand, as the packer does it."""
    import numpy as np

    from mca_lite import AutoModel, McaTrainer, TrainingArguments
    from mca_lite.data_batches import best_fit
    from mca_lite.model import load_torch_model

    class Packs:
        def __init__(self):
            self.samples = tiny.samples()
            lengths = np.array([len(s["input_ids"]) for s in self.samples])
            self.packs = best_fit(lengths, 40)
            self.work = np.array(
                [[lengths[p].sum(), (lengths[p] ** 2).sum()] for p in self.packs], dtype=float
            )

        def __len__(self):
            return len(self.packs)

        def __getitem__(self, i):
            chosen = [self.samples[j] for j in self.packs[i]]
            numbers = [torch.full((len(s["input_ids"]),), n + 1) for n, s in enumerate(chosen)]
            joined = {k: torch.cat([s[k] for s in chosen]) for k in ("input_ids", "labels")}
            return {**joined, "attention_mask": torch.cat(numbers)}

    backend = keys.pop("backend", "megatron")
    args = TrainingArguments(
        output_dir=out, max_steps=3, logging_steps=1, learning_rate=1e-3, global_batch_size=4,
        sequence_packing=True,
        save_strategy="no", disable_tqdm=True, **keys,
    )  # fmt: skip
    model = (
        AutoModel.from_pretrained(path, args) if backend == "megatron" else load_torch_model(path)
    )
    trainer = McaTrainer(model, args, train_dataset=Packs())
    trainer.train()
    return [(h["loss"], h["grad_norm"], h["consumed_tokens"]) for h in trainer.state.log_history]


@pytest.fixture(scope="module")
def packs_on_torch(references, tmp_path_factory):
    path, out = references["qwen2"][0], str(tmp_path_factory.mktemp("packs"))
    return world.run(packs_of, 1, path, out, backend="torch")[0]


# what a pack holds is read before a row is cut: cp2tp2_sp is trained above
@pytest.mark.parametrize(
    "ranks, keys",
    [(2, {}), (2, CP2), (2, PP2), pytest.param(4, {**CP2, **TP2, **SP}, marks=pytest.mark.full)],
)
def test_packs_of_the_packer_train_alike(references, packs_on_torch, tmp_path, ranks, keys):
    path, wanted = references["qwen2"][0], packs_on_torch
    for got in world.run(packs_of, ranks, path, str(tmp_path), **keys):
        assert_same_curve([g[:2] for g in got], [w[:2] for w in wanted])
        assert [g[2] for g in got] == [w[2] for w in wanted], (
            "tokens are counted once, without padding"
        )
