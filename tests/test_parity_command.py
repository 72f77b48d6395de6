"""`python -m mca_lite parity`: right layouts pass, and where one is put wrong, that place is
named.
"""

import pytest
import torch

from mca_lite import tool_parity as parity_of_steps
from tests.shared import tiny, tiny_moe, world
from tests.shared.commands import ended
from tests.shared.layouts import AUX, CP2, EP2, OVERLAP, PP2, TP2, TP2_SP, VPP2
from tests.shared.small_runs import save_tokenizer, words_of, write_data

KEYS = dict(stage="sft", cutoff_len=32, global_batch_size=8, per_device_train_batch_size=2)
PACKED, BF16 = dict(neat_packing=True), dict(bf16=True)
LORA = dict(finetuning_type="lora", lora_rank=4)
MODELS = {"qwen3": tiny, **dict.fromkeys(("qwen3_moe", "gpt_oss", "qwen3_next"), tiny_moe)}
RIGHT = {
    "tp2pp2": ("qwen3", 4, {**TP2, **PP2}),
    "tp2 sp, bf16": ("qwen3", 2, {**TP2_SP, **BF16}),
    "cp2, packed": ("qwen3", 2, {**CP2, **PACKED, "calculate_per_token_loss": False}),
    "dp2, sharded optimizer, packed, bf16": ("qwen3", 2, {**OVERLAP, **PACKED, **BF16}),
    "lora, tp2, dropout": ("qwen3", 2, {**TP2, **LORA, "lora_dropout": 0.5}),
    "experts, ep2, balancing losses": ("qwen3_moe", 2, {**EP2, **AUX}),
    "biases of attention, ep2": ("gpt_oss", 2, EP2),
    "gated delta nets, pp2": ("qwen3_next", 2, PP2),
    "dpo, pp2 vpp2": ("qwen3", 2, {**PP2, **VPP2, "stage": "dpo"}),
}


# -- what is put wrong, in the model that a layout trains ------------------------------------------


def scale_mlp(trainer):
    for layer in layers_of(trainer, 2):
        layer.mlp.linear_fc2.weight.data *= 1.05


def double_attention(trainer):
    [layer] = layers_of(trainer, 1)
    layer.self_attention.register_forward_hook(lambda m, args, out: (2 * out[0], out[1]))


def other_rope(trainer):
    from mca_lite.model_attention import Rope

    config = trainer.backend.config
    config.rotary_base *= 50
    for module in trainer.backend.model[0].modules():
        if hasattr(module, "rope"):
            module.rope = Rope.of(config)


def scale_embedding(trainer):
    trainer.backend.model[0].embedding.register_forward_hook(lambda m, args, out: 1.01 * out)


def scale_head(trainer):
    trainer.backend.model[0].output_layer.weight.data *= 1.01


def shift_labels(trainer):
    own = trainer.backend.model_inputs

    def shifted(batch):
        return own({**batch, "labels": batch["labels"].roll(1, 1)})

    trainer.backend.model_inputs = shifted


def scale_a_gradient(trainer):
    [layer] = layers_of(trainer, 3)
    layer.self_attention.linear_proj.weight.register_hook(lambda gradient: 1.001 * gradient)


def scale_all_gradients(trainer):
    for buckets in trainer.backend.chunks[0].bucket_groups:
        for bucket in buckets.buckets:
            bucket.gradient_scaling_factor *= 2


def layers_of(trainer, number: int) -> list:
    layers = (layer for chunk in trainer.backend.model for layer in chunk.decoder.layers)
    return [layer for layer in layers if layer.layer_number - 1 == number]


# what is wrong, the keys, what the verdict says
WRONG = {
    "mlp": (scale_mlp, {}, "layer 2 mlp differs first"),
    "rope": (other_rope, {}, "layer 0 attention differs first"),
    "rope in bf16": (other_rope, BF16, "layer 0 attention differs first"),
    "attention in bf16, packed": (
        double_attention,
        {**BF16, **PACKED},
        "layer 1 attention differs first",
    ),
    "embedding": (scale_embedding, {}, "how the vocabulary is cut"),
    "head": (scale_head, {}, "logits differs first"),
    "labels": (shift_labels, {}, "micro-batch 0 differs first"),
    "backward pass": (
        scale_a_gradient,
        {},
        "model.layers.3.self_attn.o_proj.weight differs first, by 1.0e-03",
    ),
    "mean over ranks": (scale_all_gradients, {}, "every gradient is off by 100%"),
}


