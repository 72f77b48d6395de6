"""The columns of a micro-batch: pad, pack, join and cut them; masks and borders of packed rows.

A batch is a dict of tensors, whose columns tables.COLUMNS declares. Letters: b rows, s positions, t
tokens of a packed row, cp the context-parallel size. The collator's batch has rows of documents,
numbered by attention_mask. An arranged one has padding_mask, and either a document in each row or a
packed row with the documents' borders, `cu_seqlens` from 0 to t. Documents of a packed row do not
see each other, and the padding at its end is a document as well. Columns per document or sample are
[n] then, without fillers. Under context parallelism every document is cut into 2 cp chunks, and
rank r has the chunks r and 2 cp - 1 - r: causal attention is then the same work on every rank.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from .errors import expect
from .files import IGNORE_INDEX
from .mcore import PackedSeqParams
from .parallel import to_device
from .tables import COLUMNS, is_of_inputs, registered_columns

# -- from the collator's rows to what a model takes


def padding_of(name: str, pad_token_id: int) -> float:
    """The value of a column in positions that only pad."""
    return pad_token_id if name == "input_ids" else COLUMNS[name].padding


def _is_of_tokens(name: str) -> bool:
    return name in COLUMNS and COLUMNS[name].per == "token"


def document_lengths(mask: torch.Tensor) -> list[list[int]]:
    """Tokens of each document of each row, by a mask [b, s] that numbers them from 1."""
    counts = (torch.bincount(row)[1:] for row in mask.long().clamp(min=0))
    return [of_row[of_row > 0].tolist() for of_row in counts]


def _places(lengths: list[list[int]], width: int) -> list[torch.Tensor]:
    """The places of each document in rows of `width` that are laid end to end."""
    return [
        places
        for number, of_row in enumerate(lengths)
        for places in (torch.arange(sum(of_row)) + number * width).split(of_row)
    ]


def _taken(
    batch: dict,
    places: torch.Tensor | None,
    lengths: list[list[int]],
    per_sample: int,
    pad_token_id: int,
) -> dict:
    """The batch with its tokens at these places of its rows end to end, -1 for padding (None: as
    they are), and its other columns without fillers, as [documents] or [samples]."""
    taken = {}
    for name, column in batch.items():
        if is_of_inputs(name):
            taken[name] = column
            continue
        if not _is_of_tokens(name):
            rows = zip(column, lengths, strict=True)
            column = torch.cat([row[: len(of_row)] for row, of_row in rows])
            if COLUMNS[name].per == "sample":
                column = _of_samples(name, column, per_sample)
        elif places is not None:
            column = F.pad(column.flatten(), (0, 1), value=padding_of(name, pad_token_id))[places]
        taken[name] = column
    return taken


def _of_samples(name: str, column: torch.Tensor, per_sample: int) -> torch.Tensor:
    """[samples] of a column [documents]. ValueError for documents of a sample that differ."""
    of_samples = column.view(len(column) // per_sample, per_sample)
    expect(
        bool((of_samples == of_samples[:, :1]).all()),
        f"the documents of a sample have different numbers in {name}: expected one for the sample",
    )
    return of_samples[:, 0]


def _with_masks(batch: dict) -> dict:
    """The batch with attention_mask and padding_mask; no value of a script's column in padding."""
    mask = batch.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(batch["input_ids"])
    batch = {**batch, "attention_mask": mask, "padding_mask": mask == 0}
    for name, column in registered_columns().items():
        if column.per == "token" and name in batch:
            batch[name] = batch[name].masked_fill(mask == 0, column.padding)
    return batch


def pack(
    batch: dict, document_multiple: int = 1, pad_token_id: int = 0, documents_per_sample: int = 1
) -> dict:
    """The documents of the collator's rows as one packed row [1, t], without what pads the rows,
    and "cu_seqlens", its borders as a tuple.

    Each document is padded to document_multiple inside, without labels. A batch of padding alone
    gives an empty document, as every rank has to take part in a step.
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


def split(batch: dict, documents_per_sample: int = 1, pad_token_id: int = 0) -> dict:
    """The collator's rows with a document in each: [b * documents_per_sample, longest document].

    Rows of one document stay as they are. A row of padding alone, which only fills the batch, gives
    rows of padding. ValueError for rows with other numbers of documents.
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
        # all micro-batches of a pipeline have one shape: a filler has rows too
        with_fillers = [of_row or [1] * documents_per_sample for of_row in lengths]
        places = _places(with_fillers, mask.shape[1])
        rows = pad_sequence(places, batch_first=True, padding_value=-1)
    return _taken(batch, rows, lengths, documents_per_sample, pad_token_id)


