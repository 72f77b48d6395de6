"""Evaluation: forward passes over a data set, or several, and what is reported of them."""

import torch

from .data_batches import make_loader
from .trainer_numbers import EvalLoopOutput


def evaluate(trainer, dataset, prefix: str) -> dict[str, float]:
    """Metrics over the whole set; over each set of a dict, named <prefix>_<its name>_<metric>.
    Collective."""
    if isinstance(dataset, dict):
        metrics = {}
        for name, part in dataset.items():
            metrics.update(_measure(trainer, part, f"{prefix}_{name}"))
    else:
        metrics = _measure(trainer, dataset, prefix)
    line = {"step": trainer.state.global_step, "epoch": trainer.state.epoch, **metrics}
    trainer.state.log_history.append(line)
    trainer.report.log(line)
    trainer._notify("on_evaluate", metrics=metrics)
    return metrics


def _measure(trainer, dataset, prefix: str) -> dict[str, float]:
    loader = loader_of(trainer, dataset)
    return trainer.evaluation_loop(loader, "evaluation", metric_key_prefix=prefix).metrics


def loader_of(trainer, dataset):
    """A loader of this rank's micro-batches of a whole data set, once, in its order."""
    plan = trainer._plan(dataset, training=False)
    return make_loader(dataset, trainer.data_collator, plan, num_epochs=1)


@torch.no_grad()
def run_loop(trainer, dataloader, prefix: str) -> EvalLoopOutput:
    """Forward passes over a loader of loader_of's kind. Collective."""
    plan, batches = getattr(dataloader.batch_sampler, "plan", None), iter(dataloader)
    if plan is None:
        raise ValueError(
            "evaluation_loop takes a loader of batches.make_loader; for a dataset call "
            "evaluate(dataset)"
        )
    weight, trainer._micro_batch_weight = trainer._micro_batch_weight, 1.0
    trainer.backend.train_mode(False)
    trainer._loaders["eval_dataloader"] = dataloader
    whole = trainer._numbers()
    for step in range(plan.steps_per_epoch):
        data, seq_length, numbers = trainer._get_step_iterator_and_seq_length(batches, plan, step)
        data = trainer._prepare_micro_batches(data, seq_length)
        metrics = trainer.backend.forward_backward(
            trainer.forward_step, data, seq_length, forward_only=True
        )
        whole = whole + numbers.add_metrics(metrics)
        trainer._notify("on_prediction_step")
    trainer._loaders["eval_dataloader"] = None
    trainer.backend.train_mode(True)
    trainer._micro_batch_weight = weight
    means = trainer._over_ranks(whole).means()
    metrics = {f"{prefix}_{key}": value for key, value in means.items()}
    return EvalLoopOutput(None, None, metrics, plan.num_samples)
