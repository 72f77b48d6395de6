"""The files of a dataset: paths, folders, dataset_info.json, the hub, and the readers of each kind
of file.

A place in the user's data is "file:line" throughout, for errors: "file:number" of the record in
parquet, and in a .json file with a list of records. Other .json files have one object a line.
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

from filelock import FileLock, Timeout

from . import world
from .errors import expect
from .files import describe_error, may_be_on_hub, sync
from .tables import Objective

_COMPRESSED = (".json", ".jsonl", ".txt")
SUFFIXES = (*_COMPRESSED, ".parquet", *(f"{suffix}.gz" for suffix in _COMPRESSED))
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_AS_A_WHOLE = " as a whole"  # ends the kind of a text file of one document
_BLANK = b"\xef\xbb\xbf \t\r\n"  # before a list: a byte order mark too
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escaped: alone, it makes no text
SIDES = ("chosen", "rejected")  # the two answers of a preference pair, in this order everywhere


@dataclass
class DatasetSpec:
    """One dataset: its files, and its declaration in dataset_info.json (None, {}: detected by the
    first record).

    files: path -> kind, which selects the reader. formatting: the name of a record format. columns:
    name of a column in dataset_info.json -> in the files. tags: names within messages. num_samples:
    only the first so many records. values: of registered columns, for records without one of their
    own.
    """

    name: str
    files: dict[str, str] = field(default_factory=dict)
    formatting: str | None = None
    columns: dict = field(default_factory=dict)
    tags: dict = field(default_factory=dict)
    num_samples: int | None = None
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
    info: dict = {}
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
    """The file, or the files of a folder in the order of their names, with their kinds."""
    files = _readable(path.iterdir() if path.is_dir() else [path])
    expect(files, f"{path}: expected {', '.join(SUFFIXES)} files")
    for file in files:
        expect(
            os.path.isfile(file),
            f"{file}: expected a file; a folder, a pipe or a device is not read",
        )
    return files


def _readable(paths: Iterable[Path]) -> dict[str, str]:
    """The kinds of those that a reader takes, sorted."""
    kinds = {str(path): kind_of(path) for path in sorted(paths)}
    return {
        file: kind
        for file, kind in kinds.items()
        if kind in SUFFIXES and not file.endswith(("dataset_info.json", "dataset_infos.json"))
    }


def kind_of(file: str | Path) -> str:
    """The suffix that selects the reader: one of SUFFIXES for a readable file."""
    path = Path(file)
    if path.suffix == ".gz":
        return Path(path.stem).suffix + path.suffix
    return path.suffix


def _files_of_hub(repository: str, entry: dict, here: str) -> dict[str, str]:
    """The files of a dataset of the Hugging Face hub with their kinds, through its cache: those
    below `folder` and `subset` with `split` in their path, by the keys of dataset_info.json. The
    default split is train, or all files if no path has it."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repository, repo_type="dataset", allow_patterns=[f"*{suffix}" for suffix in SUFFIXES]
        )
    except Exception as error:  # of the network, the hub and its cache
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


