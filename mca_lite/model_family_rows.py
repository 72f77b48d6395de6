"""Rows of the families' table: how Hugging Face's weights become megatron's, and back.

One row maps one megatron tensor: (megatron name, HF names, kind). `{}` is the layer's number. The
kind says how HF tensors merge into megatron's, and which axis tensor parallelism cuts:

    copy     one tensor, the same on every tensor-parallel rank
    column   one tensor, cut along its rows (the output dimension)
    row      one tensor, cut along its columns (the input dimension)
    gated    [gate; up]: each is cut along its rows, then a rank's parts are joined
    qkv      per query group [its queries, key, value] along the rows, no rotary permutation;
             groups are cut over ranks

A fused row names one HF tensor, which holds what gated or qkv take of several, one after the
other.

`[]` is an expert's number: such a row stands for one of each expert, whose matrices expert tensor
parallelism cuts. Rows of `mtp.layers` are those of layers for multi-token prediction, whose numbers
go on from the decoder's.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Row:
    """One megatron tensor and the HF tensors that it is made of."""

    mca: str
    hf: tuple[str, ...]
    kind: str
    layers: str = "all"  # or those that are "dense", or "moe": a mixture of experts
    # or the config's field that must be set (after "not": must not) for the tensor to be there
    when: str | bool = True
    expert: int | None = None  # its number in the layer
    fused: bool = False  # the one HF tensor holds all parts
    linear: bool = False  # of kind copy: it is a matrix that others would cut

    @property
    def axis(self) -> int | None:
        """The axis that tensor parallelism cuts, None where it cuts none."""
        return {"copy": None, "row": 1}.get(self.kind, 0)

    @property
    def is_linear(self) -> bool:
        """Whether it is the matrix of a linear or an embedding, which can have an adapter."""
        if not self.mca.endswith(".weight"):
            return False
        if self.kind == "copy":
            return self.linear
        return "layernorm" not in self.mca

    def is_there(self, config) -> bool:
        """Whether a model has the tensor. config: anything with McaModelConfig's fields."""
        if isinstance(self.when, bool):
            return self.when
        field = self.when.removeprefix("not ")
        return bool(getattr(config, field, None)) != self.when.startswith("not ")

    def is_in(self, is_moe_layer: bool) -> bool:
        """Whether a layer of that kind has the tensor."""
        return self.layers == "all" or (self.layers == "moe") == is_moe_layer


_LAYERS, _HF_LAYERS = "decoder.layers.{}.", "model.layers.{}."


def _row(ours: str, theirs: str, kind: str, of: str = "weight", **more) -> Row:
    """A row of a decoder layer: megatron's module, and Hugging Face's modules by spaces."""
    hf = tuple(f"{_HF_LAYERS}{name}.{of}" for name in theirs.split())
    return Row(f"{_LAYERS}{ours}.{of}", hf, kind, **more)


def attention(bias=False, norm=False, norm_kind="copy", fused=False):
    """bias, norm: True, or the config field that says so. norm_kind: column for all heads."""
    ours, hf = "self_attention.", "self_attn."
    qkv = f"{hf}q_proj {hf}k_proj {hf}v_proj"
    if fused:
        qkv = f"{hf}qkv_proj"
    yield _row(ours + "linear_qkv", qkv, "qkv", fused=fused)
    if bias:
        yield _row(ours + "linear_qkv", qkv, "qkv", of="bias", when=bias)
    if norm:
        yield _row(ours + "q_layernorm", hf + "q_norm", norm_kind, when=norm)
        yield _row(ours + "k_layernorm", hf + "k_norm", norm_kind, when=norm)
    yield _row(ours + "linear_proj", hf + "o_proj", "row")


def latent_attention():
    """Multi-latent attention; queries have one matrix, or two with a norm between them."""

    def row(ours, theirs, kind, **more):
        return _row(f"self_attention.{ours}", f"self_attn.{theirs}", kind, **more)

    yield row("linear_q_proj", "q_proj", "column", when="not q_lora_rank")
    yield row("linear_q_down_proj", "q_a_proj", "copy", linear=True, when="q_lora_rank")
    yield row("q_layernorm", "q_a_layernorm", "copy", when="q_lora_rank")
    yield row("linear_q_up_proj", "q_b_proj", "column", when="q_lora_rank")
    yield row("linear_kv_down_proj", "kv_a_proj_with_mqa", "copy", linear=True)
    yield row("kv_layernorm", "kv_a_layernorm", "copy")
    yield row("linear_kv_up_proj", "kv_b_proj", "column")
    yield row("linear_proj", "o_proj", "row")


