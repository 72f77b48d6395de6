"""Chat templates by their keys, and masks against an independent rendering: prefix by prefix, with
transformers' apply_chat_template alone.
"""

import json
import re

import pytest

from mca_lite.args import DataArguments
from mca_lite.data import load_datasets
from mca_lite.data_chat import ChatRenderer, chat_renderer
from mca_lite.data_records import Conversation
from mca_lite.errors import ConfigError
from mca_lite.tables import BUILT_IN_FOR, TEMPLATES
from tests.shared.chats import assistant, trained_texts, user, write_records
from tests.shared.commands import assert_names
from tests.shared.toy_tokenizer import (
    CHATML,
    CHATML_MARKS,
    HARMONY,
    HARMONY_MARKS,
    HARMONY_TOKENS,
    QWEN3,
    byte_tokenizer,
    encode,
    encode_with,
)

STRIPS_WITH_MARKS = CHATML_MARKS.replace(
    "{{ m['content'] }}<|im_end|>\n{% endgeneration %}",
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1].strip() }}"
    "<|im_end|>\n{% endgeneration %}",
)
ALL = {**TEMPLATES, "marks": CHATML_MARKS, "strips with marks": STRIPS_WITH_MARKS, "toy": QWEN3}
WHERE = "t.json:1"
EMPTY = "<think>\n\n</think>\n\n"
ADD = {"name": "add", "description": "Adds é", "parameters": {"type": "object"}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}


def thought(thinking: str, answer: str) -> dict:
    return assistant(f"<think>\n{thinking}\n</think>\n\n{answer}")


PLAIN = [
    {"role": "system", "content": "Be brief."},
    user("Hi"),
    assistant("Hello"),
    user("2"),
    assistant("3"),
]
THINKS = [
    user("Hi"), thought("greet", "Hello"), user("2"), assistant("3"), user("4"),
    thought("greet", "5"), user("6"), thought("count", "7"), user("8"), assistant("9"),
]  # fmt: skip
# what real records with tools and thinking look like: the first answer thinks, calls and goes on
CALLS = [
    user("2+3?"), assistant("", reasoning_content="I add.", tool_calls=[CALL]),
    {"role": "tool", "content": "5"}, assistant("Five."),
    user("Sure?"), assistant("", reasoning_content="I add again.", tool_calls=[CALL, CALL]),
    {"role": "tool", "content": "5"}, {"role": "tool", "content": "5"},
    assistant("Yes.", reasoning_content="Twice the same."), user("Thanks"), assistant("Welcome"),
]  # fmt: skip


def encode_messages(messages, template, tools=None, **options):
    record = {"messages": messages} | ({"tools": tools} if tools else {})
    return encode(record, template, **options)


def trained_turns(tokenizer, part) -> list[tuple[str, str]]:
    """(all text before it in its sample, its text) of each run of trained tokens."""
    turns, start = [], 0
    for length in part.lengths:
        ids, mask = part.ids[start:][:length].tolist(), part.mask[start:][:length].tolist()
        for at in range(length):
            if mask[at] and not (at and mask[at - 1]):
                end = (mask[at:] + [0]).index(0) + at
                turns.append((tokenizer.decode(ids[:at]), tokenizer.decode(ids[at:end])))
        start += length
    return turns


def prefix_by_prefix(tokenizer, messages, tools=None, **options) -> list[tuple[str, str]]:
    """(prompt, answer) of each turn: what a model is shown when it has to give the answer, and what
    it has to say up to the end of its turn."""
    turns = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt, whole = (
                tokenizer.apply_chat_template(
                    messages[:until], tools=tools, tokenize=False,
                    add_generation_prompt=until == number, **options,
                )
                for until in (number, number + 1)
            )  # fmt: skip
            assert whole.startswith(prompt)
            turns.append((prompt, whole[len(prompt) :].rstrip("\n")))
    return turns


def without_empty_blocks(turns) -> list[tuple[str, str]]:
    """Qwen3 writes an empty block of thinking into the last turn alone."""
    return [(prompt.replace(EMPTY, ""), answer.replace(EMPTY, "")) for prompt, answer in turns]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("messages", [PLAIN, THINKS], ids=["plain", "thinks"])
