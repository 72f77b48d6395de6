"""megatron's tensor-parallel linears, each matmul and its communication in one autograd function.

Under sequence parallelism, communication can overlap with matmuls (tp_comm_overlap): the matmul for
this rank's tokens runs while other ranks' tokens arrive. GPUs of one host copy them from each
other's memory (torch's symmetric memory) on a separate stream. Otherwise the same functions gather,
multiply and scatter one after another. Weights, initialisation and checkpoints stay megatron's.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .cpu import add_weight_gradient
from .kernels import first_line
from .mcore import ColumnParallelLinear, RowParallelLinear
from .parallel import gather_into, scatter_into

_SETS = 3
_LEAST = 1 << 20  # smallest buffer set, in bytes
_NO_SYMMETRIC_MEMORY = (
    "tp_comm_overlap: torch's symmetric memory does not work here ({}): tensor-parallel "
    "communication does not overlap with matmuls"
)


class ColumnLinear(ColumnParallelLinear):
    """A linear whose outputs are sharded over tp_group: [s, b, h], or [s / tp, b, h] under sequence
    parallelism -> [s, b, n / tp].

    Collectives over tp_group: in backward; under sequence parallelism in forward too.
    """

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The matmul: x -> [s, b, n / tp], without the bias. An adapter replaces this method on the
        instance.
        """
        return ColumnProduct.apply(x, weight, Way.of(self))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output [s, b, n / tp] without the bias, bias or None)."""
        return self.product(x, self.weight), self.bias


class RowLinear(RowParallelLinear):
    """A linear whose inputs are sharded over tp_group: [s, b, k / tp] -> [s, b, n], or [s / tp, b,
    n] under sequence parallelism.

    Collectives over tp_group: in forward; under sequence parallelism in backward too.
    """

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The matmul: x [s, b, k / tp] -> output summed over tp_group, without the bias. An adapter
        replaces this method on the instance.
        """
        return RowProduct.apply(x, weight, Way.of(self))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output without the bias, bias or None)."""
        return self.product(x, self.weight), self.bias


class Way(NamedTuple):
    """A linear's communication: its group, whether tokens are sharded, whether it overlaps."""

    group: Any  # a ProcessGroup; None: no communication
    cuts_tokens: bool = False  # outside the linear, tokens are sharded (sequence parallelism)
    overlaps: bool = False  # communication runs beside matmuls
    accumulates: bool = False  # the weight's gradient is added to its main_grad

    @classmethod
    def of(cls, linear: torch.nn.Module) -> "Way":
        """Read a megatron linear's group, sequence parallelism, overlap and
        gradient accumulation.
        """
        accumulates = linear.gradient_accumulation_fusion
        # shared experts that overlap with the token dispatch do this communication themselves
        if linear.explicit_expert_comm or linear.tp_group.size() == 1:
            return cls(None, accumulates=accumulates)
        is_cut = linear.sequence_parallel
        return cls(linear.tp_group, is_cut, linear.config.tp_comm_overlap, accumulates)


