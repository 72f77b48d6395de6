"""Finetuning: which weights of a model are trained, and what its checkpoints and exports hold.

`Finetuning` trains whole weights: all of them, or those that the keys leave unfrozen. A part may
train other tensors beside frozen weights, by a subclass in tables.FINETUNING. The keys name modules
as in Hugging Face's files, with LLaMA-Factory's defaults: layers and modules of the language model,
and the parts of a model with images. A frozen weight has no gradient, no optimizer state and no
decay, and is exported unchanged.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .args_rules import check_frozen_rows
from .errors import Judge
from .families import LANGUAGE_MODEL, part_of, vision_parts_of
from .families_rows import VALUE_HEAD
from .files import ADAPTER_CONFIG_NAME
from .hosts import Weight, host_of, last_of, module_of
from .tables import FINETUNING, OBJECTIVES, function_of
from .weights_convert import Change

# configuration keys that decide which weights are in training
KEYS_OF_TRAINED = (
    "finetuning_type",
    "freeze_trainable_layers",
    "freeze_trainable_modules",
    "freeze_extra_modules",
)
_IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


class Request(NamedTuple):
    """The arguments of Finetuning.plan. host(): the model to plan for, as of hosts.host_of."""

    arguments: Any  # RunArguments
    config: Any  # McaModelConfig, or transformers'
    host: Callable[[], Any]
    num_new: int = 0  # tokens added to the vocabulary


class Finetuning:
    """A way to finetune a model: whole weights, all of them or those of the modules in `trained`.

    `model` is VirtualModels or a transformers model, with the object as `finetuning` once place()
    has run. A subclass that trains tensors beside frozen weights sets is_whole to False.
    """

    kind = "full"  # as finetuning_type, for rules between keys
    is_whole = True  # whole weights are trained, saved in checkpoints and exported
    saved: tuple[str, ...] = ()  # modules trained whole beside other tensors
    merges = False  # the end of a run also exports the merged model

    def __init__(self, trained: frozenset[str] | None = None, kind: str = "full"):
        self.trained = trained  # Hugging Face's modules; None: all
        self.kind = kind

    @classmethod
    def plan(cls, request: Request, judge: Judge) -> "Finetuning":
        """The finetuning of a run by its keys. `judge` refuses what the model cannot do. No
        collectives."""
        keys = request.arguments
        if not is_wanted(request.config, keys):
            return cls()
        trained = plan_frozen(request.host(), keys, judge)
        ends = OBJECTIVES[keys.stage].vocabulary
        check_frozen_rows(trained, request.num_new, ends, judge)
        return cls(trained, keys.finetuning_type)

    @classmethod
    def take_new_tokens(cls, arguments) -> str:
        """Change the keys so that the rows of new tokens are trained -> words for the report."""
        return ""

    def __str__(self) -> str:
        if self.trained is None:
            return "full: every weight is trained"
        return f"{self.kind}: {len(self.trained)} modules are trained"

    def notes(self, arguments) -> list[str]:
        """Lines for the report on the keys of a run."""
        return []

    def place(self, model, seed: int = 42, dtype: torch.dtype = torch.float32):
        """Freeze the weights that are not trained -> the model. Call it before McaTrainer is made.
        seed: of new tensors. dtype: of a transformers model's frozen weights beside them."""
        if self.trained is not None:
            host = host_of(model)
            modules = self.trained
            keys = {weight.key for weight in host.weights() if modules.issuperset(weight.modules)}
            host.freeze(keys, torch.float32)
        model.finetuning = self
        return model

    def trains(self, module: str) -> bool:
        """True if the whole weights of a Hugging Face module are in training."""
        return self.trained is None or module in self.trained

    def without(self, model) -> contextlib.AbstractContextManager:
        """A context in which the model is the one before training, if can_be_off."""
        return contextlib.nullcontext(model)

    @property
    def can_be_off(self) -> bool:
        """True if without() gives the model before training."""
        return not self.is_whole and not self.saved

    # -- tensors beside whole weights: of a subclass

    def work_beside(self, module: str, uses: float, shape: tuple[int, ...]) -> float:
        """Multiplications a token of the tensors beside a matrix. uses: of the matrix for a token,
        0: rows of it are looked up."""
        return 0.0

    def shapes_beside(self, module: str, shape: list[int], is_embedding: bool) -> dict:
        """{end of its name: shape} of the tensors beside a matrix. shape: a rank's part of it."""
        return {}

    def trained_tensors(self, model) -> dict[str, torch.Tensor]:
        """{name in a file: CPU tensor} of all tensors in training, on global rank 0. Collective."""
        raise NotImplementedError  # a subclass with is_whole False has them

    def export_beside(self, model, folder: str | os.PathLike) -> list[str]:
        """Write the tensors beside whole weights -> names of this rank's files. Collective."""
        return []

    def merger(self, model) -> Change | None:
        """A function (name, CPU tensor of a whole weight) -> the tensor with those beside it in it;
        None: nothing changes. Collective."""
        return None

    def fill_fresh(self, model, source: Callable[..., torch.Tensor]) -> None:
        """Fill the new tensors beside whole weights by source(key, shape)."""

    # -- checkpoints

    def sharded_state(self, chunk) -> dict[str, Any]:
        """megatron's ShardedTensors of what a chunk's checkpoint holds."""
        return chunk.sharded_state_dict()

    def check_checkpoint(self, model, folder: str | os.PathLike) -> None:
        """ValueError for a checkpoint of another finetuning."""
        if (Path(folder) / ADAPTER_CONFIG_NAME).is_file():
            raise ValueError(
                f"{folder} holds adapters, and this run has none: set finetuning_type: lora, or "
                "start anew with another output_dir"
            )

    def base_sample(self) -> dict[str, list[float]]:
        """{weight: some of its numbers} of the frozen weights, by which a checkpoint knows them."""
        return {}


_WHOLE = Finetuning()


def finetuning_class(keys) -> type[Finetuning]:
    """The row of FINETUNING for finetuning_type, of FinetuningArguments or others."""
    return function_of(FINETUNING[keys.finetuning_type])


def finetuning_of(model) -> Finetuning:
    """The finetuning of a model; of whole weights for one that none was placed on."""
    return getattr(model, "finetuning", _WHOLE)


# -- the keys of frozen weights


def plan_frozen(model, keys, judge: Judge) -> frozenset[str] | None:
    """The Hugging Face modules in training by the keys of a run; None: all of the model.

    model: as of hosts.host_of. `judge` refuses layers and modules that the model lacks. No
    collectives.
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
    """True if plan_frozen() may freeze a part of the model of a config, of either backend."""
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
