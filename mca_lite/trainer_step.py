"""A step's parts: its micro-batches as they are read, and the numbers that are summed over them,
over steps and over ranks; what a run returns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import watchdog
from .constants import IGNORE_INDEX
from .data_batches import BatchPlan, check_batch, count_tokens
from .data_packs import samples_of
from .data_stream import TokenStream

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


class RunSums:
    """The numbers of all steps of a run, and those of the steps since the last line of the log.
    nothing: the Numbers of no step. carried: what to_record() gave before the run was resumed."""

    def __init__(self, nothing: Numbers, carried: dict[str, Any] | None):
        self._nothing = self.whole_run = self._window = nothing
        self._skipped, self._last_step, self._line = 0, {}, {}
        if carried is not None and carried["metrics"] == nothing.keys:
            self._window = Numbers(nothing.keys, nothing.vector.new_tensor(carried["sums"]))
            self._skipped = carried["skipped"]

    def add(self, numbers: Numbers, skipped: int, grad_norm: float, num_zeros: int | None) -> None:
        self.whole_run, self._window = self.whole_run + numbers, self._window + numbers
        self._skipped += skipped
        self._last_step = {"grad_norm": grad_norm, "num_zeros_in_grad": num_zeros}

    def take(self) -> dict[str, Any]:
        """For a line of the log: means since the last line (None where nothing was counted, as
        updates were skipped), skipped updates, numbers of the last step. A second line of a step
        has the same. Waits for the device."""
        if self._window is not self._nothing or not self._line:
            means = self._window.means(uncounted=None if self._skipped else 0.0)
            of_step = {key: value for key, value in self._last_step.items() if value is not None}
            self._line = {**means, **of_step, "skipped_iter": self._skipped}
            self._window, self._skipped = self._nothing, 0
        return dict(self._line)

    def to_record(self) -> dict[str, Any] | None:
        """The sums since the last line, for a checkpoint; None where no step was made since."""
        if self._window is self._nothing:
            return None
        sums = self._window.vector.tolist()
        return {"metrics": self._window.keys, "sums": sums, "skipped": self._skipped}


# -- micro-batches


def plan_batches(trainer, dataset, training: bool = True) -> BatchPlan:
    """Which samples make up which micro-batch on which rank. ValueError for a dataset without a
    length, and for one whose documents are known to be too long for the model."""
    args, backend, size = trainer.args, trainer.backend, trainer.args.per_device_eval_batch_size
    streams = training and isinstance(dataset, TokenStream)
    if streams and args.max_steps <= 0:
        raise ValueError("max_steps: a streamed dataset has no length: set max_steps")
    if isinstance(dataset, dict) or not (streams or hasattr(dataset, "__len__")):
        name = "train_dataset" if training else "eval_dataset"
        what = "a dataset with a length (a list; streaming: true reads files as they come)"
        if isinstance(dataset, dict):
            what = "one dataset"
        raise ValueError(f"{name}: expected {what}, got {dataset!r:.200}")
    # other people's datasets have none
    lengths = getattr(samples_of(dataset), "document_lengths", None)
    if lengths is not None and len(lengths):
        trainer.limits.check_positions(int(lengths.max()))
    if training:
        size = args.per_device_train_batch_size
    if streams:
        of_a_step = size * args.gradient_accumulation_steps * backend.dp_size
        num_samples = args.max_steps * of_a_step
    else:
        num_samples = len(dataset)
    return BatchPlan(
        num_samples,
        size,
        # evaluation takes as many micro-batches at once: a pipeline wants more than one
        args.gradient_accumulation_steps,
        backend.dp_rank,
        backend.dp_size,
        seed=args.order_seed,
        shuffle=trainer.shuffle and training and not streams,  # it has an order of its own
        costs=getattr(dataset, "costs", None),  # other people's datasets have none
    )


def read_step(
    trainer, loader: Iterator, plan: BatchPlan, step: int
) -> tuple[list[dict], tuple[int, int, int]]:
    """(this rank's micro-batches of a step, padded to one length; their tokens, squared document
    lengths and positions)."""
    watchdog.note("reading data", trainer.state.global_step)
    batches = [next(loader) for _ in range(plan.num_micro_batches(step))]
    found = arrange(trainer, batches)
    if "data_position" in batches[-1]:  # of a stream
        trainer.state.data_position = batches[-1]["data_position"]
    watchdog.note("running the model")
    return found


def arrange(trainer, batches: list[dict]) -> tuple[list[dict], tuple[int, int, int]]:
    """What read_step returns, of the batches of a data collator. Collective where the layout wants
    one length on all ranks."""
    backend, names = trainer.backend, trainer._language_input_names
    # whether a row may hold several documents, which its attention_mask numbers
    numbered = trainer.args.sequence_packing or trainer.documents_per_sample > 1
    batches = [check_batch(batch, names, numbered, trainer.limits) for batch in batches]
    counts = [count_tokens(batch) for batch in batches]
    # the schedule wants a multiple: others of the same shape follow, which carry no loss, and are
    # padding where tokens are counted
    if missing := -len(batches) % backend.micro_batch_multiple:
        nothing = torch.zeros_like(batches[0]["labels"])
        empty = {**batches[0], "labels": nothing + IGNORE_INDEX, "attention_mask": nothing}
        batches += [empty] * missing
    batches = [trainer._arrange(batch) for batch in batches]
    longest = backend.common_length(max(batch["input_ids"].shape[1] for batch in batches))
    batches = [trainer._to_length(batch, longest) for batch in batches]
    tokens = sum(tokens for tokens, _ in counts)
    squared_lengths = sum(squares for _, squares in counts)
    return batches, (tokens, squared_lengths, sum(b["input_ids"].numel() for b in batches))
