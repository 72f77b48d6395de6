"""Conversations as text, with the spans of text to train.

A chat template need not tell where it writes the answers. There are two ways to find them:

1. The template's {% generation %} marks.
2. Without usable marks, an answer is replaced by a marker and the conversation is rendered again.
The real conversation must have the text before and after the marker too, so the answer is between
them. It ends with the end-of-turn token, if there is one. It begins after the prompt used at
inference, if that is found, so thinking before the marker counts as part of the answer.

Thinking and tools are written as text if a template has no place for them.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from .data_records import Conversation, Message
from .errors import Keys, expect, refuse
from .inputs import TEXT, Media
from .tables import BUILT_IN_FOR, TEMPLATES

T = TypeVar("T")
# the text before the last </think>, from the last <think> or the start on, unless it is blank
_CLOSING = r"</think>(?!.*</think>)"
_THINKING = re.compile(
    rf"(?:^|(?<=<think>))(?!\s*{_CLOSING})(?:(?!<think>).)*(?={_CLOSING})", re.DOTALL
)
_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")  # thinking opened at the end of a prompt
_EMPTY = re.compile(r"<think>\s*(?:</think>\s*|\Z)")  # empty blocks of thinking, too
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The texts of a trial: a template that changes answers changes these too.
_QUESTION = "mcaquestion"
_ANSWER = "mcaanswer"
RENDER_S = 30.0  # time limit for a trial and for a record; usual templates take milliseconds
# these names are arguments of apply_chat_template, so a template cannot get them as variables
_TAKEN = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {
    "documents"
}
_THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")
# The first line has the message keys that are read here, the others do not affect the text.
_KNOWN_KEYS = """
role content tool_calls tool_call_id
name id uuid message_id turn_id parent_id conversation_id index turn turn_index
turn_identifier timestamp time date created created_at create_time updated_at update_time
refusal annotations author model model_name provider language lang source metadata
finish_reason stop_reason usage logprobs system_fingerprint tokens token_count num_tokens
token_counter latency
""".split()
_NO_TEMPLATE = (
    "the tokenizer has no chat template, which conversations need: set chat_template to one "
    f"of {', '.join(TEMPLATES)} or a jinja file, or model_name_or_path to an instruct or chat model"
)
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass
class _Style:
    """The texts that a chat template writes around an answer, found by rendering a trial question
    with its answer, once and twice in a row.

    prompted: True if the rendered conversation begins with the prompt (the question, rendered with
    add_generation_prompt). header: the text that add_generation_prompt adds, which opens an answer;
    the whole prompt if it changes earlier text. lead: untrained text between the prompt and the
    answer. closing: the text that ends the last answer, usually an end-of-turn token. inner: the
    text that ends an answer before the last. tail: all text after the last answer."""

    prompted: bool
    header: str
    lead: str
    closing: str
    inner: str
    tail: str


class Rendered(NamedTuple):
    """The text of a document, such as a rendered conversation, and the parts of it to train.

    spans: these parts, as [start, end) in characters; not read for stage pt (pretraining). A span
    from -1 on includes tokens that stand for no text, such as a bos that the tokenizer adds; a span
    may end after the text. is_plain: True if no chat template wrote the text, so that the tokenizer
    must add its special tokens. media: images and other inputs than text, in order. lacks_thinking:
    True if the template drops an answer's thinking even if this answer ends the conversation.
    strips_thinking: True if the template drops the thinking of earlier turns and the whole
    conversation is trained."""

    text: str
    spans: list[tuple[int, int]]
    is_plain: bool = False
    media: tuple[Any, ...] = ()
    lacks_thinking: bool = False
    strips_thinking: bool = False


def in_time(render: Callable[[], T], place: Callable[[], str]) -> T:
    """Run render() in a thread -> its result; its exception is raised here. place() names the
    record that is being rendered, and is called every RENDER_S seconds until render() ends. Raises
    ValueError if it names the same record twice in a row: a chat template may never end."""
    answer: futures.Future[T] = futures.Future()

    def work() -> None:
        try:
            answer.set_result(render())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # a daemon: it cannot outlive the process
    before = None
    while not answer.done():
        now = place()
        if now == before:
            raise ValueError(
                f"{now}: the chat template takes longer than {RENDER_S:.0f} s: set another one "
                "in the tokenizer's folder"
            )
        futures.wait([answer], RENDER_S)
        before = now
    return answer.result()


def chat_renderer(
    tokenizer: PreTrainedTokenizerBase, data_args: Keys, media: Media = TEXT
) -> tuple["ChatRenderer", list[str]]:
    """Make the ChatRenderer of a run from its DataArguments -> (renderer, report lines for the
    user). If the keys chat_template or template ask for it, the tokenizer's chat template is
    replaced, in place. media: reads the model's images and other inputs than text.

    Raises ConfigError for an unreadable template file or a wrong end_of_answer; ValueError for a
    tokenizer without character offsets, if the key `template` is used and names no built-in
    template, and if the chat template fails or does not end."""
    report = _set_template(tokenizer, data_args.chat_template, data_args.template)
    ends = data_args.end_of_answer
    renderer = ChatRenderer(tokenizer, data_args.enable_thinking, media, ends)
    if renderer.options and not renderer.reads("enable_thinking"):
        report.append("note: the chat template does not read enable_thinking")
    closing = renderer.end_of_turn()
    if tokenizer.chat_template and not closing and not ends:
        report.append(
            "note: the chat template writes nothing after an answer: the model will not learn to "
            "stop: set end_of_answer to tokens that end one"
        )
    if ends and (closing or not tokenizer.get_vocab().keys() >= {*ends}):
        reason = f"expected tokens of the tokenizer, and the chat template writes {closing!r} there"
        refuse("end_of_answer", ends, reason, "tokens, where the template writes nothing")
    return renderer, report


def _set_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, template: str | None
) -> list[str]:
    """Set the tokenizer's chat template, in place, if one of these two keys asks for it -> report
    lines.

    chat_template: a built-in template's name, a jinja text or a file; it replaces the tokenizer's.
    template: LLaMA-Factory's name of a template. The built-in template for this name is used only
    if chat_template is not set and the tokenizer has no template. Raises ConfigError for an
    unreadable file; ValueError if `template` would be used and is not built in."""
    if template and not chat_template:
        if tokenizer.chat_template:
            return [f"template {template}: not used, since the tokenizer has a chat template"]
        chat_template = BUILT_IN_FOR.get(template)
        if chat_template is None:
            names = ", ".join(BUILT_IN_FOR) or "none"
            raise ValueError(
                f"template {template} is not built in ({names} are), and {_NO_TEMPLATE}"
            )
    if not chat_template:
        return []
    text = chat_template
    name = "the text of chat_template"
    if chat_template in TEMPLATES:
        text = TEMPLATES[chat_template]
        name = f"the built-in {chat_template}"
    elif "{" not in chat_template:
        try:
            text = Path(chat_template).read_text(encoding="utf-8")
            name = chat_template
        except (OSError, UnicodeDecodeError) as error:
            names = f"one of {', '.join(TEMPLATES)}, or the file of a jinja template"
            refuse("chat_template", chat_template, f"it cannot be read: {error}", names)
    tokenizer.chat_template = text
    marks = set(re.findall(r"<[|｜][^<>]*[|｜]>|<\w+_of_turn>", text))
    if lacks := sorted(marks - tokenizer.get_vocab().keys()):
        name += f"; the tokenizer has no token {', '.join(lacks)}: add_special_tokens adds them"
    return [f"chat template: {name}"]


class ChatRenderer:
    """Renders conversations with the tokenizer's chat template, and finds the spans of the answers
    in the text.

    enable_thinking: a variable of the template; None: not passed. media: reads the model's images
    and other inputs than text. ends: tokens that end an answer, for templates that write nothing
    there; if given, ends[0] is added after each answer that none of them follows, in a text that a
    template writes. Raises ValueError for a tokenizer without character offsets (one that is not
    fast)."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        enable_thinking: bool | None = None,
        media: Media = TEXT,
        ends: Sequence[str] = (),
    ) -> None:
        expect(
            tokenizer.is_fast,
            f"{type(tokenizer).__name__} gives no character offsets, from which the loss mask "
            "is made: expected a fast tokenizer (one with a tokenizer.json)",
        )
        self.tokenizer = tokenizer
        self.media = media
        self.ends = ends
        self.options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._styles: dict[tuple[str, str], _Style] = {}
        # set in the copy that renders a conversation
        self._tools: list[Any] | None = None
        self._template = ""

    def render(self, conversation: Conversation, trained: str, where: str) -> list[Rendered]:
        """Render a conversation as text with the spans to train -> its samples. trained: the text
        to train: "all" of it, "answers" (each answer), or "last" (the last answer). An answer
        includes the end-of-turn token, if the template writes one. Answers of weight 0 are not
        trained. where: the record's place, which the text of a ValueError names.

        There is usually one sample. With "answers" there can be more if the template strips
        thinking from earlier turns: an answer is then trained in a sample that ends early enough to
        keep its thinking, as at inference."""
        if conversation.is_plain:
            return [self._plain(conversation.messages, trained)]
        return self._in_words(conversation, where, lambda one: one.samples(conversation, trained))

    def prompt(self, conversation: Conversation, where: str) -> str:
        """The prompt for the assistant's next answer: the rendered conversation with the generation
        prompt, thinking and tools written as in training. Raises ValueError that names `where`.
        """
        return self._in_words(conversation, where, lambda one: one.open_text(conversation))

    def _in_words(
        self, conversation: Conversation, where: str, render: Callable[["ChatRenderer"], T]
    ) -> T:
        """Call render(renderer) for one conversation -> its result. The renderer is a copy of this
        one that also has the conversation's own template variables. where: the record's place.
        Errors of the template, and ValueErrors, become ValueErrors whose text names it."""
        taken = ", ".join(map(repr, sorted(_TAKEN.intersection(conversation.options))))
        expect(
            not taken, f"{where}: chat_template_kwargs: {taken}: expected variables of the template"
        )
        one = copy.copy(self)
        one.options = self.options | conversation.options
        try:
            return render(one)
        except TemplateError as error:
            raise ValueError(
                f"{where}: the chat template refuses the conversation: {error}: set chat_template "
                "to one that takes it"
            ) from error
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def reads(self, option: str) -> bool:
        """True if the tokenizer's chat templates contain the text `option`, the name of a template
        variable such as "enable_thinking"."""
        return option in str(self.tokenizer.chat_template)

    def _plain(self, messages: list[Message], trained: str) -> Rendered:
        """Join a prompt and its completion (messages), without chat template, into one text that
        ends with eos (if the tokenizer has one), as TRL trains them. trained: "all" trains the
        whole text, other values the completion."""
        prompt, completion = (message["content"] for message in messages)
        ending = self.tokenizer.eos_token or ""
        text = (prompt + completion).removesuffix(ending) + ending
        start = -1 if trained == "all" else len(prompt)
        return Rendered(text, [(start, len(text) + 1)], is_plain=True)

    def samples(self, conversation: Conversation, trained: str) -> list[Rendered]:
        """Render a conversation with a chat template -> its samples, each a text with the spans to
        train. trained: "all", "answers" or "last", see render(). This sets the renderer's template
        and tools, so render() calls it on a copy."""
        expect(self.tokenizer.chat_template, _NO_TEMPLATE)
        _check_weights(conversation, trained == "all")
        weights = [conversation.weights.get(n, True) for n in _answers(conversation.messages)]
        messages, tools = self._for_template(conversation)
        self._template = self.tokenizer.get_chat_template(tools=tools)
        self._style = self._style_of(self._template)
        self._tools = tools
        self._check_whole(messages)
        if conversation.media:
            self.media.check_template(self._template, self._render, messages)
        marked = _mark_thinking(messages)
        lacks = self._lacks_thinking(messages, marked)
        turns = _answers(messages)  # indices may have changed: tool messages may be joined
        hidden = [n for n, weight in zip(turns, weights, strict=True) if not weight]
        if trained == "all":
            sample = self._sample(messages, hidden)
            text = sample.text
            borders = [-1, *itertools.chain(*sample.spans), len(text) + 1]
            spans = list(zip(borders[::2], borders[1::2], strict=True))
            strips = False
            with contextlib.suppress(
                TemplateError
            ):  # the template refuses a part of the conversation
                strips = len(self._parts(messages, marked)) > 1
            return [Rendered(text, spans, lacks_thinking=lacks, strips_thinking=strips)]
        parts = [(len(messages), turns[-1])]
        if trained == "answers":
            parts = self._parts(messages, marked)
        samples = []
        for end, first in parts:
            wanted = [n for n in turns if first <= n < end and n not in hidden]
            sample = self._sample(messages[:end], wanted)
            samples.append(sample._replace(lacks_thinking=lacks))
        return [sample for sample in samples if sample.spans] or samples[-1:]

    def _for_template(self, conversation: Conversation) -> tuple[list[Message], list[Any] | None]:
        """Adapt a conversation to its chat template -> (messages, tools). Thinking is put under the
        message key that the template reads. If the template does not read thinking or tools, they
        become text of the messages; tools are None once they are text."""
        template = self.tokenizer.get_chat_template(tools=conversation.tools)
        messages = [_with_known_keys(m, template) for m in conversation.messages]
        return _for_template(messages, conversation.tools, template)

    def open_text(self, conversation: Conversation) -> str:
        """The prompt for a conversation's next answer. It sets this renderer's tools, so prompt()
        calls it on a copy of the renderer with the conversation's options."""
        messages, self._tools = self._for_template(conversation)
        return self._render(messages, prompt=True)

    def _check_whole(self, messages: list[Message]) -> None:
        """Raise ValueError if the template leaves out a message's text or a tool call. To find out,
        the conversation is rendered with a unique mark in place of each text (of an answer's text
        after its thinking) and of each called function's name. The result must contain each mark,
        or for a call its id. Nothing is checked if the template refuses the marks."""
        marks: dict[str, tuple[str, str, str]] = {}  # -> text, role, another mark
        marked = []
        for number, message in enumerate(messages):
            changed = dict(message)
            kept = ""
            if message["role"] == "assistant":
                kept = _before_answer(message["content"])  # a template may leave out thinking
            if message["content"].removeprefix(kept).strip():
                mark = f"mcatext{number}x"
                marks[mark] = (message["content"], message["role"], mark)
                changed["content"] = kept + mark
            calls: list[dict[str, Any]] = []
            for call in message.get("tool_calls", ()):
                mark = f"mcacall{number}n{len(calls)}x"
                # Kimi's template writes the id of a call, not the name
                other = str(call.get("id") or mark).lower()
                marks[mark] = (call["function"]["name"], "a tool call", other)
                calls.append(call | {"function": call["function"] | {"name": mark}})
            if calls:
                changed["tool_calls"] = calls
            marked.append(changed)
        try:
            text = self._render(marked).lower()  # templates may write in capitals
        except TemplateError:  # the template parses the content
            return
        for mark, (content, role, other) in marks.items():
            expect(
                mark in text or other in text,
                f"the chat template leaves out the message {content!r:.60} of {role}: expected one "
                "that it writes (most know system; some one call at once, or no text beside it), "
                "or another chat_template",
            )

    def _lacks_thinking(self, messages: list[Message], marked: list[Message]) -> bool:
        """True if the template drops an answer's thinking even if the conversation ends with this
        answer. marked: the same messages with a mark in place of each answer's thinking, from
        _mark_thinking. False if the template refuses the marks."""
        thinks = [n for n in _answers(messages) if marked[n] != messages[n]]
        with contextlib.suppress(TemplateError):  # the template parses the content
            text = self._render(marked) if thinks else ""
            hidden = (n for n in thinks if _mark_of(n) not in text)
            return any(_mark_of(n) not in self._render(marked[: n + 1]) for n in hidden)
        return False

    def _parts(self, messages: list[Message], marked: list[Message]) -> list[tuple[int, int]]:
        """Split a conversation into samples, because some templates strip the thinking of earlier
        turns -> (end, first) per sample: it has messages[:end], and its answers from index `first`
        on are trained.

        The last sample is the whole conversation. If a sample lacks thinking that the template
        writes when the conversation ends at an earlier answer, one more sample, which ends at the
        last such answer, is put before it. marked: the same messages with a mark in place of each
        answer's thinking, from _mark_thinking."""

        @functools.cache
        def shown(end: int) -> set[str]:
            """Render messages[:end] -> the marks in the text. A mark, such as "mcathought3x", is
            the word that replaces the thinking of message 3, so it appears only if the template
            writes that thinking."""
            return set(re.findall(r"mcathought\d+x", self._render(marked[:end])))

        parts: list[tuple[int, int]] = []
        end = len(messages)
        while end:
            earlier = [n + 1 for n in reversed(_answers(messages[: end - 1]))]
            if marked == messages:
                earlier = []
            first = next((turn for turn in earlier if shown(turn) - shown(end)), 0)
            parts.insert(0, (end, first))
            end = first
        return parts

    def _sample(self, messages: list[Message], wanted: list[int]) -> Rendered:
        """Render the conversation `messages` -> its text, with the spans of the answers at indices
        `wanted`. Raises ValueError if the answers cannot be found in the text, or if the template
        leaves out an image or another input."""
        text = self._render(messages)
        self.media.check_rendered(text, messages)
        spans = self._marked_spans(messages)
        turns = _answers(messages)
        located = turns if self.ends else wanted
        if len(spans) == len(turns):
            spans = [span for span, n in zip(spans, turns, strict=True) if n in located]
        elif (
            self.ends or wanted != turns
        ):  # with several marks per turn, a span cannot be matched with its answer
            spans = []
        with contextlib.suppress(TemplateError):  # the template may refuse a part
            spans = spans or self._answer_spans(text, messages, located)
        expect(
            spans or not located,
            "cannot tell which part of the rendered conversation the assistant says: "
            "the chat template rewrites it; put {% generation %} and {% endgeneration %} round "
            "it there, or set train_on_prompt: true",
        )
        if self.ends:
            text, spans = _with_ends(text, spans, self.ends)
            spans = [span for span, n in zip(spans, turns, strict=True) if n in wanted]
        return Rendered(text, spans)

    def end_of_turn(self) -> str:
        """The text with which the template ends an answer, usually one special token such as
        "<|im_end|>"; "" if it writes nothing there, or there is no template.

        Raises ValueError if the template refuses a question with its answer, or does not end.
        """
        if not self.tokenizer.chat_template:
            return ""
        template = self.tokenizer.get_chat_template()
        try:
            return in_time(
                lambda: self._style_of(template), lambda: "a question and its answer"
            ).closing
        except TemplateError as error:
            raise ValueError(
                f"the chat template refuses a question with its answer: {error}"
            ) from error

    def _render(
        self, messages: list[Message], prompt: bool = False, options: dict[str, Any] | None = None
    ) -> str:
        options = self.options if options is None else options
        with _as_template_error():
            return self.tokenizer.apply_chat_template(
                messages, tools=self._tools, tokenize=False, add_generation_prompt=prompt, **options
            )

    def _style_of(self, template: str) -> _Style:
        key = (template, str(self.options))
        if key not in self._styles:
            question = {"role": "user", "content": _QUESTION}
            turn = [question, {"role": "assistant", "content": _ANSWER}]
            both = self._render(turn)
            plain = self._render([question])
            prompt = self._render([question], prompt=True)
            # `plain` need not be a prefix of `both`: Phi-3 ends it with eos
            prompted = both.startswith(prompt)
            start = len(prompt) if prompted else len(os.path.commonprefix([plain, both]))
            lead, _, tail = both[start:].partition(_ANSWER)
            if prompted and (prompt != plain or not lead.strip()):
                lead = ""  # the model itself writes think marks or a space
            middle = tail
            with contextlib.suppress(TemplateError):  # some templates take a single question
                middle = self._render(turn + turn).partition(_ANSWER)[2]
            # eos at the end of the text does not end a turn
            inner = self._end_of_turn(os.path.commonprefix([middle, tail]))
            closing = inner or self._end_of_turn(tail) or tail.rstrip()
            # a token after each question also ends answers that are not the last
            after = plain.partition(_QUESTION)[2]
            inner = inner or self._end_of_turn(os.path.commonprefix([middle, after])) or closing
            header = prompt.removeprefix(plain)
            self._styles[key] = _Style(prompted, header, lead, closing, inner, tail)
        return self._styles[key]

    def _end_of_turn(self, text: str) -> str:
        """The beginning of `text` up to and including its first special or added token. If more
        such tokens follow it directly, and one of them is eos, it goes up to and including eos. ""
        if the text has no such token."""
        added = map(str, self.tokenizer.added_tokens_decoder.values())
        tokens = {*added, *self.tokenizer.all_special_tokens} - {""}
        # longer tokens first, as they may begin alike; (?!) matches nothing
        patterns = map(re.escape, sorted(tokens, key=len, reverse=True))
        one = "|".join([*patterns, "(?!)"])
        eos = re.escape(self.tokenizer.eos_token or "") or "(?!)"
        found = re.search(f"(?:{one})*?{eos}|{one}", text)
        return text[: found.end()] if found else ""

    def _marked_spans(self, messages: list[Message]) -> list[Any]:
        """Find the text inside the template's {% generation %} marks, which are written around the
        answers -> [start, end) in characters for each pair of marks; [] if the template has no such
        marks. A span ends with the end-of-turn token, if one ends the marked text or follows it."""
        if not _GENERATION_MARK.search(self._template):
            return []
        # apply_chat_template would give a token mask that reaches to the end of the text if the
        # tokenizer drops white space at the end of a mark
        with _as_template_error():
            [text], [marks] = render_jinja_template(
                conversations=[messages],
                tools=self._tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **self.tokenizer.special_tokens_map | self.options,
            )
        spans = []
        for start, end in marks:
            _, closing, rest = text[start:end].rpartition(self._style.closing or "\0")
            if closing and not rest.strip():
                end -= len(rest)
            else:
                after = filter(text[end:].startswith, (self._style.closing, self._style.inner))
                end += len(next(after, ""))
            spans.append((start, end))
        return spans

    def _answer_spans(
        self, text: str, messages: list[Message], numbers: list[int]
    ) -> list[tuple[int, int]]:
        """Find the answers at message indices `numbers` in `text`, the rendered conversation ->
        [start, end) in characters of each; [] if one cannot be found. To find an answer, the
        conversation is rendered with a marker word in its place.

        An answer begins after its prompt. If a prompt cannot be found in `text` (the template may
        move a system message to the last question), all these answers begin with their content
        instead. If some of them have tool calls or thinking, only the answers without a prompt in
        `text` do. Raises TemplateError if the template refuses the conversation."""
        ends = []
        at_markers = []  # -1: unknown
        at_prompts = []
        for number in numbers:
            message = messages[number]
            before, after = self._around_marker(messages, number)
            ending = self._style.closing
            if message.get("tool_calls") or not after.startswith(
                ending
            ):  # more than the marker was replaced
                _, rest = self._around_marker(messages[: number + 1], number)
                turn = rest.removesuffix(self._style.tail)
                # tool calls may end differently from answers
                endings = [turn + ending, turn + self._style.inner, rest.rstrip()]
                ending = next(filter(after.startswith, endings), ending)
            end = len(text) - len(after) + len(ending)
            thinking = _before_answer(message["content"])
            answer = message["content"].removeprefix(thinking).strip()
            is_part = [text.startswith(before), text.endswith(after), after.startswith(ending)]
            if not all([*is_part, answer in text[:end]]):
                return []
            ends.append(end)
            marker = -1
            if not (message.get("tool_calls") or _thinking_of(message)):
                marker = len(before.removesuffix(thinking).removesuffix(thinking.lstrip()))
            at_markers.append(marker)
            at_prompts.append(self._prompt(text, before, messages, number))
        pairs = zip(at_prompts, at_markers, strict=True)
        mixed = [marker if prompt < 0 else prompt for prompt, marker in pairs]
        for starts in (at_prompts, at_markers, mixed):
            if -1 not in starts:
                return list(zip(starts, ends, strict=True))
        return []

    def _around_marker(self, messages: list[Message], number: int) -> tuple[str, str]:
        """Render `messages` with a marker word in place of the text of message `number`, or, if it
        calls functions, of the first function's name -> the rendered text before and after the
        marker. The message keeps its thinking."""
        message = messages[number]
        name = ""
        if calls := message.get("tool_calls"):
            name = calls[0]["function"]["name"]
            function = calls[0]["function"] | {"name": _ANSWER}
            marked = message | {"tool_calls": [calls[0] | {"function": function}, *calls[1:]]}
        else:
            marked = message | {"content": _before_answer(message["content"]) + _ANSWER}
        text = self._render([*messages[:number], marked, *messages[number + 1 :]])
        before, *after = re.split(_ANSWER, text, flags=re.IGNORECASE)
        return before, name.join(after)  # a tool's result may repeat the function's name

    def _prompt(self, text: str, before: str, messages: list[Message], number: int) -> int:
        """Find the prompt of answer `number` (a message index) at the beginning of `text`, the
        rendered conversation -> the prompt's length in characters; -1 if it cannot be found.

        before: the text before the answer. It should begin with the prompt as rendered by itself.
        If it does not, because the template writes earlier messages differently there, the prompt
        ends with the first header (the text that opens an answer) after the previous message."""
        with contextlib.suppress(TemplateError):  # the template may refuse a part
            for prompt in self._prompts(before, messages[:number]):
                if before.startswith(prompt):
                    return len(prompt)
        header = self._style.header
        _, after = self._around_marker(messages, number - 1)
        start = before.find(header, len(text) - len(after))
        return start + len(header) if header and text.endswith(after) and start >= 0 else -1

    def _prompts(self, before: str, messages: list[Message]) -> Iterator[str]:
        """Yield texts, one of which the prompt of the next answer may have in the rendered
        conversation. The first ones come from rendering the prompt by itself. They may have blocks
        of thinking that the conversation lacks (an empty or open one at the end, or empty ones
        earlier), so the last ones leave such blocks out. before: the text before the answer.
        messages: the messages before it."""
        style = self._style
        written = []
        for options in (self.options, {}):
            prompt = self._render(messages, prompt=True, options=options)
            written.append(prompt + style.lead if style.prompted else prompt)
            yield written[-1]
            if not style.prompted:
                shown = os.path.commonprefix([self._render(messages, False, options), before])
                written.append(shown + style.lead)
                yield written[-1]
        for blocks in (_OPENED, _EMPTY):
            yield from (blocks.sub("", prompt) for prompt in written)


