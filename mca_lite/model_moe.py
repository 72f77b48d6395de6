"""The parts of a mixture-of-experts layer: router, dispatcher, experts. Shared experts: megatron.

Letters: T tokens, k experts of a token, E experts, n of them on this rank, f columns of an expert
on this rank (1 / etp of them), h hidden size. Experts are spread over the expert-parallel ranks,
e = n * ep_rank + i, and their matrices are cut over the expert-tensor-parallel ranks.

A token goes to k experts, so it has k rows there. `order` [T k] lists the pairs (token, choice) by
expert, tokens in turn; `places` [T, k] is its inverse: the row of each pair. Both directions, and
their gradients, read at such places, and sum k rows in float32, rounded once. Additions to rows, as
in megatron's permutation, would collide on a GPU. On one expert-parallel rank nothing waits for the
device.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .kernels import compiled, swiglu, weighted_clamped_swiglu, weighted_swiglu
from .loss_tokens import all_reduce, num_ranks
from .mcore import (
    MegatronModule,
    MLPSubmodules,
    MoEAlltoAllTokenDispatcher,
    MoEAuxLossAutoScaler,
    MoELayer,
    MoESubmodules,
    ShardedTensor,
    SharedExpertMLP,
    TESpecProvider,
    TopKRouter,
)
from .model_linears import ColumnLinear, RowLinear, beside
from .parallel import device, sum_gradients, sum_over_all

# ---- routing


def scores_of(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """softmax or sigmoid of logits [T, E] over the experts, in float32 at least."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.softmax(logits, -1) if score_function == "softmax" else torch.sigmoid(logits)


def choose_experts(
    logits: torch.Tensor,
    topk: int,
    score_function: str = "softmax",
    normalise: bool = True,
    scaling: float | None = None,
    bias: torch.Tensor | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score: str = "top2",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, experts) [T, k] of logits [T, E], as the routers of transformers give them.

    bias [E] is added to the scores for the choice alone. With groups, only experts of the
    group_topk best groups are open; a group counts by its two best experts ("top2") or its best
    ("max"). normalise: a token's weights sum to 1.
    """
    scores = scores_of(logits, score_function)
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
    weights = scores.gather(-1, experts)
    if normalise:
        tiny = {"softmax": 0.0, "sigmoid": 1e-20}[score_function]
        weights = weights / (weights.sum(-1, keepdim=True) + tiny)
    if scaling is not None:
        weights = weights * scaling
    return weights, experts


class BalancingLosses(NamedTuple):
    """Coefficients of the additions to the objective; `kind` is moe_router_load_balancing_type."""

    kind: str = "none"
    balance: float = 0.0
    z: float = 0.0

    @property
    def on(self) -> bool:
        return (self.kind != "none" and self.balance > 0) or self.z > 0

    @classmethod
    def of(cls, settings, default: float = 0.0) -> "BalancingLosses":
        """From TrainingArguments or McaModelConfig. default: the balancing coefficient of a model,
        for arguments without one."""
        balance = settings.moe_aux_loss_coeff
        if balance is None:
            balance = default
        kind = settings.moe_router_load_balancing_type if balance else "none"
        return cls(kind, balance, settings.moe_z_loss_coeff or 0.0)


def balancing_parts(
    logits: torch.Tensor,
    real: torch.Tensor,
    kind: str,
    topk: int,
    score_function: str,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's part of (balancing loss, z loss), and the number of real tokens of the
    micro-batch, float32.

    logits [s, b, E]; real bool [s, b]. group: the ranks that share the micro-batch's tokens (None:
    this one alone), whose parts sum to the losses. kind "none": the first is 0. Collective: one
    all-reduce over the group.
    """
    num_experts = logits.shape[-1]
    real = real.to(torch.float32).contiguous()
    scores = scores_of(logits, score_function)
    if score_function == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    chosen = torch.zeros_like(scores).scatter(-1, scores.topk(topk, -1).indices, 1.0)
    choices = (chosen * real[..., None]).sum(0)
    counts = torch.cat((choices, real.sum(0)[:, None]), -1).detach()  # [b, E + 1]
    counts = all_reduce(counts, dist.ReduceOp.SUM, group)
    mass = (scores * real[..., None]).sum(0)  # [b, E]
    tokens = counts[:, -1].sum()
    # pools are balanced each by itself: rows, or all rows together
    if kind == "aux_loss":
        counts = counts.sum(0, keepdim=True)
        mass = mass.sum(0, keepdim=True)
    choices = counts[:, :-1]
    pools = counts[:, -1]  # tokens of each
    size = pools.clamp(min=1)[:, None]
    balance = num_experts * (choices / (size * topk) * (mass / size)).sum(-1)
    num_pools = (pools > 0).sum().clamp(min=1)
    balance = balance.sum() / num_pools * (kind != "none")
    z = (torch.logsumexp(logits.float(), -1).square() * real).sum() / tokens.clamp(min=1)
    return balance, z, tokens


