"""Record formats, chat rendering and loss masks. Every expected mask is written by hand from the
template.
"""

import json

import pytest
from tokenizers import Regex, pre_tokenizers, processors

from mca_lite import data_chat
from mca_lite.args import DataArguments
from mca_lite.data_chat import chat_renderer
from mca_lite.data_encode import Encoder, Reader, mask_of_spans, num_learned
from mca_lite.data_files import DatasetSpec, read_records, resolve
from mca_lite.data_records import FORMATS, Format, conversations, detect_format
from mca_lite.tables import OBJECTIVES
from tests.shared.chats import conversation
from tests.shared.toy_tokenizer import (
    CHATML,
    CHATML_MARKS,
    QWEN3,
    byte_tokenizer,
    encode,
    encode_with,
)

CHATML_WITHOUT_PROMPT = CHATML[: CHATML.index("{% if")]
CHATML_SHORT_MARKS = CHATML_MARKS.replace(
    "{{ m['content'] }}<|im_end|>\n{% endgeneration %}",
    "{{ m['content'] }}{% endgeneration %}<|im_end|>\n",
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# an end-of-turn token, and one at the end of the text
PHI3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}"
)
# Cohere's: two tokens end an answer, the second is eos; some write the next header in any case
COHERE = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)
COHERE_OPEN = COHERE.replace("{% if add_generation_prompt %}", "{% if true %}")
# Phi-4-mini's: the token at the end of the text is beside that of the turn
PHI4 = PHI3.replace("<|end|>\n", "<|end|>").replace("|>\n", "|>")
# the system message moves to the last question, so that a part of a conversation is no beginning of
# the whole
MISTRAL = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' %}<s>"
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] "
    "{% if system and (loop.last or loop.index0 == messages | length - 2) %}{{ system "
    "}}\n\n{% endif %}"
    "{{ m['content'] }} [/INST]{% elif m['role'] == 'assistant' %} {{ m['content'] | "
    "trim }}</s>{% endif %}{% endfor %}"
)
# the prompt opens a thinking block that finished turns do not have
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% else %}<|Assistant|>{{ m['content'].split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)

PT, SFT, DPO = (OBJECTIVES[stage] for stage in ("pt", "sft", "dpo"))


def declared(entry: str, folder) -> DatasetSpec:
    """What a dataset is, with the dataset_info.json of a folder."""
    [spec] = resolve([entry], DataArguments(dataset=[entry], dataset_dir=str(folder)), SFT)
    return spec


def trained_runs(record, template: str, **options) -> list[str]:
    """The runs of trained tokens, decoded."""
    tokenizer, part = encode(record, template, **options)
    runs, before = [], 0
    for token, is_trained in zip(part.ids.tolist(), part.mask.tolist(), strict=True):
        if is_trained:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = is_trained
    return [tokenizer.decode(run) for run in runs]


TWO_TURNS = conversation("Hi", "Hello", "What is 2+3?", "5")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["Hello<|im_end|>", "5<|im_end|>"]),
        (CHATML_WITHOUT_PROMPT, ["Hello<|im_end|>", "5<|im_end|>"]),
        (CHATML_MARKS, ["Hello<|im_end|>", "5<|im_end|>"]),
        (CHATML_SHORT_MARKS, ["Hello<|im_end|>", "5<|im_end|>"]),
        (QWEN3, ["Hello<|im_end|>", "<think>\n\n</think>\n\n5<|im_end|>"]),
        (LLAMA3, ["Hello<|eot_id|>", "5<|eot_id|>"]),
        (PHI3, ["Hello<|end|>", "5<|end|>"]),
        (PHI4, ["Hello<|end|>", "5<|end|>"]),
        (COHERE, ["Hello<|end|></s>", "5<|end|></s>"]),
        (COHERE_OPEN, ["Hello<|end|></s>", "5<|end|></s>"]),
        (MISTRAL, [" Hello</s>", " 5</s>"]),
        (DEEPSEEK, ["Hello</s>", "5</s>"]),
    ],
    ids=[
        "chatml",
        "no_prompt",
        "marks",
        "short_marks",
        "qwen3",
        "llama3",
        "phi3",
        "phi4",
        "cohere",
        "cohere_open",
        "mistral",
        "deepseek",
    ],
)
def test_each_answer_with_its_end_of_turn_token_is_trained_and_nothing_else(template, expected):
    assert trained_runs(TWO_TURNS, template) == expected
    assert trained_runs(TWO_TURNS, template, mask_history=True) == expected[-1:]


