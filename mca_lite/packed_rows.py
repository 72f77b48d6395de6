"""Packed rows: masks, borders, and the cut of a row over context-parallel ranks. Letters: b rows, s
positions, t tokens of a packed row, cp the context-parallel size.

A packed row is a row of documents that do not see each other. `cu_seqlens` are the documents'
borders, from 0 to t: what pads a row at its end is a document of its own. Under context parallelism
every document is cut into 2 cp chunks, of which rank r holds the chunks r and 2 cp - 1 - r: causal
attention is then the same work on every rank.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from .files import IGNORE_INDEX
from .mcore import PackedSeqParams
from .parallel import to_device


def get_ltor_masks_and_position_ids(
    input_ids: torch.Tensor,
    build_attention_mask: bool = True,
    attn_mask_1D: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(causal mask bool [b, 1, s, s] where True means hidden, position ids int64 [b, s] from 0 to s
    - 1).

    input_ids [b, s]. attn_mask_1D [b, s], 1 for tokens and 0 for padding, hides the padding's
    columns as well. build_attention_mask False: the mask is attn_mask_1D as it is; None, which the
    models take as causal, where there is none.
    """
    b, s = input_ids.shape
    position_ids = torch.arange(s, dtype=torch.long, device=input_ids.device).expand(b, s)
    if not build_attention_mask:
        return attn_mask_1D, position_ids
    visible = torch.ones(s, s, dtype=torch.bool, device=input_ids.device).tril().expand(b, 1, s, s)
    if attn_mask_1D is not None:
        visible = visible & attn_mask_1D.bool()[:, None, None, :]
    return ~visible, position_ids


def _document_lengths(row: torch.Tensor) -> torch.Tensor:
    """Lengths of a row's documents in order; padding (0) is one of its own at the end."""
    counts = torch.bincount(row.long())
    counts = torch.cat([counts[1:], counts[:1]])
    return counts[counts > 0]