def updated_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float) -> torch.Tensor:
    """The router's bias [.., E] after a step with counts [.., E] of choices of its experts: `rate`
    more for experts below the mean, less for those above it."""
    return bias + (counts.mean(-1, keepdim=True) - counts).sign() * rate


class RouterStatistics:
    """Counts of the routers of this rank since the last log line; nothing here waits for the
    device.

    A layer has a row: choices of each expert, the balancing loss, the z loss, micro-batches.
    """

    def __init__(self, num_layers: int, num_experts: int):
        self.rows = torch.zeros(num_layers, num_experts + 3, dtype=torch.float64, device=device())
        # weight of a micro-batch's losses beside its main loss, in this step
        self.loss_weight: float | torch.Tensor = 0.0

    def count(self, layer: int, experts: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """float32 [E]: choices of each expert by real tokens, counted for the log. experts [T, k],
        real bool [T]."""
        choices = torch.zeros_like(self.rows[layer, :-3], dtype=torch.float32)
        choices.index_add_(0, experts.flatten(), real.float().repeat_interleave(experts.shape[1]))
        self.rows[layer, :-3] += choices
        return choices

    def losses(
        self, layer: int, logits, real, losses: BalancingLosses, topk, score_function, group=None
    ) -> torch.Tensor:
        """The router's addition to the loss of a micro-batch, counted for the log. Arguments and
        collective: those of balancing_parts."""
        balance, z, tokens = balancing_parts(logits, real, losses.kind, topk, score_function, group)
        share = (tokens > 0) / num_ranks(group)  # this rank's part of the micro-batch
        self.rows[layer, -3:] += torch.stack([balance.detach(), z.detach(), share])
        return (losses.balance * balance + losses.z * z) * self.loss_weight

    def sums(self) -> torch.Tensor:
        """The rows summed over all ranks. Collective."""
        return sum_over_all(self.rows.clone())

    def take(self, losses: BalancingLosses) -> dict[str, float | list]:
        """Numbers of all ranks for the log; resets the counts. Collective.

        expert_load: for each mixture layer the choices of each of its experts over their mean.
        expert_load_max and _min: those of the most and of the least loaded expert of a layer,
        averaged over these layers; the losses, without their coefficients, averaged over these
        layers and the micro-batches.
        """
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


def count_real_micro_batches(batches: Iterable[dict]) -> int:
    """Count the arranged micro-batches with any real token; fillers have none."""
    return sum(not bool(batch["padding_mask"].all()) for batch in batches)


# ---- router


class Router(TopKRouter):
    """megatron's router with the routing of transformers' models, and balancing losses of real
    tokens alone.

    The backend sets `statistics` for training; without them nothing is counted and no loss is
    added.
    """

    statistics: RouterStatistics | None = None
    gives_choices = False  # to the dispatcher, in place of megatron's maps

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        if config.add_moe_bias:
            self.bias = new_weight(config, config.num_moe_experts)
            self.bias.sequence_parallel = config.sequence_parallel

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._maintain_float32_expert_bias()  # whatever the dtype of the model
        return self

    def gating(self, input):
        """[s, b, h] -> logits [s, b, E] in moe_router_dtype. Megatron's own needs Transformer
        Engine on a GPU."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(
            self.config.moe_router_dtype, input.dtype
        )
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = F.linear(input.to(dtype), self.weight.to(dtype), bias)
        adapter = beside(self)
        if adapter is not None:
            logits = logits + adapter(input).to(logits.dtype)
        return logits

    def routing(self, logits, padding_mask=None):
        """logits [s, b, E], padding_mask bool [s, b] with True meaning padding -> (weights [T, E],
        choices bool [T, E]); with gives_choices (weights [T, k], experts [T, k])."""
        config = self.config
        flat = logits.flatten(0, 1)
        weights, experts = choose_experts(
            flat,
            self.topk,
            self.score_function,
            config.moe_router_norm_topk_prob,
            config.moe_router_topk_scaling_factor,
            self.expert_bias,
            config.moe_router_num_groups,
            config.moe_router_group_topk,
            config.moe_router_group_score,
        )
        # recomputation runs a second time, with gradients: it counts then
        if self.statistics is not None and self.training and torch.is_grad_enabled():
            real = torch.ones_like(logits[..., 0], dtype=torch.bool)
            if padding_mask is not None:
                real = ~padding_mask
            layer = self.layer_number - 1
            choices = self.statistics.count(layer, experts, real.flatten())
            if self.enable_expert_bias:
                self.local_tokens_per_expert += choices
            losses = BalancingLosses.of(config)
            if losses.on:
                # a view of the flat form: megatron's linear needs its gradient in that order
                shared = flat.view(logits.shape), real, losses, self.topk, self.score_function
                loss = self.statistics.losses(layer, *shared, self.tp_cp_group)
                # adds its gradient to that of the weights; megatron's schedule scales it like the
                # main loss of a micro-batch
                weights = MoEAuxLossAutoScaler.apply(weights, loss)
        if self.gives_choices:
            return weights, experts
        nowhere = torch.zeros(flat.shape, dtype=weights.dtype, device=flat.device)
        return nowhere.scatter(1, experts, weights), nowhere.bool().scatter(1, experts, True)


# ---- to experts and back


@compiled
def sums_of_rows(rows, places):
    """The sum of the k rows [T k, h] of each token -> [T, h]."""
    first, *others = places.unbind(1)
    # read after read: a compiled sum over k spreads k over threads, and takes three times as long
    total = rows[first].to(torch.promote_types(rows.dtype, torch.float32))
    for places_of_choice in others:
        total = total + rows[places_of_choice]
    return total.to(rows.dtype)


class ToExperts(torch.autograd.Function):
    """x [T, h] and weights [T, k] in the order of experts: [T k, h] and [T k]."""

    @staticmethod
    def forward(ctx, x, weights, order, places):
        ctx.save_for_backward(places)
        return x[order // places.shape[1]], weights.flatten()[order]

    @staticmethod
    def backward(ctx, grad, grad_of_weights):
        (places,) = ctx.saved_tensors
        return sums_of_rows(grad, places), grad_of_weights[places], None, None


class FromExperts(torch.autograd.Function):
    """Rows [T k, h] in the order of experts -> their sums for each token [T, h]."""

    @staticmethod
    def forward(ctx, rows, order, places):
        ctx.save_for_backward(order, places)
        return sums_of_rows(rows, places)

    @staticmethod
    def backward(ctx, grad):
        order, places = ctx.saved_tensors
        return grad[order // places.shape[1]], None, None


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """megatron's all-to-all with the permutation of this module. Takes the router's choices as
    int64 [T, k] in place of a map, and their weights [T, k]."""

    def dispatch_preprocess(self, hidden_states, experts, weights):
        """[s, b, h] -> rows in the order of experts [T k, h], and their weights [T k]."""
        self.hidden_shape = hidden_states.shape
        self.probs = weights
        self.order = experts.flatten().argsort(stable=True)
        rows = torch.arange(len(self.order), device=experts.device)
        self.places = torch.empty_like(rows).scatter_(0, self.order, rows).view(experts.shape)
        chosen = experts.new_zeros(len(experts), self.num_experts, dtype=torch.bool)
        self.tokens_per_expert = self.count(chosen.scatter_(1, experts, True))
        flat = hidden_states.reshape(-1, self.hidden_shape[-1])
        return ToExperts.apply(flat, weights, self.order, self.places)

    def count(self, chosen):
        """Tokens of each local expert, of chosen bool [T, E]."""
        return self._maybe_dtoh_and_synchronize("before_permutation_1", self.preprocess(chosen))

    def combine_postprocess(self, rows):
        """Rows in the order of experts [T k, h] -> [s, b, h]."""
        return FromExperts.apply(rows, self.order, self.places).view(self.hidden_shape)


class LocalDispatcher(Dispatcher):
    """The same for one expert-parallel rank: nothing is exchanged, nothing waits for the device."""

    def count(self, chosen):
        return chosen.sum(0)

    def token_dispatch(self, rows, weights):
        return rows, weights

    def dispatch_postprocess(self, rows, weights):
        return rows, self.tokens_per_expert, weights

    def combine_preprocess(self, rows):
        return rows

    def token_combine(self, rows):
        return rows


# ---- experts


def new_weight(config, *shape: int) -> torch.nn.Parameter:
    """A parameter of ones on this rank's device, in the dtype of the model."""
    on_device = dict(dtype=config.params_dtype, device=torch.cuda.current_device())
    return torch.nn.Parameter(torch.ones(shape, **on_device))


@compiled
def _add(into, gradient):
    into += gradient


def _accumulate(weight, gradient) -> None:
    """Hook of a weight: add its gradient to DDP's buffer, and mark it as added for megatron."""
    _add(weight.main_grad, gradient)
    weight.grad_added_to_main_grad = True


class ExpertBiases(torch.nn.Module):
    """The biases of the experts of a rank, one for each matrix. By its name megatron leaves it out
    of weight decay; the hooks of overlap_param_gather wait for it in a call."""

    def __init__(self, bias: torch.nn.Parameter):
        super().__init__()
        self.bias = bias

    def forward(self):
        return self.bias


class Experts(MegatronModule):
    """SwiGLU experts in stacked weights: fc1 [n, 2, f, h], gate before up, and fc2 [n, h, f]; with
    add_moe_bias also biases [n, 2, f] and [n, h], these whole on each rank.

    activation_func_clamp_value: gates are limited, and up is counted from -1 (kernels.py).
    moe_grouped_gemm: one grouped matrix product for all of them; otherwise one expert after
    another. The numbers are the same.
    """

    def __init__(self, num_local_experts: int, config, pg_collection, **unused):
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
        """A weight. is_cut: its axis 2 is, over the expert-tensor-parallel ranks."""
        weight = new_weight(self.config, *shape)
        # gradients are summed over the ranks with the same experts, even if these are all ranks
        # (ep 1, etp < tp)
        weight.allreduce = False
        # a whole expert is no duplicate either: without the mark the gradient norm would leave out
        # those of all ranks but the first
        weight.tensor_model_parallel = is_cut or self.etp_group.rank() == 0
        weight.partition_dim = 2
        weight.partition_stride = 1
        return weight

    def accumulate_in_place(self) -> None:
        """Add the weights' gradients to DDP's float32 ones here: DDP's addition of another dtype
        takes twice as long."""
        for weight in (self.fc1, self.fc2):
            if weight.requires_grad:
                weight.register_hook(functools.partial(_accumulate, weight))

    def tensors(self):
        """(number in the layer, name of megatron's tensor, view) of each local expert's: matrices
        have two dimensions, biases one."""
        n = len(self.fc1)
        for i in range(n):
            number = n * self.ep_group.rank() + i
            yield number, "linear_fc1.weight", self.fc1[i].flatten(0, 1)
            yield number, "linear_fc2.weight", self.fc2[i]
            if self.has_biases:
                yield number, "linear_fc1.bias", self.linear_fc1.bias[i].flatten()
                yield number, "linear_fc2.bias", self.linear_fc2.bias[i]

    def forward(self, x, tokens_per_expert, probs):
        """x [T, h] sorted by expert, tokens_per_expert [n], probs [T] -> ([T, h], None)."""
        ends = None
        adapter = beside(self)
        if self.config.moe_grouped_gemm:
            ends = tokens_per_expert.cumsum(0).to(
                device=x.device, dtype=torch.int32, non_blocking=True
            )

        def multiply(t, w):
            """Each expert's tokens t times the transpose of its matrix in w [n, out, in]."""
            # the grouped product needs rows of whole 16 bytes: the smallest adapters have fewer
            if ends is None or any(size * t.element_size() % 16 for size in w.shape[1:]):
                counts = tokens_per_expert.tolist()
                return torch.cat(
                    [F.linear(part, one) for part, one in zip(t.split(counts), w, strict=True)]
                )
            return F.grouped_mm(t, w.transpose(1, 2), offs=ends)

        def product(projections, t, w):
            if adapter is None:
                return multiply(t, w.flatten(1, -2))
            return adapter(projections, t, w, multiply)

        both = product(("gate", "up"), x, self.fc1)
        if not self.has_biases:
            return product(("down",), weighted_swiglu(both, probs), self.fc2), None
        of_expert = self._one_hot(x, tokens_per_expert)
        both = both + of_expert @ self.linear_fc1().flatten(1)
        limit = self.config.activation_func_clamp_value
        out = product(("down",), weighted_clamped_swiglu(both, probs, limit), self.fc2)
        bias = self.linear_fc2()
        etp = self.etp_group.size()
        if etp > 1:  # the dispatcher sums over the ranks that share an expert
            bias = sum_gradients(bias, self.etp_group) / etp
        return out + (of_expert * probs.unsqueeze(-1)).to(out.dtype) @ bias, None

    def _one_hot(self, x, tokens_per_expert):
        """[T, n] in the dtype of x: 1 for the expert of each of its rows. A product with it adds
        biases exactly, and its gradient does not depend on the order of additions."""
        ends = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0)
        rows = torch.arange(len(x), device=x.device).unsqueeze(1)
        return ((rows < ends) & (rows >= ends - ends.diff(prepend=ends.new_zeros(1)))).to(x.dtype)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """megatron's ShardedTensors: experts along the first axis, their columns along the
        third."""
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
    """silu(gate) * up of [..., 2 f] -> [..., f], as megatron's MLP takes an activation."""

    def __init__(self, config=None):
        super().__init__(config=config)

    def forward(self, both):
        return swiglu(both)


