"""How a command ends that went wrong: 'error:' and exit code 2, or a traceback that is kept in a
file.
"""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mca_lite
from mca_lite import __main__, cli, tool_inspect
from mca_lite.args_values import read_config_file
from mca_lite.errors import ConfigError
from mca_lite.files import check_can_write, describe_error
from tests.shared import world
from tests.shared.commands import ROOT, SHORT, assert_names


@pytest.fixture
def error_of(monkeypatch, capsys, tmp_path):
    """(exit code, what was printed as an error) of the command line whose run raises an error."""
    from mca_lite import run

    def end(error: Exception, out: Path = tmp_path, **environment) -> tuple[int, str]:
        package = {"error": error}  # a function of this package, by its file
        exec(compile("def make_plan(arguments): raise error", run.__file__, "exec"), package)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(run, "make_plan", package["make_plan"])
        code = cli.main([*f"configs/sft.yaml {SHORT}".split(), f"output_dir={out}"])
        return code, capsys.readouterr().err

    return end


@pytest.mark.parametrize(
    "error, words",
    [
        (ValueError("weights do not fit"), "error: weights do not fit\n"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "disk full: [Errno 28] No space left on ",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "log"), "disk full: [Errno 122]"),
        (PermissionError(errno.EACCES, "Permission denied", "home"), "Permission denied: 'home'"),
        (MemoryError(), "error: MemoryError: out of memory"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected"), "No space left"),
    ],
)
def test_what_a_user_can_put_right_ends_with_its_words_and_code_2(error_of, tmp_path, error, words):
    code, shown = error_of(error)
    assert code == cli.USER_ERROR and shown.startswith("error: ") and words in shown
    assert shown.count("\n") == 1 and not list(tmp_path.glob("traceback*"))


NO_TEXT = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")


@pytest.mark.parametrize("error", [KeyError("moe_layer_freq"), AssertionError(), NO_TEXT])
def test_a_defect_leaves_its_traceback_in_a_file(error_of, tmp_path, error):
    code, shown = error_of(error)
    kept = tmp_path / "traceback-rank0.txt"
    assert code == 1 and shown.count("\n") == 1
    assert f"(a defect of mca_lite; the traceback is in {kept})" in shown
    assert type(error).__name__ in shown and "in make_plan" in kept.read_text()


