"""Forward passes over a dataset: metrics, and log-probabilities of samples.

A sample is one document, or two, such as a pair. Results per sample stand at its index in the
dataset: packs are unpacked, and neither the layout nor the order of computation matters."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from . import parallel
from .args_rules import check_metric
from .batch import Batch, in_documents, real_documents
from .data_batches import FILLER, BatchPlan, make_loader, samples_of
from .data_files import SIDES
from .errors import Judge, expect
from .files import IGNORE_INDEX
from .step import collecting, measure, new_numbers, scattered
from .tables import function_of
from .trainer_events import EvalLoopOutput, Numbers


class PredictionOutput(NamedTuple):
    """The result of predict(), with transformers' names.

    predictions: float64 [samples, 2]: the sum of the log-probabilities of a sample's trained
    tokens, and the number of these tokens. For pairs it is [samples, 2, 2], chosen before rejected.
    For a reward model it is [pairs, 2], the scores.
    label_ids: None, because tokens are not gathered.
    metrics: {name with prefix: value over all ranks}."""

    predictions: np.ndarray
    label_ids: None
    metrics: dict[str, float]


class Evaluator:
    """Runs the evaluation and prediction passes of one trainer. All ranks must call its methods
    alike."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.backend = trainer.backend

    def check(self) -> None:
        """Raise ValueError if the trainer is set up for metrics that an evaluation cannot compute.
        The reasons are: compute_metrics cannot be used; predict_with_generate is on without an
        Answers callback; or, with an eval_strategy and without compute_metrics,
        metric_for_best_model is unknown."""
        trainer = self.trainer
        compute = trainer.compute_metrics
        if not (compute is trainer.preprocess_logits_for_metrics is None):
            function_of("part_metrics:check")(self)
        expect(
            trainer.answers is not None or not trainer.args.predict_with_generate,
            "predict_with_generate: answers are the work of a callback: "
            "McaTrainer(callbacks=[mca_lite.tool_generation.Answers()])",
        )
        names = tuple(trainer.metrics_keys)
        if trainer.answers is not None:
            names += trainer.answers.metrics
        if compute is None:
            judge = Judge(trainer.args)
            sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else ()
            check_metric(trainer.args, names, sets, judge)
            judge.close()

    # -- metrics

    def evaluate(self, dataset: Any, prefix: str) -> dict[str, float]:
        """Evaluate a dataset -> its metrics {"<prefix>_<metric>": value}, which are also logged.
        For a dict of datasets there are metrics over all sets together, without those of
        compute_metrics, and the metrics of each set, named <prefix>_<set>_<metric>."""
        trainer = self.trainer
        if isinstance(dataset, dict) and dataset:
            parts = [self._measure(part, f"{prefix}_{name}") for name, part in dataset.items()]
            metrics = _named(functools.reduce(operator.add, [one.numbers for one in parts]), prefix)
            for one in parts:
                metrics.update(one.metrics)
        else:
            metrics = self._measure(dataset, prefix).metrics
        line = {"step": trainer.state.global_step, "epoch": trainer.state.epoch, **metrics}
        trainer.state.log_history.append(line)
        trainer.report.log(line)
        trainer.notify("on_evaluate", metrics=metrics)
        return metrics

    def _measure(self, dataset: Any, prefix: str) -> EvalLoopOutput:
        """Evaluate one dataset -> an EvalLoopOutput (metrics, and the sums behind them). The
        metrics are those of the loss, of compute_metrics and of generated answers, if there are
        any. prefix: of their names."""
        trainer = self.trainer
        loop = trainer.evaluation_loop(
            self.loader_of(dataset), "evaluation", metric_key_prefix=prefix
        )
        if trainer.compute_metrics is not None:
            loop.metrics.update(function_of("part_metrics:user_metrics")(self, dataset, prefix))
        if trainer.answers is not None:
            numbers = loop.numbers.with_pairs(trainer.answers.measure(dataset))
            loop.metrics.update(_named(numbers, prefix))
            loop = EvalLoopOutput(*loop[:-1], numbers)
        return loop

    @torch.no_grad()
    def run_loop(self, dataloader: Any, prefix: str) -> EvalLoopOutput:
        """Run forward over the batches of a loader that make_loader() made, for one epoch -> an
        EvalLoopOutput with the metrics over all ranks. prefix: of the metrics' names. ValueError
        for any other DataLoader."""
        trainer = self.trainer
        plan = getattr(dataloader.batch_sampler, "plan", None)
        expect(
            plan is not None,
            "evaluation_loop takes a loader of get_train_dataloader()'s kind; for a dataset "
            "call evaluate(dataset)",
        )
        whole = new_numbers(trainer)
        for _, batches, _, numbers in self._steps(dataloader, plan):
            metrics = self.forward(trainer.forward_step, trainer.prepared(batches))
            whole = whole + numbers.add_metrics(metrics)
        whole = whole.over_ranks(self.backend)
        return EvalLoopOutput(None, None, _named(whole, prefix), plan.num_samples, whole)

    def predict(self, dataset: Any, prefix: str) -> PredictionOutput:
        """Compute the log-probabilities of each sample -> a PredictionOutput on every rank, with
        metrics. prefix: of the metrics' names."""
        trainer = self.trainer
        logps = trainer.log_probabilities(dataset)
        if trainer.documents_per_sample == 1:
            total, count = logps.sum(axis=(0, 1))
            metrics = {f"{prefix}_loss": float(-total / max(count, 1))}
            logps = logps.squeeze(1)
        else:
            means = logps[..., 0].mean(axis=0)
            names = [f"{prefix}_logps/{side}" for side in SIDES]
            metrics = dict(zip(names, means.tolist(), strict=True))
        if trainer.compute_metrics is not None:
            metrics |= function_of("part_metrics:user_metrics")(self, dataset, prefix)
        if trainer.answers is not None:
            pairs = trainer.answers.measure(dataset).items()
            metrics |= {f"{prefix}_{key}": total / count for key, (total, count) in pairs if count}
        trainer.notify("on_predict", metrics=metrics)
        return PredictionOutput(logps, None, metrics)

    # -- passes over a data set

    def loader_of(self, dataset: Any) -> Any:
        """A DataLoader of this rank's micro-batches that goes through the dataset once."""
        plan = self.trainer.plan_batches(dataset, training=False)
        return make_loader(dataset, self.trainer.data_collator, plan, num_epochs=1)

    def _steps(
        self, loader: Any, plan: BatchPlan
    ) -> Iterator[tuple[int, list[Batch], int, Numbers]]:
        """Read the evaluation batches of a loader, and yield for each step (step index, this rank's
        micro-batches, row length of the first one, Numbers). Numbers has the micro-batches' token
        counts, or 0 on a rank without backend.counts_tokens. plan: the loader's BatchPlan
        (which samples each step takes). Collective if the layout needs one row length on all ranks.
        """
        trainer = self.trainer
        trainer.loaders["eval_dataloader"] = loader
        batches = iter(loader)
        for step in range(plan.steps_per_epoch):
            yield step, *trainer.read_step(batches, plan, step)
        trainer.loaders["eval_dataloader"] = None

    def forward(self, forward_step: Callable[..., Any], batches: list[Batch]) -> list[Any]:
        """Run forward_step over micro-batches, without gradients, and notify callbacks -> one
        result per micro-batch; [] on pipeline stages before the last."""
        results = measure(self.backend, forward_step, batches)
        self.trainer.notify("on_prediction_step")
        return results

    def passes(
        self, dataset: Any, run: Callable[[list[Batch]], list[Any]]
    ) -> Iterator[list[tuple[list[int], Any]]]:
        """Run one pass over a dataset, and yield for each step a list of (sample indices, result),
        one per micro-batch of this rank. Micro-batches that are there only to fill up the
        pipeline's schedule are left out. run(micro-batches): returns one result per micro-batch.

        On pipeline stages before the last the list is []. ValueError if a packed row's documents
        cannot be matched with its samples."""
        loader = self.loader_of(dataset)
        plan = loader.batch_sampler.plan
        for step, batches, *_ in self._steps(loader, plan):
            chosen = [[n for n in numbers if n != FILLER] for numbers in plan.step(0, step)]
            # micro-batches without samples come after the chosen ones
            for numbers, batch in zip(chosen, batches, strict=False):
                _check_documents(batch, numbers, self.trainer.documents_per_sample)
            yield list(zip(chosen, run(batches), strict=False))

    def by_sample(
        self, dataset: Any, run: Callable[..., Any], shape: tuple[int, ...]
    ) -> np.ndarray:
        """Run one pass over a dataset, and collect a result per sample -> float64 [samples, *shape]
        on every rank, in dataset order. run(micro-batches): returns one tensor [rows, *shape] per
        micro-batch, in which the first rows are the results of its samples; further rows are
        ignored."""
        zeros = torch.zeros(len(dataset), *shape, dtype=torch.float64, device=parallel.device())
        found = []
        for step in self.passes(dataset, run):
            if self.backend.context_parallel[1] == 0:  # context-parallel ranks have equal results
                found += [(numbers, result[: len(numbers)].double()) for numbers, result in step]
        return scattered(self.backend, found, zeros).numpy()

    @torch.no_grad()
    def log_probabilities(self, dataset: Any) -> np.ndarray:
        """Run one pass over a dataset -> float64 [samples, documents per sample, 2] on every rank.
        The last axis has the sum of the log-probabilities of a document's trained tokens, and the
        number of these tokens. A preference pair has two documents, chosen before rejected."""
        count = self.trainer.documents_per_sample

        def collect(inputs: dict[str, Any], batch: Batch, losses: torch.Tensor) -> torch.Tensor:
            sums = sum_documents(self.backend, batch, inputs["labels"], losses)
            return sums.t().reshape(-1, count, 2)

        return self.collected(dataset, collect, (count, 2))

    def collected(
        self, dataset: Any, collect: Callable[..., Any], shape: tuple[int, ...]
    ) -> np.ndarray:
        """Run one pass over a dataset, and collect a result per sample -> float64 [samples, *shape]
        on every rank. collect(inputs, batch, output) is called with each micro-batch and with the
        model's output, which is token losses, or scores if the model has a value head. It returns a
        tensor [rows, *shape], in which the first rows are the results of its samples. ValueError
        for a stream or a dict of datasets."""
        self.trainer.plan_batches(dataset, training=False)  # refuses several sets, and a stream
        step = collecting(self.backend, collect, self.trainer.inputs_of)
        run = functools.partial(self.forward, step)
        return self.by_sample(samples_of(dataset), run, shape)


