"""The parts of layers, and megatron's specs of them: "local" layers of this file, or Transformer
Engine's.

Local layers need torch alone. model_config.py is the only other file about TE.

Multi-token prediction is extra layers in a row; layer k predicts the token k + 1 ahead.

    g_0 = the decoder's output
    g_k = norm(layer_k(eh_proj [enorm(embedding of the token k places ahead); hnorm(g_{k-1})]))

They share the embedding and the output layer of the model, on the last pipeline stage, with a copy
of the embedding. With N trained tokens of the main loss, in the whole step or the micro-batch
according to calculate_per_token_loss, the objective is (sum of main losses +
mtp_loss_scaling_factor / layers * sum of the layers' losses) / N, as in the DeepSeek-V3 report.
megatron's module divides by other counts in its two modes, and moves tokens between ranks to look
ahead; here a batch includes the following tokens (batch.Targets).
"""

import contextlib
import copy
import functools
import inspect
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce
from torch.nn.attention.bias import causal_lower_right

from . import parallel
from .batch import RowLayout, row_layout
from .kernels import compiles, norm_beside, rms_norm, rotate, rotated_heads, split_heads, swiglu
from .mcore import (
    ColumnParallelLinear,
    IdentityOp,
    LayerType,
    MegatronModule,
    ModuleSpec,
    MultiTokenPredictionBlockSubmodules,
    RowParallelLinear,
    SelfAttention,
    TENorm,
    TransformerBlockSubmodules,
    TransformerLayer,
    build_module,
    gather_from_sequence_parallel_region,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    make_sharded_tensors_for_checkpoint,
    mappings,
    mtp_on_this_rank,
    parallel_state,
    tensor_parallel,
)
from .model_moe import Experts, Router
from .parallel import device

# ---- rotary positions


class Rope(NamedTuple):
    """Rotary embedding of a type of layers."""

    inv_freq: tuple[float, ...]  # inverse frequencies [rotary_dim / 2]
    factor: float  # on cos and sin
    interleaved: bool  # neighbouring channels turn together

    @classmethod
    def of(cls, config, layer_type: str = "full_attention") -> "Rope":
        """Compute it from a McaModelConfig."""
        inv_freq, factor = rope_frequencies(config, layer_type)
        return cls(tuple(inv_freq.tolist()), factor, config.rope_interleave)


def rope_frequencies(config, layer_type: str = "full_attention") -> tuple[torch.Tensor, float]:
    """(inverse frequencies float32 [rotary_dim / 2] on this rank's device, factor on cos and sin)
    of layers of a type.

    From transformers' functions, so that linear, llama3 and yarn scaling are Hugging Face's to the
    bit.
    """
    scaling = (config.hf_config or {}).get("rope_parameters") or {}
    of_type = {}
    base = config.rotary_base
    if config.has_local_rope:
        scaling = scaling[layer_type]
        of_type = {"layer_type": layer_type}
        base = scaling["rope_theta"]
    if scaling.get("rope_type", "default") != "default":
        from transformers import AutoConfig as HFAutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        hf = HFAutoConfig.for_model(**copy.deepcopy(config.hf_config))
        inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
            hf, torch.device("cpu"), **of_type
        )
        return inv_freq.float().to(device()), float(factor)
    dim = int(config.kv_channels * config.rotary_percent)
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return (1.0 / base**exponent).to(device()), 1.0


