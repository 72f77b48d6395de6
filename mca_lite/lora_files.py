"""Adapters in PEFT's files, in and out, and merged into the weights of their base.

Every module has two matrices under its Hugging Face name, in every layout and also if megatron
fuses it with others: base_model.model.<module>.lora_A.weight [r, in] and .lora_B.weight [out, r],
for an embedding .lora_embedding_A [r, V] and .lora_embedding_B [h, r]. Modules in modules_to_save
are stored in full.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import lora, parallel
from .args_rules import (
    EMBEDDING_AND_HEAD,
    ONE_SIDED,
    check_adapter_config,
    check_mergeable,
    check_other_model,
    is_saved,
)
from .errors import Judge, refuse
from .files import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, read_json, write_json
from .lora import host_of, module_of
from .lora_layers import LoraSpec
from .weights_files import SafetensorsSource, file_tensors, open_safetensors

PREFIX = "base_model.model."
# ends of the names of a module's two matrices, each with its partner
_PARTNERS = {".lora_A.weight": ".lora_B.weight", ".lora_embedding_A": ".lora_embedding_B"}
_PARTNERS |= {b: a for a, b in _PARTNERS.items()}
_VOCABULARY_WEIGHTS = tuple(f"{name}.weight" for name in EMBEDDING_AND_HEAD)

# -- in


class AdapterSource(SafetensorsSource):
    """The tensors of an adapter's folder, by their names without PEFT's prefix."""

    def __init__(self, folder: str | os.PathLike):
        path = Path(folder) / ADAPTER_WEIGHTS_NAME
        if not path.is_file():
            raise ValueError(
                f"adapter_name_or_path: {folder} holds no {ADAPTER_WEIGHTS_NAME}: set a folder "
                "written by PEFT or this package"
            )
        self.folder = Path(folder)
        file = open_safetensors(path)
        self._file_of = dict.fromkeys(file.keys(), path.name)
        self._open = {path.name: file}
        # PEFT writes the frozen embedding of an adapted one beside it: the base has it
        keys = (key for key in self._file_of if ".base_layer." not in key)
        self._part_of = {key.removeprefix(PREFIX): (key, ()) for key in keys}

    def modules(self) -> list[str]:
        """The adapted modules, sorted."""
        return sorted({n.removesuffix(s) for n in self.names() for s in _PARTNERS if n.endswith(s)})

    def whole_weights(self) -> set[str]:
        """The names of whole weights: modules_to_save, and PEFT's save_embedding_layers."""
        return {name for name in self.names() if not name.endswith(tuple(_PARTNERS))}

    def check_pairs(self) -> None:
        """ValueError if a module has one matrix of two."""
        for name in sorted(self.names() - self.whole_weights()):
            [suffix] = (suffix for suffix in _PARTNERS if name.endswith(suffix))
            self.shape(name.removesuffix(suffix) + _PARTNERS[suffix])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. ValueError if the adapter lacks it."""
        if name not in self._part_of:
            raise ValueError(
                f"{self.folder} lacks {PREFIX}{name}: it is damaged, or not of this model"
            )
        return super().shape(name)

    def __call__(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A whole matrix of this shape. ValueError as in check()."""
        self.check(key, shape)
        return self.read(key)

    def check(self, key: str, shape: tuple[int, ...]) -> None:
        """ValueError if the adapter lacks a matrix, or has one of another shape."""
        if self.shape(key) != shape:
            raise ValueError(
                f"{self.folder}: {key} has shape {self.shape(key)}, and this model needs {shape}: "
                "the adapter belongs to another model, set adapter_name_or_path to one of this "
                "model"
            )


