"""Scores of a data set by another model, a reference or a teacher: computed in a pass before
training, and stored in a folder or kept in memory.

A row contains what that model says about a sample, or about a trained token. Rows have a fixed size
and a field `logps` with log-probabilities. They are in sample order, so the layout that wrote them
does not matter. The pass writes them in parts, and resumes after the last complete part.
"""

import contextlib
import functools
import hashlib
import math
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from . import ckpt_folder, parallel, parts
from .args import CORE_GROUPS, RunArguments, check_together
from .ckpt_folder import CheckpointError
from .data_batches import documents_of, samples_of
from .data_encode import content_hash, hash_of
from .errors import Judge, expect
from .files import (
    HF_CONFIG_NAME,
    IGNORE_INDEX,
    PathLike,
    checksum,
    describe_error,
    read_json,
    text_values,
    write_file,
    write_json,
)
from .tables import COLUMNS, KEY_GROUPS, OBJECTIVES
from .trainer import McaTrainer
from .trainer_events import check_given

FORMAT = 2
META_NAME = "meta.json"


def objective_keys(stage: str, **keys: Any) -> SimpleNamespace:
    """Make the configuration keys of a training stage from some of them, as an object with an
    attribute per key. The given `keys` are converted to their types, other keys have their
    defaults; a key is None if its part of the package is not installed.

    stage: the training stage, such as "dpo". ConfigError if a value has a wrong type, or a rule of
    the stage refuses it."""
    judge = Judge(None)
    groups = [
        row.group.read({"stage": stage, **keys}, judge)
        for name, row in KEY_GROUPS.items()
        if name == "finetuning" or name not in CORE_GROUPS
    ]
    joined = judge.arguments = SimpleNamespace(**dict.fromkeys(parts.absent_keys()))
    for group in groups:
        vars(joined).update(vars(group))
    joined.changed = [key for group in groups for key in group.changed]
    for group in groups:
        group.resolve(judge)
    OBJECTIVES[joined.stage].check_keys(joined, judge)
    judge.close()
    return joined


# -- identities


def trained_counts(dataset: Any) -> np.ndarray:
    """Number of trained tokens in each sample, int64 [samples]. If the dataset has no attribute
    `learned` with these counts, all samples are read.
    """
    learned = getattr(dataset, "learned", None)
    if learned is not None:
        return learned
    counts = np.zeros(len(dataset), np.int64)
    for i in range(len(dataset)):
        for document in documents_of(dataset[i]):
            counts[i] += trained(document).sum()
    return counts


def trained(document: Any) -> np.ndarray:
    """bool [n]: True for the document's tokens that have a label."""
    return np.asarray(document["labels"]) != IGNORE_INDEX


def fingerprint_of(dataset: Any) -> str:
    """A hash of the dataset's content, as text. If the dataset has no attribute `fingerprint`, all
    samples are read, and the columns known to the package are hashed.
    """
    name = getattr(dataset, "fingerprint", None)
    if name is not None:
        return name
    digest = hashlib.sha256()
    for i in range(len(dataset)):
        for document in documents_of(dataset[i]):
            for column in sorted(document.keys() & COLUMNS.keys()):
                values = torch.as_tensor(document[column]).double()
                digest.update(f"{column} {[*values.shape]}".encode())
                digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def identity_of_model(folder: PathLike | None, cache_dir: Path) -> dict[str, str]:
    """Tell models apart by content: {file: its sha256} for the config and weights in a model's
    folder; {} if there is no such folder. cache_dir: folder that keeps the hashes of large files.
    """
    if not folder:
        return {}
    paths: list[Path] = []
    for pattern in (HF_CONFIG_NAME, "*.safetensors", "dist/*"):
        paths += sorted(Path(folder).glob(pattern))
    return {str(path.relative_to(folder)): content_hash(path, cache_dir) for path in paths}


# -- rows on disk

# keys of an identity -> their names in error messages
_WORDS = {
    "reference": "another reference model",
    "teacher": "another teacher",
    "data": "other data",
    "rows": "data of another number of rows",
    "top_k": "teacher_top_k {}",
    "temperature": "distill_temperature {}",
    "dtype": "teacher_cache_dtype {}",
}


# file names: first row, the row after the last, hash, CRC-32
_PART = re.compile(r"(\d+)-(\d+)-([0-9a-f]{8})-([0-9a-f]{8})\.rows", re.ASCII)


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Context that turns an OSError into a CheckpointError, whose text names `folder` and the
    configuration keys that select another folder."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the folder of rows {folder} cannot be read or written ({describe_error(error)}): "
            "make room there, or set cache_dir (of a teacher's rows: teacher_cache) to another"
        ) from error


