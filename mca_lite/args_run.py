"""A run's arguments: all five groups of args.py, read from a YAML file and `key=value` words."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from .args import (
    DataArguments,
    FinetuningArguments,
    ModelArguments,
    TrainingArguments,
    UseMcaArguments,
)
from .args_parser import ArgumentGroup, ArgumentParser, default_of
from .args_rules import check_backend, check_run, check_world
from .args_rules_model import check_model, numbers_of
from .args_values import Judge, cast, type_hints
from .constants import ADAPTER_CONFIG_NAME, HF_CONFIG_NAME, MCA_CONFIG_NAME
from .files import why_no_model
from .objectives import OBJECTIVES, check_objective_run, objective_of


@dataclass
class RunArguments:
    """All groups of a run, and `warnings`: the lines that rank 0 should print, each about values
    without effect.
    """

    model: ModelArguments
    data: DataArguments
    finetuning: FinetuningArguments
    training: TrainingArguments
    backend: UseMcaArguments
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        joins_documents = OBJECTIVES[self.finetuning.stage].joins_documents
        if self.data.packing is None:
            self.data.packing = joins_documents
        if self.data.neat_packing or (self.data.packing and not joins_documents):
            # packs of samples reach the model with their borders
            self.training.sequence_packing = True

    @property
    def groups(self) -> tuple[ArgumentGroup, ...]:
        """The five groups, in the order in which they are written to a file."""
        return self.model, self.finetuning, self.data, self.training, self.backend

    def to_dict(self) -> dict[str, Any]:
        """Flat key -> value in effect, of all groups."""
        return {key: value for group in self.groups for key, value in group.to_dict().items()}

    def to_yaml_dict(self) -> dict[str, Any]:
        """Flat key -> value in effect, without the keys that are None (None and absent mean the
        same).

        Parsed again in a world of the same size it gives the same run; with global_batch_size it
        holds for any world, because gradient_accumulation_steps is left to be derived.
        """
        values = {key: value for key, value in self.to_dict().items() if value is not None}
        if self.training.global_batch_size is not None:
            del values["gradient_accumulation_steps"]
        return values

    def save(self, path: str | os.PathLike) -> None:
        """Write to_yaml_dict() as YAML to the file `path`; its folder is made if absent."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(self.to_yaml_dict(), sort_keys=False, allow_unicode=True, width=120)
        path.write_text(text, encoding="utf-8")


GROUPS = (ModelArguments, DataArguments, FinetuningArguments, TrainingArguments, UseMcaArguments)


def check_together(args: TrainingArguments, *, stage: str | None = None, **keys: Any) -> None:
    """The rules between training arguments and keys of other groups, for trainers that are made
    without a file.

    Keys that are not given have their defaults; without a stage the rules of objectives are left
    out. Raises ConfigError, as parse_args does.
    """
    items = [item for group in GROUPS for item in dataclasses.fields(group)]
    values = {item.name: default_of(item) for item in items} | args.to_dict() | keys
    judge = Judge(SimpleNamespace(**values))
    check_backend(judge.arguments, judge)
    if stage is not None:
        judge.arguments.stage = stage
        check_objective_run(judge.arguments, judge)
    judge.close()


def parse_args(argv: list[str] | None = None, *, needs_world: bool = True) -> RunArguments:
    """The arguments of a run from the words of its command line (None: sys.argv), see
    ArgumentParser.

    The model's config.json is read too (from its folder, or the hub) and checked against the
    layout. needs_world=False is for commands that only look at a configuration: without torchrun
    the layout need not fit this one process then. `-h` and `--help` print the keys and leave.
    Raises ConfigError with all problems of the run.
    """
    parser = ArgumentParser(GROUPS)
    argv = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(argv):
        print(parser.format_help())
        raise SystemExit(0)
    values, problems = parser.read(argv)
    switched_off = _use_torch_backend(values)
    parsed = parser.build(values)
    model, data, finetuning, training, backend = parsed.groups
    run = RunArguments(model, data, finetuning, training, backend, parsed.warnings)
    problems += parsed.problems
    facts = SimpleNamespace(**run.to_dict())
    judge = Judge(facts, {problem.key for problem in problems})
    if needs_world and "WORLD_SIZE" not in os.environ:
        check_world(run.training, judge)
    check_run(facts, judge)
    if facts.model_name_or_path and (numbers := _read_model_numbers(run.model, judge)):
        check_model(numbers_of(numbers), facts, judge)
    judge.problems[:0] = problems
    judge.close()
    run.warnings += _notes(run, switched_off, parsed.given)
    return run


def _notes(run: RunArguments, switched_off: list[str], given: set[str]) -> list[str]:
    """Lines about values without effect."""
    training, data, notes = run.training, run.data, []
    if switched_off:
        notes.append(f"use_mca is false: plain torch DDP does without {', '.join(switched_off)}")
    if training.fp8 and objective_of(run.finetuning.stage).has_pairs:
        notes.append("fp8: log-probabilities of responses are rounded to about 0.2 with it")
    if training.max_steps > 0 and "num_train_epochs" in given:
        notes.append(f"num_train_epochs is not used: max_steps is {training.max_steps}")
    if training.eval_strategy == "no" and (data.val_size > 0 or data.eval_dataset):
        notes.append("nothing is evaluated although there is data for it: eval_strategy is no")
    return notes


def _use_torch_backend(values: dict[str, Any]) -> list[str]:
    """Where use_mca is false, take megatron-core's keys out of values -> those that had another
    value.
    """
    try:
        if cast(values.get("use_mca", True), bool):
            return []
    except ValueError:
        return []  # shown with the other problems
    changed = []
    for item in dataclasses.fields(TrainingArguments):
        if item.metadata.get("torch", True) or values.get(item.name) is None:
            continue
        try:
            value = cast(values[item.name], type_hints(TrainingArguments)[item.name])
        except ValueError:
            continue  # not even a value of its type: it stays, to be shown with the other problems
        del values[item.name]
        if value != default_of(item):
            changed.append(item.name)
    return changed


def _read_model_numbers(model: ModelArguments, judge: Judge) -> dict[str, Any]:
    """The model's config.json, or mca_config.json where there is only that; {} where there is
    neither.
    """
    name, key = model.model_name_or_path, "model_name_or_path"
    folder = Path(name)
    has_config = (folder / HF_CONFIG_NAME).is_file()
    if (folder / ADAPTER_CONFIG_NAME).is_file() and not has_config:
        reason = "it holds adapters, without the model that they belong to"
        judge.refuse(key, reason, f"that model, and adapter_name_or_path: {name}")
        return {}
    if not folder.is_dir() and (missing := why_no_model(name)):
        judge.refuse(key, missing, f"a folder with {HF_CONFIG_NAME}, or a model of the hub")
        return {}
    try:
        path = folder / MCA_CONFIG_NAME
        if has_config or not path.is_file():
            # seconds to import: only once the rest could be read
            from transformers.utils import cached_file

            path = cached_file(name, HF_CONFIG_NAME, revision=model.model_revision)
        numbers = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(numbers, dict):
            raise ValueError("expected a JSON object")
    except Exception as error:  # whatever a hub, a network or a file comes up with
        lines = str(error).strip().splitlines() or [repr(error)]
        reason = f"its {HF_CONFIG_NAME} cannot be read: {lines[0]}"
        judge.refuse(key, reason, f"a folder with {HF_CONFIG_NAME}, or a model of the hub")
        return {}
    return numbers
