"""Record formats: they turn a record into a document, a conversation or a pair of conversations,
with messages in OpenAI's form.

A new format is one row of FORMATS with its functions: `fits` recognises a record, `prompt` reads
the turns before the answer, `answer` reads the answer (nothing, if `prompt` reads it too). `alone`
and `in_pairs` name the columns in error messages; a row without `alone` is not tried for
conversations, one without `in_pairs` not for pairs. Rows are tried in order on a file's first
usable record. In every format a pair's answers are in the columns chosen and rejected, or in those
that dataset_info.json names instead.
"""

import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .args_values import as_list
from .data_files import SIDES, TAGS, DatasetSpec, get_column, parse_json, read_records, resolve
from .errors import Keys, expect
from .inputs import BLOCKS, MARK, TEXT, Media
from .tables import COLUMNS, TOKENS, Objective, registered_columns

_SMALL_BYTES = 1 << 26  # larger files are not opened ahead: a list of records is read whole

Message: TypeAlias = dict[str, Any]  # a chat message in OpenAI's form

# -- registered columns, and labels

_LABELS = ("label", "kto_tag")  # TRL's name and LLaMA-Factory's


def dataset_columns(spec: DatasetSpec, data_args: Keys) -> dict[str, float | str | None]:
    """{column: value} for the records of a dataset, for each column of numbers that a record may
    have: registered columns, and this package's columns that keys of data_args set. spec: the
    dataset's files and declaration.

    The value may be a number, for records that do not give their own. It may be a text, the name of
    the record field with the value. None means the column's default. Raises ValueError if the
    dataset declares a value for a column that is not registered."""
    columns = dict(sorted(registered_columns().items()))
    expect(
        spec.values.keys() <= columns.keys(),
        f"dataset {spec.name!r}: values {spec.values!r:.80}: expected "
        f"registered columns, and there are {list(columns)}: call "
        "register_column before the data is read",
    )
    of_keys = {name: c.of_dataset(spec, data_args) for name, c in COLUMNS.items() if c.of_dataset}
    of_keys |= {name: getattr(data_args, name) for name, c in COLUMNS.items() if c.of_key}
    # an unset column would change the data's identity in checkpoints
    of_keys = {name: x for name, x in of_keys.items() if name in columns or x is not None}
    return {**dict.fromkeys(columns), **of_keys, **spec.values}


def column_values(
    record: Any, of_dataset: dict[str, float | str | None], where: str
) -> dict[str, float]:
    """{column: value} for one record: from the record's own field or, if it has none, from its
    dataset. Columns left to their default are absent. of_dataset: the result of dataset_columns().
    where: the record's place, for messages. Raises ValueError for a value that is no finite number,
    for a missing field that the dataset names, and for a negative or boolean pair weight."""
    given = {}
    if not isinstance(record, str):
        given = {
            name: get_column(record, name, where, (int, float), required=False)
            for name in of_dataset
            if COLUMNS[name].is_registered
        }
    values = of_dataset | _without((), given)
    for name, field_ in of_dataset.items():
        if isinstance(field_, str):
            values[name] = get_column(record, field_, where, (int, float))
    values = _without((), values)
    for name, value in values.items():
        _check_finite(name, value, where)
    weight = values.get("pair_weight", 1)
    expect(
        weight >= 0 and not isinstance(weight, bool),
        f"{where}: {of_dataset.get('pair_weight')!r} is {weight}: expected a weight of 0 or more",
    )
    return {name: float(value) for name, value in values.items()}


def refuse_margin(record: Any, where: str) -> None:
    """Raise ValueError if a record has a value in the column "margin", as TRL's pairs may. Called
    for a stage with a value head if no key says which column has the margin."""
    has_margin = isinstance(record, dict) and record.get("margin") is not None
    expect(
        not has_margin,
        f"{where}: the column 'margin' would be ignored; TRL's RewardTrainer subtracts it from the "
        "difference of the scores: set pair_margin: margin, or remove the column",
    )


