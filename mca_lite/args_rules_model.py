"""The rules between arguments and a model's numbers, and pipeline layouts in megatron's syntax.

parse_args asks them with the numbers of config.json, before torch is imported; McaModelConfig asks
the same functions with its own fields. `a` are the arguments by their keys: TrainingArguments, or a
McaModelConfig, which names them alike.

A layout has its stages between |, with the embedding E, layers t and the loss L: "Et*2|t*2L".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .args_values import Judge
from .constants import ADAPTER_CONFIG_NAME, HF_CONFIG_NAME, MCA_CONFIG_NAME
from .files import read_json, why_mcore_adapters, why_no_model
from .model_families import FAMILIES, get_family

_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_LAYOUT = "pipeline_model_parallel_layout"


@dataclass(kw_only=True)
class ModelNumbers:
    """What rules need to know of a model. None: not known, and rules that need it say nothing."""

    num_layers: int | None = None
    hidden_size: int | None = None
    head_channels: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    norm_over_heads: bool | None = None  # whether keys are normed over all query groups together
    ffn_hidden_size: int | None = None
    num_experts: int | None = None
    expert_columns: int | None = None
    shared_columns: int | None = None  # of the shared experts together
    has_expert_bias: bool | None = None  # whether routers have a bias that training can update
    has_prediction_layers: bool | None = None  # whether the family has them
    embedding_is_head: bool | None = None
    model_type: str | None = None
    te_works: bool | None = None  # whether Transformer Engine works here


def numbers_of(values: dict[str, Any]) -> ModelNumbers:
    """The numbers in a config.json, an mca_config.json or the fields of a McaModelConfig."""

    def number(*names: str) -> int | None:
        return next((values[name] for name in names if isinstance(values.get(name), int)), None)

    kind = values.get("model_type", values.get("hf_model_type"))
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    of_family = {} if family is None else family.constants
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    return ModelNumbers(
        num_layers=number("num_hidden_layers", "num_layers"),
        hidden_size=hidden,
        head_channels=number("head_dim", "kv_channels") or (hidden and heads and hidden // heads),
        num_attention_heads=heads,
        num_query_groups=number("num_key_value_heads", "num_query_groups"),
        norm_over_heads=values.get("qk_norm_over_heads", of_family.get("qk_norm_over_heads")),
        ffn_hidden_size=number("intermediate_size", "ffn_hidden_size"),
        num_experts=number(
            "num_moe_experts", "num_local_experts", "num_experts", "n_routed_experts"
        ),
        expert_columns=number("moe_ffn_hidden_size", "moe_intermediate_size"),
        shared_columns=number("moe_shared_expert_intermediate_size"),
        has_prediction_layers=None if family is None else family.prediction_layers,
        embedding_is_head=values.get(
            "tie_word_embeddings", values.get("tie_embeddings_and_output_weights")
        ),
        model_type=kind,
    )


def check_model(m: ModelNumbers, a: Any, judge: Judge) -> None:
    """Every rule between a model's numbers and the arguments of the layout."""
    _check_tensor_parallel(m, a, judge)
    if m.num_experts:
        _check_experts(m, a, judge)
    else:
        _check_no_experts(a, judge)
    if a.mtp_num_layers:
        _check_prediction_layers(m, judge)
    if a.fp8:
        _check_fp8(m, a, judge)
    if m.num_layers:
        _check_layers(m.num_layers, a, judge)
    if m.te_works is False and "layernorm" in (a.recompute_modules or ()):
        reason = "layernorm needs Transformer Engine, which does not work here"
        judge.refuse("recompute_modules", reason, "recompute_modules: without layernorm")
    if m.te_works is False and a.moe_permute_fusion:
        reason = "it needs Transformer Engine, which does not work here"
        judge.refuse("moe_permute_fusion", reason, "moe_permute_fusion: false")


def _check_tensor_parallel(m: ModelNumbers, a: Any, judge: Judge) -> None:
    key, tp = "tensor_model_parallel_size", a.tensor_model_parallel_size
    counts = {"attention heads": m.num_attention_heads, "MLP columns": m.ffn_hidden_size}
    groups = m.num_query_groups or m.num_attention_heads
    # several ranks may share a group, as long as each has as many, and norms see one group alone
    if groups and (tp % groups or m.norm_over_heads):
        counts["query groups"] = groups
    shared = {what: count for what, count in counts.items() if count}
    uneven = [f"{count} {what}" for what, count in shared.items() if count % tp]
    if uneven:
        best = math.gcd(tp, *shared.values())
        reason = f"the model has {' and '.join(uneven)}: no multiple of {tp}"
        judge.refuse(key, reason, f"{key}: {best}")


