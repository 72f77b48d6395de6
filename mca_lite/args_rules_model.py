"""The rules between arguments and a model's numbers, and pipeline layouts in megatron's syntax.

parse_args asks them with the numbers of config.json, before torch is imported; McaModelConfig asks
the same functions with its own fields. `a` are the arguments by their keys: TrainingArguments, or a
McaModelConfig, which names them alike.

A layout has its stages between |, with the embedding E, layers t and the loss L: "Et*2|t*2L".
"""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

from .errors import Judge
from .families import FAMILIES, Family, check_type

_ANY = math.inf
# numbers of a config.json, where it has them -> the least and the most that they can be
_NUMBERS: dict[str, tuple[float, float]] = {
    **dict.fromkeys("hidden_size intermediate_size num_attention_heads".split(), (1, _ANY)),
    **dict.fromkeys("num_key_value_heads head_dim vocab_size".split(), (1, _ANY)),
    **dict.fromkeys("max_position_embeddings rope_theta factor".split(), (1, _ANY)),
    "num_hidden_layers": (1, 9999),
    **dict.fromkeys("num_experts n_routed_experts num_local_experts".split(), (0, _ANY)),
    **dict.fromkeys("num_experts_per_tok moe_intermediate_size".split(), (0, _ANY)),
    **dict.fromkeys("decoder_sparse_step first_k_dense_replace".split(), (0, _ANY)),
    **dict.fromkeys("n_group topk_group n_shared_experts".split(), (0, _ANY)),
    **dict.fromkeys("kv_lora_rank q_lora_rank qk_rope_head_dim".split(), (0, _ANY)),
    **dict.fromkeys("qk_nope_head_dim v_head_dim sliding_window".split(), (0, _ANY)),
    **dict.fromkeys("rms_norm_eps initializer_range".split(), (0, _ANY)),
    "attention_dropout": (0, 1),
}
_REAL = ("rope_theta", "factor")  # which transformers takes as they come
# the parts of a config.json that hold such numbers too
_PARTS = "text_config rope_parameters rope_scaling full_attention sliding_attention".split()

TP = "tensor_model_parallel_size"
CP = "context_parallel_size"
PP = "pipeline_model_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
LAYOUT = "pipeline_model_parallel_layout"


# fields of McaModelConfig that rules read -> what config.json calls them
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


# keys that count for experts alone -> their values without effect
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
    """The fields of McaModelConfig that rules read, of a config.json or an mca_config.json. None:
    not known, and rules that need it say nothing."""
    numbers = SimpleNamespace(hf_model_type=values.get("model_type", values.get("hf_model_type")))
    for field, theirs in _IN_CONFIG_JSON.items():
        known = (values[name] for name in (field, *theirs.split()) if name in values)
        setattr(numbers, field, next((value for value in known if isinstance(value, int)), None))
    family = _family_of(numbers)
    if family is not None and numbers.qk_norm_over_heads is None:
        numbers.qk_norm_over_heads = family.constants.get("qk_norm_over_heads")
    return numbers


def _family_of(m: Any) -> Family | None:
    return FAMILIES.get(m.hf_model_type) if isinstance(m.hf_model_type, str) else None


def check_model(m: Any, a: Any, judge: Judge, te_works: bool | None = None) -> None:
    """Every rule between a model's numbers and the arguments of the layout. m: what numbers_of()
    gives, or a McaModelConfig. te_works: whether Transformer Engine works here, where it is known.
    """
    _check_tensor_parallel(m, a, judge)
    if m.num_moe_experts:
        _check_experts(m, a, judge)
    else:
        _check_no_experts(a, judge)
    if a.mtp_num_layers or a.mtp_loss_scaling_factor != 0.1:
        _check_prediction_layers(m, a, judge)
    if a.fp8:
        _check_fp8(m, a, judge)
    if m.num_layers:
        _check_layers(m.num_layers, a, judge)
    if te_works is False:
        why = "needs Transformer Engine, which does not work here"
        if "layernorm" in (a.recompute_modules or ()):
            remedy = "recompute_modules: without layernorm"
            judge.refuse("recompute_modules", f"layernorm {why}", remedy)
        if a.moe_permute_fusion:
            judge.refuse("moe_permute_fusion", f"it {why}", "moe_permute_fusion: false")


