"""Record formats: from a record to a document, a conversation, or a pair of conversations, in
OpenAI's form.

A new format is one row of FORMATS with its functions: `fits` recognises a record, `prompt` reads
the turns before the answer, `answer` the answer itself (nothing if `prompt` reads it too). `alone`
and `in_pairs` name the columns in error messages: without them a row is not tried for
conversations, or for pairs. Rows are tried in their order, on the first record of a file. The
answers of a pair are the columns chosen and rejected in every format.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from .data_files import SIDES, TAGS, DatasetSpec, parse_json
from .tables import Objective, registered_columns

# -- what all formats share


_KINDS = {dict: "an object", list: "a list", str: "a text", type(None): "null"}


def get_column(record, column: str, where: str, kind=str, required=True):
    """A column of the right type; null and absent are the same. Raises: ValueError with the
    place."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object, got {_kind_of(record)}")
    value = record.get(column)
    if value is None and required:
        raise ValueError(
            f"{where}: the column {column!r} is missing or null; it has {sorted(record)}"
        )
    if value is not None and not isinstance(value, kind):
        expected = _KINDS.get(kind, "a list or a text")
        got = _kind_of(value)
        raise ValueError(f"{where}: the column {column!r}: expected {expected}, got {got}")
    return value


def _kind_of(value) -> str:
    return _KINDS.get(type(value), repr(value))


def _first_turn(turns) -> dict:
    """The first of a list of turns; {} without one."""
    first = next(iter(turns), None) if isinstance(turns, list) else None
    return first if isinstance(first, dict) else {}


def _turns_column(record: dict, spec: DatasetSpec) -> str | None:
    """The column with a list of turns."""
    columns = (spec.columns.get("messages"), "messages", "conversations")
    return next((column for column in columns if column in record), None)


def _message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def _other_keys(turn: dict, role_tag: str, content_tag: str) -> dict:
    """The keys of a turn beside its role and content, without null ones."""
    others = _without((role_tag, content_tag), turn)
    return {key: value for key, value in others.items() if value is not None}


def _without(ignored: Collection[str], message: dict) -> dict:
    """The message without these keys."""
    return {key: value for key, value in message.items() if key not in ignored}


def _no_turns(record, spec: DatasetSpec, where: str) -> list[dict]:
    return []


# tags of dataset_info.json -> roles
_ROLE_TAGS = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}
_ROLE_TAGS["observation_tag"] = "tool"


# -- registered columns


def dataset_columns(spec: DatasetSpec, data_args) -> dict[str, float | None]:
    """Each registered column's value for the records of a dataset, None: the column's default.
    ValueError for a value of another column."""
    columns = dict(sorted(registered_columns().items()))
    if not isinstance(spec.values, dict) or not spec.values.keys() <= columns.keys():
        raise ValueError(
            f"dataset {spec.name!r}: values {spec.values!r:.80}: expected "
            f"registered columns, and there are {list(columns)}: call "
            "register_column before the data is read"
        )
    of_keys = {name: c.of_dataset(spec, data_args) for name, c in columns.items() if c.of_dataset}
    return {**dict.fromkeys(columns), **of_keys, **spec.values}


def column_values(record, of_dataset: dict[str, float | None], where: str) -> dict[str, float]:
    """A record's values of registered columns, else its dataset's. ValueError for anything but
    numbers."""
    values = {}
    for name, value in of_dataset.items():
        if isinstance(record, dict) and record.get(name) is not None:
            value = record[name]
        if value is None:
            continue
        if not isinstance(value, (int, float)):
            raise ValueError(f"{where}: {name!r}: expected a number, got {value!r:.60}")
        values[name] = float(value)
    return values


# -- alpaca


def _is_alpaca(record: dict, spec: DatasetSpec, pairs: bool) -> bool:
    if not pairs and {"prompt", "response"} & spec.columns.keys():
        return True
    if _turns_column(record, spec):
        return False
    return "instruction" in record or isinstance(record.get(spec.columns.get("prompt")), str)


def _alpaca_prompt(record, spec: DatasetSpec, where: str) -> list[dict]:
    columns = spec.columns
    prompt = get_column(record, columns.get("prompt", "instruction"), where)
    query = get_column(record, columns.get("query", "input"), where, required=False)
    history = get_column(record, columns.get("history", "history"), where, list, required=False)
    messages = []
    for turn in history or []:
        if not isinstance(turn, list) or [type(text) for text in turn] != [str, str]:
            raise ValueError(
                f"{where}: history: expected a list of [question, answer] pairs of texts"
            )
        messages += [_message("user", turn[0]), _message("assistant", turn[1])]
    return [*messages, _message("user", "\n".join(filter(None, (prompt, query))))]


