"""From samples to micro-batches: the collator and its checks, mixing, the plan of batches per rank,
and packs.

A sample is a list of documents {"input_ids", "labels"}, in which labels[t] is the target of
position t, or IGNORE_INDEX: one document for a text or a conversation, chosen and rejected for a
pair, those of several samples for a pack. Letters: b samples of a micro-batch, s positions. Nothing
here is collective: the plan of each rank is arithmetic.
"""

import copy
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from .batch import document_lengths, padding_of
from .data_files import SIDES
from .files import IGNORE_INDEX
from .tables import COLUMNS, Column, registered_columns
from .watchdog import end_with_rank

# columns of tokenizers and data sets, and of a stream, without a meaning for the model
_HARMLESS = frozenset(
    "token_type_ids special_tokens_mask length text prompt id idx index data_position".split()
)
FILLER = -1  # stands for "no sample left": collated like sample 0, without labels
_DRAWS = 1000  # at once, as Hugging Face's datasets does

# -- samples to a padded batch


def documents_of(sample) -> list[Mapping]:
    """The documents of a sample. A lone document {"input_ids", "labels"}, a pair {"chosen",
    "rejected"} and a list of pairs are samples too; registered columns of a pair are those of its
    documents. ValueError for anything else."""
    if isinstance(sample, (list, tuple)):
        return [document for part in sample for document in documents_of(part)]
    if isinstance(sample, Mapping) and "input_ids" in sample and "labels" in sample:
        return [sample]
    if isinstance(sample, Mapping) and all(side in sample for side in SIDES):
        columns = registered_columns()
        refuse_columns("a sample", sample, [*SIDES, *columns])
        shared = {name: sample[name] for name in columns if name in sample}
        documents = [document for side in SIDES for document in documents_of(sample[side])]
        return [{**shared, **document} for document in documents] if shared else documents
    got = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
    raise ValueError(
        'a sample is a list of documents {"input_ids", "labels"}, or one document, or a pair '
        f'{{"chosen", "rejected"}} of them, and this one has {got}'
    )


def _known(giver: str) -> list[str]:
    """The columns that a sample or a collator may give."""
    return [name for name, column in COLUMNS.items() if giver in column.given_by]


def refuse_columns(whose: str, columns: Mapping, known: Sequence[str]) -> None:
    """ValueError for columns with values that are not in tables.COLUMNS."""
    more = [name for name in columns if name not in known and name not in _HARMLESS]
    more = [name for name in more if not _is_empty(columns[name])]
    if more:
        raise ValueError(
            f"{whose} has {', '.join(map(repr, more))}, which the model would not be given: "
            f"expected {', '.join(known)}; images and audio are not trained: remove the columns "
            "(dataset.remove_columns), or register_column one that a loss reads"
        )


def _is_empty(column) -> bool:
    return column is None or (isinstance(column, (list, tuple, str)) and not column)


def _tokens(document: Mapping, column: str) -> torch.Tensor:
    """A column of a document, int64 [n]. ValueError for anything but a row of whole numbers."""
    try:
        values = torch.as_tensor(document[column])
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{column} of a sample: expected a list of token ids: {error}") from None
    if values.dim() != 1 or (len(values) and values.is_floating_point()):
        got = f"{values.dtype} of shape {tuple(values.shape)}"
        raise ValueError(f"{column} of a sample: expected whole numbers [n], got {got}")
    return values.long()


def _row(sample) -> dict[str, torch.Tensor]:
    """The documents of a sample one after another: columns of tokens [n], with the number of each
    token's document from 1 as attention_mask; other columns [documents]."""
    documents = documents_of(sample)
    for document in documents:
        refuse_columns("a sample", document, _known("sample"))
    ids = [_tokens(document, "input_ids") for document in documents]
    labels = [_tokens(document, "labels") for document in documents]
    lengths = [len(part) for part in ids]
    # an empty document among others would be lost from their numbers
    if lengths != [len(part) for part in labels] or min(lengths, default=0) == 0:
        raise ValueError(
            f"the documents of a sample have {lengths} input_ids and {[len(x) for x in labels]} "
            "labels: expected as many, at least one"
        )
    mask = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))
    if len(documents) == 1 and documents[0].get("attention_mask") is not None:
        mask = torch.as_tensor(documents[0]["attention_mask"]).long()
        if mask.shape != ids[0].shape:
            raise ValueError(
                f"attention_mask of a sample has the shape {tuple(mask.shape)}: expected that of "
                f"its input_ids, {tuple(ids[0].shape)}"
            )
    row = {"input_ids": torch.cat(ids), "labels": torch.cat(labels), "attention_mask": mask}
    if all("reference" in document for document in documents):
        row["reference"] = torch.tensor([float(document["reference"]) for document in documents])
    for name, column in registered_columns().items():
        values = [
            _value(name, column, document.get(name), length)
            for document, length in zip(documents, lengths, strict=True)
        ]
        row[name] = torch.cat(values)
    return row


