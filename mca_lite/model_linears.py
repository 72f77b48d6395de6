"""megatron's linears, a product and its messages in one function of autograd, in every layout.

Under sequence parallelism messages can travel behind products (tp_comm_overlap): a product takes
this rank's part of the tokens while the others' arrive. The GPUs of one host copy them from each
other's memory (torch's symmetric memory), on a stream of its own. Elsewhere the same functions
gather, multiply and scatter in turn.
Of megatron's linears the weights, their initialisation and their checkpoints stay.
"""

import functools
import math
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .cpu import add_weight_gradient
from .kernels import first_line
from .mcore import ColumnParallelLinear, RowParallelLinear
from .parallel import gather_into, scatter_into

_SETS = 3
_LEAST = 1 << 20  # bytes of a set
_NO_SYMMETRIC_MEMORY = (
    "tp_comm_overlap: torch's symmetric memory does not work here ({}): messages of tensor "
    "parallelism are not hidden behind products"
)


class ColumnLinear(ColumnParallelLinear):
    """A linear with its outputs cut over the ranks of tp_group: takes [s, b, h], or [s / tp, b, h]
    under sequence parallelism. Collectives over tp_group in both passes."""

    def product(self, x, weight):
        """The outputs [s, b, n / tp] of x. An adapter replaces it on the instance."""
        return ColumnProduct.apply(x, weight, Way.of(self))

    def forward(self, x):
        """(output [s, b, n / tp], bias or None)."""
        return self.product(x, self.weight), self.bias


class RowLinear(RowParallelLinear):
    """A linear with its inputs cut over the ranks of tp_group: gives [s, b, h], or [s / tp, b, h]
    under sequence parallelism. Collectives over tp_group in both passes."""

    def product(self, x, weight):
        """The outputs of x [s, b, h / tp]. An adapter replaces it on the instance."""
        return RowProduct.apply(x, weight, Way.of(self))

    def forward(self, x):
        """(output, bias or None) of x [s, b, h / tp]."""
        return self.product(x, self.weight), self.bias


class Way(NamedTuple):
    """The messages of a linear."""

    group: dist.ProcessGroup | None  # None: no messages
    cuts_tokens: bool = False  # ranks have parts of the sequence, outside of the linear
    overlaps: bool = False
    accumulates: bool = False  # the weight's gradient is added to its main_grad

    @classmethod
    def of(cls, linear) -> "Way":
        """Read it from a linear of megatron."""
        accumulates = linear.gradient_accumulation_fusion
        # the shared experts beside a dispatch send for themselves
        if linear.explicit_expert_comm or linear.tp_group.size() == 1:
            return cls(None, accumulates=accumulates)
        is_cut = linear.sequence_parallel
        return cls(linear.tp_group, is_cut, linear.config.tp_comm_overlap, accumulates)


class ColumnProduct(torch.autograd.Function):
    """x [s, b, k], or [s / tp, b, k] of each rank with cut tokens, times weight [n, k] ->
    [s, b, n]."""

    @staticmethod
    def forward(ctx, x, weight, way: Way):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.constants = weight, way
        if not way.cuts_tokens:
            return F.linear(x, weight)
        return gather_multiply(x, weight.t(), way)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, way = ctx.constants
        [x] = ctx.saved_tensors
        of_x = of_weight = None
        # the messages of each product are behind the other one
        if x is not None:
            whole, arrivals = start_gather(x, way)
        sums = []
        if ctx.needs_input_grad[0]:
            of_x, sums = start_sum(grad, weight, way)
        if x is not None:
            _wait(arrivals)
            of_weight = _of_weight(weight, whole, grad, way.accumulates)
        _wait(sums)
        return of_x, of_weight, None


class RowProduct(torch.autograd.Function):
    """x [s, b, k] times weight [n, k], summed over the ranks -> [s, b, n], or this rank's part
    [s / tp, b, n] with cut tokens."""

    @staticmethod
    def forward(ctx, x, weight, way: Way):
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
    def backward(ctx, grad):
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


def beside(module: torch.nn.Module):
    """The adapter on a module; None without one, or while it is off."""
    adapter = getattr(module, "lora", None)
    return adapter if adapter is not None and adapter.enabled else None


def extra_factors(head: torch.nn.Module, hidden: torch.Tensor):
    """Two matrices of the adapter on an output layer, for token_losses; None without one."""
    adapter = beside(head)
    return None if adapter is None else adapter.factors(hidden)


