"""A run's arguments: all five groups of args.py, read from a YAML file and `key=value` words."""

from __future__ import annotations

import dataclasses
import difflib
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
from .args_keys import (
    ALIASES,
    HINTS,
    IGNORED_KEYS,
    NOT_OF_TRAINING,
    SWITCHES,
    UNSUPPORTED,
    lookup,
    unsupported,
)
from .args_rules import check_backend, check_data, check_finetuning, check_objective_run, check_run
from .args_rules_model import check_config
from .args_rules_training import check_training, check_world
from .args_values import (
    ArgumentGroup,
    ConfigError,
    Judge,
    Problem,
    cast,
    default_of,
    loads_yaml,
    read_config_file,
)
from .files import read_model_config, write_file
from .objectives import OBJECTIVES


@dataclass
class RunArguments:
    """All groups of a run; their keys are attributes too. warnings: the lines that rank 0 should
    print, each about values without effect. model_config: what the model's config.json holds, {}
    where it was not read."""

    model: ModelArguments
    data: DataArguments
    finetuning: FinetuningArguments
    training: TrainingArguments
    backend: UseMcaArguments
    warnings: list[str] = field(default_factory=list)
    model_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        joins_documents = OBJECTIVES[self.finetuning.stage].joins_documents
        if self.data.packing is None:
            self.data.packing = joins_documents
        if self.data.neat_packing or (self.data.packing and not joins_documents):
            # packs of samples reach the model with their borders
            self.training.sequence_packing = True

    def __getattr__(self, key: str) -> Any:
        for group in self.groups if key in FIELDS else ():
            if hasattr(group, key):
                return getattr(group, key)
        raise AttributeError(key)

    @property
    def groups(self) -> tuple[ArgumentGroup, ...]:
        """The five groups, in the order in which they are written to a file."""
        return self.model, self.finetuning, self.data, self.training, self.backend

    def to_dict(self) -> dict[str, Any]:
        """Flat key -> value in effect, of all groups."""
        groups = map(dataclasses.asdict, self.groups)
        return {key: value for group in groups for key, value in group.items()}

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
        write_file(path, text)


GROUPS = (ModelArguments, DataArguments, FinetuningArguments, TrainingArguments, UseMcaArguments)
FIELDS = {item.name: item for group in GROUPS for item in dataclasses.fields(group)}


def check_together(args: TrainingArguments, *, stage: str | None = None, **keys: Any) -> None:
    """The rules between training arguments and keys of other groups, for trainers that are made
    without a file.

    Keys that are not given have their defaults; without a stage the rules of objectives are left
    out. Raises ConfigError, as parse_args does.
    """
    defaults = {name: default_of(item) for name, item in FIELDS.items()}
    judge = Judge(SimpleNamespace(**defaults | args.to_dict() | keys))
    check_backend(judge.arguments, judge)
    if stage is not None:
        judge.arguments.stage = stage
        check_objective_run(judge.arguments, judge)
    judge.close()


def parse_args(argv: list[str] | None = None, *, needs_world: bool = True) -> RunArguments:
    """The arguments of a run from the words of its command line (None: sys.argv).

    Words are `key=value`, `--key=value` or `--key value`, in any order; a lone `--key` means true,
    and a word that ends in .yaml, .yml or .json is the file, which the words overrule. Of a key
    given twice there the last value holds; null is the default. The model's config.json is read too
    (from its folder, or the hub) and checked against the layout. needs_world=False is for commands
    that only look at a configuration: without torchrun the layout need not fit this one process
    then. `-h` and `--help` print the keys and leave. Raises ConfigError with all problems of the
    run.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(argv):
        print(format_help())
        raise SystemExit(0)
    given, problems = read_words(argv)
    own, ignored = own_keys(given, problems)
    if any(problem.reason == _IN_GROUPS or problem.key in NOT_OF_TRAINING for problem in problems):
        raise ConfigError(problems)  # what else is missing may be in those groups, or not needed
    judge = Judge(None, problems)
    backend = UseMcaArguments.read(own, judge)
    judge.arguments = run = RunArguments(
        ModelArguments.read(own, judge),
        DataArguments.read(own, judge),
        FinetuningArguments.read(own, judge),
        TrainingArguments.read(own, judge, backend.use_mca),
        backend,
    )
    if name := run.model_name_or_path:
        revision, own_weights = run.model_revision, not run.train_from_scratch
        run.model_config = read_model_config(name, judge, revision, own_weights)
    check_training(run.training, judge)
    if needs_world and "WORLD_SIZE" not in os.environ:
        check_world(run.training, judge)
    check_data(run.data, judge)
    check_finetuning(run.finetuning, judge)
    run.warnings = [*ignored, *check_run(run, own, judge)]
    if run.model_config:
        # of a degree that the number of processes does not allow the model has its say too
        judge.bad.discard("tensor_model_parallel_size")
        run.warnings += check_config(run.model_config, run, judge)
    judge.close()
    return run


# -- words and files

_IN_GROUPS = "keys stand side by side, in no groups"


def read_words(argv: list[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Key -> raw value of the file and the words, and what could not be read."""
    words: list[tuple[str, Any]] = []
    problems: list[Problem] = []
    paths, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.partition("=")
        if word.startswith("--"):
            key = key[2:].replace("-", "_")
            if not equals:
                text = rest.pop(0) if rest and _is_value(key, rest[0]) else "true"
            words.append((key, _word_value(text)))
        elif equals and key.isidentifier():
            words.append((key, _word_value(text)))
        elif word.endswith((".yaml", ".yml", ".json")):
            paths.append(word)
        else:
            reason, remedy = "expected a YAML file, key=value or --key value", "key=value"
            if _is_known(word) and rest and _is_value(word, rest[0]):
                remedy = f"{word}={rest.pop(0).lstrip('=')}"
            problems.append(Problem(word, None, reason, remedy))
    values: dict[str, Any] = {}
    for path in paths:
        try:
            values.update(read_config_file(path))
        except ConfigError as error:
            # its keys are not known: what else is missing may be there
            raise ConfigError([*problems, *error.problems]) from None
    if len(paths) > 1:
        remedy = "one file, then key=value"
        problems.append(Problem("config file", ", ".join(paths), "one file is read", remedy))
    for key, value in words:
        # a word replaces the file's value, whichever of the key's names the file used
        values = {n: v for n, v in values.items() if ALIASES.get(n, n) != ALIASES.get(key, key)}
        values[key] = value
    return values, problems


