"""Callbacks that keys turn on, early stopping and the profiler; and trackers, which send log lines
to TensorBoard or Weights & Biases."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import parallel
from .args_rules_training import parse_steps
from .callbacks import TrainerCallback, TrainerControl, TrainerState, gain_of, ranking_of, value_of
from .errors import Keys


def of_keys(args: Keys) -> list[TrainerCallback]:
    """New callbacks for the keys early_stopping_patience and profile_steps, if they are set."""
    found: list[TrainerCallback] = []
    if args.early_stopping_patience is not None:
        found.append(EarlyStopping())
    if args.profile_steps:
        found.append(Profiler(*parse_steps(args.profile_steps)))
    return found


class EarlyStopping(TrainerCallback):
    """Stops training after early_stopping_patience evaluations in a row without an improvement: a
    metric_for_best_model better than at the last improvement by more than early_stopping_threshold.

    A resumed run continues the count, which is rebuilt from the checkpoint's state.log_history. If
    the patience is used up already, no step is made.
    """

    evaluations_without_gain = 0
    _best: float | None = None

    def _count(self, args: Keys, control: TrainerControl, values: list[float]) -> None:
        for value in values:
            self.evaluations_without_gain += 1
            if gain_of(args, value, self._best) > args.early_stopping_threshold:
                self._best = value
                self.evaluations_without_gain = 0
        if self.evaluations_without_gain >= args.early_stopping_patience:
            control.should_training_stop = True

    def on_train_begin(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._best = None
        self.evaluations_without_gain = 0
        metric, _ = ranking_of(args.metric_for_best_model)
        self._count(args, control, [line[metric] for line in state.log_history if metric in line])

    def on_evaluate(
        self,
        args: Keys,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        value = value_of(args, metrics)
        if value is not None:
            self._count(args, control, [value])


class Profiler(TrainerCallback):
    """Profiles steps `first` to `last` of the run, counted from 1, as far as this process makes
    them. After the last, or at the end of train() (not after a signal or an error) if that comes
    first, each rank writes its trace to output_dir/profile."""

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self.running: torch.profiler.profile | None = None

    def on_step_begin(
        self, args: Keys, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.running is None and self.first <= state.global_step + 1 <= self.last:
            self.running = torch.profiler.profile(acc_events=True)  # torch warns if it is False
            self.running.start()

    def on_step_end(
        self,
        args: Keys,
        state: TrainerState,
        control: TrainerControl,
        trainer: Any = None,
        **kwargs: Any,
    ) -> None:
        if state.global_step >= self.last:
            self.on_train_end(args, state, control, trainer)

    def on_train_end(
        self,
        args: Keys,
        state: TrainerState,
        control: TrainerControl,
        trainer: Any = None,
        **kwargs: Any,
    ) -> None:
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


# -- trackers


def _tensorboard(args: Keys, resumed_step: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Open a TensorBoard log in output_dir/runs -> (a function that logs {name: value} for a step,
    a function that closes the log). resumed_step: the step from which the run resumes; later
    entries, from a crashed run, are hidden. 0: the run starts anew."""
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides what a crashed run wrote after the resumed step
    purge_step = resumed_step + 1 if resumed_step else None
    writer = SummaryWriter(os.path.join(args.output_dir, "runs"), purge_step=purge_step)

    def track(numbers: dict[str, Any], step: int) -> None:
        for key, value in numbers.items():
            group = "eval/" if key.startswith("eval_") else "train/"
            writer.add_scalar(group + key.removeprefix("eval_"), value, step)

    return track, writer.close


def _wandb(args: Keys, resumed_step: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    import wandb

    project = os.environ.get("WANDB_PROJECT", "mca_lite")
    about = dict(name=args.run_name, config=args.to_dict(), dir=args.output_dir)
    run = wandb.init(project=project, **about)
    return lambda numbers, step: run.log(numbers, step=step), run.finish


# value of report_to -> the function that opens its tracker
TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb}
