"""Adapters in PEFT's files: reading, writing, merging into the base weights.

In every layout a module has two matrices under its Hugging Face name, even if megatron fuses it
with others: base_model.model.<module>.lora_A.weight [r, in] and .lora_B.weight [out, r]; an
embedding has .lora_embedding_A [r, V] and .lora_embedding_B [h, r]. Experts in target_parameters
have them together: see part_lora_patterns. Modules in modules_to_save are stored in full.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from . import families_rows, parallel
from .errors import Judge, refuse
from .files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    PROCESSOR_FILES,
    PathLike,
    copy_files,
    read_json,
    write_json,
)
from .hosts import host_of, last_of, module_of
from .part_lora_keys import PATTERN_KEYS, LoraArguments
from .part_lora_patterns import LoraSpec, is_joined, is_saved, joined, singles, spec_of
from .part_lora_rules import EMBEDDING_AND_HEAD, ONE_SIDED, check_adapter_config, check_mergeable
from .part_lora_sites import candidates_of, pieces_of, saved_keys
from .weights_convert import Change
from .weights_files import SafetensorsSource, Shape, check_shape, file_tensors, slices_of

PREFIX = "base_model.model."
# name endings of a module's two matrices
_PAIRS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
_VOCABULARY_WEIGHTS = tuple(f"{name}.weight" for name in EMBEDDING_AND_HEAD)
# keys of adapter_config.json -> fields of LoraSpec
_FIELDS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "use_rslora": "use_rslora",
    "modules_to_save": "modules_to_save",
    **{key: key for key in PATTERN_KEYS},
}
# keys of adapter_config.json that never change for an adapter
_FIXED = ("r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save", *PATTERN_KEYS)

VALUE_HEAD = module_of(families_rows.VALUE_HEAD)

# -- reading


def _pairs_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Find the LoRA matrices among tensor names, and pair them: {module: (name of its matrix A,
    name of its matrix B)}, sorted by these names. Other tensors are left out."""
    pairs = {}
    for name in sorted(names):
        for end_a, end_b in _PAIRS:
            if name.endswith((end_a, end_b)):
                module = name.removesuffix(end_a).removesuffix(end_b)
                pairs[module] = (module + end_a, module + end_b)
    return pairs


class AdapterSource(SafetensorsSource):
    """Reads tensors from the folder of a PEFT adapter when they are needed. Their names are without
    the prefix "base_model.model.".

    pairs: {module: (name of its matrix A, name of its matrix B)}. Matrices that PEFT has for all
    experts of a layer together are in it only after unjoin(). ValueError if the folder has no
    adapter_model.safetensors, or if A or B of a module is missing."""

    def __init__(self, folder: PathLike):
        self.folder = Path(folder)
        path = self.folder / ADAPTER_WEIGHTS_NAME
        if not path.is_file():
            raise ValueError(
                f"adapter_name_or_path: {folder} holds no {ADAPTER_WEIGHTS_NAME}: set a folder "
                "written by PEFT or this package"
            )
        # beside an adapted embedding PEFT stores the frozen one, which the base has too
        self._slices = {
            key.removeprefix(PREFIX): matrix
            for key, matrix in slices_of(path).items()
            if ".base_layer." not in key or is_joined(key)
        }
        self._find_pairs()

    def _find_pairs(self) -> None:
        self.pairs = _pairs_of(name for name in self.names() if not is_joined(name))
        self._matrices = set(itertools.chain(*self.pairs.values()))
        for name in sorted(self._matrices):
            self.shape(name)

    def unjoin(self, spec: LoraSpec) -> None:
        """Make the matrices readable that PEFT keeps for all experts of a layer together
        (target_parameters): from then on, their parts have the names of single experts. spec: the
        adapter's LoraSpec (its settings), with its modules. ValueError if the file's matrices of
        this kind are not those of the spec."""
        self._slices = singles(self._slices, spec, self.folder)
        self._find_pairs()

    def whole_weights(self) -> set[str]:
        """Names of the weights that the adapter's file has in full, not as matrices A and B:
        modules in modules_to_save, and the embedding and head that PEFT adds after resizing the
        vocabulary."""
        return {name for name in self.names() if not is_joined(name)} - self._matrices

    def shape(self, name: str) -> Shape:
        """Shape of the adapter's tensor `name`. ValueError if the adapter lacks it."""
        if name not in self._slices:
            raise ValueError(
                f"{self.folder} lacks {PREFIX}{name}: it is damaged, or not of this model"
            )
        return super().shape(name)

    def __call__(self, key: str, shape: Shape) -> torch.Tensor:
        """Read the adapter's tensor `key`, whole. ValueError if it is missing, or if its shape is
        not `shape`."""
        self.check(key, shape)
        return self.read(key)

    def check(self, key: str, shape: Shape) -> None:
        """Raise ValueError if the adapter lacks the tensor `key`, or its shape is not `shape`."""
        remedy = "the adapter belongs to another model: set adapter_name_or_path to one of this one"
        check_shape(self, key, shape, remedy)


