"""Forward passes over a data set: evaluation, the log-probabilities of its samples, and what a
user's compute_metrics makes of the model's logits.

A sample is a document, or a pair of them. In what is found of samples, packs are taken apart, so
that each sample comes once, under its number in the data set, in whichever layout and order it was
computed.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from . import parallel
from .args_rules import check_metric
from .batch import Targets, real_documents
from .data_batches import FILLER, BatchPlan, make_loader, samples_of
from .data_files import SIDES
from .errors import Judge
from .files import GENERATION_METRICS, IGNORE_INDEX
from .generation import check_room, generate, scores
from .trainer_events import EvalLoopOutput, Numbers, plan_batches


def check_metrics(trainer) -> None:
    """ValueError for metrics that an evaluation cannot give."""
    compute = trainer.compute_metrics
    preprocess = trainer.preprocess_logits_for_metrics
    for function in (compute, preprocess):
        if function is not None and not callable(function):
            raise TypeError(f"compute_metrics: expected functions, got {function!r}")
    if (compute is None) != (preprocess is None):
        raise ValueError(
            "compute_metrics and preprocess_logits_for_metrics go together, as the logits of a "
            "whole data set are not held: preprocess_logits_for_metrics=lambda logits, labels: "
            "logits.argmax(-1) keeps the likeliest tokens"
        )
    if compute is not None and trainer.documents_per_sample > 1:
        raise ValueError(
            "compute_metrics is for samples of one text: of pairs an evaluation gives "
            f"{', '.join(trainer.metrics_keys)}"
        )
    names = tuple(trainer.metrics_keys)
    if trainer.args.predict_with_generate:
        _check_generation(trainer)
        names += GENERATION_METRICS
    judge = Judge(trainer.args)
    if compute is None:
        sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else ()
        check_metric(trainer.args, names, sets, judge)
    judge.close()


def _check_generation(trainer) -> None:
    if trainer.compute_metrics is not None:
        reason = "compute_metrics is given logits, and generate's tokens go into exact_match and "
        raise ValueError(f"predict_with_generate: {reason}rouge_l: one of the two")
    if trainer.documents_per_sample > 1:
        raise ValueError("predict_with_generate: a pair has two answers: set it to false")
    if trainer.tokenizer is None:
        raise ValueError("predict_with_generate: give the trainer a tokenizer, to compare texts")
    check_room(trainer)


def evaluate(trainer, dataset, prefix: str) -> dict[str, float]:
    """Metrics over the whole set, named <prefix>_<metric>; of a dict, over all of its sets, and
    over each, named <prefix>_<its name>_<metric>. Collective."""
    if isinstance(dataset, dict):
        found = []
        answers = []
        for name, part in dataset.items():
            one, written = _measure(trainer, part, f"{prefix}_{name}")
            found.append(one)
            answers += written
        metrics = _named(sum((one.numbers for one in found), trainer._numbers()), prefix)
        if trainer.args.predict_with_generate:
            metrics.update(scores(answers, prefix))
        for one in found:
            metrics.update(one.metrics)
    else:
        metrics = _measure(trainer, dataset, prefix)[0].metrics
    line = {"step": trainer.state.global_step, "epoch": trainer.state.epoch, **metrics}
    trainer.state.log_history.append(line)
    trainer.report.log(line)
    trainer._notify("on_evaluate", metrics=metrics)
    return metrics


def _measure(trainer, dataset, prefix: str) -> tuple[EvalLoopOutput, list[dict]]:
    """(the numbers of a set, the answers that were generated for it)"""
    loader = _loader_of(trainer, dataset)
    answers = []
    found = trainer.evaluation_loop(loader, "evaluation", metric_key_prefix=prefix)
    if trainer.compute_metrics is not None:
        found.metrics.update(user_metrics(trainer, dataset, prefix))
    if trainer.args.predict_with_generate:
        answers = generate(trainer, dataset)
        found.metrics.update(scores(answers, prefix))
    return found, answers


def _named(numbers: Numbers, prefix: str) -> dict[str, float]:
    return {f"{prefix}_{key}": value for key, value in numbers.means().items()}


@torch.no_grad()
def run_loop(trainer, dataloader, prefix: str) -> EvalLoopOutput:
    """Forward passes over a loader of make_loader's kind. Collective."""
    plan = getattr(dataloader.batch_sampler, "plan", None)
    whole = trainer._numbers()
    if plan is None:
        raise ValueError(
            "evaluation_loop takes a loader of get_train_dataloader()'s kind; for a dataset call "
            "evaluate(dataset)"
        )
    for _, data, seq_length, numbers in _steps(trainer, dataloader, plan):
        data = trainer._prepare_micro_batches(data, seq_length)
        metrics = _forward(trainer, trainer.forward_step, data, seq_length)
        whole = whole + numbers.add_metrics(metrics)
    whole = trainer._over_ranks(whole)
    return EvalLoopOutput(None, None, _named(whole, prefix), plan.num_samples, whole)


