"""Answer the evaluation set with the trained model, beside the expected answers.

python -m mca_lite generate config.yaml [key=value ...] [options]
    writes generations.jsonl into output_dir: prompt, answer, expected, exact_match of each sample
    (the last answer of a conversation), and shows the first of them. The prompts are those of
    eval_dataset or val_size, or of --file: records as for training, with or without an answer,
    {"prompt": ...}, or a .txt file with one a line
"""

import argparse
import contextlib
import copy
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .args import parse_args
from .cli import at_least, finish, has_colors, parser_of
from .errors import refuse
from .files import GENERATIONS_NAME, printable, resolve_folder, write_file
from .tables import OBJECTIVES

_COMMANDS = "/new, /system TEXT, /exit; Ctrl-C ends an answer, Ctrl-D leaves"
_THINK = "<think>"
_END_THINK = "</think>"
_SHOWN = 3  # answers
_MOST_CHARACTERS = 100  # of a printed line
_FILES = "--file prompts.jsonl, or prompts.txt: one a line"


def main(words: list[str]) -> int:
    """Generate answers with the words of the command line -> exit code."""
    parser = parser_of("generate", __doc__)
    number = at_least(1)
    parser.add_argument("--file", metavar="F", help="these prompts instead")
    parser.add_argument("--num", type=number, metavar="N", help="only the first N samples")
    parser.add_argument("--batch-size", type=number, default=32, metavar="N", help="prompts (32)")
    _add_options(parser, temperature=0.0)
    options, words = parser.parse_known_args(words)
    return finish(_generate, words, options)


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
    _add_options(parser, temperature=None)
    return finish(_chat, parser.parse_args(words))


def _add_options(parser: argparse.ArgumentParser, temperature: float | None) -> None:
    """Add the options of both commands. temperature: the default; None: the model's."""
    of_model = "as generation_config.json says"
    default = of_model
    if temperature is not None:
        default = f"{temperature:g}"
    rows = (
        ("--base", "M", str, "that model, or an adapter's base, if it has moved or is not known"),
        ("--max-new-tokens", "N", at_least(1), f"the longest answer ({of_model}, or 512)"),
        ("--temperature", "T", at_least(0, float), f"0: greedy ({default})"),
        ("--top-p", "P", at_least(0, float), f"nucleus sampling ({of_model})"),
        ("--seed", "N", int, "of sampling"),
    )
    parser.add_argument("--before", action="store_true", help="the model before training too")
    for name, metavar, kind, text in rows:
        parser.add_argument(name, metavar=metavar, type=kind, help=text)
    parser.set_defaults(temperature=temperature)


def _decoding(options):
    """The Decoding of these options; seeds torch."""
    import torch

    from .generation import Decoding

    if options.seed is not None:
        torch.manual_seed(options.seed)
    return Decoding(options.max_new_tokens, options.temperature, options.top_p)


# -- chat


def _chat(options) -> None:
    options.model = str(resolve_folder(options.model))  # before torch is imported
    decoding = _decoding(options)
    from .generation import keys_of_run

    keys = keys_of_run(options.model, "default_system enable_thinking")
    names = ["before", "trained"] if options.before else [""]
    speakers = [_Speaker(name, options, decoding, keys) for name in names]
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() a history
        print(*(speaker.describe() for speaker in speakers), _COMMANDS, sep="\n")
    for line in _lines(is_terminal):
        command, _, text = line.partition(" ")
        if command == "/exit":
            return
        if command.startswith("/") and command not in ("/new", "/system"):
            print(_COMMANDS)
            continue
        for speaker in speakers:
            if command == "/new":
                speaker.begin()
            elif command == "/system":
                speaker.begin(text.strip())
            elif line:
                speaker.answer(line)


def _lines(is_terminal: bool) -> Iterator[str]:
    """Read the user's lines, without spaces at their ends, up to the end of input."""
    newline = "\n" * is_terminal
    while True:
        try:
            print(end=newline)
            line = input("> " * is_terminal)
        except KeyboardInterrupt:  # no answer is under way
            print()
        except EOFError:
            print(end=newline)
            return
        except UnicodeDecodeError as error:
            remedy = "convert the questions, iconv -f LATIN1 -t UTF-8"
            raise ValueError(f"a question is no UTF-8 text ({error.reason}): {remedy}") from None
        else:
            yield line.strip()


