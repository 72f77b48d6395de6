"""Check a machine, or each machine of a world, for training.

python -m mca_lite doctor
    versions, devices, compiler, Transformer Engine, shared memory, limits, and the bandwidth of an
    all-reduce between two ranks that it starts; each problem with its remedy

torchrun ... -m mca_lite doctor
    the same on each machine, with the bandwidth between all ranks

Exit code: 0 if all is fine, 4 with warnings, 5 with problems that stop a run; 1 and 2, as of every
command, if the checks cannot be made.
"""

import configparser
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import world
from .cli import finish, parser_of
from .files import describe_error

WARNINGS, PROBLEMS = 4, 5  # exit codes
_LEVELS = ("fine", "warning", "PROBLEM")
_PROBLEM = 2
_GIB = 2**30
_SETUP = Path(__file__).parents[1] / "setup.cfg"  # only a checkout has it
_WAIT_S = 60  # timeout until all ranks have connected
_VECTOR = 2**24  # float32 values in the all-reduce
_LEAST_FILES = 4096
_LEAST_SHM = _GIB
_LEAST_GB_S = {"nccl": 5.0, "gloo": 0.05}  # below PCIe, and below a network fit for training
_USABLE = 0.94  # share of a GPU's memory, as of `plan`
# GiB at the peak of a step by `plan`: bf16, one GPU, a row of 4,096 tokens at a time, all layers
# recomputed; adapters of rank 16 on all linears. Models in the order of their sizes
NEEDS = {
    "in full": {"1.5B": 25.6, "4B": 63.7, "8B": 124.1, "14B": 226.4},
    "in full with moments in 8 bits": {"1.5B": 14.3, "4B": 34.2, "8B": 65.2, "14B": 118.1},
    "with adapters": {"1.5B": 4.9, "4B": 10.3, "8B": 18.1, "14B": 31.9, "32B": 67.6, "70B": 141.5},
    "with adapters on nf4": {
        **{"1.5B": 3.2, "4B": 5.5, "8B": 8.9, "14B": 14.4, "gpt-oss-20b": 19.2, "32B": 26.3},
        **{"70B": 50.6, "gpt-oss-120b": 88.6},
    },
}


class Finding(NamedTuple):
    """The result of one check of this machine, such as "GPU 0" or "open files". level: 0 fine, 1
    warning, 2 problem. remedy: advice, shown if the level is above 0."""

    subject: str
    text: str
    level: int = 0
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{_LEVELS[self.level]:8} {self.subject:18} {self.text}"
        return f"{line}\n{'':27} -> {self.remedy}" if self.level else line


def main(words: list[str]) -> int:
    """The command `doctor`: check this machine, print the findings -> exit code. words: the command
    line's. Collective if there are several ranks."""
    parser_of("doctor", __doc__).parse_args(words)
    return finish(_doctor)


def _doctor() -> int:
    world.settle()
    here = world.current()
    findings = []
    if here.local_rank == 0:  # once a machine
        for check in (versions, devices, compiler, engine, limits):
            findings += _guarded(check, "install this package's requirements anew")
    reach = "NCCL_DEBUG=INFO says more; check firewalls, MASTER_ADDR, GLOO_SOCKET_IFNAME"
    findings += _guarded(messages, reach)
    if here.local_rank == 0:
        print(f"{socket.gethostname()}:", *findings, sep="\n", flush=True)
    from . import parallel

    worst = max(finding.level for finding in findings)
    return (0, WARNINGS, PROBLEMS)[max(parallel.gather(worst))]


def _guarded(check: Callable[[], Iterator[Finding]], remedy: str) -> list[Finding]:
    """Run a check -> its Findings. If the check itself raises an error, the result is one Finding
    of level 2 (problem), with the error and with `remedy` as its advice."""
    try:
        return list(check())
    except Exception as error:
        text = describe_error(error).splitlines()[-1]  # a process's error has its traceback first
        return [Finding(check.__name__, text, _PROBLEM, remedy)]


# -- checks of a machine


def versions() -> Iterator[Finding]:
    """Compare installed packages with the requirements in setup.cfg. Without that file, as in a
    copy of the package, nothing is compared."""
    from packaging.requirements import Requirement

    yield Finding("python", sys.version.split()[0])
    setup = configparser.ConfigParser()
    setup.read(_SETUP)
    if setup.get("metadata", "name", fallback="") != "mca-lite":
        yield Finding("packages", "not compared: this copy is without setup.cfg")
        return
    for requirement in map(Requirement, setup["options"]["install_requires"].split()):
        version = "not installed"
        is_met = False
        try:
            version = importlib.metadata.version(requirement.name)
            is_met = requirement.specifier.contains(version, prereleases=True)
        except importlib.metadata.PackageNotFoundError:
            pass
        remedy = f'pip install "{requirement}"'
        yield Finding(requirement.name, version, _PROBLEM * (not is_met), remedy)


