"""`make mutations`: what is said of a wrong change that a test notices, and of others."""

from pathlib import Path

import pytest

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
