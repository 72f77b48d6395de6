"""A frozen weight and its LoRA adapter in one matmul: of a linear, and of an MoE layer's experts.

Letters: n experts on this rank, or of a linear n groups of heads (1 without groups); T tokens, r
rank, c the sum of the ranks of a weight's projections, padded to a multiple of 8: a GPU multiplies
matrices whose rows are no multiples of 16 bytes more slowly, and grouped ones not at all.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .mcore import mappings
from .model_linears import gives_zeros


class Factors(NamedTuple):
    """The LoRA matrices A, or the matrices B, of a weight's projections: blocks of one stack
    [n, rows, columns], which is zero elsewhere.

    matrices: float32, [n, r, in] for A or [n, out, r] for B; for B of a linear [n * out, r].
    places: the slices of the stack's axes that each takes. scale: a factor for all.
    groups: n of a linear with groups of heads. Without groups, the stack of a linear is
    [rows, columns]."""

    matrices: list[torch.Tensor]
    places: list[tuple[slice, ...]]
    scale: float = 1.0
    groups: int | None = None

    def stack(self, *shape: int) -> torch.Tensor:
        """The stack, times `scale`, with gradients; float32. For experts only. shape: [n, rows,
        columns]."""
        stack = self.matrices[0].new_zeros(shape)
        for matrix, place in zip(self.matrices, self.places, strict=True):
            stack[place] = matrix * self.scale
        return stack

    def blocks(self, stack: torch.Tensor) -> list[torch.Tensor]:
        """A view of each matrix's block in `stack`. With groups, the stack may have the rows of all
        groups along axis 0."""
        if self.groups is not None:
            stack = stack.view(self.groups, -1, stack.shape[-1])
        return [stack[place] for place in self.places]

    def leaves_gaps(self, stack: torch.Tensor) -> bool:
        """True if `stack` has elements outside the matrices' blocks, which must be zero."""
        return sum(matrix.numel() for matrix in self.matrices) < stack.numel()

    def gradients(self, of_stack: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of the matrices, float32, from the gradient of the stack.

        Where megatron's DDP gave a parameter a main_grad, its gradient is added there; the result
        is then an uninitialised tensor, which DDP's hook does not read."""
        found = []
        for matrix, block in zip(self.matrices, self.blocks(of_stack), strict=True):
            main_grad = getattr(matrix, "main_grad", None)
            if main_grad is None:
                found.append((block.float() * self.scale).reshape(matrix.shape))
                continue
            if self.groups is not None:
                main_grad = main_grad.view_as(block)
            main_grad.add_(block, alpha=self.scale)
            matrix.grad_added_to_main_grad = True
            found.append(torch.empty_like(matrix))
        return found


class Room:
    """A weight W, of a linear [n * out, in] or of experts [n, .., in], in one buffer with the
    stacks of its LoRA matrices, so that one matmul can use them. W's data moves to the buffer. A
    quantised weight is decoded into it for each use, and the buffer has memory only from
    filled_room() to release(). A linear has no stack of A, and joins the axes n and out of its
    tensors.

    a, b: the stacks, [n, c, in] and [n, out, c]; A is multiplied by its scale. both: W with B
    beside it, [n, out, in + c]. across: W with A below it, [n, out + c, in]. of_a, of_b: views of
    the matrices' blocks. filling: an object that is replaced when A and B are written."""

    def __init__(self, weight: torch.Tensor, c: int, a: Factors | None, b: Factors) -> None:
        c = -(-c // 8) * 8
        *rows, inputs = weight.shape
        if a is not None:
            rows = [rows[0], math.prod(rows[1:]) + c]
        self.both = torch.empty(*rows, inputs + c, dtype=weight.dtype, device=weight.device)
        self.storage = self.both.untyped_storage()
        self.size = self.storage.nbytes()
        self.across, self.b = self.both.split_with_sizes([inputs, c], -1)
        self.own = self.across
        self.with_gaps = []  # stacks that are not only blocks, and zero elsewhere
        if a is not None:
            self.both = self.both[:, :-c]
            self.b = self.b[:, :-c]
            self.own, self.a = self.across.split_with_sizes([rows[1] - c, c], 1)
            self.of_a = a.blocks(self.a)
            self.with_gaps += [self.a] if a.leaves_gaps(self.a) else []
        self.of_b = b.blocks(self.b)
        self.with_gaps += [self.b] if b.leaves_gaps(self.b) else []
        self.filling: object = object()
        self.is_quantised = hasattr(weight, "whole")
        if not self.is_quantised:
            self._clear()
            weight.data = self.own.view(weight.shape).copy_(weight)

    def is_of(self, weight: Any) -> bool:
        """True if this room still belongs to `weight`; False if the weight was moved or cast."""
        if self.is_quantised or hasattr(weight, "whole"):
            mine = self.is_quantised, self.b.dtype, self.b.device
            return mine == (hasattr(weight, "whole"), weight.dtype, weight.device)
        return (self.b.dtype, self.both.data_ptr()) == (weight.dtype, weight.data_ptr())

    def _clear(self) -> None:
        for stack in self.with_gaps:
            stack.zero_()

    def decode(self, weight: Any) -> None:
        """Allocate the buffer's memory, and decode the quantised weight into it."""
        self.storage.resize_(self.size)
        self._clear()
        weight.whole(self.own)

    def release(self) -> None:
        """Give up the memory of a quantised weight's room. Operations that were started before may
        still run on the device."""
        if self.is_quantised:
            self.filling = None
            self.storage.resize_(0)


def filled_room(
    weight: torch.Tensor,
    rooms: dict[torch.Size, Room],
    c: int,
    a: Factors | None,
    b: Factors,
    filling: Any,
) -> Room:
    """The Room of a weight and its LoRA matrices: the one of the last call, or a new one if the
    weight was moved or cast since.

    rooms: by weight shape, changed in place. a: None for a linear. filling: the attribute of this
    name of an earlier result, if A and B have not changed since; a room that still has it is
    returned as it is. None, or another room: A and B are written."""
    room = rooms.get(weight.shape)
    if room is None or not room.is_of(weight):
        with torch.inference_mode(False):  # it may be for training that the room is used next
            room = rooms[weight.shape] = Room(weight, c, a, b)
    elif filling is not None and room.filling is filling:
        return room
    if room.is_quantised:
        room.decode(weight)
    room.filling = object()
    if a is not None:
        for matrix, block in zip(a.matrices, room.of_a, strict=True):
            torch.mul(matrix, a.scale, out=block)
    matrices = b.matrices
    if b.groups is not None:
        matrices = [*map(torch.Tensor.view_as, matrices, room.of_b)]
    torch._foreach_copy_(room.of_b, matrices)
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
    Copies of B are not kept for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        room: Callable[[Any], Room],
        b: Factors,
        scale: float | torch.Tensor,
        group: torch.distributed.ProcessGroup | None,
        again: Callable[[], torch.Tensor] | None,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        *bs: torch.Tensor,
    ) -> torch.Tensor:
        """Apply a frozen linear with its LoRA adapter: x W^T + scale (x A^T) B^T, [..., out]. For a
        weight inside zeros_from() the result is zeros, with the same gradients.

        room(filling): gives filled_room() of `weight` and b.
        b: the matrices B, as blocks of B. bs: the same matrices, for autograd.
        scale: a number, or a factor for each row of A.
        group: the ranks of sequence parallelism, each with a part of the sequence in x. x is
        gathered, so the result covers the whole sequence, and each rank gets the gradients of x and
        A for its part. Collective over the group in both passes. None: x is not gathered.
        again: a function that computes x once more, for the backward pass, which then needs no
        saved x; None: x is saved. bias: [out], added to the result; None: none."""
        a = a.to(x.dtype)
        whole = x
        if group is not None:
            whole = mappings._gather_along_first_dim(x, group)
        flat = whole.reshape(-1, x.shape[-1])
        low = F.linear(flat, a).mul_(scale)
        ctx.save_for_backward(x if again is None else None, a, low)
        ctx.constants = room, b, scale, group
        ctx.again = again
        ctx.filling = None
        if gives_zeros(weight):
            return x.new_zeros(*whole.shape[:-1], len(weight))
        filled = room(None)
        ctx.filling = filled.filling
        parts = [flat, low]
        if padding := filled.b.shape[1] - len(a):
            parts.append(flat.new_zeros(len(flat), padding))
        try:
            out = F.linear(torch.cat(parts, 1), filled.both, bias)
        finally:
            filled.release()
        return out.view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, a, low = ctx.saved_tensors
        room, b, scale, group = ctx.constants
        if ctx.again is not None:
            x = ctx.again()
            ctx.again = None  # the node outlives its backward pass, and holds what x is made of
        flat = x.reshape(-1, x.shape[-1])
        grad = grad.reshape(-1, grad.shape[-1])
        filled = room(ctx.filling)
        d_x = None
        try:
            d_low = (grad @ filled.b[:, : len(a)]).mul_(scale)
            if ctx.needs_input_grad[0]:
                d_x = (d_low @ a).addmm_(grad, filled.across)
        finally:
            filled.release()
        if d_x is not None:
            d_x = _to_part(d_x, group).view(x.shape)
        d_a = _float_product(_to_part(d_low, group), flat)
        d_bs = b.gradients(_float_product(grad, low))
        d_bias = grad.float().sum(0).to(grad.dtype) if ctx.needs_input_grad[7] else None
        return d_x, None, None, None, None, None, None, d_bias, d_a, *d_bs


def _to_part(partial: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
    """Sum a gradient over the ranks of sequence parallelism -> this rank's part along the first
    axis; collective. If group is None, return `partial`."""
    if group is None:
        return partial
    return mappings._reduce_scatter_along_first_dim(partial, group)


def _with_columns(x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Join two matrices with equally many rows: [x, more]. If x was made by
    part_triton_moe.rows_with_room, `more` is written into the free columns beside x, and x is not
    copied."""
    wide = getattr(x, "room", None)
    if wide is None:
        return torch.cat([x, more], 1)
    columns = x.shape[1], more.shape[1]
    wide.narrow(1, *columns).copy_(more)
    return wide.narrow(1, 0, sum(columns))


class AdaptedExperts(torch.autograd.Function):
    """Autograd function: frozen experts with their LoRA adapters. For each expert it computes [x,
    low] [W, B]^T with low = scale x A^T, in one grouped matmul, whose result is rounded only once.
    The gradient of x is [grad, grad B] [W; scale A]. Kept for backward are low, and x if it cannot
    be computed again, but no copies of A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        room: Callable[[Any], Room],
        a: Factors,
        b: Factors,
        multiply: Callable[..., torch.Tensor],
        again: Callable[[], torch.Tensor] | None,
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        """W x + scale * B A x of each token's expert: x [T, in], T tokens sorted by expert -> [T,
        out]. For a weight inside zeros_from(), which has one projection, the result is zeros, with
        the same gradients.

        room(filling): gives filled_room() of `weight`, a and b.
        a, b: the matrices of the projections with an adapter, as blocks of A and of B.
        multiply(x, w): multiplies each expert's tokens by w^T of this expert; for a w [T, c] it
        gives x^T w of each expert's rows instead.
        again: computes x once more, for backward; None: x is saved.
        matrices: those of a and b, for autograd; only they and x get gradients."""
        ctx.constants = room, a, b, multiply
        ctx.again = again
        low = ctx.filling = None
        if gives_zeros(weight):
            out = x.new_zeros(len(x), weight.shape[1])
        else:
            filled = room(None)
            ctx.filling = filled.filling
            try:
                low = multiply(x, filled.a)
                out = multiply(_with_columns(x, low), filled.both)
            finally:
                filled.release()
        ctx.save_for_backward(x if again is None else None, low)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, low = ctx.saved_tensors
        room, a, b, multiply = ctx.constants
        if ctx.again is not None:
            x = ctx.again()
            ctx.again = None  # the node outlives its backward pass, and holds what x is made of
        if not hasattr(grad, "room"):
            grad = grad.contiguous()
        filled = room(ctx.filling)
        d_x = None
        try:
            if low is None:
                low = multiply(x, filled.a)
            d_low = multiply(grad, filled.b.mT)
            if ctx.needs_input_grad[0]:
                d_x = multiply(_with_columns(grad, d_low), filled.across.mT)
        finally:
            filled.release()
        d_as = a.gradients(multiply(d_low, x))
        d_bs = b.gradients(multiply(grad, low))
        return d_x, None, None, None, None, None, None, *d_as, *d_bs
