"""LoRA on a model: which modules get adapters, how they start, what a checkpoint holds of them.

`model` is VirtualModels or a transformers model everywhere below; lora_sites.py says what differs
between them.
"""

import contextlib
import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from .lora_layers import Adapter, LoraAdapter, LoraExperts, LoraSpec, Piece
from .lora_sites import Candidate, Weight, host_of
from .weights_sources import generator_of

ALL_LINEAR, ALL_ROUTERS = ("all", "all-linear"), "all-router"

# -- which modules ---------------------------------------------------------------------------------


def candidates(model) -> list[Candidate]:
    """All modules that can have an adapter. model: also a McaModelConfig, before it is built."""
    return host_of(model).candidates()


def _is_meant(target: str, candidate: Candidate) -> bool:
    if target in ALL_LINEAR:
        return candidate.in_all
    if target == ALL_ROUTERS:
        return candidate.mca.endswith(".mlp.router")
    for name in filter(None, (candidate.hf, candidate.mca)):
        if name == target or name.endswith("." + target) or fnmatch.fnmatchcase(name, target):
            return True
        with contextlib.suppress(re.error):
            if re.fullmatch(target, name):
                return True
    return False


def resolve_targets(targets: Iterable[str], found: list[Candidate]) -> tuple[str, ...]:
    """The HF names of the modules that `targets` mean, in the model's order.

    A target is "all", a name (q_proj, self_attn.q_proj, linear_qkv), or a pattern:
    *.layers.[0-3].*.q_proj, or a regular expression that matches a whole name, of Hugging Face or
    megatron. ValueError for a target that means no module.
    """
    chosen, names = set(), {c.hf for c in found}
    for target in targets:
        meant = {target} if target in names else {c.hf for c in found if _is_meant(target, c)}
        if not meant:
            ends = (name.rsplit(".", 1)[-1] for c in found for name in (c.hf, c.mca) if name)
            known = list(dict.fromkeys(ends))
            near = difflib.get_close_matches(target, known, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"lora_target: {target!r} means no layer of this model{hint} Set all, some of "
                f"{', '.join(known)}, or a pattern over names such as {found[-2].hf}"
            )
        chosen |= meant
    return tuple(c.hf for c in found if c.hf in chosen)


def is_saved(module: str, spec: LoraSpec) -> bool:
    """Whether modules_to_save means the HF module, by PEFT's rule: the end of its name."""
    return any(module.endswith(name) for name in spec.modules_to_save)


def saved_weights(model, spec: LoraSpec) -> list[Weight]:
    """The weights that modules_to_save means. ValueError where one cannot be trained by itself."""
    if not spec.modules_to_save:
        return []
    found, unused = [], set(spec.modules_to_save)
    for weight in host_of(model).weights():
        meant = [module for module in weight.modules if is_saved(module, spec)]
        unused -= {name for name in unused for module in meant if module.endswith(name)}
        if meant:
            _check_saved(weight, meant, spec)
            found.append(weight)
    if unused:
        raise ValueError(
            f"modules_to_save: {min(unused)!r} is the end of no module's name in this model: set "
            "some of embed_tokens, lm_head, or leave it out"
        )
    return found


def _check_saved(weight: Weight, meant: list[str], spec: LoraSpec) -> None:
    if weight.is_expert:
        raise ValueError(
            f"modules_to_save: {meant[0]}: experts are not trained whole, add them to lora_target"
        )
    if weight.is_tied:
        raise ValueError(
            f"modules_to_save: {meant[0]} of a model whose embedding is its head: PEFT would train "
            "a copy for one of the two; take it out, or add embed_tokens to lora_target"
        )
    if others := set(weight.modules) - set(meant):
        raise ValueError(
            f"modules_to_save: {', '.join(meant)} is one matrix with {', '.join(sorted(others))} "
            "here: name all of them or none"
        )
    if set(meant) & set(spec.modules):
        raise ValueError(
            f"{meant[0]} is in lora_target and in modules_to_save: take it out of one of them"
        )


def _refuse_single_experts(spec: LoraSpec, found: list[Candidate]) -> None:
    """ValueError where targets mean some experts of a layer and not the others."""
    chosen, projections = set(spec.modules), {}
    for candidate in found:
        name = re.sub(r"\.experts\.\d+\.", ".experts.", candidate.hf)
        projections.setdefault(name, set()).add(candidate.hf)
    for modules in projections.values():
        meant = modules & chosen
        if meant and meant != modules:
            raise ValueError(
                f"lora_target means {min(meant)} and not {min(modules - meant)}: name all experts "
                "of a layer, or none"
            )


def plan(model, spec: LoraSpec) -> LoraSpec:
    """The spec with the modules that its targets mean in a model.

    model: also a McaModelConfig, or a model on the meta device. No collectives. ValueError for
    targets that mean nothing, and for adapters that this model cannot have here.
    """
    host = host_of(model)
    found = host.candidates()
    modules = resolve_targets(spec.targets, found)
    spec = replace(spec, modules=modules, base_model=host.base_model)
    host.check(spec)
    _refuse_single_experts(spec, found)
    saved_weights(model, spec)
    return spec


# -- placing ---------------------------------------------------------------------------------------


def inject(model, spec: LoraSpec, seed: int = 42, dtype: torch.dtype = torch.float32):
    """Freeze a model and put adapters on it -> the model, whose `lora` is the complete spec.

    The adapters start as in PEFT, drawn from `seed` by name: the same in every layout and on both
    backends. Call it after the weights are loaded and before McaTrainer is made. dtype: of a
    transformers model's frozen weights. No collectives. ValueError as plan() says, or if the model
    has adapters already.
    """
    if spec_of(model) is not None:
        raise ValueError("this model has adapters already: load it anew to give it others")
    spec, host = plan(model, spec), host_of(model)
    host.freeze({weight.key for weight in saved_weights(model, spec)}, dtype)
    chosen = set(spec.modules)
    for site in host.sites():
        names = tuple(of_one if chosen.issuperset(of_one) else () for of_one in site.names)
        if any(names):
            adapter = site.kind(spec, site.mca, names, device=site.device, **site.sizes)
            site.attach(site.module, adapter)
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
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    state = {
        name: tensor
        for name, tensor in chunk.sharded_state_dict().items()
        if ".lora." not in name and getattr(getattr(tensor, "data", None), "requires_grad", False)
    }
    of_dense = mpu.get_data_parallel_rank(with_context_parallel=True)
    of_experts = mpu.get_expert_data_parallel_rank()
    adapters = [(p, module) for p, module in chunk.named_modules() if isinstance(module, Adapter)]
    for path, adapter in adapters:
        is_experts, replica = isinstance(adapter, LoraExperts), of_dense
        offsets = []  # (axis, this rank's place along it, number of places)
        if is_experts:
            offsets, replica = [(0, adapter.ep.rank(), adapter.ep.size())], of_experts
        for name, parameter in adapter.named_parameters():
            axis, cuts, copy = adapter.axes[name], [], adapter.rank  # copy: of a whole matrix
            if axis is not None:
                cuts, copy = [(adapter.num_stack_axes + axis, adapter.rank, adapter.tp)], 0
            state[f"{path}.{name}"] = ShardedTensor.from_rank_offsets(
                f"{adapter.mca}.{name}",
                parameter,
                *offsets,
                *cuts,
                replica_id=(0, copy, replica),
                allow_shape_mismatch=name in adapter.padded,
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
    held = [
        module for module in spec.modules if module in keys
    ]  # transformers has no single experts
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
