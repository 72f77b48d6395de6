"""Check a machine, or each machine of a world, for training.

python -m mca_lite doctor [FOLDER | config.yaml key=value ...]
    versions, devices, nccl or gloo, Transformer Engine, compiler, shared memory, limits, the disk
    of FOLDER (the configuration's output_dir; else this folder), clocks, and the bandwidth of an
    all-reduce between two ranks that it starts; each problem with its remedy

torchrun ... -m mca_lite doctor FOLDER
    the same on each machine, with the clocks and the bandwidth of all ranks

Exit code: 0 if all is fine, 4 with warnings, 5 with problems that stop a run; 1 and 2, as of every
command, if the checks cannot be made.
"""

import configparser
import importlib.metadata
import itertools
import json
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import world
from .args_values import show_count
from .cli import finish, parser_of
from .files import check_can_write, describe_error

WARNINGS, PROBLEMS = 4, 5  # exit codes
_LEVELS = ("fine", "warning", "PROBLEM")
_PROBLEM = 2
_GIB = 2**30
_MIB = 2**20
_ROOT = Path(__file__).parents[1]  # of a checkout: setup.cfg and constraints.txt
_WAIT_S = 60  # for the ranks to meet
_PROBE = 64 * _MIB  # bytes written to the disk, and reduced over ranks
_LEAST_FILES = 4096
_LEAST_SHM = _GIB
_LEAST_DISK = 20 * _GIB
_LEAST_MIB_S = 100
_LEAST_GB_S = {"nccl": 5.0, "gloo": 0.05}  # below PCIe, and below a network fit for training
_MOST_SKEW_S = 1.0


class Finding(NamedTuple):
    """Result of a check. level: of _LEVELS, as a number. remedy: for levels above 0."""

    subject: str
    text: str
    level: int = 0
    remedy: str = ""

    def __str__(self):
        line = f"{_LEVELS[self.level]:8} {self.subject:18} {self.text}"
        return f"{line}\n{'':27} -> {self.remedy}" if self.level else line


def main(words: list[str]) -> int:
    """Run the checks on the folder of the words -> exit code. Collective in a world."""
    _, words = parser_of("doctor", __doc__).parse_known_args(words)
    return finish(_doctor, words)


def _doctor(words: list[str]) -> int:
    world.settle()
    worst = max(finding.level for finding in _examine(_folder(words)))
    return (0, WARNINGS, PROBLEMS)[worst]


def _folder(words: list[str]) -> Path:
    """The folder of a single word, else the output_dir of a configuration."""
    is_configuration = re.search(r"^--|\.(yaml|yml|json)$", "".join(words))
    if len(words) < 2 and not is_configuration:
        return Path(*words)
    from .args import parse_args

    return Path(parse_args(words, needs_world=False).training.output_dir)


def _examine(folder: Path) -> list[Finding]:
    """The findings of all machines, printed by the main rank."""
    here: list[Finding] = []
    if world.current().local_rank == 0:  # once a machine
        for check in (_versions, _devices, _transformer_engine, _compiler, _limits):
            here += _guarded(check(), "install this package's requirements anew")
        here += _guarded(_disk(folder), "set output_dir to a folder that can be written")
    reach = "NCCL_DEBUG=INFO says more; see to firewalls, MASTER_ADDR, GLOO_SOCKET_IFNAME"
    findings = _guarded(_together(here), reach)
    if world.current().is_main:
        print(*findings, sep="\n", flush=True)
    return findings


def _guarded(check: Iterator[Finding], remedy: str) -> list[Finding]:
    """The findings of a check; its failure is a problem."""
    findings = []
    try:
        for finding in check:
            findings.append(finding)
    except Exception as error:
        name = check.__name__.strip("_").replace("_", " ")
        text = describe_error(error).splitlines()[-1]  # of a process: below its traceback
        findings.append(Finding(name, text, _PROBLEM, remedy))
    return findings


# -- of a machine


