"""What happens round a step: callbacks hear of it, all ranks agree on what they ask for, and log
lines, evaluations and checkpoints follow.

Flags that callbacks raise on one rank count on all: they travel with the signals in one small
all-reduce after each step, and after each log line, evaluation and checkpoint.
"""

import inspect
from collections.abc import Callable

from . import parallel, watchdog
from .args_rules_schedule import parse_steps
from .log_speed import peak_memory_gib
from .trainer_callbacks import FLAGS, BestModel, EarlyStopping, TrainerCallback, raise_flags
from .trainer_checkpoints import answer_signals, finish_checkpoint, save_checkpoint
from .trainer_profile import Profiler

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
        found.append(EarlyStopping(args.early_stopping_patience, args.early_stopping_threshold))
    if args.profile_steps:
        found.append(Profiler(*parse_steps(args.profile_steps)))
    return found


def find_callback(callbacks: list, wanted):
    """`wanted` in the list, or the first one of a class; None where there is none."""
    of_kind = wanted if isinstance(wanted, type) else ()
    return next((one for one in callbacks if one is wanted or isinstance(one, of_kind)), None)


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
    """TypeError where `member` cannot be called with the arguments that `ours` must have."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    taken = inspect.signature(ours).parameters.values()
    needed = [p.name for p in taken if p.kind in kinds and p.default is p.empty]
    try:
        inspect.signature(member).bind(*needed)
    except TypeError as error:
        listed = ", ".join(needed[1:])
        raise TypeError(f"{where} is called with ({listed}): {error}") from None


def agree(trainer) -> list[int]:
    """[a signal, whether a checkpoint is being written, whether the loss was a spike], over all
    ranks; a flag that was raised on any rank is raised on all. Collective."""
    control, writer = trainer.control, trainer._writer
    flags = [int(getattr(control, name)) for name in FLAGS]
    own = [trainer._signals.received, writer.still_writes, trainer._guard.is_spike]
    *agreed, stop, epoch_stop, log, evaluate, save = parallel.largest(*own, *flags)
    for name, raised in zip(FLAGS, (stop, epoch_stop, log, evaluate, save), strict=True):
        setattr(control, name, bool(raised))
    return agreed


class StepEnd:
    """What is due after a step that has been counted. line() -> the numbers of a line of the log;
    steps_left: of this epoch."""

    def __init__(self, trainer, line: Callable[[], dict], steps_left: int):
        self.trainer, self.line, self.steps_left = trainer, line, steps_left
        self.done: set[str] = set()

    def run(self) -> bool:
        """Log, evaluate, save and answer signals where it is time -> whether the epoch ends.
        Collective; Interrupted after a signal."""
        trainer, state, control = self.trainer, self.trainer.state, self.trainer.control
        watchdog.note(watchdog.BETWEEN_STEPS, state.global_step)
        raise_flags(control, trainer.args, state, self.steps_left == 0)
        trainer._notify("on_step_end")
        self._agree_and_act()
        if not (control.should_training_stop or state.is_over or self.steps_left == 0):
            return False
        raise_flags(control, trainer.args, state, True)
        for name in self.done:  # of this step already
            setattr(control, name, False)
        trainer._notify("on_epoch_end")
        self._agree_and_act()
        return True

    def _agree_and_act(self) -> None:
        trainer, control = self.trainer, self.trainer.control
        self._agree()
        if control.should_log:
            self._lower("should_log")
            log_line(trainer, self.line())
            self._agree()
        if control.should_evaluate and trainer.eval_dataset is not None:
            self._lower("should_evaluate")
            trainer._guard.check_evaluation(trainer.evaluate())
            self._agree()
        if control.should_save:
            self._lower("should_save")
            save_checkpoint(trainer)
            self._agree()
        signal, still_writes, is_spike = self._agreed
        if is_spike:
            trainer._guard.name_spike()
        if trainer._writer.is_busy and (signal or not still_writes):
            finish_checkpoint(trainer)
            self._agree()
        if signal:
            answer_signals(trainer, signal)

    def _agree(self) -> None:
        self._agreed = agree(self.trainer)
        if self.trainer.control.should_epoch_stop:  # before a checkpoint is written
            self.trainer.state.left_out_steps += self.steps_left
            self.steps_left = 0

    def _lower(self, flag: str) -> None:
        setattr(self.trainer.control, flag, False)
        self.done.add(flag)


def log_line(trainer, numbers: dict) -> None:
    """Add a line to the log, and tell the callbacks."""
    state = trainer.state
    logs = {
        "step": state.global_step,
        "epoch": state.epoch,
        **numbers,
        "learning_rate": trainer.lr_scheduler.get_last_lr()[0],
        "consumed_samples": state.consumed_samples,
        "consumed_tokens": state.consumed_tokens,
        "peak_memory_gib": peak_memory_gib(),
    }
    state.log_history.append({k: v for k, v in logs.items() if not isinstance(v, list)})
    trainer._notify("on_log", logs=logs)
