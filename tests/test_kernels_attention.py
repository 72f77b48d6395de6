"""Attention over keys in two parts, joined by their log-sum-exps, against one mask."""

import pytest
import torch
import torch.nn.functional as F

from mca_lite.kernels_attention import LateAttention, suits_cudnn


def attended(function, queries: int, keys: int, scale) -> list[torch.Tensor]:
    """[output, gradients of q, k and v] in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, queries, 8), (2, 3, keys, 8), (2, 3, keys, 8)
    q, k, v = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )
    out = function(q, k, v, scale)
    grad = torch.randn(*out.shape, generator=generator, dtype=torch.float64)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def masked(q, k, v, scale):
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, visible, scale=scale)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(("queries", "keys"), [(5, 6), (16, 48), (1, 9)])
def test_late_queries_attend_as_with_a_mask(queries, keys, scale):
    got = attended(LateAttention.apply, queries, keys, scale)
    for found, wanted in zip(got, attended(masked, queries, keys, scale), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_cudnn_is_for_cuda():
    assert not suits_cudnn(*torch.randn(3, 1, 1, 2, 8))
