"""Transformer Engine as far as a CPU can hold it: who gets its layers, what is refused, checkpoints
and adapters of stand-ins for its modules. What its kernels compute: `make gpu`
(tests/tools/gpu_te.py).
"""

import functools
import types
import warnings

import pytest
import torch

from mca_lite import TrainingArguments, model_config, part_transformer_engine
from mca_lite.errors import ConfigError
from mca_lite.model import VirtualModels
from mca_lite.model_config import McaModelConfig, from_hf_config
from tests.shared import commands, te_standins, tiny, tiny_moe, world
from tests.shared.layouts import SAVE
from tests.shared.lora_tools import with_drawn_adapters
from tests.shared.training import assert_same_curve, train, whole_and_resumed
from tests.tools import gpu_te, gpu_te_runs

BF16 = dict(bf16=True)
FP8 = dict(bf16=True, fp8="hybrid")
CP2 = dict(context_parallel_size=2)
TE, LOCAL = dict(transformer_impl="transformer_engine"), dict(transformer_impl="local")
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=32)


@pytest.fixture
def te_works(monkeypatch):
    monkeypatch.setattr(part_transformer_engine, "works", lambda: True)


def config_of(hf, **keys) -> McaModelConfig:
    return from_hf_config(hf, TrainingArguments(output_dir="unused", **keys))


# -- who gets its layers, and what is refused


@pytest.mark.parametrize(
    "family, changes, keys, wanted",
    [
        ("qwen3", {}, BF16, "transformer_engine"),
        ("qwen3", {}, dict(fp16=True), "transformer_engine"),
        ("qwen3", {}, {}, "local"),  # TE multiplies float32 in tf32
        ("qwen3", dict(head_dim=256), BF16, "local"),
        ("qwen3", dict(head_dim=128), BF16, "transformer_engine"),
        ("mistral_window", {}, BF16, "transformer_engine"),
        ("mistral_window", {}, dict(BF16, **CP2), "local"),
        ("gemma2", {}, BF16, "local"),
        ("deepseek_v3", {}, BF16, "local"),
    ],
)
def test_auto_takes_transformer_engine_where_it_suits(family, changes, keys, wanted, te_works):
    assert config_of(tiny.hf_config(family, **changes), **keys).transformer_impl == wanted


@pytest.mark.parametrize(
    "family, changes, keys, reason",
    [
        ("qwen3", dict(head_dim=136), {}, "heads of more than 128 channels"),
        ("mistral_window", {}, CP2, "a sliding window under context_parallel_size"),
        ("gemma2", {}, {}, "post_norms"),
    ],
)
def test_what_its_layers_lack_is_refused(family, changes, keys, reason, te_works):
    asked = dict(BF16, transformer_impl="transformer_engine", **keys)
    with pytest.raises(ConfigError, match=f"(?s){reason}.*try: transformer_impl: local or auto"):
        config_of(tiny.hf_config(family, **changes), **asked)


@pytest.mark.parametrize(
    "changes, keys, reason",
    [
        (dict(intermediate_size=40), {}, "a rank has 40 MLP columns"),
        (dict(head_dim=6), {}, "a rank has 24 channels of all queries"),
        ({}, dict(tensor_model_parallel_size=2), "a rank has 24 MLP columns"),
        (dict(hidden_size=40), {}, "a rank has 40 hidden channels"),
        (dict(head_dim=256), {}, "the layers of this run are local ones"),
        (
            {},
            dict(first_last_layers_bf16=True, num_layers_at_start_in_bf16=5),
            "try: num_layers_at_start_in_bf16: 4",
        ),
    ],
)
def test_fp8_of_sizes_that_do_not_fit_is_refused(changes, keys, reason, te_works):
    with pytest.raises(ConfigError, match=reason):
        config_of(tiny.hf_config("qwen3", **changes), **FP8, **keys)


def test_fp8s_keys_are_in_the_models_configuration(te_works):
    keys = dict(
        fp8="hybrid",
        fp8_recipe="blockwise",
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=2,
        num_layers_at_end_in_bf16=0,
    )
    config, plain = (config_of(tiny.hf_config("qwen3"), bf16=True, **k) for k in (keys, {}))
    for key, value in keys.items():
        assert getattr(config, key) == value != getattr(plain, key)
    assert config_of(tiny.hf_config("qwen3"), **FP8).fp8_recipe == "tensorwise"


def test_a_window_reaches_its_attention_layer_by_layer(te_works):
    from megatron.core.transformer.utils import is_layer_window_attention

    config = config_of(tiny.hf_config("qwen3_window"), **BF16)
    assert config.window_size == (4, 0)  # 5 tokens, itself included
    has_window = [
        is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number)
        for number in (1, 2)
    ]
    assert has_window == [config.layer_type(n) == "sliding_attention" for n in (1, 2)]
    assert sorted(has_window) == [False, True]


