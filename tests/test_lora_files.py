"""Adapters in files: PEFT loads ours, we load PEFT's; merging; checkpoints that hold only what
trains.
"""

import functools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.shared import small_runs, tiny, world
from tests.shared.files import tensors
from tests.shared.layouts import CP2, DIST_OPT, OVERLAP, PP2, SAVE, SP, TP2, TWO_ROWS, VPP2
from tests.shared.lora_tools import (
    EVERYTHING,
    KEYS,
    RANK,
    adapter_of,
    load,
    logits,
    make,
    peft_model,
    train_from_adapter,
)
from tests.shared.training import assert_same_curve, read_log, train

LAYOUTS = {
    "one": (1, TWO_ROWS),
    "dp2_dist_opt": (2, DIST_OPT),
    "dp2_overlap": (2, OVERLAP),
    "tp2": (2, {**TP2, **TWO_ROWS}),
    "tp2_sp": (2, {**TP2, **SP, **TWO_ROWS}),
    "pp2_vpp2": (2, {**PP2, **VPP2, **TWO_ROWS}),
    "cp2": (2, CP2),
    "tp2sp_pp2_vpp2": (4, {**TP2, **SP, **PP2, **VPP2}),
    "torch": (2, dict(backend="torch")),
}


# With overlap and buckets the optimizer is distributed too: that cell stays. What one step of
# tensor parallelism cuts is cut with sequence parallelism as well.
THINNED = ("dp2_dist_opt", "tp2")


def some(layouts) -> list:
    """Parameters of the layouts, with the mark full where another layout proves the same."""
    return [pytest.param(n, marks=[pytest.mark.full] if n in THINNED else []) for n in layouts]


@pytest.fixture(scope="module")
def adapted_everywhere(tmp_path_factory):
    """(model folder, folder of a peft adapter of it that adapts everything)"""
    folder = tmp_path_factory.mktemp("lora_files")
    path = tiny.save_model(folder / "model", "llama")
    peft_model(path, EVERYTHING).save_pretrained(folder / "adapter")
    return path, str(folder / "adapter")


def through_us(path: str, adapter: str, output_dir: str, **changes) -> None:
    """A PEFT adapter in and out again, and merged."""
    model, backend = make(path, output_dir, **changes)
    backend = backend(load(adapter, model))
    backend.export_hf(output_dir, "20KB")
    backend.export_merged(f"{output_dir}/merged", "20KB")


IN_BF16 = ("one", "dp2_dist_opt", "dp2_overlap", "tp2_sp", "pp2_vpp2")


def all_of_a_layout(path: str, adapter: str, out: str, keys: dict, in_bf16: bool) -> tuple:
    """(what `buffers` finds, the curve of a run in bf16), or Nones; out/through and out/fresh hold
    what `through_us` and `fresh` write, out/bf16 the run's adapters.
    """
    through_us(path, adapter, f"{out}/through", **keys)
    fresh(path, f"{out}/fresh", ("all", "embed_tokens"), **keys)
    if not in_bf16:
        return None, None
    keys = {**keys, "bf16": True}
    held = buffers(path, adapter, f"{out}/held", **keys)
    return held, train_from_adapter(path, f"{out}/bf16", adapter, steps=2, **keys)


@pytest.fixture(scope="module")
def layout_of(adapted_everywhere, tmp_path_factory):
    """run(layout) -> (folder, what each rank answers) of `all_of_a_layout`, in one world."""

    @functools.cache
    def run(layout: str):
        out, (ranks, keys) = tmp_path_factory.mktemp(layout), LAYOUTS[layout]
        args = (*adapted_everywhere, str(out), keys, layout in IN_BF16)
        return out, world.run(all_of_a_layout, ranks, *args)

    return run