# -- runs ------------------------------------------------------------------------------------------


def parity(keys: dict, harm=None) -> tuple[int, str, str]:
    """The command on this rank; harm: done to the trainer of the layout before its step."""
    from mca_lite import run, tool_inspect

    build = run.build_trainer

    def harmed(plan):
        trainer = build(plan)
        if harm is not None:
            harm(trainer)
        return trainer

    run.build_trainer = harmed
    try:
        return ended(tool_inspect.main_parity, words_of(keys))
    finally:
        run.build_trainer = build


def parity_of_all(runs: dict) -> dict:
    return {name: parity(*of_run) for name, of_run in runs.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    for name, models in MODELS.items():
        models.save_model(folder / name, name, vocab_size=64, attention_dropout=0.3)
        save_tokenizer(folder / name)
    write_data(folder)
    return folder


def keys_in(folder, model: str, keys: dict) -> dict:
    own = dict(model_name_or_path=f"{folder}/{model}", output_dir=f"{folder}/out")
    data = "pairs" if keys.get("stage") == "dpo" else "chat"
    return {**KEYS, **own, "dataset": f"{folder}/{data}.jsonl", "cache_dir": f"{folder}/c", **keys}


def in_world(folder, model: str, ranks: int, keys: dict, harm=None) -> tuple[int, str]:
    told = world.run(parity, ranks, keys_in(folder, model, keys), harm, timeout_s=120)
    codes, out, errors = zip(*told, strict=True)
    assert len(set(codes)) == 1, "".join(out + errors)
    return codes[0], "".join(out + errors)


@pytest.fixture(scope="module")
def harmed(folder):
    """{name: (exit code, what was printed)} of all that is wrong, on one rank."""
    runs = {
        name: (keys_in(folder, "qwen3_moe" if name == "head" else "qwen3", keys), harm)
        for name, (harm, keys, _) in WRONG.items()
    }
    [told] = world.run(parity_of_all, 1, runs, timeout_s=120)
    return {name: (code, out + errors) for name, (code, out, errors) in told.items()}


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_layout_passes(folder, case):
    model, ranks, keys = RIGHT[case]
    code, out = in_world(folder, model, ranks, keys)
    assert code == 0 and "right: " in out, out
    assert "logits" in out and "micro-batch 2" in out and "the worst of all" in out
    [rounding] = [float(line.split()[3]) for line in out.splitlines() if "  logits " in line]
    assert rounding > 0, "in float32 too, it is measured and not taken to be some number"
    assert all(f"  layer {i} mlp " in out for i in range(4)), out
    assert not (folder / "out").exists(), "nothing is written"


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(harmed, case):
    code, out = harmed[case]
    assert code == 3 and "wrong: " in out, out
    assert WRONG[case][2] in out, out
    assert ("bf16=false shows smaller ones" in out) == ("bf16" in case), out


def test_a_layer_on_another_stage_is_named_on_every_rank(folder):
    code, out = in_world(folder, "qwen3", 2, PP2, scale_mlp)
    assert code == 3 and "layer 2 mlp differs first" in out, out
    assert "the activation" in out


def test_a_verdict_allows_three_times_the_noise_and_misses_nothing():
    names = [("outputs", name) for name in ("near", "far", "not finite", "not there")]
    oracle, size = {name: torch.ones(4) for name in names}, 2.0
    noise = dict.fromkeys(names, 0.01 * size)  # the bound is 0.0301 of the size
    found = dict(zip(names, (0.0300 * size, 0.0302 * size, float("nan")), strict=False))
    rows = parity_of_steps.compared_rows(oracle, noise, {}, found)
    assert [row.differs for row in rows] == [False, True, True, True]


def test_what_cannot_be_compared_is_refused(folder):
    for key, value in dict(fp16=True, use_mca=False).items():
        code, _, errors = parity(keys_in(folder, "qwen3", {key: value}))
        assert code == 2 and key in errors, errors
