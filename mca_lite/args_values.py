"""YAML, casting by type, and ArgumentGroup, the base class for groups of configuration keys.

Problems of values are collected in a Judge, not raised at once, so that one error shows all of
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import yaml

from .errors import Judge, Problem, refuse

# -- YAML


class ConfigLoader(yaml.SafeLoader):
    """A YAML loader that refuses aliases and duplicate keys. A single value (no list or mapping)
    without a tag is read as text, unless it is null, and cast later to the type of its key. So 007
    stays a name if its key takes text, and 1e-5 becomes a number if its key takes one."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def fetch_alias(self) -> None:
        problem = "a word that begins with * is an alias, which is not read: quote it"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:  # YAML would take the last value
                problem = f"key {key.value!r} is written twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile("(~|null|Null|NULL)?$"), ["~", "n", "N", ""]
)


def loads_yaml(text: str) -> Any:
    """Parse YAML or JSON text with ConfigLoader: numbers and booleans without a tag stay text.
    Raises yaml.YAMLError, also for a tag that does not fit its value, such as !!bool x."""
    try:
        return yaml.load(text, Loader=ConfigLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deep") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise yaml.YAMLError(f"a tag does not fit its value: {error}") from None


def read_config_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Key -> value from a YAML or JSON file; {} for an empty one. Numbers and booleans without a
    tag are still text.

    Raises ConfigError if the file cannot be read: it is absent, has a key twice, or is a list with
    entries, for example.
    """
    try:
        if not Path(path).is_file():
            raise OSError("it is absent, or no file")
        text = Path(path).read_text(encoding="utf-8")
        if str(path).endswith(".json"):
            text = text.replace("\t", " ")  # YAML refuses tabs between tokens, and JSON allows them
        values = loads_yaml(text) or {}
        if not isinstance(values, dict):
            raise yaml.YAMLError("expected key: value lines")
        return {str(key): value for key, value in values.items()}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        reason = f"it cannot be read: {getattr(error, 'problem', error)}{line}"
    refuse("config file", str(path), reason, "a YAML file of key: value lines, each key once")


# -- casting


def cast(value: object, hint: object) -> Any:
    """Convert `value` to the type `hint`. Text becomes a number, a boolean, a list (split at
    commas, or in brackets) or a dict (JSON or YAML text, or the name of a JSON file). Raises
    ValueError that says what was expected."""
    if isinstance(value, enum.Enum):
        value = value.value if isinstance(value.value, str) else value.name
    kind = typing.get_origin(hint) or hint
    return _CASTS[kind](value, *typing.get_args(hint))


def _cast_choice(value: Any, *names: str) -> str:
    # YAML 1.1 reads a bare no as false, as in eval_strategy: no
    text = "no" if value is False else str(value).strip().lower()
    choices = {name.lower(): name for name in names}
    if text not in choices:
        raise ValueError(f"expected one of {', '.join(names)}")
    return choices[text]


def _cast_list(value: Any, kind: object) -> list[Any]:
    if isinstance(value, str) and value.strip().startswith("["):
        value = _parse(value)
    elif isinstance(value, str):
        value = filter(None, map(str.strip, value.split(",")))
    elif not isinstance(value, (list, tuple)):
        value = [value]
    return [cast(item, kind) for item in value]


def _cast_dict(value: Any, of_keys: Any = str, of_values: Any = Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = _parse(value)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError('expected a mapping, as YAML or as JSON text such as {"key": 1}')
    return {key: cast(item, of_values) for key, item in value.items()}


def _parse(text: str) -> Any:
    """The value of a JSON or YAML text. If `text` ends in .json, it is the name of a file to read
    instead. Raises ValueError if that fails."""
    try:
        if text.endswith(".json"):
            text = Path(text).read_text(encoding="utf-8")
        return loads_yaml(text)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"expected JSON or YAML text, or a JSON file ({error})") from None


_TRUTHS = dict.fromkeys(("true", "yes", "on", "1"), True)
_TRUTHS |= dict.fromkeys(("false", "no", "off", "0"), False)


def _cast_bool(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUTHS:
        raise ValueError("expected true or false")
    return _TRUTHS[text]


def _cast_int(value: Any) -> int:
    with contextlib.suppress(ValueError):
        return int(str(value))  # exact: a float has 53 bits
    with contextlib.suppress(ValueError):
        if _cast_float(value).is_integer():
            return int(float(value))
    raise ValueError("expected a whole number")


def _cast_float(value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        if abs(number) <= 1e38 and not isinstance(value, bool):  # within float32
            return number
    raise ValueError("expected a finite number")


def _cast_str(value: Any) -> str:
    text = str(value)
    is_text = isinstance(value, (str, os.PathLike, int, float)) and not isinstance(value, bool)
    if not is_text or re.search("[\0\ud800-\udfff]", text):  # impossible in a file or a log
        raise ValueError("expected text in UTF-8, without null characters")
    return text


def _cast_optional(value: Any, kind: Any, *none: Any) -> Any:
    return None if value is None else cast(value, kind)


_CASTS: dict[Any, Callable[..., Any]] = {
    Any: lambda value: value,
    types.UnionType: _cast_optional,
    typing.Union: _cast_optional,
    Literal: _cast_choice,
    list: _cast_list,
    dict: _cast_dict,
    bool: _cast_bool,
    int: _cast_int,
    float: _cast_float,
    str: _cast_str,
}


def as_list(value: Any) -> list[Any]:
    """Wrap a value in a list of one; a list is returned unchanged."""
    return value if isinstance(value, list) else [value]


def show_count(count: int, word: str) -> str:
    """A count with its noun, such as "1 step" or "3 steps"."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


# -- groups of keys

_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "low": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "high": ("at most", operator.le),
    "below": ("less than", operator.lt),
}


