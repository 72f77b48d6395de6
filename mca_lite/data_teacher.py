"""A teacher's log-probabilities on disk, for distillation without the teacher.

A row is a trained token of a data set: the k tokens that the teacher finds likeliest there, with
their log-probabilities, and the log-probability of all other tokens together. Rows have the order
of the samples and, in a sample, of its trained tokens: the layout that wrote them does not matter.
Rows are fixed in size, and read from a memory map. Letters: N rows, k tokens of a row.
"""

import functools
import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from .data_batches import View, documents_of
from .data_encode import content_hash
from .errors import expect
from .files import HF_CONFIG_NAME, IGNORE_INDEX, describe_error, write_json

FORMAT = 1
META_NAME = "meta.json"
ROWS_NAME = "rows.bin"
# a log-probability of float16 is at least this: -inf would make 0 x inf of it
LOWEST = float(np.finfo(np.float16).min)


def _trained(document) -> np.ndarray:
    return np.asarray(document["labels"]) != IGNORE_INDEX


class WithRows(View):
    """A view of a dataset whose documents have "teacher_row", int64 [n]: the number of each trained
    token's row, -1 for other tokens.

    counts: int64 [samples], the trained tokens of each sample. first: the row of the first one.
    """

    def __init__(self, dataset, counts: np.ndarray, first: int = 0):
        super().__init__(dataset)
        self.first = first
        self.ends = np.append(0, counts.cumsum())
        self.document_lengths = getattr(dataset, "document_lengths", None)

    def __getitem__(self, i: int) -> list[dict]:
        documents = documents_of(self.dataset[i])
        row = self.ends[i]
        numbered = []
        for document in documents:
            trained = _trained(document)
            rows = np.where(trained, self.first + row + trained.cumsum() - 1, -1)
            numbered.append({**document, "teacher_row": rows})
            row += trained.sum()
        expect(
            row == self.ends[i + 1],
            f"sample {i} has {row - self.ends[i]} trained tokens, and had "
            f"{self.ends[i + 1] - self.ends[i]}: expected the same sample in every epoch",
        )
        return numbered


def trained_counts(dataset) -> np.ndarray:
    """int64 [samples]: trained tokens of each sample. Reads a dataset without `learned`."""
    learned = getattr(dataset, "learned", None)
    if learned is not None:
        return learned
    samples = map(documents_of, (dataset[i] for i in range(len(dataset))))
    counts = [sum(int(_trained(document).sum()) for document in sample) for sample in samples]
    return np.array(counts, dtype=np.int64)


def fingerprint_of(dataset) -> str:
    """Name of the tokens and labels of a dataset. Reads a dataset without `fingerprint`."""
    name = getattr(dataset, "fingerprint", None)
    if name is not None:
        return name
    digest = hashlib.sha256()
    for i in range(len(dataset)):
        for document in documents_of(dataset[i]):
            for column in ("input_ids", "labels"):
                values = np.asarray(document[column], dtype=np.int64)
                digest.update(len(values).to_bytes(8, "little") + values.tobytes())
    return digest.hexdigest()[:16]


def teacher_identity(folder: str | None, cache_dir: Path) -> dict[str, str]:
    """{file: sha256} of a model's folder, {} without one. cache_dir: keeps the sums of large
    files."""
    if not folder:
        return {}
    paths = [path for name in (HF_CONFIG_NAME, "*.safetensors", "dist/*") for path in
             sorted(Path(folder).glob(name))]  # fmt: skip
    return {str(path.relative_to(folder)): content_hash(path, cache_dir) for path in paths}


# keys of an identity -> how a refusal names them
_WORDS = {
    "format": "another version of this file",
    "teacher": "another teacher",
    "data": "other data",
    "rows": "data of another number of trained tokens",
    "top_k": "teacher_top_k {}",
    "temperature": "distill_temperature {}",
    "dtype": "teacher_cache_dtype {}",
}


