"""What messages hold beside their text: thinking and tools, read from blocks, written as text where
a chat template has no place for them, and marked, to see what it leaves out.
"""

import json

from .data_files import parse_json

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


def read_blocks(blocks: list, where: str) -> dict:
    """{"content", and "reasoning_content" and "tool_calls" where there are some} of a list of
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
    found: dict = {"content": "".join(texts["text"])}
    if texts["reasoning"]:
        found["reasoning_content"] = "".join(texts["reasoning"])
    if texts["tool_call"]:
        found["tool_calls"] = [parse_json(text, where) for text in texts["tool_call"]]
    return found


def for_template(
    messages: list[dict], tools: list | None, template: str
) -> tuple[list[dict], list | None]:
    """(messages, tools) without what the chat template would leave out or refuse.

    Where it does not read reasoning_content, the thinking stands in <think></think> before the
    answer. Where it takes no tools, or no tool calls, Qwen's way of writing them is used: their
    descriptions end the system message, or begin the first question where there is none; calls are
    JSON in <tool_call></tool_call>, and what tools return is a user's message in
    <tool_response></tool_response>.
    """
    if "reasoning_content" not in template:
        messages = [_with_thinking_as_text(message) for message in messages]
    has_calls = any("tool_calls" in message for message in messages)
    if (tools and "tools" not in template) or (has_calls and "tool_calls" not in template):
        messages, tools = _with_tools_as_text(messages, tools or []), None
    return messages, tools


def _with_thinking_as_text(message: dict) -> dict:
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    thinking = message.get("reasoning_content")
    if not thinking:
        return rest
    return rest | {"content": f"<think>\n{thinking.strip()}\n</think>\n\n{message['content']}"}


def _with_tools_as_text(messages: list[dict], tools: list) -> list[dict]:
    written: list[dict] = []
    before = None
    for message in messages:
        role, content = message["role"], message["content"]
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if before == "tool":  # templates that know no tools want one question, one answer
                written[-1]["content"] += f"\n{content}"
            else:
                written.append({"role": "user", "content": content})
        else:
            calls = [_call_as_text(call["function"]) for call in message.get("tool_calls", ())]
            parts = [part for part in (content, *calls) if part] or [""]
            written.append(rest | {"content": "\n".join(parts)})
        before = role
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        described, first = _TOOLS.format(tools=lines), written[0]
        parts = [described, first["content"]]
        if first["role"] != "user":
            parts.reverse()
        written[0] = first | {"content": "\n\n".join(parts)}
    return written


def _call_as_text(function: dict) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments", {})}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def mark_thinking(messages: list[dict]) -> tuple[list[dict], dict[int, str]]:
    """(messages with a mark instead of what the assistant thinks, {message: its mark})."""
    marked, marks = [], {}
    for number, message in enumerate(messages):
        mark = f"mcathought{number}x"
        before, closing, answer = message["content"].rpartition("</think>")
        head, opening, thinking = before.rpartition("<think>")
        if message["role"] == "assistant" and str(message.get("reasoning_content") or "").strip():
            message, marks[number] = message | {"reasoning_content": mark}, mark
        elif message["role"] == "assistant" and closing and thinking.strip():
            content = f"{head}{opening}\n{mark}\n{closing}{answer}"
            message, marks[number] = message | {"content": content}, mark
        marked.append(message)
    return marked, marks
