"""Multi-latent attention (DeepSeek's), built of megatron's tensor-parallel linears and our own core attention.

Letters: s sequence (of this rank), b batch, h hidden size, n heads of this rank, c and r the channels of a head that stay and
that turn with the position, d channels of a value.

    query       [s, b, n, c + r]   linear_q_proj h, or linear_q_up_proj norm(linear_q_down_proj h)
    latent, k_r                    linear_kv_down_proj h; k_r [s, b, r] is the same for all heads
    k_c, value                     linear_kv_up_proj norm(latent)

The down projections give what every head needs, so every tensor-parallel rank has them whole. megatron's own module takes
column-cut ones without Transformer Engine, and gives their turning rows the gradient of one rank's heads only; and it sums
gradients of its latent norms twice without sequence parallelism. Names of modules are megatron's.
"""

import torch
import torch.nn.functional as F

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule

from . import parallel

LATENT_EPSILON = (
    1e-6  # of the norms between two projections: fixed in transformers, whatever rms_norm_eps says
)


class DuplicatedLinear(torch.nn.Module):
    """A linear without bias whose matrix every tensor-parallel rank has whole. x is the whole sequence, or this rank's part
    under sequence parallelism; then the matrix's gradient is a partial sum, and marked so for megatron."""

    def __init__(self, config, in_size: int, out_size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(
                out_size, in_size, dtype=config.params_dtype, device=torch.cuda.current_device()
            )
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return F.linear(x, self.weight)


class LatentAttention(MegatronModule):
    """Takes [s, b, h], or [s / tp, b, h] under sequence parallelism, gives (the same, None).

    norm and core_attention are the classes of model_layers.py. Core attention turns the first channels of each head by their
    positions, so a head's turning channels come first here; the order within a head does not matter to q k^T.
    """

    def __init__(
        self, config, layer_number, norm, core_attention, cp_comm_type=None, pg_collection=None
    ):
        super().__init__(config=config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        heads, still, turning = (
            config.num_attention_heads,
            config.qk_head_dim,
            config.qk_pos_emb_head_dim,
        )
        self.num_heads = heads // self.tp_group.size()
        self.query_sizes, self.kv_sizes = [still, turning], [still, config.v_head_dim]
        self.down_sizes = [config.kv_lora_rank, turning]
        column = dict(
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tp_group,
        )
        if config.q_lora_rank is None:
            self.linear_q_proj = ColumnParallelLinear(
                config.hidden_size, heads * (still + turning), **column
            )
        else:
            rank = config.q_lora_rank
            self.linear_q_down_proj = DuplicatedLinear(config, config.hidden_size, rank)
            self.q_layernorm = norm(config, rank, LATENT_EPSILON)
            self.linear_q_up_proj = ColumnParallelLinear(rank, heads * (still + turning), **column)
        rank = config.kv_lora_rank
        self.linear_kv_down_proj = DuplicatedLinear(
            config, config.hidden_size, sum(self.down_sizes)
        )
        self.kv_layernorm = norm(config, rank, LATENT_EPSILON)
        self.linear_kv_up_proj = ColumnParallelLinear(rank, heads * sum(self.kv_sizes), **column)
        self.core_attention = core_attention(
            config,
            layer_number,
            None,
            "self",
            softmax_scale=config.softmax_scale,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        self.linear_proj = RowParallelLinear(
            heads * config.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )
        self.recomputes_core = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def forward(self, hidden_states, attention_mask=None, packed_seq_params=None, **unused):
        query, key, value = self._query_key_value(hidden_states)
        if packed_seq_params is not None:
            query, key, value = (x.squeeze(1) for x in (query, key, value))

        def core(*tensors):
            return self.core_attention(
                *tensors, attention_mask, packed_seq_params=packed_seq_params
            )

        if self.recomputes_core and self.training:
            out = tensor_parallel.checkpoint(core, False, query, key, value)
        else:
            out = core(query, key, value)
        return self.linear_proj(out)

    def _query_key_value(self, hidden_states):
        if self.config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(
                self.q_layernorm(self.linear_q_down_proj(hidden_states))
            )
        latent, k_turning = self.linear_kv_down_proj(hidden_states).split(self.down_sizes, -1)
        if self.config.sequence_parallel:
            k_turning = gather_from_sequence_parallel_region(
                k_turning.contiguous(), tensor_parallel_output_grad=True, group=self.tp_group
            )
        elif self.tp_group.size() > 1:
            k_turning = parallel.sum_gradients(k_turning, self.tp_group)
        kv, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        q_still, q_turning = query.unflatten(-1, (self.num_heads, -1)).split(self.query_sizes, -1)
        k_still, value = kv.unflatten(-1, (self.num_heads, -1)).split(self.kv_sizes, -1)
        k_turning = k_turning[:, :, None].expand(-1, -1, self.num_heads, -1)
        return torch.cat((q_turning, q_still), -1), torch.cat((k_turning, k_still), -1), value
