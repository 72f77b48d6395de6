"""From the files of a dataset to token ids with a loss mask: Reader reads records, Encoder makes
unshifted documents of them, load_shard keeps these in the token cache."""

import contextlib
import dataclasses
import hashlib
import inspect
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil

from . import data_chat, data_files, data_records
from .data_chat import ChatRenderer, Rendered, in_time
from .data_files import SIDES, Cursor, DatasetSpec, Progress, build_once, read_records
from .data_records import Conversation, conversations, detect_format, document
from .files import IGNORE_INDEX, checksum, sync, write_file, write_json
from .tables import Objective, registered_columns

_MAX_BAD_SHARE = 0.1  # of the records: a larger share points to a wrong declaration
_MOST_CHARACTERS = 1_000_000  # of a text to be cut to cutoff_len; or 32 a token if that is more
_LISTED = 10  # bad records listed with their places
CHUNK_RECORDS = 500  # records tokenised at once
PARALLEL_FROM_RECORDS = 10_000  # below this, starting worker processes takes longer than they save

# (place, content, registered columns) of a record; content: a text, or conversations, or the
# ValueError of an unusable one
Record = tuple[str, str | list[Conversation] | ValueError, dict[str, float]]
# (ids int32 [n], mask uint8 [n]: 1 for trained tokens; None: all are) of a document
Document = tuple[np.ndarray, np.ndarray | None]
Sample = list[tuple[np.ndarray, np.ndarray | None, dict[str, float]]]  # with those columns
# (file, lines or records of it, bytes of it, records of the dataset) read so far
Place = tuple[int, ...]
BEGINNING: Place = (0, 0, 0, 0)

# -- counts of records

# the kinds of a Count
BAD = "bad"  # left out: the record cannot be used
CUT = "truncated"  # cut to cutoff_len
UNLABELED = "label-less"  # left out: no token to train on
LEFT_OUT = "left out besides"
NOTE = "note"  # worth a warning, and trained

UNUSABLE = "records cannot be used and were left out"
_IDENTICAL = "pairs have the same chosen and rejected answer and were left out"
_PLAIN = "prompts and completions are texts, trained without a chat template"
_SEVERAL = "conversations became several samples, for the template strips their thinking"


@dataclass
class Count:
    """Records of one kind. text: the reason of BAD ones, else the end of a sentence that begins
    with the number. place: "file:line" of the first."""

    kind: str
    text: str
    place: str
    number: int = 0

    def __str__(self) -> str:
        text = f"{UNUSABLE}: {self.text}" if self.kind == BAD else self.text
        return f"{self.number:,} {text}"


@dataclass
class Tally:
    """Counts of `records` that were read, by their texts. first_bad: "place: reason" of the first
    ten BAD ones."""

    records: int = 0
    counts: dict[str, Count] = field(default_factory=dict)
    first_bad: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, meta: dict) -> "Tally":
        """The Tally in a shard's meta.json."""
        counts = {text: Count(**count) for text, count in meta["counts"].items()}
        return cls(meta["records"], counts, meta["first_bad"])

    def count(self, kind: str, text: str, place: str, number: int = 1) -> None:
        self.counts.setdefault(text, Count(kind, text, place)).number += number

    def refuse(self, place: str, reason: str) -> None:
        # numbers of messages are replaced: they would give each record a reason of its own
        self.count(BAD, re.sub(r"\d+", "N", reason)[:120], place)
        self.first_bad = [*self.first_bad, f"{place}: {reason[:300]}"][:_LISTED]

    def number(self, kind: str) -> int:
        """Records of a kind."""
        return sum(count.number for count in self.counts.values() if count.kind == kind)

    def add(self, later: "Tally") -> None:
        """Add the counts of later records."""
        self.records += later.records
        for count in later.counts.values():
            self.count(count.kind, count.text, count.place, count.number)
        self.first_bad = [*self.first_bad, *later.first_bad][:_LISTED]

    def check(self, few_records: int = 0) -> None:
        """ValueError for too many bad records. few_records: their share is taken of so many at
        least."""
        bad = self.number(BAD)
        if bad > _MAX_BAD_SHARE * max(self.records, few_records):
            raise ValueError(
                f"{bad:,} of {self.records:,} records cannot be used, and on_bad_record: skip "
                f"leaves out at most {100 * _MAX_BAD_SHARE:.0f} %; the first:\n  "
                + "\n  ".join(self.first_bad)
            )


