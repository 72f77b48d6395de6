"""What a rank holds in training, from the configs alone: bytes, without weights and without a GPU.

    static = weights + gradients + optimizer state; at the peak activations, the loss, buffers too

Weights are those of the family's rows (families.py), cut as the layout cuts them. The facts
about activations are counted storages: on a CPU those that autograd saves (tests/test_plan.py), on
a GPU, where kernels.py compiles, the live blocks of one H200.

Letters: T tokens of a micro-batch on this rank, h hidden size, w bytes of an activation.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from . import lora, lora_files, parallel
from .args import RunArguments, parse_args
from .args_rules_model import layout_stages
from .families import Row
from .files import show_size
from .loss_tokens import CHUNK_SIZE_CPU, CHUNK_SIZE_CUDA
from .model_config import AutoConfig, McaModelConfig
from .optim import splits_masters
from .tables import OBJECTIVES, OPTIMIZERS
from .weights_convert import VOCABULARY, degree, in_layer_order
from .weights_files import InitSource

# -- memory


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, and the parameters that they are for."""

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


@dataclass(frozen=True)
class _Parameters:
    """Counts of a rank: replicated over data parallel ranks, and experts', which have groups of
    their own."""

    dense: int = 0
    experts: int = 0

    def __add__(self, other):
        return _Parameters(self.dense + other.dense, self.experts + other.experts)

    @property
    def sum(self) -> int:
        return self.dense + self.experts