@contextlib.contextmanager
def _as_template_error() -> Iterator[None]:
    """Turn any error inside a template into a TemplateError: a division by 0, endless macros, a
    missing include, no memory."""
    try:
        yield
    except TemplateError:
        raise
    except Exception as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from error


def _answers(messages: list[Message]) -> list[int]:
    """Indices of the assistant's messages."""
    return [n for n, message in enumerate(messages) if message["role"] == "assistant"]


def _with_ends(text: str, spans: list[Any], ends: Sequence[str]) -> tuple[str, list[Any]]:
    """Let each span of `text` end with one of the tokens `ends` -> (text, spans), changed. If one
    of them follows the span, the span is extended by it; otherwise ends[0] is inserted into the
    text there. spans: [start, end) in characters."""
    ended = []
    moved = 0
    for start, end in spans:
        end += moved
        ending = next((token for token in ends if text.startswith(token, end)), "")
        ended.append((start + moved, end + len(ending or ends[0])))
        if not ending:
            text = text[:end] + ends[0] + text[end:]
            moved += len(ends[0])
    return text, ended


def _before_answer(content: str) -> str:
    """The beginning of a message's content that is not its answer: the thinking, up to its last
    </think>, and white space."""
    match = re.match(r"(?:.*</think>)?(?:\s*(?=\S))?", content, re.DOTALL)
    return match.group() if match else ""


