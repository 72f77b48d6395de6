"""Operations as one kernel on a GPU, and in plain torch elsewhere: norms, rotary embedding,
activations, AdamW.

The operations of every model have a Triton kernel; those of some (experts, caps) are compiled by
torch.compile. `switch` turns both off; a machine without a compiler runs plain torch, with a
warning.
Letters: s positions, b rows, n query heads, g groups (heads of keys and of values), d channels of a
head.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:  # no kernel below has a caller then
    triton = None
    tl: Any = SimpleNamespace(constexpr=None)

_SWIGLU_BLOCK = 1024  # columns of a program of SwiGLU
_ADAM_BLOCK = 1024  # elements of a program of AdamW
_HEADS = 16  # heads of a program of rotated_heads
_PROGRAMS = 2  # of a multiprocessor, if each sums over its part of the tokens; twice of heads
_SHARED = 96 * 1024  # bytes of shared memory that a program may take: small GPUs have 99 KiB

# ---- on or off

_torch_compile: bool | None = None  # the key of the run
_NO_KERNELS = (
    "no kernel can be compiled here ({}): norms, rotary embedding, activations and the loss run as "
    "single operations, and training is slower; torch_compile: false says so without a try"
)
_NO_TORCH_COMPILE = (
    "torch.compile does not work here ({}): experts, caps and some rotary embeddings run as single "
    "operations, and training is slower"
)
_NOT_COMPILED = (
    "torch.compile fails for {} ({}): it runs as single operations, and training is slower"
)


def switch(torch_compile: bool | None) -> None:
    """Compile on CUDA from now on (None or True), or not (False). Warns about True without a
    GPU."""
    global _torch_compile
    _torch_compile = torch_compile
    if torch_compile and not torch.cuda.is_available():
        warnings.warn(
            "torch_compile: true: there is no GPU, and on a CPU nothing is compiled", stacklevel=2
        )


def why_no_kernels() -> str | None:
    """The first line of the error from compiling a Triton kernel, None if it runs here: a machine
    may lack Triton or a C compiler."""
    if triton is None:
        return "Triton cannot be imported"
    return _failure(lambda one: SwiGLU.apply(one.repeat(2)))


def why_no_torch_compile() -> str | None:
    """The same of torch.compile, which needs a Python that it supports and folders as well."""
    return _failure(lambda one: torch.compile(F.silu)(one))


def _failure(silu: Callable) -> str | None:
    """The first line of an error of a silu of a number on a GPU; None without an error."""
    try:
        one = torch.ones(1, device="cuda")
        is_right = torch.allclose(silu(one), F.silu(one), atol=1e-3)
        return None if is_right else "it gives wrong numbers"
    except Exception as error:
        return first_line(error)


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type without one."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@functools.cache
def works(why_not: Callable[[], str | None], warning: str) -> bool:
    """True if a compiler works: tried once, with a warning if it fails."""
    reason = why_not()
    if reason is not None:
        warnings.warn(warning.format(reason), stacklevel=2)
    return reason is None


def compiles(tensor: torch.Tensor) -> bool:
    """True if functions of this tensor run compiled."""
    is_on_gpu = tensor.is_cuda and _torch_compile is not False
    return is_on_gpu and works(why_no_kernels, _NO_KERNELS)


def _compile_both_passes(graph, inputs):
    """torch.compile's own backend, which would compile a backward pass when that begins: an error
    of it comes here as well, where `compiled` can still choose."""
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        return torch._inductor.compile(graph, inputs)


def compiled(function):
    """Decorate a function of tensors and constants: torch.compile, if its first argument is on a
    GPU. A function that cannot be compiled runs as it is from then on, with a warning.

    A second length of rows compiles once more, for any length.
    """
    fast = None

    @functools.wraps(function)
    def call(first, *args):
        nonlocal fast
        # torch.compile is tried for the first function that needs it: starting it takes seconds
        if not (compiles(first) and works(why_no_torch_compile, _NO_TORCH_COMPILE)):
            return function(first, *args)
        fast = fast or torch.compile(function, backend=_compile_both_passes)
        try:
            return fast(first, *args)
        except torch._dynamo.exc.TorchDynamoException as error:
            out = function(first, *args)  # raises what is wrong with the arguments, if that is it
            warnings.warn(_NOT_COMPILED.format(function.__name__, first_line(error)), stacklevel=2)
            fast = function
            return out

    return call


def jit(function):
    """Decorate a kernel of Triton."""
    if triton is None:
        return function
    # each step has another seed: a kernel specialised to one value would be compiled again
    return triton.jit(function, do_not_specialize=["seed"])


def launch(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """Run the programs of a grid; an empty one has none."""
    if all(grid):
        kernel[grid](*arguments, **constants)


@functools.cache
def num_programs(device: torch.device) -> int:
    """Programs of a kernel, if each sums over its part of the tokens."""
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


def _gradient(partial, parameter):
    """The gradient [width] of a parameter: the sum of partial float32 [programs, width] over
    programs. Added to a float32 main_grad of megatron's DDP, and an empty tensor for its hook, if
    there is one."""
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
    """Iterations of a loop with loads in flight at once; all but one wait in shared memory.
    loaded: bytes of an iteration."""
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


def _tile(x) -> tuple[int, dict]:
    """(programs of whole rows of x, sizes of each)."""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    rows = max(4096 // block, 1)
    tile = dict(ROWS=rows, BLOCK=block, num_warps=16 if block > 4096 else 8)
    return triton.cdiv(x.numel() // width, rows), tile


class Norm(torch.autograd.Function):
    """x [..., h], weight [h] -> rms norm of x, and with `beside` also x itself; the gradients of
    both are added in the norm's backward pass."""

    @staticmethod
    def forward(ctx, x, weight, eps: float, zero_centered: bool, beside: bool):
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
    def backward(ctx, grad, passed=None):
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