# -- passes over a data set


def _loader_of(trainer, dataset):
    plan = plan_batches(trainer, dataset, training=False)
    return make_loader(dataset, trainer.data_collator, plan, num_epochs=1)


def _steps(trainer, loader, plan: BatchPlan) -> Iterator[tuple[int, list[dict], int, Numbers]]:
    """(number, micro-batches, length, counts) of each step, while the model is in evaluation."""
    trainer._loaders["eval_dataloader"], batches = loader, iter(loader)
    trainer.backend.train_mode(False)
    for step in range(plan.steps_per_epoch):
        yield step, *trainer._get_step_iterator_and_seq_length(batches, plan, step)
    trainer._loaders["eval_dataloader"] = None
    trainer.backend.train_mode(True)


def _forward(trainer, forward_step: Callable, data: list[dict], seq_length: int) -> list:
    """What the forward_step finds of each micro-batch; [] on pipeline stages before the last."""
    found = trainer.backend.forward_backward(forward_step, data, seq_length, forward_only=True)
    trainer._notify("on_prediction_step")
    return found


def passes(trainer, dataset, run: Callable[[list[dict], int], list]) -> Iterator[list[tuple]]:
    """[(numbers of the samples, what run(micro-batches, length) found)] of the micro-batches of
    each step, on this rank; [] on pipeline stages before the last. Collective."""
    loader = _loader_of(trainer, dataset)
    per_sample = trainer.documents_per_sample
    plan = loader.batch_sampler.plan
    for step, data, seq_length, _ in _steps(trainer, loader, plan):
        chosen = [[n for n in numbers if n != FILLER] for numbers in plan.step(0, step)]
        for numbers, batch in zip(chosen, data, strict=False):  # empty ones follow
            _check_documents(batch, numbers, per_sample)
        yield list(zip(chosen, run(data, seq_length), strict=False))


def _check_documents(batch: dict, numbers: list[int], per_sample: int) -> None:
    """ValueError for a packed row of more or fewer documents than its samples have."""
    if "cu_seqlens" not in batch:
        return
    found = sum(end > start for _, start, end in _borders(batch))
    if found != len(numbers) * per_sample:
        raise ValueError(
            f"samples {numbers} have {found} documents with tokens: expected {per_sample} each, so "
            "that what is found of a document is known to be its sample's"
        )


def by_sample(trainer, dataset, run, shape: tuple[int, ...]) -> np.ndarray:
    """float64 [samples, *shape], on every rank: of each sample what run(micro-batches, length)
    finds, one tensor [samples or more, *shape] a micro-batch. Collective."""
    backend = trainer.backend
    values = torch.zeros(len(dataset), *shape, dtype=torch.float64, device=parallel.device())
    for step in passes(trainer, dataset, run):
        for numbers, found in step:
            if backend.context_parallel[1] == 0:  # all of its ranks have found the same
                values[numbers] = found[: len(numbers)].to(values.dtype)
    return backend.reduce(values.flatten()).view(values.shape).cpu().numpy()


# -- log-probabilities


class PredictionOutput(NamedTuple):
    """What predict() returns, under transformers' names.

    predictions: float64 [samples, 2], the sum of the log-probabilities of a sample's trained tokens
    and their number; of pairs [samples, 2, 2], chosen and rejected. label_ids: None, as no tokens
    are gathered. metrics: names with the prefix -> numbers over the whole set.
    """

    predictions: np.ndarray
    label_ids: None
    metrics: dict[str, float]


