"""The loop: its objective against plain code, evaluation, callbacks, precision, and what users call
from Python.
"""

import functools
import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.shared import tiny, world
from tests.shared.files import tensors
from tests.shared.fixtures import saved_model
from tests.shared.layouts import CP2, DIST_OPT, PP2, SP, TP2, VPP2
from tests.shared.training import BRIEF, COUNT, GLOBAL_BATCH, assert_same_curve, read_log, train

model_path = saved_model("qwen3")


def plain_loop(path: str, steps: int) -> list[tuple[float, float]]:
    """The run of tests.shared.training.train in thirty lines of plain torch: one sample at a time,
    HF's logits, own shuffle.
    """
    import numpy as np
    from transformers import AutoModelForCausalLM

    model, data = AutoModelForCausalLM.from_pretrained(path), tiny.samples(COUNT)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-5)
    curve, order = [], []
    for step in range(steps):
        for group in optimizer.param_groups:  # warm-up of one step, then a cosine from 1e-2 to 1e-3
            rho = (step - 1) / (steps - 1)
            group["lr"] = 0.0 if step == 0 else 1e-3 + 9e-3 * (1 + math.cos(math.pi * rho)) / 2
        if not order:
            epoch = step // 3
            order = np.random.default_rng([42, epoch]).permutation(len(data)).tolist()
        chosen, order = order[:GLOBAL_BATCH], order[GLOBAL_BATCH:]
        total, count = 0.0, 0
        for i in chosen:
            logits = model(data[i]["input_ids"][None]).logits[0].float()
            total = total + F.cross_entropy(
                logits, data[i]["labels"], ignore_index=-100, reduction="sum"
            )
            count += int((data[i]["labels"] != -100).sum())
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((float(total) / count, float(norm)))
    return curve


def test_torch_backend_trains_as_a_plain_loop(model_path, tmp_path):
    [got] = world.run(train, 1, model_path, str(tmp_path), backend="torch")
    assert_same_curve(got, world.run(plain_loop, 1, model_path, 4)[0])


def samples_of_steps() -> list[list[int]]:
    """The first four steps of tests.shared.training.train: 4, 4 and 3 samples, then 4 of the next
    epoch.
    """
    import numpy as np

    orders = [np.random.default_rng([42, epoch]).permutation(COUNT) for epoch in range(2)]
    windows = ((orders[0], 0), (orders[0], 4), (orders[0], 8), (orders[1], 0))
    return [order[at : at + GLOBAL_BATCH].tolist() for order, at in windows]


def lengths_of_steps() -> list[list[int]]:
    """Lengths of the samples in each of the same steps."""
    lengths = [len(sample["labels"]) for sample in tiny.samples(COUNT)]
    return [[lengths[i] for i in step] for step in samples_of_steps()]


def trained_tokens() -> list[int]:
    """Labels in each of the same steps."""
    counts = [int((sample["labels"] != -100).sum()) for sample in tiny.samples(COUNT)]
    return [sum(counts[i] for i in step) for step in samples_of_steps()]


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_a_log_line_is_the_mean_per_trained_token_of_exactly_its_steps(
    model_path, tmp_path, backend
):
    [steps] = world.run(train, 1, model_path, str(tmp_path / "each"), backend=backend)
    world.run(train, 2, model_path, str(tmp_path / "pairs"), backend=backend, logging_steps=2)
    tokens = trained_tokens()
    wanted = [
        sum(steps[i][0] * tokens[i] for i in pair) / sum(tokens[i] for i in pair)
        for pair in ((0, 1), (2, 3))
    ]
    assert [line["loss"] for line in read_log(tmp_path / "pairs")] == pytest.approx(
        wanted, rel=1e-5
    )


DROPOUT = dict(attention_dropout=0.5, hidden_dropout=0.5)  # of training alone


def plain_eval(path: str) -> float:
    from transformers import AutoModelForCausalLM

    model, total, count = AutoModelForCausalLM.from_pretrained(path), 0.0, 0
    for sample in tiny.samples(9, seed=2):
        with torch.no_grad():
            logits = model(sample["input_ids"][None]).logits[0]
        total += float(
            F.cross_entropy(logits, sample["labels"], ignore_index=-100, reduction="sum")
        )
        count += int((sample["labels"] != -100).sum())
    return total / count


