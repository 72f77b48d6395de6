"""A run's state and callbacks: progress, the best model, and signals."""

import itertools
import math
import signal
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

from . import parallel, world
from .errors import Keys, expect
from .files import PathLike, read_json, write_json

# -- state and callbacks


@dataclass
class TrainerState:
    """Progress of a run, written to trainer_state.json. Counts are over all ranks. A step is an
    optimizer step, also if its update was skipped."""

    # load() checks values by these types, which isinstance must be able to take
    global_step: int = 0
    epoch: int | float = 0.0
    max_steps: int = 0
    num_train_epochs: int | float = 0.0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    log_history: list = field(default_factory=list)
    best_metric: int | float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    resumes: list = field(default_factory=list)  # the steps from which the run was resumed
    left_out_steps: int = 0  # skipped because a callback ended an epoch early
    data_position: dict | None = None  # with streaming: where the next step begins
    log_sums: dict | None = None  # sums since the last log line
    objective: dict = field(default_factory=dict)  # what a loss keeps between steps, such as means
    stateful_callbacks: dict = field(default_factory=dict)  # class name -> saved states

    def forget_best(self) -> None:
        self.best_metric = self.best_global_step = self.best_model_checkpoint = None

    def count_step(self, samples: int, tokens: int, steps_per_epoch: int) -> None:
        self.global_step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens
        self.epoch = self.position / steps_per_epoch

    @property
    def position(self) -> int:
        """The run's position in the order of its data, in steps: the steps made, plus the steps
        that were left out because a callback ended an epoch early."""
        return self.global_step + self.left_out_steps

    @property
    def is_over(self) -> bool:
        return self.position >= self.max_steps

    @property
    def is_world_process_zero(self) -> bool:
        return parallel.is_main()

    @property
    def is_local_process_zero(self) -> bool:
        return world.current().local_rank == 0

    @property
    def num_input_tokens_seen(self) -> int:
        return self.consumed_tokens

    def save(self, path: PathLike) -> None:
        """Write the state as JSON, atomically."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: PathLike) -> "TrainerState":
        """The state in a JSON file. Other keys, such as Hugging Face's Trainer writes, are ignored.

        Raises OSError for a missing file, ValueError if it is no JSON object with global_step, or a
        value has another type.
        """
        found = {k: v for k, v in read_json(path).items() if k in cls.__dataclass_fields__}
        expect("global_step" in found, f"{path}: expected a JSON object with global_step")
        for name, value in found.items():
            expect(
                isinstance(value, cls.__annotations__[name]),
                f"{path}: {name} cannot be {value!r:.40}",
            )
        return cls(**found)


@dataclass(slots=True)
class TrainerControl:
    """Flags that callbacks set for the loop, with transformers' names; another name raises
    AttributeError.

    should_training_stop ends the run after this step, or before the first one if on_train_begin
    sets it; flags that are set before train() are forgotten. should_epoch_stop goes on with the
    next epoch, if there is one (a stream is one epoch); the skipped steps count as steps of the
    run, so the run does not get longer; it has no effect from on_train_begin. should_log,
    should_evaluate and should_save, set from on_step_begin to on_step_end, are followed after this
    step in this order; they are cleared before each step."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False


FLAGS = tuple(TrainerControl.__dataclass_fields__)


def raise_flags(
    control: TrainerControl, args: Keys, state: TrainerState, end_of_epoch: bool
) -> None:
    """Set those of the flags should_log, should_evaluate and should_save that are due after a step,
    as logging_steps, eval_strategy, save_strategy and their intervals in `args` say. Called after
    `state` has counted the step. At max_steps all three are due, except for a strategy "no"; not so
    if a callback ends the run earlier. end_of_epoch: True after the last step of an epoch or of the
    run. Flags that are set already stay set."""
    last = state.is_over

    def is_time(strategy: str, interval: Any) -> bool:
        if strategy == "no":
            return False
        if strategy == "epoch":
            return last or end_of_epoch
        return last or state.global_step % interval == 0

    control.should_log |= is_time("steps", args.logging_steps)
    control.should_evaluate |= is_time(args.eval_strategy, args.eval_steps)
    control.should_save |= is_time(args.save_strategy, args.save_steps)


