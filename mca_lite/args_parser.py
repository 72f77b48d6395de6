"""Groups of arguments that cast and check themselves, and the parser that fills them from a file
and words.

A group is a dataclass whose fields are made by arg(); the groups of a run are in args.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import typing
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from .args_keys import ALIASES, HINTS, IGNORED_KEYS, UNSUPPORTED, lookup, unsupported_problem
from .args_values import (
    ConfigError,
    ConfigLoader,
    Judge,
    Problem,
    cast,
    check_duplicates,
    loads_yaml,
    type_hints,
)

_LIMITS = {
    "low": ("at least", lambda value, limit: value >= limit),
    "above": ("more than", lambda value, limit: value > limit),
    "high": ("at most", lambda value, limit: value <= limit),
    "below": ("less than", lambda value, limit: value < limit),
}


def arg(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field with a help text and what is known of its key.

    choices: a table of the values, which may grow until the arguments are read.
    low, above, high, below: limits (low <= value, above < value, value <= high, value < below).
    torch: False for a key without effect on the plain torch backend.
    model: the key is a field of McaModelConfig under the same name, which takes it where it is not
        None; "always" if a None counts too.
    optimizer, ddp: True if it is a field of megatron's OptimizerConfig, or of its
        DistributedDataParallelConfig, under the same name; else its name there.
    lora: True for a key that has an effect with adapters only.
    """
    metadata = {"help": text, **metadata}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(item: dataclasses.Field) -> Any:
    """A field's default, dataclasses.MISSING where it has none."""
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default


def example(item: dataclasses.Field) -> str:
    """What to write instead: the key with its default, or its help text where the default is no
    value."""
    default = default_of(item)
    if default is None and "low" in item.metadata:
        default = item.metadata["low"]
    if isinstance(default, bool):
        default = str(default).lower()
    if isinstance(default, (str, int, float)):
        return f"{item.name}: {default}"
    return f"{item.name}: <{item.metadata['help']}>"


@dataclass(kw_only=True)
class ArgumentGroup:
    """Base of the groups: the constructor casts every field by its type and raises ConfigError with
    all problems.

    `notes` holds one line for each value that was changed or has no effect.
    """

    def __post_init__(self) -> None:
        judge = Judge(self)
        self._resolve(judge)
        judge.close()

    @classmethod
    def build(cls, values: dict[str, Any]) -> tuple[Any, list[Problem]]:
        """The group from key -> value and its problems, which the caller raises; other groups' keys
        are passed over.

        It does without the constructor, since the rules between groups must see a group that has
        problems too.
        """
        group = cls.__new__(cls)
        judge = Judge(group)
        for item in dataclasses.fields(cls):
            value = values.get(item.name)
            if value is None and default_of(item) is MISSING:
                value = cls._nothing(item)
                judge.refuse(item.name, "it is required and was not given", example(item), None)
            setattr(group, item.name, default_of(item) if value is None else value)
        group._resolve(judge)
        return group, judge.problems

    @classmethod
    def _nothing(cls, item: dataclasses.Field) -> Any:
        """What stands for a value that was refused: the default, or nothing of its type."""
        # mypy asks whether instances can be hashed; the class is
        is_list = typing.get_origin(type_hints(cls)[item.name]) is list  # type: ignore[arg-type]
        default = default_of(item)
        if default is MISSING:
            default = [] if is_list else ""
        return default

    def _resolve(self, judge: Judge) -> None:
        self.notes: list[str] = []
        for item in dataclasses.fields(self):
            if item.name not in judge.bad:
                self._check_field(item, judge)
        self._check(judge)

    def _check_field(self, item: dataclasses.Field, judge: Judge) -> None:
        """Cast a field in place and check it by itself. None, and a value that does not work,
        become the default."""
        key, default, value = item.name, default_of(item), getattr(self, item.name)
        if value is None and default is not MISSING:
            value = default
        try:
            # mypy asks whether instances can be hashed; the class is
            value = cast(value, type_hints(type(self))[key])  # type: ignore[arg-type]
            if "choices" in item.metadata:
                value = cast(value, Literal[tuple(item.metadata["choices"])])
        except ValueError as error:
            judge.refuse(key, str(error), example(item), value)
        else:
            limits = {name: item.metadata[name] for name in _LIMITS if name in item.metadata}
            kept = all(
                _LIMITS[name][1](value, limit)
                for name, limit in limits.items()
                if value is not None
            )
            unsupported = unsupported_problem(key, value) if key in UNSUPPORTED else None
            if not kept:
                wanted = " and ".join(
                    f"{_LIMITS[name][0]} {limit}" for name, limit in limits.items()
                )
                judge.refuse(key, f"it must be {wanted}", example(item), value)
            elif unsupported:
                judge.refuse(key, unsupported.reason, unsupported.suggestion, value)
        setattr(self, key, self._nothing(item) if key in judge.bad else value)

    def _check(self, judge: Judge) -> None:
        """The rules of a group; its fields hold values of their types."""

    def changed(self, **metadata: Any) -> list[str]:
        """The keys with this metadata whose values differ from their defaults."""
        return [
            item.name
            for item in dataclasses.fields(self)
            if all(item.metadata.get(name) == value for name, value in metadata.items())
            and getattr(self, item.name) != default_of(item)
        ]

    def fields_of(self, config: str) -> dict[str, Any]:
        """{field: value} of keys declared as fields of a config: "optimizer" or "ddp"."""
        names = {
            f.name: f.metadata[config] for f in dataclasses.fields(self) if config in f.metadata
        }
        return {key if name is True else name: getattr(self, key) for key, name in names.items()}

    def to_dict(self) -> dict[str, Any]:
        """Field name -> value, copied; what was left to a default is there with the value in
        effect."""
        return dataclasses.asdict(self)


