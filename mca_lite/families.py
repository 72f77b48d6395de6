"""The table of model families: how a Hugging Face config and its weights become megatron's, and back.

One row maps one megatron tensor: (megatron name, HF names, kind). `{}` is the layer's number. The kind says how HF
tensors merge into megatron's, and which axis tensor parallelism cuts:

    copy     one tensor, the same on every tensor-parallel rank
    column   one tensor, cut along its rows (the output dimension)
    row      one tensor, cut along its columns (the input dimension)
    gated    [gate; up]: each is cut along its rows, then a rank's parts are joined
    qkv      per query group [its queries, key, value] along the rows, no rotary permutation; groups cut over ranks

A fused row names one HF tensor, which holds what gated or qkv take of several, one behind the other.

`[]` is an expert's number: such a row stands for one of each expert, whose matrices expert tensor parallelism cuts. A new
family is a few rows and a few config keys. `get_family` and `rows_of` are what the rest of the package reads.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Row:
    """One megatron tensor and the HF tensors that it is made of."""

    mca: str
    hf: tuple[str, ...]
    kind: str
    layers: str = "all"  # or those that are "dense", or "moe": a mixture of experts
    when: str | None = (
        None  # the field of the config that must be set (behind "not": must not) for the tensor to be there
    )
    expert: int | None = None  # its number in the layer
    fused: bool = False  # the one HF tensor holds all parts
    linear: bool = False  # of kind copy: it is a matrix that others would cut

    @property
    def num_parts(self) -> int:
        """Tensors that gated or qkv merge, be they HF tensors or parts of one."""
        return {"gated": 2, "qkv": 3}.get(self.kind, 1) if self.fused else len(self.hf)

    @property
    def is_linear(self) -> bool:
        """Whether the tensor is the matrix of a linear layer or an embedding: what can have an adapter."""
        is_norm = "layernorm" in self.mca
        return self.mca.endswith(".weight") and (self.linear if self.kind == "copy" else not is_norm)

    def is_there(self, config) -> bool:
        """Whether a model has the tensor in some layer. config: McaModelConfig, or anything with its fields."""
        field = (self.when or "").removeprefix("not ")
        return self.when is None or bool(getattr(config, field, None)) != self.when.startswith("not ")

    def is_in(self, is_moe_layer: bool) -> bool:
        """Whether a layer of that kind has the tensor."""
        return self.layers == "all" or (self.layers == "moe") == is_moe_layer


@dataclass(frozen=True)
class Family:
    """A model_type of transformers: its rows, config keys, and what of its config.json cannot be honoured."""

    rows: tuple[Row, ...]
    config: dict[str, str]  # HF config key -> McaModelConfig field
    constants: dict[str, Any]  # McaModelConfig fields that this family always has
    refusals: tuple[tuple[str, Callable[[Any], bool], str], ...] = ()  # (key, is it in use?, what to do)
    sliding_window: Callable[[Any], int | None] = field(default=lambda hf: None)  # the window that is in use, tokens
    derived: Callable[[Any], dict[str, Any]] = field(default=lambda hf: {})  # fields that follow from several keys
    prediction_layers: bool = False  # its checkpoints hold layers for multi-token prediction behind the last one
    partial_rotary: bool = False  # whether the model of transformers honours partial_rotary_factor

    def values(self, hf) -> dict[str, Any]:
        """McaModelConfig fields that a transformers config object decides."""
        values = dict(self.constants)
        for theirs, ours in self.config.items():
            value = getattr(hf, theirs, None)
            if value is not None:
                values[ours] = value
        values.update(self.derived(hf))
        if not values.get("num_moe_experts"):  # megatron refuses what would describe the experts of a dense model
            values = {name: value for name, value in values.items() if not name.startswith("moe_")}
        return values


def _attention(bias=False, norm=False, norm_kind="copy", fused=False):
    """bias, norm: whether they are there, or the config field that says it. norm_kind: column for a norm over all heads."""
    layer, hf = "decoder.layers.{}.self_attention.", "model.layers.{}.self_attn."
    names = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
    yield Row(layer + "linear_qkv.weight", tuple(f"{hf}{x}.weight" for x in names), "qkv", fused=fused)
    if bias:
        when = bias if isinstance(bias, str) else None
        yield Row(layer + "linear_qkv.bias", tuple(f"{hf}{x}.bias" for x in names), "qkv", when=when)
    if norm:
        when = norm if isinstance(norm, str) else None
        yield Row(layer + "q_layernorm.weight", (hf + "q_norm.weight",), norm_kind, when=when)
        yield Row(layer + "k_layernorm.weight", (hf + "k_norm.weight",), norm_kind, when=when)
    yield Row(layer + "linear_proj.weight", (hf + "o_proj.weight",), "row")


def _latent_attention():
    """Multi-latent attention; the projection of queries is one matrix, or two with a norm between them."""
    layer, hf = "decoder.layers.{}.self_attention.", "model.layers.{}.self_attn."

    def row(ours, theirs, kind, **more):
        return Row(f"{layer}{ours}.weight", (f"{hf}{theirs}.weight",), kind, **more)

    yield row("linear_q_proj", "q_proj", "column", when="not q_lora_rank")
    yield row("linear_q_down_proj", "q_a_proj", "copy", linear=True, when="q_lora_rank")
    yield row("q_layernorm", "q_a_layernorm", "copy", when="q_lora_rank")
    yield row("linear_q_up_proj", "q_b_proj", "column", when="q_lora_rank")
    yield row("linear_kv_down_proj", "kv_a_proj_with_mqa", "copy", linear=True)
    yield row("kv_layernorm", "kv_a_layernorm", "copy")
    yield row("linear_kv_up_proj", "kv_b_proj", "column")
    yield row("linear_proj", "o_proj", "row")


def _mlp_rows(hf="mlp.", layers="all", fused=False):
    layer, hf = "decoder.layers.{}.mlp.", "model.layers.{}." + hf
    gate_up = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    yield Row(layer + "linear_fc1.weight", tuple(f"{hf}{x}.weight" for x in gate_up), "gated", layers, fused=fused)
    yield Row(layer + "linear_fc2.weight", (hf + "down_proj.weight",), "row", layers)


def _moe_rows(hf="mlp.", gate="gate_proj", up="up_proj", down="down_proj"):
    """The router and the experts of a layer, as Hugging Face's files hold them: two dimensions, a tensor each."""
    layer, hf = "decoder.layers.{}.mlp.", "model.layers.{}." + hf
    yield Row(layer + "router.weight", (hf + "gate.weight",), "copy", "moe")
    bias = (hf + "gate.e_score_correction_bias",)
    yield Row(layer + "router.expert_bias", bias, "copy", "moe", "moe_router_enable_expert_bias")
    gated = tuple(f"{hf}experts.[].{name}.weight" for name in (gate, up))
    yield Row(layer + "experts.[].linear_fc1.weight", gated, "gated", "moe")
    yield Row(layer + "experts.[].linear_fc2.weight", (f"{hf}experts.[].{down}.weight",), "row", "moe")


