"""Load Hugging Face weights into megatron's parameters and export them, in any parallel layout.

Both directions follow the rows of the model's family (families.py). fill() reads, for each
parameter, slices of the Hugging Face tensors that its row names, on one of its replicas.
export_hf() walks the rows in layer order: the ranks with a tensor's shards join them, and one rank
writes it.
"""

import itertools
from collections import ChainMap, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import parallel, watchdog
from .families import rows_of
from .families_rows import PREDICTION_LAYERS, Row, is_of_expert
from .files import PathLike, describe_error
from .tables import function_of
from .weights_files import (
    NamedTensors,
    TensorSource,
    carried_tensors,
    check_shape,
    copy_beside,
    in_words_of,
    is_unused,
    write_hf_config,
    write_safetensors,
)

Change = Callable[[str, torch.Tensor], torch.Tensor]  # (HF name, tensor) -> tensor
Key = tuple[str, int | None]  # (megatron's name with {} for the layer, the layer)
LayerRows = Iterator[tuple[Row, int | None]]  # (row, the layer)
# matrices with one row per token: tensor parallelism may pad them
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")

# -- loading


def fill(models: Any, source: TensorSource, only: Container[Key] | None = None) -> None:
    """Copy weights from a TensorSource (weights_files.py) into this rank's parameters. Every rank
    must call it.

    models: VirtualModels.
    only: the (megatron name, layer) pairs to fill. None: all, after check_names().

    One replica reads each parameter's shard and broadcasts it. Collective: these broadcasts, and a
    gather over all ranks at the end. ValueError, on every rank, if the source belongs to another
    model, a tensor has another shape, or a rank cannot read a file."""
    config = models.config
    rows = {row.mca: row for row in rows_of(config.hf_model_type, config)}
    if config.tie_embeddings_and_output_weights:  # the last stage has a copy of the embedding
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
                except Exception as error:  # raised at the end, because replicas wait
                    problems.append(error)
            for tensor in getattr(part, "parts", (part,)) if group.size() > 1 else ():
                dist.broadcast(tensor, group=group, group_src=0)
            parameter.copy_(part)  # does nothing if `part` is the parameter itself

    def close() -> None:
        if problems:
            raise problems[0]

    parallel.on_all(close, ValueError, "the weights cannot be used")


def _checked_part(
    row: Row, layer: int | None, source: TensorSource, config: Any, shape: Sequence[int]
) -> torch.Tensor:
    """Read this rank's shard of one megatron tensor from Hugging Face tensors (source). row: the
    Row, which names the tensor in both formats. layer: the layer's index, or None outside the
    layers. shape: the shard's. ValueError if a Hugging Face tensor that it is made from has the
    wrong shape."""
    total, *rest = _whole_shape(row, shape, config)
    if row.mca in VOCABULARY:
        total = config.vocab_size
    sizes = row_sizes(row, total, config)
    for hf, size in zip(row.hf, sizes, strict=True):
        check_shape(source, hf.format(layer), (size, *rest))
    rank = parallel.cut_group(row.expert is not None).rank() % degree(row, config)
    return read_part(row, layer, source, config, rank)


def check_names(config: Any, names: Set[str]) -> None:
    """Raise ValueError if a checkpoint's tensors are not those of the model. names: the Hugging
    Face names of its tensors. It is an error if one that the model needs is missing, or if one is
    unknown: not the model's, no copy (copies_of), and not known to be unused (is_unused).

    Every rank checks all pipeline stages, so all ranks raise and none is left waiting.
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


def _names(rows: LayerRows) -> set[str]:
    """The Hugging Face names of the tensors in (row, layer) pairs, as from in_layer_order(). A Row
    names a megatron tensor and the Hugging Face tensors that it is made from."""
    return {hf.format(layer) for row, layer in rows for hf in row.hf}


def degree(row: Row, config: Any) -> int:
    """Number of ranks over which a megatron tensor, described by its Row, is sharded: the
    expert-tensor-parallel size for an expert's tensor, otherwise the tensor-parallel size; 1 if
    each rank has the whole tensor."""
    if row.axis is None:
        return 1
    if row.expert is None:
        return config.tensor_model_parallel_size
    return config.expert_tensor_parallel_size


def _whole_shape(row: Row, shape: Sequence[int], config: Any) -> list[int]:
    """The shape of a whole megatron tensor (described by its Row), from `shape`, that of one
    tensor-parallel rank's shard."""
    whole = list(shape)
    if row.axis is not None:
        whole[row.axis] *= degree(row, config)
    return whole


