"""Problems and who collects them, YAML, casting, and groups of keys that check themselves.

Checks collect Problems instead of raising, so that all problems of a run are shown at once. A group
is a dataclass whose fields are made by arg(); the groups of a run are in args.py.
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
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from .args_keys import FOREIGN_VALUES
from .errors import Judge, Problem, refuse

# ---- YAML


_MOST_VALUES = 100_000  # that a YAML text may stand for: names of names grow without end


class ConfigLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice, and reads 1e-5 as a number and 2024-01-31 as text."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _count_values(node, {}) > _MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=f"it stands for more than {_MOST_VALUES:,} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        check_duplicates(node)
        return super().construct_mapping(node, deep)


def _count_values(node: yaml.Node, counts: dict[int, float]) -> float:
    """The values that a node stands for, each use of a name counted; infinite for one that holds
    itself."""
    if id(node) not in counts:
        counts[id(node)] = math.inf
        pairs = node.value if not isinstance(node, yaml.ScalarNode) else ()
        parts = (p for pair in pairs for p in (pair if isinstance(pair, tuple) else (pair,)))
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
    """yaml.MarkedYAMLError where a mapping has a key twice: YAML would take the last."""
    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in seen:
            raise yaml.MarkedYAMLError(
                problem=f"key {key.value!r} is written twice", problem_mark=key.start_mark
            )
        seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))


def loads_yaml(text: str) -> Any:
    """A YAML text's value. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, Loader=ConfigLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deep") from None


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
        refuse("config file", str(path), reason, "the path of a YAML file")
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
    except Exception as error:  # a tag such as !!bool fails in Python's words
        why = "it is nested too deep" if isinstance(error, RecursionError) else _first_line(error)
        reason = f"it is no valid configuration: {why}"
        refuse("config file", str(path), reason, "key: value, each key once")


def _node_value(loader: ConfigLoader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":null"):
        return node.value
    return loader.construct_object(node, deep=True)


def _first_line(error: Exception) -> str:
    problem = getattr(error, "problem", None)
    mark = getattr(error, "problem_mark", None)
    return f"{problem or error}{f' (line {mark.line + 1})' if mark else ''}"


# ---- by the field's type


def cast(value: Any, hint: Any) -> Any:
    """Convert `value` to the annotation `hint`: text is read as a number, a truth value, a list (by
    commas) or a dict (JSON or YAML). Raises ValueError with what was expected."""
    if isinstance(value, enum.Enum):
        value = value.value
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return cast(value, next(kind for kind in args if kind is not type(None)))
    if origin is Literal:
        # YAML reads a bare no as false, and eval_strategy: no is what everybody writes.
        text = "no" if value is False else str(value).strip().lower()
        choice = {name.lower(): name for name in args}.get(text)
        if choice is None:
            raise ValueError(f"expected one of {', '.join(args)}")
        return choice
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
            raise ValueError(f"expected a mapping, or a file that holds one ({error})") from None
    value = _parse(value) if isinstance(value, str) else value
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError('expected a mapping, as YAML or as JSON text such as {"key": 1}')
    return dict(value)


def _parse(text: str) -> Any:
    try:
        return loads_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"expected JSON or YAML text ({error})") from None


def _cast_bool(value: Any) -> bool:
    text = str(value).strip().lower()
    if text in ("true", "yes", "on", "1"):
        return True
    if text in ("false", "no", "off", "0"):
        return False
    raise ValueError("expected true or false")


def _cast_int(value: Any) -> int:
    try:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d+\s*", value):
            return int(value)
        number = _cast_float(value)
    except ValueError:
        raise ValueError("expected a whole number") from None
    if not number.is_integer():
        raise ValueError("expected a whole number")
    return int(number)


def _cast_float(value: Any) -> float:
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError("expected a finite number")


