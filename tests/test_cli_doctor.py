"""`python -m mca_lite doctor`: what it finds, what it says to do about it, its exit codes."""

import collections
import importlib.metadata
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from mca_lite import cli_doctor, kernels, model_config
from tests.shared import commands, world

Usage = collections.namedtuple("Usage", "total used free")


def levels(check) -> dict[str, tuple[str, str]]:
    """subject -> (text, remedy) of the findings that are not fine, and "PROBLEM" in the text."""
    return {one.subject: (str(one), one.remedy) for one in check if one.level}


def test_a_machine_is_examined_with_two_ranks(tmp_path):
    command = [sys.executable, "-m", "mca_lite", "doctor", str(tmp_path / "not" / "there")]
    done = subprocess.run(command, cwd=commands.ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode in (0, 4), done.stdout + done.stderr  # a slow disk is a warning
    for what in ("torch ", "megatron-core", "GPU", "shared memory", "open files", "compiler"):
        assert what in done.stdout
    made = f"a run makes {tmp_path / 'not' / 'there'} in it"
    assert f"{tmp_path}: " in done.stdout and made in done.stdout and "MiB/s" in done.stdout
    assert "GB/s of each rank (gloo, 2 ranks" in done.stdout and "ranks within" in done.stdout
    assert (done.returncode == 4) == ("warning" in done.stdout)
    assert not list(tmp_path.iterdir())  # the disk's probe is gone


def examined(folder: str, late: bool) -> tuple[int, str, str]:
    if late:
        real = cli_doctor.time.time
        cli_doctor.time.time = lambda: real() + 40 * torch.distributed.get_rank()
    return commands.ended(cli_doctor.main, [folder])


@pytest.mark.parametrize("late", [False, True])
def test_the_ranks_of_a_world_are_measured_together(tmp_path, late):
    (code, out, error), (same, silent, _) = world.run(examined, 2, str(tmp_path), late)
    assert same == code and not silent, silent
    assert out.count("torch ") == 1 and "gloo, 2 ranks" in out, out + error
    skew = float(out.split("ranks within ")[1].split(" s")[0])
    assert skew == pytest.approx(40 if late else 0, abs=0.9)
    assert ("chrony" in out) == late and (code == cli_doctor.WARNINGS or not late)


def test_a_configuration_names_the_folder(tmp_path):
    words = ["configs/sft.yaml", f"output_dir={tmp_path}/out"]
    assert commands.ended(cli_doctor._folder, words)[0] == tmp_path / "out"


def test_versions_are_compared_with_what_was_tested(monkeypatch):
    assert not levels(cli_doctor._versions())
    given = {"torch": "2.12.0+cu130", "megatron-core": "0.15.0", "transformers": "5.99.0"}

    def version(name):
        if name == "psutil":
            raise importlib.metadata.PackageNotFoundError
        return given.get(name, "3.99")

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = levels(cli_doctor._versions())
    assert "torch" not in found  # older than what was tested, and taken
    assert "PROBLEM" in found["megatron-core"][0] and "==0.16.1" in found["megatron-core"][1]
    assert "warning" in found["transformers"][0] and "newer" in found["transformers"][0]
    assert "not installed" in found["psutil"][0] and "pip install" in found["psutil"][1]
    assert "PROBLEM" in found["transformer-engine"][0]  # outside of the extra's range


def test_little_shared_memory_and_small_limits_are_warnings(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**26, 0, 2**26))
    assert "--shm-size" in levels(cli_doctor._limits())["shared memory"][1]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    monkeypatch.setattr(cli_doctor.Path, "glob", lambda path, pattern: iter([path]))
    found = levels(cli_doctor._limits())
    assert "ulimit -n" in found["open files"][1] and "memlock" in found["locked bytes"][1]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert list(levels(cli_doctor._limits())) == ["shared memory"]


def test_a_full_or_closed_disk_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    found = cli_doctor._guarded(cli_doctor._disk(tmp_path / "file" / "out"), "another folder")
    assert "is no folder" in found[0].text and found[0].level == 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**30, 0, 2**30))
    assert "save_total_limit" in levels(cli_doctor._disk(tmp_path))["disk"][1]


def test_a_gpu_that_torch_does_not_see_is_a_problem(monkeypatch):
    monkeypatch.setattr(cli_doctor.Path, "exists", lambda path: str(path) == "/dev/nvidia0")
    assert "driver" in levels(cli_doctor._devices())["GPU"][1]


def test_a_broken_transformer_engine_or_compiler_is_a_warning(monkeypatch):
    monkeypatch.setattr(model_config, "why_unusable", lambda: "undefined symbol")
    found = levels(cli_doctor._transformer_engine())["Transformer Engine"]
    assert "undefined symbol" in found[0] and "warning" in found[0]
    monkeypatch.setattr(model_config, "why_unusable", lambda: None)
    monkeypatch.setattr(model_config, "found_here", lambda: "cuDNN 9.14 (torch was built for 9.19)")
    assert "cuDNN" in levels(cli_doctor._transformer_engine())["Transformer Engine"][1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for broken in ("why_no_kernels", "why_no_torch_compile"):
        monkeypatch.setattr(kernels, "why_no_kernels", lambda: None)
        monkeypatch.setattr(kernels, "why_no_torch_compile", lambda: None)
        assert not levels(cli_doctor._compiler())
        monkeypatch.setattr(kernels, broken, lambda: "no gcc")
        [found] = levels(cli_doctor._compiler()).values()
        assert "Triton" in found[1] and "no gcc" in found[0]


def test_the_exit_code_is_the_severest_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(cli_doctor, "_LEAST_MIB_S", 0)
    for is_right, speed, code in ((True, 1.0, 0), (True, 0.001, 4), (False, 1.0, 5)):
        measured = cli_doctor.Link("gloo", 2, is_right, speed, 0.0)
        monkeypatch.setattr(cli_doctor, "_pair", lambda measured=measured: measured)
        assert commands.ended(cli_doctor.main, [str(tmp_path)])[0] == code

    def failing():
        raise OSError("two ranks of this machine did not meet")

    monkeypatch.setattr(cli_doctor, "_pair", failing)
    code, out, _ = commands.ended(cli_doctor.main, [str(tmp_path)])
    assert code == 5 and "did not meet" in out and "MASTER_ADDR" in out
    assert commands.ended(cli_doctor.main, ["a", "b"])[0] == 2  # no configuration
