"""A run that goes on with other settings: what is taken, what is refused, and that it is said."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mca_lite import parts
from tests.shared import world
from tests.shared.commands import assert_names, run_train
from tests.shared.dpo_tools import our_run
from tests.shared.fixtures import saved_run_files
from tests.shared.layouts import SAVE
from tests.shared.small_runs import words_of
from tests.shared.training import attempt, read_log

NOTE = "note: other values than before, taken from here on: "
KEYS = dict(
    cutoff_len=40,
    max_steps=4,
    logging_steps=1,
    global_batch_size=4,
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    save_strategy="steps",
    save_steps=2,
    save_hf_model=False,
    disable_tqdm=True,
    use_mca=False,
)
# name -> (stage, what the run that goes on has, what it is told, the learning rates of its steps)
TAKEN = {
    "learning_rate": (
        "sft",
        dict(learning_rate=1e-3),
        "learning_rate 0.01 -> 0.001",
        [5e-4, 2.5e-4],
    ),
    "schedule": (
        "sft",
        dict(lr_scheduler_type="constant"),
        "lr_scheduler_type linear -> constant",
        [1e-2, 1e-2],
    ),
    "more steps": ("sft", dict(max_steps=5), "max_steps 4 -> 5", [6e-3, 4e-3, 2e-3]),
    "no steps": ("sft", dict(max_steps=2), "max_steps 4 -> 2", []),
    "less than no steps": ("sft", dict(max_steps=1), "max_steps 4 -> 1", []),
    "epochs": (
        "sft",
        dict(max_steps=-1, num_train_epochs=1),
        "max_steps 4 -> -1, num_train_epochs 3.0 -> 1.0",
        [1e-2 / 3],
    ),
    "micro-batch": (
        "sft",
        dict(per_device_train_batch_size=4),
        "per_device_eval_batch_size 2 -> 4, per_device_train_batch_size 2 -> 4",
        [5e-3, 2.5e-3],
    ),
    "per token": (
        "sft",
        dict(calculate_per_token_loss=False),
        "calculate_per_token_loss true -> false",
        [5e-3, 2.5e-3],
    ),
    "pref_beta": ("dpo", dict(pref_beta=0.7), "pref_beta 0.1 -> 0.7", [5e-3, 2.5e-3]),
    "pref_loss": (
        "dpo",
        dict(pref_loss="orpo"),
        "pref_loss ['sigmoid'] -> ['orpo']",
        [5e-3, 2.5e-3],
    ),
}
REFUSED = {
    "batch": ("sft", dict(global_batch_size=8), "global_batch_size 4, and this run has 8"),
    "seed": ("sft", dict(seed=1), "data_seed 42, and this run has 1"),
    "order": ("sft", dict(disable_shuffling=True), "shuffle true, and this run has false"),
    "optimizer": ("sft", dict(optim="sgd"), "optim adam, and this run has sgd"),
    "moments": ("sft", dict(exp_avg_dtype="bf16"), "exp_avg_dtype fp32, and this run has bf16"),
    "data": ("sft", dict(cutoff_len=12), "saved with dataset "),
}


def told_by_runs(folder: str) -> dict:
    """{name: (exit code, what was said, learning rates of the steps)} of all rows, and of a run
    with another folder.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    base = {"model_name_or_path": f"{folder}/model", "cache_dir": f"{folder}/cache", **KEYS}
    data = {"sft": f"{folder}/chat.jsonl", "dpo": f"{folder}/pairs.jsonl"}
    for stage, file in data.items():
        keys = {"stage": stage, "dataset": file, "output_dir": f"{folder}/{stage}"}
        code, _, error = run_train(words_of({**base, **keys}))
        assert code == 0, error
        shutil.rmtree(f"{folder}/{stage}/checkpoint-4")
    told = {}
    elsewhere = dict(learning_rate=1e-3, resume_from_checkpoint=f"{folder}/sft/checkpoint-2")
    rows = [(name, *row[:2]) for name, row in {**TAKEN, **REFUSED}.items()]
    for name, stage, changes in [*rows, ("elsewhere", "sft", elsewhere)]:
        out = f"{folder}/{name.replace(' ', '-')}"
        if name != "elsewhere":
            shutil.copytree(f"{folder}/{stage}", out, symlinks=True)
        keys = {"stage": stage, "dataset": data[stage], "output_dir": out}
        keys |= {"resume_from_checkpoint": "auto", **changes}
        code, said, error = run_train(words_of({**base, **keys}))
        rates = []
        if not code and Path(f"{out}/trainer_log.jsonl").is_file():
            rates = [line["learning_rate"] for line in read_log(out) if line["step"] > 2]
        told[name] = (code, said + error, rates)
    keys = {"dataset": data["sft"], "output_dir": f"{folder}/dpo"}
    parts.__file__ = f"{folder}/parts.py"  # of a package without any part
    parts.missing.cache_clear()
    code, said, error = run_train(words_of({**base, **keys, "resume_from_checkpoint": "auto"}))
    return {**told, "without parts": (code, said + error, [])}


