"""Rules between arguments and a model's numbers, and pipeline layouts in megatron's syntax.

parse_args applies them to the numbers of config.json, before torch is imported, and McaModelConfig
to its fields. `a` are the arguments: TrainingArguments, or a McaModelConfig with fields of the same
names.

A layout has its stages between |, with the embedding E, layers t and the loss L: "Et*2|t*2L".
"""

from __future__ import annotations

import math
import re
import sys
from types import SimpleNamespace
from typing import Any

from .errors import Judge, Rule
from .families import FAMILIES, Family, check_type

# numbers of a config.json by the least that they can be
_NUMBERS = {
    1: "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size "
    "max_position_embeddings rope_theta factor num_hidden_layers",
    0: "num_experts n_routed_experts num_local_experts num_experts_per_tok moe_intermediate_size "
    "decoder_sparse_step first_k_dense_replace n_group topk_group n_shared_experts kv_lora_rank "
    "q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim sliding_window rms_norm_eps "
    "initializer_range attention_dropout",
}
_AT_MOST = {"num_hidden_layers": 9999, "attention_dropout": 1}
_REAL = ("rope_theta", "factor")  # transformers does not check their types
# parts of a config.json with such numbers
_PARTS = "text_config rope_parameters rope_scaling full_attention sliding_attention".split()

TP = "tensor_model_parallel_size"
CP = "context_parallel_size"
PP = "pipeline_model_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
LAYOUT = "pipeline_model_parallel_layout"

# fields of McaModelConfig -> their names in config.json
_IN_CONFIG_JSON = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "",
    "kv_channels": "head_dim",
    "num_attention_heads": "",
    "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "num_moe_experts": "num_local_experts num_experts n_routed_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "",
    "moe_router_enable_expert_bias": "",
    "tie_embeddings_and_output_weights": "tie_word_embeddings",
    "qk_norm_over_heads": "",
}

# keys for experts -> their values without effect
_OF_EXPERTS: dict[str, tuple] = {
    "expert_model_parallel_size": (1,),
    "moe_aux_loss_coeff": (0, None),
    "moe_z_loss_coeff": (0, None),
    "moe_router_bias_update_rate": (0,),
    "moe_router_load_balancing_type": ("aux_loss", "none"),
    "moe_router_dtype": ("fp32", None),
    "moe_grouped_gemm": (True,),
    "moe_token_dispatcher_type": ("alltoall",),
    "moe_shared_expert_overlap": (False,),
    "moe_permute_fusion": (False,),
}


def numbers_of(values: dict[str, Any]) -> SimpleNamespace:
    """The fields of McaModelConfig for rules, from a config.json or an mca_config.json. None: not
    known, and no rule about it applies."""
    numbers = SimpleNamespace(hf_model_type=values.get("model_type", values.get("hf_model_type")))
    for field, names in _IN_CONFIG_JSON.items():
        known = (values[name] for name in (field, *names.split()) if name in values)
        setattr(numbers, field, next((value for value in known if isinstance(value, int)), None))
    family = _family_of(numbers)
    if family is not None and numbers.qk_norm_over_heads is None:
        numbers.qk_norm_over_heads = family.constants.get("qk_norm_over_heads")
    return numbers


def _family_of(m: Any) -> Family | None:
    return FAMILIES.get(m.hf_model_type) if isinstance(m.hf_model_type, str) else None


_FP8 = (
    Rule(
        "fp8 transformer_impl=local",
        "its products are Transformer Engine's, and the layers of this run are local ones",
        "transformer_impl: transformer_engine, or fp8 left out",
    ),
)
_WITHOUT_TE = (
    Rule(
        "recompute_modules=layernorm",
        "layernorm needs Transformer Engine, which does not work here",
        "recompute_modules: without layernorm",
    ),
    Rule(
        "moe_permute_fusion",
        "it needs Transformer Engine, which does not work here",
        "moe_permute_fusion: false",
    ),
)


def check_model(m: Any, a: Any, judge: Judge, te_works: bool | None = None) -> None:
    """Apply every rule between a model's numbers and the arguments of the layout.

    m: numbers_of(), or a McaModelConfig. te_works: True if Transformer Engine works here, None if
    that is not known.
    """
    judge.apply(_FP8)
    _check_tensor_parallel(m, a, judge)
    if m.num_moe_experts:
        _check_experts(m, a, judge)
    else:
        _check_no_experts(a, judge)
    _check_prediction_layers(m, a, judge)
    if a.fp8:
        _check_fp8(m, a, judge)
    if m.num_layers:
        _check_layers(m.num_layers, a, judge)
    if te_works is False:
        judge.apply(_WITHOUT_TE)


