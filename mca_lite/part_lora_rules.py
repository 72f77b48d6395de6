"""Rules about which adapters a model can have, for runs and for the Python functions
part_lora.inject and load_adapter.

`candidates` are part_lora_sites.Candidates. Each check reports to `judge`.
"""

import contextlib
import fnmatch
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from .args_values import check_keys
from .errors import Judge, Keys
from .families_rows import PREDICTION_LAYERS, Row, is_of_expert
from .files import PathLike
from .hosts import last_of
from .model_config import McaModelConfig
from .part_lora_keys import PATTERN_KEYS, LoraArguments
from .part_lora_patterns import LoraSpec, is_saved, place_of

ALL_LINEAR = ("all", "all-linear")
ALL_ROUTERS = "all-router"
EMBEDDING_AND_HEAD = ("embed_tokens", "lm_head")
ONE_SIDED = (
    "{} has an adapter, and the embedding is the head in this model: merged, both would change"
)
# keys of adapter_config.json for unsupported features -> values that leave the feature off
_PLAIN: dict[str, tuple[Any, ...]] = dict.fromkeys(
    "use_dora use_qalora lora_bias fan_in_fan_out trainable_token_indices layer_replication "
    "alora_invocation_tokens arrow_config kasa_config monteclora_config use_bdlora".split(),
    (False, None, {}, []),
)
_PLAIN |= {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # other initialisations would change the base weights
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


def check_adapter_config(values: dict[str, Any], path: Path, judge: Judge) -> None:
    """Check the contents of a PEFT adapter_config.json: no feature that is not supported may be on
    (_PLAIN lists them), such as DoRA; r, lora_alpha, lora_dropout and modules_to_save must have the
    right types, and target_parameters and patterns be valid. Errors are added to `judge`, which
    collects them. path: the file, for messages."""
    saved = values.get("modules_to_save") or []
    fits = {
        "r": type(values.get("r")) is int,
        "lora_alpha": type(values.get("lora_alpha")) in (int, float),
        "lora_dropout": type(values.get("lora_dropout")) in (int, float, NoneType),
        "modules_to_save": isinstance(saved, list) and set(map(type, saved)) <= {str},
    }
    named = {key: values[key] for key in PATTERN_KEYS if values.get(key)}
    defects = {problem.key for problem in check_keys(LoraArguments, **named)}
    fits |= {key: key not in defects for key in PATTERN_KEYS}
    fits |= {key: values.get(key, plain[0]) in plain for key, plain in _PLAIN.items()}
    for key, is_known in fits.items():
        judge.expect(
            is_known,
            "adapter_name_or_path",
            f"{key} is {values.get(key)!r:.80}, which is damaged or not supported",
            "the file as PEFT wrote it; or merge that adapter into its base and train a new one",
            None,
            f"{key} of {path}",
        )


def resolve_targets(spec: LoraSpec, candidates: list[Any], judge: Judge) -> tuple[str, ...]:
    """Find the modules that get adapters -> their Hugging Face names, in the model's order. They
    are the candidates that match a target of the spec, and experts in its target_parameters.

    spec: the adapter's settings. candidates: a part_lora_sites.Candidate for each module that can
    have an adapter. judge: gets an error for the first target that matches nothing.
    A target is one of: a module's whole name; "all" (every linear except the head and, in families
    of the table, routers) or "all-router"; the end of a name, such as q_proj or megatron's
    linear_qkv; a glob over whole names (*.layers.[0-3].*.q_proj); a regular expression over whole
    names. Only a whole name matches outside of spec.parts, for example in a frozen vision tower.
    With target_parameters, "all" leaves experts out."""
    chosen = set()
    free = [candidate for candidate in candidates if candidate.part in spec.parts]
    known = dict.fromkeys(last_of(name) for c in free for name in (c.hf, c.mca) if name)
    reason = "it means no layer of this model"
    if frozen := dict.fromkeys(c.part for c in candidates if c.part not in spec.parts):
        reason += f" outside of what is frozen: {', '.join(f'freeze_{part}' for part in frozen)}"
    remedy = f"all, some of {', '.join(known)}, or a pattern over names such as "
    remedy += (free or candidates)[-2].hf
    for target in spec.targets:
        matches = {c.hf for c in candidates if target == c.hf}
        matches = matches or {c.hf for c in free if _is_match(target, c)}
        if target in ALL_LINEAR and spec.target_parameters:  # which names the experts' adapters
            matches = {name for name in matches if not place_of(name)}
        judge.expect(matches, "lora_target", reason, remedy, target)
        chosen |= matches
    chosen |= {c.hf for c in candidates if spec.stacks(c.hf)}
    return tuple(c.hf for c in candidates if c.hf in chosen)


def _is_match(target: str, candidate: Keys) -> bool:
    """True if one target of lora_target means a module. target: "all", "all-router", the end of a
    name, a glob pattern or a regular expression. candidate: the module, as a
    part_lora_sites.Candidate."""
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


def check_other_model(
    folder: PathLike, spec: LoraSpec, candidates: list[Any], judge: Judge
) -> None:
    """Report to `judge`, which collects configuration errors, if a saved adapter does not belong to
    this model: if some of its modules cannot have an adapter here (mostly because it was trained on
    another model), or if it has no modules at all.

    folder: the adapter's, for the message. spec: its settings, with complete module names as
    targets. candidates: this model's modules that can have an adapter, as Candidates."""
    unknown = set(spec.targets).difference(c.hf for c in candidates)
    judge.expect(
        (spec.targets or spec.target_parameters) and not unknown,
        "adapter_name_or_path lora_target",
        f"it is an adapter of another model: of its {len(spec.targets)} modules this model "
        f"lacks {len(unknown)}, such as {min(unknown, default='all')}",
        "model_name_or_path: its base",
        str(folder),
    )


def check_single_experts(spec: LoraSpec, candidates: list[Any], judge: Judge) -> None:
    """Report to `judge`, which collects configuration errors, if a projection has adapters in some
    experts of a layer and not in the others. spec: the adapters' settings. candidates: a
    part_lora_sites.Candidate for each module that can have an adapter."""

    def of_layer(module: str) -> str:
        return re.sub(r"\.experts\.\d+\.", ".experts.", module)

    chosen = set(map(of_layer, spec.modules))
    others = [c.hf for c in candidates if of_layer(c.hf) in chosen and c.hf not in spec.modules]
    judge.expect(
        not others,
        "lora_target",
        f"it means some experts of a layer and not {min(others, default='')}",
        "all experts of a layer, or none",
        list(spec.targets),
    )


def check_saved(spec: LoraSpec, weights: Iterable[Any], judge: Judge) -> None:
    """Check modules_to_save, which lists modules trained in full beside adapters. Errors go to
    `judge`, which collects them: if a module cannot be trained like that, such as a tied embedding;
    if it is in lora_target too; or if a name matches no module. weights: the model's hosts.Weights.
    """
    key = "modules_to_save"
    unused = set(spec.modules_to_save)
    for weight in weights if unused else ():
        saved = [module for module in weight.modules if is_saved(module, spec)]
        unused -= {name for name in unused if any(module.endswith(name) for module in saved)}
        if not saved:
            continue
        defects = {
            "experts are not trained whole": weight.is_expert,
            "the embedding is the head in this model: PEFT would train a copy for one of the two": (
                weight.is_tied
            ),
            f"{', '.join(weight.modules)} are one matrix: all of them or none": (
                len(saved) < len(weight.modules)
            ),
            "it is in lora_target too": not set(saved).isdisjoint(spec.modules),
            "layers for multi-token prediction stay frozen beside adapters": (
                weight.key[0].startswith(PREDICTION_LAYERS)
            ),
        }
        for reason, applies in defects.items():
            judge.expect(not applies, key, reason, f"{key} without it", saved[0])
    judge.expect(
        not unused,
        key,
        "it is the end of no module's name in this model",
        "some of embed_tokens, lm_head, or left out",
        min(unused, default=""),
    )


def check_new_rows(
    modules_to_save: Sequence[str] | None,
    num_new: int,
    ends: Sequence[str],
    is_tied: bool,
    judge: Judge,
) -> None:
    """Check that a LoRA run trains the rows of new tokens. Errors go to `judge`, which collects
    them: if modules_to_save lacks a module with a row per token, or if embedding and output layer
    are one tied matrix.

    num_new: number of new tokens. ends: how the names of the modules with a row per token end."""
    key = "modules_to_save"
    saved = list(modules_to_save or ())
    lacking = [end for end in ends if not any(m.endswith(end) for m in saved)]
    judge.expect(
        not is_tied,
        "finetuning_type",
        f"the rows of {num_new} new tokens are trained through modules_to_save, for models "
        "with a head apart from the embedding, and this model's embedding is its head",
        "finetuning_type: full, or no new tokens",
        "lora",
    )
    judge.expect(
        not lacking,
        key,
        f"the rows of {num_new} new tokens would not be trained: {', '.join(lacking)} is not in it",
        f"modules_to_save: {', '.join(ends)}",
        saved,
    )


def check_on_torch(spec: LoraSpec, linears: Iterable[str], judge: Judge) -> None:
    """Report to `judge`, which collects configuration errors, if a LoRA spec has dropout and adapts
    modules other than linears and embeddings: the torch backend has no dropout for adapters of
    experts and most routers. linears: the names of the model's linears and embeddings."""
    judge.expect(
        not spec.dropout or set(linears) >= set(spec.modules),
        "lora_dropout",
        "adapters of experts and routers have none on plain torch",
        "lora_dropout: 0, or use_mca: true",
        spec.dropout,
    )


def check_on_megatron(
    spec: LoraSpec, config: McaModelConfig, rows: Sequence[Row], candidates: list[Any], judge: Judge
) -> None:
    """Report to `judge`, which collects configuration errors, adapters that the megatron backend
    does not support with this model and parallel layout. spec: the adapters' settings. rows: the
    rows of the model's family in the table of weights. candidates: modules that can have adapters.
    """
    adapted = [c.mca for c in candidates if c.hf in set(spec.modules)]
    targets = list(spec.targets)
    groups = config.num_query_groups
    tp = config.tensor_model_parallel_size
    _check_fused(spec, config.hf_model_type, rows, judge)
    # ranks that share a query group would have unequal parts of q_proj, k_proj and v_proj
    judge.expect(
        groups % tp == 0 or not any(name.endswith("linear_qkv") for name in adapted),
        "lora_target",
        f"adapters on q_proj, k_proj or v_proj of a model with {groups} query groups are not "
        f"supported for tensor_model_parallel_size {tp}",
        f"tensor_model_parallel_size: {math.gcd(groups, tp)}, or lora_target without them",
        targets,
    )
    # gradients are summed over both copies of the weight, and not of its adapter
    is_copied = config.mtp_num_layers and config.pipeline_model_parallel_size > 1
    judge.expect(
        not is_copied or "embedding.word_embeddings" not in adapted,
        "lora_target",
        "the last pipeline stage has a copy of embed_tokens for multi-token prediction, and its "
        "adapter would be trained apart",
        "lora_target without embed_tokens, or mtp_num_layers: 0",
        targets,
    )
    # with overlap, other code does the communication of shared experts, without the adapters
    judge.expect(
        tp == 1
        or not config.moe_shared_expert_overlap
        or not any(".shared_experts." in name for name in adapted),
        "lora_target",
        "adapters on shared experts that overlap with the dispatch are not supported under tensor "
        "parallelism",
        "moe_shared_expert_overlap: false",
        targets,
    )
    judge.expect(
        not spec.dropout or not config.mlp_chunk_size,
        "lora_dropout",
        "the backward pass computes a tile of an MLP again, and would drop other inputs",
        "lora_dropout: 0, or no mlp_chunk_size",
        spec.dropout,
    )
    is_cut = (config.expert_tensor_parallel_size or 1) > 1
    judge.expect(
        not spec.dropout or not is_cut or not any(map(is_of_expert, adapted)),
        "lora_dropout",
        "ranks that share an expert's columns would drop different inputs",
        "expert_tensor_parallel_size: 1, or lora_dropout: 0",
        spec.dropout,
    )


def _check_fused(spec: LoraSpec, model_type: str | None, rows: Sequence[Row], judge: Judge) -> None:
    """Report to `judge`, which collects configuration errors, adapters on a fused module, such as
    qkv_proj, whose Hugging Face tensor contains several projections. spec: the adapters' settings.
    rows: the rows of the model's family in the table of weights."""
    # PEFT has one A and one B for a fused tensor; tensor parallelism shards each projection
    fused = {last_of(name.removesuffix(".weight")) for row in rows if row.fused for name in row.hf}
    adapted = sorted(fused.intersection(map(last_of, spec.modules)))
    judge.expect(
        not adapted,
        "lora_target",
        f"adapters on {', '.join(adapted)} of {model_type}, several projections in one tensor, are "
        "not supported",
        "lora_target: <other modules>, or use_mca: false",
        list(spec.targets),
    )


def check_mergeable(
    spec: LoraSpec, is_tied: bool, judge: Judge, key: str = "save_merged_model"
) -> None:
    """Report to `judge`, which collects configuration errors, adapters that cannot be merged into
    the weights: if embedding and head share one matrix (is_tied) and one of them has an adapter,
    merging would change both. key: the configuration key that asks for merging."""
    one_sided = [name for name in spec.modules if name.endswith(EMBEDDING_AND_HEAD)]
    judge.expect(
        not is_tied or not one_sided,
        key,
        ONE_SIDED.format(", ".join(one_sided)),
        f"take it out of lora_target, or set {key}: false",
        True,
    )
