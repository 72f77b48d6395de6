"""What an import of the package does to its host: when megatron comes, which warnings stay, under
which name it works.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.shared import uninstalled

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mca_lite"


def ended(script: str, cwd, *words: str) -> subprocess.CompletedProcess:
    """A script in a process that has `cwd` and the packages that are needed, and no install."""
    command = [*uninstalled.PYTHON, "-c", script, *words]
    given = dict(capture_output=True, text=True, timeout=120)
    return subprocess.run(command, cwd=cwd, env=uninstalled.environment(), **given)


def test_a_module_that_a_copy_lacks_is_not_taken_from_the_install(tmp_path):
    leave_out = shutil.ignore_patterns("__pycache__", "tool_page.py")
    shutil.copytree(PACKAGE, tmp_path / "mca_lite", ignore=leave_out)
    result = ended("import mca_lite.tool_page", tmp_path)
    assert "ModuleNotFoundError: No module named 'mca_lite.tool_page'" in result.stderr


def test_public_names_of_the_seeds_are_importable():
    import mca_lite

    for name in mca_lite.__all__:
        assert getattr(mca_lite, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        mca_lite.Nothing  # noqa: B018


def test_importing_the_arguments_loads_no_heavy_library():
    heavy = "torch", "megatron", "transformers"
    script = f"import sys, mca_lite.args; print([m for m in {heavy} if m in sys.modules])"
    assert ended(script, ROOT).stdout.strip() == "[]"


FIRST_MEGATRON = """
import importlib, os, sys, warnings
import torch
filters = list(warnings.filters)
import mca_lite
assert warnings.filters == filters, "the host program's warning filters have changed"

class Stopped(BaseException):
    pass

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron":
            early = "mca_lite.mcore" not in sys.modules
            unset = not torch.cuda.is_available() and "TORCHDYNAMO_DISABLE" not in os.environ
            raise Stopped("before the CPU settings" if early or unset else "after them")

sys.meta_path.insert(0, Watch())

def first(action):
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    for name in [name for name in sys.modules if name.startswith("mca_lite.")]:
        del sys.modules[name]
        vars(mca_lite).pop(name.removeprefix("mca_lite."), None)
    try:
        action()
    except Stopped as stopped:
        return str(stopped)
    return "never"

for name in mca_lite.__all__:
    print(name, first(lambda: getattr(mca_lite, name)), sep=": ")
for name in {modules!r}:
    print(name, first(lambda: importlib.import_module("mca_lite." + name)), sep=": ")
"""


def test_megatron_is_imported_after_the_cpu_settings_whatever_is_imported_first():
    names = sorted(p.stem for p in PACKAGE.glob("*.py") if not p.stem.startswith("__"))
    script = FIRST_MEGATRON.replace("{modules!r}", repr(names))
    result = ended(script, ROOT)
    assert result.returncode == 0, result.stderr
    answers = dict(line.split(": ") for line in result.stdout.splitlines())
    assert [name for name, answer in answers.items() if answer == "before the CPU settings"] == []
    assert answers["AutoModel"] == answers["model_config"] == answers["optim"] == "after them"
    assert answers["args"] == answers["files"] == "never"


VENDORED = """
import importlib, sys
keys = dict(max_steps=2, logging_steps=1, save_strategy="no", learning_rate=1e-2)
data = [{{"input_ids": list(range(8)), "labels": list(range(1, 9))}}] * 4

def train(name):
    copy = importlib.import_module(f"third_party.{{name}}")
    args = copy.TrainingArguments(output_dir=f"{out}/{{name}}", **keys)
    model = copy.AutoModel.from_pretrained({model!r}, args)
    return copy.McaTrainer(model=model, args=args, train_dataset=data).train()

importlib.import_module("third_party.first.run")
compiler = sys.modules.keys() & {{"torch._dynamo", "torch._inductor", "sympy"}}
assert not compiler, f"a run imports torch's compiler, which takes seconds: {{compiler}}"
losses = [train(name).training_loss for name in ("first", "second", "first_again")]
assert len(set(losses)) == 1, losses
original = [m for m in sys.modules if m.split(".")[0] == "mca_lite"]
assert not original, "the copy imports the original"
"""


def test_copies_under_other_names_train_in_one_process_and_warn_of_nothing(tmp_path):
    from tests.shared import tiny

    model = tiny.save_model(tmp_path / "model", "llama")
    for name in ("first", "second"):
        shutil.copytree(
            PACKAGE, tmp_path / "third_party" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    (tmp_path / "third_party" / "first_again.py").write_text("from .first import *")
    result = ended(VENDORED.format(out=str(tmp_path / "out"), model=model), tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("step 2/2") == 3 and "Apex" not in result.stderr
    for words in ([], ["watch", "--help"]):
        command = [*uninstalled.PYTHON, "-m", "third_party.first", *words]
        given = dict(cwd=tmp_path, env=uninstalled.environment(), capture_output=True, text=True)
        text = subprocess.run(command, **given).stdout
        assert "python -m third_party.first" in text and "python -m mca_lite" not in text


SILENT = """
import gc, sys
from mca_lite import cli

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch comes, collections:", gc.isenabled(), flush=True)
            raise ImportError("torch")

sys.meta_path.insert(0, Watch())
code = cli.main(["configs/sft.yaml", f"output_dir={sys.argv[1]}"])
print("the end, collections:", gc.isenabled(), code)
"""


def test_a_run_speaks_before_it_imports_torch_and_collects_garbage_after(tmp_path):
    done = ended(SILENT, ROOT, str(tmp_path / "out"))
    lines = [line for line in done.stdout.splitlines() if not line.startswith("note: ")]
    assert lines[0].startswith("mca_lite starts on 1 rank"), done.stderr
    assert lines[1] == "torch comes, collections: False"
    assert lines[-1].startswith("the end, collections: True")
