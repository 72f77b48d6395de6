"""Operations that are compiled on a GPU and run in plain torch elsewhere: norms, rotary embedding,
activations, AdamW.

Operations of most models have Triton kernels in part_triton.py; others, which only some models
need (caps, some rotary embeddings), are compiled by torch.compile. `switch(False)` turns both off;
a machine with a GPU and without a compiler runs plain torch, with a warning.
Letters: s positions, b rows, n query heads, g groups (heads of keys and of values), d channels per
head.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
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

_torch_compile: bool | None = None  # the run's key torch_compile
_NO_KERNELS = (
    "no kernel can be compiled here ({}): norms, rotary embedding, activations and the loss run as "
    "single operations, and training is slower; torch_compile: false says so without a try"
)
_NO_TORCH_COMPILE = (
    "torch.compile does not work here ({}): caps and some rotary embeddings run as single "
    "operations, and training is slower"
)
_NOT_COMPILED = (
    "torch.compile fails for {} ({}): it runs as single operations, and training is slower"
)


def switch(torch_compile: bool | None) -> None:
    """Set whether operations on CUDA tensors are compiled from now on: None and True compile, False
    does not. True without a GPU gives a warning."""
    global _torch_compile
    _torch_compile = torch_compile
    if torch_compile and not torch.cuda.is_available():
        warnings.warn(
            "torch_compile: true: there is no GPU, and on a CPU nothing is compiled", stacklevel=2
        )


def why_no_kernels() -> str | None:
    """Say why Triton kernels cannot be compiled and run here, such as the first line of an error;
    None if they can. Triton, a C compiler or part_triton.py (the kernels) may be missing."""
    if triton is None:
        return "Triton cannot be imported"
    if fused() is None:
        return ": ".join(parts.need_of("triton"))
    return _failure(lambda one: fused().SwiGLU.apply(one.repeat(2)))


def fused(of: str = "") -> Any:
    """The module with the Triton kernels; None if its file was removed. of: "" for part_triton,
    "_moe" for part_triton_moe, the kernels of experts."""
    return parts.module_of(f"part_triton{of}")


def why_no_torch_compile() -> str | None:
    """Say why torch.compile does not work here: the first line of its error, or a text if it gives
    wrong numbers; None if it works. It may fail, for example, for this Python version, or for want
    of a folder that it can write."""
    return _failure(lambda one: torch.compile(F.silu)(one))


def _failure(silu: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """Try a compiled silu on one number on the GPU -> the first line of the error if it fails, or a
    text if its result is wrong; None if it works. silu: the function to try."""
    try:
        one = torch.ones(1, device="cuda")
        is_right = torch.allclose(silu(one), F.silu(one), atol=1e-3)
        return None if is_right else "it gives wrong numbers"
    except Exception as error:
        return first_line(error)


# a reason from a why_ function that is no error
ABSENT = "not installed"


def first_line(error: Exception) -> str:
    """First line of an error's text, or its type if the text is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@functools.cache
def works(why_not: Callable[[], str | None], warning: str) -> bool:
    """True if something optional, such as a compiler or a package with kernels, works here;
    otherwise False, with a warning. why_not: returns the reason why it does not work, or None.
    warning: text with {} for the reason. Cached: for the same arguments why_not() is called once,
    and there is one warning."""
    reason = why_not()
    if reason is not None:
        warnings.warn(warning.format(reason), stacklevel=2)
    return reason is None


def compiles(tensor: torch.Tensor) -> bool:
    """True if operations on this tensor may run as this package's Triton kernels: it is on a GPU,
    torch_compile is not false, and Triton works here."""
    is_on_gpu = tensor.is_cuda and _torch_compile is not False
    return is_on_gpu and works(why_no_kernels, _NO_KERNELS)


def _compile_both_passes(graph: Any, inputs: Any) -> Any:
    """A backend for torch.compile: its default one, but it compiles the backward pass together with
    the forward pass, not when backward first runs. So `compiled` notices an error in time to fall
    back. graph, inputs: as torch.compile passes them."""
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        return torch._inductor.compile(graph, inputs)


def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    """Decorate a function of tensors and constants, so that it runs under torch.compile. It runs
    uncompiled if its first argument is not on a GPU, if compilation is off, or if Triton kernels or
    torch.compile do not work here. If compiling it fails, it runs uncompiled from then on, with a
    warning. dynamic: as for torch.compile."""
    fast = None

    @functools.wraps(function)
    def call(first: torch.Tensor, *args: Any) -> Any:
        nonlocal fast
        # torch.compile is tried for the first function that needs it: starting it takes seconds
        if not (compiles(first) and works(why_no_torch_compile, _NO_TORCH_COMPILE)):
            return function(first, *args)
        fast = fast or torch.compile(function, backend=_compile_both_passes, dynamic=dynamic)
        try:
            return fast(first, *args)
        except torch._dynamo.exc.TorchDynamoException as error:
            out = function(first, *args)  # raises if the arguments are wrong
            warnings.warn(_NOT_COMPILED.format(function.__name__, first_line(error)), stacklevel=2)
            fast = function
            return out

    return call