def _versions() -> Iterator[Finding]:
    """Packages against setup.cfg, the requirements, and constraints.txt, the tested versions."""
    from packaging.requirements import Requirement

    yield Finding("python", sys.version.split()[0])
    setup = configparser.ConfigParser()
    setup.read(_ROOT / "setup.cfg")
    if setup.get("metadata", "name", fallback="") != "mca-lite":
        yield Finding("packages", "not compared: this copy is without setup.cfg")
        return
    needed = setup["options"]["install_requires"] + setup["options.extras_require"]["te"]
    pins = dict(re.findall(r"(?m)^([\w.-]+)==([\w.]+)", (_ROOT / "constraints.txt").read_text()))
    for requirement in map(Requirement, needed.split()):
        yield _package(requirement, pins.get(requirement.name))


def _package(requirement, tested: str | None) -> Finding:
    from packaging.version import Version

    name = requirement.name
    install = f'pip install "{requirement}"'
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        is_optional = bool(requirement.extras)  # Transformer Engine
        return Finding(name, "not installed", 0 if is_optional else _PROBLEM, install)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(name, f"{version}, needed is {requirement.specifier}", _PROBLEM, install)
    if tested and Version(version).release[:2] > Version(tested).release[:2]:
        return Finding(name, f"{version} is newer than what was tested", 1, f"{name}=={tested}")
    return Finding(name, version)


def _devices() -> Iterator[Finding]:
    import psutil
    import torch

    memory = psutil.virtual_memory()
    free = f"{memory.available / _GIB:.0f} of {memory.total / _GIB:.0f} GiB free"
    yield Finding("CPU", f"{os.cpu_count()} cores, {free}")
    if not torch.cuda.is_available():
        is_hidden = Path("/dev/nvidia0").exists()
        seen = f"there is one, and torch {torch.__version__} sees none"
        text = seen if is_hidden else "none: ranks train on the CPU and meet over gloo"
        remedy = "a build of torch for the driver (nvidia-smi); look at CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", text, _PROBLEM * is_hidden, remedy)
        return
    count = torch.cuda.device_count()
    ranks = world.current().local_size
    if ranks > count:
        yield Finding("GPU", f"{count} for {ranks} ranks", _PROBLEM, f"--nproc_per_node {count}")
    for i in range(count):
        ones = torch.ones(64, 64, device=f"cuda:{i}")
        ones.mm(ones).sum()
        free_bytes, total = torch.cuda.mem_get_info(i)
        text = f"{torch.cuda.get_device_name(i)}, {free_bytes // _GIB} of {total // _GIB} GiB free"
        taken = "nvidia-smi names the processes that have the rest"
        yield Finding(f"GPU {i}", text, free_bytes < 0.9 * total, taken)


def _transformer_engine() -> Iterator[Finding]:
    from . import model_config

    reason = model_config.why_unusable()
    if reason is None:
        text = str(model_config.found_here())
        is_bad = "was built for" in text
        remedy = "another cuDNN comes before torch's own: remove or update the system's"
    else:
        text = f"not used, {reason}: local layers, without FP8"
        is_bad = reason not in (model_config.NO_GPU, model_config.ABSENT)
        remedy = "install it anew for this torch (`pip install mca-lite[te]`), or uninstall it"
    yield Finding("Transformer Engine", text, is_bad, remedy)


def _compiler() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("compiler", "not used: nothing is compiled on a CPU")
        return
    from . import kernels

    remedy = "install Triton, gcc and Python's headers (python3-dev)"
    reasons = {"Triton": kernels.why_no_kernels(), "torch.compile": kernels.why_no_torch_compile()}
    for name, reason in reasons.items():
        text = "works" if reason is None else f"training is slower without it: {reason}"
        yield Finding(name, text, reason is not None, remedy)


def _limits() -> Iterator[Finding]:
    if os.path.isdir("/dev/shm"):
        usage = shutil.disk_usage("/dev/shm")
        text = f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
        remedy = "docker run --shm-size=16g or --ipc=host: nccl and data workers need it"
        yield Finding("shared memory", text, usage.free < _LEAST_SHM, remedy)
    has_infiniband = any(Path("/sys/class").glob("infiniband/*"))
    files = "ulimit -n 65536, or nofile in /etc/security/limits.conf"
    pins = "ulimit -l unlimited; docker run --ulimit memlock=-1: InfiniBand pins buffers"
    rows = (
        ("open files", resource.RLIMIT_NOFILE, _LEAST_FILES, files),
        ("locked bytes", resource.RLIMIT_MEMLOCK, sys.maxsize * has_infiniband, pins),
    )
    for subject, limit, least, remedy in rows:
        most = resource.getrlimit(limit)[0]
        is_limited = most != resource.RLIM_INFINITY
        text = f"at most {most:,}" if is_limited else "any"
        yield Finding(subject, text, is_limited and most < least, remedy)


