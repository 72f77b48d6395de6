"""Losses of one's own on the logits: what such a loss is given of a chunk of tokens.

Letters: n tokens, h hidden size, V vocabulary, tp the tensor-parallel size. A loss is a function
of Logits to float32 [n], or [n, k] for k losses of each token. It runs for a chunk at a time, and
again in the backward pass, on every rank of the tensor-parallel group: `sum` and `spread` are what
stands between numbers of one rank and those of all (g and f of the Megatron paper).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

from .parallel import sum_gradients


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
        values, cap = self.product.float()[:, : self.head.columns], self.head.softcap
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
