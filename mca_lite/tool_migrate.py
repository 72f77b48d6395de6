"""Another trainer's file as a configuration of this package, on standard output.

python -m mca_lite migrate FILE > config.yaml
    FILE  YAML or JSON of axolotl, ms-swift, TRL, NeMo Automodel, mcore_adapter or LLaMA-Factory;
          TOML of torchtitan; or a shell script with one command of ms-swift, TRL or mcore_adapter

A line says which key it comes from, unless that is the same here. Keys without effect, refused ones
and unknown ones stay as comments, with the reason, or the nearest key. Exit code 3: there are
refused or unknown keys.
"""

import contextlib
import difflib
import fnmatch
import json
import re
import shlex
import string
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .args import key_fields, key_groups
from .args_values import as_list, check_keys, loads_yaml, read_config_file
from .cli import finish, parser_of
from .errors import UserError
from .tables import ALIASES, foreign_key
from .tool_migrate_tables import ROWS, SIGNS

_ENTRY = "set in dataset_info.json: "
LEFT = 3  # the exit code where keys are refused or unknown
ROW = re.compile(r"(?m)^(?:@(\S+) )?([^\s:=]+)(?:=([^\s:]+))?: ([^|\n]+)(?:\| (.*))?$")
_VARIABLE = re.compile(r"(?s)\s*(?:export )?(\w+)=(\"[^\"]*\"|'[^']*'|\S+)\s*(?:#.*)?")
_TEST = re.compile(r"\s*if \[ (\S+) ==? (\S+) \]")
_RANKS = re.compile(r"(?i)nproc_per_node[= ](\d+)")
_EXPR = re.compile(r"\$\(expr (\d+)((?: / \d+)+)\)")
_SCRIPT = re.compile(
    r"(sft|dpo|mpo|kto|reward|orpo|cpo|gkd|grpo|rloo|ppo|online_dpo|rlhf\b|pt\b)\w*"
)
_PROGRAMS = {"swift": "ms-swift", "megatron": "ms-swift", "trl": "TRL"}


class Row(NamedTuple):
    """A row of the conversion table for another trainer: what becomes of a key of its files.

    tags: features that the file must have, joined by +; alternatives are separated by commas.
    keys, values: patterns, separated by commas, one of which the key or its value must match; no
    values: any value matches.
    words: this package's keys that replace it, or key=value; "-": it has no effect; "!": it is
    refused; "datasets ...": it lists datasets, see _datasets.
    note: a reason or hint."""

    tags: str
    keys: str
    values: str
    words: str
    note: str

    def takes(self, key: str, value: Any, tags: set[str]) -> bool:
        wanted = self.tags.split(",")
        return (
            any(fnmatch.fnmatchcase(key, pattern) for pattern in self.keys.split(","))
            and any(tags.issuperset(filter(None, one.split("+"))) for one in wanted)
            and (not self.values or _fits(value, self.values))
        )


class Line(NamedTuple):
    """A key of another trainer's file, and what becomes of it.

    key, value: as in the file. keys: {key of this package that replaces it: its value}. fate:
    "taken", "without effect", "refused" or "unknown". note: a reason or hint; for an unknown key,
    the nearest key of this package."""

    key: str
    value: Any
    keys: dict[str, Any]
    fate: str
    note: str

    def text(self) -> str:
        source = f"{self.key}: {_shown(self.value)}"
        if self.fate != "taken":
            return f"# {source}  -> {self.fate}: {self.note}"
        if [*self.keys.values()] == [self.value]:
            source = "" if self.key in self.keys else self.key
        comment = "; ".join(filter(None, [source, self.note]))
        lines = [f"{key}: {_shown(value)}" for key, value in self.keys.items()]
        return "\n".join(f"{line}  # {comment}" if comment else line for line in lines)


def main(words: list[str]) -> int:
    """Print another trainer's file in this package's keys -> exit code. words: the command line."""
    parser = parser_of("migrate", __doc__)
    parser.add_argument("file", metavar="FILE", help="another trainer's file")
    return finish(_migrate, Path(parser.parse_args(words).file))


def _migrate(path: Path) -> int:
    form, values, launch = read(path)
    lines = migrated(form, values)
    print(f"# From {path.name}, in {form}'s keys; reasons follow the arrows.")
    print(f"# {launch} train.py <this file>", *(line.text() for line in lines), sep="\n")
    counts = Counter(line.fate for line in lines)
    print(", ".join(f"{count} {fate}" for fate, count in counts.items()), file=sys.stderr)
    return LEFT if counts["refused"] or counts["unknown"] else 0


# -- reading


def read(path: Path) -> tuple[str, dict[str, Any], str]:
    """Read another trainer's file -> (name of the trainer, {key: raw value}, beginning of the
    command that launches it). Keys of nested groups are joined by dots; booleans are texts, and
    empty values are left out. UserError for a shell script without such a command, and for a file
    without keys."""
    if path.suffix == ".toml":
        import tomllib

        values = _flat(tomllib.loads(path.read_text()))
    elif path.suffix in (".yaml", ".yml", ".json"):
        values = _flat(read_config_file(path))
    else:
        return _script(path)
    if not values:
        raise UserError(f"{path}: no keys: expected another trainer's configuration")
    return _form(values), values, "torchrun --nproc_per_node <GPUs>"


