"""Losses on preference pairs: pure functions, the formulas of part_dpo_keys.LOSSES.

    c, r   log-ratios of the chosen and the rejected answer: policy minus reference
           log-probability, [P]
    b      beta
    d      beta (c - r) - margin; with an f-divergence, f'(exp(c)) replaces c, and likewise for r
    e      label_smoothing
    /|y|   divided by the number of tokens in the answer

A formula(responses, config) returns the losses of P pairs. Some losses need statistics of the N
pairs of the global batch: `of_batch`, computed beforehand and without gradients. Sources are arXiv
numbers.
"""

import math
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid, softplus

_LARGEST_EXPONENT = 80.0  # exp(80) is finite in float32


class Responses(NamedTuple):
    """Inputs of a preference loss for P pairs of answers: tensors [P], except of_batch. From
    chosen_lens on, a field that the loss does not read may be None.

    chosen, rejected: the policy's log-probabilities of the answers; ld_alpha, if set, weights their
    tokens. chosen_lens, rejected_lens: the answers' numbers of trained tokens.
    reference_chosen, reference_rejected: log-probabilities under the reference.
    whole_chosen: `chosen` without ld_alpha.
    margin: the column pair_margin of the pairs; None if they have none.
    of_batch: statistics of the global batch, two numbers for each loss that needs some: a formula
    gets its own two [P, 2]; for n such losses together [P, 2 n]; None if no loss needs any."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_lens: Any
    rejected_lens: Any
    reference_chosen: Any = None
    reference_rejected: Any = None
    whole_chosen: Any = None
    margin: Any = None
    of_batch: Any = None

    def with_numbers(self, of_batch: Any) -> "Responses":
        """A copy with another `of_batch`: [P, 2], two numbers that a loss takes from the whole
        global batch, such as a mean of rewards (made by the function PreferenceLoss.of_batch); or
        None."""
        return self._replace(of_batch=of_batch)

    @property
    def ratios(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-ratios (c, r) of chosen and rejected answers: the policy's log-probability minus the
        reference's, [P] each.
        """
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def means(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The policy's log-probabilities of (chosen, rejected) answers, as weighted by ld_alpha,
        each divided by the answer's number of tokens (at least 1), [P] each."""
        return self.over_lengths(self.chosen, self.rejected)

    def over_lengths(
        self, of_chosen: torch.Tensor, of_rejected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Divide one value per answer, [P] for chosen and for rejected, by the answer's number of
        tokens (at least 1)."""
        lengths = (self.chosen_lens.clamp(min=1), self.rejected_lens.clamp(min=1))
        return of_chosen / lengths[0], of_rejected / lengths[1]


def rewards(
    numbers: tuple[torch.Tensor, torch.Tensor], config: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the rewards of (chosen, rejected) answers for the log: beta times `numbers`, without
    a gradient. numbers: (of chosen, of rejected): the log-ratios to the reference, or for a loss
    without a reference Responses.means."""
    of_chosen, of_rejected = numbers
    return config.beta * of_chosen.detach(), config.beta * of_rejected.detach()


def scores(r: Responses, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Slopes f'(u) of the f-divergence f_divergence_type for (chosen, rejected) answers, [P] each
    (2309.16240). u is the policy's probability of the answer divided by the reference's. Losses
    that read f_divergence_type use the slopes in place of log-ratios.

    reverse_kl: log u, the plain log-ratio. js_divergence: log(2 u / (1 + u)). alpha_divergence:
    (u^(a - 1) - 1) / (a - 1) with a = f_alpha_divergence_coef, log u for a = 1. forward_kl: the
    same with a = 0."""
    of_chosen, of_rejected = r.ratios
    return _slope(of_chosen, config), _slope(of_rejected, config)


def _slope(log_ratio: torch.Tensor, config: Any) -> torch.Tensor:
    """Compute f'(u), the slope of the f-divergence that config names, from log_ratio = log u. A
    power of u above exp(80) counts as exp(80), so that it stays finite."""
    kind = config.f_divergence_type
    if kind == "js_divergence":
        return math.log(2) + logsigmoid(log_ratio)
    alphas = {"reverse_kl": 1.0, "forward_kl": 0.0}
    power = alphas.get(kind, config.f_alpha_divergence_coef) - 1
    if abs(power) < 1e-6:
        return log_ratio
    return torch.expm1((power * log_ratio).clamp(max=_LARGEST_EXPONENT)) / power


def _margin(
    r: Responses, config: Any, of_chosen: torch.Tensor, of_rejected: torch.Tensor
) -> torch.Tensor:
    """beta (of_chosen - of_rejected) [P], minus the column pair_margin if pairs have one
    (2402.10571). of_chosen, of_rejected: a value [P] per answer, such as its log-ratio to the
    reference."""
    margin = config.beta * (of_chosen - of_rejected)
    return margin if r.margin is None else margin - r.margin


def _difference(r: Responses, config: Any) -> torch.Tensor:
    """d = beta (c - r) - margin, with c and r the log-ratios of the chosen and the rejected answer
    to the reference, or the slopes by which an f-divergence replaces them (see scores).
    """
    return _margin(r, config, *scores(r, config))


def _scaled(r: Responses, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """beta times the log-ratios of (chosen, rejected) answers to the reference, [P] each."""
    of_chosen, of_rejected = r.ratios
    return config.beta * of_chosen, config.beta * of_rejected


def _smoothed(d: torch.Tensor, e: float) -> torch.Tensor:
    """-(1 - e) log sigmoid(d) - e log sigmoid(-d): the logistic loss with label smoothing e."""
    return -(1 - e) * logsigmoid(d) - e * logsigmoid(-d)


def _token_loss(r: Responses) -> torch.Tensor:
    """Cross entropy [P] of the chosen answers: the sum over an answer's tokens, times the factor in
    r.of_batch that pairs_per_token computed. So the mean of the result over all pairs of the global
    batch is the mean loss per token."""
    return -r.whole_chosen * r.of_batch[:, 0]


# -- formulas of a difference d


def sigmoid(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of DPO (2305.18290): -(1 - e) log sigmoid(d) - e log sigmoid(-d), with d = beta (c
    - r) - margin and e = label_smoothing. c and r are the log-ratios of the chosen and the rejected
    answer to the reference, or the slopes of another f-divergence (see scores). With e > 0 this is
    conservative DPO."""
    return _smoothed(_difference(r, config), config.label_smoothing)


def sigmoid_norm(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of length-normalised DPO (2411.15124): -log sigmoid(beta (c / |y_c| - r / |y_r|) -
    margin). c and r are the log-ratios of the chosen and the rejected answer to the reference, or
    the slopes of another f-divergence (see scores). |y| is an answer's number of tokens."""
    return -logsigmoid(_margin(r, config, *r.over_lengths(*scores(r, config))))


def hinge(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of SLiC's hinge (2305.10425) on log-ratios, as in RSO (2309.06657): max(0, 1 - d)
    with d = beta (c - r) - margin. c and r are the log-ratios of the chosen and the rejected answer
    to the reference (weighted by ld_alpha, if it is set), or the slopes of another f-divergence
    (see scores)."""
    return (1 - _difference(r, config)).clamp(min=0)


def ipo(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of IPO (2310.12036, equation 17): (c / |y_c| - r / |y_r| - 1 / (2 beta))^2. c and
    r are the log-ratios of the chosen and the rejected answer to the reference, or the slopes of
    another f-divergence (see scores). They are divided by the answers' numbers of tokens |y|."""
    of_chosen, of_rejected = r.over_lengths(*scores(r, config))
    return (of_chosen - of_rejected - 1 / (2 * config.beta)).square()


def robust(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of robust DPO (2403.00409): (-(1 - e) log sigmoid(d) + e log sigmoid(-d)) / (1 - 2
    e), with e = label_smoothing and d = beta (c - r) - margin. c and r are the log-ratios of the
    chosen and the rejected answer to the reference, or the slopes of another f-divergence (see
    scores)."""
    d = _difference(r, config)
    e = config.label_smoothing
    return (-(1 - e) * logsigmoid(d) + e * logsigmoid(-d)) / (1 - 2 * e)


def exo_pair(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of EXO (2402.00856, equation 16): sigmoid(d) (log sigmoid(d) - log(1 - e)) +
    sigmoid(-d) (log sigmoid(-d) - log e), with e = label_smoothing and d = beta (c - r) - margin. c
    and r are the log-ratios of the chosen and the rejected answer to the reference, or the slopes
    of another f-divergence (see scores)."""
    d = _difference(r, config)
    e = config.label_smoothing
    of_chosen = d.sigmoid() * (logsigmoid(d) - math.log1p(-e))
    return of_chosen + (-d).sigmoid() * (logsigmoid(-d) - math.log(e))


def discopop(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of DiscoPOP (2406.08414, equation 5): (1 - m) (-log sigmoid(d)) + m exp(-d) with m
    = sigmoid(d / discopop_tau) and d = beta (c - r) - margin. c and r are the log-ratios of the
    chosen and the rejected answer to the reference, or the slopes of another f-divergence (see
    scores)."""
    d = _difference(r, config)
    share = (d / config.discopop_tau).sigmoid()
    return (1 - share) * -logsigmoid(d) + torch.exp(logsigmoid(d / config.discopop_tau) - d)


# -- formulas of both log-ratios


def nca_pair(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of NCA (2402.05369): -log sigmoid(b c) - (log sigmoid(-b c) + log sigmoid(-b r)) /
    2, with b = beta, and c and r the log-ratios of the chosen and the rejected answer to the
    reference."""
    of_chosen, of_rejected = _scaled(r, config)
    return softplus(-of_chosen) + 0.5 * softplus(of_chosen) + 0.5 * softplus(of_rejected)


def bco_pair(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of BCO (2404.04656): -log sigmoid(b c - m) - log sigmoid(m - b r), with b = beta,
    and c and r the log-ratios of the chosen and the rejected answer to the reference. m is the
    running mean of rewards that bco_shift computed; without statistics of the batch (the loss
    bco_pair_unshifted) m = 0."""
    of_chosen, of_rejected = _scaled(r, config)
    shift = 0.0 if r.of_batch is None else r.of_batch[:, 0]
    return -logsigmoid(of_chosen - shift) - logsigmoid(shift - of_rejected)


def sppo_hard(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of SPPO (2405.00675, 4.7) for preferences 1 and 0: (c - 1 / (2 b))^2 + (r + 1 / (2
    b))^2, with b = beta, and c and r the log-ratios of the chosen and the rejected answer to the
    reference."""
    of_chosen, of_rejected = r.ratios
    target = 0.5 / config.beta
    return (of_chosen - target).square() + (of_rejected + target).square()


def apo_zero(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of APO-zero (2408.06266, equation 7): 1 - sigmoid(b c) + sigmoid(b r), with b =
    beta, and c and r the log-ratios of the chosen and the rejected answer to the reference."""
    of_chosen, of_rejected = _scaled(r, config)
    return (-of_chosen).sigmoid() + of_rejected.sigmoid()


def apo_down(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of APO-down (2408.06266, equation 8): sigmoid(b c) + 1 - sigmoid(b (c - r)), with
    b = beta, and c and r the log-ratios of the chosen and the rejected answer to the reference."""
    of_chosen, of_rejected = _scaled(r, config)
    return of_chosen.sigmoid() + (of_rejected - of_chosen).sigmoid()


def kto_pair(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of KTO on pairs (2402.01306, v1): (sigmoid(b (z_r - c)) + sigmoid(b (r - z_c))) /
    2, with b = beta, and c and r the log-ratios of the chosen and the rejected answer to the
    reference. z_r and z_c are the means of r and of c over the global batch, raised to at least 0;
    kl_of_batch computes them."""
    of_chosen, of_rejected = r.ratios
    kl_of_rejected, kl_of_chosen = r.of_batch.unbind(-1)
    chosen_loss = (config.beta * (kl_of_rejected - of_chosen)).sigmoid()
    return 0.5 * (chosen_loss + (config.beta * (of_rejected - kl_of_chosen)).sigmoid())


def aot(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of AOT (2406.05882): -(1 - e) log sigmoid(b (q - q')) - e log sigmoid(b (q' - q)),
    with b = beta and e = label_smoothing. q is a pair's margin of log-probabilities, chosen minus
    rejected, under the policy; q' is the reference's margin with the same rank, when both are
    sorted over the global batch."""
    margin = config.beta * (r.chosen - r.rejected - r.of_batch[:, 0])
    return _smoothed(margin, config.label_smoothing)


def aot_unpaired(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of unpaired AOT (2406.05882): -(1 - e) log sigmoid(b (c - r)) - e log sigmoid(b (r
    - c)), with b = beta and e = label_smoothing. c and r are log-ratios of chosen and rejected
    answers to the reference, matched by rank after sorting each over the global batch.

    Each answer is matched with the opposite answer of equal rank. The loss is summed from the
    chosen answers' side; the rejected side adds only its gradient, not its value. So each answer
    gets its gradient once.
    """
    of_chosen, of_rejected = r.ratios
    partner_of_chosen, partner_of_rejected = r.of_batch.unbind(-1)
    e = config.label_smoothing
    losses = _smoothed(config.beta * (of_chosen - partner_of_chosen), e)
    others = _smoothed(config.beta * (partner_of_rejected - of_rejected), e)
    return losses + (others - others.detach())


# -- formulas without a reference


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x <= 0, with finite values and gradients.

    Near 0 it uses expm1, elsewhere log1p, because each would lose all digits in the other's range.
    Above -1e-7 (a model certain of every token) the value is constant and the gradient 0.
    """
    x = x.clamp(max=-1e-7)
    # each branch sees values of its range only: outside it, its gradient would be NaN
    near = x.clamp(min=-math.log(2))
    far = x.clamp(max=-math.log(2))
    return torch.where(
        x > -math.log(2), torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far))
    )


def orpo(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of ORPO (2403.07691): -p_c - beta log sigmoid(o_c - o_r). p_c and p_r are the mean
    log-probabilities per token of the chosen and the rejected answer, and o = p - log(1 - exp(p))
    are their log-odds. -p_c is a supervised loss."""
    chosen, rejected = r.means
    log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    return -chosen - config.beta * logsigmoid(log_odds)


def simpo(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of SimPO (2405.14734): -(1 - e) log sigmoid(d - gamma) - e log sigmoid(gamma - d),
    with d = beta (p_c - p_r) - margin, e = label_smoothing, and p_c and p_r the log-probabilities
    of the chosen and the rejected answer divided by their numbers of tokens. gamma is simpo_gamma,
    a margin between rewards as in TRL and LLaMA-Factory."""
    d = _margin(r, config, *r.means) - config.simpo_gamma
    return _smoothed(d, config.label_smoothing)


def cpo(r: Responses, config: Any) -> torch.Tensor:
    """Losses [P] of CPO (2401.08417): -(1 - e) log sigmoid(d) - e log sigmoid(-d) + cpo_alpha *
    (token loss of the chosen answer), with d = beta (log p(chosen) - log p(rejected)) - margin and
    e = label_smoothing. With ld_alpha, the log-probabilities in d are weighted by it. There is no
    reference."""
    d = _margin(r, config, r.chosen, r.rejected)
    return _smoothed(d, config.label_smoothing) + config.cpo_alpha * _token_loss(r)


def sft(r: Responses, config: Any) -> torch.Tensor:
    """The chosen answers' token losses [P], without a reference: MPO's generation loss
    (2411.10442)."""
    return _token_loss(r)


# -- statistics of the global batch. Arguments: its N pairs as Responses in float64, the config, and
# a dict of numbers that is saved in checkpoints. Results: two, each a number or a tensor [N].


def pairs_per_token(every: Responses, config: Any, memory: dict[str, Any]) -> tuple[Any, Any]:
    """Compute the factor that turns a loss's mean per pair into a mean per token: (N / number of
    tokens in the chosen answers, 0). every: the N pairs of the global batch. The number of tokens
    counts as at least 1. memory is not used."""
    return len(every.chosen_lens) / every.chosen_lens.sum().clamp(min=1), 0.0


def bco_shift(every: Responses, config: Any, memory: dict[str, Any]) -> tuple[Any, Any]:
    """Update the running mean of rewards for BCO -> (m, 0). m is the mean, over the steps counted
    in `memory` and this one, of a step's mean reward beta (c + r) / 2. c and r are the log-ratios
    to the reference of chosen and rejected answers in `every`, the pairs of the global batch.
    memory keeps m and the number of steps; a step whose m is not finite changes neither."""
    mean = float(config.beta * torch.cat(every.ratios).mean())
    steps = memory.get("bco_steps", 0) + 1
    before = memory.get("bco_mean", 0.0)
    shift = before + (mean - before) / steps
    if math.isfinite(shift):  # a skipped step must not change the mean
        memory.update(bco_steps=steps, bco_mean=shift)
    return shift, 0.0


def kl_of_batch(every: Responses, config: Any, memory: dict[str, Any]) -> tuple[Any, Any]:
    """Compute KTO's reference points for pairs -> (z_r, z_c): the mean log-ratio to the reference
    of the rejected answers, and that of the chosen answers, both raised to at least 0. every: the
    pairs of the global batch. memory is not used."""
    of_chosen, of_rejected = every.ratios
    return of_rejected.mean().clamp(min=0), of_chosen.mean().clamp(min=0)


def _partners(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Match two tensors [N] by rank: for each element of `values`, the element of `others` that has
    the same rank when both are sorted."""
    return others.sort().values[values.argsort(stable=True).argsort()]


def sorted_references(every: Responses, config: Any, memory: dict[str, Any]) -> tuple[Any, Any]:
    """For AOT: match each pair with a reference margin of equal rank -> (matched reference margins
    [N], 0). A margin is the chosen minus the rejected log-probability; the policy's and the
    reference's margins are both sorted over `every`, the N pairs of the global batch. memory is not
    used."""
    margins = every.chosen - every.rejected
    return _partners(margins, every.reference_chosen - every.reference_rejected), 0.0


def sorted_partners(every: Responses, config: Any, memory: dict[str, Any]) -> tuple[Any, Any]:
    """For AOT unpaired: match each answer with the opposite answer of equal rank, by log-ratios to
    the reference, sorted over `every` (the N pairs of the global batch) -> (for each chosen answer
    its partner's log-ratio [N], for each rejected answer its partner's log-ratio [N]). memory is
    not used."""
    of_chosen, of_rejected = every.ratios
    return _partners(of_chosen, of_rejected), _partners(of_rejected, of_chosen)