def get_seqlens_in_batch(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_seqlens int32 [documents + 1] with a leading 0, the longest length int32) of a packed
    batch.

    attention_mask [b, s]: 1 for the first document of a row, 2 for the second, 0 for padding. The
    rows stand one behind the other; [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]] gives [0, 2, 5, 6, 7,
    9, 12] and 3.
    """
    lengths = torch.cat([_document_lengths(row) for row in attention_mask]).to(torch.int32)
    zero = torch.zeros(1, dtype=torch.int32, device=lengths.device)
    return torch.cat([zero, lengths.cumsum(0, dtype=torch.int32)]), lengths.max()


def check_pack_seq_aligned(attention_mask: torch.Tensor, align_size: int) -> bool:
    """Whether all documents are a multiple of align_size long; padding may have any length."""
    lengths = (_document_lengths(row[row != 0]) for row in attention_mask)
    return all(bool((of_row % align_size == 0).all()) for of_row in lengths)


# -- a batch as one packed row ---------------------------------------------------------------------


def pack_batch(batch: dict, document_multiple: int = 1, pad_token_id: int = 0) -> dict:
    """{"input_ids", "labels" int64 [1, t], "padding_mask" bool [1, t], "cu_seqlens": borders as a
    tuple} of the documents of a padded batch. padding_mask: True is padding.

    batch: input_ids, labels [b, s] and attention_mask [b, s] with a number for each document of a
    row, 0 for padding (which is dropped). Each document is padded to document_multiple inside,
    without labels.
    """
    ids = []
    labels = []
    pads = []
    cu = [0]
    mask = batch.get("attention_mask")
    mask = torch.ones_like(batch["input_ids"]) if mask is None else mask
    for row, row_labels, row_mask in zip(batch["input_ids"], batch["labels"], mask, strict=True):
        used = int((row_mask != 0).sum())
        start = 0
        for length in _document_lengths(row_mask[:used]).tolist() if used else ():
            padding = -length % document_multiple
            inside = slice(start, start + length)
            ids += [row[inside], row.new_full((padding,), pad_token_id)]
            labels += [row_labels[inside], row_labels.new_full((padding,), IGNORE_INDEX)]
            pads.append(torch.arange(length + padding) >= length)
            cu.append(cu[-1] + length + padding)
            start += length
    if not ids:  # nothing but padding: one empty document keeps every rank in step
        ids = [torch.full((document_multiple,), pad_token_id)]
        labels = [torch.full((document_multiple,), IGNORE_INDEX)]
        pads = [torch.ones(document_multiple, dtype=torch.bool)]
        cu.append(document_multiple)
    rows = {
        "input_ids": torch.cat(ids)[None],
        "labels": torch.cat(labels)[None],
        "padding_mask": torch.cat(pads)[None],
    }
    return {**rows, "cu_seqlens": tuple(cu)}


def pad_packed(batch: dict, length: int, pad_token_id: int = 0) -> dict:
    """The packed batch with a tail up to `length` tokens: a document of its own, without labels."""
    more = length - batch["input_ids"].shape[1]
    if not more:
        return batch
    values = {"input_ids": pad_token_id, "labels": IGNORE_INDEX, "padding_mask": True}
    rows = {
        k: torch.cat([batch[k], batch[k].new_full((1, more), v)], 1)
        for k, v in values.items()
        if k in batch
    }
    return {**rows, "cu_seqlens": (*batch["cu_seqlens"], length)}


def join_packed(batches: list[dict], counts: list[int]) -> dict:
    """Packed batches as one: the first counts[i] documents of each, without what pads them."""
    kept = []
    cu = [0]
    for batch, count in zip(batches, counts, strict=True):
        borders = batch["cu_seqlens"][1 : count + 1]
        start = cu[-1]
        cu += [start + border for border in borders]
        kept.append(borders[-1])
    rows = {
        key: torch.cat([batch[key][:, :end] for batch, end in zip(batches, kept, strict=True)], 1)
        for key in ("input_ids", "labels", "padding_mask")
    }
    return {**rows, "cu_seqlens": tuple(cu)}


class Targets(NamedTuple):
    """Labels [b, s], and for multi-token prediction what follows: ids and labels [k, b, s] of the
    tokens 1 to k places ahead of each, within its document; behind its end id 0 and no label."""

    labels: torch.Tensor
    next_ids: torch.Tensor
    next_labels: torch.Tensor

    @classmethod
    def ahead(cls, batch: dict, count: int) -> "Targets":
        """Of a whole batch, before context parallelism cuts it."""
        length = batch["input_ids"].shape[1]
        cu = torch.tensor(batch.get("cu_seqlens", (0, length)))
        ends = cu[1:].repeat_interleave(cu.diff())  # of each place, where its document ends
        places = torch.arange(length) + torch.arange(1, count + 1)[:, None]  # [k, s]
        is_beyond = (places >= ends)[:, None]  # [k, 1, s]
        places = places.clamp(max=length - 1)
        next_ids = batch["input_ids"].cpu()[:, places].transpose(0, 1)  # [k, b, s]
        next_labels = batch["labels"].cpu()[:, places].transpose(0, 1)
        return cls(
            batch["labels"],
            next_ids.masked_fill(is_beyond, 0),
            next_labels.masked_fill(is_beyond, IGNORE_INDEX),
        )


# -- how a rank sees a row -------------------------------------------------------------------------


@dataclass(eq=False)  # a key of caches, by identity
class RowLayout:
    """What core attention needs to know of a row, of which this context-parallel rank holds t / cp
    tokens.

    segments: (q0, q1, k0, k1), host numbers: local queries q0:q1 see the keys k0:k1, the last query
    the last key. positions int64 [t / cp]: each local token's position in its document. index int64
    [t / cp], in host memory, where rows are cut: its place in the whole row. order int64 [t], None
    without context parallelism: gathered local parts in the row's order. borders int32 [documents +
    1]: cu_seqlens of the whole row. longest: tokens of the longest document.
    """

    segments: list[tuple[int, int, int, int]]
    positions: torch.Tensor
    index: torch.Tensor
    order: torch.Tensor | None
    borders: torch.Tensor
    longest: int

    @functools.cached_property
    def same_length(self) -> int | None:
        """Tokens of each document where all have as many, and are whole on this rank."""
        lengths = {q1 - q0 for q0, q1, _, _ in self.segments}
        return self.longest if self.order is None and len(lengths) == 1 else None

    @functools.cached_property
    def varlen(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """(cu_seqlens of queries, of keys int32, keys' places int64, longest queries, longest keys)
        for a varlen kernel, which wants the keys of each segment side by side: without context
        parallelism they stand so, and places is None."""
        if self.order is None:
            return self.borders, self.borders, None, self.longest, self.longest
        device = self.positions.device
        q = np.array([b - a for a, b, _, _ in self.segments])
        k = np.array([d - c for _, _, c, d in self.segments])
        cu_q, cu_k = (
            to_device(torch.tensor(np.concatenate([[0], n.cumsum()]), dtype=torch.int32), device)
            for n in (q, k)
        )
        runs = [np.arange(c, d) for _, _, c, d in self.segments]
        places = to_device(torch.from_numpy(np.concatenate(runs)), device)
        return cu_q, cu_k, places, int(q.max()), int(k.max())


def zigzag(cu: tuple[int, ...], cp_size: int, cp_rank: int) -> torch.Tensor:
    """int64 [t / cp]: places in the whole row of a rank's tokens, in its order."""
    if cp_size == 1:
        return torch.arange(cu[-1])
    parts = []
    for start, end in zip(cu, cu[1:], strict=False):
        chunk, rest = divmod(end - start, 2 * cp_size)
        if rest:
            raise ValueError(
                f"a document of {end - start} tokens cannot be cut into 2 x {cp_size} chunks: pad "
                f"documents to a multiple of {2 * cp_size} under context_parallel_size {cp_size}"
            )
        for i in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(torch.arange(start + i * chunk, start + (i + 1) * chunk))
    return torch.cat(parts)


@functools.lru_cache(64)
def row_layout(cu: tuple[int, ...], cp_size: int, cp_rank: int, device: torch.device) -> RowLayout:
    """The layout of a row with borders `cu` on a context-parallel rank, on `device`."""
    segments = []
    for start, end in zip(cu, cu[1:], strict=False):
        if cp_size == 1:
            segments.append((start, end, start, end))
            continue
        chunk = (end - start) // (2 * cp_size)
        local = start // cp_size
        for n, i in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
            segments.append(
                (local + n * chunk, local + (n + 1) * chunk, start, start + (i + 1) * chunk)
            )
    index = zigzag(cu, cp_size, cp_rank)
    starts = torch.tensor(cu[:-1]).repeat_interleave(torch.tensor(cu).diff())
    order = None
    if cp_size > 1:
        parts = torch.cat([zigzag(cu, cp_size, r) for r in range(cp_size)])
        order = to_device(parts.argsort(), device)
    longest = max(end - start for start, end in zip(cu, cu[1:], strict=False))
    borders = torch.tensor(cu, dtype=torch.int32)
    positions, borders = (to_device(x, device) for x in (index - starts[index], borders))
    return RowLayout(segments, positions, index, order, borders, longest)


@dataclass
class PackedRow(PackedSeqParams):
    """megatron's packed parameters in the documented thd format, and the layout that our own core
    attention reads."""

    layout: RowLayout | None = None


def packed_row(cu: tuple[int, ...], cp_size: int, cp_rank: int, device: torch.device) -> PackedRow:
    """Packed parameters of a row with borders `cu`, of queries and keys, global under cp."""
    layout = row_layout(cu, cp_size, cp_rank, device)
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=layout.borders,
        cu_seqlens_kv=layout.borders,
        max_seqlen_q=layout.longest,
        max_seqlen_kv=layout.longest,
        layout=layout,
    )


def block_diagonal_mask(cu: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """bool [1, 1, t, t], True meaning hidden: causal, and other documents hidden. For models that
    know no packing."""
    document = torch.arange(len(cu) - 1).repeat_interleave(torch.tensor(cu).diff()).to(device)
    causal = torch.ones(len(document), len(document), dtype=torch.bool, device=device).tril()
    return ~(causal & (document[:, None] == document[None]))[None, None]
