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
from typing import Any

from .args_values import Judge
from .model_families import FAMILIES

_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_LAYOUT = "pipeline_model_parallel_layout"


@dataclass(kw_only=True)
class ModelNumbers:
    """What rules need to know of a model. None: not known, and rules that need it say nothing."""

    num_layers: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    norm_over_heads: bool | None = None  # whether keys are normed over all query groups together
    ffn_hidden_size: int | None = None
    num_experts: int | None = None
    expert_columns: int | None = None
    has_expert_bias: bool | None = None  # whether routers have a bias that training can update
    has_prediction_layers: bool | None = None  # whether the family has them
    embedding_is_head: bool | None = None
    model_type: str | None = None
    te_works: bool | None = None  # whether Transformer Engine works here


def numbers_of(values: dict[str, Any]) -> ModelNumbers:
    """The numbers in a config.json or an mca_config.json."""

    def number(*names: str) -> int | None:
        return next((values[name] for name in names if isinstance(values.get(name), int)), None)

    kind = values.get("model_type", values.get("hf_model_type"))
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    return ModelNumbers(
        num_layers=number("num_hidden_layers", "num_layers"),
        num_attention_heads=number("num_attention_heads"),
        num_query_groups=number("num_key_value_heads", "num_query_groups"),
        norm_over_heads=None if family is None else family.constants.get("qk_norm_over_heads"),
        ffn_hidden_size=number("intermediate_size", "ffn_hidden_size"),
        num_experts=number(
            "num_moe_experts", "num_local_experts", "num_experts", "n_routed_experts"
        ),
        expert_columns=number("moe_ffn_hidden_size", "moe_intermediate_size"),
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


# ---- layers and the stages of a pipeline


def check_virtual_stages(a: Any, judge: Judge) -> None:
    """Virtual stages are those of a pipeline."""
    if a.virtual_pipeline_model_parallel_size and a.pipeline_model_parallel_size == 1:
        reason = f"virtual stages need a pipeline, and {_PP} is 1"
        judge.refuse(f"{_VPP} {_PP} {_LAYOUT}", reason, f"{_PP}: 2, or {_VPP} left out")


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


# ---- sliding windows


def check_window(length: int, window: int | None, transformer_impl: str, judge: Judge) -> None:
    """Rows of `length` tokens against a model's sliding window, which local layers alone have."""
    if window is not None and transformer_impl != "local" and length > window:
        reason = f"it is longer than the model's sliding window of {window} tokens, which is not "
        reason += "built on Transformer Engine"
        remedy = f"transformer_impl: local, or cutoff_len: {window}"
        judge.refuse("cutoff_len", reason, remedy, length)


def check_torch_packing(hf_config: Any, judge: Judge) -> None:
    """The mask of packed rows would replace that of a sliding window on plain torch. hf_config:
    transformers'."""
    config = hf_config.get_text_config()
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is not None and "sliding_attention" in layers:
        reason = f"{config.model_type} has a sliding window of {window} tokens, which the mask of "
        reason += "packed rows would replace"
        judge.refuse("sequence_packing", reason, "packing: false", True, "packing")
