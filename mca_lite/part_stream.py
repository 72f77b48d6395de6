"""A training set that is tokenised while it is read, without a cache: the key `streaming`.

    records -> blocks, shuffled unless disable_shuffling is set -> samples -> rows -> micro-batches

For given data and keys, the seed and a Position, which checkpoints contain, determine the rows that
follow. Every rank reads and tokenises all records, and keeps the rows of its data-parallel rank. A
resumed run seeks to the bytes where its block began, reads that block again, and tokenises the
current chunk of records again. Earlier records are read again only in files that are not read line
by line, in compressed files, and at the start of files, for their format and report(). The data
repeats endlessly, each pass in another order if it is shuffled; a step may contain the end of one
pass and the beginning of the next.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from .data import describe_files, show_samples
from .data_batches import BatchPlan, Documents, Turns
from .data_encode import (
    BEGINNING,
    Arrays,
    Encoder,
    Place,
    Reader,
    Record,
    Sample,
    Tally,
    hash_of,
    shifted,
    tokenizer_identity,
)
from .watchdog import end_with_rank

CHUNK_RECORDS = 100  # records that are tokenised at once
_FEW_RECORDS = 1000  # a tenth of the records read may be bad, and of this many at the beginning
_HEAD_BYTES = 1 << 20  # a file is identified by its size and this many bytes


@dataclasses.dataclass(frozen=True)
class Position:
    """A position in a TokenStream (a training set read endlessly), from which a resumed run reads
    on; checkpoints contain it. The stream is read in blocks of records, and a block is tokenised in
    chunks.

    passes: completed passes over the mixed datasets.
    turns, exhausted: state of Turns, which mixes the datasets, at the start of the current block.
    places: for each dataset, the place in its files at that start; None: the beginning.
    chunk, sample, token: index of the chunk in the block, of the sample in the chunk, and of the
    token in the sample."""

    passes: int = 0
    turns: int = 0
    exhausted: tuple[int, ...] = ()
    places: tuple[Place, ...] | None = None
    chunk: int = 0
    sample: int = 0
    token: int = 0


def _with_next(reader: Reader, start: Place) -> Iterator[tuple[Any, Any]]:
    """Read a dataset's records from a place in its files on, each together with the one after it,
    so that the last can be recognised. Yields (pair, next pair), where a pair is (record, place
    after it), and the next pair is None at the last record. start: the place to begin at."""
    return itertools.pairwise(itertools.chain(reader.records(start), [None]))


class TokenStream:
    """A training set that is tokenised while it is read: the rows of several datasets, mixed and
    repeated endlessly.

    readers: one per dataset. encoder: tokenises records. seed: of the shuffling and mixing.
    data_args: with the keys of DataArguments and StreamArguments. packs: True to put whole samples,
    in order, into rows of at most cutoff_len tokens (a longer sample has its own row), without
    attention across documents. Every rank must read the same files.
    """

    def __init__(
        self, readers: list[Reader], encoder: Encoder, data_args: Any, packs: bool, seed: int
    ):
        self.readers = readers
        self.encoder = encoder
        self.args = data_args
        self.packs = packs
        self.seed = seed
        self.shuffles = not data_args.disable_shuffling
        self.block_records = data_args.buffer_size if self.shuffles else CHUNK_RECORDS
        self.has_media = False  # True if the first records have inputs other than text
        self._tally = Tally()
        self._arrays = Arrays()
        self._speaks = False

    @functools.cached_property
    def identity(self) -> str:
        """A hash of the files (sizes and first bytes), the tokenizer, and the keys that determine
        the rows and their order. A resumed run must have the same hash."""
        names = ("mix_strategy", "mix_weights", "disable_shuffling", "buffer_size")
        facts = [getattr(self.args, name) for name in names]
        facts += [self.packs, self.seed, CHUNK_RECORDS, self.encoder.options]
        facts.append(tokenizer_identity(self.encoder.tokenizer))
        for reader in self.readers:
            spec = reader.spec
            declared = [spec.formatting, spec.columns, spec.tags, reader.limit, reader.columns]
            facts += declared + [[kind, *_begin_of(file)] for file, kind in spec.files.items()]
        return f"streamed-{hash_of(facts)[:16]}"

    def report(self) -> list[str]:
        """Report lines about each dataset, made from its first records: the files' formats, and the
        first sample as text. Sets the attribute has_media."""
        lines = []
        for reader in self.readers:
            records = itertools.islice(reader.records(), CHUNK_RECORDS)
            samples, _ = self.encoder.encode([record for record, _ in records])
            facts = "tokenised as they are read (lists in .json as a whole)"
            formats = list(reader.formats.values())
            lines += describe_files(reader.spec, formats, facts, reader.objective)
            first = ([shifted(*document) for document in sample] for sample in samples[:1])
            media = self.encoder.media
            lines += show_samples(first, self.encoder.tokenizer, media)
            self.has_media |= any("media" in values for sample in samples for _, values in sample)
        return lines

    def describe(self) -> str:
        """A line about the order of records, for the summary at a run's start."""
        order = "in the order of the files"
        if self.shuffles:
            order = f"shuffled in blocks of {self.block_records:,} records"
        return f"streamed, {order}; every rank reads and tokenises all of it"

    def rows(self, position: Position | None = None) -> Iterator[tuple[Documents, Position]]:
        """Yield (documents of a row, position after it) endlessly. position: a Position to begin
        at; None: the start. A document is {"input_ids", "labels"} with its columns, and with
        "media" (for with_inputs()) if it has images or other inputs.

        ValueError for a bad record (if bad records are skipped: for too many), and if a pass after
        the first gives no sample."""
        position = position or Position()
        samples = self._samples(position)
        if self.encoder.joins:
            return _joined(samples, self.args.cutoff_len, position.token)
        if self.packs:
            return _packed(samples, self.args.cutoff_len)
        return _one_each(samples)

    def with_inputs(self, row: Documents) -> Documents:
        """Replace "media" (images and other inputs than text) in a row's documents by the columns
        that the model needs, such as pixels, in place -> the row."""
        for document in row:
            media = document.pop("media", ())
            document.update(self.encoder.media.columns(document["input_ids"], media))
        return row

    def loader(
        self,
        collate: Callable[..., dict[str, Any]],
        plan: BatchPlan,
        state: dict[str, Any] | None,
        num_workers: int,
        speaks: bool,
    ) -> DataLoader:
        """An endless DataLoader of this rank's micro-batches, from `state` on. Each is
        collate(rows) plus "data_position", the position at the start of the next step.

        plan: batch sizes and ranks. state: a data_position; None: the beginning. num_workers: above
        0, one process prefetches. speaks: print each kind of record that is cut, left out or noted,
        when it first occurs. ValueError if `state` has other fields than a Position.
        """
        self._speaks = speaks
        try:
            position = Position(**state or {})
        except TypeError:
            raise ValueError(f"data_position {state!r:.200}: no position of this stream") from None
        return DataLoader(
            _MicroBatches(self, collate, plan, position),
            batch_size=None,
            num_workers=min(num_workers, 1),
            worker_init_fn=end_with_rank,
            collate_fn=dict,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(plan.seed),
        )

    # -- records to samples to rows

    def _blocks(self, position: Position) -> Iterator[tuple[Position, list[Record]]]:
        """Read records endlessly in blocks: yield (Position of the block's start, its records).
        The datasets are mixed by mix_strategy. A block has block_records records; the last of a
        pass may have fewer. Records are in the order of reading; if they are to be shuffled,
        _samples() shuffles each block."""
        while True:
            places = list(position.places or [BEGINNING] * len(self.readers))
            order = (self.args.mix_strategy, self.args.mix_weights, self.seed)
            turns = Turns(len(places), *order, position.turns, position.exhausted)
            records = self._one_pass(turns, places)
            while True:
                exhausted = tuple(sorted(turns.exhausted))
                begin = Position(position.passes, turns.taken, exhausted, tuple(places))
                block = list(itertools.islice(records, self.block_records))
                if not block:
                    break
                yield begin, block
            position = Position(position.passes + 1)

    def _one_pass(self, turns: Turns, places: list[Place]) -> Iterator[Record]:
        """Yield the records of one pass over the datasets. turns: a Turns (yields the index of the
        dataset to read next). places: for each dataset, the place in its files to begin at; updated
        as records are read. One record of each dataset is read ahead, to recognise the last one."""
        sources = list(map(_with_next, self.readers, places))
        for number in turns:
            (record, places[number]), following = next(sources[number])
            if following is None:
                turns.exhausted.add(number)
                places[number] = BEGINNING
                sources[number] = _with_next(self.readers[number], BEGINNING)
            yield record

    def _samples(self, position: Position) -> Iterator[tuple[Position, Sample]]:
        """Yield (Position of the sample, its documents) endlessly. position: the Position to begin
        at. Blocks of records are shuffled, unless disable_shuffling is set, and then tokenised in
        chunks.

        ValueError for a bad record (if bad records are skipped: for too many), and if a pass after
        the first gives no sample."""
        chunk = position.chunk
        done = position.sample
        passes = position.passes
        count = 1  # samples in this pass; 1, because the rest of a first pass may have none
        for begin, block in self._blocks(position):
            if begin.passes > passes:
                if not count:
                    raise ValueError("no record of the datasets gives a sample to train on")
                passes = begin.passes
                count = 0
            if self.shuffles:
                draws = np.random.default_rng([self.seed, begin.passes, begin.turns])
                block = [block[i] for i in draws.permutation(len(block))]
            for first in range(chunk * CHUNK_RECORDS, len(block), CHUNK_RECORDS):
                samples = self._tokenize(block[first : first + CHUNK_RECORDS])
                for number, documents in enumerate(samples[done:], done):
                    chunk = first // CHUNK_RECORDS
                    yield dataclasses.replace(begin, chunk=chunk, sample=number), documents
                count += len(samples)
                done = 0
            chunk = 0

    def _tokenize(self, chunk: list[Record]) -> list[Sample]:
        """Tokenise a chunk of records -> their samples. If this rank speaks, it prints each kind of
        record that is cut, left out or noted, when it first occurs. ValueError for a bad record; if
        bad records are skipped, for too many."""
        samples, tally = self.encoder.encode(chunk)
        total = self._tally
        total.add(tally)
        for text, place in tally.places.items() if self._speaks else ():
            if total.counts[text] == tally.counts[text]:
                print(f"stream: {text}, the first at {place}", flush=True)
        total.check(_FEW_RECORDS)
        for _, values in itertools.chain(*samples):
            self._arrays.add(values)
        return samples


