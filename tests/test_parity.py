"""Every layout trains as plain torch does: the same loss, gradient norm and weights, for whole curves."""

import contextlib
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny, world
from tests.training import train

TOLERANCE = 1e-5  # float32, summed in another order

DIST_OPT = dict(use_distributed_optimizer=True)
OVERLAP = dict(
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    ddp_bucket_size=2000,
)
TP2 = dict(tensor_model_parallel_size=2)
PP2 = dict(pipeline_model_parallel_size=2)
SP = dict(sequence_parallel=True)
VPP2 = dict(virtual_pipeline_model_parallel_size=2)

LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2_dist_opt": (2, DIST_OPT),
    "dp2_overlap": (2, OVERLAP),
    "dp2_micro2": (2, dict(per_device_train_batch_size=2)),
    "tp2": (2, TP2),
    "tp2_sp": (2, {**TP2, **SP}),
    "pp2": (2, PP2),
    "pp2_variable": (2, {**PP2, "variable_seq_lengths": True}),
    "pp2_vpp2": (2, {**PP2, **VPP2}),
    "tp2pp2": (4, {**TP2, **PP2}),
    "tp2sp_pp2_vpp2": (4, {**TP2, **SP, **PP2, **VPP2}),
    "tp2dp2": (4, TP2),
    "tp2sp_dp2_dist_opt": (4, {**TP2, **SP, **DIST_OPT}),
    "pp2dp2_overlap": (4, {**PP2, **OVERLAP}),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """{family: (model folder, curve of the torch backend on one rank, its exported weights)}"""
    out = {}
    for family in tiny.FAMILY_KEYS:
        folder = tmp_path_factory.mktemp(family)
        with contextlib.redirect_stderr(io.StringIO()):
            path = tiny.save_model(folder / "model", family)
        [curve] = world.run(train, 1, path, str(folder / "out"), backend="torch", export=True)
        out[family] = path, curve, exported(folder / "out")
    return out


def exported(folder) -> dict[str, torch.Tensor]:
    return {
        k: v
        for file in sorted(Path(folder).glob("*.safetensors"))
        for k, v in load_file(file).items()
    }


def assert_same_curve(got, wanted, tolerance=TOLERANCE):
    assert len(got) == len(wanted)
    for step, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        for name, a, b in zip(("loss", "grad norm"), ours, theirs, strict=True):
            assert abs(a - b) <= tolerance * max(1.0, abs(b)), (
                f"step {step}: {name} {a} instead of {b}"
            )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", tiny.FAMILY_KEYS)
def test_layout_trains_as_torch_on_one_rank(family, layout, references, tmp_path):
    path, curve, weights = references[family]
    ranks, keys = LAYOUTS[layout]
    for got in world.run(train, ranks, path, str(tmp_path), export=True, **keys):
        assert_same_curve(got, curve)
    ours = exported(tmp_path)
    assert ours.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_torch_ddp_on_two_ranks_trains_as_on_one(references, tmp_path):
    path, curve, _ = references["qwen3"]
    for got in world.run(train, 2, path, str(tmp_path), backend="torch"):
        assert_same_curve(got, curve)
