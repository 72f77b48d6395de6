"""Memory of a training step beside weights and optimizer, from a config alone: for `plan` and for
recompute_granularity: auto.

What activations take was counted: on a CPU from the tensors that autograd saves
(tests/test_plan.py), on a GPU, where kernels.py compiles, from the blocks of memory in use on one
H200.

"Per token" means a rank's bytes per token that it works on; the tensor-parallel ranks work on the
same tokens, also under sequence parallelism. Letters: w bytes per activation value, h hidden size.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .loss_tokens import CHUNK_SIZE_CPU, CHUNK_SIZE_CUDA, CHUNK_SIZE_OF_LOGITS
from .tables import LAYER_TYPES, function_of


class Kept(NamedTuple):
    """Bytes per token that recomputed layers take. device: kept on the device for the backward
    pass. again: additional bytes on the device while a unit (a group of layers) is recomputed.
    host: kept in host memory."""

    device: float
    again: float
    host: float


def results(config: Any, layer: int, sizes: Any) -> float:
    """Estimated bytes per token of a layer's attention results, which the key recompute_keep saves
    from recomputation: the output and a float32 log-sum-exp per head. 0 for linear attention, and
    without recompute_keep. layer: counted from 0. sizes: RankSizes."""
    if not config.recompute_keep or config.layer_type(layer + 1) == "linear_attention":
        return 0.0
    channels = config.head_sizes(layer + 1)[1]
    if config.multi_latent_attention:
        channels = config.v_head_dim
    return float(sizes.heads * (sizes.w * channels + 4))


def tiled(
    config: Any, layer: int, sizes: Any, tokens: float, of_layer: float, of_mlp: float
) -> tuple[float, float]:
    """Correct the estimated bytes per token of a layer (of_layer) and of its MLP (of_mlp) for
    mlp_chunk_size, with which an MLP runs in tiles of tokens -> (bytes of the layer, bytes of its
    MLP). Of the MLP's activations one tile's are counted; experts also keep their inputs for the
    backward pass. layer: counted from 0. sizes: RankSizes. tokens: tokens of a micro-batch on this
    rank."""
    rows = config.mlp_chunk_size * sizes.sp
    inputs = 0.0
    if config.is_moe_layer(layer):
        # a tile has rows of experts, and a token has one row per chosen expert
        tokens *= config.moe_router_topk
        inputs = sizes.w * config.moe_router_topk * sizes.h / sizes.sp
    tile = inputs + (of_mlp - inputs) * min(rows / tokens, 1.0)
    return of_layer - of_mlp + tile, tile


def kept(config: Any, inputs: float, units: int, of_results: list[float], again: float) -> Kept:
    """Bytes per token that recomputed layers take with recompute_keep or activation_offloading. A
    unit is a group of layers that are recomputed together; `units` is their number.

    Other arguments but config are bytes per token. inputs: a unit's inputs. of_results: attention
    outputs, for each recomputed layer. again: a unit while it is recomputed. With offloading, host
    memory holds all that units keep, and the device that of two units: the one that is recomputed,
    and the one before it."""
    whole = inputs * units + sum(of_results)
    of_unit = sum(of_results) / max(units, 1)
    again -= of_unit  # kept results are the same storages: they count once
    if not config.activation_offloading:
        return Kept(whole, again, 0.0)
    return Kept(min(whole, 2 * (inputs + of_unit)), again, whole)


# ---- a rank's activations


class RankSizes:
    """Parallel degrees and sizes of one rank's share of a model, for the formulas of memory and
    time. config: McaModelConfig.

    w: bytes per activation value. h: hidden size. heads, groups: attention heads and key-value
    heads after tensor parallelism. keys: bytes of keys and values per token and layer. tp, pp, cp,
    ep: parallel degrees. sp: tp under sequence parallelism, otherwise 1.
    """

    def __init__(self, config: Any) -> None:
        self.w = config.params_dtype.itemsize  # bytes per value of an activation
        self.h = config.hidden_size
        self.tp = config.tensor_model_parallel_size
        self.sp = (
            self.tp if config.sequence_parallel else 1
        )  # ranks that split tokens between linears
        self.pp = config.pipeline_model_parallel_size
        self.cp = config.context_parallel_size
        self.ep = config.expert_model_parallel_size
        self.heads = config.num_attention_heads / self.tp
        # how many heads have a key and a value
        self.groups = max((config.num_query_groups or config.num_attention_heads) / self.tp, 1)
        self.keys = (
            2 * self.groups * config.kv_channels * self.w
        )  # bytes of keys and values per token and layer


class _Facts(NamedTuple):
    """Sizes of the tensors that autograd saves per token, with or without compiled kernels.

    norm: bytes per channel of a norm; head_norm: of a norm of queries or keys. mlp: values per MLP
    column; expert: the same for an expert, whose columns are also multiplied by a router weight.
    scores: bytes per head of latent attention whose values are narrower than its keys. attended:
    bytes per value of latent attention's queries, keys and values, and of a delta net's
    convolution. compiled: kernels are compiled. adapted: adapters are trained.
    """

    norm: int
    head_norm: int  # for queries and keys; their rotated output is counted in attention
    mlp: int
    expert: int  # like mlp, with a weight per column
    scores: int  # bytes per head of attention whose values are narrower than its keys
    attended: int  # bytes per value of latent attention's queries, keys and values
    compiled: bool
    adapted: bool  # adapters are trained


def _facts(width: int, compiled: bool, frozen: bool, length: int) -> _Facts:
    """Sizes of the tensors that autograd saves per token of a model. width: bytes per activation
    value. compiled: True if kernels are compiled. frozen: True if adapters are trained; norms then
    count as frozen. length: tokens in a sequence."""
    if compiled:
        return _Facts(
            norm=2 * width,
            head_norm=width,
            mlp=3,
            expert=3,
            scores=4,
            attended=width,
            compiled=True,
            adapted=frozen,
        )
    quotient = width * (not frozen)
    return _Facts(
        norm=4 + quotient + width,  # the input is float32 without kernels
        head_norm=4 + quotient,
        mlp=4,
        expert=5,
        scores=4 * length,  # a CPU has no kernel for it and keeps every score
        attended=4,
        compiled=False,
        adapted=frozen,
    )


def _layer_bytes(config: Any, layer: int, facts: _Facts, r: RankSizes) -> tuple[float, float]:
    """Estimate how many bytes per token a layer saves for the backward pass on this rank -> (of the
    whole layer, the part of them in its MLP or experts). layer: counted from 0. facts: what
    autograd saves, from _facts. r: the rank's sizes."""
    if getattr(config, "kv_lora_rank", None):
        attention = _latent_bytes(config, facts, r)
    elif layer_class := LAYER_TYPES.get(config.layer_type(layer + 1)):
        attention = function_of(layer_class).costs(config, facts)
    else:
        # queries, attention's output, keys, values, and a sum of exponentials per row
        groups, channels = config.head_sizes(layer + 1)
        heads = r.heads + max(groups / r.tp, 1)
        attention = 2 * r.w * channels * heads + 4 * r.heads
        if config.qk_layernorm:
            attention += (facts.head_norm * channels + 4) * heads
        if config.attention_output_gate:
            attention += 2 * r.w * channels * r.heads
    norms = 2 + 2 * config.post_norms
    if layer >= config.num_layers:  # of multi-token prediction: two norms before it, one after it
        norms += 3
    # adapted products of experts, and all beside quantised weights, keep no inputs that can be
    # computed again
    saves = facts.adapted and r.w < 4 and not config.mlp_chunk_size
    keeps = config.weight_format is None or not saves
    around = norms * (facts.norm * r.h + 4) / r.sp + attention
    around -= 2 * (not keeps) * r.w * r.h / r.sp
    if not config.is_moe_layer(layer):
        columns = facts.mlp - (not config.gated_linear_unit)
        mlp = r.w * columns * config.ffn_hidden_size / r.tp
        return around + mlp, mlp
    etp = config.expert_tensor_parallel_size
    columns = (facts.expert - saves) * config.moe_ffn_hidden_size / etp
    rows = r.h * (not saves or r.ep * etp > 1)
    experts = r.w * config.moe_router_topk * (rows + columns) * etp / r.sp
    experts += r.w * facts.mlp * (config.moe_shared_expert_intermediate_size or 0) / r.tp
    if getattr(config, "moe_shared_expert_gate", False):
        experts += r.w * r.h / r.sp
    if r.w < 4:
        experts += 4 * r.h / r.sp  # the router's input in float32
    return around + experts, experts


