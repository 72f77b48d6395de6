"""The rules of a run's other groups of keys, between groups, and between adapters and a model.

Every rule stands once, here, in args_rules_training.py (TrainingArguments alone) or in
args_rules_model.py (a model's numbers). args_run.parse_args and the constructors of Python
(DPOConfig, LoraSpec, the trainers) ask these functions, with a Judge (args_values.py) and the
arguments `a` by their keys.
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

from .errors import Judge
from .families import is_of_expert
from .files import GENERATION_METRICS
from .tables import CONVERSATIONS, OBJECTIVES, TEMPLATES, Objective

SOME_DATA = "dataset: <files, or names in dataset_info.json>"


def check_named(a: Any, judge: Judge) -> None:
    """DataArguments name some data."""
    if not a.dataset and not a.eval_dataset:
        judge.refuse("dataset", "it names no data", SOME_DATA)


def name_of_set(file: str) -> str:
    """The name of a set of eval_dataset in its metrics."""
    return Path(file).stem  # of a folder too, with a slash behind it


def check_records(a: Any, objective: Objective, judge: Judge) -> None:
    """DataArguments against the records of an objective."""
    if not objective.has_pairs:
        return
    if a.train_on_prompt:
        reason = "answers are compared, and both have the same prompt"
        judge.refuse("train_on_prompt", reason, "train_on_prompt: false")
    if a.streaming:
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
    weights = a.mix_weights
    one_each = f"mix_weights: {[1.0] * len(a.dataset)}"
    check_named(a, judge)
    if a.eval_on_each_dataset and not a.eval_dataset:
        remedy = "eval_dataset: <files, or names>, or eval_on_each_dataset: false"
        judge.refuse("eval_on_each_dataset", "eval_dataset names none", remedy)
    elif a.eval_on_each_dataset:
        names = [name_of_set(name) for name in a.eval_dataset]
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
    for key in a.changed:
        if key in ("preprocessing_num_workers", "overwrite_cache") and a.streaming:
            a.notes.append(f"{key}: no effect on what is streamed")
        elif key == "buffer_size" and not a.streaming:
            a.notes.append("buffer_size: no effect, since streaming is false")
    template = a.chat_template or "{"
    if not ("{" in template or template in TEMPLATES or os.path.isfile(template)):
        reason = "expected a built-in template, a jinja file or its text"
        judge.refuse("chat_template", reason, f"one of {', '.join(TEMPLATES)}")
    if needed := {"role", "content"}.intersection(a.ignore_message_keys):
        reason = f"{', '.join(sorted(needed))}: a message is nothing without"
        judge.refuse("ignore_message_keys", reason, "the names of other keys")
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


def check_finetuning(a: Any, judge: Judge) -> None:
    """FinetuningArguments: keys without effect, and those that must agree."""
    given = [key for key in a.changed if a.__dataclass_fields__[key].metadata.get("lora")]
    if a.finetuning_type == "full":
        if a.adapter_name_or_path and "finetuning_type" not in judge.bad:
            reason = "finetuning_type is full, and the adapter would not be used"
            judge.refuse("adapter_name_or_path", reason, "finetuning_type: lora")
        elif given:
            a.notes.append(f"{', '.join(given)}: no effect, since finetuning_type is full")
    elif not a.lora_target:
        judge.refuse("lora_target", "it names no layer", "lora_target: all")
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


# ---- between groups


def check_metric(a: Any, metrics: tuple[str, ...], sets: Iterable[str], judge: Judge) -> None:
    """metric_for_best_model against the metrics that an evaluation gives. sets: the names of
    several sets, which stand before those of their metrics."""
    given = list(metrics)
    key = "metric_for_best_model"
    given += [f"{name}_{metric}" for name in sets for metric in metrics]
    names = {*given, *(f"eval_{name}" for name in given)}
    if a.eval_strategy != "no" and a.metric_for_best_model not in names:
        reason = f"an evaluation gives {', '.join(given)}"
        judge.refuse(f"{key} eval_strategy", reason, f"{key}: {metrics[0]}")


def check_objective_run(a: Any, judge: Judge) -> None:
    """The keys of all groups against the row of the stage."""
    objective = OBJECTIVES[a.stage]
    metric = a.metric_for_best_model.removeprefix("eval_")
    metrics = objective.metrics
    if a.mtp_num_layers != 0 and metric.endswith("mtp_loss"):
        metrics += ("mtp_loss",)  # None: the model says, and the trainer asks again
    if a.predict_with_generate:
        metrics += GENERATION_METRICS
        _check_generation(a, objective, judge)
    elsewhere = {name for row in OBJECTIVES.values() for name in row.metrics}
    if metric in elsewhere.difference(metrics):
        reason = f"stage {a.stage} has no such metric"
        remedy = f"metric_for_best_model: {objective.metrics[0]}"
        judge.refuse("metric_for_best_model", reason, remedy, metric)
    else:
        names = a.eval_dataset if a.eval_on_each_dataset and a.eval_dataset else []
        check_metric(a, metrics, [name_of_set(name) for name in names], judge)
    check_records(a, objective, judge)
    if objective.check_run is not None:
        objective.check_run(a, judge)


def _check_generation(a: Any, objective: Objective, judge: Judge) -> None:
    off = "predict_with_generate: false"
    if objective.records != CONVERSATIONS:
        reason = f"stage {objective.stage} has no prompts with one answer"
        judge.refuse("predict_with_generate", reason, off)
    elif a.train_on_prompt:
        reason = "an answer begins where trained tokens do, and the prompt is trained too"
        judge.refuse("predict_with_generate train_on_prompt", reason, "train_on_prompt: false")


def check_backend(a: Any, judge: Judge) -> None:
    """What adapters and the backend ask of the keys of training."""
    if a.mtp_num_layers and not a.use_mca:
        reason = "plain torch has no layers for multi-token prediction"
        judge.refuse("mtp_num_layers", reason, "mtp_num_layers: 0")
    if a.finetuning_type == "lora":
        check_no_prediction(a.mtp_num_layers, judge)
    if a.moe_router_bias_update_rate and a.finetuning_type == "lora":
        key = "moe_router_bias_update_rate"
        reason = "adapters leave the base model as it is, "
        judge.refuse(f"{key} finetuning_type", f"{reason}the routers' bias too", f"{key}: 0")


def check_run(a: Any, given: dict[str, Any], judge: Judge) -> list[str]:
    """What the groups of a run (RunArguments) must agree on: data, folders and evaluation -> lines
    about values without effect. given: the keys and values that were written."""
    check_backend(a, judge)
    check_objective_run(a, judge)
    check_stream(a, judge)
    asked = ["eval_strategy: no"] if a.eval_strategy != "no" else []
    asked += [f"{key}: false" for key in ("do_eval", "do_predict") if getattr(a, key)]
    if asked and not (a.eval_dataset or a.val_size > 0):
        remedy = f"val_size: 0.05, or eval_dataset: <files>, or {', '.join(asked)}"
        keys = " ".join(word.partition(":")[0] for word in asked)
        reason = "there is nothing to evaluate on"
        judge.refuse(f"{keys} eval_dataset val_size", reason, remedy)
    if a.do_train and a.eval_dataset and not a.dataset:
        judge.refuse("dataset", "there is nothing to train on", f"{SOME_DATA}, or do_train: false")
    if not a.do_train and a.resume_from_checkpoint not in (None, False):
        reason = "training goes on from a checkpoint, and the model that is evaluated is "
        remedy = "model_name_or_path: <what the run exported>, or resume_from_checkpoint: false"
        judge.refuse("resume_from_checkpoint", f"{reason}model_name_or_path", remedy)
    if not (a.do_train or a.do_eval or a.do_predict):
        remedy = "do_train: true, or do_eval: true"
        judge.refuse("do_train do_eval do_predict", "there is nothing to do", remedy)
    start = a.model_name_or_path
    if os.path.isdir(start) and os.path.realpath(start) == os.path.realpath(a.output_dir):
        reason = "the trained model would overwrite the one that it starts from"
        judge.refuse("output_dir model_name_or_path", reason, f"output_dir: {a.output_dir}-sft")
    return _idle_keys(a, given)


def _idle_keys(a: Any, given: dict[str, Any]) -> list[str]:
    notes = [note for group in a.groups for note in group.notes]
    if a.sequence_packing and not (a.neat_packing or a.packing):
        notes.append(
            f"sequence_packing joins the samples of a micro-batch, {a.per_device_train_batch_size} "
            "of them: packing: true fills rows of cutoff_len"
        )
    if a.fp8 and OBJECTIVES[a.stage].has_pairs:
        notes.append("fp8: log-probabilities of responses are rounded to about 0.2 with it")
    if a.max_steps > 0 and given.get("num_train_epochs") is not None:
        notes.append(f"num_train_epochs is not used: max_steps is {a.max_steps}")
    if a.eval_strategy == "no" and not (a.do_eval or a.do_predict):
        if a.val_size > 0 or a.eval_dataset:
            notes.append("nothing is evaluated although there is data for it: eval_strategy is no")
        if a.predict_with_generate:
            notes.append("predict_with_generate: no effect, since nothing is evaluated")
    return notes


# ---- adapters: `spec` is a LoraSpec (lora_layers.py), `found` the modules that can have an adapter
# (lora_sites.Candidate)

ALL_LINEAR = ("all", "all-linear")
ALL_ROUTERS = "all-router"
EMBEDDING_AND_HEAD = ("embed_tokens", "lm_head")
ONE_SIDED = (
    "{} has an adapter, and the embedding is the head in this model: merged, both would change"
)
# Keys of adapter_config.json that ask for what is not built here -> their values without effect
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
    """An adapter_config.json, as it was read, against what is built here."""
    wanted = {
        "r": ("a whole number above 0", lambda r: type(r) is int and r > 0),
        "lora_alpha": ("a number", lambda alpha: type(alpha) in (int, float)),
        "lora_dropout": ("a number", lambda share: type(share) in (int, float, type(None))),
        "modules_to_save": ("a list of names", _is_list_of_names),
    }
    for key, (what, fits) in wanted.items():
        if not fits(values.get(key)):
            reason = f"expected {what}, got {values.get(key)!r:.80}"
            remedy = "the file as PEFT wrote it"
            judge.refuse("adapter_name_or_path", reason, remedy, None, f"{key} of {path}")
    for key, plain in _PLAIN.items():
        if key in values and values[key] not in plain:
            reason = f"{key} is {json.dumps(values[key])}, which is not built here (expected "
            reason += f"{json.dumps(plain[0])})"
            remedy = "merge that adapter into its base with PEFT and train a new one"
            judge.refuse("adapter_name_or_path", reason, remedy, None, f"{key} of {path}")


def _is_list_of_names(names) -> bool:
    return names is None or (isinstance(names, list) and all(type(name) is str for name in names))


# -- which modules


def resolve_targets(targets: Iterable[str], found: list, judge: Judge) -> tuple[str, ...]:
    """The HF names of the modules that `targets` mean, in the model's order.

    A target is "all", a name (q_proj, self_attn.q_proj, linear_qkv), or a pattern:
    *.layers.[0-3].*.q_proj, or a regular expression that matches a whole name, of Hugging Face or
    megatron. One that means no module is refused.
    """
    chosen = set()
    names = {c.hf for c in found}
    for target in targets:
        meant = {target} if target in names else {c.hf for c in found if _is_meant(target, c)}
        if not meant:
            ends = (name.rsplit(".", 1)[-1] for c in found for name in (c.hf, c.mca) if name)
            known = list(dict.fromkeys(ends))
            near = difflib.get_close_matches(target, known, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            remedy = f"all, some of {', '.join(known)}, or a pattern over names such as "
            reason = f"it means no layer of this model{hint}"
            judge.refuse("lora_target", reason, f"{remedy}{found[-2].hf}", target)
        chosen |= meant
    return tuple(c.hf for c in found if c.hf in chosen)


def _is_meant(target: str, candidate) -> bool:
    if target in ALL_LINEAR:
        return candidate.in_all
    if target == ALL_ROUTERS:
        return candidate.mca.endswith(".mlp.router")
    for name in filter(None, (candidate.hf, candidate.mca)):
        if name == target or name.endswith("." + target) or fnmatch.fnmatchcase(name, target):
            return True
        with contextlib.suppress(re.error):
            if re.fullmatch(target, name):
                return True
    return False


def check_other_model(folder, spec, found: list, judge: Judge) -> None:
    """The modules of a folder's adapter, the targets of `spec`, are modules of the model."""
    unknown = [name for name in spec.targets if name not in {c.hf for c in found}]
    if unknown or not spec.targets:
        reason = "it is an adapter of another model: it adapts "
        reason += f"{len(spec.targets)} modules, of which this model lacks {len(unknown)}"
        reason += f", such as {unknown[0]}" if unknown else ""
        remedy = "model_name_or_path: its base"
        judge.refuse("adapter_name_or_path lora_target", reason, remedy, str(folder))


