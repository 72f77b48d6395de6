"""Attention: core attention over torch's kernels, and multi-latent attention.

Letters: s sequence of this rank, t tokens of a packed row, b batch, h hidden size, n heads and g
query groups of this rank, d channels of a head. Names of modules are megatron's.
"""

import contextlib
import functools
import inspect

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    mappings,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule

from . import parallel
from .model_fused import rotate, rotated_heads, split_heads
from .model_norms import RMSNorm
from .model_rope import rotary_tables
from .packed_rows import row_layout

# of the norms between two projections: fixed in transformers, whatever rms_norm_eps says
LATENT_EPSILON = 1e-6


# -- core attention ---------------------------------------------------------------------------


class _GatherTokens(torch.autograd.Function):
    """[t / cp, ...] of each context-parallel rank -> [t, ...] in the row's order; backward: this
    rank's part of the sum. order int64 [t]: see RowLayout."""

    @staticmethod
    def forward(ctx, x, group, order):
        ctx.group, ctx.order = group, order
        return mappings._gather_along_first_dim(x, group)[order]

    @staticmethod
    def backward(ctx, grad):
        # each place is written once: an index's own gradient would sort the places, to add
        grad = torch.empty_like(grad).index_copy_(0, ctx.order, grad)
        return mappings._reduce_scatter_along_first_dim(grad, ctx.group), None, None


class FusedSelfAttention(SelfAttention):
    """megatron's self-attention, in which one kernel adds the bias of the linear, splits queries,
    keys and values, norms and rotates."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        # with fewer query groups than ranks megatron gathers heads between the two
        self.splits_at_once = (
            config.num_query_groups >= self.world_size and not config.attention_output_gate
        )
        self.linear_qkv.skip_bias_add = self.splits_at_once
        if isinstance(self.q_layernorm, IdentityOp):  # megatron's word for none
            self.q_layernorm = self.k_layernorm = None
        # norms over all heads wait for other ranks
        self.rotates_at_once = self.splits_at_once and (
            self.q_layernorm is None or isinstance(self.q_layernorm, RMSNorm)
        )
        self.core_attention.rotates = not self.rotates_at_once
        self.packed_seq_params = None  # of the row that runs through

    def forward(self, *args, packed_seq_params=None, **kwargs):
        self.packed_seq_params = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def get_query_key_value_tensors(self, hidden_states, *args, **kwargs):
        """Query [s, b, n, d], key and value [s, b, g, d], normed where the model norms them, and
        rotated unless core attention rotates."""
        if not self.splits_at_once:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        mixed, bias = self.linear_qkv(hidden_states)
        sizes = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        norm, norms = self.q_layernorm, None
        if not self.rotates_at_once:
            query, key, value = split_heads(mixed, bias, *sizes)
            return norm(query), self.k_layernorm(key), value
        if norm is not None:
            norms = norm(), self.k_layernorm(), norm.eps, norm.zero_centered
        tables = self.core_attention.rotary_tables(mixed, self.packed_seq_params)
        return rotated_heads(mixed, bias, *sizes, norms, *tables, self.config.rope_interleave)


def _kernels(query, mask):
    """The order of torch's attention kernels on CUDA, as a context. Without a mask cuDNN's is the
    first: it is the fastest, and torch would pass it over where an older cuDNN than its own is
    loaded. With a mask it is left out: its gradients may be NaN (pytorch issue 196678)."""
    if not query.is_cuda:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if mask is None:
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return sdpa_kernel(order, set_priority=True)


@functools.cache
def _packed_kernel():
    """torch's varlen attention, and whether it can be told of query groups (not in torch 2.11)."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


