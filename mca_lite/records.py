"""From files to token ids with a loss mask: readers, record formats, chat rendering.

A place in the user's data is "file:line" throughout (parquet: file:row), so that every error can name it.
"""

import difflib
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

SUFFIXES = (".json", ".jsonl", ".txt", ".parquet")


@dataclass
class Source:
    """One dataset: its files, and how dataset_info.json declares it (None, {}: detect it)."""

    name: str
    files: list[str]
    formatting: str | None = None
    columns: dict = field(default_factory=dict)
    tags: dict = field(default_factory=dict)
    num_samples: int | None = None
    notes: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------ where the files are

_HUB_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_UNUSED_KEYS = ("subset", "split", "folder")  # they select within a hub repository
_TEXT_COLUMNS = ("prompt", "query", "response", "history", "messages", "system", "tools", "text")
_OTHER_COLUMNS = ("images", "videos", "audios", "chosen", "rejected", "kto_tag")
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


def resolve(entries: list[str], dataset_dir: str | None) -> list[Source]:
    """Names in dataset_dir/dataset_info.json, else files or folders (as given, or in dataset_dir), as Sources.

    Raises: ValueError for an entry that is none of these, or a declaration that cannot be honoured.
    """
    folder = Path(dataset_dir or ".")
    info_file = folder / "dataset_info.json"
    info = _read_info(info_file) if info_file.is_file() else {}
    sources = []
    for entry in entries:
        if entry in info:
            sources.append(_declared(entry, info[entry], info_file))
            continue
        path = next((p for p in (Path(entry), folder / entry) if p.exists()), None)
        if path is None:
            near = difflib.get_close_matches(entry, info, n=1)
            raise ValueError(
                f"dataset {entry!r}: expected a file, a folder, or a name in {info_file}"
                + (f" (it has {', '.join(sorted(info))})" if info else " (which is not there)")
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        sources.append(Source(str(entry), _files_of(path)))
    return sources


def _files_of(path: Path) -> list[str]:
    """The file, or the files of a folder in the order of their names."""
    files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES) if path.is_dir() else [path]
    files = [str(p) for p in files if p.name != "dataset_info.json"]
    if not files or Path(files[0]).suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected {', '.join(SUFFIXES)} files")
    return files


def _read_info(path: Path) -> dict:
    try:
        info = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}:{getattr(error, 'lineno', 1)}: not valid JSON: {error}") from None
    if not isinstance(info, dict):
        raise ValueError(f"{path}: expected an object that maps names to datasets, got {type(info).__name__}")
    return info


