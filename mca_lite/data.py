"""The datasets of a run: shards from the token cache, put together, split, mixed, packed and
described.

A sample is a list of documents {"input_ids", "labels"}, shifted: labels[t] is the token that
position t has to predict, or IGNORE_INDEX. Nothing here talks to other ranks: every rank calls the
same and gets the same.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from .args_rules_data import check_named, check_records
from .args_values import Judge, refuse
from .constants import IGNORE_INDEX
from .data_cache import default_cache_dir, load_shard
from .data_chat import set_chat_template
from .data_encode import Encoder
from .data_files import SIDES, DatasetSpec, kind_of, resolve
from .data_mix import Turns
from .data_packs import Packs
from .data_shard import Shard
from .data_stream import HeldOut, TokenStream, look_at
from .objectives import objective_of

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

    @classmethod
    def concat(cls, datasets: list["TokenDataset"]) -> "TokenDataset":
        """The datasets one after another."""
        shards, index, start = [], [], 0
        for dataset in datasets:
            shards += dataset.shards
            index.append(dataset.index + start)
            start += dataset._starts[-1]
        return cls(shards, np.concatenate(index))


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


def mix(dataset: TokenDataset, weights: list[float], seed: int) -> tuple[TokenDataset, list[str]]:
    """(dataset, lines for the report): as many samples as before, the shards in the proportions of
    the weights.

    A shard that is too small repeats, one that is too large is subsampled (the same choice in every
    epoch). The shards are spread evenly over the result, so that the proportions hold without
    shuffling too.
    Raises: ValueError for weights that are not one positive number a shard.
    """
    if len(weights) != len(dataset.shards) or min(weights) <= 0:
        raise ValueError(
            f"mix_weights {weights}: expected one number above 0 for each of the "
            f"{len(dataset.shards)} datasets"
        )
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * len(dataset)
    counts = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(counts - exact, kind="stable")[: len(dataset) - counts.sum()]
    counts[largest_remainders] += 1
    rows, places, lines = [], [], []
    for number, own in enumerate(_rows_of_shards(dataset)):
        count = int(counts[number])
        repeats, rest = divmod(count, len(own))
        extra = np.sort(np.random.default_rng([seed, number]).permutation(len(own))[:rest])
        rows += [np.tile(own, repeats), own[extra]]
        places.append((np.arange(count) + 0.5) / max(count, 1))
        lines.append(
            f"mix: {count:,} samples an epoch from the {len(own):,} of dataset {number + 1}"
        )
    order = np.argsort(np.concatenate(places), kind="stable")
    return dataset.subset(np.concatenate(rows)[order]), lines


def interleave(dataset: TokenDataset, turns: Turns) -> tuple[TokenDataset, list[str]]:
    """(dataset, lines for the report): the samples of the shards in turns, each shard's in their
    order, and from the beginning again where the strategy repeats them."""
    shards = _rows_of_shards(dataset)
    counts, rows = [0] * len(shards), []
    for number in turns:
        own = shards[number]
        rows.append(own[counts[number] % len(own)])
        counts[number] += 1
        if counts[number] >= len(own):
            turns.exhausted.add(number)
    lines = [
        f"mix: {turns.strategy}: {count:,} samples an epoch from the {len(own):,} of dataset "
        f"{number}"
        for number, (count, own) in enumerate(zip(counts, shards, strict=True), 1)
    ]
    return dataset.subset(rows), lines


def _rows_of_shards(dataset: TokenDataset) -> list[np.ndarray]:
    """The positions in the dataset of each shard's samples."""
    shard_of = np.searchsorted(dataset._starts, dataset.index, side="right") - 1
    rows = [np.flatnonzero(shard_of == number) for number in range(len(dataset.shards))]
    for number, own in enumerate(rows, 1):
        if not len(own):
            reason = f"it leaves no sample of dataset {number} of {len(rows)} to mix"
            refuse("val_size", None, reason, "a lower val_size")
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
    """Turns dataset entries into TokenDatasets with one set of options, and keeps the lines of the
    report."""

    def __init__(self, data_args, stage: str, tokenizer):
        self.args, self.stage, self.tokenizer = data_args, stage, tokenizer
        self.cache_dir = Path(data_args.cache_dir or default_cache_dir()).expanduser()
        self.objective = objective_of(stage)
        self.report: list[str] = []

    def load(self, entries) -> TokenDataset:
        entries = [entries] if isinstance(entries, str) else entries
        specs = resolve(entries, self.args.dataset_dir, self.stage, self.args.sample_by)
        return TokenDataset.concat([self._load_one(spec) for spec in specs])

    def mix(self, dataset: TokenDataset, seed: int) -> TokenDataset:
        """The dataset as mix_strategy and mix_weights have it: they mix what is trained on."""
        strategy, weights = self.args.mix_strategy, self.args.mix_weights
        lines: list[str] = []
        if strategy != "concat":
            turns = Turns(len(dataset.shards), strategy, weights, seed)
            dataset, lines = interleave(dataset, turns)
        elif weights:
            dataset, lines = mix(dataset, weights, seed)
        self.report += lines
        return dataset

    def open_stream(self, entries: list[str], seed: int) -> TokenStream:
        """The entries as a stream: only their first records are read now."""
        args = self.args
        specs = resolve(entries, args.dataset_dir, self.stage, args.sample_by)
        sources = [(self._encoder(spec), self._limit(spec)) for spec in specs]
        for encoder, _ in sources:
            self._describe_stream(encoder)
        return TokenStream(sources, args, data_args_pack(args, self.stage), seed)

    def _limit(self, spec: DatasetSpec) -> int | None:
        limits = [n for n in (self.args.max_samples, spec.num_samples) if n is not None]
        return min(limits, default=None)

    def _encoder(self, spec: DatasetSpec) -> Encoder:
        args = self.args
        return Encoder(
            self.tokenizer,
            spec,
            self.stage,
            cutoff_len=args.cutoff_len,
            joins=self.objective.joins_documents and data_args_join(args),
            train_on_prompt=args.train_on_prompt,
            mask_history=args.mask_history,
            default_system=args.default_system,
            enable_thinking=args.enable_thinking,
            on_bad_record=args.on_bad_record,
        )

    def _load_one(self, spec: DatasetSpec) -> TokenDataset:
        args = self.args
        shard = load_shard(
            self._encoder(spec),
            self._limit(spec),
            args.preprocessing_num_workers,
            self.cache_dir,
            args.overwrite_cache,
        )
        dataset = TokenDataset([shard])
        self._describe(spec, shard, dataset)
        if not len(dataset):
            raise ValueError(
                "\n".join(
                    [f"{spec.name}: no {self.objective.unit} is left to train on", *self.report]
                )
            )
        return dataset

    def _describe(self, spec: DatasetSpec, shard: Shard, dataset: TokenDataset) -> None:
        meta, trained, tokens = shard.meta, dataset.num_trained_tokens, dataset.num_tokens
        # The cache knows a file by its content: it may have had another name when it was written.
        names = dict(zip(meta["sources"], spec.files, strict=True))
        for source, file in names.items():
            form = meta["formats"].get(source, "not read")
            if self.objective.has_pairs and source in meta["formats"]:
                form += "-chosen-rejected"
            self.report.append(f"{file}: {form} records")
        line = (
            f"{spec.name}: {meta['records']:,} records -> {len(dataset):,} {self.objective.unit}s, "
            f"{tokens:,} tokens"
        )
        if len(dataset):
            share = 100 * trained / max(tokens, 1)
            line += f" ({share:.1f} % trained), longest {dataset.lengths.max():,}"
        self.report.append(line)
        self.report += [f"  note: {note}" for note in spec.notes + meta["notes"]]
        for what, (count, first) in meta["tallies"].items():
            file, _, number = first.rpartition(":")
            place = f"{names.get(file, file)}:{number}"
            self.report.append(f"  warning: {count:,} {what}, the first at {place}")
        self._describe_bad(meta["bad"], names)
        if len(dataset):
            parts = SIDES if self.objective.has_pairs else ("sample",)
            for part, shown in zip(parts, dataset[0], strict=True):
                text = show_document(shown, self.tokenizer)
                self.report.append(f"  first {part}, trained tokens in «»: {text}")

    def _describe_stream(self, encoder: Encoder) -> None:
        spec = encoder.spec
        form, first = look_at(encoder)
        size = sum(Path(file).stat().st_size for file in spec.files) / 2**30
        self.report.append(f"{spec.files[0]}: {form} records")
        line = f"{spec.name}: files of {size:,.2f} GiB, tokenised as they are read"
        self.report += [line, *(f"  note: {note}" for note in spec.notes + encoder.notes)]
        whole = [f for f in spec.files if kind_of(f).removesuffix(".gz") in (".json", ".csv")]
        if whole:
            note = f"{whole[0]} is read into memory as a whole: of .jsonl only lines are"
            self.report.append(f"  note: {note}")
        if first is not None:
            text = show_document(first, self.tokenizer)
            self.report.append(f"  first sample, trained tokens in «»: {text}")

    def _describe_bad(self, bad: dict, names: dict[str, str]) -> None:
        if not bad["count"]:
            return
        self.report.append(f"  warning: {bad['count']:,} records cannot be used and were left out")
        self.report += [f"    {count:,}: {reason}" for reason, count in bad["reasons"].items()]
        self.report.append("  the first of them:")
        for line in bad["first"]:
            file = next((file for file in names if line.startswith(f"{file}:")), "")
            self.report.append(f"    {names.get(file, file)}{line.removeprefix(file)}")


