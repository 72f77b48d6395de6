"""LoRA on a model: which modules get adapters, how they start, what a checkpoint holds of them.

`model` is VirtualModels or a transformers model everywhere below; lora.py says what differs
between them.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import parallel
from .args_rules import (
    check_on_megatron,
    check_on_torch,
    check_saved,
    check_single_experts,
    is_saved,
    resolve_targets,
)
from .errors import Judge
from .families import Row, rows_of, values_of
from .lora_layers import (
    PROJECTIONS,
    Adapter,
    LoraAdapter,
    LoraEmbedding,
    LoraExperts,
    LoraSpec,
    Names,
    Piece,
    attach,
    attach_beside,
    attach_merged,
)
from .mcore import ShardedTensor, mpu
from .model_config import McaModelConfig
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
from .weights_files import SafetensorsSource, generator_of, original_of

# -- where a model can have adapters


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
        config = self.config
        tp = self.config.tensor_model_parallel_size
        names = tuple((module_of(name.format(layer)),) for name in row.hf)
        group = mpu.get_tensor_model_parallel_group()
        is_parallel = config.sequence_parallel
        shared = dict(group=group, sequence_parallel=is_parallel, device=parallel.device())
        if row.mca in VOCABULARY:
            shared["vocab_size"] = config.vocab_size
        if row.mca == VOCABULARY[0]:
            shared |= dict(rows=module.weight.shape[0], hidden_size=config.hidden_size)
            shared["scatters"] = module.reduce_scatter_embeddings
            return Site(module, names, LoraEmbedding, shared)
        out_size = config.padded_vocab_size // tp
        in_size = config.hidden_size
        if row.mca != VOCABULARY[1]:
            out_size, in_size = module.weight.shape
        widths = [out_size // len(names)] * len(names)
        groups = None
        if row.kind == "qkv":
            groups = config.num_query_groups // tp
            widths = [groups * size for size in qkv_sizes(config)]
        cut = {None: None, 0: "column", 1: "row"}[row.axis]
        sizes = dict(in_size=in_size, widths=widths, cut=cut, groups=groups)
        how = attach if _is_router(row) else attach_beside
        return Site(module, names, LoraAdapter, {**sizes, **shared}, how)

    def _experts(self, module: Experts, layer: int) -> Site:
        n = module.fc1.shape[0]
        (_, hidden_size, columns) = module.fc2.shape
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
        self.model = model
        self.chunks = [model]
        self.modules = dict(model.named_modules())
        self.base_model = model.name_or_path or None
        self.embedding = model.get_input_embeddings()
        self.head = model.get_output_embeddings()
        self.is_tied = self.embedding.weight is self.head.weight
        values = values_of(model.config)
        kind = model.config.model_type
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
            kind = LoraAdapter
            sizes = dict(in_size=in_size, widths=[out_size])
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
        rows = rows_of(self.fields.hf_model_type, self.fields)
        down = block.experts.down_proj
        names = _expert_names(rows, layer)
        (_, hidden_size, columns) = down.shape
        sizes = dict(hidden_size=hidden_size, columns=columns, device=down.device)
        yield Site(block.experts, names, LoraExperts, sizes, attach_merged)
        [router] = [row.hf[0] for row in rows if _is_router(row)]
        out_size, in_size = block.gate.weight.shape
        sizes = dict(in_size=in_size, widths=[out_size], device=down.device)
        yield Site(
            block.gate, ((module_of(router.format(layer)),),), LoraAdapter, sizes, attach_merged
        )


# -- adapters on a model

# -- which modules ---------------------------------------------------------------------------------


def candidates(model) -> list[Candidate]:
    """All modules that can have an adapter. model: also a McaModelConfig, before it is built."""
    return host_of(model).candidates()


def saved_keys(host, spec: LoraSpec) -> set:
    """The keys of the weights that modules_to_save means. host: lora_sites.host_of(model)."""
    return {w.key for w in host.weights() if any(is_saved(module, spec) for module in w.modules)}


def plan(model, spec: LoraSpec, judge: Judge | None = None) -> LoraSpec:
    """The spec with the modules that its targets mean in a model.

    model: also a McaModelConfig, or a model on the meta device. No collectives. What this model
    cannot have here is refused: told to `judge`, or without one raised as ConfigError.
    """
    host = host_of(model)
    own = judge or Judge(None)
    found = host.candidates()
    modules = resolve_targets(spec.targets, found, own)
    spec = replace(spec, modules=modules)
    host.check(spec, found, own)
    check_single_experts(spec, found, own)
    check_saved(spec, host.weights(), own)
    if judge is None:
        own.close()
    return spec


# -- placing ---------------------------------------------------------------------------------------


def inject(model, spec: LoraSpec, seed: int = 42, dtype: torch.dtype = torch.float32):
    """Freeze a model and put adapters on it -> the model, whose `lora` is the complete spec.

    The adapters start as in PEFT, drawn from `seed` by name: the same in every layout and on both
    backends. Call it after the weights are loaded and before McaTrainer is made. A spec that plan()
    gave is not planned again. dtype: of a transformers model's frozen weights. No collectives.
    ConfigError as plan() says, ValueError if the model has adapters already.
    """
    if spec_of(model) is not None:
        raise ValueError("this model has adapters already: load it anew to give it others")
    host = host_of(model)
    if not spec.modules:
        spec = plan(model, spec)
    spec = replace(spec, base_model=host.base_model)
    host.freeze(saved_keys(host, spec), dtype)
    chosen = set(spec.modules)
    for site in host.sites():
        names = tuple(of_one if chosen.issuperset(of_one) else () for of_one in site.names)
        if any(names):
            site.attach(site.module, site.kind(spec, names, **site.arguments))
    model.lora = spec
    fill_adapters(model, init_source(seed))
    return model


def fill_adapters(model, source: Callable[[str, tuple[int, ...]], torch.Tensor]) -> None:
    """Fill every adapter of this rank with its part of source(key, whole shape)."""
    with torch.no_grad():
        for piece in pieces_of(model):
            piece.take(source(piece.key, piece.full_shape).to(piece.tensor.device, torch.float32))


def init_source(seed: int) -> Callable[[str, tuple[int, ...]], torch.Tensor]:
    """PEFT's start, by key: A uniform within 1 / sqrt(inputs), B 0; embeddings A 0, B normal."""

    def draw(key: str, shape: tuple[int, ...]) -> torch.Tensor:
        full = torch.zeros(shape, device="cpu")
        generator = generator_of(seed, key)
        if key.endswith("lora_A.weight"):
            return full.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
        return full.normal_(generator=generator) if key.endswith("lora_embedding_B") else full

    return draw


