"""The objectives: one table, OBJECTIVES, by the names that the key `stage` takes.

An objective is a kind of records, a trainer (McaTrainer or a class over it, whose hooks are the loss), its metrics, and
what it asks of other keys. The rules of configuration keys read the table, so it imports no torch: a trainer of this
package is named by "module:Class".
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .args_values import Problem, default_of
from .constants import HF_CONFIG_NAME
from .loss_preference import LOSSES, METRICS, REFERENCES

# kinds of records
TEXT = "text"  # documents; may be joined and cut into full rows, in which they see each other
CONVERSATIONS = "conversations"  # rendered by the tokenizer's chat template, with loss on answers
PAIRS = "pairs"  # a prompt with a chosen and a rejected answer


def _asks_nothing(arguments: Any, bad: set[str]) -> list[Problem]:
    return []


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One row of OBJECTIVES.

    records: the kind of records that it reads: TEXT, CONVERSATIONS or PAIRS; the data's datasets, cache and packs follow.
    trainer: McaTrainer or a subclass, or "module:Class" of this package.
    metrics: the names of its metrics; eval_<name> may decide which checkpoint is best.
    keys: configuration keys of FinetuningArguments that have no effect with another objective.
    check_keys(finetuning arguments, bad), check_run(run arguments, bad) -> Problems; `bad` are the keys that have one.
    describe(finetuning arguments) -> what the start summary says after the stage's name.
    """

    stage: str
    records: str
    trainer: type | str = "trainer:McaTrainer"
    metrics: tuple[str, ...] = ("loss",)
    keys: tuple[str, ...] = ()
    check_keys: Callable[[Any, set[str]], list[Problem]] = _asks_nothing
    check_run: Callable[[Any, set[str]], list[Problem]] = _asks_nothing
    describe: Callable[[Any], str] = lambda keys: ""
    help: str = ""

    @property
    def has_pairs(self) -> bool:
        """Whether a sample is a pair of a chosen and a rejected answer."""
        return self.records == PAIRS

    @property
    def joins_documents(self) -> bool:
        """Whether packing means to join and cut documents, rather than to put whole samples into a row."""
        return self.records == TEXT

    @property
    def unit(self) -> str:
        """What a sample is called in reports."""
        return "pair" if self.has_pairs else "sample"

    def trainer_class(self) -> type:
        """The trainer; imports torch and megatron-core for one of this package."""
        if isinstance(self.trainer, type):
            return self.trainer
        module, _, name = self.trainer.partition(":")
        return getattr(import_module(f".{module}", __package__), name)


OBJECTIVES: dict[str, Objective] = {}


def register_objective(stage: str, **fields: Any) -> Objective:
    """Let `stage: <name>` train with an objective; fields: Objective's, of which `records` is required -> the row.

    Call it before the configuration is parsed, on every rank. ValueError for a name that is taken, and for a kind of
    records that there is not.
    """
    objective = Objective(stage=stage, **fields)
    if stage in OBJECTIVES:
        raise ValueError(f"stage {stage} is registered already: choose another name")
    if objective.records not in (TEXT, CONVERSATIONS, PAIRS):
        kinds = ", ".join((TEXT, CONVERSATIONS, PAIRS))
        raise ValueError(f"stage {stage}: records {objective.records!r}: expected one of {kinds}")
    OBJECTIVES[stage] = objective
    return objective