def read_adapter(
    folder: str | os.PathLike, dropout: float | None = None
) -> tuple[LoraSpec, AdapterSource]:
    """The spec of a PEFT adapter, targets from its file, and its tensors. ConfigError for features
    that are not built here, ValueError for a damaged file. dropout: in place of the adapter's."""
    path = Path(folder) / ADAPTER_CONFIG_NAME
    if not path.is_file():
        reason = f"it holds no {ADAPTER_CONFIG_NAME}"
        refuse("adapter_name_or_path", str(folder), reason, "the folder of an adapter")
    values = read_json(path)
    judge = Judge(None)
    check_adapter_config(values, path, judge)
    judge.close()
    source = AdapterSource(folder)
    source.check_pairs()
    if dropout is None:
        dropout = values.get("lora_dropout") or 0.0
    spec = LoraSpec(
        rank=values["r"],
        alpha=values["lora_alpha"],
        dropout=dropout,
        targets=tuple(source.modules()),
        use_rslora=bool(values.get("use_rslora")),
        modules_to_save=tuple(values.get("modules_to_save") or ()),
    )
    return spec, source


def adapter_of_keys(keys) -> tuple[LoraSpec, AdapterSource | None]:
    """The spec of FinetuningArguments, and the tensors of adapter_name_or_path. A lora_dropout
    replaces the dropout of a loaded adapter."""
    if keys.adapter_name_or_path:
        return read_adapter(keys.adapter_name_or_path, keys.lora_dropout)
    spec = LoraSpec(
        rank=keys.lora_rank,
        alpha=keys.lora_alpha,
        dropout=keys.lora_dropout or 0.0,
        targets=tuple(keys.lora_target),
        use_rslora=keys.use_rslora,
        modules_to_save=tuple(keys.modules_to_save or ()),
    )
    return spec, None


def load_adapter(model, folder: str | os.PathLike, dropout: float | None = None):
    """Put the adapter of a folder on a model of either backend, to train it further -> the model.

    dropout: in place of the adapter's. All ranks must call it. ValueError, on every rank, for an
    adapter of another model.
    """
    spec, source = read_adapter(folder, dropout)
    judge = Judge(None)
    check_other_model(folder, spec, lora.candidates(model), judge)
    judge.close()
    return place_adapter(model, spec, source)


def place_adapter(model, spec: LoraSpec, source: AdapterSource, dtype=torch.float32):
    """load_adapter() of an adapter that was read and checked -> the model. dtype: of a transformers
    model's frozen weights."""
    _refuse_other_weights(model, spec, source)
    lora.inject(model, spec, dtype=dtype)
    problem = None
    try:
        lora.fill_adapters(model, source)
        host = host_of(model)
        host.fill(lora.saved_keys(host, spec), source)
    except ValueError as error:
        problem = str(error)
    problems = list(filter(None, parallel.gather(problem)))
    if problems:
        raise ValueError(problems[0])
    return model


def _refuse_other_weights(model, spec: LoraSpec, source: AdapterSource) -> None:
    """ValueError for whole weights in the file that are neither in modules_to_save nor the model's.

    PEFT writes embedding and head there once the vocabulary was resized; an export here would lose
    them.
    """
    host = host_of(model)
    for name in sorted(source.whole_weights()):
        if is_saved(module_of(name), spec):
            continue
        base = host.base_weight(name)
        if base is None or not torch.equal(base.detach().cpu().float(), source.read(name).float()):
            raise ValueError(
                f"{source.folder} brings its own {name}, which is neither among its "
                "modules_to_save nor the model's: it would be lost in training; put the "
                "adapter into its base first, python -m mca_lite convert BASE DST --merge"
            )


# -- out


def gather_adapters(model) -> dict[str, torch.Tensor]:
    """{key without prefix: whole float32 CPU matrix} on global rank 0, {} elsewhere.

    All ranks must call it. Collectives: gathers over tensor-parallel and expert-tensor-parallel
    groups, sends to rank 0.
    """
    host = host_of(model)
    wholes = {}
    for piece in lora.pieces_of(model):
        whole = piece.whole()
        is_first = piece.group is None or piece.group.rank() == 0
        if is_first and host.replica(piece.is_expert) == 0:
            wholes[piece.key] = whole.to("cpu", copy=True).contiguous()
    return {key: next(iter(of.values())) for key, of in parallel.send_to_main(wholes)}


def trained_tensors(model) -> dict[str, torch.Tensor]:
    """gather_adapters() with the weights of modules_to_save. All ranks must call it."""
    tensors = gather_adapters(model)
    host = host_of(model)
    if keys := lora.saved_keys(host, lora.spec_of(model)):
        tensors.update(host.read(keys))
    return tensors


