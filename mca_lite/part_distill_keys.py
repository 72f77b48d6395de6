"""Keys, rules and table rows of distillation: a student learns from a teacher."""

from dataclasses import dataclass
from typing import Any, Literal

from .args_values import ArgumentGroup, amount, arg, count, optional
from .errors import Judge, Rule
from .tables import CONVERSATIONS, TEACHER_KEY, register_keys, register_objective

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


@dataclass(kw_only=True)
class DistillArguments(ArgumentGroup):
    """Configuration keys of distillation."""

    teacher_model_name_or_path: str | None = optional(
        "stage distill: the teacher's folder, or model of the hub (None: read teacher_cache)"
    )
    teacher_top_k: int | None = count(
        None,
        "score the data once before training, and keep the teacher's k likeliest tokens of each "
        "(None: the teacher stays in memory, and all token ids that both models have count)",
    )
    teacher_cache: str | None = optional(
        "teacher_top_k: folder of the teacher's tokens (None: in cache_dir)"
    )
    teacher_cache_dtype: Literal["float32", "float16"] = arg(
        "float32", "teacher_top_k: log-probabilities on disk; float16 rounds to 3 digits"
    )
    distill_loss: str = arg(
        "forward_kl",
        "KL(teacher, student), KL(student, teacher), or Jensen-Shannon divergence",
        choices=DIVERGENCES,
    )
    distill_jsd_mix: float = arg(0.5, "share of the teacher in jsd's mixture", above=0, below=1)
    distill_temperature: float = arg(
        1.0, "both models' logits are divided by it, and the divergence times its square", above=0
    )
    distill_ce_weight: float = amount(
        0.0, "share of cross entropy with the labels in the loss", below=1
    )


_NO_TEACHER = "teacher_model_name_or_path: <the teacher's folder>"
_DISTILLATION = (
    Rule(
        "!teacher_model_name_or_path !teacher_top_k",
        "stage distill learns from a teacher",
        _NO_TEACHER,
    ),
    Rule(
        "!teacher_model_name_or_path teacher_top_k !teacher_cache",
        "without a teacher its rows are read from a folder",
        f"teacher_cache: <the folder of an earlier run>, or {_NO_TEACHER}",
    ),
    Rule("teacher_cache !teacher_top_k", "a resident teacher has no cache", "teacher_top_k: 64"),
    Rule(
        "teacher_cache_dtype=float16 !teacher_top_k",
        "a resident teacher has no cache",
        "teacher_top_k: 64",
    ),
)
_DISTILLATION_RUN = (
    Rule(
        "mtp_num_layers",
        "layers for multi-token prediction have no part in distillation",
        "mtp_num_layers: 0",
    ),
    Rule(
        "teacher_top_k streaming",
        "a cached teacher scores the samples before training",
        "streaming: false, or teacher_top_k left out",
    ),
)


def _check_distillation_keys(a: Any, judge: Judge) -> None:
    """Check the configuration keys of distillation: about the teacher, the stored
    log-probabilities, and the divergence. a: the keys. judge: a Judge, which collects the Problems
    found."""
    judge.apply(_DISTILLATION)
    judge.expect(
        a.distill_loss == "jsd" or "distill_jsd_mix" not in a.changed,
        "distill_jsd_mix distill_loss",
        f"no effect, since distill_loss is {a.distill_loss}",
        "distill_loss: jsd",
    )


def _describe_distillation(keys: Any) -> str:
    """Text for the start summary: the divergence and its numbers, and where the teacher's
    probabilities come from. keys: the run's configuration keys."""
    text = f"{keys.distill_loss}, temperature {keys.distill_temperature:g}"
    text += f", cross entropy {keys.distill_ce_weight:g}"
    source = "resident teacher"
    if keys.teacher_top_k is not None:
        source = f"cached top {keys.teacher_top_k} of the teacher"
    return f"{text}, {source} {keys.teacher_model_name_or_path or keys.teacher_cache}"


_KEYS = {
    TEACHER_KEY: "teacher",
    "teacher_top_k": "top_k",
    "teacher_cache": "cache",
    "teacher_cache_dtype": "cache_dtype",
    "distill_loss": "divergence",
    "distill_jsd_mix": "jsd_mix",
    "distill_temperature": "temperature",
    "distill_ce_weight": "ce_weight",
}
register_keys("distill", DistillArguments, of_stages=True)
register_objective(
    "distill",
    records=CONVERSATIONS,
    trainer="part_distill:DistillTrainer",
    metrics=("loss", "kd_loss", "sft_loss"),
    keys=_KEYS,
    check_keys=_check_distillation_keys,
    check_run=lambda a, judge: judge.apply(_DISTILLATION_RUN),
    describe=_describe_distillation,
)