def _check_experts(m: ModelNumbers, a: Any, judge: Judge) -> None:
    key, ep = "expert_model_parallel_size", a.expert_model_parallel_size
    tp = a.tensor_model_parallel_size
    experts = m.num_experts or 0
    if experts % ep:
        reason = f"the model's {experts} experts cannot be shared evenly by {ep} ranks"
        judge.refuse(key, reason, f"{key}: {math.gcd(experts, ep)}")
    if tp > 1 and not a.sequence_parallel:
        reason = "experts and tensor parallelism need sequence parallelism"
        judge.refuse("sequence_parallel", reason, "sequence_parallel: true")
    columns, etp = m.expert_columns or m.ffn_hidden_size, a.expert_tensor_parallel_size or tp
    if columns and columns % etp:
        key, reason = "expert_tensor_parallel_size", f"an expert has {columns} columns"
        judge.refuse(key, f"{reason}: no multiple of {etp}", f"{key}: 1", etp)
    if m.has_expert_bias is False and a.moe_router_bias_update_rate:
        key = "moe_router_bias_update_rate"
        reason = "the routers of this model have no bias to update"
        judge.refuse(key, reason, f"{key}: 0, and moe_aux_loss_coeff evens out the loads")


def _check_no_experts(a: Any, judge: Judge) -> None:
    keys = "moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate".split()
    given = [key for key in keys if getattr(a, key)]
    if a.expert_model_parallel_size > 1:
        given.append("expert_model_parallel_size")
    for key in given:
        judge.refuse(key, "the model has no experts", f"{key} left out")


def _check_prediction_layers(m: ModelNumbers, judge: Judge) -> None:
    key, none = "mtp_num_layers", "mtp_num_layers: 0"
    if m.has_prediction_layers is False:
        having = ", ".join(name for name, family in FAMILIES.items() if family.prediction_layers)
        reason = f"{m.model_type} has no layers for multi-token prediction ({having} have)"
        judge.refuse(key, reason, none)
    elif m.embedding_is_head:
        judge.refuse(key, "it is not built for a model whose embedding is its head", none)


def _check_fp8(m: ModelNumbers, a: Any, judge: Judge) -> None:
    """Transformer Engine's 8-bit products: which layers have them, and of what sizes."""
    if a.transformer_impl == "local":
        reason = "its products are Transformer Engine's, and the layers of this run are local ones"
        remedy = "transformer_impl: transformer_engine, or fp8 left out"
        judge.refuse("fp8 transformer_impl", reason, remedy)
    tp, pp = a.tensor_model_parallel_size, a.pipeline_model_parallel_size
    cut = {"MLP columns": m.ffn_hidden_size, "columns of shared experts": m.shared_columns}
    if m.num_attention_heads and m.head_channels:
        groups = m.num_query_groups or m.num_attention_heads
        cut["channels of all queries"] = m.num_attention_heads * m.head_channels
        cut["channels of queries, keys and values"] = (
            m.num_attention_heads + 2 * groups
        ) * m.head_channels
    sizes = {what: size / tp for what, size in cut.items() if size}
    odd = [f"{size:g} {what}" for what, size in sizes.items() if size % 16]
    if m.hidden_size and m.hidden_size % 16:
        odd.append(f"hidden size {m.hidden_size}")
    if odd:
        reason = f"8-bit products need sizes that 16 divides, and a rank has {', '.join(odd)}"
        judge.refuse("fp8 tensor_model_parallel_size", reason, "fp8 left out")
    for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        most = (m.num_layers or 0) // pp
        if a.first_last_layers_bf16 and m.num_layers and getattr(a, key) > most:
            reason = f"a pipeline stage has {most} layers"
            judge.refuse(f"{key} {_PP}", reason, f"{key}: {most}")


# ---- layers and the stages of a pipeline


