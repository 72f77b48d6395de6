"""RMS norms: of hidden states and single heads, and of all heads together.

Letters: s sequence of this rank, b batch, d channels of a head.
"""

import torch
from torch.distributed.nn.functional import all_reduce

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core import parallel_state
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from .model_fused import norm_beside, rms_norm


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension, the mean square in float32, as in Hugging Face's
    decoders. Weights around zero (Gemma's) get 1 added, and multiply before the rounding.

    The weight is marked for megatron where the sequence is cut over tensor-parallel ranks: its
    gradient is a partial sum.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self._beside = None, None  # what the next call is given, and its answer

    def forward(self, x=None, beside: bool = False):
        """x normed. Without x the weight, for a kernel that norms by itself; it is asked for by a
        call, since the hooks of overlap_param_gather wait for the weight in one. beside: x itself,
        to be used with its norm, for which it is given back in the next call: norm_beside."""
        if x is None:
            return self.weight
        if beside:
            normed, x = norm_beside(x, self.weight, self.eps, self.zero_centered)
            self._beside = x, normed
            return x
        (given, normed), self._beside = self._beside, (None, None)
        if x is given:
            return normed
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


class RMSNormOverHeads(torch.nn.Module):
    """RMS norm of queries or keys over all their heads together.

    x [s, b, heads of this rank, d], weight [heads * d]. Tensor parallelism cuts the weight with the
    heads; the mean square is taken over all ranks.
    """

    def __init__(self, config, hidden_size: int, heads: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        size = heads * hidden_size // self.tp_group.size()
        self.weight = torch.nn.Parameter(
            torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.eps, self.width = eps, heads * hidden_size

    def forward(self, x):
        flat = x.flatten(-2).float()
        squares = flat.square().sum(-1, keepdim=True)
        if self.tp_group.size() > 1:
            # each rank goes on from the sum by itself: gradients are summed too
            squares = all_reduce(squares, group=self.tp_group)
        normed = flat * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * normed.to(x.dtype)).view(x.shape)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)
