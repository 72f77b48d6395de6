"""The answers of a trained model to the evaluation set, beside those that are expected.

python -m mca_lite generate config.yaml [key=value ...] [options]
    writes generations.jsonl into output_dir: prompt, answer, expected, exact_match of each sample
    (the last answer of a conversation), and shows the first of them. The prompts are those of
    eval_dataset or val_size, or of --file: records as for training, with or without an answer,
    {"prompt": ...}, or a .txt file with one a line
"""

import argparse
import contextlib
import copy
import functools
import inspect
import json
import sys
from pathlib import Path
from typing import NamedTuple

from .args import parse_args
from .cli import at_least, finish, has_colors, parser_of
from .errors import refuse
from .files import GENERATIONS_NAME, printable, resolve_folder, write_file
from .tables import OBJECTIVES

# -- chat

_THINK = "<think>"
_END_THINK = "</think>"
_COMMANDS = "/new, /system TEXT, /exit; Ctrl-C ends an answer, Ctrl-D leaves"


def main_chat(words: list[str]) -> int:
    """Chat with a trained model in the terminal.

    python -m mca_lite chat MODEL [options]
        a session: /new begins another conversation, /system TEXT too, with this system message;
        /exit or Ctrl-D leaves, Ctrl-C ends an answer. Questions may come from a pipe, one a line.
        With --before each model has its own side of the conversation
    """
    parser = parser_of("chat", inspect.getdoc(main_chat))
    model = "the output_dir of a run, a model in Hugging Face's format, or an adapter's folder"
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("--plain", action="store_true", help="go on with what is typed, as text")
    code = "let MODEL, and --base, bring their own code"
    parser.add_argument("--trust-remote-code", action="store_true", help=code)
    add_options(parser, temperature=None)
    return finish(_talk, parser.parse_args(words))


def add_options(parser: argparse.ArgumentParser, temperature: float | None) -> None:
    """The options of commands that generate, whose default temperature is given (None: that of
    generation_config.json)."""
    of_model = "as generation_config.json says"
    told = of_model if temperature is None else f"{temperature:g}"

    def add(name: str, metavar: str, kind, text: str, default=None) -> None:
        parser.add_argument(name, metavar=metavar, type=kind, help=text, default=default)

    parser.add_argument("--before", action="store_true", help="the model before training too")
    add("--base", "M", str, "that model, or an adapter's base, if it has moved or is not known")
    add("--max-new-tokens", "N", at_least(1), f"the longest answer ({of_model}, or 512)")
    add("--temperature", "T", at_least(0, float), f"0: greedy ({told})", temperature)
    add("--top-p", "P", at_least(0, float), f"nucleus sampling ({of_model})")
    add("--seed", "N", int, "of sampling")


def decoding_of(options):
    """The Decoding of these options, and torch seeded."""
    import torch

    from .generation import Decoding

    if options.seed is not None:
        torch.manual_seed(options.seed)
    return Decoding(options.max_new_tokens, options.temperature, options.top_p)


def _talk(options) -> None:
    options.model = str(resolve_folder(options.model))  # before torch is imported
    decoding = decoding_of(options)
    is_terminal = sys.stdin.isatty()
    from .generation import keys_of_run

    keys = keys_of_run(options.model, "default_system enable_thinking")
    names = ["before", "trained"] if options.before else [""]
    speakers = [_Speaker(name, options, decoding, keys) for name in names]
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() has a history with it
        print(*(speaker.describe() for speaker in speakers), _COMMANDS, sep="\n")
    while (line := _next_line(is_terminal)) is not None:
        command, _, text = line.strip().partition(" ")
        if command == "/exit":
            return
        if command in ("/new", "/system"):
            for speaker in speakers:
                speaker.begin(text.strip() if command == "/system" else None)
        elif command.startswith("/"):
            print(_COMMANDS)
        elif command:
            for speaker in speakers:
                speaker.answer(line.strip())


def _next_line(is_terminal: bool) -> str | None:
    """What is asked next, None at the end."""
    while True:
        try:
            print(end="\n" if is_terminal else "")
            return input("> " if is_terminal else "")
        except KeyboardInterrupt:  # nobody is answering
            print()
        except EOFError:
            print(end="\n" if is_terminal else "")
            return None
        except UnicodeDecodeError as error:
            remedy = "convert the questions, iconv -f LATIN1 -t UTF-8"
            raise ValueError(f"a question is no UTF-8 text ({error.reason}): {remedy}") from None


