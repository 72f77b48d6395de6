"""From files to documents and conversations: where the files are, readers, record formats.

A place in the user's data is "file:line" throughout (parquet: file:row), so that every error can name it.
"""

import difflib
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
_PAIR_COLUMNS = ("chosen", "rejected")
_OTHER_COLUMNS = ("images", "videos", "audios", *_PAIR_COLUMNS, "kto_tag")
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


def resolve(entries: list[str], dataset_dir: str | None, stage: str = "sft") -> list[Source]:
    """Names in dataset_dir/dataset_info.json, else files or folders (as given, or in dataset_dir), as Sources.

    Raises: ValueError for an entry that is none of these, or a declaration that cannot be honoured.
    """
    folder = Path(dataset_dir or ".")
    info_file = folder / "dataset_info.json"
    info = _read_info(info_file) if info_file.is_file() else {}
    sources = []
    for entry in entries:
        if entry in info:
            sources.append(_declared(entry, info[entry], info_file, stage))
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
        raise ValueError(
            f"{path}: expected an object that maps names to datasets, got {type(info).__name__}"
        )
    return info


def _declared(name: str, entry: dict, info_file: Path, stage: str) -> Source:
    here = f"{info_file}: dataset {name!r}"
    if not isinstance(entry, dict):
        raise ValueError(f"{here}: expected an object, got {type(entry).__name__}")
    hub = [key for key in _HUB_KEYS if key in entry]
    if hub or "file_name" not in entry:
        raise ValueError(
            f"{here}: datasets are read from local files: download it and set file_name"
            + (f" instead of {', '.join(hub)}" if hub else "")
        )
    if entry.get("ranking") and stage != "dpo":
        raise ValueError(
            f"{here}: preference pairs (ranking: true) are for stage dpo, not for stage {stage}"
        )
    known = ("file_name", "formatting", "columns", "tags", "num_samples", "ranking", *_UNUSED_KEYS)
    columns, tags, formatting = (
        entry.get("columns", {}),
        entry.get("tags", {}),
        entry.get("formatting"),
    )
    for kind, given, allowed in (
        ("key", entry, known),
        ("column", columns, _TEXT_COLUMNS + _OTHER_COLUMNS),
        ("tag", tags, tuple(_TAGS)),
    ):
        for key in given:
            if key not in allowed:
                near = difflib.get_close_matches(key, allowed, n=1)
                raise ValueError(
                    f"{here}: unknown {kind} {key!r}"
                    + (f", did you mean {near[0]!r}?" if near else "")
                )
    for_stage = _PAIR_COLUMNS if stage == "dpo" else ()
    if other := [
        column for column in columns if column in _OTHER_COLUMNS and column not in for_stage
    ]:
        raise ValueError(f"{here}: columns {other} are not for training on text with stage {stage}")
    if formatting not in (None, "alpaca", "sharegpt", "openai"):
        raise ValueError(f"{here}: formatting {formatting!r}: expected alpaca, sharegpt or openai")
    path = info_file.parent / entry["file_name"]
    if not path.exists():
        raise ValueError(f"{here}: there is no file {path}")
    notes = [
        f"{key} of dataset_info.json has no meaning for a local file"
        for key in _UNUSED_KEYS
        if key in entry
    ]
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
                    yield (
                        f"{file}:{number}",
                        text if suffix == ".txt" else _parse(text, f"{file}:{number}"),
                    )


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: expected UTF-8 text: {error}") from None


def _parse(text: str, where: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: expected one JSON value: {error.msg} (character {error.pos + 1})"
        ) from None


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
            raise ValueError(
                f"{file}:{line}: not valid JSON: expected ',' or ']' after a record, got {got}"
            )
        if is_list and text[at] == ",":
            at = space.match(text, at + 1).end()
    if is_list and text[at + 1 :].strip():
        raise ValueError(f"{file}: not valid JSON: there is more text after the list of records")
    if is_list and at >= len(text):
        raise ValueError(
            f"{file}:{text.count(chr(10)) + 1}: not valid JSON: the list does not end with ']'"
        )


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

_EXPECTED = "alpaca (instruction, input, output), sharegpt (conversations), OpenAI (messages) or prompt and completion columns"


