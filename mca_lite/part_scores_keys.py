"""Keys and rules of reference models, for stages that compare answers."""

import os
from dataclasses import dataclass
from typing import Any

from .args_values import ArgumentGroup, amount, optional
from .errors import Judge, Rule
from .files import HF_CONFIG_NAME
from .tables import register_keys

REFERENCES = ("cached", "adapter", "model")


@dataclass(kw_only=True)
class ReferenceArguments(ArgumentGroup):
    """Configuration keys of reference models.

    pref_beta: factor of the log-ratios to the reference, or without a reference of the
    log-probabilities; in orpo the weight of the odds ratio. ref_model: "cached" scores the data
    once, before training; "adapter" disables the adapters; "model" loads model_name_or_path a
    second time; a folder loads its model; None: "adapter" if adapters can be disabled, otherwise
    "cached"."""

    pref_beta: float = amount(0.1, "strength of the reference, or weight of orpo's odds ratio")
    ref_model: str | None = optional(
        "cached: scored before training; adapter: adapters off; model, or a folder: a second model"
    )


_PREFERENCES = (
    Rule(
        "!calculate_per_token_loss",
        "a preference loss is the mean over the answers or pairs of the global batch, in every "
        "layout",
        "calculate_per_token_loss: true",
    ),
    Rule(
        "mtp_num_layers",
        "layers for multi-token prediction have no part in a preference loss",
        "mtp_num_layers: 0",
    ),
)
REFERENCE_RULES = (
    Rule(
        "ref_model=adapter !finetuning_type=lora",
        "there are no adapters to switch off",
        "ref_model: cached, or finetuning_type: lora",
    ),
    Rule(
        "ref_model=adapter modules_to_save",
        "modules_to_save changes the model beside its adapters",
        "ref_model: cached",
    ),
)


def check_preferences(a: Any, judge: Judge) -> None:
    """Check the configuration keys of a stage that compares answers, such as dpo, against each
    other. a: all keys. judge: collects the problems."""
    judge.apply(_PREFERENCES)
    path = os.path.join(a.ref_model or "", HF_CONFIG_NAME)
    judge.expect(
        a.ref_model in (None, *REFERENCES, a.model_name_or_path) or os.path.isfile(path),
        "ref_model",
        f"it is no folder with {HF_CONFIG_NAME}",
        f"ref_model: {', '.join(REFERENCES)}, or a model's folder",
    )


register_keys("scores", ReferenceArguments, of_stages=True)