@pytest.mark.parametrize(
    "ranks, keys", [(1, DROPOUT), (2, {}), (2, PP2), (2, {**TP2, **SP}), (2, {**PP2, **VPP2})]
)
def test_evaluation_is_sum_over_count_of_the_whole_set(model_path, tmp_path, ranks, keys):
    keys = dict(keys, eval_strategy="steps", eval_steps=1, steps=1, per_device_eval_batch_size=2)
    keys.update(
        learning_rate=1e-12, lr_scheduler_type="constant", lr_scheduler_kwargs={}, warmup_steps=0
    )
    wanted = world.run(plain_eval, 1, model_path)[0]
    for curve in world.run(train, ranks, model_path, str(tmp_path), **keys):
        name, value = curve[-1]
        assert name == "eval" and abs(value - wanted) < 1e-5


@pytest.mark.parametrize("packing", [False, True])
def test_samples_and_work_are_counted_without_fillers_and_padding(tmp_path, packing):
    """FLOPs by hand: 6 for each weight of a matrix, and the half of the scores that each document's
    tokens see.
    """
    path = tiny.save_model(tmp_path / "model", "llama")
    keys = dict(per_device_train_batch_size=2, sequence_packing=packing)
    world.run(train, 1, path, str(tmp_path), **keys)
    log = read_log(tmp_path)
    assert [line["consumed_samples"] for line in log] == [4, 8, 11, 15]
    shapes = {name: tensor.shape for name, tensor in tensors(path).items()}
    weights = sum(s.numel() for n, s in shapes.items() if len(s) == 2 and "embed" not in n)
    for line, lengths in zip(log, lengths_of_steps(), strict=True):
        seen = sum(n * n for n in lengths) / sum(lengths)  # tokens that a token sees, twice
        core = (
            4 * 3 * 2 * seen * 4 * (8 + 8) / 2
        )  # 4 layers, forward and twice backward, 4 heads of 8
        flops = 1e12 * line["tflops_per_device"] / line["tokens_per_second_per_device"]
        assert flops == pytest.approx(6 * weights + core, rel=1e-6)


@pytest.fixture(scope="module")
def on_torch(model_path, tmp_path_factory):
    """run(**keys) -> the BRIEF curve of the torch backend on one rank; each is made once."""

    @functools.cache
    def run(**keys):
        out = str(tmp_path_factory.mktemp("torch"))
        return world.run(train, 1, model_path, out, backend="torch", **keys, **BRIEF)[0]

    return run


MEAN = dict(calculate_per_token_loss=False)


@pytest.mark.parametrize(
    "ranks, keys",
    [(2, {}), (2, TP2), (2, {**PP2, **VPP2}), (2, dict(use_distributed_optimizer=True))],
)
def test_mean_of_micro_batches_agrees_with_the_torch_backend(
    model_path, on_torch, tmp_path, ranks, keys
):
    """One sample a micro-batch: the mean of 4 means, and of 3 in the last step of the epoch,
    fillers left out.
    """
    wanted, per_token = on_torch(**MEAN), on_torch()
    assert abs(wanted[1][1] - per_token[1][1]) > 1e-3, (
        "the two objectives do not differ on this data"
    )
    for got in world.run(train, ranks, model_path, str(tmp_path), **keys, **MEAN, **BRIEF):
        assert_same_curve(got, wanted)