def test_an_answer_that_repeats_the_question_is_found_in_the_right_place():
    tokenizer, part = encode(conversation("yes", "yes", "user", "assistant"), CHATML)
    text = "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n"
    start = 3 + len("user\nyes\nassistant\n")  # three special tokens, the rest a token a byte
    assert tokenizer.decode(part.ids[:start]) == text
    assert part.mask[: start + 5].tolist() == [0] * start + [1, 1, 1, 1, 0]
    assert trained_runs(conversation("yes", "yes", "user", "assistant"), CHATML) == [
        "yes<|im_end|>",
        "assistant<|im_end|>",
    ]


def test_a_system_message_that_moves_with_the_conversation_leaves_the_mask_right():
    record = conversation("5", "5", "5", "5", system="Be brief.")
    tokenizer, part = encode(record, MISTRAL)
    assert (
        tokenizer.decode(part.ids) == "<s>[INST] 5 [/INST] 5</s>[INST] Be brief.\n\n5 [/INST] 5</s>"
    )
    assert trained_runs(record, MISTRAL) == ["5</s>", "5</s>"]
    assert part.mask.tolist().index(1) == len("[INST] 5 [/INST] ") + 1


def test_thinking_that_the_template_drops_from_the_history_is_trained_before_it_is_dropped():
    record = conversation(
        "Hi", "<think>\nold\n</think>\n\nHello", "2+3?", "<think>\nadd\n</think>\n\n5"
    )
    last = "<think>\nadd\n</think>\n\n5<|im_end|>"
    assert trained_runs(record, QWEN3) == ["<think>\nold\n</think>\n\nHello<|im_end|>", last]
    assert trained_runs(record, QWEN3, mask_history=True) == [last]


def test_thinking_that_a_template_never_writes_is_counted():
    thinks = conversation("Hi", "Hello", "2+3?", "<think>\nadd\n</think>\n\n5")
    beside = conversation("Hi", "Hello", "2+3?", "5")
    beside["messages"][-1]["reasoning_content"] = "add"
    said = "conversations have thinking, and the chat template leaves it out"
    for record in (thinks, beside):
        for options in ({}, {"mask_history": True}, {"train_on_prompt": True}):
            [(what, found)] = encode(record, DEEPSEEK, **options)[1].tallies.items()
            assert what.startswith(said) and found == (1, "t.json:1")
            assert not encode(record, QWEN3, **options)[1].tallies
    assert not encode(TWO_TURNS, DEEPSEEK)[1].tallies


