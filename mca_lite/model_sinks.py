"""Attention sinks: a learned score of each head that takes a share of its softmax, without a value.

    p = softmax([q k^T scale, sink]),   out = sum of p v over the keys
    lse' = log(sum of exp(q k^T scale) + exp(sink)),   out = out without sink * exp(lse - lse')

As in transformers' GptOssAttention. Letters: n heads, g query groups, d channels of a head, T
tokens.
"""

import torch
import torch.nn.functional as F


def whole_scores(q, k, v, visible, scale, dropout: float, cap: float | None = None, sinks=None):
    """softmax(cap tanh(q k^T scale / cap)) v with all scores in memory, the softmax in float32.

    q [b, n, q, d], k and v [b, g, k, d], visible bool [q, k] -> [b, n, q, d]. scale None: d **
    -0.5. cap None: scores as they are. sinks [n]: a further score of each query of a head.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : k.shape[-2]].to(q.dtype)
    return F.dropout(weights, dropout) @ v


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
