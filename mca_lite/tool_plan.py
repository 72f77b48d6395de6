"""Plan of a run, without weights and without a GPU.

python -m mca_lite plan config.yaml [key=value ...] [options]
    memory of the fullest rank by its parts, steps, warm-up, checkpoints and their size; with
    --memory a verdict, and the fitting layouts of --gpus ranks, best first. Transformer Engine's
    layers are planned as local ones in bf16: those of 1.5B held as much on one H200, and 3 % less
    with FP8, whose copies of weights take less than its inputs save

Exit code: 0, or 3 where the run does not fit into --memory.
"""

import collections
import contextlib
import functools
import itertools
import json
import math
import shlex
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, NamedTuple

from . import world
from .args import parse_args
from .args_values import show_count
from .cli import at_least, finish, parser_of
from .errors import ConfigError, refuse
from .files import show_size

# -- time

# Bytes per token that elementwise bf16 passes move, forward and backward. SwiGLU's, per layer and
# MLP column, were counted; those per layer and channel (norms, rotary embedding, residuals) and the
# loss's, per vocabulary column, were derived from their times on one H200.
_OF_COLUMN = 16
_OF_CHANNEL = 94
_OF_VOCABULARY = 9


class Rates(NamedTuple):
    """Speeds of one GPU type, from which the time of a step is predicted.

    products: FLOP/s of GEMMs. experts, linear: rates of the experts' GEMMs, and of linear attention
    without flash-linear-attention (with it a third less time), relative to `products`.
    attention: FLOP/s in long documents; half: document length at which attention is half as fast.
    passes: bytes/s of elementwise kernels. gaps: time of a step / time of its kernels. update:
    parameters/s of the optimizer. link, network: bytes/s that a rank sends within a node and
    between nodes. layer_s, split_layer_s: seconds of the host per layer and micro-batch, without
    and with sequence or context parallelism.
    """

    products: float  # FLOP/s of GEMMs
    attention: float  # FLOP/s of attention in long documents
    passes: float  # bytes/s
    gaps: float  # time of a step / time of its kernels
    update: float  # parameters/s of the optimizer, float32 moments, with clipping
    link: float = math.inf  # bytes/s sent by a rank in a collective within a node
    network: float = math.inf  # and between nodes
    half: float = 0.0  # document length at which attention has half its rate
    experts: float = 1.0  # rate of the experts' GEMMs, relative to `products`
    linear: float = 1.0  # that of linear attention
    layer_s: float = 0.0  # host time for a layer's passes over a micro-batch
    split_layer_s: float = 0.0  # with sequence or context parallelism


# The H200's rates, in bf16, come from tests/bench/RESULTS.md: the kernels of a step of 1.5B with 8
# rows of 4,096 tokens (430 ms of GEMMs, 95 of attention, SwiGLU's 31.7, a step of 651 ms with 624
# ms of kernels), and the update of 4B. Those for rows of up to 32,768 tokens, layouts and experts
# were measured on two H200 of one host (tests/shared/planned.py). Not measured: an H100, which gets
# the H200's arithmetic and the bandwidth of its own memory; and networks, which get the 400 Gbit/s
# of a usual adapter for each GPU.
_H200 = Rates(
    products=7.04e14,
    attention=5.1e14,
    passes=4.15e12,
    gaps=1.043,
    update=1.17e11,
    link=3.1e11,
    network=5e10,
    half=1980,
    experts=0.46,
    linear=6.4e-3,
    layer_s=4.7e-3,
    split_layer_s=6.5e-3,
)
_BANDWIDTH = 3.35 / 4.8  # an H100's memory bandwidth / an H200's
RATES = {
    "H200": _H200,
    "H100": _H200._replace(passes=_H200.passes * _BANDWIDTH, update=_H200.update * _BANDWIDTH),
}
_NODE = 8  # GPUs
_CHECKED = 16  # GPUs; plans for more were not compared with a run


