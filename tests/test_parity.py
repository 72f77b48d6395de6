"""Every layout trains as plain torch does: the same loss, gradient norm and weights."""

import pytest

from mca_lite import TrainingArguments
from mca_lite.args_rules_model import layout_stages
from mca_lite.model_config import AutoConfig
from tests.shared import tiny, world
from tests.shared.cells import thinned
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.fixtures import torch_references, trained_references
from tests.shared.layouts import DENSE, OVERLAP, PP2, TWO_ROWS, VPP2
from tests.shared.training import BRIEF, assert_same_curve, train

# qwen3 has the most of a dense decoder: a head size of its own, norms of queries and keys, and the
# embedding as its head
LAYOUTS = {
    # four micro-batches are accumulated on one rank, two on replicas
    name: (ranks, keys if name == "one" or "dp2" in name else {**TWO_ROWS, **keys})
    for name, (ranks, keys) in DENSE.items()
}
CELLS = thinned(tiny.FAMILY_KEYS, LAYOUTS, everywhere=["qwen3"], few=["one", "tp2_sp", "pp2_vpp2"])


references = torch_references(**BRIEF)
trained = trained_references(LAYOUTS, **BRIEF)


@pytest.mark.parametrize("case, layout", CELLS)
def test_layout_trains_as_torch_on_one_rank(case, layout, references, trained):
    _, curve, weights = references[case]
    curves, folder = trained(layout)
    for got in curves:
        assert_same_curve(got[case], curve)
    assert_same_tensors(tensors(folder / case), weights)


def test_auto_weighs_the_stages_of_a_pipeline_by_what_they_hold(tmp_path):
    """A head as costly as a layer: 3 + 1 layers, and of four stages the last has the head alone."""
    path = tiny.save_model(tmp_path / "model", "qwen3", vocab_size=5000)
    auto = dict(pipeline_model_parallel_layout="auto", **TWO_ROWS, **PP2)
    counts = []
    for keys in (auto, {**auto, **VPP2, "gradient_accumulation_steps": 2}):
        args = TrainingArguments(output_dir="unused", **keys)
        layout = AutoConfig.from_pretrained(path, args).pipeline_model_parallel_layout
        counts.append([stage.count("t") for stage in layout_stages(str(layout))])
    assert counts == [[3, 1], [1, 1, 2, 0]]
    [wanted] = world.run(train, 1, path, str(tmp_path / "torch"), backend="torch", **BRIEF)
    for keys in (auto, {**auto, **VPP2}):
        for got in world.run(train, 2, path, str(tmp_path / "ours"), **BRIEF, **keys):
            assert_same_curve(got, wanted)
    assert_same_tensors(tensors(tmp_path / "ours"), tensors(tmp_path / "torch"))


def test_torch_ddp_on_two_ranks_trains_as_on_one(references, tmp_path):
    path, curve, _ = references["qwen3"]
    for got in world.run(train, 2, path, str(tmp_path), backend="torch", **BRIEF):
        assert_same_curve(got, curve)


def test_warm_up_decay_and_another_epoch_are_those_of_torch(references, tmp_path):
    """A curve of four steps: the schedule from nothing to min_lr, and the next permutation."""
    path = references["qwen3"][0]
    [wanted] = world.run(train, 1, path, str(tmp_path / "torch"), backend="torch", export=True)
    for got in world.run(train, 2, path, str(tmp_path / "ours"), export=True, **OVERLAP):
        assert_same_curve(got, wanted)
    assert_same_tensors(tensors(tmp_path / "ours"), tensors(tmp_path / "torch"))