def norm_of_means(path: str, micro_batches: list[list[dict]]) -> float:
    """The gradient norm of the mean over micro-batches of their means over labels."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    for samples in micro_batches:
        logits = torch.cat([model(sample["input_ids"][None]).logits[0] for sample in samples])
        labels = torch.cat([sample["labels"] for sample in samples])
        (F.cross_entropy(logits, labels) / len(micro_batches)).backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters()]
    return float(torch.cat(gradients).norm())


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_a_micro_batch_that_is_partly_filled_counts_as_one(model_path, tmp_path, backend):
    """Of five samples, two a micro-batch, the third has one beside a filler, on either rank."""
    data = tiny.samples(5)
    [wanted] = world.run(norm_of_means, 1, model_path, [data[:2], data[2:4], data[4:]])
    keys = dict(MEAN, backend=backend, steps=1, warmup_steps=0, global_batch_size=8)
    keys |= dict(data=data, per_device_train_batch_size=2)
    for [(_, norm)] in world.run(train, 2, model_path, str(tmp_path), **keys):
        assert norm == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "keys",
    [dict(optim="sgd", learning_rate=0.05), dict(max_grad_norm=0.0), dict(max_grad_norm=50.0)],
)
def test_other_optimizer_settings_agree(model_path, tmp_path, keys):
    keys = {"lr_scheduler_kwargs": {}, "steps": 3, "warmup_steps": 0, **keys}
    [wanted] = world.run(train, 1, model_path, str(tmp_path / "torch"), backend="torch", **keys)
    for got in world.run(train, 2, model_path, str(tmp_path), **TP2, **keys):
        assert_same_curve(got, wanted)


@pytest.mark.parametrize("ranks, keys", [(1, {}), (2, TP2), (2, DIST_OPT), (2, PP2), (2, CP2)])
def test_bf16_follows_the_torch_backend_in_bf16(model_path, on_torch, tmp_path, ranks, keys):
    """bf16 rounds to 3 digits, and megatron keeps residuals in bf16 where autocast keeps them in
    float32: 2 % of the loss.
    """
    wanted = on_torch(bf16=True)
    keys = {**BRIEF, **keys, "bf16": True}
    for got in world.run(train, ranks, model_path, str(tmp_path), **keys):
        for (loss, norm), (loss_torch, norm_torch) in zip(got, wanted, strict=True):
            assert loss == pytest.approx(loss_torch, rel=0.02)
            assert norm == pytest.approx(norm_torch, rel=0.1)


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_fp16_overflow_skips_the_update_and_the_schedule(model_path, tmp_path, backend):
    """A loss scale of 2^32 overflows float16 at once; it halves until it fits, and then training
    goes on.
    """
    keys = dict(fp16=True, steps=30, hysteresis=1, num_train_epochs=20, initial_loss_scale=2.0**32)
    world.run(train, 1, model_path, str(tmp_path), backend=backend, **keys)
    log = read_log(tmp_path)
    skipped = [line["skipped_iter"] for line in log]
    assert skipped[0] == 1 and skipped[-1] == 0
    assert log[0]["learning_rate"] == 0.0, "the schedule moved although nothing was updated"
    assert log[-1]["loss"] < log[0]["loss"]


def train_with_dropout(path, out, **keys):
    return train(path, out, attention_dropout=0.2, hidden_dropout=0.2, **keys)


def test_dropout_is_the_same_on_all_ranks_of_a_model_and_follows_the_seed(model_path, tmp_path):
    keys = dict(TP2, steps=2)
    first = world.run(train_with_dropout, 2, model_path, str(tmp_path / "a"), **keys)
    again = world.run(train_with_dropout, 2, model_path, str(tmp_path / "b"), **keys)
    assert first[0] == first[1] == again[0]
    plain = world.run(train, 2, model_path, str(tmp_path / "plain"), **keys)
    assert first[0][0] != plain[0][0]
    keys |= dict(seed=7, data_seed=42)  # the same samples
    other = world.run(train_with_dropout, 2, model_path, str(tmp_path / "other"), **keys)
    assert other[0][0] not in (first[0][0], plain[0][0])


@pytest.fixture(scope="module")
def on_two_stages(model_path, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("stages"))
    return world.run(train, 2, model_path, out, **PP2, **BRIEF)[0]


@pytest.mark.parametrize(
    "keys", [dict(recompute_granularity="full"), dict(recompute_granularity="selective")]
)
def test_recomputation_changes_no_number(model_path, tmp_path, on_two_stages, keys):
    keys = {**BRIEF, **PP2, **keys}
    got = world.run(train, 2, model_path, str(tmp_path), **keys)[0]
    assert_same_curve(got, on_two_stages, 1e-6)


def test_uneven_pipeline_layout_trains_every_layer(model_path, on_torch, tmp_path):
    keys = dict(BRIEF, **PP2, pipeline_model_parallel_layout="Ettt|tL")
    for got in world.run(train, 2, model_path, str(tmp_path), **keys):
        assert_same_curve(got, on_torch())


# -- the Python interface


def use_as_the_seed_shows(path: str, out: str, backend: str) -> dict:
    """AutoModel, TrainingArguments, tokenizer, a collator that shifts, a dataset with more columns
    than are trained.
    """
    from mca_lite import AutoModel, McaTrainer, Seq2SeqTrainingArguments
    from mca_lite.model import load_torch_model
    from tests.shared.toy_tokenizer import word_tokenizer

    def data_collator(features):
        rows = [f["ids"] for f in features]
        longest = max(len(r) for r in rows) - 1
        batch = {
            k: torch.full((len(rows), longest), v)
            for k, v in (("input_ids", 0), ("labels", -100), ("attention_mask", 0))
        }
        for i, row in enumerate(rows):
            batch["input_ids"][i, : len(row) - 1] = torch.tensor(row[:-1])
            batch["labels"][i, : len(row) - 1] = torch.tensor(row[1:])
            batch["attention_mask"][i, : len(row) - 1] = 1
        return batch

    args = Seq2SeqTrainingArguments(
        output_dir=out,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=5e-3,
        logging_steps=1,
        disable_tqdm=True,
    )
    model = (
        AutoModel.from_pretrained(path, args) if backend == "megatron" else load_torch_model(path)
    )
    dataset = [
        {"ids": list(range(i, i + 6 + i % 3)), "note": "not for the model"} for i in range(10)
    ]
    trainer = McaTrainer(
        model=model,
        args=args,
        tokenizer=word_tokenizer(),
        data_collator=data_collator,
        train_dataset=dataset,
    )
    first = trainer.train()
    final, elsewhere = Path(out, "final"), Path(out, "elsewhere")
    final.mkdir()
    elsewhere.write_text("another run's")
    os.link(elsewhere, final / "tokenizer.json")
    (final / "tokenizer_config.json").symlink_to(elsewhere)
    trainer.save_model(str(final))
    assert elsewhere.read_text() == "another run's"
    assert json.loads((final / "tokenizer_config.json").read_text())["tokenizer_class"]
    args.overwrite_output_dir = True
    again = trainer.train()
    return dict(
        steps=first.global_step,
        losses=[first.training_loss, again.training_loss],
        metrics=sorted(first.metrics),
    )


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_trainer_works_from_python_and_trains_twice(model_path, tmp_path, backend):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    [got] = world.run(use_as_the_seed_shows, 1, model_path, str(tmp_path), backend)
    assert got["steps"] == 9  # 10 samples, 4 a step: 3 steps an epoch, the last of them half full
    assert got["losses"][1] < got["losses"][0]
    assert got["metrics"] == ["train_loss", "train_runtime"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "final")) > 0
    history = json.loads((tmp_path / "trainer_state.json").read_text())
    assert history["global_step"] == 9 and history["log_history"]


def with_batch(path: str, out: str, changes: dict) -> str:
    from mca_lite import AutoModel, McaTrainer, TrainingArguments

    args = TrainingArguments(output_dir=out, disable_tqdm=True)
    batch = {
        "input_ids": torch.ones(1, 4, dtype=torch.long),
        "labels": torch.ones(1, 4, dtype=torch.long),
    }
    batch = {k: v for k, v in {**batch, **changes}.items() if v is not None}
    trainer = McaTrainer(
        AutoModel.from_pretrained(path, args),
        args,
        data_collator=lambda _: dict(batch),
        train_dataset=[0],
    )
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"labels": None}, "labels"),
        ({"labels": torch.ones(1, 3, dtype=torch.long)}, "have the shapes"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "padding_side"),
        ({"attention_mask": torch.tensor([[1, 2, 1, 1]])}, "numbers of documents that fall"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "position_ids"),
        ({"pixel_values": torch.ones(1, 3)}, "the model reads text: its config.json has no"),
        ({"input_ids": torch.full((1, 4), 61)}, "from 61 to 61: expected 0 to 60"),
        ({name: torch.ones(1, 129).long() for name in ("input_ids", "labels")}, "128 positions"),
    ],
)
def test_a_batch_that_would_train_wrong_is_refused(model_path, tmp_path, changes, words):
    assert words in world.run(with_batch, 1, model_path, str(tmp_path), changes)[0]


def train_after_inference(path: str, out: str) -> float:
    from mca_lite import AutoModel, TrainingArguments

    model = AutoModel.from_pretrained(path, TrainingArguments(output_dir=out))
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.inference_mode():
        wanted = model(ids, labels=ids)
    losses = model(ids, labels=ids)
    assert torch.equal(losses, wanted)
    losses.sum().backward()
    return max(float(p.grad.abs().max()) for p in model.parameters())


def test_a_model_trains_after_a_forward_pass_in_inference_mode(model_path, tmp_path):
    assert world.run(train_after_inference, 1, model_path, str(tmp_path))[0] > 0


def test_a_dataset_without_a_length_is_refused(model_path, tmp_path):
    said = world.run(with_dataset, 1, model_path, str(tmp_path))[0]
    assert all("with a length" in one for one in said) and "got a dict" in said[1]


def with_dataset(path: str, out: str) -> list[str]:
    from mca_lite import AutoModel, McaTrainer, TrainingArguments

    args = TrainingArguments(output_dir=out)
    trainer = McaTrainer(AutoModel.from_pretrained(path, args), args, train_dataset=iter([1]))
    said = []
    for use in (trainer.train, lambda: trainer.evaluate({})):
        with pytest.raises(ValueError) as error:
            use()
        said.append(str(error.value))
    unlabelled = {"input_ids": [1, 2, 3], "labels": [-100] * 3}
    assert trainer.evaluate([unlabelled]) == {}
    return said


# -- callbacks


def second_trainer(path: str, out: str, overlap_grad_reduce: bool) -> str:
    from mca_lite import AutoModel, McaTrainer, TrainingArguments

    options = dict(max_steps=1, save_strategy="no", overlap_grad_reduce=overlap_grad_reduce)
    args = TrainingArguments(output_dir=out, **options)
    model = AutoModel.from_pretrained(path, args)
    for _ in range(2):
        try:
            McaTrainer(model=model, args=args, train_dataset=tiny.samples(2)).train()
        except ValueError as error:
            return str(error)
    return "both trained"


def test_a_second_trainer_is_refused_where_the_hooks_of_the_first_would_meet_it(
    model_path, tmp_path
):
    said = [
        world.run(second_trainer, 1, model_path, str(tmp_path / str(overlap)), overlap)[0]
        for overlap in (False, True)
    ]
    assert said[0] == "both trained" and "load the model again for a second one" in said[1]


def of_another_precision(path: str, out: str) -> str:
    from mca_lite import AutoModel, McaTrainer, TrainingArguments
    from tests.shared.training import refusal

    model = AutoModel.from_pretrained(path, TrainingArguments(output_dir=out))
    args = TrainingArguments(output_dir=out, bf16=True)
    return refusal(McaTrainer, model, args, train_dataset=tiny.samples(2))


def test_arguments_of_another_precision_than_the_models_are_refused(model_path, tmp_path):
    [said] = world.run(of_another_precision, 1, model_path, str(tmp_path))
    assert said == "args: bf16, the model: torch.float32: make it with these"


def earlier_of_two(path: str, out: str, backend: str) -> list:
    """What the first of two trainers of a model says, and the (loss, gradient norm) of what trains;
    a refused one changes nothing."""
    from mca_lite import AutoModel, McaTrainer, TrainingArguments, parallel
    from mca_lite.model import load_torch_model
    from tests.shared.training import refusal

    args = TrainingArguments(output_dir=out, max_steps=1, save_strategy="no")
    parallel.initialize(args, backend == "megatron")
    found = []
    for _ in range(2):
        model = AutoModel.from_pretrained(path, args) if backend == "megatron" else None
        model = model or load_torch_model(path)
        data = tiny.samples(2)
        first = McaTrainer(model, args, train_dataset=data)
        if found:
            second = McaTrainer(model, args, train_dataset=data)
            found.append(refusal(first.train))
            first = second
        elif backend == "megatron":
            other = TrainingArguments(output_dir=out, bf16=True)
            assert "make it with these" in refusal(McaTrainer, model, other)
        first.train()
        line = first.state.log_history[0]
        found.append((line["loss"], line["grad_norm"]))
    return found


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_the_earlier_of_two_trainers_of_a_model_does_not_train_it(model_path, tmp_path, backend):
    """On megatron-core its gradients would go to the later one's buffers, and be clipped and
    stepped undivided. Plain torch has no such buffers."""
    [[alone, said, later]] = world.run(earlier_of_two, 1, model_path, str(tmp_path), backend)
    if backend == "megatron":
        assert "a later trainer of this model has its gradients" in said and later == alone
    else:
        assert said == ""


def record_events(path: str, out: str, **keys) -> dict:
    import mca_lite.trainer as module
    from mca_lite import TrainerCallback, TrainingArguments
    from mca_lite.model import load_torch_model

    events = []

    class Recorder(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            events.append(f"step {state.global_step}")

        def on_log(self, args, state, control, logs, **kwargs):
            events.append("log")

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            events.append("evaluate")

        def on_save(self, args, state, control, path, **kwargs):
            events.append("save")

        def on_train_end(self, args, state, control, **kwargs):
            events.append("end")

    args = TrainingArguments(
        output_dir=out, per_device_train_batch_size=8, disable_tqdm=True, **keys
    )
    trainer = module.McaTrainer(
        load_torch_model(path),
        args,
        train_dataset=tiny.samples(),
        eval_dataset=tiny.samples(9, seed=2),
        callbacks=[Recorder()],
    )
    trainer.train()
    with torch.no_grad():
        final = trainer.evaluate()["eval_loss"]
    return dict(events=events, state=vars(trainer.state), final=final)


def test_callbacks_are_called_in_order(model_path, tmp_path):
    keys = dict(max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=2, save_steps=4)
    [got] = world.run(record_events, 1, model_path, str(tmp_path), **keys)
    wanted = [
        "step 1",
        "step 2",
        "log",
        "evaluate",
        "step 3",
        "step 4",
        "log",
        "evaluate",
        "save",
        "end",
    ]
    assert got["events"][: len(wanted)] == wanted


def test_a_better_evaluation_is_saved_only_where_the_best_model_is_wanted(model_path, tmp_path):
    keys = dict(max_steps=3, eval_strategy="steps", eval_steps=1, logging_steps=1)
    world.run(record_events, 1, model_path, str(tmp_path / "plain"), save_strategy="no", **keys)
    assert not list((tmp_path / "plain").glob("checkpoint-*"))


def test_early_stopping_and_the_best_checkpoint_at_the_end(model_path, tmp_path):
    keys = dict(
        max_steps=40, learning_rate=0.05, lr_scheduler_type="constant", eval_strategy="steps",
        eval_steps=1, save_steps=1,
        early_stopping_patience=2, load_best_model_at_end=True, save_total_limit=2,
    )  # fmt: skip
    [got] = world.run(record_events, 1, model_path, str(tmp_path), **keys)
    state = got["state"]
    assert state["global_step"] < 40
    assert state["best_global_step"] == state["global_step"] - 2
    assert got["final"] == pytest.approx(state["best_metric"], abs=1e-6)
    left = sorted(p.name for p in tmp_path.glob("checkpoint-*"))
    assert left == sorted(
        f"checkpoint-{n}" for n in (state["best_global_step"], state["global_step"])
    )


def refused_units(path: str) -> str:
    from mca_lite import AutoModel, TrainingArguments

    args = TrainingArguments(
        output_dir="unused", recompute_granularity="full", recompute_num_layers=3
    )
    with pytest.raises(ValueError) as error:
        AutoModel.from_pretrained(path, args)
    return str(error.value)


def test_units_of_recomputation_that_do_not_divide_a_stage_are_refused(tmp_path):
    path = tiny.save_model(tmp_path / "model", "qwen3", num_hidden_layers=4)
    assert "does not divide the 4 layers" in world.run(refused_units, 1, path)[0]


def freeze_embedding(model):
    for name, parameter in model.named_parameters():
        if "embed" in name:
            parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize("keys", [{}, PP2], ids=["one", "pp2"])
def test_layers_above_a_frozen_embedding_learn_under_recomputation(tmp_path, keys):
    path = tiny.save_model(tmp_path / "model", "llama")
    frozen = dict(BRIEF, adapt=freeze_embedding)
    [wanted] = world.run(train, 1, path, str(tmp_path / "torch"), backend="torch", **frozen)
    frozen.update(keys, recompute_granularity="full")
    ranks = 2 if keys else 1
    got = world.run(train, ranks, path, str(tmp_path / "full"), **frozen)
    assert_same_curve(got[0], wanted)


def train_on_other_labels(path: str, out: str) -> dict:
    """Curves of trainers whose hook changes the labels in one way or another, or not at all."""
    from mca_lite import McaTrainer

    def other(inputs):  # as many labels count, in other places
        return torch.roll(inputs["labels"], 1, -1)

    class Replaced(McaTrainer):
        def _prepare_train_inputs(self, data_iterator):
            inputs = super()._prepare_train_inputs(data_iterator)
            return {**inputs, "labels": other(inputs)}

    class InPlace(McaTrainer):
        def _prepare_train_inputs(self, data_iterator):
            inputs = super()._prepare_train_inputs(data_iterator)
            inputs["labels"].copy_(other(inputs))
            return inputs

    class WithoutPlaces(Replaced):
        def _prepare_train_inputs(self, data_iterator):
            return {**super()._prepare_train_inputs(data_iterator), "trained": None}

    return {
        kind.__name__: train(path, f"{out}/{kind.__name__}", trainer_class=kind)
        for kind in (McaTrainer, Replaced, InPlace, WithoutPlaces)
    }


def test_a_hook_may_change_the_labels_after_their_places_were_noted(tmp_path):
    path = tiny.save_model(tmp_path / "model", "qwen3")
    [curves] = world.run(train_on_other_labels, 1, path, str(tmp_path))
    plain, replaced, in_place, wanted = curves.values()
    assert replaced == in_place == wanted
    assert wanted != plain