def check_keys(group_type: type[ArgumentGroup], **values: Any) -> list[Problem]:
    """The Problems of single values by the types and limits of the group's keys, for constructors
    that take them."""
    group = group_type.__new__(group_type)
    judge = Judge(group)
    for item in dataclasses.fields(group_type):
        if item.name in values:
            setattr(group, item.name, values[item.name])
            group._check_field(item, judge)
    return judge.problems


class Parsed(typing.NamedTuple):
    """The groups in the order of their types, problems, warnings, and the keys that were given."""

    groups: tuple[Any, ...]
    problems: list[Problem]
    warnings: list[str]
    given: set[str]


class ArgumentParser:
    """Fills several argument groups from one flat set of keys: a YAML or JSON file, overruled by
    command line words.

    Words are `key=value`, `--key=value` or `--key value`, in any order; a lone `--key` means true,
    and a word that ends in .yaml, .yml or .json is the file. Of a key given twice there the last
    value holds; null is the default.
    """

    def __init__(self, group_types: typing.Iterable[type[ArgumentGroup]]):
        self.group_types = tuple(group_types)
        self.fields = {
            item.name: item for group in self.group_types for item in dataclasses.fields(group)
        }

    def read(self, argv: list[str]) -> tuple[dict[str, Any], list[Problem]]:
        """Key -> raw value of the file and the words, and what could not be read."""
        paths, words, problems = self._split(argv)
        values: dict[str, Any] = {}
        for path in paths:
            try:
                values.update(read_config_file(path))
            except (
                ConfigError
            ) as error:  # its keys are not known: what else is missing may be there
                raise ConfigError([*problems, *error.problems]) from None
        if len(paths) > 1:
            names = ", ".join(paths)
            problems.append(
                Problem("config file", names, "one file is read", "one file, then key=value")
            )
        for key, value in words:
            self._merge(values, key, value)
        return values, problems

    def _merge(self, values: dict[str, Any], key: str, value: Any) -> None:
        """Let a word replace the file's value, whichever of the key's names the file used."""
        for name in list(values):
            if ALIASES.get(name, name) == ALIASES.get(key, key):
                del values[name]
        values[key] = value

    def _split(self, argv: list[str]) -> tuple[list[str], list[tuple[str, Any]], list[Problem]]:
        paths, words, problems = [], [], []
        rest = list(argv)
        while rest:
            word = rest.pop(0)
            key, equals, text = word.partition("=")
            if word.startswith("--"):
                key = key[2:].replace("-", "_")
                if not equals:
                    text = rest.pop(0) if rest and self._is_value(key, rest[0]) else "true"
                words.append((key, _word_value(text)))
            elif equals and key.isidentifier():
                words.append((key, _word_value(text)))
            elif word.endswith((".yaml", ".yml", ".json")):
                paths.append(word)
            else:
                reason = "expected a YAML file, key=value or --key value"
                problems.append(Problem(word, None, reason, "key=value"))
        return paths, words, problems

    def _is_value(self, option: str, word: str) -> bool:
        """Whether the word after `--option` is its value, rather than the next key or, for a flag,
        the file."""
        key, equals, _ = word.partition("=")
        known = key in self.fields or key in ALIASES
        known = known or lookup(IGNORED_KEYS, key) or lookup(UNSUPPORTED, key)
        flag = option in self.fields and isinstance(default_of(self.fields[option]), bool)
        if word.startswith("--") or (equals and known):
            return False
        return not (flag and word.endswith((".yaml", ".yml", ".json")))

    def build(self, values: dict[str, Any]) -> Parsed:
        """Sorts raw values into the groups; nothing is raised."""
        problems, ignored, own = [], [], {}
        for name, value in values.items():
            key = ALIASES.get(name, name)
            if key in self.fields:
                if key in own:
                    reason = f"{key} is given too, and means the same"
                    problems.append(Problem(name, value, reason, f"only {key}"))
                own[key] = value
            elif lookup(IGNORED_KEYS, name):
                ignored.append(f"{name} ({lookup(IGNORED_KEYS, name)})")
            else:
                problems += self._foreign(name, value)
        groups, notes = [], []
        for group_type in self.group_types:
            group, found = group_type.build(own)
            groups.append(group)
            problems += found
            notes += group.notes
        if ignored:
            notes.insert(0, "these keys have no effect: " + ", ".join(ignored))
        given = {key for key, value in own.items() if value is not None}
        return Parsed(tuple(groups), problems, notes, given)

    def _foreign(self, name: str, value: Any) -> list[Problem]:
        """A key of no group: known but not supported, or unknown."""
        if lookup(UNSUPPORTED, name):
            plain = {"true": True, "false": False, "none": None, "0": 0, "1": 1}
            problem = unsupported_problem(name, plain.get(str(value).lower(), value))
            return [problem] if problem else []
        if isinstance(value, dict):
            flat = f"its keys without {name}: above them, each in a line of its own"
            return [Problem(name, None, "keys stand side by side, in no groups", flat)]
        near = difflib.get_close_matches(name, [*self.fields, *ALIASES], n=1, cutoff=0.6)
        suggestion = HINTS.get(name) or (near[0] if near else "one of the keys that --help lists")
        return [Problem(name, value, "no such key", suggestion)]

    def format_help(self) -> str:
        """All keys, their defaults and what they mean, group by group."""
        lines = ["usage: train.py [config.yaml] [key=value ...]"]
        for group in self.group_types:
            lines += ["", str(group.__doc__).strip().splitlines()[0]]
            for item in dataclasses.fields(group):
                default = default_of(item)
                default = "required" if default is MISSING else json.dumps(default)
                lines.append(f"  {item.name} ({default}): {item.metadata['help']}")
        return "\n".join(lines)


