"""The datasets of a run: token-cache shards, joined, split, mixed, packed and described.

A sample is a list of documents {"input_ids", "labels"} with shifted labels: labels[t] is the target
at position t, or IGNORE_INDEX. Nothing here is collective.
"""

import hashlib
import itertools
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset
from transformers import PreTrainedTokenizerBase

from . import world
from .args_rules import NAMED, check_records, name_of_set
from .data_batches import Packs, Stream, Turns, work_of
from .data_chat import ChatRenderer, chat_renderer
from .data_encode import Encoder, Reader, Shard, load_shard
from .data_files import SIDES, DatasetSpec, resolve
from .errors import Judge, Keys, refuse
from .files import IGNORE_INDEX
from .inputs import TEXT, Media
from .tables import Objective, function_of, objective_of

_shown = reprlib.Repr()
_shown.maxstring = 600  # maximum characters of a sample in the report

# -- the dataset


class TokenDataset(Subset):
    """A map-style dataset of tokenised samples, which are stored in shards of the token cache, one
    per data set that it joins. `dataset[i]` is a list of documents: for a preference pair chosen
    and rejected, otherwise one. A document is {"input_ids": int64 [n], "labels": int64 [n]}, and
    may have more columns.

    shards: all have the same number of documents per sample.
    index: int64, the samples to use, in order, counted through all shards (None: all).
    ends: cumulative shard sizes. num_tokens counts input_ids, num_trained_tokens counts labels
    other than IGNORE_INDEX."""

    def __init__(self, shards: list[Shard], index: np.ndarray | None = None) -> None:
        self.shards = shards
        joined: ConcatDataset = ConcatDataset(self.shards)
        super().__init__(joined, np.arange(len(joined)) if index is None else index)
        self.ends = joined.cumulative_sizes

    @property
    def document_lengths(self) -> np.ndarray:
        """int64 [samples, documents per sample]: the number of input_ids in each document. It comes
        from the cache's index; no sample is read."""
        return np.concatenate([shard.document_lengths for shard in self.shards])[self.indices]

    @property
    def documents_per_sample(self) -> int:
        return self.shards[0].documents_per_sample

    @property
    def lengths(self) -> np.ndarray:
        """int64 [samples]: the number of input_ids per sample, summed over its documents."""
        return self.document_lengths.sum(axis=1)

    @property
    def work(self) -> np.ndarray | None:
        """Sizes of preference pairs by which work is spread evenly over data-parallel ranks:
        float64 [samples, 2], tokens and the sum of squared document lengths. None for samples of
        one document."""
        return None if self.documents_per_sample == 1 else work_of(self.document_lengths)

    @property
    def fingerprint(self) -> str:
        """A hash of the shards' folder names, which are hashes of data, keys and tokenising code,
        and of the samples' order: a cache key for results such as reference log-probabilities."""
        return self._digest([shard.folder.name for shard in self.shards])

    @property
    def identity(self) -> str:
        """A hash of the data's files, options, tokenizer and sample order, without the source code
        that `fingerprint` includes. A resumed run must train on data of the same identity."""
        return self._digest([shard.identity for shard in self.shards])

    def _digest(self, names: list[str]) -> str:
        digest = hashlib.sha256("\n".join(names).encode())
        digest.update(self.indices.tobytes())
        return digest.hexdigest()[:16]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def learned(self) -> np.ndarray:
        """int64 [samples]: trained tokens per sample, which are labels other than IGNORE_INDEX."""
        return np.concatenate([shard.learned for shard in self.shards])[self.indices]

    @property
    def num_trained_tokens(self) -> int:
        return int(self.learned.sum())

    @property
    def has_media(self) -> bool:
        """True if any document in the shards has an image or another input that is not text;
        samples that `index` leaves out count too."""
        return any(shard.media_end[-1] for shard in self.shards)

    def subset(self, index: Any) -> "TokenDataset":
        """A dataset of the samples at positions `index`, in that order. A position may occur more
        than once."""
        return TokenDataset(self.shards, self.indices[index])


def split_off(
    dataset: TokenDataset, val_size: float, seed: int
) -> tuple[TokenDataset, TokenDataset]:
    """Split a dataset at random, but reproducibly by seed -> (train, eval). Both parts keep the
    dataset's order.

    val_size: eval's share of the samples if below 1, otherwise their count; at least one sample.
    Raises ConfigError if nothing is left to train on.
    """
    count = round(len(dataset) * val_size) if val_size < 1 else int(val_size)
    count = max(count, 1)
    if count >= len(dataset):
        refuse(
            "val_size",
            val_size,
            f"it takes {count} of {len(dataset)} samples and leaves none to train on",
            "a lower val_size",
        )
    order = np.random.default_rng([seed, len(dataset)]).permutation(len(dataset))
    return dataset.subset(np.sort(order[count:])), dataset.subset(np.sort(order[:count]))


