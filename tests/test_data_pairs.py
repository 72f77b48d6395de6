"""Preference pairs: formats, masks, cutting, what is left out, the cache. A token is a byte;
numbers are counted by hand.
"""

import functools
import json

import numpy as np
import pytest
import torch

from mca_lite import tables
from mca_lite.args import DataArguments
from mca_lite.batch import split
from mca_lite.data import load_datasets
from mca_lite.data_batches import BatchPlan
from mca_lite.data_encode import Encoder
from mca_lite.data_files import DatasetSpec
from mca_lite.data_records import conversations, detect_format, prompt_and_answer
from mca_lite.files import IGNORE_INDEX
from tests.shared.chats import assistant, load_files, user, write_records
from tests.shared.commands import assert_names
from tests.shared.toy_tokenizer import CHATML, QWEN3, byte_tokenizer

PROMPT = len(
    "SuserNaENSassistantN"
)  # tokens of <|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n
NONE = DatasetSpec("t")
load_pairs = functools.partial(load_files, stage="dpo", cutoff_len=4096)


def shown(dataset, template=CHATML) -> list[tuple]:
    """(prompt, chosen, rejected) of each pair: what is decoded before the first label, and what has
    labels.
    """
    tokenizer, pairs = byte_tokenizer(template), []
    for sample in dataset:
        prompts, answers = [], []
        for side in sample:
            trained = side["labels"] != IGNORE_INDEX
            prompts.append(tokenizer.decode(side["input_ids"][: trained.argmax() + 1]))
            answers.append(tokenizer.decode(side["labels"][trained]))
        assert prompts[0] == prompts[1]
        pairs.append((prompts[0], *answers))
    return pairs


