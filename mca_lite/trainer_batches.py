"""The micro-batches of a step, as a trainer reads them from a loader."""

from collections.abc import Iterator

import torch

from . import watchdog
from .constants import IGNORE_INDEX
from .data_batches import BatchPlan, check_batch, count_tokens
from .data_stream import TokenStream


def plan_batches(trainer, dataset, training: bool) -> BatchPlan:
    """Which samples make up which micro-batch on which rank. ValueError for a dataset without a
    length.
    """
    args, backend, size = trainer.args, trainer.backend, trainer.args.per_device_eval_batch_size
    streams = training and isinstance(dataset, TokenStream)
    if streams and args.max_steps <= 0:
        raise ValueError("max_steps: a streamed dataset has no length: set max_steps")
    if isinstance(dataset, dict) or not (streams or hasattr(dataset, "__len__")):
        name, what = "train_dataset" if training else "eval_dataset", "a dataset with a length"
        what = "one dataset" if isinstance(dataset, dict) else what
        raise ValueError(f"{name}: expected {what}, got {dataset!r:.200}")
    if training:
        size = args.per_device_train_batch_size
    if streams:
        of_a_step = size * args.gradient_accumulation_steps * backend.dp_size
    return BatchPlan(
        args.max_steps * of_a_step if streams else len(dataset),
        size,
        # evaluation takes as many micro-batches at once: a pipeline wants more than one
        args.gradient_accumulation_steps,
        backend.dp_rank,
        backend.dp_size,
        seed=args.seed if args.data_seed is None else args.data_seed,
        shuffle=trainer.shuffle and training and not streams,  # it has an order of its own
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
    batches = [next(loader) for _ in range(real)]
    if "data_position" in batches[-1]:  # of a stream
        trainer.state.data_position = batches[-1]["data_position"]
    batches = [check_batch(batch, names, numbered) for batch in batches]
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
