"""Preference records: one prompt with a chosen and a rejected answer, from the formats in which people keep them."""

from dataclasses import replace

from .data_records import (
    Source,
    check_turns,
    get_column,
    kind_of,
    new_message,
    read_alpaca,
    read_openai,
    read_openai_message,
    read_sharegpt,
    tools_of,
    with_system,
)

_EXPECTED = (
    "pairs: alpaca (instruction, input, chosen, rejected), sharegpt (conversations, chosen, rejected), OpenAI (messages, "
    "chosen, rejected), prompt, chosen and rejected columns, or whole conversations as chosen and rejected"
)


def detect_pair_format(record, source: Source, where: str) -> str:
    """The format of a file of pairs, from its first record: alpaca, sharegpt, openai, prompt, or conversations (chosen and
    rejected hold the prompt too), each followed by "-chosen-rejected"."""
    columns = source.columns
    pair = [columns.get(side, side) for side in ("chosen", "rejected")]
    if not isinstance(record, dict) or not all(column in record for column in pair):
        got = f"the columns {sorted(record)}" if isinstance(record, dict) else kind_of(record)
        raise ValueError(
            f"{where}: stage dpo expects {_EXPECTED}, got {got}; other names: columns in dataset_info.json"
        )
    turns = next(
        (k for k in (columns.get("messages"), "messages", "conversations") if k and k in record),
        None,
    )
    prompt = record.get(columns.get("prompt", "prompt"))
    if source.formatting:
        form = source.formatting
    elif _is_whole(record[pair[0]]):
        form = "conversations"
    elif turns:
        first = record[turns][0] if isinstance(record[turns], list) and record[turns] else None
        form = (
            "openai"
            if isinstance(first, dict) and "role" in first and not source.tags
            else "sharegpt"
        )
    elif "instruction" in record or ("prompt" in columns and isinstance(prompt, str)):
        form = "alpaca"
    elif prompt is not None:
        form = "prompt"
    else:
        raise ValueError(
            f"{where}: stage dpo expects {_EXPECTED}, got texts without a prompt in {sorted(record)}"
        )
    return f"{form}-chosen-rejected"


def _is_whole(answer) -> bool:
    """Whether an answer is a conversation that begins with the prompt: its first turn is not the assistant's."""
    first = answer[0] if isinstance(answer, list) and answer else None
    role = first.get("role", first.get("from")) if isinstance(first, dict) else None
    return role in ("system", "developer", "user", "human")


def pair(
    record, source: Source, form: str, default_system: str | None, where: str
) -> tuple[list, list, list | None]:
    """(chosen, rejected, tools): two conversations in OpenAI's form, checked, that differ at most in their last message, an
    answer of the assistant. Raises: ValueError with the place."""
    form = form.removesuffix("-chosen-rejected")
    prompt = [] if form == "conversations" else _PROMPTS[form](record, source, where)
    sides = []
    for side in ("chosen", "rejected"):
        messages = [*prompt, *_answer(record, source.columns.get(side, side), source, form, where)]
        messages = with_system(messages, record, source, default_system, where)
        check_turns(messages, f"{where}: {side}")
        sides.append(messages)
    chosen, rejected = sides
    if chosen[:-1] != rejected[:-1]:
        both = zip(chosen, rejected, strict=False)
        number = next(
            (i for i, (a, b) in enumerate(both, 1) if a != b), min(len(chosen), len(rejected)) + 1
        )
        raise ValueError(
            f"{where}: chosen and rejected differ from message {number} on, and have {len(chosen)} and {len(rejected)} "
            "messages: expected one prompt, and one answer of each, the last message"
        )
    if form == "conversations":
        _check_prompt_column(record, source, chosen[:-1], where)
    return chosen, rejected, tools_of(record, source, where)


def _answer(record, column: str, source: Source, form: str, where: str) -> list[dict]:
    """A text, a message or a list of messages, as messages."""
    answer = get_column(record, column, where, (str, dict, list))
    if isinstance(answer, str):
        return [new_message("assistant", answer)]
    turns = answer if isinstance(answer, list) else [answer]
    tagged = source.tags.get("role_tag", "from")
    if form == "sharegpt" or (
        turns and isinstance(turns[0], dict) and tagged in turns[0] and "role" not in turns[0]
    ):
        return read_sharegpt(
            {"conversations": turns}, replace(source, columns={}), f"{where}: {column}"
        )
    return [read_openai_message(turn, source.tags, f"{where}: {column}") for turn in turns]


def _alpaca_prompt(record, source: Source, where: str) -> list[dict]:
    as_answer = replace(
        source, columns={**source.columns, "response": source.columns.get("prompt", "instruction")}
    )
    return read_alpaca(record, as_answer, where)[
        :-1
    ]  # the turns before the answer, whatever stands in for it


def _column_prompt(record, source: Source, where: str) -> list[dict]:
    prompt = get_column(record, source.columns.get("prompt", "prompt"), where, (str, list))
    turns = [new_message("user", prompt)] if isinstance(prompt, str) else prompt
    return [read_openai_message(turn, {}, where) for turn in turns]


_PROMPTS = {
    "alpaca": _alpaca_prompt,
    "sharegpt": read_sharegpt,
    "openai": read_openai,
    "prompt": _column_prompt,
}


def _check_prompt_column(record, source: Source, before: list[dict], where: str) -> None:
    """Many files repeat the prompt in a column of its own; where it says something else, nobody knows which is meant."""
    column = source.columns.get("prompt", "prompt")
    prompt = get_column(record, column, where, (str, list), required=False)
    if isinstance(prompt, list):
        prompt = [read_openai_message(turn, {}, where) for turn in prompt]
        same = prompt == before or prompt == [m for m in before if m["role"] != "system"]
    else:
        same = not prompt or any(prompt.strip() == m["content"].strip() for m in before)
    if not same:
        raise ValueError(
            f"{where}: chosen and rejected begin with a prompt of their own, which is not that of the column {column!r}: "
            "expected the answers alone, or the same prompt"
        )
