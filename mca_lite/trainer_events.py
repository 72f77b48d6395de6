"""What happens around a step: callbacks hear of it, all ranks agree on what they ask for, and log
lines, evaluations and checkpoints follow.

Flags that callbacks raise on one rank count on all: they travel with the signals in one small
all-reduce after each step, and after each log line, evaluation and checkpoint.
"""

import contextlib
import gc
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import ckpt, ckpt_folder, parallel, watchdog
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
from .ckpt_folder import CheckpointError
from .data_batches import BatchPlan, check_batch, count_tokens, samples_of
from .data_stream import TokenStream
from .files import IGNORE_INDEX, TRAINER_STATE_NAME
from .log import peak_memory_gib

# -- micro-batches and numbers of a step

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
        """For a line of the log: means since the last line (None where nothing was counted, as
        updates were skipped), skipped updates, numbers of the last step. A second line of a step
        has the same. Waits for the device."""
        if self._window is not self._nothing or not self._line:
            means = self._window.means(uncounted=None if self._skipped else 0.0)
            of_step = {key: value for key, value in self._last_step.items() if value is not None}
            self._line = {**means, **of_step, "skipped_iter": self._skipped}
            self._window = self._nothing
            self._skipped = 0
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
    args = trainer.args
    backend = trainer.backend
    size = trainer.args.per_device_eval_batch_size
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
    backend = trainer.backend
    # whether a row may hold several documents, which its attention_mask numbers
    numbered = trainer.args.sequence_packing or trainer.documents_per_sample > 1
    batches = [check_batch(batch, numbered, trainer.limits) for batch in batches]
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


# -- events around a step

_STEPS_PER_LOOK = 1000  # for garbage of all ages
_NEVER = 2**31 - 1  # younger collections before one of all ages

# Methods of transformers' and mcore_adapter's trainers that this loop does not call -> ours.
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

# Arguments of hooks that other trainers have under these names, with another meaning.
_OTHER_ARGUMENTS = {
    "_post_compute_loss": {"loss_mask", "logits"},
    "_pre_compute_loss": {"data_iterator", "model"},
    "training_step": {"model", "inputs", "num_items_in_batch"},
}
# What those are that this loop gives to hooks.
_ARGUMENTS = {
    "batch": "the micro-batch, with the columns of losses as this rank has them",
    "inputs": "the model's arguments, made of the batch",
    "labels": "token ids [b, s], IGNORE_INDEX where there is no loss",
    "losses": "those of tokens [b, s], 0 where there is no label",
    "models": "the chunks that are trained",
    "data_iterator": "the micro-batches of a step",
    "ref_chosen_logps": "log-probabilities of the reference [pairs]",
}


def check_given(model, args) -> None:
    """TypeError for a model, or arguments, that are none."""
    if not hasattr(model, "config"):
        raise TypeError(
            "model: expected what AutoModel.from_pretrained(folder, args) gives, or a model of "
            f"transformers, got {model!r:.100}"
        )
    if not isinstance(args, TrainingArguments):
        raise TypeError(f"args: expected TrainingArguments of this package, got {args!r:.100}")


def as_callback(callback):
    """A callback of ours or of transformers, as an instance. TypeError for anything else."""
    made = callback() if isinstance(callback, type) else callback
    missing = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    missing = [name for name in missing if not callable(getattr(made, name, None))]
    if missing:
        raise TypeError(
            f"callback {made!r} has no {missing[0]}: derive it from mca_lite.TrainerCallback or "
            "transformers.TrainerCallback"
        )
    return made


def callbacks_of(args) -> list[TrainerCallback]:
    """Those that TrainingArguments ask for."""
    found: list[TrainerCallback] = []
    if args.eval_strategy != "no":
        found.append(BestModel())
    if args.early_stopping_patience is not None:
        found.append(EarlyStopping())
    if args.profile_steps:
        found.append(Profiler(*parse_steps(args.profile_steps)))
    return found


def check_hooks(trainer, base: type) -> None:
    """TypeError where a subclass of `base` overrides what is never called, or called otherwise."""
    kinds = type(trainer).__mro__
    for place, kind in enumerate(kinds[: kinds.index(base)]):
        for name in vars(kind).keys() & _OTHER_HOOKS.keys():
            raise TypeError(
                f"{kind.__name__}.{name} would never be called: override {_OTHER_HOOKS[name]}"
            )
        for name, member in vars(kind).items():
            if name == "__init__":
                continue  # whoever makes the trainer calls it
            own_caller = name == "_post_compute_loss" and "_pre_compute_loss" in vars(kind)
            ours = next((vars(k)[name] for k in kinds[place + 1 :] if name in vars(k)), None)
            if inspect.isfunction(ours) and inspect.isfunction(member) and not own_caller:
                _check_signature(f"{kind.__name__}.{name}", member, ours)