class _Speaker:
    """A model with its side of the conversation."""

    def __init__(self, name: str, options, decoding, keys):
        from .generation import load_for_generation

        trusted = [options.model, options.base] * options.trust_remote_code
        self.model, self.tokenizer = load_for_generation(
            options.model, options.base, name == "before", trusted
        )
        if options.plain:
            self.tokenizer.chat_template = None
        self.enable_thinking = keys.enable_thinking
        self.name = name
        self.decoding = decoding
        self.begin(keys.default_system or "")

    def begin(self, system: str | None = None) -> None:
        """Begin a conversation; system: its system message, and of later ones."""
        if system is not None:
            self.system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.system)

    def describe(self) -> str:
        model = self.model
        dtype = str(model.dtype).removeprefix("torch.")
        words = f"{model.config.model_type}, {model.num_parameters():,} parameters, {dtype}"
        return f"{self.name or model.name_or_path}: {words} on {model.device}"

    def answer(self, question: str) -> None:
        """Print the answer as it comes. An answer cut by Ctrl-C stays in the conversation."""
        from jinja2.exceptions import TemplateError

        from . import generation

        self.messages.append({"role": "user", "content": question})
        try:
            prompt = generation.prompt_ids(self.tokenizer, self.messages, self.enable_thinking)
        except TemplateError as error:
            print(f"the chat template refuses this conversation: {printable(str(error))}")
            return self.begin("")
        is_thinking = self.tokenizer.decode(prompt).rstrip().endswith(_THINK)
        printer = _Printer(self.name, is_thinking)
        generation.stream(self.model, self.tokenizer, prompt, self.decoding, printer.write)
        print(flush=True)
        self.messages.append({"role": "assistant", "content": printer.text})


class _Printer:
    """Print an answer piece by piece, the thinking apart from it; `text` is all of it, for the
    history. is_thinking: the prompt has begun to think."""

    def __init__(self, name: str, is_thinking: bool):
        self.text = f"{_THINK}\n" * is_thinking
        self.is_thinking = is_thinking
        self.has_thought = False
        self.is_start = True  # of a part: spaces are left out
        if name:
            self._print(f"{name + ':':9}", is_dim=True)

    def write(self, text: str) -> None:
        self.text += text
        while text:
            tag = _END_THINK if self.is_thinking else _THINK
            part, ending, text = text.partition(tag)
            self._print_part(part.lstrip() if self.is_start else part)
            if ending:
                self.is_thinking = not self.is_thinking
                self.is_start = True

    def _print_part(self, text: str) -> None:
        if text and self.is_start:
            self.is_start = False
            if self.is_thinking:
                self.has_thought = True
                self._print("[thinking] ", is_dim=True)
            elif self.has_thought:
                self._print("\n[answer] ", is_dim=True)
        self._print(text, self.is_thinking)

    def _print(self, text: str, is_dim: bool) -> None:
        text = printable(text)
        if text and is_dim and has_colors():
            text = f"\x1b[2m{text}\x1b[0m"
        print(text, end="", flush=True)


# -- generate


class _Sample(NamedTuple):
    """prompt: token ids. expected: None if the file has no answer."""

    prompt: list[int]
    expected: str | None


def _generate(words: list[str], options) -> None:
    arguments = parse_args(words, needs_world=False)
    if options.file is not None and not Path(options.file).is_file():
        refuse("--file", options.file, f"no such file (seen from {Path.cwd()})", _FILES)
    from .generation import answers, load_for_generation

    output_dir = Path(arguments.training.output_dir)
    decoding = _decoding(options)
    names = [str(output_dir), options.base, arguments.model.model_name_or_path]
    trusted = names * arguments.model.trust_remote_code
    rows: list[dict] = []
    for is_before in [False, True][: 1 + options.before]:
        model, tokenizer = load_for_generation(output_dir, options.base, is_before, trusted)
        if not is_before:
            samples = _samples(arguments, options.file, model, tokenizer)[: options.num]
            rows = [{"prompt": tokenizer.decode(sample.prompt)} for sample in samples]
        prompts = [sample.prompt for sample in samples]
        texts = answers(model, tokenizer, prompts, decoding, options.batch_size)
        del model  # there may be no room for two
        for row, sample, text in zip(rows, samples, texts, strict=True):
            row["before" if is_before else "answer"] = text
            if sample.expected is not None:
                row["expected"] = sample.expected
                matches = text.strip() == sample.expected.strip()
                row["exact_match" + "_before" * is_before] = matches
    path = output_dir / GENERATIONS_NAME
    write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    for row, sample in zip(rows[:_SHOWN], samples, strict=False):
        prompt = tokenizer.decode(sample.prompt, skip_special_tokens=True)
        print(_line(prompt, -_MOST_CHARACTERS))  # the question is at its end
        for name in ("before", "answer", "expected"):
            if name in row:
                print(f"    {name:9} {_line(row[name])}")
    print(_result(rows), f"all answers are in {path}", sep="\n")