@functools.lru_cache(8)
def _on_device(inv_freq: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(inv_freq, device=device)  # waits for a GPU, once


@functools.lru_cache(8)  # the layers of a model share the tables of a row
def rotary_tables(
    rope: Rope, layout: RowLayout, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [t, 1, 1, rotary_dim] for the positions of a row, computed in float32, in
    dtype."""
    inv_freq = _on_device(rope.inv_freq, layout.positions.device)
    angles = torch.outer(layout.positions.float(), inv_freq)[:, None, None]
    angles = angles.repeat_interleave(2, -1) if rope.interleaved else torch.cat((angles,) * 2, -1)
    return (angles.cos() * rope.factor).to(dtype), (angles.sin() * rope.factor).to(dtype)


# ---- norms


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension, the mean square in float32, as in Hugging Face's
    decoders. Weights around zero (Gemma's) get 1 added, and multiply before the rounding.

    Under sequence parallelism the weight's gradient is a partial sum, and marked so for megatron.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self._beside = None, None  # argument and result of the next call

    def forward(self, x=None, beside: bool = False):
        """x normed. Without x the weight, for a kernel that includes the norm: a call, since the
        hooks of overlap_param_gather wait for the weight in one. beside: x itself, for the residual
        and as argument of the next call, which returns its norm: kernels.norm_beside."""
        if x is None:
            return self.weight
        if beside:
            normed, x = norm_beside(x, self.weight, self.eps, self.zero_centered)
            self._beside = x, normed
            return x
        (given, normed), self._beside = self._beside, (None, None)
        if x is given:
            return normed
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


class RMSNormOverHeads(torch.nn.Module):
    """RMS norm of queries or keys over all their heads together.

    x [s, b, heads of this rank, d], weight [heads * d]. Tensor parallelism cuts the weight with the
    heads; the mean square is taken over all ranks. Collective: one all-reduce each way.
    """

    def __init__(self, config, hidden_size: int, heads: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        size = heads * hidden_size // self.tp_group.size()
        self.weight = torch.nn.Parameter(
            torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.eps = eps
        self.width = heads * hidden_size

    def forward(self, x):
        flat = x.flatten(-2).float()
        squares = flat.square().sum(-1, keepdim=True)
        if self.tp_group.size() > 1:
            squares = all_reduce(squares, group=self.tp_group)  # sums gradients too
        normed = flat * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * normed.to(x.dtype)).view(x.shape)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


# ---- attention


class _GatherTokens(torch.autograd.Function):
    """Gather [t / cp, ...] of each context-parallel rank to [t, ...] in the row's order; backward:
    this rank's part of the sum. order int64 [t]: see RowLayout. Collectives in both passes."""

    @staticmethod
    def forward(ctx, x, group, order):
        ctx.group = group
        ctx.order = order
        return mappings._gather_along_first_dim(x, group)[order]

    @staticmethod
    def backward(ctx, grad):
        # each place is written once: the gradient of an index would sort the places, to add
        grad = torch.empty_like(grad).index_copy_(0, ctx.order, grad)
        return mappings._reduce_scatter_along_first_dim(grad, ctx.group), None, None


class FusedSelfAttention(SelfAttention):
    """megatron's self-attention with one kernel for the bias of the linear, the split into queries,
    keys and values, norms and rotation."""

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
        self.packed_seq_params = None  # of the current row

    def forward(self, *args, packed_seq_params=None, **kwargs):
        self.packed_seq_params = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def get_query_key_value_tensors(self, hidden_states, *args, **kwargs):
        """Query [s, b, n, d], key and value [s, b, g, d], normed by the model's norms, and rotated
        unless core attention rotates."""
        if not self.splits_at_once:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        mixed, bias = self.linear_qkv(hidden_states)
        sizes = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        norm = self.q_layernorm
        if not self.rotates_at_once:
            query, key, value = split_heads(mixed, bias, *sizes)
            return norm(query), self.k_layernorm(key), value
        norms = None
        if norm is not None:
            norms = norm(), self.k_layernorm(), norm.eps, norm.zero_centered
        tables = self.core_attention.rotary_tables(mixed, self.packed_seq_params)
        return rotated_heads(mixed, bias, *sizes, norms, *tables, self.config.rope_interleave)


def sdpa_order(query, mask):
    """The order of torch's attention kernels on CUDA, as a context. Without a mask cuDNN's is the
    first: it is the fastest, and torch would pass it over if an older cuDNN than torch's is loaded.
    With a mask it is left out: its gradients may be NaN (pytorch issue 196678)."""
    if not query.is_cuda:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if mask is None:
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return sdpa_kernel(order, set_priority=True)


@functools.cache
def _packed_kernel():
    """(torch's varlen attention, True if it takes enable_gqa: not in torch 2.11)."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


class CoreAttention(MegatronModule):
    """Rotary embedding and softmax(q k^T * scale) v over torch's attention kernels.

    Has the signature of megatron's DotProductAttention. Causal. Rows are padded on the right: no
    position ever looks at padding, so no mask is built. Packed rows: documents do not see each
    other, and their positions start at 0. Context parallelism: keys and values of the whole row are
    gathered once a layer; the local queries are this rank's zigzag chunks (batch.py). An
    attention_mask, bool [b or 1, 1, s, s] with True meaning hidden, counts as well. So do the
    layer's sliding window and the cap on scores.

    The layers of a model share the rotary tables of a row; nothing here waits for the device.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None,
        softmax_scale=None, pg_collection=None, **unused,
    ):  # fmt: skip
        super().__init__(config=config)
        self.cp_group = None
        if config.context_parallel_size > 1:
            self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale
        layer_type = config.layer_type(layer_number)
        self.window = config.sliding_window if layer_type == "sliding_attention" else None
        self.rope = Rope.of(config, layer_type)
        self.softcap = config.attn_logit_softcapping
        self.rotates = True  # unless the layer has done so
        if attention_dropout is None:
            attention_dropout = config.attention_dropout
        self.dropout = attention_dropout

    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None,
        packed_seq_params=None,
    ):  # fmt: skip
        """query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n * d]; packed rows [t, n, d]
        -> [t, 1, n * d]."""
        if attention_bias is not None:
            raise ValueError("the local core attention takes no attention bias")
        is_packed = packed_seq_params is not None
        if is_packed:
            query, key, value = (x[:, None] for x in (query, key, value))
        layout = self._layout(packed_seq_params, query)
        if self.rotates:
            tables = self.rotary_tables(query, packed_seq_params)
            query, key = rotate(query, key, *tables, self.config.rope_interleave)
        if self.cp_group is not None:
            key, value = (_GatherTokens.apply(x, self.cp_group, layout.order) for x in (key, value))
        dropout = self.dropout if self.training else 0.0
        # dropout differs between tensor-parallel ranks: each has other heads
        with tensor_parallel.get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            if is_packed and self._suits_rows(layout, attention_mask):
                return self._rows(query, key, value, layout, dropout)
            if is_packed and self._suits_varlen(query, dropout):
                return self._varlen(query, key, value, layout)
            return self._segments(query, key, value, layout, attention_mask, dropout)

    def rotary_tables(self, x, packed_seq_params):
        """The tables of this rank's tokens x [s, ...], in its dtype."""
        layout = self._layout(packed_seq_params, x)
        return rotary_tables(self.rope, layout, x.dtype)

    def _suits_rows(self, layout, attention_mask) -> bool:
        """True if the documents of a packed row can be rows of a batch: they have one length, and
        need no mask. cuDNN's kernel is about twice as fast on these as the varlen one."""
        is_wide = self.window is None or layout.longest <= self.window
        return layout.same_length is not None and attention_mask is None and is_wide

    def _rows(self, query, key, value, layout, dropout):
        """Packed documents of one length, [t, 1, n, d], as rows of a batch -> [t, 1, n * d]."""
        length = layout.same_length
        rows = (x.view(-1, length, *x.shape[2:]).transpose(0, 1) for x in (query, key, value))
        one = row_layout((0, length), 1, 0, query.device)
        return self._segments(*rows, one, None, dropout).transpose(0, 1).flatten(0, 1)[:, None]

    def _suits_varlen(self, query, dropout: float) -> bool:
        """True if the varlen kernel takes them: it supports neither float32 nor dropout nor caps,
        and only multiples of 8 as sizes of heads."""
        suits_dtype = query.is_cuda and query.dtype != torch.float32
        return suits_dtype and not dropout and self.softcap is None and query.shape[-1] % 8 == 0

    def _layout(self, packed_seq_params, query):
        if packed_seq_params is not None:
            return packed_seq_params.layout
        if self.training and self.config.rows_are_packed:
            raise ValueError(
                "this pipeline stage got no packed_seq_params for packed rows, and would let "
                "documents see each other: give every stage the whole batch"
            )
        cp = self.config.context_parallel_size
        rank = 0 if self.cp_group is None else self.cp_group.rank()
        return row_layout((0, len(query) * cp), cp, rank, query.device)

    def _segments(self, query, key, value, layout, attention_mask, dropout):
        """One call for each run of queries with its keys: documents, or their chunks under context
        parallelism."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = []
        for q0, q1, k0, k1 in layout.segments:
            mask = self._visible(q1 - q0, k1 - k0, attention_mask, q)
            segment = q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1]
            out.append(self._attention(*segment, mask, dropout))
        out = out[0] if len(out) == 1 else torch.cat(out, 2)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attention(self, q, k, v, mask, dropout):
        """q [b, n, q, d], k and v [b, g, k, d] -> [b, n, q, d]. mask: see _visible."""
        if self.softcap is not None:
            return _capped_attention(q, k, v, mask, self.softcap, self.softmax_scale, dropout)
        times = q.shape[1] // k.shape[1]
        if type(mask) is torch.Tensor and q.is_cuda and times > 1:
            # without cuDNN's only the slowest kernel supports both masks and query groups
            k, v = (x.repeat_interleave(times, 1) for x in (k, v))
            times = 1
        keys = dict(is_causal=mask is None, scale=self.softmax_scale, enable_gqa=times > 1)
        with sdpa_order(q, mask):
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, **keys)

    def _visible(self, num_queries: int, num_keys: int, hidden, query):
        """bool [num_queries, num_keys], True if a query sees a key; the last query sees the last
        key. None: causal, and nothing else, of as many queries as keys."""
        more = num_keys - num_queries
        window = self.window
        narrow = window is not None and num_keys > window
        if hidden is not None and not narrow:
            return ~hidden
        is_causal = not narrow and self.softcap is None
        if is_causal and not more:
            return None
        if is_causal and query.is_cuda and query.dtype != torch.float32:
            return causal_lower_right(num_queries, num_keys)  # a case of flash attention: no mask
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        visible = visible.tril(more)
        if narrow:
            visible = visible.triu(more - window + 1)
        if hidden is not None:
            visible = visible & ~hidden
        return visible

    def _varlen(self, query, key, value, layout):
        """All documents of a packed row in one kernel on CUDA, without a host synchronisation."""
        kernel, takes_groups = _packed_kernel()
        cu_q, cu_k, places, max_q, max_k = layout.varlen
        q = query[:, 0]
        k = key[:, 0]
        v = value[:, 0]
        if places is not None:
            k = k[places]
            v = v[places]
        # the kernel takes one size of a head: multi-latent attention has two
        missing = q.shape[-1] - v.shape[-1]
        if missing:
            v = F.pad(v, (0, missing))
        keys = dict(scale=self.softmax_scale, window_size=((self.window or 0) - 1, 0))  # -1: all
        if takes_groups:  # 2.11 takes fewer heads of keys than of queries without it
            keys["enable_gqa"] = q.shape[1] != k.shape[1]
        out = kernel(q, k, v, cu_q, cu_k, max_q, max_k, **keys)
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


# ---- multi-latent attention

# of the norms between two projections: fixed in transformers, whatever the value of rms_norm_eps
LATENT_EPSILON = 1e-6


class DuplicatedLinear(torch.nn.Module):
    """A linear without bias, its matrix whole on every tensor-parallel rank.

    x is the whole sequence, or this rank's part under sequence parallelism; then the matrix's
    gradient is a partial sum, and marked so for megatron.
    """

    def __init__(self, config, in_size: int, out_size: int):
        super().__init__()
        on_device = dict(dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = torch.nn.Parameter(torch.empty(out_size, in_size, **on_device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return F.linear(x, self.weight)


class LatentAttention(MegatronModule):
    """DeepSeek's attention: keys and values come from a small latent vector.

    Takes [s, b, h], or [s / tp, b, h] under sequence parallelism, gives (the same, None). Of a head
    c channels stay, and r turn with the position; a value has d channels:

        query [s, b, n, c + r]   linear_q_proj h, or linear_q_up_proj norm(linear_q_down_proj h)
        latent, k_r              linear_kv_down_proj h; k_r [s, b, r] is the same for all heads
        k_c, value               linear_kv_up_proj norm(latent)

    Every head needs the down projections, so every tensor-parallel rank has them whole. megatron's
    module cuts their columns without Transformer Engine, and gives their turning rows the gradient
    of one rank's heads only; and it sums gradients of its latent norms twice without sequence
    parallelism. Core attention turns the first channels of each head, so the turning channels come
    first here; the order within a head does not matter to q k^T.
    """

    def __init__(self, config, layer_number, pg_collection=None, **unused):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        h = config.hidden_size
        heads = config.num_attention_heads
        turning = config.qk_pos_emb_head_dim
        latent = config.kv_lora_rank
        self.num_heads = heads // self.tp_group.size()
        self.query_sizes = [config.qk_head_dim, turning]
        self.kv_sizes = [config.qk_head_dim, config.v_head_dim]
        self.down_sizes = [latent, turning]
        shared = dict(config=config, bias=False, tp_group=self.tp_group)
        column = dict(shared, init_method=config.init_method, gather_output=False)
        row = dict(shared, init_method=config.output_layer_init_method, skip_bias_add=True)
        q_latent = config.q_lora_rank
        query_size = heads * sum(self.query_sizes)
        if q_latent is None:
            self.linear_q_proj = ColumnParallelLinear(h, query_size, **column)
        else:
            self.linear_q_down_proj = DuplicatedLinear(config, h, q_latent)
            self.q_layernorm = RMSNorm(config, q_latent, LATENT_EPSILON)
            self.linear_q_up_proj = ColumnParallelLinear(q_latent, query_size, **column)
        self.linear_kv_down_proj = DuplicatedLinear(config, h, sum(self.down_sizes))
        self.kv_layernorm = RMSNorm(config, latent, LATENT_EPSILON)
        self.linear_kv_up_proj = ColumnParallelLinear(latent, heads * sum(self.kv_sizes), **column)
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
            core = functools.partial(tensor_parallel.checkpoint, core, False)
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


# ---- specs of layers


class Residual(torch.nn.Module):
    """residual + multiplier * dropout(norm(x)): megatron's bias-dropout-add with the norm and
    multiplier of some families."""

    def __init__(self, config):
        super().__init__()
        self.multiplier = config.residual_multiplier
        self.norm = None
        if config.post_norms:
            self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool):
        return functools.partial(self._add, training)

    def _add(self, training, x_with_bias, residual, dropout):
        x, bias = x_with_bias
        if bias is not None:
            x = x + bias
        if self.norm is not None:
            x = self.norm(x)
        if training and dropout:
            x = F.dropout(x, dropout)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        return residual + x


class Layer(TransformerLayer):
    """megatron's layer; on a GPU the gradient of the residual is added in the norm's backward
    pass."""

    def _forward_attention(self, hidden_states, *args, **kwargs):
        if not (self.recompute_input_layernorm or self.offload_attn_norm):
            hidden_states = self._past(self.input_layernorm, hidden_states)
        return super()._forward_attention(hidden_states, *args, **kwargs)

    def _forward_mlp(self, hidden_states, *args, **kwargs):
        if not (self.recompute_pre_mlp_layernorm or self.offload_mlp_norm):
            hidden_states = self._past(self.pre_mlp_layernorm, hidden_states)
        return super()._forward_mlp(hidden_states, *args, **kwargs)

    @staticmethod
    def _past(norm, x):
        has_sum = torch.is_grad_enabled() and x.requires_grad
        if isinstance(norm, RMSNorm) and has_sum and compiles(x):
            return norm(x, beside=True)
        return x


def block_spec(config, vp_stage: int | None = None):
    """The parts of megatron's TransformerBlock of one pipeline stage (and virtual stage)."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        numbers = layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage))
    kinds = [config.is_moe_layer(number) for number in numbers]
    specs = {is_moe: layer_spec(config, is_moe) for is_moe in set(kinds)}
    norm = TENorm if config.transformer_impl == "transformer_engine" else RMSNorm
    return TransformerBlockSubmodules([specs[is_moe] for is_moe in kinds], layer_norm=norm)


