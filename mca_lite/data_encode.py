"""From the files of a dataset to token ids with a loss mask: Reader reads records, Encoder turns
records into unshifted documents, load_shard keeps the documents in the token cache."""

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import cpu_count, get_context
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil
from transformers import PreTrainedTokenizerBase

from . import data_chat, data_files, data_records
from .data_chat import ChatRenderer, Rendered, in_time, kept_of_turn
from .data_files import SIDES, Cursor, DatasetSpec, Progress, build_once, read_records
from .data_records import conversations, detect_format, document
from .errors import Keys, expect
from .files import (
    IGNORE_INDEX,
    cache_folder,
    checksum,
    describe_error,
    sync,
    write_file,
    write_json,
)
from .inputs import TEXT, Media
from .tables import ANSWER_LABEL, TOKENS, Objective

_MAX_BAD_SHARE = 0.1  # a larger share of bad records points to a wrong declaration
_MOST_CHARACTERS = (
    1_000_000  # the longest text read for cutoff_len tokens; or 32 characters per token, if more
)
CHUNK_RECORDS = 500  # records tokenised at once
PARALLEL_FROM_RECORDS = 10_000  # below this, starting worker processes takes longer than they save
_MOST_WORKERS = 8
_UNREAD = "not read"  # the format of a file before a record shows it

# A record: (place, content, registered columns). The content is a text, list[Conversation], the
# record itself for a stage's encoder, or the ValueError of an unusable record.
Record = tuple[str, Any, dict[str, float]]
# A document's tokens, int32 [n]: the id of a trained token; ~id, below 0, of a token without loss.
Document: TypeAlias = np.ndarray
# A sample: documents with their registered columns, and "media" if the document has any.
Sample = list[tuple[Document, dict[str, Any]]]
# How far a dataset was read: (file, lines or records of that file, bytes of it, records in all).
Place = tuple[int, ...]
BEGINNING: Place = (0, 0, 0, 0)

# -- counts of records

# kinds of counts
BAD = "bad"  # left out: the record cannot be used
CUT = "truncated"  # cut to cutoff_len
UNLABELED = "label-less"  # left out: no token to train on
LEFT_OUT = "left out besides"
NOTE = "note"  # worth a warning, and trained

_IDENTICAL = "pairs have the same chosen and rejected answer and were left out"
_PLAIN = "prompts and completions are texts, trained without a chat template"
_THOUGHTLESS = (
    "conversations have thinking, and the chat template leaves it out; some write it with "
    "enable_thinking: true"
)
_STRIPPED = (
    "conversations are trained without the thinking of earlier turns, which the template strips; "
    "train_on_prompt: false trains each turn with its own"
)
_FILM_AS_TEXT = "records have marks of video or audio, which are trained as text"
_SEVERAL = "conversations became several samples, for the template strips their thinking"


@dataclass
class Tally:
    """Counts what happens to a dataset's records and samples. records: how many were read. counts:
    by a text that completes the report line "<count> ...", such as "records cannot be used ...".
    kinds: text -> BAD, CUT, .... places: text -> its first record's place."""

    records: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def count(self, kind: str, text: str, place: str) -> None:
        self.counts[text] += 1
        self.kinds[text] = kind
        self.places.setdefault(text, place)

    def refuse(self, place: str, reason: str) -> None:
        # message numbers are replaced, or each record would have a different reason
        reason = re.sub(r"\d+", "N", reason)[:200]
        self.count(BAD, f"records cannot be used and were left out: {reason}", place)

    def number(self, kind: str) -> int:
        """The sum of the counts of one kind, such as BAD (records that cannot be used)."""
        return sum(self.counts[text] for text in self.kinds if self.kinds[text] == kind)

    def add(self, later: "Tally") -> None:
        """Add the counts of later records, in place."""
        self.records += later.records
        self.counts += later.counts
        self.kinds |= later.kinds
        self.places = later.places | self.places

    def lines(self) -> list[str]:
        """Report lines, one per text in `counts`: its count, and where it was counted first."""
        places = self.places.items()
        return [f"{self.counts[text]:,} {text}, the first at {place}" for text, place in places]

    def check(self, few_records: int = 0) -> None:
        """Raise ValueError if more than a tenth of the records is bad (cannot be used). Fewer
        records than few_records are judged as if there were that many."""
        bad = self.number(BAD)
        if bad > _MAX_BAD_SHARE * max(self.records, few_records):
            raise ValueError(
                f"{bad:,} of {self.records:,} records cannot be used, and on_bad_record: skip "
                f"leaves out at most {100 * _MAX_BAD_SHARE:.0f} %:\n  " + "\n  ".join(self.lines())
            )


