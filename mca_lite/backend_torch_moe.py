"""The routers of a transformers model in training: their balancing losses, bias updates and
statistics, by hooks."""

import functools
import re

import torch

from . import parallel
from .model_families import values_of
from .model_routing import BalancingLosses, RouterStatistics, choices_of, updated_bias

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def losses_of(config, args) -> BalancingLosses:
    """The coefficients for a transformers config: the arguments', or its family's own."""
    return BalancingLosses.of(args, values_of(config).get("moe_aux_loss_coeff", 0.0))


class TorchRouters:
    """Collects what each router gave in a forward pass that trains.

    transformers' routers answer (logits, weights, experts). `statistics` is None for a model
    without experts, or of a family that is not in the table: then nothing is collected. ValueError
    where such a model is to have balancing losses, and where a family has experts and their routers
    are not found.
    """

    def __init__(self, model, args):
        config, kind = model.config, model.config.model_type
        self.losses = losses_of(config, args)
        self.bias_rate = args.moe_router_bias_update_rate
        self.statistics: RouterStatistics | None = None
        self.padding_mask: torch.Tensor | None = None
        self._outputs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._modules: dict[int, torch.nn.Module] = {}
        values = values_of(config)
        experts = values.get("num_moe_experts")
        if not experts:
            if self.losses.on or self.bias_rate:
                raise ValueError(
                    "moe_aux_loss_coeff, moe_z_loss_coeff and moe_router_bias_update_rate: "
                    f"{kind} has no routers here"
                )
            return
        self._topk = values["moe_router_topk"]
        self._scores = values.get("moe_router_score_function", "softmax")
        self._find(model, sum(values["moe_layer_freq"]))
        layers, device = config.num_hidden_layers, parallel.device()
        self.statistics = RouterStatistics(layers, experts, device)
        self._counts = torch.zeros(layers, experts, device=device)

    def _find(self, model, wanted: int) -> None:
        """Hook the router of each mixture; transformers' classes of them end in TopKRouter."""
        for name, module in model.named_modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                layer = int(_LAYER.search(name)[1])
                self._modules[layer] = module
                module.register_forward_hook(functools.partial(self._keep, layer))
        if len(self._modules) != wanted:
            raise ValueError(
                f"{model.config.model_type} has experts in {wanted} layers, and routers (classes "
                f"named ...TopKRouter) were found in {len(self._modules)}: their losses and biases "
                "would be left out; use another version of transformers, or set use_mca: true"
            )

    def _keep(self, layer, module, args, output):
        if module.training and torch.is_grad_enabled():
            logits, _, experts = output
            self._outputs.append((layer, logits, experts))

    def expect(self, padding_mask: torch.Tensor | None) -> None:
        """The next forward pass has this mask, bool [b, s] with True meaning padding."""
        self.padding_mask = padding_mask
        self._outputs = []

    def losses_of_pass(self, shape) -> torch.Tensor | float:
        """What the last forward pass over tokens of `shape` (b, s) adds to its micro-batch's loss.

        Counts the pass for the log and for the bias updates too.
        """
        total = 0.0
        for layer, logits, experts in self._outputs:
            if self.padding_mask is None:
                real = torch.ones(shape, dtype=torch.bool, device=logits.device)
            else:
                real = ~self.padding_mask
            choices = choices_of(experts, real.flatten(), logits.shape[-1])
            self.statistics.count(layer, choices)
            self._counts[layer] += choices
            if self.losses.on:
                shared = logits.view(*shape, -1).transpose(0, 1), real.t(), self.losses
                total = total + self.statistics.losses(layer, *shared, self._topk, self._scores)
        self._outputs = []
        return total

    @torch.no_grad()
    def update_biases(self) -> None:
        """After the micro-batches of a step: even out the loads by moe_router_bias_update_rate.

        Collective over all ranks where there is such a rate.
        """
        if self.statistics is None or not self.bias_rate:
            return
        counts = parallel.sum_over_all(self._counts)
        for layer, module in self._modules.items():
            bias = getattr(module, "e_score_correction_bias", None)
            if bias is not None:
                bias.copy_(updated_bias(bias, counts[layer], self.bias_rate))
        self._counts.zero_()
