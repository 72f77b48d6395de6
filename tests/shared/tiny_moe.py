"""Tiny mixtures of experts, beside tiny.py's dense models."""

import torch

from tests.shared import tiny

EXPERTS = 4
SHARED = dict(num_experts_per_tok=2, moe_intermediate_size=16)
MODELS = {
    "qwen3_moe": ("qwen3_moe", dict(SHARED, num_experts=EXPERTS, norm_topk_prob=True, head_dim=8)),
    "qwen3_moe_dense_layers": ("qwen3_moe", dict(
        SHARED, num_experts=EXPERTS, norm_topk_prob=False, head_dim=8, mlp_only_layers=[0],
        tie_word_embeddings=True)),
    "qwen3_moe_sparse_step": ("qwen3_moe", dict(SHARED, num_experts=EXPERTS, norm_topk_prob=False,
                                                decoder_sparse_step=2)),
    "mixtral": ("mixtral", dict(num_local_experts=EXPERTS, num_experts_per_tok=2,
                                intermediate_size=16, sliding_window=None)),
    "qwen2_moe": ("qwen2_moe", dict(SHARED, num_experts=EXPERTS,
                                    shared_expert_intermediate_size=24, norm_topk_prob=False)),
    "olmoe": ("olmoe", dict(num_experts=EXPERTS, num_experts_per_tok=2, intermediate_size=16)),
    "glm4_moe": ("glm4_moe", dict(
        SHARED, head_dim=8, n_routed_experts=8, n_shared_experts=2, n_group=4, topk_group=2,
        num_experts_per_tok=3,
        routed_scaling_factor=1.7, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                         "partial_rotary_factor": 0.5}, num_mtp_layers=0)),
    "glm4_moe_plain": ("glm4_moe", dict(
        SHARED, head_dim=8, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1,
        routed_scaling_factor=1.0,
        first_k_dense_replace=2, use_qk_norm=False, attention_bias=False, norm_topk_prob=False,
        num_mtp_layers=0)),
    "deepseek_v3": ("deepseek_v3", dict(
        tiny.LATENT, moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=2, n_group=4,
        topk_group=2,
        num_experts_per_tok=3, first_k_dense_replace=1, rope_parameters=tiny.YARN,
        num_nextn_predict_layers=0)),
    "deepseek_v2": ("deepseek_v2", dict(
        tiny.LATENT, q_lora_rank=None, moe_intermediate_size=16, n_routed_experts=8,
        n_shared_experts=1, n_group=4,
        topk_group=2, num_experts_per_tok=3, first_k_dense_replace=0,
        topk_method="group_limited_greedy",
        routed_scaling_factor=2.0)),
    "glm4_moe_lite": ("glm4_moe_lite", dict(
        tiny.LATENT, moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=2, n_group=4,
        topk_group=2, num_experts_per_tok=3, first_k_dense_replace=1)),
    "minimax_m2": ("minimax_m2", dict(
        num_local_experts=EXPERTS, num_experts_per_tok=2, intermediate_size=16, head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0,
                         "partial_rotary_factor": 0.5})),
    "dots1": ("dots1", dict(
        SHARED, n_routed_experts=8, n_shared_experts=2, n_group=4, topk_group=2,
        first_k_dense_replace=1,
        norm_topk_prob=True, routed_scaling_factor=1.7, sliding_window=5, max_window_layers=1)),
    "gpt_oss": ("gpt_oss", dict(
        num_local_experts=EXPERTS, num_experts_per_tok=2, intermediate_size=16, head_dim=8,
        sliding_window=5, swiglu_limit=0.5, layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=dict(rope_type="yarn", rope_theta=100.0, factor=4.0, beta_fast=32.0,
                             beta_slow=1.0, truncate=False,
                             original_max_position_embeddings=32))),
    "solar_open": ("solar_open", dict(
        SHARED, n_routed_experts=8, n_shared_experts=1, n_group=4, topk_group=2, head_dim=8,
        attention_bias=True)),
    "exaone_moe": ("exaone_moe", dict(
        SHARED, head_dim=8, num_experts=8, num_shared_experts=2, n_group=4, topk_group=2,
        num_experts_per_tok=3, routed_scaling_factor=1.7, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2)),
    # outputs of experts are small and normed: a small epsilon amplifies rounding
    "flex_olmo": ("flex_olmo", dict(num_experts=EXPERTS, num_experts_per_tok=2, rms_norm_eps=1e-3,
                                    intermediate_size=16, router_aux_loss_coef=0.0)),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", dict(
        num_experts=EXPERTS, moe_topk=[2] * 4, intermediate_size=16, head_dim=8)),
    "flint": ("flint", dict(
        SHARED, num_experts=EXPERTS, shared_expert_intermediate_size=24, head_dim=8,
        attention_bias=True, mlp_only_layers=[1], sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2, router_aux_loss_coef=0.0)),
    "qwen3_next": ("qwen3_next", dict(
        tiny.DELTA, **SHARED, num_experts=EXPERTS, shared_expert_intermediate_size=24)),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", dict(
        tiny.DELTA, **SHARED, num_experts=EXPERTS, shared_expert_intermediate_size=24)),
}  # fmt: skip
# Those of test_moe.py and test_moe_weights.py; test_model_families.py has the others
BALANCED = (
    "qwen3_moe qwen3_moe_dense_layers qwen3_moe_sparse_step mixtral qwen2_moe olmoe glm4_moe "
    "glm4_moe_plain"
).split()
UNBALANCED = [name for name in MODELS if name not in BALANCED]
OF_OTHERS = (
    "dots1 exaone_moe flex_olmo flint glm4_moe_lite hunyuan_v1_moe minimax_m2 qwen3_5_moe_text "
    "solar_open"
).split()
ADAPTED = {
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj"),
    "hunyuan_v1_moe": ("q_proj", "v_proj", "o_proj"),
    "gpt_oss": tiny.OF_ATTENTION,
    "exaone_moe": tiny.OF_ATTENTION,
    "flint": tiny.OF_ATTENTION,
}
WITHOUT_EFFECT = {
    ("deepseek_v2", "head_dim"): tiny.ONE_KEY,
    ("deepseek_v2", "num_key_value_heads"): tiny.ONE_KEY,
    ("deepseek_v3", "num_key_value_heads"): tiny.ONE_KEY,
    ("glm4_moe_lite", "num_key_value_heads"): tiny.ONE_KEY,
    **{
        (family, "intermediate_size"): "of dense layers, which transformers' model never has"
        for family in ("solar_open", "qwen3_5_moe_text", "qwen3_5_moe")
    },
    ("qwen3_vl_moe", "sliding_window"): "transformers unsets it",
    ("qwen3_omni_moe_thinker", "sliding_window"): "transformers' attention unsets it",
    ("qwen3_omni_moe_thinker", "initializer_range"): "that of text_config decides",
    ("gpt_oss", "router_aux_loss_coef"): "0.9 in the released files, and without effect in "
    "transformers: moe_aux_loss_coeff decides",
}