def save_adapter(model, folder: str | os.PathLike) -> list[str]:
    """Write the adapter as PEFT does -> file names, on global rank 0. All ranks must call it."""
    folder = Path(folder)
    tensors = trained_tensors(model)
    config = peft_config(lora.spec_of(model), target_modules(model))

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        named = {PREFIX + key: tensor for key, tensor in sorted(tensors.items())}
        save_file(named, folder / ADAPTER_WEIGHTS_NAME, metadata={"format": "pt"})
        write_json(folder / ADAPTER_CONFIG_NAME, config, sort_keys=True)

    parallel.on_main(write, OSError)
    return [ADAPTER_WEIGHTS_NAME, ADAPTER_CONFIG_NAME] if parallel.is_main() else []


def target_modules(model) -> list[str]:
    """PEFT's target_modules: a last name if it means adapted modules alone, else whole names."""
    modules = lora.spec_of(model).modules
    by_last_name: dict[str, list[str]] = {}
    for name in (candidate.hf for candidate in lora.candidates(model)):
        by_last_name.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    targets = []
    for last in dict.fromkeys(name.rsplit(".", 1)[-1] for name in modules):
        adapted = [name for name in by_last_name[last] if name in modules]
        targets += [last] if adapted == by_last_name[last] else adapted
    return targets


def peft_config(spec: LoraSpec, target_modules: list[str]) -> dict:
    """adapter_config.json with PEFT's keys of plain LoRA; it has defaults for other keys."""
    alpha = spec.alpha
    if float(alpha).is_integer():
        alpha = int(alpha)
    return {
        "base_model_name_or_path": spec.base_model,
        "lora_alpha": alpha,
        "lora_dropout": spec.dropout,
        "modules_to_save": list(spec.modules_to_save) or None,
        "peft_type": "LORA",
        "r": spec.rank,
        "target_modules": target_modules,
        "task_type": "CAUSAL_LM",
        "use_rslora": spec.use_rslora,
    }


def check_checkpoint(model, folder: str | os.PathLike) -> None:
    """ValueError if the PEFT adapter of a checkpoint and the model's adapters differ."""
    spec = lora.spec_of(model)
    path = Path(folder) / ADAPTER_CONFIG_NAME
    if (spec is not None) != path.is_file():
        words = "holds no adapters, and this run has some: set finetuning_type: full"
        if spec is None:
            words = "holds adapters, and this run has none: set finetuning_type: lora"
        raise ValueError(f"{folder} {words}, or start anew with another output_dir")
    if spec is None:
        return
    values = read_json(path)
    now = peft_config(spec, target_modules(model))
    for key in ("r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save"):
        if values.get(key) != now[key]:
            raise ValueError(
                f"{folder} was saved with {key} {values.get(key)} of its adapters, and this run "
                f"has {now[key]}: set it back to go on"
            )


# -- merged


def merger(model) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """A function (HF name, CPU tensor W of the base) -> W + scale * B A of the model's adapters,
    computed in float32, in W's dtype.

    The model's weights do not change. All ranks must call merger(); the function works on global
    rank 0.
    """
    spec = lora.spec_of(model)
    judge = Judge(None)
    check_mergeable(spec, host_of(model).is_tied, judge)
    judge.close()
    return _merge_with(gather_adapters(model).get, spec.scale)


def _merge_with(matrix: Callable[[str], torch.Tensor | None], scale: float):
    """The function of merger(). matrix(key): a matrix of the adapter, or None."""

    def merge(name: str, weight: torch.Tensor) -> torch.Tensor:
        module = name.removesuffix(".weight")
        if (a := matrix(f"{module}.lora_A.weight")) is not None:
            delta = matrix(f"{module}.lora_B.weight").float() @ a.float()
        elif (a := matrix(f"{module}.lora_embedding_A")) is not None:
            delta = (matrix(f"{module}.lora_embedding_B").float() @ a.float()).t()
        else:
            return weight
        return (weight.float() + scale * delta).to(weight.dtype)

    return merge


