"""Adapters on a model: which modules get them, and how they are put there, in every layout and on both backends."""

import contextlib
import difflib
import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import parallel
from .lora_experts import PROJECTIONS, LoraExperts, attach_merged, merged_experts, merged_router
from .lora_layers import Adapter, LoraAdapter, LoraEmbedding, LoraSpec, Piece, attach
from .model_families import FAMILIES, TE_ALIASES, Row, rows_of
from .weights_convert import VOCABULARY, in_layer_order, iter_hf_tensors, qkv_sizes

ALL_LINEAR, ALL_ROUTERS = ("all", "all-linear"), "all-router"


class Candidate(NamedTuple):
    """A module that can have an adapter: its names in both worlds, and whether `all` means it."""

    hf: str
    mca: str
    in_all: bool


# -- which modules -----------------------------------------------------------------------------------------------------


def candidates(config) -> list[Candidate]:
    """All modules of a megatron model, on all ranks, that can have an adapter."""
    found = []
    for row, layer in in_layer_order(config):
        if row.is_linear:
            mca = row.mca.format(layer).removesuffix(".weight")
            in_all = row.mca not in VOCABULARY and not is_router(row)
            found += [
                Candidate(name.format(layer).removesuffix(".weight"), mca, in_all)
                for name in row.hf
            ]
    return found


def torch_candidates(model) -> list[Candidate]:
    """The same of a transformers model; megatron's names only for families of the table."""
    mca, mixtures, kind = {}, [], model.config.model_type
    fields = FAMILIES[kind].values(model.config) if kind in FAMILIES else {}
    rows = rows_of(kind, SimpleNamespace(**fields)) if fields else ()
    for row in (row for row in rows if row.is_linear):
        for layer in range(model.config.num_hidden_layers) if "{}" in row.mca else (None,):
            names = [name.format(layer).removesuffix(".weight") for name in row.hf]
            ours = row.mca.format(layer).removesuffix(".weight")
            mca.update(dict.fromkeys(names, ours))
            if (is_router(row) or row.expert is not None) and fields["moe_layer_freq"][layer]:
                mixtures += [Candidate(name, ours, not is_router(row)) for name in names]
    found, head = [], model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            in_all = isinstance(module, torch.nn.Linear) and module is not head
            # what megatron-core holds otherwise than as a linear, the gate of a shared expert, is not meant by all
            found.append(Candidate(name, mca.get(name, ""), in_all and (not fields or name in mca)))
    return found + mixtures


def is_router(row: Row) -> bool:
    return row.mca.endswith(".mlp.router.weight")


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
    """The HF names of the modules that `targets` mean, in the model's order. ValueError for a target that means none.

    A target is "all", a name (q_proj, self_attn.q_proj, linear_qkv), or a pattern: *.layers.[0-3].*.q_proj, or a regular
    expression that matches a whole name, of Hugging Face or megatron.
    """
    chosen, names = set(), {c.hf for c in found}
    for target in targets:
        if target in names:
            chosen.add(target)
            continue
        meant = {c.hf for c in found if _is_meant(target, c)}
        if not meant:
            known = list(
                dict.fromkeys(
                    name.rsplit(".", 1)[-1] for c in found for name in (c.hf, c.mca) if name
                )
            )
            near = difflib.get_close_matches(target, known, n=1)
            raise ValueError(
                f"lora_target: {target!r} means no layer of this model{f', did you mean {near[0]}?' if near else ''} Set "
                f"all, some of {', '.join(known)}, or a pattern over names such as {found[-2].hf}"
            )
        chosen |= meant
    return tuple(c.hf for c in found if c.hf in chosen)


def is_saved(module: str, spec: LoraSpec) -> bool:
    """Whether modules_to_save means the HF module, by PEFT's rule: the end of its name."""
    return any(module.endswith(name) for name in spec.modules_to_save)


# -- injection ---------------------------------------------------------------------------------------------------------


