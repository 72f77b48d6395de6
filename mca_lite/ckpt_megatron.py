"""Megatron's distributed checkpoint: tensors in torch's files, which any layout can load.

    __<rank>_0.distcp   a rank's tensors, one after another, each as torch.save writes it
    index.json          where each tensor's parts are in these files; the optimizer's steps

Optimizer state is stored per parameter, sharded like the model's tensors: megatron's optimizer
format needs Apex or TE to load, and without them has one step counter for all parameters. Data
parallel ranks have the same weights, so each tensor, with its optimizer state, is assembled, kept
and written by one of them. Objects that need a pickle (_extra_state, the scaling history of fp8)
are not stored: fp8 starts its history anew.
"""

import functools
import io
import itertools
import json
import math
import os
import struct
import threading
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.serialization import config as torch_files

from . import parallel
from .ckpt_folder import CheckpointError, Entries, entry_of
from .files import MCA_CONFIG_NAME, READERS, ChecksumWriter, lies_in, read_json, write_file
from .kernels import AdamW
from .mcore import (
    ShardedObject,
    ShardedTensorFactory,
    extract_sharded_tensors_and_factories,
    is_main_replica,
    load_preprocess,
    nested_values,
    save_preprocess,
)
from .optim import parts_of
from .tables import OPTIMIZERS, Optimizer

DIST_NAME = "dist"
INDEX_NAME = "index.json"
OLD_INDEX_NAME = ".metadata"  # torch's pickle, in checkpoints of earlier versions

# Assembled states stay on the GPU up to this many bytes, and beyond it in host memory, where ranks
# wait for each other's copies.
JOINED_ON_GPU_BYTES = 1 << 30
_BUFFER_BYTES = 1 << 25  # a thread reads this much of a file at once

# -- the parts of tensors in files


def read_index(folder: Path) -> dict[str, Any]:
    """Read index.json in a checkpoint's folder of tensors. It tells where in the files the parts of
    each tensor are. CheckpointError if the index is missing or no JSON object, or if an earlier
    version wrote the folder."""
    path = folder / INDEX_NAME
    if not path.is_file() and (folder / OLD_INDEX_NAME).is_file():
        raise CheckpointError(
            f"{folder.parent} was written by an earlier version, and cannot be resumed from: "
            f"python -m mca_lite convert {folder.parent} DST exports its weights"
        )
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{error}: use another checkpoint") from None


def read_tensor(tensor: Any, index: dict[str, Any], folder: Path, num_tokens: int = 0) -> None:
    """Fill one tensor, in place, from a checkpoint of any parallel layout: every stored part that
    overlaps it is read.

    tensor: megatron's ShardedTensor (this rank's data and its place in the whole tensor). index:
    from read_index(). folder: with the files of tensors. num_tokens: size of the vocabulary, for
    tensors with padded rows: the padding depends on the layout, and becomes 0 where the files lack
    it.
    Raises many types of error if the index or an archive does not fit, or if the parts do not cover
    the rest exactly once. No code from files is run, and no file outside the folder is opened."""
    entry = index["tensors"][tensor.key]
    whole = tensor.data.detach().view(_sizes(tensor))
    shape = entry["shape"]
    least = math.inf
    if tensor.allow_shape_mismatch:
        least = num_tokens
        whole.zero_()
    both = zip(shape, tensor.global_shape, strict=True)
    if any(a != b and min(a, b) < least for a, b in both):
        raise ValueError(f"{tensor.key} has shape {shape}, not {tensor.global_shape}")
    here = tensor.global_offset, whole.shape
    dtype = getattr(torch, entry["dtype"])
    targets = []
    for offset, sizes, name, start, length in entry["chunks"]:
        target = _overlap(*here, offset, sizes)
        if _volume(target):
            if not lies_in(folder / name, folder):
                raise ValueError(f"it names {name}, which lies outside the folder")
            source = _overlap(offset, sizes, *here)
            with open(folder / name, "rb", buffering=0) as file:
                place = _place_of_data(file, start, length, math.prod(sizes) * dtype.itemsize)
                _copy_part(file, place, dtype, sizes, source, whole[target])
            targets.append(target)
    wanted = _volume(_overlap(*here, [0] * len(shape), shape))
    are_apart = not any(itertools.starmap(_meet, itertools.combinations(targets, 2)))
    if sum(map(_volume, targets)) != wanted or not are_apart:
        raise ValueError(f"the parts of {tensor.key} do not cover it once")