def label_of(record: Any, spec: DatasetSpec, where: str, is_binary: bool) -> float:
    """The label of a record's answer as a number: 1 for true, 0 for false, and a number as it is.
    spec: the dataset's declaration, which may name the label's column. where: the record's place,
    for messages. is_binary: True if the label must be 0 or 1. Raises ValueError for a label that is
    missing, not allowed or no finite number."""
    column = spec.columns.get("kto_tag")
    if column is None:
        given = (name for name in _LABELS if isinstance(record, dict) and name in record)
        column = next(given, _LABELS[0])
    label = get_column(record, column, where, (int, float))
    _check_finite(column, label, where)
    expect(
        not is_binary or label in (0, 1),
        f"{where}: {column!r} is {label}: expected true or 1 for a desirable answer, or false or 0",
    )
    return float(label)


def _check_finite(name: str, value: float, where: str) -> None:
    # an int may be too large for a float
    is_finite = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    expect(is_finite, f"{where}: {name!r} is {value!s:.40}: expected a finite number")


# -- turns


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _without(ignored: Collection[str], message: Message) -> dict[str, Any]:
    """The message without null values and without the keys in `ignored`; a copy."""
    return {k: value for k, value in message.items() if k not in ignored and value is not None}


def _first_turn(turns: Any) -> dict[str, Any]:
    """The first turn of a list of turns. {} if the list is empty, if its first element is no object
    (dict), or if `turns` is no list."""
    match turns:
        case [dict() as first, *_]:
            return first
    return {}


def _turns_column(record: dict[str, Any], spec: DatasetSpec) -> str:
    """The name of the record's column with the list of turns: the one that the dataset declares,
    otherwise the first of "messages" and "conversations" that the record has, or "messages" if it
    has neither."""
    usual = ("messages", "conversations")
    given = (column for column in usual if record.get(column) is not None)
    return spec.columns.get("messages") or next(given, usual[0])


# the tags of dataset_info.json -> roles
_ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "function_call",
}


def _messages(
    record: Any, column: str, role: str, spec: DatasetSpec, where: str, kind: Any = (str, list)
) -> list[Message]:
    """Read the messages in one column of a record. A text becomes one message of `role`; otherwise
    the column has a turn or a list of turns. kind: the types that the column may have. spec: the
    dataset's declaration.

    Turns have OpenAI's field names if the first one has "role", otherwise sharegpt's. Names in
    dataset_info.json come before both. Raises ValueError that names `where`, the record's place."""
    value = get_column(record, column, where, kind)
    if isinstance(value, str):
        return [_message(role, value)]
    if isinstance(value, dict):
        value = [value]
    tags = TAGS
    if "role" in _first_turn(value):
        tags = TAGS | {"role_tag": "role", "content_tag": "content"}
    tags = tags | spec.tags
    roles = {tags[tag]: name for tag, name in _ROLES.items()}
    return [_read_turn(turn, tags, roles, where) for turn in value]


def _read_turn(turn: Any, tags: dict[str, Any], roles: dict[str, Any], where: str) -> Message:
    role = get_column(turn, tags["role_tag"], where)
    role = roles.get(role, role)
    content = get_column(turn, tags["content_tag"], where, (str, list), required=False)
    message = _without((tags["role_tag"], tags["content_tag"]), turn)
    message |= _message(role, content or "")
    if role == "function_call":
        message["role"] = "assistant"
        content = [{"type": "tool_call", "value": content}]
    if isinstance(content, list):
        message |= _read_blocks(content, where)
    get_column(message, "reasoning_content", where, required=False)
    if calls := get_column(message, "tool_calls", where, list, required=False):
        message["tool_calls"] = [_read_call(call, where) for call in calls]
    elif content is None:
        raise ValueError(f"{where}: a message of {role!r} has neither content nor tool_calls")
    return message


_OTHER_BLOCK = (
    "content: expected a text or a list of blocks of text, image, video, audio, reasoning and "
    "tool_call; only these can be trained on"
)


