"""A shard: the samples of one dataset, tokenised, in a folder of files that are memory-mapped.

    ids.bin       int32, the tokens of all documents, one after another, not shifted
    mask.bin      uint8, of each token whether it is learned; not there where all are
    spans.bin     int64 [documents, 2], first and last token + 1 of each document
    learned.bin   int64 [documents], labels of each that are not IGNORE_INDEX
    meta.json     the report's facts, and size and CRC-32 of each of the other files

A sample is `documents_per_sample` documents in turn. No rank holds the data, and all ranks of a
machine share it.
"""

import dataclasses
import json
import os
import time
import zlib
from pathlib import Path

import numpy as np

from .constants import IGNORE_INDEX
from .data_encode import Tally, num_learned
from .files import checksum, sync, write_json

_TALLY = {field.name for field in dataclasses.fields(Tally)}
_META = {"sources", "formats", "notes", "created", "checksums", *_TALLY}
_FILES = ("ids.bin", "mask.bin", "spans.bin", "learned.bin")
_whole: set[tuple[Path, bytes]] = set()  # (folder, its meta.json) of what this process has checked


class _File:
    """A file as it is written, with its size and checksum."""

    def __init__(self, path: Path):
        self.file, self.size, self.crc = open(path, "wb"), 0, 0

    def write(self, array: np.ndarray) -> None:
        data = array.tobytes()
        self.file.write(data)
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)

    def close(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def write_shard(folder: Path, parts, meta: dict, row_length: int | None, progress) -> None:
    """Write a new folder with the documents of `parts`, which is on the disk when the call returns.

    parts: what data_encode.Encoder.encode gives of each chunk of records. meta: "sources",
    "formats" and "notes" of the report, complete when the parts are used up. row_length: join the
    documents and cut them into rows of so many tokens (None: leave them); neighbours share the
    token at which they meet, as the last target of one and the first input of the next. progress:
    is told how far it is.
    """
    folder.mkdir()
    files = {name: _File(folder / name) for name in _FILES}
    tally, lengths, learned = Tally(), [], []
    try:
        for samples, of_part in parts:
            for ids, mask in (document for _, documents in samples for document in documents):
                files["ids.bin"].write(ids)
                if mask is not None:
                    files["mask.bin"].write(mask)
                lengths.append(len(ids))
                learned.append(num_learned(ids, mask))
            tally.add(of_part)
            progress(f"{tally.records:,} records, {files['ids.bin'].size // 4:,} tokens")
        spans, learned = _spans(lengths, learned, row_length)
        files["spans.bin"].write(spans)
        files["learned.bin"].write(learned)
    finally:
        for file in files.values():
            file.close()
    tally.check()
    if files["mask.bin"].size == 0:
        (folder / "mask.bin").unlink()
        del files["mask.bin"]
    checksums = {name: [file.size, file.crc] for name, file in files.items()}
    meta = {**meta, **dataclasses.asdict(tally), "created": time.time(), "checksums": checksums}
    write_json(folder / "meta.json", meta)
    sync(folder)


def _spans(lengths: list[int], learned: list[int], row_length: int | None) -> tuple:
    """(spans int64 [documents, 2], learned int64 [documents])."""
    stops = np.cumsum(lengths, dtype=np.int64)
    if row_length is None or not len(stops):
        starts = stops - np.asarray(lengths, dtype=np.int64)
        return np.stack([starts, stops], axis=1), np.asarray(learned, dtype=np.int64)
    starts = np.arange(0, stops[-1] - 1, row_length - 1, dtype=np.int64)
    stops = np.minimum(starts + row_length, stops[-1])
    return np.stack([starts, stops], axis=1), stops - starts - 1


def damage(folder: Path) -> str | None:
    """What does not fit in a shard's folder, None for a whole one.

    Sizes are compared at each call, checksums once in a process for each shard that was written.
    """
    try:
        text = (folder / "meta.json").read_bytes()
        meta = json.loads(text)
        if not isinstance(meta, dict) or set(meta) != _META:
            return "meta.json is not whole"
        for name, (size, _) in meta["checksums"].items():
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found:,} bytes and had {size:,}"
        if (folder, text) not in _whole:
            for name, (_, crc) in meta["checksums"].items():
                if checksum(folder / name)[1] != crc:
                    return f"{name} has other content than was written"
            _whole.add((folder, text))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"it cannot be read ({error})"
    return None


class Shard:
    """Tokenised samples. `shard[r]` is sample r, a list of documents {"input_ids", "labels"}, int64
    [n] each, shifted: labels[t] is the token after input_ids[t], or IGNORE_INDEX.

    document_lengths int64 [samples, documents of a sample]: every n. learned int64 [samples]:
    labels that are not IGNORE_INDEX. meta: the report's facts. identity: names the files, keys and
    tokenizer that it was made from. The process that reads samples opens the maps.
    """

    def __init__(self, folder: Path, documents_per_sample: int, identity: str):
        self.folder, self.identity = Path(folder), identity
        self.meta = json.loads((self.folder / "meta.json").read_text())
        spans = np.fromfile(self.folder / "spans.bin", dtype=np.int64)
        learned = np.fromfile(self.folder / "learned.bin", dtype=np.int64)
        self.spans = spans.reshape(-1, documents_per_sample, 2)
        self.document_lengths = self.spans[..., 1] - self.spans[..., 0] - 1
        self.learned = learned.reshape(-1, documents_per_sample).sum(axis=1)
        self._maps = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_maps": None}  # numpy would pickle a map as a copy of the file

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, row: int) -> list[dict]:
        return [self._document(start, stop) for start, stop in self.spans[row]]

    def maps(self) -> tuple[np.ndarray, np.ndarray | None]:
        """(tokens of all documents one after another, whether each is learned; None: all are)."""
        if self._maps is None:
            ids = np.memmap(self.folder / "ids.bin", dtype=np.int32, mode="r")
            mask = None
            if "mask.bin" in self.meta["checksums"]:
                mask = np.memmap(self.folder / "mask.bin", dtype=np.uint8, mode="r")
            self._maps = ids, mask
        return self._maps

    def _document(self, start: int, stop: int) -> dict:
        ids, mask = self.maps()
        return shifted(ids[start:stop], None if mask is None else mask[start:stop])


def shifted(ids: np.ndarray, mask: np.ndarray | None) -> dict:
    """{"input_ids", "labels"} int64 [n - 1] of n tokens; mask: 1 for those that are learned, None:
    all are."""
    tokens = np.array(ids, dtype=np.int64)
    labels = tokens[1:].copy()
    if mask is not None:
        labels[mask[1:] == 0] = IGNORE_INDEX
    return {"input_ids": tokens[:-1], "labels": labels}