def mix(dataset: TokenDataset, data_args: Keys, seed: int) -> tuple[TokenDataset, list[str]]:
    """Interleave the samples of several datasets (the shards of `dataset`), as mix_strategy and
    mix_weights in data_args say -> (the dataset of one epoch, report lines). A shard is read in
    order, and again from its start if the strategy repeats samples. The strategy "concat" changes
    nothing.

    Other strategies raise ConfigError if `dataset` has no sample of some shard. seed: with
    mix_weights it draws from which shard to take each sample."""
    strategy = data_args.mix_strategy
    if strategy == "concat":
        return dataset, []
    shard_of = np.searchsorted(dataset.ends, dataset.indices, side="right")
    shards = [np.flatnonzero(shard_of == number) for number in range(len(dataset.shards))]
    if not all(map(len, shards)):
        refuse("val_size", None, "it leaves no sample of a dataset to mix", "a lower val_size")
    turns = Turns(len(shards), strategy, data_args.mix_weights, seed)
    counts = [0] * len(shards)
    rows = []
    for number in turns:
        shard = shards[number]
        rows.append(shard[counts[number] % len(shard)])
        counts[number] += 1
        if counts[number] >= len(shard):
            turns.exhausted.add(number)
    lines = [
        f"mix: {strategy}: {count:,} samples an epoch from the {len(shard):,} of dataset {number}"
        for number, (count, shard) in enumerate(zip(counts, shards, strict=True), 1)
    ]
    return dataset.subset(rows), lines


# -- the report