class CoreAttention(MegatronModule):
    """Rotary embedding and softmax(q k^T * scale) v over torch's attention kernels.

    Has the signature of megatron's DotProductAttention. Causal. Rows are padded on the right: no
    position ever looks at padding, so no mask is built. Packed rows: documents do not see each
    other, and their positions start at 0. Context parallelism: keys and values of the whole row are
    gathered once a layer; the local queries are this rank's zigzag chunks (packed_rows.py). A mask
    that is given, bool [b or 1, 1, s, s] with True meaning hidden, is obeyed. So are the layer's
    sliding window and the cap on scores.

    The rotary tables come from the config, once a length; nothing here waits for the device.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        pg_collection=None,
        **unused,
    ):
        super().__init__(config=config)
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.softmax_scale = softmax_scale
        self.layer_type = config.layer_type(layer_number)
        self.window = config.sliding_window if self.layer_type == "sliding_attention" else None
        self.softcap = config.attn_logit_softcapping
        self.rotates = True  # unless the layer has done so
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        """query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n * d]; packed rows [t, n, d]
        -> [t, 1, n * d]."""
        if attention_bias is not None:
            raise ValueError("the local core attention takes no attention bias")
        if packed_seq_params is not None:
            query, key, value = (x[:, None] for x in (query, key, value))
        layout = self._layout(packed_seq_params, query)
        if self.rotates:
            tables = self.rotary_tables(query, packed_seq_params)
            query, key = rotate(query, key, *tables, self.config.rope_interleave)
        if self.cp_group is not None:
            gathered = self.cp_group, layout.order
            key, value = (_GatherTokens.apply(x, *gathered) for x in (key, value))
        dropout = self.dropout if self.training else 0.0
        # dropout differs between tensor-parallel ranks, since each holds other heads
        with tensor_parallel.get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            if packed_seq_params is not None and self._suits_rows(layout, attention_mask):
                return self._rows(query, key, value, layout, dropout)
            if packed_seq_params is not None and self._suits_varlen(query, dropout):
                return self._varlen(query, key, value, layout)
            return self._segments(query, key, value, layout, attention_mask, dropout)

    def rotary_tables(self, x, packed_seq_params):
        """The tables of this rank's tokens x [s, ...], in its dtype."""
        layout = self._layout(packed_seq_params, x)
        return rotary_tables(self.config, layout, x.dtype, self.layer_type)

    def _suits_rows(self, layout, attention_mask) -> bool:
        """Whether the documents of a packed row can be rows of a batch: they have one length, and
        need no mask. cuDNN's kernel takes these about twice as fast as the varlen one."""
        is_wide = self.window is None or layout.longest <= self.window
        return layout.same_length is not None and attention_mask is None and is_wide

    def _rows(self, query, key, value, layout, dropout):
        """Packed documents of one length, [t, 1, n, d], as rows of a batch -> [t, 1, n * d]."""
        length = layout.same_length
        rows = (x.view(-1, length, *x.shape[2:]).transpose(0, 1) for x in (query, key, value))
        one = row_layout((0, length), 1, 0, query.device)
        return self._segments(*rows, one, None, dropout).transpose(0, 1).flatten(0, 1)[:, None]

    def _suits_varlen(self, query, dropout: float) -> bool:
        """The varlen kernel knows neither float32 nor dropout nor caps, and only sizes of heads
        that are multiples of 8."""
        if not query.is_cuda or query.dtype == torch.float32 or query.shape[-1] % 8:
            return False
        return not dropout and self.softcap is None

    def _layout(self, packed_seq_params, query):
        if packed_seq_params is not None:
            return packed_seq_params.layout
        if self.training and self.config.rows_are_packed:
            raise ValueError(
                "this pipeline stage got no packed_seq_params for packed rows, and would let "
                "documents see each other: give every stage the whole batch"
            )
        cp = self.config.context_parallel_size
        rank = self.cp_group.rank() if self.cp_group is not None else 0
        return row_layout((0, query.shape[0] * cp), cp, rank, query.device)

    def _segments(self, query, key, value, layout, attention_mask, dropout):
        """One call for each run of queries with its keys: documents, or their chunks under context
        parallelism."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out, grouped = [], q.shape[1] != k.shape[1]
        for q0, q1, k0, k1 in layout.segments:
            mask = self._visible(q1 - q0, k1 - k0, attention_mask, q)
            queries, has_groups = q[:, :, q0:q1], grouped
            pair = k[:, :, k0:k1], v[:, :, k0:k1]
            if self.softcap is not None:
                numbers = self.softcap, self.softmax_scale, dropout
                out.append(_capped_attention(queries, *pair, mask, *numbers))
                continue
            if type(mask) is torch.Tensor and q.is_cuda and has_groups:
                # without cuDNN's only the slowest kernel knows both masks and query groups
                times, has_groups = q.shape[1] // k.shape[1], False
                pair = (x.repeat_interleave(times, 1) for x in pair)
            more = dict(is_causal=mask is None, scale=self.softmax_scale, enable_gqa=has_groups)
            with _kernels(q, mask):
                out.append(F.scaled_dot_product_attention(queries, *pair, mask, dropout, **more))
        out = out[0] if len(out) == 1 else torch.cat(out, 2)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _visible(self, num_queries: int, num_keys: int, hidden, query):
        """bool [num_queries, num_keys], True where a query sees a key; the last query sees the last
        key. None: causal, and nothing else, of as many queries as keys."""
        more, window = num_keys - num_queries, self.window
        narrow = window is not None and num_keys > window
        if hidden is not None and not narrow:
            return ~hidden
        if hidden is None and not narrow and self.softcap is None:
            if not more:
                return None
            if query.is_cuda and query.dtype != torch.float32:
                return causal_lower_right(num_queries, num_keys)  # flash attention's own: no mask
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        visible = visible.tril(more)
        if narrow:
            visible = visible.triu(more - window + 1)
        return visible if hidden is None else visible & ~hidden

    def _varlen(self, query, key, value, layout):
        """All documents of a packed row in one kernel on CUDA, without a host synchronisation."""
        kernel, knows_groups = _packed_kernel()
        cu_q, cu_k, places, max_q, max_k = layout.varlen
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        if places is not None:
            k, v = k[places], v[places]
        # the kernel knows one size of a head: multi-latent attention has two
        missing = q.shape[-1] - v.shape[-1]
        if missing:
            v = F.pad(v, (0, missing))
        # 2.11 takes fewer heads of keys than of queries unasked
        grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if knows_groups else {}
        window = (-1 if self.window is None else self.window - 1, 0)
        more = dict(scale=self.softmax_scale, window_size=window, **grouped)
        out = kernel(q, k, v, cu_q, cu_k, max_q, max_k, **more)
        return out[..., : out.shape[-1] - missing].flatten(1)[:, None]


def _capped_attention(q, k, v, visible, cap, scale, dropout):
    """softmax(cap tanh(q k^T scale / cap)) v, the softmax in float32.

    q [b, n, q, d], k and v [b, g, k, d] -> [b, n, q, d].
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5) / cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, dropout) @ v


