"""The world of a launcher: torchrun's variables, or SLURM's under the same names.

A half-described world is refused: each process would take itself for the whole run, and
all of them would write to one folder.
"""

import contextlib
import json
import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_START = "start with torchrun, or with srun so that SLURM's variables describe the world"


class World(NamedTuple):
    """Place of this process among the processes of the run. is_given: a launcher described it."""

    rank: int
    size: int
    local_rank: int  # on this machine
    local_size: int
    is_given: bool

    @property
    def is_main(self) -> bool:
        """True for rank 0: it prints and writes."""
        return self.rank == 0

    @property
    def is_one_machine(self) -> bool:
        """True if all ranks run on this machine."""
        return self.size == self.local_size


def current() -> World:
    """Read the World from the environment; a world of one without a launcher."""

    def number(name: str, default: int) -> int:
        text = os.environ.get(name, "")
        return int(text) if text.isdecimal() else default  # settle() refuses other texts

    return World(
        rank=number("RANK", 0),
        size=number("WORLD_SIZE", 1),
        local_rank=number("LOCAL_RANK", 0),
        local_size=number("LOCAL_WORLD_SIZE", 1),
        is_given="WORLD_SIZE" in os.environ,
    )


@contextlib.contextmanager
def planned_world(size: int) -> Iterator[None]:
    """Let current() describe a world of `size` ranks, for commands that plan a run."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(size)
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]
        if before is not None:
            os.environ["WORLD_SIZE"] = before


def settle() -> None:
    """Bring the environment to torchrun's variables, from SLURM's if there are none of those.

    Without either this process is a world of one. ValueError for a half-described world.
    Idempotent; does nothing if the host program has made a process group already.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        return
    for name in _NAMES:
        if os.environ.get(name) == "":  # a script exports an unset variable so
            del os.environ[name]
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        _take_from_slurm()
    _check()


def end_second_run() -> None:
    """Exit from a process of multiprocessing while it imports the user's script: the script starts
    its run without a main guard."""
    # multiprocessing itself refuses further processes by this attribute
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(
            "error: a process that helps a run came to start it again: put what starts the run "
            "below `if __name__ == '__main__':` in your script"
        )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, expected a whole number: {_START}") from None


def _check() -> None:
    """ValueError for variables of a half-described world, or numbers that do not fit."""
    given = os.environ.keys()
    size = _number("WORLD_SIZE", 1)
    if "RANK" not in given and size == 1:
        return
    rank = _number("RANK", 0)
    local_rank = _number("LOCAL_RANK", 0)
    port = _number("MASTER_PORT", 1)
    missing = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in given)
    meet = "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
    problems = {
        f"WORLD_SIZE is {size} and RANK is not set; for one process unset WORLD_SIZE": (
            "RANK" not in given
        ),
        f"RANK is {rank} and WORLD_SIZE is not set; for one process unset RANK": (
            "WORLD_SIZE" not in given
        ),
        f"RANK is {rank} in a world of WORLD_SIZE {size}: expected 0 to {size - 1}": (
            rank not in range(size)
        ),
        f"LOCAL_RANK is {local_rank}, expected 0 or more": local_rank < 0,
        f"RANK is {rank} of WORLD_SIZE {size}, without {missing}: {meet}": size > 1 and missing,
        f"MASTER_PORT is {port}, expected a free port from 1 to 65535": port not in range(1, 65536),
    }
    for text, is_so in problems.items():
        if is_so:
            raise ValueError(f"{text}; {_START}")


def why_not_met(error: Exception) -> str:
    """Explain a failed meeting of the ranks from torch's `error`: this rank's view, and the
    remedy."""
    here = current()
    text = str(error)
    host = os.environ["MASTER_ADDR"]
    port = os.environ["MASTER_PORT"]
    place = f"MASTER_ADDR {host}, MASTER_PORT {port}"
    joined = "".join(re.findall(r"(\d+)/\d+ clients joined", text)[:1])
    rows = (
        (
            "address already in use" in text,
            f"MASTER_PORT {port} of this host is in use",
            "Set it to a free port, and give each process a RANK of its own",
        ),
        (
            joined,
            f"{joined} of {here.size} ranks came to {place}",
            "See why the others ended or were not started, or raise ddp_timeout",
        ),
        (
            not _resolves(host),
            f"MASTER_ADDR {host!r} is no host that this machine knows",
            "Set it to the name or address of the host of rank 0",
        ),
        (
            "client socket has timed out" in text,
            f"nothing answers at {place}",
            "Rank 0 has ended, was not started, or runs on another host: see its own words",
        ),
        (
            True,
            f"the others do not answer ({text.splitlines()[0]})",
            "See why one of them ended, or was not started",
        ),
    )
    reason, remedy = next(row[1:] for row in rows if row[0])
    return f"rank {here.rank} of {here.size} could not meet the others: {reason}. {remedy}"


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def stay_on_loopback() -> None:
    """Let gloo use the loopback interface if all ranks are on this machine; else it would take the
    interface of the host name."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if current().is_one_machine and loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def tell_torchrun(text: str) -> None:
    """Give torchrun's summary, its last print, the reason why this rank ended."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    message = {"message": f"error: {text}", "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):  # the text is printed too
        Path(path).write_text(json.dumps({"message": message}))


# -- SLURM


def _take_from_slurm() -> None:
    """Set torchrun's variables for a task of srun. ValueError if SLURM's are incomplete."""
    task = os.environ.get("SLURM_PROCID")
    size = os.environ.get("SLURM_NTASKS", "1")
    if task is None or size == "1":
        return
    variables = {
        "RANK": task,
        "WORLD_SIZE": size,
        "LOCAL_RANK": os.environ.get("SLURM_LOCALID"),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or _first_host(),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(_port()),
    }
    names = {"LOCAL_RANK": "SLURM_LOCALID"}
    missing = [names.get(name, name) for name, value in variables.items() if value is None]
    if missing:
        raise ValueError(
            f"this is task {task} of SLURM_NTASKS {size}, and {' and '.join(missing)} cannot be "
            "found out: start with srun, or with torchrun; for one process unset SLURM_NTASKS"
        )
    if _num_nodes() == "1":
        variables["LOCAL_WORLD_SIZE"] = size
    os.environ.update(variables)


def _num_nodes() -> str | None:
    return os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES")


def _first_host() -> str | None:
    """The host of task 0, from variables of srun alone: a batch script has SLURM_NTASKS too, and
    one process would wait for tasks without a launcher."""
    hosts = os.environ.get("SLURM_STEP_NODELIST", "")
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if (hosts or launcher) and _num_nodes() == "1":
        return "127.0.0.1"
    # node7 or node[03-05,9], before a comma
    match = re.fullmatch(r"([\w.-]+)(?:\[(\d+)[\d,-]*\])?(?:,.*)?", hosts)
    return match[1] + (match[2] or "") if match else launcher


def _port() -> int:
    """A port below the ephemeral ones: the same on all tasks of a step, another one
    for other jobs on the node."""
    numbers = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 20000 + sum(int(text) for text in numbers if text.isdigit()) % 10000