class _Speaker:
    """A model with its side of the conversation."""

    def __init__(self, name: str, options, decoding, keys):
        from .generation import load_for_generation

        trusted = (options.model, options.base) if options.trust_remote_code else ()
        self.model, self.tokenizer = load_for_generation(
            options.model, options.base, name == "before", trusted
        )
        self.name = name
        self.decoding = decoding
        self.system = keys.default_system
        self.enable_thinking = keys.enable_thinking
        if options.plain:
            self.tokenizer.chat_template = None
        self.begin()

    def begin(self, system: str | None = None) -> None:
        """A new conversation; system: its system message, from here on."""
        self.system = self.system if system is None else system
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def describe(self) -> str:
        model = self.model
        dtype = str(self.model.dtype).removeprefix("torch.")
        words = f"{model.config.model_type}, {model.num_parameters():,} parameters, {dtype}"
        return f"{self.name or model.name_or_path}: {words} on {model.device}"

    def answer(self, question: str) -> None:
        """Print the answer as it comes; what Ctrl-C leaves of it is part of the conversation."""
        from jinja2.exceptions import TemplateError

        from .generation import prompt_ids, stream

        self.messages.append({"role": "user", "content": question})
        try:
            prompt = prompt_ids(self.tokenizer, self.messages, self.enable_thinking)
        except TemplateError as error:
            print(f"the chat template refuses this conversation: {printable(str(error))}")
            return self.begin("")
        opened = self.tokenizer.decode(prompt).rstrip().endswith(_THINK)
        printer = _Printer(self.name, opened)
        stream(self.model, self.tokenizer, prompt, self.decoding, printer.write)
        printer.close()
        self.messages.append({"role": "assistant", "content": printer.text})


class _Printer:
    """Prints an answer piece by piece, the thinking apart from it; `text` is all of it, as history
    needs it. is_thinking: the prompt has begun to think."""

    def __init__(self, name: str, is_thinking: bool):
        self.text = f"{_THINK}\n" if is_thinking else ""
        self.is_thinking = is_thinking
        self.has_thought = False
        self.begins = True
        if name:
            self._print(f"{name + ':':9}", is_dim=True)

    def write(self, text: str) -> None:
        self.text += text
        while text:
            shown, found, text = text.partition(_END_THINK if self.is_thinking else _THINK)
            self._show(shown)
            if found:
                self.is_thinking = not self.is_thinking
                self.begins = True

    def _show(self, text: str) -> None:
        if self.begins:
            text = text.lstrip()
        if text and self.begins:
            self.begins = False
            if self.is_thinking:
                self._print("[thinking] ", is_dim=True)
            elif self.has_thought:
                self._print("\n[answer] ", is_dim=True)
            self.has_thought |= self.is_thinking
        self._print(text, self.is_thinking)

    def _print(self, text: str, is_dim: bool) -> None:
        text = printable(text)
        if text and is_dim and has_colors():
            text = f"\x1b[2m{text}\x1b[0m"
        print(text, end="", flush=True)

    def close(self) -> None:
        print(flush=True)


# -- generate

_SHOWN, _MOST_CHARACTERS = 3, 100  # answers, and of each line
_QUESTION = "mcaquestion"  # no template changes it
_FILES = "--file prompts.jsonl, or prompts.txt: one a line"


class _Sample(NamedTuple):
    """prompt: token ids. expected: None where the file does not say."""

    prompt: list[int]
    expected: str | None


def main(words: list[str]) -> int:
    """Generate as the words say -> exit code."""
    parser = parser_of("generate", __doc__)
    number = at_least(1)
    parser.add_argument("--file", metavar="F", help="these prompts instead")
    parser.add_argument("--num", type=number, metavar="N", help="only the first N samples")
    parser.add_argument("--batch-size", type=number, default=32, metavar="N", help="prompts (32)")
    add_options(parser, temperature=0.0)
    options, words = parser.parse_known_args(words)
    return finish(_generate, words, options)


def _generate(words: list[str], options) -> None:
    arguments = parse_args(words, needs_world=False)
    if options.file is not None and not Path(options.file).is_file():
        refuse("--file", options.file, f"no such file (seen from {Path.cwd()})", _FILES)
    from .generation import load_for_generation

    output_dir = Path(arguments.training.output_dir)
    decoding = decoding_of(options)
    trusted: tuple[str | None, ...] = ()
    if arguments.model.trust_remote_code:
        trusted = (str(output_dir), options.base, arguments.model.model_name_or_path)
    model, tokenizer = load_for_generation(output_dir, options.base, trusted=trusted)
    samples = _samples(arguments, options.file, model, tokenizer)[: options.num]
    rows = [{"prompt": tokenizer.decode(sample.prompt)} for sample in samples]
    _answer("answer", model, tokenizer, samples, rows, decoding, options)
    if options.before:
        del model  # there may be no room for two
        model, _ = load_for_generation(output_dir, options.base, before=True, trusted=trusted)
        _answer("before", model, tokenizer, samples, rows, decoding, options)
    path = output_dir / GENERATIONS_NAME
    write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    question_of = _question_finder(tokenizer)
    for row in rows[:_SHOWN]:
        print(_line(question_of(row["prompt"])))
        for name in ("before", "answer", "expected"):
            if row.get(name) is not None:
                print(f"    {name:9} {_line(row[name])}")
    print(_result(rows), f"all answers are in {path}", sep="\n")


def _answer(name: str, model, tokenizer, samples, rows: list[dict], decoding, options) -> None:
    """Put a model's answers into the rows, under this name."""
    from .generation import answers

    prompts = [sample.prompt for sample in samples]
    found = answers(model, tokenizer, prompts, decoding, options.batch_size)
    for row, sample, answer in zip(rows, samples, found, strict=True):
        row[name] = answer
        if sample.expected is not None:
            row["expected"] = sample.expected
            matches = answer.strip() == sample.expected.strip()
            row["exact_match" if name == "answer" else f"exact_match_{name}"] = matches