class TopKStore:
    """The rows of one data set in a folder: rows.bin, and meta.json with their identity, the end
    and checksum of each part written so far, and `vocab_size`, the token ids that they are of.

    identity: {"data", "rows", "top_k", "temperature", "dtype"}, and "teacher" where it is known. A
    folder is written by one process; others read it.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder = folder
        self.identity = {"format": FORMAT, **identity}
        self.meta: dict[str, Any] = {"parts": [], "vocab_size": None, **self.identity}
        k = identity["top_k"]
        floats = np.dtype(identity["dtype"])
        self.dtype = np.dtype([("tokens", np.int32, (k,)), ("logps", floats, (k + 1,))])

    @property
    def num_rows(self) -> int:
        """The rows that are written."""
        return self.meta["parts"][-1][0] if self.meta["parts"] else 0

    @property
    def is_complete(self) -> bool:
        return self.num_rows == self.identity["rows"]

    def load(self, report=print) -> dict[str, Any]:
        """Read and check the rows on disk -> meta, with the parts before the first damaged one; a
        line of report names that one. ValueError for rows of another teacher, other data or
        other keys."""
        if not (self.folder / META_NAME).is_file():
            return self.meta
        try:
            meta = json.loads((self.folder / META_NAME).read_text())
            parts = [(int(end), int(crc)) for end, crc in meta["parts"]]
        except Exception as error:
            harm = describe_error(error)
            report(f"{self.folder / META_NAME}: {harm}: the rows are written again")
            return self.meta
        for key, words in _WORDS.items():
            if key in self.identity and meta.get(key) != self.identity[key]:
                raise ValueError(
                    f"the teacher's rows in {self.folder} are of {words.format(meta.get(key))}, "
                    "and this run has another: set it back, or teacher_cache: <another folder>"
                )
        kept = self._undamaged(parts, report)
        self.meta = {**meta, "parts": kept}
        return self.meta

    def _undamaged(self, parts: list[tuple[int, int]], report) -> list[tuple[int, int]]:
        start = 0
        size = self.dtype.itemsize
        with open(self.folder / ROWS_NAME, "rb") as file:
            for i, (end, crc) in enumerate(parts):
                data = file.read((end - start) * size)
                if zlib.crc32(data) != crc:
                    report(
                        f"{self.folder / ROWS_NAME}: rows {start:,} to {end:,} have other content "
                        "than was written: the teacher computes them again, with those after them"
                    )
                    return parts[:i]
                start = end
        return parts

    def begin(self) -> None:
        """Become the one process that writes. ValueError if another one writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder / "lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"another run writes the teacher's rows in {self.folder}: wait for its end, or set "
                "teacher_cache to another folder"
            ) from None

    def end(self) -> None:
        """Let others write."""
        self._lock.release()

    def add(self, tokens: np.ndarray, logps: np.ndarray, vocab_size: int) -> dict[str, Any]:
        """Append rows: tokens int32 [n, k], logps [n, k + 1]. On disk when the call returns."""
        rows = np.empty(len(tokens), self.dtype)
        rows["tokens"] = tokens
        rows["logps"] = logps.clip(min=LOWEST)
        data = rows.tobytes()
        path = self.folder / ROWS_NAME
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.truncate(self.num_rows * self.dtype.itemsize)
            file.seek(0, 2)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part = (self.num_rows + len(rows), zlib.crc32(data))
        self.meta = {**self.meta, "vocab_size": vocab_size, "parts": [*self.meta["parts"], part]}
        write_json(self.folder / META_NAME, self.meta)
        return self.meta

    def read(self, count: int) -> np.ndarray:
        """The first rows, of a store that may lack others."""
        return np.fromfile(self.folder / ROWS_NAME, self.dtype, count)

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """All rows, mapped. ValueError if this process does not see the file."""
        path = self.folder / ROWS_NAME
        if not self.identity["rows"]:
            return np.empty(0, self.dtype)
        if not path.is_file():
            raise ValueError(f"{path} is not there: teacher_cache is a folder that all nodes see")
        return np.memmap(path, self.dtype, mode="r", shape=(self.identity["rows"],))
