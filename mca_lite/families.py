"""The table of model families: how a Hugging Face config and its weights become megatron's, and back.

One row maps one megatron tensor: (megatron name, HF names, kind). `{}` is the layer's number. The kind says how HF
tensors merge into megatron's, and which axis tensor parallelism cuts:

    copy     one tensor, the same on every tensor-parallel rank
    column   one tensor, cut along its rows (the output dimension)
    row      one tensor, cut along its columns (the input dimension)
    gated    [gate; up]: each is cut along its rows, then a rank's parts are joined
    qkv      per query group [its queries, key, value] along the rows, no rotary permutation; groups cut over ranks

A fused row names one HF tensor, which holds what gated or qkv take of several, one behind the other.

A new family is a few rows and a few config keys. `FAMILIES[model_type]` is what the rest of the package reads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One megatron tensor and the HF tensors that it is made of."""

    mca: str
    hf: tuple[str, ...]
    kind: str
    fused: bool = False  # the one HF tensor holds all parts
    linear: bool = False  # of kind copy: it is a matrix that others would cut
    where: Callable[[Any], bool] = lambda config: True  # the McaModelConfigs whose models have it

    @property
    def num_parts(self) -> int:
        """Tensors that gated or qkv merge, be they HF tensors or parts of one."""
        return {"gated": 2, "qkv": 3}.get(self.kind, 1) if self.fused else len(self.hf)

    @property
    def is_linear(self) -> bool:
        """Whether the tensor is the matrix of a linear layer or an embedding: what can have an adapter."""
        is_norm = "layernorm" in self.mca
        return self.mca.endswith(".weight") and (self.linear if self.kind == "copy" else not is_norm)


@dataclass(frozen=True)
class Family:
    """A model_type of transformers: its rows, config keys, and what of its config.json cannot be honoured."""

    rows: tuple[Row, ...]
    config: dict[str, str]  # HF config key -> McaModelConfig field
    constants: dict[str, Any]  # McaModelConfig fields that this family always has
    refusals: tuple[tuple[str, Callable[[Any], bool], str], ...] = ()  # (key, is it in use?, what to do)
    sliding_window: Callable[[Any], int | None] = field(default=lambda hf: None)  # the window that is in use, tokens
    computed: Callable[[Any], dict[str, Any]] = field(default=lambda hf: {})  # fields that follow from several keys
    partial_rotary: bool = False  # its models turn only a part of each head


def _attention(norm=None, fused=False):
    """norm: how the norms of queries and keys are cut, None without them."""
    layer, hf = "decoder.layers.{}.self_attention.", "model.layers.{}.self_attn."
    if fused:
        yield Row(layer + "linear_qkv.weight", (hf + "qkv_proj.weight",), "qkv", fused=True)
    else:
        yield Row(layer + "linear_qkv.weight", tuple(hf + f"{x}_proj.weight" for x in "qkv"), "qkv")
        biases = tuple(hf + f"{x}_proj.bias" for x in "qkv")
        yield Row(layer + "linear_qkv.bias", biases, "qkv", where=lambda config: config.add_qkv_bias)
    if norm:
        yield Row(layer + "q_layernorm.weight", (hf + "q_norm.weight",), norm)
        yield Row(layer + "k_layernorm.weight", (hf + "k_norm.weight",), norm)
    yield Row(layer + "linear_proj.weight", (hf + "o_proj.weight",), "row")


def _latent_attention():
    """Multi-latent attention; the projection of queries is one matrix, or two with a norm between them."""

    def has_rank(config):
        return config.q_lora_rank is not None

    layer, hf = "decoder.layers.{}.self_attention.", "model.layers.{}.self_attn."

    def row(ours, theirs, kind, **more):
        return Row(f"{layer}{ours}.weight", (f"{hf}{theirs}.weight",), kind, **more)

    yield row("linear_q_proj", "q_proj", "column", where=lambda config: not has_rank(config))
    yield row("linear_q_down_proj", "q_a_proj", "copy", linear=True, where=has_rank)
    yield row("q_layernorm", "q_a_layernorm", "copy", where=has_rank)
    yield row("linear_q_up_proj", "q_b_proj", "column", where=has_rank)
    yield row("linear_kv_down_proj", "kv_a_proj_with_mqa", "copy", linear=True)
    yield row("kv_layernorm", "kv_a_layernorm", "copy")
    yield row("linear_kv_up_proj", "kv_b_proj", "column")
    yield row("linear_proj", "o_proj", "row")


