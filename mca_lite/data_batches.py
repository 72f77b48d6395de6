"""From samples to micro-batches: the collator and its checks, mixing, the plan of batches per rank,
and packs.

A sample is a list of documents {"input_ids", "labels"}, in which labels[t] is the target of
position t, or IGNORE_INDEX: one document for a text or a conversation, chosen and rejected for a
pair, those of several samples for a pack. Letters: b samples of a micro-batch, s positions. Nothing
here is collective: the plan of each rank is arithmetic.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from .batch import document_lengths, padding_of
from .data_files import SIDES
from .errors import expect
from .files import IGNORE_INDEX
from .tables import COLUMNS, Column, is_of_inputs, registered_columns
from .watchdog import end_with_rank

# columns of tokenizers and data sets, and of a stream, without a meaning for the model
_HARMLESS = frozenset(
    "token_type_ids special_tokens_mask length text prompt id idx index data_position".split()
)
_NOTHING = ("None", "[]", "()", "")  # texts of columns without a value
_NUMBERED = ("attention_mask",)  # columns that each row has, whatever its documents bring
FILLER = -1  # stands for "no sample left": collated like sample 0, without labels
_DRAWS = 1000  # at once, as Hugging Face's datasets does

# -- samples to a padded batch


def documents_of(sample) -> list[Mapping]:
    """The documents of a sample. A lone document {"input_ids", "labels"}, a pair {"chosen",
    "rejected"} and a list of pairs are samples too; other columns of a pair are those of its
    documents. ValueError for anything else."""
    if isinstance(sample, (list, tuple)):
        return [document for part in sample for document in documents_of(part)]
    columns = sample.keys() if isinstance(sample, Mapping) else set()
    if columns >= {"input_ids", "labels"}:
        return [sample]
    if columns >= {*SIDES}:
        shared = {name: sample[name] for name in columns - {*SIDES}}
        documents = documents_of([sample[side] for side in SIDES])
        return [{**shared, **document} for document in documents]
    raise ValueError(
        'a sample is a list of documents {"input_ids", "labels"}, or one document, or a pair '
        f'{{"chosen", "rejected"}} of them, and this one has {sorted(columns) or type(sample)}'
    )


def _given_by(giver: str) -> dict[str, Column]:
    """The columns that a sample or a collator may give."""
    return {name: column for name, column in COLUMNS.items() if giver in column.given_by}


def _refuse_columns(whose: str, columns: Mapping, known: Collection[str]) -> None:
    """ValueError for columns with values that are neither known nor harmless."""
    passing = _HARMLESS.union(known)
    more = [name for name in columns if name not in passing]
    more = [name for name in more if str(columns[name]) not in _NOTHING]
    expect(
        not more,
        f"{whose} has {', '.join(map(repr, more))}, which the model would not be given: "
        f"expected {', '.join(known)}; images and audio are not trained: remove the columns "
        "(dataset.remove_columns), or register_column one that a loss reads",
    )


def _row(sample) -> dict[str, torch.Tensor]:
    """The documents of a sample one after another: columns of tokens [n], with the number of each
    token's document from 1 as attention_mask; other columns [documents]."""
    documents = documents_of(sample)
    given = _given_by("sample")
    for document in documents:
        _refuse_columns("a sample", document, given)
    lengths = [np.asarray(document["input_ids"]).size for document in documents]
    # an empty document among others would be lost from their numbers
    expect(
        min(lengths, default=0) > 0,
        f"a sample has documents of {lengths} tokens: expected one document, and one token of each",
    )
    row = {}
    for name, column in given.items():
        if is_of_inputs(name):
            given_ones = (document.get(name) for document in documents)
            parts = [torch.as_tensor(one) for one in given_ones if one is not None]
            if parts:
                row[name] = torch.cat(parts).to(getattr(torch, column.dtype))
        elif column.is_registered or _is_given(name, documents):
            parts = zip(documents, lengths, strict=True)
            values = [_value(name, column, document.get(name), size) for document, size in parts]
            row[name] = torch.cat(values)
    if len(documents) > 1 or "attention_mask" not in row:
        numbers = torch.arange(1, len(documents) + 1)
        row["attention_mask"] = numbers.repeat_interleave(torch.tensor(lengths))
    return row


