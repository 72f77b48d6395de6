"""Adapters of experts: y = W x + scale * B A x for each expert and projection, under PEFT's names of single experts.

On megatron-core the matrices of a rank's experts stand side by side, like the experts' own. Letters: n experts of this rank,
r rank, h hidden size, f an expert's columns on this rank, etp the ranks that share them, T tokens.

    gate, up    A [n, r, h] whole    B [n, f, r] cut
    down        A [n, r, f] cut      B [n, h, r] whole

The dispatcher sums activations over the etp ranks, so a whole matrix has a part of its gradient on each, which is summed here.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from .lora_layers import Adapter, Piece
from .parallel import sum_gradients

PROJECTIONS = ("gate", "up", "down")


class LoraExperts(Adapter):
    """The adapters of a layer's experts. names: {projection: HF modules of the local experts}, for those that have adapters."""

    def __init__(
        self,
        spec,
        mca,
        names: dict[str, list[str]],
        hidden_size,
        columns,
        ep=(1, 0),
        group=None,
        device=None,
    ):
        super().__init__(spec, mca, group, False, device)
        self.names, self.ep = names, ep
        for projection, of_experts in names.items():
            n, down = len(of_experts), projection == "down"
            inputs, outputs = (columns, hidden_size) if down else (hidden_size, columns)
            self._add(f"{projection}_A", (n, spec.rank, inputs), 1 if down else None)
            self._add(f"{projection}_B", (n, outputs, spec.rank), None if down else 0)

    def _add(self, name, shape, axis):
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=self.device))
        parameter.allreduce = False  # reduced over the ranks that hold the same experts
        # a whole expert is no duplicate of another rank's; a matrix that all etp ranks hold is
        parameter.tensor_model_parallel = axis is not None or self.tp == 1
        parameter.partition_dim, parameter.partition_stride = 1 if axis is None else 1 + axis, 1
        parameter.sequence_parallel = False
        self.register_parameter(name, parameter)
        self.axes[name] = axis if self.tp > 1 else None

    def pieces(self) -> Iterator[Piece]:
        for projection, of_experts in self.names.items():
            for i, module in enumerate(of_experts):
                for matrix in "AB":
                    key, name = f"{module}.lora_{matrix}.weight", f"{projection}_{matrix}"
                    yield Piece(
                        key, getattr(self, name), i, self.axes[name], self.tp, self.rank, None, True
                    )

    def _matrix(self, name: str) -> torch.Tensor:
        parameter = getattr(self, name)
        if self.tp == 1 or self.axes[name] is not None:
            return parameter
        return sum_gradients(parameter, self.group)

    def _one(self, projection: str, x, multiply):
        low = multiply(x, self._matrix(f"{projection}_A"))
        return multiply(low, self._matrix(f"{projection}_B")) * self.spec.scale

    def gate_up(self, x, multiply: Callable) -> torch.Tensor | None:
        """x [T, h] -> [T, 2 f], float32; multiply(x, w): each expert's tokens times the transpose of its matrix in w."""
        parts = [
            self._one(p, self._dropped(x.float()), multiply) if p in self.names else None
            for p in ("gate", "up")
        ]
        if parts == [None, None]:
            return None
        like = next(part for part in parts if part is not None)
        return torch.cat([torch.zeros_like(like) if part is None else part for part in parts], -1)

    def down(self, x, multiply: Callable) -> torch.Tensor | None:
        """x [T, f] -> [T, h], float32."""
        return (
            self._one("down", self._dropped(x.float()), multiply) if "down" in self.names else None
        )

    def _dropped(self, x):
        if not self.training or self.spec.dropout == 0.0:
            return x
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self.spec.dropout)

    def delta(self, projection: str) -> torch.Tensor | float:
        """scale * B A of each expert [n, outputs, inputs], 0 without an adapter."""
        if projection not in self.names:
            return 0.0
        return self.spec.scale * torch.bmm(
            getattr(self, f"{projection}_B"), getattr(self, f"{projection}_A")
        )


def attach_merged(
    module: torch.nn.Module, adapter: Adapter, merged: Callable[[], dict[str, torch.Tensor]]
) -> None:
    """Put an adapter on a module that has no linear of its own: in a forward pass it sees the tensors of merged(), by name, in
    place of its parameters. That costs their memory once more, and knows no dropout."""
    adapter.train(module.training)
    module.add_module("lora", adapter)

    def before(module, args):
        if adapter.enabled:
            module.__dict__.update(merged())  # found before the parameters of these names

    def after(module, args, output):
        for name in [name for name in module._parameters if name in module.__dict__]:
            del module.__dict__[name]

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def merged_experts(experts: torch.nn.Module, adapter: LoraExperts) -> dict[str, torch.Tensor]:
    """The tensors of transformers' experts, with their adapters in them."""
    gate_up, down, half = (
        experts.gate_up_proj,
        experts.down_proj,
        experts.gate_up_proj.shape[1] // 2,
    )
    both = [
        gate_up[:, :half].float() + adapter.delta("gate"),
        gate_up[:, half:].float() + adapter.delta("up"),
    ]
    down = (down.float() + adapter.delta("down")).to(down.dtype)
    return {"gate_up_proj": torch.cat(both, 1).to(gate_up.dtype), "down_proj": down}


def merged_router(router: torch.nn.Module, adapter: Adapter) -> dict[str, torch.Tensor]:
    """The weight of transformers' router, with its adapter in it."""
    delta = adapter.spec.scale * adapter.lora_B_0 @ adapter.lora_A
    return {"weight": (router.weight.float() + delta).to(router.weight.dtype)}