def devices() -> Iterator[Finding]:
    """Report cores, GPUs, their free memory and which models fit. If this machine has GPUs, it is a
    problem if torch sees none, or fewer than ranks; less than 90 % free memory on a GPU is a
    warning."""
    import psutil
    import torch

    memory = psutil.virtual_memory()
    free = f"{memory.available / _GIB:.0f} of {memory.total / _GIB:.0f} GiB free"
    yield Finding("CPU", f"{os.cpu_count()} cores, {free}")
    count = torch.cuda.device_count()
    ranks = world.current().local_size
    if count == 0:
        is_hidden = Path("/dev/nvidia0").exists()
        text = f"torch {torch.__version__} sees none: ranks train on the CPU and meet over gloo"
        remedy = "a build of torch for the driver (nvidia-smi); look at CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", text, _PROBLEM * is_hidden, remedy)
    elif ranks > count:
        yield Finding("GPU", f"{count} for {ranks} ranks", _PROBLEM, f"--nproc_per_node {count}")
    for i in range(count):
        ones = torch.ones(64, 64, device=f"cuda:{i}")
        ones.mm(ones).sum()
        free_bytes, total = torch.cuda.mem_get_info(i)
        text = f"{torch.cuda.get_device_name(i)}, {free_bytes // _GIB} of {total // _GIB} GiB free"
        taken = "nvidia-smi names the processes that have the rest"
        yield Finding(f"GPU {i}", text, free_bytes < 0.9 * total, taken)
        yield Finding(f"GPU {i} trains", models_of(total))


def models_of(memory: float) -> str:
    """Text for the user that says which models a GPU can train: for each way of training in NEEDS,
    the largest model that fits; ways in which none fits are left out. memory: the GPU's, in
    bytes."""
    largest = {}
    for way, needs in NEEDS.items():
        for model, gib in needs.items():
            if gib * _GIB <= _USABLE * memory:
                largest[way] = model
    found = ", ".join(f"{model} {way}" for way, model in largest.items())
    return f"{found or 'none of the models planned'} (bf16, rows of 4,096 tokens, all recomputed)"


def compiler() -> Iterator[Finding]:
    """Check Triton, torch.compile and optional kernel packages, if there is CUDA. An absent
    optional package is fine; a broken one, or Triton or torch.compile that does not work, gives a
    warning."""
    import torch

    from . import kernels, parts

    if not torch.cuda.is_available():
        yield Finding("compiler", "not used: nothing is compiled on a CPU")
        return
    compilers = "install Triton, gcc and Python's headers (python3-dev)"
    engine = "install it anew for this torch (`pip install mca-lite[te]`), or uninstall it"
    newer = "install a newer one (and tilelang for flash-linear-attention), or uninstall it"
    rows = [
        ("Triton", kernels.why_no_kernels(), compilers),
        ("torch.compile", kernels.why_no_torch_compile(), compilers),
    ]
    if "transformer_engine" not in parts.missing():
        from .part_transformer_engine import why_unusable

        rows.append(("Transformer Engine", why_unusable(), engine))
    if "cudnn" not in parts.missing():
        from .part_cudnn import why_no_frontend

        rows.append(("nvidia-cudnn-frontend", of_package("cudnn", why_no_frontend), newer))
    notes = {}
    if "delta" not in parts.missing():
        from .part_delta import FAST_PAIR, why_no_fla

        notes["flash-linear-attention"] = f"; the fast pair is {FAST_PAIR}"

        rows.append(("flash-linear-attention", of_package("fla", why_no_fla), newer))
    for subject, reason, remedy in rows:
        is_broken = reason not in (None, kernels.ABSENT)
        yield Finding(subject, (reason or "works") + notes.get(subject, ""), is_broken, remedy)


def of_package(module: str, why_not: Callable[[], str | None]) -> str | None:
    """Say why an installed Python package does not work: the reason that why_not() returns. None if
    it works; ABSENT if it is not installed. module: the name under which it is imported."""
    from .kernels import ABSENT

    return why_not() if importlib.util.find_spec(module) is not None else ABSENT


