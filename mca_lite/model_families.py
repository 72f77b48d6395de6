"""The table of model families: how a Hugging Face config and its weights become megatron's, and
back.

A family is a few rows (model_family_rows.py says what a row is), a few config keys, and what of a
config.json it cannot honour. `get_family` and `rows_of` are what the rest of the package reads.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .args_values import refuse
from .model_family_rows import (
    GEMMA_NORMS,
    GLM4_NORMS,
    POST_NORMS,
    Row,
    attention,
    decoder_rows,
    dense_rows,
    latent_attention,
    mlp_rows,
    moe_rows,
    prediction_rows,
    shared_expert_rows,
)


@dataclass(frozen=True)
class Family:
    """A model_type: its rows, config keys, and what of a config.json cannot be honoured."""

    rows: tuple[Row, ...]
    config: dict[str, str]  # HF config key -> McaModelConfig field
    constants: dict[str, Any]  # McaModelConfig fields that this family always has
    # (key, is it in use?, what to do)
    refusals: tuple[tuple[str, Callable[[Any], bool], str], ...] = ()
    # the window that is in use, in tokens
    sliding_window: Callable[[Any], int | None] = field(default=lambda hf: None)
    # fields that follow from several keys
    derived: Callable[[Any], dict[str, Any]] = field(default=lambda hf: {})
    # its checkpoints hold layers for multi-token prediction after the last one
    prediction_layers: bool = False
    # whether the model of transformers honours partial_rotary_factor
    partial_rotary: bool = False

    def values(self, hf) -> dict[str, Any]:
        """McaModelConfig fields that a transformers config object decides."""
        values = dict(self.constants)
        for theirs, ours in self.config.items():
            value = getattr(hf, theirs, None)
            if value is not None:
                values[ours] = value
        values.update(self.derived(hf))
        if not values.get("num_moe_experts"):
            # megatron refuses what would describe the experts of a dense model
            values = {name: value for name, value in values.items() if not name.startswith("moe_")}
        return values


DENSE_CONFIG = {
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
_ONLY_GELU = (
    "hidden_activation",
    lambda act: act != "gelu_pytorch_tanh",
    "only gelu_pytorch_tanh (geglu) is built",
)
_NO_OUT_BIAS = (
    "attention_out_bias",
    bool,
    "a bias on o_proj is not built: convert the model to one without",
)
_ONLY_CAUSAL = ("use_bidirectional_attention", bool, "only causal attention is built")
_NO_LATENT_BIAS = ("attention_bias", bool, "biases in multi-latent attention are not built")
_NO_ATTENTION_BIAS = (
    "attention_bias",
    bool,
    "a bias on o_proj is not built: convert the model to one without",
)
_NO_MLP_BIAS = ("mlp_bias", bool, "biases in the MLP are not built")


def _window_of_layers(hf):
    if "sliding_attention" in (getattr(hf, "layer_types", None) or ()):
        return hf.sliding_window
    return None


def _window_of_all(hf):
    return hf.sliding_window


_GEMMA = {
    **_DENSE,
    "activation_func": "gelu_pytorch_tanh",
    "layernorm_zero_centered_gamma": True,
    "post_norms": True,
}


def _gemma_scales(hf):
    return {
        "embedding_multiplier": hf.hidden_size**0.5,
        "softmax_scale": hf.query_pre_attn_scalar**-0.5,
    }


_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_QKV_BIAS = {"attention_bias": "add_qkv_bias"}

_LATENT_CONFIG = {
    **DENSE_CONFIG,
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "head_dim": "kv_channels",  # of what the rotary embedding turns
    "rope_interleave": "rope_interleave",
}


def _latent_fields(hf):
    """q_lora_rank may be None; yarn's mscale_all_dim changes the scale of the scores."""
    rope, fields = (
        hf.rope_parameters,
        {"q_lora_rank": hf.q_lora_rank, "num_query_groups": hf.num_attention_heads},
    )
    factor, mscale = rope.get("factor") or 1.0, rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") != "default" and mscale and factor > 1:
        size = hf.qk_nope_head_dim + hf.qk_rope_head_dim
        fields["softmax_scale"] = size**-0.5 * (0.1 * mscale * math.log(factor) + 1.0) ** 2
    return fields


