"""The mathematics of routers: which experts a token goes to, and what keeps their loads even.

Letters: T tokens, E experts, k experts of a token. Plain functions, which both backends share.

Balancing losses are taken per micro-batch and layer, over the real tokens of the whole micro-batch:

    aux_loss        E sum_e f_e P_e    f_e = choices of expert e / (T k), without gradient
                                       P_e = mean score of expert e
    seq_aux_loss    the same of each row, averaged over the rows that have tokens (a packed row is
                    one row)
    z_loss          mean of logsumexp(logits)^2

f and P come from the plain scores, without bias and groups, as megatron-core and the DeepSeek-V3
paper have it. The objective adds the mean over all real micro-batches of a step, of the sum over
layers, times the coefficients.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from .loss_logits import all_reduce


def scores_of(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """softmax or sigmoid of logits [T, E] over the experts, in float32 at least."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
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
    choice = scores if bias is None else scores + bias
    if num_groups:
        grouped = choice.unflatten(-1, (num_groups, -1))
        of_group = grouped.topk(2, -1).values.sum(-1) if group_score == "top2" else grouped.amax(-1)
        best = of_group.topk(group_topk, -1, sorted=False).indices
        closed = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, best, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = choice.topk(topk, -1).indices
    weights = scores.gather(-1, experts)
    if normalise:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total if score_function == "softmax" else total + 1e-20)
    return weights if scaling is None else weights * scaling, experts


class BalancingLosses(NamedTuple):
    """Coefficients of what is added to the objective; `kind` is moe_router_load_balancing_type."""

    kind: str = "none"
    balance: float = 0.0
    z: float = 0.0

    @property
    def on(self) -> bool:
        return (self.kind != "none" and self.balance > 0) or self.z > 0

    @classmethod
    def of(cls, settings, models_own: float = 0.0) -> "BalancingLosses":
        """From TrainingArguments or McaModelConfig. models_own: the coefficient of a model, for
        arguments that give none."""
        kind, balance = settings.moe_router_load_balancing_type, settings.moe_aux_loss_coeff
        balance = models_own if balance is None else balance
        return cls(kind if balance else "none", balance, settings.moe_z_loss_coeff or 0.0)


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
    s, b, num_experts = logits.shape
    real = real.to(torch.float32).contiguous()
    scores = scores_of(logits, score_function)
    if score_function == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    chosen = torch.zeros_like(scores).scatter(-1, scores.topk(topk, -1).indices, 1.0)
    counts = torch.cat(
        [(chosen * real[..., None]).sum(0), real.sum(0)[:, None]], -1
    ).detach()  # [b, E + 1]
    counts = all_reduce(counts, dist.ReduceOp.SUM, group)
    choices, tokens = counts[:, :-1], counts[:, -1]
    mass = (scores * real[..., None]).sum(0)  # [b, E]
    pools = tokens  # how many each pool has that is balanced by itself: a row, or all rows together
    if kind == "aux_loss":
        choices, mass = choices.sum(0, keepdim=True), mass.sum(0, keepdim=True)
        pools = tokens.sum()[None]
    size = pools.clamp(min=1)[:, None]
    balance = num_experts * (choices / (size * topk) * (mass / size)).sum(-1)
    num_pools = (pools > 0).sum().clamp(min=1)
    balance = balance.sum() / num_pools if kind != "none" else balance.sum() * 0
    z = (torch.logsumexp(logits.float(), -1).square() * real).sum() / tokens.sum().clamp(min=1)
    return balance, z, tokens.sum()


def updated_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float) -> torch.Tensor:
    """The router's bias [.., E] after a step in which its experts were chosen counts [.., E] times:
    experts below the mean get `rate` more, those above it less."""
    return bias + (counts.mean(-1, keepdim=True) - counts).sign() * rate


class RouterStatistics:
    """What the routers of this rank did since the last line of the log, summed; nothing here waits
    for the device.

    A layer has a row: choices of each expert, the balancing loss, the z loss, micro-batches.
    """

    def __init__(self, num_layers: int, num_experts: int, device):
        self.rows = torch.zeros(num_layers, num_experts + 3, dtype=torch.float64, device=device)
        # what the losses of a micro-batch weigh beside the main loss of one, in this step
        self.loss_weight: float | torch.Tensor = 0.0

    def count(self, layer: int, choices: torch.Tensor) -> None:
        """choices [E]: how often real tokens of this rank chose each expert."""
        self.rows[layer, :-3] += choices

    def add_losses(self, layer: int, balance, z, share) -> None:
        """This rank's part of a micro-batch's losses; share: its part of the micro-batch, 0 where
        that is empty."""
        self.rows[layer, -3:] += torch.stack([balance.detach(), z.detach(), share])

    def losses(
        self, layer: int, logits, real, losses: BalancingLosses, topk, score_function, group=None
    ) -> torch.Tensor:
        """What the router of a layer adds to the loss of its micro-batch. It is counted for the
        log. Arguments and collective: those of balancing_parts."""
        balance, z, tokens = balancing_parts(logits, real, losses.kind, topk, score_function, group)
        share = (tokens > 0) / (1 if group is None else group.size())
        self.add_losses(layer, balance, z, share)
        return (losses.balance * balance + losses.z * z) * self.loss_weight

    def take(
        self, losses: BalancingLosses, reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, float | list]:
        """Numbers for the log, and a new start. reduce: the sum over all ranks; every rank must
        call it.

        expert_load: for each layer that is a mixture the choices of each of its experts over their
        mean. expert_load_max and _min: those of the most and of the least loaded expert of a layer,
        averaged over these layers; the losses, without their coefficients, averaged over these
        layers and the micro-batches.
        """
        rows = reduce(self.rows.clone())
        self.rows.zero_()
        choices = rows[:, :-3]
        mixtures = choices.sum(-1) > 0
        if not mixtures.any():
            return {}
        load = choices[mixtures] / choices[mixtures].mean(-1, keepdim=True)
        out = {"expert_load_max": load.amax(-1).mean(), "expert_load_min": load.amin(-1).mean()}
        balance, z, batches = rows[:, -3:].sum(0)
        if losses.kind == "aux_loss":
            out["load_balancing_loss"] = balance / batches
        elif losses.kind != "none":
            out["seq_load_balancing_loss"] = balance / batches
        if losses.z:
            out["z_loss"] = z / batches
        shares = [[round(share, 3) for share in layer] for layer in load.tolist()]
        return {**{key: float(value) for key, value in out.items()}, "expert_load": shares}


def choices_of(experts: torch.Tensor, real: torch.Tensor, num_experts: int) -> torch.Tensor:
    """float32 [E]: how often the real tokens chose each expert. experts [T, k], real bool [T]."""
    flat = experts.flatten()
    weights = real.to(torch.float32).repeat_interleave(experts.shape[1])
    return torch.zeros(num_experts, dtype=torch.float32, device=experts.device).index_add_(
        0, flat, weights
    )


def count_real_micro_batches(batches: Iterable[dict]) -> int:
    """Those that hold any real token; fillers do not."""
    count = 0
    for batch in batches:
        real = batch.get("attention_mask")
        if "padding_mask" in batch:
            real = ~batch["padding_mask"]
        count += real is None or bool(real.any())
    return count
