"""Memory of a rank in training, from the configs alone: bytes, without weights and without a GPU.

    static = weights + gradients + optimizer state; at the peak activations, the loss, buffers too

Weights are those of the family's rows (families.py), cut as the layout cuts them. The facts
about activations are counted storages: on a CPU those saved by autograd (tests/test_plan.py), on
a GPU, where kernels.py compiles, the live blocks of one H200.

Letters: T tokens of a micro-batch on this rank, h hidden size, w bytes of an activation.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from .errors import Judge
from .families_rows import Row
from .finetuning import Finetuning, Request, finetuning_class, lowest_layer
from .hosts import module_of, modules_of
from .loss_tokens import CHUNK_SIZE_CPU, CHUNK_SIZE_CUDA, CHUNK_SIZE_OF_LOGITS
from .model_config import AutoConfig, McaModelConfig
from .optim import splits_masters
from .tables import LAYER_TYPES, OBJECTIVES, OPTIMIZERS, TEACHER_KEY, function_of
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
    nccl: int = 0  # outside of torch's allocator

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

    finetuning: as planned. source: shapes by Hugging Face name, the same for every layout of a
    model.
    stages: the tensors of a rank of each pipeline stage. total, total_trained: parameters of the
    whole model, without adapters.
    """

    def __init__(
        self,
        config: McaModelConfig,
        finetuning: Finetuning | None = None,
        source: InitSource | None = None,
    ) -> None:
        self.config = config
        self.finetuning = finetuning or Finetuning()
        self.total_trained = 0
        self.lowest = 0  # layer with a backward pass
        # recomputation asks for gradients of the first layer's input
        trained = self.finetuning.trained
        if trained is not None and config.recompute_granularity is None:
            self.lowest = lowest_layer(trained, config.num_layers)
        self.source = source or InitSource(config.hf_config, 0, config.mtp_num_layers)
        self.total = 0
        self.stages: list[list[RankTensor]] = []
        self.stages += ([] for _ in range(config.pipeline_model_parallel_size))
        stage_of = dict(enumerate(stages_of_layers(config)))
        for row, layer in in_layer_order(config):
            stage = stage_of.get(layer, -1)
            if row.mca == VOCABULARY[0] or row.is_of_inputs:
                stage = 0
            self._add_weight(row, layer, stage)
            for name in row.hf:
                if row.is_linear:
                    self._add_beside(row, name, layer, stage)

    def _add_weight(self, row: Row, layer: int | None, stage: int) -> None:
        config = self.config
        is_tied = config.tie_embeddings_and_output_weights
        is_tied_head = is_tied and row.mca == VOCABULARY[1]
        if is_tied_head or row.mca.endswith("expert_bias"):  # a buffer of some bytes
            return
        first, *others = [self.source.shape(name.format(layer)) for name in row.hf]
        shape = [first[0] + sum(other[0] for other in others), *first[1:]]
        if row.mca in VOCABULARY:
            shape[0] = config.padded_vocab_size
        self.total += math.prod(shape)
        modules = modules_of(row, layer)
        is_trained = any(map(self.finetuning.trains, modules))
        self.total_trained += math.prod(shape) * is_trained
        shape = self._cut(row, shape)
        self._add(row, row.mca, layer, shape, is_trained, stage)
        is_again = is_tied or config.mtp_num_layers  # as the head, or for the tokens ahead
        if row.mca == VOCABULARY[0] and is_again and len(self.stages) > 1:
            self._add(row, VOCABULARY[is_tied], layer, shape, is_trained, -1)

    def _add_beside(self, row: Row, name: str, layer: int | None, stage: int) -> None:
        shape = self.source.shape(name.format(layer))
        if row.mca in VOCABULARY:
            shape = (self.config.padded_vocab_size, self.config.hidden_size)
        module = module_of(name.format(layer))
        is_embedding = row.mca == VOCABULARY[0]
        shapes = self.finetuning.shapes_beside(module, self._cut(row, shape), is_embedding)
        for matrix, shape in shapes.items():
            self._add(row, f"{module_of(name)}.{matrix}", layer, shape, True, stage)

    def _cut(self, row: Row, shape) -> list[int]:
        """The shape of a rank's part."""
        part = list(shape)
        if row.axis is not None:
            part[row.axis] //= degree(row, self.config)
        return part

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
    chunks = pp * (config.virtual_pipeline_model_parallel_size or 1)
    layout = config.pipeline_model_parallel_layout
    stages = []
    for chunk in range(chunks):
        stage = chunk % pp
        count = config.num_layers // chunks
        if layout is not None:  # [pipeline rank][virtual stage] -> layer types
            kinds = [kind.name for kind in layout.layout[stage][chunk // pp]]
            count = kinds.count("decoder")
        stages += [stage] * count
    return stages


def _moments(args, tensor: RankTensor) -> float:
    """Bytes of the optimizer's states on the device, for each number of a tensor."""
    row = OPTIMIZERS[args.optim]
    names = row.states
    if row.of_matrices and tensor.name not in VOCABULARY:
        names = row.of_matrices
    dtypes = [getattr(args, f"{name}_dtype", "fp32") for name in names]
    moments = 4 * len(dtypes) - 2 * dtypes.count("bf16")
    if args.optimizer_cpu_offload:
        return moments * (1 - args.optimizer_offload_fraction)
    return moments


def _packed(config) -> dict[str, float]:
    """{name: bytes of a number} of the tensors in config.weight_format."""
    if config.weight_format is None:
        return {}
    return function_of("part_quantised:bytes_of_numbers")(config)


def _weights(config, held: list[RankTensor]) -> int:
    """Bytes of weights and adapters; adapters are float32."""
    packed = _packed(config)
    width = config.params_dtype.itemsize
    sizes = [t.numel * (4 if t.is_adapter else packed.get(t.name, width)) for t in held]
    return round(sum(sizes))


def _made_whole(config, held: list[RankTensor]) -> float:
    """Bytes of the largest quantised weight once it is made whole, with all experts of a layer."""
    packed = _packed(config)
    sizes: dict[tuple, float] = {}
    for tensor in held:
        if tensor.name in packed:
            key = tensor.name, tensor.layer
            sizes[key] = sizes.get(key, 0) + tensor.numel * config.params_dtype.itemsize
    return max(sizes.values(), default=0)


def _static(args, config, tensors: ModelTensors, stage: int, world_size: int) -> dict:
    """Parameters, and bytes of weights, gradients and optimizer state."""
    held = tensors.stages[stage]
    parameters, trained = tensors.counts(stage)
    width = config.params_dtype.itemsize
    master = 4 * (width == 2)
    if splits_masters(args, config.params_dtype, not any(t.is_adapter for t in held)):
        master = 2
    gradient = 4
    if not args.grad_reduce_in_fp32:
        gradient = width
    # the states of a parameter are on one rank of those with a copy of it
    copies = world_size / config.pipeline_model_parallel_size
    cuts = {
        False: config.tensor_model_parallel_size,
        True: config.expert_tensor_parallel_size * config.expert_model_parallel_size,
    }
    gradients = states = 0
    for tensor in held:
        moments = _moments(args, tensor)
        sizes = (gradient, moments + master)
        if tensor.is_adapter:  # float32, without masters
            sizes = (4, moments)
        of_states = tensor.numel * sizes[1]
        if args.use_distributed_optimizer:
            of_states *= cuts[tensor.is_expert] / copies
        gradients += tensor.numel * sizes[0] * tensor.is_trained
        states += of_states * tensor.is_trained
    return dict(
        parameters=parameters,
        trained=trained,
        weights=_weights(config, held),
        gradients=gradients,
        optimizer=round(states),
    )


# -- activations


_NCCL_OF_GROUP = 2**29  # bytes of a GPU for a group's collectives: 518 MiB on an H200 over NVLink


def _nccl(config, world_size: int) -> int:
    """Bytes of nccl for the groups of a rank with other ranks."""
    r = RankSizes(config)
    etp = config.expert_tensor_parallel_size or r.tp
    replicas = world_size // (r.tp * r.pp)
    is_moe = bool(config.num_moe_experts)
    sizes = [
        world_size,
        r.tp,
        r.pp,
        r.cp,
        r.tp * r.pp,  # norms of gradients
        replicas,
        r.ep * is_moe,
        world_size // (etp * r.ep * r.pp) * is_moe,  # replicas of experts
    ]
    return _NCCL_OF_GROUP * sum(size > 1 for size in sizes)


class RankSizes:
    """Sizes of a rank in the formulas of memory and time. config: McaModelConfig."""

    def __init__(self, config) -> None:
        self.w = config.params_dtype.itemsize  # bytes of an activation
        self.h = config.hidden_size
        self.tp = config.tensor_model_parallel_size
        self.sp = self.tp if config.sequence_parallel else 1  # ranks sharing tokens between linears
        self.pp = config.pipeline_model_parallel_size
        self.cp = config.context_parallel_size
        self.ep = config.expert_model_parallel_size
        self.heads = config.num_attention_heads / self.tp
        # of heads with a key and a value
        self.groups = max((config.num_query_groups or config.num_attention_heads) / self.tp, 1)
        self.keys = 2 * self.groups * config.kv_channels * self.w  # bytes of a token in a layer


class _Facts(NamedTuple):
    """Tensors saved by autograd, in bytes: for each channel of a norm (its input and its output),
    and in numbers for an MLP's column (gate and up, their product, and between them)."""

    norm: int
    head_norm: int  # of queries and keys; attention rotates its output and keeps that itself
    mlp: int
    expert: int  # its columns are weighted too
    scores: int  # of attention with values narrower than its keys: bytes of a head
    attended: int  # its queries, keys and values: bytes of a number
    compiled: bool


def _facts(width: int, compiled: bool, frozen: bool, length: int) -> _Facts:
    """frozen: the norms' weights are not trained. length: of the sequences."""
    if compiled:
        return _Facts(
            norm=2 * width,
            head_norm=width,
            mlp=3,
            expert=3,
            scores=4,
            attended=width,
            compiled=True,
        )
    quotient = width * (not frozen)
    return _Facts(
        norm=4 + quotient + width,  # the input is float32 here
        head_norm=4 + quotient,
        mlp=4,
        expert=5,
        scores=4 * length,  # a CPU has no kernel for it, and keeps all of them
        attended=4,
        compiled=False,
    )


def _layer_bytes(config, layer: int, facts: _Facts, r: RankSizes) -> tuple[float, float]:
    """(bytes a token of a layer, those of its MLP or experts among them)."""
    if getattr(config, "kv_lora_rank", None):
        attention = _latent_bytes(config, facts, r)
    elif layer_class := LAYER_TYPES.get(config.layer_type(layer + 1)):
        attention = function_of(layer_class).costs(config, facts)
    else:
        # queries and attention's output, keys, values, and the sum of each row's exponentials
        groups, channels = config.head_sizes(layer + 1)
        heads = r.heads + max(groups / r.tp, 1)
        attention = 2 * r.w * channels * heads + 4 * r.heads
        if config.qk_layernorm:
            attention += (facts.head_norm * channels + 4) * heads
        if config.attention_output_gate:
            attention += 2 * r.w * channels * r.heads
    norms = 2 + 2 * config.post_norms
    around = norms * (facts.norm * r.h + 4) / r.sp + attention
    if not config.is_moe_layer(layer):
        columns = facts.mlp - (not config.gated_linear_unit)
        mlp = r.w * columns * config.ffn_hidden_size / r.tp
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


def _activations(
    args, config, stage: int, facts: _Facts, r: RankSizes, lowest: int
) -> tuple[float, float]:
    """(bytes a token kept for the backward pass, those of a layer while it is recomputed). lowest:
    the first layer with a backward pass."""
    first = 0 if stage else lowest  # what a stage receives has a gradient
    layers = [i for i, home in enumerate(stages_of_layers(config)) if home == stage and i >= first]
    if stage == r.pp - 1:
        layers += range(config.num_layers, config.num_layers + (config.mtp_num_layers or 0))
    sizes = [_layer_bytes(config, layer, facts, r) for layer in layers]
    kept = [of_layer for of_layer, _ in sizes]
    again = 0.0
    if config.recompute_granularity == "full":
        unit = min(config.recompute_num_layers or 1, len(layers))
        inputs = r.w * r.h / r.sp  # of a layer, a token
        again = max(kept, default=0.0) * unit - inputs
        units = -(-len(layers) // max(unit, 1))
        if config.recompute_method == "block":
            again = max(kept, default=0.0) - inputs
            kept = [inputs] * unit + kept[unit:]
        else:
            kept = [inputs] * units
    elif config.recompute_granularity and {"mlp", "moe"} & set(config.recompute_modules or ()):
        kept = [of_layer - of_mlp for of_layer, of_mlp in sizes]
    return sum(kept) * _in_flight(args, config, stage), again


def input_activations(args, config, tensors: "ModelTensors", length: int, r: RankSizes) -> float:
    """Bytes kept of the modules for inputs beside text, at most: of rows of these alone."""
    trained = (tensor.name for tensor in tensors.stages[0] if tensor.is_trained)
    of_token = config.inputs.bytes_of_token(trained, r.w)
    return args.micro_batch_size * length * of_token * _in_flight(args, config, 0)


def _in_flight(args, config, stage: int) -> float:
    """Micro-batches with activations on a stage at once: of virtual stages parts of them."""
    pp = config.pipeline_model_parallel_size
    vpp = config.virtual_pipeline_model_parallel_size or 1
    micro_batches = args.gradient_accumulation_steps or 1
    chunks = pp - stage
    if vpp > 1:
        chunks = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return min(micro_batches * vpp, chunks) / vpp


# bytes of float32 tensors of a logit and its gradient in a loss with a teacher without kernels, at
# most (a resident one, jsd): measured on a CPU
_OF_LOGIT = 53


def _loss(
    config, tokens: float, trains_head: bool, on_gpu: bool, r: RankSizes, distils: bool
) -> float:
    """Bytes of the loss while it is taken."""
    columns = config.padded_vocab_size / r.tp
    chunk = config.loss_chunk_size or (CHUNK_SIZE_CUDA if on_gpu else CHUNK_SIZE_CPU)
    of_logit = r.w
    if distils:
        chunk = config.loss_chunk_size or CHUNK_SIZE_OF_LOGITS
        # with kernels the teacher's logit, a gradient, and the number of an event
        of_logit += 2 * r.w + 2 if on_gpu else _OF_LOGIT
    float32_gradient = columns * r.h * 4 * trains_head
    return min(chunk, tokens) * columns * of_logit + tokens * r.h * r.w + float32_gradient


def _buffers(config, tokens: float, r: RankSizes) -> float:
    """Bytes of messages between ranks."""
    part = tokens * r.h * r.w / r.sp
    terms = [
        (config.sequence_parallel, part * r.sp),
        (r.pp > 1, 2 * part),
        (r.cp > 1, 2 * tokens * r.cp * r.keys),
        # sent to other ranks; received tokens are kept, as the experts' input
        (config.num_moe_experts and r.ep > 1, config.moe_router_topk * part),
    ]
    return sum(size for applies, size in terms if applies)


# -- a rank


def rank_memory(
    args,
    config,
    tensors: ModelTensors,
    stage: int,
    length: int,
    world_size: int,
    on_gpu: bool,
    distils: bool = False,
) -> RankMemory:
    """Memory of a rank of a pipeline stage at the peak of a step.

    args: TrainingArguments with the layout of config, a McaModelConfig; length: tokens of a
    sample or row; on_gpu: True if kernels are compiled; distils: the loss compares with a teacher.
    """
    finetuning = tensors.finetuning
    r = RankSizes(config)
    tokens = args.micro_batch_size * length / r.cp
    facts = _facts(r.w, on_gpu, not finetuning.is_whole, length)
    kept, again = _activations(args, config, stage, facts, r, tensors.lowest)
    whole = _made_whole(config, tensors.stages[stage])
    of_inputs = 0.0
    if stage == 0:
        of_inputs = input_activations(args, config, tensors, length, r)
    logits = norm = 0.0
    if stage == r.pp - 1:
        trains_head = finetuning.trains("lm_head")
        if not config.has_value_head:
            logits = _loss(config, tokens, trains_head, on_gpu, r, distils)
        # the final norm, with its output whole for the head
        norm = (r.h * (facts.norm - r.w) + 4) / r.sp + r.h * r.w
    return RankMemory(
        **_static(args, config, tensors, stage, world_size),
        activations=round(tokens * (kept + max(norm, again)) + of_inputs + whole),
        logits=round(logits),
        buffers=round(_buffers(config, tokens, r)),
        nccl=_nccl(config, world_size) * on_gpu,
    )


class ModelOfRun:
    """The part of a plan common to all layouts of a run: shapes of its model, adapters, lengths of
    a sample's documents, the folder of a reference model. arguments: RunArguments."""

    def __init__(self, arguments) -> None:
        config = self.config_of(arguments)
        keys = arguments
        judge = Judge(arguments)
        request = Request(arguments, config, lambda: config)
        self.finetuning = finetuning_class(keys).plan(request, judge)
        judge.close()
        self.source = InitSource(config.hf_config, 0, config.mtp_num_layers)
        objective = OBJECTIVES[keys.stage]
        self.lengths = [arguments.data.cutoff_len] * (1 + objective.has_pairs)
        self.reference: str | None = None
        self.scores_before = False  # the second model is there before training alone
        trainer: Any = objective.trainer_class()
        of_model, of_second = trainer.forward_passes(keys)
        has_second = False
        if "ref_model" in objective.keys:
            name = arguments.model.model_name_or_path
            folders = {"cached": None, "adapter": None, "model": name}
            self.reference = folders.get(keys.ref_model, keys.ref_model)
            has_second = trainer.has_reference(keys)
            can_be_off = self.finetuning.can_be_off
            of_adapters = keys.ref_model == "adapter" or (keys.ref_model is None and can_be_off)
            self.scores_before = has_second and self.reference is None and not of_adapters
        self.distils = TEACHER_KEY in objective.keys
        if self.distils:
            self.reference = getattr(keys, TEACHER_KEY)
            has_second = self.reference is not None
            self.scores_before = keys.teacher_top_k is not None
        self.passes = (of_model, of_second * has_second)  # of the model and of the second one

    @staticmethod
    def config_of(arguments) -> McaModelConfig:
        keys = arguments.model
        name = keys.model_name_or_path
        remote = keys.trust_remote_code
        values = arguments.model_config
        has_scores = OBJECTIVES[arguments.finetuning.stage].scores
        config = AutoConfig.from_pretrained(name, arguments.training, remote, values, has_scores)
        if arguments.quantization_bit is not None:
            function_of("part_quantised:choose_by_keys")(config, arguments)
        return config

    def tensors(self, config) -> ModelTensors:
        """The tensors of the model in the layout of a config."""
        return ModelTensors(config, self.finetuning, self.source)

    def fullest_rank(self, args, config, world_size: int, on_gpu: bool) -> tuple[int, RankMemory]:
        """(pipeline stage, memory) of the rank with the most memory, in the layout of config."""
        stages = range(config.pipeline_model_parallel_size)
        tensors = self.tensors(config)
        length = sum(self.lengths)
        each = [
            rank_memory(args, config, tensors, stage, length, world_size, on_gpu, self.distils)
            for stage in stages
        ]
        if self.reference is not None:
            second = AutoConfig.from_pretrained(self.reference, args)
            if self.reference == config.name_or_path:
                second.weight_format = config.weight_format
            held = ModelTensors(second).stages
            each = [replace(each[s], reference=_weights(second, held[s])) for s in stages]
            if self.distils:
                each[-1] = self._with_hidden_states(each[-1], args, second)
        if self.scores_before:
            each = list(map(_at_the_peak, each))
        return max(enumerate(each), key=lambda pair: pair[1].total)

    def _with_hidden_states(self, memory: RankMemory, args, second) -> RankMemory:
        """The last stage with a resident teacher's hidden states of a step."""
        if self.scores_before:
            return memory
        tokens = args.micro_batch_size * sum(self.lengths) / second.context_parallel_size
        numbers = tokens * (args.gradient_accumulation_steps or 1) * second.hidden_size
        size = round(numbers * second.params_dtype.itemsize)
        return replace(memory, reference=memory.reference + size)

    def forward_passes(self, args, config) -> tuple[float, float]:
        """(passes in each step beside training's, passes over the data before the first step), over
        a forward pass of the model of a config."""
        from .log import model_sizes

        of_model, of_second = self.passes
        if self.reference is not None:
            second = model_sizes(AutoConfig.from_pretrained(self.reference, args))
            first = model_sizes(config)
            if second is not None and first is not None:
                of_second *= second.weights / first.weights
        if self.scores_before:
            return of_model, of_second
        return of_model + of_second, 0.0


def _at_the_peak(memory: RankMemory) -> RankMemory:
    """The memory of a rank on which a second model scores the data before the optimizer is made:
    its bytes beyond those of training."""
    before = memory.weights + memory.gradients + memory.reference
    in_training = memory.total - memory.reference
    return replace(memory, reference=max(before - in_training, 0))