def inject(models, spec: LoraSpec, seed: int = 42):
    """Freeze VirtualModels and put adapters on every chunk -> models, whose `lora` is the complete spec.

    The adapters start as in PEFT, drawn from `seed` by name: the same in every layout. Call it after the weights are there
    and before McaTrainer. No collectives. ValueError for targets that mean nothing.
    """
    if models.lora is not None:
        raise ValueError("this model has adapters already: load it anew to give it others")
    config = models.config
    spec = replace(
        spec,
        modules=resolve_targets(spec.targets, candidates(config)),
        base_model=config.name_or_path,
    )
    if config.mtp_num_layers:
        raise ValueError(
            "adapters beside layers for multi-token prediction are not built: set mtp_num_layers: 0"
        )
    _refuse_fused(config, spec)
    if config.moe_shared_expert_overlap and config.tensor_model_parallel_size > 1:
        _refuse_overlapped(config, spec)
    saved, chosen = saved_rows(config, spec), set(spec.modules)
    models.requires_grad_(False)
    for chunk in models:
        for name, layer, parameter in list(chunk.global_parameter_names()):
            if (TE_ALIASES.get(name, name), layer) in saved:
                parameter.requires_grad_(True)
        for path, row, layer in _linears(chunk):
            names = [n.format(layer).removesuffix(".weight") for n in row.hf]
            if chosen.intersection(names):
                adapter = _adapter(spec, chunk.get_submodule(path), row, layer, names, config)
                attach(chunk.get_submodule(path), adapter)
        for layer in chunk.decoder.layers:
            if config.is_moe_layer(layer.layer_number - 1):
                _adapt_experts(layer.mlp.experts, layer.layer_number - 1, spec, chosen, config)
        if chunk.pre_process and config.recompute_granularity is not None:
            chunk.embedding.register_forward_hook(_needs_grad)
    models.lora = spec
    fill(models, init_source(seed))
    return models


def _refuse_fused(config, spec: LoraSpec) -> None:
    """One A and one B of PEFT would stand for all projections of a fused tensor, which tensor parallelism cuts one by one."""
    rows = rows_of(config.hf_model_type, config)
    fused = {
        name.removesuffix(".weight").rsplit(".", 1)[-1]
        for row in rows
        if row.fused
        for name in row.hf
    }
    if meant := sorted(fused & {module.rsplit(".", 1)[-1] for module in spec.modules}):
        others = {c.hf.rsplit(".", 1)[-1] for c in candidates(config) if c.in_all} - fused
        raise ValueError(
            f"lora_target: adapters on {', '.join(meant)} of {config.hf_model_type}, which holds several projections in one "
            f"tensor, are not built: set lora_target: {', '.join(sorted(others))}, or use_mca: false"
        )


def _refuse_overlapped(config, spec: LoraSpec) -> None:
    """Beside the dispatch the linears of shared experts leave their communication to others, which adapters would miss."""
    shared = {
        n.format(i).removesuffix(".weight")
        for r, i in in_layer_order(config)
        if ".shared_" in r.mca
        for n in r.hf
    }
    if meant := sorted(shared.intersection(spec.modules)):
        raise ValueError(
            f"lora_target: adapters on shared experts ({meant[0]}) that run beside the dispatch are not built under tensor "
            "parallelism: set moe_shared_expert_overlap: false"
        )


def _needs_grad(module, args, output):
    """Recomputation gives no gradient at all to a unit without an input that needs one, and a frozen embedding's output
    is none (tensor_parallel/random.py, CheckpointFunction)."""
    return output.requires_grad_(True) if torch.is_grad_enabled() else output


def _linears(chunk) -> Iterator[tuple[str, Row, int | None]]:
    """(path in the chunk, row, layer in the whole model) of the chunk's modules that can have an adapter."""
    rows = {row.mca: row for row in rows_of(chunk.config.hf_model_type, chunk.config)}
    local = {layer.layer_number - 1: i for i, layer in enumerate(chunk.decoder.layers)}
    for name, layer, _ in list(chunk.global_parameter_names()):
        row = rows.get(name)
        if row is not None and row.is_linear and row.expert is None and name not in VOCABULARY:
            yield name.format(local.get(layer)).removesuffix(".weight"), row, layer
    if chunk.pre_process:
        yield "embedding.word_embeddings", rows[VOCABULARY[0]], None
    if chunk.post_process:  # where it is tied, it may hold no weight of its own
        yield "output_layer", rows[VOCABULARY[1]], None


