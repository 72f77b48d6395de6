"""Numbers of steps, summed over ranks; the host's garbage; checks of a trainer's arguments."""

import contextlib
import gc
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .args import TrainingArguments
from .args_rules_training import parse_steps
from .callbacks import BestModel, EarlyStopping, Profiler, TrainerCallback

# -- numbers of a step

_COUNTS = 5
_NEVER = 2**31 - 1  # younger collections before one of all ages


class TrainOutput(NamedTuple):
    global_step: int
    training_loss: float
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    predictions: None
    label_ids: None
    metrics: dict[str, float]
    num_samples: int
    numbers: "Numbers | None" = None  # of all ranks: the metrics are their means


@dataclass
class Numbers:
    """One float64 vector, summed over ranks by one collective: (sum, count) of each metric in the
    order of `keys`, then the numbers of count_tokens and the positions with padding."""

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

    def with_pairs(self, pairs: dict[str, tuple[float, int]]) -> "Numbers":
        """These numbers and more metrics, as {metric: (sum, count)}."""
        more = self.vector.new_tensor(list(pairs.values())).flatten()
        end = len(self.vector) - _COUNTS
        vector = torch.cat([self.vector[:end], more, self.vector[end:]])
        return Numbers([*self.keys, *pairs], vector)

    def set_counts(self, *counts: int) -> None:
        self.vector[-_COUNTS:] = torch.tensor(counts)

    def counts(self) -> list[float]:
        """Those of data_batches.count_tokens, and the positions. Waits for the device."""
        return self.vector[-_COUNTS:].tolist()

    def means(self, uncounted: float | None = 0.0) -> dict[str, Any]:
        """Metric -> sum / count, `uncounted` for a count of 0. Waits for the device."""
        values = self.vector.tolist()
        pairs = zip(self.keys, values[::2], values[1::2], strict=False)
        return {key: total / count if count else uncounted for key, total, count in pairs}


class RunSums:
    """The numbers of all steps of a run, and those of the steps since the last line of the log.
    nothing: the Numbers of no step. carried: to_record() of the run before it was resumed, or
    {}."""

    def __init__(self, nothing: Numbers, carried: dict[str, Any]):
        self._nothing = self.whole_run = self._window = nothing
        self._skipped = 0
        self._last_step = {}
        sums = carried.get("sums", ())  # a former version has other counts
        if carried.get("metrics") == nothing.keys and len(sums) == len(nothing.vector):
            self._window = Numbers(nothing.keys, nothing.vector.new_tensor(sums))
            self._skipped = carried["skipped"]

    def add(self, numbers: Numbers, skipped: int, grad_norm: float, num_zeros: int | None) -> None:
        self.whole_run = self.whole_run + numbers
        self._window = self._window + numbers
        self._skipped += skipped
        self._last_step = {"grad_norm": grad_norm, "num_zeros_in_grad": num_zeros}

    def take(self) -> dict[str, Any]:
        """Fields of a log line: means since the last line (None without a count, as updates were
        skipped), skipped updates, numbers of the last step; {} without steps since. Waits for the
        device."""
        if self._window is self._nothing:
            return {}
        means = self._window.means(uncounted=None if self._skipped else 0.0)
        of_step = {key: value for key, value in self._last_step.items() if value is not None}
        line = {**means, **of_step, "skipped_iter": self._skipped}
        self._window = self._nothing
        self._skipped = 0
        return line

    def to_record(self) -> dict[str, Any] | None:
        """The sums since the last line, for a checkpoint; None without steps since."""
        if self._window is self._nothing:
            return None
        sums = self._window.vector.tolist()
        return {"metrics": self._window.keys, "sums": sums, "skipped": self._skipped}


# -- the host of a GPU


def collect_garbage() -> None:
    """Free cycles of all ages on the host of a GPU. A look at all objects takes 0.4 s, in which a
    GPU runs out of work: all ranks take it after the same step."""
    if torch.cuda.is_available():
        gc.collect()


@contextlib.contextmanager
def steady_host(args):
    """Keep the host of a GPU from stalling it: Python looks for garbage among young objects alone,
    and collect_garbage() among all. Nothing is frozen: a frozen trainer would stay for good, as
    gc.unfreeze() would take objects frozen by a host program along. And torch computes on one
    thread, unless the host makes updates: other threads spin after each operation, and take that
    one's time."""
    threads = torch.get_num_threads()
    thresholds = gc.get_threshold()
    if torch.cuda.is_available():
        gc.set_threshold(*thresholds[:2], _NEVER)
        if not args.optimizer_cpu_offload:
            torch.set_num_threads(1)
    collect_garbage()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        torch.set_num_threads(threads)