class ModelTensors:
    """The shapes of a model's tensors by their Hugging Face names, for any layout of it.

    config: McaModelConfig. spec: LoraSpec with its modules, None where all weights are trained.
    """

    def __init__(self, config: McaModelConfig, spec=None):
        self.source = InitSource(config.hf_config, 0, config.mtp_num_layers)
        self.modules = set(spec.modules) if spec is not None else set()
        self.spec = spec
        self._counted: tuple[Any, list] = (None, [])  # the last config, and what its stages have

    def of_stage(self, config, stage: int) -> tuple[_Parameters, _Parameters, _Parameters]:
        """(weights, those of them that are trained, adapters) of a rank of this pipeline stage."""
        if self._counted[0] is not config:
            self._counted = config, list(self._of_stages(config))
        return self._counted[1][stage]

    def _of_stages(self, config) -> Iterator[tuple[_Parameters, _Parameters, _Parameters]]:
        stages = range(config.pipeline_model_parallel_size)
        held, trained, adapters = ([_Parameters() for _ in stages] for _ in range(3))
        for row, _, names, stage in self._rows(config):
            held[stage] += self._count(config, row, names)
            if self.spec is not None:
                whole = [n for n in names if n.split(".")[-2] in self.spec.modules_to_save]
                trained[stage] += self._count(config, row, whole)
        for row, _, shapes, stage in self._adapters(config):
            adapters[stage] += self._of_rank(config, row, sum(map(math.prod, shapes.values())))
        yield from zip(held, held if self.spec is None else trained, adapters, strict=True)

    def total(self, config) -> int:
        """Parameters of the whole model, without adapters."""
        rows = self._rows(config)
        return sum(
            {tuple(names): self._numel(config, row, names) for row, _, names, _ in rows}.values()
        )

    def shapes(self, config, stage: int) -> dict[tuple[str, tuple[int, ...]], list]:
        """{(megatron's name, with {} for the layer and [] for the expert, shape on a rank of this
        pipeline stage): the layers that have it, None outside of them}. Adapters are PEFT's
        matrices, by their names in its files."""
        found: dict[tuple[str, tuple[int, ...]], list] = {}
        for row, layer, names, home in self._rows(config):
            if home != stage or row.expert:  # experts are shaped as the first one
                continue
            first, *rest = self.source.shape(names[0])
            if row.mca in VOCABULARY:
                first = config.padded_vocab_size
            elif row.kind in ("gated", "qkv"):
                first = sum(self.source.shape(name)[0] for name in names)
            cut = degree(row, config)
            if row.kind == "row":
                shape = (first, rest[0] // cut)
            else:
                shape = (first if row.kind == "copy" else first // cut, *rest)
            name = row.mca.replace("experts.0.", "experts.[].")
            found.setdefault((name, shape), []).append(layer)
        for row, layer, shapes, home in self._adapters(config):
            for name, shape in shapes.items():
                if home == stage and not row.expert:
                    name = name.replace("experts.0.", "experts.[].")
                    found.setdefault((name, shape), []).append(layer)
        return found

    def _adapters(self, config) -> Iterator[tuple[Row, int | None, dict, int]]:
        """(row, layer, {PEFT's name of a matrix, with {} for the layer: its shape on a rank},
        pipeline stage) of each module with an adapter."""
        for row, layer, home in _placed(config) if self.modules else ():
            for name in row.hf:
                if name.format(layer).removesuffix(".weight") not in self.modules:
                    continue
                module = name.removesuffix(".weight")
                rank = self.spec.rank
                cut = degree(row, config)
                if row.mca in VOCABULARY:
                    out = config.padded_vocab_size
                    into = config.hidden_size
                else:
                    out, into = self.source.shape(name.format(layer))
                shapes = {"lora_A.weight": (rank, into), "lora_B.weight": (out // cut, rank)}
                if row.mca == VOCABULARY[0]:
                    a = (rank, out // cut)
                    b = (into, rank)
                    shapes = {"lora_embedding_A": a, "lora_embedding_B": b}
                elif row.kind == "row":
                    shapes = {"lora_A.weight": (rank, into // cut), "lora_B.weight": (out, rank)}
                yield row, layer, {f"{module}.{key}": of for key, of in shapes.items()}, home

    def _rows(self, config) -> Iterator[tuple[Row, int | None, list[str], int]]:
        """(row, layer, Hugging Face's names, pipeline stage); twice of an embedding that the last
        stage has too."""
        last = config.pipeline_model_parallel_size - 1
        for row, layer, home in _placed(config):
            if row.mca.endswith("expert_bias"):
                continue  # a buffer of some bytes
            names = [name.format(layer) for name in row.hf]
            tied = config.tie_embeddings_and_output_weights
            if row.mca == VOCABULARY[1] and tied:
                continue
            yield row, layer, names, home
            if row.mca == VOCABULARY[0] and last > 0:
                if tied:  # a copy, as the head
                    yield replace(row, mca=VOCABULARY[1]), layer, names, last
                elif config.mtp_num_layers:  # another, for the tokens ahead
                    yield row, layer, names, last

    def _numel(self, config, row, names) -> int:
        if row.mca in VOCABULARY and names:
            return config.padded_vocab_size * config.hidden_size
        return sum(math.prod(self.source.shape(name)) for name in names)

    def _count(self, config, row, names) -> _Parameters:
        """This rank's part of a row's tensors."""
        numel = self._numel(config, row, names) // degree(row, config)
        return self._of_rank(config, row, numel)

    @staticmethod
    def _of_rank(config, row, numel: int) -> _Parameters:
        if row.expert is None:
            return _Parameters(dense=numel)
        here = row.expert < config.num_moe_experts // config.expert_model_parallel_size
        return _Parameters(experts=numel if here else 0)


def _placed(config) -> Iterator[tuple[Row, int | None, int]]:
    """(row, layer, pipeline stage) of the whole model in its order."""
    stage_of = stages_of_layers(config)
    last = config.pipeline_model_parallel_size - 1
    for row, layer in in_layer_order(config):
        home = last
        if layer is not None and layer < config.num_layers:
            home = stage_of[layer]
        elif row.mca == VOCABULARY[0]:
            home = 0
        yield row, layer, home


def stages_of_layers(config) -> list[int]:
    """The pipeline rank of each decoder layer."""
    pp = config.pipeline_model_parallel_size
    vpp = config.virtual_pipeline_model_parallel_size or 1
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        counts = [config.num_layers // (pp * vpp)] * (pp * vpp)
    elif isinstance(layout, str):
        counts = [stage.count("t") for stage in layout_stages(layout)]
    else:  # what megatron-core made of it: [pipeline rank][virtual stage] -> layer types
        grid = layout.layout
        counts = [
            sum(kind.name == "decoder" for kind in grid[rank][v])
            for v in range(vpp)
            for rank in range(pp)
        ]
    return [i % pp for i, count in enumerate(counts) for _ in range(count)]


# -- what stands still


def _static(args, config, tensors: ModelTensors, stage: int, world_size: int) -> dict:
    held, trained, adapters = tensors.of_stage(config, stage)
    width = config.params_dtype.itemsize
    moments = sum(
        2 if getattr(args, f"{name}_dtype", "fp32") == "bf16" else 4
        for name in OPTIMIZERS[args.optim].states
    )
    if args.optimizer_cpu_offload:
        moments *= 1 - args.optimizer_offload_fraction
    master = 4 if width == 2 else 0
    if splits_masters(args, config.params_dtype, bool(adapters.dense or adapters.experts)):
        master = 2
    dense = trained.dense * (moments + master) + adapters.dense * moments
    experts = trained.experts * (moments + master) + adapters.experts * moments
    if args.use_distributed_optimizer:
        pp = config.pipeline_model_parallel_size
        of_experts = config.expert_tensor_parallel_size * config.expert_model_parallel_size
        dense *= config.tensor_model_parallel_size * pp / world_size
        experts *= of_experts * pp / world_size
    gradient = width if width == 2 and not args.grad_reduce_in_fp32 else 4
    return dict(
        parameters=held.sum + adapters.sum,
        trained=trained.sum + adapters.sum,
        weights=held.sum * width + adapters.sum * 4,  # adapters are float32
        gradients=trained.sum * gradient + adapters.sum * 4,
        optimizer=round(dense + experts),
    )


# -- activations


@dataclass(frozen=True)
class _Facts:
    """What autograd keeps, in bytes: of each channel of a norm (its input and its output), and in
    numbers of an MLP's column (gate and up, their product, and between them)."""

    norm: int
    head_norm: int  # of queries and keys, whose output attention rotates and keeps itself
    mlp: int
    expert: int  # its columns are weighted too
    scores: int  # of attention whose values are narrower than its keys: bytes of a head
    attended: int  # its queries, keys and values: bytes of a number


def _facts(width: int, compiled: bool, frozen: bool, length: int) -> _Facts:
    """frozen: the norms' weights are not trained. length: of the sequences."""
    if compiled:
        return _Facts(norm=2 * width, head_norm=width, mlp=3, expert=3, scores=4, attended=width)
    quotient = 0 if frozen else width  # the input is float32 here
    return _Facts(
        norm=4 + quotient + width,
        head_norm=4 + quotient,
        mlp=4,
        expert=5,
        scores=4 * length,  # a CPU has no kernel for it, and keeps all of them
        attended=4,
    )


def _layer_bytes(config, layer: int, facts: _Facts) -> tuple[float, float]:
    """(bytes a token of a layer, those of its MLP or experts among them)."""
    w = config.params_dtype.itemsize
    h = config.hidden_size
    tp = config.tensor_model_parallel_size
    sp = tp if config.sequence_parallel else 1
    heads = config.num_attention_heads / tp
    groups = max((config.num_query_groups or config.num_attention_heads) / tp, 1)
    d = config.kv_channels
    if getattr(config, "kv_lora_rank", None):
        attention = _latent_bytes(config, facts, heads, sp)
    else:
        # queries and what they get, keys, values, and the sum of each row's exponentials
        attention = 2 * w * d * (heads + groups) + 4 * heads
        if config.qk_layernorm:
            attention += facts.head_norm * d * (heads + groups) + 4 * (heads + groups)
    norms = 2 + 2 * config.post_norms
    around = norms * (facts.norm * h + 4) / sp + attention
    if not config.is_moe_layer(layer):
        mlp = w * facts.mlp * config.ffn_hidden_size / tp
        return around + mlp, mlp
    etp = config.expert_tensor_parallel_size
    columns = facts.expert * config.moe_ffn_hidden_size / etp
    experts = w * config.moe_router_topk * (h + columns) * etp / sp
    experts += w * facts.mlp * (config.moe_shared_expert_intermediate_size or 0) / tp
    if getattr(config, "moe_shared_expert_gate", False):
        experts += w * h / sp
    if w < 4:
        experts += 4 * h / sp  # the router's input in float32
    return around + experts, experts


def _latent_bytes(config, facts: _Facts, heads: float, sp: int) -> float:
    """Bytes a token of multi-latent attention, without the norm before it."""
    w = config.params_dtype.itemsize
    still = config.qk_head_dim
    turning = config.qk_pos_emb_head_dim
    query = still + turning
    value = config.v_head_dim
    scores = facts.scores
    if query == value:
        scores = 4
    of_value = value  # a copy
    latent = facts.norm * (config.kv_lora_rank + (config.q_lora_rank or 0))
    if facts.attended == w:  # no copies: a value is a view beside the keys' part that stays
        of_value += still
        latent += w * turning
    attended = facts.attended * (2 * query + of_value) + w * value + scores
    return heads * attended + latent / sp


def _activations(args, config, stage: int, tokens: float, facts: _Facts) -> tuple[float, float]:
    """(bytes that wait for the backward pass, what a layer needs that is computed again)."""
    layers = [i for i, home in enumerate(stages_of_layers(config)) if home == stage]
    if stage == config.pipeline_model_parallel_size - 1:
        layers += range(config.num_layers, config.num_layers + (config.mtp_num_layers or 0))
    w = config.params_dtype.itemsize
    sp = config.tensor_model_parallel_size if config.sequence_parallel else 1
    cut = w * config.hidden_size / sp  # what flows between layers, of a token
    whole = 0.0
    kept = []
    for layer in layers:
        of_layer, of_mlp = _layer_bytes(config, layer, facts)
        whole = max(whole, of_layer)
        modules = config.recompute_modules or ()
        if config.recompute_granularity == "selective" and {"mlp", "moe"} & set(modules):
            of_layer -= of_mlp
        kept.append(of_layer)
    if config.recompute_granularity == "full":
        unit = config.recompute_num_layers or 1
        inputs = cut / (
            config.tensor_model_parallel_size if args.distribute_saved_activations else 1
        )
        if config.recompute_method == "block":
            kept = [inputs] * min(unit, len(kept)) + kept[unit:]
            unit = 1
        else:
            kept = [inputs] * -(-len(kept) // unit)
        again = whole * min(unit, len(layers)) - inputs
    else:
        again = 0.0
    return tokens * sum(kept) * _in_flight(args, config, stage), tokens * again


def _in_flight(args, config, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once: of virtual stages parts of them."""
    pp = config.pipeline_model_parallel_size
    vpp = config.virtual_pipeline_model_parallel_size
    micro_batches = args.gradient_accumulation_steps or 1
    if pp == 1:
        return 1
    if not vpp:
        return min(micro_batches, pp - stage)
    chunks = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return min(micro_batches * vpp, chunks) / vpp


def _loss(args, config, tokens: float, trains_head: bool, on_gpu: bool) -> float:
    """Bytes of the loss while it is taken."""
    w = config.params_dtype.itemsize
    h = config.hidden_size
    columns = config.padded_vocab_size / config.tensor_model_parallel_size
    chunk = config.loss_chunk_size or (CHUNK_SIZE_CUDA if on_gpu else CHUNK_SIZE_CPU)
    loss = min(chunk, tokens) * columns * w + tokens * h * w
    if trains_head:
        loss += columns * h * 4  # float32
    return loss


def _final_norm(config, tokens: float, facts: _Facts) -> float:
    """Bytes that it keeps, with its output whole for the head."""
    w = config.params_dtype.itemsize
    h = config.hidden_size
    sp = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return tokens * (h * (facts.norm - w) + 4) / sp + tokens * h * w


def _buffers(config, tokens: float) -> float:
    w = config.params_dtype.itemsize
    h = config.hidden_size
    tp = config.tensor_model_parallel_size
    whole = tokens * h * w
    total = whole if config.sequence_parallel else 0.0
    if config.pipeline_model_parallel_size > 1:
        total += 2 * whole / (tp if config.sequence_parallel else 1)
    if config.context_parallel_size > 1:
        groups = config.num_query_groups or config.num_attention_heads
        keys = 2 * max(groups / tp, 1) * config.kv_channels * w
        total += 2 * tokens * config.context_parallel_size * keys
    if config.num_moe_experts and config.expert_model_parallel_size > 1:
        # what goes to other ranks; what comes from them is kept, as the experts' input
        total += config.moe_router_topk * whole / (tp if config.sequence_parallel else 1)
    return total


# -- a rank


def rank_memory(
    args, config, tensors: ModelTensors, stage: int, length: int, world_size: int, on_gpu: bool
) -> RankMemory:
    """What a rank of a pipeline stage holds at the peak of a step.

    args: TrainingArguments with the layout of config, a McaModelConfig; length: tokens of a
    sample or row; on_gpu: whether kernels are compiled.
    """
    tokens = args.micro_batch_size * length / config.context_parallel_size
    facts = _facts(config.params_dtype.itemsize, on_gpu, tensors.spec is not None, length)
    activations, again = _activations(args, config, stage, tokens, facts)
    logits = norm = 0.0
    if stage == config.pipeline_model_parallel_size - 1:
        spec = tensors.spec
        trains_head = spec is None or "lm_head" in (spec.modules_to_save or ())
        logits = _loss(args, config, tokens, trains_head, on_gpu)
        norm = _final_norm(config, tokens, facts)
    return RankMemory(
        **_static(args, config, tensors, stage, world_size),
        activations=round(activations + max(norm, again)),
        logits=round(logits),
        buffers=round(_buffers(config, tokens)),
    )


class ModelOfRun:
    """What the layouts of a run share: the tensors of its model and of a reference that is a model
    of its own, and the lengths of a sample's documents. arguments: RunArguments."""

    def __init__(self, arguments):
        config = self.config_of(arguments)
        spec = None
        keys = arguments.finetuning
        if keys.finetuning_type == "lora":
            spec = lora.plan(config, lora_files.adapter_of_keys(keys)[0])
        self.tensors = ModelTensors(config, spec)
        documents = 2 if OBJECTIVES[keys.stage].has_pairs else 1
        self.lengths = [arguments.data.cutoff_len] * documents
        self.reference: str | None = None  # its folder
        if documents > 1 and keys.ref_model not in (None, "cached", "adapter"):
            self.reference = keys.ref_model
            if keys.ref_model == "model":
                self.reference = arguments.model.model_name_or_path

    @staticmethod
    def config_of(arguments) -> McaModelConfig:
        keys = arguments.model
        name = keys.model_name_or_path
        remote = keys.trust_remote_code
        return AutoConfig.from_pretrained(name, arguments.training, remote, arguments.model_config)

    def fullest_rank(self, args, config, world_size: int, on_gpu: bool) -> tuple[int, RankMemory]:
        """(pipeline stage, memory) of the rank that holds most, in the layout of config."""
        stages = range(config.pipeline_model_parallel_size)
        length = sum(self.lengths)
        each = [
            rank_memory(args, config, self.tensors, stage, length, world_size, on_gpu)
            for stage in stages
        ]
        if self.reference is not None:
            second = AutoConfig.from_pretrained(self.reference, args)
            tensors = ModelTensors(second)
            width = second.params_dtype.itemsize
            held = [tensors.of_stage(second, stage)[0].sum for stage in stages]
            each = [replace(each[stage], reference=held[stage] * width) for stage in stages]
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
            if saves > 0:
                saved.append((saves, f"{words} (-{show_size(saves)})"))
    best = [words for _, words in sorted(saved, reverse=True)]
    if len(best) < _SHOWN:  # these change what is trained
        best += ["a lower cutoff_len", "finetuning_type: lora"]
    return [
        f"planned were {show_size(planned.total)} on the fullest rank: {sizes}",
        f"most likely to help: {'; '.join(best[:_SHOWN])}",
    ]


def _candidates(args) -> Iterator[dict]:
    """Keys that may lower memory, where the run has them not."""
    if args.micro_batch_size > 1:
        yield {"per_device_train_batch_size": args.micro_batch_size // 2}
    if args.recompute_granularity != "full":
        yield {"recompute_granularity": "full"}
    if not args.use_distributed_optimizer and args.data_parallel_size > 1:
        yield {"use_distributed_optimizer": True}
    if args.data_parallel_size > 1:
        tp, pp, cp = (f"{name}_parallel_size" for name in _DEGREES)
        yield {tp: 2 * getattr(args, tp), "sequence_parallel": True}
        yield {pp: 2 * getattr(args, pp)}
        yield {cp: 2 * getattr(args, cp)}
    if not args.optimizer_cpu_offload:
        yield {"optimizer_cpu_offload": True}
    if "fp32" in (args.exp_avg_dtype, args.exp_avg_sq_dtype):
        yield {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    if not (args.bf16 or args.fp16):
        yield {"bf16": True}
    elif args.grad_reduce_in_fp32:
        yield {"grad_reduce_in_fp32": False}


_DEGREES = ("tensor_model", "pipeline_model", "context")


def _changed(arguments: RunArguments, keys: dict) -> RunArguments:
    """The run with other values of keys and the same global batch. ConfigError where the rules
    refuse it."""
    values = arguments.to_yaml_dict()
    values["global_batch_size"] = arguments.training.train_global_batch_size
    values.pop("gradient_accumulation_steps", None)
    return parse_args([f"{key}={json.dumps(value)}" for key, value in (values | keys).items()])