def _declared(name: str, entry: dict, info_file: Path) -> Source:
    here = f"{info_file}: dataset {name!r}"
    if not isinstance(entry, dict):
        raise ValueError(f"{here}: expected an object, got {type(entry).__name__}")
    hub = [key for key in _HUB_KEYS if key in entry]
    if hub or "file_name" not in entry:
        raise ValueError(
            f"{here}: datasets are read from local files: download it and set file_name"
            + (f" instead of {', '.join(hub)}" if hub else "")
        )
    if entry.get("ranking"):
        raise ValueError(f"{here}: preference pairs (ranking: true) are for stage dpo, not for pt or sft")
    known = ("file_name", "formatting", "columns", "tags", "num_samples", "ranking", *_UNUSED_KEYS)
    columns, tags, formatting = entry.get("columns", {}), entry.get("tags", {}), entry.get("formatting")
    for kind, given, allowed in (
        ("key", entry, known),
        ("column", columns, _TEXT_COLUMNS + _OTHER_COLUMNS),
        ("tag", tags, tuple(_TAGS)),
    ):
        for key in given:
            if key not in allowed:
                near = difflib.get_close_matches(key, allowed, n=1)
                raise ValueError(f"{here}: unknown {kind} {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    if other := [column for column in columns if column in _OTHER_COLUMNS]:
        raise ValueError(f"{here}: columns {other} are not for training on text with pt or sft")
    if formatting not in (None, "alpaca", "sharegpt", "openai"):
        raise ValueError(f"{here}: formatting {formatting!r}: expected alpaca, sharegpt or openai")
    path = info_file.parent / entry["file_name"]
    if not path.exists():
        raise ValueError(f"{here}: there is no file {path}")
    notes = [f"{key} of dataset_info.json has no meaning for a local file" for key in _UNUSED_KEYS if key in entry]
    return Source(name, _files_of(path), formatting, columns, tags, entry.get("num_samples"), notes)


# ------------------------------------------------------------------------------------------------------------ readers


def read_records(file: str) -> Iterator[tuple[str, object]]:
    """Yields (place, record) in the file's order. A .txt file has one document a line; blank lines are no records.

    Raises: ValueError with the place for what is not UTF-8 or not JSON; for parquet without pyarrow.
    """
    suffix = Path(file).suffix
    if suffix == ".parquet":
        yield from _read_parquet(file)
    elif suffix == ".json":
        yield from _read_json(file)
    else:
        with open(file, "rb") as lines:  # only "\n" ends a line; text mode would also break at "\r"
            for number, line in enumerate(lines, 1):
                if text := _decode(line, f"{file}:{number}").strip():
                    yield f"{file}:{number}", text if suffix == ".txt" else _parse(text, f"{file}:{number}")


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: expected UTF-8 text: {error}") from None


def _parse(text: str, where: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected one JSON value: {error.msg} (character {error.pos + 1})") from None


def _read_json(file: str) -> Iterator[tuple[str, object]]:
    """A list of records, or objects one after another. Elements are decoded one by one to know their lines."""
    text = _decode(Path(file).read_bytes(), file)
    decoder, space = json.JSONDecoder(), re.compile(r"\s*")
    at = space.match(text).end()
    is_list = text[at : at + 1] == "["
    at = space.match(text, at + is_list).end()
    line, counted = 1, 0
    while at < len(text) and not (is_list and text[at] == "]"):
        line, counted = line + text.count("\n", counted, at), at
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}:{error.lineno}: not valid JSON: {error.msg}") from None
        yield f"{file}:{line}", record
        at = space.match(text, at).end()
        if is_list and text[at : at + 1] not in (",", "]"):
            line += text.count("\n", counted, at)
            got = repr(text[at : at + 20]) if at < len(text) else "the end of the file"
            raise ValueError(f"{file}:{line}: not valid JSON: expected ',' or ']' after a record, got {got}")
        if is_list and text[at] == ",":
            at = space.match(text, at + 1).end()
    if is_list and text[at + 1 :].strip():
        raise ValueError(f"{file}: not valid JSON: there is more text after the list of records")
    if is_list and at >= len(text):
        raise ValueError(f"{file}:{text.count(chr(10)) + 1}: not valid JSON: the list does not end with ']'")


def _read_parquet(file: str) -> Iterator[tuple[str, object]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{file}: reading parquet takes pyarrow: pip install 'mca-lite[parquet]'")
    import pyarrow.parquet

    row = 0
    for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1000):
        for record in batch.to_pylist():
            row += 1
            yield f"{file}:{row}", record


# ------------------------------------------------------------------------------------------------------------ formats

_EXPECTED = (
    "alpaca (instruction, input, output), sharegpt (conversations), OpenAI (messages) or prompt and completion columns"
)


def detect_format(record, source: Source, stage: str, where: str) -> str:
    """The format of a file, from its first record: text (pt), alpaca, sharegpt, openai, prompt-completion (sft)."""
    if stage == "pt":
        return _detect_text(record, source, where)
    if not isinstance(record, dict):
        raise ValueError(f"{where}: stage sft expects {_EXPECTED}, got {_kind(record)}; plain text is for stage: pt")
    columns = source.columns
    key = next((k for k in (columns.get("messages"), "messages", "conversations") if k and k in record), None)
    if source.formatting:
        return source.formatting
    if "prompt" in columns or "response" in columns:
        return "alpaca"
    if key:
        turns = record[key]
        is_openai = isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]
        return "openai" if is_openai and not source.tags else "sharegpt"
    if "instruction" in record:
        return "alpaca"
    if "prompt" in record and ("completion" in record or "response" in record):
        return "prompt-completion"
    hint = "; a text column is for stage: pt" if "text" in record else "; other names: columns in dataset_info.json"
    raise ValueError(f"{where}: stage sft expects {_EXPECTED}, got the columns {sorted(record)}{hint}")


def _detect_text(record, source: Source, where: str) -> str:
    if isinstance(record, str) or (isinstance(record, dict) and _text_column(source) in record):
        return "text"
    got = f"the columns {sorted(record)}" if isinstance(record, dict) else _kind(record)
    raise ValueError(
        f"{where}: stage pt expects the column {_text_column(source)!r} or plain text, got {got}: set columns: "
        "{prompt: <name>} in dataset_info.json, or stage: sft for conversations"
    )


