"""Triton kernels for operations that run in plain torch without them: norms, heads, SwiGLU, AdamW,
token losses, joining two partial attentions. Those of experts: part_triton_moe.py.

Letters: s positions, b rows, n query heads, g groups (key heads), d channels per head, f columns of
a gate, V / tp logits per token on a rank, T tokens or their rows, k experts per token.
"""

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .kernels import jit, launch, tl, triton
from .loss_tokens import Head
from .part_triton_moe import rows_with_room

_SWIGLU_BLOCK = 1024  # columns of a program of SwiGLU
_ADAM_BLOCK = 1024  # elements of a program of AdamW, and of scaled_by_kernel
_JOIN_BLOCK = 2048  # elements of a program of join
_HEADS = 16  # heads of a program of rotated_heads
# programs per multiprocessor in kernels whose programs sum over tokens; kernels over heads have
# twice as many
_PROGRAMS = 2
_SHARED = 96 * 1024  # bytes of shared memory that a program may take: small GPUs have 99 KiB
# bounds the largest logit from below: it is finite also on a rank with padding alone
_LOWEST = torch.finfo(torch.float32).min


@functools.cache
def num_programs(device: torch.device) -> int:
    """Number of Triton programs that occupy a GPU, for kernels in which each program sums over a
    part of the tokens. Cached per device."""
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


