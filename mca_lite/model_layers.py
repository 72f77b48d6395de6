"""What layers are built of: megatron's specs with our own parts ("local"), or Transformer Engine's.

With model_te.py the only file that knows TE. Local layers need nothing but torch.

Multi-token prediction is extra layers in a row, of which layer k predicts the token k + 1 ahead.

    g_0 = the decoder's output
    g_k = norm(layer_k(eh_proj [enorm(embedding of the token k places ahead); hnorm(g_{k-1})]))

The embedding and the output layer are the model's own; they lie on the last pipeline stage, which
holds a copy of the embedding. With N trained tokens of the main loss, in the whole step or the
micro-batch as calculate_per_token_loss has it, the objective is (sum of main losses +
mtp_loss_scaling_factor / layers * sum of the layers' losses) / N, as in the DeepSeek-V3 report.
megatron's own module divides by other counts in its two modes, and moves tokens between ranks to
look ahead; here a batch brings what follows each token along.
"""

import functools

import torch
import torch.nn.functional as F

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    mtp_on_this_rank,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)

from .model_attention import CoreAttention, DuplicatedLinear, FusedSelfAttention, LatentAttention
from .model_fused import compiles, swiglu
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


class Layer(TransformerLayer):
    """megatron's layer; on a GPU the gradient of what goes past a norm is added in the norm's
    backward pass."""

    def _forward_attention(self, hidden_states, *args, **kwargs):
        if not (self.recompute_input_layernorm or self.offload_attn_norm):
            hidden_states = self._past(self.input_layernorm, hidden_states)
        return super()._forward_attention(hidden_states, *args, **kwargs)

    def _forward_mlp(self, hidden_states, *args, **kwargs):
        if not (self.recompute_pre_mlp_layernorm or self.offload_mlp_norm):
            hidden_states = self._past(self.pre_mlp_layernorm, hidden_states)
        return super()._forward_mlp(hidden_states, *args, **kwargs)

    @staticmethod
    def _past(norm, x):
        has_sum = isinstance(norm, RMSNorm) and torch.is_grad_enabled() and x.requires_grad
        return norm(x, beside=True) if has_sum and compiles(x) else x


def block_spec(config, vp_stage: int | None = None):
    """What megatron's TransformerBlock of one pipeline stage (and virtual stage) is built from."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        numbers = layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage))
    kinds = [config.is_moe_layer(number) for number in numbers]
    specs = {is_moe: layer_spec(config, is_moe) for is_moe in set(kinds)}
    norm = TENorm if config.transformer_impl == "transformer_engine" else RMSNorm
    return TransformerBlockSubmodules([specs[is_moe] for is_moe in kinds], layer_norm=norm)


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
        of_query, of_key = {"heads": config.num_attention_heads}, {"heads": config.num_query_groups}
        attention.q_layernorm = ModuleSpec(RMSNormOverHeads, params=of_query)
        attention.k_layernorm = ModuleSpec(RMSNormOverHeads, params=of_key)
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
        layer.module, parts = Layer, layer.submodules
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


class PredictionLayer(MegatronModule):
    """One extra layer. megatron's MultiTokenPredictionBlock holds them, and gives their places in a
    checkpoint."""

    def __init__(self, config, layer, layer_number: int, vp_stage=None, pg_collection=None):
        super().__init__(config=config)
        self.layer_number = layer_number
        sizes = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm = RMSNorm(config, *sizes), RMSNorm(config, *sizes)
        self.eh_proj = DuplicatedLinear(config, 2 * config.hidden_size, config.hidden_size)
        # a layer of megatron adds those of earlier stages to its number
        number = config.num_layers + layer_number - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(
            layer, config=config, layer_number=number, vp_stage=vp_stage
        )
        self.final_layernorm = RMSNorm(config, *sizes)

    def forward(self, embedded, hidden_states, **kwargs):
        """embedded, hidden_states [s, b, h], or [s / tp, b, h] under sequence parallelism -> the
        next hidden_states.

        kwargs: attention_mask, packed_seq_params and padding_mask of the layer.
        """

        def run(embedded, hidden_states):
            both = torch.cat((self.enorm(embedded), self.hnorm(hidden_states)), -1)
            hidden_states, _ = self.transformer_layer(hidden_states=self.eh_proj(both), **kwargs)
            return self.final_layernorm(hidden_states)

        if self.training and self.config.recompute_granularity == "full":
            return tensor_parallel.checkpoint(
                run, self.config.distribute_saved_activations, embedded, hidden_states
            )
        return run(embedded, hidden_states)


def needs_grad(module, args, output):
    """A forward hook. Recomputation gives no gradient at all to a unit without an input that needs
    one, and a frozen embedding's output is none (tensor_parallel/random.py, CheckpointFunction)."""
    return output.requires_grad_(True) if torch.is_grad_enabled() else output


def prediction_spec(config, vp_stage: int | None = None):
    """What megatron's MultiTokenPredictionBlock is built from; None where this stage has none."""
    if not config.mtp_num_layers or not mtp_on_this_rank(
        config, ignore_virtual=False, vp_stage=vp_stage
    ):
        return None
    layer = layer_spec(config, config.is_moe_layer(config.num_layers))
    spec = ModuleSpec(PredictionLayer, params={"layer": layer})
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * config.mtp_num_layers)
