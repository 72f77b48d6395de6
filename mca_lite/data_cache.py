"""The token cache: one folder for each source as it is tokenised, under a key of all that decides on its content.

The files are memory-mapped by those who read them, so that no rank holds the data, and all ranks of a node share it.
"""

import hashlib
import inspect
import itertools
import json
import os
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil

from . import data_chat, data_encode, data_pair_records, data_records
from .constants import IGNORE_INDEX
from .data_build_once import build_once
from .data_encode import Encoder, PairEncoder

CACHE_FORMAT = 1
CHUNK_RECORDS = 500  # records handed to the tokenizer at once
PARALLEL_FROM_RECORDS = 10_000  # below this, starting worker processes takes longer than they save
HASH_DIRECTLY_BELOW_BYTES = 64 << 20


# ------------------------------------------------------------------------------------------------------------- the key


def default_cache_dir() -> Path:
    """$MCA_LITE_CACHE, or ~/.cache/mca_lite."""
    return Path(os.environ.get("MCA_LITE_CACHE") or Path.home() / ".cache" / "mca_lite")


def _sha256_of_file(path: Path, progress=None) -> str:
    digest, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(8 << 20):
            digest.update(block)
            done += len(block)
            if progress:
                progress(f"{done / 2**30:.1f} GiB")
    return digest.hexdigest()


def _content_hash(path: Path, cache_dir: Path) -> str:
    """sha256 of the file. A large one is read once, and not again until its size or modification time changes."""
    stat = path.stat()
    if stat.st_size < HASH_DIRECTLY_BELOW_BYTES or time.time() - stat.st_mtime < 2:
        return _sha256_of_file(
            path
        )  # a file written just now may change again within one tick of its time stamp
    name = hashlib.sha256(
        f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()
    ).hexdigest()
    target = cache_dir / "hashes" / name
    build_once(
        target,
        lambda tmp, progress: tmp.write_text(_sha256_of_file(path, progress)),
        f"hashing {path}",
    )
    return target.read_text()


def _tokenizer_identity(tokenizer) -> list:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    core = (
        backend.to_str()
        if backend is not None
        else json.dumps(sorted(tokenizer.get_vocab().items()))
    )
    special = sorted(map(str, tokenizer.special_tokens_map.items()))
    return [type(tokenizer).__name__, core, tokenizer.chat_template, special]


