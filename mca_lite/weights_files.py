"""Files of Hugging Face models: sharded safetensors with their index, config.json, the names of
experts. Also other tensor sources: weights drawn from a seed, and matrices grown for new tokens.

transformers 5 keeps a layer's experts in three-dimensional tensors, but save_pretrained writes one
tensor per projection and expert for most families, under names that differ between them.
"""

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from . import families, families_rows, world
from .errors import refuse
from .families import FAMILIES, OLDER_PREFIXES, THINKER_PREFIXES
from .families_rows import PREDICTION_KEY, UNUSED_TENSORS, VALUE_HEAD, has_value_head
from .files import (
    HF_CONFIG_NAME,
    HF_GENERATION_CONFIG_NAME,
    PROCESSOR_FILES,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cache_folder,
    copy_files,
    describe_error,
    is_there,
    parse_size,
    read_json,
    replacing,
    resolve_folder,
    text_values,
    write_file,
    write_json,
)
from .tables import TENSOR_FORMATS, function_of

Shape = tuple[int, ...]
NamedTensors = Iterator[tuple[str, torch.Tensor]]
Part = tuple[slice, ...]  # a slice of rows, or of rows and columns
_ALL: Part = (slice(None),)


class TensorSource(Protocol):
    """Protocol for a checkpoint from which tensors, or slices of them, are read by Hugging Face
    name."""

    def names(self) -> KeysView[str]: ...
    def shape(self, name: str) -> Shape: ...
    def read(self, name: str, part: Part = _ALL) -> torch.Tensor: ...


# keys that only a model with a value head has in config.json
OF_VALUE_HEAD = ("architectures", "id2label", "label2id")

# -- safetensors in shards


def write_safetensors(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, max_shard_size: str | int
) -> list[str]:
    """Write named tensors as safetensors files to `folder`, from this process -> the file names.
    Several files get an index.

    max_shard_size: most bytes of tensors in a file, also as text such as "5GB"; a larger tensor
    gets a file alone. A file is written once the next tensor would not fit or there is none. On
    success the weight files of an earlier export are removed; if a tensor cannot be written they
    remain."""
    shards: list[list[str]] = []
    total_size = 0
    with replacing(folder) as beside:
        for shard in _in_shards(tensors, parse_size(max_shard_size)):
            save_file(shard, beside / str(len(shards)), metadata={"format": "pt"})
            shards.append(list(shard))
            total_size += sum(tensor.nbytes for tensor in shard.values())
        count = len(shards)
        finals = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, 1 + count)]
        if count == 1:
            finals = [SAFE_WEIGHTS_NAME]
        weight_map: dict[str, str] = {}
        for i, (final, names) in enumerate(zip(finals, shards, strict=True)):
            os.replace(beside / str(i), beside / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
            write_json(beside / SAFE_WEIGHTS_INDEX_NAME, index, sort_keys=True)
            finals.append(SAFE_WEIGHTS_INDEX_NAME)
    stale = {SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME}
    stale |= {path.name for path in folder.glob("model-*-of-*.safetensors")}
    for name in stale.difference(finals):
        (folder / name).unlink(missing_ok=True)
    return finals


def _in_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], limit: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Group tensors into files: yield {name: tensor} for each file of at most `limit` bytes. A
    larger tensor gets a file alone. The yielded dict is cleared when the next one is requested."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard.clear()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


# config.json's numbers of positions without and with rotary scaling
_POSITIONS = ("original_max_position_embeddings", "max_position_embeddings")


