"""Hangs over nccl, `make gpu ARGS=hangs`: the rank that hangs is named, and the others leave within
ddp_timeout + 10 s.

Two ranks, on two GPUs or on one (for nccl each is a host of its own then); without CUDA the cases
that gloo can have. Rank 0 holds the store, as without torchrun. One more case saves the distributed
optimizer and ends well. A line a case: who was named, and seconds until all have left.
The cases run at the same time: most of it is waiting.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tests.shared import tiny

HANG_S, DDP_S, SLACK_S = 5, 30, 10
PP2 = dict(pipeline_model_parallel_size=2)
SAVES = dict(use_distributed_optimizer=True, save_strategy="steps", save_steps=2, max_steps=4)


class Case(NamedTuple):
    """how: see train(). victim: the rank that hangs. words: a pattern in the ranks' output."""

    how: str
    victim: int
    keys: dict
    words: str
    needs_gpu: bool = False


BEHIND = r"1 of 2 ranks behind:\nrank {} on"
CASES = {
    "kernel, dp2": Case("kernel", 1, {}, BEHIND.format(1), True),
    "kernel in the last backward pass, dp2": Case("backward", 1, {}, BEHIND.format(1), True),
    "kernel, pp2": Case("kernel", 0, PP2, BEHIND.format(0), True),
    "alone, dp2": Case(
        "alone", 1, {}, r"(?s)1 of 2 ranks behind:\nrank 1 on.* default_pg, \w+ of \[\[3\]\]"
    ),
    "stopped, dp2": Case("stop", 1, {}, BEHIND.format(1) + ".*does not answer"),
    "stopped with the store, dp2": Case(
        "stop", 0, {}, "store of the ranks has not answered for . s; its holder, rank 0 on"
    ),
    "save of the distributed optimizer": Case("saves", -1, SAVES, ""),
}


def train(path: str, out: str, how: str, victim: int, keys: dict) -> None:
    """Train on this rank; the victim hangs after step 2."""
    from mca_lite import AutoModel, McaTrainer, TrainingArguments
    from mca_lite.callbacks import TrainerCallback

    is_victim = int(os.environ["RANK"]) == victim
    device = "cuda" if torch.cuda.is_available() else "cpu"

    class Breaks(TrainerCallback):
        """kernel: the GPU never ends it. alone: a collective of this rank. stop: SIGSTOP."""

        def on_step_begin(self, args, state, control, **kwargs):
            if not is_victim or state.global_step != 2:
                return
            Path(f"{out}-begin").write_text(str(time.monotonic()))  # the clock of all processes
            if how == "kernel":
                torch.cuda._sleep(int(1e14))
            if how == "alone":
                torch.distributed.all_reduce(torch.zeros(3, device=device))
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)

    class Trainer(McaTrainer):
        """backward: a kernel without end, after the host has begun all micro-batches."""

        def _post_compute_loss(self, labels, losses):
            if is_victim and how == "backward" and self.state.global_step == 2:
                losses.register_hook(lambda gradient: torch.cuda._sleep(int(1e14)))
            return super()._post_compute_loss(labels, losses)

    base = dict(
        output_dir=out,
        max_steps=1000,
        num_train_epochs=999,
        global_batch_size=8,
        per_device_train_batch_size=2,
        save_strategy="no",
        hang_timeout=HANG_S,
        ddp_timeout=DDP_S,
        disable_tqdm=True,
        torch_compile=False,
    )
    args = TrainingArguments(**{**base, **keys})
    model = AutoModel.from_pretrained(path, args)
    Trainer(model, args, train_dataset=tiny.samples(), callbacks=[Breaks()]).train()


def environments() -> list[dict[str, str]]:
    """The variables of two ranks, on the GPUs of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ranks = [{**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
    if torch.cuda.device_count() == 1:
        for rank, variables in enumerate(ranks):
            variables.update(LOCAL_RANK="0", NCCL_HOSTID=f"host{rank}", NCCL_IB_DISABLE="1")
            variables.update(NCCL_SOCKET_IFNAME="lo")
    return ranks


def is_named(name: str, path: str, folder: str) -> bool:
    """Print a line on a case -> True if its rank was named and the others left in time."""
    case = CASES[name]
    out = f"{folder}/{name.replace(' ', '-')}"
    words = [sys.executable, "-m", "tests.tools.gpu_hangs", path, out, name]
    logs = [Path(f"{out}-{rank}.log") for rank in range(2)]
    start = time.monotonic()
    processes = []
    for variables, log in zip(environments(), logs, strict=True):
        with log.open("w") as file:
            processes.append(
                subprocess.Popen(words, env=variables, stdout=file, stderr=subprocess.STDOUT)
            )
    codes = {}
    began = 0.0
    for rank, process in enumerate(processes):
        if rank != case.victim or case.how != "stop":
            try:
                codes[rank] = process.wait(max(1.0, start + 200 - time.monotonic()))
            except subprocess.TimeoutExpired:
                codes[rank] = None
    seconds = time.monotonic() - start
    for process in processes:
        process.kill()
        process.wait()
    said = "".join(log.read_text() for log in logs)
    marks = Path(f"{out}-begin")
    if marks.exists():
        began = float(marks.read_text()) - start
    took = seconds - began
    wanted = 0 if case.how == "saves" else 87
    has_left = set(codes.values()) == {wanted} and (wanted == 0 or took <= DDP_S + SLACK_S)
    found = re.search(case.words, said)
    print(f"{name:40} named {bool(found)}, left {has_left} after {took:.0f} s", flush=True)
    if not (found and has_left):
        print(codes, said[-4000:], flush=True)
    return bool(found) and has_left


def main(words: list[str] | None = None) -> int:
    """The cases this machine can have; words: parts of the names of some -> 0 if all are right."""
    names = [n for n, case in CASES.items() if torch.cuda.is_available() or not case.needs_gpu]
    chosen = [name for name in names if not words or any(word in name for word in words)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(chosen) or 1) as pool:
        path = tiny.save_model(f"{folder}/model", "qwen3")
        right = list(pool.map(lambda name: is_named(name, path, folder), chosen))
    print(f"hangs: {sum(right)} of {len(right)}", flush=True)
    return int(not right or not all(right))


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[3] in CASES:
        case = CASES[sys.argv[3]]
        train(sys.argv[1], sys.argv[2], case.how, case.victim, case.keys)
    else:
        sys.exit(main(sys.argv[1:]))
