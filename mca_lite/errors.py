"""Errors that a user can put right: problems of a configuration, and the Judge of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn


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


class UserError(Exception):
    """An error for the user: the command line shows its text without a traceback.

    exit_code: the exit status of the process. same_on_all_ranks: the text is the same on every
    rank, so one rank prints it.
    """

    exit_code = 2
    same_on_all_ranks = False


class ConfigError(UserError, ValueError):
    """All `problems` of a configuration, each with key, value, reason and a value that works."""

    def __init__(self, problems: list[Problem]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        title = f"{count} in the configuration:"
        super().__init__("\n\n".join([title, *map(str, self.problems)]))


_OWN_VALUE = object()


class Judge:
    """Collects the Problems of arguments: an object whose attributes are keys.

    problems: those that are known already. bad: the keys that have a problem. Their values were put
    back to the default, so a rule that involves one of them says nothing more.
    """

    def __init__(self, arguments: Any, problems: Iterable[Problem] = ()):
        self.arguments = arguments
        self.problems = list(problems)
        self.bad = {problem.key for problem in self.problems}

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


def refuse(key: str, value: Any, reason: str, suggestion: str) -> NoReturn:
    """Raise ConfigError with one Problem, where nothing more can be asked."""
    raise ConfigError([Problem(key, value, reason, suggestion)])
