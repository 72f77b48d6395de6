"""The layers of a decoder: local parts on megatron's tensor-parallel linears, or Transformer
Engine's.

Multi-token prediction is extra layers in a row; layer k predicts the token k + 1 ahead.

    g_0 = the decoder's output
    g_k = norm(layer_k(eh_proj [enorm(embedding of the token k places ahead); hnorm(g_{k-1})]))

They share the embedding and the output layer of the model, on the last pipeline stage, with a copy
of the embedding. A picture's features stand for embeddings there too; rotary positions are those of
g_0's tokens, as in megatron-core and vLLM. With N trained tokens of the main loss, in the whole
step or the micro-batch according to calculate_per_token_loss, the objective is (sum of main losses
+ mtp_loss_scaling_factor / layers * sum of the layers' losses) / N, as in the DeepSeek-V3 report.
megatron's module divides by other counts in its two modes, and moves tokens between ranks to look
ahead; here a batch includes the following tokens (batch.Targets).
"""

import contextlib
import functools

import torch
import torch.nn.functional as F

from .kernels import compiles
from .mcore import (
    MLP,
    IdentityOp,
    MegatronModule,
    apply_prefix_mapping,
    get_bias_dropout_add,
    get_fp8_context,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    make_viewless_tensor,
    parallel_state,
    replace_prefix_for_sharding,
    sharded_state_dict_default,
    te_checkpoint,
    tensor_parallel,
)
from .model_attention import DuplicatedLinear, build_attention, recomputes
from .model_moe import Mixture, mlp_parts
from .model_norms import RMSNorm, hidden_norm
from .parallel import device
from .tables import LAYER_TYPES, function_of


def recomputed(config, function, *tensors):
    """function(*tensors), computed again in the backward pass."""
    if config.fp8:
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        group = parallel_state.get_tensor_model_parallel_group()
        return te_checkpoint(function, False, tracker, group, *tensors)
    return tensor_parallel.checkpoint(function, False, *tensors)


class Residual(torch.nn.Module):
    """residual + multiplier * dropout(norm(x)), with the norm and multiplier of some families."""

    def __init__(self, config):
        super().__init__()
        self.dropout = config.hidden_dropout
        self.fused = config.bias_dropout_fusion
        self.multiplier = config.residual_multiplier
        self.norm = None
        if config.post_norms:
            self.norm = hidden_norm(config)

    def forward(self, x_with_bias, residual):
        if self.norm is None and self.multiplier == 1.0:
            add = get_bias_dropout_add(self.training, self.fused)
            return add(x_with_bias, residual, self.dropout)
        x, bias = x_with_bias
        if bias is not None:
            x = x + bias
        if self.norm is not None:
            x = self.norm(x)
        x = F.dropout(x, self.dropout, self.training)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        return residual + x


