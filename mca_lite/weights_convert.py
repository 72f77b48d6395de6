"""Load Hugging Face weights into megatron's parameters and export them, at any parallel layout.

Both directions follow the rows of the model's family (families.py). fill() reads for each
parameter the slices of the Hugging Face tensors in its row, and only those bytes, on one rank of
its replicas. export_hf() walks the rows in layer order: the ranks with the parts of a tensor join
them, and one rank writes it.
"""

import itertools
import os
from collections import ChainMap, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import parallel, watchdog
from .families import prediction_of, rows_of
from .families_rows import PREDICTION_LAYERS, Row, is_of_expert
from .files import describe_error
from .weights_files import (
    NamedTensors,
    carried_tensors,
    check_shape,
    copy_beside,
    in_words_of,
    is_unused,
    original_of,
    write_hf_config,
    write_safetensors,
)

Change = Callable[[str, torch.Tensor], torch.Tensor]  # (HF name, tensor) -> tensor
# Their rows are tokens: tensor parallelism may pad them
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")

# -- in


def fill(models, source, only: Container[tuple[str, int | None]] | None = None) -> None:
    """Fill the parameters of this rank from `source` (see weights_files.py).

    models: VirtualModels. only: (megatron name, layer) of those to fill; None: all, and the
    source must hold the model's tensors and no others. One replica reads a parameter: host memory
    is one of them. All ranks must call it. Collectives: broadcasts to replicas, and one over all
    ranks at the end. ValueError, on every rank, for a source of another model or with a tensor of
    another shape, and for files one rank cannot read.
    """
    config = models.config
    rows = {row.mca: row for row in rows_of(config.hf_model_type, config)}
    if config.tie_embeddings_and_output_weights:  # the last stage holds a copy of the embedding
        rows[VOCABULARY[1]] = replace(rows[VOCABULARY[0]], mca=VOCABULARY[1])
    if only is None:
        check_names(config, source.names())
    problems: list[Exception] = []
    with torch.no_grad():
        for key, parameter in own_parameters(models).items():
            if only is not None and key not in only:
                continue
            watchdog.alive()  # a load may take longer than ddp_timeout
            row = rows[key[0]]
            group = parallel.replica_group(row.expert is not None)
            part = parameter.detach().contiguous()  # the parameter itself, or a copy of a view
            if group.rank() == 0 and not problems:
                try:
                    part.copy_(_checked_part(row, key[1], source, config, parameter.shape))
                except Exception as error:  # replicas wait: at the end, on all ranks
                    problems.append(error)
            if group.size() > 1:
                dist.broadcast(part, group=group, group_src=0)
            parameter.copy_(part)  # nothing, for the parameter itself

    def close() -> None:
        if problems:
            raise problems[0]

    parallel.on_all(close, ValueError, "the weights cannot be used")


def _checked_part(row: Row, layer, source, config, shape: Sequence[int]) -> torch.Tensor:
    """read_part() for this rank's parameter of a shape. ValueError for tensors of another shape."""
    total, *rest = _whole_shape(row, shape, config)
    if row.mca in VOCABULARY:
        total = config.vocab_size
    sizes = row_sizes(row, total, config)
    for hf, size in zip(row.hf, sizes, strict=True):
        check_shape(source, hf.format(layer), (size, *rest))
    rank = parallel.cut_group(row.expert is not None).rank() % degree(row, config)
    return read_part(row, layer, source, config, rank)


def check_names(config, names: Set[str]) -> None:
    """Refuse a source without a tensor of the whole model, or with one that the model does not use.

    Every rank looks at all stages: all of them stop, and none waits for another in a collective.
    """
    wanted = _names(in_layer_order(config))
    missing = sorted(_names(_exported(config)) - names)
    copies = {name for row, _ in in_layer_order(config) for name in copies_of(row, config)}
    others = sorted(names - wanted - copies)
    unknown = [n for n in others if not is_unused(n, config.hf_config, config.mtp_num_layers)]
    for problem, wrong in (("lacks", missing), ("holds, without a use here,", unknown)):
        if wrong:
            raise ValueError(
                f"the checkpoint {problem} {len(wrong)} tensors, such as {', '.join(wrong[:3])}; a "
                f"{config.hf_model_type} model with {config.num_layers} layers has {len(wanted)}: "
                "save or download it again, or set model_type, num_hidden_layers and "
                "tie_word_embeddings in config.json to those of the weights, or mtp_num_layers: 0"
            )


