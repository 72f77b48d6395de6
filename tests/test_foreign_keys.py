"""Every argument of mcore_adapter, LLaMA-Factory and transformers is known: in effect, under
another name, without meaning here, or refused with the reason; and takes the default
that it has there.
"""

import dataclasses
import re
from pathlib import Path

import pytest
import transformers

from mca_lite.args_keys import (
    ALIASES,
    FOREIGN_VALUES,
    HINTS,
    IGNORED_KEYS,
    SWITCHES,
    UNSUPPORTED,
    lookup,
    unsupported,
)
from mca_lite.args_run import FIELDS, GROUPS, own_keys
from mca_lite.args_values import check_keys, default_of
from mca_lite.loss_preference import LOSSES
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
    if ALIASES.get(name, name) in FIELDS or name in SWITCHES:
        return "in effect"
    if lookup(IGNORED_KEYS, name):
        return "without meaning"
    return "refused" if lookup(UNSUPPORTED, name) else "unknown"


def test_the_lists_are_whole():
    sizes = (len(listed(MCORE_ADAPTER)), len(listed(LLAMA_FACTORY)), len(of_transformers()))
    assert sizes[:2] == (57, 227) and sizes[2] >= 100


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
    keys = [*FIELDS, *ALIASES, *SWITCHES, *IGNORED_KEYS, *UNSUPPORTED]
    assert sorted(keys) == sorted(set(keys))
    covered = [key for key in UNSUPPORTED if lookup(IGNORED_KEYS, key)]
    assert covered == [], "a pattern of the keys without meaning hides them"
    assert set(ALIASES.values()) <= set(FIELDS)


PAGE = Path(__file__).parents[1] / "configs/MIGRATION.md"
ROWS = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| ")]


def keys_in(cell: str) -> list[str]:
    """The keys that a cell names, of those in backticks that could be some."""
    words = (word.partition(":")[0] for word in re.findall(r"`([^`]+)`", cell))
    return [word for word in words if re.fullmatch(r"[a-z0-9_]+", word)]


def test_the_page_for_those_who_move_in_names_keys_that_are_known():
    others = {"router_aux_loss_coef", "max_lr", "constant_with_warmup", "register_loss"}
    theirs = [key for there, _ in ROWS for key in keys_in(there)]
    assert len(theirs) > 30
    assert [k for k in theirs if fate_of(k) == "unknown" and k not in HINTS] == []
    ours = [key for _, here in ROWS for key in keys_in(here)]
    assert [key for key in ours if key not in FIELDS and key not in others] == []


def test_values_of_other_trainers_are_refused_with_the_reason():
    for key, values in FOREIGN_VALUES.items():
        (group,) = (group for group in GROUPS if key in group.__dataclass_fields__)
        for value, reason in values.items():
            if value in LOSSES:  # one that was added to this version
                continue
            (problem,) = check_keys(group, **{key: value})
            assert problem.reason.startswith(f"{reason}: expected one of "), problem


def test_what_a_hint_names_is_a_key():
    assert {hint.partition(":")[0] for hint in HINTS.values()} <= set(FIELDS)


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("block_size", "cutoff_len"),  # run_clm.py
        ("validation_split_percentage", "val_size: 0.05"),
        ("torch_dtype", "bf16: true"),
        ("rpo_alpha", "pref_ftx"),  # TRL: the weight of the chosen answer's own loss
        ("max_prompt_length", "cutoff_len"),
        ("dataset_num_proc", "preprocessing_num_workers"),
        ("save", "output_dir"),  # megatron
        ("log_interval", "logging_steps"),
    ],
)
def test_names_of_other_scripts_lead_to_the_key_that_means_the_same(name, wanted):
    problems: list = []
    own_keys({name: "1"}, problems)
    assert [(problem.key, problem.suggestion) for problem in problems] == [(name, wanted)]