def engine() -> Iterator[Finding]:
    """Check whether Transformer Engine's version fits this megatron-core. No finding if Transformer
    Engine does not work here."""
    from . import mcore, model_config

    if model_config.engine_here() is not None:
        version = importlib.metadata.version("transformer-engine")
        yield engine_pair(version, mcore.__version__, mcore.of_minor("transformer_engine"))


def engine_pair(engine: str, megatron: str, fits: str) -> Finding:
    """Check whether two versions fit together: `engine` of Transformer Engine and `megatron` of
    megatron-core. A pair that was not tested is a warning. fits: the versions of Transformer Engine
    that this megatron-core takes, such as ">=2.9,<2.12"."""
    from packaging.specifiers import SpecifierSet

    from .mcore import RUN_WITH_ENGINE

    minors = tuple(".".join(version.split(".")[:2]) for version in (megatron, engine))
    verdict = "a tested pair" if minors in RUN_WITH_ENGINE else "an untested pair"
    if not SpecifierSet(fits).contains(engine, prereleases=True):
        verdict = f"megatron-core {minors[0]} takes {fits}"
    text = f"Transformer Engine {engine} with megatron-core {megatron}: {verdict}"
    remedy = f'pip install "transformer-engine[pytorch]{fits}", then `make gpu ARGS=te`'
    return Finding("pair", text, int(minors not in RUN_WITH_ENGINE), remedy)


def limits() -> Iterator[Finding]:
    """Check the free space in /dev/shm, and the process's limits of open files and, with
    InfiniBand, of locked memory."""
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
        soft, hard = (min(sys.maxsize, number % 2**64) for number in resource.getrlimit(limit))
        text = f"at most {soft:,}"
        if limit == resource.RLIMIT_NOFILE and soft < hard:
            text += f"; a rank raises it to {hard:,}, torchrun with the store does not"
        yield Finding(subject, text, soft < least, remedy)


# -- checks of ranks


class Link(NamedTuple):
    """Result of a measured all-reduce. backend: "nccl" or "gloo". ranks: number of ranks. is_right:
    True if this rank's sums were right in every repetition. gb_per_s: GB/s that each rank sends."""

    backend: str
    ranks: int
    is_right: bool
    gb_per_s: float


def messages() -> Iterator[Finding]:
    """Check how fast an all-reduce over this run's ranks is, and that its sums are right. A single
    rank starts two processes instead, and measures between them. Collective."""
    from . import parallel

    if world.current().size == 1:
        link = measure_pair()
    else:
        parallel.start_process_group(_WAIT_S)
        link = measure()
    text = f"{link.gb_per_s:.2f} GB/s of each rank ({link.backend}, {link.ranks} ranks)"
    level = int(link.gb_per_s < _LEAST_GB_S[link.backend])
    remedy = "nvidia-smi topo -m shows the links; NCCL_DEBUG=INFO shows those that nccl uses"
    if not link.is_right:
        level = _PROBLEM
        remedy = "the sums are wrong: set NCCL_DEBUG=INFO, or use another machine"
    yield Finding("all-reduce", text, level, remedy)


def measure() -> Link:
    """Measure an all-reduce of 64 MiB over this world's ranks. Collective."""
    import torch
    import torch.distributed as dist

    from . import parallel

    ranks = dist.get_world_size()
    seconds = []
    is_right = True
    for _ in range(4):  # the first all-reduce sets up connections
        vector = torch.ones(_VECTOR, device=parallel.device())
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(vector)
        is_right &= bool((vector == ranks).all())  # also waits for the GPU
        seconds.append(time.perf_counter() - start)
    slowest = max(parallel.gather(min(seconds)))
    gb_per_s = 2 * (ranks - 1) / ranks * vector.nbytes / slowest / 1e9
    return Link(dist.get_backend(), ranks, is_right, gb_per_s)


def measure_pair() -> Link:
    """Measure an all-reduce between two ranks, in two processes started here: over NCCL if this
    machine has two GPUs or more, otherwise over gloo."""
    from torch import cuda, multiprocessing

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    links = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_rank_of_pair, (port, cuda.device_count(), links), nprocs=2)
    return Link(*links.get())


def _rank_of_pair(rank: int, port: int, num_gpus: int, links: Any) -> None:
    from . import parallel

    if num_gpus < 2:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    parallel.start_process_group(_WAIT_S)
    link = measure()
    if rank == 0:
        links.put(tuple(link))
