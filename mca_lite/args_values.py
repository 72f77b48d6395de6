"""YAML, casting by type, and ArgumentGroup, the base of the groups of keys in args.py.

Problems are collected in a Judge instead of raised, to show all of a run at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from .args_keys import FOREIGN_VALUES
from .errors import Judge, Problem, refuse

# -- YAML

_MOST_VALUES = 100_000  # aliases of aliases could expand to any number


class ConfigLoader(yaml.SafeLoader):
    """YAML without duplicate keys, with 1e-5 as a number and 2024-01-31 as text."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _count_values(node, {}) > _MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=f"it stands for more than {_MOST_VALUES:,} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        check_duplicates(node)
        return super().construct_mapping(node, deep)


def _count_values(node: yaml.Node, counts: dict[int, float]) -> float:
    """The values of a node, each use of an alias counted; infinite for a recursive one."""
    if id(node) not in counts:
        counts[id(node)] = math.inf
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        counts[id(node)] = 1 + sum(_count_values(part, counts) for part in parts)
    return counts[id(node)]


ConfigLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if not tag.endswith(":timestamp")]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def check_duplicates(node: yaml.MappingNode) -> None:
    """Raise yaml.MarkedYAMLError for a duplicate key of a mapping: YAML would take the last."""
    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                problem = f"key {key.value!r} is written twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)


def loads_yaml(text: str) -> Any:
    """A YAML text's value. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, Loader=ConfigLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deep") from None


def read_config_file(path: str | os.PathLike) -> dict[str, Any]:
    """Key -> value of a flat YAML or JSON file. Numbers and truth values are text, cast later by
    the field's type.

    Raises ConfigError for a file that is absent, broken or not flat, and for a duplicate key.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("it is no file, but a folder, a pipe or a device")
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        refuse("config file", str(path), f"it cannot be read: {error}", "the path of a YAML file")
    if str(path).endswith(".json"):
        text = text.replace("\t", " ")  # JSON is YAML but for tabs between tokens
    try:
        loader = ConfigLoader(text)
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            problem = "expected key: value lines"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=root.start_mark)
        check_duplicates(root)
        loader.flatten_mapping(root)
        return {
            str(loader.construct_object(key, deep=True)): _node_value(loader, node)
            for key, node in root.value
        }
    except RecursionError:
        reason = "it is nested too deep"
    except Exception as error:  # a tag such as !!bool fails with any of Python's
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        reason = f"{getattr(error, 'problem', None) or error}{line}"
    reason = f"it is no valid configuration: {reason}"
    refuse("config file", str(path), reason, "key: value, each key once")


def _node_value(loader: ConfigLoader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":null"):
        return node.value
    return loader.construct_object(node, deep=True)


# -- casting


def cast(value: Any, hint: Any) -> Any:
    """Convert `value` to the annotation `hint`: text is parsed as a number, a truth value, a list
    (by commas) or a dict (JSON or YAML). Raises ValueError with the expected type."""
    if isinstance(value, enum.Enum):
        value = value.value
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        kind, _ = args  # X | None
        return None if value is None else cast(value, kind)
    if origin is Literal:
        # YAML reads a bare no as false, as in eval_strategy: no
        text = "no" if value is False else str(value).strip().lower()
        choices = {choice.lower(): choice for choice in args}
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(args)}")
        return choices[text]
    if origin is list:
        return _cast_list(value, args[0])
    if origin is dict:
        return _cast_dict(value)
    return {bool: _cast_bool, int: _cast_int, float: _cast_float, str: _cast_str}[hint](value)


def _cast_list(value: Any, kind: Any) -> list:
    if isinstance(value, str) and value.strip().startswith("["):
        value = _parse(value)
    elif isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    elif not isinstance(value, (list, tuple)):
        value = [value]
    return [cast(item, kind) for item in value]


def _cast_dict(value: Any) -> dict:
    if isinstance(value, str) and value.strip().endswith((".json", ".yaml", ".yml")):
        try:
            value = Path(value.strip()).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"expected a mapping, or a file with one ({error})") from None
    if isinstance(value, str):
        value = _parse(value)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError('expected a mapping, as YAML or as JSON text such as {"key": 1}')
    return dict(value)


def _parse(text: str) -> Any:
    try:
        return loads_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"expected JSON or YAML text ({error})") from None


_TRUTHS = dict.fromkeys(("true", "yes", "on", "1"), True)
_TRUTHS |= dict.fromkeys(("false", "no", "off", "0"), False)


