"""The layers that a model is built of: plain torch ("local") or Transformer Engine. The only file that knows about TE.

Local layers need nothing but torch: a norm that knows sequence parallelism, and core attention over
scaled_dot_product_attention. Shapes: s sequence, b batch, n heads of this rank, g query groups of this rank, d head size.
"""

import functools

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


@functools.lru_cache(1)
def transformer_engine_works() -> bool:
    """Whether TE can be imported and there is a GPU for it. Without a GPU the import raises anything but ImportError."""
    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception:
        return False
    return True


def resolve_transformer_impl(asked: str) -> str:
    """ "local" or "transformer_engine" for "auto", "local" or "transformer_engine"."""
    if asked == "auto":
        return "transformer_engine" if transformer_engine_works() else "local"
    if asked == "transformer_engine" and not transformer_engine_works():
        raise ValueError(
            "transformer_impl: 'transformer_engine' was set, and Transformer Engine does not work here (it needs a GPU "
            "and `pip install mca-lite[te]`): set transformer_impl: local or auto"
        )
    return asked


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension, the mean square in float32, as Hugging Face's decoders do.

    The weight is marked for megatron where the sequence is cut over tensor-parallel ranks: its gradient is a partial sum.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x):
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # the rounding to bf16 comes before the weight, as in the Hugging Face model
        return self.weight * F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype)


class CoreAttention(MegatronModule):
    """softmax(q k^T * scale) v over torch's scaled_dot_product_attention; the signature of megatron's DotProductAttention.

    Causal, rows padded on the right: no position ever looks at padding, so no mask is built. A mask that is given,
    bool [b or 1, 1, s, s] with True meaning hidden, is obeyed.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
        **unused,
    ):
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError("the local core attention is built for context_parallel_size: 1")
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        """query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n * d]."""
        if packed_seq_params is not None or attention_bias is not None:
            raise ValueError("the local core attention takes neither packed rows nor an attention bias")
        causal = attention_mask is None or attn_mask_type == AttnMaskType.no_mask
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # dropout differs between tensor-parallel ranks, since each holds other heads
        with tensor_parallel.get_cuda_rng_tracker().fork() if dropout else _no_fork():
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if causal else ~attention_mask,
                is_causal=causal,
                dropout_p=dropout,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return out.permute(2, 0, 1, 3).flatten(2)


class _no_fork:
    def __enter__(self):
        pass

    def __exit__(self, *args):
        pass


def block_spec(config, vp_stage: int | None = None):
    """What megatron's TransformerBlock of one pipeline stage (and virtual stage) is built from."""
    if config.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
        )
        return layer  # megatron puts TE's norm at the end by itself
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = CoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage), layer_norm=RMSNorm
    )
