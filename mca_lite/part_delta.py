"""Gated delta net: the linear attention of Qwen3-Next and Qwen3.5.

A head's state S [k, v] is zero before the first token of a document. At each token

    S <- exp(g) S
    S <- S + key (beta (value - S^T key))^T
    output = S^T query / sqrt(k)

Queries, keys and values pass a causal convolution and silu; queries and keys are normalised to
length 1. g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b). A key head, with its query, can
serve several value heads. Source: Yang et al., arXiv 2412.06464, in its chunked form, extended here
so that documents may begin inside a chunk.

Letters: s sequence, b batch, g key heads, n value heads, k and v channels per head, C tokens per
chunk, cp the context-parallel size.
"""

import functools
import importlib.util
import inspect
import re
from typing import Any

import torch
import torch.nn.functional as F

from . import parallel
from .kernels import compiled, compiles, first_line, jit, launch, rms_norm, tl, works
from .mcore import (
    PackedSeqParams,
    ProcessGroupCollection,
    TransformerConfig,
    make_sharded_tensors_for_checkpoint,
    mappings,
    tensor_parallel,
)
from .model_attention import RowModule, column_linear, recomputes, row_linear
from .model_moe import new_weight
from .model_norms import Sharded

# ---- the rule

CHUNK_SIZE = 64
# measured on an H200: 51,800 tokens/s, and without them 42,920 in another call
FAST_PAIR = "flash-linear-attention 0.6.0 with triton 3.7.1"
_NO_KERNELS = (
    "the gated delta rule runs without flash-linear-attention ({}), and training is slower: the "
    f"fast pair is {FAST_PAIR}; with another triton on a Hopper GPU, pip install tilelang too"
)


@compiled
def causal_convolution(
    x: torch.Tensor, weight: torch.Tensor, documents: torch.Tensor
) -> torch.Tensor:
    """Causal depthwise convolution, then silu: each output channel is a weighted sum of the current
    and the size - 1 tokens before it, if they are in the same document.

    x [s, b, c] -> [s, b, c] in x's dtype, computed in float32 or wider; weight [c, size], the
    current token's last; documents int64 [s], each token's document index.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    out = wide * weight[:, -1]
    place = torch.arange(len(x), device=x.device)
    for ago in range(1, weight.shape[-1]):
        # roll instead of slicing: torch's compiler rejects sums of slices of unequal length
        is_same = (documents == documents.roll(ago)) & (place >= ago)
        out = out + wide.roll(ago, 0) * is_same[:, None, None] * weight[:, -1 - ago]
    return F.silu(out).to(x.dtype)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    documents: torch.Tensor,
    chunk_size: int = CHUNK_SIZE,
    is_packed: bool = False,
) -> torch.Tensor:
    """The gated delta rule (linear attention whose state decays and is corrected at each token) in
    chunks, in float32 or wider -> outputs [s, b, n, v] in value's dtype.

    query, key: [s, b, n, k], not normalised. value: [s, b, n, v]. decay: log of the state's factor,
    g [s, b, n]. beta: [s, b, n]. documents: int64 [s], each token's document index. chunk_size:
    most tokens per chunk. is_packed: True if row lengths vary between calls: where kernels are
    compiled, rows are then padded to a multiple of PACKED_LENGTH tokens. Only the first MOST_SHAPES
    query shapes of each dtype are compiled.
    """
    length = len(query)
    tensors = query, key, value, decay, beta, documents
    if is_packed and compiles(query):
        more = -length % PACKED_LENGTH
        tensors = tuple(F.pad(x, (0, 0) * (x.dim() - 1) + (0, more)) for x in tensors)
    size = min(chunk_size, len(tensors[0]))
    shapes = COMPILED_SHAPES.setdefault(query.dtype, set())
    if len(shapes) < MOST_SHAPES:
        shapes.add(tensors[0].shape)
    is_known = tensors[0].shape in shapes
    parts_of = _chunk_parts if is_known else inspect.unwrap(_chunk_parts)
    outputs_of = _outputs if is_known else inspect.unwrap(_outputs)
    q, scores, written, *of_state = parts_of(*tensors, size)
    written, states = ChunkStates.apply(written, *of_state)
    return outputs_of(q, scores, written, states, value.dtype)[:length]


PACKED_LENGTH = 1024  # so that packs of nearly as many tokens have the same shape
# torch.compile takes half a minute for a shape of _chunk_parts and _outputs; others run uncompiled
MOST_SHAPES = 2
COMPILED_SHAPES: dict[
    torch.dtype, set[torch.Size]
] = {}  # dtype -> shapes of queries that are compiled
_of_one_shape = functools.partial(compiled, dynamic=False)


@_of_one_shape
def _chunk_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    documents: torch.Tensor,
    size: int,
) -> tuple[torch.Tensor, ...]:
    """The part of the gated delta rule that does not depend on the state before a chunk, for all
    chunks of `size` tokens at once: (queries times the decay since the chunk before [.., C, k],
    attention scores within the chunk [.., C, C], and the four arguments of ChunkStates). C is
    `size`, k the key channels; the dimensions before are b, n, chunks. The other arguments are
    those of gated_delta_rule."""
    q, k, v, g, beta = (_chunks(x, size) for x in (query, key, value, decay, beta))
    q = _of_length_one(q) * q.shape[-1] ** -0.5
    k = _of_length_one(k)
    of_token = F.pad(documents, (0, -len(query) % size)).unflatten(0, (-1, size))
    is_visible = (of_token[:, :, None] == of_token[:, None]).tril()
    goes_on = of_token == of_token[:, -1].roll(1)[:, None]  # same document as the last chunk's end

    # decay from token j to token i [C, C], and from the previous chunk's end [C, 1]. Each is summed
    # by itself: differences of prefix sums would lose precision
    sums = g.expand(*g.shape[:-1], size).tril(-1).cumsum(-2)
    within = sums.exp() * is_visible
    since = g.cumsum(-2).exp() * goes_on[..., None]

    # the value that token i writes depends on what earlier tokens wrote: a triangular system
    strong = k * beta
    system = (strong @ k.mT) * within
    right = torch.cat((v * beta, strong * since), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, read = solved.split((v.shape[-1], k.shape[-1]), -1)
    to_end = k * within[..., -1, :, None]
    scores = (q @ k.mT) * within
    of_state = (x.contiguous() for x in (written, read, to_end, since[..., -1, 0]))
    return q * since, scores, *of_state


@_of_one_shape
def _outputs(
    q: torch.Tensor,
    scores: torch.Tensor,
    written: torch.Tensor,
    states: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the outputs of all chunks [s, b, n, v] in `dtype`, where s is chunks * C: each query
    reads the state before its chunk, and the values that tokens in its chunk wrote. q, scores: from
    _chunk_parts. written, states: from ChunkStates."""
    out = (q @ states + scores @ written).flatten(2, 3)
    return out.permute(2, 0, 1, 3).to(dtype)


