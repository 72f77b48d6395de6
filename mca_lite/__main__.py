"""`python -m mca_lite config.yaml [key=value ...]` trains, like train.py; `python -m mca_lite
<command>` runs another command. An installation has `mca-lite` for both.
"""

import sys
from importlib import import_module

from .cli import USER_ERROR, finish

# name -> (module or module.function of words -> exit code, help)
COMMANDS = {
    "train": ("cli", "train a model from a configuration file"),
    "plan": ("cli_plan", "memory, steps and layouts of a configuration, before it runs"),
    "parity": ("cli_inspect.main_parity", "compare the first step in a layout with plain torch"),
    "watch": ("cli_watch", "show runs in the terminal as they train"),
    "report": ("cli_watch.main_report", "write runs as a page: curves, numbers, configuration"),
    "inspect": ("cli_inspect", "samples, lengths and rows of the data; --check: a dry run"),
    "chat": ("cli_generate.main_chat", "chat with the trained model in the terminal"),
    "generate": ("cli_generate", "answer the evaluation set with the trained model"),
    "doctor": ("cli_doctor", "check this machine for training, with remedies"),
    "convert": ("cli_convert", "convert weights between formats, merge an adapter"),
}
_NEED_NO_WORDS = ("train", "doctor")  # the others show their help


def main(words: list[str] | None = None) -> int:
    """Run the command of the first word (None: of the command line), or training if it is no
    command -> exit code."""
    words = sys.argv[1:] if words is None else words
    name, *rest = words or ["--help"]
    if name in ("-h", "--help"):
        return finish(_list_commands)
    if name not in COMMANDS and name.isidentifier():
        known = ", ".join(COMMANDS)
        print(f"error: there is no command {name}, expected one of {known}", file=sys.stderr)
        return USER_ERROR
    if name not in COMMANDS:
        name = "train"
        rest = words
    if not rest and name not in _NEED_NO_WORDS:
        rest = ["--help"]
    module, _, function = COMMANDS[name][0].partition(".")
    return getattr(import_module(f".{module}", __package__), function or "main")(rest)


def _list_commands() -> None:
    print(f"python -m {__package__} <command> ...", "", sep="\n")
    for name, (_, text) in COMMANDS.items():
        print(f"  {name:10} {text}")
    print("\nEach of them has --help; that of train lists all keys of a configuration.")


if __name__ == "__main__":
    sys.exit(main())