def _alpaca_answer(record, spec: DatasetSpec, where: str) -> list[dict]:
    answer = get_column(record, spec.columns.get("response", "output"), where)
    return [_message("assistant", answer)]


# -- sharegpt


def _is_sharegpt(record: dict, spec: DatasetSpec, pairs: bool) -> bool:
    return _turns_column(record, spec) is not None  # openai is tried before it


def _sharegpt(record, spec: DatasetSpec, where: str) -> list[dict]:
    default = "conversations" if "conversations" in record else "messages"
    turns = get_column(record, spec.columns.get("messages", default), where, list)
    return _sharegpt_turns(turns, spec, where)


def _sharegpt_turns(turns: list, spec: DatasetSpec, where: str) -> list[dict]:
    tags = TAGS | spec.tags
    roles = {} if spec.tags else {"user": "user", "assistant": "assistant", "tool": "tool"}
    roles |= {tags[tag]: role for tag, role in _ROLE_TAGS.items()}
    roles[tags["function_tag"]] = "function_call"
    messages = []
    for turn in turns:
        role = get_column(turn, tags["role_tag"], where)
        text = get_column(turn, tags["content_tag"], where)
        if role not in roles:
            raise ValueError(
                f"{where}: unknown {tags['role_tag']} {role!r}: expected one of {', '.join(roles)}"
            )
        message = _message(roles[role], text)
        if roles[role] == "function_call":
            message = _function_call(text, where)
        messages.append(_other_keys(turn, tags["role_tag"], tags["content_tag"]) | message)
    return messages


def _function_call(text: str, where: str) -> dict:
    """{"name", "arguments"} or a list of them as JSON text -> an assistant message with tool
    calls."""
    calls = parse_json(text, f"{where}: function_call")
    if not isinstance(calls, list):
        calls = [calls]
    return {**_message("assistant", ""), "tool_calls": [_tool_call(call, where) for call in calls]}


def _tool_call(call, where: str) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{where}: a tool call: expected an object with name and arguments, got {call!r:.80}"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # OpenAI's own files hold JSON text; chat templates want the object
        arguments = parse_json(arguments or "{}", f"{where}: arguments of a tool call")
    outer = call if "function" in call else {"type": "function"}
    return {**outer, "function": {**function, "arguments": arguments}}


# -- OpenAI


def _is_openai(record: dict, spec: DatasetSpec, pairs: bool) -> bool:
    column = _turns_column(record, spec)
    return column is not None and "role" in _first_turn(record[column]) and not spec.tags


def _openai(record, spec: DatasetSpec, where: str) -> list[dict]:
    turns = get_column(record, spec.columns.get("messages", "messages"), where, list)
    return _messages(turns, "", spec.tags, where)


def _messages(value: str | dict | list, role: str, tags: dict, where: str) -> list[dict]:
    """A text of `role`, a message of OpenAI's or a list of them, as messages."""
    if isinstance(value, str):
        return [_message(role, value)]
    if isinstance(value, dict):
        value = [value]
    return [_openai_message(turn, tags, where) for turn in value]


def _openai_message(turn, tags: dict, where: str) -> dict:
    role = get_column(turn, tags.get("role_tag", "role"), where)
    content_tag = tags.get("content_tag", "content")
    content = get_column(turn, content_tag, where, (str, list), required=False)
    blocks = _read_blocks(content, where) if isinstance(content, list) else {}
    content = blocks.pop("content", content)
    roles = {tags[tag]: name for tag, name in _ROLE_TAGS.items() if tag in tags}
    message = _other_keys(turn, tags.get("role_tag", "role"), content_tag)
    message |= _message(roles.get(role, role), content or "") | blocks
    if calls := get_column(message, "tool_calls", where, list, required=False):
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    elif content is None:
        raise ValueError(f"{where}: a message of {role!r} has neither content nor tool_calls")
    return message


