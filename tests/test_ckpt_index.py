"""A crafted checkpoint runs nothing: no code, no path out of its folder. Those of earlier versions,
whose index is a pickle, are exported by convert.
"""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mca_lite import ckpt_folder, cli_convert
from mca_lite.ckpt_folder import CheckpointError
from mca_lite.ckpt_megatron import read_index
from tests.shared import tiny, world
from tests.shared.commands import ended
from tests.shared.layouts import SAVE, TP2
from tests.shared.training import attempt, train


def a_record(place="__0_0.distcp", **changes) -> dict:
    chunks = [[[0, 0], [1, 3], place, 0, 12], [[1, 0], [1, 3], place, 12, 12]]
    entry = {"dtype": "float32", "shape": [2, 3], "chunks": chunks} | changes
    return {"optimizer_steps": 2, "tensors": {"weight": entry}}


def test_an_index_has_the_shape_and_the_places_of_each_tensor(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps(a_record()))
    index = read_index(tmp_path)
    [(name, entry)] = index.tensors.state_dict_metadata.items()
    assert (name, entry.properties.dtype, entry.size) == ("weight", torch.float32, (2, 3))
    assert [(chunk.offsets, chunk.sizes) for chunk in entry.chunks] == [
        ((0, 0), (1, 3)),
        ((1, 0), (1, 3)),
    ]
    places = {(part.fqn, part.offset): info for part, info in index.tensors.storage_data.items()}
    second = places["weight", (1, 0)]
    assert (second.relative_path, second.offset, second.length) == ("__0_0.distcp", 12, 12)
    assert index.optimizer_steps == 2


ODD = {
    "above": (a_record("../__0_0.distcp"), "outside the folder"),
    "absolute": (a_record("/etc/passwd"), "outside the folder"),
    "folder": (a_record("."), "outside the folder"),
    "link": (a_record("linked"), "outside the folder"),
    "offset": (a_record(chunks=[[[0, 0], [2, 3], "a", -1, 24]]), "expected a number of at least 0"),
    "length": (a_record(chunks=[[[0, 0], [2, 3], "a", 0, [1]]]), "expected a number of at least 0"),
    "shape": (a_record(shape=[2, True]), "expected a number of at least 0"),
    "dtype": (a_record(dtype="load"), "the dtype of weight is load"),
    "no dtype": (a_record(dtype="nothing"), "nothing"),
    "no chunks": (a_record(chunks=None), "None"),
    "steps": (a_record() | {"optimizer_steps": "2"}, "expected a number of at least 0"),
    "no steps": ({"tensors": {}}, "optimizer_steps"),
    "no tensors": ({"optimizer_steps": 2, "tensors": ["weight"]}, "items"),
    "no object": ([], "expected a JSON object"),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_index_is_refused(tmp_path, kind):
    (tmp_path / "dist").mkdir()
    (tmp_path / "outside").touch()
    (tmp_path / "dist" / "linked").symlink_to(tmp_path / "outside")
    record, words = ODD[kind]
    (tmp_path / "dist" / "index.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=rf"not an index that can be trusted.*{words}"):
        read_index(tmp_path / "dist")


# -- earlier versions


class Touch:
    """A pickle of this makes a file when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def make_earlier(folder: Path, index: object = None) -> None:
    """Put torch's own index in the place of index.json, or another pickle."""
    tensors = read_index(folder / "dist").tensors
    (folder / "dist" / "index.json").unlink()
    (folder / "dist" / ".metadata").write_bytes(pickle.dumps(index or tensors))
    record = ckpt_folder.read_manifest(folder)
    files = record.pop("files")
    del record["format"], files["dist/index.json"]
    files["dist/.metadata"] = ckpt_folder.measure(folder / "dist" / ".metadata")
    ckpt_folder.write_manifest(folder, record, files)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    model = tiny.save_model(folder / "model", "qwen3")
    world.run(train, 2, model, str(folder / "run"), steps=2, **SAVE, **TP2)
    return model, folder / "run"


def convert(*words) -> tuple[int, str, str]:
    return world.run(ended, 1, cli_convert.main, [*map(str, words)])[0]


def test_a_checkpoint_of_an_earlier_version_is_exported_and_not_resumed_from(run, tmp_path):
    model, out = run
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


def test_a_pickle_that_names_code_runs_nothing(run, tmp_path):
    folder = run[1] / "checkpoint-2"
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
