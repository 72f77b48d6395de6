"""A dataset's files: paths, folders, dataset_info.json, the hub, and a reader for each kind of
file.

Records have a place in the user's data: "file:line"; in parquet and in a .json file with a list of
records, it is "file:number of the record". Other .json files are read line by line, one value each.
"""

import contextlib
import gzip
import importlib.util
import itertools
import json
import os
import re
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from . import world
from .errors import Keys, expect
from .files import describe_error, may_be_on_hub, sync
from .tables import Objective

_COMPRESSED = (".json", ".jsonl", ".txt")
SUFFIXES = (*_COMPRESSED, ".parquet", *(f"{suffix}.gz" for suffix in _COMPRESSED))
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_AS_A_WHOLE = " as a whole"  # added to a text file's kind if the file is one document
_BLANK = b"\xef\xbb\xbf \t\r\n"  # bytes that may stand before a list, with a byte order mark
_SURROGATE = re.compile(
    r"\\u[dD][89a-fA-F]"
)  # an escaped half of a surrogate pair: alone, it is no text
SIDES = ("chosen", "rejected")  # the two answers of a preference pair, in this order everywhere


@dataclass
class DatasetSpec:
    """One dataset: its files, and its declaration in dataset_info.json, if it has one.

    files: {path: kind}; the kind, such as ".jsonl", selects the reader. formatting: a record
    format's name; None: the first usable record of a file shows its format. columns: {a column's
    name in dataset_info.json: its name in the files}. tags: likewise for names within messages.
    num_samples: the maximum number of records. values: {registered column: its value for this
    dataset}, see data_records.dataset_columns."""

    name: str
    files: dict[str, str] = field(default_factory=dict)
    formatting: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    num_samples: int | None = None
    values: dict[str, Any] = field(default_factory=dict)


# -- which files


def resolve(entries: list[str], data_args: Keys, objective: Objective) -> list[DatasetSpec]:
    """Find the files of datasets -> one DatasetSpec per entry. An entry may be, in this order: a
    name in dataset_dir/dataset_info.json; a file or folder (as given, or in dataset_dir);
    owner/name of a dataset on the Hugging Face hub, which is downloaded unless cached. objective:
    the training objective, which decides which columns may be declared.

    Raises ValueError for an entry that is none of these, or for a declaration that cannot be
    followed."""
    folder = Path(data_args.dataset_dir)
    info_file = folder / "dataset_info.json"
    info: dict[str, Any] = {}
    if info_file.is_file():
        text = _decode(info_file.read_bytes(), str(info_file))
        info = parse_json(text, str(info_file))
    specs = []
    for entry in entries:
        path = next((p for p in (Path(entry), folder / entry) if p.exists()), None)
        declared = get_column(info, entry, str(info_file), dict, required=False)
        if declared is not None:
            here = f"{info_file}: dataset {entry!r}"
            spec = _declared(entry, declared, info_file.parent, objective, here)
        elif path is not None:
            spec = DatasetSpec(entry, _files_of(path))
        elif (
            may_be_on_hub(entry) and _REPOSITORY.fullmatch(entry) and kind_of(entry) not in SUFFIXES
        ):
            spec = DatasetSpec(entry, _files_of_hub(entry, {}, f"dataset {entry!r}"))
        else:
            raise ValueError(
                f"dataset {entry!r}: expected a file, a folder, or a name in {info_file} (it has "
                f"{', '.join(sorted(info)) or 'no name'})"
            )
        for file, kind in spec.files.items():
            if kind.startswith(".txt") and data_args.sample_by == "document":
                spec.files[file] += _AS_A_WHOLE
        specs.append(spec)
    return specs


def _files_of(path: Path) -> dict[str, str]:
    """Find the files that `path` stands for -> {file: kind}: the file itself, or the readable files
    of a folder, sorted by name. The kind, such as ".jsonl", selects a reader. Raises ValueError if
    there are none, or for a name that is no file."""
    files = _readable(path.iterdir() if path.is_dir() else [path])
    expect(files, f"{path}: expected {', '.join(SUFFIXES)} files")
    for file in files:
        expect(
            os.path.isfile(file),
            f"{file}: expected a file; a folder, a pipe or a device is not read",
        )
    return files