def _check_tensor_parallel(m: Any, a: Any, judge: Judge) -> None:
    tp = a.tensor_model_parallel_size
    counts = {"attention heads": m.num_attention_heads, "MLP columns": m.ffn_hidden_size}
    groups = m.num_query_groups or m.num_attention_heads
    # several ranks may share a group, as long as each has as many, and norms see one group alone
    if groups and (tp % groups or m.qk_norm_over_heads):
        counts["query groups"] = groups
    shared = {what: count for what, count in counts.items() if count}
    uneven = [f"{count} {what}" for what, count in shared.items() if count % tp]
    if uneven:
        reason = f"the model has {' and '.join(uneven)}: no multiple of {tp}"
        judge.refuse(TP, reason, f"{TP}: {math.gcd(tp, *shared.values())}")


def _check_experts(m: Any, a: Any, judge: Judge) -> None:
    key = "expert_model_parallel_size"
    ep = a.expert_model_parallel_size
    tp = a.tensor_model_parallel_size
    experts = m.num_moe_experts
    if experts % ep:
        reason = f"the model's {experts} experts cannot be shared evenly by {ep} ranks"
        judge.refuse(key, reason, f"{key}: {math.gcd(experts, ep)}")
    if tp > 1 and not a.sequence_parallel:
        reason = "experts and tensor parallelism need sequence parallelism"
        judge.refuse("sequence_parallel", reason, "sequence_parallel: true")
    columns = m.moe_ffn_hidden_size or m.ffn_hidden_size
    etp = a.expert_tensor_parallel_size or tp
    if columns and columns % etp:
        key = "expert_tensor_parallel_size"
        reason = f"an expert has {columns} columns"
        judge.refuse(key, f"{reason}: no multiple of {etp}", f"{key}: 1", etp)
    family = _family_of(m)
    key = "moe_shared_expert_overlap"
    shares = family is None or any("shared_experts" in row.mca for row in family.rows)
    if a.moe_shared_expert_overlap and not shares:
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
    key = "mtp_num_layers"
    none = "mtp_num_layers: 0"
    family = _family_of(m)
    if family is not None and not family.prediction_layers:
        having = ", ".join(name for name, family in FAMILIES.items() if family.prediction_layers)
        reason = f"{m.hf_model_type} has no layers for multi-token prediction ({having} have)"
        if not a.mtp_num_layers:
            key = "mtp_loss_scaling_factor"
            none = "mtp_loss_scaling_factor left out"
        judge.refuse(key, reason, none)
    elif not a.mtp_num_layers:
        return
    elif m.tie_embeddings_and_output_weights:
        judge.refuse(key, "it is not built for a model whose embedding is its head", none)


