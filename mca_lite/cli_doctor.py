"""Whether a machine, or each machine of a world, is ready to train.

python -m mca_lite doctor [FOLDER | config.yaml key=value ...]
    versions, devices, nccl or gloo, Transformer Engine, compiler, shared memory, limits, the disk
    of FOLDER (the configuration's output_dir; else this folder), clocks, and the bandwidth of an
    all-reduce between two ranks that it starts; each problem with its remedy

torchrun ... -m mca_lite doctor FOLDER
    the same on each machine, with the clocks and the bandwidth of all ranks

Exit code: 0 where all is fine, 4 with warnings, 5 with problems that a run will meet; 1 and 2, as
of every command, where it could not be done.
"""

import configparser
import importlib.metadata
import multiprocessing
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from . import world
from .args_values import show_count
from .cli import finish, parser_of
from .files import check_can_write, describe_error

WARNINGS, PROBLEMS = 4, 5  # exit codes
_GIB = 2**30
_MIB = 2**20
_ROOT = Path(__file__).parents[1]  # of a checkout: setup.cfg and constraints.txt
_WAIT_S = 60  # in which ranks must meet
_PROBE = 64 * _MIB  # bytes written to the disk, and reduced over ranks
_LEAST_FILES = 4096
_LEAST_SHM = _GIB
_LEAST_DISK = 20 * _GIB
_LEAST_MIB_S = 100
_LEAST_GB_S = {"nccl": 5.0, "gloo": 0.05}  # less than PCIe gives, and than a network is good for
_MOST_SKEW_S = 1.0
_NO_LIMIT = resource.RLIM_INFINITY


class Finding(NamedTuple):
    """What a check found. remedy: what to do about it, "" where it is fine. is_problem: runs fail
    of it; else it is a warning."""

    what: str
    text: str
    remedy: str = ""
    is_problem: bool = False

    def __str__(self):
        level = "fine"
        if self.remedy:
            level = "PROBLEM" if self.is_problem else "warning"
        line = f"{level:8} {self.what:18} {self.text}"
        return f"{line}\n{'':27} -> {self.remedy}" if self.remedy else line


def main(words: list[str]) -> int:
    """Examine what the words say -> exit code. Collective in a world."""
    _, words = parser_of("doctor", __doc__).parse_known_args(words)
    return finish(_doctor, words)


def _doctor(words: list[str]) -> int:
    world.settle()
    found = _examine(_folder(words))
    if any(one.is_problem for one in found):
        return PROBLEMS
    return WARNINGS if any(one.remedy for one in found) else 0


def _folder(words: list[str]) -> Path:
    """The folder that one word names; of other words the output_dir of their configuration."""
    word = "".join(words)
    if len(words) < 2 and not (word.startswith("--") or word.endswith((".yaml", ".yml", ".json"))):
        return Path(*words)
    from .args import parse_args

    return Path(parse_args(words, needs_world=False).training.output_dir)


def _examine(folder: Path) -> list[Finding]:
    """The findings of all machines, printed by the main rank."""
    own: list[Finding] = []
    if world.current().local_rank == 0:  # once a machine
        reinstall = "install this package's requirements anew"
        for check in (_versions, _devices, _transformer_engine, _compiler, _memory, _limits):
            own += _guarded(check(), reinstall)
        own += _guarded(_disk(folder), "set output_dir to a folder that can be written")
    reach = "NCCL_DEBUG=INFO says more; see to firewalls, MASTER_ADDR, GLOO_SOCKET_IFNAME"
    found = _guarded(_together(own), reach)
    if world.current().is_main:
        print(*found, sep="\n", flush=True)
    return found


def _guarded(check: Iterator[Finding], remedy: str) -> list[Finding]:
    """What a check finds; that it cannot be made is a problem too."""
    found = []
    try:
        for finding in check:
            found.append(finding)
    except Exception as error:
        name = getattr(check, "__name__", "").strip("_").replace("_", " ")
        found.append(Finding(name, describe_error(error), remedy, True))
    return found


# -- of a machine