def _read_blocks(blocks: list[Any], where: str) -> Message:
    """Read a message from its list of content blocks (OpenAI's, or LLaMA-Factory's with "value") ->
    a dict with its content, its media and, if there are any, its thinking and tool calls. In the
    content, MARK stands for an image, video or audio. where: the record's place, for messages.
    Raises ValueError for blocks of other types, and for a tool call that is not JSON."""
    message: Message = {"content": "", "media": []}
    for block in blocks:
        block = _without((), block) if isinstance(block, dict) else block
        match block:
            case {"type": "text", "text": str(text)} | {"type": "text", "value": str(text)}:
                message["content"] += text
            case {"type": "reasoning", "value": str(text)}:
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            case {"type": "tool_call", "value": str(text)}:
                calls = as_list(parse_json(text, f"{where}: a tool call"))
                message["tool_calls"] = message.get("tool_calls", []) + calls
            case {"type": kind} if kind in BLOCKS:
                message["content"] += MARK
                message["media"].append(block)
            case _:
                raise ValueError(f"{where}: {_OTHER_BLOCK}; got {block!r:.80}")
    return message


def _read_call(call: Any, where: str) -> dict[str, Any]:
    call = _in_frame(call, f"{where}: a tool call")
    function = call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # OpenAI's files have JSON text here, and chat templates read an object
        arguments = parse_json(arguments or "{}", f"{where}: arguments of a tool call")
    return {**call, "function": {**function, "arguments": arguments}}


def _in_frame(value: Any, where: str) -> dict[str, Any]:
    """Bring the description of a tool, or a tool call, into OpenAI's form {"function":
    {"name": ..., ...}, ...}. where: its place, for messages. Raises ValueError if it has no name.
    """
    match value:
        case {"function": {"name": str()}}:
            return value
        case {"name": str()}:
            return {"type": "function", "function": value}
    raise ValueError(f"{where}: expected an object with a name, got {value!r:.80}")


# -- the formats


def _is_alpaca(record: dict[str, Any], spec: DatasetSpec, pairs: bool) -> bool:
    is_declared = not pairs and not spec.columns.keys().isdisjoint(("prompt", "response"))
    prompt = record.get(spec.columns.get("prompt"))
    has_prompt = "instruction" in record or isinstance(prompt, str)
    return is_declared or (has_prompt and not _is_sharegpt(record, spec, pairs))


def _alpaca_prompt(record: Any, spec: DatasetSpec, where: str) -> list[Message]:
    columns = spec.columns
    prompt = get_column(record, columns.get("prompt", "instruction"), where)
    query = get_column(record, columns.get("query", "input"), where, required=False)
    history = get_column(record, columns.get("history", "history"), where, list, required=False)
    messages = []
    for turn in history or []:
        match turn:
            case [str(question), str(answer)]:
                messages += [_message("user", question), _message("assistant", answer)]
            case _:
                raise ValueError(
                    f"{where}: history: expected a list of [question, answer] pairs of texts"
                )
    return [*messages, _message("user", "\n".join(filter(None, (prompt, query))))]


def _alpaca_answer(record: Any, spec: DatasetSpec, where: str) -> list[Message]:
    column = spec.columns.get("response", "output")
    return _messages(record, column, "assistant", spec, where, str)


def _is_sharegpt(record: dict[str, Any], spec: DatasetSpec, pairs: bool) -> bool:
    return record.get(_turns_column(record, spec)) is not None  # openai is tried before it


def _is_openai(record: dict[str, Any], spec: DatasetSpec, pairs: bool) -> bool:
    return "role" in _first_turn(record.get(_turns_column(record, spec))) and not spec.tags


def _turns(record: Any, spec: DatasetSpec, where: str) -> list[Message]:
    return _messages(record, _turns_column(record, spec), "", spec, where, list)


def _no_turns(record: Any, spec: DatasetSpec, where: str) -> list[Message]:
    return []


def _has_prompt(record: dict[str, Any], spec: DatasetSpec, pairs: bool) -> bool:
    return record.get(spec.columns.get("prompt", "prompt")) is not None