run_files = saved_run_files("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def told(run_files) -> dict:
    return world.run(told_by_runs, 1, str(run_files), timeout_s=240)[0]


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_is_said_and_has_its_effect_from_there_on(told, name):
    _, _, line, wanted = TAKEN[name]
    code, said, rates = told[name]
    assert code == 0 and f"{NOTE}{line}\n" in said
    assert rates == pytest.approx(wanted)
    over = "nothing was left to train after step"
    assert (over in said) == (not wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_to_set_back(told, name):
    code, said, _ = told[name]
    assert code == 2 and REFUSED[name][2] in said and "set it back to go on" in said
    assert NOTE not in said


def test_a_checkpoint_that_needs_a_missing_part_is_refused_by_its_name(told):
    code, said, _ = told["without parts"]
    assert code == 2 and "checkpoint-2 was saved with stage dpo: it needs part dpo, and " in said
    assert "'s files from mca_lite" in said and NOTE not in said


def test_a_checkpoint_of_another_folder_tells_its_settings(told):
    code, said, rates = told["elsewhere"]
    assert code == 0 and f"{NOTE}learning_rate 0.01 -> 0.001\n" in said
    assert rates == pytest.approx([5e-4, 2.5e-4])


def test_the_best_evaluation_is_forgotten_when_another_way_tells_it(run_files, tmp_path):
    out, path = str(tmp_path / "run"), str(run_files / "model")
    keys = dict(SAVE, save_steps=1, backend="torch", eval_strategy="steps", eval_steps=1)
    world.run(attempt, 1, path, out, steps=2, metric_for_best_model="eval_loss", **keys)
    ended = json.loads(Path(out, "trainer_state.json").read_text())
    best, checkpoint = ended["best_global_step"], ended["best_model_checkpoint"]
    kept = json.loads(Path(checkpoint, "trainer_state.json").read_text())
    assert kept["best_model_checkpoint"] == checkpoint == f"{out}/checkpoint-{best}"
    keys |= dict(steps=3, resume_from_checkpoint="auto")
    shutil.copytree(out, f"{out}-same")
    world.run(attempt, 1, path, f"{out}-same", greater_is_better=False, **keys)
    same = json.loads(Path(f"{out}-same", "trainer_state.json").read_text())
    assert same["best_metric"] <= ended["best_metric"]
    [(error, said, _)] = world.run(attempt, 1, path, out, greater_is_better=True, **keys)
    assert not error and f"{NOTE}greater_is_better None -> true" in said, said
    state = json.loads(Path(out, "trainer_state.json").read_text())
    last = [line["eval_loss"] for line in state["log_history"] if "eval_loss" in line][-1]
    assert (state["best_metric"], state["best_global_step"]) == (last, 3)


def test_the_best_checkpoint_moves_with_the_runs_folder(run_files, tmp_path):
    out, moved, path = tmp_path / "run", tmp_path / "moved", str(run_files / "model")
    keys = dict(SAVE, save_steps=1, backend="torch", eval_strategy="steps", eval_steps=1)
    keys |= dict(metric_for_best_model="eval_loss", save_total_limit=1)  # it rises on other data
    world.run(attempt, 1, path, str(out), steps=2, **keys)
    out.rename(moved)
    world.run(attempt, 1, path, str(moved), steps=3, resume_from_checkpoint="auto", **keys)
    state = json.loads((moved / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == f"{moved}/checkpoint-1"
    kept = sorted(folder.name for folder in moved.glob("checkpoint-*"))
    assert kept == ["checkpoint-1", "checkpoint-3"]


def test_a_run_of_python_says_what_has_changed(run_files, tmp_path):
    out, path = str(tmp_path / "run"), str(run_files / "model")
    keys = dict(SAVE, backend="torch", steps=2)
    world.run(attempt, 1, path, out, **keys)
    keys |= dict(steps=3, resume_from_checkpoint="auto")
    [(error, said, _)] = world.run(attempt, 1, path, out, weight_decay=0.2, **keys)
    assert not error and f"{NOTE}max_steps 2 -> 3, weight_decay 0.1 -> 0.2\n" in said
    [(error, said, _)] = world.run(attempt, 1, path, out, optim="sgd", **keys)
    assert "saved with optim adam, and this run has sgd" in error and NOTE not in said


def test_megatrons_precision_cannot_change_where_masters_are_missing(run_files, tmp_path):
    out, path = str(tmp_path / "run"), str(run_files / "model")
    world.run(attempt, 1, path, out, steps=2, **SAVE)
    keys = dict(SAVE, steps=3, resume_from_checkpoint="auto", bf16=True)
    [(error, _, _)] = world.run(attempt, 1, path, out, **keys)
    assert_names(error, "bf16 false", "true", "set it back")


def settings_of_pairs(path: str, out: str) -> dict:
    settings = []
    objective = dict(beta=0.3, pref_loss="sigmoid", ftx=0.5, label_smoothing=0.2)
    our_run(
        path,
        out,
        objective,
        backend="torch",
        max_steps=1,
        save_strategy="no",
        before=lambda trainer: settings.append(trainer.settings),
    )
    return settings[0]


def test_the_settings_of_pairs_are_kept_by_their_keys(run_files, tmp_path):
    [settings] = world.run(settings_of_pairs, 1, str(run_files / "model"), str(tmp_path))
    wanted = dict(pref_beta=0.3, pref_loss=["sigmoid"], pref_ftx=0.5, dpo_label_smoothing=0.2)
    assert {**settings, **wanted, "ref_model": "cached"} == settings


def test_a_setting_that_was_left_out_has_its_default():
    from mca_lite.ckpt import changes

    now = {"bf16": False, "learning_rate": 0.01, "report_to": ["wandb"]}
    assert changes({**now, "output_dir": "a", "bf16": "false"}, now) == {}
    later = {**now, "streaming": False, "max_samples": 3}
    assert changes(now, later) == {"max_samples": ("None", "3")}