# -- what a model has ------------------------------------------------------------------------------


def spec_of(model) -> LoraSpec | None:
    """The spec of a model with adapters, None of one without."""
    return getattr(model, "lora", None)  # a transformers model has the attribute only from inject()


def adapters_of(model) -> list[Adapter]:
    """This rank's adapters."""
    return [m for chunk in host_of(model).chunks for m in chunk.modules() if isinstance(m, Adapter)]


def pieces_of(model) -> Iterator[Piece]:
    """This rank's parts of PEFT's matrices."""
    return (piece for adapter in adapters_of(model) for piece in adapter.pieces())


@contextlib.contextmanager
def without_adapters(model):
    """Switch the adapters off inside the `with`: DPO takes the base model as its reference."""
    adapters = [adapter for adapter in adapters_of(model) if adapter.enabled]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield model
    finally:
        for adapter in adapters:
            adapter.enabled = True


def extra_factors(head: torch.nn.Module, hidden: torch.Tensor):
    """(scale * A hidden of the whole sequence, B) of an adapted output layer, for token_losses."""
    adapter: LoraAdapter | None = getattr(head, "lora", None)
    if adapter is None or not adapter.enabled:
        return None
    return adapter.low(hidden), adapter.lora_B_0


# -- checkpoints -----------------------------------------------------------------------------------


def sharded_state(chunk) -> dict[str, Any]:
    """megatron's ShardedTensors of what trains in a chunk: adapters and modules_to_save.

    Adapters are stored under the names of the whole model, and load in any layout.
    """
    state = {
        name: tensor
        for name, tensor in chunk.sharded_state_dict().items()
        if ".lora." not in name and getattr(getattr(tensor, "data", None), "requires_grad", False)
    }
    adapters = [(p, module) for p, module in chunk.named_modules() if isinstance(module, Adapter)]
    for path, adapter in adapters:
        template, layer = chunk.global_name(path.removesuffix(".lora"))
        module = template.format(layer)
        is_experts = isinstance(adapter, LoraExperts)
        replica = parallel.replica_group(is_experts).rank()
        for name, parameter in adapter.named_parameters():
            # (axis, this rank's place along it, number of places)
            cuts = [(0, adapter.ep.rank(), adapter.ep.size())] if is_experts else []
            axis = adapter.axes[name]
            if axis is not None:
                cuts.append((adapter.num_stack_axes + axis, adapter.rank, adapter.tp))
            state[f"{path}.{name}"] = ShardedTensor.from_rank_offsets(
                f"{module}.{name}",
                parameter,
                *cuts,
                replica_id=(0, adapter.rank if axis is None else 0, replica),
                allow_shape_mismatch=name in adapter.real,
            )
    return state


def base_sample(model) -> dict[str, list]:
    """{HF weight: [dtype, some of its numbers]} of the weights under the first and last adapter.

    A checkpoint of adapters keeps it, to know its base. The same in every layout, on global rank 0;
    {} elsewhere and without adapters. Collectives: those of weights_convert.iter_hf_tensors.
    """
    spec = spec_of(model)
    if spec is None:
        return {}
    host = host_of(model)
    keys = {}
    for weight in host.weights():
        for module in weight.modules:
            keys.setdefault(module, weight.key)  # a bias comes after its matrix
    # transformers has no single experts
    held = [module for module in spec.modules if module in keys]
    ends = held[:1] + held[-1:]
    names = {f"{module}.weight" for module in ends}
    sample = {}
    for name, weight in host.read({keys[module] for module in ends}):
        if name in names:
            step = max(weight.numel() // 64, 1)
            sample[name] = [str(weight.dtype), weight.flatten()[::step].float().tolist()]
    return dict(sorted(sample.items()))


def is_same_base(ours: dict[str, list], theirs: dict[str, list]) -> bool:
    """Whether two samples are of one base: bit for bit, or within the rounding of another dtype."""
    for name in ours.keys() & theirs.keys():
        (dtype, values), (other, others) = ours[name], theirs[name]
        share = 0.0 if dtype == other else 2**-7
        one = torch.tensor(values)
        two = torch.tensor(others)
        if not torch.allclose(one, two, rtol=share, atol=share * 1e-3):
            return False
    return True