def check_single_experts(spec, found: list, judge: Judge) -> None:
    """Targets mean all experts of a layer, or none."""
    chosen = set(spec.modules)
    projections = dict[str, set[str]]()
    for candidate in found:
        name = re.sub(r"\.experts\.\d+\.", ".experts.", candidate.hf)
        projections.setdefault(name, set()).add(candidate.hf)
    for modules in projections.values():
        meant = modules & chosen
        if meant and meant != modules:
            reason = f"it means {min(meant)} and not {min(modules - meant)}"
            remedy = "all experts of a layer, or none"
            judge.refuse("lora_target", reason, remedy, list(spec.targets))


# -- modules_to_save


def is_saved(module: str, spec) -> bool:
    """Whether modules_to_save means the HF module, by PEFT's rule: the end of its name."""
    return any(module.endswith(name) for name in spec.modules_to_save)


def check_saved(spec, weights: Iterable, judge: Judge) -> None:
    """Each of modules_to_save means a weight (lora_sites.Weight) that can be trained by itself."""
    key = "modules_to_save"
    unused = set(spec.modules_to_save)
    for weight in weights if unused else ():
        meant = [module for module in weight.modules if is_saved(module, spec)]
        unused -= {name for name in unused for module in meant if module.endswith(name)}
        if not meant:
            continue
        others = set(weight.modules) - set(meant)
        if weight.is_expert:
            reason = "experts are not trained whole"
            judge.refuse(key, reason, "experts in lora_target", meant[0])
        elif weight.is_tied:
            reason = "the embedding is the head in this model: PEFT would train a copy for one of "
            remedy = "modules_to_save without it, or embed_tokens in lora_target"
            judge.refuse(key, f"{reason}the two", remedy, meant[0])
        elif others:
            reason = f"{', '.join(meant)} is one matrix with {', '.join(sorted(others))} here"
            judge.refuse(key, reason, "all of them or none", list(spec.modules_to_save))
        elif set(meant) & set(spec.modules):
            reason = "it is in lora_target and in modules_to_save"
            judge.refuse(key, reason, "one of the two", meant[0])
    if unused:
        reason = "it is the end of no module's name in this model"
        judge.refuse(key, reason, "some of embed_tokens, lm_head, or left out", min(unused))