class StepTime(NamedTuple):
    """Predicted seconds of an optimizer step, by part. compute: kernels, or the host that launches
    them if it takes longer; the mean over stages. bubble: waiting for other stages. messages:
    communication within and between layers, and that of gradients and parameters as far as it does
    not overlap. update: the optimizer. flops: FLOPs in the step, not seconds; a reference's or
    teacher's forward passes count, adapters do not."""

    compute: float
    bubble: float
    messages: float
    update: float
    flops: float

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.messages + self.update


def bubble(args: Any, config: Any) -> float:
    """Predict the pipeline bubble: a stage's waiting time divided by its computing time. args:
    TrainingArguments. config: McaModelConfig."""
    chunks = args.gradient_accumulation_steps or 1
    chunks *= config.virtual_pipeline_model_parallel_size or 1
    return (config.pipeline_model_parallel_size - 1) / chunks


def step_time(
    args: Any,
    config: Any,
    memory: Any,
    lengths: list[int],
    world_size: int,
    rates: Rates,
    frozen: bool = False,
    reference: float = 0.0,
    trained: Set[str] | None = None,
) -> StepTime | None:
    """Predict the time of a step of args.train_global_batch_size samples. None if the model's sizes
    are unknown.

    args: TrainingArguments. config: McaModelConfig. memory: RankMemory (counts and bytes) of the
    fullest rank. lengths: token counts of the documents in one sample. rates: the GPU's speeds.
    frozen: True if adapters are trained beside frozen weights. reference: extra forward passes per
    step, in units of the model's forward pass. trained: the trained modules if only some are
    trained, otherwise None."""
    # imported late, because it imports torch
    from .log import ModelWork, model_sizes, partial_work

    sizes = model_sizes(config)
    if sizes is None:
        return None
    samples = args.train_global_batch_size
    tokens = samples * sum(lengths)
    squares = samples * sum(n**2 for n in lengths)
    beside = None
    if reference:
        beside = sizes.passes(reference)
    # adapters would add less than a percent
    weights = (sizes.weights * frozen, sizes.weights * (not frozen))
    work = ModelWork(*weights, sizes.core, beside, linear=sizes.linear)
    if trained is not None:
        work = partial_work(config, trained, beside)
    in_layers, of_head = _kernels(config, sizes, work, tokens, squares, lengths, rates, reference)
    compute, slowest = _of_stages(args, config, in_layers / world_size, of_head / world_size, rates)
    copies = world_size / (config.tensor_model_parallel_size * config.pipeline_model_parallel_size)
    within = _within_layers(args, config, sum(lengths), world_size, rates)
    link = _link(copies * config.tensor_model_parallel_size, rates)
    waits = _of_step(args, config, memory, copies, compute, link)
    updated = memory.trained
    if args.use_distributed_optimizer:
        updated /= copies
    return StepTime(
        compute=compute,
        bubble=slowest - compute + (slowest + within) * bubble(args, config),
        messages=within + waits,
        update=updated / rates.update,
        flops=work.flops(tokens, squares),
    )


