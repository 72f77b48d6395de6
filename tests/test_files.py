"""Small files are written whole or not at all; checksums."""

import os
import zlib

import pytest
import torch

from mca_lite.files import ChecksumWriter, checksum, replacing, write_file, write_json


def test_a_written_file_replaces_the_old_one(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    write_json(path, {"b": 2, "a": 1}, sort_keys=True)
    assert path.read_text() == '{\n  "a": 1,\n  "b": 2\n}\n'
    write_file(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff" and os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    def fail(*args):
        raise OSError("the disk is full")

    write_file(tmp_path / "state.json", "old")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="disk is full"):
        write_file(tmp_path / "state.json", "new")
    assert (tmp_path / "state.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_checksum_is_of_the_whole_file(tmp_path):
    content = os.urandom(1_100_000) * 65  # threads read pieces of 64 MiB
    (tmp_path / "weights").write_bytes(content)
    assert checksum(tmp_path / "weights") == (len(content), zlib.crc32(content))


def test_files_of_others_are_replaced_and_neither_a_link_nor_its_target_is_written(tmp_path):
    folder, other = tmp_path / "folder", tmp_path / "other"
    for place in (folder, other / "templates"):
        place.mkdir(parents=True)
    for name in ("linked", "twin"):
        (other / name).write_text("old")
    (folder / "kept").write_text("kept")
    (folder / "linked").symlink_to(other / "linked")
    os.link(other / "twin", folder / "twin")
    (folder / "templates").symlink_to(other / "templates")
    with replacing(folder) as beside:
        (beside / "templates").mkdir()
        for name in ("linked", "twin", "templates/a"):
            (beside / name).write_text("new")
        assert (folder / "twin").read_text() == "old"
    assert {p.name for p in folder.iterdir()} == {"kept", "linked", "twin", "templates"}
    assert [(folder / name).read_text() for name in ("linked", "twin", "templates/a")] == [
        "new"
    ] * 3
    assert [(other / name).read_text() for name in ("linked", "twin")] == ["old"] * 2
    assert os.listdir(other / "templates") == []


def test_files_of_others_that_fail_leave_the_folder_as_it_was(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match="disk is full"), replacing(tmp_path) as beside:
        (beside / "a").write_text("new")
        raise OSError("the disk is full")
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_a_checksum_writer_knows_size_and_crc_of_what_is_in_the_file(tmp_path):
    parts = [b"", b"abc", bytes(range(256)) * 8192, torch.arange(7).numpy()]
    with ChecksumWriter(tmp_path / "x") as file:
        counts = [file.write(part) for part in parts]
        before = (tmp_path / "x").stat().st_size
    content = b"".join(map(bytes, parts))
    assert counts == [0, 3, 1 << 21, 56] and before <= len(content)
    assert (tmp_path / "x").read_bytes() == content
    assert (file.size, file.crc) == (len(content), zlib.crc32(content))


def test_a_checksum_writer_closes_its_file_after_an_error(tmp_path):
    with pytest.raises(KeyError), ChecksumWriter(tmp_path / "x") as file:
        file.write(b"abc")
        raise KeyError
    with pytest.raises(ValueError, match="closed"):
        file.write(b"d" * (1 << 20))


def test_bytes_that_do_not_reach_the_disk_are_an_error_of_their_writer(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk is gone"), ChecksumWriter(tmp_path / "x") as file:
        file.write(b"abc")
