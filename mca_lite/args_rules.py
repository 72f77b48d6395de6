"""Rules of the other groups of keys, between groups, and between adapters and a model.

Each function takes the arguments `a`, objects whose attributes are keys, and a Judge (errors.py)
over them. args.parse_args and the constructors of Python (DPOConfig, LoraSpec, the trainers) apply
the same rules.
"""

import contextlib
import difflib
import fnmatch
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .errors import Judge, Rule
from .families import is_of_expert
from .files import GENERATION_METRICS
from .tables import CONVERSATIONS, OBJECTIVES, TEMPLATES, Objective

SOME_DATA = "dataset: <files, or names in dataset_info.json>"
_ON_ADAPTERS = "it is not supported together with adapters"

_NAMED = (Rule("!dataset !eval_dataset", "it names no data", SOME_DATA),)
_DATA = (
    *_NAMED,
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
_FINETUNING = (
    Rule(
        "adapter_name_or_path finetuning_type=full",
        "finetuning_type is full, and the adapter would not be used",
        "finetuning_type: lora",
    ),
    Rule("!lora_target finetuning_type=lora", "it names no layer", "lora_target: all"),
)
_OF_PAIRS = (
    Rule(
        "train_on_prompt",
        "answers are compared, and both have the same prompt",
        "train_on_prompt: false",
    ),
    Rule(
        "streaming",
        "preference pairs are read as a whole: a reference scores them before training",
        "streaming: false",
    ),
)
_BACKEND = (
    Rule(
        "mtp_num_layers !use_mca",
        "plain torch has no layers for multi-token prediction",
        "mtp_num_layers: 0",
    ),
    Rule("mtp_num_layers finetuning_type=lora", _ON_ADAPTERS, "mtp_num_layers: 0"),
    Rule(
        "moe_router_bias_update_rate finetuning_type=lora",
        "adapters change no weight of the base model, nor the routers' bias",
        "moe_router_bias_update_rate: 0",
    ),
)
_RUN = (
    Rule(
        "max_steps=-1 streaming",
        "the number of steps an epoch is unknown before the data is read",
        "max_steps: 1000",
    ),
    Rule("eval_strategy=epoch streaming", "a stream has no epochs", "eval_strategy: steps"),
    Rule("save_strategy=epoch streaming", "a stream has no epochs", "save_strategy: steps"),
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
)


# -- within a group


def check_named(judge: Judge) -> None:
    """Check DataArguments for data."""
    judge.apply(_NAMED)


def name_of_set(file: str) -> str:
    """The name of a set of eval_dataset in its metrics."""
    return Path(file).stem  # of a folder too, with a trailing slash


def check_records(objective: Objective, judge: Judge) -> None:
    """Check DataArguments against the records of an objective."""
    if objective.has_pairs:
        judge.apply(_OF_PAIRS)


def normalise_data(a: Any) -> None:
    """Make val_size an int if it is a count."""
    if a.val_size >= 1 and float(a.val_size).is_integer():
        a.val_size = int(a.val_size)


def check_data(a: Any, judge: Judge) -> None:
    """Apply the rules of DataArguments."""
    judge.apply(_DATA)
    _check_val_size(a, judge)
    _check_weights(a, judge)
    names = [name_of_set(name) for name in a.eval_dataset or ()]
    if a.eval_on_each_dataset and len(set(names)) < len(names):
        reason = f"their losses would have the same names: {', '.join(names)}"
        judge.refuse("eval_on_each_dataset eval_dataset", reason, "files of different names")
    template = a.chat_template or "{"
    if not ("{" in template or template in TEMPLATES or os.path.isfile(template)):
        reason = "expected a built-in template, a jinja file or its text"
        judge.refuse("chat_template", reason, f"one of {', '.join(TEMPLATES)}")
    if needed := {"role", "content"}.intersection(a.ignore_message_keys):
        reason = f"{', '.join(sorted(needed))}: a message is nothing without"
        judge.refuse("ignore_message_keys", reason, "the names of other keys")
    idle = {"buffer_size"}
    reason = "no effect, since streaming is false"
    if a.streaming:
        idle = {"preprocessing_num_workers", "overwrite_cache"}
        reason = "no effect on streamed data"
    a.notes += [f"{key}: {reason}" for key in a.changed if key in idle]


def _check_val_size(a: Any, judge: Judge) -> None:
    if a.val_size > 1 and not isinstance(a.val_size, int):
        reason = "expected a fraction below 1 or a whole number of samples"
        judge.refuse("val_size", reason, "val_size: 0.05")
    elif 0 < a.val_size < 1 and a.streaming:
        reason = "the size of a stream is unknown: expected a number of records"
        judge.refuse("val_size streaming", reason, "val_size: 1000, or eval_dataset")


def _check_weights(a: Any, judge: Judge) -> None:
    weights = a.mix_weights
    remedy = f"mix_weights: {[1.0] * len(a.dataset)}"
    if weights is None:
        return
    if min(weights, default=0) <= 0:
        reason = "each rate must be above 0: leave out a dataset that is not wanted"
        judge.refuse("mix_weights dataset", reason, remedy)
    elif len(weights) != len(a.dataset):
        reason = f"{len(weights)} rates for {len(a.dataset)} datasets"
        judge.refuse("mix_weights dataset", reason, remedy)


def check_finetuning(a: Any, judge: Judge) -> None:
    """Apply the rules of FinetuningArguments, and note keys without effect."""
    judge.apply(_FINETUNING)
    given = [key for key in a.changed if a.__dataclass_fields__[key].metadata.get("lora")]
    if given and a.finetuning_type == "full":
        a.notes.append(f"{', '.join(given)}: no effect, since finetuning_type is full")
    elif a.adapter_name_or_path:
        shaped = {"lora_rank", "lora_alpha", "lora_target", "use_rslora", "modules_to_save"}
        decides = f"the adapter in {a.adapter_name_or_path} decides it"
        a.notes += [f"{key} is not used: {decides}" for key in sorted(shaped.intersection(given))]
    objective = OBJECTIVES[a.stage]
    others = {key for row in OBJECTIVES.values() for key in row.keys}.difference(objective.keys)
    if given := [key for key in a.changed if key in others]:
        a.notes.append(f"{', '.join(given)}: no effect, since stage is {a.stage}")
    if objective.check_keys is not None:
        objective.check_keys(a, judge)


# -- between groups


def check_metric(a: Any, metrics: tuple[str, ...], sets: Iterable[str], judge: Judge) -> None:
    """Check metric_for_best_model against the metrics of an evaluation. sets: the names of several
    sets, prefixes of their metrics."""
    given = [*metrics, *(f"{name}_{metric}" for name in sets for metric in metrics)]
    names = {*given, *(f"eval_{name}" for name in given)}
    if a.eval_strategy != "no" and a.metric_for_best_model not in names:
        key = "metric_for_best_model"
        reason = f"an evaluation gives {', '.join(given)}"
        judge.refuse(f"{key} eval_strategy", reason, f"{key}: {metrics[0]}")


def check_objective_run(a: Any, judge: Judge) -> None:
    """Check the keys of all groups against the row of the stage."""
    objective = OBJECTIVES[a.stage]
    metric = a.metric_for_best_model.removeprefix("eval_")
    metrics = objective.metrics
    if a.mtp_num_layers != 0 and metric.endswith("mtp_loss"):
        metrics += ("mtp_loss",)  # None: the model decides, and the trainer checks again
    if a.predict_with_generate:
        metrics += GENERATION_METRICS
        _check_generation(objective, judge)
    elsewhere = {name for row in OBJECTIVES.values() for name in row.metrics}
    if metric in elsewhere.difference(metrics):
        reason = f"stage {a.stage} has no such metric"
        remedy = f"metric_for_best_model: {objective.metrics[0]}"
        judge.refuse("metric_for_best_model", reason, remedy, metric)
    sets = a.eval_dataset if a.eval_on_each_dataset else None
    check_metric(a, metrics, map(name_of_set, sets or ()), judge)
    check_records(objective, judge)
    if objective.check_run is not None:
        objective.check_run(a, judge)


def _check_generation(objective: Objective, judge: Judge) -> None:
    if objective.records != CONVERSATIONS:
        reason = f"stage {objective.stage} has no prompts with one answer"
        judge.refuse("predict_with_generate", reason, "predict_with_generate: false")
    reason = "an answer begins at the first trained token, and the prompt is trained too"
    judge.apply([Rule("predict_with_generate train_on_prompt", reason, "train_on_prompt: false")])


def check_backend(judge: Judge) -> None:
    """Check the keys of training against adapters and the backend."""
    judge.apply(_BACKEND)


def check_run(a: Any, given: dict[str, Any], judge: Judge) -> list[str]:
    """Check the groups of a run (RunArguments) against each other -> notes about values without
    effect. given: the written keys and values."""
    check_backend(judge)
    check_objective_run(a, judge)
    judge.apply(_RUN)
    evaluated = {"eval_strategy": "no", "do_eval": False, "do_predict": False}
    on = [key for key, off in evaluated.items() if getattr(a, key) != off]
    if on and not (a.eval_dataset or a.val_size > 0):
        off = ", ".join(f"{key}: {str(evaluated[key]).lower()}" for key in on)
        judge.refuse(
            f"{' '.join(on)} eval_dataset val_size",
            "there is nothing to evaluate on",
            f"val_size: 0.05, or eval_dataset: <files>, or {off}",
        )
    start = a.model_name_or_path
    if os.path.isdir(start) and os.path.realpath(start) == os.path.realpath(a.output_dir):
        reason = "the trained model would overwrite the one that it starts from"
        judge.refuse("output_dir model_name_or_path", reason, f"output_dir: {a.output_dir}-sft")
    return [*(note for group in a.groups for note in group.notes), *_idle_keys(a, given, on)]


def _idle_keys(a: Any, given: dict[str, Any], evaluated: list[str]) -> list[str]:
    has_data = a.val_size > 0 or a.eval_dataset
    notes = {
        f"sequence_packing joins the samples of a micro-batch, {a.per_device_train_batch_size} "
        "of them: packing: true fills rows of cutoff_len": (
            a.sequence_packing and not (a.neat_packing or a.packing)
        ),
        "fp8: log-probabilities of responses are rounded to about 0.2 with it": (
            a.fp8 and OBJECTIVES[a.stage].has_pairs
        ),
        f"num_train_epochs is not used: max_steps is {a.max_steps}": (
            a.max_steps > 0 and given.get("num_train_epochs") is not None
        ),
        "nothing is evaluated although there is data for it: eval_strategy is no": (
            has_data and not evaluated
        ),
        "predict_with_generate: no effect, since nothing is evaluated": (
            a.predict_with_generate and not evaluated
        ),
    }
    return [note for note, applies in notes.items() if applies]


# -- adapters: `spec` is a LoraSpec (lora_layers.py), `candidates` the modules for adapters
# (lora.Candidate)

ALL_LINEAR = ("all", "all-linear")
ALL_ROUTERS = "all-router"
EMBEDDING_AND_HEAD = ("embed_tokens", "lm_head")
ONE_SIDED = (
    "{} has an adapter, and the embedding is the head in this model: merged, both would change"
)
# keys of adapter_config.json for unsupported features -> their values without effect
_PLAIN: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    # other ways to start change the base weights
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


def check_adapter_config(values: dict, path, judge: Judge) -> None:
    """Check the raw values of an adapter_config.json for supported ones."""
    rank = values.get("r")
    names = values.get("modules_to_save") or []
    is_list_of_names = isinstance(names, list) and set(map(type, names)) <= {str}
    types = {
        "r": ("a whole number above 0", type(rank) is int and rank > 0),
        "lora_alpha": ("a number", type(values.get("lora_alpha")) in (int, float)),
        "lora_dropout": ("a number", type(values.get("lora_dropout")) in (int, float, type(None))),
        "modules_to_save": ("a list of names", is_list_of_names),
    }

    def refuse(key: str, reason: str, remedy: str) -> None:
        judge.refuse("adapter_name_or_path", reason, remedy, None, f"{key} of {path}")

    for key, (expected, fits) in types.items():
        if not fits:
            reason = f"expected {expected}, got {values.get(key)!r:.80}"
            refuse(key, reason, "the file as PEFT wrote it")
    for key, plain in _PLAIN.items():
        if key in values and values[key] not in plain:
            refuse(
                key,
                f"{key} is {json.dumps(values[key])}, which is not supported (expected "
                f"{json.dumps(plain[0])})",
                "merge that adapter into its base with PEFT and train a new one",
            )


def resolve_targets(targets: Iterable[str], candidates: list, judge: Judge) -> tuple[str, ...]:
    """The HF names of the modules of `targets`, in the model's order.

    A target is "all", a name (q_proj, self_attn.q_proj, linear_qkv), or a pattern:
    *.layers.[0-3].*.q_proj, or a regular expression for a whole name, of Hugging Face or megatron.
    A target without a module is refused.
    """
    chosen = set()
    names = {c.hf for c in candidates}
    for target in targets:
        matches = {target} & names or {c.hf for c in candidates if _is_match(target, c)}
        if not matches:
            _refuse_target(target, candidates, judge)
        chosen |= matches
    return tuple(c.hf for c in candidates if c.hf in chosen)


def _refuse_target(target: str, candidates: list, judge: Judge) -> None:
    ends = (_last(name) for c in candidates for name in (c.hf, c.mca) if name)
    known = list(dict.fromkeys(ends))
    near = difflib.get_close_matches(target, known, n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    judge.refuse(
        "lora_target",
        f"it means no layer of this model{hint}",
        f"all, some of {', '.join(known)}, or a pattern over names such as {candidates[-2].hf}",
        target,
    )


def _last(module: str) -> str:
    return module.rsplit(".", 1)[-1]


def _is_match(target: str, candidate) -> bool:
    if target in ALL_LINEAR:
        return candidate.in_all
    if target == ALL_ROUTERS:
        return candidate.mca.endswith(".mlp.router")
    for name in filter(None, (candidate.hf, candidate.mca)):
        if f".{name}".endswith(f".{target}") or fnmatch.fnmatchcase(name, target):
            return True
        with contextlib.suppress(re.error):
            if re.fullmatch(target, name):
                return True
    return False


def check_other_model(folder, spec, candidates: list, judge: Judge) -> None:
    """Check the modules of a folder's adapter, the targets of `spec`, against the model's."""
    modules = {c.hf for c in candidates}
    unknown = [name for name in spec.targets if name not in modules]
    if unknown or not spec.targets:
        example = "".join(f", such as {name}" for name in unknown[:1])
        judge.refuse(
            "adapter_name_or_path lora_target",
            f"it is an adapter of another model: of its {len(spec.targets)} modules this model "
            f"lacks {len(unknown)}{example}",
            "model_name_or_path: its base",
            str(folder),
        )


def check_single_experts(spec, candidates: list, judge: Judge) -> None:
    """Check for targets on some experts of a layer only."""
    chosen = set(spec.modules)
    projections = dict[str, set[str]]()
    for candidate in candidates:
        name = re.sub(r"\.experts\.\d+\.", ".experts.", candidate.hf)
        projections.setdefault(name, set()).add(candidate.hf)
    for modules in projections.values():
        others = modules - chosen
        if others and others != modules:
            reason = f"it means {min(modules & chosen)} and not {min(others)}"
            remedy = "all experts of a layer, or none"
            judge.refuse("lora_target", reason, remedy, list(spec.targets))


def is_saved(module: str, spec) -> bool:
    """True for an HF module in modules_to_save, by PEFT's rule: the end of its name."""
    return module.endswith(tuple(spec.modules_to_save))


def check_saved(spec, weights: Iterable, judge: Judge) -> None:
    """Check modules_to_save against the trainable weights (lora.Weight) of the model."""
    key = "modules_to_save"
    names = list(spec.modules_to_save)
    unused = set(names)
    for weight in weights if unused else ():
        saved = [module for module in weight.modules if is_saved(module, spec)]
        unused -= {name for name in unused if any(module.endswith(name) for module in saved)}
        if not saved:
            continue
        others = set(weight.modules) - set(saved)
        if weight.is_expert:
            reason = "experts are not trained whole"
            judge.refuse(key, reason, "experts in lora_target", saved[0])
        elif weight.is_tied:
            judge.refuse(
                key,
                "the embedding is the head in this model: PEFT would train a copy for one of the "
                "two",
                "modules_to_save without it, or embed_tokens in lora_target",
                saved[0],
            )
        elif others:
            reason = f"{', '.join(saved)} is one matrix with {', '.join(sorted(others))} here"
            judge.refuse(key, reason, "all of them or none", names)
        elif set(saved) & set(spec.modules):
            reason = "it is in lora_target and in modules_to_save"
            judge.refuse(key, reason, "one of the two", saved[0])
    if unused:
        reason = "it is the end of no module's name in this model"
        judge.refuse(key, reason, "some of embed_tokens, lm_head, or left out", min(unused))


def check_new_rows(modules_to_save, num_new: int, is_tied: bool, judge: Judge) -> None:
    """Check modules_to_save for the rows of new tokens beside adapters."""
    saved = list(modules_to_save or ())
    key = "modules_to_save"
    lacking = [end for end in EMBEDDING_AND_HEAD if not any(m.endswith(end) for m in saved)]
    if is_tied:
        judge.refuse(
            key,
            f"the rows of {num_new} new tokens are trained through modules_to_save, for models "
            "with a head apart from the embedding, and this model's embedding is its head",
            "finetuning_type: full, or no new tokens",
            saved,
        )
    elif lacking:
        judge.refuse(
            key,
            f"the rows of {num_new} new tokens would not be trained: {', '.join(lacking)} is not "
            "in it",
            f"modules_to_save: {', '.join(EMBEDDING_AND_HEAD)}",
            saved,
        )


def check_on_torch(spec, linears: Iterable[str], judge: Judge) -> None:
    """Check adapters on plain torch. linears: the names of a transformers model's linears and
    embeddings."""
    if spec.dropout and not set(linears) >= set(spec.modules):
        reason = "adapters of experts and routers have none on plain torch"
        judge.refuse("lora_dropout", reason, "lora_dropout: 0, or use_mca: true", spec.dropout)


def check_on_megatron(spec, config, rows, candidates: list, judge: Judge) -> None:
    """Check adapters on megatron-core. config: McaModelConfig; rows: those of its family."""
    adapted = sorted((c.hf, c.mca) for c in candidates if c.hf in set(spec.modules))
    targets = list(spec.targets)

    def adapted_where(is_it: Callable[[str], bool]) -> list[str]:
        return [hf for hf, mca in adapted if is_it(mca)]

    if config.mtp_num_layers:
        judge.refuse("mtp_num_layers", _ON_ADAPTERS, "mtp_num_layers: 0", config.mtp_num_layers)
    _check_fused(spec, config.hf_model_type, rows, candidates, judge)
    groups = config.num_query_groups
    tp = config.tensor_model_parallel_size
    attention = adapted_where(lambda mca: mca.endswith("linear_qkv"))
    if groups % tp and attention:
        # ranks that share a query group would have unequal parts of q_proj, k_proj and v_proj
        judge.refuse(
            "lora_target",
            f"adapters on {attention[0]} of a model with {groups} query groups are not supported "
            f"for tensor_model_parallel_size {tp}",
            f"tensor_model_parallel_size: {math.gcd(groups, tp)}, or lora_target without q_proj, "
            "k_proj and v_proj",
            targets,
        )
    shared = adapted_where(lambda mca: ".shared_experts." in mca)
    if config.moe_shared_expert_overlap and tp > 1 and shared:
        # overlapped linears of shared experts leave their communication to other code, without the
        # adapters
        judge.refuse(
            "lora_target",
            f"adapters on shared experts ({shared[0]}) that overlap with the dispatch are not "
            "supported under tensor parallelism",
            "moe_shared_expert_overlap: false",
            targets,
        )
    is_cut = (config.expert_tensor_parallel_size or 1) > 1
    if spec.dropout and is_cut and adapted_where(is_of_expert):
        reason = "ranks that share an expert's columns would drop different inputs"
        remedy = "expert_tensor_parallel_size: 1, or lora_dropout: 0"
        judge.refuse("lora_dropout", reason, remedy, spec.dropout)


def _check_fused(spec, model_type: str, rows, candidates: list, judge: Judge) -> None:
    # PEFT has one A and one B for all projections of a fused tensor, and tensor parallelism cuts
    # each projection
    fused = {_last(name.removesuffix(".weight")) for row in rows if row.fused for name in row.hf}
    adapted = sorted(fused & set(map(_last, spec.modules)))
    if adapted:
        others = sorted({_last(c.hf) for c in candidates if c.in_all} - fused)
        judge.refuse(
            "lora_target",
            f"adapters on {', '.join(adapted)} of {model_type}, several projections in one tensor, "
            "are not supported",
            f"lora_target: {', '.join(others)}, or use_mca: false",
            list(spec.targets),
        )


def check_mergeable(spec, is_tied: bool, judge: Judge, key: str = "save_merged_model") -> None:
    """Refuse to merge an adapter on one side of a tied embedding."""
    one_sided = [name for name in spec.modules if name.endswith(EMBEDDING_AND_HEAD)]
    if one_sided and is_tied:
        remedy = f"take it out of lora_target, or set {key}: false"
        judge.refuse(key, ONE_SIDED.format(one_sided[0]), remedy, True)