def test_tool_calls_are_trained_and_tool_results_are_not():
    call = {"name": "add", "arguments": {"a": 2}}
    turns = [
        ("human", "2+3?"),
        ("function_call", json.dumps(call)),
        ("observation", "5"),
        ("gpt", "It is 5."),
    ]
    record = {
        "conversations": [{"from": role, "value": text} for role, text in turns],
        "tools": '[{"name": "add"}]',
    }
    expected = [
        '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nIt is 5.<|im_end|>",
    ]
    assert trained_runs(record, QWEN3, form="sharegpt") == expected
    tokenizer, part = encode(record, QWEN3, form="sharegpt")
    assert '{"type": "function", "function": {"name": "add"}}' in tokenizer.decode(part.ids)
    openai = [
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    assert trained_runs({"messages": openai, "tools": [{"name": "add"}]}, QWEN3) == expected


def test_the_template_s_own_bos_is_not_doubled():
    tokenizer, part = encode(TWO_TURNS, LLAMA3)
    assert (part.ids == tokenizer.bos_token_id).sum() == 1 and part.ids[0] == tokenizer.bos_token_id


def test_train_on_prompt_trains_every_token():
    _, part = encode(TWO_TURNS, CHATML, train_on_prompt=True)
    assert part.mask.all() and num_learned(part.tokens) == len(part.ids) - 1


def test_token_borders_are_those_of_the_whole_text():
    merges = (("H", "i"), ("Ċ", "H"))  # "\nH" is never merged: "Hi" comes first
    tokenizer = byte_tokenizer(CHATML, merges)
    part = encode_with(tokenizer, conversation("a", "Hi"))
    whole = tokenizer(
        tokenizer.apply_chat_template(conversation("a", "Hi")["messages"], tokenize=False)
    )["input_ids"]
    assert part.ids.tolist() == whole
    assert part.ids[part.mask == 1].tolist() == [
        tokenizer.convert_tokens_to_ids(t) for t in ("Hi", "<|im_end|>")
    ]


def test_a_token_is_trained_if_one_of_its_characters_is():
    offsets = [(0, 2), (2, 4), (4, 4), (4, 7), (7, 8)]
    assert mask_of_spans(offsets, [(3, 6)]).tolist() == [0, 1, 1, 1, 0]
    assert mask_of_spans([], [(0, 1)]).tolist() == []


def test_alpaca_history_system_and_input_become_turns():
    record = {
        "instruction": "Add",
        "input": "2+3",
        "output": "5",
        "system": "Brief.",
        "history": [["Hi", "Hello"]],
    }
    tokenizer, part = encode(record, CHATML, form="alpaca", default_system="unused")
    roles = "<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    roles += "<|im_start|>assistant\nHello<|im_end|>\n"
    assert tokenizer.decode(part.ids).startswith(roles + "<|im_start|>user\nAdd\n2+3<|im_end|>\n")
    assert trained_runs(record, CHATML, form="alpaca") == ["Hello<|im_end|>", "5<|im_end|>"]
    del record["system"]
    tokenizer, part = encode(record, CHATML, form="alpaca", default_system="Default.")
    assert tokenizer.decode(part.ids).startswith("<|im_start|>system\nDefault.<|im_end|>")


def test_prompt_and_completion_may_be_texts_or_messages():
    as_text = {"prompt": "Hi", "completion": "Hello"}
    as_turns = {
        "prompt": [{"role": "user", "content": "Hi"}],
        "completion": [{"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}],
    }
    form = "prompt-completion"
    assert trained_runs(as_turns, CHATML, form=form) == ["Hello<|im_end|>"]
    as_response = {"prompt": "Hi", "response": "Hello"}
    assert trained_runs(as_response, CHATML, form=form) == ["Hello<|im_end|>"]
    for template in (CHATML, None):  # raw text, as TRL trains it, which takes no template
        tokenizer, part = encode(as_text, template, form=form)
        assert tokenizer.decode(part.ids) == "HiHello</s>"
        assert trained_runs(as_text, template, form=form) == ["Hello</s>"]
        whole = trained_runs(as_text, template, form=form, train_on_prompt=True)
        assert whole == ["HiHello</s>"]
        [(what, found)] = part.tallies.items()
        assert "without a chat template" in what and found == (1, "t.json:1")
    ended = as_text | {"completion": "Hello</s>"}
    assert trained_runs(ended, CHATML, form=form) == ["Hello</s>"]
    for more in ({"system": "s"}, {"tools": [{"name": "f"}]}, {"chat_template_kwargs": {"a": 1}}):
        with pytest.raises(ValueError, match="t.json:1: prompt and completion are texts.*messages"):
            encode(as_text | more, CHATML, form=form)
    with pytest.raises(ValueError, match="t.json:1: prompt and completion are texts"):
        encode(as_text, CHATML, form=form, default_system="s")


def test_a_text_prompt_gets_the_special_tokens_that_the_tokenizer_adds():
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    part = encode_with(tokenizer, {"prompt": "a", "completion": "b"}, form="prompt-completion")
    assert tokenizer.decode(part.ids) == "<s>ab</s>" and part.mask.tolist() == [0, 0, 1, 1]
    part = encode_with(tokenizer, TWO_TURNS)
    assert tokenizer.bos_token_id not in part.ids  # a chat template writes its own


@pytest.mark.parametrize("keys", [{}, {"train_on_prompt": True}])
def test_a_tokenizer_that_adds_the_end_token_gives_no_second_one(keys):
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.eos_token_id)]
    )
    for completion in ("a", "a</s>"):
        record = {"prompt": "q", "completion": completion}
        part = encode_with(tokenizer, record, "prompt-completion", **keys)
        assert tokenizer.decode(part.ids) == "qa</s>" and part.mask.tolist()[1:] == [1, 1]