def predict(trainer, dataset, prefix: str) -> PredictionOutput:
    """McaTrainer.predict."""
    plan_batches(trainer, dataset, training=False)  # refuses several sets, and a stream
    found = log_probabilities(trainer, dataset)
    if trainer.documents_per_sample == 1:
        total, count = found.sum(axis=(0, 1))
        metrics = {f"{prefix}_loss": float(-total / max(count, 1))}
    else:
        means = found[..., 0].mean(axis=0)
        names = [f"{prefix}_logps/{side}" for side in SIDES]
        metrics = dict(zip(names, means.tolist(), strict=True))
    if trainer.compute_metrics is not None:
        metrics |= user_metrics(trainer, dataset, prefix)
    trainer._notify("on_predict", metrics=metrics)
    return PredictionOutput(found.squeeze(1) if found.shape[1] == 1 else found, None, metrics)


def records_of(predictions: np.ndarray) -> Iterator[dict[str, Any]]:
    """Each sample as a line of predictions.jsonl: its index, and tokens, logp and mean_logp, or
    those of chosen and rejected."""
    for index, found in enumerate(predictions.tolist()):
        if predictions.ndim == 2:
            yield {"index": index, **_numbers(*found)}
        else:
            sides = zip(SIDES, found, strict=True)
            yield {"index": index, **{side: _numbers(*numbers) for side, numbers in sides}}


def _numbers(logp: float, count: float) -> dict[str, Any]:
    mean = logp / count if count else None
    return {"tokens": int(count), "logp": logp, "mean_logp": mean}