def _read_blocks(blocks: list, where: str) -> dict:
    """{"content"}, with "reasoning_content" and "tool_calls" if there are any, of a list of
    OpenAI's text blocks, or LLaMA-Factory's {"type": text, reasoning or tool_call, "value"}."""
    texts: dict[str, list[str]] = {"text": [], "reasoning": [], "tool_call": []}
    for block in blocks:
        kind = block.get("type", "text") if isinstance(block, dict) else None
        text = block.get("value", block.get("text")) if kind in texts else None
        if not isinstance(text, str):
            raise ValueError(
                f"{where}: content: expected a text or a list of blocks of {', '.join(texts)}; "
                "only text can be trained on"
            )
        texts[kind].append(text)
    message: dict = {"content": "".join(texts["text"])}
    if texts["reasoning"]:
        message["reasoning_content"] = "".join(texts["reasoning"])
    if texts["tool_call"]:
        message["tool_calls"] = [parse_json(text, where) for text in texts["tool_call"]]
    return message


# -- prompt and completion


def _has_prompt_and_completion(record: dict, spec: DatasetSpec, pairs: bool) -> bool:
    return "prompt" in record and ("completion" in record or "response" in record)


def _has_prompt(record: dict, spec: DatasetSpec, pairs: bool) -> bool:
    return record.get(spec.columns.get("prompt", "prompt")) is not None


def _prompt(record, spec: DatasetSpec, where: str) -> list[dict]:
    prompt = get_column(record, spec.columns.get("prompt", "prompt"), where, (str, list))
    return _messages(prompt, "user", {}, where)


def _completion(record, spec: DatasetSpec, where: str) -> list[dict]:
    column = "completion" if "completion" in record else "response"
    return _messages(get_column(record, column, where, (str, list)), "assistant", {}, where)


def is_plain(record, form: str) -> bool:
    """True if prompt and completion are texts, trained without a chat template as by TRL."""
    columns = ("prompt", "completion")
    return form == "prompt-completion" and all(isinstance(record.get(c), str) for c in columns)


# -- pairs of whole conversations


def _has_whole_conversations(record: dict, spec: DatasetSpec, pairs: bool) -> bool:
    """True if an answer begins with the prompt: its first turn is not the assistant's."""
    first = _first_turn(record[spec.columns.get("chosen", "chosen")])
    return first.get("role", first.get("from")) in ("system", "developer", "user", "human")


# -- the table


@dataclass(frozen=True)
class Format:
    """Layout of conversations in a record. fits: (record, spec, True for pairs) -> bool. prompt,
    answer: (record, spec, place) -> messages, or ValueError with the place. alone: the columns of
    a conversation; in_pairs: those beside chosen and rejected; None: not of this kind."""

    fits: Callable
    prompt: Callable
    answer: Callable = _no_turns
    alone: str | None = None
    in_pairs: str | None = None


FORMATS = {
    "conversations": Format(
        _has_whole_conversations, _no_turns, in_pairs="the prompt in both answers"
    ),
    "alpaca": Format(
        _is_alpaca,
        _alpaca_prompt,
        _alpaca_answer,
        "instruction, input, output",
        "instruction, input",
    ),
    "openai": Format(_is_openai, _openai, alone="messages", in_pairs="messages"),
    "sharegpt": Format(_is_sharegpt, _sharegpt, alone="conversations", in_pairs="conversations"),
    "prompt-completion": Format(
        _has_prompt_and_completion, _prompt, _completion, alone="prompt, completion"
    ),
    "prompt": Format(_has_prompt, _prompt, in_pairs="prompt"),
}


