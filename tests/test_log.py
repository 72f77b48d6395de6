"""The log, the progress line, the callbacks, the embedded example and the
shipped configurations.
"""

import importlib.util
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer
from transformers import TrainerState as HFTrainerState

from mca_lite.args import DataArguments, FinetuningArguments, TrainingArguments, parse_args
from mca_lite.callbacks import (
    BestModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    export_states,
    restore_states,
)
from mca_lite.log import Report, format_progress, format_summary
from mca_lite.log_metrics import format_duration
from mca_lite.part_callbacks import EarlyStopping
from mca_lite.run import data_summary
from mca_lite.tool_page import draw
from tests.shared.training import Clock

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "configs" / "tiny"
ARGS = SimpleNamespace(
    metric_for_best_model="loss", greater_is_better=None, load_best_model_at_end=True,
    early_stopping_patience=2, early_stopping_threshold=0.0,
)  # fmt: skip

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs the extra plot"
)


def make_report(tmp_path, is_main=True, clock=time.perf_counter, **options):
    args = TrainingArguments(output_dir=str(tmp_path), disable_tqdm=True)
    vars(args).update(options)
    return Report(args, is_main, clock)


def begin_training(report, **state):
    state = TrainerState(**state)
    report.on_train_begin(ARGS, state, TrainerControl())
    return state


LOGGED = """
import sys
from mca_lite.args import TrainingArguments
from mca_lite.callbacks import TrainerControl, TrainerState
from mca_lite.log import Report

args = TrainingArguments(output_dir=sys.argv[1], disable_tqdm=True)
report = Report(args, True)
report.on_train_begin(args, TrainerState(max_steps=3), TrainerControl())
for step in (1, 2, 3):
    report.log({"step": step, "loss": 1.0})
report.end("finished")
"""


@pytest.mark.parametrize("kind", ["reader gone", "disk full"])
def test_a_run_goes_on_without_stdout_and_its_log_says_so(tmp_path, kind):
    read_end, stdout = os.pipe()
    os.close(read_end)
    if kind == "disk full":
        stdout = os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-c", LOGGED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    records = lines(tmp_path)
    assert [record["step"] for record in records if "step" in record] == [1, 2, 3]
    [note] = [record["note"] for record in records if "note" in record]
    assert {"reader gone": "Broken pipe", "disk full": "No space left"}[kind] in note


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "trainer_log.jsonl").read_text().splitlines()]


# trainer_state.json


def test_state_survives_a_round_trip_and_bears_hugging_face_names(tmp_path):
    state = TrainerState(
        global_step=7, epoch=0.7, max_steps=10, num_train_epochs=1.0, consumed_samples=56,
        consumed_tokens=900,
        log_history=[{"step": 5, "loss": 1 / 3}], best_metric=0.1, best_global_step=5,
        best_model_checkpoint="checkpoint-5",
    )  # fmt: skip
    path = tmp_path / "trainer_state.json"
    state.save(str(path))
    assert TrainerState.load(str(path)) == state
    written = json.loads(path.read_text())
    hf_names = set(HFTrainerState.__dataclass_fields__)
    own = {"consumed_samples", "consumed_tokens", "data_position", "left_out_steps", "log_sums"}
    own |= {"resumes"}
    own.add("objective")
    assert set(written) - hf_names == own
    assert written["best_global_step"] == 5


def test_state_file_of_hugging_face_is_read(tmp_path):
    path = tmp_path / "trainer_state.json"
    HFTrainerState(global_step=3, epoch=0.5, best_global_step=2, max_steps=9).save_to_json(
        str(path)
    )
    state = TrainerState.load(str(path))
    assert (state.global_step, state.epoch, state.best_global_step, state.max_steps) == (
        3,
        0.5,
        2,
        9,
    )


@pytest.mark.parametrize("content", ['{"global_step": 1', "[]", "{}"])
def test_broken_state_file_is_named(tmp_path, content):
    path = tmp_path / "trainer_state.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="trainer_state.json"):
        TrainerState.load(str(path))


# best model and early stopping


def asked(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(ARGS), **changes})


def report_evaluation(callback, state, step, args=ARGS, **metrics):
    control = TrainerControl()
    state.global_step = step
    callback.on_evaluate(args, state, control, metrics)
    return control


