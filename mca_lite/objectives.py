"""The objectives: one table, OBJECTIVES, by the names that the key `stage` takes.

An objective is a kind of records, a trainer (McaTrainer or a class over it, whose hooks are the
loss), its metrics, and what it asks of other keys. The rules of configuration keys read the table,
so it imports no torch: a trainer of this package is named by "module:Class".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .args_values import Judge
from .constants import HF_CONFIG_NAME
from .loss_preference import LOSSES, METRICS, REFERENCES

# kinds of records
TEXT = "text"  # documents; may be joined and cut into full rows, in which they see each other
CONVERSATIONS = "conversations"  # rendered by the tokenizer's chat template, with loss on answers
PAIRS = "pairs"  # a prompt with a chosen and a rejected answer


def _nothing_more(keys: Any) -> str:
    return ""


@dataclass(kw_only=True)
class Objective:
    """One row of OBJECTIVES.

    records: the kind of records that it reads: TEXT, CONVERSATIONS or PAIRS; the data's datasets,
    cache and packs follow. trainer: McaTrainer or a subclass, or "module:Class" of this package.
    metrics: the names of its metrics; eval_<name> may decide which checkpoint is best. keys:
    configuration keys of FinetuningArguments that have no effect with another objective.
    check_keys(a, judge), check_run(a, judge): its rules over FinetuningArguments, and over the keys
    of all groups. describe(finetuning arguments) -> what the start summary says after the stage's
    name.
    """

    stage: str
    records: str
    trainer: type | str = "trainer:McaTrainer"
    metrics: tuple[str, ...] = ("loss",)
    keys: tuple[str, ...] = ()
    check_keys: Callable[[Any, Judge], None] | None = None
    check_run: Callable[[Any, Judge], None] | None = None
    describe: Callable[[Any], str] = _nothing_more
    help: str = ""

    def __post_init__(self) -> None:
        # whether packing joins and cuts documents, rather than putting whole samples in a row
        self.joins_documents = self.records == TEXT
        self.has_pairs = self.records == PAIRS  # a chosen and a rejected answer
        self.unit = "pair" if self.has_pairs else "sample"  # what reports call a sample

    def trainer_class(self) -> type:
        """The trainer; imports torch and megatron-core for one of this package."""
        if isinstance(self.trainer, type):
            return self.trainer
        module, _, name = self.trainer.partition(":")
        return getattr(import_module(f".{module}", __package__), name)


OBJECTIVES: dict[str, Objective] = {}


def register_objective(stage: str, **fields: Any) -> Objective:
    """Let `stage: <name>` train with an objective; fields: Objective's, of which `records` is
    required -> the row.

    Call it before the configuration is parsed, on every rank. ValueError for a name that is taken,
    and for a kind of records that there is not; TypeError for a trainer that is no class.
    """
    objective = Objective(stage=stage, **fields)
    if not isinstance(objective.trainer, (type, str)):
        raise TypeError(f"stage {stage}: expected a trainer's class, got {objective.trainer!r}")
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


# -- preference training


def _check_preferences(a: Any, judge: Judge) -> None:
    if not a.calculate_per_token_loss:
        key = "calculate_per_token_loss"
        reason = "a preference loss is the mean over the pairs of the global batch, in every layout"
        judge.refuse(key, reason, f"{key}: true")
    if a.mtp_num_layers:
        reason = "layers for multi-token prediction have no part in a preference loss"
        judge.refuse("mtp_num_layers", reason, "mtp_num_layers: 0")
    known = a.ref_model in (None, *REFERENCES, a.model_name_or_path)
    if not known and not os.path.isfile(os.path.join(a.ref_model, HF_CONFIG_NAME)):
        remedy = f"ref_model: {', '.join(REFERENCES)}, or a model's folder"
        judge.refuse("ref_model", f"it is no folder with {HF_CONFIG_NAME}", remedy)


def _describe_preferences(keys: Any) -> str:
    words = [f"pref_loss {keys.pref_loss}", f"beta {keys.pref_beta:g}"]
    if keys.pref_ftx:
        words.append(f"sft term {keys.pref_ftx:g}")
    if keys.dpo_label_smoothing:
        words.append(f"label smoothing {keys.dpo_label_smoothing:g}")
    return ", ".join(words)


def _check_preference_keys(a: Any, judge: Judge) -> None:
    """Which loss has which keys, and what can be its reference."""
    loss = LOSSES[a.pref_loss]
    if not loss.has_reference and a.ref_model is not None:
        reason = f"pref_loss {a.pref_loss} has no reference model"
        judge.refuse("ref_model pref_loss", reason, "ref_model left out")
    elif a.ref_model == "adapter" and a.finetuning_type != "lora":
        remedy = "ref_model: cached, or finetuning_type: lora"
        judge.refuse("ref_model finetuning_type", "there are no adapters to switch off", remedy)
    elif a.ref_model == "adapter" and a.modules_to_save:
        reason = "modules_to_save changes the model beside its adapters"
        judge.refuse("ref_model finetuning_type", reason, "ref_model: cached")
    if a.dpo_label_smoothing and "dpo_label_smoothing" not in loss.keys:
        having = [name for name, row in LOSSES.items() if "dpo_label_smoothing" in row.keys]
        reason = f"only pref_loss {', '.join(having)} has it"
        judge.refuse("dpo_label_smoothing pref_loss", reason, "dpo_label_smoothing: 0")


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
