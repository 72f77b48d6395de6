"""The token cache: a shard for each dataset as it is tokenised, under a key of all that decides on
its content. A shard is a folder of files that are memory-mapped:

    ids.bin       int32, the tokens of all documents, one after another, not shifted
    mask.bin      uint8, of each token whether it is learned; not there where all are
    spans.bin     int64 [documents, 2], first and last token + 1 of each document
    learned.bin   int64 [documents], labels of each that are not IGNORE_INDEX
    meta.json     the report's facts, and size and CRC-32 of each of the other files

A sample is `documents_per_sample` documents in turn. No rank holds the data, and all ranks of a
machine share it. One process of those that share the cache folder tokenises, the others wait: the
operating system's lock, a temporary folder, one rename. Nothing here is collective: whoever sees
the same file system takes part, from this machine or another.
"""

import contextlib
import dataclasses
import errno
import hashlib
import inspect
import itertools
import json
import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
import zlib
from pathlib import Path

import numpy as np
import psutil
from filelock import FileLock, Timeout

from . import data_chat, data_encode, data_files, data_records
from .constants import IGNORE_INDEX
from .data_encode import Encoder, Reader, Tally, encode_all, num_learned
from .files import checksum, sync, write_json

CACHE_FORMAT = 3
HASH_DIRECTLY_BELOW_BYTES = 64 << 20
POLL_S, SAY_EVERY_S = 0.2, 10.0  # of those who wait for another process
_META = {"sources", "formats", "created", "checksums"}
_META |= {field.name for field in dataclasses.fields(Tally)}
_FILES = ("ids.bin", "mask.bin", "spans.bin", "learned.bin")
_whole: set[tuple[Path, bytes]] = set()  # (folder, its meta.json) of what this process has checked


def load_shard(reader: Reader, encoder: Encoder, data_args) -> "Shard":
    """The reader's dataset, from the cache or tokenised now: one process of those that share
    cache_dir writes.

    A shard in the cache that is damaged is tokenised anew, and one line says so; so is one that an
    earlier run wrote, with overwrite_cache.
    Raises: ValueError with file and line, in every process that asks; ValueError where cache_dir
    cannot be written.
    """
    name, cache_dir = reader.spec.name, cache_folder(data_args)
    key, identity = _keys(reader, encoder, cache_dir)
    folder = cache_dir / "tokens" / key

    def build(temporary: Path, progress) -> None:
        if folder.exists() and (found := damage(folder)):
            print(f"{folder}: {found}: tokenising {name} anew", file=sys.stderr, flush=True)
        parts = encode_all(reader, encoder, data_args.preprocessing_num_workers)
        meta = {"sources": list(reader.spec.files), "formats": reader.formats}
        row_length = data_args.cutoff_len + 1 if encoder.joins else None
        write_shard(temporary, parts, meta, row_length, progress)

    def is_good() -> bool:
        if not folder.exists() or damage(folder):
            return False
        if not data_args.overwrite_cache:
            return True
        # what was written since this process began may be another rank's
        created = json.loads((folder / "meta.json").read_text())["created"]
        return created >= psutil.Process().create_time()

    build_once(folder, build, f"tokenising {name}", is_good)
    return Shard(folder, encoder.documents_per_sample, identity)


# -- the key ---------------------------------------------------------------------------------------


def cache_folder(data_args) -> Path:
    """cache_dir of DataArguments, else $MCA_LITE_CACHE, else ~/.cache/mca_lite."""
    named = data_args.cache_dir or os.environ.get("MCA_LITE_CACHE")
    return Path(named or "~/.cache/mca_lite").expanduser()


def tokenizer_identity(tokenizer) -> list:
    """What names a tokenizer: it writes the same tokens as another one that has the same."""
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer.to_str()
    else:
        core = json.dumps([sorted(tokenizer.get_vocab().items()), *_slow_identity(tokenizer)])
    special = sorted(map(str, tokenizer.special_tokens_map.items()))
    # not in `core`: whether special tokens in a text are cut like other text
    splits = ["split_special_tokens"] if getattr(tokenizer, "split_special_tokens", False) else []
    return [type(tokenizer).__name__, core, tokenizer.chat_template, special, *splits]


def _slow_identity(tokenizer) -> list:
    """What names a tokenizer in Python beside its vocabulary: the files that it would write, whose
    merges decide how a text is cut, and a text with the special tokens that it adds."""
    files: list[str] = []
    # suppressed: transformers' error of a tokenizer that has no files
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(NotImplementedError):
        for path in tokenizer.save_vocabulary(folder) or ():
            files.append(hashlib.sha256(Path(path).read_bytes()).hexdigest())
    return [*files, tokenizer.encode(""), tokenizer.encode(" Ab  c\n")]


def _keys(reader: Reader, encoder: Encoder, cache_dir: Path) -> tuple[str, str]:
    """(the name of the shard's folder, what names the data in a checkpoint).

    The first one changes with the code that tokenises, so that no shard is older than its code. The
    second one does not: another comment in a module makes no other data, and a checkpoint that
    lasts longer than this version has to go on.
    """
    spec, declared = reader.spec, ("formatting", "columns", "tags", "num_samples")
    identity = {
        "tokenizer": tokenizer_identity(encoder.tokenizer),
        "options": {**encoder.options, "limit": reader.limit},
        "declaration": {key: getattr(spec, key) for key in declared},
        # the kind says how the file is read, the name only what it is called
        "files": [
            [kind, _content_hash(Path(file), cache_dir)] for file, kind in spec.files.items()
        ],
    }
    parts = (data_files, data_records, data_chat, data_encode, write_shard, _spans)
    code = {"format": CACHE_FORMAT, "code": [inspect.getsource(part) for part in parts]}
    facts = [json.dumps(of, sort_keys=True, default=str) for of in (identity | code, identity)]
    key, name = (hashlib.sha256(text.encode()).hexdigest() for text in facts)
    return key, name


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


