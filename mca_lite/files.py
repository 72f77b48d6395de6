"""Small files that are written whole or not at all; words for folders and files that fail."""

import contextlib
import difflib
import errno
import json
import math
import os
import re
import sysconfig
import tempfile
import traceback
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UserError

# -- names of files and numbers

IGNORE_INDEX = -100  # a label that carries no loss
GENERATION_METRICS = ("exact_match", "rouge_l")  # of predict_with_generate

# Hugging Face's file names
HF_CONFIG_NAME = "config.json"
HF_GENERATION_CONFIG_NAME = "generation_config.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"

# those of a tokenizer: fast ones, WordPiece, BPE, sentencepiece, and what transformers adds
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "tokenizer.model.v3", "spiece.model", "sentencepiece.bpe.model"),
    *("tekken.json", "tiktoken.model"),
)

# PEFT's
ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"

# our own
MCA_CONFIG_NAME = "mca_config.json"
RUN_CONFIG_NAME = "config.yaml"
TRAINER_STATE_NAME = "trainer_state.json"
TRAINER_LOG_NAME = "trainer_log.jsonl"
EVAL_RESULTS_NAME = "eval_results.json"
RUN_SUMMARY_NAME = "run_summary.json"
GENERATIONS_NAME = "generations.jsonl"
PREDICTIONS_NAME = "predictions.jsonl"
LOSS_PLOT_NAME = "training_loss.png"
PAGE_NAME = "report.html"
CHECKPOINT_PREFIX = "checkpoint"


# -- files and folders

# a frame of a traceback, of a data loader's worker too, whose traceback is in its error's text
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
_OF_OTHERS = ("<", sysconfig.get_path("stdlib"))  # how files of templates and of Python begin
_BLOCK_BYTES = 1 << 20  # fits a core's cache
_OF_MODELSCOPE = {"USE_MODELSCOPE", "USE_MODELSCOPE_HUB"}  # variables of others


def write_file(path: str | os.PathLike, data: str | bytes) -> None:
    """Write a file in one step: a reader sees the old content or the new one, never a part of it.

    Text is written as UTF-8. The bytes are on the disk before the name points to them. OSError
    where that fails; what was there before is untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, record: Any, **options) -> None:
    """Write a record as indented JSON, with write_file. options: those of json.dumps."""
    write_file(path, json.dumps(record, indent=2, **options) + "\n")


@contextlib.contextmanager
def replacing(folder: str | os.PathLike) -> Iterator[Path]:
    """A folder beside, whose files take the place of those of `folder` at the end, each in one
    step; links there are replaced, and what they lead to is left alone."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=".tmp") as beside:
        yield Path(beside)
        for path in sorted(Path(beside).rglob("*")):
            target = folder / path.relative_to(beside)
            if path.is_file():
                sync(path)
                os.replace(path, target)
            elif target.is_symlink() or not target.is_dir():
                target.unlink(missing_ok=True)
                target.mkdir()


def is_there(path: Path) -> bool:
    """Whether there is a file. ValueError for a folder, a pipe or a device in its place: to read it
    might never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: it is no file, but a folder, a pipe or a device")
    return path.exists()


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a file is there and, whichever links lead to it, in the folder; a snapshot of the
    hub's cache is links to the blobs beside it."""
    real = Path(os.path.realpath(path))
    home = Path(os.path.realpath(folder))
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    return real.is_file() and any(real.is_relative_to(place) for place in homes)


def checksum(path: str | os.PathLike) -> tuple[int, int]:
    """(size in bytes, CRC-32) of a file."""
    size = 0
    crc = 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            size += count
            crc = zlib.crc32(block[:count], crc)
    return size, crc


