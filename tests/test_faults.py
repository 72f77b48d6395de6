"""The table of faults of `make chaos`: what it has, and that it goes on where it stopped."""

import json

import pytest

from tests.tools import faults


def test_the_table_has_each_fault_in_each_of_its_phases_and_uses_each_layout():
    cells = faults.table()
    pairs = {(name, phase) for name, fault in faults.FAULTS.items() for phase in fault.phases}
    assert {(cell.fault, cell.phase) for cell in cells} == pairs
    assert {cell.layout for cell in cells} == set(faults.LAYOUTS)
    assert {cell.victim for cell in cells} == {0, 1} and 55 <= len(cells) <= 70
    assert set(cells) < set(faults.every_cell())


class NoPlace:
    """No cell is run: each takes a second, and those of rank 0 have the wrong cause."""

    def __init__(self, folder):
        self.calm = lambda layout: None

    def score(self, cell):
        if cell.fault == "nan":
            raise TimeoutError("never ended")
        return {**dict.fromkeys(faults.SCORES, True), "cause": cell.victim != 0, "seconds": 1.0}


def test_cells_are_kept_one_by_one_and_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(faults, "Place", NoPlace)
    cells = [c for c in faults.every_cell() if c.layout == "dp2" and c.fault in ("kill", "nan")]
    path, known = tmp_path / "faults.json", {}
    found = faults.run(cells, known, path)
    assert json.loads(path.read_text()) == known == found and len(found) == len(cells) == 7
    assert faults.summary(found).startswith("7 cells: rank 6/7, cause 3/7, ")
    assert "nan, training, dp2, rank 1: None s, missed: ['rank'" in capsys.readouterr().out
    monkeypatch.setattr(NoPlace, "score", None)  # nothing is left to run
    assert faults.run(cells, known, path) == found


def test_words_that_fit_no_cell_are_refused():
    with pytest.raises(SystemExit, match="no cell has storm in its name; faults: crash, kill"):
        faults.main(["storm"])


@pytest.mark.full
@pytest.mark.parametrize("name", ["crash, training, tp2, rank 1", "kill, saving, pp2, rank 0"])
def test_a_fault_is_named_all_leave_and_a_restart_ends_as_if_nothing_had_been(name, tmp_path):
    [cell] = [cell for cell in faults.every_cell() if cell.name == name]
    found = faults.Place(tmp_path).score(cell)
    assert all(found[score] for score in faults.SCORES), found
