"""The layers that a model is built of: plain torch ("local") or Transformer Engine. The only file that knows about TE.

Local layers need nothing but torch: a norm that knows sequence parallelism, and core attention over
scaled_dot_product_attention or varlen_attn. Shapes: s sequence of this rank, t tokens of a packed row, b batch, n heads and
g query groups of this rank, d head size.
"""

import contextlib
import functools
import inspect

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from .model_latent import LatentAttention
from .model_moe import Experts, Router
from .packed_rows import row_layout


@functools.lru_cache(1)
def transformer_engine_works() -> bool:
    """Whether TE can be imported and there is a GPU for it. Without a GPU the import raises anything but ImportError."""
    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception:
        return False
    return True


def resolve_transformer_impl(asked: str) -> str:
    """ "local" or "transformer_engine" for "auto", "local" or "transformer_engine"."""
    if asked == "auto":
        return "transformer_engine" if transformer_engine_works() else "local"
    if asked == "transformer_engine" and not transformer_engine_works():
        raise ValueError(
            "transformer_impl: 'transformer_engine' was set, and Transformer Engine does not work here (it needs a GPU "
            "and `pip install mca-lite[te]`): set transformer_impl: local or auto"
        )
    return asked


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension, the mean square in float32, as Hugging Face's decoders do. Weights around
    zero (Gemma's) get 1 added to them, and multiply before the rounding.

    The weight is marked for megatron where the sequence is cut over tensor-parallel ranks: its gradient is a partial sum.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma

    def forward(self, x):
        if self.zero_centered:
            return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + self.weight.float(), self.eps).to(
                x.dtype
            )
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # the rounding to bf16 comes before the weight, as in the Hugging Face model
        return self.weight * F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype)


class Residual(torch.nn.Module):
    """residual + multiplier * dropout(norm(x)): megatron's bias-dropout-add with what some families do to x first."""

    def __init__(self, config):
        super().__init__()
        self.multiplier = config.residual_multiplier
        self.norm = (
            RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            if config.post_norms
            else None
        )

    def forward(self, training: bool, fused: bool):
        return functools.partial(self._add, training)

    def _add(self, training, x_with_bias, residual, dropout):
        x, bias = x_with_bias
        x = x if bias is None else x + bias
        x = x if self.norm is None else self.norm(x)
        x = F.dropout(x, dropout) if training and dropout else x
        return residual + (x if self.multiplier == 1.0 else x * self.multiplier)


class _GatherTokens(torch.autograd.Function):
    """[t / cp, ...] of each context-parallel rank -> [t, ...], rank after rank; backward: this rank's part of the sum."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        # gloo has no reduce-scatter: every rank sums the whole and keeps its part
        grad = grad.contiguous()
        if dist.get_backend(ctx.group) == "gloo":
            dist.all_reduce(grad, group=ctx.group)
            return grad.chunk(ctx.group.size())[ctx.group.rank()], None
        mine = torch.empty_like(grad.chunk(ctx.group.size())[0])
        dist.reduce_scatter_tensor(mine, grad, group=ctx.group)
        return mine, None


def rotate(x, cos, sin, interleaved: bool = False):
    """Rotary embedding of x [t, b, n, d] by tables [t, 1, 1, rotary] in x's dtype; channels beyond `rotary` stay.

    A pair that turns: channels i and i + rotary / 2, or interleaved neighbours.
    """
    size = cos.shape[-1]
    turned, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    if interleaved:
        quarter_turn = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        quarter_turn = torch.cat((-second, first), -1)
    turned = turned * cos + quarter_turn * sin
    return turned if rest is None else torch.cat((turned, rest), -1)


def _packed_kernel():
    """torch's varlen attention and whether it must be told of query groups: 2.11 has no such keyword."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


