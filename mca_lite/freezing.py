"""Freezing: the weights of a model in training, by the keys of finetuning.

The keys name modules as in Hugging Face's files, with LLaMA-Factory's defaults: layers and modules
of the language model, and the parts of a model with images. A frozen weight has no gradient, no
optimizer state and no decay, and is exported unchanged.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from .errors import Judge
from .families import LANGUAGE_MODEL, part_of, vision_parts_of
from .families_rows import VALUE_HEAD
from .hosts import Weight, host_of, last_of, module_of

PARTS = ("vision_tower", "multi_modal_projector", LANGUAGE_MODEL)
# configuration keys that decide which weights are in training
KEYS_OF_TRAINED = (
    "finetuning_type",
    "freeze_trainable_layers",
    "freeze_trainable_modules",
    "freeze_extra_modules",
    *(f"freeze_{part}" for part in PARTS),
)
_IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


def plan(model, keys, judge: Judge) -> frozenset[str] | None:
    """The Hugging Face modules in training by FinetuningArguments; None: all of the model.

    model: as of hosts.host_of. `judge` refuses layers and modules that the model lacks. No
    collectives.
    """
    host = host_of(model)
    weights = list(host.weights())
    modules = dict.fromkeys(module for weight in weights for module in weight.modules)
    parts = {module: part_of(host.model_type, module) for module in modules}
    frozen = {part for part in PARTS if getattr(keys, f"freeze_{part}")}
    trained = {module for module in modules if parts[module] not in frozen}
    if keys.finetuning_type == "freeze":
        language = [weight for weight in weights if parts[weight.modules[0]] == LANGUAGE_MODEL]
        named = _named(language, keys, host.num_layers, judge)
        named |= {module_of(VALUE_HEAD)} & modules.keys()  # it began at random
        trained = {m for m in trained if parts[m] != LANGUAGE_MODEL or m in named}
    judge.expect(
        trained or judge.problems,
        "finetuning_type",
        "every weight of the model would be frozen",
        "freeze_language_model: false, or freeze_trainable_layers: 2",
    )
    return None if len(trained) == len(modules) else frozenset(trained)


def is_wanted(config, keys) -> bool:
    """True if plan() may freeze a part of the model. config: McaModelConfig or transformers'."""
    kind = getattr(config, "hf_model_type", None) or config.model_type
    return keys.finetuning_type == "freeze" or bool(vision_parts_of(kind))


def _named(weights: list[Weight], keys, num_layers: int, judge: Judge) -> set[str]:
    """The modules of the language model that the keys of finetuning_type freeze name."""
    count = keys.freeze_trainable_layers
    judge.expect(
        abs(count) <= num_layers,
        "freeze_trainable_layers",
        f"the model has {num_layers} layers",
        f"freeze_trainable_layers: {num_layers}, or fewer",
    )
    layers = range(num_layers - count, num_layers) if count > 0 else range(-count)
    inner: dict[str, tuple[int, str]] = {}  # module -> its layer, its name there
    outer: dict[str, str] = {}
    for module in (module for weight in weights for module in weight.modules):
        match = _IN_LAYER.fullmatch(module)
        if match is None:
            outer[module] = last_of(module)
        else:
            inner[module] = (int(match[1]), match[2])
    in_layers = [name for _, name in inner.values()]
    wanted = keys.freeze_trainable_modules
    extras = keys.freeze_extra_modules or []
    _check_names("freeze_trainable_modules", wanted, in_layers, judge)
    _check_names("freeze_extra_modules", extras, outer.values(), judge)
    is_ahead = any(layer >= num_layers for layer, _ in inner.values())
    judge.expect(
        not is_ahead and not any(module.startswith("mtp.") for module in inner),
        "mtp_num_layers",
        "it is not supported together with frozen layers",
        "mtp_num_layers: 0",
    )
    named = {module for module, name in outer.items() if name in extras}
    for module, (layer, name) in inner.items():
        if layer in layers and any(_fits(name, wish) for wish in wanted):
            named.add(module)
    tied = {module for weight in weights if weight.is_tied for module in weight.modules}
    if tied & named:  # one matrix, whichever of its names is given
        named |= tied
    for weight in weights:
        judge.expect(
            len(named.intersection(weight.modules)) in (0, len(set(weight.modules))),
            "freeze_trainable_modules",
            f"{', '.join(weight.modules)} are one matrix on megatron-core: all of them or none",
            "modules such as self_attn and mlp, or use_mca: false",
        )
    return named


def _fits(name: str, wish: str) -> bool:
    """True if a module within a layer is the one of a wish, or inside of it."""
    return wish == "all" or f"{name}.".startswith(f"{wish}.")


def _check_names(key: str, wanted: Iterable[str], names: Iterable[str], judge: Judge) -> None:
    """Refuse a wanted name without a module, and an expert without the others of its layer."""
    names = list(names)
    known = dict.fromkeys(name.partition(".")[0] for name in names)
    for wish in wanted:
        judge.expect(
            any(_fits(name, wish) for name in names) and not re.search(r"\.\d", wish),
            key,
            "the model has no such module in this place",
            f"some of {', '.join(known)}",
            wish,
        )


def freeze(model, trained: frozenset[str] | None):
    """Leave only the weights of these Hugging Face modules in training -> the model, which
    remembers them; None: all of its weights. Call it before McaTrainer is made."""
    if trained is not None:
        host = host_of(model)
        keys = {weight.key for weight in host.weights() if trained.issuperset(weight.modules)}
        host.freeze(keys, torch.float32)
        model.trained_modules = trained
    return model


def parts_summary(model, model_type: str) -> str | None:
    """The parameters in training of each part of a model with images on this rank, adapters apart;
    None for another type of models."""
    if not vision_parts_of(model_type):
        return None
    host = host_of(model)
    parts = {weight.key: part_of(model_type, weight.modules[0]) for weight in host.weights()}
    totals = Counter()
    trained = Counter()
    for key, tensor, is_trained in host.parameters():
        part = parts.get(key)
        totals[part] += tensor.numel()
        trained[part] += tensor.numel() * is_trained
    return ", ".join(f"{part} {trained[part]:,} of {totals[part]:,}" for part in PARTS)


def trained_of(model) -> frozenset[str] | None:
    """The Hugging Face modules in training, None for a model without frozen ones."""
    return getattr(model, "trained_modules", None)  # a transformers model has it only from freeze()


def spec_of(model) -> Any:
    """The LoraSpec of a model with adapters, None of one without."""
    return getattr(model, "lora", None)  # a transformers model has the attribute only from inject()


def is_saved(module: str, spec) -> bool:
    """True for an HF module in modules_to_save, by PEFT's rule: the end of its name."""
    return module.endswith(tuple(spec.modules_to_save))


def trains(model, module: str) -> bool:
    """True if the weights of a Hugging Face module are in training, adapters apart."""
    spec = spec_of(model)
    trained = trained_of(model)
    if spec is not None:
        return is_saved(module, spec)
    return trained is None or module in trained


def lowest_layer(trained: Iterable[str], num_layers: int) -> int:
    """The lowest decoder layer with a backward pass, num_layers for none of them."""
    # outside of layers: after them, or inputs of the first one
    after = [module for module in trained if module.endswith((".norm", "lm_head"))]
    layers = [layer_of(module, 0) for module in set(trained).difference(after)]
    return min(layers, default=num_layers)


def layer_of(module: str, otherwise: int) -> int:
    """The decoder layer of a Hugging Face module."""
    match = _IN_LAYER.fullmatch(module)
    return otherwise if match is None else int(match[1])
