"""Load Hugging Face weights into megatron's parameters and export them, at any parallel layout.

Both directions follow the rows of the model's family (families.py). fill() reads for each
parameter of this rank the slices of the Hugging Face tensors in its row, and only those bytes.
export_hf() walks the rows in layer order: the ranks with the parts of a tensor join them, and one
rank writes it.
"""

import itertools
import math
import os
from collections import Counter, defaultdict
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

# -- in


def fill(models, source, only: Container[tuple[str, int | None]] | None = None) -> None:
    """Fill the parameters of this rank from `source` (see weights_files.py).

    models: VirtualModels. only: (megatron name, layer) of those to fill; None: all, and the
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
            rank = parallel.cut_group(row.expert is not None).rank() % degree(row, config)
            value = read_part(row, layer, source, config, rank)
            assert value.shape == parameter.shape, f"{row}: {value.shape} for {parameter.shape}"
            parameter.copy_(value)


def check_names(config, names: set[str]) -> None:
    """Refuse a source without a tensor of the whole model, or with one that the model does not use.

    Every rank looks at all stages: all of them stop, and none waits for another in a collective.
    """
    wanted = {hf.format(layer): row for row, layer in in_layer_order(config) for hf in row.hf}
    needed = (hf.format(layer) for row, layer in _exported(config) for hf in row.hf)
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
    copies = {name for row in wanted.values() for name in copies_of(row, config)}
    others = sorted(names - wanted.keys() - copies)
    unknown = [n for n in others if not is_unused(n, config.hf_config, config.mtp_num_layers)]
    if unknown:
        raise ValueError(
            f"the checkpoint holds {len(unknown)} tensors that a {config.hf_model_type} model with "
            f"{config.num_layers} layers does not use here, such as {', '.join(unknown[:3])}: are "
            "model_type and num_hidden_layers in config.json right?"
        )


def _check_shapes(row: Row, layer, parameter, source, config) -> None:
    """ValueError if this rank's parameter is not a part of the row's HF tensors."""
    total, *rest = _whole_shape(row, parameter.shape, config)
    hint = ""
    if row.mca in VOCABULARY:
        total = config.vocab_size
        hint = f" (vocab_size {total})"
    rows: Counter[str] = Counter()
    for part in _parts_of(row, layer, total, config):
        rows[part.name] += part.rows
    for name, of_name in rows.items():
        got = source.shape(name)
        wanted = (of_name, *rest)
        if got != wanted:
            raise ValueError(
                f"{name} has shape {got}, and config.json{hint} asks for {wanted}, to fill "
                f"{row.mca.format(layer)} {tuple(parameter.shape)} as {row.kind}: the weights do "
                "not belong to this config.json"
            )


def degree(row: Row, config) -> int:
    """Number of ranks that cut the tensor."""
    if row.axis is None:
        return 1
    if row.expert is None:
        return config.tensor_model_parallel_size
    return config.expert_tensor_parallel_size


def _whole_shape(row: Row, shape: Sequence[int], config) -> list[int]:
    """The shape of a whole megatron tensor, from that of a rank's part."""
    whole = list(shape)
    if row.axis is not None:
        whole[row.axis] *= degree(row, config)
    return whole


def qkv_sizes(config) -> tuple[int, int, int]:
    """Rows of a query group's queries, key and value."""
    d = config.kv_channels
    return config.num_attention_heads // config.num_query_groups * d, d, d


class _Part(NamedTuple):
    """Rows of a Hugging Face tensor, as a part of a megatron tensor: all of them, or of a fused one
    the gate, say."""

    name: str
    first: int
    rows: int


