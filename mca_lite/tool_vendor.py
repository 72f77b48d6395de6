"""Copy the package, with some of its parts, into another repository.

python -m mca_lite vendor DST [--parts lora dpo] [--without pictures] [--tools plan watch]
    DST: a new folder, such as my_project/trainer, whose name becomes the package's name
    --parts: capabilities, with the parts that they need; "all" for every part
    --without: parts to leave out of all parts, with the parts that need them
    --tools: commands besides training; "all" for every command

The copy is checked in another process: each module is imported, and a tiny model is trained for
one step. In the copy, keys and commands of missing files are refused by name.
"""

import difflib
import json
import keyword
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .__main__ import COMMANDS
from .cli import finish, parser_of
from .errors import UserError, refuse
from .files import show_size
from .parts import PARTS, missing, need_of, with_needs

_HOME = Path(__file__).parent
_ALL = "all"


def main(words: list[str]) -> int:
    """Run `mca-lite vendor`: copy the package or some of its parts into another repository, and
    check the copy by a step of training -> exit code."""
    parser = parser_of("vendor", __doc__)
    parser.add_argument("dst", metavar="DST")
    rows = (("--parts", PARTS), ("--without", PARTS), ("--tools", COMMANDS))
    for option, table in rows:
        text = ", ".join(table)
        parser.add_argument(option, nargs="*", default=[], metavar="NAME", help=text)
    options = parser.parse_args(words)
    return finish(_vendor, options.dst, options.parts, options.tools, options.without)


class Choice(NamedTuple):
    """A choice of files to copy into another repository. parts: optional capabilities, as names in
    PARTS, with the parts that they need. tools: commands, as names in COMMANDS."""

    parts: list[str]
    tools: list[str]

    def files(self) -> list[Path]:
        """Paths of the files to copy: those of the core, of the chosen parts and of the chosen
        tools, sorted; then the licence, if it is there."""
        every_part = _modules_of_parts(PARTS)
        every_tool = _modules_of_tools(COMMANDS)
        here = {path.stem for path in _HOME.glob("*.py")}
        core = here - every_part - every_tool
        chosen = core | _modules_of_parts(self.parts) | _modules_of_tools(self.tools)
        files = [_HOME / f"{module}.py" for module in sorted(chosen)]
        licences = [
            _HOME / "LICENSE",
            _HOME.parent / "LICENSE",
        ]  # where a copy and a checkout have it
        return files + [path for path in licences if path.is_file()][:1]


def _modules_of_parts(parts: Iterable[str]) -> set[str]:
    return {module for part in parts for module in PARTS[part].modules.split()}


def _modules_of_tools(tools: Iterable[str]) -> set[str]:
    return {module for tool in tools for module in COMMANDS[tool].modules()}


def _vendor(dst: str, parts: list[str], tools: list[str], without: list[str]) -> None:
    choice = choose(parts, tools, without)
    folder = Path(dst).resolve()
    check_folder(folder)
    files = choice.files()
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(file, folder)
    _report(choice, parts, files, folder)
    loss = check_copy(folder)
    print(f"checked: every module is imported, a step of stage sft has loss {loss:.4f}")


def choose(parts: list[str], tools: list[str], without: Sequence[str] = ()) -> Choice:
    """Choose the files to copy, by names of parts (optional capabilities) and tools (commands) -> a
    Choice. Parts that the named parts need are added.

    without: names of parts to leave out; parts that need them are left out too. If `without` names
    any, and `parts` is empty or "all", all other parts are chosen. Raises UserError for an unknown
    name, for a part in `parts` that needs one in `without`, or for a part or tool whose files this
    copy of the package lacks.
    """
    left = _named("--without", [*without], PARTS)
    rest = [part for part in PARTS if {*with_needs(part)}.isdisjoint(left)]
    wanted = rest
    if not left or parts not in ([], [_ALL]):
        wanted = _named("--parts", parts, PARTS)
    for part in wanted:
        if part not in rest:
            lost = ", ".join(need for need in with_needs(part) if need in left)
            refuse("--parts", part, f"it needs {lost}, and --without has it", "one of the two")
    needed = {need for part in wanted for need in with_needs(part)}
    chosen = [part for part in PARTS if part in needed]
    for part in chosen:
        if part in missing():
            reason, remedy = need_of(part, "to copy it takes")
            refuse("--parts", part, reason, remedy)
    commands = ["train", *_named("--tools", tools, COMMANDS)]
    for command in commands:
        if lacking := COMMANDS[command].lacking():
            refuse("--tools", command, lacking, "leave it out")
    return Choice(chosen, [name for name in COMMANDS if name in commands])


