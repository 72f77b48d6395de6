"""Norms of hidden states, and of queries and keys."""

import torch
from torch.distributed.nn.functional import all_reduce

from .kernels import norm_beside, rms_norm
from .mcore import TENorm, make_sharded_tensors_for_checkpoint, parallel_state
from .model_moe import new_weight


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension, the mean square in float32, as in Hugging Face's
    decoders. Weights around zero (Gemma's) get 1 added, and multiply before the rounding.

    Under sequence parallelism the weight's gradient is a partial sum, and marked so for megatron.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.weight = new_weight(config, hidden_size)
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x=None, beside: bool = False):
        """x normed; with beside (x normed, x), of which kernels.norm_beside adds both gradients.
        Without x the weight, for a kernel that includes the norm: a call, since the hooks of
        overlap_param_gather wait for the weight in one."""
        if x is None:
            return self.weight
        norm = norm_beside if beside else rms_norm
        return norm(x, self.weight, self.eps, self.zero_centered)


def hidden_norm(config):
    """A norm of hidden states, of the implementation of the layers."""
    norm = TENorm if config.transformer_impl == "transformer_engine" else RMSNorm
    return norm(config, config.hidden_size, config.layernorm_epsilon)


class RMSNormOverHeads(torch.nn.Module):
    """RMS norm of queries or keys over all their heads together.

    x [s, b, heads of this rank, d], weight [heads * d]. Tensor parallelism cuts the weight with the
    heads; the mean square is taken over all ranks. Collective: one all-reduce each way.
    """

    heads = "num_attention_heads"  # the field of the config with their number

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        heads = getattr(config, self.heads)
        self.weight = new_weight(config, heads * hidden_size // self.tp_group.size())
        self.eps = eps
        self.width = heads * hidden_size

    def forward(self, x):
        flat = x.flatten(-2).float()
        squares = flat.square().sum(-1, keepdim=True)
        if self.tp_group.size() > 1:
            squares = all_reduce(squares, group=self.tp_group)  # sums gradients too
        normed = flat * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * normed.to(x.dtype)).view(x.shape)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


class RMSNormOverGroups(RMSNormOverHeads):
    """The same of keys, over all query groups together."""

    heads = "num_query_groups"


def head_norms(config, norm) -> tuple | None:
    """(class of queries' norm, class of keys' norm), None without; norm: over one head."""
    if config.qk_norm_over_heads:
        return RMSNormOverHeads, RMSNormOverGroups
    return (norm, norm) if config.qk_layernorm else None