def _is_given(name: str, documents: Sequence[Mapping]) -> bool:
    """True if the documents of a sample have a column. ValueError if only some of them have it."""
    lacking = [i for i, document in enumerate(documents) if document.get(name) is None]
    is_lost = 0 < len(lacking) < len(documents) and name not in _NUMBERED
    expect(
        not is_lost,
        f"a sample has {name} in some of its documents, and not in those at {lacking}: set it in "
        "every document, or in none",
    )
    return not lacking


def _value(name: str, column: Column, value, length: int) -> torch.Tensor:
    """A column of a document of `length` tokens: [length], or [1]. ValueError for other shapes,
    other numbers, and for no value at all."""
    if value is None:
        value = column.default
    if column.per != "token":
        length = 1
    try:
        given = torch.as_tensor(value)
        values = given.to(getattr(torch, column.dtype))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"{name} of a sample: expected numbers, got {value!r:.60}: set them, or a registered "
            "column's default"
        ) from error
    if given.dim() == 0:
        values = values.repeat(length)
    is_exact = values.is_floating_point() or (values == given).all()
    expect(
        values.shape == (length,) and is_exact,
        f"{name} of a sample: expected {column.dtype} [{length}], or one number, got {given.dtype} "
        f"of shape {list(given.shape)}",
    )
    return values


class Collator:
    """Samples -> {"input_ids", "labels", "attention_mask"}, int64 [b, s], a row for each sample,
    padded on the right; registered columns [b, s], or [b, most documents of a row]; columns of
    pictures, of all rows one after another.

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
        for name in sorted(set().union(*rows)):
            columns = [row[name] for row in rows if name in row]
            if is_of_inputs(name):
                batch[name] = torch.cat(columns)
                continue
            lacking = [i for i, row in enumerate(rows) if name not in row]
            expect(
                not lacking,
                f"the samples at {lacking} of a micro-batch have no {name}, and its others have: "
                f"set {name} in every sample, or in none",
            )
            value = padding_of(name, self.pad_token_id)
            batch[name] = pad_sequence(columns, batch_first=True, padding_value=value)
        return batch


class Limits(NamedTuple):
    """Limits of a model: ids below vocab_size, documents of so many positions; inputs beside
    text, if it has modules for them."""

    vocab_size: float = math.inf
    positions: float = math.inf
    has_inputs: bool = True

    @classmethod
    def of(cls, hf_config: dict) -> "Limits":
        """Limits of a config.json; none for keys that it lacks."""
        whole = _without_nulls(hf_config)
        keys = _without_nulls(whole.get("text_config", whole))
        positions = keys.get("max_position_embeddings", math.inf)
        rope = _without_nulls(keys.get("rope_parameters", keys.get("rope_scaling", {})))
        # max_position_embeddings may be the number before scaling
        before = rope.get("original_max_position_embeddings", positions)
        return cls(
            keys.get("vocab_size", math.inf),
            max(positions, before * rope.get("factor", 1)),
            "vision_config" in whole,
        )

    def within(self, other: "Limits") -> "Limits":
        """The limits of batches for this model and another one."""
        vocab_size = min(self.vocab_size, other.vocab_size)
        return Limits(vocab_size, min(self.positions, other.positions), self.has_inputs)

    def check_positions(self, longest: int) -> None:
        """ValueError if the longest document has more tokens than the model has positions."""
        expect(
            longest <= self.positions,
            f"a document of {longest:,} tokens: the model has {self.positions:,} positions "
            "(max_position_embeddings of its config.json): cut the documents (cutoff_len), or "
            "raise it there",
        )


def _without_nulls(keys: dict) -> dict:
    return {key: value for key, value in keys.items() if value is not None}


def check_batch(batch: Mapping, packs: bool, limits: Limits, unread: Collection[str] = ()) -> dict:
    """The columns of a collated batch as tensors. ValueError for what would silently give wrong
    numbers, or fail in the model.

    packs: rows may hold several documents, numbered by attention_mask. unread: columns of the
    package without an effect on this loss.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"the data collator gave {batch!r:.100}: expected a mapping of columns")
    known = _given_by("collator")
    _refuse_columns("a batch of the data collator", batch, known)
    batch = {k: torch.as_tensor(batch[k]) for k in known if batch.get(k) is not None}
    ignored = sorted(batch.keys() & {*unread})
    expect(
        not ignored,
        f"the samples have {', '.join(ignored)}, without an effect on the loss of this stage: "
        "remove the columns, or set the stage that reads them",
    )
    missing = sorted({"input_ids", "labels"} - batch.keys())
    expect(
        not missing,
        f"the data collator gave {sorted(batch)}: expected {missing} too, labels already shifted",
    )
    ids = batch["input_ids"]
    mask = batch.setdefault("attention_mask", torch.ones_like(ids))
    shapes = [list(batch[name].shape) for name in ("input_ids", "labels", "attention_mask")]
    is_table = ids.dim() == 2 and ids.numel() > 0
    expect(
        is_table and shapes == 3 * shapes[:1],
        f"input_ids, labels and attention_mask have the shapes {shapes}: expected [rows, positions]"
        " of all: in the mask 1 for a token and 0 for padding, or with sequence_packing: true the "
        "number of each token's document in its row, in place of a mask of 4 dimensions",
    )
    expect(
        not ((mask[:, 1:] != 0) & (mask[:, :-1] == 0)).any(),
        "attention_mask has padding on the left: set the tokenizer's padding_side to 'right'",
    )
    expect(
        packs or not (mask > 1).any(),
        "attention_mask numbers several documents in a row, which would see each other: set "
        "sequence_packing: true",
    )
    positions = batch.pop("position_ids", torch.arange(ids.shape[1]))
    expect(
        packs or (positions == torch.arange(positions.shape[-1])).all(),
        "position_ids other than 0, 1, 2, ... belong to packed rows: set sequence_packing: true",
    )
    _check_shift(batch)
    _check_limits(batch, limits)
    return batch | {
        name: _checked(name, column, batch) for name, column in registered_columns().items()
    }


