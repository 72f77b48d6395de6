"""Muon: momentum made orthogonal, for the matrices of hidden layers."""

import torch

from .kernels import AdamW
from .tables import numbers_of_adam


def orthogonalised(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The orthogonal factors of bf16 matrices [n, rows, columns], singular values near 1, by
    Newton-Schulz iterations with the coefficients of torch.optim.Muon."""
    if x.shape[1] > x.shape[2]:
        return orthogonalised(x.mT, steps).mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        factor = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, factor, x, beta=3.4445)
    return x


class Muon(AdamW):
    """Momentum, made orthogonal, for the matrices of hidden layers; AdamW for all others.

        m = mu m + (1 - mu) g,   u = (1 - mu) g + mu m (muon_nesterov) or m
        w = (1 - lr decay) w - lr ratio orthogonalised(u)

    of each Hugging Face matrix by itself: q, k, v, gate, up and every expert, as by
    torch.optim.Muon on transformers' modules. ratio: sqrt(max(1, rows / columns)) with
    muon_adjust_lr original, 0.2 sqrt(max(rows, columns)) with match_rms_adamw: updates are as large
    as AdamW's then, and share its rate.

    AdamW updates embedding and output layer, since each of their rows is one token's, norms, biases
    and matrices of one row. Routers get Muon, as in megatron-core (emerging_optimizers.py of 0.19).
    mu: muon_momentum. args: TrainingArguments.
    """

    def __init__(self, groups, args):
        super().__init__(groups, **numbers_of_adam(args))
        self.args = args

    def dtypes_of(self, p):
        if hasattr(p, "matrices"):
            return {"momentum_buffer": torch.float32}
        return self.dtypes

    def _update(self, group, p, grad, factor):
        if not hasattr(p, "matrices"):
            return super()._update(group, p, grad, factor)
        state = self.state_of(p)
        state["step"] = state["step"] + 1
        momentum = self.args.muon_momentum
        update = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        if self.args.muon_nesterov:
            update = grad.lerp(update, momentum)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(p.matrices.apply(self._direction, update.bfloat16()), alpha=group["lr"])

    def _direction(self, matrices):
        """The update at rate 1 of matrices [n, rows, columns], float32."""
        rows, columns = matrices.shape[1:]
        ratio = 0.2 * max(rows, columns) ** 0.5
        if self.args.muon_adjust_lr == "original":
            ratio = max(1, rows / columns) ** 0.5
        return orthogonalised(matrices, self.args.muon_ns_steps).float() * ratio