def test_a_traceback_goes_to_the_temporary_folder_where_output_dir_takes_none(
    error_of, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, shown = error_of(KeyError("x"), tmp_path / "not there")
    [kept] = tmp_path.glob("mca_lite-*-traceback-rank0.txt")
    assert code == 1 and str(kept) in shown and not (tmp_path / "not there").exists()


def test_a_traceback_follows_no_link_in_the_temporary_folder(error_of, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "mine").write_text("kept")
    planted = tmp_path / f"mca_lite-{os.getpid()}-traceback-rank0.txt"
    planted.symlink_to(tmp_path / "mine")
    error_of(KeyError("x"), tmp_path / "not there")
    [kept] = [path for path in tmp_path.glob("mca_lite-*") if path != planted]
    assert (tmp_path / "mine").read_text() == "kept" and "KeyError" in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_loaders_worker_that_the_system_ends_is_no_defect(error_of):
    code, shown = error_of(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
    assert code == 2 and "pid 7" in shown and "dataloader_num_workers" in shown
    assert "defect" not in shown


def test_a_full_disk_of_stdout_is_not_blamed_on_the_folder():
    """/dev/full is a disk without room."""
    script = "import sys; from mca_lite import cli\n"
    script += "try:\n    print('line', flush=True)\n"
    script += "except OSError as error:\n    sys.exit(cli.end(error, '/tmp'))"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "disk full" in done.stderr and "stdout" in done.stderr
    assert "output_dir" not in done.stderr


def test_torchrun_is_given_the_words_and_not_those_of_a_rank_that_lost_another(error_of, tmp_path):
    path = tmp_path / "error.json"
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]")
    code, shown = error_of(lost, TORCHELASTIC_ERROR_FILE=str(path))
    assert code == 1 and "another rank is gone" in shown and not path.exists()
    world = dict(RANK="3", WORLD_SIZE="4", MASTER_ADDR="host", MASTER_PORT="1")
    code, shown = error_of(ValueError("lacks a file"), LOCAL_RANK="1", **world)
    assert code == 2 and shown == "error: rank 3: lacks a file\n"
    assert json.loads(path.read_text())["message"]["message"] == "error: lacks a file"


def test_under_torchrun_the_words_stand_last(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["--local_addr=127.0.0.1", "train.py", "configs/sft.yaml", "bf16=maybe"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    last = result.stderr.rpartition("Root Cause")[2]
    assert result.returncode and "bf16" in last and "expected true or false" in last


ENDED_BY_TORCHRUN = """
import os, signal, sys, threading
from mca_lite import cli
cli.WAIT_S = 60.0
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
sys.exit(cli.end(ValueError("weights do not fit"), None))
"""


def test_a_rank_that_torchrun_ends_after_another_is_no_failure_in_its_summary():
    env = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", ENDED_BY_TORCHRUN]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0 and done.stderr == ""


def test_an_output_dir_with_checkpoints_is_refused_before_anything_is_planned(
    tmp_path, monkeypatch, capsys
):
    from mca_lite import run

    monkeypatch.setattr(run, "make_plan", lambda arguments: pytest.fail("it reads the data"))
    monkeypatch.chdir(ROOT)
    (tmp_path / "checkpoint-2").mkdir()
    words = f"configs/sft.yaml {SHORT} output_dir={tmp_path} overwrite_output_dir=false"
    assert cli.main(words.split()) == cli.USER_ERROR
    assert "holds checkpoints of an earlier run" in capsys.readouterr().err


def test_the_writer_of_archives_hides_a_full_disk_and_we_do_not():
    for name in ("/dev/full", open("/dev/full", "wb", buffering=0)):  # noqa: SIM115
        with pytest.raises((RuntimeError, OSError)) as caught:
            torch.save(torch.zeros(100_000), name)
        assert "disk full: " in (told := describe_error(caught.value))
        assert "No space left on device" in told


def test_a_folder_that_cannot_be_written_is_known_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="output_dir: .*is no folder"):
            check_can_write(folder, "output_dir")
    check_can_write(tmp_path / "a" / "b", "output_dir")
    assert os.listdir(tmp_path) == ["file"]
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match=f"{tmp_path} is no folder, or may not be"):
        check_can_write(tmp_path / "a", "output_dir")


@pytest.mark.parametrize("key", ["output_dir", "cache_dir"])
def test_a_file_in_place_of_a_folder_is_refused_before_tokenising(
    tmp_path, monkeypatch, capsys, key
):
    monkeypatch.chdir(ROOT)
    (tmp_path / "file").write_text("")
    folders = {"output_dir": tmp_path / "out", "cache_dir": tmp_path / "cache"}
    folders[key] = tmp_path / "file" / "folder"
    words = [f"{name}={folder}" for name, folder in folders.items()]
    code = cli.main([*f"configs/sft.yaml {SHORT} use_mca=false".split(), *words])
    shown = capsys.readouterr().err
    assert code == 2 and shown.startswith("error: ") and key in shown and shown.count("\n") == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()


def test_a_home_that_cannot_be_written_is_refused_with_what_to_set(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MCA_LITE_CACHE", raising=False)
    words = f"configs/sft.yaml {SHORT} use_mca=false cache_dir=null output_dir={tmp_path / 'out'}"
    assert cli.main(words.split()) == 2
    shown = capsys.readouterr().err
    assert "set cache_dir" in shown and shown.count("\n") == 1


def train_with_full_disk(
    out: str, cache: str, file: str, use_mca: str
) -> tuple[int, str, list[str]]:
    """(exit code, error, files left) of a run that finds the disk full when it writes a file of its
    folder or of a checkpoint: the system itself says so, for /dev/full."""
    from mca_lite import ckpt, files

    # the names of temporary files are known
    files.uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0"))

    def link(folder: Path) -> None:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).symlink_to("/dev/full")

    def make_empty(folder: Path, make=ckpt.make_empty) -> None:
        make(folder)
        link(folder)

    if "config.yaml" in file:
        link(Path(out))
    else:
        ckpt.make_empty = make_empty
    os.chdir(ROOT)
    said, words = io.StringIO(), f"configs/sft.yaml {SHORT} save_strategy=steps max_steps=1"
    words += f" max_samples=20 output_dir={out} cache_dir={cache} use_mca={use_mca}"
    with contextlib.redirect_stderr(said):
        code = cli.main(words.split())
    return code, said.getvalue(), [path.name for path in Path(out).glob("*")]


FILES = [
    (".config.yaml.0.tmp", "false"),
    ("dist/__0_0.distcp", "true"),
    (".rng-0.pt.0.tmp", "false"),
]


@pytest.mark.parametrize("file, use_mca", FILES)
def test_a_full_disk_is_called_so_and_leaves_no_checkpoint(tmp_path, file, use_mca):
    out, cache = str(tmp_path / "out"), str(tmp_path / "cache")
    [(code, said, left)] = world.run(train_with_full_disk, 1, out, cache, file, use_mca)
    assert code == 2 and "disk full: " in said and "No space left on device" in said and out in said
    assert said.splitlines()[-1].startswith("error: ")
    assert not [name for name in left if "checkpoint" in name]


def test_a_missing_requirement_is_told_with_the_interpreter(error_of):
    code, printed = error_of(ModuleNotFoundError("No module named 'torch'", name="torch.nn"))
    assert code == 2 and f"torch.nn is not installed for {sys.executable}" in printed
    assert "source .venv/bin/activate" in printed and "defect" not in printed
    code, printed = error_of(ModuleNotFoundError("No module named 'mca_lite.x'", name="mca_lite.x"))
    assert code == 1 and "defect" in printed


def test_the_version_is_told(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{mca_lite.__version__}\n"


def test_memory_that_torch_does_not_get_is_told_as_such():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert "mca_lite plan CONFIG --memory" in cli.user_words(caught.value)


def test_a_resumed_run_that_is_done_says_so(tmp_path, capsys):
    words = f"configs/sft.yaml {SHORT} use_mca=false max_samples=20 output_dir={tmp_path / 'out'} "
    words += f"cache_dir={tmp_path / 'cache'} save_strategy=steps"
    said = world.run(printed_by_commands, 1, [f"{words} max_steps={n}" for n in (2, 1, 4)])[0]
    assert said.count("trained 2 steps in") == 2
    assert_names(said, "nothing was left to train", "max_steps 2 -> 1\n")


def printed_by_commands(runs: list[str]) -> str:
    os.chdir(ROOT)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for words in runs:
            more = ["overwrite_output_dir=false", "resume_from_checkpoint=auto"]
            assert cli.main([*words.split(), *more]) == 0
    return said.getvalue()


def test_a_world_too_small_for_the_layout_is_told_to_python_too(monkeypatch):
    from mca_lite import TrainingArguments, parallel

    monkeypatch.setattr(parallel, "start_process_group", lambda timeout_s: None)
    args = TrainingArguments(output_dir="unused", tensor_model_parallel_size=3)
    with pytest.raises(ValueError, match="takes 3 ranks, and there are 1: start a multiple"):
        parallel.initialize(args)


def test_a_flag_that_the_loop_does_not_know_is_an_error():
    from mca_lite.callbacks import TrainerControl

    control = TrainerControl()
    control.should_training_stop = True
    with pytest.raises(AttributeError, match="should_stop"):
        control.should_stop = True


def test_yaml_nested_too_deep_is_refused(tmp_path):
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 20_000)
    with pytest.raises(ConfigError, match="nested too deep"):
        read_config_file(tmp_path / "deep.yaml")


def test_convert_ends_as_training_does(tmp_path, capsys):
    from mca_lite.tool_convert import main

    (tmp_path / "file").write_text("")
    (tmp_path / "model").mkdir()
    assert main([str(tmp_path / "model"), str(tmp_path / "file" / "x")]) == 2
    assert main([str(tmp_path / "model"), str(tmp_path / "new")]) == 2
    shown = capsys.readouterr().err
    assert shown.count("error: ") == 2 and "is no folder" in shown and "config.json" in shown


# -- commands that train nothing


LOUD = """
from mca_lite import cli

def work():
    for number in range(100_000):
        print(number, "words that fill what a pipe holds")

raise SystemExit(cli.finish(work))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(monkeypatch, lines, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    script = LOUD.replace("100_000", str(lines))
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=write_end, stderr=subprocess.PIPE, cwd=ROOT
    )
    os.close(write_end)
    os.close(read_end)  # as `| head -0` does
    _, shown = process.communicate(timeout=120)
    assert process.returncode == cli.NOT_READ and shown == b""


def test_other_broken_pipes_are_told(capsys):
    def work():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe of a worker")

    assert cli.finish(work) == cli.USER_ERROR
    assert "of a worker" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_without_a_traceback(capsys):
    def work():
        raise KeyboardInterrupt

    assert cli.finish(work) == cli.INTERRUPTED
    [line] = capsys.readouterr().err.splitlines()
    assert "interrupted" in line
    assert cli.finish(lambda: None) == 0 and capsys.readouterr().err == ""


def test_a_word_that_is_no_command_is_told_and_a_command_alone_shows_its_help(capsys, monkeypatch):
    assert __main__.main(["doctr"]) == __main__.main(["zebra"]) == cli.USER_ERROR
    lines = capsys.readouterr().err.splitlines()
    for line, word in zip(lines, ("doctr", "zebra"), strict=True):
        assert_names(line, "error: ", f"no command {word}", ", ".join(__main__.COMMANDS))
    monkeypatch.setattr(sys, "argv", ["mca-lite", "inspct"])
    assert __main__.main() == cli.USER_ERROR
    assert "no command inspct" in capsys.readouterr().err
    assert __main__.main([]) == __main__.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(shown.count(f"\n  {name} ") == 2 for name in __main__.COMMANDS)
    for name in __main__.COMMANDS.keys() - {"train", "doctor"}:
        with pytest.raises(SystemExit, match="0"):
            __main__.main([name])
        assert f"python -m mca_lite {name}" in capsys.readouterr().out


WRONG_KEY, NO_FOLDER = "configs/sft.yaml learning_rat=1", "no such folder"


@pytest.mark.parametrize("words, told", [
    *((f"{name} {WRONG_KEY}", "learning_rat") for name in
      ("inspect", "inspect --check", "generate", "plan", "parity")),
    *((words, NO_FOLDER) for words in
      ("chat ./none", "convert ./none ./new", "convert ./none ./new --merge ./adapter")),
])  # fmt: skip
def test_a_wrong_key_or_folder_is_told_before_torch_is_imported(words, told):
    script = "import sys; from mca_lite.__main__ import main; code = main(sys.argv[1:])\n"
    script += "assert 'torch' not in sys.modules; sys.exit(code)"
    command = [sys.executable, "-c", script, *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == cli.USER_ERROR and told in done.stderr, done.stderr


NO_OBJECT, NO_NAME = "not valid JSON", "expected a file, a folder, or a name"
NO_FORMAT = "stage sft expects samples: alpaca (instruction, input, output)"
NO_COLUMN, NO_LABEL = "'questio' is missing", "'verdict' is missing"


@pytest.mark.parametrize(
    "words, told",
    [
        ("dataset=./none", NO_NAME),
        ("dataset={folder}/wrong.jsonl", NO_OBJECT),
        ("dataset={folder}/other.jsonl", NO_FORMAT),
        ("dataset=misspelt", NO_COLUMN),
        ("dataset=misspelt stage=kto", NO_COLUMN),
        ("dataset=unlabelled stage=kto", NO_LABEL),
        ("dataset=pairs stage=dpo", "stage dpo expects pairs"),
    ],
)
def test_wrong_data_is_refused_before_torch_is_imported_by_rank_0(tmp_path, words, told):
    (tmp_path / "wrong.jsonl").write_text("{no json\n")
    (tmp_path / "other.jsonl").write_text('{"title": "", "body": ""}\n')
    record = {"question": "", "output": "", "chosen": "", "rejected": ""}
    (tmp_path / "right.jsonl").write_text(json.dumps(record))
    file = {"file_name": "right.jsonl"}
    names = {"misspelt": {"prompt": "questio", "response": "output"}}
    names["pairs"] = {"prompt": "questio"}
    names["unlabelled"] = {"prompt": "question", "response": "output", "kto_tag": "verdict"}
    info = {name: {**file, "columns": columns} for name, columns in names.items()}
    info["pairs"]["ranking"] = True
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    words = words.format(folder=tmp_path).split()
    script = "import sys; from mca_lite.cli import main; code = main(sys.argv[1:])\n"
    script += "assert 'torch' not in sys.modules; sys.exit(code)"
    command = [sys.executable, "-c", script, "configs/sft.yaml", *words]
    command += [f"output_dir={tmp_path / 'out'}", f"dataset_dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == cli.USER_ERROR and told in done.stderr, done.stderr


@pytest.mark.parametrize("kind, text", [(int, "0"), (int, "2.5"), (float, "nan"), (float, "x")])
def test_an_option_that_is_no_such_number_is_refused_with_what_was_expected(kind, text, capsys):
    parser = cli.parser_of("any", "")
    parser.add_argument("--number", type=cli.at_least(1, kind))
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--number", text])
    numbers = "a whole number" if kind is int else "a number"
    [line] = capsys.readouterr().err.splitlines()
    assert_names(line, "error: ", "--number: ", numbers, "at least 1", f"'{text}'", "--help")
    assert parser.parse_args(["--number", "1"]).number == 1


def test_colours_are_for_terminals_without_no_color(monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert tool_inspect.has_colors()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not tool_inspect.has_colors()