def tokens_of(document: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a document and which of them have loss, from input_ids and labels, which are
    shifted by one token -> (tokens, bool mask, True for tokens with loss). Both have n + 1 entries
    for n input_ids; n if the last label is IGNORE_INDEX, because the token after the last input is
    unknown then."""
    tokens = np.append(document["input_ids"], document["labels"][-1:])
    trained = np.append(False, document["labels"] != IGNORE_INDEX)
    count = len(tokens) - int(not trained[-1])
    return tokens[:count], trained[:count]


def marked_runs(
    tokens: np.ndarray, trained: np.ndarray, tokenizer: PreTrainedTokenizerBase, media: Media = TEXT
) -> list[tuple[str, bool]]:
    """Decode tokens in runs -> [(text, True if it has loss)]. Runs are cut where loss begins or
    ends, and around placeholders (media.token_ids), which are shown as one token and a count:
    "<|image_pad|> x 64". trained: bool, True for tokens with loss."""
    is_placeholder = np.isin(tokens, media.token_ids)
    borders = np.flatnonzero(np.diff(trained) | np.diff(is_placeholder)) + 1
    runs = []
    for places in np.split(np.arange(len(tokens)), borders):
        if len(places):
            text = tokenizer.decode(tokens[places].tolist())
            if is_placeholder[places[0]]:
                text = f"{tokenizer.decode(tokens[places[:1]].tolist())} x {len(places)}"
            runs.append((text, bool(trained[places[0]])))
    return runs


def show_document(
    document: dict[str, Any], tokenizer: PreTrainedTokenizerBase, media: Media = TEXT
) -> str:
    """A document as text for a report, quoted as by repr(): text with loss stands in «», and a long
    document is shortened in the middle."""
    text = ""
    for piece, is_trained in marked_runs(*tokens_of(document), tokenizer, media):
        text += f"«{piece}»" if is_trained else piece
    return _shown.repr(text)


def describe_files(
    spec: DatasetSpec, formats: list[str], facts: str, objective: Objective
) -> list[str]:
    """Report lines about a dataset: one per file with its record format, then one with the
    dataset's name and `facts`, a text such as counts. spec: the dataset's name and files. formats:
    one per file of `spec`. objective: if it trains on preference pairs, the lines for files say so.
    """
    ending = "-chosen-rejected records" if objective.has_pairs else " records"
    files = zip(spec.files, formats, strict=True)
    return [*(f"{file}: {form}{ending}" for file, form in files), f"{spec.name}: {facts}"]


def _describe_shard(
    spec: DatasetSpec, shard: Shard, objective: Objective, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    lengths = shard.document_lengths.sum(axis=1)
    tokens = lengths.sum()
    share = 100 * shard.learned.sum() / max(tokens, 1)
    facts = f"{shard.tally.records:,} records -> {len(shard):,} {objective.unit}s, "
    facts += f"{tokens:,} tokens ({share:.1f} % trained), longest {lengths.max(initial=0):,}"
    lines = describe_files(spec, shard.meta["formats"], facts, objective)
    lines += [f"  warning: {line}" for line in shard.tally.lines()]
    samples = [shard.documents(row) for row in range(len(shard))[:1]]
    return lines + show_samples(samples, tokenizer, shard.media)


def show_samples(
    samples: Iterable[list[dict[str, Any]]], tokenizer: PreTrainedTokenizerBase, media: Media = TEXT
) -> list[str]:
    """Report lines with the text of a dataset's first sample: one line per document; a preference
    pair has two, chosen and rejected. samples: only the first sample, as a list of documents; or
    nothing."""
    documents = list(itertools.chain(*samples))
    names = SIDES if len(documents) > 1 else ("sample",)
    return [
        f"  first {name}, trained tokens in «»: {show_document(document, tokenizer, media)}"
        for name, document in zip(names, documents, strict=False)
    ]


# -- all of a run


@dataclass
class DatasetBundle:
    """The datasets of a run, as load_datasets returns them. train, eval: None if the keys do not
    ask for this set. eval is {name: dataset} with eval_on_each_dataset. report: lines for one rank
    to print. media: reads the model's images and other inputs than text."""

    train: TokenDataset | Packs | Stream | None
    # a dict has one dataset per name, with eval_on_each_dataset
    eval: TokenDataset | Packs | dict[str, TokenDataset | Packs] | None
    report: list[str]
    media: Media = TEXT


def _joined(data_args: Keys, stream_args: Keys | None) -> SimpleNamespace:
    of_stream = {} if stream_args is None else vars(stream_args)
    return SimpleNamespace(**{"streaming": False, **vars(data_args), **of_stream})


def load_datasets(
    data_args: Keys,
    stage: str,
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 42,
    media: Media = TEXT,
    stream_args: Any = None,
) -> DatasetBundle:
    """Load the data of a run: tokenise the files, or read their tokens from the cache.

    data_args: DataArguments. stage: a row of OBJECTIVES, such as "sft"; it decides what a sample
    is. tokenizer: its chat template may be replaced in place, as the keys say, so that an export
    has it too. seed: for val_size, mixing and the order of a stream. media: reads the model's
    images and other inputs than text. stream_args: StreamArguments; None: nothing is streamed. Not
    collective; load_shard says which process tokenises what is not streamed.

    Raises ValueError for wrong keys (most of them as ConfigError), for unusable input, and, unless
    it is streamed, for a dataset without samples.
    """
    world.end_second_run()
    objective = objective_of(stage)
    keys = _joined(data_args, stream_args)
    judge = Judge(keys)
    judge.apply(NAMED)
    check_records(objective, judge)
    judge.close()
    renderer: ChatRenderer | None = None
    report: list[str] = []
    if objective.is_rendered:
        renderer, report = chat_renderer(tokenizer, data_args, media)
    make: type[Encoder] = function_of(objective.encoder)
    encoder = make(tokenizer, renderer, objective, data_args, media)
    packs = data_args.neat_packing or (bool(data_args.packing) and not objective.joins_documents)

    def readers(entries: list[str] | None) -> list[Reader]:
        return [
            Reader(spec, objective, data_args, media)
            for spec in resolve(entries or [], data_args, objective)
        ]

    def load(reader: Reader) -> Shard:
        shard = load_shard(reader, encoder, data_args)
        report.extend(_describe_shard(reader.spec, shard, objective, tokenizer))
        if not len(shard):
            raise ValueError(
                f"{reader.spec.name}: no {objective.unit} is left to train on\n" + "\n".join(report)
            )
        return shard

    trained = readers(data_args.dataset)
    evaluated = readers(data_args.eval_dataset)
    stream: Any = None
    sets: dict[str, Any] = {}
    lines: list[str] = []
    if trained and keys.streaming:
        stream = function_of("part_stream:TokenStream")(trained, encoder, keys, packs, seed)
        report += stream.report()
    elif trained:
        sets["train"] = TokenDataset(list(map(load, trained)))
        if data_args.val_size:
            sets["train"], sets["eval"] = split_off(sets["train"], data_args.val_size, seed)
        sets["train"], lines = mix(sets["train"], data_args, seed)
    shards = list(map(load, evaluated))
    if data_args.eval_on_each_dataset:
        each = zip(data_args.eval_dataset, shards, strict=True)
        sets |= {f"eval {name}": TokenDataset([shard]) for name, shard in each}
    elif shards:
        sets["eval"] = TokenDataset(shards)
    lines += [_counted(name, dataset, objective) for name, dataset in sets.items()]
    if packs:
        sets = {name: _packed(name, dataset, data_args, lines) for name, dataset in sets.items()}
    train = sets.pop("train", stream)
    evaluation = sets.get("eval")
    if data_args.eval_on_each_dataset:
        evaluation = {name_of_set(name.removeprefix("eval ")): sets[name] for name in sets}
    return DatasetBundle(train, evaluation, report + lines, media)


def _counted(name: str, dataset: TokenDataset, objective: Objective) -> str:
    """A report line with a dataset's name and size. Raises ConfigError if it has fewer samples than
    the training objective needs."""
    least = objective.least_samples
    if len(dataset) < least:
        reason = f"samples of {name}: stage {objective.stage} compares {least} or more"
        refuse("dataset", len(dataset), reason, "more records, max_samples or val_size")
    count = f"{len(dataset):,} {objective.unit}s"
    return f"{name}: {count}, {dataset.num_tokens:,} tokens an epoch"


def _packed(name: str, dataset: TokenDataset, data_args: Keys, lines: list[str]) -> Packs:
    # a document has up to cutoff_len tokens, and all documents of a sample go into one row
    capacity = data_args.cutoff_len * dataset.documents_per_sample
    packed = Packs(dataset, capacity)
    lines.append(
        f"{name}: packed into {len(packed):,} rows of at most {capacity:,} tokens, "
        f"{100 * packed.padding_fraction:.2f} % padding"
    )
    return packed