class Layer(MegatronModule):
    """A layer of the decoder: attention, then an MLP or experts, each with a norm and a residual.

    layer_number counts from 1 in the whole model. Takes and gives [s, b, h], or [s / tp, b, h]
    under sequence parallelism. The parts are those of this file, or Transformer Engine's, which
    apply the norms in the linears behind them.
    """

    # a checkpoint has these norms under the names of Transformer Engine's linears
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }

    def __init__(self, config, layer_number: int, pg_collection):
        super().__init__(config=config)
        self.layer_number = layer_number
        is_moe = config.is_moe_layer(layer_number - 1)
        is_te = config.transformer_impl == "transformer_engine"
        normed_here = config.pre_norms and not is_te
        self.input_layernorm = hidden_norm(config) if normed_here else IdentityOp()
        kind = config.layer_type(layer_number)
        build = function_of(LAYER_TYPES.get(kind, build_attention))
        self.self_attention = build(config, layer_number, pg_collection)
        self.self_attn_bda = Residual(config)
        normed_here = normed_here or is_te and is_moe
        self.pre_mlp_layernorm = hidden_norm(config) if normed_here else IdentityOp()
        if is_moe:
            self.mlp = Mixture(config, layer_number, pg_collection)
        else:
            parts = mlp_parts(config, has_norm=True)
            f = config.ffn_hidden_size
            self.mlp = MLP(config, parts, ffn_hidden_size=f, tp_group=pg_collection.tp)
        self.mlp_bda = Residual(config)
        scalar = torch.ones(1, device=device()) if config.layer_scalars else None
        self.register_buffer("layer_scalar", scalar)
        self.recomputes_norms = recomputes(config, "layernorm")
        self.recomputes_mlp = recomputes(config, "mlp") and not is_moe

    def forward(self, hidden_states, padding_mask=None, **of_attention):
        """padding_mask: bool [b, s], True for padding, for routers; of_attention:
        packed_seq_params, and more of Transformer Engine's attention."""
        normed, residual, drop = self._normed(self.input_layernorm, hidden_states)
        out = self.self_attention(normed, **of_attention)
        drop(out[0])
        hidden_states = self.self_attn_bda(out, residual)
        normed, residual, drop = self._normed(self.pre_mlp_layernorm, hidden_states)
        if isinstance(self.mlp, Mixture):
            out = self.mlp(normed, padding_mask=padding_mask)
        elif self.recomputes_mlp:
            out = recomputed(self.config, self.mlp, normed)
        else:
            out = self.mlp(normed)
        drop(out[0])
        out = self.mlp_bda(out, residual)
        return out if self.layer_scalar is None else out * self.layer_scalar

    def _normed(self, norm, x):
        """(norm of x, x for the residual, a function of what was computed of the norm: it drops a
        norm that is computed again)."""
        if self.recomputes_norms and not isinstance(norm, IdentityOp):
            again = tensor_parallel.CheckpointWithoutOutput()
            return again.checkpoint(norm, x), x, again.discard_output_and_register_recompute
        has_gradient = torch.is_grad_enabled() and x.requires_grad
        if isinstance(norm, RMSNorm) and has_gradient and compiles(x):
            return *norm(x, beside=True), _nothing
        return norm(x), x, _nothing

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        apply_prefix_mapping(state, {prefix + k: prefix + v for k, v in self.names.items()})
        return state


def _nothing(output) -> None:
    """Keep a norm."""


def build_layer(config, layer_number: int, pg_collection):
    """A layer; its weights in 8 bits if they are kept so (fp8_param)."""
    with get_fp8_context(config, layer_number - 1, is_init=True):
        return Layer(config, layer_number, pg_collection)