def test_best_model_keeps_the_lowest_loss_and_its_checkpoint():
    best, state = BestModel(), TrainerState()
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, math.nan)):
        control = report_evaluation(best, state, step, eval_loss=loss)
        assert control.should_save == (step <= 2)
        best.on_save(ARGS, state, control, f"checkpoint-{step}", step)
    assert (state.best_metric, state.best_global_step, state.best_model_checkpoint) == (
        1.0,
        2,
        "checkpoint-2",
    )


def test_best_model_finds_a_checkpoint_saved_before_the_evaluation():
    best, state = BestModel(), TrainerState(global_step=4)
    best.on_save(ARGS, state, TrainerControl(), "checkpoint-4", 4)
    assert not report_evaluation(best, state, 4, eval_loss=1.0).should_save
    assert state.best_model_checkpoint == "checkpoint-4"


def test_best_model_takes_the_direction_from_the_name_of_the_metric():
    rising = asked(metric_for_best_model="accuracy")
    falling = asked(metric_for_best_model="eval_accuracy", greater_is_better=False)
    for args, best_step in ((rising, 2), (falling, 3)):
        best, state = BestModel(), TrainerState()
        for step, accuracy in ((1, 0.5), (2, 0.75), (3, 0.25)):
            report_evaluation(best, state, step, args, eval_accuracy=accuracy, eval_loss=1.0)
        assert state.best_global_step == best_step


def test_missing_metric_is_an_error_that_names_what_there_is():
    with pytest.raises(ValueError, match="no eval_bleu, only eval_loss: set metric_for_best_model"):
        args = asked(metric_for_best_model="bleu")
        report_evaluation(BestModel(), TrainerState(), 1, args, eval_loss=1.0)


def test_early_stopping_counts_evaluations_in_a_row_and_respects_the_threshold():
    # gains: 1.0 (first), 0.5 > 0.1, 0.05 not, 0.2 since the best > 0.1, then three without
    losses = (2.0, 1.5, 1.45, 1.3, 1.25, 1.4, 1.3)
    args = asked(early_stopping_patience=3, early_stopping_threshold=0.1)
    stopping, state = EarlyStopping(), TrainerState()
    stopping.on_train_begin(args, state, TrainerControl())
    stops = [
        report_evaluation(stopping, state, step, args, eval_loss=loss).should_training_stop
        for step, loss in enumerate(losses)
    ]
    assert stops == [False] * 6 + [True]


def test_early_stopping_goes_on_counting_after_a_resume():
    history = [
        {"step": 1, "eval_loss": 1.0},
        {"step": 2, "loss": 1.0},
        {"step": 2, "eval_loss": 1.1},
    ]
    stopping, state = EarlyStopping(), TrainerState(global_step=2, log_history=history)
    stopping.on_train_begin(ARGS, state, TrainerControl())
    assert stopping.evaluations_without_gain == 1
    assert report_evaluation(stopping, state, 3, eval_loss=1.0).should_training_stop


@pytest.mark.parametrize("patience, stops", [(2, True), (3, False)])
def test_a_run_that_early_stopping_ended_trains_no_further_when_resumed(patience, stops):
    history = [{"step": step, "eval_loss": loss} for step, loss in enumerate((1.0, 1.1, 1.2), 1)]
    control, state = TrainerControl(), TrainerState(global_step=3, log_history=history)
    EarlyStopping().on_train_begin(asked(early_stopping_patience=patience), state, control)
    assert control.should_training_stop is stops


@pytest.mark.parametrize("key, value", [("patience", 0), ("threshold", -0.5)])
def test_early_stopping_refuses_numbers_that_mean_nothing(key, value):
    keys = {"early_stopping_patience": 1, f"early_stopping_{key}": value}
    with pytest.raises(ValueError, match=f"early_stopping_{key}"):
        TrainingArguments(output_dir="out", eval_strategy="epoch", **keys)


class Counter(TrainerCallback):
    def __init__(self, count: int = 0):
        self.count = count

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]


def test_two_callbacks_of_a_class_get_each_its_own_state_again():
    states = json.loads(json.dumps(export_states([Counter(1), BestModel(), Counter(2)])))
    again = [Counter(), Counter(), Counter(7)]  # the third one is new in the resumed run
    restore_states(again, states)
    assert [callback.count for callback in again] == [1, 2, 7]


