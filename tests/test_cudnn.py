"""Attention of segments, whose keys are taken in two parts, against one mask."""

import pytest
import torch
import torch.nn.functional as F

from mca_lite.part_cudnn import SegmentAttention, suits_cudnn


def attended(function, segments, scale) -> list[torch.Tensor]:
    """[output, gradients of q, k and v] in float64."""
    generator = torch.Generator().manual_seed(0)
    queries = max(q1 for _, q1, _, _ in segments)
    keys = max(k1 for *_, k1 in segments)
    shapes = (queries, 2, 3, 8), (keys, 2, 3, 8), (keys, 2, 3, 8)
    q, k, v = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )
    out = function(q, k, v, segments, scale)
    grad = torch.randn(*out.shape, generator=generator, dtype=torch.float64)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def masked(q, k, v, segments, scale):
    visible = torch.zeros(len(q), len(k), dtype=torch.bool)
    for q0, q1, k0, k1 in segments:
        part = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        visible[q0:q1, k0:k1] = part.tril(k1 - k0 - (q1 - q0))
    rows = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*rows, visible, scale=scale)
    return out.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(
    "segments",
    [
        [(0, 5, 0, 6)],
        [(0, 4, 0, 4), (4, 8, 0, 16)],  # rank 0 of two
        [(0, 4, 0, 8), (4, 8, 0, 12)],  # rank 1
        [(0, 2, 0, 2), (2, 4, 0, 8), (4, 5, 8, 9), (5, 6, 8, 12)],  # two documents
    ],
)
def test_segments_attend_as_with_a_mask(segments, scale):
    got = attended(SegmentAttention.apply, segments, scale)
    for found, wanted in zip(got, attended(masked, segments, scale), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_cudnn_is_for_cuda():
    assert not suits_cudnn(*torch.randn(3, 1, 1, 2, 8))
