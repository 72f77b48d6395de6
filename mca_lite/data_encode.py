"""From the files of a dataset to token ids with a loss mask: what its records say, one after
another (Reader), and the documents of each sample, not shifted yet (Encoder)."""

import contextlib
import dataclasses
import errno
import hashlib
import inspect
import itertools
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
import uuid
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
from filelock import FileLock, Timeout

from . import data_chat, data_files, data_records, world
from .data_chat import ChatRenderer, Rendered, in_time
from .data_files import SIDES, Cursor, DatasetSpec, read_records
from .data_records import Conversation, conversations, detect_format, document
from .files import IGNORE_INDEX, checksum, sync, write_json
from .tables import Objective, registered_columns

# -- records to tokens

# in the words of tallies, by which a reader of counts knows them
CUT = "longer than cutoff_len"
NO_LABELS = "token to train on"
BAD = "records cannot be used and were left out: "
_IDENTICAL = "pairs have the same chosen and rejected answer and were left out"
_MAX_BAD_SHARE = 0.1  # of the records: above it, it is the declaration that is wrong
_MOST_CHARACTERS = 1_000_000  # of a text that is cut to cutoff_len; and 32 a token, where more
_PLAIN = "prompts and completions are texts, trained without a chat template"
_LISTED = 10  # bad records that are listed with their places
CHUNK_RECORDS = 500  # records handed to the tokenizer at once
PARALLEL_FROM_RECORDS = 10_000  # below this, starting worker processes takes longer than they save

# of a record: (place; text, conversations or ValueError; values of registered columns)
Record = tuple[str, str | list[Conversation] | ValueError, dict[str, float]]
# (ids int32 [n], mask uint8 [n]: 1 for tokens that are learned; None: all are) of a document
Document = tuple[np.ndarray, np.ndarray | None]
Sample = list[tuple[np.ndarray, np.ndarray | None, dict[str, float]]]
# in a dataset: the file, lines or records and bytes of it, and records in all, that are behind
Place = tuple[int, ...]
BEGINNING: Place = (0, 0, 0, 0)


