"""What would train something else than its user thinks: refused, or said, in words."""

import contextlib
import io

import pytest
import torch
import torch.nn.functional as F

from mca_lite.data_batches import Limits, check_batch
from mca_lite.files import IGNORE_INDEX
from tests.shared import small_runs, tiny, world
from tests.shared.layouts import CP2, ONE_ROW, PP2, TP2_SP
from tests.shared.training import read_log, refusal, train

IDS = [5, 6, 7, 7, 8]


# -- labels in Hugging Face's form


def words_for(labels: list, ids: list = IDS, mask=None, packs=False) -> str:
    """The refusal of a batch of one row."""
    batch = {"input_ids": [ids], "labels": [labels]}
    if mask is not None:
        batch["attention_mask"] = [mask]
    return refusal(check_batch, batch, packs, Limits())


@pytest.mark.parametrize("masked", [0, 2, 3])
def test_labels_that_equal_the_input_are_refused(masked):
    labels = masked * [IGNORE_INDEX] + IDS[masked:]
    words = words_for(labels)
    assert "labels equal input_ids wherever they are not -100" in words
    assert "input_ids[:-1] with labels[1:]" in words
    assert words_for([*labels, IGNORE_INDEX], [*IDS, 0], [1] * 5 + [0])  # padded


def test_shifted_labels_that_happen_to_equal_the_input_are_taken():
    assert not words_for([6, 7, 7, 8, 9])
    assert not words_for([7] * 5, [7] * 5)  # one token again and again
    nothing = [IGNORE_INDEX] * 4
    assert not words_for([*nothing, 8])  # the last label has no next input to be compared with
    assert not words_for(nothing + nothing[:1])
    # documents of a packed row: a label at a border is not the next document's first token
    assert not words_for([7, 7, 7, 8, 8], [7, 7, 7, 8, 8], [1, 1, 1, 2, 2], packs=True)


def in_hugging_faces_form() -> list[dict]:
    return [{"input_ids": s["input_ids"], "labels": s["input_ids"]} for s in tiny.samples(8)]


def refusals_of_unshifted(path: str, out: str) -> list[str]:
    from mca_lite.trainer import McaTrainer

    def with_collator(*args, **given):
        def collate(samples):
            ids = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], True)
            return {"input_ids": ids, "labels": ids}

        return McaTrainer(*args, **given, data_collator=collate)

    given = dict(data=in_hugging_faces_form(), steps=1, warmup_steps=0)
    return [
        refusal(train, path, f"{out}/a", **given),
        refusal(train, path, f"{out}/b", trainer_class=with_collator, steps=1, warmup_steps=0),
    ]


def test_a_trainer_refuses_samples_and_batches_in_hugging_faces_form(tmp_path):
    path = tiny.save_model(tmp_path / "model", "qwen3")
    for words in world.run(refusals_of_unshifted, 1, path, str(tmp_path))[0]:
        assert "labels equal input_ids" in words


# -- calculate_per_token_loss: false


LAYOUTS = {
    "torch": (1, dict(backend="torch")),
    "dp2": (2, ONE_ROW),
    "pp2": (2, PP2),
    "cp2": (2, CP2),
    "tp2_sp": (2, TP2_SP),
}


def mean_of_means(path: str) -> float:
    """The mean over four samples, each a micro-batch, of the means over their tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    means = [
        F.cross_entropy(model(sample["input_ids"][None]).logits[0], sample["labels"]).item()
        for sample in tiny.samples(4)
    ]
    return sum(means) / len(means)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_means_of_micro_batches_are_logged_as_they_are_minimised(layout, tmp_path):
    path = tiny.save_model(tmp_path / "model", "qwen3")
    ranks, keys = LAYOUTS[layout]
    keys = dict(keys, data=tiny.samples(4), steps=1, warmup_steps=0, calculate_per_token_loss=False)
    for [(loss, _), *_] in world.run(train, ranks, path, str(tmp_path), **keys):
        assert loss == pytest.approx(mean_of_means(path), rel=1e-5)


# -- nothing is learned


def printed_by_losses(path: str, out: str) -> list[str]:
    """The log of a run with a loss that is 0, and of a usual one."""
    from mca_lite.trainer import McaTrainer

    class Nothing(McaTrainer):
        def _post_compute_loss(self, labels, losses):
            loss, count, metrics = super()._post_compute_loss(labels, losses)
            return 0 * loss, count, metrics

    found = []
    for kind in (Nothing, McaTrainer):
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            train(path, f"{out}/{kind.__name__}", trainer_class=kind, steps=1, warmup_steps=0)
        found.append(shown.getvalue())
    return found


def test_a_first_gradient_of_zero_is_said(tmp_path):
    path = tiny.save_model(tmp_path / "model", "qwen3")
    nothing, usual = world.run(printed_by_losses, 1, path, str(tmp_path))[0]
    words = "the gradient norm of the first step is 0"
    assert nothing.count(words) == 1 and words not in usual


# -- keys


def test_a_metric_without_evaluations_has_a_note():
    from mca_lite.args import TrainingArguments

    def notes(**keys) -> str:
        args = TrainingArguments(output_dir="unused", metric_for_best_model="loss ", **keys)
        return "\n".join(args.notes)

    words = "metric_for_best_model: no effect, since eval_strategy is no"
    assert words in notes() and words not in notes(eval_strategy="steps", eval_steps=2)


def test_the_decay_of_sgd_is_coupled_and_its_help_says_so(tmp_path):
    """torch's, as transformers has it: it is added to the gradient, and momentum keeps it."""
    from types import SimpleNamespace

    from mca_lite.args import TrainingArguments
    from mca_lite.tables import OPTIMIZERS

    w = torch.nn.Parameter(torch.ones(2))
    args = SimpleNamespace(learning_rate=0.1, sgd_momentum=0.5)
    optimizer = OPTIMIZERS["sgd"].make([{"params": [w], "weight_decay": 0.2}], args)
    w.grad = torch.zeros(2)
    optimizer.step()
    optimizer.step()
    # v1 = 0.2; w1 = 1 - 0.02; v2 = 0.1 + 0.196; w2 = 0.98 - 0.0296
    assert w.tolist() == pytest.approx([0.9504] * 2)
    help_ = TrainingArguments.__dataclass_fields__["weight_decay"].metadata["help"]
    assert "decoupled except in sgd" in help_