def pad(batch: dict, length: int, pad_token_id: int = 0) -> dict:
    """An arranged batch with `length` positions; the tail of a packed row is a document, without
    labels."""
    more = length - batch["input_ids"].shape[1]
    if not more:
        return batch
    padded = dict(batch)
    for name, column in batch.items():
        if _is_of_tokens(name):
            padded[name] = F.pad(column, (0, more), value=padding_of(name, pad_token_id))
    if "cu_seqlens" in batch:
        padded["cu_seqlens"] = (*batch["cu_seqlens"], length)
    return padded


def real_documents(batch: dict) -> torch.Tensor:
    """bool [documents] of an arranged batch: False for the rows and tails that only pad."""
    if "cu_seqlens" in batch:
        return ~batch["padding_mask"][0, list(batch["cu_seqlens"][:-1])]
    return ~batch["padding_mask"][:, 0]


def _without_tail(packed: dict) -> dict:
    """A packed batch without the documents that only pad."""
    count = int(real_documents(packed).sum())
    borders = packed["cu_seqlens"][: count + 1]
    tokens = {name: packed[name][:, : borders[-1]] for name in packed if _is_of_tokens(name)}
    return {**packed, **tokens, "cu_seqlens": borders}


def every_second(batch: dict, first: int) -> dict:
    """An arranged batch with the documents first, first + 2, ... alone, rows as long as the longest
    of them; a packed row of padding keeps one. Columns of documents, samples and pictures stay as
    they are."""
    chosen = dict(batch)
    names = [name for name in batch if _is_of_tokens(name)]
    if "cu_seqlens" not in batch:
        lengths = (~batch["padding_mask"][first::2]).sum(1)
        longest = max(int(lengths.max()), 1)
        return chosen | {name: batch[name][first::2, :longest] for name in names}
    count = int(real_documents(batch).sum())
    borders = list(itertools.pairwise(batch["cu_seqlens"]))
    kept = borders[:count][first::2] or borders[:1]
    places = [torch.arange(start, end) for start, end in kept]
    sizes = map(len, places)
    chosen["cu_seqlens"] = tuple(itertools.accumulate(sizes, initial=0))
    return chosen | {name: batch[name][:, torch.cat(places)] for name in names}


def join(batches: list[dict]) -> dict:
    """Arranged batches as one: packed rows end to end, without their tails; rows of one length one
    below the other."""
    joined = {}
    is_packed = "cu_seqlens" in batches[0]
    if is_packed:
        batches = list(map(_without_tail, batches))
        sizes = [np.diff(batch["cu_seqlens"]) for batch in batches]
        joined["cu_seqlens"] = (0, *np.concatenate(sizes).cumsum().tolist())
    for name in set().union(*batches) - joined.keys():
        end_to_end = is_packed and _is_of_tokens(name)
        columns = [batch[name] for batch in batches if name in batch]  # some have no picture
        joined[name] = torch.cat(columns, dim=int(end_to_end))
    return joined


def model_columns(batch: dict) -> list[str]:
    """The columns of an arranged batch for the forward pass."""
    return [name for name in batch if name in COLUMNS and COLUMNS[name].to_model]