def _readable(paths: Iterable[Path]) -> dict[str, str]:
    """Choose the paths that have a reader -> {file: kind}, sorted. The kind, such as ".jsonl",
    selects the reader. Names that end in dataset_info.json or dataset_infos.json are left out."""
    kinds = {str(path): kind_of(path) for path in sorted(paths)}
    return {
        file: kind
        for file, kind in kinds.items()
        if kind in SUFFIXES and not file.endswith(("dataset_info.json", "dataset_infos.json"))
    }


def kind_of(file: str | Path) -> str:
    """The suffix that selects a file's reader, such as ".jsonl" or ".jsonl.gz"; one of SUFFIXES if
    the file can be read."""
    path = Path(file)
    if path.suffix == ".gz":
        return Path(path.stem).suffix + path.suffix
    return path.suffix


def _files_of_hub(repository: str, entry: dict[str, Any], here: str) -> dict[str, str]:
    """Find the files of a dataset on the Hugging Face hub, downloaded unless cached -> {file:
    kind}; the kind, such as ".jsonl", selects the reader. entry: the dataset's keys in
    dataset_info.json, {} if it is not declared there. here: text that names the dataset, for
    messages.

    Files are taken below `folder` and `subset` of the entry, if their path contains the value of
    its key `split` as a word. Without that key the word is train; if no path contains train, all
    files are taken. Raises ValueError if the dataset cannot be read or no file is selected."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repository, repo_type="dataset", allow_patterns=[f"*{suffix}" for suffix in SUFFIXES]
        )
    except Exception as error:  # the network, the hub and its cache raise many types
        raise ValueError(
            f"{here}: {repository} was not found as a file, and could not be read from the Hugging "
            f"Face hub or its cache ({describe_error(error)}): set a path, or run `hf download "
            f"{repository} --repo-type dataset` where there is a network (ms_hub_url and "
            "USE_MODELSCOPE have no effect)"
        ) from None
    below = Path(folder, entry.get("folder", ""), entry.get("subset", ""))
    files = _readable(below.rglob("*"))
    split = re.compile(rf"\b{re.escape(entry.get('split', 'train'))}\b")
    chosen = {file: files[file] for file in files if split.search(os.path.relpath(file, folder))}
    if not chosen and "split" not in entry:
        chosen = files
    expect(chosen, f"{here}: {repository} has no file for {entry} in {below}")
    return chosen


# -- columns and dataset_info.json

_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a count",
    bool: "true or false",
    (int, float): "a number",
}


def get_column(record: Any, column: str, where: str, kind: Any = str, required: bool = True) -> Any:
    """The value of a record's column, checked to be of type `kind`; None if it is null or absent
    and not required. Raises ValueError that names `where`."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object, got {record!r:.80}")
    value = record.get(column)
    if value is None and required:
        raise ValueError(f"{where}: {column!r} is missing or null; it has {sorted(record)}")
    if value is not None and not isinstance(value, kind):
        expected = _KINDS.get(kind, "a list or a text")
        raise ValueError(f"{where}: {column!r}: expected {expected}, got {value!r:.80}")
    return value


# the text keys of an entry in dataset_info.json
_KEYS = """
file_name hf_hub_url ms_hub_url om_hub_url script_url cloud_file_name formatting
subset split folder
""".split()  # the last three select files in a hub repository
_KIND_OF_KEY = {
    **dict.fromkeys(_KEYS, str),
    "columns": dict,
    "tags": dict,
    "num_samples": int,
    "ranking": bool,
    "values": dict,
}
_TEXT_COLUMNS = (
    "prompt query response history messages system tools text images videos audios".split()
)
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