def _cast_str(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if "\0" in text or re.search("[\ud800-\udfff]", text):  # no file or log could hold it
            raise ValueError("expected text in UTF-8, without null characters")
        return text
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ValueError("expected text")


def show_count(count: int, word: str) -> str:
    """A number with its word: 1 step, 3 steps."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


# ---- groups of keys

_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "low": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "high": ("at most", operator.le),
    "below": ("less than", operator.lt),
}


def arg(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field with a help text and what is known of its key. One without a default may
    be given by its place.

    choices: a table of the values, which may grow until the arguments are read. words: texts that
        mean another value. check: raises ValueError for a value that does not work.
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
        return field(metadata=metadata, kw_only=False)
    return field(default=default, metadata=metadata)


def default_of(item: dataclasses.Field) -> Any:
    """A field's default, dataclasses.MISSING where it has none."""
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default


def example(item: dataclasses.Field) -> str:
    """What to write instead: the key with its default, or with its help text."""
    default = default_of(item)
    if default is None and "low" in item.metadata:
        default = item.metadata["low"]
    if isinstance(default, bool):
        default = str(default).lower()
    if isinstance(default, (str, int, float)):
        return f"{item.name}: {default}"
    return f"{item.name}: <{item.metadata['help']}>"


_Group = TypeVar("_Group", bound="ArgumentGroup")


@dataclass(kw_only=True)
class ArgumentGroup:
    """Base of the groups: the constructor casts every field by its type and raises ConfigError with
    all problems.

    `notes` holds one line for each value that was changed or has no effect, `changed` the keys
    that were given another value than their default.
    """

    def __post_init__(self) -> None:
        judge = Judge(self)
        self._cast(judge)
        self.resolve(judge)
        judge.close()

    @classmethod
    def read(cls: type[_Group], values: dict[str, Any], judge: Judge, use_mca=True) -> _Group:
        """The group made of key -> value; its rules are not asked yet. Other groups' keys are
        passed over, and without use_mca megatron-core's are too.

        It does without the constructor, since the rules between groups must see a group that has
        problems too.
        """
        group = cls.__new__(cls)
        left_out = []
        for item in dataclasses.fields(cls):
            value = values.get(item.name)
            if value is None and default_of(item) is MISSING:
                judge.refuse(item.name, "it is required and was not given", example(item), None)
                value = ""
            if value is not None and not (use_mca or item.metadata.get("torch", True)):
                with contextlib.suppress(ValueError):  # not of its type: it stays, to be shown
                    if cast(value, _hint(cls, item.name)) != default_of(item):
                        left_out.append(item.name)
                    value = None
            setattr(group, item.name, value)
        group._cast(judge)
        if left_out:
            names = ", ".join(left_out)
            group.notes.append(f"use_mca is false: plain torch DDP does without {names}")
        return group

    def _cast(self, judge: Judge) -> None:
        self.notes: list[str] = []
        self.changed: list[str] = []
        for item in dataclasses.fields(self):
            self._check_field(item, judge)
            if getattr(self, item.name) != default_of(item):
                self.changed.append(item.name)

    def _check_field(self, item: dataclasses.Field, judge: Judge) -> None:
        """Cast a field in place and check it; what does not work becomes the default."""
        key = item.name
        value = getattr(self, item.name)
        default = default_of(item)
        if value is None and default is not MISSING:
            value = default
        value = item.metadata.get("words", {}).get(str(value).lower(), value)
        try:
            value = cast(value, _hint(type(self), key))
            if "choices" in item.metadata:
                value = cast(value, Literal[tuple(item.metadata["choices"])])
            if "check" in item.metadata and value is not None:
                item.metadata["check"](value)
        except ValueError as error:
            reason = str(error)
            remedy = example(item)
            if theirs := FOREIGN_VALUES.get(key, {}).get(str(value).lower()):
                reason = f"{theirs[0]}: {error}"
                remedy = theirs[1]
            judge.refuse(key, reason, remedy, value)
        else:
            limits = [(*_LIMITS[x], limit) for x, limit in item.metadata.items() if x in _LIMITS]
            if value is not None and not all(keeps(value, limit) for _, keeps, limit in limits):
                wanted = " and ".join(f"{words} {limit}" for words, _, limit in limits)
                judge.refuse(key, f"it must be {wanted}", example(item), value)
        if key in judge.bad:
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
            group._check_field(item, judge)
    return judge.problems
