"""Memory of a rank in training, from the configs alone: bytes, without weights and without a GPU.

    static = weights + gradients + optimizer state; at the peak activations, the loss, buffers too

Weights are those of the family's rows (families.py), cut as the layout cuts them. The facts
about activations are counted storages: on a CPU those saved by autograd (tests/test_plan.py), on
a GPU, where kernels.py compiles, the live blocks of one H200.

Letters: T tokens of a micro-batch on this rank, h hidden size, w bytes of an activation.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from . import lora, lora_files, parallel
from .args import RunArguments, parse_args
from .args_rules import is_saved
from .families import Row
from .files import show_size
from .loss_tokens import CHUNK_SIZE_CPU, CHUNK_SIZE_CUDA
from .model_config import AutoConfig, McaModelConfig
from .optim import splits_masters
from .tables import OBJECTIVES, OPTIMIZERS
from .weights_convert import VOCABULARY, degree, in_layer_order
from .weights_files import InitSource


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, and the number of its parameters."""

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int  # of the loss: a chunk of logits, the gradients taken with it
    buffers: int  # of messages between ranks
    reference: int = 0  # the weights of a second model

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in PARTS)


PARTS = [field.name for field in fields(RankMemory)][2:]


# -- the tensors of a rank


class RankTensor(NamedTuple):
    """A weight, or a matrix of an adapter, as a rank holds it."""

    name: str  # megatron's, of an adapter PEFT's, with {} for the layer and [] for the expert
    layer: int | None  # None outside of layers
    shape: tuple[int, ...]
    is_trained: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_adapter(self) -> bool:
        return ".lora_" in self.name

    @property
    def is_expert(self) -> bool:
        return "experts.[]." in self.name


class ModelTensors:
    """The tensors of each rank in the layout of a config.

    spec: LoraSpec with its modules, None if all weights are trained. source: shapes by Hugging Face
    name, the same for every layout of a model. stages: the tensors of a rank of each pipeline
    stage. total: parameters of the whole model, without adapters.
    """

    def __init__(self, config: McaModelConfig, spec=None, source: InitSource | None = None):
        self.config = config
        self.spec = spec
        self.source = source or InitSource(config.hf_config, 0, config.mtp_num_layers)
        self.stages: list[list[RankTensor]] = []
        self.stages += ([] for _ in range(config.pipeline_model_parallel_size))
        self.total = 0
        stage_of = stages_of_layers(config)
        placed = []
        for row, layer in in_layer_order(config):
            stage = -1
            if row.mca == VOCABULARY[0]:
                stage = 0
            elif layer is not None and layer < config.num_layers:
                stage = stage_of[layer]
            placed.append((row, layer, stage))
        for of_row in placed:
            self._add_weight(*of_row)
        self.adapted = set(spec.modules if spec is not None else ())
        for row, layer, stage in placed:
            if row.is_linear:
                self._add_adapters(row, layer, stage)

    def _add_weight(self, row: Row, layer: int | None, stage: int) -> None:
        config = self.config
        is_tied = config.tie_embeddings_and_output_weights
        is_tied_head = is_tied and row.mca == VOCABULARY[1]
        if is_tied_head or row.mca.endswith("expert_bias"):  # a buffer of some bytes
            return
        names = [name.format(layer) for name in row.hf]
        shape = list(self.source.shape(names[0]))
        shape[0] = sum(self.source.shape(name)[0] for name in names)
        if row.mca in VOCABULARY:
            shape[0] = config.padded_vocab_size
        self.total += math.prod(shape)
        modules = lora.modules_of(row, layer)
        is_trained = self.spec is None or any(is_saved(name, self.spec) for name in modules)
        if row.axis is not None:
            shape[row.axis] //= degree(row, config)
        self._add(row, row.mca, layer, shape, is_trained, stage)
        is_again = is_tied or config.mtp_num_layers  # as the head, or for the tokens ahead
        if row.mca == VOCABULARY[0] and is_again and len(self.stages) > 1:
            self._add(row, VOCABULARY[is_tied], layer, shape, is_trained, -1)

    def _add_adapters(self, row: Row, layer: int | None, stage: int) -> None:
        for name in row.hf:
            if lora.module_of(name.format(layer)) not in self.adapted:
                continue
            rank = self.spec.rank
            sizes = [self.config.padded_vocab_size, self.config.hidden_size]
            if row.mca not in VOCABULARY:
                sizes = list(self.source.shape(name.format(layer)))
            if row.axis is not None:
                sizes[row.axis] //= degree(row, self.config)
            out, into = sizes
            shapes = {"lora_A.weight": (rank, into), "lora_B.weight": (out, rank)}
            if row.mca == VOCABULARY[0]:
                shapes = {"lora_embedding_A": (rank, out), "lora_embedding_B": (into, rank)}
            for matrix, shape in shapes.items():
                self._add(row, f"{lora.module_of(name)}.{matrix}", layer, shape, True, stage)

    def _add(self, row: Row, name: str, layer, shape, is_trained: bool, stage: int) -> None:
        """Add a tensor, unless it is of an expert on other ranks."""
        if row.expert is not None:
            name = name.replace(f"experts.{row.expert}.", "experts.[].")
            if row.expert >= self.config.num_moe_experts // self.config.expert_model_parallel_size:
                return
        self.stages[stage].append(RankTensor(name, layer, tuple(shape), is_trained))

    def counts(self, stage: int) -> tuple[int, int]:
        """(parameters, trained ones) of a rank of a pipeline stage."""
        held = self.stages[stage]
        return sum(t.numel for t in held), sum(t.numel for t in held if t.is_trained)

    def shapes(self, stage: int) -> dict[tuple[str, tuple[int, ...]], list]:
        """{(name, shape) of a tensor on a rank of a pipeline stage: its layers}. Experts of a layer
        count as one."""
        layers: dict[tuple[str, tuple[int, ...]], dict] = {}
        for tensor in self.stages[stage]:
            layers.setdefault((tensor.name, tensor.shape), {})[tensor.layer] = None
        return {key: list(of_tensor) for key, of_tensor in layers.items()}


