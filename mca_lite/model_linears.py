"""megatron's linears under sequence parallelism with their messages behind their products
(tp_comm_overlap).

A product takes this rank's part of the tokens while the others' travel: the GPUs of one host copy
them from each other's memory (torch's symmetric memory), on a stream of its own. Elsewhere the same
functions gather, multiply and scatter in turn.
Of megatron's linears the weights, their initialisation and their checkpoints stay; frozen weights,
which have adapters beside them, take megatron's way.
"""

import functools
import math
import warnings

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .cpu import add_weight_gradient
from .kernels import first_line
from .mcore import ColumnParallelLinear, RowParallelLinear, mappings

_SETS = 3
_LEAST = 1 << 20  # bytes of a set
_NO_SYMMETRIC_MEMORY = (
    "tp_comm_overlap: torch's symmetric memory does not work here ({}): messages of tensor "
    "parallelism are not hidden behind products"
)


class ColumnLinear(ColumnParallelLinear):
    """A linear with its outputs cut over the ranks of tp_group: takes [s / tp, b, h] under sequence
    parallelism. Collectives over tp_group in both passes."""

    def _forward_impl(self, input, weight, *args, **kwargs):
        if kwargs["bias"] is not None or not _overlaps(self, kwargs["sequence_parallel"]):
            return super()._forward_impl(input, weight, *args, **kwargs)
        return GatherLinear.apply(input, weight, self.tp_group, self.gradient_accumulation_fusion)


class RowLinear(RowParallelLinear):
    """A linear with its inputs cut over the ranks of tp_group: gives [s / tp, b, h] under sequence
    parallelism. Collectives over tp_group in both passes."""

    def _forward_impl(self, input, weight, *args, **kwargs):
        kwargs["tp_group"] = self.tp_group  # megatron warns on each call without it
        return super()._forward_impl(input, weight, *args, **kwargs)

    def forward(self, input_):
        """(output, bias or None) of input_ [s, b, h / tp]."""
        if not self.skip_bias_add or not _overlaps(self, self.sequence_parallel):
            return super().forward(input_)
        more = self.tp_group, self.gradient_accumulation_fusion
        return LinearScatter.apply(input_, self.weight, *more), self.bias


def _overlaps(linear, is_cut: bool) -> bool:
    """True if the functions of this file multiply for a linear, with its tokens cut."""
    is_usual = is_cut and not linear.explicit_expert_comm
    return is_usual and linear.config.tp_comm_overlap and linear.weight.requires_grad


class GatherLinear(torch.autograd.Function):
    """x [s / tp, b, k] of each rank, whole, times weight [n, k] -> [s, b, n]. accumulates: the
    weight's gradient is added to its main_grad."""

    @staticmethod
    def forward(ctx, x, weight, group, accumulates: bool):
        ctx.save_for_backward(x)
        ctx.constants = weight, group, accumulates
        return gather_multiply(x, weight.t(), group)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, group, accumulates = ctx.constants
        [x] = ctx.saved_tensors
        whole, arrivals = start_gather(x, group)
        of_x = multiply_scatter(grad, weight, group)
        for _, arrival in arrivals:
            arrival.wait()
        return of_x, _of_weight(weight, whole, grad, accumulates), None, None


class LinearScatter(torch.autograd.Function):
    """x [s, b, k] times weight [n, k], summed over the ranks -> this rank's part [s / tp, b, n]."""

    @staticmethod
    def forward(ctx, x, weight, group, accumulates: bool):
        ctx.save_for_backward(x)
        ctx.constants = weight, group, accumulates
        return multiply_scatter(x, weight.t(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, group, accumulates = ctx.constants
        [x] = ctx.saved_tensors
        whole, of_x = gather_multiply(grad, weight, group)
        return of_x, _of_weight(weight, x, whole, accumulates), None, None


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


def start_gather(x, group) -> tuple[torch.Tensor, list]:
    """(x [s / tp, b, k] of each rank gathered to [s, b, k], (rank, event) of parts that arrive
    later). Collective over group."""
    peers = peers_of(group) if x.is_cuda else None
    if peers is None:
        return mappings._gather_along_first_dim(x, group), []
    return peers.gather(x.contiguous())


def gather_multiply(x, matrix, group) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [s / tp, b, k] of each rank gathered to [s, b, k], that times matrix [k, n]). Collective
    over group."""
    peers = peers_of(group) if x.is_cuda else None
    if peers is None:
        whole = mappings._gather_along_first_dim(x, group)
        return whole, whole @ matrix
    x = x.contiguous()
    whole, arrivals = peers.gather(x)
    out = x.new_empty(*whole.shape[:-1], matrix.shape[1])
    parts = whole.view(peers.size, -1, whole.shape[-1])
    outs = out.view(peers.size, -1, out.shape[-1])
    torch.mm(x.flatten(0, 1), matrix, out=outs[peers.rank])
    for peer, arrival in arrivals:
        arrival.wait()
        torch.mm(parts[peer], matrix, out=outs[peer])
    return whole, out


def multiply_scatter(x, matrix, group) -> torch.Tensor:
    """x [s, b, k] times matrix [k, n], summed over the ranks -> this rank's part [s / tp, b, n].
    Collective over group."""
    peers = peers_of(group) if x.is_cuda else None
    if peers is None:
        return mappings._reduce_scatter_along_first_dim(x @ matrix, group)
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
