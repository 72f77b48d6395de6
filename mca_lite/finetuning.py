"""Finetuning: which weights of a model are trained, and what its checkpoints and exports contain.

`Finetuning` trains whole weights: all of them, or those that the keys leave unfrozen. A part may
train some modules, or other tensors next to frozen weights, with a subclass in tables.FINETUNING.
Modules have Hugging Face's names. A frozen weight has no gradient, no optimizer state and no decay.
"""

import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .args_rules import check_frozen_rows
from .errors import Judge, Keys
from .families import LANGUAGE_MODEL, part_of, vision_parts_of
from .files import ADAPTER_CONFIG_NAME, PathLike
from .hosts import Weight, host_of
from .tables import FINETUNING, OBJECTIVES, function_of
from .weights_convert import Change

IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


class Request(NamedTuple):
    """The arguments of Finetuning.plan. arguments: RunArguments. config: a McaModelConfig or
    transformers config. host(): returns the model to plan for, or a McaModelConfig that stands for
    it; a model is VirtualModels or a transformers model. num_new: number of new tokens in the
    vocabulary."""

    arguments: Any
    config: Any
    host: Callable[[], Any]
    num_new: int = 0


class Finetuning:
    """Decides which weights are trained: all, or only the Hugging Face modules in `trained`.
    Subclasses, such as Lora, may train other tensors next to frozen weights, and then set is_whole
    to False.

    The argument `model` of methods is VirtualModels or a transformers model; place() sets its
    attribute `finetuning`.
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
        """Decide from a run's configuration keys which modules are trained -> the Finetuning.
        `judge` collects Problems (errors for the user), such as a layer that the model lacks. No
        collectives."""
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
        """Hook: names of the language model's modules that the configuration keys leave trainable;
        here all. weights: the language model's, as hosts.Weight. num_layers: number of decoder
        layers. judge: collects Problems (errors for the user)."""
        return {module for weight in weights for module in weight.modules}

    @classmethod
    def take_new_tokens(cls, arguments: Keys) -> str:
        """Hook for a run that adds tokens: change the configuration keys, in place, so that rows of
        new tokens are trained. Returns text for the report, or "".
        """
        return ""

    def __str__(self) -> str:
        if self.trained is None:
            return "full: every weight is trained"
        return f"{self.kind}: {len(self.trained)} modules are trained"

    def notes(self, arguments: Keys) -> list[str]:
        """Hook: lines for the report at the start of a run."""
        return []

    def place(self, model: Any, seed: int = 42, dtype: torch.dtype = torch.float32) -> Any:
        """Freeze the weights that are not trained, in place -> the model. Call it before McaTrainer
        is made. If any are frozen, a transformers model's weights become float32. seed and dtype
        have no effect here. Subclasses that add tensors, such as LoRA, draw their first values with
        `seed`, and cast a transformers model's frozen weights to `dtype`."""
        if self.trained is not None:
            host = host_of(model)
            modules = self.trained
            keys = {weight.key for weight in host.weights() if modules.issuperset(weight.modules)}
            host.freeze(keys, torch.float32)
        model.finetuning = self
        return model

    def trains(self, module: str) -> bool:
        """True if the weights of this Hugging Face module are trained."""
        return self.trained is None or module in self.trained

    def without(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Hook: context manager in which the model's adapters are off; its value is the model. It
        gives the model as it was without adapters only if can_be_off is True. This base class
        changes nothing."""
        return contextlib.nullcontext(model)

    @property
    def can_be_off(self) -> bool:
        """True if without() gives back the model as it was before it got adapters: the run trains
        adapters, and no whole weights beside them."""
        return not self.is_whole and not self.saved

    # -- tensors next to whole weights, which a subclass adds

    def work_beside(self, module: str, uses: float, shape: tuple[int, ...]) -> float:
        """Hook for counting FLOPs: the multiplications per token by the tensors that a subclass
        adds next to a module's weight; here 0. uses: how often a token is multiplied by the weight;
        0 if the weight is only looked up, as in an embedding. shape: the weight's."""
        return 0.0

    def shapes_beside(self, module: str, shape: list[int], is_embedding: bool) -> dict[str, Any]:
        """Hook: shapes of the tensors on this rank that a subclass adds next to a module's weight,
        as {end of the tensor's name: shape}; here {}. shape: that of this rank's shard of the
        weight. is_embedding: True for an embedding."""
        return {}

    def trained_tensors(self, model: Any) -> dict[str, torch.Tensor]:
        """Hook: {name in a file: CPU tensor} of every trained tensor on global rank 0, {} on other
        ranks. Only subclasses with is_whole False have it. Collective.
        """
        raise NotImplementedError  # only a subclass with is_whole False needs it

    def export_beside(self, model: Any, folder: PathLike) -> list[str]:
        """Hook: if whole weights are not exported, write what is trained, such as adapters, into a
        folder. Returns the file names on global rank 0, [] on other ranks. Collective.
        """
        return []

    def merger(self, model: Any) -> Change | None:
        """Hook: a function (name, whole weight) -> the weight with its adapter merged, for exports
        of the merged model. None if nothing is to be merged. Collective."""
        return None

    def fill_fresh(self, model: Any, source: Callable[..., torch.Tensor]) -> None:
        """Hook: give first values, in place, to the tensors that a subclass adds to the model; here
        nothing is done. source(key, shape): returns the values of one tensor."""

    # -- checkpoints

    def sharded_state(self, chunk: Any) -> dict[str, Any]:
        """The tensors of a model chunk that a distributed checkpoint may contain, as {name:
        ShardedTensor or another of megatron's sharded objects}. chunk: one of this rank's parts of
        the model."""
        return chunk.sharded_state_dict()

    def check_checkpoint(self, model: Any, folder: PathLike) -> None:
        """Raise ValueError if a checkpoint's folder does not fit this kind of finetuning. This base
        class trains whole weights and refuses a folder with adapters."""
        if (Path(folder) / ADAPTER_CONFIG_NAME).is_file():
            raise ValueError(
                f"{folder} holds adapters, and this run has none: set finetuning_type: lora, or "
                "start anew with another output_dir"
            )

    def base_sample(self) -> dict[str, list[float]]:
        """Hook: {name: some values} of frozen weights, stored in checkpoints, so that a resumed run
        can notice another base model; {} for none.
        """
        return {}


_WHOLE = Finetuning()


def finetuning_class(keys: Keys) -> type[Finetuning]:
    """The class, such as Lora, for the value of the configuration key finetuning_type."""
    return function_of(FINETUNING[keys.finetuning_type])


def finetuning_of(model: Any) -> Finetuning:
    """The Finetuning that place() set on a model; without one, a Finetuning of all weights."""
    return getattr(model, "finetuning", _WHOLE)


def plan_frozen(model: Any, keys: Keys, judge: Judge) -> frozenset[str] | None:
    """Names of the Hugging Face modules that a run's configuration keys leave trainable; None if
    these are all modules.

    model: anything that hosts.host_of takes. `judge` collects Problems (errors for the user):
    layers and modules that the model lacks; and freezing every weight, unless it has another
    Problem already. No collectives.
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
    """Index of the first decoder layer that may need a backward pass; num_layers if none does.
    trained: the Hugging Face names of the trained modules. A name without "layers.N" counts as
    before the first layer, such as an embedding; but as after the last layer if it ends in ".norm",
    "lm_head" or "score"."""
    # other modules come after the layers, or feed the first one
    ends = (".norm", "lm_head", "score")
    layers = [layer_of(m, num_layers if m.endswith(ends) else 0) for m in trained]
    return min(layers, default=num_layers)


def layer_of(module: str, otherwise: int) -> int:
    """The number N in "layers.N." in a Hugging Face module's name (the last, if there are several):
    for a module of the decoder its layer's index. `otherwise` if the name has no such number."""
    match = IN_LAYER.fullmatch(module)
    return otherwise if match is None else int(match[1])
