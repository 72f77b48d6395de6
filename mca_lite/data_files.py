"""The files of a dataset: paths, folders, dataset_info.json, the hub, and the readers of each kind
of file.

A place in the user's data is "file:line" throughout (parquet: file:row), for errors.
"""

import contextlib
import csv
import difflib
import errno
import gzip
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from . import world
from .files import describe_error, sync
from .tables import Objective

_COMPRESSED = (".json", ".jsonl", ".txt", ".csv")
SUFFIXES = (*_COMPRESSED, ".parquet", *(f"{suffix}.gz" for suffix in _COMPRESSED))
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_AS_A_WHOLE = " as a whole"  # ends the kind of a text file of one document
_TOO_DEEP = "it is nested too deep"
_MOST_LEVELS = 256  # Python's recursion ends at 1000; templates and pickles take several a level
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escaped: alone, it makes no text
SIDES = ("chosen", "rejected")  # the two answers of a preference pair, in this order everywhere

# keys of LLaMA-Factory's dataset_info.json
_HUB_KEYS = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_UNUSED_KEYS = ("subset", "split", "folder")  # they select within a hub repository
_KEYS = ("file_name", "hf_hub_url", "formatting", "columns", "tags", "num_samples", "ranking")
_KEYS += ("values",)
_FORMATTINGS = ("alpaca", "sharegpt", "openai")
_TEXT_COLUMNS = ("prompt", "query", "response", "history", "messages", "system", "tools", "text")
_OTHER_COLUMNS = ("images", "videos", "audios", *SIDES, "kto_tag")
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


@dataclass
class DatasetSpec:
    """One dataset: its files, and its declaration in dataset_info.json (None, {}: detected by the
    first record).

    files: path -> kind, which selects the reader. formatting: the name of a record format. columns:
    name of a column in dataset_info.json -> in the files. tags: names within messages. num_samples:
    only the first so many records. notes: lines for the report. values: of registered columns, for
    records without one of their own.
    """

    name: str
    files: dict[str, str] = field(default_factory=dict)
    formatting: str | None = None
    columns: dict = field(default_factory=dict)
    tags: dict = field(default_factory=dict)
    num_samples: int | None = None
    notes: list[str] = field(default_factory=list)
    values: dict = field(default_factory=dict)


# -- which files


def resolve(entries: list[str], data_args, objective: Objective) -> list[DatasetSpec]:
    """One DatasetSpec per entry: a name in dataset_dir/dataset_info.json, else a file or a folder
    (as given, or in dataset_dir), else a dataset of the Hugging Face hub, from its cache if it is
    there.

    Raises: ValueError for an entry of no such kind, or a declaration that cannot be honoured.
    """
    folder = Path(data_args.dataset_dir)
    info_file = folder / "dataset_info.json"
    info = _read_info(info_file) if info_file.is_file() else {}
    specs = []
    for entry in entries:
        path = next((p for p in (Path(entry), folder / entry) if p.exists()), None)
        if entry in info:
            spec, files = _declared(entry, info[entry], info_file, objective)
        elif path is not None:
            spec = DatasetSpec(entry)
            files = _files_of(path)
        elif _REPOSITORY.fullmatch(entry) and kind_of(entry) not in SUFFIXES:
            spec = DatasetSpec(entry)
            files = _files_of_hub(entry, {}, f"dataset {entry!r}")
        else:
            names = f"it has {', '.join(sorted(info))}" if info else "which is not there"
            raise ValueError(
                f"dataset {entry!r}: expected a file, a folder, or a name in {info_file} ({names})"
                + _did_you_mean(entry, info, "; ")
            )
        spec.files = {file: kind_of(file) for file in files}
        _sample_texts(spec, data_args.sample_by)
        specs.append(spec)
    return specs


def _sample_texts(spec: DatasetSpec, sample_by: str) -> None:
    """Make documents of the lines or files of .txt, in place."""
    texts = [file for file, kind in spec.files.items() if kind.startswith(".txt")]
    what = "each line"
    if sample_by == "document":
        what = "the whole file"
        spec.files |= {file: spec.files[file] + _AS_A_WHOLE for file in texts}
    if texts:
        spec.notes.append(f"of a .txt file {what} is a document (sample_by: {sample_by})")
    elif sample_by != "line":
        spec.notes.append("sample_by: no effect, since it has no .txt file")


