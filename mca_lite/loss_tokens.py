"""Token losses without holding the logits: pure functions over hidden states and the output weight.

Letters: n rows (tokens), h hidden size, V vocabulary, tp the tensor-parallel size. Each rank holds
the rows [rank * V/tp, (rank + 1) * V/tp) of the output weight.

    loss_t = logsumexp(z_t) - z_t[y_t],   z_t = h_t W^T,   the sums in float32

An adapter on the output weight adds l_t B^T to z_t: a second pair of factors, which takes the same
way.

The logits exist only for `chunk_size` rows at a time, in the dtype of their product. Gradients are
taken in the forward pass, while the logits are there, where all rows weigh the same in what is
minimised (a sum), or the head is frozen; the backward pass multiplies them by the weights. Where
rows have weights of their own (preference losses), the gradient of a head that trains is a sum
with these weights, which are known only after the forward pass: the backward pass makes the logits
again.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .files import IGNORE_INDEX
from .kernels import compiled, compiles, triton
from .mcore import reduce_from_tensor_model_parallel_region
from .parallel import sum_gradients, to_device

# -- losses on logits


def all_reduce(tensor, op, group):
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


class Head(NamedTuple):
    """What all chunks of a loss share. columns: the first ones on this rank, which are token ids;
    the rest pads."""

    group: Any  # a ProcessGroup; None: one rank
    vocab_size: int
    first: int
    columns: int
    chunk_size: int
    softcap: float | None

    def place(self, labels):
        """(column of each label, 0 where another rank has it; whether it is here)."""
        column = labels - self.first
        here = (column >= 0) & (column < self.columns)
        return column.where(here, 0), here


@dataclass(frozen=True)
class Logits:
    """The logits of n tokens that have a label. Each rank has its own columns, the vocabulary's
    [first, first + columns): all of it without tensor parallelism.

    product: hidden times the head before its cap, [n, V/tp]. labels: int64 [n], global token ids.
    hidden [n, h]: the last hidden states as the head reads them, the same on all ranks. weight
    [V/tp, h]: this rank's rows of the head. The last two are for what the logits do not show. In
    a product of hidden with this rank's rows write spread(hidden), or its gradient is too small.
    """

    product: torch.Tensor
    labels: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor
    head: Head

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """float32 [n, columns]: the logits as the model has them, capped where it caps them."""
        values = self.product.float()[:, : self.head.columns]
        cap = self.head.softcap
        return values if cap is None else cap * torch.tanh(values / cap)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of what each has from its columns; same on all. Collective."""
        group = self.head.group
        if group is None:
            return part
        whole = part.clone(memory_format=torch.contiguous_format)  # it is reduced in place
        return reduce_from_tensor_model_parallel_region(whole, group=group)

    def spread(self, whole: torch.Tensor) -> torch.Tensor:
        """`whole`, the same on all ranks, to be used with this rank's columns: its gradient is
        summed over the ranks. Collective in the backward pass."""
        group = self.head.group
        return whole if group is None else sum_gradients(whole, group)

    def logsumexp(self) -> torch.Tensor:
        """[n]: log of the sum of exp(z) over the whole vocabulary. Collective."""
        top = self.values.new_full(self.labels.shape, torch.finfo(torch.float32).min)
        if self.head.columns:
            top = self.values.detach().amax(1)
        top = all_reduce(top, dist.ReduceOp.MAX, self.head.group)
        return top + self.sum((self.values - top[:, None]).exp().sum(1)).log()

    def of_labels(self) -> torch.Tensor:
        """[n]: the logit of each label, NaN for one that is no token id. Collective."""
        column, here = self.head.place(self.labels)
        part = self.values.sum(1)  # a rank may have nothing but padding
        if self.head.columns:
            part = self.values.gather(1, column[:, None])[:, 0] * here
        unknown = (self.labels < 0) | (self.labels >= self.head.vocab_size)
        return self.sum(part).masked_fill(unknown, float("nan"))

    def cross_entropy(self) -> torch.Tensor:
        """[n]: the loss that is minimised where nothing else is said. Collective."""
        return self.logsumexp() - self.of_labels()


LossOfLogits = Callable[[Logits], torch.Tensor]


def checked(losses: torch.Tensor, logits: Logits) -> torch.Tensor:
    """A function's losses, in float32. ValueError where they are not [n] or [n, k]."""
    n = len(logits.labels)
    if losses.dim() not in (1, 2) or len(losses) != n:
        raise ValueError(
            f"a loss of logits gave {list(losses.shape)} for {n} tokens: expected [n] or [n, k]"
        )
    return losses.float()


