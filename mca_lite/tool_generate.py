"""Answer the evaluation set with the trained model, and compare with the expected answers.

python -m mca_lite generate config.yaml [key=value ...] [options]
    writes generations.jsonl into output_dir: prompt, answer and, if known, expected and exact_match
    of each sample (the last answer of a conversation), and shows the first ones. Prompts come from
    eval_dataset or val_size, or from --file: records as for training, with or without an answer,
    {"prompt": ...}, or a .txt file with one prompt per line
"""

import argparse
import contextlib
import copy
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .args import parse_args
from .cli import at_least, finish, parser_of
from .errors import refuse
from .files import GENERATIONS_NAME, printable, resolve_folder, write_file
from .tables import OBJECTIVES

_COMMANDS = "/new, /system TEXT, /image PATH, /exit; Ctrl-C ends an answer, Ctrl-D leaves"
_SHOWN = 3  # samples that are printed
_MOST_CHARACTERS = 100  # in a printed line
_FILES = "--file prompts.jsonl, or prompts.txt: one a line"


def main(words: list[str]) -> int:
    """The command `generate`: let a trained model answer the evaluation set, or the prompts of a
    file. words: the command line's. Returns the exit code."""
    parser = parser_of("generate", __doc__)
    add = parser.add_argument
    number = at_least(1)
    add("--file", metavar="F", help="these prompts instead")
    add("--num", type=number, metavar="N", help="only the first N samples")
    add("--batch-size", type=number, default=32, metavar="N", help="prompts (32)")
    _add_options(parser)
    parser.set_defaults(temperature=0.0)
    options, words = parser.parse_known_args(words)
    return finish(_generate, words, options)