class Block(MegatronModule):
    """The layers of a pipeline stage (or virtual stage), and the norm after the last of all.

    forward(hidden_states [s, b, h] of the embedding, or None on later stages, which take
    `input_tensor`; more to add to the output of each of the first layers; keywords of
    Layer.forward) -> [s, b, h].
    """

    def __init__(self, config, pre_process: bool, post_process: bool, vp_stage, pg_collection):
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.pre_process = pre_process
        self.input_tensor: torch.Tensor | None = None  # set by megatron's schedules
        first = get_transformer_layer_offset(config, vp_stage=vp_stage) + 1
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage))
        self.layers = torch.nn.ModuleList(
            build_layer(config, number, pg_collection) for number in numbers
        )
        is_last = post_process
        if config.mtp_num_layers:  # layers for prediction may stand on a stage without others
            is_last = config.num_layers in numbers
        self.final_layernorm = None
        if is_last:
            self.final_layernorm = hidden_norm(config)

    def forward(self, hidden_states, *added, **shared):
        config = self.config
        if not self.pre_process:
            hidden_states = self.input_tensor
        # the pipeline frees the storage of what it has sent: no view of it may live on
        viewless = functools.partial(make_viewless_tensor, requires_grad=True, keep_graph=True)
        hidden_states = viewless(hidden_states)
        if config.recompute_granularity is not None and torch.is_grad_enabled():
            # recomputation gives no gradient at all to a unit without an input that needs one, as
            # after a frozen embedding (tensor_parallel/random.py, CheckpointFunction)
            hidden_states.requires_grad_(True)
        with contextlib.ExitStack() as stack:
            if config.sequence_parallel:
                stack.enter_context(tensor_parallel.get_cuda_rng_tracker().fork())
            if config.fp8_recipe == "delayed":  # one context for all layers; else one each
                stack.enter_context(get_fp8_context(config))
            for layers, again in self._units():
                run = functools.partial(self._run, layers, shared)
                if again:
                    run = functools.partial(recomputed, config, run)
                # as inputs of what is recomputed: else their gradients would be lost
                hidden_states = run(hidden_states, *added[: len(layers)])
                added = added[len(layers) :]
        if self.final_layernorm is not None:
            return viewless(self.final_layernorm(hidden_states))
        is_empty = not self.pre_process and not len(self.layers)
        return hidden_states.clone() if is_empty else hidden_states  # not the sent tensor itself

    def _units(self):
        """(layers, True if they are recomputed together), in their order."""
        if self.config.recompute_granularity != "full" or not self.training:
            return [(self.layers, False)]
        count = self.config.recompute_num_layers
        if self.config.recompute_method == "block":
            return [([layer], i < count) for i, layer in enumerate(self.layers)]
        starts = range(0, len(self.layers), count)
        return [(self.layers[start : start + count], True) for start in starts]

    def _run(self, layers, shared, hidden_states, *added):
        one_each = self.config.fp8_recipe != "delayed"
        for i, layer in enumerate(layers):
            number = layer.layer_number - 1
            with get_fp8_context(self.config, number) if one_each else contextlib.nullcontext():
                hidden_states = layer(hidden_states, **shared)
            if i < len(added):
                hidden_states = hidden_states + added[i]
        return hidden_states

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """megatron's ShardedTensors: layers of one kind stacked along an axis, else each by its
        number."""
        state = {}
        config = self.config
        differ = config.linear_layers or config.full_kv_channels
        one_kind = config.moe_layer_freq == 1 and not differ
        for i, layer in enumerate(self.layers):
            number = layer.layer_number - 1
            here = f"{prefix}layers.{i}."
            offsets = []
            name = f"{prefix}layers.{number}."
            if one_kind:
                offsets = [(0, number, config.num_layers)]
                name = f"{prefix}layers."
            of_layer = layer.sharded_state_dict(here, offsets, metadata)
            replace_prefix_for_sharding(of_layer, here, name)
            state |= of_layer
        if self.final_layernorm is not None:
            name = f"{prefix}final_layernorm."
            shared = dict(metadata=metadata, tp_group=self.tp_group)
            state |= sharded_state_dict_default(self.final_layernorm, name, **shared)
        return state


# ---- multi-token prediction


class PredictionLayer(MegatronModule):
    """One extra layer; layer_number counts them from 1."""

    def __init__(self, config, layer_number: int, pg_collection):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.enorm = hidden_norm(config)
        self.hnorm = hidden_norm(config)
        self.eh_proj = DuplicatedLinear(config, 2 * config.hidden_size, config.hidden_size)
        number = config.num_layers + layer_number
        self.transformer_layer = build_layer(config, number, pg_collection)
        self.final_layernorm = hidden_norm(config)

    @property
    def mtp_model_layer(self):
        """The layer under the name that megatron's schedules know from 0.17 on."""
        return self.transformer_layer

    def forward(self, embedded, hidden_states, **shared):
        """embedded, hidden_states [s, b, h], or [s / tp, b, h] under sequence parallelism -> the
        next hidden_states. shared: keywords of Layer.forward."""

        def run(embedded, hidden_states):
            both = torch.cat((self.enorm(embedded), self.hnorm(hidden_states)), -1)
            hidden_states = self.transformer_layer(self.eh_proj(both), **shared)
            return self.final_layernorm(hidden_states)

        if self.training and self.config.recompute_granularity == "full":
            return recomputed(self.config, run, embedded, hidden_states)
        return run(embedded, hidden_states)


class Predictions(MegatronModule):
    """The layers for multi-token prediction, all on the last pipeline stage."""

    def __init__(self, config, pg_collection):
        super().__init__(config=config)
        numbers = range(1, config.mtp_num_layers + 1)
        self.layers = torch.nn.ModuleList(
            PredictionLayer(config, number, pg_collection) for number in numbers
        )

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = {}
        for i, layer in enumerate(self.layers):
            state |= layer.sharded_state_dict(f"{prefix}layers.{i}.", (), metadata)
        return state
