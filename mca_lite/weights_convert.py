"""Hugging Face weights in and out: runs the families' table both ways, streamed, at any layout.

In: `fill` walks this rank's parameters; for each it reads the slices of the HF tensors that its row names, and only
those bytes. Out: `export_hf` walks the table in layer order; the ranks that hold a tensor join it, the main rank
writes it.
"""

import contextlib
import itertools
import math
import os
import re
import warnings
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core import parallel_state as mpu

from . import parallel
from .constants import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from .model_families import (
    PREDICTION_LAYERS,
    TE_ALIASES,
    UNUSED_TENSORS,
    Row,
    is_of_expert,
    rows_of,
)
from .weights_files import name_shards, parse_size, write_hf_config, write_safetensors, write_shards
from .weights_sources import InitSource, SafetensorsSource

VOCABULARY = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
)  # their rows are tokens: tp may pad them


class _Parts:
    """A source that has the parts of one tensor, stacked along its rows, as tensors named 0, 1, ...: what a fused row reads."""

    def __init__(self, source, name: str, sizes: list[int]):
        self.source, self.name, self.sizes = source, name, sizes

    def shape(self, part: int) -> tuple[int, ...]:
        return (self.sizes[part], *self.source.shape(self.name)[1:])

    def read(self, part: int, rows: slice) -> torch.Tensor:
        start = sum(self.sizes[:part])
        return self.source.read(self.name, rows=slice(start + rows.start, start + rows.stop))


# -- in ----------------------------------------------------------------------------------------------------------------


def fill(models, source: SafetensorsSource | InitSource) -> None:
    """Fill every parameter of this rank from `source`, each exactly once.

    models: VirtualModels. No collectives. ValueError names a parameter that no row fills, a tensor that the source
    lacks (on every rank, whichever needs it), one of another shape, with the row and both shapes, or one that no row
    knows.
    """
    config = models.config
    rows = _rows_by_name(config)
    _check_names(config, source.names())
    filled = set()
    with torch.no_grad():
        for chunk in models:
            for name, layer, parameter in chunk.global_parameter_names():
                row = rows.get(TE_ALIASES.get(name, name))
                if row is None:
                    raise ValueError(
                        f"parameter {name} of {config.hf_model_type}, shape {tuple(parameter.shape)}: no row of the "
                        f"family's table fills it (model_families.py)"
                    )
                assert (id(chunk), name, layer) not in filled, (
                    f"{name} of layer {layer} would be filled twice"
                )
                filled.add((id(chunk), name, layer))
                copy_in(row, layer, parameter, source, config)


def copy_in(row: Row, layer: int | None, parameter, source, config) -> None:
    """Fill one parameter of this rank from the source's tensors that its row names. ValueError for other shapes."""
    _check_shapes(row, layer, parameter, source, config)
    value = _merge(row, layer, source, config)
    assert value.shape == parameter.shape, f"{row} gives {value.shape} for {parameter.shape}"
    parameter.copy_(value)


def _rows_by_name(config) -> dict[str, Row]:
    rows = {row.mca: row for row in rows_of(config.hf_model_type, config)}
    if config.tie_embeddings_and_output_weights:  # the last stage holds a copy of the embedding
        rows["output_layer.weight"] = Row(
            "output_layer.weight", rows["embedding.word_embeddings.weight"].hf, "column"
        )
    return rows


def _check_names(config, names: set[str]) -> None:
    """Refuse a source that lacks a tensor of the whole model, or holds one that the model does not use.

    Every rank looks at all stages: all of them stop, and none waits for another in a collective.
    """
    wanted = {hf.format(layer): row for row, layer in in_layer_order(config) for hf in row.hf}
    tied = config.tie_embeddings_and_output_weights
    missing = [
        n
        for n, row in wanted.items()
        if n not in names and not (tied and row.mca == "output_layer.weight")
    ]
    if missing:
        hint = (
            "; tie_word_embeddings: true where the embedding is the head"
            if "lm_head.weight" in missing
            else ""
        )
        if all(wanted[name].mca.startswith(PREDICTION_LAYERS) for name in missing):
            hint = "; mtp_num_layers: 0 where it has no layers for multi-token prediction"
        raise ValueError(
            f"the checkpoint lacks {len(missing)} of the {len(wanted)} tensors of a {config.hf_model_type} model with "
            f"{config.num_layers} layers, such as {', '.join(missing[:3])}: save or download it again, or set in "
            f"config.json what it holds{hint}"
        )
    copies = {
        name for row in wanted.values() if row.mca in VOCABULARY for name in copies_of(row, config)
    }
    others = names - wanted.keys() - copies
    unknown = sorted(n for n in others if not is_unused(n, config.hf_config, config.mtp_num_layers))
    if unknown:
        raise ValueError(
            f"the checkpoint holds {len(unknown)} tensors that a {config.hf_model_type} model with {config.num_layers} "
            f"layers does not use here, such as {', '.join(unknown[:3])}: are model_type and num_hidden_layers in "
            "config.json right?"
        )


