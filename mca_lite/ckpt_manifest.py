"""manifest.json: what makes a checkpoint folder trustworthy. It is written last, with size and checksum of every file.

    format      FORMAT_VERSION of the writer: a reader refuses what is newer than itself
    backend     megatron or torch;  step, with_optimizer;  model: what tells one model from another
    files       {relative path: {"bytes": size, "crc32": eight hex digits}}

A CRC finds every flipped bit and every cut file; it is no defence against people, and what is read from a checkpoint is read
without running code that the file brings (ckpt_megatron.py).
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from . import parallel

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
# keys of a Hugging Face config that decide which weights there are
_MODEL_KEYS = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "tie_word_embeddings num_experts num_local_experts"
).split()
_BLOCK_BYTES = 1 << 20  # fits a core's cache


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read. Every rank raises it, with the same text."""


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def measure(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest."""
    size, crc, block = 0, 0, memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            size, crc = size + count, zlib.crc32(block[:count], crc)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def model_identity(hf_config: dict[str, Any]) -> dict[str, Any]:
    """What tells one model from another, of a Hugging Face config as a dict."""
    text = hf_config.get("text_config") or hf_config
    return {key: text[key] for key in _MODEL_KEYS if text.get(key) is not None}


def write(folder: Path, facts: dict[str, Any], files: dict[str, dict]) -> None:
    """Write manifest.json: the last file of a checkpoint."""
    record = {"format": FORMAT_VERSION, **facts, "files": dict(sorted(files.items()))}
    write_synced(folder / MANIFEST_NAME, (json.dumps(record, indent=1) + "\n").encode())


def read(folder: Path) -> dict[str, Any]:
    """The manifest. CheckpointError where there is none, it is damaged, or its format is newer than this version's."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MANIFEST_NAME}, which is written last"
        )
    try:
        record = json.loads(path.read_bytes())
        version, files = record["format"], record["files"]
        if not isinstance(version, int) or not all(
            "bytes" in f and "crc32" in f for f in files.values()
        ):
            raise ValueError("it lacks sizes or checksums")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}: use another checkpoint") from None
    return record


def refusal(
    folder: Path, record: dict[str, Any], backend: str, identity: dict[str, Any]
) -> str | None:
    """Why an undamaged checkpoint cannot be loaded by this version, backend or model; None where it can."""
    if record["format"] > FORMAT_VERSION:
        return (
            f"{folder / MANIFEST_NAME} has format {record['format']}, and this version reads formats up to {FORMAT_VERSION}: "
            "use the version that wrote it, or a newer one"
        )
    if record["backend"] != backend:
        names = {
            "megatron": "megatron-core (use_mca: true)",
            "torch": "the torch backend (use_mca: false)",
        }
        return (
            f"{folder} was written by {names[record['backend']]}, and this run trains with {names[backend]}: "
            "set use_mca as it was, or start from an exported model"
        )
    theirs = record["model"]
    other = [
        key
        for key in _MODEL_KEYS
        if key in theirs and key in identity and theirs[key] != identity[key]
    ]
    if other:
        words = ", ".join(f"{key} {theirs[key]} instead of {identity[key]}" for key in other)
        return (
            f"{folder} holds another model ({MANIFEST_NAME} says {words}): set model_name_or_path to the model that it was "
            "trained from, or another output_dir"
        )
    return None


def damage(folder: Path, record: dict[str, Any]) -> list[str]:
    """What is wrong with the folder's files, the same list on every rank. Collective: each rank reads a share."""
    files = sorted(record["files"].items(), key=lambda item: -item[1]["bytes"])
    mine = []
    for name, entry in files[parallel.rank() :: parallel.world_size()]:
        try:
            found = measure(folder / name)
        except FileNotFoundError:
            mine.append(f"{name} is missing")
            continue
        except OSError as error:
            mine.append(f"{name} cannot be read: {error.strerror}")
            continue
        if found["bytes"] != entry["bytes"]:
            mine.append(f"{name} has {found['bytes']} bytes, and {entry['bytes']} were written")
        elif found["crc32"] != entry["crc32"]:
            mine.append(
                f"{name} has changed since it was written: checksum {found['crc32']} instead of {entry['crc32']}"
            )
    return sorted(text for texts in parallel.gather(mine) for text in texts)
