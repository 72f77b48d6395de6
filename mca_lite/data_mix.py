"""Whose turn it is when samples are taken from several datasets: the key mix_strategy."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

_DRAWS = 1000  # at once, as Hugging Face's datasets does: another number is another order


class Turns:
    """Yields the number of the dataset that the next sample is taken from, until the epoch is over.

    As LLaMA-Factory's strategies are: concat takes one dataset after another; interleave_under,
    _over and _once are Hugging Face's interleave_datasets with first_exhausted, all_exhausted and
    all_exhausted_without_replacement. Without weights datasets take turns, and a round is finished;
    with them each turn is drawn, the same for a seed. Whoever takes the samples adds a dataset to
    `exhausted` with its last one, and then begins it again. taken: turns that are behind.
    """

    def __init__(
        self,
        num_datasets: int,
        strategy: str,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        taken: int = 0,
        exhausted: Sequence[int] = (),
    ):
        self.num_datasets, self.strategy = num_datasets, strategy
        self.taken, self.exhausted = taken, set(exhausted)
        self._draws: Iterator[int] | None = None
        if weights is not None:
            self._draws = itertools.islice(_drawn(weights, seed), taken, None)

    def __iter__(self) -> Iterator[int]:
        repeats = self.strategy in ("interleave_under", "interleave_over")
        while not self._is_over(finishes_rounds=repeats and self._draws is None):
            if self.strategy == "concat":
                number = min(set(range(self.num_datasets)) - self.exhausted)
            elif self._draws is None:
                number = self.taken % self.num_datasets
            else:
                number = next(self._draws)
            self.taken += 1
            if repeats or number not in self.exhausted:
                yield number

    def _is_over(self, finishes_rounds: bool) -> bool:
        if finishes_rounds and self.taken % self.num_datasets:
            return False
        if self.strategy == "interleave_under":
            return bool(self.exhausted)
        return len(self.exhausted) == self.num_datasets


def _drawn(weights: Sequence[float], seed: int) -> Iterator[int]:
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.choice(len(shares), size=_DRAWS, p=shares).tolist()
