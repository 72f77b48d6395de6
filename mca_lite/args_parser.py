"""Groups of arguments that cast and check themselves, and the parser that fills them from a file and words.

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
from typing import Any

import yaml

from .args_keys import (
    ALIASES,
    HINTS,
    IGNORED_KEYS,
    UNSUPPORTED,
    check_unsupported,
    lookup,
    unsupported_problem,
)
from .args_values import (
    ConfigError,
    ConfigLoader,
    Problem,
    cast_fields,
    check_duplicates,
    check_ranges,
    default_of,
    loads_yaml,
    type_hints,
)


def arg(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with help and limits: low <= value, above < value, value <= high, value < below.

    choices: a table whose keys are the values, which may grow until the arguments are read."""
    metadata = {"help": text, **limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return (
        field(metadata=metadata)
        if default is MISSING
        else field(default=default, metadata=metadata)
    )


@dataclass(kw_only=True)
class ArgumentGroup:
    """Base of the groups: the constructor casts every field by its type and raises ConfigError with all problems.

    `notes` holds one line for each value that was changed or has no effect.
    """

    def __post_init__(self) -> None:
        problems = self._resolve(set())
        if problems:
            raise ConfigError(problems)

    @classmethod
    def build(cls, values: dict[str, Any]) -> tuple[Any, list[Problem]]:
        """The group and its problems, which the caller raises. It passes by the constructor: for all errors of a run to
        be shown together, the checks across groups must see a group that has problems too."""
        group = cls.__new__(cls)
        missing, problems = set(), []
        for item in dataclasses.fields(cls):
            value = values.get(item.name)
            if value is None and default_of(item) is MISSING:
                missing.add(item.name)
                suggestion = f"{item.name}: <{item.metadata['help']}>"
                problems.append(
                    Problem(item.name, None, "it is required and was not given", suggestion)
                )
                value = [] if typing.get_origin(type_hints(cls)[item.name]) is list else ""
            setattr(group, item.name, default_of(item) if value is None else value)
        return group, problems + group._resolve(missing)

    def _resolve(self, bad: set[str]) -> list[Problem]:
        self.notes: list[str] = []
        problems = []
        for check in (cast_fields, check_ranges, check_unsupported, type(self)._check):
            problems += check(self, bad | {problem.key for problem in problems})
        return problems

    def _check(self, bad: set[str]) -> list[Problem]:
        return []

    def to_dict(self) -> dict[str, Any]:
        """Field name -> value, copied; what was left to a default is there with the value in effect."""
        return dataclasses.asdict(self)


class Parsed(typing.NamedTuple):
    """What a parser found: the groups in the order of their types, problems, warnings, and the keys that were given."""

    groups: tuple[Any, ...]
    problems: list[Problem]
    warnings: list[str]
    given: set[str]


class ArgumentParser:
    """Fills several argument groups from one flat set of keys: a YAML or JSON file, then command line words over it.

    Words are `key=value`, `--key=value` or `--key value`, in any order; a lone `--key` means true, and a word that ends
    in .yaml, .yml or .json is the file. Of a key given twice there the last value holds; null means the default.
    """

    def __init__(self, group_types: typing.Iterable[type[ArgumentGroup]]):
        self.group_types = tuple(group_types)
        self.fields = {
            item.name: item for group in self.group_types for item in dataclasses.fields(group)
        }

    def parse(self, argv: list[str]) -> tuple[Any, ...]:
        """One object for each type, in their order. Raises ConfigError with everything that is wrong."""
        return self._finish(*self.read(argv))

    def parse_dict(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """The same from key -> value."""
        return self._finish(values, [])

    def _finish(self, values: dict[str, Any], problems: list[Problem]) -> tuple[Any, ...]:
        parsed = self.build(values)
        if problems + parsed.problems:
            raise ConfigError(problems + parsed.problems)
        return parsed.groups

    def read(self, argv: list[str]) -> tuple[dict[str, Any], list[Problem]]:
        """Key -> raw value of the file and the words, and what could not be read."""
        paths, words, problems = self._split(argv)
        values: dict[str, Any] = {}
        for path in paths:
            try:
                values.update(read_config_file(path))
            except ConfigError as error:
                problems += error.problems
        if len(paths) > 1:
            problems.append(
                Problem(
                    "config file", ", ".join(paths), "one file is read", "one file, then key=value"
                )
            )
        for key, value in words:
            self._merge(values, key, value)
        return values, problems

    def _merge(self, values: dict[str, Any], key: str, value: Any) -> None:
        """A word over the file's value, whichever of its names the file used."""
        for other in [
            name
            for name in values
            if name != key and ALIASES.get(name, name) == ALIASES.get(key, key)
        ]:
            del values[other]
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
                problems.append(
                    Problem(
                        word, None, "expected a YAML file, key=value or --key value", "key=value"
                    )
                )
        return paths, words, problems

    def _is_value(self, option: str, word: str) -> bool:
        """Whether the word after `--option` is its value, rather than the next key or, for a flag, the file."""
        key, equals, _ = word.partition("=")
        known = (
            key in self.fields
            or key in ALIASES
            or lookup(IGNORED_KEYS, key)
            or lookup(UNSUPPORTED, key)
        )
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
                    problems.append(
                        Problem(
                            name, value, f"{key} is given too, and means the same", f"only {key}"
                        )
                    )
                own[key] = value
            elif lookup(IGNORED_KEYS, name):
                ignored.append(f"{name} ({lookup(IGNORED_KEYS, name)})")
            else:
                problems += self._foreign(name, value)
        groups, notes = [], []
        for group_type in self.group_types:
            names = {item.name for item in dataclasses.fields(group_type)}
            group, found = group_type.build(
                {key: value for key, value in own.items() if key in names}
            )
            groups.append(group)
            problems += found
            notes += group.notes
        if ignored:
            notes.insert(0, "these keys have no effect: " + ", ".join(ignored))
        return Parsed(
            tuple(groups), problems, notes, {key for key, value in own.items() if value is not None}
        )

    def _foreign(self, name: str, value: Any) -> list[Problem]:
        """A key of no group: known but not supported, or unknown."""
        if lookup(UNSUPPORTED, name):
            plain = {"true": True, "false": False, "none": None, "0": 0, "1": 1}.get(
                str(value).lower(), value
            )
            problem = unsupported_problem(name, plain)
            return [problem] if problem else []
        near = difflib.get_close_matches(name, [*self.fields, *ALIASES], n=1, cutoff=0.6)
        suggestion = HINTS.get(name) or (near[0] if near else "one of the keys that --help lists")
        return [Problem(name, value, "no such key", suggestion)]

    def format_help(self) -> str:
        """All keys, their defaults and what they mean, group by group."""
        lines = ["usage: train.py [config.yaml] [key=value ...]"]
        for group in self.group_types:
            lines += ["", group.__doc__.strip().splitlines()[0]]
            for item in dataclasses.fields(group):
                default = (
                    "required" if default_of(item) is MISSING else json.dumps(default_of(item))
                )
                lines.append(f"  {item.name} ({default}): {item.metadata['help']}")
        return "\n".join(lines)


def read_config_file(path: str | os.PathLike) -> dict[str, Any]:
    """Key -> value of a flat YAML or JSON file. Its numbers and truth values stay text, for their field's type to read.
    Raises ConfigError where the file is absent, broken or not flat, or where it has a key twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [
                Problem(
                    "config file",
                    str(path),
                    f"it cannot be read: {error}",
                    "the path of a YAML file",
                )
            ]
        ) from None
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
    except yaml.YAMLError as error:
        reason = f"it is no valid configuration: {_first_line(error)}"
        raise ConfigError(
            [Problem("config file", str(path), reason, "key: value, each key once")]
        ) from None


def _word_value(text: str) -> str | None:
    """A word's value: null, quoted text without its quotes, or the text itself, for its field's type to read."""
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


def _first_line(error: yaml.YAMLError) -> str:
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    return f"{problem or error}{f' (line {mark.line + 1})' if mark else ''}"