# trainer_log.jsonl and the progress line


def test_log_holds_unrounded_numbers_as_they_were_given(tmp_path):
    report = make_report(tmp_path)
    begin_training(report, max_steps=2)
    report.log(
        {"step": 1, "loss": 1 / 3, "learning_rate": 1e-7 / 3, "grad_norm": torch.tensor(0.5)}
    )
    assert lines(tmp_path) == [
        {"step": 1, "loss": 1 / 3, "learning_rate": 1e-7 / 3, "grad_norm": 0.5}
    ]
    report.on_log(
        ARGS, TrainerState(), TrainerControl(), {"step": 2, "eval_loss": 0.25}
    )  # flushed line by line
    assert lines(tmp_path)[1] == {"step": 2, "eval_loss": 0.25}


def test_resumed_log_is_cut_after_the_resumed_step_and_a_torn_line_goes(tmp_path):
    old = "".join(json.dumps({"step": step, "loss": step / 7}) + "\n" for step in (1, 2, 3))
    odd = 'nonsense\n[1]\n{"step": "1"}\n{"step": ' + "[" * 99_999 + "\n"
    (tmp_path / "trainer_log.jsonl").write_text(odd + old + '{"step": 4, "lo')
    report = make_report(tmp_path)
    begin_training(report, global_step=2, max_steps=9)
    report.log({"step": 3, "loss": 0.5})
    assert lines(tmp_path) == [
        {"step": 1, "loss": 1 / 7},
        {"step": 2, "loss": 2 / 7},
        {"step": 3, "loss": 0.5},
    ]


def test_new_run_starts_an_empty_log(tmp_path):
    (tmp_path / "trainer_log.jsonl").write_text('{"step": 1}\n')
    begin_training(make_report(tmp_path), max_steps=9)
    assert lines(tmp_path) == []


def test_other_ranks_print_and_write_nothing(tmp_path, capsys):
    report = make_report(tmp_path, is_main=False, disable_tqdm=False)
    state = begin_training(report, max_steps=2)
    report.log({"step": 1, "loss": 1.0})
    report.on_step_end(ARGS, state, TrainerControl())
    report.on_train_end(ARGS, state, TrainerControl())
    report.summary({"model": {"name": "x"}})
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_training_twice_with_one_report_works(tmp_path):
    report = make_report(tmp_path)
    for _ in range(2):
        state = begin_training(report, max_steps=1)
        report.log({"step": 1, "loss": 1.0})
        report.on_train_end(ARGS, state, TrainerControl())
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_progress_is_one_plain_line_with_the_time_left(tmp_path, capsys):
    clock = Clock()
    report = make_report(tmp_path, clock=clock)
    begin_training(report, global_step=10, max_steps=30)
    clock.now = 40.0  # 10 steps in 40 s: 10 more take 40 s
    report.log({
        "step": 20, "epoch": 0.128, "loss": 2.34564, "grad_norm": 1.2345, "learning_rate": 1e-4,
        "skipped_iter": 0,
        "tokens_per_second": 12345.6, "consumed_samples": 640, "peak_memory_gib": 0.4,
    })  # fmt: skip
    expected = (
        "step 20/30  epoch 0.13  loss 2.3456  grad_norm 1.23  lr 1.0e-04  tokens/s 12.3k  eta 40s\n"
    )
    assert capsys.readouterr().out == expected


def test_progress_line_shows_skipped_steps_and_metrics_of_the_objective():
    line = format_progress(
        {"step": 3, "loss": 1.0, "skipped_iter": 2, "eval_loss": 0.5, "eval_rouge_l": 0.0},
        max_steps=4,
    )
    assert line.startswith("step 3/4  loss 1.0000  eval_loss 0.5000  skipped_iter 2  eval_rouge_l")


def test_bar_counts_steps_and_lets_lines_through(tmp_path, capsys):
    report = make_report(tmp_path, disable_tqdm=False)
    state = begin_training(report, max_steps=4)
    state.global_step = 3
    report.on_step_end(ARGS, state, TrainerControl())
    report.log({"step": 3, "loss": 1.5})
    report.print("saved")
    report.on_train_end(ARGS, state, TrainerControl())
    out, err = capsys.readouterr()
    assert out.strip() == "saved"
    assert "3/4" in err and "loss 1.5000" in err


