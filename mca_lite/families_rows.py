"""A family of models: its rows of weights (a megatron tensor and the Hugging Face tensors it is
made from), its config keys, and refusals of unsupported values. families.py has the table of
families."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import Judge


@dataclass(frozen=True)
class Row:
    """A tensor of megatron's model, or one per layer or expert, and the Hugging Face tensors that
    it is made from.

    mca: megatron's name, with {} for the layer's index and [] for the expert's. hf: Hugging Face's
    names.
    kind: how they correspond: "copy" (whole on every tensor-parallel rank), "column" or "row"
    (split along axis 0 or 1), "gated" (gate and up), "qkv" and the like; "module": all tensors of
    an input module (such as a vision tower), with * for their names.
    layers: the layers that have the tensor: "all", "moe" (with experts), "dense", "linear" or
    "attention" (with linear attention, or without), "window" or "full" (with a sliding window, or
    without).
    when: True, or the config field that must be set (after "not ": unset) for the tensor to exist.
    expert: the expert's index in its layer. fused: True if one HF tensor contains several, such as
    q, k and v. linear: for the kind "copy", True if the tensor is the matrix of a linear."""

    mca: str
    hf: tuple[str, ...]
    kind: str
    layers: str = "all"
    when: str | bool = True
    expert: int | None = None
    fused: bool = False
    linear: bool = False

    @property
    def axis(self) -> int | None:
        """The axis that tensor parallelism splits: 0 or 1; None if each rank has the whole tensor.
        It means nothing for the kind "module"."""
        return {"copy": None, "row": 1}.get(self.kind, 0)

    @property
    def is_linear(self) -> bool:
        """True for the matrix of a linear or an embedding to which LoRA adapters can be added."""
        if not self.mca.endswith(".weight"):
            return False
        if self.kind == "copy":
            return self.linear
        return "layernorm" not in self.mca and "conv1d" not in self.mca

    @property
    def is_of_inputs(self) -> bool:
        """True for a tensor of a module for inputs other than text, such as the vision tower."""
        return self.mca.startswith("vision_model.")

    def is_there(self, config: Any) -> bool:
        """True if a model with this config has the tensor. If the row's `when` names a field of the
        config, that field decides. config: any object with McaModelConfig's fields."""
        if isinstance(self.when, bool):
            return self.when
        name = self.when.removeprefix("not ")
        return bool(getattr(config, name, None)) != self.when.startswith("not ")

    def is_in(self, is_moe_layer: bool, is_linear: bool, has_window: bool = False) -> bool:
        """True if a layer has the tensor. is_moe_layer: True if the layer has experts. is_linear:
        True if its attention is linear. has_window: True if its attention has a sliding window."""
        kinds = {"all": True, "moe": is_moe_layer, "linear": is_linear, "window": has_window}
        kinds |= {"dense": not is_moe_layer, "attention": not is_linear, "full": not has_window}
        return kinds[self.layers]


LAYERS = "decoder.layers.{}."
HF_LAYERS = "model.layers.{}."


def _row(mca: str, modules: str, kind: str, of: str = "weight", **more: Any) -> Row:
    """A Row (megatron's name of a tensor with Hugging Face's names) for a tensor that decoder
    layers have. mca: megatron's module in the layer ("mlp.linear_fc2"). modules: Hugging Face's
    modules in the layer, separated by spaces ("mlp.down_proj"). kind: how the tensors correspond,
    such as "row". of: "weight" or "bias". more: other fields of Row."""
    hf = tuple(f"{HF_LAYERS}{name}.{of}" for name in modules.split())
    return Row(f"{LAYERS}{mca}.{of}", hf, kind, **more)


