"""`make test`: the suite in two processes, since most worlds of ranks leave a core idle. Each takes
the next file that the other has not taken, the slowest first; both end within one short file. A
third has the files that mostly wait.

python -m tests.tools.suite [words for pytest]
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROCESSES = 2
# the folder in which a process writes down which files it has taken
TAKEN = "SUITE_TAKEN"
# the files that take longest, the slowest first; others take under 4 s each
SLOWEST = """vision golden parts long model_families keys model_mtp moe lora_files vision_torch
registries ckpt ckpt_safety optim_muon dpo_reference distill nonfinite quantised
policy quantised_adam session_weights session exports routes policy_stage sleep
trainer moe_lora plan packed_layouts data lora preference_losses dpo foreign_examples
freeze moe_ckpt moe_weights parity imports images_runs ckpt_layouts weights_vocabulary
cli_doctor weights cli cli_errors inspect data_stream_runs kto vendor rm
parity_command structure trainer_events dpo_cli deterministic lora_cli lora_errors
model_delta plan_time predict model_fused dpo_moe distill_cache loss_logits te offload
optim_adam cli_convert data_stream lora_merge additional_configs told""".split()
# files that mostly wait, for timeouts and processes of their own: a third process runs them beside
# the others
WAITING = "watchdog hosts slowest world launch chaos".split()


def in_order(files: list[Path]) -> list[Path]:
    """The slow files as SLOWEST has them, then the others by name, those of WAITING last."""
    places = {f"test_{name}": place for place, name in enumerate(SLOWEST)}
    last = len(places) + 1
    places |= {path.stem: last for path in those_that_wait(files)}
    return sorted(files, key=lambda path: (places.get(path.stem, last - 1), path.name))


def those_that_wait(files: list[Path]) -> list[Path]:
    return [path for path in files if path.stem.removeprefix("test_") in WAITING]


class OneOfTwo:
    """A plugin of pytest: of the files, those that no other process has taken."""

    def __init__(self, taken: str):
        self.taken, self.is_mine = Path(taken), {}

    def take(self, path: Path) -> bool:
        """True if this process runs the tests of a file: the first one that takes it does."""
        if path not in self.is_mine:
            try:
                (self.taken / path.name).touch(exist_ok=False)
                self.is_mine[path] = True
            except FileExistsError:
                self.is_mine[path] = False
        return self.is_mine[path]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        return None if self.take(item.path) else True  # True: nothing is left to do


def pytest_configure(config):
    if TAKEN in os.environ:
        config.pluginmanager.register(OneOfTwo(os.environ[TAKEN]))


def keep_to(cores: list[int]) -> None:
    """Ranks that wait for each other all the time wake up sooner on a core of their own."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def start(cores: list[int], words: list[str], files, taken: str, out) -> subprocess.Popen:
    command = [sys.executable, "-m", "pytest", "-q", "-p", __spec__.name, *map(str, files), *words]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, TAKEN: taken}
    return subprocess.Popen(
        command, env=environment, stdout=out, stderr=out, preexec_fn=lambda: keep_to(cores)
    )


def main(words: list[str], names: list[str] | None = None) -> int:
    """Run the processes at once; the first shows its progress, the others follow as a whole -> 0,
    or the first exit code. names: those of the files, without test_; None: all.
    """
    files = list(TESTS.glob("test_*.py"))
    if names is not None:
        files = [TESTS / f"test_{name}.py" for name in names]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with tempfile.TemporaryDirectory() as taken, tempfile.TemporaryFile("w+") as out:
        running = []
        if waiting := those_that_wait(files):
            running.append(start(cores, words, waiting, taken, out))
        for number in range(PROCESSES):
            own = cores[number::PROCESSES] or cores
            running.append(start(own, words, in_order(files), taken, out if number else None))
        codes = [process.wait() for process in running]
        out.seek(0)
        print(out.read(), flush=True)
    found_some = [code for code in codes if code != pytest.ExitCode.NO_TESTS_COLLECTED] or codes
    return next((code for code in found_some if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