@torch.no_grad()
def merge_into(model, folder: str | os.PathLike) -> None:
    """Merge an adapter's files into the weights of a transformers model, in place; the vocabulary
    grows where the adapter brings rows.

    Each weight is computed in float32 and rounded once, as by `convert --merge`. No collectives.
    ValueError for an adapter of another model, or one that cannot be merged.
    """
    tied = model.config.get_text_config().tie_word_embeddings
    shapes = {name: tuple(tensor[index].shape) for name, tensor, index in file_tensors(model)}
    change, vocab_size = file_merger(folder, model.name_or_path, shapes, tied)
    if vocab_size and vocab_size > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for name, tensor, index in file_tensors(model):
        tensor[index].copy_(change(name, tensor[index].cpu()))


def file_merger(folder: str | os.PathLike, base: str | os.PathLike, shapes: dict, tied: bool):
    """The merge of an adapter's files into its base: (function(name, CPU tensor of the base) ->
    merged tensor, the merged model's vocabulary size).

    Modules in modules_to_save replace the base's. The size is None for a base without embedding.
    base: its name. shapes: of its tensors, by their names in files. tied: its embedding is its
    head. ValueError for an adapter of another model, or one that cannot be merged.
    """
    spec, source = read_adapter(folder)
    one_sided = [name for name in source.modules() if name.endswith(EMBEDDING_AND_HEAD)]
    if tied and one_sided:
        raise ValueError(
            f"{ONE_SIDED.format(one_sided[0])}; merge that adapter with PEFT, which cuts the tie"
        )
    whole = source.whole_weights()
    both = [name for end in _VOCABULARY_WEIGHTS for name in whole if name.endswith(end)]
    if tied and len(both) == 2 and torch.equal(*map(source.read, both)):
        whole.remove(both[1])  # the head: written twice, and one matrix in the base
    needed = whole | {f"{module}.weight" for module in source.modules()}
    if missing := sorted(needed - shapes.keys()):
        raise ValueError(
            f"{folder} is an adapter of another model: it is for {len(needed)} weights, of which "
            f"{base} lacks {len(missing)}, such as {missing[0]}"
        )
    for name in sorted(needed):  # all of them, before anything is written
        _check_shapes(name, source, spec.rank, shapes[name])
    stored = source.names()
    merge = _merge_with(lambda key: source.read(key) if key in stored else None, spec.scale)

    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name in whole:
            return source.read(name).to(weight.dtype)
        return merge(name, weight)

    return change, _merged_vocabulary(source, shapes)


def _merged_vocabulary(source: AdapterSource, shapes: dict) -> int | None:
    """Rows of the vocabulary once an adapter is merged, None for a base without such matrices."""
    sizes = {name: shape[0] for name, shape in shapes.items() if name.endswith(_VOCABULARY_WEIGHTS)}
    sizes |= {name: source.shape(name)[0] for name in sizes.keys() & source.names()}
    if len(set(sizes.values())) > 1:
        words = ", ".join(f"{name} {size}" for name, size in sorted(sizes.items()))
        raise ValueError(
            f"{source.folder}: merged, the model would have {words} rows: train the adapter with "
            "both, or neither"
        )
    return next(iter(sizes.values()), None)


def _check_shapes(name: str, source: AdapterSource, rank: int, shape: tuple[int, ...]) -> None:
    """ValueError if an adapter lacks a matrix for a weight, or has one of another shape."""
    if name in source.names():
        rows = shape[0]
        if name.endswith(_VOCABULARY_WEIGHTS):  # it may bring new tokens
            rows = max(rows, source.shape(name)[0])
        source.check(name, (rows, *shape[1:]))
        return
    module = name.removesuffix(".weight")
    out_size, in_size = shape
    wanted = {"lora_A.weight": (rank, in_size), "lora_B.weight": (out_size, rank)}
    if f"{module}.lora_embedding_A" in source.names():
        wanted = {"lora_embedding_A": (rank, out_size), "lora_embedding_B": (in_size, rank)}
    for matrix, of_matrix in wanted.items():
        source.check(f"{module}.{matrix}", of_matrix)
