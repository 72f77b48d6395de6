"""A training set tokenised as it is read, without a cache: the key streaming.

    records -> blocks of buffer_size, each shuffled -> samples -> rows -> micro-batches

All of it follows from the seed and a Position, kept in checkpoints. Every rank does the same: it
reads and tokenises all records, and keeps the rows of its data parallel rank. A resumed run seeks
the bytes at which its block began, reads that block again, and tokenises the rest of a chunk of
records. Earlier records are not read, except in compressed, .json and .parquet files. After
the last record the first follows, in another order; a step may have both.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from .data_batches import BatchPlan, Turns
from .data_encode import (
    BEGINNING,
    Encoder,
    Place,
    Reader,
    Record,
    Sample,
    Tally,
    shifted,
    tokenizer_identity,
)
from .errors import refuse
from .files import IGNORE_INDEX
from .watchdog import end_with_rank

CHUNK_RECORDS = 100  # tokenised at once
_FEW_RECORDS = 1000  # a tenth of them may be bad at the beginning of a stream
_HEAD_BYTES = 1 << 20  # of a file, to identify it with its size


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in a stream. passes: completed passes through all records. turns, exhausted: of
    Turns. places: of each dataset at the beginning of a block (None: their beginnings). chunk,
    sample, token: number of each in the block, the chunk and the sample."""

    passes: int = 0
    turns: int = 0
    exhausted: tuple[int, ...] = ()
    places: tuple[Place, ...] | None = None
    chunk: int = 0
    sample: int = 0
    token: int = 0


class _Records:
    """All records in the order of mix_strategy, pass after pass. One of each dataset is read ahead,
    to recognise its last. places: of the next records."""

    def __init__(self, stream: "TokenStream", position: Position):
        self.stream = stream
        self._begin_pass(position)

    def next_block(self, size: int) -> tuple[Position, list[Record]]:
        """(its position, at most so many records): the last block of a pass has what is left."""
        while True:
            exhausted = tuple(sorted(self.turns.exhausted))
            begin = Position(self.passes, self.turns.taken, exhausted, tuple(self.places))
            if block := list(itertools.islice(self._records, size)):
                return begin, block
            self._begin_pass(Position(self.passes + 1))

    def _begin_pass(self, position: Position) -> None:
        stream = self.stream
        args = stream.args
        self.passes = position.passes
        self.places = list(position.places or stream.starts)
        self._sources = list(map(_with_next, stream.readers, self.places))
        self.turns = Turns(
            len(self.places),
            args.mix_strategy,
            args.mix_weights,
            stream.seed,
            position.turns,
            position.exhausted,
        )
        self._records = self._one_pass()

    def _one_pass(self) -> Iterator[Record]:
        for number in self.turns:
            (record, self.places[number]), following = next(self._sources[number])
            if following is None:
                self.turns.exhausted.add(number)
                self.places[number] = self.stream.starts[number]
                self._sources[number] = _with_next(self.stream.readers[number], self.places[number])
            yield record


def _with_next(reader: Reader, start: Place) -> Iterator[tuple]:
    """(a record with the place after it, the next of these or None) of a dataset."""
    return itertools.pairwise(itertools.chain(reader.records(start), [None]))


