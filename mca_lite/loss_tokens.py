"""Token losses without whole logits: functions of hidden states and the output weight.

Letters: n rows (tokens), h hidden size, V vocabulary, tp the tensor-parallel size. Each rank has
rows [rank * V/tp, (rank + 1) * V/tp) of the output weight.

    loss_t = logsumexp(z_t) - z_t[y_t],   z_t = h_t W^T, capped if the model does so

The sum over exp(z_t) is in float32. An adapter on the output weight adds l_t B^T to z_t: a second
pair of factors, treated in the same way.

token_losses() has logits for `chunk_size` rows at a time. If all rows have the same weight in the
objective (a sum), or the head is frozen, the gradients that cross entropy needs are computed in the
forward pass from a chunk's logits (not in float16), and the backward pass multiplies them by the
weights. Preference losses give rows different weights, known only after the forward pass; then the
gradient of a trained head is a sum with these weights, so the backward pass computes the logits
again. So it does for losses of Logits.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .files import IGNORE_INDEX
from .kernels import compiled, compiles, fused
from .mcore import reduce_from_tensor_model_parallel_region
from .parallel import gather_into, sum_gradients, to_device

# a lower bound for the largest logit, which stays finite on a rank that has only padding
_LOWEST = torch.finfo(torch.float32).min

# ---- losses on logits


def num_ranks(group: Any) -> int:
    """The number of ranks in a process group; 1 for None."""
    return 1 if group is None else group.size()


def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    """All-reduce a tensor in place over a group -> the tensor. Nothing is done for a group of one
    rank or None."""
    if num_ranks(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


class Head(NamedTuple):
    """Constants of an output layer and its loss, the same for each chunk of logits.

    group: the ranks over which the vocabulary is sharded; None: one rank. vocab_size: number of
    token ids. first: the token id of this rank's first column. columns: how many of this rank's
    columns are token ids; the columns after them are not used. chunk_size: number of tokens whose
    logits are in memory at a time. softcap: the c of c tanh(logit / c), if that must still be
    applied to the logits; otherwise None. shape: the labels' shape, [b, s], or [s, b] if
    sequence_first."""

    group: Any  # a ProcessGroup or None
    vocab_size: int
    first: int
    columns: int
    chunk_size: int
    softcap: float | None
    shape: tuple[int, ...] = ()
    sequence_first: bool = False

    def place(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Find token ids among this rank's columns -> (the column of each label, or 0 if this rank
        has none for it; bool: whether this rank has one). labels: token ids of the whole
        vocabulary; any other value has no column."""
        column = labels - self.first
        here = (column >= 0) & (column < self.columns)
        return column.where(here, 0), here

    def unknown(self, tokens: torch.Tensor) -> torch.Tensor:
        """bool in the shape of `tokens`: True where a value is no token id, such as -100."""
        return (tokens < 0) | (tokens >= self.vocab_size)

    def of_first(self, size: int) -> "Head":
        """The Head of a vocabulary that is cut to its first `size` token ids."""
        vocab_size = min(size, self.vocab_size)
        columns = min(max(vocab_size - self.first, 0), self.columns)
        return self._replace(vocab_size=vocab_size, columns=columns)