def test_durations_read_well():
    assert [format_duration(s) for s in (-1, 58.4, 80, 7500)] == ["0s", "58s", "1m20s", "2h05m"]


def test_summary_lists_sections_in_one_column():
    text = format_summary({"model": {"layers": 4, "name": None}, "empty": {"x": None},
                           "batch": {"size": 2, "rate": "0.1"}})  # fmt: skip
    rows = [line.rsplit(maxsplit=1) for line in text.splitlines()]
    assert rows == [["model"], ["  layers", "4"], ["batch"], ["  size", "2"], ["  rate", "0.1"]]
    assert len({len(line) for line in text.splitlines() if "  " in line and "." not in line}) == 1


# trackers and the plot


def hide(monkeypatch, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == package else found(name, *rest),
    )


@pytest.mark.parametrize(
    ("package", "options", "extra"),
    [
        ("tensorboard", {"report_to": ["tensorboard"]}, "tensorboard"),
        ("wandb", {"report_to": ["wandb"]}, "wandb"),
        ("matplotlib", {"plot_loss": True}, "plot"),
    ],
)
def test_missing_package_is_an_error_of_the_arguments_that_names_the_extra(
    monkeypatch, package, options, extra
):
    hide(monkeypatch, package)
    with pytest.raises(ValueError, match=rf"mca-lite\[{extra}\]"):
        TrainingArguments(output_dir="out", **options)


def test_unknown_tracker_is_an_error_and_none_is_not():
    assert TrainingArguments(output_dir="out", report_to="none").report_to == []
    with pytest.raises(ValueError, match="(?s)'mlflow'.*expected one of none, all"):
        TrainingArguments(output_dir="out", report_to=["mlflow"])


def test_trackers_get_every_number_under_the_step(tmp_path, monkeypatch):
    written, calls = [], []
    writer = SimpleNamespace(
        add_scalar=lambda *values: written.append(values), close=lambda: calls.append("close")
    )
    run = SimpleNamespace(
        log=lambda logs, step: calls.append((logs, step)), finish=lambda: calls.append("finish")
    )
    tensorboard = SimpleNamespace(
        SummaryWriter=lambda folder, purge_step: calls.append(purge_step) or writer
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: run))
    report = make_report(tmp_path, report_to=["tensorboard", "wandb"])
    state = begin_training(report, global_step=4, max_steps=9)
    report.log({"step": 5, "loss": 0.5, "eval_loss": 0.25})
    report.on_train_end(ARGS, state, TrainerControl())
    assert written == [("train/loss", 0.5, 5), ("eval/loss", 0.25, 5)]
    assert calls == [5, ({"loss": 0.5, "eval_loss": 0.25}, 5), "finish", "close"]


@needs_matplotlib
def test_plot_is_a_picture_of_the_whole_log(tmp_path):
    report = make_report(tmp_path, plot_loss=True)
    report.draw = draw
    state = begin_training(report, max_steps=3)
    for step in (1, 2, 3):
        report.log({"step": step, "loss": 1 / step})
    report.log({"step": 3, "eval_loss": 0.5})
    report.on_train_end(ARGS, state, TrainerControl())
    assert (tmp_path / "training_loss.png").read_bytes().startswith(b"\x89PNG")


# the embedded example and the shipped configurations


def test_example_script_writes_the_committed_bytes(tmp_path):
    subprocess.run([sys.executable, str(TINY / "make.py"), str(tmp_path)], check=True)
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(made) == 15
    for name in made:
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes(), (
            f"make.py writes another {name}"
        )


def test_example_holds_out_what_it_asks_and_stays_small():
    def answers(name):
        records = [json.loads(line) for line in (TINY / name).read_text().splitlines()]
        return {
            m["content"]
            for record in records
            for m in record["messages"]
            if m["role"] == "assistant"
        }

    heldout = answers("heldout.jsonl")
    assert len(heldout) == 200 and not heldout & answers("sft.jsonl")
    assert not any(date in (TINY / "pt.jsonl").read_text() for date in heldout)
    assert (
        sum(path.stat().st_size for path in TINY.rglob("*") if "__pycache__" not in path.parts)
        < 1_200_000
    )


