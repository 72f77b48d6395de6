"""Triton kernels of a layer, each with its gradient: RMS norm, queries, keys and values of an
attention layer, SwiGLU.

model_fused.py has the same in plain torch, and chooses. A kernel reads and writes each number once,
sums in float32, and always in the same order. Rows of [..., h] are tokens: [T, h].
"""

import functools

import torch
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK = 1024  # columns of a program of SwiGLU
_HEADS = 16  # heads of a program of rotated_heads
_AT_ONCE = 2  # programs a multiprocessor where each sums over its own tokens; twice of heads
_SHARED = 96 * 1024  # bytes of shared memory that a program may take: small GPUs have 99 KiB


@functools.cache
def _num_programs(device: torch.device) -> int:
    """How many programs share the tokens where each sums over its own."""
    return _AT_ONCE * torch.cuda.get_device_properties(device).multi_processor_count


if triton is not None:

    @triton.jit
    def _sum_kernel(partial, out, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        summed = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in range(0, rows, ROWS):
            row = first + tl.arange(0, ROWS)
            inside = (row < rows)[:, None] & (column < width)[None, :]
            summed += tl.load(partial + row[:, None] * width + column[None, :], inside, 0.0)
        tl.store(out + column, tl.sum(summed, 0), column < width)


def _sum(partial, dtype: torch.dtype):
    """The sum of partial float32 [programs, ...] over programs, in the dtype of a parameter."""
    out = partial.new_empty(partial.shape[1:], dtype=dtype)
    grid = (triton.cdiv(out.numel(), 32),)
    _sum_kernel[grid](partial, out, len(partial), out.numel(), ROWS=128, BLOCK=32)
    return out


def _stages(loaded: int) -> int:
    """Iterations of a loop whose loads are on their way at once; all but one wait in shared memory.
    loaded: bytes of an iteration."""
    return 3 if 2 * loaded <= _SHARED else 1


# -- RMS norm ---------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
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

    @triton.jit
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
        start, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
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


def _tile(width: int) -> dict:
    """Sizes of a program that holds whole rows."""
    block = triton.next_power_of_2(width)
    return dict(ROWS=max(4096 // block, 1), BLOCK=block, num_warps=16 if block > 4096 else 8)


class Norm(torch.autograd.Function):
    """x [..., h], weight [h] -> rms norm of x, and with `beside` also x itself, whose gradient is
    added in the norm's backward pass."""

    @staticmethod
    def forward(ctx, x, weight, eps: float, zero_centered: bool, beside: bool):
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        ctx.save_for_backward(x, weight)
        ctx.constants = eps, zero_centered
        width = x.shape[-1]
        rows, tile = x.numel() // width, _tile(width)
        if rows:
            grid = (triton.cdiv(rows, tile["ROWS"]),)
            _norm_kernel[grid](x, weight, out, rows, width, eps, zero_centered, **tile)
        return (out, x.view_as(x)) if beside else out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, passed=None):
        (x, weight), (eps, zero_centered) = ctx.saved_tensors, ctx.constants
        grad, of_x, width = grad.contiguous(), torch.empty_like(x), x.shape[-1]
        passed, trained = None if passed is None else passed.contiguous(), ctx.needs_input_grad[1]
        rows, tile = x.numel() // width, _tile(width)
        programs = min(triton.cdiv(rows, tile["ROWS"]), _num_programs(x.device))
        partial = x.new_empty(programs, width, dtype=torch.float32) if trained else None
        if rows:
            flags = zero_centered, passed is not None, trained
            stages = _stages(3 * tile["ROWS"] * tile["BLOCK"] * x.itemsize)
            numbers = rows, width, eps, *flags, stages
            tensors = x, weight, grad, passed, of_x, partial
            _norm_backward_kernel[(programs,)](*tensors, *numbers, **tile)
        return of_x, _sum(partial, weight.dtype) if trained else None, None, None, None


# -- queries, keys and values -------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _pairs(D: tl.constexpr, ROTARY: tl.constexpr, NEXT: tl.constexpr, HALF: tl.constexpr):
        """The channels of a head in pairs that turn together; those beyond ROTARY stay."""
        pair = tl.arange(0, HALF)
        turns = pair < ROTARY // 2
        if NEXT:
            first, second = 2 * pair, 2 * pair + 1
        else:
            first, second = pair, pair + ROTARY // 2
        first = tl.where(turns, first, pair + ROTARY // 2)
        second = tl.where(turns, second, pair + D // 2)
        return first, second, turns, pair < D // 2

    @triton.jit
    def _rotation(cos, sin, position, first, second, turns, moves, ROTARY: tl.constexpr):
        """cos and sin of the first and of the second channel of each pair, [heads, pairs]."""
        table = position * ROTARY
        one, zero = tl.full(first.shape, 1.0, tl.float32), tl.zeros(first.shape, tl.float32)
        cos1 = tl.load(cos + table + first, turns, 1.0).to(tl.float32)
        cos2 = tl.load(cos + table + second, turns, 1.0).to(tl.float32)
        sin1 = tl.load(sin + table + first, turns, 0.0).to(tl.float32)
        sin2 = tl.load(sin + table + second, turns, 0.0).to(tl.float32)
        cos1 = tl.where(moves, cos1[None, :], one[None, :])
        cos2 = tl.where(moves, cos2[None, :], one[None, :])
        sin1 = tl.where(moves, sin1[None, :], zero[None, :])
        sin2 = tl.where(moves, sin2[None, :], zero[None, :])
        return cos1, cos2, sin1, sin2

    @triton.jit
    def _scale(of_query, of_key, channel, inside, is_query, ZERO: tl.constexpr):
        """The norm's weights of a channel, by the kind of a head."""
        q = tl.load(of_query + channel, inside, 0.0).to(tl.float32)[None, :]
        k = tl.load(of_key + channel, inside, 0.0).to(tl.float32)[None, :]
        scale = tl.where(is_query, q, k)
        if ZERO:
            scale = 1.0 + scale
        return scale

    @triton.jit
    def _load(start, first, second, inside):
        """Both channels of pairs [heads, pairs]; start [heads, 1]: where a head begins."""
        a = tl.load(start + first[None, :], inside, 0.0).to(tl.float32)
        return a, tl.load(start + second[None, :], inside, 0.0).to(tl.float32)

    @triton.jit
    def _store(start, first, second, inside, a, b):
        tl.store(start + first[None, :], a, inside)
        tl.store(start + second[None, :], b, inside)

    @triton.jit
    def _parts(query, key, value, token, group, part, GROUPS: tl.constexpr, OWN: tl.constexpr,
               D: tl.constexpr):  # fmt: skip
        """Where heads [heads, 1] of a token begin, read as queries, as keys and as values."""
        of_token = token * GROUPS + group
        of_query = query + (of_token * (OWN - 2) + part) * D
        return of_query, key + of_token * D, value + of_token * D

    @triton.jit
    def _heads_kernel(
        mixed, bias, of_query, of_key, cos, sin, query, key, value, batch, eps,
        HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
        BIAS: tl.constexpr, NORMS: tl.constexpr, ZERO: tl.constexpr, NEXT: tl.constexpr,
        BLOCK: tl.constexpr, HALF: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
        OWN: tl.constexpr = HEADS // GROUPS  # heads of a group: queries, a key, a value
        group, part = head // OWN, head % OWN
        first, second, turns, exists = _pairs(D, ROTARY, NEXT, HALF)
        inside, is_query = (head < HEADS) & exists[None, :], part < OWN - 2
        is_value = part == OWN - 1
        moves = part != OWN - 1
        a, b = _load(mixed + (token * HEADS + head) * D, first, second, inside)
        if BIAS:
            more1, more2 = _load(bias + head * D, first, second, inside)
            a, b = a + more1, b + more2
        if NORMS:
            by = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
            normed1, normed2 = a * by, b * by
            if not ZERO:
                normed1 = normed1.to(query.dtype.element_ty).to(tl.float32)
                normed2 = normed2.to(query.dtype.element_ty).to(tl.float32)
            normed1 *= _scale(of_query, of_key, first, exists, is_query, ZERO)
            normed2 *= _scale(of_query, of_key, second, exists, is_query, ZERO)
            a, b = tl.where(moves, normed1, a), tl.where(moves, normed2, b)
        cos1, cos2, sin1, sin2 = _rotation(
            cos, sin, token // batch, first, second, turns, moves, ROTARY
        )
        a, b = a * cos1 - b * sin1, b * cos2 + a * sin2
        q, k, v = _parts(query, key, value, token, group, part, GROUPS, OWN, D)
        _store(q, first, second, inside & is_query, a, b)
        _store(k, first, second, inside & (part == OWN - 2), a, b)
        _store(v, first, second, inside & is_value, a, b)

    @triton.jit
    def _heads_backward_kernel(
        mixed, bias, of_query, of_key, cos, sin, query, key, value, out, of_bias, of_norms,
        tokens, batch, eps, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
        ROTARY: tl.constexpr, BIAS: tl.constexpr, NORMS: tl.constexpr, ZERO: tl.constexpr,
        NEXT: tl.constexpr, SUMS_BIAS: tl.constexpr, SUMS_NORMS: tl.constexpr,
        STAGES: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    ):  # fmt: skip
        head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
        OWN: tl.constexpr = HEADS // GROUPS
        group, part = head // OWN, head % OWN
        first, second, turns, exists = _pairs(D, ROTARY, NEXT, HALF)
        inside, is_query = (head < HEADS) & exists[None, :], part < OWN - 2
        is_key, is_value = part == OWN - 2, part == OWN - 1
        moves = part != OWN - 1
        if NORMS:
            scale1 = _scale(of_query, of_key, first, exists, is_query, ZERO)
            scale2 = _scale(of_query, of_key, second, exists, is_query, ZERO)
        none = tl.zeros((BLOCK, HALF), tl.float32)
        bias1, bias2, norm1, norm2 = none, none, none, none  # sums over tokens
        for number in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
            token = tl.full((), 0, tl.int64) + number
            q, k, v = _parts(query, key, value, token, group, part, GROUPS, OWN, D)
            a, b = _load(q, first, second, inside & is_query)
            a2, b2 = _load(k, first, second, inside & is_key)
            a3, b3 = _load(v, first, second, inside & is_value)
            a, b = a + a2 + a3, b + b2 + b3
            cos1, cos2, sin1, sin2 = _rotation(
                cos, sin, token // batch, first, second, turns, moves, ROTARY
            )
            a, b = a * cos1 + b * sin2, b * cos2 - a * sin1
            start = (token * HEADS + head) * D
            if NORMS:
                x1, x2 = _load(mixed + start, first, second, inside)
                if BIAS:
                    more1, more2 = _load(bias + head * D, first, second, inside)
                    x1, x2 = x1 + more1, x2 + more2
                by = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
                x1, x2 = x1 * by, x2 * by
                norm1, norm2 = norm1 + a * x1, norm2 + b * x2
                scaled1, scaled2 = a * scale1, b * scale2
                along = (tl.sum(scaled1 * x1, 1) + tl.sum(scaled2 * x2, 1))[:, None] / D
                a = tl.where(moves, by * (scaled1 - x1 * along), a)
                b = tl.where(moves, by * (scaled2 - x2 * along), b)
            _store(out + start, first, second, inside, a, b)
            bias1, bias2 = bias1 + a, bias2 + b
        if SUMS_BIAS:
            of_bias += tl.program_id(0) * HEADS * D
            _store(of_bias + head * D, first, second, inside, bias1, bias2)
        if SUMS_NORMS:
            of_norms += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2 * D
            tl.store(of_norms + first, tl.sum(tl.where(is_query, norm1, 0.0), 0), exists)
            tl.store(of_norms + second, tl.sum(tl.where(is_query, norm2, 0.0), 0), exists)
            tl.store(of_norms + D + first, tl.sum(tl.where(is_key, norm1, 0.0), 0), exists)
            tl.store(of_norms + D + second, tl.sum(tl.where(is_key, norm2, 0.0), 0), exists)


class RotatedHeads(torch.autograd.Function):
    """What model_fused.rotated_heads says, for even d."""

    @staticmethod
    def forward(ctx, mixed, bias, of_query, of_key, cos, sin, groups, d, eps, zero, interleaved):
        mixed, cos, sin = mixed.contiguous(), cos.contiguous(), sin.contiguous()
        s, b, heads = *mixed.shape[:2], mixed.shape[2] // d
        query = mixed.new_empty(s, b, heads - 2 * groups, d)
        key, value = mixed.new_empty(s, b, groups, d), mixed.new_empty(s, b, groups, d)
        norms = of_query is not None
        ctx.save_for_backward(mixed if norms else None, bias, of_query, of_key, cos, sin)
        ctx.shape, ctx.dtype = mixed.shape, mixed.dtype
        ctx.eps, ctx.flags = eps, (bias is not None, norms, zero, interleaved)
        ctx.sizes = heads, groups, d, cos.shape[-1]
        tile = dict(BLOCK=_HEADS, HALF=triton.next_power_of_2(d // 2))
        if s * b:
            tensors = mixed, bias, of_query, of_key, cos, sin, query, key, value
            grid = s * b, triton.cdiv(heads, _HEADS)
            _heads_kernel[grid](*tensors, b, eps, *ctx.sizes, *ctx.flags, **tile)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        mixed, bias, of_query, of_key, cos, sin = ctx.saved_tensors
        (s, b, _), (heads, _, d, _) = ctx.shape, ctx.sizes
        out = torch.empty(ctx.shape, dtype=ctx.dtype, device=cos.device)
        chunks, tokens = triton.cdiv(heads, _HEADS), s * b
        sums = ctx.needs_input_grad[1], any(ctx.needs_input_grad[2:4])
        programs = min(tokens, max(2 * _num_programs(cos.device) // chunks, 1))
        floats = dict(dtype=torch.float32, device=cos.device)
        of_bias = torch.empty(programs, heads * d, **floats) if sums[0] else None
        of_norms = torch.empty(programs * chunks, 2, d, **floats) if sums[1] else None
        if tokens:
            grads = [grad.contiguous() for grad in grads]
            tensors = mixed, bias, of_query, of_key, cos, sin, *grads, out, of_bias, of_norms
            tile = dict(BLOCK=_HEADS, HALF=triton.next_power_of_2(d // 2))
            stages = _stages(10 * _HEADS * tile["HALF"] * out.itemsize)
            numbers = tokens, b, ctx.eps, *ctx.sizes, *ctx.flags, *sums, stages
            _heads_backward_kernel[(programs, chunks)](*tensors, *numbers, **tile)
        found = [out, None, None, None]
        if sums[0]:
            found[1] = _sum(of_bias, bias.dtype)
        if sums[1]:
            found[2:] = _sum(of_norms, of_query.dtype).unbind(0)
        return *found, *[None] * 7


# -- SwiGLU -----------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _swiglu_kernel(both, out, f: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < f
        gate = tl.load(both + row * 2 * f + column, inside).to(tl.float32)
        up = tl.load(both + row * 2 * f + f + column, inside).to(tl.float32)
        # silu is rounded before it multiplies, as two operations of torch do
        silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + row * f + column, silu * up, inside)

    @triton.jit
    def _swiglu_backward_kernel(both, grad, out, f: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < f
        gate = tl.load(both + row * 2 * f + column, inside).to(tl.float32)
        up = tl.load(both + row * 2 * f + f + column, inside).to(tl.float32)
        g = tl.load(grad + row * f + column, inside).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        slope = sigmoid + gate * sigmoid * (1 - sigmoid)
        tl.store(out + row * 2 * f + column, g * up * slope, inside)
        tl.store(out + row * 2 * f + f + column, g * gate * sigmoid, inside)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [..., 2 f] in one kernel each way; only its input is kept."""

    @staticmethod
    def forward(ctx, both):
        both = both.contiguous()
        ctx.save_for_backward(both)
        f = both.shape[-1] // 2
        out = both.new_empty(*both.shape[:-1], f)
        if out.numel():
            _swiglu_kernel[(out.numel() // f, triton.cdiv(f, _BLOCK))](both, out, f, _BLOCK)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (both,) = ctx.saved_tensors
        grad, out, f = grad.contiguous(), torch.empty_like(both), both.shape[-1] // 2
        if out.numel():
            grid = (grad.numel() // f, triton.cdiv(f, _BLOCK))
            _swiglu_backward_kernel[grid](both, grad, out, f, _BLOCK)
        return out