def _parts_of(row: Row, layer: int | None, total: int, config) -> list[_Part]:
    """The parts of a megatron tensor of `total` rows."""
    sizes = [total]
    if row.kind == "gated":
        sizes = [total // 2] * 2
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
    of rows with a row of this rank."""
    shapes = {name: source.shape(name) for name in (hf.format(layer) for hf in row.hf)}
    tp = degree(row, config)
    if row.axis == 1:
        [(name, (_, columns))] = shapes.items()
        size = columns // tp
        return source.read(name, (slice(None), slice(rank * size, (rank + 1) * size)))
    total = sum(shape[0] for shape in shapes.values())
    if row.mca in VOCABULARY:
        total = config.padded_vocab_size
    share = total // tp
    in_group = total // _num_groups(row, config)
    first = rank * share // in_group
    count = -(-(rank + 1) * share // in_group) - first  # groups with a row of this rank
    pieces = []
    for part in _parts_of(row, layer, total, config):
        size = part.rows * in_group // total
        start = part.first + first * size
        stored = shapes[part.name][0]
        rows = slice(min(start, stored), min(start + count * size, stored))
        piece = source.read(part.name, (rows,))
        padding = count * size - len(piece)  # of the vocabulary
        if padding:
            piece = torch.cat([piece, piece.new_zeros(padding, *piece.shape[1:])])
        pieces.append(piece.unflatten(0, (count, size)))
    joined = pieces[0]
    if len(pieces) > 1:
        joined = torch.cat(pieces, dim=1)
    start = rank * share - first * in_group
    return joined.flatten(0, 1)[start : start + share]


# -- out


def vocabulary_names(config) -> set[str]:
    """The Hugging Face names of the matrices with a row for each token."""
    rows = rows_of(config.hf_model_type, config)
    return {name for row in rows if row.mca in VOCABULARY for name in row.hf}


def split(row: Row, layer, full: torch.Tensor, config) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, tensor) of the parts of a whole megatron tensor."""
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

    All ranks must iterate to the end. only: (megatron name, layer) of those to export. A tied head
    does not come twice. Collectives: gathers over tensor-parallel and expert-tensor-parallel
    groups, sends to rank 0.
    """
    parameters = own_parameters(models)
    return _written_here(models.config, parameters, _locate(parameters), {}, only)


class _Location(NamedTuple):
    """The place of a megatron tensor's parts."""

    holders: tuple[int, ...]  # global ranks: each is the first of a group with all parts of it
    shape: tuple[int, ...]  # of a part
    dtype: torch.dtype


def _written_here(
    config, parameters: dict, located: dict, writers: dict, only=None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, CPU tensor) of the tensors that this rank writes. All ranks must iterate to the
    end.

    writers: {(megatron name, layer): global rank that writes it}; global rank 0 writes the others.
    Collectives: gathers over the group that cuts a tensor; sends if its writer is no holder.
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
            full = parallel.whole(parameters[key].detach(), row.axis, group)
            if here == holder != writer:
                parallel.exchange({writer: full.contiguous()}, {})
        if here == writer != holder:
            size = _whole_shape(row, shape, config)
            full = torch.empty(size, dtype=dtype, device=parallel.device())
            parallel.exchange({}, {holder: full})
        if here == writer:
            for name, tensor in split(row, layer, full, config):
                yield name, tensor.to("cpu", copy=True)


def _writers(config, located: dict, max_shard_size) -> dict:
    """{(megatron name, layer): the holder that writes it}: each holder writes a run of its tensors,
    in layer order. {} if the model fits one file, or no other rank could write."""
    size = 0
    shares = defaultdict(list)
    for row, layer in _exported(config):
        holders, shape, dtype = located[row.mca, layer]
        size += math.prod(_whole_shape(row, shape, config)) * dtype.itemsize
        shares[holders, row.expert is not None].append((row.mca, layer))
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
    """The rows of an export, in layer order: all but a tied head."""
    tied = config.tie_embeddings_and_output_weights
    for row, layer in in_layer_order(config):
        if not (tied and row.mca == VOCABULARY[1]):
            yield row, layer


def _locate(parameters: dict) -> dict:
    """{(megatron name, layer): _Location} of the whole model, on every rank. Collective over all
    ranks.

    A tied embedding lies on two pipeline stages: the first one counts as its holder.
    """
    here = {}
    for key, parameter in parameters.items():
        of_expert = is_of_expert(key[0])
        replicas = parallel.replica_group(of_expert)
        if parallel.cut_group(of_expert).rank() == replicas.rank() == 0:
            holders = tuple(dist.get_process_group_ranks(replicas))
            here[key] = _Location(holders, tuple(parameter.shape), parameter.dtype)
    located: dict[tuple[str, int | None], _Location] = {}
    for of_rank in parallel.gather(here):
        located = of_rank | located
    return located


def in_layer_order(config) -> Iterator[tuple[Row, int | None]]:
    """(row, layer) of the whole model: the embedding, layer after layer, then the final norm and
    the head.

    config: McaModelConfig, or anything with hf_model_type, num_layers, mtp_num_layers,
    is_moe_layer() and the fields read by rows.
    """
    rows = rows_of(config.hf_model_type, config)
    is_layered = ["{}" in row.mca for row in rows]
    first = is_layered.index(True)
    yield from ((row, None) for row in rows[:first])
    for layer in range(config.num_layers + (config.mtp_num_layers or 0)):
        predicts = layer >= config.num_layers
        is_moe = config.is_moe_layer(layer)
        for row in itertools.compress(rows, is_layered):
            if row.mca.startswith(PREDICTION_LAYERS) == predicts and row.is_in(is_moe):
                yield row, layer
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

    Global rank 0 writes a model of one file; of a larger one every pipeline stage and data-parallel
    rank writes a share, into a folder shared by all of them. change: applied to each (HF name,
    tensor); global rank 0 writes alone then. Tensors of the source that the model does not read are
    copied; beside: generation_config.json and the source's code too. Host memory of a
    writer: one shard. All ranks must call it. Collectives: those of iter_hf_tensors. OSError, on
    every rank, if any rank cannot write.
    """
    config = models.config
    parameters = own_parameters(models)
    located = _locate(parameters)
    writers = {}
    if change is None:
        writers = _writers(config, located, max_shard_size)
    tensors = _written_here(config, parameters, located, writers)
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
    """Write the (HF name, CPU tensor) of each rank as export_hf() does -> the file names, on global
    rank 0.

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
        for _ in tensors:  # for collectives of other ranks in this rank's groups
            pass
    answers = parallel.gather((shards, problem))
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
    if failed:
        remove_shards(folder, str(parallel.rank()))
        raise OSError(f"{folder} could not be written: {'; '.join(failed)}")

    def finish() -> list[str]:
        names = name_shards(folder, [shard for of_rank, _ in answers for shard in of_rank])
        names += write_hf_config(hf_config, source, folder, dtype)
        if beside:
            names += copy_beside(source, folder)
        return names

    names = parallel.on_main(finish, OSError)
    return names if parallel.is_main() else []


def copies_of(row: Row, config) -> list[str]:
    """Further names of the embedding or output layer, repeated by some checkpoints in each layer
    for multi-token prediction: those in the model's original, or all that may be there."""
    names = {VOCABULARY[0]: "embed_tokens", VOCABULARY[1]: "shared_head.head"}
    if row.mca not in names or not config.mtp_num_layers:
        return []
    layers = range(config.num_layers, config.num_layers + config.mtp_num_layers)
    copies = [f"model.layers.{layer}.{names[row.mca]}.weight" for layer in layers]
    original = original_of(config.name_or_path)
    if original is None:
        return copies
    return sorted(original.names() & set(copies))
