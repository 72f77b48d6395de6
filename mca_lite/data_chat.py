"""Conversations as text: which chat template writes them, and which characters of it the assistant
says.

A template says what it writes, not where the answers are. Its {% generation %} marks tell it;
without them it is found by rendering parts of the conversation and comparing.
"""

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from .args_values import refuse
from .chat_templates import BUILT_IN_FOR, TEMPLATES
from .data_turns import for_template, mark_thinking

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# texts to try a template with; no template trims or changes them
_QUESTION, _ANSWER = "mcaquestion", "mcaanswer"
RENDER_S = 30.0  # for the two of them: honest templates take milliseconds


@dataclass
class _Style:
    """How a chat template writes a turn of the assistant, found by rendering one question and one
    answer.

    prompted: the prompt is rendered with add_generation_prompt; lead: what stands between that
    prompt and the answer (a header that the assistant does not say); closing: the end-of-turn
    token; tail: all that follows the answer.
    """

    prompted: bool
    lead: str
    closing: str
    tail: str


def _in_time(render: Callable):
    """What render() returns or raises, ValueError where it takes longer than RENDER_S."""
    answers: list = []

    def work() -> None:
        try:
            answers.append((render(), None))
        except Exception as error:
            answers.append((None, error))

    thread = threading.Thread(target=work, daemon=True)  # it cannot be ended, and ends with us
    thread.start()
    thread.join(RENDER_S)
    if not answers:
        raise ValueError(
            f"the chat template takes longer than {RENDER_S:.0f} s for one question and its "
            "answer: set another one in the tokenizer's folder"
        )
    value, error = answers[0]
    if error is not None:
        raise error
    return value


def set_chat_template(tokenizer, chat_template: str | None, template: str | None) -> list[str]:
    """Give the tokenizer the template of the keys, in place -> lines for the report.

    chat_template: the name of a built-in one, a jinja text or a file, used before the tokenizer's
    own. template: a name of LLaMA-Factory's, whose built-in one is used where there is none.
    Raises: ConfigError for a file that cannot be read.
    """
    if chat_template in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[chat_template]
        line = f"chat template: the built-in {chat_template}"
    elif chat_template and "{" in chat_template:
        tokenizer.chat_template, line = chat_template, "chat template: the text of chat_template"
    elif chat_template:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            names = f"one of {', '.join(TEMPLATES)}, or the file of a jinja template"
            refuse("chat_template", chat_template, f"it cannot be read: {error}", names)
        line = f"chat template: {chat_template}"
    elif template and tokenizer.chat_template:
        return [f"template {template}: the tokenizer's own chat template is used"]
    elif template in BUILT_IN_FOR:
        tokenizer.chat_template = TEMPLATES[BUILT_IN_FOR[template]]
        line = f"chat template: the built-in {BUILT_IN_FOR[template]}, for template {template}"
    else:
        return []
    vocabulary = tokenizer.get_vocab()
    marks = dict.fromkeys(re.findall(r"<[|｜][^<>]*[|｜]>|<\w+_of_turn>", tokenizer.chat_template))
    if lacks := [mark for mark in marks if mark not in vocabulary]:
        line += f"; the tokenizer has no token {', '.join(lacks)}: add_special_tokens adds them"
    return [line]