def _is_known(key: str) -> bool:
    tables = (FIELDS, ALIASES, SWITCHES, IGNORED_KEYS, UNSUPPORTED)
    return any(lookup(table, key) for table in tables)


def _is_value(option: str, word: str) -> bool:
    """Whether the word after `--option` is its value, not the next key or a flag's file."""
    key, equals, _ = word.partition("=")
    flag = option in FIELDS and isinstance(default_of(FIELDS[option]), bool)
    if word.startswith("--") or (equals and _is_known(key)):
        return False
    return not (flag and word.endswith((".yaml", ".yml", ".json")))


def _word_value(text: str) -> str | None:
    """A word's value, for its field's type to read: None, or text without its quotes."""
    if text.strip().lower() in ("", "~", "null"):
        return None
    try:
        return str(loads_yaml(text)) if text[0] in "\"'" else text
    except yaml.YAMLError:
        return text  # a quote that is not closed is a character like others


def own_keys(values: dict[str, Any], problems: list[Problem]) -> tuple[dict[str, Any], list[str]]:
    """Our keys by their own names, and a line about those without effect; Problems are added."""
    own, ignored, known = {}, [], [*FIELDS, *ALIASES]
    for name, value in values.items():
        key = ALIASES.get(name, name)
        if key in FIELDS:
            if key in own:
                reason = f"{key} is given too, and means the same"
                problems.append(Problem(name, value, reason, f"only {key}"))
            own[key] = value
        elif name in SWITCHES:
            continue  # its key may come later
        elif lookup(IGNORED_KEYS, name):
            ignored.append(f"{name} ({lookup(IGNORED_KEYS, name)})")
        elif lookup(UNSUPPORTED, name):
            if refused := unsupported(name, value):
                problems.append(Problem(name, value, *refused))
        elif isinstance(value, dict):
            flat = f"its keys without {name}: above them, each in a line of its own"
            problems.append(Problem(name, None, _IN_GROUPS, flat))
        else:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            remedy = near[0] if near else "one of the keys that --help lists"
            problems.append(Problem(name, value, "no such key", HINTS.get(name, remedy)))
    lines = _turn_switches(values, own, problems)
    return own, [*lines, "these keys have no effect: " + ", ".join(ignored)] if ignored else lines


def _turn_switches(values: dict[str, Any], own: dict[str, Any], problems: list) -> list[str]:
    """Set the keys that SWITCHES stand for where they have no value -> a line about each."""
    lines = []
    for name in filter(values.__contains__, SWITCHES):
        key, setting = SWITCHES[name]
        try:
            is_on = cast(values[name], bool | None)
        except ValueError as error:
            problems.append(Problem(name, values[name], str(error), f"{key}: {setting}"))
            continue
        if is_on and own.get(key) is None:
            own[key] = setting
            lines.append(f"{name} is {key}: {setting} here")
    return lines


def format_help() -> str:
    """All keys, their defaults and what they mean, group by group."""
    lines = ["usage: train.py [config.yaml] [key=value ...]"]
    for group in GROUPS:
        lines += ["", str(group.__doc__).strip().splitlines()[0]]
        for item in dataclasses.fields(group):
            default = default_of(item)
            default = "required" if default is dataclasses.MISSING else json.dumps(default)
            lines.append(f"  {item.name} ({default}): {item.metadata['help']}")
    return "\n".join(lines)