@pytest.mark.parametrize("layout", some(LAYOUTS))
def test_adapters_and_merged_weights_come_out_of_every_layout(
    adapted_everywhere, layout_of, layout
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    (path, adapter), out = adapted_everywhere, layout_of(layout)[0] / "through"
    ours, theirs = adapter_of(out), adapter_of(adapter)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    wanted = logits(peft_model(path, EVERYTHING))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), str(out))
    torch.testing.assert_close(logits(loaded), wanted, rtol=0, atol=1e-6)
    merged = AutoModelForCausalLM.from_pretrained(out / "merged")
    torch.testing.assert_close(logits(merged), wanted, rtol=0, atol=1e-5)
    before, after = load_file(Path(path) / "model.safetensors"), tensors(out / "merged")
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert same == [name for name in before if name.endswith("norm.weight")]


def test_a_rank_stabilised_adapter_stays_one_in_files(adapted_everywhere, tmp_path):
    """Scaled by alpha / sqrt(rank): a file that forgot it would be scaled by half of that where it
    is loaded.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = adapted_everywhere[0]
    theirs = peft_model(path, use_rslora=True)
    theirs.save_pretrained(tmp_path / "adapter")
    world.run(through_us, 1, path, str(tmp_path / "adapter"), str(tmp_path / "ours"))
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path), str(tmp_path / "ours")
    )
    torch.testing.assert_close(logits(loaded), logits(theirs), rtol=0, atol=1e-6)


def with_dropout(path: str, adapter: str, output_dir: str, tokens: list) -> list:
    """Logits while training, with torch's generator at a known place."""
    model, _ = make(path, output_dir)
    load(adapter, model).train()
    torch.manual_seed(5)
    return model.gather_logits(model(torch.tensor(tokens))).tolist()


def test_dropout_comes_before_a_and_drops_what_pefts_drops(adapted_everywhere, tmp_path):
    path, tokens = adapted_everywhere[0], [[3, 1, 4, 1, 5, 9, 2, 6]]
    theirs = peft_model(path, ["layers.0.self_attn.o_proj"], lora_dropout=0.5).train()
    theirs.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(5)
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits
        assert (wanted - theirs.eval()(torch.tensor(tokens)).logits).abs().max() > 1e-3
    [got] = world.run(with_dropout, 1, path, str(tmp_path / "adapter"), str(tmp_path), tokens)
    torch.testing.assert_close(torch.tensor(got), wanted, rtol=0, atol=1e-5)


def test_the_config_is_pefts(adapted_everywhere, tmp_path):
    path, adapter = adapted_everywhere
    world.run(through_us, 1, path, adapter, str(tmp_path))
    ours, theirs = (
        json.loads((Path(f) / "adapter_config.json").read_text()) for f in (tmp_path, adapter)
    )
    assert ours.pop("base_model_name_or_path") == theirs.pop("base_model_name_or_path") == path
    assert sorted(ours.pop("target_modules")) == sorted(theirs.pop("target_modules"))
    assert ours == {key: theirs[key] for key in ours}


def megatron_logits(path: str, adapter: str, output_dir: str, **changes):
    from mca_lite import part_lora

    model, _ = make(path, output_dir, **changes)
    load(adapter, model).eval()
    tokens = torch.arange(48).reshape(2, 24) % tiny.VOCAB
    positions = torch.arange(24).expand(2, 24)
    with torch.no_grad():
        on = model.gather_logits(model(tokens, positions))
        with part_lora.without_adapters(model):
            off = model.gather_logits(model(tokens, positions))
    return on.numpy(), off.numpy()


@pytest.mark.parametrize("ranks, keys", [(1, {}), (2, TP2), (2, {**TP2, **SP})])
def test_logits_are_pefts_and_the_bases_without_adapters(adapted_everywhere, ranks, keys, tmp_path):
    from transformers import AutoModelForCausalLM

    path, adapter = adapted_everywhere
    wanted = (
        logits(peft_model(path, EVERYTHING)),
        logits(AutoModelForCausalLM.from_pretrained(path)),
    )
    for got in world.run(megatron_logits, ranks, path, adapter, str(tmp_path), **keys):
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=0, atol=1e-5)


