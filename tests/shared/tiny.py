"""Tiny models and data that tests share: under 100 kB, made on the spot."""

import torch

VOCAB = 61  # odd: tensor parallelism has to pad it

FAMILY_KEYS = {
    "llama": dict(rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0,
                                   "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0,
                                   "original_max_position_embeddings": 32}),
    "mistral": dict(head_dim=12, sliding_window=None),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(head_dim=8, tie_word_embeddings=True),
}  # fmt: skip

LATENT = dict(
    q_lora_rank=10,
    kv_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
    num_key_value_heads=4,
    first_k_dense_replace=2,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=100.0,
    factor=4.0,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=0.7,
    mscale_all_dim=1.0,
    original_max_position_embeddings=32,
)
# Every second layer has linear attention. The outputs of its first tokens may be near zero, and are
# normed: a small epsilon would amplify the rounding of a step to 1e-4.
DELTA = dict(
    rms_norm_eps=1e-2,
    head_dim=16,
    full_attention_interval=2,
    linear_conv_kernel_dim=3,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
)
# Families whose layouts are all run in one world each (test_model_families.py), some of them twice.
# `model_type` where
# it is not the name.
MORE_KEYS = {
    "mistral_window": dict(model_type="mistral", head_dim=12, sliding_window=6),
    "qwen3_window": dict(model_type="qwen3", head_dim=8, use_sliding_window=True, sliding_window=5,
                         max_window_layers=1),
    "gemma2": dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=12,
                   final_logit_softcapping=2.0,
                   attn_logit_softcapping=3.0, tie_word_embeddings=True),
    "gemma3_text": dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=12,
                        tie_word_embeddings=True,
                        layer_types=["sliding_attention", "full_attention"],
                        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 4.0,
                                                            "rope_theta": 1e4},
                                         "sliding_attention": {"rope_type": "default",
                                             "rope_theta": 100.0}}),
    "deepseek_v2": dict(LATENT, q_lora_rank=None),
    "deepseek_v3": dict(LATENT, rms_norm_eps=1e-3),
    "deepseek_v3_yarn": dict(LATENT, model_type="deepseek_v3", q_lora_rank=None,
                             rope_interleave=False, rope_parameters=YARN),
    "youtu": dict({k: v for k, v in LATENT.items() if k != "first_k_dense_replace"},
                  rms_norm_eps=1e-3, initializer_range=0.02, tie_word_embeddings=True),
    "glm4": dict(head_dim=8),
    "glm4_no_bias": dict(model_type="glm4", head_dim=8, attention_bias=False),
    "granite": dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
                    logits_scaling=2.5),
    "olmo2": dict(),
    "phi3": dict(sliding_window=7, rope_parameters={"rope_type": "default", "rope_theta": 100.0,
                                                    "partial_rotary_factor": 0.5}),
    "seed_oss": dict(head_dim=8, attention_dropout=0.0, residual_dropout=0.0),
    "arcee": dict(head_dim=8),
    "exaone4": dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "exaone4_no_window": dict(model_type="exaone4", sliding_window=None,
                              layer_types=["full_attention"] * 2),
    "hunyuan_v1_dense": dict(head_dim=8),
    "hunyuan_alpha": dict(model_type="hunyuan_v1_dense", head_dim=8, rope_parameters=dict(
        rope_type="dynamic", rope_theta=100.0, alpha=10.0, factor=1.0)),
    "ministral3": dict(head_dim=8, rope_parameters=dict(
        YARN, original_max_position_embeddings=4, llama_4_scaling_beta=0.7)),
    "smollm3": dict(no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=5),
    "cwm": dict(head_dim=8, sliding_window=5, bos_token_id=1),
    "qwen3_5_text": DELTA,
    "helium": dict(head_dim=8, attention_bias=True),
    "glm": dict(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 100.0,
                                             "partial_rotary_factor": 0.5}),
    "vaultgemma": dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=12,
                       final_logit_softcapping=2.0, attn_logit_softcapping=3.0,
                       tie_word_embeddings=True),
    "hyperclovax": dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
                        logits_scaling=0.4, head_dim=12, attention_bias=True),
    "hyperclovax_pre_norm": dict(model_type="hyperclovax", use_post_norm=False, logits_scaling=0.4),
    "ernie4_5": dict(head_dim=8, tie_word_embeddings=True),
    "gemma4_text": dict(
        head_dim=8, global_head_dim=16, num_global_key_value_heads=2, num_key_value_heads=4,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=6,
        tie_word_embeddings=True, final_logit_softcapping=2.0,
        layer_types=["sliding_attention", "full_attention"]),
    "olmo3": dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"],
                  rope_parameters={"full_attention": YARN,
                                   "sliding_attention": {"rope_type": "default",
                                                         "rope_theta": 100.0}}),
}  # fmt: skip