def detect_format(record, source: Source, stage: str, where: str) -> str:
    """The format of a file, from its first record: text (pt), alpaca, sharegpt, openai, prompt-completion (sft)."""
    if stage == "pt":
        return _detect_text(record, source, where)
    if not isinstance(record, dict):
        raise ValueError(
            f"{where}: stage sft expects {_EXPECTED}, got {kind_of(record)}; plain text is for stage: pt"
        )
    columns = source.columns
    key = next(
        (k for k in (columns.get("messages"), "messages", "conversations") if k and k in record),
        None,
    )
    if all(column in record for column in _PAIR_COLUMNS) and not _holds_an_answer(
        record, source, key
    ):
        raise ValueError(
            f"{where}: chosen and rejected answers are for stage dpo: stage sft expects {_EXPECTED}"
        )
    if source.formatting:
        return source.formatting
    if "prompt" in columns or "response" in columns:
        return "alpaca"
    if key:
        turns = record[key]
        is_openai = (
            isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]
        )
        return "openai" if is_openai and not source.tags else "sharegpt"
    if "instruction" in record:
        return "alpaca"
    if "prompt" in record and ("completion" in record or "response" in record):
        return "prompt-completion"
    hint = (
        "; a text column is for stage: pt"
        if "text" in record
        else "; other names: columns in dataset_info.json"
    )
    raise ValueError(
        f"{where}: stage sft expects {_EXPECTED}, got the columns {sorted(record)}{hint}"
    )


def _holds_an_answer(record: dict, source: Source, turns_column: str | None) -> bool:
    """Whether one conversation can be read from a record that has chosen and rejected answers too."""
    if any(
        column in record
        for column in (source.columns.get("response", "output"), "completion", "response")
    ):
        return True
    turns, tags = record.get(turns_column), _TAGS | source.tags
    last = turns[-1] if isinstance(turns, list) and turns and isinstance(turns[-1], dict) else {}
    return last.get(tags["role_tag"], last.get("role")) in (
        tags["assistant_tag"],
        "gpt",
        "assistant",
    )


def _detect_text(record, source: Source, where: str) -> str:
    if isinstance(record, str) or (isinstance(record, dict) and _text_column(source) in record):
        return "text"
    got = f"the columns {sorted(record)}" if isinstance(record, dict) else kind_of(record)
    raise ValueError(
        f"{where}: stage pt expects the column {_text_column(source)!r} or plain text, got {got}: set columns: "
        "{prompt: <name>} in dataset_info.json, or stage: sft for conversations"
    )


def _text_column(source: Source) -> str:
    return source.columns.get("text") or source.columns.get("prompt") or "text"


def kind_of(value) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "null"}.get(
        type(value), repr(value)
    )


def get_column(record, column: str, where: str, kind=str, required=True):
    """A column of the right type; null and absent are the same."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object, got {kind_of(record)}")
    value = record.get(column)
    if value is None:
        if required:
            raise ValueError(
                f"{where}: the column {column!r} is missing or null; it has {sorted(record)}"
            )
    elif not isinstance(value, kind):
        expected = {str: "a text", list: "a list"}.get(kind, "a list or a text")
        raise ValueError(
            f"{where}: the column {column!r}: expected {expected}, got {kind_of(value)}"
        )
    return value


def document(record, source: Source, where: str) -> str:
    """The text of a pt record (prompt, and query below it where dataset_info.json declares both)."""
    if isinstance(record, str):
        return record
    text = get_column(record, _text_column(source), where)
    query = (
        get_column(record, source.columns["query"], where, required=False)
        if "query" in source.columns
        else None
    )
    return "\n".join(part for part in (text, query) if part)


def conversation(
    record, source: Source, form: str, default_system: str | None, where: str
) -> tuple[list, list | None]:
    """(messages, tools) in OpenAI's form, checked: an optional system, then user and assistant in turn, ending with the
    assistant; tool messages follow an assistant's tool calls. Raises: ValueError with the place."""
    messages = with_system(
        _READERS[form](record, source, where), record, source, default_system, where
    )
    check_turns(messages, where)
    return messages, tools_of(record, source, where)


def with_system(
    messages: list[dict], record, source: Source, default_system: str | None, where: str
) -> list[dict]:
    """The messages behind the system message of the record's column, or the default one, if they begin with none."""
    system = (
        get_column(record, source.columns.get("system", "system"), where, required=False)
        or default_system
    )
    if system and messages and messages[0]["role"] not in ("system", "developer"):
        return [new_message("system", system), *messages]
    return messages


def read_alpaca(record, source: Source, where: str) -> list[dict]:
    columns = source.columns
    prompt = get_column(record, columns.get("prompt", "instruction"), where)
    query = get_column(record, columns.get("query", "input"), where, required=False)
    answer = get_column(record, columns.get("response", "output"), where)
    pairs = get_column(record, columns.get("history", "history"), where, list, required=False) or []
    if not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair)
        for pair in pairs
    ):
        raise ValueError(f"{where}: history: expected a list of [question, answer] pairs of texts")
    pairs = [*pairs, ["\n".join(part for part in (prompt, query) if part), answer]]
    return [
        new_message(role, text)
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def new_message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def read_sharegpt(record, source: Source, where: str) -> list[dict]:
    tags = _TAGS | source.tags
    default = (
        "messages"
        if isinstance(record, dict) and "conversations" not in record
        else "conversations"
    )
    roles = {} if source.tags else {"user": "user", "assistant": "assistant", "tool": "tool"}
    roles |= {
        tags["user_tag"]: "user",
        tags["assistant_tag"]: "assistant",
        tags["system_tag"]: "system",
    }
    roles |= {tags["observation_tag"]: "tool", tags["function_tag"]: "function_call"}
    messages = []
    for turn in get_column(record, source.columns.get("messages", default), where, list):
        role, text = (get_column(turn, tags[tag], where) for tag in ("role_tag", "content_tag"))
        if role not in roles:
            raise ValueError(
                f"{where}: unknown {tags['role_tag']} {role!r}: expected one of {', '.join(roles)}"
            )
        is_call = roles[role] == "function_call"
        messages.append(_function_call(text, where) if is_call else new_message(roles[role], text))
    return messages


def _function_call(text: str, where: str) -> dict:
    """{"name", "arguments"} or a list of them as JSON text -> an assistant message with tool calls."""
    calls = _parse(text, f"{where}: function_call")
    calls = calls if isinstance(calls, list) else [calls]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [_tool_call(call, where) for call in calls],
    }


