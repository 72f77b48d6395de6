"""Megatron's distributed checkpoint: tensors in torch's files, for any layout to load.

    __<rank>_0.distcp   the tensors of a rank, read with torch.load(weights_only=True)
    index.json          the place of each tensor's parts in those files; the optimizer's steps

The optimizer's state is stored per parameter, cut like the model's sharded tensors: megatron's
optimizer format needs Apex or TE to load, and shares one step counter among all parameters without
them. Data parallel ranks have the same weights: each tensor, with its optimizer state, is
assembled, kept and written by one of them, and no rank keeps it all. Objects in need of a pickle
(_extra_state, the scaling history of fp8) are not stored: fp8 begins its history anew.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .ckpt_folder import CheckpointError

from . import mcore  # isort: skip
from . import parallel
from .files import MCA_CONFIG_NAME, read_json, write_file
from .kernels import AdamW
from .mcore import (
    ShardedObject,
    ShardedTensorFactory,
    apply_factory_merges,
    extract_sharded_tensors_and_factories,
    load_preprocess,
    nested_values,
    save_preprocess,
    torch_strategy,
)
from .optim import OffloadedOptimizer, parts_of
from .tables import OPTIMIZERS, Optimizer

DIST_NAME = "dist"
INDEX_NAME = "index.json"
OLD_INDEX_NAME = ".metadata"  # torch's, a pickle, in checkpoints of earlier versions
# Joined states wait on the GPU up to this sum, and beyond it in host memory: a copy there takes as
# long as the message.
JOINED_ON_GPU_BYTES = 1 << 30

# -- the index


class Index(NamedTuple):
    """The tensors of a folder as torch describes them, and the updates the optimizer has made; None
    without its state."""

    tensors: Metadata
    optimizer_steps: int | None


def _index_record(tensors: Metadata, results: list[list], steps: int | None) -> dict[str, Any]:
    """The content of index.json. tensors: torch's global plan; results: of all ranks' writers."""
    places = {}
    for of_rank in results:
        for result in of_rank:
            places[result.index.fqn, tuple(result.index.offset)] = result.storage_data
    record = {}
    for name, entry in tensors.state_dict_metadata.items():
        chunks = []
        for chunk in entry.chunks:
            place = places[name, tuple(chunk.offsets)]
            where = [place.relative_path, place.offset, place.length]
            chunks.append([[*chunk.offsets], [*chunk.sizes], *where])
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        record[name] = {"dtype": dtype, "shape": [*entry.size], "chunks": chunks}
    return {"optimizer_steps": steps, "tensors": record}


def read_index(folder: Path) -> Index:
    """The index of a folder of tensors. CheckpointError for anything else, and for the index of an
    earlier version."""
    path = folder / INDEX_NAME
    if not path.is_file() and (folder / OLD_INDEX_NAME).is_file():
        raise CheckpointError(
            f"{folder.parent} was written by an earlier version, and cannot be resumed from: "
            f"python -m mca_lite convert {folder.parent} DST exports its weights"
        )
    try:
        return to_index(read_json(path), folder)
    except (ArithmeticError, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not an index that can be trusted: {error!r:.200}: use another checkpoint"
        ) from None


def to_index(record: dict[str, Any], folder: Path) -> Index:
    """The Index of a record as in index.json, every value checked; no file is opened. Raises many
    kinds of error for other content."""
    tensors = {}
    places = {}
    names = set()
    for key, entry in record["tensors"].items():
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"the dtype of {key} is {entry['dtype']}")
        chunks = []
        for offsets, sizes, name, start, length in entry["chunks"]:
            names.add(name)
            chunks.append(ChunkStorageMetadata(_shape(offsets), _shape(sizes)))
            place = _StorageInfo(name, _number(start), _number(length))
            places[MetadataIndex(key, _shape(offsets))] = place
        properties = TensorProperties(dtype=dtype)
        tensors[key] = TensorStorageMetadata(properties, _shape(entry["shape"]), chunks)
    for name in names:
        if Path(name).name != name or (folder / name).resolve().parent != folder.resolve():
            raise ValueError(f"it names {name}, which lies outside the folder")
    steps = record["optimizer_steps"]
    if steps is not None:
        _number(steps)
    metadata = Metadata(tensors, storage_data=places, storage_meta=StorageMeta())
    return Index(metadata, steps)


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a number of at least 0, got {value!r:.40}")
    return value


def _shape(values: list) -> torch.Size:
    return torch.Size(map(_number, values))


class _IndexedReader(FileSystemReader):
    """torch's reader of a folder, by a checked index."""

    def __init__(self, folder: Path, tensors: Metadata):
        super().__init__(folder)
        self._tensors = tensors

    def read_metadata(self, *args, **kwargs) -> Metadata:
        return self._tensors


# -- writing and loading