def _versions() -> Iterator[Finding]:
    """Packages against setup.cfg, what is needed, and constraints.txt, what was tested."""
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
        name = requirement.name
        tested = pins.get(requirement.name, "")
        install = f'pip install "{requirement}"'
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if not requirement.extras:  # of Transformer Engine, which may be missing
                yield Finding(name, "not installed", install, True)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield Finding(name, f"{version}, needed is {requirement.specifier}", install, True)
        elif tested and _minor(version) > _minor(tested):
            yield Finding(name, f"{version} is newer than what was tested", f"{name}=={tested}")
        else:
            yield Finding(name, version)


def _minor(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _devices() -> Iterator[Finding]:
    import psutil
    import torch

    memory = psutil.virtual_memory()
    free = f"{memory.available / _GIB:.0f} of {memory.total / _GIB:.0f} GiB free"
    yield Finding("CPU", f"{os.cpu_count()} cores, {free}")
    for name in ("gloo", "nccl") if torch.cuda.is_available() else ("gloo",):
        if not getattr(torch.distributed, f"is_{name}_available")():
            yield Finding(name, "torch was built without it", "another build of torch", True)
    if not torch.cuda.is_available():
        remedy = ""
        text = "none: ranks train on the CPU and meet over gloo"
        if Path("/dev/nvidia0").exists():
            text = f"there is one, and torch {torch.__version__} sees none"
            remedy = "a build of torch for the driver (nvidia-smi); look at CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", text, remedy, bool(remedy))
        return
    count = torch.cuda.device_count()
    ranks = world.current().local_size
    if ranks > count:
        yield Finding("GPU", f"{count} for {ranks} ranks", f"--nproc_per_node {count}", True)
    for i in range(count):
        torch.ones(64, 64, device=f"cuda:{i}").mm(torch.ones(64, 64, device=f"cuda:{i}")).sum()
        free_bytes, total = torch.cuda.mem_get_info(i)
        taken = "nvidia-smi names the processes that have the rest"
        text = f"{torch.cuda.get_device_name(i)}, {free_bytes // _GIB} of {total // _GIB} GiB free"
        yield Finding(f"GPU {i}", text, taken if free_bytes < 0.9 * total else "")


def _transformer_engine() -> Iterator[Finding]:
    from . import model_config

    reason = model_config.why_unusable()
    remedy = ""
    text = f"not used, {reason}: local layers, without FP8"
    if reason is None:
        text = str(model_config.found_here())
        if "was built for" in text:
            remedy = "another cuDNN comes before torch's own: remove or update the system's"
    elif reason not in (model_config.NO_GPU, model_config.ABSENT):
        remedy = "install it anew for this torch (`pip install mca-lite[te]`), or uninstall it"
    yield Finding("Transformer Engine", text, remedy)


def _compiler() -> Iterator[Finding]:
    import torch

    text = "not used: nothing is compiled on a CPU"
    remedy = ""
    if torch.cuda.is_available():
        from . import kernels

        text = "Triton and torch.compile work"
        tries = dict(Triton=kernels.why_no_kernels)
        tries["torch.compile"] = kernels.why_no_torch_compile
        for name, why_not in tries.items():
            reason = why_not()
            if reason is not None:
                text = f"{name} does not work, and training is slower: {reason}"
                remedy = "install Triton, gcc and Python's headers (python3-dev)"
                break
    yield Finding("compiler", text, remedy)


def _memory() -> Iterator[Finding]:
    if os.path.isdir("/dev/shm"):
        usage = shutil.disk_usage("/dev/shm")
        remedy = ""
        if usage.free < _LEAST_SHM:
            remedy = "docker run --shm-size=16g or --ipc=host: nccl and data workers need it"
        text = f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
        yield Finding("shared memory", text, remedy)


def _limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    remedy = ""
    if files != _NO_LIMIT and files < _LEAST_FILES:
        remedy = "ulimit -n 65536, or nofile in /etc/security/limits.conf"
    yield Finding("open files", f"at most {files}" if files != _NO_LIMIT else "any", remedy)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    remedy = ""
    if locked != _NO_LIMIT and list(Path("/sys/class").glob("infiniband/*")):
        remedy = "ulimit -l unlimited; docker run --ulimit memlock=-1: InfiniBand pins buffers"
    text = f"at most {locked // 1024} KiB" if locked != _NO_LIMIT else "any"
    yield Finding("locked memory", text, remedy)


