"""Predictions: log-probabilities of each sample, and metrics of a user's, against plain
transformers in every layout.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.shared import tiny, world
from tests.shared.commands import run_all
from tests.shared.dpo_tools import Pairs, logp_and_length
from tests.shared.fixtures import saved_model
from tests.shared.layouts import CP2, PP2, TP2_SP, VPP2
from tests.shared.small_runs import save_all

SAMPLES = tiny.samples(11)  # of unequal length, one of them without a label
PACKED = dict(sequence_packing=True, per_device_eval_batch_size=3)
LAYOUTS = {
    "torch_dp2": (2, "torch", {}),
    "dp2": (2, "megatron", {}),
    "tp2_sp": (2, "megatron", TP2_SP),
    "pp2_vpp2": (2, "megatron", {**PP2, **VPP2, "gradient_accumulation_steps": 2}),
    "cp2": (2, "megatron", CP2),
}


path = saved_model("qwen3")


@pytest.fixture(scope="module")
def oracle(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).eval()


def likeliest(logits, labels):
    assert logits.shape[:2] == labels.shape and labels[0, 0] == -100
    return logits.argmax(-1)


def right_and_tokens(predicted) -> dict:
    """Written for transformers' Trainer: position t is predicted by t - 1."""
    labels = predicted.label_ids[:, 1:]
    tokens = predicted.predictions[:, :-1][labels != -100]
    right, of = (tokens == labels[labels != -100]).sum(), len(tokens)
    return {"right": right, "of": of, "sum": tokens.sum(), "samples": len(labels)}


