"""The world described by a launcher: torchrun's environment variables, or SLURM's translated to
them.

An incomplete description is refused. Otherwise each process would think it is the whole run, and
all of them would write to one folder.
"""

import contextlib
import json
import multiprocessing
import os
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .errors import UserError

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LEAST_FILES = 64
_SOCKETS = Path("/proc/net/unix")  # Linux lists this machine's sockets there
_START = "start with torchrun, or with srun so that SLURM's variables describe the world"


class World(NamedTuple):
    """This process among the processes of the run, one per rank. is_given: True if the environment
    has WORLD_SIZE, as a launcher or planned_world() sets it."""

    rank: int
    size: int
    local_rank: int  # rank on this machine
    local_size: int
    is_given: bool

    @property
    def is_main(self) -> bool:
        """True for rank 0, which prints most messages, and writes files that are not sharded over
        ranks."""
        return self.rank == 0

    @property
    def is_one_machine(self) -> bool:
        """True if all ranks are known to run on this machine."""
        return self.size == self.local_size


def current() -> World:
    """The World that the environment describes; a world of one rank without a launcher."""

    def number(name: str, default: int) -> int:
        text = os.environ.get(name, "")
        return int(text) if text.isdecimal() else default  # settle() refuses other values

    return World(
        rank=number("RANK", 0),
        size=number("WORLD_SIZE", 1),
        local_rank=number("LOCAL_RANK", 0),
        local_size=number("LOCAL_WORLD_SIZE", 1),
        is_given=bool(os.environ.get("WORLD_SIZE")),
    )


@contextlib.contextmanager
def planned_world(size: int) -> Iterator[None]:
    """Context in which current() describes a world of `size` ranks, for commands that only plan a
    run.
    """
    before = dict(os.environ)
    os.environ["WORLD_SIZE"] = str(size)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def settle() -> None:
    """Prepare the environment variables by which the ranks find each other (RANK, WORLD_SIZE,
    MASTER_ADDR, ...). Those that torchrun sets are checked. In one of several tasks of SLURM's
    srun, without RANK and WORLD_SIZE, they are set from SLURM's variables.

    Without a launcher, this process is a world of one rank. ValueError if rank, size and address
    are incomplete or impossible. May be called again; does nothing if the host program has already
    made a process group."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        return
    if not os.environ.get("RANK") and not os.environ.get("WORLD_SIZE"):
        _take_from_slurm()
    _check()


def end_second_run() -> None:
    """Exit with an error if this is a helper process of multiprocessing that is importing the
    user's script. Without a main guard, the script would start its run again there."""
    # multiprocessing itself refuses further processes by this attribute
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(
            "error: a process that helps a run tried to start it again: start the run "
            "below `if __name__ == '__main__':` in your script"
        )


def _check() -> None:
    """Raise ValueError if RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe a world of several
    ranks incompletely, or a number in them is impossible. Of LOCAL_RANK it is only checked that it
    is a whole number."""
    given = {name: text for name, text in os.environ.items() if text}  # scripts may export ""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"):
        if not given.get(name, "0").isdecimal():
            raise ValueError(f"{name} is {given[name]!r}, expected a whole number: {_START}")
    if not 0 < int(given.get("MASTER_PORT", 1)) < 2**16:
        raise ValueError(
            f"MASTER_PORT is {given['MASTER_PORT']}, expected a port from 1 to 65535: {_START}"
        )
    here = current()
    needed: tuple[str, ...] = ()
    if "RANK" in given:
        needed = ("WORLD_SIZE",)
    if here.size != 1:
        needed = _NAMES
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(
            f"RANK or WORLD_SIZE is set, without {' and '.join(missing)}: set MASTER_ADDR to the "
            "host of rank 0 and MASTER_PORT to a free port there; for one process unset both; "
            f"{_START}"
        )
    if here.rank >= here.size:
        raise ValueError(
            f"RANK is {here.rank} in a world of WORLD_SIZE {here.size}: expected 0 to "
            f"{here.size - 1}; {_START}"
        )


def raise_open_files() -> None:
    """Raise this process's soft limit of open files to the hard limit: the ranks' store keeps two
    connections per rank.

    ValueError if there are several ranks and even the hard limit is too low, because gloo kills a
    process that can open no more files.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if current().size > 1 and 0 <= most < _LEAST_FILES:
        raise ValueError(
            f"each of several ranks opens more files than this process may: expected at least "
            f"{_LEAST_FILES}, got {most}; set ulimit -n 65536"
        )
    with contextlib.suppress(ValueError):  # macOS refuses an infinite limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def why_not_met(error: Exception) -> str:
    """The error message for ranks that could not connect to each other, as seen by this rank, with
    a remedy. error: torch's."""
    here = current()
    reason = str(error).splitlines()[0]
    return (
        f"rank {here.rank} of {here.size} could not meet the others at MASTER_ADDR "
        f"{os.environ['MASTER_ADDR']}, MASTER_PORT {os.environ['MASTER_PORT']}: {reason}. Set them "
        "to the host of rank 0 and a free port there, see why another rank ended or was not "
        "started, or raise ddp_timeout"
    )