class _Window(io.RawIOBase):
    """Makes a part of an open file look like a whole, read-only file. start: the part's first byte
    in the file. length: its number of bytes."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        )
        return self._at

    def readinto(self, out: Any) -> int:
        out = memoryview(out)[: max(0, self._length - self._at)]
        count = os.preadv(self._file.fileno(), [out], self._start + self._at)
        self._at += count
        return count


def _place_of_data(file: Any, start: int, length: int, num_bytes: int) -> int:
    """Find the byte in a file at which a tensor's values begin. torch.save wrote the tensor as a
    zip archive, at the bytes start to start + length of the file. The archive's pickle is not read.
    ValueError if the archive has no tensor of num_bytes bytes."""
    window = _Window(file, start, length)
    with zipfile.ZipFile(window) as archive:
        found = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
    if [entry.file_size for entry in found] != [num_bytes]:
        raise ValueError(f"the archive at {start} has no tensor of {num_bytes} bytes")
    [entry] = found
    window.seek(entry.header_offset + 26)  # the lengths of the name and of the extra field
    lengths = struct.unpack("<HH", window.read(4))
    return start + entry.header_offset + 30 + sum(lengths)


_memory = threading.local()  # .buffer: uint8, of this thread


def _copy_part(
    file: Any,
    place: int,
    dtype: torch.dtype,
    sizes: Sequence[int],
    source: tuple[slice, ...],
    out: torch.Tensor,
) -> None:
    """Copy a part of a stored tensor from a file to `out`, a few rows at a time. place: byte in the
    file at which the stored tensor's values begin. dtype, sizes: of the stored tensor. source: a
    slice per axis, which cuts the part out of it. out: the part's destination."""
    while len(sizes) > 1 and sizes[0] == 1:  # megatron stacks layers, and a part has one of them
        sizes, source, out = sizes[1:], source[1:], out[0]
    rows, *others = source or (slice(0, 1),)
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize
    least = max(_BUFFER_BYTES, row_bytes)
    buffer = getattr(_memory, "buffer", None)
    if buffer is None or len(buffer) < least:
        buffer = torch.empty(least, dtype=torch.uint8, pin_memory=out.is_cuda)
        _memory.buffer = buffer
    out = out.view(out.shape or (1,))
    step = least // row_bytes
    for first in range(rows.start, rows.stop, step):
        last = min(first + step, rows.stop)
        data = buffer[: (last - first) * row_bytes]
        _fill(data.numpy(), file, place + first * row_bytes)
        part = data.view(dtype).view(last - first, *sizes[1:])
        out[first - rows.start : last - rows.start] = part[(slice(None), *others)]


def _fill(data: Any, file: Any, place: int) -> None:
    """Fill an array of bytes, `data`, from a file, beginning at byte `place` of the file. EOFError
    if the file is too short."""
    rest = memoryview(data)
    while rest:
        count = os.preadv(file.fileno(), [rest], place)
        if not count:
            raise EOFError(f"{file.name} ends at byte {place}")
        rest = rest[count:]
        place += count


def _volume(box: tuple[slice, ...]) -> int:
    return math.prod(max(0, cut.stop - cut.start) for cut in box)


def _meet(box: tuple[slice, ...], other: tuple[slice, ...]) -> bool:
    both = zip(box, other, strict=True)
    return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in both)


def _sizes(tensor: Any) -> list[int]:
    """The shape of the data in a ShardedTensor (megatron's record of a tensor's shard). Leading 1s
    are added, so that it has as many axes as the whole tensor: megatron stacks layers."""
    return [1] * tensor.prepend_axis_num + [*tensor.local_shape]