# Families made of the rows of others, or with the attention of others. This and the next two have
# tiny_moe's models there
OF_OTHERS = (
    "arcee cwm deepseek_v3_yarn ernie4_5 exaone4 exaone4_no_window glm glm4 glm4_no_bias granite "
    "helium hunyuan_alpha hunyuan_v1_dense hyperclovax hyperclovax_pre_norm ministral3 olmo2 olmo3 "
    "phi3 qwen3_5_text qwen3_window seed_oss smollm3 vaultgemma youtu"
).split()
# {family: modules whose adapters are compared with PEFT's}
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
OF_LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
ADAPTED = {
    "deepseek_v2": ("q_proj", *OF_LATENT),
    "deepseek_v3": ("q_a_proj", "q_b_proj", *OF_LATENT),
    "deepseek_v3_yarn": ("q_proj", *OF_LATENT),
    "gemma2": ("v_proj", "up_proj", "lm_head", "embed_tokens"),
    "granite": ("v_proj", "down_proj", "lm_head", "embed_tokens"),
    "olmo2": ("q_proj", "o_proj"),
    "gemma3_text": (*OF_ATTENTION, "gate_proj", "up_proj", "down_proj"),
    "glm4": (*OF_ATTENTION, "down_proj"),
    "phi3": ("o_proj", "down_proj"),
    "qwen3_5_text": ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "lm_head"),
    "arcee": ("q_proj", "up_proj", "down_proj"),
    "helium": ("q_proj", "o_proj", "gate_proj"),
    "gemma4_text": (*OF_ATTENTION, "up_proj"),
    "hyperclovax": ("q_proj", "o_proj", "down_proj", "lm_head", "embed_tokens"),
    "seed_oss": (*OF_ATTENTION, "gate_proj", "up_proj", "down_proj"),
}
# {(family, field of its config): why it has no effect}
ONE_KEY = "multi-latent attention has one key for all heads, and qk_rope_head_dim turns"
WITHOUT_EFFECT = {
    ("youtu", "num_key_value_heads"): ONE_KEY,
    ("youtu", "embedding_initializer_range"): "of embeddings drawn anew: initializer_range decides",
    **{
        ("gemma4_text", name): "of experts, which are refused"
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size")
    },
    ("gemma3_text", "attn_logit_softcapping"): "transformers' Gemma 3 does not cap its scores",
    ("gemma4_text", "vocab_size_per_layer_input"): "of embeddings of each layer: refused",
    ("gemma4_text", "num_hidden_layers"): "transformers wants a per_layer_config of as many layers",
    ("gemma4_text", "use_double_wide_mlp"): "of layers that share keys and values: refused",
}
SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=0,
)


def is_known(family: str) -> bool:
    """True if the installed transformers has the model_type; a line says so if not."""
    from transformers import CONFIG_MAPPING, __version__

    if family not in CONFIG_MAPPING:
        print(f"{family}: left out, transformers {__version__} has no such model")
    return family in CONFIG_MAPPING


def hf_config(family: str, **changes):
    """A transformers config of 4 layers (2 of MORE_KEYS), 4 heads in 2 query groups, hidden 32,
    with what is special about the family.
    """
    from transformers import AutoConfig

    layers = 4 if family in FAMILY_KEYS else 2
    special = dict(FAMILY_KEYS.get(family) or MORE_KEYS.get(family))
    keys = {**SIZES, "vocab_size": VOCAB, "num_hidden_layers": layers, **special, **changes}
    return AutoConfig.for_model(keys.pop("model_type", family), **keys)


def factor_of(name: str) -> float:
    """The factor on a random matrix, which is small as transformers draws it. Queries and keys of
    a gated delta net come from convolutions and are normed: near zero they amplify rounding."""
    return 30.0 if "conv1d" in name else 3.0


def save_model(
    folder, family: str, seed: int = 0, dtype=torch.float32, max_shard_size="50GB", **changes
) -> str:
    """Save a model with random weights: norms and biases too, so that a mistaken one shows."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config(family, **changes))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(factor_of(name))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return str(folder)


def samples(
    count: int = 22, seed: int = 1, lengths=(5, 15), longest_mask: int = 4, vocab_size=None
) -> list[dict]:
    """Shifted samples of unequal length, `lengths[0] <= length < lengths[1]`, with uneven label
    masks of 1 to `longest_mask` tokens in front; one has no label at all.
    """
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        length = int(torch.randint(*lengths, (1,), generator=generator))
        tokens = torch.randint(0, vocab_size or VOCAB, (length + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[: 1 + i % longest_mask] = -100
        labels[length - (i % 3) :] = -100
        if i == 5:
            labels[:] = -100
        out.append({"input_ids": tokens[:-1], "labels": labels})
    return out