# -- files to records


class Reader:
    """Reads the records of one dataset's files. formats: file -> its record format, such as
    "alpaca"; "not read" before a record shows it. media: reads inputs other than text."""

    def __init__(
        self, spec: DatasetSpec, objective: Objective, data_args: Keys, media: Media = TEXT
    ) -> None:
        self.spec = spec
        self.objective = objective
        self.args = data_args
        self.media = media
        self.skips = data_args.on_bad_record == "skip"
        # the maximum number of records, if any
        self.limit = min(filter(None, (data_args.max_samples, spec.num_samples)), default=None)
        self.formats = dict.fromkeys(spec.files, _UNREAD)
        self.columns = data_records.dataset_columns(spec, data_args)
        self.columns |= dict.fromkeys(objective.columns)  # their values come from records alone

    def records(self, start: Place = BEGINNING) -> Iterator[tuple[Record, Place]]:
        """Yield (record, position after it), from position `start` on. Raises ValueError if there
        is no record there or a file is damaged; unless bad records are skipped, also for a line
        that cannot be read, and for a bad record before one has shown the file's format."""
        first, number, offset, taken = start
        cursor = Cursor(number, offset)
        files = list(enumerate(self.spec.files.items()))
        for at, (file, kind) in files[first:]:
            if cursor.number:
                self._detect_format(file, kind)
            for where, record in read_records(file, kind, self.skips, cursor):
                taken += 1
                read = self._read(file, where, record)
                yield (where, *read), (at, cursor.number, cursor.offset, taken)
                if taken == self.limit:
                    return
            cursor = Cursor()
        expect(taken > start[-1], f"{self.spec.name}: there is no record to train on")

    def _detect_format(self, file: str, kind: str) -> None:
        """Read a file from its beginning until a record shows the file's format."""
        for where, record in read_records(file, kind, self.skips):
            self._read(file, where, record)
            if self.formats[file] != _UNREAD:
                return

    def _read(self, file: str, where: str, record: Any) -> tuple[Any, dict[str, Any]]:
        """(content, {column: value}) of a record. For a record that cannot be read, the content is
        its ValueError, which is raised instead if the file's format is not yet known and bad
        records are not skipped."""
        if isinstance(record, ValueError):
            return record, {}
        try:
            values = data_records.column_values(record, self.columns, where)
            if self.objective.scores and "pair_margin" not in values:
                data_records.refuse_margin(record, where)
            if self.formats[file] == _UNREAD:
                self.formats[file] = detect_format(record, self.spec, self.objective, where)
            if self.formats[file] == TOKENS:
                return record, values
            labelled = self.objective.has_labels
            if labelled:
                is_binary = self.objective.has_binary_labels
                values[ANSWER_LABEL] = data_records.label_of(record, self.spec, where, is_binary)
            if self.objective.joins_documents:
                return document(record, self.spec, where), values
            options = (self.args.default_system, where, self.args.ignore_message_keys)
            kind = (self.formats[file], self.objective.has_pairs)
            read = conversations(
                record, self.spec, *kind, *options, media=self.media, labelled=labelled
            )
            return read, values
        except ValueError as error:
            if self.formats[file] == _UNREAD and not self.skips:
                raise
            return error, {}


# -- records to samples


def joins_texts(data_args: Keys) -> bool:
    """True if texts are to be joined and cut into full rows of tokens, with attention across the
    borders of texts: the key packing is true or None, and neat_packing is not true."""
    return data_args.packing is not False and not data_args.neat_packing


