"""The rules between the keys of the data, and between them and the records of an objective."""

from __future__ import annotations

import os
from typing import Any

from .args_values import Judge
from .chat_templates import TEMPLATES
from .objectives import Objective

SOME_DATA = "dataset: <files, or names in dataset_info.json>"


def check_named(a: Any, judge: Judge) -> None:
    """DataArguments name some data."""
    if not a.dataset and not a.eval_dataset:
        judge.refuse("dataset", "it names no data", SOME_DATA)


def check_records(a: Any, objective: Objective, judge: Judge) -> None:
    """DataArguments against the records of an objective."""
    if objective.has_pairs and a.train_on_prompt:
        reason = "answers are compared, and both have the same prompt"
        judge.refuse("train_on_prompt", reason, "train_on_prompt: false")
    if objective.has_pairs and a.streaming:
        reason = "preference pairs are read as a whole: a reference scores them before training"
        judge.refuse("streaming", reason, "streaming: false")


def check_stream(a: Any, judge: Judge) -> None:
    """streaming against the keys of training."""
    if not a.streaming:
        return
    if a.max_steps <= 0:
        reason = "how many steps an epoch has is not known before the data is read"
        judge.refuse("max_steps streaming", reason, "max_steps: 1000")
    for key in ("eval_strategy", "save_strategy"):
        if getattr(a, key) == "epoch":
            judge.refuse(f"{key} streaming", "a stream has no epochs", f"{key}: steps")


def check_data(a: Any, judge: Judge) -> None:
    """DataArguments: what its keys must agree on; a val_size that counts samples becomes an int."""
    weights, one_each = a.mix_weights, f"mix_weights: {[1.0] * len(a.dataset)}"
    check_named(a, judge)
    if a.eval_on_each_dataset and not a.eval_dataset:
        remedy = "eval_dataset: <files, or names>, or eval_on_each_dataset: false"
        judge.refuse("eval_on_each_dataset", "eval_dataset names none", remedy)
    elif a.eval_on_each_dataset:
        names = [os.path.splitext(os.path.basename(name))[0] for name in a.eval_dataset]
        if len(set(names)) < len(names):
            reason = f"their losses would have the same names: {', '.join(names)}"
            judge.refuse("eval_on_each_dataset eval_dataset", reason, "files of different names")
    if a.eval_dataset and a.val_size > 0:
        reason = "eval_dataset is given too, and one of them would not be used"
        judge.refuse("val_size", reason, "val_size: 0, or eval_dataset left out")
    elif a.val_size > 1 and not a.val_size.is_integer():
        reason = "expected a fraction below 1 or a whole number of samples"
        judge.refuse("val_size", reason, "val_size: 0.05")
    elif a.val_size >= 1:
        a.val_size = int(a.val_size)
    elif a.val_size > 0 and a.streaming:
        reason = "how many samples a stream has is not known: it must be a number of records"
        judge.refuse("val_size streaming", reason, "val_size: 1000, or eval_dataset")
    for key in a.changed():
        if key in ("preprocessing_num_workers", "overwrite_cache") and a.streaming:
            a.notes.append(f"{key}: no effect on what is streamed")
        elif key == "buffer_size" and not a.streaming:
            a.notes.append("buffer_size: no effect, since streaming is false")
    template = a.chat_template
    if template and "{" not in template and template not in TEMPLATES:
        if not os.path.isfile(template):
            reason = "expected a built-in template, a jinja file or its text"
            judge.refuse("chat_template", reason, f"one of {', '.join(TEMPLATES)}")
    if a.train_on_prompt and a.mask_history:
        judge.refuse("mask_history", "train_on_prompt is on too", "one of the two")
    if weights is not None and min(weights, default=0) <= 0:
        reason = "each rate must be above 0: leave out a dataset that is not wanted"
        judge.refuse("mix_weights dataset", reason, one_each)
    elif weights is not None and len(weights) != len(a.dataset):
        reason = f"{len(weights)} rates for {len(a.dataset)} datasets"
        judge.refuse("mix_weights dataset", reason, one_each)
    elif weights is not None and a.streaming and a.mix_strategy == "concat":
        reason = "a stream of one dataset after another has no rates"
        judge.refuse("mix_weights mix_strategy", reason, "mix_strategy: interleave_over")