def _names(rows: Iterable[tuple[Row, int | None]]) -> set[str]:
    """The Hugging Face names of rows and their layers."""
    return {hf.format(layer) for row, layer in rows for hf in row.hf}


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


def row_parts(row: Row, total: int, config) -> list[list[int]]:
    """Rows of the parts of each Hugging Face tensor in a megatron tensor of `total` rows. A fused
    one has several parts."""
    parts = [total]
    if row.kind == "gated":
        parts = [total // 2] * 2
    elif row.kind == "qkv":
        of_keys = config.num_query_groups * config.kv_channels
        of_queries = config.num_attention_heads * config.kv_channels
        if getattr(config, "attention_output_gate", False):
            of_queries *= 2
        parts = [of_queries, of_keys, of_keys]
    elif row.kind == "qk":
        heads = (config.num_attention_heads, config.full_query_groups)
        parts = [count * config.full_kv_channels for count in heads]
    elif row.kind.startswith("delta"):
        parts = _delta_parts(row.kind, config)
    more = len(parts) - len(row.hf)  # in the first tensor
    return [parts[: more + 1], *([part] for part in parts[more + 1 :])]


def _delta_parts(kind: str, config) -> list[int]:
    """Rows of a gated delta net: of queries, keys, values, their gates, b and a."""
    of_keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads = config.linear_num_value_heads
    of_values = heads * config.linear_value_head_dim
    parts = [of_keys, of_keys, of_values, of_values, heads, heads]
    if kind == "delta_convolution":
        return parts[:3]
    return parts if kind == "delta" else [sum(parts[:4]), sum(parts[4:])]


def row_sizes(row: Row, total: int, config) -> list[int]:
    """Rows of each Hugging Face tensor in a megatron tensor of `total` rows."""
    return [sum(parts) for parts in row_parts(row, total, config)]


def num_groups(row: Row, config) -> int:
    """Groups along the rows of a megatron tensor: in each lies a share of every part, one part
    after the other."""
    if row.kind == "qkv":
        return config.num_query_groups
    if row.kind == "qk":
        return config.full_query_groups
    if row.kind.startswith("delta"):
        return config.linear_num_key_heads
    return degree(row, config) if row.axis == 0 else 1


def row_order(parts: list[int], groups: int) -> torch.Tensor | None:
    """int64 [rows]: rows of a Hugging Face tensor with these parts in the order of a megatron
    tensor with groups; None: the same."""
    if len(parts) == 1:
        return None
    rows = torch.arange(sum(parts)).split(parts)
    return torch.cat([part.view(groups, -1) for part in rows], 1).flatten()


def read_part(row: Row, layer, source, config, rank: int) -> torch.Tensor:
    """A rank's part of the megatron tensor of a row, in the source's dtype. Reads only the groups
    of rows with a row of this rank."""
    names = [name.format(layer) for name in row.hf]
    tp = degree(row, config)
    if row.axis == 1:
        columns = source.shape(names[0])[1] // tp
        return source.read(names[0], (slice(None), slice(rank * columns, (rank + 1) * columns)))
    total = stored = sum(source.shape(name)[0] for name in names)
    if row.mca in VOCABULARY:
        total = config.padded_vocab_size
    share = total // tp
    in_group = total // num_groups(row, config)
    first = rank * share // in_group
    count = -(-(rank + 1) * share // in_group) - first  # groups with a row of this rank
    pieces = []
    for name, parts in zip(names, row_parts(row, total, config), strict=True):
        of_part = 0  # its first row in its tensor
        for rows in parts:
            size = rows * in_group // total
            start = of_part + first * size
            stop = start + count * size
            piece = source.read(name, (slice(min(start, stored), min(stop, stored)),))
            padding = count * size - len(piece)  # of the vocabulary
            if padding:
                piece = F.pad(piece, (0, 0, 0, padding))
            pieces.append(piece.unflatten(0, (count, size)))
            of_part += rows
    start = rank * share - first * in_group
    groups = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)  # one is not copied
    return groups.flatten(0, 1)[start : start + share]


# -- out


def vocabulary_names(config) -> set[str]:
    """The Hugging Face names of the matrices with a row for each token."""
    rows = rows_of(config.hf_model_type, config)
    return set().union(*(row.hf for row in rows if row.mca in VOCABULARY))


def split(row: Row, layer, full: torch.Tensor, config) -> NamedTensors:
    """(HF name, tensor) of the parts of a whole megatron tensor."""
    names = [hf.format(layer) for hf in row.hf]
    groups = num_groups(row, config)
    of_tensors = row_parts(row, len(full), config)
    sizes = [rows // groups for rows in itertools.chain(*of_tensors)]
    pieces = iter(full.unflatten(0, (groups, -1)).split(sizes, dim=1))
    parts = []
    for of_tensor in of_tensors:
        own = itertools.islice(pieces, len(of_tensor))
        parts.append(torch.cat([piece.flatten(0, 1) for piece in own]))
    if row.mca in VOCABULARY:
        names += copies_of(row, config)
        parts = [full[: config.vocab_size]] * len(names)
    for name, part in zip(names, parts, strict=True):
        yield name, part.contiguous()


def iter_hf_tensors(models, only: Container[tuple[str, int | None]] | None = None) -> NamedTensors:
    """(HF name, CPU tensor) of the whole model, one at a time, on global rank 0; nothing on other
    ranks.

    All ranks must iterate to the end. only: (megatron name, layer) of those to export. A tied head
    does not come twice. Collectives: gathers over tensor-parallel and expert-tensor-parallel
    groups, sends to rank 0.
    """
    config = models.config
    parameters = own_parameters(models)
    located = _locate(parameters)
    for row, layer in _exported(config):
        key = (row.mca, layer)
        if only is not None and key not in only:
            continue
        holder, part = located[key]
        watchdog.alive()  # an export may take longer than ddp_timeout
        group = parallel.cut_group(row.expert is not None)
        full = None
        if holder in dist.get_process_group_ranks(group):
            full = parallel.whole(parameters[key].detach(), row.axis, group)
        form = part.new_empty(_whole_shape(row, part.shape, config))
        full = parallel.to_main(full, holder, form)
        if parallel.is_main():
            for name, tensor in split(row, layer, full, config):
                yield name, tensor.to("cpu", copy=True)


def forms_of(models) -> NamedTensors:
    """(HF name, tensor on the meta device) of the whole model on every rank, in the order of
    iter_hf_tensors and without its transfers. Collective: _locate."""
    config = models.config
    located = _locate(own_parameters(models))
    for row, layer in _exported(config):
        _, part = located[row.mca, layer]
        form = part.new_empty(_whole_shape(row, part.shape, config))
        yield from split(row, layer, form, config)


def own_parameters(models) -> dict:
    """{(megatron name with {}, layer): parameter} of this rank."""
    named = itertools.chain.from_iterable(chunk.global_parameter_names() for chunk in models)
    return {(name, layer): parameter for name, layer, parameter in named}


def stacked(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter of a tensor of own_parameters: experts are views of theirs."""
    return tensor if tensor._base is None else tensor._base


def _exported(config) -> Iterator[tuple[Row, int | None]]:
    """The rows of an export, in layer order: all but a tied head."""
    tied = config.tie_embeddings_and_output_weights
    for row, layer in in_layer_order(config):
        if not tied or row.mca != VOCABULARY[1]:
            yield row, layer


def _locate(parameters: dict) -> Mapping:
    """{(megatron name, layer): (global rank, its part on the meta device)} of the whole model, on
    every rank; the rank is the first with a part. Collective over all ranks: a broadcast for each
    part of pipeline and expert parallelism.

    A tied embedding lies on two pipeline stages: it counts as the first one's.
    """
    here = {}
    for key, parameter in parameters.items():
        of_expert = is_of_expert(key[0])
        if parallel.cut_group(of_expert).rank() == parallel.replica_group(of_expert).rank() == 0:
            here[key] = (parallel.rank(), parameter.detach().to("meta"))
    return ChainMap(*parallel.gather_given(here).values())


def in_layer_order(config) -> Iterator[tuple[Row, int | None]]:
    """(row, layer) of the whole model: the embedding, layer after layer, then the final norm and
    the head.

    config: McaModelConfig, or anything with hf_model_type, num_layers, mtp_num_layers,
    is_moe_layer() and the fields read by rows.
    """
    rows = rows_of(config.hf_model_type, config)
    embedding, *others = [row for row in rows if "{}" not in row.mca]
    layered = [row for row in rows if "{}" in row.mca]
    yield embedding, None
    linear = getattr(config, "linear_layers", None) or ()
    windows = getattr(config, "sliding_layers", None) or ()
    for layer in range(config.num_layers + (config.mtp_num_layers or 0)):
        predicts = layer >= config.num_layers
        kinds = config.is_moe_layer(layer), layer in linear, layer in windows
        for row in layered:
            if row.mca.startswith(PREDICTION_LAYERS) == predicts and row.is_in(*kinds):
                yield row, layer
    yield from ((row, None) for row in others)


def export_hf(
    models,
    save_directory: str | os.PathLike,
    max_shard_size: str | int = "5GB",
    change: Change | None = None,
    beside: bool = True,
) -> list[str]:
    """Write a Hugging Face checkpoint: config.json and safetensors -> the file names, on global
    rank 0 ([] elsewhere).

    Global rank 0 writes; its host memory is one shard. change: applied to each (HF name, tensor).
    Tensors of the source that the model does not read are copied; beside: generation_config.json
    and the source's code too. All ranks must call it. Collectives: those of iter_hf_tensors.
    OSError, on every rank, if the files cannot be written.
    """
    config = models.config
    tensors = iter_hf_tensors(models)
    facts = (config.hf_config, config.name_or_path, config.params_dtype, config.mtp_num_layers)
    return write_model(tensors, save_directory, max_shard_size, *facts, change, beside)


def write_model(
    tensors: NamedTensors,
    save_directory: str | os.PathLike,
    max_shard_size: str | int,
    hf_config: dict,
    source: str | None,
    dtype: torch.dtype,
    num_trained: int | None = 0,
    change: Change | None = None,
    beside: bool = True,
) -> list[str]:
    """Write global rank 0's (HF name, CPU tensor) as export_hf() does -> the file names, there.

    source: the model that this one was. num_trained: of its layers for multi-token prediction.
    Collective over all ranks. OSError, on every rank, if the files cannot be written.
    """
    folder = Path(save_directory)
    changed = tensors
    if change is not None:
        changed = ((name, change(name, tensor)) for name, tensor in tensors)

    def write() -> list[str]:
        try:
            carried = carried_tensors(source, hf_config, num_trained)
            named = in_words_of(source, hf_config, itertools.chain(changed, carried))
            names = write_safetensors(named, folder, max_shard_size)
        except Exception as error:  # safetensors has its own
            raise OSError(f"{folder} could not be written: {describe_error(error)}") from error
        finally:
            deque(tensors, maxlen=0)  # the rest, for collectives of other ranks
        names += write_hf_config(hf_config, source, folder, dtype)
        if beside:
            names += copy_beside(source, folder)
        return names

    if not parallel.is_main():
        deque(tensors, maxlen=0)
    names = parallel.on_main(write, OSError)
    return names if parallel.is_main() else []


def copies_of(row: Row, config) -> list[str]:
    """Further names of the embedding or output layer, repeated by some checkpoints in each layer
    for multi-token prediction: those in the model's original, or all that may be there."""
    names = {VOCABULARY[0]: "embed_tokens", VOCABULARY[1]: "shared_head.head"}
    is_numbered = prediction_of(config.hf_model_type).is_numbered
    if row.mca not in names or not config.mtp_num_layers or not is_numbered:
        return []
    layers = range(config.num_layers, config.num_layers + config.mtp_num_layers)
    copies = {f"model.layers.{layer}.{names[row.mca]}.weight" for layer in layers}
    original = original_of(config.name_or_path)
    return sorted(original.names() & copies if original else copies)
