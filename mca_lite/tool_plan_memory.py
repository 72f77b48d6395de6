"""A rank's memory in training, from configs alone: bytes, without weights and without a GPU.

    static = weights + gradients + optimizer state; at the peak also activations, loss and buffers

Weights come from the family's rows (families.py), sharded as the layout shards them. The formulas
of activations, logits and buffers are in part_long_costs.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from . import parts
from .errors import Judge
from .families_rows import Row
from .finetuning import Finetuning, Request, finetuning_class, lowest_layer
from .hosts import module_of, modules_of
from .model_config import AutoConfig, McaModelConfig
from .optim import splits_masters
from .tables import OBJECTIVES, OPTIMIZERS, TEACHER_KEY, bytes_of_states, function_of
from .weights_convert import VOCABULARY, degree, in_layer_order
from .weights_files import InitSource


@dataclass(frozen=True)
class RankMemory:
    """Predicted memory of one rank at the peak of a training step, in bytes; parameters and trained
    are counts.

    logits: the larger of two needs: a chunk of logits in the loss, with its gradients; or the
    gradients within a layer's backward pass. buffers: for communication. reference: for a second
    model. nccl: outside torch's allocator. host: in host memory, no part of the total."""

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    reference: int = 0  # weights of a second model
    nccl: int = 0  # outside torch's allocator
    host: int = 0  # activations in host memory: no part of the total

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in PARTS)


PARTS = [field.name for field in fields(RankMemory)][2:-1]


# -- the tensors of a rank


class RankTensor(NamedTuple):
    """A weight, or an adapter's matrix, in the size that one rank has.

    name: megatron's, with {} for the layer and [] for the expert. The name of an adapter's matrix
    is the Hugging Face module and PEFT's ending, such as "lora_A.weight". layer: None outside the
    layers. shape: of the rank's shard."""

    name: str
    layer: int | None
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
    """Names and shapes of the weights and adapters on each rank in a parallel layout, without data.

    finetuning: which weights are trained, and with which adapters. source: shapes by Hugging Face
    name, the same for every layout of a model. stages: the weights and adapters on a rank of each
    pipeline stage. total, total_trained: parameters of the whole model with its padded vocabulary,
    without adapters.
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
        self.lowest = 0  # the lowest layer with a backward pass
        # recomputation needs gradients of the first layer's input
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
        if is_tied_head or row.mca.endswith("expert_bias"):  # a bias is a small buffer
            return
        first, *others = [self.source.shape(name.format(layer)) for name in row.hf]
        shape = [first[0] + sum(other[0] for other in others), *first[1:]]
        if row.mca in VOCABULARY:
            shape[0] = config.padded_vocab_size
        self.total += math.prod(shape)
        is_trained = any(map(self.finetuning.trains, modules_of(row, layer)))
        self.total_trained += math.prod(shape) * is_trained
        shape = self._cut(row, shape)
        self._add(row, row.mca, layer, shape, is_trained, stage)
        is_again = (
            is_tied or config.mtp_num_layers
        )  # the last stage needs it as the head, or for tokens ahead
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

    def _cut(self, row: Row, shape: Sequence[int]) -> list[int]:
        """The shape of the shard of a weight that a rank has, given the shape of the whole tensor.
        row: the weight's row in the family's table, which names the sharded axis."""
        part = list(shape)
        if row.axis is not None:
            part[row.axis] //= degree(row, self.config)
        return part

    def _add(
        self,
        row: Row,
        name: str,
        layer: int | None,
        shape: Sequence[int],
        is_trained: bool,
        stage: int,
    ) -> None:
        """Add a tensor, as a rank has it, to the list of a pipeline stage. An expert's tensor is
        left out if the first expert-parallel rank does not have this expert. row: the tensor's row
        in the family's table. shape: of the shard."""
        if row.expert is not None:
            name = name.replace(f"experts.{row.expert}.", "experts.[].")
            if row.expert >= self.config.num_moe_experts // self.config.expert_model_parallel_size:
                return
        self.stages[stage].append(RankTensor(name, layer, tuple(shape), is_trained))

    def counts(self, stage: int) -> tuple[int, int]:
        """(number of parameters, number of trained ones) on a rank of a pipeline stage."""
        held = self.stages[stage]
        return sum(t.numel for t in held), sum(t.numel for t in held if t.is_trained)

    def shapes(self, stage: int) -> dict[tuple[str, tuple[int, ...]], list[Any]]:
        """{(name, shape) of a tensor: the layers that have it} for a rank of a pipeline stage. A
        layer's experts count as one."""
        layers: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
        for tensor in self.stages[stage]:
            layers.setdefault((tensor.name, tensor.shape), {})[tensor.layer] = None
        return {key: list(of_tensor) for key, of_tensor in layers.items()}