def _tool_call(call, where: str) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{where}: a tool call: expected an object with name and arguments, got {call!r:.80}"
        )
    arguments = function.get("arguments", {})
    if isinstance(
        arguments, str
    ):  # OpenAI's own files hold JSON text; chat templates want the object
        arguments = _parse(arguments or "{}", f"{where}: arguments of a tool call")
    outer = call if "function" in call else {"type": "function"}
    return {**outer, "function": {**function, "arguments": arguments}}


def read_openai(record, source: Source, where: str) -> list[dict]:
    turns = get_column(record, source.columns.get("messages", "messages"), where, list)
    return [read_openai_message(turn, source.tags, where) for turn in turns]


def read_openai_message(turn, tags: dict, where: str) -> dict:
    role = get_column(turn, tags.get("role_tag", "role"), where)
    content_tag = tags.get("content_tag", "content")
    content = get_column(turn, content_tag, where, (str, list), required=False)
    if isinstance(content, list):  # blocks
        if not all(
            isinstance(block, dict) and isinstance(block.get("text"), str) for block in content
        ):
            raise ValueError(
                f"{where}: content: expected a text or a list of text blocks; only text can be trained on"
            )
        content = "".join(block["text"] for block in content)
    renamed = {
        tags[f"{name}_tag"]: name
        for name in ("user", "assistant", "system")
        if f"{name}_tag" in tags
    }
    renamed |= {tags["observation_tag"]: "tool"} if "observation_tag" in tags else {}
    message = {key: value for key, value in turn.items() if value is not None}
    for key in (tags.get("role_tag"), content_tag):
        message.pop(key, None)
    message |= {"role": renamed.get(role, role), "content": content or ""}
    if calls := get_column(turn, "tool_calls", where, list, required=False):
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    elif content is None:
        raise ValueError(f"{where}: a message of {role!r} has neither content nor tool_calls")
    return message


def _prompt_completion(record, source: Source, where: str) -> list[dict]:
    prompt = get_column(record, "prompt", where, (str, list))
    answer = get_column(
        record, "completion" if "completion" in record else "response", where, (str, list)
    )
    parts = ((prompt, "user"), (answer, "assistant"))
    turns = [[new_message(role, part)] if isinstance(part, str) else part for part, role in parts]
    return [read_openai_message(turn, {}, where) for part in turns for turn in part]


_READERS = {
    "alpaca": read_alpaca,
    "sharegpt": read_sharegpt,
    "openai": read_openai,
    "prompt-completion": _prompt_completion,
}


def tools_of(record: dict, source: Source, where: str) -> list[dict] | None:
    """The tool descriptions of a record in OpenAI's form."""
    column = source.columns.get("tools", "tools")
    tools = get_column(record, column, where, (list, str), required=False)
    if isinstance(tools, str):
        tools = _parse(tools, f"{where}: {column}") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where}: {column}: expected a list of tool descriptions")
    return [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]


_MAY_FOLLOW = {
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
    "system": (None,),
}


def check_turns(messages: list[dict], where: str) -> None:
    if not messages:
        raise ValueError(f"{where}: the conversation has no messages")
    before = None
    for number, message in enumerate(messages, 1):
        role = {"developer": "system"}.get(message["role"], message["role"])
        if role not in _MAY_FOLLOW:
            raise ValueError(
                f"{where}: message {number}: unknown role {role!r}: expected {', '.join(_MAY_FOLLOW)}"
            )
        if before not in _MAY_FOLLOW[role]:
            allowed = " or ".join(other or "the beginning" for other in _MAY_FOLLOW[role])
            after = before or "the beginning"
            raise ValueError(
                f"{where}: message {number} ({role}) follows {after}: expected it to follow {allowed}"
            )
        before = role
    if before != "assistant":
        raise ValueError(
            f"{where}: the conversation ends with {before}: expected the assistant to have the last word"
        )