def _value(name: str, column: Column, value, length: int) -> torch.Tensor:
    """A registered column of a document of `length` tokens: [length], or [1]. ValueError for other
    shapes, and for no value at all."""
    value = column.default if value is None else value
    if value is None:
        raise ValueError(f"a sample has no {name!r}: give one, or register the column's default")
    try:
        values = torch.as_tensor(value, dtype=getattr(torch, column.dtype))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name} of a sample: expected numbers, got {value!r:.60}") from error
    if column.per != "token":
        length = 1
    if values.dim() == 0:
        return values.repeat(length)
    if values.shape != (length,):
        raise ValueError(
            f"{name} of a sample: expected one number or {length}, got shape {tuple(values.shape)}"
        )
    return values


class Collator:
    """Samples -> {"input_ids", "labels", "attention_mask"}, int64 [b, s], a row for each sample,
    padded on the right; registered columns [b, s], or [b, most documents of a row].

    attention_mask numbers the documents of a row from 1 (a lone document may bring its numbers);
    padding has 0, and label IGNORE_INDEX. s is the longest row. With a "reference" in every
    document the batch has it too: float32 [b, most documents of a row].
    Raises: ValueError for anything but samples.
    """

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, samples: list) -> dict[str, torch.Tensor]:
        rows = [_row(sample) for sample in samples]
        batch = {}
        for name in rows[0]:
            if all(name in row for row in rows):
                columns = [row[name] for row in rows]
                value = padding_of(name, self.pad_token_id)
                batch[name] = pad_sequence(columns, batch_first=True, padding_value=value)
        return batch


class Limits(NamedTuple):
    """Limits of a model: ids below vocab_size, and documents of so many positions."""

    vocab_size: float = math.inf
    positions: float = math.inf

    @classmethod
    def of(cls, hf_config: dict) -> "Limits":
        """Limits of a config.json; none for keys that it lacks."""
        text = hf_config.get("text_config") or hf_config
        positions = text.get("max_position_embeddings") or math.inf
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        # max_position_embeddings may be the number before scaling
        before = rope.get("original_max_position_embeddings") or positions
        return cls(
            text.get("vocab_size") or math.inf, max(positions, before * (rope.get("factor") or 1))
        )

    def check_positions(self, longest: int) -> None:
        """ValueError if the longest document has more tokens than the model has positions."""
        if longest > self.positions:
            raise ValueError(
                f"a document of {longest:,} tokens: the model has {self.positions:,} positions "
                "(max_position_embeddings of its config.json): cut the documents (cutoff_len), or "
                "raise it there"
            )


