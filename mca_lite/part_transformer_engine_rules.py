"""Rules of fp8, which Transformer Engine computes. Imports no torch."""

from .args_rules_model import PP, TP
from .errors import Judge, Keys, Rule

_SIZES = (
    "hidden_size ffn_hidden_size moe_shared_expert_intermediate_size num_attention_heads "
    "num_query_groups kv_channels"
).split()
_FP8 = (
    Rule(
        "fp8 transformer_impl=local",
        "8-bit matmuls are Transformer Engine's, and the layers of this run are local ones",
        "transformer_impl: transformer_engine, or fp8 left out",
    ),
)


def check_fp8(m: Keys, a: Keys, judge: Judge) -> None:
    """Check that fp8 can train a model: add Problems (errors for the user) to `judge` if it cannot,
    such as for sizes on a rank that are no multiple of 16. m: the model's sizes as attributes,
    named as in McaModelConfig. a: the run's arguments, or the same McaModelConfig."""
    judge.apply(_FP8)
    # Transformer Engine's 8-bit matmuls need sizes that 16 divides
    tp = a.tensor_model_parallel_size
    size = {field: getattr(m, field) or 0 for field in _SIZES}
    heads = size["num_attention_heads"]
    channels = size["kv_channels"] or size["hidden_size"] // max(heads, 1)
    groups = size["num_query_groups"] or heads
    of_a_rank = {
        "hidden channels": size["hidden_size"],
        "MLP columns": size["ffn_hidden_size"] / tp,
        "columns of shared experts": size["moe_shared_expert_intermediate_size"] / tp,
        "channels of all queries": heads * channels / tp,
        "channels of queries, keys and values": (heads + 2 * groups) * channels / tp,
    }
    odd = [f"{count:g} {name}" for name, count in of_a_rank.items() if count % 16]
    judge.expect(
        not odd,
        f"fp8 {TP}",
        f"8-bit matmuls need sizes that 16 divides, and a rank has {', '.join(odd)}",
        "fp8 left out",
    )
    most = (m.num_layers or 10**15) // a.pipeline_model_parallel_size
    for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        judge.expect(
            getattr(a, key) <= most or not a.first_last_layers_bf16,
            f"{key} {PP}",
            f"a pipeline stage has {most} layers",
            f"{key}: {most}",
        )