def test_each_turn_is_trained_after_the_history_that_inference_shows(name, messages):
    tokenizer, part = encode_messages(messages, ALL[name])
    expected = prefix_by_prefix(tokenizer, messages)
    got = trained_turns(tokenizer, part)
    assert without_empty_blocks(got) == without_empty_blocks(expected)
    strips = messages is THINKS and name in ("qwen3", "toy", "strips with marks")
    assert (len(part.lengths) > 1) == bool(part.tallies) == strips


def test_conversations_with_tools_and_thinking_become_samples_that_inference_shows():
    tools = [{"type": "function", "function": ADD}]
    tokenizer, part = encode_messages(CALLS, TEMPLATES["qwen3"], tools)
    expected = prefix_by_prefix(tokenizer, CALLS, tools)
    assert without_empty_blocks(trained_turns(tokenizer, part)) == without_empty_blocks(expected)
    assert len(part.lengths) == 3 and len(expected) == 5
    [(what, found)] = part.tallies.items()
    assert "several samples" in what and found == (1, "t.json:1")
    whole = encode_messages(CALLS, TEMPLATES["qwen3"], tools, train_on_prompt=True)[1]
    assert len(whole.lengths) == 1
    [(what, found)] = whole.tallies.items()
    assert "without the thinking of earlier turns" in what and found == (1, "t.json:1")
    assert not encode_messages(PLAIN, TEMPLATES["qwen3"], train_on_prompt=True)[1].tallies
    assert len(encode_messages(CALLS, TEMPLATES["qwen3"], tools, mask_history=True)[1].lengths) == 1


def test_a_template_that_refuses_a_part_of_a_conversation_trains_it_whole():
    refuses = (
        "{% if messages | length == 2 and messages[0]['content'] == '2+3?' %}"
        "{{ raise_exception('two messages') }}{% endif %}"
    )
    messages = [user("2+3?"), thought("add", "5"), user("4+4?"), thought("add", "8")]
    tokenizer, part = encode_messages(messages, refuses + TEMPLATES["qwen3"], train_on_prompt=True)
    assert len(part.lengths) == 1 and not part.tallies