class ChunkStates(torch.autograd.Function):
    """Run the recurrence over chunks. The state S is zero before the first; in each chunk

        X = W - R S
        S <- kept S + E^T X

    W [b, n, chunks, C, v]: what the tokens would write into an empty state. R [.., C, k]: how they
    read the state. E [.., C, k]: their keys, decayed to the chunk's end. kept [b, n, chunks]: the
    state's decay over the chunk. -> (X like W, the state before each chunk [b, n, chunks, k, v]).
    """

    @staticmethod
    def forward(
        ctx: Any, w: torch.Tensor, r: torch.Tensor, e: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, states = _scan(w, r, e, kept, None)
        ctx.save_for_backward(r, e, kept, x, states)
        return x, states

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor, d_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        r, e, kept, x, states = ctx.saved_tensors
        # G, the gradient of the state after a chunk, is a scan from the end:
        # Y = dX + E G, G <- kept G + dS - R^T Y
        d_w, after = _scan(d_x.contiguous(), e, r, kept, d_states.contiguous())
        return d_w, -(d_w @ states.mT), x @ after.mT, (after * states).sum((-2, -1))


def _scan(
    w: torch.Tensor,
    r: torch.Tensor,
    e: torch.Tensor,
    kept: torch.Tensor,
    added: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the forward recurrence of ChunkStates on its arguments w, r, e and kept -> (X, the state
    before each chunk). With `added`, run the recurrence of its backward pass: from the last chunk
    to the first, with the sign of both matmuls reversed, and with added [b, n, chunks, k, v] added
    to the state after each chunk."""
    b, n, chunks, size, v = w.shape
    k = r.shape[-1]
    x = torch.empty_like(w)
    states = w.new_empty(b, n, chunks, k, v)
    if w.dtype == torch.float32 and compiles(w) and _fits(size, k, v):
        columns = min(v, _COLUMNS)
        tensors = w, r, e, kept, added if added is not None else w, x, states
        grid = b * n, v // columns
        constants = dict(C=size, K=k, V=v, COLUMNS=columns, BACKWARD=added is not None)
        launch(_scan_kernel, grid, *tensors, chunks, **constants, **_LAUNCH)
        return x, states
    sign = 1.0 if added is None else -1.0
    state = torch.zeros_like(states[:, :, 0])
    for i in range(chunks) if added is None else reversed(range(chunks)):
        states[:, :, i] = state
        x[:, :, i] = w[:, :, i] - sign * (r[:, :, i] @ state)
        state = kept[:, :, i, None, None] * state + sign * (e[:, :, i].mT @ x[:, :, i])
        if added is not None:
            state += added[:, :, i]
    return x, states


def _fits(*sizes: int) -> bool:
    """True if all sizes (chunk, key and value channels) are powers of two from 16 to 128, as the
    Triton kernel needs."""
    return all(16 <= size <= 128 and size & (size - 1) == 0 for size in sizes)


# Columns of a state per program. On an H200 a pass over 64 heads of 128 channels takes 0.6 ms, and
# 0.9 ms with 16 or 64 columns.
_COLUMNS = 32
# three tf32 matmuls are as exact as one in float32: 3e-7 of the largest state; one alone is 9e-4
_LAUNCH = dict(PRECISION="tf32x3", num_warps=4, num_stages=2)


@jit
def _scan_kernel(
    w_pointer,
    r_pointer,
    e_pointer,
    kept_pointer,
    added_pointer,
    x_pointer,
    states_pointer,
    chunks,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    COLUMNS: tl.constexpr,
    BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Triton kernel of _scan. One program runs over all chunks for COLUMNS value channels of one
    head, whose state it keeps in registers."""
    head = tl.program_id(0).to(tl.int64) * chunks
    tokens = tl.arange(0, C)
    channels = tl.arange(0, K)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    of_x = tokens[:, None] * V + columns[None, :]
    of_state = channels[:, None] * V + columns[None, :]
    state = tl.zeros((K, COLUMNS), dtype=tl.float32)
    for step in range(chunks):
        place = head + (chunks - 1 - step if BACKWARD else step)
        tl.store(states_pointer + place * K * V + of_state, state)
        r = tl.load(r_pointer + place * C * K + tokens[:, None] * K + channels[None, :])
        x = tl.load(w_pointer + place * C * V + of_x)
        product = tl.dot(r, state, input_precision=PRECISION)
        x = x + product if BACKWARD else x - product
        tl.store(x_pointer + place * C * V + of_x, x)
        e = tl.load(e_pointer + place * C * K + tokens[None, :] * K + channels[:, None])
        product = tl.dot(e, x, input_precision=PRECISION)
        state = state * tl.load(kept_pointer + place)
        if BACKWARD:
            state += tl.load(added_pointer + place * K * V + of_state) - product
        else:
            state += product


def _chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Split tokens into chunks of `size`: [s, b, n, c] or [s, b, n] -> [b, n, chunks, size, c] (c =
    1 if missing), float32 or wider. The last chunk is filled with zeros."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if x.dim() == 3:
        x = x[..., None]
    x = F.pad(x.permute(1, 2, 0, 3), (0, 0, 0, -len(x) % size))
    return x.unflatten(2, (-1, size))


def _of_length_one(x: torch.Tensor) -> torch.Tensor:
    """Normalise the last dimension to length 1: x / sqrt(sum of x^2 + 1e-6)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@functools.cache
def why_no_fla() -> str | None:
    """Reason why flash-linear-attention is not used, in one line: an error from importing it or
    triton, or a known bug on this GPU. None if there is neither. Cached."""
    try:
        import fla.ops.gated_delta_rule  # noqa: F401
        from triton import __version__
    except Exception as error:  # a broken installation raises more than ImportError
        return first_line(error)
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    version = tuple(int(number) for number in re.findall(r"\d+", __version__)[:3])
    is_wrong = is_hopper and (3, 4) <= version < (3, 7, 1)
    if is_wrong and importlib.util.find_spec("tilelang") is None:
        return f"its gradients by Triton {__version__} are wrong on Hopper GPUs without tilelang"
    return None


def delta_rule_by_kernels(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    borders: torch.Tensor | None,
) -> torch.Tensor:
    """Outputs [s, b, n, v] of the gated delta rule (linear attention), by flash-linear-attention's
    kernels. query, key: [s, b, n, k]. value: [s, b, n, v]. decay (log of the state's factor), beta:
    [s, b, n]. borders: cu_seqlens of a packed row; None: each row is one document."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rows = (x.transpose(0, 1).contiguous() for x in (query, key, value, decay, beta))
    if borders is not None:
        borders = borders.long()
    more = dict(use_qk_l2norm_in_kernel=True, cu_seqlens=borders)
    out, _ = chunk_gated_delta_rule(*rows, **more)
    return out.transpose(0, 1)


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    documents: torch.Tensor,
    borders: torch.Tensor | None,
) -> torch.Tensor:
    """Outputs [s, b, n, v] of the gated delta rule (linear attention). Computed by
    flash-linear-attention's kernels if value is on CUDA, not float32, and why_no_fla() is None;
    otherwise by gated_delta_rule. borders: cu_seqlens of a packed row; None: rows are not packed.
    Other arguments: as in gated_delta_rule."""
    suits = value.is_cuda and value.dtype != torch.float32
    if suits and works(why_no_fla, _NO_KERNELS):
        return delta_rule_by_kernels(query, key, value, decay, beta, borders)
    tensors = query, key, value, decay, beta, documents
    return gated_delta_rule(*tensors, is_packed=borders is not None)


# ---- context parallelism: each rank computes some heads over the whole row


def _to_heads(
    x: torch.Tensor, group: torch.distributed.ProcessGroup, order: torch.Tensor
) -> torch.Tensor:
    """Exchange tokens for heads between context-parallel ranks: this rank's tokens with all heads
    [s / cp, b, g, c] -> some heads of the whole row [s, b, g / cp, c], in row order. order: int64
    [s], for each token of the row its index among the ranks' tokens, concatenated by rank.
    Collective over `group`: all-to-all in both passes."""
    parts = x.unflatten(2, (group.size(), -1)).movedim(2, 0)
    whole = mappings.all_to_all(group, parts.flatten(0, 1).contiguous())
    return whole.index_select(0, order)


def _to_tokens(
    x: torch.Tensor, group: torch.distributed.ProcessGroup, order: torch.Tensor
) -> torch.Tensor:
    """The inverse of _to_heads: some heads of the whole row [s, b, g / cp, c] -> this rank's tokens
    [s / cp, b, g, c]. order: int64 [s], as for _to_heads. Collective over `group`: all-to-all in
    both passes."""
    parts = x.index_select(0, order.argsort())
    parts = mappings.all_to_all(group, parts).unflatten(0, (group.size(), -1))
    return parts.movedim(0, 2).flatten(2, 3)


# ---- the module


class Convolution(Sharded):
    """Holds the weight [channels, 1, size] of a depthwise convolution, shaped as in
    torch.nn.Conv1d. channels: of this tensor-parallel rank's heads."""

    def __init__(self, config: TransformerConfig, channels: int, size: int):
        super().__init__()
        self.weight = new_weight(config, channels, 1, size)

    def forward(self) -> torch.Tensor:
        """The weight as [channels, size]. Read it by this call, because overlap_param_gather hooks
        wait for the weight here."""
        return self.weight.flatten(1)


class GatedNorm(torch.nn.Module):
    """RMS norm over each head [..., v], times silu(gate). Tensor-parallel ranks have different
    heads and the same weight, so its gradient is summed over them: in backward, one all-reduce over
    tp_group if it has several ranks and the weight is trained."""

    def __init__(
        self, config: TransformerConfig, size: int, tp_group: torch.distributed.ProcessGroup
    ):
        super().__init__()
        self.weight = new_weight(config, size)
        self.eps = config.layernorm_epsilon
        self.tp_group = tp_group

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.tp_group.size() > 1:
            weight = parallel.sum_gradients(weight, self.tp_group)
        normed = rms_norm(x.contiguous(), weight, self.eps)
        return (normed * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(RowModule):
    """Linear attention (gated delta net), used in some layers instead of SelfAttention.

    [s, b, h], or [s / tp, b, h] under sequence parallelism -> (the same shape, None); under context
    parallelism s counts this rank's tokens. The rows of in_proj are grouped by key head: its query
    and key, then for its value heads the values, gates, b and a.

    Tensor parallelism shards the key heads. Context parallelism shards them further: a state needs
    all earlier tokens, so its ranks exchange tokens for heads. Collectives: those of the linears
    and of GatedNorm; under context parallelism an all-to-all before and after the delta rule."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection
    ):
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        groups = config.linear_num_key_heads
        heads = config.linear_num_value_heads
        k = config.linear_key_head_dim
        v = config.linear_value_head_dim
        self.shared_by = heads // groups  # value heads per key head
        self.of_convolution = [k, k, self.shared_by * v]
        self.widths = [sum(self.of_convolution), self.shared_by * v, *[self.shared_by] * 2]
        tp = self.tp_group.size()
        self.in_proj = column_linear(
            config, config.hidden_size, groups * sum(self.widths), self.tp_group
        )
        channels = groups * sum(self.of_convolution) // tp
        self.conv1d = Convolution(config, channels, config.linear_conv_kernel_dim)
        self.A_log = new_weight(config, heads // tp)
        self.dt_bias = new_weight(config, heads // tp)
        self.norm = GatedNorm(config, v, self.tp_group)
        self.out_proj = row_linear(config, heads * v, self.tp_group)
        self.is_recomputed = recomputes(config, "core_attn")

    @staticmethod
    def costs(config: TransformerConfig, facts: Any) -> float:
        """Estimate the bytes per token on this rank that a gated delta net saves for the backward
        pass, without the norm before it and without the layer's MLP.

        Without the kernels of flash-linear-attention, torch operations save float32 tensors, among
        them matrices and one state for each chunk of tokens; if kernels are compiled, fewer than
        on a CPU are counted, although those of a packed row may run uncompiled. facts: _Facts of
        part_long_costs (bytes per value, whether kernels are compiled)."""
        tp = config.tensor_model_parallel_size
        heads = config.linear_num_value_heads / tp
        k = config.linear_key_head_dim
        v = config.linear_value_head_dim
        channels = 2 * config.linear_num_key_heads / tp * k + heads * v
        convolution = facts.attended * (config.linear_conv_kernel_dim + 1) * channels
        of_head = 12 * k + 9 * v + 6 * CHUNK_SIZE + k * v / CHUNK_SIZE + 9
        if facts.compiled:
            if why_no_fla() is None:
                return convolution + facts.attended * heads * (2 * k + 5 * v + CHUNK_SIZE)
            convolution = facts.attended * channels
            of_head -= 3 * k + 2.5 * v + CHUNK_SIZE
        return convolution + 4 * heads * of_head + CHUNK_SIZE

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [s, b, h], or [s / tp, b, h] under sequence parallelism -> (the same shape,
        None); s counts this rank's tokens. unused: keywords of other attention modules, such as
        rotary tables."""
        mixed, _ = self.in_proj(hidden_states)
        layout = self.layout(packed_seq_params, mixed)
        mixed = mixed.unflatten(-1, (-1, sum(self.widths)))
        if self.cp_group.size() > 1:
            mixed = _to_heads(mixed, self.cp_group, layout.order)
        borders = layout.borders if packed_seq_params is not None else None
        out = self._heads(mixed, layout.documents, borders)
        if self.cp_group.size() > 1:
            out = _to_tokens(out, self.cp_group, layout.order)
        return self.out_proj(out.flatten(2))

    def _heads(
        self, mixed: torch.Tensor, documents: torch.Tensor, borders: torch.Tensor | None
    ) -> torch.Tensor:
        """Run convolution, delta rule and norm of the layer on this rank's heads: mixed, the
        projections of the whole row [s, b, g, sum of widths] -> [s, b, n, v]. g and n count this
        rank's key and value heads. documents: int64 [s], each token's document index. borders:
        cu_seqlens of a packed row, or None."""
        convolved, gate, beta, a = mixed.split(self.widths, -1)
        weight = self._of_rank(self.conv1d())
        convolved = causal_convolution(convolved.flatten(2), weight, documents)
        heads = convolved.unflatten(-1, (-1, sum(self.of_convolution)))
        query, key, value = heads.split(self.of_convolution, -1)
        query = query.repeat_interleave(self.shared_by, 2)
        key = key.repeat_interleave(self.shared_by, 2)
        value = value.reshape(*query.shape[:3], -1)
        strength = self._of_rank(self.A_log).float().exp()
        decay = -strength * F.softplus(a.flatten(2).float() + self._of_rank(self.dt_bias))
        run = functools.partial(delta_rule, documents=documents, borders=borders)
        tensors = query, key, value, decay, beta.flatten(2).sigmoid()
        if self.is_recomputed and self.training:
            out = tensor_parallel.checkpoint(run, False, *tensors)
        else:
            out = run(*tensors)
        return self.norm(out, gate.reshape(out.shape))

    def _of_rank(self, weight: torch.Tensor) -> torch.Tensor:
        """This context-parallel rank's part of a weight, cut along its first dimension, which has
        heads or channels."""
        return weight.chunk(self.cp_group.size())[self.cp_group.rank()]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """megatron's sharded state dict of the layer; A_log and dt_bias are sharded by heads."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        cut = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        axes = dict.fromkeys(cut, 0)
        return state | make_sharded_tensors_for_checkpoint(cut, prefix, axes, sharded_offsets)
