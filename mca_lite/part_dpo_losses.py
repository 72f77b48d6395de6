"""Losses of preference pairs: pure functions, each a row of part_dpo_keys.LOSSES.

    c, r   log-ratios of chosen and rejected: log-probability minus the reference's, [P]
    d      beta (c - r) - margin, of f-divergences with f'(exp(c)) in place of c
    e      label_smoothing
    /|y|   a mean over the tokens of an answer

A formula(responses, config) gives the losses of P pairs. Some compare pairs with each other: their
numbers over the global batch, of N pairs, are `of_batch`, computed before the gradients and without
one. arXiv numbers name the sources.
"""

import math
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid, softplus

_LARGEST_EXPONENT = 80.0  # exp() of it is finite in float32


class Responses(NamedTuple):
    """Inputs of a preference loss, each [P] for P pairs: the policy's log-probabilities of the
    responses, their numbers of tokens, and the reference's log-probabilities (None for a loss
    without a reference).

    whole_chosen: chosen without ld_alpha. margin: of the column pair_margin, None without. of_batch
    [P, 2]: the numbers of the row's of_batch.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_lens: Any
    rejected_lens: Any
    reference_chosen: Any = None
    reference_rejected: Any = None
    whole_chosen: Any = None
    margin: Any = None
    of_batch: Any = None

    def with_numbers(self, of_batch) -> "Responses":
        """These with other numbers of the batch."""
        return self._replace(of_batch=of_batch)

    @property
    def ratios(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-ratios (c, r) of policy and reference."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def means(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean log-probabilities of a token."""
        return self.over_lengths(self.chosen, self.rejected)

    def over_lengths(self, of_chosen, of_rejected) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of the answers, each divided by its tokens."""
        lengths = (self.chosen_lens.clamp(min=1), self.rejected_lens.clamp(min=1))
        return of_chosen / lengths[0], of_rejected / lengths[1]


def rewards(
    numbers: tuple[torch.Tensor, torch.Tensor], config
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards of chosen and rejected, detached: beta times `numbers`, the log-ratios, or for a loss
    without a reference the mean log-probabilities of a token."""
    of_chosen, of_rejected = numbers
    return config.beta * of_chosen.detach(), config.beta * of_rejected.detach()


def scores(r: Responses, config) -> tuple[torch.Tensor, torch.Tensor]:
    """f'(u) of chosen and rejected at the ratios u = exp(c), exp(r) (2309.16240).

    reverse_kl: log u. js_divergence: log(2 u / (1 + u)). alpha_divergence:
    (u^(a - 1) - 1) / (a - 1), as in TRL, of a = f_alpha_divergence_coef; forward_kl: its a = 0.
    """
    of_chosen, of_rejected = r.ratios
    return _slope(of_chosen, config), _slope(of_rejected, config)


def _slope(log_ratio: torch.Tensor, config) -> torch.Tensor:
    kind = config.f_divergence_type
    if kind == "js_divergence":
        return math.log(2) + logsigmoid(log_ratio)
    alphas = {"reverse_kl": 1.0, "forward_kl": 0.0}
    power = alphas.get(kind, config.f_alpha_divergence_coef) - 1
    if abs(power) < 1e-6:
        return log_ratio
    return torch.expm1((power * log_ratio).clamp(max=_LARGEST_EXPONENT)) / power


def _margin(r: Responses, config, of_chosen, of_rejected) -> torch.Tensor:
    """beta (chosen - rejected), minus the pair's margin (2402.10571)."""
    margin = config.beta * (of_chosen - of_rejected)
    return margin if r.margin is None else margin - r.margin


def _difference(r: Responses, config) -> torch.Tensor:
    """d of the log-ratios."""
    return _margin(r, config, *scores(r, config))


def _scaled(r: Responses, config) -> tuple[torch.Tensor, torch.Tensor]:
    """(b c, b r)."""
    of_chosen, of_rejected = r.ratios
    return config.beta * of_chosen, config.beta * of_rejected


def _smoothed(d: torch.Tensor, e: float) -> torch.Tensor:
    return -(1 - e) * logsigmoid(d) - e * logsigmoid(-d)


def _token_loss(r: Responses) -> torch.Tensor:
    """The loss of the chosen answers' tokens; its mean over the pairs of the global batch is the
    mean over these tokens."""
    return -r.whole_chosen * r.of_batch[:, 0]


# -- formulas of a difference d