# -- multi-latent attention -------------------------------------------------------------------


class DuplicatedLinear(torch.nn.Module):
    """A linear without bias whose matrix every tensor-parallel rank has whole.

    x is the whole sequence, or this rank's part under sequence parallelism; then the matrix's
    gradient is a partial sum, and marked so for megatron.
    """

    def __init__(self, config, in_size: int, out_size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(
                out_size, in_size, dtype=config.params_dtype, device=torch.cuda.current_device()
            )
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return F.linear(x, self.weight)


class LatentAttention(MegatronModule):
    """DeepSeek's attention, whose keys and values come from a small latent vector.

    Takes [s, b, h], or [s / tp, b, h] under sequence parallelism, gives (the same, None). Of a head
    c channels stay, and r turn with the position; a value has d channels:

        query [s, b, n, c + r]   linear_q_proj h, or linear_q_up_proj norm(linear_q_down_proj h)
        latent, k_r              linear_kv_down_proj h; k_r [s, b, r] is the same for all heads
        k_c, value               linear_kv_up_proj norm(latent)

    The down projections give what every head needs, so every tensor-parallel rank has them whole.
    megatron's own module takes column-cut ones without Transformer Engine, and gives their turning
    rows the gradient of one rank's heads only; and it sums gradients of its latent norms twice
    without sequence parallelism. Core attention turns the first channels of each head, so the
    turning channels come first here; the order within a head does not matter to q k^T.
    """

    def __init__(self, config, layer_number, pg_collection=None, **unused):
        super().__init__(config=config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        h, heads = config.hidden_size, config.num_attention_heads
        still, turning = config.qk_head_dim, config.qk_pos_emb_head_dim
        self.num_heads = heads // self.tp_group.size()
        self.query_sizes, self.kv_sizes = [still, turning], [still, config.v_head_dim]
        self.down_sizes = [config.kv_lora_rank, turning]
        shared = dict(config=config, bias=False, tp_group=self.tp_group)
        column = dict(shared, init_method=config.init_method, gather_output=False)
        row = dict(shared, init_method=config.output_layer_init_method, skip_bias_add=True)
        rank, query_size = config.q_lora_rank, heads * sum(self.query_sizes)
        if rank is None:
            self.linear_q_proj = ColumnParallelLinear(h, query_size, **column)
        else:
            self.linear_q_down_proj = DuplicatedLinear(config, h, rank)
            self.q_layernorm = RMSNorm(config, rank, LATENT_EPSILON)
            self.linear_q_up_proj = ColumnParallelLinear(rank, query_size, **column)
        rank, kv_size = config.kv_lora_rank, heads * sum(self.kv_sizes)
        self.linear_kv_down_proj = DuplicatedLinear(config, h, sum(self.down_sizes))
        self.kv_layernorm = RMSNorm(config, rank, LATENT_EPSILON)
        self.linear_kv_up_proj = ColumnParallelLinear(rank, kv_size, **column)
        of_core = dict(softmax_scale=config.softmax_scale, pg_collection=pg_collection)
        self.core_attention = CoreAttention(config, layer_number, None, "self", **of_core)
        out_size = heads * config.v_head_dim
        self.linear_proj = RowParallelLinear(out_size, h, input_is_parallel=True, **row)
        self.recomputes_core = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def forward(self, hidden_states, attention_mask=None, packed_seq_params=None, **unused):
        tensors = self._query_key_value(hidden_states)
        if packed_seq_params is not None:
            tensors = tuple(x.squeeze(1) for x in tensors)
        shared = dict(attention_mask=attention_mask, packed_seq_params=packed_seq_params)
        core = functools.partial(self.core_attention, **shared)
        if self.recomputes_core and self.training:
            return self.linear_proj(tensor_parallel.checkpoint(core, False, *tensors))
        return self.linear_proj(core(*tensors))

    def _query_key_value(self, hidden_states):
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
        return torch.cat((q_turning, q_still), -1), torch.cat((k_turning, k_still), -1), value
