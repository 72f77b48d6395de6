"""The index of a distributed checkpoint: which tensor lies where. Read without running its code.

torch writes the index, dist/.metadata, as a pickle, and a pickle can call whatever it names. Here
it may name the classes below and nothing else, and not even these are what it gets: each name
stands for a record that only keeps what it is given. From the records an index is made anew, of
names, numbers, shapes and dtypes that were checked. The reader gets this index and never opens the
file a second time.

What is refused besides: an entry of bytes (torch would unpickle it whole), and a file that does
not lie in the folder of the index.
"""

import collections
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .ckpt_folder import CheckpointError

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
    part, place = _state(item[0], "MetadataIndex"), _state(item[1], "_StorageInfo")
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