# our router reads moe_router_norm_topk_prob; megatron's check wants the other one for top-1
_MOE = dict(_DENSE, moe_router_pre_softmax=True)
_MOE_CONFIG = {
    **DENSE_CONFIG,
    "num_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "norm_topk_prob": "moe_router_norm_topk_prob",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "router_aux_loss_coef": "moe_aux_loss_coeff",
}


def _sparse_layers(hf) -> list[int]:
    """1 for each layer that is a mixture of experts, 0 for each that is dense."""
    step, dense = getattr(hf, "decoder_sparse_step", 1), getattr(hf, "mlp_only_layers", None) or ()
    return [int(i not in dense and (i + 1) % step == 0) for i in range(hf.num_hidden_layers)]


def _qwen2_moe(hf) -> dict[str, Any]:
    return {"moe_layer_freq": _sparse_layers(hf), "add_qkv_bias": hf.qkv_bias}


def _experts_everywhere(hf) -> dict[str, Any]:
    """Where intermediate_size is that of an expert."""
    return {
        "moe_layer_freq": [1] * hf.num_hidden_layers,
        "moe_ffn_hidden_size": hf.intermediate_size,
    }


def sigmoid_router(hf) -> dict[str, Any]:
    """Sigmoid scores, a bias that only chooses, groups, shared experts, dense layers first."""
    grouped = hf.n_group > 1
    return {
        "num_moe_experts": hf.n_routed_experts
        if hf.first_k_dense_replace < hf.num_hidden_layers
        else None,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_num_groups": hf.n_group if grouped else None,
        "moe_router_group_topk": hf.topk_group if grouped else None,
        "moe_shared_expert_intermediate_size": (hf.n_shared_experts or 0) * hf.moe_intermediate_size
        or None,
        "moe_layer_freq": [int(i >= hf.first_k_dense_replace) for i in range(hf.num_hidden_layers)],
    }


def _glm4_moe(hf) -> dict[str, Any]:
    return {**sigmoid_router(hf), "add_qkv_bias": hf.attention_bias, "qk_layernorm": hf.use_qk_norm}


def _deepseek_v2(hf) -> dict[str, Any]:
    """Softmax scores that are not normalised; a group of experts counts by its best one."""
    grouped = hf.topk_method == "group_limited_greedy"
    return {
        "num_moe_experts": hf.n_routed_experts
        if hf.first_k_dense_replace < hf.num_hidden_layers
        else None,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_num_groups": hf.n_group if grouped else None,
        "moe_router_group_topk": hf.topk_group if grouped else None,
        "moe_router_group_score": "max",
        "moe_shared_expert_intermediate_size": hf.n_shared_experts * hf.moe_intermediate_size,
        "moe_layer_freq": [int(i >= hf.first_k_dense_replace) for i in range(hf.num_hidden_layers)],
        **_latent_fields(hf),
    }


_GREEDY = (
    "topk_method",
    lambda method: method not in ("greedy", "group_limited_greedy"),
    "expected greedy or group_limited_greedy",
)
# keys of DeepSeek's own code that transformers' classes pass over: other values make another model
_NO_NORM_TOPK = (
    "norm_topk_prob",
    bool,
    "transformers does not normalise the weights of this model: set it to false",
)
_EVERY_LAYER = (
    "moe_layer_freq",
    lambda step: step not in (None, 1),
    "expected 1: experts in each layer after the dense ones",
)


def _scores_are(function: str):
    return ("scoring_func", lambda name: name not in (None, function), f"expected {function}")


_BY_BIAS = ("topk_method", lambda method: method not in (None, "noaux_tc"), "expected noaux_tc")
_DENSE_LAYERS = tuple(mlp_rows(layers="dense"))
_SPARSE_MLP = (*_DENSE_LAYERS, *moe_rows(), *shared_expert_rows("shared_experts"))

