"""Packed rows and context parallelism train as every sample alone does on plain torch, in every layout."""

import pytest
import torch

from tests import tiny, world
from tests.test_parity import DIST_OPT, OVERLAP, PP2, SP, TP2, VPP2, assert_same_curve, exported
from tests.training import train

CP2 = dict(context_parallel_size=2)
CP4 = dict(context_parallel_size=4)
PP4 = dict(pipeline_model_parallel_size=4)
PACKED = dict(sequence_packing=True, per_device_train_batch_size=2)
FULL = dict(recompute_granularity="full")

CUT = {
    "cp2": (2, CP2),
    "cp4": (4, CP4),
    "cp2tp2": (4, {**CP2, **TP2}),
    "cp2tp2_sp": (4, {**CP2, **TP2, **SP}),
    "cp2pp2": (4, {**CP2, **PP2}),
    "cp2dp2": (4, {**CP2, **DIST_OPT}),
}
PACKED_LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, TP2),
    "tp2_sp": (2, {**TP2, **SP}),
    "pp2": (2, PP2),
    "pp2_variable": (2, {**PP2, "variable_seq_lengths": True}),
    "pp4": (4, PP4),
    "pp2_vpp2": (2, {**PP2, **VPP2}),
    "pp2_vpp2_variable": (2, {**PP2, **VPP2, "variable_seq_lengths": True}),
    "tp2sp_pp2": (4, {**TP2, **SP, **PP2}),
    "dp2_overlap": (2, OVERLAP),
    **CUT,
    "cp2pp2_variable": (4, {**CP2, **PP2, "variable_seq_lengths": True}),
    "cp2pp2_vpp2": (4, {**CP2, **PP2, **VPP2}),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """{family: (model folder, curve of the torch backend on one rank with one sample a row, its weights)}"""
    out = {}
    for family in tiny.FAMILY_KEYS:
        folder = tmp_path_factory.mktemp(family)
        path = tiny.save_model(folder / "model", family)
        [curve] = world.run(train, 1, path, str(folder / "out"), backend="torch", export=True)
        out[family] = path, curve, exported(folder / "out")
    return out


def check(references, family, tmp_path, ranks, keys):
    path, curve, weights = references[family]
    for got in world.run(train, ranks, path, str(tmp_path), export=True, **keys):
        assert_same_curve(got, curve)
    for name, value in exported(tmp_path).items():
        torch.testing.assert_close(
            value, weights[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize("family", tiny.FAMILY_KEYS)
def test_packed_rows_train_as_single_samples(family, layout, references, tmp_path):
    """Two samples a row, other rows in each micro-batch, the last step of the epoch partly filled."""
    ranks, keys = PACKED_LAYOUTS[layout]
    check(references, family, tmp_path, ranks, {**keys, **PACKED})


@pytest.mark.parametrize("layout", CUT)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_context_parallel_rows_train_as_whole_ones(family, layout, references, tmp_path):
    ranks, keys = CUT[layout]
    check(references, family, tmp_path, ranks, keys)


def test_the_torch_backend_packs_with_the_same_numbers(references, tmp_path):
    check(references, "qwen3", tmp_path, 2, dict(PACKED, backend="torch"))


@pytest.mark.parametrize(
    "keys",
    [dict(FULL, **TP2, **SP), dict(recompute_granularity="selective", **CP2), dict(FULL, **CP2)],
)
def test_recomputation_of_packed_rows_changes_no_number(references, tmp_path, keys):
    ranks = 2
    check(references, "qwen3", tmp_path, ranks, {**keys, **PACKED})


MEAN = dict(PACKED, calculate_per_token_loss=False)


@pytest.mark.parametrize(
    "ranks, keys",
    [(1, {}), (2, CP2), (4, {**CP2, **PP2}), (2, {**PP2, **VPP2}), (4, {**CP2, **DIST_OPT})],
)
def test_mean_of_packed_micro_batches_agrees_with_torch(references, tmp_path, ranks, keys):
    """The other loss mode: rows are means of their own, so the same rows are packed on both sides."""
    path = references["qwen3"][0]
    [wanted] = world.run(train, 1, path, str(tmp_path / "torch"), backend="torch", **MEAN)
    assert abs(wanted[1][1] - references["qwen3"][1][1][1]) > 1e-3, (
        "the two loss modes do not differ on this data"
    )
    for got in world.run(train, ranks, path, str(tmp_path), **keys, **MEAN):
        assert_same_curve(got, wanted)


# -- token by token


def documents() -> list[dict]:
    return tiny.samples(5, seed=7)


def token_losses(path: str, cp: int = 1) -> dict:
    """Losses of five documents in one packed row, alone, and in a row in which the third document was changed."""
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


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("family", tiny.FAMILY_KEYS)
def test_packed_equals_alone_token_by_token_and_no_document_moves_another(family, cp, references):
    path = references[family][0]
    got = world.run(token_losses, cp, path, cp)[0]
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
    from mca_lite.data_packs import best_fit
    from mca_lite.model import load_torch_model

    class Packs:
        def __init__(self):
            self.samples = tiny.samples()
            lengths = np.array([len(s["input_ids"]) for s in self.samples])
            self.packs = best_fit(lengths, 40)
            self.costs = np.array([(lengths[p] ** 2).sum() for p in self.packs])

        def __len__(self):
            return len(self.packs)

        def __getitem__(self, i):
            chosen = [self.samples[j] for j in self.packs[i]]
            numbers = [torch.full((len(s["input_ids"]),), n + 1) for n, s in enumerate(chosen)]
            joined = {k: torch.cat([s[k] for s in chosen]) for k in ("input_ids", "labels")}
            return {**joined, "attention_mask": torch.cat(numbers)}

    backend = keys.pop("backend", "megatron")
    args = TrainingArguments(
        output_dir=out, max_steps=3, logging_steps=1, learning_rate=1e-3, global_batch_size=4, sequence_packing=True,
        save_strategy="no", disable_tqdm=True, **keys,
    )  # fmt: skip
    model = (
        AutoModel.from_pretrained(path, args) if backend == "megatron" else load_torch_model(path)
    )
    trainer = McaTrainer(model, args, train_dataset=Packs())
    trainer.train()
    return [(h["loss"], h["grad_norm"], h["consumed_tokens"]) for h in trainer.state.log_history]


@pytest.mark.parametrize("ranks, keys", [(2, {}), (2, CP2), (2, PP2), (4, {**CP2, **TP2, **SP})])
def test_packs_of_the_packer_train_alike(references, tmp_path, ranks, keys):
    path = references["qwen2"][0]
    [wanted] = world.run(packs_of, 1, path, str(tmp_path / "torch"), backend="torch")
    for got in world.run(packs_of, ranks, path, str(tmp_path), **keys):
        assert_same_curve([g[:2] for g in got], [w[:2] for w in wanted])
        assert [g[2] for g in got] == [w[2] for w in wanted], (
            "tokens are counted once, without padding"
        )
