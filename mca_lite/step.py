"""Parts of a training step, without its loop: arrange micro-batches, run them, measure them.

These functions take a backend, its arguments and an objective. The objective defines the loss with
six members, which McaTrainer describes: metrics_keys, _loss_of_logits (None: cross entropy),
_arrange, _pre_compute_loss, _post_compute_loss and _count_of_loss; around_loss may be a seventh.
Batches come from a data collator, checked by data_batches.check_batch. Both backends follow
megatron's contract: forward_step(iterator, model) -> (output, loss_func), and loss_func(output) ->
(loss sum, count, metrics)."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import ckpt, parallel, watchdog
from .backend import Metrics, mean_of
from .batch import Batch, pack, packed_row, pad, split
from .files import IGNORE_INDEX, replacing
from .loss_tokens import Logits
from .trainer_events import Numbers

# -- micro-batches


def arrange(backend: Any, args: Any, batch: Batch, documents_per_sample: int = 1) -> Batch:
    """Arrange a checked batch for the model: one document per row, or with sequence_packing one
    packed row. backend: the run's Backend. args: TrainingArguments. documents_per_sample: 2 for
    samples of two documents, such as pairs; otherwise 1."""
    if not args.sequence_packing:
        return split(batch, documents_per_sample, backend.pad_token_id)
    return pack(batch, backend.document_multiple, backend.pad_token_id, documents_per_sample)


def arrange_step(
    backend: Any, objective: Any, given: list[Batch], at_least: int = 0
) -> list[Batch]:
    """Arrange `given`, the checked batches of a step, by the objective's _arrange, and pad them to
    lengths that the layout can shard: to one common length if it needs that.

    Micro-batches of padding are added as fillers until there are `at_least`, and a multiple that
    the pipeline schedule needs. Collective if all ranks need one length.
    """
    # the pipeline schedule needs a multiple: fill up with micro-batches of padding, without loss
    count = max(len(given), at_least)
    missing = count + -count % backend.micro_batch_multiple - len(given)
    nothing = torch.zeros_like(given[0]["labels"])
    empty = {**given[0], "labels": nothing + IGNORE_INDEX, "attention_mask": nothing}
    batches = [objective._arrange(batch) for batch in given + missing * [empty]]
    longest = backend.common_length(max(map(row_length, batches)))
    return [to_length(backend, batch, longest) for batch in batches]


def row_length(batch: Batch) -> int:
    """Number of positions in each row of an arranged micro-batch."""
    return batch["input_ids"].shape[1]


def to_length(backend: Any, batch: Batch, at_least: int = 0) -> Batch:
    """Pad an arranged batch on the right, to a multiple of the length that the layout can shard and
    to `at_least` or more."""
    multiple = backend.length_multiple
    length = -(-max(at_least, row_length(batch)) // multiple) * multiple
    return pad(batch, length, backend.pad_token_id)


def inputs_of(backend: Any, batch: Batch) -> dict[str, Any]:
    """The model's keyword arguments for an arranged micro-batch, on this rank's device and sharded
    for its context-parallel rank.

    Every pipeline stage needs the whole batch, for the borders of packed documents."""
    watchdog.alive()
    if "cu_seqlens" in batch and "packed_seq_params" not in batch:
        params = packed_row(batch["cu_seqlens"], *backend.context_parallel, parallel.device())
        batch = {**batch, "packed_seq_params": params}
    return backend.model_inputs(batch)


# -- passes


def forward_step(
    backend: Any,
    args: Any,
    objective: Any,
    data_iterator: Iterator[Batch],
    model: Any,
    to_inputs: Callable[..., dict[str, Any]] | None = None,
) -> tuple[Any, Callable[..., Any]]:
    """Run the iterator's next micro-batch through one chunk of the model -> (output, loss_func).
    Pipeline schedules call it, as megatron's forward_step_func.

    objective: the trainer, or another object with its loss hooks. to_inputs(batch): the model's
    keyword arguments; None: inputs_of().
    """
    batch = next(data_iterator)
    to_inputs = to_inputs or functools.partial(inputs_of, backend)
    inputs = to_inputs(batch)
    of_rank = backend.loss_columns(batch)
    use_loss(backend, objective, of_rank)
    loss_func = objective._pre_compute_loss(of_rank, inputs)
    around_loss = getattr(objective, "around_loss", None)
    if around_loss is not None:
        loss_func = functools.partial(around_loss, of_rank, loss_func)
    if not args.calculate_per_token_loss and torch.is_grad_enabled():
        loss_func = functools.partial(_with_mean, loss_func)
    return model(**inputs), loss_func


def use_loss(backend: Any, objective: Any, batch: Batch | None = None) -> None:
    """Make the backend's model compute the objective's loss from logits, or cross entropy if the
    objective has none. objective: the trainer, or another object with its loss hooks.

    batch: the micro-batch, as the hook _pre_compute_loss gets it; None outside of a step.
    """
    of_logits = objective._loss_of_logits
    if of_logits is not None:
        of_logits = functools.partial(_loss_in, batch, of_logits)
    backend.use_loss(of_logits)


def _loss_in(
    batch: Batch | None, loss_of_logits: Callable[[Logits], torch.Tensor], logits: Logits
) -> torch.Tensor:
    """Call loss_of_logits with the micro-batch as logits.batch -> its token losses."""
    return loss_of_logits(replace(logits, batch=batch))


def _with_mean(loss_func: Callable[..., Any], output: torch.Tensor) -> tuple[Any, ...]:
    """The results of a loss_func, with the logged loss replaced by the micro-batch's mean: the pair
    [sum, count] is divided by the count.

    Under context parallelism the pair is this rank's share of [mean, 1]."""
    total, count, metrics = loss_func(output)
    return total, count, {**metrics, "loss": mean_of(metrics["loss"], count)}