def _adapter(spec, module, row: Row, layer, names, config) -> Adapter:
    """The adapter of one of megatron's linears, or of its embedding."""
    from megatron.core import parallel_state as mpu

    group, tp = mpu.get_tensor_model_parallel_group(), config.tensor_model_parallel_size
    shared = dict(group=group, sequence_parallel=config.sequence_parallel, device=parallel.device())
    mca = row.mca.format(layer).removesuffix(".weight")
    if row.mca == VOCABULARY[0]:
        scatters = module.reduce_scatter_embeddings
        sizes = (module.weight.shape[0], config.hidden_size, config.vocab_size)
        return LoraEmbedding(spec, mca, names[0], *sizes, scatters=scatters, **shared)
    groups = vocab_size = None
    if row.mca == VOCABULARY[1]:
        in_size, vocab_size, widths = (
            config.hidden_size,
            config.vocab_size,
            [config.padded_vocab_size // tp],
        )
    else:
        out_size, in_size = module.weight.shape
        widths = [out_size // len(names)] * len(names)
    if row.kind == "qkv":
        groups = config.num_query_groups // tp
        widths = [groups * size for size in qkv_sizes(config)]
    on = [name if name in spec.modules else None for name in names]
    cut = None if row.kind == "copy" else "row" if row.kind == "row" else "column"
    return LoraAdapter(
        spec, mca, on, in_size, widths, cut, groups=groups, vocab_size=vocab_size, **shared
    )


def _adapt_experts(experts, layer: int, spec: LoraSpec, chosen: set[str], config) -> None:
    """Put adapters on the experts of a layer of megatron's model where `chosen` names any of them."""
    names = expert_names(rows_of(config.hf_model_type, config), layer, chosen)
    if not names:
        return
    if spec.dropout and config.expert_tensor_parallel_size > 1:
        raise ValueError(
            f"lora_dropout {spec.dropout}: ranks that share an expert's columns would drop different inputs: set "
            "expert_tensor_parallel_size: 1 or lora_dropout: 0"
        )
    n, size, rank = experts.fc1.shape[0], experts.ep_group.size(), experts.ep_group.rank()
    mine = {projection: modules[n * rank : n * (rank + 1)] for projection, modules in names.items()}
    adapter = LoraExperts(
        spec,
        f"decoder.layers.{layer}.mlp.experts",
        mine,
        config.hidden_size,
        experts.fc2.shape[-1],
        ep=(size, rank),
        group=experts.etp_group,
        device=parallel.device(),
    )
    adapter.train(experts.training)
    experts.add_module("lora", adapter)


def expert_names(rows, layer: int, chosen: set[str]) -> dict[str, list[str]]:
    """{projection: HF module of each expert of a layer} for the projections that `chosen` names; {} where it names none.

    ValueError where it names some experts of a layer alone."""
    found: dict[str, list[str]] = {projection: [] for projection in PROJECTIONS}
    for row in rows:
        if row.expert is not None:
            of_row = PROJECTIONS[:2] if len(row.hf) == 2 else PROJECTIONS[2:]
            for projection, name in zip(of_row, row.hf, strict=True):
                found[projection].append(name.format(layer).removesuffix(".weight"))
    for modules in found.values():
        meant = chosen.intersection(modules)
        if meant and len(meant) < len(modules):
            raise ValueError(
                f"lora_target means {min(meant)} and not {min(set(modules) - meant)}: name all experts of a layer, or none"
            )
    return {
        projection: modules
        for projection, modules in found.items()
        if chosen.issuperset(modules) and modules
    }


def saved_rows(config, spec: LoraSpec) -> dict[tuple[str, int | None], Row]:
    """{(megatron name, layer): row} of what modules_to_save means. ValueError where that cannot be trained by itself."""
    found, used = {}, set()
    for row, layer in in_layer_order(config):
        modules = [name.format(layer).rsplit(".", 1)[0] for name in row.hf]
        meant = [m for m in modules if is_saved(m, spec)]
        used |= {name for name in spec.modules_to_save for m in modules if m.endswith(name)}
        if not meant:
            continue
        if row.expert is not None:
            raise ValueError(
                f"modules_to_save: {meant[0]}: experts are not trained whole, add them to lora_target"
            )
        if row.mca in VOCABULARY and config.tie_embeddings_and_output_weights:
            raise ValueError(
                f"modules_to_save: {meant[0]} of a model whose embedding is its head: PEFT would train a copy for one of "
                "the two; take it out, or add embed_tokens to lora_target"
            )
        if len(meant) < len(modules):
            raise ValueError(
                f"modules_to_save: {', '.join(meant)} is one matrix with {', '.join(set(modules) - set(meant))} here: name "
                "all of them or none"
            )
        if set(meant) & set(spec.modules):
            raise ValueError(
                f"{meant[0]} is in lora_target and in modules_to_save: take it out of one of them"
            )
        found[row.mca, layer] = row
    if missing := sorted(set(spec.modules_to_save) - used):
        raise ValueError(
            f"modules_to_save: {missing[0]!r} is the end of no module's name in this model: set some of embed_tokens, "
            "lm_head, or leave it out"
        )
    return found


def plan_torch(model, spec: LoraSpec) -> tuple[LoraSpec, list[str]]:
    """(the complete spec, the modules that are trained whole) for a transformers model, which may be on the meta device.
    ValueError for targets and modules that cannot be."""
    spec = replace(spec, modules=resolve_targets(spec.targets, torch_candidates(model)))
    modules = dict(model.named_modules())
    saved = [
        n
        for n, m in modules.items()
        if is_saved(n, spec) and any(True for _ in m.parameters(recurse=False))
    ]
    for name in spec.modules_to_save:
        if not any(module.endswith(name) for module in saved):
            raise ValueError(
                f"modules_to_save: {name!r} is the end of no module's name in this model"
            )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is head.weight and any(
        modules[name] in (embedding, head) for name in saved
    ):
        raise ValueError(
            "modules_to_save: the embedding is the head in this model, and cannot be trained as a module"
        )
    if clash := set(saved) & set(spec.modules):
        raise ValueError(
            f"{min(clash)} is in lora_target and in modules_to_save: take it out of one of them"
        )
    return spec, saved


def inject_torch(model, spec: LoraSpec, seed: int = 42, dtype: torch.dtype = torch.float32):
    """The same for a transformers model, whose frozen weights become `dtype` -> model."""
    spec, saved = plan_torch(model, replace(spec, base_model=model.name_or_path or None))
    modules = dict(model.named_modules())
    for parameter in model.requires_grad_(
        False
    ).parameters():  # not the buffers: rotary frequencies stay exact
        parameter.data = parameter.data.to(dtype)
    for name in saved:
        modules[name].float().requires_grad_(True)
    mca = {c.hf: c.mca for c in torch_candidates(model)}
    mixed = _inject_torch_mixtures(model, spec, modules)
    for name in (name for name in spec.modules if name not in mixed):
        module = modules[name]
        (out_size, in_size), device = module.weight.shape, module.weight.device
        if isinstance(module, torch.nn.Embedding):
            adapter = LoraEmbedding(
                spec, mca[name], name, out_size, in_size, out_size, device=device
            )
        else:
            adapter = LoraAdapter(spec, mca[name], [name], in_size, [out_size], device=device)
        attach(module, adapter)
    fill(model, init_source(seed))
    return model


def _inject_torch_mixtures(model, spec: LoraSpec, modules: dict) -> set[str]:
    """Adapters of a transformers model's experts and routers -> the modules, by their names in files, that have one now."""
    kind, chosen, done = model.config.model_type, set(spec.modules), set()
    fields = FAMILIES[kind].values(model.config) if kind in FAMILIES else {}
    rows = rows_of(kind, SimpleNamespace(**fields)) if fields.get("num_moe_experts") else ()
    router = next((row for row in rows if is_router(row)), None)
    for layer in (
        i for i in range(model.config.num_hidden_layers) if rows and fields["moe_layer_freq"][i]
    ):
        block = modules[f"model.layers.{layer}.mlp"]
        names = expert_names(rows, layer, chosen)
        if names:
            (_, h, f), mca = block.experts.down_proj.shape, f"decoder.layers.{layer}.mlp.experts"
            adapter = LoraExperts(spec, mca, names, h, f, device=block.experts.down_proj.device)
            attach_merged(block.experts, adapter, partial(merged_experts, block.experts, adapter))
            done.update(name for of_projection in names.values() for name in of_projection)
        gate = router.hf[0].format(layer).removesuffix(".weight")
        if gate in chosen:
            (out_size, in_size), mca = (
                block.gate.weight.shape,
                router.mca.format(layer).removesuffix(".weight"),
            )
            adapter = LoraAdapter(
                spec, mca, [gate], in_size, [out_size], device=block.gate.weight.device
            )
            attach_merged(block.gate, adapter, partial(merged_router, block.gate, adapter))
            done.add(gate)
    if done and spec.dropout:
        raise ValueError(
            f"lora_dropout {spec.dropout}: adapters of experts and routers have none on plain torch: set lora_dropout: 0 or "
            "use_mca: true"
        )
    return done


# -- what a model has --------------------------------------------------------------------------------------------------


def adapters_of(model) -> list[Adapter]:
    """This rank's adapters of VirtualModels or a transformers model."""
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, Adapter)]