def _prompt(record: Any, spec: DatasetSpec, where: str) -> list[Message]:
    return _messages(record, spec.columns.get("prompt", "prompt"), "user", spec, where)


_ANSWERS = {"completion", "response"}


def _completion(record: Any, spec: DatasetSpec, where: str) -> list[Message]:
    column = "completion" if "completion" in record else "response"
    return _messages(record, column, "assistant", spec, where)


def is_plain(record: Any, form: str) -> bool:
    """True if a record's prompt and completion are texts and `form`, its format, is
    prompt-completion: they are then trained without a chat template, as in TRL."""
    columns = ("prompt", "completion")
    return form == "prompt-completion" and all(isinstance(record.get(c), str) for c in columns)


def _has_whole_conversations(record: dict[str, Any], spec: DatasetSpec, pairs: bool) -> bool:
    """True if the answers of a preference pair are whole conversations that contain the prompt.
    This is seen from the first turn of "chosen": its "role" or "from" is the user, system or
    developer. spec: the dataset's declaration, which may rename the column. pairs: not used."""
    first = _first_turn(record[spec.columns.get("chosen", "chosen")])
    return first.get("role", first.get("from")) in ("system", "developer", "user", "human")


# -- the table


@dataclass(frozen=True)
class Format:
    """A record format, such as alpaca or sharegpt: how to recognise it, and how to read messages
    from it. spec: the dataset's declaration. where: the record's place, "file:line".

    fits(record, spec, pairs): True if the record has this format; pairs: True for preference pairs.
    prompt(record, spec, where), answer(record, spec, where): the messages of the prompt, and of the
    answer. If prompt() returns all messages, answer() returns []. ValueError that names `where` for
    a wrong record.
    alone: for error messages, the columns of a record with one conversation; None: the format has
    no such records.
    in_pairs: for error messages, the columns of a pair besides chosen and rejected; None: the
    format has no pairs."""

    fits: Callable[..., Any]
    prompt: Callable[..., Any]
    answer: Callable[..., Any] = _no_turns
    alone: str | None = None
    in_pairs: str | None = None


FORMATS = {
    "text": Format(lambda record, spec, pairs: _text_column(spec) in record, _no_turns),
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
    "openai": Format(_is_openai, _turns, alone="messages", in_pairs="messages"),
    "sharegpt": Format(_is_sharegpt, _turns, alone="conversations", in_pairs="conversations"),
    "prompt-completion": Format(
        lambda record, *_: "prompt" in record and not _ANSWERS.isdisjoint(record),
        _prompt,
        _completion,
        alone="prompt, completion",
    ),
    "prompt": Format(_has_prompt, _prompt, in_pairs="prompt"),
}


def detect_format(record: Any, spec: DatasetSpec, objective: Objective, where: str) -> str:
    """The record format of a file, decided by one of its records: "tokens" if the objective reads
    token ids, otherwise a name in FORMATS. A format that the dataset declares in `spec` is taken if
    the objective (sft, dpo and the like) can use it. Otherwise it is the first in FORMATS that the
    record fits and that the objective can use. Raises ValueError that names `where`, the record's
    place, if the objective cannot use the record."""
    pairs = objective.has_pairs
    if isinstance(record, str):
        record = {_text_column(spec): record}
    get_column(record, "", where, object, required=False)  # refuses anything but an object
    if objective.records == TOKENS:
        return TOKENS
    columns = {name: row.in_pairs if pairs else row.alone for name, row in FORMATS.items()}
    if objective.joins_documents:
        columns = {"text": f"the column {_text_column(spec)!r}, or plain text"}
    usable = [name for name, names in columns.items() if names]
    needed = {spec.columns.get(side, side) for side in SIDES if pairs}
    if needed <= record.keys():
        if spec.formatting in usable:
            return spec.formatting
        for name in usable:
            if FORMATS[name].fits(record, spec, pairs):
                return name
    expected = ", ".join(f"{name} ({columns[name]})" for name in usable)
    raise ValueError(
        f"{where}: stage {objective.stage} expects {objective.unit}s: {expected}; got the columns "
        f"{sorted(record)}: texts are for stage: pt, conversations for sft, conversations with the "
        "columns chosen and rejected for dpo; other names: columns in dataset_info.json"
    )