def _attention_spec(config, spec: ModuleSpec) -> ModuleSpec:
    """megatron's spec of attention with the norms and core attention of this file, or
    LatentAttention."""
    if config.multi_latent_attention:
        return ModuleSpec(LatentAttention)
    attention = spec.submodules
    if config.transformer_impl == "local":
        spec.module = FusedSelfAttention
        attention.core_attention = CoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.qk_norm_over_heads:
        of_query = {"heads": config.num_attention_heads}
        of_key = {"heads": config.num_query_groups}
        attention.q_layernorm = ModuleSpec(RMSNormOverHeads, params=of_query)
        attention.k_layernorm = ModuleSpec(RMSNormOverHeads, params=of_key)
    return spec


def layer_spec(config, is_moe: bool):
    """megatron's spec of one layer."""
    shared = dict(
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=False,  # replaced by model_moe.Experts
        qk_layernorm=config.qk_layernorm,
    )
    if config.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(**shared)
        parts = layer.submodules
        if is_moe:  # the local spec's name of this norm in a checkpoint, whatever follows it
            parts.sharded_state_dict_keys_map = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    else:
        layer = get_gpt_layer_local_spec(**shared, normalization=config.normalization)
        layer.module = Layer
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = (
            RMSNorm if config.pre_norms else IdentityOp
        )
        if config.post_norms or config.residual_multiplier != 1.0:
            parts.self_attn_bda = parts.mlp_bda = ModuleSpec(Residual, params={"config": config})
    parts.self_attention = _attention_spec(config, parts.self_attention)
    mlp = parts.mlp.submodules
    if is_moe:
        mlp.experts = Experts
        mlp.router = Router
        mlp = mlp.shared_experts and mlp.shared_experts.submodules
    if config.use_te_activation_func and mlp is not None:
        mlp.activation_func = swiglu
    return layer