def sync(path: str | os.PathLike) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why_no_model(name: str) -> str | None:
    """Why a name that is no folder can be no model of the hub either; None where it could be one.

    What looks like a path is one, and so is a name that begins with a folder which is here.
    """
    path = Path(name)
    if path.is_file():
        return "expected a folder, and this is a file"
    parent = path.expanduser().parent
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if not is_path and not ("/" in name and parent.is_dir()):
        return None
    reason = f"no such folder (seen from {Path.cwd()})"
    if not parent.is_dir():
        return f"{reason}, nor is {parent} there"
    folders = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    near = difflib.get_close_matches(path.name, folders)
    if near:
        reason += f": did you mean {' or '.join(str(parent / entry) for entry in near)}?"
    return reason


def resolve_folder(model_name_or_path: str, revision: str | None = None) -> Path:
    """The local folder of a model: itself, or the hub's snapshot, which may be downloaded.

    ValueError, before the hub is asked, for what can only be a folder and is not there.
    """
    if Path(model_name_or_path).is_dir():
        return Path(model_name_or_path)
    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
    try:
        if missing := why_no_model(model_name_or_path):
            raise ValueError(missing)
        return _snapshot(model_name_or_path, revision, patterns)
    except ValueError as error:
        raise ValueError(f"model {model_name_or_path}: {error}") from error


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    """The folder of the hub's cache with a model's files, downloaded where they are not in it.

    A hub that does not answer is asked once, not again and again. ValueError in a line.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, revision=revision))
    except Exception as error:  # whatever a hub, a network or a cache comes up with
        words = "expected a folder, or a model of the hub; no such folder is here (seen from "
        words += f"{Path.cwd()}), and "
        if isinstance(error, LocalEntryNotFoundError):
            words += "the hub does not answer, nor has its cache such a model: is there a network? "
            words += f"Where there is one, `hf download {name} --local-dir FOLDER` makes a folder"
        elif isinstance(error, RepositoryNotFoundError):
            words += "the hub has none of this name, or one that wants HF_TOKEN"
        else:
            words += f"the hub says: {describe_error(error).strip().splitlines()[0]}"
        for variable in _OF_MODELSCOPE & os.environ.keys():
            words += f". {variable} is not read: of ModelScope's models the folder is named"
        raise ValueError(f"{words}. A folder can be named as ./{name}") from error


def is_of_mcore_adapter(folder: str | os.PathLike) -> bool:
    """Whether a folder's mca_config.json is one that mcore_adapter wrote: it has fields of its own,
    and does not say which class of ours it is for."""
    path = Path(folder) / MCA_CONFIG_NAME
    return path.is_file() and "model_class" not in read_json(path)


def why_mcore_adapters(folder: str | os.PathLike) -> tuple[str, str] | None:
    """The reason and the remedy for a checkpoint whose weights are in mcore_adapter's own format
    alone; None for other folders."""
    folder = Path(folder)
    if folder.name.startswith("iter_") and (
        list(folder.glob("mp_rank_*")) or is_of_mcore_adapter(folder.parent)
    ):
        folder = folder.parent
    own = [*folder.glob("iter_*"), *folder.glob("latest_checkpointed_iteration.txt")]
    if not own or list(folder.glob("*.safetensors")):
        return None
    reason = f"it is a checkpoint in mcore_adapter's own format ({own[0].name}), cut for its layout"
    export = f"python tools/convert.py --checkpoint_path {folder} --output_path DST"
    return reason, f"{export} in mcore_adapter's folder, and then DST"


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """The object in a JSON file. ValueError with the file's name for whatever else it holds."""
    try:
        record = json.loads(Path(path).read_bytes())
    except RecursionError:
        raise ValueError(f"{path}: its JSON is nested too deep to be read") from None
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, but {error}: copy the file again") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(record).__name__}")
    return record


