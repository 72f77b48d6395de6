"""Hugging Face's files: safetensors in shards with their index, config.json, and sizes in words."""

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from .constants import (
    HF_CONFIG_NAME,
    HF_GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)

Shard = tuple[str, list[str], int]  # file name for the time being, tensors in it, their bytes


def write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, max_shard_size, tag: str = "0"
) -> list[Shard]:
    """Write named tensors to files of at most max_shard_size, which have no lasting names yet -> the shards.

    A shard is written as soon as the next tensor would not fit: host memory is one shard. tag: tells writers apart.
    """
    from safetensors.torch import save_file

    limit, shards, shard, size = parse_size(max_shard_size), [], {}, 0

    def flush():
        name = f".shard-{tag}-{len(shards)}.safetensors.tmp"
        save_file(shard, folder / name, metadata={"format": "pt"})
        shards.append((name, list(shard), size))

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            flush()
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        flush()
    return shards


def name_shards(folder: Path, shards: list[Shard]) -> list[str]:
    """Give written shards Hugging Face's names, and write the index where there is more than one -> the files.

    Stale weight files of an earlier export go.
    """
    for path in [
        *folder.glob("model-*-of-*.safetensors"),
        folder / SAFE_WEIGHTS_NAME,
        folder / SAFE_WEIGHTS_INDEX_NAME,
    ]:
        path.unlink(missing_ok=True)
    weight_map, count = {}, len(shards)
    for i, (temporary, names, _) in enumerate(shards):
        final = SAFE_WEIGHTS_NAME if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        os.replace(folder / temporary, folder / final)
        weight_map.update(dict.fromkeys(names, final))
    if count > 1:
        index = {
            "metadata": {"total_size": sum(size for _, _, size in shards)},
            "weight_map": weight_map,
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n"
        )
    return sorted(set(weight_map.values())) + ([SAFE_WEIGHTS_INDEX_NAME] if count > 1 else [])


def write_safetensors(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, max_shard_size
) -> list[str]:
    """Write named tensors under Hugging Face's file names, and the index where there is more than one file -> the files."""
    folder.mkdir(parents=True, exist_ok=True)
    return name_shards(folder, write_shards(tensors, folder, max_shard_size))


def write_hf_config(
    hf_config: dict, source: str | None, folder: Path, dtype: torch.dtype
) -> list[str]:
    """config.json as the source has it but for the dtype, the vocabulary and layers for multi-token prediction, the source's
    generation_config.json and its code -> the files."""
    raw = Path(source or "") / HF_CONFIG_NAME
    values = json.loads(raw.read_text()) if source and raw.is_file() else dict(hf_config)
    theirs, ours = (v.get("text_config") or v for v in (values, hf_config))
    if "vocab_size" in ours:
        theirs["vocab_size"] = ours["vocab_size"]
    ahead = "num_nextn_predict_layers"
    if (ours.get(ahead) or 0) > (
        theirs.get(ahead, 1) or 0
    ):  # transformers reads 1 where there is none
        theirs[ahead] = ours[ahead]
    values.pop("torch_dtype", None)
    values["dtype"] = str(dtype).removeprefix("torch.")
    values.pop("_name_or_path", None)
    (folder / HF_CONFIG_NAME).write_text(
        json.dumps(values, indent=2, sort_keys=True, default=str) + "\n"
    )
    written = [HF_CONFIG_NAME]
    carried = (
        [Path(source) / HF_GENERATION_CONFIG_NAME, *sorted(Path(source).glob("*.py"))]
        if source
        else []
    )
    for path in carried:
        if path.is_file() and path.parent != folder:
            (folder / path.name).write_bytes(path.read_bytes())
            written.append(path.name)
    return written


def parse_size(size: str | int) -> int:
    """Bytes of "5GB", "500MB", "2KB", "10GiB" or a number. ValueError for anything else."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", size, re.IGNORECASE)
    if match is None:
        raise ValueError(
            f"max_shard_size: {size!r} is not a size, expected something like 5GB or 500MB"
        )
    number, prefix, binary = match.groups()
    return math.ceil(
        float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    )