def _kernels(
    config: Any,
    sizes: Any,
    work: Any,
    tokens: int,
    squares: int,
    lengths: list[int],
    rates: Rates,
    reference: float,
) -> tuple[float, float]:
    """Predict how long a step's GPU kernels take, with the gaps between them -> (seconds in the
    layers, seconds in the output layer and loss), summed over ranks. sizes, work: the model's
    ModelSizes and ModelWork. tokens: tokens in the step. squares: sum of squared document lengths
    in the step. lengths: document lengths in one sample. rates: the GPU's speeds. reference: extra
    forward passes per step, in units of the model's."""
    recomputes = _recomputed(config)
    ahead = config.mtp_num_layers or 0
    layers = sizes.num_layers + ahead
    logits = sizes.vocab_size * (1 + ahead)
    head = sizes.hidden_size * logits
    columns = sizes.mlp_weights / 3 / sizes.hidden_size
    channels = sizes.hidden_size
    if not config.sequence_parallel:  # each tensor parallel rank then passes over all tokens
        channels *= config.tensor_model_parallel_size
    passes = 1 + (recomputes + reference) / 3  # over forward and backward
    a_byte = tokens * passes * config.params_dtype.itemsize / 2 / rates.passes
    in_layers = a_byte * layers * (_OF_COLUMN * columns + _OF_CHANNEL * channels)
    share = head / sizes.weights
    products = work.flops(tokens, 0)
    of_head = a_byte * _OF_VOCABULARY * logits + products * share / rates.products
    of_mlps = sizes.mlp_weights * layers
    again = recomputes * (sizes.weights - head)
    in_tiles = of_mlps * bool(config.mlp_chunk_size)  # tiles are computed again by themselves
    if config.transformer_impl == "local" and not config.post_norms:
        # a recomputed unit leaves out its last matmul
        last = 1 / (2 + config.gated_linear_unit)
        in_tiles *= 1 - last
        unit = 1 if config.recompute_method == "block" else config.recompute_num_layers or 1
        again -= recomputes / unit * of_mlps * (1 if in_tiles else last)
    products = products * (1 - share) + 2 * tokens * (again + in_tiles)
    if config.num_moe_experts:
        of_experts = products * of_mlps / (sizes.weights - head)
        products += of_experts * (1 / rates.experts - 1)
    if sizes.linear:
        of_linear = (6 + 2 * (recomputes + reference)) * sizes.linear * tokens
        products += of_linear * (1 / rates.linear - 1)
    attention = work.flops(0, squares)
    if not config.recompute_keep:
        attention += 2 * recomputes * sizes.core * squares
    longest = max(lengths) / config.context_parallel_size
    rate = rates.attention * longest / (longest + rates.half)
    in_layers += products / rates.products + attention / rate
    return in_layers * rates.gaps, of_head * rates.gaps


def _recomputed(config: Any) -> float:
    """The fraction of layers that full recomputation computes again: 0 to 1."""
    if config.recompute_granularity != "full":
        return 0.0
    if config.recompute_method != "block":
        return 1.0
    chunks = config.pipeline_model_parallel_size
    chunks *= config.virtual_pipeline_model_parallel_size or 1
    return min(config.recompute_num_layers * chunks / config.num_layers, 1.0)


def _of_stages(
    args: Any, config: Any, in_layers: float, of_head: float, rates: Rates
) -> tuple[float, float]:
    """Predict how long a step takes on the pipeline stages -> (mean, slowest) in seconds. A stage
    takes as long as its kernels, or as the host that launches them if that is longer. in_layers,
    of_head: a rank's seconds of kernels in the layers and in the output layer with the loss,
    averaged over all ranks. rates: the GPU's speeds."""
    from .tool_plan_memory import stages_of_layers

    pp = config.pipeline_model_parallel_size
    counts = collections.Counter(stages_of_layers(config))
    counts[pp - 1] += config.mtp_num_layers or 0
    layer_s = rates.layer_s
    if config.sequence_parallel or config.context_parallel_size > 1:
        layer_s = rates.split_layer_s
    if config.recompute_granularity == "full":
        layer_s *= 4 / 3
    layer_s *= args.gradient_accumulation_steps or 1
    seconds = []
    for stage in range(pp):
        kernels = in_layers * pp * counts[stage] / counts.total()
        kernels += of_head * pp * (stage == pp - 1)
        seconds.append(max(kernels, counts[stage] * layer_s))
    return sum(seconds) / pp, max(seconds)


def _link(ranks: float, rates: Rates) -> float:
    """The speed of a collective over `ranks` consecutive ranks, in bytes/s that a rank sends: that
    within a node, or that between nodes if the ranks do not fit into one node. rates: the GPU's
    speeds."""
    return rates.link if ranks <= _NODE else rates.network


