"""From records to token ids with a loss mask."""

from dataclasses import dataclass

import numpy as np
from jinja2.exceptions import TemplateError

from .data_chat import ChatRenderer
from .data_pair_records import detect_pair_format, pair
from .data_records import Source, conversation, detect_format, document


@dataclass
class Encoded:
    """Samples one behind another: ids int32 [T], mask uint8 [T] (1: learned; None: all), and of each sample its number
    of tokens and of learned labels. tallies: what happened -> (how often, first place)."""

    ids: np.ndarray
    mask: np.ndarray | None
    lengths: list[int]
    learned: list[int]
    records: int
    tallies: dict[str, tuple[int, str]]


class Encoder:
    """Turns records into token ids and loss masks, not shifted yet: at most cutoff_len + 1 tokens a sample.

    joins: documents (pt) are kept whole, to be joined and cut later. Picklable, for worker processes.
    """

    def __init__(
        self,
        tokenizer,
        source: Source,
        stage: str,
        cutoff_len: int,
        joins: bool = False,
        train_on_prompt: bool = False,
        mask_history: bool = False,
        default_system: str | None = None,
    ):
        self.tokenizer, self.source, self.stage = tokenizer, source, stage
        self.cutoff_len, self.joins = cutoff_len, joins
        self.train_on_prompt, self.mask_history, self.default_system = (
            train_on_prompt,
            mask_history,
            default_system,
        )
        self.notes: list[str] = []
        if stage == "pt":
            if tokenizer.eos_token_id is None:
                raise ValueError(
                    "the tokenizer has no eos_token to end a document of stage: pt: set it in its config"
                )
        else:
            self.renderer = ChatRenderer(tokenizer)
            if not self.renderer.ends_turns():
                self.notes.append(
                    "the chat template writes nothing after an answer: the model will not learn to stop"
                )

    def options(self) -> dict:
        """What decides on the result, beside the records and the tokenizer."""
        names = (
            "stage",
            "cutoff_len",
            "joins",
            "train_on_prompt",
            "mask_history",
            "default_system",
        )
        return {name: getattr(self, name) for name in names}

    def format_of(self, record, where: str) -> str:
        """The format of a file, from its first record."""
        return detect_format(record, self.source, self.stage, where)

    def encode(self, chunk: list[tuple[str, str, object]]) -> Encoded:
        """chunk: (place, format, record) each. Raises: ValueError with the place."""
        places = [where for where, _, _ in chunk]
        ids, masks = self._documents(chunk) if self.stage == "pt" else self._conversations(chunk)
        tallies: dict[str, tuple[int, str]] = {}
        kept_ids, kept_masks, learned = [], [], []
        for where, tokens, mask in zip(places, ids, masks, strict=True):
            if not self.joins and len(tokens) > self.cutoff_len + 1:
                tokens, mask = tokens[: self.cutoff_len + 1], mask[: self.cutoff_len + 1]
                _count(
                    tallies, f"samples were longer than cutoff_len {self.cutoff_len} and cut", where
                )
            targets = int(mask[1:].sum())  # nothing predicts the first token
            if targets == 0 and not (self.joins and len(tokens) > 1):
                _count(tallies, "samples have no token to train on and were left out", where)
                continue
            kept_ids.append(tokens)
            kept_masks.append(mask)
            learned.append(targets)
        return Encoded(
            ids=np.concatenate(kept_ids) if kept_ids else np.zeros(0, np.int32),
            mask=None
            if self.stage == "pt"
            else np.concatenate([np.zeros(0, np.uint8), *kept_masks]),
            lengths=[len(tokens) for tokens in kept_ids],
            learned=learned,
            records=len(chunk),
            tallies=tallies,
        )

    def _documents(self, chunk) -> tuple[list, list]:
        texts = [document(record, self.source, where) for where, _, record in chunk]
        eos = self.tokenizer.eos_token_id
        # With the tokenizer's own special tokens: a model that was trained with bos before each document gets it.
        batch = self.tokenizer(
            texts, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        rows = []
        for text, row in zip(texts, batch["input_ids"], strict=True):
            ended = row if row[-1:] == [eos] else [*row, eos]
            rows.append(np.array(ended if text else [], dtype=np.int32))
        return rows, [np.ones(len(row), np.uint8) for row in rows]

    def _conversations(self, chunk) -> tuple[list, list]:
        rendered = []
        for where, form, record in chunk:
            messages, tools = conversation(record, self.source, form, self.default_system, where)
            rendered.append(self._render(messages, tools, where))
        return self._tokenize(rendered)

    def _tokenize(self, rendered: list[tuple[str, list]]) -> tuple[list, list]:
        """(ids, mask) of each text and its spans."""
        # The template has written every special token already. Tokenised whole, so that the borders of tokens are those
        # which the model sees when it is used.
        batch = self.tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids = [np.array(row, dtype=np.int32) for row in batch["input_ids"]]
        pairs = zip(batch["offset_mapping"], rendered, strict=True)
        return ids, [mask_of_spans(offsets, spans) for offsets, (_, spans) in pairs]

    def _render(self, messages, tools, where: str) -> tuple[str, list]:
        if not self.train_on_prompt:
            return self.renderer.render(messages, tools, self.mask_history, where)
        try:
            text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"{where}: the chat template refuses the conversation: {error}"
            ) from error
        return text, [(-1, len(text) + 1)]


