"""From files to micro-batches: the token cache, datasets and their mixing, the collator, who gets which sample when.

Letters: b samples of a micro-batch, s positions. Samples are shifted already: labels[t] is the token that position t
has to predict, or IGNORE_INDEX. Nothing here talks to other ranks: every rank calls the same and gets the same.
"""

import hashlib
import inspect
import itertools
import json
import math
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from . import records
from .constants import IGNORE_INDEX
from .records import Encoder, Source

FILLER = -1  # a sample index that stands for "no sample left": collated like sample 0, without labels

CACHE_FORMAT = 1
CHUNK_RECORDS = 500  # records handed to the tokenizer at once
PARALLEL_FROM_RECORDS = 10_000  # below this, starting worker processes takes longer than they save
HASH_DIRECTLY_BELOW_BYTES = 64 << 20
POLL_S, REFRESH_S, STALE_S, SAY_EVERY_S = 0.5, 5.0, 60.0, 10.0


# ---------------------------------------------------------------------------------------------- built by one process


def _say(text: str) -> None:
    # One line a node is enough, whichever of its processes is the one at work.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _replace_text(path: Path, text: str) -> None:
    temporary = _beside(path, f".{uuid.uuid4().hex}")
    temporary.write_text(text)
    os.replace(temporary, path)


class _Lock:
    """A lock file that holds host:pid:nonce and is touched every REFRESH_S while its owner lives."""

    def __init__(self, path: Path):
        self.path = path
        self.token = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}"
        self._done = threading.Event()

    def acquire(self) -> bool:
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w") as file:
            file.write(self.token)
        threading.Thread(target=self._refresh, daemon=True).start()
        return True

    def _refresh(self) -> None:
        while not self._done.wait(REFRESH_S):
            try:
                os.utime(self.path)
            except FileNotFoundError:  # taken over by a process that thought us dead: both write the same, one wins
                return

    def release(self) -> None:
        self._done.set()
        try:
            if self.path.read_text() == self.token:
                self.path.unlink()
        except FileNotFoundError:
            pass


class _Waiter:
    """What a process knows about the writer that it waits for."""

    def __init__(self, target: Path, what: str):
        self.target, self.what = target, what
        self.lock = _beside(target, ".lock")
        self.token, self.seen = "", None
        self.changed = self.said = time.monotonic()

    def check(self) -> None:
        """Raises the writer's error, removes a dead writer's lock, prints the progress now and then."""
        self._raise_writers_error()
        try:
            # Reading before stat makes a network file system look at the server instead of its cache.
            seen = (self.lock.read_text(), self.lock.stat().st_mtime_ns)
        except FileNotFoundError:
            return
        now = time.monotonic()
        if seen != self.seen:  # our clock, not the file's: clocks of two hosts differ
            self.seen, self.changed = seen, now
        self.token = seen[0] or self.token
        if now - self.changed > STALE_S or self._owner_is_gone():
            self.lock.unlink(missing_ok=True)
        elif now - self.said >= SAY_EVERY_S:
            self.said = now
            try:
                state = _beside(self.target, ".progress").read_text()
            except FileNotFoundError:
                state = "starting"
            _say(f"waiting for process {self.token.rpartition(':')[0]}, {self.what}: {state}")

    def _owner_is_gone(self) -> bool:
        host, _, rest = self.token.partition(":")
        return bool(rest) and host == socket.gethostname() and not psutil.pid_exists(int(rest.partition(":")[0]))

    def _raise_writers_error(self) -> None:
        try:
            error = json.loads(_beside(self.target, ".error").read_text())
        except FileNotFoundError:
            return
        if error["token"] == self.token:  # an error of an earlier run is not ours
            raise (ValueError if error["kind"] == "ValueError" else RuntimeError)(error["text"])