def check_first(data_args: Keys, objective: Objective) -> None:
    """Find the datasets of a run, and check the first record of each file below 64 MiB unless bad
    records are skipped. torch is not needed. Raises ValueError as resolve() and read_records() do,
    and for a first record that cannot be read in its format."""
    entries = [*(data_args.dataset or ()), *(data_args.eval_dataset or ())]
    skips = data_args.on_bad_record == "skip"
    for spec in resolve(entries, data_args, objective):
        for file, kind in spec.files.items():
            if os.path.getsize(file) < _SMALL_BYTES:
                first = next(read_records(file, kind, skips), None)
                if first and not skips:
                    _check_columns(*first, spec, objective)


def _check_columns(where: str, record: Any, spec: DatasetSpec, objective: Objective) -> None:
    form = detect_format(record, spec, objective, where)
    if form == TOKENS:
        return
    row = FORMATS[form]
    if objective.joins_documents:
        document(record, spec, where)
        return
    row.prompt(record, spec, where)
    if not objective.has_pairs:
        row.answer(record, spec, where)
    if objective.has_labels:
        label_of(record, spec, where, objective.has_binary_labels)


# -- documents


def _text_column(spec: DatasetSpec) -> str:
    return spec.columns.get("text") or spec.columns.get("prompt") or "text"


def document(record: Any, spec: DatasetSpec, where: str) -> str:
    """The text of a record for training on plain text (stage pt). It is in the column that the
    dataset declares as text or as prompt, otherwise in "text". If dataset_info.json declares a
    query column, its text follows on a new line. A record that is itself a text is returned as it
    is. Raises ValueError for an unusable record, such as one without the column, or with pictures.
    """
    if isinstance(record, str):
        return record
    get_column(record, "", where, object, required=False)  # refuses anything but an object
    expect(
        not TEXT.values_of(record, spec.columns, where),
        f"{where}: the record has pictures, which stage pt does not train: write conversations for "
        "stage sft",
    )
    parts = [get_column(record, _text_column(spec), where)]
    if "query" in spec.columns:
        parts.append(get_column(record, spec.columns["query"], where, required=False))
    return "\n".join(filter(None, parts))


# -- conversations, alone or in pairs