# the next header ends a turn, as with GLM's
OPEN_ENDED = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] %}<tool_call>{{ c['function'] | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
OPEN_MARKS = OPEN_ENDED.replace("{{ m['content'] }}", "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}",
)  # fmt: skip


@pytest.mark.parametrize("template", [OPEN_ENDED, OPEN_MARKS])
def test_end_of_answer_ends_each_answer_where_the_template_writes_nothing(template):
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|tool|>"]})
    messages = with_weights("weight", 1, 0, 1)
    plain = encode_with(tokenizer, {"messages": messages})
    headers = encode_with(tokenizer, {"messages": messages}, end_of_answer=["<|user|>"])
    written = encode_with(tokenizer, {"messages": messages}, end_of_answer=["<|end|>", "<|tool|>"])
    for part, ending in ((plain, ""), (headers, "<|user|>"), (written, "<|end|>")):
        turns = [text for _, text in trained_turns(tokenizer, part)]
        assert turns == [f"No{ending}", f"5{ending}"]
    text = tokenizer.decode(plain.ids)
    # a header that follows ends an answer as it is; another token is written after each
    assert tokenizer.decode(headers.ids) == f"{text}<|user|>"
    answer = re.compile("(?<=<.assistant.>\n)[^<]+")
    assert tokenizer.decode(written.ids) == answer.sub(r"\g<0><|end|>", text)
    everything = encode_with(
        tokenizer, {"messages": PLAIN}, end_of_answer=["<|end|>"], train_on_prompt=True
    )
    assert everything.mask.all() and tokenizer.decode(everything.ids).endswith("3<|end|>")


def test_end_of_answer_ends_calls_with_the_header_of_their_result():
    tokenizer = byte_tokenizer(OPEN_ENDED)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|tool|>"]})
    part = encode_with(tokenizer, {"messages": CALLS[:4]}, end_of_answer=["<|user|>", "<|tool|>"])
    [call, answer] = [text for _, text in trained_turns(tokenizer, part)]
    assert call.endswith("</tool_call><|tool|>") and answer == "Five.<|user|>"


def test_a_template_without_an_end_of_answers_names_the_key_that_sets_one():
    data_args = DataArguments(dataset=["t"])
    [line] = chat_renderer(byte_tokenizer(OPEN_ENDED), data_args)[1]
    assert_names(line, "writes nothing after an answer", "set end_of_answer")
    data_args = DataArguments(dataset=["t"], end_of_answer=["<|end|>"])
    assert not chat_renderer(byte_tokenizer(OPEN_ENDED), data_args)[1]
    with pytest.raises(
        ConfigError, match="end_of_answer(.|\n)*expected tokens .*writes .<.im_end.>. there"
    ):
        chat_renderer(byte_tokenizer(CHATML), data_args)
    data_args = DataArguments(dataset=["t"], end_of_answer=["<|stop|>"])
    with pytest.raises(ConfigError, match="end_of_answer(.|\n)*expected tokens .*writes .. there"):
        chat_renderer(byte_tokenizer(OPEN_ENDED), data_args)


def test_tool_calls_are_trained_to_their_end_without_an_end_of_turn_token():
    messages = [user("2+3?"), assistant("", tool_calls=[CALL, CALL]), *CALLS[2:4]]
    tokenizer, part = encode_messages(messages, OPEN_ENDED)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    assert trained_turns(tokenizer, part) == prefix_by_prefix(tokenizer, messages)
    assert [text for _, text in trained_turns(tokenizer, part)] == [2 * call, "Five."]


def harmony_turns(text: str, marks: bool) -> list[str]:
    """What the assistant says in each of its turns, by the text alone: up to the header of another
    role. With marks the header of the assistant is a part of it."""
    turns = re.findall(
        r"(?:<\|start\|>assistant(?:(?!<\|start\|>).)*<\|(?:end|return|call)\|>)+", text, re.DOTALL
    )
    # two answers never stand side by side, but a call is followed by its result
    return [turn if marks else turn.removeprefix("<|start|>assistant") for turn in turns]


ASKS = [user("2+3?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "5"}]
ONE_CALL = [m | {"tool_calls": [CALL]} if "tool_calls" in m else m for m in CALLS]
HARMONY_RECORDS = {
    "answers": PLAIN,
    "calls": [*ASKS, assistant("Five."), *ASKS, assistant("<think> is a mark.")],
    "ends with a call": [user("Hi"), assistant("Hello"), *ASKS[:2]],
    "thinks": [
        user("q"), assistant("A", thinking="h"), user("r"), assistant("B", reasoning_content="i"),
    ],
    "thinks and calls": [*ONE_CALL[:7], *ONE_CALL[8:]],
    "thinks twice and calls": [
        ASKS[0], ASKS[1] | {"thinking": "I add."}, ASKS[2], ASKS[1] | {"reasoning": "Again."},
        ASKS[2], assistant("Five.", thinking="Same."), user("Thanks"), assistant("Welcome"),
    ],
}  # fmt: skip
THINKING_KEYS = ("thinking", "reasoning", "reasoning_content")


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("name", HARMONY_RECORDS)
def test_harmony_trains_all_that_the_assistant_says(name, marks):
    messages = HARMONY_RECORDS[name]
    tokenizer = byte_tokenizer(HARMONY_MARKS if marks else HARMONY)
    tokenizer.add_special_tokens({"additional_special_tokens": HARMONY_TOKENS})
    tools = [{"type": "function", "function": ADD}]
    part = encode_with(tokenizer, {"messages": messages, "tools": tools})
    expected = []
    start = 0
    for length in part.lengths:  # a later sample trains the turns after those of the one before
        text = tokenizer.decode(part.ids[start:][:length])
        expected += harmony_turns(text, marks)[len(expected) :]
        start += length
    got = [text for _, text in trained_turns(tokenizer, part)]
    assert got == expected
    answers = [message for message in messages if message["role"] == "assistant"]
    for text, message in zip(got, answers, strict=True):
        said = message["content"] or json.dumps(CALL["function"]["arguments"])
        assert f"<|message|>{said}<|" in text
        thinking = [message[key] for key in THINKING_KEYS if key in message]
        assert text.count("<|channel|>analysis") == len(thinking)
        assert all(f"<|channel|>analysis<|message|>{one}<|end|>" in text for one in thinking)


def test_marks_round_the_content_alone_reach_to_the_end_of_each_answer():
    ending = "'<|return|>' if loop.last else '<|end|>'"
    said = "<|start|>assistant<|channel|>final<|message|>{% generation %}{{ m['content'] }}"
    written = f"{{{{ say('', 'final', m['content'], {ending}) }}}}"
    assert written in HARMONY
    template = HARMONY.replace(written, f"{said}{{% endgeneration %}}{{{{ {ending} }}}}")
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": HARMONY_TOKENS})
    part = encode_with(tokenizer, {"messages": PLAIN})
    turns = [text for _, text in trained_turns(tokenizer, part)]
    assert turns == ["Hello<|end|>", "3<|return|>"]


# as Qwen3.5's and its models without thinking: a prompt opens a block that history lacks
OPENS = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
CLOSES = OPENS.replace("<think>", "<think>\\n\\n</think>\\n")


@pytest.mark.parametrize("opening", [OPENS, CLOSES], ids=["open", "empty"])
def test_thinking_is_trained_after_answers_that_have_none(opening):
    template = TEMPLATES["qwen3"].partition("{%- if add_generation_prompt %}")[0] + opening
    turns = [user("Hi"), assistant("Hello"), user("2+3?"), assistant("5", reasoning_content="add")]
    tokenizer, part = encode_messages(turns, template)
    [(first, hello), (second, thinks)] = trained_turns(tokenizer, part)
    start = "<think>\n" if opening == OPENS else ""  # an open block is the prompt's
    header = "<|im_start|>assistant\n"
    assert (hello, thinks) == (
        "Hello<|im_end|>",
        "<think>\nadd\n</think>\n\n5<|im_end|>"[len(start) :],
    )
    assert first.endswith(f"Hi<|im_end|>\n{header}")
    assert second.endswith(f"2+3?<|im_end|>\n{header}{start}")


@pytest.mark.parametrize("opening", [OPENS, CLOSES], ids=["open", "empty"])
def test_calls_are_trained_where_a_later_question_takes_empty_blocks_away(opening):
    # of Qwen3.5 each answer after the last question has a block
    head, _, _ = TEMPLATES["qwen3"].partition("{%- if add_generation_prompt %}")
    template = head.replace("and (loop.last or thinking)", "") + opening
    step = [assistant("", tool_calls=[CALL]), {"role": "tool", "content": "5"}]
    messages = [user("2+3?"), *step, *step, assistant("Five."), user("Hi"), assistant("Hello")]
    _, turns = zip(*trained_turns(*encode_messages(messages, template)), strict=True)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    closed = "\n</think>\n\n" if opening == OPENS else ""
    assert turns == (call, call, "Five.<|im_end|>", f"{closed}Hello<|im_end|>")


@pytest.mark.parametrize("options", [{}, {"mask_history": True}, {"train_on_prompt": True}])
def test_parts_of_answers_that_the_template_leaves_out_are_refused(options):
    # as gpt-oss': a message is one call, or a text
    template = CHATML_MARKS.replace(
        "{{ m['content'] }}<|im_end|>\n{% endgeneration %}",
        "{{ m['tool_calls'][0]['function'] | tojson if m['tool_calls'] else m['content'] }}"
        "<|im_end|>\n{% endgeneration %}",
    )
    for call, words in (
        (assistant("", tool_calls=[CALL, CALL]), "'add' of a tool call"),
        (assistant("Well.", tool_calls=[CALL]), "'Well.' of assistant"),
        (assistant("<think>\n2+3\n</think>\n\nWell.", tool_calls=[CALL]), "Well.' of assistant"),
    ):
        messages = [user("2+3?"), call, *CALLS[2:4]]
        with pytest.raises(ValueError, match=f"leaves out the message .*{words}: expected one"):
            encode_messages(messages, template, **options)
    one = [user("2+3?"), assistant("", tool_calls=[CALL | {"id": "Add:0"}]), *CALLS[2:4]]
    by_id = template.replace("['function'] | tojson", "['id']")  # as Kimi's
    for written in (template, by_id):
        assert encode_messages(one, written, **options)[1].mask.any()


@pytest.mark.parametrize("messages", [PLAIN, CALLS], ids=["plain", "calls"])
def test_enable_thinking_false_shows_the_empty_block_and_does_not_train_it(messages):
    tokenizer, part = encode_messages(messages, TEMPLATES["qwen3"], enable_thinking=False)
    turns = trained_turns(tokenizer, part)
    assert turns[-1][0].endswith(EMPTY) and EMPTY not in "".join(answer for _, answer in turns)
    expected = prefix_by_prefix(tokenizer, messages[-2:], enable_thinking=False)
    assert [turns[-1][1]] == [answer for _, answer in expected]
    [_, part] = encode_messages(PLAIN, TEMPLATES["qwen3"])
    assert trained_turns(tokenizer, part)[-1][1] == EMPTY + "3<|im_end|>"
    data_args = DataArguments(dataset=["t"], enable_thinking=False)
    _, report = chat_renderer(byte_tokenizer(CHATML), data_args)
    assert report == ["note: the chat template does not read enable_thinking"]


def test_blocks_of_text_are_read():
    record = [*CALLS[:2], {"role": "tool", "content": [{"type": "text", "value": "5"}]}]
    record += [assistant([{"type": "text", "text": "Fi"}, {"type": "text", "value": "ve."}])]
    tokenizer, part = encode_messages(record, TEMPLATES["qwen3"])
    assert part.ids.tolist() == encode_messages(CALLS[:4], TEMPLATES["qwen3"])[1].ids.tolist()
    for block in ({"type": "file", "value": "x"}, {"type": "text"}, "text"):
        with pytest.raises(ValueError, match="t.json:1: content: expected .* only these"):
            encode_messages([user("Hi"), assistant([block])], CHATML)
    heard = [user([{"type": "audio", "audio": "x"}]), assistant("a")]
    with pytest.raises(ValueError, match="has pictures, videos or audio .* the model reads text"):
        encode_messages(heard, CHATML)


# -- keys of messages

TURNS = ("Hi", "No", "2", "3", "4", "5")
STEPS = (
    "{% generation %}{{ m['content'][:1] }}{% endgeneration %}"
    "{% generation %}{{ m['content'][1:] }}<|im_end|>\n{% endgeneration %}"
)
TWO_MARKS_A_TURN = CHATML_MARKS.replace(
    "{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}", STEPS
)


def with_weights(key: str, *weights, role: str = "assistant") -> list[dict]:
    """TURNS, with these values of a key in the turns of a role; None: the turn has no such key."""
    messages = [assistant(text) if n % 2 else user(text) for n, text in enumerate(TURNS)]
    of_role = [message for message in messages if message["role"] == role]
    for message, weight in zip(of_role, weights, strict=True):
        message |= {} if weight is None else {key: weight}
    return messages


def answers_with_labels(messages, template=CHATML, **options) -> list[str]:
    return [answer for _, answer in trained_turns(*encode_messages(messages, template, **options))]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("key", ["weight", "loss_weight", "train", "training"])
def test_an_answer_of_weight_0_is_not_trained(name, key):
    every, template = answers_with_labels(with_weights(key, 1, True, 1.0), ALL[name]), ALL[name]
    assert len(every) == 3 and every == answers_with_labels(
        with_weights(key, None, None, None), template
    )
    assert answers_with_labels(with_weights(key, 0, 1, None), template) == every[1:]
    assert answers_with_labels(with_weights(key, True, False, True), template) == every[::2]
    assert answers_with_labels(with_weights(key, 1.0, 1, 0.0), template) == every[:2]
    assert answers_with_labels(with_weights(key, 0, 0, 1), template) == every[2:]
    tokenizer, part = encode_messages(with_weights(key, False, 0, 1), template)
    assert (
        part.ids.tolist() == encode_messages(with_weights(key, 1, 1, 1), template)[1].ids.tolist()
    )


def test_weights_of_other_turns_and_other_weights_are_refused():
    assert len(answers_with_labels(with_weights("weight", 0, 0, 0, role="user"))) == 3
    with pytest.raises(ValueError, match=r"t.json:1: message 3 \(user\) has weight 1: only the as"):
        encode_messages(with_weights("train", False, True, False, role="user"), CHATML)
    for value in (0.5, "1", 2, [0]):
        with pytest.raises(
            ValueError, match=r"t.json:1: message 4 has \{'weight': .* expected 0 or"
        ):
            encode_messages(with_weights("weight", 1, value, 1), CHATML)
    messages = with_weights("weight", 1, 1, 0)
    assert (
        len(answers_with_labels([messages[0], messages[1] | {"train": True}, *messages[2:]])) == 2
    )
    with pytest.raises(ValueError, match="t.json:1: message 2 has .*the same in each"):
        encode_messages([messages[0], messages[1] | {"train": False}, *messages[2:]], CHATML)


def test_weights_meet_the_keys_that_say_what_is_trained():
    last = answers_with_labels(with_weights("weight", 1, 1, 1))[2:]
    assert answers_with_labels(with_weights("weight", 1, 0, 1), mask_history=True) == last
    for messages, keys in (
        (with_weights("weight", 1, 1, 0), dict(mask_history=True)),
        (with_weights("train", False, False, False), {}),
    ):
        tokenizer, part = encode_messages(messages, CHATML, **keys)
        assert not part.lengths
        assert part.tallies == {"samples have no token to train on and were left out": (1, WHERE)}
    tokenizer, part = encode_messages(with_weights("weight", 1, 0, 1), CHATML, train_on_prompt=True)
    untrained = part.ids[part.mask == 0]
    assert tokenizer.decode(untrained) == "3<|im_end|>"
    with pytest.raises(ValueError, match=r"message 1 \(user\) has weight 0"):
        encode_messages(with_weights("weight", 0, 1, 1, role="user"), CHATML, train_on_prompt=True)
    encode_messages(with_weights("weight", 1, 1, 1, role="user"), CHATML, train_on_prompt=True)


def test_weights_hold_where_a_template_strips_thinking_or_marks_a_turn_twice():
    hidden = [message | {"weight": 0} if message == THINKS[1] else message for message in THINKS]
    every, kept = (
        answers_with_labels(THINKS, TEMPLATES["qwen3"]),
        answers_with_labels(hidden, TEMPLATES["qwen3"]),
    )
    assert "greet" in every[0] and kept == every[1:]
    every = answers_with_labels(with_weights("weight", 1, 1, 1), TWO_MARKS_A_TURN)
    assert every == [f"{text}<|im_end|>" for text in TURNS[1::2]]
    assert answers_with_labels(with_weights("weight", 1, 0, 1), TWO_MARKS_A_TURN) == every[::2]
    assert (
        answers_with_labels(with_weights("weight", 1, 1, 1), TWO_MARKS_A_TURN, mask_history=True)
        == every[2:]
    )


def test_weights_of_sharegpt_and_of_messages_beside_tools_count():
    record = {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "No", "weight": 0, "id": 7},
            {"from": "human", "value": "2", "weight": 0},
            {"from": "gpt", "value": "3", "weight": 1},
        ]
    }
    tokenizer = byte_tokenizer(CHATML)
    part = encode_with(tokenizer, record, form="sharegpt")
    assert [answer for _, answer in trained_turns(tokenizer, part)] == ["3<|im_end|>"]
    calls = [m | {"weight": 0} if m.get("content") == "Yes." else m for m in CALLS]
    every = answers_with_labels(CALLS, CHATML, tools=[ADD])
    without = [answer for answer in every if "Yes." not in answer]
    assert (
        answers_with_labels(calls, CHATML, tools=[ADD]) == without
        and len(without) == len(every) - 1
    )


def test_unknown_keys_of_a_message_are_refused_by_name_unless_they_are_ignored():
    harmless = dict(name="Bo", id=1, refusal=None, timestamp="now", reward=None, audio=None)
    plain = answers_with_labels([user("Hi"), assistant("Hello")])
    assert answers_with_labels([user("Hi") | harmless, assistant("Hello", **harmless)]) == plain
    rated = [user("Hi"), assistant("Hello", score=-1, function_call={"name": "f"})]
    with pytest.raises(ValueError, match="t.json:1: .*'function_call'.*ignore_message_keys"):
        encode_messages(rated, CHATML)
    with pytest.raises(ValueError, match="t.json:1: a message of assistant has the key 'score'"):
        encode_messages(rated, CHATML, ignore_message_keys=["function_call"])
    assert answers_with_labels(rated, ignore_message_keys=["function_call", "score"]) == plain
    with pytest.raises(ValueError, match="the key 'loss'"):
        turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "loss": False}]
        encode_with(byte_tokenizer(CHATML), {"conversations": turns}, form="sharegpt")
    reads = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['score'] }}")
    rated[1].pop("function_call")
    assert "-1" in answers_with_labels(rated, reads)[0]
    heavy = [user("Hi"), assistant("Hello", weight=0.5)]
    assert answers_with_labels(heavy, ignore_message_keys=["weight"]) == plain
    with pytest.raises(ConfigError, match="ignore_message_keys(.|\n)*a message needs its role"):
        DataArguments(dataset=["a"], ignore_message_keys=["content"])


