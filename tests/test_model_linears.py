"""Linears with their messages behind their products, against whole products."""

import torch

from tests.shared import world

TOKENS = 6  # of the whole sequence
BATCH = 2
INPUTS = 4
OUTPUTS = 8


def drawn(*shape, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def halves(x, axis: int, rank: int) -> torch.Tensor:
    return x.chunk(2, axis)[rank].contiguous()


def on_a_rank(accumulates: bool) -> list[list]:
    """[output, gradient of the input, gradient of the weight] of this rank, of both linears."""
    import torch.distributed as dist

    from mca_lite.model_linears import GatherLinear, LinearScatter

    group, rank = dist.group.WORLD, dist.get_rank()
    cuts = ((GatherLinear, 0, 0, 2), (LinearScatter, 2, 1, 0))  # of inputs, weights and outputs
    found = []
    for linear, of_inputs, of_weights, of_outputs in cuts:
        x = halves(drawn(TOKENS, BATCH, INPUTS, seed=0), of_inputs, rank).requires_grad_()
        weight = halves(drawn(OUTPUTS, INPUTS, seed=1), of_weights, rank).requires_grad_()
        weight.main_grad = torch.ones_like(weight)
        out = linear.apply(x, weight, group, accumulates)
        out.backward(halves(drawn(TOKENS, BATCH, OUTPUTS, seed=2), of_outputs, rank))
        if accumulates:
            assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
        of_weight = weight.main_grad - 1 if accumulates else weight.grad
        found.append([part.detach().numpy() for part in (out, x.grad, of_weight)])
    return found


def test_both_linears_multiply_as_one_rank_does():
    x = drawn(TOKENS, BATCH, INPUTS, seed=0).requires_grad_()
    weight = drawn(OUTPUTS, INPUTS, seed=1).requires_grad_()
    out = x @ weight.t()
    out.backward(drawn(TOKENS, BATCH, OUTPUTS, seed=2))
    of_column = [(out, 2), (x.grad, 0), (weight.grad, 0)]
    of_row = [(out, 0), (x.grad, 2), (weight.grad, 1)]
    for accumulates in (False, True):
        for rank, found in enumerate(world.run(on_a_rank, 2, accumulates)):
            for got, wanted in zip(found, (of_column, of_row), strict=True):
                for ours, (whole, axis) in zip(got, wanted, strict=True):
                    part = halves(whole.detach(), axis, rank)
                    torch.testing.assert_close(torch.from_numpy(ours), part, rtol=0, atol=1e-12)