def _within_layers(args: Any, config: Any, sample: int, world_size: int, rates: Rates) -> float:
    """Predict the seconds per step that a rank spends on messages of tensor, context, expert and
    pipeline parallelism. args: TrainingArguments. config: McaModelConfig. sample: tokens in a
    sample. rates: the GPU's speeds."""
    from .tables import function_of

    r = function_of("part_long_costs:RankSizes")(config)
    layers = (config.num_layers + (config.mtp_num_layers or 0)) / r.pp
    tokens = args.micro_batch_size * sample / r.cp
    hidden = tokens * r.h * r.w
    passes = 2 + (config.recompute_granularity == "full")
    # attention and MLP in each pass; inputs are gathered again for weight gradients
    reductions = layers * (2 * passes + bool(config.sequence_parallel)) + 2
    of_tensor = 2 * (r.tp - 1) / r.tp * hidden * reductions
    of_context = (r.cp - 1) * tokens * r.keys * layers * passes
    there_and_back = 2 * passes * hidden / r.sp * config.moe_router_topk
    of_experts = there_and_back * (r.ep - 1) / r.ep * layers
    chunks = config.virtual_pipeline_model_parallel_size or 1
    of_pipeline = 2 * chunks * hidden / r.sp * (r.pp > 1)
    micro_batches = args.gradient_accumulation_steps or 1
    etp = config.expert_tensor_parallel_size or 1
    seconds = of_tensor / _link(r.tp, rates) + of_context / _link(r.tp * r.cp, rates)
    seconds += of_experts / _link(etp * r.ep, rates) + of_pipeline / _link(world_size, rates)
    return seconds * micro_batches


def _of_step(
    args: Any, config: Any, memory: Any, copies: float, compute: float, link: float
) -> float:
    """Predict the seconds that a step waits for gradients to be reduced and parameters to be
    gathered; time that overlaps with forward or backward is left out. memory: RankMemory (counts
    and bytes) of the fullest rank. copies: ranks that reduce a gradient together. compute: seconds
    of kernels in the step. link: bytes/s that a rank sends."""
    share = (copies - 1) / copies
    reduce = 2 * share * memory.gradients / link
    gather = 0.0
    if (
        args.use_distributed_optimizer
    ):  # a reduce-scatter is half an all-reduce; then parameters are gathered
        reduce /= 2
        gather = share * memory.trained * config.params_dtype.itemsize / link
    # gradients overlap with the last backward pass, parameters with the first forward pass
    of_batch = compute / (args.gradient_accumulation_steps or 1)
    reduce -= of_batch * 2 / 3 * args.overlap_grad_reduce
    gather -= of_batch / 3 * args.overlap_param_gather
    return max(0.0, reduce) + max(0.0, gather)


# -- the command

DOES_NOT_FIT = 3
_GIB = 2**30
_HEADROOM = (
    0.94  # usable share of a GPU; the rest is CUDA's context, libraries, gaps between blocks
)
_MAX_SHOWN = 8
_LONG = 8192  # tokens in a row from which context parallelism is tried
# these replace Transformer Engine's layers and FP8, which were measured to need the same memory
_LOCAL = (
    "transformer_impl=local",
    "fp8=null",
    "fp8_recipe=null",
    "first_last_layers_bf16=null",
    "num_layers_at_start_in_bf16=null",
    "num_layers_at_end_in_bf16=null",
)


def main(words: list[str]) -> int:
    """Plan a run as the command line says: print its memory and steps and, with --memory, a verdict
    and the fitting layouts -> exit code."""
    parser = parser_of("plan", __doc__)
    add = parser.add_argument
    number = at_least(0.001, float)
    add("--gpus", type=at_least(1), default=1, metavar="N", help="ranks (1)")
    add("--memory", type=number, metavar="G", help="GiB of each GPU")
    add("--gpu", choices=RATES, help="for the time of a step")
    link = "GB/s between all GPUs, as doctor says (as in tests/shared/planned.py)"
    add("--link", type=number, metavar="B", help=link)
    options, words = parser.parse_known_args(words)
    return finish(world.planned_world(options.gpus)(_plan), words, options)


