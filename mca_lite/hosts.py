"""Hosts: one view of a model's weights for both backends, by the names of Hugging Face's modules.

`model` is VirtualModels, its McaModelConfig or a transformers model; host_of() picks the host that
hides the difference.
"""

from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import parallel
from .families import InputTensors, rows_of, values_of
from .families_rows import Row
from .inputs import Inputs, inputs_of
from .model_config import McaModelConfig
from .weights_convert import (
    VOCABULARY,
    fill,
    in_layer_order,
    iter_hf_tensors,
    own_parameters,
    stacked,
)
from .weights_files import NamedTensors


class Weight(NamedTuple):
    """One weight of a megatron model, or one module of a transformers model with the parameters
    that it has itself (not those of its submodules).

    key: its name for the host: (megatron's name, layer or None) for a MegatronHost, the module's
    name for a TorchHost. modules: the names of its Hugging Face modules; they can only be trained
    together, because they share the weight. is_tied: True for the embedding and the head if they
    share one weight."""

    key: Any
    modules: tuple[str, ...]
    is_expert: bool = False
    is_tied: bool = False


def host_of(model: Any) -> "MegatronHost | TorchHost":
    """Access to a model's weights by Hugging Face names: a MegatronHost for VirtualModels or a
    McaModelConfig, a TorchHost for a transformers model."""
    is_megatron = isinstance(model, torch.nn.ModuleList | McaModelConfig)
    return MegatronHost(model) if is_megatron else TorchHost(model)


def module_of(name: str) -> str:
    """The module that has a weight: "a.b" for "a.b.weight"."""
    return name.rsplit(".", 1)[0]


def last_of(module: str) -> str:
    """The last part of a module's dotted name."""
    return module.rsplit(".", 1)[-1]


def modules_of(row: Row, layer: int | None) -> tuple[str, ...]:
    """The names of the Hugging Face modules behind one megatron tensor. row: the tensor's Row in
    the family table (which maps names). layer: the layer's index; None: outside the layers."""
    return tuple(module_of(name.format(layer)) for name in row.hf)


class MegatronHost:
    """Access to the weights of a model on megatron-core (VirtualModels) by Hugging Face's names.
    For planning it can be made from a McaModelConfig, before there is a model: then only weights(),
    which gives names, works."""

    def __init__(self, model: Any) -> None:
        self.config = model
        self.models = None
        self.chunks = []
        if not isinstance(model, McaModelConfig):
            self.config = model.config
            self.models = model
            self.chunks = list(model)
        self.base_model = self.config.name_or_path
        self.model_type = self.config.hf_model_type
        self.num_layers = self.config.num_layers
        self.is_tied = self.config.tie_embeddings_and_output_weights
        self.fields = self.config
        self.rows = rows_of(self.config.hf_model_type, self.config)

    def weights(self) -> Iterator[Weight]:
        """Yield a Weight (names and kind) for each weight of the whole model, in layer order.
        Weights on other ranks and a tied head are included."""
        for row, layer in in_layer_order(self.config):
            is_tied = self.is_tied and row.mca in VOCABULARY
            modules = modules_of(row, layer)
            yield Weight((row.mca, layer), modules, row.expert is not None, is_tied)

    def parameters(self) -> Iterator[tuple[Any, torch.Tensor, bool]]:
        """Yield (key, this rank's shard, True if it is trained) for each weight of this rank. The
        key is (megatron's name, layer or None), as in Weight.key; an adapter's weights have such
        keys too."""
        for key, view in own_parameters(self.models).items():
            yield key, view, stacked(view).requires_grad

    def freeze(self, trained: Collection[str], dtype: torch.dtype) -> None:
        """Make the weights with the keys `trained` (Weight.key) trainable, and freeze all others.
        Experts that are in one tensor become trainable together. A key of a buffer, such as a
        router's bias, has no effect, nor has dtype."""
        self.models.requires_grad_(False)
        for key, view in own_parameters(self.models).items():
            parameter = stacked(view)
            if key in trained and isinstance(parameter, torch.nn.Parameter):  # not a router's bias
                parameter.requires_grad_(True)

    def read(self, keys: Collection[str]) -> NamedTensors:
        """Yield (Hugging Face name, whole tensor on the CPU) of the weights with these keys
        (Weight.key), on global rank 0 only. A tied head is left out. All ranks must iterate to the
        end. Collective: see iter_hf_tensors()."""
        return iter_hf_tensors(self.models, keys)

    def fill(self, keys: Collection[str], source: Callable[..., Any]) -> None:
        """Fill this rank's shards of the weights with these keys (Weight.key), in place. source: a
        TensorSource, which gives shapes and tensors by Hugging Face name. ValueError for a shape
        that does not fit. All ranks must call it."""
        fill(self.models, source, keys)