CHAT = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
FORMATS = {
    "sharegpt": {
        "conversations": [{"from": "human", "value": "a"}],
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    },
    "openai": {"messages": [user("a")], "chosen": assistant("good"), "rejected": assistant("bad")},
    "alpaca": {"instruction": "a", "input": "", "chosen": "good", "rejected": "bad"},
    "prompt": {"prompt": "a", "chosen": "good", "rejected": "bad"},
    "prompt of messages": {
        "prompt": [user("a")],
        "chosen": [assistant("good")],
        "rejected": [assistant("bad")],
    },
    "conversations": {
        "chosen": [user("a"), assistant("good")],
        "rejected": [user("a"), assistant("bad")],
    },
    "conversations of sharegpt": {
        side: [{"from": "human", "value": "a"}, {"from": "gpt", "value": text}]
        for side, text in (("chosen", "good"), ("rejected", "bad"))
    },
    "conversations and prompt": {
        "prompt": "a",
        "messages": [user("a"), assistant("good")],
        "chosen": [user("a"), assistant("good")],
        "rejected": [user("a"), assistant("bad")],
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_prompt_and_both_answers(tmp_path, name):
    file = write_records(tmp_path / "a.jsonl", FORMATS[name])
    bundle = load_pairs(tmp_path, file)
    assert f"{file}: {name.split()[0]}-chosen-rejected records" in bundle.report
    assert shown(bundle.train) == [(CHAT, "good<|im_end|>", "bad<|im_end|>")]


def test_pairs_are_shown_shifted_counted_and_known_by_length(tmp_path):
    bundle = load_pairs(
        tmp_path,
        write_records(tmp_path / "a.jsonl", FORMATS["prompt"], FORMATS["prompt"] | {"chosen": "x"}),
    )
    train = bundle.train
    b, a, d = byte_tokenizer().convert_tokens_to_ids(["b", "a", "d"])
    end = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
    rejected = train[0][1]
    assert (
        rejected["input_ids"][-4:].tolist() == [b, a, d, end]
        and rejected["input_ids"].dtype == np.int64
    )
    assert rejected["labels"].tolist() == [IGNORE_INDEX] * (PROMPT - 1) + [
        b,
        a,
        d,
        end,
        IGNORE_INDEX,
    ]
    assert train.documents_per_sample == 2
    assert train.document_lengths.tolist() == [[PROMPT + 5, PROMPT + 4], [PROMPT + 2, PROMPT + 4]]
    tokens = [2 * PROMPT + 9, 2 * PROMPT + 6]
    squares = [(PROMPT + 5) ** 2 + (PROMPT + 4) ** 2, (PROMPT + 2) ** 2 + (PROMPT + 4) ** 2]
    assert train.lengths.tolist() == tokens
    assert train.work.T.tolist() == [tokens, squares]
    assert (train.num_tokens, train.num_trained_tokens) == (4 * PROMPT + 15, 5 + 4 + 2 + 4)
    report = "\n".join(bundle.report)
    assert "2 records -> 2 pairs" in report and "train: 2 pairs" in report
    assert (
        "first chosen, trained tokens in «»" in report and "assistant\\n«bad<|im_end|>»'" in report
    )
    plan = BatchPlan(2, 1, 1, 0, 2, seed=0, shuffle=False, costs=train.lengths)
    assert plan.step(0, 0) == [[0]]  # the dearer one goes to rank 0


def test_splits_mixes_and_fingerprints_are_those_of_samples(tmp_path):
    files = [
        write_records(
            tmp_path / f"{n}.jsonl", *({"prompt": "a", "chosen": c, "rejected": "-"} for c in chars)
        )
        for n, chars in enumerate(("bc", "defghijk"))
    ]
    whole = load_pairs(tmp_path, *files)
    split = load_pairs(
        tmp_path, *files, val_size=3, mix_weights=[1, 1], mix_strategy="interleave_over"
    )
    assert split.train.documents_per_sample == split.eval.documents_per_sample == 2
    assert len(split.train) >= 7 and len(split.eval) == 3
    heldout = {chosen for _, chosen, _ in shown(split.eval)}
    assert heldout.isdisjoint(chosen for _, chosen, _ in shown(split.train))
    assert (
        whole.train.fingerprint
        == load_pairs(tmp_path, *files).train.fingerprint
        != split.train.fingerprint
    )
    assert whole.train.document_lengths.shape == (10, 2) and whole.train.subset(
        [3, 0]
    ).document_lengths.shape == (2, 2)
    with pytest.raises(IndexError):
        whole.train.shards[0][2]


def test_only_the_last_answer_is_trained(tmp_path):
    history = [user("a"), assistant("old"), user("b")]
    record = {"messages": history, "chosen": assistant("good"), "rejected": assistant("bad")}
    whole = {"chosen": [*history, assistant("good")], "rejected": [*history, assistant("bad")]}
    alpaca = {"instruction": "b", "history": [["a", "old"]], "chosen": "good", "rejected": "bad"}
    files = [
        write_records(tmp_path / f"{n}.jsonl", r) for n, r in enumerate((record, whole, alpaca))
    ]
    pairs = shown(load_pairs(tmp_path, *files).train)
    prompt = CHAT + "old<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert pairs == [(prompt, "good<|im_end|>", "bad<|im_end|>")] * 3


def test_system_tools_and_thinking_are_those_of_the_template(tmp_path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {
        **assistant(""),
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
    }
    record = {"prompt": "a", "tools": tools, "chosen": [call], "rejected": "bad"}
    [(prompt, chosen, rejected)] = shown(
        load_pairs(tmp_path, write_records(tmp_path / "a.jsonl", record), template=QWEN3).train,
        QWEN3,
    )
    assert '"name": "add"' in prompt
    assert (
        chosen == '<think>\n\n</think>\n\n<tool_call>{"name": "add", "arguments": '
        "{}}</tool_call><|im_end|>"
    )
    assert rejected == "<think>\n\n</think>\n\nbad<|im_end|>"
    with_system = load_pairs(
        tmp_path,
        write_records(tmp_path / "b.jsonl", FORMATS["conversations"]),
        default_system="Brief.",
    )
    assert shown(with_system.train)[0][0] == "<|im_start|>system\nBrief.<|im_end|>\n" + CHAT


def test_long_pairs_lose_the_beginning_of_the_prompt_then_the_end_of_an_answer(tmp_path):
    long, record = "p" * 30, {"chosen": "good", "rejected": "b"}
    file = write_records(
        tmp_path / "a.jsonl",
        {"prompt": "a", **record},
        {"prompt": long, **record},
        {"prompt": "a", "chosen": "g" * 50, "rejected": "b"},
    )
    limit = PROMPT + 6  # tokens: the prompt, good, <|im_end|> and its newline
    bundle = load_pairs(tmp_path, file, cutoff_len=limit - 1)
    pairs = shown(bundle.train)
    assert pairs[0] == (CHAT, "good<|im_end|>", "b<|im_end|>")
    # 29 tokens of the prompt are too many, counted from the longer side, and both sides lose the
    # same ones
    kept = CHAT.replace("a<|im_end|>", long + "<|im_end|>")[
        len("<|im_start|>user\n") + 29 - len("SuserN") :
    ]
    assert pairs[1] == (kept, "good<|im_end|>", "b<|im_end|>")
    assert pairs[2] == (
        "\n",
        "g" * (limit - 1),
        "b<|im_end|>",
    )  # one token of the prompt is left to predict from
    assert bundle.train.document_lengths.tolist() == [
        [limit - 1, limit - 4],
        [limit - 1, limit - 4],
        [limit - 1, 3],
    ]
    warnings = [line.strip() for line in bundle.report if "warning" in line]
    [of_prompts] = warnings
    assert_names(of_prompts, "2 pairs", f"cutoff_len {limit - 1}", "prompt", f"{file}:2")


def test_identical_and_empty_pairs_are_left_out_counted_and_named(tmp_path):
    file = write_records(
        tmp_path / "a.jsonl",
        FORMATS["prompt"],
        {"prompt": "a", "chosen": "same", "rejected": "same"},
        {"prompt": "a", "chosen": "good", "rejected": " \n"},
        {"prompt": "a", "chosen": "", "rejected": ""},
        {
            "prompt": "a",
            "chosen": "x" * 99 + "y",
            "rejected": "x" * 99 + "z",
        },  # the same once they are cut
    )
    bundle = load_pairs(tmp_path, file, cutoff_len=PROMPT + 6)
    assert len(bundle.train) == 1
    same, empty = (line for line in bundle.report if "left out" in line)
    assert_names(same, "2 pairs", "same chosen and rejected", f"{file}:2")
    assert_names(empty, "2 pairs", "empty answer", f"{file}:3")
    with pytest.raises(
        ValueError, match="no pair is left to train on(.|\n)*same chosen and rejected"
    ):
        load_pairs(
            tmp_path,
            write_records(tmp_path / "b.jsonl", {"prompt": "a", "chosen": "b", "rejected": "b"}),
        )


def test_a_token_that_joins_prompt_and_answer_belongs_to_the_answer(tmp_path):
    tokenizer = byte_tokenizer(
        CHATML, (("Ċ", "Ċ"), ("a", "b"))
    )  # "\n\n" is one token where more white space follows
    file = write_records(
        tmp_path / "a.jsonl", {"prompt": "ppppp", "chosen": "\n\nx", "rejected": "ab"}
    )
    options = dict(dataset=[file], cache_dir=str(tmp_path / "cache"))
    short = load_datasets(DataArguments(**options, cutoff_len=3), "dpo", tokenizer).train[0]
    # the last token that both prompts have is the t of assistant: it stays, and nothing of an
    # answer goes before it
    assert [tokenizer.decode(side["input_ids"]) for side in short] == ["t\n\n\n", "t\nab"]
    options = DataArguments(**options, cutoff_len=PROMPT + 5)
    sides = load_datasets(options, "dpo", tokenizer).train[0]
    shared = (
        "ser\nppppp<|im_end|>\n<|im_start|>assistant\n"  # the same two tokens are gone from both
    )
    texts = [tokenizer.decode(side["input_ids"]) for side in sides]
    assert texts == [shared + "\n\nx<|im_end|>", shared + "ab<|im_end|>"]
    trained = [tokenizer.decode(side["labels"][side["labels"] != IGNORE_INDEX]) for side in sides]
    assert trained == ["\n\n\nx<|im_end|>", "ab<|im_end|>"]


def test_the_cache_knows_pairs_from_conversations(tmp_path, monkeypatch):
    both = {"instruction": "a", "output": "c", "chosen": "good", "rejected": "bad"}
    file, folders = write_records(tmp_path / "a.jsonl", both), set()
    for stage, options in (
        ("dpo", {}),
        ("dpo", {}),
        ("sft", {}),
        ("dpo", {"cutoff_len": 99}),
        ("sft", {"mask_history": True}),
    ):
        folders.add(load_pairs(tmp_path, file, stage=stage, **options).train.shards[0].folder.name)
    assert len(folders) == 4
    monkeypatch.setattr(Encoder, "encode", None)  # what is cached is not tokenised again
    assert shown(load_pairs(tmp_path, file).train) == [(CHAT, "good<|im_end|>", "bad<|im_end|>")]


def test_a_stage_that_a_script_registers_reads_its_kind_of_records(tmp_path, monkeypatch):
    row = tables.Objective(stage="mine", records=tables.PAIRS)
    monkeypatch.setitem(tables.OBJECTIVES, "mine", row)
    file = write_records(tmp_path / "a.jsonl", FORMATS["prompt"])
    bundle = load_pairs(tmp_path, file, stage="mine", packing=True)
    assert "train: 1 pairs" in "\n".join(bundle.report) and len(bundle.train[0]) == 2
    other = write_records(tmp_path / "b.jsonl", {"prompt": "a", "completion": "b"})
    with pytest.raises(ValueError, match="stage mine expects pairs"):
        load_pairs(tmp_path, other, stage="mine")
    with pytest.raises(ValueError, match="stage 'yours': expected one of pt, sft, dpo"):
        load_pairs(tmp_path, file, stage="yours")


def test_dataset_info_declares_pairs(tmp_path):
    columns = {"messages": "log", "chosen": "yes", "rejected": "no"}
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "me", "assistant_tag": "it"}
    record = {
        "log": [{"who": "me", "says": "a"}],
        "yes": {"who": "it", "says": "good"},
        "no": {"who": "it", "says": "bad"},
    }
    write_records(tmp_path / "a.jsonl", record)
    write_records(tmp_path / "b.jsonl", {"question": "a", "yes": "good", "no": "bad"})
    write_records(tmp_path / "c.jsonl", {"instruction": "a", "output": "b"})
    named = {"prompt": "question", "chosen": "yes", "rejected": "no"}
    info = {
        "a": {
            "file_name": "a.jsonl",
            "ranking": True,
            "formatting": "sharegpt",
            "columns": columns,
            "tags": tags,
        },
        "b": {"file_name": "b.jsonl", "ranking": True, "columns": named},
        "c": {"file_name": "c.jsonl", "ranking": True},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    bundle = load_pairs(tmp_path, "a", "b", dataset_dir=str(tmp_path))
    assert shown(bundle.train) == [(CHAT, "good<|im_end|>", "bad<|im_end|>")] * 2
    with pytest.raises(ValueError, match=r"c\.jsonl:1: stage dpo .*\['instruction', 'output'\]"):
        load_pairs(tmp_path, "c", dataset_dir=str(tmp_path))
    for stage in ("sft", "pt"):
        with pytest.raises(ValueError, match="'a': preference pairs .* for stage dpo"):
            load_pairs(tmp_path, "a", dataset_dir=str(tmp_path), stage=stage)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "conversations and prompt"])
def test_sft_over_pairs_is_refused(tmp_path, name):
    words = r"a\.jsonl:1: (.*for dpo|.*for stage dpo|'output' is missing)"
    with pytest.raises(ValueError, match=words):
        load_pairs(tmp_path, write_records(tmp_path / "a.jsonl", FORMATS[name]), stage="sft")


def test_sft_takes_the_conversation_that_stands_beside_pairs(tmp_path):
    train = load_pairs(
        tmp_path,
        write_records(tmp_path / "a.jsonl", FORMATS["conversations and prompt"]),
        stage="sft",
    ).train
    assert len(train) == 1 and train.num_trained_tokens == len("goodE")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "a", "completion": "b"},
            r"stage dpo expects pairs.*\['completion', 'prompt'\]",
        ),
        ({"chosen": "a", "rejected": "b"}, "stage dpo expects pairs.*for dpo"),
        (["a"], r"expected an object, got \['a'\]"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "'rejected' is missing or null"),
        (
            {"prompt": "a", "chosen": "b", "rejected": 3},
            "'rejected': expected a list or a text, got 3",
        ),
        (
            {"prompt": "a", "chosen": [user("b")], "rejected": "c"},
            "chosen: the conversation ends after user",
        ),
        (
            {"prompt": [user("a"), assistant("b")], "chosen": "c", "rejected": "d"},
            "chosen: message 3 .assistant. follows assistant",
        ),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("x"), assistant("c")]},
            "differ from message 1 on",
        ),
        (
            {
                "chosen": [user("a"), assistant("b"), user("c"), assistant("d")],
                "rejected": [user("a"), assistant("b")],
            },
            "differ from message 3 on, and have 4 and 2 messages",
        ),
        (
            {
                "prompt": "x",
                "chosen": [user("a"), assistant("b")],
                "rejected": [user("a"), assistant("c")],
            },
            "begin with another prompt than",
        ),
        (
            {"instruction": 3, "chosen": "b", "rejected": "c"},
            "'instruction': expected a text, got 3",
        ),
        (
            {"messages": [user("a")], "chosen": {"role": "assistant"}, "rejected": "c"},
            "chosen: .*neither content nor",
        ),
    ],
)
def test_a_bad_pair_is_an_error_with_its_place(record, message):
    with pytest.raises(ValueError, match=rf"t\.json:1.*{message}"):
        form = detect_format(record, NONE, tables.OBJECTIVES["dpo"], "t.json:1")
        conversations(record, NONE, form, True, None, "t.json:1")


