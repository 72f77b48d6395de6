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
    # the config's field that must be set (after "not": must not) for the tensor to be there
    when: str | None = None
    expert: int | None = None  # its number in the layer
    fused: bool = False  # the one HF tensor holds all parts
    linear: bool = False  # of kind copy: it is a matrix that others would cut

    @property
    def num_parts(self) -> int:
        """Tensors that gated or qkv merge, be they HF tensors or parts of one."""
        if self.fused:
            return {"gated": 2, "qkv": 3}.get(self.kind, 1)
        return len(self.hf)

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
        if self.when is None:
            return True
        field = self.when.removeprefix("not ")
        return bool(getattr(config, field, None)) != self.when.startswith("not ")

    def is_in(self, is_moe_layer: bool) -> bool:
        """Whether a layer of that kind has the tensor."""
        return self.layers == "all" or (self.layers == "moe") == is_moe_layer


def attention(bias=False, norm=False, norm_kind="copy", fused=False):
    """bias, norm: True, or the config field that says so. norm_kind: column for all heads."""
    layer, hf = "decoder.layers.{}.self_attention.", "model.layers.{}.self_attn."
    names = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
    yield Row(
        layer + "linear_qkv.weight", tuple(f"{hf}{x}.weight" for x in names), "qkv", fused=fused
    )
    if bias:
        when = bias if isinstance(bias, str) else None
        yield Row(
            layer + "linear_qkv.bias", tuple(f"{hf}{x}.bias" for x in names), "qkv", when=when
        )
    if norm:
        when = norm if isinstance(norm, str) else None
        yield Row(layer + "q_layernorm.weight", (hf + "q_norm.weight",), norm_kind, when=when)
        yield Row(layer + "k_layernorm.weight", (hf + "k_norm.weight",), norm_kind, when=when)
    yield Row(layer + "linear_proj.weight", (hf + "o_proj.weight",), "row")


def latent_attention():
    """Multi-latent attention; queries have one matrix, or two with a norm between them."""
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


def mlp_rows(hf="mlp.", layers="all", fused=False):
    layer, hf = "decoder.layers.{}.mlp.", "model.layers.{}." + hf
    gate_up = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    yield Row(
        layer + "linear_fc1.weight",
        tuple(f"{hf}{x}.weight" for x in gate_up),
        "gated",
        layers,
        fused=fused,
    )
    yield Row(layer + "linear_fc2.weight", (hf + "down_proj.weight",), "row", layers)


def moe_rows(hf="mlp.", gate="gate_proj", up="up_proj", down="down_proj"):
    """The router and the experts of a layer, a tensor each, as Hugging Face's files hold them."""
    layer, hf = "decoder.layers.{}.mlp.", "model.layers.{}." + hf
    yield Row(layer + "router.weight", (hf + "gate.weight",), "copy", "moe", linear=True)
    bias = (hf + "gate.e_score_correction_bias",)
    yield Row(layer + "router.expert_bias", bias, "copy", "moe", "moe_router_enable_expert_bias")
    gated = tuple(f"{hf}experts.[].{name}.weight" for name in (gate, up))
    yield Row(layer + "experts.[].linear_fc1.weight", gated, "gated", "moe")
    yield Row(
        layer + "experts.[].linear_fc2.weight", (f"{hf}experts.[].{down}.weight",), "row", "moe"
    )


def shared_expert_rows(name, gate=None):
    layer, hf = "decoder.layers.{}.mlp.shared_experts.", f"model.layers.{{}}.mlp.{name}."
    fc1 = (hf + "gate_proj.weight", hf + "up_proj.weight")
    when = "moe_shared_expert_intermediate_size"
    yield Row(layer + "linear_fc1.weight", fc1, "gated", "moe", when)
    yield Row(layer + "linear_fc2.weight", (hf + "down_proj.weight",), "row", "moe", when)
    if gate:
        yield Row(
            layer + "gate_weight", (f"model.layers.{{}}.mlp.{gate}.weight",), "copy", "moe", when
        )


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
    layer, hf = "decoder.layers.{}.", "model.layers.{}."
    places = ("input_layernorm", "self_attn_bda.norm", "pre_mlp_layernorm", "mlp_bda.norm")
    of_layer = [
        name and Row(f"{layer}{place}.weight", (f"{hf}{name}.weight",), "copy")
        for place, name in zip(places, norms, strict=True)
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


_LAYERS = "decoder.layers.{}."
# their numbers go on from the decoder's, as in Hugging Face's files
PREDICTION_LAYERS = "mtp.layers.{}."


def prediction_rows(decoder_rows):
    """Layers for multi-token prediction: one of the decoder's each, and what joins them."""
    ours, hf = PREDICTION_LAYERS, "model.layers.{}."
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
UNUSED_TENSORS = (
    r"rotary_emb\.inv_freq$",
)  # old llama checkpoints: the config gives the frequencies


def is_of_expert(mca: str) -> bool:
    """Whether one of megatron's tensors, by its name in a row, is an expert's."""
    return ".mlp.experts." in mca