def _check_tensor_parallel(m: Any, a: Any, judge: Judge) -> None:
    tp = a.tensor_model_parallel_size
    counts = {"attention heads": m.num_attention_heads, "MLP columns": m.ffn_hidden_size}
    groups = m.num_query_groups or m.num_attention_heads
    # several ranks may share a group, the same number for each; a norm over heads needs them apart
    if groups and (tp % groups or m.qk_norm_over_heads):
        counts["query groups"] = groups
    known = {name: count for name, count in counts.items() if count}
    uneven = [f"{count} {name}" for name, count in known.items() if count % tp]
    if uneven:
        reason = f"the model has {' and '.join(uneven)}: no multiple of {tp}"
        judge.refuse(TP, reason, f"{TP}: {math.gcd(tp, *known.values())}")


def _check_experts(m: Any, a: Any, judge: Judge) -> None:
    ep = a.expert_model_parallel_size
    tp = a.tensor_model_parallel_size
    experts = m.num_moe_experts
    if experts % ep:
        key = "expert_model_parallel_size"
        reason = f"the model's {experts} experts cannot be shared evenly by {ep} ranks"
        judge.refuse(key, reason, f"{key}: {math.gcd(experts, ep)}")
    if tp > 1 and not a.sequence_parallel:
        reason = "experts and tensor parallelism need sequence parallelism"
        judge.refuse("sequence_parallel", reason, "sequence_parallel: true")
    columns = m.moe_ffn_hidden_size or m.ffn_hidden_size or 0
    etp = a.expert_tensor_parallel_size or tp
    if columns % etp:
        key = "expert_tensor_parallel_size"
        reason = f"an expert has {columns} columns: no multiple of {etp}"
        judge.refuse(key, reason, f"{key}: 1", etp)
    family = _family_of(m)
    if a.moe_shared_expert_overlap and family is not None:
        key = "moe_shared_expert_overlap"
        if not any("shared_experts" in row.mca for row in family.rows):
            judge.refuse(key, f"{m.hf_model_type} has no shared experts", f"{key} left out")
    if m.moe_router_enable_expert_bias is False and a.moe_router_bias_update_rate:
        key = "moe_router_bias_update_rate"
        reason = "the routers of this model have no bias to update"
        judge.refuse(key, reason, f"{key}: 0, and moe_aux_loss_coeff evens out the loads")


def _check_no_experts(a: Any, judge: Judge) -> None:
    for key, plain in _OF_EXPERTS.items():
        if getattr(a, key) not in plain:
            judge.refuse(key, "the model has no experts", f"{key} left out")


def _check_prediction_layers(m: Any, a: Any, judge: Judge) -> None:
    family = _family_of(m)
    if family is not None and not family.prediction_layers:
        names = ", ".join(name for name, other in FAMILIES.items() if other.prediction_layers)
        reason = f"{m.hf_model_type} has no layers for multi-token prediction ({names} have)"
        if a.mtp_num_layers:
            judge.refuse("mtp_num_layers", reason, "mtp_num_layers: 0")
        if a.mtp_loss_scaling_factor != 0.1:
            key = "mtp_loss_scaling_factor"
            judge.refuse(f"{key} mtp_num_layers", reason, f"{key} left out")
    elif a.mtp_num_layers and m.tie_embeddings_and_output_weights:
        reason = "it is not supported for a model whose embedding is its head"
        judge.refuse("mtp_num_layers", reason, "mtp_num_layers: 0")


def _check_fp8(m: Any, a: Any, judge: Judge) -> None:
    # Transformer Engine's 8-bit products need sizes that 16 divides
    tp = a.tensor_model_parallel_size
    pp = a.pipeline_model_parallel_size
    heads = m.num_attention_heads
    hidden = m.hidden_size
    cut = {
        "MLP columns": m.ffn_hidden_size,
        "columns of shared experts": m.moe_shared_expert_intermediate_size,
    }
    if heads:
        channels = m.kv_channels or (hidden or 0) // heads
        groups = m.num_query_groups or heads
        cut["channels of all queries"] = heads * channels
        cut["channels of queries, keys and values"] = (heads + 2 * groups) * channels
    sizes = {name: (size or 0) / tp for name, size in cut.items()}
    odd = [f"{size:g} {name}" for name, size in sizes.items() if size % 16]
    if hidden and hidden % 16:
        odd.append(f"hidden size {hidden}")
    if odd:
        reason = f"8-bit products need sizes that 16 divides, and a rank has {', '.join(odd)}"
        judge.refuse("fp8 tensor_model_parallel_size", reason, "fp8 left out")
    if not a.first_last_layers_bf16 or not m.num_layers:
        return
    most = m.num_layers // pp
    for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if getattr(a, key) > most:
            reason = f"a pipeline stage has {most} layers"
            judge.refuse(f"{key} {PP}", reason, f"{key}: {most}")


