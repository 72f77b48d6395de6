"""The suite on another version of megatron-core: `make test-mcore VERSION=0.19.2`.

python -m tests.tools.minors VERSION [--subset] [words for pytest]

The version's wheel goes beside the environment, into output/megatron-core-VERSION, and comes first
on PYTHONPATH. Its wheels are for Python 3.12 and later; megatron-core's sources run on 3.11 as
well. Before the tests a run of the embedded example is started on each of the two versions and
resumed on the other, in another layout: the curves must agree. --subset: the files of SUBSET alone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.shared.training import most
from tests.tools import suite

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron-core"
PLATFORM = "manylinux_2_28_x86_64"
SUBSET = "parity model_mtp moe lora packed_layouts ckpt_layouts imports".split()
TOLERANCE = 1e-6
STEPS = 6
LAYOUTS = {"tp2": ["tensor_model_parallel_size=2"], "pp2": ["pipeline_model_parallel_size=2"]}


def install(version: str) -> Path:
    """The folder of a version, installed on first use."""
    folder = ROOT / "output" / f"{PACKAGE}-{version}"
    if not folder.is_dir():
        options = ["--no-deps", "--ignore-requires-python", "--only-binary=:all:"]
        options += ["--python-version", "3.12", "--platform", PLATFORM, "--target", str(folder)]
        pip = [sys.executable, "-m", "pip", "install", "-q", *options, f"{PACKAGE}=={version}"]
        subprocess.run(pip, check=True)
    return folder


def train(folder: Path | None, out: Path, *keys: str) -> list[float]:
    """Train the embedded example on two ranks -> losses by step. folder: of a megatron-core; None:
    that of the environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if folder is not None:
        environment["PYTHONPATH"] = str(folder)
    launch = "--standalone --local_addr 127.0.0.1 --nproc_per_node 2".split()
    words = f"train.py configs/sft.yaml output_dir={out} max_steps={STEPS} logging_steps=1".split()
    words += [
        f"save_steps={STEPS // 2}",
        "save_total_limit=9",
        "save_hf_model=false",
        "eval_strategy=no",
        *keys,
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    lines = (out / "trainer_log.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def resume_across(folder: Path) -> None:
    """Resume a run of each version on the other one. Exits with a line if the curves differ."""
    out = ROOT / "output" / "minors"
    directions = {"from the pin": (None, folder), "to the pin": (folder, None)}
    for name, (first, second) in directions.items():
        started = out / name.replace(" ", "_")
        whole = train(first, started / "whole", "overwrite_output_dir=true", *LAYOUTS["tp2"])
        checkpoint = started / "whole" / f"checkpoint-{STEPS // 2}"
        keys = ["overwrite_output_dir=true", f"resume_from_checkpoint={checkpoint}"]
        resumed = train(second, started / "resumed", *keys, *LAYOUTS["pp2"])
        rest = whole[-len(resumed) :]
        worst = most(abs(a - b) for a, b in zip(resumed, rest, strict=True))
        print(f"resumed {name}: {len(resumed)} steps, losses within {worst:.1e}", flush=True)
        if not (resumed and worst <= TOLERANCE):
            sys.exit(f"a checkpoint resumed {name} goes another way: {resumed}, not {rest}")


def main(words: list[str]) -> int:
    """Resume across versions, then run the suite -> exit code."""
    version, *words = words
    folder = install(version)
    resume_across(folder)
    os.environ["PYTHONPATH"] = str(folder)
    names = None
    if "--subset" in words:
        words.remove("--subset")
        names = SUBSET
    return suite.main(words, names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
