"""A crafted checkpoint runs nothing: no code, no bytes, no path out of its folder."""

import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mca_lite import ckpt_folder
from mca_lite.ckpt_folder import CheckpointError
from mca_lite.ckpt_megatron import IndexedReader, read_index
from tests.shared import tiny, world
from tests.shared.layouts import SAVE
from tests.shared.training import attempt, train

FILESYSTEM = "torch.distributed.checkpoint.filesystem"


class Touch:
    """A pickle of this makes a file when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def an_index(place="__0_0.distcp", entry=None, offset=0, **info) -> Metadata:
    size = torch.Size([2, 3])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    entry = entry or TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk])
    where = _StorageInfo(place, offset, 24, **info)
    return Metadata({"weight": entry}, storage_data={MetadataIndex("weight", (0, 0)): where})


def call(module: str, name: str, *arguments: bytes) -> bytes:
    """Opcodes that call a name with what other opcodes leave."""
    return b"c%s\n%s\n(%stR" % (module.encode(), name.encode(), b"".join(arguments))


def text(value) -> bytes:
    return b"V%s\n" % str(value).encode()


def test_an_honest_index_is_read_as_it_was_written(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(an_index()))
    index = read_index(tmp_path / ".metadata")
    assert index.state_dict_metadata == an_index().state_dict_metadata
    assert index.storage_data == an_index().storage_data
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    assert IndexedReader(tmp_path, index).read_metadata() is index  # the file is not read again
    assert not (tmp_path / "ran").exists()


def loaded_by_torch(folder: Path) -> bytes:
    """torch.load without weights_only, by names that torch's filesystem module imports."""
    (folder / "payload").write_bytes(pickle.dumps(Touch(folder / "ran")))
    load = call(FILESYSTEM, "_get_device_module", text("load"))
    arguments = text(folder / "payload") + b"N" + b"c%s\npickle\n" % FILESYSTEM.encode()
    return load + b"(" + arguments + b"tR."


def system(folder: Path) -> bytes:
    return call("os", "system", text(f"touch {folder / 'ran'}")) + b"."


def system_of_the_filesystem(folder: Path) -> bytes:
    """Protocol 4 looks a dotted name up attribute by attribute."""
    name = b"os.system"
    path = str(folder / "ran").encode()
    command = b"touch " + path
    module = FILESYSTEM.encode()
    opcodes = b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(name)]) + name
    return opcodes + b"\x93X" + len(command).to_bytes(4, "little") + command + b"\x85R."


def saved_by_torch(folder: Path) -> bytes:
    """torch's own functions, beside the dtypes that an index names in the same module."""
    return call("torch", "save", b"N", text(folder / "ran")) + b"."


def changed_class(folder: Path) -> bytes:
    """BUILD with a state of two parts sets attributes, also those of a class."""
    return b"c%s\nMetadata\n(N(dVversion\nVchanged\nstb." % b"torch.distributed.checkpoint.metadata"