def get_column(record, column: str, where: str, kind=str, required=True):
    """A column of the right type; null and absent are the same. Raises: ValueError with the
    place."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object, got {record!r:.80}")
    value = record.get(column)
    if value is None and required:
        raise ValueError(f"{where}: {column!r} is missing or null; it has {sorted(record)}")
    if value is not None and not isinstance(value, kind):
        expected = _KINDS.get(kind, "a list or a text")
        raise ValueError(f"{where}: {column!r}: expected {expected}, got {value!r:.80}")
    return value


# keys of an entry
_KEYS = """
file_name hf_hub_url ms_hub_url om_hub_url script_url cloud_file_name formatting
subset split folder
""".split()  # the last three are places within a hub repository
_KIND_OF_KEY = {
    **dict.fromkeys(_KEYS, str),
    "columns": dict,
    "tags": dict,
    "num_samples": int,
    "ranking": bool,
    "values": dict,
}
_TEXT_COLUMNS = "prompt query response history messages system tools text images".split()
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


def _declared(name: str, entry: dict, folder: Path, objective: Objective, here: str) -> DatasetSpec:
    """The dataset of an entry of the folder's dataset_info.json. Raises: ValueError for one that
    cannot be honoured."""
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


def _check_names(given: dict, kinds: dict[str, type], here: str) -> None:
    for name in given:
        expect(name in kinds, f"{here}: no use for {name!r}: expected {', '.join(kinds)}")
        get_column(given, name, here, kinds[name])


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
    lines, or is one.

    kind: of DatasetSpec.files (None: by the file's name). skip: an unreadable record of .jsonl or
    .txt is yielded as its ValueError. cursor: begin there; it moves with each record. Files of
    lines are sought by bytes, records of other files read again.
    Raises: ValueError with the place for invalid UTF-8 or JSON; for parquet without pyarrow.
    """
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
            text = _decode(line, where).strip("\r\n")  # the indentation of a text is part of it
            if text.strip() or is_whole:
                yield where, text if is_text else parse_json(text, where)
        except ValueError as error:
            if not skip:
                raise
            yield where, error


# a reader of a whole file yields (number from 1, record)


def _read_list(file: str, raw) -> Iterator[tuple[int, object]]:
    yield from enumerate(parse_json(_decode(raw.read(), file), file), 1)


def _read_parquet(file: str, raw) -> Iterator[tuple[int, object]]:
    expect(
        importlib.util.find_spec("pyarrow"),
        f"{file}: reading parquet takes pyarrow: pip install 'mca-lite[parquet]'",
    )
    import pyarrow.parquet  # an extra, for parquet alone

    try:
        batches = pyarrow.parquet.ParquetFile(raw).iter_batches(batch_size=1000)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from enumerate(map(_without_nulls, rows), 1)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file}: no valid parquet: {error}") from None


def _without_nulls(row: dict) -> dict:
    """The row without nulls within its columns: parquet gives an object the fields of all others,
    such as each tool call the arguments of every tool."""
    return {column: _given(value) for column, value in row.items()}


def _given(value):
    if isinstance(value, dict):
        return {name: _given(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_given(part) for part in value]
    return value


_READERS = {"a list": _read_list, ".parquet": _read_parquet}


def parse_json(text: str, where: str):
    """The value of one JSON text. Raises: ValueError with the place, for half of a surrogate pair
    too."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: not valid JSON: it is nested too deep") from None
    except ValueError as error:  # of JSON, or a number of more digits than Python reads
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

POLL_S = 0.2  # between two tries to take another process's lock


SAY_EVERY_S = 10.0  # between two lines on stderr


Progress = Callable[[str], None]  # called by a build with the amount done


def build_once(
    target: Path,
    build: Callable[[Path, Progress], None],
    what: str,
    is_ready: Callable[[], bool] | None = None,
) -> None:
    """Make `target` exist: one process runs build(temporary path, progress) and renames the path,
    the others wait.

    The operating system frees the lock of a dead process, and the next one builds; so it does
    after an error. what: for the lines on stderr. is_ready: True if target is good as it is
    (default: if it exists); else it is replaced.
    Raises: the error of build; ValueError for files that cannot be read or written.
    """
    is_ready = is_ready or target.exists
    if is_ready():
        return
    folder = target.parent
    mine = f"{target.name}.{socket.gethostname()}-"
    temporary = folder / f"{mine}{os.getpid()}.tmp"
    # never removed: a process waiting for a removed file would not exclude one that makes it anew
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
        if is_ready():  # built by the process that had the lock
            return
        # Processes of this machine that left these are dead, or they would have the lock. Those of
        # others may be alive: not every file system shares locks.
        for left in folder.glob(f"{mine}*.tmp"):
            _remove(left)
        build(temporary, progress)
        if not is_ready():  # else another machine's process, without a shared lock, was faster
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
    if world.current().local_rank == 0:  # a line a machine is enough
        print(text, file=sys.stderr, flush=True)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()
