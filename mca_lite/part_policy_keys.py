"""Keys, rules and table rows of policy training on rollouts: answers sampled by another program."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from .args_rules_training import Need
from .args_values import ArgumentGroup, amount, arg, flag, optional
from .errors import Judge, Rule, expect
from .tables import SESSION_LOSSES, TOKENS, register_keys, register_objective

POLICY_METRICS = ("loss", "ratio", "clipped", "kl", "entropy", "reward")
# columns with one number per record; columns of tokens are arrays
RECORD_COLUMNS = ("reward", "group")


def _check_loss(name: str) -> None:
    """Raise ValueError if no policy loss has this name."""
    known = [row for row in SESSION_LOSSES if row != "cross_entropy"]
    expect(name in known, f"expected one of {', '.join(known)}")


@dataclass(kw_only=True)
class PolicyArguments(ArgumentGroup):
    """Configuration keys of policy training on answers that another program sampled.

    In the keys' help texts, the ratio is exp(new - old log-probability) of a token; for gspo it is
    that of a whole answer, from the mean per token. The advantage is a column of the data. If that
    is missing, it is computed from the rewards of a group of answers; for a loss that does not
    require it, such as opd, it is then 0.
    The reference of the KL penalty is the column ref_logprobs. If that is missing, it is the model
    before training, or for adapters without modules_to_save their base model. For a stream none of
    this is computed. "opd" is on-policy distillation from a teacher, whose log-probabilities must
    be in the column ref_logprobs."""

    policy_loss: str | None = optional(
        "stage policy: the loss of rollouts (None: grpo)", check=_check_loss
    )
    clip_low: float = amount(0.2, "lower clipping bound of the ratio is 1 - clip_low")
    clip_high: float | None = amount(None, "upper bound is 1 + clip_high (None: clip_low)")
    dual_clip: float | None = arg(
        None, "loss of a token with advantage A < 0 is at most -dual_clip A", above=1
    )
    delta: float | None = arg(None, "largest ratio in the unclipped term", above=0)
    cispo_max: float | None = arg(None, "cispo: upper limit of the ratio", above=0)
    tau_pos: float = arg(1.0, "sapo: steepness of the sigmoid, advantage > 0", above=0)
    tau_neg: float = arg(1.05, "sapo: steepness of the sigmoid otherwise", above=0)
    constant: float | None = arg(None, "dr_grpo: tokens per answer in the loss's divisor", above=0)
    kl_coef: float = amount(0.0, "weight of the KL penalty; reference: ref_logprobs, or else the "
                            "model before training (with adapters: without them)")  # fmt: skip
    kl: Literal["k1", "k2", "k3"] = arg("k3", "estimator of the KL penalty")
    kl_unbiased: bool = flag("multiply the KL estimate by the token's ratio")
    entropy_coef: float = arg(0.0, "weight of the entropy bonus, subtracted from the loss")
    with_entropy: bool = arg(True, "log the entropy")
    temperature: float = arg(
        1.0, "logits are divided by it, as in sampling; a record may have its own", above=0
    )
    teacher_coef: float = amount(1.0, "opd: weight of the teacher's log-ratio in the advantage")
    off_policy_max: float | None = optional(
        "leave out answers with a negative advantage and a larger mean old - new log-probability"
    )
    scale_rewards: bool = flag("divide a group's centred rewards by their standard deviation")
    sampler_correction: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = optional(
        "importance weights model / sampler: logprobs are the sampler's, the old ones come "
        "from the model before training (None: logprobs are the old ones)"
    )
    sampler_max: float = arg(3.0, "sampler_correction: upper limit of the weight", above=0)
    sampler_min: float = amount(0.0, "sampler_correction: lower limit of the weight")


_KEYS = {item.name: item.name for item in fields(PolicyArguments)} | {"policy_loss": "name"}
_RUN = (
    Rule(
        "!calculate_per_token_loss",
        "a policy loss is divided by a count over the whole update",
        "calculate_per_token_loss: true",
    ),
    Rule(
        "mtp_num_layers",
        "layers for multi-token prediction have no part in a policy loss",
        "mtp_num_layers: 0",
    ),
    Rule(
        "sampler_correction streaming",
        "the model before training scores the samples, and a stream is read once",
        "streaming: false, or sampler_correction left out",
    ),
    Rule(
        "train_on_prompt", "the mask of a record has its trained tokens", "train_on_prompt: false"
    ),
)
_NEEDED = {"cispo_max": "cispo", "constant": "dr_grpo"}
_CLIPPED, _REST = "ppo grpo dapo dr_grpo gspo", "cispo reinforce importance_sampling"
# key -> the losses on which it has no effect; one that a script registers may read all keys
_UNREAD = dict.fromkeys(("dual_clip", "delta"), f"{_REST} sapo opd")
_UNREAD |= dict.fromkeys(("tau_pos", "tau_neg"), f"{_CLIPPED} {_REST} opd")
_UNREAD["teacher_coef"] = f"{_CLIPPED} {_REST} sapo"
_DEFAULTS = {item.name: item.default for item in fields(PolicyArguments)}
_NEEDS = (
    Need("sampler_max sampler_min", "sampler_correction", "sampler_correction: token_truncate"),
    Need("kl_unbiased", "kl_coef", "kl_coef: 0.01"),
)


def loss_of_stage(a: Any) -> str:
    """Name of the policy loss that the keys `a` choose: policy_loss if it is set; otherwise grpo
    for stage policy, and the stage's name for stages grpo and ppo."""
    return a.policy_loss or ("grpo" if a.stage == "policy" else a.stage)