def _named(numbers: Numbers, prefix: str) -> dict[str, float]:
    """The mean of each metric that counts anything, by its name with a prefix:
    {"<prefix>_<metric>": mean}. numbers: Numbers (sums and counts of metrics)."""
    return {
        f"{prefix}_{key}": value for key, value in numbers.means(None).items() if value is not None
    }


def _check_documents(batch: Batch, numbers: list[int], per_sample: int) -> None:
    """Raise ValueError if a batch of packed rows has more or fewer documents than its samples
    should have: their results could not be matched with the samples. numbers: the indices of the
    batch's samples. per_sample: documents per sample."""
    if "cu_seqlens" not in batch:
        return
    count = sum(end > start for _, start, end in borders(batch))
    expect(
        count == len(numbers) * per_sample,
        f"samples {numbers} have {count} documents with tokens: expected {per_sample} each, so "
        "that each document is known to be its sample's",
    )


def sum_documents(backend: Any, batch: Batch, labels: Any, losses: torch.Tensor) -> torch.Tensor:
    """Sum up the token losses of each document -> [2, documents] in the dtype of `losses`: the sum
    of log-probabilities over the document's labels, and the number of labels. Documents of padding
    alone are left out.

    batch: an arranged micro-batch, with one document per row, or packed. labels, losses: [rows, s]
    for s positions on this rank. With multi-token prediction labels is a part_mtp.Targets and
    losses [rows, s, predicted tokens], of which only the next token counts. Collective under
    context parallelism: one sum over its group."""
    if not isinstance(labels, torch.Tensor):  # part_mtp.Targets
        labels = labels.labels
        losses = losses[..., 0]
    both = torch.stack([-losses, (labels != IGNORE_INDEX).to(losses.dtype)])  # [2, rows, s]
    sums = in_documents(batch, both, backend.context_parallel[0])
    real = parallel.to_device(real_documents(batch).nonzero()[:, 0], sums.device)
    return backend.sum_over_context_parallel(sums).index_select(1, real)