class ChatRenderer:
    """Renders conversations with the tokenizer's chat template and finds what the assistant says in
    them. enable_thinking: given to the template, None: not given.

    Raises: ValueError for a tokenizer without a chat template or without character offsets (not a
    fast one).
    """

    def __init__(self, tokenizer, enable_thinking: bool | None = None):
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, which stages sft and dpo need: set "
                f"chat_template to one of {', '.join(TEMPLATES)} or a jinja file, or "
                "model_name_or_path to an instruct or chat model"
            )
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} gives no character offsets, from which the loss mask "
                "is made: expected a fast tokenizer (one with a tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self.options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._styles: dict[str, _Style] = {}

    def render(
        self, messages: list[dict], tools: list | None, last_only: bool, where: str
    ) -> list[tuple[str, list]]:
        """(text, spans) of each sample: a conversation, and [start, end) in characters of what the
        assistant says in each turn (last_only: in the last one), with the end-of-turn token.

        One sample a conversation; several where the template strips thinking from earlier turns, so
        that each turn is trained once, after the history that it has when the model is used.
        Raises: ValueError with the place."""
        template = self.tokenizer.get_chat_template(tools=tools)
        messages, tools = for_template(messages, tools, template)
        try:
            parts = [(len(messages), len(messages) - 1)]
            if not last_only:
                parts = self._parts(messages, tools)
            return [
                self._sample(messages[:end], tools, first, template, where) for end, first in parts
            ]
        except (TemplateError, TypeError) as error:
            raise _refused(where, error) from error

    def whole(self, messages: list[dict], tools: list | None, where: str) -> str:
        """The text of the whole conversation. Raises: ValueError with the place."""
        template = self.tokenizer.get_chat_template(tools=tools)
        try:
            return self._render(*for_template(messages, tools, template))
        except (TemplateError, TypeError) as error:
            raise _refused(where, error) from error

    def _parts(self, messages: list[dict], tools: list | None) -> list[tuple[int, int]]:
        """(end, first) of each sample: it is messages[:end], in which the turns from `first` on are
        trained."""
        marked, marks = mark_thinking(messages)

        def shows(end: int, number: int) -> bool:
            return marks[number] in self._render(marked[:end], tools)

        parts: list[tuple[int, int]] = []
        end = len(messages)
        while True:
            others = [number for number in marks if number < end - 1]
            text = self._render(marked[:end], tools) if others else ""
            lost = [n for n in others if marks[n] not in text and shows(n + 1, n)]
            if not lost:
                return [(end, 0), *parts]
            turns = [n for n in range(lost[-1], end - 1) if messages[n]["role"] == "assistant"]
            start = next(n + 1 for n in reversed(turns) if shows(n + 1, lost[-1]))
            parts.insert(0, (end, start))
            end = start

    def _sample(
        self, messages: list[dict], tools: list | None, first: int, template: str, where: str
    ) -> tuple[str, list]:
        """(text, spans) of messages, of which the turns from number `first` on are trained."""
        style = self._style(template)
        if _GENERATION_MARK.search(template):
            text, spans = self._by_marks(messages, tools, template, style, first)
        else:
            text, spans = self._render(messages, tools), []
        spans = spans or self._by_difference(text, messages, tools, style, first)
        spans = spans or self._by_markers(text, messages, tools, style, first)
        if not spans:
            raise ValueError(f"{where}: {self._what_differs(text, messages, tools)}")
        return text, spans

    def end_of_turn(self) -> str:
        """What the template writes after an answer to end it, "" for nothing.

        Raises: ValueError for a template that does not end by itself, as a made up one may."""
        template = self.tokenizer.get_chat_template()
        try:
            return _in_time(lambda: self._style(template)).closing
        except TemplateError as error:
            raise ValueError(
                f"the chat template refuses a question with its answer: {error}"
            ) from error

    def _render(
        self, messages: list[dict], tools: list | None, prompt=False, options: dict | None = None
    ) -> str:
        options = self.options if options is None else options
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **options
        )

    def _style(self, template: str) -> _Style:
        if template not in self._styles:
            question = {"role": "user", "content": _QUESTION}
            both = self._render([question, {"role": "assistant", "content": _ANSWER}], None)
            plain = self._render([question], None)
            prompt = self._render([question], None, prompt=True)
            # Phi-3 ends every unprompted text with eos, so that `plain` need not be a beginning of
            # `both`.
            prompted = both.startswith(prompt)
            start = len(prompt) if prompted else len(os.path.commonprefix([plain, both]))
            lead, _, tail = both[start:].partition(_ANSWER)
            if prompted and (prompt != plain or not lead.strip()):
                lead = ""  # think marks or a space, which the model has to produce itself
            self._styles[template] = _Style(prompted, lead, self._end_of_turn(tail), tail)
        return self._styles[template]

    def _end_of_turn(self, tail: str) -> str:
        """tail up to and with its first special token; without one, tail without the white space at
        its end."""
        tokens = [
            *map(str, self.tokenizer.added_tokens_decoder.values()),
            *self.tokenizer.all_special_tokens,
        ]
        ends = [(tail.index(token), -len(token)) for token in tokens if token and token in tail]
        return tail[: min(ends)[0] - min(ends)[1]] if ends else tail.rstrip()

    def _by_marks(
        self, messages, tools, template: str, style: _Style, first: int
    ) -> tuple[str, list]:
        """The template's own {% generation %} marks, made to end after the end-of-turn token."""
        # apply_chat_template would map the marks to tokens itself, one conversation at a time, and
        # a mark that ends in white space which the tokenizer drops would reach to the end of the
        # text.
        texts, marks = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            **self.options,
            **self.tokenizer.special_tokens_map,
        )
        text, spans = texts[0], []
        for start, end in marks[0]:
            if style.closing:
                said, closing, rest = text[start:end].rpartition(style.closing)
                if closing and not rest.strip():
                    end = start + len(said) + len(closing)
                elif text.startswith(style.closing, end):
                    end += len(style.closing)
            spans.append((start, end))
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        trained = sum(n >= first for n in turns)
        if len(spans) == len(turns):
            spans = spans[-trained:]
        elif first:
            history = os.path.commonprefix([text, self._render(messages[:first], tools)])
            spans = [span for span in spans if span[0] >= len(history)] or spans[-trained:]
        return text, spans

    def _by_difference(self, text: str, messages, tools, style: _Style, first: int) -> list:
        """Renders the conversation up to each turn, and up to and with it. [] where the whole
        begins otherwise."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < first:
                continue
            try:
                before = self._prompt(text, messages[:number], tools, style)
                until = self._render(messages[: number + 1], tools)
            except TemplateError:  # a template may refuse a part of a conversation
                return []
            if not style.prompted:
                before = os.path.commonprefix([before, until])
            if not (text.startswith(before) and until.startswith(before + style.lead)):
                return []
            start = len(before) + len(style.lead)
            turn = until[start:]
            if turn.endswith(style.tail):
                turn = turn.removesuffix(style.tail) + style.closing
            else:
                turn = turn.rstrip()
            kept = _longest_end(turn, text, start)
            if not kept.endswith(style.closing) or not all(
                part in kept for part in _parts_said(message)
            ):
                return []
            spans.append((start, start + len(kept)))
        return spans

    def _prompt(self, text: str, messages, tools, style: _Style) -> str:
        """What stands before the next turn of the assistant."""
        if not messages:
            return ""
        prompt = self._render(messages, tools, style.prompted)
        if self.options and not text.startswith(prompt):
            # with enable_thinking: false the prompt has an empty block, which history has not
            return self._render(messages, tools, style.prompted, options={})
        return prompt

    def _by_markers(self, text: str, messages, tools, style: _Style, first: int) -> list:
        """Renders the conversation with a marker for each answer: what stands between the markers
        must be what stands between the answers in the real text, from its first character to its
        last. [] where it is not."""
        answers = [message.get("content") for message in messages if message["role"] == "assistant"]
        if not all(answers) or any("tool_calls" in message for message in messages):
            return []
        markers = iter([f"{_ANSWER}{number}x" for number in range(len(answers))])
        marked = [
            m | {"content": next(markers)} if m["role"] == "assistant" else m for m in messages
        ]
        between = re.split(rf"{_ANSWER}\d+x", self._render(marked, tools))
        if len(between) != len(answers) + 1 or not text.startswith(between[0]):
            return []
        spans, at = [], len(between[0])
        for answer, rest in zip(answers, between[1:], strict=True):
            forms = (answer, answer.strip(), answer.rpartition("</think>")[2].strip())
            said = next((form for form in forms if text.startswith(form + rest, at)), None)
            if said is None or not rest.startswith(style.closing):
                return []
            spans.append((at, at + len(said) + len(style.closing)))
            at += len(said) + len(rest)
        trained = sum(message["role"] == "assistant" for message in messages[first:])
        return spans[-trained:] if at == len(text) else []

    def _what_differs(self, text: str, messages, tools) -> str:
        reason = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not number:
                continue
            try:
                before = self._render(messages[:number], tools, prompt=True)
            except TemplateError as error:
                reason = (
                    f"message {number + 1}: the template refuses the messages before it: {error}"
                )
                break
            at = len(os.path.commonprefix([before, text]))
            if at < len(before):
                reason = (
                    f"message {number + 1}: the prompt before it and the whole conversation differ "
                    f"from character {at} on: {before[at : at + 60]!r} and {text[at : at + 60]!r}"
                )
                break
        return (
            "cannot tell which part of the rendered conversation the assistant says; "
            f"{reason or 'the template changes what it says'}; "
            "put {% generation %} and {% endgeneration %} round it in the chat template, or set "
            "train_on_prompt: true"
        )


def _refused(where: str, error: Exception) -> ValueError:
    return ValueError(f"{where}: the chat template refuses the conversation: {error}")


def _longest_end(turn: str, text: str, start: int) -> str:
    """The longest end of `turn` that stands in `text` from `start` on, "" where none does.

    A turn may lose its beginning, the thinking, once others follow.
    """
    first = text[start : start + 1]
    for at, character in enumerate(turn):
        if character == first and text.startswith(turn[at:], start):
            return turn[at:]
    return ""


def _parts_said(message: dict) -> list[str]:
    """Texts that must be found in a rendered turn: the answer without its thinking, the names of
    called functions."""
    answer = message.get("content", "").rpartition("</think>")[2].strip()
    return [answer, *(call["function"]["name"] for call in message.get("tool_calls", ()))]
