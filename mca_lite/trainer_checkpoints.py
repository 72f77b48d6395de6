"""When a trainer saves, and how it stops when a signal asks it to."""

from . import ckpt_folder, parallel
from .ckpt_folder import CheckpointError
from .trainer_callbacks import Interrupted, StopSignals


def save_checkpoint(trainer) -> None:
    """Save this step. Collective.

    With async_save it gets its name after the first step by whose end all ranks have written, and
    before the next one begins: dying costs at most one interval and the steps that were made during
    a write.
    """
    if trainer._writer.is_busy:
        finish_checkpoint(trainer)
    trainer._writer.begin()
    if not trainer.args.async_save:
        finish_checkpoint(trainer)


def finish_checkpoint(trainer) -> None:
    """Wait for all ranks to have written, give the checkpoint its name, and prune. Collective."""
    folder, step = trainer._writer.finish()
    trainer._notify("on_save", path=str(folder), step=step)
    best, limit = trainer.state.best_model_checkpoint, trainer.args.save_total_limit
    parallel.on_main(lambda: ckpt_folder.prune(folder, best, limit), CheckpointError)


def answer_signals(trainer, signals: StopSignals) -> None:
    """Agree between two steps on whether to stop, and whether a checkpoint is written by now.
    Collective; Interrupted on every rank, with the run saved, where any rank got a signal."""
    writer = trainer._writer
    signal, still_writes = parallel.largest(signals.received, writer.still_writes)
    if writer.is_busy and (signal or not still_writes):
        finish_checkpoint(trainer)
    if not signal:
        return
    if writer.written_step != trainer.state.global_step:
        save_checkpoint(trainer)
        if writer.is_busy:
            finish_checkpoint(trainer)
    trainer._store_state()
    stop = Interrupted(signal, trainer.state.global_step)
    trainer.report.print(
        f"{stop.signal.name}: saved after step {stop.step}; resume_from_checkpoint: auto goes on "
        "from here"
    )
    raise stop
