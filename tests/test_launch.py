"""Launchers, the folder of a run, and its end: half described worlds, two runs in one folder, nodes
that share none, exports that a signal meets, and paths that lead nowhere.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from huggingface_hub.errors import LocalEntryNotFoundError

from mca_lite import ckpt_folder, cli, files
from mca_lite import world as launcher
from mca_lite.args import DataArguments, parse_args
from mca_lite.args_values import read_config_file
from mca_lite.ckpt_folder import OutputFolderError
from mca_lite.data import load_datasets
from mca_lite.data_files import resolve
from mca_lite.errors import ConfigError
from mca_lite.files import resolve_folder
from mca_lite.tables import OBJECTIVES
from mca_lite.weights_files import write_safetensors
from tests.shared import world
from tests.shared.commands import ROOT, SHORT, assert_names, keys_of, run_script
from tests.shared.training import read_log

TORCHRUN = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="a", MASTER_PORT="1")
SRUN = dict(SLURM_PROCID="3", SLURM_NTASKS="8", SLURM_LOCALID="1", SLURM_JOB_ID="70123")


def settled(monkeypatch, **variables) -> dict:
    """The environment after world.settle(), where these were the only variables."""
    monkeypatch.setattr(os, "environ", dict(variables))
    launcher.settle()
    return os.environ


@pytest.mark.parametrize(
    "variables, words",
    [
        (dict(RANK="1", WORLD_SIZE="2"), "without MASTER_ADDR and MASTER_PORT: set"),
        (dict(TORCHRUN, MASTER_ADDR=""), "without MASTER_ADDR"),
        (dict(WORLD_SIZE="2"), "without RANK and MASTER_ADDR and MASTER_PORT"),
        (dict(RANK="0"), "without WORLD_SIZE"),
        (dict(TORCHRUN, RANK="2"), "RANK is 2 in a world of WORLD_SIZE 2: expected 0 to 1"),
        (dict(TORCHRUN, RANK="-1"), "RANK is '-1', expected a whole number"),
        (dict(TORCHRUN, WORLD_SIZE="two"), "WORLD_SIZE is 'two', expected a whole number"),
        (dict(WORLD_SIZE="0"), "without RANK"),
        (SRUN, "task 3 of SLURM_NTASKS 8, and MASTER_ADDR cannot"),
        (dict(SLURM_PROCID="0", SLURM_NTASKS="2", MASTER_ADDR="a"), "LOCAL_RANK cannot"),
        (dict(SRUN, SLURM_JOB_NODELIST="n[1-2]"), "MASTER_ADDR cannot"),  # a batch script, no srun
        (dict(SRUN, SLURM_STEP_NODELIST="n[1-2]-ib"), "MASTER_ADDR cannot"),
    ],
)
def test_a_half_described_world_is_refused_before_anything_is_read_or_written(
    monkeypatch, capsys, tmp_path, variables, words
):
    with pytest.raises(ValueError, match=words):
        settled(monkeypatch, **variables)
    os.environ["LOCAL_RANK"] = "0"  # the rank that speaks
    assert cli.main(["configs/sft.yaml", f"output_dir={tmp_path / 'out'}"]) == 2
    assert capsys.readouterr().err.startswith("error: ") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "variables",
    [{}, TORCHRUN, dict(WORLD_SIZE="1"), dict(SLURM_NTASKS="8"), dict(SRUN, **TORCHRUN)]
    + [dict(SRUN, SLURM_NTASKS="1"), dict(RANK="0", WORLD_SIZE="1")],
)
def test_a_world_that_is_described_or_not_mentioned_stays_as_it_is(monkeypatch, variables):
    assert settled(monkeypatch, **variables) == variables


@pytest.mark.parametrize(
    "variables, host",
    [
        (dict(SLURM_STEP_NODELIST="node7"), "node7"),
        (dict(SLURM_STEP_NODELIST="rack1-node[03-05,9],other"), "rack1-node03"),
        (dict(SLURM_STEP_NODELIST="a.b,c"), "a.b"),
        (dict(SLURM_STEP_NODELIST="node7", SLURM_NNODES="1"), "node7"),
        (dict(MASTER_ADDR="mine", SLURM_STEP_NODELIST="node7"), "mine"),
    ],
)
def test_sruns_variables_describe_a_world(monkeypatch, variables, host):
    found = settled(monkeypatch, **SRUN, **variables)
    assert [found[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["3", "8", "1"]
    assert found["MASTER_ADDR"] == host and found["MASTER_PORT"] == "20123"
    assert found.get("LOCAL_WORLD_SIZE") == ("8" if "SLURM_NNODES" in variables else None)


# -- the folder of a run


HOLD = """
import sys, time
from mca_lite import ckpt_folder
with ckpt_folder.hold(sys.argv[1]):
    print("has it", flush=True)
    time.sleep(120)