def sum_documents(backend, batch: dict, labels, losses) -> torch.Tensor:
    """float32 [2, real documents]: the log-probabilities of each document's labels, and their
    number. batch: an arranged one, of rows of a document each, or a packed row.

    labels, losses [rows, s] of this rank, or with multi-token prediction Targets and [rows, s,
    more], of which the next token counts. Collective under context parallelism: one sum over its
    group.
    """
    if isinstance(labels, Targets):
        labels = labels.labels
        losses = losses[..., 0]
    both = torch.stack([-losses, (labels != IGNORE_INDEX).to(losses.dtype)])  # [2, rows, s]
    if "cu_seqlens" in batch:
        cu = batch["cu_seqlens"]
        cp = backend.context_parallel[0]
        lengths = [(end - start) // cp for start, end in zip(cu, cu[1:], strict=False)]
        sums = torch.stack([part.sum(-1) for part in both[:, 0].split(lengths, -1)], -1)
    else:
        sums = both.sum(-1)
    real = parallel.to_device(real_documents(batch).nonzero()[:, 0], sums.device)
    return backend.sum_over_context_parallel(sums).index_select(1, real)


@torch.no_grad()
def log_probabilities(trainer, dataset) -> np.ndarray:
    """float64 [samples, documents of a sample, 2], on every rank: the sum of the log-probabilities
    of each document's trained tokens, and their number. Collective."""
    count = trainer.documents_per_sample

    def collect(inputs: dict, batch: dict, losses: torch.Tensor) -> torch.Tensor:
        sums = sum_documents(trainer.backend, batch, inputs["labels"], losses)
        return sums.t().reshape(-1, count, 2)

    trainer.backend.use_loss(None)  # cross entropy, whatever the trainer minimises
    try:
        run = functools.partial(_forward, trainer, collecting(trainer, collect))
        return by_sample(trainer, samples_of(dataset), run, (count, 2))
    finally:
        trainer.backend.use_loss(trainer._loss_of_logits)


def collecting(trainer, collect: Callable, with_labels: bool = True) -> Callable:
    """A forward_step of the trained model that says collect(inputs, batch, output) of each."""

    def step(data_iterator, model):
        batch = next(data_iterator)
        inputs = trainer._prepare_train_inputs(iter([batch]))
        given = inputs if with_labels else {**inputs, "labels": None}

        def finish(output):  # megatron's contract: a loss, a count, and what is collected
            nothing = output.new_zeros((), dtype=torch.float32)
            return nothing, nothing.int(), collect(inputs, batch, output)

        return model(**given), finish

    return step


# -- a user's metrics


@torch.no_grad()
def user_metrics(trainer, dataset, prefix: str) -> dict[str, float]:
    """What compute_metrics makes of what preprocess_logits_for_metrics returns of each sample, the
    names with the prefix; on every rank the main rank's. A second pass over the data. Collective.

    As in transformers, position t of label_ids holds the label that position t - 1 predicts, and
    samples are padded with IGNORE_INDEX. Held at once: the logits of a micro-batch, and on the main
    rank what was returned.
    """
    dataset = samples_of(dataset)
    backend = trainer.backend

    def collect(inputs: dict, batch: dict, logits: torch.Tensor) -> list[tuple]:
        logits = backend.whole_logits(logits, inputs)
        if not backend.counts_tokens:
            return []
        borders = _borders(batch)
        return [
            _processed(trainer, logits[row, start:end], batch["labels"][row, start:end])
            for row, start, end in borders
        ]

    rows: dict[int, tuple] = {}  # on the main rank
    run = functools.partial(_forward, trainer, collecting(trainer, collect, with_labels=False))
    for step in passes(trainer, dataset, run):
        own = [pair for numbers, found in step for pair in zip(numbers, found, strict=False)]
        for theirs in parallel.gather(own):
            rows.update(theirs if parallel.is_main() else ())

    def compute() -> dict[str, float]:
        from transformers import EvalPrediction

        *parts, label_ids = map(_stacked, zip(*(rows[n] for n in range(len(dataset))), strict=True))
        predictions = parts[0] if len(parts) == 1 else tuple(parts)
        found = trainer.compute_metrics(EvalPrediction(predictions, label_ids))
        return {f"{prefix}_{key}": value for key, value in _checked(found, prefix).items()}

    return parallel.on_main(compute, ValueError)


def _checked(found, prefix: str) -> dict[str, float]:
    """A user's metrics, names without the prefix. ValueError for what is no {name: number}."""
    try:
        return {key.removeprefix(f"{prefix}_"): float(value) for key, value in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f"compute_metrics: expected {{name: number}}, got {found!r:.200}"
        ) from None


def _borders(batch: dict) -> list[tuple[int, int, int]]:
    """(row, start, end) of each document of a batch, without its padding."""
    if "cu_seqlens" not in batch:
        lengths = (batch["attention_mask"] > 0).sum(1).tolist()
        return [(row, 0, length) for row, length in enumerate(lengths)]
    cu = batch["cu_seqlens"]
    real = ~batch["padding_mask"][0]
    return [
        (0, start, start + int(real[start:end].sum()))
        for start, end in zip(cu, cu[1:], strict=False)
    ]


def _processed(trainer, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(what preprocess_logits_for_metrics returned, label_ids) of a document, on the CPU: as
    transformers has it, with one place more, since its labels are not shifted."""
    labels = torch.cat([labels.new_full((1,), IGNORE_INDEX), labels]).to(logits.device)[None]
    logits = torch.cat([logits.float(), logits.new_zeros(1, logits.shape[1])])[None]
    found = trainer.preprocess_logits_for_metrics(logits, labels)
    parts = (*(found if isinstance(found, tuple) else (found,)), labels)
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise ValueError(
            f"preprocess_logits_for_metrics: expected a tensor, or a tuple of them, got {found!r}"
        )
    floats = (part.float() if part.is_floating_point() else part for part in parts)
    return tuple(part.detach().cpu().clone() for part in floats)  # no view of the logits


def _stacked(parts: tuple[torch.Tensor, ...]) -> np.ndarray:
    """Tensors [1, n, ...] of unequal n as one array, padded with IGNORE_INDEX."""
    if parts[0].dim() < 2:
        return torch.cat([part.reshape(-1) for part in parts]).numpy()
    rows = [part[0] for part in parts]
    return pad_sequence(rows, batch_first=True, padding_value=IGNORE_INDEX).numpy()