class PredictionLayer(MegatronModule):
    """One extra layer. megatron's MultiTokenPredictionBlock has a list of them, and defines their
    places in a checkpoint."""

    def __init__(self, config, layer, layer_number: int, vp_stage=None, pg_collection=None):
        super().__init__(config=config)
        self.layer_number = layer_number
        sizes = config.hidden_size, config.layernorm_epsilon
        self.enorm = RMSNorm(config, *sizes)
        self.hnorm = RMSNorm(config, *sizes)
        self.eh_proj = DuplicatedLinear(config, 2 * config.hidden_size, config.hidden_size)
        # a layer of megatron adds those of earlier stages to its number
        number = config.num_layers + layer_number - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(
            layer, config=config, layer_number=number, vp_stage=vp_stage
        )
        self.final_layernorm = RMSNorm(config, *sizes)

    def forward(self, embedded, hidden_states, **kwargs):
        """embedded, hidden_states [s, b, h], or [s / tp, b, h] under sequence parallelism -> the
        next hidden_states.

        kwargs: attention_mask, packed_seq_params and padding_mask of the layer.
        """

        def run(embedded, hidden_states):
            both = torch.cat((self.enorm(embedded), self.hnorm(hidden_states)), -1)
            hidden_states, _ = self.transformer_layer(hidden_states=self.eh_proj(both), **kwargs)
            return self.final_layernorm(hidden_states)

        if self.training and self.config.recompute_granularity == "full":
            return tensor_parallel.checkpoint(
                run, self.config.distribute_saved_activations, embedded, hidden_states
            )
        return run(embedded, hidden_states)


def needs_grad(module, args, output):
    """A forward hook: recomputation gives no gradient at all to a unit if no input needs one, as
    after a frozen embedding (tensor_parallel/random.py, CheckpointFunction)."""
    if torch.is_grad_enabled():
        output.requires_grad_(True)
    return output


def prediction_spec(config, vp_stage: int | None = None):
    """The parts of megatron's MultiTokenPredictionBlock; None if this stage has none."""
    where = dict(ignore_virtual=False, vp_stage=vp_stage)
    if not config.mtp_num_layers or not mtp_on_this_rank(config, **where):
        return None
    layer = layer_spec(config, config.is_moe_layer(config.num_layers))
    spec = ModuleSpec(PredictionLayer, params={"layer": layer})
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * config.mtp_num_layers)