def test_formats_are_detected_from_the_first_record():
    none = DatasetSpec("t")
    assert detect_format({"instruction": "", "output": ""}, none, SFT, "t:1") == "alpaca"
    assert (
        detect_format({"conversations": [{"from": "human", "value": ""}]}, none, SFT, "t:1")
        == "sharegpt"
    )
    assert (
        detect_format({"messages": [{"role": "user", "content": ""}]}, none, SFT, "t:1") == "openai"
    )
    assert (
        detect_format({"messages": [{"from": "human", "value": ""}]}, none, SFT, "t:1")
        == "sharegpt"
    )
    assert detect_format({"prompt": "", "completion": ""}, none, SFT, "t:1") == "prompt-completion"
    assert detect_format({"text": ""}, none, PT, "t:1") == "text"
    assert (
        detect_format({"body": ""}, DatasetSpec("t", columns={"prompt": "body"}), PT, "t:1")
        == "text"
    )
    with pytest.raises(ValueError, match=r"t:1: stage sft .*alpaca .*\['text'\].*stage: pt"):
        detect_format({"text": ""}, none, SFT, "t:1")
    with pytest.raises(ValueError, match="t:1: stage pt expects .*the column 'text'.*for sft"):
        detect_format({"messages": []}, none, PT, "t:1")


def test_a_new_record_format_is_one_row_of_the_table(monkeypatch):
    def fits(record, spec, pairs):
        return "q" in record

    def prompt(record, spec, where):
        return [{"role": "user", "content": record["q"]}]

    def answer(record, spec, where):
        return [{"role": "assistant", "content": record["a"]}]

    row = Format(fits, prompt, answer, alone="q, a", in_pairs="q")
    monkeypatch.setitem(FORMATS, "question-answer", row)
    none = DatasetSpec("t")
    record = {"q": "Hi", "a": "Hello"}
    assert detect_format(record, none, SFT, "t:1") == "question-answer"
    assert trained_runs(record, CHATML, form="question-answer") == ["Hello<|im_end|>"]
    pair = {"q": "Hi", "chosen": "Hello", "rejected": "What"}
    assert detect_format(pair, none, DPO, "t:1") == "question-answer"
    found = conversations(pair, none, "question-answer", True, None, "t:1")
    assert [[turn["content"] for turn in one.messages] for one in found] == [
        ["Hi", "Hello"],
        ["Hi", "What"],
    ]
    with pytest.raises(ValueError, match=r"stage sft expects .*question-answer \(q, a\); got"):
        detect_format({"x": ""}, none, SFT, "t:1")


@pytest.mark.parametrize(
    ("record", "form", "message"),
    [
        ({"instruction": "a"}, "alpaca", "'output' is missing"),
        ({"instruction": "a", "output": 3}, "alpaca", "'output': expected a text, got 3"),
        (
            {"instruction": "a", "output": "b", "history": [["x"]]},
            "alpaca",
            "history: expected a list of",
        ),
        (conversation("a"), "openai", "ends after user"),
        ({"messages": []}, "openai", "ends after the beginning"),
        (
            {"messages": [{"role": "user", "content": "a"}] * 2},
            "openai",
            r"message 2 \(user\) follows user",
        ),
        ({"messages": [{"role": "bot", "content": "a"}]}, "openai", "unknown role 'bot'"),
        ({"messages": [{"role": "user"}]}, "openai", "neither content nor tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "openai", "only these"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "sharegpt", "unknown role 'alien'"),
        ({"conversations": "a"}, "sharegpt", "'conversations': expected a list, got 'a'"),
        (
            {"conversations": [{"from": "function_call", "value": "{"}]},
            "sharegpt",
            "a tool call: not valid JSON",
        ),
        (["a"], "alpaca", r"expected an object, got \['a'\]"),
    ],
)
def test_a_bad_record_is_an_error_with_its_place(record, form, message):
    with pytest.raises(ValueError, match=rf"t\.json:1.*{message}"):
        encode(record, CHATML, form=form)


def test_a_template_that_rewrites_answers_is_an_error_that_says_what_to_do():
    shouting = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}")
    with pytest.raises(ValueError, match="t.json:1: cannot tell which part .* generation"):
        encode(TWO_TURNS, shouting)
    refusing = CHATML + "{% if messages | length > 3 %}{{ raise_exception('too many') }}{% endif %}"
    with pytest.raises(ValueError, match="t.json:1: the chat template refuses .*too many"):
        encode(TWO_TURNS, refusing)