def spec_of(model) -> LoraSpec | None:
    """The spec of a model with adapters, None of one without."""
    if not isinstance(model, torch.nn.Module):
        return model.lora
    return next((adapter.spec for adapter in adapters_of(model)), None)


def pieces_of(model) -> Iterator[Piece]:
    return (piece for adapter in adapters_of(model) for piece in adapter.pieces())


@contextlib.contextmanager
def without_adapters(model):
    """The base model alone, inside the `with`: what DPO takes as its reference."""
    adapters = [adapter for adapter in adapters_of(model) if adapter.enabled]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield model
    finally:
        for adapter in adapters:
            adapter.enabled = True


def extra_factors(head: torch.nn.Module, hidden: torch.Tensor):
    """(scale * A hidden of the whole sequence, B) of an output layer with an adapter, for token_losses; None without one."""
    adapter = getattr(head, "lora", None)
    return None if adapter is None or not adapter.enabled else adapter(hidden, only_low=True)


def fill(model, source: Callable[[str, tuple[int, ...]], torch.Tensor]) -> None:
    """Fill every adapter of this rank with its part of source(key, whole shape)."""
    with torch.no_grad():
        for piece in pieces_of(model):
            piece.take(source(piece.key, piece.full_shape).to(piece.tensor.device, torch.float32))


