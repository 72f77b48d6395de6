"""From samples to micro-batches: the collator and its checks, mixing, each rank's batches, and
packs.

A sample is a list of documents {"input_ids", "labels"}, where labels[t] is the target at position t
or IGNORE_INDEX: two documents for a pair, chosen and rejected; those of several samples for a pack.
Letters: b samples of a micro-batch, s positions. Nothing here is collective: each rank computes its
plan."""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from .batch import Batch, document_lengths, padding_of
from .data_files import SIDES
from .errors import expect
from .files import IGNORE_INDEX
from .tables import COLUMNS, Column, is_of_inputs, registered_columns
from .watchdog import end_with_rank

# columns that tokenizers, datasets and streams add, and that a model does not need
_HARMLESS = frozenset(
    "token_type_ids special_tokens_mask length text prompt id idx index data_position".split()
)
_NOTHING = ("None", "[]", "()", "")  # how an absent value looks as text
_MASK = "attention_mask"  # each row has it, even if its documents do not
FILLER = -1  # "no sample left": collated like sample 0, without labels
_DRAWS = 1000  # drawn at once, as Hugging Face's datasets does

Documents: TypeAlias = list[dict[str, Any]]  # the documents of a sample: columns by name

# -- samples to a padded batch


def documents_of(sample: Any) -> list[Mapping[str, Any]]:
    """A sample as a list of documents. A sample is a document {"input_ids", "labels"}, a pair
    {"chosen", "rejected"} of samples, or a list of samples. A pair's other columns are given to its
    documents that lack them. Raises ValueError for anything else."""
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
        '{"chosen", "rejected"} of them, and this one has '
        f"{sorted(map(str, columns)) or type(sample)}"
    )


def _given_by(giver: str) -> dict[str, Column]:
    """The known columns (named values in the data, such as "labels") that `giver` may contain:
    {name: Column}. giver: "sample", a dataset's sample, or "collator", a collated batch."""
    return {name: column for name, column in COLUMNS.items() if giver in column.given_by}


