"""Masks, positions and lengths of packed rows: the documented examples, and what follows from them
by hand.
"""

import importlib.util
import itertools
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mca_lite.batch import (
    block_diagonal_mask,
    check_pack_seq_aligned,
    get_ltor_masks_and_position_ids,
    get_seqlens_in_batch,
    pack,
    packed_row,
    pad,
    row_layout,
    zigzag,
)
from mca_lite.data_batches import best_fit
from mca_lite.kernels import works
from mca_lite.model_attention import CoreAttention
from mca_lite.part_cudnn import has_frontend, packed_by_cudnn, suits_frontend, why_no_frontend

PACKED = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]])


def test_seqlens_of_the_documented_example():
    cu_seqlens, longest = get_seqlens_in_batch(PACKED)
    assert cu_seqlens.tolist() == [
        0,
        2,
        5,
        6,
        7,
        9,
        12,
    ]  # the padding of a row is a sequence of its own
    assert longest == 3
    assert cu_seqlens.dtype == longest.dtype == torch.int32


def test_alignment_of_the_documented_example():
    assert check_pack_seq_aligned(PACKED, 2) is False
    assert check_pack_seq_aligned(PACKED, 1) is True


@pytest.mark.parametrize(
    "mask, cu_seqlens, longest",
    [
        ([[1, 1, 1, 1]], [0, 4], 4),
        ([[1, 1, 0, 0]], [0, 2, 4], 2),
        ([[0, 0, 0]], [0, 3], 3),  # a row of padding only
        ([[1, 0, 0, 0]], [0, 1, 4], 3),  # padding may be the longest
        ([[1, 1, 3, 3, 3]], [0, 2, 5], 3),  # a number that is left out is no sequence
        ([[1, 1], [1, 1]], [0, 2, 4], 2),  # rows do not join, though they bear one number
    ],
)
def test_seqlens_count_documents_and_padding(mask, cu_seqlens, longest):
    found, found_longest = get_seqlens_in_batch(torch.tensor(mask))
    assert found.tolist() == cu_seqlens and found_longest == longest


def test_seqlens_end_at_the_number_of_positions():
    g = torch.Generator().manual_seed(0)
    mask = torch.randint(1, 6, (4, 17), generator=g).sort(dim=1).values
    mask[:, 14:] = 0
    cu_seqlens, longest = get_seqlens_in_batch(mask)
    assert cu_seqlens[-1] == 4 * 17
    assert longest == cu_seqlens.diff().max() and (cu_seqlens.diff() > 0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8])
def test_seqlens_take_a_mask_of_any_integer_type(dtype):
    assert get_seqlens_in_batch(torch.tensor([[1, 1, 0]]).to(dtype))[0].tolist() == [0, 2, 3]


def test_documents_are_aligned_and_padding_may_have_any_length():
    assert check_pack_seq_aligned(torch.tensor([[1, 1, 2, 2, 2, 2, 0, 0]]), 2)
    assert check_pack_seq_aligned(torch.tensor([[1, 1, 2, 2, 0], [1, 1, 1, 1, 0]]), 2)
    assert not check_pack_seq_aligned(torch.tensor([[1, 1, 2, 2, 2, 0]]), 2)
    assert not check_pack_seq_aligned(torch.tensor([[1, 1, 2, 2, 2, 2]]), 4)


def test_mask_hides_the_future_and_positions_count_up():
    mask, positions = get_ltor_masks_and_position_ids(torch.zeros(2, 3, dtype=torch.long))
    hidden = [[False, True, True], [False, False, True], [False, False, False]]
    assert mask.shape == (2, 1, 3, 3) and mask.dtype == torch.bool
    assert mask[0, 0].tolist() == mask[1, 0].tolist() == hidden
    assert positions.tolist() == [[0, 1, 2], [0, 1, 2]] and positions.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_mask_hides_the_padding_of_its_own_row_only(dtype):
    one_dim = torch.tensor([[1, 1, 0], [1, 1, 1]]).to(dtype)
    mask, positions = get_ltor_masks_and_position_ids(
        torch.zeros(2, 3, dtype=torch.long), attn_mask_1D=one_dim
    )
    assert mask[0, 0].tolist() == [[False, True, True], [False, False, True], [False, False, True]]
    assert mask[1, 0].tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    assert positions[0].tolist() == [0, 1, 2]


def test_no_mask_is_built_where_none_is_asked_for():
    mask, positions = get_ltor_masks_and_position_ids(
        torch.zeros(1, 4, dtype=torch.long), build_attention_mask=False
    )
    assert mask is None and positions.tolist() == [[0, 1, 2, 3]]
    ones = torch.ones(1, 4)
    assert get_ltor_masks_and_position_ids(ones, False, attn_mask_1D=ones)[0] is ones


# -- the packer and the cut of a row


def test_best_fit_keeps_every_sample_once_and_fills_the_fullest_pack():
    packs = best_fit(np.array([5, 3, 8, 2, 7, 1]), 10)
    # longest first: 8 | 7 | 5 | 3 joins 7 | 2 joins 8 | 1 joins 5
    assert [pack.tolist() for pack in packs] == [[2, 3], [1, 4], [0, 5]]