def test_yarn_needs_local_layers(te_works):
    for rope, impl in ((YARN, "local"), ({"rope_type": "default"}, "transformer_engine")):
        hf = tiny.hf_config("llama", rope_parameters={"rope_theta": 100.0, **rope})
        assert config_of(hf, **BF16).transformer_impl == impl


def test_a_broken_installation_is_said(monkeypatch):
    import builtins

    real = builtins.__import__

    def importing(name, *rest, **more):
        if name.startswith("transformer_engine"):
            raise OSError("libcudnn_cnn.so.9: undefined symbol")
        return real(name, *rest, **more)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.warns(UserWarning, match="cannot be imported .libcudnn_cnn.so.9: undefined"):
        assert not part_transformer_engine.works.__wrapped__()
    monkeypatch.setattr(builtins, "__import__", real)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said where it is not installed
        assert not part_transformer_engine.works.__wrapped__()


def test_the_summary_says_which_cudnn_was_found(monkeypatch):
    assert model_config.found_here() is None

    def version():
        raise RuntimeError(
            "cuDNN version incompatibility: PyTorch was compiled against (9, 19, 0) but found "
            "runtime version (9, 14, 0). PyTorch already comes with bundled cuDNN."
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    assert "no Transformer Engine, cuDNN version incompatibility" in model_config.found_here()
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert model_config.found_here() == "no Transformer Engine, cuDNN 9.19.0"


def test_cudnns_attention_comes_first_without_a_mask_and_never_with_one():
    from mca_lite.model_attention import sdpa_order

    on_cuda, mask = types.SimpleNamespace(is_cuda=True), torch.ones(1)
    with sdpa_order(on_cuda, None):
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert torch._C._get_sdp_priority_order()[0] == int(
            torch.nn.attention.SDPBackend.CUDNN_ATTENTION
        )
    with sdpa_order(on_cuda, mask):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()


# -- the optimizer


class CountsInItsGroup(torch.optim.AdamW):
    """Megatron's optimizer beside TE: TE's FusedAdam has no "step" beside a parameter."""

    def __init__(self, params, adam_w_mode=True, **keys):
        super().__init__(params, **keys)

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state.pop("step", None)


def trained_beside_te(path: str, out: str) -> tuple[str, list, list]:
    """(kind of optimizer, curve, curve of a run that died after its second step)"""
    from unittest import mock

    from megatron.core import optimizer

    from mca_lite import cpu

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = CountsInItsGroup, False
    with mock.patch("torch.cuda.is_available", lambda: True):
        cpu.apply_on_cuda.__wrapped__()
    return optimizer.Adam.__name__, *whole_and_resumed(path, out, steps=5)


def test_beside_te_the_optimizer_is_torchs_and_a_run_resumes(tmp_path):
    path = tiny.save_model(tmp_path / "model", "qwen2")
    kind, whole, parts = world.run(trained_beside_te, 1, path, str(tmp_path / "out"))[0]
    assert kind == "AdamW"
    assert parts == whole


# -- checkpoints and adapters, with stand-ins for its modules


def through_both(path: str, out: str, keys: dict) -> dict:
    """{name: (curve, the same resumed on the other layers)}"""
    with te_standins.installed():
        return {
            "local to TE": whole_and_resumed(path, f"{out}/a", LOCAL, TE, **keys),
            "TE to local": whole_and_resumed(path, f"{out}/b", TE, LOCAL, **keys),
        }


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe_dense_layers", "qwen2_moe"])
def test_a_checkpoint_goes_between_local_layers_and_its_own(name, tmp_path):
    save = tiny_moe.save_model if "moe" in name else tiny.save_model
    path = save(tmp_path / "model", name)
    curves = world.run(through_both, 1, path, str(tmp_path), {}, timeout_s=120)[0]
    for whole, parts in curves.values():
        assert_same_curve(parts, whole)
    assert_same_curve(curves["TE to local"][0], curves["local to TE"][0])


def train_on_te(path: str, out: str, **keys) -> list:
    with te_standins.installed():
        return train(path, out, **TE, **keys)


def test_a_checkpoint_of_an_fp8_run_converts_where_there_is_neither_te_nor_a_gpu(tmp_path):
    path, out = tiny.save_model(tmp_path / "model", "qwen3"), tmp_path / "out"
    world.run(train_on_te, 1, path, str(out), steps=2, **SAVE, **FP8)
    assert '"fp8": "hybrid"' in (out / "checkpoint-2" / "mca_config.json").read_text()
    code, printed, errors = commands.convert(out / "checkpoint-2", tmp_path / "hf", "--verify")
    assert code == 0 and "verified" in printed, errors


def lora_curves(path: str, out: str) -> dict:
    runs = {"local": LOCAL, "TE": TE, "TE, fp8": {**TE, "fp8": "hybrid"}}
    adapt = functools.partial(with_drawn_adapters, rank=4)
    with te_standins.installed():
        return {
            name: train(path, f"{out}/{name}", adapt=adapt, bf16=True, **keys)
            for name, keys in runs.items()
        }


def test_adapters_train_on_its_linears_as_on_local_ones(tmp_path):
    """In bf16 by the product that has the adapter in it, which rounds as local layers do; beside
    8-bit products with a sum of their own.
    """
    path = tiny.save_model(tmp_path / "model", "qwen2")
    curves = world.run(lora_curves, 1, path, str(tmp_path), timeout_s=120)[0]
    assert_same_curve(curves["TE"], curves["local"], 1e-2)
    assert_same_curve(curves["TE, fp8"], curves["local"], 3e-2)


def test_its_linears_add_gradients_in_place_where_their_weight_is_trained():
    linear = torch.nn.Linear(2, 2)
    assert not model_config.accumulate_in_place(linear)
    linear.fuse_wgrad_accumulation = False
    assert model_config.accumulate_in_place(linear) and linear.fuse_wgrad_accumulation
    linear.weight.requires_grad_(False)
    assert model_config.accumulate_in_place(linear) and not linear.fuse_wgrad_accumulation


def test_a_forward_pass_of_its_own_rounds_fp8s_weights_anew():
    """TE keeps weights in 8 bits until it is told that another step has begun; in training
    megatron's schedule tells it.
    """

    class Chunk(torch.nn.Module):
        told = 0

        def set_is_first_microbatch(self):
            self.told += 1

        def forward(self, tokens):
            return self.told

    models = VirtualModels(None, [Chunk()])
    assert [models(None), models(None)] == [1, 2]


# -- the tool of the GPU's cases


def test_the_gpu_cases_see_a_run_that_trains_nothing():
    start = {"a": torch.ones(64), "b": torch.full((8, 8), 0.05)}
    trained = {name: tensor + 0.03 for name, tensor in start.items()}
    assert gpu_te_runs.moved(start, trained, start) > max(
        gpu_te_runs.PLAIN["move"], gpu_te_runs.IN_FP8["move"]
    )
    assert gpu_te_runs.moved(trained, trained, start) == gpu_te_runs.moved(start, start, start) == 0
    rounded = {name: tensor.bfloat16().float() for name, tensor in start.items()}
    assert gpu_te_runs.trained(trained, start) and not gpu_te_runs.trained(rounded, start)


def test_the_gpu_cases_hold_each_run_to_its_bounds():
    bounds = dict(loss=2e-2, move=0.5)
    numbers = {"loss te": 1e-2, "loss local": 1e-2, "move te": 0.2, "move local": 0.9}
    assert gpu_te_runs.within(numbers, bounds, "te") and not gpu_te_runs.within(
        numbers, bounds, "local"
    )
    assert not gpu_te_runs.within(dict(loss=3e-2, move=0.1), bounds)
    assert not gpu_te_runs.within(dict(loss=float("nan"), move=0.1), bounds)


def test_gpu_cases_without_time_are_named_and_not_run(tmp_path):
    cells = {"tp2": ("no model", {}, ([], []), ([], []))}
    states = world.run(gpu_te.on_two, 2, str(tmp_path), cells, 0.0)
    assert states == 2 * [{"two: tp2": "FAIL"}]


def judged_on_two_gpus(te: float) -> str:
    exact, local = ([5.0, 4.0], [1.0, 2.0]), ([5.001, 4.0], [1.0, 2.01])
    return gpu_te.judge_two("tp2", ([5.0, 4.0 + te], [1.0, 2.0]), exact, local)[0]


def test_a_layout_of_two_gpus_is_held_to_one_gpus_losses():
    assert judged_on_two_gpus(1e-3) == "ok" and judged_on_two_gpus(0.1) == "DIFF"


def test_gpu_cases_side_by_side_are_told_as_they_come(tmp_path, monkeypatch, capsys):
    fake = tmp_path / "python"
    lines = (f"{state:4} lora     {name:40} 1.0 s" for state, name in (("ok", "a"), ("DIFF", "b")))
    fake.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + "exit 7\n")
    fake.chmod(0o755)
    monkeypatch.setattr(gpu_te.sys, "executable", str(fake))
    monkeypatch.setattr(gpu_te, "PARTS", ("lora:",))
    states = gpu_te.side_by_side(2, float("inf"))
    assert {name.split()[-1]: state for name, state in states.items()} == {
        "a": "ok",
        "b": "DIFF",
        "process": "ended with 7",
    }
    assert "DIFF lora     b" in capsys.readouterr().out


def test_words_choose_the_gpu_cases_of_a_group_or_by_name():
    chosen = gpu_te.chosen
    assert chosen([], "lora", "a") and chosen(["lora:"], "lora", "a") and chosen(["a"], "lora", "a")
    assert not chosen(["lora:"], "resume", "TE lora")
