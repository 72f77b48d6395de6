"""Numbers of steps, summed over ranks; finding the slowest rank; garbage collection; checks of a
trainer's arguments."""

import contextlib
import gc
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import parallel
from .args import TrainingArguments
from .callbacks import BestModel, TrainerCallback
from .errors import expect
from .log_metrics import PHASES
from .tables import function_of

# -- numbers of a step

_COUNTS = 6
_NEVER = 2**31 - 1  # young collections before a full one


class TrainOutput(NamedTuple):
    global_step: int
    training_loss: float
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    predictions: None
    label_ids: None
    metrics: dict[str, float]
    num_samples: int
    numbers: "Numbers | None" = None  # summed over all ranks; metrics are their means


@dataclass
class Numbers:
    """Metrics and counts of one or more steps in one float64 vector, so that one collective sums
    them.

    keys: names of metrics. vector: (sum, count) for each key; then the counts of
    data_batches.count_tokens: tokens, squared document lengths, patches of images and videos,
    squared patches, and frames of audio; at the end the number of positions, padding included."""

    keys: list[str]
    vector: torch.Tensor

    @classmethod
    def zeros(cls, keys: list[str], device: torch.device | str = "cpu") -> "Numbers":
        """Numbers whose sums and counts are all 0."""
        size = 2 * len(keys) + _COUNTS
        return cls(keys, torch.zeros(size, dtype=torch.float64, device=device))

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(self.keys, self.vector + other.vector)

    def add_metrics(self, metrics: Sequence[dict[str, torch.Tensor]]) -> "Numbers":
        """Add the metrics of micro-batches, each {metric: [sum, count]}, in place -> self.
        ValueError if they are other metrics than `keys`."""
        for of_micro_batch in metrics:
            sizes = {key: pair.numel() for key, pair in of_micro_batch.items()}
            expect(
                sizes == dict.fromkeys(self.keys, 2),
                f"_post_compute_loss gave the metrics {', '.join(sizes)}: expected "
                f"{', '.join(self.keys)}: name each in metrics_keys of the trainer's class, and "
                "give [sum, count]",
            )
        for i, key in enumerate(self.keys):
            for of_micro_batch in metrics:
                self.vector[2 * i : 2 * i + 2] += of_micro_batch[key].to(self.vector.dtype)
        return self

    def with_pairs(self, pairs: dict[str, tuple[float, int]]) -> "Numbers":
        """A copy with more metrics, given as {metric: (sum, count)}."""
        more = self.vector.new_tensor(list(pairs.values())).flatten()
        end = len(self.vector) - _COUNTS
        vector = torch.cat([self.vector[:end], more, self.vector[end:]])
        return Numbers([*self.keys, *pairs], vector)

    def over_ranks(self, backend: Any) -> "Numbers":
        """The totals of all ranks, on every rank: the numbers of the last pipeline stage, summed
        over data- and context-parallel ranks. Changes the vector in place. Collective."""
        return Numbers(self.keys, backend.reduce(self.vector))

    def set_counts(self, *counts: int) -> None:
        """Set the counts in place. counts: what data_batches.count_tokens returns (tokens, squared
        document lengths, image patches, squared patches, frames of audio), then the number of
        positions with padding. No device sync."""
        values = torch.tensor(counts, dtype=self.vector.dtype)
        self.vector[-_COUNTS:] = parallel.to_device(values, self.vector.device)

    def counts(self) -> list[float]:
        """[tokens, squared document lengths, image patches, squared patches, frames of audio,
        positions, padding included], as set_counts() got them. Waits for the device."""
        return self.vector[-_COUNTS:].tolist()

    def means(self, uncounted: float | None = 0.0) -> dict[str, Any]:
        """The mean of each metric, {metric: sum / count}. Waits for the device.

        uncounted: the loss's value if its count is 0; other metrics with a count of 0 are left out.
        If it is None, every metric with a count of 0 is in the result, as None."""
        values = self.vector.tolist()
        pairs = zip(self.keys, values[::2], values[1::2], strict=False)
        nothing = dict.fromkeys(self.keys if uncounted is None else ["loss"], uncounted)
        return nothing | {key: total / count for key, total, count in pairs if count}


