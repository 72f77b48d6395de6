"""A step without its loop: micro-batches arranged, run and measured, by functions of a backend, its
arguments and an objective.

An objective has the loss, in six members that McaTrainer describes: metrics_keys, _loss_of_logits
(None: cross entropy), _arrange, _pre_compute_loss, _post_compute_loss and _count_of_loss. Batches
come from a data collator, checked by data_batches.check_batch. Both backends run megatron's
contract: forward_step(iterator, model) -> (output, loss_func), and loss_func(output) -> (loss sum,
count, metrics).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import ckpt, parallel, watchdog
from .backend import mean_of
from .batch import Targets, pack, packed_row, pad, split
from .files import IGNORE_INDEX, replacing
from .loss_tokens import Logits
from .trainer_events import Numbers

# -- micro-batches


def arrange(backend, args, batch: dict, documents_per_sample: int = 1) -> dict:
    """A checked batch as the model takes it: rows of a document each, or one packed row."""
    if not args.sequence_packing:
        return split(batch, documents_per_sample, backend.pad_token_id)
    return pack(batch, backend.document_multiple, backend.pad_token_id, documents_per_sample)


def arrange_step(backend, objective, given: list[dict], at_least: int = 0) -> list[dict]:
    """The checked batches of a step, arranged and padded to one length. at_least: the number of
    micro-batches of other ranks. Collective where the layout wants one length on all ranks."""
    # the schedule needs a multiple: others of the same shape follow, without loss and counted as
    # padding
    count = max(len(given), at_least)
    missing = count + -count % backend.micro_batch_multiple - len(given)
    nothing = torch.zeros_like(given[0]["labels"])
    empty = {**given[0], "labels": nothing + IGNORE_INDEX, "attention_mask": nothing}
    batches = [objective._arrange(batch) for batch in given + missing * [empty]]
    longest = backend.common_length(max(map(row_length, batches)))
    return [to_length(backend, batch, longest) for batch in batches]


def row_length(batch: dict) -> int:
    """Positions of a row of an arranged micro-batch."""
    return batch["input_ids"].shape[1]


def to_length(backend, batch: dict, at_least: int = 0) -> dict:
    """An arranged batch, padded on the right to a length that the layout can cut."""
    multiple = backend.length_multiple
    length = -(-max(at_least, row_length(batch)) // multiple) * multiple
    return pad(batch, length, backend.pad_token_id)


def inputs_of(backend, batch: dict) -> dict[str, Any]:
    """An arranged micro-batch as the model takes it, on this rank's device, cut for its
    context-parallel rank. Every pipeline stage reads the whole batch, for the borders of packed
    documents."""
    watchdog.alive()
    if "cu_seqlens" in batch and "packed_seq_params" not in batch:
        params = packed_row(batch["cu_seqlens"], *backend.context_parallel, parallel.device())
        batch = {**batch, "packed_seq_params": params}
    return backend.model_inputs(batch)


# -- passes


def forward_step(backend, args, objective, data_iterator: Iterator, model, to_inputs=None):
    """megatron's contract: one micro-batch through one chunk -> (output, loss_func). to_inputs: in
    place of inputs_of."""
    batch = next(data_iterator)
    to_inputs = to_inputs or functools.partial(inputs_of, backend)
    inputs = to_inputs(batch)
    of_rank = backend.loss_columns(batch)
    use_loss(backend, objective, of_rank)
    loss_func = objective._pre_compute_loss(of_rank, inputs)
    if not args.calculate_per_token_loss and torch.is_grad_enabled():
        loss_func = functools.partial(_with_mean, loss_func)
    return model(**inputs), loss_func


def use_loss(backend, objective, batch: dict | None = None) -> None:
    """Let the backend's model give the objective's loss of tokens, for a micro-batch as
    _pre_compute_loss gets it."""
    of_logits = objective._loss_of_logits
    if of_logits is not None:
        of_logits = functools.partial(_loss_in, batch, of_logits)
    backend.use_loss(of_logits)


def _loss_in(batch: dict | None, loss_of_logits, logits: Logits) -> torch.Tensor:
    return loss_of_logits(replace(logits, batch=batch))


def _with_mean(loss_func, output):
    """A loss_func's results, with the mean of the micro-batch as the logged loss: this rank's part
    of it, and of a count of 1, under context parallelism."""
    total, count, metrics = loss_func(output)
    return total, count, {**metrics, "loss": mean_of(metrics["loss"], count)}


def compute_gradients(
    backend, objective, forward_step: Callable, micro_batches: list[dict]
) -> list[dict]:
    """Leave the gradients of arranged micro-batches in the backend -> metrics of each, [] on
    pipeline stages before the last. Collective."""
    backend.train_mode(True)
    backend.weigh_router_losses(micro_batches, objective._count_of_loss)
    length = row_length(micro_batches[0])
    return backend.forward_backward(forward_step, micro_batches, length)


@torch.no_grad()
def measure(backend, forward_step: Callable, micro_batches: list[dict], chunks=None) -> list:
    """Results of a forward pass alone in evaluation mode, one of each micro-batch; [] on pipeline
    stages before the last. chunks: those that run, None: the trained ones. Collective."""
    running = chunks or backend.chunks
    in_training = [chunk for chunk in running if chunk.training]
    for chunk in in_training:
        chunk.eval()
    length = row_length(micro_batches[0])
    results = backend.forward_backward(
        forward_step, micro_batches, length, forward_only=True, chunks=running
    )
    for chunk in in_training:
        chunk.train()
    return results


def collecting(backend, collect: Callable, to_inputs: Callable) -> Callable:
    """A forward_step for measure() with the results collect(inputs, batch, output), of cross
    entropy, or of logits if to_inputs(batch) has no labels. batch: with the columns for losses as
    this rank has them."""

    def forward_step(data_iterator: Iterator, model):
        batch = next(data_iterator)
        inputs = to_inputs(batch)
        of_rank = backend.loss_columns(batch)
        backend.use_loss(None)  # cross entropy, whatever the trainer minimises

        def finish(output):
            nothing = output.new_zeros((), dtype=torch.float32)
            return nothing, nothing.int(), collect(inputs, of_rank, output)

        return model(**inputs), finish

    return forward_step


def scattered(backend, found: list[tuple[Any, Any]], zeros: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, on the CPU: (numbers, values) of this rank's micro-batches, set in
    zeros [rows, ...]. A row has its values from one rank alone. Collective."""
    for numbers, values in found:
        zeros[numbers] = values
    return backend.reduce(zeros.flatten()).view(zeros.shape).cpu()