def stages_of_layers(config) -> list[int]:
    """The pipeline rank of each decoder layer."""
    pp = config.pipeline_model_parallel_size
    vpp = config.virtual_pipeline_model_parallel_size or 1
    counts = [config.num_layers // (pp * vpp)] * (pp * vpp)
    layout = config.pipeline_model_parallel_layout
    if layout is not None:  # [pipeline rank][virtual stage] -> layer types
        chunks = [layout.layout[rank][v] for v in range(vpp) for rank in range(pp)]
        counts = [sum(kind.name == "decoder" for kind in chunk) for chunk in chunks]
    return [i % pp for i, count in enumerate(counts) for _ in range(count)]


def _static(args, config, tensors: ModelTensors, stage: int, world_size: int) -> dict:
    """Parameters, and bytes of weights, gradients and optimizer state."""
    held = tensors.stages[stage]
    parameters, trained = tensors.counts(stage)
    width = config.params_dtype.itemsize
    moments = sum(
        2 if getattr(args, f"{name}_dtype", "fp32") == "bf16" else 4
        for name in OPTIMIZERS[args.optim].states
    )
    if args.optimizer_cpu_offload:
        moments *= 1 - args.optimizer_offload_fraction
    master = 4 if width == 2 else 0
    if splits_masters(args, config.params_dtype, any(t.is_adapter for t in held)):
        master = 2
    gradient = width if width == 2 and not args.grad_reduce_in_fp32 else 4
    share = share_of_experts = 1.0  # of the states on this rank
    if args.use_distributed_optimizer:
        ranks_per_stage = world_size / config.pipeline_model_parallel_size
        share = config.tensor_model_parallel_size / ranks_per_stage
        of_experts = config.expert_tensor_parallel_size * config.expert_model_parallel_size
        share_of_experts = of_experts / ranks_per_stage
    weights = gradients = states = 0
    for tensor in held:
        sizes = (width, gradient, moments + master)
        if tensor.is_adapter:  # float32, without masters
            sizes = (4, 4, moments)
        weights += tensor.numel * sizes[0]
        if tensor.is_trained:
            gradients += tensor.numel * sizes[1]
            states += tensor.numel * sizes[2] * (share_of_experts if tensor.is_expert else share)
    return dict(
        parameters=parameters,
        trained=trained,
        weights=weights,
        gradients=gradients,
        optimizer=round(states),
    )


# -- activations


class RankSizes(NamedTuple):
    """Sizes of a rank in the formulas of memory and time."""

    w: int  # bytes of an activation
    h: int
    tp: int
    sp: int  # ranks sharing the tokens between linears
    pp: int
    cp: int
    ep: int
    heads: float  # attention heads, and groups of them with a key and a value
    groups: float
    keys: float  # bytes of a token's keys and values in a layer

    @classmethod
    def of(cls, config) -> "RankSizes":
        """The sizes of a McaModelConfig."""
        w = config.params_dtype.itemsize
        tp = config.tensor_model_parallel_size
        heads = config.num_attention_heads / tp
        groups = max((config.num_query_groups or config.num_attention_heads) / tp, 1)
        return cls(
            w=w,
            h=config.hidden_size,
            tp=tp,
            sp=tp if config.sequence_parallel else 1,
            pp=config.pipeline_model_parallel_size,
            cp=config.context_parallel_size,
            ep=config.expert_model_parallel_size,
            heads=heads,
            groups=groups,
            keys=2 * groups * config.kv_channels * w,
        )


class _Facts(NamedTuple):
    """Tensors saved by autograd, in bytes: for each channel of a norm (its input and its output),
    and in numbers for an MLP's column (gate and up, their product, and between them)."""

    norm: int
    head_norm: int  # of queries and keys; attention rotates its output and keeps that itself
    mlp: int
    expert: int  # its columns are weighted too
    scores: int  # of attention with values narrower than its keys: bytes of a head
    attended: int  # its queries, keys and values: bytes of a number


def _facts(width: int, compiled: bool, frozen: bool, length: int) -> _Facts:
    """frozen: the norms' weights are not trained. length: of the sequences."""
    if compiled:
        return _Facts(norm=2 * width, head_norm=width, mlp=3, expert=3, scores=4, attended=width)
    quotient = width * (not frozen)
    return _Facts(
        norm=4 + quotient + width,  # the input is float32 here
        head_norm=4 + quotient,
        mlp=4,
        expert=5,
        scores=4 * length,  # a CPU has no kernel for it, and keeps all of them
        attended=4,
    )


def _layer_bytes(config, layer: int, facts: _Facts) -> tuple[float, float]:
    """(bytes a token of a layer, those of its MLP or experts among them)."""
    r = RankSizes.of(config)
    if getattr(config, "kv_lora_rank", None):
        attention = _latent_bytes(config, facts, r)
    else:
        # queries and attention's output, keys, values, and the sum of each row's exponentials
        heads = r.heads + r.groups
        attention = 2 * r.w * config.kv_channels * heads + 4 * r.heads
        if config.qk_layernorm:
            attention += (facts.head_norm * config.kv_channels + 4) * heads
    norms = 2 + 2 * config.post_norms
    around = norms * (facts.norm * r.h + 4) / r.sp + attention
    if not config.is_moe_layer(layer):
        mlp = r.w * facts.mlp * config.ffn_hidden_size / r.tp
        return around + mlp, mlp
    etp = config.expert_tensor_parallel_size
    columns = facts.expert * config.moe_ffn_hidden_size / etp
    experts = r.w * config.moe_router_topk * (r.h + columns) * etp / r.sp
    experts += r.w * facts.mlp * (config.moe_shared_expert_intermediate_size or 0) / r.tp
    if getattr(config, "moe_shared_expert_gate", False):
        experts += r.w * r.h / r.sp
    if r.w < 4:
        experts += 4 * r.h / r.sp  # the router's input in float32
    return around + experts, experts


def _latent_bytes(config, facts: _Facts, r: RankSizes) -> float:
    """Bytes a token of multi-latent attention, without the norm before it."""
    rotated = config.qk_pos_emb_head_dim
    query = config.qk_head_dim + rotated
    value = config.v_head_dim
    value_copy = value
    latent = facts.norm * (config.kv_lora_rank + (config.q_lora_rank or 0))
    if facts.attended == r.w:  # no copies: a value is a view beside the unrotated part of the keys
        value_copy += config.qk_head_dim
        latent += r.w * rotated
    scores = 4 if query == value else facts.scores
    attended = facts.attended * (2 * query + value_copy) + r.w * value + scores
    return r.heads * attended + latent / r.sp


def _activations(args, config, stage: int, tokens: float, facts: _Facts) -> tuple[float, float]:
    """(bytes kept for the backward pass, bytes of a layer while it is recomputed)."""
    r = RankSizes.of(config)
    layers = [i for i, home in enumerate(stages_of_layers(config)) if home == stage]
    if stage == r.pp - 1:
        layers += range(config.num_layers, config.num_layers + (config.mtp_num_layers or 0))
    sizes = [_layer_bytes(config, layer, facts) for layer in layers]
    kept = [of_layer for of_layer, _ in sizes]
    largest = max(kept, default=0.0)
    again = 0.0
    if config.recompute_granularity == "selective":
        if {"mlp", "moe"} & set(config.recompute_modules or ()):
            kept = [of_layer - of_mlp for of_layer, of_mlp in sizes]
    elif config.recompute_granularity == "full":
        unit = config.recompute_num_layers or 1
        inputs = r.w * r.h / r.sp  # of a layer, a token
        if args.distribute_saved_activations:
            inputs /= r.tp
        if config.recompute_method == "block":
            kept = [inputs] * min(unit, len(kept)) + kept[unit:]
            unit = 1
        else:
            kept = [inputs] * -(-len(kept) // unit)
        again = largest * min(unit, len(layers)) - inputs
    return tokens * sum(kept) * _in_flight(args, config, stage), tokens * again


def _in_flight(args, config, stage: int) -> float:
    """Micro-batches with activations on a stage at once: of virtual stages parts of them."""
    pp = config.pipeline_model_parallel_size
    vpp = config.virtual_pipeline_model_parallel_size or 1
    micro_batches = args.gradient_accumulation_steps or 1
    chunks = pp - stage
    if vpp > 1:
        chunks = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return min(micro_batches * vpp, chunks) / vpp


def _loss(config, tokens: float, trains_head: bool, on_gpu: bool) -> float:
    """Bytes of the loss while it is taken."""
    r = RankSizes.of(config)
    columns = config.padded_vocab_size / r.tp
    chunk = config.loss_chunk_size or (CHUNK_SIZE_CUDA if on_gpu else CHUNK_SIZE_CPU)
    float32_gradient = columns * r.h * 4 * trains_head
    return min(chunk, tokens) * columns * r.w + tokens * r.h * r.w + float32_gradient


def _final_norm(config, tokens: float, facts: _Facts) -> float:
    """Bytes kept by the final norm, with its output whole for the head."""
    r = RankSizes.of(config)
    return tokens * (r.h * (facts.norm - r.w) + 4) / r.sp + tokens * r.h * r.w


def _buffers(config, tokens: float) -> float:
    """Bytes of messages between ranks."""
    r = RankSizes.of(config)
    whole = tokens * r.h * r.w
    part = whole / r.sp
    total = whole * bool(config.sequence_parallel)
    if r.pp > 1:
        total += 2 * part
    if r.cp > 1:
        total += 2 * tokens * r.cp * r.keys
    if config.num_moe_experts and r.ep > 1:
        # sent to other ranks; received tokens are kept, as the experts' input
        total += config.moe_router_topk * part
    return total


# -- a rank


def rank_memory(
    args, config, tensors: ModelTensors, stage: int, length: int, world_size: int, on_gpu: bool
) -> RankMemory:
    """Memory of a rank of a pipeline stage at the peak of a step.

    args: TrainingArguments with the layout of config, a McaModelConfig; length: tokens of a
    sample or row; on_gpu: True if kernels are compiled.
    """
    spec = tensors.spec
    tokens = args.micro_batch_size * length / config.context_parallel_size
    facts = _facts(config.params_dtype.itemsize, on_gpu, spec is not None, length)
    activations, again = _activations(args, config, stage, tokens, facts)
    logits = norm = 0.0
    if stage == config.pipeline_model_parallel_size - 1:
        trains_head = spec is None or "lm_head" in spec.modules_to_save
        logits = _loss(config, tokens, trains_head, on_gpu)
        norm = _final_norm(config, tokens, facts)
    return RankMemory(
        **_static(args, config, tensors, stage, world_size),
        activations=round(activations + max(norm, again)),
        logits=round(logits),
        buffers=round(_buffers(config, tokens)),
    )


class ModelOfRun:
    """The part of a plan common to all layouts of a run: shapes of its model, adapters, lengths of
    a sample's documents, the folder of a reference model. arguments: RunArguments."""

    def __init__(self, arguments):
        config = self.config_of(arguments)
        keys = arguments.finetuning
        self.spec = None
        if keys.finetuning_type == "lora":
            self.spec = lora.plan(config, lora_files.adapter_of_keys(keys)[0])
        self.source = InitSource(config.hf_config, 0, config.mtp_num_layers)
        has_pairs = OBJECTIVES[keys.stage].has_pairs
        self.lengths = [arguments.data.cutoff_len] * (1 + has_pairs)
        self.reference: str | None = None
        if has_pairs and keys.ref_model not in ("cached", "adapter"):
            self.reference = keys.ref_model
            if keys.ref_model == "model":
                self.reference = arguments.model.model_name_or_path

    @staticmethod
    def config_of(arguments) -> McaModelConfig:
        keys = arguments.model
        name = keys.model_name_or_path
        remote = keys.trust_remote_code
        return AutoConfig.from_pretrained(name, arguments.training, remote, arguments.model_config)

    def tensors(self, config) -> ModelTensors:
        """The tensors of the model in the layout of a config."""
        return ModelTensors(config, self.spec, self.source)

    def fullest_rank(self, args, config, world_size: int, on_gpu: bool) -> tuple[int, RankMemory]:
        """(pipeline stage, memory) of the rank with the most memory, in the layout of config."""
        stages = range(config.pipeline_model_parallel_size)
        tensors = self.tensors(config)
        length = sum(self.lengths)
        each = [
            rank_memory(args, config, tensors, stage, length, world_size, on_gpu)
            for stage in stages
        ]
        if self.reference is not None:
            second = AutoConfig.from_pretrained(self.reference, args)
            held = ModelTensors(second)
            width = second.params_dtype.itemsize
            each = [replace(each[s], reference=held.counts(s)[0] * width) for s in stages]
        return max(enumerate(each), key=lambda pair: pair[1].total)


# -- advice when memory runs out

_SHOWN = 3


@contextlib.contextmanager
def explained(arguments: RunArguments) -> Iterator[None]:
    """Add the planned memory and the keys that lower it most to torch's error of too little GPU
    memory. It stays a torch.OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        lines = [str(error).strip()]
        with contextlib.suppress(Exception):  # the first words must come through
            lines += advice(arguments, parallel.world_size())
        raise torch.OutOfMemoryError("\n  ".join(lines)) from error


def advice(arguments: RunArguments, world_size: int) -> list[str]:
    """Lines: the planned memory by its parts, and the keys that lower it most."""
    if not arguments.backend.use_mca:
        return ["what helps: a smaller per_device_train_batch_size or cutoff_len, or use_mca: true"]
    model = ModelOfRun(arguments)

    def memory_of(run: RunArguments) -> RankMemory:
        config = model.config_of(run)
        on_gpu = torch.cuda.is_available()
        return model.fullest_rank(run.training, config, world_size, on_gpu)[1]

    planned = memory_of(arguments)
    parts = sorted(PARTS, key=lambda part: -getattr(planned, part))
    sizes = ", ".join(f"{part} {show_size(getattr(planned, part))}" for part in parts)
    saved = []
    for keys in _candidates(arguments.training):
        with contextlib.suppress(ValueError):  # refused by the rules
            saves = planned.total - memory_of(_changed(arguments, keys)).total
            words = ", ".join(f"{key}: {str(value).lower()}" for key, value in keys.items())
            saved.append((saves, f"{words} (-{show_size(saves)})"))
    best = [words for saves, words in sorted(saved, reverse=True) if saves > 0]
    if len(best) < _SHOWN:  # these change what is trained
        best += ["a lower cutoff_len", "finetuning_type: lora"]
    return [
        f"planned were {show_size(planned.total)} on the fullest rank: {sizes}",
        f"most likely to help: {'; '.join(best[:_SHOWN])}",
    ]


def _candidates(args) -> list[dict]:
    """Keys that may lower memory, unless the run has them already."""
    tp, pp, cp = (f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
    has_copies = args.data_parallel_size > 1
    in_half = args.bf16 or args.fp16
    has_float_moments = "fp32" in (args.exp_avg_dtype, args.exp_avg_sq_dtype)
    rows = [
        (args.micro_batch_size > 1, {"per_device_train_batch_size": args.micro_batch_size // 2}),
        (args.recompute_granularity != "full", {"recompute_granularity": "full"}),
        (has_copies and not args.use_distributed_optimizer, {"use_distributed_optimizer": True}),
        (has_copies, {tp: 2 * getattr(args, tp), "sequence_parallel": True}),
        (has_copies, {pp: 2 * getattr(args, pp)}),
        (has_copies, {cp: 2 * getattr(args, cp)}),
        (not args.optimizer_cpu_offload, {"optimizer_cpu_offload": True}),
        (has_float_moments, {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
        (not in_half, {"bf16": True}),
        (in_half and args.grad_reduce_in_fp32, {"grad_reduce_in_fp32": False}),
    ]
    return [keys for applies, keys in rows if applies]


def _changed(arguments: RunArguments, keys: dict) -> RunArguments:
    """The run with other values of keys and the same global batch. ConfigError if the rules refuse
    it."""
    values = arguments.to_yaml_dict()
    values["global_batch_size"] = arguments.training.train_global_batch_size
    values.pop("gradient_accumulation_steps", None)
    return parse_args([f"{key}={json.dumps(value)}" for key, value in (values | keys).items()])