def detect_format(record, spec: DatasetSpec, objective: Objective, where: str) -> str:
    """The format of a file, from its first record: "text" for documents, else a name in FORMATS.

    Raises: ValueError with the place for a record that the objective cannot use.
    """
    pairs = objective.has_pairs
    is_object = isinstance(record, dict)
    got = f"got the columns {sorted(record)}" if is_object else f"got {_kind_of(record)}"
    expected = f"stage {objective.stage} expects"
    if objective.joins_documents:
        column = _text_column(spec)
        if isinstance(record, str) or (is_object and column in record):
            return "text"
        raise ValueError(
            f"{where}: {expected} the column {column!r} or plain text, {got}: set "
            "columns: {prompt: <name>} in dataset_info.json, or stage: sft for conversations"
        )
    columns = {name: row.in_pairs if pairs else row.alone for name, row in FORMATS.items()}
    usable = [name for name in FORMATS if columns[name]]
    if pairs:
        expected += " pairs: the columns chosen and rejected, and"
    expected += " " + ", ".join(f"{name} ({columns[name]})" for name in usable)
    other_names = "other names: columns in dataset_info.json"
    has_pair = is_object and all(spec.columns.get(side, side) in record for side in SIDES)
    if pairs and not has_pair:
        raise ValueError(f"{where}: {expected}, {got}; {other_names}")
    if not is_object:
        raise ValueError(f"{where}: {expected}, {got}; plain text is for stage: pt")
    if has_pair and not pairs and not _holds_an_answer(record, spec):
        raise ValueError(f"{where}: chosen and rejected answers are for stage dpo: {expected}")
    if spec.formatting:
        return spec.formatting
    for name in usable:
        if FORMATS[name].fits(record, spec, pairs):
            return name
    if pairs:
        raise ValueError(f"{where}: {expected}, got texts without a prompt in {sorted(record)}")
    hint = "a text column is for stage: pt" if "text" in record else other_names
    raise ValueError(f"{where}: {expected}, {got}; {hint}")


def _holds_an_answer(record: dict, spec: DatasetSpec) -> bool:
    """True if a record has an answer beside chosen and rejected ones."""
    if {spec.columns.get("response", "output"), "completion", "response"} & record.keys():
        return True
    tags = TAGS | spec.tags
    turns = record.get(_turns_column(record, spec))
    last = _first_turn(turns[::-1]) if isinstance(turns, list) else {}
    role = last.get(tags["role_tag"], last.get("role"))
    return role in (tags["assistant_tag"], "gpt", "assistant")


# -- documents


def _text_column(spec: DatasetSpec) -> str:
    return spec.columns.get("text") or spec.columns.get("prompt") or "text"


def document(record, spec: DatasetSpec, where: str) -> str:
    """The text of a record (prompt, and query below it where dataset_info.json declares both)."""
    if isinstance(record, str):
        return record
    parts = [get_column(record, _text_column(spec), where)]
    if "query" in spec.columns:
        parts.append(get_column(record, spec.columns["query"], where, required=False))
    return "\n".join(filter(None, parts))


# -- conversations, alone or in pairs


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's form: an optional system message, then user and assistant in turn,
    ending with the assistant; tool messages follow an assistant's tool calls.

    weights: number of a message -> True if it is trained, as declared by the record. options: of
    the chat template. is_plain: a prompt and its completion, without a chat template.
    """

    messages: list[dict]
    tools: list[dict] | None = None
    weights: dict[int, bool] = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    is_plain: bool = False


def conversations(
    record,
    spec: DatasetSpec,
    form: str,
    pairs: bool,
    default_system: str | None,
    where: str,
    ignored: Collection[str] = (),
) -> list[Conversation]:
    """The conversation of a record; of pairs chosen and rejected, equal but for the last message.

    form: a name in FORMATS. default_system: for a record without a system message. ignored: keys of
    messages to leave out.
    Raises: ValueError with the place for an unusable record.
    """
    row = FORMATS[form]
    prompt = row.prompt(record, spec, where)
    answers = {}
    for side in SIDES if pairs else ():
        answers[f"{where}: {side}"] = _pair_answer(record, side, spec, form, where)
    if not pairs:
        answers[where] = row.answer(record, spec, where)
    column = spec.columns.get("system", "system")
    system = get_column(record, column, where, required=False) or default_system
    read = []
    tools = _tools(record, spec, where)
    options = _template_options(record, where)
    plain = not pairs and is_plain(record, form)
    if plain and (system or tools or options):
        raise ValueError(
            f"{where}: prompt and completion are texts, which are trained without a chat template: "
            "there is no place for a system message, tools or chat_template_kwargs: write messages"
        )
    for place, answer in answers.items():
        messages = [_without(ignored, message) for message in [*prompt, *answer]]
        if system and messages and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, _message("system", system))
        _check_turns(messages, place)
        weights = _take_weights(messages, place)
        if pairs and not weights.get(len(messages) - 1, True):
            raise ValueError(f"{place}: weight 0 of an answer: expected 1, for two are compared")
        read.append(Conversation(messages, tools, weights, options, plain))
    if pairs:
        chosen, rejected = (conversation.messages for conversation in read)
        _check_shared_prompt(chosen, rejected, where)
        if form == "conversations":
            _check_prompt_column(record, spec, chosen[:-1], where, ignored)
    return read


# weights of messages under the names of OpenAI, LLaMA-Factory and axolotl (two)
_WEIGHT_KEYS = ("weight", "loss_weight", "train", "training")


def _take_weights(messages: list[dict], where: str) -> dict[int, bool]:
    """Remove the weights of messages -> number of a message: True if it is trained."""
    weights = {}
    for number, message in enumerate(messages):
        given = {key: message.pop(key) for key in _WEIGHT_KEYS if key in message}
        if any(value not in (0, 1) for value in given.values()):
            raise ValueError(
                f"{where}: message {number + 1} has {given!r:.80}: expected 0 or 1 (false or true),"
                " since a message is trained or is not"
            )
        values = set(map(bool, given.values()))
        if len(values) > 1:
            raise ValueError(f"{where}: message {number + 1} has {given}: expected them to agree")
        if values:
            weights[number] = values.pop()
    return weights


def _template_options(record, where: str) -> dict:
    """Variables of the chat template in a record, under TRL's name, without null ones."""
    column = "chat_template_kwargs"
    options = get_column(record, column, where, dict, required=False) or {}
    return {key: value for key, value in options.items() if value is not None}


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
        role = "system" if message["role"] == "developer" else message["role"]
        if role not in _MAY_FOLLOW:
            known = ", ".join(_MAY_FOLLOW)
            raise ValueError(f"{where}: message {number}: unknown role {role!r}: expected {known}")
        if before not in _MAY_FOLLOW[role]:
            allowed = " or ".join(other or "the beginning" for other in _MAY_FOLLOW[role])
            raise ValueError(
                f"{where}: message {number} ({role}) follows {before or 'the beginning'}: expected "
                f"it to follow {allowed}"
            )
        before = role
    if before != "assistant":
        raise ValueError(
            f"{where}: the conversation ends with {before}: expected the assistant to have the "
            "last word"
        )