# -- the start -------------------------------------------------------------------------------------


def fresh(path: str, output_dir: str, targets, **changes) -> None:
    from mca_lite import part_lora

    model, backend = make(path, output_dir, **changes)
    backend(
        part_lora.inject(model, part_lora.LoraSpec(rank=RANK, targets=targets), seed=5)
    ).export_hf(output_dir, "20KB")


@pytest.fixture(scope="module")
def fresh_on_one(layout_of):
    return adapter_of(layout_of("one")[0] / "fresh")


@pytest.mark.parametrize("layout", some(n for n in LAYOUTS if n != "one"))
def test_fresh_adapters_are_the_same_in_every_layout(layout_of, fresh_on_one, layout):
    here, one = adapter_of(layout_of(layout)[0] / "fresh"), fresh_on_one
    assert here.keys() == one.keys() and all(torch.equal(here[name], one[name]) for name in one)


def test_fresh_adapters_start_as_pefts_do(fresh_on_one):
    """A uniform within 1 / sqrt(inputs) and B zero; of an embedding A zero and B normal."""
    for name, tensor in fresh_on_one.items():
        if name.endswith(("lora_B.weight", "lora_embedding_A")):
            assert not tensor.any()
        elif name.endswith("lora_embedding_B"):
            assert 0.7 < tensor.std() < 1.3
        else:
            bound = tensor.shape[1] ** -0.5
            assert tensor.abs().max() <= bound and abs(tensor.std() - bound / 3**0.5) < 0.2 * bound


# -- checkpoints -----------------------------------------------------------------------------------

CHECKPOINTS = ["one", "dp2_dist_opt", "dp2_overlap", "tp2_sp", "pp2_vpp2", "torch"]


@pytest.fixture(scope="module")
def adapter_runs_stopped(adapted_everywhere, tmp_path_factory):
    """run(layout) -> (folder of a whole run, of whose checkpoints only that of step 2 is left, its
    curve); each is made once.
    """
    path, adapter = adapted_everywhere

    @functools.cache
    def run(layout: str):
        folder = tmp_path_factory.mktemp(layout)
        ranks, keys = LAYOUTS[layout]
        keys = {**SAVE, **keys}
        curve, *_ = world.run(train_from_adapter, ranks, path, str(folder), adapter, **keys)
        for checkpoint in folder.glob("checkpoint-[34]"):
            shutil.rmtree(checkpoint)
        return folder, curve

    return run


@pytest.mark.parametrize("layout", some(CHECKPOINTS))
def test_resume_in_the_same_layout_is_bit_for_bit(
    adapted_everywhere, adapter_runs_stopped, layout, tmp_path
):
    path, adapter = adapted_everywhere
    ranks, keys = LAYOUTS[layout]
    folder, whole = adapter_runs_stopped(layout)
    shutil.copytree(folder, tmp_path / "parts")
    theirs = adapter_of(folder)
    again = {**SAVE, **keys, "resume_from_checkpoint": "auto"}
    assert (
        world.run(train_from_adapter, ranks, path, str(tmp_path / "parts"), adapter, **again)[0]
        == whole
    )
    ours = adapter_of(tmp_path / "parts")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def on_one(adapted_everywhere, tmp_path_factory):
    path, adapter = adapted_everywhere
    return world.run(train_from_adapter, 1, path, str(tmp_path_factory.mktemp("one")), adapter)[0]


@pytest.mark.parametrize(
    "before, after", [("one", "tp2_sp"), ("tp2_sp", "pp2_vpp2"), ("pp2_vpp2", "dp2_dist_opt")]
)
def test_resume_in_another_layout(
    adapted_everywhere, adapter_runs_stopped, on_one, before, after, tmp_path
):
    path, adapter = adapted_everywhere
    shutil.copytree(adapter_runs_stopped(before)[0], tmp_path / "parts")
    ranks, keys = LAYOUTS[after]
    again = {**SAVE, **keys, "resume_from_checkpoint": "auto"}
    for got in world.run(
        train_from_adapter, ranks, path, str(tmp_path / "parts"), adapter, **again
    ):
        assert_same_curve(got, on_one)


