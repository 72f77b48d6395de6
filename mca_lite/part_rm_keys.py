"""Keys and table rows of reward models: they score whole answers, and train on pairs."""

from dataclasses import dataclass

from .args_values import ArgumentGroup, amount
from .part_dpo_keys import METRICS
from .part_scores_keys import check_preferences
from .tables import PAIRS, register_keys, register_objective

RM_METRICS = METRICS[:5]


@dataclass(kw_only=True)
class RewardArguments(ArgumentGroup):
    """Configuration key of reward models."""

    center_rewards_coefficient: float = amount(
        0.0, "stage rm: weight of the squared sum of a pair's scores, which centres them"
    )


register_keys("rm", RewardArguments, of_stages=True)
register_objective(
    "rm",
    records=PAIRS,
    trainer="part_rm:RewardTrainer",
    scores=True,
    metrics=RM_METRICS,
    keys={"center_rewards_coefficient": "center_rewards_coefficient"},
    check_run=check_preferences,
    describe=lambda a: f"center_rewards_coefficient {a.center_rewards_coefficient:g}",
)