def write_hf_config(
    hf_config: dict[str, Any], source: str | None, folder: Path, dtype: torch.dtype
) -> list[str]:
    """Write the config.json of an export to `folder` -> [its name].

    It starts as a copy of config.json in the folder `source`; if that has none with a model_type,
    as a copy of hf_config, the trained model's. From hf_config come then: vocabulary size, scaled
    rotary parameters, a value head's keys, and the number of multi-token prediction layers if it is
    larger. dtype: of the exported weights. quantization_config, torch_dtype and _name_or_path are
    left out."""
    values = dict(hf_config)
    if source and (Path(source) / HF_CONFIG_NAME).is_file():
        stored = read_json(Path(source) / HF_CONFIG_NAME)
        values = stored if "model_type" in stored else values  # without it the file is no model's
    text = text_values(values)
    trained = text_values(hf_config)
    if "vocab_size" in trained:
        text["vocab_size"] = trained["vocab_size"]
    rope = trained.get("rope_parameters") or {}
    own = text.get("rope_parameters") or text.get("rope_scaling") or {}
    own = {"rope_type": own.get("type"), "rope_theta": text.get("rope_theta"), **own}
    if "factor" in rope and any(own.get(key) != value for key, value in rope.items()):
        text.pop("rope_scaling", None)
        names = ("rope_parameters", *_POSITIONS)
        text |= {key: trained[key] for key in names if key in trained}
    family = FAMILIES.get(str(hf_config.get("model_type")))
    key = PREDICTION_KEY
    if family is not None and family.prediction:
        key = family.prediction
    otherwise = int(key == PREDICTION_KEY)  # without the key transformers reads 1
    if (trained.get(key) or 0) > (text.get(key, otherwise) or 0):
        text[key] = trained[key]
    if has_value_head(hf_config.get("architectures")):
        values |= {key: hf_config[key] for key in OF_VALUE_HEAD if key in hf_config}
        text["pad_token_id"] = trained.get("pad_token_id")
    # quantised models are read into `dtype` and written so
    for key in ("torch_dtype", "_name_or_path", "quantization_config"):
        values.pop(key, None)
    values["dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / HF_CONFIG_NAME, values, sort_keys=True, default=str)
    return [HF_CONFIG_NAME]


def copy_beside(source: str | None, folder: Path) -> list[str]:
    """Copy a model folder's generation_config.json, processor files and Python code to `folder` ->
    the file names. Links to files outside the source folder are skipped, except in a hub snapshot.
    """
    origin = Path(source or folder)
    if origin == folder:
        return []
    code = [path.name for path in sorted(origin.glob("*.py"))]
    return copy_files(origin, [HF_GENERATION_CONFIG_NAME, *PROCESSOR_FILES, *code], folder)


# -- the names of experts

# stacked experts' names in transformers' modules, and in files
_FUSED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r".*\.(gate|gate\.wg|router)\.weight")
_STACKED = re.compile(f"{_FUSED.pattern}(_bias|_blocks)?")
_IN_BLOCK = re.compile(r"(\.layers\.\d+\.)mlp\.")


def _is_stacked(model_type: str | None) -> bool:
    """True for a model type whose experts are stacked and interleaved: files and transformers'
    modules both have a layer's experts in one tensor, in which gate and up projections alternate.
    """
    return model_type in FAMILIES and FAMILIES[model_type].stacked_experts == "in_turns"


def _stacked_experts() -> Any:
    """The module that reads and writes stacked experts (a layer's experts in one tensor), imported
    here. UserError if its file is missing."""
    return function_of(TENSOR_FORMATS["stacked_experts"])