def check_new_rows(modules_to_save, num_new: int, is_tied: bool, judge: Judge) -> None:
    """With adapters, the rows of new tokens are trained through modules_to_save."""
    saved = modules_to_save or ()
    key = "modules_to_save"
    lacking = [end for end in EMBEDDING_AND_HEAD if not any(m.endswith(end) for m in saved)]
    if is_tied:
        reason = f"the rows of {num_new} new tokens are trained through modules_to_save, which "
        reason += "needs a head of its own, and this model's embedding is its head"
        judge.refuse(key, reason, "finetuning_type: full, or no new tokens", list(saved))
    elif lacking:
        reason = f"the rows of {num_new} new tokens would not be trained: {', '.join(lacking)} is "
        remedy = f"modules_to_save: {', '.join(EMBEDDING_AND_HEAD)}"
        judge.refuse(key, f"{reason}not in it", remedy, list(saved))


# -- what is built


def check_no_prediction(mtp_num_layers: int | None, judge: Judge) -> None:
    """What a model with adapters cannot have."""
    if mtp_num_layers:
        reason = "adapters beside layers for multi-token prediction are not built"
        judge.refuse("mtp_num_layers", reason, "mtp_num_layers: 0", mtp_num_layers)


def check_on_torch(spec, linears: Iterable[str], judge: Judge) -> None:
    """linears: the names of a transformers model's linears and embeddings."""
    if spec.dropout and not set(linears) >= set(spec.modules):
        reason = "adapters of experts and routers have none on plain torch"
        judge.refuse("lora_dropout", reason, "lora_dropout: 0, or use_mca: true", spec.dropout)


