"""Every argument of mcore_adapter, LLaMA-Factory and transformers is known: in effect, under
another name, without meaning here, or refused with the reason; and takes the default
that it has there. Those of TRL's scripts too, but for a few whose defaults mean something else.
"""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import transformers

from mca_lite.args import (
    FinetuningArguments,
    TrainingArguments,
    key_fields,
    key_groups,
    known_keys,
    parse_args,
    read_words,
)
from mca_lite.args_values import check_keys
from mca_lite.part_lora_keys import LoraArguments
from mca_lite.tables import ALIASES, FOREIGN_KEYS, foreign_key
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
# TRL's, refused with their defaults too: a command line with one of them means it
MEANT = {
    "max_length": "LLaMA-Factory's is the length of an answer",
    "train_sampling_strategy": "KTO's default is the order of the file",
    "beta": "another key in each stage",
    "lmbda": "GKD's default makes the student generate half of the answers",
    "loss_type": "the names of the losses of supervised training and KTO",
}


def fate_of(name: str) -> str:
    if ALIASES.get(name, name) in key_fields():
        return "in effect"
    row = foreign_key(name)
    if row is None:
        return "unknown"
    return "refused" if row.remedy else "without meaning"


def test_the_lists_are_whole():
    lists = (MCORE_ADAPTER, LLAMA_FACTORY, TRANSFORMERS, TRL)
    least = (57, 225, 119, 85)
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
    names = {item.name for item in installed} | {name for name, _ in FOREIGN} | {*listed(TRL)}
    assert [name for name in names if fate_of(name) == "unknown"] == []


@pytest.mark.parametrize("off", ["default", None])
def test_the_defaults_of_the_origins_are_taken(off):
    problems = []
    of_trl = [(name, None if name in MEANT else value) for name, value in listed(TRL).items()]
    for name, default in FOREIGN + of_trl:
        value = default if off == "default" and name != "max_length" else None
        own, _ = known_keys({name: value}, problems)
        for group in key_groups() if value is not None else ():
            problems += check_keys(group, **own)
    assert [f"{problem.key}: {problem.value}" for problem in problems] == []


def test_what_is_refused_says_why_and_what_to_write():
    names = {name for name, _ in FOREIGN} | {*listed(TRL)}
    for name in {name for name in names if fate_of(name) == "refused"}:
        problems: list = []
        for value in (*foreign_key(name).off, None):
            assert known_keys({name: value}, problems) == ({}, [])
        assert problems == []
        known_keys({name: "something"}, problems)
        [problem] = problems
        assert problem.reason.startswith("not in this version: ") and problem.suggestion


def test_no_key_stands_in_two_tables():
    keys = [*key_fields(), *ALIASES, *FOREIGN_KEYS]
    assert sorted(keys) == sorted(set(keys))
    covered = [key for key, row in FOREIGN_KEYS.items() if foreign_key(key) is not row]
    assert covered == [], "a pattern above hides them"
    assert set(ALIASES.values()) <= set(key_fields())


PAGE = ROOT / "configs/MIGRATION.md"
SECTIONS = [  # of others whose keys are in tables of tool_migrate: test_migrate reads them
    section
    for section in PAGE.read_text().split("\n## ")
    if not section.startswith(("From axolotl", "From ms-swift"))
]
TEXT = "\n".join([*SECTIONS, (ROOT / "configs/MCORE_ADAPTER.md").read_text()])
ROWS = [line.split("|")[1:3] for line in TEXT.splitlines() if line.startswith("| ")]


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
    rows = [there for there, _ in ROWS if "run_clm" not in there]
    theirs = [key for there in rows for key in backticked_keys(there)]
    assert len(theirs) > 60
    assert [key for key in theirs if fate_of(key) == "unknown"] == ["efficient_eos"]  # no argument
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
        ("beta", "0.1", "pref_beta with stage: dpo or kto; with stage: distill distill_jsd_mix"),
        ("beta", "0", "distill_loss: forward_kl"),
        ("lmbda", "0.5", "lmbda: 0, with stage: distill"),
        ("use_peft", "true", "finetuning_type: lora"),
        ("create_model_card", "true", "hf upload"),
        ("mixed_precision", "bf16", "bf16: true"),
        ("dtype", "bfloat16", "bf16: true"),
        ("dataset_config", "en", "with subset, split and columns"),
    ],
)
def test_what_would_be_lost_in_silence_is_refused_with_the_way_that_there_is(key, value, words):
    problems: list = []
    known_keys({key: value}, problems)
    assert [problem.key for problem in problems] == [key] and words in problems[0].suggestion