@dataclass(frozen=True)
class Conversation:
    """A conversation in OpenAI's form: an optional system or developer message, then user and
    assistant in turn, ending with the assistant. One or several tool messages may follow an
    assistant's. A prompt for generation may end and alternate in other ways.

    tools: descriptions of the tools; None: no tools. weights: message index -> True if the message
    is trained, False if not, for messages of which the record says so. options: variables of the
    chat template. is_plain: True for a prompt and completion without a chat template. media: the
    images and other inputs of all messages; in a message a text such as Media.block stands for
    each."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    weights: dict[int, bool] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    is_plain: bool = False
    media: tuple[Any, ...] = ()


def conversations(
    record: Any,
    spec: DatasetSpec,
    form: str,
    pairs: bool,
    default_system: str | None,
    where: str,
    ignored: Collection[str] = (),
    media: Media = TEXT,
    labelled: bool = False,
) -> list[Conversation]:
    """Read the conversation in a record. The result has one, or two for a preference pair: chosen
    and rejected, with the same messages before the last one.

    spec: the dataset's declaration. form: a name in FORMATS. pairs: True for a stage that trains
    preference pairs. default_system: system message of a record without one. where: the record's
    place. ignored: message keys to drop. media: reads the model's images and other inputs than
    text. labelled: True if an answer has a label, which label_of() reads. Raises ValueError that
    names `where` for an unusable record."""
    row = FORMATS[form]
    options = _template_options(record, where)
    _refuse_other_kinds(record, pairs or labelled, where)
    of_columns = media.values_of(record, spec.columns, where)
    column = spec.columns.get("system", "system")
    system = get_column(record, column, where, required=False) or default_system
    tools = _tools(record, spec, where)
    plain = not pairs and is_plain(record, form)
    expect(
        not (plain and any([system, tools, options, of_columns])),
        f"{where}: prompt and completion are texts, which are trained without a chat template: "
        "there is no place for a system message or default_system, pictures, tools or "
        "chat_template_kwargs: write messages",
    )
    prompt = row.prompt(record, spec, where)
    answers = {}
    for side in SIDES if pairs else ():
        place = f"{where}: {side}"
        column = spec.columns.get(side, side)
        answers[place] = _messages(record, column, "assistant", spec, place, (str, dict, list))
    if not pairs:
        answers[where] = row.answer(record, spec, where)
    may_lead = form not in ("alpaca", "sharegpt") and not {"images", "videos"} & {*spec.columns}
    read = []
    for place, answer in answers.items():
        messages = [_without(ignored, message) for message in [*prompt, *answer]]
        if system and messages and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, _message("system", system))
        _check_turns(messages, place)
        weights = _take_weights(messages, place)
        expect(
            not pairs or weights.get(len(messages) - 1, True),
            f"{place}: weight 0 of an answer: expected 1, for two are compared",
        )
        taken = media.take(messages, of_columns, may_lead, place)
        read.append(Conversation(messages, tools, weights, options, plain, taken))
    if pairs:
        expect(
            read[0].media == read[1].media,
            f"{where}: chosen and rejected have different pictures: expected one prompt",
        )
        chosen, rejected = (conversation.messages for conversation in read)
        prompt = []
        if form == "conversations" and _has_prompt(record, spec, pairs):
            prompt = _prompt(record, spec, where)
            media.take(prompt, of_columns, may_lead, where)
        _check_prompts(chosen, rejected, prompt, where)
    return read


def prompt_and_answer(
    record: Any,
    spec: DatasetSpec,
    form: str,
    default_system: str | None,
    where: str,
    ignored: Collection[str] = (),
    media: Media = TEXT,
) -> tuple[Conversation, str | None]:
    """Split a record for generation -> (conversation before its last answer, text of that answer).
    The text is None if the record does not end with an answer. spec: the dataset's declaration.
    form: a name in FORMATS. default_system: system message of a record without one. ignored:
    message keys to drop. media: reads the model's images and other inputs. Raises ValueError that
    names `where`, the record's place, for an unusable record, or one without a message before its
    answer."""
    row = FORMATS[form]
    turns = [*row.prompt(record, spec, where), *row.answer(record, spec, where)]
    messages = [_without(ignored, turn) for turn in turns]
    _take_weights(messages, where)
    answer = None
    if messages and messages[-1]["role"] == "assistant":
        answer = messages.pop()["content"]
    expect(messages, f"{where}: it has no message to answer: give the user's message")
    system = get_column(record, "system", where, required=False) or default_system
    if system and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, _message("system", system))
    of_columns = media.values_of(record, spec.columns, where)
    taken = media.take(messages, of_columns, True, where)
    tools = _tools(record, spec, where)
    options = _template_options(record, where)
    plain = is_plain(record, form)
    return Conversation(messages, tools, {}, options, plain, taken), answer


def _template_options(record: Any, where: str) -> dict[str, Any]:
    """The variables for the chat template in a record's field chat_template_kwargs, without nulls;
    {} if there are none. where: the record's place, for messages."""
    options = get_column(record, "chat_template_kwargs", where, dict, required=False)
    return _without((), options or {})


