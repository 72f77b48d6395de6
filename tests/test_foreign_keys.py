"""Every argument of mcore_adapter, LLaMA-Factory and transformers is known: in effect, under
another name, without meaning here, or refused with the reason; and takes the default
that it has there. TRL's too, or they are unknown.
"""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import transformers

from mca_lite.args import TrainingArguments, key_fields, key_groups, known_keys, parse_args
from mca_lite.args_keys import ALIASES, IGNORED_KEYS, UNSUPPORTED, lookup, unsupported
from mca_lite.args_values import check_keys
from tests.shared.commands import keys_of
from tests.shared.foreign_keys import LLAMA_FACTORY, MCORE_ADAPTER, TRANSFORMERS, TRL, VERSIONS
from tests.tools import foreign_keys

ROOT = Path(__file__).parents[1]


def listed(text: str) -> dict:
    words = [word.partition("=") for word in text.split()]
    return {name: default if equals else None for name, equals, default in words}


FOREIGN = [
    *listed(MCORE_ADAPTER).items(),
    *listed(LLAMA_FACTORY).items(),
    *listed(TRANSFORMERS).items(),
]
# of TRL another thing with the same default: a sample's length, not an answer's
REFUSED_WITH_ITS_DEFAULT = "max_length"


def fate_of(name: str) -> str:
    if ALIASES.get(name, name) in key_fields():
        return "in effect"
    if lookup(IGNORED_KEYS, name):
        return "without meaning"
    return "refused" if lookup(UNSUPPORTED, name) else "unknown"


def test_the_lists_are_whole():
    lists = (MCORE_ADAPTER, LLAMA_FACTORY, TRANSFORMERS, TRL)
    least = (57, 225, 119, 70)
    assert [len(listed(text)) >= n for text, n in zip(lists, least, strict=True)] == [True] * 4
    assert f"transformers=={VERSIONS['transformers']};" in (ROOT / "constraints.txt").read_text()


MODULE = """
class Base:
    kept: int = 1
    changed: bool = field(default=True, metadata={"help": "x"})

@dataclass
class Arguments(Base, Elsewhere):
    not_counted: ClassVar[int] = 3
    made: str = field(init=False, default="x")
    changed: bool = field(default=False)
    computed: int = field(default=3 * 4)
    many: list = field(default_factory=list)
    words: str = "two words"
    plain = 5
"""


def test_the_lists_are_read_from_source_without_its_import():
    classes = {node.name: node for node in ast.parse(MODULE).body if hasattr(node, "bases")}
    words = foreign_keys.arguments_of(classes, ["Arguments"])
    assert words == ["kept=1", "changed", "computed", "many", "words"]


def test_every_argument_of_the_origins_has_a_fate():
    installed = dataclasses.fields(transformers.Seq2SeqTrainingArguments)
    names = {item.name for item in installed} | {name for name, _ in FOREIGN}
    assert [name for name in names if fate_of(name) == "unknown"] == []


@pytest.mark.parametrize("off", ["default", None])
def test_the_defaults_of_the_origins_are_taken(off):
    problems = []
    of_trl = [(k, value) for k, value in listed(TRL).items() if lookup(UNSUPPORTED, k)]
    for name, default in FOREIGN + of_trl:
        value = default if off == "default" and name != REFUSED_WITH_ITS_DEFAULT else None
        own, _ = known_keys({name: value}, problems)
        for group in key_groups() if value is not None else ():
            problems += check_keys(group, **own)
    assert [f"{problem.key}: {problem.value}" for problem in problems] == []


def test_what_is_refused_says_why_and_what_to_write():
    for name in {name for name, _ in FOREIGN if fate_of(name) == "refused"}:
        reason, remedy = unsupported(name, "something")
        assert reason.startswith("not in this version: ") and remedy
        row = lookup(UNSUPPORTED, name)
        assert unsupported(name, row.default or False) is None


def test_no_key_stands_in_two_tables():
    keys = [*key_fields(), *ALIASES, *IGNORED_KEYS, *UNSUPPORTED]
    assert sorted(keys) == sorted(set(keys))
    covered = [key for key in UNSUPPORTED if lookup(IGNORED_KEYS, key)]
    assert covered == [], "a pattern of the keys without meaning hides them"
    assert set(ALIASES.values()) <= set(key_fields())


PAGE = ROOT / "configs/MIGRATION.md"
ROWS = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| ")]


def backticked_keys(cell: str) -> list[str]:
    """The keys that a cell names, of those in backticks that could be some."""
    words = (word.partition(":")[0] for word in re.findall(r"`([^`]+)`", cell))
    return [word for word in words if re.fullmatch(r"[a-z0-9_]+", word)]


def test_the_page_says_of_which_versions_the_arguments_are():
    begin = " ".join(PAGE.read_text().partition("\n## ")[0].split())
    names = {"llamafactory": "LLaMA-Factory", "transformers": "transformers", "trl": "TRL"}
    assert [f for f, name in names.items() if f"{name} {VERSIONS[f]}" not in begin] == []


def test_the_page_for_those_who_move_in_names_keys_that_are_known():
    others = {"num_decay_steps", "decay_type"}
    others |= {"router_aux_loss_coef", "constant_with_warmup", "register_loss"}
    of_trl = [there.startswith(" `SFTTrainer`") for there, _ in ROWS].index(True)
    rows = [there for there, _ in ROWS[:of_trl] if "run_clm" not in there]
    theirs = [key for there in rows for key in backticked_keys(there)]
    assert len(theirs) > 30
    assert [key for key in theirs if fate_of(key) == "unknown"] == []
    ours = [key for _, here in ROWS for key in backticked_keys(here)]
    assert [key for key in ours if key not in key_fields() and key not in others] == []


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("export_dir", "merged", "python -m mca_lite convert BASE DST --merge ADAPTER"),
        ("max_length", "1024", "cutoff_len for samples"),  # TRL's default, and LLaMA-Factory's
        ("label_smoothing_factor", "0.1", "register_objective"),
        ("push_to_hub", "true", "hf upload"),
        ("use_cpu", "true", "CUDA_VISIBLE_DEVICES="),
        ("compute_accuracy", "true", "predict_with_generate: true"),
        ("enable_torch_profiler", "true", "profile_steps"),
    ],
)
def test_what_would_be_lost_in_silence_is_refused_with_the_way_that_there_is(key, value, words):
    problems: list = []
    known_keys({key: value}, problems)
    assert [problem.key for problem in problems] == [key] and words in problems[0].suggestion


def test_a_token_of_a_hub_is_sent_to_the_environment():
    _, [said] = known_keys({"hf_hub_token": "secret"}, [])
    assert "HF_TOKEN" in said and "secret" not in said


def test_a_file_that_merges_is_answered_by_the_command_that_does_alone():
    words = "model_name_or_path=m adapter_name_or_path=a template=qwen3 export_dir=d export_size=5"
    assert set(keys_of(parse_args, words.split())) == {"export_dir"}


@pytest.mark.parametrize("value, taken", [("true", "hybrid"), ("false", None), ("e4m3", "e4m3")])
def test_fp8_is_taken_as_llama_factory_writes_it(value, taken):
    assert TrainingArguments(output_dir="x", bf16=True, fp8=value).fp8 == taken
