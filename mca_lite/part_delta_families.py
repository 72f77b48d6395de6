"""Families with gated delta nets: Qwen3-Next and Qwen3.5. This module does not import torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .families import FAMILIES
from .families_rows import (
    HF_LAYERS,
    LAYERS,
    PREDICTION_KEY,
    Family,
    Row,
    attention,
    decoder_rows,
    mlp_rows,
    moe_rows,
    shared_expert_rows,
)

_NAMES = (
    "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads"
).split()
_LINEAR_CONFIG = dict(zip(_NAMES, _NAMES, strict=True))
_LINEAR = {
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
}


def delta_rows(inputs: str, kind: str) -> Iterator[Row]:
    """Yield the Rows of a gated delta net (a linear attention layer); a Row is a megatron tensor
    and the Hugging Face tensors that it is made from. inputs: the Hugging Face modules whose
    weights megatron's in_proj joins, such as "in_proj_qkvz in_proj_ba". kind: how their rows are
    ordered: "delta", or, if they are grouped by key head, "delta_grouped"."""

    def row(mca: str, modules: str, kind: str, **more: Any) -> Row:
        hf = tuple(f"{HF_LAYERS}linear_attn.{name}.weight" for name in modules.split())
        return Row(f"{LAYERS}self_attention.{mca}.weight", hf, kind, layers="linear", **more)

    yield row("in_proj", inputs, kind)
    yield row("conv1d", "conv1d", "delta_convolution", fused=True)
    for name in ("A_log", "dt_bias"):
        hf = (f"{HF_LAYERS}linear_attn.{name}",)
        yield Row(f"{LAYERS}self_attention.{name}", hf, "column", layers="linear")
    yield row("norm", "norm", "copy")
    yield row("out_proj", "out_proj", "row")


def delta_attention(*of_delta_net: str) -> Iterator[Row]:
    """Yield the attention Rows (how megatron tensors map to Hugging Face's) of a model with two
    kinds of layers: some with softmax attention and norms of queries and keys, the others with a
    gated delta net. of_delta_net: the arguments of delta_rows."""
    for row in attention(norm=True):
        yield replace(row, layers="attention")
    yield from delta_rows(*of_delta_net)


def parts_of(kind: str, config: Any) -> list[int]:
    """The sizes of the blocks that are joined in one megatron tensor of a gated delta net, in rows
    of the whole model's tensor, in the order of Hugging Face's tensors. kind: the tensor's kind in
    its Row. "delta": [q, k, v, z, b, a], where z are the gates and b and a have a row per value
    head; "delta_grouped": [q + k + v + z, b + a]; "delta_convolution": [q, k, v]. config: the
    model's."""
    of_keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads = config.linear_num_value_heads
    of_values = heads * config.linear_value_head_dim
    parts = [of_keys, of_keys, of_values, of_values, heads, heads]
    if kind == "delta_convolution":
        return parts[:3]
    return parts if kind == "delta" else [sum(parts[:4]), sum(parts[4:])]


def _linear_layers(hf: Any) -> dict[str, Any]:
    kinds = enumerate(hf.layer_types)
    return {"linear_layers": [i for i, kind in kinds if kind == "linear_attention"]}


_DENSE_LAYERS = tuple(mlp_rows(layers="dense"))
_QWEN2_MOE = FAMILIES["qwen2_moe"]
_GATED_EXPERTS = (*moe_rows(), *shared_expert_rows("shared_expert", "shared_expert_gate"))
_QWEN3_NEXT = Family(
    decoder_rows(
        delta_attention("in_proj_qkvz in_proj_ba", "delta_grouped"),
        (*_DENSE_LAYERS, *_GATED_EXPERTS),
    ),
    {**_QWEN2_MOE.config, **_LINEAR_CONFIG},
    {**_QWEN2_MOE.constants, **_LINEAR},
    "hidden_act attention_bias",
    derived=lambda hf: {**FAMILIES["qwen3_moe"].derived(hf), **_linear_layers(hf)},
    partial_rotary=True,
    prediction=PREDICTION_KEY,
    unused=(r"^mtp\.",),  # transformers does not read them
)
_QWEN3_5 = replace(_QWEN3_NEXT, prediction="mtp_num_hidden_layers")
_SEPARATE = ("in_proj_qkv in_proj_z in_proj_b in_proj_a", "delta")
LINEAR = {
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": replace(
        _QWEN3_5,
        rows=decoder_rows(delta_attention(*_SEPARATE), mlp_rows()),
        config=_LINEAR_CONFIG,
        constants=_LINEAR,
        derived=_linear_layers,
    ),
    "qwen3_5_moe_text": replace(
        _QWEN3_5, rows=decoder_rows(delta_attention(*_SEPARATE), _GATED_EXPERTS)
    ),
}
FAMILIES |= LINEAR