class TokenStream:
    """The rows of datasets, read again and again.

    readers: of each dataset. data_args: DataArguments. packs: samples are put into rows of at most
    cutoff_len tokens in their order, without attention across documents. Every rank must read the
    same files.
    """

    def __init__(self, readers: list[Reader], encoder: Encoder, data_args, packs: bool, seed: int):
        self.readers = readers
        self.starts = (BEGINNING,) * len(readers)
        self.encoder = encoder
        self.args = data_args
        self.packs = packs
        self.seed = seed
        self.shuffles = not data_args.disable_shuffling
        self.num_held_out = 0
        self.block_records = data_args.buffer_size if self.shuffles else CHUNK_RECORDS
        self._tally = Tally()
        self._speaks = False

    @functools.cached_property
    def identity(self) -> str:
        """Name of the files, by sizes and beginnings, and of all that determines the rows and their
        order. A resumed run must have the same."""
        args = self.args
        names = ("mix_strategy", "mix_weights", "disable_shuffling", "buffer_size")
        facts = {name: getattr(args, name) for name in names}
        facts |= {"packs": self.packs, "seed": self.seed, "held out": self.num_held_out}
        tokenizer = tokenizer_identity(self.encoder.tokenizer)
        facts |= {"chunk": CHUNK_RECORDS, "tokenizer": tokenizer}
        for number, reader in enumerate(self.readers):
            spec = reader.spec
            options = self.encoder.options
            if reader.columns:
                facts[f"columns of {number}"] = reader.columns
            declared = [spec.formatting, spec.columns, spec.tags, reader.limit, options]
            files = [[kind, *_begin_of(file)] for file, kind in spec.files.items()]
            facts[f"dataset {number}"] = declared + files
        text = json.dumps(facts, sort_keys=True, default=str)
        return f"streamed-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def rows(self, position: Position | None = None) -> Iterator[tuple[list[dict], Position]]:
        """(documents {"input_ids", "labels"} of a row, position after it), without end."""
        position = position or Position()
        return self._in_rows(self._samples(position), position.token)

    def hold_out(self, count: int) -> "HeldOut":
        """Take the first records of the datasets out of the stream -> their samples, or rows of
        joined texts."""
        records = _Records(self, Position())
        self.num_held_out = count
        _, block = records.next_block(count)
        samples = ((Position(), documents) for documents in self._tokenize(block))
        in_rows = self._in_rows(samples, 0) if self.encoder.joins else _one_each(samples)
        rows = [row for row, _ in in_rows]
        if len(block) < count or records.turns.exhausted or not rows:
            reason = "it takes all records of a dataset, or none of them gives a sample"
            refuse("val_size", count, reason, "another val_size, or eval_dataset")
        self.starts = tuple(records.places)
        return HeldOut(rows)

    def loader(self, collate, plan: BatchPlan, state: dict | None, num_workers: int, speaks: bool):
        """A DataLoader of this rank's micro-batches from a position on. Each mapping of `collate`
        has "data_position", the beginning of the next step.

        plan: sizes and ranks of a step. state: data_position of a micro-batch, None: the beginning.
        num_workers: above 0 one process reads ahead. speaks: print the counts of records.
        Raises: ValueError for a state of another stream.
        """
        self._speaks = speaks
        return DataLoader(
            _MicroBatches(self, collate, plan, self._position_of(state)),
            batch_size=None,
            num_workers=min(num_workers, 1),
            worker_init_fn=end_with_rank,
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(plan.seed),
        )

    def _position_of(self, state: dict | None) -> Position:
        try:
            position = Position(**state or {})
            places = position.places or self.starts
            if list(map(len, places)) == list(map(len, self.starts)):
                return position
        except TypeError:
            pass
        raise ValueError(f"data_position {state!r:.200}: no position of this stream")

    # -- records to samples to rows

    def _samples(self, position: Position) -> Iterator[tuple[Position, Sample]]:
        """(its position, its documents) of each sample from a position on."""
        records = _Records(self, position)
        chunk = position.chunk
        done = position.sample
        passes = position.passes
        count = 1  # samples of a pass; of the first one the rest may have none
        while True:
            begin, block = records.next_block(self.block_records)
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
        """The samples of some records. Prints the first place of each count. ValueError for too
        many of these."""
        samples, tally = self.encoder.encode(chunk)
        total = self._tally
        total.add(tally)
        for text, place in tally.places.items() if self._speaks else ():
            if total.counts[text] == tally.counts[text]:
                print(f"stream: {text}, the first at {place}", flush=True)
        total.check(_FEW_RECORDS)
        return samples

    def _in_rows(self, samples: Iterator, token: int) -> Iterator[tuple[list[dict], Position]]:
        if self.encoder.joins:
            return _joined(samples, self.args.cutoff_len, token)
        if self.packs:
            return _packed(samples, self.args.cutoff_len)
        return _one_each(samples)


def _one_each(samples: Iterator) -> Iterator[tuple[list[dict], Position]]:
    for position, documents in samples:
        after = dataclasses.replace(position, sample=position.sample + 1)
        yield [shifted(*document) for document in documents], after


def _packed(samples: Iterator, capacity: int) -> Iterator[tuple[list[dict], Position]]:
    """Rows of as many samples as fit, in their order."""
    row = []
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


def _joined(samples: Iterator, length: int, token: int) -> Iterator:
    """Rows of so many inputs, cut from joined documents as by row_spans; of the first one from a
    token on."""
    tokens = np.zeros(0, np.int32)
    begins: list[tuple[int, Position]] = []  # of the documents: number in tokens, position
    position = Position()
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
    if len(tokens) > 1:  # of records that are held out
        yield [shifted(tokens)], position


class HeldOut(list):
    """Samples of one document in memory, with the counts of TokenDataset and the attributes used by
    Packs."""

    fingerprint = "held out"
    documents_per_sample = 1

    def __init__(self, rows: list[list[dict]]):
        super().__init__(rows)
        labels = [document["labels"] for document in itertools.chain(*rows)]
        self.document_lengths = np.array([[len(row)] for row in labels])
        self.num_tokens = sum(map(len, labels))
        self.num_trained_tokens = sum(int((row != IGNORE_INDEX).sum()) for row in labels)


@dataclasses.dataclass(eq=False)
class _MicroBatches(IterableDataset):
    """This rank's micro-batches, each with the position after its step."""

    stream: TokenStream
    collate: Callable
    plan: BatchPlan
    position: Position

    def __iter__(self) -> Iterator[dict]:
        plan = self.plan
        rows = self.stream.rows(self.position)
        size = plan.micro_batch_size
        while True:
            kept = []
            for number in range(plan.global_batch_size):
                row, position = next(rows)
                if number // size % plan.dp_size == plan.dp_rank:  # the order of BatchPlan
                    kept.append(row)
            for first in range(0, len(kept), size):
                batch = self.collate(kept[first : first + size])
                yield {**batch, "data_position": dataclasses.asdict(position)}


def _as_it_is(batch):
    return batch


def _begin_of(file: str) -> tuple[int, str]:
    with open(file, "rb") as raw:
        return Path(file).stat().st_size, hashlib.sha256(raw.read(_HEAD_BYTES)).hexdigest()