def _disk(folder: Path) -> Iterator[Finding]:
    check_can_write(folder, "output_dir")
    there = folder.absolute()
    while not there.is_dir():
        there = there.parent
    free = shutil.disk_usage(there).free
    start = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=there, prefix=".mca_lite-doctor-") as file:
        file.write(os.urandom(_PROBE))
        file.flush()
        os.fsync(file.fileno())
        speed = _PROBE / _MIB / (time.perf_counter() - start)
    text = f"{there}: {free // _GIB} GiB free, {speed:,.0f} MiB/s written"
    if there != folder.absolute():
        text += f"; a run makes {folder} in it"
    remedy = "async_save: true, or an output_dir on a faster disk"
    if free < _LEAST_DISK:
        remedy = "`plan` says what checkpoints take; save_total_limit, or another output_dir"
    yield Finding("disk", text, free < _LEAST_DISK or speed < _LEAST_MIB_S, remedy)


# -- of ranks


def _together(here: list[Finding]) -> Iterator[Finding]:
    """The findings of all machines, and those of the ranks together. Collective in a world."""
    if world.current().size == 1:
        yield from here
        link = _pair()
    else:
        from . import parallel

        try:
            parallel.start_process_group(_WAIT_S)
        except Exception:
            yield from here
            raise
        host = socket.gethostname()
        here = [finding._replace(text=f"{host}: {finding.text}") for finding in here]
        yield from itertools.chain(*parallel.gather(here))
        link = _measure()
    ranks = f"{link.backend}, {show_count(link.ranks, 'rank')}, {_PROBE // _MIB} MiB"
    text = f"{link.gb_per_s:.2f} GB/s of each rank ({ranks})"
    if not link.is_right:
        remedy = "the sums are wrong: NCCL_DEBUG=INFO; another machine"
        yield Finding("all-reduce", text, _PROBLEM, remedy)
    else:
        remedy = "nvidia-smi topo -m shows the links; NCCL_DEBUG=INFO what nccl takes of them"
        yield Finding("all-reduce", text, link.gb_per_s < _LEAST_GB_S[link.backend], remedy)
    text = f"{time.ctime()}, ranks within {link.skew_s:.3f} s"
    remedy = "one time server (chrony, ntpd) for all machines"
    yield Finding("clock", text, link.skew_s > _MOST_SKEW_S, remedy)


class Link(NamedTuple):
    """An all-reduce of all ranks. gb_per_s: sent by a rank. skew_s: between the ranks' clocks."""

    backend: str
    ranks: int
    is_right: bool
    gb_per_s: float
    skew_s: float


def _measure() -> Link:
    """Measure the Link of this rank's world. Collective."""
    import torch
    import torch.distributed as dist

    from . import parallel

    ranks = dist.get_world_size()
    dist.barrier()
    clocks = parallel.gather(time.time())
    seconds = []
    for _ in range(4):  # the first one connects
        vector = torch.ones(_PROBE // 4, device=parallel.device())
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(vector)
        is_right = bool((vector == ranks).all())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    gb_per_s = 2 * (ranks - 1) / ranks * _PROBE / min(seconds) / 1e9
    return Link(dist.get_backend(), ranks, is_right, gb_per_s, max(clocks) - min(clocks))


def _pair() -> Link:
    """Measure two ranks of this machine: over nccl if it has two GPUs, else over gloo."""
    import torch

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.NamedTemporaryFile() as file:
        arguments = (port, torch.cuda.device_count(), file.name)
        torch.multiprocessing.spawn(_rank_of_pair, arguments, nprocs=2)
        return Link(*json.load(file))


def _rank_of_pair(rank: int, port: int, num_gpus: int, file: str) -> None:
    from . import parallel

    if num_gpus < 2:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    parallel.start_process_group(_WAIT_S)
    link = _measure()
    if rank == 0:
        Path(file).write_text(json.dumps(link))
