"""Where Hugging Face tensors come from: safetensors files read by slices, fresh values drawn by
name, and rows for new tokens.

A source has names(), shape(name) and read(name, rows=, columns=).
"""

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .constants import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from .files import describe_error, read_json, resolve_folder
from .model_families import FAMILIES
from .model_family_rows import UNUSED_TENSORS
from .weights_files import file_parts, file_tensors, holds_fused_experts, open_safetensors


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
    names, shapes = source.names(), shapes_of(hf_config)[1]
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
        self._std, self._seed = getattr(hf, "initializer_range", 0.02), seed
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
        self._source, self._vocabulary, self._vocab_size = source, names, vocab_size
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
