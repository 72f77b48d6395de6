"""The share of useful time of a run under torchrun whose ranks are killed every few minutes.

make chaos ARGS="goodput --minutes 30 --every 5"

On two ranks, or on one where there is one GPU. Useful are the steps that the run has kept at its
end, by the median time of a step; the rest is starts, saves, lost steps and the agent. Prints one
JSON object: "goodput", and what one kill an hour would leave, from the measured seconds that a
kill costs.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from tests.shared.commands import TORCHRUN
from tests.tools.faults import KEYS, Place

ROOT = Path(__file__).parents[2]
RANKS = min(torch.cuda.device_count() or 2, 2)


def ranks_of(agent: subprocess.Popen) -> list[psutil.Process]:
    """The processes of the ranks under an agent of torchrun."""
    children = psutil.Process(agent.pid).children()
    return [child for child in children if "train.py" in " ".join(child.cmdline())]


def lines_of(log: Path) -> list[dict]:
    """The lines of a log that have a step's time; a cut last line is left out."""
    text = log.read_text() if log.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if "step_time_s" in line]


def wait_for_a_step(log: Path, more_than: int, limit_s: float = 300) -> None:
    """Wait until the log has more lines: the run trains."""
    end = time.monotonic() + limit_s
    while len(lines_of(log)) <= more_than:
        if time.monotonic() > end:
            raise TimeoutError(f"no further step within {limit_s:.0f} s")
        time.sleep(0.2)


def measure(minutes: float, every: float, save_steps: int, seed: int) -> dict:
    """Train for so many minutes, with a kill of a drawn rank each `every` minutes."""
    rng, kills = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as temporary:
        place = Place(Path(temporary))
        out = Path(temporary) / "goodput"
        keys = place.keys(
            "dp2",
            out,
            **{**KEYS, "max_steps": 10**6, "save_steps": save_steps, "logging_steps": 10},
        )
        keys |= dict(save_total_limit=2, ddp_timeout=60, hang_timeout=30, num_train_epochs=10**5)
        config = Path(temporary) / "run.yaml"
        config.write_text(json.dumps(keys))
        command = [sys.executable, *TORCHRUN, "--nproc_per_node", str(RANKS), "--max-restarts"]
        command += [str(int(minutes / every) + 1), str(ROOT / "train.py"), str(config)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        log = out / "run" / "trainer_log.jsonl"
        begun = time.monotonic()
        with open(Path(temporary) / "said", "w") as said:
            agent = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
        try:
            wait_for_a_step(log, 0)
            start_s = time.monotonic() - begun
            while time.monotonic() + every * 60 < begun + minutes * 60:
                time.sleep(every * 60)
                os.kill(rng.choice(ranks_of(agent)).pid, signal.SIGKILL)
                kills += 1
            time.sleep(max(0.0, begun + minutes * 60 - time.monotonic()))
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(120)
        wall = time.monotonic() - begun
        lines = lines_of(log)
    step_s = statistics.median(line["step_time_s"] for line in lines)
    useful = lines[-1]["step"] * step_s
    lost = (wall - useful - start_s) / max(1, kills)
    return {
        "minutes": round(wall / 60, 1), "kills": kills, "steps kept": lines[-1]["step"],
        "step_s": round(step_s, 4), "first start_s": round(start_s, 1),
        "goodput": round(useful / wall, 4), "lost_s a kill": round(lost, 1),
        "goodput at a kill an hour": round(1 - lost / 3600, 4),
    }  # fmt: skip


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="goodput")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=5, help="minutes between kills")
    parser.add_argument("--save-steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    print(json.dumps(measure(options.minutes, options.every, options.save_steps, options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