@pytest.mark.parametrize("key", ["thinking", "reasoning"])
def test_thinking_under_another_name_is_thinking(key):
    expected = answers_with_labels(
        [user("2+3?"), assistant("5", reasoning_content="I add.")], TEMPLATES["qwen3"]
    )
    assert "I add." in expected[0]
    for name in ("qwen3", "chatml"):
        for more in ({}, {"reasoning_content": ""}):  # an empty text under a second name
            answer = assistant("5", **{key: "I add."}, **more)
            got = answers_with_labels([user("2+3?"), answer], TEMPLATES[name])
            assert "<think>\nI add.\n</think>\n\n5" in got[0]


def test_a_message_that_the_template_leaves_out_is_refused():
    developer = [
        {"role": "developer", "content": "Be brief."},
        user("Be brief."),
        assistant("Hello"),
    ]
    words = "t.json:1: .*leaves out .*'Be brief.' of developer.*system"
    with pytest.raises(ValueError, match=words):
        encode_messages(developer, TEMPLATES["qwen3"])
    for name in ("chatml", "llama3", "deepseek"):
        tokenizer, part = encode_messages(developer, TEMPLATES[name])
        assert tokenizer.decode(part.ids).count("Be brief.") == 2
    empty = [developer[0] | {"content": " "}, *developer[1:]]
    assert answers_with_labels(empty, TEMPLATES["qwen3"])
    for template in (CHATML, CHATML.replace("{{ m['content'] }}", "{{ m['content'] | title }}")):
        turns = [{"role": "system", "content": " Be\n"}, user(" hi "), assistant("Yes")]
        assert answers_with_labels(turns, template)