def sigmoid(r: Responses, config):
    """-(1 - e) log s(d) - e log s(-d): DPO (2305.18290), conservative DPO."""
    return _smoothed(_difference(r, config), config.label_smoothing)


def sigmoid_norm(r: Responses, config):
    """-log s(d) of c/|y|, r/|y|: length-normalised DPO (2411.15124)."""
    return -logsigmoid(_margin(r, config, *r.over_lengths(*scores(r, config))))


def hinge(r: Responses, config):
    """max(0, 1 - d): SLiC's hinge (2305.10425) on log-ratios, as RSO has it (2309.06657)."""
    return (1 - _difference(r, config)).clamp(min=0)


def ipo(r: Responses, config):
    """(c/|y| - r/|y| - 1 / (2 beta))^2: IPO (2310.12036, 17), of means as its authors trained."""
    of_chosen, of_rejected = r.over_lengths(*scores(r, config))
    return (of_chosen - of_rejected - 1 / (2 * config.beta)).square()


def robust(r: Responses, config):
    """(-(1 - e) log s(d) + e log s(-d)) / (1 - 2 e): robust DPO (2403.00409)."""
    d = _difference(r, config)
    e = config.label_smoothing
    return (-(1 - e) * logsigmoid(d) + e * logsigmoid(-d)) / (1 - 2 * e)


def exo_pair(r: Responses, config):
    """s(d) (log s(d) - log(1 - e)) + s(-d) (log s(-d) - log e): EXO (2402.00856, 16)."""
    d = _difference(r, config)
    e = config.label_smoothing
    of_chosen = d.sigmoid() * (logsigmoid(d) - math.log1p(-e))
    return of_chosen + (-d).sigmoid() * (logsigmoid(-d) - math.log(e))


def discopop(r: Responses, config):
    """(1 - m) (-log s(d)) + m exp(-d), m = s(d / tau): DiscoPOP (2406.08414, 5)."""
    d = _difference(r, config)
    share = (d / config.discopop_tau).sigmoid()
    return (1 - share) * -logsigmoid(d) + torch.exp(logsigmoid(d / config.discopop_tau) - d)


# -- formulas of both log-ratios


def nca_pair(r: Responses, config):
    """-log s(b c) - (log s(-b c) + log s(-b r)) / 2: NCA (2402.05369)."""
    of_chosen, of_rejected = _scaled(r, config)
    return softplus(-of_chosen) + 0.5 * softplus(of_chosen) + 0.5 * softplus(of_rejected)


def bco_pair(r: Responses, config):
    """-log s(b c - m) - log s(m - b r): BCO (2404.04656); m of bco_shift, 0 without."""
    of_chosen, of_rejected = _scaled(r, config)
    shift = 0.0 if r.of_batch is None else r.of_batch[:, 0]
    return -logsigmoid(of_chosen - shift) - logsigmoid(shift - of_rejected)


def sppo_hard(r: Responses, config):
    """(c - 1 / (2 b))^2 + (r + 1 / (2 b))^2: SPPO (2405.00675, 4.7) with preferences 1 and 0."""
    of_chosen, of_rejected = r.ratios
    target = 0.5 / config.beta
    return (of_chosen - target).square() + (of_rejected + target).square()


def apo_zero(r: Responses, config):
    """1 - s(b c) + s(b r): APO-zero (2408.06266, 7)."""
    of_chosen, of_rejected = _scaled(r, config)
    return (-of_chosen).sigmoid() + of_rejected.sigmoid()


def apo_down(r: Responses, config):
    """s(b c) + 1 - s(b (c - r)): APO-down (2408.06266, 8)."""
    of_chosen, of_rejected = _scaled(r, config)
    return of_chosen.sigmoid() + (of_rejected - of_chosen).sigmoid()


def kto_pair(r: Responses, config):
    """(s(b (z_r - c)) + s(b (r - z_c))) / 2: KTO on pairs (2402.01306, v1), z of kl_of_batch."""
    of_chosen, of_rejected = r.ratios
    kl_of_rejected, kl_of_chosen = r.of_batch.unbind(-1)
    chosen_loss = (config.beta * (kl_of_rejected - of_chosen)).sigmoid()
    return 0.5 * (chosen_loss + (config.beta * (of_rejected - kl_of_chosen)).sigmoid())


def aot(r: Responses, config):
    """-(1 - e) log s(b (q - q')) - e log s(b (q' - q)): AOT (2406.05882) of the policy's margins q
    and the reference's q', both sorted over the batch."""
    margin = config.beta * (r.chosen - r.rejected - r.of_batch[:, 0])
    return _smoothed(margin, config.label_smoothing)


