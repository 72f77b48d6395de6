"""Losses of policy training, for a Session and for the stages policy, grpo and ppo. Also weights
that correct for the sampler, and advantages within groups.

Letters, for a trained token: l its log-probability; o its old_logp, that under the policy that
sampled it (sg(l) if a sample has none); r = exp(l - o); A its advantage; q its log-probability
under the reference. n: trained tokens in its sample. clip(r): r limited to 1 - clip_low .. 1 +
clip_high. sg: stop gradient.

    ppo          -min(r A, clip(r) A)                   Schulman et al., 2017; for A < 0 at most
                                                        -dual_clip A (Ye et al., 2020)
    grpo         ppo's term / n                         Shao et al., DeepSeekMath, 2024
    dapo         ppo's term                             Yu et al., 2025; clip_high 0.28 there
    dr_grpo      ppo's term                             Liu et al., 2025
    cispo        -sg(min(r, cispo_max)) A l             MiniMax-M1, 2025, as in ScaleRL
    gspo         grpo's, with r = exp(mean of l - o)    Zheng et al., 2025
    sapo         -4 / tau sigmoid(tau (r - 1)) A / n    Gao et al., 2025; tau is tau_pos for A > 0,
                                                        otherwise tau_neg
    reinforce    -A l
    importance_sampling  -r A                           Tinker
    opd          -r (A + teacher_coef (q - o))          on-policy distillation on sampled tokens, q
                                                        is the teacher's; A is 0 if missing

An update divides the sum of these terms by the number of trained tokens (ppo, dapo, cispo,
reinforce, opd), by the number of samples with such a token (grpo, gspo, sapo; TRL also counts
samples without), by that number times `constant` (dr_grpo), or by 1 (importance_sampling).

Before a division by n, each token's term gets a penalty kl_coef kl(l, q), and loses entropy_coef
times the entropy. With d = q - l, kl is k1 = -d, k2 = d^2 / 2 or k3 = exp(d) - d - 1 (Schulman,
2020); kl_unbiased multiplies it by exp(l - o). sampler_weight multiplies the term without penalty
and entropy. off_policy_max drops the terms of tokens with A < 0 in samples where mean(o - l) is
larger (DeepSeek-V3.2, 2025); these tokens still count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from .errors import expect
from .files import IGNORE_INDEX
from .part_session_loss import Tokens
from .tables import SESSION_COLUMNS, SESSION_LOSSES, function_of, refuse_taken


class PolicyTokens(NamedTuple):
    """Inputs of a policy loss's formula: this rank's tokens of a micro-batch. Tensors are [b, s].

    logps: the tokens' log-probabilities l.
    log_ratio: l - o, with o the column old_logp, or l without a gradient if samples have none. In a
    loss with one ratio per sample, the mean of l - o over the sample's trained tokens.
    advantage: A, 0 if samples have none.
    ref_logp: log-probability under the reference or teacher, or None.
    mean_of_answer(values [b, s]): for each trained token, the mean over the trained tokens of its
    sample, without a gradient; collective over context-parallel ranks."""

    log_ratio: torch.Tensor
    logps: torch.Tensor
    advantage: torch.Tensor
    ref_logp: torch.Tensor | None = None
    mean_of_answer: Any = None


class PolicyLoss(NamedTuple):
    """One row of POLICIES, the table of policy losses.

    formula(tokens: PolicyTokens, numbers: Policy): returns a loss term per token, [b, s]; or
    "module:function" in this package.
    counts: what an update divides by: the number of trained "tokens", the number of samples with
    one ("answers"), or "one".
    is_mean: True if each sample counts with the mean of its terms, not their sum.
    is_of_sequence: True if all tokens of a sample have one ratio, as in GSPO.
    times: name of a Policy field that multiplies the count; "": none.
    required: sample columns that the formula cannot do without.
    """

    formula: Callable[[PolicyTokens, Any], torch.Tensor] | str
    counts: str = "tokens"
    is_mean: bool = False
    is_of_sequence: bool = False
    times: str = ""
    required: tuple[str, ...] = ("advantage",)


def clipped(tokens: PolicyTokens, numbers: Any) -> torch.Tensor:
    """PPO's clipped objective per token: -min(r A, clip(r) A), with r the probability ratio to the
    policy that sampled, A the advantage, and clip(r) in numbers.bounds. numbers: the Policy. delta
    limits the unclipped r; for A < 0, dual_clip limits the term to -dual_clip A."""
    ratio = tokens.log_ratio.exp()
    if numbers.delta is not None:
        ratio = ratio.clamp(max=numbers.delta)
    bounded = tokens.log_ratio.exp().clamp(*numbers.bounds)
    terms = -torch.min(ratio * tokens.advantage, bounded * tokens.advantage)
    if numbers.dual_clip is None:
        return terms
    most = -numbers.dual_clip * tokens.advantage
    return torch.where(tokens.advantage < 0, torch.min(terms, most), terms)


def cispo(tokens: PolicyTokens, numbers: Any) -> torch.Tensor:
    """CISPO's term per token: -min(r, cispo_max) A l, without a gradient through r. r is the
    probability ratio to the policy that sampled, A the advantage, l the log-probability. numbers:
    the Policy."""
    ratio = tokens.log_ratio.exp().clamp(max=numbers.cispo_max)
    return -ratio.detach() * tokens.advantage * tokens.logps


def sapo(tokens: PolicyTokens, numbers: Any) -> torch.Tensor:
    """SAPO's term per token: -4 / tau sigmoid(tau (r - 1)) A, which falls off smoothly where PPO
    clips. r is the probability ratio to the policy that sampled, A the advantage; tau is tau_pos
    for A > 0, otherwise tau_neg. numbers: the Policy."""
    tau = torch.where(tokens.advantage > 0, numbers.tau_pos, numbers.tau_neg)
    return -torch.sigmoid(tau * (tokens.log_ratio.exp() - 1)) * 4 / tau * tokens.advantage


def reinforce(tokens: PolicyTokens, numbers: Any) -> torch.Tensor:
    """REINFORCE's term per token: minus advantage times log-probability. numbers: the Policy, not
    used."""
    return -tokens.advantage * tokens.logps


def importance_sampling(tokens: PolicyTokens, numbers: Any) -> torch.Tensor:
    """Importance sampling's term per token: -r A, with r the probability ratio to the policy that
    sampled, not limited, and A the advantage. numbers: the Policy, not used."""
    return -tokens.log_ratio.exp() * tokens.advantage


def opd(tokens: PolicyTokens, numbers: Any) -> torch.Tensor:
    """On-policy distillation's term per token: -r (A + teacher_coef (q - o)). q and o are
    log-probabilities under the teacher and under the policy that sampled, r is the probability
    ratio to the policy that sampled, A the advantage or 0. numbers: the Policy."""
    old = (tokens.logps - tokens.log_ratio).detach()
    gain = tokens.advantage + numbers.teacher_coef * (tokens.ref_logp - old)
    return -tokens.log_ratio.exp() * gain


POLICIES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(clipped),
    "grpo": PolicyLoss(clipped, "answers", is_mean=True),
    "dapo": PolicyLoss(clipped),
    "dr_grpo": PolicyLoss(clipped, "answers", times="constant"),
    "cispo": PolicyLoss(cispo),
    "gspo": PolicyLoss(clipped, "answers", is_mean=True, is_of_sequence=True),
    "sapo": PolicyLoss(sapo, "answers", is_mean=True),
    "reinforce": PolicyLoss(reinforce),
    "importance_sampling": PolicyLoss(importance_sampling, "one"),
    "opd": PolicyLoss(opd, required=("ref_logp",)),
}
_ABOVE_0 = ("temperature", "constant", "cispo_max", "delta", "dual_clip", "tau_pos", "tau_neg")
_AT_LEAST_0 = ("clip_low", "clip_high", "kl_coef", "teacher_coef")
_NEEDED = {"cispo": "cispo_max", "dr_grpo": "constant"}


def register_policy_loss(
    name: str, formula: Callable[[PolicyTokens, Any], torch.Tensor], **fields: Any
) -> None:
    """Add a policy loss: session.forward_backward(samples, name) then trains with `formula`. See
    PolicyLoss.

    fields: counts, is_mean, is_of_sequence, times or required of PolicyLoss. A term must use only
    its own token and mean_of_answer, because rows contain padding and, if packed, several samples.
    ValueError for a name that exists or unknown `counts`, TypeError if `formula` cannot be called.
    """
    if not callable(formula):
        raise TypeError(f"loss {name}: expected a function of (tokens, numbers), got {formula!r}")
    row = PolicyLoss(formula, **fields)
    known = ("tokens", "answers", "one")
    expect(row.counts in known, f"counts {row.counts!r}: expected one of {', '.join(known)}")
    refuse_taken("loss", name, SESSION_LOSSES)
    POLICIES[name] = row
    SESSION_LOSSES[name] = "part_policy:Policy"


_KL = {"k1": lambda d: -d, "k2": lambda d: d.square() / 2, "k3": lambda d: d.exp() - d - 1}


@dataclass(kw_only=True)
class Policy:
    """The parameters of a policy loss, whose formula is the row `name` of POLICIES. r is the
    probability ratio to the policy that sampled, A the advantage.

    clip_low, clip_high: limits of r in losses with PPO's clipping (ppo, grpo, dapo, dr_grpo, gspo):
    1 - clip_low .. 1 + clip_high; clip_high None: equal to clip_low.
    dual_clip: for A < 0, a term of these losses is at most -dual_clip A. delta: largest r in their
    unclipped term.
    cispo_max: largest r in cispo. tau_pos, tau_neg: steepness of sapo's sigmoid for A > 0, and
    otherwise.
    constant: tokens per answer in dr_grpo's divisor.
    kl_coef: weight of the KL penalty. kl: its estimator, k1, k2 or k3. kl_unbiased: multiply it by
    the token's r. entropy_coef: weight of the entropy bonus. temperature: divides the logits unless
    samples have a column of it. teacher_coef: weight of the teacher's log-ratio in opd.
    off_policy_max: drop terms with A < 0 in samples whose mean of old - new log-probability is
    larger.

    Metrics are means over trained tokens: ratio; clipped, the share whose gradient PPO's clipping
    would remove; kl, if samples have ref_logp; entropy, with entropy_coef or with_entropy. reward,
    if samples have it, is a mean over samples. ValueError if a parameter is out of range, or one
    that cispo or dr_grpo needs is missing.
    """

    name: str
    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    delta: float | None = None
    cispo_max: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    constant: float | None = None
    kl_coef: float = 0.0
    kl: str = "k3"
    kl_unbiased: bool = False
    entropy_coef: float = 0.0
    with_entropy: bool = False
    temperature: float = 1.0
    teacher_coef: float = 1.0
    off_policy_max: float | None = None
    columns: ClassVar[tuple[str, ...]] = SESSION_COLUMNS
    of_answers: ClassVar[tuple[str, ...]] = ("reward",)
    refuses_dropout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        expect(self.name in POLICIES, f"name {self.name!r}: expected one of {', '.join(POLICIES)}")
        self.row = POLICIES[self.name]
        needed = _NEEDED.get(self.name)
        if needed is not None:
            expect(getattr(self, needed) is not None, f"{self.name} needs {needed}: a number")
        expect(self.kl in _KL, f"kl {self.kl!r}: expected one of {', '.join(_KL)}")
        for name in _ABOVE_0 + _AT_LEAST_0:
            value = getattr(self, name)
            is_in = value is None or 0 <= value < np.inf and (value > 0 or name in _AT_LEAST_0)
            least = "above 0" if name in _ABOVE_0 else "of 0 or more"
            expect(is_in, f"{name} {value}: expected a number {least}")
        self.counts = self.row.counts
        self.times = float(getattr(self, self.row.times)) if self.row.times else 1.0
        self.required = self.row.required + (("ref_logp",) if self.kl_coef else ())
        self.wants_entropy = self.with_entropy or self.entropy_coef != 0.0
        self.metrics = ("ratio", "clipped", "kl", "entropy", "reward")

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval (1 - clip_low, 1 + clip_high) to which losses with PPO's clipping limit the
        probability ratio."""
        high = self.clip_low if self.clip_high is None else self.clip_high
        return 1 - self.clip_low, 1 + high

    def terms(self, tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss terms [b, s] of a micro-batch's tokens, and {metric: values [b, s]}. A
        term is the formula's (0 if off_policy_max drops it), times sampler_weight, with the KL
        penalty and the entropy bonus; if the loss takes means, it is divided by the sample's number
        of trained tokens.

        ValueError if the formula gives another shape. Collective over context-parallel ranks if a
        mean over samples is needed."""
        logps = tokens.logps
        columns = tokens.columns
        token_ratio = logps - columns.get("old_logp", logps.detach())
        log_ratio = token_ratio
        lengths = tokens.lengths.clamp(min=1)

        def mean(values: torch.Tensor) -> torch.Tensor:
            return tokens.sum_of_sample(values) / lengths

        if self.row.is_of_sequence:
            log_ratio = mean(token_ratio) + logps - logps.detach()
        advantage = columns.get("advantage", torch.zeros_like(logps))
        read = PolicyTokens(log_ratio, logps, advantage, columns.get("ref_logp"), mean)
        terms = function_of(self.row.formula)(read, self)
        shape = getattr(terms, "shape", type(terms).__name__)
        expect(
            shape == logps.shape,
            f"the formula of loss {self.name} gave {shape}: expected a term for each token, "
            f"{[*logps.shape]}",
        )
        terms = terms * columns.get("sampler_weight", 1.0)
        if self.off_policy_max is not None:
            has_drifted = -mean(token_ratio) > self.off_policy_max
            terms = terms.masked_fill((advantage < 0) & has_drifted, 0.0)
        low, high = self.bounds
        ratio = log_ratio.detach().exp()
        is_clipped = (ratio < low) & (advantage < 0) | (ratio > high) & (advantage > 0)
        metrics = {"ratio": ratio, "clipped": is_clipped.float()}
        if "reward" in columns:
            metrics["reward"] = columns["reward"]
        if "ref_logp" in columns:
            kl = _KL[self.kl](columns["ref_logp"] - logps)
            metrics["kl"] = kl
            terms = terms + self.kl_coef * (kl * token_ratio.exp() if self.kl_unbiased else kl)
        if tokens.entropy is not None:
            metrics["entropy"] = tokens.entropy
            terms = terms - self.entropy_coef * tokens.entropy
        return terms / lengths if self.row.is_mean else terms, metrics


# -- columns computed from those of other programs


def sampler_weights(
    labels: Any,
    old_logp: Any,
    sampler_logp: Any,
    correction: str,
    most: float = 3.0,
    least: float = 0.0,
) -> np.ndarray:
    """Weights, float32 [n], that correct a sample of n tokens for the difference between the policy
    and the sampler that generated it: exp(old_logp - sampler_logp) of each token, or of the sum
    over the sample.

    labels, old_logp, sampler_logp: [n]. correction: "token" or "sequence", then "_truncate" (limit
    weights to least .. most) or "_mask" (weight 0 outside of least .. most), such as
    "token_truncate".
    A token without a label, or whose difference is NaN, counts with a difference of 0. ValueError
    for another correction."""
    scope, _, way = correction.partition("_")
    expect(
        scope in ("token", "sequence") and way in ("truncate", "mask"),
        f"correction {correction!r}: expected token or sequence, and _truncate or _mask",
    )
    is_trained = np.asarray(labels) != IGNORE_INDEX
    gap = np.asarray(old_logp, np.float64) - np.asarray(sampler_logp, np.float64)
    gap = np.where(is_trained, np.nan_to_num(gap), 0.0)
    if scope == "sequence":
        gap[:] = gap.sum()
    with np.errstate(over="ignore"):
        weights = np.exp(gap)
    inside = (weights >= least) & (weights <= most)
    kept = np.where(inside, weights, 0.0) if way == "mask" else weights.clip(least, most)
    return kept.astype(np.float32)


def group_advantages(rewards: Any, groups: Any, scale: bool = False) -> np.ndarray:
    """Advantages, float64 [N]: each reward minus the mean reward of its group. A NaN reward makes
    its whole group NaN.

    groups: [N], equal values for answers to the same prompt. scale: also divide by the group's
    standard deviation (with n - 1) + 1e-4, as in TRL.
    """
    rewards = np.asarray(rewards, np.float64)
    _, numbers = np.unique(np.asarray(groups), return_inverse=True)
    counts = np.bincount(numbers)
    centred = rewards - (np.bincount(numbers, rewards) / counts)[numbers]
    if scale:
        squares = np.bincount(numbers, centred**2) / (counts - 1).clip(min=1)
        centred = centred / (np.sqrt(squares)[numbers] + 1e-4)
    return centred
