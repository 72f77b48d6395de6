"""The routers of a transformers model in training: their balancing losses, bias updates and statistics, by hooks."""

import re

import torch
import torch.distributed as dist

from . import parallel
from .model_families import FAMILIES
from .model_routing import (
    BalancingLosses,
    RouterStatistics,
    balancing_parts,
    choices_of,
    count_real_micro_batches,
    updated_bias,
)

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class TorchRouters:
    """Collects what each router gave in a forward pass that trains; transformers' routers answer (logits, weights, experts).

    None of it happens for a model without experts, or one of a family that is not in the table.
    """

    def __init__(self, model, args):
        kind, self.losses = model.config.model_type, BalancingLosses.of(args)
        self.bias_rate, self.per_token = (
            args.moe_router_bias_update_rate,
            args.calculate_per_token_loss,
        )
        self.padding_mask = None
        self._outputs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._modules: dict[int, torch.nn.Module] = {}
        values = FAMILIES[kind].values(model.config) if kind in FAMILIES else {}
        experts = values.get("num_moe_experts")
        if not experts:
            if self.losses.on or self.bias_rate:
                raise ValueError(
                    f"moe_aux_loss_coeff, moe_z_loss_coeff and moe_router_bias_update_rate: {kind} has no routers here"
                )
            return
        self._topk, self._scores = (
            values["moe_router_topk"],
            values.get("moe_router_score_function", "softmax"),
        )
        for name, module in model.named_modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                self._modules[int(_LAYER.search(name)[1])] = module
                module.register_forward_hook(self._keep)
        layers = {id(module): layer for layer, module in self._modules.items()}
        self._layer_of = lambda module: layers[id(module)]
        self.statistics = RouterStatistics(
            model.config.num_hidden_layers, experts, parallel.device()
        )
        self._counts = torch.zeros(
            model.config.num_hidden_layers, experts, device=parallel.device()
        )

    def _keep(self, module, args, output):
        if module.training and torch.is_grad_enabled():
            self._outputs.append((self._layer_of(module), output[0], output[2]))

    def expect(self, padding_mask: torch.Tensor | None) -> None:
        """The next forward pass has this mask, bool [b, s] with True meaning padding."""
        self.padding_mask, self._outputs = padding_mask, []

    def losses_of_pass(self, shape) -> torch.Tensor | float:
        """What the last forward pass over tokens of `shape` (b, s) adds to the loss of its micro-batch; counts it too."""
        total = 0.0
        for layer, logits, experts in self._outputs:
            mask = (
                torch.zeros(shape, dtype=torch.bool, device=logits.device)
                if self.padding_mask is None
                else self.padding_mask
            )
            choices = choices_of(experts, ~mask.flatten(), logits.shape[-1])
            self.statistics.count(layer, choices)
            self._counts[layer] += choices
            if self.losses.on:
                rows = logits.view(*shape, -1).transpose(0, 1)
                kind = self.losses.kind
                balance, z, tokens = balancing_parts(
                    rows, ~mask.t(), kind, self._topk, self._scores
                )
                self.statistics.add_losses(layer, balance, z, (tokens > 0).float())
                total = (
                    total
                    + (self.losses.balance * balance + self.losses.z * z)
                    * self.statistics.loss_weight
                )
        self._outputs = []
        return total

    def weigh(self, micro_batches: list, count_of_loss, world: int) -> None:
        """As MegatronBackend.weigh_router_losses."""
        if not self._modules or not self.losses.on:
            return
        counts = sum(map(count_of_loss, micro_batches))
        numbers = torch.tensor(
            [count_real_micro_batches(micro_batches), counts], dtype=torch.float32
        )
        numbers = _over_all(numbers.to(parallel.device()))
        scale = numbers[1] if self.per_token else len(micro_batches) * world
        self.statistics.loss_weight = scale / numbers[0].clamp(min=1)

    @torch.no_grad()
    def update_biases(self) -> None:
        """After the micro-batches of a step: even out the loads by moe_router_bias_update_rate."""
        if not self._modules or not self.bias_rate:
            return
        counts = _over_all(self._counts)
        for layer, module in self._modules.items():
            if (bias := getattr(module, "e_score_correction_bias", None)) is not None:
                bias.copy_(updated_bias(bias, counts[layer], self.bias_rate))
        self._counts.zero_()

    def take_statistics(self) -> dict[str, float]:
        return self.statistics.take(self.losses, _over_all) if self._modules else {}


def _over_all(vector: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(vector)
    return vector