def _declared(
    name: str, entry: dict[str, Any], folder: Path, objective: Objective, here: str
) -> DatasetSpec:
    """Read a dataset's declaration in dataset_info.json, and find its files -> its DatasetSpec.
    entry: the declaration of `name`. folder: the folder of dataset_info.json. objective: the
    training objective, which decides which columns may be declared. here: text that names the
    entry, for messages. Raises ValueError for a declaration that cannot be followed."""
    entry = {key: value for key, value in entry.items() if value is not None}
    _check_names(entry, _KIND_OF_KEY, here)
    usable = list(_TEXT_COLUMNS)
    if objective.has_labels:
        usable.append("kto_tag")
    if objective.has_pairs:
        usable += SIDES
    elif entry.get("ranking"):
        raise ValueError(f"{here}: preference pairs (ranking: true) are for stage dpo")
    for key, known in (("columns", usable), ("tags", TAGS)):
        _check_names(entry.setdefault(key, {}), dict.fromkeys(known, str), f"{here}: {key}")
    expect(
        entry.get("formatting", "alpaca") in ("alpaca", "sharegpt", "openai"),
        f"{here}: formatting: expected alpaca, sharegpt or openai",
    )
    expect(entry.get("num_samples", 1) >= 1, f"{here}: num_samples: expected a count from 1 on")
    chosen = ("formatting", "columns", "tags", "num_samples")
    spec = DatasetSpec(name, {}, *map(entry.get, chosen), values=entry.get("values", {}))
    if "hf_hub_url" in entry:
        spec.files = _files_of_hub(entry["hf_hub_url"], entry, here)
        return spec
    expect(
        "file_name" in entry,
        f"{here}: datasets are read from local files or the Hugging Face hub: set file_name or "
        f"hf_hub_url instead of {', '.join(entry)}",
    )
    path = folder / entry["file_name"]
    expect(path.exists(), f"{here}: there is no file {path}")
    spec.files = _files_of(path)
    return spec


def _check_names(given: dict[str, Any], kinds: dict[str, type], here: str) -> None:
    for name in given:
        expect(name in kinds, f"{here}: unknown key {name!r}: expected {', '.join(kinds)}")
        get_column(given, name, here, kinds[name])


# -- readers


@dataclass
class Cursor:
    """The position in a file that is being read. number: lines read, or records in a file whose
    records are not lines. offset: bytes read, in a file of lines."""

    number: int = 0
    offset: int = 0


def read_records(
    file: str, kind: str | None = None, skip: bool = False, cursor: Cursor | None = None
) -> Iterator[tuple[str, object]]:
    """Yield the records of a file in order, as (place, record); the place, for messages, is
    "file:line", or "file:number" of the record. A .txt file is one document, or has one document
    per line; blank lines are skipped.

    kind: selects the reader, see DatasetSpec.files; None: the file's name does. skip: if True, an
    unreadable line is yielded as its ValueError, not raised. cursor: the position from which to
    read; it moves, in place, with each record. An uncompressed file of lines is read from that byte
    on; other files are read from the start, and records before the position are dropped. Raises
    ValueError, with the line's place or the file, for invalid UTF-8, for JSON that Python cannot
    read, and usually for invalid gzip or parquet; for parquet also if pyarrow is missing."""
    kind = kind or kind_of(file)
    cursor = cursor or Cursor()
    try:
        with gzip.open(file) if ".gz" in kind else open(file, "rb") as raw:
            kind = kind.removesuffix(".gz")
            if kind == ".json" and raw.peek(1).lstrip(_BLANK).startswith(b"["):
                kind = "a list"
            if (read := _READERS.get(kind)) is None:
                yield from _read_lines(file, raw, kind, skip, cursor)
                return
            for number, record in itertools.islice(read(file, raw), cursor.number, None):
                cursor.number += 1
                yield f"{file}:{number}", record
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: it cannot be decompressed: {error}") from None


def _read_lines(
    file: str, raw: Any, kind: str, skip: bool, cursor: Cursor
) -> Iterator[tuple[str, object]]:
    is_text = kind.startswith(".txt")
    is_whole = kind.endswith(_AS_A_WHOLE)
    lines = raw  # read as bytes, because text mode would break lines at "\r" too
    if is_whole:
        lines = [raw.read()][cursor.number :]
    else:
        raw.seek(cursor.offset)
    for line in lines:
        cursor.number += 1
        cursor.offset += len(line)
        where = f"{file}:{cursor.number}"
        try:
            text = _decode(line, where).strip("\r\n")  # indentation is part of a text
            if text.strip() or is_whole:
                yield where, text if is_text else parse_json(text, where)
        except ValueError as error:
            if not skip:
                raise
            yield where, error


