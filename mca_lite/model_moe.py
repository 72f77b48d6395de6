"""The parts of a mixture-of-experts layer: router, token dispatcher, experts. Shared experts are
megatron's.

Letters: T tokens, k experts per token, E experts, n of them on this rank, h hidden size, f the
columns of an expert on this rank (1 / etp of all). Experts are spread over the expert-parallel
ranks: local expert i has index n * ep_rank + i. Their matrices are sharded over the
expert-tensor-parallel ranks.

A token goes to k experts, so k rows represent it there. `order` [T k] sorts the (token, choice)
pairs by expert, stably; `tokens` [T k] is the token of each row, and `places` [T, k] the inverse of
`order`: the row of each pair. Forward and backward both gather by these indices; sums over k rows
are in float32 or wider, rounded once. Scattered additions, as in megatron's permutation, would
collide on a GPU. If each rank has all experts whole, Mixture can use LocalDispatcher, which does
not wait for the device.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .kernels import compiles, fused, swiglu, weighted_clamped_swiglu, weighted_swiglu
from .loss_tokens import all_reduce, num_ranks
from .mcore import (
    MegatronModule,
    MLPSubmodules,
    MoEAlltoAllTokenDispatcher,
    MoEAuxLossAutoScaler,
    MoELayer,
    MoESubmodules,
    ProcessGroupCollection,
    ShardedTensor,
    SharedExpertMLP,
    TopKRouter,
    TransformerConfig,
)
from .model_linears import ColumnLinear, RowLinear, beside, experts_product
from .parallel import device, sum_gradients, sum_over_all
from .tables import function_of

# ---- routing


def scores_of(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """Turn router logits [..., E], over E experts, into scores: softmax over the experts if
    score_function is "softmax", otherwise a sigmoid of each logit. Scores are float32, or float64
    if the logits are."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.softmax(logits, -1) if score_function == "softmax" else torch.sigmoid(logits)


