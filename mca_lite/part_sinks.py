"""Attention sinks: each head has a learned score without a value, which takes a share of its
softmax.

    p = softmax([q k^T scale, sink]),   out = sum over the keys of p v
    lse' = log(sum of exp(q k^T scale) + exp(sink)),   out = (out without sink) * exp(lse - lse')

As in transformers' GptOssAttention. Letters: n heads, g query groups, d channels per head, T
tokens.
"""

from typing import Any

import torch

from .kernels import compiles, jit, launch, tl, triton

_SINKS_BLOCK = 4096  # numbers of a program


@jit
def _places(tokens, heads, d: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Find what one program reads and writes, for ROWS pairs of a token and a head -> (the pairs'
    heads, mask of existing pairs, their places in [n, T], mask of existing channels, places of the
    channels in [T, n, d])."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < tokens * heads
    head = row % heads
    column = tl.arange(0, BLOCK)
    inside = exists[:, None] & (column < d)[None, :]
    return head, exists, head * tokens + row // heads, inside, row[:, None] * d + column[None, :]


@jit
def _with_sinks_kernel(
    out, lse, sinks, with_sinks, total, tokens, heads, d: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    head, exists, of_head, inside, place = _places(tokens, heads, d, ROWS, BLOCK)
    sink = tl.load(sinks + head, exists, 0.0).to(tl.float32)
    before = tl.load(lse + of_head, exists, 0.0)
    most = tl.maximum(before, sink)
    after = most + tl.log(tl.exp(before - most) + tl.exp(sink - most))
    tl.store(total + of_head, after, exists)
    value = tl.load(out + place, inside, 0.0).to(tl.float32)
    tl.store(with_sinks + place, value * tl.exp(before - after)[:, None], inside)


@jit
def _of_sinks_kernel(
    grad, out, total, sinks, parts, tokens, heads, d: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    head, exists, of_head, inside, place = _places(tokens, heads, d, ROWS, BLOCK)
    inner = tl.load(grad + place, inside, 0.0).to(tl.float32)
    inner = tl.sum(inner * tl.load(out + place, inside, 0.0).to(tl.float32), 1)
    sink = tl.load(sinks + head, exists, 0.0).to(tl.float32)
    sink = tl.exp(sink - tl.load(total + of_head, exists, 0.0))
    tl.store(parts + of_head, -sink * inner, exists)


def _launch(kernel: Any, first: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Run a kernel over the heads of all tokens of `first` [T, n, d]. All tensors: contiguous."""
    tokens, heads, d = first.shape
    block = triton.next_power_of_2(d)
    rows = max(_SINKS_BLOCK // block, 1)
    grid = (triton.cdiv(tokens * heads, rows),)
    launch(kernel, grid, first, *tensors, tokens, heads, d, rows, block)


def with_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add sinks [n] to the softmax of an attention that was computed without them -> (output
    [T, n, d], log-sum-exp of the scores, float32 [n, T]). out, lse: the same two without sinks.
    `out` is not overwritten, because part_long may keep it for the backward pass."""
    if compiles(out):
        out = out.contiguous()
        lse = lse.contiguous()
        results = torch.empty_like(out), torch.empty_like(lse)
        _launch(_with_sinks_kernel, out, lse, sinks, *results)
        return results
    total = torch.logaddexp(lse, sinks.float()[:, None])
    kept = (lse - total).exp().t()
    return (out * kept[..., None]).to(out.dtype), total


def gradient_of_sinks(
    grad: torch.Tensor, out: torch.Tensor, total: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """The gradient of sinks [n]. grad: that of the output, contiguous. out, total: with_sinks()'s
    results, the output [T, n, d] and log-sum-exp float32 [n, T]."""
    if compiles(grad):
        parts = torch.empty_like(total)
        _launch(_of_sinks_kernel, grad, out, total, sinks, parts)
    else:
        inner = (grad.float() * out.float()).sum(-1).t()
        parts = -(sinks.float()[:, None] - total).exp() * inner
    return parts.sum(1).to(sinks.dtype)


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
        out, total = with_sinks(out, lse, sinks)
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
        return d_q, d_k, d_v, gradient_of_sinks(grad, out, total, sinks), *[None] * 6