# -- options of a record


def test_chat_template_kwargs_of_a_record_count_before_the_run_s():
    tokenizer = byte_tokenizer(TEMPLATES["qwen3"])
    record = {"messages": [user("Hi"), assistant("Hello")]}

    def turn(kwargs, **keys):
        part = encode_with(tokenizer, record | {"chat_template_kwargs": kwargs}, **keys)
        [(prompt, answer)] = trained_turns(tokenizer, part)
        return prompt.endswith(EMPTY), answer

    shown, hidden = (True, "Hello<|im_end|>"), (False, EMPTY + "Hello<|im_end|>")
    assert turn({"enable_thinking": False}) == shown
    assert turn({}) == turn(None) == turn({"enable_thinking": None}) == hidden
    assert turn({}, enable_thinking=False) == turn(None, enable_thinking=False) == shown
    assert turn({"enable_thinking": True}, enable_thinking=False) == hidden
    with pytest.raises(ValueError, match="t.json:1: chat_template_kwargs: 'tokenize': expected va"):
        turn({"tokenize": True})
    with pytest.raises(ValueError, match="t.json:1: 'chat_template_kwargs': expected an"):
        turn("enable_thinking")
    part = encode_with(
        byte_tokenizer(CHATML), record | {"chat_template_kwargs": {"enable_thinking": False}}
    )
    [(what, found)] = part.tallies.items()
    assert "enable_thinking" in what and found == (1, WHERE)


