"""Small files that are written whole or not at all, and names that last."""

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
