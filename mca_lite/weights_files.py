"""Files of Hugging Face models: sharded safetensors with their index, config.json, the names of
experts.

transformers 5 holds the experts of a layer as one tensor of three dimensions; save_pretrained
writes a tensor for each projection of each expert, under names that differ between families.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .args_values import parse_size
from .constants import (
    HF_CONFIG_NAME,
    HF_GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)
from .files import lies_in, read_json, write_file, write_json
from .model_families import FAMILIES


class Shard(NamedTuple):
    """A weight file that is written and has no lasting name yet."""

    temporary: str
    tensors: list[str]
    size: int  # bytes


def open_safetensors(path: Path):
    """A safetensors file, open for reading by tensors. ValueError with its name where it is damaged
    or cut: its header and its size must fit."""
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
    """Write config.json -> the file names.

    It is the source's own if there is one, of a model; only the dtype, the vocabulary size and the
    number of layers for multi-token prediction come from hf_config.
    """
    raw = Path(source or "") / HF_CONFIG_NAME
    values = read_json(raw) if source and raw.is_file() else {}
    if "model_type" not in values:
        values = dict(hf_config)
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
    return [HF_CONFIG_NAME]


def copy_beside(source: str | None, folder: Path) -> list[str]:
    """Copy generation_config.json and the code of a model's folder -> the file names. A link that
    leaves the source is passed over."""
    origin, written = Path(source or folder), []
    for path in (origin / HF_GENERATION_CONFIG_NAME, *sorted(origin.glob("*.py"))):
        if lies_in(path, origin) and origin != folder:
            write_file(folder / path.name, path.read_bytes())
            written.append(path.name)
    return written


# -- the names of experts --------------------------------------------------------------------------


_OF_LAYER = "model.layers.{}."
_FUSED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")  # transformers' modules
_IN_BLOCK = re.compile(r"(.*\.layers\.\d+\.)mlp\.(.*)")


def file_parts(model_type: str, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple]]:
    """(name in a file, index into the tensor) of each tensor that the files hold for a module's
    tensor.

    name, shape: of the module's tensor. Experts have several parts, each with an index of its
    expert and rows; any other tensor has one, with the index (). A model type that is not in the
    table of families keeps the names of its modules. ValueError for fused experts of a family in
    the table whose rows do not say how its files name them.
    """
    if model_type not in FAMILIES:
        return [(name, ())]
    rows = [row for row in FAMILIES[model_type].rows if "[]" in row.mca]
    experts = _FUSED.fullmatch(name)
    if ".experts." in name and len(shape) == 3 and not (rows and experts):
        raise ValueError(
            f"{name} of {model_type} holds the experts of a layer {shape}, and the family's table "
            "does not say how files name them: add moe_rows() to its rows (model_families.py)"
        )
    if not rows:
        return [(name, ())]
    if experts is None:
        renamed = _IN_BLOCK.fullmatch(name)
        block = rows[0].hf[0].removeprefix(_OF_LAYER).partition(".experts.")[0]
        return [(f"{renamed[1]}{block}.{renamed[2]}" if renamed else name, ())]
    kind = "row" if experts[2] == "down_proj" else "gated"
    [names] = [row.hf for row in rows if row.kind == kind]
    parts, size = [experts[1] + n.removeprefix(_OF_LAYER) for n in names], shape[1] // len(names)
    return [
        (part.replace("[]", str(e)), (e, slice(i * size, (i + 1) * size)))
        for e in range(shape[0])
        for i, part in enumerate(parts)
    ]


def holds_fused_experts(names: Iterable[str]) -> bool:
    """Whether a checkpoint holds the experts of a layer in one tensor, as transformers does."""
    return any(_FUSED.fullmatch(name) for name in names)


def named_tensors(model, tied_twice: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) that a model saves: parameters, tied once or twice, and persistent buffers."""
    yield from model.named_parameters(remove_duplicate=not tied_twice)
    persistent = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def file_tensors(model, tied_twice: bool = False) -> Iterator[tuple[str, torch.Tensor, tuple]]:
    """(name in a file, tensor of the model, index of the file's part of it) of what a transformers
    model saves without its adapters."""
    for name, tensor in named_tensors(model, tied_twice):
        if ".lora." not in name:
            for file_name, index in file_parts(model.config.model_type, name, tuple(tensor.shape)):
                yield file_name, tensor, index
