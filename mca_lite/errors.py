"""Errors for the user, and the rules of a configuration: Problem, Rule and the Judge."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn


class UserError(Exception):
    """An error for the user: the command line shows its text without a traceback.

    exit_code: the exit status of the process. same_on_all_ranks: the text is the same on every
    rank, so one rank prints it.
    """

    exit_code = 2
    same_on_all_ranks = False


class Problem(NamedTuple):
    """One problem: the key, its value, the reason, and a value that works."""

    key: str
    value: Any
    reason: str
    suggestion: str

    def __str__(self) -> str:
        shown = str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)
        value = "" if self.value is None else f": {shown}"
        return f"{self.key}{value}\n    {self.reason}\n    try: {self.suggestion}"


class ConfigError(UserError, ValueError):
    """All `problems` of a configuration, each with key, value, reason and a value that works."""

    def __init__(self, problems: list[Problem]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        title = f"{count} in the configuration:"
        super().__init__("\n\n".join([title, *map(str, self.problems)]))


class Rule(NamedTuple):
    """A combination of keys that does not work.

    when: conditions, separated by spaces; the combination is refused if all are true. `key` is true
    for a value that is set, `key=value` for that value or a list with it; `!` negates, `|` joins
    alternatives. The Problem is one of the first key.
    """

    when: str
    reason: str
    remedy: str


_CURRENT = object()


class Judge:
    """Collects the Problems of arguments: an object whose attributes are keys.

    problems: earlier ones. bad: the keys with a problem. Their values are the defaults, so no
    further rule is applied to them.
    """

    def __init__(self, arguments: Any, problems: Iterable[Problem] = ()):
        self.arguments = arguments
        self.problems = list(problems)
        self.bad = {problem.key for problem in self.problems}

    def refuse(
        self, keys: str, reason: str, suggestion: str, value: Any = _CURRENT, name: str = ""
    ) -> None:
        """Add a Problem of the first of `keys` (separated by spaces) unless one of them is bad.

        value: shown in place of the key's current value. name: shown in place of the key.
        """
        first, *_ = keys.split()
        if not self.bad.isdisjoint(keys.split()):
            return
        if value is _CURRENT:
            value = getattr(self.arguments, first)
        self.problems.append(Problem(name or first, value, reason, suggestion))
        if not name:
            self.bad.add(first)

    def expect(self, holds: object, *problem: Any) -> None:
        """Refuse a problem (the arguments of refuse) unless the condition `holds` is true."""
        if not holds:
            self.refuse(*problem)

    def holds(self, condition: str) -> bool:
        """True if a condition of a Rule is met. AttributeError for a key that does not exist."""
        return any([self._is_met(part) for part in condition.split("|")])

    def _is_met(self, part: str) -> bool:
        key, equals, wanted = part.removeprefix("!").partition("=")
        value = getattr(self.arguments, key)
        values = value if isinstance(value, list) else [value]
        is_met = wanted in map(str, values) if equals else bool(value)
        return is_met != part.startswith("!")

    def apply(self, rules: Iterable[Rule]) -> None:
        """Refuse the combinations of `rules` in the arguments."""
        for rule in rules:
            # a list, so that each key is read: one that is misspelt fails at once
            if all([self.holds(condition) for condition in rule.when.split()]):
                keys = re.sub(r"=[^\s|]*|[!|]", " ", rule.when)
                self.refuse(keys, rule.reason, rule.remedy)

    def close(self) -> None:
        """Raise ConfigError if there are Problems."""
        if self.problems:
            raise ConfigError(self.problems)


def refuse(key: str, value: Any, reason: str, suggestion: str) -> NoReturn:
    """Raise ConfigError with one Problem."""
    raise ConfigError([Problem(key, value, reason, suggestion)])


def expect(holds: Any, otherwise: str) -> None:
    """ValueError with this text for a condition that does not hold."""
    if not holds:
        raise ValueError(otherwise)
