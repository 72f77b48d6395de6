"""A family of models: its rows of weights (a megatron tensor and its tensors in Hugging Face's
files), config keys, and refusals of unsupported values. The table of families is families.py.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import Judge


@dataclass(frozen=True)
class Row:
    """One megatron tensor and its HF tensors; of kind "module" all tensors under a prefix each."""

    mca: str
    hf: tuple[str, ...]
    kind: str
    # or "dense", or "moe": layers with a mixture of experts; or "linear", or "attention": layers
    # with linear attention, or those without
    layers: str = "all"
    # True, or a condition for the tensor: a config field, set (or, after "not", unset)
    when: str | bool = True
    expert: int | None = None  # index of the expert in the layer
    fused: bool = False  # one HF tensor with all parts
    linear: bool = False  # of kind copy: a matrix, here on every rank

    @property
    def axis(self) -> int | None:
        """The axis cut by tensor parallelism, or None."""
        return {"copy": None, "row": 1}.get(self.kind, 0)

    @property
    def is_linear(self) -> bool:
        """True for the matrix of a linear or an embedding: adapters are possible on it."""
        if not self.mca.endswith(".weight"):
            return False
        if self.kind == "copy":
            return self.linear
        return "layernorm" not in self.mca and "conv1d" not in self.mca

    @property
    def is_of_inputs(self) -> bool:
        """True for a tensor of transformers' module for inputs beside text."""
        return self.mca.startswith("vision_model.")

    def is_there(self, config) -> bool:
        """True if a model has the tensor. config: any object with McaModelConfig's fields."""
        if isinstance(self.when, bool):
            return self.when
        name = self.when.removeprefix("not ")
        return bool(getattr(config, name, None)) != self.when.startswith("not ")

    def is_in(self, is_moe_layer: bool, is_linear: bool, has_window: bool = False) -> bool:
        """True if a layer of this kind has the tensor. is_linear: its attention is linear."""
        kinds = {"all": True, "moe": is_moe_layer, "linear": is_linear, "window": has_window}
        kinds |= {"dense": not is_moe_layer, "attention": not is_linear, "full": not has_window}
        return kinds[self.layers]


LAYERS = "decoder.layers.{}."
HF_LAYERS = "model.layers.{}."


def _row(mca: str, modules: str, kind: str, of: str = "weight", **more) -> Row:
    """A row of a decoder layer: megatron's module, and Hugging Face's modules by spaces."""
    hf = tuple(f"{HF_LAYERS}{name}.{of}" for name in modules.split())
    return Row(f"{LAYERS}{mca}.{of}", hf, kind, **more)


def attention(
    bias=False, norm=False, norm_kind="copy", fused=False, norms="q_norm k_norm", sinks="sinks"
):
    """Rows of attention. bias, norm: True, or the config field for them. norm_kind: "column" for a
    norm over all heads. norms, sinks: Hugging Face's names. Sinks and a bias of the output are
    there as the config says."""
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


def attention_of_two_sizes():
    """Rows of attention in layers with a window and in full ones, whose keys are values too."""
    qkv, *others = attention(norm=True)
    yield replace(qkv, layers="window")
    yield _row("self_attention.linear_qk", "self_attn.q_proj self_attn.k_proj", "qk", layers="full")
    yield from others


def latent_attention():
    """Rows of multi-latent attention; queries have one matrix, or two with a norm between them."""

    def row(mca, modules, kind, **more):
        return _row(f"self_attention.{mca}", f"self_attn.{modules}", kind, **more)

    yield row("linear_q_proj", "q_proj", "column", when="not q_lora_rank")
    yield row("linear_q_down_proj", "q_a_proj", "copy", linear=True, when="q_lora_rank")
    yield row("q_layernorm", "q_a_layernorm", "copy", when="q_lora_rank")
    yield row("linear_q_up_proj", "q_b_proj", "column", when="q_lora_rank")
    yield row("linear_kv_down_proj", "kv_a_proj_with_mqa", "copy", linear=True)
    yield row("kv_layernorm", "kv_a_layernorm", "copy")
    yield row("linear_kv_up_proj", "kv_b_proj", "column")
    yield row("linear_proj", "o_proj", "row")