def main_chat(words: list[str]) -> int:
    """Chat with a trained model in the terminal.

    python -m mca_lite chat MODEL [options]
        a session: /new begins another conversation, /system TEXT too, with this system message;
        /image PATH shows a picture with the next question, to a model that sees pictures; /exit or
        Ctrl-D leaves, Ctrl-C ends an answer. Questions may come from a pipe, one a line. With
        --before the model before training answers each question too, and each model sees only its
        own answers
    """
    parser = parser_of("chat", inspect.getdoc(main_chat))
    add = parser.add_argument
    add("model", metavar="MODEL", help="the output_dir of a run, a Hugging Face model, an adapter")
    code = "let MODEL, and --base, bring their own code"
    add("--trust-remote-code", action="store_true", help=code)
    _add_options(parser)
    return finish(_chat, parser.parse_args(words))


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command line options that `generate` and `chat` share."""
    rows = (
        ("--base", "M", str, "that model, or an adapter's base, if it has moved or is not known"),
        ("--max-new-tokens", "N", at_least(1), "the longest answer (the model's, or 512)"),
        ("--temperature", "T", at_least(0, float), "0: greedy, as generate is (chat: the model's)"),
        ("--top-p", "P", at_least(0, float), "nucleus sampling (the model's)"),
        ("--seed", "N", int, "of sampling"),
    )
    parser.add_argument("--before", action="store_true", help="the model before training too")
    for name, metavar, kind, text in rows:
        parser.add_argument(name, metavar=metavar, type=kind, help=text)


def _decoding(options: Any) -> Any:
    """The Decoding settings in the command line options. If --seed is given, torch's random
    generator is seeded."""
    import torch

    from .tool_generation import Decoding

    if options.seed is not None:
        torch.manual_seed(options.seed)
    return Decoding(options.max_new_tokens, options.temperature, options.top_p)


# -- chat


def _chat(options: Any) -> None:
    options.model = str(resolve_folder(options.model))  # before torch is imported
    decoding = _decoding(options)
    from .tool_generation import keys_of_run

    names = "default_system enable_thinking image_max_pixels image_min_pixels"
    keys = keys_of_run(options.model, names)
    names = ["before", "trained"] if options.before else [""]
    speakers = [_Speaker(name, options, decoding, keys) for name in names]
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() a history
        print(_COMMANDS)
    for line in _lines("\n> " * is_terminal):
        command, _, text = line.partition(" ")
        if command == "/exit":
            return
        for speaker in speakers:
            if command == "/new":
                speaker.begin()
            elif command == "/system":
                speaker.begin(text)
            elif command == "/image":
                speaker.show(text)
            elif not command.startswith("/"):
                speaker.answer(line)
            elif speaker is speakers[0]:
                print(_COMMANDS)


def _lines(prompt: str) -> Iterator[str]:
    """Yield the user's non-empty lines until the end of input. ValueError for text that is not
    UTF-8."""
    while True:
        try:
            line = input(prompt).strip()
        except KeyboardInterrupt:  # there is no answer to end
            continue
        except EOFError:
            return
        except UnicodeDecodeError as error:
            remedy = "convert the questions, iconv -f LATIN1 -t UTF-8"
            raise ValueError(f"a question is no UTF-8 text ({error.reason}): {remedy}") from None
        if line:
            yield line


class _Speaker:
    """One model in a chat, with its own history of the conversation. name: "before" (the model
    before training), "trained", or "" if there is one model. options: the command line's. decoding:
    how answers are generated. keys: the run's keys, such as default_system."""

    def __init__(self, name: str, options: Any, decoding: Any, keys: Any) -> None:
        from .inputs import inputs_of
        from .tool_generation import load_for_generation

        trusted = [options.model, options.base] * options.trust_remote_code
        self.model, self.tokenizer = load_for_generation(
            options.model, options.base, name == "before", trusted
        )
        folder = Path(self.model.name_or_path)
        self.media = inputs_of(self.model.config).media(folder, self.tokenizer, keys)
        self.enable_thinking = keys.enable_thinking
        self.name = name
        self.decoding = decoding
        self.begin(keys.default_system or "")

    def begin(self, system: str | None = None) -> None:
        """Begin a new conversation. system: a system message for this and later conversations, ""
        for none; None keeps the last one."""
        if system is not None:
            self.system = [{"role": "system", "content": system}] * bool(system)
        self.messages = list(self.system)
        self.pictures: list[Any] = []  # all pictures of the conversation
        self.waiting = ""  # stands for pictures before the next question

    def show(self, path: str) -> None:
        """Add a picture to the next question. If the model sees no pictures or the file cannot be
        read, a line says so."""
        if not self.media.block:
            print("this model sees no pictures")
            return
        try:
            picture = self.media.read(path, "/image")
        except ValueError as error:
            print(printable(str(error)))
            return
        self.pictures.append(picture)
        self.waiting += self.media.block

    def answer(self, question: str) -> None:
        """Ask the model a question and print its answer while it is generated. An answer cut off by
        Ctrl-C stays in the conversation. If the prompt cannot be made, a line says so and a new
        conversation begins."""
        from jinja2.exceptions import TemplateError

        from . import tool_generation

        self.messages.append({"role": "user", "content": self.waiting + question})
        self.waiting = ""
        try:
            prompt = tool_generation.prompt_ids(self.tokenizer, self.messages, self.enable_thinking)
            prompt, seen = self.media.prompt(prompt, self.pictures, "this conversation")
        except TemplateError as error:
            print(f"the chat template refuses this conversation: {printable(str(error))}")
            return self.begin("")
        except ValueError as error:
            print(printable(str(error)))
            return self.begin()
        if self.name:
            print(f"{self.name + ':':9}", end="")
        text = tool_generation.stream(self.model, self.tokenizer, prompt, self.decoding, seen)
        print(flush=True)
        self.messages.append({"role": "assistant", "content": text})


# -- generate


def _generate(words: list[str], options: Any) -> None:
    arguments = parse_args(words, needs_world=False)
    if options.file is not None and not Path(options.file).is_file():
        refuse("--file", options.file, f"no such file (seen from {Path.cwd()})", _FILES)
    from .inputs import inputs_of
    from .tool_generation import answers, load_for_generation

    output_dir = Path(arguments.training.output_dir)
    decoding = _decoding(options)
    names = [str(output_dir), options.base, arguments.model.model_name_or_path]
    trusted = names * arguments.model.trust_remote_code
    model, tokenizer = load_for_generation(output_dir, options.base, False, trusted)
    media = inputs_of(model.config).media(Path(model.name_or_path), tokenizer, arguments)
    samples = _samples(arguments, options.file, model, tokenizer, media)[: options.num]
    prompts = [ids for ids, *_ in samples]
    rows = [{"prompt": tokenizer.decode(ids)} for ids in prompts]
    seen = [pictures for *_, pictures in samples]
    texts = {"answer": answers(model, tokenizer, prompts, decoding, options.batch_size, seen)}
    if options.before:
        del model  # there may be no room for two
        model, _ = load_for_generation(output_dir, options.base, True, trusted)
        texts["before"] = answers(model, tokenizer, prompts, decoding, options.batch_size, seen)
    for number, (_, expected, _) in enumerate(samples):
        row = rows[number]
        row |= {name: of_model[number] for name, of_model in texts.items()}
        if expected is not None:
            row["expected"] = expected
            row["exact_match"] = row["answer"].strip() == expected.strip()
    path = output_dir / GENERATIONS_NAME
    write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    for row in rows[:_SHOWN]:
        print(_line(row["prompt"])[-_MOST_CHARACTERS:])  # the question is at its end
        for name in ("before", "answer", "expected"):
            if name in row:
                print(f"    {name:9} {_line(row[name])[:_MOST_CHARACTERS]}")
    for name in texts:
        print(f"{name}: {_result(rows, name)}")
    print(f"all answers are in {path}")


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def _result(rows: list[dict[str, Any]], name: str) -> str:
    """A line for the report: the share of prompts whose generated text, row[name], equals
    row["expected"], apart from white space at the ends. If no row has an expected text, the line
    says so."""
    judged = [row for row in rows if "expected" in row]
    if not judged:
        return f"{len(rows)} texts, and no expected ones to compare them with"
    right = sum(row[name].strip() == row["expected"].strip() for row in judged)
    return f"exact match: {100 * right / len(judged):.1f} % ({right} of {len(judged)} prompts)"


