"""Loads Hugging Face weights into megatron's parameters and exports them, at any parallel layout.

Both directions follow the rows of the model's family (families.py). fill() reads for each
parameter of this rank the slices of the Hugging Face tensors that its row names, and only those
bytes. export_hf() walks the rows in layer order: the ranks that hold the parts of a tensor join
them, and one rank writes it.
"""

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from . import parallel
from .families import PREDICTION_LAYERS, Row, is_of_expert, rows_of
from .files import describe_error, parse_size
from .weights_files import (
    carried_tensors,
    copy_beside,
    is_unused,
    name_shards,
    original_of,
    remove_shards,
    write_hf_config,
    write_shards,
)

# Their rows are tokens: tensor parallelism may pad them
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


# -- in --------------------------------------------------------------------------------------------


def fill(models, source, only: Container[tuple[str, int | None]] | None = None) -> None:
    """Fill the parameters of this rank from `source` (see weights_files.py).

    models: VirtualModels. only: the (megatron name, layer) that are filled; None: all, and the
    source must hold the model's tensors and no others. No collectives. ValueError, on every rank,
    for a source of another model; ValueError for a tensor of another shape, or a parameter without
    a row.
    """
    config = models.config
    rows = {row.mca: row for row in rows_of(config.hf_model_type, config)}
    if config.tie_embeddings_and_output_weights:  # the last stage holds a copy of the embedding
        rows[VOCABULARY[1]] = replace(rows[VOCABULARY[0]], mca=VOCABULARY[1])
    if only is None:
        check_names(config, source.names())
    with torch.no_grad():
        for (name, layer), parameter in own_parameters(models).items():
            if only is not None and (name, layer) not in only:
                continue
            if name not in rows:
                raise ValueError(
                    f"parameter {name} of {config.hf_model_type}, shape {tuple(parameter.shape)}: "
                    "no row of the family's table fills it (families.py)"
                )
            row = rows[name]
            _check_shapes(row, layer, parameter, source, config)
            # of a tensor that nothing cuts each rank has the whole
            rank = parallel.cut_group(row.expert is not None).rank() % degree(row, config)
            value = read_part(row, layer, source, config, rank)
            assert value.shape == parameter.shape, f"{row}: {value.shape} for {parameter.shape}"
            parameter.copy_(value)


def check_names(config, names: set[str]) -> None:
    """Refuse a source that lacks a tensor of the whole model, or holds one that the model does not
    use.

    Every rank looks at all stages: all of them stop, and none waits for another in a collective.
    """
    wanted = {hf.format(layer): row for row, layer in in_layer_order(config) for hf in row.hf}
    needed = {hf.format(layer): row for row, layer in _exported(config) for hf in row.hf}
    missing = [name for name in needed if name not in names]
    if missing:
        hint = ""
        if "lm_head.weight" in missing:
            hint = "; tie_word_embeddings: true where the embedding is the head"
        if all(wanted[name].mca.startswith(PREDICTION_LAYERS) for name in missing):
            hint = "; mtp_num_layers: 0 where it has no layers for multi-token prediction"
        raise ValueError(
            f"the checkpoint lacks {len(missing)} of the {len(wanted)} tensors of a "
            f"{config.hf_model_type} model with {config.num_layers} layers, such as "
            f"{', '.join(missing[:3])}: save or download it again, or set in config.json what it "
            f"holds{hint}"
        )
    others = names - wanted.keys()
    for row in wanted.values():
        if row.mca in VOCABULARY:
            others -= set(copies_of(row, config))
    unknown = sorted(n for n in others if not is_unused(n, config.hf_config, config.mtp_num_layers))
    if unknown:
        raise ValueError(
            f"the checkpoint holds {len(unknown)} tensors that a {config.hf_model_type} model with "
            f"{config.num_layers} layers does not use here, such as {', '.join(unknown[:3])}: are "
            "model_type and num_hidden_layers in config.json right?"
        )


def _check_shapes(row: Row, layer, parameter, source, config) -> None:
    """ValueError if the row's HF tensors are not those of which this rank's parameter is a part."""
    total, *rest = _whole_shape(row, parameter.shape, config)
    if row.mca in VOCABULARY:
        total = config.vocab_size
    rows: Counter[str] = Counter()
    for part in _parts_of(row, layer, total, config):
        rows[part.name] += part.rows
    for name in rows:
        if (got := source.shape(name)) != (wanted := (rows[name], *rest)):
            hint = f" (vocab_size {config.vocab_size})" if row.mca in VOCABULARY else ""
            raise ValueError(
                f"{name} has shape {got}, and config.json{hint} asks for {wanted}, to fill "
                f"{row.mca.format(layer)} {tuple(parameter.shape)} as {row.kind}: the weights do "
                "not belong to this config.json"
            )


