"""AdamW that holds less: weights in bf16 whose float32 masters are the weight and 16 bits more, and
moments in bf16.

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,   g = factor x gradient
    w = (1 - lr decay) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

in float32, whatever holds the numbers, in one pass over memory. A master weight w is bf16(w), the
model's weight, and what that leaves of its bits, an int16: together they are w, bit for bit. Ties
round away from zero.

v in bf16 rounds up or down by chance, in proportion: with b2 = 0.999 it changes by less than half
of bf16's last bit, and rounded to the nearest it would never fall. The chance is a hash of step and
element, so that replicas and a resumed run draw the same.

On CUDA, where model_fused compiles, the pass is a Triton kernel, elsewhere plain torch.
"""

from collections.abc import Iterator

import torch

from . import model_fused

_BLOCK = 1024  # elements of a Triton program

if model_fused.triton is not None:
    import triton
    import triton.language as tl

    # the seed is another one in each step: a kernel compiled for some of its values serves no other
    @triton.jit(do_not_specialize=["seed"])
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
    return constant - 2**32 if constant >= 2**31 else constant


def round_by_chance(x: torch.Tensor, seed: int) -> torch.Tensor:
    """x, float32 and not negative, as bf16: up or down by chance, in proportion."""
    bits = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape) ^ seed
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _wrapped(0x846CA68B)
    chance = (bits >> 16) & 0xFFFF
    return ((x.view(torch.int32) + chance) & -65536).view(torch.float32).bfloat16()


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay. Parameters are float32, or bf16, which then have masters.

    halves: those of exp_avg and exp_avg_sq that are kept in bf16. A parameter's gradient is its
    decoupled_grad where it has one (megatron's word for one of another dtype), else grad. factor:
    what gradients are multiplied with in the next step(), a number or a float64 tensor of one on
    their device, which need not be known yet; where it is NaN, nothing is updated.
    """

    def __init__(self, groups, lr, betas, eps, halves=()):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.dtypes = {
            name: torch.bfloat16 if name in halves else torch.float32
            for name in ("exp_avg", "exp_avg_sq")
        }
        self.factor: torch.Tensor | float = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        factor = self.factor
        for group, p, grad in self._gradients():
            if not torch.is_tensor(factor):
                factor = torch.full((), factor, dtype=torch.float64, device=p.device)
            self._update(group, p, grad, factor)

    def take_back(self) -> None:
        """The factor of the last step() was NaN: it does not count."""
        for _, p, _ in self._gradients():
            self.state[p]["step"] -= 1

    def _gradients(self) -> Iterator[tuple[dict, torch.Tensor, torch.Tensor]]:
        """(group, parameter, gradient) of those that have one."""
        for group in self.param_groups:
            for p in group["params"]:
                grad = getattr(p, "decoupled_grad", p.grad)
                if grad is not None:
                    yield group, p, grad

    def state_of(self, p: torch.Tensor) -> dict:
        """A parameter's state, which begins with zeros."""
        state = self.state[p]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        for name, dtype in self.dtypes.items():
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
        """Set a parameter's state: "step", the moments, and "master", which may be missing."""
        state = self.state_of(p)
        state["step"] = torch.tensor(float(values["step"]))
        for name in self.dtypes:
            state[name].copy_(values[name])
        if "master" not in values:
            return
        if p.dtype == torch.bfloat16:
            split_into(values["master"].to(p.device), p, state["low"])
        else:
            p.copy_(values["master"])

    def forget_masters(self) -> None:
        """The weights were set by somebody else: they are what they say."""
        for state in self.state.values():
            if "low" in state:
                state["low"].zero_()

    def _update(self, group: dict, p: torch.Tensor, grad: torch.Tensor, factor) -> None:
        state = self.state_of(p)
        step, (beta1, beta2) = int(state["step"]) + 1, group["betas"]
        state["step"] = torch.tensor(float(step))  # on the CPU, where reading it waits for nobody
        m, v, low = state["exp_avg"], state["exp_avg_sq"], state.get("low")
        decay, rate = group["lr"] * group["weight_decay"], group["lr"] / (1 - beta1**step)
        root, eps = (1 - beta2**step) ** 0.5, group["eps"]
        seed = _wrapped(step * 0x9E3779B9 % 2**32)
        by_chance = v.dtype == torch.bfloat16
        if model_fused.compiles(p):
            weight = p if low is None else p.view(torch.int16)
            numbers = (decay, beta2, 1 - beta1, 1 - beta2, rate, root, eps)
            constants, grid = (
                (low is not None, by_chance, _BLOCK),
                (triton.cdiv(p.numel(), _BLOCK),),
            )
            tensors = weight, low, grad, m, v, factor
            _adam_kernel[grid](*tensors, p.numel(), seed, *numbers, *constants)
            return
        if factor.isnan():
            return
        g, w = grad.float() * factor.float(), self.master(p)
        mean = m.float().lerp(g, 1 - beta1)
        square = (v.float() * beta2).addcmul_(g, g, value=1 - beta2)
        w = torch.sub(w, w, alpha=decay).addcdiv_(
            mean, (square.sqrt() / root).add_(eps), value=-rate
        )
        m.copy_(mean)
        v.copy_(round_by_chance(square, seed) if by_chance else square)
        if low is None:
            p.copy_(w)
        else:
            split_into(w, p, low)