def _tools(record, spec: DatasetSpec, where: str) -> list[dict] | None:
    """The tool descriptions of a record in OpenAI's form."""
    column = spec.columns.get("tools", "tools")
    tools = get_column(record, column, where, (list, str), required=False)
    if isinstance(tools, str):
        tools = parse_json(tools, f"{where}: {column}") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where}: {column}: expected a list of tool descriptions")
    return [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]


# -- the answers of a pair


def _pair_answer(record, side: str, spec: DatasetSpec, form: str, where: str) -> list[dict]:
    """A text, a message or a list of messages, as messages."""
    column = spec.columns.get(side, side)
    answer = get_column(record, column, where, (str, dict, list))
    turns = [answer] if isinstance(answer, dict) else answer
    first = _first_turn(turns)
    tag = spec.tags.get("role_tag", "from")
    has_tag = form == "sharegpt" or (tag in first and "role" not in first)
    if has_tag and not isinstance(answer, str):
        return _sharegpt_turns(turns, spec, f"{where}: {column}")
    return _messages(turns, "assistant", spec.tags, f"{where}: {column}")


def _check_shared_prompt(chosen: list[dict], rejected: list[dict], where: str) -> None:
    if chosen[:-1] == rejected[:-1]:
        return
    both = enumerate(zip(chosen, rejected, strict=False), 1)
    shorter = min(len(chosen), len(rejected))
    number = next((n for n, (one, other) in both if one != other), shorter + 1)
    raise ValueError(
        f"{where}: chosen and rejected differ from message {number} on, and have {len(chosen)} and "
        f"{len(rejected)} messages: expected one prompt, and one answer of each, the last message"
    )


def _check_prompt_column(
    record, spec: DatasetSpec, before: list[dict], where: str, ignored: Collection[str]
) -> None:
    """ValueError with the place for a column with another prompt than the pair's."""
    column = spec.columns.get("prompt", "prompt")
    prompt = get_column(record, column, where, (str, list), required=False)
    if isinstance(prompt, list):
        messages = [_without(ignored, m) for m in _messages(prompt, "user", {}, where)]
        _take_weights(messages, where)
        same = messages in (before, [m for m in before if m["role"] != "system"])
    else:
        same = not prompt or any(prompt.strip() == m["content"].strip() for m in before)
    if not same:
        raise ValueError(
            f"{where}: chosen and rejected begin with a prompt of their own, which is not that of "
            f"the column {column!r}: expected the answers alone, or the same prompt"
        )
