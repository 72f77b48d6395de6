"""Tokens on their way to experts and back, on one rank: against sums over a token's choices, and by
which operations.
"""

import torch

from mca_lite.model_moe import Experts, FromExperts, ToExperts, sums_of_rows
from mca_lite.part_triton_moe import ExpertsProduct
from tests.shared import tiny_moe, world

WAITS = ("item", "_local_scalar_dense", "nonzero", "masked_select", "unique")
ADDS = ("scatter_add", "index_add", "index_put")  # rows that meet: slow on a GPU, in any order


def choices(tokens=7, experts=5, k=3):
    g = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, experts, generator=g).topk(k, -1).indices
    order = chosen.flatten().argsort(stable=True)
    return chosen, order, order // k, order.argsort().view(tokens, k)


def test_rows_go_to_experts_and_back_with_the_gradients_of_plainsums_of_rows():
    chosen, order, tokens, places = choices()
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)
    rows, of_rows = ToExperts.apply(x, weights, order, tokens, places)
    assert chosen.flatten()[order].diff().min() >= 0, "rows stand by expert"
    factors = 1.0 + chosen.flatten()[order, None]  # what an expert does: times its number plus 1
    out = FromExperts.apply(rows * factors * of_rows[:, None], tokens, places)
    torch.testing.assert_close(out, x * ((1.0 + chosen) * weights).sum(1, keepdim=True))
    assert torch.autograd.gradcheck(
        lambda *t: ToExperts.apply(*t, order, tokens, places), (x, weights)
    )
    rows = rows.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: FromExperts.apply(t, tokens, places), (rows,))


def test_the_sum_over_a_tokens_experts_is_rounded_once():
    *_, places = choices()
    rows = torch.randn(21, 4).bfloat16()
    assert torch.equal(sums_of_rows(rows, places), rows.float()[places].sum(1).bfloat16())


def test_gradients_of_experts_go_to_the_buffer_before_megatrons_hook():
    """In two micro-batches, with an expert without rows, beside one matmul after another."""
    counts = torch.tensor([5, 0, 8])
    ends = counts.cumsum(0).to(torch.int32)
    weight = torch.nn.Parameter(torch.randn(3, 2, 4, 8).bfloat16())
    weight.main_grad = torch.zeros(3, 2, 4, 8)
    wanted = torch.zeros(3, 8, 8)
    for _ in range(2):
        x = torch.randn(13, 8).bfloat16().requires_grad_()
        factor = torch.randn(13, 8).bfloat16()
        out = ExpertsProduct.apply(x, weight, ends)
        out.backward(factor)
        assert weight.grad_added_to_main_grad, "megatron's hook adds nothing then"
        weight.grad = None
        matrices = weight.detach().flatten(1, 2).double().repeat_interleave(counts, 0)
        exact = (matrices @ x.detach().double()[:, :, None])[:, :, 0]
        torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
        exact = (matrices.mT @ factor.double()[:, :, None])[:, :, 0]
        torch.testing.assert_close(x.grad.double(), exact, rtol=1e-2, atol=1e-2)
        parts = zip(factor.split(counts.tolist()), x.detach().split(counts.tolist()), strict=True)
        wanted += torch.stack([of_out.float().t() @ of_x.float() for of_out, of_x in parts])
    found = weight.main_grad.flatten(1, 2)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)  # of bf16 on a CPU


def operations_of_a_layer(path, folder) -> tuple[str, list[str]]:
    """(class of the dispatcher, what waits, and what is done to rows as wide as the model, forward
    and backward).
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    from mca_lite import AutoModel, TrainingArguments

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            wide = any(isinstance(a, torch.Tensor) and a.shape[-1:] == x.shape[-1:] for a in args)
            names.extend([name] if wide or name in WAITS else [])
            return function(*args, **(kwargs or {}))

    class NoExperts(torch.nn.Module):
        room = 0

        def forward(self, x, tokens_per_expert, probs):
            return x * probs[:, None], None

    model = AutoModel.from_pretrained(path, TrainingArguments(output_dir=folder))
    [layer, *_] = [
        m for m in model[0].modules() if any(isinstance(c, Experts) for c in m.children())
    ]
    layer.experts, names = NoExperts(), []
    x = torch.randn(6, 2, model.config.hidden_size, requires_grad=True)
    with Names():
        layer(x)[0].sum().backward()
    return type(layer.token_dispatcher).__name__, names


def test_nothing_waits_or_adds_rows_up_on_one_rank(tmp_path):
    path = tiny_moe.save_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)
    [(dispatcher, names)] = world.run(operations_of_a_layer, 1, path, str(tmp_path / "run"))
    assert dispatcher == "LocalDispatcher"
    found = [name for name in names if name.startswith(ADDS) or name in WAITS]
    assert "index" in names and not found