def _text_column(source: Source) -> str:
    return source.columns.get("text") or source.columns.get("prompt") or "text"


def _kind(value) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "null"}.get(type(value), repr(value))


def _get(record, column: str, where: str, kind=str, required=True):
    """A column of the right type; null and absent are the same."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object, got {_kind(record)}")
    value = record.get(column)
    if value is None:
        if required:
            raise ValueError(f"{where}: the column {column!r} is missing or null; it has {sorted(record)}")
    elif not isinstance(value, kind):
        expected = {str: "a text", list: "a list"}.get(kind, "a list or a text")
        raise ValueError(f"{where}: the column {column!r}: expected {expected}, got {_kind(value)}")
    return value


def document(record, source: Source, where: str) -> str:
    """The text of a pt record (prompt, and query below it where dataset_info.json declares both)."""
    if isinstance(record, str):
        return record
    text = _get(record, _text_column(source), where)
    query = _get(record, source.columns["query"], where, required=False) if "query" in source.columns else None
    return "\n".join(part for part in (text, query) if part)


def conversation(record, source: Source, form: str, default_system: str | None, where: str) -> tuple[list, list | None]:
    """(messages, tools) in OpenAI's form, checked: an optional system, then user and assistant in turn, ending with the
    assistant; tool messages follow an assistant's tool calls. Raises: ValueError with the place."""
    messages = _READERS[form](record, source, where)
    column = source.columns.get("system", "system")
    system = _get(record, column, where, required=False) or default_system
    if system and messages and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": system}, *messages]
    _check_turns(messages, where)
    return messages, _tools(record, source.columns.get("tools", "tools"), where)


def _alpaca(record, source: Source, where: str) -> list[dict]:
    columns = source.columns
    prompt = _get(record, columns.get("prompt", "instruction"), where)
    query = _get(record, columns.get("query", "input"), where, required=False)
    answer = _get(record, columns.get("response", "output"), where)
    pairs = _get(record, columns.get("history", "history"), where, list, required=False) or []
    if not all(isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair) for pair in pairs):
        raise ValueError(f"{where}: history: expected a list of [question, answer] pairs of texts")
    pairs = [*pairs, ["\n".join(part for part in (prompt, query) if part), answer]]
    return [_message(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]


def _message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def _sharegpt(record, source: Source, where: str) -> list[dict]:
    tags = _TAGS | source.tags
    default = "messages" if isinstance(record, dict) and "conversations" not in record else "conversations"
    roles = {} if source.tags else {"user": "user", "assistant": "assistant", "tool": "tool"}
    roles |= {tags["user_tag"]: "user", tags["assistant_tag"]: "assistant", tags["system_tag"]: "system"}
    roles |= {tags["observation_tag"]: "tool", tags["function_tag"]: "function_call"}
    messages = []
    for turn in _get(record, source.columns.get("messages", default), where, list):
        role, text = (_get(turn, tags[tag], where) for tag in ("role_tag", "content_tag"))
        if role not in roles:
            raise ValueError(f"{where}: unknown {tags['role_tag']} {role!r}: expected one of {', '.join(roles)}")
        is_call = roles[role] == "function_call"
        messages.append(_function_call(text, where) if is_call else _message(roles[role], text))
    return messages


def _function_call(text: str, where: str) -> dict:
    """{"name", "arguments"} or a list of them as JSON text -> an assistant message with tool calls."""
    calls = _parse(text, f"{where}: function_call")
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [_tool_call(call, where) for call in calls]}


def _tool_call(call, where: str) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool call: expected an object with name and arguments, got {call!r:.80}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's own files hold JSON text; chat templates want the object
        arguments = _parse(arguments or "{}", f"{where}: arguments of a tool call")
    outer = call if "function" in call else {"type": "function"}
    return {**outer, "function": {**function, "arguments": arguments}}


def _openai(record, source: Source, where: str) -> list[dict]:
    turns = _get(record, source.columns.get("messages", "messages"), where, list)
    return [_openai_message(turn, source.tags, where) for turn in turns]