class ColumnProduct(torch.autograd.Function):
    """x [s, b, k], or [s / tp, b, k] if tokens are sharded, times weight [n, k] transposed -> [s,
    b, n]. n counts this rank's outputs.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, way: Way) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.constants = weight, way
        if not way.cuts_tokens:
            return F.linear(x, weight)
        return gather_multiply(x, weight.t(), way)[1]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        weight, way = ctx.constants
        [x] = ctx.saved_tensors
        of_x = of_weight = None
        # each of the two matmuls runs during the other's communication
        if x is not None:
            whole, arrivals = start_gather(x, way)
        sums: list[Any] = []
        if ctx.needs_input_grad[0]:
            of_x, sums = start_sum(grad, weight, way)
        if x is not None:
            _wait(arrivals)
            of_weight = _of_weight(weight, whole, grad, way.accumulates)
        _wait(sums)
        return of_x, of_weight, None


class RowProduct(torch.autograd.Function):
    """x [s, b, k] times weight [n, k] transposed, summed over the group -> [s, b, n], or [s / tp,
    b, n] if tokens are sharded. k counts this rank's inputs.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, way: Way) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.constants = weight, way
        if way.cuts_tokens:
            return multiply_scatter(x, weight.t(), way)
        out = F.linear(x, weight)
        if way.group is not None:
            dist.all_reduce(out, group=way.group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        weight, way = ctx.constants
        [x] = ctx.saved_tensors
        of_weight = None
        if way.cuts_tokens:
            grad, of_x = gather_multiply(grad, weight, way)
        else:
            of_x = grad @ weight
        if x is not None:
            of_weight = _of_weight(weight, x, grad, way.accumulates)
        return of_x, of_weight, None


def beside(module: torch.nn.Module) -> Any:
    """The module's adapter; None if it has none or the adapter is disabled."""
    adapter = getattr(module, "lora", None)
    return adapter if adapter is not None and adapter.enabled else None


def experts_product(
    x: torch.Tensor, weight: torch.Tensor, product: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """product(x, weight [n, ..., in] as [n, out, in]): multiplies each expert's tokens by its w^T.
    A quantised weight is saved for backward in its quantised form.
    """
    if hasattr(weight, "frozen_product"):
        return weight.frozen_product(x, product)
    return product(x, weight.flatten(1, -2))


def extra_factors(head: torch.nn.Module, hidden: torch.Tensor) -> Any:
    """(scale * x A^T over the whole sequence, B) of the adapter on an output layer, for
    token_losses; None if there is no adapter.
    """
    adapter = beside(head)
    return None if adapter is None else adapter.factors(hidden)


def _of_weight(
    weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, accumulates: bool
) -> torch.Tensor:
    """Gradient of weight [n, k] from inputs x [s, b, k] and output gradient [s, b, n]. If
    `accumulates`, it is added to weight.main_grad, and the result is an empty tensor for megatron's
    DDP hook.
    """
    x = x.flatten(0, 1)
    grad = grad.flatten(0, 1)
    if not accumulates:
        return grad.t() @ x
    add_weight_gradient(x, grad, weight.main_grad)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def _wait(messages: list[Any]) -> None:
    """Make the current stream wait for pending communication (handles or events)."""
    for message in messages:
        message.wait()


def start_gather(x: torch.Tensor, way: Way) -> tuple[torch.Tensor, list[Any]]:
    """Start to gather x [s / tp, b, k] to [s, b, k] -> (result, handles to wait for). If tokens are
    not sharded: (x, []). Collective over way.group.
    """
    if not way.cuts_tokens:
        return x, []
    x = x.contiguous()
    peers = peers_of(way.group) if way.overlaps and x.is_cuda else None
    if peers is not None:
        whole, arrivals = peers.gather(x)
        return whole, [arrival for _, arrival in arrivals]
    whole = x.new_empty(way.group.size() * x.shape[0], *x.shape[1:])
    return whole, [gather_into(whole, x, group=way.group, async_op=True)]


def start_sum(grad: torch.Tensor, weight: torch.Tensor, way: Way) -> tuple[torch.Tensor, list[Any]]:
    """Compute grad [s, b, n] @ weight [n, k] and start to sum it over the group -> (result, handles
    to wait for).

    The result is [s, b, k], or this rank's [s / tp, b, k] if tokens are sharded. Collective over
    way.group.
    """
    if way.cuts_tokens and way.overlaps and grad.is_cuda:
        return multiply_scatter(grad, weight, way), []
    product = grad @ weight
    if way.group is None:
        return product, []
    if not way.cuts_tokens:
        return product, [dist.all_reduce(product, group=way.group, async_op=True)]
    out = product.new_empty(product.shape[0] // way.group.size(), *product.shape[1:])
    return out, [scatter_into(out, product, group=way.group, async_op=True)]


def gather_multiply(
    x: torch.Tensor, matrix: torch.Tensor, way: Way
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [s / tp, b, k] gathered to [s, b, k], the gathered x @ matrix [k, n]). Collective over
    way.group.
    """
    x = x.contiguous()
    peers = peers_of(way.group) if way.overlaps and x.is_cuda else None
    if peers is None:
        whole = x.new_empty(way.group.size() * x.shape[0], *x.shape[1:])
        gather_into(whole, x, group=way.group)
        return whole, whole @ matrix
    whole, arrivals = peers.gather(x)
    out = x.new_empty(*whole.shape[:-1], matrix.shape[1])
    parts = whole.view(peers.size, -1, whole.shape[-1])
    outs = out.view(peers.size, -1, out.shape[-1])
    torch.mm(x.flatten(0, 1), matrix, out=outs[peers.rank])
    for peer, arrival in arrivals:
        arrival.wait()
        torch.mm(parts[peer], matrix, out=outs[peer])
    return whole, out


def multiply_scatter(x: torch.Tensor, matrix: torch.Tensor, way: Way) -> torch.Tensor:
    """x [s, b, k] @ matrix [k, n], summed over the group -> this rank's tokens [s / tp, b, n].
    Collective over way.group.
    """
    peers = peers_of(way.group) if way.overlaps and x.is_cuda else None
    if peers is None:
        product = x @ matrix
        out = product.new_empty(product.shape[0] // way.group.size(), *product.shape[1:])
        scatter_into(out, product, group=way.group)
        return out
    parts = x.contiguous().view(peers.size, -1, x.shape[-1])
    arrivals = []
    for step in range(1, peers.size):
        to = (peers.rank + step) % peers.size
        mine, theirs = peers.slot(step, parts[to].shape[0] * matrix.shape[1], x.dtype)
        torch.mm(parts[to], matrix, out=mine.view(-1, matrix.shape[1]))
        arrivals.append(peers.fetch(theirs[peers.rank - step], torch.empty_like(mine)))
    peers.next()
    out = torch.mm(parts[peers.rank], matrix)
    for part, arrival in arrivals:
        arrival.wait()
        out += part.view_as(out)
    return out.view(-1, *x.shape[1:-1], matrix.shape[1])


class Peers:
    """Buffers that the GPUs of one host read from each other, and the stream that copies them.

    Three buffer sets take turns. A set is written again three exchanges later. By then every rank
    has read it: this rank has waited for an exchange in between, in which all ranks met after their
    reads. The last exchange may still be running. The sets grow with the largest exchange.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.stream = torch.cuda.Stream()
        self.turn = 0
        self._room = 0  # bytes per set
        self._views: dict[tuple[Any, ...], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def slot(
        self, number: int, length: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(this rank's buffer [length], the same buffer of every rank) in the current set. number:
        1 to size - 1. Collective if the buffers must grow.
        """
        key = self.turn % _SETS, number, length, dtype
        if key not in self._views:
            needed = (self.size - 1) * length * dtype.itemsize
            if needed > self._room:
                self._grow(needed)
            place = key[0] * self._room // dtype.itemsize + (number - 1) * length
            get = self._handle.get_buffer
            ranks = [get(rank, (length,), dtype, place) for rank in range(self.size)]
            self._views[key] = ranks[self.rank], ranks
        return self._views[key]

    def _grow(self, needed: int) -> None:
        """Allocate sets of at least `needed` bytes. Collective."""
        from torch.distributed import _symmetric_memory

        torch.cuda.synchronize()  # nothing reads the smaller ones any more
        dist.barrier(self.group)
        self._room = max(2 ** math.ceil(math.log2(needed)), _LEAST)
        size = _SETS * self._room
        self._whole = _symmetric_memory.empty(size, dtype=torch.uint8, device="cuda")
        self._handle = _symmetric_memory.rendezvous(self._whole, self.group.group_name)
        self._views = {}

    def next(self) -> None:
        """End an exchange: the next one uses the next buffer set."""
        self.turn += 1

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """(x [s / tp, ...] gathered to [s, ...], [(rank, event of its tokens' arrival)]). This
        rank's tokens are there at once.
        """
        whole = x.new_empty(self.size * len(x), *x.shape[1:])
        parts = whole.view(self.size, -1)
        mine, theirs = self.slot(1, x.numel(), x.dtype)
        mine.copy_(x.view(-1))
        arrivals = []
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            _, arrival = self.fetch(theirs[peer], parts[peer], meets=step == 1)
            arrivals.append((peer, arrival))
        self.next()
        parts[self.rank].copy_(x.view(-1))
        return whole, arrivals

    def fetch(
        self, theirs: torch.Tensor, out: torch.Tensor, meets: bool = True
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Copy another rank's buffer `theirs` into `out` -> (out, event of its arrival). meets:
        first wait until all ranks reach this point.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if meets:
                self._handle.barrier(channel=0)
            out.copy_(theirs)
            return out, self.stream.record_event()


@functools.cache
def peers_of(group: dist.ProcessGroup) -> Peers | None:
    """The Peers of a group, or None, with a warning, if symmetric memory does not work on one of
    its ranks.

    The first call tries it, collectively over the group; later calls return the same answer.
    """
    reason = "another rank could not"
    peers = Peers(group)
    try:
        whole, arrivals = peers.gather(torch.full((8,), float(peers.rank), device="cuda"))
        for _, arrival in arrivals:
            arrival.wait()
        wanted = torch.arange(peers.size, device="cuda").repeat_interleave(8)
        works = bool((whole == wanted).all())
    except Exception as error:  # of the driver, the container, or torch
        works = False
        reason = first_line(error)
    everywhere = torch.tensor(int(works), device="cuda")
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group)
    if not everywhere:
        warnings.warn(_NO_SYMMETRIC_MEMORY.format(reason), stacklevel=2)
        return None
    return peers