def test_weights_of_pairs_are_those_of_a_trained_answer(tmp_path):
    turns = [user("a"), assistant("b") | {"weight": 0}, user("c")]
    pair = {
        "prompt": turns,
        "chosen": assistant("good") | {"weight": 1},
        "rejected": [assistant("bad") | {"train": True}],
    }
    bundle = load_pairs(tmp_path, write_records(tmp_path / "a.jsonl", pair))
    [(prompt, *answers)] = shown(bundle.train)
    assert prompt.endswith(CHAT.replace("a<", "c<")) and answers == [
        "good<|im_end|>",
        "bad<|im_end|>",
    ]
    without = pair | {"rejected": [assistant("bad") | {"train": False}]}
    with pytest.raises(ValueError, match=r"b.jsonl:1: rejected: weight 0 of an answer: expected 1"):
        load_pairs(tmp_path, write_records(tmp_path / "b.jsonl", without))


def test_the_template_hears_the_options_of_a_pair(tmp_path):
    template = CHATML.replace("{% for", "{{ mood }}{% for", 1)
    pair = FORMATS["prompt"] | {"chat_template_kwargs": {"mood": "calm "}}
    bundle = load_pairs(tmp_path, write_records(tmp_path / "a.jsonl", pair), template=template)
    assert shown(bundle.train) == [(f"calm {CHAT}", "good<|im_end|>", "bad<|im_end|>")]