def degree(row: Row, config) -> int:
    """The number of ranks over which the tensor is cut."""
    if row.axis is None:
        return 1
    if row.expert is None:
        return config.tensor_model_parallel_size
    return config.expert_tensor_parallel_size


def _whole_shape(row: Row, shape: Sequence[int], config) -> list[int]:
    """The shape of the megatron tensor of which a rank's part has this one."""
    whole = list(shape)
    if row.axis is not None:
        whole[row.axis] *= degree(row, config)
    return whole


def qkv_sizes(config) -> tuple[int, int, int]:
    """Rows of a query group's queries, key and value."""
    d = config.kv_channels
    return config.num_attention_heads // config.num_query_groups * d, d, d


class _Part(NamedTuple):
    """A run of rows of a Hugging Face tensor that is a part of a megatron tensor: all of it, or of
    a fused one the gate, say."""

    name: str
    first: int
    rows: int


def _parts_of(row: Row, layer: int | None, total: int, config) -> list[_Part]:
    """What a megatron tensor of `total` rows is made of."""
    sizes = [total]
    if row.kind == "gated":
        sizes = [total // 2, total // 2]
    elif row.kind == "qkv":
        sizes = [config.num_query_groups * size for size in qkv_sizes(config)]
    names = [hf.format(layer) for hf in row.hf]
    if not row.fused:
        return [_Part(name, 0, size) for name, size in zip(names, sizes, strict=True)]
    return [_Part(names[0], sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _num_groups(row: Row, config) -> int:
    """Groups along the rows of a megatron tensor: in each lies a share of every part, one part
    after the other."""
    if row.kind == "qkv":
        return config.num_query_groups
    return degree(row, config) if row.axis == 0 else 1


def read_part(row: Row, layer, source, config, rank: int) -> torch.Tensor:
    """A rank's part of the megatron tensor of a row, in the source's dtype. Reads only the groups
    of rows that this rank touches."""
    shapes = {name: source.shape(name) for name in (hf.format(layer) for hf in row.hf)}
    tp = degree(row, config)

    def share(size: int) -> slice:
        return slice(rank * size // tp, (rank + 1) * size // tp)

    if row.axis == 1:
        [(name, shape)] = shapes.items()
        return source.read(name, columns=share(shape[1]))
    total = sum(shape[0] for shape in shapes.values())
    if row.mca in VOCABULARY:
        total = config.padded_vocab_size
    mine = share(total)
    groups = _num_groups(row, config)
    in_group = total // groups
    first = mine.start // in_group
    last = -(-mine.stop // in_group)
    pieces = []
    for part in _parts_of(row, layer, total, config):
        stored = shapes[part.name][0]
        size = part.rows // groups
        start, stop = (min(part.first + group * size, stored) for group in (first, last))
        piece = source.read(part.name, rows=slice(start, stop))
        missing = (last - first) * size - piece.shape[0]  # rows that only pad the vocabulary
        if missing:
            piece = torch.cat([piece, piece.new_zeros(missing, *piece.shape[1:])])
        pieces.append(piece.unflatten(0, (last - first, size)))
    joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return joined.flatten(0, 1)[mine.start - first * in_group : mine.stop - first * in_group]


# -- out -------------------------------------------------------------------------------------------


def vocabulary_names(config) -> set[str]:
    """The Hugging Face names of the matrices whose rows are tokens."""
    rows = rows_of(config.hf_model_type, config)
    return {name for row in rows if row.mca in VOCABULARY for name in row.hf}


def _split(row: Row, layer, full: torch.Tensor, config) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, tensor) of the parts that a whole megatron tensor consists of."""
    names = [hf.format(layer) for hf in row.hf]
    groups = _num_groups(row, config)
    sizes = [part.rows // groups for part in _parts_of(row, layer, full.shape[0], config)]
    parts = [part.flatten(0, 1) for part in full.unflatten(0, (groups, -1)).split(sizes, dim=1)]
    if row.fused:
        parts = [torch.cat(parts)]
    if row.mca in VOCABULARY:
        names += copies_of(row, config)
        parts = [full[: config.vocab_size]] * len(names)
    for name, part in zip(names, parts, strict=True):
        yield name, part.contiguous()


def iter_hf_tensors(
    models, only: Container[tuple[str, int | None]] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, CPU tensor) of the whole model, one at a time, on global rank 0; nothing on other
    ranks.

    All ranks must iterate to the end. only: the (megatron name, layer) that are wanted. A tied head
    does not come twice. Collectives: gathers over tensor-parallel and expert-tensor-parallel
    groups, sends to rank 0.
    """
    mine = own_parameters(models)
    return _written_here(models.config, mine, _locate(mine), {}, only)


class _Location(NamedTuple):
    """Where the parts of a megatron tensor are."""

    holders: tuple[int, ...]  # global ranks: each is the first of a group that has all parts of it
    shape: tuple[int, ...]  # of a part
    dtype: torch.dtype


def _written_here(
    config, mine: dict, located: dict, writers: dict, only=None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, CPU tensor) of what this rank writes. All ranks must iterate to the end.

    writers: {(megatron name, layer): global rank that writes it}; global rank 0 writes the others.
    Collectives: gathers over the group that a tensor is cut over; sends where no holder writes.
    """
    here = parallel.rank()
    for row, layer in _exported(config):
        key = (row.mca, layer)
        if only is not None and key not in only:
            continue
        holders, shape, dtype = located[key]
        writer = writers.get(key, 0)
        holder = writer if writer in holders else holders[0]
        group = parallel.cut_group(row.expert is not None)
        full = None
        if holder in dist.get_process_group_ranks(group):
            full = parallel.whole(mine[key].detach(), row.axis, group)
            if here == holder != writer:
                parallel.exchange({writer: full.contiguous()}, {})
        if here != writer:
            continue
        if here != holder:
            size = _whole_shape(row, shape, config)
            full = torch.empty(size, dtype=dtype, device=parallel.device())
            parallel.exchange({}, {holder: full})
        for name, tensor in _split(row, layer, full, config):
            yield name, tensor.to("cpu", copy=True)


def _writers(config, located: dict, max_shard_size) -> dict:
    """{(megatron name, layer): the holder that writes it}: each holder writes a run of what it
    holds, in layer order. {} where the model fits one file, or no other rank could write."""
    size = 0
    shares = dict[tuple, list]()
    for row, layer in _exported(config):
        key = (row.mca, layer)
        holders, shape, dtype = located[key]
        size += math.prod(_whole_shape(row, shape, config)) * dtype.itemsize
        shares.setdefault((holders, row.expert is not None), []).append(key)
    has_others = parallel.world_size() > config.tensor_model_parallel_size
    if not has_others or size <= parse_size(max_shard_size):
        return {}
    return {
        key: holders[i * len(holders) // len(keys)]
        for (holders, _), keys in shares.items()
        for i, key in enumerate(keys)
    }


def own_parameters(models) -> dict:
    """{(megatron name with {}, layer): parameter} of this rank."""
    names = (named for chunk in models for named in chunk.global_parameter_names())
    return {(name, layer): parameter for name, layer, parameter in names}


def _exported(config) -> Iterator[tuple[Row, int | None]]:
    """What an export holds, in layer order: everything but a tied head."""
    tied = config.tie_embeddings_and_output_weights
    for row, layer in in_layer_order(config):
        if not (tied and row.mca == "output_layer.weight"):
            yield row, layer


def _locate(mine: dict) -> dict:
    """{(megatron name, layer): _Location} of the whole model, on every rank. Collective over all
    ranks.

    A tied embedding lies on two pipeline stages: the first one counts as its holder.
    """
    told = []
    located: dict[tuple[str, int | None], _Location] = {}
    for key, parameter in mine.items():
        of_expert = is_of_expert(key[0])
        replicas = parallel.replica_group(of_expert)
        if parallel.cut_group(of_expert).rank() == replicas.rank() == 0:
            holders = tuple(dist.get_process_group_ranks(replicas))
            told.append((key, _Location(holders, tuple(parameter.shape), parameter.dtype)))
    for theirs in parallel.gather(told):
        for key, location in theirs:
            located.setdefault(key, location)
    return located


def in_layer_order(config) -> Iterator[tuple[Row, int | None]]:
    """(row, layer) of the whole model: the embedding, layer after layer, then the final norm and
    the head.

    config: McaModelConfig, or anything with hf_model_type, num_layers, mtp_num_layers,
    is_moe_layer() and the fields that rows ask for.
    """
    rows = rows_of(config.hf_model_type, config)
    layered = [row for row in rows if "{}" in row.mca]
    first = rows.index(layered[0])
    yield from ((row, None) for row in rows[:first])
    for layer in range(config.num_layers + (config.mtp_num_layers or 0)):
        ahead = layer >= config.num_layers
        is_moe = config.is_moe_layer(layer)
        here = (row for row in layered if row.mca.startswith(PREDICTION_LAYERS) == ahead)
        yield from ((row, layer) for row in here if row.is_in(is_moe))
    yield from ((row, None) for row in rows[first:] if "{}" not in row.mca)


def export_hf(
    models,
    save_directory: str | os.PathLike,
    max_shard_size: str | int = "5GB",
    change: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    beside: bool = True,
) -> list[str]:
    """Write a Hugging Face checkpoint: config.json and safetensors -> the file names, on global
    rank 0 ([] elsewhere).

    Global rank 0 writes what fits one file; of a larger model every pipeline stage and
    data-parallel rank writes a share, into a folder that all of them share. change: applied to each
    (HF name, tensor); global rank 0 writes alone then. Tensors of the source that the model does
    not read are copied; beside: generation_config.json and the source's code too. Host memory of a
    writer: one shard. All ranks must call it. Collectives: those of iter_hf_tensors. OSError, on
    every rank, if any rank cannot write.
    """
    config = models.config
    mine = own_parameters(models)
    located = _locate(mine)
    writers = _writers(config, located, max_shard_size) if change is None else {}
    tensors = _written_here(config, mine, located, writers)
    facts = (config.hf_config, config.name_or_path, config.params_dtype, config.mtp_num_layers)
    return write_model(tensors, save_directory, max_shard_size, *facts, change, beside)


def write_model(
    tensors: Iterator[tuple[str, torch.Tensor]],
    save_directory: str | os.PathLike,
    max_shard_size: str | int,
    hf_config: dict,
    source: str | None,
    dtype: torch.dtype,
    num_trained: int | None = 0,
    change: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    beside: bool = True,
) -> list[str]:
    """Write the (HF name, CPU tensor) of all ranks, each its own, as export_hf() does -> the file
    names, on global rank 0.

    source: the model that this one was. num_trained: of its layers for multi-token prediction.
    Collective over all ranks. OSError, on every rank, if any rank cannot write.
    """
    folder = Path(save_directory)
    written = tensors
    if change is not None:
        written = ((name, change(name, tensor)) for name, tensor in tensors)
    if parallel.is_main():
        written = itertools.chain(written, carried_tensors(source, hf_config, num_trained))
    parallel.on_main(lambda: folder.mkdir(parents=True, exist_ok=True), OSError)
    shards = []
    problem = None
    try:
        shards = write_shards(written, folder, max_shard_size, tag=str(parallel.rank()))
    except Exception as error:  # safetensors has its own
        problem = describe_error(error)
        for _ in tensors:  # other ranks of this rank's groups still gather and send
            pass
    answers = parallel.gather((shards, problem))
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
    if failed:
        remove_shards(folder, str(parallel.rank()))
        raise OSError(f"{folder} could not be written: {'; '.join(failed)}")

    def finish() -> list[str]:
        names = name_shards(folder, [shard for theirs, _ in answers for shard in theirs])
        names += write_hf_config(hf_config, source, folder, dtype)
        return names + (copy_beside(source, folder) if beside else [])

    names = parallel.on_main(finish, OSError)
    return names if parallel.is_main() else []


def copies_of(row: Row, config) -> list[str]:
    """Further names of the embedding or output layer, which some checkpoints repeat in each layer
    for multi-token prediction: those in the model's original, or all that there may be."""
    names = {VOCABULARY[0]: "embed_tokens", VOCABULARY[1]: "shared_head.head"}
    layers = range(config.num_layers, config.num_layers + (config.mtp_num_layers or 0))
    copies = [f"model.layers.{layer}.{names[row.mca]}.weight" for layer in layers]
    original = original_of(config.name_or_path) if copies else None
    return copies if original is None else sorted(original.names() & set(copies))
