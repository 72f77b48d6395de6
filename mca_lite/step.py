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
    """Put a micro-batch's documents into rows for the model: one document per row, or with
    sequence_packing all in one packed row. batch: collated and checked. args: TrainingArguments.
    documents_per_sample: 2 if each sample has two, as a pair of answers; otherwise 1."""
    if not args.sequence_packing:
        return split(batch, documents_per_sample, backend.pad_token_id)
    return pack(batch, backend.document_multiple, backend.pad_token_id, documents_per_sample)


def arrange_step(
    backend: Any, objective: Any, given: list[Batch], at_least: int = 0
) -> list[Batch]:
    """Make all micro-batches of a step ready for the model: each is arranged by the objective's
    hook _arrange, and padded to a length that the parallel layout can shard. If the layout needs
    it, all get one common length. Collective if all ranks need one length.

    objective: the trainer, or another object with its loss hooks. given: the collated and checked
    micro-batches. at_least: number of micro-batches to return at least. Missing ones are added as
    fillers (padding alone, without loss), also up to a multiple that the pipeline schedule needs.
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
    """Pad the rows of an arranged micro-batch on the right. Their new length is the smallest that
    is `at_least` or more, holds the rows, and is a multiple that the parallel layout can shard."""
    multiple = backend.length_multiple
    length = -(-max(at_least, row_length(batch)) // multiple) * multiple
    return pad(batch, length, backend.pad_token_id)


def inputs_of(backend: Any, batch: Batch) -> dict[str, Any]:
    """Make the model's keyword arguments for an arranged micro-batch: on this rank's device, with
    this context-parallel rank's part of the tokens. batch: the whole micro-batch, on every pipeline
    stage, because it has the borders of packed documents."""
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
    """Run the next micro-batch through one chunk of the model -> (output, loss_func). Pipeline
    schedules call it, as megatron's forward_step_func; loss_func(output) computes the loss.

    objective: the trainer, or another object with its loss hooks. data_iterator: of arranged
    micro-batches. model: the chunk. to_inputs(batch): makes the model's keyword arguments; None:
    inputs_of()."""
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
    """Tell the backend's model which loss to compute from logits: that of the objective's hook
    _loss_of_logits, or cross entropy if the hook is None. objective: the trainer, or another object
    with its loss hooks.

    batch: the micro-batch that the loss may read; None outside of a step."""
    of_logits = objective._loss_of_logits
    if of_logits is not None:
        of_logits = functools.partial(_loss_in, batch, of_logits)
    backend.use_loss(of_logits)


def _loss_in(
    batch: Batch | None, loss_of_logits: Callable[[Logits], torch.Tensor], logits: Logits
) -> torch.Tensor:
    """Compute the token losses of a chunk of logits, by loss_of_logits. batch: the micro-batch,
    which the function finds as logits.batch."""
    return loss_of_logits(replace(logits, batch=batch))


def _with_mean(loss_func: Callable[..., Any], output: torch.Tensor) -> tuple[Any, ...]:
    """Call loss_func(output), and replace the logged loss in its result: the pair [sum, count] is
    divided by the micro-batch's count. It becomes [mean, 1], under context parallelism this rank's
    share of that; [0, 0] if the count is 0. output: the model's."""
    total, count, metrics = loss_func(output)
    return total, count, {**metrics, "loss": mean_of(metrics["loss"], count)}


def compute_gradients(
    backend: Any, objective: Any, forward_step: Callable[..., Any], micro_batches: list[Batch]
) -> Metrics:
    """Run the forward and backward passes of a step; gradients stay in the backend. Returns the
    metrics of each micro-batch, [] on pipeline stages before the last. Collective.

    objective: the trainer, or another object with its loss hooks. forward_step: megatron's
    forward_step_func, (data_iterator, model) -> (output, loss function). micro_batches: arranged.
    """
    backend.train_mode(True)
    backend.weigh_router_losses(micro_batches, objective._count_of_loss)
    return backend.forward_backward(forward_step, micro_batches)


@torch.no_grad()
def measure(
    backend: Any, forward_step: Callable[..., Any], micro_batches: list[Batch], chunks: Any = None
) -> list[Any]:
    """Run forward passes over micro-batches, in evaluation mode and without gradients. Returns what
    forward_step's loss function gives as its third result, for each micro-batch; [] on pipeline
    stages before the last. Collective.

    chunks: the model chunks to run, such as those of a reference model; None: the trained model's.
    Training mode is restored, unless a pass fails."""
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
    """Make a forward_step for measure() that only reads the model's outputs: its result for a
    micro-batch is collect(inputs, batch, output).

    to_inputs(batch): makes the model's keyword arguments, which are then `inputs`. batch: the
    micro-batch, with this rank's tokens in its loss columns. output: token losses, by cross entropy
    or by the loss that wrap_reference() got; logits if the inputs have no labels; scores if the
    model has a value head."""

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
    """Combine rows that ranks computed into one tensor, on the CPU of every rank. zeros: [rows,
    ...] on this rank's device, filled in place. found: [(row indices, values)] that this rank
    computed; a row must come from one data- or context-parallel rank alone. Collective."""
    for numbers, values in found:
        zeros[numbers] = values
    return backend.reduce(zeros.flatten()).view(zeros.shape).cpu()


# -- numbers


def sum_losses(backend: Any, labels: Any, losses: torch.Tensor) -> tuple[Any, ...]:
    """Sum token losses -> (loss to differentiate, number of trained tokens int32, {metric: [sum,
    tokens]} of this rank). losses: [b, s]. labels: [b, s]. With multi-token prediction, losses are
    [b, s, 1 + layers] and labels a part_mtp.Targets; there is then a metric "mtp_loss" beside
    "loss", and the loss has the prediction layers' losses, weighted.

    backend.over_context_parallel(), which may be collective, changes loss and number; the loss is
    also scaled so that the backend's mean over micro-batches comes out right."""
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
    """Make the Numbers (sums and counts in one vector) for an objective's metrics, on this rank's
    device. metrics: (sum, count) pairs by name, of each micro-batch, which are added up. Counts of
    tokens are 0. objective: the trainer, or another object with metrics_keys."""
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
    """Write the tokenizer's files into a folder, on the main rank; files of other names there stay.
    Without a tokenizer nothing is written. Collective."""
    if tokenizer is not None and parallel.is_main():
        with replacing(folder) as beside:
            tokenizer.save_pretrained(beside)
    parallel.barrier()