def stages_of_layers(config: Any) -> list[int]:
    """The pipeline rank of each decoder layer, in the order of the layers."""
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


def _moments(args: Any, tensor: RankTensor) -> float:
    """Bytes of optimizer state on the device for each value of a tensor, if the tensor is trained.
    Master weights are not counted."""
    row = OPTIMIZERS[args.optim]
    names = row.states
    if row.of_matrices and tensor.name not in VOCABULARY:
        names = row.of_matrices
    moments = bytes_of_states(args, names)
    if args.optimizer_cpu_offload:
        return moments * (1 - args.optimizer_offload_fraction)
    return moments


def _packed(config) -> dict[str, float]:
    """{tensor name: bytes per value} for the weights that the model keeps quantised; {} if there
    are none. config: the McaModelConfig."""
    if config.weight_format is None:
        return {}
    return function_of("part_quantised:bytes_of_numbers")(config)


def _weights(config, held: list[RankTensor]) -> int:
    """Bytes of the weights and adapters that a rank has. held: its tensors. Adapters are float32,
    quantised weights are counted in their packed size."""
    packed = _packed(config)
    width = config.params_dtype.itemsize
    sizes = [t.numel * (4 if t.is_adapter else packed.get(t.name, width)) for t in held]
    return round(sum(sizes))


def _made_whole(config, held: list[RankTensor]) -> float:
    """Bytes of the largest quantised weight among `held` (a rank's tensors) once it is dequantised
    for a matmul. A layer's experts count together. 0 if no weight is quantised."""
    packed = _packed(config)
    sizes: dict[tuple[Any, ...], float] = {}
    for tensor in held:
        if tensor.name in packed:
            key = tensor.name, tensor.layer
            sizes[key] = sizes.get(key, 0) + tensor.numel * config.params_dtype.itemsize
    return max(sizes.values(), default=0)


def _static(
    args: Any, config: Any, tensors: ModelTensors, stage: int, world_size: int
) -> dict[str, Any]:
    """The memory of a rank of a pipeline stage that does not depend on the data: {"parameters",
    "trained": counts; "weights", "gradients", "optimizer": bytes}. args: TrainingArguments."""
    held = tensors.stages[stage]
    parameters, trained = tensors.counts(stage)
    width = config.params_dtype.itemsize
    master = 4 * (width == 2)
    if splits_masters(args, config.params_dtype, not any(t.is_adapter for t in held)):
        master = 2
    gradient = 4
    if not args.grad_reduce_in_fp32:
        gradient = width
    # the ranks that have a copy of a parameter share its states
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


_COSTS = "part_long_costs"  # without it a plan has no activations
_NCCL_OF_GROUP = 2**29  # bytes per group and GPU: 518 MiB on an H200 over NVLink


def _nccl(config: Any, world_size: int) -> int:
    """Estimated bytes that NCCL takes on a GPU: a fixed size for each process group of the rank
    that has more than one rank."""
    tp = config.tensor_model_parallel_size
    pp = config.pipeline_model_parallel_size
    ep = config.expert_model_parallel_size
    etp = config.expert_tensor_parallel_size or tp
    replicas = world_size // (tp * pp)
    is_moe = bool(config.num_moe_experts)
    sizes = [
        world_size,
        tp,
        pp,
        config.context_parallel_size,
        tp * pp,  # for gradient norms
        replicas,
        ep * is_moe,
        world_size // (etp * ep * pp) * is_moe,  # for the experts' replicas
    ]
    return _NCCL_OF_GROUP * sum(size > 1 for size in sizes)


