"""From records to token ids with a loss mask: the documents of each sample, not shifted yet."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .data_chat import ChatRenderer
from .data_files import SIDES, DatasetSpec
from .data_records import conversations, detect_format, document
from .objectives import objective_of

# in the words of tallies, by which a reader of counts knows them
CUT = "longer than cutoff_len"
NO_LABELS = "token to train on"
_IDENTICAL = "pairs have the same chosen and rejected answer and were left out"


@dataclass
class Encoded:
    """The documents of a chunk of records, one after another.

    ids: int32 [T]. mask: uint8 [T], 1: learned; None: all are. lengths, learned: of each document
    its number of tokens, and of learned labels. records: how many records were read. tallies: what
    happened -> (how often, first place). bad: (place, reason) of each record that was left out
    because it cannot be used.
    """

    ids: np.ndarray
    mask: np.ndarray | None
    lengths: list[int]
    learned: list[int]
    records: int
    tallies: dict[str, tuple[int, str]]
    bad: list[tuple[str, str]]


class Encoder:
    """Turns records into the documents of samples: one for a text or a conversation, chosen and
    rejected for a pair.

    A document has at most cutoff_len + 1 tokens: the end of a longer one is cut. A pair loses the
    beginning of its prompt instead, the same tokens on both sides and all but the last one at most,
    and then the end of an answer. joins: texts are kept whole, to be joined and cut later.
    Picklable, for worker processes.
    Raises: ValueError for a tokenizer that cannot be used in this stage.
    """

    def __init__(
        self,
        tokenizer,
        spec: DatasetSpec,
        stage: str,
        cutoff_len: int,
        joins: bool = False,
        train_on_prompt: bool = False,
        mask_history: bool = False,
        default_system: str | None = None,
        enable_thinking: bool | None = None,
        on_bad_record: str = "stop",
    ):
        self.tokenizer, self.spec, self.stage = tokenizer, spec, stage
        self.cutoff_len, self.joins, self.default_system = cutoff_len, joins, default_system
        self.skips = on_bad_record == "skip"
        self.train_on_prompt, self.enable_thinking = train_on_prompt, enable_thinking
        # asked once: worker processes need not know the objectives that a script registers
        objective = objective_of(stage)
        self.has_pairs, self.is_text = objective.has_pairs, objective.joins_documents
        self.last_answer_only = mask_history or self.has_pairs
        self.documents_per_sample = len(SIDES) if self.has_pairs else 1
        self.notes: list[str] = []
        if self.is_text:
            if tokenizer.eos_token_id is None:
                raise ValueError(
                    f"the tokenizer has no eos_token to end a document of stage: {stage}: set it "
                    "in its config"
                )
        else:
            self.renderer = ChatRenderer(tokenizer, enable_thinking)
            template = str(tokenizer.chat_template)
            if enable_thinking is not None and "enable_thinking" not in template:
                self.notes.append("the chat template does not read enable_thinking")
            if not self.renderer.end_of_turn():
                self.notes.append(
                    "the chat template writes nothing after an answer: the model will not learn to "
                    "stop"
                )

    def options(self) -> dict:
        """What decides on the result, beside the records and the tokenizer."""
        return {
            "records": [self.is_text, self.has_pairs],
            "cutoff_len": self.cutoff_len,
            "joins": self.joins,
            "train_on_prompt": self.train_on_prompt,
            "last_answer_only": self.last_answer_only,
            "default_system": self.default_system,
            "enable_thinking": self.enable_thinking,
            "skips": self.skips,
        }

    def format_of(self, record, where: str) -> str:
        """The format of a file, from its first record."""
        self._refuse_other_kinds(record, where)
        return detect_format(record, self.spec, self.stage, where)

    def encode(self, chunk: list[tuple[str, str, object]]) -> Encoded:
        """The documents of the samples that are kept. chunk: (place, format, record) of each
        record; a ValueError stands for one that could not be read.

        Raises: ValueError with the place for a record that cannot be used, unless it skips them.
        """
        tallies: dict[str, tuple[int, str]] = {}
        bad: list[tuple[str, str]] = []
        samples = self.samples(chunk, tallies, bad)
        kept = [document for _, documents, _ in samples for document in documents]
        return Encoded(
            ids=np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in kept)]),
            mask=None
            if self.is_text
            else np.concatenate([np.zeros(0, np.uint8), *(mask for _, mask in kept)]),
            lengths=[len(ids) for ids, _ in kept],
            learned=[target for _, _, targets in samples for target in targets],
            records=len(chunk),
            tallies=tallies,
            bad=bad,
        )

    def samples(
        self, chunk: list[tuple[str, str, object]], tallies: dict, bad: list
    ) -> list[tuple[int, list[tuple], list[int]]]:
        """(number of its record in the chunk, (ids, mask) of each document, learned labels of each)
        of the samples that are kept, in their order; adds to `tallies` and `bad`, as Encoded has
        them."""
        read = self._texts(chunk, bad) if self.is_text else self._conversations(chunk, tallies, bad)
        kept = []
        for (number, where), documents in read:
            documents = self._cut(documents, tallies, where)
            # nothing predicts the first token of a document
            targets = [int(mask[1:].sum()) for _, mask in documents]
            if reason := self._why_left_out(documents, targets):
                _count(tallies, reason, where)
                continue
            kept.append((number, documents, targets))
        return kept

    def _why_left_out(self, documents: list[tuple], targets: list[int]) -> str | None:
        if self.has_pairs:
            if not all(targets):
                return f"pairs have an answer without a {NO_LABELS} and were left out"
            (chosen, _), (rejected, _) = documents
            return _IDENTICAL if np.array_equal(chosen, rejected) else None
        if targets[0] == 0 and not (self.joins and len(documents[0][0]) > 1):
            return f"samples have no {NO_LABELS} and were left out"
        return None

    # -- records to documents

    def _read(self, chunk, read: Callable, bad: list) -> list[tuple]:
        """((number, place), read(place, format, record)) of each record; `bad` gets those that it
        refuses."""
        found = []
        for number, (where, form, record) in enumerate(chunk):
            try:
                if isinstance(record, ValueError):
                    raise record
                self._refuse_other_kinds(record, where)
                found.append(((number, where), read(where, form, record)))
            except ValueError as error:
                if not self.skips:
                    raise
                bad.append((where, str(error).removeprefix(where).removeprefix(": ")))
        return found

    def _refuse_other_kinds(self, record, where: str) -> None:
        if isinstance(record, dict) and not self.is_text:
            _refuse_other_kinds(record, where, self.has_pairs)

    def _texts(self, chunk, bad: list) -> list[tuple[tuple, list]]:
        """((number, place), [(ids, mask)]) of each text, with the end token."""
        found = self._read(chunk, lambda where, _, record: document(record, self.spec, where), bad)
        if not found:
            return []
        places, texts = zip(*found, strict=True)
        eos = self.tokenizer.eos_token_id
        # With the tokenizer's own special tokens: a model that was trained with bos before each
        # document gets it.
        batch = self.tokenizer(
            list(texts), return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        samples = []
        for place, text, row in zip(places, texts, batch["input_ids"], strict=True):
            if row[-1:] != [eos]:
                row = [*row, eos]
            ids = np.array(row if text else [], dtype=np.int32)
            samples.append((place, [(ids, np.ones(len(ids), np.uint8))]))
        return samples

    def _conversations(self, chunk, tallies: dict, bad: list) -> list[tuple[tuple, list]]:
        """((number, place), [(ids, mask) of each document]) of each record that has something to
        learn."""

        def read(where: str, form: str, record) -> list[tuple[str, list]]:
            return self._rendered(where, form, record, tallies)

        places, rendered = [], []
        for place, samples in self._read(chunk, read, bad):
            places += [place] * (len(samples) // self.documents_per_sample)
            rendered += samples
        documents = self._tokenize(rendered) if rendered else []
        count = self.documents_per_sample
        return [(place, documents[i * count :][:count]) for i, place in enumerate(places)]

    def _rendered(self, where: str, form: str, record, tallies: dict) -> list[tuple[str, list]]:
        """(text, spans) of each document of a record, [] for one that has nothing to learn."""
        found, tools = conversations(
            record, self.spec, form, self.has_pairs, self.default_system, where
        )
        if any(_is_empty(messages[-1]) for messages in found):
            what = "pairs" if self.has_pairs else "samples"
            _count(tallies, f"{what} have an empty answer and were left out", where)
            return []
        if self.has_pairs and found[0] == found[1]:
            _count(tallies, _IDENTICAL, where)
            return []
        return [sample for turns in found for sample in self._render(turns, tools, where, tallies)]

    def _render(
        self, messages: list[dict], tools: list | None, where: str, tallies: dict
    ) -> list[tuple[str, list]]:
        """(text, spans) of each sample of a conversation: what the chat template writes, and the
        characters that are learned."""
        if self.train_on_prompt:
            text = self.renderer.whole(messages, tools, where)
            return [(text, [(-1, len(text) + 1)])]
        samples = self.renderer.render(messages, tools, self.last_answer_only, where)
        if len(samples) > 1:
            what = "conversations became several samples, for the template strips their thinking"
            _count(tallies, what, where)
        return samples

    def _tokenize(self, rendered: list[tuple[str, list]]) -> list[tuple]:
        """(ids, mask) of each text and its spans."""
        # The template has written every special token already. Tokenised whole, so that the borders
        # of tokens are those which the model sees when it is used.
        batch = self.tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        rows = zip(batch["input_ids"], batch["offset_mapping"], rendered, strict=True)
        return [
            (np.array(ids, dtype=np.int32), mask_of_spans(offsets, spans))
            for ids, offsets, (_, spans) in rows
        ]

    # -- cutting

    def _cut(self, documents: list[tuple], tallies: dict, where: str) -> list[tuple]:
        """The documents (ids, mask) cut to cutoff_len + 1 tokens."""
        limit, longest = self.cutoff_len + 1, max(len(ids) for ids, _ in documents)
        if self.joins or longest <= limit:
            return documents
        start = 0
        if self.has_pairs:
            start = min(longest - limit, max(_shared_prompt(*documents) - 1, 0))
            what = f"pairs were {CUT} {self.cutoff_len}: the beginning of their prompt was cut"
        else:
            what = f"samples were {CUT} {self.cutoff_len} and cut"
        _count(tallies, what, where)
        if self.has_pairs and longest - start > limit:
            what = "of them had an answer too long without its prompt: its end was cut"
            _count(tallies, what, where)
        return [(ids[start:][:limit], mask[start:][:limit]) for ids, mask in documents]


def _refuse_other_kinds(record: dict, where: str, is_pair: bool) -> None:
    """ValueError for records of which a text model would learn what they do not mean."""
    for column in () if is_pair else ("kto_tag", "label"):
        if isinstance(record.get(column), bool):
            raise ValueError(
                f"{where}: the column {column!r} says whether an answer is good, and every answer "
                "would be trained: keep the good ones, and leave the column out"
            )
    for column in ("images", "videos", "audios"):
        if record.get(column):
            raise ValueError(f"{where}: the column {column!r} is there, and models here read text")


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


def _count(tallies: dict, what: str, where: str) -> None:
    count, first = tallies.get(what, (0, where))
    tallies[what] = (count + 1, first)