def _line(text: str, most: int = _MOST_CHARACTERS) -> str:
    """The first `most` characters of a text in one line; the last ones if it is negative."""
    text = printable(" ".join(text.split()))
    if len(text) <= abs(most):
        return text
    return f"{text[:most]} ..." if most > 0 else f"... {text[most:]}"


def _result(rows: list[dict]) -> str:
    """The share of exactly matching answers."""
    judged = [row for row in rows if "expected" in row]
    if not judged:
        return f"{len(rows)} answers, and no expected ones to compare them with"
    right = sum(row["exact_match"] for row in judged)
    count = f"{right} of {len(judged)} held-out prompts"
    text = f"exact match: {100 * right / len(judged):.1f} % ({count})"
    if "before" in judged[0]:
        before = sum(row["exact_match_before"] for row in judged)
        text += f", before training: {100 * before / len(judged):.1f} %"
    return text


# -- prompts of generate


def _samples(arguments, file: str | None, model, tokenizer) -> list[_Sample]:
    """The samples of a file, else of the evaluation set as training reads it: their last answer
    with loss is the expected one."""
    from .generation import last_turn, stop_ids, until_stop

    stage = arguments.finetuning.stage
    if file is not None:
        return _of_file(file, tokenizer, arguments.data)
    if OBJECTIVES[stage].joins_documents:
        refuse("stage", stage, "its documents have no answers", "--file prompts.jsonl")
    stop = stop_ids(model, tokenizer)
    samples = []
    for sample in _evaluation_set(arguments, tokenizer):
        prompt, answer = last_turn(sample[0])  # of a pair the chosen one
        expected = tokenizer.decode(until_stop(answer, stop), skip_special_tokens=True)
        samples.append(_Sample(prompt, expected))
    return samples


def _evaluation_set(arguments, tokenizer) -> list[list[dict]]:
    """The samples of eval_dataset or val_size, with loss on their answers alone."""
    from .data import load_datasets

    def load(**keys):
        data = copy.copy(arguments.data)
        vars(data).update(packing=False, neat_packing=False, **keys)
        seed = arguments.training.order_seed
        return load_datasets(data, stage=arguments.finetuning.stage, tokenizer=tokenizer, seed=seed)

    data = arguments.data
    if data.eval_dataset:  # without reading the training data
        keys = dict(dataset=[], mix_weights=None, eval_on_each_dataset=False)
        samples = load(**keys, train_on_prompt=False).eval
    elif data.train_on_prompt and data.val_size and not data.streaming:
        # A prompt of cutoff_len leaves no answer to train: with train_on_prompt there are more
        # samples, and val_size takes others.
        held_out = [sample[0]["input_ids"].tobytes() for sample in load().eval]
        keys = dict(val_size=0, mix_weights=None, mix_strategy="concat")
        trained = load(**keys, train_on_prompt=False).train
        by_tokens = {sample[0]["input_ids"].tobytes(): sample for sample in trained}
        return [by_tokens[tokens] for tokens in held_out if tokens in by_tokens]
    else:
        samples = load(train_on_prompt=False).eval
    if samples is None:
        remedy = "eval_dataset or val_size, or --file prompts.jsonl"
        refuse("eval_dataset", None, "there is nothing to evaluate on", remedy)
    return [samples[number] for number in range(len(samples))]


def _of_file(file: str, tokenizer, data) -> list[_Sample]:
    """The samples of a file of records."""
    from .data_files import DatasetSpec, read_records
    from .data_records import FORMATS, detect_format, is_plain
    from .generation import prompt_ids

    spec = DatasetSpec(file)
    samples = []
    for where, record in read_records(file):
        if isinstance(record, str):
            record = {"prompt": record}
        form = "prompt"
        if not isinstance(record, dict) or record.keys() - {"system"} != {"prompt"}:
            form = detect_format(record, spec, OBJECTIVES["sft"], where)
        reader = FORMATS[form]
        messages = [*reader.prompt(record, spec, where), *reader.answer(record, spec, where)]
        expected = None
        if messages[-1]["role"] == "assistant":
            expected = messages.pop()["content"]
        system = record.get("system") or data.default_system
        if is_plain(record, form):
            ids = tokenizer.encode(record["prompt"])
        else:
            if system and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": system})
            ids = prompt_ids(tokenizer, messages, data.enable_thinking)
        samples.append(_Sample(ids, expected))
    if not samples:
        refuse("--file", file, "it holds no record", _FILES)
    return samples