def test_each_record_has_the_end_of_turn_of_its_options(tmp_path):
    ending = "{{ message.content + ending | default('<|im_end|>') + '\n' }}"
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{% if message.role == 'assistant' %}{% generation %}" + ending + "{% endgeneration %}"
        "{% else %}" + ending + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    record = {"messages": [user("Hi"), assistant("Hello")]}
    other = record | {"chat_template_kwargs": {"ending": "<|im_stop|>"}}
    tokenizer = byte_tokenizer(template)
    file = write_records(tmp_path / "a.jsonl", record, other, record)
    keys = dict(cache_dir=str(tmp_path), cutoff_len=64)
    data = load_datasets(DataArguments(dataset=[file], **keys), "sft", tokenizer)
    # the new line after the end of a turn is not trained
    ends = ["<|im_end|>", "<|im_stop|>", "<|im_end|>"]
    assert trained_texts(tokenizer, data.train) == [f"Hello{end}" for end in ends]


def test_thinking_and_tools_are_text_where_the_template_has_no_place_for_them():
    thinking = CALLS[1] | {"reasoning_content": "\nI add.\n"}  # as models write it
    tokenizer, part = encode_messages([CALLS[0], thinking, *CALLS[2:4]], CHATML, [ADD])
    described = json.dumps({"type": "function", "function": ADD}, ensure_ascii=False)
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    text = tokenizer.decode(part.ids)
    assert text.startswith("<|im_start|>user\n# Tools\n\nYou may call")
    assert f"<tools>\n{described}\n</tools>" in text
    assert text.endswith(
        "</tool_call>\n\n2+3?<|im_end|>\n<|im_start|>assistant\n<think>\nI add.\n</think>\n\n\n"
        f"{called}<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nFive.<|im_end|>\n"
    )
    assert [answer for _, answer in trained_turns(tokenizer, part)] == [
        f"<think>\nI add.\n</think>\n\n\n{called}<|im_end|>",
        "Five.<|im_end|>",
    ]
    system = [{"role": "system", "content": "Be brief."}, *CALLS]
    for name in TEMPLATES:  # also those that refuse roles which they do not know
        tokenizer, part = encode_messages(system, TEMPLATES[name], [ADD])
        assert "Be brief.\n\n# Tools" in tokenizer.decode(part.ids)
        assert len(trained_turns(tokenizer, part)) == 5