def _refuse_other_kinds(record: dict[str, Any], has_opinions: bool, where: str) -> None:
    """Raise ValueError for a record whose label says if its answer is good, in a stage that reads
    neither labels nor pairs: such a stage would train bad answers too. A label is true or false in
    the column "label", or true, false or a number in "kto_tag". has_opinions: True for a stage that
    reads labels or pairs; nothing is refused then."""
    for column in () if has_opinions else _LABELS:
        # under TRL's name a number may be a class
        kinds = bool if column == "label" else (bool, int, float)
        expect(
            not isinstance(record.get(column), kinds),
            f"{where}: the column {column!r} says whether an answer is good, but bad ones would "
            "be trained too: set stage: kto, or keep only good records, without the column",
        )


# the weight keys of OpenAI, LLaMA-Factory and axolotl (two)
_WEIGHT_KEYS = ("weight", "loss_weight", "train", "training")


def _take_weights(messages: list[Message], where: str) -> dict[int, bool]:
    """Find out which messages are trained, from keys such as "weight" or "train", and remove these
    keys from the messages, in place -> {message index: True if it is trained} for messages with
    such a key. Raises ValueError for values other than 0 and 1 (or false and true), or if two such
    keys of a message differ. where: the record's place, for messages."""
    weights = {}
    for number, message in enumerate(messages):
        given = {key: message.pop(key) for key in _WEIGHT_KEYS if key in message}
        for value in given.values():
            if value not in (0, 1) or weights.setdefault(number, bool(value)) != value:
                raise ValueError(
                    f"{where}: message {number + 1} has {given!r:.80}: expected 0 or 1 (false or "
                    "true), since a message is trained or is not, and the same in each"
                )
    return weights


# role -> what may stand before it
_MAY_FOLLOW = {
    "user": ("the beginning", "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
    "system": ("the beginning",),
    "developer": ("the beginning",),
}


def _check_turns(messages: list[Message], where: str) -> None:
    before = "the beginning"
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in _MAY_FOLLOW:
            raise ValueError(
                f"{where}: message {number}: unknown role {role!r}: expected "
                f"{', '.join(_MAY_FOLLOW)}"
            )
        expect(
            before in _MAY_FOLLOW[role],
            f"{where}: message {number} ({role}) follows {before}: expected it to follow "
            f"{' or '.join(_MAY_FOLLOW[role])}",
        )
        before = role
    expect(
        before == "assistant",
        f"{where}: the conversation ends after {before}: expected the assistant to have the "
        "last word (pairs of answers are for stage dpo)",
    )


def _tools(record: Any, spec: DatasetSpec, where: str) -> list[dict[str, Any]] | None:
    """The descriptions of a record's tools in OpenAI's form; None if there are none. spec: the
    dataset's declaration, which may name their column. Raises ValueError that names `where`, the
    record's place, for invalid ones."""
    column = spec.columns.get("tools", "tools")
    tools = get_column(record, column, where, (list, str), required=False)
    if isinstance(tools, str):
        read = {column: parse_json(tools.strip() or "null", f"{where}: {column}")}
        tools = get_column(read, column, where, list, required=False)
    return [_in_frame(tool, f"{where}: {column}") for tool in tools or ()] or None


# -- the answers of a pair


def _check_prompts(
    chosen: list[Message], rejected: list[Message], prompt: list[Message], where: str
) -> None:
    """Raise ValueError if the two answers of a preference pair have different prompts. chosen,
    rejected: the messages of both conversations, with the answer last. prompt: the messages in the
    record's prompt column, [] without one. It is an error too if the conversations lack the text of
    one of these."""
    if chosen[:-1] != rejected[:-1]:
        same = [one == other for one, other in zip(chosen, rejected, strict=False)]
        raise ValueError(
            f"{where}: chosen and rejected differ from message {[*same, False].index(False) + 1} "
            f"on, and have {len(chosen)} and {len(rejected)} messages: expected one prompt, and "
            "one answer of each, the last message"
        )
    texts = ["", *(message["content"].strip() for message in chosen[:-1])]
    expect(
        all(message["content"].strip() in texts for message in prompt),
        f"{where}: chosen and rejected begin with another prompt than the prompt column: expected "
        "the answers alone, or the same prompt",
    )