# -- token losses in chunks

if triton is not None:
    import triton.language as tl

CHUNK_SIZE_CUDA, CHUNK_SIZE_CPU = 4096, 1024  # rows; a GPU's products want many
_SLICE = 16384  # columns of the vocabulary whose weight gradient is added at once


def _as_float(logits, columns: int, softcap: float | None):
    """float32 and capped; columns that only pad are -inf. May be `logits` itself, changed."""
    logits = logits.float()
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if columns < logits.shape[1]:
        padding = torch.arange(logits.shape[1], device=logits.device) >= columns
        logits.masked_fill_(padding, float("-inf"))
    return logits


_capped = compiled(_as_float)


# the largest logit is at least this one, which is finite also on a rank whose columns all pad
_LOWEST = torch.finfo(torch.float32).min


def _statistics(logits, column, columns: int):
    """float32 (largest logit, sum of exponentials relative to it, logit at `column`), each [rows],
    of capped logits."""
    if compiles(logits):
        return statistics_in_one_pass(logits.contiguous(), column, columns)
    logits = _as_float(logits, columns, None)
    top = logits.amax(1).clamp(min=_LOWEST)
    total = (logits - top[:, None]).exp_().sum(1)
    return top, total, logits.gather(1, column[:, None])[:, 0]


if triton is not None:

    @triton.jit
    def _statistics_kernel(
        logits,
        column,
        top,
        total,
        target,
        columns,
        width,
        LOWEST: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        start = logits + row * width
        largest = tl.full((), LOWEST, tl.float32)
        summed = tl.full((), 0.0, tl.float32)
        for first in range(0, columns, BLOCK):
            place = first + tl.arange(0, BLOCK)
            values = tl.load(start + place, place < columns, -float("inf")).to(tl.float32)
            now = tl.maximum(largest, tl.max(values, 0))
            summed = summed * tl.exp(largest - now) + tl.sum(tl.exp(values - now), 0)
            largest = now
        tl.store(top + row, largest)
        tl.store(total + row, summed)
        tl.store(target + row, tl.load(start + tl.load(column + row)).to(tl.float32))

    @triton.jit
    def _probabilities_kernel(
        logits,
        lse,
        weights,
        softcap,
        columns,
        width,
        CAPPED: tl.constexpr,
        WEIGHTED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = logits + row * width + column
        value = tl.load(place, column < columns, -float("inf")).to(tl.float32)
        out = tl.exp(value - tl.load(lse + row))
        if CAPPED:
            # padding is -inf: a slope of 0 and not of -inf, which would make 0 x inf
            tanh = tl.maximum(value / softcap, -1.0)
            out *= 1 - tanh * tanh
        if WEIGHTED:
            out *= tl.load(weights + row)
        tl.store(place, out, column < width)


def statistics_in_one_pass(logits, column, columns: int):
    """What _statistics gives of logits [rows, V/tp], which it reads once: by a Triton kernel."""
    rows, width = logits.shape
    found = [torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3)]
    constants = dict(LOWEST=_LOWEST, BLOCK=8192, num_warps=16)
    if rows:
        _statistics_kernel[(rows,)](logits, column, *found, columns, width, **constants)
    return found


def _probabilities_in_one_pass(logits, lse, weights, columns: int, softcap: float | None):
    """What _probabilities gives: by a Triton kernel."""
    rows, width = logits.shape
    has = dict(CAPPED=softcap is not None, WEIGHTED=weights is not None, BLOCK=4096, num_warps=8)
    if rows:
        rows_of = lse.contiguous(), None if weights is None else weights.float().contiguous()
        grid = rows, triton.cdiv(width, 4096)
        _probabilities_kernel[grid](logits, *rows_of, softcap or 1.0, columns, width, **has)
    return logits


def _probabilities(logits, lse, weights, columns: int, softcap: float | None):
    """softmax of capped logits, times the weights of the rows and the slope of the cap, in the
    place of the logits."""
    if compiles(logits):
        return _probabilities_in_one_pass(logits.contiguous(), lse, weights, columns, softcap)
    values = _as_float(logits, columns, None)
    # c tanh(z / c) has the slope 1 - tanh^2; where a column only pads, nothing is passed on anyway
    slope = None if softcap is None else 1 - (values / softcap).clamp_(min=-1).square_()
    values = values.sub_(lse[:, None]).exp_()
    if slope is not None:
        values = values.mul_(slope)
    if weights is not None:
        values = values.mul_(weights[:, None])
    return logits.copy_(values)


def _scaled(gradient, by, dtype: torch.dtype):
    """gradient * by, a float32 number or [rows, 1], multiplied in float32."""
    by = by if by.dim() else by[None]  # a tensor of no dimensions would be rounded to bf16 first
    return torch.mul(gradient, by, out=torch.empty_like(gradient, dtype=dtype))


def _logits(parts, head: Head):
    """[rows, V/tp]: the products of (hidden, weight) of a chunk, summed, and capped. In the dtype
    of a single product; float32 where there are several or a cap."""
    products = (hidden @ weight.t() for hidden, weight in parts)
    if len(parts) == 1 and head.softcap is None:
        return next(products)
    logits = functools.reduce(operator.iadd, (product.float() for product in products))
    return logits if head.softcap is None else _capped(logits, logits.shape[1], head.softcap)


def _losses(logits, labels, head: Head):
    """(losses, logsumexp) float32 [rows] of a chunk."""
    column, here = head.place(labels)
    top, total, target = _statistics(logits, column, head.columns)
    if head.group is not None and head.group.size() > 1:
        own = top
        top = all_reduce(top.clone(), dist.ReduceOp.MAX, head.group)
        total = total * (own - top).exp()
    # target logit and sum of exponentials travel together: one collective for both
    both = torch.stack([torch.where(here, target - top, 0.0), total])
    target, total = all_reduce(both, dist.ReduceOp.SUM, head.group)
    # a label that no rank holds would leave the target's logit at 0: a loss like any other
    unknown = (labels < 0) | (labels >= head.vocab_size)
    return (total.log() - target).masked_fill_(unknown, float("nan")), total.log() + top


def _logit_gradients(logits, labels, losses, lse, weights, head: Head):
    """d sum(weights * losses) / d z in the place of the logits; weights None: 1."""
    out = _probabilities(logits, lse, weights, head.columns, head.softcap)
    column, here = head.place(labels)
    # at the label p - 1, taken before any rounding: a nearly certain token still has a gradient
    value = torch.expm1(-losses)
    if head.softcap is not None:
        value = value * (1 - ((lse - losses) / head.softcap).square())
    value = value if weights is None else value * weights
    column = column[:, None]
    return out.scatter_(
        1, column, torch.where(here, value.to(out.dtype), out.gather(1, column)[:, 0])[:, None]
    )


def _add_product(into, left, right):
    """into += left^T right, in float32."""
    if left.dtype == into.dtype:
        into.addmm_(left.t(), right)
    elif into.is_cuda and left.itemsize == 2:
        torch.addmm(into, left.t(), right, out_dtype=into.dtype, out=into)
    else:
        # in slices of the vocabulary: a chunk's product is as large as the weight, and never whole
        for columns, part in zip(left.split(_SLICE, 1), into.split(_SLICE), strict=True):
            part += columns.t() @ right


class _Gradients:
    """d of each tensor of `factors` (hidden, weight, ...) that needs one, added up chunk by chunk.
    A weight's is float32."""

    def __init__(self, factors, needed, chunks):
        complete = bool(chunks) and isinstance(chunks[0], slice)  # every row will be written
        self.tensors = [None] * len(factors)
        for i, (tensor, wanted) in enumerate(zip(factors, needed, strict=True)):
            if wanted and i % 2:
                self.tensors[i] = torch.zeros_like(tensor, dtype=torch.float32)
            elif wanted:
                self.tensors[i] = torch.empty_like(tensor) if complete else torch.zeros_like(tensor)

    def add(self, rows, parts, d_logits):
        """parts: (hidden, weight) pairs of the chunk; d_logits [rows, V/tp]."""
        for i, (hidden, weight) in enumerate(parts):
            d_hidden, d_weight = self.tensors[2 * i : 2 * i + 2]
            d_product = d_logits.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = d_product @ weight
            if d_weight is not None:
                _add_product(d_weight, d_product, hidden)


def _version(tensor) -> int | None:
    """How often a tensor was changed in place; None in inference mode, where nobody counts."""
    return None if tensor.is_inference() else tensor._version


class TrainedPlaces(NamedTuple):
    """Where labels [b, s] count, as places in [s, b], int64 [n]: found on the host before they went
    to a GPU, which else is waited for."""

    labels: torch.Tensor
    version: int | None
    places: torch.Tensor

    @classmethod
    def of(cls, labels, on_host) -> "TrainedPlaces":
        """Of labels on this rank's device, and the same on the host."""
        places = (on_host.t().reshape(-1) != IGNORE_INDEX).nonzero()[:, 0]
        return cls(labels, _version(labels), to_device(places, labels.device))

    def known_for(self, labels) -> torch.Tensor | None:
        """The places in these labels; None where they are others, or were changed since."""
        version = _version(labels)
        is_same = labels is self.labels and version is not None and version == self.version
        return self.places if is_same else None


def _chunks(labels, kept, chunk_size: int):
    """The rows that have a label, whose places are `kept`, in runs of chunk_size: slices where all
    have one."""
    if len(kept) == len(labels):
        return [slice(a, a + chunk_size) for a in range(0, len(labels), chunk_size)]
    return list(kept.split(chunk_size)) if len(kept) else []


def _pairs(factors, rows):
    """[(hidden, weight), ...] of these rows."""
    pairs = zip(factors[::2], factors[1::2], strict=True)
    return [(hidden[rows], weight) for hidden, weight in pairs]


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, labels, kept, head, ahead, *factors):
        needed = ctx.needs_input_grad[4:]
        chunks = _chunks(labels, kept, head.chunk_size)
        ahead = ahead and any(needed)
        gradients = _Gradients(factors, needed, chunks) if ahead else None
        losses = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
        lse = torch.zeros_like(losses)
        for rows in chunks:
            parts = _pairs(factors, rows)
            logits = _logits(parts, head)
            losses[rows], lse[rows] = chunk_losses, chunk_lse = _losses(logits, labels[rows], head)
            if ahead:
                d_logits = _logit_gradients(
                    logits, labels[rows], chunk_losses, chunk_lse, None, head
                )
                del logits  # the same memory
                gradients.add(rows, parts, d_logits)
                del d_logits  # the largest tensor here
        ctx.head = head
        ctx.chunks = chunks
        ctx.gradients = gradients.tensors if ahead else None
        ctx.save_for_backward(labels, losses, lse, *factors)
        return losses

    @staticmethod
    def backward(ctx, grad):
        labels, losses, lse, *factors = ctx.saved_tensors
        # the gradient of a sum is one number, expanded: strides say so without asking the device
        if ctx.gradients is not None and (grad.stride(0) == 0 or len(grad) < 2):
            by = grad.sum() if len(grad) == 0 else grad[0]
            taken = ctx.gradients
        elif ctx.gradients is not None and not any(ctx.needs_input_grad[5::2]):
            by, taken = grad[:, None], ctx.gradients  # a frozen head: each row has its own gradient
        else:
            by = None
            taken = _TokenLosses.weighted(ctx, labels, losses, lse, grad, factors)
        out = [None, None, None, None]
        for gradient, tensor in zip(taken, factors, strict=True):
            if gradient is not None and by is not None:
                gradient = _scaled(gradient, by, tensor.dtype)
            out.append(gradient if gradient is None else gradient.to(tensor.dtype))
        # the schedule holds the losses, and with them this node, until the next micro-batch's
        ctx.gradients = None
        return tuple(out)

    @staticmethod
    def weighted(ctx, labels, losses, lse, weights, factors):
        """The gradients where each row has a weight of its own, from logits that are made again."""
        gradients = _Gradients(factors, ctx.needs_input_grad[4:], ctx.chunks)
        for rows in ctx.chunks:
            parts = _pairs(factors, rows)
            logits = _logits(parts, ctx.head)
            of_rows = (x[rows] for x in (labels, losses, lse, weights))
            gradients.add(rows, parts, _logit_gradients(logits, *of_rows, ctx.head))
        return gradients.tensors


