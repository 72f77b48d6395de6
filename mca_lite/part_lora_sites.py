"""LoRA on a model: which modules get adapters, their initial values, their checkpoint tensors.

`model` is VirtualModels or a transformers model, unless a docstring names others.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from . import parallel
from .errors import Judge
from .families import FAMILIES, LANGUAGE_MODEL, part_of, rows_of
from .families_rows import PREDICTION_LAYERS, Row
from .hosts import MegatronHost, TorchHost, host_of, module_of, modules_of
from .mcore import ShardedTensor, mpu
from .model_config import McaModelConfig
from .model_moe import Experts
from .part_lora_layers import (
    Adapter,
    LoraAdapter,
    LoraEmbedding,
    LoraExperts,
    Names,
    Piece,
    in_rows,
)
from .part_lora_patterns import LoraSpec, check_stacked, is_saved
from .part_lora_rules import (
    check_on_megatron,
    check_on_torch,
    check_saved,
    check_single_experts,
    resolve_targets,
)
from .weights_convert import VOCABULARY, in_layer_order, num_groups, row_parts, row_sizes
from .weights_files import Shape, generator_of

# -- sites of adapters


class Candidate(NamedTuple):
    """A Hugging Face module that can have a LoRA adapter, on this rank or another.

    hf: its name. mca: the megatron module that contains it; "" if the model's family is not in the
    table FAMILIES. in_all: True if lora_target: all can include it. part: the model's part that
    contains it, such as the language model."""

    hf: str
    mca: str  # megatron's module that contains it, "" if the family is not in the table
    in_all: bool  # True if lora_target: all can include it
    part: str = LANGUAGE_MODEL  # the model's part that contains it, see families.part_of


class Site(NamedTuple):
    """A module on this rank that can get a LoRA adapter, and how to make the adapter.

    names: for each projection that the module fuses or stacks, its Hugging Face modules on this
    rank. kind: the adapter's class; kind(spec, names, **arguments) builds the adapter. way: how
    part_lora_layers.attach(module, adapter, way) connects it to the module."""

    module: torch.nn.Module
    names: Names  # for each projection, its Hugging Face modules on this rank
    kind: type[Adapter]
    arguments: dict[str, Any]
    way: str = "beside"  # see part_lora_layers.attach


def _is_router(row: Row) -> bool:
    return row.mca.endswith(".mlp.router.weight")


def _candidates(config: Any) -> Iterator[Candidate]:
    """Yield a Candidate for each Hugging Face module of the model that can have a LoRA adapter.
    config: a McaModelConfig, or an object with its fields, of a family in the table FAMILIES."""
    for row, layer in in_layer_order(config):
        # transformers, and so PEFT's files, have no layers for multi-token prediction
        if row.is_linear and not row.mca.startswith(PREDICTION_LAYERS):
            in_all = row.mca not in VOCABULARY and not _is_router(row)
            mca = module_of(row.mca.format(layer))
            for module in modules_of(row, layer):
                yield Candidate(module, mca, in_all, part_of(config.hf_model_type, module))


def candidates_of(host: Any) -> list[Candidate]:
    """Every Hugging Face module of the whole model that can have a LoRA adapter, layer by layer.
    For a family that is not in the table FAMILIES: all linears and embeddings. host: access to the
    model's weights, from hosts.host_of."""
    if host.fields:
        return list(_candidates(host.fields))
    return [
        Candidate(name, "", isinstance(module, torch.nn.Linear) and module is not host.head)
        for name, module in host.linears.items()
    ]


def _expert_names(rows: Iterable[Row], layer: int | None) -> Names:
    """Names of the Hugging Face modules of a layer's experts: (gate of each expert, up of each,
    down of each). rows: the model's Rows, which pair megatron's tensors with Hugging Face's. layer:
    the layer's index."""
    # rows for gate and up of all experts come before rows for down
    linears = [row for row in rows if row.expert is not None and row.is_linear]
    of_rows = [modules_of(row, layer) for row in linears]
    half = len(of_rows) // 2
    return (*zip(*of_rows[:half], strict=True), *zip(*of_rows[half:], strict=True))


def sites_of(host: MegatronHost | TorchHost) -> Iterator[Site]:
    """Yield a Site (the module, and how to make its adapter) for each module on this rank that can
    get a LoRA adapter. host: access to the model's weights, from hosts.host_of."""
    if isinstance(host, MegatronHost):
        return _sites_on_megatron(host)
    return _sites_on_torch(host)


def _sites_on_megatron(host: MegatronHost) -> Iterator[Site]:
    linears = [
        row for row in host.rows if row.is_linear and not row.mca.startswith(PREDICTION_LAYERS)
    ]
    rows = {module_of(row.mca): row for row in linears}
    for chunk in host.chunks:
        for path, module in list(chunk.named_modules()):
            name, layer = chunk.global_name(path)
            if name.startswith(PREDICTION_LAYERS):
                continue
            if isinstance(module, Experts):
                yield _site_of_experts(module, linears, layer)
            elif name in rows:
                yield _site_of_linear(module, rows[name], layer, host.config)