def row_parts(row: Row, total: int, config: Any) -> list[list[int]]:
    """Numbers of rows of a megatron tensor that come from each of its Hugging Face tensors, as one
    list per Hugging Face tensor: [[q], [k], [v]] for three tensors, [[q, k, v]] if one tensor
    contains the three. row: the Row that describes the tensor. total: its number of rows."""
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
        parts = function_of("part_delta_families:parts_of")(row.kind, config)
    more = len(parts) - len(row.hf)  # only the first tensor can be fused
    return [parts[: more + 1], *([part] for part in parts[more + 1 :])]


def row_sizes(row: Row, total: int, config: Any) -> list[int]:
    """Numbers of rows of a megatron tensor that come from each of its Hugging Face tensors, one
    number per Hugging Face tensor. row: the Row that describes the tensor. total: its number of
    rows; a vocabulary's padding is counted if `total` includes it."""
    return [sum(parts) for parts in row_parts(row, total, config)]


def num_groups(row: Row, config: Any) -> int:
    """Number of row groups in a megatron tensor. megatron interleaves the Hugging Face tensors that
    it joins: each group has a share of every one of them. A tensor of q, k and v, for example, has
    q, k and v of the first query group, then those of the second, and so on."""
    if row.kind == "qkv":
        return config.num_query_groups
    if row.kind == "qk":
        return config.full_query_groups
    if row.kind.startswith("delta"):
        return config.linear_num_key_heads
    return degree(row, config) if row.axis == 0 else 1


def read_part(
    row: Row, layer: int | None, source: TensorSource, config: Any, rank: int
) -> torch.Tensor:
    """Read one of the shards into which tensor parallelism divides a megatron tensor, from Hugging
    Face tensors (source), in their dtype. row: the Row that describes the tensor. layer: the
    layer's index or None. rank: the shard's index. A vocabulary matrix is padded with zeros.

    If the shard has whole rows, only row groups (num_groups) with a row of it are read.
    """
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
        of_part = 0  # first row of the part in its tensor
        for rows in parts:
            size = rows * in_group // total
            start = of_part + first * size
            stop = start + count * size
            piece = source.read(name, (slice(min(start, stored), min(stop, stored)),))
            padding = count * size - len(piece)  # only a padded vocabulary is longer
            if padding:
                piece = F.pad(piece, (0, 0, 0, padding))
            pieces.append(piece.unflatten(0, (count, size)))
            of_part += rows
    start = rank * share - first * in_group
    groups = (
        pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    )  # avoid copying a single one
    return groups.flatten(0, 1)[start : start + share]


# -- exporting


def vocabulary_names(config: Any) -> set[str]:
    """Hugging Face names of the matrices with one row per token: embedding and output layer."""
    rows = rows_of(config.hf_model_type, config)
    return set().union(*(row.hf for row in rows if row.mca in VOCABULARY))


def split(row: Row, layer: int | None, full: torch.Tensor, config: Any) -> NamedTensors:
    """Split a whole megatron tensor (full) into its Hugging Face tensors: yield (HF name, tensor).
    row: the Row that describes the tensor. layer: the layer's index or None. Rows that pad the
    vocabulary are left out. Embedding and output layer are also yielded under the names of
    copies_of()."""
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


