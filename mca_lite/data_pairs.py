"""Preference pairs on their way to the model: rows of documents, packs of pairs, micro-batches.

A pair is {"chosen": {"input_ids", "labels"}, "rejected": {...}}, each shifted as all samples are, the prompt in both and
without labels. On the way it is a row of two documents, chosen before rejected; a pack of p pairs is a row of 2p. Letters:
b rows of a batch, P pairs of a micro-batch.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from .constants import IGNORE_INDEX
from .data_batches import Collator
from .packed_rows import Packs, pack_batch

SIDES = ("chosen", "rejected")
PAIR_KEYS = ("real", "reference")  # what a micro-batch says of its pairs


def pairs_of(sample) -> list[Mapping]:
    """The pairs of a sample: itself, or those of a pack. ValueError for what is neither."""
    pairs = list(sample) if isinstance(sample, (list, tuple)) else [sample]
    for pair in pairs:
        if not isinstance(pair, Mapping) or not set(SIDES) <= set(pair):
            got = sorted(pair) if isinstance(pair, Mapping) else type(pair).__name__
            raise ValueError(
                f'preference training takes samples {{"chosen": ..., "rejected": ...}}, and this one has {got}: use a data '
                "set of pairs, or stage: sft"
            )
    return pairs


def pair_row(pairs: list[Mapping]) -> dict[str, torch.Tensor]:
    """Pairs as one row of documents: input_ids, labels, and attention_mask with each token's document, from 1."""
    documents = [pair[side] for pair in pairs for side in SIDES]
    row = {
        key: [torch.as_tensor(d[key], dtype=torch.int64) for d in documents]
        for key in ("input_ids", "labels")
    }
    lengths = [len(ids) for ids in row["input_ids"]]
    if min(lengths) == 0 or lengths != [len(labels) for labels in row["labels"]]:
        raise ValueError(
            f"a pair has {lengths} input_ids and {[len(x) for x in row['labels']]} labels: expected as many, at least one"
        )
    numbers = torch.arange(1, len(documents) + 1).repeat_interleave(torch.tensor(lengths))
    return {**{key: torch.cat(parts) for key, parts in row.items()}, "attention_mask": numbers}


class PairCollator:
    """Pairs, or packs of pairs -> what Collator gives of their rows; and "reference", float32 [b, most pairs of a row, 2],
    where the pairs have the log-probabilities of a reference."""

    def __init__(self, pad_token_id: int):
        self.collate = Collator(pad_token_id)

    def __call__(self, samples: list) -> dict[str, torch.Tensor]:
        rows = [pairs_of(sample) for sample in samples]
        batch = self.collate([pair_row(pairs) for pairs in rows])
        if "reference" in rows[0][0]:
            known = [
                torch.tensor(np.array([pair["reference"] for pair in pairs]), dtype=torch.float32)
                for pairs in rows
            ]
            batch["reference"] = pad_sequence(known, batch_first=True)
        return batch


def arrange_pairs(batch: dict, packs: bool, document_multiple: int, pad_token_id: int) -> dict:
    """A collated batch as the model takes it: a packed row [1, t] of 2 P documents, or 2 P padded rows, chosen and rejected
    in turn; with real, float32 [P], and reference, float32 [P, 2], where it is known.

    real is 0 for a pair that only fills the batch: rows keep it, since all micro-batches of a pipeline have one shape; a
    packed row drops it.
    """
    mask = batch["attention_mask"]
    numbers = [int(row.max()) for row in mask]
    if odd := [n for n in numbers if n % 2]:
        raise ValueError(
            f"the data collator gave a row of {odd[0]} documents: expected chosen and rejected in turn, numbered from 1 by "
            "attention_mask"
        )
    counts = [n // 2 for n in numbers]
    known = (
        [batch["reference"][i, :n] for i, n in enumerate(counts)] if "reference" in batch else []
    )
    if packs:
        arranged = pack_batch(batch, document_multiple, pad_token_id)
        arranged["real"] = torch.ones(sum(counts))
    else:
        ids, labels = [], []
        for row, row_labels, row_mask in zip(
            batch["input_ids"], batch["labels"], mask, strict=True
        ):
            lengths = torch.bincount(row_mask)[1:].tolist() or [1, 1]
            ids += row[: sum(lengths)].split(lengths)
            labels += row_labels[: sum(lengths)].split(lengths)
        filled = [
            n for n in counts for _ in range(2 * max(n, 1))
        ]  # pairs of the batch's row that a row comes from
        arranged = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_token_id),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
            # a pair that only fills the batch is padding
            "attention_mask": pad_sequence(
                [torch.full_like(row, n > 0) for row, n in zip(ids, filled, strict=True)],
                batch_first=True,
            ),
            "real": torch.cat([torch.ones(n) if n else torch.zeros(1) for n in counts]),
        }
        known = [part if len(part) else torch.zeros(1, 2) for part in known]
    return {**arranged, "reference": torch.cat(known)} if known else arranged


# -- datasets -----------------------------------------------------------------------------------------------------------


class _OverPairs(Dataset):
    """A view of a dataset of pairs, with its numbers."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getattr__(self, name: str):
        if name in (
            "fingerprint",
            "lengths",
            "pair_lengths",
            "costs",
            "num_tokens",
            "num_trained_tokens",
        ):
            return getattr(self.dataset, name)
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self.dataset)


class ReferencedPairs(_OverPairs):
    """Pairs with the log-probabilities that a reference gives to (chosen, rejected): logps float32 [pairs, 2]."""

    def __init__(self, dataset, logps: np.ndarray):
        super().__init__(dataset)
        self.logps = logps

    def __getitem__(self, i: int) -> dict:
        return {**self.dataset[i], "reference": self.logps[i]}


class PairSlice(_OverPairs):
    """The pairs from start to stop."""

    def __init__(self, dataset, start: int, stop: int):
        super().__init__(dataset)
        self.start, self.stop = start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, i: int) -> dict:
        return self.dataset[self.start + i]


class PackedPairs(Packs):
    """Packs of a dataset of pairs: `packed[i]` is a list of them, whose tokens, of both sides, are at most `capacity`.

    dataset.pair_lengths has the tokens of each side, [pairs, 2]. `costs` is what attention costs in each pack: the sum of
    the squared lengths of its documents.
    """

    def __init__(self, dataset, capacity: int):
        lengths = dataset.pair_lengths
        super().__init__(
            dataset, lengths.sum(1), (lengths.astype(np.float64) ** 2).sum(1), capacity
        )

    def __getitem__(self, i: int) -> list[dict]:
        return [self.dataset[int(j)] for j in self.packs[i]]

    def over(self, dataset) -> "PackedPairs":
        """The same packs of another view of the pairs."""
        return PackedPairs(dataset, self.capacity)