class RowStore:
    """Keeps a model's scores of one data set on disk, so that a later run need not compute them
    again. A row has the scores of one unit, such as a pair or a token. Rows are written in parts,
    one file each; meta.json has their identity (facts about data, model and keys).

    A part's file name has its first row, the row after its last, a hash of the identity and of the
    previous part's name, and the CRC-32 of its content. So the parts of one pass form a chain.

    folder: None: rows are not written. identity: the facts; those with a name in _WORDS must equal
    the ones on disk, others are only stored. dtype: a row's. Files are written atomically, so two
    processes may write the same rows."""

    def __init__(self, folder: Path | None, identity: dict[str, Any], dtype: np.dtype):
        self.folder = folder
        self.identity = {"format": FORMAT, **identity}
        self.dtype = dtype
        self.parts: list[tuple[int, Path]] = []  # (the row after it, its file)

    @property
    def num_rows(self) -> int:
        """Number of rows in the parts that were loaded or added."""
        return self.parts[-1][0] if self.parts else 0

    def _before(self) -> str:
        """The hash that the next part's file name gets: of the identity and of the last part's
        name. It ties each part to the one before."""
        return hash_of([self.identity, [path.name for _, path in self.parts[-1:]]])[:8]

    @property
    def is_complete(self) -> bool:
        """True if the store has all rows of the data set."""
        return self.num_rows == self.identity["rows"]

    def load(self, report: Callable[[str], Any] = print) -> "RowStore":
        """Find the parts (files of rows) in the folder, as far as intact ones follow one another,
        and take the identity from meta.json. Returns this store. A folder without a meta.json in
        the present format counts as empty.

        report: called with a line of text about damage. ValueError if the rows on disk are of other
        data, another model or other keys: if a fact with a name in _WORDS differs."""
        if self.folder is None or not (self.folder / META_NAME).is_file():
            return self
        try:
            meta = read_json(self.folder / META_NAME)
        except ValueError:
            meta = {}
        if meta.get("format") != FORMAT:
            report(f"{self.folder} is damaged, or of another version: its rows are computed again")
            return self
        for key in self.identity.keys() & _WORDS.keys():
            expect(
                meta.get(key) == self.identity[key],
                f"the rows in {self.folder} are of {_WORDS[key].format(meta.get(key))}, and this "
                "run has another: set it back, or teacher_cache: <another folder>",
            )
        self.identity = meta
        for path in sorted(self.folder.glob("*.rows")):
            name = _PART.fullmatch(path.name)
            if name is None or not path.is_file():
                continue
            start, end = int(name[1]), int(name[2])
            if (start, name[3]) != (self.num_rows, self._before()):
                continue  # it follows a damaged one, or is of another pass
            if checksum(path) == ((end - start) * self.dtype.itemsize, int(name[4], 16)):
                self.parts.append((end, path))
            else:
                report(f"{path} has other content than was written: its rows are computed again")
        return self

    def write(self, rows: np.ndarray) -> tuple[int, Path]:
        """Write the next rows as a part (one file). Returns (the row after its last, its file); the
        caller appends this pair to `parts`. If `folder` is None nothing is written; otherwise the
        file is on disk at the return. CheckpointError if the file cannot be written."""
        data = rows.tobytes()
        end = self.num_rows + len(rows)
        name = f"{self.num_rows:012d}-{end:012d}-{self._before()}-{zlib.crc32(data):08x}.rows"
        path = Path(self.folder or "", name)
        if self.folder is not None:
            with _naming(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(self.folder / META_NAME, self.identity)
                write_file(path, data)
        return end, path

    def maps(self) -> list[np.ndarray]:
        """The stored rows as one array per part, memory-mapped from the part's file."""
        return [np.memmap(path, self.dtype, mode="r") for _, path in self.parts]

    def read(self) -> np.ndarray:
        """All rows of the parts, as one array in memory."""
        return np.concatenate([np.empty(0, self.dtype), *self.maps()])


# -- configs and trainers


class ObjectiveConfig:
    """Base class of the objectives' configs, such as DPOConfig: dataclasses whose fields stand for
    configuration keys. The row of an objective in the table OBJECTIVES maps keys to fields, in
    `keys`.

    Fields that only some objectives have: cache_dir: folder for stored rows of scores; None:
    usually keep them in memory. cache: another folder, used instead if cache_dir is set. pref_loss,
    ld_alpha, use_weighting: keys of preference training."""

    stage: ClassVar[str]
    cache_dir: str | None
    cache: str | None = None
    pref_loss: Any = ()
    ld_alpha: float | None = None
    use_weighting: bool = False

    @classmethod
    def of_keys(cls, keys: RunArguments, **more: Any) -> Any:
        """The config for a run's configuration keys. more: fields that override the keys."""
        names = OBJECTIVES[cls.stage].keys
        return cls(**{name: getattr(keys, key) for key, name in names.items()} | more)

    def as_keys(self) -> dict[str, Any]:
        """This config's values under the names of configuration keys: {key: value}, as a run would
        set it."""
        return {key: getattr(self, name) for key, name in OBJECTIVES[self.stage].keys.items()}

    def check_with(self, **more: Any) -> SimpleNamespace:
        """Check this config by the rules for its configuration keys. Returns an object with all
        keys of the objective as attributes. more: values of keys to check instead of the config's.
        ConfigError if a rule refuses a value."""
        return objective_keys(self.stage, **self.as_keys() | more)

    def take_keys(self, **more: Any) -> None:
        """Check this config's fields by the rules for the configuration keys that they correspond
        to, and convert the fields to the keys' types, in place. more: values of keys to check
        instead of this config's; the fields of these keys are not changed. ConfigError if a rule
        refuses a value.
        """
        keys = self.check_with(**more)
        for key, name in OBJECTIVES[self.stage].keys.items():
            if key not in more:
                setattr(self, name, getattr(keys, key))


def expect_another(model: Any, other: Any, what: str) -> None:
    """Raise ValueError if a reference model or teacher, `other`, is the trained model itself: it is
    frozen to score samples, so nothing would be trained. what: its role, for the message."""
    expect(
        model is not other,
        f"{what} is the trained model itself, which would be frozen: load it once more",
    )


class ScoredTrainer(McaTrainer):
    """Base class of trainers that learn from a model's scores of their samples, such as a reference
    model's (DPO) or a teacher's (distillation). Scores that are computed before training are rows
    in a RowStore (files on disk, if it has a folder).

    Subclasses set the attributes: config_class (made if train_config is None); scorer (the scoring
    model's name in reports); scorer_key (the configuration keys that decide its scores); kind (the
    rows' name on disk and in checkpoints); row_unit (what a row describes: "pair", "token");
    part_rows (about how many rows are written at once); row_type (a row's dtype).

    train_config: an ObjectiveConfig; None: its defaults. Other arguments are McaTrainer's.
    ConfigError for keys that do not fit together."""

    config_class: Any
    scorer: str
    scorer_key: str
    kind: str
    row_unit: str
    part_rows: int  # a crash loses about as many
    row_type: np.dtype

    def __init__(
        self, model: Any = None, train_config: Any = None, args: Any = None, **kwargs: Any
    ):
        check_given(model, args)
        self.train_config = config = train_config or self.config_class()
        keys = {**config.as_keys(), **self._keys_of_data(args, kwargs)}
        mtp = args.mtp_num_layers or getattr(model.config, "mtp_num_layers", None)
        values = getattr(model.config, "hf_config", None) or vars(model.config)
        check_together(args, stage=config.stage, mtp_num_layers=mtp, model_config=values, **keys)
        super().__init__(model=model, args=args, **kwargs)
        self.settings |= config.as_keys()

    def facts_of_model(self, cache_dir: Path) -> list[Any]:
        """Values that tell the start model, whose scores are stored, from another one: its files,
        and what a run's keys change in it. cache_dir: as for identity_of_model()."""
        config = self.model.config
        name = getattr(config, "name_or_path", None)
        of_file = self.backend.hf_config
        return [
            name,
            self.train_config.model_source,
            ckpt_folder.model_identity(of_file),
            text_values(of_file).get("rope_parameters"),
            self.backend.precision,
            self.args.fp8,
            getattr(config, "weight_format", None),  # of a quantised base
            identity_of_model(name, cache_dir),
        ]

    def _keys_of_data(self, args: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Hook: {configuration key: value} for keys whose values follow from the data sets'
        columns; they are checked together with the config's keys. given: the constructor's
        keywords. ValueError for samples that do not fit."""
        return {}

    def _identity(self, cache_dir: Path) -> dict[str, Any]:
        """Hook: facts that identify the model whose scores are cached, such as the hashes of its
        files. cache_dir: folder that keeps file hashes.
        """
        raise NotImplementedError  # DPOTrainer describes a reference, DistillTrainer a teacher

    def _score(self, samples: Any, ends: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Hook: compute the scores of samples `start` to `stop`, on every rank -> a one-dimensional
        array of row_type, a row for each unit that is scored. ends: int64 [samples + 1]; sample i
        has rows ends[i] to ends[i + 1] of the whole data set, so ends[stop] - ends[start] rows are
        returned. Collective."""
        raise NotImplementedError  # DPOTrainer scores answers, DistillTrainer gives tokens' top k

    # -- the pass

    def _stored(self, samples: Any, num_rows: int) -> RowStore:
        """Open the store of scores of these samples, with the rows that are on disk already.
        num_rows: how many rows the samples have in all. CheckpointError on every rank if
        RowStore.load() refuses the rows on disk. Collective."""

        def load() -> RowStore:
            config = self.train_config
            if config.cache_dir is None:
                return RowStore(None, {"rows": num_rows}, self.row_type)
            cache_dir = Path(config.cache_dir)
            identity: dict[str, Any] = {"data": fingerprint_of(samples), "rows": num_rows}
            identity |= self._identity(cache_dir)
            folder = cache_dir / self.kind / hash_of(identity)[:32]
            if config.cache is not None:
                folder = Path(config.cache, identity["data"])
            with _naming(folder):
                return RowStore(folder, identity, self.row_type).load(self.report.print)

        store = parallel.on_main(load, CheckpointError)
        self._report_rows(store)
        return store

    def _report_rows(self, store: RowStore) -> None:
        """Print how many rows the store has, and how many it needs."""
        done = f"{store.num_rows:,} of {store.identity['rows']:,} {self.row_unit}s"
        self.report.print(f"{self.scorer}: {done} in {store.folder or 'memory'}")

    def _missing_rows(
        self, store: RowStore, samples: Any, ends: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Compute the rows of scores that the store lacks, write them part by part, and yield each
        part. ends: int64 [samples + 1]; sample i has rows ends[i] to ends[i + 1]. Collective.

        If the store has rows, the first samples with rows are scored again. CheckpointError if
        these scores differ from the stored ones, as those of another model do, or if a part cannot
        be written."""
        args = self.args
        of_step = args.per_device_eval_batch_size * args.gradient_accumulation_steps
        of_step *= self.backend.dp_size
        start = int(np.searchsorted(ends, store.num_rows))
        if start:
            first = int(np.searchsorted(ends, 0, "right")) - 1  # the samples before it have no rows
            now = self._score(samples, ends, first, min(start, first + of_step))["logps"]
            kept = parallel.on_main(lambda: store.maps()[0]["logps"][: len(now)], CheckpointError)
            if not self._is_same(now[: len(kept)], kept):
                raise CheckpointError(
                    f"the rows in {store.folder} are of another {self.scorer}: it gave "
                    f"{kept[0].tolist()} to the first {self.row_unit}, and this one gives "
                    f"{now[0].tolist()}: set it back, or remove the folder"
                )
        while not store.is_complete:
            wanted = np.searchsorted(ends, store.num_rows + self.part_rows) - start
            stop = min(start + math.ceil(wanted / of_step) * of_step, len(samples))
            rows = self._score(samples, ends, start, stop)
            part = parallel.on_main(functools.partial(store.write, rows), CheckpointError)
            store.parts.append(part)
            yield rows
            self._report_rows(store)
            where = store.folder or f"the first {self.row_unit}"
            self.stop_after_signal(f"in the {self.scorer}'s pass; it goes on from {where}")
            start = stop

    def _all_logps(self, samples: Any, ends: np.ndarray) -> np.ndarray:
        """Log-probabilities for all rows of a dataset: the column "logps" of the stored rows and,
        after them, of those that this call computes. ends: int64 [samples + 1]; sample i has rows
        ends[i] to ends[i + 1]. Collective."""
        store = self._stored(samples, int(ends[-1]))
        kept = parallel.on_main(store.read, CheckpointError)
        rows = [kept, *self._missing_rows(store, samples, ends)]
        return np.concatenate(rows)["logps"]

    def _is_same(self, logps: Any, others: Any) -> bool:
        """True if log-probabilities from two passes over the same samples are equal up to rounding,
        by numpy's allclose. rtol and atol are 0.03 if training or the stored rows are in half
        precision, otherwise 0.001. False if the shapes differ."""
        is_half = self.row_type["logps"].base.itemsize < 4
        share = 3e-2 if self.args.bf16 or self.args.fp16 or is_half else 1e-3
        is_alike = np.shape(logps) == np.shape(others)
        return is_alike and np.allclose(logps, others, rtol=share, atol=share)

    # -- around the loop

    def objective_facts(self) -> dict[str, Any]:
        """Facts that a checkpoint stores and a resumed run must share: {kind: the first few scores
        of the training set}; {} without scores."""
        scores = getattr(samples_of(self.train_dataset), "first_scores", None)
        return {self.kind: scores} if scores else {}

    def check_objective(self, facts: dict[str, Any], folder: Path) -> None:
        """Raise CheckpointError if a checkpoint has other first scores than this run, beyond
        rounding: it was probably trained against another scoring model. Nothing is compared if one
        of the two has no scores. facts: the checkpoint's objective_facts. folder: the
        checkpoint's."""
        written = facts.get(self.kind)
        now = self.objective_facts().get(self.kind)
        if written and now and not self._is_same(now, written):
            raise CheckpointError(
                f"{folder} was trained against another {self.scorer}, which gave {written[0]} to "
                f"the first {self.row_unit}, and this one gives {now[0]}: set {self.scorer_key} "
                "back to go on"
            )