class _LossesOfLogits(torch.autograd.Function):
    """A function of the logits, chunk by chunk; the backward pass makes them again."""

    @staticmethod
    def forward(ctx, labels, kept, function, head, *factors):
        chunks = _chunks(labels, kept, head.chunk_size)
        losses = None
        # an empty chunk says how many losses a token has
        for rows in chunks or [slice(0, 0)]:
            logits = _logits_of(_pairs(factors, rows), labels[rows], head)
            part = checked(function(logits), logits)
            if losses is None:
                losses = part.new_zeros(len(labels), *part.shape[1:])
            losses[rows] = part
        ctx.function = function
        ctx.head = head
        ctx.chunks = chunks
        ctx.save_for_backward(labels, *factors)
        return losses

    @staticmethod
    def backward(ctx, grad):
        labels, *factors = ctx.saved_tensors
        gradients = _Gradients(factors, ctx.needs_input_grad[4:], ctx.chunks)
        for rows in ctx.chunks:
            parts = _pairs(factors, rows)
            logits = _logits_of(parts, labels[rows], ctx.head)
            leaves = [x.requires_grad_() for x in (logits.product, logits.hidden, logits.weight)]
            with torch.enable_grad(), torch.autocast(labels.device.type, enabled=False):
                losses = checked(ctx.function(logits), logits)
            d_logits, d_hidden, d_weight = torch.autograd.grad(
                losses, leaves, grad[rows], allow_unused=True
            )
            if d_logits is None:
                d_logits = torch.zeros_like(logits.product)
            gradients.add(rows, parts, d_logits)
            of_hidden, of_weight = gradients.tensors[:2]
            if of_hidden is not None and d_hidden is not None:
                # the same on all ranks, over which the caller sums
                of_hidden[rows] += d_hidden / (ctx.head.group.size() if ctx.head.group else 1)
            if of_weight is not None and d_weight is not None:
                of_weight += d_weight
        given = zip(gradients.tensors, factors, strict=True)
        return None, None, None, None, *(g if g is None else g.to(t.dtype) for g, t in given)


