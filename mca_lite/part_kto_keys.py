"""Keys, rules and table rows of KTO: training on single answers with a label."""

from dataclasses import dataclass
from typing import Any

from .args_values import ArgumentGroup, amount
from .part_scores_keys import REFERENCE_RULES, check_preferences
from .tables import LABELLED, register_keys, register_objective

KTO_METRICS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "kl",
)


@dataclass(kw_only=True)
class KTOArguments(ArgumentGroup):
    """Configuration keys of KTO: the weights of desirable and undesirable answers."""

    kto_chosen_weight: float = amount(1.0, "stage kto: weight of desirable answers")
    kto_rejected_weight: float = amount(1.0, "stage kto: weight of undesirable answers")


def _describe_kto(keys: Any) -> str:
    """Text for the start summary: beta, and the weights of good and bad answers. keys: the run's
    configuration keys."""
    text = f"beta {keys.pref_beta:g}, weight of desirable answers {keys.kto_chosen_weight:g}"
    return f"{text}, of undesirable ones {keys.kto_rejected_weight:g}"


register_keys("kto", KTOArguments, of_stages=True)
register_objective(
    "kto",
    records=LABELLED,
    trainer="part_kto:KTOTrainer",
    has_binary_labels=True,
    least_samples=2,
    metrics=KTO_METRICS,
    keys={
        "pref_beta": "beta",
        "kto_chosen_weight": "desirable_weight",
        "kto_rejected_weight": "undesirable_weight",
        "ref_model": "reference",
    },
    check_keys=lambda a, judge: judge.apply(REFERENCE_RULES),
    check_run=check_preferences,
    describe=_describe_kto,
)