def _checked(name: str, column: Column, batch: dict) -> torch.Tensor:
    """A registered column of a batch: [b, s] per token, else [b, most documents of a row]."""
    shape = list(batch["attention_mask"].shape)
    given = batch.get(name, column.default)
    try:
        values = torch.as_tensor(given, dtype=getattr(torch, column.dtype))
        values = values.reshape(*values.shape, *[1] * (2 - values.dim()))  # one number a row
        if column.per != "token":
            shape[1] = max(map(len, document_lengths(batch["attention_mask"])))
            values = values[:, : shape[1]]  # a filler's row may have more documents
        return values.expand(shape)
    except (RuntimeError, TypeError):
        got = list(getattr(given, "shape", [given]))
        raise ValueError(
            f"{name} of a batch, a registered column: expected {shape}, got {got}"
        ) from None


def _check_shift(batch: dict) -> None:
    """Raise ValueError for labels that are not shifted: transformers' models shift them inside."""
    ids = batch["input_ids"]
    labels = batch["labels"]
    mask = batch["attention_mask"]
    is_trained = (labels != IGNORE_INDEX) & (mask != 0)
    has_next = is_trained[:, :-1] & (mask[:, :-1] == mask[:, 1:])
    repeats_next = (labels[:, :-1] == ids[:, 1:])[has_next].all()  # as in a row of one token
    expect(
        repeats_next or not (labels == ids)[is_trained].all(),
        "labels equal input_ids wherever they are not -100: the model would learn to repeat its "
        "input. Expected labels[t] to be the target of position t, the token after input_ids[t]: "
        "give input_ids[:-1] with labels[1:]",
    )


def _check_limits(batch: dict, limits: Limits) -> None:
    """ValueError for ids, labels, documents or pictures outside the model's limits."""
    expect(
        limits.has_inputs or not any(map(is_of_inputs, batch)),
        "a batch has pixel_values or image_grid_thw, and the model reads text: its config.json has "
        "no vision_config: remove the columns",
    )
    ids = batch["input_ids"]
    labels = batch["labels"]
    for name, used in ("input_ids", ids), ("labels", labels[labels != IGNORE_INDEX]):
        expect(
            not used.is_floating_point(),
            f"{name} of a batch are {used.dtype}: expected whole numbers",
        )
        if used.is_cpu and used.numel():  # for another device the host would wait
            low, high = map(int, used.aminmax())
            expect(
                0 <= low <= high < limits.vocab_size,
                f"{name} from {low} to {high}: expected 0 to {limits.vocab_size - 1}, the tokens "
                f"of the model, and {IGNORE_INDEX} for a label without loss: the tokenizer is "
                "another model's, or has more tokens (resize_vocab: true)",
            )
    if ids.shape[1] > limits.positions:
        lengths = itertools.chain(*document_lengths(batch["attention_mask"]))
        limits.check_positions(max(lengths, default=0))