def hf_config(name: str, **changes):
    from transformers import AutoConfig, GptOssConfig

    family, keys = MODELS[name]
    if not hasattr(GptOssConfig, "swiglu_limit"):
        # an older transformers has the limit in its code, whatever the file says
        keys = {key: value for key, value in keys.items() if key != "swiglu_limit"}
    # a loss of their own by default
    if (
        family in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "minimax_m2")
        or "linear_key_head_dim" in keys
    ):
        keys = {"router_aux_loss_coef": 0.0, **keys}
    keys = {**tiny.SIZES, "vocab_size": tiny.VOCAB, **keys, **changes}
    if "layer_types" in keys:
        keys["layer_types"] = keys["layer_types"][: keys["num_hidden_layers"]]
    return AutoConfig.for_model(family, **keys)


def save_model(
    folder,
    name: str,
    seed: int = 0,
    dtype=torch.float32,
    max_shard_size="50GB",
    skew=False,
    **changes,
) -> str:
    """Save a model, drawn as tiny.save_model's.

    skew: no token goes to the last half of the experts (where a bias chooses), or to few of them.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config(name, **changes))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif key.endswith("bias"):  # of stacked experts
                parameter.copy_(0.2 * torch.randn_like(parameter))
            elif key.endswith(("gate.weight", "router.weight")):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(tiny.factor_of(key))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.rand_like(buffer))
                if skew:
                    buffer[: len(buffer) // 2] += 10.0
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return str(folder)
