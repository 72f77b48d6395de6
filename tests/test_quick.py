"""One layout against plain torch, in a process that imports no torch itself: for `make quick`."""

import pytest

from tests.shared import world
from tests.shared.layouts import PP2, TP2, TWO_ROWS


def trained(*args, **keys) -> list:
    from tests.shared.training import BRIEF, train

    return train(*args, **BRIEF, **keys)


def saved_and_trained(folder: str) -> tuple[str, list]:
    """(the folder of a model, its curve on plain torch)"""
    from tests.shared import tiny

    path = tiny.save_model(f"{folder}/model", "qwen3")
    return path, trained(path, f"{folder}/torch", backend="torch")


def test_tp2_pp2_trains_as_plain_torch_on_one_rank(tmp_path):
    [(path, wanted)] = world.run(saved_and_trained, 1, str(tmp_path))
    curves = world.run(trained, 4, path, str(tmp_path / "ours"), **TWO_ROWS, **TP2, **PP2)
    assert len(wanted) == 2 and len(curves) == 4
    for got in curves:
        assert got == [pytest.approx(step, rel=1e-5) for step in wanted]
