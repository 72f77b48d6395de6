"""Attention of late queries, as context parallelism has them: the last query sees the last of more
keys than there are queries.

torch's kernels for that shape on Hopper GPUs are half as fast as cuDNN's, which knows squares and
full rectangles alone. So the keys are taken in two parts, a rectangle of those before the first
query and a causal square, and joined by their log-sum-exps, as in ring attention (Liu et al. 2023,
"Ring Attention with Blockwise Transformers for Near-Infinite Context").
"""

import torch
from torch.autograd.function import once_differentiable

_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
_CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def suits_cudnn(q, k, v) -> bool:
    """True if cuDNN's attention takes them: half precision on CUDA, sizes of heads it knows; not
    with deterministic algorithms."""
    from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

    if not q.is_cuda or torch.are_deterministic_algorithms_enabled():
        return False
    is_one_size = q.shape[-1] == v.shape[-1]
    return is_one_size and can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, False, True))


def _forward(q, k, v, is_causal: bool, scale: float | None) -> tuple:
    """(out [b, n, q, d], log-sum-exps float32 [b, n, q, 1], more for _backward)."""
    if not q.is_cuda:
        out, lse = _CPU(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse.unsqueeze(-1), ()
    out, lse, *more, _ = _CUDNN(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
    return out, lse.view(*q.shape[:3], 1), tuple(more)


def _backward(grad, q, k, v, out, lse, more, is_causal: bool, scale: float | None):
    """Gradients of q, k and v, with out and lse of all keys."""
    if not q.is_cuda:
        return _CPU_BACKWARD(grad, q, k, v, out, lse.squeeze(-1), 0.0, is_causal, scale=scale)
    cum_q, cum_k, max_q, max_k, seed, offset = more
    of_random = seed, offset, None
    sizes = cum_q, cum_k, max_q, max_k
    return _CUDNN_BACKWARD(grad, q, k, v, out, lse, *of_random, *sizes, 0.0, is_causal, scale=scale)


class LateAttention(torch.autograd.Function):
    """softmax(q k^T scale) v, query i of the last q sees all keys but those after key k - q + i.

    q [b, n, q, d], k and v [b, g, k, d], k > q, n a multiple of g (on a CPU g) -> [b, n, q, d].
    """

    @staticmethod
    def forward(ctx, q, k, v, scale: float | None):
        more = k.shape[2] - q.shape[2]
        before = k[:, :, :more], v[:, :, :more]
        own = k[:, :, more:], v[:, :, more:]
        out1, lse1, more1 = _forward(q, *before, False, scale)
        out2, lse2, more2 = _forward(q, *own, True, scale)
        lse = torch.logaddexp(lse1, lse2)
        out = (out1 * (lse1 - lse).exp() + out2 * (lse2 - lse).exp()).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.more = more1, more2
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        more = k.shape[2] - q.shape[2]
        before = k[:, :, :more], v[:, :, :more]
        own = k[:, :, more:], v[:, :, more:]
        more1, more2 = ctx.more
        q1, k1, v1 = _backward(grad, q, *before, out, lse, more1, False, ctx.scale)
        q2, k2, v2 = _backward(grad, q, *own, out, lse, more2, True, ctx.scale)
        return q1 + q2, torch.cat((k1, k2), 2), torch.cat((v1, v2), 2), None