# -- keys of messages


def _check_weights(conversation: Conversation, trains_all: bool) -> None:
    """Raise ValueError if a message that is not the assistant's has a weight with which the run
    cannot comply. weights of a conversation: message index -> True to train it, False not to. Only
    the assistant's messages can be chosen; a weight of another one must equal trains_all, which is
    True if the run trains all messages."""
    for number, is_trained in conversation.weights.items():
        role = conversation.messages[number]["role"]
        expect(
            role == "assistant" or is_trained == trains_all,
            f"message {number + 1} ({role}) has weight {int(is_trained)}: only the "
            "assistant's messages are trained one by one: leave it out (train_on_prompt: true "
            "trains all messages)",
        )


def _reads(template: str, key: str) -> bool:
    """True if `key` stands in the text of a chat template as the key of a message would: after a
    dot or a quotation mark."""
    return bool(re.search(rf"[.'\"]{re.escape(key)}\b", template))


def _thinking_key(template: str) -> str:
    """The message key under which the template reads thinking, such as "reasoning_content"; "" if
    it reads none."""
    return next((key for key in _THINKING_KEYS if _reads(template, key)), "")


def _with_known_keys(message: Message, template: str) -> Message:
    """A copy of the message that has its thinking (reasoning text) under the key that the chat
    template reads; if the template reads none, under "reasoning_content". Raises ValueError for a
    second, different thinking text, and for a key that neither this package nor the template knows.
    """
    message = dict(message)
    name = _thinking_key(template) or _THINKING_KEYS[0]
    for key in sorted(message.keys() - _KNOWN_KEYS - {name}):
        value = message[key]
        is_known = _reads(template, key)
        if key in _THINKING_KEYS and isinstance(value, str):
            del message[key]
            is_known = True
            if value.strip():
                is_known = (message.get(name) or value) == value
                message[name] = value
        if not is_known:
            raise ValueError(
                f"a message of {message['role']} has the key {key!r}, which neither "
                "mca_lite nor the chat template reads: remove it, or set ignore_message_keys: "
                f"[{key}]"
            )
    return message