def file_parts(model_type: str, name: str, shape: Shape) -> list[tuple[str, tuple[Any, ...]]]:
    """Tell under which names files store a tensor of a transformers module -> [(name in a file,
    index into the tensor)], one pair for each part. name, shape: the module's tensor.

    Stacked experts (a layer's in one tensor) have one part per expert and projection, under the
    names of single experts; other tensors have one part, with the index (). Names keep
    transformers' prefixes, even if the files have others (prefixes_of). Model types without a row
    in FAMILIES keep their names. ValueError if a known family has stacked experts but its rows do
    not name them."""
    if model_type not in FAMILIES:
        return [(name, ())]
    for module, file in FAMILIES[model_type].renamed.items():
        name = name.replace(module, file)
    if _is_stacked(model_type):
        return _stacked_experts().parts_of(name, shape[0]) or [(name, ())]
    rows = [row for row in FAMILIES[model_type].rows if "[]" in row.mca and row.is_linear]
    experts = _FUSED.fullmatch(name)
    if rows and experts:
        kind = {"down_proj": "row", "gate_up_proj": "gated"}[experts[2]]
        [names] = [row.hf for row in rows if row.kind == kind]
        size = shape[1] // len(names)
        return [
            (
                experts[1] + part.partition("{}.")[2].replace("[]", str(e)),
                (e, slice(i * size, (i + 1) * size)),
            )
            for e, (i, part) in itertools.product(range(shape[0]), enumerate(names))
        ]
    if ".experts." in name and len(shape) == 3:
        raise ValueError(
            f"{name} of {model_type} holds the experts of a layer {shape}, and the family's table "
            "does not say how files name them: add moe_rows() to its rows (families.py)"
        )
    if rows:
        block = rows[0].hf[0].partition("{}.")[2].partition("experts.")[0]
        name = _IN_BLOCK.sub(rf"\g<1>{block}", name)
    return [(name, ())]