def _shared_expert_rows(name, gate=None):
    layer, hf = "decoder.layers.{}.mlp.shared_experts.", f"model.layers.{{}}.mlp.{name}."
    fc1 = (hf + "gate_proj.weight", hf + "up_proj.weight")
    when = "moe_shared_expert_intermediate_size"
    yield Row(layer + "linear_fc1.weight", fc1, "gated", "moe", when)
    yield Row(layer + "linear_fc2.weight", (hf + "down_proj.weight",), "row", "moe", when)
    if gate:
        yield Row(layer + "gate_weight", (f"model.layers.{{}}.mlp.{gate}.weight",), "copy", "moe", when)


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


def _decoder_rows(attention, mlp, norms=_PRE_NORMS):
    layer, hf = "decoder.layers.{}.", "model.layers.{}."
    places = ("input_layernorm", "self_attn_bda.norm", "pre_mlp_layernorm", "mlp_bda.norm")
    of_layer = [
        name and Row(f"{layer}{place}.weight", (f"{hf}{name}.weight",), "copy")
        for place, name in zip(places, norms, strict=True)
    ]
    rows = (
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "column"),
        of_layer[0],
        *attention,
        *of_layer[1:3],
        *mlp,
        of_layer[3],
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), "copy"),
        Row("output_layer.weight", ("lm_head.weight",), "column"),
    )
    return tuple(row for row in rows if row)


_LAYERS = "decoder.layers.{}."
PREDICTION_LAYERS = "mtp.layers.{}."  # their number goes on from the decoder's, as in Hugging Face's files


