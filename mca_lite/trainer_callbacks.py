"""TrainerState, TrainerControl, the callbacks, and the signals that end a run early.

They bear the names of transformers' trainer, whose own callbacks work as they are. The loop calls
every callback on every rank with the same numbers. A flag of `TrainerControl` that any rank raises
counts on all. A callback that writes files does so on one rank only (state.is_world_process_zero).

SIGTERM and SIGUSR1, which schedulers send before they take a machine away, and SIGINT (Ctrl-C)
mean: finish the step, save, leave. torchrun passes SIGTERM and SIGINT on to its ranks by itself. It
passes on SIGUSR1 with --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1; without that,
SIGUSR1 ends torchrun, and its ranks save and leave once they miss it. It kills ranks
--shutdown-timeout seconds (30 by default) after it has passed a signal on: set that above the time
of a step and a checkpoint.
"""

import math
import os
import signal
import threading
from dataclasses import asdict, dataclass, field

from . import parallel
from .files import read_json, write_json

_COUNTS = ("global_step", "consumed_samples", "consumed_tokens", "left_out_steps")
_STATE_TYPES = {  # what a file may hold; fields that a new run sets anew are not looked at
    **dict.fromkeys(_COUNTS, (int,)),
    "log_history": (list,),
    "best_metric": (int, float, type(None)),
    "best_global_step": (int, type(None)),
    "best_model_checkpoint": (str, type(None)),
    "data_position": (dict, type(None)),
    "log_sums": (dict, type(None)),
    "stateful_callbacks": (dict,),
}


@dataclass
class TrainerState:
    """Where a run stands; written to trainer_state.json. Counts are over all ranks, a step is an
    optimizer step."""

    global_step: int = 0
    epoch: float = 0.0
    max_steps: int = 0
    num_train_epochs: float = 0.0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    log_history: list[dict] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    left_out_steps: int = 0  # of epochs that a callback stopped early
    data_position: dict | None = None  # of a stream: where the next step begins
    log_sums: dict | None = None  # of the steps since the last line of the log
    stateful_callbacks: dict = field(default_factory=dict)  # by class name, as they were saved

    def forget_best(self) -> None:
        self.best_metric = self.best_global_step = self.best_model_checkpoint = None

    def count_step(self, samples: int, tokens: int, steps_per_epoch: int) -> None:
        self.global_step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens
        self.epoch = self.position / steps_per_epoch

    @property
    def position(self) -> int:
        """The steps of the data's order that are behind the run, made or left out."""
        return self.global_step + self.left_out_steps

    @property
    def is_over(self) -> bool:
        return self.position >= self.max_steps

    @property
    def is_world_process_zero(self) -> bool:
        return parallel.is_main()

    @property
    def is_local_process_zero(self) -> bool:
        return parallel.local_rank() == 0

    @property
    def num_input_tokens_seen(self) -> int:
        return self.consumed_tokens

    def save(self, path: str | os.PathLike) -> None:
        """Writes the state as JSON, in one step."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "TrainerState":
        """Returns the state in the JSON file `path`. Keys that only Hugging Face's Trainer knows
        are passed over.

        Raises OSError where there is no such file, ValueError where it does not hold a state.
        """
        found = {k: v for k, v in read_json(path).items() if k in cls.__dataclass_fields__}
        if "global_step" not in found:
            raise ValueError(f"{path}: expected a JSON object with global_step")
        for name, value in found.items():
            if type(value) not in _STATE_TYPES.get(name, (type(value),)):
                raise ValueError(f"{path}: {name} cannot be {value!r:.40}")
        if any(found.get(name, 0) < 0 for name in _COUNTS):
            raise ValueError(f"{path}: expected counts of at least 0")
        if not all(isinstance(line, dict) for line in found.get("log_history", [])):
            raise ValueError(f"{path}: log_history is no list of objects")
        return cls(**found)


@dataclass(slots=True)
class TrainerControl:
    """What callbacks ask of the loop, in transformers' names; another name is an AttributeError.

    should_training_stop ends the run after this step. should_epoch_stop goes on with the next
    epoch: the steps that are left out count as steps of the run, which ends no later. should_log,
    should_evaluate and should_save ask for this step, and are lowered when it is done.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False