def delta_rows(inputs: str, kind: str):
    """Rows of a gated delta net. inputs: Hugging Face's modules for its queries, keys, values and
    gates; kind: "delta", or "delta_grouped" if their rows are those of each head of keys."""

    def row(mca, modules, kind, **more):
        hf = " ".join(f"linear_attn.{name}" for name in modules.split())
        return _row(f"self_attention.{mca}", hf, kind, layers="linear", **more)

    yield row("in_proj", inputs, kind)
    yield row("conv1d", "conv1d", "delta_convolution", fused=True)
    for name in ("A_log", "dt_bias"):
        hf = (f"{HF_LAYERS}linear_attn.{name}",)
        yield Row(f"{LAYERS}self_attention.{name}", hf, "column", layers="linear")
    yield row("norm", "norm", "copy")
    yield row("out_proj", "out_proj", "row")


def delta_attention(*of_delta_net):
    """Rows of attention with an output gate in some layers, of a gated delta net in the others."""
    for row in attention(norm=True):
        yield replace(row, layers="attention")
    yield from delta_rows(*of_delta_net)


def mlp_rows(hf="mlp.", mca="mlp.", fused=False, gated=True, **more):
    """Rows of an MLP. more: fields of Row, such as its layers."""
    gate_up = f"{hf}gate_up_proj" if fused else f"{hf}gate_proj {hf}up_proj"
    if gated:
        yield _row(mca + "linear_fc1", gate_up, "gated", fused=fused, **more)
    else:
        yield _row(mca + "linear_fc1", hf + "up_proj", "column", **more)
    yield _row(mca + "linear_fc2", hf + "down_proj", "row", **more)


def moe_rows(
    hf="mlp.", gate="gate_proj", up="up_proj", down="down_proj", router="gate", bias_of="gate."
):
    """Rows of the router and the experts of a layer, one tensor each as in Hugging Face's files.
    bias_of: prefix of the router's bias."""
    yield _row("mlp.router", hf + router, "copy", layers="moe", linear=True)
    bias = (f"{HF_LAYERS}{hf}{bias_of}e_score_correction_bias",)
    when = "moe_router_enable_expert_bias"
    yield Row(LAYERS + "mlp.router.expert_bias", bias, "copy", layers="moe", when=when)
    more = dict(layers="moe", of="bias", when="add_moe_bias")
    yield _row("mlp.router", hf + router, "copy", **more)
    mca = "mlp.experts.[]."
    hf = hf + "experts.[]."
    gate_up = f"{hf}{gate} {hf}{up}"
    yield _row(mca + "linear_fc1", gate_up, "gated", layers="moe")
    yield _row(mca + "linear_fc1", gate_up, "gated", **more)
    yield _row(mca + "linear_fc2", hf + down, "row", layers="moe")
    yield _row(mca + "linear_fc2", hf + down, "copy", **more)


def shared_expert_rows(name, gate=None):
    """Rows of shared experts. gate: Hugging Face's module for the weight of their output."""
    mca = "mlp.shared_experts."
    more = dict(layers="moe", when="moe_shared_expert_intermediate_size")
    yield from mlp_rows(f"mlp.{name}.", mca, **more)
    if gate:
        hf = (f"{HF_LAYERS}mlp.{gate}.weight",)
        yield Row(f"{LAYERS}{mca}gate_weight", hf, "copy", **more)


VALUE_HEAD = "score.weight"  # [1, h], in megatron's model and in Hugging Face's files

# HF's names of a layer's norms: before attention, of its output, before the MLP, of its output;
# - for none. megatron's names last
PRE_NORMS = "input_layernorm - post_attention_layernorm -"
POST_NORMS = "- post_attention_layernorm - post_feedforward_layernorm"
GEMMA_NORMS = (
    "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm"
)
GLM4_NORMS = "input_layernorm post_self_attn_layernorm post_attention_layernorm post_mlp_layernorm"
_NORMS = "input_layernorm self_attn_bda.norm pre_mlp_layernorm mlp_bda.norm"


def decoder_rows(of_attention, of_mlp, norms=PRE_NORMS):
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


# numbered after the decoder's layers, as in most of Hugging Face's files
PREDICTION_LAYERS = "mtp.layers.{}."


@dataclass(frozen=True)
class Prediction:
    """Names of layers for multi-token prediction in Hugging Face's files: their number in
    config.json, the prefix of a decoder layer, and the modules beside it."""

    key: str
    layer: str
    enorm: str
    hnorm: str
    eh_proj: str
    final_layernorm: str

    @property
    def is_numbered(self) -> bool:
        """True if each layer has its own modules, and maybe copies of embedding and head; else
        there is one layer."""
        return "{}" in self.layer