def aot_unpaired(r: Responses, config):
    """-(1 - e) log s(b (c - r)) - e log s(b (r - c)): AOT unpaired (2406.05882), c and r each
    sorted over the batch.

    A pair has two partners, one for each of its answers. The sum over pairs is that over ranks, and
    each answer has its gradient once: the second term has the value 0.
    """
    of_chosen, of_rejected = r.ratios
    partner_of_chosen, partner_of_rejected = r.of_batch.unbind(-1)
    e = config.label_smoothing
    losses = _smoothed(config.beta * (of_chosen - partner_of_chosen), e)
    others = _smoothed(config.beta * (partner_of_rejected - of_rejected), e)
    return losses + (others - others.detach())


# -- formulas without a reference


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) of x <= 0, finite everywhere.

    Near 0 through expm1 and far from it through log1p: the other way loses all digits in each case.
    Above -1e-7, for a model certain of every token, value and gradient saturate (gradient 0).
    """
    x = x.clamp(max=-1e-7)
    # each branch gets its range only: the gradient of the other would be NaN
    near = x.clamp(min=-math.log(2))
    far = x.clamp(max=-math.log(2))
    return torch.where(
        x > -math.log(2), torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far))
    )


def orpo(r: Responses, config):
    """-p_c - beta log s(odds_c - odds_r), odds = p - log(1 - exp(p)): ORPO (2403.07691) of the mean
    log-probabilities p; it includes a supervised term."""
    chosen, rejected = r.means
    log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    return -chosen - config.beta * logsigmoid(log_odds)


def simpo(r: Responses, config):
    """-(1 - e) log s(d - gamma) - e log s(gamma - d) of mean log-probabilities: SimPO
    (2405.14734); gamma is the margin in units of the reward, as in TRL and LLaMA-Factory."""
    d = _margin(r, config, *r.means) - config.simpo_gamma
    return _smoothed(d, config.label_smoothing)


def cpo(r: Responses, config):
    """-(1 - e) log s(d) - e log s(-d) + cpo_alpha (loss of the chosen answers' tokens): CPO
    (2401.08417) of log-probabilities."""
    d = _margin(r, config, r.chosen, r.rejected)
    return _smoothed(d, config.label_smoothing) + config.cpo_alpha * _token_loss(r)


def sft(r: Responses, config):
    """Loss of the chosen answers' tokens, the generation loss of MPO (2411.10442)."""
    return _token_loss(r)


# -- numbers of the global batch: (Responses of its N pairs in float64, config, memory) -> two
# numbers, or two [N]; memory: a dict of numbers that is saved with checkpoints


def pairs_per_token(every: Responses, config, memory: dict) -> tuple[Any, Any]:
    """(N / tokens of the chosen answers, 0)."""
    return len(every.chosen_lens) / every.chosen_lens.sum().clamp(min=1), 0.0


def bco_shift(every: Responses, config, memory: dict) -> tuple[Any, Any]:
    """(m, 0): m is the mean, over all steps so far, of the batch's mean reward b (c + r) / 2."""
    mean = float(config.beta * torch.cat(every.ratios).mean())
    steps = memory.get("bco_steps", 0) + 1
    before = memory.get("bco_mean", 0.0)
    shift = before + (mean - before) / steps
    if math.isfinite(shift):  # a step that is left out leaves no trace
        memory.update(bco_steps=steps, bco_mean=shift)
    return shift, 0.0


def kl_of_batch(every: Responses, config, memory: dict) -> tuple[Any, Any]:
    """(z_r, z_c): mean log-ratios of rejected and of chosen answers, at least 0."""
    of_chosen, of_rejected = every.ratios
    return of_rejected.mean().clamp(min=0), of_chosen.mean().clamp(min=0)


def _partners(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """[N]: for each value the one of `others` with the same rank."""
    return others.sort().values[values.argsort(stable=True).argsort()]


def sorted_references(every: Responses, config, memory: dict) -> tuple[Any, Any]:
    """(the reference's margin with the rank of the policy's margin of the pair, 0)."""
    margins = every.chosen - every.rejected
    return _partners(margins, every.reference_chosen - every.reference_rejected), 0.0


def sorted_partners(every: Responses, config, memory: dict) -> tuple[Any, Any]:
    """(the r with the rank of the pair's c, the c with the rank of its r)."""
    of_chosen, of_rejected = every.ratios
    return _partners(of_chosen, of_rejected), _partners(of_rejected, of_chosen)