def attention(
    bias: bool | str = False,
    norm: bool | str = False,
    norm_kind: str = "copy",
    fused: bool = False,
    norms: str = "q_norm k_norm",
    sinks: str = "sinks",
) -> Iterator[Row]:
    """Yield the Rows (megatron's name of a tensor with Hugging Face's names) of a softmax attention
    layer: q, k and v, their bias and norms, output, sinks.

    bias, norm: whether q, k and v have a bias, and q and k a norm: a bool, or the config field that
    decides. norm_kind: the norms' Row.kind, "column" for one norm over all heads. fused: True if q,
    k and v are one HF tensor. norms, sinks: Hugging Face's names."""
    mca = "self_attention."
    hf = "self_attn."
    qkv = f"{hf}q_proj {hf}k_proj {hf}v_proj"
    if fused:
        qkv = f"{hf}qkv_proj"
    yield _row(mca + "linear_qkv", qkv, "qkv", fused=fused)
    if bias:
        yield _row(mca + "linear_qkv", qkv, "qkv", of="bias", when=bias)
    if norm:
        for name, module in zip(("q_layernorm", "k_layernorm"), norms.split(), strict=True):
            yield _row(mca + name, hf + module, norm_kind, when=norm)
    yield _row(mca + "linear_proj", hf + "o_proj", "row")
    yield _row(mca + "linear_proj", hf + "o_proj", "copy", of="bias", when="add_output_bias")
    names = (f"{HF_LAYERS}{hf}{sinks}",)
    yield Row(f"{LAYERS}{mca}core_attention.sinks", names, "column", when="attention_sinks")


def attention_of_two_sizes() -> Iterator[Row]:
    """Yield the Rows (megatron's name of a tensor with Hugging Face's names) of attention in a
    model whose sliding-window layers and full layers have different head sizes. In full layers the
    keys serve as values too."""
    qkv, *others = attention(norm=True)
    yield replace(qkv, layers="window")
    yield _row("self_attention.linear_qk", "self_attn.q_proj self_attn.k_proj", "qk", layers="full")
    yield from others


def latent_attention() -> Iterator[Row]:
    """Yield the Rows (megatron's name of a tensor with Hugging Face's names) of multi-latent
    attention. If the config has q_lora_rank, queries are projected by two matrices with a norm
    between them; otherwise by one matrix."""

    def row(mca: str, modules: str, kind: str, **more: Any) -> Row:
        return _row(f"self_attention.{mca}", f"self_attn.{modules}", kind, **more)

    yield row("linear_q_proj", "q_proj", "column", when="not q_lora_rank")
    yield row("linear_q_down_proj", "q_a_proj", "copy", linear=True, when="q_lora_rank")
    yield row("q_layernorm", "q_a_layernorm", "copy", when="q_lora_rank")
    yield row("linear_q_up_proj", "q_b_proj", "column", when="q_lora_rank")
    yield row("linear_kv_down_proj", "kv_a_proj_with_mqa", "copy", linear=True)
    yield row("kv_layernorm", "kv_a_layernorm", "copy")
    yield row("linear_kv_up_proj", "kv_b_proj", "column")
    yield row("linear_proj", "o_proj", "row")


def mlp_rows(
    hf: str = "mlp.", mca: str = "mlp.", fused: bool = False, gated: bool = True, **more: Any
) -> Iterator[Row]:
    """Yield the Rows (megatron's name of a tensor with Hugging Face's names) of an MLP. hf, mca:
    prefixes of these names. fused: True if gate and up are one HF tensor. gated: False if there is
    only up, without a gate. more: fields of Row, such as layers="dense"."""
    gate_up = f"{hf}gate_up_proj" if fused else f"{hf}gate_proj {hf}up_proj"
    if gated:
        yield _row(mca + "linear_fc1", gate_up, "gated", fused=fused, **more)
    else:
        yield _row(mca + "linear_fc1", hf + "up_proj", "column", **more)
    yield _row(mca + "linear_fc2", hf + "down_proj", "row", **more)


