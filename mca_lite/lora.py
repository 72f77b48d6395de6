"""LoRA on a model: which modules get adapters, how they start, what a checkpoint holds of them.

`model` is VirtualModels or a transformers model everywhere below; lora_sites.py says what differs
between them.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from . import parallel
from .args_rules import check_saved, check_single_experts, is_saved, resolve_targets
from .args_values import Judge
from .lora_layers import Adapter, LoraAdapter, LoraExperts, LoraSpec, Piece
from .lora_sites import Candidate, host_of
from .weights_sources import generator_of

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
    host, own = host_of(model), judge or Judge(None)
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
    fill(model, init_source(seed))
    return model


def fill(model, source: Callable[[str, tuple[int, ...]], torch.Tensor]) -> None:
    """Fill every adapter of this rank with its part of source(key, whole shape)."""
    with torch.no_grad():
        for piece in pieces_of(model):
            piece.take(source(piece.key, piece.full_shape).to(piece.tensor.device, torch.float32))


def init_source(seed: int) -> Callable[[str, tuple[int, ...]], torch.Tensor]:
    """PEFT's start, by key: A uniform within 1 / sqrt(inputs), B 0; embeddings A 0, B normal."""

    def draw(key: str, shape: tuple[int, ...]) -> torch.Tensor:
        full, generator = torch.zeros(shape, device="cpu"), generator_of(seed, key)
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
    host, keys = host_of(model), {}
    for weight in host.weights():
        for module in weight.modules:
            keys.setdefault(module, weight.key)  # a bias comes after its matrix
    # transformers has no single experts
    held = [module for module in spec.modules if module in keys]
    ends = held[:1] + held[-1:]
    names, sample = {f"{module}.weight" for module in ends}, {}
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
        one, two = torch.tensor(values), torch.tensor(others)
        if not torch.allclose(one, two, rtol=share, atol=share * 1e-3):
            return False
    return True
