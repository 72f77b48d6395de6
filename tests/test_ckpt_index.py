"""A crafted checkpoint runs nothing: no code, no path out of its folder. Those of earlier versions,
whose index is a pickle, are exported by convert.
"""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mca_lite import ckpt_folder, parallel
from mca_lite.ckpt_folder import CheckpointError
from mca_lite.ckpt_megatron import read_index, read_tensor
from tests.shared import tiny, world
from tests.shared.commands import convert
from tests.shared.layouts import SAVE, TP2
from tests.shared.training import attempt, train


def write_rows(folder: Path) -> dict:
    """Two rows of a weight in a file -> its index."""
    chunks = []
    folder.mkdir()
    with open(folder / "__0_0.distcp", "wb") as file:
        for row in range(2):
            start = file.tell()
            torch.save(torch.full((1, 3), row + 1.0), file)
            chunks.append([[row, 0], [1, 3], "__0_0.distcp", start, file.tell() - start])
    entry = {"dtype": "float32", "shape": [2, 3], "chunks": chunks}
    return {"optimizer_steps": 2, "tensors": {"weight": entry}}


def columns_from(*, first: int = 1) -> ShardedTensor:
    """The columns from `first` on, of the weight in write_rows()."""
    data = torch.full((2, 2), 9.0)
    return ShardedTensor("weight", data, data.dtype, (2, 2), (2, 3), (0, first), None)


def test_a_tensor_cut_in_another_way_is_read_from_all_its_parts(tmp_path):
    index = write_rows(tmp_path / "dist")
    (tmp_path / "dist" / "index.json").write_text(json.dumps(index))
    tensor = columns_from()
    read_tensor(tensor, read_index(tmp_path / "dist"), tmp_path / "dist")
    assert tensor.data.tolist() == [[1, 1], [2, 2]]


def entry(**changes) -> dict:
    return {"weight": {"dtype": "float32", "shape": [2, 3], "chunks": []} | changes}


def entry_at(name="__0_0.distcp", start=0, length=9999, sizes=(2, 3)) -> dict:
    return entry(chunks=[[[0, 0], [*sizes], name, start, length]])


ODD = {
    "above": (entry_at("../outside"), "outside the folder"),
    "absolute": (entry_at("/etc/passwd"), "outside the folder"),
    "folder": (entry_at("."), "outside the folder"),
    "link": (entry_at("linked"), "outside the folder"),
    "offset": (entry_at(start=-1), "BadZipFile"),
    "length": (entry_at(length=[1]), "TypeError"),
    "cut": (entry_at(length=5), "BadZipFile"),
    "other sizes": (entry_at(sizes=(2, 3, 4)), "zip"),
    "shape": (entry(shape=[2, True]), "has shape"),
    "no chunks": (entry(chunks=None), "TypeError"),
    "no tensor": ({}, "KeyError: 'weight'"),
    "no tensors": (["weight"], "TypeError"),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_index_is_refused(tmp_path, kind):
    write_rows(tmp_path / "dist")
    (tmp_path / "outside").touch()
    (tmp_path / "dist" / "linked").symlink_to(tmp_path / "outside")
    tensors, words = ODD[kind]

    def read() -> None:
        read_tensor(columns_from(), {"tensors": tensors}, tmp_path / "dist")

    with pytest.raises(CheckpointError, match=rf"odd \(rank 0: .*({words})"):
        parallel.on_all(read, CheckpointError, "odd")


def moved(chunk: list, row: int) -> list:
    """A chunk in the index, at another row."""
    return [[row, 0], *chunk[1:]]


ONCE = "the parts of weight do not cover it once"
EDITS = {  # of the entry of two chunks, a row each
    "no chunks": (lambda first, second: dict(chunks=[]), ONCE),
    "one chunk": (lambda first, second: dict(chunks=[second]), ONCE),
    "a row twice": (lambda first, second: dict(chunks=[first, first]), ONCE),
    "three": (lambda first, second: dict(chunks=[first, second, second]), ONCE),
    "above": (lambda first, second: dict(chunks=[moved(first, -1), second]), ONCE),
    "below": (lambda first, second: dict(chunks=[first, moved(second, 2)]), ONCE),
    "fewer stored": (
        lambda first, second: dict(chunks=[[[0, 0], [2, 3], *first[2:]]]),
        "no tensor of 24 bytes",
    ),
    "fewer rows": (
        lambda first, second: dict(shape=[1, 3], chunks=[first]),
        "shape .1, 3., not .2, 3",
    ),
}


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("is_vocabulary", [False, True])
def test_an_index_that_does_not_cover_a_tensor_once_is_refused(tmp_path, kind, is_vocabulary):
    """A vocabulary of two tokens may have other rows of padding, and no fewer."""
    index = write_rows(tmp_path / "dist")
    entry = index["tensors"]["weight"]
    edit, words = EDITS[kind]
    entry.update(edit(*entry["chunks"]))
    tensor = replace(columns_from(), allow_shape_mismatch=is_vocabulary)
    with pytest.raises((ValueError, RuntimeError), match=words):
        read_tensor(tensor, index, tmp_path / "dist", 2)


@pytest.mark.parametrize("first, wanted", [(0, [1, 2, 0]), (1, [2, 0, 0]), (3, [0, 0, 0])])
def test_rows_of_padding_are_zeros_and_in_no_part(tmp_path, first, wanted):
    index = write_rows(tmp_path / "dist")
    data = torch.full((3, 3), 9.0)
    padded = ShardedTensor("weight", data, data.dtype, (3, 3), (6, 3), (first, 0), None)
    read_tensor(replace(padded, allow_shape_mismatch=True), index, tmp_path / "dist", 2)
    assert data[:, 0].tolist() == wanted


def test_moments_without_chunks_are_not_resumed_from(tmp_path):
    model = tiny.save_model(tmp_path / "model", "qwen3")
    out = str(tmp_path / "run")
    world.run(train, 1, model, out, steps=2, **SAVE)
    folder = tmp_path / "run" / "checkpoint-2"
    index = read_index(folder / "dist")
    name = next(name for name in index["tensors"] if name.startswith("optimizer.exp_avg."))
    index["tensors"][name]["chunks"] = []
    (folder / "dist" / "index.json").write_text(json.dumps(index))
    record = ckpt_folder.read_manifest(folder)
    files = record.pop("files")
    del record["format"]
    files["dist/index.json"] = ckpt_folder.measure(folder / "dist" / "index.json")
    ckpt_folder.write_manifest(folder, record, files)
    keys = dict(SAVE, steps=3, resume_from_checkpoint=str(folder))
    [(error, _, _)] = world.run(attempt, 1, model, out, **keys)
    assert f"the parts of {name} do not cover it once" in error and "another checkpoint" in error


def test_a_pickle_in_place_of_a_tensor_runs_nothing(tmp_path):
    write_rows(tmp_path / "dist")
    torch.save(Touch(tmp_path / "ran"), tmp_path / "dist" / "__0_0.distcp")
    with pytest.raises(ValueError, match="has no tensor of 24 bytes"):
        read_tensor(columns_from(), {"tensors": entry_at()}, tmp_path / "dist")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["[]", "{", "[" * 99_999])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index.json.*use another checkpoint"):
        read_index(tmp_path)