def _spec(values: Mapping[str, Any], targets: Iterable[str]) -> LoraSpec:
    """Make a LoraSpec (an adapter's settings). targets: the modules to adapt. values: rank, alpha
    and the other settings, under the keys of an adapter_config.json; missing and null values become
    defaults."""
    given = {field: values[key] for key, field in _FIELDS.items() if values.get(key) is not None}
    if values.get("task_type") == "SEQ_CLS":  # PEFT adds two possible names of the value head
        whole = given.get("modules_to_save", ())
        given["modules_to_save"] = [name for name in whole if name != "classifier"]
    given["target_parameters"] = tuple(given.get("target_parameters") or ())
    return LoraSpec(targets=tuple(targets), **given)


def read_adapter(folder: PathLike, dropout: float | None = None) -> tuple[LoraSpec, AdapterSource]:
    """Read the folder of a PEFT adapter -> (its LoraSpec, which has its settings; an AdapterSource,
    which reads tensors when they are needed). The spec's targets are the whole names of the adapted
    modules; experts that PEFT adapts together are not among them.

    dropout: replaces the adapter's dropout; None keeps it. ConfigError if the folder has no
    adapter_config.json, or that asks for unsupported features. ValueError if that file is no JSON
    object, or if weights are missing or have no readable header."""
    path = Path(folder) / ADAPTER_CONFIG_NAME
    if not path.is_file():
        reason = f"it holds no {ADAPTER_CONFIG_NAME}"
        refuse("adapter_name_or_path", str(folder), reason, "the folder of an adapter")
    values = read_json(path)
    judge = Judge(None)
    check_adapter_config(values, path, judge)
    judge.close()
    if dropout is not None:
        values["lora_dropout"] = dropout
    source = AdapterSource(folder)
    return _spec(values, source.pairs), source


def adapter_of_keys(keys: LoraArguments) -> tuple[LoraSpec, AdapterSource | None]:
    """Make the LoRA settings of a run from its configuration keys -> (LoraSpec, tensors of a saved
    adapter or None). If adapter_name_or_path is set, both come from that adapter; lora_dropout, if
    set, replaces its dropout. ConfigError or ValueError if the adapter cannot be read."""
    if keys.adapter_name_or_path:
        return read_adapter(keys.adapter_name_or_path, keys.lora_dropout)
    return _spec({**vars(keys), "r": keys.lora_rank}, keys.lora_target), None


def brings_value_head(folder: PathLike) -> bool:
    """True if the folder's adapter has a trained value head, which its modules_to_save name.
    ConfigError or ValueError if the adapter cannot be read.
    """
    spec, _ = read_adapter(folder)
    return VALUE_HEAD in spec.modules_to_save


# -- writing


def gather_adapters(model: Any) -> dict[str, torch.Tensor]:
    """Collect all LoRA matrices of a model on global rank 0, unsharded: {name without PEFT's
    prefix: float32 CPU tensor}; {} on other ranks. Each expert has its own matrices.

    Collective: gathers over tensor-parallel and expert-tensor-parallel groups, then sends to rank
    0."""
    wholes = {}
    for piece in pieces_of(model):
        whole = piece.whole()
        if piece.is_first:
            wholes[piece.key] = whole.to("cpu", copy=True).contiguous()
    return {key: next(iter(of.values())) for key, of in parallel.send_to_main(wholes)}