# -- the keys


def report_of(tmp_path, tokenizer, **keys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": PLAIN}))
    keys = dict(dataset=[str(tmp_path / "a.jsonl")], cache_dir=str(tmp_path / "cache"), **keys)
    return load_datasets(DataArguments(**keys), "sft", tokenizer).report


def test_chat_template_takes_a_name_a_file_or_a_text(tmp_path):
    (tmp_path / "my.jinja").write_text(CHATML.replace("user", "USER"))
    for value, wanted, line in (
        ("gemma", TEMPLATES["gemma"], "the built-in gemma; the tokenizer has no token <end_of_t"),
        (str(tmp_path / "my.jinja"), CHATML.replace("user", "USER"), f"{tmp_path}/my.jinja"),
        (CHATML, CHATML, "the text of chat_template"),
    ):
        tokenizer = byte_tokenizer(QWEN3)
        assert report_of(tmp_path, tokenizer, chat_template=value)[0].startswith(
            f"chat template: {line}"
        )
        assert tokenizer.chat_template == wanted
    with pytest.raises(ConfigError, match=r"expected a built-in template(.|\n)*try: one of chatml"):
        DataArguments(dataset=["a"], chat_template="chatlm")


def test_a_template_of_llama_factory_is_used_where_the_tokenizer_has_none(tmp_path):
    own = byte_tokenizer(CHATML)
    [line, *_] = report_of(tmp_path, own, template="qwen3")
    assert_names(line, "template qwen3: ", "not used")
    assert own.chat_template == CHATML
    for name, built_in in BUILT_IN_FOR.items():
        tokenizer = byte_tokenizer(None)
        [line, *_] = report_of(tmp_path, tokenizer, template=name)
        assert line.startswith(f"chat template: the built-in {built_in}")
        assert tokenizer.chat_template == TEMPLATES[built_in]
    words = "template alpaca .*no chat template.*set chat_template"
    with pytest.raises(ValueError, match=words):
        report_of(tmp_path, byte_tokenizer(None), template="alpaca")


def test_an_unknown_template_is_a_note_where_the_tokenizer_has_one(tmp_path):
    for name in ("moss_vl", "qwen3_nothnk"):
        [line, *_] = report_of(tmp_path, byte_tokenizer(CHATML), template=name)
        assert_names(line, f"template {name}: ", "not used")
        with pytest.raises(ValueError, match=f"template {name} is not built in.*qwen3_nothink"):
            report_of(tmp_path, byte_tokenizer(None), template=name)


def test_a_system_message_that_a_template_refuses_leads_to_another():
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    renderer = ChatRenderer(byte_tokenizer(refuses + TEMPLATES["gemma"]))
    with pytest.raises(ValueError, match="here: .*no system: set chat_template"):
        renderer.render(Conversation(PLAIN), "answers", "here")
    for name in ("gemma", "mistral"):
        renderer = ChatRenderer(byte_tokenizer(TEMPLATES[name]))
        assert renderer.render(Conversation(PLAIN), "answers", "here")
