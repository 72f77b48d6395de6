"""Checkpoint folders: listing, choosing one to resume from, publishing, pruning.

    checkpoint-<step>/              complete: it gets this name once its manifest is written
    .checkpoint-<step>.tmp, .old, .replaced     being written, deleted or replaced; the next run
                                    removes a dead run's leftovers, or gives .replaced its name back
    set-aside-checkpoint-<step>/    newer than the checkpoint that a run resumed from: never read
                                    again, may be deleted
    latest                          the name of the checkpoint written last, for other programs

Anything else with such a name (a symbolic link, a file) is not deleted.

manifest.json is written after the files that it names, with size and checksum of each:

    format      the writer's FORMAT_VERSION (since 3 with dist/index.json); a reader refuses a newer
                one than it knows
    backend     megatron or torch;  step, with_optimizer;  model: keys of its config
    files       {relative path: {"bytes": size, "crc32": eight hex digits}}
    crc32       of all fields above

A CRC detects flipped bits and truncated files. It does not protect against people, but reading a
checkpoint runs no code from its files (ckpt_megatron.py).
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock, Timeout

from . import parallel
from .errors import Keys, UserError
from .files import CHECKPOINT_PREFIX, PathLike, checksum, first_of, sync, text_values, write_file

# -- the folder of a run

LOCK_NAME = ".run.lock"
# A killed run's rank may live on for a moment, and a shared file system may show files late.
_WAIT_S = 3.0
SEE_S = 5.0


class OutputFolderError(UserError, ValueError):
    """output_dir cannot be used by this run. Every rank raises it, with the same text."""

    same_on_all_ranks = True


@contextlib.contextmanager
def hold(output_dir: PathLike) -> Iterator[None]:
    """Keep other runs out of output_dir while this context is open; make the folder if it is
    missing.

    If the file system has locks, the main rank locks a file, and at the end removes the folder if
    it holds nothing else; the lock ends with the process. Contexts may be nested: the lock is held
    until the outermost one ends. Raises OutputFolderError if another run trains in the folder, if
    it cannot be written, or if the nodes do not share it. Collective on entry."""
    folder = Path(output_dir)
    with contextlib.ExitStack() as held:
        is_new = parallel.on_main(lambda: _take(folder, held), OutputFolderError)
        if is_new and parallel.world_size() > 1:
            _check_shared(folder)
        yield


def _take(folder: Path, held: contextlib.ExitStack) -> bool:
    """Lock the folder against other runs, if its file system has locks; the folder is made if it is
    missing. held: when it closes, the lock is released. Returns True if this process had not locked
    the folder before. OutputFolderError if another run has locked it, or if it cannot be written.
    """
    # a singleton per path and process: a second lock counts up instead of waiting
    lock = FileLock(folder.absolute() / LOCK_NAME, is_singleton=True)
    is_new = not lock.is_locked
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_WAIT_S)
        held.callback(lock.release)
        if is_new:
            held.callback(_leave, folder)
    except Timeout:
        raise OutputFolderError(
            f"another run trains in {folder} and has locked {LOCK_NAME} there. Two runs would "
            "delete each other's checkpoints: set another output_dir, or end that run first"
        ) from None
    except NotImplementedError:  # filelock's error on a file system without flock
        print(f"note: the file system of {folder} has no locks: let no other run write there")
    except OSError as error:
        raise OutputFolderError(
            f"output_dir {folder} cannot be written ({error.strerror or error}): set it to a "
            "folder that can"
        ) from None
    return is_new


def _leave(folder: Path) -> None:
    """Remove the folder if it holds only the lock file, so that a refused run leaves nothing."""
    with contextlib.suppress(OSError):  # the folder may be read-only or gone by now
        if [path.name for path in folder.iterdir()] == [LOCK_NAME]:
            (folder / LOCK_NAME).unlink()
            folder.rmdir()


def _check_shared(folder: Path) -> None:
    """Raise OutputFolderError on every rank if any rank does not see a new file of the main rank
    within SEE_S seconds. Collective.

    Otherwise a run over several nodes would fail only at its first checkpoint."""
    # a relative path depends on the rank's working directory
    here = f"it is not on {socket.gethostname()} in {folder.absolute()}"

    def leave_token() -> str:
        name = f".probe-{uuid.uuid4().hex}"
        (folder / name).touch()
        return name

    # the file is made before the others look, so on one file system no rank waits
    token = folder / parallel.on_main(leave_token, OutputFolderError)

    def look() -> None:
        end = time.monotonic() + SEE_S
        while not token.exists():
            if time.monotonic() > end:
                raise OutputFolderError(here)
            time.sleep(0.1)

    words = (
        "output_dir is not shared by all nodes: set it to one folder of a file system that all of "
        "them mount; a file of rank 0"
    )
    try:
        parallel.on_all(look, OutputFolderError, words)
    finally:
        if parallel.is_main():
            token.unlink()


# -- checkpoints in the folder

LATEST_NAME = "latest"
MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 3
_BACKENDS = {
    "megatron": "megatron-core (use_mca: true)",
    "torch": "the torch backend (use_mca: false)",
}
# the keys of a Hugging Face config that decide the shapes of weights
_MODEL_KEYS = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim tie_word_embeddings num_experts num_local_experts"
).split()
Entries: TypeAlias = dict[str, dict[str, Any]]  # file name -> its entry in a manifest
_KINDS = {"model": dict, "step": int, "with_optimizer": bool, "files": dict, "backend": str}
_NAME = re.compile(rf"{CHECKPOINT_PREFIX}-[0-9]+")
_LEFT = re.compile(rf"\.({CHECKPOINT_PREFIX}-[0-9]+)\.(tmp|old|replaced)(-[0-9]+)?")


class CheckpointError(UserError, ValueError):
    """A checkpoint that cannot be written or read, or does not go with the run, such as one of an
    earlier run where a new one starts. The text is expected to be the same on all ranks, so the
    command line prints it on one."""

    same_on_all_ranks = True


def measure(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest (a checkpoint's list of files): its size and checksum."""
    return entry_of(*checksum(path))