def trained_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Collect on global rank 0 everything that an adapter's file contains, LoRA matrices and the
    weights in modules_to_save: {name without PEFT's prefix: CPU tensor}; {} on other ranks.
    Collective."""
    host = host_of(model)
    tensors = joined(gather_adapters(model), spec_of(model))
    keys = saved_keys(host, spec_of(model))
    if keys:
        tensors.update(host.read(keys))
    return tensors


def save_adapter(model: Any, folder: PathLike) -> list[str]:
    """Write a model's adapters into a folder as PEFT does, with the processor files of the base
    model's folder, if it has any. Returns the file names on global rank 0, [] on other ranks.
    Collective. OSError, on every rank, if writing fails.
    """
    folder = Path(folder)
    tensors = trained_tensors(model)
    spec = spec_of(model)
    config = _with_equal_scales(peft_config(spec, target_modules(model)), spec)

    def write() -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        named = {PREFIX + key: tensor for key, tensor in sorted(tensors.items())}
        save_file(named, folder / ADAPTER_WEIGHTS_NAME, metadata={"format": "pt"})
        write_json(folder / ADAPTER_CONFIG_NAME, config, sort_keys=True)
        copied = copy_files(Path(spec.base_model or folder), PROCESSOR_FILES, folder)
        return [ADAPTER_WEIGHTS_NAME, ADAPTER_CONFIG_NAME, *copied]

    names = parallel.on_main(write, OSError)
    return names if parallel.is_main() else []


def target_modules(model: Any) -> list[str]:
    """Find the value of target_modules for PEFT's config. It lists the adapted modules, usually
    each by the last part of its name, such as "q_proj". The whole name is used instead if the last
    part is a number, or also names a module that must not match: one without an adapter, or one in
    target_parameters. Experts in target_parameters are left out."""
    spec = spec_of(model)
    modules = [module for module in spec.modules if not spec.stacks(module)]
    host = host_of(model)
    names = {candidate.hf for candidate in candidates_of(host)}
    names.update(*(weight.modules for weight in host.weights()))  # includes a vision tower's
    ambiguous = set(map(last_of, names - set(modules)))
    ambiguous |= {last_of(name) for name in modules if last_of(name).isdigit()}  # layers' names too
    order = list(dict.fromkeys(map(last_of, modules)))
    grouped = sorted(modules, key=lambda name: order.index(last_of(name)))
    return list(dict.fromkeys(n if last_of(n) in ambiguous else last_of(n) for n in grouped))


def peft_config(spec: LoraSpec, target_modules: list[str]) -> dict[str, Any]:
    """The content of adapter_config.json for these adapters, with PEFT's keys for plain LoRA. PEFT
    fills in defaults for its other keys.
    """
    config = {key: getattr(spec, field) for key, field in _FIELDS.items()}
    config = {key: value for key, value in config.items() if value or key not in PATTERN_KEYS}
    if spec.target_parameters:
        config["target_parameters"] = list(spec.target_parameters)
    if float(config["lora_alpha"]).is_integer():
        config["lora_alpha"] = int(config["lora_alpha"])
    return config | {
        "base_model_name_or_path": spec.base_model,
        "modules_to_save": list(spec.modules_to_save) or None,
        "peft_type": "LORA",
        "target_modules": target_modules,
        "task_type": "SEQ_CLS" if VALUE_HEAD in spec.modules_to_save else "CAUSAL_LM",
    }


def _with_equal_scales(config: dict[str, Any], spec: LoraSpec) -> dict[str, Any]:
    """Replace use_rslora in an adapter's config by a lora_alpha that gives the same factor on B A,
    if single experts have adapters of their own (not through target_parameters); otherwise return
    it unchanged.

    PEFT fuses two projections of an expert into one adapter with twice the rank and alpha. That
    keeps alpha / rank, but would multiply alpha / sqrt(rank) by sqrt(2)."""
    single = [name for name in spec.modules if ".experts." in name and not spec.stacks(name)]
    if spec.use_rslora and single:
        scale = spec.scale_of(single[0])
        return config | {"use_rslora": False, "lora_alpha": scale * spec.rank}
    return config


def check_checkpoint(model: Any, folder: PathLike) -> None:
    """Raise ValueError if a checkpoint's folder has no PEFT adapter, or one with other settings
    (rank, alpha, modules) than the model's adapters.
    """
    spec = spec_of(model)
    path = Path(folder) / ADAPTER_CONFIG_NAME
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no adapters, and this run has some: set finetuning_type: full, or "
            "start anew with another output_dir"
        )
    values = read_json(path)
    plain = peft_config(spec, target_modules(model))  # earlier versions wrote this form
    now = _with_equal_scales(plain, spec)
    for key in _FIXED:
        if _unordered(values.get(key)) not in (_unordered(form.get(key)) for form in (plain, now)):
            raise ValueError(
                f"{folder} was saved with {key} {values.get(key)} of its adapters, and this run "
                f"has {now.get(key)}: set it back to go on"
            )


def _unordered(value: Any) -> Any:
    """Prepare a value of adapter_config.json for a comparison: a list becomes a set, because the
    order of modules differs between versions; {} becomes None, because PEFT writes {} where there
    is nothing; other values stay."""
    if value == {}:
        return None
    return set(value) if isinstance(value, list) else value


# -- merged


def merged_into(hf_config: dict[str, Any], base: str = "") -> str:
    """For a report on a merged model whose base was quantised: a text about the numbers in its
    files. "" if the base is quantised neither in its own files nor in memory during training.
    hf_config: the base's config.json. base: the form in memory, such as ", base in nf4", or ""."""
    stored = hf_config.get("quantization_config") or {}
    form = stored.get("bnb_4bit_quant_type") or stored.get("quant_method")
    if form:
        return (
            f"the base's files have its weights in {form} alone: the merged model has their values "
            "with the adapter, rounded to config.json's dtype, and is not quantised"
        )
    if base:
        return (
            f"the merged model has the files' own weights with the adapter, which is trained "
            f"beside their rounded values{base}"
        )
    return ""


def merger(model: Any) -> Change:
    """Make a function that merges this model's adapters into base weights. It maps (Hugging Face
    name, base weight W) to W + scale * B A (transposed for an embedding), computed in float32 and
    returned in W's dtype. A weight without an adapter is returned unchanged.

    The model does not change. Collective: gathers the adapters to global rank 0, and only there the
    function merges. ConfigError if embedding and head are tied and one of them has an adapter."""
    spec = spec_of(model)
    judge = Judge(None)
    check_mergeable(spec, host_of(model).is_tied, judge)
    judge.close()
    tensors = gather_adapters(model)
    return _merge_with(tensors.__getitem__, tensors, spec.scale_of)


def _merge_with(
    read: Callable[[str], torch.Tensor], names: Iterable[str], scale_of: Callable[[str], float]
) -> Change:
    """Make a function that merges adapters into base weights: (Hugging Face name, base weight W) ->
    W + scale * B A, or W unchanged if it has no adapter. read(name): returns a LoRA matrix. names:
    the names of all LoRA matrices. scale_of(module): returns its factor on B A."""
    pairs = _pairs_of(names)

    def merge(name: str, weight: torch.Tensor) -> torch.Tensor:
        module = name.removesuffix(".weight")
        if module not in pairs:
            return weight
        a, b = (read(name).to(weight.device, torch.float32) for name in pairs[module])
        delta = b @ a
        if "lora_embedding" in pairs[module][0]:
            delta = delta.t()
        return (weight.float() + scale_of(module) * delta).to(weight.dtype)

    return merge


@torch.no_grad()
def merge_into(model: Any, folder: PathLike) -> None:
    """Merge a saved adapter into the weights of a transformers model, in place. The vocabulary is
    enlarged if the adapter has more rows.

    Each weight is computed in float32 and rounded once, as by `convert --merge`. No collectives.
    ValueError if the adapter belongs to another model or cannot be merged.
    """
    tied = model.config.get_text_config().tie_word_embeddings
    shapes = {name: tuple(part.shape) for name, _, part in file_tensors(model)}
    change, vocab_size = file_merger(folder, model.name_or_path, shapes, tied)
    if vocab_size > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for name, _, part in file_tensors(model):
        part.copy_(change(name, part.cpu()))


def file_merger(
    folder: PathLike, base: PathLike, shapes: dict[str, Any], tied: bool
) -> tuple[Change, int]:
    """Prepare to merge a saved adapter into a base model's files -> (a function, vocabulary size of
    the merged model). The function maps (name, base weight on the CPU) to the merged weight;
    weights that the adapter stores in full replace the base's. The size is 0 if the base has
    neither embedding nor head.

    folder: the adapter's. base: the base model's name, for messages. shapes: {name in the files:
    shape} of the base's tensors. tied: True if the base's embedding is also its head. ValueError if
    the adapter belongs to another model or cannot be merged."""
    spec, source = read_adapter(folder)
    modules = tuple(name for name in map(module_of, shapes) if spec.stacks(name))
    in_turns = any(f"{module}.bias" in shapes for module in modules)
    source.unjoin(replace(spec, modules=modules, in_turns=in_turns))
    one_sided = [name for name in source.pairs if name.endswith(EMBEDDING_AND_HEAD)]
    if tied and one_sided:
        raise ValueError(
            f"{ONE_SIDED.format(one_sided[0])}; merge that adapter with PEFT, which unties them"
        )
    whole = source.whole_weights()
    both = [name for end in _VOCABULARY_WEIGHTS for name in whole if name.endswith(end)]
    if tied and len(both) == 2 and torch.equal(*map(source.read, both)):
        whole.remove(both[1])  # the head: the file has it twice, the base once
    elif tied and any(is_saved(module_of(name), spec) for name in both):
        raise ValueError(
            f"{folder} contains {both[0]}, and in this model the embedding is also the head: "
            "merge that adapter with PEFT, which unties them"
        )
    needed = whole | {f"{module}.weight" for module in source.pairs}
    if missing := sorted(needed - shapes.keys()):
        raise ValueError(
            f"{folder} is an adapter of another model: it is for {len(needed)} weights, of which "
            f"{base} lacks {len(missing)}, such as {missing[0]}"
        )
    merged = _merged_shapes(source, whole, spec, shapes)
    sizes = {shape[0] for name, shape in merged.items() if name.endswith(_VOCABULARY_WEIGHTS)}
    if len(sizes) > 1:
        raise ValueError(
            f"{folder}: merged, embedding and head would have {sizes} rows: train the adapter with "
            "both, or neither"
        )
    merge = _merge_with(source.read, source.names(), spec.scale_of)

    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name in whole:
            return source.read(name).to(weight.dtype)
        return merge(name, weight)

    return change, max(sizes, default=0)


def _merged_shapes(
    source: AdapterSource, whole: set[str], spec: LoraSpec, shapes: dict[str, Any]
) -> dict[str, Shape]:
    """Compute the shapes of the merged model's tensors, {name: shape}, and check the adapter's:
    ValueError if one does not fit its base weight. source: reads the adapter. spec: its settings.
    shapes: {name: shape} of the base's tensors. whole: names of weights that the adapter stores in
    full; an embedding or head among them may have more rows than the base's."""
    merged = dict(shapes)
    for module, (a, b) in source.pairs.items():
        shape = shapes[f"{module}.weight"]
        out_size, in_size = reversed(shape) if "lora_embedding" in a else shape
        rank = spec.rank_of(module)
        source.check(a, (rank, in_size))
        source.check(b, (out_size, rank))
    for name in sorted(whole):
        rows, *rest = shapes[name]
        if name.endswith(_VOCABULARY_WEIGHTS):
            rows = max(rows, source.shape(name)[0])
        merged[name] = (rows, *rest)
        source.check(name, merged[name])
    return merged