def count_tokens(batch: dict) -> tuple[int, int, int, int]:
    """(tokens without padding, sum of squared document lengths, patches of pictures, sum of a
    picture's squared patches) of a checked batch."""
    lengths = list(itertools.chain(*document_lengths(batch["attention_mask"])))
    patches = []
    if "image_grid_thw" in batch:
        patches = batch["image_grid_thw"].prod(1).tolist()
    counted = (lengths, patches)
    return tuple(sum(n**power for n in of) for of in counted for power in (1, 2))


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
        self.strategy = strategy
        self.taken = taken
        self.exhausted = set(exhausted)
        self._numbers = range(num_datasets)
        self._enough = 1 if strategy == "interleave_under" else num_datasets  # exhausted ones
        self._repeats = strategy in ("interleave_under", "interleave_over")
        turns = itertools.cycle(self._numbers) if weights is None else _drawn(weights, seed)
        # turns that belong together
        self._round = num_datasets if self._repeats and weights is None else 1
        self._turns = itertools.islice(turns, taken, None)

    def __iter__(self) -> Iterator[int]:
        while len(self.exhausted) < self._enough or self.taken % self._round:
            number = next(self._turns)
            if self.strategy == "concat":
                number = min(set(self._numbers) - self.exhausted)
            self.taken += 1
            if self._repeats or number not in self.exhausted:
                yield number


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
    falling cost, in each micro-batch the most to the rank with the least so far: the step has the
    same samples, and a micro-batch similar ones on all ranks.
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
        expect(self.num_samples > 0, "the dataset has 0 samples: expected at least one")
        of_micro_batch = self.micro_batch_size * self.dp_size
        self.global_batch_size = of_micro_batch * self.gradient_accumulation_steps
        self.steps_per_epoch = math.ceil(self.num_samples / self.global_batch_size)

    def order(self, epoch: int) -> Sequence[int]:
        """The permutation of an epoch; the identity without shuffling."""
        if not self.shuffle:
            return range(self.num_samples)  # of a stream there may be very many
        return _shuffled(self.num_samples, self.seed, epoch)

    def num_samples_of(self, i: int) -> int:
        """Samples of all ranks, without fillers, in step i of an epoch."""
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
            loads = np.zeros(self.dp_size)
            for rows in chosen:
                ranks = np.argsort(loads, kind="stable")
                loads[ranks] += np.where(rows == FILLER, 0.0, self.costs[rows]).sum(axis=1)
                rows[ranks] = rows.copy()
        return chosen[:, self.dp_rank].tolist()