def _check_signature(where: str, member: Callable, ours: Callable) -> None:
    """TypeError where `member` cannot be called with the arguments that `ours` must have, or names
    them as those of others, or in another order."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    taken = inspect.signature(ours).parameters.values()
    needed = [p.name for p in taken if p.kind in kinds and p.default is p.empty]
    try:
        inspect.signature(member).bind(*needed)
    except TypeError as error:
        listed = ", ".join(needed[1:])
        raise TypeError(f"{where} is called with ({listed}): {error}") from None
    foreign = {*needed, *_OTHER_ARGUMENTS.get(ours.__name__, ())}
    for name, theirs in zip(needed, inspect.signature(member).parameters, strict=False):
        if theirs in foreign - {name}:
            listed = ", ".join(needed[1:])
            meant = "; ".join(f"{n}: {_ARGUMENTS[n]}" for n in needed if n in _ARGUMENTS)
            raise TypeError(
                f"{where} is called with ({listed}), and has {theirs!r} in the place of {name}: "
                f"{meant}"
            )


def agree(trainer) -> list[int]:
    """[a signal, whether a checkpoint is being written, whether the loss was a spike], over all
    ranks; a flag that was raised on any rank is raised on all. Collective."""
    control = trainer.control
    writer = trainer._writer
    flags = [int(getattr(control, name)) for name in FLAGS]
    own = [trainer._signals.received, writer.still_writes, trainer._guard.is_spike]
    of_all = parallel.largest(*own, *flags)
    for name, raised in zip(FLAGS, of_all[len(own) :], strict=True):
        setattr(control, name, bool(raised))
    return of_all[: len(own)]


def collect_garbage() -> None:
    """Free cycles of all ages on the host of a GPU. A look at all objects takes 0.4 s, in which a
    GPU runs out of work: all ranks take it after the same step."""
    if torch.cuda.is_available():
        gc.collect()


@contextlib.contextmanager
def steady_host(args):
    """Within, a host that feeds a GPU is not held up: Python looks at young objects alone for
    garbage, and collect_garbage() at all. Nothing is frozen: a frozen trainer would stay for good,
    as gc.unfreeze() would take what a host program froze along. And torch computes on one thread,
    unless the host makes updates: the others spin after each operation, and take the time of that
    one."""
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


def begin_step(trainer, epoch_begins: bool) -> None:
    """Lower the flags of the step before, and tell the callbacks."""
    if epoch_begins:
        trainer.control.should_epoch_stop = False
        trainer._notify("on_epoch_begin")
    for flag in _ACTIONS:
        setattr(trainer.control, flag, False)
    trainer._notify("on_step_begin")


def end_step(trainer) -> None:
    """Log, evaluate, save and answer signals where it is time, after a step that has been counted.
    Collective; Interrupted after a signal."""
    args = trainer.args
    state = trainer.state
    steps_per_epoch = trainer.batch_plan.steps_per_epoch
    watchdog.note(watchdog.BETWEEN_STEPS, state.global_step)
    if trainer._guard.steps % _STEPS_PER_LOOK == 1:
        collect_garbage()  # first what compiling left behind
    raise_flags(trainer.control, args, state, state.position % steps_per_epoch == 0)
    trainer._notify("on_step_end")
    done = _act(trainer)
    is_last = state.is_over or trainer.control.should_training_stop
    if is_last or state.position % steps_per_epoch == 0:
        raise_flags(trainer.control, args, state, end_of_epoch=True)
        for flag in done:  # for this step already
            setattr(trainer.control, flag, False)
        trainer._notify("on_epoch_end")
        _act(trainer)


def _act(trainer) -> list[str]:
    """Do what flags and signals on any rank ask for -> the flags that were raised."""
    done = []
    signal, still_writes, is_spike = _agree_on_epoch(trainer)
    for flag, action in _ACTIONS.items():
        if getattr(trainer.control, flag):
            setattr(trainer.control, flag, False)
            done.append(flag)
            action(trainer)
            signal, still_writes, is_spike = _agree_on_epoch(trainer)
    if is_spike:
        trainer._guard.name_spike()
    if "should_evaluate" in done or "should_save" in done:
        collect_garbage()
    if trainer._writer.is_busy and (signal or not still_writes):
        finish_checkpoint(trainer)
        signal, *_ = _agree_on_epoch(trainer)
    if signal:
        answer_signals(trainer, signal)
    return done


def _agree_on_epoch(trainer) -> list[int]:
    """agree(), and the steps that an epoch has left count as left out where it is to stop: before a
    checkpoint is written."""
    agreed = agree(trainer)
    state = trainer.state
    if trainer.control.should_epoch_stop:
        state.left_out_steps += -state.position % trainer.batch_plan.steps_per_epoch
    return agreed


def log_line(trainer) -> None:
    """Add a line to the log, with the numbers of the steps since the line before, and tell the
    callbacks. Collective."""
    state = trainer.state
    of_routers = trainer.backend.router_statistics()
    logs = {
        "step": state.global_step,
        "epoch": state.epoch,
        **trainer._sums.take(),
        **of_routers,
        **trainer._throughput.take(),
        "learning_rate": trainer.lr_scheduler.get_last_lr()[0],
        "consumed_samples": state.consumed_samples,
        "consumed_tokens": state.consumed_tokens,
        "peak_memory_gib": peak_memory_gib(),
    }
    state.log_history.append({k: v for k, v in logs.items() if not isinstance(v, list)})
    trainer._notify("on_log", logs=logs)


def _evaluate(trainer) -> None:
    if trainer.eval_dataset is not None:
        trainer._guard.check_evaluation(trainer.evaluate())


# -- checkpoints, and the end of a run


def save_checkpoint(trainer) -> None:
    """Save this step. Collective.

    With async_save it gets its name after the first step by whose end all ranks have written, and
    before the next one begins: dying costs at most one interval and the steps that were made during
    a write.
    """
    finish_checkpoint(trainer)
    watchdog.note(watchdog.SAVING)
    trainer._guard.check_weights(f"after step {trainer.state.global_step}, before it is saved")
    _complete_state(trainer)
    trainer._writer.begin()
    if not trainer.args.async_save:
        finish_checkpoint(trainer)


# {a flag of one step: what it asks for}, in the order of a step
_ACTIONS = {"should_log": log_line, "should_evaluate": _evaluate, "should_save": save_checkpoint}


def finish_checkpoint(trainer) -> None:
    """Wait for all ranks to have written a checkpoint that is on its way, and give it its name.
    Collective.

    Older ones are pruned for it after the next good step: its weights may be finite, and lost.
    """
    if not trainer._writer.is_busy:
        return
    watchdog.note(watchdog.SAVING)
    folder, step = trainer._writer.finish()
    trainer._notify("on_save", path=str(folder), step=step)
    if trainer._guard.is_on:
        trainer._guard.unproven = folder
    else:
        prune(trainer, folder)


def prune(trainer, folder) -> None:
    """Delete the oldest checkpoints beyond save_total_limit; `folder` is the newest. Collective."""
    best = trainer.state.best_model_checkpoint
    limit = trainer.args.save_total_limit
    parallel.on_main(lambda: ckpt_folder.prune(folder, best, limit), CheckpointError)


def answer_signals(trainer, signal: int) -> None:
    """Save the run and raise Interrupted, after a signal to any rank. Collective."""
    if trainer._writer.written_step != trainer.state.global_step:
        save_checkpoint(trainer)
        finish_checkpoint(trainer)
    store_state(trainer)
    trainer.report.end("interrupted")
    stop = Interrupted(signal, trainer.state.global_step)
    trainer.report.print(
        f"{stop.signal.name}: saved after step {stop.step}; resume_from_checkpoint: auto goes on "
        "from here"
    )
    raise stop


def _complete_state(trainer) -> None:
    """Put into the state what is kept elsewhere while steps are made. Collective."""
    trainer.state.stateful_callbacks = export_states(trainer.callbacks)
    sums = trainer._sums.to_record()
    trainer.state.log_sums = sums and {**sums, "routers": trainer.backend.router_sums()}


def store_state(trainer) -> None:
    """Write trainer_state.json to output_dir, on the main rank. Collective."""
    _complete_state(trainer)
    if parallel.is_main():
        os.makedirs(trainer.args.output_dir, exist_ok=True)
        trainer.state.save(os.path.join(trainer.args.output_dir, TRAINER_STATE_NAME))


def finish_run(trainer, seconds: float) -> TrainOutput:
    """What is left after the last step: the checkpoint on its way, the best one, the state's file.
    Collective."""
    finish_checkpoint(trainer)
    watchdog.note(watchdog.ENDING)
    trainer._guard.end_run()
    best = trainer.state.best_model_checkpoint
    if trainer.args.load_best_model_at_end and best:
        ckpt.load_model(best, trainer.backend)
        trainer.report.print(f"loaded the best checkpoint {best}")
    store_state(trainer)
    trainer._notify("on_train_end")
    loss = trainer._sums.whole_run.means()["loss"]
    metrics = {"train_loss": loss, "train_runtime": seconds}
    return TrainOutput(trainer.state.global_step, loss, metrics)