def _disk(folder: Path) -> Iterator[Finding]:
    check_can_write(folder, "output_dir")
    there = folder.absolute()
    while not there.is_dir():
        there = there.parent
    free = shutil.disk_usage(there).free
    start = time.perf_counter()
    remedy = ""
    with tempfile.NamedTemporaryFile(dir=there, prefix=".mca_lite-doctor-") as file:
        file.write(os.urandom(_PROBE))
        file.flush()
        os.fsync(file.fileno())
        speed = _PROBE / _MIB / (time.perf_counter() - start)
    if free < _LEAST_DISK:
        remedy = "`plan` says what checkpoints take; save_total_limit, or another output_dir"
    elif speed < _LEAST_MIB_S:
        remedy = "async_save: true, or an output_dir on a faster disk"
    text = f"{there}: {free // _GIB} GiB free, {speed:,.0f} MiB/s written"
    if there != folder.absolute():
        text += f"; a run makes {folder} in it"
    yield Finding("disk", text, remedy)


# -- of ranks


def _together(own: list[Finding]) -> Iterator[Finding]:
    """What each machine found, and what only ranks can. Collective in a world."""
    if world.current().size == 1:
        yield from own
        name, ranks, is_right, speed, skew = _pair()
    else:
        try:
            import torch.distributed as dist

            _meet({"init_method": "env://"})
            machines: list = [None] * dist.get_world_size()
            dist.all_gather_object(machines, (socket.gethostname(), own))
        except Exception:
            yield from own
            raise
        machines = [(host, found) for host, found in machines if found]
        for host, found in machines:
            prefix = f"{host}: " if len(machines) > 1 else ""
            yield from (one._replace(text=prefix + one.text) for one in found)
        name, ranks, is_right, speed, skew = _measure()
    remedy = ""
    if not is_right:
        remedy = "the sums are wrong: NCCL_DEBUG=INFO; another machine"
    elif speed < _LEAST_GB_S[name]:
        remedy = "nvidia-smi topo -m shows the links; NCCL_DEBUG=INFO what nccl takes of them"
    of_ranks = show_count(ranks, "rank")
    text = f"{speed:.2f} GB/s of each rank ({name}, {of_ranks}, {_PROBE // _MIB} MiB)"
    yield Finding("all-reduce", text, remedy, not is_right)
    remedy = "one time server (chrony, ntpd) for all machines" if skew > _MOST_SKEW_S else ""
    yield Finding("clock", f"{time.ctime()}, ranks within {skew:.3f} s", remedy)


def _meet(where: dict, number_of_gpus: int = 1) -> None:
    """Join the process group, unless there is one."""
    import torch

    if torch.distributed.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.device_count() >= number_of_gpus:
        torch.cuda.set_device(world.current().local_rank)
        backend = "nccl"
    else:
        world.stay_on_loopback()
    torch.distributed.init_process_group(backend, timeout=timedelta(seconds=_WAIT_S), **where)


def _measure() -> tuple[str, int, bool, float, float]:
    """(backend, ranks, whether sums are right, GB/s that a rank sends in an all-reduce, seconds
    between the ranks' clocks). Collective."""
    import torch
    import torch.distributed as dist

    name = dist.get_backend()
    ranks = dist.get_world_size()
    vector = torch.ones(_PROBE // 4, device="cuda" if name == "nccl" else "cpu")
    seconds = []
    skews = []
    clocks = [0.0] * ranks
    for _ in range(4):  # the first one connects
        vector.fill_(1)
        dist.barrier()
        dist.all_gather_object(clocks, time.time())
        skews.append(max(clocks) - min(clocks))
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(vector)
        is_right = bool((vector == ranks).all())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    speed = 2 * (ranks - 1) / ranks * _PROBE / min(seconds) / 1e9
    return name, ranks, is_right, speed, min(skews)


def _pair() -> tuple[str, int, bool, float, float]:
    """_measure() of two ranks on this machine's loopback: over nccl where it has two GPUs."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        where = {"init_method": f"file://{folder}/store", "world_size": 2}
        ranks = [context.Process(target=_rank_of_pair, args=(i, where, answers)) for i in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(2 * _WAIT_S)
            process.kill()
    if answers.empty():
        raise OSError("two ranks of this machine did not meet")
    answer = answers.get()
    if isinstance(answer, str):
        raise OSError(answer)
    return answer


def _rank_of_pair(rank: int, where: dict, answers) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        _meet({**where, "rank": rank}, 2)
        answers.put(_measure())
    except Exception as error:
        answers.put(describe_error(error))
