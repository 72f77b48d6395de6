"""Files of Hugging Face models: sharded safetensors with their index, config.json, the names of
experts.

transformers 5 holds the experts of a layer as one tensor of three dimensions; save_pretrained
writes a tensor for each projection of each expert, under names that differ between families.
"""

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .families import FAMILIES, UNUSED_TENSORS
from .files import (
    HF_CONFIG_NAME,
    HF_GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    describe_error,
    lies_in,
    parse_size,
    read_json,
    resolve_folder,
    write_file,
    write_json,
)

# -- safetensors in shards


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
    limit = parse_size(max_shard_size)
    size = 0
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
                shard = {}
                size = 0
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
    origin = Path(source or folder)
    written = []
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
            "does not say how files name them: add moe_rows() to its rows (families.py)"
        )
    if not rows:
        return [(name, ())]
    if experts is None:
        renamed = _IN_BLOCK.fullmatch(name)
        block = rows[0].hf[0].removeprefix(_OF_LAYER).partition(".experts.")[0]
        return [(f"{renamed[1]}{block}.{renamed[2]}" if renamed else name, ())]
    kind = "row" if experts[2] == "down_proj" else "gated"
    [names] = [row.hf for row in rows if row.kind == kind]
    parts = [experts[1] + n.removeprefix(_OF_LAYER) for n in names]
    size = shape[1] // len(names)
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


# -- sources of tensors


def cut(tensor, rows: slice | None, columns: slice | None) -> torch.Tensor:
    """The rows or the columns of a tensor, or of a file's slice of one; without either all of
    it."""
    if columns is not None:
        return tensor[:, columns]
    return tensor[rows if rows is not None else slice(None)]


class SafetensorsSource:
    """The tensors of a folder (or hub name) in safetensors format, read by slices.

    model_type: if given, fused experts (one tensor for a layer) are read under the names of single
    experts.
    """

    def __init__(self, model_name_or_path: str, model_type: str | None = None):
        self.folder = resolve_folder(model_name_or_path)
        # tensor -> file, file -> handle
        self._file_of, self._open = _read_index(self.folder)
        # name -> (stored tensor, index into it)
        self._part_of: dict[str, tuple[str, tuple]] = {name: (name, ()) for name in self._file_of}
        if model_type is not None and holds_fused_experts(self._file_of):
            self._part_of = {
                name: (stored, index)
                for stored in self._file_of
                for name, index in file_parts(model_type, stored, self._shape(stored))
            }

    def names(self) -> set[str]:
        return set(self._part_of)

    def in_file_order(self) -> list[str]:
        """The names, file by file."""
        return sorted(self._part_of, key=lambda n: (self._file_of[self._part_of[n][0]], n))

    def _slice(self, stored: str):
        return self._open[self._file_of[stored]].get_slice(stored)

    def _shape(self, stored: str) -> tuple[int, ...]:
        return tuple(self._slice(stored).get_shape())

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """The tensor, or the part of it in these rows or columns; other bytes are not read."""
        stored, index = self._part_of[name]
        if not index:
            return cut(self._slice(stored), rows, columns)
        expert, own = index
        rows = slice(own.start + rows.start, own.start + rows.stop) if rows is not None else own
        columns = columns if columns is not None else slice(None)
        return self._slice(stored)[expert : expert + 1, rows, columns][0]

    def shape(self, name: str) -> tuple[int, ...]:
        stored, index = self._part_of[name]
        shape = self._shape(stored)
        return (index[1].stop - index[1].start, *shape[2:]) if index else shape