def named_tensors(model: Any, tied_twice: bool = False) -> NamedTensors:
    """Yield (name, tensor) for a torch model's parameters and persistent buffers, which is what
    checkpoints contain.

    tied_twice: yield tied parameters under both names.
    """
    yield from model.named_parameters(remove_duplicate=not tied_twice)
    persistent = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def file_tensors(
    model: Any, tied_twice: bool = False
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the tensors of a transformers model in the parts that files store: (name in a file, the
    model's tensor, the part of it that has this name, as a view). Names have transformers'
    prefixes, even if the files have others.

    LoRA adapters are left out. Stacked experts (a layer's in one tensor) of a family in FAMILIES
    yield one part per expert and projection, under the names of single experts. tied_twice: True to
    yield tied parameters under both names."""
    model_type = model.config.model_type
    is_stacked = _is_stacked(model_type)
    for name, tensor in named_tensors(model, tied_twice):
        if ".lora." not in name:
            for file_name, index in file_parts(model_type, name, tuple(tensor.shape)):
                part = tensor.detach()[index]
                yield file_name, tensor, part.mT if is_stacked and tensor.dim() == 3 else part


# -- names in models with pictures: files may use others than transformers' modules


def prefixes_of(names: Iterable[str]) -> dict[str, str]:
    """Tell which prefixes of a checkpoint's tensor names differ from transformers' module names ->
    {prefix in the modules: prefix in the checkpoint}. The names of the vision tower show this; if
    they do not, {}. names: the checkpoint's tensor names."""
    names = tuple(names)
    for prefixes in (OLDER_PREFIXES, THINKER_PREFIXES):
        if any(name.startswith(prefixes["model.visual."]) for name in names):
            return prefixes
    return {}


def with_prefix(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """Replace the prefix of a tensor's name, by the first pair (old, new) in `prefixes` with whose
    `old` the name begins. Without such a pair the name is returned unchanged."""
    for old, new in prefixes:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


# -- sources of tensors

_OTHER_SIZES = "set vocab_size and the other sizes in config.json to those of the weights"


class SafetensorsSource:
    """Reads tensors from the safetensors files of a folder or hub model, as a TensorSource. Its
    names have the prefixes of transformers' modules; if files have a layer's experts in one tensor
    (stacked), single experts have names of their own.

    prefixes: {prefix in transformers' module names: prefix in the files}, for those that differ.
    stored: the tensor names in the files, before stacked experts are split and prefixes replaced;
    for files with NF4 weights as part_quantised_files.unpacked() gives them. format: how the files
    stack experts (part_stacked.format_of), "" if they do not."""

    def __init__(self, model_name_or_path: str):
        self.folder = resolve_folder(model_name_or_path)
        in_files = _open_files(self.folder)
        if any(".quant_state.bitsandbytes" in name for name in in_files):
            in_files = function_of("part_quantised_files:unpacked")(in_files)
        self.stored = in_files.keys()
        self.format = ""
        self._slices = in_files
        if any(map(_STACKED.fullmatch, in_files)):
            self.format = _stacked_experts().format_of(in_files)
            self._slices = _stacked_experts().unstacked(in_files, self.format)
        self.prefixes = prefixes_of(self._slices)
        to_modules = [(old, new) for new, old in self.prefixes.items()]
        self._slices = {with_prefix(name, to_modules): part for name, part in self._slices.items()}

    def names(self) -> KeysView[str]:
        """The tensor names, file by file, with the prefixes of transformers' modules."""
        return self._slices.keys()

    def read(self, name: str, part: Part = _ALL) -> torch.Tensor:
        """Read a tensor, or the slice `part` of it. In general only the bytes of `part` are read
        from the file. More is read of a quantised weight (whole blocks or rows), of experts whose
        gate and up rows alternate in one tensor (both), and of an adapter's matrix that holds the
        experts of a layer together."""
        return self._slices[name][part]

    def shape(self, name: str) -> Shape:
        return tuple(self._slices[name].get_shape())

    def has_float32_routers(self) -> bool:
        """True if the files store a router's weights in float32 and embeddings in 16 bits, as
        transformers 5.24 writes deepseek_v3, glm4_moe and others. Reads headers alone."""
        dtypes: dict[bool, set[str]] = {True: set(), False: set()}
        for name, part in self._slices.items():
            is_router = _ROUTER.fullmatch(name) is not None
            if is_router or name.endswith("embed_tokens.weight"):
                dtypes[is_router].add(getattr(part, "get_dtype", str)())
        return "F32" in dtypes[True] and "F32" not in dtypes[False]


def slices_of(path: Path) -> dict[str, Any]:
    """Open a safetensors file -> {name: slice object, from which parts can be read}, sorted by
    name. ValueError, naming the file, if it is truncated, or if its header is damaged or cannot be
    read; values are not checked."""
    try:
        file = safe_open(path, "pt")
    except (SafetensorError, OSError, ValueError) as error:  # OSError: of an empty file
        raise ValueError(
            f"{path} is damaged or cut, or cannot be read ({error}): copy or download it again"
        ) from None
    return {name: file.get_slice(name) for name in sorted(file.keys())}


def _open_files(folder: Path) -> dict[str, Any]:
    """Open a model folder's safetensors, found by their index -> {name: slice object, from which
    parts can be read}, file by file. A single model.safetensors is used instead if there is one.

    ValueError, naming the folder or file, if there are no safetensors, if the index or a header is
    damaged, or if a file is cut or lacks a tensor; values are not checked."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    whole = folder / SAFE_WEIGHTS_NAME
    if whole.is_file():  # wins over an index, as in transformers
        return slices_of(whole)
    if not index.is_file():
        raise ValueError(
            f"{folder}: expected {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}, and neither is "
            "there; a model in another format can be saved anew by transformers' save_pretrained, "
            "and a model without weights starts with train_from_scratch: true"
        )
    file_of: Any = read_json(index).get("weight_map")
    is_map = isinstance(file_of, dict) and len(file_of) > 0
    if not is_map or any(Path(str(file)).name != file for file in file_of.values()):
        raise ValueError(
            f"{index}: expected weight_map, an object with the name of a file for each tensor, got "
            f"{file_of!r:.80}"
        )
    stored = {file: slices_of(folder / file) for file in set(file_of.values())}
    slices = {}
    for name, file in sorted(file_of.items(), key=lambda item: item[::-1]):
        if name not in stored[file]:
            raise ValueError(
                f"{folder / file} lacks {name}, which {SAFE_WEIGHTS_INDEX_NAME} says it holds: "
                "copy or download the model again"
            )
        slices[name] = stored[file][name]
    return slices


def check_shape(source: TensorSource, name: str, wanted: Shape, remedy: str = _OTHER_SIZES) -> None:
    """Raise ValueError unless the tensor `name` of the source has shape `wanted`. remedy: advice at
    the end of the message."""
    got = source.shape(name)
    if got != wanted:
        raise ValueError(f"{name} has shape {got}, expected {wanted}: {remedy}")


def model_class(hf: Any) -> Any:
    """The transformers auto class for a config: AutoModelForSequenceClassification with a value
    head, AutoModelForImageTextToText for families with images or audio, else AutoModelForCausalLM.
    """
    import transformers

    if has_value_head(hf.architectures):
        return transformers.AutoModelForSequenceClassification
    family = FAMILIES.get(hf.model_type)
    if family is not None and family.inputs:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


# cached, because a start needs them several times, and a large model's take seconds
@functools.lru_cache(maxsize=4)
def shapes_of(hf_config: str) -> tuple[Any, dict[str, Shape]]:
    """transformers' config of a model, and the shape of each of its tensors: (config, {name:
    shape}). The names are those in files, but with transformers' prefixes. hf_config: the JSON text
    of its config.json. ValueError if transformers cannot build the model. Cached in this process.
    """
    import transformers

    try:
        hf = transformers.AutoConfig.for_model(**json.loads(hf_config))
        return hf, _cached_shapes(hf, _shapes_file(hf, hf_config, transformers.__version__))
    except Exception as error:  # transformers raises many types for invalid configs
        words = f"transformers makes no model of this config.json: {describe_error(error)}"
        raise ValueError(words) from error


def _shapes_file(hf: Any, hf_config: str, version: str) -> Path | None:
    """Path of the file that caches the shapes of a model's tensors, named by a hash of all that
    determines them. None, so that nothing is cached, if the model's class is not part of a
    transformers release, this package's source files are missing, or there is no home folder.

    hf: transformers' config. hf_config: the JSON text of config.json. version: transformers'
    version."""
    if ".dev" in version or not type(hf).__module__.startswith("transformers.models."):
        return None
    try:
        modules = [families, families_rows, *families.OF_PARTS, sys.modules[__name__]]
        if _is_stacked(hf.model_type):
            modules.append(_stacked_experts())
        text = "\n".join((version, hf_config, *map(inspect.getsource, modules)))
        name = f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        return cache_folder() / "shapes" / name
    except (OSError, ValueError):  # no source files, or no home folder
        return None


def _cached_shapes(hf: Any, file: Path | None) -> dict[str, Shape]:
    """The shape of each tensor of a model, {name as in shapes_of: shape}. It is read from the cache
    `file` if that is there and intact. Otherwise the model is built on the meta device, which takes
    seconds; local rank 0 then writes the file, if it can. hf: transformers' config. file: None: no
    cache."""
    if file is not None:
        with contextlib.suppress(OSError, KeyError, ValueError):  # a damaged file is no cache
            kept = read_json(file) if is_there(file) else {}
            if kept["crc32"] == _crc32(kept["shapes"]):
                return {name: tuple(shape) for name, shape in kept["shapes"].items()}
    with torch.device("meta"):
        model = model_class(hf).from_config(hf)
    # files may contain a tied head under both names
    parts = file_tensors(model, tied_twice=True)
    shapes = {name: tuple(part.shape) for name, _, part in parts}
    if file is not None and world.current().local_rank == 0:
        with contextlib.suppress(OSError):  # a folder without write access keeps no cache
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, json.dumps({"crc32": _crc32(shapes), "shapes": shapes}))
    return shapes


def _crc32(record: Any) -> int:
    """CRC-32 of a record's JSON text, to recognise a damaged cache file."""
    return zlib.crc32(json.dumps(record).encode())


def check_shapes(source: SafetensorsSource, hf_config: dict[str, Any]) -> None:
    """Compare the shapes of a source's tensors with the model that config.json (hf_config)
    describes; ValueError if one differs. A name that only one of the two has is not checked. Reads
    only the files' headers."""
    shapes = shapes_of(json.dumps(hf_config))[1]
    for name in sorted(source.names() & shapes.keys()):
        check_shape(source, name, shapes[name])


def check_loaded(origin: str, loading_info: dict[str, Any]) -> None:
    """Raise ValueError if transformers replaced missing or misshaped weights by random ones. A
    missing value head is allowed.

    origin: the model's name, for the message. loading_info: what
    from_pretrained(output_loading_info=True) returned.
    """
    # a missing value head is allowed: ScoredSource draws it
    missing = set(loading_info["missing_keys"]) - {VALUE_HEAD}
    wrong = [f"lacks {name}" for name in sorted(missing)]
    for name, got, wanted in sorted(loading_info["mismatched_keys"]):
        wrong.append(f"has {name} of shape {tuple(got)} instead of {tuple(wanted)}")
    if wrong:
        raise ValueError(
            f"{origin}: the weights do not belong to its config.json: the checkpoint "
            f"{', '.join(wrong[:3])} ({len(wrong)} in all)"
        )


class InitSource:
    """Random initial weights, for train_from_scratch. Each tensor is drawn from a seed and its
    Hugging Face name, so every parallel layout gets the same values.

    Matrices and sinks are normal with the config's initializer_range; norm weights are 1, or 0
    where a family of FAMILIES adds 1 to them; biases are 0. A_log and dt_bias of linear attention
    differ.
    """

    def __init__(self, hf_config: dict[str, Any], seed: int, num_prediction_layers: int | None = 0):
        hf, shapes = shapes_of(json.dumps(hf_config))
        self._shapes = dict(shapes)
        if num_prediction_layers:
            more = function_of("part_mtp:initial_shapes")(hf, shapes, num_prediction_layers)
            self._shapes |= more
        self._std = getattr(hf.get_text_config(), "initializer_range", 0.02)
        self._seed = seed
        constants = FAMILIES[hf.model_type].constants if hf.model_type in FAMILIES else {}
        self._norm = float(not constants.get("layernorm_zero_centered_gamma"))

    def names(self) -> KeysView[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def read(self, name: str, part: Part = _ALL) -> torch.Tensor:
        """A slice of the tensor, float32 on the CPU. The whole tensor is drawn, then sliced."""
        full = torch.zeros(self._shapes[name], device="cpu")
        last = name.rpartition("linear_attn.")[2]
        if last == "A_log":  # drawn as in transformers
            full.uniform_(0.01, 16, generator=generator_of(self._seed, name)).log_()
        elif (
            last in ("dt_bias", "norm.weight")
            or name.startswith("model.visual.")
            and full.dim() == 1
            and not name.endswith("bias")
        ):  # these norms never add 1 to their weight
            full.fill_(1.0)
        elif full.dim() > 1 or name.endswith((".sinks", ".softmax_offset")):
            full.normal_(0.0, self._std, generator=generator_of(self._seed, name))
        elif not name.endswith("bias"):
            full.fill_(self._norm)
        return full[part]


def generator_of(seed: int, name: str) -> torch.Generator:
    """A CPU random generator whose state depends on a seed and a tensor's name alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


class ScoredSource:
    """A TensorSource for a model with a value head: the tensors of `source` without the output
    layer. If `source` has no value head, the value head's weight is drawn at random from `seed`."""

    def __init__(self, source: TensorSource, hf_config: dict[str, Any], seed: int):
        self.source = source
        self._drawn = InitSource(hf_config, seed)

    def names(self) -> KeysView[str]:
        names = dict.fromkeys((*self.source.names(), VALUE_HEAD))  # keeps the files' order
        names.pop("lm_head.weight", None)
        return names.keys()

    def _of(self, name: str) -> TensorSource:
        lacks = name == VALUE_HEAD and name not in self.source.names()
        return self._drawn if lacks else self.source

    def shape(self, name: str) -> Shape:
        return self._of(name).shape(name)

    def read(self, name: str, part: Part = _ALL) -> torch.Tensor:
        return self._of(name).read(name, part)


def scored(config: Any, source: SafetensorsSource, seed: int) -> SafetensorsSource | ScoredSource:
    """The tensors for a model to load: `source` itself, or for a config with a value head a
    ScoredSource (with a value head, without the output layer). In the second case ConfigError if
    the files contain the value head of TRL or LLaMA-Factory instead. seed: for drawing a missing
    value head."""
    if not config.has_value_head:
        return source
    check_value_head(source)
    return ScoredSource(source, config.hf_config, seed)


def check_value_head(source: SafetensorsSource) -> None:
    """Raise ConfigError if the files contain the value head of TRL or LLaMA-Factory, and none that
    this package reads (score.weight)."""
    others = [name for name in source.names() if name.startswith("v_head.")]
    others += [path.name for path in source.folder.glob("value_head.*")]
    if others and VALUE_HEAD not in source.names():
        reason = f"{others[0]} is TRL's or LLaMA-Factory's value head, with a bias"
        remedy = "its v_head.summary.weight [1, h] as score.weight among the model's tensors; the "
        remedy += "bias moves all scores alike, and is left out"
        refuse("model_name_or_path", str(source.folder), reason, remedy)


def has_float32_routers(source: Any) -> bool:
    """SafetensorsSource.has_float32_routers() of the files behind a source; False for another."""
    while hasattr(source, "source"):
        source = source.source
    return isinstance(source, SafetensorsSource) and source.has_float32_routers()


# -- new tokens

# A new row of embedding or head starts as the mean of the matrix's rows, summed in float64 in file
# order. So it is the same in every layout and on both backends, and needs no random numbers.
MEAN_ROWS = 4096  # rows in memory at a time


def mean_row(read: Callable[[Part], torch.Tensor], rows: int) -> torch.Tensor:
    """Mean of a matrix's rows, float64 [h] on the CPU. read(part): returns the rows of a slice;
    `part` is a tuple of one slice. rows: number of rows in the matrix."""
    parts = (read((slice(i, min(i + MEAN_ROWS, rows)),)) for i in range(0, rows, MEAN_ROWS))
    return sum(part.to("cpu", torch.float64).sum(0) for part in parts) / rows


class GrownSource:
    """A TensorSource that adds rows for new tokens: the matrices in `names`, such as the embedding,
    are extended to `vocab_size` rows. New rows are the mean of the old ones."""

    def __init__(self, source: TensorSource, names: Collection[str], vocab_size: int):
        self.source = source
        self._vocabulary = names
        self._vocab_size = vocab_size

    def names(self) -> KeysView[str]:
        return self.source.names()

    def shape(self, name: str) -> Shape:
        shape = self.source.shape(name)
        if name in self._vocabulary:
            shape = (self._vocab_size, *shape[1:])
        return shape

    def read(self, name: str, part: Part = _ALL) -> torch.Tensor:
        """Read the slice `part` of a tensor. Of a matrix with new rows only the slice of rows is
        applied: its columns are returned whole."""
        if name not in self._vocabulary:
            return self.source.read(name, part)
        rows = range(self._vocab_size)[part[0]]
        old = self.source.shape(name)[0]
        value = self.source.read(name, (slice(min(rows.start, old), min(rows.stop, old)),))
        new = len(rows) - len(value)
        if new:
            mean = mean_row(functools.partial(self.source.read, name), old)
            value = torch.cat([value, mean.to(value.dtype).expand(new, -1)])
        return value


def grow_torch(model: Any, vocab_size: int, dtype: torch.dtype) -> None:
    """Add rows for new tokens to a transformers model, in place: its embedding, output layer
    (unless a value head replaces it) and config grow to vocab_size. New rows are the mean of the
    old rows, rounded to `dtype`, that of the weights in the files."""
    modules = [model.get_input_embeddings, model.get_output_embeddings]
    if has_value_head(model.config.architectures):
        modules.pop()
    matrices = [module().weight.detach() for module in modules]
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for module, old in zip(modules, matrices, strict=True):
        mean = mean_row(old.__getitem__, len(old)).to(dtype)
        module().weight.detach()[len(old) :] = mean


# -- tensors that no model reads


def is_unused(name: str, hf_config: dict[str, Any], num_trained: int | None = 0) -> bool:
    """True if this package does not read the checkpoint tensor `name`, so that loading skips it and
    an export copies it.

    num_trained: number of multi-token prediction layers in the model. Checkpoints may number such
    layers after the decoder's: the first num_trained are read, the others are unused. Tensors of
    Family.unused are unused only if num_trained is 0 or None."""
    family = FAMILIES.get(str(hf_config.get("model_type")))
    patterns: tuple[str, ...] = UNUSED_TENSORS
    if family is not None and not num_trained:
        patterns += family.unused
    if re.search("|".join(patterns), name):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    first = hf_config.get("num_hidden_layers", 0)
    ahead = hf_config.get("num_nextn_predict_layers") or hf_config.get("num_mtp_layers") or 0
    unread = range(first + (num_trained or 0), first + ahead)
    return layer is not None and int(layer[1]) in unread


def original_of(source: str | None) -> SafetensorsSource | None:
    """The safetensors that a model came from, in the folder or the local hub cache of `source`;
    None if they are gone or cannot be read."""
    if source:
        # many types of errors, all meaning that the snapshot or files are missing
        with contextlib.suppress(Exception):
            if not Path(source).is_dir():
                from huggingface_hub import snapshot_download

                source = snapshot_download(source, local_files_only=True)
            return SafetensorsSource(source)
    return None


def in_words_of(
    source: str | None, hf_config: dict[str, Any], tensors: NamedTensors
) -> NamedTensors:
    """Rename (name, tensor) pairs for an export, to the names in the files that the model came
    from. If these are gone and the model type is in FAMILIES, to the names that transformers saves.
    source: folder or hub name of the original model.

    Experts are stacked (a layer's in one tensor) as in the original files; if these are gone, or
    the family's gate and up alternate, as the family's are. They are never quantised to MXFP4."""
    original = original_of(source)
    family = FAMILIES.get(str(hf_config.get("model_type")))
    form, names = "" if family is None else family.stacked_experts, None
    if form != "in_turns" and original is not None:
        form, names = original.format, original.stored
    if form:
        tensors = _stacked_experts().stacked(tensors, form, names)
    prefixes = {} if family is None else family.prefixes
    if original is not None:
        prefixes = original.prefixes
    return ((with_prefix(name, prefixes.items()), tensor) for name, tensor in tensors)


def carried_tensors(
    source: str | None, hf_config: dict[str, Any], num_trained: int | None = 0
) -> NamedTensors:
    """Yield (name, tensor) for the tensors of the original model that this package does not read
    (is_unused), so that an export keeps them. Copies of embedding and head among them get rows for
    new tokens. If the original files are gone, yields nothing, and warns if config.json mentions
    such layers. source: folder or hub name. num_trained: number of multi-token prediction layers in
    the model."""
    tensors = original_of(source)
    if tensors is None:
        next_layer = hf_config.get("num_hidden_layers", 0) + (num_trained or 0)
        has_more = is_unused(f"model.layers.{next_layer}.", hf_config, num_trained)
        # the prediction module whose tensors are named mtp.*
        has_more |= not num_trained and bool(text_values(hf_config).get("mtp_num_hidden_layers"))
        if source and has_more:
            warnings.warn(
                "config.json names layers for multi-token prediction that were not trained, and "
                f"{source} is not there to copy them from: the export lacks them: remove their "
                "key from its config.json",
                stacklevel=2,
            )
        return
    # in file order, as stacked experts need it
    unused = [name for name in tensors.names() if is_unused(name, hf_config, num_trained)]
    # prediction layers may repeat embedding and head: these copies get the new tokens too
    copies = [name for name in unused if name.endswith((".embed_tokens.weight", ".head.weight"))]
    vocab_size = text_values(hf_config).get("vocab_size", 0)
    grown = GrownSource(tensors, copies, vocab_size)
    yield from ((name, grown.read(name)) for name in unused)
