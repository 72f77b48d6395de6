"""The rules of the keys of preference training: within FinetuningArguments, and with the rest of a run."""

from __future__ import annotations

import os
from typing import Any

from .args_values import Problem
from .constants import HF_CONFIG_NAME

PREF_LOSSES = ("sigmoid", "orpo")
REFERENCES = ("cached", "adapter", "model")
PREFERENCE_KEYS = {
    "pref_loss": "sigmoid",
    "pref_beta": 0.1,
    "pref_ftx": 0.0,
    "dpo_label_smoothing": 0.0,
    "ref_model": None,
}
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


def check_preference(args: Any, bad: set[str]) -> list[Problem]:
    """FinetuningArguments: which loss has which keys, and what can be its reference."""
    if args.stage != "dpo":
        if given := [
            key for key, default in PREFERENCE_KEYS.items() if getattr(args, key) != default
        ]:
            args.notes.append(f"{', '.join(given)}: no effect, since stage is {args.stage}")
        return []
    problems = []

    def refuse(key: str, reason: str, suggestion: str) -> None:
        if not bad & {key, "pref_loss", "finetuning_type"}:
            problems.append(Problem(key, getattr(args, key), reason, suggestion))

    if args.pref_loss == "orpo" and args.ref_model is not None:
        refuse("ref_model", "pref_loss orpo has no reference model", "ref_model left out")
    elif args.ref_model == "adapter" and args.finetuning_type != "lora":
        refuse(
            "ref_model",
            "there are no adapters to switch off",
            "ref_model: cached, or finetuning_type: lora",
        )
    elif args.ref_model == "adapter" and args.modules_to_save:
        refuse(
            "ref_model",
            "modules_to_save changes the model beside its adapters",
            "ref_model: cached",
        )
    if args.pref_loss == "orpo" and args.dpo_label_smoothing:
        refuse("dpo_label_smoothing", "only pref_loss sigmoid has it", "dpo_label_smoothing: 0")
    return problems


def check_preference_run(run: Any, bad: set[str]) -> list[Problem]:
    """What stage dpo asks of the other groups, and what only it has."""
    keys, args, problems = run.finetuning, run.training, []
    metric = args.metric_for_best_model.removeprefix("eval_")
    if keys.stage != "dpo":
        if metric != "loss" and metric in METRICS and "metric_for_best_model" not in bad:
            reason = f"stage {keys.stage} has no such metric"
            problems.append(
                Problem("metric_for_best_model", metric, reason, "metric_for_best_model: loss")
            )
        return problems
    if not args.calculate_per_token_loss and "calculate_per_token_loss" not in bad:
        reason = "a preference loss is the mean over the pairs of the global batch, in every layout"
        problems.append(
            Problem("calculate_per_token_loss", False, reason, "calculate_per_token_loss: true")
        )
    if args.mtp_num_layers and "mtp_num_layers" not in bad:
        reason = "layers for multi-token prediction have no part in a preference loss"
        problems.append(Problem("mtp_num_layers", args.mtp_num_layers, reason, "mtp_num_layers: 0"))
    folder = keys.ref_model
    known = folder in (None, *REFERENCES) or folder == run.model.model_name_or_path
    if (
        not known
        and "ref_model" not in bad
        and not os.path.isfile(os.path.join(folder, HF_CONFIG_NAME))
    ):
        reason = f"it is no folder with {HF_CONFIG_NAME}"
        problems.append(
            Problem(
                "ref_model",
                folder,
                reason,
                f"ref_model: {', '.join(REFERENCES)}, or a model's folder",
            )
        )
    return problems