FAMILIES: dict[str, Family] = {
    "llama": Family(
        dense_rows(), DENSE_CONFIG, _DENSE, (_ONLY_SILU, _NO_ATTENTION_BIAS, _NO_MLP_BIAS)
    ),
    "mistral": Family(dense_rows(), DENSE_CONFIG, _DENSE, (_ONLY_SILU,), _window_of_all),
    "qwen2": Family(
        dense_rows(bias=True),
        DENSE_CONFIG,
        {**_DENSE, "add_qkv_bias": True},
        (_ONLY_SILU,),
        _window_of_layers,
    ),
    "qwen3": Family(
        dense_rows(norm=True),
        DENSE_CONFIG,
        {**_DENSE, "qk_layernorm": True},
        (_ONLY_SILU, _NO_ATTENTION_BIAS),
        _window_of_layers,
    ),
    "qwen3_moe": Family(
        decoder_rows(attention(norm=True), (*_DENSE_LAYERS, *moe_rows())),
        _MOE_CONFIG,
        {**_MOE, "qk_layernorm": True},
        (_ONLY_SILU, _NO_ATTENTION_BIAS),
        _window_of_all,
        lambda hf: {"moe_layer_freq": _sparse_layers(hf)},
    ),
    "qwen2_moe": Family(
        decoder_rows(
            attention(bias="add_qkv_bias"),
            (
                *_DENSE_LAYERS,
                *moe_rows(),
                *shared_expert_rows("shared_expert", "shared_expert_gate"),
            ),
        ),
        {**_MOE_CONFIG, "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"},
        {**_MOE, "moe_shared_expert_gate": True},
        (_ONLY_SILU,),
        _window_of_layers,
        _qwen2_moe,
    ),
    "mixtral": Family(
        decoder_rows(attention(), moe_rows("block_sparse_moe.", "w1", "w3", "w2")),
        {**_MOE_CONFIG, "num_local_experts": "num_moe_experts"},
        _MOE,
        (
            _ONLY_SILU,
            ("router_jitter_noise", bool, "noise on the router's input is not built: set it to 0"),
        ),
        _window_of_all,
        _experts_everywhere,
    ),
    "olmoe": Family(
        decoder_rows(attention(norm=True, norm_kind="column"), moe_rows()),
        _MOE_CONFIG,
        {**_MOE, "qk_norm_over_heads": True},
        (
            _ONLY_SILU,
            _NO_ATTENTION_BIAS,
            ("clip_qkv", bool, "clipping of queries, keys and values is not built"),
        ),
        derived=_experts_everywhere,
    ),
    "glm4_moe": Family(
        decoder_rows(attention(bias="add_qkv_bias", norm="qk_layernorm"), _SPARSE_MLP),
        _MOE_CONFIG,
        _MOE,
        (_ONLY_SILU,),
        derived=_glm4_moe,
        prediction_layers=True,
        partial_rotary=True,
    ),
    "gemma2": Family(
        dense_rows(norms=GEMMA_NORMS),
        {**DENSE_CONFIG, **_CAPS},
        _GEMMA,
        (_ONLY_GELU, _NO_ATTENTION_BIAS, _ONLY_CAUSAL),
        _window_of_layers,
        _gemma_scales,
    ),
    "gemma3_text": Family(
        dense_rows(norm=True, norms=GEMMA_NORMS),
        {**DENSE_CONFIG, **_CAPS},
        {**_GEMMA, "qk_layernorm": True},
        (_ONLY_GELU, _NO_ATTENTION_BIAS, _ONLY_CAUSAL),
        _window_of_layers,
        _gemma_scales,
    ),
    "glm4": Family(
        decoder_rows(attention(bias="add_qkv_bias"), mlp_rows(fused=True), GLM4_NORMS),
        {**DENSE_CONFIG, **_QKV_BIAS},
        {**_DENSE, "post_norms": True, "rope_interleave": True},
        (_ONLY_SILU,),
        partial_rotary=True,
    ),
    "granite": Family(
        dense_rows(),
        {
            **DENSE_CONFIG,
            "embedding_multiplier": "embedding_multiplier",
            "attention_multiplier": "softmax_scale",
            "residual_multiplier": "residual_multiplier",
            "logits_scaling": "logits_scaling",
        },
        _DENSE,
        (_ONLY_SILU, _NO_ATTENTION_BIAS, _NO_MLP_BIAS),
    ),
    "olmo2": Family(
        dense_rows(norm=True, norm_kind="column", norms=POST_NORMS),
        DENSE_CONFIG,
        {**_DENSE, "pre_norms": False, "post_norms": True, "qk_norm_over_heads": True},
        (_ONLY_SILU, _NO_ATTENTION_BIAS),
    ),
    "phi3": Family(
        decoder_rows(attention(fused=True), mlp_rows(fused=True)),
        {**DENSE_CONFIG, "resid_pdrop": "hidden_dropout"},
        {**_DENSE, "drop_embeddings": False},
        (_ONLY_SILU,),
        _window_of_all,
        partial_rotary=True,
    ),
    "deepseek_v2": Family(
        decoder_rows(latent_attention(), _SPARSE_MLP),
        {**_MOE_CONFIG, **_LATENT_CONFIG},
        {
            **_MOE,
            "multi_latent_attention": True,
            "rope_interleave": True,
            "moe_router_norm_topk_prob": False,
        },
        (
            _ONLY_SILU,
            _NO_LATENT_BIAS,
            _NO_MLP_BIAS,
            _GREEDY,
            _NO_NORM_TOPK,
            _EVERY_LAYER,
            _scores_are("softmax"),
        ),
        derived=_deepseek_v2,
    ),
    "deepseek_v3": Family(
        decoder_rows(latent_attention(), _SPARSE_MLP),
        {**_MOE_CONFIG, **_LATENT_CONFIG},
        {**_MOE, "multi_latent_attention": True},
        (_ONLY_SILU, _NO_LATENT_BIAS, _BY_BIAS, _EVERY_LAYER, _scores_are("sigmoid")),
        derived=lambda hf: {**sigmoid_router(hf), **_latent_fields(hf)},
        prediction_layers=True,
    ),
    "seed_oss": Family(
        dense_rows(bias="add_qkv_bias"),
        {**DENSE_CONFIG, **_QKV_BIAS, "residual_dropout": "hidden_dropout"},
        {**_DENSE, "drop_embeddings": False},
        (_ONLY_SILU, _NO_OUT_BIAS, _NO_MLP_BIAS),
    ),
}