class TrainerCallback:
    """Base class of callbacks. Each method may read `args` (TrainingArguments) and `state`
    (TrainerState) and set flags of `control` (TrainerControl); it returns None or the control.

    Order within a step: on_step_begin, on_substep_end, on_pre_optimizer_step, on_optimizer_step,
    on_step_end, then on_log, on_evaluate and on_save; the evaluation after an epoch's last step,
    which a callback can choose, may follow the save, and with async_save on_save may come in a
    later step. Each gets as keywords: trainer, model, optimizer, lr_scheduler, processing_class,
    train_dataloader and eval_dataloader. What is not made yet is None, and so is eval_dataloader
    outside of a pass over evaluation or prediction data.
    """

    def on_init_end(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called at the end of McaTrainer's constructor; there is no optimizer yet."""

    def on_train_begin(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called before the first step; in a resumed run `state.global_step` is not 0."""

    def on_epoch_begin(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called before the first step of an epoch, or of a run resumed within one."""

    def on_step_begin(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called before a step takes its micro-batches from the loader."""

    def on_substep_end(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called once per micro-batch except the last one, after the schedule has run all
        micro-batches of the step."""

    def on_pre_optimizer_step(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called after the backward passes, before gradients are clipped and weights updated."""

    def on_optimizer_step(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called once the weights are updated, or the update was skipped, before the step is
        counted."""

    def on_step_end(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called after each optimizer step, also a skipped one."""

    def on_epoch_end(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called after the last step of an epoch or of the run, also if a callback ended the epoch
        or the run with that step."""

    def on_log(
        self,
        args: Keys,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        """Called per log line of training. logs: losses and metrics are over all ranks for the
        steps since the line before; grad_norm and learning_rate are the last step's; step, epoch
        and consumed_* are current; peak_memory_gib is this process's."""

    def on_evaluate(
        self,
        args: Keys,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        """Called after an evaluation. metrics: its results; names begin with eval_, or with the
        prefix given to evaluate()."""

    def on_prediction_step(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called after each step of an evaluation or a prediction."""

    def on_predict(
        self,
        args: Keys,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        """Called after predict(). metrics: its results; names begin with its prefix."""

    def on_save(
        self,
        args: Keys,
        state: TrainerState,
        control: TrainerControl,
        path: str,
        step: int,
        **kwargs: Any,
    ) -> Any:
        """Called when the checkpoint of step `step` at `path` is complete. With async_save, later
        steps may have been made."""

    def on_train_end(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called after the last step, before the final export. With load_best_model_at_end the best
        checkpoint, if there is one, is loaded already."""


def ranking_of(metric: str | None, greater_is_better: bool | None = None) -> tuple[str, bool]:
    """(the metric that ranks checkpoints, such as "eval_loss"; True if a greater value is better).
    metric: metric_for_best_model, with or without eval_; None: the loss. If greater_is_better is
    None, lower is better for names that end with loss, ppl or perplexity, otherwise greater."""
    name = "eval_" + (metric or "loss").removeprefix("eval_")
    if greater_is_better is None:
        greater_is_better = not name.endswith(("loss", "ppl", "perplexity"))
    return name, greater_is_better


def value_of(args: Keys, metrics: dict[str, Any]) -> float | None:
    """The value in `metrics` of the metric that ranks checkpoints. None if no name begins with
    eval_, because the user evaluated with another prefix. ValueError if the metric is missing."""
    if not any(name.startswith("eval_") for name in metrics):
        return None
    metric, _ = ranking_of(args.metric_for_best_model)
    expect(
        metric in metrics,
        f"the evaluation gave no {metric}, only {', '.join(sorted(metrics))}: set "
        "metric_for_best_model to one of them",
    )
    return float(metrics[metric])


def gain_of(args: Keys, value: float, best: float | None) -> float:
    """By how much `value`, of the metric that ranks checkpoints, is better than `best`; negative if
    it is worse. If `best` is None, infinity for a finite value. NaN if the value is NaN."""
    _, rises = ranking_of(args.metric_for_best_model, args.greater_is_better)
    sign = 1 if rises else -1
    return sign * value - (-math.inf if best is None else sign * best)


class BestModel(TrainerCallback):
    """Notes the best evaluation so far in `state`: its value (best_metric), its step
    (best_global_step), and the checkpoint of that step (best_model_checkpoint), which may be saved
    before or after the evaluation. Until there is one, best_model_checkpoint is the checkpoint of
    an earlier best step, if any. With load_best_model_at_end, this callback asks for a checkpoint
    of each best step that has none yet, and the trainer loads the best one at the end."""

    _last_saved: tuple[int, str] = (-1, "")

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._last_saved = (-1, "")  # not that of an earlier call of train()

    def on_evaluate(
        self,
        args: Keys,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        value = value_of(args, metrics)
        if value is None or not gain_of(args, value, state.best_metric) > 0:
            return
        state.best_metric = value
        state.best_global_step = state.global_step
        step, path = self._last_saved
        if step == state.global_step:
            state.best_model_checkpoint = path
        elif args.load_best_model_at_end:
            control.should_save = True

    def on_save(
        self,
        args: Keys,
        state: TrainerState,
        control: TrainerControl,
        path: str,
        step: int,
        **kwargs: Any,
    ) -> None:
        self._last_saved = (step, path)
        if state.best_global_step == step:
            state.best_model_checkpoint = path


# -- their states, in checkpoints


def export_states(callbacks: list[Any]) -> dict[str, Any]:
    """{class name: [state of each callback of the class]}, for callbacks that keep a state: from
    state_dict(), or from state() of transformers' ExportableState."""
    states: dict[str, Any] = {}
    for callback in filter(_has_state, callbacks):
        take = getattr(callback, "state_dict", None) or callback.state
        states.setdefault(type(callback).__name__, []).append(take())
    return states


def restore_states(callbacks: list[Any], states: dict[str, Any]) -> None:
    """Restore the callbacks, in place, from export_states() of a checkpoint. Callbacks of one class
    take the saved states of this class in order; callbacks without a saved state do not change."""
    left = {name: iter(found) for name, found in states.items()}
    for callback in filter(_has_state, callbacks):
        for state in itertools.islice(left.get(type(callback).__name__, ()), 1):
            if hasattr(callback, "load_state_dict"):
                callback.load_state_dict(state)
            else:  # keep this run's arguments, restore the attributes
                vars(callback).update(state["attributes"])


def _has_state(callback: Any) -> bool:
    is_exportable = callable(getattr(callback, "state", None)) and hasattr(callback, "from_state")
    return is_exportable or hasattr(callback, "load_state_dict")


# -- signals

# exit code after a signal: the run is saved, and resume_from_checkpoint: auto goes on with it
EXIT_CODE = 85
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interrupted(SystemExit):
    """Raised to end a run because of `signal`, after `step` steps; the exit code is EXIT_CODE.
    During training a checkpoint has been saved before; in a pass over the data before training
    there is none to save."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(EXIT_CODE)
        self.signal = signal.Signals(number)
        self.step = step


class StopSignals:
    """While this context is open, SIGTERM, SIGINT and SIGUSR1 do not end the process; the last
    one's number is in `received` (0: none). Only the main thread can set handlers; in another
    thread nothing changes."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: object) -> None:
        self.received = number

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
