"""`python -m mca_lite config.yaml [key=value ...]` trains, as train.py does; `python -m mca_lite
<command>` does the rest.
"""

import sys
from importlib import import_module

# name -> (module with a main(words) -> exit code, what it does)
COMMANDS = {
    "train": ("cli", "train a model from a configuration file"),
    "plan": ("cli_plan", "memory, steps and layouts of a configuration, before it runs"),
    "parity": ("cli_parity", "the first step in a layout beside plain torch: what differs first"),
    "watch": ("cli_watch", "runs as they train, beside each other in the terminal"),
    "report": ("cli_report", "one or several runs as a page: curves, numbers, configuration"),
    "inspect": ("cli_inspect", "samples, lengths and rows of the data; --check: a dry run"),
    "chat": ("cli_chat", "speak to what was trained, in the terminal"),
    "generate": ("cli_generate", "answers of what was trained to the evaluation set"),
    "doctor": ("cli_doctor", "whether this machine is ready to train, with remedies"),
    "convert": ("cli_convert", "convert weights between formats, merge an adapter"),
}


def main(words: list[str]) -> int:
    """Run the command that the first word names; training where it names none -> exit code."""
    if not words or words[0] in ("-h", "--help"):
        print("python -m mca_lite <command> ...", "", sep="\n")
        for name, (_, text) in COMMANDS.items():
            print(f"  {name:10} {text}")
        if not words:
            return 0
        print("\nThe keys of train:\n")
    if words[0] in COMMANDS:
        module, words = COMMANDS[words[0]][0], words[1:]
    else:
        module = "cli"
    return import_module(f".{module}", __package__).main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
