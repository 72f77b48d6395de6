"""Whole runs on a stream: stopped and resumed, in other layouts, packed; what a run refuses."""

import json
import shutil
from pathlib import Path

import pytest

from tests.shared import world
from tests.shared.commands import run_train
from tests.shared.fixtures import saved_run_files
from tests.shared.layouts import CP2, PP2, SAVE
from tests.shared.small_runs import curve, train_by_words, words_of
from tests.shared.training import assert_same_curve, read_log

STEPS = 6


run_files = saved_run_files("llama", num_hidden_layers=2)


def stream_keys(folder: Path, out: str, **changes) -> dict:
    keys = dict(
        model_name_or_path=f"{folder}/model",
        dataset=f"{folder}/chat.jsonl,{folder}/other.jsonl",
        output_dir=f"{folder}/{out}",
        cache_dir=f"{folder}/cache",
        streaming=True,
        buffer_size=10,
        max_samples=7,  # of each: the run goes through all records more than once
        mix_strategy="interleave_over",
        cutoff_len=40,
        max_steps=STEPS,
        logging_steps=1,
        global_batch_size=4,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",  # of a longer run it is the same
        save_hf_model=False,
        disable_tqdm=True,
        adam_epsilon=1e-5,  # 1e-8 amplifies the rounding of near-zero gradients
    )
    return {**keys, **SAVE, **changes}


def losses(folder: Path, out: str) -> list[tuple]:
    return [(line["loss"], line["grad_norm"]) for line in read_log(f"{folder}/{out}")]


PACKED = dict(packing=True, cutoff_len=60)
JOINED = dict(stage="pt", cutoff_len=30)


@pytest.mark.parametrize("name, keys", [("rows", {}), ("packed", PACKED), ("joined", JOINED)])
def test_a_run_that_stops_goes_on_bit_for_bit(run_files, name, keys):
    """As if it had died at step 4, after the checkpoint of step 3; and past its max_steps, with a
    process that reads ahead, and once more from what this one saved.
    """
    keys = {**keys, "use_mca": name != "rows"}
    world.run(
        train_by_words,
        1,
        stream_keys(run_files, f"{name}-whole", **{**keys, "save_strategy": "no"}),
    )
    keys = stream_keys(run_files, name, **keys)
    world.run(train_by_words, 1, {**keys, "max_steps": 4, "save_steps": 3})
    shutil.rmtree(run_files / name / "checkpoint-4")
    keys |= dict(resume_from_checkpoint="auto", dataloader_num_workers=3)
    world.run(train_by_words, 1, {**keys, "max_steps": 5})
    world.run(train_by_words, 1, keys)
    whole, parts = (
        [curve([line]) for line in read_log(f"{run_files}/{out}")]
        for out in (f"{name}-whole", name)
    )
    assert parts == whole and len(whole) == STEPS
    state = json.loads((run_files / name / f"checkpoint-{STEPS}/trainer_state.json").read_text())
    assert state["data_position"]["passes"] > 0  # all records were read before


LAYOUTS = {"dp2": (2, {}), "pp2": (2, PP2), "cp2": (2, CP2)}


@pytest.fixture(scope="module")
def losses_of_one(run_files) -> list[tuple]:
    world.run(
        train_by_words,
        1,
        stream_keys(run_files, "alone", use_mca=False, save_strategy="no", **PACKED),
    )
    return losses(run_files, "alone")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_sees_the_same_samples_and_resumes_another(run_files, losses_of_one, layout):
    ranks, keys = LAYOUTS[layout]
    keys = stream_keys(run_files, layout, **PACKED, **keys)
    world.run(train_by_words, ranks, {**keys, "max_steps": 4, "save_steps": 3})
    world.run(
        train_by_words, 1, stream_keys(run_files, layout, resume_from_checkpoint="auto", **PACKED)
    )
    assert_same_curve(losses(run_files, layout), losses_of_one)


def refused_streams(folder: Path, runs: dict) -> dict:
    told = {}
    for name, keys in runs.items():
        try:
            train_by_words({**stream_keys(folder, "refused"), **keys})
        except ValueError as error:
            told[name] = str(error)
    return told


def test_what_cannot_be_streamed_is_refused_and_said(run_files):
    world.run(train_by_words, 1, stream_keys(run_files, "refused", max_steps=2, use_mca=False))
    resumed = dict(resume_from_checkpoint="auto", use_mca=False)
    runs = {
        "pairs": dict(stage="dpo", dataset=f"{run_files}/pairs.jsonl"),
        "no steps": dict(max_steps=-1),
        "epochs": dict(save_strategy="epoch"),
        "another buffer": dict(buffer_size=11, **resumed),
        "not streamed": dict(streaming=False, **resumed),
    }
    [told] = world.run(refused_streams, 1, run_files, runs, timeout_s=120)
    assert told.keys() == runs.keys()
    assert "streaming: true" in told["pairs"] and "scores them before" in told["pairs"]
    assert "max_steps" in told["no steps"] and "save_strategy: steps" in told["epochs"]
    assert "saved with dataset streamed-" in told["another buffer"]
    assert "saved with" in told["not streamed"]


def test_evaluation_beside_a_stream_and_its_summary(run_files):
    keys = dict(eval_strategy="steps", eval_steps=2, max_steps=2, use_mca=False)
    keys["eval_dataset"] = f"{run_files}/other.jsonl"
    words = words_of(stream_keys(run_files, "held", **keys))
    [(code, shown, error)] = world.run(run_train, 1, words)
    assert not code, error
    assert [line for line in read_log(f"{run_files}/held") if "eval_loss" in line]
    for words in (
        "shuffled in blocks of 10 records",
        "mixed                               interleave_over",
        "2 of a stream, which has no epochs",
        "tokenised as they are read",
    ):
        assert words in shown, words
