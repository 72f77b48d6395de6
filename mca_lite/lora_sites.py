"""Where a model can have adapters: what each backend tells of its model. lora.py and lora_files.py
do the rest, once.

A host stands for a model: MegatronHost for VirtualModels, or for their config before they are
built; TorchHost for a transformers model, which may be on the meta device. Both answer the same
methods.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core import parallel_state as mpu

from . import parallel
from .args_rules import check_on_megatron, check_on_torch
from .args_values import Judge
from .lora_layers import (
    PROJECTIONS,
    Adapter,
    LoraAdapter,
    LoraEmbedding,
    LoraExperts,
    LoraSpec,
    Names,
    attach,
    attach_beside,
    attach_merged,
)
from .model_config import McaModelConfig
from .model_families import rows_of, values_of
from .model_family_rows import Row
from .model_moe import Experts
from .weights_convert import (
    VOCABULARY,
    fill,
    in_layer_order,
    iter_hf_tensors,
    own_parameters,
    qkv_sizes,
    vocabulary_names,
)
from .weights_sources import SafetensorsSource, original_of


class Candidate(NamedTuple):
    """A Hugging Face module that can have an adapter, anywhere in the model."""

    hf: str
    mca: str  # megatron's name of the module that holds it, "" if the family is not in the table
    in_all: bool  # whether lora_target: all means it


class Weight(NamedTuple):
    """A tensor of the model, or the tensors of a module: what modules_to_save may mean."""

    key: Any  # the host's own
    modules: tuple[str, ...]  # Hugging Face's, which are trained together
    is_expert: bool = False
    is_tied: bool = False  # the embedding of a model whose embedding is its head, or that head


class Site(NamedTuple):
    """A module of this rank that can have an adapter: kind(spec, names, **arguments)."""

    module: torch.nn.Module
    names: Names  # of each projection, the Hugging Face modules that it consists of here
    kind: type[Adapter]
    arguments: dict[str, Any]
    attach: Callable[[torch.nn.Module, Adapter], None] = attach_beside


def host_of(model) -> "MegatronHost | TorchHost":
    """The host that stands for a model: VirtualModels, McaModelConfig or a transformers model."""
    return TorchHost(model) if isinstance(model, torch.nn.Module) else MegatronHost(model)


def module_of(name: str) -> str:
    """The module of a weight, by its name."""
    return name.rsplit(".", 1)[0]


def _is_router(row: Row) -> bool:
    return row.mca.endswith(".mlp.router.weight")


def _candidates(config) -> Iterator[Candidate]:
    """Of a model of the table. config: as weights_convert.in_layer_order takes it."""
    for row, layer in in_layer_order(config):
        if row.is_linear:
            in_all = row.mca not in VOCABULARY and not _is_router(row)
            for name in row.hf:
                yield Candidate(
                    module_of(name.format(layer)), module_of(row.mca.format(layer)), in_all
                )


def _expert_names(rows: Iterable[Row], layer: int) -> Names:
    """Of gate, up and down, the module of each expert of a layer."""
    found: dict[str, list[str]] = {projection: [] for projection in PROJECTIONS}
    for row in rows:
        if row.expert is not None:
            projections = ("gate", "up") if row.kind == "gated" else ("down",)
            for projection, name in zip(projections, row.hf, strict=True):
                found[projection].append(module_of(name.format(layer)))
    return tuple(map(tuple, found.values()))


class MegatronHost:
    """VirtualModels, or the McaModelConfig of models that are not built yet."""

    def __init__(self, model):
        is_config = isinstance(model, McaModelConfig)
        self.config = model if is_config else model.config
        self.models = None if is_config else model
        self.chunks = [] if is_config else list(model)
        self.base_model = self.config.name_or_path
        self.is_tied = self.config.tie_embeddings_and_output_weights
        self.rows = rows_of(self.config.hf_model_type, self.config)

    def candidates(self) -> list[Candidate]:
        """All modules that can have an adapter, in the model's order."""
        return list(_candidates(self.config))

    def weights(self) -> Iterator[Weight]:
        """All weights, in the model's order."""
        for row, layer in in_layer_order(self.config):
            modules = tuple(module_of(name.format(layer)) for name in row.hf)
            is_tied = self.is_tied and row.mca in VOCABULARY
            yield Weight((row.mca, layer), modules, row.expert is not None, is_tied)

    def check(self, spec: LoraSpec, found: list[Candidate], judge: Judge) -> None:
        """The rules of adapters that are not built here."""
        check_on_megatron(spec, self.config, self.rows, found, judge)

    def freeze(self, trained: Collection, dtype: torch.dtype) -> None:
        """Leave only the weights with these keys trainable. dtype: has no effect here."""
        self.models.requires_grad_(False)
        for key, parameter in own_parameters(self.models).items():
            if key in trained:
                parameter.requires_grad_(True)

    def read(self, keys: Collection) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, CPU tensor) of these weights on global rank 0. Collective: iter_hf_tensors."""
        return iter_hf_tensors(self.models, keys)

    def fill(self, keys: Collection, source) -> None:
        """Fill this rank's part of these weights from a source. ValueError for other shapes."""
        fill(self.models, source, keys)

    def base_weight(self, name: str) -> torch.Tensor | None:
        """A weight of the checkpoint that was loaded, or None. A tied head is the embedding."""
        if self._base is None:
            return None
        names = self._base.names()
        if name not in names and self.is_tied and name in vocabulary_names(self.config):
            name = next(iter(vocabulary_names(self.config) & names), name)
        return self._base.read(name) if name in names else None

    @functools.cached_property
    def _base(self) -> SafetensorsSource | None:
        return original_of(self.config.name_or_path)

    def replica(self, is_expert: bool) -> int:
        """Which copy of its weights this rank holds, 0 for the first."""
        return parallel.replica_group(is_expert).rank()

    def sites(self) -> Iterator[Site]:
        """The modules of this rank that can have an adapter."""
        rows = {module_of(row.mca): row for row in self.rows if row.is_linear}
        for chunk in self.chunks:
            for path, module in list(chunk.named_modules()):
                name, layer = chunk.global_name(path)
                if isinstance(module, Experts):
                    yield self._experts(module, layer)
                elif name in rows:
                    yield self._linear(module, rows[name], layer)

    def _linear(self, module, row: Row, layer: int | None) -> Site:
        """The site of a linear, the embedding or the head, which has no weight where it is tied."""
        config, tp = self.config, self.config.tensor_model_parallel_size
        names = tuple((module_of(name.format(layer)),) for name in row.hf)
        group, is_parallel = mpu.get_tensor_model_parallel_group(), config.sequence_parallel
        shared = dict(group=group, sequence_parallel=is_parallel, device=parallel.device())
        if row.mca in VOCABULARY:
            shared["vocab_size"] = config.vocab_size
        if row.mca == VOCABULARY[0]:
            shared |= dict(rows=module.weight.shape[0], hidden_size=config.hidden_size)
            shared["scatters"] = module.reduce_scatter_embeddings
            return Site(module, names, LoraEmbedding, shared)
        out_size, in_size = config.padded_vocab_size // tp, config.hidden_size
        if row.mca != VOCABULARY[1]:
            out_size, in_size = module.weight.shape
        widths, groups = [out_size // len(names)] * len(names), None
        if row.kind == "qkv":
            groups = config.num_query_groups // tp
            widths = [groups * size for size in qkv_sizes(config)]
        cut = {None: None, 0: "column", 1: "row"}[row.axis]
        sizes = dict(in_size=in_size, widths=widths, cut=cut, groups=groups)
        how = attach if _is_router(row) else attach_beside
        return Site(module, names, LoraAdapter, {**sizes, **shared}, how)

    def _experts(self, module: Experts, layer: int) -> Site:
        n, (_, hidden_size, columns) = module.fc1.shape[0], module.fc2.shape
        first = n * module.ep_group.rank()
        names = tuple(modules[first : first + n] for modules in _expert_names(self.rows, layer))
        sizes = dict(hidden_size=hidden_size, columns=columns, device=parallel.device())
        groups = dict(ep=module.ep_group, group=module.etp_group)
        return Site(module, names, LoraExperts, {**sizes, **groups}, attach)


class _Fields(SimpleNamespace):
    """The fields of McaModelConfig that the rows of a family ask for, for a transformers model."""

    mtp_num_layers = None
    moe_layer_freq = None

    def is_moe_layer(self, layer: int) -> bool:
        return bool(self.moe_layer_freq and self.moe_layer_freq[layer])


class TorchHost:
    """A transformers model; of families outside the table, its linears and embeddings alone."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.chunks, self.modules = model, [model], dict(model.named_modules())
        self.base_model = model.name_or_path or None
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.is_tied = self.embedding.weight is self.head.weight
        values, kind = values_of(model.config), model.config.model_type
        self.fields = _Fields(hf_model_type=kind, **values) if values else None

    def _linears(self) -> dict[str, torch.nn.Module]:
        kinds = (torch.nn.Linear, torch.nn.Embedding)
        return {name: module for name, module in self.modules.items() if isinstance(module, kinds)}

    def candidates(self) -> list[Candidate]:
        """All modules that can have an adapter: those with a linear, then experts and routers."""
        of_table = {c.hf: c for c in _candidates(self.fields)} if self.fields else {}
        found = []
        for name, module in self._linears().items():
            # of a family in the table "all" means what its rows say: not the gate of a shared
            # expert, which megatron-core does not hold as a linear
            in_all = isinstance(module, torch.nn.Linear) and module is not self.head
            unknown = Candidate(name, "", in_all and self.fields is None)
            found.append(of_table.pop(name, unknown))
        return found + list(of_table.values())

    def weights(self) -> Iterator[Weight]:
        """The modules with parameters of their own, in the model's order."""
        tied = (self.embedding, self.head) if self.is_tied else ()
        for name, module in self.modules.items():
            if not isinstance(module, Adapter) and any(True for _ in module.parameters(False)):
                yield Weight(name, (name,), is_tied=module in tied)

    def check(self, spec: LoraSpec, found: list[Candidate], judge: Judge) -> None:
        """The rules of adapters that are not built here."""
        check_on_torch(spec, self._linears(), judge)

    def freeze(self, trained: Collection, dtype: torch.dtype) -> None:
        """Freeze the weights and make them `dtype`; those of `trained` are float32 and train."""
        # not the buffers: rotary frequencies stay exact
        for parameter in self.model.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(dtype)
        for _, parameter in self._parameters(trained):
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)

    def _parameters(self, modules: Collection) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for module in self.modules.keys() & set(modules):
            for name, parameter in self.modules[module].named_parameters(recurse=False):
                yield f"{module}.{name}", parameter

    def read(self, keys: Collection) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, CPU tensor) of the weights of these modules, on global rank 0."""
        if parallel.is_main():
            for name, parameter in self._parameters(keys):
                yield name, parameter.detach().to("cpu", copy=True)

    def fill(self, keys: Collection, source) -> None:
        """Fill the weights of these modules from a source. ValueError for other shapes."""
        with torch.no_grad():
            for name, parameter in self._parameters(keys):
                parameter.copy_(source(name, tuple(parameter.shape)))

    def base_weight(self, name: str) -> torch.Tensor | None:
        """A weight of the model by its name, None if it has none. A tied head is the embedding."""
        return dict(self.model.named_parameters(remove_duplicate=False)).get(name)

    def replica(self, is_expert: bool) -> int:
        """Which copy of the weights this rank holds, 0 for the first."""
        return parallel.rank()

    def sites(self) -> Iterator[Site]:
        """The modules that can have an adapter; experts and routers of families in the table."""
        for name, module in self._linears().items():
            out_size, in_size = module.weight.shape
            kind, sizes = LoraAdapter, dict(in_size=in_size, widths=[out_size])
            if isinstance(module, torch.nn.Embedding):
                kind = LoraEmbedding
                sizes = dict(rows=out_size, hidden_size=in_size, vocab_size=out_size)
            sizes["device"] = module.weight.device
            yield Site(module, ((name,),), kind, sizes)
        for layer in range(self.fields.num_layers if self.fields else 0):
            if self.fields.is_moe_layer(layer):
                yield from self._mixture(self.modules[f"model.layers.{layer}.mlp"], layer)

    def _mixture(self, block: torch.nn.Module, layer: int) -> Iterator[Site]:
        """The experts and the router of a layer, which are no linears in transformers."""
        rows, down = rows_of(self.fields.hf_model_type, self.fields), block.experts.down_proj
        names, (_, hidden_size, columns) = _expert_names(rows, layer), down.shape
        sizes = dict(hidden_size=hidden_size, columns=columns, device=down.device)
        yield Site(block.experts, names, LoraExperts, sizes, attach_merged)
        [router] = [row.hf[0] for row in rows if _is_router(row)]
        out_size, in_size = block.gate.weight.shape
        sizes = dict(in_size=in_size, widths=[out_size], device=down.device)
        yield Site(
            block.gate, ((module_of(router.format(layer)),),), LoraAdapter, sizes, attach_merged
        )