class _Fields(SimpleNamespace):
    """The fields of a transformers config under the names of McaModelConfig's fields, because the
    family table (which maps weight names) reads them so."""

    mtp_num_layers = None
    moe_layer_freq = None
    inputs: Inputs

    @property
    def input_tensors(self) -> InputTensors:
        return self.inputs.tensors

    def is_moe_layer(self, layer: int) -> bool:
        return bool(self.moe_layer_freq and self.moe_layer_freq[layer])


class TorchHost:
    """Access to the weights of a transformers model by module names. linears: {name: linear layer
    or embedding}. fields: the model's config with the field names of McaModelConfig; {} for a model
    type that is not in FAMILIES."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.chunks = [model]
        self.modules = dict(model.named_modules())
        self.base_model = model.name_or_path or None
        self.model_type = model.config.model_type
        self.num_layers = model.config.get_text_config().num_hidden_layers
        self.linears = {
            name: module
            for name, module in self.modules.items()
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
        }
        self.embedding = model.get_input_embeddings()
        self.head = model.get_output_embeddings()
        self.is_tied = self.head is not None and self.embedding.weight is self.head.weight
        values = values_of(model.config)
        named = dict(hf_model_type=model.config.model_type, inputs=inputs_of(model.config))
        self.fields = values and _Fields(**named, **values)

    def weights(self) -> Iterator[Weight]:
        """Yield a Weight for each module that itself has parameters, in the model's order."""
        for name, module in self.modules.items():
            if list(module.parameters(recurse=False)):
                is_tied = self.is_tied and module in (self.embedding, self.head)
                yield Weight(name, (name,), is_tied=is_tied)

    def parameters(self) -> Iterator[tuple[Any, torch.Tensor, bool]]:
        """Yield (name of the module that has it, tensor, True if it is trained) for each
        parameter."""
        for name, parameter in self.model.named_parameters():
            yield module_of(name), parameter, parameter.requires_grad

    def freeze(self, trained: Collection[str], dtype: torch.dtype) -> None:
        """Make the weights of the modules named in `trained` trainable, in float32; freeze all
        others and cast them to `dtype`. Buffers stay as they are."""
        # buffers are not cast, so that rotary frequencies stay exact
        for name, parameter in self.model.named_parameters():
            is_trained = module_of(name) in trained
            parameter.requires_grad_(is_trained)
            parameter.data = parameter.data.to(torch.float32 if is_trained else dtype)

    def read(self, keys: Collection[str]) -> NamedTensors:
        """Yield (name, copy on the CPU) of the parameters in the modules named in `keys`, on global
        rank 0; nothing on other ranks."""
        for name, parameter in self.model.named_parameters():
            if parallel.is_main() and module_of(name) in keys:
                yield name, parameter.detach().to("cpu", copy=True)

    def fill(self, keys: Collection[str], source: Callable[..., Any]) -> None:
        """Fill the parameters in the modules named in `keys`, in place. source: a function of
        (parameter's name, shape) that returns the values as a tensor."""
        for name, parameter in self.model.named_parameters():
            if module_of(name) in keys:
                parameter.detach().copy_(source(name, tuple(parameter.shape)))