def _overlap(
    offset: Sequence[int], sizes: Sequence[int], other: Sequence[int], others: Sequence[int]
) -> tuple[slice, ...]:
    """Intersect two boxes, each given by its offset and its sizes along all axes of one tensor -> a
    slice per axis, relative to the first box's offset. offset, sizes: the first box. other, others:
    offset and sizes of the second. A slice is empty if the boxes do not meet on that axis."""
    axes = zip(offset, sizes, other, others, strict=True)
    return tuple(
        slice(max(0, o - a), max(0, min(size, o + length - a))) for a, size, o, length in axes
    )


# -- writing and loading


class MegatronSnapshot:
    """This rank's share of a checkpoint: the weights that it writes, and with `optimizer` the
    optimizer states. The constructor chooses and collects the tensors, which is collective over all
    ranks; write() writes them.

    copy: function that copies a tensor to host memory (HostBuffers.copy), so that later steps do
    not change it; write() may then run in another thread. None: write() must run before the next
    step."""

    def __init__(
        self, models: Any, optimizer: Any = None, copy: Callable[..., Any] | None = None
    ) -> None:
        self._steps: list[int | None] = [None] * len(STEPS)
        holders = holders_of_all(models, optimizer)
        chunks = _sharded(models)
        state = {name: _mine_to_write(chunk, holders, copy) for name, chunk in chunks.items()}
        weights, _ = save_preprocess(state)
        states: dict[str, Any] = {}
        if optimizer is not None:
            tensors = _by_parameter(chunks)
            states = _optimizer_to_write(optimizer, models, tensors, holders, copy)
            self._steps = _optimizer_steps(optimizer, models)
            # unchecked, because megatron would stack all layers' matrices, and frozen ones have no
            # state
            states, _ = save_preprocess(states, validate_access_integrity=False)
        tensors = (*nested_values(weights), *nested_values(states))
        self._tensors = [tensor for tensor in tensors if is_main_replica(tensor.replica_id)]
        self.config_json = models.config.to_json_string()
        parallel.wait_for_device()

    @staticmethod
    def sizes(models: Any, optimizer: Any = None) -> list[int]:
        """Estimate the host memory of a snapshot's copies: a list with the bytes of each parameter
        and optimizer state that this rank may copy. A parameter that another tensor-parallel rank
        copies counts too."""
        holders = holders_of_all(models, optimizer)
        found = []
        stored = _by_parameter(_sharded(models))  # without the frozen base of adapters
        for parameter in models.parameters():
            if id(parameter) in stored and holders[id(parameter)].i_write:
                found.append(parameter.nbytes)
                if optimizer is not None and parameter.requires_grad:
                    states = state_names(optimizer, parameter)
                    found += [4 * parameter.numel()] * len(states)
        return found

    def write(self, folder: Path) -> tuple[Entries, list[Any]]:
        """Write this rank's tensors to its file -> ({file: its entry in the manifest}, parts). Not
        collective. folder: the checkpoint's.

        parts: a record per tensor for the index, which finish() writes: (key, {dtype and shape of
        the whole tensor}, [offset and shape of this rank's part, file, first byte and number of
        bytes in it])."""
        (folder / DIST_NAME).mkdir(exist_ok=True)
        name = f"__{parallel.rank()}_0.distcp"
        path = folder / DIST_NAME / name
        parts = []
        staging = torch.empty(0, dtype=torch.uint8)
        # the manifest has a checksum of the file; torch's checksum per tensor would add half the
        # writing time
        with torch_files.patch("save.compute_crc32", False), ChecksumWriter(path) as file:
            for tensor in self._tensors:
                data = tensor.data.detach()
                # torch writes the whole storage of a view
                is_whole = data.is_contiguous() and data.untyped_storage().nbytes() == data.nbytes
                if data.is_cuda or not is_whole:
                    if len(staging) < data.nbytes:
                        staging = torch.empty(data.nbytes, dtype=torch.uint8)
                    data = _copied_into(staging, data)
                data = data.view(_sizes(tensor))
                start = file.size
                torch.save(data, file)
                place = [tensor.global_offset, data.shape, name, start, file.size - start]
                dtype = str(data.dtype).removeprefix("torch.")
                parts.append((tensor.key, {"dtype": dtype, "shape": tensor.global_shape}, place))
        self._tensors = []  # frees the copies
        return {f"{DIST_NAME}/{name}": entry_of(file.size, file.crc)}, parts

    def finish(self, folder: Path, results: list[list[Any]]) -> list[str]:
        """Write the index of all ranks' tensors, and the model's config -> the names of these two
        files. The main rank calls it once all ranks have written. results: the `parts` that write()
        returned on each rank, in rank order."""
        tensors: dict[str, dict[str, Any]] = {}
        for parts in results:
            for key, entry, chunk in parts:
                tensors.setdefault(key, {**entry, "chunks": []})["chunks"].append(chunk)
        record = {**dict(zip(STEPS, self._steps, strict=True)), "tensors": tensors}
        write_file(folder / DIST_NAME / INDEX_NAME, json.dumps(record) + "\n")
        write_file(folder / MCA_CONFIG_NAME, self.config_json)
        return [f"{DIST_NAME}/{INDEX_NAME}", MCA_CONFIG_NAME]


