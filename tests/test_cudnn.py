"""Attention of segments, whose keys are taken in two parts, against one mask."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mca_lite import part_cudnn
from mca_lite.part_cudnn import SegmentAttention, suits_cudnn
from tests.shared import tiny, world
from tests.shared.layouts import PACKED
from tests.shared.training import train


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


def foreseen_and_met(path: str, out: str) -> tuple[list, list]:
    """Sizes that a run of packed rows foresees, and those of the rows that it trains on."""
    from mca_lite.batch import row_layout
    from mca_lite.trainer import McaTrainer

    foreseen, met = [], []

    class Watched(McaTrainer):
        def _prepare_micro_batches(self, micro_batches, seq_length):
            if torch.is_grad_enabled():
                foreseen.extend(
                    [] if met else part_cudnn.first_sizes(self.look_ahead(self.batch_plan))
                )
                for batch in micro_batches:
                    layout = row_layout(batch["cu_seqlens"], 1, 0, torch.device("cpu"))
                    borders, longest = layout.varlen_of_graph
                    met.append((batch["input_ids"].shape[1], len(borders) - 1, longest))
            return micro_batches

    train(path, out, trainer_class=Watched, steps=2, count=7, dataloader_num_workers=0, **PACKED)
    return foreseen, met


def test_the_sizes_of_the_first_packed_rows_are_foreseen(tmp_path):
    path = tiny.save_model(tmp_path / "model", "qwen3")
    [(foreseen, met)] = world.run(foreseen_and_met, 1, str(path), str(tmp_path / "out"))
    assert foreseen == met and len(met) == 4


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(60)


def test_graphs_of_foreseen_sizes_are_built_by_the_first_attention(monkeypatch):
    calls = []

    def operator(q, k, v, attn_scale, *, cu_seqlens_q, max_seqlen_q, **unused):
        calls.append((len(q), len(cu_seqlens_q) - 1, max_seqlen_q))
        assert int(cu_seqlens_q[-1]) == len(q) and int(cu_seqlens_q.diff().max()) <= max_seqlen_q
        return q * k.sum() * v.sum(), None

    monkeypatch.setattr(torch, "ops", SimpleNamespace(cudnn=SimpleNamespace(sdpa_fwd=operator)))
    monkeypatch.setattr(part_cudnn, "foreseen_sizes", [(1024, 16, 256), (1024, 24, 512)])
    monkeypatch.setattr(part_cudnn, "planned_kinds", set())
    layout = part_cudnn.row_layout((0, 100, 500), 1, 0, torch.device("cpu"))
    heads = torch.randn(3, 500, 2, 4)
    out = part_cudnn.packed_by_cudnn(*heads, layout, None, None)
    wait_for_threads()
    assert sorted(calls) == [(500, 16, 512), (1024, 16, 256), (1024, 24, 512)]
    part_cudnn.packed_by_cudnn(*heads, layout, None, None)
    assert len(calls) == 4
    torch.testing.assert_close(out, heads[0] * heads[1].sum() * heads[2].sum())
    part_cudnn.packed_by_cudnn(*heads, layout, None, 3)  # a window has graphs of its own
    wait_for_threads()
    assert len(calls) == 7
