"""What was trained, spoken to in the terminal.

python -m mca_lite chat MODEL [options]
    a session: /new begins another conversation, /system TEXT too, with this system message; /exit
    or Ctrl-D leaves, Ctrl-C ends an answer. Questions may come from a pipe, one a line. With
    --before each model has its own side of the conversation
"""

import argparse
import contextlib
import sys

from .cli_errors import at_least, finish, has_colors, parser_of
from .files import printable, resolve_folder

_THINK, _END_THINK = "<think>", "</think>"
_COMMANDS = "/new, /system TEXT, /exit; Ctrl-C ends an answer, Ctrl-D leaves"


def main(words: list[str]) -> int:
    """Talk as the words say -> exit code."""
    parser = parser_of("chat", __doc__)
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
    decoding, is_terminal = decoding_of(options), sys.stdin.isatty()
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
        self.name, self.decoding = name, decoding
        self.system, self.enable_thinking = keys.default_system, keys.enable_thinking
        if options.plain:
            self.tokenizer.chat_template = None
        self.begin()

    def begin(self, system: str | None = None) -> None:
        """A new conversation; system: its system message, from here on."""
        self.system = self.system if system is None else system
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def describe(self) -> str:
        model, dtype = self.model, str(self.model.dtype).removeprefix("torch.")
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
        self.is_thinking, self.has_thought, self.begins = is_thinking, False, True
        if name:
            self._print(f"{name + ':':9}", is_dim=True)

    def write(self, text: str) -> None:
        self.text += text
        while text:
            shown, found, text = text.partition(_END_THINK if self.is_thinking else _THINK)
            self._show(shown)
            if found:
                self.is_thinking, self.begins = not self.is_thinking, True

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