PREDICTION_KEY = "num_nextn_predict_layers"
AFTER_DECODER = Prediction(
    PREDICTION_KEY,
    HF_LAYERS,
    enorm=f"{HF_LAYERS}enorm",
    hnorm=f"{HF_LAYERS}hnorm",
    eh_proj=f"{HF_LAYERS}eh_proj",
    final_layernorm=f"{HF_LAYERS}shared_head.norm",
)
BESIDE_DECODER = Prediction(
    PREDICTION_KEY,
    "mtp.layers.0.",
    enorm="mtp.pre_fc_norm_embedding",
    hnorm="mtp.pre_fc_norm_hidden",
    eh_proj="mtp.fc",
    final_layernorm="mtp.norm",
)


def prediction_rows(decoder_rows, names: Prediction):
    """Rows of multi-token prediction layers: a decoder layer each, with norms and projection."""
    mca = PREDICTION_LAYERS
    for module in ("enorm", "hnorm", "final_layernorm"):
        yield Row(f"{mca}{module}.weight", (f"{getattr(names, module)}.weight",), "copy")
    yield Row(f"{mca}eh_proj.weight", (f"{names.eh_proj}.weight",), "copy", linear=True)
    for row in decoder_rows:
        if row.mca.startswith(LAYERS):
            hf = tuple(re.sub(r".*layers\.\{}\.", names.layer, name) for name in row.hf)
            mca_name = row.mca.replace(LAYERS, f"{mca}transformer_layer.")
            yield replace(row, mca=mca_name, hf=hf)


def dense_rows(norms=PRE_NORMS, **of_attention):
    return decoder_rows(attention(**of_attention), mlp_rows(), norms)


# Transformer Engine fuses a norm into the linear after it: the same tensor under another name
TE_ALIASES = {
    LAYERS + "self_attention.linear_qkv.layer_norm_weight": LAYERS + "input_layernorm.weight",
    LAYERS + "mlp.linear_fc1.layer_norm_weight": LAYERS + "pre_mlp_layernorm.weight",
}

# Patterns of tensors in checkpoints without a use in any model. They are carried into every export;
# any other tensor without a row is refused, since the model may need it.
# Old llama checkpoints: the config gives the frequencies.
UNUSED_TENSORS = (r"rotary_emb\.inv_freq$",)


def is_of_expert(mca: str) -> bool:
    """True for a megatron tensor of an expert, by its name in a row."""
    return ".mlp.experts." in mca


def has_value_head(architectures: list[str] | None) -> bool:
    """True if the architectures of a config.json name a model with scores in place of logits."""
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

# -- refusals: key of config.json -> (supported values, remedy for others)

_UNSET = (None, False, 0)
GELU = "gelu_pytorch_tanh"
_WITHOUT = "a bias on o_proj is not built for this family: convert the model to one without"
REFUSALS: dict[str, tuple[tuple, str]] = {
    "hidden_act": (("silu", "swish"), "only silu (swiglu) is built"),
    "hidden_activation": ((GELU,), f"only {GELU} (geglu) is built"),
    "attention_out_bias": (_UNSET, _WITHOUT),
    "attention_bias": (_UNSET, _WITHOUT),
    "use_bias": (_UNSET, "biases on every matrix are not built"),
    "use_bidirectional_attention": (_UNSET, "only causal attention is built"),
    "mlp_bias": (_UNSET, "biases in the MLP are not built"),
    "layer_types": ((None,), "transformers gives all layers of this model one type"),
    "router_jitter_noise": (_UNSET, "noise on the router's input is not built: set it to 0"),
    "clip_qkv": (_UNSET, "clipping of queries, keys and values is not built"),
    # keys of DeepSeek's code, ignored by transformers' classes: other values make another model
    "norm_topk_prob": (
        _UNSET,
        "transformers does not normalise the weights of this model: set it to false",
    ),
    "moe_layer_freq": ((None, 1), "expected 1: experts in each layer after the dense ones"),
    "hidden_size_per_layer_input": (_UNSET, "embeddings of each layer's own are not built"),
    "num_kv_shared_layers": (_UNSET, "layers that share keys and values are not built"),
    "enable_moe_block": (_UNSET, "experts beside an MLP are not built"),
    "attention_k_eq_v": ((True,), "expected keys that are values too in layers without a window"),
    "swiglu_alpha": ((None, 1.702), "expected 1.702"),
    "first_k_dense_replace": ((None, 1), "expected 1: other patterns are read of mlp_layer_types"),
}