class SentNumbers:
    """A step's Numbers, summed over ranks and copied to the host before the update is launched. So
    the host can read them, and start the next step, while the device runs the update.

    counts: this rank's token counts, as Numbers whose metrics are 0."""

    def __init__(self, counts: Numbers, backend: Any):
        self._counts = counts
        self._backend = backend
        self._metrics: Sequence[dict[str, Any]] | None = None

    def begin(self, metrics: Sequence[dict[str, torch.Tensor]]) -> None:
        """Add the micro-batches' metrics to the counts, sum over ranks, and start the copy to the
        host. Collective."""
        whole = Numbers(self._counts.keys, self._counts.vector.clone())
        whole = whole.add_metrics(metrics).over_ranks(self._backend)
        self._metrics = metrics
        self._arriving = parallel.HostCopy(whole.vector)

    def result(self, metrics: Sequence[dict[str, torch.Tensor]]) -> Numbers:
        """The step's Numbers (metrics and counts), summed over ranks, in host memory. metrics: the
        list that begin() got; for another list begin() runs again, which is collective, so then all
        ranks must pass another one."""
        if metrics is not self._metrics:
            self.begin(metrics)
        return Numbers(self._counts.keys, self._arriving.wait())


class RunSums:
    """Numbers (metrics and counts) in host memory, summed over the steps of one train() call and,
    apart from that, over the steps since the last log line.

    nothing: Numbers of zeros. carried: in a resumed run, the result of to_record() that its
    checkpoint has; {} if there is none. It is ignored if its metrics or number of counts differ."""

    def __init__(self, nothing: Numbers, carried: dict[str, Any]):
        self._nothing = self.whole_run = self._window = nothing
        self._skipped = 0
        self._last_step: dict[str, Any] = {}
        sums = carried.get("sums", ())  # earlier versions had other counts
        if carried.get("metrics") == nothing.keys and len(sums) == len(nothing.vector):
            self._window = Numbers(nothing.keys, nothing.vector.new_tensor(sums))
            self._skipped = carried["skipped"]

    def add(self, numbers: Numbers, skipped: int, grad_norm: float, num_zeros: int | None) -> None:
        """Add one step's numbers to the sums over the run and over the steps since the last log
        line. skipped: 1 if the update was skipped, else 0. grad_norm, num_zeros: the step's, for
        the log line."""
        self.whole_run = self.whole_run + numbers
        self._window = self._window + numbers
        self._skipped += skipped
        self._last_step = {"grad_norm": grad_norm, "num_zeros_in_grad": num_zeros}

    def take(self) -> dict[str, Any]:
        """The fields of a log line about the steps since the last one, {} if there were none; then
        the sums since the last line start again at 0.

        The fields are the means of metrics, the number of skipped updates, and from the last step
        the gradient norm and, if counted, the number of zeros in the gradient. A metric with a
        count of 0 is None if updates were skipped; otherwise it is left out, and the loss is 0."""
        if self._window is self._nothing:
            return {}
        means = self._window.means(uncounted=None if self._skipped else 0.0)
        of_step = {key: value for key, value in self._last_step.items() if value is not None}
        line = {**means, **of_step, "skipped_iter": self._skipped}
        self._window = self._nothing
        self._skipped = 0
        return line

    def to_record(self) -> dict[str, Any] | None:
        """The sums since the last log line as JSON values, for a checkpoint; None if there were no
        steps."""
        if self._window is self._nothing:
            return None
        sums = self._window.vector.tolist()
        return {"metrics": self._window.keys, "sums": sums, "skipped": self._skipped}


# -- the slowest rank

_RANK_BITS = 20
_BEHIND = 0.02  # a rank is named if it is behind by this share of a step
# megatron-core's timers -> phases
_OF_TIMERS = {
    "forward-compute": "model",
    "backward-compute": "model",
    "optimizer-inner-step": "update",
    "all-grads-sync": "reduction",
}
_ON_DEVICE = {*_OF_TIMERS.values()}


