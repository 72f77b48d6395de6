"""Megatron's side of a checkpoint: a torch_dist folder that megatron-core reads in any layout.

The optimizer's state is stored per parameter, cut like the model's own sharded tensors: megatron's
own optimizer format needs Apex or TE to load, and shares one step counter among all parameters
without them. Data parallel ranks hold the same weights: each tensor, with its optimizer state, is
assembled, kept and written by one of them, so that no rank holds it all.

How it is read: tensors and common.pt with torch.load(weights_only=True), the index
without running its code. Objects that would need a full pickle (_extra_state, the scaling history
of fp8) are not stored: fp8 begins its history anew.
"""

import collections
import pickle
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
from .files import MCA_CONFIG_NAME, describe_error, read_json, sync, write_file
from .kernels import AdamW
from .mcore import (
    CheckpointingConfig,
    ShardedObject,
    ShardedTensorFactory,
    dist_checkpointing,
    extract_sharded_tensors_and_factories,
    nested_values,
    save_config,
    save_preprocess,
    torch_strategy,
)
from .optim import OffloadedOptimizer, parts_of
from .tables import OPTIMIZERS, Optimizer

# -- the index of a checkpoint

INDEX_NAME = ".metadata"

_PATHS = "PosixPath WindowsPath"
_RECORDS = {
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata "
    "TensorProperties ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
# harmless as they are: they call nothing, and a pickle cannot change them
_PLAIN = {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): collections.OrderedDict}
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class _Record:
    """What a pickle makes of one of the classes above: its state, and none of the class's code."""

    state: Any = None

    def __new__(cls, *arguments):
        return super().__new__(cls)

    def __init__(self, *arguments):
        pass

    def __setstate__(self, state):
        self.state = state


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, file):
        super().__init__(file)
        self.classes: dict[str, type] = {}  # made for this file alone

    def find_class(self, module, name):
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if name not in _RECORDS.get(module, "").split():
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")
        return self.classes.setdefault(name, type(name, (_Record,), {}))


def read_index(path: Path) -> Metadata:
    """The index at `path`. CheckpointError where it is none, or where it asks for more than that.

    Every tensor's entry and every file in the folder of `path` are checked; nothing is opened.
    """
    try:
        with open(path, "rb") as file:
            index = _IndexUnpickler(file).load()
        state = _state(index, "Metadata")
        tensors = {
            _text(name): _tensor(entry) for name, entry in state["state_dict_metadata"].items()
        }
        places = dict(_place(item, path.parent) for item in state["storage_data"].items())
    except Exception as error:  # whatever a made up file can lead to
        raise CheckpointError(
            f"{path} is not an index that can be trusted: {error}: use another checkpoint"
        ) from None
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


class IndexedReader(FileSystemReader):
    """torch's reader of a folder, by an index that was checked: the file is not read again."""

    def __init__(self, folder: Path, index: Metadata):
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args, **kwargs) -> Metadata:
        return self._index


def _state(record, name: str):
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise ValueError(f"expected a {name}, and it has a {type(record).__name__}")
    return record.state


def _tensor(entry) -> TensorStorageMetadata:
    state = _state(entry, "TensorStorageMetadata")
    dtype = _is(_state(state["properties"], "TensorProperties")[0], torch.dtype, "a dtype")
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _shape(state["size"]),
        [ChunkStorageMetadata(_shape(c["offsets"]), _shape(c["sizes"])) for c in chunks],
    )


def _place(item, folder: Path) -> tuple[MetadataIndex, _StorageInfo]:
    """(which part of a tensor, where its bytes are), of a file that lies in the folder."""
    part = _state(item[0], "MetadataIndex")
    place = _state(item[1], "_StorageInfo")
    name = _text(place["relative_path"])
    if Path(name).name != name or (folder / name).resolve().parent != folder.resolve():
        raise ValueError(f"it names {name}, which lies outside the folder")
    if place.get("transform_descriptors"):
        raise ValueError(f"it names transformations of {name}, and none is written here")
    index = part.get("index")
    if index is not None:
        index = _number(index)
    where = MetadataIndex(_text(part["fqn"]), _shape(part["offset"]), index)
    return where, _StorageInfo(name, _number(place["offset"]), _number(place["length"]))


def _is(value, kind: type, what: str):
    if type(value) is not kind:
        raise ValueError(f"expected {what}, and it has a {type(value).__name__}")
    return value


def _text(value) -> str:
    return _is(value, str, "a name")


def _number(value) -> int:
    if type(value) is not int or value < 0:
        # not the value: its text may be longer than any memory
        raise ValueError(f"expected a number of at least 0, and it has a {type(value).__name__}")
    return value


def _shape(value) -> torch.Size:
    return torch.Size(_number(size) for size in _is(value, torch.Size, "a shape"))


