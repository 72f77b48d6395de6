"""`python -m mca_lite chat`: a session from a pipe says what transformers says after the same
history.
"""

import io
import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from mca_lite import tool_generate, tool_generation
from mca_lite.__main__ import main as package_main
from tests.shared import tiny
from tests.shared.commands import convert, ended
from tests.shared.small_runs import save_tokenizer

GREEDY = ["--temperature", "0", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    """The folders of a model and of one that it could have been before."""
    folder = tmp_path_factory.mktemp("chat")
    paths = [tiny.save_model(folder / str(seed), "llama", seed) for seed in (1, 2)]
    for path in paths:
        save_tokenizer(path)
    return paths


def piped_chat(monkeypatch, lines: list[str], *words: str) -> tuple[int, list[str], str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    code, out, error = ended(tool_generate.main_chat, [*words, *GREEDY])
    return code, [line.rstrip() for line in out.splitlines()], error


class Plain:
    """Transformers alone: its template, its generate()."""

    def __init__(self, path: str):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path)
        self.messages: list[dict] = []
        self.prompts: list[list[int]] = []

    def say(self, question: str) -> str:
        self.messages.append({"role": "user", "content": question})
        inputs = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        self.prompts += inputs["input_ids"].tolist()
        output = self.model.generate(**inputs, do_sample=False, max_new_tokens=6, pad_token_id=0)
        new = output[0, inputs["input_ids"].shape[1] :]
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
        return text


def test_a_piped_session_keeps_the_history_that_the_template_writes(two_models, monkeypatch):
    lines = ["w3 w4", "", "w5", "/new", "w5", "/system w7", "w5", "/what", "w6", "/exit", "w8"]
    stream, prompts = tool_generation.stream, []

    def watched(model, tokenizer, prompt, *rest):
        prompts.append(prompt)
        return stream(model, tokenizer, prompt, *rest)

    monkeypatch.setattr(tool_generation, "stream", watched)
    code, out, error = piped_chat(monkeypatch, lines, two_models[0])
    assert code == 0, error
    plain = Plain(two_models[0])
    wanted = [plain.say("w3 w4"), plain.say("w5")]
    plain.messages.clear()
    wanted.append(plain.say("w5"))
    plain.messages[:] = [{"role": "system", "content": "w7"}]
    wanted += [plain.say("w5"), plain.say("w6")]
    listed = out.pop(len(wanted) - 1)  # the answer to a command that there is not
    assert all(command in listed for command in ("/new", "/system", "/exit"))
    assert out == wanted and prompts == plain.prompts


def test_the_model_before_training_answers_with_a_history_of_its_own(two_models, monkeypatch):
    code, out, error = piped_chat(
        monkeypatch, ["w3 w4", "w5"], two_models[0], "--before", "--base", two_models[1]
    )
    assert code == 0, error
    before, trained = Plain(two_models[1]), Plain(two_models[0])
    wanted = []
    for question in ("w3 w4", "w5"):
        wanted += [f"before:  {before.say(question)}", f"trained: {trained.say(question)}"]
    assert out == wanted


def test_ctrl_c_ends_an_answer_and_not_the_session(two_models, monkeypatch):
    pieces = []

    def interrupted(text):
        pieces.append(text)
        if len(pieces) == 3:  # the second one is printed
            signal.raise_signal(signal.SIGINT)
        return text

    monkeypatch.setattr(tool_generation, "printable", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    try:
        code, out, error = piped_chat(monkeypatch, ["w3 w4", "w5"], two_models[0])
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 0, error
    plain = Plain(two_models[0])
    whole = plain.say("w3 w4")
    assert whole.startswith(out[0]) and len(out[0]) < len(whole)
    plain.messages[-1]["content"] = out[0]
    assert out[1:] == [plain.say("w5")]


def test_a_seed_repeats_a_sampled_session(two_models, monkeypatch):
    def sampled(seed: str) -> list[str]:
        words = [two_models[0], "--seed", seed, "--top-p", "0.99"]
        monkeypatch.setattr(sys, "stdin", io.StringIO("w3\nw4"))
        return ended(
            tool_generate.main_chat, [*words, "--temperature", "2", "--max-new-tokens", "20"]
        )[1]

    with torch.random.fork_rng():
        assert sampled("1") == sampled("1") != sampled("2")


def test_what_is_no_model_is_told_with_a_remedy(two_models, monkeypatch, tmp_path):
    code, _, error = piped_chat(monkeypatch, ["w3"], two_models[0], "--before")
    assert code == 2 and "does not say which model it was trained from" in error
    assert "--base" in error
    code, _, error = piped_chat(monkeypatch, ["w3"], str(tmp_path))
    assert code == 2 and "neither a model in Hugging Face's format nor an adapter" in error
    text = json.dumps({"base_model_name_or_path": "./\x1b[2J"})
    (tmp_path / "adapter_config.json").write_text(text)
    code, _, error = piped_chat(monkeypatch, ["w3"], str(tmp_path))
    assert code == 2 and "./\ufffd[2J" in error and "\x1b" not in error


def test_a_template_that_refuses_a_conversation_leaves_the_session(
    two_models, monkeypatch, tmp_path
):
    path = shutil.copytree(two_models[0], tmp_path / "model")
    template = path / "chat_template.jinja"
    refuse = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no\x1b system') }}{% endif %}"
    )
    template.write_text(refuse + template.read_text())
    lines = ["/system w7", "w5", "w5"]
    code, out, error = piped_chat(monkeypatch, lines, str(path))
    assert code == 0, error
    assert out == [
        "the chat template refuses this conversation: no\ufffd system",
        Plain(two_models[0]).say("w5"),
    ]


def with_code(source: str, folder: Path, marker: Path) -> Path:
    """A copy of a model that brings code, which leaves a marker when it is imported."""
    shutil.copytree(source, folder)
    (folder / "evil.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class Config(LlamaConfig): pass\n"
        "class Model(LlamaForCausalLM): config_class = Config\n"
        "class Tokenizer(PreTrainedTokenizerFast): pass\n"
    )
    for name, autos in {
        "config.json": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "tokenizer_config.json": {"AutoTokenizer": [None, "evil.Tokenizer"]},
    }.items():
        record = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**record, "auto_map": autos}))
    return folder