def borders(batch: Batch) -> list[tuple[int, int, int]]:
    """Find the documents in an arranged micro-batch -> [(row, start, end)], with positions in the
    row. Padding after a document's tokens is not counted: a document of padding alone has end ==
    start."""
    real = ~batch["padding_mask"]
    documents = itertools.pairwise(batch.get("cu_seqlens", (0, real.shape[1])))
    return [
        (row, start, start + int(real[row, start:end].sum()))
        for row, (start, end) in itertools.product(range(len(real)), documents)
    ]


# -- predictions.jsonl


def records_of(predictions: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield the lines of predictions.jsonl: {"index": 0, "tokens": 12, "logp": -9.5, "mean_logp":
    -0.79} for a sample; for a pair "chosen" and "rejected" each hold tokens, logp and mean_logp."""
    for index, sample in enumerate(predictions.tolist()):
        if predictions.ndim == 2:
            record = _record(sample)
        else:
            record = dict(zip(SIDES, map(_record, sample), strict=True))
        yield {"index": index, **record}


def _record(sums: list[float]) -> dict[str, Any]:
    """The entries of one document in predictions.jsonl: its number of trained tokens, their
    log-probability, and the mean (None without trained tokens). sums: [log-probability, number of
    tokens]."""
    logp, count = sums
    return {"tokens": int(count), "logp": logp, "mean_logp": logp / count if count else None}