def jit(function: Callable[..., Any]) -> Any:
    """Decorate a Triton kernel; without Triton the function is returned unchanged."""
    if triton is None:
        return function
    # the seed changes in each step: specialising on its value would compile the kernel again
    return triton.jit(function, do_not_specialize=["seed"])


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a Triton kernel once for each point of a grid; nothing runs if a size in the grid is 0.
    grid: the numbers of programs. arguments: the kernel's. constants: its compile-time constants
    and launch options, by name."""
    if all(grid):
        kernel[grid](*arguments, **constants)


# ---- RMS norm


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dimension, with the mean in float32. The
    result has the dtype that x and weight share.

    zero_centered: True if weights are stored minus 1 (Gemma's): 1 is added to them, and they
    multiply before rounding.
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


def norm_beside(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise x, which is also used elsewhere as the residual -> (rms_norm(x), x). Use the second
    result as the residual: if compiles(x), the norm's backward kernel then also adds the residual's
    gradient. Arguments: see rms_norm()."""
    if compiles(x):
        return fused().Norm.apply(x, weight, eps, zero_centered, True)
    return rms_norm(x, weight, eps, zero_centered), x


# ---- queries, keys and values


def plain_rotation(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
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
def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of query [s, b, n, d] and key [s, b, g, d] by tables cos and sin, [s, 1, 1,
    rotary] or [s, b, 1, rotary] in the same dtype.

    The first `rotary` channels are rotated in pairs: channels i and i + rotary / 2, or neighbours
    if interleaved. Other channels pass through.
    """
    return plain_rotation(query, cos, sin, interleaved), plain_rotation(key, cos, sin, interleaved)


def split_heads(
    mixed: torch.Tensor, groups: int, d: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the result of a q, k, v projection -> query [s, b, n, d], key and value [s, b, g, d]
    for g `groups`. mixed: [s, b, g * (n / g + 2) * d], each group's queries, then its key and its
    value."""
    s, b, _ = mixed.shape
    mixed = mixed.view(s, b, groups, -1, d)
    query = mixed[:, :, :, :-2].reshape(s, b, -1, d)
    # contiguous, because a view would keep all three in memory
    return query, mixed[:, :, :, -2].contiguous(), mixed[:, :, :, -1].contiguous()


def rotated_heads(
    mixed: torch.Tensor,
    groups: int,
    d: int,
    norms: Any,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the result of a q, k, v projection, apply RMS norm to queries and keys, and rotate
    these -> (query, key, value). One Triton kernel does all of it if compiles(mixed) and d is even.
    norms: (query weight, key weight, eps, zero_centered); None: no norms. Other arguments: see
    split_heads() and rotate()."""
    of_query, of_key, *constants = norms or (None, None, 0.0, False)
    if compiles(mixed) and d % 2 == 0:
        tensors = mixed, of_query, of_key, cos, sin
        return fused().RotatedHeads.apply(*tensors, groups, d, *constants, interleaved)
    query, key, value = split_heads(mixed, groups, d)
    if norms is not None:
        query = rms_norm(query, of_query, *constants)
        key = rms_norm(key, of_key, *constants)
    return *rotate(query, key, cos, sin, interleaved), value


# ---- SwiGLU


def swiglu(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up -> [..., f], the activation of MLPs with a gate and silu. both: [..., 2 f],
    gate before up."""
    if compiles(both):
        return fused().SwiGLU.apply(both)
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def weighted_swiglu(both: torch.Tensor, weights: torch.Tensor, room: int = 0) -> torch.Tensor:
    """silu(gate) * up * weights -> [T, f], an expert's activation, in the dtype of `both`. both:
    [T, 2 f], gate before up. weights: [T]. room: see part_triton_moe.rows_with_room()."""
    if compiles(both):
        return fused().SwiGLU.apply(both, weights, room)
    return (swiglu(both) * weights.unsqueeze(-1)).to(both.dtype)


QUICK_GELU = 1.702  # x sigmoid(1.702 x) is close to gelu


def weighted_clamped_swiglu(
    both: torch.Tensor,
    weights: torch.Tensor,
    limit: float,
    biases: torch.Tensor,
    experts: torch.Tensor,
    room: int = 0,
) -> torch.Tensor:
    """The activation of gpt_oss's experts: (up + 1) * gate * sigmoid(1.702 gate) * weights -> [T,
    f], in the dtype of `both`. Before, each row gets its expert's bias; then gate is clamped to at
    most limit, and up to [-limit, limit].

    both: [T, 2 f], gate before up. weights: [T]. biases: [n, 2 f] for n experts. experts: int64
    [T], the expert of each row. room: see weighted_swiglu()."""
    if compiles(both):
        return fused().SwiGLU.apply(both, weights, room, biases, experts, limit)
    # in bf16 each of these sums and products would be rounded
    gate, up = (both.float() + biases[experts]).chunk(2, -1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    product = (up + 1) * (gate * torch.sigmoid(QUICK_GELU * gate))
    return (product * weights.unsqueeze(-1)).to(both.dtype)


# ---- AdamW


def join(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Join a bf16 weight and its low bits, int16 of the same shape -> the float32 master weight."""
    return ((weight.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split_into(master: torch.Tensor, weight: torch.Tensor, low: torch.Tensor) -> None:
    """Split a float32 master into a bf16 weight and its low 16 bits, and write them into these
    tensors."""
    bits = master.view(torch.int32)
    high = (bits + 32768) >> 16
    weight.view(torch.int16).copy_(high)
    low.copy_(bits - (high << 16))


def _wrapped(constant: int) -> int:
    """An unsigned 32-bit constant as the int32 with the same bits."""
    return (constant + 2**31) % 2**32 - 2**31


def round_by_chance(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Round a non-negative float32 x to bf16 stochastically: up or down, with the chance of each in
    proportion to its nearness. The random bits are a hash of seed and element index."""
    bits = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape) ^ seed
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _wrapped(0x846CA68B)
    chance = (bits >> 16) & 0xFFFF
    return ((x.view(torch.int32) + chance) & -65536).view(torch.float32).bfloat16()


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay that needs less memory: a float32 master takes 16 bits more
    than its bf16 weight, and moments can be bf16.

        m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,   g = factor x gradient
        w = (1 - lr decay) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

    It computes in float32, whatever the stored dtypes. The master w of a bf16 weight is stored as
    bf16(w), the weight itself, and an int16 with its remaining bits: together they are w, bit for
    bit. Ties round away from zero. A float32 weight is its own master.

    v in bf16 is rounded stochastically: with b2 = 0.999 a step lowers it by less than half of
    bf16's last bit, so rounding to nearest would never let it fall. The random bits are a hash of
    step and element, so that replicas, and a resumed run in the same layout, draw the same.

    halves: which of exp_avg and exp_avg_sq are bf16. A parameter's gradient is its decoupled_grad
    if it has one (megatron's name for a gradient of another dtype), else grad. factor: a number, or
    a float64 scalar on the gradients' device, which Triton's kernel reads there; if it is NaN,
    weights and moments stay."""

    def __init__(
        self,
        groups: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        halves: Iterable[str] = (),
    ) -> None:
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.dtypes = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
        self.dtypes |= dict.fromkeys(halves, torch.bfloat16)
        self.factor: torch.Tensor | float = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        factor = self.factor
        for group, p, grad in self._gradients():
            if not torch.is_tensor(factor):
                factor = torch.full((), factor, dtype=torch.float64, device=p.device)
            self._update(group, p, grad, factor)

    def take_back(self) -> None:
        """Undo the last step(), whose factor was NaN: lower the step counts by 1. Such a step
        changed nothing else."""
        for _, p, _ in self._gradients():
            self.state[p]["step"] -= 1

    def _gradients(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """Yield (parameter group, parameter, gradient) for each parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                grad = getattr(p, "decoupled_grad", p.grad)
                if grad is not None:
                    yield group, p, grad

    def dtypes_of(self, p: torch.Tensor) -> dict[str, torch.dtype]:
        """{name: dtype} of a parameter's moments, such as exp_avg."""
        return self.dtypes

    def state_of(self, p: torch.Tensor) -> dict[str, Any]:
        """A parameter's state: the step, the moments, and for a bf16 weight the lower 16 bits of
        its float32 master. Missing entries are created as zeros, and moments of another dtype are
        converted."""
        state = self.state[p]
        state.setdefault("step", torch.tensor(0.0))
        for name, dtype in self.dtypes_of(p).items():
            if name not in state:
                state[name] = torch.zeros_like(p, dtype=dtype)
            state[name] = state[name].to(dtype)  # a checkpoint may have another dtype
        if p.dtype == torch.bfloat16 and "low" not in state:
            state["low"] = torch.zeros_like(p, dtype=torch.int16)
        return state

    def master(self, p: torch.Tensor) -> torch.Tensor:
        """A parameter's float32 value: its own, or joined from the bf16 weight and the stored low
        bits."""
        if p.dtype == torch.float32:
            return p.detach()
        return join(p.detach(), self.state_of(p)["low"])

    @torch.no_grad()
    def fill(self, p: torch.Tensor, values: dict[str, Any]) -> None:
        """Set a parameter's optimizer state. values: "step", the moments by name, and optionally
        "master", the float32 weight; it also sets the weight itself."""
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
        """Set each float32 master to its bf16 weight, after something else changed the weights: the
        stored low bits become 0."""
        for state in self.state.values():
            if "low" in state:
                state["low"].zero_()

    def _update(
        self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor, factor: torch.Tensor
    ) -> None:
        state = self.state_of(p)
        step = int(state["step"]) + 1
        beta1, beta2 = group["betas"]
        state["step"] = torch.tensor(float(step))  # on the CPU, so that reading it needs no sync
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
