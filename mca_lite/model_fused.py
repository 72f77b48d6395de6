"""The mathematics between two matrix products, each as one kernel on a GPU: norms, the split of
queries, keys and values, rotary embedding, gated activations.

Every function here is plain torch, and runs so on a CPU. On CUDA, where there is a compiler
(Triton) and torch_compile is not false, what every layer does is a kernel by hand
(model_kernels.py), and torch.compile makes one of the rest.

Letters: s sequence, b batch, n heads and g query groups of this rank, d head size, f columns of an
MLP on this rank.
"""

import functools
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

from . import model_kernels
from .model_kernels import triton

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


def why_no_kernels() -> str | None:
    """The first line of what compiling a Triton kernel raised, None where it runs here: a machine
    may lack Triton or a C compiler."""
    if triton is None:
        return "Triton cannot be imported"

    def is_right() -> bool:
        gate_and_up = torch.ones(2, device="cuda")
        got = model_kernels.SwiGLU.apply(gate_and_up)
        return torch.allclose(got, F.silu(gate_and_up[:1]), atol=1e-3)

    return _why_not(is_right)


def why_no_torch_compile() -> str | None:
    """The same of torch.compile, which wants a Python and folders that it knows beside."""
    return _why_not(
        lambda: bool((torch.compile(lambda x: x + x)(torch.ones(2, device="cuda")) == 2).all())
    )


def _why_not(is_right: Callable[[], bool]) -> str | None:
    try:
        return None if is_right() else "it gives wrong numbers"
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]


@functools.cache
def _kernels_work() -> bool:
    """Whether kernels compile here: tried once, with a warning where they do not."""
    reason = why_no_kernels()
    if reason is not None:
        warnings.warn(
            f"no kernel can be compiled here ({reason}): norms, rotary embedding, activations and "
            "the loss run as single operations, and training is slower; torch_compile: false says "
            "so without a try",
            stacklevel=2,
        )
    return reason is None


@functools.cache
def _torch_compile_works() -> bool:
    """The same of torch.compile, where a model first needs it: starting it takes seconds."""
    reason = why_no_torch_compile()
    if reason is not None:
        warnings.warn(
            f"torch.compile does not work here ({reason}): what experts, caps and some rotary "
            "embeddings do runs as single operations, and training is slower",
            stacklevel=2,
        )
    return reason is None


def compiles(tensor: torch.Tensor) -> bool:
    """Whether functions of this tensor run compiled."""
    return tensor.is_cuda and _asked is not False and _kernels_work()


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
        if not compiles(first) or not _torch_compile_works():
            return function(first, *args)
        if fast is None:
            fast = torch.compile(function)
        return fast(first, *args)

    return call


def _rms_norm(x, weight, eps: float, zero_centered: bool):
    sizes = x.shape[-1:]
    if zero_centered:
        return F.rms_norm(x.float(), sizes, 1.0 + weight.float(), eps).to(x.dtype)
    if x.dtype == torch.float32:
        return F.rms_norm(x, sizes, weight, eps)
    # the rounding to bf16 comes before the weight, as in the Hugging Face model
    return weight * F.rms_norm(x.float(), sizes, None, eps).to(x.dtype)


def rms_norm(x, weight, eps: float, zero_centered: bool = False):
    """x / rms(x) * weight over the last dimension, the mean square in float32, in x's dtype.

    zero_centered: the weights lie around zero (Gemma's): 1 is added to them, and they multiply
    before the rounding.
    """
    if compiles(x):
        return model_kernels.Norm.apply(x, weight, eps, zero_centered, False)
    return _rms_norm(x, weight, eps, zero_centered)


def norm_beside(x, weight, eps: float, zero_centered: bool):
    """(rms_norm of x, x): where both are used, a kernel sums their gradients in the norm's backward
    pass, which costs no kernel of its own."""
    if compiles(x):
        return model_kernels.Norm.apply(x, weight, eps, zero_centered, True)
    return _rms_norm(x, weight, eps, zero_centered), x


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


def rotated_heads(mixed, bias, groups: int, d: int, norms, cos, sin, interleaved: bool):
    """split_heads, rms_norm of queries and keys, rotate, in one kernel. norms: (weight of queries,
    weight of keys, eps, zero_centered), or None."""
    if compiles(mixed) and d % 2 == 0:
        of_query, of_key, *constants = (None, None, 0.0, False) if norms is None else norms
        tensors = mixed, bias, of_query, of_key, cos, sin
        return model_kernels.RotatedHeads.apply(*tensors, groups, d, *constants, interleaved)
    query, key, value = _split_heads(mixed, bias, groups, d)
    if norms is not None:
        of_query, of_key, *constants = norms
        query, key = _rms_norm(query, of_query, *constants), _rms_norm(key, of_key, *constants)
    return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved), value


def swiglu(both):
    """silu(gate) * up of both [..., 2 f], gate before up -> [..., f]. megatron's MLPs take it as
    their activation."""
    if compiles(both):
        return model_kernels.SwiGLU.apply(both)
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@compiled
def weighted_swiglu(both, weights):
    """silu(gate) * up * weights of both [T, 2 f] and weights [T] -> [T, f] in both's dtype: what an
    expert does to its tokens."""
    gate, up = both.chunk(2, -1)
    return (F.silu(gate) * up * weights.unsqueeze(-1)).to(both.dtype)
