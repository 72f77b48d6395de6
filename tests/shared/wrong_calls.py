"""Wrong calls from Python, and those of the cases that need more than a command's words: each gets
the folder of its case, and lets what it meets out.
"""

import os
import sys
import threading
from pathlib import Path

from tests.shared.commands import ROOT

# name: (what the words name, exit codes)
CALLS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}


def _call(*named: str, codes: tuple[int, ...] = (2,)):
    def register(function):
        CALLS[function.__name__] = (named, codes)
        return function

    return register


def _model(folder: Path) -> Path:
    """A trained model, as a folder of transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "model")
    for name in ("num_hidden_layers", "num_key_value_heads"):
        setattr(config, name, 1)
    config.layer_types = ["full_attention"]
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    given = folder / "generation_config.json"
    if given.exists():
        given.rename(folder / "model" / given.name)
    return folder / "model"


def chat(folder: Path) -> None:
    from mca_lite.__main__ import main

    sys.stdin = open(folder / "stdin", encoding="utf-8")  # noqa: SIM115
    words = ["chat", str(_model(folder)), "--max-new-tokens", "4"]
    if (folder / "model" / "generation_config.json").read_text().count("max_new_tokens"):
        words = words[:2]
    raise SystemExit(main(words))


def no_thread(folder: Path) -> None:
    raise RuntimeError("can't start new thread")


def no_memory(folder: Path) -> None:
    import torch

    torch.empty(1 << 60)


def full_stdout(folder: Path) -> None:
    from mca_lite.__main__ import main
    from tests.shared.wrong_cases import BASE

    sys.stdout = open("/dev/full", "w")  # noqa: SIM115
    raise SystemExit(main([word.replace("{}", str(folder)) for word in BASE]))


@_call("output_dir")
def arguments_without_output_dir(folder: Path) -> None:
    from mca_lite import TrainingArguments

    TrainingArguments()


@_call("learning_rate")
def arguments_of_another_type(folder: Path) -> None:
    from mca_lite import TrainingArguments

    TrainingArguments(output_dir=str(folder / "out"), learning_rate=[1])


@_call("stage")
def load_datasets_of_no_stage(folder: Path) -> None:
    from transformers import AutoTokenizer

    from mca_lite import DataArguments, load_datasets

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs/tiny/model")
    load_datasets(DataArguments(dataset=[str(folder / "chat.jsonl")]), "nothing", tokenizer)


__all__ = ["CALLS", "os", "threading"]
