"""Masks, positions and lengths of packed rows: the documented examples, and what follows from them by hand."""

import pytest
import torch

from mca_lite.packing import check_pack_seq_aligned, get_ltor_masks_and_position_ids, get_seqlens_in_batch

PACKED = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]])


def test_seqlens_of_the_documented_example():
    cu_seqlens, longest = get_seqlens_in_batch(PACKED)
    assert cu_seqlens.tolist() == [0, 2, 5, 6, 7, 9, 12]  # the padding of a row is a sequence of its own
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


def test_padding_counts_for_alignment():
    assert check_pack_seq_aligned(torch.tensor([[1, 1, 2, 2, 2, 2, 0, 0]]), 2)
    assert not check_pack_seq_aligned(torch.tensor([[1, 1, 2, 2, 2, 2, 0]]), 2)
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
    mask, positions = get_ltor_masks_and_position_ids(torch.zeros(2, 3, dtype=torch.long), attn_mask_1D=one_dim)
    assert mask[0, 0].tolist() == [[False, True, True], [False, False, True], [False, False, True]]
    assert mask[1, 0].tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    assert positions[0].tolist() == [0, 1, 2]


def test_no_mask_is_built_where_none_is_asked_for():
    mask, positions = get_ltor_masks_and_position_ids(torch.zeros(1, 4, dtype=torch.long), build_attention_mask=False)
    assert mask is None and positions.tolist() == [[0, 1, 2, 3]]
