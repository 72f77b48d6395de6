"""Attention sinks: each head has a learned score without a value, which takes a share of its
softmax.

    p = softmax([q k^T scale, sink]),   out = sum over the keys of p v
    lse' = log(sum of exp(q k^T scale) + exp(sink)),   out = (out without sink) * exp(lse - lse')

As in transformers' GptOssAttention. Letters: n heads, g query groups, d channels per head, T
tokens.
"""

from typing import Any

import torch


class FlashWithSinks(torch.autograd.Function):
    """Packed causal attention with sinks on CUDA, by torch's flash attention kernels. A sink is a
    learned score of a head, without a value, that takes a share of the head's softmax.

    The backward kernel recomputes probabilities exp(score - lse) from the lse (log-sum-exp of the
    scores) and the output passed to it. Given the lse and output that include sinks, its gradients
    include them too. varlen_attn's backward could not be used: it has no gradient for its lse."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor,
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        max_q: int,
        max_k: int,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention over segments, such as documents: q [T, n, d], k and v [keys, g, d],
        sinks [n] (a score per head) -> [T, n, d]. cu_q, cu_k: int32 [segments + 1], borders of
        queries and of keys; a segment's last query sees its last key. max_q, max_k: most queries
        and keys in a segment. scale: factor on the scores; None: 1 / sqrt(d). window: most tokens
        that a query sees, itself included; None: no limit."""
        ctx.of_rows = cu_q, cu_k, max_q, max_k, 0.0, window is None
        ctx.keys = dict(scale=scale, window_size_left=(window or 0) - 1, window_size_right=0)
        # varlen_attn and scaled_dot_product_attention call the same operators
        answer = torch.ops.aten._flash_attention_forward(q, k, v, *ctx.of_rows, False, **ctx.keys)
        out, lse, *random = answer[:4]  # lse float32 [n, T]
        total = torch.logaddexp(lse, sinks.float()[:, None])
        kept = (lse - total).exp().t()
        out = (out * kept[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total, *random)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, total, *random = ctx.saved_tensors
        grad = grad.contiguous()
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, total, *ctx.of_rows, *random, **ctx.keys
        )
        inner = (grad.float() * out.float()).sum(-1).t()  # [n, T]
        d_sinks = -((sinks.float()[:, None] - total).exp() * inner).sum(1)
        return d_q, d_k, d_v, d_sinks.to(sinks.dtype), *[None] * 6
