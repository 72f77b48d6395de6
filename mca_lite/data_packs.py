"""Packs: samples put together into rows of at most so many tokens, in which documents do not see
each other."""

import copy

import numpy as np
from torch.utils.data import Dataset

from .data_batches import documents_of


class Packs(Dataset):
    """The samples of a dataset in rows of at most `capacity` tokens: `packed[i]` is a list of
    documents, those of the samples of row i one after another.

    dataset: map-style, with document_lengths (int64 [samples, documents of a sample]), num_tokens,
    num_trained_tokens and fingerprint, as TokenDataset has them. packs: the numbers of
    the samples of each row. costs: what attention costs in each row, the sum of the squared lengths
    of its documents. padding_fraction: of all positions of full rows.
    """

    unit = "packs"  # what a row is, in reports

    def __init__(self, dataset, capacity: int):
        lengths = dataset.document_lengths
        squares = (lengths.astype(np.float64) ** 2).sum(axis=1)
        self.dataset, self.packs = dataset, best_fit(lengths.sum(axis=1), capacity)
        self.documents_per_sample = lengths.shape[1]
        self.costs = np.array([squares[pack].sum() for pack in self.packs])
        self.num_tokens, self.num_trained_tokens = dataset.num_tokens, dataset.num_trained_tokens
        self.fingerprint = f"{dataset.fingerprint} packed into {capacity}"
        name = getattr(dataset, "identity", dataset.fingerprint)  # a user's own dataset may lack it
        self.identity = f"{name} packed into {capacity}"
        self.padding_fraction = 1.0 - dataset.num_tokens / (len(self.packs) * capacity)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, i: int) -> list[dict]:
        return [document for j in self.packs[i] for document in documents_of(self.dataset[int(j)])]

    def over(self, dataset) -> "Packs":
        """The rows of another view of the samples: the same numbers, other content."""
        packs = copy.copy(self)
        packs.dataset = dataset
        return packs


def samples_of(dataset):
    """The data set with a sample in each place, where it is one of packs."""
    return dataset.dataset if isinstance(dataset, Packs) else dataset


class WithReference(Dataset):
    """A view of a dataset in which each document has "reference", the log-probability that a
    reference model gives to it.

    logps: float32 [samples, documents of a sample].
    """

    def __init__(self, dataset, logps: np.ndarray):
        self.dataset, self.logps = dataset, logps
        self.costs = getattr(dataset, "costs", None)
        self.identity = getattr(dataset, "identity", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> list[dict]:
        documents = documents_of(self.dataset[i])
        return [
            {**document, "reference": logp}
            for document, logp in zip(documents, self.logps[i], strict=True)
        ]


def best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Sample numbers of each pack, in which the lengths sum to at most `capacity`; deterministic.

    Best fit, longest first: a sample goes to the fullest pack that still has room for it, or opens
    a new one. Open packs are kept by their free space, so each sample costs a look at the next free
    space that suffices.
    Raises: ValueError for a sample that is longer than capacity.
    """
    if len(lengths) and lengths.max() > capacity:
        worst = int(lengths.argmax())
        raise ValueError(
            f"sample {worst} of {lengths[worst]} tokens does not fit into a pack of {capacity}: "
            "raise cutoff_len"
        )
    # free space -> packs that have it, the newest last
    by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    occupied = np.zeros(capacity + 1, dtype=bool)
    packs: list[list[int]] = []
    for i in np.argsort(-lengths, kind="stable"):
        length = int(lengths[i])
        # the tightest space that suffices, if there is any
        space = length + int(occupied[length:].argmax())
        if occupied[space]:
            pack = by_space[space].pop()
            occupied[space] = bool(by_space[space])
        else:
            space, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(int(i))
        by_space[space - length].append(pack)
        occupied[space - length] = True
    return [np.array(sorted(pack)) for pack in packs]
