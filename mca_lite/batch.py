"""The columns of a micro-batch: padding, packing, joining and splitting them; masks and borders of
packed rows.

A batch is a dict of columns, most of which tables.COLUMNS declares. Letters: b rows, s positions, t
tokens of a packed row, cp the context-parallel size.

The collator's batch has rows of documents, which attention_mask numbers. An arranged batch has
padding_mask, and either one document per row or one packed row with document borders, `cu_seqlens`
from 0 to t. Documents of a packed row do not see each other; padding at its end counts as a
document. Columns per document or sample are then [n], without fillers.

Under context parallelism each document is split into 2 cp chunks, and rank r has chunks r and 2 cp
- 1 - r, so that causal attention is the same work on every rank.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from .errors import expect
from .mcore import PackedSeqParams
from .parallel import to_device
from .tables import COLUMNS, is_of_inputs, registered_columns

Batch: TypeAlias = dict[str, Any]  # columns by name
_Function = TypeVar("_Function", bound=Callable[..., Any])


def for_backward(function: _Function) -> _Function:
    """Decorate a function whose result is cached, so that its tensors can be saved for backward
    even if the first call is in inference mode."""
    decorated: Any = torch.inference_mode(False)(function)
    return decorated


# -- from the collator's rows to what a model takes


def padding_of(name: str, pad_token_id: int) -> float:
    """The value of a column at padded positions: pad_token_id for input_ids, otherwise the column's
    declared padding (-100 for labels)."""
    return pad_token_id if name == "input_ids" else COLUMNS[name].padding


def is_of_tokens(name: str) -> bool:
    return name in COLUMNS and COLUMNS[name].per == "token"


def document_lengths(mask: torch.Tensor) -> list[list[int]]:
    """Token counts of the documents in each row, one list per row. mask [b, s]: each token's
    document number in its row, from 1; 0 for padding."""
    counts = (torch.bincount(row)[1:] for row in mask.long().clamp(min=0))
    return [of_row[of_row > 0].tolist() for of_row in counts]


def _places(lengths: list[list[int]], width: int) -> list[torch.Tensor]:
    """For each document the indices of its tokens, counted over a batch's rows laid end to end [b *
    width]. lengths: for each row the lengths of its documents, which follow one another from the
    row's start. width: tokens in a row, with padding."""
    return [
        places
        for number, of_row in enumerate(lengths)
        for places in (torch.arange(sum(of_row)) + number * width).split(of_row)
    ]


def _padded(column: torch.Tensor, dim: int, more: int, value: float) -> torch.Tensor:
    """Lengthen a column at its end: `more` elements with the number `value` are appended along
    dimension `dim`."""
    return F.pad(column, (0, 0) * (column.dim() - dim - 1) + (0, more), value=value)


def _taken(
    batch: Batch,
    places: torch.Tensor | None,
    lengths: list[list[int]],
    per_sample: int,
    pad_token_id: int,
) -> Batch:
    """Keep only some tokens of a batch. Columns per token are indexed with `places`; columns per
    document or sample become [n], without the values of padding rows; columns of images and other
    inputs stay as they are.

    places: indices counted over the rows laid end to end, -1 for padding; None: columns per token
    stay too. lengths: from document_lengths(). per_sample: documents per sample."""
    taken = {}
    for name, column in batch.items():
        if is_of_inputs(name):
            taken[name] = column
            continue
        if not is_of_tokens(name):
            rows = zip(column, lengths, strict=True)
            column = torch.cat([row[: len(of_row)] for row, of_row in rows])
            if COLUMNS[name].per == "sample":
                column = _of_samples(name, column, per_sample)
        elif places is not None:
            column = _padded(column.flatten(0, 1), 0, 1, padding_of(name, pad_token_id))[places]
        taken[name] = column
    return taken


