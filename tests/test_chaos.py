"""The short form of tests/tools/chaos.py, and a rank's death under a real torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import tiny, world
from tests.shared.commands import TORCHRUN
from tests.tools import chaos


@pytest.mark.full
def test_ranks_killed_at_random_moments_lose_nothing():
    short = {
        name: chaos.LAYOUTS[name]
        for name in ("dp2, distributed optimizer", "tp2, saved in the background")
    }
    assert chaos.run(6, seed=3, layouts=short) == 6


def test_torchrun_starts_again_from_the_last_checkpoint(tmp_path):
    path, out = tiny.save_model(tmp_path / "model", "qwen3"), tmp_path / "run"
    keys = (
        path,
        str(tmp_path / "calm"),
        str(tmp_path / "progress"),
        0,
        None,
        None,
        dict(use_distributed_optimizer=True),
    )
    [(wanted, _), _] = world.run(chaos.victim, 2, *keys)
    command = [sys.executable, *TORCHRUN]
    command += [
        "--nproc_per_node",
        "2",
        "--max-restarts",
        "2",
        "-m",
        "tests.tools.chaos",
        "--under-torchrun",
        path,
        str(out),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    result = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"resuming from {out}/checkpoint-4" in result.stdout, result.stdout
    assert result.stdout.count("resuming from") == 2
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert [(h["loss"], h["grad_norm"]) for h in history] == wanted
