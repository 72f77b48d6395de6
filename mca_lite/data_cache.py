"""The token cache: a shard for each dataset as it is tokenised, under a key of all that decides on
its content.

One process of those that share the cache folder tokenises, the others wait. Nothing here is
collective: whoever sees the same file system takes part, from this machine or another.
"""

import hashlib
import inspect
import itertools
import json
import os
import sys
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import psutil

from . import data_chat, data_encode, data_files, data_records, data_shard, data_turns
from .data_build_once import build_once
from .data_encode import Encoder
from .data_shard import Shard, damage, write_shard

CACHE_FORMAT = 3
CHUNK_RECORDS = 500  # records handed to the tokenizer at once
PARALLEL_FROM_RECORDS = 10_000  # below this, starting worker processes takes longer than they save
HASH_DIRECTLY_BELOW_BYTES = 64 << 20

# -- the key ---------------------------------------------------------------------------------------


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
    """sha256 of the file. A large one is read once, and not again until its size or modification
    time changes."""
    stat = path.stat()
    # a file written just now may change again within one tick of its time stamp
    if stat.st_size < HASH_DIRECTLY_BELOW_BYTES or time.time() - stat.st_mtime < 2:
        return _sha256_of_file(path)
    version = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    target = cache_dir / "hashes" / hashlib.sha256(version.encode()).hexdigest()

    def build(temporary: Path, progress) -> None:
        temporary.write_text(_sha256_of_file(path, progress))

    def is_whole() -> bool:  # a machine that died may have left an empty file
        return target.exists() and len(target.read_text()) == 2 * hashlib.sha256().digest_size

    build_once(target, build, f"hashing {path}", is_whole)
    return target.read_text()


def tokenizer_identity(tokenizer) -> list:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    core = (
        backend.to_str()
        if backend is not None
        else json.dumps(sorted(tokenizer.get_vocab().items()))
    )
    special = sorted(map(str, tokenizer.special_tokens_map.items()))
    return [type(tokenizer).__name__, core, tokenizer.chat_template, special]


def _keys(encoder: Encoder, limit: int | None, cache_dir: Path) -> tuple[str, str]:
    """(the name of the shard's folder, what names the data in a checkpoint).

    The first one changes with the code that tokenises, so that no shard is older than its code. The
    second one does not: another comment in a module makes no other data, and a checkpoint that
    lasts longer than this version has to go on.
    """
    spec = encoder.spec
    identity = {
        "tokenizer": tokenizer_identity(encoder.tokenizer),
        "options": {**encoder.options(), "limit": limit},
        "declaration": {
            k: v
            for k, v in asdict(spec).items()
            if k not in ("name", "files", "notes", "sample_by")
        },
        # the suffix says how the file is read, the name only what it is called
        "files": [
            [how_it_is_read(spec, file), _content_hash(Path(file), cache_dir)]
            for file in spec.files
        ],
    }
    modules = (data_files, data_turns, data_records, data_chat, data_encode, data_shard)
    code = {"format": CACHE_FORMAT, "code": [inspect.getsource(module) for module in modules]}
    return _hash(identity | code), _hash(identity)


def how_it_is_read(spec, file: str) -> str:
    kind = data_files.kind_of(file)
    is_whole = spec.sample_by == "document" and kind.removesuffix(".gz") == ".txt"
    return f"{kind} as a whole" if is_whole else kind


def _hash(identity: dict) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


# -- tokenising ----------------------------------------------------------------------------------

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
        _file_items(file, encoder, formats) for file in encoder.spec.files
    )
    items = itertools.islice(items, limit)
    while chunk := list(itertools.islice(items, CHUNK_RECORDS)):
        yield chunk


def _file_items(file: str, encoder: Encoder, formats: dict):
    num_records = 0
    for where, record in data_files.read_records(file, encoder.skips, encoder.spec.sample_by):
        num_records += 1
        if file not in formats and not isinstance(record, ValueError):
            try:
                formats[file] = encoder.format_of(record, where)
            except ValueError as error:
                if not encoder.skips:
                    raise
                record = error
        yield where, formats.get(file, ""), record
    if not num_records:
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
            "a tokenising process died at its start or for lack of memory: a script that is not "
            "guarded by `if __name__ == '__main__':` cannot start processes; set "
            "preprocessing_num_workers to 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# -- the front door --------------------------------------------------------------------------------


def load_shard(
    encoder: Encoder,
    limit: int | None,
    workers: int | None,
    cache_dir: Path,
    overwrite: bool = False,
) -> Shard:
    """The encoder's dataset, from the cache or tokenised now: one process of those that share
    cache_dir writes.

    A shard in the cache that is damaged is tokenised anew, and one line says so. limit: only the
    first so many records (None: all). workers: processes that tokenise (None: chosen). overwrite:
    what an earlier run wrote is written anew.
    Raises: ValueError with file and line, in every process that asks; ValueError where cache_dir
    cannot be written.
    """
    name_of_folder, identity = _keys(encoder, limit, cache_dir)
    folder = cache_dir / "tokens" / name_of_folder

    def build(temporary: Path, progress) -> None:
        if folder.exists() and (found := damage(folder)):
            print(f"{folder}: {found}: tokenising {name} anew", file=sys.stderr, flush=True)
        formats = {}
        chunks = _chunks(encoder, limit, formats)
        meta = {"sources": encoder.spec.files, "formats": formats, "notes": encoder.notes}
        row_length = encoder.cutoff_len + 1 if encoder.joins else None
        parts = _encoded_chunks(encoder, chunks, workers)
        write_shard(temporary, parts, meta, row_length, progress)

    def is_good() -> bool:
        if not folder.exists() or damage(folder):
            return False
        if not overwrite:
            return True
        # what was written since this process began may be another rank's
        created = json.loads((folder / "meta.json").read_text())["created"]
        return created >= psutil.Process().create_time()

    name = encoder.spec.name
    build_once(folder, build, f"tokenising {name}", is_good)
    return Shard(folder, encoder.documents_per_sample, identity)
