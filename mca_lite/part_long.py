"""Long rows: attention without recomputation, activations in host memory, MLPs in tiles of tokens.

Letters: s positions, b rows, h hidden size; t rows of a tensor that is cut into tiles. A unit is a
group of layers that full recomputation computes again together; megatron's checkpoint keeps only
its inputs (borders).

    recompute_keep: core_attn   a unit's first pass keeps the outputs of its fused attention
                                kernels; its second pass reuses them in place of calling the kernels
    activation_offloading       borders and kept outputs wait in host memory for the backward pass,
                                as far as there is room
    mlp_chunk_size              an MLP processes about this many tokens of a rank at once, experts
                                this many rows (a token has one per chosen expert), in both passes

The first two do not change results. Kernel outputs are kept, rather than attention's output: key
gathers and rotations run again, and the kernels' backward gets the same tensors as without this."""

import collections
import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from . import world
from .errors import Judge
from .model_attention import CoreAttention
from .model_linears import gives_zeros, zeros_from
from .model_moe import Mixture
from .part_cudnn import keepers

SHARE = 0.8  # activations may take this share of the host's free memory
_FULL = (
    "activation_offloading: activations fill {:.1f} GB of host memory, and no more may be used: "
    "the rest stays on the device"
)
PIECE = 1 << 26  # bytes per piece of host memory: torch rounds pinned memory up to powers of two
# attention kernels, by the beginning of their operator's name
_KERNELS = (
    "aten::_scaled_dot_product",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
    "cudnn::sdpa_fwd",
)


def check(config: Any, judge: Judge) -> None:
    """Refuse recompute_keep (keeping attention kernels' outputs) for a model with attention
    dropout, with which it does not work. The refusal is added to `judge`, which collects
    configuration errors. config: the model's McaModelConfig."""
    dropout = config.recompute_keep and config.attention_dropout
    reason = f"the model's attention_dropout is {config.attention_dropout}, and a kernel that is "
    reason += "not called again draws no numbers for the dropout after it"
    judge.expect(not dropout, "recompute_keep", reason, "attention_dropout: 0")


# ---- host memory


