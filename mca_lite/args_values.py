"""Problems and who collects them, YAML, and casting of single values by their type.

Checks collect Problems instead of raising, so that all problems of a run are shown at once.
"""

from __future__ import annotations

import enum
import functools
import math
import os
import re
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import yaml


class Problem(NamedTuple):
    """One thing that is wrong: the key, the value that came, why it does not work, what would."""

    key: str
    value: Any
    reason: str
    suggestion: str

    def __str__(self) -> str:
        came = str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)
        value = "" if self.value is None else f": {came}"
        return f"{self.key}{value}\n    {self.reason}\n    try: {self.suggestion}"


class ConfigError(ValueError):
    """All `problems` of a configuration; its text shows each with key, value, reason and a value
    that works."""

    def __init__(self, problems: list[Problem]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        title = f"{count} in the configuration:"
        super().__init__("\n\n".join([title, *map(str, self.problems)]))


_OWN_VALUE = object()


class Judge:
    """Collects the Problems of arguments: an object whose attributes are keys.

    bad: the keys that have a problem. Their values were put back to the default, so a rule that
    involves one of them says nothing more.
    """

    def __init__(self, arguments: Any, bad: Iterable[str] = ()):
        self.arguments, self.bad = arguments, set(bad)
        self.problems: list[Problem] = []

    def refuse(
        self, keys: str, reason: str, suggestion: str, value: Any = _OWN_VALUE, name: str = ""
    ) -> None:
        """Add a Problem of the first of `keys` (by spaces), unless one of them has a problem
        already.

        value: what came, where it is not the key's own value. name: what to show in place of the
        key.
        """
        first, *_ = keys.split()
        if not self.bad.isdisjoint(keys.split()):
            return
        if value is _OWN_VALUE:
            value = getattr(self.arguments, first)
        self.problems.append(Problem(name or first, value, reason, suggestion))
        if not name:
            self.bad.add(first)

    def close(self) -> None:
        """Raise ConfigError with all Problems, if there are any."""
        if self.problems:
            raise ConfigError(self.problems)


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
    """Raise yaml.MarkedYAMLError where a mapping has a key twice: YAML would silently take the
    last."""
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
    """Convert `value` to the annotation `hint`: text is read as a number, a truth value, a list (by
    commas) or a dict (JSON or YAML). Raises ValueError with what was expected."""
    if isinstance(value, enum.Enum):
        value = value.value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return cast(value, next(kind for kind in args if kind is not type(None)))
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
        text = os.fspath(value)
        if "\0" in text or re.search("[\ud800-\udfff]", text):  # no file or log could hold it
            raise ValueError("expected text in UTF-8, without null characters")
        return text
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ValueError("expected text")


@functools.cache
def type_hints(group_class: type) -> dict[str, Any]:
    """Field name -> annotation, as an object."""
    return typing.get_type_hints(group_class)


def parse_size(size: str | int) -> int:
    """Bytes of "5GB", "500MB", "2KB", "10GiB" or a number. Raises ValueError for anything else."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", size, re.IGNORECASE)
    if match is None:
        raise ValueError(
            f"max_shard_size: {size!r} is not a size, expected something like 5GB or 500MB"
        )
    number, prefix, binary = match.groups()
    unit = (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    return math.ceil(float(number) * unit)
