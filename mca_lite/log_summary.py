"""What is said at the start of a run, and how much work a step is."""

from typing import Any

from . import parallel
from .log import model_flops_per_token
from .model_families import FAMILIES


def run_summary(trainer, plan) -> dict[str, dict]:
    """Sections of the start summary: model, layout, batch, steps, dataset, and what was chosen by itself."""
    args, state = trainer.args, trainer.state
    config = getattr(trainer.model, "config", None)
    total, trained = trainer.backend.num_parameters()
    megatron = hasattr(config, "tensor_model_parallel_size")
    degrees = [
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    ]
    degrees.append(trainer.backend.dp_size)
    shared = [
        text
        for text, on in (
            ("sequence parallel", args.sequence_parallel),
            ("packed rows", args.sequence_packing),
        )
        if on
    ]
    sections = {
        "model": {
            "name": getattr(config, "name_or_path", None) or getattr(config, "_name_or_path", None),
            "type": getattr(config, "hf_model_type", None) or getattr(config, "model_type", None),
            "parameters on this rank": f"{total:,} ({trained:,} trained)",
            "weights": getattr(trainer.model, "weights_from", None) or "as given",
            "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        },
        "layout": {
            "backend": f"megatron-core, {config.transformer_impl} layers"
            if megatron
            else "plain torch DDP",
            "world": f"{args.world_size} ranks on {parallel.device().type}",
            "tensor x pipeline x context x data": " x ".join(map(str, degrees)),
            **_experts(config, args),
            "activations": ", ".join(shared) or "whole on every rank",
        },
        "steps": {
            "global batch": f"{plan.global_batch_size} samples = micro-batch {plan.micro_batch_size} x accumulation "
            f"{args.gradient_accumulation_steps} x data parallel {plan.dp_size}",
            "steps": f"{state.max_steps} ({plan.steps_per_epoch} an epoch of {plan.num_samples} samples)",
            "from step": state.global_step,
        },
    }
    if args.notes:
        sections["chosen"] = {str(i + 1): note for i, note in enumerate(args.notes)}
    return {**sections, **trainer.extra_summary}


def _experts(config, args) -> dict[str, str]:
    """How experts are spread, for a model that has them on megatron-core."""
    if not getattr(config, "num_moe_experts", None) or not hasattr(
        config, "expert_tensor_parallel_size"
    ):
        return {}
    ep, etp = args.expert_model_parallel_size, config.expert_tensor_parallel_size
    experts = config.num_moe_experts
    return {"expert x expert tensor": f"{ep} x {etp} ({experts // ep} of {experts} experts a rank)"}


def active_columns(fields: dict[str, Any], num_layers: int, ffn_hidden_size: int) -> float:
    """Columns of the gated MLP that a token goes through, averaged over the layers: in a mixture those of its experts, of the
    shared one, and the router, whose E rows count as E / 3. fields: McaModelConfig's, as far as the family sets them."""
    experts = fields.get("num_moe_experts")
    if not experts:
        return ffn_hidden_size
    mixtures = sum(fields["moe_layer_freq"])
    shared = fields.get("moe_shared_expert_intermediate_size") or 0
    gate = 1 if shared and fields.get("moe_shared_expert_gate") else 0
    columns = (
        fields["moe_router_topk"] * fields["moe_ffn_hidden_size"] + shared + (experts + gate) / 3
    )
    return ((num_layers - mixtures) * ffn_hidden_size + mixtures * columns) / num_layers


def step_flops(model, tokens: float, seq_length: float) -> float:
    """Model FLOPs of a step with `tokens` tokens in rows of seq_length, as report.model_flops_per_token counts them.

    0.0 for a model whose sizes are not known.
    """
    config = getattr(model, "config", None)
    if hasattr(config, "num_query_groups"):
        sizes = dict(
            num_layers=config.num_layers,
            num_query_groups=config.num_query_groups,
            head_dim=config.kv_channels,
            ffn_hidden_size=active_columns(vars(config), config.num_layers, config.ffn_hidden_size),
        )
    elif all(
        hasattr(config, n)
        for n in ("num_hidden_layers", "num_key_value_heads", "intermediate_size")
    ):
        sizes = dict(
            num_layers=config.num_hidden_layers,
            num_query_groups=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            ffn_hidden_size=active_columns(
                FAMILIES[config.model_type].values(config) if config.model_type in FAMILIES else {},
                config.num_hidden_layers,
                config.intermediate_size,
            ),
        )
    else:
        return 0.0
    shared = dict(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        vocab_size=config.vocab_size,
    )
    return tokens * model_flops_per_token(
        **{**sizes, **_more_sizes(config)}, **shared, seq_length=seq_length
    )


def _more_sizes(config) -> dict[str, float]:
    """What a McaModelConfig or a transformers config with multi-latent attention or layers that predict ahead has besides."""
    more = {"num_prediction_layers": getattr(config, "mtp_num_layers", None) or 0}
    if getattr(config, "kv_lora_rank", None) is None:
        return more
    if hasattr(config, "qk_nope_head_dim"):
        still, turning = config.qk_nope_head_dim, config.qk_rope_head_dim
    else:
        still, turning = config.qk_head_dim, config.qk_pos_emb_head_dim
    heads, hidden, value = config.num_attention_heads, config.hidden_size, config.v_head_dim
    query, rank = heads * (still + turning), config.q_lora_rank
    queries = hidden * query if rank is None else rank * (hidden + query)
    keys = hidden * (config.kv_lora_rank + turning) + config.kv_lora_rank * heads * (still + value)
    weights = queries + keys + heads * value * hidden
    return {**more, "attention_weights": weights, "head_dim": (still + turning + value) / 2}
