"""Preference losses: one table, LOSSES, of pure functions over log-probabilities. P pairs.

log p(response) = sum over its tokens of log softmax(z_t)[y_t]
DPO (arXiv:2305.18290)    D = (pi_c - pi_r) - (ref_c - ref_r)
                          L = -(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D)
ORPO (arXiv:2403.07691)   a = log p / tokens
                          log odds = (a_c - a_r) - (log(1 - exp a_c) - log(1 - exp a_r))
                          L = -a_c - beta log sigmoid(log odds)

The rules of configuration keys read the table too, so torch is imported in the functions: a typing
error must not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

REFERENCES = ("cached", "adapter", "model")
METRICS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "sft_loss",
)


class Responses(NamedTuple):
    """What a preference loss is a function of, each float32 [P]: the policy's log-probabilities of
    the responses, their numbers of tokens, and the reference's log-probabilities (None for a loss
    without a reference)."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_lens: torch.Tensor
    rejected_lens: torch.Tensor
    reference_chosen: torch.Tensor | None = None
    reference_rejected: torch.Tensor | None = None


class PreferenceLoss(NamedTuple):
    """One row of LOSSES.

    formula(responses, config) -> (losses, rewards of chosen, rewards of rejected), each [P];
    rewards are detached, and config is a DPOConfig (beta, label_smoothing). has_reference: whether
    it compares with a reference model. keys: the configuration keys that it reads, beside pref_ftx,
    which every loss has.
    """

    formula: Callable[[Responses, Any], tuple]
    has_reference: bool
    keys: tuple[str, ...] = ("pref_beta",)
    help: str = ""


LOSSES: dict[str, PreferenceLoss] = {}


def register_loss(
    name: str,
    formula: Callable[[Responses, Any], tuple],
    *,
    has_reference: bool,
    keys: tuple[str, ...] = ("pref_beta",),
    help: str = "",
) -> None:
    """Let `pref_loss: <name>` train with `formula` (see PreferenceLoss). ValueError for a name that
    is taken, TypeError for a formula that is no function.

    Call it before the configuration is parsed, on every rank.
    """
    if not callable(formula):
        raise TypeError(f"pref_loss {name}: expected a function of responses, got {formula!r}")
    if name in LOSSES:
        raise ValueError(f"pref_loss {name} is registered already: choose another name")
    LOSSES[name] = PreferenceLoss(formula, has_reference, tuple(keys), help)


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) of x <= 0, finite everywhere.

    Near 0 through expm1 and far from it through log1p: the other way loses all digits in each case.
    From -1e-7 on, where a model is certain of every token, value and gradient saturate (the
    gradient is 0 there).
    """
    import torch

    x = x.clamp(max=-1e-7)
    # neither branch sees what it cannot do
    near, far = x.clamp(min=-math.log(2)), x.clamp(max=-math.log(2))
    return torch.where(
        x > -math.log(2), torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far))
    )


def dpo_loss(r: Responses, config):
    """(losses, rewards of chosen, rewards of rejected), each [P], of config.beta and
    config.label_smoothing, the share of pairs that are thought to be swapped.

    A reward is beta (policy - reference), detached.
    """
    from torch.nn.functional import logsigmoid

    chosen, rejected = r.chosen - r.reference_chosen, r.rejected - r.reference_rejected
    beta, smoothing = config.beta, config.label_smoothing
    scaled = beta * (chosen - rejected)
    losses = -(1 - smoothing) * logsigmoid(scaled) - smoothing * logsigmoid(-scaled)
    return losses, beta * chosen.detach(), beta * rejected.detach()


def odds_ratio_loss(r: Responses, config):
    """(losses, rewards of chosen, rewards of rejected), each [P], of config.beta.

    A reward is beta times the mean log-probability of a token, detached. The loss has its own
    supervised term.
    """
    from torch.nn.functional import logsigmoid

    chosen = r.chosen / r.chosen_lens.clamp(min=1)
    rejected = r.rejected / r.rejected_lens.clamp(min=1)
    log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    losses = -chosen - config.beta * logsigmoid(log_odds)
    return losses, config.beta * chosen.detach(), config.beta * rejected.detach()


register_loss(
    "sigmoid", dpo_loss, has_reference=True, keys=("pref_beta", "dpo_label_smoothing"), help="DPO"
)
register_loss("orpo", odds_ratio_loss, has_reference=False, help="odds ratio, needs no reference")
