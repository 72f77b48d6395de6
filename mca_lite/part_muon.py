"""Muon: orthogonalised momentum for the matrices of hidden layers."""

from typing import Any

import torch

from .args import TrainingArguments
from .kernels import AdamW
from .tables import ParamGroups, numbers_of_adam


def orthogonalised(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Approximate the nearest semi-orthogonal matrix (singular values near 1) to each of the bf16
    matrices [n, rows, columns]. Newton-Schulz iterations with the coefficients of torch.optim.Muon;
    steps: their number."""
    if x.shape[1] > x.shape[2]:
        return orthogonalised(x.mT, steps).mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        factor = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, factor, x, beta=3.4445)
    return x


class Muon(AdamW):
    """Orthogonalised momentum for the matrices of hidden layers, AdamW for all other parameters.

        m = mu m + (1 - mu) g,   u = (1 - mu) g + mu m (muon_nesterov) or m
        w = (1 - lr decay) w - lr ratio orthogonalised(u)

    Each Hugging Face matrix is updated separately, such as q, k, v and each expert's gate and up,
    as torch.optim.Muon would if each had a module of its own.
    ratio: with muon_adjust_lr original, sqrt(max(1, rows / columns)); with match_rms_adamw, 0.2
    sqrt(max(rows, columns)), so that updates are as large as AdamW's and can share its learning
    rate.
    mu: muon_momentum. groups: parameter groups. args: TrainingArguments.

    AdamW updates embedding and output layer, whose rows each belong to one token, and what is not
    the matrix of a linear, such as norms, biases and gates of one row. Routers are updated by Muon.
    """

    def __init__(self, groups: ParamGroups, args: TrainingArguments):
        super().__init__(groups, **numbers_of_adam(args))
        self.args = args

    def dtypes_of(self, p: torch.nn.Parameter) -> dict[str, torch.dtype]:
        """{state name: dtype} of a parameter's moments: momentum_buffer for Muon's parameters,
        those of AdamW for others."""
        if hasattr(p, "matrices"):
            return {"momentum_buffer": torch.float32}
        return self.dtypes

    def _update(
        self, group: dict[str, Any], p: torch.nn.Parameter, grad: torch.Tensor, factor: Any
    ) -> None:
        """Update parameter p in place: by Muon if it has the attribute `matrices`, otherwise by
        AdamW. factor: AdamW multiplies the gradient by it; Muon ignores it. Muon's update is
        collective over p.matrices.group."""
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

    def _direction(self, matrices: torch.Tensor) -> torch.Tensor:
        """Muon's step before the learning rate, for matrices [n, rows, columns] of momentum (with
        muon_nesterov mixed with the gradient): orthogonalised, times `ratio`, float32."""
        rows, columns = matrices.shape[1:]
        ratio = 0.2 * max(rows, columns) ** 0.5
        if self.args.muon_adjust_lr == "original":
            ratio = max(1, rows / columns) ** 0.5
        return orthogonalised(matrices, self.args.muon_ns_steps).float() * ratio
