"""Rotary positions and attention: multi-head, multi-head latent, or Transformer Engine's.

Local layers do not need Transformer Engine.
"""

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from . import cpu, parallel, parts
from .batch import RowLayout, for_backward, row_layout
from .kernels import rotate, rotated_heads, split_heads
from .mcore import (
    MegatronModule,
    PackedSeqParams,
    ProcessGroupCollection,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    mappings,
    tensor_parallel,
)
from .model_linears import ColumnLinear, RowLinear
from .model_moe import new_weight
from .model_norms import RMSNorm, RMSNormOverHeads, Sharded, head_norms
from .parallel import device
from .tables import CORE_ATTENTIONS, function_of

# ---- rotary positions


class Rope(NamedTuple):
    """Constants of the rotary embedding for one kind of attention layers, such as
    "sliding_attention".

    inv_freq: inverse frequencies [rotary_dim / 2]. factor: multiplies cos and sin.
    interleaved: True if neighbouring channels are rotated as a pair; False if the channels of a
    pair are rotary_dim / 2 apart.
    long: for longrope models, inverse frequencies that replace inv_freq in a micro-batch with a
    document (or a padded row) of more than `limit` tokens. Other models have () and an infinite
    limit."""

    inv_freq: tuple[float, ...]  # inverse frequencies [rotary_dim / 2]
    factor: float  # multiplies cos and sin
    interleaved: bool  # pairs are neighbouring channels, not rotary_dim / 2 apart
    long: tuple[float, ...] = ()
    limit: float = math.inf

    @classmethod
    def of(cls, config: TransformerConfig, layer_type: str = "full_attention") -> "Rope":
        """Compute the rotary constants for a model's layers. config: a McaModelConfig. layer_type:
        the kind of attention in these layers, such as "sliding_attention"; kinds may have different
        frequencies."""
        inv_freq, factor = rope_frequencies(config, layer_type)
        long: tuple[float, ...] = ()
        limit = math.inf
        if config.rope_parameters.get("rope_type") == "longrope":
            limit = config.rope_parameters["original_max_position_embeddings"]
            long = tuple(rope_frequencies(config, layer_type, int(limit) + 1)[0].tolist())
        return cls(tuple(inv_freq.tolist()), factor, config.rope_interleave, long, limit)

    def tables(self, angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn rotation angles into the tables by which queries and keys are rotated -> (cos, sin),
        [..., rotary_dim] each. angles: [..., rotary_dim / 2], one per pair of channels. The tables
        have an entry per channel, and are multiplied by `factor`. They are computed in the angles'
        dtype and returned in `dtype`."""
        if self.interleaved:
            angles = angles.repeat_interleave(2, -1)
        else:
            angles = torch.cat((angles,) * 2, -1)
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


def rope_frequencies(
    config: TransformerConfig, layer_type: str = "full_attention", length: int | None = None
) -> tuple[torch.Tensor, float]:
    """Compute the rotary embedding's inverse frequencies for one kind of attention layers ->
    (float32 [rotary_dim / 2] on this rank's device, factor that multiplies cos and sin).

    layer_type: the kind of attention, such as "sliding_attention". length: number of tokens in the
    sequence, which matters for longrope; None: a short sequence. transformers' own functions
    compute scaled variants such as linear, llama3 and yarn, so that the values equal Hugging
    Face's."""
    scaling = config.rope_parameters
    of_type = {}
    base = config.rotary_base
    if "sliding_attention" in scaling:  # each layer type has its frequencies
        scaling = scaling[layer_type]
        of_type = {"layer_type": layer_type}
        base = scaling["rope_theta"]
    if scaling.get("rope_type", "default") not in ("default", "dynamic"):  # rotary_base has alpha
        from transformers import AutoConfig as HFAutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        hf = HFAutoConfig.for_model(**copy.deepcopy(config.hf_config)).get_text_config()
        if config.full_kv_channels:  # full and sliding layers differ in head size
            hf = hf.per_layer_config[layer_type]
        inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
            hf, torch.device("cpu"), seq_len=length, **of_type
        )
        return inv_freq.float().to(device()), float(factor)
    channels = config.kv_channels
    if layer_type == "full_attention":
        channels = config.full_kv_channels or channels
    dim = int(channels * config.rotary_percent)
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return (1.0 / base**exponent).to(device()), 1.0


@functools.lru_cache(2)
@for_backward
def rotary_tables(
    rope: Rope, layout: RowLayout, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotary tables (cos, sin), [s, 1, 1, rotary_dim] each, for this rank's s tokens. layout: a
    RowLayout, which has the tokens' positions. They are computed in float32 and returned in
    `dtype`. The last two results are cached: a model has at most two kinds of layers, layers of a
    kind share their tables, and tables of earlier rows are freed."""
    frequencies = rope.long if layout.longest > rope.limit else rope.inv_freq
    inv_freq = parallel.to_device(torch.tensor(frequencies), layout.positions.device)
    angles = torch.outer(layout.positions.float(), inv_freq)[:, None, None]
    return rope.tables(angles, dtype)


# ---- attention


class _GatherKeys(torch.autograd.Function):
    """Autograd function that gathers keys and values from all context-parallel ranks in one
    collective: [t / cp, b, g, d] on each rank -> [t, b, g, d] for a row of t tokens and g query
    groups. Values may have another head size d than keys.

    order: int64 [t], indices that put the gathered tokens into the row's order. Backward sums the
    gradients over the ranks and returns this rank's part. Both passes are collective over `group`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        order: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.order = order
        ctx.sizes = key.shape[-1], value.shape[-1]
        both = torch.cat((key, value), -1)
        return mappings._gather_along_first_dim(both, group)[order].split(ctx.sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = torch.cat(grads, -1)
        # each row is written once; the gradient of indexing would sort the indices and add
        grad = torch.empty_like(grad).index_copy_(0, ctx.order, grad)
        grad = mappings._reduce_scatter_along_first_dim(grad, ctx.group)
        return *grad.split(ctx.sizes, -1), None, None


def column_linear(
    config: TransformerConfig,
    in_size: int,
    out_size: int,
    tp_group: torch.distributed.ProcessGroup,
    bias: bool = False,
) -> ColumnLinear:
    """Build a linear layer from in_size to out_size channels, whose outputs stay sharded over the
    tensor-parallel ranks (out_size counts all ranks' channels). The layer adds its bias, and
    returns (output, None)."""
    return ColumnLinear(
        in_size,
        out_size,
        config=config,
        init_method=config.init_method,
        bias=bias,
        gather_output=False,
        skip_bias_add=True,
        tp_group=tp_group,
    )


def row_linear(
    config: TransformerConfig,
    in_size: int,
    tp_group: torch.distributed.ProcessGroup,
    bias: bool = False,
) -> RowLinear:
    """Build attention's output layer, a linear from in_size channels to hidden states. Its inputs
    are sharded over the tensor-parallel ranks (in_size counts all ranks' channels). The layer
    returns (output, bias) without adding the bias."""
    return RowLinear(
        in_size,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=True,
        tp_group=tp_group,
    )


class Attention(MegatronModule):
    """Base class of attention modules. A subclass computes query, key and value; this class runs
    CoreAttention, the output gate if there is one, and the output linear."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        **tables: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the whole attention module: hidden states [s, b, h], or [s / tp, b, h] under sequence
        parallelism -> (output of the same shape, the output layer's bias or None). The bias is not
        added.

        packed_seq_params: describes the documents of packed rows. tables: more keywords for the
        subclass's query_key_value(); SelfAttention takes rope_tables there, (cos, sin) [s, b, 1,
        rotary_dim], to use instead of the tables for the row's positions."""
        *heads, gate = self.query_key_value(hidden_states, packed_seq_params, **tables)
        out = self.core_attention(*heads, packed_seq_params)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return self.linear_proj(out)


class SelfAttention(Attention):
    """Multi-head or grouped-query attention: one matmul for queries, keys and values; norms over
    heads, if configured; rotary embedding; CoreAttention; output linear.

    [s, b, h], or [s / tp, b, h] under sequence parallelism -> (the same shape, bias or None).

    If there are fewer query groups than tensor-parallel ranks, several ranks share a group: the
    projections are all-gathered, and each rank keeps the key and value of its group and a part of
    its queries. Collectives: this all-gather, and the collectives in the linears, RMSNormOverHeads
    and CoreAttention.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection
    ):
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        tp = self.tp_group.size()
        self.head_size = config.kv_channels
        self.groups = max(config.num_query_groups // tp, 1)
        self.ranks_of_group = max(tp // config.num_query_groups, 1)
        heads = config.num_attention_heads
        width = heads * (1 + config.attention_output_gate) + 2 * config.num_query_groups
        self.core_attention = CoreAttention(config, layer_number, pg_collection)
        sizes = config, heads * self.head_size
        self.linear_proj = row_linear(*sizes, self.tp_group, config.add_output_bias)
        sizes = config.hidden_size, width * self.head_size
        self.linear_qkv = column_linear(config, *sizes, self.tp_group, config.add_qkv_bias)
        self.q_layernorm: Any = None
        self.k_layernorm: Any = None
        norms = head_norms(config, RMSNorm)
        if norms is not None:
            of_norm = config, self.head_size, config.layernorm_epsilon
            self.q_layernorm, self.k_layernorm = (norm(*of_norm) for norm in norms)
        self.rope = Rope.of(config, config.layer_type(layer_number))
        if layer_number - 1 in (config.layers_without_rope or ()):
            # zero angles: the same kernel runs, and its rotation changes nothing
            still = (0.0,) * len(self.rope.inv_freq)
            self.rope = Rope(still, 1.0, config.rope_interleave)

    def query_key_value(
        self,
        hidden_states: torch.Tensor,
        packed_seq_params: PackedSeqParams | None,
        rope_tables: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """This rank's (query [s, b, n, d], key and value [s, b, g, d], gate [s, b, n * d] or None).
        Query and key are rotated (by 0 in layers_without_rope), and normed if the model does so;
        with query_scaling_beta the query is also scaled. The sigmoid of the gate multiplies
        attention's output. rope_tables: (cos, sin) to use instead of the tables for the row's
        positions."""
        query, key, value, gate, layout = self._rotated(
            hidden_states, packed_seq_params, rope_tables
        )
        if self.config.qk_norm_after_rope:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        if self.config.query_scaling_beta is not None:
            # as Llama 4 scales queries, by their positions in the documents
            length = self.config.rope_parameters["original_max_position_embeddings"]
            steps = torch.log(1 + torch.floor(layout.positions / length))
            factors = 1 + self.config.query_scaling_beta * steps
            query = query * factors[:, None, None, None].to(query.dtype)
        return query, key, value, gate

    def _rotated(
        self,
        hidden_states: torch.Tensor,
        packed_seq_params: PackedSeqParams | None,
        rope_tables: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[Any, ...]:
        """Project hidden states to this rank's query, key and value, and apply the rotary embedding
        to query and key -> (query, key, value, output gate or None, RowLayout). If the model norms
        query and key, the norms come before the rotation; with qk_norm_after_rope they are left to
        query_key_value(). rope_tables: (cos, sin) to use instead of those for the row's positions.
        """
        mixed, _ = self.linear_qkv(hidden_states)
        if self.ranks_of_group > 1:
            mixed = self._of_group(mixed)
        gate = None
        if self.config.attention_output_gate:
            mixed, gate = self._without_gate(mixed)
        layout = self.core_attention.layout(packed_seq_params, mixed)
        tables = rope_tables or rotary_tables(self.rope, layout, mixed.dtype)
        sizes = self.groups, self.head_size
        norm = None if self.config.qk_norm_after_rope else self.q_layernorm
        is_alone = not isinstance(norm, RMSNormOverHeads)  # the norm needs no other ranks
        if is_alone and self.ranks_of_group == 1:
            norms = None
            if norm is not None:
                norms = norm(), self.k_layernorm(), norm.eps, norm.zero_centered
            interleaved = self.config.rope_interleave
            heads = rotated_heads(mixed, *sizes, norms, *tables, interleaved)
            return *heads, gate, layout
        query, key, value = split_heads(mixed, *sizes)
        of_ranks = query.chunk(self.ranks_of_group, 2)  # one chunk per rank sharing the group
        query = of_ranks[self.tp_group.rank() % self.ranks_of_group]
        if norm is not None:
            query = norm(query)
            key = self.k_layernorm(key)
        rotated = rotate(query, key, *tables, self.config.rope_interleave)
        return *rotated, value, gate, layout

    def _without_gate(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Separate the output gate from linear_qkv's output -> (queries, keys and values, still in
        one tensor; gate [s, b, n * d] for this rank's n query heads). mixed: the output, in which
        the channels of each query head are followed by those of its gate."""
        heads = mixed.unflatten(-1, (self.groups, -1, self.head_size))
        pairs, of_keys = heads.split((heads.shape[-2] - 2, 2), -2)
        mixed = torch.cat((pairs[..., ::2, :], of_keys), -2).flatten(-3)
        gates = pairs[..., 1::2, :].flatten(-3).chunk(self.ranks_of_group, -1)
        return mixed, gates[self.tp_group.rank() % self.ranks_of_group]

    def _of_group(self, mixed: torch.Tensor) -> torch.Tensor:
        """All-gather linear_qkv's output over the tensor-parallel ranks, and return the channels of
        this rank's query group. Used if several ranks share a group. mixed: the output's channels
        on this rank. Collective over the tensor-parallel group."""
        mixed = mappings.all_gather_last_dim_from_tensor_parallel_region(mixed)
        of_groups = mixed.chunk(self.config.num_query_groups, -1)
        return of_groups[self.tp_group.rank() // self.ranks_of_group]


class AttentionOfTwoSizes(Attention):
    """Gemma 4's attention: values are normed, and full and sliding layers have different head
    sizes, and may have different numbers of query groups.

    Inputs and outputs have SelfAttention's shapes. In full layers the keys, before norm and
    rotation, also serve as values, so linear_qk has no rows for values. The norm over values has no
    weight.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection
    ):
        super().__init__(config=config)
        tp_group = pg_collection.tp
        layer_type = config.layer_type(layer_number)
        groups, self.head_size = config.head_sizes(layer_number)
        self.groups = groups // tp_group.size()
        is_full = layer_type == "full_attention"
        self.linear_name = "linear_qk" if is_full else "linear_qkv"
        heads = config.num_attention_heads
        width = (heads + (1 if is_full else 2) * groups) * self.head_size
        linear = column_linear(config, config.hidden_size, width, tp_group)
        self.add_module(self.linear_name, linear)
        self.core_attention = CoreAttention(config, layer_number, pg_collection)
        self.linear_proj = row_linear(config, heads * self.head_size, tp_group)
        sizes = config, self.head_size, config.layernorm_epsilon
        self.q_layernorm = RMSNorm(*sizes)
        self.k_layernorm = RMSNorm(*sizes)
        self.rope = Rope.of(config, layer_type)

    def query_key_value(
        self, hidden_states: torch.Tensor, packed_seq_params: PackedSeqParams | None
    ) -> tuple[Any, ...]:
        """This rank's (query [s, b, n, d], key and value [s, b, g, d], None for the gate). All are
        normed; query and key are rotated."""
        mixed, _ = self.get_submodule(self.linear_name)(hidden_states)
        heads = mixed.unflatten(-1, (self.groups, -1, self.head_size))
        if self.linear_name == "linear_qk":
            heads = torch.cat((heads, heads[:, :, :, -1:]), 3)
        query = self.q_layernorm(heads[:, :, :, :-2].flatten(2, 3))
        key = self.k_layernorm(heads[:, :, :, -2])
        value = heads[:, :, :, -1].float()
        value = F.rms_norm(value, value.shape[-1:], eps=self.config.layernorm_epsilon)
        layout = self.core_attention.layout(packed_seq_params, mixed)
        tables = rotary_tables(self.rope, layout, mixed.dtype)
        return *rotate(query, key, *tables), value.to(mixed.dtype), None


def sdpa_order(query: torch.Tensor, mask: Any) -> Any:
    """Context manager that sets the order in which torch's scaled_dot_product_attention tries its
    kernels on CUDA. For a query on the CPU it does nothing. mask: the call's mask, or None.

    Without a mask, cuDNN comes first; torch by itself would skip cuDNN if a version older than
    torch's is loaded. With a mask, cuDNN is left out, because its gradients may be NaN (pytorch
    issue 196678); and so it is in torch's deterministic mode, because cuDNN has no deterministic
    kernel."""
    if not query.is_cuda:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if mask is None and not torch.are_deterministic_algorithms_enabled():
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return sdpa_kernel(order, set_priority=True)


@functools.cache
def _packed_kernel() -> tuple[Callable[..., Any], bool]:
    """Import torch's CUDA kernel for packed rows -> (the function varlen_attn, True if it takes the
    argument enable_gqa; that of torch 2.11 does not). Cached."""
    with cpu.compiling_later():
        from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def recomputes(config: TransformerConfig, module: str) -> bool:
    """True if the config selects one kind of module for recomputation in the backward pass:
    recompute_granularity is "selective", and recompute_modules has the kind's name. module: this
    name, such as "core_attn" or "mlp"."""
    return config.recompute_granularity == "selective" and module in config.recompute_modules


class RowModule(MegatronModule):
    """Base class of softmax and linear attention, which keep the documents of a packed row apart.
    Subclasses set cp_group, the context-parallel group."""

    def layout(self, packed_seq_params: PackedSeqParams | None, x: torch.Tensor) -> RowLayout:
        """The RowLayout (documents and positions of a row) for this rank's tokens. x: any tensor
        [s, ...] of these tokens. The documents come from packed_seq_params; if that is None, each
        row is one document.

        ValueError if training on packed rows gets no packed_seq_params: documents would see each
        other."""
        if packed_seq_params is not None:
            return packed_seq_params.layout
        if self.training and self.config.rows_are_packed:
            raise ValueError(
                "this pipeline stage got no packed_seq_params for packed rows, and would let "
                "documents see each other: give every stage the whole batch"
            )
        cp = self.cp_group.size()
        return row_layout((0, len(x) * cp), cp, self.cp_group.rank(), x.device)


def whole_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float | None,
    dropout: float,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(cap tanh(q k^T scale / cap)) v with all scores in memory; the softmax is computed in
    float32.

    q [b, n, q, d], k and v [b, g, k, d], visible bool [q, k], True if a query sees a key -> [b, n,
    q, d].
    scale: None means d ** -0.5.
    dropout: rate for the softmax's results.
    cap: None leaves the scores uncapped.
    sinks: [n], one more score per head in each query's softmax, without a value.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : k.shape[-2]].to(q.dtype)
    return F.dropout(weights, dropout) @ v


class _NoCudnn:
    """Replaces part_cudnn.py if that file was removed: no tensor suits a cuDNN kernel."""

    @staticmethod
    def suits_cudnn(*heads: torch.Tensor) -> bool:
        return False

    suits_frontend = suits_cudnn


def _cudnn() -> Any:
    """The module part_cudnn with cuDNN's attention; _NoCudnn if its file was removed."""
    return parts.module_of("part_cudnn") or _NoCudnn


class CoreAttention(Sharded, RowModule):
    """softmax(q k^T * scale) v, causal, by fused kernels where they suit.

    Rows are padded on the right, so causality alone hides padding, and there is no padding mask. In
    packed rows, documents do not see each other. Under context parallelism, keys and values of the
    whole row are gathered in each forward pass, and queries are this rank's zigzag chunks
    (batch.py). Sliding windows, a cap on scores and attention sinks [n] (CORE_ATTENTIONS) are
    supported.
    """

    axes: ClassVar = {"sinks": 0}

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection
    ):
        super().__init__(config=config)
        self.cp_group = pg_collection.cp
        self.softmax_scale = config.softmax_scale
        slides = config.layer_type(layer_number) == "sliding_attention"
        self.window = config.sliding_window if slides else None
        self.softcap = config.attn_logit_softcapping
        self.dropout = config.attention_dropout
        self.is_recomputed = recomputes(config, "core_attn")
        self.sinks = None
        if config.attention_sinks:
            self.sinks = new_weight(config, config.num_attention_heads // pg_collection.tp.size())

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """This rank's query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n * d]; in latent
        attention values, and so results, may have another d. Packed rows have b = 1. Collective
        over the context-parallel group."""
        layout = self.layout(packed_seq_params, query)
        run = functools.partial(self._attend, layout, packed_seq_params is not None)
        if self.is_recomputed and self.training:
            return tensor_parallel.checkpoint(run, False, query, key, value)
        return run(query, key, value)

    @property
    def needs_scores(self) -> bool:
        """True if this layer caps its attention scores or has attention sinks; torch's
        scaled_dot_product_attention can do neither."""
        return self.softcap is not None or self.sinks is not None

    def _attend(
        self,
        layout: RowLayout,
        is_packed: bool,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Gather keys and values over context-parallel ranks, choose a kernel, and compute the
        attention of this rank's queries -> [s, b, n * d]. layout: the row's documents. is_packed:
        True for packed rows."""
        if self.cp_group.size() > 1:
            key, value = _GatherKeys.apply(key, value, self.cp_group, layout.order)
        dropout = self.dropout if self.training else 0.0
        # tensor-parallel ranks have different heads, so they need different dropout
        with tensor_parallel.get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            if is_packed and self._suits_rows(layout):
                return self._rows(query, key, value, layout, dropout)
            has_kernel = is_packed or self.sinks is not None
            if has_kernel and self._suits_varlen(query, dropout):
                rows = zip(*(x.split(1, 1) for x in (query, key, value)), strict=True)
                out = [self._varlen(*row, layout) for row in rows]
                return out[0] if len(out) == 1 else torch.cat(out, 1)
            if not dropout and self._suits_parts(layout, query, key, value):
                scale = self.softmax_scale
                return _cudnn().SegmentAttention.apply(query, key, value, layout.segments, scale)
            return self._segments(query, key, value, layout, dropout)

    def _suits_parts(
        self, layout: RowLayout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> bool:
        """True if cuDNN can compute this rank's attention in one SegmentAttention call under
        context parallelism. False without context parallelism, with a cap on scores or attention
        sinks, if a document is longer than the layer's sliding window, and for tensors that
        part_cudnn.suits_cudnn() refuses. layout: the row's documents."""
        is_wide = self.window is None or layout.longest <= self.window
        is_plain = is_wide and not self.needs_scores and self.cp_group.size() > 1
        heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return is_plain and _cudnn().suits_cudnn(*heads)

    def _suits_rows(self, layout: RowLayout) -> bool:
        """True if the packed documents can be computed as rows of a batch: all have one length,
        none is longer than a sliding window, and there are no sinks and no context parallelism.
        cuDNN's kernel for batches is faster than the varlen kernel."""
        is_wide = self.window is None or layout.longest <= self.window
        return layout.same_length is not None and is_wide and self.sinks is None

    def _rows(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: RowLayout,
        dropout: float,
    ) -> torch.Tensor:
        """Attention of packed documents that all have one length (layout.same_length), computed as
        rows of a batch. query [t, 1, n, d], key and value [t, 1, g, d] -> [t, 1, n * d], for the t
        tokens of all documents. dropout: rate."""
        length = layout.same_length
        rows = (x.view(-1, length, *x.shape[2:]).transpose(0, 1) for x in (query, key, value))
        one = row_layout((0, length), 1, 0, query.device)
        return self._segments(*rows, one, dropout).transpose(0, 1).flatten(0, 1)[:, None]

    def _suits_varlen(self, query: torch.Tensor, dropout: float) -> bool:
        """True if torch's varlen kernel can be used: on CUDA, not float32, no dropout, no cap on
        scores, and a head size up to 256 and divisible by 8."""
        suits_dtype = query.is_cuda and query.dtype != torch.float32
        suits_size = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
        return suits_dtype and not dropout and self.softcap is None and suits_size

    def _segments(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: RowLayout,
        dropout: float,
    ) -> torch.Tensor:
        """Attention with one call per segment -> [s, b, n * d]. A segment is a range of this
        rank's queries with the keys that they see: a document, or under context parallelism a chunk
        of a document. query: this rank's tokens. key, value: the whole row's. dropout: rate."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = []
        for q0, q1, k0, k1 in layout.segments:
            mask = self._visible(q1 - q0, k1 - k0, q)
            segment = q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1]
            out.append(self._attention(*segment, mask, dropout))
        out = out[0] if len(out) == 1 else torch.cat(out, 2)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, dropout: float
    ) -> torch.Tensor:
        """Compute attention for one segment in one call: query q [b, n, q, d], key k and value v
        [b, g, k, d] for n query heads and g query groups -> [b, n, q, d]. mask: from _visible(),
        which may return None for a plain causal mask. dropout: rate."""
        if self.needs_scores:
            scale = self.softmax_scale
            return whole_scores(q, k, v, mask, scale, dropout, self.softcap, self.sinks)
        if mask is None and not dropout and _cudnn().suits_cudnn(q, k, v):
            # sdpa_order's context would cost half of the call's host time
            return _cudnn().causal_by_cudnn(q, k, v, self.softmax_scale)
        times = q.shape[1] // k.shape[1]
        if type(mask) is torch.Tensor and q.is_cuda and times > 1:
            # beside cuDNN's, only the slowest kernel supports both masks and query groups
            k, v = (x.repeat_interleave(times, 1) for x in (k, v))
            times = 1
        keys = dict(is_causal=mask is None, scale=self.softmax_scale, enable_gqa=times > 1)
        with sdpa_order(q, mask):
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, **keys)

    def _visible(self, num_queries: int, num_keys: int, query: torch.Tensor) -> Any:
        """Make the causal mask of one segment: bool [num_queries, num_keys], True if a query sees a
        key. The last query sees the last key, and a sliding window hides old keys. query: tells
        device and dtype.

        Unless needs_scores is True, a cheaper result may replace the tensor: None if torch's
        is_causal means the same mask, torch's causal_lower_right if the flash kernel can do without
        a mask."""
        more = num_keys - num_queries
        is_narrow = self.window is not None and num_keys > self.window
        if not is_narrow and not self.needs_scores:
            if more == 0:
                return None
            if query.is_cuda and query.dtype != torch.float32:
                # flash attention does this without a mask; imported here because the module loads
                # torch's compiler
                from torch.nn.attention.bias import causal_lower_right

                return causal_lower_right(num_queries, num_keys)
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        visible = visible.tril(more)
        return visible.triu(more - self.window + 1) if is_narrow else visible

    def _varlen(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: RowLayout
    ) -> torch.Tensor:
        """Attention for one row, packed or not, in one call of a CUDA kernel: this rank's query [s,
        1, n, d], key and value [t, 1, g, d] of the whole row -> [s, 1, n * d]. The call does not
        wait for the GPU. layout: the row's documents."""
        kernel, takes_groups = _packed_kernel()
        cu_q, cu_k, places, max_q, max_k = layout.varlen
        q = query[:, 0]
        k = key[:, 0]
        v = value[:, 0]
        if places is not None:
            k = k[places]
            v = v[places]
        elif self.sinks is None and _cudnn().suits_frontend(q):
            out = _cudnn().packed_by_cudnn(q, k, v, layout, self.softmax_scale, self.window)
            return out.flatten(1)[:, None]
        # the kernel needs equal head sizes; latent attention has narrower values
        missing = q.shape[-1] - v.shape[-1]
        if missing:
            v = F.pad(v, (0, missing))
        if self.sinks is not None:
            rows = cu_q, cu_k, max_q, max_k, self.softmax_scale, self.window
            flash = function_of(CORE_ATTENTIONS["sinks"])
            return flash.apply(q, k, v, self.sinks, *rows).flatten(1)[:, None]
        keys = dict(scale=self.softmax_scale, window_size=((self.window or 0) - 1, 0))  # -1: all
        if takes_groups:  # torch 2.11 needs no argument for query groups
            keys["enable_gqa"] = q.shape[1] != k.shape[1]
        out = kernel(q, k, v, cu_q, cu_k, max_q, max_k, **keys)
        return out[..., : out.shape[-1] - missing].flatten(1)[:, None]


# ---- multi-latent attention

# transformers uses this epsilon for latent norms, whatever the value of rms_norm_eps
LATENT_EPSILON = 1e-6


class DuplicatedLinear(torch.nn.Module):
    """A linear without bias whose matrix is replicated on every tensor-parallel rank.

    x: [s, b, in], or [s / tp, b, in] under sequence parallelism. A rank's gradient of the matrix
    then covers only its tokens; the matrix is marked so that megatron sums these gradients.
    """

    def __init__(self, config: TransformerConfig, in_size: int, out_size: int):
        super().__init__()
        self.weight = new_weight(config, out_size, in_size)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class LatentAttention(Attention):
    """DeepSeek's multi-head latent attention: keys and values come from a small latent vector.

    [s, b, h], or [s / tp, b, h] under sequence parallelism -> (the same shape, None). In a query or
    key head, c channels carry no position and r are rotated; a value head has d channels:

        query [s, b, n, c + r]   linear_q_proj h, or linear_q_up_proj norm(linear_q_down_proj h)
        latent, k_r              linear_kv_down_proj h; all heads share k_r [s, b, r]
        k_c, value               linear_kv_up_proj norm(latent)

    Every head needs the down projections, so they are replicated on the tensor-parallel ranks.
    megatron's module without Transformer Engine, which shards their columns, is not used. The
    rotated channels come first in each head, because the rotation works on the first channels; the
    order within a head does not matter to q k^T.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection
    ):
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        h = config.hidden_size
        heads = config.num_attention_heads
        turning = config.qk_pos_emb_head_dim
        latent = config.kv_lora_rank
        self.num_heads = heads // self.tp_group.size()
        self.query_sizes = [config.qk_head_dim, turning]
        self.kv_sizes = [config.qk_head_dim, config.v_head_dim]
        self.down_sizes = [latent, turning]
        q_latent = config.q_lora_rank
        query_size = heads * sum(self.query_sizes)
        if q_latent is None:
            self.linear_q_proj = column_linear(config, h, query_size, self.tp_group)
        else:
            self.linear_q_down_proj = DuplicatedLinear(config, h, q_latent)
            self.q_layernorm = RMSNorm(config, q_latent, LATENT_EPSILON)
            self.linear_q_up_proj = column_linear(config, q_latent, query_size, self.tp_group)
        self.linear_kv_down_proj = DuplicatedLinear(config, h, sum(self.down_sizes))
        self.kv_layernorm = RMSNorm(config, latent, LATENT_EPSILON)
        kv_size = heads * sum(self.kv_sizes)
        self.linear_kv_up_proj = column_linear(config, latent, kv_size, self.tp_group)
        self.core_attention = CoreAttention(config, layer_number, pg_collection)
        self.linear_proj = row_linear(config, heads * config.v_head_dim, self.tp_group)
        self.rope = Rope.of(config)

    def query_key_value(
        self, hidden_states: torch.Tensor, packed_seq_params: PackedSeqParams | None
    ) -> tuple[Any, ...]:
        """This rank's (query and key [s, b, n, r + c], value [s, b, n, d], None for the gate). The
        first r channels of query and key are rotated."""
        if self.config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            q_latent = self.linear_q_down_proj(hidden_states)
            query, _ = self.linear_q_up_proj(self.q_layernorm(q_latent))
        latent, k_turning = self.linear_kv_down_proj(hidden_states).split(self.down_sizes, -1)
        if self.config.sequence_parallel:
            k_turning = gather_from_sequence_parallel_region(
                k_turning.contiguous(), tensor_parallel_output_grad=True, group=self.tp_group
            )
        elif self.tp_group.size() > 1:
            k_turning = parallel.sum_gradients(k_turning, self.tp_group)
        kv, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        q_still, q_turning = query.unflatten(-1, (self.num_heads, -1)).split(self.query_sizes, -1)
        k_still, value = kv.unflatten(-1, (self.num_heads, -1)).split(self.kv_sizes, -1)
        k_turning = k_turning[:, :, None].expand(-1, -1, self.num_heads, -1)
        query = torch.cat((q_turning, q_still), -1)
        key = torch.cat((k_turning, k_still), -1)
        layout = self.core_attention.layout(packed_seq_params, query)
        tables = rotary_tables(self.rope, layout, query.dtype)
        return *rotate(query, key, *tables, self.config.rope_interleave), value, None


def build_attention(
    config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection
) -> MegatronModule:
    """Build the attention of one layer: LatentAttention for multi-latent models,
    AttentionOfTwoSizes for Gemma 4, otherwise SelfAttention if transformer_impl is "local", and
    Transformer Engine's attention if not. layer_number: from 1."""
    if config.multi_latent_attention:
        return LatentAttention(config, layer_number, pg_collection)
    if config.full_kv_channels:
        return AttentionOfTwoSizes(config, layer_number, pg_collection)
    if config.transformer_impl == "local":
        return SelfAttention(config, layer_number, pg_collection)
    build = function_of("part_transformer_engine:attention")
    return build(config, layer_number, pg_collection)