class PairEncoder(Encoder):
    """Turns preference records into two rows each, the chosen answer behind its prompt and the rejected one behind the
    same; only the answers are learned.

    A pair of which a side is over cutoff_len + 1 tokens loses the beginning of its prompt, on both sides the same tokens and
    all but the last one at most; what is over then is cut from the end of the answer.
    """

    def __init__(
        self, tokenizer, source: Source, cutoff_len: int, default_system: str | None = None
    ):
        # an answer has learned tokens and its history has none: Encoder's words for it
        super().__init__(
            tokenizer, source, "dpo", cutoff_len, mask_history=True, default_system=default_system
        )

    def format_of(self, record, where: str) -> str:
        return detect_pair_format(record, self.source, where)

    def encode(self, chunk: list[tuple[str, str, object]]) -> Encoded:
        """Two rows a pair that is kept: lengths and learned have chosen, rejected, chosen, ..."""
        tallies: dict[str, tuple[int, str]] = {}
        places, rendered = [], []
        for where, form, record in chunk:
            chosen, rejected, tools = pair(record, self.source, form, self.default_system, where)
            if any(_is_empty(messages[-1]) for messages in (chosen, rejected)):
                _count(tallies, "pairs have an empty answer and were left out", where)
            elif chosen == rejected:
                _count(tallies, _IDENTICAL, where)
            else:
                places.append(where)
                rendered += [
                    self._render(messages, tools, where) for messages in (chosen, rejected)
                ]
        rows = list(zip(*self._tokenize(rendered), strict=True)) if rendered else []
        kept = []
        for number, where in enumerate(places):
            sides = self._cut(*rows[2 * number : 2 * number + 2], tallies, where)
            if not all(mask[1:].any() for _, mask in sides):
                _count(
                    tallies,
                    "pairs have an answer without a token to train on and were left out",
                    where,
                )
            elif np.array_equal(sides[0][0], sides[1][0]):
                _count(tallies, _IDENTICAL, where)
            else:
                kept += sides
        return Encoded(
            ids=np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in kept)]),
            mask=np.concatenate([np.zeros(0, np.uint8), *(mask for _, mask in kept)]),
            lengths=[len(ids) for ids, _ in kept],
            learned=[int(mask[1:].sum()) for _, mask in kept],
            records=len(chunk),
            tallies=tallies,
        )

    def _cut(self, chosen, rejected, tallies: dict, where: str) -> list[tuple]:
        """Both (ids, mask), cut to cutoff_len + 1 tokens."""
        limit, longest = self.cutoff_len + 1, max(len(chosen[0]), len(rejected[0]))
        if longest <= limit:
            return [chosen, rejected]
        cut = min(longest - limit, max(_shared_prompt(chosen, rejected) - 1, 0))
        _count(
            tallies,
            f"pairs were longer than cutoff_len {self.cutoff_len}: the beginning of their prompt was cut",
            where,
        )
        if longest - cut > limit:
            _count(
                tallies, "of them had an answer too long without its prompt: its end was cut", where
            )
        return [(ids[cut:][:limit], mask[cut:][:limit]) for ids, mask in (chosen, rejected)]


_IDENTICAL = "pairs have the same chosen and rejected answer and were left out"


def _is_empty(answer: dict) -> bool:
    return not answer["content"].strip() and not answer.get("tool_calls")


def _shared_prompt(chosen, rejected) -> int:
    """Tokens with which both rows begin, none of them learned. The token at the border may belong to one answer alone."""
    size = min(len(ids) for ids, _ in (chosen, rejected))
    differ = (chosen[0][:size] != rejected[0][:size]) | (
        chosen[1][:size] | rejected[1][:size]
    ).astype(bool)
    return int(differ.argmax()) if differ.any() else size


def mask_of_spans(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> np.ndarray:
    """uint8 [n]: 1 for each token of which a character lies in a span. offsets: [start, end) of each token."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=np.uint8)
    for start, end in spans:
        mask[(starts < end) & (ends > start)] = 1
    return mask


def _count(tallies: dict, what: str, where: str) -> None:
    count, first = tallies.get(what, (0, where))
    tallies[what] = (count + 1, first)