# rope scalings with frequencies independent of the sequence length
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


def rope_parameters(hf) -> list[dict[str, Any]]:
    """The rope parameters of a transformers config: one dict, or two for layers with a window and
    without."""
    rope = dict(getattr(hf, "rope_parameters", None) or {})
    kinds = [dict(rope[t]) for t in ("sliding_attention", "full_attention") if t in rope] or [rope]
    for kind in kinds:
        kind.setdefault("rope_type", "default")
        kind.setdefault("rope_theta", getattr(hf, "rope_theta", None) or 10000.0)
        kind["partial_rotary_factor"] = kind.get("partial_rotary_factor") or 1.0
        if kind["rope_type"] == "proportional":  # all channels have a frequency, most of them 0
            kind["partial_rotary_factor"] = 1.0
        if _has_fixed_alpha(hf, kind):
            kind["rope_theta"] *= kind["alpha"] ** (hf.head_dim / (hf.head_dim - 2))
            kind["rope_type"] = "default"
    return kinds


def _has_fixed_alpha(hf, rope: dict[str, Any]) -> bool:
    """True for Hunyuan's "dynamic" scaling: alpha stretches the base, whatever the length."""
    is_dynamic = rope["rope_type"] == "dynamic" and rope.get("alpha")
    return bool(is_dynamic and hf.head_dim and hf.model_type.startswith("hunyuan_v1"))


@functools.cache
def _default(kind) -> Any:
    return kind()


def field_of(hf, key: str, default=None) -> Any:
    """A field of a transformers config; `default` where its class lacks the field, so that the
    model of transformers ignores it in a config.json."""
    # models read head_dim where their classes have none
    if key == "head_dim" or hasattr(_default(hf.__class__), key):
        return getattr(hf, key, default)
    return default


@dataclass(frozen=True)
class Family:
    """A model_type: its rows, config keys, and refusals of unsupported values in a config.json."""

    rows: tuple[Row, ...]
    # beside DENSE_CONFIG: HF config key -> McaModelConfig field
    config: dict[str, str] = field(default_factory=dict)
    # constant McaModelConfig fields of the family, beside or in place of _CONSTANTS
    constants: dict[str, Any] = field(default_factory=dict)
    # keys of REFUSALS, and key=value for the only value, or key=one|another
    refusals: str = "hidden_act"
    has_windows: bool = False  # in the sliding layers of layer_types, or in all without the key
    # fields from several keys
    derived: Callable[[Any], dict[str, Any]] = field(default=lambda hf: {})
    # names of multi-token prediction layers in checkpoints
    prediction: Prediction | None = None
    # transformers' model reads partial_rotary_factor
    partial_rotary: bool = False
    # parts beside the language model -> modules of Hugging Face's with their weights
    vision_parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # a row of INPUTS, beside a language model: config keys are those of its text_config
    inputs: str = ""
    # patterns of tensors in checkpoints without a use here, beside UNUSED_TENSORS, as long as no
    # layer for multi-token prediction is trained
    unused: tuple[str, ...] = ()
    # transformers saves its tensors under the names of OLDER_PREFIXES
    older_names: bool = False
    # heads of layers with a window have other sizes: transformers' per_layer_config
    sizes_differ: bool = False
    # files hold the experts of a layer in one tensor, in bf16 or MXFP4 (TENSOR_FORMATS)
    stacked_experts: bool = False
    # part of a name in transformers' modules -> that in files (its conversion_mapping.py has both)
    renamed: dict[str, str] = field(default_factory=dict)

    def values(self, hf) -> dict[str, Any]:
        """The McaModelConfig fields from a transformers config object."""
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
        """True if weights quantised by a quantization_config of config.json can be read."""
        values = dict(quantized) if isinstance(quantized, Mapping) else {}
        method = values.get("quant_method")
        if method == "bitsandbytes":
            return values.get("bnb_4bit_quant_type") == "nf4" and bool(values.get("load_in_4bit"))
        return self.stacked_experts and method == "mxfp4"

    def check(self, hf, origin: str) -> None:
        """Raise ConfigError for unsupported values in transformers' config of a model. origin: the
        name of the config.json."""
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
            # default rope in the other models of transformers ignores it, and scaled ones fail
            part = rope["partial_rotary_factor"]
            if part != 1.0 and not self.partial_rotary:
                refuse("partial_rotary_factor", part, "expected 1.0 or none")
        judge.close()
