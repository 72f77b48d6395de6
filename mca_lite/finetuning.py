"""Finetuning: which weights of a model are trained, and what its checkpoints and exports contain.

`Finetuning` trains whole weights: all of them, or those that the keys leave unfrozen. A part may
train some modules, or other tensors next to frozen weights, with a subclass in tables.FINETUNING.
Modules have the names of Hugging Face's files. A frozen weight has no gradient, no optimizer state
and no decay, and is exported unchanged.
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
from .files import ADAPTER_CONFIG_NAME
from .hosts import Weight, host_of
from .tables import FINETUNING, OBJECTIVES, function_of
from .weights_convert import Change

IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


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
        kind = getattr(request.config, "hf_model_type", None) or request.config.model_type
        if cls is Finetuning and not vision_parts_of(kind):
            return cls()
        trained = plan_frozen(request.host(), keys, judge)
        ends = OBJECTIVES[keys.stage].vocabulary
        check_frozen_rows(trained, request.num_new, ends, judge)
        return cls(trained, keys.finetuning_type)

    @classmethod
    def trained_of_language(
        cls, weights: list[Weight], num_layers: int, keys: Keys, judge: Judge
    ) -> set[str]:
        """The modules of the language model that the keys leave trainable. weights: its weights."""
        return {module for weight in weights for module in weight.modules}

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
    language = [weight for weight in weights if parts[weight.modules[0]] == LANGUAGE_MODEL]
    named = finetuning_class(keys).trained_of_language(language, host.num_layers, keys, judge)
    trained = {
        module
        for module, part in parts.items()
        if part not in frozen and (part != LANGUAGE_MODEL or module in named)
    }
    judge.expect(
        trained or judge.problems,
        "finetuning_type",
        "every weight of the model would be frozen",
        "freeze_language_model: false, or freeze_trainable_layers: 2",
    )
    return None if len(trained) == len(modules) else frozenset(trained)


def lowest_layer(trained: Iterable[str], num_layers: int) -> int:
    """The lowest decoder layer that has a backward pass; num_layers if none has."""
    # other modules come after the layers, or feed the first one
    after = [module for module in trained if module.endswith((".norm", "lm_head"))]
    layers = [layer_of(module, 0) for module in set(trained).difference(after)]
    return min(layers, default=num_layers)


def layer_of(module: str, otherwise: int) -> int:
    """The decoder layer of a Hugging Face module; `otherwise` if it is in no layer."""
    match = IN_LAYER.fullmatch(module)
    return otherwise if match is None else int(match[1])