def _did_you_mean(given: str, known, before: str) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    return "".join(f"{before}did you mean {name!r}?" for name in near)


def _files_of(path: Path) -> list[str]:
    """The file, or the files of a folder in the order of their names."""
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if kind_of(p) in SUFFIXES)
    files = [str(p) for p in files if p.name != "dataset_info.json"]
    if not files or kind_of(files[0]) not in SUFFIXES:
        raise ValueError(f"{path}: expected {', '.join(SUFFIXES)} files")
    for file in files:
        if not Path(file).is_file():
            raise ValueError(f"{file}: expected a file; a folder, a pipe or a device is not read")
    return files


def kind_of(file: str | Path) -> str:
    """The suffix that selects the reader: one of SUFFIXES for a readable file."""
    path = Path(file)
    if path.suffix == ".gz":
        return Path(path.stem).suffix + path.suffix
    return path.suffix


def _files_of_hub(repository: str, entry: dict, here: str) -> list[str]:
    """The files of a dataset of the Hugging Face hub, through its cache: those below `folder` or
    `subset` with `split` in their path, by the keys of dataset_info.json. The default split is
    train, or all files if no path has it."""
    from huggingface_hub import snapshot_download

    try:
        patterns = [f"*{suffix}" for suffix in SUFFIXES]
        folder = snapshot_download(repository, repo_type="dataset", allow_patterns=patterns)
    except Exception as error:  # of the network, the hub and its cache
        raise ValueError(
            f"{here}: {repository} was not found as a file, and could not be read from the Hugging "
            f"Face hub or its cache ({describe_error(error)}): set a path, or run `hf download "
            f"{repository} --repo-type dataset` where there is a network"
        ) from None
    paths = sorted(Path(folder).rglob("*"))
    files = {
        str(path): re.split(r"[^A-Za-z0-9_]+", path.relative_to(folder).as_posix())
        for path in paths
        if kind_of(path) in SUFFIXES and not path.name.startswith("dataset_info")
    }
    for key in ("folder", "subset"):
        start = f"{Path(folder, entry.get(key) or '')}/"
        files = {file: words for file, words in files.items() if file.startswith(start)}
    chosen = [file for file, words in files.items() if entry.get("split", "train") in words]
    if not chosen and "split" not in entry:
        chosen = list(files)
    if not chosen:
        selection = {key: entry[key] for key in _UNUSED_KEYS if key in entry}
        names = ", ".join(path.relative_to(folder).as_posix() for path in paths if path.is_file())
        raise ValueError(
            f"{here}: {repository} has no {', '.join(SUFFIXES)} file for {selection}; "
            f"it has {names}"
        )
    return chosen


def _read_info(path: Path) -> dict:
    try:
        info = json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ValueError(f"{path}: not valid JSON: {_TOO_DEEP}") from None
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{path}:{getattr(error, 'lineno', 1)}: not valid JSON: {error}") from None
    if not isinstance(info, dict):
        raise ValueError(
            f"{path}: expected an object that maps names to datasets, got {type(info).__name__}"
        )
    return info


def _declared(
    name: str, entry, info_file: Path, objective: Objective
) -> tuple[DatasetSpec, list[str]]:
    """(the dataset, its files) of an entry of dataset_info.json."""
    here = f"{info_file}: dataset {name!r}"
    if not isinstance(entry, dict):
        raise ValueError(f"{here}: expected an object, got {type(entry).__name__}")
    repository = entry.get("hf_hub_url")
    hub = ", ".join(key for key in _HUB_KEYS if key in entry)
    if not repository and (hub or "file_name" not in entry):
        instead = f" instead of {hub}" if hub else ""
        raise ValueError(
            f"{here}: datasets are read from local files or the Hugging Face hub: set file_name or "
            f"hf_hub_url{instead}"
        )
    columns = _names_of(entry, "columns", here)
    tags = _names_of(entry, "tags", here)
    _check_entry(entry, columns, tags, objective, here)
    formatting = entry.get("formatting")
    num_samples = entry.get("num_samples")
    values = entry.get("values") or {}
    spec = DatasetSpec(name, {}, formatting, columns, tags, num_samples, values=values)
    if repository:
        return spec, _files_of_hub(repository, entry, here)
    path = info_file.parent / entry["file_name"]
    if not path.exists():
        raise ValueError(f"{here}: there is no file {path}")
    unused = [key for key in _UNUSED_KEYS if key in entry]
    spec.notes = [f"{key} of dataset_info.json has no meaning for a local file" for key in unused]
    return spec, _files_of(path)


