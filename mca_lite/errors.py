"""Errors for the user, and the rules of a configuration: Problem, Rule and the Judge."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn, Protocol


class Keys(Protocol):
    """A configuration: any object whose attributes are configuration keys, such as
    TrainingArguments."""

    def __getattribute__(self, key: str, /) -> Any: ...

    def __setattr__(self, key: str, value: Any, /) -> None: ...


class UserError(Exception):
    """An error whose text is meant for the user: the command line shows it without a traceback.

    exit_code: the exit status of the process. same_on_all_ranks: True if every rank has the same
    text, so that only the main rank prints it."""

    exit_code = 2
    same_on_all_ranks = False


class Problem(NamedTuple):
    """One problem of a configuration: the key, its value, the reason, and what to set instead."""

    key: str
    value: Any
    reason: str
    suggestion: str

    def __str__(self) -> str:
        shown = str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)
        value = "" if self.value is None else f": {shown}"
        return f"{self.key}{value}\n    {self.reason}\n    try: {self.suggestion}"


class ConfigError(UserError, ValueError):
    """Raised with the `problems` found in a configuration; its text lists them."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        title = f"{count} in the configuration:"
        super().__init__("\n\n".join([title, *map(str, self.problems)]))


class Rule(NamedTuple):
    """A combination of keys that does not work.

    when: conditions separated by spaces; if all are true, the combination is refused. The condition
    `key` is true if the key's value is not None, false, 0 or empty. `key=value` is true if the
    key's value as text is that value, or a list that contains it. `!` before either negates it; `|`
    between two means "or". reason, remedy: texts for the Problem, which names the first key.
    """

    when: str
    reason: str
    remedy: str


_CURRENT = object()


class Judge:
    """Collects the Problems (errors for the user) of a configuration, to raise them together.

    arguments: an object whose attributes are configuration keys. problems: Problems found earlier,
    with which the attribute `problems` begins. bad: keys that have a Problem already; refuse() adds
    no other Problem that involves one of them.
    """

    def __init__(self, arguments: Any, problems: Iterable[Problem] = ()) -> None:
        self.arguments = arguments
        self.problems = list(problems)
        self.bad = {problem.key for problem in self.problems}

    def refuse(
        self, keys: str, reason: str, suggestion: str, value: Any = _CURRENT, name: str = ""
    ) -> None:
        """Add a Problem (an error for the user) for the first of `keys`, which are separated by
        spaces. If one of `keys` is in `bad`, as it has a Problem already, nothing is added.

        value: shown in place of the key's current value. name: shown in place of the key, which is
        not added to `bad` then.
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
        """Call refuse(*problem) unless `holds` is true. problem: keys, reason, suggestion, ...."""
        if not holds:
            self.refuse(*problem)

    def holds(self, condition: str) -> bool:
        """True if a condition is met, such as "key" or "!key=value|other"; class Rule describes the
        form. Raises AttributeError for an unknown key."""
        return any([self._is_met(part) for part in condition.split("|")])

    def _is_met(self, part: str) -> bool:
        key, equals, wanted = part.removeprefix("!").partition("=")
        value = getattr(self.arguments, key)
        values = value if isinstance(value, list) else [value]
        is_met = wanted in map(str, values) if equals else bool(value)
        return is_met != part.startswith("!")

    def apply(self, rules: Iterable[Rule]) -> None:
        """Add a Problem for each rule whose conditions are all met (the combination of keys does
        not work), unless one of the rule's keys has a Problem already."""
        for rule in rules:
            # a list, so that each key is read: one that is misspelt fails at once
            if all([self.holds(condition) for condition in rule.when.split()]):
                keys = re.sub(r"=[^\s|]*|[!|]", " ", rule.when)
                self.refuse(keys, rule.reason, rule.remedy)

    def close(self) -> None:
        """Raise ConfigError with the collected Problems, if there are any."""
        if self.problems:
            raise ConfigError(self.problems)


def refuse(key: str, value: object, reason: str, suggestion: str) -> NoReturn:
    """Raise ConfigError with one Problem: the key, its value, the reason, and what to set
    instead."""
    raise ConfigError([Problem(key, value, reason, suggestion)])


def expect(holds: object, otherwise: str) -> None:
    """Raise ValueError with the text `otherwise` unless `holds` is true."""
    if not holds:
        raise ValueError(otherwise)
