"""Logging, evaluation, checkpoints and signals between steps, agreed on by all ranks.

A flag raised by a callback on one rank counts on all: flags and signals share one small all-reduce
after each step, and after each log line, evaluation and checkpoint.
"""

import contextlib
import gc
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import ckpt, parallel, watchdog
from .args import TrainingArguments
from .args_rules_training import parse_steps
from .callbacks import (
    FLAGS,
    BestModel,
    EarlyStopping,
    Interrupted,
    Profiler,
    TrainerCallback,
    export_states,
    raise_flags,
)
from .files import TRAINER_STATE_NAME
from .log import ModelWork, Throughput, peak_memory_gib

# -- numbers of a step

_COUNTS = 3
STEPS_PER_LOOK = 1000  # for garbage of all ages
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
    order of `keys`, then the tokens, the sum of squared document lengths, and the positions with
    padding."""

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

    def set_counts(self, tokens: int, squared_lengths: int, positions: int) -> None:
        self.vector[-_COUNTS:] = torch.tensor([tokens, squared_lengths, positions])

    def counts(self) -> list[float]:
        """[tokens, sum of squared document lengths, positions]. Waits for the device."""
        return self.vector[-_COUNTS:].tolist()

    def means(self, uncounted: float | None = 0.0) -> dict[str, Any]:
        """Metric -> sum / count, `uncounted` for a count of 0. Waits for the device."""
        values = self.vector.tolist()
        pairs = zip(self.keys, values[::2], values[1::2], strict=False)
        return {key: total / count if count else uncounted for key, total, count in pairs}


class RunSums:
    """The numbers of all steps of a run, and those of the steps since the last line of the log.
    nothing: the Numbers of no step. carried: to_record() of the run before it was resumed."""

    def __init__(self, nothing: Numbers, carried: dict[str, Any] | None):
        self._nothing = self.whole_run = self._window = nothing
        self._skipped = 0
        self._last_step = {}
        self._line = {}
        if carried is not None and carried["metrics"] == nothing.keys:
            self._window = Numbers(nothing.keys, nothing.vector.new_tensor(carried["sums"]))
            self._skipped = carried["skipped"]

    def add(self, numbers: Numbers, skipped: int, grad_norm: float, num_zeros: int | None) -> None:
        self.whole_run = self.whole_run + numbers
        self._window = self._window + numbers
        self._skipped += skipped
        self._last_step = {"grad_norm": grad_norm, "num_zeros_in_grad": num_zeros}

    def take(self) -> dict[str, Any]:
        """Fields of a log line: means since the last line (None without a count, as updates were
        skipped), skipped updates, numbers of the last step. A second line of a step has the same.
        Waits for the device."""
        if self._window is not self._nothing or not self._line:
            means = self._window.means(uncounted=None if self._skipped else 0.0)
            of_step = {key: value for key, value in self._last_step.items() if value is not None}
            self._line = {**means, **of_step, "skipped_iter": self._skipped}
            self._window = self._nothing
            self._skipped = 0
        return dict(self._line)

    def to_record(self) -> dict[str, Any] | None:
        """The sums since the last line, for a checkpoint; None without steps since."""
        if self._window is self._nothing:
            return None
        sums = self._window.vector.tolist()
        return {"metrics": self._window.keys, "sums": sums, "skipped": self._skipped}


# -- between steps


class StepEvents:
    """The events between the steps of one run. Its methods are collective.

    sums, throughput, work: numbers of the steps so far, for the log.
    """

    # {a flag of one step: its method}, in the order of a step
    ACTIONS = {"should_log": "log", "should_evaluate": "evaluate", "should_save": "save"}

    def __init__(self, trainer, work: ModelWork):
        carried = trainer.state.log_sums
        self.trainer = trainer
        self.sums = RunSums(trainer.new_numbers(), carried)
        self.throughput = Throughput.of(trainer.args)
        self.work = work
        trainer.backend.carry_router_sums((carried or {}).get("routers"))

    def begin_step(self, epoch_begins: bool) -> None:
        """Lower the flags of the step before, and notify the callbacks."""
        trainer = self.trainer
        if epoch_begins:
            trainer.control.should_epoch_stop = False
            trainer.notify("on_epoch_begin")
        for flag in self.ACTIONS:
            setattr(trainer.control, flag, False)
        trainer.notify("on_step_begin")
        self.throughput.start()

    def end_step(self) -> None:
        """Log, evaluate, save and answer signals if it is time, after a step was counted.
        Interrupted after a signal."""
        trainer = self.trainer
        state = trainer.state
        watchdog.note(watchdog.BETWEEN_STEPS, state.global_step)
        if trainer.guard.steps % STEPS_PER_LOOK == 1:
            collect_garbage()  # first the garbage of compiling
        steps_per_epoch = trainer.batch_plan.steps_per_epoch
        raise_flags(trainer.control, trainer.args, state, state.position % steps_per_epoch == 0)
        trainer.notify("on_step_end")
        done = self._act()
        epoch_ends = state.position % steps_per_epoch == 0  # a callback may have ended it
        if epoch_ends or state.is_over or trainer.control.should_training_stop:
            raise_flags(trainer.control, trainer.args, state, end_of_epoch=True)
            for flag in done:  # for this step already
                setattr(trainer.control, flag, False)
            trainer.notify("on_epoch_end")
            self._act()

    def agree(self) -> list[int]:
        """[a signal, 1 while a checkpoint is being written] over all ranks; a flag raised on any
        rank is raised on all. The remaining steps of a stopped epoch count as left out."""
        trainer = self.trainer
        control = trainer.control
        flags = [getattr(control, name) for name in FLAGS]
        signal, is_writing, *raised = parallel.largest(
            trainer.signals.received, int(trainer.checkpoints.is_writing), *map(int, flags)
        )
        for name, flag in zip(FLAGS, raised, strict=True):
            setattr(control, name, bool(flag))
        if control.should_epoch_stop:
            state = trainer.state
            state.left_out_steps += -state.position % trainer.batch_plan.steps_per_epoch
        return [signal, is_writing]

    def _act(self) -> list[str]:
        """Follow the flags and signals of any rank -> the flags raised."""
        trainer = self.trainer
        done = []
        signal, is_writing = self.agree()
        for flag, action in self.ACTIONS.items():
            if getattr(trainer.control, flag):
                setattr(trainer.control, flag, False)
                done.append(flag)
                getattr(self, action)()
                signal, is_writing = self.agree()
        if "should_evaluate" in done or "should_save" in done:
            collect_garbage()
        if trainer.checkpoints.is_busy and (signal or not is_writing):
            trainer.checkpoints.finish()
            signal, _ = self.agree()
        if signal:
            self._interrupt(signal)
        return done

    def log(self) -> None:
        """Add a line to the log, with the numbers of the steps since the line before."""
        trainer = self.trainer
        state = trainer.state
        of_routers = trainer.backend.router_statistics()
        logs = {
            "step": state.global_step,
            "epoch": state.epoch,
            **self.sums.take(),
            **of_routers,
            **self.throughput.take(),
            "learning_rate": trainer.lr_scheduler.get_last_lr()[0],
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_tokens,
            "peak_memory_gib": peak_memory_gib(),
        }
        state.log_history.append({k: v for k, v in logs.items() if not isinstance(v, list)})
        trainer.notify("on_log", logs=logs)

    def evaluate(self) -> None:
        """Evaluate if there is a data set for it."""
        if self.trainer.eval_dataset is not None:
            self.trainer.guard.check_evaluation(self.trainer.evaluate())

    def save(self) -> None:
        """Save this step.

        With async_save the checkpoint gets its name after the first step by the end of which all
        ranks have written, and before the next one begins: dying costs at most one interval and the
        steps made during a write.
        """
        trainer = self.trainer
        trainer.checkpoints.finish()
        watchdog.note(watchdog.SAVING)
        trainer.guard.check_weights(f"after step {trainer.state.global_step}, before it is saved")
        self._complete_state()
        trainer.checkpoints.begin()
        if not trainer.args.async_save:
            trainer.checkpoints.finish()

    def _interrupt(self, signal: int) -> None:
        """Save the run and raise Interrupted, after a signal to any rank."""
        trainer = self.trainer
        step = trainer.state.global_step
        if trainer.checkpoints.written_step != step:
            self.save()
            trainer.checkpoints.finish()
        self._store_state()
        trainer.report.end("interrupted")
        stop = Interrupted(signal, step)
        trainer.report.print(
            f"{stop.signal.name}: saved after step {step}; resume_from_checkpoint: auto goes on "
            "from here"
        )
        raise stop

    def _complete_state(self) -> None:
        """Copy into the state the numbers kept by other objects between steps."""
        trainer = self.trainer
        trainer.state.stateful_callbacks = export_states(trainer.callbacks)
        sums = self.sums.to_record()
        trainer.state.log_sums = sums and {**sums, "routers": trainer.backend.router_sums()}

    def _store_state(self) -> None:
        """Write trainer_state.json to output_dir, on the main rank."""
        self._complete_state()
        folder = self.trainer.args.output_dir
        if parallel.is_main():
            os.makedirs(folder, exist_ok=True)
            self.trainer.state.save(os.path.join(folder, TRAINER_STATE_NAME))

    def end_run(self, seconds: float) -> TrainOutput:
        """After the last step: finish a checkpoint, load the best one, store the state."""
        trainer = self.trainer
        trainer.checkpoints.finish()
        watchdog.note(watchdog.ENDING)
        trainer.guard.end_run()
        best = trainer.state.best_model_checkpoint
        if trainer.args.load_best_model_at_end and best:
            ckpt.load_model(best, trainer.backend)
            trainer.report.print(f"loaded the best checkpoint {best}")
        self._store_state()
        trainer.notify("on_train_end")
        loss = self.sums.whole_run.means()["loss"]
        metrics = {"train_loss": loss, "train_runtime": seconds}
        return TrainOutput(trainer.state.global_step, loss, metrics)


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
