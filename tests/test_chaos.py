"""The short form of tests/tools/chaos.py, and a rank's death under a real torchrun."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mca_lite import ckpt_folder
from tests.shared import tiny, training, world
from tests.shared.commands import TORCHRUN
from tests.shared.files import flip_bit
from tests.tools import chaos

SHORT = ("tp2, saved in the background", "the token cache")
PREFERENCES = ("DPO of LoRA, packed, saved in the background", "DPO's reference pass")


@pytest.mark.full
@pytest.mark.parametrize("seed, names", [(3, SHORT), (4, PREFERENCES)])
def test_ranks_killed_at_random_moments_lose_nothing(seed, names):
    assert chaos.run(5, seed, names) == 5


def test_a_checkpoint_that_is_damaged_or_missing_after_a_kill_is_noticed(tmp_path):
    """The check of the tool itself."""
    campaign = chaos.Campaign(tmp_path, tmp_path / "run", "pp2")
    folder = ckpt_folder.checkpoint_folder(campaign.out, 2)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"whole")
    facts = {"backend": "megatron", "step": 2, "with_optimizer": True, "model": {}}
    ckpt_folder.write_manifest(folder, facts, {"weights": ckpt_folder.measure(folder / "weights")})
    log = campaign.out / "trainer_log.jsonl"
    log.write_text('{"step": 4}\n{"step": 5')
    campaign.check()
    log.write_text('{"step": 4}\n{"step": 5}\n')
    with pytest.raises(AssertionError, match="newest checkpoint is 2, and 4 was due"):
        campaign.check()
    flip_bit(folder / "weights")
    with pytest.raises(AssertionError, match="unreadable"):
        campaign.check()


def under_the_agent(path: str, out: str, logs: str) -> str:
    """What the ranks of torchrun's own agent say: it forks them from this process, which has
    imported everything.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    dist.destroy_process_group()  # the ranks make their own
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=len(chaos.POINTS), run_id="chaos",
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1",
        start_method="fork", monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL),
    )  # fmt: skip
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    elastic_launch(config, chaos.under_torchrun)(path, out)
    return "".join(file.read_text() for file in sorted(Path(logs).glob("**/0/stdout.log")))


def run_torchrun(path: str, out: str) -> str:
    command = [sys.executable, *TORCHRUN, "--nproc_per_node", "2"]
    command += ["--max-restarts", str(len(chaos.POINTS))]
    command += ["-m", "tests.tools.chaos", "--under-torchrun", path, out]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    result = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.full)])
def test_torchrun_starts_again_from_the_last_checkpoint_after_a_kill_at_each_point(real, tmp_path):
    """real: the command itself, whose ranks import everything at each of the starts."""
    path, out = tiny.save_model(tmp_path / "model", "qwen3"), str(tmp_path / "run")
    calm = world.run(training.train, 2, path, str(tmp_path / "calm"), **chaos.UNDER_TORCHRUN)
    if real:
        said = run_torchrun(path, out)
    else:
        [said] = world.run(under_the_agent, 1, path, out, str(tmp_path / "logs"), timeout_s=200)
    starts = re.findall(r"(?:resuming from|no checkpoint in) (\S+?):?(?: starting|\n)", said)
    assert starts == [out, *[f"{out}/checkpoint-4"] * 4, f"{out}/checkpoint-6"], said
    assert "skipped checkpoint-6: " in said, "the folder that had taken its name"
    history = json.loads(Path(out, "trainer_state.json").read_text())["log_history"]
    assert [(h["loss"], h["grad_norm"]) for h in history] == calm[0]