def _check_entry(entry: dict, columns: dict, tags: dict, objective: Objective, here: str) -> None:
    """ValueError for a declaration that cannot be honoured."""
    stage = objective.stage
    usable = _TEXT_COLUMNS
    if objective.has_pairs:
        usable += SIDES
    elif entry.get("ranking"):
        raise ValueError(
            f"{here}: preference pairs (ranking: true) are for stage dpo, not for stage {stage}"
        )
    for key in ("file_name", "hf_hub_url", *_UNUSED_KEYS):
        if not isinstance(entry.get(key, ""), str):
            raise ValueError(f"{here}: {key}: expected a path or a name, got {entry[key]!r:.80}")
    num_samples = entry.get("num_samples")
    if num_samples is not None and (type(num_samples) is not int or num_samples < 1):
        raise ValueError(f"{here}: num_samples: expected a count, got {num_samples!r:.80}")
    for kind, given, known in (
        ("key", entry, _KEYS + _UNUSED_KEYS + _HUB_KEYS),
        ("column", columns, _TEXT_COLUMNS + _OTHER_COLUMNS),
        ("tag", tags, tuple(TAGS)),
    ):
        for key in given.keys() - set(known):
            raise ValueError(f"{here}: unknown {kind} {key!r}{_did_you_mean(key, known, ', ')}")
    if other := [column for column in columns if column not in usable]:
        raise ValueError(f"{here}: columns {other} are not for training on text with stage {stage}")
    formatting = entry.get("formatting")
    if formatting not in (None, *_FORMATTINGS):
        expected = "expected alpaca, sharegpt or openai"
        raise ValueError(f"{here}: formatting {formatting!r}: {expected}")


def _names_of(entry: dict, key: str, here: str) -> dict[str, str]:
    """The columns or tags of a declaration, {} for none or null."""
    names = {} if entry.get(key) is None else entry[key]
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{here}: {key}: expected an object of names, got {names!r:.80}")
    return names


# -- readers


@dataclass
class Cursor:
    """Number of lines read of a file (or of records if it is no file of lines) and of bytes."""

    number: int = 0
    offset: int = 0


