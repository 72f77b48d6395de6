"""`python -m mca_lite generate`: the answers to an evaluation set, and how many are right."""

import json

import pytest

from mca_lite import tool_generate
from mca_lite.tool_generation import Decoding, answers, load_for_generation, prompt_ids
from tests.shared import tiny
from tests.shared.chats import assistant, user, write_records
from tests.shared.commands import ended
from tests.shared.small_runs import save_tokenizer
from tests.shared.toy_tokenizer import CHATML, QWEN3, byte_tokenizer

LENGTH = 4


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """(a model's folder, three conversations: two end with its own answers, one with another)"""
    path = tiny.save_model(tmp_path_factory.mktemp("generate") / "model", "llama")
    save_tokenizer(path)
    model, tokenizer = load_for_generation(path)
    questions = [user(f" w{n} w{n + 1} ") for n in range(20)]
    histories = [[questions[0]], [questions[1], assistant(" w5 "), questions[2]], [questions[3]]]
    found = answers(model, tokenizer, [prompt_ids(tokenizer, m) for m in histories], SHORT)
    found[2] += " w9"
    return path, [[*m, assistant(f" {text} ")] for m, text in zip(histories, found, strict=True)]


SHORT = Decoding(LENGTH, temperature=0.0)


def generate(path, folder, *words, **keys) -> tuple[int, str, str, list[dict]]:
    keys = {
        "model_name_or_path": "configs/tiny/model",
        "output_dir": str(path),
        "cache_dir": str(folder / "cache"),
        "dataset": str(folder / "not_there.jsonl"),
        **keys,
    }
    given = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    code, out, error = ended(
        tool_generate.main, [*given, "--max-new-tokens", str(LENGTH), *map(str, words)]
    )
    rows = []
    if code == 0:
        with open(f"{path}/generations.jsonl", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
    return code, out, error, rows


def test_the_evaluation_set_is_answered_and_compared(known, tmp_path):
    path, conversations = known
    file = write_records(tmp_path / "held.jsonl", *[{"messages": m} for m in conversations])
    keys = dict(eval_dataset=file, train_on_prompt=True, neat_packing=True)
    code, out, error, rows = generate(path, tmp_path, "--batch-size", 2, **keys)
    assert code == 0, error
    assert [row["exact_match"] for row in rows] == [True, True, False]
    assert [row["expected"] for row in rows] == [m[-1]["content"].strip() for m in conversations]
    _, tokenizer = load_for_generation(path)
    prompts = [tokenizer.decode(prompt_ids(tokenizer, m[:-1])) for m in conversations]
    assert [row["prompt"] for row in rows] == prompts
    lines = out.splitlines()
    assert lines[-2] == "answer: exact match: 66.7 % (2 of 3 prompts)"
    assert f"    answer    {rows[0]['answer']}" in lines
    code, out, _, rows = generate(path, tmp_path, "--num", 1, "--before", "--base", path, **keys)
    assert code == 0 and len(rows) == 1 and rows[0]["before"] == rows[0]["answer"]
    assert "answer: exact match: 100.0 % (1 of 1 prompts)" in out
    assert "before: exact match: 100.0 % (1 of 1 prompts)" in out


def test_samples_that_val_size_splits_off_and_chosen_answers_are_evaluation_sets(known, tmp_path):
    path, conversations = known
    file = write_records(tmp_path / "all.jsonl", *[{"messages": m} for m in conversations])
    code, _, error, rows = generate(path, tmp_path, dataset=file, val_size=2)
    assert code == 0 and len(rows) == 2, error
    expected = {row["expected"]: row["exact_match"] for row in rows}
    wanted = [m[-1]["content"].strip() for m in conversations]
    assert all(match == (text in wanted[:2]) for text, match in expected.items())
    pairs = [
        {"prompt": m[:-1], "chosen": m[-1:], "rejected": [assistant(" w9 ")]} for m in conversations
    ]
    file = write_records(tmp_path / "pairs.jsonl", *pairs)
    code, out, error, rows = generate(path, tmp_path, stage="dpo", eval_dataset=file)
    assert code == 0, error
    assert [row["expected"] for row in rows] == wanted and "66.7 % (2 of 3" in out
    code, _, error, _ = generate(path, tmp_path, dataset=file, stage="dpo")
    assert code == 2 and "there is nothing to evaluate on" in error


def test_samples_with_trained_prompts_are_refused(known, tmp_path):
    path, conversations = known
    file = write_records(tmp_path / "all.jsonl", *[{"messages": m} for m in conversations])
    keys = dict(dataset=file, val_size=2, train_on_prompt=True)
    code, _, error, _ = generate(path, tmp_path, **keys)
    assert code == 2 and "train_on_prompt" in error and "eval_dataset" in error


def test_a_file_that_is_not_there_is_told_before_a_model_is_read(tmp_path):
    code, _, error, _ = generate(tmp_path / "no model", tmp_path, "--file", "missing.jsonl")
    assert code == 2 and "--file: 'missing.jsonl'\n    no such file (seen from" in error
    assert "try: --file prompts.jsonl" in error and "Errno" not in error


def test_a_file_of_prompts_needs_no_answers(known, tmp_path):
    path, conversations = known
    question, answer = (conversations[0][n]["content"] for n in (0, 1))
    records = [
        {"messages": conversations[0]},
        {"prompt": question},
        {"prompt": question, "completion": answer},  # a text that goes on, and no conversation
        {"prompt": conversations[1][:-1]},
        {"instruction": question, "output": "w9", "system": " w8 "},
    ]
    file = write_records(tmp_path / "prompts.jsonl", *records)
    code, out, error, rows = generate(path, tmp_path, "--file", file, stage="pt")
    assert code == 0, error
    assert [row.get("exact_match") for row in rows] == [True, None, False, None, False]
    assert rows[2]["prompt"].split() == question.split() and rows[2]["expected"] == answer
    assert rows[0]["answer"] == rows[1]["answer"] and rows[4]["answer"] != rows[0]["answer"]
    assert rows[3]["answer"] == conversations[1][-1]["content"].strip()
    assert "(1 of 3 prompts)" in out
    file = write_records(tmp_path / "prompts.txt", *[question.strip(), "w7"])
    code, out, error, rows = generate(path, tmp_path, "--file", file)
    assert code == 0 and "2 texts, and no expected ones" in out, error
    code, _, error, _ = generate(path, tmp_path, stage="pt")
    assert code == 2 and "its documents have no answers" in error
    code, _, error, _ = generate(path, tmp_path, "--file", write_records(tmp_path / "empty.jsonl"))
    assert code == 2 and "empty.jsonl'\n    it holds no record" in error


def test_prompts_of_a_file_are_those_that_training_makes_of_its_records(tmp_path):
    """Tools, calls, variables of the template and thinking reach a prompt as transformers'
    apply_chat_template writes them."""
    tokenizer = byte_tokenizer("{{ mode }}" + QWEN3)
    path = tiny.save_model(
        tmp_path / "m", "llama", vocab_size=len(tokenizer), max_position_embeddings=999
    )
    tokenizer.save_pretrained(path)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with_tools = {"tools": [tool]}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    of_tool = {"role": "tool", "content": "r"}
    called = [user("q"), {**assistant(""), "tool_calls": calls}, of_tool]
    developer = {"role": "developer", "content": "d"}
    thought = [user("q"), {**assistant("b"), "reasoning": "t"}, user("p")]
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(calls[0]["function"])},
        {"from": "observation", "value": "r"},
    ]
    wanted = {
        "tools": ({"messages": [user("q")], "tools": [tool]}, [user("q")], with_tools),
        "calls": ({"conversations": turns, "tools": json.dumps([tool])}, called, with_tools),
        "variables": (
            {"messages": [user("q")], "chat_template_kwargs": {"mode": "m"}},
            [user("q")],
            {"mode": "m"},
        ),
        "developer": ({"messages": [developer, user("q")]}, [developer, user("q")], {}),
    }
    system = {"role": "system", "content": "s"}
    file = write_records(tmp_path / "prompts.jsonl", *[record for record, *_ in wanted.values()])
    code, _, error, rows = generate(path, tmp_path, "--file", file, default_system="s")
    assert code == 0, error
    for row, (name, (_, messages, keys)) in zip(rows, wanted.items(), strict=True):
        whole = messages if name == "developer" else [system, *messages]
        right = tokenizer.apply_chat_template(
            whole, tokenize=False, add_generation_prompt=True, **keys
        )
        assert row["prompt"] == right, name
    tokenizer.chat_template = CHATML  # without a place for either
    tokenizer.save_pretrained(path)
    file = write_records(tmp_path / "more.jsonl", {"messages": thought}, {"messages": called})
    code, _, error, rows = generate(path, tmp_path, "--file", file)
    assert code == 0, error
    assert "assistant\n<think>\nt\n</think>\n\nb<|im_end|>" in rows[0]["prompt"]
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' in rows[1]["prompt"]
