"""`make mutations`: what is said of a wrong change that a test notices, and of others."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools import mutations
from tests.tools.mutations import ROWS, verdict

ROOT = Path(__file__).parents[1]
CONFTEST = Path(__file__).with_name("conftest.py").read_text()

TEST = """
from mca_lite.sums import doubled

def test_twice_two_is_four():
    assert doubled(2) == 4
"""


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("2 * x", "3 * x", "noticed"),
        ("2 * x", "x * x", "SURVIVES"),
        ("2 * x", "2 * ", "STALE: pytest ends with 4"),
        ("4 * x", "x", "STALE: its text is there 0 times"),
        ("x", "y", "STALE: its text is there 2 times"),
    ],
)
def test_a_row_is_noticed_survives_or_is_stale(tmp_path, old, new, said):
    module = tmp_path / "mca_lite" / "sums.py"
    for file, text in {
        module: "def doubled(x):\n    return 2 * x\n",
        tmp_path / "tests" / "test_sums.py": TEST,
        tmp_path / "tests" / "conftest.py": CONFTEST,
    }.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert verdict(tmp_path, old, new, "test_sums.py::test_twice_two_is_four") == said
    assert "return 2 * x" in module.read_text()


def test_rows_have_names_of_their_own_and_change_something():
    assert len({what for what, *_ in ROWS}) == len(ROWS)
    assert all(old != new and tests for _, old, new, tests in ROWS)


def test_the_text_of_each_row_is_in_the_package_once_and_its_tests_are_there():
    """A change of the package may leave a row without its text."""
    modules = [path.read_text() for path in (ROOT / "mca_lite").glob("*.py")]
    counts = {what: sum(text.count(old) for text in modules) for what, old, *_ in ROWS}
    assert {what: count for what, count in counts.items() if count != 1} == {}
    for name in {name for *_, tests in ROWS for name in tests.split()}:
        file, function = name.partition("[")[0].split("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), name


def test_a_row_is_tried_again_once_its_module_or_its_tests_have_another_text(
    tmp_path, monkeypatch, capsys
):
    tried = []

    def noticed(folder, old, *_):
        tried.append(old)
        return "noticed"

    first, second = ROWS[0], ROWS[3]
    monkeypatch.setattr(mutations, "ROWS", [first, second])
    monkeypatch.setattr(mutations, "KEPT", tmp_path / "output" / "kept.json")
    monkeypatch.setattr(mutations, "copy_tree", lambda folder: None)
    monkeypatch.setattr(mutations, "run_tests", lambda *_: SimpleNamespace(returncode=0))
    monkeypatch.setattr(mutations, "verdict", noticed)
    monkeypatch.setattr(mutations, "state_of", lambda folder, old, new, tests: states[old])
    states = {first[1]: "before", second[1]: "before"}
    mutations.main([])
    mutations.main([])
    states[second[1]] = "after"
    mutations.main([])
    assert tried == [first[1], second[1], second[1]]
    assert "1 of 1 wrong changes noticed, 1 more earlier" in capsys.readouterr().out


def test_the_state_of_a_row_is_its_module_and_its_tests(tmp_path):
    files = {
        name: tmp_path / name for name in ("mca_lite/a.py", "mca_lite/b.py", "tests/test_a.py")
    }
    for file in files.values():
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"x = {file.name!r}\n")
    row = "'a.py'", "'c.py'", "test_a.py::test_x"
    states = [mutations.state_of(tmp_path, *row)]
    for file in files.values():
        file.write_text(file.read_text() + "# more\n")
        states.append(mutations.state_of(tmp_path, *row))
    same = [one == other for one, other in zip(states, states[1:], strict=False)]
    assert same == [False, True, False]
