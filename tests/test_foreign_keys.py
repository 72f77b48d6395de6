"""Every argument of mcore_adapter, LLaMA-Factory and transformers is known: in effect, under
another name, without meaning here, or refused with the reason; and takes the default
that it has there.
"""

import dataclasses

import pytest
import transformers

from mca_lite.args_keys import ALIASES, IGNORED_KEYS, UNSUPPORTED, lookup, unsupported
from mca_lite.args_run import FIELDS, GROUPS, own_keys
from mca_lite.args_values import check_keys, default_of
from tests.shared.foreign_keys import LLAMA_FACTORY, MCORE_ADAPTER


def listed(text: str) -> dict:
    words = [word.partition("=") for word in text.split()]
    return {name: default if equals else None for name, equals, default in words}


def of_transformers() -> dict:
    fields = dataclasses.fields(transformers.Seq2SeqTrainingArguments)
    return {item.name: default_of(item) for item in fields}


FOREIGN = [
    *listed(MCORE_ADAPTER).items(),
    *listed(LLAMA_FACTORY).items(),
    *of_transformers().items(),
]


def fate_of(name: str) -> str:
    if ALIASES.get(name, name) in FIELDS:
        return "in effect"
    if lookup(IGNORED_KEYS, name):
        return "without meaning"
    return "refused" if lookup(UNSUPPORTED, name) else "unknown"


def test_the_lists_are_whole():
    sizes = (len(listed(MCORE_ADAPTER)), len(listed(LLAMA_FACTORY)), len(of_transformers()))
    assert sizes[:2] == (57, 223) and sizes[2] >= 100


def test_every_argument_of_the_origins_has_a_fate():
    assert [name for name, _ in FOREIGN if fate_of(name) == "unknown"] == []


@pytest.mark.parametrize("off", ["default", None])
def test_the_defaults_of_the_origins_are_taken(off):
    problems = []
    for name, default in FOREIGN:
        value = default if off == "default" else off
        own, _ = own_keys({name: value}, problems)
        for group in GROUPS if value is not None else ():
            problems += check_keys(group, **own)
    assert [f"{problem.key}: {problem.value}" for problem in problems] == []


def test_what_is_refused_says_why_and_what_to_write():
    for name in {name for name, _ in FOREIGN if fate_of(name) == "refused"}:
        reason, remedy = unsupported(name, "something")
        assert reason.startswith("not in this version: ") and remedy
        row = lookup(UNSUPPORTED, name)
        assert unsupported(name, row.default or False) is None


def test_no_key_stands_in_two_tables():
    keys = [*FIELDS, *ALIASES, *IGNORED_KEYS, *UNSUPPORTED]
    assert sorted(keys) == sorted(set(keys))
    covered = [key for key in UNSUPPORTED if lookup(IGNORED_KEYS, key)]
    assert covered == [], "a pattern of the keys without meaning hides them"
    assert set(ALIASES.values()) <= set(FIELDS)
