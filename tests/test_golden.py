"""Training gives the bits of the golden runs: no change of code changes a number unnoticed."""

import json

import pytest

from tests.shared import golden
from tests.shared.cells import cell


@pytest.fixture(scope="module")
def found(request) -> dict[str, dict]:
    """The curves of all cells that this session runs, from one world for each number of ranks."""
    params = [
        item.callspec.params
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    ]
    return golden.curves([(p["case"], p["layout"]) for p in params if "layout" in p])


KEPT = [(family, layout) for family, layout in golden.CELLS if layout in golden.kept(family)]


@pytest.mark.parametrize("case, layout", [cell(*c, full=not golden.is_short(*c)) for c in KEPT])
def test_a_run_has_the_bits_of_its_golden_run(case, layout, found):
    golden.check(case, layout, found[case])


@pytest.mark.full
def test_each_family_has_golden_runs():
    """`make golden ARGS=FAMILY` writes those of a new one."""
    assert golden.CELLS == KEPT


def other(monkeypatch, tmp_path, **facts) -> None:
    """Golden runs that another machine made."""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**golden.machine(), **facts}))
    monkeypatch.setattr(golden, "MACHINE", path)


def changed(value: float) -> dict:
    """qwen3's golden curve whose third loss is larger by a value."""
    own = json.loads(json.dumps(golden.kept("qwen3")))
    own["one"][2][0] = (float.fromhex(own["one"][2][0]) + value).hex()
    return own


def test_a_change_of_one_bit_is_seen_on_the_machine_of_the_golden_runs(monkeypatch, tmp_path):
    other(monkeypatch, tmp_path)
    golden.check("qwen3", "one", golden.kept("qwen3"))
    with pytest.raises(
        AssertionError, match="qwen3 at one: if the change is meant, run `make gold"
    ):
        golden.check("qwen3", "one", changed(2**-50))


def test_another_machine_compares_within_a_tolerance_and_says_so(monkeypatch, tmp_path):
    other(monkeypatch, tmp_path, capability="AVX2", torch="2.12.0")
    with pytest.warns(UserWarning, match=r"within 1e-06, not to the bit: capability .*; torch .*"):
        golden.check("qwen3", "one", changed(1e-6))
    with pytest.warns(UserWarning), pytest.raises(AssertionError, match="step 3: loss 0x"):
        golden.check("qwen3", "one", changed(1e-5))


def test_another_transformers_that_draws_other_weights_compares_nothing_and_says_so(
    monkeypatch, tmp_path
):
    own = {**changed(1.0), "weights": "0"}
    other(monkeypatch, tmp_path, transformers="5.0.0")
    with pytest.warns(UserWarning, match="nothing was compared"):
        golden.check("qwen3", "one", own)
    other(monkeypatch, tmp_path)
    with pytest.raises(AssertionError, match="random weights are others"):
        golden.check("qwen3", "one", own)
