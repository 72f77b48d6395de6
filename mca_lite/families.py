"""The table of model families: names of weights and config keys in Hugging Face and megatron.

A Family has rows (a megatron tensor and its HF tensors each), config keys, and refusals of
unsupported config.json values. `get_family` and `rows_of` read the table.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeAlias

from .errors import Judge, expect
from .families_rows import (
    GELU,
    GEMMA_NORMS,
    GLM4_NORMS,
    HF_LAYERS,
    LAYERS,
    POST_NORMS,
    PREDICTION_KEY,
    Family,
    Row,
    attention,
    attention_of_two_sizes,
    decoder_rows,
    dense_rows,
    field_of,
    latent_attention,
    mlp_rows,
    moe_rows,
    shared_expert_rows,
)
from .parts import absent_rows, load, need_of
from .tables import function_of

# -- shared by several families


def _same(keys: str) -> dict[str, str]:
    """{key: key} for config.json keys, separated by spaces, with the same name as megatron's
    fields."""
    return {key: key for key in keys.split()}


# ((name, True if it is the weight matrix of a torch Linear), ...)
InputTensors: TypeAlias = tuple[tuple[str, bool], ...]

_GEMMA = {"activation_func": GELU, "layernorm_zero_centered_gamma": True, "post_norms": True}
_GEMMA_REFUSALS = "hidden_activation attention_bias use_bidirectional_attention"
_CAPS = _same("attn_logit_softcapping final_logit_softcapping")
_QKV_BIAS = {"attention_bias": "add_qkv_bias"}


def _gemma_scales(hf: Any) -> dict[str, float]:
    return {
        "embedding_multiplier": hf.hidden_size**0.5,
        "softmax_scale": hf.query_pre_attn_scalar**-0.5,
    }


def _gemma4(hf: Any) -> dict[str, Any]:
    """{McaModelConfig field: value} for Gemma 4, from its transformers config `hf`: the embedding's
    multiplier, and head size and count of key-value heads in layers without a sliding window."""
    full = hf.per_layer_config["full_attention"]
    return {
        "embedding_multiplier": hf.hidden_size**0.5,
        "full_kv_channels": full.head_dim,
        "full_query_groups": full.num_key_value_heads,
    }


def _without_rope(is_without: Iterable[bool]) -> dict[str, list[int]]:
    return {"layers_without_rope": [i for i, without in enumerate(is_without) if without]}


def _exaone4(hf: Any) -> dict[str, Any]:
    """{McaModelConfig field: value} for EXAONE 4, from its transformers config `hf`: layers without
    a sliding window have no rotary embedding. If sliding_window is null, every layer has one."""
    if hf.sliding_window is None:
        return {}
    return _without_rope(name == "full_attention" for name in hf.layer_types)


# mca_lite's router reads moe_router_norm_topk_prob; megatron's check needs pre_softmax for top-1
_MOE = dict(moe_router_pre_softmax=True)
_MOE_CONFIG = {
    "num_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "norm_topk_prob": "moe_router_norm_topk_prob",
    "moe_intermediate_size": "moe_ffn_hidden_size",
}
_BALANCED_CONFIG = {**_MOE_CONFIG, "router_aux_loss_coef": "moe_aux_loss_coeff"}
_LATENT_CONFIG = {
    **_MOE_CONFIG,
    **_same("kv_lora_rank v_head_dim rope_interleave"),
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "head_dim": "kv_channels",  # how many channels the rotary embedding turns
}
_DENSE_LAYERS = tuple(mlp_rows(layers="dense"))
_SPARSE_MLP = (*_DENSE_LAYERS, *moe_rows(), *shared_expert_rows("shared_experts"))


def _sparse_layers(hf: Any) -> dict[str, Any]:
    """{"moe_layer_freq": [...]} for a transformers config, with 1 for each layer with experts and 0
    for each dense layer."""
    step = field_of(hf, "decoder_sparse_step", 1)
    dense = field_of(hf, "mlp_only_layers") or ()
    sparse = [int(i not in dense and (i + 1) % step == 0) for i in range(hf.num_hidden_layers)]
    return {"moe_layer_freq": sparse}


def _experts_everywhere(hf: Any) -> dict[str, Any]:
    """{McaModelConfig field: value} for a model with experts in every layer, from its transformers
    config `hf`. Each expert has intermediate_size columns."""
    return {
        "moe_layer_freq": [1] * hf.num_hidden_layers,
        "moe_ffn_hidden_size": hf.intermediate_size,
    }


def _grouped_experts(
    hf: Any, grouped: bool, routed: str = "n_routed_experts", shared: str = "n_shared_experts"
) -> dict[str, Any]:
    """{McaModelConfig field: value} for the experts of DeepSeek's and similar models, from a
    transformers config `hf`. Dense layers come first, then layers with routed and shared experts;
    if the config has mlp_layer_types, they decide instead.

    grouped: True if the router chooses groups of experts first. routed, shared: the config.json
    keys with the counts of routed and of shared experts."""
    dense = field_of(hf, "first_k_dense_replace", 0)
    sparse = [int(i >= dense) for i in range(hf.num_hidden_layers)]
    if kinds := field_of(hf, "mlp_layer_types"):
        sparse = [int(name == "sparse") for name in kinds]
    width = (getattr(hf, shared) or 0) * hf.moe_intermediate_size
    return {
        "num_moe_experts": getattr(hf, routed) if any(sparse) else None,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_num_groups": hf.n_group if grouped else None,
        "moe_router_group_topk": hf.topk_group if grouped else None,
        "moe_shared_expert_intermediate_size": width or None,
        "moe_layer_freq": sparse,
    }


def _sigmoid_router(hf: Any, *keys: str) -> dict[str, Any]:
    """{McaModelConfig field: value} for the experts of DeepSeek-V3 and similar models, from a
    transformers config `hf`: sigmoid scores, and a bias that affects only which experts are chosen.
    keys: the config.json keys with the counts of routed and of shared experts."""
    return {
        **_grouped_experts(hf, (hf.n_group or 1) > 1, *keys),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }


def _glm4_moe(hf: Any) -> dict[str, Any]:
    has_norms = field_of(hf, "use_qk_norm", False)
    attention = {"add_qkv_bias": hf.attention_bias, "qk_layernorm": has_norms}
    return _sigmoid_router(hf) | attention


def _latent_fields(hf: Any) -> dict[str, Any]:
    """{McaModelConfig field: value} for multi-latent attention, from a transformers config `hf`.
    The scale of the attention scores is among them if yarn's mscale_all_dim, with a factor above 1,
    changes it."""
    rope = hf.rope_parameters
    fields = {"q_lora_rank": hf.q_lora_rank, "num_query_groups": hf.num_attention_heads}
    factor = rope.get("factor") or 1.0
    mscale = rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") != "default" and mscale and factor > 1:
        size = hf.qk_nope_head_dim + hf.qk_rope_head_dim
        fields["softmax_scale"] = size**-0.5 * (0.1 * mscale * math.log(factor) + 1.0) ** 2
    return fields


def _gpt_oss(hf: Any) -> dict[str, Any]:
    """{McaModelConfig field: value} for gpt-oss, from its transformers config `hf`: experts in each
    layer, and biases in attention if attention_bias is set. The router's weights are a softmax over
    all experts, normalised over the chosen ones, which equals gpt-oss's softmax over the chosen
    ones."""
    return {
        **_experts_everywhere(hf),
        "add_qkv_bias": hf.attention_bias,
        "add_output_bias": hf.attention_bias,
    }


def _flint(hf: Any) -> dict[str, Any]:
    """{McaModelConfig field: value} for Flint, from its transformers config `hf`: the layers with
    experts, whether attention has biases, and no rotary embedding in layers without a sliding
    window."""
    return {
        **_sparse_layers(hf),
        **_without_rope(name == "full_attention" for name in hf.layer_types),
        "add_qkv_bias": hf.attention_bias,
        "add_output_bias": hf.attention_bias,
    }


def _hyperclovax(hf: Any) -> dict[str, Any]:
    """{McaModelConfig field: value} for HyperCLOVA X, from its transformers config `hf`. Hugging
    Face's model multiplies its logits by logits_scaling, and this package's model divides them by
    the field of this name, so the field is the inverse."""
    return {"logits_scaling": 1 / hf.logits_scaling, "add_output_bias": hf.attention_bias}


def _hunyuan_moe(hf: Any) -> dict[str, Any]:
    """{McaModelConfig field: value} for Hunyuan's experts, from a transformers config `hf`: routed
    ones in every layer, and one shared expert as wide as a routed one. Raises ValueError if layers
    differ in the count of experts per token."""
    counts = hf.moe_topk
    if isinstance(counts, int):
        counts = [counts]
    expect(
        len(set(counts)) == 1,
        f"moe_topk in config.json: expected one count of experts per token, got {counts}: set "
        "use_mca: false, to train it as plain torch",
    )
    width = {"moe_shared_expert_intermediate_size": hf.intermediate_size}
    return {**_experts_everywhere(hf), **width, "moe_router_topk": counts[0]}


def _deepseek_v2(hf: Any) -> dict[str, Any]:
    """{McaModelConfig field: value} for DeepSeek-V2, from its transformers config `hf`: latent
    attention, and experts. If topk_method is group_limited_greedy, the router chooses groups of
    experts first, and ranks a group by its best expert."""
    experts = _grouped_experts(hf, hf.topk_method == "group_limited_greedy")
    return {**experts, "moe_router_group_score": "max", **_latent_fields(hf)}


_SCALAR = "layer_scalar"  # a constant that multiplies a layer's output
LANGUAGE_MODEL = "language_model"  # the part of a model that is not for images or audio

FAMILIES: dict[str, Family] = {
    "llama": Family(dense_rows(), refusals="hidden_act attention_bias mlp_bias"),
    "mistral": Family(dense_rows(), has_windows=True),
    "qwen2": Family(dense_rows(bias=True), constants={"add_qkv_bias": True}, has_windows=True),
    "qwen3": Family(
        dense_rows(norm=True),
        constants={"qk_layernorm": True},
        refusals="hidden_act attention_bias",
        has_windows=True,
    ),
    "qwen3_moe": Family(
        decoder_rows(attention(norm=True), (*_DENSE_LAYERS, *moe_rows())),
        _BALANCED_CONFIG,
        {**_MOE, "qk_layernorm": True},
        "hidden_act attention_bias",
        has_windows=True,
        derived=_sparse_layers,
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
        {
            **_BALANCED_CONFIG,
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        },
        {**_MOE, "moe_shared_expert_gate": True},
        has_windows=True,
        derived=lambda hf: {**_sparse_layers(hf), "add_qkv_bias": hf.qkv_bias},
    ),
    "mixtral": Family(
        decoder_rows(attention(), moe_rows("block_sparse_moe.", "w1", "w3", "w2")),
        {**_BALANCED_CONFIG, "num_local_experts": "num_moe_experts"},
        _MOE,
        "hidden_act router_jitter_noise",
        has_windows=True,
        derived=_experts_everywhere,
    ),
    "olmoe": Family(
        decoder_rows(attention(norm=True, norm_kind="column"), moe_rows()),
        _BALANCED_CONFIG,
        {**_MOE, "qk_norm_over_heads": True},
        "hidden_act attention_bias clip_qkv",
        derived=_experts_everywhere,
    ),
    "glm4_moe": Family(
        decoder_rows(attention(bias="add_qkv_bias", norm="qk_layernorm"), _SPARSE_MLP),
        _MOE_CONFIG,
        _MOE,
        derived=_glm4_moe,
        prediction=PREDICTION_KEY,
        partial_rotary=True,
    ),
    "gemma2": Family(
        dense_rows(norms=GEMMA_NORMS),
        _CAPS,
        _GEMMA,
        _GEMMA_REFUSALS,
        has_windows=True,
        derived=_gemma_scales,
    ),
    "gemma3_text": Family(
        dense_rows(norm=True, norms=GEMMA_NORMS),
        _same("final_logit_softcapping"),
        {**_GEMMA, "qk_layernorm": True},
        _GEMMA_REFUSALS,
        has_windows=True,
        derived=_gemma_scales,
    ),
    "glm4": Family(
        decoder_rows(attention(bias="add_qkv_bias"), mlp_rows(fused=True), GLM4_NORMS),
        _QKV_BIAS,
        {"post_norms": True, "rope_interleave": True},
        partial_rotary=True,
    ),
    "granite": Family(
        dense_rows(),
        {
            **_same("embedding_multiplier residual_multiplier logits_scaling"),
            "attention_multiplier": "softmax_scale",
        },
        refusals="hidden_act attention_bias mlp_bias",
    ),
    "olmo2": Family(
        dense_rows(norm=True, norm_kind="column", norms=POST_NORMS),
        constants={"pre_norms": False, "post_norms": True, "qk_norm_over_heads": True},
        refusals="hidden_act attention_bias",
    ),
    "phi3": Family(
        decoder_rows(attention(fused=True), mlp_rows(fused=True)),
        {"resid_pdrop": "hidden_dropout"},
        {"drop_embeddings": False},
        has_windows=True,
        partial_rotary=True,
    ),
    "deepseek_v2": Family(
        decoder_rows(latent_attention(), _SPARSE_MLP),
        _LATENT_CONFIG,
        {
            **_MOE,
            "multi_latent_attention": True,
            "rope_interleave": True,
            "moe_router_norm_topk_prob": False,
        },
        "hidden_act attention_bias mlp_bias norm_topk_prob moe_layer_freq scoring_func=softmax "
        "topk_method=greedy|group_limited_greedy",
        derived=_deepseek_v2,
    ),
    "deepseek_v3": Family(
        decoder_rows(latent_attention(), _SPARSE_MLP),
        _LATENT_CONFIG,
        {**_MOE, "multi_latent_attention": True},
        "hidden_act attention_bias topk_method=noaux_tc moe_layer_freq scoring_func=sigmoid",
        derived=lambda hf: {**_sigmoid_router(hf), **_latent_fields(hf)},
        prediction=PREDICTION_KEY,
    ),
    "seed_oss": Family(
        dense_rows(bias="add_qkv_bias"),
        {**_QKV_BIAS, "residual_dropout": "hidden_dropout"},
        {"drop_embeddings": False},
        "hidden_act attention_out_bias mlp_bias",
    ),
    "cwm": Family(dense_rows(), refusals="hidden_act mlp_bias", has_windows=True),
    "ernie4_5": Family(
        dense_rows(), constants={"rope_interleave": True}, refusals="hidden_act use_bias"
    ),
    "dots1": Family(
        decoder_rows(attention(norm=True), _SPARSE_MLP),
        _MOE_CONFIG,
        {**_MOE, "qk_layernorm": True},
        "hidden_act attention_bias",
        has_windows=True,
        derived=_sigmoid_router,
    ),
}
_OLMO2 = FAMILIES["olmo2"]
_DEEPSEEK_V3 = FAMILIES["deepseek_v3"]
_GLM4_MOE = FAMILIES["glm4_moe"]
FAMILIES |= {
    "olmo3": replace(_OLMO2, has_windows=True),
    "smollm3": Family(
        dense_rows(),
        refusals="hidden_act attention_bias mlp_bias",
        has_windows=True,
        derived=lambda hf: _without_rope(not rope for rope in hf.no_rope_layers),
    ),
    "exaone4": Family(
        dense_rows(norm=True, norms=POST_NORMS),
        constants={"pre_norms": False, "post_norms": True, "qk_layernorm": True},
        has_windows=True,
        derived=_exaone4,
    ),
    "arcee": Family(
        decoder_rows(attention(), mlp_rows(gated=False)),
        constants={"gated_linear_unit": False, "activation_func": "relu2"},
        refusals="hidden_act=relu2 attention_bias mlp_bias",
    ),
    "hunyuan_v1_dense": Family(
        decoder_rows(attention(norm=True, norms="query_layernorm key_layernorm"), mlp_rows()),
        constants={"qk_layernorm": True, "qk_norm_after_rope": True},
        refusals="hidden_act attention_bias",
    ),
    "ministral3": Family(
        dense_rows(),
        refusals="hidden_act layer_types",
        has_windows=True,
        derived=lambda hf: {"query_scaling_beta": hf.rope_parameters["llama_4_scaling_beta"]},
    ),
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3, refusals="hidden_act attention_bias first_k_dense_replace"
    ),
    "solar_open": replace(_GLM4_MOE, prediction="", partial_rotary=False),
    "youtu": Family(
        decoder_rows(latent_attention(), mlp_rows()),
        _LATENT_CONFIG,
        {"multi_latent_attention": True},
        "hidden_act attention_bias",
        derived=_latent_fields,
    ),
    "exaone_moe": replace(
        FAMILIES["dots1"],
        rows=decoder_rows(
            attention(norm=True),
            (*_DENSE_LAYERS, *moe_rows(bias_of=""), *shared_expert_rows("shared_experts")),
        ),
        refusals="hidden_act",
        derived=lambda hf: _sigmoid_router(hf, "num_experts", "num_shared_experts") | _exaone4(hf),
        unused=(r"^mtp\.",),  # transformers does not read them
        renamed={"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"},
    ),
    "minimax_m2": Family(
        decoder_rows(
            attention(norm=True, norm_kind="column"),
            moe_rows("block_sparse_moe.", "w1", "w3", "w2", bias_of=""),
        ),
        {**_BALANCED_CONFIG, "num_local_experts": "num_moe_experts"},
        {
            **_MOE,
            "qk_norm_over_heads": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
        "hidden_act router_jitter_noise",
        derived=_experts_everywhere,
        partial_rotary=True,
    ),
    "gemma4_text": Family(
        decoder_rows(
            (*attention_of_two_sizes(), Row(LAYERS + _SCALAR, (HF_LAYERS + _SCALAR,), "copy")),
            mlp_rows(),
            GEMMA_NORMS,
        ),
        _same("final_logit_softcapping"),
        {
            "activation_func": GELU,
            "post_norms": True,
            "qk_layernorm": True,
            "softmax_scale": 1.0,
            "layer_scalars": True,
        },
        f"{_GEMMA_REFUSALS} hidden_size_per_layer_input num_kv_shared_layers enable_moe_block "
        "attention_k_eq_v",
        has_windows=True,
        derived=_gemma4,
        sizes_differ=True,
    ),
    "gpt_oss": Family(
        decoder_rows(attention(bias="add_qkv_bias"), moe_rows(router="router")),
        {
            "num_local_experts": "num_moe_experts",
            "num_experts_per_tok": "moe_router_topk",
            "swiglu_limit": "activation_func_clamp_value",
        },
        {
            **_MOE,
            "attention_sinks": True,
            "add_moe_bias": True,
            "activation_func": "quick_gelu",
            "activation_func_clamp_value": 7.0,  # for configs without swiglu_limit
            "glu_linear_offset": 1.0,
        },
        "hidden_act swiglu_alpha",
        has_windows=True,
        derived=_gpt_oss,
        stacked_experts="in_turns",
    ),
}

# interleaved rotation, and biases on queries, keys and values but not on the output
_HELIUM = Family(
    dense_rows(bias="add_qkv_bias"), _QKV_BIAS, {"rope_interleave": True}, "hidden_act mlp_bias"
)
_OLMOE = FAMILIES["olmoe"]
_HYPERCLOVAX_NORMS = "input_layernorm post_norm1 post_attention_layernorm post_norm2"
FAMILIES |= {
    "helium": _HELIUM,
    "glm": replace(
        _HELIUM,
        rows=decoder_rows(attention(bias="add_qkv_bias"), mlp_rows(fused=True)),
        refusals="hidden_act",
        partial_rotary=True,
    ),
    "hyperclovax": Family(
        tuple(
            replace(row, when="post_norms") if "post_norm" in row.hf[0] else row
            for row in dense_rows(bias="add_qkv_bias", norms=_HYPERCLOVAX_NORMS)
        ),
        {**FAMILIES["granite"].config, **_QKV_BIAS, "use_post_norm": "post_norms"},
        refusals="hidden_act mlp_bias",
        derived=_hyperclovax,
    ),
    "vaultgemma": replace(
        FAMILIES["gemma2"],
        rows=dense_rows(norms="input_layernorm - pre_feedforward_layernorm -"),
        constants={**_GEMMA, "post_norms": False},
        refusals="hidden_activation attention_bias",
    ),
    "flex_olmo": replace(
        _OLMOE,
        rows=decoder_rows(attention(norm=True, norm_kind="column"), moe_rows(), POST_NORMS),
        constants={**_OLMOE.constants, **_OLMO2.constants},
        refusals=_OLMO2.refusals,
    ),
    "hunyuan_v1_moe": Family(
        decoder_rows(
            attention(norm=True, norms="query_layernorm key_layernorm"),
            (*moe_rows(router="gate.wg"), *shared_expert_rows("shared_mlp")),
        ),
        {"num_experts": "num_moe_experts"},
        {**_MOE, "qk_layernorm": True, "qk_norm_after_rope": True},
        "hidden_act attention_bias",
        derived=_hunyuan_moe,
    ),
    "flint": Family(
        decoder_rows(
            attention(bias="add_qkv_bias", norm=True, sinks="softmax_offset"),
            (*_DENSE_LAYERS, *moe_rows(), *shared_expert_rows("shared_expert")),
        ),
        FAMILIES["qwen2_moe"].config,
        {
            **_MOE,
            "qk_layernorm": True,
            "attention_sinks": True,
            "moe_router_score_function": "sigmoid",
        },
        has_windows=True,
        derived=_flint,
        renamed={"self_attn.sinks": "self_attn.softmax_offset"},
    ),
}

# -- models with inputs other than text: parts register them, with another family's language model

# Prefixes of transformers' modules -> prefixes in files: in older files, such as Qwen2-VL's on the
# hub, and in files of a model that also generates speech, of which the thinker is trained.
OLDER_PREFIXES = {
    "model.visual.": "visual.",
    "model.audio_tower.": "audio_tower.",
    "model.language_model.": "model.",
}
THINKER_PREFIXES = {
    "lm_head.": "thinker.lm_head.",
    **{module: f"thinker.{older}" for module, older in OLDER_PREFIXES.items()},
}

# the keys of a config.json that describe parts for images, audio or video
_MEDIA_CONFIGS = {"vision_config", "audio_config", "thinker_config"}

# model types that transformers does not know -> types with the same tensors and keys
SAME_AS = {"kimi_k2": "deepseek_v3"}


def get_family(model_type: str, values: dict[str, Any] | None = None) -> Family:
    """The Family (how weights and config.json map to megatron) of a config.json's model_type.
    Raises ConfigError if the type is not supported, or if it needs an optional part of this package
    whose files are missing. values: the contents of the config.json, so that the error can give a
    more precise reason."""
    judge = Judge(None)
    check_type(dict(values or {}, model_type=str(model_type)), judge)
    judge.close()
    return FAMILIES[SAME_AS.get(model_type, model_type)]


def needs_file(values: dict[str, Any]) -> bool:
    """True if transformers has to read a config.json from its file, because its contents alone may
    lead to another config class. values: the contents."""
    kind = str(values.get("model_type"))
    is_special = "auto_map" in values or (kind == "mistral" and "layer_types" in values)
    return kind not in SAME_AS and (kind not in FAMILIES or is_special)


def check_type(values: dict[str, Any], judge: Judge, use_mca: bool = True) -> None:
    """Report to `judge`, which collects problems, if a model cannot be trained because of its
    model_type. values: the contents of its config.json; without a model_type nothing is reported.
    use_mca: if False, causal language models of transformers pass too, and those with code of
    their own. A model whose layers or
    inputs need an optional part of this package is refused if that part's files are missing."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind in FAMILIES or kind in SAME_AS:
        return
    absent = absent_rows()
    if part := absent.get(kind) or absent.get(f"{kind}_text"):
        reason, remedy = need_of(part, "its layers or inputs need")
        judge.refuse("model_name_or_path", reason, remedy, kind, "model_type")
        return
    # imported here, because it takes seconds
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    is_causal = kind in CAUSAL or "AutoModelForCausalLM" in str(values.get("auto_map"))
    if is_causal and not use_mca:
        return
    remedy = "a model of text"
    part = "it"
    reason = f"not supported on megatron-core: expected one of {', '.join(sorted(FAMILIES))}"
    if not use_mca:
        reason = "it is no causal model of transformers (AutoModelForCausalLM)"
    if not values.keys().isdisjoint(_MEDIA_CONFIGS):
        known = sorted(name for name, family in FAMILIES.items() if family.inputs)
        reason = f"of models with images, audio or video {', '.join(known)} are trained here"
        part = "its text"
    if is_causal:
        remedy = f"use_mca: false, to train {part} as plain torch"
    if f"{kind}_text" in FAMILIES:
        remedy = f"its language model, saved alone as {kind}_text; or {remedy}"
    judge.refuse("model_name_or_path", reason, remedy, kind, "model_type in config.json")