# Each reader of a whole file yields (number from 1, record).


def _read_list(file: str, raw: Any) -> Iterator[tuple[int, object]]:
    yield from enumerate(parse_json(_decode(raw.read(), file), file), 1)


def _read_parquet(file: str, raw: Any) -> Iterator[tuple[int, object]]:
    expect(
        importlib.util.find_spec("pyarrow"),
        f"{file}: reading parquet takes pyarrow: pip install 'mca-lite[parquet]'",
    )
    import pyarrow.parquet  # an optional package

    try:
        batches = pyarrow.parquet.ParquetFile(raw).iter_batches(batch_size=1000)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from enumerate(map(_without_nulls, rows), 1)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file}: no valid parquet: {error}") from None


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A parquet row without the fields that are null in the objects inside its columns. Parquet
    gives each object the fields of all other objects: for example each tool call gets the arguments
    of every tool, as nulls. Nulls in lists, and columns that are null, stay."""
    return {column: _given(value) for column, value in row.items()}


def _given(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _given(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_given(part) for part in value]
    return value


_READERS = {"a list": _read_list, ".parquet": _read_parquet}


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text. Raises ValueError that names `where` if Python cannot read it, and
    for half of a surrogate pair, which cannot be written as UTF-8."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: not valid JSON: it is nested too deep") from None
    except ValueError as error:  # invalid JSON, or a number with more digits than Python reads
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: expected text, and {ascii(error.object[error.start])} is half a "
                "character (a lone surrogate): repair or remove it"
            ) from None
    return value


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: expected UTF-8 text: {error}") from None


# -- files built once: one process builds, the others wait

POLL_S = 0.2  # seconds between attempts to take the lock
SAY_EVERY_S = 10.0  # seconds between lines on stderr
Progress = Callable[[str], None]  # a build calls it with how much is done


def build_once(
    target: Path,
    build: Callable[[Path, Progress], None],
    what: str,
    is_ready: Callable[[], bool] | None = None,
) -> None:
    """Make a file or folder `target` exist when several processes call this: one runs
    build(temporary path, progress) and renames the result, the others wait for it. On a file system
    without locks between machines, one process per machine builds.

    If the building process dies or fails, its lock becomes free and the next process builds. what:
    names the work in lines on stderr. is_ready: True if `target` can be used as it is (default: if
    it exists); otherwise it is replaced. Raises the error of build(), but ValueError for an OSError
    of build() or of the folder."""
    is_ready = is_ready or target.exists
    if is_ready():
        return
    folder = target.parent
    mine = f"{target.name}.{socket.gethostname()}-"
    temporary = folder / f"{mine}{os.getpid()}.tmp"
    # The lock file is never removed: two processes could hold the removed file and a new one.
    lock = FileLock(f"{target}.lock")
    printed = time.monotonic()

    def progress(text: str) -> None:
        nonlocal printed
        if time.monotonic() - printed >= SAY_EVERY_S:
            printed = time.monotonic()
            _say(f"{what}: {text}")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        _acquire(lock, what)
        if is_ready():  # another process has built it meanwhile
            return
        # Leftovers of this machine are from dead processes, which would have the lock otherwise.
        # Other machines' processes may be alive, because not every file system shares locks.
        for left in folder.glob(f"{mine}*.tmp"):
            _remove(left)
        build(temporary, progress)
        if (
            not is_ready()
        ):  # a process of another machine may have been faster, without a shared lock
            _remove(target)
            os.replace(temporary, target)
            sync(folder)
    except OSError as error:
        raise ValueError(
            f"the cache folder {folder} cannot be written, or the data not read ({error}): set "
            "cache_dir, or the environment variable MCA_LITE_CACHE, to a folder with room"
        ) from error
    finally:
        _remove(temporary)
        lock.release()


def _acquire(lock: FileLock, what: str) -> None:
    while not lock.is_locked:
        try:
            lock.acquire(timeout=SAY_EVERY_S, poll_interval=POLL_S)
        except Timeout:
            _say(f"waiting for another process, {what}")


def _say(text: str) -> None:
    if world.current().local_rank == 0:  # one line per machine is enough
        print(text, file=sys.stderr, flush=True)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()
