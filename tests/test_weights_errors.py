"""A checkpoint or layout that does not fit a model is refused, and the message names what does not fit."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.shared import tiny, world
from tests.shared.files import EMBEDDING, changed, make_args
from tests.shared.layouts import PP2, TP2

LAYER = "model.layers.1."


def load_error(path: str, keys: dict) -> str:
    """The text of the ValueError with which a model is refused."""
    from mca_lite.model import AutoModel

    try:
        AutoModel.from_pretrained(path, make_args(**keys))
    except ValueError as error:
        return str(error)
    return f"{path} was loaded"


def load_errors(paths: dict, keys: dict) -> dict:
    return {name: load_error(path, keys) for name, path in paths.items()}


def cut(name: str, *shape: int):
    """A change that gives a tensor another shape, larger or smaller."""
    return lambda values: values.update({name: torch.zeros(shape)})


def drop(name: str):
    return lambda values: values.pop(name)


def add(name: str):
    return lambda values: values.update({name: torch.zeros(2)})


BROKEN = {
    "missing": (drop(LAYER + "mlp.up_proj.weight"), [LAYER + "mlp.up_proj.weight", "lacks"]),
    "missing head": (drop("lm_head.weight"), ["lm_head.weight", "tie_word_embeddings"]),
    "unknown": (add(LAYER + "mlp.extra.weight"), [LAYER + "mlp.extra.weight", "llama", "model_type"]),
    "unknown bias": (add(LAYER + "self_attn.q_proj.bias"), [LAYER + "self_attn.q_proj.bias", "model_type"]),
    "one layer more": (add("model.layers.4.input_layernorm.weight"), ["model.layers.4.", "num_hidden_layers"]),
    "copy": (cut("model.norm.weight", 31), ["model.norm.weight", "(31,)", "(32,)", "config.json"]),
    "row": (cut(LAYER + "mlp.down_proj.weight", 32, 40), [LAYER + "mlp.down_proj.weight", "(32, 40)", "(32, 48)"]),
    "gated": (cut(LAYER + "mlp.gate_proj.weight", 50, 32), [LAYER + "mlp.gate_proj.weight", "(50, 32)", "(48, 32)"]),
    "gated, even in sum": (
        lambda values: [cut(LAYER + f"mlp.{x}_proj.weight", n, 32)(values) for x, n in (("gate", 50), ("up", 46))],
        [LAYER + "mlp.gate_proj.weight", "(50, 32)"],
    ),
    "more queries": (cut(LAYER + "self_attn.q_proj.weight", 48, 32), [LAYER + "self_attn.q_proj.weight", "(48, 32)"]),
    "fewer keys": (cut(LAYER + "self_attn.k_proj.weight", 8, 32), [LAYER + "self_attn.k_proj.weight", "(8, 32)"]),
    "narrow values": (cut(LAYER + "self_attn.v_proj.weight", 16, 31), [LAYER + "self_attn.v_proj.weight", "(16, 31)"]),
    "vocabulary": (cut(EMBEDDING, 60, 32), [EMBEDDING, "60", "vocab_size", "61"]),
    "vocabulary of the head": (cut("lm_head.weight", 64, 32), ["lm_head.weight", "64", "vocab_size", "61"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    return tiny.save_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="module")
def errors(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    paths = {name: changed(llama, folder / name, change) for name, (change, _) in BROKEN.items()}
    paths["none"] = str(folder / "none")
    Path(paths["none"]).mkdir()
    shutil.copy(f"{llama}/config.json", paths["none"])
    paths["shard gone"] = tiny.save_model(folder / "shard gone", "llama", max_shard_size="10KB")
    next(Path(paths["shard gone"]).glob("model-00002-of-*.safetensors")).unlink()
    return world.run(load_errors, 1, paths, {})[0]


@pytest.mark.parametrize("name", BROKEN)
def test_checkpoint_that_does_not_fit_is_refused_by_name(name, errors):
    for part in BROKEN[name][1]:
        assert part in errors[name], errors[name]


def test_folder_without_weights_says_what_was_expected(errors):
    for part in (
        "model.safetensors",
        "model.safetensors.index.json",
        "save_pretrained",
        "train_from_scratch: true",
    ):
        assert part in errors["none"], errors["none"]


def test_shard_that_is_gone_is_named(errors):
    for part in ("model-00002-of-", "lacks it", "model.safetensors.index.json"):
        assert part in errors["shard gone"], errors["shard gone"]


def test_every_pipeline_rank_refuses_what_one_of_them_lacks(llama, tmp_path):
    """Else the others would wait for it in their next collective."""
    path = changed(llama, tmp_path / "in", drop("model.layers.3.mlp.up_proj.weight"))
    for error in world.run(load_error, 2, path, PP2):
        assert "lacks" in error and "model.layers.3.mlp.up_proj.weight" in error, error


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            dict(num_attention_heads=3, num_key_value_heads=3, hidden_size=36),
            ["3 attention heads", "tensor_model_parallel_size: 2"],
        ),
        (dict(intermediate_size=49), ["49", "tensor_model_parallel_size", "2"]),
    ],
    ids=["heads", "columns"],
)
def test_tensor_parallel_size_that_does_not_divide_is_refused(changes, parts, tmp_path):
    path = tiny.save_model(tmp_path / "model", "llama", **changes)
    for error in world.run(load_error, 2, path, TP2):
        assert all(part in error for part in parts), error