def _named(option: str, names: list[str], table: Iterable[str]) -> list[str]:
    known = list(table)
    if names == [_ALL]:
        return known
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or [", ".join([*known, _ALL])]
            refuse(option, name, "there is no such part or command", near[0])
    return names


def check_folder(folder: Path) -> None:
    """Raise UserError if the package cannot be copied to `folder`: it must be a new or empty
    folder, outside the package, whose name can be imported."""
    key = "DST"
    if folder == _HOME or _HOME in folder.parents:
        refuse(
            key, str(folder), "it is inside the package itself", "a folder of another repository"
        )
    name = folder.name
    if not name.isidentifier() or keyword.iskeyword(name):
        refuse(key, str(folder), f"{name} cannot be imported", "a name such as my_project/trainer")
    if folder.exists() and not folder.is_dir():
        refuse(key, str(folder), "it is a file", "a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        remedy = "a new folder; remove an earlier copy first, to replace it"
        refuse(key, str(folder), "it is not empty", remedy)


def _report(choice: Choice, wanted: list[str], files: list[Path], folder: Path) -> None:
    size = sum(file.stat().st_size for file in files)
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    print(f"{folder}: {len(files)} files, {show_size(size)}, {lines:,} lines")
    print(f"parts: {', '.join(choice.parts) or 'none'}")
    for part in choice.parts:
        users = [name for name in choice.parts if part in with_needs(name)[1:]]
        if users and part not in wanted:
            print(f"  {part} cannot be left out: it is needed by {', '.join(users)}")
    left_out = [part for part in PARTS if part not in choice.parts]
    print(f"parts left out: {', '.join(left_out) or 'none'}")
    print(f"commands: {', '.join(choice.tools)}")
    rest = [name for name in COMMANDS if name not in choice.tools]
    print(f"commands left out: {', '.join(rest) or 'none'}", flush=True)


# -- the check

_VOCABULARY = "<unk> <eos> Human : Assistant one two three four five six seven eight".split()
_FILES = {
    "model/config.json": {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": len(_VOCABULARY),
        "max_position_embeddings": 64,
    },
    "model/tokenizer.json": {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: place for place, word in enumerate(_VOCABULARY)},
            "unk_token": "<unk>",
        },
    },
    "model/tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "<eos>",
    },
    "chat.jsonl": {
        "messages": [
            {"role": "user", "content": "one two three"},
            {"role": "assistant", "content": "four five six"},
        ]
    },
}
_KEYS = (
    "model_name_or_path=model train_from_scratch=true dataset=chat.jsonl chat_template=plain "
    "output_dir=out cache_dir=cache cutoff_len=32 max_steps=1 logging_steps=1 global_batch_size=1 "
    "save_strategy=no save_hf_model=false html_report=false plot_loss=false"
).split()
# -S reads no .pth file, because an editable install would supply modules that the copy lacks
_CHECK = """
import importlib, sys
from pathlib import Path

folder = Path(sys.argv[1])
sys.path = [str(folder.parent), *sys.argv[2].split(":")]
for path in sorted(folder.glob("*.py")):
    module = importlib.import_module(f"{folder.name}.{path.stem}")
    assert Path(module.__file__) == path, f"{path} is taken from {module.__file__}"
sys.exit(importlib.import_module(f"{folder.name}.__main__").main(sys.argv[3:]))
"""
_OF_WORLDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTHONPATH")


def check_copy(folder: Path) -> float:
    """Import each module of a copied package and train a tiny model for one step, in another
    process -> its loss. Raises UserError with the last lines of the output if that fails."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "model").mkdir()
        for name, content in _FILES.items():
            Path(place, name).write_text(json.dumps(content))
        paths = ":".join(path for path in sys.path if os.path.isabs(path))
        command = [sys.executable, "-S", "-c", _CHECK, str(folder), paths, *_KEYS]
        env = {key: value for key, value in os.environ.items() if key not in _OF_WORLDS}
        done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
        if done.returncode:
            last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise UserError(f"{folder}: the copy does not train:\n{last}")
        line = Path(place, "out/trainer_log.jsonl").read_text().splitlines()[0]
        return json.loads(line)["loss"]