# -- prompts of generate


_Sample = tuple[list[int], str | None, dict[str, Any]]


def _samples(
    arguments: Any, file: str | None, model: Any, tokenizer: Any, media: Any
) -> list[_Sample]:
    """The prompts to answer, each with (token ids, expected answer or None, columns of its
    pictures). They are the records of `file`. Without a file they are the samples of the evaluation
    set that have loss; their last answer is the expected one. media: handles the model's pictures.
    Without a file, ConfigError for a stage whose documents have no answers."""
    from .tool_generation import turns_of

    stage = arguments.finetuning.stage
    if file is not None:
        return _of_file(file, tokenizer, arguments.data, media)
    if OBJECTIVES[stage].joins_documents:
        refuse("stage", stage, "its documents have no answers", "--file prompts.jsonl")
    evaluated = _evaluation_set(arguments, tokenizer, media)
    turns = turns_of(evaluated, range(len(evaluated)), model, tokenizer)
    return [turn[1:] for turn in turns]


def _evaluation_set(arguments: Any, tokenizer: Any, media: Any) -> Any:
    """The samples of eval_dataset or val_size, tokenised as for training, but unpacked and with
    loss on answers alone. media: handles the model's pictures. ConfigError if there are none, or if
    the run trains on prompts and its samples are those of val_size."""
    from .data import load_datasets

    data = copy.copy(arguments.data)
    remedy = "eval_dataset, or --file prompts.jsonl"
    if data.eval_dataset:  # the training data need not be read
        vars(data).update(dataset=[], mix_weights=None, eval_on_each_dataset=False)
    elif data.train_on_prompt:  # without it other samples would be kept and split off
        refuse("train_on_prompt", True, "the samples of val_size have trained prompts", remedy)
    vars(data).update(packing=False, neat_packing=False, train_on_prompt=False)
    seed = arguments.training.order_seed
    samples = load_datasets(data, arguments.finetuning.stage, tokenizer, seed, media).eval
    if samples is None:
        refuse("eval_dataset", None, "there is nothing to evaluate on", f"val_size, {remedy}")
    return samples


def _of_file(file: str, tokenizer: Any, data: Any, media: Any) -> list[_Sample]:
    """The prompts in a file, one per record: (token ids, expected answer or None, columns of its
    pictures). data: DataArguments. media: handles the model's pictures. ConfigError if the file has
    no record."""
    from .data_chat import ChatRenderer
    from .data_files import DatasetSpec, read_records
    from .data_records import detect_format, prompt_and_answer

    spec = DatasetSpec(file)
    renderer = ChatRenderer(tokenizer, data.enable_thinking)
    options = (data.ignore_message_keys, media)
    samples = []
    for where, record in read_records(file):
        if isinstance(record, str):
            record = {"prompt": record}
        form = "prompt"
        if not isinstance(record, dict) or record.keys() - {"system"} != {"prompt"}:
            form = detect_format(record, spec, OBJECTIVES["sft"], where)
        asked, expected = prompt_and_answer(
            record, spec, form, data.default_system, where, *options
        )
        if asked.is_plain or not tokenizer.chat_template:
            ids = tokenizer.encode(asked.messages[-1]["content"])
        else:
            ids = tokenizer.encode(renderer.prompt(asked, where), add_special_tokens=False)
        ids, seen = media.prompt(ids, asked.media, where)
        samples.append((ids, expected, seen))
    if not samples:
        refuse("--file", file, "it holds no record", _FILES)
    return samples
