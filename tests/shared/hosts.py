"""A network of hosts on this machine: network namespaces of Linux, each with an address, a host
name, a home and a cable (veth) to one switch (a bridge); a run of torchrun's agents on them.

Needs root and `ip` of iproute2; `lacking()` gives the reason where it cannot be.
"""

import contextlib
import ctypes
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.shared import world
from tests.shared.commands import without_launcher

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000
_PORT = 29400


def _run(words: str) -> None:
    result = subprocess.run(words.split(), capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"{words}: {result.stderr.strip()}")


@functools.cache
def lacking() -> str:
    """Why there can be no network of hosts here, "" if there can."""
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return "a network of hosts needs Linux, root, and ip and tc of iproute2"
    try:
        with Network(1) as network:
            network.shape(0, "1mbit")
    except OSError as error:
        return f"no network of hosts on this machine: {error}"
    return ""


class Network:
    """`size` hosts, host0 at 10.9.0.1 and so on, from entry to exit of the context."""

    made = 0

    def __init__(self, size: int):
        self.size = size
        Network.made += 1
        self.name = f"hosts-{os.getpid()}-{Network.made}"

    def __enter__(self) -> "Network":
        remove_those_of_the_dead()
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *error) -> None:
        self.remove()

    def _make(self) -> None:
        switch = self.space("switch")
        _run(f"ip netns add {switch}")
        _run(f"ip -n {switch} link add bridge type bridge")
        _run(f"ip -n {switch} link set bridge up")
        for number in range(self.size):
            host = self.space(number)
            _run(f"ip netns add {host}")
            _run(f"ip -n {switch} link add port{number} type veth peer name eth0 netns {host}")
            _run(f"ip -n {switch} link set port{number} master bridge up")
            _run(f"ip -n {host} addr add {address(number)}/24 dev eth0")
            for link in ("lo", "eth0"):
                _run(f"ip -n {host} link set {link} up")

    def space(self, number: int | str) -> str:
        """The network namespace of a host, or of the switch."""
        return f"{self.name}-{number}"

    def remove(self) -> None:
        """The namespaces, and with them their cables."""
        for number in ("switch", *range(self.size)):
            with contextlib.suppress(OSError):
                _run(f"ip netns delete {self.space(number)}")

    def cable(self, number: int, state: str) -> None:
        """Pull the cable of a host out of the switch ("down"), or plug it in again ("up")."""
        _run(f"ip -n {self.space('switch')} link set port{number} {state}")

    def shape(self, number: int, rate: str) -> None:
        """Slow down a host's cable, both ways."""
        for space, link in ((number, "eth0"), ("switch", f"port{number}")):
            limit = f"root tbf rate {rate} burst 16kb latency 400ms"
            _run(f"tc -n {self.space(space)} qdisc add dev {link} {limit}")

    def launch(self, function, folder: Path, *args, rendezvous: str = "static", **kwargs) -> list:
        """Run `function(*args, **kwargs)` on a rank of each host, under its own agent of torchrun
        -> Ended of each host."""
        folder.mkdir()
        return world.run(
            _as_host, self.size, self, str(folder), rendezvous, function, args, kwargs,
            timeout_s=200,
        )  # fmt: skip


def address(number: int) -> str:
    return f"10.9.0.{number + 1}"


def remove_those_of_the_dead() -> None:
    """Remove what tests that were killed have left."""
    for path in Path("/run/netns").glob("hosts-*"):
        if not Path(f"/proc/{path.name.split('-')[1]}").exists():
            _run(f"ip netns delete {path.name}")


def _enter(space: str, host_name: str) -> None:
    """Move this thread, and what it starts, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}") as file:
        failed = libc.setns(file.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS)
    if failed:
        raise OSError(ctypes.get_errno(), f"{space} cannot be entered")
    socket.sethostname(host_name)


def _as_host(network: Network, folder: str, rendezvous: str, function, args, kwargs) -> tuple:
    """(True if the rank ended well, what it said, when it ended) of this host's agent, which forks
    the rank from this process: it has imported everything."""
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    number = dist.get_rank()
    dist.destroy_process_group()  # the ranks make their own, over their cables
    without_launcher()
    _enter(network.space(number), f"host{number}")
    home = Path(folder, f"home{number}")
    home.mkdir()
    os.chdir(home)
    os.environ.update(HOME=str(home), GLOO_SOCKET_IFNAME="eth0")
    config = LaunchConfig(
        min_nodes=network.size, max_nodes=network.size, nproc_per_node=1, run_id="hosts",
        rdzv_backend=rendezvous, rdzv_endpoint=f"{address(0)}:{_PORT}",
        rdzv_configs={"rank": number, "is_host": number == 0, "timeout": 60},
        local_addr=address(number), max_restarts=0, start_method="fork", monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(home / "logs"), redirects=Std.ALL),
    )  # fmt: skip
    is_well = True
    try:
        elastic_launch(config, _call)(function, args, kwargs)
    except ChildFailedError:
        is_well = False
    ended = time.time()
    said = "".join(path.read_text() for path in sorted((home / "logs").glob("**/std*.log")))
    return is_well, said, ended


def _call(function, args, kwargs):
    return function(*args, **kwargs)


def rank_on(host: int) -> str:
    """A pattern for the name of the rank on a host."""
    return rf"rank {host} on host{host} \(process \d+\)"


def spoken(words: str, pattern: str) -> bool:
    return re.search(pattern, words) is not None
