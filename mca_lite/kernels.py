"""Operations as one kernel on a GPU, and in plain torch elsewhere: norms, rotary embedding,
activations, AdamW.

The operations of every model have a Triton kernel in part_triton.py; those of some (experts, caps)
are compiled by torch.compile. `switch` turns both off; a machine without a compiler runs plain
torch, with a warning.
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

from . import parts

try:
    import triton
    import triton.language as tl
except ImportError:  # no kernel has a caller then
    triton = None
    tl: Any = SimpleNamespace(constexpr=None)

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
    may lack Triton or a C compiler, the package the part with the kernels."""
    if triton is None:
        return "Triton cannot be imported"
    if fused() is None:
        return ": ".join(parts.need_of("triton"))
    return _failure(lambda one: fused().SwiGLU.apply(one.repeat(2)))


@functools.cache
def fused() -> Any:
    """The module with Triton kernels of the operations below, None if its file is gone."""
    return parts.module_of("part_triton")


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


# ---- RMS norm


def rms_norm(x, weight, eps: float, zero_centered: bool = False):
    """x / rms(x) * weight over the last dimension, the mean square in float32, in x's dtype.

    zero_centered: the weights lie around zero (Gemma's): 1 is added to them, and they multiply
    before the rounding.
    """
    if compiles(x):
        return fused().Norm.apply(x, weight, eps, zero_centered, False)
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
        return fused().Norm.apply(x, weight, eps, zero_centered, True)
    return rms_norm(x, weight, eps, zero_centered), x


# ---- queries, keys and values


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
        return fused().RotatedHeads.apply(*tensors, groups, d, *constants, interleaved)
    query, key, value = split_heads(mixed, bias, groups, d)
    if norms is not None:
        query = rms_norm(query, of_query, *constants)
        key = rms_norm(key, of_key, *constants)
    return *rotate(query, key, cos, sin, interleaved), value


# ---- SwiGLU


def swiglu(both):
    """silu(gate) * up of both [..., 2 f], gate before up -> [..., f]: the activation of megatron's
    MLPs."""
    if compiles(both):
        return fused().SwiGLU.apply(both)
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
            numbers = (decay, beta2, 1 - beta1, 1 - beta2, rate, root, eps)
            fused().update_by_adam((p, low, grad, m, v, factor), seed, numbers, by_chance)
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
