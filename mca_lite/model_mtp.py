"""Multi-token prediction: extra layers in a row, of which layer k predicts the token k + 1 ahead.

    g_0 = the decoder's output
    g_k = norm(layer_k(eh_proj [enorm(embedding of the token k places ahead); hnorm(g_{k-1})]))

The embedding and the output layer are the model's own; they lie on the last pipeline stage, which
holds a copy of the embedding. With N trained tokens of the main loss, in the whole step or the
micro-batch as calculate_per_token_loss has it, the objective is (sum of main losses +
mtp_loss_scaling_factor / layers * sum of the layers' losses) / N, as in the DeepSeek-V3 report.
megatron's own module divides by other counts in its two modes, and moves tokens between ranks to
look ahead; here a batch brings what follows each token along.
"""

import torch

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    mtp_on_this_rank,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from .model_attention import DuplicatedLinear
from .model_layers import layer_spec
from .model_norms import RMSNorm


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


def prediction_spec(config, vp_stage: int | None = None):
    """What megatron's MultiTokenPredictionBlock is built from; None where this stage has none."""
    if not config.mtp_num_layers or not mtp_on_this_rank(
        config, ignore_virtual=False, vp_stage=vp_stage
    ):
        return None
    layer = layer_spec(config, config.is_moe_layer(config.num_layers))
    spec = ModuleSpec(PredictionLayer, params={"layer": layer})
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * config.mtp_num_layers)