@dataclass(frozen=True)
class Logits:
    """The logits of n labelled tokens, as a loss function gets them. With tensor parallelism each
    rank has the logits of only a part of the token ids: `vocabulary`.

    product: [n, V/tp], the output layer's result with its adapter, before head.softcap; on the
    torch backend, for models that scale or cap their logits, the final logits. labels: int64 [n],
    token ids of the whole vocabulary. places: int64 [n], the tokens' indices among all labels.
    batch: the micro-batch as _pre_compute_loss gets it; None in a pass without one.
    hidden, weight: for losses that need more than logits. hidden [n, h] is the output layer's
    input, the same on all tensor-parallel ranks, and on megatron-core divided by logits_scaling.
    weight [V/tp, h] has this rank's rows of the output weight. If you multiply the two, use
    spread(hidden) in place of hidden; otherwise its gradient is too small."""

    product: torch.Tensor
    labels: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor
    head: Head
    places: torch.Tensor
    batch: Any = None

    @property
    def vocabulary(self) -> slice:
        """The range of token ids that are this rank's columns in `values`, as a slice."""
        return slice(self.head.first, self.head.first + self.head.columns)

    def take(self, column: torch.Tensor) -> torch.Tensor:
        """Pick the values of a batch column for these n tokens: [n, ...]. column: [b, s, ...], with
        one value per position of this rank's tokens."""
        index = torch.unravel_index(self.places, self.head.shape)
        return column[index[::-1] if self.head.sequence_first else index]

    def of_first(self, size: int) -> "Logits":
        """These logits for only the first `size` token ids, as if the vocabulary ended there."""
        if size >= self.head.vocab_size:
            return self
        return replace(self, head=self.head.of_first(size))

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """float32 [n, columns]: the model's logits for this rank's token ids, after the softcap if
        the model has one."""
        values = self.product.float()[:, : self.head.columns]
        cap = self.head.softcap
        return values if cap is None else cap * torch.tanh(values / cap)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the tensor-parallel ranks, the same on each rank;
        differentiable. part: this rank's summand, not changed. Collective if head.group has several
        ranks."""
        if self.head.group is None:
            return part
        whole = part.clone(memory_format=torch.contiguous_format)  # because it is reduced in place
        return reduce_from_tensor_model_parallel_region(whole, group=self.head.group)

    def spread(self, whole: torch.Tensor) -> torch.Tensor:
        """Prepare a tensor that is equal on all tensor-parallel ranks for use with this rank's
        columns. Its value stays the same; in the backward pass its gradient is summed over these
        ranks, because each of them has only the part that comes from its columns. Collective in the
        backward pass."""
        return whole if self.head.group is None else sum_gradients(whole, self.head.group)

    def logsumexp(self, values: torch.Tensor | None = None) -> torch.Tensor:
        """[n]: the log of the sum of exp(logit) over the whole vocabulary, on each tensor-parallel
        rank. values: [n, columns] in place of the model's logits. Collective."""
        if values is None:
            values = self.values
        top = values.new_full(self.labels.shape, _LOWEST)
        if self.head.columns:
            top = values.detach().amax(1).clamp(min=_LOWEST)
        top = all_reduce(top, dist.ReduceOp.MAX, self.head.group)
        return top + self.sum((values - top[:, None]).exp().sum(1)).log()

    def log_softmax(self, values: torch.Tensor | None = None) -> torch.Tensor:
        """[n, columns]: log-probabilities of this rank's token ids, normalised over the whole
        vocabulary. values: [n, columns] in place of the model's logits. Collective, in the backward
        pass too."""
        if values is None:
            values = self.values
        return values - self.spread(self.logsumexp(values))[:, None]

    def of_tokens(self, tokens: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of any token ids, k for each of the n tokens: [n, k], the same on each
        tensor-parallel rank; NaN for ids outside the vocabulary. tokens: [n, k], ids of the whole
        vocabulary. values: [n, columns], used in place of the model's logits; None: these.
        Collective."""
        if values is None:
            values = self.values
        column, here = self.head.place(tokens)
        part = values.sum(1, keepdim=True).expand(
            tokens.shape
        )  # works on a rank that has only padding
        if self.head.columns:
            part = values.gather(1, column) * here
        return self.sum(part).masked_fill(self.head.unknown(tokens), float("nan"))

    def of_labels(self) -> torch.Tensor:
        """[n]: the logit of each token's label, on each tensor-parallel rank; NaN if the label is
        not a token id. Collective."""
        return self.of_tokens(self.labels[:, None])[:, 0]

    def cross_entropy(self) -> torch.Tensor:
        """[n]: each token's cross entropy, -log p(label). This is the default loss. Collective."""
        return self.logsumexp() - self.of_labels()


LossOfLogits = Callable[[Logits], torch.Tensor]


def checked(losses: torch.Tensor, logits: Logits) -> torch.Tensor:
    """Convert the losses that a loss function returned to float32. ValueError if their shape is
    neither [n] nor [n, k], for the n tokens of `logits` and any number k of losses per token."""
    n = len(logits.labels)
    if losses.dim() not in (1, 2) or len(losses) != n:
        raise ValueError(
            f"a loss of logits gave {list(losses.shape)} for {n} tokens: expected [n] or [n, k]"
        )
    return losses.float()


# ---- token losses in chunks

CHUNK_SIZE_CUDA, CHUNK_SIZE_CPU = 4096, 1024  # rows; GEMMs on a GPU need many
CHUNK_SIZE_OF_LOGITS = (
    1024  # rows for functions of logits, which need several float32 tensors per chunk
)
_SLICE = 16384  # vocabulary columns in one GEMM for a weight gradient


@compiled
def _capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """Apply the softcap c tanh(logits / c), in place."""
    return logits.div_(softcap).tanh_().mul_(softcap)


def _without_padding(logits: torch.Tensor, columns: int) -> torch.Tensor:
    """The logits as float32, with the columns from `columns` on (vocabulary padding) at -inf. May
    change `logits` in place."""
    logits = logits.float()
    if columns < logits.shape[1]:
        logits[:, columns:] = float("-inf")
    return logits


def _statistics(logits: torch.Tensor, places: torch.Tensor, columns: int) -> torch.Tensor:
    """This rank's part of a chunk's cross entropy: float32 [3, rows]. The three are the largest
    logit (_LOWEST or more), the sum of exp(logit - largest), and the logit of the row's label;
    padding columns do not count. logits: after a softcap; padding columns may be changed in place.
    places: the label's column in each row, or -1 if this rank has none for it, which gives 0.
    columns: number of columns before the padding."""
    if compiles(logits):
        return fused().statistics_in_one_pass(logits.contiguous(), places, columns)
    logits = _without_padding(logits, columns)
    top = logits.amax(1).clamp(min=_LOWEST)
    total = (logits - top[:, None]).exp_().sum(1)
    target = logits.gather(1, places.clamp(min=0)[:, None])[:, 0]
    return torch.stack([top, total, target.masked_fill(places < 0, 0.0)])


def scaled(gradient: torch.Tensor, by: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply a gradient by a factor in float32, and return the product as `dtype`. by: float32
    [1], or [rows, 1] for a factor per row; not 0-dimensional, because torch would first round that
    to bf16."""
    out = torch.empty_like(gradient, dtype=dtype)
    if compiles(gradient) and by.numel() == 1:
        return fused().scaled_by_kernel(gradient, by, out)
    return torch.mul(gradient, by, out=out)


def _logits(parts: Any, softcap: float | None) -> torch.Tensor:
    """Compute one chunk's logits on this rank, [rows, V/tp]: the sum of hidden @ weight^T over
    `parts`, then the softcap c tanh(z / c), unless it is None. parts: pairs (hidden [rows, size],
    weight [V/tp, size]). The dtype is that of the matmul, or float32 if there are several pairs or
    a softcap."""
    (hidden, weight), *more = parts
    logits = hidden @ weight.t()
    if more or softcap is not None:
        logits = logits.float()
    for hidden, weight in more:
        logits += hidden @ weight.t()
    return logits if softcap is None else _capped(logits, softcap)


def _losses(
    logits: torch.Tensor, places: torch.Tensor, head: Head
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross entropy, logsumexp) of each row in a chunk, float32 [rows], over the whole vocabulary.
    logits: this rank's, after a softcap; padding columns may be changed in place. places: the
    column of each row's label, or -1 if this rank has none for it. Collective if head.group has
    several ranks: one all-gather."""
    found = _statistics(logits, places, head.columns)
    top, total, target = found
    ranks = num_ranks(head.group)
    if ranks > 1:
        of_ranks = found.new_empty(ranks * 3, found.shape[1])
        gather_into(of_ranks, found, group=head.group)
        tops, totals, targets = of_ranks.view(ranks, 3, -1).unbind(1)
        top = tops.amax(0)
        total = (totals * (tops - top).exp()).sum(0)
        target = targets.sum(0)
    log = total.log()
    return log - (target - top), log + top


def _logit_gradients(
    logits: torch.Tensor,
    places: torch.Tensor,
    losses: torch.Tensor,
    lse: torch.Tensor,
    weights: torch.Tensor | None,
    head: Head,
) -> torch.Tensor:
    """The gradient of sum(weights * losses) with respect to a chunk's logits before the softcap:
    softmax minus 1 at the label, times the row's weight (None: 1) and the softcap's slope. It has
    the dtype of `logits`, and their memory where possible.

    logits: after the softcap; overwritten. For each row, places is the label's column on this rank
    (-1 if it has none here), losses the cross entropy and lse the logsumexp."""
    # p - 1 before any rounding: a nearly certain token still has a gradient
    at_label = torch.expm1(-losses)
    if compiles(logits):
        logits = logits.contiguous()
        return fused().gradients_in_one_pass(logits, places, at_label, lse, weights, head)
    values = _without_padding(logits, head.columns)
    factors = []
    if head.softcap is not None:
        # the slope of c tanh(z / c); padding is -inf: a slope of 0, not 0 x inf
        factors.append(1 - (values / head.softcap).clamp_(min=-1).square_())
    if weights is not None:
        factors.append(weights[:, None])
    values.sub_(lse[:, None]).exp_()
    [here] = (places >= 0).nonzero(as_tuple=True)
    values[here, places[here]] = at_label[here]
    for factor in factors:
        values.mul_(factor)
    return logits.copy_(values)


def _add_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor):
    """Add a chunk's gradient of a weight, left^T @ right, to the float32 sum `into`, in place.
    left: [rows, V/tp]. right: [rows, size], with the weight's input size. On a CPU a 16-bit product
    is rounded to 16 bits before it is added."""
    if left.dtype == into.dtype:
        into.addmm_(left.t(), right)
    elif into.is_cuda and left.itemsize == 2:
        torch.addmm(into, left.t(), right, out_dtype=into.dtype, out=into)
    else:
        # sliced over the vocabulary, because the whole product is as large as the weight
        for columns, part in zip(left.split(_SLICE, 1), into.split(_SLICE), strict=True):
            part += columns.t() @ right


class _Gradients:
    """Gradients of hidden states and output weights, collected chunk by chunk. factors: hidden,
    weight, hidden, weight, ... `tensors` has a gradient for each of them, in float32 for a weight
    and in the states' dtype for hidden states; it is None for a factor that needs none."""

    def __init__(self, factors: Sequence[torch.Tensor], needed: Sequence[bool]):
        self.tensors: list[Any] = [None] * len(factors)
        for i, factor in enumerate(factors):
            if needed[i]:
                dtype = torch.float32 if i % 2 else factor.dtype
                self.tensors[i] = torch.zeros_like(factor, dtype=dtype)

    def add(self, rows: Any, parts: Any, d_logits: torch.Tensor):
        """Compute one chunk's gradients: write them for the hidden states, and add them to the sums
        for the weights. rows: selects the chunk's rows. parts: (hidden states of these rows,
        weight) pairs. d_logits: gradient of the loss with respect to the chunk's logits, [rows,
        V/tp]."""
        for i, (hidden, weight) in enumerate(parts):
            d_hidden, d_weight = self.tensors[2 * i : 2 * i + 2]
            d_product = d_logits.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = d_product @ weight
            if d_weight is not None:
                _add_product(d_weight, d_product, hidden)


def _version(tensor: torch.Tensor) -> int | None:
    """torch's count of in-place changes; None for a tensor of inference mode, which
    has no count."""
    return None if tensor.is_inference() else tensor._version


class TrainedPlaces(NamedTuple):
    """The places of trained tokens in the labels of a micro-batch. They are found on the host in
    advance, because on a GPU the search would make the host wait.

    labels: [b, s]. version: torch's count of in-place changes to them, to notice later ones; None
    for a tensor without one.
    places: int64 [n], indices of the n trained tokens in the flattened transpose [s, b] of the
    labels."""

    labels: torch.Tensor
    version: int | None
    places: torch.Tensor

    @classmethod
    def of(cls, labels: torch.Tensor, on_host: torch.Tensor) -> "TrainedPlaces":
        """Find the trained tokens in `on_host`, a copy of the labels in host memory. labels: the
        same labels on this rank's device; known_for() recognises them later."""
        places = (on_host.t().reshape(-1) != IGNORE_INDEX).nonzero()[:, 0]
        return cls(labels, _version(labels), to_device(places, labels.device))

    def known_for(self, labels: torch.Tensor) -> torch.Tensor | None:
        """The indices of trained tokens if `labels` is the very tensor for which they were found,
        and is known to be unchanged since; otherwise None."""
        version = _version(labels)
        is_same = labels is self.labels and version is not None and version == self.version
        return self.places if is_same else None


def _chunks(labels: torch.Tensor, kept: torch.Tensor, chunk_size: int) -> list[Any]:
    """Split the rows that have a label into chunks of at most chunk_size rows -> a selector for
    each chunk: a slice if every row has a label, otherwise a tensor of row indices. kept: indices
    of the rows with a label."""
    if len(kept) == len(labels):
        return [slice(a, a + chunk_size) for a in range(0, len(labels), chunk_size)]
    return [part for part in kept.split(chunk_size) if len(part)]


def _pairs(factors: Sequence[torch.Tensor], rows: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The (hidden states, weight) pairs of one chunk. factors: hidden, weight, hidden, weight, ...;
    rows: selects the chunk's rows of the hidden states."""
    pairs = zip(factors[::2], factors[1::2], strict=True)
    return [(hidden[rows], weight) for hidden, weight in pairs]


def _converted(
    gradients: Sequence[Any], factors: Sequence[torch.Tensor], convert: Callable[..., Any]
) -> list[Any]:
    """Convert each gradient to the dtype of its factor (the tensor that it belongs to) by
    convert(gradient, dtype=...); None stays None."""
    pairs = zip(gradients, factors, strict=True)
    return [g if g is None else convert(g, dtype=tensor.dtype) for g, tensor in pairs]


class _TokenLosses(torch.autograd.Function):
    """Autograd function: the cross entropy of each token, computed chunk by chunk, so that the
    logits of only one chunk are in memory. kept: indices of the labels that are not IGNORE_INDEX.
    ahead: True to compute gradients already in the forward pass, from the chunk's logits. factors:
    hidden, weight, hidden, weight, ...; logits are the sum of the pairs' products."""

    @staticmethod
    def forward(
        ctx: Any,
        labels: torch.Tensor,
        kept: torch.Tensor,
        head: Head,
        ahead: bool,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        needed = ctx.needs_input_grad[4:]
        chunks = _chunks(labels, kept, head.chunk_size)
        ahead = ahead and any(needed)
        ctx.gradients = None
        if ahead:
            gradients = _Gradients(factors, needed)
            ctx.gradients = gradients.tensors
        losses = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
        lse = torch.zeros_like(losses)
        column, here = head.place(labels)
        places = column.where(here, -1)
        for rows in chunks:
            parts = _pairs(factors, rows)
            logits = _logits(parts, head.softcap)
            of_rows = places[rows]
            losses[rows], lse[rows] = chunk_losses, chunk_lse = _losses(logits, of_rows, head)
            if ahead:
                d_logits = _logit_gradients(logits, of_rows, chunk_losses, chunk_lse, None, head)
                del logits  # frees the name; d_logits uses the same memory
                gradients.add(rows, parts, d_logits)
                del d_logits  # the largest tensor here
        # the logit of such a label would be 0, and its loss would look normal
        unknown = head.unknown(labels) & (labels != IGNORE_INDEX)
        losses.masked_fill_(unknown, float("nan"))
        ctx.head = head
        ctx.chunks = chunks
        ctx.save_for_backward(places, losses, lse, *factors)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        places, losses, lse, *factors = ctx.saved_tensors
        # the gradient of a sum is one expanded value, which strides show without a sync
        is_sum = grad.stride(0) == 0 or len(grad) < 2
        has_frozen_head = not any(ctx.needs_input_grad[5::2])
        if ctx.gradients is not None and (is_sum or has_frozen_head):
            by = grad[:1].sum(0, keepdim=True) if is_sum else grad[:, None]
            out = _converted(ctx.gradients, factors, functools.partial(scaled, by=by))
        else:
            gradients = _Gradients(factors, ctx.needs_input_grad[4:])
            for rows in ctx.chunks:
                parts = _pairs(factors, rows)
                where, loss, log, weights = (x[rows] for x in (places, losses, lse, grad))
                logits = _logits(parts, ctx.head.softcap)
                d_logits = _logit_gradients(logits, where, loss, log, weights, ctx.head)
                gradients.add(rows, parts, d_logits)
            out = _converted(gradients.tensors, factors, torch.Tensor.to)
        # the schedule keeps the losses, and so this node, until the next micro-batch
        ctx.gradients = None
        return None, None, None, None, *out


class _LossesOfLogits(torch.autograd.Function):
    """Autograd function: any loss that is a function of Logits, computed chunk by chunk; the
    backward pass computes a chunk's logits again. kept: indices of the labels that are not
    IGNORE_INDEX. factors: hidden, weight, hidden, weight, ...; logits are the sum of the pairs'
    products."""

    @staticmethod
    def forward(
        ctx: Any,
        labels: torch.Tensor,
        kept: torch.Tensor,
        function: LossOfLogits,
        head: Head,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        chunks = _chunks(labels, kept, head.chunk_size)
        losses = None
        # an empty chunk shows how many losses there are per token
        for rows in chunks or [slice(0, 0)]:
            logits = _logits_of(factors, labels, rows, head)
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
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        labels, *factors = ctx.saved_tensors
        ranks = num_ranks(ctx.head.group)
        gradients = _Gradients(factors, ctx.needs_input_grad[4:])
        for rows in ctx.chunks:
            logits = _logits_of(factors, labels, rows, ctx.head)
            leaves = [x.requires_grad_() for x in (logits.product, logits.hidden, logits.weight)]
            with torch.enable_grad(), torch.autocast(labels.device.type, enabled=False):
                losses = checked(ctx.function(logits), logits)
            d_logits, d_hidden, d_weight = torch.autograd.grad(
                losses, leaves, grad[rows], allow_unused=True
            )
            if d_logits is not None:
                gradients.add(rows, _pairs(factors, rows), d_logits)
            of_hidden, of_weight = gradients.tensors[:2]
            if of_hidden is not None and d_hidden is not None:
                # it is the same on all ranks, and the caller sums over ranks
                of_hidden[rows] += d_hidden / ranks
            if of_weight is not None and d_weight is not None:
                of_weight += d_weight
        out = _converted(gradients.tensors, factors, torch.Tensor.to)
        return None, None, None, None, *out


def _logits_of(
    factors: Sequence[torch.Tensor], labels: torch.Tensor, rows: Any, head: Head
) -> Logits:
    """Make the Logits of one chunk of tokens, detached from autograd and without a batch. factors:
    hidden, weight, hidden, weight, ...; labels: of all tokens; rows: selects the chunk."""
    parts = _pairs(factors, rows)
    hidden, weight = parts[0]
    places = torch.arange(len(labels), device=labels.device)[rows]
    product = _logits(parts, None)
    return Logits(product, labels[rows], hidden.detach(), weight.detach(), head, places)


def token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    group: Any = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    extra: tuple[torch.Tensor, torch.Tensor] | None = None,
    softcap: float | None = None,
    weights_differ: bool = False,
    of_logits: LossOfLogits | None = None,
    trained: torch.Tensor | None = None,
    sequence_first: bool = False,
) -> torch.Tensor:
    """The loss of each token, float32 in the shape of labels; 0 for the label IGNORE_INDEX. Cross
    entropy is NaN for any other label that is not a token id.

    hidden: [..., h], the output layer's input. weight: [V/tp, h], this rank's rows. labels: [...],
    hidden's leading shape, token ids of the whole vocabulary.
    group: the tensor-parallel group; None: one rank. vocab_size: number of token ids, after which
    columns are padding; None: no padding.
    chunk_size: number of tokens whose logits are in memory at once; None: 4096 on CUDA, 1024 on a
    CPU and with of_logits.
    extra: an adapter (low [..., r], B [V/tp, r]), whose product is added to the logits. softcap:
    the c of c tanh(z / c) on logits z; None: no softcap.
    weights_differ: True if the objective weights tokens differently. Then, if a weight is trained,
    gradients are computed in the backward pass. Otherwise cross entropy computes them in the
    forward pass (not in float16), and backward scales them, or computes them again if scaling is
    not enough. Gradients are the same up to rounding.
    of_logits: a loss in place of cross entropy; if it gives [n, k], the result is [..., k].
    trained: int64 [n], indices of flattened labels that are not IGNORE_INDEX; None: they are
    searched here, for which the host waits for a GPU.
    sequence_first: True if labels are [s, b] instead of [b, s], which an of_logits that reads batch
    columns must know.

    Collective over `group` if it has several ranks: cross entropy takes one all-gather per chunk in
    the forward pass; with of_logits, the collectives are those that it calls, in both passes. The
    gradients of hidden and low are only this rank's parts: megatron's mapping around them (copy_to
    or gather_from) sums them. A weight that needs no gradient gets none. Rows without a label are
    dropped before any GEMM. Under autocast these GEMMs run in its dtype. ValueError if hidden and
    labels differ in shape, or of_logits gives another shape."""
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} does not belong to labels {tuple(labels.shape)}"
        )
    device = hidden.device.type
    factors = [hidden, weight, *(extra or ())]
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        factors = [t.to(dtype) for t in factors]
    rows = len(weight)
    first = 0 if group is None else rows * group.rank()
    if vocab_size is None:
        vocab_size = rows * num_ranks(group)
    columns = min(max(vocab_size - first, 0), rows)
    if chunk_size is None:
        chunk_size = CHUNK_SIZE_CUDA if hidden.is_cuda else CHUNK_SIZE_CPU
        if of_logits is not None:
            chunk_size = CHUNK_SIZE_OF_LOGITS
    shape = labels.shape
    head = Head(group, vocab_size, first, columns, chunk_size, softcap, shape, sequence_first)
    would_be_in_vain = weights_differ and any(t.requires_grad for t in factors[1::2])
    # probabilities of rare tokens are too small for fp16 until the loss scale multiplies them, in
    # the backward pass
    would_be_zero = any(t.dtype == torch.float16 for t in factors)
    ahead = not (would_be_in_vain or would_be_zero)
    labels = labels.reshape(-1)
    if trained is None:
        trained = (labels != IGNORE_INDEX).nonzero()[:, 0]
    with torch.autocast(device, enabled=False):
        factors = [t.reshape(-1, t.shape[-1]) for t in factors]
        if of_logits is not None:
            losses = _LossesOfLogits.apply(labels, trained, of_logits, head, *factors)
            return losses.view(*shape, *losses.shape[1:])
        return _TokenLosses.apply(labels, trained, head, ahead, *factors).view(shape)