def read_model_config(
    name: str,
    judge: Any,
    revision: str | None = None,
    own_weights: bool = True,
    files: tuple[str, ...] = (HF_CONFIG_NAME, MCA_CONFIG_NAME),
) -> dict[str, Any]:
    """What the first of `files` that there is in a model's folder holds, or the config.json of a
    model of the hub; {} where that is refused. judge: errors.Judge. own_weights: its weights
    are read later."""
    folder = Path(name)
    key = "model_name_or_path"
    held = [folder / file for file in files if (folder / file).is_file()]
    remedy = f"a folder with {HF_CONFIG_NAME}, or a model of the hub"
    if (folder / ADAPTER_CONFIG_NAME).is_file() and not (folder / HF_CONFIG_NAME).is_file():
        reason = "it holds adapters, without the model that they belong to"
        judge.refuse(key, reason, f"that model, and adapter_name_or_path: {name}", name)
    elif own_weights and (other := why_mcore_adapters(folder)):
        judge.refuse(key, *other, name)
    elif folder.is_dir() and not held:
        judge.refuse(key, f"there is no {HF_CONFIG_NAME} in this folder", remedy, name)
    elif not held and (missing := why_no_model(name)):
        judge.refuse(key, missing, remedy, name)
    else:
        try:
            if not held:
                held = [_snapshot(name, revision, [HF_CONFIG_NAME]) / HF_CONFIG_NAME]
            return read_json(held[0])
        except (ValueError, OSError) as error:
            judge.refuse(key, str(error), remedy, name)
    return {}


def check_can_write(folder: str | os.PathLike, key: str) -> None:
    """ValueError where a folder cannot be made, or cannot be written. Nothing is made or changed:
    the nearest folder that is there is asked."""
    asked = there = Path(folder).absolute()
    while not os.path.lexists(there):
        there = there.parent
    reason = None
    if not there.is_dir():
        reason = f"{there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        reason = f"nothing may be written in {there}"
    if reason is not None:
        raise ValueError(f"{key}: {asked} cannot be written, since {reason}: set {key} to another")


def describe_error(error: BaseException) -> str:
    """One line about an error: its text, and its type where the text may not say enough."""
    if "inline_container" in str(error):
        # torch's archives: their writer's own complaint hides what the system said before it
        before = error.__context__
        if not isinstance(before, OSError):
            return (
                "disk full: a file could not be written whole: No space left on device, or a limit"
            )
        error = before
    plain = isinstance(error, (UserError, ValueError, OSError)) and str(error)
    text = str(error) if plain else f"{type(error).__name__}: {error}"
    is_full = getattr(error, "errno", None) == errno.EDQUOT or "No space left on device" in text
    return f"disk full: {text}" if is_full and "disk full" not in text else text


def printable(text: str, kept: str = "\n\t") -> str:
    """Returns text that cannot steer a terminal: control characters are replaced, but for those of
    `kept`."""
    return "".join(c if c.isprintable() or c in kept else "\ufffd" for c in text)


def users_place(error: BaseException) -> str | None:
    """The function, file and line of the user's own code that raised an error; None where the
    innermost frame outside of libraries is this package's."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__, chain=False))
    for file, line, function in reversed(_FRAME.findall(text)):
        if Path(file).is_relative_to(Path(__file__).parent):
            return None
        if not (file.startswith(_OF_OTHERS) or f"-packages{os.sep}" in file):
            return f"{function} ({file}:{line})"
    return None


def show_name(path: str | os.PathLike) -> str:
    """The name of a file as it can be printed, whatever its bytes are."""
    return os.fsencode(Path(path).name).decode("utf-8", "backslashreplace")


def parse_size(size: str | int) -> int:
    """Bytes of "5GB", "500MB", "2KB", "10GiB" or a number. Raises ValueError for anything else."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", size, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{size!r} is not a size, expected something like 5GB or 500MB")
    number, prefix, binary = match.groups()
    unit = (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    return math.ceil(float(number) * unit)


def show_size(count: float) -> str:
    """Bytes as MiB or GiB."""
    if count < 0.1 * 2**30:
        return f"{count / 2**20:.2f} MiB"
    return f"{count / 2**30:.2f} GiB"