# -- checks of a trainer's arguments

# Methods of transformers' and mcore_adapter's trainers, not called by this loop -> those called.
_OTHER_HOOKS = {
    "compute_loss": "_post_compute_loss(labels, losses)",
    "_compute_loss": "_post_compute_loss(labels, losses)",
    "_inner_forward_step": "forward_step(data_iterator, model)",
    "get_batch": "_prepare_train_inputs(data_iterator)",
    "_prepare_inputs": "_prepare_train_inputs(data_iterator)",
    "get_batch_on_this_cp_rank": "_prepare_train_inputs(data_iterator)",
    "_pad_batched_inputs": "_to_length(batch, at_least)",
    "create_optimizer_and_scheduler": "create_optimizer() or create_scheduler(num_training_steps)",
    "get_test_dataloader": "eval_dataset and data_collator",
    "_get_eval_sampler": "eval_dataset and data_collator",
    "_prepare_model": "the model that the trainer is given",
    "_inner_training_loop": "train(resume_from_checkpoint), or callbacks",
    "_maybe_log_save_evaluate": "callbacks and the flags of TrainerControl",
    "_save_checkpoint": "TrainerCallback.on_save, or save_model(output_dir)",
    "_get_train_sampler": "the order of train_dataset, with shuffle=False",
    "get_eval_dataloader": "eval_dataset and data_collator",
    "prediction_step": "_post_compute_loss(labels, losses)",
    "log": "TrainerCallback.on_log",
}

# Names of arguments of other trainers' hooks.
_OTHER_ARGUMENTS = {"loss_mask", "logits", "data_iterator", "model", "inputs"}


def check_given(model, args) -> None:
    """TypeError for a model or arguments of another type."""
    if not hasattr(model, "config"):
        raise TypeError(
            "model: expected what AutoModel.from_pretrained(folder, args) gives, or a model of "
            f"transformers, got {model!r:.100}"
        )
    if not isinstance(args, TrainingArguments):
        raise TypeError(f"args: expected TrainingArguments of this package, got {args!r:.100}")


def as_callback(callback):
    """A callback of this package or of transformers, as an instance. TypeError for anything
    else."""
    made = callback() if isinstance(callback, type) else callback
    if not hasattr(made, "on_init_end"):
        raise TypeError(
            f"callback {made!r} has no on_init_end: derive it from mca_lite.TrainerCallback or "
            "transformers.TrainerCallback"
        )
    return made


def callbacks_of(args) -> list[TrainerCallback]:
    """The callbacks for these TrainingArguments."""
    found: list[TrainerCallback] = []
    if args.eval_strategy != "no":
        found.append(BestModel())
    if args.early_stopping_patience is not None:
        found.append(EarlyStopping())
    if args.profile_steps:
        found.append(Profiler(*parse_steps(args.profile_steps)))
    return found


def check_hooks(kind: type, base: type) -> None:
    """TypeError if a subclass `kind` of `base` overrides a method that is never called, or called
    with other arguments."""
    kinds = kind.__mro__
    for owner in kinds[: kinds.index(base)]:
        for name, member in vars(owner).items():
            where = f"{owner.__name__}.{name}"
            if name in _OTHER_HOOKS:
                raise TypeError(f"{where} would never be called: override {_OTHER_HOOKS[name]}")
            original = getattr(super(owner, kind), name, None)
            is_override = inspect.isfunction(member) and inspect.isfunction(original)
            # __init__ has the caller that makes the trainer
            has_caller = name == "_post_compute_loss" and "_pre_compute_loss" in vars(owner)
            if is_override and not has_caller and name != "__init__":
                _check_signature(where, member, original)


def _check_signature(where: str, member: Callable, original: Callable) -> None:
    """TypeError if `member` cannot be called with the required arguments of `original`, or has
    names of other trainers' arguments or of others of them in their places."""
    taken = inspect.signature(original).parameters.values()
    needed = [p.name for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    called = f"{where} is called with ({', '.join(needed[1:])})"
    signature = inspect.signature(member)
    try:
        signature.bind(*needed)
    except TypeError as error:
        raise TypeError(f"{called}: {error}") from None
    for name, other in zip(needed, signature.parameters, strict=False):
        if other != name and other in _OTHER_ARGUMENTS.union(needed):
            raise TypeError(f"{called}, and has {other!r} in the place of {name}")