# -- thinking and tools


def _for_template(
    messages: list[Message], tools: list[Any] | None, template: str
) -> tuple[list[Message], list[Any] | None]:
    """(messages, tools), with thinking or tools as text if the chat template has no place for them.

    If it reads no thinking, thinking goes before the answer, in <think></think>. If there are tools
    or calls and it does not take them, all are written as Qwen does: tool descriptions end the
    system message, or begin the first question if there is no system message; a call is JSON in
    <tool_call></tool_call>; a tool's result goes into a user message, in
    <tool_response></tool_response>.
    """
    if not _thinking_key(template):
        messages = [_with_thinking_as_text(message) for message in messages]
    has_calls = any("tool_calls" in message for message in messages)
    if (tools and "tools" not in template) or (has_calls and "tool_calls" not in template):
        messages = _with_tools_as_text(messages, tools or [])
        tools = None
    return messages, tools


def _with_thinking_as_text(message: Message) -> Message:
    message = dict(message)
    if thinking := message.pop(_THINKING_KEYS[0], ""):
        message["content"] = f"<think>\n{thinking.strip()}\n</think>\n\n{message['content']}"
    return message


def _with_tools_as_text(messages: list[Message], tools: list[Any]) -> list[Message]:
    written: list[Message] = []
    for message in messages:
        message = dict(message)
        parts = [message["content"]]
        if message["role"] == "tool":
            message = {"role": "user"}
            parts = [f"<tool_response>\n{parts[0]}\n</tool_response>"]
            if (
                written[-1]["role"] == "user"
            ):  # join it, because templates take one user message at a time
                parts.insert(0, written.pop()["content"])
        parts += [_call_as_text(call["function"]) for call in message.pop("tool_calls", ())]
        written.append(message | {"content": "\n".join(filter(None, parts))})
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        first = written[0]
        parts = [first["content"], _TOOLS.format(tools=lines)]
        if first["role"] == "user":
            parts.reverse()
        written[0] = first | {"content": "\n\n".join(parts)}
    return written


