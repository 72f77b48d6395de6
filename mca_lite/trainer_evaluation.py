"""Evaluation: forward passes over a data set, or several, and what is reported of them."""

import torch

from .args_rules import check_metric
from .args_values import Judge
from .constants import GENERATION_METRICS
from .data_batches import make_loader
from .trainer_generate import check_room, generate, scores
from .trainer_numbers import EvalLoopOutput, Numbers
from .trainer_predict import user_metrics


def check_metrics(trainer) -> None:
    """ValueError for metrics that an evaluation cannot give."""
    compute, preprocess = trainer.compute_metrics, trainer.preprocess_logits_for_metrics
    if (compute is None) != (preprocess is None):
        raise ValueError(
            "compute_metrics and preprocess_logits_for_metrics go together, as the logits of a "
            "whole data set are not held: preprocess_logits_for_metrics=lambda logits, labels: "
            "logits.argmax(-1) keeps the likeliest tokens"
        )
    if compute is not None and trainer.documents_per_sample > 1:
        raise ValueError(
            "compute_metrics is for samples of one text: of pairs an evaluation gives "
            f"{', '.join(trainer.metrics_keys)}"
        )
    names = tuple(trainer.metrics_keys)
    if trainer.args.predict_with_generate:
        _check_generation(trainer)
        names += GENERATION_METRICS
    judge = Judge(trainer.args)
    if compute is None:
        check_metric(trainer.args, names, judge)
    judge.close()


def _check_generation(trainer) -> None:
    """ValueError where the model's own answers cannot be asked for, or compared."""
    if trainer.compute_metrics is not None:
        reason = "compute_metrics is given logits, and generate's tokens go into exact_match and "
        raise ValueError(f"predict_with_generate: {reason}rouge_l: one of the two")
    if trainer.documents_per_sample > 1:
        raise ValueError("predict_with_generate: a pair has two answers: set it to false")
    if trainer.tokenizer is None:
        raise ValueError("predict_with_generate: give the trainer a tokenizer, to compare texts")
    check_room(trainer)


def evaluate(trainer, dataset, prefix: str) -> dict[str, float]:
    """Metrics over the whole set, named <prefix>_<metric>; of a dict, over all of its sets, and
    over each, named <prefix>_<its name>_<metric>. Collective."""
    if isinstance(dataset, dict):
        found, answers = [], []
        for name, part in dataset.items():
            one, written = _measure(trainer, part, f"{prefix}_{name}")
            found.append(one)
            answers += written
        metrics = _named(sum((one.numbers for one in found), trainer._numbers()), prefix)
        if trainer.args.predict_with_generate:
            metrics.update(scores(answers, prefix))
        for one in found:
            metrics.update(one.metrics)
    else:
        metrics = _measure(trainer, dataset, prefix)[0].metrics
    line = {"step": trainer.state.global_step, "epoch": trainer.state.epoch, **metrics}
    trainer.state.log_history.append(line)
    trainer.report.log(line)
    trainer._notify("on_evaluate", metrics=metrics)
    return metrics


def _measure(trainer, dataset, prefix: str) -> tuple[EvalLoopOutput, list[dict]]:
    """(the numbers of a set, the answers that were generated for it)"""
    plan = trainer._plan(dataset, training=False)
    loader = make_loader(dataset, trainer.data_collator, plan, num_epochs=1)
    found = trainer.evaluation_loop(loader, "evaluation", metric_key_prefix=prefix)
    if trainer.compute_metrics is not None:
        found.metrics.update(user_metrics(trainer, dataset, prefix))
    answers = []
    if trainer.args.predict_with_generate:
        answers = generate(trainer, dataset)
        found.metrics.update(scores(answers, prefix))
    return found, answers


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
