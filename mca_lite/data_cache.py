"""The token cache: a shard for each dataset as it is tokenised, under a key of all that decides on
its content.

One process of those that share the cache folder tokenises, the others wait: the operating system's
lock, a temporary folder, one rename. Nothing here is collective: whoever sees the same file system
takes part, from this machine or another.
"""

import contextlib
import errno
import hashlib
import inspect
import itertools
import json
import os
import shutil
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from . import data_chat, data_encode, data_files, data_records, data_shard
from .data_encode import Encoder
from .data_shard import Shard, damage, write_shard
from .files import sync

CACHE_FORMAT = 3
CHUNK_RECORDS = 500  # records handed to the tokenizer at once
PARALLEL_FROM_RECORDS = 10_000  # below this, starting worker processes takes longer than they save
HASH_DIRECTLY_BELOW_BYTES = 64 << 20
POLL_S, SAY_EVERY_S = 0.2, 10.0  # of those who wait for another process

# -- the key ---------------------------------------------------------------------------------------


def cache_folder(data_args) -> Path:
    """cache_dir of DataArguments, else $MCA_LITE_CACHE, else ~/.cache/mca_lite."""
    named = data_args.cache_dir or os.environ.get("MCA_LITE_CACHE")
    return Path(named or "~/.cache/mca_lite").expanduser()


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
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer.to_str()
    else:
        core = json.dumps(sorted(tokenizer.get_vocab().items()))
    special = sorted(map(str, tokenizer.special_tokens_map.items()))
    # not in `core`: whether special tokens in a text are cut like other text
    splits = ["split_special_tokens"] if getattr(tokenizer, "split_special_tokens", False) else []
    return [type(tokenizer).__name__, core, tokenizer.chat_template, special, *splits]


def _keys(encoder: Encoder, cache_dir: Path) -> tuple[str, str]:
    """(the name of the shard's folder, what names the data in a checkpoint).

    The first one changes with the code that tokenises, so that no shard is older than its code. The
    second one does not: another comment in a module makes no other data, and a checkpoint that
    lasts longer than this version has to go on.
    """
    spec = encoder.spec
    identity = {
        "tokenizer": tokenizer_identity(encoder.tokenizer),
        "options": {**encoder.options(), "limit": encoder.limit},
        "declaration": {
            key: getattr(spec, key) for key in ("formatting", "columns", "tags", "num_samples")
        },
        # the suffix says how the file is read, the name only what it is called
        "files": [
            [how_it_is_read(file, encoder), _content_hash(Path(file), cache_dir)]
            for file in spec.files
        ],
    }
    modules = (data_files, data_records, data_chat, data_encode, data_shard)
    code = {"format": CACHE_FORMAT, "code": [inspect.getsource(module) for module in modules]}
    return _hash(identity | code), _hash(identity)


def how_it_is_read(file: str, encoder: Encoder) -> str:
    is_text = data_files.plain_kind_of(file) == ".txt"
    is_whole = is_text and encoder.args.sample_by == "document"
    return data_files.kind_of(file) + (" as a whole" if is_whole else "")


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


def _chunks(records: Iterator) -> Iterator[list]:
    while chunk := list(itertools.islice(records, CHUNK_RECORDS)):
        yield chunk


def _encoded_chunks(encoder: Encoder, chunks, workers: int | None):
    """Encoded chunks in the order of the file, whatever the number of processes."""
    if workers is None:
        cpus = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cpus = len(os.sched_getaffinity(0))
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


# -- one process builds, the others wait ----------------------------------------------------------


