"""The command line in tests: train.py on ranks and as a process, `convert`, and the keys that a
ConfigError names.
"""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mca_lite.errors import ConfigError
from tests.shared import world

ROOT = Path(__file__).parents[2]
SHORT = (
    "max_steps=3 logging_steps=1 eval_strategy=no save_strategy=no global_batch_size=8 "
    "per_device_train_batch_size=2"
)

TORCHRUN = "-m torch.distributed.run --standalone --local_addr 127.0.0.1".split()


def ended(main, words: list[str]) -> tuple[int, str, str]:
    """(exit code, what was printed, what was printed as an error) of a command's main()."""
    os.chdir(ROOT)
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(words)
    return code, out.getvalue(), error.getvalue()


def answer(main, words: str) -> tuple[int, str]:
    """(exit code, all that was printed) of a command's main()."""
    code, out, error = ended(main, words.split())
    return code, out + error


def run_train(words: list[str]) -> tuple[int, str, str]:
    from mca_lite import cli

    return ended(cli.main, words)


def run_script(words: str, tmp_path, nproc: int = 1, code: int = 0) -> SimpleNamespace:
    """`train.py words` on `nproc` ranks of a test world, which have imported everything -> stdout,
    stderr of all.
    """
    argv = [*words.split(), f"cache_dir={tmp_path / 'cache'}"]
    codes, out, error = zip(*world.run(run_train, nproc, argv, timeout_s=240), strict=True)
    assert codes == (code,) * nproc, "".join(out + error)
    return SimpleNamespace(stdout="".join(out), stderr="".join(error))


def alone(command, *words: str) -> tuple[int, str, str]:
    """`command(words)` on the one rank of a test world as a process without a launcher meets it: no
    process group is there, and no variable speaks of one.
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    without_launcher()
    return command(list(words))


def without_launcher() -> None:
    """Remove a launcher's variables from the environment: this process is a world of one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def run_all(base: str, runs: dict[str, str], folder: str) -> None:
    """Run {name: words} one after another, by the command line on this rank without a launcher.

    The words follow those of `base`, and the last value of a key counts; {folder} and {name} stand
    for this folder and the run's name.
    """
    from mca_lite import cli

    without_launcher()
    for name, words in runs.items():
        given = f"{base} {words}".format(folder=folder, name=name).split()
        last = {word.partition("=")[0]: word for word in given}
        assert cli.main(list(last.values())) == 0, name


def run_under_torchrun(words: str, tmp_path, nproc: int) -> subprocess.CompletedProcess:
    """`torchrun train.py words` as in a shell: seconds of imports for each process."""
    command = [sys.executable, *TORCHRUN, "--nproc_per_node", str(nproc), "train.py"]
    command += [*words.split(), f"cache_dir={tmp_path / 'cache'}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def assert_names(text: str, *words) -> None:
    """A message holds these keys, values and remedies, in whatever wording."""
    lacking = [word for word in words if str(word) not in text]
    assert not lacking, f"{lacking} not in {text!r}"


def keys_of(call, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return {problem.key: problem for problem in caught.value.problems}


def error_of(call, *args, **kwargs) -> str:
    """The text of the ValueError that a call raises."""
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def run_convert(words: list[str]) -> tuple[int, str, str]:
    from mca_lite.tool_convert import main

    return ended(main, words)


def convert(*words) -> tuple[int, str, str]:
    """`python -m mca_lite convert words`, in a process that has imported everything."""
    return world.run(alone, 1, run_convert, *map(str, words))[0]
