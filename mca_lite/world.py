"""The world that a launcher describes: torchrun's variables, or SLURM's under the same names.

A half described world is refused. Each of its processes would take itself for the whole run, and
all of them would write to one folder.
"""

import json
import multiprocessing
import os
import re
import socket
import sys
import time
from pathlib import Path

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_HOW = "start with torchrun, or with srun so that SLURM's variables describe the world"


def settle() -> None:
    """Bring the environment to torchrun's variables, SLURM's where there are none of those.

    Without either this process is a world of its own. ValueError for what describes a world by
    half. Calling it again changes nothing; nor does it where a process group is there already,
    which the host program has made in its own way.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        return
    for name in _NAMES:
        if os.environ.get(name) == "":  # as a script exports what it failed to find out
            del os.environ[name]
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        _take_from_slurm()
    _check()


def end_second_run() -> None:
    """End a process that Python has spawned for another one, and in which it imports the user's
    script: what starts a run there is not below a guard."""
    # as multiprocessing itself knows it, which refuses further processes then
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(
            "error: a process that helps a run came to start it again: put what starts the run "
            "below `if __name__ == '__main__':` in your script"
        )


def _number(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, expected a whole number: {_HOW}") from None


def _check() -> None:
    size = _number("WORLD_SIZE") if "WORLD_SIZE" in os.environ else None
    if "RANK" not in os.environ:
        if size is not None and size != 1:
            raise ValueError(
                f"WORLD_SIZE is {size} and RANK is not set: {_HOW}; for one process unset "
                "WORLD_SIZE"
            )
        return
    rank = _number("RANK")
    if size is None:
        raise ValueError(
            f"RANK is {rank} and WORLD_SIZE is not set: {_HOW}; for one process unset RANK"
        )
    if not 0 <= rank < size:
        raise ValueError(
            f"RANK is {rank} in a world of WORLD_SIZE {size}: expected 0 to {size - 1}; {_HOW}"
        )
    if "LOCAL_RANK" in os.environ and _number("LOCAL_RANK") < 0:
        raise ValueError(f"LOCAL_RANK is {os.environ['LOCAL_RANK']}, expected 0 or more: {_HOW}")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if size > 1 and missing:
        raise ValueError(
            f"RANK is {rank} of WORLD_SIZE {size}, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set, so that the ranks cannot meet: set "
            f"MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, or {_HOW}"
        )
    if size > 1 and not 1 <= _number("MASTER_PORT") <= 65535:
        port = os.environ["MASTER_PORT"]
        raise ValueError(f"MASTER_PORT is {port}, expected a free port from 1 to 65535: {_HOW}")


def why_not_met(error: Exception) -> str:
    """Words for a meeting of the ranks that failed with torch's `error`: what this rank saw, and
    what to set."""
    rank = os.environ["RANK"]
    size = os.environ["WORLD_SIZE"]
    host = os.environ["MASTER_ADDR"]
    port = os.environ["MASTER_PORT"]
    came = re.search(r"(\d+)/\d+ clients joined", str(error))
    why = f"the others do not answer ({str(error).splitlines()[0]})"
    remedy = "see why one of them ended, or was not started"
    if "address already in use" in str(error):
        why = f"MASTER_PORT {port} of this host is in use"
        remedy = "set it to a free port, and give each process a RANK of its own"
    elif came:
        why = f"{came[1]} of {size} ranks came to MASTER_ADDR {host}, MASTER_PORT {port}"
        remedy = "see why the others ended or were not started, or raise ddp_timeout"
    elif not _resolves(host):
        why = f"MASTER_ADDR {host!r} is no host that this machine knows"
        remedy = "set it to the name or address of the host of rank 0"
    elif "client socket has timed out" in str(error):
        why = f"nothing answers at MASTER_ADDR {host}, MASTER_PORT {port}"
        remedy = "rank 0 has ended, was not started, or runs on another host: see its own words"
    return (
        f"rank {rank} of {size} could not meet the others: {why}. {remedy[0].upper()}{remedy[1:]}"
    )


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def is_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")


def stay_on_loopback() -> None:
    """A world that fits one machine needs no other interface; gloo would pick whichever the host
    name resolves to."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if is_one_machine() and loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def tell_torchrun(text: str) -> None:
    """Let torchrun's summary, the last that it prints, say why this rank ended."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    message = {"message": f"error: {text}", "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        Path(path).write_text(json.dumps({"message": message}))
    except OSError:
        pass  # it only repeats what is printed


# -- SLURM


def _take_from_slurm() -> None:
    """Set torchrun's variables for a task of srun. ValueError where SLURM does not say all."""
    if "SLURM_PROCID" not in os.environ or os.environ.get("SLURM_NTASKS", "1") == "1":
        return
    master = os.environ.get("MASTER_ADDR") or _first_host()
    missing = [] if "SLURM_LOCALID" in os.environ else ["SLURM_LOCALID"]
    if master is None:
        missing.append("MASTER_ADDR")
    if missing:
        raise ValueError(
            f"this is task {os.environ['SLURM_PROCID']} of SLURM_NTASKS "
            f"{os.environ['SLURM_NTASKS']}, and {' and '.join(missing)} cannot be found out: "
            "start with srun, or with torchrun; for one process unset SLURM_NTASKS"
        )
    found = {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": os.environ["SLURM_NTASKS"],
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "MASTER_ADDR": master,
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(_port()),
    }
    if _num_nodes() == "1":
        found["LOCAL_WORLD_SIZE"] = found["WORLD_SIZE"]
    os.environ.update(found)


def _num_nodes() -> str | None:
    return os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES")


def _first_host() -> str | None:
    """The host of task 0, from what only srun sets: in a batch script, which has SLURM_NTASKS too,
    one process would wait for tasks that nobody starts."""
    hosts = os.environ.get("SLURM_STEP_NODELIST")
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if (hosts or launcher) and _num_nodes() == "1":
        return "127.0.0.1"
    # node7 or node[03-05,9], and what comes after a comma
    match = re.fullmatch(r"([\w.-]+)(?:\[(\d+)[\d,-]*\])?(?:,.*)?", hosts or "")
    if match:
        return match[1] + (match[2] or "")
    return launcher


def _port() -> int:
    """The same on all tasks of a step, and another one for other jobs on the node."""
    job, step = (
        int(text) if text.isdigit() else 0
        for text in (os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", ""))
    )
    return 20000 + (job + step) % 10000  # below the ports that the system gives away