def test_options_without_meaning_for_pairs_are_refused(tmp_path):
    file = write_records(tmp_path / "a.jsonl", FORMATS["prompt"])
    with pytest.raises(ValueError, match="answers are compared"):
        load_pairs(tmp_path, file, train_on_prompt=True)


def test_pairs_of_llama_factorys_v1_are_read_by_their_columns(tmp_path):
    def conversation(answer: str) -> list[dict]:
        texts = {"user": "Q", "assistant": answer}
        return [
            {
                "role": role,
                "content": [{"type": "text", "value": text}],
                "loss_weight": float(role == "assistant"),
            }
            for role, text in texts.items()
        ]

    record = {f"{side}_messages": conversation(side) for side in ("chosen", "rejected")}
    columns = {side: f"{side}_messages" for side in ("chosen", "rejected")}
    write_records(tmp_path / "a.jsonl", record)
    info = {"v1": {"file_name": "a.jsonl", "ranking": True, "columns": columns}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    [(_, chosen, rejected)] = shown(load_pairs(tmp_path, "v1", dataset_dir=str(tmp_path)).train)
    assert "chosen" in chosen and "rejected" in rejected


def test_documents_of_a_row_that_fills_the_batch_are_no_tokens():
    batch = {
        "input_ids": torch.tensor([[11, 12, 13, 14, 15, 0], [21, 22, 23, 24, 25, 26]]),
        "labels": torch.tensor([[-100, 13, -100, 15, 16, -100], [-100] * 6]),
        "attention_mask": torch.tensor([[1, 1, 2, 2, 2, 0], [0] * 6]),  # a pair; a filler
    }
    rows = split(batch, 2, pad_token_id=9)
    assert rows["input_ids"].tolist() == [[11, 12, 9], [13, 14, 15], [21, 9, 9], [22, 9, 9]]
    assert rows["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]]
    assert rows["labels"].tolist() == [[-100, 13, -100], [-100, 15, 16], [-100] * 3, [-100] * 3]


@pytest.mark.parametrize("messages", ([], [assistant("an answer to nothing")]))
def test_a_record_without_a_message_to_answer_is_refused(messages):
    record, spec = {"messages": messages}, DatasetSpec("a.jsonl")
    with pytest.raises(ValueError, match="a.jsonl:1: it has no message to answer"):
        prompt_and_answer(record, spec, "openai", None, "a.jsonl:1")
    record = {"messages": [user("a question")], "system": 5}
    with pytest.raises(ValueError, match="a.jsonl:1: 'system': expected a text, got 5"):
        prompt_and_answer(record, spec, "openai", None, "a.jsonl:1")