LOOPS = "{% for i in range(2000) %}" * 2 + "{% endfor %}" * 2


def test_a_template_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(data_chat, "RENDER_S", 0.05)
    with pytest.raises(ValueError, match="a question .*: the chat template takes longer than"):
        encode(TWO_TURNS, LOOPS + CHATML)


def test_a_template_that_does_not_end_for_one_record_is_refused_with_its_place(monkeypatch):
    monkeypatch.setattr(data_chat, "RENDER_S", 0.1)
    late = f"{{% if 'sesame' in messages[0]['content'] %}}{LOOPS}{{% endif %}}" + CHATML
    assert trained_runs(TWO_TURNS, late)[-1] == "5<|im_end|>"
    for skips in ("stop", "skip"):  # it cannot be ended, and would take the time of the others
        with pytest.raises(ValueError, match="t.json:1: the chat template takes longer than"):
            encode(conversation("Open sesame", "No"), late, on_bad_record=skips)


@pytest.mark.parametrize(
    "piece, words",
    [
        ("{% include 'x' %}", "TypeError: no loader"),
        ("{% import 'x' as y %}", "TypeError: no loader"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ [][5].x }}", "has no element 5"),
    ],
)
def test_what_a_template_meets_is_said_in_words(piece, words):
    with pytest.raises(ValueError, match=f"the chat template refuses a question .*{words}"):
        encode(TWO_TURNS, piece + CHATML)
    later = f"{{% if messages | length > 2 %}}{piece}{{% endif %}}" + CHATML
    with pytest.raises(ValueError, match=f"t.json:1: the chat template refuses .*{words}"):
        encode(TWO_TURNS, later)


def test_a_tokenizer_without_chat_template_is_an_error_that_says_what_to_set():
    with pytest.raises(ValueError, match="no chat template.*set chat_template to one of chatml"):
        encode(TWO_TURNS, None)


def test_an_expression_of_a_tokenizer_that_takes_too_long_is_named():
    """tokenizers' Rust panics then, which is no Exception."""
    tokenizer = byte_tokenizer(CHATML)
    endless = Regex("(([a-z])+.)+[A-Z]([a-z])+$")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(endless, "isolated")
    turns = [{"role": "user", "content": "a" * 60}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match="gave up on a text.*json has an expression"):
        encode_with(tokenizer, {"messages": turns})


def test_readers_give_records_with_their_lines(tmp_path):
    (tmp_path / "a.json").write_text('[\n {"n": 1},\n\n {"n":\n 2}, {"n": 3}\n]\n')
    (tmp_path / "b.json").write_text('{"n": 1}\n{"n": 2}\n')
    (tmp_path / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"n": 1}\n\n{"n": "\\r"}\n')
    (tmp_path / "d.txt").write_bytes(b"one\r\n \r\n  two \n")
    records = {path.name: list(read_records(str(path))) for path in tmp_path.iterdir()}
    assert records["a.json"] == [
        (f"{tmp_path}/a.json:{number}", {"n": number}) for number in (1, 2, 3)
    ]
    assert records["b.json"] == [(f"{tmp_path}/b.json:{n}", {"n": n}) for n in (1, 2)]
    assert records["c.jsonl"] == [
        (f"{tmp_path}/c.jsonl:1", {"n": 1}),
        (f"{tmp_path}/c.jsonl:3", {"n": "\r"}),
    ]
    assert records["d.txt"] == [(f"{tmp_path}/d.txt:1", "one"), (f"{tmp_path}/d.txt:3", "  two ")]


