"""Rules for the keys of a run: within the group of data, between groups, and for new tokens.

Checks add Problems to a Judge (errors.py); the argument `a` is an object whose attributes are keys.
args.parse_args applies most of them. Python constructors (DataArguments, DPOConfig, the trainers)
and load_datasets apply some that concern their keys.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from .args_rules_training import check_needs
from .errors import Judge, Keys, Rule
from .files import GENERATION_METRICS
from .tables import CONVERSATIONS, KEY_GROUPS, OBJECTIVES, PAIR_COLUMNS, TEMPLATES, Objective

SOME_DATA = "dataset: <files, or names in dataset_info.json>"

NAMED = (Rule("!dataset !eval_dataset", "it names no data", SOME_DATA),)
_DATA = (
    *NAMED,
    Rule(
        "eval_on_each_dataset !eval_dataset",
        "eval_dataset names none",
        "eval_dataset: <files, or names>, or eval_on_each_dataset: false",
    ),
    Rule(
        "val_size eval_dataset",
        "eval_dataset is given too, and one of them would not be used",
        "val_size: 0, or eval_dataset left out",
    ),
    Rule("mask_history train_on_prompt", "train_on_prompt is on too", "one of the two"),
    Rule(
        "mix_weights mix_strategy=concat",
        "one dataset after another has no rates",
        "mix_strategy: interleave_over",
    ),
)
_OF_PREFERENCES = (
    Rule("train_on_prompt", "answers are compared, not prompts", "train_on_prompt: false"),
    Rule(
        "streaming",
        "preferences are read as a whole: a reference scores them before training",
        "streaming: false",
    ),
)
BACKEND = (
    Rule(
        "mtp_num_layers !use_mca",
        "plain torch has no layers for multi-token prediction",
        "mtp_num_layers: 0",
    ),
    Rule(
        "moe_router_bias_update_rate !finetuning_type=full",
        "frozen routers keep their bias",
        "moe_router_bias_update_rate: 0",
    ),
)
_RUN = (
    Rule(
        "!dataset do_train eval_dataset",
        "there is nothing to train on",
        f"{SOME_DATA}, or do_train: false",
    ),
    Rule(
        "resume_from_checkpoint !do_train",
        "a checkpoint is for training, and evaluation reads model_name_or_path",
        "model_name_or_path: <the exported model>, or resume_from_checkpoint: false",
    ),
    Rule(
        "!do_train !do_eval !do_predict",
        "there is nothing to do",
        "do_train: true, or do_eval: true",
    ),
    Rule(
        "predict_with_generate train_on_prompt",
        "an answer begins at the first trained token, and the prompt is trained too",
        "train_on_prompt: false",
    ),
)


# -- within a group


def name_of_set(file: str) -> str:
    """Usual name of a dataset in metrics, without folder and suffix: "a" for "data/a.jsonl"."""
    return Path(file).stem  # a folder may end with a slash


def check_records(objective: Objective, judge: Judge) -> None:
    """Check that the data keys suit the records of a training objective: for example, pair_weight
    needs preference pairs, and streaming does not suit these. Each violation becomes a Problem in
    `judge`, which collects the errors of a configuration."""
    if objective.has_pairs or objective.has_labels:
        judge.apply(_OF_PREFERENCES)
    for key in PAIR_COLUMNS:
        judge.expect(
            objective.has_pairs or getattr(judge.arguments, key) is None,
            key,
            f"no effect, since stage {objective.stage} has no pairs",
            f"{key} left out",
        )


def normalise_data(a: Keys) -> None:
    """Convert val_size to int, in place, if it is a number of samples rather than a fraction."""
    if a.val_size >= 1 and float(a.val_size).is_integer():
        a.val_size = int(a.val_size)


def check_data(a: Keys, judge: Judge) -> None:
    """Check the keys of DataArguments, alone and together: for example, chat_template must be a
    built-in template, a file or a template's text. Each violation becomes a Problem in `judge`,
    which collects the errors of a configuration. A rule about a key that already has a Problem is
    not reported."""
    judge.apply(_DATA)
    names = [name_of_set(name) for name in a.eval_dataset or ()]
    judge.expect(
        not a.eval_on_each_dataset or len({"training", *names}) > len(names),
        "eval_on_each_dataset eval_dataset",
        f"two of them, or one and the training set, have the same name: {', '.join(names)}",
        "files of different names",
    )
    template = a.chat_template or "{"
    judge.expect(
        "{" in template or template in TEMPLATES or os.path.isfile(template),
        "chat_template",
        "expected a built-in template, a jinja file or its text",
        f"one of {', '.join(TEMPLATES)}",
    )
    judge.expect(
        {"role", "content"}.isdisjoint(a.ignore_message_keys),
        "ignore_message_keys",
        "a message needs its role and content",
        "the names of other keys",
    )
    judge.expect(
        a.val_size <= 1 or isinstance(a.val_size, int),
        "val_size",
        "expected a fraction below 1 or a whole number of samples",
        "val_size: 0.05",
    )
    equal = [1.0] * len(a.dataset)
    weights = equal if a.mix_weights is None else a.mix_weights
    judge.expect(
        len(weights) == len(equal) and min(weights, default=1) > 0,
        "mix_weights dataset",
        f"expected a rate above 0 for each of {len(equal)} datasets",
        f"mix_weights: {equal}",
    )


# -- between groups


def check_metric(a: Keys, metrics: tuple[str, ...], sets: Iterable[str], judge: Judge) -> None:
    """Check that an evaluation computes metric_for_best_model, by which checkpoints are ranked;
    otherwise add a Problem to `judge`, which collects the errors of a configuration. Nothing is
    checked if eval_strategy is "no".

    metrics: names without the prefix eval_. sets: names of datasets that are evaluated one by one;
    <name>_<metric> is a metric too."""
    given = [*metrics, *(f"{name}_{metric}" for name in sets for metric in metrics)]
    key = "metric_for_best_model"
    metric = a.metric_for_best_model
    judge.expect(
        a.eval_strategy == "no" or {metric, metric.removeprefix("eval_")}.intersection(given),
        f"{key} eval_strategy",
        f"an evaluation gives {', '.join(given)}",
        f"{key}: {metrics[0]}",
    )


def check_objective_run(a: Keys, judge: Judge) -> None:
    """Check the keys of a run against its training objective (a.stage): the metric for the best
    model, generated answers, data keys, and the objective's own rules. Violations become Problems
    in `judge`, which collects the errors of a configuration."""
    objective = OBJECTIVES[a.stage]
    metrics = objective.metrics
    if a.mtp_num_layers != 0 and a.metric_for_best_model.endswith("mtp_loss"):
        metrics += ("mtp_loss",)  # None: the model decides, and the trainer checks again
    if a.predict_with_generate:
        metrics += GENERATION_METRICS
    judge.expect(
        objective.records == CONVERSATIONS or not a.predict_with_generate,
        "predict_with_generate",
        f"stage {objective.stage} has no prompts with one answer",
        "predict_with_generate: false",
    )
    sets = a.eval_dataset if a.eval_on_each_dataset else None
    check_metric(a, metrics, map(name_of_set, sets or ()), judge)
    check_records(objective, judge)
    objective.check_run(a, judge)


def check_part_rules(judge: Judge) -> None:
    """Check the rules that each group of configuration keys brings along (from register_keys). A
    combination of keys that breaks one becomes a Problem in `judge`, which collects the errors of a
    configuration."""
    for row in KEY_GROUPS.values():
        judge.apply(row.rules)


def check_run(a: Keys, judge: Judge) -> list[str]:
    """Check the keys of a run (RunArguments) against each other -> notes for the user, such as keys
    without effect. Violations become Problems in `judge`, which collects the errors of a
    configuration."""
    objective = OBJECTIVES[a.stage]
    objective.check_keys(a, judge)
    judge.apply(BACKEND)
    check_part_rules(judge)
    for name, group in a.parts.items():
        row = KEY_GROUPS[name]
        check_needs(row.needs, group, judge)
        idle = [key for key in group.changed if row.of_stages and key not in objective.keys]
        group.notes += [f"{key}: no effect, since stage is {a.stage}" for key in idle]
    check_objective_run(a, judge)
    judge.apply(_RUN)
    evaluations = ("eval_strategy", "do_eval", "do_predict")
    on = [key for key in evaluations if getattr(a, key) not in ("no", False)]
    has_data = a.eval_dataset or a.val_size > 0
    judge.expect(
        has_data or not on,
        " ".join([*on, "eval_dataset val_size"]),
        "there is nothing to evaluate on",
        f"val_size: 0.05, or eval_dataset: <files>, or {' and '.join(on)} left out",
    )
    start = a.model_name_or_path
    judge.expect(
        not os.path.isdir(start) or os.path.realpath(start) != os.path.realpath(a.output_dir),
        "output_dir model_name_or_path",
        "the trained model would overwrite the one that it starts from",
        f"output_dir: {a.output_dir}-sft",
    )
    is_packed = a.neat_packing or a.packing
    notes = {
        f"sequence_packing joins the samples of a micro-batch, {a.per_device_train_batch_size} "
        "of them: packing: true fills rows of cutoff_len": a.sequence_packing and not is_packed,
        "fp8: log-probabilities of responses are rounded to about 0.2 with it": (
            a.fp8 and objective.has_pairs
        ),
        "nothing is evaluated: eval_strategy is no": (
            (has_data or a.predict_with_generate) and not on
        ),
    }
    of_groups = [note for group in a.groups for note in group.notes]
    return of_groups + [note for note, applies in notes.items() if applies]


# -- between a model's modules and keys


def check_frozen_rows(
    trained: Iterable[str] | None, num_new: int, ends: Sequence[str], judge: Judge
) -> None:
    """Add a Problem to `judge` (the collected errors of a configuration) if tokens were added and
    the embedding or the output layer is frozen, because the new tokens' rows would not be trained.

    trained: names of the trainable Hugging Face modules; None if every module is. num_new: number
    of new tokens. ends: endings of the names of the modules with one row per token, such as
    "lm_head"."""
    frozen = [end for end in ends if not any(m.endswith(end) for m in trained or ())]
    judge.expect(
        trained is None or not num_new or not frozen,
        "finetuning_type",
        f"the rows of {num_new} new tokens would not be trained: {', '.join(frozen)} is frozen",
        f"freeze_extra_modules: {', '.join(ends)}",
    )
