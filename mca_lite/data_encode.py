"""From the files of a dataset to token ids with a loss mask: what its records say, one after
another (Reader), and the documents of each sample, not shifted yet (Encoder)."""

import itertools
import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context

import numpy as np

from .data_chat import ChatRenderer, Rendered, in_time
from .data_files import SIDES, Cursor, DatasetSpec, read_records
from .data_records import Conversation, conversations, detect_format, document
from .objectives import Objective

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

# (its place, what it says: a text, or conversations; or the ValueError of one that cannot be used)
# of a record
Record = tuple[str, str | list[Conversation] | ValueError]
# (ids int32 [n], mask uint8 [n]: 1 for tokens that are learned; None: all are) of a document
Document = tuple[np.ndarray, np.ndarray | None]
Sample = list[Document]
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
        self.spec, self.objective = spec, objective
        self.skips, self.system = data_args.on_bad_record == "skip", data_args.default_system
        self.ignored = data_args.ignore_message_keys
        limits = [n for n in (data_args.max_samples, spec.num_samples) if n is not None]
        self.limit = min(limits, default=None)  # only the first so many records
        self.formats: dict[str, str] = {}

    def records(
        self, start: Place = BEGINNING, refuse_empty: bool = False
    ) -> Iterator[tuple[Record, Place]]:
        """(record, where the next one begins) of the records from `start` on.

        refuse_empty: a file without a record is a ValueError, as no record at all is in any case.
        """
        first, number, offset, behind = start
        cursor, taken = Cursor(number, offset), behind
        for at, (file, kind) in list(enumerate(self.spec.files.items()))[first:]:
            if cursor.number:
                self._find_format(file, kind)
            before = taken
            for where, record in read_records(file, kind, self.skips, cursor):
                taken += 1
                said = self._read(file, where, record)
                yield (where, said), (at, cursor.number, cursor.offset, taken)
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
        """What a record says, or the ValueError of one that cannot be used.

        Raises: that ValueError, where the record should show the format of its file and may not be
        left out.
        """
        if isinstance(record, ValueError):
            return record
        try:
            _refuse_other_kinds(record, self.objective, where)
            if file not in self.formats:
                self.formats[file] = detect_format(record, self.spec, self.objective, where)
            if self.objective.joins_documents:
                return document(record, self.spec, where)
            form, pairs = self.formats[file], self.objective.has_pairs
            more = (self.system, where, self.ignored)
            return conversations(record, self.spec, form, pairs, *more)
        except ValueError as error:
            if file not in self.formats and not self.skips:
                raise
            return error


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
        self.tokenizer, self.renderer = tokenizer, renderer
        # not the objective: worker processes need not know those that a script registers
        self.has_pairs, self.is_text = objective.has_pairs, objective.joins_documents
        self.cutoff_len, self.skips = data_args.cutoff_len, data_args.on_bad_record == "skip"
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
        if self.is_text and tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no eos_token to end a document of stage: "
                f"{objective.stage}: set it in its config"
            )

    def encode(self, chunk: list[Record]) -> tuple[list[Sample], Tally]:
        """The samples that are kept, in their order, and what happened to the records.

        Raises: ValueError with the place for a record that cannot be used, unless it skips them.
        """
        tally, places, rendered = Tally(records=len(chunk)), [], []
        at = ""

        def render_all() -> None:
            nonlocal at, rendered, places
            for at, said in chunk:
                try:
                    found = self._rendered(at, said, tally)
                except ValueError as error:
                    if not self.skips:
                        raise
                    tally.refuse(at, str(error).removeprefix(at).removeprefix(": "))
                    continue
                places += [at] * (len(found) // self.documents_per_sample)
                rendered += found

        in_time(render_all, lambda: at)
        documents, kept = iter(self._tokenize(rendered)), []
        for where in places:
            sample = list(itertools.islice(documents, self.documents_per_sample))
            sample = self._cut(sample, tally, where)
            if reason := self._why_left_out(sample):
                tally.count(reason, where)
            else:
                kept.append(sample)
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
        limit, longest = self.cutoff_len + 1, max(len(ids) for ids, _ in documents)
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