FLAGS = tuple(TrainerControl.__dataclass_fields__)


def raise_flags(control: TrainerControl, args, state: TrainerState, end_of_epoch: bool) -> None:
    """Raise what the TrainingArguments ask for after the step that `state` has just counted."""
    step, last = state.global_step, state.is_over

    def is_time(strategy: str, interval: int | None) -> bool:
        if strategy == "no":
            return False
        if strategy == "epoch":
            return last or end_of_epoch
        return last or (interval is not None and step % interval == 0)

    control.should_log |= is_time("steps", args.logging_steps)
    control.should_evaluate |= is_time(args.eval_strategy, args.eval_steps)
    control.should_save |= is_time(args.save_strategy, args.save_steps)


class TrainerCallback:
    """Base of callbacks: each method may read `args` (TrainingArguments) and `state` (TrainerState)
    and set flags of `control` (TrainerControl); it returns None, or the control.

    Order within a step: on_step_begin, on_substep_end, on_pre_optimizer_step, on_optimizer_step,
    on_step_end, on_log, on_evaluate, on_save. Each gets as keywords: trainer, model, optimizer,
    lr_scheduler, processing_class, train_dataloader and eval_dataloader (None outside of a loop).
    """

    def on_init_end(self, args, state, control, **kwargs):
        """At the end of McaTrainer's constructor; there is no optimizer yet."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Before the first step; `state.global_step` is not 0 in a resumed run."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        """Before the first step of an epoch, or of a run that resumes within one."""

    def on_step_begin(self, args, state, control, **kwargs):
        """Before the data of a step is read."""

    def on_substep_end(self, args, state, control, **kwargs):
        """Once for each micro-batch but the last, after the schedule has run all of them."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Gradients are there, summed over ranks, before they are clipped."""

    def on_optimizer_step(self, args, state, control, **kwargs):
        """After the update, before the step is counted."""

    def on_step_end(self, args, state, control, **kwargs):
        """After each optimizer step, skipped ones included."""

    def on_epoch_end(self, args, state, control, **kwargs):
        """After the last step of an epoch, or of the run."""

    def on_log(self, args, state, control, logs: dict, **kwargs):
        """`logs` is one line of the log: numbers over all ranks, for the steps since the line
        before."""

    def on_evaluate(self, args, state, control, metrics: dict, **kwargs):
        """`metrics` are those of one evaluation, their names starting with eval_, or with the
        prefix that evaluate() was given."""

    def on_prediction_step(self, args, state, control, **kwargs):
        """After each step of an evaluation or a prediction."""

    def on_predict(self, args, state, control, metrics: dict, **kwargs):
        """`metrics` are those that predict() returns, their names starting with its prefix."""

    def on_save(self, args, state, control, path: str, step: int, **kwargs):
        """The checkpoint at `path`, of the step `step`, is complete. With async_save later steps
        may have been made."""

    def on_train_end(self, args, state, control, **kwargs):
        """After the last step, before the final export."""


def _deciding_metric(args) -> str:
    """The metric of an evaluation that metric_for_best_model names, the loss without it."""
    return ranking_of(args.metric_for_best_model)[0]


def ranking_of(metric: str | None, greater_is_better: bool | None = None) -> tuple[str, bool]:
    """(the deciding metric, eval_ before it, whether it rises), as metric_for_best_model and
    greater_is_better say. Where the latter does not, losses and perplexities fall, others rise."""
    name = metric or "loss"
    name = name if name.startswith("eval_") else f"eval_{name}"
    rises = greater_is_better
    if rises is None:
        rises = not name.endswith(("loss", "ppl", "perplexity"))
    return name, rises


def _value_of(args, metrics: dict) -> float | None:
    """The deciding metric's; None for an evaluation of another kind than the loop's, which has a
    prefix of its own."""
    if not any(name.startswith("eval_") for name in metrics):
        return None
    metric = _deciding_metric(args)
    if metric not in metrics:
        raise ValueError(
            f"the evaluation gave no {metric}, only {', '.join(sorted(metrics))}: set "
            "metric_for_best_model to one of them"
        )
    return float(metrics[metric])