def check_batch(batch: Mapping, packs: bool, limits: Limits) -> dict:
    """The columns of a collated batch as tensors. ValueError for what would silently give wrong
    numbers, or fail in the model.

    packs: rows may hold several documents, numbered by attention_mask.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"the data collator gave {batch!r:.100}: expected a mapping of columns")
    missing = [k for k in ("input_ids", "labels") if batch.get(k) is None]
    if missing:
        raise ValueError(
            f"the data collator gave {sorted(batch)}: expected {missing} too, labels already "
            "shifted"
        )
    known = _known("collator")
    refuse_columns("a batch of the data collator", batch, known)
    batch = {k: torch.as_tensor(batch[k]) for k in known if batch.get(k) is not None}
    ids = batch["input_ids"]
    if batch["labels"].shape != ids.shape:
        shapes = tuple(batch["labels"].shape), tuple(ids.shape)
        raise ValueError(f"labels {shapes[0]} and input_ids {shapes[1]} differ in shape")
    mask = batch.setdefault("attention_mask", torch.ones_like(ids))
    if ids.dim() != 2 or not ids.numel() or mask.shape != ids.shape:
        raise ValueError(
            f"input_ids {tuple(ids.shape)} and attention_mask {tuple(mask.shape)}: expected [rows, "
            "positions] of both: 1 for a token and 0 for padding, or with sequence_packing: true "
            "the number of each token's document in its row, in place of a mask of 4 dimensions"
        )
    if ((mask[:, 1:] != 0) & (mask[:, :-1] == 0)).any():
        raise ValueError(
            "attention_mask has padding on the left: set the tokenizer's padding_side to 'right'"
        )
    if not packs and (mask > 1).any():
        raise ValueError(
            "attention_mask numbers several documents in a row, which would see each other: set "
            "sequence_packing: true"
        )
    _check_limits(batch, limits)
    for name, column in registered_columns().items():
        batch[name] = _checked(name, column, batch)
    positions = batch.pop("position_ids", None)
    if positions is None or packs:
        return batch
    if not (positions == torch.arange(positions.shape[-1])).all():
        raise ValueError(
            "position_ids other than 0, 1, 2, ... belong to packed rows: set sequence_packing: true"
        )
    return batch


def _checked(name: str, column: Column, batch: dict) -> torch.Tensor:
    """A registered column of a batch: [b, s] per token, else [b, most documents of a row]."""
    mask = batch["attention_mask"]
    shape = list(mask.shape)
    if column.per != "token":
        shape[1] = max(map(len, document_lengths(mask)))
    values = batch.get(name, column.default)
    if values is None:
        raise ValueError(f"the data collator gave no {name!r}, a registered column of {shape}")
    values = torch.as_tensor(values, dtype=getattr(torch, column.dtype))
    got = list(values.shape)
    if values.dim() == 1:  # one number a row
        values = values[:, None]
    if values.dim() == 2 and column.per != "token":  # a filler's row may have more documents
        values = values[:, : shape[1]]
    try:
        return values.expand(shape)
    except RuntimeError:
        raise ValueError(f"{name} of a batch: expected {shape}, got {got}") from None


def _check_limits(batch: dict, limits: Limits) -> None:
    """ValueError for ids, labels or documents outside the model's limits."""
    ids = batch["input_ids"]
    labels = batch["labels"]
    for name, used in {"input_ids": ids, "labels": labels[labels != IGNORE_INDEX]}.items():
        if used.is_floating_point():
            raise ValueError(f"{name} of a batch are {used.dtype}: expected whole numbers")
        if not (used.is_cpu and used.numel()):  # for another device the host would wait
            continue
        low, high = map(int, used.aminmax())
        if low < 0 or high >= limits.vocab_size:
            raise ValueError(
                f"{name} from {low} to {high}: expected 0 to {limits.vocab_size - 1}, the tokens "
                f"of the model, and {IGNORE_INDEX} for a label without loss: the tokenizer is "
                "another model's, or has more tokens (resize_vocab: true)"
            )
    if ids.shape[1] > limits.positions:
        lengths = itertools.chain(*document_lengths(batch["attention_mask"]))
        limits.check_positions(max(lengths, default=0))


def count_tokens(batch: dict) -> tuple[int, int]:
    """(tokens without padding, sum of squared document lengths) of a checked batch."""
    lengths = list(itertools.chain(*document_lengths(batch["attention_mask"])))
    return sum(lengths), sum(n * n for n in lengths)


# -- mixing and the plan of batches


