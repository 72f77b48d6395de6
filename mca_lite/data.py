"""The datasets of a run: sources from the token cache, put together, split, mixed and described.

Samples are shifted already: labels[t] is the token that position t has to predict, or IGNORE_INDEX. Nothing here talks
to other ranks: every rank calls the same and gets the same.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from .constants import IGNORE_INDEX
from .data_cache import TokenShard, default_cache_dir, load_shard
from .data_encode import Encoder, PairEncoder
from .data_pairs import PackedPairs
from .data_records import Source, resolve
from .packed_rows import Packs

# --------------------------------------------------------------------------------------------------------- the dataset


class TokenDataset(Dataset):
    """Map-style: `dataset[i]` is {"input_ids": int64 [n], "labels": int64 [n]}, read from memory-mapped files.

    `lengths` holds every n; `num_tokens` and `num_trained_tokens` count inputs, and labels that are not IGNORE_INDEX.
    """

    def __init__(self, shards: list[TokenShard], index: np.ndarray | None = None):
        self.shards = list(shards)
        self._starts = np.cumsum([0, *(len(shard) for shard in self.shards)])
        self.index = (
            np.arange(self._starts[-1]) if index is None else np.asarray(index, dtype=np.int64)
        )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> dict:
        row = self.index[i]
        shard = np.searchsorted(self._starts, row, side="right") - 1
        return self.shards[shard][row - self._starts[shard]]

    def _gather(self, of_shard) -> np.ndarray:
        return np.concatenate([of_shard(shard) for shard in self.shards])[self.index]

    @property
    def lengths(self) -> np.ndarray:
        return self._gather(lambda shard: shard.lengths)

    @property
    def fingerprint(self) -> str:
        """Names the samples and their order: a run that goes on must have the same."""
        digest = hashlib.sha256("\n".join(shard.folder.name for shard in self.shards).encode())
        digest.update(self.index.tobytes())
        return digest.hexdigest()[:16]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_trained_tokens(self) -> int:
        return int(self._gather(lambda shard: shard.learned).sum())

    def subset(self, index) -> "TokenDataset":
        """The samples at these positions, in this order; positions may repeat."""
        return type(self)(self.shards, self.index[np.asarray(index, dtype=np.int64)])

    @classmethod
    def concat(cls, datasets: list["TokenDataset"]) -> "TokenDataset":
        """The datasets one after another."""
        shards = [shard for dataset in datasets for shard in dataset.shards]
        starts = np.cumsum([0, *(dataset._starts[-1] for dataset in datasets)])
        return cls(
            shards,
            np.concatenate([d.index + start for d, start in zip(datasets, starts, strict=False)]),
        )


class PairDataset(TokenDataset):
    """Map-style: `dataset[i]` is {"chosen": sample, "rejected": sample}, each as TokenDataset's: shifted, labels on the
    answer alone, the same prompt before both. `lengths` and the counts of tokens are sums over both sides.
    """

    @property
    def pair_lengths(self) -> np.ndarray:
        """int64 [n, 2]: inputs of the chosen and of the rejected side, without reading a sample."""
        return self._gather(lambda shard: shard.pair_lengths)

    @property
    def costs(self) -> np.ndarray:
        """Tokens of both sides, by which BatchPlan deals the pairs of a step to the ranks."""
        return self.lengths.astype(np.float64)


def split_off(
    dataset: TokenDataset, val_size: float, seed: int
) -> tuple[TokenDataset, TokenDataset]:
    """(train, eval): val_size samples (a fraction below 1, else a count), a seeded choice; both keep their order."""
    count = round(len(dataset) * val_size) if val_size < 1 else int(val_size)
    count = max(count, 1)
    if count >= len(dataset):
        raise ValueError(
            f"val_size {val_size} takes {count} of {len(dataset)} samples and leaves none to train on: set it lower"
        )
    order = np.random.default_rng([seed, len(dataset)]).permutation(len(dataset))
    return dataset.subset(np.sort(order[count:])), dataset.subset(np.sort(order[:count]))


def mix(dataset: TokenDataset, weights: list[float], seed: int) -> tuple[TokenDataset, list[str]]:
    """(dataset, lines for the report): as many samples as before, the shards in the proportions of the weights.

    A shard that is too small repeats, one that is too large is subsampled (the same choice in every epoch). The shards
    are spread evenly over the result, so that the proportions hold without shuffling too.
    Raises: ValueError for weights that are not one positive number a shard.
    """
    if len(weights) != len(dataset.shards) or min(weights) <= 0:
        raise ValueError(
            f"mix_weights {weights}: expected one number above 0 for each of the {len(dataset.shards)} datasets"
        )
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * len(dataset)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: len(dataset) - counts.sum()]] += (
        1  # largest remainders
    )
    rows, places, lines = [], [], []
    shard_of = np.searchsorted(dataset._starts, dataset.index, side="right") - 1
    for number, count in enumerate(counts.tolist()):
        own = np.flatnonzero(shard_of == number)
        if not len(own):
            raise ValueError(
                f"dataset {number + 1} of {len(weights)} has no sample left to mix: lower val_size"
            )
        repeats, rest = divmod(count, len(own))
        extra = np.sort(np.random.default_rng([seed, number]).permutation(len(own))[:rest])
        rows += [np.tile(own, repeats), own[extra]]
        places.append((np.arange(count) + 0.5) / max(count, 1))
        lines.append(
            f"mix: {count:,} samples an epoch from the {len(own):,} of dataset {number + 1}"
        )
    order = np.argsort(np.concatenate(places), kind="stable")
    return dataset.subset(np.concatenate(rows)[order]), lines


class PackedDataset(Packs):
    """Packs of a TokenDataset: `packed[i]` has the samples of pack i one after another, and in "attention_mask" the number
    of each token's document, from 1. `costs` is what attention costs in each pack: the sum of squared lengths.
    """

    def __init__(self, dataset: TokenDataset, capacity: int):
        super().__init__(
            dataset, dataset.lengths, dataset.lengths.astype(np.float64) ** 2, capacity
        )

    def __getitem__(self, i: int) -> dict:
        samples = [self.dataset[int(j)] for j in self.packs[i]]
        numbers = [np.full(len(sample["input_ids"]), n + 1) for n, sample in enumerate(samples)]
        return {
            "input_ids": np.concatenate([sample["input_ids"] for sample in samples]),
            "labels": np.concatenate([sample["labels"] for sample in samples]),
            "attention_mask": np.concatenate(numbers),
        }


# ------------------------------------------------------------------------------------------------------ the front door


@dataclass
class DatasetBundle:
    """What load_datasets returns. report: lines to print on one rank."""

    train: TokenDataset | PackedDataset | PackedPairs | None
    eval: TokenDataset | PackedDataset | PackedPairs | None
    report: list[str] = field(default_factory=list)


class _Loader:
    """Turns dataset entries into TokenDatasets with one set of options, and keeps the lines of the report."""

    def __init__(self, data_args, stage: str, tokenizer):
        self.args, self.stage, self.tokenizer = data_args, stage, tokenizer
        self.cache_dir = Path(data_args.cache_dir or default_cache_dir()).expanduser()
        self.dataset_type, self.unit = (
            (PairDataset, "pair") if stage == "dpo" else (TokenDataset, "sample")
        )
        self.report: list[str] = []

    def load(self, entries) -> list[TokenDataset]:
        entries = [entries] if isinstance(entries, str) else entries
        sources = resolve(entries, self.args.dataset_dir, self.stage)
        return [self._load_source(source) for source in sources]

    def _load_source(self, source: Source) -> TokenDataset:
        args = self.args
        limit = min(
            (n for n in (args.max_samples, source.num_samples) if n is not None), default=None
        )
        shard = load_shard(
            self._encoder(source),
            limit,
            args.preprocessing_num_workers,
            self.cache_dir,
            args.overwrite_cache,
        )
        dataset = self.dataset_type([shard])
        self._describe(source, shard, dataset)
        if not len(dataset):
            raise ValueError(
                "\n".join([f"{source.name}: no {self.unit} is left to train on", *self.report])
            )
        return dataset

    def _encoder(self, source: Source) -> Encoder:
        args = self.args
        if self.stage == "dpo":
            return PairEncoder(self.tokenizer, source, args.cutoff_len, args.default_system)
        return Encoder(
            self.tokenizer,
            source,
            self.stage,
            cutoff_len=args.cutoff_len,
            joins=self.stage == "pt" and data_args_join(args),
            train_on_prompt=args.train_on_prompt,
            mask_history=args.mask_history,
            default_system=args.default_system,
        )

    def _describe(self, source: Source, shard: TokenShard, dataset: TokenDataset) -> None:
        meta, trained, tokens = shard.meta, dataset.num_trained_tokens, dataset.num_tokens
        # The cache knows a file by its content: it may have had another name when it was written.
        names = dict(zip(meta["files"], source.files, strict=True))
        for file, form in zip(source.files, meta["formats"], strict=True):
            self.report.append(f"{file}: {form} records")
        line = f"{source.name}: {meta['records']:,} records -> {len(dataset):,} {self.unit}s, {tokens:,} tokens"
        if len(dataset):
            line += f" ({100 * trained / max(tokens, 1):.1f} % trained), longest {dataset.lengths.max():,}"
        self.report.append(line)
        self.report += [f"  note: {note}" for note in source.notes + meta["notes"]]
        for what, (count, first) in meta["tallies"].items():
            file, _, number = first.rpartition(":")
            self.report.append(
                f"  warning: {count:,} {what}, the first at {names.get(file, file)}:{number}"
            )
        if len(dataset):
            first = dataset[0]
            parts = first.items() if self.stage == "dpo" else [("sample", first)]
            for part, sample in parts:
                self.report.append(
                    f"  first {part}, trained tokens in «»: {show_sample(sample, self.tokenizer)}"
                )


def data_args_join(data_args) -> bool:
    """Whether documents of stage pt are joined and cut into full rows, in which they see each other."""
    return data_args.packing is not False and not data_args.neat_packing


def data_args_pack(data_args, stage: str) -> bool:
    """Whether samples are packed into rows in which they do not see each other."""
    return data_args.neat_packing or (stage != "pt" and bool(data_args.packing))


def show_sample(sample: dict, tokenizer, max_chars: int = 600) -> str:
    """The sample decoded, with «» round what carries loss; long ones are cut in the middle."""
    tokens = np.append(sample["input_ids"], sample["labels"][-1])
    trained = np.append(False, sample["labels"] != IGNORE_INDEX)
    if not trained[-1]:
        tokens, trained = (
            tokens[:-1],
            trained[:-1],
        )  # nothing predicts the last token: the sample does not hold it
    borders = np.flatnonzero(np.diff(trained)) + 1
    runs = np.split(np.arange(len(tokens)), borders)
    texts = [(tokenizer.decode(tokens[run].tolist()), trained[run[0]]) for run in runs]
    text = "".join(f"«{piece}»" if is_trained else piece for piece, is_trained in texts)
    half = max_chars // 2
    return repr(text if len(text) <= max_chars else f"{text[:half]} ... {text[-half:]}")


def load_datasets(data_args, stage: str, tokenizer, seed: int = 42) -> DatasetBundle:
    """Returns the datasets of a run, tokenised or from the cache, with the lines that describe them.

    data_args: arguments.DataArguments; stage: "pt", "sft" or "dpo" (PairDatasets). Every rank may call it: one process of
    those that share cache_dir writes, the others poll; nothing collective happens. The split of val_size and the mixing
    depend on the seed and the files alone.
    Raises: ValueError with file and line for input that cannot be used.
    """
    if stage not in ("pt", "sft", "dpo"):
        raise ValueError(f"stage {stage!r}: expected pt, sft or dpo")
    if stage == "dpo" and data_args.train_on_prompt:
        raise ValueError(
            "train_on_prompt: true trains on prompts, which stage: dpo compares answers to: leave it out"
        )
    if not data_args.dataset and not data_args.eval_dataset:
        raise ValueError(
            "no data: set dataset to a file, several files, or names in dataset_dir/dataset_info.json"
        )
    loader = _Loader(data_args, stage, tokenizer)
    train = evaluation = None
    if data_args.dataset:
        train = loader.dataset_type.concat(loader.load(data_args.dataset))
        if data_args.val_size:
            train, evaluation = split_off(train, data_args.val_size, seed)
        if data_args.mix_weights:
            train, lines = mix(train, data_args.mix_weights, seed)
            loader.report += lines
    if data_args.eval_dataset:
        evaluation = loader.dataset_type.concat(loader.load(data_args.eval_dataset))
    for name, dataset in (("train", train), ("eval", evaluation)):
        if dataset is not None:
            loader.report.append(
                f"{name}: {len(dataset):,} {loader.unit}s, {dataset.num_tokens:,} tokens an epoch"
            )
    if data_args_pack(data_args, stage):
        # each side of a pair may have cutoff_len tokens, and both go into one row
        packer, capacity = (
            (PackedPairs, 2 * data_args.cutoff_len)
            if stage == "dpo"
            else (PackedDataset, data_args.cutoff_len)
        )
        train, evaluation = (d and packer(d, capacity) for d in (train, evaluation))
        for name, dataset in (("train", train), ("eval", evaluation)):
            if dataset is not None:
                loader.report.append(
                    f"{name}: packed into {len(dataset):,} rows of at most {capacity:,} tokens, "
                    f"{100 * dataset.padding_fraction:.2f} % padding"
                )
    return DatasetBundle(train, evaluation, loader.report)