def iter_hf_tensors(
    models: Any, only: Container[Key] | None = None, device: str | torch.device = "cpu"
) -> NamedTensors:
    """Gather the model's weights on global rank 0, which yields (HF name, copy on `device`), one
    tensor at a time. Other ranks yield nothing, but must iterate to the end too.

    only: the (megatron name, layer) pairs to export; None: all. An output layer that is tied to the
    embedding is left out. Collective over all ranks: gathers over tensor-parallel and
    expert-tensor-parallel groups, sends to rank 0.
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
            parameter = parameters[key]
            numbers = getattr(parameter, "whole", parameter.detach)()
            full = parallel.whole(numbers, row.axis, group)
        form = part.new_empty(_whole_shape(row, part.shape, config))
        full = parallel.to_main(full, holder, form)
        if parallel.is_main():
            for name, tensor in split(row, layer, full, config):
                yield name, tensor.to(device, copy=True)


def forms_of(models: Any) -> NamedTensors:
    """Yield (HF name, meta tensor) for the whole model on every rank, in the order of
    iter_hf_tensors: shapes and dtypes without data. Collective."""
    config = models.config
    located = _locate(own_parameters(models))
    for row, layer in _exported(config):
        _, part = located[row.mca, layer]
        form = part.new_empty(_whole_shape(row, part.shape, config))
        yield from split(row, layer, form, config)


def own_parameters(models: Any) -> dict[Key, torch.Tensor]:
    """This rank's weights: {(megatron name, layer index): tensor}. In the name, {} stands for the
    layer. The index is None outside the layers. See global_parameter_names()."""
    named = itertools.chain.from_iterable(chunk.global_parameter_names() for chunk in models)
    return {(name, layer): parameter for name, layer, parameter in named}


def stacked(tensor: torch.Tensor) -> torch.Tensor:
    """The whole parameter or buffer to which a tensor from own_parameters() belongs. An expert's
    tensor is a view of the parameter that stacks all the rank's experts. A tensor that is no view
    is returned unchanged."""
    return tensor if tensor._base is None else tensor._base


def _exported(config: Any) -> LayerRows:
    """Yield the tensors of an export in layer order, as (row, layer); a Row names a tensor in
    megatron's and Hugging Face's format. An output layer that is tied to the embedding is left out.
    """
    tied = config.tie_embeddings_and_output_weights
    for row, layer in in_layer_order(config):
        if not tied or row.mca != VOCABULARY[1]:
            yield row, layer


def _locate(parameters: dict[Key, torch.Tensor]) -> Mapping[Key, tuple[int, torch.Tensor]]:
    """Find a rank that holds each tensor of the whole model -> {(megatron name, layer): (global
    rank that has its first shard, this shard as a meta tensor)}, on every rank. parameters: this
    rank's, from own_parameters(). Collective over all ranks."""
    here: dict[Any, Any] = {}
    for key, parameter in parameters.items():
        of_expert = is_of_expert(key[0])
        if parallel.cut_group(of_expert).rank() == parallel.replica_group(of_expert).rank() == 0:
            here[key] = (parallel.rank(), parameter.detach().to("meta"))
    return ChainMap(*parallel.gather_given(here).values())


def in_layer_order(config: Any) -> LayerRows:
    """Yield (row, layer) for each tensor of the whole model; a Row names a tensor in megatron's and
    Hugging Face's format. First comes the embedding, then the layers one after another, then the
    final norm, the output layer and others outside the layers. Outside the layers, `layer` is None.

    config: McaModelConfig, or an object with hf_model_type, num_layers, mtp_num_layers,
    is_moe_layer() and the fields that rows read.
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
    models: Any,
    save_directory: PathLike,
    max_shard_size: str | int = "5GB",
    change: Change | None = None,
    beside: bool = True,
) -> list[str]:
    """Write the model as a Hugging Face checkpoint (config.json and safetensors) -> the file names
    on global rank 0, [] elsewhere. Every rank must call it.

    change(HF name, tensor): returns the tensor to write instead.
    beside: also copy the source's generation_config.json, processor files and Python code.

    Global rank 0 writes. Tensors of the source, if it is there, for which is_unused() is true are
    copied. Collective: see iter_hf_tensors. OSError, on every rank, if the files cannot be written.
    """
    config = models.config
    tensors = iter_hf_tensors(models)
    facts = (config.hf_config, config.name_or_path, config.params_dtype, config.mtp_num_layers)
    return write_model(tensors, save_directory, max_shard_size, *facts, change, beside)


def write_model(
    tensors: NamedTensors,
    save_directory: PathLike,
    max_shard_size: str | int,
    hf_config: dict[str, Any],
    source: str | None,
    dtype: torch.dtype,
    num_trained: int | None = 0,
    change: Change | None = None,
    beside: bool = True,
) -> list[str]:
    """Write a Hugging Face checkpoint from the tensors that global rank 0 yields, as pairs (HF
    name, CPU tensor) -> the file names on rank 0, [] elsewhere. See export_hf for `change` and
    `beside`.

    source: folder or hub name that the model was loaded from. hf_config: the content of
    config.json. num_trained: how many of the source's multi-token prediction layers are in the
    model.

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
        except Exception as error:  # safetensors raises a type derived from Exception alone
            raise OSError(f"{folder} could not be written: {describe_error(error)}") from error
        finally:
            deque(tensors, maxlen=0)  # iterate to the end: other ranks take part
        names += write_hf_config(hf_config, source, folder, dtype)
        if beside:
            names += copy_beside(source, folder)
        return names

    if not parallel.is_main():
        deque(tensors, maxlen=0)
    names = parallel.on_main(write, OSError)
    return names if parallel.is_main() else []


def copies_of(row: Row, config: Any) -> list[str]:
    """Further Hugging Face names of the embedding or output layer: checkpoints repeat these tensors
    in multi-token prediction layers. row: the Row that describes the tensor. [] for any other
    tensor, and if the model has no such layers."""
    if not config.mtp_num_layers:
        return []
    copies: list[str] = function_of("part_mtp:copies_of")(row, config)
    return copies