def _check_layers(layers: int, a: Any, judge: Judge) -> None:
    pp, vpp = a.pipeline_model_parallel_size, a.virtual_pipeline_model_parallel_size
    layout, stages = a.pipeline_model_parallel_layout, pp * (vpp or 1)
    proposal = f"{_LAYOUT}: <a layout of {layers} layers>"
    if layers >= stages:
        proposal = f"{_LAYOUT}: {balanced_layout(layers, pp, vpp)}"
    if isinstance(layout, str):
        counts = [stage.count("t") for stage in layout_stages(layout)]
        if sum(counts) != layers:
            reason = f"it holds {sum(counts)} layers, and the model has {layers}"
            judge.refuse(_LAYOUT, reason, proposal)
    elif layout is not None:  # a list, or what megatron-core made of it
        return
    elif layers % stages == 0:
        counts = [layers // stages]
    else:
        _refuse_stages(layers, a, proposal, judge)
        return
    unit = a.recompute_num_layers if a.recompute_method == "uniform" else None
    uneven = [count for count in counts if unit and count % unit]
    if uneven:  # megatron-core would look for layers after the last one
        reason = f"it does not divide the {uneven[0]} layers of a pipeline stage"
        judge.refuse(
            f"recompute_num_layers {_PP} {_VPP} {_LAYOUT}", reason, "recompute_num_layers: 1"
        )


def _refuse_stages(layers: int, a: Any, proposal: str, judge: Judge) -> None:
    pp, vpp = a.pipeline_model_parallel_size, a.virtual_pipeline_model_parallel_size
    stages = pp * (vpp or 1)
    if layers >= stages:
        key = _VPP if vpp and layers % pp == 0 else _PP
        reason = f"the model's {layers} layers cannot be shared evenly by {pp} x {vpp or 1} = "
        judge.refuse(key, f"{reason}{stages} stages", proposal)
    elif vpp and layers >= pp:
        reason = "it counts chunks on each rank, not layers in a chunk: "
        reason += f"{pp} x {vpp} stages are more than {layers} layers"
        fits = [n for n in range(1, min(vpp, layers + 1)) if layers % (n * pp) == 0]
        remedy = f"{_LAYOUT}: {balanced_layout(layers, pp)} instead of {_VPP}"
        judge.refuse(_VPP, reason, f"{_VPP}: {fits[-1]}" if fits else remedy)
    else:
        reason = f"there are more stages than the model's {layers} layers"
        judge.refuse(_PP, reason, f"{_PP}: {layers}")


def layout_stages(layout: str) -> list[str]:
    """The stages of a layout with its repeats written out: "Et*2|tL" -> ["Ett", "tL"]."""
    text = layout.replace(",", "")
    # groups before single letters, as in megatron-core
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), text)
    return text.split("|")


def layout_defect(layout: str, pp: int) -> str | None:
    """Why a layout does not work for pp pipeline ranks, whatever the model; None where it does."""
    if re.search(r"\*\d{4}", layout):
        return "it repeats something more than 999 times, and no model has so many layers"
    stages = layout_stages(layout)
    letters = "".join(stages)
    if unknown := set(letters) - set("EtL"):
        names = "E is the embedding, t a layer, L the loss"
        return f"unknown letters {''.join(sorted(unknown))!r}: {names}"
    once = letters.count("E") == letters.count("L") == 1
    if not once or not letters.startswith("E") or not letters.endswith("L"):
        return "it must begin with the embedding E and end with the loss L, once each"
    if len(stages) % pp != 0:
        return f"its {len(stages)} stages cannot be shared evenly by {pp} pipeline ranks"
    return None


