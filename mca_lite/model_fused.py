"""The mathematics between two matrix products, each as one kernel on a GPU: norms, the split of
queries, keys and values, rotary embedding, gated activations.

Every function here is plain torch. On CUDA torch.compile makes a kernel of it, where there is a
compiler (Triton) and torch_compile is not false; elsewhere it runs as it is written. SwiGLU is a
Triton kernel by hand: its backward pass writes both halves at once, which a compiled concatenation
does not.

Letters: s sequence, b batch, n heads and g query groups of this rank, d head size, f columns of an
MLP on this rank.
"""

import functools
import warnings

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_asked: bool | None = None  # torch_compile of the run


def switch(torch_compile: bool | None) -> None:
    """Compile on CUDA from now on (None or True), or not (False). Warns where True cannot be
    had."""
    global _asked
    _asked = torch_compile
    if torch_compile and not torch.cuda.is_available():
        warnings.warn(
            "torch_compile: true: there is no GPU, and on a CPU nothing is compiled", stacklevel=2
        )


def why_no_compiler() -> str | None:
    """The first line of what torch.compile raised, None where it makes a kernel that runs here: a
    machine may lack Triton or a C compiler."""
    try:
        doubled = torch.compile(lambda x: x + x)(torch.ones(2, device="cuda"))
        is_right = bool((doubled == 2).all())
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    if triton is None:
        return "Triton cannot be imported"
    return None if is_right else "it gives wrong numbers"


@functools.cache
def _compiler_works() -> bool:
    """Whether torch.compile works here: tried once, with a warning where it does not."""
    reason = why_no_compiler()
    if reason is not None:
        warnings.warn(
            f"torch.compile does not work here ({reason}): norms, rotary embedding, activations "
            "and the loss run as single operations, and training is slower; torch_compile: false "
            "says so without a try",
            stacklevel=2,
        )
    return reason is None


def compiles(tensor: torch.Tensor) -> bool:
    """Whether functions of this tensor run compiled."""
    return tensor.is_cuda and _asked is not False and _compiler_works()


def is_on() -> bool:
    """Whether functions run compiled on this rank's device."""
    return torch.cuda.is_available() and compiles(torch.empty(0, device="cuda"))


def compiled(function):
    """The function, which runs compiled where its first argument is on a GPU. It must be given
    tensors and constants.

    A second length of rows compiles once more, for any length; each later one is served by that.
    """
    fast = None

    @functools.wraps(function)
    def call(first, *args):
        nonlocal fast
        if not compiles(first):
            return function(first, *args)
        if fast is None:
            fast = torch.compile(function)
        return fast(first, *args)

    return call


def _divided_by_rms(x, weight, eps: float):
    """x / rms(x) * weight over the last dimension, without a rounding in between."""
    if not torch.compiler.is_compiling():
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    # rms_norm would stay a kernel of its own
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def _rms_norm(x, weight, eps: float, zero_centered: bool = False):
    """x / rms(x) * weight over the last dimension, the mean square in float32, in x's dtype.

    zero_centered: the weights lie around zero (Gemma's): 1 is added to them, and they multiply
    before the rounding.
    """
    if zero_centered:
        return _divided_by_rms(x.float(), 1.0 + weight.float(), eps).to(x.dtype)
    if x.dtype == torch.float32:
        return _divided_by_rms(x, weight, eps)
    # the rounding to bf16 comes before the weight, as in the Hugging Face model
    return weight * _divided_by_rms(x.float(), None, eps).to(x.dtype)


rms_norm = compiled(_rms_norm)


@compiled
def _norm_forward(x, weight, eps: float, zero_centered: bool):
    """(rms_norm of x, 1 / rms(x) float32 [..., 1])"""
    by = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    normed = x.float() * by
    if zero_centered:
        return (normed * (1.0 + weight.float())).to(x.dtype), by
    return weight * normed.to(x.dtype), by


@compiled
def _norm_backward(grad, passed, x, by, weight, zero_centered: bool, trained: bool):
    """(gradient of x, which is used with its norm: `grad` is that of the norm and `passed` that
    of x beside it; gradient of the weight, or None)"""
    grad, normed = grad.float(), x.float() * by
    scaled = grad * (1.0 + weight.float() if zero_centered else weight.float())
    inner = by * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    of_x = (inner + passed.float()).to(x.dtype)
    if not trained:
        return of_x, None
    return of_x, (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)


