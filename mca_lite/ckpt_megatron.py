"""Megatron's distributed checkpoint: tensors in torch's files, for any layout to load.

    __<rank>_0.distcp   the tensors of a rank, one after another, each as torch.save writes it
    index.json          the place of each tensor's parts in those files; the optimizer's steps

The optimizer's state is stored per parameter, cut like the model's sharded tensors: megatron's
optimizer format needs Apex or TE to load, and shares one step counter among all parameters without
them. Data parallel ranks have the same weights: each tensor, with its optimizer state, is
assembled, kept and written by one of them, and no rank keeps it all. Objects in need of a pickle
(_extra_state, the scaling history of fp8) are not stored: fp8 begins its history anew.
"""

import functools
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.serialization import config as torch_files

from . import parallel
from .ckpt_folder import CheckpointError, entry_of
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
OLD_INDEX_NAME = ".metadata"  # torch's, a pickle, in checkpoints of earlier versions

# Joined states wait on the GPU up to this sum, and beyond it in host memory: ranks wait for each
# other's copies there
JOINED_ON_GPU_BYTES = 1 << 30

# -- the parts of tensors in files


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder of tensors. CheckpointError for anything else, and for the index of an
    earlier version."""
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


def read_tensor(tensor, index: dict[str, Any], folder: Path, num_tokens: int = 0) -> None:
    """Fill a ShardedTensor in place from all parts in the files that overlap it.

    num_tokens: of the vocabulary, whose padding differs between layouts. Raises many kinds of error
    for an index or a file with other content, or with parts that do not cover the tensor once; no
    code of theirs is run, and no file outside of the folder is opened.
    """
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
    times = torch.zeros(whole.shape, dtype=torch.uint8)
    for offset, sizes, name, start, length in entry["chunks"]:
        target = _overlap(*here, offset, sizes)
        if any(cut.start >= cut.stop for cut in target):
            continue
        if not lies_in(folder / name, folder):
            raise ValueError(f"it names {name}, which lies outside the folder")
        with open(folder / name, "rb") as file:
            file.seek(start)
            stored = io.BytesIO(file.read(length))
        part = torch.load(stored, map_location="cpu", weights_only=True)
        whole[target] = part.view(sizes)[_overlap(offset, sizes, *here)]
        times[target] += 1
    if (times[_overlap(*here, [0] * len(shape), shape)] != 1).any():
        raise ValueError(f"the parts of {tensor.key} do not cover it once")


def _sizes(tensor) -> list[int]:
    """The shape of a ShardedTensor's data, with as many axes as the global shape has."""
    return [1] * tensor.prepend_axis_num + [*tensor.local_shape]


def _overlap(
    offset: Sequence[int], sizes: Sequence[int], other: Sequence[int], others: Sequence[int]
) -> tuple[slice, ...]:
    """The slices of a box (offset, sizes) in common with another box."""
    axes = zip(offset, sizes, other, others, strict=True)
    return tuple(
        slice(max(0, o - a), max(0, min(size, o + length - a))) for a, size, o, length in axes
    )


# -- writing and loading