def rms_norm(x, weight, eps: float, zero_centered: bool = False):
    """x / rms(x) * weight over the last dimension, the mean square in float32, in x's dtype.

    zero_centered: the weights lie around zero (Gemma's): 1 is added to them, and they multiply
    before the rounding.
    """
    if compiles(x):
        return Norm.apply(x, weight, eps, zero_centered, False)
    sizes = x.shape[-1:]
    if zero_centered:
        return F.rms_norm(x.float(), sizes, 1.0 + weight.float(), eps).to(x.dtype)
    if x.dtype == torch.float32:
        return F.rms_norm(x, sizes, weight, eps)
    # the rounding to bf16 comes before the weight, as in the Hugging Face model
    return weight * F.rms_norm(x.float(), sizes, None, eps).to(x.dtype)


def norm_beside(x, weight, eps: float, zero_centered: bool):
    """(rms_norm of x, x): the norm's backward kernel sums the gradients of both, at no cost of
    another kernel."""
    if compiles(x):
        return Norm.apply(x, weight, eps, zero_centered, True)
    return rms_norm(x, weight, eps, zero_centered), x


# ---- queries, keys and values


@jit
def _pairs(D: tl.constexpr, ROTARY: tl.constexpr, NEXT: tl.constexpr, HALF: tl.constexpr):
    """The channels of a head in pairs that turn together; those beyond ROTARY stay."""
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
    """cos and sin of the first and of the second channel of each pair, [heads, pairs]."""
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
    """The norm's weights of a channel, by the kind of a head."""
    q = tl.load(of_query + channel, inside, 0.0).to(tl.float32)[None, :]
    k = tl.load(of_key + channel, inside, 0.0).to(tl.float32)[None, :]
    scale = tl.where(is_query, q, k)
    if ZERO:
        scale = 1.0 + scale
    return scale


@jit
def _load(start, first, second, inside):
    """Both channels of pairs [heads, pairs]; start [heads, 1] of each head."""
    a = tl.load(start + first[None, :], inside, 0.0).to(tl.float32)
    return a, tl.load(start + second[None, :], inside, 0.0).to(tl.float32)


