"""The numbers that a step adds up over micro-batches, steps and ranks, and what a run returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .log_speed import Throughput, peak_flops

_COUNTS = 3


class TrainOutput(NamedTuple):
    global_step: int
    training_loss: float
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    predictions: None
    label_ids: None
    metrics: dict[str, float]
    num_samples: int
    numbers: "Numbers | None" = None  # what the metrics are means of, over all ranks


@dataclass
class Numbers:
    """One float64 vector, so that one collective sums it over the ranks: (sum, count) of each
    metric in the order of `keys`, then the tokens, the sum of squared document lengths, and the
    positions with padding."""

    keys: list[str]
    vector: torch.Tensor

    @classmethod
    def zeros(cls, keys: list[str], device: torch.device) -> "Numbers":
        size = 2 * len(keys) + _COUNTS
        return cls(keys, torch.zeros(size, dtype=torch.float64, device=device))

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(self.keys, self.vector + other.vector)

    def add_metrics(self, metrics: Sequence[dict[str, torch.Tensor]]) -> "Numbers":
        """Add the (sum, count) pairs of micro-batches in place -> self."""
        for i, key in enumerate(self.keys):
            for of_micro_batch in metrics:
                self.vector[2 * i : 2 * i + 2] += of_micro_batch[key].to(self.vector.dtype)
        return self

    def set_counts(self, tokens: int, squared_lengths: int, positions: int) -> None:
        self.vector[-_COUNTS:] = torch.tensor([tokens, squared_lengths, positions])

    def read(self) -> tuple[float | None, list[float]]:
        """(the mean of the first metric, None where nothing was counted; [tokens, sum of squared
        document lengths, positions]). Waits for the device."""
        total, count, *rest = self.vector.tolist()
        return total / count if count else None, rest[-_COUNTS:]

    def means(self, uncounted: float | None = 0.0) -> dict[str, Any]:
        """Metric -> sum / count; `uncounted` where nothing was counted. Waits for the device."""
        values = self.vector.tolist()
        means = {}
        for key, total, count in zip(self.keys, values[::2], values[1::2], strict=False):
            means[key] = total / max(count, 1) if count else uncounted
        return means


def advance(trainer, plan, samples: int, counts: list[float], throughput: Throughput):
    """Count a step whose numbers are `counts`, as Numbers.read gives them."""
    state, (tokens, squares, positions) = trainer.state, counts
    state.global_step += 1
    state.consumed_samples += samples
    state.consumed_tokens += int(tokens)
    state.epoch = state.position / plan.steps_per_epoch
    flops = 0.0
    if trainer._work is not None:
        flops = trainer._work.flops(tokens, squares)
    throughput.stop(int(tokens), int(positions), samples, flops)


def throughput_of(args) -> Throughput:
    """The meter of a run with these TrainingArguments on this rank's device."""
    name, dtype = "", torch.float32
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    if args.bf16 or args.fp16:
        dtype = torch.bfloat16 if args.bf16 else torch.float16
    return Throughput(args.world_size, peak_flops(name, dtype))
