"""A frozen weight and its LoRA adapter in one matmul: of a linear, and of an MoE layer's experts.

Letters: n experts on this rank, T tokens, r rank, c the sum of the ranks of a weight's
projections.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .mcore import mappings


def with_room(
    weight: torch.Tensor, columns: int, rooms: dict[torch.Size, torch.Tensor], rows: int = 0
) -> torch.Tensor:
    """Store a weight [.., out, in] in a buffer [.., out, in + columns] -> the buffer. The free
    columns after the weight are for the adapter's matrix B, so that one matmul can use both.

    The first call moves the weight's data into a new buffer and lets the weight point there. Later
    calls return this buffer, or make a new one if the weight was moved or cast since. A quantised
    weight is instead decoded into a new buffer at each call.
    rooms: these buffers by weight shape, changed in place. rows: free rows for the adapter's matrix
    A below the weight; the buffer is then [n, out + rows, in + columns] for a weight [n, .., in].
    0: none."""
    room = rooms.get(weight.shape)
    *lead, inputs = weight.shape
    if rows:
        lead = [lead[0], math.prod(lead[1:])]
    outputs = lead[-1]
    shape = *lead[:-1], outputs + rows, inputs + columns
    if hasattr(weight, "whole"):
        room = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        if rows:
            room[:, outputs:] = 0
            room[..., inputs:] = 0
        weight.whole(room[..., :outputs, :inputs])
        return room
    if room is None or room.data_ptr() != weight.data_ptr() or room.dtype != weight.dtype:
        room = rooms[weight.shape] = weight.new_zeros(shape)
        own = room[..., :outputs, :inputs]
        weight.data = own.view(weight.shape).copy_(weight)
    return room


def _float_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute left^T right as float32, for the gradient of a LoRA matrix. left: [tokens, m]. right:
    [tokens, k]. CUDA returns its float32 sums; on a CPU the product is first rounded to the inputs'
    dtype."""
    if left.is_cuda:
        return torch.mm(left.t(), right, out_dtype=torch.float32)
    return (left.t() @ right).float()


class AdaptedProduct(torch.autograd.Function):
    """Autograd function: a frozen linear with its LoRA adapter, x W^T + scale (x A^T) B^T, plus the
    linear's bias. It is one matmul, [x, scale x A^T] [W, B]^T, so that the sum is rounded only
    once: added to an already rounded x W^T, a contribution far below its last digit would be lost.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        room: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float | torch.Tensor,
        group: torch.distributed.ProcessGroup | None = None,
        again: Callable[[], torch.Tensor] | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply a frozen linear with its LoRA adapter: x W^T + scale (x A^T) B^T, [..., out].

        room: with_room's buffer for `weight`, into whose free columns B is written; None: the
        result is zeros, with the same gradients.
        scale: a number, or a factor for each row of A.
        group: the ranks of sequence parallelism, each with a part of the sequence in x. x is
        gathered, so the result covers the whole sequence, and each rank gets the gradients of x and
        A for its part. Collective over the group in both passes. None: x is not gathered.
        again: a function that computes x once more, for the backward pass, which then needs no
        saved x; None: x is saved. bias: [out], added to the result; None: none."""
        a = a.to(x.dtype)
        b = b.to(x.dtype)
        whole = x
        if group is not None:
            whole = mappings._gather_along_first_dim(x, group)
        flat = whole.reshape(-1, x.shape[-1])
        low = (flat @ a.t()).mul_(scale)
        ctx.save_for_backward(x if again is None else None, weight, a, b, low)
        ctx.scale = scale
        ctx.group = group
        ctx.again = again
        if room is None:
            return x.new_zeros(*whole.shape[:-1], len(b))
        room[:, x.shape[-1] :].copy_(b)
        return F.linear(torch.cat([flat, low], 1), room, bias).view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        if ctx.again is not None:
            x = ctx.again()
            ctx.again = None  # the node outlives its backward pass, and holds what x is made of
        flat = x.reshape(-1, x.shape[-1])
        grad = grad.reshape(-1, grad.shape[-1])
        d_low = (grad @ b).mul_(ctx.scale)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = _to_part((d_low @ a).addmm_(grad, weight), ctx.group).view(x.shape)
        d_a = _float_product(_to_part(d_low, ctx.group), flat)
        d_b = _float_product(grad, low)
        d_bias = grad.float().sum(0).to(grad.dtype) if ctx.needs_input_grad[8] else None
        return d_x, None, None, d_a, d_b, None, None, None, d_bias


