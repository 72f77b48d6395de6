"""Norms over hidden states, and over queries and keys."""

from typing import Any, ClassVar

import torch
from torch.distributed.nn.functional import all_reduce

from .kernels import norm_beside, rms_norm
from .mcore import TENorm, TransformerConfig, make_sharded_tensors_for_checkpoint, parallel_state
from .model_moe import new_weight


class RMSNorm(torch.nn.Module):
    """RMS norm over the last dimension: x / rms(x) * weight, normalised in float32 as in Hugging
    Face's decoders. With layernorm_zero_centered_gamma (Gemma), 1 is added to the weight, and the
    result is rounded after the multiplication.

    Under sequence parallelism, each rank's gradient of the weight covers only its own tokens (or
    heads). The weight is marked so that megatron sums these gradients.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ):
        super().__init__()
        self.weight = new_weight(config, hidden_size)
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor | None = None, beside: bool = False) -> Any:
        """Apply the norm -> norm(x). If `beside`: (norm(x), x), of which the second is for the
        residual; one kernel can then add both gradients in backward (kernels.norm_beside).

        Without x, the result is the weight, for a kernel that includes the norm. Read the weight by
        this call: hooks of DDP's overlap_param_gather wait for the weight when the module is
        called.
        """
        if x is None:
            return self.weight
        norm = norm_beside if beside else rms_norm
        return norm(x, self.weight, self.eps, self.zero_centered)


def hidden_norm(config: TransformerConfig) -> torch.nn.Module:
    """Build a norm over hidden states: Transformer Engine's, or RMSNorm with local layers."""
    norm = TENorm if config.transformer_impl == "transformer_engine" else RMSNorm
    return norm(config, config.hidden_size, config.layernorm_epsilon)


class Sharded(torch.nn.Module):
    """Base class of modules whose tensors are sharded over tensor-parallel ranks like attention
    heads. axes: {tensor name: its sharded axis}."""

    axes: ClassVar = {"weight": 0}

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """{name: megatron's ShardedTensor} of the module, for a distributed checkpoint."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, self.axes, sharded_offsets)


class RMSNormOverHeads(Sharded):
    """RMS norm of queries or keys over all heads of a token together, rather than over each head.

    x: [s, b, heads on this rank, d] (s tokens, b sequences, d channels per head); weight: [heads on
    this rank * d]. Tensor parallelism shards the weight like the heads, and the mean square is
    taken over the heads of all these ranks. Collective over them, if there are several: one
    all-reduce in each pass.
    """

    heads = "num_attention_heads"  # config field: how many heads share the norm

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ):
        super().__init__()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        heads = getattr(config, self.heads)
        self.weight = new_weight(config, heads * hidden_size // self.tp_group.size())
        self.eps = eps
        self.width = heads * hidden_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(-2).float()
        squares = flat.square().sum(-1, keepdim=True)
        if self.tp_group.size() > 1:
            squares = all_reduce(squares, group=self.tp_group)  # sums gradients too
        normed = flat * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * normed.to(x.dtype)).view(x.shape)


class RMSNormOverGroups(RMSNormOverHeads):
    """RMS norm of keys over all heads of a token together: RMSNormOverHeads, whose number of heads
    is that of the query groups."""

    heads = "num_query_groups"


def head_norms(config: TransformerConfig, norm: Any) -> tuple[Any, Any] | None:
    """The classes of the norms of queries and keys, as (of queries, of keys); None if the model has
    no such norms. norm: the class to use if each head is normed by itself."""
    if config.qk_norm_over_heads:
        return RMSNormOverHeads, RMSNormOverGroups
    return (norm, norm) if config.qk_layernorm else None