# -- earlier versions


class Touch:
    """A pickle of this makes a file when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def pickled(index: dict) -> Metadata:
    """An index as torch describes it, as in checkpoints of earlier versions."""
    tensors = {}
    places = {}
    for name, entry in index["tensors"].items():
        chunks = []
        for offsets, sizes, *where in entry["chunks"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(name, torch.Size(offsets))] = _StorageInfo(*where)
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
    return Metadata(tensors, storage_data=places)


def make_earlier(folder: Path, index: object = None) -> None:
    """Put torch's own index in the place of index.json, or another pickle."""
    tensors = pickled(read_index(folder / "dist"))
    (folder / "dist" / "index.json").unlink()
    (folder / "dist" / ".metadata").write_bytes(pickle.dumps(index or tensors))
    record = ckpt_folder.read_manifest(folder)
    files = record.pop("files")
    del record["format"], files["dist/index.json"]
    files["dist/.metadata"] = ckpt_folder.measure(folder / "dist" / ".metadata")
    ckpt_folder.write_manifest(folder, record, files)


@pytest.fixture(scope="module")
def earlier_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    model = tiny.save_model(folder / "model", "qwen3")
    world.run(train, 2, model, str(folder / "run"), steps=2, **SAVE, **TP2)
    return model, folder / "run"


def test_a_checkpoint_of_an_earlier_version_is_exported_and_not_resumed_from(earlier_run, tmp_path):
    model, out = earlier_run
    folder = out / "checkpoint-2"
    assert convert(folder, tmp_path / "new")[0] == 0
    make_earlier(folder)
    assert convert(folder, tmp_path / "earlier")[0] == 0
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("new", "earlier")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    keys = dict(SAVE, **TP2, resume_from_checkpoint=str(folder))
    for error, _, _ in world.run(attempt, 2, model, str(out), steps=3, **keys):
        assert f"python -m mca_lite convert {folder} DST" in error


def test_a_pickle_that_names_code_runs_nothing(earlier_run, tmp_path):
    folder = earlier_run[1] / "checkpoint-2"
    if (folder / "dist" / "index.json").is_file():
        make_earlier(folder)
    (folder / "dist" / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    record = ckpt_folder.read_manifest(folder)
    files = record.pop("files")
    del record["format"]
    files["dist/.metadata"] = ckpt_folder.measure(folder / "dist" / ".metadata")
    ckpt_folder.write_manifest(folder, record, files)
    code, _, error = convert(folder, tmp_path / "out")
    assert code == 2 and "not an index that can be trusted" in error
    assert not (tmp_path / "ran").exists()


# -- the manifest


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