def _copied_into(staging: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the start of a reusable CPU buffer -> the copy, as a tensor with a storage
    of exactly its own size, because torch.save writes whole storages. staging: the buffer, uint8,
    with at least the tensor's number of bytes."""
    if not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    bytes_of_copy = staging.numpy()[: tensor.nbytes]
    return torch.frombuffer(bytes_of_copy, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def load_megatron(
    folder: Path, models: Any, optimizer: Any = None, index: dict[str, Any] | None = None
) -> None:
    """Load a checkpoint of any parallel layout into the model, and into the optimizer if there is
    one, in place.

    folder: the checkpoint's. index: from read_index(); None: it is read here. CheckpointError, the
    same on every rank, if a tensor cannot be read from the files. Collective over all ranks."""
    place = folder / DIST_NAME
    if index is None:
        index = read_index(place)
    steps = [index.get(name, index.get(STEPS[0])) for name in STEPS]  # older ones lack some
    if optimizer is not None and any(type(count) is not int for count in steps):
        raise CheckpointError(f"{place / INDEX_NAME} has no {STEPS[0]}: use another checkpoint")
    chunks = _sharded(models)

    def fill(tensor: Any) -> None:
        data = tensor.data
        if hasattr(data, "parts"):  # kept in fewer bits, written by copy_ alone
            plain = torch.empty(data.shape, dtype=data.dtype, device=data.device)
            fill(replace(tensor, data=plain))
            with torch.no_grad():
                data.detach().copy_(plain)
            return
        memory = tensor.data.untyped_storage().data_ptr()
        for part in nested_values(load_preprocess({"": tensor})[0]):
            is_view = part.data.untyped_storage().data_ptr() == memory
            assert is_view, f"megatron-core cuts {tensor.key} into copies, expected views"
            read_tensor(part, index, place, models.config.vocab_size)

    def read() -> None:
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(fill, [x for tensors in chunks.values() for x in tensors.values()]))
            if optimizer is not None:
                read_all = functools.partial(pool.map, fill)
                _fill_optimizer(optimizer, models, _by_parameter(chunks), read_all, steps)

    words = f"{place} cannot be read: use another checkpoint, unless memory ran out"
    parallel.on_all(read, CheckpointError, words)
    weights = {key: {name: x.data for name, x in chunks[key].items()} for key in chunks}
    models.load_state_dict(weights, strict=False)  # objects are not stored


def _sharded(models: Any) -> dict[str, dict[str, Any]]:
    """The model's tensors with their sharding: {model chunk: {name: megatron's ShardedTensor, or
    its ShardedTensorFactory, which makes several}}. megatron's ShardedObjects are left out, because
    they would need a pickle."""
    chunks = models.sharded_state_dict()
    for tensors in chunks.values():
        for name in [name for name, x in tensors.items() if isinstance(x, ShardedObject)]:
            del tensors[name]
    return chunks


# -- the writer of each tensor


class _Holders(NamedTuple):
    """The ranks that hold the same shard of a parameter, of which one writes it to a checkpoint.

    group: their process group. writer: the rank in the group that writes.
    pieces: {rank: (start, stop)}, if a distributed optimizer shards the parameter's states: the
    piece of the flattened parameter whose states the rank has. {} otherwise."""

    group: Any
    writer: int
    pieces: dict[int, tuple[int, int]]

    @property
    def i_write(self) -> bool:
        return self.group.rank() == self.writer

    def replica(self, tensor: Any) -> tuple[int, int, int]:
        """The replica_id for this rank's copy of a parameter; the copy whose three numbers are 0 is
        stored. tensor: the parameter's ShardedTensor or ShardedTensorFactory, from which the first
        two numbers come (tied copy, tensor-parallel rank). The third is 0 on the rank that writes,
        otherwise 1."""
        return (*tensor.replica_id[:2], int(not self.i_write))


def holders_of_all(models: Any, optimizer: Any) -> dict[int, _Holders]:
    """Choose for each parameter the rank that writes it to a checkpoint -> {id of the parameter:
    its _Holders (the ranks that hold it, and the writer)}. The writer is the rank with the least to
    write so far, so that writing is spread. If a distributed optimizer shards the parameter's
    states, only ranks with a piece of them are considered, otherwise all that hold the parameter.
    """
    cuts = _cuts(optimizer)
    found = {}
    loads: dict[int, list[int]] = {}
    for parameter in models.parameters():
        of_expert = not getattr(parameter, "allreduce", True)
        whole = parallel.replica_group(of_expert), {}
        group, pieces = cuts.get(id(parameter), whole)
        load = loads.setdefault(id(group), [0] * group.size())
        writer = min(pieces or range(group.size()), key=load.__getitem__)
        load[writer] += parameter.numel()
        found[id(parameter)] = _Holders(group, writer, pieces)
    return found


def _cuts(optimizer: Any) -> dict[int, tuple[Any, dict[int, tuple[int, int]]]]:
    """Find the piece of each parameter that each rank of a distributed optimizer updates: {id of
    the parameter: (process group, {rank: (start, stop) in the flattened parameter})}. The optimizer
    splits each bucket of gradients into equal shares, one per rank. Parameters of other optimizers
    are left out."""
    found = {}
    for part in filter(_is_distributed, parts_of(optimizer)):
        group = part.data_parallel_group
        for buffer in part.buffers:
            for parameter, (start, stop, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                pieces = {}
                share = bucket.grad_data.numel() // group.size()
                for rank in range(group.size()):
                    shift = bucket.offset + rank * share - start
                    piece = max(0, shift), min(stop - start, shift + share)
                    if piece[0] < piece[1]:
                        pieces[rank] = piece
                found[id(parameter)] = group, pieces
    return found


def _is_distributed(part: Any) -> bool:
    return hasattr(part, "gbuf_ranges")


def _by_parameter(chunks: dict[str, Any]) -> dict[str, Any]:
    """Index the result of _sharded() by tensor: {id of a parameter or buffer: its ShardedTensor or
    ShardedTensorFactory}."""
    found = extract_sharded_tensors_and_factories(chunks)[0]
    return {id(tensor.data): tensor for tensor in nested_values(found)}


def _mine_to_write(
    tensors: dict[str, Any], holders: dict[int, _Holders], copy: Callable[..., Any] | None
) -> dict[str, Any]:
    """A copy of a model chunk's {name: ShardedTensor or ShardedTensorFactory}, in which the tensors
    that this rank writes are marked by a replica_id of zeros. holders: {id of a parameter: its
    _Holders, which name the writer}. copy: function that copies the data to write; None: the data
    itself is written."""
    out = {}
    for name, tensor in tensors.items():
        holder = holders.get(id(tensor.data))
        if holder is not None:  # a buffer's replica_id is right already
            tensor = replace(tensor, replica_id=holder.replica(tensor))
        if copy is not None and is_main_replica(tensor.replica_id):
            tensor = replace(tensor, data=copy(tensor.data))
        out[name] = tensor
    return out


# -- the optimizer


def owned_parameters(optimizer: Any, models: Any) -> Iterator[tuple[Any, Any, Any, slice]]:
    """Yield (torch optimizer, model parameter, updated tensor, slice) for each parameter that this
    rank updates. The updated tensor is the parameter itself or its float32 master; with a
    distributed optimizer it is a flat piece of these. slice: the place of the updated tensor in the
    flattened parameter."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        if _is_distributed(part):
            counters: dict[int, Iterator[int]] = defaultdict(itertools.count)
            # a group's float32 parameters come first, whatever the map says
            indices = part.model_param_group_index_map
            for parameter in sorted(indices, key=lambda p: p.dtype != torch.float32):
                group, _ = indices[parameter]
                piece = part._get_model_param_range_map(parameter)["param"]
                main = inner.param_groups[group]["params"][next(counters[group])]
                yield inner, parameter, main, slice(piece.start, piece.end)
            continue
        mains = {id(p) for group in inner.param_groups for p in group["params"]}
        for parameter in models.parameters():
            main = getattr(parameter, "main_param", parameter)
            if id(main) in mains:
                yield inner, parameter, main, slice(0, parameter.numel())


# The index keys for updates made so far: of the model, and of its input modules, which a step
# without an input of their kind does not update.
STEPS = ("optimizer_steps", "tower_steps", "audio_tower_steps")


def may_rest(parameter: Any) -> int:
    """Tell which count of updates in STEPS holds for a parameter -> its index: 0 if every step
    updates the parameter. Parameters of input modules, such as a vision tower, have the index of
    their kind of input: a step without such inputs does not update them."""
    return getattr(parameter, "may_rest", 0)


def state_names(optimizer: Any, parameter: Any) -> list[str]:
    states = _row(optimizer).states_of(parameter)
    return [*states, "master"] if parameter.dtype != torch.float32 else list(states)


def _row(optimizer: Any) -> Optimizer:
    return OPTIMIZERS[parts_of(optimizer)[0].config.optim]


def _state_tensor(tensor: Any, name: str, value: torch.Tensor, **changes: Any) -> Any:
    """Make the ShardedTensor that stands for one optimizer state of a parameter, to be written or
    filled. tensor: the parameter's own, whose sharding applies to the state too; for a
    ShardedTensorFactory the result is one too. name: the state's, such as "exp_avg". value: the
    state. changes: other fields to replace."""
    if not isinstance(tensor, ShardedTensorFactory):
        changes["dtype"] = value.dtype
    return replace(tensor, key=f"optimizer.{name}.{tensor.key}", data=value, **changes)


def _optimizer_to_write(
    optimizer: Any,
    models: Any,
    tensors: dict[str, Any],
    holders: dict[str, Any],
    copy: Callable[..., Any] | None,
) -> dict[str, Any]:
    """Collect the optimizer states that this rank may write -> {number: ShardedTensor or
    ShardedTensorFactory}. Of equal copies on tensor-parallel ranks, one is written. A distributed
    optimizer's pieces are first sent to the writing rank, parameter by parameter, so all ranks must
    call it.

    tensors: {id of a parameter: its ShardedTensor or ShardedTensorFactory}. holders: {id of a
    parameter: its _Holders, which name the writer}. copy: as for MegatronSnapshot."""
    owned = {
        id(parameter): (inner, main, cut)
        for inner, parameter, main, cut in owned_parameters(optimizer, models)
    }
    out: dict[int, Any] = {}
    joined_bytes = 0
    for parameter in (p for p in models.parameters() if p.requires_grad):
        tensor = tensors[id(parameter)]
        holder = holders[id(parameter)]
        for name in state_names(optimizer, parameter):
            part = None
            if id(parameter) in owned and (holder.i_write or holder.pieces):
                part = state_piece(*owned[id(parameter)], name)
            value = _join(part, parameter, *holder)
            if holder.i_write:
                is_joined = len(holder.pieces) > 1
                joined_bytes += is_joined * value.nbytes
                if copy is not None:
                    value = copy(value)
                elif is_joined and joined_bytes > JOINED_ON_GPU_BYTES:
                    value = value.cpu()
                replica = holder.replica(tensor)
                out[len(out)] = _state_tensor(tensor, name, value, replica_id=replica)
    return out


def state_piece(inner: Any, main: Any, cut: slice, name: str) -> torch.Tensor:
    """One optimizer state of a parameter, as far as this rank has it: flat, float32, on the device
    of `main`. Before the first step a state is zeros, but "master" has the weights.

    inner, main, cut: from owned_parameters(): the torch optimizer, the tensor that it updates, and
    that tensor's slice of the flattened parameter. name: the state's, such as "exp_avg", or
    "master" for the float32 weights."""
    state = inner.state.get(main, {}).get(name)
    if name == "master":
        state = inner.master(main) if isinstance(inner, AdamW) else main
    if state is None:
        state = torch.zeros(cut.stop - cut.start, device=main.device)
    # offloaded states too, because ranks exchange pieces from device to device
    return state.detach().float().to(main.device).view(-1)


def _join(part: Any, parameter: Any, group: Any, writer: int, pieces: dict[str, Any]) -> Any:
    """Send the pieces of one optimizer state to the rank `writer` of `group`, which returns the
    whole state in the parameter's shape; other ranks return None. part: this rank's piece, flat, or
    None. pieces: {rank: (start, stop)}, where each rank's piece lies in the flattened parameter; {}
    if the writer has the whole state already."""
    me = group.rank()
    if me != writer:
        parallel.exchange({writer: part} if me in pieces else {}, {}, group)
        return None
    if part.numel() == parameter.numel():
        return part.view(parameter.shape)
    whole = torch.empty(parameter.numel(), device=part.device)
    places = {rank: whole[slice(*piece)] for rank, piece in pieces.items()}
    places.pop(me).copy_(part)
    parallel.exchange({}, places, group)
    return whole.view(parameter.shape)


def _fill_optimizer(
    optimizer: Any,
    models: Any,
    tensors: dict[str, Any],
    fill_all: Callable[[list[Any]], Iterable[Any]],
    of_kinds: list[int],
) -> None:
    """Load the optimizer states of the parameters that this rank updates, in place. Meanwhile the
    device holds the whole states of one parameter at a time beside them.

    tensors: {id of a parameter: its ShardedTensor or ShardedTensorFactory}. fill_all: function that
    fills a list of these from the files. of_kinds: numbers of updates made, in the order of STEPS.
    """
    with torch.no_grad():
        for inner, parameter, main, cut in owned_parameters(optimizer, models):
            steps = of_kinds[may_rest(parameter)]
            is_piece = main.numel() != parameter.numel()
            names = state_names(optimizer, parameter)
            where = main.device
            wholes = {name: torch.empty(parameter.shape, device=where) for name in names}
            tensor = tensors[id(parameter)]
            list(fill_all([_state_tensor(tensor, name, wholes[name]) for name in names]))
            mine = {}
            for name in names:
                value = wholes.pop(name).reshape(-1)[cut].view(main.shape)
                # a copy of a piece lets the whole be freed
                mine[name] = value.clone() if is_piece else value
            if isinstance(inner, AdamW):
                inner.fill(main, {**mine, "step": steps})
                continue
            if "master" in mine:
                main.copy_(mine.pop("master"))
            # the fused AdamW keeps its step on the parameter's device
            if _row(optimizer).counts_steps:
                mine["step"] = torch.tensor(float(steps), device=main.device)
            inner.state[main] = mine
            if hasattr(inner, "settle"):  # part_offload.OffloadedOptimizer
                inner.settle(main)


def _optimizer_steps(optimizer: Any, models: Any) -> list[int]:
    """Numbers of updates made so far, in the order of STEPS: first for parameters that every step
    updates, then for each kind of input modules (see may_rest). They are 0 for an optimizer that
    does not count. The maximum over ranks, because some ranks own no parameter of a kind.
    Collective."""
    counts = [0] * len(STEPS)
    for inner, parameter, main, _ in owned_parameters(optimizer, models):
        kind = may_rest(parameter)
        counts[kind] = max(counts[kind], int(inner.state[main].get("step", 0)))
    return parallel.largest(*counts)