@functools.lru_cache(2)
def _shuffled(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


@dataclass
class _MicroBatches:
    """The plan from a position on, as the batch sampler of a DataLoader."""

    plan: BatchPlan
    start_epoch: int
    start_step: int
    num_epochs: int | None

    def __iter__(self) -> Iterator[list[int]]:
        step = self.start_step
        for epoch in itertools.count(self.start_epoch):
            if epoch == self.num_epochs:
                return
            for i in range(step, self.plan.steps_per_epoch):
                yield from self.plan.step(epoch, i)
            step = 0


class _Filled(Dataset):
    """A dataset with a user's collate function. `self[i]`: (i, sample). A filler is sample 0, and
    its collated row has no labels. Errors of the function name its samples."""

    def __init__(self, dataset, collate):
        self.dataset = dataset
        self.user_collate = collate

    def __getitem__(self, i: int):
        return i, self.dataset[0 if i == FILLER else i]

    def collate(self, items: list):
        numbers = [i for i, _ in items]
        fillers = torch.tensor(numbers) == FILLER
        samples = [_sample_of(i == FILLER, sample) for i, sample in items]
        try:
            batch = self.user_collate(samples)
        except ValueError as error:
            raise ValueError(f"{error} (samples {numbers} of the data set)") from error
        if not fillers.any():
            return batch
        for key, value in ("labels", IGNORE_INDEX), ("attention_mask", 0):
            if key in batch:
                # labels may be the same tensor as input_ids
                column = torch.as_tensor(batch[key]).clone()
                expect(
                    len(column) == len(items),
                    "the last batch is filled up with samples of weight zero: expected the collate "
                    f'function to return "{key}" of {len(items)} rows, got {len(column)}',
                )
                column[fillers] = value
                batch[key] = column
        return batch


def _sample_of(is_filler: bool, sample):
    """The sample, a filler's without its pictures: their tokens are not in the batch."""
    if not is_filler:
        return sample
    try:
        documents = documents_of(sample)
    except ValueError:  # a user's collate function may take others
        return sample
    if not any(map(is_of_inputs, set().union(*documents))):
        return sample
    return [
        {name: value for name, value in document.items() if not is_of_inputs(name)}
        for document in documents
    ]


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
    Raises: ValueError for a dataset without a length.
    """
    expect(
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"),
        f"{type(dataset).__name__} has no __len__ or __getitem__: expected a map-style dataset, "
        "because the steps of an epoch are planned ahead; read an iterable dataset into a list",
    )
    filled = _Filled(dataset, collate)
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


@runtime_checkable
class Stream(Protocol):
    """A training set without a length, with an order and micro-batches."""

    def loader(
        self, collate: Callable, plan: BatchPlan, state: dict | None, num_workers: int, speaks: bool
    ) -> Any:
        """An iterable of this rank's micro-batches from a position on, with "data_position", the
        beginning of the next step, in each.

        plan: sizes and ranks of a step. state: data_position of a micro-batch, None: the beginning.
        speaks: print the counts of records. ValueError for a state of another stream.
        """

    def describe(self) -> str:
        """A line for the summary at the start of a run."""


class Packs(Dataset):
    """The samples of a dataset in rows of at most `capacity` tokens: `packed[i]` is a list of
    documents, those of the samples of row i one after another.

    dataset: map-style, with document_lengths (int64 [samples, documents of a sample]), num_tokens,
    num_trained_tokens and fingerprint, as TokenDataset has them. packs: the numbers of
    the samples of each row. work: float64 [rows, 2], work_of() each. padding_fraction: of all
    positions of full rows.
    """

    unit = "packs"  # name of a row in reports

    def __init__(self, dataset, capacity: int):
        lengths = dataset.document_lengths
        work = work_of(lengths)
        self.dataset = dataset
        self.packs = best_fit(lengths.sum(axis=1), capacity)
        self.documents_per_sample = lengths.shape[1]
        self.work = np.array([work[pack].sum(axis=0) for pack in self.packs])
        self.num_tokens = dataset.num_tokens
        self.num_trained_tokens = dataset.num_trained_tokens
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


def work_of(document_lengths: np.ndarray) -> np.ndarray:
    """Tokens and the sum of squared document lengths of each sample: float64 [samples, 2].

    document_lengths: int [samples, documents of a sample].
    """
    lengths = document_lengths.astype(np.float64)
    return np.stack([lengths.sum(axis=1), (lengths**2).sum(axis=1)], axis=1)


def samples_of(dataset):
    """The data set of samples under packs, else the data set itself."""
    return dataset.dataset if isinstance(dataset, Packs) else dataset


def with_samples(dataset, change: Callable):
    """The dataset with change(its samples) as its samples, in the packs that it has."""
    samples = change(samples_of(dataset))
    return dataset.over(samples) if isinstance(dataset, Packs) else samples


class View(Dataset):
    """A view of a dataset, with other columns in its documents."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.work = getattr(dataset, "work", None)
        self.identity = getattr(dataset, "identity", None)

    def __len__(self) -> int:
        return len(self.dataset)


class WithReference(View):
    """A view of a dataset whose documents have "reference", their log-probability by a reference
    model.

    logps: float32 [samples, documents of a sample].
    """

    def __init__(self, dataset, logps: np.ndarray):
        super().__init__(dataset)
        self.logps = logps
        self.first_scores = logps[:4].tolist()

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
    if lengths.max(initial=0) > capacity:
        raise ValueError(
            f"sample {lengths.argmax()} of {lengths.max()} tokens does not fit into a pack of "
            f"{capacity}: raise cutoff_len"
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