class MegatronSnapshot:
    """Weights, and optionally the optimizer's state, ready to be written.

    copy: copy them to host memory, unchanged by later steps. write() may then run in another
    thread. The constructor is collective over all ranks.
    """

    def __init__(self, models, optimizer=None, copy: bool = False):
        self._steps: int | None = None
        holders = _holders_of_all(models, optimizer)
        chunks = models.sharded_state_dict()
        state = {name: _mine_to_write(chunk, holders, copy) for name, chunk in chunks.items()}
        if optimizer is not None:
            tensors = _by_parameter(chunks)
            state["optimizer"] = _optimizer_to_write(optimizer, models, tensors, holders, copy)
            self._steps = _optimizer_steps(optimizer, models)
        sharded, _ = save_preprocess(state)
        by_key, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded, True)
        self._planner = torch_strategy.MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False
        )
        to_write = torch_strategy.mcore_to_pyt_state_dict(by_key, False)
        self._planner.set_up_planner(to_write, is_coordinator=parallel.is_main())
        plan = self._planner.create_local_plan()
        plans = [None] * parallel.world_size() if parallel.is_main() else None
        dist.gather_object(plan, plans)
        self._index = self._planner.create_global_plan(plans)[1] if parallel.is_main() else None
        storage = _StoragePrefix(f"__{parallel.rank()}_")
        self._plan = self._planner.finish_plan(replace(plan, storage_data=storage))
        self.config_json = models.config.to_json_string()

    def write(self, folder: Path) -> tuple[list[str], list]:
        """Write this rank's file, unflushed -> (files, place of each tensor). No collectives."""
        place = folder / DIST_NAME
        place.mkdir(exist_ok=True)
        writer = FileSystemWriter(place, single_file_per_rank=True, sync_files=False)
        # the manifest has a checksum of the whole file: torch's own, one a tensor, would take half
        # as long as the writing
        own_checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            results = writer.write_data(self._plan, self._planner).value()
        finally:
            torch.serialization.set_crc32_options(own_checksums)
        self._planner = self._plan = None  # lets go of the copies
        return [f"{DIST_NAME}/__{parallel.rank()}_0.distcp"], results

    def finish(self, folder: Path, results: list[list]) -> list[str]:
        """On the main rank, when all have written: the index and the model's config -> files."""
        record = _index_record(self._index, results, self._steps)
        write_file(folder / DIST_NAME / INDEX_NAME, json.dumps(record) + "\n")
        write_file(folder / MCA_CONFIG_NAME, self.config_json)
        return [f"{DIST_NAME}/{INDEX_NAME}", MCA_CONFIG_NAME]


def load_megatron(folder: Path, models, optimizer=None, index: Index | None = None) -> None:
    """Fill the model, and optionally the optimizer, from a checkpoint of any layout.

    index: of the folder, if it was read before. Collective over all ranks. CheckpointError for an
    index that cannot be trusted, and for files with other content than was written there.
    """
    place = folder / DIST_NAME
    if index is None:
        index = read_index(place)
    if optimizer is not None and index.optimizer_steps is None:
        raise CheckpointError(
            f"{place / INDEX_NAME} has no optimizer_steps: use another checkpoint"
        )
    state = models.sharded_state_dict()
    kept = {}
    for chunk, tensors in state.items():
        objects = [name for name, value in tensors.items() if isinstance(value, ShardedObject)]
        kept[chunk] = {name: tensors.pop(name).data for name in objects}
    places = {}
    if optimizer is not None:
        by_parameter = _by_parameter(state)
        state["optimizer"], places = _optimizer_to_fill(optimizer, models, by_parameter)
    try:
        loaded = _load_sharded(state, _IndexedReader(place, index.tensors))
    except CheckpointException as error:  # torch's error is no Exception
        rank, (failure, _) = next(iter(error.failures.items()))
        words = f"rank {rank}: {type(failure).__name__}: {failure}".splitlines()[0]
        raise CheckpointError(f"{place} cannot be read ({words}): use another checkpoint") from None
    # a pipeline stage may train nothing
    models.load_state_dict({chunk: {**loaded.get(chunk, {}), **kept[chunk]} for chunk in kept})
    if optimizer is not None:
        states: dict[int, dict[str, torch.Tensor]] = {}
        for key, (parameter, name) in places.items():
            states.setdefault(parameter, {})[name] = loaded["optimizer"][key]
        _fill_optimizer(optimizer, models, states, index.optimizer_steps)


def _load_sharded(state: dict, reader: _IndexedReader) -> dict:
    """The state with its sharded tensors filled: dist_checkpointing.load for a torch_dist folder
    without common.pt and torch's index. Collective."""
    sharded, _, factories = load_preprocess(state)
    tensors = list(nested_values(sharded))
    by_key, flat, renamed = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded)
    to_fill = torch_strategy.mcore_to_pyt_state_dict(by_key, True)
    # the vocabulary's padding differs between layouts: such a tensor may be of another shape
    padded = {tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch}
    planner = torch_strategy.MCoreLoadPlanner(
        shapes_validation_sharded_tensors=[t for t in tensors if t.key not in padded],
        allow_shape_mismatch_sharded_tensors=padded,
    )
    with mcore.quiet():
        load_state_dict(to_fill, reader, planner=planner)
    filled = {
        key: torch_strategy._unwrap_pyt_sharded_tensor(value) for key, value in to_fill.items()
    }
    filled = torch_strategy._replace_sharded_keys_with_state_dict_keys(filled, flat, renamed)
    torch_strategy._restore_dict_types(filled, sharded)
    return apply_factory_merges(filled, factories)


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