def test_parquet_is_read_where_pyarrow_is_there(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    file = str(tmp_path / "a.parquet")
    assert list(read_records(file)) == [(f"{file}:1", {"text": "a"}), (f"{file}:2", {"text": "b"})]


def test_objects_in_parquet_have_no_fields_of_others(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    calls = [{"name": "add", "arguments": {"a": 2}}, {"name": "now", "arguments": {"zone": "Z"}}]
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]
    rows = [{"n": None, "messages": [{"role": "user", "content": "a"}, turn]} for turn in turns]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [record for _, record in read_records(str(tmp_path / "a.parquet"))] == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"n": 1}\n{"n": \n', r"a\.jsonl:2: not valid JSON"),
        ("a.json", b'[{"n": 1},\n{"n" 2}]', r"a\.json: not valid JSON: .* line 2"),
        ("a.json", b'[{"n": 1},\n', r"a\.json: not valid JSON: Expecting value: line 2"),
        ("a.json", b'[{"n": 1}] x', r"a\.json: not valid JSON: Extra data"),
        ("a.jsonl", b'1\n{"n": %s}\n' % (b"9" * 5000), r"a\.jsonl:2: .* \(4300 digits\)"),
        ("a.json", b'[1,\n{"n": %s}]' % (b"9" * 5000), r"a\.json: .* \(4300 digits\)"),
        ("a.txt", b"good\n\xff\xff\n", r"a\.txt:2: expected UTF-8"),
    ],
)
def test_a_broken_file_is_an_error_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_records(str(tmp_path / name)))