def mlp_parts(config, has_norm: bool) -> MLPSubmodules:
    """The parts of megatron's MLP. has_norm: Transformer Engine's first linear applies the norm."""
    column = ColumnLinear
    row = RowLinear
    if config.transformer_impl == "transformer_engine":
        provider = TESpecProvider()
        row = provider.row_parallel_linear()
        column = provider.column_parallel_linear()
        if has_norm:
            column = provider.column_parallel_layer_norm_linear()
    return MLPSubmodules(linear_fc1=column, linear_fc2=row, activation_func=SwiGLU)


class SharedExperts(SharedExpertMLP):
    """megatron's shared experts."""

    def __init__(self, config, pg_collection, gate: bool, **unused):
        parts = mlp_parts(config, has_norm=False)
        super().__init__(config, parts, gate, pg_collection=pg_collection)


class Mixture(MoELayer):
    """megatron's layer of experts with the parts of this module.

    The dispatcher too, unless the configuration needs another one of megatron's.
    """

    def __init__(self, config, layer_number: int, pg_collection):
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

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        # megatron's dispatchers keep the weights of the last tokens: with their graph they would
        # keep the nodes of DDP's hooks, and these the model, for good
        state = vars(self.token_dispatcher)
        state |= {name: value.detach() for name, value in state.items() if torch.is_tensor(value)}
        return output


def routers_of(chunks) -> list[Router]:
    """The routers of a rank's chunks."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