def _holders_of_all(models, optimizer) -> dict[int, _Holders]:
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
    for part in parts_of(optimizer):
        for buffer in part.buffers if _is_distributed(part) else ():
            group = part.data_parallel_group
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


def _replica(tensor, i_write: bool) -> tuple[int, int, int]:
    """A tensor's replica_id, (tied copy, tensor rank, data parallel rank): megatron writes 0s."""
    return (*tensor.replica_id[:2], 0 if i_write else 1)


def _mine_to_write(tensors: dict, holders: dict[int, _Holders], copy: bool) -> dict:
    """A chunk's sharded tensors, those that this rank writes marked as the main ones.

    copy: copy their data to host memory.
    """
    out = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, ShardedObject):
            continue
        holder = holders.get(id(tensor.data))
        data = tensor.data
        replica = tensor.replica_id
        if holder is not None:  # a buffer's replica_id is right already
            replica = _replica(tensor, holder.i_write)
        if copy and (holder is None or holder.i_write):
            data = data.detach().to("cpu", copy=True)
        out[name] = replace(tensor, data=data, replica_id=replica)
    return out


# -- the optimizer


def _owned(optimizer, models):
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


def _state_names(optimizer, parameter) -> list[str]:
    states = _row(optimizer).states
    return [*states, "master"] if parameter.dtype != torch.float32 else list(states)


def _row(optimizer) -> Optimizer:
    return OPTIMIZERS[parts_of(optimizer)[0].config.optim]


def _state_tensor(tensor, name: str, value: torch.Tensor, **changes):
    """The sharded tensor of one state of a parameter, from that of the parameter."""
    if not isinstance(tensor, ShardedTensorFactory):
        changes["dtype"] = value.dtype
    return replace(tensor, key=f"optimizer.{name}.{tensor.key}", data=value, **changes)


def _optimizer_to_write(optimizer, models, tensors: dict, holders: dict, copy: bool) -> dict:
    """{key: sharded tensor} of the states this rank writes. Collective, parameter by parameter."""
    held = {
        id(parameter): (inner, main, cut)
        for inner, parameter, main, cut in _owned(optimizer, models)
    }
    out = {}
    joined_bytes = 0
    for parameter in (p for p in models.parameters() if p.requires_grad):
        tensor = tensors[id(parameter)]
        holder = holders[id(parameter)]
        for name in _state_names(optimizer, parameter):
            part = None
            if id(parameter) in held and (holder.i_write or holder.pieces):
                part = _state_of(*held[id(parameter)], name)
            value = _join(part, parameter, *holder)
            if holder.i_write:
                is_joined = len(holder.pieces) > 1
                joined_bytes += is_joined * value.nbytes
                if copy or (is_joined and joined_bytes > JOINED_ON_GPU_BYTES):
                    value = value.to("cpu", copy=copy)
                replica = _replica(tensor, True)
                out[f"{len(out)}.{name}"] = _state_tensor(tensor, name, value, replica_id=replica)
    return out


def _state_of(inner, main, cut: slice, name: str) -> torch.Tensor:
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


def _optimizer_to_fill(optimizer, models, tensors: dict) -> tuple[dict, dict]:
    """({key: empty sharded tensor of a state this rank steps}, {key: (id of the parameter, name of
    the state)})."""
    sharded = {}
    places = {}
    for _, parameter, _, _ in _owned(optimizer, models):
        for name in _state_names(optimizer, parameter):
            key = f"{len(sharded)}.{name}"
            sharded[key] = _state_tensor(tensors[id(parameter)], name, torch.zeros(parameter.shape))
            places[key] = (id(parameter), name)
    return sharded, places


def _fill_optimizer(optimizer, models, states: dict, steps: int) -> None:
    with torch.no_grad():
        for inner, parameter, main, cut in _owned(optimizer, models):
            is_piece = main.numel() != parameter.numel()
            mine = {}
            for name, whole in states.pop(id(parameter)).items():
                value = whole.reshape(-1)[cut].view(main.shape).to(main.device)
                mine[name] = value.clone() if is_piece else value  # the whole can be freed
            if isinstance(inner, AdamW):
                inner.fill(main, {**mine, "step": steps})
                continue
            if "master" in mine:
                main.copy_(mine.pop("master"))
            if _row(optimizer).counts_steps:  # the fused AdamW counts beside the parameter
                mine["step"] = torch.tensor(float(steps), device=main.device)
            inner.state[main] = mine
            if isinstance(inner, OffloadedOptimizer):
                inner.settle(main)


def _optimizer_steps(optimizer, models) -> int:
    """Updates made so far: the same for all parameters; the largest over ranks, since some have no
    piece."""
    counts = [
        int(inner.state[main]["step"])
        for inner, _, main, _ in _owned(optimizer, models)
        if "step" in inner.state[main]
    ]
    return parallel.largest(max(counts, default=0))[0]