@dataclass
class Tally:
    """What happened to records.

    records: how many were read. counts: what happened -> how often; BAD and the reason for those
    that cannot be used. places: what happened -> where first. first_bad: "place: reason" of ten.
    """

    records: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    first_bad: list[str] = field(default_factory=list)

    def count(self, what: str, where: str, times: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + times
        self.places.setdefault(what, where)

    def refuse(self, where: str, reason: str) -> None:
        # one text for a reason, whichever message of a record it names
        self.count(BAD + re.sub(r"\d+", "N", reason)[:120], where)
        self.first_bad = [*self.first_bad, f"{where}: {reason[:300]}"][:_LISTED]

    def add(self, later: "Tally") -> None:
        """Add what happened to the records that follow."""
        self.records += later.records
        for what, count in later.counts.items():
            self.count(what, later.places[what], count)
        self.first_bad = [*self.first_bad, *later.first_bad][:_LISTED]

    def check(self, few_records: int = 0) -> None:
        """ValueError for too many bad records; few_records: so many are not judged yet."""
        bad = sum(count for what, count in self.counts.items() if what.startswith(BAD))
        if bad > _MAX_BAD_SHARE * max(self.records, few_records):
            raise ValueError(
                f"{bad:,} of {self.records:,} records cannot be used, and on_bad_record: skip "
                f"leaves out at most {100 * _MAX_BAD_SHARE:.0f} %; the first:\n  "
                + "\n  ".join(self.first_bad)
            )


# -- files to records ------------------------------------------------------------------------------


class Reader:
    """Reads the records of one dataset. formats: of each file, once one of its records shows it."""

    def __init__(self, spec: DatasetSpec, objective: Objective, data_args):
        self.spec = spec
        self.objective = objective
        self.skips = data_args.on_bad_record == "skip"
        self.system = data_args.default_system
        self.ignored = data_args.ignore_message_keys
        limits = [n for n in (data_args.max_samples, spec.num_samples) if n is not None]
        self.limit = min(limits, default=None)  # only the first so many records
        self.formats: dict[str, str] = {}
        self.columns = data_records.dataset_columns(spec.name)

    def records(
        self, start: Place = BEGINNING, refuse_empty: bool = False
    ) -> Iterator[tuple[Record, Place]]:
        """(record, where the next one begins) of the records from `start` on.

        refuse_empty: a file without a record is a ValueError, as no record at all is in any case.
        """
        first, number, offset, behind = start
        cursor = Cursor(number, offset)
        taken = behind
        for at, (file, kind) in list(enumerate(self.spec.files.items()))[first:]:
            if cursor.number:
                self._find_format(file, kind)
            before = taken
            for where, record in read_records(file, kind, self.skips, cursor):
                taken += 1
                read = self._read(file, where, record)
                yield (where, *read), (at, cursor.number, cursor.offset, taken)
                if taken == self.limit:
                    return
            if refuse_empty and taken == before:
                raise ValueError(f"{file}: the file holds no record")
            cursor = Cursor()
        if taken == behind:
            after = ", without those that val_size holds out" if behind else ""
            raise ValueError(f"{self.spec.name}: there is no record to train on{after}")

    def _find_format(self, file: str, kind: str) -> None:
        """The format of a file of which some records are behind, from its first ones."""
        records = read_records(file, kind, self.skips)
        while file not in self.formats and (item := next(records, None)):
            self._read(file, *item)

    def _read(self, file: str, where: str, record):
        """(text, conversations or ValueError; values of registered columns) of a record.

        Raises: that ValueError, where the record should show the format of its file and may not be
        left out.
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
            more = (self.system, where, self.ignored)
            return conversations(record, self.spec, form, pairs, *more), values
        except ValueError as error:
            if file not in self.formats and not self.skips:
                raise
            return error, {}


def _refuse_other_kinds(record, objective: Objective, where: str) -> None:
    """ValueError for records of which a text model would learn what they do not mean."""
    if objective.joins_documents or not isinstance(record, dict):
        return
    for column in () if objective.has_pairs else ("kto_tag", "label"):
        if isinstance(record.get(column), bool):
            raise ValueError(
                f"{where}: the column {column!r} says whether an answer is good, and every "
                "answer would be trained: keep the good ones, and leave the column out"
            )
    if media := [column for column in ("images", "videos", "audios") if record.get(column)]:
        raise ValueError(f"{where}: the column {media[0]!r} is there, and models here read text")


# -- records to samples ----------------------------------------------------------------------------


def joins_texts(data_args) -> bool:
    """Whether texts are joined and cut into full rows, in which they see each other."""
    return data_args.packing is not False and not data_args.neat_packing


class Encoder:
    """Turns records into the documents of samples: one for a text or a conversation, chosen and
    rejected for a pair.

    A document has at most cutoff_len + 1 tokens: the end of a longer one is cut. A pair loses the
    beginning of its prompt instead, the same tokens on both sides and all but the last one at most,
    and then the end of an answer. Where texts are joined (joins), they are kept whole, to be cut
    later. renderer: of conversations, None for texts. data_args: DataArguments. options: what
    decides on the result, beside the records and the tokenizer. Picklable, for worker processes.
    Raises: ValueError for a tokenizer that cannot end a text.
    """

    def __init__(self, tokenizer, renderer: ChatRenderer | None, objective: Objective, data_args):
        self.tokenizer = tokenizer
        self.renderer = renderer
        # not the objective: worker processes need not know those that a script registers
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
        if data_args.ignore_message_keys:  # without any, checkpoints of earlier versions go on
            self.options["ignored"] = sorted(data_args.ignore_message_keys)
        if self.joins and registered_columns():
            raise ValueError("registered columns: texts are joined: set packing: false")
        if self.is_text and tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no eos_token to end a document of stage: "
                f"{objective.stage}: set it in its config"
            )

    def encode(self, chunk: list[Record]) -> tuple[list[Sample], Tally]:
        """The samples that are kept, in their order, and what happened to the records.

        Raises: ValueError with the place for a record that cannot be used, unless it skips them.
        """
        tally = Tally(records=len(chunk))
        places: list[tuple] = []  # of each sample, and its values of registered columns
        rendered: list[Rendered] = []
        at = ""

        def render_all() -> None:
            nonlocal at, rendered, places
            for at, said, values in chunk:
                try:
                    found = self._rendered(at, said, tally)
                except ValueError as error:
                    if not self.skips:
                        raise
                    tally.refuse(at, str(error).removeprefix(at).removeprefix(": "))
                    continue
                places += [(at, values)] * (len(found) // self.documents_per_sample)
                rendered += found

        in_time(render_all, lambda: at)
        documents = iter(self._tokenize(rendered))
        kept = []
        for where, values in places:
            sample = list(itertools.islice(documents, self.documents_per_sample))
            sample = self._cut(sample, tally, where)
            if reason := self._why_left_out(sample):
                tally.count(reason, where)
            else:
                kept.append([(*document, values) for document in sample])
        return kept, tally

    def _rendered(self, where: str, said, tally: Tally) -> list[Rendered]:
        """Each document of a record, [] for one that has nothing to learn."""
        if isinstance(said, ValueError):
            raise said
        if self.renderer is None:
            self._check_size(len(said), where)
            return [Rendered(said, [], is_plain=True)]
        for conversation in said:
            values = [value for message in conversation.messages for value in message.values()]
            self._check_size(sum(len(text) for text in values if isinstance(text, str)), where)
        if any(_is_empty(conversation.messages[-1]) for conversation in said):
            what = "pairs" if self.has_pairs else "samples"
            tally.count(f"{what} have an empty answer and were left out", where)
            return []
        if self.has_pairs and said[0] == said[1]:
            tally.count(_IDENTICAL, where)
            return []
        for option in said[0].options:
            if not self.renderer.reads(option):
                tally.count(f"records give {option} to the chat template, which lacks it", where)
        if said[0].is_plain:
            tally.count(_PLAIN, where)
        rendered: list[Rendered] = []
        for conversation in said:
            samples = self.renderer.render(conversation, self.trained, where)
            if len(samples) > 1:
                what = "became several samples, for the template strips their thinking"
                tally.count(f"conversations {what}", where)
            rendered += samples
        return rendered

    def _check_size(self, size: int, where: str) -> None:
        """ValueError with the place for a text far beyond what is kept of it, which takes 300 bytes
        of memory a character to tokenise."""
        most = max(_MOST_CHARACTERS, 32 * self.cutoff_len)
        if size > most and not self.joins:
            raise ValueError(
                f"{where}: the record has {size:,} characters, and of records that are cut to "
                f"cutoff_len {self.cutoff_len} at most {most:,} are read: split or remove it, or "
                "set on_bad_record: skip"
            )

    def _tokenize(self, rendered: list[Rendered]) -> list[Document]:
        """The document of each text and its spans."""
        documents: list[Document] = []
        for is_plain, alike in itertools.groupby(rendered, key=lambda one: one.is_plain):
            documents += self._tokenize_alike(list(alike), is_plain)
        return documents

    def _tokenize_alike(self, rendered: list[Rendered], is_plain: bool) -> list[Document]:
        # A model that was trained with bos before each document gets it, with the end token. A chat
        # template has written every special token already. Tokenised whole, so that the borders of
        # tokens are those which the model sees when it is used.
        try:
            batch = self.tokenizer(
                [one.text for one in rendered],
                add_special_tokens=is_plain,
                return_offsets_mapping=not self.is_text,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, which no module exports
                raise
            raise ValueError(
                f"the tokenizer gave up on a text of {max(len(one.text) for one in rendered):,} "
                f"characters ({error}): its tokenizer.json has an expression that takes too long"
            ) from None
        if self.is_text:
            texts = zip(batch["input_ids"], rendered, strict=True)
            return [(self._ended(ids if one.text else []), None) for ids, one in texts]
        rows = zip(batch["input_ids"], batch["offset_mapping"], rendered, strict=True)
        return [
            (np.array(ids, dtype=np.int32), mask_of_spans(offsets, one.spans))
            for ids, offsets, one in rows
        ]

    def _ended(self, ids: list[int]) -> np.ndarray:
        """The tokens of a text with the end token; none of an empty one."""
        eos = self.tokenizer.eos_token_id
        if ids and ids[-1] != eos:
            ids = [*ids, eos]
        return np.array(ids, dtype=np.int32)

    def _cut(self, documents: list[Document], tally: Tally, where: str) -> list[Document]:
        """The documents cut to cutoff_len + 1 tokens."""
        limit = self.cutoff_len + 1
        longest = max(len(ids) for ids, _ in documents)
        if self.joins or longest <= limit:
            return documents
        start = 0
        if self.has_pairs:
            start = min(longest - limit, max(_shared_prompt(*documents) - 1, 0))
            what = f"pairs were {CUT} {limit - 1}: the beginning of their prompt was cut"
        else:
            what = f"samples were {CUT} {limit - 1} and cut"
        tally.count(what, where)
        if self.has_pairs and longest - start > limit:
            what = "of them had an answer too long without its prompt: its end was cut"
            tally.count(what, where)
        kept = slice(start, start + limit)
        return [(ids[kept], None if mask is None else mask[kept]) for ids, mask in documents]

    def _why_left_out(self, documents: list[Document]) -> str | None:
        targets = [num_learned(*document) for document in documents]
        if self.has_pairs:
            if not all(targets):
                return f"pairs have an answer without a {NO_LABELS} and were left out"
            (chosen, _), (rejected, _) = documents
            return _IDENTICAL if np.array_equal(chosen, rejected) else None
        if targets[0] == 0 and not (self.joins and len(documents[0][0]) > 1):
            return f"samples have no {NO_LABELS} and were left out"
        return None


def num_learned(ids: np.ndarray, mask: np.ndarray | None) -> int:
    """Labels of a document that are not IGNORE_INDEX: nothing predicts its first token."""
    return max(len(ids) - 1, 0) if mask is None else int(mask[1:].sum())


def _is_empty(answer: dict) -> bool:
    return not answer["content"].strip() and not answer.get("tool_calls")


def _shared_prompt(chosen: tuple, rejected: tuple) -> int:
    """Tokens with which both (ids, mask) begin, none of them learned."""
    size = min(len(chosen[0]), len(rejected[0]))
    # The token at the border may belong to one answer alone.
    learned = (chosen[1][:size] | rejected[1][:size]).astype(bool)
    differ = (chosen[0][:size] != rejected[0][:size]) | learned
    return int(differ.argmax()) if differ.any() else size


def mask_of_spans(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> np.ndarray:
    """uint8 [n]: 1 for each token of which a character lies in a span. offsets: [start, end) of
    each token."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=np.uint8)
    for start, end in spans:
        mask[(starts < end) & (ends > start)] = 1
    return mask


# -- in several processes --------------------------------------------------------------------------

_worker_encoder: Encoder | None = None


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
    """(samples, what happened so far) after each chunk of a dataset's records, in their order.

    workers: the processes that tokenise, which change nothing of it; None: their number is chosen.
    """
    tally = Tally()
    for samples, of_chunk in _in_processes(encoder, _chunks(reader), workers):
        tally.add(of_chunk)
        yield samples, tally


def _chunks(reader: Reader) -> Iterator[list[Record]]:
    records = reader.records(refuse_empty=True)
    while chunk := [record for record, _ in itertools.islice(records, CHUNK_RECORDS)]:
        yield chunk


def _in_processes(
    encoder: Encoder, chunks: Iterator[list[Record]], workers: int | None
) -> Iterator[tuple[list[Sample], Tally]]:
    if workers is None:
        head = list(itertools.islice(chunks, PARALLEL_FROM_RECORDS // CHUNK_RECORDS))
        cpus = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cpus = len(os.sched_getaffinity(0))
        workers = 1 if len(head) * CHUNK_RECORDS < PARALLEL_FROM_RECORDS else min(8, cpus)
        chunks = itertools.chain(head, chunks)
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

CACHE_FORMAT = 3
HASH_DIRECTLY_BELOW_BYTES = 64 << 20
POLL_S, SAY_EVERY_S = 0.2, 10.0  # of those who wait for another process
_META = {"sources", "formats", "columns", "created", "checksums"}
_META |= {field.name for field in dataclasses.fields(Tally)}
_FILES = ("ids.bin", "mask.bin", "spans.bin", "learned.bin", "columns.bin")
_whole: set[tuple[Path, bytes]] = set()  # (folder, its meta.json) of what this process has checked


def load_shard(reader: Reader, encoder: Encoder, data_args) -> "Shard":
    """The reader's dataset, from the cache or tokenised now: one process of those that share
    cache_dir writes.

    A shard in the cache that is damaged is tokenised anew, and one line says so; so is one that an
    earlier run wrote, with overwrite_cache.
    Raises: ValueError with file and line, in every process that asks; ValueError where cache_dir
    cannot be written.
    """
    name = reader.spec.name
    cache_dir = cache_folder(data_args)
    key, identity = _keys(reader, encoder, cache_dir)
    folder = cache_dir / "tokens" / key

    def build(temporary: Path, progress) -> None:
        if folder.exists() and (found := damage(folder)):
            print(f"{folder}: {found}: tokenising {name} anew", file=sys.stderr, flush=True)
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
    spec = reader.spec
    declared = ("formatting", "columns", "tags", "num_samples")
    identity = {
        "tokenizer": tokenizer_identity(encoder.tokenizer),
        "options": {**encoder.options, "limit": reader.limit},
        "declaration": {key: getattr(spec, key) for key in declared},
        # the kind says how the file is read, the name only what it is called
        "files": [
            [kind, _content_hash(Path(file), cache_dir)] for file, kind in spec.files.items()
        ],
    }
    if reader.columns:  # without any, checkpoints of earlier versions go on
        identity["columns"] = reader.columns
    parts = (data_files, data_records, data_chat, sys.modules[__name__], write_shard, _spans)
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
    digest = hashlib.sha256()
    done = 0
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
        lock = FileLock(_beside(target, ".lock"))
        told_before = _read(error_file)
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
    host = socket.gethostname()
    said = time.monotonic()
    progress_file = _beside(target, ".progress")
    error_file = _beside(target, ".error")
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
    if world.current().local_rank == 0:
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

    parts: from encode_all. meta: "sources" and "formats" of the report, complete when the parts are
    used up, and the names of registered "columns". row_length: join the documents and cut them into
    rows of so many tokens (None: leave them); neighbours share the token at which they meet, as the
    last target of one and the first input of the next. progress: is told how far it is.
    """
    folder.mkdir()
    checksums = {name: [0, 0] for name in _FILES}
    lengths = []
    learned = []
    tally = Tally()
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in _FILES}

        def write(name: str, array: np.ndarray) -> None:
            data = array.tobytes()
            (size, crc) = checksums[name]
            files[name].write(data)
            checksums[name] = [size + len(data), zlib.crc32(data, crc)]

        for samples, tally in parts:
            for ids, mask, values in itertools.chain(*samples):
                row = [values.get(name, np.nan) for name in meta["columns"]]
                write("columns.bin", np.array(row, dtype=np.float64))
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
    for name in ("mask.bin", "columns.bin"):
        if checksums[name][0] == 0:
            (folder / name).unlink()
            del checksums[name]
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
        self.folder = folder
        self.identity = identity
        self.meta = json.loads((folder / "meta.json").read_text())
        spans = np.fromfile(folder / "spans.bin", dtype=np.int64)
        learned = np.fromfile(folder / "learned.bin", dtype=np.int64)
        self.spans = spans.reshape(-1, documents_per_sample, 2)
        self.document_lengths = self.spans[..., 1] - self.spans[..., 0] - 1
        self.columns = None  # registered ones of each document, NaN: none
        if "columns.bin" in self.meta["checksums"]:
            columns = np.fromfile(folder / "columns.bin")
            self.columns = columns.reshape(*self.spans.shape[:2], -1)
        self.learned = learned.reshape(-1, documents_per_sample).sum(axis=1)
        self._maps = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_maps": None}  # numpy would pickle a map as a copy of the file

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, row: int) -> list[dict]:
        ids, mask = self.maps()
        documents = [
            shifted(ids[start:stop], None if mask is None else mask[start:stop])
            for start, stop in self.spans[row]
        ]
        of_row = () if self.columns is None else self.columns[row].tolist()
        for of_document, values in zip(documents, of_row, strict=False):
            columns = zip(self.meta["columns"], values, strict=True)
            of_document.update((name, value) for name, value in columns if value == value)
        return documents

    def maps(self) -> tuple[np.ndarray, np.ndarray | None]:
        """(tokens of all documents one after another, whether each is learned; None: all are)."""
        if self._maps is None:
            ids = np.memmap(self.folder / "ids.bin", dtype=np.int32, mode="r")
            mask = None
            if "mask.bin" in self.meta["checksums"]:
                mask = np.memmap(self.folder / "mask.bin", dtype=np.uint8, mode="r")
            self._maps = ids, mask
        return self._maps


def shifted(ids: np.ndarray, mask: np.ndarray | None, columns=()) -> dict:
    """{"input_ids", "labels"} int64 [n - 1] of n tokens, and the registered columns; mask: 1 for
    those that are learned, None: all are."""
    tokens = np.array(ids, dtype=np.int64)
    labels = tokens[1:].copy()
    if mask is not None:
        labels[mask[1:] == 0] = IGNORE_INDEX
    return {"input_ids": tokens[:-1], "labels": labels, **dict(columns)}