def _latent_bytes(config: Any, facts: _Facts, r: RankSizes) -> float:
    """Estimated bytes per token that multi-latent attention saves for the backward pass, without
    the layer's norm. facts: what autograd saves, from _facts. r: the rank's sizes."""
    rotated = config.qk_pos_emb_head_dim
    query = config.qk_head_dim + rotated
    value = config.v_head_dim
    value_copy = value
    latent = facts.norm * (config.kv_lora_rank + (config.q_lora_rank or 0))
    if (
        facts.attended == r.w
    ):  # not copied: a value is a view next to the unrotated part of the keys
        value_copy += config.qk_head_dim
        latent += r.w * rotated
    scores = 4 if query == value else facts.scores
    attended = facts.attended * (2 * query + value_copy) + r.w * value + scores
    return r.heads * attended + latent / r.sp


def _activations(
    args: Any,
    config: Any,
    stage: int,
    layers: Sequence[int],
    facts: _Facts,
    r: RankSizes,
    tokens: float,
) -> tuple[float, float, float]:
    """Estimate the memory of activations on a rank of pipeline stage `stage`, in bytes per token ->
    (kept for the backward pass, in addition while a group of layers is recomputed, in host memory).
    layers: indices of the stage's layers with a backward pass. facts: from _facts. r: the rank's
    sizes. tokens: tokens of a micro-batch on this rank."""
    sizes = [_layer_bytes(config, layer, facts, r) for layer in layers]
    if config.mlp_chunk_size:
        pairs = zip(layers, sizes, strict=True)
        sizes = [tiled(config, layer, r, tokens, *size) for layer, size in pairs]
    of_layers = [of_layer for of_layer, _ in sizes]
    again = host = 0.0
    in_flight = _in_flight(args, config, stage)
    if config.recompute_granularity == "full":
        virtual = config.virtual_pipeline_model_parallel_size or 1
        unit = 1 if config.recompute_num_layers is None else config.recompute_num_layers
        inputs = r.w * r.h / r.sp  # bytes of a layer's input per token
        again_layers = layers
        if config.recompute_method == "block":  # of each virtual stage
            again_layers = layers[: unit * virtual]
            unit = 1
        unit = min(unit, len(again_layers))
        units = -(-len(again_layers) // max(unit, 1))
        if units:
            again = max(of_layers[: len(again_layers)]) * unit - inputs
        rest = sum(of_layers[len(again_layers) :])
        waiting = inputs * units * in_flight
        if config.recompute_keep or config.activation_offloading:
            of_results = [results(config, layer, r) for layer in again_layers]
            device, again, host = kept(config, inputs, units, of_results, again)
            # what waits on the device does so for one micro-batch
            waiting = device * (1 if host else in_flight)
        # backward frees the layers that are not recomputed, the last ones, before it recomputes
        again = max(again - rest / virtual, 0.0)
        return waiting + rest * in_flight, again, host * in_flight
    if config.recompute_granularity and {"mlp", "moe"} & set(config.recompute_modules or ()):
        of_layers = [of_layer - of_mlp for of_layer, of_mlp in sizes]
    return sum(of_layers) * in_flight, again, host


def input_activations(
    args: Any, config: Any, trained: Iterable[str], length: int, r: RankSizes
) -> float:
    """Upper limit of the bytes that a vision tower or another input module saves for the backward
    pass: estimated as if rows held nothing but images or other inputs. trained: names of the
    trained parameters. length: tokens in a row. r: the rank's sizes."""
    of_token = config.inputs.bytes_of_token(trained, r.w)
    return args.micro_batch_size * length * of_token * _in_flight(args, config, 0)


def _in_flight(args: Any, config: Any, stage: int) -> float:
    """The most micro-batches whose activations a pipeline stage holds at once. With virtual
    stages it can be a fraction, because each chunk of layers counts as a part of the stage."""
    pp = config.pipeline_model_parallel_size
    vpp = config.virtual_pipeline_model_parallel_size or 1
    micro_batches = args.gradient_accumulation_steps or 1
    chunks = pp - stage
    if vpp > 1:
        chunks = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return min(micro_batches * vpp, chunks) / vpp


# Bytes of float32 tensors per logit in a loss with a teacher, without kernels: the maximum
# (resident teacher, jsd), measured on a CPU.
_OF_LOGIT = 53


def _loss(
    config: Any, tokens: float, trains_head: bool, on_gpu: bool, r: RankSizes, distils: bool
) -> float:
    """Estimated bytes that the loss takes while it is computed: a chunk of logits (of a teacher
    too), hidden states, and the float32 gradient of a trained head. tokens: tokens of a micro-batch
    on this rank. on_gpu: True if kernels are compiled. r: the rank's sizes. distils: True if the
    loss compares with a teacher."""
    columns = config.padded_vocab_size / r.tp
    chunk = config.loss_chunk_size or (CHUNK_SIZE_CUDA if on_gpu else CHUNK_SIZE_CPU)
    of_logit = r.w
    if distils:
        chunk = config.loss_chunk_size or CHUNK_SIZE_OF_LOGITS
        # with kernels: the teacher's logit, a gradient, and an index
        of_logit += 2 * r.w + 2 if on_gpu else _OF_LOGIT
    float32_gradient = columns * r.h * 4 * trains_head
    return min(chunk, tokens) * columns * of_logit + tokens * r.h * r.w + float32_gradient


def _passing(config: Any, layers: Sequence[int], r: RankSizes, tokens: float) -> float:
    """Estimated bytes of the gradients that the backward pass of one MLP, or of one layer's
    experts, holds at once: those before the activation (of gate and up), and that of the MLP's
    output. The largest of `layers` counts. tokens: tokens of a micro-batch on this rank.

    Measured on one H200, 8B with adapters in rows of 32,768 to 131,072 tokens: 4 f + 2 h bytes per
    token, with f columns in the MLP and hidden size h."""
    largest = 0.0
    for layer in layers:
        columns = config.ffn_hidden_size / r.tp
        rows = tokens
        if config.is_moe_layer(layer):
            columns = config.moe_ffn_hidden_size * config.moe_router_topk / r.sp
            rows *= config.moe_router_topk
        share = 1.0
        if config.mlp_chunk_size:
            share = min(config.mlp_chunk_size * r.sp / rows, 1.0)
        of_columns = r.w * (1 + config.gated_linear_unit) * columns * share
        largest = max(largest, tokens * (of_columns + r.w * r.h / r.sp))
    return largest


def _buffers(config: Any, tokens: float, r: RankSizes) -> float:
    """Estimated bytes of a rank's communication buffers. tokens: tokens of a micro-batch on this
    rank. r: the rank's sizes."""
    part = tokens * r.h * r.w / r.sp
    terms = [
        (config.sequence_parallel, part * r.sp),
        (r.pp > 1, 2 * part),
        (r.cp > 1, 2 * tokens * r.cp * r.keys),
        # tokens sent to other ranks; received ones are counted as the experts' input
        (config.num_moe_experts and r.ep > 1, config.moe_router_topk * part),
    ]
    return sum(size for applies, size in terms if applies)


class StepBytes(NamedTuple):
    """Bytes that a step takes on a rank beside weights, gradients and optimizer state.

    activations: at the peak of a backward pass. logits: the larger of two needs: a chunk of logits
    in the loss, with its gradients; or the gradients within a layer's backward pass. buffers: for
    communication. host: activations in host memory."""

    activations: float
    logits: float
    buffers: float
    host: float


def of_step(
    args: Any,
    config: Any,
    stage: int,
    layers: Sequence[int],
    length: int,
    trained: Iterable[str],
    *,
    on_gpu: bool,
    is_whole: bool,
    trains_head: bool,
    distils: bool,
) -> StepBytes:
    """Predict the StepBytes of a rank of a pipeline stage.

    args: TrainingArguments with the layout of config, a McaModelConfig. layers: indices of the
    stage's decoder layers that have a backward pass. length: tokens in a sample or row. trained:
    names of the rank's trained parameters. on_gpu: True if kernels are compiled. is_whole: True if
    whole weights are trained, False for adapters. trains_head: True if the output head is trained.
    distils: True if the loss compares with a teacher.
    """
    r = RankSizes(config)
    tokens = args.micro_batch_size * length / r.cp
    facts = _facts(r.w, on_gpu, not is_whole, length)
    layers = [*layers]
    is_last = stage == r.pp - 1
    if is_last:
        layers += range(config.num_layers, config.num_layers + (config.mtp_num_layers or 0))
    waiting, again, host = _activations(args, config, stage, layers, facts, r, tokens)
    of_inputs = input_activations(args, config, trained, length, r) if stage == 0 else 0.0
    logits = norm = 0.0
    if is_last:
        if not config.has_value_head:
            logits = _loss(config, tokens, trains_head, on_gpu, r, distils)
        # the final norm, whose output is whole for the head
        norm = (r.h * (facts.norm - r.w) + 4) / r.sp + r.h * r.w
    return StepBytes(
        activations=tokens * (waiting + max(norm, again)) + of_inputs,
        logits=max(logits, _passing(config, layers, r, tokens)),
        buffers=_buffers(config, tokens, r),
        host=tokens * host,
    )