def objective_of(stage: str) -> Objective:
    """The row of a stage. ValueError for a stage that there is not."""
    if stage not in OBJECTIVES:
        raise ValueError(f"stage {stage!r}: expected one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[stage]


def all_metrics() -> set[str]:
    """The metrics of all objectives."""
    return {name for objective in OBJECTIVES.values() for name in objective.metrics}


def check_objective_keys(keys: Any, bad: set[str]) -> list[Problem]:
    """FinetuningArguments against the row of their stage. `keys.notes` names keys that belong to other objectives."""
    own = OBJECTIVES[keys.stage].keys
    others = {key for objective in OBJECTIVES.values() for key in objective.keys} - set(own)
    fields = [item for item in dataclasses.fields(keys) if item.name in others]
    given = [item.name for item in fields if getattr(keys, item.name) != default_of(item)]
    if given:
        keys.notes.append(f"{', '.join(given)}: no effect, since stage is {keys.stage}")
    return OBJECTIVES[keys.stage].check_keys(keys, bad)


def check_objective_run(run: Any, bad: set[str]) -> list[Problem]:
    """A run's arguments against the row of its stage."""
    objective, problems = OBJECTIVES[run.finetuning.stage], []
    key, metric = "metric_for_best_model", run.training.metric_for_best_model.removeprefix("eval_")
    # a metric of no objective at all is a problem of TrainingArguments
    if metric in all_metrics() - set(objective.metrics) and key not in bad:
        reason = f"stage {objective.stage} has no such metric"
        problems.append(Problem(key, metric, reason, f"{key}: {objective.metrics[0]}"))
    return problems + objective.check_run(run, bad)


# -- preference training


def _check_preferences(run: Any, bad: set[str]) -> list[Problem]:
    keys, args, problems = run.finetuning, run.training, []

    def refuse(key: str, value: Any, reason: str, suggestion: str) -> None:
        if key not in bad:
            problems.append(Problem(key, value, reason, suggestion))

    if not args.calculate_per_token_loss:
        reason = "a preference loss is the mean over the pairs of the global batch, in every layout"
        key = "calculate_per_token_loss"
        refuse(key, False, reason, f"{key}: true")
    if args.mtp_num_layers:
        reason = "layers for multi-token prediction have no part in a preference loss"
        refuse("mtp_num_layers", args.mtp_num_layers, reason, "mtp_num_layers: 0")
    if run.data.train_on_prompt:
        reason = "answers are compared, and both have the same prompt"
        refuse("train_on_prompt", True, reason, "train_on_prompt: false")
    folder = keys.ref_model
    known = folder in (None, *REFERENCES) or folder == run.model.model_name_or_path
    if not known and not os.path.isfile(os.path.join(folder, HF_CONFIG_NAME)):
        suggestion = f"ref_model: {', '.join(REFERENCES)}, or a model's folder"
        refuse("ref_model", folder, f"it is no folder with {HF_CONFIG_NAME}", suggestion)
    return problems


def _describe_preferences(keys: Any) -> str:
    words = [f"pref_loss {keys.pref_loss}", f"beta {keys.pref_beta:g}"]
    if keys.pref_ftx:
        words.append(f"sft term {keys.pref_ftx:g}")
    if keys.dpo_label_smoothing:
        words.append(f"label smoothing {keys.dpo_label_smoothing:g}")
    return ", ".join(words)


def _check_preference_keys(keys: Any, bad: set[str]) -> list[Problem]:
    """FinetuningArguments of a preference objective against the row of their loss, and what can be its reference."""
    loss, problems = LOSSES[keys.pref_loss], []

    def refuse(key: str, reason: str, suggestion: str) -> None:
        if not bad & {key, "pref_loss", "finetuning_type"}:
            problems.append(Problem(key, getattr(keys, key), reason, suggestion))

    if not loss.has_reference and keys.ref_model is not None:
        reason = f"pref_loss {keys.pref_loss} has no reference model"
        refuse("ref_model", reason, "ref_model left out")
    elif keys.ref_model == "adapter" and keys.finetuning_type != "lora":
        suggestion = "ref_model: cached, or finetuning_type: lora"
        refuse("ref_model", "there are no adapters to switch off", suggestion)
    elif keys.ref_model == "adapter" and keys.modules_to_save:
        reason = "modules_to_save changes the model beside its adapters"
        refuse("ref_model", reason, "ref_model: cached")
    if keys.dpo_label_smoothing and "dpo_label_smoothing" not in loss.keys:
        having = [name for name, row in LOSSES.items() if "dpo_label_smoothing" in row.keys]
        reason = f"only pref_loss {', '.join(having)} has it"
        refuse("dpo_label_smoothing", reason, "dpo_label_smoothing: 0")
    return problems


register_objective("pt", records=TEXT, help="plain text")
register_objective("sft", records=CONVERSATIONS, help="conversations")
register_objective(
    "dpo",
    records=PAIRS,
    trainer="trainer_dpo:DPOTrainer",
    metrics=METRICS,
    keys=("pref_loss", "pref_beta", "pref_ftx", "dpo_label_smoothing", "ref_model"),
    check_keys=_check_preference_keys,
    check_run=_check_preferences,
    describe=_describe_preferences,
    help="preference pairs",
)