def _read_index(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """({tensor: file}, {file: handle}) of a folder, every file opened.

    ValueError, with the file's name, where the folder holds no safetensors, or where its index or
    one of them is damaged or lacks something.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / SAFE_WEIGHTS_NAME).is_file():  # wins over an index, as in transformers
        file = open_safetensors(folder / SAFE_WEIGHTS_NAME)
        return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME), {SAFE_WEIGHTS_NAME: file}
    if not index.is_file():
        raise ValueError(
            f"{folder}: expected {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}, and neither is "
            "there; a model in another format can be saved anew by transformers' save_pretrained, "
            "and a model without weights starts with train_from_scratch: true"
        )
    file_of = read_json(index).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise ValueError(f"{index}: expected weight_map, an object that names the file of a tensor")
    for name, file in file_of.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: expected the name of a file for {name}, got {file!r:.80}")
    gone = sorted(name for name in set(file_of.values()) if not (folder / name).is_file())
    if gone:
        raise ValueError(
            f"{folder}: {SAFE_WEIGHTS_INDEX_NAME} names {', '.join(gone)}, and the folder lacks "
            f"{'it' if len(gone) == 1 else 'them'}: copy or download the model again"
        )
    opened = {name: open_safetensors(folder / name) for name in sorted(set(file_of.values()))}
    held = {name: set(file.keys()) for name, file in opened.items()}
    lost = sorted(name for name, file in file_of.items() if name not in held[file])
    if lost:
        raise ValueError(
            f"{folder / file_of[lost[0]]} lacks {lost[0]}, which {SAFE_WEIGHTS_INDEX_NAME} says it "
            "holds: copy or download the model again"
        )
    return file_of, opened


def shapes_of(hf_config: dict) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """(transformers' config, {name in its files: shape}) of the model that a config.json describes.
    ValueError where transformers makes none of it."""
    import transformers

    try:
        hf = transformers.AutoConfig.for_model(**json.loads(json.dumps(hf_config)))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(hf)
    except Exception as error:  # whatever a made up config leads to in transformers
        words = f"transformers makes no model of this config.json: {describe_error(error)}"
        raise ValueError(words) from error
    # a source has both names of a tied head
    parts = file_tensors(model, tied_twice=True)
    return hf, {name: tuple(tensor[index].shape) for name, tensor, index in parts}


def check_shapes(source: SafetensorsSource, hf_config: dict) -> None:
    """ValueError where a tensor of the source has another shape than config.json asks for. Reads
    the headers of the files alone."""
    names = source.names()
    shapes = shapes_of(hf_config)[1]
    for name in sorted(names & shapes.keys()):
        if (got := source.shape(name)) != shapes[name]:
            raise ValueError(
                f"{source.folder}: {name} has shape {got}, and config.json asks for "
                f"{shapes[name]}: the weights do not belong to this config.json"
            )


def check_loaded(origin: str, found: dict) -> None:
    """ValueError for weights that transformers would replace by random ones. found: what
    from_pretrained says of its files."""
    wrong = [f"lacks {name}" for name in sorted(found["missing_keys"])]
    for name, got, wanted in sorted(found["mismatched_keys"]):
        wrong.append(f"has {name} of shape {tuple(got)} instead of {tuple(wanted)}")
    if wrong:
        more = f", and {len(wrong) - 3} more" * (len(wrong) > 3)
        raise ValueError(
            f"{origin}: the weights do not belong to its config.json: the checkpoint "
            f"{', '.join(wrong[:3])}{more}"
        )


class InitSource:
    """Freshly drawn tensors, each from a seed that its name in Hugging Face's files gives: the same
    in any layout.

    Matrices are normal with the config's initializer_range, norms 1 (0 if the model adds 1 to
    them), biases 0.
    """

    def __init__(self, hf_config: dict, seed: int, num_prediction_layers: int | None = 0):
        hf, self._shapes = shapes_of(hf_config)
        first = hf.num_hidden_layers
        for layer in range(first, first + (num_prediction_layers or 0)):
            self._add_prediction_layer(layer, f"model.layers.{first - 1}.", hf.hidden_size)
        self._std = getattr(hf, "initializer_range", 0.02)
        self._seed = seed
        constants = FAMILIES[hf.model_type].constants if hf.model_type in FAMILIES else {}
        self._norm = torch.zeros if constants.get("layernorm_zero_centered_gamma") else torch.ones

    def _add_prediction_layer(self, layer: int, last_layer: str, hidden_size: int) -> None:
        """A layer for multi-token prediction: the tensors of the last decoder layer, three norms
        and a projection."""
        own = f"model.layers.{layer}."
        copied = [name for name in self._shapes if name.startswith(last_layer)]
        for name in copied:
            self._shapes[own + name.removeprefix(last_layer)] = self._shapes[name]
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            self._shapes[f"{own}{norm}.weight"] = (hidden_size,)
        self._shapes[f"{own}eh_proj.weight"] = (hidden_size, 2 * hidden_size)

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """float32; the whole tensor is drawn, whatever part of it is asked for."""
        shape = self._shapes[name]
        if len(shape) == 1:
            full = torch.zeros(shape) if name.endswith("bias") else self._norm(shape)
        else:
            full = torch.empty(shape, device="cpu")
            full.normal_(0.0, self._std, generator=generator_of(self._seed, name))
        return cut(full, rows, columns)


def generator_of(seed: int, name: str) -> torch.Generator:
    """A CPU generator whose state depends on the seed and the name of a tensor, and on nothing
    else."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


# -- new tokens ------------------------------------------------------------------------------------

# A new row of embedding and head begins as the mean of the rows that the model has, in that matrix,
# summed in float64 in the order of the file: the same in every layout and on both backends,
# whatever else is drawn at random.
MEAN_ROWS = 4096  # of the matrix are in memory at a time


def mean_row(read: Callable[[slice], torch.Tensor], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """The mean of the rows of a matrix, [h], rounded once. read(rows): these rows of it."""
    parts = (read(slice(i, min(i + MEAN_ROWS, rows))) for i in range(0, rows, MEAN_ROWS))
    return (sum(part.to("cpu", torch.float64).sum(0) for part in parts) / rows).to(dtype)


class GrownSource:
    """A source whose matrices of the vocabulary have `vocab_size` rows."""

    def __init__(self, source, names: set[str], vocab_size: int):
        self._source = source
        self._vocabulary = names
        self._vocab_size = vocab_size
        self._means: dict[str, torch.Tensor] = {}

    def names(self) -> set[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        return (self._vocab_size, *shape[1:]) if name in self._vocabulary else shape

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        if name not in self._vocabulary:
            return self._source.read(name, rows=rows, columns=columns)
        assert columns is None, f"{name}: tensor parallelism cuts the rows of the vocabulary"
        start, stop, _ = (rows or slice(None)).indices(self._vocab_size)
        old = self._source.shape(name)[0]
        value = self._source.read(name, rows=slice(min(start, old), min(stop, old)))
        new = max(stop - max(start, old), 0)
        if new == 0:
            return value
        return torch.cat([value, self._mean(name, old, value.dtype).expand(new, -1)])

    def _mean(self, name: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._means:
            source = self._source
            self._means[name] = mean_row(lambda part: source.read(name, rows=part), rows, dtype)
        return self._means[name]


def grow_torch(model, vocab_size: int, dtype: torch.dtype) -> None:
    """Grow embedding, head and config of a transformers model. dtype: of its file's weights."""
    old = model.get_input_embeddings().weight.shape[0]
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    means = [mean_row(module.weight.detach().__getitem__, old, dtype) for module in both]
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    both = (model.get_input_embeddings(), model.get_output_embeddings())  # new modules
    with torch.no_grad():
        for module, mean in zip(both, means, strict=True):
            module.weight[old:] = mean.to(module.weight)


# -- what no model reads ---------------------------------------------------------------------------


def is_unused(name: str, hf_config: dict, num_trained: int | None = 0) -> bool:
    """Whether no model here reads a tensor of a checkpoint: fill() skips it, and an export copies
    it.

    Layers for multi-token prediction come after the decoder's; the first num_trained of them are
    read.
    """
    if any(re.search(pattern, name) for pattern in UNUSED_TENSORS):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    ahead = hf_config.get("num_nextn_predict_layers") or hf_config.get("num_mtp_layers") or 0
    if layer is None or not ahead:
        return False
    first = hf_config["num_hidden_layers"]
    return first + (num_trained or 0) <= int(layer[1]) < first + ahead


def original_of(source: str | None) -> SafetensorsSource | None:
    """The safetensors of the model that another one was made from: a folder's, or those of the
    hub's snapshot in the cache. None if they are gone."""
    if not source:
        return None
    if not Path(source).is_dir():
        from huggingface_hub import snapshot_download

        # its errors are of many kinds, and all say that it is not there
        with contextlib.suppress(Exception):
            source = snapshot_download(source, local_files_only=True)
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    is_there = any((Path(source) / name).is_file() for name in names)
    return SafetensorsSource(source) if is_there else None


def carried_tensors(
    source: str | None, hf_config: dict, num_trained: int | None = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the source's tensors that is_unused says no model reads.

    Nothing if the source is gone; a warning then, if config.json says that there should be some.
    """
    tensors = original_of(source)
    if tensors is None:
        next_layer = hf_config.get("num_hidden_layers", 0) + (num_trained or 0)
        if source and is_unused(f"model.layers.{next_layer}.", hf_config, num_trained):
            warnings.warn(
                "config.json names layers for multi-token prediction that were not trained, and "
                f"{source} is not there to carry them from: the export lacks them, and its "
                "config.json should not speak of them",
                stacklevel=2,
            )
        return
    unused = [name for name in sorted(tensors.names()) if is_unused(name, hf_config, num_trained)]
    # copies of embedding and head in layers for multi-token prediction get the new tokens too
    copies = {name for name in unused if name.endswith((".embed_tokens.weight", ".head.weight"))}
    vocab_size = hf_config.get("vocab_size", 0)
    short = {name for name in copies if tensors.shape(name)[0] < vocab_size}
    grown = GrownSource(tensors, short, vocab_size)
    yield from ((name, grown.read(name)) for name in unused)