def _of_samples(name: str, column: torch.Tensor, per_sample: int) -> torch.Tensor:
    """Reduce a column with a value per document to one with a value per sample: [documents] ->
    [samples]. per_sample: documents per sample. name: the column's, for the error. Raises
    ValueError if the documents of a sample have different values."""
    of_samples = column.view(len(column) // per_sample, per_sample)
    expect(
        bool((of_samples == of_samples[:, :1]).all()),
        f"the documents of a sample have different numbers in {name}: expected one for the sample",
    )
    return of_samples[:, 0]


def _with_masks(batch: Batch) -> Batch:
    """A copy of a batch with attention_mask (ones if absent) and padding_mask (True where
    attention_mask is 0). At these positions the registered columns per token, such as those that
    user scripts added, get their padding value."""
    mask = batch.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(batch["input_ids"])
    batch = {**batch, "attention_mask": mask, "padding_mask": mask == 0}
    for name, column in registered_columns().items():
        if column.per == "token" and name in batch:
            is_padding = mask.view(*mask.shape, *[1] * column.more_dims) == 0
            batch[name] = batch[name].masked_fill(is_padding, column.padding)
    return batch


def pack(
    batch: Batch, document_multiple: int = 1, pad_token_id: int = 0, documents_per_sample: int = 1
) -> Batch:
    """Join all documents of a collated batch into one packed row [1, t], without the rows' padding.
    Adds "cu_seqlens", the document borders, as a tuple.

    Each document is padded to a multiple of document_multiple, without labels. A batch of padding
    alone becomes one document of document_multiple padding tokens, because every rank must take
    part in a step. Columns per sample keep one value for each documents_per_sample documents;
    ValueError if these have different values.
    """
    batch = _with_masks(batch)
    mask = batch.pop("attention_mask")
    lengths = document_lengths(mask)
    documents = _places(lengths, mask.shape[1]) or [torch.arange(0)]
    padded = []
    for places in documents:
        chunks = max(1, -(-len(places) // document_multiple))
        padded.append(F.pad(places, (0, chunks * document_multiple - len(places)), value=-1))
    packed = _taken(batch, torch.cat(padded)[None], lengths, documents_per_sample, pad_token_id)
    packed["cu_seqlens"] = tuple(itertools.accumulate(map(len, padded), initial=0))
    return packed


def split(batch: Batch, documents_per_sample: int = 1, pad_token_id: int = 0) -> Batch:
    """Split the rows of a collated batch into one document per row: [b * documents_per_sample,
    longest document]. With documents_per_sample 1 rows stay as they are.

    A row of padding (a filler) becomes documents_per_sample rows of padding. With
    documents_per_sample above 1, raises ValueError if another row has a different number of
    documents, or if the documents of a sample have different values in a column per sample.
    """
    batch = _with_masks(batch)
    mask = batch["attention_mask"]
    lengths = document_lengths(mask)
    rows = None
    if documents_per_sample > 1:
        batch["attention_mask"] = (mask != 0).long()
        counts = set(map(len, lengths)) - {0, documents_per_sample}
        expect(
            not counts,
            f"rows hold {sorted(counts)} documents, expected {documents_per_sample}: set "
            "sequence_packing: true",
        )
        # micro-batches of a pipeline need equal shapes, so a filler gets rows too
        with_fillers = [of_row or [1] * documents_per_sample for of_row in lengths]
        places = _places(with_fillers, mask.shape[1])
        rows = pad_sequence(places, batch_first=True, padding_value=-1)
    return _taken(batch, rows, lengths, documents_per_sample, pad_token_id)


def pad(batch: Batch, length: int, pad_token_id: int = 0) -> Batch:
    """Pad an arranged batch (from pack or split) at the right to `length` positions. In a packed
    row the added padding becomes one more document, without labels."""
    more = length - batch["input_ids"].shape[1]
    if not more:
        return batch
    padded = dict(batch)
    for name, column in batch.items():
        if is_of_tokens(name):
            padded[name] = _padded(column, 1, more, padding_of(name, pad_token_id))
    if "cu_seqlens" in batch:
        padded["cu_seqlens"] = (*batch["cu_seqlens"], length)
    return padded


def real_documents(batch: Batch) -> torch.Tensor:
    """bool [documents] for an arranged batch (from pack or split): False for a document that is
    padding, such as a filler row or the padding at the end of a packed row."""
    if "cu_seqlens" in batch:
        return ~batch["padding_mask"][0, list(batch["cu_seqlens"][:-1])]
    return ~batch["padding_mask"][:, 0]


def in_documents(batch: Batch, values: Any, parts: int = 1) -> torch.Tensor:
    """Sum per-token values over each document of an arranged batch (from pack or split): [...,
    rows, s] -> [..., documents], documents of padding included. parts: number of ranks that each
    hold an equal part of every document; `values` has one rank's tokens, and the sums are over
    these."""
    if "cu_seqlens" not in batch:
        return values.sum(-1)
    lengths = np.diff(batch["cu_seqlens"]) // parts
    return torch.stack([part.sum(-1) for part in values[..., 0, :].split(lengths.tolist(), -1)], -1)


def _without_tail(packed: Batch) -> dict[str, Any]:
    """A packed batch without the documents of padding at its end."""
    count = int(real_documents(packed).sum())
    borders = packed["cu_seqlens"][: count + 1]
    tokens = {name: packed[name][:, : borders[-1]] for name in packed if is_of_tokens(name)}
    return {**packed, **tokens, "cu_seqlens": borders}


def join(batches: list[Batch]) -> Batch:
    """Concatenate arranged batches (all from pack, or all from split) into one. Packed rows are
    laid end to end, each without the padding at its end. Unpacked rows, of equal length, become
    rows of one batch."""
    joined = {}
    is_packed = "cu_seqlens" in batches[0]
    if is_packed:
        batches = list(map(_without_tail, batches))
        sizes = [np.diff(batch["cu_seqlens"]) for batch in batches]
        joined["cu_seqlens"] = (0, *np.concatenate(sizes).cumsum().tolist())
    for name in set().union(*batches) - joined.keys():
        end_to_end = is_packed and is_of_tokens(name)
        columns = [
            batch[name] for batch in batches if name in batch
        ]  # a batch of text has no column of pictures
        joined[name] = torch.cat(columns, dim=int(end_to_end))
    return joined


def model_columns(batch: Batch) -> list[str]:
    """The names of the batch columns that the model's forward pass takes as arguments."""
    return [name for name in batch if name in COLUMNS and COLUMNS[name].to_model]


def to_rank(
    batch: Mapping[str, Any],
    names: Sequence[str],
    places: torch.Tensor | None,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Move the columns `names` of an arranged batch (from pack or split) to a device -> {name:
    tensor}. Columns per token keep only the rank's positions `places` (None: all)."""
    columns = {}
    for name in names:
        column = batch[name]
        if places is not None and is_of_tokens(name):
            column = column[:, places]
        columns[name] = to_device(column, device)
    return columns


# -- masks and borders, as mcore_adapter has them


def get_ltor_masks_and_position_ids(
    input_ids: torch.Tensor,
    build_attention_mask: bool = True,
    attn_mask_1D: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(causal mask bool [b, 1, s, s], True means hidden; position ids int64 [b, s] from 0).

    input_ids [b, s]. attn_mask_1D [b, s]: 1 for a token, 0 for padding, which is hidden too.
    build_attention_mask: if False, attn_mask_1D is returned in place of the mask; models read None
    as causal.
    """
    b, s = input_ids.shape
    position_ids = torch.arange(s, device=input_ids.device).expand(b, s)
    if not build_attention_mask:
        return attn_mask_1D, position_ids
    visible = torch.ones(s, s, dtype=torch.bool, device=input_ids.device).tril().expand(b, 1, s, s)
    if attn_mask_1D is not None:
        visible = visible & attn_mask_1D.bool()[:, None, None, :]
    return ~visible, position_ids


def get_seqlens_in_batch(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_seqlens int32 [documents + 1] from 0, longest document int32) for the rows of a batch,
    concatenated.

    attention_mask [b, s]: 1 for a row's first document, 2 for its second, 0 for padding, which
    counts as a document. [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]] gives [0, 2, 5, 6, 7, 9, 12] and
    3.
    """
    lengths: list[int] = []
    for of_row in document_lengths(attention_mask):
        padding = attention_mask.shape[1] - sum(of_row)
        lengths += filter(None, [*of_row, padding])
    cu = _borders(torch.tensor(lengths)).to(attention_mask.device)
    return cu, cu.diff().max()


def check_pack_seq_aligned(attention_mask: torch.Tensor, align_size: int) -> bool:
    """True if every document's length is a multiple of align_size; padding may have any length."""
    lengths = itertools.chain(*document_lengths(attention_mask))
    return not any(length % align_size for length in lengths)


# -- a row on a rank

# the smallest sizes of varlen_of_graph
GRAPH_DOCUMENTS = 16
GRAPH_LENGTH = 256


def _rounded(size: int, least: int) -> int:
    """Round a size up, so that few different sizes occur: to the next of least * 1, 1.5, 2, 3, 4,
    6, 8, and so on."""
    above = least
    while above < size:
        above *= 2
    return max(least, above * 3 // 4) if above * 3 // 4 >= size else above


@dataclass(eq=False)  # compared by identity, as a key of caches
class RowLayout:
    """The segments, positions and borders of a packed row that attention needs on one
    context-parallel rank. The rank holds t / cp of the row's t tokens.

    segments: (q0, q1, k0, k1): the rank's queries q0:q1 see keys k0:k1 of the whole row, causally,
    so that the last query sees the last key. positions int64 [t / cp]: position of each of the
    rank's tokens in its document. index int64 [t / cp], on the host: their indices in the whole
    row. order int64 [t]: permutes the concatenated tokens of all ranks into the row's order; None
    if cp is 1. borders int32 [documents + 1]: cu_seqlens of the whole row. longest: length of the
    longest document."""

    segments: list[tuple[int, int, int, int]]
    positions: torch.Tensor
    index: torch.Tensor
    order: torch.Tensor | None
    borders: torch.Tensor
    longest: int

    @functools.cached_property
    def same_length(self) -> int | None:
        """The length of all documents, if they have the same one and cp is 1; otherwise None."""
        lengths = {q1 - q0 for q0, q1, _, _ in self.segments}
        return self.longest if self.order is None and len(lengths) == 1 else None

    @functools.cached_property
    @for_backward
    def documents(self) -> torch.Tensor:
        """int64 [t]: for each token of the whole row the index of its document."""
        length = len(self.index if self.order is None else self.order)
        places = torch.arange(length, device=self.borders.device)
        return torch.bucketize(places, self.borders[1:], right=True)

    @functools.cached_property
    @for_backward
    def varlen(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """Arguments for a varlen attention kernel: (cu_seqlens of queries, cu_seqlens of keys, key
        indices, longest query segment, longest key segment).

        cu_seqlens are int32. Key indices, int64, gather the keys of all segments from the whole
        row; None if cp is 1, because keys are in order then.
        """
        if self.order is None:
            return self.borders, self.borders, None, self.longest, self.longest
        q0, q1, k0, k1 = torch.tensor(self.segments).T
        queries = q1 - q0
        keys = k1 - k0
        runs = [torch.arange(start, stop) for _, _, start, stop in self.segments]
        cu_q, cu_k, places = (
            to_device(x, self.positions.device)
            for x in (_borders(queries), _borders(keys), torch.cat(runs))
        )
        return cu_q, cu_k, places, int(queries.max()), int(keys.max())

    @functools.cached_property
    @for_backward
    def varlen_of_graph(self) -> tuple[torch.Tensor, int]:
        """(cu_seqlens int32, longest document) for an attention kernel that is compiled for fixed
        shapes. The number of documents and the longest length are rounded up to few sizes, so that
        one kernel serves many rows; empty documents are appended to cu_seqlens. Only for cp 1."""
        count = len(self.borders) - 1
        more = _rounded(count, GRAPH_DOCUMENTS) - count
        borders = torch.cat((self.borders, self.borders[-1:].expand(more)))
        return borders, _rounded(self.longest, GRAPH_LENGTH)


def _borders(lengths: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: cu_seqlens (cumulative sums from 0) for n lengths."""
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def _chunks(cu: tuple[int, ...], cp_size: int, cp_rank: int) -> Iterator[tuple[int, int, int]]:
    """Yield the chunks of a packed row that a context-parallel rank holds: (document start, chunk
    start, chunk end), as indices in the whole row. cu: the row's document borders. With cp_size 1
    each document is one chunk. With more, the rank holds two of the 2 * cp_size equal chunks of
    each document; ValueError if a document cannot be cut so."""
    for start, end in itertools.pairwise(cu):
        if cp_size == 1:
            yield start, start, end
            continue
        chunk, rest = divmod(end - start, 2 * cp_size)
        expect(
            not rest,
            f"a document of {end - start} tokens cannot be cut into 2 x {cp_size} chunks: pad "
            f"documents to a multiple of {2 * cp_size} under context_parallel_size {cp_size}",
        )
        for i in (cp_rank, 2 * cp_size - 1 - cp_rank):
            yield start, start + i * chunk, start + (i + 1) * chunk


def zigzag(cu: tuple[int, ...], cp_size: int, cp_rank: int) -> torch.Tensor:
    """The tokens of a packed row that a context-parallel rank holds, in its order: int64 [t / cp],
    indices in the whole row. cu: the row's document borders, from 0 to t. Raises ValueError if
    cp_size is above 1 and a document cannot be cut into 2 * cp_size equal chunks."""
    return torch.cat([torch.arange(start, end) for _, start, end in _chunks(cu, cp_size, cp_rank)])


@functools.lru_cache(16)  # most pipelines have fewer micro-batches in flight
@for_backward
def row_layout(cu: tuple[int, ...], cp_size: int, cp_rank: int, device: torch.device) -> RowLayout:
    """The RowLayout (segments and positions for attention) of a packed row on a context-parallel
    rank. cu: the row's document borders. Tensors for attention are on `device`. Raises ValueError
    if cp_size is above 1 and a document cannot be cut into 2 * cp_size equal chunks."""
    borders = torch.tensor(cu)
    lengths = borders.diff()
    segments = []
    local = 0
    for first, start, end in _chunks(cu, cp_size, cp_rank):
        stop = local + end - start
        segments.append((local, stop, first, end))
        local = stop
    index = zigzag(cu, cp_size, cp_rank)
    order = None
    if cp_size > 1:
        parts = torch.cat([zigzag(cu, cp_size, r) for r in range(cp_size)])
        order = to_device(parts.argsort(), device)
    starts = borders[:-1].repeat_interleave(lengths)
    positions = to_device(index - starts[index], device)
    borders = to_device(borders.int(), device)
    return RowLayout(segments, positions, index, order, borders, int(lengths.max()))


@dataclass
class PackedRow(PackedSeqParams):
    """megatron's PackedSeqParams for packed rows (format thd), with the RowLayout that this
    package's attention needs."""

    layout: RowLayout | None = None


def packed_row(cu: tuple[int, ...], cp_size: int, cp_rank: int, device: torch.device) -> PackedRow:
    """This context-parallel rank's PackedRow for a row of documents with borders `cu`.

    cu: cumulative document lengths, from 0, of the whole row, before it is split over the
    context-parallel ranks. Queries and keys have the same borders.
    """
    layout = row_layout(cu, cp_size, cp_rank, device)
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=layout.borders,
        cu_seqlens_kv=layout.borders,
        max_seqlen_q=layout.longest,
        max_seqlen_kv=layout.longest,
        layout=layout,
    )


LONGEST_MASK = 1 << 16  # tokens: a mask of 4 GiB


def block_diagonal_mask(cu: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """bool [1, 1, t, t], True means hidden: a token sees itself and earlier tokens of its document.
    For models without support for packed rows. cu: document borders. ValueError for a row of more
    than LONGEST_MASK tokens."""
    expect(
        cu[-1] <= LONGEST_MASK,
        f"a packed row of {cu[-1]:,} tokens: with use_mca: false its mask would take "
        f"{cu[-1] ** 2 / 2**30:,.0f} GiB, and at most {LONGEST_MASK:,} tokens are masked: set "
        "use_mca: true, packing: false and sequence_packing: false, or a lower cutoff_len",
    )
    document = torch.arange(len(cu) - 1).repeat_interleave(torch.tensor(cu).diff()).to(device)
    causal = torch.ones(len(document), len(document), dtype=torch.bool, device=device).tril()
    return ~(causal & (document[:, None] == document[None]))[None, None]
