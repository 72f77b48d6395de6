"""Evaluation alone, at the end, of several sets, and under a name of its own."""

import json
import os
from pathlib import Path

import pytest

from tests.shared import tiny, world
from tests.shared.commands import run_all
from tests.shared.small_runs import save_all

BASE = (
    "dataset={folder}/chat.jsonl eval_dataset={folder}/chat.jsonl,{folder}/other.jsonl "
    "cutoff_len=40 cache_dir={folder}/cache max_steps=2 global_batch_size=4 learning_rate=1e-2 "
    "per_device_train_batch_size=2 save_strategy=no logging_steps=1 disable_tqdm=true do_eval=true "
    "output_dir={folder}/{name}"
)
RUNS = {
    "trained": "model_name_or_path={folder}/model eval_on_each_dataset=true",
    "alone": "model_name_or_path={folder}/trained do_train=false eval_on_each_dataset=true",
    "without": "model_name_or_path={folder}/trained do_train=false dataset=null",
    "joined": "model_name_or_path={folder}/trained do_train=false",
    "best": "model_name_or_path={folder}/model eval_on_each_dataset=true eval_strategy=steps "
    "eval_steps=1 metric_for_best_model=other_loss",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    save_all(folder, "llama", num_hidden_layers=2)
    lines = (folder / "other.jsonl").read_text().splitlines(keepends=True)
    (folder / "other.jsonl").write_text("".join(lines[:5]))  # the sets weigh differently
    world.run(run_all, 1, BASE, RUNS, str(folder), timeout_s=240)
    return folder


def results(folder: Path, name: str) -> dict:
    return json.loads((folder / name / "eval_results.json").read_text())


def test_evaluation_alone_gives_what_the_end_of_training_gave_and_exports_nothing(folder):
    trained, alone = results(folder, "trained"), results(folder, "alone")
    assert sorted(trained) == ["eval_chat_loss", "eval_loss", "eval_other_loss"]
    assert alone == pytest.approx(trained, rel=1e-5)
    assert not list((folder / "alone").rglob("*.safetensors"))
    assert (folder / "trained" / "model.safetensors").is_file()


def test_the_loss_over_several_sets_is_that_of_their_tokens(folder):
    alone = results(folder, "alone")
    assert alone["eval_chat_loss"] != pytest.approx(alone["eval_other_loss"], rel=1e-3)
    assert results(folder, "joined") == {"eval_loss": pytest.approx(alone["eval_loss"], rel=1e-5)}


def test_evaluation_alone_needs_nothing_to_train_on(folder):
    assert results(folder, "without") == pytest.approx(results(folder, "joined"), rel=1e-6)


def test_the_loss_of_one_set_may_decide_which_step_is_best(folder):
    state = json.loads((folder / "best" / "trainer_state.json").read_text())
    losses = [line["eval_other_loss"] for line in state["log_history"] if "eval_loss" in line]
    assert len(losses) == 2 and state["best_metric"] == min(losses)
    assert not (folder / "best" / "eval_results.json").exists(), "the last step was evaluated"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("do_train=false", "do_train"),
        ("do_eval=true", "do_eval"),
        ("do_eval=true eval_dataset={folder}/chat.jsonl dataset=null", "dataset"),
        ("do_eval=true do_train=false dataset=null", "dataset"),
        ("do_predict=true", "do_predict"),
        (
            "do_eval=true do_train=false val_size=2 resume_from_checkpoint=auto",
            "resume_from_checkpoint",
        ),
        ("stage=pt predict_with_generate=true", "predict_with_generate"),
        ("train_on_prompt=true predict_with_generate=true", "predict_with_generate"),
        ("max_new_tokens=0", "max_new_tokens"),
        ("eval_on_each_dataset=true", "eval_on_each_dataset"),
        (
            "do_eval=true eval_on_each_dataset=true eval_dataset={folder}/chat.jsonl,chat.json",
            "eval_on_each_dataset",
        ),
        (
            "do_eval=true eval_on_each_dataset=true eval_dataset=folder/chat/,{folder}/chat.jsonl",
            "eval_on_each_dataset",
        ),
        ("eval_strategy=steps val_size=2 metric_for_best_model=bleu", "metric_for_best_model"),
        ("eval_strategy=steps val_size=2 metric_for_best_model=xloss", "metric_for_best_model"),
        (
            "eval_strategy=steps eval_on_each_dataset=true eval_dataset={folder}/chat.jsonl "
            "metric_for_best_model=other_loss",
            "metric_for_best_model",
        ),
    ],
)
def test_nothing_to_do_or_to_evaluate_on_is_refused(folder, words, key):
    from mca_lite.errors import ConfigError

    with pytest.raises(ConfigError) as refused:
        parse(folder, words)
    assert key in [problem.key for problem in refused.value.problems]


