"""Models with fewer query groups than tensor-parallel ranks train as on one rank."""

import pytest

from tests.shared import tiny, world
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.layouts import PACKED, SP
from tests.shared.training import assert_same_curve, train

TP4 = dict(tensor_model_parallel_size=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return tiny.save_model(folder, "qwen2", num_key_value_heads=2, num_attention_heads=8)


@pytest.mark.parametrize("keys", [{}, SP, {**SP, **PACKED}], ids=["tp4", "tp4_sp", "tp4_sp_packed"])
def test_two_query_groups_train_on_four_ranks_as_on_one(keys, model, tmp_path):
    [curve] = world.run(train, 1, model, str(tmp_path / "one"), backend="torch", export=True)
    for got in world.run(train, 4, model, str(tmp_path / "tp4"), export=True, **TP4, **keys):
        assert_same_curve(got, curve)
    assert_same_tensors(tensors(tmp_path / "tp4"), tensors(tmp_path / "one"))


def adapter_error(path: str) -> str:
    from mca_lite import AutoModel, TrainingArguments
    from mca_lite.lora import LoraSpec, inject

    model = AutoModel.from_pretrained(path, TrainingArguments(output_dir="unused", **TP4))
    with pytest.raises(ValueError) as error:
        inject(model, LoraSpec(targets=("all",)))
    return str(error.value)


def test_adapters_on_query_groups_that_ranks_share_are_refused(model):
    for error in world.run(adapter_error, 4, model):
        assert "2 query groups" in error and "tensor_model_parallel_size 4" in error
