"""How a command ends that went wrong: 'error:' and exit code 2, or a traceback that is kept in a file."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mca_lite import cli, cli_errors
from mca_lite.args_values import ConfigError, read_config_file
from mca_lite.files import check_can_write, describe_error
from tests.shared.commands import ROOT, SHORT


@pytest.fixture
def ended(monkeypatch, capsys, tmp_path):
    """(exit code, what was printed as an error) of the command line whose run raises an error."""
    from mca_lite import run

    def end(error: Exception, out: Path = tmp_path, **environment) -> tuple[int, str]:
        def make_plan(arguments):
            raise error

        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(run, "make_plan", make_plan)
        code = cli.main([*f"configs/sft.yaml {SHORT}".split(), f"output_dir={out}"])
        return code, capsys.readouterr().err

    return end


@pytest.mark.parametrize(
    "error, words",
    [
        (ValueError("weights do not fit"), "error: weights do not fit\n"),
        (OSError(errno.ENOSPC, "No space left on device", "log"), "No space left on device: 'log'"),
        (PermissionError(errno.EACCES, "Permission denied", "home"), "Permission denied: 'home'"),
        (MemoryError(), "error: out of memory"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected"), "No space left"),
    ],
)
def test_what_a_user_can_put_right_ends_with_its_words_and_code_2(ended, tmp_path, error, words):
    code, shown = ended(error)
    assert code == cli_errors.USER_ERROR and shown.startswith("error: ") and words in shown
    assert shown.count("\n") == 1 and not list(tmp_path.glob("traceback*"))


NO_TEXT = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")


@pytest.mark.parametrize("error", [KeyError("moe_layer_freq"), AssertionError(), NO_TEXT])
def test_a_defect_leaves_its_traceback_in_a_file(ended, tmp_path, error):
    code, shown = ended(error)
    kept = tmp_path / "traceback-rank0.txt"
    assert code == 1 and shown.count("\n") == 1
    assert f"(a defect of mca_lite; the traceback is in {kept})" in shown
    assert type(error).__name__ in shown and "in make_plan" in kept.read_text()


def test_a_traceback_goes_to_the_temporary_folder_where_output_dir_takes_none(
    ended, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, shown = ended(KeyError("x"), tmp_path / "not there")
    [kept] = tmp_path.glob("mca_lite-*-traceback-rank0.txt")
    assert code == 1 and str(kept) in shown and not (tmp_path / "not there").exists()


def test_torchrun_is_given_the_words_and_not_those_of_a_rank_that_lost_another(ended, tmp_path):
    path = tmp_path / "error.json"
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]")
    code, shown = ended(lost, TORCHELASTIC_ERROR_FILE=str(path))
    assert code == 1 and "another rank is gone" in shown and not path.exists()
    world = dict(RANK="3", WORLD_SIZE="4", MASTER_ADDR="host", MASTER_PORT="1")
    code, shown = ended(ValueError("lacks a file"), LOCAL_RANK="1", **world)
    assert code == 2 and shown == "error: rank 3: lacks a file\n"
    assert json.loads(path.read_text())["message"]["message"] == "error: lacks a file"


def test_under_torchrun_the_words_stand_last(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["--local_addr=127.0.0.1", "train.py", "configs/sft.yaml", "bf16=maybe"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    last = result.stderr.rpartition("Root Cause")[2]
    assert result.returncode and "bf16" in last and "expected true or false" in last


def test_the_writer_of_archives_hides_a_full_disk_and_we_do_not():
    for name in ("/dev/full", open("/dev/full", "wb", buffering=0)):  # noqa: SIM115
        with pytest.raises((RuntimeError, OSError)) as caught:
            torch.save(torch.zeros(100_000), name)
        assert "No space left on device" in describe_error(caught.value)


def test_a_folder_that_cannot_be_written_is_known_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="output_dir: .*is no folder"):
            check_can_write(folder, "output_dir")
    check_can_write(tmp_path / "a" / "b", "output_dir")
    assert os.listdir(tmp_path) == ["file"]
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match=f"nothing may be written in {tmp_path}"):
        check_can_write(tmp_path / "a", "output_dir")


@pytest.mark.parametrize("key", ["output_dir", "cache_dir"])
def test_a_file_in_place_of_a_folder_is_refused_before_tokenising(
    tmp_path, monkeypatch, capsys, key
):
    monkeypatch.chdir(ROOT)
    (tmp_path / "file").write_text("")
    folders = {"output_dir": tmp_path / "out", "cache_dir": tmp_path / "cache"}
    folders[key] = tmp_path / "file" / "folder"
    words = [f"{name}={folder}" for name, folder in folders.items()]
    code = cli.main([*f"configs/sft.yaml {SHORT} use_mca=false".split(), *words])
    shown = capsys.readouterr().err
    assert code == 2 and shown.startswith("error: ") and key in shown and shown.count("\n") == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()


def test_a_home_that_cannot_be_written_is_refused_with_what_to_set(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MCA_LITE_CACHE", raising=False)
    words = f"configs/sft.yaml {SHORT} use_mca=false cache_dir=null output_dir={tmp_path / 'out'}"
    assert cli.main(words.split()) == 2
    shown = capsys.readouterr().err
    assert "set cache_dir" in shown and shown.count("\n") == 1


def test_yaml_nested_too_deep_is_refused(tmp_path):
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 20_000)
    with pytest.raises(ConfigError, match="nested too deep"):
        read_config_file(tmp_path / "deep.yaml")


def test_convert_ends_as_training_does(tmp_path, capsys):
    from mca_lite.cli_convert import main

    (tmp_path / "file").write_text("")
    (tmp_path / "model").mkdir()
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "file" / "x")]) == 2
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "new")]) == 2
    shown = capsys.readouterr().err
    assert shown.count("error: ") == 2 and "is no folder" in shown and "config.json" in shown
