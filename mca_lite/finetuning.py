"""Finetuning: which weights of a model are trained, and what its checkpoints and exports contain.

`Finetuning` trains whole weights: all of them, or those that the keys leave unfrozen. A part may
train other tensors next to frozen weights, with a subclass in tables.FINETUNING. The keys name
modules as Hugging Face's files do, with LLaMA-Factory's defaults: layers and modules of the
language model, and the parts of a model with images. A frozen weight has no gradient, no optimizer
state and no decay, and is exported unchanged.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .args_rules import check_frozen_rows
from .errors import Judge, Keys
from .families import LANGUAGE_MODEL, part_of, vision_parts_of
from .families_rows import VALUE_HEAD
from .files import ADAPTER_CONFIG_NAME
from .hosts import Weight, host_of, last_of, module_of
from .tables import FINETUNING, OBJECTIVES, function_of
from .weights_convert import Change

# the keys that decide which weights are trained
KEYS_OF_TRAINED = (
    "finetuning_type",
    "freeze_trainable_layers",
    "freeze_trainable_modules",
    "freeze_extra_modules",
)
_IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


class Request(NamedTuple):
    """The arguments of Finetuning.plan. host(): the model to plan for, in a form that hosts.host_of
    takes."""

    arguments: Any  # RunArguments
    config: Any  # McaModelConfig, or transformers'
    host: Callable[[], Any]
    num_new: int = 0  # new tokens in the vocabulary


class Finetuning:
    """A way to finetune a model: train whole weights, all of them or those of the modules in
    `trained`.

    `model` is VirtualModels or a transformers model; place() sets `model.finetuning` to this
    object. A subclass that trains tensors next to frozen weights sets is_whole to False.
    """

    kind = "full"  # the value of finetuning_type, for rules between keys
    is_whole = True  # whole weights are trained, saved in checkpoints and exported
    saved: tuple[str, ...] = ()  # modules trained whole, next to other trained tensors
    merges = False  # the end of a run also exports the merged model

    def __init__(self, trained: frozenset[str] | None = None, kind: str = "full") -> None:
        self.trained = trained  # Hugging Face modules; None: every module
        self.kind = kind

    @classmethod
    def plan(cls, request: Request, judge: Judge) -> "Finetuning":
        """The finetuning that a run's keys ask for. `judge` gets Problems for what the model cannot
        do. Not collective."""
        keys = request.arguments
        if not is_wanted(request.config, keys):
            return cls()
        trained = plan_frozen(request.host(), keys, judge)
        ends = OBJECTIVES[keys.stage].vocabulary
        check_frozen_rows(trained, request.num_new, ends, judge)
        return cls(trained, keys.finetuning_type)

    @classmethod
    def take_new_tokens(cls, arguments: Keys) -> str:
        """Change the keys, in place, so that rows of new tokens are trained -> text for the report,
        or ""."""
        return ""

    def __str__(self) -> str:
        if self.trained is None:
            return "full: every weight is trained"
        return f"{self.kind}: {len(self.trained)} modules are trained"

    def notes(self, arguments: Keys) -> list[str]:
        """Report lines about a run's keys."""
        return []

    def place(self, model: Any, seed: int = 42, dtype: torch.dtype = torch.float32) -> Any:
        """Freeze the weights that are not trained -> the model. Call it before McaTrainer is made.
        seed: for new tensors. dtype: for a transformers model's frozen weights next to new tensors.
        """
        if self.trained is not None:
            host = host_of(model)
            modules = self.trained
            keys = {weight.key for weight in host.weights() if modules.issuperset(weight.modules)}
            host.freeze(keys, torch.float32)
        model.finetuning = self
        return model

    def trains(self, module: str) -> bool:
        """True if the weights of a Hugging Face module are trained."""
        return self.trained is None or module in self.trained

    def without(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """A context with the model as it was before training; only if can_be_off."""
        return contextlib.nullcontext(model)

    @property
    def can_be_off(self) -> bool:
        """True if without() can give the model as it was before training."""
        return not self.is_whole and not self.saved

    # -- tensors next to whole weights, which a subclass adds

    def work_beside(self, module: str, uses: float, shape: tuple[int, ...]) -> float:
        """Multiplications per token in the tensors next to a matrix. uses: how often a token uses
        the matrix; 0 if it only looks up rows."""
        return 0.0

    def shapes_beside(self, module: str, shape: list[int], is_embedding: bool) -> dict[str, Any]:
        """{end of its name: shape} of the tensors next to a matrix. shape: this rank's shard of the
        matrix."""
        return {}

    def trained_tensors(self, model: Any) -> dict[str, torch.Tensor]:
        """{name in a file: CPU tensor} of every trained tensor, on global rank 0. Collective."""
        raise NotImplementedError  # only a subclass with is_whole False needs it

    def export_beside(self, model: Any, folder: str | os.PathLike[str]) -> list[str]:
        """Write the tensors next to whole weights -> names of this rank's files. Collective."""
        return []

    def merger(self, model: Any) -> Change | None:
        """A function (name, tensor of a whole weight) -> the tensor with the tensors next to it
        merged in. None if nothing is to be merged. Collective."""
        return None

    def fill_fresh(self, model: Any, source: Callable[..., torch.Tensor]) -> None:
        """Fill the new tensors next to whole weights from source(key, shape)."""

    # -- checkpoints

    def sharded_state(self, chunk: Any) -> dict[str, Any]:
        """megatron's ShardedTensors that a chunk's checkpoint holds."""
        return chunk.sharded_state_dict()

    def check_checkpoint(self, model: Any, folder: str | os.PathLike[str]) -> None:
        """Raise ValueError for a checkpoint that another finetuning wrote."""
        if (Path(folder) / ADAPTER_CONFIG_NAME).is_file():
            raise ValueError(
                f"{folder} holds adapters, and this run has none: set finetuning_type: lora, or "
                "start anew with another output_dir"
            )

    def base_sample(self) -> dict[str, list[float]]:
        """{weight: some of its values} for the frozen weights, by which a checkpoint recognises its
        base model."""
        return {}


_WHOLE = Finetuning()


def finetuning_class(keys: Keys) -> type[Finetuning]:
    """The class in FINETUNING that the key finetuning_type names."""
    return function_of(FINETUNING[keys.finetuning_type])


def finetuning_of(model: Any) -> Finetuning:
    """The finetuning placed on a model; one that trains every weight if none was placed."""
    return getattr(model, "finetuning", _WHOLE)


# -- the keys of frozen weights


def plan_frozen(model: Any, keys: Keys, judge: Judge) -> frozenset[str] | None:
    """The Hugging Face modules that a run's keys leave trainable; None if that is every module.

    model: anything that hosts.host_of takes. `judge` gets Problems for layers and modules that the
    model lacks. Not collective.
    """
    host = host_of(model)
    weights = list(host.weights())
    modules = dict.fromkeys(module for weight in weights for module in weight.modules)
    parts = {module: part_of(host.model_type, module) for module in modules}
    frozen = {part for part in set(parts.values()) if getattr(keys, f"freeze_{part}")}
    trained = {module for module in modules if parts[module] not in frozen}
    if keys.finetuning_type == "freeze":
        language = [weight for weight in weights if parts[weight.modules[0]] == LANGUAGE_MODEL]
        named = _named(language, keys, host.num_layers, judge)
        named |= {
            module_of(VALUE_HEAD)
        } & modules.keys()  # it starts from random weights, so it is trained
        trained = {m for m in trained if parts[m] != LANGUAGE_MODEL or m in named}
    judge.expect(
        trained or judge.problems,
        "finetuning_type",
        "every weight of the model would be frozen",
        "freeze_language_model: false, or freeze_trainable_layers: 2",
    )
    return None if len(trained) == len(modules) else frozenset(trained)


def is_wanted(config: Any, keys: Keys) -> bool:
    """True if plan_frozen() may freeze a part of a model with this config, of either backend."""
    kind = getattr(config, "hf_model_type", None) or config.model_type
    return keys.finetuning_type == "freeze" or bool(vision_parts_of(kind))


def _named(weights: list[Weight], keys: Keys, num_layers: int, judge: Judge) -> set[str]:
    """The language model's modules that the keys of finetuning_type freeze name."""
    count = keys.freeze_trainable_layers
    judge.expect(
        abs(count) <= num_layers,
        "freeze_trainable_layers",
        f"the model has {num_layers} layers",
        f"freeze_trainable_layers: {num_layers}, or fewer",
    )
    layers = range(num_layers - count, num_layers) if count > 0 else range(-count)
    inner: dict[str, tuple[int, str]] = {}  # module -> (its layer, its name in the layer)
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
    if tied & named:  # both names stand for one matrix
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
    """True if the module `name` of a layer is the one that `wish` names, or is inside it."""
    return wish == "all" or f"{name}.".startswith(f"{wish}.")


def _check_names(key: str, wanted: Iterable[str], names: Iterable[str], judge: Judge) -> None:
    """Refuse a wanted name without a module, and one that selects single experts of a layer."""
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


def lowest_layer(trained: Iterable[str], num_layers: int) -> int:
    """The lowest decoder layer that has a backward pass; num_layers if none has."""
    # other modules come after the layers, or feed the first one
    after = [module for module in trained if module.endswith((".norm", "lm_head"))]
    layers = [layer_of(module, 0) for module in set(trained).difference(after)]
    return min(layers, default=num_layers)


def layer_of(module: str, otherwise: int) -> int:
    """The decoder layer of a Hugging Face module; `otherwise` if it is in no layer."""
    match = _IN_LAYER.fullmatch(module)
    return otherwise if match is None else int(match[1])