# -- the distributed checkpoint

DIST_NAME = "dist"
# Joined states wait on the GPU up to this sum, and beyond it in host memory: a copy there takes as
# long as the message.
JOINED_ON_GPU_BYTES = 1 << 30


class MegatronSnapshot:
    """Weights, and the optimizer's state where one is given, ready to be written.

    copy: hold copies in host memory, which later steps do not change. write() may then run in
    another thread. The constructor is collective over all ranks.
    """

    def __init__(self, models, optimizer=None, copy: bool = False):
        holders = _holders_of_all(models, optimizer)
        chunks = models.sharded_state_dict()
        state = {name: _mine_to_write(chunk, holders, copy) for name, chunk in chunks.items()}
        if optimizer is not None:
            tensors = _by_parameter(chunks)
            state["optimizer"] = _optimizer_to_write(optimizer, models, tensors, holders, copy)
            state["optimizer_steps"] = _optimizer_steps(optimizer, models)
        # common.pt would hold the empty part of a rank that has nothing of it to write
        state = {name: part for name, part in state.items() if part != {}}
        sharded, self._common = save_preprocess(state)
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
        """Write this rank's file, unflushed -> (files, where each tensor lies). No collectives."""
        # the manifest has a checksum of the whole file: torch's own, one a tensor, would take half
        # as long as the writing
        own_checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            results = self._writer(folder).write_data(self._plan, self._planner).value()
        finally:
            torch.serialization.set_crc32_options(own_checksums)
        self._planner = self._plan = None  # lets go of the copies
        return [f"{DIST_NAME}/__{parallel.rank()}_0.distcp"], results

    def finish(self, folder: Path, results: list[list]) -> list[str]:
        """On the main rank, when all have written: the index and what is not a tensor -> files."""
        torch.save(self._common, folder / DIST_NAME / "common.pt")
        self._writer(folder).finish(self._index, results)
        for name in ("common.pt", INDEX_NAME):
            sync(folder / DIST_NAME / name)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder / DIST_NAME))
        write_file(folder / MCA_CONFIG_NAME, self.config_json)
        names = ("common.pt", INDEX_NAME, "metadata.json")
        return [*(f"{DIST_NAME}/{name}" for name in names), MCA_CONFIG_NAME]

    @staticmethod
    def _writer(folder: Path):
        (folder / DIST_NAME).mkdir(exist_ok=True)
        return FileSystemWriter(
            folder / DIST_NAME, single_file_per_rank=True, sync_files=False, thread_count=1
        )


def load_megatron(folder: Path, models, optimizer=None) -> None:
    """Fill the model, and the optimizer where one is given, from a checkpoint of any layout.

    Collective over all ranks. CheckpointError where the index cannot be trusted, and where a file
    holds something else than was written there.
    """
    index = read_index(folder / DIST_NAME / INDEX_NAME)
    _check_common(folder / DIST_NAME, optimizer is not None)
    state = models.sharded_state_dict()
    kept = {}
    for chunk, tensors in state.items():
        objects = [name for name, value in tensors.items() if isinstance(value, ShardedObject)]
        kept[chunk] = {name: tensors.pop(name).data for name in objects}
    places = {}
    if optimizer is not None:
        by_parameter = _by_parameter(state)
        state["optimizer"], places = _optimizer_to_fill(optimizer, models, by_parameter)
    # ranks ask for the states that they step, not each tensor once: megatron's check of that would
    # refuse it
    try:
        loaded = dist_checkpointing.load(
            state, str(folder / DIST_NAME), _LoadByIndex(index), validate_access_integrity=False
        )
    except CheckpointException as error:  # torch's, which is no Exception
        rank, (failure, _) = next(iter(error.failures.items()))
        words = f"rank {rank}: {type(failure).__name__}: {failure}".splitlines()[0]
        raise CheckpointError(
            f"{folder / DIST_NAME} cannot be read ({words}): use another checkpoint"
        ) from None
    # a pipeline stage may have nothing that is trained
    models.load_state_dict({chunk: {**loaded.get(chunk, {}), **kept[chunk]} for chunk in kept})
    if optimizer is not None:
        states: dict[int, dict[str, torch.Tensor]] = {}
        for key, (parameter, name) in places.items():
            states.setdefault(parameter, {})[name] = loaded["optimizer"][key]
        _fill_optimizer(optimizer, models, states, loaded["optimizer_steps"])