class MegatronSnapshot:
    """Weights, and optionally the optimizer's state, ready to be written.

    copy: of a tensor, to host memory, unchanged by later steps: HostBuffers.copy. write() may then
    run in another thread. The constructor is collective over all ranks.
    """

    def __init__(self, models, optimizer=None, copy: Callable | None = None) -> None:
        self._steps: list[int | None] = [None, None]
        holders = holders_of_all(models, optimizer)
        chunks = _sharded(models)
        state = {name: _mine_to_write(chunk, holders, copy) for name, chunk in chunks.items()}
        weights, _ = save_preprocess(state)
        states: dict = {}
        if optimizer is not None:
            tensors = _by_parameter(chunks)
            states = _optimizer_to_write(optimizer, models, tensors, holders, copy)
            self._steps = _optimizer_steps(optimizer, models)
            # unchecked: megatron stacks a matrix of all layers, and frozen ones have no state
            states, _ = save_preprocess(states, validate_access_integrity=False)
        tensors = (*nested_values(weights), *nested_values(states))
        self._tensors = [tensor for tensor in tensors if is_main_replica(tensor.replica_id)]
        self.config_json = models.config.to_json_string()
        parallel.wait_for_device()

    @staticmethod
    def sizes(models, optimizer=None) -> list[int]:
        """Bytes of the tensors in a copy of this rank, in any order, and of replicated weights
        written by another rank."""
        holders = holders_of_all(models, optimizer)
        found = []
        for parameter in models.parameters():
            if holders[id(parameter)].i_write:
                found.append(parameter.nbytes)
                if optimizer is not None and parameter.requires_grad:
                    states = state_names(optimizer, parameter)
                    found += [4 * parameter.numel()] * len(states)
        return found

    def write(self, folder: Path) -> tuple[dict[str, dict], list]:
        """Write this rank's file -> ({file: its entry in the manifest}, [(key, entry in the index,
        place of this part) of each tensor]). No collectives."""
        (folder / DIST_NAME).mkdir(exist_ok=True)
        name = f"__{parallel.rank()}_0.distcp"
        path = folder / DIST_NAME / name
        parts = []
        staging = torch.empty(0, dtype=torch.uint8)
        # the manifest has a checksum of the whole file: torch's own, one a tensor, would take half
        # as long as the writing
        with torch_files.patch("save.compute_crc32", False), ChecksumWriter(path) as file:
            for tensor in self._tensors:
                data = tensor.data.detach()
                # torch writes the whole storage of a view
                if data.is_cuda or data.untyped_storage().nbytes() != data.nbytes:
                    if len(staging) < data.nbytes:
                        staging = torch.empty(data.nbytes, dtype=torch.uint8)
                    data = _copied_into(staging, data)
                data = data.view(_sizes(tensor))
                start = file.size
                torch.save(data, file)
                place = [tensor.global_offset, data.shape, name, start, file.size - start]
                dtype = str(data.dtype).removeprefix("torch.")
                parts.append((tensor.key, {"dtype": dtype, "shape": tensor.global_shape}, place))
        self._tensors = []  # lets go of the copies
        return {f"{DIST_NAME}/{name}": entry_of(file.size, file.crc)}, parts

    def finish(self, folder: Path, results: list[list]) -> list[str]:
        """On the main rank, when all have written: the index and the model's config -> files."""
        tensors: dict[str, dict] = {}
        for parts in results:
            for key, entry, chunk in parts:
                tensors.setdefault(key, {**entry, "chunks": []})["chunks"].append(chunk)
        record = {**dict(zip(STEPS, self._steps, strict=True)), "tensors": tensors}
        write_file(folder / DIST_NAME / INDEX_NAME, json.dumps(record) + "\n")
        write_file(folder / MCA_CONFIG_NAME, self.config_json)
        return [f"{DIST_NAME}/{INDEX_NAME}", MCA_CONFIG_NAME]


def _copied_into(staging: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor at the begin of staging (uint8, at least its bytes), with a storage of
    its size."""
    if not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    bytes_of_copy = staging.numpy()[: tensor.nbytes]
    return torch.frombuffer(bytes_of_copy, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def load_megatron(folder: Path, models, optimizer=None, index: dict | None = None) -> None:
    """Fill the model, and optionally the optimizer, from a checkpoint of any layout.

    index: of the folder, if it was read before. Collective over all ranks. CheckpointError, the
    same on every rank, for files with other content than was written there.
    """
    place = folder / DIST_NAME
    if index is None:
        index = read_index(place)
    steps = [index.get(name, index.get(STEPS[0])) for name in STEPS]  # older ones lack the second
    if optimizer is not None and any(type(count) is not int for count in steps):
        raise CheckpointError(f"{place / INDEX_NAME} has no {STEPS[0]}: use another checkpoint")
    chunks = _sharded(models)

    def fill(tensor) -> None:
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


def _sharded(models) -> dict[str, dict]:
    """{chunk: {name: sharded tensor, or the factory of some}} of a model, without objects."""
    chunks = models.sharded_state_dict()
    for tensors in chunks.values():
        for name in [name for name, x in tensors.items() if isinstance(x, ShardedObject)]:
            del tensors[name]
    return chunks


# -- the writer of each tensor


class _Holders(NamedTuple):
    """The data parallel ranks with a parameter: their group, the writer's rank in it, and {rank:
    (start, stop)} of the pieces a distributed optimizer has cut its state into."""

    group: Any
    writer: int
    pieces: dict[int, tuple[int, int]]

    @property
    def i_write(self) -> bool:
        return self.group.rank() == self.writer

    def replica(self, tensor) -> tuple[int, int, int]:
        """The replica_id of this rank's copy, (tied copy, tensor rank, data parallel rank): that of
        0s is stored."""
        return (*tensor.replica_id[:2], int(not self.i_write))


def holders_of_all(models, optimizer) -> dict[int, _Holders]:
    """{id of a parameter: its holders}. The writer is the rank with a piece of the state and the
    least to write so far: no rank gathers a state cut by many."""
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


def _cuts(optimizer) -> dict[int, tuple[Any, dict[int, tuple[int, int]]]]:
    """{id of a parameter: (group, pieces)} of a distributed optimizer, with each bucket of
    gradients cut into equal shares, one for each rank of a group."""
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


def _is_distributed(part) -> bool:
    return hasattr(part, "gbuf_ranges")


def _by_parameter(chunks: dict) -> dict:
    """{id of a parameter: its sharded tensor, or the factory of some}"""
    found = extract_sharded_tensors_and_factories(chunks)[0]
    return {id(tensor.data): tensor for tensor in nested_values(found)}


def _mine_to_write(tensors: dict, holders: dict[int, _Holders], copy: Callable | None) -> dict:
    """A chunk's sharded tensors, those that this rank writes marked as the main ones.

    copy: of their data, None for the data itself.
    """
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


def owned_parameters(optimizer, models):
    """Yield for each parameter this rank steps: (torch optimizer, model parameter, its float32
    master or this rank's flat piece of it, the piece's slice)."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        if _is_distributed(part):
            for parameter, (group, i) in part.model_param_group_index_map.items():
                piece = part._get_model_param_range_map(parameter)["param"]
                main = inner.param_groups[group]["params"][i]
                yield inner, parameter, main, slice(piece.start, piece.end)
            continue
        mains = {id(p) for group in inner.param_groups for p in group["params"]}
        for parameter in models.parameters():
            main = getattr(parameter, "main_param", parameter)
            if id(main) in mains:
                yield inner, parameter, main, slice(0, parameter.numel())


