"""Four hosts, a rank on each, on a network of this machine: they train, save and resume; a cable is
cut; a slow one is named.
"""

import os
import socket
import socketserver
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.shared import hosts, tiny, world
from tests.shared.fixtures import saved_model
from tests.shared.training import assert_same_curve, read_log, train

pytestmark = pytest.mark.skipif(bool(hosts.lacking()), reason=hosts.lacking())

HOSTS, STEPS = 4, 6
CUT_OFF = 3  # the host without a cable
SLOW = 2
DDP_TIMEOUT_S = 12
LEAVE_S = 30  # more, for agents to see that their ranks have left: 3 s on two cores
KEYS = dict(
    steps=STEPS, count=20, save_strategy="steps", save_steps=2, ddp_timeout=DDP_TIMEOUT_S,
    hang_timeout=3,
)  # fmt: skip

model_path = saved_model("llama")


def wait_for(has_come, seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not has_come():
        assert time.monotonic() < end
        time.sleep(0.02)


def run(path: str, out: str, **keys) -> None:
    """A run of this rank, ended as the command line ends it."""
    from mca_lite.cli import end

    try:
        train(path, out, **{**KEYS, **keys})
    except Exception as error:
        os._exit(end(error, out))


def run_until_the_cut(path: str, out: str, signs: str) -> None:
    """In step 5, after a checkpoint, the ranks wait for the cable to be cut."""
    from mca_lite.callbacks import TrainerCallback

    class Wait(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 4:
                Path(signs, f"ready-{os.environ['RANK']}").touch()
                wait_for(lambda: Path(signs, "cut").exists())

    run(path, out, callbacks=[Wait()])


def cut(network: hosts.Network, signs: Path) -> float:
    """Cut the cable of a host when all ranks are in step 5 -> the time of it."""
    wait_for(lambda: len(list(signs.glob("ready-*"))) == HOSTS)
    network.cable(CUT_OFF, "down")
    (signs / "cut").touch()
    return time.time()


def curve(out: Path) -> list:
    return [(line["loss"], line["grad_norm"]) for line in read_log(out)]


@pytest.fixture(scope="module")
def undisturbed(model_path, tmp_path_factory) -> list:
    """The curve of one rank of plain torch."""
    out = str(tmp_path_factory.mktemp("torch"))
    [curve] = world.run(train, 1, model_path, out, backend="torch", steps=STEPS, count=20)
    return curve


def test_a_cut_cable_is_named_all_leave_and_a_restart_ends_as_if_nothing_had_been(
    model_path, undisturbed, tmp_path
):
    out, signs = tmp_path / "out", tmp_path / "signs"
    signs.mkdir()
    with hosts.Network(HOSTS) as network, ThreadPoolExecutor(1) as pool:
        words = (model_path, str(out), str(signs))
        running = pool.submit(network.launch, run_until_the_cut, tmp_path / "first", *words)
        cut_at = cut(network, signs)
        ended = running.result()
        assert not any(is_well for is_well, _, _ in ended)
        said = "".join(said for _, said, _ in ended[:CUT_OFF])
        assert hosts.spoken(said, rf"{hosts.rank_on(CUT_OFF)}: does not answer"), said
        assert hosts.spoken(said, rf"error: .*{hosts.rank_on(CUT_OFF)} hung"), said
        alone = rf"rank {CUT_OFF} .*: the store of the ranks has not answered for 1\d s"
        assert hosts.spoken(ended[CUT_OFF][1], alone), ended[CUT_OFF]
        assert max(at for *_, at in ended) - cut_at < DDP_TIMEOUT_S + LEAVE_S
        network.cable(CUT_OFF, "up")
        again = network.launch(
            run, tmp_path / "again", model_path, str(out), resume_from_checkpoint="auto",
            rendezvous="c10d",
        )  # fmt: skip
    said = "".join(said for _, said, _ in again)
    assert all(is_well for is_well, *_ in again), said
    assert f"resuming from {out}/checkpoint-4" in said
    assert_same_curve(curve(out), undisturbed)


def test_hosts_with_an_output_dir_of_their_own_are_refused_in_words(model_path, tmp_path):
    with hosts.Network(HOSTS) as network:
        ended = network.launch(run, tmp_path / "hosts", model_path, "out")
    said = "".join(said for _, said, _ in ended)
    assert "output_dir is not shared by all nodes" in said, said
    for host in range(1, HOSTS):
        assert f"rank {host}: it is not on host{host} in {tmp_path}/hosts/home{host}/out" in said
    assert not list(tmp_path.glob("hosts/home*/out/checkpoint-*"))


SAMPLE_BYTES = 250_000  # 0.2 s at 10 Mbit/s


class Serve(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(bytes(SAMPLE_BYTES))


def run_from_a_share(path: str, out: str) -> None:
    """The samples are on host 0: each is read over the network."""
    from mca_lite import McaTrainer

    share = (hosts.address(0), 29500)
    if os.environ["RANK"] == "0":
        server = socketserver.ThreadingTCPServer(share, Serve)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    class Samples(list):
        def __getitem__(self, number):
            with socket.create_connection(share) as connection:
                while connection.recv(2**16):
                    pass
            return super().__getitem__(number)

    class Trainer(McaTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.train_dataset = Samples(tiny.samples(20))

    run(path, out, steps=3, save_strategy="no", trainer_class=Trainer)


def test_a_host_with_a_slow_cable_is_named_as_the_slowest_rank(model_path, tmp_path):
    with hosts.Network(HOSTS) as network:
        network.shape(SLOW, "10mbit")
        ended = network.launch(
            run_from_a_share, tmp_path / "hosts", model_path, str(tmp_path / "out")
        )
    assert all(is_well for is_well, *_ in ended), ended
    lines = read_log(tmp_path / "out")
    assert [line["slowest_rank"] for line in lines] == [SLOW] * 3
    for line in lines:
        assert line["lag_data_s"] > 0.1, line
        assert line["reduction_s"] > 0.05, "140 KB of gradients at 10 Mbit/s"


def test_no_network_outlives_its_test():
    with pytest.raises(ZeroDivisionError), hosts.Network(2) as network:
        raise ZeroDivisionError
    assert not list(Path("/run/netns").glob(f"{network.name}-*"))