def _refuse_columns(whose: str, columns: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ValueError for unknown columns, which would otherwise be ignored in silence. A column
    passes if it is in `known`, has no value (such as None), or is harmless (such as an "id").
    columns: {name: value}. whose: the beginning of the message, such as "a sample"."""
    passing = _HARMLESS.union(known)
    more = [name for name in columns if name not in passing]
    more = [name for name in more if str(columns[name]) not in _NOTHING]
    expect(
        not more,
        f"{whose} has {', '.join(map(repr, more))}, which the model would not be given: "
        f"expected {', '.join(known)}: remove the columns (dataset.remove_columns), or "
        "register_column one that a loss reads. Images, videos and audio are read from files "
        "(dataset), whose samples have their pixels and spectra",
    )


def _row(sample: Any) -> dict[str, torch.Tensor]:
    """Join the documents of a sample into one row of a batch -> {column: tensor}. Columns per token
    become [n, ...] for n tokens, columns per document or sample [documents]; columns of images and
    other inputs are concatenated.

    attention_mask numbers each token's document from 1; a sample of a single document may bring its
    own mask. Raises ValueError for samples that Collator refuses, such as one without documents or
    with an empty document."""
    documents = documents_of(sample)
    given = _given_by("sample")
    for document in documents:
        _refuse_columns("a sample", document, given)
    lengths = [np.asarray(document["input_ids"]).size for document in documents]
    # an empty document would have no number in attention_mask
    expect(
        min(lengths, default=0) > 0,
        f"a sample has documents of {lengths} tokens: expected one document, and one token of each",
    )
    row = {}
    for name, column in given.items():
        if is_of_inputs(name):
            having = [document for document in documents if document.get(name) is not None]
            if having:
                parts = [torch.as_tensor(document[name]) for document in having]
                row[name] = torch.cat(parts).to(getattr(torch, column.dtype))
        elif column.is_registered or name == _MASK or _is_given(name, documents):
            parts = zip(documents, lengths, strict=True)
            values = [_value(name, column, document.get(name), size) for document, size in parts]
            row[name] = torch.cat(values)
    if len(documents) > 1:
        mask = row[_MASK].tolist()
        expect(
            set(mask) == {1},
            f"a sample of {len(documents)} documents has {_MASK} {mask!s:.60}: expected 1 for each "
            "token: take padding out of the documents, or give a row that numbers its own "
            "documents as one document",
        )
        numbers = torch.arange(1, len(documents) + 1)
        row[_MASK] = numbers.repeat_interleave(torch.tensor(lengths))
    return row


def _is_given(name: str, documents: Sequence[Mapping[str, Any]]) -> bool:
    """True if every document of a sample has column `name`, False if none has. Raises ValueError if
    only some have it."""
    lacking = [i for i, document in enumerate(documents) if document.get(name) is None]
    expect(
        len(lacking) in (0, len(documents)),
        f"a sample has {name} in some of its documents, and not in those at {lacking}: set it in "
        "every document, or in none",
    )
    return not lacking


def _value(name: str, column: Column, value: Any, length: int) -> torch.Tensor:
    """Convert a document's value of one column to a tensor: [length] if the column is per token,
    otherwise [1]; further dimensions follow if the column has them. length: the document's tokens.

    A value of None becomes the column's default, in attention_mask 1. A single number is repeated,
    unless the column has further dimensions. Raises ValueError for another shape, for None without
    a default, and for values that the column's dtype cannot hold, such as a fraction in an integer
    column."""
    if value is None:
        value = 1 if name == _MASK else column.default
    if column.per != "token":
        length = 1
    try:
        # a list becomes float64: in torch's float32, 1e300 would already be inf
        given = torch.as_tensor(value if torch.is_tensor(value) else np.asarray(value))
        values = given.to(getattr(torch, column.dtype))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"{name} of a sample: expected numbers, got {value!r:.60}: set them, or a registered "
            "column's default"
        ) from error
    if given.dim() == 0:
        values = values.repeat(length)
    if values.is_floating_point():
        is_held = bool((values.isfinite() | ~given.isfinite()).all())
    else:
        # torch compares no uint16 with int64
        is_held = bool((values.double() == given.double()).all())
    has_shape = values.shape[:1] == (length,) and values.dim() == 1 + column.more_dims
    expect(
        has_shape and is_held,
        f"{name} of a sample: expected {column.dtype} [{length}{', number' * column.more_dims}], "
        f"or one number, got {given.dtype} of shape {list(given.shape)}",
    )
    return values


class Collator:
    """Data collator: samples -> a batch {"input_ids", "labels", "attention_mask"}, int64 [b, s],
    one row per sample, padded on the right to the longest row.

    attention_mask: number of each token's document in its row, from 1; 0 for padding. A sample of
    one document may bring its own numbers; those of several may only bring 1. Labels of padding are
    IGNORE_INDEX.

    The batch also has registered columns (see register_column) and, if the samples have them,
    columns that a loss reads (such as "reference", the log-probability under a reference model) and
    columns for images and other inputs. A column is [b, s, ...] if it is per token, [b, most
    documents per row] if it is per document or sample, and concatenated over rows if it is for
    inputs other than text.

    Raises ValueError for anything but samples, for most unknown columns, and for wrong values in
    columns of tokens, documents and samples. A column that only some documents have raises
    ValueError too, unless it is attention_mask, registered, or of images and other inputs."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, samples: list[Any]) -> dict[str, torch.Tensor]:
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
    """A model's limits: token ids below vocab_size, documents of at most `positions` tokens, inputs
    other than text only if has_inputs."""

    vocab_size: float = math.inf
    positions: float = math.inf
    has_inputs: bool = True

    @classmethod
    def of(cls, hf_config: dict[str, Any]) -> "Limits":
        """The limits in a model's config.json, given as a dict. A key that it lacks sets no limit;
        without vision_config the model takes no inputs other than text."""
        whole = _without_nulls(hf_config)
        keys = _without_nulls(whole.get("text_config", whole))
        positions = keys.get("max_position_embeddings", math.inf)
        rope = _without_nulls(keys.get("rope_parameters", keys.get("rope_scaling", {})))
        # max_position_embeddings may be the length before rope scaling
        before = rope.get("original_max_position_embeddings", positions)
        return cls(
            keys.get("vocab_size", math.inf),
            max(positions, before * rope.get("factor", 1)),
            "vision_config" in whole,
        )

    def within(self, other: "Limits") -> "Limits":
        """The limits for text that two models both read, this one and `other`: the smaller
        vocab_size and the smaller number of positions. has_inputs stays this model's."""
        vocab_size = min(self.vocab_size, other.vocab_size)
        return Limits(vocab_size, min(self.positions, other.positions), self.has_inputs)

    def check_positions(self, longest: int) -> None:
        """Raise ValueError if `longest`, the length of the longest document, is above the model's
        number of positions."""
        expect(
            longest <= self.positions,
            f"a document of {longest:,} tokens: the model has {self.positions:,} positions "
            "(max_position_embeddings of its config.json): cut the documents (cutoff_len), or "
            "scale them (rope_scaling)",
        )


def _without_nulls(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}


def check_batch(
    batch: Mapping[str, Any], packs: bool, limits: Limits, unread: Collection[str] = ()
) -> dict[str, Any]:
    """Check a collated batch, and complete it -> {column: tensor}. attention_mask and registered
    columns (see register_column) are added if they are absent. position_ids, harmless columns such
    as token_type_ids, and unknown columns without values are left out.

    packs: True if a row may hold several documents, numbered by attention_mask. limits: the
    model's. unread: columns of this package that the stage's loss does not read.

    Raises ValueError for other unknown columns; columns in `unread`; missing columns; wrong shapes
    of input_ids, labels or attention_mask; padding on the left; document numbers that fall; labels
    of padding; labels that look unshifted; and more than `limits` allow (ids are compared with the
    vocabulary on the CPU alone). Unless `packs`, also for several documents in a row, and for
    position_ids other than 0, 1, 2, ...."""
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
    after = mask[:, 1:]
    before = mask[:, :-1]
    expect(
        not ((after != 0) & ((before == 0) | (after < before))).any(),
        "attention_mask has padding on the left, or numbers of documents that fall: set the "
        "tokenizer's padding_side to 'right', and number a row's documents 1, 2, 3, ...",
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
    expect(
        not ((batch["labels"] != IGNORE_INDEX) & (mask == 0)).any(),
        f"labels where attention_mask is 0: expected {IGNORE_INDEX} for padding",
    )
    _check_shift(batch)
    _check_limits(batch, limits)
    return batch | {
        name: _checked(name, column, batch) for name, column in registered_columns().items()
    }


def _checked(name: str, column: Column, batch: Batch) -> torch.Tensor:
    """Bring a registered column (see register_column) of a batch to its full shape: [b, s] if it is
    per token, otherwise [b, most documents per row]. A batch without the column gets its default. A
    number, or one value per row, is expanded; values for more documents are cut. name: the
    column's. Raises ValueError if its shape cannot be brought to this."""
    shape = list(batch["attention_mask"].shape)
    given = batch.get(name, column.default)
    try:
        values = torch.as_tensor(given, dtype=getattr(torch, column.dtype))
        values = values.reshape(*values.shape, *[1] * (2 - values.dim()))  # one value per row
        if column.per != "token":
            shape[1] = max(map(len, document_lengths(batch["attention_mask"])))
            values = values[:, : shape[1]]  # a filler's row may have more documents
        return values.expand(shape)
    except (RuntimeError, TypeError):
        got = list(getattr(given, "shape", [given]))
        raise ValueError(
            f"{name} of a batch, a registered column: expected {shape}, got {got}"
        ) from None


def _check_shift(batch: Batch) -> None:
    """Raise ValueError if labels look unshifted: they equal input_ids at every trained position,
    and are not the tokens after these. Hugging Face's models shift labels inside; here labels[t]
    must already be the target of position t."""
    ids = batch["input_ids"]
    labels = batch["labels"]
    mask = batch["attention_mask"]
    is_trained = (labels != IGNORE_INDEX) & (mask != 0)
    has_next = is_trained[:, :-1] & (mask[:, :-1] == mask[:, 1:])
    repeats_next = (labels[:, :-1] == ids[:, 1:])[
        has_next
    ].all()  # a row of one token looks the same shifted or not
    expect(
        repeats_next or not (labels == ids)[is_trained].all(),
        "labels equal input_ids wherever they are not -100: the model would learn to repeat its "
        "input. Expected labels[t] to be the target of position t, the token after input_ids[t]: "
        "give input_ids[:-1] with labels[1:]",
    )


def _check_limits(batch: Batch, limits: Limits) -> None:
    """Raise ValueError for a batch outside the model's limits: documents too long, image columns
    for a text model, ids or labels of a floating-point dtype, and, checked on the CPU only, outside
    the vocabulary."""
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
        if used.is_cpu and used.numel():  # reading from another device would make the host wait
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


def count_tokens(batch: Batch) -> tuple[int, int, int, int, int]:
    """(tokens, sum of squared document lengths, patches of images and videos, sum of squared
    patches per image or time step of a video's grid, frames of audio) of a checked batch, without
    padding."""
    lengths = list(itertools.chain(*document_lengths(batch["attention_mask"])))
    grids = [batch[name] for name in ("image_grid_thw", "video_grid_thw") if name in batch]
    # a vision tower's attention stays within an image, or one frame of a video
    patches = [h * w for grid in grids for t, h, w in grid.tolist() for _ in range(t)]
    counted = (lengths, patches)
    sums = (sum(n**power for n in of) for of in counted for power in (1, 2))
    return *sums, int(sum(batch.get("audio_lengths", ())))


# -- mixing and the plan of batches


class Turns:
    """Iterates over the indices of mixed datasets: from which one to take each next sample, until
    the epoch ends.

    strategy, as in LLaMA-Factory: concat takes one dataset after another; interleave_under,
    interleave_over and interleave_once are Hugging Face's interleave_datasets with first_exhausted,
    all_exhausted and all_exhausted_without_replacement. Without weights datasets take turns, and
    interleave_under and interleave_over complete the last round; with weights each turn is drawn,
    reproducibly by seed.

    The caller adds a dataset to `exhausted` once it has used its last sample; if the dataset is
    yielded again, the caller starts it from its beginning. taken: turns so far."""

    def __init__(
        self,
        num_datasets: int,
        strategy: str,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        taken: int = 0,
        exhausted: Sequence[int] = (),
    ) -> None:
        self.strategy = strategy
        self.taken = taken
        self.exhausted = set(exhausted)
        self._numbers = range(num_datasets)
        self._enough = 1 if strategy == "interleave_under" else num_datasets  # datasets to exhaust
        self._repeats = strategy in ("interleave_under", "interleave_over")
        turns = itertools.cycle(self._numbers) if weights is None else _drawn(weights, seed)
        # turns per round
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
    """Assigns samples to the micro-batches of one data-parallel rank. Pure arithmetic.

    Step i of an epoch takes samples order[i * G] to order[(i + 1) * G - 1], with G =
    micro_batch_size * accumulation * dp_size; micro-batch m of rank r takes those from (m * dp_size
    + r) * micro_batch_size on (without `costs`). So layouts with the same G have the same samples
    in a step. The last step of an epoch has only as many micro-batches as it needs, equally many
    per rank; FILLER stands for missing samples.

    costs: one value per sample. If given, a step's samples are sorted by falling cost, and in each
    micro-batch the costliest go to the rank with the least cost so far, to give ranks similar work.
    The step has the same samples.
    """

    num_samples: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_rank: int
    dp_size: int
    seed: int
    shuffle: bool = True
    costs: np.ndarray | None = None

    def __post_init__(self) -> None:
        expect(self.num_samples > 0, "the dataset has 0 samples: expected at least one")
        of_micro_batch = self.micro_batch_size * self.dp_size
        self.global_batch_size = of_micro_batch * self.gradient_accumulation_steps
        self.steps_per_epoch = math.ceil(self.num_samples / self.global_batch_size)

    def order(self, epoch: int) -> Sequence[int]:
        """The order of an epoch's samples: a permutation from seed and epoch, or 0, 1, 2, ... if
        shuffle is False."""
        if not self.shuffle:
            return range(self.num_samples)  # a range, because a stream may have very many samples
        return _shuffled(self.num_samples, self.seed, epoch)

    def num_samples_of(self, i: int) -> int:
        """The number of samples in step i of an epoch, over all data-parallel ranks and without
        fillers."""
        return min(self.global_batch_size, self.num_samples - i * self.global_batch_size)

    def num_micro_batches(self, i: int) -> int:
        """The number of micro-batches per rank in step i of an epoch."""
        return math.ceil(self.num_samples_of(i) / (self.micro_batch_size * self.dp_size))

    def step(self, epoch: int, i: int) -> list[list[int]]:
        """This rank's micro-batches in step i of an epoch: lists of sample indices, FILLER for a
        missing sample."""
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
    """A DataLoader's batch sampler: yields the plan's micro-batches, lists of sample indices, from
    a given epoch and step on. num_epochs: where to end, counted from epoch 0; None: never."""

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
    """A map-style dataset with a user's collate function, for BatchPlans with fillers. `self[i]` is
    (i, sample); index FILLER gives sample 0. collate() masks a filler's row: labels IGNORE_INDEX
    and attention_mask 0, if the batch has them. A ValueError of the user's function gets the sample
    indices added."""

    def __init__(self, dataset: Any, collate: Callable[..., Any]) -> None:
        self.dataset = dataset
        self.user_collate = collate

    def __getitem__(self, i: int) -> tuple[int, Any]:
        return i, self.dataset[0 if i == FILLER else i]

    def collate(self, items: list[Any]) -> Any:
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
            if key in batch and batch[key] is not None:
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


def _sample_of(is_filler: bool, sample: Any) -> Any:
    """The sample to collate. If is_filler, `sample` only stands for a missing one and its tokens
    will be masked, so columns for images and other inputs are taken out of its documents. A sample
    that documents_of() cannot read is returned unchanged."""
    if not is_filler:
        return sample
    try:
        documents = documents_of(sample)
    except ValueError:  # a user's collate function may take other samples
        return sample
    if not any(map(is_of_inputs, set().union(*documents))):
        return sample
    return [
        {name: value for name, value in document.items() if not is_of_inputs(name)}
        for document in documents
    ]


def make_loader(
    dataset: Any,
    collate: Callable[..., Any],
    plan: BatchPlan,
    start_epoch: int = 0,
    start_step: int = 0,
    num_epochs: int | None = None,
    num_workers: int = 0,
) -> DataLoader:
    """A DataLoader that yields this rank's micro-batches one after another, from step start_step of
    start_epoch on.

    dataset: any map-style dataset; others raise ValueError. collate: list of its samples ->
    mapping. plan: which samples each micro-batch has; plan.num_micro_batches(i) micro-batches
    belong to step i. num_epochs: the loader ends after epoch num_epochs - 1, counted from the run's
    start; None: never.

    A missing sample (FILLER in the plan) is collated as sample 0, without images and other inputs
    if documents_of() can read it. In its row labels become IGNORE_INDEX and attention_mask 0, if
    the mapping has them."""
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
        # without it a DataLoader draws from torch's global generator, which changes dropout
        generator=torch.Generator().manual_seed(plan.seed),
    )


# -- packs


@runtime_checkable
class Stream(Protocol):
    """Interface of a training set without a length, which makes its own order and micro-batches."""

    def loader(
        self,
        collate: Callable[..., Any],
        plan: BatchPlan,
        state: dict[str, Any] | None,
        num_workers: int,
        speaks: bool,
    ) -> Any:
        """An endless iterable of this rank's micro-batches, from the position `state` on. Each has
        a "data_position": the position at the start of the next step.

        collate: the data collator. plan: batch sizes and ranks. state: the data_position of a
        micro-batch; None: the beginning. num_workers: above 0, batches are prefetched in another
        process. speaks: if True, print what is found about records (unusable, cut, ...). Raises
        ValueError if `state` has fields that a position lacks."""

    def describe(self) -> str:
        """A line about the stream for the summary at a run's start."""


class Packs(Dataset):
    """The samples of a dataset packed into rows of at most `capacity` tokens. `packed[i]` lists the
    documents of all samples in row i.

    dataset: map-style, with document_lengths (int64 [samples, documents per sample]), num_tokens,
    num_trained_tokens and fingerprint, as TokenDataset has them. packs: the sample indices in each
    row. work: float64 [rows, 2], work_of() summed per row. padding_fraction: the share of unused
    positions, if every row had `capacity`.
    """

    unit = "packs"  # what reports call a row

    def __init__(self, dataset: Any, capacity: int) -> None:
        lengths = dataset.document_lengths
        work = work_of(lengths)
        self.dataset = dataset
        self.packs = best_fit(lengths.sum(axis=1), capacity)
        self.documents_per_sample = lengths.shape[1]
        self.work = np.array([work[pack].sum(axis=0) for pack in self.packs])
        self.num_tokens = dataset.num_tokens
        self.num_trained_tokens = dataset.num_trained_tokens
        name = getattr(
            dataset, "identity", dataset.fingerprint
        )  # a user's dataset may lack identity
        self.identity = f"{name} packed into {capacity}"
        self.padding_fraction = 1.0 - dataset.num_tokens / (len(self.packs) * capacity)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, i: int) -> Documents:
        return [document for j in self.packs[i] for document in documents_of(self.dataset[int(j)])]

    def over(self, dataset: Any) -> "Packs":
        """A copy with the same rows, which are lists of sample indices, that reads the samples from
        another dataset."""
        packs = copy.copy(self)
        packs.dataset = dataset
        return packs