def _prediction_rows(decoder_rows):
    """The layers for multi-token prediction: a layer of the decoder each, and how it is joined to the one before."""
    ours, hf = PREDICTION_LAYERS, "model.layers.{}."
    yield Row(ours + "enorm.weight", (hf + "enorm.weight",), "copy")
    yield Row(ours + "hnorm.weight", (hf + "hnorm.weight",), "copy")
    yield Row(ours + "eh_proj.weight", (hf + "eh_proj.weight",), "copy", linear=True)
    for row in decoder_rows:
        if row.mca.startswith(_LAYERS):
            yield replace(row, mca=row.mca.replace(_LAYERS, ours + "transformer_layer."))
    yield Row(ours + "final_layernorm.weight", (hf + "shared_head.norm.weight",), "copy")


def _dense_rows(bias=False, norm=False, norms=_PRE_NORMS, **attention):
    return _decoder_rows(_attention(bias, norm, **attention), _mlp_rows(), norms)


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
_NO_OUT_BIAS = ("attention_out_bias", bool, "a bias on o_proj is not built: convert the model to one without")
_ONLY_CAUSAL = ("use_bidirectional_attention", bool, "only causal attention is built")
_NO_LATENT_BIAS = ("attention_bias", bool, "biases in multi-latent attention are not built")
_NO_ATTENTION_BIAS = ("attention_bias", bool, "a bias on o_proj is not built: convert the model to one without")
_NO_MLP_BIAS = ("mlp_bias", bool, "biases in the MLP are not built")


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


_MOE = dict(
    _DENSE,
    moe_router_pre_softmax=True,  # our router reads moe_router_norm_topk_prob; megatron's check wants this one for top-1
)
_MOE_CONFIG = {
    **_DENSE_CONFIG,
    "num_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "norm_topk_prob": "moe_router_norm_topk_prob",
    "moe_intermediate_size": "moe_ffn_hidden_size",
}


def _sparse_layers(hf) -> list[int]:
    """1 for each layer that is a mixture of experts, 0 for each that is dense."""
    step, dense = getattr(hf, "decoder_sparse_step", 1), getattr(hf, "mlp_only_layers", None) or ()
    return [int(i not in dense and (i + 1) % step == 0) for i in range(hf.num_hidden_layers)]


def _qwen2_moe(hf) -> dict[str, Any]:
    return {"moe_layer_freq": _sparse_layers(hf), "add_qkv_bias": hf.qkv_bias}


def _experts_everywhere(hf) -> dict[str, Any]:
    """Where intermediate_size is that of an expert."""
    return {"moe_layer_freq": [1] * hf.num_hidden_layers, "moe_ffn_hidden_size": hf.intermediate_size}


def sigmoid_router(hf) -> dict[str, Any]:
    """Sigmoid scores, a bias that only chooses, groups of experts, shared experts, dense layers in front."""
    grouped = hf.n_group > 1
    return {
        "num_moe_experts": hf.n_routed_experts if hf.first_k_dense_replace < hf.num_hidden_layers else None,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_num_groups": hf.n_group if grouped else None,
        "moe_router_group_topk": hf.topk_group if grouped else None,
        "moe_shared_expert_intermediate_size": (hf.n_shared_experts or 0) * hf.moe_intermediate_size or None,
        "moe_layer_freq": [int(i >= hf.first_k_dense_replace) for i in range(hf.num_hidden_layers)],
    }


def _glm4_moe(hf) -> dict[str, Any]:
    return {**sigmoid_router(hf), "add_qkv_bias": hf.attention_bias, "qk_layernorm": hf.use_qk_norm}