def _check_common(folder: Path, with_optimizer: bool) -> None:
    """CheckpointError where the files beside the tensors hold other things than are written there:
    megatron would stumble over them, on some rank and in its own words."""
    path = folder / "common.pt"
    try:
        common = torch.load(path, weights_only=True)
        steps = common.get("optimizer_steps", None if with_optimizer else 0)
        if common.keys() - {"optimizer_steps"} or type(steps) is not int or steps < 0:
            raise ValueError("expected a number of optimizer_steps, and nothing else")
        path = folder / "metadata.json"
        if read_json(path).get("sharded_backend") != "torch_dist":
            raise ValueError("expected sharded_backend: torch_dist")
    except Exception as error:  # whatever torch makes of what is no file of its own
        words = describe_error(error).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read ({words}): use another checkpoint") from None


class _LoadByIndex(torch_strategy.TorchDistLoadShardedStrategy):
    """megatron's strategy for torch_dist folders, which takes the index instead of reading it.

    It loads what is stored here: tensors, and no objects.
    """

    def __init__(self, index):
        super().__init__()
        self._index = index

    def load(self, sharded_state_dict, checkpoint_dir):
        wanted = list(nested_values(sharded_state_dict))
        by_key, flat, renamed = torch_strategy._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict
        )
        to_fill = torch_strategy.mcore_to_pyt_state_dict(by_key, True)
        # the vocabulary's padding differs between layouts: such a tensor may be of another
        # shape
        padded = {tensor.key: tensor for tensor in wanted if tensor.allow_shape_mismatch}
        planner = torch_strategy.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[t for t in wanted if t.key not in padded],
            allow_shape_mismatch_sharded_tensors=padded,
        )
        reader = IndexedReader(checkpoint_dir, self._index)
        with mcore.quiet():
            load_state_dict(to_fill, reader, planner=planner)
        filled = {
            key: torch_strategy._unwrap_pyt_sharded_tensor(value) for key, value in to_fill.items()
        }
        filled = torch_strategy._replace_sharded_keys_with_state_dict_keys(filled, flat, renamed)
        torch_strategy._restore_dict_types(filled, sharded_state_dict)
        return filled


# -- who writes what ---------------------------------------------------------------------------


class _Holders(NamedTuple):
    """The data parallel ranks that hold a parameter: their group, the rank in it that writes, and
    {rank: (start, stop)} of each one's piece where a distributed optimizer has cut its state."""

    group: Any
    writer: int
    pieces: dict[int, tuple[int, int]]

    @property
    def i_write(self) -> bool:
        return self.group.rank() == self.writer


def _holders_of_all(models, optimizer) -> dict[int, _Holders]:
    """{id of a parameter: its holders}. Of those that have a piece of its state the one writes that
    has least to write so far: no rank gathers the state of a model that many have cut."""
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
    """{id of a parameter: (group, pieces)} where the optimizer is a distributed one, which cuts
    each bucket of gradients into equal shares, one for each rank of a group."""
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
    """A chunk's sharded tensors: those that this rank writes are marked as the main ones.

    copy: the data of those is copied to host memory.
    """
    out = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, ShardedObject):
            continue
        holder = holders.get(id(tensor.data))
        data = tensor.data
        replica = tensor.replica_id
        if holder is not None:  # it is no buffer, whose replica_id is right already
            replica = _replica(tensor, holder.i_write)
        if copy and (holder is None or holder.i_write):
            data = data.detach().to("cpu", copy=True)
        out[name] = replace(tensor, data=data, replica_id=replica)
    return out


# -- the optimizer -----------------------------------------------------------------------------


def _owned(optimizer, models):
    """What this rank steps, a tuple for each parameter: (torch optimizer, model parameter, its
    float32 master or this rank's flat piece of it, the piece's slice)."""
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
    return OPTIMIZERS[parts_of(optimizer)[0].config.optimizer]


def _state_tensor(tensor, name: str, value: torch.Tensor, **changes):
    """The sharded tensor of one state of a parameter, from the parameter's own."""
    if not isinstance(tensor, ShardedTensorFactory):
        changes["dtype"] = value.dtype
    return replace(tensor, key=f"optimizer.{name}.{tensor.key}", data=value, **changes)


def _optimizer_to_write(optimizer, models, tensors: dict, holders: dict, copy: bool) -> dict:
    """{key: sharded tensor} of the states that this rank writes. Collective, parameter by
    parameter."""
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
    """On the writer the whole of a state, from the pieces of all ranks that hold one; else None."""
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
    """What is asked for: ({key: empty sharded tensor of a state that this rank steps},
    {key: (id of the parameter, name of the state)})."""
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
                mine[name] = value.clone() if is_piece else value  # so that the whole can go
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
    """Updates made so far: the same for all parameters; the largest over ranks, since some own no
    piece."""
    counts = [
        int(inner.state[main]["step"])
        for inner, _, main, _ in _owned(optimizer, models)
        if "step" in inner.state[main]
    ]
    return parallel.largest(max(counts, default=0))[0]