def test_checkpoints_hold_only_what_trains(adapted_everywhere, tmp_path):
    from mca_lite.ckpt_megatron import read_index

    path, adapter = adapted_everywhere
    world.run(
        train_from_adapter, 2, path, str(tmp_path), adapter, **{**SAVE, **TP2, "max_steps": 2}
    )
    [folder] = tmp_path.glob("checkpoint-2")
    tensors = read_index(folder / "dist")["tensors"]
    assert tensors and all("lora_" in name for name in tensors)
    weights = sum(
        math.prod(v["shape"]) for name, v in tensors.items() if not name.startswith("optimizer.")
    )
    # tensor parallelism pads the vocabulary of 61 to 62 or more: those rows are the difference
    count = sum(t.numel() for t in adapter_of(adapter).values())
    assert count <= weights < count + 128 * RANK * 2


def test_the_torch_backends_checkpoint_holds_only_what_trains(adapted_everywhere, tmp_path):
    path, adapter = adapted_everywhere
    world.run(
        train_from_adapter, 1, path, str(tmp_path), adapter, backend="torch", **{**SAVE, "steps": 2}
    )
    weights = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert sum(t.numel() for t in weights.values()) == sum(
        t.numel() for t in adapter_of(adapter).values()
    )


# -- precision and memory --------------------------------------------------------------------------


def buffers(path: str, adapter: str, output_dir: str, **changes):
    """(dtypes of gradient buffers, elements in them, elements of optimizer state, trained, all
    parameters) of this rank.
    """
    from mca_lite.trainer import McaTrainer

    keys = dict(max_steps=1, logging_steps=1, **changes)
    model, backend = make(path, output_dir, **keys)
    trainer = McaTrainer(
        load(adapter, model), backend.keywords["args"], train_dataset=tiny.samples()
    )
    trainer.train()
    groups = [b for chunk in trainer.backend.chunks for b in chunk.buffers]
    parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    states = [s for part in parts for s in part.optimizer.state.values()]
    state = sum(t.numel() for s in states for name, t in s.items() if name.startswith("exp_avg"))
    held = [str(b.param_dtype) for b in groups]
    return (
        held,
        sum(p.numel() for b in groups for p in b.params),
        state,
        *reversed(trainer.backend.num_parameters()),
    )


@pytest.mark.parametrize("layout", some(IN_BF16))
def test_frozen_bf16_weights_have_no_gradients_and_no_optimizer_state(layout_of, layout):
    shares = 2 if LAYOUTS[layout][1].get("use_distributed_optimizer") else 1
    for (held, in_buffers, state, trained, total), _ in layout_of(layout)[1]:
        assert set(held) == {"torch.float32"}
        assert in_buffers == trained < total
        assert (
            abs(state - 2 * trained / shares) <= 2 * 128
        )  # a distributed optimizer's pieces end where buckets do


@pytest.fixture(scope="module")
def in_bf16_on_torch(adapted_everywhere, tmp_path_factory):
    path, adapter = adapted_everywhere
    keys = dict(backend="torch", bf16=True, steps=2)
    out = str(tmp_path_factory.mktemp("bf16"))
    return world.run(train_from_adapter, 1, path, out, adapter, **keys)[0]


@pytest.mark.parametrize("layout", some(IN_BF16))
def test_bf16_trains_float32_adapters_and_keeps_the_base(
    adapted_everywhere, in_bf16_on_torch, layout_of, layout
):
    """The first loss is that of the torch backend in bf16, to bf16's rounding; the merged model is
    bf16.
    """
    (_, adapter), wanted = adapted_everywhere, in_bf16_on_torch
    out, [(_, got), *_] = layout_of(layout)
    assert (
        abs(got[0][0] - wanted[0][0]) < 1e-2 and abs(got[0][1] - wanted[0][1]) < 2e-2 * wanted[0][1]
    )
    after, before = adapter_of(out / "bf16"), adapter_of(adapter)
    assert {t.dtype for t in after.values()} == {torch.float32}
    assert all((after[name] != before[name]).any() for name in after)  # every adapter was trained


