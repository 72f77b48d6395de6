"""Single values: Problems and how they are shown, YAML, casting by type, limits.

A value that came from a file, a command line or Python becomes what its field's annotation says. Checks return Problems
instead of raising, so that all of a run's problems are shown at once.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import os
import re
import types
import typing
from typing import Any, Literal, NamedTuple

import yaml


class Problem(NamedTuple):
    """One thing that is wrong: the key, the value that came, why it does not work, and what would."""

    key: str
    value: Any
    reason: str
    suggestion: str

    def __str__(self) -> str:
        came = str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)
        return f"{self.key}{'' if self.value is None else f': {came}'}\n    {self.reason}\n    try: {self.suggestion}"


class ConfigError(ValueError):
    """All `problems` of a configuration; its text shows each with key, value, reason and a value that works."""

    def __init__(self, problems: list[Problem]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''} in the configuration:"
        super().__init__("\n\n".join([count, *map(str, self.problems)]))


# ---- YAML


class ConfigLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice, and reads 1e-5 as a number and 2024-01-31 as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        check_duplicates(node)
        return super().construct_mapping(node, deep)


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
    """Raises yaml.MarkedYAMLError where a mapping has the same key twice: YAML would take the last without a word."""
    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in seen:
            raise yaml.MarkedYAMLError(
                problem=f"key {key.value!r} is written twice", problem_mark=key.start_mark
            )
        seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))


def loads_yaml(text: str) -> Any:
    """A YAML text's value. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=ConfigLoader)


# ---- by the field's type


def cast(value: Any, hint: Any) -> Any:
    """`value` as the annotation `hint` wants it: text is read as a number, a truth value, a list (by commas) or a dict
    (JSON or YAML). Raises ValueError with what was expected."""
    if isinstance(value, enum.Enum):
        value = value.value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return (
            None
            if value is None
            else cast(value, next(kind for kind in args if kind is not type(None)))
        )
    if origin is Literal:
        # YAML reads a bare no as false, and eval_strategy: no is what everybody writes.
        text = "no" if value is False else str(value).strip().lower()
        if text not in args:
            raise ValueError(f"expected one of {', '.join(args)}")
        return text
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
        return os.fspath(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ValueError("expected text")


def _one_of(value: str, choices: dict[str, Any]) -> str:
    text = value.strip().lower()
    if text not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}")
    return text


@functools.cache
def type_hints(group_class: type) -> dict[str, Any]:
    """Field name -> annotation, as an object."""
    return typing.get_type_hints(group_class)


def default_of(item: dataclasses.Field) -> Any:
    """A field's default, dataclasses.MISSING where it has none."""
    return (
        item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
    )


def example(key: str, default: Any, help_text: str) -> str:
    """What to write instead: the key with its default, or what it is where the default is no value."""
    if isinstance(default, bool):
        default = str(default).lower()
    return (
        f"{key}: {default}" if isinstance(default, (str, int, float)) else f"{key}: <{help_text}>"
    )


def cast_fields(group: Any, bad: set[str]) -> list[Problem]:
    """Casts each field of a dataclass object in place; None, and a value that cannot be cast, become the default."""
    problems = []
    hints = type_hints(type(group))
    for item in dataclasses.fields(group):
        if item.name in bad:
            continue
        value, default = getattr(group, item.name), default_of(item)
        if value is None and default is not dataclasses.MISSING:
            value = default
        try:
            value = cast(value, hints[item.name])
            if "choices" in item.metadata:
                value = _one_of(value, item.metadata["choices"])
            setattr(group, item.name, value)
        except ValueError as error:
            hint = example(item.name, default, item.metadata.get("help", ""))
            problems.append(Problem(item.name, value, str(error), hint))
            setattr(group, item.name, default)
    return problems


def check_ranges(group: Any, bad: set[str]) -> list[Problem]:
    """Fields against the limits in their metadata (see argument_parser.arg); a value outside becomes the default."""
    words = {
        "low": ("at least", lambda value, limit: value >= limit),
        "above": ("more than", lambda value, limit: value > limit),
        "high": ("at most", lambda value, limit: value <= limit),
        "below": ("less than", lambda value, limit: value < limit),
    }
    problems = []
    for item in dataclasses.fields(group):
        value = getattr(group, item.name)
        limits = {name: item.metadata[name] for name in words if name in item.metadata}
        if (
            item.name in bad
            or value is None
            or all(words[name][1](value, limit) for name, limit in limits.items())
        ):
            continue
        wanted = " and ".join(f"{words[name][0]} {limit}" for name, limit in limits.items())
        default = default_of(item)
        suggestion = example(
            item.name, limits.get("low") if default is None else default, item.metadata["help"]
        )
        problems.append(Problem(item.name, value, f"it must be {wanted}", suggestion))
        setattr(group, item.name, default)
    return problems
