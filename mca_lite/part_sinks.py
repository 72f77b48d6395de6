"""Attention sinks: a learned score of each head that takes a share of its softmax, without a value.

    p = softmax([q k^T scale, sink]),   out = sum of p v over the keys
    lse' = log(sum of exp(q k^T scale) + exp(sink)),   out = out without sink * exp(lse - lse')

As in transformers' GptOssAttention. Letters: n heads, g query groups, d channels of a head, T
tokens.
"""

import torch


class FlashWithSinks(torch.autograd.Function):
    """Packed causal attention with sinks on CUDA, by torch's flash kernels.

    Their backward pass makes the probabilities exp(score - lse) again, and the gradient of scores,
    probability * (dP - sum of dO O), of what it is given: of lse' and the output with sinks both
    are those with sinks. varlen_attn's own backward pass has no gradient for its lse.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, cu_q, cu_k, max_q: int, max_k: int, scale, window):
        """q [T, n, d], k and v [T, g, d], sinks [n], cu_q and cu_k int32 [documents + 1], window:
        tokens that a query sees, None for all -> [T, n, d]."""
        ctx.of_rows = cu_q, cu_k, max_q, max_k, 0.0, window is None
        ctx.keys = dict(scale=scale, window_size_left=(window or 0) - 1, window_size_right=0)
        # the operators of varlen_attn and of scaled_dot_product_attention
        answer = torch.ops.aten._flash_attention_forward(q, k, v, *ctx.of_rows, False, **ctx.keys)
        out, lse, *random = answer[:4]  # lse float32 [n, T]
        total = torch.logaddexp(lse, sinks.float()[:, None])
        kept = (lse - total).exp().t()
        out = (out * kept[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total, *random)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, sinks, out, total, *random = ctx.saved_tensors
        grad = grad.contiguous()
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, total, *ctx.of_rows, *random, **ctx.keys
        )
        inner = (grad.float() * out.float()).sum(-1).t()  # [n, T]
        d_sinks = -((sinks.float()[:, None] - total).exp() * inner).sum(1)
        return d_q, d_k, d_v, d_sinks.to(sinks.dtype), *[None] * 6
