"""Answers that the model writes in an evaluation: those of transformers' generate, in every layout,
and how they are compared.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mca_lite.files import GENERATION_METRICS
from tests.shared import tiny, world
from tests.shared.layouts import PP2, TP2
from tests.shared.toy_tokenizer import word_tokenizer

WORDS, NEW = 60, 6
RUNS = {"torch_dp2": ("torch", {}), "tp2_lora": ("megatron", TP2), "pp2": ("megatron", PP2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.shared.lora_tools import peft_model

    folder = tmp_path_factory.mktemp("generate")
    path = tiny.save_model(folder / "model", "llama", vocab_size=WORDS)
    word_tokenizer().save_pretrained(path)
    adapted = peft_model(path, ["q_proj", "down_proj"])
    adapted.save_pretrained(folder / "adapter")
    return folder


def answers_of_transformers(folder, with_adapter: bool) -> list[tuple[list, list]]:
    """(prompt, its greedy continuation) of five prompts of unequal length, each alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    if with_adapter:
        model = PeftModel.from_pretrained(model, folder / "adapter")
    generator, found = np.random.default_rng(5), []
    for length in (3, 7, 4, 5, 9):
        prompt = generator.integers(4, WORDS, length).tolist()
        written = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, length, dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=[0, 1],
            pad_token_id=0,
        )
        found.append((prompt, written[0, length:].tolist()))
    return found


def samples_of(answers) -> list[dict]:
    """Samples of two turns, the second one answered so; every other answer begins otherwise, and
    the first one has trained tokens behind its end."""
    samples = []
    for number, (prompt, answer) in enumerate(answers):
        if number % 2:
            answer = [(answer[0] + 1) % 50 + 4, *answer[1:]]
        elif number == 0:
            answer = [*answer, 1, 7]  # the end of the turn, and what a template writes behind it
        tokens = prompt + answer
        labels = [-100] * (len(prompt) - 1) + answer
        labels[0] = tokens[1]  # an earlier turn that is trained
        samples.append({"input_ids": tokens[:-1], "labels": labels})
    return [*samples, {"input_ids": [4, 5], "labels": [-100, -100]}]


def evaluated(folder, out, backend, layout, samples) -> tuple[dict, list, list]:
    from mca_lite import AutoModel, McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model
    from mca_lite.part_lora import load_adapter
    from mca_lite.tool_generation import Answers

    args = TrainingArguments(
        output_dir=out, disable_tqdm=True, predict_with_generate=True, max_new_tokens=NEW,
        per_device_eval_batch_size=2, **layout,
    )  # fmt: skip
    path = str(folder / "model")
    load = load_torch_model if backend == "torch" else lambda p: AutoModel.from_pretrained(p, args)
    model = load(path)
    if layout == TP2:
        model = load_adapter(model, str(folder / "adapter"))
    sets = {"a": samples, "b": samples[:1]}
    trainer = McaTrainer(model, args, word_tokenizer(), eval_dataset=sets, callbacks=[Answers])
    metrics = trainer.evaluate()
    args.generation_num_samples = 3  # of which one rank has the first and the last
    left = sorted(p.name for p in out.iterdir())
    answers = trainer.answers.generate(samples)
    args.generation_num_samples = None
    return metrics, answers, left, trainer.predict(samples, metric_key_prefix="predict").metrics


def longest_common(a: list, b: list) -> int:
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    for i, j in np.ndindex(len(a), len(b)):
        longer = max(table[i, j + 1], table[i + 1, j])
        table[i + 1, j + 1] = table[i, j] + 1 if a[i] == b[j] else longer
    return int(table[-1, -1])


@pytest.mark.parametrize("name", RUNS)
def test_answers_are_those_of_transformers_generate(folder, tmp_path, name):
    backend, layout = RUNS[name]
    answers = answers_of_transformers(folder, with_adapter=layout == TP2)
    samples = samples_of(answers)
    assert any(len(set(answer)) > 2 for _, answer in answers)
    results = world.run(
        evaluated, 2, folder, tmp_path, backend, layout, samples, timeout_s=120
    )  # fmt: skip
    words = word_tokenizer().convert_ids_to_tokens
    wanted = [" ".join(w for w in words(answer) if w[0] != "<") for _, answer in answers]
    overlaps = []
    for sample, (prompt, answer) in zip(samples, answers, strict=False):
        label = sample["labels"][len(prompt) - 1 :][: len(answer)]
        a, b = ([t for t in ids if t > 3] for ids in (answer, label))
        overlaps.append(2 * longest_common(a, b) / (len(a) + len(b)))
    for metrics, first, left, predicted in results:
        assert predicted["predict_loss"] == pytest.approx(metrics["eval_a_loss"], rel=1e-5)
        assert predicted["predict_exact_match"] == metrics["eval_a_exact_match"]
        assert predicted.keys() == {f"predict_{key}" for key in ("loss", *GENERATION_METRICS)}
        assert metrics["eval_a_exact_match"] == 3 / 5 and metrics["eval_b_exact_match"] == 1
        assert metrics["eval_exact_match"] == 4 / 6
        assert metrics["eval_a_rouge_l"] == pytest.approx(np.mean(overlaps))
        assert [(one["index"], one["answer"]) for one in first] == [*enumerate(wanted[:3])]
        assert first[0]["prompt"] == " ".join(words(answers[0][0]))
        assert ".generate" not in left


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence():
    from mca_lite.tool_generation import rouge_l

    generator = np.random.default_rng(0)
    for _ in range(200):
        a, b = (generator.integers(0, 5, generator.integers(1, 90)).tolist() for _ in "ab")
        wanted = 2 * longest_common(a, b) / (len(a) + len(b))
        assert rouge_l(" ".join(map(str, a)), " ".join(map(str, b))) == pytest.approx(wanted)
    assert rouge_l("The cat, sat!", "the CAT sat") == 1
    assert rouge_l("police killed the gunman", "police kill the gunman") == 0.75
    assert rouge_l("我喜欢猫", "我喜欢狗") == 0.75
    assert rouge_l("", "") == 1 and rouge_l("", "a") == rouge_l("a", "...") == 0