def _sha256_of_file(path: Path, progress=lambda text: None) -> str:
    digest, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(8 << 20):
            digest.update(block)
            done += len(block)
            progress(f"{done / 2**30:.1f} GiB")
    return digest.hexdigest()


# -- one process builds, the others wait -----------------------------------------------------------


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
        # The processes of this machine that left these are dead, since we hold the lock. Those of
        # other machines may be alive, where locks do not reach them.
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


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def _is_of(folder: Path, error: OSError) -> bool:
    """Whether an error comes from writing to the folder, and not from reading data."""
    is_inside = str(error.filename or "").startswith(str(folder))
    return is_inside or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _not_writable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"the cache folder {folder} cannot be written ({error.strerror or error}): set cache_dir, "
        "or the environment variable MCA_LITE_CACHE, to a folder that can, with room"
    )


# -- a shard's files -------------------------------------------------------------------------------


def write_shard(folder: Path, parts, meta: dict, row_length: int | None, progress) -> None:
    """Write a new folder with the documents of `parts`, which is on the disk when the call returns.

    parts: what data_encode.encode_all yields. meta: "sources" and "formats" of the report, complete
    when the parts are used up. row_length: join the documents and cut them into rows of so many
    tokens (None: leave them); neighbours share the token at which they meet, as the last target of
    one and the first input of the next. progress: is told how far it is.
    """
    folder.mkdir()
    checksums, lengths, learned, tally = {name: [0, 0] for name in _FILES}, [], [], Tally()
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in _FILES}

        def write(name: str, array: np.ndarray) -> None:
            data, (size, crc) = array.tobytes(), checksums[name]
            files[name].write(data)
            checksums[name] = [size + len(data), zlib.crc32(data, crc)]

        for samples, tally in parts:
            for ids, mask in itertools.chain(*samples):
                write("ids.bin", ids)
                if mask is not None:
                    write("mask.bin", mask)
                lengths.append(len(ids))
                learned.append(num_learned(ids, mask))
            progress(f"{tally.records:,} records, {checksums['ids.bin'][0] // 4:,} tokens")
        spans = _spans(np.array(lengths, dtype=np.int64), row_length)
        if row_length is not None:
            learned = spans[:, 1] - spans[:, 0] - 1
        write("spans.bin", spans)
        write("learned.bin", np.array(learned, dtype=np.int64))
    tally.check()
    if checksums["mask.bin"][0] == 0:
        (folder / "mask.bin").unlink()
        del checksums["mask.bin"]
    for name in checksums:
        sync(folder / name)
    meta = {**meta, **dataclasses.asdict(tally), "created": time.time(), "checksums": checksums}
    write_json(folder / "meta.json", meta)
    sync(folder)


def _spans(lengths: np.ndarray, row_length: int | None) -> np.ndarray:
    """int64 [documents, 2]: where each begins and ends in the tokens of all; of rows of so many
    tokens where they are joined."""
    stops = lengths.cumsum()
    starts = stops - lengths
    if row_length is not None and len(stops):
        starts = np.arange(0, stops[-1] - 1, row_length - 1)
        stops = np.minimum(starts + row_length, stops[-1])
    return np.stack([starts, stops], axis=1)


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
        self.folder, self.identity = folder, identity
        self.meta = json.loads((folder / "meta.json").read_text())
        spans = np.fromfile(folder / "spans.bin", dtype=np.int64)
        learned = np.fromfile(folder / "learned.bin", dtype=np.int64)
        self.spans = spans.reshape(-1, documents_per_sample, 2)
        self.document_lengths = self.spans[..., 1] - self.spans[..., 0] - 1
        self.learned = learned.reshape(-1, documents_per_sample).sum(axis=1)
        self._maps = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_maps": None}  # numpy would pickle a map as a copy of the file

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, row: int) -> list[dict]:
        ids, mask = self.maps()
        return [
            shifted(ids[start:stop], None if mask is None else mask[start:stop])
            for start, stop in self.spans[row]
        ]

    def maps(self) -> tuple[np.ndarray, np.ndarray | None]:
        """(tokens of all documents one after another, whether each is learned; None: all are)."""
        if self._maps is None:
            ids = np.memmap(self.folder / "ids.bin", dtype=np.int32, mode="r")
            mask = None
            if "mask.bin" in self.meta["checksums"]:
                mask = np.memmap(self.folder / "mask.bin", dtype=np.uint8, mode="r")
            self._maps = ids, mask
        return self._maps


def shifted(ids: np.ndarray, mask: np.ndarray | None) -> dict:
    """{"input_ids", "labels"} int64 [n - 1] of n tokens; mask: 1 for those that are learned, None:
    all are."""
    tokens = np.array(ids, dtype=np.int64)
    labels = tokens[1:].copy()
    if mask is not None:
        labels[mask[1:] == 0] = IGNORE_INDEX
    return {"input_ids": tokens[:-1], "labels": labels}
