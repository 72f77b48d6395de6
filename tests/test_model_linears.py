"""Linears of tensor parallelism, with their messages, against whole products."""

import functools

import pytest
import torch

from tests.shared import world

TOKENS = 6  # of the whole sequence
BATCH = 2
INPUTS = 4
OUTPUTS = 8


def drawn(*shape, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part_of(x, axis: int | None, rank: int) -> torch.Tensor:
    """The half of a rank; all of it without an axis."""
    return x if axis is None else x.chunk(2, axis)[rank].contiguous()


def on_a_rank(ways: list[dict]) -> list[list]:
    """[output, gradients of the input, the weight and a column-parallel linear's bias] of this
    rank, of both linears each way."""
    import torch.distributed as dist

    from mca_lite.model_linears import ColumnProduct, RowProduct, Way

    group, rank = dist.group.WORLD, dist.get_rank()
    found = []
    for keys in ways:
        way = Way(group, **keys)
        tokens = 0 if way.cuts_tokens else None
        # axes of the cuts of inputs, weights and outputs
        for linear, *axes in ((ColumnProduct, tokens, 0, 2), (RowProduct, 2, 1, tokens)):
            sizes = (TOKENS, BATCH, INPUTS), (OUTPUTS, INPUTS), (TOKENS, BATCH, OUTPUTS)
            x, weight, grad = (
                part_of(drawn(*size, seed=i), axis, rank)
                for i, (size, axis) in enumerate(zip(sizes, axes, strict=True))
            )
            x.requires_grad_()
            weight.requires_grad_()
            trained = [weight]
            if linear is ColumnProduct:
                trained.append(part_of(drawn(OUTPUTS, seed=3), 0, rank).requires_grad_())
            for parameter in trained:
                parameter.main_grad = torch.ones_like(parameter)
            out = linear.apply(x, *trained, way)
            out.backward(grad)
            found.append([part.detach().numpy() for part in (out, x.grad)])
            for parameter in trained:
                gradient = parameter.grad
                if way.accumulates:
                    assert parameter.grad_added_to_main_grad and gradient.shape == parameter.shape
                    gradient = parameter.main_grad - 1
                found[-1].append(gradient.numpy())
    return found


WAYS = [
    dict(cuts_tokens=is_cut, accumulates=accumulates, overlaps=is_cut)
    for is_cut in (False, True)
    for accumulates in (False, True)
]


def test_both_linears_multiply_as_one_rank_does():
    x = drawn(TOKENS, BATCH, INPUTS, seed=0).requires_grad_()
    weight = drawn(OUTPUTS, INPUTS, seed=1).requires_grad_()
    bias = drawn(OUTPUTS, seed=3).requires_grad_()
    product = x @ weight.t()
    out = product + bias
    out.backward(drawn(TOKENS, BATCH, OUTPUTS, seed=2))
    wanted = []
    for way in WAYS:
        tokens = 0 if way["cuts_tokens"] else None
        wanted.append([(out, 2), (x.grad, tokens), (weight.grad, 0), (bias.grad, 0)])
        wanted.append([(product, tokens), (x.grad, 2), (weight.grad, 1)])
    for rank, found in enumerate(world.run(on_a_rank, 2, WAYS)):
        for got, whole in zip(found, wanted, strict=True):
            for ours, (tensor, axis) in zip(got, whole, strict=True):
                part = part_of(tensor.detach(), axis, rank)
                torch.testing.assert_close(torch.from_numpy(ours), part, rtol=0, atol=1e-12)


def mean_error_of_each_output(is_adapted: bool) -> float:
    """The largest mean error, over 2,048 tokens, of an output of a bf16 linear with a bias."""
    from mca_lite.model_linears import ColumnProduct, Way
    from mca_lite.part_lora_product import AdaptedProduct, Factors, filled_room

    x = drawn(2048, 1, 64, seed=0).bfloat16()
    weight = (drawn(32, 64, seed=1) / 16).bfloat16()
    bias = (drawn(32, seed=2) / 64).bfloat16()
    if is_adapted:
        b = Factors([torch.zeros(32, 3)], [(slice(32), slice(3))])
        room = functools.partial(filled_room, weight, {}, 3, None, b)
        a = torch.ones(3, 64)
        out = AdaptedProduct.apply(x, weight, room, b, 1.0, None, None, bias, a, *b.matrices)
    else:
        out = ColumnProduct.apply(x, weight, bias, Way(None))
    exact = x.double() @ weight.double().t() + bias.double()
    return float((out.double() - exact).mean((0, 1)).abs().max())


@pytest.mark.parametrize("is_adapted", [False, True])
def test_errors_of_a_bias_cancel_over_tokens(is_adapted):
    # added to rounded numbers, a bias is off by the same error in all tokens: 6e-4 here
    assert mean_error_of_each_output(is_adapted) < 8e-5
