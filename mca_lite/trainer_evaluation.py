"""Evaluation: forward passes over a data set, or several, and what is reported of them."""

import torch

from .data_batches import make_loader
from .trainer_numbers import EvalLoopOutput, Numbers


def evaluate(trainer, dataset, prefix: str) -> dict[str, float]:
    """Metrics over the whole set, named <prefix>_<metric>; of a dict, over all of its sets, and
    over each, named <prefix>_<its name>_<metric>. Collective."""
    if isinstance(dataset, dict):
        found = [_measure(trainer, part, f"{prefix}_{name}") for name, part in dataset.items()]
        whole = sum((one.numbers for one in found), trainer._numbers())
        metrics = _named(whole, prefix)
        for one in found:
            metrics.update(one.metrics)
    else:
        metrics = _measure(trainer, dataset, prefix).metrics
    line = {"step": trainer.state.global_step, "epoch": trainer.state.epoch, **metrics}
    trainer.state.log_history.append(line)
    trainer.report.log(line)
    trainer._notify("on_evaluate", metrics=metrics)
    return metrics


def _measure(trainer, dataset, prefix: str) -> EvalLoopOutput:
    plan = trainer._plan(dataset, training=False)
    loader = make_loader(dataset, trainer.data_collator, plan, num_epochs=1)
    return trainer.evaluation_loop(loader, "evaluation", metric_key_prefix=prefix)


def _named(numbers: Numbers, prefix: str) -> dict[str, float]:
    return {f"{prefix}_{key}": value for key, value in numbers.means().items()}


@torch.no_grad()
def run_loop(trainer, dataloader, prefix: str) -> EvalLoopOutput:
    """Forward passes over a loader of make_loader's kind. Collective."""
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
    whole = trainer._over_ranks(whole)
    return EvalLoopOutput(None, None, _named(whole, prefix), plan.num_samples, whole)