def entry_of(size: int, crc: int) -> dict[str, Any]:
    """The entry in the manifest (a checkpoint's list of files) for a file of `size` bytes with the
    CRC-32 `crc`."""
    return {"bytes": size, "crc32": f"{crc:08x}"}


def measure_all(folder: Path, names: Sequence[str]) -> Entries:
    """{name: its entry in the manifest, size and checksum} of files in a folder. The files are
    flushed to disk before it returns."""
    # flushing to disk and computing checksums overlap
    with ThreadPoolExecutor(1) as flusher:
        flushed = flusher.map(sync, [folder / name for name in names])
        entries = {name: measure(folder / name) for name in names}
        list(flushed)  # raises an error of flushing
    return entries


def model_identity(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The values of a Hugging Face config (a dict) that tell a checkpoint's model from another:
    those of _MODEL_KEYS, such as hidden_size."""
    text = text_values(hf_config)
    return {key: text[key] for key in _MODEL_KEYS if text.get(key) is not None}


def write_manifest(folder: Path, facts: dict[str, Any], files: Entries) -> None:
    """Write manifest.json into a checkpoint's folder. It completes the checkpoint, so it is written
    after the files that it names. facts: the fields backend, step, with_optimizer and model. files:
    {name: entry_of(size, crc)}."""
    record = {"format": FORMAT_VERSION, **facts, "files": dict(sorted(files.items()))}
    record["crc32"] = crc_of(record)
    write_file(folder / MANIFEST_NAME, json.dumps(record, indent=1) + "\n")


def crc_of(record: dict[str, Any]) -> str:
    """The CRC-32 of a manifest's fields other than crc32 itself, as eight hex digits."""
    rest = {key: value for key, value in record.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest. Raises CheckpointError if it is missing or damaged."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MANIFEST_NAME}, "
            "which is written last"
        )
    try:
        record = json.loads(path.read_bytes())
        _check_manifest(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}: use another checkpoint") from None
    return record


def _check_manifest(record: dict[str, Any]) -> None:
    """Check the contents of a manifest.json. Raises ValueError, KeyError, TypeError or
    AttributeError for a wrong checksum, missing fields, or files outside the checkpoint's folder.
    If its format is newer than this version's, only the checksum is checked."""
    if record["crc32"] != crc_of(record):
        raise ValueError("its own checksum does not fit")
    if record["format"] > FORMAT_VERSION:
        return  # its fields may have another meaning; inspect() refuses it
    check_kinds(record, _KINDS)
    for name, entry in record["files"].items():
        check_kinds(entry, {"bytes": int})
        if not {"/", ".."}.isdisjoint(Path(name).parts):
            raise ValueError(f"it names {name}, which lies outside the folder")


def check_kinds(record: dict[str, Any], kinds: dict[str, type]) -> None:
    """Check the types of a record's fields. kinds: {field: its type}. Raises ValueError if one of
    these fields is missing, or is not of exactly this type."""
    for key, kind in kinds.items():
        if type(record.get(key)) is not kind:
            raise ValueError(f"expected {key}, of type {kind.__name__}")


def damage(folder: Path, record: dict[str, Any]) -> str:
    """Check a checkpoint's files against its manifest -> text about damaged files, the same on
    every rank; "" if none is damaged. record: the manifest.

    Collective over all ranks: each reads a share of the files.
    """
    files = sorted(record["files"].items(), key=lambda item: -item[1]["bytes"])
    share = files[parallel.rank() :: parallel.world_size()]
    own = [_damage_of_file(folder / name, entry) for name, entry in share]
    problems = sorted(filter(None, itertools.chain(*parallel.gather(own))))
    return f"{folder} is damaged: {first_of(problems)}" if problems else ""


def _damage_of_file(path: Path, entry: dict[str, Any]) -> str:
    if not path.is_file():  # reading a pipe might never end
        return f"{path.name} is missing, or no file"
    try:
        now = measure(path)
    except OSError as error:
        now = error
    if now == entry:
        return ""
    return f"{path.name} has changed since it was written: {now} instead of {entry}"


# -- listing, publishing, pruning


def checkpoint_folder(output_dir: PathLike, step: int) -> Path:
    return Path(output_dir) / f"{CHECKPOINT_PREFIX}-{step}"


def step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def all_folders(output_dir: PathLike) -> list[Path]:
    """The folders in output_dir named checkpoint-<step>, complete or not, lowest step first."""
    folders = filter(_is_own_folder, Path(output_dir).glob(f"{CHECKPOINT_PREFIX}-*"))
    return sorted((path for path in folders if _NAME.fullmatch(path.name)), key=step_of)


def _is_own_folder(path: Path) -> bool:
    """True for a real directory: links are never followed."""
    return path.is_dir() and not path.is_symlink()


def _free_name(path: Path) -> Path:
    """`path`, or if that name is taken, the path with a number at its end."""
    free = path
    numbers = itertools.count(2)
    while os.path.lexists(free):
        free = path.with_name(f"{path.name}-{next(numbers)}")
    return free


def list_checkpoints(output_dir: PathLike) -> list[Path]:
    """The checkpoints in output_dir that have a manifest, so are complete, lowest step first."""
    return [path for path in all_folders(output_dir) if (path / MANIFEST_NAME).is_file()]


def publish(temporary: Path, final: Path) -> None:
    """Rename the folder `temporary`, a written checkpoint, to `final`, and update the pointer
    `latest`. An earlier checkpoint named `final` is replaced.

    If this is interrupted anywhere, every folder with a checkpoint's name is whole.
    """
    for folder in [*(path for path in temporary.iterdir() if path.is_dir()), temporary]:
        sync(folder)
    replaced = _free_name(final.with_name(f".{final.name}.replaced"))
    if os.path.lexists(final):
        os.rename(final, replaced)
    os.rename(temporary, final)
    sync(final.parent)
    write_file(final.with_name(LATEST_NAME), f"{final.name}\n")
    shutil.rmtree(replaced, ignore_errors=True)


def _named_old(folder: Path) -> Path:
    """Rename a checkpoint that is to be deleted, so that it no longer counts as a checkpoint -> its
    new path."""
    gone = _free_name(folder.with_name(f".{folder.name}.old"))
    os.rename(folder, gone)
    return gone


def set_spare_aside(newest: Path, best: str | None, limit: int | None) -> list[Path]:
    """Rename the oldest checkpoints if there are more than `limit`, so that the renamed ones no
    longer count as checkpoints and can be deleted later -> their new paths.

    newest: the newest checkpoint's folder. best: the best one's path, or None. These two are kept.
    limit: the number of checkpoints that may stay; None: no limit."""
    there = list_checkpoints(newest.parent)
    kept = {newest.name, Path(best or "").name}
    spare = [folder for folder in there if folder.name not in kept]
    return [_named_old(old) for old in spare[: max(0, len(there) - (limit or len(there)))]]


def prune(newest: Path, best: str | None, limit: int | None) -> None:
    """Delete the oldest checkpoints if there are more than `limit` (None: no limit). newest: the
    newest checkpoint's folder. best: the best one's path, or None. These two are never deleted."""
    for folder in set_spare_aside(newest, best, limit):
        shutil.rmtree(folder)


def set_newer_aside(output_dir: PathLike, step: int, say: Callable[[str], None]) -> None:
    """Rename checkpoints that are newer than `step`, from which a run resumes, to set-aside-*, and
    report it through `say`, which prints a line.

    Otherwise the next resume_from_checkpoint: auto would take them for checkpoints of this run.
    """
    for folder in all_folders(output_dir):
        if step_of(folder) > step:
            aside = _free_name(folder.with_name(f"set-aside-{folder.name}"))
            os.rename(folder, aside)
            newer = f"{folder.name} is newer than step {step}, which this run goes on from"
            say(f"{newer}: it is now {aside.name}")


# -- choosing one to resume from


def find(
    args: Keys,
    choice: str | bool | None,
    backend: str,
    identity: dict[str, Any],
    say: Callable[[str], None],
) -> Path | None:
    """The checkpoint to resume from, with every byte verified; None to start anew. Leftovers of
    dead runs in output_dir are cleaned up; if `choice` is to start anew, overwrite_output_dir
    removes its checkpoints.

    choice: "auto" or True takes the newest good one in output_dir, if any; a path takes that one;
    None or False starts anew. backend: the run's backend by name. identity: model_identity() of the
    run's model. say: prints a line. Raises CheckpointError if the run starts anew beside
    checkpoints without overwrite_output_dir, for a damaged path, if there are checkpoints and none
    is good, and for a checkpoint of another model or backend or a newer version. Collective over
    all ranks.
    """
    is_new = choice in (None, False)

    def tidy() -> None:
        _clean(args.output_dir)  # first: it may give a checkpoint its name back
        if is_new:
            for old in check_new(args):
                shutil.rmtree(_named_old(old))  # renamed first: none is seen half deleted

    parallel.on_main(tidy, CheckpointError)
    if is_new:
        return None
    return choose(args, choice, backend, identity, say)


def choose(
    args: Keys,
    choice: str | bool,
    backend: str,
    identity: dict[str, Any],
    say: Callable[[str], None],
) -> Path | None:
    """Find and verify the checkpoint to resume from, without changing output_dir -> its folder;
    None to start anew.

    choice: "auto" or True for the newest good checkpoint in output_dir, or a path. backend: the
    run's, "megatron" or "torch". identity: model_identity() of the run's model. say: prints a line.
    Raises CheckpointError for a damaged path, if there are checkpoints and none is good, and for a
    checkpoint of another model or backend or a newer version. Collective over all ranks."""
    if choice not in (True, "auto"):
        refuse_damage(Path(choice), backend, identity)
        say(f"resuming from {choice}")
        return Path(choice)
    bad = ""
    for folder in parallel.on_main(lambda: all_folders(args.output_dir)[::-1], CheckpointError):
        bad = inspect(folder, backend, identity)
        if not bad:
            say(f"resuming from {folder}")
            return folder
        say(f"skipped {folder.name}: {bad}")
    if bad:
        raise CheckpointError(
            f"none of the checkpoints in {args.output_dir} can be read; the oldest: {bad}. To "
            "start from the beginning set resume_from_checkpoint: false and overwrite_output_dir: "
            "true"
        )
    say(f"no checkpoint in {args.output_dir}: starting from the beginning")
    return None


def inspect(folder: Path, backend: str, identity: dict[str, Any]) -> str:
    """Verify a checkpoint -> text about its damage, the same on every rank; "" if there is none.
    backend: the run's, "megatron" or "torch". identity: model_identity() of the run's model.
    Collective over all ranks.

    Raises CheckpointError for a readable manifest of a newer format, or of another backend or
    model."""
    try:
        record = parallel.on_main(lambda: read_manifest(folder), CheckpointError)
    except CheckpointError as error:
        return str(error)
    if record["format"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST_NAME} has format {record['format']}, and this version reads "
            f"formats up to {FORMAT_VERSION}: use the version that wrote it, or a newer one"
        )
    if record["backend"] != backend:
        raise CheckpointError(
            f"{folder} was written by {_BACKENDS.get(record['backend'])}, and this run trains "
            f"with {_BACKENDS[backend]}: set use_mca as it was, or start from an exported model"
        )
    model = record["model"]
    changed = sorted(k for k in model.keys() & identity if model[k] != identity[k])
    if changed:
        words = ", ".join(f"{key} {model[key]} instead of {identity[key]}" for key in changed)
        raise CheckpointError(
            f"{folder} holds another model ({MANIFEST_NAME} says {words}): set model_name_or_path "
            "to the model that it was trained from, or another output_dir"
        )
    return damage(folder, record)