def test_folders_to_evaluate_on_one_by_one_may_end_in_a_slash(folder):
    words = "do_eval=true eval_on_each_dataset=true eval_dataset=one/,two/"
    assert parse(folder, words).data.eval_dataset == ["one/", "two/"]


@pytest.mark.parametrize("metric", ["eval_loss", "other_loss", "eval_other_loss", "mtp_loss"])
def test_the_best_model_is_told_by_any_metric_of_an_evaluation(folder, metric):
    words = "eval_strategy=steps eval_on_each_dataset=true eval_dataset={folder}/other.jsonl "
    parse(folder, f"{words} metric_for_best_model={metric}")


def parse(folder, words: str):
    from mca_lite.args import parse_args

    base = "model_name_or_path={folder}/model dataset={folder}/chat.jsonl output_dir=unused "
    return parse_args((base + words).format(folder=folder).split(), needs_world=False)


def evaluate_under_another_name(path, out) -> tuple[dict, int]:
    from mca_lite import McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model

    args = TrainingArguments(
        output_dir=out, max_steps=1, eval_strategy="steps", eval_steps=1, save_strategy="no",
        early_stopping_patience=3, disable_tqdm=True,
    )  # fmt: skip
    sets = {"one": tiny.samples(4, seed=2), "two": tiny.samples(5, seed=3)}
    trainer = McaTrainer(
        load_torch_model(path), args, train_dataset=tiny.samples(8), eval_dataset=sets
    )
    trainer.train()
    best = trainer.state.best_metric
    metrics = trainer.evaluate(sets["two"], metric_key_prefix="held_out")
    assert trainer.state.best_metric == best
    return metrics, trainer.state.log_history[-2]["eval_two_loss"]


def test_another_prefix_works_beside_eval_strategy(folder, tmp_path):
    [(metrics, in_training)] = world.run(
        evaluate_under_another_name, 1, str(folder / "model"), str(tmp_path)
    )
    assert metrics == {"held_out_loss": pytest.approx(in_training, rel=1e-6)}


def stopped_early_twice(path, out) -> list[tuple[int, str, list[str]]]:
    """(steps, name of the best checkpoint, checkpoints there) after each of two calls of train(),
    whose first evaluation is the best one."""
    from mca_lite import McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model

    class Worse(McaTrainer):
        def evaluate(self, eval_dataset=None, metric_key_prefix="eval"):
            metrics = {"eval_loss": float(self.state.global_step)}
            self.notify("on_evaluate", metrics=metrics)
            return metrics

    args = TrainingArguments(
        output_dir=out, max_steps=8, eval_strategy="steps", eval_steps=1, save_steps=8,
        load_best_model_at_end=True, early_stopping_patience=2, overwrite_output_dir=True,
        disable_tqdm=True,
    )  # fmt: skip
    data = tiny.samples(8)
    trainer = Worse(load_torch_model(path), args, train_dataset=data, eval_dataset=data)
    found = []
    for _ in range(2):
        trainer.train(resume_from_checkpoint=False)
        best = os.path.basename(trainer.state.best_model_checkpoint)
        there = [name for name in os.listdir(out) if name.startswith("checkpoint-")]
        found.append((trainer.state.global_step, best, there))
    return found


def test_a_second_run_of_a_trainer_saves_its_own_best_model(folder, tmp_path):
    path = str(folder / "model")
    [found] = world.run(stopped_early_twice, 1, path, str(tmp_path))
    assert found == [(3, "checkpoint-1", ["checkpoint-1"])] * 2