# -- numbers


def sum_losses(backend, labels, losses: torch.Tensor):
    """Token losses [b, s] -> (their sum, trained tokens int32, {"loss": (sum, tokens)}), see
    McaTrainer._post_compute_loss."""
    metrics = {}
    more = 0.0
    if isinstance(labels, Targets):
        more = losses[..., 1:].sum()
        ahead = (labels.next_labels != IGNORE_INDEX).sum()
        metrics["mtp_loss"] = torch.stack([more.detach(), ahead])
        labels = labels.labels
        losses = losses[..., 0]
    total = losses.sum()
    count = (labels != IGNORE_INDEX).sum()
    # megatron divides `total` in place afterwards: the metric is a copy
    metrics["loss"] = torch.stack([total.detach().clone(), count.float()])
    total = total + backend.predicts_ahead * more
    total, count = backend.over_context_parallel(total, count)
    return total * backend.micro_batch_weight, count.int(), metrics


def count_labels(batch: dict) -> int:
    """Trained tokens of a whole micro-batch: the count of sum_losses."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


def new_numbers(objective, metrics: Sequence[dict] = ()) -> Numbers:
    """The (sum, count) pairs of micro-batches; zeros without any."""
    return Numbers.zeros(objective.metrics_keys, parallel.device()).add_metrics(metrics)


# -- files


def save_model(backend, args, folder: Path, tokenizer=None) -> None:
    """Write the trained model, or its adapters in PEFT's format, and the tokenizer. Collective.

    Hugging Face's format with save_hf_model, else a checkpoint of the weights.
    """
    if args.save_hf_model:
        backend.export_hf(folder, args.max_shard_size)
    else:
        ckpt.save_model(folder, backend)
    save_tokenizer(folder, tokenizer)


def save_tokenizer(folder: Path, tokenizer=None) -> None:
    """Write the tokenizer, if there is one. Collective."""
    if tokenizer is not None and parallel.is_main():
        with replacing(folder) as beside:
            tokenizer.save_pretrained(beside)
    parallel.barrier()