def _build_once(target: Path, build, what: str, ready=None) -> None:
    """Makes `target` exist: one process runs build(temporary_path, progress), the others poll until it is renamed.

    ready: says whether target is good as it is (default: where it exists); if not, it is replaced.
    Raises: what build raises, in the writer and (ValueError or RuntimeError, the same text) in those who wait.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    waiter, ready = _Waiter(target, what), ready or target.exists
    while not ready():
        lock = _Lock(_beside(target, ".lock"))
        if not lock.acquire():
            waiter.check()
            time.sleep(POLL_S)
            continue
        try:
            if not ready():  # somebody may have finished just before we got the lock
                shutil.rmtree(target, ignore_errors=True)
                _write(target, build, what)
        except Exception as error:
            report = {"token": lock.token, "kind": type(error).__name__, "text": str(error)}
            _replace_text(_beside(target, ".error"), json.dumps(report))
            raise
        finally:
            lock.release()


def _write(target: Path, build, what: str) -> None:
    temporary, progress_file = _beside(target, f".{uuid.uuid4().hex}.tmp"), _beside(target, ".progress")
    last = {"wrote": 0.0, "said": time.monotonic()}

    def progress(text: str) -> None:
        now = time.monotonic()
        if now - last["wrote"] >= 2:
            last["wrote"] = now
            _replace_text(progress_file, text)
        if now - last["said"] >= SAY_EVERY_S:
            last["said"] = now
            _say(f"{what}: {text}")

    try:
        build(temporary, progress)
        os.rename(temporary, target)
        for left_by_a_dead_writer in target.parent.glob(f"{target.name}.*.tmp"):
            shutil.rmtree(left_by_a_dead_writer, ignore_errors=True)
        _beside(target, ".error").unlink(missing_ok=True)
    except OSError:
        if not target.exists():  # otherwise somebody who took over was faster: the content is the same
            raise
    finally:
        progress_file.unlink(missing_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------ the cache key


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
        return _sha256_of_file(path)  # a file written just now may change again within one tick of its time stamp
    name = hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()
    target = cache_dir / "hashes" / name
    _build_once(target, lambda tmp, progress: tmp.write_text(_sha256_of_file(path, progress)), f"hashing {path}")
    return target.read_text()


def _tokenizer_identity(tokenizer) -> list:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    core = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    special = sorted(map(str, tokenizer.special_tokens_map.items()))
    return [type(tokenizer).__name__, core, tokenizer.chat_template, special]


def _cache_key(source: Source, options: dict, tokenizer, cache_dir: Path) -> str:
    identity = {
        "format": CACHE_FORMAT,
        "code": inspect.getsource(records),
        "tokenizer": _tokenizer_identity(tokenizer),
        "options": options,
        "declaration": {k: v for k, v in asdict(source).items() if k not in ("name", "files", "notes")},
        # the suffix says how the file is read, the name only what it is called
        "files": [[Path(file).suffix, _content_hash(Path(file), cache_dir)] for file in source.files],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------ writing the cache

_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_encoder = encoder


def _encode_in_worker(chunk):
    return _worker_encoder.encode(chunk)


def _chunks(source: Source, stage: str, limit: int | None, formats: dict):
    """Lists of (where, format, record); fills formats[file]."""
    items = itertools.chain.from_iterable(_file_items(file, source, stage, formats) for file in source.files)
    items = itertools.islice(items, limit)
    while chunk := list(itertools.islice(items, CHUNK_RECORDS)):
        yield chunk


def _file_items(file: str, source: Source, stage: str, formats: dict):
    for where, record in records.read_records(file):
        if file not in formats:
            formats[file] = records.detect_format(record, source, stage, where)
        yield where, formats[file], record
    if file not in formats:
        raise ValueError(f"{file}: the file holds no record")


def _encoded_chunks(encoder: Encoder, chunks, workers: int | None):
    """Encoded chunks in the order of the file, whatever the number of processes."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chunks = iter(chunks)
    if workers is None:
        head = list(itertools.islice(chunks, PARALLEL_FROM_RECORDS // CHUNK_RECORDS))
        workers = 1 if len(head) * CHUNK_RECORDS < PARALLEL_FROM_RECORDS else min(8, cpus)
        chunks = itertools.chain(head, chunks)
    if workers <= 1:
        yield from map(encoder.encode, chunks)
        return
    # spawn: forking a process that has started threads (torch, gloo, CUDA) may hang it
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (encoder,))
    try:
        waiting = deque(pool.submit(_encode_in_worker, chunk) for chunk in itertools.islice(chunks, 2 * workers))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(_encode_in_worker, chunk) for chunk in itertools.islice(chunks, 1))
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a tokenising process died at its start or for lack of memory: a script that is not guarded by "
            "`if __name__ == '__main__':` cannot start processes; set preprocessing_num_workers to 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _write_tokens(folder: Path, encoder: Encoder, source: Source, limit, workers, progress) -> None:
    """Tokenises a source into folder: ids.bin (int32), mask.bin (uint8: is it learned), spans.npy, meta.json.

    Row r of the dataset is the tokens spans[r, 0] to spans[r, 1], not shifted yet; neighbouring rows of joined
    documents share the token at which they meet, as the last target of one and the first input of the next.
    """
    folder.mkdir()
    formats, lengths, learned = {}, [], []
    tallies = {"records": 0}
    with open(folder / "ids.bin", "wb") as ids_file, open(folder / "mask.bin", "wb") as mask_file:
        chunks = _chunks(source, encoder.stage, limit, formats)
        for part in _encoded_chunks(encoder, chunks, workers):
            part.ids.tofile(ids_file)
            if part.mask is not None:
                part.mask.tofile(mask_file)
            lengths += part.lengths
            learned += part.learned
            tallies["records"] += part.records
            for name, (count, first) in part.tallies.items():
                old = tallies.get(name, [0, first])
                tallies[name] = [old[0] + count, old[1]]
            progress(f"{tallies['records']:,} records, {ids_file.tell() // 4:,} tokens")
    stops = np.cumsum(lengths, dtype=np.int64)
    if encoder.joins and len(stops):
        starts = np.arange(0, stops[-1] - 1, encoder.cutoff_len, dtype=np.int64)
        stops = np.minimum(starts + encoder.cutoff_len + 1, stops[-1])
        learned = stops - starts - 1
    else:
        starts = stops - np.asarray(lengths, dtype=np.int64)
    np.save(folder / "spans.npy", np.stack([starts, stops], axis=1))
    np.save(folder / "learned.npy", np.asarray(learned, dtype=np.int64))
    forms = [formats.get(file, "not read") for file in source.files]
    meta = {"files": source.files, "formats": forms, "tallies": tallies, "notes": encoder.notes, "created": time.time()}
    (folder / "meta.json").write_text(json.dumps(meta))