def vision_parts_of(model_type: str) -> dict[str, tuple[str, ...]]:
    """{part of a model: its Hugging Face modules} for the parts beside the language model, such as
    the vision tower; {} for a model type without such parts."""
    return FAMILIES[model_type].vision_parts if model_type in FAMILIES else {}


def part_of(model_type: str, module: str) -> str:
    """The part of a model that a Hugging Face module belongs to: a key of vision_parts_of(), such
    as the vision tower, or LANGUAGE_MODEL."""
    for part, prefixes in vision_parts_of(model_type).items():
        if any(f".{prefix}." in f".{module}." for prefix in prefixes):
            return part
    return LANGUAGE_MODEL


def values_of(hf: Any) -> dict[str, Any]:
    """{McaModelConfig field: value} for a transformers config; {} if its model type is not in
    FAMILIES."""
    return FAMILIES[hf.model_type].values(hf) if hf.model_type in FAMILIES else {}


def rows_of(model_type: str, config: Any) -> tuple[Row, ...]:
    """The Rows of a model: each gives megatron's name of a tensor, and the names of the Hugging
    Face tensors that it is made from. {} in a name stands for the layer, so a Row serves the tensor
    in each layer that has it; each expert has Rows of its own.

    config: an object with McaModelConfig's fields. Raises ConfigError for an unsupported model
    type."""
    family = get_family(model_type)
    rows = family.rows
    if getattr(config, "mtp_num_layers", None):
        rows = (*rows, *function_of("part_mtp_rows:prediction_rows")(rows, model_type))
    present = tuple(row for row in rows if row.is_there(config))
    tensors = getattr(config, "input_tensors", ())
    return _expand(present, getattr(config, "num_moe_experts", None) or 0, tensors)


@functools.lru_cache(16)
def _expand(rows: tuple[Row, ...], num_experts: int, tensors: InputTensors) -> tuple[Row, ...]:
    expanded: list[Row] = []
    for row in rows:
        if row.kind == "module":
            for name, is_linear in tensors:
                hf = tuple(prefix.replace("*", name) for prefix in row.hf)
                expanded.append(Row(row.mca.replace("*", name), hf, "copy", linear=is_linear))
            continue
        if "[]" not in row.mca:
            expanded.append(row)
            continue
        for e in range(num_experts):
            hf = tuple(name.replace("[]", str(e)) for name in row.hf)
            expanded.append(replace(row, mca=row.mca.replace("[]", str(e)), hf=hf, expert=e))
    return tuple(expanded)


OF_PARTS = load("_families")