def moe_rows(
    hf: str = "mlp.",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    router: str = "gate",
    bias_of: str = "gate.",
) -> Iterator[Row]:
    """Yield the Rows (megatron's name of a tensor with Hugging Face's names) of a layer's router
    and routed experts. Each expert's gate, up and down are separate Hugging Face tensors.

    hf: the prefix of Hugging Face's modules. router: the router's name after it. gate, up, down:
    names of an expert's modules. bias_of: the prefix, after hf, of e_score_correction_bias."""
    yield _row("mlp.router", hf + router, "copy", layers="moe", linear=True)
    bias = (f"{HF_LAYERS}{hf}{bias_of}e_score_correction_bias",)
    when = "moe_router_enable_expert_bias"
    yield Row(LAYERS + "mlp.router.expert_bias", bias, "copy", layers="moe", when=when)
    more: dict[str, Any] = dict(layers="moe", of="bias", when="add_moe_bias")
    yield _row("mlp.router", hf + router, "copy", **more)
    mca = "mlp.experts.[]."
    hf = hf + "experts.[]."
    gate_up = f"{hf}{gate} {hf}{up}"
    yield _row(mca + "linear_fc1", gate_up, "gated", layers="moe")
    yield _row(mca + "linear_fc1", gate_up, "gated", **more)
    yield _row(mca + "linear_fc2", hf + down, "row", layers="moe")
    yield _row(mca + "linear_fc2", hf + down, "copy", **more)


def shared_expert_rows(name: str, gate: str | None = None) -> Iterator[Row]:
    """Yield the Rows (megatron's name of a tensor with Hugging Face's names) of a layer's shared
    experts. name: Hugging Face's name of their module. gate: that of the gate that weights their
    output; None: there is no gate."""
    mca = "mlp.shared_experts."
    more: dict[str, Any] = dict(layers="moe", when="moe_shared_expert_intermediate_size")
    yield from mlp_rows(f"mlp.{name}.", mca, **more)
    if gate:
        hf = (f"{HF_LAYERS}mlp.{gate}.weight",)
        yield Row(f"{LAYERS}{mca}gate_weight", hf, "copy", **more)


VALUE_HEAD = "score.weight"  # [1, h], in megatron's model and in Hugging Face's files

# Hugging Face's names for a layer's norms: before attention, after attention, before the MLP, after
# the MLP; - for none. _NORMS has megatron's names.
PRE_NORMS = "input_layernorm - post_attention_layernorm -"
POST_NORMS = "- post_attention_layernorm - post_feedforward_layernorm"
GEMMA_NORMS = (
    "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm"
)
GLM4_NORMS = "input_layernorm post_self_attn_layernorm post_attention_layernorm post_mlp_layernorm"
_NORMS = "input_layernorm self_attn_bda.norm pre_mlp_layernorm mlp_bda.norm"


def decoder_rows(
    of_attention: Iterable[Row], of_mlp: Iterable[Row], norms: str = PRE_NORMS
) -> tuple[Row, ...]:
    """The Rows (megatron's name of a tensor with Hugging Face's names) of a whole decoder:
    embedding, a layer's norms, attention and MLP, final norm, and output layer or value head.

    of_attention, of_mlp: Rows of a layer. norms: Hugging Face's names of a layer's norms, four
    words such as PRE_NORMS: before and after attention, before and after the MLP; "-" for none."""
    names = zip(_NORMS.split(), norms.split(), strict=True)
    of_layer = [_row(mca, hf, "copy") for mca, hf in names]
    rows = (
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "column"),
        of_layer[0],
        *of_attention,
        *of_layer[1:3],
        *of_mlp,
        of_layer[3],
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), "copy"),
        Row("output_layer.weight", ("lm_head.weight",), "column", when="not has_value_head"),
        Row(VALUE_HEAD, (VALUE_HEAD,), "copy", when="has_value_head"),
    )
    return tuple(row for row in rows if not row.hf[0].endswith("-.weight"))


# In most Hugging Face files multi-token prediction layers are numbered after the decoder's layers.
PREDICTION_LAYERS = "mtp.layers.{}."
PREDICTION_KEY = "num_nextn_predict_layers"


