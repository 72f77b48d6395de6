"""File names, atomic writes, model folders, and the text of errors and sizes."""

import contextlib
import errno
import functools
import json
import math
import os
import re
import sys
import sysconfig
import tempfile
import traceback
import uuid
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from .errors import Judge, UserError

# -- names

PathLike: TypeAlias = str | os.PathLike[str]  # a path, in either form
IGNORE_INDEX = -100  # the label of a token without loss
GENERATION_METRICS = ("exact_match", "rouge_l")  # metrics of predict_with_generate

# Hugging Face's file names
HF_CONFIG_NAME = "config.json"
HF_GENERATION_CONFIG_NAME = "generation_config.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"

# the vocabularies of fast tokenizers, WordPiece, BPE and sentencepiece
VOCABULARY_FILES = (
    *("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
    *("tokenizer.model.v3", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    "tiktoken.model",
)
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    *("tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)

# The processors of models with pictures: these files are copied, never loaded.
PROCESSOR_FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    "chat_template.json",
)

# PEFT's file names
ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"

# this package's file names
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


# The frames of a traceback: an error of a data loader's worker has a traceback in its text.
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
# how the file names of templates and of Python's library begin
_OF_LIBRARIES = ("<", sysconfig.get_path("stdlib"))
_BLOCK_BYTES = 1 << 20  # a block fits a core's cache
_FLUSH_BYTES = 1 << 28
_PIECE_BYTES = 1 << 26  # bytes of a file that one thread reads at once
READERS = 4  # threads that a rank reads with


# -- reading and writing


def write_file(path: PathLike, data: str | bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new one, never a part.

    Text is written as UTF-8. The bytes are on disk before the file gets its name. If OSError is
    raised, the old content is still there.
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


def write_json(path: PathLike, record: Any, **options: Any) -> None:
    """Write a record as indented JSON, atomically. options: further arguments of json.dumps."""
    write_file(path, json.dumps(record, indent=2, **options) + "\n")


def cache_folder(folder: str | None = None) -> Path:
    """The folder of data that later runs can reuse: `folder` (the key cache_dir), else
    $MCA_LITE_CACHE, else ~/.cache/mca_lite. Raises ValueError if ~ has no home folder."""
    name = folder or os.environ.get("MCA_LITE_CACHE") or "~/.cache/mca_lite"
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name}: {error}: set cache_dir, or MCA_LITE_CACHE, to a path") from None


def read_json(path: PathLike) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError with the file's name for other content."""
    try:
        record = json.loads(Path(path).read_bytes())
    except RecursionError:
        raise ValueError(f"{path}: its JSON is nested too deep to be read") from None
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, but {error}: copy the file again") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(record).__name__}")
    return record


def json_if_there(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no such file. ValueError as by read_json()."""
    return read_json(path) if path.is_file() else {}


@contextlib.contextmanager
def replacing(folder: PathLike) -> Iterator[Path]:
    """Context with a temporary folder. If it ends without an error, the files written there move
    into `folder` one by one, each atomically, and replace files or links of the same name; other
    files stay. After an error in the context nothing moves."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=".tmp") as temporary:
        yield Path(temporary)
        for path in sorted(Path(temporary).rglob("*")):
            target = folder / path.relative_to(temporary)
            if path.is_file():
                sync(path)
                os.replace(path, target)
            elif target.is_symlink() or not target.is_dir():
                target.unlink(missing_ok=True)
                target.mkdir()


def sync(path: PathLike) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: PathLike) -> tuple[int, int]:
    """(size in bytes, CRC-32) of a file; several threads read its pieces."""
    total = 0
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(READERS) as pool:
        size = os.fstat(file.fileno()).st_size
        starts = range(0, size, _PIECE_BYTES)
        pieces = pool.map(functools.partial(_checksum_of_piece, file.fileno()), starts)
        for count, crc in pieces:
            total = _joined_checksum(total, crc, count)
    return size, total


def _checksum_of_piece(descriptor: int, start: int) -> tuple[int, int]:
    """Compute the CRC-32 of one piece of a file, at most _PIECE_BYTES long -> (number of bytes,
    CRC-32). descriptor: the open file's number. start: the piece's first byte."""
    block = memoryview(bytearray(_BLOCK_BYTES))
    done = 0
    crc = 0
    while rest := block[: _PIECE_BYTES - done]:
        count = os.preadv(descriptor, [rest], start + done)
        if not count:
            break
        crc = zlib.crc32(rest[:count], crc)
        done += count
    return done, crc


def _joined_checksum(first: int, second: int, num_bytes: int) -> int:
    """Combine checksums: the CRC-32 of two byte strings end to end. first, second: the CRC-32 of
    each. num_bytes: length of the second string."""
    shift = 1 << 31  # x^0, the highest bit is the lowest power
    power = 1 << 23  # x^8
    while num_bytes:
        if num_bytes & 1:
            shift = _product(shift, power)
        power = _product(power, power)
        num_bytes >>= 1
    return _product(shift, first) ^ second


def _product(a: int, b: int) -> int:
    """Multiply two polynomials over bits modulo the polynomial of CRC-32 (a step of joining
    checksums). a, b and the result have reflected bits: the highest bit is the lowest power."""
    total = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            total ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return total


class ChecksumWriter:
    """A new file that counts its bytes (`size`) and computes their CRC-32 (`crc`) while it is
    written. Meanwhile a thread flushes earlier bytes to disk. If the context ends without an error,
    every byte is on disk."""

    def __init__(self, path: PathLike) -> None:
        self.size = 0
        self.crc = 0
        self._file = open(path, "wb")
        self._flusher = ThreadPoolExecutor(1)
        self._flushed: Future[Any] = self._flusher.submit(int)  # there is nothing to flush yet

    def __enter__(self) -> "ChecksumWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._file, self._flusher:
            if kind is None:
                self.flush()
                self._sync()
                self._flushed.result()

    def write(self, data: Any) -> int:
        """Write a bytes-like object -> its number of bytes."""
        data = memoryview(data).cast("B")
        for start in range(0, len(data), _BLOCK_BYTES):
            block = data[start : start + _BLOCK_BYTES]
            self.crc = zlib.crc32(block, self.crc)
            before = self.size
            self.size += self._file.write(block)
            if self.size // _FLUSH_BYTES > before // _FLUSH_BYTES:
                self._sync()
        return len(data)

    def flush(self) -> None:
        """Pass buffered bytes to the operating system."""
        self._file.flush()

    def _sync(self) -> None:
        """Wait until the last fsync has ended, then start the next one in the thread, without
        waiting for it."""
        self._flushed.result()
        self._flushed = self._flusher.submit(os.fsync, self._file.fileno())


def copy_files(source: Path, names: Iterable[str], folder: Path) -> list[str]:
    """Copy the files of `source` with one of `names` to `folder` -> the names copied. A link to a
    file outside `source` is skipped, unless it is a hub snapshot's link to its blobs."""
    copied = [name for name in names if lies_in(source / name, source)]
    for name in copied:
        write_file(folder / name, (source / name).read_bytes())
    return copied


def is_there(path: Path) -> bool:
    """True if `path` is a file, False if nothing is there. Raises ValueError for a folder, a pipe
    or a device: reading might never end."""
    exists = path.exists()
    if exists and not path.is_file():
        raise ValueError(f"{path}: it is no file, but a folder, a pipe or a device")
    return exists


def lies_in(path: Path, folder: Path) -> bool:
    """True if `path`, with links resolved, is a file inside `folder`. In a hub snapshot, whose
    files are links, a file among the same repository's blobs counts too."""
    real = Path(os.path.realpath(path))
    home = Path(os.path.realpath(folder))
    is_inside = real.is_relative_to(home)
    if snapshot := snapshot_of(home):
        is_inside |= real.is_relative_to(snapshot.parent.parent / "blobs")
    return is_inside and real.is_file()


def snapshot_of(path: Path) -> Path | None:
    """The snapshot of a hub model in which `path` lies, as in the hub's cache: a folder whose
    parent is named "snapshots", either `path` itself or a folder above it. None if there is none.
    """
    return next((p for p in (path, *path.parents) if p.parent.name == "snapshots"), None)


def check_can_write(folder: PathLike, key: str) -> None:
    """Raise ValueError if `folder` cannot be written or made. Nothing is changed: the check looks
    at the permissions of the folder, or of the nearest parent that exists. key: the configuration
    key that names the folder, for the error."""
    wanted = existing = Path(folder).absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(
            f"{key}: {wanted} cannot be written, since {existing} is no folder, or may not be "
            f"written: set {key} to another"
        )


# -- folders of models


_FILES_OF_A_MODEL = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")


def resolve_folder(
    model_name_or_path: str,
    revision: str | None = None,
    patterns: Iterable[str] = _FILES_OF_A_MODEL,
) -> Path:
    """The local folder of a model: `model_name_or_path` itself if it is a folder, otherwise a
    snapshot of that model from the Hugging Face hub, downloaded unless cached.

    revision, patterns: the hub's revision and file names to download. A name that looks like a path
    is not looked up on the hub. Raises ValueError if there is no such model, or it cannot be
    downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name = model_name_or_path
    if name and Path(name).is_dir():
        return Path(name)
    reason = ""
    if name and may_be_on_hub(name):
        command = f"modelscope download --model {name} --local_dir FOLDER"
        try:
            return Path(snapshot_download(name, allow_patterns=[*patterns], revision=revision))
        except LocalEntryNotFoundError:
            reason = (
                "; the hub does not answer, and its cache has no such model: is there a network? "
                f"Where there is one, `hf download {name} --local-dir FOLDER` makes a folder"
            )
        except Exception as error:  # the hub, the network and the cache raise many types
            reason = f"; the hub says: {describe_error(error).strip().splitlines()[0]}"
        reason += f"; if ModelScope has it: `{command}`, and the path of that folder here"
    raise ValueError(
        f"model {name}: expected a folder, or a model of the hub, which is Hugging Face's: "
        f"USE_MODELSCOPE has no effect; no such folder is here (seen from {Path.cwd()}){reason}"
    )


def may_be_on_hub(name: str) -> bool:
    """True if a name could be a repository on the hub, such as "Qwen/Qwen3-0.6B". False if it is a
    file, looks like a path, or names an existing parent folder. No network is used."""
    path = Path(name)
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    is_beside = "/" in name and path.parent.is_dir()
    return not (is_path or is_beside or path.is_file())


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that describe the language model: text_config if there is one,
    otherwise all keys. For a model that also generates speech, they are looked up in its
    thinker_config."""
    values = thinker_values(values)
    return values.get("text_config") or values


def thinker_values(values: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the trained model: thinker_config if there is one,
    as in Qwen3-Omni, whose thinker alone is trained; otherwise everything."""
    return values.get("thinker_config") or values


def read_model_config(
    name: str,
    judge: Judge,
    revision: str | None = None,
    own_weights: bool = True,
    files: tuple[str, ...] = (HF_CONFIG_NAME, MCA_CONFIG_NAME),
) -> dict[str, Any]:
    """Read a model's configuration: the first of `files` that is in the model's folder, or
    config.json from the hub at `revision`. For a model that also generates speech, only the part
    that is trained is returned (thinker_values). If no configuration can be used, `judge` (which
    collects errors) gets a Problem for model_name_or_path, and the result is {}.

    own_weights: True if the model's weights will be read too; then a checkpoint in mcore_adapter's
    format is a Problem.
    """
    folder = Path(name)
    of_mcore_adapter = own_weights and why_mcore_adapters(folder)
    if (folder / ADAPTER_CONFIG_NAME).is_file() and not (folder / HF_CONFIG_NAME).is_file():
        reason = "it holds adapters, without the model that they belong to"
        remedy = f"that model, and adapter_name_or_path: {name}"
    elif of_mcore_adapter:
        reason, remedy = of_mcore_adapter
    else:
        remedy = f"a folder with {HF_CONFIG_NAME}, or a model of the hub"
        try:
            paths = filter(Path.is_file, [folder / file for file in files])
            path = next(paths, None)
            if path is None:
                path = resolve_folder(name, revision, [HF_CONFIG_NAME]) / HF_CONFIG_NAME
            return thinker_values(read_json(path))
        except (ValueError, OSError) as error:
            reason = str(error)
    judge.refuse("model_name_or_path", reason, remedy, name)
    return {}


def read_mca_config(folder: Path) -> dict[str, Any]:
    """The content of this package's mca_config.json in a folder; {} if there is none, or if it is
    mcore_adapter's, which has no model_class."""
    values = json_if_there(folder / MCA_CONFIG_NAME)
    return values if "model_class" in values else {}


def why_mcore_adapters(folder: Path) -> tuple[str, str] | None:
    """(reason, remedy) for an error message if a folder's weights are only in mcore_adapter's own
    format, which is not read here; None for other folders."""
    of_run = folder.parent if folder.name.startswith("iter_") else folder
    is_cut = any(of_run.glob("iter_*"))
    if not is_cut or any(folder.glob("*.safetensors")) or read_mca_config(folder):
        return None
    export = f"python tools/convert.py --checkpoint_path {of_run} --output_path DST"
    return (
        "it is a checkpoint in mcore_adapter's own format (iter_*), cut for its layout",
        f"{export} in mcore_adapter's folder, and then DST",
    )


# -- text of errors and sizes


def describe_error(error: BaseException) -> str:
    """An error's text for users. The error's type is named, unless it is a UserError, ValueError or
    OSError that has a text. A full disk or quota is called "disk full". An error of torch's archive
    writer, which hides the cause, is described by the OSError in its context; without one, as a
    full disk."""
    if "inline_container" in str(error):
        # torch's archive writer hides the operating system's error
        full = OSError("a file could not be written whole: No space left on device, or a limit")
        cause = error.__context__
        error = cause if isinstance(cause, OSError) else full
    text = str(error)
    if not text or not isinstance(error, (UserError, ValueError, OSError)):
        text = f"{type(error).__name__}: {text}"
    is_full = "No space left on device" in text or getattr(error, "errno", None) == errno.EDQUOT
    return f"disk full: {text}" if is_full and "disk full" not in text else text


def users_place(error: BaseException) -> str | None:
    """The place in the user's code that an error comes from, as "function (file:line)": the
    innermost code of the traceback that is in no library. None if this code belongs to this
    package, or if all code is in libraries."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__, chain=False))
    for file, line, function in reversed(_FRAME.findall(text)):
        if Path(file).is_relative_to(Path(__file__).parent):
            return None
        if not (file.startswith(_OF_LIBRARIES) or f"-packages{os.sep}" in file):
            return f"{function} ({file}:{line})"
    return None


def lost_stdout() -> bool:
    """Write a space to stdout -> True if that fails, because its reader has gone or the disk is
    full. Later output is then discarded."""
    try:
        print(end=" ", flush=True)
    except OSError:
        # Python flushes stdout at exit, and would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def first_of(texts: list[str], most: int = 3) -> str:
    """The first `most` texts joined by commas, then "and N more" if there are more."""
    more = [f"and {len(texts) - most} more"] * (len(texts) > most)
    return ", ".join(texts[:most] + more)


def printable(text: str, kept: str = "\n\t") -> str:
    """The text with characters that str.isprintable() refuses, except those in `kept`, replaced by
    U+FFFD. Text from files must not control a terminal."""
    return "".join(c if c.isprintable() or c in kept else "\ufffd" for c in text)


def parse_size(size: str | int) -> int:
    """The bytes in a size such as "5GB", "500MB", "10GiB" or 1000; GB is 1000 ** 3, GiB 1024 ** 3.
    Fractions are rounded up. Raises ValueError for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(size), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{size!r} is not a size, expected something like 5GB or 500MB")
    number, prefix, binary = match.groups()
    unit = 1024 if binary else 1000
    return math.ceil(float(number) * unit ** " KMGT".index(prefix.upper() or " "))


def show_size(count: float) -> str:
    """A number of bytes as text in MiB, or in GiB from 0.1 GiB on."""
    if count < 0.1 * 2**30:
        return f"{count / 2**20:.2f} MiB"
    return f"{count / 2**30:.2f} GiB"