def _logits_of(parts, labels, head: Head) -> Logits:
    """What a function of the logits gets of a chunk, without a history."""
    product = _logits(parts, head._replace(softcap=None))
    hidden, weight = parts[0]
    return Logits(product, labels, hidden.detach(), weight.detach(), head)


def token_losses(
    hidden, weight, labels, group=None, vocab_size=None, chunk_size=None, extra=None, softcap=None,
    weights_differ=False, of_logits: LossOfLogits | None = None, trained=None,
):  # fmt: skip
    """Loss of each token, float32, of labels' shape; 0 where the label is IGNORE_INDEX, NaN where
    it is no token id.

    hidden [..., h]; weight [V/tp, h] (this rank's rows); labels [...] of hidden's leading shape,
    global token ids; group: the tensor-parallel group (None: one rank); vocab_size: the real V,
    columns beyond it take no part (None: all take part); chunk_size: rows of logits held at once
    (None: 4096 on CUDA, 1024 on a CPU); extra: (low [..., r], B [V/tp, r]), whose product is added
    to the logits; softcap: c, where the logits are capped to c tanh(z / c); weights_differ: rows
    will weigh differently in what is minimised, so that a weight's gradient taken in the forward
    pass would be in vain. It is a matter of speed alone: the gradients are right either way.
    of_logits: another loss than cross entropy, or several: float32 [..., k] then. trained: int64
    [n], the places of labels that are not IGNORE_INDEX among all of them; None: they are looked
    for, and a GPU has no work until the host has them.

    Collectives: two all-reduces a chunk over `group`, in the forward pass. The gradient of hidden
    is this rank's part only: the caller's mapping (copy_to or gather_from of megatron) sums it. A
    weight that needs no gradient gets none. Rows without a label are dropped before any GEMM. Under
    autocast the GEMMs run in its dtype.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} does not belong to labels {tuple(labels.shape)}"
        )
    device = hidden.device.type
    factors = [hidden, weight, *(extra or ())]
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        factors = [t.to(dtype) for t in factors]
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    rows = weight.shape[0]
    vocab_size = rows * size if vocab_size is None else vocab_size
    columns = min(max(vocab_size - rows * rank, 0), rows)
    chunk_size = chunk_size or (CHUNK_SIZE_CUDA if hidden.is_cuda else CHUNK_SIZE_CPU)
    head = Head(group, vocab_size, rows * rank, columns, chunk_size, softcap)
    # probabilities of rare tokens are too small for fp16 until the loss scale multiplies them, in
    # the backward pass
    ahead = not (weights_differ and any(t.requires_grad for t in factors[1::2]))
    ahead = ahead and all(t.dtype != torch.float16 for t in factors)
    shape = labels.shape
    labels = labels.reshape(-1)
    if trained is None:
        trained = (labels != IGNORE_INDEX).nonzero()[:, 0]
    with torch.autocast(device, enabled=False):
        factors = [t.reshape(-1, t.shape[-1]) for t in factors]
        if of_logits is not None:
            losses = _LossesOfLogits.apply(labels, trained, of_logits, head, *factors)
            return losses.view(*shape, *losses.shape[1:])
        return _TokenLosses.apply(labels, trained, head, ahead, *factors).view(shape)