def dense_rows(norms: str = PRE_NORMS, **of_attention: Any) -> tuple[Row, ...]:
    """The Rows (megatron's name of a tensor with Hugging Face's names) of a decoder without
    experts, with a gated MLP. norms: see decoder_rows(). of_attention: arguments of attention()."""
    return decoder_rows(attention(**of_attention), mlp_rows(), norms)


# Transformer Engine fuses a norm into the next linear, where the same tensor has another name
TE_ALIASES = {
    LAYERS + "self_attention.linear_qkv.layer_norm_weight": LAYERS + "input_layernorm.weight",
    LAYERS + "mlp.linear_fc1.layer_norm_weight": LAYERS + "pre_mlp_layernorm.weight",
}

# Patterns of checkpoint tensors that no model uses: exports keep them, and any other tensor without
# a row is refused, since the model may need it. Old llama checkpoints have frequencies, which the
# config gives too.
UNUSED_TENSORS = (r"rotary_emb\.inv_freq$",)


def is_of_expert(mca: str) -> bool:
    """True if the megatron tensor with this name belongs to a routed expert."""
    return ".mlp.experts." in mca


def has_value_head(architectures: list[str] | None) -> bool:
    """True if a config.json's architectures name a model with a value head, which gives scores
    instead of logits: "...ForSequenceClassification"."""
    return any(name.endswith("ForSequenceClassification") for name in architectures or ())


# -- a family: rows, config keys and refusals

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
_CONSTANTS = dict(
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation_func="silu",
    add_bias_linear=False,
    hidden_dropout=0.0,
)

# -- refusals: key of config.json -> (supported values, remedy for other values)

_UNSET = (None, False, 0)
GELU = "gelu_pytorch_tanh"
_WITHOUT = "a bias on o_proj is not supported for this family: convert the model to one without"
REFUSALS: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "only silu (swiglu) is supported"),
    "hidden_activation": ((GELU,), f"only {GELU} (geglu) is supported"),
    "attention_out_bias": (_UNSET, _WITHOUT),
    "attention_bias": (_UNSET, _WITHOUT),
    "use_bias": (_UNSET, "biases on every matrix are not supported"),
    "use_bidirectional_attention": (_UNSET, "only causal attention is supported"),
    "mlp_bias": (_UNSET, "biases in the MLP are not supported"),
    "layer_types": ((None,), "transformers gives all layers of this model one type"),
    "router_jitter_noise": (_UNSET, "noise on the router's input is not supported: set it to 0"),
    "clip_qkv": (_UNSET, "clipping of queries, keys and values is not supported"),
    # transformers ignores these keys of DeepSeek's code, so other values would mean another model
    "norm_topk_prob": (
        _UNSET,
        "transformers does not normalise the weights of this model: set it to false",
    ),
    "moe_layer_freq": ((None, 1), "expected 1: experts in each layer after the dense ones"),
    "hidden_size_per_layer_input": (_UNSET, "separate embeddings per layer are not supported"),
    "num_kv_shared_layers": (_UNSET, "layers that share keys and values are not supported"),
    "enable_moe_block": (_UNSET, "experts beside an MLP are not supported"),
    "attention_k_eq_v": ((True,), "expected keys that are values too in layers without a window"),
    "swiglu_alpha": ((None, 1.702), "expected 1.702"),
    "first_k_dense_replace": ((None, 1), "expected 1: other patterns are read of mlp_layer_types"),
}

# rope scalings whose frequencies do not depend on the sequence length, and longrope, which has two
# sets of them
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "longrope")