def _to_part(partial: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
    """Sum a gradient over the ranks of sequence parallelism -> this rank's part along the first
    axis; collective. If group is None, return `partial`."""
    if group is None:
        return partial
    return mappings._reduce_scatter_along_first_dim(partial, group)


def _parts(room: torch.Tensor, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views into the buffer of AdaptedExperts: (W with B beside it, scale * A, B). room: the
    buffer, [n, out + c, in + c]. inputs: the size `in`."""
    columns = room.shape[2] - inputs
    both = room[:, :-columns]
    return both, room[:, -columns:, :inputs], both[..., inputs:]


class AdaptedExperts(torch.autograd.Function):
    """Autograd function: frozen experts with their LoRA adapters. For each expert it computes [x,
    low] [W, B]^T with low = scale x A^T, in one grouped matmul, whose result is rounded only once.
    The gradient of x is [grad, grad B] [W; scale A]. Copies of A and B are not kept for backward,
    and neither is x, if it can be computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        room: Callable[[Any], Any],
        spans: list[tuple[slice, slice]],
        scale: float,
        multiply: Callable[..., torch.Tensor],
        again: Callable[[], torch.Tensor] | None,
        is_read: bool,
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        """W x + scale * B A x of each token's expert: x [T, in], T tokens sorted by expert -> [T,
        out].

        room(filling): returns a buffer [n, out + c, in + c] for the n experts on this rank. W is in
        [:, :out, :in], scale * A in the c rows below it, and B in the c columns beside it; c is the
        sum of the projections' ranks, padded. filling: None, or the `filling` of an earlier buffer,
        whose A and B are not written again if they are still there.
        spans: for each projection with an adapter, the slice of c that its rank takes, and the
        slice of `out` that it computes.
        multiply(x, w): multiplies each expert's tokens by w^T of this expert; for a w [T, c] it
        gives x^T w of each expert's rows instead.
        again: computes x once more, for backward; None: x is saved. is_read: False if nobody reads
        the output, which is then zeros with the same gradients; only for a single projection.
        matrices: A [n, r, in] of each of these projections, with rank r, then their B; only they
        and x get gradients. Projections that share A count as one."""
        ctx.save_for_backward(x if again is None else None)
        ctx.constants = room, spans, scale, multiply
        ctx.again = again
        ctx.filling = None
        if not is_read:
            return x.new_zeros(len(x), matrices[-1].shape[1])
        whole = room(None)
        ctx.filling = whole.filling
        both, a, _ = _parts(whole, x.shape[1])
        return multiply(torch.cat([x, multiply(x, a)], 1), both)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        [x] = ctx.saved_tensors
        room, spans, scale, multiply = ctx.constants
        if ctx.again is not None:
            x = ctx.again()
            ctx.again = None  # the node outlives its backward pass, and holds what x is made of
        grad = grad.contiguous()
        whole = room(ctx.filling)
        _, a, b = _parts(whole, x.shape[1])
        low = multiply(x, a)
        d_low = multiply(grad, b.mT)
        d_a = multiply(d_low, x)
        d_b = multiply(grad, low)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = multiply(torch.cat([grad, d_low], 1), whole[..., : x.shape[1]].mT)
        d_as = [d_a[:, part].float().mul_(scale) for part, _ in spans]
        d_bs = [d_b[:, rows, part].float() for part, rows in spans]
        return d_x, None, None, None, None, None, None, *d_as, *d_bs
