"""Files of Hugging Face models: sharded safetensors with their index, config.json, the names of
experts.

transformers 5 holds the experts of a layer as one tensor of three dimensions; save_pretrained
writes a tensor for each projection of each expert, under names that differ between families.
"""

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from .args_values import parse_size
from .constants import (
    HF_CONFIG_NAME,
    HF_GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)
from .files import write_file, write_json
from .model_families import FAMILIES


class Shard(NamedTuple):
    """A weight file that is written and has no lasting name yet."""

    temporary: str
    tensors: list[str]
    size: int  # bytes


def open_safetensors(path: Path):
    """A safetensors file, open for reading by tensors. ValueError with its name where it is damaged
    or cut: its header and its size must fit."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError, ValueError) as error:  # OSError: of an empty file
        raise ValueError(
            f"{path} is damaged or cut, or cannot be read ({error}): copy or download it again"
        ) from None


def write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, max_shard_size, tag: str = "0"
) -> list[Shard]:
    """Write named tensors to temporary files of at most max_shard_size -> the shards, for
    name_shards.

    A shard is written as soon as the next tensor would not fit: host memory is one shard. tag:
    tells writers of one folder apart. Where it fails, none of its files is left.
    """
    from safetensors.torch import save_file

    limit, size = parse_size(max_shard_size), 0
    shards: list[Shard] = []
    shard: dict[str, torch.Tensor] = {}

    def flush():
        name = f".shard-{tag}-{len(shards)}.safetensors.tmp"
        save_file(shard, folder / name, metadata={"format": "pt"})
        shards.append(Shard(name, list(shard), size))

    try:
        for name, tensor in tensors:
            if shard and size + tensor.nbytes > limit:
                flush()
                shard, size = {}, 0
            shard[name] = tensor
            size += tensor.nbytes
        if shard:
            flush()
    except BaseException:
        remove_shards(folder, tag)
        raise
    return shards


def remove_shards(folder: Path, tag: str = "*") -> None:
    """Remove weight files without a lasting name: those of a writer, or of all."""
    for path in folder.glob(f".shard-{tag}-*.safetensors.tmp"):
        path.unlink(missing_ok=True)


def name_shards(folder: Path, shards: list[Shard]) -> list[str]:
    """Give written shards their final names, and write an index if there are several -> the file
    names.

    Weight files of an earlier export are removed, also what is left of one that was killed.
    """
    fixed = [folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME]
    for path in [*folder.glob("model-*-of-*.safetensors"), *fixed]:
        path.unlink(missing_ok=True)
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        final = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            final = SAFE_WEIGHTS_NAME
        os.replace(folder / shard.temporary, folder / final)
        weight_map.update(dict.fromkeys(shard.tensors, final))
    remove_shards(folder)
    written = sorted(set(weight_map.values()))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(s.size for s in shards)}, "weight_map": weight_map}
        write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index, sort_keys=True)
        written.append(SAFE_WEIGHTS_INDEX_NAME)
    return written


def write_safetensors(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, max_shard_size
) -> list[str]:
    """Write named tensors as a Hugging Face checkpoint, in this process -> the file names."""
    folder.mkdir(parents=True, exist_ok=True)
    return name_shards(folder, write_shards(tensors, folder, max_shard_size))


def write_hf_config(
    hf_config: dict, source: str | None, folder: Path, dtype: torch.dtype
) -> list[str]:
    """Write config.json, and copy generation_config.json and *.py of the source folder -> the file
    names.

    config.json is the source's own if there is one; only the dtype, the vocabulary size and the
    number of layers for multi-token prediction come from hf_config.
    """
    raw = Path(source or "") / HF_CONFIG_NAME
    values = json.loads(raw.read_text()) if source and raw.is_file() else dict(hf_config)
    theirs, ours = (v.get("text_config") or v for v in (values, hf_config))
    if "vocab_size" in ours:
        theirs["vocab_size"] = ours["vocab_size"]
    ahead = "num_nextn_predict_layers"
    # transformers reads 1 where config.json has no such key
    if (ours.get(ahead) or 0) > (theirs.get(ahead, 1) or 0):
        theirs[ahead] = ours[ahead]
    values.pop("torch_dtype", None)
    values["dtype"] = str(dtype).removeprefix("torch.")
    values.pop("_name_or_path", None)
    write_json(folder / HF_CONFIG_NAME, values, sort_keys=True, default=str)
    written = [HF_CONFIG_NAME]
    if not source:
        return written
    for path in (Path(source) / HF_GENERATION_CONFIG_NAME, *sorted(Path(source).glob("*.py"))):
        if path.is_file() and path.parent != folder:
            write_file(folder / path.name, path.read_bytes())
            written.append(path.name)
    return written


# -- the names of experts --------------------------------------------------------------------------


class _ExpertNames(NamedTuple):
    """What the files of a family call a layer's block of experts, and an expert's projections."""

    block: str
    gate: str
    up: str
    down: str


_FUSED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")  # transformers' modules
_IN_BLOCK = re.compile(r"(.*\.layers\.\d+\.)mlp\.(.*)")
_IN_ROW = re.compile(r"model\.layers\.\{\}\.(.+)\.experts\.\[\]\.(.+)\.weight")


@functools.cache
def _expert_names(model_type: str) -> _ExpertNames | None:
    """The names in a family's files, from its rows; None for a family without experts."""
    rows = [row for row in FAMILIES[model_type].rows if "[]" in row.mca]
    names = [name for row in rows for name in row.hf]
    if not names:
        return None
    matches = [match for name in names if (match := _IN_ROW.fullmatch(name))]
    assert len(matches) == len(names) == 3, f"{model_type}: rows of experts are {rows}"
    return _ExpertNames(matches[0][1], *(match[2] for match in matches))


def file_parts(model_type: str, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple]]:
    """(name in a file, index into the tensor) of each tensor that the files hold for a module's
    tensor.

    name, shape: of the module's tensor. Experts have several parts, any other tensor has one. A
    model type that is not in the table of families keeps the names of its modules. ValueError for
    fused experts of a family in the table whose rows do not say how its files name them.
    """
    if model_type not in FAMILIES:
        return [(name, ())]
    names, experts = _expert_names(model_type), _FUSED.fullmatch(name)
    if ".experts." in name and len(shape) == 3 and (names is None or experts is None):
        raise ValueError(
            f"{name} of {model_type} holds the experts of a layer {shape}, and the family's table "
            "does not say how files name them: add moe_rows() to its rows (model_families.py)"
        )
    if names is None:
        return [(name, ())]
    if experts is None:
        renamed = _IN_BLOCK.fullmatch(name)
        return [(f"{renamed[1]}{names.block}.{renamed[2]}" if renamed else name, ())]
    prefix, half = f"{experts[1]}{names.block}.experts", shape[1] // 2
    if experts[2] == "down_proj":
        return [(f"{prefix}.{e}.{names.down}.weight", (e,)) for e in range(shape[0])]
    halves = (names.gate, slice(0, half)), (names.up, slice(half, 2 * half))
    return [
        (f"{prefix}.{e}.{part}.weight", (e, rows)) for e in range(shape[0]) for part, rows in halves
    ]


def holds_fused_experts(names: Iterable[str]) -> bool:
    """Whether a checkpoint holds the experts of a layer in one tensor, as transformers does."""
    return any(_FUSED.fullmatch(name) for name in names)


def named_tensors(model) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) that a model saves: parameters, tied once, and persistent buffers."""
    yield from model.named_parameters()
    persistent = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)
