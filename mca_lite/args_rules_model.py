"""Rules between a model's sizes and the parallel layout, and pipeline layouts in megatron's syntax.

parse_args applies check_config to the values of config.json, McaModelConfig check_model to its
fields. `m` has the model's sizes as attributes, under the names of McaModelConfig's fields, and `a`
has the keys: RunArguments, TrainingArguments or the same McaModelConfig.

A layout separates stages by |, with E for the embedding, t for a layer and L for the loss:
"Et*2|t*2L".
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .errors import Judge, Keys, Rule
from .families import FAMILIES, check_type
from .families_rows import Family
from .parts import absent_rows, module_of, need_of

# (smallest, largest) value -> the fields of config.json with these limits
_COUNTS = {
    (1, 10**15): "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
    "vocab_size max_position_embeddings rope_theta factor linear_num_key_heads "
    "linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim",
    (0, 10**15): "num_experts n_routed_experts num_local_experts num_experts_per_tok "
    "moe_intermediate_size decoder_sparse_step first_k_dense_replace n_group topk_group "
    "n_shared_experts kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "sliding_window rms_norm_eps initializer_range",
    (1, 9999): "num_hidden_layers",
    (0, 1): "attention_dropout",
}
_LIMITS = {name: limits for limits, names in _COUNTS.items() for name in names.split()}
# sections of config.json that have such fields too
_PARTS = "text_config rope_parameters rope_scaling full_attention sliding_attention".split()

TP = "tensor_model_parallel_size"
CP = "context_parallel_size"
PP = "pipeline_model_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
LAYOUT = "pipeline_model_parallel_layout"
AUTO_LAYOUT = "auto"

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
    "linear_num_key_heads": "",
    "linear_num_value_heads": "",
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
    """Read a model's sizes from its config.json or mca_config.json: an object whose attributes have
    the names of McaModelConfig's fields. values: the file's contents; text_config in it is read
    too.

    A size that the file lacks, or that is no integer there, is None. num_deepstack, the number of
    layers after which features of pictures are added, is then 0."""
    numbers = SimpleNamespace(hf_model_type=values.get("model_type", values.get("hf_model_type")))
    parts = {name: values.get(name) for name in ("text_config", "vision_config")}
    text, vision = (part if isinstance(part, dict) else {} for part in parts.values())
    added_after = vision.get("deepstack_visual_indexes")
    numbers.num_deepstack = len(added_after) if isinstance(added_after, list) else 0
    values = values | text
    for field, names in _IN_CONFIG_JSON.items():
        known = [values.get(name) for name in (field, *names.split())]
        setattr(numbers, field, next((value for value in known if isinstance(value, int)), None))
    family = _family_of(numbers)
    if family is not None and numbers.qk_norm_over_heads is None:
        numbers.qk_norm_over_heads = family.constants.get("qk_norm_over_heads")
    return numbers


def _family_of(m: Keys) -> Family | None:
    return FAMILIES.get(m.hf_model_type) if isinstance(m.hf_model_type, str) else None


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


def check_model(m: Keys, a: Keys, judge: Judge, te_works: bool | None = None) -> None:
    """Check a model's sizes against the parallel layout, and against keys for experts, fp8 and
    recomputation. Errors are added to `judge`, which collects them.

    m: the model's sizes, from numbers_of() or as a McaModelConfig. a: the run's arguments, or the
    same McaModelConfig. te_works: whether Transformer Engine works on this machine; None if
    unknown."""
    _check_tensor_parallel(m, a, judge)
    _check_linear_attention(m, a, judge)
    if m.num_moe_experts:
        _check_experts(m, a, judge)
    else:
        _check_unused(_OF_EXPERTS, "the model has no experts", a, judge)
    if of_mtp := module_of("part_mtp_rows"):
        of_mtp.check(m, a, judge)
    if a.fp8 and (engine := module_of("part_transformer_engine_rules")):
        engine.check_fp8(m, a, judge)
    if m.num_layers:
        _check_layers(m.num_layers, m.num_deepstack, a, judge)
    if te_works is False:
        judge.apply(_WITHOUT_TE)


def _check_tensor_parallel(m: Keys, a: Keys, judge: Judge) -> None:
    tp = a.tensor_model_parallel_size
    groups = m.num_query_groups or m.num_attention_heads or tp
    if groups < tp and tp % groups == 0 and not m.qk_norm_over_heads:
        groups = tp  # as many ranks share each group; a norm over heads needs the groups apart
    counts = {
        "attention heads": m.num_attention_heads,
        "MLP columns": m.ffn_hidden_size,
        "query groups": groups,
    }
    uneven = {name: count for name, count in counts.items() if count and count % tp}
    judge.expect(
        not uneven,
        TP,
        f"the model has {' and '.join(f'{count} {name}' for name, count in uneven.items())}: no "
        f"multiple of {tp}",
        f"{TP}: {math.gcd(tp, *uneven.values())}",
    )


def _check_linear_attention(m: Keys, a: Keys, judge: Judge) -> None:
    heads = m.linear_num_key_heads
    if not heads:
        return
    cp = a.context_parallel_size
    ranks = cp * a.tensor_model_parallel_size
    judge.expect(
        heads % ranks == 0,
        f"{CP} {TP}" if cp > 1 else TP,
        f"layers with linear attention share their {heads} key heads among {ranks} ranks, those of "
        f"{TP} times those of {CP}",
        f"sizes whose product divides {heads}",
    )


def _check_experts(m: Keys, a: Keys, judge: Judge) -> None:
    ep = a.expert_model_parallel_size
    tp = a.tensor_model_parallel_size
    etp = a.expert_tensor_parallel_size or tp
    experts = m.num_moe_experts
    columns = m.moe_ffn_hidden_size or m.ffn_hidden_size or 0
    family = _family_of(m)
    rows = family.rows if family is not None else ()
    judge.expect(
        experts % ep == 0,
        "expert_model_parallel_size",
        f"the model's {experts} experts cannot be shared evenly by {ep} ranks",
        f"expert_model_parallel_size: {math.gcd(experts, ep)}",
    )
    judge.expect(
        tp == 1 or a.sequence_parallel,
        "sequence_parallel",
        "experts and tensor parallelism need sequence parallelism",
        "sequence_parallel: true",
    )
    judge.expect(
        columns % etp == 0,
        "expert_tensor_parallel_size",
        f"an expert has {columns} columns: no multiple of {etp}",
        "expert_tensor_parallel_size: 1",
        etp,
    )
    judge.expect(
        not a.moe_shared_expert_overlap
        or family is None
        or any("shared_experts" in row.mca for row in rows),
        "moe_shared_expert_overlap",
        f"{m.hf_model_type} has no shared experts",
        "moe_shared_expert_overlap left out",
    )
    judge.expect(
        m.moe_router_enable_expert_bias is not False or not a.moe_router_bias_update_rate,
        "moe_router_bias_update_rate",
        "the routers of this model have no bias to update",
        "moe_router_bias_update_rate: 0, and moe_aux_loss_coeff evens out the loads",
    )


def _check_unused(keys: dict[str, tuple], reason: str, a: Keys, judge: Judge) -> None:
    for key, plain in keys.items():
        judge.expect(getattr(a, key) in plain, key, reason, f"{key} left out")


# -- layers and the stages of a pipeline


def _check_layers(layers: int, num_deepstack: int, a: Keys, judge: Judge) -> None:
    pp = a.pipeline_model_parallel_size
    vpp = a.virtual_pipeline_model_parallel_size or 1
    layout = a.pipeline_model_parallel_layout
    counts = [layers // (pp * vpp)]
    if layout == AUTO_LAYOUT:  # replaced when the model's sizes are known
        judge.expect(
            layers >= pp * vpp - 1,
            f"{PP} {VPP} {LAYOUT}",
            f"every stage but the last needs a layer, and the model has {layers} for {pp * vpp}",
            f"{PP}: {max(layers // vpp, 1)}",
        )
        return
    if isinstance(layout, str):
        counts = [stage.count("t") for stage in layout_stages(layout)]
        judge.expect(
            sum(counts) == layers,
            LAYOUT,
            f"it has {sum(counts)} layers, and the model has {layers}",
            f"{LAYOUT}: <a layout of {layers} layers>",
        )
    elif layout is not None:  # a list, or an object of megatron-core
        return
    elif layers % (pp * vpp):
        judge.refuse(
            f"{PP if layers % pp else VPP} {PP} {VPP}",
            f"the model's {layers} layers cannot be shared evenly by {pp} x {vpp} stages, pipeline "
            "ranks and chunks of layers on each",
            f"sizes whose product divides {layers}, or {LAYOUT}",
        )
        return
    judge.expect(
        counts[0] >= num_deepstack,
        f"{PP} {VPP} {LAYOUT}",
        f"the model adds features of pictures after its first {num_deepstack} layers, and its "
        f"first stage has {counts[0]}",
        f"a {LAYOUT} with {num_deepstack} layers or more on the first stage",
    )
    uneven = [count for count in counts if count % (a.recompute_num_layers or 1)]
    judge.expect(  # megatron-core would read layers after the last one
        a.recompute_method != "uniform" or not uneven,
        f"recompute_num_layers {PP} {VPP} {LAYOUT}",
        f"it does not divide the {max(uneven, default=0)} layers of a pipeline stage",
        "recompute_num_layers: 1",
    )


def layout_stages(layout: str) -> list[str]:
    """The pipeline stages of a layout text, with repeats written out: "Et*2|tL" -> ["Ett", "tL"]. E
    is the embedding, t a layer, L the output layer with the loss."""
    text = layout.replace(",", "")
    # megatron-core expands groups before single letters too
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), text)
    return text.split("|")


def num_stages(layout: str | None) -> int:
    """The number of pipeline stages in a layout; 0 if there is no layout, or if it is "auto"."""
    return len(layout_stages(layout)) if layout and layout != AUTO_LAYOUT else 0


def balanced_layout(costs: Sequence[float], head: float, stages: int) -> str:
    """Spread a model's layers over pipeline stages so that their costs are balanced -> a layout
    such as "Et*3|t*4L" (E: embedding, t: a layer, L: output layer). It minimises the sum of the
    stages' costs, each to the power of 8.

    costs: one per layer; there must be at least stages - 1. head: cost of the output layer, which
    the last stage has. Each stage but the last gets a layer or more."""
    n = len(costs)
    before = [0.0, *itertools.accumulate(costs)]

    @functools.cache
    def best(stage: int, first: int) -> tuple[float, tuple[int, ...]]:
        """The best split of the layers from `first` on over the stages from `stage` on -> (sum of
        the stages' costs to the power of 8, layers per stage)."""
        if stage == stages - 1:
            return (before[n] - before[first] + head) ** 8, (n - first,)
        options = []
        for last in range(first + 1, n - (stages - 2 - stage) + 1):
            total, counts = best(stage + 1, last)
            total += (before[last] - before[first]) ** 8
            options.append((total, (last - first, *counts)))
        return min(options)

    _, counts = best(0, 0)
    return "E" + "|".join(f"t*{count}" if count else "" for count in counts) + "L"


def check_layout(layout: str) -> None:
    """Raise ValueError for a wrong pipeline layout. A right one, such as "Et*2|tL", has one E
    (embedding), then any number of layers t, then one L (output layer), and no repeat above 999;
    "auto" is right too."""
    if layout == AUTO_LAYOUT:
        return
    if re.search(r"\*\d{4}", layout):
        raise ValueError(
            "it repeats something more than 999 times, and no model has so many layers"
        )
    if not re.fullmatch("Et*L", "".join(layout_stages(layout.replace(" ", "")))):
        raise ValueError("expected E for the embedding, t for each layer, and L for the loss")


# -- config.json


def check_numbers(values: dict[str, Any], judge: Judge) -> None:
    """Check the values in a config.json: model_type must be text, and sizes within their limits,
    such as hidden_size of at least 1. Most sizes may also be lists, as in some models; transformers
    checks types. Errors are added to `judge`, which collects them.

    If these checks found no error, and the model is of a known family, two more things are checked:
    key-value heads must divide attention heads, and key heads of linear attention its value heads.
    """
    before = len(judge.problems)

    def expect(holds: object, name: str, expected: str) -> None:
        judge.expect(
            holds,
            "model_name_or_path",
            f"expected {expected} in config.json",
            "config.json as the model's authors wrote it",
            values.get(name),
            name,
        )

    expect(isinstance(values.get("model_type", ""), str), "model_type", "the name of a model type")
    for name, (least, most) in _LIMITS.items():
        value: Any = values.get(name)
        is_real = name in ("rope_theta", "factor")
        fits = not isinstance(value, (str, dict, list) if is_real else (str, dict))
        if type(value) in (int, float):
            fits = least <= value <= most
        expect(fits, name, f"a number of at least {least} and at most {most}")
    for part in _PARTS:
        if isinstance(values.get(part), dict):
            check_numbers(values[part], judge)
    numbers = numbers_of(values)
    groups = numbers.num_query_groups or 1
    if len(judge.problems) == before and _family_of(numbers):
        even = (numbers.num_attention_heads or 0) % groups == 0
        expect(even, "num_attention_heads", f"a multiple of num_key_value_heads, {groups},")
        groups = numbers.linear_num_key_heads or 1
        even = (numbers.linear_num_value_heads or 0) % groups == 0
        expect(even, "linear_num_value_heads", f"a multiple of linear_num_key_heads, {groups},")


def check_config(values: dict[str, Any], a: Keys, judge: Judge) -> None:
    """Check a model's config.json and the run's arguments against each other: the model type, the
    ranges of sizes, and whether the sizes fit the parallel layout. Errors are added to `judge`,
    which collects them. values: the file's contents. a: the arguments."""
    check_type(values, judge, a.use_mca)
    before = len(judge.problems)
    numbers = numbers_of(values)
    _check_parts(numbers, a, judge)
    check_numbers(values, judge)
    if len(judge.problems) == before:
        check_model(numbers, a, judge)
        check_gate(numbers, a, judge)


def _check_parts(m: Keys, a: Keys, judge: Judge) -> None:
    """Report to `judge`, which collects configuration errors, if this installation lacks files that
    the model needs: those of the optional part for stacked experts, or on megatron-core those for
    attention sinks. m: the model's sizes. a: the run's arguments."""
    family = _family_of(m)
    needed = {}
    if family is not None and family.stacked_experts:
        needed["stacked_experts"] = "its files with stacked experts need"
    if family is not None and a.use_mca and family.constants.get("attention_sinks"):
        needed["sinks"] = "its attention sinks need"
    for row, part in absent_rows().items():
        if row in needed:
            reason, remedy = need_of(part, needed[row])
            judge.refuse("model_name_or_path", reason, remedy, m.hf_model_type, "model_type")


def check_gate(m: Keys, a: Keys, judge: Judge) -> None:
    """Report to `judge`, which collects configuration errors, if ddp_bucket_size is too small for
    overlapped shared experts together with overlap_param_gather: if the weight of their gate would
    fill a bucket alone. m: the model's sizes. a: the run's arguments.

    megatron waits for a bucket's all-gather just before a module with parameters in the bucket
    runs. Overlapped shared experts run piecewise, so no such wait covers their gate."""
    family = _family_of(m)
    is_gated = family is not None and family.constants.get("moe_shared_expert_gate")
    if is_gated and a.moe_shared_expert_overlap and a.overlap_param_gather:
        hidden = m.hidden_size or 0
        judge.expect(
            (a.ddp_bucket_size or math.inf) > hidden,
            "ddp_bucket_size moe_shared_expert_overlap overlap_param_gather",
            f"the gate of shared experts, {hidden} parameters, would fill a bucket alone, and "
            "overlapped ones do not wait for it",
            f"ddp_bucket_size: {hidden + 1} or more, or left out",
        )


# -- limits of plain torch


def check_torch_packing(hf_config: Keys, judge: Judge) -> None:
    """Refuse packed rows for a model on the torch backend in which the mask that keeps their
    documents apart may not work. The refusal is added to `judge`, which collects configuration
    errors.

    Three kinds of models are refused: those with linear attention, which takes no mask; those whose
    layers have a sliding window, which the mask would replace; and families that megatron-core does
    not train, because they may ignore masks. hf_config: a transformers config."""
    config = hf_config.get_text_config()
    has_window = getattr(config, "sliding_window", None) is not None
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    ignores = "linear_attention" in layers or (has_window and "sliding_attention" in layers)
    judge.expect(
        hf_config.model_type in FAMILIES and not ignores,
        "sequence_packing",
        f"with use_mca: false the mask of packed rows works in families that megatron-core trains, "
        f"without a sliding window or linear attention, and this model is {config.model_type}",
        "packing: false",
        True,
        "packing",
    )
