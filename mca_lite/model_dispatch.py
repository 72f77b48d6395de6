"""Tokens on their way to experts and back.

Letters: T tokens, k experts of a token, h hidden size, E experts.

A token goes to k experts, so it has k rows there. `order` [T k] lists the pairs (token, choice) by
expert, tokens in turn; `places` [T, k] is its inverse: the row of each pair. Both ways, and their
gradients, are reads at such places, and sums of k rows in float32 that are rounded once. Additions
to rows, as megatron's own permutation makes them, would meet each other on a GPU. On one
expert-parallel rank nothing waits for the device.
"""

import torch

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from .model_fused import compiled


@compiled
def _sums(rows, places):
    """The sum of the k rows [T k, h] of each token -> [T, h]."""
    first, *others = places.unbind(1)
    # read after read: a compiled sum over k spreads k over threads, and takes three times as long
    total = rows[first].to(torch.promote_types(rows.dtype, torch.float32))
    for places_of_choice in others:
        total = total + rows[places_of_choice]
    return total.to(rows.dtype)


class _ToExperts(torch.autograd.Function):
    """x [T, h] and weights [T, k] in the order of experts: [T k, h] and [T k]."""

    @staticmethod
    def forward(ctx, x, weights, order, places):
        ctx.save_for_backward(places)
        return x[order // places.shape[1]], weights.flatten()[order]

    @staticmethod
    def backward(ctx, grad, grad_of_weights):
        (places,) = ctx.saved_tensors
        return _sums(grad, places), grad_of_weights[places], None, None


class _FromExperts(torch.autograd.Function):
    """Rows [T k, h] in the order of experts -> their sums for each token [T, h]."""

    @staticmethod
    def forward(ctx, rows, order, places):
        ctx.save_for_backward(order, places)
        return _sums(rows, places)

    @staticmethod
    def backward(ctx, grad):
        order, places = ctx.saved_tensors
        return grad[order // places.shape[1]], None, None


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """megatron's all-to-all with the permutation above. Takes the router's choices as int64 [T, k]
    in place of a map, and their weights [T, k]."""

    @property
    def _is_alone(self) -> bool:
        return self.tp_size == 1 and self.ep_size == 1

    def dispatch_preprocess(self, hidden_states, experts, weights):
        """[s, b, h] -> rows in the order of experts [T k, h], and their weights [T k]."""
        self.hidden_shape, self.probs = hidden_states.shape, weights
        self.order = experts.flatten().argsort(stable=True)
        rows = torch.arange(len(self.order), device=experts.device)
        self.places = torch.empty_like(rows).scatter_(0, self.order, rows).view(experts.shape)
        chosen = torch.zeros(
            len(experts), self.num_experts, dtype=torch.bool, device=experts.device
        ).scatter_(1, experts, True)
        self.tokens_per_expert = chosen.sum(0)
        if not self._is_alone:
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
                "before_permutation_1", self.preprocess(chosen)
            )
        flat = hidden_states.reshape(-1, self.hidden_shape[-1])
        return _ToExperts.apply(flat, weights, self.order, self.places)

    def token_dispatch(self, rows, weights):
        return (rows, weights) if self._is_alone else super().token_dispatch(rows, weights)

    def dispatch_postprocess(self, rows, weights):
        if not self._is_alone:
            return super().dispatch_postprocess(rows, weights)
        return rows, self.tokens_per_expert, weights

    def combine_preprocess(self, rows):
        return rows if self._is_alone else super().combine_preprocess(rows)

    def token_combine(self, rows):
        return rows if self._is_alone else super().token_combine(rows)

    def combine_postprocess(self, rows):
        """Rows in the order of experts [T k, h] -> [s, b, h]."""
        return _FromExperts.apply(rows, self.order, self.places).view(self.hidden_shape)


def use_own_dispatcher(layer: MoELayer) -> None:
    """Give a layer the dispatcher above, where its configuration asks for no other one."""
    config = layer.config
    others = config.moe_permute_fusion or config.moe_shared_expert_overlap
    if others or config.moe_token_dispatcher_type != "alltoall":
        return
    layer.router.gives_choices = True
    layer.token_dispatcher = Dispatcher(
        layer.num_local_experts,
        layer.local_expert_indices,
        config=config,
        pg_collection=get_default_pg_collection(),
    )
