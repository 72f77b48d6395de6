"""Wrong calls from Python, and those of the cases that need more than a command's words: each gets
the folder of its case, and lets what it meets out.
"""

import sys
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


# -- arguments


@_call("output_dir")
def arguments_without_output_dir(folder: Path) -> None:
    from mca_lite import TrainingArguments

    TrainingArguments()


@_call("learning_rate")
def arguments_of_another_type(folder: Path) -> None:
    from mca_lite import TrainingArguments

    TrainingArguments(output_dir=str(folder / "out"), learning_rate=[1])


@_call("nothing")
def load_datasets_of_no_stage(folder: Path) -> None:
    from transformers import AutoTokenizer

    from mca_lite import DataArguments, load_datasets

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs/tiny/model")
    load_datasets(DataArguments(dataset=[str(folder / "chat.jsonl")]), "nothing", tokenizer)


@_call("loss")
def register_a_loss_that_is_none(folder: Path) -> None:
    from mca_lite import register_loss

    register_loss("five", 5)


@_call("hidden_size")
def model_config_of_wrong_numbers(folder: Path) -> None:
    from mca_lite import AutoConfig

    text = (folder / "model" / "config.json").read_text()
    changed = text.replace('"hidden_size": 128', '"hidden_size": -128')
    (folder / "model" / "config.json").write_text(changed)
    AutoConfig.from_pretrained(str(folder / "model"))


# -- a trainer of the user's, which fails somewhere


def _train(folder: Path, samples: list | None = None, eval_samples=None, keys=None, **keywords):
    """Train McaTrainer for a step on plain torch, as a script does."""
    from mca_lite import McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model

    rows = {"input_ids": [1, 2, 3], "labels": [2, 3, 4]}
    given = dict(
        model=load_torch_model(str(folder / "model"), train_from_scratch=True),
        args=TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=1,
            save_strategy="no",
            html_report=False,
            **keys or {},
        ),
        train_dataset=samples or [rows] * 4,
        eval_dataset=eval_samples,
    )
    McaTrainer(**given | keywords).train()


@_call("args")
def trainer_without_args(folder: Path) -> None:
    _train(folder, args=None)


@_call("model")
def trainer_without_model(folder: Path) -> None:
    _train(folder, model=None)


@_call("vocab")
def ids_beyond_the_vocabulary(folder: Path) -> None:
    _train(folder, [{"input_ids": [1, 100_000], "labels": [2, 3]}] * 4)


@_call()
def negative_ids(folder: Path) -> None:
    _train(folder, [{"input_ids": [1, -5], "labels": [2, 3]}] * 4)


@_call("vocab", codes=(2, 86))
def labels_beyond_the_vocabulary(folder: Path) -> None:
    _train(folder, [{"input_ids": [1, 2], "labels": [2, 100_000]}] * 4)


@_call()
def an_empty_row(folder: Path) -> None:
    _train(folder, [{"input_ids": [], "labels": []}] * 4)


@_call()
def floats_as_ids(folder: Path) -> None:
    _train(folder, [{"input_ids": [1.5, 2.5], "labels": [2.0, 3.0]}] * 4)


def _measured(folder: Path, answer) -> None:
    _train(
        folder,
        eval_samples=[{"input_ids": [1, 2], "labels": [2, 3]}] * 2,
        keys=dict(eval_strategy="steps", eval_steps=1),
        compute_metrics=lambda prediction: answer,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )


@_call()
def metrics_that_are_none(folder: Path) -> None:
    _measured(folder, None)


@_call()
def metrics_that_are_a_list(folder: Path) -> None:
    _measured(folder, [1.0])


@_call()
def metrics_without_names(folder: Path) -> None:
    _measured(folder, {5: 1.0})


# -- what the user's own code raises, in a run of the command line


def _fails(*words):
    raise KeyError("mine")


def _run(folder: Path, *words: str, **keywords) -> None:
    """A run of a stage of the user's, whose trainer has other keywords."""
    from mca_lite import McaTrainer, register_objective
    from mca_lite.__main__ import main
    from tests.shared.wrong_cases import BASE

    class Mine(McaTrainer):
        def __init__(self, callbacks=(), **given):
            super().__init__(callbacks=[*callbacks, *keywords.pop("callbacks", ())],
                             **given | keywords)  # fmt: skip

        if keywords.get("_post_compute_loss"):
            _post_compute_loss = keywords.pop("_post_compute_loss")

    register_objective("mine", records="conversations", trainer=Mine)
    base = [word.replace("{}", str(folder)) for word in BASE]
    raise SystemExit(main([*base, "stage=mine", *words]))


_MINE = ("wrong_calls.py:", "KeyError: 'mine'", "in your ")


@_call(*_MINE, "on_step_end", codes=(1,))
def a_callback_fails(folder: Path) -> None:
    from mca_lite import TrainerCallback

    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return {}["mine"]

    _run(folder, callbacks=[Failing()])


@_call("wrong_calls.py:", "ValueError: mine", "in your on_log", codes=(2,))
def a_callback_raises_value_error(folder: Path) -> None:
    from mca_lite import TrainerCallback

    class Failing(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            raise ValueError("mine")

    _run(folder, "logging_steps=1", callbacks=[Failing()])


@_call(*_MINE, "_fails", codes=(1,))
def a_collator_fails(folder: Path) -> None:
    _run(folder, data_collator=_fails)


@_call(*_MINE, "_fails", codes=(1,))
def a_collator_fails_in_a_worker(folder: Path) -> None:
    _run(folder, "dataloader_num_workers=1", data_collator=_fails)


@_call(*_MINE, "_fails", codes=(2,))
def a_metric_fails(folder: Path) -> None:
    words = "val_size=2", "eval_strategy=steps", "eval_steps=1"
    keep = dict(preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1))
    _run(folder, *words, compute_metrics=_fails, **keep)


@_call(*_MINE, "_fails", codes=(1,))
def a_loss_fails(folder: Path) -> None:
    def _post_compute_loss(self, labels, losses):
        return _fails(labels, losses)

    _run(folder, _post_compute_loss=_post_compute_loss)
