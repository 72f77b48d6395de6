"""The datasets of a run: shards from the token cache, put together, split, mixed, packed and
described.

A sample is a list of documents {"input_ids", "labels"}, shifted: labels[t] is the token that
position t has to predict, or IGNORE_INDEX. Nothing here talks to other ranks: every rank calls the
same and gets the same.
"""

import hashlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from .args_rules import check_named, check_records
from .args_values import Judge, refuse
from .constants import IGNORE_INDEX
from .data_batches import Turns
from .data_cache import load_shard
from .data_chat import set_chat_template
from .data_encode import BAD, Encoder
from .data_files import SIDES, DatasetSpec, plain_kind_of, resolve
from .data_packs import Packs
from .data_shard import Shard, shifted
from .data_stream import CHUNK_RECORDS, HeldOut, TokenStream
from .objectives import objective_of

_SHOWN_CHARS = 600  # of a sample, in the report

# -- the dataset ---------------------------------------------------------------------------------


class TokenDataset(Dataset):
    """Map-style: `dataset[i]` is a list of documents {"input_ids": int64 [n], "labels": int64 [n]},
    read from memory-mapped files: one document for a conversation or a piece of text, chosen and
    rejected for a pair.

    shards: all with as many documents a sample. index: the samples and their order, numbers in the
    shards laid end to end (None: all). num_tokens and num_trained_tokens count inputs, and labels
    that are not IGNORE_INDEX.
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
    def document_lengths(self) -> np.ndarray:
        """int64 [samples, documents of a sample]: their inputs, without reading a sample."""
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
        """Tokens of each pair, by which BatchPlan deals those of a step to the ranks; None for
        samples of one document, which are dealt in their order."""
        return self.lengths.astype(np.float64) if self.documents_per_sample > 1 else None

    @property
    def fingerprint(self) -> str:
        """Names the tokens of the samples and their order, with the code that made them: what is
        computed from them may be kept under it."""
        return self._digest([shard.folder.name for shard in self.shards])

    @property
    def identity(self) -> str:
        """Names the samples by their files, keys and tokenizer, and their order: a run that goes on
        must have the same, and may have newer code."""
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
    """(dataset, lines for the report): the samples as mix_strategy and mix_weights have them."""
    strategy, weights = data_args.mix_strategy, data_args.mix_weights
    if strategy == "concat" and not weights:
        return dataset, []
    shard_of = np.searchsorted(dataset._starts, dataset.index, side="right") - 1
    shards = [np.flatnonzero(shard_of == number) for number in range(len(dataset.shards))]
    for number, own in enumerate(shards, 1):
        if not len(own):
            reason = f"it leaves no sample of dataset {number} of {len(shards)} to mix"
            refuse("val_size", None, reason, "a lower val_size")
    if strategy == "concat":
        rows, name = _in_shares(shards, weights, seed), "mix"
    else:
        turns = Turns(len(shards), strategy, weights, seed)
        rows, name = _in_turns(shards, turns), f"mix: {strategy}"
    counts = np.bincount(shard_of[rows], minlength=len(shards)).tolist()
    lines = [
        f"{name}: {count:,} samples an epoch from the {len(own):,} of dataset {number}"
        for number, (count, own) in enumerate(zip(counts, shards, strict=True), 1)
    ]
    return dataset.subset(rows), lines


def _in_shares(shards: list[np.ndarray], weights: list[float], seed: int) -> np.ndarray:
    """As many rows as the shards have, in the proportions of the weights.

    A shard that is too small repeats, one that is too large is subsampled (the same choice in every
    epoch). The shards are spread evenly over the result, so that the proportions hold without
    shuffling too.
    """
    size = sum(map(len, shards))
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * size
    counts = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(counts - exact, kind="stable")[: size - counts.sum()]
    counts[largest_remainders] += 1
    rows, places = [], []
    for number, (own, count) in enumerate(zip(shards, counts.tolist(), strict=True)):
        repeats, rest = divmod(count, len(own))
        extra = np.sort(np.random.default_rng([seed, number]).permutation(len(own))[:rest])
        rows += [np.tile(own, repeats), own[extra]]
        places.append((np.arange(count) + 0.5) / max(count, 1))
    return np.concatenate(rows)[np.argsort(np.concatenate(places), kind="stable")]


def _in_turns(shards: list[np.ndarray], turns: Turns) -> list[int]:
    """The rows of the shards in turns, each shard's in their order, and from the beginning again
    where the strategy repeats them."""
    counts, rows = [0] * len(shards), []
    for number in turns:
        own = shards[number]
        rows.append(own[counts[number] % len(own)])
        counts[number] += 1
        if counts[number] >= len(own):
            turns.exhausted.add(number)
    return rows


# -- the front door ------------------------------------------------------------------------------


@dataclass
class DatasetBundle:
    """What load_datasets returns. report: lines to print on one rank."""

    train: TokenDataset | Packs | TokenStream | None
    # a dict: of each name
    eval: TokenDataset | Packs | HeldOut | dict[str, TokenDataset | Packs] | None
    report: list[str] = field(default_factory=list)


class _Loader:
    """Turns dataset entries into datasets, and keeps the lines of the report."""

    def __init__(self, data_args, stage: str, tokenizer):
        self.args, self.stage, self.tokenizer = data_args, stage, tokenizer
        self.objective = objective_of(stage)
        self.report: list[str] = []

    def load(self, entries: list[str]) -> TokenDataset:
        shards = []
        for encoder in self._encoders(entries):
            shards.append(load_shard(encoder))
            dataset = TokenDataset(shards[-1:])
            self._describe(encoder.spec, shards[-1].meta, dataset)
            if not len(dataset):
                nothing = f"{encoder.spec.name}: no {self.objective.unit} is left to train on"
                raise ValueError("\n".join([nothing, *self.report]))
        return TokenDataset(shards)

    def open_stream(self, entries: list[str], seed: int) -> TokenStream:
        """The entries as a stream: only their first records are read now."""
        encoders = self._encoders(entries)
        for encoder in encoders:
            self._describe_stream(encoder)
        return TokenStream(encoders, self.args, _packs_samples(self.args, self.stage), seed)

    def _encoders(self, entries: list[str]) -> list[Encoder]:
        args = self.args
        specs = resolve(entries, args.dataset_dir, self.stage)
        return [Encoder(self.tokenizer, spec, self.stage, args) for spec in specs]

    def pack(self, name: str, dataset: TokenDataset) -> Packs:
        # each document may have cutoff_len tokens, and those of a sample go into one row
        capacity = self.args.cutoff_len * dataset.documents_per_sample
        packed = Packs(dataset, capacity)
        self.report.append(
            f"{name}: packed into {len(packed):,} rows of at most {capacity:,} tokens, "
            f"{100 * packed.padding_fraction:.2f} % padding"
        )
        return packed

    def _describe(self, spec: DatasetSpec, meta: dict, dataset: TokenDataset) -> None:
        # The cache knows a file by its content: it may have had another name when it was written.
        names = dict(zip(meta["sources"], spec.files, strict=True))

        def renamed(line: str) -> str:
            file = next((file for file in names if line.startswith(f"{file}:")), "")
            return names.get(file, file) + line.removeprefix(file)

        for source, file in names.items():
            form = meta["formats"].get(source, "not read")
            if self.objective.has_pairs and source in meta["formats"]:
                form += "-chosen-rejected"
            self.report.append(f"{file}: {form} records")
        line = (
            f"{spec.name}: {meta['records']:,} records -> {len(dataset):,} {self.objective.unit}s, "
            f"{dataset.num_tokens:,} tokens"
        )
        if len(dataset):
            share = 100 * dataset.num_trained_tokens / max(dataset.num_tokens, 1)
            line += f" ({share:.1f} % trained), longest {dataset.lengths.max():,}"
        self.report.append(line)
        self.report += [f"  note: {note}" for note in spec.notes + meta["notes"]]
        bad = {}
        for what, count in meta["counts"].items():
            if what.startswith(BAD):
                bad[what.removeprefix(BAD)] = count
                continue
            first = renamed(meta["places"][what])
            self.report.append(f"  warning: {count:,} {what}, the first at {first}")
        if bad:
            self.report.append(f"  warning: {sum(bad.values()):,} {BAD.removesuffix(': ')}")
            self.report += [f"    {count:,}: {reason}" for reason, count in bad.items()]
            self.report.append("  the first of them:")
            self.report += [f"    {renamed(line)}" for line in meta["first_bad"]]
        if len(dataset):
            parts = SIDES if self.objective.has_pairs else ("sample",)
            self._show(dict(zip(parts, dataset[0], strict=True)))

    def _show(self, documents: dict[str, dict]) -> None:
        for part, shown in documents.items():
            text = show_document(shown, self.tokenizer)
            self.report.append(f"  first {part}, trained tokens in «»: {text}")

    def _describe_stream(self, encoder: Encoder) -> None:
        spec = encoder.spec
        formats: dict[str, str] = {}
        records = itertools.islice(encoder.records(formats), CHUNK_RECORDS)
        samples, _ = encoder.encode([record for record, _ in records])
        size = sum(Path(file).stat().st_size for file in spec.files) / 2**30
        self.report += [
            f"{spec.files[0]}: {formats.get(spec.files[0], 'not read')} records",
            f"{spec.name}: files of {size:,.2f} GiB, tokenised as they are read",
            *(f"  note: {note}" for note in spec.notes + encoder.notes),
        ]
        whole = [f for f in spec.files if plain_kind_of(f) in (".json", ".csv")]
        if whole:
            note = f"{whole[0]} is read into memory as a whole: of .jsonl only lines are"
            self.report.append(f"  note: {note}")
        if samples:
            _, [document] = samples[0]
            self._show({"sample": shifted(*document)})


def _packs_samples(data_args, stage: str) -> bool:
    """Whether samples are packed into rows in which they do not see each other."""
    may_pack = not objective_of(stage).joins_documents
    return data_args.neat_packing or (may_pack and bool(data_args.packing))


def tokens_of(document: dict) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, whether each carries loss) of a document that is shifted, both [n + 1]; [n] where
    nothing predicts the last token: then the document does not hold it."""
    tokens = np.append(document["input_ids"], document["labels"][-1:])
    trained = np.append(False, document["labels"] != IGNORE_INDEX)
    return (tokens, trained) if trained[-1] else (tokens[:-1], trained[:-1])


