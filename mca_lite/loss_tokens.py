"""Token losses without holding the logits: pure functions over hidden states and the output weight.

Letters: n rows (tokens), h hidden size, V vocabulary, tp the tensor-parallel size. Each rank holds the rows
[rank * V/tp, (rank + 1) * V/tp) of the output weight.

    loss_t = logsumexp(z_t) - z_t[y_t],   z_t = h_t W^T,   in float32

An adapter on the output weight adds l_t B^T to z_t: a second pair of factors, which takes the same way.

The logits exist only for `chunk_size` rows at a time, in the forward and again in the backward pass. Gradients are
taken in the backward pass, not in the forward one: only then may every row have a weight of its own.
"""

import functools
import operator

import torch
import torch.distributed as dist

from .constants import IGNORE_INDEX

_SLICE = 16384  # columns of the vocabulary whose weight gradient is added at once


def _all_reduce(tensor, op, group):
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def _logits(factors, rows, first, vocab_size, softcap=None):
    """float32 [rows, V/tp]: the products of the factors (hidden, weight), summed and capped; columns that only pad the
    vocabulary to a multiple of tp are -inf."""
    logits = functools.reduce(
        operator.iadd, ((hidden[rows] @ weight.t()).float() for hidden, weight in factors)
    )
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    padding = first + logits.shape[1] - vocab_size
    if padding > 0:
        logits[:, max(logits.shape[1] - padding, 0) :] = float("-inf")
    return logits


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, labels, group, vocab_size, chunk_size, softcap, *tensors):
        factors = list(zip(tensors[::2], tensors[1::2], strict=True))
        first = tensors[1].shape[0] * (group.rank() if group is not None else 0)
        kept = (labels != IGNORE_INDEX).nonzero()[:, 0]
        losses = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
        lse = torch.zeros_like(losses)
        for rows in kept.split(chunk_size) if len(kept) else ():
            logits = _logits(factors, rows, first, vocab_size, softcap)
            top = _all_reduce(logits.max(1).values, dist.ReduceOp.MAX, group)
            logits -= top[:, None]
            column = labels[rows] - first
            here = (column >= 0) & (column < logits.shape[1])
            target = logits.gather(1, column.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
            # target logit and sum of exponentials travel together: one collective for both
            both = torch.stack([torch.where(here, target, 0.0), logits.exp_().sum(1)])
            target, total = _all_reduce(both, dist.ReduceOp.SUM, group)
            # a label that no rank holds would leave the target's logit at 0, a loss that looks like any other
            unknown = (labels[rows] < 0) | (labels[rows] >= vocab_size)
            losses[rows] = (total.log() - target).masked_fill_(unknown, float("nan"))
            lse[rows] = total.log() + top
        ctx.save_for_backward(labels, lse, kept, *tensors)
        ctx.first, ctx.vocab_size, ctx.chunk_size, ctx.softcap = (
            first,
            vocab_size,
            chunk_size,
            softcap,
        )
        return losses

    @staticmethod
    def backward(ctx, grad):
        labels, lse, kept, *tensors = ctx.saved_tensors
        factors = list(zip(tensors[::2], tensors[1::2], strict=True))
        grads = [None] * len(tensors)
        for i, (tensor, needed) in enumerate(zip(tensors, ctx.needs_input_grad[5:], strict=True)):
            if needed:  # a weight's is summed over chunks of rows, in float32
                grads[i] = torch.zeros_like(tensor, dtype=torch.float32 if i % 2 else tensor.dtype)
        for rows in kept.split(ctx.chunk_size) if len(kept) else ():
            probs = _logits(factors, rows, ctx.first, ctx.vocab_size, ctx.softcap)
            # c tanh(z / c) has the slope 1 - tanh^2; where a column only pads, nothing is passed on anyway
            slope = (
                None if ctx.softcap is None else 1 - (probs / ctx.softcap).clamp_(min=-1).square_()
            )
            probs = probs.sub_(lse[rows, None]).exp_()
            column = labels[rows] - ctx.first
            here = (column >= 0) & (column < probs.shape[1])
            probs[
                torch.arange(len(rows), device=rows.device), column.clamp(0, probs.shape[1] - 1)
            ] -= here.float()
            probs = probs.mul_(grad[rows, None])
            if slope is not None:
                probs = probs.mul_(slope)
            parts = {weight.dtype: probs.to(weight.dtype) for _, weight in factors}
            del probs  # the largest tensor here, before the products
            for i, (hidden, weight) in enumerate(factors):
                d_hidden, d_weight, part = grads[2 * i], grads[2 * i + 1], parts[weight.dtype]
                chunk = hidden[rows] if d_weight is not None else None
                if d_hidden is not None:
                    d_hidden[rows] = part @ weight
                if d_weight is not None:
                    # in slices of the vocabulary: the product of a chunk, as large as the weight, is never whole in memory
                    for columns, into in zip(
                        part.split(_SLICE, 1), d_weight.split(_SLICE), strict=True
                    ):
                        into += columns.t() @ chunk
        return (
            None,
            None,
            None,
            None,
            None,
            *(g if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True)),
        )


def token_losses(
    hidden, weight, labels, group=None, vocab_size=None, chunk_size=1024, extra=None, softcap=None
):  # fmt: skip
    """Loss of each token, float32, of labels' shape; 0 where the label is IGNORE_INDEX, NaN where it is no token id.

    hidden [..., h]; weight [V/tp, h] (this rank's rows); labels [...] of hidden's leading shape, global token ids;
    group: the tensor-parallel group (None: one rank); vocab_size: the real V, columns beyond it take no part (None:
    all take part); chunk_size: rows of logits held at once; extra: (low [..., r], B [V/tp, r]), whose product is added to
    the logits; softcap: c, where the logits are capped to c tanh(z / c).

    Collectives: two all-reduces a chunk over `group`, in the forward pass. The gradient of hidden is this rank's part
    only: the caller's mapping (copy_to or gather_from of megatron) sums it. A weight that needs no gradient gets none.
    Rows without a label are dropped before any GEMM. Under autocast the GEMMs run in its dtype.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} does not belong to labels {tuple(labels.shape)}"
        )
    device, factors = hidden.device.type, (hidden, weight, *(extra or ()))
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        factors = [t.to(dtype) for t in factors]
    tp = group.size() if group is not None else 1
    vocab_size = weight.shape[0] * tp if vocab_size is None else vocab_size
    with torch.autocast(device, enabled=False):
        factors = [t.reshape(-1, t.shape[-1]) for t in factors]
        return _TokenLosses.apply(
            labels.reshape(-1), group, vocab_size, chunk_size, softcap, *factors
        ).view(labels.shape)