def _result(rows: list[dict]) -> str:
    """How many answers are exactly right."""
    judged = [row for row in rows if "expected" in row]
    if not judged:
        return f"{len(rows)} answers, and no expected ones to compare them with"
    right = sum(row["exact_match"] for row in judged)
    text = f"exact match: {100 * right / len(judged):.1f} % ({right} of {len(judged)} held-out "
    text += "prompts)"
    if "before" in judged[0]:
        before = sum(row["exact_match_before"] for row in judged)
        text += f", before training: {100 * before / len(judged):.1f} %"
    return text


def _line(text: str) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def _question_finder(tokenizer):
    """A function (prompt as the chat template writes it) -> its last question; the prompt, where
    the question cannot be told from the rest."""
    from .generation import prompt_ids

    asked = [{"role": "user", "content": _QUESTION}]
    before, _, after = tokenizer.decode(prompt_ids(tokenizer, asked)).partition(_QUESTION)
    # a system message may stand before the user's header, whose last special token begins `before`
    starts = [before.rfind(str(token)) for token in tokenizer.added_tokens_decoder.values()]
    before = before[max([0, *starts]) :]
    if not before:
        return str
    return lambda prompt: prompt.removesuffix(after).rpartition(before)[2]


# -- which prompts ---------------------------------------------------------------------------------


def _samples(arguments, file: str | None, model, tokenizer) -> list[_Sample]:
    if file is not None:
        return _of_file(file, tokenizer, arguments.data)
    if OBJECTIVES[arguments.finetuning.stage].joins_documents:
        stage = arguments.finetuning.stage
        refuse("stage", stage, "its documents have no answers", "--file prompts.jsonl")
    return _of_evaluation_set(arguments, model, tokenizer)


def _of_evaluation_set(arguments, model, tokenizer) -> list[_Sample]:
    """The samples as training reads them: the last answer that carries loss is the expected one."""
    from .data import load_datasets
    from .generation import last_turn, stop_ids, until_stop

    data = copy.copy(arguments.data)
    stage = arguments.finetuning.stage
    load = functools.partial(
        load_datasets, stage=stage, tokenizer=tokenizer, seed=arguments.training.order_seed
    )
    vars(data).update(packing=False, neat_packing=False)
    if data.eval_dataset:  # nothing of the training data is asked for
        vars(data).update(dataset=[], mix_weights=None, eval_on_each_dataset=False)
    as_trained = copy.copy(data)
    data.train_on_prompt = False
    if as_trained.train_on_prompt and data.val_size and not data.streaming:
        dataset = _held_out(load, as_trained, data)
    else:
        dataset = load(data).eval
    if dataset is None:
        remedy = "eval_dataset or val_size, or --file prompts.jsonl"
        refuse("eval_dataset", None, "there is nothing to evaluate on", remedy)
    stop = stop_ids(model, tokenizer)
    samples = []
    for number in range(len(dataset)):
        prompt, answer = last_turn(dataset[number][0])  # of a pair the chosen one
        expected = tokenizer.decode(until_stop(answer, stop), skip_special_tokens=True)
        samples.append(_Sample(prompt, expected))
    return samples


def _held_out(load, as_trained, data) -> list[list[dict]]:
    """The samples that val_size kept out of training, with the answers alone as what is trained.

    Which samples there are depends on train_on_prompt (a prompt of cutoff_len leaves no answer to
    train), and what val_size takes depends on how many there are.
    """
    vars(data).update(val_size=0, mix_weights=None, mix_strategy="concat")
    keys = [sample[0]["input_ids"].tobytes() for sample in load(as_trained).eval]
    answered: dict[bytes, list[dict]] = dict.fromkeys(keys, [])
    for sample in load(data).train:
        key = sample[0]["input_ids"].tobytes()
        if key in answered:
            answered[key] = sample
    return [answered[key] for key in keys if answered[key]]


def _of_file(file: str, tokenizer, data) -> list[_Sample]:
    from .data_files import DatasetSpec, read_records
    from .data_records import FORMATS, detect_format, is_plain
    from .generation import prompt_ids

    spec = DatasetSpec(file)
    samples = []
    for where, record in read_records(file):
        record = {"prompt": record} if isinstance(record, str) else record
        form = "prompt"
        if not isinstance(record, dict) or record.keys() - {"system"} != {"prompt"}:
            form = detect_format(record, spec, OBJECTIVES["sft"], where)
        reader = FORMATS[form]
        messages = [*reader.prompt(record, spec, where), *reader.answer(record, spec, where)]
        expected = None
        if messages[-1]["role"] == "assistant":
            expected = messages.pop()["content"]
        if is_plain(record, form):
            samples.append(_Sample(tokenizer.encode(record["prompt"]), expected))
            continue
        system = record.get("system") or data.default_system
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        samples.append(_Sample(prompt_ids(tokenizer, messages, data.enable_thinking), expected))
    if not samples:
        refuse("--file", file, "it holds no record", _FILES)
    return samples