def work_of(document_lengths: np.ndarray) -> np.ndarray:
    """The sizes that determine a sample's training cost: float64 [samples, 2], its tokens and the
    sum of its squared document lengths.

    document_lengths: int [samples, documents per sample].
    """
    lengths = document_lengths.astype(np.float64)
    return np.stack([lengths.sum(axis=1), (lengths**2).sum(axis=1)], axis=1)


def samples_of(dataset: Any) -> Any:
    """The dataset from which a Packs dataset takes the samples that it joins into rows; any other
    dataset is returned as it is."""
    return dataset.dataset if isinstance(dataset, Packs) else dataset


def with_samples(dataset: Any, change: Callable[..., Any]) -> Any:
    """The dataset with its samples replaced by change(samples). A Packs dataset keeps its rows,
    which are lists of sample indices, so the number of samples must not change."""
    samples = change(samples_of(dataset))
    return dataset.over(samples) if isinstance(dataset, Packs) else samples


class View(Dataset):
    """Base class for views of a dataset that change its samples, such as by adding a column. A view
    copies the dataset's attributes work (the cost of each sample, for balancing ranks) and identity
    (which names the data); they are None if the dataset lacks them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.work = getattr(dataset, "work", None)
        self.identity = getattr(dataset, "identity", None)

    def __len__(self) -> int:
        return len(self.dataset)


def best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Pack samples by length -> int64 sample indices per pack; the lengths in a pack sum to at most
    `capacity`. Deterministic.

    Best fit, longest first: a sample goes into the fullest pack that has room for it; if there is
    none, it opens a new one. Raises ValueError for a sample longer than capacity.
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
