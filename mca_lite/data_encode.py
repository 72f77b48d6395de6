"""From the files of a dataset to token ids with a loss mask: its records one after another, and
the documents of each sample, not shifted yet."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .data_chat import ChatRenderer
from .data_files import SIDES, Cursor, DatasetSpec, plain_kind_of, read_records
from .data_records import conversations, detect_format, document
from .objectives import objective_of

# in the words of tallies, by which a reader of counts knows them
CUT = "longer than cutoff_len"
NO_LABELS = "token to train on"
BAD = "records cannot be used and were left out: "
_IDENTICAL = "pairs have the same chosen and rejected answer and were left out"
_MAX_BAD_SHARE = 0.1  # of the records: above it, it is the declaration that is wrong
_LISTED = 10  # bad records whose places are told

# (ids int32 [n], mask uint8 [n]: 1 for tokens that are learned; None: all are) of a document
Document = tuple[np.ndarray, np.ndarray | None]
# (number of its record in the chunk, its documents) of a sample
Sample = tuple[int, list[Document]]
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

    @property
    def num_bad(self) -> int:
        return sum(count for what, count in self.counts.items() if what.startswith(BAD))

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
        if self.num_bad > _MAX_BAD_SHARE * max(self.records, few_records):
            raise ValueError(
                f"{self.num_bad:,} of {self.records:,} records cannot be used, and on_bad_record: "
                f"skip leaves out at most {100 * _MAX_BAD_SHARE:.0f} %; the first:\n  "
                + "\n  ".join(self.first_bad)
            )


def joins_texts(data_args) -> bool:
    """Whether texts are joined and cut into full rows, in which they see each other."""
    return data_args.packing is not False and not data_args.neat_packing


class Encoder:
    """Turns the records of a dataset into the documents of samples: one for a text or a
    conversation, chosen and rejected for a pair.

    A document has at most cutoff_len + 1 tokens: the end of a longer one is cut. A pair loses the
    beginning of its prompt instead, the same tokens on both sides and all but the last one at most,
    and then the end of an answer. Where texts are joined (joins), they are kept whole, to be cut
    later. data_args: DataArguments. Picklable, for worker processes.
    Raises: ValueError for a tokenizer that cannot be used in this stage.
    """

    def __init__(self, tokenizer, spec: DatasetSpec, stage: str, data_args):
        self.tokenizer, self.spec, self.stage, self.args = tokenizer, spec, stage, data_args
        self.skips = data_args.on_bad_record == "skip"
        limits = [n for n in (data_args.max_samples, spec.num_samples) if n is not None]
        self.limit = min(limits, default=None)  # only the first so many records
        # asked once: worker processes need not know the objectives that a script registers
        objective = objective_of(stage)
        self.has_pairs, self.is_text = objective.has_pairs, objective.joins_documents
        self.joins = self.is_text and joins_texts(data_args)
        self.last_answer_only = data_args.mask_history or self.has_pairs
        self.documents_per_sample = len(SIDES) if self.has_pairs else 1
        self.notes: list[str] = []
        if any(plain_kind_of(file) == ".txt" for file in spec.files):
            by = data_args.sample_by
            what = "the whole file" if by == "document" else "each line"
            self.notes.append(f"of a .txt file {what} is a document (sample_by: {by})")
        if self.is_text:
            if tokenizer.eos_token_id is None:
                raise ValueError(
                    f"the tokenizer has no eos_token to end a document of stage: {stage}: set it "
                    "in its config"
                )
            return
        thinking = data_args.enable_thinking
        self.renderer = ChatRenderer(tokenizer, thinking)
        if thinking is not None and "enable_thinking" not in str(tokenizer.chat_template):
            self.notes.append("the chat template does not read enable_thinking")
        if not self.renderer.end_of_turn():
            self.notes.append(
                "the chat template writes nothing after an answer: the model will not learn to stop"
            )

    def options(self) -> dict:
        """What decides on the result, beside the records and the tokenizer."""
        keys = ("cutoff_len", "train_on_prompt", "default_system", "enable_thinking")
        return {
            "records": [self.is_text, self.has_pairs],
            "joins": self.joins,
            "last_answer_only": self.last_answer_only,
            "skips": self.skips,
            **{key: getattr(self.args, key) for key in keys},
        }

    # -- files to records

    def records(
        self, formats: dict[str, str], start: Place = BEGINNING, refuse_empty: bool = False
    ) -> Iterator[tuple[tuple[str, str, object], Place]]:
        """((place in the user's data, format, record), where the next one begins) of the records
        from `start` on; a ValueError stands for one that could not be read.

        formats: gets the format of each file, from the first record that shows one. refuse_empty:
        a file without a record is a ValueError, as no record at all is in any case.
        """
        first, number, offset, behind = start
        cursor, taken = Cursor(number, offset), behind
        for at, file in enumerate(self.spec.files[first:], first):
            form = self._format_above(file) if cursor.number else ""
            before = taken
            for where, record in read_records(file, self.skips, self.args.sample_by, cursor):
                if not form:
                    form, record = self._first_format(record, where)
                    if form:
                        formats[file] = form
                taken += 1
                yield (where, form, record), (at, cursor.number, cursor.offset, taken)
                if taken == self.limit:
                    return
            if refuse_empty and taken == before:
                raise ValueError(f"{file}: the file holds no record")
            cursor = Cursor()
        if taken == behind:
            after = ", without those that val_size holds out" if behind else ""
            raise ValueError(f"{self.spec.name}: there is no record to train on{after}")

    def format_of(self, record, where: str) -> str:
        """The format of a file, from its first record."""
        self._refuse_other_kinds(record, where)
        return detect_format(record, self.spec, self.stage, where)

    def _first_format(self, record, where: str) -> tuple[str, object]:
        """(format, record), or ("", its ValueError) of one that shows none."""
        try:
            if isinstance(record, ValueError):
                raise record
            return self.format_of(record, where), record
        except ValueError as error:
            if not self.skips:
                raise
            return "", error

    def _format_above(self, file: str) -> str:
        """The format of a file of which some records are behind."""
        records = read_records(file, self.skips, self.args.sample_by)
        found = (self._first_format(record, where)[0] for where, record in records)
        return next(filter(None, found), "")

    # -- records to samples

    def encode(self, chunk: list[tuple[str, str, object]]) -> tuple[list[Sample], Tally]:
        """The samples that are kept, in their order, and what happened to the records. chunk:
        (place, format, record) of each, as records() gives them.

        Raises: ValueError with the place for a record that cannot be used, unless it skips them.
        """
        tally, places, rendered = Tally(records=len(chunk)), [], []
        for number, (where, form, record) in enumerate(chunk):
            try:
                if isinstance(record, ValueError):
                    raise record
                self._refuse_other_kinds(record, where)
                found = self._rendered(where, form, record, tally)
            except ValueError as error:
                if not self.skips:
                    raise
                tally.refuse(where, str(error).removeprefix(where).removeprefix(": "))
                continue
            places += [(number, where)] * (len(found) // self.documents_per_sample)
            rendered += found
        documents, kept = iter(self._tokenize(rendered)), []
        for number, where in places:
            sample = list(itertools.islice(documents, self.documents_per_sample))
            sample = self._cut(sample, tally, where)
            if reason := self._why_left_out(sample):
                tally.count(reason, where)
            else:
                kept.append((number, sample))
        return kept, tally

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

    # -- records to documents

    def _refuse_other_kinds(self, record, where: str) -> None:
        """ValueError for records of which a text model would learn what they do not mean."""
        if self.is_text or not isinstance(record, dict):
            return
        for column in () if self.has_pairs else ("kto_tag", "label"):
            if isinstance(record.get(column), bool):
                raise ValueError(
                    f"{where}: the column {column!r} says whether an answer is good, and every "
                    "answer would be trained: keep the good ones, and leave the column out"
                )
        for column in ("images", "videos", "audios"):
            if record.get(column):
                raise ValueError(
                    f"{where}: the column {column!r} is there, and models here read text"
                )

    def _rendered(self, where: str, form: str, record, tally: Tally) -> list[tuple[str, list]]:
        """(text, spans that are learned) of each document of a record, [] for one that has nothing
        to learn."""
        if self.is_text:
            return [(document(record, self.spec, where), [])]
        system = self.args.default_system
        found, tools = conversations(record, self.spec, form, self.has_pairs, system, where)
        if any(_is_empty(messages[-1]) for messages in found):
            what = "pairs" if self.has_pairs else "samples"
            tally.count(f"{what} have an empty answer and were left out", where)
            return []
        if self.has_pairs and found[0] == found[1]:
            tally.count(_IDENTICAL, where)
            return []
        trained = "answers"
        if self.args.train_on_prompt:
            trained = "all"
        elif self.last_answer_only:
            trained = "last"
        rendered = []
        for messages in found:
            samples = self.renderer.render(messages, tools, trained, where)
            if len(samples) > 1:
                what = "became several samples, for the template strips their thinking"
                tally.count(f"conversations {what}", where)
            rendered += samples
        return rendered

    def _tokenize(self, rendered: list[tuple[str, list]]) -> list[Document]:
        """The document of each text and its spans."""
        if not rendered:
            return []
        # A model that was trained with bos before each document gets it, with the end token. A chat
        # template has written every special token already. Tokenised whole, so that the borders of
        # tokens are those which the model sees when it is used.
        batch = self.tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=self.is_text,
            return_offsets_mapping=not self.is_text,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        if self.is_text:
            texts = zip(batch["input_ids"], rendered, strict=True)
            return [(self._ended(ids if text else []), None) for ids, (text, _) in texts]
        rows = zip(batch["input_ids"], batch["offset_mapping"], rendered, strict=True)
        return [
            (np.array(ids, dtype=np.int32), mask_of_spans(offsets, spans))
            for ids, offsets, (_, spans) in rows
        ]

    def _ended(self, ids: list[int]) -> np.ndarray:
        """The tokens of a text with the end token; none of an empty one."""
        eos = self.tokenizer.eos_token_id
        if ids and ids[-1] != eos:
            ids = [*ids, eos]
        return np.array(ids, dtype=np.int32)

    # -- cutting

    def _cut(self, documents: list[Document], tally: Tally, where: str) -> list[Document]:
        """The documents cut to cutoff_len + 1 tokens."""
        limit, longest = self.args.cutoff_len + 1, max(len(ids) for ids, _ in documents)
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