def _plan(words: list[str], options: Any) -> int:
    words = [*words, *_LOCAL]
    arguments = parse_args(words)
    if not arguments.backend.use_mca:
        refuse("use_mca", False, "layouts are megatron-core's", "use_mca: true")
    from .tool_plan_memory import ModelOfRun

    layout = _Layout(arguments, ModelOfRun(arguments), options)
    print(*_memory_lines(layout), *_run_lines(layout), sep="\n")
    if options.memory is None:
        return 0
    budget = options.memory * _HEADROOM
    verdict = "fits"
    code = 0
    if layout.gib > budget:
        verdict = "does not fit"
        code = DOES_NOT_FIT
    of_gpu = f"{budget:.2f} of {options.memory:g} GiB can be used"
    print(f"\n{verdict}: {layout.gib:.2f} GiB, and {of_gpu}")
    fitting = [one for one in _layouts(words, layout, options) if one.gib <= budget]
    layouts = sorted(fitting, key=_Layout.rank)
    gpus = show_count(options.gpus, "GPU")
    is_checked = options.gpus <= _CHECKED or options.gpu is None
    words_on_time = "" if is_checked else ", seconds not checked"
    print(f"\n{len(layouts)} layouts of {gpus} fit{words_on_time}, best first, and their keys:")
    for one in layouts[:_MAX_SHOWN]:
        print(f"  {one.gib:6.1f} GiB{one.time_words()}  {one.keys_beside(layout)}")
    if not layouts:
        print("  more GPUs, a lower cutoff_len or finetuning_type=lora may help")
    return code