def test_best_fit_wastes_little_on_many_samples():
    lengths = np.random.default_rng(0).integers(20, 600, 3000)
    packs = best_fit(lengths, 2048)
    assert sorted(np.concatenate(packs).tolist()) == list(range(3000))
    assert max(lengths[p].sum() for p in packs) <= 2048
    assert 1 - lengths.sum() / (len(packs) * 2048) < 0.005


def test_best_fit_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="sample 1 of 9 tokens.*cutoff_len"):
        best_fit(np.array([3, 9]), 8)


def test_pack_batch_drops_padding_and_aligns_documents():
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 5, 0], [6, 7, 0, 0, 0, 0]]),
        "labels": torch.tensor([[2, 3, -100, 5, 6, -100], [7, 8, -100, -100, -100, -100]]),
        "attention_mask": torch.tensor([[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0]]),
    }
    packed = pack(batch, document_multiple=4, pad_token_id=9)
    assert packed["input_ids"].tolist() == [[1, 2, 3, 9, 4, 5, 9, 9, 6, 7, 9, 9]]
    assert packed["labels"].tolist() == [[2, 3, -100, -100, 5, 6, -100, -100, 7, 8, -100, -100]]
    assert packed["cu_seqlens"] == (0, 4, 8, 12)
    longer = pad(packed, 16, 9)
    assert longer["cu_seqlens"] == (0, 4, 8, 12, 16) and longer["input_ids"].shape == (1, 16)
    assert longer["labels"][0, 12:].tolist() == [-100] * 4


def test_a_batch_of_padding_alone_still_makes_a_row():
    empty = {
        "input_ids": torch.zeros(1, 3).long(),
        "labels": torch.zeros(1, 3).long(),
        "attention_mask": torch.zeros(1, 3),
    }
    packed = pack(empty, document_multiple=4)
    assert packed["cu_seqlens"] == (0, 4) and packed["labels"].eq(-100).all()


def test_ranks_of_context_parallelism_hold_mirrored_chunks_of_every_document():
    cu = (0, 8, 12)  # two documents, four chunks each for two ranks
    assert zigzag(cu, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag(cu, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    layout = row_layout(cu, 2, 0, torch.device("cpu"))
    assert layout.positions.tolist() == [0, 1, 6, 7, 0, 3]
    # the first chunk sees itself, the last one the whole document
    assert layout.segments == [(0, 2, 0, 2), (2, 4, 0, 8), (4, 5, 8, 9), (5, 6, 8, 12)]
    gathered = torch.cat([zigzag(cu, 2, r) for r in range(2)])
    assert gathered[layout.order].tolist() == list(range(12))
    cu_q, cu_k, places, max_q, max_k = layout.varlen
    assert cu_q.tolist() == [0, 2, 4, 5, 6] and cu_k.tolist() == [0, 2, 10, 11, 15]
    assert places.tolist() == [0, 1, *range(8), 8, *range(8, 12)] and (max_q, max_k) == (2, 8)


def test_documents_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="5 tokens cannot be cut into 2 x 2 chunks"):
        zigzag((0, 5), 2, 0)


def test_a_mask_of_a_long_row_is_refused_in_words():
    with pytest.raises(ValueError, match=r"70,000 tokens: .* would take 5 GiB.*use_mca: true"):
        block_diagonal_mask((0, 40_000, 70_000), torch.device("cpu"))


def test_block_diagonal_mask_hides_the_future_and_other_documents():
    hidden = block_diagonal_mask((0, 2, 3), torch.device("cpu"))[0, 0]
    assert hidden.tolist() == [[False, True, True], [False, False, True], [True, True, False]]


def test_packed_parameters_are_megatrons_thd_format():
    params = packed_row((0, 4, 6), 1, 0, torch.device("cpu"))
    assert params.qkv_format == "thd" and params.cu_seqlens_q.dtype == torch.int32
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 4, 6]
    assert params.max_seqlen_q == params.max_seqlen_kv == 4


def core_attention(window=None):
    """Core attention of 4 heads and 2 query groups of 8 channels."""
    config = SimpleNamespace(
        layer_type=lambda number: "sliding_attention",
        sliding_window=window,
        attn_logit_softcapping=None,
        attention_sinks=False,
        attention_dropout=0.0,
        softmax_scale=None,
        recompute_granularity=None,
        rows_are_packed=True,
    )
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return CoreAttention(config, 1, SimpleNamespace(cp=alone)).eval()