def arg(default: Any, text: str, **metadata: Any) -> Any:
    """Make a dataclass field for a configuration key. text: its help. A field whose default is
    MISSING is required, and may be given by position.

    choices: the allowed values, or a table with them as keys, to which rows may be added until the
    arguments are read. words: text in lower case -> the value it stands for. check: a function that
    raises ValueError for a value that does not work. remedy: what an error suggests (default:
    example()).
    low, above, high, below: limits (low <= value, above < value, value <= high, value < below).
    torch: False for a key without effect on the plain torch backend.
    model: True if the key sets the field of McaModelConfig with its name, except when the key is
    None; "always": None is set too.
    optimizer, ddp: True if the key sets the field of megatron's OptimizerConfig or
    DistributedDataParallelConfig with its name; a string: the field's name if it differs."""
    metadata = {"help": text, **metadata}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata, kw_only=default is not MISSING)


def flag(text: str, **metadata: Any) -> Any:
    """A dataclass field for a key that is False by default. text: its help. metadata: other options
    of arg()."""
    return arg(False, text, **metadata)


def optional(text: str, **metadata: Any) -> Any:
    """A dataclass field for a key that is None by default. text: its help. metadata: other options
    of arg()."""
    return arg(None, text, **metadata)


def count(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field for a key whose value is a number of at least 1; None is allowed too if it
    is the default. text: its help. metadata: other options of arg()."""
    return arg(default, text, low=1, **metadata)


def amount(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field for a key whose value is a number of at least 0; None is allowed too if it
    is the default. text: its help. metadata: other options of arg()."""
    return arg(default, text, low=0, **metadata)


def default_of(item: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field; MISSING if the field is required."""
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default


def example(item: dataclasses.Field[Any]) -> str:
    """Make a config line for an error to suggest. It has the key with its default, such as
    `save_steps: 500`; if the default is None, with its least value (the option `low`). If that is
    not text, a number or a boolean, it has the key's help instead: `run_name: <name of the run in
    wandb>`."""
    default = default_of(item)
    if default is None:
        default = item.metadata.get("low")
    text = f"<{item.metadata['help']}>"
    if isinstance(default, (str, int, float)):
        text = json.dumps(default)
    return f"{item.name}: {text}"


def _check_value(value: Any, metadata: Mapping[str, Any]) -> None:
    if "check" in metadata:
        metadata["check"](value)
    limits = [name for name in _LIMITS if name in metadata]
    if not all(_LIMITS[name][1](value, metadata[name]) for name in limits):
        expected = " and ".join(f"{_LIMITS[name][0]} {metadata[name]}" for name in limits)
        raise ValueError(f"it must be {expected}")


_Group = TypeVar("_Group", bound="ArgumentGroup")


@dataclass(kw_only=True)
class ArgumentGroup:
    """Base class for the dataclasses of configuration keys. The constructor casts every field to
    its type, applies the group's rules, and raises one ConfigError with all problems found.

    notes: lines for the user, for example about values without effect. changed: the keys that were
    set to another value than their default."""

    def __post_init__(self) -> None:
        judge = Judge(self)
        self.cast_fields(judge)
        self.resolve(judge)
        judge.close()

    @classmethod
    def read(cls: type[_Group], values: dict[str, Any], judge: Judge) -> _Group:
        """Make an object of this class, a group of configuration keys, from raw {key: value}. Each
        value is cast to its field's type. A key that is not in `values` gets its default; if it has
        none, it becomes "", and a Problem says that it is required. Keys of other groups are
        ignored. judge: collects the Problems.

        The constructor is not called, because it would raise the problems of this group alone. Call
        resolve() later to apply the group's rules."""
        group = cls.__new__(cls)
        for item in dataclasses.fields(cls):
            setattr(group, item.name, values.get(item.name))
        group.cast_fields(judge)
        return group

    def cast_fields(self, judge: Judge) -> None:
        """Cast each field to its type in place, and check its choices and limits. judge: collects
        the Problems. Sets `notes` to [], and `changed` to the keys with another value than their
        default."""
        self.notes: list[str] = []
        self.changed: list[str] = []
        for item in dataclasses.fields(self):
            self.check_field(item, judge)
            if getattr(self, item.name) != default_of(item):
                self.changed.append(item.name)

    def check_field(self, item: dataclasses.Field[Any], judge: Judge) -> None:
        """Cast one field to its type in place, and check its choices and limits. judge: collects
        the Problem if the value is wrong; the field then gets its default ("" if it is
        required)."""
        key = item.name
        known = item.metadata
        default = default_of(item)
        given = getattr(self, key)
        value = known.get("words", {}).get(str(given).lower(), given)
        try:
            if given is None and default is MISSING:
                raise ValueError("it is required and was not given")
            value = cast(default if value is None else value, _type_hints(type(self))[key])
            if "choices" in known:
                choice: Any = Literal[tuple(known["choices"])]
                value = cast(value, list[choice] if isinstance(value, list) else choice)
            if value is not None:
                _check_value(value, known)
        except ValueError as error:
            judge.refuse(key, str(error), known.get("remedy", example(item)), value)
            value = "" if default is MISSING else default
        setattr(self, key, value)

    def resolve(self, judge: Judge) -> None:
        """Fill in values that depend on others, in place, then apply the group's rules. judge:
        collects the Problems that the rules find."""
        self.normalise()
        self.check(judge)

    def normalise(self) -> None:
        """Fill in values that depend on others, in place, after every field was cast to its type.
        Groups may override it; this base class does nothing."""

    def check(self, judge: Judge) -> None:
        """Apply the group's rules: add a Problem to `judge` (which collects them) for each broken
        one. Groups may override it; this base class does nothing."""

    def fields_of(self, config: str) -> dict[str, Any]:
        """The keys that set a field of a config of megatron's, as {field's name: value}. config:
        which one: "optimizer" for OptimizerConfig, "ddp" for DistributedDataParallelConfig."""
        names = {
            f.name: f.metadata[config] for f in dataclasses.fields(self) if config in f.metadata
        }
        return {key if name is True else name: getattr(self, key) for key, name in names.items()}

    def to_dict(self) -> dict[str, Any]:
        """{field name: value in effect}, as a deep copy."""
        return dataclasses.asdict(self)


_type_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)


def check_keys(group_type: type[ArgumentGroup], **values: Any) -> list[Problem]:
    """Check values of a group's keys by their types and limits -> the Problems found. values: by
    the keys' names. A key that is not given gives no Problem, even if it is required."""
    judge = Judge(None)
    group_type.read(values, judge)
    return [problem for problem in judge.problems if problem.key in values]
