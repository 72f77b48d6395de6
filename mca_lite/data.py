"""The datasets of a run: token-cache shards, joined, split, mixed, packed and described.

A sample is a list of documents {"input_ids", "labels"} with shifted labels: labels[t] is the target
at position t, or IGNORE_INDEX. Nothing here is collective: every rank makes the same calls and gets
the same result.
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
    """Map-style: `dataset[i]` is a list of documents {"input_ids": int64 [n], "labels": int64 [n]},
    read from memory-mapped files: one document for a conversation or a text, chosen and rejected
    for a pair.

    shards: each has the same number of documents per sample. index: int64, the samples in order,
    numbered through all shards (None: all samples). ends: the number after each shard's last
    sample. num_tokens counts inputs, num_trained_tokens counts labels other than IGNORE_INDEX.
    """

    def __init__(self, shards: list[Shard], index: np.ndarray | None = None) -> None:
        self.shards = shards
        joined: ConcatDataset = ConcatDataset(self.shards)
        super().__init__(joined, np.arange(len(joined)) if index is None else index)
        self.ends = joined.cumulative_sizes

    @property
    def document_lengths(self) -> np.ndarray:
        """int64 [samples, documents per sample]: input counts, without reading the samples."""
        return np.concatenate([shard.document_lengths for shard in self.shards])[self.indices]

    @property
    def documents_per_sample(self) -> int:
        return self.shards[0].documents_per_sample

    @property
    def lengths(self) -> np.ndarray:
        """int64 [samples]: inputs per sample, summed over its documents."""
        return self.document_lengths.sum(axis=1)

    @property
    def work(self) -> np.ndarray | None:
        """work_of() per pair, so that BatchPlan can balance ranks; None for samples of one
        document, which keep their order."""
        return None if self.documents_per_sample == 1 else work_of(self.document_lengths)

    @property
    def fingerprint(self) -> str:
        """A name for the samples' tokens, their order and the tokenising code: a key for results
        computed from them."""
        return self._digest([shard.folder.name for shard in self.shards])

    @property
    def identity(self) -> str:
        """A name for the samples by files, keys, tokenizer and order. A resumed run must have the
        same identity, but may have newer code."""
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
        """int64 [samples]: labels per sample other than IGNORE_INDEX."""
        return np.concatenate([shard.learned for shard in self.shards])[self.indices]

    @property
    def num_trained_tokens(self) -> int:
        return int(self.learned.sum())

    @property
    def has_media(self) -> bool:
        """True if any document of the shards has an input other than text."""
        return any(shard.media_end[-1] for shard in self.shards)

    def subset(self, index: Any) -> "TokenDataset":
        """The samples at the given positions, in the given order; positions may repeat."""
        return TokenDataset(self.shards, self.indices[index])


def split_off(
    dataset: TokenDataset, val_size: float, seed: int
) -> tuple[TokenDataset, TokenDataset]:
    """(train, eval): a seeded random choice of val_size samples for eval (a fraction if below 1,
    else a count). Each part keeps the dataset's order."""
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
    """(dataset, report lines): the samples of several shards in the turns of mix_strategy. Each
    shard is read in its order, and again from its start if the strategy repeats it."""
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
    """(tokens, True per token with loss) of a document with shifted labels, both [n + 1]; [n] if
    the last label is IGNORE_INDEX, because the document does not have that token then."""
    tokens = np.append(document["input_ids"], document["labels"][-1:])
    trained = np.append(False, document["labels"] != IGNORE_INDEX)
    count = len(tokens) - int(not trained[-1])
    return tokens[:count], trained[:count]


def marked_runs(
    tokens: np.ndarray, trained: np.ndarray, tokenizer: PreTrainedTokenizerBase, media: Media = TEXT
) -> list[tuple[str, bool]]:
    """(text, True if it has loss) per run of tokens with loss or without. A run of placeholders is
    shown as one token and a count."""
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
    """A document as text, with «» around text with loss, and shortened in the middle if long."""
    text = ""
    for piece, is_trained in marked_runs(*tokens_of(document), tokenizer, media):
        text += f"«{piece}»" if is_trained else piece
    return _shown.repr(text)


def describe_files(
    spec: DatasetSpec, formats: list[str], facts: str, objective: Objective
) -> list[str]:
    """Report lines for a dataset: the format of each file, then `facts`."""
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
    """Report lines with the text of each document."""
    documents = list(itertools.chain(*samples))
    names = SIDES if len(documents) > 1 else ("sample",)
    return [
        f"  first {name}, trained tokens in «»: {show_document(document, tokenizer, media)}"
        for name, document in zip(names, documents, strict=False)
    ]


# -- all of a run


@dataclass
class DatasetBundle:
    """The datasets of a run, from load_datasets. report: lines for one rank to print. media: how
    the model reads inputs other than text."""

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
    """The datasets of a run, tokenised or from the cache, with report lines.

    data_args: DataArguments. stage: a name in OBJECTIVES; it decides what a sample is. tokenizer:
    its chat template is set from the keys, in place, so that an export has it. media: the model's.
    stream_args: StreamArguments, or None if nothing is streamed. Not collective: one of the
    processes that share cache_dir tokenises, and the others wait for its files. Splitting by
    val_size and mixing depend on the seed and the files alone.

    Raises ConfigError for wrong keys; ValueError with file and line for unusable input.
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
    """A report line with a dataset's size. Raises ConfigError if it is too small for the stage."""
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
