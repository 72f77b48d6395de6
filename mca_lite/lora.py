"""LoRA on a model: modules with adapters, their first values, their part of a checkpoint.

`model` is VirtualModels or a transformers model everywhere below; a host (host_of) hides the
difference.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import parallel
from .args_rules import is_saved
from .errors import Judge
from .families import rows_of, values_of
from .families_rows import Row
from .lora_layers import (
    Adapter,
    LoraAdapter,
    LoraEmbedding,
    LoraExperts,
    LoraSpec,
    Names,
    Piece,
    attach,
    in_rows,
)
from .mcore import ShardedTensor, mpu
from .model_config import McaModelConfig
from .model_moe import Experts
from .part_lora_rules import (
    check_on_megatron,
    check_on_torch,
    check_saved,
    check_single_experts,
    resolve_targets,
)
from .weights_convert import (
    VOCABULARY,
    fill,
    in_layer_order,
    iter_hf_tensors,
    num_groups,
    own_parameters,
    row_order,
    row_parts,
    row_sizes,
    stacked,
)
from .weights_files import NamedTensors, Shape, generator_of, original_of

# -- sites of adapters


class Candidate(NamedTuple):
    """A Hugging Face module that supports an adapter, anywhere in the model."""

    hf: str
    mca: str  # megatron's module with it, "" if the family is not in the table
    in_all: bool  # True if lora_target: all means it


class Weight(NamedTuple):
    """A tensor of the model, or the tensors of a module: a candidate for modules_to_save."""

    key: Any  # of the host
    modules: tuple[str, ...]  # Hugging Face's, trained together
    is_expert: bool = False
    is_tied: bool = False  # an embedding or a head that are one matrix


class Site(NamedTuple):
    """A place on this rank for an adapter: kind(spec, names, **arguments)."""

    module: torch.nn.Module
    names: Names  # of each projection, its Hugging Face modules on this rank
    kind: type[Adapter]
    arguments: dict[str, Any]
    way: str = "beside"  # of lora_layers.attach


def host_of(model) -> "MegatronHost | TorchHost":
    """The host of VirtualModels, of a McaModelConfig or of a transformers model."""
    is_megatron = isinstance(model, torch.nn.ModuleList | McaModelConfig)
    return MegatronHost(model) if is_megatron else TorchHost(model)


def module_of(name: str) -> str:
    """The module of a weight, by its name."""
    return name.rsplit(".", 1)[0]


def modules_of(row: Row, layer: int | None) -> tuple[str, ...]:
    """The Hugging Face modules of a row."""
    return tuple(module_of(name.format(layer)) for name in row.hf)


def _is_router(row: Row) -> bool:
    return row.mca.endswith(".mlp.router.weight")


def _candidates(config) -> Iterator[Candidate]:
    """Candidates of a model in the table. config: as for weights_convert.in_layer_order."""
    for row, layer in in_layer_order(config):
        if row.is_linear:
            in_all = row.mca not in VOCABULARY and not _is_router(row)
            mca = module_of(row.mca.format(layer))
            yield from (Candidate(module, mca, in_all) for module in modules_of(row, layer))


def _expert_names(rows: Iterable[Row], layer: int) -> Names:
    """For gate, up and down the module of each expert of a layer."""
    # the rows of gate and up of all experts come before those of down
    linears = [row for row in rows if row.expert is not None and row.is_linear]
    of_rows = [modules_of(row, layer) for row in linears]
    half = len(of_rows) // 2
    return (*zip(*of_rows[:half], strict=True), *zip(*of_rows[half:], strict=True))


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
        self.rows = rows_of(self.config.hf_model_type, self.config)

    def candidates(self) -> list[Candidate]:
        """All modules that support an adapter, in the model's order."""
        return list(_candidates(self.config))

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

    def check(self, spec: LoraSpec, candidates: list[Candidate], judge: Judge) -> None:
        """Refuse unsupported adapters."""
        check_on_megatron(spec, self.config, self.rows, candidates, judge)

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

    def sites(self) -> Iterator[Site]:
        """The places for adapters on this rank."""
        rows = {module_of(row.mca): row for row in self.rows if row.is_linear}
        for chunk in self.chunks:
            for path, module in list(chunk.named_modules()):
                name, layer = chunk.global_name(path)
                if isinstance(module, Experts):
                    yield self._experts(module, layer)
                elif name in rows:
                    yield self._linear(module, rows[name], layer)

    def _linear(self, module, row: Row, layer: int | None) -> Site:
        """The site of a linear, the embedding or the head."""
        config = self.config
        tp = config.tensor_model_parallel_size
        names = tuple((name,) for name in modules_of(row, layer))
        arguments: dict[str, Any] = dict(
            group=mpu.get_tensor_model_parallel_group(),
            sequence_parallel=config.sequence_parallel,
            device=parallel.device(),
        )
        if row.mca in VOCABULARY:  # a tied head has no weight
            out_size, in_size = config.padded_vocab_size // tp, config.hidden_size
            arguments["vocab_size"] = config.vocab_size
        else:
            out_size, in_size = module.weight.shape
        widths = [size // tp for size in row_sizes(row, out_size * tp, config)]
        arguments |= dict(in_size=in_size, widths=widths)
        if row.mca == VOCABULARY[0]:
            arguments["padding_idx"] = config.padding_idx
            return Site(module, names, LoraEmbedding, arguments)
        if row.kind.startswith(("qk", "delta")):
            groups = num_groups(row, config)
            arguments["groups"] = groups // tp
            parts = row_parts(row, out_size * tp, config)
            arguments["orders"] = [row_order(of_one, groups) for of_one in parts]
        way = "inside" if _is_router(row) else "beside"
        return Site(module, names, LoraAdapter, arguments | dict(cut=row.axis), way)

    def _experts(self, module: Experts, layer: int) -> Site:
        n, hidden_size, columns = module.fc2.shape
        first = n * module.ep_group.rank()
        names = tuple(modules[first : first + n] for modules in _expert_names(self.rows, layer))
        arguments = dict(
            hidden_size=hidden_size,
            columns=columns,
            device=parallel.device(),
            ep=module.ep_group,
            group=module.etp_group,
        )
        return Site(module, names, LoraExperts, arguments, "inside")


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

    def candidates(self) -> list[Candidate]:
        """All modules that support an adapter: those of the table, else the linears."""
        if self.fields:
            return list(_candidates(self.fields))
        return [
            Candidate(name, "", isinstance(module, torch.nn.Linear) and module is not self.head)
            for name, module in self.linears.items()
        ]

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

    def check(self, spec: LoraSpec, candidates: list[Candidate], judge: Judge) -> None:
        """Refuse unsupported adapters."""
        check_on_torch(spec, self.linears, judge)

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

    def sites(self) -> Iterator[Site]:
        """The places for adapters; experts and routers of families in the table."""
        for name, module in self.linears.items():
            out_size, in_size = module.weight.shape
            kind = LoraAdapter
            sizes = dict(in_size=in_size, widths=[out_size], device=module.weight.device)
            if isinstance(module, torch.nn.Embedding):
                kind = LoraEmbedding
                sizes["padding_idx"] = module.padding_idx
            yield Site(module, ((name,),), kind, sizes)
        if not self.fields:
            return
        decoder = getattr(self.model.base_model, "language_model", self.model.base_model)
        for layer in filter(self.fields.is_moe_layer, range(self.fields.num_layers)):
            yield from self._mixture(decoder.layers[layer].mlp, layer)

    def _mixture(self, block: torch.nn.Module, layer: int) -> Iterator[Site]:
        """The experts and the router of a layer, mostly no linears in transformers."""
        rows = rows_of(self.fields.hf_model_type, self.fields)
        _, hidden_size, columns = in_rows(block.experts, "down_proj").shape
        device = block.experts.down_proj.device
        sizes = dict(hidden_size=hidden_size, columns=columns, device=device)
        yield Site(block.experts, _expert_names(rows, layer), LoraExperts, sizes, "merged")
        [names] = [modules_of(row, layer) for row in rows if _is_router(row)]
        if names[0] in self.linears:  # hunyuan_v1_moe's
            return
        router = block.get_submodule(names[0].rpartition(".")[2])
        out_size, in_size = router.weight.shape
        sizes = dict(in_size=in_size, widths=[out_size], device=device)
        yield Site(router, (names,), LoraAdapter, sizes, "merged")


# -- choosing and placing


def saved_keys(host, spec: LoraSpec) -> set:
    """The keys of the weights in modules_to_save. host: host_of(model)."""
    return {w.key for w in host.weights() if any(is_saved(module, spec) for module in w.modules)}


def plan(model, spec: LoraSpec, judge: Judge | None = None) -> LoraSpec:
    """The spec with the modules of its targets in a model.

    model: also a McaModelConfig, or a model on the meta device. No collectives. Unsupported
    adapters are refused: by `judge`, or without one by a ConfigError.
    """
    host = host_of(model)
    rules = judge or Judge(None)
    modules = host.candidates()
    spec = replace(spec, modules=resolve_targets(spec.targets, modules, rules))
    host.check(spec, modules, rules)
    check_single_experts(spec, modules, rules)
    check_saved(spec, host.weights(), rules)
    if judge is None:
        rules.close()
    return spec


def inject(model, spec: LoraSpec, seed: int = 42, dtype: torch.dtype = torch.float32):
    """Freeze a model and put adapters on it -> the model, with the complete spec as `lora`.

    The adapters start as in PEFT, drawn from `seed` by name: the same in every layout and on both
    backends. Call it after the weights are loaded and before McaTrainer is made. A spec from plan()
    is not planned again. dtype: of a transformers model's frozen weights. No collectives.
    ConfigError as in plan(), ValueError if the model has adapters already.
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
            attach(site.module, site.kind(spec, names, **site.arguments), site.way)
    model.lora = spec
    fill_adapters(model, init_source(seed))
    return model


def fill_adapters(model, source: Callable[[str, Shape], torch.Tensor]) -> None:
    """Fill every adapter of this rank with its part of source(key, whole shape)."""
    with torch.no_grad():
        for piece in pieces_of(model):
            piece.take(source(piece.key, piece.full_shape).to(piece.tensor.device, torch.float32))


def init_source(seed: int) -> Callable[[str, Shape], torch.Tensor]:
    """PEFT's start, by key: A uniform within 1 / sqrt(inputs), B 0; embeddings A 0, B normal."""

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


def spec_of(model) -> LoraSpec | None:
    """The spec of a model with adapters, None of one without."""
    return getattr(model, "lora", None)  # a transformers model has the attribute only from inject()


def adapters_of(model) -> list[Adapter]:
    """This rank's adapters."""
    return [m for chunk in host_of(model).chunks for m in chunk.modules() if isinstance(m, Adapter)]


def pieces_of(model) -> Iterator[Piece]:
    """This rank's parts of PEFT's matrices."""
    return itertools.chain.from_iterable(adapter.pieces for adapter in adapters_of(model))


@contextlib.contextmanager
def without_adapters(model):
    """Switch the adapters off inside the `with`: DPO takes the base model as its reference."""
    adapters = adapters_of(model)
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


# -- checkpoints


def sharded_state(chunk) -> dict[str, Any]:
    """megatron's ShardedTensors of the trained tensors of a chunk: adapters and modules_to_save.

    Adapters are stored under the names of the whole model, and load in any layout.
    """
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
            # (axis, this rank's place along it, number of places)
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


def base_sample(model) -> dict[str, list[float]]:
    """{HF weight: some of its numbers} in the files of the base, under the first adapter.

    A checkpoint of adapters keeps it, to know its base. {} without adapters, or if the base's files
    are gone. No collectives.
    """
    spec = spec_of(model)
    source = spec and original_of(spec.base_model)
    if source is not None:
        for name in map("{}.weight".format, spec.modules):
            if name in source.names():
                weight = source.read(name).flatten()
                return {name: weight[:: max(weight.numel() // 64, 1)].tolist()}
    return {}
