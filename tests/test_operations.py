"""Operations and messages of a layer, counted: tensor parallelism adds messages alone."""

import collections
import os

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.shared import tiny, world
from tests.shared.layouts import SP, TP2

WITHOUT_WORK = ("empty", "new_empty", "detach", "alias", "_unsafe_view", "_reshape_alias")
PRODUCTS = 12  # four linears, each with the gradients of its input and of its weight
LARGEST = 88  # others of a layer on a CPU, where a kernel of a GPU is several operators
LAYOUTS = {"one": (1, {}), "tp2": (2, TP2), "tp2_sp": (2, {**TP2, **SP})}
MESSAGES = {
    "one": {},
    "tp2": {"allreduce_": 4},
    # a linear with cut outputs gathers its input for the weight's gradient as well
    "tp2_sp": {"_allgather_base_": 6, "_reduce_scatter_base_": 4},
}


class Counter(TorchDispatchMode):
    """Counts calls of operators but views and empty tensors, by name."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if not function.is_view and not name.split("::")[1].startswith(WITHOUT_WORK):
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def operators_of(paths: list[str]) -> dict[str, list[collections.Counter]]:
    """Operators of both passes of each model in each layout, on rank 0 of a faked world."""
    import torch
    import torch.distributed as dist

    from mca_lite import AutoModel, TrainingArguments

    ids = torch.arange(16).view(2, 8)
    counts = collections.defaultdict(list)
    for layout, (ranks, keys) in LAYOUTS.items():
        os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        dist.destroy_process_group()
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=ranks)
        for path in paths:
            args = TrainingArguments(output_dir="unused", bf16=True, **keys)
            [model] = AutoModel.from_pretrained(path, args)
            model(ids)  # makes the tables of its positions
            with Counter() as counter:
                model(ids, labels=ids).sum().backward()
            counts[layout].append(counter.found)
            world.leave_layout()
    return dict(counts)


@pytest.fixture(scope="module")
def layers(tmp_path_factory) -> dict[str, tuple[dict, int, int]]:
    """Of each layout (messages by name, products, other operators) of a layer."""
    folder = tmp_path_factory.mktemp("models")
    paths = [
        tiny.save_model(folder / str(n), "llama", num_hidden_layers=n, rope_parameters=None)
        for n in (1, 2)
    ]
    found = {}
    [counts] = world.run(operators_of, 1, paths)
    for layout, (one, two) in counts.items():
        two.subtract(one)
        messages = {
            operator.removeprefix("c10d::"): count
            for operator, count in two.items()
            if operator.startswith("c10d::") and count
        }
        products = two["aten::mm"]
        found[layout] = messages, products, two.total() - products - sum(messages.values())
    return found


@pytest.mark.parametrize("layout", MESSAGES)
def test_a_layer_has_these_messages_and_products(layers, layout):
    messages, products, _ = layers[layout]
    assert messages == MESSAGES[layout]
    assert products == PRODUCTS


def test_tensor_parallelism_adds_no_other_operator_to_a_layer(layers):
    others = {layout: other for layout, (_, _, other) in layers.items()}
    assert others["tp2"] == others["tp2_sp"] <= others["one"] <= LARGEST