def choose_experts(
    scores: torch.Tensor,
    topk: int,
    score_function: str = "softmax",
    normalise: bool = True,
    scaling: float | None = None,
    bias: torch.Tensor | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score: str = "top2",
    replace: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token by its router scores, as transformers' routers do ->
    (weights, expert indices), both [T, topk] for T tokens.

    scores: [T, E] for E experts, from scores_of().
    score_function: "softmax" or "sigmoid", with which the scores were made.
    normalise: scale a token's weights to sum to 1, before `scaling`.
    scaling: factor on the weights; None: 1.
    bias: [E], added to the scores for the choice. The weights are taken from the scores without it.
    num_groups: number of groups of neighbouring experts; None: no groups. Experts can be chosen
    only from the group_topk best groups. A group is ranked by the sum of its two best experts
    (group_score "top2") or by its best one ("max").
    replace: function of the chosen expert indices that returns other indices to use instead."""
    choice = scores
    if bias is not None:
        choice = scores + bias
    if num_groups:
        grouped = choice.unflatten(-1, (num_groups, -1))
        of_group = grouped.topk({"top2": 2, "max": 1}[group_score], -1).values.sum(-1)
        best = of_group.topk(group_topk, -1, sorted=False).indices
        closed = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, best, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = choice.topk(topk, -1).indices
    if replace is not None:
        experts = replace(experts)
    weights = scores.gather(-1, experts)
    if normalise:
        weights = _shares(weights, score_function)
    if scaling is not None:
        weights = weights * scaling
    return weights, experts


class BalancingLosses(NamedTuple):
    """The losses that MoE routers add to the main loss, and their coefficients. kind: the type of
    load-balancing loss, as in moe_router_load_balancing_type; "none": it is off. balance:
    coefficient of the load-balancing loss. z: coefficient of the router z-loss."""

    kind: str = "none"
    balance: float = 0.0
    z: float = 0.0

    @property
    def on(self) -> bool:
        """True if any router loss is added."""
        return (self.kind != "none" and self.balance > 0) or self.z > 0

    @classmethod
    def of(cls, settings: Any, default: float = 0.0) -> "BalancingLosses":
        """Read the kind and the coefficients of the losses from a run's or a model's settings.
        settings: TrainingArguments or a McaModelConfig. default: the coefficient of the
        load-balancing loss if moe_aux_loss_coeff is None."""
        balance = settings.moe_aux_loss_coeff
        if balance is None:
            balance = default
        kind = settings.moe_router_load_balancing_type if balance else "none"
        return cls(kind, balance, settings.moe_z_loss_coeff or 0.0)


def _shares(scores: torch.Tensor, score_function: str) -> torch.Tensor:
    """Scale scores to a sum of 1 over the last axis. score_function: with "sigmoid", 1e-20 is added
    to the sum before the division."""
    total = scores.sum(-1, keepdim=True)
    if score_function == "sigmoid":
        total = total + 1e-20
    return scores / total


def count_choices(experts: torch.Tensor, real: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count, for each of the b rows of a micro-batch, how many of its tokens chose each of the E
    experts -> float32 [b, E + 1]. The last column is the row's number of tokens; padding is not
    counted. experts: indices of each token's k experts, [s b, k] or [s, b, k] for s positions.
    real: bool [s, b], True for tokens, False for padding. num_experts: E."""
    found = real.new_zeros(*real.shape, num_experts + 1, dtype=torch.float32)
    found.scatter_(-1, experts.reshape(*real.shape, -1), 1.0)[..., -1] = 1.0
    return found.mul_(real.unsqueeze(-1)).sum(0)


def balancing_parts(
    losses: BalancingLosses,
    group: dist.ProcessGroup | None,
    logits: torch.Tensor,
    real: torch.Tensor,
    topk: int,
    score_function: str,
    scores: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a router's losses for one micro-batch -> (load-balancing loss, z loss, number of
    tokens without padding), scalars in float32, or in float64 for logits in float64. A loss that is
    off is 0.

    The ranks of `group` share the micro-batch's tokens. Each of the two losses is this rank's
    share: the shares of all these ranks sum to the loss. The number of tokens is that of all ranks
    together.

    losses: which losses are on. The results are not multiplied by their coefficients.
    group: None means that this rank has all tokens. Collective if it has several ranks: one
    all-reduce over it.
    logits: [s, b, E] for s positions of b rows and E experts. real: bool [s, b], True for tokens,
    False for padding.
    topk, score_function: as in choose_experts().
    scores: scores_of(logits), if the caller has them.
    counts: count_choices() of the chosen experts, which the all-reduce changes in place; None: the
    topk experts with the highest scores are counted."""
    if scores is None:
        scores = scores_of(logits, score_function)
    if counts is None:
        counts = count_choices(scores.topk(topk, -1).indices, real, scores.shape[-1])
    counts = all_reduce(counts, dist.ReduceOp.SUM, group).to(scores.dtype)
    tokens = counts[:, -1].sum()
    balance = z = torch.zeros_like(tokens)
    if losses.kind != "none":
        if score_function == "sigmoid":
            scores = _shares(scores, score_function)
        # a pool is balanced by itself: each row, or with "aux_loss" all rows together
        if losses.kind == "aux_loss":
            counts = counts.sum(0, keepdim=True)
        pools = counts[:, -1:]  # tokens per pool
        factors = scores.shape[-1] / topk * counts[:, :-1] / pools.square().clamp(min=1)
        if len(pools) > 1:
            factors = factors / (pools > 0).sum().clamp(min=1)
        balance = (scores * (factors * real.unsqueeze(-1))).sum()
    if losses.z:
        z = (torch.logsumexp(logits.float(), -1).square() * real).sum() / tokens.clamp(min=1)
    return balance, z, tokens


def counted(
    losses: BalancingLosses,
    group: dist.ProcessGroup | None,
    logits: torch.Tensor,
    real: torch.Tensor,
    topk: int,
    score_function: str,
    experts: torch.Tensor,
    scores: torch.Tensor | None = None,
    are_best: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count a router's choices for one micro-batch and compute its losses -> (row for
    RouterStatistics [E + 3], balancing loss, z loss), the losses as balancing_parts() gives them,
    or 0 if no loss is on. Collective over `group` if a loss is on.

    experts: the chosen ones, [s b, k] or [s, b, k]. are_best: they are those with the k highest
    scores, so they need not be found again. Other arguments: see balancing_parts()."""
    counts = count_choices(experts, real, logits.shape[-1])
    chosen = counts[:, :-1].sum(0)
    balance = z = share = chosen.new_zeros(())
    if losses.on:
        args = logits, real, topk, score_function, scores, counts if are_best else None
        balance, z, tokens = balancing_parts(losses, group, *args)
        share = tokens.clamp(max=1 / num_ranks(group))  # this rank's part of the micro-batch
    parts = torch.stack([balance.detach(), z.detach(), share])
    return torch.cat([chosen.to(parts.dtype), parts]), balance, z


def routed(
    logits: torch.Tensor,
    real: torch.Tensor | None,
    losses: BalancingLosses,
    group: dist.ProcessGroup | None,
    are_best: bool,
    topk: int,
    score_function: str,
    *rule: Any,
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Choose the experts of each token by its logits [s, b, E] -> (weights [T, k], expert indices
    [T, k], what counted() gives), T = s b. real: bool [s, b], True for tokens; None: nothing is
    counted. topk and what follows: as in choose_experts(). Others: see counted()."""
    flat = logits.flatten(0, 1)
    logits = flat.view(logits.shape)  # megatron's linear needs the gradient in its memory order
    scores = scores_of(flat, score_function)
    weights, experts = choose_experts(scores, topk, score_function, *rule)
    if real is None:
        return weights, experts, None
    of_tokens = logits, real, topk, score_function, experts
    shared = scores.view(logits.shape), are_best
    return weights, experts, counted(losses, group, *of_tokens, *shared)


class RouterStatistics:
    """Sums up the expert choices and losses of this rank's routers between two calls of take(), for
    the log. Counting does not wait for the device.

    Each layer has one row: how often each expert was chosen, balancing loss, z loss, number of
    micro-batches. The last three are shares of this rank, which must be summed over ranks, and stay
    0 if no router loss is on. After resuming, the main rank also has the counts in the checkpoint.
    """

    def __init__(self, num_layers: int, num_experts: int):
        self.rows = torch.zeros(num_layers, num_experts + 3, dtype=torch.float64, device=device())
        # factor on the router losses of each micro-batch of this step
        self.loss_weight: float | torch.Tensor = 0.0
        # in place of loss_weight, for some micro-batches: by the address of their padding mask
        self.weights: dict[int, float] = {}

    def add(self, layer: int, losses: BalancingLosses, *found: torch.Tensor) -> torch.Tensor:
        """Add a micro-batch to the row of layer `layer` (from 0) -> the loss that its router adds,
        times loss_weight. losses: the coefficients. found: the three results of counted()."""
        row, balance, z = found
        self.rows[layer].add_(row)
        loss = balance * (losses.balance * self.loss_weight)
        if losses.z:
            loss = loss + z * (losses.z * self.loss_weight)
        return loss

    def sums(self) -> torch.Tensor:
        """The rows of the layers, each summed over all ranks: float64 [layers, E + 3] for E
        experts. The columns are: how often each expert was chosen, balancing loss, z loss, number
        of micro-batches. This rank's own rows do not change. Collective."""
        return sum_over_all(self.rows.clone())

    def take(self, losses: BalancingLosses) -> dict[str, Any]:
        """Metrics of the routers for the log, over all ranks; {} if no expert was chosen since the
        last call. losses: which losses are on. This rank's counts start again at 0. Collective.

        expert_load: for each MoE layer, how often each expert was chosen, divided by the mean over
        its experts.
        expert_load_max, expert_load_min: the load of a layer's busiest and of its least busy
        expert, averaged over layers.
        load_balancing_loss or seq_load_balancing_loss, and z_loss: averages over layers and
        micro-batches, without their coefficients."""
        rows = self.sums()
        self.rows.zero_()
        choices = rows[:, :-3]
        mixtures = choices.sum(-1) > 0
        if not mixtures.any():
            return {}
        load = choices[mixtures] / choices[mixtures].mean(-1, keepdim=True)
        out = {"expert_load_max": load.amax(-1).mean(), "expert_load_min": load.amin(-1).mean()}
        balance, z, batches = rows[:, -3:].sum(0)
        if losses.kind != "none":
            prefix = "" if losses.kind == "aux_loss" else "seq_"
            out[prefix + "load_balancing_loss"] = balance / batches
        if losses.z:
            out["z_loss"] = z / batches
        shares = [[round(share, 3) for share in layer] for layer in load.tolist()]
        return {**{key: float(value) for key, value in out.items()}, "expert_load": shares}


def address_of(mask: torch.Tensor) -> int:
    """The memory address of a padding mask. A router recognises a micro-batch by it, also when
    recomputation and pipelines run micro-batches in another order."""
    return mask.untyped_storage().data_ptr()


# ---- router


class Router(TopKRouter):
    """megatron's router, with transformers' routing rules, and balancing losses that leave out
    padding.

    statistics: counts choices and losses; the backend sets it in training. None: nothing is counted
    and no loss is added. replay: function (router, padding mask, chosen expert indices [T, k]) ->
    the indices to use instead; None: the chosen ones are used."""

    statistics: RouterStatistics | None = None
    # (router, padding_mask, experts [T, k]) -> the experts that it uses (part_routes.py)
    replay: Callable[["Router", torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    gives_choices = False  # routing gives expert indices, instead of megatron's bool maps

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if config.add_moe_bias:
            self.bias = new_weight(config, config.num_moe_experts)
            self.bias.sequence_parallel = config.sequence_parallel

    @property
    def takes_best_scores(self) -> bool:
        """True if the router chooses the experts with the k highest scores, because there is
        neither an expert bias nor a limit to the best groups of experts. A replay of recorded
        choices may still choose others."""
        return self.expert_bias is None and not self.config.moe_router_num_groups

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Router":
        """Apply `fn` to the parameters and buffers, for Module.to() and the like. Afterwards the
        expert bias is float32 whatever `fn` made of it, and so is the router's weight with
        moe_router_weight_in_fp32."""
        super()._apply(fn, recurse)
        self._maintain_float32_expert_bias()
        if self.config.moe_router_weight_in_fp32:
            self.weight.data = self.weight.data.float()
        return self

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """The router's linear layer: hidden states [s, b, h] -> logits [s, b, E] for E experts, in
        the dtype moe_router_dtype (None: the input's dtype). The output of an enabled LoRA adapter
        is added."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(
            self.config.moe_router_dtype, input.dtype
        )
        bias = None if self.bias is None else self.bias.to(dtype)
        if compiles(input) and fused("_moe").suits_router(input, self.weight, dtype):
            logits = fused("_moe").LogitsOfRouter.apply(input, self.weight)
            logits = logits if bias is None else logits + bias
        else:
            logits = F.linear(input.to(dtype), self.weight.to(dtype), bias)
        adapter = beside(self)
        if adapter is not None:
            logits = logits + adapter(input).to(logits.dtype)
        return logits

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each token by its logits [s, b, E] -> (weights, choices), both
        [T, E] for T = s b tokens and E experts. Experts that are not chosen have the weight 0 and
        the choice False. If the attribute gives_choices is True, the result is
        (weights, expert indices), both [T, k] for k experts per token.

        padding_mask: bool [s, b], True for padding; None: no padding. In training with `statistics`
        set and gradients enabled, this also counts choices. If the load-balancing loss or the z
        loss is on, it then attaches their gradient to the weights, which is collective over
        tp_cp_group."""
        config = self.config
        real = None
        # with recomputation this runs twice: count only the second run, which has gradients
        statistics = self.statistics if self.training and torch.is_grad_enabled() else None
        if statistics is not None:
            if padding_mask is None:
                padding_mask = torch.zeros_like(logits[..., 0], dtype=torch.bool)
            real = ~padding_mask
        losses = BalancingLosses.of(config)
        group = self.tp_cp_group if num_ranks(self.tp_cp_group) > 1 else None
        replace = None
        if self.replay is not None:
            replace = functools.partial(self.replay, self, padding_mask)
        by_kernel = compiles(logits)
        route = functools.partial(fused("_moe").routed, routed) if by_kernel else routed
        of_router = self.takes_best_scores, self.topk, self.score_function
        scale = config.moe_router_topk_scaling_factor
        rule = config.moe_router_norm_topk_prob, scale, self.expert_bias
        groups = config.moe_router_num_groups, config.moe_router_group_topk
        rule = *rule, *groups, config.moe_router_group_score, replace
        weights, experts, found = route(logits, real, losses, group, *of_router, *rule)
        if statistics is not None:
            usual = statistics.loss_weight
            statistics.loss_weight = statistics.weights.get(address_of(padding_mask), usual)
            loss = statistics.add(self.layer_number - 1, losses, *found)
            if self.enable_expert_bias:
                self.local_tokens_per_expert += found[0][:-3]
            if losses.on:
                # the loss gets its gradient where the weights get theirs; megatron's schedule
                # scales it like the micro-batch's main loss
                weights = MoEAuxLossAutoScaler.apply(weights, loss)
        if self.gives_choices:
            return weights, experts
        nowhere = weights.new_zeros(len(weights), logits.shape[-1])
        return nowhere.scatter(1, experts, weights), nowhere.bool().scatter(1, experts, True)


# ---- to experts and back


def copies_of_rows(x: torch.Tensor, tokens: torch.Tensor, room: int = 0) -> torch.Tensor:
    """x[tokens], for x [T, h]. room: see part_triton_moe.rows_with_room(); it has no effect where
    plain torch copies."""
    return fused("_moe").copies_of_rows(x, tokens, room) if compiles(x) else x[tokens]


def sums_of_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Add up the k rows of each token, one from each of its experts: rows [T k, h] -> [T, h] for T
    tokens. places: [T, k], the indices of a token's rows in `rows`."""
    if compiles(rows):
        return fused("_moe").sums_of_rows(rows, places)
    first, *others = places.unbind(1)
    total = rows[first].to(torch.promote_types(rows.dtype, torch.float32))
    for places_of_choice in others:
        total = total + rows[places_of_choice]
    return total.to(rows.dtype)


class ToExperts(torch.autograd.Function):
    """Copy each of T tokens to k rows, one for each of its experts, and sort the rows by expert:
    tokens x [T, h] and routing weights [T, k] -> rows [T k, h] and their weights [T k]. Nothing is
    sent to other ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        order: torch.Tensor,
        tokens: torch.Tensor,
        places: torch.Tensor,
        room: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(places)
        return copies_of_rows(x, tokens, room), weights.flatten()[order]

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor, grad_of_weights: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return sums_of_rows(grad, places), grad_of_weights[places], None, None, None, None


class FromExperts(torch.autograd.Function):
    """Add up the k rows of each of T tokens, one from each of its experts: rows [T k, h], sorted by
    expert -> [T, h]. Nothing is sent to other ranks."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, room: int = 0
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.room = room
        return sums_of_rows(rows, places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (tokens,) = ctx.saved_tensors
        return copies_of_rows(grad, tokens, ctx.room), None, None, None


def sorted_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """Sort the (token, choice) pairs of expert indices [T, k] by expert -> (order, tokens, places,
    counts). counts: int64 [num_experts], how many tokens chose each expert."""
    if compiles(experts):
        return fused("_moe").sorted_by_expert(experts, num_experts)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    rows = torch.arange(len(order), device=experts.device)
    places = torch.empty_like(rows).scatter_(0, order, rows).view(experts.shape)
    counts = flat.new_zeros(num_experts).index_add_(0, flat, torch.ones_like(flat))
    return order, order // experts.shape[1], places, counts


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """megatron's all-to-all dispatcher, which sends tokens to the ranks of their experts, with
    another way to sort tokens by expert: gathers instead of scattered additions. From the router it
    takes expert indices, int64 [T, k], and weights [T, k] for k experts per token, instead of bool
    maps over all experts."""

    room = 0  # see Experts.room

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy each token to k rows, one for each of its experts, and sort the rows by expert ->
        (rows [T k, h], their weights [T k]). hidden_states: [s, b, h]. experts, weights: the
        indices and routing weights of each token's k experts, [T, k] for T = s b tokens. It calls
        count(), and is collective if that is."""
        self.hidden_shape = hidden_states.shape
        self.probs = weights
        order, self.tokens, self.places, counts = sorted_by_expert(experts, self.num_experts)
        self.tokens_per_expert = self.count(experts, counts)
        flat = hidden_states.reshape(-1, self.hidden_shape[-1])
        return ToExperts.apply(flat, weights, order, self.tokens, self.places, self.room)

    def count(self, experts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The number of tokens that each of this rank's experts gets, from all ranks that share the
        experts. experts: indices [T, k] of this rank's tokens. counts: how many chose each expert.
        Collective over those ranks."""
        chosen = experts.new_zeros(len(experts), self.num_experts, dtype=torch.bool)
        chosen.scatter_(1, experts, True)
        return self._maybe_dtoh_and_synchronize("before_permutation_1", self.preprocess(chosen))

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Add up the outputs of each token's k experts: rows [T k, h], sorted by expert ->
        [s, b, h], the shape of the hidden_states given to dispatch_preprocess()."""
        out = FromExperts.apply(rows, self.tokens, self.places, self.room)
        return out.view(self.hidden_shape)


class LocalDispatcher(Dispatcher):
    """Dispatcher for a rank that has all experts, each with its whole matrices. It exchanges
    nothing with other ranks, and never waits for the device."""

    def count(self, experts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return counts

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy tokens to rows sorted by expert, with arguments and results as in Dispatcher. If
        hidden_states has an attribute `again`, a function that computes hidden_states once more
        (see part_quantised.py), the rows get an attribute `again` that computes the rows once more.
        """
        rows, of_rows = super().dispatch_preprocess(hidden_states, experts, weights)
        again = getattr(hidden_states, "again", None)
        if again is not None:
            tokens = self.tokens
            rows.again = lambda: copies_of_rows(again().flatten(0, -2), tokens)
        return rows, of_rows

    def token_dispatch(
        self, rows: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rows, weights

    def dispatch_postprocess(
        self, rows: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return rows, self.tokens_per_expert, weights

    def combine_preprocess(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def token_combine(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


# ---- experts


def new_weight(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Create a parameter of the given shape, on this rank's device and in the model's dtype. It is
    filled with ones, which weights from files or a seed replace later."""
    on_device = dict(dtype=config.params_dtype, device=torch.cuda.current_device())
    return torch.nn.Parameter(torch.ones(shape, **on_device))


class ExpertsBias(torch.autograd.Function):
    """Autograd function through which the biases of experts get their gradient. Forward gives the
    rows [T, c] back as they are, because the activation adds each expert's bias [n, c], detached.
    Backward computes the biases' gradient by a matmul with of_expert [T, n], a one-hot matrix of
    each row's expert: scattered additions would have no fixed order."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, bias: torch.Tensor, of_expert: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(of_expert)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        [of_expert] = ctx.saved_tensors
        return grad, of_expert.t() @ grad if ctx.needs_input_grad[1] else None, None


class ExpertBiases(torch.nn.Module):
    """The biases of this rank's experts for one of their two matrices, as a module. The parameter's
    name "bias" exempts it from megatron's weight decay. forward() returns the parameter: with
    overlap_param_gather, hooks wait in the call of a module until its parameters have arrived."""

    def __init__(self, bias: torch.nn.Parameter):
        super().__init__()
        self.bias = bias

    def forward(self) -> torch.nn.Parameter:
        return self.bias


class Experts(MegatronModule):
    """SwiGLU experts with stacked weights: fc1 [n, 2, f, h], gate before up, and fc2 [n, h, f], for
    the n experts on this rank, the hidden size h and f columns per expert on this rank. See
    forward() for its inputs. These fields of the config matter:

    add_moe_bias: experts have biases too, [n, 2, f] and [n, h], and gpt-oss's activation,
    kernels.weighted_clamped_swiglu, with the limit activation_func_clamp_value. Expert tensor
    parallelism does not split the [n, h] biases.
    moe_grouped_gemm: one grouped GEMM for all experts; otherwise, or if a row or column of the
    matrices is no multiple of 16 bytes, a loop over experts."""

    accumulates = False  # backward adds the gradients of weights to their main_grad
    room = 0  # columns that an adapter puts beside inputs and gradients (part_triton_moe.py)

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ):
        super().__init__(config=config)
        self.ep_group = pg_collection.ep
        self.etp_group = pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        n = num_local_experts
        h = config.hidden_size
        f = config.moe_ffn_hidden_size // self.etp_group.size()
        self.fc1 = self._new_weight(n, 2, f, h)
        self.fc2 = self._new_weight(n, h, f)
        self.has_biases = config.add_moe_bias
        if self.has_biases:
            self.linear_fc1 = ExpertBiases(self._new_weight(n, 2, f))
            self.linear_fc2 = ExpertBiases(self._new_weight(n, h, is_cut=False))

    def _new_weight(self, *shape: int, is_cut: bool = True) -> torch.nn.Parameter:
        """Create a parameter that stacks a weight of this rank's experts along axis 0, with the
        attributes that megatron reads. is_cut: True if axis 2 is sharded over the
        expert-tensor-parallel ranks."""
        weight = new_weight(self.config, *shape)
        # its gradient is summed over the ranks with the same experts, not over all data-parallel
        # ranks; set even if both are the same (ep 1, etp < tp)
        weight.allreduce = False
        # unsharded experts differ between ranks too: without the mark the gradient norm would skip
        # those of every rank but the first
        weight.tensor_model_parallel = is_cut or self.etp_group.rank() == 0
        weight.partition_dim = 2
        weight.partition_stride = 1
        return weight

    def accumulate_in_place(self) -> None:
        """From now on, let grouped GEMMs add the gradients of trained weights to main_grad, the
        float32 gradient buffers of megatron's DDP. DDP itself would read and write each gradient
        once more."""
        self.accumulates = True

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """List the tensors of each expert on this rank: yield (the expert's index in the layer,
        megatron's name such as "linear_fc1.weight", a view of the tensor). Matrices have two
        dimensions, biases one."""
        n = len(self.fc1)
        for i in range(n):
            number = n * self.ep_group.rank() + i
            yield number, "linear_fc1.weight", self.fc1[i].flatten(0, 1)
            yield number, "linear_fc2.weight", self.fc2[i]
            if self.has_biases:
                yield number, "linear_fc1.bias", self.linear_fc1.bias[i].flatten()
                yield number, "linear_fc2.bias", self.linear_fc2.bias[i]

    def forward(
        self, x: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Apply this rank's n experts to their rows -> (outputs times probs [T, h], None). x:
        [T, h], rows sorted by expert. tokens_per_expert: [n], the number of rows of each expert.
        probs: [T], the routing weight of each row. With expert tensor parallelism the outputs are
        partial sums, which the dispatcher adds up over ranks."""
        ends = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        adapter = beside(self)

        def grouped(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            """Multiply the rows of each expert in t by the expert's transposed matrix in w
            [n, out, in]: t [T, in] -> [T, out]. If w is [T, in] instead, with t [T, out]: compute
            t^T w over each expert's rows -> [n, out, in]."""
            if w.dim() == 2:
                return F.grouped_mm(t.mT, w, offs=ends)
            return F.grouped_mm(t, w.mT, offs=ends)

        def one_by_one(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            """The same, in a loop over experts."""
            counts = tokens_per_expert.tolist()
            parts = t.split(counts)
            if w.dim() == 2:
                pairs = zip(parts, w.split(counts), strict=True)
                return torch.stack([of_out.mT @ of_in for of_out, of_in in pairs])
            return torch.cat([F.linear(part, one) for part, one in zip(parts, w, strict=True)])

        def product(projections: tuple[str, ...], t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            # a grouped GEMM needs rows in multiples of 16 bytes; ranks of adapters are padded
            size = math.gcd(math.prod(w.shape[1:-1]), w.shape[-1]) * w.itemsize
            is_grouped = self.config.moe_grouped_gemm and size % 16 == 0
            multiply = grouped if is_grouped else one_by_one
            if adapter is not None:
                return adapter(projections, t, w, multiply)
            if self.accumulates and hasattr(w, "main_grad") and is_grouped and fused("_moe"):
                return fused("_moe").ExpertsProduct.apply(t, w, ends)
            return experts_product(t, w, multiply)

        def down(activation: Callable[..., torch.Tensor], *more: Any) -> torch.Tensor:
            hidden = activation(both, probs, *more)
            kept = both.detach(), probs.detach()
            hidden.again = functools.partial(activation, *kept, *more)  # see part_quantised.py
            return product(("down",), hidden, self.fc2)

        both = product(("gate", "up"), x, self.fc1)
        if not self.has_biases:
            return down(functools.partial(weighted_swiglu, room=self.room)), None
        rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
        experts = torch.searchsorted(ends, rows, right=True)
        numbers = torch.arange(len(self.fc1), device=x.device)
        of_expert = (experts.unsqueeze(1) == numbers).to(x.dtype)
        biases = self.linear_fc1().flatten(1)
        both = ExpertsBias.apply(both, biases, of_expert)
        limit = self.config.activation_func_clamp_value
        out = down(weighted_clamped_swiglu, limit, biases.detach(), experts, self.room)
        bias = self.linear_fc2()
        etp = self.etp_group.size()
        if etp > 1:  # the dispatcher sums over the ranks that share an expert
            bias = sum_gradients(bias, self.etp_group) / etp
        return out.addmm_((of_expert * probs.unsqueeze(-1)).to(out.dtype), bias), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The experts' weights for megatron's distributed checkpoints:
        {name: megatron's ShardedTensor}. Axis 0 is sharded over the expert-parallel ranks, and axis
        2, if a tensor has one, over the expert-tensor-parallel ranks. prefix: of the names.
        sharded_offsets: megatron's description of axes in front. metadata: not used."""
        first = len(sharded_offsets)
        expert = (first, self.ep_group.rank(), self.ep_group.size())
        etp = self.etp_group.rank()
        columns = (first + 2, etp, self.etp_group.size())
        weights = {"fc1": self.fc1, "fc2": self.fc2}
        if self.has_biases:
            weights |= {
                f"linear_{name}.bias": self.get_parameter(f"linear_{name}.bias") for name in weights
            }
        state = {}
        for name, weight in weights.items():
            cuts = [expert, columns] if weight.dim() > 2 else [expert]
            copy = 0 if weight.dim() > 2 else etp
            state[prefix + name] = ShardedTensor.from_rank_offsets(
                prefix + name,
                weight,
                *sharded_offsets,
                *cuts,
                replica_id=(0, copy, self.dp_group.rank()),
                prepend_axis_num=first,
            )
        return state


# ---- the layer


class SwiGLU(MegatronModule):
    """silu(gate) * up: [..., 2 f] -> [..., f], as an activation module for megatron's MLP."""

    def __init__(self, config: TransformerConfig | None = None):
        super().__init__(config=config)

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        return swiglu(both)


def mlp_parts(config: TransformerConfig, has_norm: bool) -> MLPSubmodules:
    """Choose the classes that megatron's MLP is built from: its two linears, and SwiGLU as the
    activation. has_norm: with Transformer Engine, True lets the first linear also apply the norm
    before the MLP; otherwise it has no effect."""
    column = ColumnLinear
    row = RowLinear
    if config.transformer_impl == "transformer_engine":
        column, row = function_of("part_transformer_engine:linears")(has_norm)
    return MLPSubmodules(linear_fc1=column, linear_fc2=row, activation_func=SwiGLU)


class SharedExperts(SharedExpertMLP):
    """megatron's shared experts, with the linears that mlp_parts() chooses."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        gate: bool,
        **unused: Any,
    ):
        parts = mlp_parts(config, has_norm=False)
        super().__init__(config, parts, gate, pg_collection=pg_collection)


class Mixture(MoELayer):
    """megatron's MoE layer with this package's router, experts and shared experts.

    It also gets this package's token dispatcher, unless moe_permute_fusion,
    moe_shared_expert_overlap or another dispatcher than alltoall is configured.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection
    ):
        parts = MoESubmodules(experts=Experts, shared_experts=SharedExperts, router=Router)
        super().__init__(config, parts, layer_number, pg_collection)
        self.set_layer_number(layer_number)
        others = config.moe_permute_fusion or config.moe_shared_expert_overlap
        if not others and config.moe_token_dispatcher_type == "alltoall":
            is_alone = pg_collection.ep.size() == pg_collection.expt_tp.size() == 1
            dispatcher = LocalDispatcher if is_alone else Dispatcher
            indices = self.local_expert_indices
            self.token_dispatcher = dispatcher(
                self.num_local_experts, indices, config=config, pg_collection=pg_collection
            )
            self.router.gives_choices = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.token_dispatcher, LocalDispatcher):
            self.token_dispatcher.room = self.experts.room
        output = super().forward(*args, **kwargs)
        # megatron's dispatchers keep the last weights: their graph would keep the nodes of DDP's
        # hooks alive, and those the model
        state: Any = vars(self.token_dispatcher)
        state |= {name: value.detach() for name, value in state.items() if torch.is_tensor(value)}
        return output


def routers_of(chunks: Iterable[torch.nn.Module]) -> list[Router]:
    """All routers in this rank's model chunks."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