def _check_shapes(row: Row, layer, parameter, source, config) -> None:
    """The row's HF tensors must have, whole, the shapes of which this rank's parameter is a part."""
    (rows, *rest), tp = parameter.shape, _degree(row, config)
    expected = {
        "copy": [(rows, *rest)],
        "row": [(rows, *(size * tp for size in rest))],
        "column": [(config.vocab_size if row.mca in VOCABULARY else rows * tp, *rest)],
        "gated": [(rows * tp // row.num_parts, *rest)] * row.num_parts,
        "qkv": [(config.num_query_groups * size, *rest) for size in qkv_sizes(config)],
    }[row.kind]
    if row.fused:
        expected = [(sum(part[0] for part in expected), *rest)]
    for name, wanted in zip((hf.format(layer) for hf in row.hf), expected, strict=True):
        if (got := source.shape(name)) != wanted:
            hint = f" (vocab_size {config.vocab_size})" if row.mca in VOCABULARY else ""
            raise ValueError(
                f"{name} has shape {got}, and config.json{hint} asks for {wanted}, to fill {row.mca.format(layer)} "
                f"{tuple(parameter.shape)} as {row.kind}: the weights do not belong to this config.json"
            )


def _degree(row: Row, config) -> int:
    """Over how many ranks the tensor is cut."""
    return (
        config.tensor_model_parallel_size
        if row.expert is None
        else config.expert_tensor_parallel_size
    )


def _cut_group(row: Row):
    """The ranks over which it is cut."""
    return (
        mpu.get_tensor_model_parallel_group()
        if row.expert is None
        else mpu.get_expert_tensor_parallel_group()
    )


def _merge(row: Row, layer, source, config) -> torch.Tensor:
    """This rank's part of the megatron tensor that the row's HF tensors make, in the source's dtype."""
    names = [hf.format(layer) for hf in row.hf]
    tp, rank = _degree(row, config), _cut_group(row).rank()
    if row.fused:
        size = source.shape(names[0])[0]
        groups = config.num_query_groups
        sizes = (
            [groups * n for n in qkv_sizes(config)]
            if row.kind == "qkv"
            else [size // row.num_parts] * row.num_parts
        )
        source, names = _Parts(source, names[0], sizes), range(row.num_parts)
    if row.kind == "copy":
        return source.read(names[0])
    if row.kind == "row":
        return source.read(names[0], columns=_part(source.shape(names[0])[1], rank, tp))
    if row.kind == "gated":
        return torch.cat([source.read(n, rows=_part(source.shape(n)[0], rank, tp)) for n in names])
    if row.kind == "qkv":
        return _read_qkv(names, source, config, rank, tp)
    real = source.shape(names[0])[0]
    padded = config.padded_vocab_size if row.mca in VOCABULARY else real
    part = _part(padded, rank, tp)
    value = source.read(names[0], rows=slice(min(part.start, real), min(part.stop, real)))
    missing = part.stop - part.start - value.shape[0]  # rows that only pad the vocabulary
    return torch.cat([value, value.new_zeros(missing, *value.shape[1:])]) if missing else value


def _part(size: int, rank: int, parts: int) -> slice:
    if size % parts:
        raise ValueError(f"a dimension of {size} cannot be cut for {parts} tensor parallel ranks")
    return slice(rank * size // parts, (rank + 1) * size // parts)


def qkv_sizes(config) -> tuple[int, int, int]:
    """Rows of a query group's queries, key and value."""
    d = config.kv_channels
    return config.num_attention_heads // config.num_query_groups * d, d, d


def _read_qkv(names, source, config, rank, tp) -> torch.Tensor:
    """Rows [queries of the group, key, value] group by group; only the groups that this rank touches are read."""
    sizes = qkv_sizes(config)
    per_group = sum(sizes)
    part = _part(config.num_query_groups * per_group, rank, tp)
    first, last = part.start // per_group, -(-part.stop // per_group)
    pieces = [
        source.read(name, rows=slice(first * size, last * size)).unflatten(0, (last - first, size))
        for name, size in zip(names, sizes, strict=True)
    ]
    return torch.cat(pieces, dim=1).flatten(0, 1)[
        part.start - first * per_group : part.stop - first * per_group
    ]


# -- out ---------------------------------------------------------------------------------------------------------------


def vocabulary_names(config) -> set[str]:
    """The Hugging Face names of the matrices whose rows are tokens."""
    return {
        name
        for row in rows_of(config.hf_model_type, config)
        if row.mca in VOCABULARY
        for name in row.hf
    }


def _split(row: Row, layer, full: torch.Tensor, config) -> Iterator[tuple[str, torch.Tensor]]:
    """The HF tensors, with names, that a whole megatron tensor consists of."""
    names = [hf.format(layer) for hf in row.hf]
    if row.kind == "qkv":
        parts = full.unflatten(0, (config.num_query_groups, -1)).split(qkv_sizes(config), dim=1)
        parts = [p.flatten(0, 1) for p in parts]
        yield from zip(
            names, [torch.cat(parts)] if row.fused else (p.contiguous() for p in parts), strict=True
        )
    elif row.kind == "gated" and not row.fused:
        yield from zip(names, (p.contiguous() for p in full.chunk(len(names))), strict=True)
    elif row.mca in VOCABULARY:
        yield from (
            (name, full[: config.vocab_size]) for name in (names[0], *copies_of(row, config))
        )
    else:
        yield names[0], full


def _join(row: Row, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole megatron tensor from the parts of all tensor-parallel ranks."""
    if row.kind == "copy":
        return parts[0]
    if row.kind == "row":
        return torch.cat(parts, dim=1)
    if row.kind == "gated":
        halves = [p.chunk(row.num_parts) for p in parts]
        return torch.cat([half[i] for i in range(row.num_parts) for half in halves])
    return torch.cat(parts)


def iter_hf_tensors(
    models, only: Container[tuple[str, int | None]] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, CPU tensor) of the whole model, one at a time, on global rank 0; nothing on other ranks, which must
    iterate as well. only: the (megatron name, layer) that are wanted. A tied head does not come twice.
    Collectives: gathers over tensor-parallel and expert-tensor-parallel groups, sends to rank 0.
    """
    config, main, mine = models.config, parallel.is_main(), _own_parameters(models)
    owners = _owners(mine)
    for row, layer in _exported(config):
        if only is not None and (row.mca, layer) not in only:
            continue
        owner, shape, dtype = owners[row.mca, layer]
        cut, full = _cut_group(row), None
        if owner in dist.get_process_group_ranks(
            cut
        ):  # this rank has a part of what the owner gives
            full = _whole(row, mine[row.mca, layer], cut)
            if parallel.rank() == owner != 0:
                dist.send(full.contiguous(), 0)
        if main:
            if owner != 0:
                full = torch.empty(
                    _whole_shape(row, shape, cut.size()), dtype=dtype, device=parallel.device()
                )
                dist.recv(full, owner)
            yield from ((n, t.to("cpu", copy=True)) for n, t in _split(row, layer, full, config))


def _iter_own_hf_tensors(models, owners: dict) -> Iterator[tuple[str, torch.Tensor]]:
    """The same for the part of the model that this rank's writer takes: of its pipeline stage's tensors, in layer order, a
    run for each data-parallel rank; then likewise of its experts, for each expert-data-parallel rank. The first rank of each
    group over which a tensor is cut gets it; the others must iterate."""
    mine = _own_parameters(models)
    for experts, replicas in (
        (False, mpu.get_data_parallel_group(with_context_parallel=True)),
        (True, mpu.get_expert_data_parallel_group()),
    ):
        items = [
            (row, layer)
            for row, layer in _exported(models.config)
            if (row.mca, layer) in mine
            and (row.expert is not None) == experts
            # a tied embedding lies on two stages: its owner writes it
            and (
                experts
                or _stage_of(owners[row.mca, layer][0]) == mpu.get_pipeline_model_parallel_rank()
            )
        ]
        rank, size = replicas.rank(), replicas.size()
        for row, layer in items[rank * len(items) // size : (rank + 1) * len(items) // size]:
            cut = _cut_group(row)
            full = _whole(row, mine[row.mca, layer], cut)
            if cut.rank() == 0:
                yield from (
                    (n, t.to("cpu", copy=True)) for n, t in _split(row, layer, full, models.config)
                )


def _stage_of(rank: int) -> int:
    """The pipeline stage of a global rank: stages are runs of ranks."""
    return rank * mpu.get_pipeline_model_parallel_world_size() // parallel.world_size()


def _own_parameters(models) -> dict:
    """{(megatron name with {}, layer): parameter} of this rank."""
    named = (item for chunk in models for item in chunk.global_parameter_names())
    return {(TE_ALIASES.get(name, name), layer): parameter for name, layer, parameter in named}


def _exported(config) -> Iterator[tuple[Row, int | None]]:
    """What an export holds, in layer order: everything but a tied head."""
    tied = config.tie_embeddings_and_output_weights
    return (
        item
        for item in in_layer_order(config)
        if not (tied and item[0].mca == "output_layer.weight")
    )


def _whole(row: Row, parameter: torch.nn.Parameter, tp_group) -> torch.Tensor:
    """The whole megatron tensor of a parameter that tensor parallelism may cut. Collective over its group."""
    part = parameter.detach()
    if tp_group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(tp_group.size())]
    dist.all_gather(parts, part.contiguous(), group=tp_group)
    return _join(row, parts)


def _whole_shape(row: Row, shape: tuple[int, ...], parts: int) -> list[int]:
    whole = list(shape)
    if row.kind != "copy":
        whole[1 if row.kind == "row" else 0] *= parts
    return whole


def _owners(mine: dict) -> dict:
    """{(row, layer): (the first global rank that holds a part, its shape, its dtype)}. Collective over all ranks."""
    dense = (
        mpu.get_tensor_model_parallel_rank()
        + mpu.get_data_parallel_rank(with_context_parallel=True)
        == 0
    )
    expert = mpu.get_expert_tensor_parallel_rank() + mpu.get_expert_data_parallel_rank() == 0
    told = {
        key: (tuple(p.shape), p.dtype)
        for key, p in mine.items()
        if (expert if is_of_expert(key[0]) else dense)
    }
    owners: dict = {}
    for rank, theirs in enumerate(parallel.gather(told)):
        for key, (shape, dtype) in theirs.items():
            owners.setdefault(key, (rank, shape, dtype))
    return owners


def in_layer_order(config) -> Iterator[tuple[Row, int | None]]:
    """(row, layer) of the whole model: what stands before the layers, the layers in turn, what stands behind them."""
    rows = rows_of(config.hf_model_type, config)
    layered = [row for row in rows if "{}" in row.mca]
    first = rows.index(layered[0])
    yield from ((row, None) for row in rows[:first])
    for layer in range(config.num_layers + (config.mtp_num_layers or 0)):
        ahead, is_moe = layer >= config.num_layers, config.is_moe_layer(layer)
        here = (row for row in layered if row.mca.startswith(PREDICTION_LAYERS) == ahead)
        yield from ((row, layer) for row in here if row.is_in(is_moe))
    yield from ((row, None) for row in rows[first:] if "{}" not in row.mca)


def export_hf(
    models,
    save_directory: str | os.PathLike,
    max_shard_size: str | int = "5GB",
    change: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
) -> list[str]:
    """Write config.json and the safetensors of the whole model -> the names of the files, on global rank 0.

    All ranks must call it. Where there is more than one file's worth, every pipeline stage and data-parallel rank writes its
    share; else global rank 0 writes. change: what becomes of each tensor, by its name; then rank 0 writes alone. Tensors of the
    source that no model reads, and code beside its config.json, are carried over. Host memory of a writer: one shard.
    """
    written, folder, config = [], Path(save_directory), models.config
    owners = _owners(_own_parameters(models))
    if change is None and _has_many_writers(config, owners, max_shard_size):
        written = _export_by_all(models, owners, folder, max_shard_size)
    else:
        tensors = iter_hf_tensors(models)
        if change is not None:
            tensors = ((name, change(name, tensor)) for name, tensor in tensors)
        if parallel.is_main():
            written = write_safetensors(
                itertools.chain(tensors, _carried(config)), folder, max_shard_size
            )
        else:
            for _ in tensors:
                pass
    if parallel.is_main():
        written += write_hf_config(
            config.hf_config, config.name_or_path, folder, config.params_dtype
        )
    parallel.barrier()
    return written


def _has_many_writers(config, owners: dict, max_shard_size) -> bool:
    """Whether several ranks can write: there are several that hold different parts, and more than one file's worth."""
    total = 0
    for row, layer in _exported(config):
        _, shape, dtype = owners[row.mca, layer]
        total += math.prod(_whole_shape(row, shape, _degree(row, config))) * dtype.itemsize
    return parallel.world_size() > config.tensor_model_parallel_size and total > parse_size(
        max_shard_size
    )


def _export_by_all(models, owners: dict, folder: Path, max_shard_size) -> list[str]:
    """Each writer puts its part into shards of its own; the main rank names them all -> the files. Collective.

    The folder is on a file system that all ranks share. OSError, on every rank, where one could not write.
    """
    parallel.on_main(lambda: folder.mkdir(parents=True, exist_ok=True), OSError)
    tensors, shards, error = _iter_own_hf_tensors(models, owners), [], None
    if parallel.is_main():
        tensors = itertools.chain(tensors, _carried(models.config))
    try:
        shards = write_shards(tensors, folder, max_shard_size, tag=str(parallel.rank()))
    except Exception as failure:  # safetensors has its own
        error = parallel.describe_error(failure)
        for _ in tensors:  # the ranks of this tensor-parallel group still gather
            pass
    answers = parallel.gather((shards, error))
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
    if failed:
        raise OSError(f"{folder} could not be written: {'; '.join(failed)}")
    return parallel.on_main(
        lambda: name_shards(folder, [shard for theirs, _ in answers for shard in theirs]), OSError
    )


def is_unused(name: str, hf_config: dict, num_trained: int | None = 0) -> bool:
    """Whether a tensor is one that no model reads: it is passed over, and carried into an export. Layers for multi-token
    prediction stand behind the others; the first num_trained of them are read."""
    if any(re.search(pattern, name) for pattern in UNUSED_TENSORS):
        return True
    layer, first = re.match(r"model\.layers\.(\d+)\.", name), hf_config.get("num_hidden_layers")
    ahead = hf_config.get("num_nextn_predict_layers") or hf_config.get("num_mtp_layers") or 0
    return bool(ahead and layer) and first + (num_trained or 0) <= int(layer[1]) < first + ahead


def copies_of(row: Row, config) -> list[str]:
    """More names of the embedding or the output layer: some files hold copies of them in each layer for multi-token
    prediction. Those of the source's files, which a model without a source is to have too."""
    names = {VOCABULARY[0]: "embed_tokens", VOCABULARY[1]: "shared_head.head"}
    layers = range(config.num_layers, config.num_layers + (config.mtp_num_layers or 0))
    copies = [f"model.layers.{layer}.{names[row.mca]}.weight" for layer in layers]
    folder = _weights_folder(config.name_or_path) if copies else None
    return (
        copies if folder is None else sorted(SafetensorsSource(str(folder)).names() & set(copies))
    )


def _weights_folder(source: str | None) -> Path | None:
    """Where a model's safetensors lie: the folder itself, or the hub's snapshot in the cache; None where there are none."""
    if source and not Path(source).is_dir():
        from huggingface_hub import snapshot_download

        with contextlib.suppress(
            Exception
        ):  # its errors are of many kinds, and all say that it is not there
            source = snapshot_download(source, local_files_only=True)
    there = source and any(
        (Path(source) / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    )
    return Path(source) if there else None


def carried_tensors(
    source: str | None, hf_config: dict, num_trained: int | None = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a source that is_unused names; nothing where it is gone, with a warning if config.json speaks of some."""
    folder = _weights_folder(source)
    if folder is None:
        next_layer = hf_config.get("num_hidden_layers", 0) + (num_trained or 0)
        if source and is_unused(f"model.layers.{next_layer}.", hf_config, num_trained):
            warnings.warn(
                f"config.json names layers for multi-token prediction that were not trained, and {source} is not there to "
                "carry them from: the export lacks them, and its config.json should not speak of them",
                stacklevel=2,
            )
        return
    tensors = SafetensorsSource(str(folder))
    unused = (name for name in sorted(tensors.names()) if is_unused(name, hf_config, num_trained))
    yield from ((name, tensors.read(name)) for name in unused)


def _carried(config) -> Iterator[tuple[str, torch.Tensor]]:
    return carried_tensors(config.name_or_path, config.hf_config, config.mtp_num_layers)
