"""The checkpoints of an output directory: which there are, which to go on from, and how one appears or goes.

checkpoint-<step>/              complete: it got this name by a rename, after its manifest was written
.checkpoint-<step>.tmp, .old, .replaced     being written, deleted or replaced: what a run that died leaves is removed
                                by the next one
set-aside-checkpoint-<step>/    newer than the one that a run went on from: never picked up again, yours to delete
latest                          the name of the newest checkpoint, for other programs; this one looks for itself
"""

import os
import re
import shutil
from pathlib import Path

from . import ckpt_manifest, parallel
from .ckpt_manifest import MANIFEST_NAME, CheckpointError
from .constants import CHECKPOINT_PREFIX

LATEST_NAME = "latest"


def checkpoint_folder(output_dir: str | os.PathLike, step: int) -> Path:
    return Path(output_dir) / f"{CHECKPOINT_PREFIX}-{step}"


def temporary_folder(final: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return final.with_name(f".{final.name}.tmp")


def step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def all_folders(output_dir: str | os.PathLike) -> list[Path]:
    """Whatever bears a checkpoint's name, complete or not, oldest first."""
    found = [
        p
        for p in Path(output_dir).glob(f"{CHECKPOINT_PREFIX}-*")
        if re.fullmatch(r".*-\d+", p.name)
    ]
    return sorted((p for p in found if p.is_dir()), key=step_of)


def list_checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return [path for path in all_folders(output_dir) if (path / MANIFEST_NAME).is_file()]


def publish(temporary: Path, final: Path) -> None:
    """Give a written checkpoint its name, then move the pointer. Whenever this is cut off, what has a name is whole."""
    for folder in [*(path for path in temporary.iterdir() if path.is_dir()), temporary]:
        ckpt_manifest.sync(folder)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        os.rename(final, replaced)
    os.rename(temporary, final)
    ckpt_manifest.sync(final.parent)
    point_to(final)
    shutil.rmtree(replaced, ignore_errors=True)


def point_to(folder: Path) -> None:
    pointer = folder.parent / LATEST_NAME
    ckpt_manifest.write_synced(
        pointer.with_name(f".{LATEST_NAME}.tmp"), f"{folder.name}\n".encode()
    )
    os.replace(pointer.with_name(f".{LATEST_NAME}.tmp"), pointer)


def remove(folder: Path) -> None:
    """Delete a checkpoint so that it is never seen half deleted."""
    gone = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone)


def prune(newest: Path, best: str | None, limit: int | None) -> None:
    """Delete the oldest checkpoints beyond `limit`, but never the newest complete one or the best one."""
    if limit is None:
        return
    there = list_checkpoints(newest.parent)
    spare = [f for f in there if f != newest and (best is None or f.name != Path(best).name)]
    for old in spare[: max(0, len(there) - limit)]:
        remove(old)


def find(args, asked: str | bool | None, backend: str, identity: dict, say=print) -> Path | None:
    """The checkpoint to resume from, every byte of it verified, or None to start anew. Collective.

    asked: "auto" or True: the newest good one in output_dir, if any; a path; None or False: start anew, which is a
    CheckpointError where output_dir holds checkpoints, unless overwrite_output_dir removes them. CheckpointError too where
    a path is damaged, where none of several is good, and for a checkpoint of another model or of a newer version.
    """
    if asked in (None, False):
        parallel.on_main(lambda: _start_anew(args), CheckpointError)
        return None
    parallel.on_main(lambda: _clean(args.output_dir), CheckpointError)
    if asked not in (True, "auto"):
        bad = inspect(Path(asked), backend, identity)
        if bad:
            there = parallel.on_main(lambda: [p.name for p in list_checkpoints(args.output_dir)])
            more = f"; complete ones in {args.output_dir}: {', '.join(there) or 'none'}"
            raise CheckpointError(f"resume_from_checkpoint: {bad}{more}")
        say(f"resuming from {asked}")
        return Path(asked)
    there = parallel.on_main(lambda: all_folders(args.output_dir)[::-1], CheckpointError)
    for folder in there:
        bad = inspect(folder, backend, identity)
        if bad is None:
            say(f"resuming from {folder}")
            return folder
        say(f"skipped {folder.name}: {bad}")
    if there:
        raise CheckpointError(
            f"none of the {len(there)} checkpoints in {args.output_dir} can be read; the newest: {bad}. To start from the "
            "beginning set resume_from_checkpoint: false and overwrite_output_dir: true"
        )
    say(f"no checkpoint in {args.output_dir}: starting from the beginning")
    return None


def inspect(folder: Path, backend: str, identity: dict) -> str | None:
    """What is wrong with a checkpoint's files, None where nothing is. The same answer on every rank. Collective.

    CheckpointError for one whose files may be good and which this run cannot load all the same."""
    record, bad = parallel.on_main(lambda: _read(folder))
    if bad:
        return bad
    refused = ckpt_manifest.refusal(folder, record, backend, identity)
    if refused:
        raise CheckpointError(refused)
    found = ckpt_manifest.damage(folder, record)
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{folder} is damaged: {'; '.join(found[:3])}{more}" if found else None


def set_newer_aside(output_dir: str | os.PathLike, step: int, say=print) -> None:
    """Rename what is newer than the step that a run goes on from: the next `auto` must not mistake it for this run's."""
    for folder in all_folders(output_dir):
        if step_of(folder) <= step:
            continue
        aside, count = folder.with_name(f"set-aside-{folder.name}"), 1
        while aside.exists():
            count += 1
            aside = folder.with_name(f"set-aside-{folder.name}-{count}")
        os.rename(folder, aside)
        say(
            f"{folder.name} is newer than step {step}, which this run goes on from: it is now {aside.name}"
        )


def _read(folder: Path) -> tuple[dict | None, str | None]:
    try:
        return ckpt_manifest.read(folder), None
    except CheckpointError as error:
        return None, str(error)


def _start_anew(args) -> None:
    there = all_folders(args.output_dir)
    if there and not args.overwrite_output_dir:
        raise CheckpointError(
            f"{args.output_dir} holds checkpoints of an earlier run, the newest {there[-1].name}: set "
            "resume_from_checkpoint: auto to go on, overwrite_output_dir: true to delete them, or another output_dir"
        )
    for old in there:
        remove(old)
    _clean(args.output_dir)


def _clean(output_dir: str | os.PathLike) -> None:
    """Remove what a run that died has left half written or half deleted."""
    for left in Path(output_dir).glob(f".{CHECKPOINT_PREFIX}-*"):
        final = left.with_name(left.stem[1:])
        if left.suffix == ".replaced" and not final.exists():
            os.rename(left, final)  # the run died between the two renames of publish
        elif left.suffix in (".tmp", ".old", ".replaced"):
            shutil.rmtree(left)