def rope_parameters(hf: Any) -> list[dict[str, Any]]:
    """The rotary embedding's parameters in a transformers config `hf`, as new dicts with defaults
    filled in and Hunyuan's alpha applied to rope_theta. A list of one dict; or of two, if the
    config distinguishes layers: for sliding-window layers, then for full-attention layers."""
    rope = dict(getattr(hf, "rope_parameters", None) or {})
    kinds = [dict(rope[t]) for t in ("sliding_attention", "full_attention") if t in rope] or [rope]
    for kind in kinds:
        kind.setdefault("rope_type", "default")
        kind.setdefault("rope_theta", getattr(hf, "rope_theta", None) or 10000.0)
        kind["partial_rotary_factor"] = kind.get("partial_rotary_factor") or 1.0
        if kind["rope_type"] == "proportional":  # every channel has a frequency, which may be 0
            kind["partial_rotary_factor"] = 1.0
        if _has_fixed_alpha(hf, kind):
            kind["rope_theta"] *= kind["alpha"] ** (hf.head_dim / (hf.head_dim - 2))
            kind["rope_type"] = "default"
    return kinds


def _has_fixed_alpha(hf: Any, rope: dict[str, Any]) -> bool:
    """True for Hunyuan's "dynamic" rope scaling, whose alpha changes the rotary base in the same
    way for every sequence length."""
    is_dynamic = rope["rope_type"] == "dynamic" and rope.get("alpha")
    return bool(is_dynamic and hf.head_dim and hf.model_type.startswith("hunyuan_v1"))


@functools.cache
def _default(kind: type) -> Any:
    return kind()


def field_of(hf: Any, key: str, default: Any = None) -> Any:
    """The value of `key` in a transformers config `hf`. If the config's class has no such field,
    the result is `default`, even if config.json has the key; head_dim alone is read in any case."""
    # models read head_dim even if the config class has no such field
    if key == "head_dim" or hasattr(_default(hf.__class__), key):
        return getattr(hf, key, default)
    return default


