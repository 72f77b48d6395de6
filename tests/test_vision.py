"""Models with pictures on megatron-core: each family against transformers' own class in plain
torch, in every layout.
"""

import pytest

from tests.shared import pictures
from tests.shared.cells import asked_for, shared_worlds, thinned
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.layouts import (
    CP2,
    DIST_OPT,
    FULL,
    ONE_ROW,
    OVERLAP,
    PACKED,
    PP2,
    SP,
    TP2,
    TWO_ROWS,
    VPP2,
)
from tests.shared.training import assert_same_curve

FAMILIES = list(pictures.FAMILIES)
LAYOUTS = {
    "one": (1, TWO_ROWS),
    "one_packed": (1, PACKED),
    "one_recomputed": (1, {**TWO_ROWS, **FULL}),
    # in its first step one rank has a micro-batch with a picture, the other has none
    "dp2_overlap": (2, {**OVERLAP, **ONE_ROW}),
    "dp2": (2, TWO_ROWS),
    "tp2": (2, {**TP2, **TWO_ROWS}),
    "tp2_sp": (2, {**TP2, **SP, **DIST_OPT, **TWO_ROWS}),
    "tp2_sp_packed": (2, {**TP2, **SP, **PACKED, **FULL}),
    "pp2": (2, {**PP2, **TWO_ROWS}),
    "pp2_vpp2": (2, {**PP2, **VPP2, **ONE_ROW}),
    "cp2": (2, {**CP2, **TWO_ROWS}),
    "cp2_packed": (2, {**CP2, **PACKED}),
    "tp2pp2": (4, {**TP2, **PP2, **TWO_ROWS}),
    "tp2sp_pp2_packed": (4, {**TP2, **SP, **PP2, **PACKED}),
    "cp2tp2_sp": (4, {**CP2, **TP2, **SP, **TWO_ROWS}),
}
EVERYWHERE = ["qwen2_5_vl"]
FEW = ["one", "dp2_overlap", "tp2_sp_packed", "pp2", "cp2_packed"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: pictures.save_model(folder / name, name) for name in FAMILIES}


@pytest.fixture(scope="module")
def wanted(request, paths, tmp_path_factory):
    """transformers' models in plain torch: ({family: curve}, folder of what they became)"""
    out = tmp_path_factory.mktemp("plain")
    names = asked_for(request)
    return {n: pictures.train_plain(paths[n], str(out / n)) for n in names}, out


@pytest.fixture(scope="module")
def trained(request, paths, tmp_path_factory):
    run = pictures.train_ours
    return shared_worlds(request, tmp_path_factory, LAYOUTS, lambda n: ((paths[n],), {}), run=run)


CELLS = thinned(FAMILIES, LAYOUTS, EVERYWHERE, FEW)
# one layer a stage: refused below
CELLS = [cell for cell in CELLS if cell.values != ("qwen3_vl", "pp2_vpp2")]


@pytest.mark.parametrize("case, layout", CELLS)
def test_a_family_trains_as_transformers_does(case, layout, wanted, trained):
    (curves, folder), (ranks, out) = wanted, trained(layout)
    for got in ranks:
        assert_same_curve(got[case], curves[case])
    assert_same_tensors(tensors(out / case), tensors(folder / case))
