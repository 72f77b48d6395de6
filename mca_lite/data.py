"""The datasets of a run: shards from the token cache, joined, split, mixed, packed and described.

A sample is a list of documents {"input_ids", "labels"}, shifted: labels[t] is the target of
position t, or IGNORE_INDEX. No collectives: every rank calls the same and gets the same.
"""

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from . import world
from .args_rules import NAMED, check_records, name_of_set
from .data_batches import Packs, Turns
from .data_chat import ChatRenderer, chat_renderer
from .data_encode import BAD, UNUSABLE, Encoder, Reader, Shard, load_shard, shifted
from .data_files import SIDES, DatasetSpec, resolve
from .data_stream import CHUNK_RECORDS, HeldOut, TokenStream
from .errors import Judge, refuse
from .files import IGNORE_INDEX
from .tables import Objective, objective_of

_SHOWN_CHARS = 600  # of a sample, in the report

# -- the dataset


class TokenDataset(Dataset):
    """Map-style: `dataset[i]` is a list of documents {"input_ids": int64 [n], "labels": int64 [n]},
    read from memory-mapped files: one document for a conversation or a piece of text, chosen and
    rejected for a pair.

    shards: all with equally many documents a sample. index: the samples and their order, as numbers
    in the shards laid end to end (None: all). num_tokens and num_trained_tokens count inputs, and
    labels that are not IGNORE_INDEX.
    """

    def __init__(self, shards: list[Shard], index: np.ndarray | None = None):
        self.shards = list(shards)
        self._starts = np.cumsum([0, *(len(shard) for shard in self.shards)])
        if index is None:
            index = np.arange(self._starts[-1])
        self.index = np.asarray(index, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> list[dict]:
        shard, row = self.place(i)
        return self.shards[shard][row]

    def place(self, i: int) -> tuple[int, int]:
        """(number of the shard, number in it) of sample i."""
        row = self.index[i]
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        return shard, int(row - self._starts[shard])

    @property
    def shard_numbers(self) -> np.ndarray:
        """int64 [samples]: number of each sample's shard."""
        return np.searchsorted(self._starts, self.index, side="right") - 1

    @property
    def document_lengths(self) -> np.ndarray:
        """int64 [samples, documents of a sample]: numbers of inputs, without reading a sample."""
        return np.concatenate([shard.document_lengths for shard in self.shards])[self.index]

    @property
    def documents_per_sample(self) -> int:
        return self.shards[0].document_lengths.shape[1]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [samples]: inputs of each sample, those of all its documents."""
        return self.document_lengths.sum(axis=1)

    @property
    def costs(self) -> np.ndarray | None:
        """Tokens of each pair, for BatchPlan to balance the ranks of a step; None for samples of
        one document, dealt in their order."""
        if self.documents_per_sample == 1:
            return None
        return self.lengths.astype(np.float64)

    @property
    def fingerprint(self) -> str:
        """Name of the tokens of the samples, their order and the code of tokenising: a key for
        results computed from them."""
        return self._digest([shard.folder.name for shard in self.shards])

    @property
    def identity(self) -> str:
        """Name of the samples by their files, keys, tokenizer and order. A resumed run must have
        the same, and may have newer code."""
        return self._digest([shard.identity for shard in self.shards])

    def _digest(self, names: list[str]) -> str:
        digest = hashlib.sha256("\n".join(names).encode())
        digest.update(self.index.tobytes())
        return digest.hexdigest()[:16]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_trained_tokens(self) -> int:
        return int(np.concatenate([shard.learned for shard in self.shards])[self.index].sum())

    def subset(self, index) -> "TokenDataset":
        """The samples at these positions, in this order; positions may repeat."""
        return TokenDataset(self.shards, self.index[np.asarray(index, dtype=np.int64)])


def split_off(
    dataset: TokenDataset, val_size: float, seed: int
) -> tuple[TokenDataset, TokenDataset]:
    """(train, eval): val_size samples (a fraction below 1, else a count), a seeded choice; both
    keep their order."""
    count = round(len(dataset) * val_size) if val_size < 1 else int(val_size)
    count = max(count, 1)
    if count >= len(dataset):
        reason = f"it takes {count} of {len(dataset)} samples and leaves none to train on"
        refuse("val_size", val_size, reason, "a lower val_size")
    order = np.random.default_rng([seed, len(dataset)]).permutation(len(dataset))
    return dataset.subset(np.sort(order[count:])), dataset.subset(np.sort(order[:count]))


def mix(dataset: TokenDataset, data_args, seed: int) -> tuple[TokenDataset, list[str]]:
    """(dataset, lines for the report): the samples by mix_strategy and mix_weights."""
    strategy = data_args.mix_strategy
    weights = data_args.mix_weights
    if strategy == "concat" and not weights:
        return dataset, []
    shard_of = dataset.shard_numbers
    shards = [np.flatnonzero(shard_of == number) for number in range(len(dataset.shards))]
    for number, rows_of_shard in enumerate(shards, 1):
        if not len(rows_of_shard):
            reason = f"it leaves no sample of dataset {number} of {len(shards)} to mix"
            refuse("val_size", None, reason, "a lower val_size")
    if strategy == "concat":
        rows = _in_shares(shards, weights, seed)
        name = "mix"
    else:
        turns = Turns(len(shards), strategy, weights, seed)
        rows = np.array(_in_turns(shards, turns))
        name = f"mix: {strategy}"
    counts = np.bincount(shard_of[rows], minlength=len(shards)).tolist()
    lines = [
        f"{name}: {counts[n]:,} samples an epoch from the {len(shards[n]):,} of dataset {n + 1}"
        for n in range(len(shards))
    ]
    return dataset.subset(rows), lines


def _in_shares(shards: list[np.ndarray], weights: list[float], seed: int) -> np.ndarray:
    """As many rows as the shards have, in the proportions of the weights.

    A shard too small for its share repeats, one too large is subsampled (the same choice in every
    epoch). The shards are spread evenly over the result: the proportions hold without shuffling.
    """
    size = sum(map(len, shards))
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * size
    counts = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(counts - exact, kind="stable")[: size - counts.sum()]
    counts[largest_remainders] += 1
    rows = []
    places = []
    for number, (shard, count) in enumerate(zip(shards, counts.tolist(), strict=True)):
        repeats, rest = divmod(count, len(shard))
        extra = np.sort(np.random.default_rng([seed, number]).permutation(len(shard))[:rest])
        rows += [np.tile(shard, repeats), shard[extra]]
        places.append((np.arange(count) + 0.5) / max(count, 1))
    return np.concatenate(rows)[np.argsort(np.concatenate(places), kind="stable")]


def _in_turns(shards: list[np.ndarray], turns: Turns) -> list[int]:
    """The rows of the shards in turns. Each shard is read in its order, and again if the strategy
    repeats it."""
    counts = [0] * len(shards)
    rows = []
    for number in turns:
        shard = shards[number]
        rows.append(shard[counts[number] % len(shard)])
        counts[number] += 1
        if counts[number] >= len(shard):
            turns.exhausted.add(number)
    return rows


# -- the report


def tokens_of(document: dict) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, True for each with loss) of a shifted document, both [n + 1]; [n] if the last label
    is IGNORE_INDEX: the document lacks that token."""
    tokens = np.append(document["input_ids"], document["labels"][-1:])
    trained = np.append(False, document["labels"] != IGNORE_INDEX)
    count = len(tokens) - int(not trained[-1])
    return tokens[:count], trained[:count]


def marked_runs(tokens: np.ndarray, trained: np.ndarray, tokenizer) -> list[tuple[str, bool]]:
    """(text, True if it has loss) of each run of tokens with loss, or without."""
    borders = np.flatnonzero(np.diff(trained)) + 1
    runs = zip(np.split(tokens, borders), np.split(trained, borders), strict=True)
    return [(tokenizer.decode(ids.tolist()), bool(mask[0])) for ids, mask in runs if len(ids)]


def show_document(document: dict, tokenizer) -> str:
    """The document decoded, with «» around text with loss, and long text cut in the middle."""
    text = ""
    for piece, is_trained in marked_runs(*tokens_of(document), tokenizer):
        text += f"«{piece}»" if is_trained else piece
    if len(text) > _SHOWN_CHARS:
        text = f"{text[: _SHOWN_CHARS // 2]} ... {text[-_SHOWN_CHARS // 2 :]}"
    return repr(text)


def _describe(
    spec: DatasetSpec, shard: Shard, first: list[dict] | None, objective: Objective, tokenizer
) -> list[str]:
    """Lines for the report. first: the first sample, None without one."""
    formats = shard.meta["formats"]
    tally = shard.tally
    lengths = shard.document_lengths.sum(axis=1)
    # The cache knows a file by its content: it may have had another name when it was written.
    names = dict(zip(shard.meta["sources"], spec.files, strict=True))

    def renamed(line: str) -> str:
        file = next((file for file in names if line.startswith(f"{file}:")), "")
        return names.get(file, file) + line.removeprefix(file)

    lines = []
    for source, file in names.items():
        form = formats.get(source, "not read")
        if objective.has_pairs and source in formats:
            form += "-chosen-rejected"
        lines.append(f"{file}: {form} records")
    line = f"{tally.records:,} records -> {len(lengths):,} {objective.unit}s, "
    line += f"{lengths.sum():,} tokens"
    if first is not None:
        share = 100 * shard.learned.sum() / max(lengths.sum(), 1)
        line += f" ({share:.1f} % trained), longest {lengths.max():,}"
    lines += [f"{spec.name}: {line}", *_notes(spec)]
    bad = []
    for count in tally.counts.values():
        if count.kind == BAD:
            bad.append(f"    {count.number:,}: {count.text}")
        else:
            lines.append(f"  warning: {count}, the first at {renamed(count.place)}")
    if bad:
        lines += [f"  warning: {tally.number(BAD):,} {UNUSABLE}", *bad, "  the first of them:"]
        lines += [f"    {renamed(line)}" for line in tally.first_bad]
    return lines + _show(first, tokenizer)


def _describe_stream(reader: Reader, encoder: Encoder) -> list[str]:
    """Lines for the report, from the first records."""
    records = itertools.islice(reader.records(), CHUNK_RECORDS)
    samples, _ = encoder.encode([record for record, _ in records])
    spec = reader.spec
    first = next(iter(spec.files))
    size = sum(Path(file).stat().st_size for file in spec.files) / 2**30
    lines = [
        f"{first}: {reader.formats.get(first, 'not read')} records",
        f"{spec.name}: files of {size:,.2f} GiB, tokenised as they are read",
        *_notes(spec),
    ]
    whole = [file for file, kind in spec.files.items() if kind.startswith((".json", ".csv"))]
    whole = [file for file in whole if not spec.files[file].startswith(".jsonl")]
    if whole:
        note = f"{whole[0]} is read into memory as a whole: of .jsonl only lines are"
        lines.append(f"  note: {note}")
    sample = [shifted(*document) for document in samples[0]] if samples else None
    return lines + _show(sample, encoder.tokenizer)


def _notes(spec: DatasetSpec) -> list[str]:
    return [f"  note: {note}" for note in spec.notes]


def _show(sample: list[dict] | None, tokenizer) -> list[str]:
    """Lines with the text of each document."""
    documents = sample or []
    parts = SIDES if len(documents) > 1 else ("sample",)
    return [
        f"  first {part}, trained tokens in «»: {show_document(document, tokenizer)}"
        for part, document in zip(parts, documents, strict=False)
    ]


# -- all of a run


@dataclass
class DatasetBundle:
    """Datasets of a run, from load_datasets. report: lines to print on one rank."""

    train: TokenDataset | Packs | TokenStream | None
    # a dict: by name
    eval: TokenDataset | Packs | HeldOut | dict[str, TokenDataset | Packs] | None
    report: list[str]


def load_datasets(data_args, stage: str, tokenizer, seed: int = 42) -> DatasetBundle:
    """The datasets of a run, tokenised or from the cache, with lines for the report.

    data_args: DataArguments. stage: a name in OBJECTIVES, which determines samples. tokenizer:
    gets the chat template of the keys, in place, to be exported with it. No collectives: of the
    processes that share cache_dir one writes, the others wait. The split of val_size and the mixing
    depend on the seed and the files alone.
    Raises: ConfigError for keys, ValueError with file and line for unusable input.
    """
    world.end_second_run()
    objective = objective_of(stage)
    judge = Judge(data_args)
    judge.apply(NAMED)
    check_records(objective, judge)
    judge.close()
    renderer: ChatRenderer | None = None
    report: list[str] = []
    if not objective.joins_documents:
        renderer, report = chat_renderer(tokenizer, data_args)
    specs = resolve(data_args.dataset, data_args, objective)
    eval_specs = resolve(data_args.eval_dataset or [], data_args, objective)
    encoder = Encoder(tokenizer, renderer, objective, data_args)
    packs = data_args.neat_packing or (bool(data_args.packing) and not objective.joins_documents)
    bundle = DatasetBundle(None, None, report)
    held_out: dict = {}
    if specs and data_args.streaming:
        readers = [Reader(spec, objective, data_args) for spec in specs]
        report += [line for reader in readers for line in _describe_stream(reader, encoder)]
        stream = bundle.train = TokenStream(readers, encoder, data_args, packs, seed)
        if count := data_args.val_size:
            held_out["eval"] = rows = stream.hold_out(count)
            report.append(f"eval: {len(rows):,} rows of the first {count:,} records")
        specs = []
    shards = []
    for spec in (*specs, *eval_specs):
        shard = load_shard(Reader(spec, objective, data_args), encoder, data_args)
        first = shard[0] if len(shard) else None
        report += _describe(spec, shard, first, objective, tokenizer)
        if first is None:
            nothing = f"{spec.name}: no {objective.unit} is left to train on"
            raise ValueError("\n".join([nothing, *report]))
        shards.append(shard)
    sets, lines = _arranged(shards[: len(specs)], shards[len(specs) :], data_args, seed)
    sets |= held_out
    for name, dataset in sets.items():
        tokens = f"{dataset.num_tokens:,} tokens an epoch"
        lines.append(f"{name}: {len(dataset):,} {objective.unit}s, {tokens}")
    if packs:
        sets = {name: _packed(name, dataset, data_args, lines) for name, dataset in sets.items()}
    report += lines
    bundle.train = sets.pop("train", bundle.train)
    bundle.eval = sets.get("eval")
    if data_args.eval_on_each_dataset:
        bundle.eval = {name_of_set(name.removeprefix("eval ")): sets[name] for name in sets}
    return bundle


def _arranged(
    shards: list[Shard], eval_shards: list[Shard], data_args, seed: int
) -> tuple[dict[str, TokenDataset], list[str]]:
    """(the datasets of a run by their names, lines for the report): split and mixed."""
    sets: dict[str, TokenDataset] = {}
    lines: list[str] = []
    if shards:
        sets["train"] = TokenDataset(shards)
        if data_args.val_size:
            sets["train"], sets["eval"] = split_off(sets["train"], data_args.val_size, seed)
        sets["train"], lines = mix(sets["train"], data_args, seed)
    if data_args.eval_on_each_dataset:
        each = zip(data_args.eval_dataset, eval_shards, strict=True)
        sets |= {f"eval {name}": TokenDataset([shard]) for name, shard in each}
    elif eval_shards:
        sets["eval"] = TokenDataset(eval_shards)
    return sets, lines


def _packed(name: str, dataset: TokenDataset, data_args, lines: list[str]) -> Packs:
    # each document may have cutoff_len tokens, and those of a sample go into one row
    capacity = data_args.cutoff_len * dataset.documents_per_sample
    packed = Packs(dataset, capacity)
    lines.append(
        f"{name}: packed into {len(packed):,} rows of at most {capacity:,} tokens, "
        f"{100 * packed.padding_fraction:.2f} % padding"
    )
    return packed