class _NormBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, zero_centered):
        normed, by = _norm_forward(x, weight, eps, zero_centered)
        ctx.save_for_backward(x, by, weight)
        ctx.zero_centered = zero_centered
        return normed, x.view_as(x)

    @staticmethod
    def backward(ctx, grad, passed):
        trained = ctx.needs_input_grad[1]
        saved = ctx.saved_tensors
        return *_norm_backward(grad, passed, *saved, ctx.zero_centered, trained), None, None


def norm_beside(x, weight, eps: float, zero_centered: bool):
    """(rms_norm of x, x): where both are used, the sum of their gradients is taken in the norm's
    backward pass, and costs no kernel of its own. By formulas of its own, on any device."""
    return _NormBeside.apply(x, weight, eps, zero_centered)


def _rotate(x, cos, sin, interleaved: bool):
    size = cos.shape[-1]
    turned, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    if interleaved:
        quarter_turn = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        quarter_turn = torch.cat((-second, first), -1)
    turned = turned * cos + quarter_turn * sin
    return turned if rest is None else torch.cat((turned, rest), -1)


@compiled
def rotate(query, key, cos, sin, interleaved: bool = False):
    """Rotary embedding of query [s, b, n, d] and key [s, b, g, d] by tables [s, 1, 1, rotary] in
    their dtype.

    Channels beyond `rotary` stay. A pair that turns: channels i and i + rotary / 2, or interleaved
    neighbours.
    """
    return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved)


def _split_heads(mixed, bias, groups: int, d: int):
    """Query [s, b, n, d], key and value [s, b, g, d] of mixed [s, b, g * (n / g + 2) * d], in which
    each group's queries stand before its key and value. bias [g * (n / g + 2) * d], or None, is
    added first."""
    s, b = mixed.shape[:2]
    mixed = (mixed if bias is None else mixed + bias).view(s, b, groups, -1, d)
    query = mixed[:, :, :, :-2].reshape(s, b, -1, d)
    # contiguous: a view would keep all three alive
    return query, mixed[:, :, :, -2].contiguous(), mixed[:, :, :, -1].contiguous()


split_heads = compiled(_split_heads)


@compiled
def rotated_heads(mixed, bias, groups: int, d: int, norms, cos, sin, interleaved: bool):
    """split_heads, rms_norm of queries and keys, rotate, in one kernel. norms: (weight of queries,
    weight of keys, eps, zero_centered), or None."""
    query, key, value = _split_heads(mixed, bias, groups, d)
    if norms is not None:
        of_query, of_key, *constants = norms
        query, key = _rms_norm(query, of_query, *constants), _rms_norm(key, of_key, *constants)
    return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved), value


# -- SwiGLU -----------------------------------------------------------------------------------

_BLOCK = 1024  # columns of a Triton program

if triton is not None:

    @triton.jit
    def _swiglu_kernel(both, out, f: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < f
        gate = tl.load(both + row * 2 * f + column, inside).to(tl.float32)
        up = tl.load(both + row * 2 * f + f + column, inside)
        # silu is rounded before it multiplies, as two operations of torch do
        silu = (gate * tl.sigmoid(gate)).to(up.dtype)
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


class _SwiGLU(torch.autograd.Function):
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
    def backward(ctx, grad):
        (both,) = ctx.saved_tensors
        grad, out, f = grad.contiguous(), torch.empty_like(both), both.shape[-1] // 2
        if out.numel():
            grid = (grad.numel() // f, triton.cdiv(f, _BLOCK))
            _swiglu_backward_kernel[grid](both, grad, out, f, _BLOCK)
        return out


def swiglu(both):
    """silu(gate) * up of both [..., 2 f], gate before up -> [..., f]. megatron's MLPs take it as
    their activation."""
    if compiles(both):
        return _SwiGLU.apply(both)
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@compiled
def weighted_swiglu(both, weights):
    """silu(gate) * up * weights of both [T, 2 f] and weights [T] -> [T, f] in both's dtype: what an
    expert does to its tokens."""
    gate, up = both.chunk(2, -1)
    return (F.silu(gate) * up * weights.unsqueeze(-1)).to(both.dtype)