# model types that transformers does not know, and those that have the same tensors and keys
SAME_AS = {"kimi_k2": "deepseek_v3"}


def get_family(model_type: str) -> Family:
    """The family of a config.json's model_type. ConfigError names those that there are."""
    if model_type not in FAMILIES:
        reason = "it is not one that can be trained on megatron-core here: expected one of "
        remedy = "use_mca: false, to train it as plain torch"
        refuse(
            "model_type in config.json", model_type, reason + ", ".join(sorted(FAMILIES)), remedy
        )
    return FAMILIES[model_type]


def rows_of(model_type: str, config) -> tuple[Row, ...]:
    """The rows of a model, one of each expert. config: anything with McaModelConfig's fields."""
    family = get_family(model_type)
    rows = family.rows
    if getattr(config, "mtp_num_layers", None):
        rows = (*rows, *prediction_rows(rows))
    there = tuple(row for row in rows if row.is_there(config))
    return _expand(there, getattr(config, "num_moe_experts", None) or 0)


@functools.lru_cache(16)
def _expand(rows: tuple[Row, ...], num_experts: int) -> tuple[Row, ...]:
    expanded: list[Row] = []
    for row in rows:
        if "[]" not in row.mca:
            expanded.append(row)
            continue
        for e in range(num_experts):
            hf = tuple(name.replace("[]", str(e)) for name in row.hf)
            expanded.append(replace(row, mca=row.mca.replace("[]", str(e)), hf=hf, expert=e))
    return tuple(expanded)