def _one_each(samples: Iterator[Any]) -> Iterator[tuple[Documents, Position]]:
    """Make each sample a row of its own: yield (its documents, Position after it). samples: yields
    (Position, documents), from TokenStream._samples()."""
    for position, documents in samples:
        after = dataclasses.replace(position, sample=position.sample + 1)
        yield [shifted(*document) for document in documents], after


def _packed(samples: Iterator[Any], capacity: int) -> Iterator[tuple[Documents, Position]]:
    """Pack whole samples into rows, in order: yield (documents of a row, Position after them). A
    row takes samples as long as they fit into `capacity` tokens, but at least one. samples: yields
    (Position, documents), from TokenStream._samples()."""
    row: Documents = []
    used = 0
    for position, documents in samples:
        more = [shifted(*document) for document in documents]
        length = sum(len(document["input_ids"]) for document in more)
        if row and used + length > capacity:
            yield row, position
            row = []
            used = 0
        row += more
        used += length


def _joined(
    samples: Iterator[Any], length: int, token: int
) -> Iterator[tuple[Documents, Position]]:
    """Join texts end to end, and cut them into rows of `length` input tokens: yield ([one
    document], Position after it). The last label of a row is the first input of the next. samples:
    yields (Position, [one document]). token: index of the token to begin at in the first document.
    """
    tokens = np.zeros(0, np.int32)
    begins: list[tuple[int, Position]] = []  # (index in tokens, position) of each document
    for position, [(document, _)] in samples:
        begins.append((len(tokens) - token, position))
        tokens = np.concatenate([tokens, document[token:]])
        token = 0
        used = max(len(tokens) - 1, 0) // length * length
        for start in range(0, used, length):
            stop = start + length
            while len(begins) > 1 and begins[1][0] <= stop:
                begins.pop(0)
            begin, first = begins[0]
            row = shifted(tokens[start : stop + 1])
            yield [row], dataclasses.replace(first, token=stop - begin)
        tokens = tokens[used:]
        begins = [(begin - used, first) for begin, first in begins]