@jit
def _store(start, first, second, inside, a, b):
    tl.store(start + first[None, :], a, inside)
    tl.store(start + second[None, :], b, inside)


@jit
def _parts(query, key, value, token, group, part, GROUPS: tl.constexpr, OWN: tl.constexpr,
           D: tl.constexpr):  # fmt: skip
    """Starts of the heads [heads, 1] of a token, read as queries, as keys and as values."""
    of_token = token * GROUPS + group
    of_query = query + (of_token * (OWN - 2) + part) * D
    return of_query, key + of_token * D, value + of_token * D


@jit
def _heads_kernel(
    mixed, bias, of_query, of_key, cos, sin, query, key, value, sharing, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    BIAS: tl.constexpr, NORMS: tl.constexpr, ZERO: tl.constexpr, NEXT: tl.constexpr,
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
    if BIAS:
        more1, more2 = _load(bias + head * D, first, second, inside)
        a = a + more1
        b = b + more2
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
    mixed, bias, of_query, of_key, cos, sin, query, key, value, out, of_bias, of_norms,
    tokens, sharing, eps, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
    ROTARY: tl.constexpr, BIAS: tl.constexpr, NORMS: tl.constexpr, ZERO: tl.constexpr,
    NEXT: tl.constexpr, SUMS_BIAS: tl.constexpr, SUMS_NORMS: tl.constexpr,
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
    bias1, bias2, norm1, norm2 = none, none, none, none  # sums over tokens
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
            if BIAS:
                more1, more2 = _load(bias + head * D, first, second, inside)
                x1 = x1 + more1
                x2 = x2 + more2
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
        bias1 = bias1 + a
        bias2 = bias2 + b
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
    """rotated_heads, for even d."""

    @staticmethod
    def forward(ctx, mixed, bias, of_query, of_key, cos, sin, groups, d, eps, zero, interleaved):
        mixed = mixed.contiguous()
        cos = cos.contiguous()
        sin = sin.contiguous()
        s, b, width = mixed.shape
        heads = width // d
        query = mixed.new_empty(s, b, heads - 2 * groups, d)
        key = mixed.new_empty(s, b, groups, d)
        value = mixed.new_empty(s, b, groups, d)
        norms = of_query is not None
        ctx.save_for_backward(mixed if norms else None, bias, of_query, of_key, cos, sin)
        ctx.shape = mixed.shape
        ctx.dtype = mixed.dtype
        sizes = heads, groups, d, cos.shape[-1]
        sharing = b if cos.shape[1] == 1 else 1  # tokens with one row of the tables
        ctx.numbers = sharing, eps, *sizes, bias is not None, norms, zero, interleaved
        ctx.tile = dict(BLOCK=_HEADS, HALF=triton.next_power_of_2(d // 2))
        ctx.grid = s * b, triton.cdiv(heads, _HEADS)
        tensors = mixed, bias, of_query, of_key, cos, sin, query, key, value
        launch(_heads_kernel, ctx.grid, *tensors, *ctx.numbers, **ctx.tile)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        mixed, bias, of_query, of_key, cos, sin = ctx.saved_tensors
        out = torch.empty(ctx.shape, dtype=ctx.dtype, device=cos.device)
        width = ctx.shape[-1]
        d = ctx.numbers[4]
        tokens, chunks = ctx.grid
        sums_bias = ctx.needs_input_grad[1]
        sums_norms = any(ctx.needs_input_grad[2:4])
        programs = min(tokens, max(2 * num_programs(cos.device) // chunks, 1))
        empty = functools.partial(torch.empty, dtype=torch.float32, device=cos.device)
        of_bias = of_norms = None
        if sums_bias:
            of_bias = empty(programs, width)
        if sums_norms:
            of_norms = empty(programs * chunks, 2, d)
        grads = [grad.contiguous() for grad in grads]
        tensors = mixed, bias, of_query, of_key, cos, sin, *grads, out, of_bias, of_norms
        stages = iterations_at_once(10 * _HEADS * ctx.tile["HALF"] * out.itemsize)
        numbers = tokens, *ctx.numbers, sums_bias, sums_norms, stages
        launch(_heads_backward_kernel, (programs, chunks), *tensors, *numbers, **ctx.tile)
        gradients = [out, None, None, None]
        if sums_bias:
            gradients[1] = _gradient(of_bias, bias)
        for i, weight in enumerate((of_query, of_key)):
            if ctx.needs_input_grad[2 + i]:
                gradients[2 + i] = _gradient(of_norms[:, i], weight)
        return *gradients, *[None] * 7


def plain_rotation(x, cos, sin, interleaved: bool):
    size = cos.shape[-1]
    turned = x[..., :size]
    if interleaved:
        quarter_turn = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        quarter_turn = torch.cat((-second, first), -1)
    turned = turned * cos + quarter_turn * sin
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)


@compiled
def rotate(query, key, cos, sin, interleaved: bool = False):
    """Rotary embedding of query [s, b, n, d] and key [s, b, g, d] by tables [s, 1, 1, rotary], or
    [s, b, 1, rotary], in their dtype.

    Channels beyond `rotary` stay. The others turn in pairs: channels i and i + rotary / 2, or
    interleaved neighbours.
    """
    return plain_rotation(query, cos, sin, interleaved), plain_rotation(key, cos, sin, interleaved)


def split_heads(mixed, bias, groups: int, d: int):
    """Query [s, b, n, d], key and value [s, b, g, d] of mixed [s, b, g * (n / g + 2) * d]: each
    group's queries, then its key and its value. bias [g * (n / g + 2) * d], or None, is added
    first."""
    if bias is not None:
        mixed = mixed + bias
    s, b, _ = mixed.shape
    mixed = mixed.view(s, b, groups, -1, d)
    query = mixed[:, :, :, :-2].reshape(s, b, -1, d)
    # contiguous: a view would keep all three alive
    return query, mixed[:, :, :, -2].contiguous(), mixed[:, :, :, -1].contiguous()


def rotated_heads(mixed, bias, groups: int, d: int, norms, cos, sin, interleaved: bool):
    """split_heads, rms_norm of queries and keys, rotate, in one kernel. norms: (weight of queries,
    weight of keys, eps, zero_centered), or None."""
    of_query, of_key, *constants = norms or (None, None, 0.0, False)
    if compiles(mixed) and d % 2 == 0:
        tensors = mixed, bias, of_query, of_key, cos, sin
        return RotatedHeads.apply(*tensors, groups, d, *constants, interleaved)
    query, key, value = split_heads(mixed, bias, groups, d)
    if norms is not None:
        query = rms_norm(query, of_query, *constants)
        key = rms_norm(key, of_key, *constants)
    return *rotate(query, key, cos, sin, interleaved), value


# ---- SwiGLU


@jit
def _gate_and_up(both, f: tl.constexpr, BLOCK: tl.constexpr):
    """(row, columns, those inside, both halves) of a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    gate = tl.load(both + row * 2 * f + column, inside).to(tl.float32)
    up = tl.load(both + row * 2 * f + f + column, inside).to(tl.float32)
    return row, column, inside, gate, up


@jit
def _swiglu_kernel(both, out, f: tl.constexpr, BLOCK: tl.constexpr):
    row, column, inside, gate, up = _gate_and_up(both, f, BLOCK)
    # silu is rounded before it multiplies, as two operations of torch do
    silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * f + column, silu * up, inside)


@jit
def _swiglu_backward_kernel(both, grad, out, f: tl.constexpr, BLOCK: tl.constexpr):
    row, column, inside, gate, up = _gate_and_up(both, f, BLOCK)
    g = tl.load(grad + row * f + column, inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    slope = sigmoid + gate * sigmoid * (1 - sigmoid)
    tl.store(out + row * 2 * f + column, g * up * slope, inside)
    tl.store(out + row * 2 * f + f + column, g * gate * sigmoid, inside)


def _launch_swiglu(kernel, both, *tensors) -> None:
    width = both.shape[-1]
    f = width // 2
    grid = both.numel() // width, triton.cdiv(f, _SWIGLU_BLOCK)
    launch(kernel, grid, both, *tensors, f, _SWIGLU_BLOCK)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [..., 2 f] in one kernel each way; only its input is saved."""

    @staticmethod
    def forward(ctx, both):
        both = both.contiguous()
        ctx.save_for_backward(both)
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        _launch_swiglu(_swiglu_kernel, both, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (both,) = ctx.saved_tensors
        out = torch.empty_like(both)
        _launch_swiglu(_swiglu_backward_kernel, both, grad.contiguous(), out)
        return out


def swiglu(both):
    """silu(gate) * up of both [..., 2 f], gate before up -> [..., f]: the activation of megatron's
    MLPs."""
    if compiles(both):
        return SwiGLU.apply(both)
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@compiled
def weighted_swiglu(both, weights):
    """silu(gate) * up * weights of both [T, 2 f] and weights [T] -> [T, f] in both's dtype: the
    activation of an expert."""
    gate, up = both.chunk(2, -1)
    return (F.silu(gate) * up * weights.unsqueeze(-1)).to(both.dtype)


QUICK_GELU = 1.702  # x sigmoid(1.702 x) is close to gelu


@compiled
def weighted_clamped_swiglu(both, weights, limit: float):
    """(up + 1) * gate * sigmoid(1.702 gate) * weights of both [T, 2 f], gate before up, and weights
    [T] -> [T, f] in both's dtype: the activation of an expert of gpt_oss. gate is at most limit,
    and up between -limit and limit."""
    gate, up = both.float().chunk(2, -1)  # of the products here bf16 would round each
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    product = (up + 1) * (gate * torch.sigmoid(QUICK_GELU * gate))
    return (product * weights.unsqueeze(-1)).to(both.dtype)


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


def join(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The float32 master of a bf16 weight and its low bits, int16 of the same shape."""
    return ((weight.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split_into(master: torch.Tensor, weight: torch.Tensor, low: torch.Tensor) -> None:
    """Put a float32 master into a bf16 weight and its low bits."""
    bits = master.view(torch.int32)
    high = (bits + 32768) >> 16
    weight.view(torch.int16).copy_(high)
    low.copy_(bits - (high << 16))


def _wrapped(constant: int) -> int:
    """The int32 of the same bits."""
    return (constant + 2**31) % 2**32 - 2**31


def round_by_chance(x: torch.Tensor, seed: int) -> torch.Tensor:
    """x, float32 and not negative, as bf16: up or down by chance, in proportion."""
    bits = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape) ^ seed
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _wrapped(0x846CA68B)
    chance = (bits >> 16) & 0xFFFF
    return ((x.view(torch.int32) + chance) & -65536).view(torch.float32).bfloat16()


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay, in less memory: float32 masters of bf16 weights take 16
    bits more, and moments can be bf16.

        m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,   g = factor x gradient
        w = (1 - lr decay) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

    in float32, whatever the dtypes in memory, in one pass over it. A master weight w is bf16(w),
    the model's weight, and an int16, the rest of its bits: together they are w, bit for bit. Ties
    round away from zero.

    v in bf16 rounds up or down by chance, in proportion: with b2 = 0.999 it changes by less than
    half of bf16's last bit, and rounded to the nearest it would never fall. The chance is a hash of
    step and element, so that replicas and a resumed run draw the same.

    halves: exp_avg or exp_avg_sq or both, for bf16. A parameter's gradient is its decoupled_grad if
    it has one (megatron's name for one of another dtype), else grad. factor: a number, or a float64
    tensor of one on the gradients' device, not read on the host; if it is NaN, nothing is updated.
    """

    def __init__(self, groups, lr, betas, eps, halves=()):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.dtypes = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
        self.dtypes |= dict.fromkeys(halves, torch.bfloat16)
        self.factor: torch.Tensor | float = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        factor = self.factor
        for group, p, grad in self._gradients():
            if not torch.is_tensor(factor):
                factor = torch.full((), factor, dtype=torch.float64, device=p.device)
            self._update(group, p, grad, factor)

    def take_back(self) -> None:
        """Uncount the last step(), if its factor was NaN."""
        for _, p, _ in self._gradients():
            self.state[p]["step"] -= 1

    def _gradients(self) -> Iterator[tuple[dict, torch.Tensor, torch.Tensor]]:
        """(group, parameter, gradient) of the parameters with a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                grad = getattr(p, "decoupled_grad", p.grad)
                if grad is not None:
                    yield group, p, grad

    def dtypes_of(self, p: torch.Tensor) -> dict[str, torch.dtype]:
        """The dtypes of a parameter's tensors of its shape, by their names."""
        return self.dtypes

    def state_of(self, p: torch.Tensor) -> dict:
        """A parameter's state: zeros at first."""
        state = self.state[p]
        state.setdefault("step", torch.tensor(0.0))
        for name, dtype in self.dtypes_of(p).items():
            if name not in state:
                state[name] = torch.zeros_like(p, dtype=dtype)
            state[name] = state[name].to(dtype)  # a checkpoint may have another one
        if p.dtype == torch.bfloat16 and "low" not in state:
            state["low"] = torch.zeros_like(p, dtype=torch.int16)
        return state

    def master(self, p: torch.Tensor) -> torch.Tensor:
        """The float32 value of a parameter."""
        if p.dtype == torch.float32:
            return p.detach()
        return join(p.detach(), self.state_of(p)["low"])

    @torch.no_grad()
    def fill(self, p: torch.Tensor, values: dict) -> None:
        """Set a parameter's state: "step", the moments, and optionally "master"."""
        state = self.state_of(p)
        state["step"] = torch.tensor(float(values["step"]))
        for name in self.dtypes_of(p):
            state[name].copy_(values[name])
        if "master" in values:
            self._set_master(p, values["master"].to(p.device))

    def _set_master(self, p: torch.Tensor, master: torch.Tensor) -> None:
        low = self.state[p].get("low")
        if low is None:
            p.copy_(master)
        else:
            split_into(master, p, low)

    def forget_masters(self) -> None:
        """Take the weights as masters, after they were set elsewhere."""
        for state in self.state.values():
            if "low" in state:
                state["low"].zero_()

    def _update(self, group: dict, p: torch.Tensor, grad: torch.Tensor, factor) -> None:
        state = self.state_of(p)
        step = int(state["step"]) + 1
        beta1, beta2 = group["betas"]
        state["step"] = torch.tensor(float(step))  # on the CPU, for reads without a sync
        m = state["exp_avg"]
        v = state["exp_avg_sq"]
        low = state.get("low")
        decay = group["lr"] * group["weight_decay"]
        rate = group["lr"] / (1 - beta1**step)
        root = (1 - beta2**step) ** 0.5
        eps = group["eps"]
        seed = _wrapped(step * 0x9E3779B9 % 2**32)
        by_chance = v.dtype == torch.bfloat16
        if compiles(p):
            weight = p if low is None else p.view(torch.int16)
            numbers = (decay, beta2, 1 - beta1, 1 - beta2, rate, root, eps)
            constants = (low is not None, by_chance, _ADAM_BLOCK)
            grid = (triton.cdiv(p.numel(), _ADAM_BLOCK),)
            tensors = weight, low, grad, m, v, factor
            launch(_adam_kernel, grid, *tensors, p.numel(), seed, *numbers, *constants)
            return
        if factor.isnan():
            return
        g = grad.float() * factor.float()
        w = self.master(p)
        mean = m.float().lerp(g, 1 - beta1)
        square = (v.float() * beta2).addcmul_(g, g, value=1 - beta2)
        w = torch.sub(w, w, alpha=decay).addcdiv_(
            mean, (square.sqrt() / root).add_(eps), value=-rate
        )
        m.copy_(mean)
        v.copy_(round_by_chance(square, seed) if by_chance else square)
        self._set_master(p, w)
