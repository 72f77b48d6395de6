"""Small files that are written whole or not at all, and folders of models that are not there."""

import difflib
import json
import os
import uuid
from pathlib import Path
from typing import Any


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