class Phase:
    """A stopwatch for this rank's work in one phase of training, in seconds. It runs between
    start() and stop(), or in a `with` block. on_device: True for work on a GPU, if there is one:
    the GPU's clock measures it, without a sync."""

    def __init__(self, on_device: bool = False):
        self._on_device = on_device and parallel.device().type == "cuda"
        self.reset()

    def reset(self) -> None:
        """Set the measured time to 0."""
        self._seconds = 0.0
        self._events: list[list[torch.cuda.Event]] = []  # [start, end] of unfinished work

    def _now(self) -> Any:
        """Seconds of the host's clock, or for work on a GPU a CUDA event recorded now."""
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, barrier: bool = False) -> None:
        """Begin measuring. barrier: has no effect; megatron-core's timers have this argument."""
        self._began = self._now()

    def stop(self, barrier: bool = False) -> None:
        """End measuring. barrier: has no effect."""
        if self._on_device:
            self._events.append([self._began, self._now()])
        else:
            self._seconds += self._now() - self._began

    __enter__ = start

    def __exit__(self, *error: object) -> None:
        self.stop()

    def seconds(self) -> float:
        """Seconds measured since reset(), without waiting: GPU work is included once it has
        finished."""
        while self._events and self._events[0][1].query():
            start, end = self._events.pop(0)
            self._seconds += start.elapsed_time(end) / 1000
        return self._seconds


class Phases:
    """Time that this rank spends in each phase, since the last log line, and which ranks take
    longest.

    In synchronous training all ranks take the same time per step, because fast ones wait. So the
    phases count work between communication, as far as possible. data: reading batches. model:
    forward and backward, without waiting for pipeline stages and gradients. update: the optimizer.
    save: writing a checkpoint, unless async_save does. callbacks: callbacks, including the log.
    reduction: gradient reduction, including the wait for the slowest rank; the slowest rank has the
    least of it.

    waits_in_model: True if ranks wait for each other inside layers (tensor, context, expert
    parallelism). Their model phases then end together, and last longer on ranks whose data came
    early."""

    def __init__(self, waits_in_model: bool):
        self.of = {name: Phase(name in _ON_DEVICE) for name in (*PHASES, "reduction")}
        self.steps = 0
        self._others = Phase()
        self._waits_in_model = waits_in_model
        self._slowest: dict[str, tuple[float, int]] = {}  # phase -> (seconds behind, slowest rank)
        self._reduction = 0.0

    def timer(self, name: str, log_level: int = 0) -> Phase:
        """The Phase that measures one of megatron-core's timers, such as "forward-compute", or the
        phase of this name. Used as its `config.timers`. Timers that belong to no phase share one
        Phase that is not reported."""
        return self.of.get(_OF_TIMERS.get(name, name), self._others)

    def numbers(self) -> list[int]:
        """This rank's times as integers, for compare(): reduced over ranks by their maximum, they
        show the slowest rank and the least time. First a number for each phase, its microseconds
        with the rank number in the lowest bits; then each phase's negated microseconds. With
        waits_in_model, the time of phase data is added to that of phase model."""
        micros = {name: round(1e6 * phase.seconds()) for name, phase in self.of.items()}
        if self._waits_in_model:
            micros["model"] += micros["data"]
        most = [(value << _RANK_BITS) + parallel.rank() for value in micros.values()]
        return most + [-value for value in micros.values()]

    def compare(self, largest: list[int]) -> None:
        """Store for take() each phase's slowest rank and how far it is behind the fastest, and the
        least time of a rank in gradient reduction. With waits_in_model, the lag of phase data is
        subtracted from that of phase model. largest: the elementwise maximum over ranks of the
        lists from numbers(), which the caller has reduced: there is no communication here."""
        for i, name in enumerate(PHASES):
            most, rank = divmod(largest[i], 1 << _RANK_BITS)
            self._slowest[name] = (most + largest[i + len(self.of)]) / 1e6, rank
        self._reduction = -largest[-1] / 1e6
        if self._waits_in_model:
            behind, rank = self._slowest["model"]
            self._slowest["model"] = max(0.0, behind - self._slowest["data"][0]), rank

    def take(self, step_time_s: float = 0.0) -> dict[str, Any]:
        """The fields of a log line; then times start again at 0. {} if there is only one rank.

        lag_<phase>_s: seconds per step by which the phase's slowest rank is behind the fastest.
        With waits_in_model, the model's lag is without that of the data.
        slowest_rank: the slowest rank in the phase with the largest lag, if that lag is at least 2
        % of step_time_s (the time of a step).
        reduction_s: the least seconds per step that any rank spends in gradient reduction."""
        steps = max(1, self.steps)
        lags = {f"lag_{name}_s": lag / steps for name, (lag, _) in self._slowest.items()}
        of_ranks = {**lags, "reduction_s": self._reduction / steps}
        if max(lags.values()) >= _BEHIND * step_time_s:
            of_ranks["slowest_rank"] = max(self._slowest.values())[1]
        for phase in self.of.values():
            phase.reset()
        self.steps = 0
        return of_ranks if parallel.world_size() > 1 else {}