def _say(text: str) -> None:
    # One line a machine is enough, whichever of its processes is the one at work.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _read(path: Path) -> str:
    """The text of a file, "" where there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def build_once(target: Path, build, what: str, ready=None) -> None:
    """Make `target` exist: one process runs build(temporary path, progress), the others wait until
    it is renamed.

    The operating system frees the lock when its owner dies, and the next process builds. what: told
    to those who wait. ready: says whether target is good as it is (default: where it exists); if
    not, it is replaced.
    Raises: what build raises, in the process that builds and (ValueError or RuntimeError, the same
    text) in those who wait for it; ValueError where the folder cannot be written.
    """
    ready = ready or target.exists
    if ready():
        return
    error_file = _beside(target, ".error")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The lock's file stays: without it, those who wait and those who come would hold different
        # locks.
        lock, told_before = FileLock(_beside(target, ".lock")), _read(error_file)
        _wait_for(lock, target, what)
    except OSError as error:
        raise _not_writable(target.parent, error) from error
    try:
        told = _read(error_file)
        if ready():  # by the process that we waited for
            return
        if told != told_before:  # it failed, and so should we
            error = json.loads(told)
            raise (ValueError if error["kind"] == "ValueError" else RuntimeError)(error["text"])
        _build_and_rename(target, build, what, ready)
    finally:
        lock.release()


def _wait_for(lock: FileLock, target: Path, what: str) -> None:
    """Take the lock; meanwhile say now and then who holds it, and how far it is."""
    while True:
        try:
            lock.acquire(timeout=SAY_EVERY_S, poll_interval=POLL_S)
            return
        except Timeout:
            _say(f"waiting for {_read(_beside(target, '.progress')) or 'a process'}, {what}")


def _not_writable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"the cache folder {folder} cannot be written ({error.strerror or error}): set cache_dir, "
        "or the environment variable MCA_LITE_CACHE, to a folder that can, with room"
    )


def _build_and_rename(target: Path, build, what: str, ready) -> None:
    """Build beside the target, then rename. The caller holds the lock."""
    host, said = socket.gethostname(), time.monotonic()
    progress_file, error_file = _beside(target, ".progress"), _beside(target, ".error")
    temporary = _beside(target, f".{host}-{os.getpid()}.tmp")

    def write(text: str) -> None:
        progress_file.write_text(f"process {host}:{os.getpid()} ({text})")

    def progress(text: str) -> None:
        nonlocal said
        if time.monotonic() - said >= SAY_EVERY_S:
            said = time.monotonic()
            write(text)
            _say(f"{what}: {text}")

    try:
        # Who left these is dead, since we hold the lock. Where locks do not reach other machines,
        # theirs may be alive.
        for left in target.parent.glob(f"{target.name}.{host}-*.tmp"):
            _remove(left)
        write("starting")
        build(temporary, progress)
        # ready where another machine's process, which locks did not reach, was faster
        if not ready():
            _remove(target)
            os.replace(temporary, target)
            sync(target.parent)
        error_file.unlink(missing_ok=True)
    except Exception as error:
        if isinstance(error, OSError) and _is_of(target.parent, error):
            error = _not_writable(target.parent, error)
        told = {"kind": type(error).__name__, "text": str(error), "id": uuid.uuid4().hex}
        with contextlib.suppress(OSError):  # a full disk takes no file
            error_file.write_text(json.dumps(told))
        raise error
    finally:
        progress_file.unlink(missing_ok=True)
        _remove(temporary)


def _is_of(folder: Path, error: OSError) -> bool:
    """Whether an error comes from writing to the folder, and not from reading data."""
    is_inside = str(error.filename or "").startswith(str(folder))
    return is_inside or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


# -- the front door --------------------------------------------------------------------------------


def load_shard(encoder: Encoder) -> Shard:
    """The encoder's dataset, from the cache or tokenised now: one process of those that share
    cache_dir writes.

    A shard in the cache that is damaged is tokenised anew, and one line says so; so is one that an
    earlier run wrote, with overwrite_cache.
    Raises: ValueError with file and line, in every process that asks; ValueError where cache_dir
    cannot be written.
    """
    args, cache_dir = encoder.args, cache_folder(encoder.args)
    name_of_folder, identity = _keys(encoder, cache_dir)
    folder = cache_dir / "tokens" / name_of_folder

    def build(temporary: Path, progress) -> None:
        if folder.exists() and (found := damage(folder)):
            print(f"{folder}: {found}: tokenising {name} anew", file=sys.stderr, flush=True)
        formats = {}
        records = encoder.records(formats, refuse_empty=True)
        chunks = _chunks(record for record, _ in records)
        meta = {"sources": encoder.spec.files, "formats": formats, "notes": encoder.notes}
        row_length = args.cutoff_len + 1 if encoder.joins else None
        parts = _encoded_chunks(encoder, chunks, args.preprocessing_num_workers)
        write_shard(temporary, parts, meta, row_length, progress)

    def is_good() -> bool:
        if not folder.exists() or damage(folder):
            return False
        if not args.overwrite_cache:
            return True
        # what was written since this process began may be another rank's
        created = json.loads((folder / "meta.json").read_text())["created"]
        return created >= psutil.Process().create_time()

    name = encoder.spec.name
    build_once(folder, build, f"tokenising {name}", is_good)
    return Shard(folder, encoder.documents_per_sample, identity)