# keys of the index: updates made so far, of a model and of its modules for inputs beside text. A
# step without such an input is no update of these
STEPS = ("optimizer_steps", "tower_steps")


def may_rest(parameter) -> bool:
    """True for a parameter that updates leave out after a step without its inputs."""
    return getattr(parameter, "may_rest", False)


def state_names(optimizer, parameter) -> list[str]:
    states = _row(optimizer).states_of(parameter)
    return [*states, "master"] if parameter.dtype != torch.float32 else list(states)


def _row(optimizer) -> Optimizer:
    return OPTIMIZERS[parts_of(optimizer)[0].config.optim]


def _state_tensor(tensor, name: str, value: torch.Tensor, **changes):
    """The sharded tensor of one state of a parameter, from that of the parameter."""
    if not isinstance(tensor, ShardedTensorFactory):
        changes["dtype"] = value.dtype
    return replace(tensor, key=f"optimizer.{name}.{tensor.key}", data=value, **changes)


def _optimizer_to_write(
    optimizer, models, tensors: dict, holders: dict, copy: Callable | None
) -> dict:
    """{number: sharded tensor} of the states this rank writes. Collective, parameter by
    parameter."""
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


def state_piece(inner, main, cut: slice, name: str) -> torch.Tensor:
    """This rank's piece of one state, flat and float32; zeros before the first step."""
    state = inner.state.get(main, {}).get(name)
    if name == "master":
        state = inner.master(main) if isinstance(inner, AdamW) else main
    if state is None:
        state = torch.zeros(cut.stop - cut.start, device=main.device)
    # an offloaded one too: ranks send each other pieces from device to device
    return state.detach().float().to(main.device).view(-1)


def _join(part, parameter, group, writer: int, pieces: dict):
    """The whole of a state on the writer, from the pieces of all ranks; None elsewhere."""
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
    optimizer, models, tensors: dict, fill_all: Callable[[list], Iterable], of_kinds: list[int]
) -> None:
    """Set the states this rank steps. Host memory has those of one parameter whole, at most.
    fill_all: of sharded tensors, from the files."""
    with torch.no_grad():
        for inner, parameter, main, cut in owned_parameters(optimizer, models):
            steps = of_kinds[may_rest(parameter)]
            is_piece = main.numel() != parameter.numel()
            names = state_names(optimizer, parameter)
            wholes = {name: torch.zeros(parameter.shape) for name in names}
            tensor = tensors[id(parameter)]
            list(fill_all([_state_tensor(tensor, name, wholes[name]) for name in names]))
            mine = {}
            for name in names:
                value = wholes.pop(name).reshape(-1)[cut].view(main.shape).to(main.device)
                mine[name] = value.clone() if is_piece else value  # the whole can be freed
            if isinstance(inner, AdamW):
                inner.fill(main, {**mine, "step": steps})
                continue
            if "master" in mine:
                main.copy_(mine.pop("master"))
            if _row(optimizer).counts_steps:  # the fused AdamW counts beside the parameter
                mine["step"] = torch.tensor(float(steps), device=main.device)
            inner.state[main] = mine
            if hasattr(inner, "settle"):  # part_offload.OffloadedOptimizer
                inner.settle(main)


def _optimizer_steps(optimizer, models) -> list[int]:
    """Updates made so far, of STEPS: the same for all parameters of a kind; the largest over ranks,
    since some have no piece."""
    counts = [0, 0]
    for inner, parameter, main, _ in owned_parameters(optimizer, models):
        kind = int(may_rest(parameter))
        counts[kind] = max(counts[kind], int(inner.state[main].get("step", 0)))
    return parallel.largest(*counts)