def _openai_message(turn, tags: dict, where: str) -> dict:
    role = _get(turn, tags.get("role_tag", "role"), where)
    content_tag = tags.get("content_tag", "content")
    content = _get(turn, content_tag, where, (str, list), required=False)
    if isinstance(content, list):  # blocks
        if not all(isinstance(block, dict) and isinstance(block.get("text"), str) for block in content):
            raise ValueError(f"{where}: content: expected a text or a list of text blocks; only text can be trained on")
        content = "".join(block["text"] for block in content)
    renamed = {tags[f"{name}_tag"]: name for name in ("user", "assistant", "system") if f"{name}_tag" in tags}
    renamed |= {tags["observation_tag"]: "tool"} if "observation_tag" in tags else {}
    message = {key: value for key, value in turn.items() if value is not None}
    for key in (tags.get("role_tag"), content_tag):
        message.pop(key, None)
    message |= {"role": renamed.get(role, role), "content": content or ""}
    if calls := _get(turn, "tool_calls", where, list, required=False):
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    elif content is None:
        raise ValueError(f"{where}: a message of {role!r} has neither content nor tool_calls")
    return message


def _prompt_completion(record, source: Source, where: str) -> list[dict]:
    prompt = _get(record, "prompt", where, (str, list))
    answer = _get(record, "completion" if "completion" in record else "response", where, (str, list))
    parts = ((prompt, "user"), (answer, "assistant"))
    turns = [[_message(role, part)] if isinstance(part, str) else part for part, role in parts]
    return [_openai_message(turn, {}, where) for part in turns for turn in part]


_READERS = {"alpaca": _alpaca, "sharegpt": _sharegpt, "openai": _openai, "prompt-completion": _prompt_completion}


def _tools(record: dict, column: str, where: str) -> list[dict] | None:
    tools = _get(record, column, where, (list, str), required=False)
    if isinstance(tools, str):
        tools = _parse(tools, f"{where}: {column}") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where}: {column}: expected a list of tool descriptions")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


_MAY_FOLLOW = {
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
    "system": (None,),
}


def _check_turns(messages: list[dict], where: str) -> None:
    if not messages:
        raise ValueError(f"{where}: the conversation has no messages")
    before = None
    for number, message in enumerate(messages, 1):
        role = {"developer": "system"}.get(message["role"], message["role"])
        if role not in _MAY_FOLLOW:
            raise ValueError(f"{where}: message {number}: unknown role {role!r}: expected {', '.join(_MAY_FOLLOW)}")
        if before not in _MAY_FOLLOW[role]:
            allowed = " or ".join(other or "the beginning" for other in _MAY_FOLLOW[role])
            after = before or "the beginning"
            raise ValueError(f"{where}: message {number} ({role}) follows {after}: expected it to follow {allowed}")
        before = role
    if before != "assistant":
        raise ValueError(f"{where}: the conversation ends with {before}: expected the assistant to have the last word")


# ----------------------------------------------------------------------------------------- chat rendering, loss masks

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_QUESTION, _ANSWER = "mcaquestion", "mcaanswer"  # texts to try a template with; no template trims or changes them


@dataclass
class _Style:
    """How a chat template writes a turn of the assistant, found by rendering one question and one answer.

    prompted: the prompt is rendered with add_generation_prompt; lead: what stands between that prompt and the answer (a
    header that the assistant does not say); closing: the end-of-turn token; tail: all that follows the answer.
    """

    prompted: bool
    lead: str
    closing: str
    tail: str