def _call_as_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments", {})}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _thinking_of(message: Message) -> str:
    """The key under which a message has thinking, such as "reasoning_content"; "" for none."""
    return next((key for key in _THINKING_KEYS if str(message.get(key, "")).strip()), "")


def _mark_of(number: int) -> str:
    return f"mcathought{number}x"


def _mark_thinking(messages: list[Message]) -> list[Message]:
    """The messages with the assistant's thinking replaced by marks ("mcathought3x" in message 3),
    to see where a template writes it."""
    marked = list(messages)
    for number in _answers(messages):
        message = messages[number]
        mark = _mark_of(number)
        marked[number] = message | {"content": _THINKING.sub(f"\n{mark}\n", message["content"])}
        if key := _thinking_of(message):
            marked[number] = message | {key: mark}
    return marked


def kept_of_turn(prompt: int, answer: int, limit: int) -> tuple[int, int]:
    """Numbers of tokens to keep from the start of a prompt and of its answer, at most `limit`
    together -> (prompt tokens, answer tokens). A side shorter than half of the limit is kept whole;
    otherwise both are cut in proportion to their lengths. From LLaMA-Factory's infer_seqlen (0.9.5,
    data/processor/processor_utils.py)."""
    if 2 * answer < limit:
        most = limit
    elif 2 * prompt < limit:
        most = limit - prompt
    else:
        most = int(limit * (answer / (prompt + answer)))
    answer = min(most, answer)
    return min(limit - answer, prompt), answer