def test_dataset_info_names_files_columns_and_tags(tmp_path):
    (tmp_path / "x.jsonl").write_text("{}")
    info = {
        "x": {
            "file_name": "x.jsonl",
            "columns": {"prompt": "text"},
            "num_samples": 3,
            "split": "train",
        },
        "hub": {"ms_hub_url": "a/b"},
        "pairs": {"file_name": "x.jsonl", "ranking": True},
        "typo": {"file_name": "x.jsonl", "columns": {"promt": "text"}},
        "film": {"file_name": "x.jsonl", "columns": {"films": "films"}},
        "gone": {"file_name": "gone.json"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    spec = declared("x", tmp_path)
    assert (spec.files, spec.columns, spec.num_samples) == (
        {str(tmp_path / "x.jsonl"): ".jsonl"},
        {"prompt": "text"},
        3,
    )
    assert (
        declared(str(tmp_path), tmp_path / "data").files
        == spec.files
        == declared("x.jsonl", tmp_path).files
    )
    for name, message in [
        ("hub", "hub: set file_name or hf_hub_url instead of ms_hub_url"),
        ("pairs", "stage dpo"),
        ("typo", "columns: unknown key 'promt': expected prompt, query"),
        ("film", "columns: unknown key 'films'"),
        ("gone", "there is no file"),
        ("hubb", "expected a file, a folder, or a name in .*it has .*hub"),
    ]:
        with pytest.raises(ValueError, match=message):
            declared(name, tmp_path)


def test_tags_of_dataset_info_rename_roles():
    tags = {
        "role_tag": "who",
        "content_tag": "says",
        "user_tag": "me",
        "assistant_tag": "it",
        "system_tag": "sys",
    }
    record = {"log": [{"who": "me", "says": "Hi"}, {"who": "it", "says": "Hello"}]}
    for form in ("sharegpt", "openai"):
        spec = DatasetSpec("t", {}, form, {"messages": "log"}, tags)
        assert detect_format(record, spec, SFT, "t:1") == form
        tokenizer, part = encode(record, CHATML, form=form, spec=spec)
        text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        assert tokenizer.decode(part.ids) == text


# what no reader takes

LONE = '{"text": "half \\ud83d a pair"}'


@pytest.mark.parametrize(
    "name, text, place",
    [
        ("lone.jsonl", f'{{"text": "\\ud83d\\ude00"}}\n{LONE}\n', "lone.jsonl:2"),
        ("lone.json", f'[{{"text": "a"}},\n\n{LONE}]', "lone.json: "),
        ("key.jsonl", '{"\\udc00": 1}', "key.jsonl:1"),
        ("deep.jsonl", '{"text": "a"}\n' + "[" * 100_000, "deep.jsonl:2"),
        ("deep.json", "[" * 100_000, "deep.json: "),
    ],
)
def test_half_a_character_and_deep_nesting_are_refused_with_their_line(tmp_path, name, text, place):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=place):
        list(read_records(str(tmp_path / name)))


def test_marks_of_video_and_audio_are_text_for_a_model_of_texts_with_one_note(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["<video>", "a", "<audio> and <video>", "<|video_pad|>"]
    path.write_text("".join(json.dumps(conversation(text, "b")) + "\n" for text in texts))
    tokenizer = byte_tokenizer(CHATML)
    data_args = DataArguments(dataset=["x"])
    reader = Reader(DatasetSpec("x", {str(path): ".jsonl"}), SFT, data_args)
    encoder = Encoder(tokenizer, chat_renderer(tokenizer, data_args)[0], SFT, data_args)
    samples, tally = encoder.encode([record for record, _ in reader.records()])
    assert len(samples) == 4
    [line] = tally.lines()
    assert line.startswith("3 records have marks of video or audio") and "a.jsonl:1" in line


@pytest.mark.parametrize(
    "column, value",
    [("kto_tag", False), ("label", True), ("videos", ["a"]), ("video", "a.mp4"), ("audio", "a")],
)
def test_records_that_mean_something_else_are_refused_by_path_too(tmp_path, column, value):
    first, later, data_args = (
        tmp_path / "a.jsonl",
        tmp_path / "b.jsonl",
        DataArguments(dataset=["x"]),
    )
    other = json.dumps(TWO_TURNS | {"text": "a", column: value}) + "\n"
    first.write_text(other)
    later.write_text(json.dumps(TWO_TURNS | {column: None}) + "\n" + other)

    def read(path, objective) -> list:
        reader = Reader(DatasetSpec("x", {str(path): ".jsonl"}), objective, data_args)
        said = [said for (_, said, _), _ in reader.records()]
        for error in said:
            if isinstance(error, ValueError):
                raise error
        return said

    with pytest.raises(ValueError, match=f"a.jsonl:1: .*the column '{column}'"):
        read(first, SFT)
    with pytest.raises(ValueError, match=f"b.jsonl:2: .*the column '{column}'"):
        read(later, SFT)
    if column in ("kto_tag", "label"):
        assert read(first, PT) == ["a"]
    else:
        with pytest.raises(ValueError, match=f"a.jsonl:1: .*the column '{column}'"):
            read(first, PT)


def test_many_brackets_are_no_depth(tmp_path):
    records = [{"a": [[]] * 500, "b": "[" * 500}]
    (tmp_path / "a.json").write_text(json.dumps(records))
    assert [record for _, record in read_records(str(tmp_path / "a.json"))] == records


def test_a_record_far_longer_than_cutoff_len_is_refused_with_its_size():
    long = "a" * 1_000_000
    words = r"t.json:1: .* 1,000,\d\d\d characters, .*cutoff_len 128 .* 1,000,000"
    with pytest.raises(ValueError, match=words):
        encode(conversation(long, "b"), CHATML, cutoff_len=128)
    with pytest.raises(ValueError, match=words):
        encode({"prompt": long, "completion": "b"}, None, form="prompt-completion", cutoff_len=128)
    data_args = DataArguments(dataset=["t"], cutoff_len=1_000_000)
    Encoder(byte_tokenizer(CHATML), None, SFT, data_args).check_size(32_000_000, "t.json:1")
    for packing in (True, False):
        data_args = DataArguments(dataset=["t"], cutoff_len=8, packing=packing)
        encoder = Encoder(byte_tokenizer(), None, PT, data_args)
        if packing:  # nothing is cut off texts that are joined
            encoder.check_size(1_000_001, "t.json:1")
            continue
        with pytest.raises(ValueError, match="t.txt:1: the record has 1,000,001 characters"):
            encoder.encode([("t.txt:1", long + "b", {})])


def test_empty_answers_are_left_out_and_counted_with_the_first_place():
    _, encoded = encode(conversation("Hi", " "), CHATML)
    what = "samples have an empty answer and were left out"
    assert encoded.tallies == {what: (1, "t.json:1")} and not encoded.lengths


def test_a_whole_pair_of_surrogates_is_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n')
    assert [record for _, record in read_records(str(tmp_path / "a.jsonl"))] == [{"text": "😀"}]


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(columns=["text"]), "'columns': expected an object"),
        (dict(columns={"prompt": None}), "columns: 'prompt' is missing or null"),
        (dict(tags="role"), "'tags': expected an object"),
        (dict(file_name=["a.jsonl"]), "'file_name': expected a text"),
        (dict(num_samples="ten"), "'num_samples': expected a count"),
        (dict(formatting=["alpaca"]), "'formatting': expected a text"),
        (dict(formatting="alpacca"), "formatting: expected alpaca"),
        (dict(num_samples=0), "num_samples: expected a count from 1 on"),
    ],
)
def test_a_declaration_of_other_types_is_named(tmp_path, change, words):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    info = {"mine": {"file_name": "a.jsonl", **change}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=f"dataset_info.json: dataset 'mine': {words}"):
        declared("mine", tmp_path)


