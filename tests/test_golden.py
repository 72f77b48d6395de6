"""Training gives the bits of the golden runs: no change of code changes a number unnoticed."""

import copy
from concurrent.futures import Future

import pytest

from tests.shared import golden
from tests.shared.cells import cell


@pytest.fixture(scope="module")
def found(request):
    """A function: a cell of this session -> its family's curves, from the world that it shares with
    a few others. A world that fails, or ends at its limit, fails its own cells alone."""
    params = [
        item.callspec.params
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    ]
    asked = [(p["case"], p["layout"]) for p in params if "layout" in p]
    worlds = {cell: world for world in golden.worlds(asked) for cell in world}
    ended: dict[tuple, Future] = {}

    def of(family: str, layout: str) -> dict:
        world = worlds[family, layout]
        if world not in ended:
            ended[world] = Future()
            try:
                ended[world].set_result(golden.curves(world))
            except Exception as error:
                ended[world].set_exception(error)
        return ended[world].result()[family]

    return of


KEPT = [(family, layout) for family, layout in golden.CELLS if layout in golden.kept(family)]


@pytest.mark.parametrize("case, layout", [cell(*c, full=not golden.is_short(*c)) for c in KEPT])
def test_a_run_has_the_bits_of_its_golden_run(case, layout, found):
    golden.check(case, layout, found(case, layout))


@pytest.mark.full
def test_each_family_has_golden_runs():
    """`make golden ARGS=FAMILY` writes those of a new one."""
    assert golden.CELLS == KEPT


@pytest.mark.parametrize("family", dict.fromkeys(family for family, _ in KEPT))
def test_golden_runs_of_a_family_differ_by_rounding_between_layouts(family):
    """What another machine may differ by is a few times this."""
    assert max(golden.floors(family)) <= golden.LARGEST_FLOOR


# -- the comparison, of golden runs made up here

STEADY, ROUGH = "steady", "rough"


def curve(norm: float = 8.0) -> list[list[str]]:
    return [[(4 - step / 16).hex(), norm.hex()] for step in range(golden.STEPS)]


def changed(loss: float = 0.0, norm: float = 0.0) -> dict:
    """Curves like the golden ones, whose third loss, or gradient norm, is larger by a value."""
    own = {"weights": "0", "one": curve()}
    for place, value in enumerate((loss, norm)):
        number = own["one"][2][place]
        own["one"][2][place] = (float.fromhex(number) + value).hex()
    return own


@pytest.fixture
def made_by(monkeypatch, tmp_path):
    """A function: {fact: value} of another machine -> golden runs of two families are from there.
    Gradient norms of ROUGH differ by 1.5e-6 of their size between its layouts."""
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    here = golden.machine()

    def made_by(**facts) -> None:
        golden.kept.cache_clear()
        monkeypatch.setattr(golden, "machine", lambda: {**here, **facts})
        steady = {**changed(), "tp2_sp": curve()}
        rough = {**copy.deepcopy(steady), "tp2_sp": curve(8.0 * (1 + 1.5e-6))}
        golden.write({STEADY: steady, ROUGH: rough})
        monkeypatch.setattr(golden, "machine", lambda: here)

    yield made_by
    golden.kept.cache_clear()


def test_a_change_of_one_bit_is_seen_on_the_machine_of_the_golden_runs(made_by, recwarn):
    made_by()
    golden.check(STEADY, "one", changed())
    for family, one_bit in ((STEADY, dict(loss=2**-50)), (ROUGH, dict(norm=2**-49))):
        with pytest.raises(AssertionError, match=f"{family} at one: if the change is meant, run `"):
            golden.check(family, "one", changed(**one_bit))
    assert not recwarn


def test_another_machine_compares_within_a_tolerance_and_says_so(made_by):
    made_by(capability="of another machine", torch="0.1")
    words = r"losses within 1.0e-06 and gradient norms within 1.0e-06, .*: capability .*; torch .*"
    with pytest.warns(UserWarning, match=words):
        golden.check(STEADY, "one", changed(loss=3e-6, norm=6e-6))  # of 3.9 and of 8
    for value, name in ((dict(loss=1e-5), "loss"), (dict(norm=1e-5), "grad norm")):
        with pytest.warns(UserWarning), pytest.raises(AssertionError, match=f"step 3: {name} 0x"):
            golden.check(STEADY, "one", changed(**value))


def test_what_layouts_of_a_family_differ_by_decides_its_tolerance_on_another_machine(made_by):
    made_by(cpu="another one")
    assert golden.tolerances(ROUGH) == [1e-6, pytest.approx(6e-6)]
    with pytest.warns(UserWarning, match="losses within 1.0e-06 and gradient norms within 6.0e-06"):
        golden.check(ROUGH, "one", changed(norm=4e-5))
    for value, name in ((dict(loss=1e-5), "loss"), (dict(norm=6e-5), "grad norm")):
        with pytest.warns(UserWarning), pytest.raises(AssertionError, match=f"step 3: {name} 0x"):
            golden.check(ROUGH, "one", changed(**value))


def test_another_transformers_that_draws_other_weights_compares_nothing_and_says_so(made_by):
    own = {**changed(1.0), "weights": "1"}
    made_by(transformers="5.0.0")
    with pytest.warns(UserWarning, match="nothing was compared"):
        golden.check(STEADY, "one", own)
    made_by()
    with pytest.raises(AssertionError, match="random weights are others"):
        golden.check(STEADY, "one", own)


def test_a_world_has_a_few_cells_of_as_many_ranks():
    worlds = golden.worlds(golden.CELLS)
    assert sorted(cell for world in worlds for cell in world) == sorted(golden.CELLS)
    for world in worlds:
        assert len(world) <= golden.WORLD_CELLS
        assert len({golden.LAYOUTS[layout][0] for _, layout in world}) == 1