def to_rank(
    batch: Mapping, names: Sequence[str], places: torch.Tensor | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """These columns of an arranged batch on a device, those of tokens at the rank's `places` of a
    row (None: all)."""
    columns = {}
    for name in names:
        column = batch[name]
        if places is not None and _is_of_tokens(name):
            column = column[..., places]
        columns[name] = to_device(column, device)
    return columns


class Targets(NamedTuple):
    """Labels [b, s], and for multi-token prediction the ids, the labels and the numbers of image
    features [k, b, s] of the tokens 1 to k places ahead of each, within its document; id 0, no
    label and -1 after its end. Texts have the number -1."""

    labels: torch.Tensor
    next_ids: torch.Tensor
    next_labels: torch.Tensor
    next_slots: torch.Tensor

    @classmethod
    def ahead(cls, batch: dict, count: int) -> "Targets":
        """Build them from whole rows, before context parallelism cuts them."""
        length = batch["input_ids"].shape[1]
        cu = torch.tensor(batch.get("cu_seqlens", (0, length)))
        ends = cu[1:].repeat_interleave(cu.diff())  # the end of each place's document
        places = torch.arange(length) + torch.arange(1, count + 1)[:, None]  # [k, s]
        is_beyond = (places >= ends)[:, None]  # [k, 1, s]
        places = places.clamp(max=length - 1)
        ids = batch["input_ids"]
        slots = batch.get("image_slot", torch.full_like(ids, -1))
        columns = ((ids, 0), (batch["labels"], IGNORE_INDEX), (slots, -1))
        ahead = (
            column.cpu()[:, places].transpose(0, 1).masked_fill(is_beyond, filler)  # [k, b, s]
            for column, filler in columns
        )
        return cls(batch["labels"], *ahead)

    def to_rank(self, labels, places: torch.Tensor | None, device: torch.device) -> "Targets":
        """Those of this rank's places (None: all), on its device, as its labels [b, s] are."""
        ahead = self[1:]
        if places is not None:
            ahead = tuple(x[..., places] for x in ahead)
        return Targets(labels, *(to_device(x, device) for x in ahead))


# -- masks and borders, as mcore_adapter has them


def get_ltor_masks_and_position_ids(
    input_ids: torch.Tensor,
    build_attention_mask: bool = True,
    attn_mask_1D: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(causal mask bool [b, 1, s, s], True meaning hidden; position ids int64 [b, s] from 0).

    input_ids [b, s]. attn_mask_1D [b, s], 1 for tokens and 0 for padding, hides the padding's
    columns as well. build_attention_mask False: the mask is attn_mask_1D itself; None means causal
    to the models.
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
    """(cu_seqlens int32 [documents + 1] with a leading 0, the longest length int32) of a packed
    batch.

    attention_mask [b, s]: 1 for the first document of a row, 2 for the second, 0 for padding, which
    counts as a document. Rows are concatenated: [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]] gives [0,
    2, 5, 6, 7, 9, 12] and 3.
    """
    lengths: list[int] = []
    for of_row in document_lengths(attention_mask):
        padding = attention_mask.shape[1] - sum(of_row)
        lengths += filter(None, [*of_row, padding])
    cu = _borders(torch.tensor(lengths)).to(attention_mask.device)
    return cu, cu.diff().max()


def check_pack_seq_aligned(attention_mask: torch.Tensor, align_size: int) -> bool:
    """True if the length of each document is a multiple of align_size; padding may have any."""
    lengths = itertools.chain(*document_lengths(attention_mask))
    return not any(length % align_size for length in lengths)


# -- a row on a rank

# what the sizes of varlen_of_graph are multiples of
GRAPH_DOCUMENTS = 16
GRAPH_LENGTH = 256


@dataclass(eq=False)  # a key of caches, by identity
class RowLayout:
    """A row for core attention on a context-parallel rank, with t / cp of its tokens.

    segments: (q0, q1, k0, k1), host numbers: local queries q0:q1 see the keys k0:k1, the last query
    the last key. positions int64 [t / cp]: each local token's position in its document. index int64
    [t / cp], in host memory: its place in the whole row. order int64 [t], None without context
    parallelism: gathered local parts in the row's order. borders int32 [documents + 1]: cu_seqlens
    of the whole row. longest: tokens of the longest document.
    """

    segments: list[tuple[int, int, int, int]]
    positions: torch.Tensor
    index: torch.Tensor
    order: torch.Tensor | None
    borders: torch.Tensor
    longest: int

    @functools.cached_property
    def same_length(self) -> int | None:
        """Tokens of each document if all have as many, and are whole on this rank."""
        lengths = {q1 - q0 for q0, q1, _, _ in self.segments}
        return self.longest if self.order is None and len(lengths) == 1 else None

    @functools.cached_property
    def documents(self) -> torch.Tensor:
        """int64 [t]: the number of each token's document in the whole row."""
        length = len(self.index if self.order is None else self.order)
        places = torch.arange(length, device=self.borders.device)
        return torch.bucketize(places, self.borders[1:], right=True)

    @functools.cached_property
    def varlen(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """(cu_seqlens of queries, of keys int32, keys' places int64, longest queries, longest keys)
        for a varlen kernel, with the keys of each segment side by side. Places is None without
        context parallelism: the keys are in order."""
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
    def varlen_of_graph(self) -> tuple[torch.Tensor, int]:
        """(cu_seqlens int32, longest) of a row in order, rounded up, with empty documents at its
        end: a kernel that is built for one shape serves many rows."""
        count = len(self.borders) - 1
        more = -count % GRAPH_DOCUMENTS
        borders = torch.cat((self.borders, self.borders[-1:].expand(more)))
        return borders, self.longest + -self.longest % GRAPH_LENGTH


def _borders(lengths: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: cu_seqlens of n lengths."""
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def _chunks(cu: tuple[int, ...], cp_size: int, cp_rank: int) -> Iterator[tuple[int, int, int]]:
    """(start of its document, start, end) in the whole row of each of a rank's chunks."""
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
    """int64 [t / cp]: places in the whole row of a rank's tokens, in its order."""
    return torch.cat([torch.arange(start, end) for _, start, end in _chunks(cu, cp_size, cp_rank)])


@functools.lru_cache(64)
def row_layout(cu: tuple[int, ...], cp_size: int, cp_rank: int, device: torch.device) -> RowLayout:
    """The layout of a row with borders `cu` on a context-parallel rank, on `device`."""
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
    """megatron's packed parameters in the documented thd format, and the layout of a
    row for attention."""

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
    """bool [1, 1, t, t], True meaning hidden: causal, and other documents hidden. For models
    without packing."""
    document = torch.arange(len(cu) - 1).repeat_interleave(torch.tensor(cu).diff()).to(device)
    causal = torch.ones(len(document), len(document), dtype=torch.bool, device=device).tril()
    return ~(causal & (document[:, None] == document[None]))[None, None]