class CoreAttention(MegatronModule):
    """Rotary embedding and softmax(q k^T * scale) v over torch's attention; the signature of megatron's DotProductAttention.

    Causal. Rows are padded on the right: no position ever looks at padding, so no mask is built. Packed rows: documents do
    not see each other, and their positions start at 0. Context parallelism: keys and values of the whole row are gathered
    once a layer; the local queries are this rank's zigzag chunks (packed_rows.py). A mask that is given, bool
    [b or 1, 1, s, s] with True meaning hidden, is obeyed. So are the layer's sliding window and the cap on scores.

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
        cp_comm_type=None,
        pg_collection=None,
        **unused,
    ):
        super().__init__(config=config)
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.softmax_scale = softmax_scale
        self.layer_type = config.layer_type(layer_number)
        self.window = config.sliding_window if self.layer_type == "sliding_attention" else None
        self.softcap = config.attn_logit_softcapping
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
        """query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n * d]; packed rows [t, n, d] -> [t, 1, n * d]."""
        if attention_bias is not None:
            raise ValueError("the local core attention takes no attention bias")
        if packed_seq_params is not None:
            query, key, value = (x[:, None] for x in (query, key, value))
        layout = self._layout(packed_seq_params, query)
        tables = self.config.rotary_tables(layout, query.dtype, self.layer_type)
        query, key = (rotate(x, *tables, self.config.rope_interleave) for x in (query, key))
        if self.cp_group is not None:
            key, value = (_GatherTokens.apply(x, self.cp_group)[layout.order] for x in (key, value))
        dropout = self.dropout if self.training else 0.0
        # dropout differs between tensor-parallel ranks, since each holds other heads
        with tensor_parallel.get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            # the varlen kernel knows neither float32 nor dropout nor caps, and heads in multiples of 8 alone
            suits = (
                query.is_cuda
                and query.dtype != torch.float32
                and not dropout
                and query.shape[-1] % 8 == 0
            )
            suits = suits and self.softcap is None
            if packed_seq_params is not None and suits:
                return self._varlen(query, key, value, layout)
            return self._segments(query, key, value, layout, attention_mask, dropout)

    def _layout(self, packed_seq_params, query):
        if packed_seq_params is not None:
            return packed_seq_params.layout
        if self.training and self.config.rows_are_packed:
            raise ValueError(
                "this pipeline stage got no packed_seq_params for packed rows, and would let documents see each other: "
                "give every stage the whole batch"
            )
        cp = self.config.context_parallel_size
        rank = self.cp_group.rank() if self.cp_group is not None else 0
        return row_layout((0, query.shape[0] * cp), cp, rank, query.device)

    def _segments(self, query, key, value, layout, attention_mask, dropout):
        """One call for each run of queries with its keys: documents, or their chunks under context parallelism."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = []
        for q0, q1, k0, k1 in layout.segments:
            mask = self._visible(q1 - q0, k1 - k0, attention_mask, q.device)
            parts = q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1]
            if self.softcap is not None:
                out.append(
                    _capped_attention(*parts, mask, self.softcap, self.softmax_scale, dropout)
                )
                continue
            attended = F.scaled_dot_product_attention(
                *parts,
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=dropout,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out.append(attended)
        out = out[0] if len(out) == 1 else torch.cat(out, 2)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _visible(self, num_queries: int, num_keys: int, hidden, device):
        """bool [num_queries, num_keys], True where a query sees a key; the last query sees the last key. None: causal, and
        nothing else."""
        more, window = num_keys - num_queries, self.window
        narrow = window is not None and num_keys > window
        if hidden is None and not more and not narrow and self.softcap is None:
            return None
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(more)
        if narrow:
            visible = visible.triu(more - window + 1)
        return visible if hidden is None else visible & ~hidden if narrow else ~hidden

    def _varlen(self, query, key, value, layout):
        """The same for a packed row on CUDA: one kernel, no host synchronisation."""
        kernel, knows_groups = _packed_kernel()
        cu_q, cu_k, places, max_q, max_k = layout.varlen
        q, k, v = query[:, 0], key[places, 0], value[places, 0]
        missing = (
            q.shape[-1] - v.shape[-1]
        )  # the kernel knows one size of a head: multi-latent attention has two
        v = F.pad(v, (0, missing)) if missing else v
        grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if knows_groups else {}
        if not knows_groups:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        window = (-1 if self.window is None else self.window - 1, 0)
        out = kernel(
            q,
            k,
            v,
            cu_q,
            cu_k,
            max_q,
            max_k,
            scale=self.softmax_scale,
            window_size=window,
            **grouped,
        )
        return out[..., : out.shape[-1] - missing].flatten(1)[:, None]


def _capped_attention(q, k, v, visible, cap, scale, dropout):
    """softmax(cap tanh(q k^T scale / cap)) v, the softmax in float32. q [b, n, q, d], k, v [b, g, k, d] -> [b, n, q, d]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5) / cap)
    weights = (
        scores.masked_fill(~visible, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    )
    return F.dropout(weights, dropout) @ v


class _SumOverRanks(torch.autograd.Function):
    """The sum over a group, whose gradient is the sum of the ranks' gradients: each of them goes on from it by itself."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class RMSNormOverHeads(torch.nn.Module):
    """RMS norm of queries or keys over all their heads together: x [s, b, heads of this rank, d], weight [heads * d].

    Tensor parallelism cuts the weight with the heads; the mean square is taken over all ranks.
    """

    def __init__(self, config, hidden_size: int, heads: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        size = heads * hidden_size // self.tp_group.size()
        self.weight = torch.nn.Parameter(
            torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.eps, self.width = eps, heads * hidden_size

    def forward(self, x):
        flat = x.flatten(-2).float()
        squares = flat.square().sum(-1, keepdim=True)
        if self.tp_group.size() > 1:
            squares = _SumOverRanks.apply(squares, self.tp_group)
        normed = flat * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * normed.to(x.dtype)).view(x.shape)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


def stage_layers(config, vp_stage: int | None = None) -> list[int]:
    """Numbers in the whole model of the layers that one pipeline stage (and virtual stage) holds."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage)))


def block_spec(config, vp_stage: int | None = None):
    """What megatron's TransformerBlock of one pipeline stage (and virtual stage) is built from."""
    numbers = stage_layers(config, vp_stage)
    specs = {
        is_moe: layer_spec(config, is_moe) for is_moe in {config.is_moe_layer(i) for i in numbers}
    }
    norm = TENorm if config.transformer_impl == "transformer_engine" else RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[specs[config.is_moe_layer(i)] for i in numbers], layer_norm=norm
    )


def _attention_spec(config, spec: ModuleSpec) -> ModuleSpec:
    """megatron's spec of attention with our norms and core attention, or our own multi-latent attention."""
    if config.multi_latent_attention:
        return ModuleSpec(
            LatentAttention, params={"norm": RMSNorm, "core_attention": CoreAttention}
        )
    attention = spec.submodules
    if config.transformer_impl == "local":
        attention.core_attention = CoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.qk_norm_over_heads:
        for name, heads in (
            ("q_layernorm", config.num_attention_heads),
            ("k_layernorm", config.num_query_groups),
        ):
            setattr(attention, name, ModuleSpec(module=RMSNormOverHeads, params={"heads": heads}))
    return spec


def layer_spec(config, is_moe: bool):
    """megatron's spec of one layer."""
    shared = dict(
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=False,  # the experts are our own
        qk_layernorm=config.qk_layernorm,
    )
    if config.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(**shared)
        parts = layer.submodules
    else:
        layer = get_gpt_layer_local_spec(**shared, normalization=config.normalization)
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = (
            RMSNorm if config.pre_norms else IdentityOp
        )
        if config.post_norms or config.residual_multiplier != 1.0:
            parts.self_attn_bda = parts.mlp_bda = ModuleSpec(Residual, params={"config": config})
    parts.self_attention = _attention_spec(config, parts.self_attention)
    if is_moe:
        parts.mlp.submodules.experts, parts.mlp.submodules.router = Experts, Router
    return layer