@dataclass(frozen=True)
class Family:
    """A family of models (a model_type of config.json): how its weights and config.json map to
    megatron's model, and what is refused.

    rows: the Rows of its tensors, which pair megatron's names with Hugging Face's.
    config: config.json key -> McaModelConfig field, in addition to DENSE_CONFIG.
    constants: McaModelConfig fields with a value for the family, which `config` may override; they
    add to or override _CONSTANTS. derived: function of the transformers config for the other
    fields.
    refusals: config.json keys, separated by spaces, whose unsupported values raise an error: keys
    of REFUSALS, or key=value or key=one|another with the supported values beside null.
    prediction: the config.json key with the number of multi-token prediction layers, if the family
    has any.
    has_windows: True if layers may have a sliding window. partial_rotary: True if transformers'
    model reads partial_rotary_factor. sizes_differ: True if layers with a sliding window have other
    head sizes.
    vision_parts: {part of the model, such as a vision tower: its Hugging Face modules}. inputs: the
    row in INPUTS for a model that reads other inputs than text, or "".
    unused: patterns of checkpoint tensors that are not used, in addition to UNUSED_TENSORS; if
    multi-token prediction layers are trained, they do not count.
    prefixes, stacked_experts, renamed: how names and experts in files differ from transformers'
    modules."""

    rows: tuple[Row, ...]
    config: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    refusals: str = "hidden_act"
    has_windows: bool = False  # in the sliding layers of layer_types; in all layers if it is absent
    derived: Callable[[Any], dict[str, Any]] = field(default=lambda hf: {})
    prediction: str = ""
    partial_rotary: bool = False
    vision_parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # with inputs, config keys are in text_config
    inputs: str = ""
    unused: tuple[str, ...] = ()
    # prefixes of transformers' modules -> those under which it saves the tensors, if they differ
    prefixes: dict[str, str] = field(default_factory=dict)
    # the sizes come from transformers' per_layer_config
    sizes_differ: bool = False
    # how files without a source of their own have a layer's experts in one tensor: "rows", or
    # "in_turns" (always, in bf16 or MXFP4); part_stacked.py has these formats
    stacked_experts: str = ""
    # part of a module name in transformers -> the same part in files (as in its
    # conversion_mapping.py)
    renamed: dict[str, str] = field(default_factory=dict)

    def values(self, hf: Any) -> dict[str, Any]:
        """Translate a transformers config `hf` of this family -> {McaModelConfig field: value}."""
        values = _CONSTANTS | self.constants
        whole = hf
        hf = hf.get_text_config()
        of_window = hf.per_layer_config["sliding_attention"] if self.sizes_differ else hf
        for key, name in (DENSE_CONFIG | self.config).items():
            value = field_of(of_window, key)
            if value is not None:
                values[name] = value
        if self.inputs:  # a flag of the text_config has no effect
            values["tie_embeddings_and_output_weights"] = whole.tie_word_embeddings
        values.update(self.derived(hf))
        if has_value_head(whole.architectures):
            values |= dict(has_value_head=True, tie_embeddings_and_output_weights=False)
        if not values.get("num_moe_experts"):
            # megatron refuses fields about experts for a dense model
            values = {name: value for name, value in values.items() if not name.startswith("moe_")}
        rope = rope_parameters(hf)[-1]
        types = field_of(hf, "layer_types")
        values["rotary_base"] = rope["rope_theta"]
        values["rotary_percent"] = rope["partial_rotary_factor"]
        if self.has_windows and (types is None or "sliding_attention" in types):
            values["sliding_window"] = hf.sliding_window
            if types:
                slides = [i for i, name in enumerate(types) if name == "sliding_attention"]
                values["sliding_layers"] = slides
        return values

    def reads(self, quantized: Any) -> bool:
        """True if this family can read weights of this quantisation: bitsandbytes' NF4, or MXFP4 if
        the family's files have it. quantized: the quantization_config of a config.json."""
        values = dict(quantized) if isinstance(quantized, Mapping) else {}
        method = values.get("quant_method")
        if method == "bitsandbytes":
            return values.get("bnb_4bit_quant_type") == "nf4" and bool(values.get("load_in_4bit"))
        return self.stacked_experts == "in_turns" and method == "mxfp4"

    def check(self, hf: Any, origin: str) -> None:
        """Raise ConfigError if a transformers config has values that this family does not support
        on megatron-core, such as another activation. origin: name of the model, for the message."""
        judge = Judge(None)
        instead = "use_mca: false, to train it as plain torch"
        quantized = getattr(hf, "quantization_config", None)
        hf = hf.get_text_config()

        def refuse(key: str, value: Any, reason: str) -> None:
            name = f"{key} in config.json of {origin}"
            reason = f"it cannot be honoured: {reason}"
            judge.refuse("model_name_or_path", reason, instead, value, name)

        for refusal in self.refusals.split():
            key, _, only = refusal.partition("=")
            options = only.split("|")
            default = (None, *options), f"expected {' or '.join(options)}"
            honoured, why = default if only else REFUSALS[key]
            value = getattr(hf, key, None)
            if value not in honoured:
                refuse(key, value, why)
        window = getattr(hf, "sliding_window", None)
        if not window and "sliding_attention" in (getattr(hf, "layer_types", None) or ()):
            refuse("layer_types", "sliding_attention", f"the window is switched off ({window})")
        kinds = {"sliding_attention", "full_attention"}
        if self.sizes_differ and kinds - set(hf.layer_types):
            refuse("layer_types", hf.layer_types, f"expected {' and '.join(sorted(kinds))}")
        if quantized and not self.reads(quantized):
            refuse("quantization_config", None, "save the model in bf16 or fp32 first")
        for rope in rope_parameters(hf):
            if rope["rope_type"] not in ROPE_TYPES:
                refuse("rope_type", rope["rope_type"], f"expected one of {', '.join(ROPE_TYPES)}")
            # other transformers models ignore it with default rope, and fail with scaled rope
            part = rope["partial_rotary_factor"]
            if part != 1.0 and not self.partial_rotary:
                refuse("partial_rotary_factor", part, "expected 1.0 or none")
        judge.close()
