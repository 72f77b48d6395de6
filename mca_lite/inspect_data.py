"""What is in the datasets of a run: counts of what is wrong with them, lengths, rows, samples with
their trained tokens. Facts alone; cli_inspect.py and inspect_html.py show them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .data import TokenDataset, marked_runs, tokens_of
from .data_chat import ChatRenderer
from .data_encode import BAD, CUT, NO_LABELS, joins_texts
from .data_files import SIDES
from .data_packs import Packs, samples_of

# what can be wrong with a sample
FOUND = {
    "duplicate": "the same tokens as an earlier one",
    "in training too": "the same tokens as one of the training data",
    "double BOS": "the token that begins a text, twice in a row",
    "no end of turn": "a trained turn ends without the token that ends it",
    "cut in a turn": "cutoff_len cut a trained turn before its end",
}
_MAX_ROWS, _MAX_BARS = 10, 12


class Side(NamedTuple):
    """A piece of a sample: what it is, and (text, whether it is trained) of its runs of tokens."""

    name: str
    runs: list[tuple[str, bool]]


class Sample(NamedTuple):
    """One of a dataset. sides: one; of a pair what both begin with, then how chosen and rejected go
    on. found: what is wrong with it, of FOUND."""

    number: int
    sides: list[Side]
    found: list[str]


class Row(NamedTuple):
    """A packed row: (name, tokens) of each document, and the tokens that it has room for."""

    number: int
    documents: list[tuple[str, int]]
    capacity: int


@dataclass
class Part:
    """A dataset of a run: training, or one of the evaluation. bars: (how many tokens, documents
    that have so many). found: by the names of FOUND the numbers of its samples, or of its texts
    where rows are cut from them. rows: some of them, [] where a sample is a row."""

    name: str
    summary: str
    bars: list[tuple[str, int]] = field(default_factory=list)
    found: dict[str, list[int]] = field(default_factory=dict)
    packing: str = "not packed: each sample is a row, padded to the longest of its micro-batch"
    rows: list[Row] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class DataInspector:
    """Looks at the datasets of a run.Plan: parts() of each, records() of the files. shown: how many
    samples of each."""

    def __init__(self, plan, shown: int):
        self.plan, self.shown, self.tokenizer = plan, shown, plan.tokenizer
        data, self.objective = plan.arguments.data, plan.objective
        self.joins = self.objective.joins_documents and joins_texts(data)
        self.cutoff_len = data.cutoff_len
        ends = {self.tokenizer.eos_token}
        if not self.objective.joins_documents:
            ends.add(ChatRenderer(self.tokenizer, data.enable_thinking).end_of_turn().strip())
        self.ends = tuple(filter(None, ends))
        vocabulary = self.tokenizer.get_vocab()
        self.end_ids = [vocabulary[text] for text in self.ends if text in vocabulary]
        evaluated = plan.data.eval
        if not isinstance(evaluated, dict):
            evaluated = {"evaluation": evaluated}
        sets = {"training": plan.data.train, **evaluated}
        self.sets = {name: dataset for name, dataset in sets.items() if dataset is not None}

    def records(self) -> dict[str, int]:
        """Counts over the files of all datasets: what was read, and what became of it."""
        sets = self.sets.values()
        shards = {shard.folder: shard for one in sets for shard in samples_of(one).shards}
        counts = dict.fromkeys(("read", "bad", "truncated", "label-less", "left out besides"), 0)
        for shard in shards.values():
            counts["read"] += shard.meta["records"]
            for what, count in shard.meta["counts"].items():
                if what.startswith(BAD):
                    counts["bad"] += count
                elif CUT in what:
                    counts["truncated"] += count
                elif NO_LABELS in what:
                    counts["label-less"] += count
                elif "left out" in what:
                    counts["left out besides"] += count
        return counts

    def parts(self) -> Iterator[Part]:
        """What there is to see of each dataset, of the training one first. Reads all samples."""
        trained_on: set[int] = set()
        shards: set = set()
        for name, dataset in self.sets.items():
            tokens, part = samples_of(dataset), Part(name, _summary(dataset, self.objective))
            folders = {shard.folder for shard in tokens.shards}
            if not (self.joins and folders <= shards):  # else its texts were those of training
                seen = self._scan(tokens, part, trained_on)
                part.bars = histogram(self._lengths(tokens))
                if name == "training":
                    trained_on, shards = seen, folders
            self._map_rows(dataset, part)
            numbers = set(range(min(self.shown, len(tokens))))
            if not self.joins:  # texts have numbers of their own
                numbers |= {number for found in part.found.values() for number in found[:1]}
            part.samples = [self._sample(tokens, number, part) for number in sorted(numbers)]
            yield part

    def _lengths(self, dataset: TokenDataset) -> np.ndarray:
        """Tokens of each document, or of each text that was joined."""
        if not self.joins:
            return dataset.document_lengths.ravel()
        ends = [_ends_of_texts(shard.maps()[0], self.tokenizer) for shard in dataset.shards]
        return np.concatenate([np.diff(of_shard, prepend=0) for of_shard in ends])

    def _scan(self, dataset: TokenDataset, part: Part, trained_on: set[int]) -> set[int]:
        """Fill part.found -> hashes of the samples."""
        names = [name for name in FOUND if name != "in training too" or trained_on]
        if self.objective.joins_documents:
            names = [name for name in names if "turn" not in name]
        part.found = {name: [] for name in names}
        seen: set[int] = set()
        for number, documents in self._units(dataset):
            key = hash(tuple(tokens.tobytes() for tokens, _ in documents))
            found = set()
            if key in seen:
                found.add("duplicate")
            if key in trained_on:
                found.add("in training too")
            seen.add(key)
            for tokens, trained in documents:
                found |= self._wrong_with(tokens, trained)
            for name in found & part.found.keys():
                part.found[name].append(number)
        return seen

    def _units(self, dataset: TokenDataset) -> Iterator[tuple[int, list[tuple]]]:
        """(number, (tokens, whether each is trained) of its documents) of each sample once, though
        a mix repeats it; or of each text, whole, that joining cut into rows."""
        if not self.joins:
            for number in np.sort(np.unique(dataset.index, return_index=True)[1]).tolist():
                yield number, [tokens_of(document) for document in dataset[number]]
            return
        number = 0
        for shard in dataset.shards:
            ids = shard.maps()[0].astype(np.int64)
            for text in np.split(ids, _ends_of_texts(ids, self.tokenizer)[:-1]):
                yield number, [(text, np.ones(len(text), bool))]
                number += 1

    def _wrong_with(self, tokens: np.ndarray, trained: np.ndarray) -> set[str]:
        found, bos = set(), self.tokenizer.bos_token_id
        # where bos is eos too, it stands between joined texts
        if bos is not None and not (self.joins and bos == self.tokenizer.eos_token_id):
            if ((tokens[1:] == bos) & (tokens[:-1] == bos)).any():
                found.add("double BOS")
        ends = np.flatnonzero(trained & ~np.append(trained[1:], False))
        for end in ends[~np.isin(tokens[ends], self.end_ids)].tolist():
            # an end of several tokens, or white space behind it
            tail = self.tokenizer.decode(tokens[: end + 1][-16:].tolist()).rstrip()
            if not tail.endswith(self.ends):
                is_cut = end == self.cutoff_len  # a document has one token more at most
                found.add("cut in a turn" if is_cut else "no end of turn")
        return found

    def _map_rows(self, dataset, part: Part) -> None:
        if isinstance(dataset, Packs):
            count, names = len(dataset), [""]
            if self.objective.has_pairs:
                names = [f" {side}" for side in SIDES]
            capacity = self.cutoff_len * len(names)
            part.packing = f"{count:,} rows of {capacity:,} tokens, samples do not see each other, "
            part.packing += f"{dataset.padding_fraction:.1%} padding"
            lengths = dataset.dataset.document_lengths
            # the longest samples are in the first rows: some of all
            for number in np.unique(np.linspace(0, count - 1, _MAX_ROWS, dtype=int)).tolist():
                pack = dataset.packs[number]
                named = [(f"{i}{names[k]}", int(n)) for i in pack for k, n in enumerate(lengths[i])]
                part.rows.append(Row(number, named, capacity))
        elif self.joins:
            part.packing = f"{len(dataset):,} rows of {self.cutoff_len:,} tokens, texts joined "
            part.packing += "and cut, which see each other"
            ends = [_ends_of_texts(shard.maps()[0], self.tokenizer) for shard in dataset.shards]
            before = np.cumsum([0, *map(len, ends)]).tolist()
            for i in range(min(len(dataset), _MAX_ROWS)):
                shard, row = dataset.place(i)
                start, stop = dataset.shards[shard].spans[row, 0]
                inside = ends[shard][(ends[shard] > start) & (ends[shard] < stop - 1)]
                first = before[shard] + int(np.searchsorted(ends[shard], start, side="right"))
                sizes = np.diff([start, *inside, stop - 1]).tolist()
                named = [(str(first + n), size) for n, size in enumerate(sizes)]
                part.rows.append(Row(i, named, self.cutoff_len))

    def _sample(self, dataset: TokenDataset, number: int, part: Part) -> Sample:
        documents, found = dataset[number], []
        if not self.joins:
            found = [name for name, numbers in part.found.items() if number in numbers]
        sizes = [f"{len(document['input_ids']):,} tokens" for document in documents]
        if not self.objective.has_pairs:
            name = f"{'row' if self.joins else 'sample'} {number}, {sizes[0]}"
            return Sample(number, [Side(name, self._runs(documents[0]))], found)
        chosen, rejected = (tokens_of(document)[0] for document in documents)
        size = min(len(chosen), len(rejected))
        differ = np.append(chosen[:size] != rejected[:size], True)
        at = int(differ.argmax())
        sides = [Side(f"pair {number}: the first {at:,} tokens", self._runs(documents[0], 0, at))]
        for name, count, document in zip(SIDES, sizes, documents, strict=True):
            sides.append(Side(f"{name}, {count}, goes on", self._runs(document, at)))
        return Sample(number, sides, found)

    def _runs(self, document: dict, start: int = 0, stop: int | None = None):
        """(text, whether it is trained) of the runs of a document from one token to another."""
        tokens, trained = (of_all[start:stop] for of_all in tokens_of(document))
        return marked_runs(tokens, trained, self.tokenizer)


def _ends_of_texts(ids: np.ndarray, tokenizer) -> np.ndarray:
    """Behind the end token of each text of a stream."""
    return np.flatnonzero(ids == tokenizer.eos_token_id) + 1


def _summary(dataset, objective) -> str:
    tokens, count = samples_of(dataset), dataset.num_tokens
    share = dataset.num_trained_tokens / max(count, 1)
    return f"{len(tokens):,} {objective.unit}s, {count:,} tokens, {share:.1%} of them trained"


def histogram(lengths: np.ndarray) -> list[tuple[str, int]]:
    """("from-to", how many of the lengths lie there) of at most 12 bars of one round width."""
    width, least, most = 1, int(lengths.min()), int(lengths.max())
    while most // width - least // width >= _MAX_BARS:
        width = {"1": 2, "2": 5, "5": 10}[str(width)[0]] * 10 ** (len(str(width)) - 1)
    bars = []
    for start in range(least // width * width, most + 1, width):
        name = f"{start:,}" if width == 1 else f"{start:,}-{start + width - 1:,}"
        bars.append((name, int(((lengths >= start) & (lengths < start + width)).sum())))
    return bars


def visible(text: str, most: int) -> str:
    """The text with codes instead of characters that nobody sees, or that control a terminal, and
    without its middle where it is longer than `most`."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