def compute_gradients(
    backend: Any, objective: Any, forward_step: Callable[..., Any], micro_batches: list[Batch]
) -> Metrics:
    """Run forward and backward passes over a step's arranged micro-batches -> metrics per
    micro-batch, [] on pipeline stages before the last. Gradients stay in the backend. objective:
    the trainer, or another object with its loss hooks. Collective."""
    backend.train_mode(True)
    backend.weigh_router_losses(micro_batches, objective._count_of_loss)
    return backend.forward_backward(forward_step, micro_batches)


@torch.no_grad()
def measure(
    backend: Any, forward_step: Callable[..., Any], micro_batches: list[Batch], chunks: Any = None
) -> list[Any]:
    """Run forward passes over micro-batches, in evaluation mode and without gradients -> the third
    result of each loss_func; [] on pipeline stages before the last.

    chunks: the chunks to run; None: the trained model's. Training mode is restored, unless a pass
    fails. Collective."""
    running = chunks or backend.chunks
    in_training = [chunk for chunk in running if chunk.training]
    for chunk in in_training:
        chunk.eval()
    results = backend.forward(forward_step, micro_batches, running)
    for chunk in in_training:
        chunk.train()
    return results


def collecting(
    backend: Any, collect: Callable[..., Any], to_inputs: Callable[..., Any]
) -> Callable[..., Any]:
    """A forward_step for measure() whose results are collect(inputs, batch, output), for passes
    that only read the model's outputs.

    to_inputs(batch): the model's keyword arguments. output: token losses, by cross entropy or by
    the loss that wrap_reference() got; logits if these arguments have no labels; with a value head
    scores. batch: as to_inputs gets it, but its loss columns hold this rank's tokens."""

    def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Any]]:
        batch = next(data_iterator)
        inputs = to_inputs(batch)
        of_rank = backend.loss_columns(batch)
        backend.use_loss(None)  # cross entropy, whatever the training loss is

        def finish(output: torch.Tensor) -> tuple[Any, ...]:
            nothing = output.new_zeros((), dtype=torch.float32)
            return nothing, nothing.int(), collect(inputs, of_rank, output)

        return model(**inputs), finish

    return forward_step


def scattered(backend: Any, found: list[tuple[Any, Any]], zeros: torch.Tensor) -> torch.Tensor:
    """Combine rows that ranks computed into one CPU tensor on every rank. zeros: [rows, ...],
    filled in place. found: [(row indices, values)] of this rank; each row must come from one data-
    or context-parallel rank only. Collective."""
    for numbers, values in found:
        zeros[numbers] = values
    return backend.reduce(zeros.flatten()).view(zeros.shape).cpu()


# -- numbers


def sum_losses(backend: Any, labels: Any, losses: torch.Tensor) -> tuple[Any, ...]:
    """Sum token losses [b, s] -> (loss to differentiate, number of trained tokens int32, pairs to
    log). The pairs are this rank's [sum, tokens]: "loss", and with multi-token prediction (losses
    [b, s, 1 + layers]) "mtp_loss".

    The loss also has the weighted losses of multi-token prediction. Loss and number are changed by
    over_context_parallel(), which may be collective, and the loss is scaled so that the backend's
    mean over micro-batches comes out right."""
    metrics = {}
    more = 0.0
    if not isinstance(labels, torch.Tensor):  # part_mtp.Targets
        more, metrics["mtp_loss"] = labels.of_ahead(losses)
        labels = labels.labels
        losses = losses[..., 0]
    total = losses.sum()
    count = (labels != IGNORE_INDEX).sum()
    # a copy, because megatron later divides `total` in place
    metrics["loss"] = torch.stack([total.detach().clone(), count.float()])
    total = total + backend.predicts_ahead * more
    total, count = backend.over_context_parallel(total, count)
    return total * backend.micro_batch_weight, count.int(), metrics


def count_labels(batch: Batch) -> int:
    """Number of trained tokens in the whole rows of a micro-batch."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


def new_numbers(objective: Any, metrics: Sequence[dict[str, Any]] = ()) -> Numbers:
    """The Numbers for an objective's metrics, on this rank's device: the (sum, count) pairs of
    micro-batches' `metrics`, added up; counts of tokens are 0."""
    return Numbers.zeros(objective.metrics_keys, parallel.device()).add_metrics(metrics)


# -- files


def save_model(backend: Any, args: Any, folder: Path, tokenizer: Any = None) -> None:
    """Write the trained model, and the tokenizer if there is one, to a folder. Collective.

    With save_hf_model, the files are in Hugging Face's format, or for adapters in PEFT's format
    without the base model; otherwise they are a checkpoint of the weights.
    """
    if args.save_hf_model:
        backend.export_hf(folder, args.max_shard_size)
    else:
        ckpt.save_model(folder, backend)
    save_tokenizer(folder, tokenizer)


def save_tokenizer(folder: Path, tokenizer: Any = None) -> None:
    """Write the tokenizer's files on the main rank, if there is a tokenizer; files of other names
    stay. Collective."""
    if tokenizer is not None and parallel.is_main():
        with replacing(folder) as beside:
            tokenizer.save_pretrained(beside)
    parallel.barrier()