# -- a rank


def rank_memory(
    args: Any,
    config: Any,
    tensors: ModelTensors,
    stage: int,
    length: int,
    world_size: int,
    on_gpu: bool,
    distils: bool = False,
) -> RankMemory:
    """Predict the memory of a rank of a pipeline stage at the peak of a step.

    args: TrainingArguments with the layout of config, a McaModelConfig. length: tokens in a sample
    or row. on_gpu: True if kernels are compiled. distils: True if the loss compares with a teacher.
    """
    finetuning = tensors.finetuning
    first = 0 if stage else tensors.lowest  # what a later stage receives needs a gradient
    homes = enumerate(stages_of_layers(config))
    activations = logits = buffers = host = 0.0
    if costs := parts.module_of(_COSTS):
        activations, logits, buffers, host = costs.of_step(
            *(args, config, stage),
            [layer for layer, home in homes if home == stage and layer >= first],
            length,
            (tensor.name for tensor in tensors.stages[stage] if tensor.is_trained),
            on_gpu=on_gpu,
            is_whole=finetuning.is_whole,
            trains_head=finetuning.trains("lm_head"),
            distils=distils,
        )
    return RankMemory(
        **_static(args, config, tensors, stage, world_size),
        activations=round(activations + _made_whole(config, tensors.stages[stage])),
        logits=round(logits),
        buffers=round(buffers),
        nccl=_nccl(config, world_size) * on_gpu,
        host=round(host),
    )


class ModelOfRun:
    """Facts about a planned run that do not depend on the parallel layout: shapes of its model,
    adapters, lengths of a sample's documents, the folder of a reference model or teacher.
    arguments: RunArguments."""

    def __init__(self, arguments: Any) -> None:
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
        self.scores_before = False  # True if the second model is only there before training
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
        self.passes = (
            of_model,
            of_second * has_second,
        )  # forward passes of the model and of the second model

    @staticmethod
    def config_of(arguments: Any) -> McaModelConfig:
        keys = arguments.model
        name = keys.model_name_or_path
        remote = keys.trust_remote_code
        values = arguments.model_config
        has_scores = OBJECTIVES[arguments.finetuning.stage].scores
        config = AutoConfig.from_pretrained(name, arguments.training, remote, values, has_scores)
        if arguments.quantization_bit is not None:
            function_of("part_quantised:choose_by_keys")(config, arguments)
        return config

    def tensors(self, config: Any) -> ModelTensors:
        """The ModelTensors in the parallel layout of `config`."""
        return ModelTensors(config, self.finetuning, self.source)

    def fullest_rank(
        self, args: Any, config: Any, world_size: int, on_gpu: bool
    ) -> tuple[int, RankMemory]:
        """(pipeline stage, memory) of the rank that needs most memory, in the parallel layout of
        `config`. on_gpu: True if kernels are compiled."""
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

    def _with_hidden_states(self, memory: RankMemory, args: Any, second: Any) -> RankMemory:
        """Add to the memory of a last-stage rank the hidden states that a teacher computes for a
        step. Unchanged if the teacher's scores are computed before training. second: the teacher's
        config."""
        if self.scores_before:
            return memory
        tokens = args.micro_batch_size * sum(self.lengths) / second.context_parallel_size
        numbers = tokens * (args.gradient_accumulation_steps or 1) * second.hidden_size
        size = round(numbers * second.params_dtype.itemsize)
        return replace(memory, reference=memory.reference + size)

    def forward_passes(self, args: Any, config: Any) -> tuple[float, float]:
        """Count the forward passes that a run makes beside the training passes, for example of a
        reference model: (those in each step, those over the whole data before the first step). The
        unit is a forward pass of the trained model."""
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
    """Correct a rank's memory for a second model that scores the data before training, when there
    is no optimizer state yet. `reference` becomes the bytes by which this phase needs more than
    training, or 0 if it needs less."""
    before = memory.weights + memory.gradients + memory.reference
    in_training = memory.total - memory.reference
    return replace(memory, reference=max(before - in_training, 0))
