"""Masks, position ids and sequence lengths: pure functions over a batch. Letters: b rows, s positions."""

import torch


def get_ltor_masks_and_position_ids(
    input_ids: torch.Tensor,
    build_attention_mask: bool = True,
    attn_mask_1D: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(causal mask bool [b, 1, s, s] where True means hidden, position ids int64 [b, s] from 0 to s - 1).

    input_ids [b, s]. attn_mask_1D [b, s], 1 for tokens and 0 for padding, hides the padding's columns as well.
    build_attention_mask False: the mask is None, which the models take as causal.
    """
    b, s = input_ids.shape
    position_ids = torch.arange(s, dtype=torch.long, device=input_ids.device).expand(b, s)
    if not build_attention_mask:
        return None, position_ids
    visible = torch.ones(s, s, dtype=torch.bool, device=input_ids.device).tril().expand(b, 1, s, s)
    if attn_mask_1D is not None:
        visible = visible & attn_mask_1D.bool()[:, None, None, :]
    return ~visible, position_ids


def _document_lengths(attention_mask: torch.Tensor) -> torch.Tensor:
    """Lengths of the documents of a packed batch in order; a row's padding (0) is a document of its own at its end."""
    lengths = []
    for row in attention_mask:
        counts = torch.bincount(row.long())
        counts = torch.cat([counts[1:], counts[:1]])
        lengths.append(counts[counts > 0])
    return torch.cat(lengths)


def get_seqlens_in_batch(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_seqlens int32 [documents + 1] with a leading 0, the longest length int32) of a packed batch.

    attention_mask [b, s]: 1 for the first document of a row, 2 for the second, 0 for padding. The rows stand one behind
    the other; [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]] gives [0, 2, 5, 6, 7, 9, 12] and 3.
    """
    lengths = _document_lengths(attention_mask).to(torch.int32)
    zero = torch.zeros(1, dtype=torch.int32, device=lengths.device)
    return torch.cat([zero, lengths.cumsum(0, dtype=torch.int32)]), lengths.max()


def check_pack_seq_aligned(attention_mask: torch.Tensor, align_size: int) -> bool:
    """Whether every document of a packed batch, padding included, is a multiple of align_size long."""
    return bool((_document_lengths(attention_mask) % align_size == 0).all())