def _of_weight(weight, x, grad, accumulates: bool):
    """The gradient of weight [n, k] for its inputs x [s, b, k] and its outputs' gradient
    [s, b, n]; added to weight.main_grad, an empty tensor for the hook of megatron's DDP."""
    x = x.flatten(0, 1)
    grad = grad.flatten(0, 1)
    if not accumulates:
        return grad.t() @ x
    add_weight_gradient(x, grad, weight.main_grad)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def _wait(messages: list) -> None:
    """Let the device wait for messages, or events, under way."""
    for message in messages:
        message.wait()


def start_gather(x, way: Way) -> tuple[torch.Tensor, list]:
    """(x [s / tp, b, k] of each rank gathered to [s, b, k], messages to wait for); x itself without
    cut tokens. Collective over the group of `way`."""
    if not way.cuts_tokens:
        return x, []
    x = x.contiguous()
    peers = peers_of(way.group) if way.overlaps and x.is_cuda else None
    if peers is not None:
        whole, arrivals = peers.gather(x)
        return whole, [arrival for _, arrival in arrivals]
    whole = x.new_empty(way.group.size() * x.shape[0], *x.shape[1:])
    return whole, [gather_into(whole, x, group=way.group, async_op=True)]


def start_sum(grad, weight, way: Way) -> tuple[torch.Tensor, list]:
    """(grad [s, b, n] times weight [n, k], summed over the ranks, or this rank's part of that with
    cut tokens; messages to wait for). Collective over the group of `way`."""
    if way.cuts_tokens and way.overlaps and grad.is_cuda:
        return multiply_scatter(grad, weight, way), []
    product = grad @ weight
    if way.group is None:
        return product, []
    if not way.cuts_tokens:
        return product, [dist.all_reduce(product, group=way.group, async_op=True)]
    out = product.new_empty(product.shape[0] // way.group.size(), *product.shape[1:])
    return out, [scatter_into(out, product, group=way.group, async_op=True)]


def gather_multiply(x, matrix, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [s / tp, b, k] of each rank gathered to [s, b, k], that times matrix [k, n]). Collective
    over the group of `way`."""
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


def multiply_scatter(x, matrix, way: Way) -> torch.Tensor:
    """x [s, b, k] times matrix [k, n], summed over the ranks -> this rank's part [s / tp, b, n].
    Collective over the group of `way`."""
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
    """Buffers that the GPUs of a group of one host read from each other, and a stream for it.

    Three sets of buffers take turns. A set is written again three exchanges later: every rank has
    read it then, for this one has waited for the exchange in between, where all ranks met after
    that; the last exchange may still be under way. The sets grow with the largest exchange.
    """

    def __init__(self, group):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.stream = torch.cuda.Stream()
        self.turn = 0
        self._room = 0  # bytes of a set
        self._views: dict[tuple, tuple] = {}

    def slot(self, number: int, length: int, dtype: torch.dtype) -> tuple:
        """(a buffer [length] of this rank, those of all ranks), of number 1 to size - 1 of a set.
        Collective if the buffers have to grow."""
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
        from torch.distributed import _symmetric_memory

        torch.cuda.synchronize()  # nothing reads the smaller ones any more
        dist.barrier(self.group)
        self._room = max(2 ** math.ceil(math.log2(needed)), _LEAST)
        size = _SETS * self._room
        self._whole = _symmetric_memory.empty(size, dtype=torch.uint8, device="cuda")
        self._handle = _symmetric_memory.rendezvous(self._whole, self.group.group_name)
        self._views = {}

    def next(self) -> None:
        """An exchange ends."""
        self.turn += 1

    def gather(self, x) -> tuple[torch.Tensor, list]:
        """(x [s / tp, ...] of all ranks [s, ...], [(rank, event of its arrival)])."""
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

    def fetch(self, theirs, out, meets: bool = True) -> tuple[torch.Tensor, torch.cuda.Event]:
        """(out, event of its arrival): another rank's buffer, copied after all ranks have met."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if meets:
                self._handle.barrier(channel=0)
            out.copy_(theirs)
            return out, self.stream.record_event()


@functools.cache
def peers_of(group) -> Peers | None:
    """The Peers of a group; None, with a warning, where symmetric memory does not work on all of
    its ranks. Tried once, collective over group then."""
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