def found_in(path, out, backend, layout) -> dict:
    """Results of predict(), in rows and in packed rows, for samples, pairs and packs of them, and a
    user's metrics.
    """
    from mca_lite import AutoModel, DPOTrainer, McaTrainer, TrainingArguments
    from mca_lite.data_batches import Packs
    from mca_lite.model import load_torch_model

    class Doubled(McaTrainer):
        def _loss_of_logits(self, logits):
            return 2 * logits.cross_entropy()

    found = {}
    for rows, keys in {"rows": dict(per_device_eval_batch_size=2), "packed": PACKED}.items():
        args = TrainingArguments(output_dir=out, disable_tqdm=True, **layout, **keys)
        model = load_torch_model(path) if backend == "torch" else AutoModel.from_pretrained(
            path, args
        )  # fmt: skip
        trainer = McaTrainer(
            model,
            args,
            eval_dataset=SAMPLES,
            compute_metrics=right_and_tokens,
            preprocess_logits_for_metrics=likeliest,
        )
        output = trainer.predict(SAMPLES)
        found[rows] = output.predictions, output.metrics, output.label_ids
        found[f"{rows} evaluated"] = trainer.evaluate()
        found[f"{rows} of another loss"] = Doubled(model, args).predict(SAMPLES).predictions
        pairs = Pairs(5)
        packs = Packs(pairs, 60) if rows == "packed" else pairs
        of_pairs = DPOTrainer(model, args=args, train_dataset=packs).predict(packs)
        found[f"{rows} of pairs"] = of_pairs.predictions, of_pairs.metrics
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_predictions_are_transformers_own_in_every_layout(path, oracle, tmp_path, name):
    ranks, backend, layout = LAYOUTS[name]
    wanted = [logp_and_length(oracle, sample) for sample in SAMPLES]
    wanted = np.array([[float(logp), count] for logp, count in wanted])
    pairs = [
        [logp_and_length(oracle, pair[s]) for s in ("chosen", "rejected")] for pair in Pairs(5)
    ]
    pairs = np.array([[[float(logp), count] for logp, count in pair] for pair in pairs])
    loss = -wanted[:, 0].sum() / wanted[:, 1].sum()
    counts = {"right": 0, "of": int(wanted[:, 1].sum()), "sum": 0, "samples": len(SAMPLES)}
    for sample in SAMPLES:
        answers = oracle(sample["input_ids"][None]).logits[0].argmax(-1)
        counts["right"] += int((answers == sample["labels"]).sum())
        counts["sum"] += int(answers[sample["labels"] != -100].sum())
    assert counts["right"] > 0 and wanted[5, 1] == 0
    answers = world.run(found_in, ranks, path, str(tmp_path), backend, layout, timeout_s=120)
    for found in answers:  # the same on every rank
        for rows in ("rows", "packed"):
            predictions, metrics, label_ids = found[rows]
            np.testing.assert_allclose(predictions, wanted, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(predictions[:, 1], wanted[:, 1])
            np.testing.assert_array_equal(found[f"{rows} of another loss"], predictions)
            named = {f"test_{key}": float(value) for key, value in counts.items()}
            assert metrics == {"test_loss": pytest.approx(loss, rel=1e-5), **named}
            assert label_ids is None
            named = {f"eval_{key}": float(value) for key, value in counts.items()}
            assert found[f"{rows} evaluated"] == {
                "eval_loss": pytest.approx(loss, rel=1e-5), **named
            }  # fmt: skip
            predictions, metrics = found[f"{rows} of pairs"]
            np.testing.assert_allclose(predictions, pairs, rtol=1e-5, atol=1e-5)
            chosen, rejected = pairs[..., 0].mean(0)
            assert metrics == pytest.approx(
                {"test_logps/chosen": chosen, "test_logps/rejected": rejected}, rel=1e-5
            )


def best_by_a_users_metric(path, out) -> dict:
    """A run whose best step a metric of its own decides, and what else a trainer is given."""
    from transformers import TrainerCallback

    from mca_lite import DPOTrainer, McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model

    events = []

    class Events(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            events.append("prediction_step")
            assert kwargs["eval_dataloader"] is not None

        def on_predict(self, args, state, control, metrics, **kwargs):
            events.append(sorted(metrics))

    def two_parts(logits, labels):
        return logits.argmax(-1), logits.max(-1).values

    def compute(predicted):
        tokens, largest = predicted.predictions
        assert tokens.shape == largest.shape == predicted.label_ids.shape and len(tokens) == 4
        scores.append(len(scores) % 2)
        return {"score": np.float64(scores[-1]), "largest": largest.max()}

    scores: list[int] = []
    keys = dict(eval_strategy="steps", eval_steps=1, save_strategy="no", max_steps=3)
    args = TrainingArguments(
        output_dir=out, disable_tqdm=True, metric_for_best_model="score", **keys
    )
    own = dict(compute_metrics=compute, preprocess_logits_for_metrics=two_parts)
    sets = {"one": tiny.samples(4, seed=2), "two": tiny.samples(4, seed=3)}
    model = load_torch_model(path)
    data = dict(train_dataset=tiny.samples(8), eval_dataset=sets["one"])
    trainer = McaTrainer(model, args, callbacks=[Events], **data, **own)
    trainer.train()
    of_each = trainer.evaluate(sets, metric_key_prefix="each")
    events.clear()
    trainer.predict(sets["two"], metric_key_prefix="held_out")
    seen = list(events)

    def refusal(make, *given, **more) -> str:
        with pytest.raises((ValueError, TypeError)) as refused:
            make(*given, **more)
        return str(refused.value)

    packed = TrainingArguments(output_dir=out, sequence_packing=True, disable_tqdm=True)
    documents = [tiny.samples(2)]
    return {
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "logged": [line["eval_score"] for line in trainer.state.log_history if "eval_loss" in line],
        "of each": sorted(of_each),
        "events": seen,
        "alone": refusal(McaTrainer, model, packed, compute_metrics=compute),
        "pairs": refusal(DPOTrainer, model, args=packed, train_dataset=Pairs(4), **own),
        "unknown": refusal(McaTrainer, model, args, **data),
        "several": refusal(McaTrainer(model, packed).predict, documents),
        "sets": refusal(trainer.predict, sets),
        "endless": refusal(trainer.predict, iter(sets["one"])),
    }


def test_a_users_metric_decides_which_step_is_best_and_predict_has_its_events(path, tmp_path):
    [found] = world.run(best_by_a_users_metric, 1, path, str(tmp_path))
    assert found["best"] == (1.0, 2)
    assert found["logged"][:3] == [0.0, 1.0, 0.0]
    assert found["of each"] == ["each_loss"] + [
        f"each_{name}_{metric}"
        for name in ("one", "two")
        for metric in ("largest", "loss", "score")
    ]
    assert found["events"][-1] == ["held_out_largest", "held_out_loss", "held_out_score"]
    assert set(found["events"][:-1]) == {"prediction_step"}
    assert "expected both functions" in found["alone"] and "logits.argmax(-1)" in found["alone"]
    assert "of pairs an evaluation gives loss, rewards/chosen" in found["pairs"]
    assert "metric_for_best_model" in found["unknown"] and "gives loss" in found["unknown"]
    assert "samples [0] have 2 documents" in found["several"]
    assert "eval_dataset: expected one dataset" in found["sets"] and "got a dict" in found["sets"]
    assert "eval_dataset: expected one dataset with a length" in found["endless"]
    assert "streaming: true" in found["endless"]


def refused_functions(path, out) -> list[str]:
    """Messages about a user's functions without metrics, or without tensors."""
    from mca_lite import McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model

    args, model = TrainingArguments(out, disable_tqdm=True), load_torch_model(path)
    given = [(likeliest, lambda predicted, found=found: found) for found in FOUND]
    given.append((lambda logits, labels: None, right_and_tokens))
    said = []
    for preprocess, compute in given:
        own = dict(compute_metrics=compute, preprocess_logits_for_metrics=preprocess)
        with pytest.raises(ValueError) as refused:
            McaTrainer(model, args, eval_dataset=SAMPLES, **own).evaluate()
        said.append(str(refused.value))
    with pytest.raises(ValueError) as refused:
        McaTrainer(model, args, compute_metrics=5, preprocess_logits_for_metrics=likeliest)
    return [*said, str(refused.value)]


FOUND = (None, [0.5], {5: 1.0}, {"score": None}, {"score": "high"})


def test_functions_that_give_no_metrics_are_named(path, tmp_path):
    [said] = world.run(refused_functions, 1, path, str(tmp_path))
    for found, words in zip(FOUND, said, strict=False):
        assert f"compute_metrics: expected {{name: number}}, got {found!r}" in words
    *_, nothing, number = said
    assert "preprocess_logits_for_metrics: expected a tensor, or a tuple of them" in nothing
    assert "expected both functions, or neither, got 5" in number


BASE = (
    "model_name_or_path={folder}/model dataset={folder}/chat.jsonl do_predict=true "
    "eval_dataset={folder}/chat.jsonl,{folder}/other.jsonl cutoff_len=40 disable_tqdm=true "
    "cache_dir={folder}/cache output_dir={folder}/{name}"
)
RUNS = {
    "trained": "neat_packing=true max_steps=1 save_strategy=no",
    "each": "model_name_or_path={folder}/trained do_train=false eval_on_each_dataset=true "
    "predict_with_generate=true max_new_tokens=3 generation_num_samples=5 do_eval=true",
    "pairs": "model_name_or_path={folder}/trained do_train=false stage=dpo "
    "dataset={folder}/pairs.jsonl eval_dataset={folder}/pairs.jsonl",
}


def test_do_predict_writes_each_sample_of_the_evaluation_sets_once(tmp_path):
    save_all(tmp_path, "llama", num_hidden_layers=2)
    world.run(run_all, 1, BASE, RUNS, str(tmp_path), timeout_s=120)

    def lines(name: str) -> list[dict]:
        return [json.loads(line) for line in (tmp_path / name / "predictions.jsonl").open()]

    trained, each, pairs = lines("trained"), lines("each"), lines("pairs")
    assert [line["index"] for line in trained] == [*range(24)]
    assert [(line.pop("dataset"), line["index"]) for line in each] == [
        *(("chat", i) for i in range(12)), *(("other", i) for i in range(12))
    ]  # fmt: skip
    for packed, alone in zip(trained, each, strict=True):
        assert packed["tokens"] == alone["tokens"] > 0
        assert packed["logp"] == pytest.approx(alone["logp"], rel=1e-4)
        assert alone["mean_logp"] == pytest.approx(alone["logp"] / alone["tokens"])
    answers = (tmp_path / "each" / "generations.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in answers]
    assert [line["index"] for line in answers] == [*range(5), *range(5)]
    assert answers[0]["expected"].split()[:2] == ["w0", "w1"]
    assert answers[0]["prompt"].endswith("assistant") or "w1" in answers[0]["prompt"]
    assert all(len(line["answer"].split()) <= 3 for line in answers)
    assert any(line["answer"] for line in answers)
    metrics = json.loads((tmp_path / "each" / "eval_results.json").read_text())
    of_all = [metrics[f"eval_{name}_rouge_l"] for name in ("chat", "other")]
    assert metrics["eval_rouge_l"] == pytest.approx(sum(of_all) / 2)
    assert {"eval_exact_match", "eval_chat_exact_match", "eval_loss"} < set(metrics)
    assert not list((tmp_path / "each").rglob("*.safetensors"))
    assert [line["index"] for line in pairs] == [*range(12)]
    assert all(line["chosen"]["tokens"] > 0 > line["rejected"]["logp"] for line in pairs)
    assert Path(tmp_path / "trained" / "model.safetensors").is_file()