# HF's names of a layer's norms: before attention, of what attention gives, before the MLP, of what the MLP gives
_PRE_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
_POST_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GLM4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _dense_rows(norm=None, norms=_PRE_NORMS, fused_attention=False, fused_mlp=False, latent=False):
    layer, hf = "decoder.layers.{}.", "model.layers.{}."
    places = ("input_layernorm", "self_attn_bda.norm", "pre_mlp_layernorm", "mlp_bda.norm")
    of_layer = [
        name and Row(f"{layer}{place}.weight", (f"{hf}{name}.weight",), "copy")
        for place, name in zip(places, norms, strict=True)
    ]
    gate_up = ("gate_up_proj",) if fused_mlp else ("gate_proj", "up_proj")
    rows = (
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "column"),
        of_layer[0],
        *(_latent_attention() if latent else _attention(norm, fused_attention)),
        *of_layer[1:3],
        Row(layer + "mlp.linear_fc1.weight", tuple(f"{hf}mlp.{x}.weight" for x in gate_up), "gated", fused_mlp),
        Row(layer + "mlp.linear_fc2.weight", (hf + "mlp.down_proj.weight",), "row"),
        of_layer[3],
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), "copy"),
        Row("output_layer.weight", ("lm_head.weight",), "column"),
    )
    return tuple(row for row in rows if row)


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
_ONLY_GELU = ("hidden_activation", lambda act: act != "gelu_pytorch_tanh", "only gelu_pytorch_tanh (geglu) is built")
_NO_ATTENTION_BIAS = ("attention_bias", bool, "a bias on o_proj is not built: convert the model to one without")
_NO_OUT_BIAS = ("attention_out_bias", bool, "a bias on o_proj is not built: convert the model to one without")
_NO_MLP_BIAS = ("mlp_bias", bool, "biases in the MLP are not built")
_ONLY_CAUSAL = ("use_bidirectional_attention", bool, "only causal attention is built")


def _window_of_layers(hf):
    return hf.sliding_window if "sliding_attention" in (getattr(hf, "layer_types", None) or ()) else None


def _window_of_all(hf):
    return hf.sliding_window


_GEMMA = {
    **_DENSE,
    "activation_func": "gelu_pytorch_tanh",
    "layernorm_zero_centered_gamma": True,
    "post_norms": True,
}


def _gemma_scales(hf):
    return {"embedding_multiplier": hf.hidden_size**0.5, "softmax_scale": hf.query_pre_attn_scalar**-0.5}


_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_QKV_BIAS = {"attention_bias": "add_qkv_bias"}

_NO_LATENT_BIAS = ("attention_bias", bool, "biases in multi-latent attention are not built")
_LATENT_CONFIG = {
    **_DENSE_CONFIG,
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "head_dim": "kv_channels",  # of what the rotary embedding turns
    "rope_interleave": "rope_interleave",
}


def _latent_fields(hf):
    """q_lora_rank may be none at all; yarn's mscale_all_dim changes the scale of attention's scores."""
    rope, fields = hf.rope_parameters, {"q_lora_rank": hf.q_lora_rank, "num_query_groups": hf.num_attention_heads}
    factor, mscale = rope.get("factor") or 1.0, rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") != "default" and mscale and factor > 1:
        size = hf.qk_nope_head_dim + hf.qk_rope_head_dim
        fields["softmax_scale"] = size**-0.5 * (0.1 * mscale * math.log(factor) + 1.0) ** 2
    return fields


