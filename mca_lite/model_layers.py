"""The layers of a decoder, built from this package's parts on megatron's tensor-parallel linears,
or from Transformer Engine's.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .kernels import compiles
from .mcore import (
    MLP,
    IdentityOp,
    MegatronModule,
    ProcessGroupCollection,
    TransformerConfig,
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
from .model_attention import build_attention, recomputes
from .model_linears import zeros_from
from .model_moe import Mixture, mlp_parts
from .model_norms import RMSNorm, hidden_norm
from .parallel import device
from .tables import LAYER_TYPES, function_of


def recomputed(
    config: TransformerConfig, function: Callable[..., Any], *tensors: torch.Tensor
) -> Any:
    """Call function(*tensors) under activation checkpointing -> its result. The activations inside
    are dropped, and computed again in the backward pass. If the config has recompute_keep or
    activation_offloading, part_long.py does this."""
    checkpoint = functools.partial(_checkpoint, config)
    if config.recompute_keep or config.activation_offloading:
        return function_of("part_long:checkpointed")(config, checkpoint, function, *tensors)
    return checkpoint(function, *tensors)


def _checkpoint(
    config: TransformerConfig, function: Callable[..., Any], *tensors: torch.Tensor
) -> Any:
    if config.fp8:
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        group = parallel_state.get_tensor_model_parallel_group()
        return te_checkpoint(function, False, tracker, group, *tensors)
    return tensor_parallel.checkpoint(function, False, *tensors)


class Residual(torch.nn.Module):
    """A residual connection: residual + multiplier * dropout(norm(x + bias)). The norm exists with
    post_norms; the multiplier is 1 in most models."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.dropout = config.hidden_dropout
        self.fused = config.bias_dropout_fusion
        self.multiplier = config.residual_multiplier
        self.norm = None
        if config.post_norms:
            self.norm = hidden_norm(config)

    def forward(
        self, x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor
    ) -> torch.Tensor:
        """Add a module's output to the residual stream -> a tensor like x. x_with_bias: (the output
        x [s, b, h], its bias [h] or None). residual: the stream, like x. Under sequence parallelism
        these have s / tp tokens."""
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
    """A decoder layer: attention, then an MLP or experts, each with its norms and a residual
    connection.

    [s, b, h] -> [s, b, h], or [s / tp, b, h] for both under sequence parallelism. layer_number
    counts from 1 in the whole model. With Transformer Engine, its fused linears apply the norms
    before attention and MLP; a norm before experts is a module by itself.
    """

    # norms are saved under Transformer Engine's names: both implementations read a checkpoint
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection
    ):
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
        if config.recompute_keep or config.mlp_chunk_size:
            function_of("part_long:prepare")(self, config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        ends_unit: bool = False,
        **of_attention: Any,
    ) -> torch.Tensor:
        """Return the layer's output for hidden_states, in the same shape [s, b, h], or [s / tp, b,
        h] under sequence parallelism.

        padding_mask: bool [b, s] (or [b, s / tp]), True for padding; only the router of a MoE layer
        uses it. ends_unit: the layer is the last of a recomputed unit, so that nobody reads the
        values of its output in the recomputation: its last matmul may then be left out.
        of_attention: packed_seq_params and other keywords of the attention module.
        """
        normed, residual, drop = self._normed(self.input_layernorm, hidden_states)
        out = self.self_attention(normed, **of_attention)
        drop(out[0])
        hidden_states = self.self_attn_bda(out, residual)
        normed, residual, drop = self._normed(self.pre_mlp_layernorm, hidden_states)
        if self.recomputes_mlp:
            out = recomputed(self.config, functools.partial(self._mlp, True, None), normed)
        else:
            out = self._mlp(ends_unit and self.mlp_bda.norm is None, padding_mask, normed)
        drop(out[0])
        out = self.mlp_bda(out, residual)
        return out if self.layer_scalar is None else out * self.layer_scalar

    def _mlp(self, ends_unit: bool, padding_mask: torch.Tensor | None, x: torch.Tensor) -> Any:
        """Apply the layer's MLP or experts to x -> (output, its bias or None). padding_mask: True
        for padding, as in forward(); only a router uses it. ends_unit: True if this ends a unit of
        layers or modules that is recomputed in the backward pass. With gradients enabled, which is
        the recomputation, the output may then be zeros, because nobody reads it."""
        unread = ends_unit and torch.is_grad_enabled()
        if isinstance(self.mlp, Mixture):
            with zeros_from(self.mlp.experts.fc2, self, unread):
                return self.mlp(x, padding_mask=padding_mask)
        with zeros_from(self.mlp.linear_fc2.weight, self, unread):
            return self.mlp(x)

    def _normed(
        self, norm: torch.nn.Module, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], None]]:
        """(norm(x), x for the residual, a function to call with the next module's output). If norms
        are recomputed (selective recomputation of layernorm), that function frees the norm's
        output, to be computed again in backward; otherwise it does nothing."""
        if self.recomputes_norms and not isinstance(norm, IdentityOp):
            again = tensor_parallel.CheckpointWithoutOutput()
            return again.checkpoint(norm, x), x, again.discard_output_and_register_recompute
        has_gradient = torch.is_grad_enabled() and x.requires_grad
        residual = x
        if isinstance(norm, RMSNorm) and has_gradient and compiles(x):
            normed, residual = norm(x, beside=True)
        else:
            normed = norm(x)
        if has_gradient:
            normed.again = functools.partial(norm, x.detach())  # see part_quantised.py
        return normed, residual, _nothing

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """{name: ShardedTensor or another of megatron's sharded objects} of the layer. Its norms
        before attention and MLP get the names of norms inside Transformer Engine's linears
        (Layer.names), so that both implementations read the same checkpoint."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        apply_prefix_mapping(state, {prefix + k: prefix + v for k, v in self.names.items()})
        return state


def _nothing(output: torch.Tensor) -> None:
    """Do nothing, in place of the function that frees a recomputed norm's output."""


