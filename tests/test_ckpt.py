"""A resumed run is the run that never stopped."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.shared import tiny, world
from tests.shared.fixtures import saved_model
from tests.shared.layouts import DIST_OPT, OVERLAP, PP2, SAVE, SP, TP2, TWO_ROWS, VPP2
from tests.shared.training import assert_same_curve, read_log, refusal, train

model_path = saved_model("qwen3")


LAYOUTS = {
    "one": (1, TWO_ROWS),
    "dp2": (2, {}),
    "dp2_overlap": (2, OVERLAP),  # of many buckets
    "tp2_sp": (2, {**TP2, **SP, **TWO_ROWS}),
    "pp2_vpp2_dist_opt": (2, {**PP2, **VPP2, **DIST_OPT, **TWO_ROWS}),
    "cp2_packed": (
        2,
        dict(context_parallel_size=2, sequence_packing=True, per_device_train_batch_size=2),
    ),
}
WHOLE = 4  # steps: an epoch has 3, so the run goes through a partial window and a new permutation


DROPOUT = dict(attention_dropout=0.1, hidden_dropout=0.1)


@pytest.fixture(scope="module")
def stopped_once(model_path, tmp_path_factory):
    """run(layout, keys) -> (folder, curve) of `stopped`; each is made once."""
    done = {}

    def run(layout: str, keys: dict):
        key = layout, str(keys)
        if key not in done:
            folder, (ranks, own) = tmp_path_factory.mktemp(layout), LAYOUTS[layout]
            done[key] = folder, stop_after_two(model_path, folder, ranks, {**own, **keys})
        return done[key]

    return run


# What a rank of two replicas keeps is its random states, as with a distributed optimizer; what all
# keep is that of one rank.
@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.full] if n == "dp2" else []) for n in LAYOUTS]
)
def test_resume_in_the_same_layout_is_bit_for_bit(model_path, stopped_once, tmp_path, layout):
    ranks, keys = LAYOUTS[layout]
    keys = dict(keys, **DROPOUT)
    folder, whole = stopped_once(layout, DROPOUT)
    shutil.copytree(folder, tmp_path / "parts")
    keys = {**SAVE, **keys, "steps": WHOLE}
    [parts, *_] = world.run(resumed_twice, ranks, model_path, str(tmp_path / "parts"), **keys)
    assert parts == [whole, whole]
    steps = [line["step"] for line in read_log(tmp_path / "parts")]
    assert steps == [1, 2, 3, 4]


def resumed_twice(path: str, out: str, **keys) -> list:
    """The curve of a run that goes on from its step 2, and that of the same run, which died then
    after step 3 and goes on from what it saved there."""
    from mca_lite import parallel

    keys |= dict(resume_from_checkpoint="auto", save_steps=1)
    once = train(path, out, **keys)
    parallel.on_main(lambda: shutil.rmtree(f"{out}/checkpoint-{WHOLE}"))
    return [once, train(path, out, **keys)]


def test_saving_changes_no_number(model_path, stopped_once, tmp_path):
    keys = dict(OVERLAP, **DROPOUT)
    [plain, _] = world.run(train, 2, model_path, str(tmp_path / "plain"), steps=WHOLE, **keys)
    assert stopped_once("dp2_overlap", DROPOUT)[1] == plain


def stop_after_two(model_path, folder, ranks, keys) -> list:
    """The curve of a whole run, whose later checkpoints are gone then: as if it had died after step
    2.
    """
    keys = {**SAVE, **keys}
    curve, *_ = world.run(train, ranks, model_path, str(folder), steps=WHOLE, **keys)
    for path in Path(folder).glob("checkpoint-*"):
        if path.name != "checkpoint-2":
            shutil.rmtree(path)
    return curve


@pytest.mark.parametrize(
    "before, after", [("one", "pp2_vpp2_dist_opt"), ("dp2_overlap", "tp2_sp"), ("tp2_sp", "one")]
)
def test_resume_in_another_layout(model_path, stopped_once, tmp_path, before, after):
    _, whole = stopped_once("one", {})
    shutil.copytree(stopped_once(before, {})[0], tmp_path / "parts")
    ranks, keys = LAYOUTS[after]
    keys = {**SAVE, **keys, "resume_from_checkpoint": "auto"}
    for got in world.run(train, ranks, model_path, str(tmp_path / "parts"), steps=WHOLE, **keys):
        assert_same_curve(got, whole, 5e-6)


def test_the_torch_backend_resumes_bit_for_bit(model_path, tmp_path):
    whole = stop_after_two(model_path, tmp_path / "parts", 2, dict(backend="torch"))
    keys = {**SAVE, "resume_from_checkpoint": "auto", "backend": "torch"}
    assert world.run(train, 2, model_path, str(tmp_path / "parts"), steps=WHOLE, **keys)[0] == whole


@pytest.mark.parametrize("ranks, own", [(1, dict(backend="torch")), (2, PP2)])
def test_the_first_line_after_a_resume_has_the_steps_before_it_too(
    model_path, tmp_path, ranks, own
):
    """Lines at steps 3 and 5, and the checkpoint at step 2: the sums of two steps are in it."""
    keys = {**SAVE, **own, "logging_steps": 3}
    whole = stop_after_two(model_path, tmp_path, ranks, keys)
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    loss, count, tokens, *_, positions = saved["log_sums"]["sums"]
    assert loss > 0 and 0 < count <= tokens <= positions
    keys["resume_from_checkpoint"] = "auto"
    again = world.run(train, ranks, model_path, str(tmp_path), steps=WHOLE, **keys)[0]
    assert len(whole) == 2 and again == whole
    assert json.loads((tmp_path / "trainer_state.json").read_text())["log_sums"] is None


def test_a_second_line_of_a_step_has_no_numbers():
    from mca_lite.trainer_events import Numbers, RunSums

    nothing = Numbers.zeros(["loss"], torch.device("cpu"))
    sums = RunSums(nothing, {})
    for loss, skipped in ((3.0, 0), (5.0, 1)):
        metrics = [{"loss": torch.tensor([loss, 1.0])}]
        sums.add(
            Numbers.zeros(["loss"], torch.device("cpu")).add_metrics(metrics), skipped, 0.5, None
        )
        lines = [sums.take(), sums.take()]
        assert lines == [{"loss": loss, "grad_norm": 0.5, "skipped_iter": skipped}, {}]


def test_sums_of_a_line_are_carried_where_the_metrics_are_the_same():
    from mca_lite.trainer_events import Numbers, RunSums

    def numbers(name: str, *pairs) -> Numbers:
        metrics = [{name: torch.tensor(pair)} for pair in pairs]
        return Numbers.zeros([name], torch.device("cpu")).add_metrics(metrics)

    sums = RunSums(numbers("loss"), {})
    assert sums.to_record() is None
    sums.add(numbers("loss", (6.0, 2.0)), skipped=0, grad_norm=1.0, num_zeros=None)
    sums.add(numbers("loss"), skipped=1, grad_norm=0.0, num_zeros=None)
    record = json.loads(json.dumps(sums.to_record()))
    resumed = RunSums(numbers("loss"), record)
    resumed.add(numbers("loss", (3.0, 4.0)), skipped=0, grad_norm=2.0, num_zeros=7)
    line = {"loss": 1.5, "grad_norm": 2.0, "num_zeros_in_grad": 7, "skipped_iter": 1}
    assert resumed.take() == line and resumed.to_record() is None
    assert RunSums(numbers("other"), record).to_record() is None


def draws(path, out, **keys) -> list:
    """Random numbers of python and numpy that a callback draws after each step."""
    import random

    import numpy as np

    from mca_lite import TrainerCallback

    class Draw(TrainerCallback):
        drawn = []

        def on_step_end(self, args, state, control, **kwargs):
            self.drawn.append((state.global_step, random.random(), float(np.random.rand())))

    train(path, out, backend="torch", callbacks=[Draw()], steps=WHOLE, **keys)
    return Draw.drawn


def test_random_numbers_of_python_and_numpy_go_on_where_they_stopped(model_path, tmp_path):
    [whole] = world.run(draws, 1, model_path, str(tmp_path / "parts"), **SAVE)
    for path in Path(tmp_path / "parts").glob("checkpoint-[34]"):
        shutil.rmtree(path)
    keys = {**SAVE, "resume_from_checkpoint": "auto"}
    [parts] = world.run(draws, 1, model_path, str(tmp_path / "parts"), **keys)
    assert parts == whole[2:]


def test_bf16_resumes_with_its_master_weights(model_path, tmp_path):
    keys = dict(bf16=True, **OVERLAP)
    whole = stop_after_two(model_path, tmp_path / "parts", 2, keys)
    keys = {**SAVE, **keys, "resume_from_checkpoint": "auto"}
    assert world.run(train, 2, model_path, str(tmp_path / "parts"), steps=WHOLE, **keys)[0] == whole


@pytest.mark.parametrize(
    "ranks, keys", [(1, dict(backend="torch")), (1, {}), (2, {**TP2, **DIST_OPT})]
)
def test_fp16_resumes_with_its_loss_scale_and_its_counters(tmp_path, ranks, keys):
    """The scale doubles every two steps until it overflows twice in a row: checkpoint-16 lies in
    the midst of that.
    """
    model_path = tiny.save_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    keys = dict(
        keys,
        fp16=True,
        loss_scale_window=2,
        hysteresis=2,
        initial_loss_scale=2.0**16,
        num_train_epochs=20,
    )
    keys |= dict(save_strategy="steps", save_steps=16, global_batch_size=4, count=22)
    runs, again = {}, str(tmp_path / "parts")
    world.run(train, ranks, model_path, str(tmp_path / "whole"), steps=24, **keys)
    shutil.copytree(tmp_path / "whole" / "checkpoint-16", tmp_path / "parts" / "checkpoint-16")
    world.run(train, ranks, model_path, again, steps=24, resume_from_checkpoint="auto", **keys)
    for name in ("whole", "parts"):
        lines = [line for line in read_log(tmp_path / name) if line["step"] > 16]
        [scales] = loss_scales(tmp_path / name / "checkpoint-24")
        runs[name] = (
            [(line["loss"], line["grad_norm"], line["skipped_iter"]) for line in lines],
            scales,
        )
    assert runs["parts"] == runs["whole"] and len(runs["whole"][0]) == 8
    assert sum(skipped for _, _, skipped in runs["whole"][0]), (
        "nothing overflowed: the test shows nothing"
    )
    [middle] = loss_scales(tmp_path / "whole" / "checkpoint-16")
    assert middle["scale"] != 2.0**16 and (
        middle["growth_tracker"],
        middle["hysteresis_tracker"],
    ) != (0, 2)


def loss_scales(folder) -> list[dict]:
    return json.loads((folder / "training.json").read_text())["loss_scales"]


def test_what_cannot_be_resumed_is_refused(model_path, tmp_path):
    out = str(tmp_path / "run")
    world.run(train, 1, model_path, out, steps=2, **SAVE)
    [old_run] = world.run(refusal, 1, train, model_path, out, steps=2, **SAVE)
    assert "overwrite_output_dir" in old_run and "resume_from_checkpoint: auto" in old_run
    auto = dict(SAVE, resume_from_checkpoint="auto")
    [batch] = world.run(refusal, 1, train, model_path, out, steps=4, global_batch_size=2, **auto)
    assert "global_batch_size 4" in batch
    [missing] = world.run(
        refusal, 1, train, model_path, out, resume_from_checkpoint=str(tmp_path / "nowhere")
    )
    assert "not a complete checkpoint" in missing
    [backend] = world.run(refusal, 1, train, model_path, out, backend="torch", steps=4, **auto)
    assert "megatron-core" in backend
    world.run(train, 1, model_path, str(tmp_path / "bare"), steps=2, save_only_model=True, **SAVE)
    [bare] = world.run(refusal, 1, train, model_path, str(tmp_path / "bare"), steps=4, **auto)
    assert "save_only_model" in bare


def test_overwriting_deletes_the_old_checkpoints(model_path, tmp_path):
    world.run(train, 1, model_path, str(tmp_path), steps=4, **SAVE)
    world.run(train, 1, model_path, str(tmp_path), steps=2, overwrite_output_dir=True, **SAVE)
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_checkpoint_holds_what_design_promises(model_path, tmp_path):
    world.run(train, 2, model_path, str(tmp_path), steps=2, **SAVE, **TP2)
    folder = tmp_path / "checkpoint-2"
    assert json.loads((folder / "mca_config.json").read_text())["tensor_model_parallel_size"] == 2
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
    for rank in range(2):
        states = torch.load(folder / f"rng-{rank}.pt", weights_only=True)
        assert {"torch", "tracker", "python", "numpy"} <= states.keys()
    assert not list(tmp_path.glob(".*.tmp"))


def decision(path: str, **keys) -> str:
    from mca_lite import AutoModel, TrainingArguments

    return AutoModel.from_pretrained(
        path, TrainingArguments(output_dir="unused", **keys)
    ).weights_from


def test_the_decision_how_weights_are_loaded_is_said(model_path, tmp_path):
    world.run(train, 2, model_path, str(tmp_path), steps=2, **SAVE, **TP2)
    saved = str(tmp_path / "checkpoint-2")
    assert world.run(decision, 2, saved, **TP2) == ["loaded directly: the layout is the same"] * 2
    assert "resharded" in world.run(decision, 1, saved)[0]
    assert world.run(decision, 1, model_path) == ["converted from Hugging Face safetensors"]