# -- layers and the stages of a pipeline


def _check_layers(layers: int, a: Any, judge: Judge) -> None:
    pp = a.pipeline_model_parallel_size
    vpp = a.virtual_pipeline_model_parallel_size
    layout = a.pipeline_model_parallel_layout
    stages = pp * (vpp or 1)
    proposal = f"{LAYOUT}: <a layout of {layers} layers>"
    if layers >= stages:
        proposal = f"{LAYOUT}: {balanced_layout(layers, pp, vpp)}"
    if isinstance(layout, str):
        counts = [stage.count("t") for stage in layout_stages(layout)]
        if sum(counts) != layers:
            reason = f"it has {sum(counts)} layers, and the model has {layers}"
            judge.refuse(LAYOUT, reason, proposal)
    elif layout is not None:  # a list, or an object of megatron-core
        return
    elif layers % stages == 0:
        counts = [layers // stages]
    else:
        _refuse_stages(layers, a, proposal, judge)
        return
    if a.recompute_method != "uniform":
        return
    uneven = [count for count in counts if count % (a.recompute_num_layers or 1)]
    if uneven:  # megatron-core would read layers after the last one
        reason = f"it does not divide the {uneven[0]} layers of a pipeline stage"
        judge.refuse(f"recompute_num_layers {PP} {VPP} {LAYOUT}", reason, "recompute_num_layers: 1")


def _refuse_stages(layers: int, a: Any, proposal: str, judge: Judge) -> None:
    pp = a.pipeline_model_parallel_size
    vpp = a.virtual_pipeline_model_parallel_size
    stages = pp * (vpp or 1)
    if layers >= stages:
        key = VPP if vpp and layers % pp == 0 else PP
        judge.refuse(
            key,
            f"the model's {layers} layers cannot be shared evenly by {pp} x {vpp or 1} = {stages} "
            "stages",
            proposal,
        )
    elif vpp and layers >= pp:
        fits = [n for n in range(1, min(vpp, layers + 1)) if layers % (n * pp) == 0]
        remedies = [f"{LAYOUT}: {balanced_layout(layers, pp)} instead of {VPP}"]
        judge.refuse(
            VPP,
            "it counts chunks on each rank, not layers in a chunk: "
            f"{pp} x {vpp} stages are more than {layers} layers",
            [*remedies, *(f"{VPP}: {n}" for n in fits)][-1],
        )
    else:
        reason = f"there are more stages than the model's {layers} layers"
        judge.refuse(PP, reason, f"{PP}: {layers}")


def layout_stages(layout: str) -> list[str]:
    """The stages of a layout with its repeats written out: "Et*2|tL" -> ["Ett", "tL"]."""
    text = layout.replace(",", "")
    # groups before single letters, as in megatron-core
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), text)
    return text.split("|")


def check_layout(layout: str) -> None:
    """Raise ValueError for a layout that works for no model and no pipeline size."""
    if re.search(r"\*\d{4}", layout):
        raise ValueError(
            "it repeats something more than 999 times, and no model has so many layers"
        )
    letters = "".join(layout_stages(layout.replace(" ", "")))
    unknown = "".join(sorted(set(letters) - set("EtL")))
    if unknown:
        raise ValueError(f"unknown letters {unknown!r}: E is the embedding, t a layer, L the loss")
    if not re.fullmatch("Et*L", letters):
        raise ValueError("it must begin with the embedding E and end with the loss L, once each")