@pytest.mark.parametrize("layout", ["one", "tp2_sp"])
def test_fp16_trains_float32_adapters(adapted_everywhere, layout, tmp_path):
    """Unscaled gradients: the first norm is that in float32, to fp16's rounding."""
    path, adapter = adapted_everywhere
    wanted = world.run(train_from_adapter, 1, path, str(tmp_path / "32"), adapter, steps=2)[0]
    ranks, keys = LAYOUTS[layout]
    keys = dict(keys, fp16=True, loss_scale=1024.0, steps=2)
    got = world.run(train_from_adapter, ranks, path, str(tmp_path / "16"), adapter, **keys)[0]
    assert (
        abs(got[0][0] - wanted[0][0]) < 2e-3 and abs(got[0][1] - wanted[0][1]) < 1e-2 * wanted[0][1]
    )


# -- dropout ---------------------------------------------------------------------------------------


def replicas(path: str, output_dir: str, **changes):
    """The matrices that tensor parallelism does not cut, after training with dropout; and the
    curve.
    """
    from mca_lite import part_lora, part_lora_sites

    kept = []

    def adapt(model):
        kept.append(part_lora.inject(model, part_lora.LoraSpec(rank=RANK, dropout=0.3), seed=1))
        return model

    curve = train(path, output_dir, adapt=adapt, steps=2, **KEYS, **changes)
    return {
        p.key: p.tensor.numpy().copy() for p in part_lora_sites.pieces_of(kept[0]) if p.axis is None
    }, curve


@pytest.mark.parametrize("keys", [TP2, {**TP2, **SP}, {**TP2, "recompute_granularity": "full"}])
def test_dropout_leaves_the_copies_of_a_matrix_equal(adapted_everywhere, keys, tmp_path):
    (first, curve), (second, _) = world.run(
        replicas, 2, adapted_everywhere[0], str(tmp_path), **keys
    )
    assert first.keys() == second.keys() and all((first[k] == second[k]).all() for k in first)
    assert all(loss == loss for loss, _ in curve)


@pytest.mark.parametrize(
    "target, layout",
    [
        pytest.param("embed_tokens", PP2, marks=pytest.mark.full),
        ("lm_head", PP2),
        ("embed_tokens", {}),
    ],
    ids=["last stage", "first stage", "dp2, where the second rank writes all"],
)
def test_a_run_goes_on_where_a_rank_has_nothing_trained_to_write(tmp_path, target, layout):
    path = tiny.save_model(tmp_path / "model", "llama")
    small_runs.save_tokenizer(path)
    small_runs.write_data(tmp_path)
    keys = dict(model_name_or_path=path, dataset=f"{tmp_path}/chat.jsonl", disable_tqdm=True)
    keys.update(cache_dir=f"{tmp_path}/cache", output_dir=f"{tmp_path}/out", cutoff_len=32)
    keys.update(finetuning_type="lora", lora_target=[target], save_steps=1, logging_steps=1)
    keys.update(lr_scheduler_type="constant", gradient_accumulation_steps=2, **layout)
    world.run(small_runs.train_by_words, 2, {**keys, "max_steps": 1})
    # the third step's loss shows whether the second one's update counts those before it
    world.run(
        small_runs.train_by_words, 2, {**keys, "max_steps": 3, "resume_from_checkpoint": "auto"}
    )
    keys["output_dir"] = f"{tmp_path}/whole"
    world.run(small_runs.train_by_words, 2, {**keys, "max_steps": 3})
    parts, whole = (small_runs.curve(read_log(f"{tmp_path}/{n}")) for n in ("out", "whole"))
    assert parts == whole and len(whole) == 3