def refuse_damage(folder: Path, backend: str, identity: dict[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint is damaged, or of another model, backend or version.
    backend: the run's, "megatron" or "torch". identity: model_identity() of the run's model.
    Collective over all ranks."""
    bad = inspect(folder, backend, identity)
    if bad:
        raise CheckpointError(bad)


def check_new(args: Keys) -> list[Path]:
    """List the checkpoint folders in output_dir, complete or not, that a run must remove to start
    anew. Raises CheckpointError if there are any and overwrite_output_dir is not set."""
    there = all_folders(args.output_dir)
    if there and not args.overwrite_output_dir:
        raise CheckpointError(
            f"{args.output_dir} holds checkpoints of an earlier run, the newest {there[-1].name}: "
            "set resume_from_checkpoint: auto to go on, overwrite_output_dir: true to delete them, "
            "or another output_dir"
        )
    return there


def _clean(output_dir: PathLike) -> None:
    """Remove the folders of unfinished saves and deletions that a dead run left. A checkpoint that
    was being replaced gets its name back, unless a new one has it."""
    for left in filter(_is_own_folder, Path(output_dir).glob(f".{CHECKPOINT_PREFIX}-*")):
        match = _LEFT.fullmatch(left.name)
        if match is None:
            continue
        final = left.with_name(match[1])
        if match[2] == "replaced" and not os.path.lexists(final):
            os.rename(left, final)  # the run died between the two renames of publish
        else:
            shutil.rmtree(left)