# -------------------------------------------------------------------------------------------------------- the dataset


class TokenShard:
    """One tokenised source, memory-mapped. `shard[r]` is a sample; the process that reads opens the maps."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.meta = json.loads((self.folder / "meta.json").read_text())
        self.spans = np.load(self.folder / "spans.npy")
        self.learned = np.load(self.folder / "learned.npy")
        self._maps = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_maps": None}  # numpy would pickle a map as a copy of the file

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, row: int) -> dict:
        if self._maps is None:
            mask = self.folder / "mask.bin"
            ids = np.memmap(self.folder / "ids.bin", dtype=np.int32, mode="r")
            self._maps = ids, np.memmap(mask, dtype=np.uint8, mode="r") if mask.stat().st_size else None
        ids, mask = self._maps
        start, stop = self.spans[row]
        tokens = np.array(ids[start:stop], dtype=np.int64)
        labels = tokens[1:].copy()
        if mask is not None:
            labels[mask[start + 1 : stop] == 0] = IGNORE_INDEX
        return {"input_ids": tokens[:-1], "labels": labels}


class TokenDataset(Dataset):
    """Map-style: `dataset[i]` is {"input_ids": int64 [n], "labels": int64 [n]}, read from memory-mapped files.

    `lengths` holds every n; `num_tokens` and `num_trained_tokens` count inputs, and labels that are not IGNORE_INDEX.
    """

    def __init__(self, shards: list[TokenShard], index: np.ndarray | None = None):
        self.shards = list(shards)
        self._starts = np.cumsum([0, *(len(shard) for shard in self.shards)])
        self.index = np.arange(self._starts[-1]) if index is None else np.asarray(index, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> dict:
        row = self.index[i]
        shard = np.searchsorted(self._starts, row, side="right") - 1
        return self.shards[shard][row - self._starts[shard]]

    def _gather(self, of_shard) -> np.ndarray:
        return np.concatenate([of_shard(shard) for shard in self.shards])[self.index]

    @property
    def lengths(self) -> np.ndarray:
        return self._gather(lambda shard: shard.spans[:, 1] - shard.spans[:, 0] - 1)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_trained_tokens(self) -> int:
        return int(self._gather(lambda shard: shard.learned).sum())

    def subset(self, index) -> "TokenDataset":
        """The samples at these positions, in this order; positions may repeat."""
        return TokenDataset(self.shards, self.index[np.asarray(index, dtype=np.int64)])

    @classmethod
    def concat(cls, datasets: list["TokenDataset"]) -> "TokenDataset":
        """The datasets one after another."""
        shards = [shard for dataset in datasets for shard in dataset.shards]
        starts = np.cumsum([0, *(dataset._starts[-1] for dataset in datasets)])
        return cls(shards, np.concatenate([d.index + start for d, start in zip(datasets, starts, strict=False)]))


def split_off(dataset: TokenDataset, val_size: float, seed: int) -> tuple[TokenDataset, TokenDataset]:
    """(train, eval): val_size samples (a fraction below 1, else a count), a seeded choice; both keep their order."""
    count = round(len(dataset) * val_size) if val_size < 1 else int(val_size)
    count = max(count, 1)
    if count >= len(dataset):
        raise ValueError(
            f"val_size {val_size} takes {count} of {len(dataset)} samples and leaves none to train on: set it lower"
        )
    order = np.random.default_rng([seed, len(dataset)]).permutation(len(dataset))
    return dataset.subset(np.sort(order[count:])), dataset.subset(np.sort(order[:count]))


def mix(dataset: TokenDataset, weights: list[float], seed: int) -> tuple[TokenDataset, list[str]]:
    """(dataset, lines for the report): as many samples as before, the shards in the proportions of the weights.

    A shard that is too small repeats, one that is too large is subsampled (the same choice in every epoch). The shards
    are spread evenly over the result, so that the proportions hold without shuffling too.
    Raises: ValueError for weights that are not one positive number a shard.
    """
    if len(weights) != len(dataset.shards) or min(weights) <= 0:
        raise ValueError(
            f"mix_weights {weights}: expected one number above 0 for each of the {len(dataset.shards)} datasets"
        )
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * len(dataset)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: len(dataset) - counts.sum()]] += 1  # largest remainders
    rows, places, lines = [], [], []
    shard_of = np.searchsorted(dataset._starts, dataset.index, side="right") - 1
    for number, count in enumerate(counts.tolist()):
        own = np.flatnonzero(shard_of == number)
        if not len(own):
            raise ValueError(f"dataset {number + 1} of {len(weights)} has no sample left to mix: lower val_size")
        repeats, rest = divmod(count, len(own))
        extra = np.sort(np.random.default_rng([seed, number]).permutation(len(own))[:rest])
        rows += [np.tile(own, repeats), own[extra]]
        places.append((np.arange(count) + 0.5) / max(count, 1))
        lines.append(f"mix: {count:,} samples an epoch from the {len(own):,} of dataset {number + 1}")
    order = np.argsort(np.concatenate(places), kind="stable")
    return dataset.subset(np.concatenate(rows)[order]), lines


# ------------------------------------------------------------------------------------------------------ the front door


@dataclass
class DatasetBundle:
    """What load_datasets returns. report: lines to print on one rank."""

    train: TokenDataset | None
    eval: TokenDataset | None
    report: list[str] = field(default_factory=list)


class _Loader:
    """Turns dataset entries into TokenDatasets with one set of options, and keeps the lines of the report."""

    def __init__(self, data_args, stage: str, tokenizer):
        if data_args.train_on_prompt and data_args.mask_history:
            raise ValueError("train_on_prompt trains every token, mask_history only the last turn: set one of them")
        self.args, self.stage, self.tokenizer = data_args, stage, tokenizer
        self.packing = data_args.packing if data_args.packing is not None else stage == "pt"
        self.cache_dir = Path(data_args.cache_dir or default_cache_dir()).expanduser()
        self.report: list[str] = []

    def load(self, entries) -> list[TokenDataset]:
        entries = [entries] if isinstance(entries, str) else entries
        sources = records.resolve(entries, self.args.dataset_dir)
        return [self._load_source(source) for source in sources]

    def _load_source(self, source: Source) -> TokenDataset:
        args = self.args
        limit = min((n for n in (args.max_samples, source.num_samples) if n is not None), default=None)
        encoder = Encoder(
            self.tokenizer,
            source,
            self.stage,
            cutoff_len=args.cutoff_len,
            joins=self.packing and self.stage == "pt",
            train_on_prompt=args.train_on_prompt,
            mask_history=args.mask_history,
            default_system=args.default_system,
        )
        options = {**encoder.options(), "limit": limit}
        folder = self.cache_dir / "tokens" / _cache_key(source, options, self.tokenizer, self.cache_dir)

        def build(temporary, progress):
            _write_tokens(temporary, encoder, source, limit, args.preprocessing_num_workers, progress)

        def written_in_this_run():  # since this process began: perhaps by another rank
            meta = folder / "meta.json"
            return meta.exists() and json.loads(meta.read_text())["created"] >= psutil.Process().create_time()

        ready = written_in_this_run if args.overwrite_cache else None
        _build_once(folder, build, f"tokenising {source.name}", ready)
        shard = TokenShard(folder)
        dataset = TokenDataset([shard])
        self._describe(source, shard, dataset)
        if not len(dataset):
            raise ValueError("\n".join([f"{source.name}: no sample is left to train on", *self.report]))
        return dataset

    def _describe(self, source: Source, shard: TokenShard, dataset: TokenDataset) -> None:
        meta, trained, tokens = shard.meta, dataset.num_trained_tokens, dataset.num_tokens
        # The cache knows a file by its content: it may have had another name when it was written.
        names = dict(zip(meta["files"], source.files, strict=True))
        for file, form in zip(source.files, meta["formats"], strict=True):
            self.report.append(f"{file}: {form} records")
        count = meta["tallies"].pop("records")
        line = f"{source.name}: {count:,} records -> {len(dataset):,} samples, {tokens:,} tokens"
        if len(dataset):
            line += f" ({100 * trained / max(tokens, 1):.1f} % trained), longest {dataset.lengths.max():,}"
        self.report.append(line)
        self.report += [f"  note: {note}" for note in source.notes + meta["notes"]]
        for what, (count, first) in meta["tallies"].items():
            file, _, line = first.rpartition(":")
            self.report.append(f"  warning: {count:,} {what}, the first at {names.get(file, file)}:{line}")
        if len(dataset):
            self.report.append(f"  first sample, trained tokens in «»: {show_sample(dataset[0], self.tokenizer)}")


def show_sample(sample: dict, tokenizer, max_chars: int = 600) -> str:
    """The sample decoded, with «» round what carries loss; long ones are cut in the middle."""
    tokens = np.append(sample["input_ids"], sample["labels"][-1])
    trained = np.append(False, sample["labels"] != IGNORE_INDEX)
    if not trained[-1]:
        tokens, trained = tokens[:-1], trained[:-1]  # nothing predicts the last token: the sample does not hold it
    borders = np.flatnonzero(np.diff(trained)) + 1
    runs = np.split(np.arange(len(tokens)), borders)
    texts = [(tokenizer.decode(tokens[run].tolist()), trained[run[0]]) for run in runs]
    text = "".join(f"«{piece}»" if is_trained else piece for piece, is_trained in texts)
    half = max_chars // 2
    return repr(text if len(text) <= max_chars else f"{text[:half]} ... {text[-half:]}")


def load_datasets(data_args, stage: str, tokenizer, seed: int = 42) -> DatasetBundle:
    """Returns the datasets of a run, tokenised or from the cache, with the lines that describe them.

    data_args: arguments.DataArguments; stage: "pt" or "sft". Every rank may call it: one process of those that share
    cache_dir writes, the others poll; nothing collective happens. The split of val_size and the mixing depend on the
    seed and the files alone.
    Raises: ValueError with file and line for input that cannot be used.
    """
    if stage not in ("pt", "sft"):
        raise ValueError(f"stage {stage!r}: expected pt or sft")
    if not data_args.dataset and not data_args.eval_dataset:
        raise ValueError("no data: set dataset to a file, several files, or names in dataset_dir/dataset_info.json")
    loader = _Loader(data_args, stage, tokenizer)
    train = evaluation = None
    if data_args.dataset:
        train = TokenDataset.concat(loader.load(data_args.dataset))
        if data_args.val_size:
            train, evaluation = split_off(train, data_args.val_size, seed)
        if data_args.mix_weights:
            train, lines = mix(train, data_args.mix_weights, seed)
            loader.report += lines
    if data_args.eval_dataset:
        if evaluation is not None:
            raise ValueError("val_size and eval_dataset both name the evaluation data: set one of them")
        evaluation = TokenDataset.concat(loader.load(data_args.eval_dataset))
    for name, dataset in (("train", train), ("eval", evaluation)):
        if dataset is not None:
            loader.report.append(f"{name}: {len(dataset):,} samples, {dataset.num_tokens:,} tokens an epoch")
    return DatasetBundle(train, evaluation, loader.report)


# ------------------------------------------------------------------------------------------------------ micro-batches


class Collator:
    """Samples -> {"input_ids", "labels", "attention_mask"}, int64 [b, s], padded on the right.

    s is the longest sample rounded up to a multiple of pad_to_multiple_of, or always max_length (rounded up) where one
    is given. Padding has label IGNORE_INDEX and attention_mask 0 (1: a token).
    Raises: ValueError for a sample over max_length.
    """

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int = 1, max_length: int | None = None):
        self.pad_token_id, self.pad_to_multiple_of, self.max_length = pad_token_id, pad_to_multiple_of, max_length

    def __call__(self, samples: list[dict]) -> dict[str, torch.Tensor]:
        lengths = [len(sample["input_ids"]) for sample in samples]
        if self.max_length is not None and max(lengths) > self.max_length:
            raise ValueError(
                f"a sample of {max(lengths)} tokens is over max_length {self.max_length}: set cutoff_len to it"
            )
        size = self.max_length or max(lengths)
        shape = len(samples), math.ceil(size / self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id, dtype=torch.int64),
            "labels": torch.full(shape, IGNORE_INDEX, dtype=torch.int64),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
        }
        for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
            batch["input_ids"][row, :length] = torch.as_tensor(sample["input_ids"], dtype=torch.int64)
            batch["labels"][row, :length] = torch.as_tensor(sample["labels"], dtype=torch.int64)
            batch["attention_mask"][row, :length] = 1
        return batch


class BatchPlan:
    """Which samples this data parallel rank takes in which micro-batch. Arithmetic only.

    Step i of an epoch takes samples order[i * G] to order[(i + 1) * G], G = micro_batch_size * accumulation * dp_size;
    micro-batch m of rank r takes those from (m * dp_size + r) * micro_batch_size on. The samples of a step are thus the
    same in all layouts with the same G. The last step of an epoch has only the micro-batches that it needs, as many on
    every rank; where samples are missing it has FILLER.
    """

    def __init__(
        self,
        num_samples: int,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        shuffle: bool = True,
    ):
        if num_samples < 1:
            raise ValueError(f"the dataset has {num_samples} samples: expected at least one")
        if min(micro_batch_size, gradient_accumulation_steps, dp_size) < 1 or not 0 <= dp_rank < dp_size:
            raise ValueError(
                f"micro batch {micro_batch_size}, accumulation {gradient_accumulation_steps}, data parallel rank "
                f"{dp_rank} of {dp_size}: expected sizes of at least 1 and a rank below dp_size"
            )
        self.num_samples, self.micro_batch_size, self.seed, self.shuffle = num_samples, micro_batch_size, seed, shuffle
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.global_batch_size = micro_batch_size * gradient_accumulation_steps * dp_size
        self.steps_per_epoch = math.ceil(num_samples / self.global_batch_size)
        self._order: tuple[int, np.ndarray] | None = None

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of an epoch, int64 [num_samples]; the identity without shuffling."""
        if self._order is None or self._order[0] != epoch:
            random = np.random.default_rng([self.seed, epoch])
            self._order = epoch, random.permutation(self.num_samples) if self.shuffle else np.arange(self.num_samples)
        return self._order[1]

    def num_samples_of(self, i: int) -> int:
        """Samples, without fillers, that all ranks together take in step i of an epoch."""
        if not 0 <= i < self.steps_per_epoch:
            raise ValueError(f"step {i} of an epoch that has {self.steps_per_epoch} steps")
        return min(self.global_batch_size, self.num_samples - i * self.global_batch_size)

    def num_micro_batches(self, i: int) -> int:
        """Micro-batches that each rank takes in step i of an epoch."""
        return math.ceil(self.num_samples_of(i) / (self.micro_batch_size * self.dp_size))

    def step(self, epoch: int, i: int) -> list[list[int]]:
        """This rank's micro-batches of step i, each micro_batch_size sample numbers or FILLER."""
        first, count = i * self.global_batch_size, self.num_micro_batches(i)
        chosen = np.full((count, self.dp_size, self.micro_batch_size), FILLER, dtype=np.int64)
        samples = self.order(epoch)[first : first + self.num_samples_of(i)]
        chosen.reshape(-1)[: len(samples)] = samples
        return chosen[:, self.dp_rank].tolist()