# -- files to records


class Reader:
    """Reads the records of one dataset. formats: name in FORMATS of each file, from its first
    usable record on."""

    def __init__(self, spec: DatasetSpec, objective: Objective, data_args):
        self.spec = spec
        self.objective = objective
        self.skips = data_args.on_bad_record == "skip"
        self.system = data_args.default_system
        self.ignored = data_args.ignore_message_keys
        # only the first so many records
        self.limit = min(filter(None, (data_args.max_samples, spec.num_samples)), default=None)
        self.formats: dict[str, str] = {}
        self.columns = data_records.dataset_columns(spec.name)

    def records(
        self, start: Place = BEGINNING, refuse_empty: bool = False
    ) -> Iterator[tuple[Record, Place]]:
        """(record, place of the next one) of the records from `start` on.

        Raises: ValueError without any record; with refuse_empty for each file without one.
        """
        first, number, offset, taken = start
        cursor = Cursor(number, offset)
        files = list(enumerate(self.spec.files.items()))
        for at, (file, kind) in files[first:]:
            if cursor.number:
                self._detect_format(file, kind)
            taken_before = taken
            for where, record in read_records(file, kind, self.skips, cursor):
                taken += 1
                read = self._read(file, where, record)
                yield (where, *read), (at, cursor.number, cursor.offset, taken)
                if taken == self.limit:
                    return
            if refuse_empty and taken == taken_before:
                raise ValueError(f"{file}: the file holds no record")
            cursor = Cursor()
        if taken == start[-1]:
            after = ", without those that val_size holds out" if taken else ""
            raise ValueError(f"{self.spec.name}: there is no record to train on{after}")

    def _detect_format(self, file: str, kind: str) -> None:
        """Read a file from its beginning until a record shows its format."""
        records = read_records(file, kind, self.skips)
        while file not in self.formats and (item := next(records, None)):
            self._read(file, *item)

    def _read(self, file: str, where: str, record):
        """(content or the ValueError of an unusable one, registered columns) of a record.

        Raises: that ValueError if the format of the file depends on this record, unless bad
        records are left out.
        """
        if isinstance(record, ValueError):
            return record, {}
        try:
            _refuse_other_kinds(record, self.objective, where)
            values = data_records.column_values(record, self.columns, where)
            if file not in self.formats:
                self.formats[file] = detect_format(record, self.spec, self.objective, where)
            if self.objective.joins_documents:
                return document(record, self.spec, where), values
            form = self.formats[file]
            pairs = self.objective.has_pairs
            options = (self.system, where, self.ignored)
            return conversations(record, self.spec, form, pairs, *options), values
        except ValueError as error:
            if file not in self.formats and not self.skips:
                raise
            return error, {}


def _refuse_other_kinds(record, objective: Objective, where: str) -> None:
    """ValueError for records with another meaning than a text model would learn from them."""
    if objective.joins_documents or not isinstance(record, dict):
        return
    for column in () if objective.has_pairs else ("kto_tag", "label"):
        if isinstance(record.get(column), bool):
            raise ValueError(
                f"{where}: the column {column!r} says whether an answer is good, and every "
                "answer would be trained: keep the good ones, and leave the column out"
            )
    for column in ("images", "videos", "audios"):
        if record.get(column):
            raise ValueError(f"{where}: the column {column!r} is there, and models here read text")


# -- records to samples


def joins_texts(data_args) -> bool:
    """True if texts are joined and cut into full rows, with attention across their borders."""
    return data_args.packing is not False and not data_args.neat_packing