def _cache_key(encoder: Encoder, limit: int | None, cache_dir: Path) -> str:
    source = encoder.source
    identity = {
        "format": CACHE_FORMAT,
        "code": [
            inspect.getsource(module)
            for module in (data_records, data_pair_records, data_chat, data_encode)
        ],
        "tokenizer": _tokenizer_identity(encoder.tokenizer),
        "options": {**encoder.options(), "limit": limit},
        "declaration": {
            k: v for k, v in asdict(source).items() if k not in ("name", "files", "notes")
        },
        # the suffix says how the file is read, the name only what it is called
        "files": [
            [Path(file).suffix, _content_hash(Path(file), cache_dir)] for file in source.files
        ],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------------- writing

_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_encoder = encoder


def _encode_in_worker(chunk):
    return _worker_encoder.encode(chunk)


def _chunks(encoder: Encoder, limit: int | None, formats: dict):
    """Lists of (where, format, record); fills formats[file]."""
    items = itertools.chain.from_iterable(
        _file_items(file, encoder, formats) for file in encoder.source.files
    )
    items = itertools.islice(items, limit)
    while chunk := list(itertools.islice(items, CHUNK_RECORDS)):
        yield chunk


def _file_items(file: str, encoder: Encoder, formats: dict):
    for where, record in data_records.read_records(file):
        if file not in formats:
            formats[file] = encoder.format_of(record, where)
        yield where, formats[file], record
    if file not in formats:
        raise ValueError(f"{file}: the file holds no record")


def _encoded_chunks(encoder: Encoder, chunks, workers: int | None):
    """Encoded chunks in the order of the file, whatever the number of processes."""
    if workers is None:
        cpus = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        head = list(itertools.islice(chunks, PARALLEL_FROM_RECORDS // CHUNK_RECORDS))
        workers = 1 if len(head) * CHUNK_RECORDS < PARALLEL_FROM_RECORDS else min(8, cpus)
        chunks = itertools.chain(head, chunks)
    if workers <= 1:
        yield from map(encoder.encode, chunks)
        return
    # spawn: forking a process that has started threads (torch, gloo, CUDA) may hang it
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (encoder,))
    try:
        waiting = deque(
            pool.submit(_encode_in_worker, chunk) for chunk in itertools.islice(chunks, 2 * workers)
        )
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(
                pool.submit(_encode_in_worker, chunk) for chunk in itertools.islice(chunks, 1)
            )
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a tokenising process died at its start or for lack of memory: a script that is not guarded by "
            "`if __name__ == '__main__':` cannot start processes; set preprocessing_num_workers to 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _write_tokens(
    folder: Path, encoder: Encoder, limit: int | None, workers: int | None, progress
) -> None:
    """Tokenises into folder: ids.bin (int32), mask.bin (uint8: is it learned), spans.npy, learned.npy, meta.json.

    Row r of the dataset is the tokens spans[r, 0] to spans[r, 1], not shifted yet; neighbouring rows of joined
    documents share the token at which they meet, as the last target of one and the first input of the next.
    """
    folder.mkdir()
    formats, tallies, lengths, learned, num_records = {}, {}, [], [], 0
    with open(folder / "ids.bin", "wb") as ids_file, open(folder / "mask.bin", "wb") as mask_file:
        for part in _encoded_chunks(encoder, _chunks(encoder, limit, formats), workers):
            part.ids.tofile(ids_file)
            if part.mask is not None:
                part.mask.tofile(mask_file)
            lengths += part.lengths
            learned += part.learned
            num_records += part.records
            for name, (count, first) in part.tallies.items():
                old = tallies.get(name, [0, first])
                tallies[name] = [old[0] + count, old[1]]
            progress(f"{num_records:,} records, {ids_file.tell() // 4:,} tokens")
    stops = np.cumsum(lengths, dtype=np.int64)
    if encoder.joins and len(stops):
        starts = np.arange(0, stops[-1] - 1, encoder.cutoff_len, dtype=np.int64)
        stops = np.minimum(starts + encoder.cutoff_len + 1, stops[-1])
        learned = stops - starts - 1
    else:
        starts = stops - np.asarray(lengths, dtype=np.int64)
    np.save(folder / "spans.npy", np.stack([starts, stops], axis=1))
    np.save(folder / "learned.npy", np.asarray(learned, dtype=np.int64))
    meta = {
        "files": encoder.source.files,
        "formats": [formats.get(file, "not read") for file in encoder.source.files],
        "records": num_records,
        "tallies": tallies,
        "notes": encoder.notes,
        "created": time.time(),
    }
    (folder / "meta.json").write_text(json.dumps(meta))


# ------------------------------------------------------------------------------------------------------------- reading


class TokenShard:
    """One tokenised source, memory-mapped. `shard[r]` is a sample; the process that reads opens the maps.

    lengths, learned: of each sample, inputs and labels that are not IGNORE_INDEX.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.meta = json.loads((self.folder / "meta.json").read_text())
        self.spans = np.load(self.folder / "spans.npy")
        self.lengths = self.spans[:, 1] - self.spans[:, 0] - 1
        self.learned = np.load(self.folder / "learned.npy")
        self._maps = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_maps": None}  # numpy would pickle a map as a copy of the file

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict:
        if self._maps is None:
            mask = self.folder / "mask.bin"
            ids = np.memmap(self.folder / "ids.bin", dtype=np.int32, mode="r")
            self._maps = (
                ids,
                np.memmap(mask, dtype=np.uint8, mode="r") if mask.stat().st_size else None,
            )
        ids, mask = self._maps
        start, stop = self.spans[row]
        tokens = np.array(ids[start:stop], dtype=np.int64)
        labels = tokens[1:].copy()
        if mask is not None:
            labels[mask[start + 1 : stop] == 0] = IGNORE_INDEX
        return {"input_ids": tokens[:-1], "labels": labels}


class PairShard(TokenShard):
    """One tokenised source of pairs: rows 2 r and 2 r + 1 are the chosen and the rejected side of `shard[r]`.

    pair_lengths [n, 2] holds the inputs of both sides; lengths and learned are sums over them.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.pair_lengths = self.lengths.reshape(-1, 2)
        self.lengths = self.pair_lengths.sum(axis=1)
        self.learned = self.learned.reshape(-1, 2).sum(axis=1)

    def __getitem__(self, row: int) -> dict:
        return {
            side: super(PairShard, self).__getitem__(2 * row + i)
            for i, side in enumerate(("chosen", "rejected"))
        }


def load_shard(
    encoder: Encoder,
    limit: int | None,
    workers: int | None,
    cache_dir: Path,
    overwrite: bool = False,
) -> TokenShard:
    """The encoder's source, from the cache or tokenised now: one process of those that share cache_dir writes.

    limit: only the first so many records (None: all). workers: processes that tokenise (None: chosen). overwrite: what
    an earlier run wrote is written anew.
    Raises: ValueError with file and line, in every process that asks.
    """
    folder = cache_dir / "tokens" / _cache_key(encoder, limit, cache_dir)

    def build(temporary, progress):
        _write_tokens(temporary, encoder, limit, workers, progress)

    def written_in_this_run():  # since this process began: perhaps by another rank
        meta = folder / "meta.json"
        return (
            meta.exists()
            and json.loads(meta.read_text())["created"] >= psutil.Process().create_time()
        )

    build_once(
        folder,
        build,
        f"tokenising {encoder.source.name}",
        written_in_this_run if overwrite else None,
    )
    return PairShard(folder) if isinstance(encoder, PairEncoder) else TokenShard(folder)