def _cast_bool(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUTHS:
        raise ValueError("expected true or false")
    return _TRUTHS[text]


def _cast_int(value: Any) -> int:
    if re.fullmatch(r"\s*[-+]?\d+\s*", str(value)):
        return int(value)  # exact: a float has 53 bits
    try:
        number = _cast_float(value)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError("expected a whole number")
    return int(number)


def _cast_float(value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        if math.isfinite(number) and not isinstance(value, bool):
            return number
    raise ValueError("expected a finite number")


def _cast_str(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if re.search("[\0\ud800-\udfff]", text):  # impossible in a file or a log
            raise ValueError("expected text in UTF-8, without null characters")
        return text
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ValueError("expected text")


def show_count(count: int, word: str) -> str:
    """A number with its word: 1 step, 3 steps."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


# -- groups of keys

_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "low": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "high": ("at most", operator.le),
    "below": ("less than", operator.lt),
}


def arg(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field with a help text and the metadata of its key. One without a default may be
    given by position.

    choices: a table of the values, which may grow until the arguments are read. words: texts -> the
        values that they mean. check: raises ValueError for a value that does not work.
    low, above, high, below: limits (low <= value, above < value, value <= high, value < below).
    torch: False for a key without effect on the plain torch backend.
    model: True for a field of McaModelConfig under the same name, set unless the key is None;
        "always" if a None is set too.
    optimizer, ddp: True for a field of megatron's OptimizerConfig, or of its
        DistributedDataParallelConfig, under the same name; else its name there.
    lora: True for a key with an effect on adapters only.
    """
    metadata = {"help": text, **metadata}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    if default is MISSING:
        return field(metadata=metadata, kw_only=False)
    return field(default=default, metadata=metadata)


def default_of(item: dataclasses.Field) -> Any:
    """A field's default, or dataclasses.MISSING."""
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default


def example(item: dataclasses.Field) -> str:
    """A line with a value that works: the key with its default, or with its help text."""
    default = default_of(item)
    if default is None and "low" in item.metadata:
        default = item.metadata["low"]
    if isinstance(default, bool):
        default = str(default).lower()
    if isinstance(default, (str, int, float)):
        return f"{item.name}: {default}"
    return f"{item.name}: <{item.metadata['help']}>"


def _check_value(value: Any, metadata: Mapping[str, Any]) -> None:
    if "check" in metadata:
        metadata["check"](value)
    limits = [(*_LIMITS[name], limit) for name, limit in metadata.items() if name in _LIMITS]
    if not all(keeps(value, limit) for _, keeps, limit in limits):
        expected = " and ".join(f"{words} {limit}" for words, _, limit in limits)
        raise ValueError(f"it must be {expected}")


_Group = TypeVar("_Group", bound="ArgumentGroup")


@dataclass(kw_only=True)
class ArgumentGroup:
    """Base of the groups: the constructor casts every field by its type and raises ConfigError with
    all problems.

    notes: a line for each value that was changed or has no effect. changed: the keys with another
    value than their default.
    """

    def __post_init__(self) -> None:
        judge = Judge(self)
        self.cast_fields(judge)
        self.resolve(judge)
        judge.close()

    @classmethod
    def read(cls: type[_Group], values: dict[str, Any], judge: Judge, use_mca=True) -> _Group:
        """A group from key -> value, before its rules. Other groups' keys are ignored, and without
        use_mca megatron-core's are too.

        The constructor is not called: rules between groups need a group with problems too.
        """
        group = cls.__new__(cls)
        left_out = []
        for item in dataclasses.fields(cls):
            value = values.get(item.name)
            if value is None and default_of(item) is MISSING:
                judge.refuse(item.name, "it is required and was not given", example(item), None)
                value = ""
            if value is not None and not use_mca and not item.metadata.get("torch", True):
                with contextlib.suppress(ValueError):  # a value of another type is refused below
                    if cast(value, _hint(cls, item.name)) != default_of(item):
                        left_out.append(item.name)
                    value = None
            setattr(group, item.name, value)
        group.cast_fields(judge)
        if left_out:
            names = ", ".join(left_out)
            group.notes.append(f"use_mca is false: plain torch DDP does without {names}")
        return group

    def cast_fields(self, judge: Judge) -> None:
        """Cast and check each field in place; sets `notes` and `changed`."""
        self.notes: list[str] = []
        self.changed: list[str] = []
        for item in dataclasses.fields(self):
            self.check_field(item, judge)
            if getattr(self, item.name) != default_of(item):
                self.changed.append(item.name)

    def check_field(self, item: dataclasses.Field, judge: Judge) -> None:
        """Cast a field in place and check it; a value with a problem becomes the default."""
        key = item.name
        known = item.metadata
        value = getattr(self, key)
        default = default_of(item)
        if value is None and default is not MISSING:
            value = default
        value = known.get("words", {}).get(str(value).lower(), value)
        try:
            value = cast(value, _hint(type(self), key))
            if "choices" in known:
                value = cast(value, Literal[tuple(known["choices"])])
            if value is not None:
                _check_value(value, known)
        except ValueError as error:
            reason = str(error)
            remedy = example(item)
            foreign = FOREIGN_VALUES.get(key, {}).get(str(value).lower())
            if foreign:
                reason = f"{foreign[0]}: {error}"
                remedy = foreign[1]
            judge.refuse(key, reason, remedy, value)
            value = "" if default is MISSING else default
        setattr(self, key, value)

    def resolve(self, judge: Judge) -> None:
        """Fill in the values that follow from others, and apply the rules of the group."""
        self.normalise()
        self.check(judge)

    def normalise(self) -> None:
        """Fill in the values that follow from others; the fields have values of their types."""

    def check(self, judge: Judge) -> None:
        """Apply the rules of the group; changes nothing."""

    def fields_of(self, config: str) -> dict[str, Any]:
        """{field: value} of keys declared as fields of a config: "optimizer" or "ddp"."""
        names = {
            f.name: f.metadata[config] for f in dataclasses.fields(self) if config in f.metadata
        }
        return {key if name is True else name: getattr(self, key) for key, name in names.items()}

    def to_dict(self) -> dict[str, Any]:
        """Field name -> the value in effect, copied."""
        return dataclasses.asdict(self)


_type_hints = functools.cache(typing.get_type_hints)


def _hint(group_class: type, key: str) -> Any:
    """The annotation of a field, as an object."""
    return _type_hints(group_class)[key]


def check_keys(group_type: type[ArgumentGroup], **values: Any) -> list[Problem]:
    """The Problems of single values by the types and limits of a group's keys."""
    group = group_type.__new__(group_type)
    judge = Judge(group)
    for item in dataclasses.fields(group_type):
        if item.name in values:
            setattr(group, item.name, values[item.name])
            group.check_field(item, judge)
    return judge.problems
