"""Log the training loss of each dataset beside the loss over all: the key `log_each_dataset`.

Each training sample carries the index of its dataset. Token losses, or in stages with one loss per
sample these, are summed by this index into (sum, count) pairs, as other metrics are."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .args_rules import name_of_set
from .batch import Batch, in_documents, real_documents
from .callbacks import TrainerCallback
from .data_batches import Documents, Stream, View, documents_of, with_samples
from .errors import expect
from .files import IGNORE_INDEX
from .parallel import to_device
from .tables import COLUMNS, Column

COLUMN = "dataset_index"


class Numbered(View):
    """A view of a TokenDataset that adds to each document the column "dataset_index": the index of
    the dataset that it comes from (of its Shard). Other attributes are the TokenDataset's."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.numbers = np.searchsorted(dataset.ends, dataset.indices, side="right")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["dataset"], name)

    def __getitem__(self, i: int) -> Documents:
        of_set = {COLUMN: int(self.numbers[i])}
        return [{**document, **of_set} for document in documents_of(self.dataset[i])]


class EachDataset(TrainerCallback):
    """Callback that logs the training loss of each dataset, as metric loss/<name>.

    data: the run's DatasetBundle, changed in place: training samples get the column
    "dataset_index". names: the datasets. They are shown without folder and suffix, or all as given
    if two different ones would then look the same; equal names are counted as one."""

    def __init__(self, data: Any, names: list[str]) -> None:
        stems = [name_of_set(name) for name in names]
        names = stems if len({*stems}) == len({*names}) else names
        self.keys = [f"loss/{name}" for name in names]
        COLUMNS[COLUMN] = Column("sample", "int64", given_by=("sample", "collator"))
        if isinstance(data.train, Stream):
            stream: Any = data.train
            _ = stream.identity  # cached now, because the column must not change it
            for number, reader in enumerate(stream.readers):
                reader.columns[COLUMN] = number
        elif data.train is not None:
            data.train = with_samples(data.train, Numbered)

    def on_init_end(  # type: ignore[override]
        self, args: Any, state: Any, control: Any, trainer: Any, **kwargs: Any
    ) -> None:
        trainer.metrics_keys = list(dict.fromkeys([*trainer.metrics_keys, *self.keys]))
        trainer.around_loss = functools.partial(self._measured, trainer)

    def _measured(
        self, trainer: Any, batch: Batch, loss_func: Callable[..., Any], output: Any
    ) -> tuple[Any, ...]:
        """Compute the loss of a micro-batch by loss_func(output) -> its (total, count, metrics).
        metrics gets "loss/<name>" for each dataset: float32 [2], (sum, count) of the losses of this
        dataset's tokens or samples on this rank. ValueError if the trainer's loss does not set
        `trainer.terms`, from which they are summed."""
        trainer.terms = None
        total, count, metrics = loss_func(output)
        expect(
            trainer.terms is not None,
            "log_each_dataset needs the terms of the loss, and _post_compute_loss of "
            f"{type(trainer).__name__} does not call that of its base: set log_each_dataset: false",
        )
        sums = self._sums(trainer.backend, batch, *trainer.terms)
        for key in self.keys:
            of_sets = [sums[i] for i, name in enumerate(self.keys) if name == key]
            metrics[key] = torch.stack(of_sets).sum(0).float()
        return total, count, metrics

    def _sums(self, backend: Any, batch: Batch, labels: Any, losses: torch.Tensor) -> torch.Tensor:
        """Sum the losses in this rank's share of a micro-batch by dataset -> float64 [datasets, 2],
        (sum, count). Zeros if the batch lacks the dataset index, as in an evaluation.

        labels, losses: as in trainer.terms, [b, s] for tokens or [n] for n samples. labels: int64
        with IGNORE_INDEX for a loss that does not count, or a mask of what counts, and then all of
        `losses` is summed. For multi-token prediction, labels are part_mtp.Targets, and losses are
        [b, s, 1 + layers].
        """
        if not isinstance(labels, torch.Tensor):  # part_mtp.Targets
            labels = labels.labels
            losses = losses[..., 0]
        if labels.dtype == torch.int64:
            labels = labels != IGNORE_INDEX
            losses = losses * labels
        pairs = torch.stack([losses, labels]).double()
        if COLUMN not in batch:
            return pairs.new_zeros(len(self.keys), 2)
        ranks, rank, *_ = backend.context_parallel
        if losses.dim() > 1:  # one loss per token
            real = to_device(real_documents(batch).nonzero()[:, 0], pairs.device)
            pairs = in_documents(batch, pairs, ranks).index_select(1, real)
        else:  # one loss per sample, equal on all context-parallel ranks: the first counts it
            pairs = pairs * (rank == 0)
        places = torch.arange(len(self.keys), device=pairs.device)
        is_of = batch[COLUMN] == places[:, None]  # [datasets, samples]
        return is_of.double() @ pairs.t()
