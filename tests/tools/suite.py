"""`make test`: the suite in two processes, since most worlds of ranks leave a core idle. Each takes
the next file that the other has not taken, the slowest first; both end within one short file.

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
# the files that take longest, the slowest or longest waiting first; others take under 5 s each
SLOWEST = """vision model_families moe optim_muon ckpt_safety watchdog keys hosts vision_torch
lora_files
trainer dpo_reference ckpt nonfinite packed_layouts moe_lora distill preference_losses
registries model_mtp plan lora data dpo moe_ckpt moe_weights cli freeze imports plan_time
weights ckpt_layouts parity cli_doctor weights_vocabulary chaos launch foreign_examples rm
additional_configs kto world cli_chat lora_errors structure images_runs predict parity_command
model_linears
trainer_events data_stream_runs deterministic cli_errors data_stream model_fused model_delta
cli_convert dpo_moe watch lora_cli inspect query_groups offload loss_logits""".split()


def in_order(files: list[Path]) -> list[Path]:
    """The slow files as SLOWEST has them, then the others by name."""
    places = {f"test_{name}": place for place, name in enumerate(SLOWEST)}
    return sorted(files, key=lambda path: (places.get(path.stem, len(places)), path.name))


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


def start(number: int, words: list[str], files, taken: str, out) -> subprocess.Popen:
    files = map(str, in_order(files))
    command = [sys.executable, "-m", "pytest", "-q", "-p", __spec__.name, *files, *words]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, TAKEN: taken}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    own = cores[number::PROCESSES] or cores
    return subprocess.Popen(
        command, env=environment, stdout=out, stderr=out, preexec_fn=lambda: keep_to(own)
    )


def main(words: list[str], names: list[str] | None = None) -> int:
    """Run both processes at once; the first shows its progress, the other follows as a whole -> 0,
    or the first exit code. names: those of the files, without test_; None: all.
    """
    codes = []
    files = list(TESTS.glob("test_*.py"))
    if names is not None:
        files = [TESTS / f"test_{name}.py" for name in names]
    with tempfile.TemporaryDirectory() as taken, tempfile.TemporaryFile("w+") as out:
        running = [start(n, words, files, taken, out if n else None) for n in range(PROCESSES)]
        for process in running:
            codes.append(process.wait())
        out.seek(0)
        print(out.read(), flush=True)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