def _check_fp8(m: Any, a: Any, judge: Judge) -> None:
    """Transformer Engine's 8-bit products: which layers have them, and of what sizes."""
    if a.transformer_impl == "local":
        reason = "its products are Transformer Engine's, and the layers of this run are local ones"
        remedy = "transformer_impl: transformer_engine, or fp8 left out"
        judge.refuse("fp8 transformer_impl", reason, remedy)
    tp = a.tensor_model_parallel_size
    pp = a.pipeline_model_parallel_size
    heads = m.num_attention_heads
    hidden = m.hidden_size
    shared = "columns of shared experts"
    cut = {"MLP columns": m.ffn_hidden_size, shared: m.moe_shared_expert_intermediate_size}
    if heads and (channels := m.kv_channels or (hidden and hidden // heads)):
        groups = m.num_query_groups or heads
        cut["channels of all queries"] = heads * channels
        cut["channels of queries, keys and values"] = (heads + 2 * groups) * channels
    sizes = {what: size / tp for what, size in cut.items() if size}
    odd = [f"{size:g} {what}" for what, size in sizes.items() if size % 16]
    if hidden and hidden % 16:
        odd.append(f"hidden size {hidden}")
    if odd:
        reason = f"8-bit products need sizes that 16 divides, and a rank has {', '.join(odd)}"
        judge.refuse("fp8 tensor_model_parallel_size", reason, "fp8 left out")
    for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        most = (m.num_layers or 0) // pp
        if a.first_last_layers_bf16 and m.num_layers and getattr(a, key) > most:
            reason = f"a pipeline stage has {most} layers"
            judge.refuse(f"{key} {PP}", reason, f"{key}: {most}")


# ---- layers and the stages of a pipeline


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
            reason = f"it holds {sum(counts)} layers, and the model has {layers}"
            judge.refuse(LAYOUT, reason, proposal)
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
        judge.refuse(f"recompute_num_layers {PP} {VPP} {LAYOUT}", reason, "recompute_num_layers: 1")


def _refuse_stages(layers: int, a: Any, proposal: str, judge: Judge) -> None:
    pp = a.pipeline_model_parallel_size
    vpp = a.virtual_pipeline_model_parallel_size
    stages = pp * (vpp or 1)
    if layers >= stages:
        key = VPP if vpp and layers % pp == 0 else PP
        reason = f"the model's {layers} layers cannot be shared evenly by {pp} x {vpp or 1} = "
        judge.refuse(key, f"{reason}{stages} stages", proposal)
    elif vpp and layers >= pp:
        reason = "it counts chunks on each rank, not layers in a chunk: "
        reason += f"{pp} x {vpp} stages are more than {layers} layers"
        fits = [n for n in range(1, min(vpp, layers + 1)) if layers % (n * pp) == 0]
        remedy = f"{LAYOUT}: {balanced_layout(layers, pp)} instead of {VPP}"
        judge.refuse(VPP, reason, f"{VPP}: {fits[-1]}" if fits else remedy)
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


def check_numbers(values: dict[str, Any], judge: Judge) -> None:
    """The numbers of a config.json, as it was read, can be those of a model. What has another type
    is left to transformers, which knows of each model what may be a list."""
    before = len(judge.problems)
    key = "model_name_or_path"

    def refuse(name: str, expected: str) -> None:
        reason = f"expected {expected} in config.json"
        judge.refuse(key, reason, "config.json as the model's authors wrote it", values[name], name)

    if not isinstance(values.get("model_type", ""), str):
        refuse("model_type", "the name of a kind of models")
    for name, (least, most) in _NUMBERS.items():
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            if name in _REAL and value is not None:
                refuse(name, "a number")
        elif not (least <= value <= most and value < math.inf):
            refuse(name, f"a number of at least {least}" + f" and at most {most}" * (most < _ANY))
    for part in _PARTS:
        if isinstance(values.get(part), dict):
            check_numbers(values[part], judge)
    numbers = numbers_of(values)
    heads = numbers.num_attention_heads
    groups = numbers.num_query_groups
    if len(judge.problems) == before and _family_of(numbers) and heads and heads % (groups or 1):
        refuse("num_attention_heads", f"a multiple of num_key_value_heads, {groups},")


def check_config(values: dict[str, Any], a: Any, judge: Judge) -> list[str]:
    """Every rule between a config.json, as it was read, and the arguments -> lines about losses
    that it asks for, and that this run does not have."""
    check_type(values, judge, a.use_mca)
    before = len(judge.problems)
    numbers = numbers_of(values)
    check_numbers(values, judge)
    if len(judge.problems) > before:
        return []
    check_model(numbers, a, judge)
    check_gate(numbers, a, judge)
    return _unheard_wishes(values, a)


def check_gate(m: Any, a: Any, judge: Judge) -> None:
    """The gate of overlapped shared experts against the buckets of TrainingArguments. m: as in
    check_model.

    megatron waits for a bucket where a module with a weight in it runs, and overlapped shared
    experts, to which the gate belongs, run in parts.
    """
    family = _family_of(m)
    size = a.ddp_bucket_size
    is_gated = family is not None and family.constants.get("moe_shared_expert_gate")
    overlaps = is_gated and a.moe_shared_expert_overlap and a.overlap_param_gather
    if overlaps and size and m.hidden_size and size <= m.hidden_size:
        keys = "ddp_bucket_size moe_shared_expert_overlap overlap_param_gather"
        reason = f"the gate of shared experts, {m.hidden_size} parameters, would fill a bucket "
        remedy = f"ddp_bucket_size: {m.hidden_size + 1} or more, or left out"
        judge.refuse(keys, f"{reason}alone, and overlapped ones do not wait for it", remedy)


def _unheard_wishes(values: dict[str, Any], a: Any) -> list[str]:
    notes = []
    kind = values.get("model_type")
    instead = "moe_aux_loss_coeff"
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
