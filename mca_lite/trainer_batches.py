"""The micro-batches of a step, as a trainer reads them from a loader."""

from collections.abc import Iterator

import torch

from . import watchdog
from .constants import IGNORE_INDEX
from .data_batches import BatchPlan, check_batch, count_tokens


def plan_batches(trainer, dataset, training: bool) -> BatchPlan:
    """Which samples make up which micro-batch on which rank. ValueError for a dataset without a
    length.
    """
    args, backend, size = trainer.args, trainer.backend, trainer.args.per_device_eval_batch_size
    if dataset is None or not hasattr(dataset, "__len__"):
        name = "train_dataset" if training else "eval_dataset"
        raise ValueError(f"{name}: expected a dataset with a length, got {dataset!r}")
    if training:
        size = args.per_device_train_batch_size
    return BatchPlan(
        len(dataset),
        size,
        # evaluation takes as many micro-batches at once: a pipeline wants more than one
        args.gradient_accumulation_steps,
        backend.dp_rank,
        backend.dp_size,
        seed=args.seed if args.data_seed is None else args.data_seed,
        shuffle=trainer.shuffle and training,
        costs=getattr(dataset, "costs", None),  # other people's datasets have none
    )


def read_step(
    trainer, loader: Iterator, plan: BatchPlan, step: int
) -> tuple[list[dict], tuple[int, int, int]]:
    """(this rank's micro-batches of a step, padded to one length; their tokens, squared document
    lengths and positions).
    """
    watchdog.note("reading data", trainer.state.global_step)
    backend, names = trainer.backend, trainer._language_input_names
    real, numbered = plan.num_micro_batches(step), trainer._rows_hold_documents
    batches = [check_batch(next(loader), names, numbered) for _ in range(real)]
    counts = [count_tokens(batch) for batch in batches]
    # the schedule wants a multiple: empty ones follow
    for _ in range(-real % backend.micro_batch_multiple):
        batches.append(_empty_batch(batches[0]))
    batches = [trainer._arrange(batch) for batch in batches]
    longest = backend.common_length(max(batch["input_ids"].shape[1] for batch in batches))
    batches = [trainer._to_length(batch, longest) for batch in batches]
    tokens = sum(tokens for tokens, _ in counts)
    squared_lengths = sum(squares for _, squares in counts)
    watchdog.note("running the model")
    return batches, (tokens, squared_lengths, sum(b["input_ids"].numel() for b in batches))


def _empty_batch(batch: dict) -> dict:
    """A batch of this one's shape that carries no loss, and is padding where tokens are counted."""
    nothing = torch.zeros_like(batch["labels"])
    return {**batch, "labels": nothing + IGNORE_INDEX, "attention_mask": nothing}