class Turns:
    """The number of each next sample's dataset, until the epoch is over.

    LLaMA-Factory's strategies: concat takes one dataset after another; interleave_under, _over and
    _once are Hugging Face's interleave_datasets with first_exhausted, all_exhausted and
    all_exhausted_without_replacement. Without weights datasets take turns, and a round is finished;
    with them each turn is drawn, the same for a seed. The caller adds a dataset to `exhausted` with
    its last sample, and then begins it again. taken: turns so far.
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
        self.num_datasets = num_datasets
        self.strategy = strategy
        self.taken = taken
        self.exhausted = set(exhausted)
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


@dataclass(eq=False)
class BatchPlan:
    """The samples of each micro-batch of this data parallel rank. Arithmetic only.

    Step i of an epoch takes samples order[i * G] to order[(i + 1) * G], G = micro_batch_size *
    accumulation * dp_size; micro-batch m of rank r takes those from (m * dp_size + r) *
    micro_batch_size on. The samples of a step are thus the same in all layouts with the same G. The
    last step of an epoch has only the micro-batches that it needs, as many on every rank; FILLER
    replaces missing samples. With `costs`, one number a sample, a step's samples are dealt by
    falling cost, to balance the ranks in each micro-batch: the step has the same samples.
    """

    num_samples: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_rank: int
    dp_size: int
    seed: int
    shuffle: bool = True
    costs: np.ndarray | None = None

    def __post_init__(self):
        if self.num_samples < 1:
            raise ValueError(f"the dataset has {self.num_samples} samples: expected at least one")
        sizes = (self.micro_batch_size, self.gradient_accumulation_steps, self.dp_size)
        if min(sizes) < 1 or not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(
                f"micro batch {sizes[0]}, accumulation {sizes[1]}, data parallel rank "
                f"{self.dp_rank} of {sizes[2]}: expected sizes of at least 1, a rank below dp_size"
            )
        self.global_batch_size = math.prod(sizes)
        self.steps_per_epoch = math.ceil(self.num_samples / self.global_batch_size)
        self._order: tuple[int, np.ndarray] | None = None

    def order(self, epoch: int) -> Sequence[int]:
        """The permutation of an epoch; the identity without shuffling."""
        if not self.shuffle:
            return range(self.num_samples)  # of a stream there may be very many
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
            self._order = epoch, order
        return self._order[1]

    def num_samples_of(self, i: int) -> int:
        """Samples of all ranks, without fillers, in step i of an epoch."""
        if not 0 <= i < self.steps_per_epoch:
            raise ValueError(f"step {i} of an epoch that has {self.steps_per_epoch} steps")
        return min(self.global_batch_size, self.num_samples - i * self.global_batch_size)

    def num_micro_batches(self, i: int) -> int:
        """Micro-batches of each rank in step i of an epoch."""
        return math.ceil(self.num_samples_of(i) / (self.micro_batch_size * self.dp_size))

    def step(self, epoch: int, i: int) -> list[list[int]]:
        """This rank's micro-batches of step i, each micro_batch_size sample numbers or FILLER."""
        first = i * self.global_batch_size
        count = self.num_micro_batches(i)
        chosen = np.full((count, self.dp_size, self.micro_batch_size), FILLER, dtype=np.int64)
        samples = np.asarray(self.order(epoch)[first : first + self.num_samples_of(i)])
        if self.costs is not None:
            samples = samples[np.argsort(-self.costs[samples], kind="stable")]
        chosen.reshape(-1)[: len(samples)] = samples
        if self.costs is not None:
            # every second micro-batch is dealt from the last rank to the first, for balance
            for number in range(1, count, 2):
                chosen[number] = chosen[number, ::-1].copy()
        return chosen[:, self.dp_rank].tolist()


class _MicroBatches:
    """The plan from a position on, as the batch sampler of a DataLoader."""

    def __init__(self, plan: BatchPlan, start_epoch: int, start_step: int, num_epochs: int | None):
        self.plan = plan
        self.start = (start_epoch, start_step)
        self.num_epochs = num_epochs

    def __iter__(self):
        epoch, first_step = self.start
        while self.num_epochs is None or epoch < self.num_epochs:
            for i in range(first_step, self.plan.steps_per_epoch):
                yield from self.plan.step(epoch, i)
            epoch = epoch + 1
            first_step = 0


class _Filled(Dataset):
    """A dataset with a user's collate function. `self[i]`: (True for a filler, sample). A filler is
    sample 0, and its collated row has no labels."""

    def __init__(self, dataset, collate):
        self.dataset = dataset
        self.user_collate = collate

    def __getitem__(self, i: int):
        return i == FILLER, self.dataset[0 if i == FILLER else i]

    def collate(self, items: list):
        fillers = torch.tensor([is_filler for is_filler, _ in items])
        batch = self.user_collate([sample for _, sample in items])
        if not fillers.any():
            return batch
        labels = batch.get("labels") if hasattr(batch, "get") else None
        if labels is None or len(labels) != len(items):
            raise ValueError(
                "the last batch is filled up with samples of weight zero: expected the collate "
                f'function to return a mapping with "labels" of {len(items)} rows, one a sample'
            )
        for key, value in (("labels", IGNORE_INDEX), ("attention_mask", 0)):
            if key in batch:
                # labels may be the same tensor as input_ids
                batch[key] = torch.as_tensor(batch[key]).clone()
                batch[key][fillers] = value
        return batch