def read_config_file(path: str | os.PathLike) -> dict[str, Any]:
    """Key -> value of a flat YAML or JSON file. Numbers and truth values stay text, for their
    field's type to read.

    Raises ConfigError where the file is absent, broken or not flat, or where it has a key twice.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("it is no file, but a folder, a pipe or a device")
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it cannot be read: {error}"
        problem = Problem("config file", str(path), reason, "the path of a YAML file")
        raise ConfigError([problem]) from None
    try:
        # JSON is YAML but for the tabs between its tokens
        loader = ConfigLoader(text.replace("\t", " ") if str(path).endswith(".json") else text)
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise yaml.MarkedYAMLError(
                problem="expected key: value lines", problem_mark=root.start_mark
            )
        check_duplicates(root)
        loader.flatten_mapping(root)
        return {
            str(loader.construct_object(key, deep=True)): _node_value(loader, node)
            for key, node in root.value
        }
    except (yaml.YAMLError, RecursionError) as error:
        reason = f"it is no valid configuration: {_first_line(error)}"
        if isinstance(error, RecursionError):
            reason = "it is no valid configuration: it is nested too deep"
        problem = Problem("config file", str(path), reason, "key: value, each key once")
        raise ConfigError([problem]) from None


def _word_value(text: str) -> str | None:
    """A word's value: null, quoted text without its quotes, or the text itself, for its field's
    type to read."""
    if text.strip().lower() in ("", "~", "null"):
        return None
    try:
        return str(loads_yaml(text)) if text[0] in "\"'" else text
    except yaml.YAMLError:
        return text  # a quote that is not closed is a character like others


def _node_value(loader: ConfigLoader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":null"):
        return node.value
    return loader.construct_object(node, deep=True)


def _first_line(error: Exception) -> str:
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    return f"{problem or error}{f' (line {mark.line + 1})' if mark else ''}"