def _is_better(args, value: float, best: float | None, threshold: float = 0.0) -> bool:
    """Whether a value of the deciding metric is better than the best by more than `threshold`."""
    if math.isnan(value):
        return False  # a diverged model is never the best, not even the first time
    if best is None:
        return True
    _, rises = ranking_of(args.metric_for_best_model, args.greater_is_better)
    return (value - best if rises else best - value) > threshold


class BestModel(TrainerCallback):
    """Keeps state.best_metric, best_global_step and best_model_checkpoint, from which the trainer
    reloads at the end.

    The checkpoint counts for the best step when it is saved at that very step, before or after the
    evaluation.
    """

    _last_saved: tuple[int, str] | None = None

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        value = _value_of(args, metrics)
        if value is None or not _is_better(args, value, state.best_metric):
            return
        state.best_metric, state.best_global_step = value, state.global_step
        if self._last_saved is not None and self._last_saved[0] == state.global_step:
            state.best_model_checkpoint = self._last_saved[1]
        elif args.load_best_model_at_end:
            control.should_save = True

    def on_save(self, args, state, control, path, step, **kwargs):
        self._last_saved = (step, path)
        if state.best_global_step == step:
            state.best_model_checkpoint = path


class EarlyStopping(TrainerCallback):
    """Asks the loop to stop after early_stopping_patience evaluations in a row that are not better
    by more than early_stopping_threshold.

    A resumed run goes on counting where it was: the count is read off state.log_history, which the
    checkpoint holds. Where it is full already, nothing more is trained.
    """

    evaluations_without_gain = 0
    _best: float | None = None

    def _count(self, args, value: float) -> None:
        self.evaluations_without_gain += 1
        if _is_better(args, value, self._best, args.early_stopping_threshold):
            self._best, self.evaluations_without_gain = value, 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._best, self.evaluations_without_gain = None, 0
        metric = _deciding_metric(args)
        for record in state.log_history:
            if metric in record:
                self._count(args, float(record[metric]))
        self._stop_if_full(args, control)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        value = _value_of(args, metrics)
        if value is None:
            return
        self._count(args, value)
        self._stop_if_full(args, control)

    def _stop_if_full(self, args, control) -> None:
        if self.evaluations_without_gain >= args.early_stopping_patience:
            control.should_training_stop = True


# -- their states, in checkpoints


def export_states(callbacks: list) -> dict:
    """Class name -> the state of each callback that has one: transformers' ExportableState's
    state(), or state_dict(). A list of them where a class has several callbacks."""
    states: dict = {}
    for callback in callbacks:
        if not _has_state(callback):
            continue
        take = getattr(callback, "state_dict", None) or callback.state
        states.setdefault(type(callback).__name__, []).append(take())
    return {name: found[0] if len(found) == 1 else found for name, found in states.items()}


def restore_states(callbacks: list, states: dict) -> None:
    """Put callbacks where a checkpoint's `states` say that they were, in place."""
    left = {k: list(v) if isinstance(v, list) else [v] for k, v in states.items()}
    for callback in callbacks:
        found = left.get(type(callback).__name__)
        if not found or not _has_state(callback):
            continue
        state = found.pop(0)
        if hasattr(callback, "load_state_dict"):
            callback.load_state_dict(state)
        else:  # its arguments are this run's
            vars(callback).update(state["attributes"])


def _has_state(callback) -> bool:
    return hasattr(callback, "load_state_dict") or (
        callable(getattr(callback, "state", None)) and hasattr(callback, "from_state")
    )


# -- signals

# of a run that was asked to stop, saved, and can go on with resume_from_checkpoint: auto
EXIT_CODE = 85
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interrupted(SystemExit):
    """The run has saved and stops. `signal` is the one that asked for it; the process ends with
    EXIT_CODE."""

    def __init__(self, number: int, step: int):
        super().__init__(EXIT_CODE)
        self.signal, self.step = signal.Signals(number), step


class StopSignals:
    """While this context is open, SIGNALS are noted in `received` (0: none) instead of ending the
    process. Only the main thread can set handlers: in another one nothing is changed."""

    def __init__(self):
        self.received = 0
        self._before = {}

    def _note(self, number, frame) -> None:
        self.received = number

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