def init_source(seed: int) -> Callable[[str, tuple[int, ...]], torch.Tensor]:
    """PEFT's start: A uniform within 1 / sqrt(inputs), B zero; of embeddings A zero, B normal. Drawn by key."""

    def draw(key: str, shape: tuple[int, ...]) -> torch.Tensor:
        digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        full = torch.zeros(shape, device="cpu")
        if key.endswith("lora_A.weight"):
            return full.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
        return full.normal_(generator=generator) if key.endswith("lora_embedding_B") else full

    return draw


def sharded_state(chunk) -> dict[str, Any]:
    """megatron's ShardedTensors of a chunk's trained parameters, under their names in the chunk: adapters, whatever the
    layout, under the names of the whole model, and what modules_to_save means as megatron has it."""
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    state = {
        name: tensor
        for name, tensor in chunk.sharded_state_dict().items()
        if ".lora." not in name and getattr(getattr(tensor, "data", None), "requires_grad", False)
    }
    replica, of_experts = (
        mpu.get_data_parallel_rank(with_context_parallel=True),
        mpu.get_expert_data_parallel_rank(),
    )
    for path, adapter in chunk.named_modules():
        for name, parameter in adapter.named_parameters() if isinstance(adapter, Adapter) else ():
            axis, expert = adapter.axes[name], isinstance(adapter, LoraExperts)
            cut = [] if axis is None else [(axis + expert, adapter.rank, adapter.tp)]
            state[f"{path}.{name}"] = ShardedTensor.from_rank_offsets(
                f"{adapter.mca}.{name}",
                parameter,
                *([(0, *reversed(adapter.ep))] if expert else []),
                *cut,
                replica_id=(
                    0,
                    0 if axis is not None else adapter.rank,
                    of_experts if expert else replica,
                ),
                allow_shape_mismatch=name in adapter.padded,
            )
    return state


# -- the base, which a checkpoint of adapters does not hold ---------------------------------------------------------------


def base_sample(model) -> dict[str, list]:
    """{HF weight: [dtype, some of its numbers]} of the frozen weights under the first adapter and the last, on global rank 0,
    in every layout the same; {} elsewhere, and of a model without adapters. Collectives: those of convert.iter_hf_tensors."""
    spec = spec_of(model)
    if spec is None:
        return {}
    if isinstance(model, torch.nn.Module):
        modules = dict(model.named_modules())
        own = [name for name in spec.modules if name in modules]  # single experts are none
        found = {f"{name}.weight": modules[name].weight.detach() for name in {*own[:1], *own[-1:]}}
    else:
        ends = {f"{spec.modules[0]}.weight", f"{spec.modules[-1]}.weight"}
        rows = [
            (r.mca, layer)
            for r, layer in in_layer_order(model.config)
            if ends & {n.format(layer) for n in r.hf}
        ]
        found = {name: tensor for name, tensor in iter_hf_tensors(model, rows) if name in ends}
    if not parallel.is_main():
        return {}
    return {
        name: [
            str(weight.dtype),
            weight.flatten()[:: max(weight.numel() // 64, 1)].float().tolist(),
        ]
        for name, weight in sorted(found.items())
    }


def is_same_base(ours: dict[str, list], theirs: dict[str, list]) -> bool:
    """Whether two samples are of one base: bit for bit, or within the rounding of another dtype."""
    for name in ours.keys() & theirs.keys():
        (dtype, values), (other, others) = ours[name], theirs[name]
        share = 0.0 if dtype == other else 2**-7
        if not torch.allclose(
            torch.tensor(values), torch.tensor(others), rtol=share, atol=share * 1e-3
        ):
            return False
    return True
