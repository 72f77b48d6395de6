"""The table of model families: how a Hugging Face config and its weights become megatron's, and back.

One row maps one megatron tensor: (megatron name, HF names, kind). `{}` is the layer's number. The kind says how HF
tensors merge into megatron's, and which axis tensor parallelism cuts:

    copy     one tensor, the same on every tensor-parallel rank
    column   one tensor, cut along its rows (the output dimension)
    row      one tensor, cut along its columns (the input dimension)
    gated    [gate; up]: each is cut along its rows, then a rank's parts are joined
    qkv      per query group [its queries, key, value] along the rows, no rotary permutation; groups cut over ranks

`[]` is an expert's number: such a row stands for one of each expert, whose matrices expert tensor parallelism cuts. A new
family is a few rows and a few config keys. `get_family` and `rows_of` are what the rest of the package reads.
"""

import functools
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
    when: str | None = None  # the field of the config that must be set for the tensor to be there
    expert: int | None = None  # its number in the layer

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
    partial_rotary: bool = False  # whether the model of transformers honours partial_rotary_factor

    def values(self, hf) -> dict[str, Any]:
        """McaModelConfig fields that a transformers config object decides."""
        values = dict(self.constants)
        for theirs, ours in self.config.items():
            value = getattr(hf, theirs, None)
            if value is not None:
                values[ours] = value
        return {**values, **self.derived(hf)}


def _attention(bias=False, norm=False, norm_kind="copy"):
    """bias, norm: whether they are there, or the config field that says it. norm_kind: column for a norm over all heads."""
    layer, hf = "decoder.layers.{}.self_attention.", "model.layers.{}.self_attn."
    yield Row(layer + "linear_qkv.weight", tuple(hf + f"{x}_proj.weight" for x in "qkv"), "qkv")
    if bias:
        when = bias if isinstance(bias, str) else None
        yield Row(layer + "linear_qkv.bias", tuple(hf + f"{x}_proj.bias" for x in "qkv"), "qkv", when=when)
    if norm:
        when = norm if isinstance(norm, str) else None
        yield Row(layer + "q_layernorm.weight", (hf + "q_norm.weight",), norm_kind, when=when)
        yield Row(layer + "k_layernorm.weight", (hf + "k_norm.weight",), norm_kind, when=when)
    yield Row(layer + "linear_proj.weight", (hf + "o_proj.weight",), "row")


def _mlp_rows(hf="mlp.", layers="all"):
    layer, hf = "decoder.layers.{}.mlp.", "model.layers.{}." + hf
    yield Row(layer + "linear_fc1.weight", (hf + "gate_proj.weight", hf + "up_proj.weight"), "gated", layers)
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


def _decoder_rows(attention, mlp):
    layer, hf = "decoder.layers.{}.", "model.layers.{}."
    return (
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "column"),
        Row(layer + "input_layernorm.weight", (hf + "input_layernorm.weight",), "copy"),
        *attention,
        Row(layer + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",), "copy"),
        *mlp,
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), "copy"),
        Row("output_layer.weight", ("lm_head.weight",), "column"),
    )


def _dense_rows(bias=False, norm=False):
    return _decoder_rows(_attention(bias, norm), _mlp_rows())


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
        "num_moe_experts": hf.n_routed_experts,
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


_DENSE_LAYERS = tuple(_mlp_rows(layers="dense"))

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
    "qwen3_moe": Family(
        _decoder_rows(_attention(norm=True), (*_DENSE_LAYERS, *_moe_rows())),
        _MOE_CONFIG,
        {**_MOE, "qk_layernorm": True},
        (_ONLY_SILU, _NO_ATTENTION_BIAS),
        lambda hf: hf.sliding_window,
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
        lambda hf: hf.sliding_window,
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
            (*_DENSE_LAYERS, *_moe_rows(), *_shared_expert_rows("shared_experts")),
        ),
        _MOE_CONFIG,
        _MOE,
        (_ONLY_SILU,),
        derived=_glm4_moe,
        partial_rotary=True,
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
    rows = get_family(model_type).rows
    there = tuple(row for row in rows if row.when is None or getattr(config, row.when, None))
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
