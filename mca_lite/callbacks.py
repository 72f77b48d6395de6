"""torch's profiler over some steps of a run: a trace of each rank, and a table by kind of kernel.

Runs without profile_steps record nothing and are not slowed down.
"""

import math
import os
import re
import signal
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from . import parallel, world
from .files import read_json, write_json

# -- state and callbacks

_COUNTS = ("global_step", "consumed_samples", "consumed_tokens", "left_out_steps")
_STATE_TYPES = {  # of fields in a file; those set anew by each run are not checked
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
    """Progress of a run; written to trainer_state.json. Counts are over all ranks, a step is an
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
    left_out_steps: int = 0  # of epochs stopped early by a callback
    data_position: dict | None = None  # of a stream: the begin of the next step
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
    step = state.global_step
    last = state.is_over

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


def _deciding_metric(args) -> str:
    """The metric named by metric_for_best_model, the loss without it."""
    return ranking_of(args.metric_for_best_model)[0]


def ranking_of(metric: str | None, greater_is_better: bool | None = None) -> tuple[str, bool]:
    """(the deciding metric, with eval_ before it, True if it rises), of metric_for_best_model and
    greater_is_better. Without the latter, losses and perplexities fall, others rise."""
    name = metric or "loss"
    name = name if name.startswith("eval_") else f"eval_{name}"
    rises = greater_is_better
    if rises is None:
        rises = not name.endswith(("loss", "ppl", "perplexity"))
    return name, rises


def _value_of(args, metrics: dict) -> float | None:
    """The deciding metric's value; None for an evaluation with another prefix than the loop's."""
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
    """True if a value of the deciding metric is better than the best by more than `threshold`."""
    if math.isnan(value):
        return False  # a diverged model is never the best, not even the first time
    if best is None:
        return True
    _, rises = ranking_of(args.metric_for_best_model, args.greater_is_better)
    return (value - best if rises else best - value) > threshold


class BestModel(TrainerCallback):
    """Keeps state.best_metric, best_global_step and best_model_checkpoint, reloaded by the trainer
    at the end.

    The checkpoint counts for the best step if it is saved at this step, before or after the
    evaluation.
    """

    _last_saved: tuple[int, str] | None = None

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        value = _value_of(args, metrics)
        if value is None or not _is_better(args, value, state.best_metric):
            return
        state.best_metric = value
        state.best_global_step = state.global_step
        if self._last_saved is not None and self._last_saved[0] == state.global_step:
            state.best_model_checkpoint = self._last_saved[1]
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

    def _count(self, args, value: float) -> None:
        self.evaluations_without_gain += 1
        if _is_better(args, value, self._best, args.early_stopping_threshold):
            self._best = value
            self.evaluations_without_gain = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._best = None
        self.evaluations_without_gain = 0
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
    """Class name -> the state of each callback with one: transformers' ExportableState's state(),
    or state_dict(). A list of them for several callbacks of a class."""
    states: dict = {}
    for callback in callbacks:
        if not _has_state(callback):
            continue
        take = getattr(callback, "state_dict", None) or callback.state
        states.setdefault(type(callback).__name__, []).append(take())
    return {name: found[0] if len(found) == 1 else found for name, found in states.items()}


def restore_states(callbacks: list, states: dict) -> None:
    """Put callbacks into the `states` of a checkpoint, in place."""
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

FOLDER = "profile"  # in output_dir
_OTHER = "other"
# the kind of a kernel, or of an operation of the CPU, by its name: the first fitting row counts. A
# rank of gloo waits within the autograd function of its communication.
_KINDS = (
    ("communication", "nccl|gloo|c10d|ParallelRegion|AsyncCommunication"),
    ("attention", "attention|flash|fmha|sdpa"),
    ("matmul", r"gemm|nvjet|cutlass|::(add|baddb|b)?mm\b|matmul|linear\b|grouped_mm"),
    ("optimizer", "adam|sgd|optimizer|multi_tensor|foreach"),
    ("norm, elementwise", "triton_"),  # their names say copy too
    ("copy", r"memcpy|memset|copy|\bcat\b|CatArray|clone|contiguous|::fill_|FillFunctor"),
    (
        "norm, elementwise",
        "norm|elementwise|reduce|silu|swiglu|softmax|TokenLosses|::(mul|add|sub|div|pow|sum|mean"
        "|neg|exp|log|rsqrt|sqrt|where|masked_fill|max|min|gelu)",
    ),
)


class Profiler(TrainerCallback):
    """Profiles the steps from `first` to `last`, counted from 1, on every rank."""

    def __init__(self, first: int, last: int):
        self.first = first
        self.last = last
        self.running: torch.profiler.profile | None = None
        self.began = self.since = 0

    def on_step_begin(self, args, state, control, **kwargs):
        if self.running is None and self.first <= state.global_step + 1 <= self.last:
            self.running = torch.profiler.profile(acc_events=True)  # False warns
            self.running.start()
            self.began = time.perf_counter()
            self.since = state.global_step

    def on_step_end(self, args, state, control, trainer, **kwargs):
        if state.global_step >= self.last:
            self.on_train_end(args, state, control, trainer)

    def on_train_end(self, args, state, control, trainer, **kwargs):
        if self.running is None:
            return
        folder = Path(args.output_dir) / FOLDER
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        profile = self.running
        self.running = None
        profile.stop()
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"trace_rank{parallel.rank()}.json.gz"))
        if parallel.is_main():
            steps = f"profile of steps {self.since + 1} to {state.global_step}, rank 0"
            head = f"{steps}, {seconds:.2f} s; traces of all ranks are in {folder}"
            trainer.report.print("\n".join([head, *table(profile.key_averages(), seconds)]))


def kind_of(name: str) -> str:
    """The kind of a kernel or an operation by its name."""
    fitting = (kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE))
    return next(fitting, _OTHER)


def table(events, seconds: float) -> list[str]:
    """Lines: the time of each kind with its share of `seconds`, and its longest kernel; of kernels
    if a GPU was seen, else of operations without the ones they call."""
    cuda = torch.autograd.DeviceType.CUDA
    on_gpu = [one for one in events if one.device_type == cuda and not one.is_user_annotation]
    times: dict[str, dict[str, float]] = {}
    for one in on_gpu or events:
        spent = (one.self_device_time_total if on_gpu else one.self_cpu_time_total) / 1e6
        of_kind = times.setdefault(kind_of(one.key), {})
        of_kind[one.key] = of_kind.get(one.key, 0.0) + spent
    sums = {kind: sum(of_kind.values()) for kind, of_kind in times.items()}
    lines = []
    for kind in sorted(sums, key=lambda kind: -sums[kind]):
        longest = max(times[kind], key=lambda name: times[kind][name])
        share = sums[kind] / seconds
        lines.append(f"  {kind:18} {sums[kind] * 1e3:9,.1f} ms {share:6.1%}  {longest:.60}")
    between = max(0.0, seconds - sum(sums.values()))
    idle = "no kernel runs" if on_gpu else "Python between them"
    return [*lines, f"  {idle:18} {between * 1e3:9,.1f} ms {between / seconds:6.1%}"]