def mlp_rows(hf="mlp.", ours="mlp.", fused=False, **more):
    """more: fields of Row, such as the layers that have this MLP."""
    gate_up = f"{hf}gate_up_proj" if fused else f"{hf}gate_proj {hf}up_proj"
    yield _row(ours + "linear_fc1", gate_up, "gated", fused=fused, **more)
    yield _row(ours + "linear_fc2", hf + "down_proj", "row", **more)


def moe_rows(hf="mlp.", gate="gate_proj", up="up_proj", down="down_proj"):
    """The router and the experts of a layer, a tensor each, as Hugging Face's files hold them."""
    yield _row("mlp.router", hf + "gate", "copy", layers="moe", linear=True)
    bias = (f"{_HF_LAYERS}{hf}gate.e_score_correction_bias",)
    when = "moe_router_enable_expert_bias"
    yield Row(_LAYERS + "mlp.router.expert_bias", bias, "copy", layers="moe", when=when)
    ours, hf = "mlp.experts.[].", hf + "experts.[]."
    yield _row(ours + "linear_fc1", f"{hf}{gate} {hf}{up}", "gated", layers="moe")
    yield _row(ours + "linear_fc2", hf + down, "row", layers="moe")


def shared_expert_rows(name, gate=None):
    """gate: of Hugging Face's module that weighs what the shared experts give."""
    ours = "mlp.shared_experts."
    more = dict(layers="moe", when="moe_shared_expert_intermediate_size")
    yield from mlp_rows(f"mlp.{name}.", ours, **more)
    if gate:
        hf = (f"{_HF_LAYERS}mlp.{gate}.weight",)
        yield Row(f"{_LAYERS}{ours}gate_weight", hf, "copy", **more)


# HF's names of a layer's norms: before attention, of what attention gives, before the MLP, of what
# the MLP gives
PRE_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GLM4_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


def decoder_rows(of_attention, of_mlp, norms=PRE_NORMS):
    places = ("input_layernorm", "self_attn_bda.norm", "pre_mlp_layernorm", "mlp_bda.norm")
    of_layer = [
        name and _row(place, name, "copy") for place, name in zip(places, norms, strict=True)
    ]
    rows = (
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "column"),
        of_layer[0],
        *of_attention,
        *of_layer[1:3],
        *of_mlp,
        of_layer[3],
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), "copy"),
        Row("output_layer.weight", ("lm_head.weight",), "column"),
    )
    return tuple(row for row in rows if row)


# their numbers go on from the decoder's, as in Hugging Face's files
PREDICTION_LAYERS = "mtp.layers.{}."


def prediction_rows(decoder_rows):
    """Layers for multi-token prediction: one of the decoder's each, and what joins them."""
    ours, hf = PREDICTION_LAYERS, _HF_LAYERS
    yield Row(ours + "enorm.weight", (hf + "enorm.weight",), "copy")
    yield Row(ours + "hnorm.weight", (hf + "hnorm.weight",), "copy")
    yield Row(ours + "eh_proj.weight", (hf + "eh_proj.weight",), "copy", linear=True)
    for row in decoder_rows:
        if row.mca.startswith(_LAYERS):
            yield replace(row, mca=row.mca.replace(_LAYERS, ours + "transformer_layer."))
    yield Row(ours + "final_layernorm.weight", (hf + "shared_head.norm.weight",), "copy")


def dense_rows(norms=PRE_NORMS, **of_attention):
    return decoder_rows(attention(**of_attention), mlp_rows(), norms)


# Transformer Engine fuses a norm into the linear after it: the same tensor under another name
TE_ALIASES = {
    _LAYERS + "self_attention.linear_qkv.layer_norm_weight": _LAYERS + "input_layernorm.weight",
    _LAYERS + "mlp.linear_fc1.layer_norm_weight": _LAYERS + "pre_mlp_layernorm.weight",
}

# Patterns of tensors that some checkpoints hold and no model reads. Any other tensor that no row
# names is refused, since the model may need it; a family that leaves some out on purpose adds them
# here, and they are carried into every export.
# Old llama checkpoints: the config gives the frequencies.
UNUSED_TENSORS = (r"rotary_emb\.inv_freq$",)


def is_of_expert(mca: str) -> bool:
    """Whether one of megatron's tensors, by its name in a row, is an expert's."""
    return ".mlp.experts." in mca
