"""Hosts: one view of the weights of both backends' models, by the names of Hugging Face's modules.

`model` is VirtualModels or a transformers model; a host (host_of) hides the difference.
"""

from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import parallel
from .families import rows_of, values_of
from .families_rows import Row
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
    """A tensor of the model, or the tensors of a module: a candidate for modules_to_save."""

    key: Any  # of the host
    modules: tuple[str, ...]  # Hugging Face's, trained together
    is_expert: bool = False
    is_tied: bool = False  # an embedding or a head that are one matrix


def host_of(model) -> "MegatronHost | TorchHost":
    """The host of VirtualModels, of a McaModelConfig or of a transformers model."""
    is_megatron = isinstance(model, torch.nn.ModuleList | McaModelConfig)
    return MegatronHost(model) if is_megatron else TorchHost(model)


def module_of(name: str) -> str:
    """Name of the module that has a weight: "a.b" for "a.b.weight"."""
    return name.rsplit(".", 1)[0]


def last_of(module: str) -> str:
    """The last name of a module."""
    return module.rsplit(".", 1)[-1]


def modules_of(row: Row, layer: int | None) -> tuple[str, ...]:
    """The Hugging Face modules of a row."""
    return tuple(module_of(name.format(layer)) for name in row.hf)


class MegatronHost:
    """VirtualModels, or the McaModelConfig of models before they are built."""

    def __init__(self, model):
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
        """All weights, in the model's order."""
        for row, layer in in_layer_order(self.config):
            is_tied = self.is_tied and row.mca in VOCABULARY
            modules = modules_of(row, layer)
            yield Weight((row.mca, layer), modules, row.expert is not None, is_tied)

    def parameters(self) -> Iterator[tuple[Any, torch.Tensor, bool]]:
        """(key, this rank's part, True if it is trained) of each weight."""
        for key, view in own_parameters(self.models).items():
            yield key, view, stacked(view).requires_grad

    def freeze(self, trained: Collection, dtype: torch.dtype) -> None:
        """Leave only the weights with these keys trainable. dtype: has no effect here."""
        self.models.requires_grad_(False)
        for key, view in own_parameters(self.models).items():
            parameter = stacked(view)
            if key in trained and isinstance(parameter, torch.nn.Parameter):  # not a router's bias
                parameter.requires_grad_(True)

    def read(self, keys: Collection) -> NamedTensors:
        """(HF name, CPU tensor) of these weights on global rank 0. Collective: iter_hf_tensors."""
        return iter_hf_tensors(self.models, keys)

    def fill(self, keys: Collection, source) -> None:
        """Fill this rank's part of these weights from a source. ValueError for other shapes."""
        fill(self.models, source, keys)


class _Fields(SimpleNamespace):
    """Fields of McaModelConfig for the rows of a family, from a transformers model."""

    mtp_num_layers = None
    moe_layer_freq = None

    def is_moe_layer(self, layer: int) -> bool:
        return bool(self.moe_layer_freq and self.moe_layer_freq[layer])


class TorchHost:
    """A transformers model; of families outside the table, its linears and embeddings alone."""

    def __init__(self, model: torch.nn.Module):
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
        self.fields = values and _Fields(hf_model_type=model.config.model_type, **values)

    def weights(self) -> Iterator[Weight]:
        """The modules with direct parameters, in the model's order."""
        for name, module in self.modules.items():
            if list(module.parameters(recurse=False)):
                is_tied = self.is_tied and module in (self.embedding, self.head)
                yield Weight(name, (name,), is_tied=is_tied)

    def parameters(self) -> Iterator[tuple[Any, torch.Tensor, bool]]:
        """(key, tensor, True if it is trained) of each weight."""
        for name, parameter in self.model.named_parameters():
            yield module_of(name), parameter, parameter.requires_grad

    def freeze(self, trained: Collection, dtype: torch.dtype) -> None:
        """Freeze the weights and make them `dtype`; those of `trained` are float32 and train."""
        # not the buffers: rotary frequencies stay exact
        for name, parameter in self.model.named_parameters():
            is_trained = module_of(name) in trained
            parameter.requires_grad_(is_trained)
            parameter.data = parameter.data.to(torch.float32 if is_trained else dtype)

    def read(self, keys: Collection) -> NamedTensors:
        """(HF name, CPU tensor) of the weights of these modules, on global rank 0."""
        for name, parameter in self.model.named_parameters():
            if parallel.is_main() and module_of(name) in keys:
                yield name, parameter.detach().to("cpu", copy=True)

    def fill(self, keys: Collection, source) -> None:
        """Fill the weights of these modules from a source. ValueError for other shapes."""
        for name, parameter in self.model.named_parameters():
            if module_of(name) in keys:
                parameter.detach().copy_(source(name, tuple(parameter.shape)))
