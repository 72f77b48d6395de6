"""Preference losses: pure functions over the log-probabilities of responses, one value a pair. P pairs.

log p(response) = sum over its tokens of log softmax(z_t)[y_t]
DPO (arXiv:2305.18290)    D = (pi_c - pi_r) - (ref_c - ref_r)
                          L = -(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D)
ORPO (arXiv:2403.07691)   a = log p / tokens;  log odds = (a_c - a_r) - (log(1 - exp a_c) - log(1 - exp a_r))
                          L = -a_c - beta log sigmoid(log odds)
"""

import math

import torch
import torch.nn.functional as F


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) of x <= 0, finite everywhere.

    Near 0 through expm1 and far from it through log1p: the other way loses all digits in each case. From -1e-7 on, where a
    model is certain of every token, value and gradient stop to grow (the gradient is 0 there).
    """
    x = x.clamp(max=-1e-7)
    near, far = (
        x.clamp(min=-math.log(2)),
        x.clamp(max=-math.log(2)),
    )  # neither branch sees what it cannot do
    return torch.where(
        x > -math.log(2), torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far))
    )


def dpo_loss(
    policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta, label_smoothing=0.0
):
    """(losses, rewards of chosen, rewards of rejected), each [P], of the responses' log-probabilities [P].

    A reward is beta (policy - reference), detached. Label smoothing is the share of pairs that are thought to be swapped.
    """
    chosen, rejected = policy_chosen - reference_chosen, policy_rejected - reference_rejected
    scaled = beta * (chosen - rejected)
    losses = -(1 - label_smoothing) * F.logsigmoid(scaled) - label_smoothing * F.logsigmoid(-scaled)
    return losses, beta * chosen.detach(), beta * rejected.detach()


def odds_ratio_loss(chosen, rejected, chosen_lens, rejected_lens, beta):
    """(losses, rewards of chosen, rewards of rejected), each [P], of log-probabilities [P] and their numbers of tokens [P].

    A reward is beta times the mean log-probability of a token, detached. The loss has its own supervised term.
    """
    chosen, rejected = chosen / chosen_lens.clamp(min=1), rejected / rejected_lens.clamp(min=1)
    log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    losses = -chosen - beta * F.logsigmoid(log_odds)
    return losses, beta * chosen.detach(), beta * rejected.detach()
