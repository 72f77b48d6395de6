"""compute_metrics and preprocess_logits_for_metrics of a trainer, under transformers' names:
metrics of an evaluation from what is kept of each sample's logits.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from . import parallel
from .batch import Batch
from .data_batches import samples_of
from .errors import expect
from .files import IGNORE_INDEX
from .step import collecting
from .trainer_evaluation import Evaluator, borders


def check(evaluator: Evaluator) -> None:
    """Check that a user's metrics can be computed: ValueError unless compute_metrics and
    preprocess_logits_for_metrics are both functions, and the trainer's samples have one document,
    not a pair."""
    trainer = evaluator.trainer
    compute = trainer.compute_metrics
    preprocess = trainer.preprocess_logits_for_metrics
    expect(
        callable(compute) and callable(preprocess),
        "compute_metrics and preprocess_logits_for_metrics: expected both functions, or "
        f"neither, got {compute!r}, {preprocess!r}: the logits of a whole data set are not "
        "kept, and preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1) "
        "keeps the likeliest tokens",
    )
    expect(
        trainer.documents_per_sample == 1,
        "compute_metrics is for samples of one text: of pairs an evaluation gives "
        f"{', '.join(trainer.metrics_keys)}",
    )


@torch.no_grad()
def user_metrics(evaluator: Evaluator, dataset: Any, prefix: str) -> dict[str, float]:
    """Compute the metrics of a user's compute_metrics over a dataset -> {<prefix>_<name>: number}
    on every rank. A pass over the dataset calls preprocess_logits_for_metrics for each sample, and
    the main rank calls compute_metrics with the results. Collective. ValueError if compute_metrics
    fails, or does not return {name: number}.

    As in transformers, position t of label_ids is the label predicted by position t - 1, and rows
    are padded with IGNORE_INDEX. Memory: a micro-batch's logits, a step's results of all ranks, and
    on the main rank all results."""
    trainer = evaluator.trainer
    preprocess = trainer.preprocess_logits_for_metrics
    backend = evaluator.backend
    dataset = samples_of(dataset)

    def collect(
        inputs: dict[str, Any], batch: Batch, logits: torch.Tensor
    ) -> list[tuple[Any, ...]]:
        logits = backend.whole_logits(logits, inputs)
        if not backend.counts_tokens:
            return []
        return [
            _processed(preprocess, logits[row, start:end], batch["labels"][row, start:end])
            for row, start, end in borders(batch)
        ]

    rows: dict[int, tuple[Any, ...]] = {}  # on the main rank

    def inputs_of(batch: Batch) -> dict[str, Any]:
        return {**trainer.inputs_of(batch), "labels": None}

    run = functools.partial(evaluator.forward, collecting(backend, collect, inputs_of))
    for step in evaluator.passes(dataset, run):
        own = [pair for found in step for pair in zip(*found, strict=False)]
        for of_rank in parallel.gather(own):
            if parallel.is_main():
                rows.update(of_rank)

    def compute() -> dict[str, float]:
        from transformers import EvalPrediction

        columns = zip(*(rows[number] for number in range(len(dataset))), strict=True)
        *parts, label_ids = map(_stacked, columns)
        predictions = parts[0] if len(parts) == 1 else tuple(parts)
        metrics = trainer.compute_metrics(EvalPrediction(predictions, label_ids))
        start = f"{prefix}_"
        try:
            return {start + key.removeprefix(start): float(metrics[key]) for key in metrics}
        except (AttributeError, TypeError, ValueError):
            raise ValueError(
                f"compute_metrics: expected {{name: number}}, got {metrics!r:.200}"
            ) from None

    return parallel.on_main(compute, ValueError)


def _processed(
    preprocess: Callable[..., Any], logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Call preprocess_logits_for_metrics (`preprocess`) for one document -> (*its results,
    label_ids), on the CPU. logits: [n, V]. labels: [n]. The function gets float32 logits [1, n + 1,
    V] and labels [1, n + 1], one position more than the document has, because transformers' labels
    are not shifted. ValueError if it returns anything but a tensor or a tuple of tensors."""
    labels = torch.cat([labels.new_full((1,), IGNORE_INDEX), labels]).to(logits.device)[None]
    logits = torch.cat([logits.float(), logits.new_zeros(1, logits.shape[1])])[None]
    kept = preprocess(logits, labels)
    parts = (*(kept if isinstance(kept, tuple) else [kept]), labels)
    expect(
        all(isinstance(part, torch.Tensor) for part in parts),
        "preprocess_logits_for_metrics: expected a tensor, or a tuple of them, got "
        f"{type(kept).__name__}",
    )
    floats = (part.float() if part.is_floating_point() else part for part in parts)
    return tuple(part.detach().cpu().clone() for part in floats)  # a view would keep the logits


def _stacked(parts: tuple[torch.Tensor, ...]) -> np.ndarray:
    """Join the results of all documents, a tensor [1, n, ...] each, into one array [documents,
    longest n, ...], padded on the right with IGNORE_INDEX. Tensors with fewer than two dimensions
    are flattened and concatenated instead."""
    if parts[0].dim() < 2:
        return torch.cat([part.reshape(-1) for part in parts]).numpy()
    rows = [part[0] for part in parts]
    return pad_sequence(rows, batch_first=True, padding_value=IGNORE_INDEX).numpy()
