"""The rules between the keys of adapters and a model's modules.

lora.plan asks them, from the command line as from Python, before ranks meet. `spec` is a LoraSpec
(lora_layers.py), `found` the modules that can have an adapter (lora_sites.Candidate).
"""

import contextlib
import difflib
import fnmatch
import json
import math
import re
from collections.abc import Callable, Iterable

from .args_values import Judge
from .model_family_rows import is_of_expert

ALL_LINEAR, ALL_ROUTERS = ("all", "all-linear"), "all-router"
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
            remedy = "merge that adapter into its base with PEFT and train a new one"
            name = f"{key} of {path}"
            judge.refuse(
                "adapter_name_or_path", f"{reason}{json.dumps(plain[0])})", remedy, None, name
            )


def _is_list_of_names(names) -> bool:
    if names is None:
        return True
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


# -- which modules


def resolve_targets(targets: Iterable[str], found: list, judge: Judge) -> tuple[str, ...]:
    """The HF names of the modules that `targets` mean, in the model's order.

    A target is "all", a name (q_proj, self_attn.q_proj, linear_qkv), or a pattern:
    *.layers.[0-3].*.q_proj, or a regular expression that matches a whole name, of Hugging Face or
    megatron. One that means no module is refused.
    """
    chosen, names = set(), {c.hf for c in found}
    for target in targets:
        meant = {target} if target in names else {c.hf for c in found if _is_meant(target, c)}
        if not meant:
            ends = (name.rsplit(".", 1)[-1] for c in found for name in (c.hf, c.mca) if name)
            known = list(dict.fromkeys(ends))
            near = difflib.get_close_matches(target, known, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            remedy = f"all, some of {', '.join(known)}, or a pattern over names such as "
            judge.refuse(
                "lora_target",
                f"it means no layer of this model{hint}",
                remedy + found[-2].hf,
                target,
            )
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
    chosen, projections = set(spec.modules), dict[str, set[str]]()
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
    key, unused = "modules_to_save", set(spec.modules_to_save)
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
    saved, key = modules_to_save or (), "modules_to_save"
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
    chosen, target = set(spec.modules), "lora_target"

    def meant(is_it: Callable[[str], bool]) -> list[str]:
        """The adapted modules whose name in megatron is such a one."""
        return sorted(c.hf for c in found if c.hf in chosen and is_it(c.mca))

    check_no_prediction(config.mtp_num_layers, judge)
    _check_fused(spec, config.hf_model_type, rows, found, judge)
    groups, tp = config.num_query_groups, config.tensor_model_parallel_size
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
        judge.refuse(
            "lora_target", f"{reason}in one tensor, are not built", remedy, list(spec.targets)
        )


def check_mergeable(spec, is_tied: bool, judge: Judge, key: str = "save_merged_model") -> None:
    """The adapter can be put into the weights: it is not on one side of a tied embedding."""
    one_sided = [name for name in spec.modules if name.endswith(EMBEDDING_AND_HEAD)]
    if one_sided and is_tied:
        remedy = f"take it out of lora_target, or set {key}: false"
        judge.refuse(key, ONE_SIDED.format(one_sided[0]), remedy, True)