def test_the_last_answer_is_asked_for():
    from mca_lite.tool_generation import last_turn

    turns = {"input_ids": [5, 6, 7, 8, 9], "labels": [6, -100, 8, 9, 10]}
    assert last_turn(turns) == ([5, 6, 7], [8, 9, 10])
    assert last_turn({**turns, "labels": [-100, -100, 8, -100, -100]}) == ([5, 6, 7], [8])
    assert last_turn({**turns, "labels": [-100] * 5}) is None
    # of four answers, with a shorter and a longer turn between
    many = {"input_ids": [*range(10, 21)], "labels": [11, *[-100] * 2, 14, 15, *[-100] * 3, 19]}
    many["labels"] += [-100, 21]
    assert last_turn(many) == ([*range(10, 21)], [21])
    three = {"input_ids": many["input_ids"], "labels": [*many["labels"][:9], 20, 21]}
    assert last_turn(three) == ([*range(10, 19)], [19, 20, 21])


def test_a_model_that_one_rank_cannot_hold_is_refused(folder, monkeypatch):
    from mca_lite import tool_generation

    config = tiny.hf_config("qwen3", vocab_size=WORDS)
    backend = SimpleNamespace(name="megatron", hf_config=config.to_dict(), dtype=torch.float32)
    monkeypatch.setattr(tool_generation, "free_memory", lambda: 4 * 32_000)
    monkeypatch.setattr(tool_generation.parallel, "largest", lambda *numbers: [*numbers])
    with pytest.raises(ValueError, match="a copy of the whole model takes 0.0 GiB on each rank"):
        tool_generation.check_room(backend)
    monkeypatch.undo()
    assert tool_generation.free_memory() > 2**20
    monkeypatch.setattr(tool_generation.parallel, "largest", lambda *numbers: [*numbers])
    tool_generation.check_room(backend)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(compute_metrics=print, preprocess_logits_for_metrics=print), "one of the two"),
        (dict(documents_per_sample=2), "a pair has two answers"),
        (dict(tokenizer=None), "give the trainer a tokenizer"),
        (dict(metric="bleu"), "gives loss, exact_match, rouge_l"),
    ],
)
def test_generation_that_cannot_be_compared_is_refused_when_the_trainer_is_made(given, said):
    from mca_lite import TrainingArguments
    from mca_lite.tool_generation import Answers
    from mca_lite.trainer_evaluation import Evaluator

    metric = given.pop("metric", "rouge_l")
    args = TrainingArguments(
        output_dir="unused", predict_with_generate=True, eval_strategy="epoch",
        metric_for_best_model=metric,
    )  # fmt: skip

    def check(**more) -> None:
        parts = dict(
            args=args, tokenizer=word_tokenizer(), compute_metrics=None, documents_per_sample=1,
            preprocess_logits_for_metrics=None, metrics_keys=["loss"], answers=None,
            backend=SimpleNamespace(name="torch"), eval_dataset=None,
        )  # fmt: skip
        trainer = SimpleNamespace(**{**parts, **more})
        Answers().on_init_end(args, None, None, trainer)
        Evaluator(trainer).check()

    if metric == "rouge_l":
        check()
    with pytest.raises(ValueError, match=said):
        check(**given)


def test_predict_with_generate_names_the_callback_that_it_needs(folder):
    from mca_lite import McaTrainer, TrainingArguments, parallel
    from mca_lite.model import load_torch_model

    args = TrainingArguments(output_dir="unused", predict_with_generate=True)
    with pytest.raises(ValueError, match=r"callbacks=\[mca_lite.tool_generation.Answers"):
        McaTrainer(load_torch_model(str(folder / "model")), args, word_tokenizer())
    parallel.shutdown()  # tests of other files start a world in this process