@pytest.mark.parametrize(
    ("cu", "window", "calls"),
    [((0, 4, 8, 12), None, 1), ((0, 4, 8, 12), 3, 3), ((0, 4, 8, 11), None, 3), ((0, 12), None, 1)],
    ids=["one length", "narrow window", "lengths differ", "one document"],
)
def test_documents_of_one_length_are_rows_of_one_product(cu, window, calls, monkeypatch):
    core, generator = core_attention(window), torch.Generator().manual_seed(0)
    tensors = [torch.randn(cu[-1], 1, n, 8, generator=generator) for n in (4, 2, 2)]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    one_by_one = torch.cat(
        [core(*(x[a:b] for x in tensors)) for a, b in zip(cu, cu[1:], strict=False)]
    )
    attend, seen = F.scaled_dot_product_attention, []
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: seen.append(a) or attend(*a, **k)
    )
    row = packed_row(cu, 1, 0, torch.device("cpu"))
    got = core(*tensors, packed_seq_params=row)
    assert len(seen) == calls
    torch.testing.assert_close(got, one_by_one)
    grad = torch.randn(got.shape, generator=generator)
    for x, y in zip(
        torch.autograd.grad(got, tensors, grad),
        torch.autograd.grad(one_by_one, tensors, grad),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_the_varlen_kernel_gets_the_borders_that_megatron_gets():
    row = packed_row((0, 4, 6), 1, 0, torch.device("cpu"))
    cu_q, cu_k, places, max_q, max_k = row.layout.varlen
    assert cu_q is cu_k is row.cu_seqlens_q and places is None and max_q == max_k == 4


def test_borders_for_a_graph_are_rounded_up_by_empty_documents():
    row = packed_row((0, 4, 261), 1, 0, torch.device("cpu"))
    borders, longest = row.layout.varlen_of_graph
    assert borders.tolist() == [0, 4, *[261] * 15] and borders.dtype == torch.int32
    assert longest == 384
    row = packed_row(tuple(range(0, 17 * 8, 8)), 1, 0, torch.device("cpu"))  # 16 documents
    borders, longest = row.layout.varlen_of_graph
    assert borders.tolist() == list(range(0, 17 * 8, 8)) and longest == 256
    row = packed_row(tuple(range(0, 50 * 600, 600)), 1, 0, torch.device("cpu"))
    borders, longest = row.layout.varlen_of_graph
    assert len(borders) == 65 and longest == 768
    row = packed_row(tuple(range(0, 49 * 520, 520)), 1, 0, torch.device("cpu"))
    borders, longest = row.layout.varlen_of_graph
    assert len(borders) == 49 and longest == 768


@pytest.mark.parametrize("window", [None, 3])
def test_cudnns_operator_gets_a_packed_row(window):
    """By a stand-in of nvidia-cudnn-frontend's operator: an image of its documented arguments."""

    def documents(
        q, k, v, attn_scale, *, is_causal, window_left, cu_seqlens_q, cu_seqlens_kv, **longest
    ):
        assert is_causal and set(longest.values()) == {256}
        assert torch.equal(cu_seqlens_q, cu_seqlens_kv) and len(cu_seqlens_q) == 17
        outs = []
        for start, stop in itertools.pairwise(cu_seqlens_q.tolist()):
            visible = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
            if window_left > 0:  # keys that a query sees, itself among them
                visible = visible.triu(1 - window_left)
            parts = (x[start:stop].transpose(0, 1) for x in (q, k, v))
            out = F.scaled_dot_product_attention(*parts, visible, scale=attn_scale, enable_gqa=True)
            outs.append(out.transpose(0, 1))
        return torch.cat(outs), None

    operators = SimpleNamespace(cudnn=SimpleNamespace(sdpa_fwd=documents))
    layout = packed_row((0, 2, 8), 1, 0, torch.device("cpu")).layout
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(8, heads, 4, generator=generator) for heads in (4, 2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "ops", operators)
        got = packed_by_cudnn(q, k, v, layout, None, window)
    number = torch.tensor([0] * 2 + [1] * 6)
    visible = (number[:, None] == number).tril().triu(1 - (window or 8))
    rows = (x.transpose(0, 1) for x in (q, k, v))
    wanted = F.scaled_dot_product_attention(*rows, visible, enable_gqa=True)
    torch.testing.assert_close(got, wanted.transpose(0, 1))


@pytest.fixture
def fresh_answers():
    """Kernels and packages are looked for again, before a test and after it."""
    answers = has_frontend, why_no_frontend, works

    def forget():
        for function in answers:
            function.cache_clear()

    forget()
    yield forget
    forget()


def test_cudnns_operator_is_for_many_tokens_on_hopper_gpus_alone(monkeypatch, fresh_answers):
    class Queries(torch.Tensor):
        is_cuda = True

    many = torch.empty(4096, 16, 128, dtype=torch.bfloat16, device="meta")
    assert not suits_frontend(many)  # no GPU
    on_gpu = many.as_subclass(Queries)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not suits_frontend(on_gpu)  # not installed: no warning
    fresh_answers()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.warns(UserWarning, match="nvidia-cudnn-frontend cannot be used: No module"):
        assert not suits_frontend(on_gpu)
    fresh_answers()
    for name in ("cudnn", "cudnn.sdpa", "cudnn.sdpa.fwd", "cudnn.sdpa.fwd.torch_op"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert suits_frontend(on_gpu)
    assert not suits_frontend(on_gpu[:100])
    assert not suits_frontend(on_gpu.float())
    fresh_answers()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not suits_frontend(on_gpu)