def keys_refused(**keys) -> str:
    from mca_lite.part_scores import objective_keys

    return refusal(objective_keys, "dpo", **keys)


def test_half_of_the_pairs_swapped_and_a_beta_of_zero_are_taken_as_trl_does():
    assert not keys_refused(dpo_label_smoothing=0.5)
    assert not keys_refused(pref_beta=0)
    assert not keys_refused(pref_loss=["orpo"], pref_beta=0)
    assert "robust divides by 1 - 2" in keys_refused(pref_loss=["robust"], dpo_label_smoothing=0.5)
    for name in ("ipo", "sppo_hard"):
        assert f"pref_loss {name} divides by it" in keys_refused(pref_loss=[name], pref_beta=0)
    assert "dpo_label_smoothing" in keys_refused(dpo_label_smoothing=0.6)


# -- numbers without a float, and sizes that transformers' class cannot have


def test_a_whole_number_beyond_floats_is_refused_with_its_place():
    from mca_lite.data_files import DatasetSpec
    from mca_lite.data_records import column_values, label_of

    record = {"m": 10**400, "label": -(10**400)}
    spec = DatasetSpec("a")
    words = refusal(column_values, record, {"pair_margin": "m"}, "a.jsonl:1")
    assert "a.jsonl:1: 'pair_margin' is 1000" in words and "finite number" in words
    assert "finite number" in refusal(label_of, record, spec, "a.jsonl:1", False)


def test_a_model_that_transformers_cannot_run_is_refused_in_words():
    from transformers import AutoModelForCausalLM

    from mca_lite.backend_torch import TokenLossModel
    from tests.shared import tiny_moe

    [name, *_] = [name for name, (family, _) in tiny_moe.MODELS.items() if family == "deepseek_v2"]
    model = AutoModelForCausalLM.from_config(tiny_moe.hf_config(name, qk_nope_head_dim=7))
    words = refusal(TokenLossModel, model, 4)
    assert "stride divisible by 2" in words and "use_mca: true" in words


# -- models of a run


def words_of(folder, **more) -> list[str]:
    keys = dict(
        model_name_or_path=f"{folder}/student", dataset=f"{folder}/chat.jsonl",
        cache_dir=f"{folder}/cache", output_dir=f"{folder}/run", max_steps=1, logging_steps=1,
        global_batch_size=4, cutoff_len=64, save_strategy="no", **more,
    )  # fmt: skip
    return small_runs.words_of(keys)


def report_of(folder, **more) -> str:
    from mca_lite import run
    from mca_lite.args import parse_args

    plan = run.make_plan(parse_args(words_of(folder, **more)))
    return "\n".join(plan.data.report)


def save_student(folder, dtype=torch.float32) -> None:
    tiny.save_model(folder / "student", "qwen3", dtype=dtype)
    small_runs.save_tokenizer(folder / "student")
    small_runs.write_data(folder)


@pytest.mark.parametrize("backend", [{}, {"use_mca": "false"}])
def test_files_in_bf16_that_train_in_float32_have_a_note(backend, tmp_path):
    save_student(tmp_path, torch.bfloat16)
    words = "files are in bfloat16, and bf16 is false"
    assert words in report_of(tmp_path, **backend)
    assert words not in report_of(tmp_path, bf16="true", **backend)
    save_student(tmp_path)
    assert words not in report_of(tmp_path, **backend)


def loss_with_teacher(folder: str, **layout) -> float:
    keys = dict(
        stage="distill", teacher_model_name_or_path=f"{folder}/teacher", teacher_top_k=4,
        teacher_cache=f"{folder}/rows{len(layout)}", **layout,
    )  # fmt: skip
    from mca_lite.__main__ import main

    assert main(words_of(folder, **keys)) == 0
    return read_log(f"{folder}/run")[-1]["loss"]


def test_a_teacher_of_any_depth_scores_for_a_pipeline(tmp_path):
    """3 layers of a teacher on 2 stages; the student's 4 are shared evenly."""
    save_student(tmp_path)
    tiny.save_model(tmp_path / "teacher", "qwen3", seed=1, num_hidden_layers=3)
    small_runs.save_tokenizer(tmp_path / "teacher")
    [alone] = world.run(loss_with_teacher, 1, str(tmp_path))
    both = world.run(loss_with_teacher, 2, str(tmp_path), **PP2)
    assert both[0] == pytest.approx(alone, rel=1e-5)