def data_args_join(data_args) -> bool:
    """Whether texts are joined and cut into full rows, in which they see each other."""
    return data_args.packing is not False and not data_args.neat_packing


def data_args_pack(data_args, stage: str) -> bool:
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


def show_document(document: dict, tokenizer, max_chars: int = 600) -> str:
    """The document decoded, with «» round what carries loss; long ones are cut in the middle."""
    text = ""
    for piece, is_trained in marked_runs(*tokens_of(document), tokenizer):
        text += f"«{piece}»" if is_trained else piece
    half = max_chars // 2
    return repr(text if len(text) <= max_chars else f"{text[:half]} ... {text[-half:]}")


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
    loader = _Loader(data_args, stage, tokenizer)
    if not loader.objective.joins_documents:
        names = data_args.chat_template, data_args.template
        loader.report += set_chat_template(tokenizer, *names)
    found: dict[str, TokenDataset | Packs] = {}
    stream, held_out = None, None
    if data_args.dataset and data_args.streaming:
        stream = loader.open_stream(data_args.dataset, seed)
        if data_args.val_size:
            held_out = stream.hold_out(data_args.val_size)
            loader.report.append(
                f"eval: {len(held_out):,} rows of the first {data_args.val_size:,} records"
            )
    elif data_args.dataset:
        found["train"] = loader.load(data_args.dataset)
        if data_args.val_size:
            found["train"], found["eval"] = split_off(found["train"], data_args.val_size, seed)
        found["train"] = loader.mix(found["train"], seed)
    each = {}  # name of an evaluation set -> its key in `found`
    if data_args.eval_dataset and data_args.eval_on_each_dataset:
        each = {Path(name).stem: f"eval {name}" for name in data_args.eval_dataset}
        found |= {f"eval {name}": loader.load([name]) for name in data_args.eval_dataset}
    elif data_args.eval_dataset:
        found["eval"] = loader.load(data_args.eval_dataset)
    for name, dataset in found.items():
        loader.report.append(
            f"{name}: {len(dataset):,} {loader.objective.unit}s, {dataset.num_tokens:,} tokens an "
            "epoch"
        )
    if data_args_pack(data_args, stage):
        for name, dataset in found.items():
            # each document may have cutoff_len tokens, and those of a sample go into one row
            capacity = data_args.cutoff_len * dataset.documents_per_sample
            packed = found[name] = Packs(dataset, capacity)
            loader.report.append(
                f"{name}: packed into {len(packed):,} rows of at most {capacity:,} tokens, "
                f"{100 * packed.padding_fraction:.2f} % padding"
            )
    evaluated = {name: found[key] for name, key in each.items()} or found.get("eval", held_out)
    return DatasetBundle(found.get("train", stream), evaluated, loader.report)