class Encoder:
    """Tokenises records into samples of one document, or of two for a pair: chosen and rejected.
    Picklable, for worker processes.

    A document with more than cutoff_len inputs is cut at its end. A pair is first cut at the start
    of its prompt, by the same tokens on both sides. cutoff_rule: proportion cuts by kept_of_turn
    instead. Texts to be joined (joins) are not cut; no image is cut in two. renderer: for
    conversations; None for texts and token ids. data_args: DataArguments. media: the model's Media.
    options: facts beside records and tokenizer that change the result. Raises ValueError if texts
    are trained and the tokenizer is slow or lacks eos, or for proportion with a model of images.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        renderer: ChatRenderer | None,
        objective: Objective,
        data_args: Keys,
        media: Media = TEXT,
    ) -> None:
        self.tokenizer = tokenizer
        self.media = media
        self.renderer = renderer
        # worker processes need not import a script that registers an objective: only facts about it
        # are kept
        self.has_pairs = objective.has_pairs
        self.is_text = objective.joins_documents
        self.units = f"{objective.unit}s"
        self.cutoff_len = data_args.cutoff_len
        self.scores = objective.scores  # a score reads the whole document, its last token too
        self.skips = data_args.on_bad_record == "skip"
        self.joins = self.is_text and joins_texts(data_args)
        self.documents_per_sample = len(SIDES) if self.has_pairs else 1
        last_answer_only = data_args.mask_history or self.has_pairs or objective.has_labels
        self.trained = "last" if last_answer_only else "answers"
        if data_args.train_on_prompt:
            self.trained = "all"
        keys = ("cutoff_len", "default_system", "enable_thinking", "ignore_message_keys")
        self.options = {
            "records": [self.is_text, self.has_pairs],
            "joins": self.joins,
            "trained": self.trained,
            "skips": self.skips,
            **{key: getattr(data_args, key) for key in keys},
        }
        if self.scores:
            self.options["scores"] = True
        self.cuts_in_proportion = data_args.cutoff_rule == "proportion"
        if self.cuts_in_proportion:
            self.options["cutoff_rule"] = data_args.cutoff_rule
            expect(not media.block, "cutoff_rule: proportion would cut through pictures: set end")
        if data_args.end_of_answer:
            self.options["end_of_answer"] = data_args.end_of_answer
        self.options |= media.options
        expect(
            not self.is_text or (tokenizer.is_fast and tokenizer.eos_token_id is not None),
            f"stage {objective.stage} ends documents with the tokenizer's eos_token: set it in "
            "its config, and expected a fast tokenizer (one with a tokenizer.json)",
        )
        end = tokenizer.eos_token_id
        self.adds_end = end is not None and tokenizer("")["input_ids"][-1:] == [end]

    def encode(self, chunk: list[Record]) -> tuple[list[Sample], Tally]:
        """Tokenise a list of records -> (samples kept, in order; Tally of the records). Raises
        ValueError, naming its "file:line", for an unusable record, unless bad records are skipped.
        Also if the chat template takes too long or the tokenizer gives up."""
        tally = Tally(records=len(chunk))
        rendered: list[tuple[str, dict[str, Any], Rendered]] = []  # (place, columns, text)
        current = ""

        def render_all() -> None:
            nonlocal current
            for current, content, values in chunk:
                try:
                    if values and self.joins:
                        raise ValueError(
                            f"{current}: the record or its dataset has {list(values)}, but texts "
                            "are joined: set packing: false"
                        )
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
            of_sample = slice(first, first + self.documents_per_sample)
            media = [list(text.media) for *_, text in rendered[of_sample]]
            sample = self._cut(documents[of_sample], media, tally, where)
            if self.scores:
                sample = list(map(_with_target, sample))
            if not self._leaves_out(sample, tally, where):
                columns = [values | ({"media": some} if some else {}) for some in media]
                kept.append(list(zip(sample, columns, strict=True)))
        return kept, tally

    def _render(self, where: str, content: Any, tally: Tally) -> list[Rendered]:
        """A record's documents as text. [] if the record is left out, because an answer is empty or
        chosen and rejected are the same; `tally` counts it. Raises ValueError for an unusable
        record."""
        if isinstance(content, ValueError):
            raise content
        text = str(content)
        self.check_size(len(text), where)
        if mark := self.media.unread_marks.search(text):
            self.media.check_mark(mark.group(), where)
            tally.count(NOTE, _FILM_AS_TEXT, where)
        if self.renderer is None:
            return [self._placed(Rendered(content, [], is_plain=True), (), where)]
        answers = [conversation.messages[-1] for conversation in content]
        if not all(one["content"].strip() or one.get("tool_calls") for one in answers):
            tally.count(LEFT_OUT, f"{self.units} have an empty answer and were left out", where)
            return []
        first, *others = content
        if first in others:
            tally.count(LEFT_OUT, _IDENTICAL, where)
            return []
        for option in first.options:
            if not self.renderer.reads(option):
                what = f"records give {option} to the chat template, which lacks it"
                tally.count(NOTE, what, where)
        if first.is_plain:
            tally.count(NOTE, _PLAIN, where)
        samples = [self.renderer.render(each, self.trained, where) for each in content]
        if max(map(len, samples)) > 1:
            tally.count(NOTE, _SEVERAL, where)
        if any(one.lacks_thinking for one in itertools.chain(*samples)):
            tally.count(NOTE, _THOUGHTLESS, where)
        if any(one.strips_thinking for one in itertools.chain(*samples)):
            tally.count(NOTE, _STRIPPED, where)
        return [
            self._placed(rendered, conversation.media, where)
            for conversation, of_conversation in zip(content, samples, strict=True)
            for rendered in of_conversation
        ]

    def _placed(self, rendered: Rendered, media: tuple[Any, ...], where: str) -> Rendered:
        """`rendered` with the images and other inputs of its conversation (`media`) that occur in
        its text, and with their sizes."""
        placed = self.media.placed(rendered.text, media, where)
        return Rendered(rendered.text, rendered.spans, rendered.is_plain, placed)

    def check_size(self, size: int, where: str) -> None:
        """Raise ValueError that names `where` if a record's `size` in characters is far above what
        cutoff_len keeps, because tokenising takes memory. Texts to be joined may have any size."""
        most = max(_MOST_CHARACTERS, 32 * self.cutoff_len)
        expect(
            size <= most or self.joins,
            f"{where}: the record has {size:,} characters, and of records that are cut to "
            f"cutoff_len {self.cutoff_len} at most {most:,} are read: split or remove it, or "
            "set on_bad_record: skip",
        )

    def _tokenize(self, rendered: list[Rendered]) -> list[Document]:
        """Tokenise texts, each as a whole -> one document per text. Tokens that overlap a text's
        spans have a loss, but placeholders (of images and the like) have none; in texts for
        pretraining all tokens have a loss. A text that no chat template wrote (is_plain) gets the
        special tokens that the tokenizer adds, such as bos."""
        documents: list[Document] = []
        for is_plain, group in itertools.groupby(rendered, key=lambda one: one.is_plain):
            alike = list(group)
            batch = self._tokens([one.text for one in alike], is_plain)
            for ids in batch["input_ids"] if is_plain and self.adds_end else ():
                if ids[-2:] == 2 * [self.tokenizer.eos_token_id]:  # the text had an eos already
                    ids.pop()
            if self.is_text:
                documents += map(self._ended, alike, batch["input_ids"])
                continue
            rows = zip(batch["input_ids"], batch["offset_mapping"], alike, strict=True)
            for ids, offsets, one in rows:
                tokens = np.array(ids, dtype=np.int32)
                trained = mask_of_spans(offsets[: len(ids)], one.spans)
                document = np.where(trained, tokens, ~tokens)
                documents.append(self.media.expand(document, one.media))
        return documents

    def _tokens(self, texts: list[str], is_plain: bool) -> Any:
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
            if (
                type(error).__name__ != "PanicException"
            ):  # an error of Rust code that no module exports
                raise
            raise ValueError(
                f"the tokenizer gave up on a text of {max(map(len, texts)):,} characters "
                f"({error}): its tokenizer.json has an expression that takes too long"
            ) from None

    def _ended(self, rendered: Rendered, ids: list[int]) -> Document:
        """`ids` as a document, all trained, with eos at the end; empty if the text is empty."""
        eos = self.tokenizer.eos_token_id
        if not rendered.text:
            ids = []
        elif ids[-1:] != [eos]:
            ids = [*ids, eos]
        return np.array(ids, dtype=np.int32)

    def _cut(
        self, documents: list[Document], media: list[list[Any]], tally: Tally, where: str
    ) -> list[Document]:
        """A sample's documents, cut if one is too long for cutoff_len and texts are not joined;
        `tally` counts it. Images are not cut in two; images that are cut off are removed from
        `media`, in place."""
        limit = self.cutoff_len + 1 - int(self.scores)
        longest = max(map(len, documents))
        if self.joins or longest <= limit:
            return documents
        start = 0
        what = f"{self.units} were longer than cutoff_len {self.cutoff_len} and cut"
        if self.cuts_in_proportion:
            tally.count(CUT, f"{what} in proportion", where)
            if not self.has_pairs:
                return [_in_proportion(document, limit) for document in documents]
            prompt = _shared_prompt(*documents)
            first, more = kept_of_turn(prompt, longest - prompt, limit)
            end = prompt + more
            return [np.append(document[:first], document[prompt:end]) for document in documents]
        if self.has_pairs:
            start = min(longest - limit, max(_shared_prompt(*documents) - 1, 0))
            what += " at the beginning of their prompt"
        tally.count(CUT, what, where)
        spans = [slice(start, start + limit)] * len(documents)
        if any(media):
            count = sum(map(len, media))
            for number, document in enumerate(documents):
                fitted = self.media.fit(document, media[number], start, start + limit)
                spans[number], media[number] = fitted
            if sum(map(len, media)) < count:
                tally.count(NOTE, self.media.lost(self.units, self.cutoff_len), where)
        return [document[span] for document, span in zip(documents, spans, strict=True)]

    def _leaves_out(self, documents: list[Document], tally: Tally, where: str) -> bool:
        """True if a sample is left out: a document has no trained token after its first, or chosen
        and rejected have the same tokens. `tally` counts it."""
        first, *others = documents
        if not all(map(num_learned, documents)):
            what = f"{self.units} have no token to train on and were left out"
            tally.count(UNLABELED, what, where)
        elif any(np.array_equal(first, other) for other in others):
            tally.count(LEFT_OUT, _IDENTICAL, where)
        else:
            return False
        return True


def _with_target(document: Document) -> Document:
    """The document with one more token, which is not trained: after the shift of labels every token
    of the original is then an input, so that its last token gets a score."""
    return np.append(document, ~np.maximum(document[-1:], ~document[-1:]))


def num_learned(document: Document) -> int:
    """The number of tokens of a document that become labels with a loss. The first token is never a
    label and does not count."""
    return int((document[1:] >= 0).sum())


def _in_proportion(document: Document, limit: int) -> Document:
    """Cut a document to at most `limit` tokens, turn by turn. A turn is a prompt and its answer, a
    run of trained tokens; the last may be a prompt alone. kept_of_turn decides how many tokens each
    of the two keeps from its beginning; later turns share the tokens that earlier ones leave."""
    trained = document >= 0
    kept = []
    for turn in np.split(document, np.flatnonzero(trained[:-1] & ~trained[1:]) + 1):
        prompt = int((turn < 0).sum())
        first, more = kept_of_turn(prompt, len(turn) - prompt, limit)
        kept += [turn[:first], turn[prompt : prompt + more]]
        limit -= first + more
        if not limit:
            break
    return np.concatenate(kept)


def _shared_prompt(chosen: Document, rejected: Document) -> int:
    """The count of untrained tokens that the documents of a pair have in common at their start."""
    size = min(len(chosen), len(rejected))
    # the token at the border may belong to only one of the answers
    differ = (chosen[:size] != rejected[:size]) | (chosen[:size] >= 0)
    return int(np.append(differ, True).argmax())


def mask_of_spans(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> np.ndarray:
    """uint8 [n]: 1 for each token that starts before the end of one of the spans, and ends after
    its start. offsets: [start, end) per token."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=np.uint8)
    for start, end in spans:
        mask[(starts < end) & (ends > start)] = 1
    return mask