@pytest.mark.parametrize("command", ["chat", "chat --before", "chat merged", "generate --before"])
def test_a_config_that_lies_in_a_folder_lets_no_code_run(
    two_models, monkeypatch, tmp_path, command
):
    marker = tmp_path / "marker"
    out = with_code(two_models[0], tmp_path / "out", marker)
    base = with_code(two_models[1], tmp_path / "base", marker)
    with_code(two_models[0], out / "merged", marker)
    (out / "config.yaml").write_text(
        f"trust_remote_code: true\nmodel_name_or_path: {base}\ndefault_system: w9\n"
    )
    name, *words = command.split()
    if name == "chat":
        words = [str(out / "merged") if "merged" in words else str(out), *words]
        code, _, error = piped_chat(monkeypatch, ["w3"], *(w for w in words if w != "merged"))
        taken = "default_system: w9"
    else:
        (tmp_path / "prompts.txt").write_text("w3\n")
        given = [f"output_dir={out}", "model_name_or_path=configs/tiny/model", "dataset=d.jsonl"]
        given += ["--file", str(tmp_path / "prompts.txt"), "--max-new-tokens", "2", *words]
        code, _, error = ended(tool_generate.main, given)
        taken = f"model_name_or_path: {base}"
    assert code == 0 and not marker.exists(), error
    lines = [line for line in error.splitlines() if line.startswith(f"{out}/config.yaml: ")]
    assert taken in "".join(lines) and "trust_remote_code" not in error
    assert (f"the model before training: {base}" in error) == ("--before" in words)


@pytest.mark.parametrize("command", ["convert", "plan", "inspect", "report", "watch"])
def test_no_other_command_lets_a_folders_code_run(two_models, tmp_path, command):
    marker = tmp_path / "marker"
    out = with_code(two_models[0], tmp_path / "out", marker)
    (tmp_path / "run").mkdir()
    for folder in (out, tmp_path / "run"):
        (folder / "config.yaml").write_text(f"trust_remote_code: true\nmodel_name_or_path: {out}\n")
    (out / "trainer_log.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "data.jsonl").write_text('{"text": "w3 w4"}\n')
    words = [str(out)]
    if command == "convert":
        words += [str(tmp_path / "dst")]
        code, _, error = convert(*words)
    else:
        if command in ("plan", "inspect"):
            keys = {"model_name_or_path": out, "output_dir": tmp_path / "run", "stage": "pt"}
            keys |= {"dataset": tmp_path / "data.jsonl", "cache_dir": tmp_path / "cache"}
            words = [f"{key}={value}" for key, value in keys.items()]
        code, _, error = ended(package_main, [command, *words])
    assert code == 0 and not marker.exists(), error


@pytest.mark.parametrize("place", ["model", "base", "the run's own base"])
def test_the_command_line_lets_code_of_the_folders_that_it_names_run(
    two_models, monkeypatch, tmp_path, place
):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    marker = tmp_path / "marker"
    folder = with_code(two_models[1], tmp_path / "model", marker)
    words = [str(folder), "--trust-remote-code"]
    if place != "model":
        words = [
            shutil.copytree(two_models[0], tmp_path / "out"),
            "--trust-remote-code",
            "--before",
        ]
    if place == "base":
        words += ["--base", str(folder)]
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "config.yaml").write_text(f"model_name_or_path: {folder}\n")
    code, _, error = piped_chat(monkeypatch, ["w3"], *map(str, words))
    assert code == 0 and marker.exists() == (place != "the run's own base"), error


def test_odd_keys_of_a_runs_config_are_refused_in_words(two_models, monkeypatch, tmp_path):
    path = shutil.copytree(two_models[0], tmp_path / "model")
    for text in ("enable_thinking: perhaps\n", "default_system: [1, {2: 3}]\n", "a: " + "[" * 9999):
        (path / "config.yaml").write_text(text)
        code, _, error = piped_chat(monkeypatch, ["w3"], str(path))
        assert code == 2 and "defect" not in error, error
