"""Triton kernels for distillation: divergence and cross entropy over a chunk's logits, and their
gradients, without float32 copies of the logits.

Letters: n rows (tokens); z a student logit and y its teacher's, both after their caps; q and p the
probabilities at temperature T; L the log of the sum of exp(z / T), so q = exp(z / T - L); D the
divergence; b the teacher's share in m = b p + (1 - b) q. Gradients with respect to z, times T:

    forward_kl   q - p
    reverse_kl   q (log(q / p) - D)
    jsd          (1 - b) q (log(q / m) - sum q log(q / m))

With tensor parallelism each rank has its columns of both models, and sums run over all ranks. A
cached teacher compares events: its k tokens, and the rest of the common vocabulary as one.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .kernels import jit, launch, tl, triton
from .loss_tokens import Head, Logits, all_reduce

_LOWEST = torch.finfo(torch.float32).min
_FORWARD, _REVERSE, _JSD = range(3)
_KINDS = {"forward_kl": _FORWARD, "reverse_kl": _REVERSE, "jsd": _JSD}
_BLOCK = 4096  # columns read at once by a program


@jit
def _value(start, column, columns, softcap, CAPPED: tl.constexpr):
    """Load logits of one row in a Triton kernel, as float32, after the soft cap. start: pointer to
    the row. column: the columns to load. columns: how many columns are valid; the value is -inf
    beyond them. softcap: the cap, used if CAPPED."""
    value = tl.load(start + column, column < columns, 0.0).to(tl.float32)
    if CAPPED:  # softcap tanh(value / softcap)
        small = tl.exp(-2 * tl.abs(value) / softcap)
        size = softcap * (1 - small) / (1 + small)
        value = tl.where(value < 0, -size, size)
    return tl.where(column < columns, value, -float("inf"))


@jit
def _added(top, total, values):
    """Add more values to a log-sum-exp that is computed step by step. It is kept as (top, total):
    the maximum so far, and the sum of exponentials relative to it. Returns the new pair."""
    now = tl.maximum(top, tl.max(values, 0))
    return now, total * tl.exp(top - now) + tl.sum(tl.exp(values - now), 0)


@jit
def _sums_kernel(
    logits, events, found, rows, softcap, temperature, common, columns, width, rest,
    CAPPED: tl.constexpr, LABELS: tl.constexpr, EVENTS: tl.constexpr, LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    top = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    plain_top = top
    plain_total = total
    rest_top = top
    rest_total = total
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = _value(start, column, columns, softcap, CAPPED)
        if LABELS:
            plain_top, plain_total = _added(plain_top, plain_total, value)
        value = tl.where(column < common, value / temperature, -float("inf"))
        top, total = _added(top, total, value)
        if EVENTS:
            event = tl.load(events + row * (common + 1) + column, column < common, 0)
            value = tl.where(event == rest, value, -float("inf"))
            rest_top, rest_total = _added(rest_top, rest_total, value)
    tl.store(found + row, top)
    tl.store(found + rows + row, total)
    if LABELS:
        tl.store(found + 2 * rows + row, plain_top)
        tl.store(found + 3 * rows + row, plain_total)
    if EVENTS:
        tl.store(found + 4 * rows + row, rest_top)
        tl.store(found + 5 * rows + row, rest_total)


@jit
def _log_mixture(log_p, log_q, b):
    one = log_p + tl.log(b)
    other = log_q + tl.log(1 - b)
    most = tl.maximum(one, other)
    return most + tl.log(1 + tl.exp(tl.minimum(one, other) - most))


@jit
def _divergence_kernel(
    student, teacher, sums, of_student, of_teacher, rows, softcap, cap, temperature, b, common,
    width, CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    log_z = tl.load(of_student + row)
    log_y = tl.load(of_teacher + row)
    of_p = tl.zeros((BLOCK,), tl.float32)
    of_q = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, common, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < common
        log_q = _value(student + row * width, column, common, softcap, CAPPED) / temperature - log_z
        log_p = _value(teacher + row * common, column, common, cap, TEACHER_CAPPED) / temperature
        log_q = tl.where(inside, log_q, 0.0)
        log_p = tl.where(inside, log_p - log_y, 0.0)
        if KIND == 0:
            of_p += tl.exp(log_p) * (log_p - log_q)
        elif KIND == 1:
            of_q += tl.exp(log_q) * (log_q - log_p)
        else:
            log_m = tl.where(inside, _log_mixture(log_p, log_q, b), 0.0)
            of_p += tl.exp(log_p) * (log_p - log_m)
            of_q += tl.exp(log_q) * (log_q - log_m)
    tl.store(sums + row, tl.sum(of_p, 0))
    tl.store(sums + rows + row, tl.sum(of_q, 0))


@jit
def _of_cross_entropy(z, column, row, of_labels, places, by_label):
    is_label = (column == tl.load(places + row)).to(tl.float32)
    return (tl.exp(z - tl.load(of_labels + row)) - is_label) * tl.load(by_label + row)


@jit
def _capped(slope, z, softcap, CAPPED: tl.constexpr):
    """Carry a gradient back through the soft cap of logits. slope: gradient with respect to the
    capped logits z. Returns the gradient with respect to the logits before the cap; `slope` itself
    unless CAPPED."""
    if CAPPED:
        tanh = tl.maximum(z / softcap, -1.0)
        slope *= 1 - tanh * tanh
    return slope


@jit
def _gradients_kernel(
    student, teacher, out, of_student, of_teacher, of_labels, of_q, places, grad, by_label, softcap,
    cap, temperature, b, common, columns, width, CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < common
    z = _value(student + row * width, column, columns, softcap, CAPPED)
    log_q = tl.where(inside, z / temperature - tl.load(of_student + row), 0.0)
    log_p = _value(teacher + row * common, column, common, cap, TEACHER_CAPPED) / temperature
    log_p = tl.where(inside, log_p - tl.load(of_teacher + row), 0.0)
    q = tl.exp(log_q)
    if KIND == 0:
        slope = q - tl.exp(log_p)
    elif KIND == 1:
        slope = q * (log_q - log_p - tl.load(of_q + row))
    else:
        slope = (1 - b) * q * (log_q - _log_mixture(log_p, log_q, b) - tl.load(of_q + row))
    slope = tl.where(inside, slope, 0.0) * (tl.load(grad + row) / temperature)
    slope += _of_cross_entropy(z, column, row, of_labels, places, by_label)
    tl.store(out + row * width + column, _capped(slope, z, softcap, CAPPED), column < width)


@jit
def _event_gradients_kernel(
    logits, events, out, of_all, of_labels, of_events, places, grad, of_grad, by_label, softcap,
    temperature, common, columns, width, rest, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < common
    z = _value(logits + row * width, column, columns, softcap, CAPPED)
    event = tl.load(events + row * (common + 1) + column, inside, 0).to(tl.int64)
    event += row * (rest + 1)
    cold = z / temperature
    of_event = tl.exp(cold - tl.load(of_events + event, inside, 0.0))
    slope = of_event * tl.load(grad + event, inside, 0.0)
    slope -= tl.exp(cold - tl.load(of_all + row)) * tl.load(of_grad + row)
    slope = tl.where(inside, slope / temperature, 0.0)
    slope += _of_cross_entropy(z, column, row, of_labels, places, by_label)
    tl.store(out + row * width + column, _capped(slope, z, softcap, CAPPED), column < width)


class _Chunk(NamedTuple):
    """Facts about a chunk of tokens that the distillation kernels read, beside its logits. head:
    constants of the student's output layer. common: number of this rank's columns whose token ids
    both models have. softcap: cap on the student's logits; None: there is none."""

    head: Head  # the student's
    common: int  # number of this rank's columns whose token ids both models have
    labels: torch.Tensor
    temperature: float
    softcap: float | None  # cap on the student's logits

    @classmethod
    def of(cls, logits: Logits, common: Logits, temperature: float) -> "_Chunk":
        head = logits.head
        return cls(head, common.head.columns, logits.labels, temperature, head.softcap)

    def sums(
        self,
        logits: torch.Tensor,
        columns: int,
        softcap: float | None,
        events: torch.Tensor | None = None,
        rest: int = 0,
        labels: bool = False,
    ) -> torch.Tensor:
        """Read logits [n, columns or more] once, and begin up to three log-sum-exps per token, over
        this rank's columns -> float32 [3, 2, n]: of each, the largest exponent, and the sum of
        exponentials relative to it; (the lowest float, 0) if nothing is summed.

        [0]: over the columns that both models have, at the temperature. [1], if `labels`: over all
        columns, at temperature 1. [2], if `events` is given: over those of [0] that are not among
        the teacher's top k, at the temperature.

        logits: the student's or the teacher's, before the soft cap. columns: how many columns to
        read; those after them are padding. softcap: the cap to apply; None: there is none. events:
        int [n, common + 1]: i for a column that is the teacher's i-th token, and `rest` (that is,
        k) for a column that is none of its top k; the last column is not read."""
        rows, width = logits.shape
        found = torch.zeros(3, 2, rows, dtype=torch.float32, device=logits.device)
        found[:, 0] = _LOWEST
        flags = dict(CAPPED=softcap is not None, LABELS=labels, EVENTS=events is not None)
        numbers = softcap or 1.0, self.temperature, self.common, columns, width, rest
        tensors = logits, events, found, rows
        constants = dict(LOWEST=_LOWEST, BLOCK=_BLOCK, num_warps=8)
        launch(_sums_kernel, (rows,), *tensors, *numbers, **flags, **constants)
        return found

    def logsumexp(self, found: torch.Tensor) -> torch.Tensor:
        """Finish log-sum-exps that sums() began, over all tensor-parallel ranks -> [m, n], m
        log-sum-exps for n tokens. found: [m, 2, n], this rank's largest exponent and sum of
        exponentials relative to it. Collective over the tensor-parallel group."""
        tops, totals = found.unbind(1)
        most = all_reduce(tops.clone(), dist.ReduceOp.MAX, self.head.group)
        total = all_reduce(totals * (tops - most).exp(), dist.ReduceOp.SUM, self.head.group)
        return most + total.log()

    def values_at(
        self, logits: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up logits of global token ids [n, k], after the soft cap -> (float32 logits [n, k],
        the ids' columns on this rank [n, k]). For an id that is not on this rank: 0 and -1. logits:
        the student's [n, columns or more]."""
        column, here = self.head.place(tokens)
        values = logits.gather(1, column).float()
        if self.softcap is not None:
            values = self.softcap * torch.tanh(values / self.softcap)
        return values * here, column.where(here, -1)

    def cross_entropy(self, of_labels: torch.Tensor, at_labels: torch.Tensor) -> torch.Tensor:
        """Cross entropy [n] of the chunk's labels; NaN for a label that is no token id. of_labels:
        [n], log-sum-exp of all logits. at_labels: [n], the label's logit."""
        return (of_labels - at_labels).masked_fill(self.head.unknown(self.labels), float("nan"))


class _Beside(torch.autograd.Function):
    """Compare a student with a teacher that is in memory: student logits [n, V / tp] and teacher
    logits [n, common] -> (divergence [n] at the temperature, cross entropy [n] of the student).
    Gradients for the student only. Forward is collective over the tensor-parallel group."""

    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        teacher: torch.Tensor,
        chunk: _Chunk,
        config: Any,
        cap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = chunk.head.columns
        found = chunk.sums(student, columns, chunk.softcap, labels=True)
        found[2] = chunk.sums(teacher, chunk.common, cap)[0]
        of_student, of_labels, of_teacher = chunk.logsumexp(found)
        at_label, places = chunk.values_at(student, chunk.labels[:, None])
        rows, width = student.shape
        sums = torch.empty(3, rows, dtype=torch.float32, device=student.device)
        sums[2] = at_label[:, 0]
        b = config.jsd_mix
        numbers = chunk.softcap or 1.0, cap or 1.0, chunk.temperature, b, chunk.common
        flags = dict(
            CAPPED=chunk.softcap is not None,
            TEACHER_CAPPED=cap is not None,
            KIND=_KINDS[config.divergence],
            BLOCK=_BLOCK,
            num_warps=8,
        )
        tensors = student, teacher, sums, of_student, of_teacher, rows
        launch(_divergence_kernel, (rows,), *tensors, *numbers, width, **flags)
        of_p, of_q, at_label = all_reduce(sums, dist.ReduceOp.SUM, chunk.head.group)
        ctx.flags = flags
        ctx.numbers = *numbers, columns, width
        ctx.save_for_backward(student, teacher, of_student, of_teacher, of_labels, of_q, places)
        by_p, by_q = {"forward_kl": (1, 0), "reverse_kl": (0, 1)}.get(config.divergence, (b, 1 - b))
        return by_p * of_p + by_q * of_q, chunk.cross_entropy(of_labels, at_label)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor, by_label: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        student, teacher, *of_rows = ctx.saved_tensors
        out = torch.empty_like(student)
        rows, width = student.shape
        grads = grad.contiguous(), by_label.contiguous()
        grid = rows, triton.cdiv(width, _BLOCK)
        tensors = student, teacher, out, *of_rows, *grads
        launch(_gradients_kernel, grid, *tensors, *ctx.numbers, **ctx.flags)
        return out, None, None, None, None


class _Events(torch.autograd.Function):
    """The student's side of a comparison with a cached teacher, of which only the top k tokens are
    known: student logits [n, V / tp] and the teacher's tokens [n, k] -> (log-probabilities [n, k +
    1] at the temperature, of these tokens and of the rest of the common vocabulary; cross entropy
    [n]). Gradients for the logits. Forward is collective over the tensor-parallel group."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, chunk: _Chunk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = logits.shape
        rest = tokens.shape[1]
        columns = chunk.head.columns
        values, at = chunk.values_at(logits, tokens)
        dtype = torch.int16 if rest < 2**15 else torch.int32
        # tokens on other ranks write to the extra last column
        events = at.new_full((rows, chunk.common + 1), rest, dtype=dtype)
        numbers = torch.arange(rest, dtype=dtype, device=at.device).expand(rows, rest)
        events.scatter_(1, at.where(at >= 0, chunk.common), numbers)
        found = chunk.sums(logits, columns, chunk.softcap, events, rest, labels=True)
        of_all, of_labels, of_rest = chunk.logsumexp(found)
        at_label, places = chunk.values_at(logits, chunk.labels[:, None])
        known = torch.cat([values, at_label], 1)
        known = all_reduce(known, dist.ReduceOp.SUM, chunk.head.group)
        of_events = torch.cat([known[:, :rest] / chunk.temperature, of_rest[:, None]], 1)
        ctx.flags = dict(CAPPED=chunk.softcap is not None, BLOCK=_BLOCK, num_warps=8)
        ctx.numbers = chunk.softcap or 1.0, chunk.temperature, chunk.common, columns, width, rest
        ctx.save_for_backward(logits, events, of_all, of_labels, of_events, places)
        return of_events - of_all[:, None], chunk.cross_entropy(of_labels, known[:, rest])

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor, by_label: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        logits, events, *of_rows = ctx.saved_tensors
        out = torch.empty_like(logits)
        rows, width = logits.shape
        grads = grad.contiguous(), grad.sum(1), by_label.contiguous()
        grid = rows, triton.cdiv(width, _BLOCK)
        tensors = logits, events, out, *of_rows, *grads
        launch(_event_gradients_kernel, grid, *tensors, *ctx.numbers, **ctx.flags)
        return out, None, None


def losses_beside(
    logits: Logits, common: Logits, teacher: torch.Tensor, cap: float | None, config: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare a student with a teacher that is in memory, by Triton kernels -> (divergence [n] at
    the temperature, cross entropy [n] of the student). Collective over the tensor-parallel group.

    logits: the student's. common: the student's logits for token ids that both models have.
    teacher: the teacher's logits for these ids, [n, columns], before its soft cap. cap: the
    teacher's soft cap; None: it has none. config: has temperature, divergence and jsd_mix."""
    chunk = _Chunk.of(logits, common, config.temperature)
    return _Beside.apply(logits.product.contiguous(), teacher.contiguous(), chunk, config, cap)


def log_probs_of_events(
    logits: Logits, common: Logits, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute by Triton kernels what distillation from a cached teacher compares -> (the student's
    log-probabilities [n, k + 1] at the temperature, of the teacher's tokens and of the rest of the
    common vocabulary together; the student's cross entropy [n]). The first is [n, k] if there is no
    rest. Collective over the tensor-parallel group.

    logits: the student's. common: the student's logits for token ids that both models have. tokens:
    [n, k], the teacher's top k token ids."""
    chunk = _Chunk.of(logits, common, temperature)
    log_q, cross_entropy = _Events.apply(logits.product.contiguous(), tokens, chunk)
    return log_q[:, : common.head.vocab_size], cross_entropy
