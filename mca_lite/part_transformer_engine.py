"""Transformer Engine: which models get its layers, and how these are built."""

import copy
import functools
import os
import warnings
from typing import Any

import torch

from .errors import Judge, refuse
from .kernels import ABSENT, first_line
from .mcore import (
    AttnMaskType,
    IdentityOp,
    ProcessGroupCollection,
    RotaryEmbedding,
    SelfAttentionSubmodules,
    TEAttention,
    TENorm,
    TESpecProvider,
    TransformerConfig,
)
from .model_attention import rope_frequencies
from .model_config import McaModelConfig, changed
from .model_norms import head_norms

# only local layers support these fields at values other than their default
ONLY_LOCAL = (
    "tp_comm_overlap pre_norms post_norms embedding_multiplier residual_multiplier logits_scaling "
    "final_logit_softcapping attn_logit_softcapping rope_interleave mrope_section "
    "layernorm_zero_centered_gamma multi_latent_attention mtp_num_layers layers_without_rope "
    "query_scaling_beta qk_norm_after_rope attention_sinks add_output_bias add_moe_bias "
    "activation_func_clamp_value linear_layers attention_output_gate full_kv_channels "
    "layer_scalars recompute_keep mlp_chunk_size"
).split()
# TE's environment variables -> the attention that each switches on or off
TE_SWITCHES = {
    "NVTE_FLASH_ATTN": "flash",
    "NVTE_FUSED_ATTN": "fused",
    "NVTE_UNFUSED_ATTN": "unfused",
}
NO_GPU = "there is no GPU"
_KEY = "transformer_impl"
_REMEDY = "transformer_impl: local or auto"


def why_unusable() -> str | None:
    """Say why Transformer Engine cannot be used here: NO_GPU, ABSENT (not installed), or the first
    line of its import error. None if it can be used."""
    if not torch.cuda.is_available():
        return NO_GPU
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # a broken installation raises more than ImportError
        missing = str(getattr(error, "name", None))
        if isinstance(error, ModuleNotFoundError) and missing.startswith("transformer_engine"):
            return ABSENT
        return first_line(error)
    return None


@functools.lru_cache(1)
def works() -> bool:
    """True if there is a GPU and Transformer Engine can be imported. With a GPU, warns if it is
    installed but cannot be imported. Cached."""
    reason = why_unusable()
    if reason not in (None, NO_GPU, ABSENT):
        warnings.warn(
            f"Transformer Engine is installed and cannot be imported ({reason}): local layers are "
            "used",
            stacklevel=3,
        )
    return reason is None


def version() -> str:
    """Transformer Engine's name and version, such as "Transformer Engine 2.11.0"."""
    import transformer_engine

    return f"Transformer Engine {transformer_engine.__version__}"


def expect_works() -> None:
    """Raise ConfigError unless there is a GPU and Transformer Engine can be imported."""
    if not works():
        reason = "Transformer Engine does not work here (it needs a GPU and `pip install "
        reason += "mca-lite[te]`)"
        refuse(_KEY, "transformer_engine", reason, _REMEDY)


def needs_local(config: McaModelConfig) -> list[str]:
    """List what this model's config has that Transformer Engine's layers lack or compute wrongly,
    as words for a message. [] if there is nothing, so that Transformer Engine can be used."""
    needs = changed(config, ONLY_LOCAL)
    channels = config.kv_channels or config.hidden_size // max(config.num_attention_heads, 1)
    if channels > 128:  # gradients of packed rows are NaN or 1e19 with cuDNN before 9.18
        needs.append("heads of more than 128 channels")
    if config.sliding_window is not None and config.context_parallel_size > 1:
        needs.append("a sliding window under context_parallel_size")  # TE's ring has no windows
    # TE's kernel for packed rows ignores the factor on cos and sin, and has one set of frequencies
    if (kind := config.rope_parameters.get("rope_type")) in ("yarn", "longrope"):
        needs.append(kind)
    if config.attention_backend.name == "local":
        needs.append("attention_backend: local")
    return needs


def check(config: McaModelConfig, judge: Judge) -> None:
    """Refuse transformer_impl: transformer_engine for a model that its layers do not support:
    report it to `judge`, which collects configuration errors. config: the model's."""
    if needs := needs_local(config):
        reason = f"{config.hf_model_type} needs {', '.join(needs)}, which only the local layers "
        judge.refuse(_KEY, f"{reason}have", _REMEDY)


# -- layers


def begin(config: McaModelConfig, cp_group: Any) -> RotaryEmbedding:
    """Prepare a model for Transformer Engine's attention -> its rotary embedding. Unless
    attention_backend is "auto", first set the environment variables by which Transformer Engine
    chooses its attention kernels. cp_group: the context-parallel ranks."""
    name = config.attention_backend.name
    if name != "auto":
        os.environ.update({var: str(int(of == name)) for var, of in TE_SWITCHES.items()})
    rotary = RotaryEmbedding(config.kv_channels, config.rotary_percent, cp_group=cp_group)
    rotary.inv_freq, _ = rope_frequencies(config)
    return rotary


def attention_inputs(
    model: Any, hidden: torch.Tensor | None, packed_seq_params: Any
) -> dict[str, Any]:
    """Keyword arguments of Transformer Engine's attention in a forward pass: no mask, and rotary
    angles [s, 1, 1, rotary dim], where s is the number of positions on this context-parallel rank,
    or for packed rows of the longest document. hidden: the decoder's input, None after the first
    pipeline stage. packed_seq_params: borders of packed documents, None if rows are not packed."""
    cp_group = None
    if packed_seq_params is not None:
        cp_group = packed_seq_params.cp_group
    length = model.rotary_pos_emb.get_rotary_seq_len(
        None, model.decoder, hidden, model.config, packed_seq_params
    )
    is_packed = packed_seq_params is not None
    angles = model.rotary_pos_emb(length, packed_seq=is_packed, cp_group=cp_group)
    return {"attention_mask": None, "rotary_pos_emb": angles}


def linears(has_norm: bool) -> tuple[Any, Any]:
    """Transformer Engine's classes (column-parallel linear, row-parallel linear) for an MLP.
    has_norm: True if the first one also applies the norm before the MLP."""
    provider = TESpecProvider()
    column = provider.column_parallel_linear()
    if has_norm:
        column = provider.column_parallel_layer_norm_linear()
    return column, provider.row_parallel_linear()


def attention(
    config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection
) -> torch.nn.Module:
    """Build the self-attention of a decoder layer from Transformer Engine's linears and attention.
    Its first linear also applies the norm before attention. pg_collection: megatron's process
    groups."""
    provider = TESpecProvider()
    of_query, of_key = head_norms(config, TENorm) or (IdentityOp, IdentityOp)
    parts = SelfAttentionSubmodules(
        linear_qkv=provider.column_parallel_layer_norm_linear(),
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=of_query,
        k_layernorm=of_key,
    )
    if config.qk_norm_over_heads:
        # megatron 0.19's attention requires qk_layernorm; set in the config itself, it would make
        # DDP sum the gradients of these norms
        config = copy.copy(config)
        config.qk_layernorm = True
    over_ranks = config.cp_comm_type if config.context_parallel_size > 1 else None
    return TEAttention(
        config, parts, layer_number, AttnMaskType.causal, over_ranks, pg_collection=pg_collection
    )