# -- tokenising in several processes

_worker_encoder: Encoder  # set in a worker process by _start_worker


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_encoder = encoder


def _encode_in_worker(chunk: list[Record]) -> tuple[list[Sample], Tally]:
    return _worker_encoder.encode(chunk)


def encode_all(
    reader: Reader, encoder: Encoder, workers: int | None
) -> Iterator[tuple[list[Sample], Tally]]:
    """Tokenise a dataset: yield (samples, their Tally of counts) for each chunk of its records, in
    order. Raises ValueError if a tokenising process dies.

    workers: number of tokenising processes, without effect on the result. None: one for few
    records, otherwise up to 8. If the number is 1, or the dataset has one chunk, this process
    tokenises, because starting others takes seconds."""
    records = (record for record, _ in reader.records())
    chunks = iter(lambda: list(itertools.islice(records, CHUNK_RECORDS)), [])
    head = list(itertools.islice(chunks, PARALLEL_FROM_RECORDS // CHUNK_RECORDS))
    chunks = itertools.chain(head, chunks)
    if workers is None:
        is_long = len(head) * CHUNK_RECORDS >= PARALLEL_FROM_RECORDS
        workers = min(_MOST_WORKERS, cpu_count()) if is_long else 1
    if workers <= 1 or len(head) <= 1:
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
            "`if __name__ == '__main__':`; otherwise, or for less memory, set "
            "preprocessing_num_workers: 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# -- the token cache

CACHE_FORMAT = 5
HASH_DIRECTLY_BELOW_BYTES = 64 << 20
META_NAME = "meta.json"
checked_files: set[tuple[Path, int, int]] = set()  # (path, time, size) checked by this process


def load_shard(reader: Reader, encoder: Encoder, data_args: Keys) -> "Shard":
    """Load a dataset's tokenised samples (a Shard) from the token cache. If the cache lacks them,
    one of the processes that share cache_dir tokenises the dataset now, while the others wait. On a
    file system without locks between machines, one process per machine does so. Raises ValueError
    in every calling process for unusable records, or if a shard cannot be written.

    A damaged shard is tokenised again, with a line on stderr. If overwrite_cache is set, a shard
    that is older than this process is tokenised again too."""
    cache_dir = cache_folder(data_args.cache_dir)
    key, identity = _keys(reader, encoder, cache_dir)
    folder = cache_dir / "tokens" / key
    # a shard younger than this process may be another rank's
    oldest = psutil.Process().create_time() if data_args.overwrite_cache else 0

    def is_good() -> bool:
        return damage(folder) is None and (folder / META_NAME).stat().st_mtime >= oldest

    def build(temporary: Path, progress: Progress) -> None:
        if folder.exists() and (harm := damage(folder)):
            print(
                f"{folder}: {harm}: tokenising {reader.spec.name} anew", file=sys.stderr, flush=True
            )
        row_length = data_args.cutoff_len + 1 if encoder.joins else None
        parts = encode_all(reader, encoder, data_args.preprocessing_num_workers)
        write_shard(temporary, parts, reader, row_length, progress)

    build_once(folder, build, f"tokenising {reader.spec.name}", is_good)
    return Shard(folder, encoder.documents_per_sample, identity, encoder.media)


def tokenizer_identity(tokenizer: Any) -> list[Any]:
    """Facts about a fast tokenizer that decide which tokens it gives, for hashes."""
    special = sorted(map(str, tokenizer.special_tokens_map.items()))
    return [
        type(tokenizer).__name__,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        special,
        getattr(tokenizer, "split_special_tokens", False),  # tokenizer.json does not have it
    ]


def _keys(reader: Reader, encoder: Encoder, cache_dir: Path) -> tuple[str, str]:
    """Two names for a tokenised dataset: (its folder in the token cache, its name in checkpoints).
    Both are hashes of the files' contents, the tokenizer, the dataset's declaration and the
    options. The folder's name also depends on this package's tokenising code and on the folders of
    image files. The name in checkpoints does not, so that a newer version can resume a run."""
    spec = reader.spec
    declared = ("formatting", "columns", "tags", "num_samples")
    identity = {
        "tokenizer": tokenizer_identity(encoder.tokenizer),
        "options": {**encoder.options, "limit": reader.limit},
        "declaration": {key: getattr(spec, key) for key in declared},
        "columns": reader.columns,
        # a file's kind decides how it is read; its name does not matter
        "files": [[kind, content_hash(Path(file), cache_dir)] for file, kind in spec.files.items()],
    }
    kinds = (*type(encoder.media).__mro__[:-1], *type(encoder).__mro__[:-1])
    modules = (
        data_files,
        data_records,
        data_chat,
        *(sys.modules[kind.__module__] for kind in kinds),
    )
    code: dict[str, Any] = {
        "format": CACHE_FORMAT,
        "code": [inspect.getsource(module) for module in modules],
    }
    code |= encoder.media.folders(spec.files)
    return hash_of(identity | code), hash_of(identity)


def hash_of(facts: object) -> str:
    """The sha256, in hexadecimal, of facts as JSON; a value that JSON lacks counts as its str()."""
    return _sha256(json.dumps(facts, sort_keys=True, default=str))


def content_hash(path: Path, cache_dir: Path) -> str:
    """The sha256, in hexadecimal, of a file's content. For 64 MiB and more it is cached in
    cache_dir by path, size and modification time, unless the file was written just now."""
    stat = path.stat()
    # a file written just now may change again within the same clock tick
    if stat.st_size < HASH_DIRECTLY_BELOW_BYTES or time.time() - stat.st_mtime < 2:
        return _sha256_of_file(path)
    version = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    target = cache_dir / "hashes" / _sha256(version)

    def build(temporary: Path, progress: Progress) -> None:
        write_file(temporary, _sha256_of_file(path))

    build_once(target, build, f"hashing {path}")
    return target.read_text()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(8 << 20):
            digest.update(block)
    return digest.hexdigest()


# -- a shard's files


def write_shard(
    folder: Path, parts: Iterator[Any], reader: Reader, row_length: int | None, progress: Progress
) -> None:
    """Write a token-cache shard, a new folder synced to disk: ids.bin, the documents one after
    another; <name>.bin, their columns that are arrays; index.npz, a Shard's arrays; meta.json; the
    files of Media.store.

    parts: from encode_all. row_length: join the documents and cut them into rows of this many
    tokens (row_spans); None: keep documents. Raises ValueError if too many records are bad, or as
    Arrays.add."""
    folder.mkdir()
    rows = []
    media_end: list[int] = []
    store = reader.media.store(folder)
    tally = Tally()
    arrays = Arrays(folder)
    with open(folder / "ids.bin", "wb") as tokens, arrays:
        for samples, of_chunk in parts:
            tally.add(of_chunk)
            for document, values in itertools.chain(*samples):
                tokens.write(document.tobytes())
                arrays.add(values)
                columns = (values.get(name, np.nan) for name in reader.columns)
                rows.append((len(document), num_learned(document), *columns))
                if store is not None and row_length is None:
                    media_end.append(store.add(values.get("media", ())))
            progress(f"{tally.records:,} records, {tokens.tell() // 4:,} tokens")
    tally.check()
    table = np.array(rows).reshape(len(rows), 2 + len(reader.columns))
    lengths, learned = table[:, :2].astype(np.int64).T
    stops = lengths.cumsum()
    spans = np.stack([stops - lengths, stops], axis=1)
    if row_length is not None:
        spans = row_spans(lengths.sum(), row_length)
        learned = spans[:, 1] - spans[:, 0] - 1
    np.savez(
        folder / "index.npz",
        spans=spans,
        learned=learned,
        columns=table[:, 2:],
        pictures_end=np.array(media_end, dtype=np.int64),
    )
    files = sorted(folder.iterdir())
    meta = {
        "formats": list(reader.formats.values()),
        "columns": list(reader.columns),
        "arrays": arrays.forms,
        "checksums": {path.name: checksum(path) for path in files},
        "tally": vars(tally),
    }
    write_json(folder / META_NAME, meta)
    for path in (*files, folder):
        sync(path)


class Arrays(contextlib.ExitStack):
    """Writes columns that have an array per document, one file per column; without a folder, only
    compares them. forms: {name: (dtype, shape of a token's value)} of the first document."""

    def __init__(self, folder: Path | None = None):
        super().__init__()
        self.folder = folder
        self.forms: dict[str, tuple] | None = None
        self._files: dict[str, Any] = {}

    def add(self, values: dict[str, Any]) -> None:
        """Write the arrays of one document. values: {column: value}; values that are no arrays are
        ignored. Raises ValueError if the arrays differ from the first document's in names, dtypes
        or shapes per token."""
        arrays = {name: x for name, x in values.items() if isinstance(x, np.ndarray)}
        forms = {name: (x.dtype.str, x.shape[1:]) for name, x in arrays.items()}
        if self.forms is None:
            self.forms = forms
            for name in forms if self.folder else ():
                file = open(f"{self.folder}/{name}.bin", "wb")
                self._files[name] = self.enter_context(file)
        expect(
            forms == self.forms,
            f"records have {sorted(forms) or 'no numbers of tokens'}, and the first one has "
            f"{sorted(self.forms) or 'none'}: expected the same in all records of a dataset",
        )
        for name, file in self._files.items():
            file.write(arrays[name].tobytes())


def row_spans(num_tokens: int, row_length: int) -> np.ndarray:
    """Cut joined documents of num_tokens tokens together into rows of row_length tokens -> int64
    [rows, 2], the [start, stop) of each row. The last row may be shorter. Neighbouring rows share a
    token: the last label of one is the first input of the next."""
    starts = np.arange(0, max(num_tokens - 1, 0), row_length - 1)
    return np.stack([starts, np.minimum(starts + row_length, num_tokens)], axis=1)


def damage(folder: Path) -> str | None:
    """Check the files of a token-cache shard -> a text that describes the damage (a wrong checksum,
    or a file that cannot be read); None if the shard is intact. A file that this process found good
    is checked again only if its size or time has changed."""
    try:
        meta = json.loads((folder / META_NAME).read_text())
        for name, written in meta["checksums"].items():
            path = folder / name
            version = (path, path.stat().st_mtime_ns, path.stat().st_size)
            if version not in checked_files and list(checksum(path)) != written:
                return f"{name} has other content than was written"
            checked_files.add(version)
    except Exception as error:
        return f"it cannot be read ({describe_error(error)})"
    return None


class Shard:
    """The tokenised samples of a dataset, from a folder of the token cache. `shard[r]` is the list
    of documents in sample r: {"input_ids", "labels"}, int64 [n] each. Labels are shifted: labels[t]
    is the token after input_ids[t], or IGNORE_INDEX if it has no loss. Documents may have more
    columns, such as numbers from the records, arrays with a value per token, or pixels.

    document_lengths: int64 [samples, documents per sample], number of input_ids. learned: int64
    [samples], number of labels other than IGNORE_INDEX. columns: float64 [documents, names in
    meta["columns"]], NaN without a value. meta: content of meta.json. tally: how many records were
    bad, cut or noted. identity: a hash of files, keys and tokenizer."""

    def __init__(
        self, folder: Path, documents_per_sample: int, identity: str, media: Media = TEXT
    ) -> None:
        self.folder = folder
        self.media = media
        self.documents_per_sample = documents_per_sample
        self.identity = identity
        self.meta = json.loads((folder / META_NAME).read_text())
        self.tally = Tally(**self.meta["tally"])
        index = np.load(folder / "index.npz")
        self.spans = index["spans"].reshape(-1, documents_per_sample, 2)
        self.document_lengths = self.spans[..., 1] - self.spans[..., 0] - 1
        self.learned = index["learned"].reshape(-1, documents_per_sample).sum(axis=1)
        self.columns = index["columns"]
        self.media_end = np.append(0, index["pictures_end"])

    def __reduce__(self) -> tuple[Any, ...]:  # numpy would pickle the memory map as a copy
        return Shard, (self.folder, self.documents_per_sample, self.identity, self.media)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, row: int) -> list[dict[str, Any]]:
        documents = self.documents(row)
        for document_, placed in zip(documents, self.placed(row), strict=True):
            document_.update(self.media.columns(document_["input_ids"], placed))
        return documents

    def documents(self, row: int) -> list[dict[str, Any]]:
        """The documents of sample `row`, without the columns of images and other inputs than
        text."""
        documents = []
        for start, stop in self.spans[row]:
            arrays = {name: x[start:stop] for name, x in self.arrays.items()}
            documents.append(shifted(self.tokens[start:stop], arrays))
        first = row * self.documents_per_sample
        values_of = self.columns[first : first + len(documents)].tolist()
        for document_, values in zip(documents, values_of, strict=False):
            columns = zip(self.meta["columns"], values, strict=True)
            document_.update((name, value) for name, value in columns if value == value)
        return documents

    def placed(self, row: int) -> list[list[Any]]:
        """The images and other inputs than text of sample `row`, one list per document."""
        first = row * self.documents_per_sample
        ends = self.media_end[first : first + self.documents_per_sample + 1].tolist()
        if len(self.media_end) == 1:  # the shard has text alone
            return [[] for _ in range(self.documents_per_sample)]
        store = self.media.store(self.folder)
        return [store.read(*span) for span in itertools.pairwise(ends)]

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """int32, memory-mapped: the tokens of all documents end to end. A token without loss is
        stored as ~id."""
        return np.memmap(self.folder / "ids.bin", dtype=np.int32, mode="r")

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The columns that have a value per token: {column: array [tokens, ...]}, memory-mapped,
        all documents end to end."""
        return {
            name: np.memmap(self.folder / f"{name}.bin", dtype, "r").reshape(-1, *shape)
            for name, (dtype, shape) in (self.meta["arrays"] or {}).items()
        }


def shifted(document: Document, columns: Any = ()) -> dict[str, Any]:
    """Turn a document of n tokens into inputs and labels: {"input_ids", "labels"}, int64 [n - 1].
    labels[t] is token t + 1, or IGNORE_INDEX if that token has no loss. columns: {name: value} to
    add to the result; an array [n, ...] is copied without its first value, so that its values stand
    beside the labels."""
    tokens = np.maximum(document, ~document).astype(np.int64)
    labels = np.where(document[1:] >= 0, tokens[1:], IGNORE_INDEX)
    beside = {
        name: np.array(value[1:]) if isinstance(value, np.ndarray) else value
        for name, value in dict(columns).items()
    }
    return {"input_ids": tokens[:-1], "labels": labels, **beside}