def _form(values: dict[str, Any]) -> str:
    return next(
        form
        for form, signs in SIGNS.items()
        if any(fnmatch.filter(values, sign) for sign in signs.split())
    )


def _flat(values: dict, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        elif value not in (None, "", "null", []):
            found[f"{prefix}{name}"] = str(value).lower() if isinstance(value, bool) else value
    return found


def _script(path: Path) -> tuple[str, dict[str, Any], str]:
    """Read the first command of ms-swift, TRL or a Python script in a shell script -> (name of the
    trainer, {option: raw value, and "method"}, beginning of the command that launches it).

    Of a plain `if [ A = B ]`, without elif or an if inside, the branch that bash takes is read; of
    most other conditions all branches are. UserError if there is no command, or a quotation is
    open."""
    text = path.read_text().replace("\\\n", " ")
    variables: dict[str, str] = {}
    is_left_out: bool | None = None  # None: no comparison is open
    for line in _whole_lines(path, text):
        line = string.Template(line).safe_substitute(variables)
        line = _EXPR.sub(lambda found: str(_quotient(*found.groups())), line)
        if test := _TEST.match(line):
            is_left_out = test[1].strip("\"'") != test[2].strip("\"'")
        elif line.strip() in ("else", "fi") and is_left_out is not None:
            is_left_out = None if line.strip() == "fi" else not is_left_out
        if is_left_out:
            continue
        if assigned := _VARIABLE.fullmatch(line):
            variables[assigned[1]] = assigned[2].strip("\"'")
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:  # a quotation mark within a variable
            raise UserError(f"{path}: {error} in {line!r:.80}") from None
        for place, word in enumerate(words):
            form, method = _program(word, words[place + 1 :])
            if form:
                options = _options(words[place:])
                if isinstance(config := options.get("config"), str):
                    options = _flat(read_config_file(path.parent / config)) | options
                    del options["config"]
                ranks = _RANKS.search(f"{text} {line}")
                launch = f"torchrun --nproc_per_node {ranks[1] if ranks else '<GPUs>'}"
                return form, {"method": method} | options, launch
    raise UserError(f"{path}: no command of ms-swift, TRL or mcore_adapter: expected its options")


def _whole_lines(path: Path, text: str) -> Iterator[str]:
    """Yield the lines of a shell script. A line whose quotation goes on is joined with the next
    lines, up to the quotation's end; UserError if there is no end. path: named in the message.
    text: the script."""
    held = ""
    for line in text.splitlines():
        held = f"{held}\n{line}" if held else line
        try:
            shlex.split(held, comments=True)
        except ValueError:
            continue
        yield held
        held = ""
    if held:
        start = held.partition("\n")[0]
        raise UserError(f"{path}: expected the end of the quotation that begins in {start!r}")


def _quotient(number: str, divisors: str) -> int:
    """The value of `expr 120 / 4 / 2`. number: "120". divisors: " / 4 / 2"."""
    value = int(number)
    for divisor in divisors.split("/")[1:]:
        value //= int(divisor)
    return value


def _program(word: str, rest: list[str]) -> tuple[str, str]:
    """Recognise the command that starts another trainer. word: a word of a command line. rest: the
    words after it. Returns (trainer, method), such as ("TRL", "trl sft"), if such a command begins
    with `word`; otherwise ("", "")."""
    name = Path(word).name
    if not any(option.startswith("--") for option in rest):
        return "", ""
    if name in _PROGRAMS:
        return _PROGRAMS[name], f"{name} {rest[0]}"
    if method := _SCRIPT.match(name):
        program = "swift" if "swift" in word else "trl"
        return _PROGRAMS[program], f"{program} {method[1]}"
    return ("Hugging Face", "train") if name.endswith(".py") else ("", "")


def _options(words: list[str]) -> dict[str, Any]:
    options: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            options[key.replace("-", "_")] = [value] if equals else []
        elif options:
            options[key].append(word.rstrip(","))
    given = {key: found for key, found in options.items() if found != [""]}
    return {key: found if found[1:] else [*found, "true"][0] for key, found in given.items()}


# -- rewriting


def migrated(form: str, values: dict[str, Any]) -> list[Line]:
    """Translate another trainer's keys -> a Line (a key, and what becomes of it) per key of the
    file, in order. More Lines follow for keys that the file lacks and for whose absence the
    trainer's table has a row, mostly because their default differs from this package's. form: the
    trainer's name. values: {key: raw value} of the file."""
    rows = [Row(*found) for found in ROW.findall(ROWS[form])]
    tags = {*map(str, values.values()), *values.get("method", form.removeprefix("ms-")).split()}
    tags |= {key for key, value in values.items() if str(value) not in ("false", "0", "0.0")}
    taken: dict[str, Any] = {}
    lines = []
    for key, value in values.items():
        row = next((row for row in rows if row.takes(key, value, tags)), None)
        lines.append(_checked(_line(row, key, value), taken))
    for row in rows:
        is_absent = "absent" in row.values.split(",") and row.keys not in values
        if is_absent and row.takes(row.keys, "absent", tags | {*map(str, taken.values())}):
            line = _line(row, row.keys, "left out")
            if not taken.keys() & line.keys.keys():
                lines.append(_checked(line, taken))
    return lines


def _line(row: Row | None, key: str, value: Any) -> Line:
    if row is None:
        return _looked_up(key, value)
    words = row.words.strip()
    note = row.note.replace("{}", _shown(value))
    if words in ("-", "!"):
        return Line(key, value, {}, "refused" if words == "!" else "without effect", note)
    if words.startswith("datasets"):
        return Line(key, value, *_datasets(value, *words.split()[1:]))
    keys = {}
    for word in words.split():
        name, equals, text = word.partition("=")
        for place, item in enumerate(value if isinstance(value, list) else []):
            text = text.replace(f"{{{place}}}", _shown(item))
        keys[name] = text.replace("{}", _shown(value)) if equals else value
    return Line(key, value, keys, "taken", note)


def _looked_up(key: str, value: Any) -> Line:
    """Find out what becomes of a key that no row of the trainer's table matches -> a Line that says
    it. The key may be one of this package, an alias of one, or a known key of others
    (FOREIGN_KEYS), also after "no_". Any other key is "unknown"."""
    name = ALIASES.get(key, key)
    if name in key_fields():
        return Line(key, value, {name: value}, "taken", "")
    row = foreign_key(key) or foreign_key(key.partition(".")[0])
    if row is None and key.startswith("no_"):  # a switch of transformers
        return _looked_up(key[3:], "false")
    if row is None:
        near = difflib.get_close_matches(key.rpartition(".")[2], key_fields(), n=1)
        return Line(key, value, {}, "unknown", f"near: {', '.join(near) or 'none'}")
    if not row.remedy or str(value).lower() in row.off:
        return Line(key, value, {}, "without effect", row.reason)
    return Line(key, value, {}, "refused", f"{row.reason}: {row.remedy}")


def _checked(line: Line, taken: dict[str, Any]) -> Line:
    """Check a Line (a key, and what becomes of it) against this package's rules and the lines
    before it. It becomes "refused", with a note, if a value is not valid for its key of this
    package, or if an earlier line has set that key to another value. Keys that an earlier line has
    set to the same value are left out; a line that loses all its keys so becomes "without effect".
    taken: {key: value} of the lines so far; the keys of an accepted line are added, in place."""
    known = {key: str(value) for key, value in taken.items()}
    keys = {key: value for key, value in line.keys.items() if known.get(key) != str(value)}
    if line.keys and not keys:
        name = next(iter(line.keys))
        return Line(line.key, line.value, {}, "without effect", f"{name} is {taken[name]} above")
    wrong = [f"{key} is {taken[key]} above" for key in keys if key in taken]
    for group in key_groups():
        found = check_keys(group, **{key: _text(value) for key, value in keys.items()})
        wrong += [f"{problem.reason}: {problem.suggestion}" for problem in found]
    if wrong:
        return Line(line.key, line.value, {}, "refused", "; ".join(wrong))
    taken |= keys
    return Line(line.key, line.value, keys, line.fate, line.note)


def _datasets(value: Any, key: str = "dataset", *stages: str) -> tuple[dict[str, Any], str, str]:
    """Translate another trainer's list of datasets -> (keys of this package, fate, note). value:
    names, name#count of ms-swift, or axolotl's mappings with a path. key: this package's key that
    gets the list. stages: a value for the key `stage`, if it is to be set too."""
    keys: dict[str, Any] = {key: [], **dict(zip(["stage"], stages, strict=False))}
    notes = []
    for entry in as_list(value):
        if not isinstance(entry, dict):
            name, _, count = str(entry).partition("#")
            keys[key].append(name)
            if count:
                notes.append(f"max_samples: {count}, of each set, for {name} alone there")
            continue
        files = entry.get("data_files") or entry.get("path")
        keys[key] += as_list(files)
        for name in entry.keys() - {"path", "data_files", "ds_type"}:
            if (name, entry[name]) != ("split", "train"):
                notes.append("the records show the type" if name == "type" else _ENTRY + name)
    return keys, "taken", "; ".join(sorted({*notes}))


# -- text


def _fits(value: Any, patterns: str) -> bool:
    text = str(value).lower()
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns.split(","))


def _text(value: Any) -> Any:
    """A value, with text such as "[a, b]" or "{a: 1}" parsed as YAML if it is valid."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        with contextlib.suppress(yaml.YAMLError):  # a chat template begins so too
            return loads_yaml(value)
    return value


def _shown(value: Any) -> str:
    """A value as YAML on one line, in quotes only if YAML would read it differently
    without them."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        is_plain = "\n" not in value and loads_yaml(f"x: {value}") in (
            {"x": value},
            {"x": _text(value)},
        )
    except yaml.YAMLError:
        is_plain = False
    return value if is_plain else json.dumps(value)