def balanced_layout(num_layers: int, pp: int, vpp: int | None = None) -> str:
    """A layout of all layers in pp x vpp stages; stage s is on rank s % pp.

    Stages differ by one layer at most, ranks too; the stages of the embedding and the loss get the
    additional layers last. Raises ValueError for fewer layers than stages.
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


# -- config.json


def check_numbers(values: dict[str, Any], judge: Judge) -> None:
    """Check the numbers of a raw config.json. transformers checks their types: of some models they
    may be lists."""
    before = len(judge.problems)

    def refuse(name: str, expected: str) -> None:
        judge.refuse(
            "model_name_or_path",
            f"expected {expected} in config.json",
            "config.json as the model's authors wrote it",
            values[name],
            name,
        )

    if not isinstance(values.get("model_type", ""), str):
        refuse("model_type", "the name of a model type")
    least_of = {name: least for least, names in _NUMBERS.items() for name in names.split()}
    for name, least in least_of.items():
        value = values.get(name)
        most = _AT_MOST.get(name, sys.float_info.max)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not least <= value <= most:
                limit = f" and at most {most}" * (name in _AT_MOST)
                refuse(name, f"a number of at least {least}{limit}")
        elif name in _REAL and value is not None:
            refuse(name, "a number")
    for part in _PARTS:
        if isinstance(values.get(part), dict):
            check_numbers(values[part], judge)
    numbers = numbers_of(values)
    heads = numbers.num_attention_heads or 0
    groups = numbers.num_query_groups or 1
    if len(judge.problems) == before and _family_of(numbers) and heads % groups:
        refuse("num_attention_heads", f"a multiple of num_key_value_heads, {groups},")


def check_config(values: dict[str, Any], a: Any, judge: Judge) -> list[str]:
    """Apply every rule between a raw config.json and the arguments -> notes about losses in
    config.json without effect on this run."""
    check_type(values, judge, a.use_mca)
    before = len(judge.problems)
    numbers = numbers_of(values)
    check_numbers(values, judge)
    if len(judge.problems) > before:
        return []
    check_model(numbers, a, judge)
    check_gate(numbers, a, judge)
    return _unused_losses(values, a)


def check_gate(m: Any, a: Any, judge: Judge) -> None:
    """Check the gate of overlapped shared experts against the buckets of TrainingArguments. m: as
    in check_model.

    megatron waits for a bucket before a module with a weight in it runs, and overlapped shared
    experts, with the gate, run in parts.
    """
    family = _family_of(m)
    is_gated = family is not None and family.constants.get("moe_shared_expert_gate")
    fills_bucket = (a.ddp_bucket_size or math.inf) <= (m.hidden_size or 0)
    if is_gated and fills_bucket and a.moe_shared_expert_overlap and a.overlap_param_gather:
        judge.refuse(
            "ddp_bucket_size moe_shared_expert_overlap overlap_param_gather",
            f"the gate of shared experts, {m.hidden_size} parameters, would fill a bucket alone, "
            "and overlapped ones do not wait for it",
            f"ddp_bucket_size: {m.hidden_size + 1} or more, or left out",
        )


def _unused_losses(values: dict[str, Any], a: Any) -> list[str]:
    key = "moe_aux_loss_coeff"
    notes = []
    if values.get("output_router_logits"):
        notes.append(f"output_router_logits in config.json has no effect: {key} decides")
    unread = ["aux_loss_alpha"]  # of DeepSeek's code; transformers ignores it
    if values.get("model_type") not in FAMILIES:
        unread.append("router_aux_loss_coef")
    for name in unread:
        value = values.get(name)
        if value and a.moe_aux_loss_coeff is None:
            notes.append(f"{name} in config.json has no effect: {key}: {value} would have")
    return notes


# -- limits of plain torch


def check_torch_experts(hf_config: Any, judge: Judge) -> None:
    """Refuse num_experts_per_tok: null, which transformers cannot run. hf_config:
    transformers'."""
    config = hf_config.get_text_config()
    has_experts = getattr(config, "first_k_dense_replace", 0) < config.num_hidden_layers
    if has_experts and getattr(config, "num_experts_per_tok", 1) is None:
        judge.refuse(
            "use_mca",
            "config.json has num_experts_per_tok: null, and transformers needs a number",
            "use_mca: true, or num_experts_per_tok: <a number> in config.json",
            False,
        )


def check_torch_packing(hf_config: Any, judge: Judge) -> None:
    """Refuse packed rows for a sliding window: their mask would replace the window's. hf_config:
    transformers'."""
    config = hf_config.get_text_config()
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is not None and "sliding_attention" in layers:
        judge.refuse(
            "sequence_packing",
            f"{config.model_type} has a sliding window of {window} tokens, and the mask of packed "
            "rows would replace it",
            "packing: false",
            True,
            "packing",
        )