class Encoder:
    """Turns records into the documents of samples: one for a text or a conversation, chosen and
    rejected for a pair.

    A document has at most cutoff_len + 1 tokens: the end of a longer one is cut. A pair loses the
    beginning of its prompt instead, the same tokens on both sides and all but the last one at most,
    and then the end of an answer. Texts to be joined (joins) are kept whole. renderer: of
    conversations, None for texts. data_args: DataArguments. options: all that determines the
    result, beside the records and the tokenizer. Picklable, for worker processes.
    Raises: ValueError for a tokenizer that cannot end a text.
    """

    def __init__(self, tokenizer, renderer: ChatRenderer | None, objective: Objective, data_args):
        self.tokenizer = tokenizer
        self.renderer = renderer
        # not the objective: worker processes need not import a script that registers its own
        self.has_pairs = objective.has_pairs
        self.is_text = objective.joins_documents
        self.cutoff_len = data_args.cutoff_len
        self.skips = data_args.on_bad_record == "skip"
        self.joins = self.is_text and joins_texts(data_args)
        self.documents_per_sample = len(SIDES) if self.has_pairs else 1
        last_answer_only = data_args.mask_history or self.has_pairs
        self.trained = "last" if last_answer_only else "answers"
        if data_args.train_on_prompt:
            self.trained = "all"
        keys = ("cutoff_len", "train_on_prompt", "default_system", "enable_thinking")
        self.options = {
            "records": [self.is_text, self.has_pairs],
            "joins": self.joins,
            "last_answer_only": last_answer_only,
            "skips": self.skips,
            **{key: getattr(data_args, key) for key in keys},
        }
        if data_args.ignore_message_keys:  # only then: checkpoints of earlier versions lack it
            self.options["ignored"] = sorted(data_args.ignore_message_keys)
        if self.joins and registered_columns():
            raise ValueError("registered columns: texts are joined: set packing: false")
        if self.is_text and tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no eos_token to end a document of stage: "
                f"{objective.stage}: set it in its config"
            )

    def encode(self, chunk: list[Record]) -> tuple[list[Sample], Tally]:
        """The samples that are kept, in their order, and the counts of the records.

        Raises: ValueError with the place for an unusable record, unless these are left out.
        """
        tally = Tally(records=len(chunk))
        rendered: list[tuple[str, dict, Rendered]] = []  # with their places and columns
        current = ""

        def render_all() -> None:
            nonlocal current
            for current, content, values in chunk:
                try:
                    texts = self._render(current, content, tally)
                except ValueError as error:
                    if not self.skips:
                        raise
                    tally.refuse(current, str(error).removeprefix(current).removeprefix(": "))
                else:
                    rendered.extend((current, values, text) for text in texts)

        in_time(render_all, lambda: current)
        documents = self._tokenize([text for *_, text in rendered])
        kept = []
        for first in range(0, len(documents), self.documents_per_sample):
            where, values, _ = rendered[first]
            sample = documents[first : first + self.documents_per_sample]
            sample = self._cut(sample, tally, where)
            if not self._leaves_out(sample, tally, where):
                kept.append([(*document, values) for document in sample])
        return kept, tally

    def _render(self, where: str, content, tally: Tally) -> list[Rendered]:
        """Each document of a record as text, [] for one to be left out."""
        if isinstance(content, ValueError):
            raise content
        if self.renderer is None:
            self._check_size(len(content), where)
            return [Rendered(content, [], is_plain=True)]
        for conversation in content:
            values = [value for message in conversation.messages for value in message.values()]
            self._check_size(sum(len(text) for text in values if isinstance(text, str)), where)
        if any(_is_empty(conversation.messages[-1]) for conversation in content):
            what = "pairs" if self.has_pairs else "samples"
            tally.count(LEFT_OUT, f"{what} have an empty answer and were left out", where)
            return []
        first = content[0]
        if first in content[1:]:
            tally.count(LEFT_OUT, _IDENTICAL, where)
            return []
        for option in first.options:
            if not self.renderer.reads(option):
                what = f"records give {option} to the chat template, which lacks it"
                tally.count(NOTE, what, where)
        if first.is_plain:
            tally.count(NOTE, _PLAIN, where)
        rendered: list[Rendered] = []
        for conversation in content:
            samples = self.renderer.render(conversation, self.trained, where)
            if len(samples) > 1:
                tally.count(NOTE, _SEVERAL, where)
            rendered += samples
        return rendered

    def _check_size(self, size: int, where: str) -> None:
        """ValueError with the place for a text far longer than the part that is kept: tokenising
        takes 300 bytes of memory a character."""
        most = max(_MOST_CHARACTERS, 32 * self.cutoff_len)
        if size > most and not self.joins:
            raise ValueError(
                f"{where}: the record has {size:,} characters, and of records that are cut to "
                f"cutoff_len {self.cutoff_len} at most {most:,} are read: split or remove it, or "
                "set on_bad_record: skip"
            )

    def _tokenize(self, rendered: list[Rendered]) -> list[Document]:
        """The document of each text, with the mask of its spans.

        Plain texts get the special tokens that the tokenizer adds: bos, if the model was trained
        with it. A chat template has written its special tokens. Texts are tokenised whole, so that
        the borders of tokens are those of inference.
        """
        documents: list[Document] = []
        for is_plain, group in itertools.groupby(rendered, key=lambda one: one.is_plain):
            alike = list(group)
            batch = self._tokens([one.text for one in alike], is_plain)
            if self.is_text:
                texts = zip(alike, batch["input_ids"], strict=True)
                documents += [(self._ended(one.text, ids), None) for one, ids in texts]
                continue
            rows = zip(batch["input_ids"], batch["offset_mapping"], alike, strict=True)
            for ids, offsets, one in rows:
                mask = mask_of_spans(offsets, one.spans)
                documents.append((np.array(ids, dtype=np.int32), mask))
        return documents

    def _tokens(self, texts: list[str], is_plain: bool):
        try:
            return self.tokenizer(
                texts,
                add_special_tokens=is_plain,
                return_offsets_mapping=not self.is_text,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, exported by no module
                raise
            raise ValueError(
                f"the tokenizer gave up on a text of {max(map(len, texts)):,} characters "
                f"({error}): its tokenizer.json has an expression that takes too long"
            ) from None

    def _ended(self, text: str, ids: list[int]) -> np.ndarray:
        """The tokens of a text with the end token; none of an empty one."""
        eos = self.tokenizer.eos_token_id
        if not text:
            ids = []
        elif ids and ids[-1] != eos:
            ids = [*ids, eos]
        return np.array(ids, dtype=np.int32)

    def _cut(self, documents: list[Document], tally: Tally, where: str) -> list[Document]:
        """The documents cut to cutoff_len + 1 tokens."""
        limit = self.cutoff_len + 1
        longest = max(len(ids) for ids, _ in documents)
        if self.joins or longest <= limit:
            return documents
        start = 0
        what = f"samples were longer than cutoff_len {limit - 1} and cut"
        if self.has_pairs:
            start = min(longest - limit, max(_shared_prompt(*documents) - 1, 0))
            what = f"pairs were longer than cutoff_len {limit - 1}: "
            what += "the beginning of their prompt was cut"
        tally.count(CUT, what, where)
        if self.has_pairs and longest - start > limit:
            what = "of them had an answer too long without its prompt: its end was cut"
            tally.count(NOTE, what, where)
        kept = slice(start, start + limit)
        return [(ids[kept], mask if mask is None else mask[kept]) for ids, mask in documents]

    def _leaves_out(self, documents: list[Document], tally: Tally, where: str) -> bool:
        """True if a sample has nothing to learn, which is counted."""
        first, *others = documents
        is_unlabeled = not all(num_learned(*document) for document in documents)
        is_identical = any(np.array_equal(first[0], other[0]) for other in others)
        if is_unlabeled:
            what = "pairs have an answer without a" if self.has_pairs else "samples have no"
            tally.count(UNLABELED, f"{what} token to train on and were left out", where)
        elif is_identical:
            tally.count(LEFT_OUT, _IDENTICAL, where)
        return is_unlabeled or is_identical


def num_learned(ids: np.ndarray, mask: np.ndarray | None) -> int:
    """Labels of a document that are not IGNORE_INDEX: its first token is no target."""
    return max(len(ids) - 1, 0) if mask is None else int(mask[1:].sum())


def _is_empty(answer: dict) -> bool:
    return not answer["content"].strip() and not answer.get("tool_calls")


def _shared_prompt(chosen: tuple, rejected: tuple) -> int:
    """Number of untrained tokens at the beginning of both (ids, mask)."""
    size = min(len(chosen[0]), len(rejected[0]))
    # The token at the border may belong to one answer alone.
    learned = (chosen[1][:size] | rejected[1][:size]).astype(bool)
    differ = (chosen[0][:size] != rejected[0][:size]) | learned
    return int(np.append(differ, True).argmax())


def mask_of_spans(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> np.ndarray:
    """uint8 [n]: 1 for each token with a character in a span. offsets: [start, end) of each
    token."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=np.uint8)
    for start, end in spans:
        mask[(starts < end) & (ends > start)] = 1
    return mask


# -- tokenising in several processes

_worker_encoder: Encoder | None = None  # of a worker process


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_encoder = encoder


def _encode_in_worker(chunk: list[Record]) -> tuple[list[Sample], Tally]:
    assert _worker_encoder is not None, "the pool starts each process with _start_worker"
    return _worker_encoder.encode(chunk)


def encode_all(
    reader: Reader, encoder: Encoder, workers: int | None
) -> Iterator[tuple[list[Sample], Tally]]:
    """(samples, Tally so far) after each chunk of a dataset's records, in their order.

    workers: number of tokenising processes, without effect on the result; None: chosen here.
    """
    tally = Tally()
    for samples, of_chunk in _in_processes(encoder, _chunks(reader), workers):
        tally.add(of_chunk)
        yield samples, tally


def _chunks(reader: Reader) -> Iterator[list[Record]]:
    records = (record for record, _ in reader.records(refuse_empty=True))
    while chunk := list(itertools.islice(records, CHUNK_RECORDS)):
        yield chunk


def _in_processes(
    encoder: Encoder, chunks: Iterator[list[Record]], workers: int | None
) -> Iterator[tuple[list[Sample], Tally]]:
    if workers is None:
        head = list(itertools.islice(chunks, PARALLEL_FROM_RECORDS // CHUNK_RECORDS))
        chunks = itertools.chain(head, chunks)
        cpus = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cpus = len(os.sched_getaffinity(0))
        workers = min(8, cpus)
        if len(head) * CHUNK_RECORDS < PARALLEL_FROM_RECORDS:
            workers = 1
    if workers <= 1:
        yield from map(encoder.encode, chunks)
        return
    # spawn: forking a process that has started threads (torch, gloo, CUDA) may hang it
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (encoder,))
    try:
        tasks = (pool.submit(_encode_in_worker, chunk) for chunk in chunks)
        waiting = deque(itertools.islice(tasks, 2 * workers))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(itertools.islice(tasks, 1))
    except BrokenProcessPool as error:
        raise ValueError(
            "a tokenising process died: a script must start its run below "
            "`if __name__ == '__main__':`, and without that only trains with "
            "preprocessing_num_workers: 1, which takes less memory too"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# -- the token cache

CACHE_FORMAT = 4
HASH_DIRECTLY_BELOW_BYTES = 64 << 20
_META = {"sources", "formats", "columns", "created", "checksums"}
_META |= {field.name for field in dataclasses.fields(Tally)}
_whole: set[tuple[Path, bytes]] = set()  # (folder, its meta.json) checked by this process


def load_shard(reader: Reader, encoder: Encoder, data_args) -> "Shard":
    """The reader's dataset, from the cache or tokenised now by one of the processes that share
    cache_dir.

    A damaged shard is tokenised anew, with one line on stderr; with overwrite_cache, so is a shard
    of an earlier run.
    Raises: ValueError with file and line, in every process that calls; ValueError for a cache_dir
    that cannot be written.
    """
    name = reader.spec.name
    cache_dir = cache_folder(data_args)
    key, identity = _keys(reader, encoder, cache_dir)
    folder = cache_dir / "tokens" / key

    def build(temporary: Path, progress: Progress) -> None:
        if folder.exists() and (harm := damage(folder)):
            print(f"{folder}: {harm}: tokenising {name} anew", file=sys.stderr, flush=True)
        parts = encode_all(reader, encoder, data_args.preprocessing_num_workers)
        meta = {"sources": list(reader.spec.files), "formats": reader.formats}
        meta["columns"] = list(reader.columns)
        row_length = data_args.cutoff_len + 1 if encoder.joins else None
        write_shard(temporary, parts, meta, row_length, progress)

    def is_good() -> bool:
        if not folder.exists() or damage(folder):
            return False
        if not data_args.overwrite_cache:
            return True
        # a shard younger than this process may be another rank's
        created = json.loads((folder / "meta.json").read_text())["created"]
        return created >= psutil.Process().create_time()

    build_once(folder, build, f"tokenising {name}", is_good)
    return Shard(folder, encoder.documents_per_sample, identity)


def cache_folder(data_args) -> Path:
    """cache_dir of DataArguments, else $MCA_LITE_CACHE, else ~/.cache/mca_lite."""
    folder = data_args.cache_dir or os.environ.get("MCA_LITE_CACHE") or "~/.cache/mca_lite"
    return Path(folder).expanduser()


def tokenizer_identity(tokenizer) -> list:
    """A key, equal for tokenizers that produce the same tokens."""
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer.to_str()
    else:
        core = json.dumps([sorted(tokenizer.get_vocab().items()), *_slow_identity(tokenizer)])
    identity = [type(tokenizer).__name__, core, tokenizer.chat_template]
    identity.append(sorted(map(str, tokenizer.special_tokens_map.items())))
    if getattr(tokenizer, "split_special_tokens", False):  # no part of `core`
        identity.append("split_special_tokens")
    return identity


def _slow_identity(tokenizer) -> list:
    """Parts of a tokenizer in Python beside its vocabulary: hashes of the files it saves, with its
    merges, and samples of the special tokens it adds."""
    hashes: list[str] = []
    # suppressed: transformers' error for a tokenizer without files
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(NotImplementedError):
        for path in tokenizer.save_vocabulary(folder) or ():
            hashes.append(hashlib.sha256(Path(path).read_bytes()).hexdigest())
    return [*hashes, tokenizer.encode(""), tokenizer.encode(" Ab  c\n")]


def _keys(reader: Reader, encoder: Encoder, cache_dir: Path) -> tuple[str, str]:
    """(name of the shard's folder, name of the data in a checkpoint).

    The first one changes with the code of tokenising, so that no shard is older than its code. The
    second one does not: a checkpoint has to go on in a newer version.
    """
    spec = reader.spec
    declared = ("formatting", "columns", "tags", "num_samples")
    identity = {
        "tokenizer": tokenizer_identity(encoder.tokenizer),
        "options": {**encoder.options, "limit": reader.limit},
        "declaration": {key: getattr(spec, key) for key in declared},
        # the kind determines how a file is read; its name does not matter
        "files": [
            [kind, _content_hash(Path(file), cache_dir)] for file, kind in spec.files.items()
        ],
    }
    if reader.columns:  # only then: checkpoints of earlier versions lack it
        identity["columns"] = reader.columns
    modules = (data_files, data_records, data_chat, sys.modules[__name__])
    code = {"format": CACHE_FORMAT, "code": [inspect.getsource(module) for module in modules]}
    return _hash_of(identity | code), _hash_of(identity)


def _hash_of(facts: dict) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _content_hash(path: Path, cache_dir: Path) -> str:
    """sha256 of the file. A large one is read once, and not again until its size or modification
    time changes."""
    stat = path.stat()
    # a file written just now may change again within one tick of its time stamp
    if stat.st_size < HASH_DIRECTLY_BELOW_BYTES or time.time() - stat.st_mtime < 2:
        return _sha256_of_file(path)
    version = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    target = cache_dir / "hashes" / hashlib.sha256(version.encode()).hexdigest()

    def build(temporary: Path, progress: Progress) -> None:
        write_file(temporary, _sha256_of_file(path, progress))

    build_once(target, build, f"hashing {path}")
    return target.read_text()


def _sha256_of_file(path: Path, progress: Progress = lambda text: None) -> str:
    digest = hashlib.sha256()
    done = 0
    with open(path, "rb") as file:
        while block := file.read(8 << 20):
            digest.update(block)
            done += len(block)
            progress(f"{done / 2**30:.1f} GiB")
    return digest.hexdigest()


# -- a shard's files


def write_shard(
    folder: Path, parts: Iterator, meta: dict, row_length: int | None, progress: Progress
) -> None:
    """Write a new folder with the documents of `parts`, synced to disk.

    parts: of encode_all. meta: "sources" and "formats" of the report, complete once the parts are
    used up, and the names of registered "columns". row_length: join the documents and cut them into
    rows of so many tokens, as row_spans does (None: leave them).
    """
    folder.mkdir()
    lengths = []
    learned = []
    columns = []
    tally = Tally()
    with open(folder / "ids.bin", "wb") as tokens, open(folder / "mask.bin", "wb") as masks:
        for samples, tally in parts:
            for ids, mask, values in itertools.chain(*samples):
                columns.append([values.get(name, np.nan) for name in meta["columns"]])
                tokens.write(ids.tobytes())
                if mask is not None:
                    masks.write(mask.tobytes())
                lengths.append(len(ids))
                learned.append(num_learned(ids, mask))
            progress(f"{tally.records:,} records, {tokens.tell() // 4:,} tokens")
    tally.check()
    if (folder / "mask.bin").stat().st_size == 0:
        (folder / "mask.bin").unlink()
    if meta["columns"]:
        np.array(columns, dtype=np.float64).tofile(folder / "columns.bin")
    stops = np.array(lengths, dtype=np.int64).cumsum()
    spans = np.stack([stops - lengths, stops], axis=1)
    if row_length is not None:
        spans = row_spans(sum(lengths), row_length)
        learned = spans[:, 1] - spans[:, 0] - 1
    spans.astype(np.int64).tofile(folder / "spans.bin")
    np.array(learned, dtype=np.int64).tofile(folder / "learned.bin")
    checksums = {path.name: checksum(path) for path in folder.iterdir()}
    for name in checksums:
        sync(folder / name)
    meta = {**meta, **dataclasses.asdict(tally), "created": time.time(), "checksums": checksums}
    write_json(folder / "meta.json", meta)
    sync(folder)


def row_spans(num_tokens: int, row_length: int) -> np.ndarray:
    """int64 [rows, 2]: [start, stop) of rows of `row_length` cut from joined tokens.

    Neighbours share a token, the last target of one and the first input of the next. The last row
    may be shorter.
    """
    starts = np.arange(0, max(num_tokens - 1, 0), row_length - 1)
    return np.stack([starts, np.minimum(starts + row_length, num_tokens)], axis=1)


def damage(folder: Path) -> str | None:
    """A description of the damage to a shard's folder, None for a whole one.

    Sizes are compared at each call, checksums once in a process for each shard.
    """
    try:
        text = (folder / "meta.json").read_bytes()
        meta = json.loads(text)
        if not isinstance(meta, dict) or set(meta) != _META:
            return "meta.json is not whole"
        for name, (written, _) in meta["checksums"].items():
            size = (folder / name).stat().st_size
            if size != written:
                return f"{name} has {size:,} bytes and had {written:,}"
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
    labels that are not IGNORE_INDEX. meta: of meta.json. tally: counts of its records. identity:
    names its files, keys and tokenizer. Files are mapped in the process that reads samples.
    """

    def __init__(self, folder: Path, documents_per_sample: int, identity: str):
        self.folder = folder
        self.identity = identity
        self.meta = json.loads((folder / "meta.json").read_text())
        self.tally = Tally.of(self.meta)
        spans = np.fromfile(folder / "spans.bin", dtype=np.int64)
        learned = np.fromfile(folder / "learned.bin", dtype=np.int64)
        self.spans = spans.reshape(-1, documents_per_sample, 2)
        self.document_lengths = self.spans[..., 1] - self.spans[..., 0] - 1
        self.columns = None  # registered ones of each document, NaN: none
        if self.meta["columns"]:
            columns = np.fromfile(folder / "columns.bin")
            self.columns = columns.reshape(*self.spans.shape[:2], -1)
        self.learned = learned.reshape(-1, documents_per_sample).sum(axis=1)
        self._maps: tuple[np.ndarray, np.ndarray | None] | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_maps": None}  # numpy would pickle a map as a copy of the file

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, row: int) -> list[dict]:
        ids, mask = self.maps()
        documents = [
            shifted(ids[start:stop], mask if mask is None else mask[start:stop])
            for start, stop in self.spans[row]
        ]
        of_row = () if self.columns is None else self.columns[row].tolist()
        for document_, values in zip(documents, of_row, strict=False):
            columns = zip(self.meta["columns"], values, strict=True)
            document_.update((name, value) for name, value in columns if value == value)
        return documents

    def maps(self) -> tuple[np.ndarray, np.ndarray | None]:
        """(tokens of all documents one after another, 1 for each trained one; None: all are)."""
        if self._maps is None:
            ids = np.memmap(self.folder / "ids.bin", dtype=np.int32, mode="r")
            mask = None
            if "mask.bin" in self.meta["checksums"]:
                mask = np.memmap(self.folder / "mask.bin", dtype=np.uint8, mode="r")
            self._maps = ids, mask
        return self._maps


def shifted(ids: np.ndarray, mask: np.ndarray | None, columns=()) -> dict:
    """{"input_ids", "labels"} int64 [n - 1] of n tokens, and registered columns. mask: 1 for
    trained tokens, None: all are."""
    tokens = np.array(ids, dtype=np.int64)
    labels = tokens[1:].copy()
    if mask is not None:
        labels[mask[1:] == 0] = IGNORE_INDEX
    return {"input_ids": tokens[:-1], "labels": labels, **dict(columns)}