class _Layout:
    """A planned run in one parallel layout, with the memory of its fullest rank and the predicted
    time of a step (None if unknown). arguments: RunArguments. model: the ModelOfRun (facts for
    planning its memory). options: the options of the command line, such as gpus and memory."""

    def __init__(self, arguments: Any, model: Any, options: Any) -> None:
        self.arguments = arguments
        self.model = model
        self.options = options
        self.args = arguments.training
        self.config = model.config_of(arguments)
        self.chosen = ""  # what recompute_granularity: auto chooses
        if self.config.chooses_recomputed:
            self._choose()
        self.stage, self.memory = model.fullest_rank(
            self.args, self.config, options.gpus, on_gpu=True
        )
        self.gib = self.memory.total / _GIB
        self.time = None
        if options.gpu is not None:
            rates = RATES[options.gpu]
            if options.link is not None:
                rates = rates._replace(link=options.link * 1e9, network=options.link * 1e9)
            self.time = step_time(
                *(self.args, self.config, self.memory, model.lengths, options.gpus, rates),
                frozen=not model.finetuning.is_whole,
                reference=model.forward_passes(self.args, self.config)[0],
                trained=model.finetuning.trained,
            )

    def _choose(self) -> None:
        """Choose how many layers are recomputed, for recompute_granularity: auto, and write the
        number into the config. It is the least number with which the fullest rank fits a GPU of
        --memory GiB, or if none fits, the number that needs least memory; without --memory it is
        all layers. Each pipeline stage gets this number."""
        from .tables import function_of
        from .tool_plan_memory import stages_of_layers

        config = self.config
        virtual = config.virtual_pipeline_model_parallel_size or 1
        most = -(-max(collections.Counter(stages_of_layers(config)).values()) // virtual)
        config.recompute_num_layers = most
        self.chosen = f"all {most} layers of a stage; --memory says of which GPUs"
        if self.options.memory is None:
            return
        auto = function_of("part_long_auto")

        def need(number: int) -> float:
            config.recompute_num_layers = number
            return self.model.fullest_rank(self.args, config, self.options.gpus, True)[1].total

        room = self.options.memory * auto.HEADROOM * _GIB
        config.recompute_num_layers = chosen = auto.least(most, need, room)
        self.chosen = f"{chosen} of {most} layers of a stage"

    @functools.cached_property
    def num_parameters(self) -> int:
        """Number of parameters in the whole model with its padded vocabulary, without adapters."""
        return self.model.tensors(self.config).total

    def bytes_on_disk(self) -> tuple[int, int]:
        """(bytes of the whole model's weights, bytes of one training checkpoint)."""
        from .tables import OPTIMIZERS

        args = self.args
        width = self.config.params_dtype.itemsize
        of_weights = self.num_parameters * width
        states = masters = 0
        if not args.save_only_model:
            row = OPTIMIZERS[args.optim]
            states = 4 * len(row.of_matrices or row.states)
            masters = 4 * (width < 4)  # float32
        size = of_weights + self.model.tensors(self.config).total_trained * (states + masters)
        if not self.model.finetuning.is_whole:  # only adapters are saved, in float32
            ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
            size = self.memory.trained * ranks * (4 + states)
        return of_weights, size

    def rank(self) -> tuple[Any, ...]:
        """Sort key that puts the best layout first: by predicted step time, or if it is unknown by
        pipeline bubble and recomputation; then by the product of tensor, context and expert
        parallel sizes, then by pipeline size, then by memory."""
        args = self.args
        seconds = 1 + bubble(args, self.config)  # only relative to other layouts
        if self.time is not None:
            seconds = self.time.total
        elif self.config.recompute_granularity == "full":
            seconds *= 4 / 3
        return (
            seconds,
            args.tensor_model_parallel_size
            * args.context_parallel_size
            * args.expert_model_parallel_size,
            args.pipeline_model_parallel_size,
            self.memory.total,
        )

    def keys_beside(self, other: "_Layout") -> str:
        """The command line words that turn the layout `other` into this one; "as it is" if there
        are none."""
        values = {key: getattr(self.args, key) for key in _KEYS}
        changed = {k: value for k, value in values.items() if value != getattr(other.args, k)}
        return " ".join(_words(changed)) or "as it is"

    def time_words(self) -> str:
        if self.time is None:
            return ""
        from .log import peak_flops

        seconds = self.time.total
        mfu = self.time.flops / seconds / (peak_flops(self.options.gpu) * self.options.gpus)
        return f"  {seconds:6.2f} s a step, MFU {mfu:.0%}"


def _memory_lines(layout: _Layout) -> list[str]:
    from .tool_plan_memory import PARTS

    memory = layout.memory
    lacks = not memory.activations
    where = ""
    if layout.args.pipeline_model_parallel_size > 1:
        where = f" (pipeline stage {layout.stage})"
    return [
        f"model          {layout.num_parameters:,} parameters",
        *([f"frozen base    {show_format(layout.config)}"] if layout.config.weight_format else []),
        f"fullest rank   {memory.parameters:,} parameters, {memory.trained:,} trained{where}",
        *(f"  {name:12} {show_size(getattr(memory, name)):>12}" for name in (*PARTS, "total")),
        *[f"  {'host memory':12} {show_size(memory.host):>12}"] * bool(memory.host),
        *[f"  {'recomputed':12} {layout.chosen}"] * bool(layout.chosen),
        *["  activations, logits and buffers are not counted: part long is not here"] * lacks,
    ]


def show_format(config: Any) -> str:
    """Text about the format of frozen weights that stay quantised, such as "nf4, 4.5 bits a
    number". config: McaModelConfig with a weight_format."""
    from .tables import function_of

    form = config.weight_format
    bits = 8 * function_of("part_quantised").FORMS[form].bytes_of_number
    return f"{form}, {bits:g} bits a number"


def _run_lines(layout: _Layout) -> list[str]:
    """Report lines about a run's steps, tokens and checkpoints. If there is a dataset and max_steps
    is not given, the data is read to count steps."""
    from .args_rules_training import plan_schedule

    args = layout.args
    if not layout.arguments.data.dataset:
        return ["steps          0: there is no dataset to train on"]
    samples = args.train_global_batch_size
    data = "not read, since max_steps is given"
    of_epoch = 0
    if args.max_steps <= 0:
        from .data import load_datasets
        from .run import load_tokenizer

        run = layout.arguments
        tokenizer = load_tokenizer(run.model.model_name_or_path, run.model.trust_remote_code)
        seed = args.order_seed
        folder = Path(run.model.model_name_or_path)
        media = layout.config.inputs.media(folder, tokenizer, run)
        train = load_datasets(run.data, run.finetuning.stage, tokenizer, seed, media).train
        of_epoch = math.ceil(len(train) / samples)
        data = f"{len(train):,} samples, {train.num_tokens:,} tokens"
    steps = args.steps_of_run(of_epoch)
    rows = steps * samples
    length = sum(layout.model.lengths)
    counts = {"no": 0, "epoch": math.ceil(args.num_train_epochs)}
    total, of_checkpoint = layout.bytes_on_disk()
    table = {
        "data": data,
        "steps": f"{steps:,} of {samples} samples, {rows:,} in all",
        "tokens": f"at most {rows * length:,}, rows of {length}",
        "warm-up": show_count(plan_schedule(args, steps).warmup, "step"),
        "checkpoints": counts.get(args.save_strategy, steps // (args.save_steps or 1)),
        "model on disk": show_size(total),
        "a checkpoint": show_size(of_checkpoint),
    }
    if layout.config.input_tensors:
        table["pictures"] = "in memory as if a row held nothing else; not in the time"
    time = layout.time
    if time is not None:
        messages = f"{time.messages:.2f} s of it communication, {time.bubble:.2f} s the pipeline's"
        if layout.options.gpus > _CHECKED:
            messages += f"; not checked: no run of more than {_CHECKED} GPUs was compared"
        hours = time.total * steps / 3600
        table["time"] = f"{layout.time_words().strip()}, {hours:.1f} h; {messages}"
        table |= _time_before(layout, of_epoch)
    return [f"{name:15}{words}" for name, words in table.items()]


def _time_before(layout: _Layout, steps: int) -> dict[str, str]:
    """A row for the report, {"before it": text}, about a pass over the data before training, for
    example to score it with a reference model; {} if there is no such pass. steps: global batches
    in the pass; 0: unknown, and the text gives no time."""
    in_step, before = layout.model.forward_passes(layout.args, layout.config)
    if not before:
        return {}
    words = "a pass over the data, once"
    if steps:
        of_step = 3 + in_step + (layout.config.recompute_granularity == "full")
        hours = before * layout.time.compute / of_step * steps / 3600
        words += f": {hours:.1f} h"
    return {"before it": words}


# the keys that make a layout, in the order of the report
_KEYS = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "context_parallel_size",
    "expert_model_parallel_size",
    "use_distributed_optimizer",
    "recompute_granularity",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)


def _layouts(words: list[str], base: _Layout, options: Any) -> Iterator[_Layout]:
    """Yield parallel layouts for a run, with options.gpus ranks and the same global batch. Parallel
    sizes are powers of two, tensor parallel at most 8. Samples shorter than _LONG tokens keep the
    run's context_parallel_size. Layouts that break a rule are left out.

    A layout that does not fit into memory is followed by the same one with micro-batches of one
    sample, and then with recomputation. words: the command line's. base: the run as it was given.
    options: those of the command line, such as memory in GiB."""
    powers = [2**i for i in range(options.gpus.bit_length())]
    experts = [1]
    contexts = [base.args.context_parallel_size]
    if base.config.num_moe_experts:
        experts = powers
    if sum(base.model.lengths) >= _LONG:
        contexts = powers
    micro_batches = sorted({base.args.per_device_train_batch_size, 1}, reverse=True)
    slower = list(itertools.product((None, "full"), micro_batches))
    within_node = [tp for tp in powers if tp <= 8]
    for tp, pp, cp, ep in itertools.product(within_node, powers, contexts, experts):
        if options.gpus % (tp * pp * cp):
            continue
        keys = {
            "tensor_model_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
            "use_distributed_optimizer": options.gpus > tp * pp,
            "global_batch_size": base.args.train_global_batch_size,
            "gradient_accumulation_steps": None,
        }
        if pp != base.args.pipeline_model_parallel_size:
            keys["virtual_pipeline_model_parallel_size"] = None
            keys["pipeline_model_parallel_layout"] = "auto" if pp > 1 else None
        for granularity, micro_batch in slower:
            keys["recompute_granularity"] = granularity
            keys["per_device_train_batch_size"] = micro_batch
            with contextlib.suppress(ConfigError):
                one = _Layout(parse_args([*words, *_words(keys)]), base.model, options)
                yield one
                if one.gib <= options.memory * _HEADROOM:
                    break


def _words(keys: dict[str, Any]) -> list[str]:
    """{key: value} as command line words key=value, quoted for a shell."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in keys.items()}
    return [f"{key}={shlex.quote(text)}" for key, text in texts.items()]
