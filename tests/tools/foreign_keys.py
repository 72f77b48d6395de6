"""`make foreign-keys`: writes tests/shared/foreign_keys.py, the arguments of other trainers.

The newest wheels that pip finds are downloaded and read, never installed or imported. mcore_adapter
is in no index: its list is written again as it is.
"""

import ast
import re
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path

from tests.shared import foreign_keys

FILE = Path(foreign_keys.__file__)
# name of the list -> (package, folders of its wheel, classes of its arguments)
SOURCES = {
    "LLAMA_FACTORY": (
        "llamafactory",
        "llamafactory/hparams/",
        "ModelArguments DataArguments TrainingArguments FinetuningArguments GeneratingArguments",
    ),
    "TRANSFORMERS": (
        "transformers",
        "transformers/training_args",
        "TrainingArguments Seq2SeqTrainingArguments",
    ),
    "TRL": (
        "trl",
        "trl/(trainer/|scripts/utils|experimental/(orpo|cpo|gkd)/)",
        "SFTConfig DPOConfig RewardConfig KTOConfig ORPOConfig CPOConfig GKDConfig ModelConfig "
        "ScriptArguments DatasetMixtureConfig",
    ),
    "AXOLOTL": ("axolotl", "axolotl/utils/schemas/", "AxolotlInputConfig"),
    "MS_SWIFT": (
        "ms-swift",
        "swift/(arguments|trainers|megatron)/(arguments|base_args|[a-z]+_args)",
        "SftArguments RLHFArguments MegatronSftArguments MegatronRLHFArguments",
    ),
}
HEADER = '''"""The arguments of other trainers: name, or name=default where it is not None or false.

Written by `make foreign-keys`, but for mcore_adapter's, which is in no index.
"""
'''


def main() -> None:
    """Download, read and write."""
    versions = {}
    lists = {"MCORE_ADAPTER": foreign_keys.MCORE_ADAPTER.split()}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        packages = [package for package, _, _ in SOURCES.values()]
        subprocess.run([*command, folder, *packages], check=True)
        wheels = {
            path.name.split("-")[0].replace("_", "-"): path for path in Path(folder).glob("*.whl")
        }
        for name, (package, folders, classes) in SOURCES.items():
            versions[package] = wheels[package].name.split("-")[1]
            lists[name] = arguments_of(classes_in(wheels[package], folders), classes.split())
        with zipfile.ZipFile(wheels["llamafactory"]) as archive:
            text = archive.read("llamafactory/data/template.py").decode()
        lists["LLAMA_FACTORY_TEMPLATES"] = re.findall(r'^ {4}name="([^"]+)",$', text, re.MULTILINE)
    FILE.write_text(as_module(versions, lists))
    print(f"{FILE}: " + ", ".join(f"{package} {v}" for package, v in versions.items()))


def classes_in(wheel: Path, folders: str) -> dict[str, ast.ClassDef]:
    """{name: class} of a wheel's modules whose path begins with the pattern `folders`."""
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for path in archive.namelist():
            if re.match(folders, path) and path.endswith(".py"):
                tree = ast.parse(archive.read(path))
                found.update({n.name: n for n in tree.body if isinstance(n, ast.ClassDef)})
    return found


def arguments_of(classes: dict[str, ast.ClassDef], names: list[str]) -> list[str]:
    """`name` or `name=default` of each field that the constructors of these classes, and of their
    bases in the same package, take."""
    words: dict[str, str] = {}
    for name in names:
        words.update(_fields(classes, name))
    return list(words.values())


def _fields(classes: dict[str, ast.ClassDef], name: str) -> dict[str, str]:
    words: dict[str, str] = {}
    node = classes[name]
    for base in reversed(node.bases):
        if isinstance(base, ast.Name) and base.id in classes and base.id != name:
            words.update(_fields(classes, base.id))
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            word = _word(line.target.id, line.value)
            if word and "ClassVar" not in ast.unparse(line.annotation):
                words[line.target.id] = word
    return words


def _word(key: str, value: ast.expr | None) -> str | None:
    """A field as the lists have it; None for one that the constructor does not take."""
    if isinstance(value, ast.Call):
        options = {option.arg: option.value for option in value.keywords}
        if "init" in options:
            return None
        value = options.get("default")
    try:
        default = None if value is None else ast.literal_eval(value)
    except ValueError:  # computed
        default = None
    if isinstance(default, bool):
        default = str(default).lower()
    if default in (None, "false", "") or re.search(r"\s", str(default)):
        return key
    return f"{key}={default}"


def as_module(versions: dict[str, str], lists: dict[str, list[str]]) -> str:
    """The text of tests/shared/foreign_keys.py."""
    rows = "".join(f'    "{package}": "{version}",\n' for package, version in versions.items())
    parts = [HEADER, f"VERSIONS = {{\n{rows}}}\n"]
    for name, words in lists.items():
        text = textwrap.fill(" ".join(words), 100, break_long_words=False, break_on_hyphens=False)
        parts.append(f'{name} = """\n{text}\n"""\n')
    return "\n".join(parts)


if __name__ == "__main__":
    main()