class _MicroBatches:
    """The plan from a position on, as the batch sampler of a DataLoader."""

    def __init__(self, plan: BatchPlan, start_epoch: int, start_step: int, num_epochs: int | None):
        self.plan, self.start, self.num_epochs = plan, (start_epoch, start_step), num_epochs

    def __iter__(self):
        start_epoch, start_step = self.start
        for epoch in itertools.count(start_epoch) if self.num_epochs is None else range(start_epoch, self.num_epochs):
            for i in range(start_step if epoch == start_epoch else 0, self.plan.steps_per_epoch):
                yield from self.plan.step(epoch, i)


class _WithFillers(Dataset):
    """(is a filler, sample), where a filler is sample 0."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, i: int):
        return i == FILLER, self.dataset[0 if i == FILLER else i]


class _CollateWithFillers:
    """The user's collate function; afterwards the rows of fillers have no labels."""

    def __init__(self, collate):
        self.collate = collate

    def __call__(self, items: list):
        fillers = torch.tensor([is_filler for is_filler, _ in items])
        batch = self.collate([sample for _, sample in items])
        if fillers.any():
            labels = batch.get("labels") if hasattr(batch, "get") else None
            if labels is None or len(labels) != len(items):
                raise ValueError(
                    "the last batch is filled up with samples of weight zero: expected the collate function to return "
                    f'a mapping with "labels" of {len(items)} rows, one a sample'
                )
            batch["labels"] = torch.as_tensor(labels).clone()  # labels may be the same tensor as input_ids
            batch["labels"][fillers] = IGNORE_INDEX
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
    """Returns a DataLoader of this rank's micro-batches, one after another, from step start_step of start_epoch on.

    It ends with epoch num_epochs - 1 (counted from the beginning of the run), or never. plan.num_micro_batches(step)
    says how many belong to a step. dataset: any map-style dataset; collate: list of its samples -> mapping. A FILLER of
    the plan is collated as sample 0, and its row of batch["labels"] becomes IGNORE_INDEX.
    Raises: ValueError for a dataset without a length, or of another length than the plan's.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"{type(dataset).__name__} has no __len__ or __getitem__: expected a map-style dataset, because the steps "
            "of an epoch are planned ahead; read an iterable dataset into a list"
        )
    if len(dataset) != plan.num_samples:
        raise ValueError(f"the dataset has {len(dataset)} samples, its plan is for {plan.num_samples}")
    return DataLoader(
        _WithFillers(dataset),
        batch_sampler=_MicroBatches(plan, start_epoch, start_step, num_epochs),
        collate_fn=_CollateWithFillers(collate),
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        # Without one of its own a DataLoader draws from torch's global generator, and dropout would depend on it.
        generator=torch.Generator().manual_seed(plan.seed),
    )