# -- the host of a GPU


def collect_garbage() -> None:
    """On the host of a GPU: collect garbage of all ages. A full collection takes 0.4 s, in which a
    GPU runs out of work, so all ranks do it after the same step."""
    if torch.cuda.is_available():
        gc.collect()


@contextlib.contextmanager
def steady_host(args: Any) -> Iterator[None]:
    """Context in which the host of a GPU avoids pauses that would make the GPU wait. args: the
    run's TrainingArguments.

    On a GPU, automatic garbage collection is limited to young objects; collect_garbage() does the
    rest. gc.freeze is not used: it would keep a trainer alive, because gc.unfreeze also releases
    the host program's objects. torch uses one CPU thread, because more threads would spin after
    each operation and slow down the main one; with optimizer_cpu_offload their number stays."""
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

# methods of transformers' and mcore_adapter's trainers that this loop never calls -> its methods
_OTHER_HOOKS = {
    "compute_loss": "_post_compute_loss(labels, losses)",
    "_compute_loss": "_post_compute_loss(labels, losses)",
    "_inner_forward_step": "forward_step(data_iterator, model)",
    "get_batch": "inputs_of(batch)",
    "_prepare_inputs": "inputs_of(batch)",
    "get_batch_on_this_cp_rank": "inputs_of(batch)",
    "_pad_batched_inputs": "_arrange(batch)",
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

# argument names in other trainers' hooks
_OTHER_ARGUMENTS = {"loss_mask", "logits", "data_iterator", "model", "inputs"}


def check_given(model: Any, args: Any) -> None:
    """Raise TypeError if a trainer's model has no `config` attribute, or its args are not
    TrainingArguments."""
    if not hasattr(model, "config"):
        raise TypeError(
            "model: expected what AutoModel.from_pretrained(folder, args) gives, or a model of "
            f"transformers, got {model!r:.100}"
        )
    if not isinstance(args, TrainingArguments):
        raise TypeError(f"args: expected TrainingArguments of this package, got {args!r:.100}")


def as_callback(callback: Any) -> Any:
    """The callback; for a class, a new instance. TypeError if it has no on_init_end, which
    callbacks of this package and of transformers have."""
    made = callback() if isinstance(callback, type) else callback
    if not hasattr(made, "on_init_end"):
        raise TypeError(
            f"callback {made!r} has no on_init_end: derive it from mca_lite.TrainerCallback or "
            "transformers.TrainerCallback"
        )
    return made


def callbacks_of(args: Any) -> list[TrainerCallback]:
    """The built-in callbacks that these TrainingArguments need: best model, early stopping,
    profiler."""
    found: list[TrainerCallback] = []
    if args.eval_strategy != "no":
        found.append(BestModel())
    if args.early_stopping_patience is not None or args.profile_steps:
        found += function_of("part_callbacks:of_keys")(args)
    return found


def check_hooks(kind: type, base: type) -> None:
    """Check the methods of a trainer's subclass `kind` against its base class `base`. TypeError if
    one of them would never be called, such as compute_loss of transformers' Trainer, or if its
    signature does not fit the calls.

    The signatures of __init__, of class methods and of static methods are not checked, nor that of
    a _post_compute_loss beside an own _pre_compute_loss in the same class, which then calls it."""
    kinds = kind.__mro__
    for owner in kinds[: kinds.index(base)]:
        for name, member in vars(owner).items():
            where = f"{owner.__name__}.{name}"
            if name in _OTHER_HOOKS:
                raise TypeError(f"{where} would never be called: override {_OTHER_HOOKS[name]}")
            original = getattr(super(owner, kind), name, None)
            is_override = inspect.isfunction(member) and inspect.isfunction(original)
            # the user calls __init__ with arguments of their choice
            has_caller = name == "_post_compute_loss" and "_pre_compute_loss" in vars(owner)
            if is_override and not has_caller and name != "__init__":
                _check_signature(where, member, original)


def _check_signature(where: str, member: Callable[..., Any], original: Any) -> None:
    """Raise TypeError if a method that overrides another does not fit its calls: if it cannot be
    called with the required arguments of the original, or if, in the place of one of these, it
    names another of them or an argument of another library's hook. where: "Class.method", for the
    message. member: the override. original: the method of the base class."""
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