def test_example_pairs_are_of_two_readings_of_dates_and_hold_some_out():
    def dates(name):
        found = set()
        for record in map(json.loads, (TINY / name).read_text().splitlines()):
            day, month, year = re.search(r"(\d\d) (\d\d) (\d{4})", record["prompt"]).groups()
            assert (
                record["chosen"] == f"{year}-{month}-{day}"
                and record["rejected"] == f"{year}-{day}-{month}"
            )
            found.add((day, month, year))
        return found

    train, heldout = dates("pairs.jsonl"), dates("heldout_pairs.jsonl")
    assert len(train) == 2000 and len(heldout) == 200 and not train & heldout


def test_example_template_marks_the_answers_and_their_stop_token():
    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    turns = [("user", "Say 1."), ("assistant", "1999"), ("user", "Again."), ("assistant", "ok")]
    messages = [{"role": role, "content": content} for role, content in turns]
    encoded = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    kept = [
        token
        for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        if mask
    ]
    assert tokenizer.decode(kept) == "1999<|im_end|>ok<|im_end|>"
    assert tokenizer.tokenize("1999") == ["1", "9", "9", "9"]


def test_example_tokenizer_gives_any_text_back():
    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    rng = random.Random(0)
    for text in [
        "Zürich\n\n  ok 12 — ½ ",
        "".join(chr(rng.randrange(32, 0x3000)) for _ in range(200)),
    ]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


# The published sizes of the models that the real configurations name, and the world that their
# first lines start.
REAL = {
    "qwen3_0.6b_pt": (8, dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16)),
    "qwen3_4b_sft_one_gpu": (1, dict(hidden_size=2560, num_hidden_layers=36,
                                     num_attention_heads=32)),
    "qwen3_8b_sft": (8, dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32)),
    "llama3_70b_sft_multinode": (64, dict(hidden_size=8192, num_hidden_layers=80,
                                          num_attention_heads=64)),
    "qwen3_30b_a3b_sft": (16, dict(hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
                                   model_type="qwen3_moe",
                                   num_experts=128, num_experts_per_tok=8,
                                   moe_intermediate_size=768)),
}  # fmt: skip


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_shipped_configuration_parses_and_fits_its_model_and_world(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    world_size, sizes = REAL.get(path.stem, (2, None))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    words = []
    if path.stem in ("dpo", "orpo", "simpo", "kto", "rm"):  # of configs/sft.yaml
        words = ["model_name_or_path=configs/tiny/model"]
    if (
        sizes is not None
    ):  # the model is on a hub, which a test cannot ask: a config.json of the same sizes stands in
        config = (
            json.loads((TINY / "model" / "config.json").read_text())
            | sizes
            | {"num_key_value_heads": 8}
        )
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = [f"model_name_or_path={tmp_path}"]
    run = parse_args([str(path), *words])
    assert run.warnings == []
    training = run.training
    assert training.train_global_batch_size == training.global_batch_size
    assert training.world_size == training.model_parallel_size * training.data_parallel_size
    assert isinstance(training.lr_scheduler_kwargs.get("min_lr", 0.0), float)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_shipped_configuration_starts_with_the_command_that_runs_it(path):
    text = path.read_text()
    head = text.split("\nmodel_name_or_path")[0]
    assert f"train.py configs/{path.name}" in head
    assert path.stem not in REAL or ("torchrun" in head and "sbatch" in head)


@pytest.mark.parametrize("is_mca", [True, False])
@pytest.mark.parametrize(("cutoff_len", "is_above"), [(64, False), (65, True)])
def test_a_cutoff_len_above_the_positions_of_the_model_has_a_word(is_mca, cutoff_len, is_above):
    keys = {"max_position_embeddings": 64}
    config = SimpleNamespace(hf_config=keys) if is_mca else SimpleNamespace(to_dict=lambda: keys)
    arguments = SimpleNamespace(
        data=DataArguments(dataset=["a.txt"], cutoff_len=cutoff_len),
        finetuning=FinetuningArguments(),
        training=SimpleNamespace(sequence_packing=False),
    )
    plan = SimpleNamespace(
        arguments=arguments,
        objective=SimpleNamespace(describe=lambda keys: ""),
        model=SimpleNamespace(config=config, finetuning=None),
        data=SimpleNamespace(train=None, evals=None, evaluation=None, eval=None),
    )
    assert ("above the model's 64 positions" in data_summary(plan)["cutoff_len"]) == is_above