def _site_of_linear(
    module: torch.nn.Module, row: Row, layer: int | None, config: McaModelConfig
) -> Site:
    """The Site (a module, and how to make its LoRA adapter) of a megatron linear, router, embedding
    or output layer. row: the Row that pairs its weight with Hugging Face's names. layer: its
    layer's index; None: outside of layers."""
    tp = config.tensor_model_parallel_size
    names = tuple((name,) for name in modules_of(row, layer))
    arguments: dict[str, Any] = dict(
        group=mpu.get_tensor_model_parallel_group(),
        sequence_parallel=config.sequence_parallel,
        device=parallel.device(),
    )
    if row.mca in VOCABULARY:  # a tied head has no weight to ask for its shape
        out_size, in_size = config.padded_vocab_size // tp, config.hidden_size
        arguments["vocab_size"] = config.vocab_size
    else:
        out_size, in_size = module.weight.shape
    widths = [size // tp for size in row_sizes(row, out_size * tp, config)]
    arguments |= dict(in_size=in_size, widths=widths)
    if row.is_of_inputs:  # every rank has the same inputs, even under sequence parallelism
        arguments["sequence_parallel"] = False
    if row.mca == VOCABULARY[0]:
        arguments["padding_idx"] = config.padding_idx
        return Site(module, names, LoraEmbedding, arguments)
    if row.kind.startswith(("qk", "delta")):
        groups = num_groups(row, config)
        arguments["groups"] = groups // tp
        parts = row_parts(row, out_size * tp, config)
        arguments["orders"] = [_row_order(of_one, groups) for of_one in parts]
    way = "inside" if _is_router(row) else "beside"
    return Site(module, names, LoraAdapter, arguments | dict(cut=row.axis), way)


def _site_of_experts(module: Experts, rows: Iterable[Row], layer: int | None) -> Site:
    n, hidden_size, columns = module.fc2.shape
    first = n * module.ep_group.rank()
    names = tuple(modules[first : first + n] for modules in _expert_names(rows, layer))
    arguments = dict(
        hidden_size=hidden_size,
        columns=columns,
        device=parallel.device(),
        ep=module.ep_group,
        group=module.etp_group,
    )
    return Site(module, names, LoraExperts, arguments, "inside")


def _sites_on_torch(host: Any) -> Iterator[Site]:
    """Yield a Site (a module, and how to make its LoRA adapter) for each module of a transformers
    model that can have an adapter: linears and embeddings; if the family is in the table FAMILIES,
    also the experts and routers of MoE layers. host: the TorchHost of the model."""
    for name, module in host.linears.items():
        out_size, in_size = module.weight.shape
        kind: type[Adapter] = LoraAdapter
        sizes = dict(in_size=in_size, widths=[out_size], device=module.weight.device)
        if isinstance(module, torch.nn.Embedding):
            kind = LoraEmbedding
            sizes["padding_idx"] = module.padding_idx
        yield Site(module, ((name,),), kind, sizes)
    if not host.fields:
        return
    decoder = getattr(host.model.base_model, "language_model", host.model.base_model)
    for layer in filter(host.fields.is_moe_layer, range(host.fields.num_layers)):
        yield from _sites_of_mixture(host, decoder.layers[layer].mlp, layer)


def _sites_of_mixture(host: Any, block: torch.nn.Module, layer: int) -> Iterator[Site]:
    """Yield a Site (a module, and how to make its LoRA adapter) for the experts of an MoE layer in
    a transformers model, and another for its router, unless that is an nn.Linear. host: the
    TorchHost of the model. block: the layer's MLP module. layer: the layer's index."""
    rows = rows_of(host.fields.hf_model_type, host.fields)
    _, hidden_size, columns = in_rows(block.experts, "down_proj").shape
    device = block.experts.down_proj.device
    sizes = dict(hidden_size=hidden_size, columns=columns, device=device)
    yield Site(block.experts, _expert_names(rows, layer), LoraExperts, sizes, "merged")
    [names] = [modules_of(row, layer) for row in rows if _is_router(row)]
    if names[0] in host.linears:  # in hunyuan_v1_moe the router is a linear, yielded before
        return
    router = block.get_submodule(names[0].rpartition(".")[2])
    out_size, in_size = router.weight.shape
    sizes = dict(in_size=in_size, widths=[out_size], device=device)
    yield Site(router, (names,), LoraAdapter, sizes, "merged")


# -- choosing


def saved_keys(host: Any, spec: LoraSpec) -> set[Any]:
    """Keys of the weights that are trained whole, beside the adapters, because of modules_to_save.
    A key is (megatron name, layer) on megatron-core, and a module's name on plain torch. host:
    access to the model's weights, from hosts.host_of."""
    return {w.key for w in host.weights() if any(is_saved(module, spec) for module in w.modules)}


def plan(model: Any, spec: LoraSpec, judge: Judge | None = None) -> LoraSpec:
    """Decide which modules get LoRA adapters -> a copy of `spec`, the adapters' settings, whose
    `modules` are the model's modules that its targets and target_parameters match. Nothing is added
    to the model yet. No collectives.

    model: may also be a McaModelConfig, or a model on the meta device. judge: collects the
    problems, if something is not supported; None: ConfigError is raised for them."""
    host = host_of(model)
    rules = judge or Judge(None)
    modules = candidates_of(host)
    family = FAMILIES.get(host.model_type)
    in_turns = family is not None and family.stacked_experts == "in_turns"
    spec = replace(spec, modules=resolve_targets(spec, modules, rules), in_turns=in_turns)
    check_stacked(spec, [candidate.hf for candidate in modules], rules)
    if isinstance(host, MegatronHost):
        check_on_megatron(spec, host.config, host.rows, modules, rules)
    else:
        check_on_torch(spec, host.linears, rules)
    check_single_experts(spec, modules, rules)
    check_saved(spec, host.weights(), rules)
    if judge is None:
        rules.close()
    return spec


def fill_adapters(model: Any, source: Callable[[str, Shape], torch.Tensor]) -> None:
    """Set the values of this rank's LoRA matrices, in place. source(key, shape): returns a whole
    matrix, of which this rank takes its shard; key is Piece.key, the matrix's name, and shape the
    whole matrix's."""
    with torch.no_grad():
        for piece in pieces_of(model):
            piece.take(source(piece.key, piece.full_shape).to(piece.tensor.device, torch.float32))


def init_source(seed: int) -> Callable[[str, Shape], torch.Tensor]:
    """A function (key, shape) -> initial values of a whole LoRA matrix, as in PEFT, drawn from the
    seed and the key, so that they do not depend on the parallel layout.

    For linears, A is uniform within 1 / sqrt(inputs) and B is zero; for embeddings, A is zero and B
    normal.
    """

    def draw(key: str, shape: Shape) -> torch.Tensor:
        full = torch.zeros(shape, device="cpu")
        generator = generator_of(seed, key)
        if key.endswith("lora_A.weight"):
            return full.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
        if key.endswith("lora_embedding_B"):
            full.normal_(generator=generator)
        return full

    return draw


# -- adapters of a model


def adapters_of(model: Any) -> list[Adapter]:
    """The adapter modules on this rank, in the model's order."""
    return [m for chunk in host_of(model).chunks for m in chunk.modules() if isinstance(m, Adapter)]


def pieces_of(model: Any) -> Iterator[Piece]:
    """Yield this rank's shard of each LoRA matrix, as a Piece."""
    return itertools.chain.from_iterable(adapter.pieces for adapter in adapters_of(model))


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[Any]:
    """Context in which the adapters have no effect. The model then computes as its base does,
    unless whole weights (modules_to_save) are trained too. DPO uses it for the reference model.
    """
    adapters = adapters_of(model)
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield model
    finally:
        for adapter in adapters:
            adapter.enabled = True


# -- checkpoints


def sharded_state(chunk: Any) -> dict[str, Any]:
    """The weights that a LoRA run trains, for distributed checkpoints: {name in the chunk:
    megatron's ShardedTensor, or for a fused weight a factory of several}. These are the LoRA
    matrices and the weights trained whole (modules_to_save). chunk: the model's part in a (virtual)
    pipeline stage. The keys in the checkpoint are names in the whole model, so that they load in
    other parallel layouts."""
    state = {
        name: tensor
        for name, tensor in chunk.sharded_state_dict().items()
        if ".lora." not in name and getattr(getattr(tensor, "data", None), "requires_grad", False)
    }
    for path, adapter in chunk.named_modules():
        if not isinstance(adapter, Adapter):
            continue
        template, layer = chunk.global_name(path.removesuffix(".lora"))
        module = template.format(layer)
        replica = parallel.replica_group(adapter.is_expert).rank()
        for name, parameter in adapter.named_parameters():
            # (axis, this rank's index along it, number of shards)
            cuts = [(0, adapter.ep.rank(), adapter.ep.size())] if adapter.is_expert else []
            axis, real = adapter.cuts[name]
            copy = adapter.group.rank()
            if axis is not None:
                cuts.append((len(cuts) + axis, copy, adapter.tp))
                copy = 0
            state[f"{path}.{name}"] = ShardedTensor.from_rank_offsets(
                f"{module}.{name}",
                parameter,
                *cuts,
                replica_id=(0, copy, replica),
                allow_shape_mismatch=real is not None,
            )
    return state


def _row_order(parts: list[int], groups: int) -> torch.Tensor | None:
    """Row permutation int64 [rows] from Hugging Face's order to megatron's, or None for a single
    part, which needs none.

    Hugging Face stores q, k and v (or other parts) one after another. megatron interleaves: for
    each of `groups` head groups, its share of every part. parts: number of rows of each part.
    """
    if len(parts) == 1:
        return None
    rows = torch.arange(sum(parts)).split(parts)
    return torch.cat([part.view(groups, -1) for part in rows], 1).flatten()