def _deepseek_v2(hf) -> dict[str, Any]:
    """Softmax scores that are not normalised; a group of experts counts by its best one."""
    grouped = hf.topk_method == "group_limited_greedy"
    return {
        "num_moe_experts": hf.n_routed_experts if hf.first_k_dense_replace < hf.num_hidden_layers else None,
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
_DENSE_LAYERS = tuple(_mlp_rows(layers="dense"))
_SPARSE_MLP = (*_DENSE_LAYERS, *_moe_rows(), *_shared_expert_rows("shared_experts"))

FAMILIES: dict[str, Family] = {
    "llama": Family(_dense_rows(), _DENSE_CONFIG, _DENSE, (_ONLY_SILU, _NO_ATTENTION_BIAS, _NO_MLP_BIAS)),
    "mistral": Family(_dense_rows(), _DENSE_CONFIG, _DENSE, (_ONLY_SILU,), _window_of_all),
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
    "qwen3_moe": Family(
        _decoder_rows(_attention(norm=True), (*_DENSE_LAYERS, *_moe_rows())),
        _MOE_CONFIG,
        {**_MOE, "qk_layernorm": True},
        (_ONLY_SILU, _NO_ATTENTION_BIAS),
        _window_of_all,
        lambda hf: {"moe_layer_freq": _sparse_layers(hf)},
    ),
    "qwen2_moe": Family(
        _decoder_rows(
            _attention(bias="add_qkv_bias"),
            (*_DENSE_LAYERS, *_moe_rows(), *_shared_expert_rows("shared_expert", "shared_expert_gate")),
        ),
        {**_MOE_CONFIG, "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"},
        {**_MOE, "moe_shared_expert_gate": True},
        (_ONLY_SILU,),
        _window_of_layers,
        _qwen2_moe,
    ),
    "mixtral": Family(
        _decoder_rows(_attention(), _moe_rows("block_sparse_moe.", "w1", "w3", "w2")),
        {**_MOE_CONFIG, "num_local_experts": "num_moe_experts"},
        _MOE,
        (_ONLY_SILU, ("router_jitter_noise", bool, "noise on the router's input is not built: set it to 0")),
        _window_of_all,
        _experts_everywhere,
    ),
    "olmoe": Family(
        _decoder_rows(_attention(norm=True, norm_kind="column"), _moe_rows()),
        _MOE_CONFIG,
        {**_MOE, "qk_norm_over_heads": True},
        (_ONLY_SILU, _NO_ATTENTION_BIAS, ("clip_qkv", bool, "clipping of queries, keys and values is not built")),
        derived=_experts_everywhere,
    ),
    "glm4_moe": Family(
        _decoder_rows(
            _attention(bias="add_qkv_bias", norm="qk_layernorm"),
            _SPARSE_MLP,
        ),
        _MOE_CONFIG,
        _MOE,
        (_ONLY_SILU,),
        derived=_glm4_moe,
        prediction_layers=True,
        partial_rotary=True,
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
        _dense_rows(norm=True, norms=_GEMMA_NORMS),
        {**_DENSE_CONFIG, **_CAPS},
        {**_GEMMA, "qk_layernorm": True},
        (_ONLY_GELU, _NO_ATTENTION_BIAS, _ONLY_CAUSAL),
        _window_of_layers,
        _gemma_scales,
    ),
    "glm4": Family(
        _decoder_rows(_attention(bias="add_qkv_bias"), _mlp_rows(fused=True), _GLM4_NORMS),
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
        _dense_rows(norm=True, norm_kind="column", norms=_POST_NORMS),
        _DENSE_CONFIG,
        {**_DENSE, "pre_norms": False, "post_norms": True, "qk_norm_over_heads": True},
        (_ONLY_SILU, _NO_ATTENTION_BIAS),
    ),
    "phi3": Family(
        _decoder_rows(_attention(fused=True), _mlp_rows(fused=True)),
        {**_DENSE_CONFIG, "resid_pdrop": "hidden_dropout"},
        {**_DENSE, "drop_embeddings": False},
        (_ONLY_SILU,),
        _window_of_all,
        partial_rotary=True,
    ),
    "deepseek_v2": Family(
        _decoder_rows(_latent_attention(), _SPARSE_MLP),
        {**_MOE_CONFIG, **_LATENT_CONFIG},
        {**_MOE, "multi_latent_attention": True, "rope_interleave": True, "moe_router_norm_topk_prob": False},
        (_ONLY_SILU, _NO_LATENT_BIAS, _NO_MLP_BIAS, _GREEDY),
        derived=_deepseek_v2,
    ),
    "deepseek_v3": Family(
        _decoder_rows(_latent_attention(), _SPARSE_MLP),
        {**_MOE_CONFIG, **_LATENT_CONFIG},
        {**_MOE, "multi_latent_attention": True},
        (_ONLY_SILU, _NO_LATENT_BIAS),
        derived=lambda hf: {**sigmoid_router(hf), **_latent_fields(hf)},
        prediction_layers=True,
    ),
    "seed_oss": Family(
        _dense_rows(bias="add_qkv_bias"),
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


def is_of_expert(mca: str) -> bool:
    """Whether one of megatron's tensors, by its name in a row, is an expert's."""
    return ".mlp.experts." in mca


def rows_of(model_type: str, config) -> tuple[Row, ...]:
    """The rows of a model, those of its experts one by one. config: McaModelConfig, or anything with its fields."""
    family = get_family(model_type)
    rows = family.rows
    if getattr(config, "mtp_num_layers", None):
        rows = (*rows, *_prediction_rows(rows))
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
