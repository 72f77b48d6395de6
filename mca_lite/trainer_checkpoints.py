"""When a trainer saves, and how it stops when a signal asks it to."""

import os

from . import ckpt, ckpt_folder, parallel, watchdog
from .ckpt_folder import CheckpointError
from .constants import TRAINER_STATE_NAME
from .trainer_callbacks import Interrupted, export_states
from .trainer_numbers import Numbers, TrainOutput


def save_checkpoint(trainer) -> None:
    """Save this step. Collective.

    With async_save it gets its name after the first step by whose end all ranks have written, and
    before the next one begins: dying costs at most one interval and the steps that were made during
    a write.
    """
    watchdog.note(watchdog.SAVING)
    if trainer._writer.is_busy:
        finish_checkpoint(trainer)
    trainer._guard.check_weights(f"after step {trainer.state.global_step}, before it is saved")
    trainer.state.stateful_callbacks = export_states(trainer.callbacks)
    trainer._writer.begin()
    if not trainer.args.async_save:
        finish_checkpoint(trainer)


def finish_checkpoint(trainer) -> None:
    """Wait for all ranks to have written, and give the checkpoint its name. Collective.

    Older ones are pruned for it after the next good step: its weights may be finite, and lost.
    """
    watchdog.note(watchdog.SAVING)
    folder, step = trainer._writer.finish()
    trainer._notify("on_save", path=str(folder), step=step)
    if trainer._guard.is_on:
        trainer._guard.unproven = folder
    else:
        prune(trainer, folder)


def prune(trainer, folder) -> None:
    """Delete the oldest checkpoints beyond save_total_limit; `folder` is the newest. Collective."""
    best, limit = trainer.state.best_model_checkpoint, trainer.args.save_total_limit
    parallel.on_main(lambda: ckpt_folder.prune(folder, best, limit), CheckpointError)


def answer_signals(trainer, signal: int) -> None:
    """Save the run and raise Interrupted, after a signal to any rank. Collective."""
    if trainer._writer.written_step != trainer.state.global_step:
        save_checkpoint(trainer)
        if trainer._writer.is_busy:
            finish_checkpoint(trainer)
    store_state(trainer)
    trainer.report.end("interrupted")
    stop = Interrupted(signal, trainer.state.global_step)
    trainer.report.print(
        f"{stop.signal.name}: saved after step {stop.step}; resume_from_checkpoint: auto goes on "
        "from here"
    )
    raise stop


def store_state(trainer) -> None:
    """Write trainer_state.json to output_dir, on the main rank."""
    trainer.state.stateful_callbacks = export_states(trainer.callbacks)
    if parallel.is_main():
        os.makedirs(trainer.args.output_dir, exist_ok=True)
        trainer.state.save(os.path.join(trainer.args.output_dir, TRAINER_STATE_NAME))


def finish_run(trainer, whole_run: Numbers, seconds: float) -> TrainOutput:
    """What is left after the last step: the checkpoint on its way, the best one, the state's file.
    Collective."""
    if trainer._writer.is_busy:
        finish_checkpoint(trainer)
    watchdog.note(watchdog.ENDING)
    trainer._guard.end_run()
    best = trainer.state.best_model_checkpoint
    if trainer.args.load_best_model_at_end and best:
        ckpt.load_model(best, trainer.backend)
        trainer.report.print(f"loaded the best checkpoint {best}")
    store_state(trainer)
    trainer._notify("on_train_end")
    loss = whole_run.means()["loss"]
    return TrainOutput(
        trainer.state.global_step, loss, {"train_loss": loss, "train_runtime": seconds}
    )