@dataclasses.dataclass(eq=False)
class _MicroBatches(IterableDataset):
    """Yields this data-parallel rank's micro-batches of a TokenStream endlessly. In each,
    "data_position" is the stream's position after the whole step, as a dict. collate: makes a
    micro-batch of rows. plan: batch sizes and ranks. position: where to begin."""

    stream: TokenStream
    collate: Callable[..., dict[str, Any]]
    plan: BatchPlan
    position: Position

    def __iter__(self) -> Iterator[dict[str, Any]]:
        plan = self.plan
        rows = self.stream.rows(self.position)
        size = plan.micro_batch_size
        while True:
            kept = []
            for number in range(plan.global_batch_size):
                row, position = next(rows)
                # ranks take micro-batches in turn, in the order of BatchPlan
                if number // size % plan.dp_size == plan.dp_rank:
                    kept.append(self.stream.with_inputs(row))
            for first in range(0, len(kept), size):
                batch = self.collate(kept[first : first + size])
                yield {**batch, "data_position": dataclasses.asdict(position)}


def _begin_of(file: str) -> tuple[int, str]:
    """Facts that identify a file: (its size in bytes, a hash of its first _HEAD_BYTES bytes)."""
    with open(file, "rb") as raw:
        return Path(file).stat().st_size, hashlib.sha256(raw.read(_HEAD_BYTES)).hexdigest()