def make_loader(
    dataset,
    collate,
    plan: BatchPlan,
    start_epoch: int = 0,
    start_step: int = 0,
    num_epochs: int | None = None,
    num_workers: int = 0,
) -> DataLoader:
    """Returns a DataLoader of this rank's micro-batches, one after another, from step start_step of
    start_epoch on.

    It ends with epoch num_epochs - 1 (counted from the beginning of the run), or never.
    plan.num_micro_batches(step) says how many belong to a step. dataset: any map-style dataset;
    collate: list of its samples -> mapping. A FILLER of the plan is collated as sample 0, and its
    row of batch["labels"] becomes IGNORE_INDEX.
    Raises: ValueError for a dataset without a length, or of another length than the plan's.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"{type(dataset).__name__} has no __len__ or __getitem__: expected a map-style "
            "dataset, because the steps of an epoch are planned ahead; read an iterable dataset "
            "into a list"
        )
    if len(dataset) != plan.num_samples:
        raise ValueError(
            f"the dataset has {len(dataset)} samples, its plan is for {plan.num_samples}"
        )
    filled = _Filled(dataset, collate)
    with warnings.catch_warnings(record=True):  # its iterator warns of too many workers again
        return DataLoader(
            filled,
            batch_sampler=_MicroBatches(plan, start_epoch, start_step, num_epochs),
            collate_fn=filled.collate,
            num_workers=num_workers,
            worker_init_fn=end_with_rank,
            pin_memory=torch.cuda.is_available(),
            # else a DataLoader draws from torch's global generator, and changes dropout
            generator=torch.Generator().manual_seed(plan.seed),
        )


# -- packs


class Packs(Dataset):
    """The samples of a dataset in rows of at most `capacity` tokens: `packed[i]` is a list of
    documents, those of the samples of row i one after another.

    dataset: map-style, with document_lengths (int64 [samples, documents of a sample]), num_tokens,
    num_trained_tokens and fingerprint, as TokenDataset has them. packs: the numbers of
    the samples of each row. costs: of attention in each row, the sum of its documents' squared
    lengths. padding_fraction: of all positions of full rows.
    """

    unit = "packs"  # name of a row in reports

    def __init__(self, dataset, capacity: int):
        lengths = dataset.document_lengths
        squares = (lengths.astype(np.float64) ** 2).sum(axis=1)
        self.dataset = dataset
        self.packs = best_fit(lengths.sum(axis=1), capacity)
        self.documents_per_sample = lengths.shape[1]
        self.costs = np.array([squares[pack].sum() for pack in self.packs])
        self.num_tokens = dataset.num_tokens
        self.num_trained_tokens = dataset.num_trained_tokens
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
    """The data set of samples under packs, else the data set itself."""
    return dataset.dataset if isinstance(dataset, Packs) else dataset


class WithReference(Dataset):
    """A view of a dataset whose documents have "reference", their log-probability by a reference
    model.

    logps: float32 [samples, documents of a sample].
    """

    def __init__(self, dataset, logps: np.ndarray):
        self.dataset = dataset
        self.logps = logps
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
    """Sample numbers of each pack, of lengths that sum to at most `capacity`; deterministic.

    Best fit, longest first: a sample goes to the fullest pack with room for it, or opens a new one.
    Open packs are listed by their free space.
    Raises: ValueError for a sample longer than capacity.
    """
    if len(lengths) and lengths.max() > capacity:
        worst = int(lengths.argmax())
        raise ValueError(
            f"sample {worst} of {lengths[worst]} tokens does not fit into a pack of {capacity}: "
            "raise cutoff_len"
        )
    # free space -> its packs, the newest last
    by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    occupied = np.zeros(capacity + 1, dtype=bool)
    packs: list[list[int]] = []
    for i in np.argsort(-lengths, kind="stable"):
        length = int(lengths[i])
        # the tightest sufficient space, if any
        space = length + int(occupied[length:].argmax())
        if occupied[space]:
            pack = by_space[space].pop()
            occupied[space] = bool(by_space[space])
        else:
            space = capacity
            pack = len(packs)
            packs.append([])
        packs[pack].append(int(i))
        by_space[space - length].append(pack)
        occupied[space - length] = True
    return [np.array(sorted(pack)) for pack in packs]