"""


def test_a_folder_belongs_to_one_run_until_its_process_is_gone(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", HOLD, str(out)]
    other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "has it\n"
        words = "another run trains in .* has locked .run.lock"
        with pytest.raises(OutputFolderError, match=words), ckpt_folder.hold(out):
            raise AssertionError("two runs have the folder")
    finally:
        other.kill()
        other.wait()
    with ckpt_folder.hold(out), ckpt_folder.hold(out):  # of one process: counted
        assert (out / ckpt_folder.LOCK_NAME).is_file()
    assert not out.exists(), "nothing was written there"
    with ckpt_folder.hold(out):
        (out / "checkpoint-1").mkdir()
    # another run may be waiting for the lock's file
    assert {path.name for path in out.iterdir()} == {"checkpoint-1", ckpt_folder.LOCK_NAME}


def test_the_command_line_says_who_has_the_folder(tmp_path):
    with ckpt_folder.hold(tmp_path / "out"):
        there = sorted((tmp_path / "out").iterdir())
        result = run_script(
            f"configs/sft.yaml {SHORT} use_mca=false max_samples=50 output_dir={tmp_path / 'out'}",
            tmp_path,
            code=2,
        )
        assert sorted((tmp_path / "out").iterdir()) == there
    assert result.stderr.splitlines()[-1].startswith("error: another run trains in")
    assert "Traceback" not in result.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OutputFolderError, match="output_dir .*file cannot be written .*exists"),
        ckpt_folder.hold(tmp_path / "file"),
    ):
        pass


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def without(*args, **kwargs):
        # filelock's own error on such a file system
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(ckpt_folder.FileLock, "acquire", without)
    with ckpt_folder.hold(tmp_path / "out"):
        assert "has no locks: let no other run write there" in capsys.readouterr().out


def hold_from_a_folder_of_ones_own(folder: str) -> str:
    import torch.distributed as dist

    from mca_lite import ckpt_folder

    ckpt_folder.SEE_S = 0.5
    os.makedirs(f"{folder}/{dist.get_rank()}")
    os.chdir(f"{folder}/{dist.get_rank()}")
    try:
        with ckpt_folder.hold("out"):
            return "held"
    except ckpt_folder.OutputFolderError as error:
        return str(error)


def hold(folder: str) -> tuple[list[str], list[float]]:
    """(what is there for the rank that has removed the probe, the seconds that this rank slept)."""
    from mca_lite import ckpt_folder, parallel

    slept: list[float] = []
    wait, touch = time.sleep, Path.touch
    ckpt_folder.time.sleep = slept.append
    Path.touch = lambda *args: (wait(0.2), touch(*args))  # a slow disk
    with ckpt_folder.hold(folder):
        return sorted(os.listdir(folder)) if parallel.is_main() else [], slept


def test_nodes_that_share_no_folder_are_found_before_the_first_step(tmp_path):
    answers = world.run(hold_from_a_folder_of_ones_own, 2, str(tmp_path))
    assert answers[0] == answers[1]
    assert f"rank 1: it is not on {socket.gethostname()} in {tmp_path}/1/out" in answers[0]
    assert not (tmp_path / "1/out").exists()
    answers = world.run(hold, 2, str(tmp_path / "shared"))
    assert answers == [([ckpt_folder.LOCK_NAME], []), ([], [])], "the probe is there at once"


@pytest.mark.full
def test_two_agents_with_homes_of_their_own_train_save_and_resume_elsewhere(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / "out"
    words = f"configs/sft.yaml {SHORT} max_samples=50 output_dir={out} save_strategy=steps".split()
    words += ["save_steps=2", "tensor_model_parallel_size=2", "overwrite_output_dir=false"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--local_addr"]
    command += ["127.0.0.1", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint"]
    command += [f"127.0.0.1:{port}", "train.py", *words]
    agents = []
    for node in range(2):
        home = tmp_path / f"home{node}"
        home.mkdir()
        env = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        env["XDG_CACHE_HOME"] = str(home / ".cache")
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        agents.append(subprocess.Popen(command, cwd=ROOT, env=env, **pipes))
    try:
        said = [agent.communicate(timeout=240)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    assert (out / "model.safetensors").is_file() and (out / "checkpoint-3/manifest.json").is_file()
    words = f"configs/sft.yaml {SHORT} max_samples=50 output_dir={out} max_steps=4"
    run_script(f"{words} resume_from_checkpoint=auto overwrite_output_dir=false", tmp_path)
    assert [line["step"] for line in read_log(out)] == [1, 2, 3, 4]


def fake_slurm(folder: Path) -> None:
    """Commands of SLURM for two hosts that are this one; requeue writes a file."""
    python = f"exec {sys.executable} -m torch.distributed.run --local_addr 127.0.0.1"
    scripts = {
        "torchrun": f'{python} "$@"',
        "srun": '"$@" &\none=$!\n"$@" &\nwait $one; code=$?\nwait $!\nexit $code',
        "scontrol": f'[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> {folder}/requeued',
    }
    (folder / "bin").mkdir()
    for name, text in scripts.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)


def submit(folder: Path, port: int, *words: str) -> subprocess.Popen:
    job = dict(SLURM_JOB_NODELIST="a,b", SLURM_NNODES="2", SLURM_JOB_ID="7", PORT=str(port))
    env = {**os.environ, **job, "SLURM_GPUS_ON_NODE": "1", "OMP_NUM_THREADS": "1"}
    env |= {"PATH": f"{folder}/bin:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo"}
    command = ["bash", "configs/two_hosts.sbatch", "configs/sft.yaml", f"{folder}/out", *words]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes)


@pytest.mark.full
def test_the_job_of_two_hosts_is_queued_again_after_its_signal_and_goes_on(tmp_path):
    fake_slurm(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*SHORT.split(), "max_samples=50", f"cache_dir={tmp_path}/cache", "save_strategy=steps"]
    words += ["overwrite_output_dir=false", "lr_scheduler_type=constant", "warmup_steps=0"]
    first = submit(tmp_path, port, *words, "max_steps=400")
    try:
        log = tmp_path / "out" / "trainer_log.jsonl"
        while first.poll() is None and not (log.is_file() and len(log.read_text()) > 500):
            time.sleep(0.2)
        children = psutil.Process(first.pid).children(recursive=True)
        agents = [one for one in children if "torch.distributed.run" in one.cmdline()]
        assert len(agents) == 2
        for agent in agents:  # as SLURM does with --signal=USR1@300
            agent.send_signal(signal.SIGUSR1)
        said = first.communicate(timeout=240)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
    assert first.returncode != 0, said
    assert (tmp_path / "requeued").read_text() == "requeue 7\n", said
    done = read_log(tmp_path / "out")[-1]["step"]
    second = submit(tmp_path, port, *words, f"max_steps={done + 2}")
    said = second.communicate(timeout=240)[0]
    assert second.returncode == 0, said
    assert [line["step"] for line in read_log(tmp_path / "out")] == [*range(1, done + 3)]
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


# -- the end of a run


def export_interrupted(out: str, cache: str, number: int):
    """(exit code, files) of a run in which every weight file of the export brings a signal."""
    import safetensors.torch

    from mca_lite import cli

    save_file = safetensors.torch.save_file

    def save_and_send(*args, **options):
        os.kill(os.getpid(), number)
        save_file(*args, **options)

    safetensors.torch.save_file = save_and_send
    os.chdir(ROOT)
    words = f"configs/sft.yaml {SHORT} max_steps=1 max_samples=50 max_shard_size=100KB"
    code = cli.main([*words.split(), f"output_dir={out}", f"cache_dir={cache}"])
    return code, sorted(os.listdir(out))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_export_leaves_a_whole_model(tmp_path, number):
    [(code, names)] = world.run(
        export_interrupted, 1, str(tmp_path / "out"), str(tmp_path / "cache"), number
    )
    assert code == 0 and "model.safetensors.index.json" in names and "tokenizer.json" in names
    assert not [name for name in names if name.endswith(".tmp")]


def as_a_script(folder: str, words: list[str]) -> tuple[int, str]:
    """(exit code, what it and its processes print as errors) of a script without a guard."""
    script, errors = Path(folder) / "script.py", Path(folder) / "errors"
    script.write_text("import sys\nfrom mca_lite import cli\nsys.exit(cli.main(sys.argv[1:]))\n")
    os.chdir(ROOT)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    dist.destroy_process_group()
    sys.argv = [str(script), *words]
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
        sys.stderr = file
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script), run_name="__main__")
    return end.value.code, errors.read_text()


def test_a_script_without_a_guard_ends_in_words_where_it_starts_processes(tmp_path):
    data = tmp_path / "texts.jsonl"  # of two chunks: one needs no process
    data.write_text(501 * '{"text": "a"}\n')
    words = ["configs/sft.yaml", f"output_dir={tmp_path / 'out'}", "preprocessing_num_workers=2"]
    words += [f"cache_dir={tmp_path / 'cache'}", "max_steps=1", "stage=pt"]
    words += [f"dataset={data}", "eval_dataset=null", "eval_strategy=no"]
    [(code, errors)] = world.run(as_a_script, 1, str(tmp_path), words)
    assert code == 2
    assert_names(errors, "error: a process that helps a run", "error: a tokenising process died")
    assert "Traceback" not in errors and errors.count("`if __name__ == '__main__':`") >= 2


def test_who_loads_data_while_a_script_is_imported_again_is_ended(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    for start in (lambda: cli.main(["max_steps=1"]), lambda: load_datasets(None, "sft", None)):
        with pytest.raises(SystemExit, match="`if __name__ == '__main__':` in your script"):
            start()


def test_ctrl_c_before_training_is_one_line(monkeypatch, capsys):
    def interrupt(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parse_args", interrupt)
    assert cli.main(["configs/sft.yaml"]) == cli.INTERRUPTED
    [line] = capsys.readouterr().err.splitlines()
    assert "interrupted" in line


def test_a_failed_or_killed_export_leaves_no_temporary_file(tmp_path):
    import torch

    def tensors(last):
        yield "a", torch.zeros(300)
        yield "b", torch.zeros(300)
        if last is None:
            raise KeyboardInterrupt
        yield "c", last

    with pytest.raises(KeyboardInterrupt):
        write_safetensors(tensors(None), tmp_path, 1300)
    assert list(tmp_path.iterdir()) == []
    write_safetensors(tensors(torch.zeros(1)), tmp_path, 1300)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[:-1] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


# -- paths that lead nowhere


def test_a_mistyped_folder_of_a_model_is_told_and_no_hub_is_asked(tmp_path, monkeypatch, capsys):
    def ask(*args, **options):
        raise AssertionError("a hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", ask)
    (tmp_path / "qwen3-tiny").mkdir()
    monkeypatch.chdir(tmp_path.parent)
    for name in (str(tmp_path / "qwen-tiny"), f"{tmp_path.name}/qwen-tiny"):
        with pytest.raises(ValueError, match="no such folder"):
            resolve_folder(name)
    for name in ("./qwen", "a/b/c", "~/no/such", ""):
        with pytest.raises(ValueError, match="no such folder"):
            resolve_folder(name)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="expected a folder"):
        resolve_folder(str(tmp_path / "file"))
    config = str(ROOT / "configs/sft.yaml")
    words = [config, f"model_name_or_path={tmp_path / 'qwen-tiny'}", f"output_dir={tmp_path}/out"]
    assert cli.main(words) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, words",
    [
        (LocalEntryNotFoundError("[Errno -2] Name or service not known"), "does not answer"),
        (OSError("500 Server Error\nan id"), "the hub says: 500 Server Error"),
    ],
)
def test_a_name_that_the_hub_does_not_give_is_told_in_a_line(monkeypatch, error, words):
    def ask(*args, **options):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", ask)
    with pytest.raises(ValueError) as caught:
        resolve_folder("missing")
    told = str(caught.value)
    assert (
        told.startswith("model missing: expected a folder, or a model of the hub") and words in told
    )
    assert "Errno" not in told and "\n" not in told
    assert "USE_MODELSCOPE" in told
    assert "modelscope download --model " in told


def test_a_hub_out_of_reach_is_asked_once_and_the_words_speak_of_the_network(monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits to ask again"))
    words = "model_name_or_path=someone/model dataset=a.jsonl output_dir=unused"
    [problem] = keys_of(parse_args, words.split()).values()
    assert problem.key == "model_name_or_path" and "is there a network?" in problem.reason


@pytest.mark.parametrize("name", ["gpt2", "someone/model"])
def test_what_may_be_a_name_of_the_hub_is_asked_for_there(name):
    assert files.may_be_on_hub(name)


def test_pipes_are_refused_as_data_and_as_configuration(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "pipe.yaml")
    for entry in (str(tmp_path / "pipe.jsonl"), str(tmp_path)):
        with pytest.raises(ValueError, match=r"pipe.jsonl: expected a file; .* a pipe"):
            resolve([entry], DataArguments(dataset=[entry]), OBJECTIVES["sft"])
    with pytest.raises(ConfigError, match="it is absent, or no file"):
        read_config_file(tmp_path / "pipe.yaml")