FAMILIES: dict[str, Family] = {
    "llama": Family(_dense_rows(), _DENSE_CONFIG, _DENSE, (_ONLY_SILU, _NO_ATTENTION_BIAS, _NO_MLP_BIAS)),
    "mistral": Family(_dense_rows(), _DENSE_CONFIG, _DENSE, (_ONLY_SILU,), _window_of_all),
    "qwen2": Family(_dense_rows(), _DENSE_CONFIG, {**_DENSE, "add_qkv_bias": True}, (_ONLY_SILU,), _window_of_layers),
    "qwen3": Family(
        _dense_rows(norm="copy"),
        _DENSE_CONFIG,
        {**_DENSE, "qk_layernorm": True},
        (_ONLY_SILU, _NO_ATTENTION_BIAS),
        _window_of_layers,
    ),
    "gemma2": Family(
        _dense_rows(norms=_GEMMA_NORMS),
        {**_DENSE_CONFIG, **_CAPS},
        _GEMMA,
        (_ONLY_GELU, _NO_ATTENTION_BIAS, _ONLY_CAUSAL),
        _window_of_layers,
        _gemma_scales,
    ),
    "gemma3_text": Family(
        _dense_rows(norm="copy", norms=_GEMMA_NORMS),
        {**_DENSE_CONFIG, **_CAPS},
        {**_GEMMA, "qk_layernorm": True},
        (_ONLY_GELU, _NO_ATTENTION_BIAS, _ONLY_CAUSAL),
        _window_of_layers,
        _gemma_scales,
    ),
    "glm4": Family(
        _dense_rows(norms=_GLM4_NORMS, fused_mlp=True),
        {**_DENSE_CONFIG, **_QKV_BIAS},
        {**_DENSE, "post_norms": True, "rope_interleave": True},
        (_ONLY_SILU,),
        partial_rotary=True,
    ),
    "granite": Family(
        _dense_rows(),
        {
            **_DENSE_CONFIG,
            "embedding_multiplier": "embedding_multiplier",
            "attention_multiplier": "softmax_scale",
            "residual_multiplier": "residual_multiplier",
            "logits_scaling": "logits_scaling",
        },
        _DENSE,
        (_ONLY_SILU, _NO_ATTENTION_BIAS, _NO_MLP_BIAS),
    ),
    "olmo2": Family(
        _dense_rows(norm="column", norms=_POST_NORMS),
        _DENSE_CONFIG,
        {**_DENSE, "pre_norms": False, "post_norms": True, "norm_of_all_heads": True},
        (_ONLY_SILU, _NO_ATTENTION_BIAS),
    ),
    "phi3": Family(
        _dense_rows(fused_attention=True, fused_mlp=True),
        {**_DENSE_CONFIG, "resid_pdrop": "hidden_dropout"},
        {**_DENSE, "drop_embeddings": False},
        (_ONLY_SILU,),
        _window_of_all,
        partial_rotary=True,
    ),
    "deepseek_v2": Family(
        _dense_rows(latent=True),
        _LATENT_CONFIG,
        {**_DENSE, "multi_latent_attention": True, "rope_interleave": True},
        (_ONLY_SILU, _NO_LATENT_BIAS, _NO_MLP_BIAS),
        computed=_latent_fields,
    ),
    "deepseek_v3": Family(
        _dense_rows(latent=True),
        _LATENT_CONFIG,
        {**_DENSE, "multi_latent_attention": True},
        (_ONLY_SILU, _NO_LATENT_BIAS),
        computed=_latent_fields,
    ),
    "seed_oss": Family(
        _dense_rows(),
        {**_DENSE_CONFIG, **_QKV_BIAS, "residual_dropout": "hidden_dropout"},
        {**_DENSE, "drop_embeddings": False},
        (_ONLY_SILU, _NO_OUT_BIAS, _NO_MLP_BIAS),
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


def rows_of(config) -> tuple[Row, ...]:
    """The rows of a McaModelConfig's model, in the order of its layers' tensors."""
    return tuple(row for row in get_family(config.hf_model_type).rows if row.where(config))
