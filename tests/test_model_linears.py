"""Linears of tensor parallelism, with their messages, against whole products."""

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
    """[output, gradient of the input, gradient of the weight] of this rank, of both linears each
    way."""
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
            weight.main_grad = torch.ones_like(weight)
            out = linear.apply(x, weight, way)
            out.backward(grad)
            if way.accumulates:
                assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
            of_weight = weight.main_grad - 1 if way.accumulates else weight.grad
            found.append([part.detach().numpy() for part in (out, x.grad, of_weight)])
    return found


WAYS = [
    dict(cuts_tokens=is_cut, accumulates=accumulates, overlaps=is_cut)
    for is_cut in (False, True)
    for accumulates in (False, True)
]


def test_both_linears_multiply_as_one_rank_does():
    x = drawn(TOKENS, BATCH, INPUTS, seed=0).requires_grad_()
    weight = drawn(OUTPUTS, INPUTS, seed=1).requires_grad_()
    out = x @ weight.t()
    out.backward(drawn(TOKENS, BATCH, OUTPUTS, seed=2))
    wanted = []
    for way in WAYS:
        tokens = 0 if way["cuts_tokens"] else None
        wanted.append([(out, 2), (x.grad, tokens), (weight.grad, 0)])
        wanted.append([(out, tokens), (x.grad, 2), (weight.grad, 1)])
    for rank, found in enumerate(world.run(on_a_rank, 2, WAYS)):
        for got, whole in zip(found, wanted, strict=True):
            for ours, (tensor, axis) in zip(got, whole, strict=True):
                part = part_of(tensor.detach(), axis, rank)
                torch.testing.assert_close(torch.from_numpy(ours), part, rtol=0, atol=1e-12)
