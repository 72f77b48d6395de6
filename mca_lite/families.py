"""The table of model families: how a Hugging Face config and its weights become megatron's, and back.

One row maps one megatron tensor: (megatron name, HF names, kind). `{}` is the layer's number. The kind says how HF
tensors merge into megatron's, and which axis tensor parallelism cuts:

    copy     one tensor, the same on every tensor-parallel rank
    column   one tensor, cut along its rows (the output dimension)
    row      one tensor, cut along its columns (the input dimension)
    gated    [gate; up]: each is cut along its rows, then a rank's parts are joined
    qkv      per query group [its queries, key, value] along the rows, no rotary permutation; groups cut over ranks

A new family is a few rows and a few config keys. `FAMILIES[model_type]` is what the rest of the package reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One megatron tensor and the HF tensors that it is made of."""

    mca: str
    hf: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class Family:
    """A model_type of transformers: its rows, config keys, and what of its config.json cannot be honoured."""

    rows: tuple[Row, ...]
    config: dict[str, str]  # HF config key -> McaModelConfig field
    constants: dict[str, Any]  # McaModelConfig fields that this family always has
    refusals: tuple[tuple[str, Callable[[Any], bool], str], ...] = ()  # (key, is it in use?, what to do)
    sliding_window: Callable[[Any], int | None] = field(default=lambda hf: None)  # the window that is in use, tokens


def _attention(bias=False, norm=False):
    layer, hf = "decoder.layers.{}.self_attention.", "model.layers.{}.self_attn."
    yield Row(layer + "linear_qkv.weight", tuple(hf + f"{x}_proj.weight" for x in "qkv"), "qkv")
    if bias:
        yield Row(layer + "linear_qkv.bias", tuple(hf + f"{x}_proj.bias" for x in "qkv"), "qkv")
    if norm:
        yield Row(layer + "q_layernorm.weight", (hf + "q_norm.weight",), "copy")
        yield Row(layer + "k_layernorm.weight", (hf + "k_norm.weight",), "copy")
    yield Row(layer + "linear_proj.weight", (hf + "o_proj.weight",), "row")


def _dense_rows(bias=False, norm=False):
    layer, hf = "decoder.layers.{}.", "model.layers.{}."
    return (
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "column"),
        Row(layer + "input_layernorm.weight", (hf + "input_layernorm.weight",), "copy"),
        *_attention(bias, norm),
        Row(layer + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",), "copy"),
        Row(layer + "mlp.linear_fc1.weight", (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight"), "gated"),
        Row(layer + "mlp.linear_fc2.weight", (hf + "mlp.down_proj.weight",), "row"),
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), "copy"),
        Row("output_layer.weight", ("lm_head.weight",), "column"),
    )


# Transformer Engine fuses a norm into the linear behind it: the same tensor under another name
TE_ALIASES = {
    "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.{}.input_layernorm.weight",
    "decoder.layers.{}.mlp.linear_fc1.layer_norm_weight": "decoder.layers.{}.pre_mlp_layernorm.weight",
}

# Patterns of tensors that some checkpoints hold and no model reads. Any other tensor that no row names is refused, since the
# model may need it; a family that leaves some out on purpose adds them here, and they are carried into every export.
UNUSED_TENSORS = (r"rotary_emb\.inv_freq$",)  # old llama checkpoints: the config gives the frequencies

_DENSE_CONFIG = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "rms_norm_eps": "layernorm_epsilon",
    "attention_dropout": "attention_dropout",
    "initializer_range": "init_method_std",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "tie_embeddings_and_output_weights",
}
_DENSE = dict(
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation_func="silu",
    add_bias_linear=False,
    hidden_dropout=0.0,
)
_ONLY_SILU = ("hidden_act", lambda act: act not in ("silu", "swish"), "only silu (swiglu) is built")
_NO_ATTENTION_BIAS = ("attention_bias", bool, "a bias on o_proj is not built: convert the model to one without")
_NO_MLP_BIAS = ("mlp_bias", bool, "biases in the MLP are not built")


def _window_of_layers(hf):
    return hf.sliding_window if "sliding_attention" in (getattr(hf, "layer_types", None) or ()) else None


FAMILIES: dict[str, Family] = {
    "llama": Family(_dense_rows(), _DENSE_CONFIG, _DENSE, (_ONLY_SILU, _NO_ATTENTION_BIAS, _NO_MLP_BIAS)),
    "mistral": Family(_dense_rows(), _DENSE_CONFIG, _DENSE, (_ONLY_SILU,), lambda hf: hf.sliding_window),
    "qwen2": Family(
        _dense_rows(bias=True), _DENSE_CONFIG, {**_DENSE, "add_qkv_bias": True}, (_ONLY_SILU,), _window_of_layers
    ),
    "qwen3": Family(
        _dense_rows(norm=True),
        _DENSE_CONFIG,
        {**_DENSE, "qk_layernorm": True},
        (_ONLY_SILU, _NO_ATTENTION_BIAS),
        _window_of_layers,
    ),
}


def get_family(model_type: str) -> Family:
    """The family of a config.json's model_type. ValueError names those that there are."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not one that can be trained on megatron-core here: expected one of "
            f"{', '.join(sorted(FAMILIES))}; set use_mca: false to train it with the plain torch backend"
        )
    return FAMILIES[model_type]
