"""What layers are built of: megatron's specs with our own parts ("local"), or Transformer Engine's.

With model_te.py the only file that knows TE. Local layers need nothing but torch.
"""

import functools

import torch
import torch.nn.functional as F

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from .model_attention import CoreAttention, FusedSelfAttention, LatentAttention
from .model_fused import swiglu
from .model_moe import Experts, Router
from .model_norms import RMSNorm, RMSNormOverHeads


class Residual(torch.nn.Module):
    """residual + multiplier * dropout(norm(x)): megatron's bias-dropout-add with what some families
    do to x first."""

    def __init__(self, config):
        super().__init__()
        self.multiplier = config.residual_multiplier
        self.norm = None
        if config.post_norms:
            self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool):
        return functools.partial(self._add, training)

    def _add(self, training, x_with_bias, residual, dropout):
        x, bias = x_with_bias
        if bias is not None:
            x = x + bias
        if self.norm is not None:
            x = self.norm(x)
        if training and dropout:
            x = F.dropout(x, dropout)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        return residual + x


def stage_layers(config, vp_stage: int | None = None) -> list[int]:
    """Numbers in the whole model of the layers that one pipeline stage (and virtual stage)
    holds."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage)))


def block_spec(config, vp_stage: int | None = None):
    """What megatron's TransformerBlock of one pipeline stage (and virtual stage) is built from."""
    numbers = stage_layers(config, vp_stage)
    specs = {
        is_moe: layer_spec(config, is_moe) for is_moe in {config.is_moe_layer(i) for i in numbers}
    }
    norm = TENorm if config.transformer_impl == "transformer_engine" else RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[specs[config.is_moe_layer(i)] for i in numbers], layer_norm=norm
    )


def _attention_spec(config, spec: ModuleSpec) -> ModuleSpec:
    """megatron's spec of attention with our norms and core attention, or our own multi-latent
    attention."""
    if config.multi_latent_attention:
        return ModuleSpec(LatentAttention)
    attention = spec.submodules
    if config.transformer_impl == "local":
        spec.module, attention.core_attention = FusedSelfAttention, CoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.qk_norm_over_heads:
        for name, heads in (
            ("q_layernorm", config.num_attention_heads),
            ("k_layernorm", config.num_query_groups),
        ):
            setattr(attention, name, ModuleSpec(module=RMSNormOverHeads, params={"heads": heads}))
    return spec


def layer_spec(config, is_moe: bool):
    """megatron's spec of one layer."""
    shared = dict(
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=False,  # the experts are our own
        qk_layernorm=config.qk_layernorm,
    )
    if config.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(**shared)
        parts = layer.submodules
        if is_moe:  # the local spec's name of this norm in a checkpoint, whatever follows it
            parts.sharded_state_dict_keys_map = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    else:
        layer = get_gpt_layer_local_spec(**shared, normalization=config.normalization)
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = (
            RMSNorm if config.pre_norms else IdentityOp
        )
        if config.post_norms or config.residual_multiplier != 1.0:
            parts.self_attn_bda = parts.mlp_bda = ModuleSpec(Residual, params={"config": config})
    parts.self_attention = _attention_spec(config, parts.self_attention)
    mlp = parts.mlp.submodules
    if is_moe:
        mlp.experts, mlp.router = Experts, Router
        mlp = mlp.shared_experts.submodules if mlp.shared_experts is not None else None
    if config.use_te_activation_func and mlp is not None:
        mlp.activation_func = swiglu
    return layer