class HostPool:
    """Reusable pieces of host memory, because fresh pinned memory takes longer than a copy into it.

    taken: bytes in all pieces. free: unused pieces by their size in bytes. limit: maximum bytes;
    None: this rank's share of what is free at the first call of take().
    """

    def __init__(self, limit: float | None = None):
        self.free = collections.defaultdict[int, list[torch.Tensor]](list)
        self.taken = 0
        self.limit = limit

    def take(self, size: int) -> list[torch.Tensor] | None:
        """Take pieces of host memory, uint8, that together have `size` bytes or more. If the limit
        forbids a new piece and no unused one is large enough, return None, with a warning.

        Sizes of pieces are powers of two, so that tensors of similar length can reuse them."""
        if self.limit is None:
            self.limit = SHARE * host_memory() / world.current().local_size
        rest = size % PIECE
        last = [1 << (rest - 1).bit_length()] if rest else []
        pieces: list[torch.Tensor] = []
        for bytes_ in [PIECE] * (size // PIECE) + last:
            if self.free[bytes_]:
                pieces.append(self.free[bytes_].pop())
            elif self.taken + bytes_ > self.limit:
                larger = [size for size, unused in self.free.items() if unused and size > bytes_]
                if not larger:
                    self.give(pieces)
                    warnings.warn(_FULL.format(self.taken / 1e9), stacklevel=2)
                    return None
                pieces.append(self.free[min(larger)].pop())
            else:
                self.taken += bytes_
                pinned = torch.cuda.is_available()
                pieces.append(torch.empty(bytes_, dtype=torch.uint8, pin_memory=pinned))
        return pieces

    def give(self, pieces: list[torch.Tensor]) -> None:
        """Return pieces to the pool. The next copy may overwrite a piece at once, even if a copy
        from it is still queued: the copies of a device run in order, on one stream."""
        for piece in pieces:
            self.free[piece.nbytes].append(piece)


def host_memory() -> float:
    """Bytes of host memory still available: on the machine, or in this container if it has less."""
    free = psutil.virtual_memory().available
    for folder, limit in (("", "memory.max"), ("memory/", "memory.limit_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # another system, or no limit
            most = int(Path(f"/sys/fs/cgroup/{folder}{limit}").read_text())
            lines = Path(f"/sys/fs/cgroup/{folder}memory.stat").read_text().splitlines()
            used = {name: int(count) for name, count in map(str.split, lines)}
            # file cache does not count: the kernel drops it when memory is needed
            free = min(free, most - used.get("anon", used.get("total_rss", 0)))
    return max(free, 0)


POOL = HostPool()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The CUDA stream for a GPU's copies to and from host memory. Cached per device."""
    return torch.cuda.Stream(device)


class Offloaded:
    """A tensor that waits in host memory until the backward pass needs it. Its host memory comes
    from POOL. On a GPU the copies there and back overlap with other work.

    The copy to the host starts at once, and release() drops the tensor on the device. fetch()
    starts the copy back, and get() returns the tensor, once, with its original strides."""

    def __init__(self, tensor: torch.Tensor, pieces: list[torch.Tensor]):
        self.tensor: torch.Tensor | None = tensor
        self._size = tensor.shape
        self._stride = tensor.stride()
        self._known = dict(dtype=tensor.dtype, device=tensor.device)
        self._pieces = pieces
        self._done = self._copy(tensor, to_host=True)

    def _copy(self, tensor: torch.Tensor, to_host: bool) -> Any:
        """Start the copy of a tensor to its pieces of host memory (to_host) or back from them -> a
        CUDA event that marks the end; None for a CPU tensor."""
        flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
        stream = _stream(tensor.device) if tensor.is_cuda else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for part, piece in zip(flat.split(PIECE), self._pieces, strict=True):
                there = piece[: len(part)]
                target, source = (there, part) if to_host else (part, there)
                target.copy_(source, non_blocking=True)
        return None if stream is None else stream.record_event()

    def _wait(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def release(self) -> None:
        """Drop the reference to the tensor on its device; the current stream waits first for the
        copy to the host. Does nothing if the tensor has been fetched."""
        if self.tensor is not None and self._pieces:
            self._wait()
            self.tensor = None

    def fetch(self) -> None:
        """Start the copy back to the device. Does nothing if the tensor is there or on its way."""
        if self.tensor is None and self._pieces:
            self.tensor = torch.empty_strided(self._size, self._stride, **self._known)
            self._done = self._copy(self.tensor, to_host=False)
            self._free()

    def get(self) -> torch.Tensor:
        """The tensor on its device; work queued afterwards sees its values. Can be called once."""
        self.fetch()
        self._wait()
        self._free()
        tensor = self.tensor
        assert tensor is not None, "an offloaded tensor is read twice"
        self.tensor = None
        return tensor

    def _free(self) -> None:
        """Return the tensor's pieces of host memory to POOL."""
        POOL.give(self._pieces)
        self._pieces = []

    def __del__(self) -> None:
        self._free()


def _can_leave(tensor: torch.Tensor) -> bool:
    """True if a tensor can be offloaded: it is floating point, not empty, and its elements lie in
    memory without gaps and without sharing places, as those of an expanded tensor do."""
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor.is_floating_point() and tensor.numel() > 0 and dense


# ---- units of recomputation


class Unit:
    """A group of layers under activation checkpointing, for one forward and one backward pass. As
    configured, it keeps the outputs of attention kernels for the recomputation, and offloads
    tensors to host memory until backward.

    first: the first input tensor of the unit. before: the unit whose output is that tensor, or
    None; its offloaded tensors are copied back while this unit is recomputed. last (on the class):
    returns the unit that was made last, or None if it is gone. running (on the class): the unit
    whose layers run now, or None."""

    last: Callable[[], "Unit | None"] = lambda: None  # the unit made last
    running: "Unit | None" = None

    def __init__(self, config: Any, first: torch.Tensor):
        self.keeps = config.recompute_keep is not None
        self.offloads = config.activation_offloading
        self.kept: collections.deque[Any] = collections.deque()
        self.is_again = False
        self.output: Callable[[], Any] = lambda: None
        self.away: list[Offloaded] = []
        self.open: Offloaded | None = None  # offloaded, but still on the device too
        self._earlier = Unit.last
        last = Unit.last()
        self.before = last if last is not None and last.output() is first else None
        Unit.last = weakref.ref(self)

    def run(self, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """Call function(*tensors), which runs the unit's layers: first in the forward pass, then
        again as the recomputation. Layers with recompute_keep store the outputs of attention
        kernels in the first call, and reuse them in the second."""
        outer, Unit.running = Unit.running, self
        try:
            return function(*tensors)
        finally:
            Unit.running = outer
            self.is_again = True

    def hold(self, tensor: torch.Tensor) -> Any:
        """Offload a tensor to host memory -> an Offloaded (its copy there). The tensor itself is
        returned instead if offloading is off, if the tensor cannot be offloaded, or if host memory
        is full. When it is offloaded, the tensors that this unit and the unit made before it
        offloaded last leave the device."""
        if not self.offloads or not _can_leave(tensor):
            return tensor
        pieces = POOL.take(tensor.numel() * tensor.element_size())
        if pieces is None:  # this happens in the last layers, and backward needs these first
            return tensor
        for unit in (self, self._earlier()):
            if unit is not None and unit.open is not None:
                unit.open.release()
                unit.open = None
        self.open = Offloaded(tensor, pieces)
        self.away.append(self.open)
        return self.open

    def back(self, held: Any) -> torch.Tensor:
        """Return the tensor that was given to hold(), on its device. held: the result of hold().
        The first call also starts to copy back the other offloaded tensors of this unit, and those
        of the unit before it."""
        before, self.before = self.before, None
        for away in (*self.away, *(before.away if before is not None else ())):
            away.fetch()
        self.away = []
        self.open = None
        return held.get() if isinstance(held, Offloaded) else held

    def result(self, function: Callable[..., Any], *args: Any) -> Any:
        """The outputs of an attention kernel: the first pass calls function(*args) and keeps the
        outputs; the recomputation takes these in the same order, without the call."""
        if self.is_again:
            return tree_map_only((torch.Tensor, Offloaded), self.back, self.kept.popleft())
        with _Paused():
            found = function(*args)
        kept = tree_map_only(torch.Tensor, lambda x: self.hold(x.detach()), found)
        self.kept.append(kept)
        return found


class _Paused:
    """Context manager in which attention kernels run as usual, although _Keeping (which stores
    their outputs) is active: they make up a larger result that is kept as a whole."""

    depth = 0

    def __enter__(self) -> None:
        _Paused.depth += 1

    def __exit__(self, *_: Any) -> None:
        _Paused.depth -= 1


class _Keeping(TorchDispatchMode):
    """Context manager in which attention kernels are intercepted: in the first pass their outputs
    are stored in a Unit (a group of recomputed layers), in the recomputation they are taken from
    there instead of running the kernels."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.unit = unit

    def __enter__(self) -> Any:
        keepers.append(self.unit.result)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        keepers.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = functools.partial(func, *args, **(kwargs or {}))
        is_kept = func.name().startswith(_KERNELS) and "backward" not in func.name()
        return self.unit.result(call) if is_kept and not _Paused.depth else call()


def checkpointed(
    config: Any,
    checkpoint: Callable[..., Any],
    function: Callable[..., Any],
    *tensors: torch.Tensor,
) -> Any:
    """Run layers under activation checkpointing -> checkpoint(function, *tensors). As the config
    says, outputs of attention kernels are kept and tensors are offloaded to host memory; while
    gradients are disabled neither happens.

    config: the model's config. checkpoint: megatron's or Transformer Engine's checkpointing.
    function: runs the layers on `tensors`."""
    if not torch.is_grad_enabled():
        return checkpoint(function, *tensors)
    unit = Unit(config, tensors[0])
    hooks: Any = contextlib.nullcontext()
    if unit.offloads:
        hooks = torch.autograd.graph.saved_tensors_hooks(unit.hold, unit.back)
    with hooks:
        out = checkpoint(functools.partial(unit.run, function), *tensors)
    unit.output = weakref.ref(out)
    return out


def _attend(
    forward: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
) -> torch.Tensor:
    """Replaces CoreAttention.forward in layers with recompute_keep: outputs of its kernels are kept
    in the running Unit (a group of recomputed layers) and reused in the recomputation. Outside of a
    Unit the original method runs as usual. forward: that method. args: its further arguments."""
    unit = Unit.running
    if unit is None or not unit.keeps:
        return forward(query, key, value, *args)
    with _Keeping(unit):
        if unit.is_again:
            return forward(query, key, value, *args)
        # Gradients are enabled, as in the second pass: otherwise kernels would not return the
        # log-sum-exps that backward needs. This graph is dropped, so it saves no tensors.
        nothing = torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x)
        with torch.enable_grad(), nothing:
            heads = (x.detach().requires_grad_() for x in (query, key, value))
            return forward(*heads, *args).detach()


# ---- tiles


class Tiles(torch.autograd.Function):
    """Autograd function: run a module on tiles (groups of consecutive rows) one after another.
    Tensors [t, ...] are cut into tiles along their rows, and results are joined to [t, ...].

    Backward runs each tile again, so that one tile's activations are in memory at a time. Gradients
    of weights are summed over tiles in float32, or by the linear itself in main_grad. Collectives:
    those of `run`, for each tile; the ranks of its groups need the same t."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Any],
        rows: int,
        count: int,
        is_read: bool,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Run the tiles -> output [t, ...]. run(start, *tiles): computes the output for the rows
        from index `start` on. rows: rows per tile. tensors: the first `count` of them are cut into
        tiles; the others are the trained parameters that `run` uses, which get gradients. is_read:
        False if nobody reads the output's values; the output is then zeros in the first tensor's
        shape, and no tile is run."""
        ctx.of_run = run, rows
        ctx.parameters = tensors[count:]
        ctx.save_for_backward(*tensors[:count])
        if not is_read:
            return torch.zeros_like(tensors[0])
        out = None
        for start in _starts(tensors[0], rows):
            tiles = [x[start : start + rows] for x in tensors[:count]]
            part = run(start, *tiles)
            if out is None:
                out = part.new_empty(len(tensors[0]), *part.shape[1:])
            out[start : start + rows] = part
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        run, rows = ctx.of_run
        whole = ctx.saved_tensors
        needs = ctx.needs_input_grad[4 : 4 + len(whole)]
        pairs = list(zip(whole, needs, strict=True))
        grads: list[Any] = [torch.empty_like(x) if need else None for x, need in pairs]
        sums: list[Any] = [None] * len(ctx.parameters)
        for start in _starts(whole[0], rows):
            tiles = [x[start : start + rows].detach() for x in whole]
            wanted = [x.requires_grad_() for x, need in zip(tiles, needs, strict=True) if need]
            with torch.enable_grad():
                out = run(start, *tiles)
            part = grad[start : start + rows]
            inputs = wanted + list(ctx.parameters)
            found = torch.autograd.grad(out, inputs, part, allow_unused=True)
            of_tiles = found[: len(wanted)]
            wholes = [whole_grad for whole_grad in grads if whole_grad is not None]
            for into, of_tile in zip(wholes, of_tiles, strict=True):
                into[start : start + rows] = of_tile
            of_parameters = zip(ctx.parameters, sums, found[len(wanted) :], strict=True)
            sums = [_added(*each) for each in of_parameters]
        return None, None, None, None, *grads, *sums


def _starts(x: torch.Tensor, rows: int) -> range:
    """The index of each tile's first row, for the rows of x in tiles of `rows` rows."""
    return range(0, max(len(x), 1), rows)  # an empty tensor is one tile, to build the same graph


def _added(
    parameter: torch.Tensor, total: torch.Tensor | None, gradient: torch.Tensor | None
) -> torch.Tensor | None:
    """Add one tile's gradient of a parameter to the sum of earlier tiles, in float32 -> the new
    sum. total: None before the first tile. gradient: None adds nothing. If megatron's linear has
    already added the gradient to main_grad, `gradient` is only a placeholder, and is returned as it
    is."""
    if gradient is None:
        return total
    if getattr(parameter, "grad_added_to_main_grad", False):
        return gradient
    return gradient.float() if total is None else total.add_(gradient)


def _tiled(
    module: Any, run: Callable[..., Any], rows: int, *tensors: torch.Tensor, is_read: bool = True
) -> torch.Tensor:
    """Run a module on tiles (groups of consecutive rows) of `tensors` one after another, with
    gradients for its trained parameters -> the joined output. run(start, *tiles): computes the
    output for the rows from index `start` on. rows: rows per tile; below 1 counts as 1. is_read:
    False if nobody reads the output, which is then zeros."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return Tiles.apply(run, max(rows, 1), len(tensors), is_read, *tensors, *trained)


def _mlp(module: Any, size: int, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Forward pass of an MLP in tiles -> (output [s, b, h], with the bias; None). If nobody reads
    the output, it is zeros. module: the MLP. x: [s, b, h]. size: tokens per tile; a tile has size
    // b positions of all b rows, but at least one position."""

    last = module.linear_fc2.weight

    def run(start: int, tile: torch.Tensor) -> torch.Tensor:
        # with gradients, in Tiles' backward pass, nobody reads the output
        with zeros_from(last, module, torch.is_grad_enabled()):
            out, bias = type(module).forward(module, tile)
        return out if bias is None else out + bias

    is_read = not gives_zeros(last)
    return _tiled(module, run, size // x.shape[1], x, is_read=is_read), None


def _shared_experts(module: Any, size: int, x: torch.Tensor) -> torch.Tensor:
    """Forward pass of an MoE layer's shared experts in tiles -> output [s, b, h]. module: the
    shared experts. x: [s, b, h]. size: tokens per tile; a tile has size // b positions of all b
    rows, but at least one position."""

    def run(start: int, tile: torch.Tensor) -> torch.Tensor:
        return type(module).forward(module, tile)

    return _tiled(module, run, size // x.shape[1], x)


def _experts(
    module: Any, size: int, x: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Forward pass of an MoE layer's experts in tiles -> (outputs times probs, [t, h]; None). If
    nobody reads the outputs, they are zeros. module: the experts. size: rows per tile. x: [t, h],
    rows sorted by expert. tokens_per_expert: [experts], the number of rows of each. probs: [t],
    router weights."""
    ends = tokens_per_expert.cumsum(0)

    def run(start: int, tile: torch.Tensor, of_tile: torch.Tensor) -> torch.Tensor:
        inside = ends.clamp(start, start + len(tile))
        counts = inside.diff(prepend=inside.new_full((1,), start))
        with zeros_from(module.fc2, module, torch.is_grad_enabled()):  # as in _mlp
            return type(module).forward(module, tile, counts, of_tile)[0]

    return _tiled(module, run, size, x, probs, is_read=not gives_zeros(module.fc2)), None


def prepare(layer: Any, config: Any) -> None:
    """Prepare a decoder layer, in place, for the keys recompute_keep and mlp_chunk_size.
    recompute_keep (keep attention outputs) replaces the method forward of the layer's
    CoreAttention; mlp_chunk_size (MLPs in tiles) replaces that of its MLP, or of its experts and
    shared experts."""
    attention = layer.self_attention
    for module in attention.modules() if config.recompute_keep else ():
        if isinstance(module, CoreAttention):
            module.__dict__["forward"] = functools.partial(_attend, module.forward)
    size = config.mlp_chunk_size
    if not size:
        return
    layer.recomputes_mlp = False  # tiles do it
    ways: dict[Any, Callable[..., Any]] = {layer.mlp: _mlp}
    if isinstance(layer.mlp, Mixture):
        ways = {layer.mlp.experts: _experts, layer.mlp.shared_experts: _shared_experts}
    for module, way in ways.items():
        if module is not None:
            module.__dict__["forward"] = functools.partial(way, module, size)
