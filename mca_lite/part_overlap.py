"""Tensor-parallel communication beside matmuls (tp_comm_overlap): matmuls run while other ranks'
tokens or partial sums arrive. GPUs of one host copy these from each other's memory (torch's
symmetric memory) on a separate stream.
"""

import functools
import math
import warnings
from typing import Any

import torch
import torch.distributed as dist

from .kernels import first_line

_SETS = 3
_LEAST = 1 << 20  # smallest buffer set, in bytes
_NO_SYMMETRIC_MEMORY = (
    "tp_comm_overlap: torch's symmetric memory does not work here ({}): tensor-parallel "
    "communication does not overlap with matmuls"
)


class Peers:
    """Memory through which the tensor-parallel ranks of one host exchange tokens: each GPU copies
    from the buffers of the others, on a stream of its own. group: the tensor-parallel ranks.

    Three sets of buffers take turns, one per exchange, and grow with the largest exchange. A set is
    written again three exchanges later. By then every rank has read it: this rank has waited for an
    exchange in between, in which all ranks met after their reads. The last exchange may still be
    running."""

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
        """Get a buffer of the current buffer set, of `length` elements -> (the buffer on this rank,
        the list of it on every rank of the group). number: which buffer of the set, 1 to size - 1,
        for a group of `size` ranks. Collective if the buffers must grow."""
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
        """Allocate new, larger buffer sets, each of at least `needed` bytes. Collective."""
        from torch.distributed import _symmetric_memory

        torch.cuda.synchronize()  # nothing reads the smaller ones any more
        dist.barrier(self.group)
        self._room = max(2 ** math.ceil(math.log2(needed)), _LEAST)
        size = _SETS * self._room
        self._whole = _symmetric_memory.empty(size, dtype=torch.uint8, device="cuda")
        self._handle = _symmetric_memory.rendezvous(self._whole, self.group.group_name)
        self._views = {}

    def next(self) -> None:
        """End an exchange, so that the next one uses the next buffer set."""
        self.turn += 1

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Start to gather the tokens of all ranks: x [s / tp, ...], contiguous -> (result [s, ...],
        arrivals). arrivals: (rank, event to wait for before its tokens in the result are read) for
        each other rank; this rank's tokens are there at once. Collective."""
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

    def gather_multiply(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather x [s / tp, b, k] from all ranks and multiply it by matrix [k, n] -> (gathered x
        [s, b, k], product [s, b, n], plus the bias [n] if there is one). The tokens of each rank
        are multiplied once they have arrived, in a fixed order of ranks. Collective."""
        whole, arrivals = self.gather(x)
        out = x.new_empty(*whole.shape[:-1], matrix.shape[1])
        parts = whole.view(self.size, -1, whole.shape[-1])
        outs = out.view(self.size, -1, out.shape[-1])
        multiply = torch.mm if bias is None else functools.partial(torch.addmm, bias)
        multiply(x.flatten(0, 1), matrix, out=outs[self.rank])
        for peer, arrival in arrivals:
            arrival.wait()
            multiply(parts[peer], matrix, out=outs[peer])
        return whole, out

    def multiply_scatter(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Multiply x [s, b, k] by matrix [k, n], sum the products over the ranks, and keep this
        rank's tokens -> [s / tp, b, n]. The matmul for one rank's tokens runs while other results
        are copied. Collective."""
        parts = x.contiguous().view(self.size, -1, x.shape[-1])
        arrivals = []
        for step in range(1, self.size):
            to = (self.rank + step) % self.size
            mine, theirs = self.slot(step, parts[to].shape[0] * matrix.shape[1], x.dtype)
            torch.mm(parts[to], matrix, out=mine.view(-1, matrix.shape[1]))
            arrivals.append(self.fetch(theirs[self.rank - step], torch.empty_like(mine)))
        self.next()
        out = torch.mm(parts[self.rank], matrix)
        for part, arrival in arrivals:
            arrival.wait()
            out += part.view_as(out)
        return out.view(-1, *x.shape[1:-1], matrix.shape[1])

    def fetch(
        self, theirs: torch.Tensor, out: torch.Tensor, meets: bool = True
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start to copy another rank's buffer `theirs` into `out`, on the stream for copies ->
        (out, event of its arrival). meets: True to let that stream first wait until all ranks have
        come to this point, so that their buffers are written."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if meets:
                self._handle.barrier(channel=0)
            out.copy_(theirs)
            return out, self.stream.record_event()


@functools.cache
def peers_of(group: dist.ProcessGroup) -> Peers | None:
    """The Peers of a group (buffers for its exchanges). None, with a warning, if torch's symmetric
    memory does not work on one of its ranks. The first call for a group tries it, and is
    collective; later calls return the same result."""
    reason = "another rank could not"
    peers = Peers(group)
    try:
        whole, arrivals = peers.gather(torch.full((8,), float(peers.rank), device="cuda"))
        for _, arrival in arrivals:
            arrival.wait()
        wanted = torch.arange(peers.size, device="cuda").repeat_interleave(8)
        works = bool((whole == wanted).all())
    except Exception as error:  # the driver, the container or torch may fail in many ways
        works = False
        reason = first_line(error)
    everywhere = torch.tensor(int(works), device="cuda")
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group)
    if not everywhere:
        warnings.warn(_NO_SYMMETRIC_MEMORY.format(reason), stacklevel=2)
        return None
    return peers
