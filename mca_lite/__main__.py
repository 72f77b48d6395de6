"""`python -m mca_lite config.yaml [key=value ...]` trains, like train.py; `python -m mca_lite
<command>` runs one of COMMANDS. An installation has `mca-lite` for both.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from .cli import USER_ERROR, finish


class Command(NamedTuple):
    """A command of `python -m mca_lite`: one row of COMMANDS.

    target: "module.function", which runs the command: it gets the words after the command's name
    and returns the exit code. A "module" alone stands for its function main. text: its help. needs:
    other modules of the package; the command is refused if one is missing."""

    target: str
    text: str
    needs: str = ""

    def modules(self) -> list[str]:
        return [self.target.partition(".")[0], *self.needs.split()]

    def lacking(self) -> str:
        """Text that names the files of target and needs that are missing; "" if all are there."""
        here = Path(__file__).parent
        files = [f"{module}.py" for module in self.modules()]
        gone = ", ".join(file for file in files if not (here / file).is_file())
        return f"it needs {gone} of mca_lite, not in {here}" if gone else ""


_INSPECTION = "tool_inspection tool_page tool_parity tool_plan_memory"
COMMANDS = {
    "train": Command("cli", "train a model from a configuration file", "tool_generation tool_page"),
    "plan": Command(
        "tool_plan",
        "memory, steps and layouts of a configuration, before it runs",
        "tool_plan_memory",
    ),
    "parity": Command(
        "tool_inspect.main_parity",
        "compare the first step in a layout with plain torch",
        _INSPECTION,
    ),
    "watch": Command("tool_watch", "show runs in the terminal as they train", "tool_page"),
    "report": Command(
        "tool_watch.main_report",
        "write runs as a page: curves, numbers, configuration",
        "tool_page",
    ),
    "inspect": Command(
        "tool_inspect", "samples, lengths and rows of the data; --check: a dry run", _INSPECTION
    ),
    "chat": Command(
        "tool_generate.main_chat", "chat with the trained model in the terminal", "tool_generation"
    ),
    "generate": Command(
        "tool_generate", "answer the evaluation set with the trained model", "tool_generation"
    ),
    "doctor": Command("tool_doctor", "check this machine for training, with remedies"),
    "convert": Command("tool_convert", "convert weights between formats, merge an adapter"),
    "migrate": Command(
        "tool_migrate",
        "rewrite another trainer's file in this package's keys",
        "tool_migrate_tables",
    ),
    "vendor": Command("tool_vendor", "copy the package into another repository, without parts"),
}
_NEED_NO_WORDS = ("train", "doctor")  # the others show their help


def main(words: list[str] | None = None) -> int:
    """Run the command that the first word names, with the other words -> exit code. words: the
    command line after the program; None: sys.argv's.

    Another first word, such as config.yaml or --key, starts training, but an identifier that is no
    command prints an error. Without words, or for -h or --help, the commands are listed. A command
    that needs words shows its help without them.
    """
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
    if lacking := COMMANDS[name].lacking():
        print(f"error: command {name}: {lacking}: copy it from there", file=sys.stderr)
        return USER_ERROR
    module, _, function = COMMANDS[name].target.partition(".")
    return getattr(import_module(f".{module}", __package__), function or "main")(rest)


def _list_commands() -> None:
    print(f"python -m {__package__} <command> ...", "", sep="\n")
    for name, command in COMMANDS.items():
        if not command.lacking():
            print(f"  {name:10} {command.text}")
    print("\nEach of them has --help; that of train lists all keys of a configuration.")


if __name__ == "__main__":
    sys.exit(main())