# the command lines in the docstrings of TRL's scripts, and one with GKD's keys -> what is refused
SCRIPTS = {
    "sft": (
        "--dataset_name trl-lib/Capybara --learning_rate 2.0e-4 --num_train_epochs 1 --packing "
        "--eos_token <|im_end|> --eval_strategy steps --eval_steps 100 --use_peft --lora_r 32 "
        "--lora_alpha 16 --push_to_hub",
        {"push_to_hub", "use_peft"},
    ),
    "dpo": (
        "--dataset_name trl-lib/ultrafeedback_binarized --dataset_streaming --max_steps 1000 "
        "--learning_rate 5.0e-7 --no_remove_unused_columns --beta 0.1 --max_length 1024",
        {"beta", "max_length"},
    ),
    "kto": (
        "--dataset_name trl-lib/kto-mix-14k --learning_rate 5e-7 --lr_scheduler_type=cosine "
        "--eval_steps 500 --warmup_steps 0.1 --logging_first_step --use_peft --load_in_4bit "
        "--lora_target_modules=all-linear --lora_r=16 --lora_alpha=16",
        {"use_peft"},
    ),
    "reward": (
        "--dataset_name trl-lib/ultrafeedback_binarized --eval_strategy steps --max_length 2048 "
        "--use_peft --lora_task_type SEQ_CLS --lora_r 32 --lora_alpha 16",
        {"max_length", "use_peft", "lora_task_type"},
    ),
    "gkd": (
        "--dataset_name trl-lib/chatbot_arena_completions --teacher_model_name_or_path teacher "
        "--beta 0.5 --lmbda 0.5 --temperature 0.9 --no_gradient_checkpointing --seq_kd",
        {"beta", "lmbda", "seq_kd"},
    ),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_key_of_a_script_of_trl_is_known(script):
    line, refused = SCRIPTS[script]
    words, problems = read_words(line.split())
    keys, notes = known_keys(words, problems)
    assert {problem.key for problem in problems} == refused
    assert not any(problem.reason == "no such key" for problem in problems)
    assert keys["dataset"].startswith("trl-lib/")
    assert script != "dpo" or "remove_unused_columns" in notes[0]
    assert script != "gkd" or keys["recompute_granularity"] == "false"


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("stage", "reward", "stage: sft | dpo | kto | rm | distill | policy"),
        ("finetuning_type", "oft", "finetuning_type: lora"),
    ],
)
def test_a_method_that_is_not_here_is_answered_by_those_that_are(key, value, words):
    [problem] = keys_of(FinetuningArguments, **{key: value}).values()
    assert words in problem.suggestion


def test_a_target_of_all_linear_layers_is_called_as_in_peft():
    assert LoraArguments(lora_target="all-linear").lora_target == ["all"]


def test_a_token_of_a_hub_is_sent_to_the_environment():
    _, [said] = known_keys({"hf_hub_token": "secret"}, [])
    assert "HF_TOKEN" in said and "secret" not in said


def test_a_file_that_merges_is_answered_by_the_command_that_does_alone():
    words = "model_name_or_path=m adapter_name_or_path=a template=qwen3 export_dir=d export_size=5"
    assert set(keys_of(parse_args, words.split())) == {"export_dir"}


@pytest.mark.parametrize("value, taken", [("true", "hybrid"), ("false", None), ("e4m3", "e4m3")])
def test_fp8_is_taken_as_llama_factory_writes_it(value, taken):
    assert TrainingArguments(output_dir="x", bf16=True, fp8=value).fp8 == taken


@pytest.mark.parametrize(
    "key, value",
    [
        ("gradient_checkpointing", "offload"),
        ("gradient_checkpointing_kwargs", {"use_reentrant": False, "offload": True}),
        ("gradient_checkpointing_kwargs", '{"offload": true}'),
        ("activation_checkpointing_kwargs", {"offload": True}),
    ],
)
def test_offload_of_activations_is_taken_in_each_spelling(key, value):
    problems: list = []
    keys, notes = known_keys({"gradient_checkpointing": True, key: value}, problems)
    offloads = {"recompute_granularity", "activation_offloading"}
    assert (set(keys), keys["activation_offloading"], notes, problems) == (offloads, True, [], [])
