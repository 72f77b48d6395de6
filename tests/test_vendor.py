"""The package in another repository: what `vendor` copies, says, checks and refuses."""

import ast
import math
import re
import subprocess
from pathlib import Path

import pytest

from mca_lite import tool_vendor
from mca_lite.__main__ import COMMANDS, main
from mca_lite.cli import USER_ERROR
from mca_lite.errors import UserError
from mca_lite.parts import PARTS
from tests.shared import uninstalled
from tests.shared.commands import assert_names
from tests.tools import rings
from tests.tools.house import relative_imports

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mca_lite"
RINGS = rings.rings_of(PACKAGE)
OF_ALL = {"__main__", "__init__"}  # of tools, in each copy


def modules_of(ring: str) -> set[str]:
    return {module for module, (of, _) in RINGS.items() if of == ring}


def run_in(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """A command of a copy that no installation helps."""
    command = [*uninstalled.PYTHON, "-m", folder.name, *words]
    given = dict(cwd=folder.parent, env=uninstalled.environment(), capture_output=True, text=True)
    return subprocess.run(command, **given)


def test_a_copy_with_parts_trains_under_another_name_and_says_what_it_lacks(tmp_path, capfd):
    folder = tmp_path / "third_party" / "trainer"
    assert main(["vendor", str(folder), "--parts", "kto", "--tools", "watch"]) == 0
    said = capfd.readouterr().out
    assert_names(said, "parts: scores, dpo, kto\n", "commands: train, watch\n")
    assert_names(said, "scores cannot be left out: it is needed by dpo, kto\n")
    left_out = [part for part in PARTS if part not in ("scores", "dpo", "kto")]
    assert f"parts left out: {', '.join(left_out)}\n" in said
    loss = float(said.split("a step of stage sft has loss ")[1])
    # of 16 words, by weights that are drawn around zero
    assert loss == pytest.approx(math.log(16), abs=0.5)

    copied = {path.stem for path in folder.glob("*.py")}
    parts = {module for part in ("scores", "dpo", "kto") for module in PARTS[part].modules.split()}
    of_parts = {module for part in PARTS.values() for module in part.modules.split()}
    tools = {"cli", "tool_watch", "tool_generation", "tool_page"} | OF_ALL
    assert copied == modules_of("core") | (modules_of("part") - of_parts) | parts | tools
    files = [*folder.iterdir()]
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert_names(said, f"{folder}: {len(files)} files, ", f" MiB, {lines:,} lines\n")

    shown = run_in(folder).stdout
    assert "\n  watch " in shown and "\n  plan " not in shown
    assert (
        "usage: python -m trainer train [config.yaml]" in run_in(folder, "train", "--help").stdout
    )
    refused = run_in(folder, "plan", "x.yaml")
    assert refused.returncode == USER_ERROR
    assert_names(
        refused.stderr, "command plan: it needs tool_plan.py, tool_plan_memory.py", str(folder)
    )
    refused = run_in(folder, "x=1", "stage=rm", "kto_chosen_weight=2")
    assert_names(refused.stderr, "it needs part rm, and part_rm_keys.py", f"not in {folder}")
    assert "part kto" not in refused.stderr
    names = "import trainer as t; print('KTOTrainer' in t.__all__, 'RewardTrainer' in t.__all__)"
    command = [*uninstalled.PYTHON, "-c", names]
    given = dict(cwd=folder.parent, env=uninstalled.environment(), capture_output=True, text=True)
    assert subprocess.run(command, **given).stdout == "True False\n"


def test_a_copy_without_parts_has_all_others_but_those_that_need_them(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(tool_vendor, "check_copy", lambda folder: 1.0)
    # test_parts.py trains without the files of parts
    folder = tmp_path / "trainer"
    assert main(["vendor", str(folder), "--without", "pictures", "lora"]) == 0
    said = capfd.readouterr().out
    gone = ["pictures", "video", "audio", "lora", "quantised"]
    assert_names(said, f"parts left out: {', '.join(gone)}\n")
    copied = {path.stem for path in folder.glob("part_*.py")}
    missing = {module for part in gone for module in PARTS[part].modules.split()}
    assert copied == {path.stem for path in PACKAGE.glob("part_*.py")} - missing


@pytest.mark.parametrize("parts", [[], ["all"]])
def test_without_takes_parts_and_their_users_from_all(parts):
    chosen = tool_vendor.choose(parts, [], ["scores"]).parts
    users = {"scores", "dpo", "kto", "rm", "distill", "policy"}
    assert chosen == [part for part in PARTS if part not in users]
    named = tool_vendor.choose(["kto", "lora"], [], ["pictures"])
    assert named.parts == ["lora", "scores", "dpo", "kto"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("{new} --without lroa", "lroa.*there is no such part or command.*try: "),
        (
            "{new} --parts kto --without scores",
            "kto.*it needs scores, and --without has it.*one of",
        ),
        ("{new} --parts lroa", "lroa.*there is no such part or command.*try: "),
        ("{new} --parts dpoo", "dpoo.*try: dpo"),
        ("{new} --tools pln", "pln.*try: plan"),
        ("{package}/inner", "it is inside the package"),
        ("{package}", "it is inside the package"),
        ("{full}", "it is not empty.*try: a new folder; remove an earlier copy first"),
        ("{full}/file", "it is a file"),
        ("{full}/my-trainer", "my-trainer cannot be imported.*my_project/trainer"),
        ("{full}/class", "class cannot be imported"),
    ],
)
def test_a_place_or_a_name_that_cannot_be_is_refused_before_anything_is_copied(
    words, said, tmp_path, capsys
):
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    places = {"new": tmp_path / "new", "package": PACKAGE, "full": full}
    assert main(["vendor", *words.format(**places).split()]) == USER_ERROR
    error = capsys.readouterr().err
    assert re.search(said, error, re.DOTALL), error
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]


def test_a_copy_that_does_not_import_is_an_error_with_its_own_words(tmp_path):
    for file in ("__init__.py", "broken.py"):
        (tmp_path / file).write_text("from .gone import nothing" if file == "broken.py" else "")
    with pytest.raises(UserError, match=r"(?s)the copy does not train:.*No module named .*gone"):
        tool_vendor.check_copy(tmp_path)


def test_the_line_of_the_readme_names_parts_that_there_are():
    [names] = re.findall(
        r"mca_lite vendor [\w/]+ --parts ([\w ]+)`", (ROOT / "README.md").read_text()
    )
    assert set(names.split()) <= set(tool_vendor.choose(names.split(), []).parts)


def test_a_command_names_every_tool_that_it_imports():
    tools = modules_of("tool") - OF_ALL
    trees = {tool: ast.parse((PACKAGE / f"{tool}.py").read_text()) for tool in tools}
    imported = {tool: relative_imports([*ast.walk(tree)]) & tools for tool, tree in trees.items()}
    for name, command in COMMANDS.items():
        first, *others = command.modules()
        reached = [first]
        for tool in reached:
            reached += sorted(imported[tool] - {*reached, "cli"})  # that of train is in each copy
        assert {first, *others} == {*reached}, name
    assert {tool for command in COMMANDS.values() for tool in command.modules()} == tools
