"""State and callbacks of a run: the best model, early stopping, signals, and the profiler."""

import itertools
import math
import os
import signal
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from . import parallel, world
from .errors import expect
from .files import read_json, write_json

# -- state and callbacks


@dataclass
class TrainerState:
    """Progress of a run; written to trainer_state.json. Counts are over all ranks, a step is an
    optimizer step."""

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
    resumes: list = field(default_factory=list)  # steps of the checkpoints it went on with
    left_out_steps: int = 0  # of epochs stopped early by a callback
    data_position: dict | None = None  # of a stream: the begin of the next step
    log_sums: dict | None = None  # of the steps since the last line of the log
    objective: dict = field(default_factory=dict)  # numbers of a loss beyond a step, such as means
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
        """Steps done in the data's order, made or left out."""
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

    def save(self, path: str | os.PathLike) -> None:
        """Writes the state as JSON, in one step."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "TrainerState":
        """Returns the state in the JSON file `path`, without keys of Hugging Face's Trainer alone.

        Raises OSError for a missing file, ValueError for other content.
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
    """Flags of callbacks for the loop, by transformers' names; another name is an AttributeError.

    should_training_stop ends the run after this step. should_epoch_stop goes on with the next
    epoch: the steps left out count as steps of the run, and its end is no later. should_log,
    should_evaluate and should_save are for this step, and are lowered when it is done.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False


FLAGS = tuple(TrainerControl.__dataclass_fields__)


def raise_flags(control: TrainerControl, args, state: TrainerState, end_of_epoch: bool) -> None:
    """Raise the flags of the TrainingArguments' intervals, after `state` has counted a step."""
    last = state.is_over

    def is_time(strategy: str, interval) -> bool:
        if strategy == "no":
            return False
        if strategy == "epoch":
            return last or end_of_epoch
        return last or state.global_step % interval == 0

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
        """Before the first step of an epoch, or of a run resumed within one."""

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
        prefix given to evaluate()."""

    def on_prediction_step(self, args, state, control, **kwargs):
        """After each step of an evaluation or a prediction."""

    def on_predict(self, args, state, control, metrics: dict, **kwargs):
        """`metrics` are those of predict(), their names starting with its prefix."""

    def on_save(self, args, state, control, path: str, step: int, **kwargs):
        """The checkpoint at `path`, of the step `step`, is complete. With async_save later steps
        may have been made."""

    def on_train_end(self, args, state, control, **kwargs):
        """After the last step, before the final export."""


def ranking_of(metric: str | None, greater_is_better: bool | None = None) -> tuple[str, bool]:
    """(the deciding metric, with eval_ before it, True if it rises), of metric_for_best_model and
    greater_is_better. Without the latter, losses and perplexities fall, others rise."""
    name = "eval_" + (metric or "loss").removeprefix("eval_")
    if greater_is_better is None:
        greater_is_better = not name.endswith(("loss", "ppl", "perplexity"))
    return name, greater_is_better


def _value_of(args, metrics: dict) -> float | None:
    """The deciding metric's value; None for an evaluation with another prefix than the loop's."""
    if not any(name.startswith("eval_") for name in metrics):
        return None
    metric, _ = ranking_of(args.metric_for_best_model)
    expect(
        metric in metrics,
        f"the evaluation gave no {metric}, only {', '.join(sorted(metrics))}: set "
        "metric_for_best_model to one of them",
    )
    return float(metrics[metric])


def _gain(args, value: float, best: float | None) -> float:
    """The distance by which a value of the deciding metric is better than the best (None: than
    anything); NaN for that of a diverged model, greater than no threshold."""
    _, rises = ranking_of(args.metric_for_best_model, args.greater_is_better)
    sign = 1 if rises else -1
    return sign * value - (-math.inf if best is None else sign * best)


class BestModel(TrainerCallback):
    """Keeps state.best_metric, best_global_step and best_model_checkpoint, reloaded by the trainer
    at the end.

    The checkpoint counts for the best step if it is saved at this step, before or after the
    evaluation.
    """

    _last_saved: tuple[int, str] = (-1, "")

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        value = _value_of(args, metrics)
        if value is None or not _gain(args, value, state.best_metric) > 0:
            return
        state.best_metric = value
        state.best_global_step = state.global_step
        step, path = self._last_saved
        if step == state.global_step:
            state.best_model_checkpoint = path
        elif args.load_best_model_at_end:
            control.should_save = True

    def on_save(self, args, state, control, path, step, **kwargs):
        self._last_saved = (step, path)
        if state.best_global_step == step:
            state.best_model_checkpoint = path


class EarlyStopping(TrainerCallback):
    """Stops the loop after early_stopping_patience evaluations in a row without a gain of more than
    early_stopping_threshold.

    A resumed run goes on counting: the count is read off state.log_history of the checkpoint. If it
    is full already, nothing more is trained.
    """

    evaluations_without_gain = 0
    _best: float | None = None

    def _count(self, args, control, values: list[float]) -> None:
        for value in values:
            self.evaluations_without_gain += 1
            if _gain(args, value, self._best) > args.early_stopping_threshold:
                self._best = value
                self.evaluations_without_gain = 0
        if self.evaluations_without_gain >= args.early_stopping_patience:
            control.should_training_stop = True

    def on_train_begin(self, args, state, control, **kwargs):
        self._best = None
        self.evaluations_without_gain = 0
        metric, _ = ranking_of(args.metric_for_best_model)
        self._count(args, control, [line[metric] for line in state.log_history if metric in line])

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        value = _value_of(args, metrics)
        if value is not None:
            self._count(args, control, [value])


# -- their states, in checkpoints


def export_states(callbacks: list) -> dict:
    """Class name -> the states of its callbacks: of transformers' ExportableState state(), else
    state_dict()."""
    states: dict = {}
    for callback in filter(_has_state, callbacks):
        take = getattr(callback, "state_dict", None) or callback.state
        states.setdefault(type(callback).__name__, []).append(take())
    return states


def restore_states(callbacks: list, states: dict) -> None:
    """Put callbacks into the `states` of a checkpoint, in place."""
    left = {name: iter(found) for name, found in states.items()}
    for callback in filter(_has_state, callbacks):
        for state in itertools.islice(left.get(type(callback).__name__, ()), 1):
            if hasattr(callback, "load_state_dict"):
                callback.load_state_dict(state)
            else:  # its arguments are this run's
                vars(callback).update(state["attributes"])


def _has_state(callback) -> bool:
    is_exportable = callable(getattr(callback, "state", None)) and hasattr(callback, "from_state")
    return is_exportable or hasattr(callback, "load_state_dict")


# -- signals

# of a run stopped by a signal: saved, and resumed with resume_from_checkpoint: auto
EXIT_CODE = 85
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interrupted(SystemExit):
    """The run has saved and stops after `signal`; the process ends with EXIT_CODE."""

    def __init__(self, number: int, step: int):
        super().__init__(EXIT_CODE)
        self.signal = signal.Signals(number)
        self.step = step


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


# -- profiler


class Profiler(TrainerCallback):
    """Profiles the steps from `first` to `last`, counted from 1: a trace of each rank in
    output_dir/profile."""

    def __init__(self, first: int, last: int):
        self.first = first
        self.last = last
        self.running: torch.profiler.profile | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        if self.running is None and self.first <= state.global_step + 1 <= self.last:
            self.running = torch.profiler.profile(acc_events=True)  # False warns
            self.running.start()

    def on_step_end(self, args, state, control, trainer, **kwargs):
        if state.global_step >= self.last:
            self.on_train_end(args, state, control, trainer)

    def on_train_end(self, args, state, control, trainer, **kwargs):
        if self.running is None:
            return
        profile = self.running
        self.running = None
        profile.stop()
        folder = Path(args.output_dir) / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"trace_rank{parallel.rank()}.json.gz"))
        trainer.report.print(
            f"profile of steps {self.first} to {state.global_step}: traces of all ranks are in "
            f"{folder}"
        )