def build_layer(
    config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection
) -> Layer:
    """Build the Layer with this number (from 1), in megatron's fp8 context for the construction of
    Transformer Engine's linears. If config.weight_format is set, the matrices to which
    part_quantised.is_quantised() applies are quantised and frozen (QLoRA)."""
    with get_fp8_context(config, layer_number - 1, is_init=True):
        layer = Layer(config, layer_number, pg_collection)
    if config.weight_format is not None:
        function_of("part_quantised:quantise_layer")(layer, config)
    return layer


class Block(MegatronModule):
    """The decoder layers of a (virtual) pipeline stage, and the final norm after the model's last
    layer.

    forward(hidden_states [s, b, h], *added, **shared) -> [s, b, h], both [s / tp, b, h] under
    sequence parallelism. Stages after the first ignore hidden_states and read `input_tensor`, which
    megatron's schedule sets.
    added: one tensor per layer for the first layers, added to that layer's output.
    shared: keywords of Layer.forward.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
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
        if config.mtp_num_layers:  # the last stage may have prediction layers alone
            is_last = config.num_layers in numbers
        self.final_layernorm = None
        if is_last:
            self.final_layernorm = hidden_norm(config)

    def forward(
        self, hidden_states: torch.Tensor, *added: torch.Tensor, **shared: Any
    ) -> torch.Tensor:
        config = self.config
        if not self.pre_process:
            hidden_states = self.input_tensor
        # the pipeline schedule frees a tensor's storage after sending it: a view would break
        viewless = functools.partial(make_viewless_tensor, requires_grad=True, keep_graph=True)
        hidden_states = viewless(hidden_states)
        if config.recompute_granularity is not None and torch.is_grad_enabled():
            # recomputation gives no gradient at all to a unit without an input that needs one, as
            # after a frozen embedding (tensor_parallel/random.py, CheckpointFunction)
            hidden_states.requires_grad_(True)
        with contextlib.ExitStack() as stack:
            if config.sequence_parallel:
                stack.enter_context(tensor_parallel.get_cuda_rng_tracker().fork())
            if config.fp8_recipe == "delayed":  # one context for all layers; others: one per layer
                stack.enter_context(get_fp8_context(config))
            for layers, again in self._units():
                run = functools.partial(self._run, layers, shared, again)
                if again:
                    run = functools.partial(recomputed, config, run)
                # passed as inputs: recomputation would lose the gradients of captured tensors
                hidden_states = run(hidden_states, *added[: len(layers)])
                added = added[len(layers) :]
        if self.final_layernorm is not None:
            return viewless(self.final_layernorm(hidden_states))
        is_empty = not self.pre_process and not len(self.layers)
        # a stage without layers must not send on the very tensor that it received
        return hidden_states.clone() if is_empty else hidden_states

    def _units(self) -> list[tuple[Any, bool]]:
        """Group the layers by recomputation: [(layers, True if these are recomputed in the backward
        pass as one unit)], in order. recompute_granularity, recompute_method and
        recompute_num_layers decide. In evaluation mode no unit is recomputed."""
        if self.config.recompute_granularity != "full" or not self.training:
            return [(self.layers, False)]
        count = self.config.recompute_num_layers
        if self.config.recompute_method == "block":
            return [([layer], i < count) for i, layer in enumerate(self.layers)]
        starts = range(0, len(self.layers), count)
        return [(self.layers[start : start + count], True) for start in starts]

    def _run(
        self,
        layers: Any,
        shared: dict[str, Any],
        again: bool,
        hidden_states: torch.Tensor,
        *added: torch.Tensor,
    ) -> torch.Tensor:
        """Apply `layers` one after another to hidden_states. shared: keywords of Layer.forward.
        again: True if these layers are recomputed in the backward pass as one unit. added: one
        tensor for each of the first layers, which is added to its output."""
        one_each = self.config.fp8_recipe != "delayed"
        for i, layer in enumerate(layers):
            number = layer.layer_number - 1
            with get_fp8_context(self.config, number) if one_each else contextlib.nullcontext():
                ends_unit = again and layer is layers[-1]
                hidden_states = layer(hidden_states, ends_unit=ends_unit, **shared)
            if i < len(added):
                hidden_states = hidden_states + added[i]
        return hidden_states

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """{name: ShardedTensor or another of megatron's sharded objects} of the stage. With a
        moe_layer_freq of 1, no linear attention and no full_kv_channels, the layers' tensors are
        stacked over layers along a new first axis. Otherwise their names contain the layer index,
        as in "layers.7."."""
        state: dict[str, Any] = {}
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