class ChatRenderer:
    """Renders conversations with the tokenizer's own chat template and finds what the assistant says in them.

    Raises: ValueError for a tokenizer without a chat template or without character offsets (not a fast one).
    """

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, which stage: sft needs: set model_name_or_path to a model with a "
                "chat_template.jinja (an instruct or chat model), or put that file beside tokenizer_config.json"
            )
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} gives no character offsets, from which the loss mask is made: expected a "
                "fast tokenizer (one with a tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self._styles: dict[str, _Style] = {}

    def render(self, messages: list[dict], tools: list | None, last_only: bool, where: str) -> tuple[str, list]:
        """(text, spans): the whole conversation, and [start, end) in characters of what the assistant says in each turn
        (last_only: in the last one), with the end-of-turn token. Raises: ValueError with the place."""
        template = self.tokenizer.get_chat_template(tools=tools)
        for name, used in (("tools", tools), ("tool_calls", any("tool_calls" in message for message in messages))):
            if used and name not in template:
                raise ValueError(f"{where}: the record has {name}, but the tokenizer's chat template takes none")
        try:
            style = self._style(template)
            if _GENERATION_MARK.search(template):
                text, spans = self._by_marks(messages, tools, template, style, last_only)
            else:
                text, spans = self._render(messages, tools), []
            spans = spans or self._by_difference(text, messages, tools, style, last_only)
            spans = spans or self._by_markers(text, messages, tools, style, last_only)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"{where}: the chat template refuses the conversation: {error}") from error
        if not spans:
            raise ValueError(f"{where}: {self._what_differs(text, messages, tools)}")
        return text, spans

    def ends_turns(self) -> bool:
        """Whether the template writes anything that tells the end of an answer."""
        try:
            return bool(self._style(self.tokenizer.get_chat_template()).closing)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses a question with its answer: {error}") from error

    def _render(self, messages: list[dict], tools: list | None, prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)

    def _style(self, template: str) -> _Style:
        if template not in self._styles:
            question, answer = _message("user", _QUESTION), _message("assistant", _ANSWER)
            both = self._render([question, answer], None)
            plain, prompt = self._render([question], None), self._render([question], None, prompt=True)
            # Phi-3 ends every unprompted text with eos, so that `plain` need not be a beginning of `both`.
            prompted = both.startswith(prompt)
            start = len(prompt) if prompted else len(os.path.commonprefix([plain, both]))
            lead, _, tail = both[start:].partition(_ANSWER)
            if prompted and (prompt != plain or not lead.strip()):
                lead = ""  # think marks or a space, which the model has to produce itself
            self._styles[template] = _Style(prompted, lead, self._end_of_turn(tail), tail)
        return self._styles[template]

    def _end_of_turn(self, tail: str) -> str:
        """tail up to and with its first special token; without one, tail without the white space at its end."""
        tokens = [*map(str, self.tokenizer.added_tokens_decoder.values()), *self.tokenizer.all_special_tokens]
        ends = [(tail.index(token), -len(token)) for token in tokens if token and token in tail]
        return tail[: min(ends)[0] - min(ends)[1]] if ends else tail.rstrip()

    def _by_marks(self, messages, tools, template: str, style: _Style, last_only: bool) -> tuple[str, list]:
        """The template's own {% generation %} marks, made to end behind the end-of-turn token."""
        # apply_chat_template would map the marks to tokens itself, one conversation at a time, and a mark that ends in
        # white space which the tokenizer drops would reach to the end of the text.
        texts, marks = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            **self.tokenizer.special_tokens_map,
        )
        text, spans = texts[0], []
        for start, end in marks[0]:
            said, closing, rest = text[start:end].rpartition(style.closing) if style.closing else ("", "", "")
            if closing and not rest.strip():
                end = start + len(said) + len(closing)
            elif style.closing and text.startswith(style.closing, end):
                end += len(style.closing)
            spans.append((start, end))
        if last_only:
            history = os.path.commonprefix([text, self._render(messages[:-1], tools)])
            spans = [span for span in spans if span[0] >= len(history)] or spans[-1:]
        return text, spans

    def _by_difference(self, text: str, messages, tools, style: _Style, last_only: bool) -> list:
        """Renders the conversation up to each turn, and up to and with it. [] where the whole begins otherwise."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or (last_only and number < len(messages) - 1):
                continue
            try:
                before = self._render(messages[:number], tools, prompt=style.prompted) if number else ""
                until = self._render(messages[: number + 1], tools)
            except TemplateError:  # a template may refuse a part of a conversation
                return []
            if not style.prompted:
                before = os.path.commonprefix([before, until])
            if not (text.startswith(before) and until.startswith(before + style.lead)):
                return []
            start = len(before) + len(style.lead)
            turn = until[start:]
            turn = turn.removesuffix(style.tail) + style.closing if turn.endswith(style.tail) else turn.rstrip()
            # A turn may lose its beginning, the thinking, once others follow: the longest end that is there counts.
            first = text[start : start + 1]
            kept = next((turn[k:] for k, c in enumerate(turn) if c == first and text.startswith(turn[k:], start)), "")
            if not kept.endswith(style.closing) or not all(part in kept for part in _parts_said(message)):
                return []
            spans.append((start, start + len(kept)))
        return spans

    def _by_markers(self, text: str, messages, tools, style: _Style, last_only: bool) -> list:
        """Renders the conversation with a marker for each answer: what stands between the markers must be what stands
        between the answers in the real text, from its first character to its last. [] where it is not."""
        answers = [message.get("content") for message in messages if message["role"] == "assistant"]
        if not all(answers) or any("tool_calls" in message for message in messages):
            return []
        markers = iter([f"{_ANSWER}{number}x" for number in range(len(answers))])
        marked = [m | {"content": next(markers)} if m["role"] == "assistant" else m for m in messages]
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
        return (spans[-1:] if last_only else spans) if at == len(text) else []

    def _what_differs(self, text: str, messages, tools) -> str:
        reason = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not number:
                continue
            try:
                before = self._render(messages[:number], tools, prompt=True)
            except TemplateError as error:
                reason = f"message {number + 1}: the template refuses the messages before it: {error}"
                break
            at = len(os.path.commonprefix([before, text]))
            if at < len(before):
                reason = (
                    f"message {number + 1}: the prompt before it and the whole conversation differ from character {at} "
                    f"on: {before[at : at + 60]!r} and {text[at : at + 60]!r}"
                )
                break
        return (
            "cannot tell which part of the rendered conversation the assistant says; "
            f"{reason or 'the template changes what it says'}; "
            "put {% generation %} and {% endgeneration %} round it in the chat template, or set train_on_prompt: true"
        )


def _parts_said(message: dict) -> list[str]:
    """Texts that must be found in a rendered turn: the answer without its thinking, the names of called functions."""
    answer = message.get("content", "").rpartition("</think>")[2].strip()
    return [answer, *(call["function"]["name"] for call in message.get("tool_calls", ()))]


# ------------------------------------------------------------------------------------------------------ records to ids


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
        self.train_on_prompt, self.mask_history, self.default_system = train_on_prompt, mask_history, default_system
        self.notes: list[str] = []
        if stage == "pt":
            if tokenizer.eos_token_id is None:
                raise ValueError("the tokenizer has no eos_token to end a document of stage: pt: set it in its config")
        else:
            self.renderer = ChatRenderer(tokenizer)
            if not self.renderer.ends_turns():
                self.notes.append("the chat template writes nothing after an answer: the model will not learn to stop")

    def options(self) -> dict:
        """What decides on the result, beside the records and the tokenizer."""
        names = ("stage", "cutoff_len", "joins", "train_on_prompt", "mask_history", "default_system")
        return {name: getattr(self, name) for name in names}

    def encode(self, chunk: list[tuple[str, str, object]]) -> Encoded:
        """chunk: (place, format, record) each. Raises: ValueError with the place."""
        places = [where for where, _, _ in chunk]
        ids, masks = self._documents(chunk) if self.stage == "pt" else self._conversations(chunk)
        tallies: dict[str, tuple[int, str]] = {}
        kept_ids, kept_masks, learned = [], [], []
        for where, tokens, mask in zip(places, ids, masks, strict=True):
            if not self.joins and len(tokens) > self.cutoff_len + 1:
                tokens, mask = tokens[: self.cutoff_len + 1], mask[: self.cutoff_len + 1]
                _count(tallies, f"samples were longer than cutoff_len {self.cutoff_len} and cut", where)
            targets = int(mask[1:].sum())  # nothing predicts the first token
            if targets == 0 and not (self.joins and len(tokens) > 1):
                _count(tallies, "samples have no token to train on and were left out", where)
                continue
            kept_ids.append(tokens)
            kept_masks.append(mask)
            learned.append(targets)
        return Encoded(
            ids=np.concatenate(kept_ids) if kept_ids else np.zeros(0, np.int32),
            mask=None if self.stage == "pt" else np.concatenate([np.zeros(0, np.uint8), *kept_masks]),
            lengths=[len(tokens) for tokens in kept_ids],
            learned=learned,
            records=len(chunk),
            tallies=tallies,
        )

    def _documents(self, chunk) -> tuple[list, list]:
        texts = [document(record, self.source, where) for where, _, record in chunk]
        eos = self.tokenizer.eos_token_id
        # With the tokenizer's own special tokens: a model that was trained with bos before each document gets it.
        batch = self.tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)
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
            raise ValueError(f"{where}: the chat template refuses the conversation: {error}") from error
        return text, [(-1, len(text) + 1)]


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