@jit
def _sum_kernel(
    partial, out, rows, width, stride, ADDS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    summed = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        summed += tl.load(partial + row[:, None] * stride + column[None, :], inside, 0.0)
    total = tl.sum(summed, 0)
    if ADDS:
        total += tl.load(out + column, column < width, 0.0)
    tl.store(out + column, total, column < width)


def _gradient(partial: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Finish the gradient of a parameter [width] in a backward kernel whose programs each summed
    over a part of the tokens: sum up `partial`, float32 [programs, width], over the programs.

    If megatron's DDP gave the parameter a float32 main_grad, the sum is added there, and the result
    is an uninitialised tensor, which DDP's hook does not read. Otherwise the result is the
    gradient."""
    gradient = torch.empty_like(parameter)
    main_grad = getattr(parameter, "main_grad", None)
    adds = main_grad is not None and main_grad.dtype == torch.float32
    if adds:
        parameter.grad_added_to_main_grad = True
    width = partial.shape[1]
    sizes = partial.shape[0], width, partial.stride(0)
    tensors = partial, main_grad if adds else gradient
    launch(_sum_kernel, (triton.cdiv(width, 32),), *tensors, *sizes, adds, ROWS=128, BLOCK=32)
    return gradient


def iterations_at_once(loaded: int) -> int:
    """Choose num_stages of a Triton loop, the depth of its software pipeline: 3 if the loads of two
    iterations fit into shared memory, otherwise 1. loaded: bytes loaded per iteration."""
    return 3 if 2 * loaded <= _SHARED else 1


# ---- RMS norm


@jit
def _norm_kernel(
    x, weight, out, rows, width: tl.constexpr, eps, ZERO: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    values = tl.load(x + place, inside, 0.0).to(tl.float32)
    scale = tl.load(weight + column, column < width, 0.0).to(tl.float32)[None, :]
    values = values * tl.rsqrt(tl.sum(values * values, 1) / width + eps)[:, None]
    if ZERO:
        values = values * (1.0 + scale)
    else:  # the rounding comes before the weight, as in the Hugging Face model
        values = values.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + place, values, inside)


@jit
def _norm_backward_kernel(
    x, weight, grad, passed, of_x, of_weight, rows, width: tl.constexpr, eps,
    ZERO: tl.constexpr, BESIDE: tl.constexpr, TRAINED: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, column < width, 0.0).to(tl.float32)[None, :]
    if ZERO:
        scale = 1.0 + scale
    summed = tl.zeros((BLOCK,), tl.float32)
    start = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    for first in tl.range(start, rows, step, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        place = row[:, None] * width + column[None, :]
        normed = tl.load(x + place, inside, 0.0).to(tl.float32)
        g = tl.load(grad + place, inside, 0.0).to(tl.float32)
        by = tl.rsqrt(tl.sum(normed * normed, 1) / width + eps)[:, None]
        normed = normed * by
        scaled = g * scale
        inner = by * (scaled - normed * (tl.sum(scaled * normed, 1) / width)[:, None])
        if BESIDE:
            inner += tl.load(passed + place, inside, 0.0).to(tl.float32)
        tl.store(of_x + place, inner, inside)
        if TRAINED:
            summed += tl.sum(g * normed, 0)
    if TRAINED:
        tl.store(of_weight + tl.program_id(0) * width + column, summed, column < width)


def _tile(x: torch.Tensor) -> tuple[int, dict[str, int]]:
    """Choose the launch of a kernel whose programs process whole rows of x [..., width] -> (number
    of programs, constants for launch(): rows and columns of a program's tile, and warps)."""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    rows = max(4096 // block, 1)
    tile = dict(ROWS=rows, BLOCK=block, num_warps=16 if block > 4096 else 8)
    return triton.cdiv(x.numel() // width, rows), tile


class Norm(torch.autograd.Function):
    """RMS norm of x [..., h] with weight [h], by Triton kernels. The argument `beside` is for a
    caller that uses x itself too, such as a residual connection: forward then returns
    (normed x, x), and backward adds the gradients of both outputs in its kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        zero_centered: bool,
        beside: bool,
    ) -> Any:
        x = x.contiguous()
        out = torch.empty_like(x)
        ctx.save_for_backward(x, weight)
        width = x.shape[-1]
        ctx.numbers = x.numel() // width, width, eps, zero_centered
        programs, tile = _tile(x)
        launch(_norm_kernel, (programs,), x, weight, out, *ctx.numbers, **tile)
        if beside:
            return out, x.view_as(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor, passed: Any = None
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = torch.empty_like(x)
        is_beside = passed is not None
        if is_beside:
            passed = passed.contiguous()
        trained = ctx.needs_input_grad[1]
        programs, tile = _tile(x)
        programs = min(programs, num_programs(x.device))
        partial = of_weight = None
        if trained:
            partial = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
        stages = iterations_at_once(3 * tile["ROWS"] * tile["BLOCK"] * x.itemsize)
        tensors = x, weight, grad.contiguous(), passed, of_x, partial
        numbers = *ctx.numbers, is_beside, trained, stages
        launch(_norm_backward_kernel, (programs,), *tensors, *numbers, **tile)
        if trained:
            of_weight = _gradient(partial, weight)
        return of_x, of_weight, None, None, None


# ---- queries, keys and values


@jit
def _pairs(D: tl.constexpr, ROTARY: tl.constexpr, NEXT: tl.constexpr, HALF: tl.constexpr):
    """The channel pairs that RoPE rotates within a head -> (first channels, second channels, mask
    of rotated pairs, mask of existing pairs). D: channels per head, of which the first ROTARY are
    rotated; the others are paired too, but stay as they are. NEXT: pairs are neighbours, otherwise
    half of ROTARY apart. HALF: length of the results, a power of two of at least D / 2."""
    pair = tl.arange(0, HALF)
    turns = pair < ROTARY // 2
    if NEXT:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + ROTARY // 2
    first = tl.where(turns, first, pair + ROTARY // 2)
    second = tl.where(turns, second, pair + D // 2)
    return first, second, turns, pair < D // 2


@jit
def _rotation(cos, sin, position, first, second, turns, moves, ROTARY: tl.constexpr):
    """Load RoPE's factors for the channel pairs of some heads -> (cos of first channels, cos of
    second, sin of first, sin of second), each [heads, pairs]. cos is 1 and sin is 0 for pairs that
    are not rotated. cos, sin: tables with ROTARY columns. position: the row in them. first, second,
    turns: from _pairs(). moves: False for heads that are not rotated (values)."""
    table = position * ROTARY
    one = tl.full(first.shape, 1.0, tl.float32)
    zero = tl.zeros(first.shape, tl.float32)
    cos1 = tl.load(cos + table + first, turns, 1.0).to(tl.float32)
    cos2 = tl.load(cos + table + second, turns, 1.0).to(tl.float32)
    sin1 = tl.load(sin + table + first, turns, 0.0).to(tl.float32)
    sin2 = tl.load(sin + table + second, turns, 0.0).to(tl.float32)
    cos1 = tl.where(moves, cos1[None, :], one[None, :])
    cos2 = tl.where(moves, cos2[None, :], one[None, :])
    sin1 = tl.where(moves, sin1[None, :], zero[None, :])
    sin2 = tl.where(moves, sin2[None, :], zero[None, :])
    return cos1, cos2, sin1, sin2


@jit
def _scale(of_query, of_key, channel, inside, is_query, ZERO: tl.constexpr):
    """Weights of the query norm or key norm for the given channels of some heads. of_query, of_key:
    both norms' weights. is_query: for each head, True to take the query norm's. inside: mask of the
    channels that exist. ZERO: the norms' weights are centred at 0, and 1 is added."""
    q = tl.load(of_query + channel, inside, 0.0).to(tl.float32)[None, :]
    k = tl.load(of_key + channel, inside, 0.0).to(tl.float32)[None, :]
    scale = tl.where(is_query, q, k)
    if ZERO:
        scale = 1.0 + scale
    return scale


@jit
def _load(start, first, second, inside):
    """Load both channels of each pair, for some heads -> two tensors [heads, pairs] in float32.
    start: address of each head, [heads, 1]. first, second: the pairs' channels, from _pairs().
    inside: mask; 0 outside it."""
    a = tl.load(start + first[None, :], inside, 0.0).to(tl.float32)
    return a, tl.load(start + second[None, :], inside, 0.0).to(tl.float32)


@jit
def _store(start, first, second, inside, a, b):
    tl.store(start + first[None, :], a, inside)
    tl.store(start + second[None, :], b, inside)


@jit
def _parts(query, key, value, token, group, part, GROUPS: tl.constexpr, OWN: tl.constexpr,
           D: tl.constexpr):  # fmt: skip
    """Addresses [heads, 1] of the heads of one token in the tensors query, key and value -> one
    result per tensor, valid only for heads of that kind. group: each head's group (queries that
    share a key and a value). part: the head's place in its group: queries, then key, then value.
    GROUPS: number of groups. OWN: heads of a group. D: channels per head."""
    of_token = token * GROUPS + group
    of_query = query + (of_token * (OWN - 2) + part) * D
    return of_query, key + of_token * D, value + of_token * D


@jit
def _heads_kernel(
    mixed, of_query, of_key, cos, sin, query, key, value, sharing, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    NORMS: tl.constexpr, ZERO: tl.constexpr, NEXT: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    OWN: tl.constexpr = HEADS // GROUPS  # heads of a group: queries, a key, a value
    group = head // OWN
    part = head % OWN
    first, second, turns, exists = _pairs(D, ROTARY, NEXT, HALF)
    inside = (head < HEADS) & exists[None, :]
    is_query = part < OWN - 2
    is_value = part == OWN - 1
    moves = part != OWN - 1
    a, b = _load(mixed + (token * HEADS + head) * D, first, second, inside)
    if NORMS:
        by = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        normed1 = a * by
        normed2 = b * by
        if not ZERO:
            normed1 = normed1.to(query.dtype.element_ty).to(tl.float32)
            normed2 = normed2.to(query.dtype.element_ty).to(tl.float32)
        normed1 *= _scale(of_query, of_key, first, exists, is_query, ZERO)
        normed2 *= _scale(of_query, of_key, second, exists, is_query, ZERO)
        a = tl.where(moves, normed1, a)
        b = tl.where(moves, normed2, b)
    cos1, cos2, sin1, sin2 = _rotation(
        cos, sin, token // sharing, first, second, turns, moves, ROTARY
    )
    a, b = a * cos1 - b * sin1, b * cos2 + a * sin2
    q, k, v = _parts(query, key, value, token, group, part, GROUPS, OWN, D)
    _store(q, first, second, inside & is_query, a, b)
    _store(k, first, second, inside & (part == OWN - 2), a, b)
    _store(v, first, second, inside & is_value, a, b)


@jit
def _heads_backward_kernel(
    mixed, of_query, of_key, cos, sin, query, key, value, out, of_norms, tokens, sharing, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    NORMS: tl.constexpr, ZERO: tl.constexpr, NEXT: tl.constexpr, SUMS_NORMS: tl.constexpr,
    STAGES: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    OWN: tl.constexpr = HEADS // GROUPS
    group = head // OWN
    part = head % OWN
    first, second, turns, exists = _pairs(D, ROTARY, NEXT, HALF)
    inside = (head < HEADS) & exists[None, :]
    is_query = part < OWN - 2
    is_key = part == OWN - 2
    is_value = part == OWN - 1
    moves = part != OWN - 1
    if NORMS:
        scale1 = _scale(of_query, of_key, first, exists, is_query, ZERO)
        scale2 = _scale(of_query, of_key, second, exists, is_query, ZERO)
    none = tl.zeros((BLOCK, HALF), tl.float32)
    norm1, norm2 = none, none  # sums over tokens
    for number in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        token = tl.full((), 0, tl.int64) + number
        q, k, v = _parts(query, key, value, token, group, part, GROUPS, OWN, D)
        a, b = _load(q, first, second, inside & is_query)
        a2, b2 = _load(k, first, second, inside & is_key)
        a3, b3 = _load(v, first, second, inside & is_value)
        a = a + a2 + a3
        b = b + b2 + b3
        cos1, cos2, sin1, sin2 = _rotation(
            cos, sin, token // sharing, first, second, turns, moves, ROTARY
        )
        a, b = a * cos1 + b * sin2, b * cos2 - a * sin1
        start = (token * HEADS + head) * D
        if NORMS:
            x1, x2 = _load(mixed + start, first, second, inside)
            by = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
            x1 = x1 * by
            x2 = x2 * by
            norm1 = norm1 + a * x1
            norm2 = norm2 + b * x2
            scaled1 = a * scale1
            scaled2 = b * scale2
            along = (tl.sum(scaled1 * x1, 1) + tl.sum(scaled2 * x2, 1))[:, None] / D
            a = tl.where(moves, by * (scaled1 - x1 * along), a)
            b = tl.where(moves, by * (scaled2 - x2 * along), b)
        _store(out + start, first, second, inside, a, b)
    if SUMS_NORMS:
        of_norms += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2 * D
        tl.store(of_norms + first, tl.sum(tl.where(is_query, norm1, 0.0), 0), exists)
        tl.store(of_norms + second, tl.sum(tl.where(is_query, norm2, 0.0), 0), exists)
        tl.store(of_norms + D + first, tl.sum(tl.where(is_key, norm1, 0.0), 0), exists)
        tl.store(of_norms + D + second, tl.sum(tl.where(is_key, norm2, 0.0), 0), exists)


class RotatedHeads(torch.autograd.Function):
    """Autograd function of kernels.rotated_heads by Triton kernels, for an even number d of
    channels per head. It splits a fused QKV projection [s, b, width] into n query heads
    [s, b, n, d] and g key and value heads [s, b, g, d], normalises queries and keys if their norms'
    weights are given, and rotates them by RoPE."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: torch.Tensor,
        of_query: torch.Tensor | None,
        of_key: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        groups: int,
        d: int,
        eps: float,
        zero: bool,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed = mixed.contiguous()
        cos = cos.contiguous()
        sin = sin.contiguous()
        s, b, width = mixed.shape
        heads = width // d
        query = mixed.new_empty(s, b, heads - 2 * groups, d)
        key = mixed.new_empty(s, b, groups, d)
        value = mixed.new_empty(s, b, groups, d)
        norms = of_query is not None
        ctx.save_for_backward(mixed if norms else None, of_query, of_key, cos, sin)
        ctx.shape = mixed.shape
        ctx.dtype = mixed.dtype
        sizes = heads, groups, d, cos.shape[-1]
        sharing = b if cos.shape[1] == 1 else 1  # tokens with one row of the tables
        ctx.numbers = sharing, eps, *sizes, norms, zero, interleaved
        ctx.tile = dict(BLOCK=_HEADS, HALF=triton.next_power_of_2(d // 2))
        ctx.grid = s * b, triton.cdiv(heads, _HEADS)
        tensors = mixed, of_query, of_key, cos, sin, query, key, value
        launch(_heads_kernel, ctx.grid, *tensors, *ctx.numbers, **ctx.tile)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        mixed, of_query, of_key, cos, sin = ctx.saved_tensors
        out = torch.empty(ctx.shape, dtype=ctx.dtype, device=cos.device)
        d = ctx.numbers[4]
        tokens, chunks = ctx.grid
        sums_norms = any(ctx.needs_input_grad[1:3])
        programs = min(tokens, max(2 * num_programs(cos.device) // chunks, 1))
        of_norms: Any = None
        if sums_norms:
            sizes = programs * chunks, 2, d
            of_norms = torch.empty(sizes, dtype=torch.float32, device=cos.device)
        whole = [grad.contiguous() for grad in grads]
        tensors = mixed, of_query, of_key, cos, sin, *whole, out, of_norms
        stages = iterations_at_once(10 * _HEADS * ctx.tile["HALF"] * out.itemsize)
        numbers = tokens, *ctx.numbers, sums_norms, stages
        launch(_heads_backward_kernel, (programs, chunks), *tensors, *numbers, **ctx.tile)
        gradients = [out, None, None]
        for i, weight in enumerate((of_query, of_key)):
            if ctx.needs_input_grad[1 + i]:
                gradients[1 + i] = _gradient(of_norms[:, i], weight)
        return *gradients, *[None] * 7


# ---- SwiGLU


@jit
def _gate_and_up(both, biases, experts, f: tl.constexpr, BLOCK: tl.constexpr):
    """Load what one program of a SwiGLU kernel works on -> (row, column indices, mask of existing
    columns, gate, up), the last two in float32. both: pointer to rows [2 f], gate before up.
    biases: pointer to rows [2 f], of which `experts` has an index for each row; None: no biases.
    BLOCK: columns per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    gate = tl.load(both + row * 2 * f + column, inside).to(tl.float32)
    up = tl.load(both + row * 2 * f + f + column, inside).to(tl.float32)
    if biases is not None:
        bias = biases + tl.load(experts + row) * 2 * f + column
        gate += tl.load(bias, inside).to(tl.float32)
        up += tl.load(bias + f, inside).to(tl.float32)
    return row, column, inside, gate, up


@jit
def _clamped(x, low, high):
    return tl.where(x > high, high, tl.where(x < low, low, x))  # NaN stays


@jit
def _swiglu_kernel(
    both, weights, biases, experts, out, f: tl.constexpr, limit, stride, BLOCK: tl.constexpr
):
    row, column, inside, gate, up = _gate_and_up(both, biases, experts, f, BLOCK)
    slope = 1.0
    if biases is not None:
        slope = 1.702  # kernels.QUICK_GELU
        gate = _clamped(gate, -float("inf"), limit)
        up = _clamped(up, -limit, limit) + 1
    silu = gate * tl.sigmoid(slope * gate)
    if weights is None:
        # silu is rounded before it multiplies, as two operations of torch do
        silu = silu.to(out.dtype.element_ty).to(tl.float32)
    product = silu * up
    if weights is not None:
        product *= tl.load(weights + row).to(tl.float32)
    tl.store(out + row * stride + column, product, inside)


@jit
def _swiglu_backward_kernel(
    both, weights, biases, experts, grad, of_both, of_weights, f: tl.constexpr, limit, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, column, inside, gate, up = _gate_and_up(both, biases, experts, f, BLOCK)
    g = tl.load(grad + row * f + column, inside).to(tl.float32)
    slope = 1.0
    if biases is not None:
        slope = 1.702
        is_gate = gate <= limit
        is_up = (up >= -limit) & (up <= limit)
        gate = _clamped(gate, -float("inf"), limit)
        up = _clamped(up, -limit, limit) + 1
    sigmoid = tl.sigmoid(slope * gate)
    if of_weights is not None:  # the block is the whole row
        total = tl.sum(tl.where(inside, g * gate * sigmoid * up, 0.0), 0)
        tl.store(of_weights + row, total)
    if weights is not None:
        g *= tl.load(weights + row).to(tl.float32)
    if of_both is not None:
        of_gate = g * up * (sigmoid + slope * gate * sigmoid * (1 - sigmoid))
        of_up = g * gate * sigmoid
        if biases is not None:  # a clamped number has no gradient
            of_gate = tl.where(is_gate, of_gate, 0.0)
            of_up = tl.where(is_up, of_up, 0.0)
        place = of_both + row * stride + column
        tl.store(place, of_gate, inside)
        tl.store(place + f, of_up, inside)


def _launch_swiglu(
    kernel: Any, block: int, limit: float, stride: int, both: torch.Tensor, *tensors: Any
) -> None:
    """Run a SwiGLU kernel with `block` columns per program. limit: see kernels.
    weighted_clamped_swiglu. stride: elements from a row of its output to the next."""
    width = both.shape[-1]
    f = width // 2
    grid = both.numel() // width, triton.cdiv(f, block)
    # in 16 bits a thread loads 16 bytes, or more in the longest blocks
    warps = min(block // 256, 32)
    launch(kernel, grid, both, *tensors, f, limit, stride, block, num_warps=warps)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up for [..., 2 f], gate before up -> [..., f], with one Triton kernel per pass.
    Only the inputs are saved for backward.

    weights: factors [...] on the rows, as in kernels.weighted_swiglu; None: no factors. With
    weights the result is rounded once. Their gradient is a sum over f in float32, by one program
    per row, rounded to their dtype. room: number of columns to leave free beside the rows of the
    result and of the gradient (see rows_with_room). biases, experts, limit: with biases, and
    weights, the activation is kernels.weighted_clamped_swiglu; the biases get no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        both: torch.Tensor,
        weights: Any = None,
        room: int = 0,
        biases: Any = None,
        experts: Any = None,
        limit: float = 0.0,
    ) -> torch.Tensor:
        both = both.contiguous()
        if weights is not None:
            weights = weights.contiguous()
        if biases is not None:
            biases = biases.contiguous()
        inputs = both, weights, biases, experts
        ctx.save_for_backward(*inputs)
        ctx.room = room
        ctx.limit = limit
        out = rows_with_room(both, (*both.shape[:-1], both.shape[-1] // 2), room)
        stride = out.shape[-1] + room
        _launch_swiglu(_swiglu_kernel, _SWIGLU_BLOCK, limit, stride, *inputs, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        both, weights, *more = ctx.saved_tensors
        of_both = of_weights = None
        block = _SWIGLU_BLOCK
        stride = both.shape[-1] + ctx.room
        if ctx.needs_input_grad[0]:
            of_both = rows_with_room(both, both.shape, ctx.room)
        if weights is not None and ctx.needs_input_grad[1]:
            of_weights = torch.empty_like(weights)
            block = max(triton.next_power_of_2(grad.shape[-1]), block)
        tensors = both, weights, *more, grad.contiguous(), of_both, of_weights
        _launch_swiglu(_swiglu_backward_kernel, block, ctx.limit, stride, *tensors)
        return of_both, of_weights, None, None, None, None


# ---- AdamW


@jit
def _adam_kernel(
    weight, low, grad, mean, square, factor, n, seed, decay, beta2, new1, new2, rate, root, eps,
    SPLIT: tl.constexpr, CHANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    by = tl.load(factor).to(tl.float32)
    if by != by:
        return
    if SPLIT:
        bits = tl.load(weight + place, inside, 0).to(tl.int32) << 16
        bits += tl.load(low + place, inside, 0).to(tl.int32)
        w = bits.to(tl.float32, bitcast=True)
    else:
        w = tl.load(weight + place, inside, 0.0)
    g = tl.load(grad + place, inside, 0.0).to(tl.float32) * by
    m = tl.load(mean + place, inside, 0.0).to(tl.float32)
    v = tl.load(square + place, inside, 0.0).to(tl.float32)
    m += (g - m) * new1
    v = v * beta2 + g * g * new2
    w = w - w * decay - rate * m / (tl.sqrt(v) / root + eps)
    tl.store(mean + place, m, inside)
    if CHANCE:
        x = (place.to(tl.int32) ^ seed).to(tl.uint32, bitcast=True)
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        chance = (x >> 16).to(tl.int32)
        v_bits = (v.to(tl.int32, bitcast=True) + chance) & -65536
        v = v_bits.to(tl.float32, bitcast=True)
    tl.store(square + place, v, inside)
    if SPLIT:
        bits = w.to(tl.int32, bitcast=True)
        high = (bits + 32768) >> 16
        tl.store(weight + place, high.to(tl.int16), inside)
        tl.store(low + place, (bits - (high << 16)).to(tl.int16), inside)
    else:
        tl.store(weight + place, w, inside)


def update_by_adam(
    tensors: tuple[Any, ...], seed: int, numbers: tuple[Any, ...], by_chance: bool
) -> None:
    """Run kernels.AdamW's update of one parameter with one Triton kernel. The parameter, its low
    bits and its two moments change in place; nothing changes if the factor is NaN.

    tensors: (parameter, the low 16 bits of its float32 master or None, gradient, first moment,
    second moment, factor on the gradient). seed: for stochastic rounding. numbers: (lr * weight
    decay, beta2, 1 - beta1, 1 - beta2, bias-corrected lr, sqrt(1 - beta2^step), eps). by_chance: if
    True, round the bf16 second moment stochastically."""
    p, low, *more = tensors
    weight = p if low is None else p.view(torch.int16)
    constants = (low is not None, by_chance, _ADAM_BLOCK)
    grid = (triton.cdiv(p.numel(), _ADAM_BLOCK),)
    launch(_adam_kernel, grid, weight, low, *more, p.numel(), seed, *numbers, *constants)


# ---- token losses


@jit
def _statistics_kernel(
    logits, places, top, total, target, columns, width, LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    largest = tl.full((), LOWEST, tl.float32)
    summed = tl.full((), 0.0, tl.float32)
    for first in range(0, columns, BLOCK):
        place = first + tl.arange(0, BLOCK)
        values = tl.load(start + place, place < columns, -float("inf")).to(tl.float32)
        now = tl.maximum(largest, tl.max(values, 0))
        summed = summed * tl.exp(largest - now) + tl.sum(tl.exp(values - now), 0)
        largest = now
    tl.store(top + row, largest)
    tl.store(total + row, summed)
    place = tl.load(places + row)
    tl.store(target + row, tl.load(start + place, place >= 0, 0.0).to(tl.float32))


@jit
def _gradients_kernel(
    logits, places, at_label, lse, weights, softcap, columns, width, CAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * width + column
    value = tl.load(place, column < columns, -float("inf")).to(tl.float32)
    out = tl.exp(value - tl.load(lse + row))
    out = tl.where(column == tl.load(places + row), tl.load(at_label + row), out)
    if CAPPED:
        # padding is -inf: a slope of 0 and not of -inf, which would make 0 x inf
        tanh = tl.maximum(value / softcap, -1.0)
        out *= 1 - tanh * tanh
    if WEIGHTED:
        out *= tl.load(weights + row)
    tl.store(place, out, column < width)


def statistics_in_one_pass(
    logits: torch.Tensor, places: torch.Tensor, columns: int
) -> torch.Tensor:
    """Compute the parts of a cross-entropy loss for each row of logits, by a Triton kernel that
    reads the logits once -> float32 [3, rows]: the row's largest logit, the sum of exponentials
    relative to it, and the label's logit, or 0 if this rank has none for it. They are of
    this rank's columns alone.

    logits: [rows, V / tp], this rank's columns of a vocabulary of V. places: the column of each
    row's label, -1 if this rank has none for it. columns: number of columns without
    padding."""
    rows, width = logits.shape
    results = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    constants = dict(LOWEST=_LOWEST, BLOCK=8192, num_warps=16)
    tensors = logits, places, *results
    launch(_statistics_kernel, (rows,), *tensors, columns, width, **constants)
    return results


def gradients_in_one_pass(
    logits: torch.Tensor,
    places: torch.Tensor,
    at_label: torch.Tensor,
    lse: torch.Tensor,
    weights: torch.Tensor | None,
    head: Head,
) -> torch.Tensor:
    """Overwrite `logits`, this rank's columns [rows, V / tp] of a vocabulary of V, with the
    gradient of sum(weights * token losses), by a Triton kernel -> `logits`. With head.softcap the
    given logits are capped ones, and the gradient is with respect to the logits before the cap.

    places [rows]: column of each row's label, -1 if the label is on another rank. at_label: float32
    [rows], the label's probability minus 1. lse: float32 [rows], log-sum-exp over the whole
    vocabulary. weights: [rows]; None: 1 for each row. head: constants of the output layer."""
    rows, width = logits.shape
    flags = dict(CAPPED=head.softcap is not None, WEIGHTED=weights is not None)
    if weights is not None:
        weights = weights.float().contiguous()
    grid = rows, triton.cdiv(width, 4096)
    tensors = logits, places, at_label, lse.contiguous(), weights
    numbers = head.softcap or 1.0, head.columns, width
    launch(_gradients_kernel, grid, *tensors, *numbers, **flags, BLOCK=4096, num_warps=8)
    return logits


@jit
def _scaled_kernel(x, by, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, place < n, 0.0).to(tl.float32) * tl.load(by)
    tl.store(out + place, value, place < n)


def scaled_by_kernel(x: torch.Tensor, by: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Multiply a tensor x by one number on the GPU, with a Triton kernel: out = x * by -> out. by:
    float32 [1]. x and out have the same shape and strides, and no gaps in memory. torch's
    multiplication takes three times as long, because it reads the factor anew for each element."""
    grid = (triton.cdiv(x.numel(), _ADAM_BLOCK),)
    launch(_scaled_kernel, grid, x, by, out, x.numel(), _ADAM_BLOCK)
    return out


# ---- attention in two parts


@jit
def _join_kernel(
    first, lse1, second, lse2, out, lse, queries, heads, d, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < queries * heads
    of_query = (row % heads) * queries + row // heads
    one = tl.load(lse1 + of_query, exists, 0.0)
    two = tl.load(lse2 + of_query, exists, 0.0)
    most = tl.maximum(one, two)
    total = most + tl.log(tl.exp(one - most) + tl.exp(two - most))
    tl.store(lse + of_query, total, exists)
    column = tl.arange(0, BLOCK)
    inside = exists[:, None] & (column < d)[None, :]
    place = row[:, None] * d + column[None, :]
    joined = tl.load(first + place, inside, 0.0).to(tl.float32) * tl.exp(one - total)[:, None]
    joined += tl.load(second + place, inside, 0.0).to(tl.float32) * tl.exp(two - total)[:, None]
    tl.store(out + place, joined, inside)


def join_by_kernel(
    first: torch.Tensor,
    lse1: torch.Tensor,
    second: torch.Tensor,
    lse2: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Join two partial attentions of the same queries over different keys, by a Triton kernel. It
    writes the joined output to `out`, which must be contiguous, and returns the joined log-sum-exp.
    Each partial attention is an output [q, b, n, d] (q queries of b rows, n heads with d channels)
    and its log-sum-exp, float32 [b, n, q, 1]."""
    q, b, n, d = out.shape
    lse = torch.empty_like(lse1)
    block = triton.next_power_of_2(d)
    rows = max(_JOIN_BLOCK // block, 1)
    tensors = first.contiguous(), lse1, second.contiguous(), lse2, out, lse
    launch(_join_kernel, (triton.cdiv(q * b * n, rows),), *tensors, q, b * n, d, rows, block)
    return lse
