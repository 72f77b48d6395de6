"""Every layout trains as plain torch does: the same loss, gradient norm and weights, for whole curves."""

import contextlib
import io

import pytest
import torch

from tests.shared import tiny, world
from tests.shared.files import tensors
from tests.shared.layouts import DENSE
from tests.shared.training import TOLERANCE, assert_same_curve, train


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """{family: (model folder, curve of the torch backend on one rank, its exported weights)}"""
    out = {}
    for family in tiny.FAMILY_KEYS:
        folder = tmp_path_factory.mktemp(family)
        with contextlib.redirect_stderr(io.StringIO()):
            path = tiny.save_model(folder / "model", family)
        [curve] = world.run(train, 1, path, str(folder / "out"), backend="torch", export=True)
        out[family] = path, curve, tensors(folder / "out")
    return out


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("family", tiny.FAMILY_KEYS)
def test_layout_trains_as_torch_on_one_rank(family, layout, references, tmp_path):
    path, curve, weights = references[family]
    ranks, keys = DENSE[layout]
    for got in world.run(train, ranks, path, str(tmp_path), export=True, **keys):
        assert_same_curve(got, curve)
    ours = tensors(tmp_path)
    assert ours.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_torch_ddp_on_two_ranks_trains_as_on_one(references, tmp_path):
    path, curve, _ = references["qwen3"]
    for got in world.run(train, 2, path, str(tmp_path), backend="torch"):
        assert_same_curve(got, curve)