def test_null_columns_are_none_and_deep_nesting_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    info = {"mine": {"file_name": "a.jsonl", "columns": None, "tags": None}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    assert declared("mine", tmp_path).columns == {}
    (tmp_path / "dataset_info.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="dataset_info.json: not valid JSON"):
        declared("mine", tmp_path)


def test_a_broken_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="a.parquet"):
        list(read_records(str(tmp_path / "a.parquet")))


QUESTION = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
OTHER = {"role": "assistant", "content": "No"}
# name in FORMATS -> a record of it, of the stage pt, of dpo, or of sft
FORMS = {
    "text": ("pt", {"text": "Hello"}),
    "conversations": ("dpo", {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, OTHER]}),
    "alpaca": ("sft", {"instruction": "Hi", "input": "", "output": "Hello"}),
    "openai": ("sft", {"messages": [QUESTION, ANSWER]}),
    "sharegpt": (
        "sft",
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    ),
    "prompt-completion": ("sft", {"prompt": [QUESTION], "completion": [ANSWER]}),
    "prompt": ("dpo", {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}),
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_of_each_form_is_read(tmp_path, form):
    stage, record = FORMS[form]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record))
    reader = Reader(
        DatasetSpec("x", {str(path): ".jsonl"}), OBJECTIVES[stage], DataArguments(dataset=["x"])
    )
    [((_, read, _), _)] = reader.records()
    assert reader.formats == {str(path): form}
    if stage == "pt":
        assert read == "Hello"
        return
    answers = ["Hello", "No"] if stage == "dpo" else ["Hello"]
    assert [one.messages[-1]["content"] for one in read] == answers
    assert [one.messages[0] for one in read] == [QUESTION] * len(answers)


def test_blocks_of_reasoning_and_calls_are_read():
    calls = [{"name": "add", "arguments": {"a": 2}}, {"name": "sub", "arguments": {"a": 3}}]
    blocks = [
        {"type": "reasoning", "value": "I add."},
        {"type": "text", "value": "Well."},
        *({"type": "tool_call", "value": json.dumps(call)} for call in calls),
    ]
    turns = [QUESTION, {"role": "assistant", "content": blocks}]
    spec = DatasetSpec("t")
    [read] = conversations({"messages": turns}, spec, "openai", False, None, "t:1")
    assert read.messages[1] == {
        "role": "assistant",
        "content": "Well.",
        "reasoning_content": "I add.",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }
    turns[1]["content"] = [{"type": "thought", "value": "x"}]
    with pytest.raises(ValueError, match="t:1: content: expected .* tool_call.*got .*'thought'"):
        conversations({"messages": turns}, spec, "openai", False, None, "t:1")