def marked_runs(tokens: np.ndarray, trained: np.ndarray, tokenizer) -> list[tuple[str, bool]]:
    """(text, whether it carries loss) of each run of tokens that all do, or do not."""
    borders = np.flatnonzero(np.diff(trained)) + 1
    runs = zip(np.split(tokens, borders), np.split(trained, borders), strict=True)
    return [(tokenizer.decode(ids.tolist()), bool(mask[0])) for ids, mask in runs if len(ids)]


def show_document(document: dict, tokenizer) -> str:
    """The document decoded, with «» round what carries loss; long ones are cut in the middle."""
    text = ""
    for piece, is_trained in marked_runs(*tokens_of(document), tokenizer):
        text += f"«{piece}»" if is_trained else piece
    if len(text) > _SHOWN_CHARS:
        text = f"{text[: _SHOWN_CHARS // 2]} ... {text[-_SHOWN_CHARS // 2 :]}"
    return repr(text)


def load_datasets(data_args, stage: str, tokenizer, seed: int = 42) -> DatasetBundle:
    """The datasets of a run, tokenised or from the cache, with the lines that describe them.

    data_args: DataArguments. stage: a name in OBJECTIVES, whose records say what a sample is.
    tokenizer: gets the chat template of the keys, with which it is exported. Every rank may call
    it: one process of those that share cache_dir writes, the others wait; nothing collective
    happens. The split of val_size and the mixing depend on the seed and the files alone.
    Raises: ConfigError for keys, ValueError with file and line for input that cannot be used.
    """
    judge = Judge(data_args)
    check_named(data_args, judge)
    check_records(data_args, objective_of(stage), judge)
    judge.close()
    loader, val_size = _Loader(data_args, stage, tokenizer), data_args.val_size
    report, unit = loader.report, loader.objective.unit
    if not loader.objective.joins_documents:
        report += set_chat_template(tokenizer, data_args.chat_template, data_args.template)
    found: dict = {}  # of each name
    stream = None
    if data_args.dataset and data_args.streaming:
        stream = loader.open_stream(data_args.dataset, seed)
        if val_size:
            found["eval"] = held_out = stream.hold_out(val_size)
            report.append(f"eval: {len(held_out):,} rows of the first {val_size:,} records")
    elif data_args.dataset:
        found["train"] = loader.load(data_args.dataset)
        if val_size:
            found["train"], found["eval"] = split_off(found["train"], val_size, seed)
        found["train"], lines = mix(found["train"], data_args, seed)
        report += lines
    each = {}  # name of an evaluation set -> its key in `found`
    if data_args.eval_dataset and data_args.eval_on_each_dataset:
        each = {Path(name).stem: f"eval {name}" for name in data_args.eval_dataset}
        found |= {f"eval {name}": loader.load([name]) for name in data_args.eval_dataset}
    elif data_args.eval_dataset:
        found["eval"] = loader.load(data_args.eval_dataset)
    for name, dataset in found.items():
        tokens = f"{dataset.num_tokens:,} tokens an epoch"
        report.append(f"{name}: {len(dataset):,} {unit}s, {tokens}")
    if _packs_samples(data_args, stage):
        found = {name: loader.pack(name, dataset) for name, dataset in found.items()}
    bundle = DatasetBundle(found.get("train", stream), None, report)
    if each:
        bundle.eval = {name: found[key] for name, key in each.items()}
    elif "eval" in found:
        bundle.eval = found["eval"]
    return bundle
