"""Triton kernels of mixtures of experts: routers, the order and copies of tokens, sums of experts'
rows, weight gradients of experts.

Letters: s positions, b rows, T = s b tokens, k experts per token, E experts, h hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .kernels import compiles, jit, launch, tl, triton
from .model_linears import gives_zeros

_ROWS_BLOCK = 1024  # columns of a program of sums_of_rows
_COPY_ROWS = 8  # rows of a program of copies_of_rows
_COPY_BLOCK = 512  # columns of it
_SCORES = 4096  # scores of a program of a router
_ORDER_BLOCK = 1024  # rows of a program of sorted_by_expert
# a program that sums a weight gradient of experts: with less than 128 registers per thread, two run
# on a multiprocessor, so that one multiplies while the other adds to memory
EXPERTS_TILE = dict(ROWS=64, M=128, N=128, GROUP=8, STAGES=3, num_warps=8)


# ---- routers


def suits_router(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if LogitsOfRouter can compute a router's logits in `dtype`: x and weight are bf16, the
    logits float32."""
    return x.dtype == weight.dtype == torch.bfloat16 and dtype == torch.float32


class LogitsOfRouter(torch.autograd.Function):
    """Autograd function of a router's matmul on a GPU: x weight^T for x [..., h] and weight [E, h],
    both bf16 -> float32 logits [..., E]. Sums are float32 and products of bf16 numbers exact, so
    the logits are those of float32 copies but for the order of the sums. Backward splits the
    float32 gradient into two bf16 numbers, which together keep 16 of its bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        logits = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32)
        return logits.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        flat = grad.flatten(0, -2)
        halves = flat.new_empty(len(flat), 2, len(weight), dtype=weight.dtype)
        high, low = halves.unbind(1)
        high.copy_(flat)
        torch.sub(flat, high, out=low)
        halves = halves.flatten(1)
        if ctx.needs_input_grad[0]:
            of_x = (halves @ weight.repeat(2, 1)).view(*grad.shape[:-1], weight.shape[1])
        if x is not None:
            twice = torch.mm(halves.t(), x.flatten(0, -2), out_dtype=torch.float32)
            of_weight = (twice[: len(weight)] + twice[len(weight) :]).to(weight.dtype)
        return of_x, of_weight


@jit
def _scores(logits, inside, exists, SOFTMAX: tl.constexpr):
    """Scores of some tokens [tokens, experts], as model_moe.scores_of makes them -> (logits in
    float32, scores, log-sum-exp of each token's logits). exists: mask of the experts."""
    values = tl.load(logits, inside, 0.0).to(tl.float32)
    values = tl.where(exists, values, -float("inf"))
    most = tl.max(values, 1)
    powers = tl.exp(values - most[:, None])
    total = tl.sum(powers, 1)
    if SOFTMAX:
        scores = powers / total[:, None]
    else:
        scores = tl.where(exists, tl.sigmoid(values), 0.0)
    return values, scores, most + tl.log(total)


@jit
def _route_kernel(
    logits, bias, real, weights, experts, parts, positions, rows, scaling, num: tl.constexpr,
    CHOICES: tl.constexpr, SOFTMAX: tl.constexpr, NORMALISE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    position = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    row = tl.program_id(1)
    token = position * rows + row
    is_token = position < positions
    column = tl.arange(0, BLOCK)[None, :]
    exists = column < num
    inside = is_token[:, None] & exists
    place = logits + token[:, None] * num + column
    _, scores, lse = _scores(place, inside, exists, SOFTMAX)
    left = scores
    if bias is not None:
        left += tl.load(bias + column, exists, 0.0).to(tl.float32)
    # NaN comes first, as in torch, and no expert comes twice
    left = tl.where(left == left, left, 3e38)
    left = tl.where(exists, left, -float("inf"))
    number = tl.arange(0, WIDTH)[None, :]
    found = tl.zeros((TOKENS, WIDTH), tl.float32)
    chosen = tl.zeros((TOKENS, BLOCK), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    for choice in tl.static_range(CHOICES):
        best = tl.argmax(left, 1)
        is_best = column == best[:, None]
        score = tl.sum(tl.where(is_best, scores, 0.0), 1)
        left = tl.where(is_best, -float("inf"), left)
        chosen += tl.where(is_best, 1.0, 0.0)
        total += score
        found = tl.where(number == choice, score[:, None], found)
        tl.store(experts + token * CHOICES + choice, best.to(tl.int64), is_token)
    if NORMALISE:
        if not SOFTMAX:
            total += 1e-20
        found = found / total[:, None]
    known = is_token[:, None] & (number < CHOICES)
    tl.store(weights + token[:, None] * CHOICES + number, found * scaling, known)
    if real is not None:
        counts = tl.load(real + token, is_token, 0).to(tl.float32)
        if not SOFTMAX:
            scores = scores / (tl.sum(scores, 1) + 1e-20)[:, None]
        part = parts + (tl.program_id(0) * rows + row) * (2 * num + 2)
        column = tl.arange(0, BLOCK)
        by_expert = tl.sum(chosen * counts[:, None], 0)
        tl.store(part + column, by_expert, column < num)
        by_expert = tl.sum(tl.where(counts[:, None] > 0, scores, 0.0), 0)
        tl.store(part + num + column, by_expert, column < num)
        tl.store(part + 2 * num, tl.sum(counts, 0))
        tl.store(part + 2 * num + 1, tl.sum(tl.where(counts > 0, lse * lse, 0.0), 0))


@jit
def _count_kernel(
    parts, found, factors, of_balance, of_z, programs, rows, num: tl.constexpr,
    CHOICES: tl.constexpr, KIND: tl.constexpr, Z: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    exists = column < num
    chosen = tl.zeros((BLOCK,), tl.float32)
    scores = tl.zeros((BLOCK,), tl.float32)
    tokens = 0.0
    squares = 0.0
    pools = 0.0
    for row in range(rows):
        counts = tl.zeros((BLOCK,), tl.float32)
        sums = tl.zeros((BLOCK,), tl.float32)
        real = 0.0
        for first in range(0, programs, TILE):
            program = first + tl.arange(0, TILE)
            part = parts + (program * rows + row) * (2 * num + 2)
            inside = (program < programs)[:, None] & exists[None, :]
            counts += tl.sum(tl.load(part[:, None] + column[None, :], inside, 0.0), 0)
            sums += tl.sum(tl.load(part[:, None] + num + column[None, :], inside, 0.0), 0)
            real += tl.sum(tl.load(part + 2 * num, program < programs, 0.0), 0)
            squares += tl.sum(tl.load(part + 2 * num + 1, program < programs, 0.0), 0)
        chosen += counts
        scores += sums
        tokens += real
        pools += tl.where(real > 0, 1.0, 0.0)
        if KIND == 1:  # each row is balanced by itself; divided by their number below
            by = num / CHOICES * counts / tl.maximum(real * real, 1.0)
            tl.store(factors + row * num + column, by, exists)
            tl.store(factors + (rows + row) * num + column, sums, exists)
    balance = 0.0
    if KIND == 1:
        tl.debug_barrier()  # other threads may have stored what is loaded
        for row in range(rows):
            by = tl.load(factors + row * num + column, exists, 0.0) / tl.maximum(pools, 1.0)
            sums = tl.load(factors + (rows + row) * num + column, exists, 0.0)
            balance += tl.sum(by * sums, 0)
            tl.store(factors + row * num + column, by, exists)
    if KIND == 2:
        by = num / CHOICES * chosen / tl.maximum(tokens * tokens, 1.0)
        balance += tl.sum(by * scores, 0)
        for row in range(rows):
            tl.store(factors + row * num + column, by, exists)
    z = 0.0
    if Z:
        z += squares / tl.maximum(tokens, 1.0)
    tl.store(found + column, chosen, exists)
    tl.store(found + num, balance)
    tl.store(of_balance, balance)
    tl.store(found + num + 1, z)
    tl.store(of_z, z)
    if KIND + Z > 0:
        tl.store(found + num + 2, tl.minimum(tokens, 1.0))
    else:
        tl.store(found + num + 2, 0.0)
    tl.store(found + num + 3, tl.maximum(tokens, 1.0))


@jit
def _route_backward_kernel(
    logits, experts, real, factors, found, of_weights, of_balance, of_z, out, positions, rows,
    scaling, num: tl.constexpr, CHOICES: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALISE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    row = tl.program_id(1)
    token = position * rows + row
    is_token = position < positions
    column = tl.arange(0, BLOCK)[None, :]
    exists = column < num
    inside = is_token[:, None] & exists
    place = token[:, None] * num + column
    values, scores, lse = _scores(logits + place, inside, exists, SOFTMAX)
    of_scores = tl.zeros((TOKENS, BLOCK), tl.float32)
    if of_weights is not None:
        chosen = tl.zeros((TOKENS, BLOCK), tl.float32)
        for choice in tl.static_range(CHOICES):
            at = token * CHOICES + choice
            is_it = column == tl.load(experts + at, is_token, 0)[:, None]
            one = tl.load(of_weights + at, is_token, 0.0).to(tl.float32) * scaling
            of_scores += tl.where(is_it, one[:, None], 0.0)
            chosen += tl.where(is_it, 1.0, 0.0)
        if NORMALISE:
            total = tl.sum(scores * chosen, 1)
            if not SOFTMAX:
                total += 1e-20
            mean = tl.sum(of_scores * scores, 1) / total
            of_scores = chosen * (of_scores - mean[:, None]) / total[:, None]
    counts = tl.zeros((TOKENS,), tl.float32)
    if real is not None:
        counts = tl.load(real + token, is_token, 0).to(tl.float32)
    if of_balance is not None:
        by = tl.load(factors + row * num + column, exists, 0.0) * tl.load(of_balance)
        by = by * counts[:, None]
        if not SOFTMAX:
            total = (tl.sum(scores, 1) + 1e-20)[:, None]
            by = (by - (tl.sum(by * scores, 1)[:, None] / total)) / total
        of_scores += by
    if SOFTMAX:
        of_logits = scores * (of_scores - tl.sum(of_scores * scores, 1)[:, None])
    else:
        of_logits = of_scores * scores * (1 - scores)
    if of_z is not None:
        by = 2 * tl.load(of_z) / tl.load(found + num + 3) * counts * lse
        of_logits += by[:, None] * tl.exp(values - lse[:, None])
    tl.store(out + place, of_logits, inside)


class Routed(torch.autograd.Function):
    """Autograd function of routed(), with one Triton kernel for the choice, one for counts and
    losses, and one for the backward pass, which computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        real: torch.Tensor | None,
        kind: int,
        z: bool,
        topk: int,
        softmax: bool,
        normalise: bool,
        scaling: float,
    ) -> tuple[torch.Tensor, ...]:
        """Choose experts -> (weights, experts), both [T, k]. If `real` is given, three more results
        follow: float32 [E + 4] (choices of each expert, balancing loss, z loss, share of the
        micro-batch, number of tokens), the balancing loss, and the z loss.

        kind: of the balancing loss; 0 none, 1 for each row, 2 for all rows together. z: True
        computes the z loss. Other arguments: as in routed()."""
        logits = logits.contiguous()
        positions, rows, num = logits.shape
        ctx.set_materialize_grads(False)
        ctx.kind = ctx.z = 0
        block = triton.next_power_of_2(num)
        tokens = max(_SCORES // block, 1)
        programs = triton.cdiv(positions, tokens)
        experts = logits.new_empty(positions * rows, topk, dtype=torch.int64)
        weights = logits.new_empty(experts.shape, dtype=torch.float32)
        parts: Any = None
        if real is not None:
            real = real.contiguous().view(torch.uint8)
            parts = weights.new_empty(programs, rows, 2 * num + 2)
        ctx.grid = programs, rows
        ctx.sizes = positions, rows, scaling, num, topk, softmax, normalise, tokens, block
        tensors = logits, bias, real, weights, experts, parts
        width = triton.next_power_of_2(topk)
        launch(_route_kernel, ctx.grid, *tensors, *ctx.sizes, width)
        if real is None:
            ctx.mark_non_differentiable(experts)
            ctx.save_for_backward(logits, experts, None, None, None)
            return weights, experts
        found = weights.new_empty(num + 4)
        factors = weights.new_empty(2, rows, num)
        tile = max(min(_SCORES // block, triton.next_power_of_2(programs)), 1)
        ctx.kind = kind
        ctx.z = z
        sizes = programs, rows, num, topk, kind, int(z), tile, block
        of_losses = weights.new_empty(()), weights.new_empty(())
        launch(_count_kernel, (1,), parts, found, factors, *of_losses, *sizes)
        ctx.save_for_backward(logits, experts, real, factors, found)
        ctx.mark_non_differentiable(experts, found)
        return weights, experts, found, *of_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_weights: Any, *more: Any) -> tuple[Any, ...]:
        logits, experts, real, factors, found = ctx.saved_tensors
        of_balance = more[2] if ctx.kind else None
        of_z = more[3] if ctx.z else None
        if of_weights is not None:
            of_weights = of_weights.contiguous()
        out = torch.empty_like(logits)
        tensors = logits, experts, real, factors, found, of_weights, of_balance, of_z, out
        launch(_route_backward_kernel, ctx.grid, *tensors, *ctx.sizes)
        return out, *[None] * 8


def routed(
    plain: Callable[..., Any],
    logits: torch.Tensor,
    real: torch.Tensor | None,
    losses: Any,
    group: Any,
    are_best: bool,
    topk: int,
    score_function: str,
    normalise: bool,
    scaling: float | None,
    bias: torch.Tensor | None,
    num_groups: int | None,
    *more: Any,
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """model_moe.routed, with its arguments and results, by Triton kernels. plain: that function,
    which does the work for groups of experts, other choices than the router's, ranks that share
    tokens, logits in float64, and a balancing loss that counts other experts than the chosen ones.
    """
    *_, replace = more
    is_plain = replace is not None or num_groups or group is not None
    if is_plain or logits.dtype == torch.float64 or (losses.on and not are_best):
        rule = normalise, scaling, bias, num_groups, *more
        return plain(logits, real, losses, group, are_best, topk, score_function, *rule)
    kind = 0
    if losses.on and losses.kind != "none":
        kind = 2 if losses.kind == "aux_loss" else 1
    rule = kind, losses.on and bool(losses.z), topk, score_function == "softmax", bool(normalise)
    results = Routed.apply(logits, bias, real, *rule, 1.0 if scaling is None else scaling)
    weights, experts, *found = results
    if not found:
        return weights, experts, None
    row, balance, z = found
    return weights, experts, (row[:-1], balance, z)


@jit
def _order_kernel(
    keys, order, tokens, places, counts, n, num, steps, CHOICES: tl.constexpr,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(order + row, row < n, 0)
    tl.store(tokens + row, pair // CHOICES, row < n)
    tl.store(places + pair, row.to(tl.int64), row < n)
    if tl.program_id(0) == 0:  # each expert's rows begin where keys of experts before it end
        expert = tl.arange(0, EXPERTS)
        low = tl.zeros((EXPERTS,), tl.int32)
        high = tl.zeros((EXPERTS,), tl.int32) + n
        low2 = low
        high2 = high
        for _ in range(steps):
            middle = (low + high) // 2
            is_before = tl.load(keys + middle, low < high, 0) < expert
            inside = low < high
            low = tl.where(is_before & inside, middle + 1, low)
            high = tl.where(is_before, high, middle)
            middle = (low2 + high2) // 2
            is_before = tl.load(keys + middle, low2 < high2, 0) <= expert
            inside = low2 < high2
            low2 = tl.where(is_before & inside, middle + 1, low2)
            high2 = tl.where(is_before, high2, middle)
        tl.store(counts + expert, (low2 - low).to(tl.int64), expert < num)


def sorted_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """model_moe.sorted_by_expert by a sort and one Triton kernel: experts, int64 [T, k] -> (order,
    tokens, places, counts)."""
    # a GPU's sort has a kernel for each byte
    keys, order = experts.flatten().to(torch.int16).sort(stable=True)
    tokens = torch.empty_like(order)
    places = torch.empty_like(order)
    counts = order.new_empty(num_experts)
    n = len(order)
    if not n:
        return order, tokens, places.view(experts.shape), counts.zero_()
    sizes = n, num_experts, n.bit_length(), experts.shape[1], _ORDER_BLOCK
    tensors = keys, order, tokens, places, counts
    grid = (triton.cdiv(n, _ORDER_BLOCK),)
    launch(_order_kernel, grid, *tensors, *sizes, triton.next_power_of_2(num_experts))
    return order, tokens, places.view(experts.shape), counts


# ---- rows of experts


def rows_with_room(like: torch.Tensor, shape: Sequence[int], room: int) -> torch.Tensor:
    """Uninitialised rows of the given shape [..., width], with the dtype and device of `like`, for
    a caller that then puts `room` more columns beside them. With room, they are the first columns
    of a larger tensor [..., width + room], which is their attribute `room`; as tensors the two have
    separate version counters."""
    wide = like.new_empty(*shape[:-1], shape[-1] + room)
    if not room:
        return wide
    rows = wide[..., :-room].data
    rows.room = wide
    return rows


@jit
def _copies_kernel(
    x, tokens, out, rows, width: tl.constexpr, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row, row < rows, 0)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + token[:, None] * width + column[None, :], inside)
    tl.store(out + row[:, None] * stride + column[None, :], value, inside)


def copies_of_rows(x: torch.Tensor, tokens: torch.Tensor, room: int) -> torch.Tensor:
    """x[tokens] with one Triton kernel. x: [T, h]. tokens: int64 [rows]. room: see
    rows_with_room()."""
    out = rows_with_room(x, (len(tokens), x.shape[1]), room)
    rows, width = out.shape
    grid = triton.cdiv(rows, _COPY_ROWS), triton.cdiv(width, _COPY_BLOCK)
    tensors = x.contiguous(), tokens.contiguous(), out
    launch(_copies_kernel, grid, *tensors, rows, width, width + room, _COPY_ROWS, _COPY_BLOCK)
    return out


@jit
def _rows_kernel(
    rows, places, out, width: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(places + token * CHOICES + choice).to(tl.int64)
        total += tl.load(rows + row * width + column, inside)
    tl.store(out + token * width + column, total, inside)


def sums_of_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Compute model_moe.sums_of_rows with one Triton kernel: rows [T k, h] and their places [T, k]
    -> [T, h], each a sum of k rows in float32, in the order of k, rounded once."""
    width = rows.shape[1]
    tokens, choices = places.shape
    out = rows.new_empty(tokens, width)
    grid = tokens, triton.cdiv(width, _ROWS_BLOCK)
    tensors = rows.contiguous(), places.contiguous(), out
    launch(_rows_kernel, grid, *tensors, width, choices, _ROWS_BLOCK)
    return out


@jit
def _experts_kernel(
    x, grad, main_grad, ends, n_out, n_in, ROWS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(n_out, M)
    tiles_n = tl.cdiv(n_in, N)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    # programs that run at the same time share rows and columns, so that these are in the L2 cache
    first_m = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first_m, GROUP)
    tile = tile % (GROUP * tiles_n)
    m = (first_m + tile % height) * M
    n = tile // height * N
    start = tl.load(ends + expert - 1, expert > 0, 0)
    end = tl.load(ends + expert)
    whole = start + (end - start) // ROWS * ROWS
    total = tl.zeros((M, N), tl.float32)
    for first in tl.range(start, whole, ROWS, num_stages=STAGES):
        total = tl.dot(grad.load([first, m]).T, x.load([first, n]), total)
    if whole < end:  # the rows after `end` are another expert's
        is_own = (whole + tl.arange(0, ROWS) < end)[:, None]
        left = tl.where(is_own, grad.load([whole, m]), 0.0)
        right = tl.where(is_own, x.load([whole, n]), 0.0)
        total = tl.dot(left.T, right, total)
    if start < end:
        place = [expert, m, n]
        main_grad.store(place, main_grad.load(place) + tl.reshape(total, (1, M, N)))


def add_gradient_of_experts(
    x: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add the weight gradients of n experts to main_grad, float32 [n, out, in], in place: for each
    expert grad^T x over its rows. x: inputs [T, in], and grad: gradients of the outputs [T, out],
    with rows sorted by expert; both are contiguous, in bf16 or fp16, with rows in multiples of 16
    bytes. ends: int32 [n], the index after each expert's last row. Equal inputs give equal bits: no
    two programs add to the same element."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not len(x):
        return
    n, n_out, n_in = main_grad.shape
    rows, m, n_columns = (EXPERTS_TILE[name] for name in ("ROWS", "M", "N"))
    of_x = TensorDescriptor.from_tensor(x, [rows, n_columns])
    of_grad = TensorDescriptor.from_tensor(grad, [rows, m])
    into = TensorDescriptor.from_tensor(main_grad, [1, m, n_columns])
    grid = (n * triton.cdiv(n_out, m) * triton.cdiv(n_in, n_columns),)
    launch(_experts_kernel, grid, of_x, of_grad, into, ends, n_out, n_in, **EXPERTS_TILE)


def _add_gradient(
    x: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add the weight gradients of n experts to main_grad [n, out, in], in place: for each expert
    grad^T x over its rows. x: inputs [T, in], and grad: gradients of the outputs [T, out], both
    with rows sorted by expert. ends: int32 [n], the index after each expert's last row. If
    part_triton's kernel computes this, sums are float32 throughout."""
    if compiles(x) and x.itemsize == 2 and main_grad.dtype == torch.float32:
        add_gradient_of_experts(x, grad, ends, main_grad)
    else:
        main_grad += F.grouped_mm(grad.mT, x, offs=ends)


class ExpertsProduct(torch.autograd.Function):
    """Autograd function that multiplies the rows of each expert by its transposed matrix: x
    [T, in], sorted by expert -> [T, out]. weight: [n, ..., in], read as [n, out, in] for n experts.
    ends: int32 [n], the index after each expert's last row.

    Backward adds a trained weight's gradient to the weight's main_grad, megatron's gradient buffer.
    As the gradient it returns an uninitialised tensor, for megatron's DDP hook. For a weight inside
    model_linears.zeros_from(), which marks products that nobody reads, forward gives zeros."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, ends)
        ctx.weight = weight
        if gives_zeros(weight):
            return x.new_zeros(len(x), weight.shape[1])
        return F.grouped_mm(x, weight.flatten(1, -2).mT, offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, ends = ctx.saved_tensors
        weight = ctx.weight
        grad = grad.contiguous()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = F.grouped_mm(grad, weight.flatten(1, -2), offs=ends)
        if x is not None:
            _add_gradient(x.contiguous(), grad, ends, weight.main_grad.flatten(1, -2))
            weight.grad_added_to_main_grad = True
            of_weight = torch.empty_like(weight)
        return of_x, of_weight, None
