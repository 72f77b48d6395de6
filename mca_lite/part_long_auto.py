"""recompute_granularity: auto: recompute only as many layers of a stage as memory seems to need.

The choice is made once the model and its optimizer are there, from the memory that is free then
and the formulas of part_long_costs. It does not change results: recomputation repeats the same
operations. Each pipeline stage has a number of its own. Ranks of a stage agree on the largest of
their numbers, because recomputed layers repeat their collectives.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import parallel, world
from .data_batches import Packs, documents_of, samples_of
from .mcore import mpu
from .optim import parts_of
from .part_long import SHARE, host_memory
from .part_long_costs import of_step
from .tables import OBJECTIVES, OPTIMIZERS, TEACHER_KEY, bytes_of_states

HEADROOM = 0.9  # share of a GPU that a run may fill: blocks of memory leave gaps between them
_LOOKED_AT = 1000  # samples of a dataset that does not know its lengths
_GIB = 2**30
next_choice = ""  # what to set if memory is short all the same: for the words of that error


def least(count: int, need: Callable[[int], float], room: float) -> int:
    """The smallest number of recomputed layers, from 0 to `count`, with which a step fits into
    memory. need(number): bytes that the step takes with this number. room: free bytes. If none
    fits, the number that needs least memory."""
    fitting = [number for number in range(count + 1) if need(number) <= room]
    return min(fitting) if fitting else min(range(count + 1), key=need)


def free_memory() -> float:
    """Bytes on this rank's device that a run may still take. On a GPU, until the share HEADROOM of
    its memory is in use; without a GPU, the share SHARE of this rank's part of free host memory."""
    if not torch.cuda.is_available():
        return SHARE * host_memory() / world.current().local_size
    free, total = torch.cuda.mem_get_info()
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return float(free + unused - (1 - HEADROOM) * total)


def states_to_come(optimizer: Any, args: Any) -> float:
    """Estimated bytes on the device of the optimizer states that the first update will create. A
    matrix that muon updates is counted with the states of Adam."""
    of_value = bytes_of_states(args, OPTIMIZERS[args.optim].states)
    total = 0.0
    for part in parts_of(optimizer):
        inner: Any = getattr(part, "optimizer", None)
        on_host = getattr(inner, "on_host", ())
        for group in getattr(inner, "param_groups", ()):
            for p in group["params"]:
                if not inner.state.get(p) and p not in on_host:
                    total += p.numel() * of_value
    return total


def row_tokens(data: Any, cutoff: int | None, documents: int) -> int:
    """The number of tokens to plan for in a row, or in all documents of a sample. cutoff:
    cutoff_len; None: the run has none. documents: documents per sample.

    With a cutoff it is cutoff * documents if samples are packed or the data set does not know its
    documents' lengths. Otherwise it is the longest known length * documents or, if none is known,
    the length of the longest of the first samples."""
    lengths = getattr(samples_of(data), "document_lengths", None)
    if cutoff and (lengths is None or isinstance(data, Packs)):
        return cutoff * documents
    if lengths is not None and lengths.size:
        return int(lengths.max() * documents)
    longest = 1
    for i in range(min(len(data), _LOOKED_AT)):
        parts = documents_of(data[i])
        longest = max(longest, sum(len(document["input_ids"]) for document in parts))
    return longest


def dequantised_bytes(model: Any, width: int) -> float:
    """Bytes of the largest quantised weight of a model once it is dequantised for a matmul; 0 if no
    weight is quantised. width: bytes per dequantised value."""
    weights = (p for p in model.parameters() if hasattr(p, "whole"))
    return float(max((p.numel() * width for p in weights), default=0))


def choose(
    backend: Any, data: Any, settings: dict[str, Any], documents: int
) -> dict[str, dict[str, str]]:
    """Choose how many layers are recomputed on this rank's pipeline stage, so that a step fits into
    memory if possible; with virtual stages, on each of them. The number is set in the model's
    config -> a section of the start summary. Collective over all ranks.

    data: the training set. settings: {key: value} of the run, of which cutoff_len and stage are
    read. documents: documents per sample."""
    global next_choice
    args = backend.args
    model = backend.model
    config = model.config
    blocks = [chunk.decoder for chunk in model]
    layers = [layer.layer_number - 1 for block in blocks for layer in block.layers]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    finetuning = model.finetuning
    stage = mpu.get_pipeline_model_parallel_rank()
    multiple = backend.length_multiple
    tokens = row_tokens(data, settings.get("cutoff_len"), documents)
    length = -(-tokens // multiple) * multiple
    objective = OBJECTIVES.get(settings.get("stage", ""))

    def need(number: int) -> float:
        config.recompute_num_layers = number
        found = of_step(
            *(args, config, stage, layers, length, trained),
            on_gpu=torch.cuda.is_available(),
            is_whole=finetuning.is_whole,
            trains_head=finetuning.trains("lm_head"),
            distils=objective is not None and TEACHER_KEY in objective.keys,
        )
        return found.activations + found.logits + found.buffers

    room = free_memory() - states_to_come(backend.optimizer, args)
    room -= dequantised_bytes(model, config.params_dtype.itemsize)
    most = max(len(block.layers) for block in blocks)
    stages = config.pipeline_model_parallel_size
    numbers = [0] * stages
    numbers[stage] = least(most, need, room)
    numbers = parallel.largest(*numbers)
    counts = [0] * stages
    counts[stage] = most
    counts = parallel.largest(*counts)
    chosen = numbers[stage]
    needed = need(chosen)
    next_choice = advice(chosen, most, config)
    shown = [f"{number} of {count}" for number, count in zip(numbers, counts, strict=True)]
    where = ", by stage" if stages > 1 else ""
    if len(blocks) > 1:
        where += ", of each virtual stage"
    return {
        "recomputation": {
            "recomputed layers": f"{', '.join(shown)}{where} (recompute_granularity: auto)",
            "for": f"rows of {length:,} tokens: {needed / _GIB:.2f} GiB planned beside weights and "
            f"optimizer, {room / _GIB:.2f} free",
        }
    }


def advice(chosen: int, most: int, config: Any) -> str:
    """Text for a run that lacks memory although `chosen` of `most` layers are recomputed: which
    keys to set."""
    text = f"recompute_granularity: auto chose to recompute {chosen} of {most} layers; "
    if chosen < most:
        more = min(most, chosen + max(1, most // 8))
        return f"{text}try recompute_granularity: full, recompute_method: block, " + (
            f"recompute_num_layers: {more}"
        )
    if not config.activation_offloading:
        return f"{text}try activation_offloading: true, then a mlp_chunk_size of 8192"
    if not config.mlp_chunk_size:
        return f"{text}try mlp_chunk_size: 8192"
    return f"{text}try a lower cutoff_len, or a larger context_parallel_size"