def balanced_layout(num_layers: int, pp: int, vpp: int | None = None) -> str:
    """A layout of pp x vpp stages that holds every layer; stage s lies on rank s % pp.

    Stages differ by one layer at most, ranks too; those of the embedding and the loss are the last
    to get one more. Raises ValueError where there are fewer layers than stages.
    """
    stages = pp * (vpp or 1)
    if num_layers < stages:
        raise ValueError(
            f"{num_layers} layers cannot fill {stages} stages: set pipeline sizes whose product "
            "is at most that"
        )
    counts = [num_layers // stages] * stages
    extra_on_rank = [0] * pp
    free = list(range(stages))

    def cost(stage: int) -> tuple:
        rank = stage % pp
        ends = (rank == pp - 1, rank == 0, stage == stages - 1, stage == 0)
        return (extra_on_rank[rank], *ends, stage)

    for _ in range(num_layers % stages):
        best = min(free, key=cost)
        free.remove(best)
        counts[best] += 1
        extra_on_rank[best % pp] += 1
    texts = ["t" if count == 1 else f"t*{count}" for count in counts]
    return "E" + "|".join(texts) + "L"


# ---- config.json


def read_model_config(
    name: str,
    judge: Judge,
    *,
    revision: str | None = None,
    own_weights: bool = True,
    files: tuple[str, ...] = (HF_CONFIG_NAME, MCA_CONFIG_NAME),
) -> dict[str, Any]:
    """What the first of `files` that there is in a model's folder holds, or the config.json of a
    model of the hub; {} where that is refused. own_weights: its weights are read later."""
    folder, key = Path(name), "model_name_or_path"
    held = [folder / file for file in files if (folder / file).is_file()]
    remedy = f"a folder with {HF_CONFIG_NAME}, or a model of the hub"
    if (folder / ADAPTER_CONFIG_NAME).is_file() and not (folder / HF_CONFIG_NAME).is_file():
        reason = "it holds adapters, without the model that they belong to"
        judge.refuse(key, reason, f"that model, and adapter_name_or_path: {name}", name)
    elif own_weights and (other := why_mcore_adapters(folder)):
        judge.refuse(key, *other, name)
    elif folder.is_dir() and not held:
        judge.refuse(key, f"there is no {HF_CONFIG_NAME} in this folder", remedy, name)
    elif not held and (missing := why_no_model(name)):
        judge.refuse(key, missing, remedy, name)
    else:
        try:
            if not held:
                # seconds to import
                from transformers.utils import cached_file

                held = [Path(cached_file(name, HF_CONFIG_NAME, revision=revision))]
            return read_json(held[0])
        except ImportError:
            raise
        except Exception as error:  # whatever a hub, a network or a file comes up with
            lines = str(error).strip().splitlines() or [repr(error)]
            reason = f"its {HF_CONFIG_NAME} cannot be read: {lines[0]}"
            judge.refuse(key, reason, remedy, name)
    return {}


def check_config(values: dict[str, Any], a: Any, judge: Judge) -> list[str]:
    """Every rule between a config.json, as it was read, and the arguments -> lines about losses
    that it asks for, and that this run does not have."""
    check_model(numbers_of(values), a, judge)
    return _unheard_wishes(values, a)


# rope scalings whose frequencies do not depend on the length of the sequence
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_hf_config(hf: Any, origin: str, ropes: list[dict[str, Any]], judge: Judge) -> None:
    """What a family cannot honour of a config.json. hf: transformers' config of a family in the
    table; ropes: its model_rope.rope_parameters."""
    family, instead = get_family(hf.model_type), "use_mca: false, to train it as plain torch"

    def refuse(key: str, value: Any, reason: str) -> None:
        name, reason = f"{key} in config.json of {origin}", f"it cannot be honoured: {reason}"
        judge.refuse("model_name_or_path", reason, instead, value, name)

    for key, honoured, why in family.refusals:
        if (value := getattr(hf, key, None)) not in honoured:
            refuse(key, value, why)
    if getattr(hf, "quantization_config", None):
        refuse("quantization_config", None, "save the model in bf16 or fp32 first")
    for rope in ropes:
        if (kind := rope["rope_type"]) not in ROPE_TYPES:
            refuse("rope_type", kind, f"expected one of {', '.join(ROPE_TYPES)}")
        # default rope in the other models of transformers passes it over, and the scaled ones
        # cannot run with it
        if (part := rope.get("partial_rotary_factor") or 1.0) != 1.0 and not family.partial_rotary:
            refuse("partial_rotary_factor", part, "expected 1.0 or none")


def _unheard_wishes(values: dict[str, Any], a: Any) -> list[str]:
    notes, kind, instead = [], values.get("model_type"), "moe_aux_loss_coeff"
    if values.get("output_router_logits"):
        notes.append(f"output_router_logits in config.json has no effect: {instead} decides")
    unread = ["aux_loss_alpha"]  # of DeepSeek's own code; transformers passes it over
    if kind not in FAMILIES:
        unread.append("router_aux_loss_coef")
    for name in unread:
        if (value := values.get(name)) and a.moe_aux_loss_coeff is None:
            notes.append(f"{name} in config.json has no effect: {instead}: {value} would have")
    return notes


# ---- what plain torch cannot run


def check_torch_experts(hf_config: Any, judge: Judge) -> None:
    """transformers needs the number of experts of a token, which the table of families knows for
    megatron-core. hf_config: transformers'."""
    config = hf_config.get_text_config()
    has_experts = getattr(config, "first_k_dense_replace", 0) < config.num_hidden_layers
    if has_experts and getattr(config, "num_experts_per_tok", 1) is None:
        reason = "config.json has num_experts_per_tok: null, which transformers cannot run"
        remedy = "use_mca: true, or num_experts_per_tok: <a number> in config.json"
        judge.refuse("use_mca", reason, remedy, False)


# ---- sliding windows


def check_torch_packing(hf_config: Any, judge: Judge) -> None:
    """Packed rows' mask would replace that of a sliding window. hf_config: transformers'."""
    config = hf_config.get_text_config()
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is not None and "sliding_attention" in layers:
        reason = f"{config.model_type} has a sliding window of {window} tokens, which the mask of "
        reason += "packed rows would replace"
        judge.refuse("sequence_packing", reason, "packing: false", True, "packing")