CRAFTED = {
    "torch.save": (saved_by_torch, "torch.save"),
    "torch.load": (loaded_by_torch, "_get_device_module"),
    "os": (system, "system"),
    "dotted": (system_of_the_filesystem, "os.system"),
    "class": (changed_class, "not an index"),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_an_index_that_names_code_is_refused_and_runs_nothing(tmp_path, kind):
    make, words = CRAFTED[kind]
    (tmp_path / ".metadata").write_bytes(make(tmp_path))
    with pytest.raises(CheckpointError, match=words):
        read_index(tmp_path / ".metadata")
    assert not (tmp_path / "ran").exists()
    assert Metadata.version is None


def nested_tuple():
    """A tuple of 16^16 leaves, which share their parts."""
    value = ()
    for _ in range(16):
        value = (value,) * 16
    return value


ODD = {
    "bytes": (an_index(entry=BytesStorageMetadata()), "BytesStorageMetadata"),
    "above": (an_index("../__0_0.distcp"), "outside the folder"),
    "absolute": (an_index("/etc/passwd"), "outside the folder"),
    "folder": (an_index("."), "outside the folder"),
    "link": (an_index("linked"), "outside the folder"),
    "transformed": (an_index(transform_descriptors=["zstd"]), "transformations"),
    "nested": (an_index(offset=nested_tuple()), "expected a number of at least 0"),
    "no tensors": (Metadata({"weight": "text"}), "expected a TensorStorageMetadata"),
    "no index": ({"weight": 1}, "expected a Metadata"),
}


@pytest.mark.parametrize("kind", ODD)
def test_bytes_and_files_outside_the_folder_are_refused(tmp_path, kind):
    (tmp_path / "dist").mkdir()
    (tmp_path / "outside").touch()
    (tmp_path / "dist" / "linked").symlink_to(tmp_path / "outside")
    index, words = ODD[kind]
    (tmp_path / "dist" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        read_index(tmp_path / "dist" / ".metadata")


def marked_as_bytes(folder: Path) -> None:
    """One tensor of a real checkpoint becomes an entry of bytes: a pickle that makes a file."""
    path = folder / "dist" / ".metadata"
    index = pickle.loads(path.read_bytes())
    name = next(iter(index.state_dict_metadata))
    entry = BytesStorageMetadata()
    entry.size, entry.properties, entry.chunks = (
        index.state_dict_metadata[name].size,
        index.state_dict_metadata[name].properties,
        index.state_dict_metadata[name].chunks,
    )
    index.state_dict_metadata[name] = entry
    stream = io.BytesIO()
    torch.save(Touch(folder / "ran"), stream)
    (folder / "dist" / "payload").write_bytes(stream.getvalue())
    for part in [part for part in index.storage_data if part.fqn == name]:
        del index.storage_data[part]
    index.storage_data[MetadataIndex(name)] = _StorageInfo("payload", 0, len(stream.getvalue()))
    path.write_bytes(pickle.dumps(index))


def named_code(folder: Path) -> None:
    (folder / "dist" / ".metadata").write_bytes(loaded_by_torch(folder))


def test_a_crafted_checkpoint_runs_nothing_when_a_run_resumes_from_it(tmp_path):
    model = tiny.save_model(tmp_path / "model", "qwen3")
    world.run(train, 1, model, str(tmp_path / "run"), steps=2, **SAVE)
    folder = tmp_path / "run" / "checkpoint-2"
    honest = (folder / "dist" / ".metadata").read_bytes()
    for craft in (marked_as_bytes, named_code):
        (folder / "dist" / ".metadata").write_bytes(honest)
        craft(folder)
        record = ckpt_folder.read_manifest(folder)
        del record["format"]
        record["files"]["dist/.metadata"] = ckpt_folder.measure(folder / "dist" / ".metadata")
        ckpt_folder.write_manifest(folder, record, record.pop("files"))
        keys = dict(SAVE, resume_from_checkpoint=str(folder))
        ((error, _, _),) = world.run(attempt, 1, model, str(tmp_path / "run"), steps=3, **keys)
        assert "not an index that can be trusted" in error
        assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["/etc/passwd", "../config.json", "dist/../../x"])
def test_a_manifest_names_files_in_its_folder_alone(tmp_path, name):
    facts = dict(backend="megatron", step=2, with_optimizer=True, model={})
    ckpt_folder.write_manifest(tmp_path, facts, {name: {"bytes": 1, "crc32": "00000000"}})
    with pytest.raises(CheckpointError, match="outside the folder"):
        ckpt_folder.read_manifest(tmp_path)


@pytest.mark.parametrize(
    "change", [{"files": {}}, {"model": None}, {"backend": "other"}, {"format": "1"}]
)
def test_a_manifest_of_other_types_is_damaged(tmp_path, change):
    files = {"training.json": {"bytes": 1, "crc32": "00000000"}}
    facts = dict(backend="megatron", step=2, with_optimizer=True, model={})
    ckpt_folder.write_manifest(tmp_path, facts, files)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match="is damaged"):
        ckpt_folder.read_manifest(tmp_path)
