"""Models with fewer query groups than tensor-parallel ranks train as on one rank."""

import pytest

from tests.shared import tiny, world
from tests.shared.cells import train_all
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.layouts import PACKED, SP, TWO_ROWS
from tests.shared.training import BRIEF, assert_same_curve

TP4 = dict(tensor_model_parallel_size=4)
CASES = {"tp4": TWO_ROWS, "tp4_sp": {**SP, **TWO_ROWS}, "tp4_sp_packed": {**SP, **PACKED}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return tiny.save_model(folder, "qwen2", num_key_value_heads=2, num_attention_heads=8)


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """(the curve of plain torch on one rank, {case: curve} of each of four ranks, their folder)"""
    out = tmp_path_factory.mktemp("trained")
    runs = {"torch": ((model,), dict(BRIEF, backend="torch"))}
    [curves] = world.run(train_all, 1, runs, str(out))
    runs = {name: ((model,), {**BRIEF, **TP4, **keys}) for name, keys in CASES.items()}
    return curves["torch"], world.run(train_all, 4, runs, str(out)), out


@pytest.mark.parametrize("case", CASES)
def test_two_query_groups_train_on_four_ranks_as_on_one(case, trained):
    curve, ranks, out = trained
    for got in ranks:
        assert_same_curve(got[case], curve)
    assert_same_tensors(tensors(out / case), tensors(out / "torch"))


def adapter_error(path: str) -> str:
    from mca_lite import AutoModel, TrainingArguments
    from mca_lite.part_lora import inject
    from mca_lite.part_lora_layers import LoraSpec

    model = AutoModel.from_pretrained(path, TrainingArguments(output_dir="unused", **TP4))
    with pytest.raises(ValueError) as error:
        inject(model, LoraSpec(targets=("all",)))
    return str(error.value)


def test_adapters_on_query_groups_that_ranks_share_are_refused(model):
    for error in world.run(adapter_error, 4, model):
        assert "2 query groups" in error and "tensor_model_parallel_size 4" in error