def _check_policy_keys(a: Any, judge: Judge) -> None:
    """Check the keys of the policy loss and of the sampler's correction (importance weights) for
    contradictions. Errors are added to `judge`, which collects them. a: the configuration keys of
    the stage, as attributes."""
    name = loss_of_stage(a)
    judge.expect(
        a.stage in ("policy", name),
        "policy_loss stage",
        f"stage {a.stage} names its loss",
        f"stage: policy, or policy_loss: {a.stage}",
    )
    for key, loss in _NEEDED.items():
        is_of_loss = name == loss
        judge.expect(
            not is_of_loss or getattr(a, key) is not None,
            f"{key} policy_loss",
            f"{name} needs it",
            f"{key}: <a number>",
        )
        judge.expect(
            is_of_loss or getattr(a, key) is None,
            f"{key} policy_loss",
            f"no effect, since the loss is {name}",
            f"{key} left out",
        )
    for key, losses in _UNREAD.items():
        judge.expect(
            name not in losses.split() or getattr(a, key) == _DEFAULTS[key],
            f"{key} policy_loss",
            f"no effect, since the loss is {name}",
            f"{key} left out",
        )
    judge.expect(
        a.sampler_min < a.sampler_max,
        "sampler_min sampler_max",
        "the smallest weight is not below the largest",
        "sampler_min: 0",
    )


def _check_policy_run(a: Any, judge: Judge) -> None:
    """Check keys of all groups, such as mtp_num_layers, for values that a policy run does not
    support. Errors are added to `judge`, which collects them. a: all configuration keys; not used
    here, because `judge` has them."""
    judge.apply(_RUN)


def _describe_policy(a: Any) -> str:
    """A text for the start summary: the policy loss, its clipping, the weight of its KL penalty,
    and the temperature. a: the configuration keys, as attributes."""
    text = f"{loss_of_stage(a)}, clip {a.clip_low:g}"
    if a.clip_high is not None:
        text += f" and {a.clip_high:g}"
    return f"{text}, kl_coef {a.kl_coef:g}, temperature {a.temperature:g}"


register_keys("policy", PolicyArguments, needs=_NEEDS, of_stages=True)
for _stage in ("policy", "grpo", "ppo"):
    register_objective(
        _stage,
        records=TOKENS,
        encoder="part_policy_data:RolloutEncoder",
        columns=RECORD_COLUMNS,
        trainer="part_policy_trainer:PolicyTrainer",
        metrics=POLICY_METRICS,
        keys=_KEYS,
        check_keys=_check_policy_keys,
        check_run=_check_policy_run,
        describe=_describe_policy,
    )