def check_on_megatron(spec, config, rows, found: list, judge: Judge) -> None:
    """config: McaModelConfig; rows: those of its family."""
    chosen = set(spec.modules)
    target = "lora_target"

    def meant(is_it: Callable[[str], bool]) -> list[str]:
        """The adapted modules whose name in megatron is such a one."""
        return sorted(c.hf for c in found if c.hf in chosen and is_it(c.mca))

    check_no_prediction(config.mtp_num_layers, judge)
    _check_fused(spec, config.hf_model_type, rows, found, judge)
    groups = config.num_query_groups
    tp = config.tensor_model_parallel_size
    if groups % tp and (attention := meant(lambda mca: mca.endswith("linear_qkv"))):
        # ranks that share a query group would hold unequal parts of q_proj, k_proj and v_proj
        reason = f"adapters on {attention[0]} of a model with {groups} query groups are not built "
        reason += f"for tensor_model_parallel_size {tp}"
        remedy = f"tensor_model_parallel_size: {math.gcd(groups, tp)}, or lora_target without "
        judge.refuse(target, reason, f"{remedy}q_proj, k_proj and v_proj", list(spec.targets))
    shared = meant(lambda mca: ".shared_experts." in mca)
    if config.moe_shared_expert_overlap and tp > 1 and shared:
        # beside the dispatch the linears of shared experts leave their communication to others,
        # which adapters would miss
        reason = f"adapters on shared experts ({shared[0]}) that run beside the dispatch are not "
        reason += "built under tensor parallelism"
        judge.refuse(target, reason, "moe_shared_expert_overlap: false", list(spec.targets))
    cut = (config.expert_tensor_parallel_size or 1) > 1
    if spec.dropout and cut and meant(is_of_expert):
        reason = "ranks that share an expert's columns would drop different inputs"
        remedy = "expert_tensor_parallel_size: 1, or lora_dropout: 0"
        judge.refuse("lora_dropout", reason, remedy, spec.dropout)


def _check_fused(spec, model_type: str, rows, found: list, judge: Judge) -> None:
    # PEFT has one A and one B for all projections of a fused tensor, and tensor parallelism cuts
    # these one by one
    def last(module: str) -> str:
        return module.rsplit(".", 1)[-1]

    fused = {last(name.removesuffix(".weight")) for row in rows if row.fused for name in row.hf}
    if meant := sorted(fused & set(map(last, spec.modules))):
        others = sorted({last(c.hf) for c in found if c.in_all} - fused)
        reason = f"adapters on {', '.join(meant)} of {model_type}, which holds several projections "
        remedy = f"lora_target: {', '.join(others)}, or use_mca: false"
        reason += "in one tensor, are not built"
        judge.refuse("lora_target", reason, remedy, list(spec.targets))


def check_mergeable(spec, is_tied: bool, judge: Judge, key: str = "save_merged_model") -> None:
    """The adapter can be put into the weights: it is not on one side of a tied embedding."""
    one_sided = [name for name in spec.modules if name.endswith(EMBEDDING_AND_HEAD)]
    if one_sided and is_tied:
        remedy = f"take it out of lora_target, or set {key}: false"
        judge.refuse(key, ONE_SIDED.format(one_sided[0]), remedy, True)