def read_records(
    file: str, kind: str | None = None, skip: bool = False, cursor: Cursor | None = None
) -> Iterator[tuple[str, object]]:
    """Yield (place, record) in the file's order. A .txt file has one document a line, without blank
    lines, or is one. A .csv file has the columns of its first line.

    kind: of DatasetSpec.files (None: by the file's name). skip: an unreadable record of .jsonl or
    .txt is yielded as its ValueError. cursor: begin there; it moves with each record. Files of
    lines are sought by bytes, records of other files read again.
    Raises: ValueError with the place for invalid UTF-8 or JSON; for parquet without pyarrow.
    """
    kind = kind or kind_of(file)
    cursor = cursor or Cursor()
    read_whole = {".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    try:
        with gzip.open(file) if ".gz" in kind else open(file, "rb") as raw:
            if (read := read_whole.get(kind.removesuffix(".gz"))) is None:
                yield from _read_lines(file, raw, kind, skip, cursor)
                return
            for record in itertools.islice(read(file, raw), cursor.number, None):
                cursor.number += 1
                yield record
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: it cannot be decompressed: {error}") from None


def _read_lines(
    file: str, raw, kind: str, skip: bool, cursor: Cursor
) -> Iterator[tuple[str, object]]:
    is_text = kind.startswith(".txt")
    is_whole = kind.endswith(_AS_A_WHOLE)
    lines = raw  # bytes: text mode would break lines at "\r" too
    if is_whole:
        lines = [raw.read()][cursor.number :]
    else:
        raw.seek(cursor.offset)
    for line in lines:
        cursor.number += 1
        cursor.offset += len(line)
        where = f"{file}:{cursor.number}"
        try:
            text = _decode(line, where).strip()
            if text or is_whole:
                yield where, text if is_text else parse_json(text, where)
        except ValueError as error:
            if not skip:
                raise
            yield where, error


def _read_csv(file: str, raw) -> Iterator[tuple[str, object]]:
    csv.field_size_limit(1 << 30)  # a document is longer than the 128 KiB of the default
    lines = io.StringIO(_decode(raw.read(), file), newline="")
    reader = csv.DictReader(lines, strict=True)
    try:
        names = [name for name in reader.fieldnames or () if name]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{file}:1: the first line names the column {twice!r} twice")
        for record in reader:
            where = f"{file}:{reader.line_num}"
            if None in record:
                raise ValueError(f"{where}: the row has more columns than the first line names")
            yield where, record
    except csv.Error as error:
        raise ValueError(f"{file}:{reader.line_num}: not valid CSV: {error}") from None


def _check_value(value, text: str, where: str):
    """The value of a JSON text. Raises: ValueError with the place for half of a surrogate pair, and
    for more than _MOST_LEVELS levels."""
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            bad = ascii(error.object[error.start])
            raise ValueError(
                f"{where}: expected text, and {bad} is half a character (a lone surrogate): repair "
                "or remove it"
            ) from None
    level = [value]
    levels = 0
    has_depth = text.count("[") + text.count("{") > _MOST_LEVELS
    while level and has_depth:
        levels += 1
        boxes = [box.values() if isinstance(box, dict) else box for box in level]
        level = [inner for box in boxes for inner in box if isinstance(inner, (dict, list))]
    if levels > _MOST_LEVELS:
        raise ValueError(f"{where}: {_TOO_DEEP}: {levels} levels, expected at most {_MOST_LEVELS}")
    return value


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: expected UTF-8 text: {error}") from None


def parse_json(text: str, where: str):
    """The value of one JSON text. Raises: ValueError with the place."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: expected one JSON value: {error.msg} (character {error.pos + 1})"
        ) from None
    except RecursionError:
        raise ValueError(f"{where}: expected one JSON value: {_TOO_DEEP}") from None
    except ValueError as error:  # a number of more digits than Python reads
        raise ValueError(f"{where}: {error}") from None
    return _check_value(value, text, where)


def _read_json(file: str, raw) -> Iterator[tuple[str, object]]:
    """Yield a list of records, or objects one after another, decoded one by one with their
    lines."""
    text = _decode(raw.read(), file)
    invalid = "not valid JSON:"
    decoder = json.JSONDecoder()
    space = re.compile(r"\s*")
    at = space.match(text).end()
    is_list = text.startswith("[", at)
    at = space.match(text, at + is_list).end()
    line = 1
    counted = 0
    while at < len(text) and not (is_list and text[at] == "]"):
        line = line + text.count("\n", counted, at)
        counted = at
        where = f"{file}:{line}"
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}:{error.lineno}: {invalid} {error.msg}") from None
        except RecursionError:
            raise ValueError(f"{where}: {invalid} {_TOO_DEEP}") from None
        except ValueError as error:  # a number of more digits than Python reads
            raise ValueError(f"{where}: {error}") from None
        yield where, _check_value(record, text[counted:at], where)
        at = space.match(text, at).end()
        if is_list and text[at : at + 1] not in (",", "]"):
            line += text.count("\n", counted, at)
            got = repr(text[at : at + 20])
            if at == len(text):
                got = "the end of the file"
            reason = f"expected ',' or ']' after a record, got {got}"
            raise ValueError(f"{file}:{line}: {invalid} {reason}")
        if is_list and text[at] == ",":
            at = space.match(text, at + 1).end()
    if is_list and text[at + 1 :].strip():
        raise ValueError(f"{file}: {invalid} there is more text after the list of records")
    if is_list and at >= len(text):
        lines = text.count("\n") + 1
        raise ValueError(f"{file}:{lines}: {invalid} the list does not end with ']'")


def _read_parquet(file: str, raw) -> Iterator[tuple[str, object]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{file}: reading parquet takes pyarrow: pip install 'mca-lite[parquet]'")
    import pyarrow.parquet  # an extra, for parquet alone

    row = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(raw).iter_batches(batch_size=1000):
            for record in batch.to_pylist():
                row += 1
                yield f"{file}:{row}", record
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file}:{row + 1}: no valid parquet: {error}") from None


# -- files built once: one process builds, the others wait

POLL_S = 0.2  # between two tries to take another process's lock


SAY_EVERY_S = 10.0  # between two lines on stderr


Progress = Callable[[str], None]  # called by a build with the amount done


Build = Callable[[Path, Progress], None]


Check = Callable[[], bool]


def build_once(target: Path, build: Build, what: str, is_ready: Check | None = None) -> None:
    """Make `target` exist: one process runs build(temporary path, progress) and renames the path,
    the others wait.

    The operating system frees the lock of a dead process, and the next one builds. what: for the
    lines on stderr. is_ready: True if target is good as it is (default: if it exists); else it is
    replaced.
    Raises: the error of build, in the process that builds and (ValueError or RuntimeError of the
    same text) in those that wait for it; ValueError for a folder that cannot be written.
    """
    is_ready = is_ready or target.exists
    if is_ready():
        return
    error_file = _beside(target, ".error")
    # never removed: a process waiting for a removed file would not exclude one that makes it anew
    lock = FileLock(_beside(target, ".lock"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        old_error = _read(error_file)
        _acquire(lock, what)
    except OSError as error:
        raise _not_writable(target.parent, error) from error
    try:
        if is_ready():  # built by the process that had the lock
            return
        error_text = _read(error_file)
        if error_text != old_error:  # of the process that had the lock
            kind, message, _ = json.loads(error_text)
            raise (ValueError if kind == "ValueError" else RuntimeError)(message)
        try:
            _build_and_rename(target, build, what, is_ready)
            error_file.unlink(missing_ok=True)
        except Exception as error:
            record = [type(error).__name__, str(error), uuid.uuid4().hex]
            with contextlib.suppress(OSError):  # a full disk takes no file
                error_file.write_text(json.dumps(record))
            raise
    finally:
        lock.release()


def _acquire(lock: FileLock, what: str) -> None:
    while not lock.is_locked:
        try:
            lock.acquire(timeout=SAY_EVERY_S, poll_interval=POLL_S)
        except Timeout:
            _say(f"waiting for another process, {what}")


def _build_and_rename(target: Path, build: Build, what: str, is_ready: Check) -> None:
    """Build beside the target, then rename. The caller has the lock.

    Raises: ValueError in place of an OSError of writing.
    """
    host = socket.gethostname()
    temporary = _beside(target, f".{host}-{os.getpid()}.tmp")
    printed = time.monotonic()

    def progress(text: str) -> None:
        nonlocal printed
        if time.monotonic() - printed >= SAY_EVERY_S:
            printed = time.monotonic()
            _say(f"{what}: {text}")

    try:
        # Processes of this machine that left these are dead, or they would have the lock. Those of
        # others may be alive: not every file system shares locks.
        for left in target.parent.glob(f"{target.name}.{host}-*.tmp"):
            _remove(left)
        build(temporary, progress)
        if not is_ready():  # else another machine's process, without a shared lock, was faster
            _remove(target)
            os.replace(temporary, target)
            sync(target.parent)
    except OSError as error:
        # not for an error of reading data
        is_inside = str(error.filename or "").startswith(str(target.parent))
        if is_inside or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise _not_writable(target.parent, error) from error
        raise
    finally:
        _remove(temporary)


def _say(text: str) -> None:
    if world.current().local_rank == 0:  # a line a machine is enough
        print(text, file=sys.stderr, flush=True)


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _read(path: Path) -> str:
    """The text of a file, "" without one."""
    return path.read_text() if path.exists() else ""


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def _not_writable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"the cache folder {folder} cannot be written ({error.strerror or error}): set cache_dir, "
        "or the environment variable MCA_LITE_CACHE, to a folder that can, with room"
    )
