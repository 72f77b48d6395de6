"""`python -m mca_lite doctor`: what it finds, what it says to do about it, its exit codes."""

import collections
import configparser
import importlib.metadata
import importlib.util
import re
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from mca_lite import kernels, part_cudnn, part_delta, part_transformer_engine, tool_doctor
from mca_lite.mcore import MINORS
from tests.shared import commands, world

Usage = collections.namedtuple("Usage", "total used free")


def levels(check) -> dict[str, tuple[str, str]]:
    """subject -> (text, remedy) of the findings that are not fine, and "PROBLEM" in the text."""
    return {one.subject: (str(one), one.remedy) for one in check if one.level}


def test_a_machine_is_examined_with_two_ranks():
    command = [sys.executable, "-m", "mca_lite", "doctor"]
    done = subprocess.run(command, cwd=commands.ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode in (0, 4), done.stdout + done.stderr
    for what in ("torch ", "megatron-core", "GPU", "shared memory", "open files", "compiler"):
        assert what in done.stdout
    assert "GB/s of each rank (gloo, 2 ranks" in done.stdout
    assert (done.returncode == 4) == ("warning" in done.stdout)


def examined() -> tuple[int, str, str]:
    return commands.ended(tool_doctor.main, [])


def test_the_ranks_of_a_world_are_measured_together():
    (code, out, error), (same, silent, _) = world.run(examined, 2)
    assert same == code and not silent, silent
    assert out.count("megatron-core ") == 1 and "gloo, 2 ranks" in out, out + error


def test_versions_are_compared_with_the_requirements(monkeypatch):
    assert not levels(tool_doctor.versions())
    given = {"torch": "2.12.0+cu130", "megatron-core": "0.15.0"}

    def version(name):
        if name == "psutil":
            raise importlib.metadata.PackageNotFoundError
        return given.get(name, "5.99")

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = levels(tool_doctor.versions())
    assert found.keys() == {"megatron-core", "psutil"}
    assert "PROBLEM" in found["megatron-core"][0] and ">=0.16.1" in found["megatron-core"][1]
    assert "not installed" in found["psutil"][0] and "pip install" in found["psutil"][1]


def test_little_shared_memory_and_small_limits_are_warnings(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**26, 0, 2**26))
    assert "--shm-size" in levels(tool_doctor.limits())["shared memory"][1]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    monkeypatch.setattr(tool_doctor.Path, "glob", lambda path, pattern: iter([path]))
    found = levels(tool_doctor.limits())
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 20000))
    assert "raises it to 20,000" in levels(tool_doctor.limits())["open files"][0]
    assert "ulimit -n" in found["open files"][1] and "memlock" in found["locked bytes"][1]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert list(levels(tool_doctor.limits())) == ["shared memory"]


def test_a_gpu_that_torch_does_not_see_is_a_problem(monkeypatch):
    monkeypatch.setattr(tool_doctor.Path, "exists", lambda path: str(path) == "/dev/nvidia0")
    assert "driver" in levels(tool_doctor.devices())["GPU"][1]


def test_a_broken_transformer_engine_or_compiler_is_a_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    places = {
        "Triton": (kernels, "why_no_kernels"),
        "torch.compile": (kernels, "why_no_torch_compile"),
        "Transformer Engine": (part_transformer_engine, "why_unusable"),
        "flash-linear-attention": (part_delta, "why_no_fla"),
        "nvidia-cudnn-frontend": (part_cudnn, "why_no_frontend"),
    }
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for broken in places:
        for subject, (module, name) in places.items():
            reason = "undefined symbol" if subject == broken else None
            monkeypatch.setattr(module, name, lambda reason=reason: reason)
        found = levels(tool_doctor.compiler())
        assert found.keys() == {broken} and "undefined symbol" in found[broken][0]
        assert "warning" in found[broken][0] and "install" in found[broken][1]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not levels(tool_doctor.compiler())  # the last of them is not installed
    said = "\n".join(map(str, tool_doctor.compiler()))
    assert "flash-linear-attention 0.6.0 with triton 3.7.1" in said


@pytest.mark.parametrize(
    ("engine", "megatron", "told"),
    [
        ("2.11.0", "0.16.1", "fine .*: a tested pair"),
        ("2.17.1+abc", "0.18.2", "warning .* takes >=2.9,<2.17\n.*pip install .*>=2.9,<2.17"),
        ("2.14.1", "0.17.1", "warning .*: an untested pair\n.*make gpu ARGS=te"),
        ("2.12.0", "0.16.1", "warning .* 0.16 takes >=2.9,<2.12"),
    ],
)
def test_pairs_of_transformer_engine_and_megatron_are_named(engine, megatron, told):
    minor = tuple(int(number) for number in megatron.split(".")[:2])
    found = tool_doctor.engine_pair(engine, megatron, MINORS["transformer_engine"][minor])
    assert re.match(f"(?s){told}", str(found))


def test_the_extra_takes_the_engine_of_the_pinned_megatron():
    setup = configparser.ConfigParser()
    setup.read(commands.ROOT / "setup.cfg")
    rows = setup["options.extras_require"]["te"].split("\n")
    of_python = {row.split(";")[1]: row.split(";")[0] for row in rows if row}
    constraints = (commands.ROOT / "constraints.txt").read_text()
    pins = re.findall(r"megatron-core==(0\.\d+).*;(.*)", constraints)
    assert len(pins) == len(of_python) == 2
    for minor, python in pins:
        fits = MINORS["transformer_engine"][tuple(map(int, minor.split(".")))]
        assert of_python[python].endswith(fits)


def test_the_exit_code_is_the_severest_finding(monkeypatch):
    for is_right, speed, code in ((True, 1.0, 0), (True, 0.001, 4), (False, 1.0, 5)):
        measured = tool_doctor.Link("gloo", 2, is_right, speed)
        monkeypatch.setattr(tool_doctor, "measure_pair", lambda measured=measured: measured)
        assert commands.ended(tool_doctor.main, [])[0] == code

    def failing():
        raise OSError("two ranks of this machine did not meet")

    monkeypatch.setattr(tool_doctor, "measure_pair", failing)
    code, out, _ = commands.ended(tool_doctor.main, [])
    assert code == 5 and "did not meet" in out and "MASTER_ADDR" in out