def stay_on_loopback() -> None:
    """If all ranks are on this machine, set GLOO_SOCKET_IFNAME to the loopback interface, unless it
    is set. By default gloo uses the interface of the host name."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if current().is_one_machine and loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


# -- the time before the ranks meet, without torchrun

met = threading.Event()  # set when the ranks have met, or failed to
_sign: list[socket.socket] = []


def watch_meeting() -> None:
    """Start a thread that ends this process if another rank on this machine ends before all ranks
    are connected. Without it the other ranks would wait, because only torchrun would end them.

    Each rank binds a named socket, which the kernel removes when the process ends. Works on Linux
    with several ranks; does nothing under torchrun, without MASTER_ADDR and MASTER_PORT, or when
    called again."""
    here = current()
    # a script that makes its process group may set no address
    has_address = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    is_bare = here.size > 1 and has_address and "TORCHELASTIC_RUN_ID" not in os.environ
    if is_bare and not _sign and _SOCKETS.exists():
        name = f"mca_lite-{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}-"
        # imports may hold up the thread's first look for seconds
        seen = _ranks_there(name)
        _sign.append(socket.socket(socket.AF_UNIX))
        with contextlib.suppress(OSError):  # the name may be too long for the kernel
            _sign[0].bind(f"\0{name}{here.rank}")
        threading.Thread(target=_look_at_ranks, args=[name, here.rank, seen], daemon=True).start()


def _ranks_there(name: str) -> set[str]:
    """The ranks on this machine that have bound the socket by which watch_meeting() shows that a
    rank is alive. name: the beginning of the sockets' names, before the rank."""
    return set(re.findall(f"@{re.escape(name)}(.*)", _SOCKETS.read_text(errors="replace")))


def _look_at_ranks(name: str, rank: int, seen: set[str]) -> None:
    """Exit this process if another rank on this machine ends before the ranks are connected. Until
    then, look every second at the sockets that watch_meeting() binds: a socket that is gone means
    that its rank has ended.

    name: the beginning of the sockets' names, before the rank. rank: this process's rank. seen: the
    ranks that were there when this one started."""
    while not met.wait(1.0):
        there = _ranks_there(name)
        gone = seen - there
        seen = there
        if gone and not met.wait(5.0):  # this rank may end by itself, with a better message
            place = f"rank {', '.join(gone)} on {socket.gethostname()}"
            text = f"error: rank {rank}: {place} ended before the ranks met"
            print(f"{text}: see its output, or the system's log", file=sys.stderr, flush=True)
            os._exit(UserError.exit_code)


def tell_torchrun(text: str) -> None:
    """Write why this rank ended into torchrun's error file, whose text torchrun prints last. Does
    nothing without torchrun."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    message = {"message": f"error: {text}", "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):  # the text is printed too
        Path(path).write_text(json.dumps({"message": message}))


# -- SLURM


def _take_from_slurm() -> None:
    """Set torchrun's variables if this is one of several tasks of SLURM's srun. ValueError if
    SLURM's variables are incomplete."""
    slurm = os.environ.get
    task = slurm("SLURM_PROCID")
    size = slurm("SLURM_NTASKS", "1")
    if task is None or size == "1":
        return
    # derived from the job's number: one port for all tasks, another for other jobs on the node
    port = 20000 + int(slurm("SLURM_JOB_ID", "0")) % 10000
    variables: dict[str, Any] = {
        "RANK": task,
        "WORLD_SIZE": size,
        "LOCAL_RANK": slurm("SLURM_LOCALID"),
        "MASTER_ADDR": slurm("MASTER_ADDR") or _first_host(),
        "MASTER_PORT": slurm("MASTER_PORT") or str(port),
    }
    missing = [name for name, value in variables.items() if not value]
    if missing:
        raise ValueError(
            f"this is task {task} of SLURM_NTASKS {size}, and {' and '.join(missing)} cannot be "
            "found out: start with srun, or with torchrun; for one process unset SLURM_NTASKS"
        )
    if slurm("SLURM_NNODES") == "1":
        variables["LOCAL_WORLD_SIZE"] = size
    os.environ.update(variables)


def _first_host() -> str:
    """The first host of SLURM's step, by default that of task 0; "" if unknown.

    It is read from a variable that only srun sets. SLURM_NTASKS exists in a batch script too, where
    a single process would wait for tasks that nobody starts."""
    # the first entry looks like node7 or node[03-05,9]
    hosts = os.environ.get("SLURM_STEP_NODELIST", "")
    match = re.fullmatch(r"([\w.-]+)(?:\[(\d+)[\d,-]*\])?(?:,.*)?", hosts)
    return "".join(match.groups("")) if match else ""
