"""What a run will need, without weights and without a GPU.

python -m mca_lite plan config.yaml [key=value ...] [options]
    memory of the fullest rank by its parts, steps, warm-up, checkpoints and their size; with
    --memory whether the run fits, and the layouts of --gpus ranks that do, best first

Exit code: 0, or 3 where the run does not fit into --memory.
"""

import contextlib
import itertools
import json
import math
import shlex
from typing import NamedTuple

from . import world
from .args import parse_args
from .args_values import show_count
from .cli import finish, parser_of
from .errors import ConfigError, refuse
from .files import show_size

# -- time

# bytes that passes of bf16 move for a token and layer: SwiGLU's of a column of the MLP, forward and
# backward, are counted; those of a channel (norms, rotary embedding, residuals) and of the loss a
# column of the vocabulary follow from their times on one H200
_OF_COLUMN = 16
_OF_CHANNEL = 94
_OF_VOCABULARY = 9


class Rates(NamedTuple):
    """Measured on one device, or between devices."""

    products: float  # FLOP/s of matrix products
    attention: float  # FLOP/s
    passes: float  # bytes/s
    gaps: float  # time of a step over that of its kernels
    update: float  # parameters/s of the optimizer, float32 moments, with clipping
    link: float | None = None  # bytes/s that a rank sends in a collective; None: not counted


# by GPU, bf16. H200: tests/bench/RESULTS.md: kernels of a step of 1.5B, 8 rows of 4,096 tokens (430
# ms of products, 95 of attention, SwiGLU's 31.7, a step of 651 ms with 624 ms of kernels), and the
# update of 4B. Its links were not measured: `doctor` measures them
RATES = {"H200": Rates(7.04e14, 3.64e14, 4.15e12, 1.043, 1.17e11)}


class StepTime(NamedTuple):
    """Seconds of a step by its parts, and the FLOPs of the model in it."""

    compute: float
    bubble: float
    messages: float
    update: float
    flops: float

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.messages + self.update


def bubble(args, config) -> float:
    """The time that a pipeline stage waits, over that in which it computes."""
    chunks = args.gradient_accumulation_steps or 1
    chunks *= config.virtual_pipeline_model_parallel_size or 1
    return (config.pipeline_model_parallel_size - 1) / chunks


def step_time(
    args,
    config,
    memory,
    lengths: list[int],
    world_size: int,
    rates: Rates,
    frozen=False,
    reference=False,
) -> StepTime | None:
    """The parts of a step of args.train_global_batch_size samples; None where the model's sizes are
    not known.

    memory: the fullest rank's RankMemory. lengths: of a sample's documents. frozen: adapters are
    trained. reference: a second model of the same size passes forward.
    """
    from .log import ModelWork, model_sizes  # with torch

    sizes = model_sizes(config)
    if sizes is None:
        return None
    again = config.recompute_granularity == "full"
    samples = args.train_global_batch_size
    tokens = samples * sum(lengths)
    squares = samples * sum(n**2 for n in lengths)
    beside = ModelWork(sizes.weights, 0.0, sizes.core) if reference else None
    # adapters are less than a percent
    work = ModelWork(sizes.weights * frozen, sizes.weights * (not frozen), sizes.core, beside)
    passed = 1 + (again + reference) / 3  # forward and backward, and forward passes beside
    head = sizes.hidden_size * sizes.vocab_size
    products = work.flops(tokens, 0) + 2 * again * (sizes.weights - head) * tokens
    attention = work.flops(0, squares) + 2 * again * sizes.core * squares
    columns = sizes.mlp_weights / 3 / sizes.hidden_size
    channels = sizes.hidden_size
    if not config.sequence_parallel:  # each rank of a tensor parallel group passes over all
        channels *= config.tensor_model_parallel_size
    moved = sizes.num_layers * (_OF_COLUMN * columns + _OF_CHANNEL * channels)
    moved = (moved + _OF_VOCABULARY * sizes.vocab_size) * config.params_dtype.itemsize / 2 * passed
    compute = products / rates.products + attention / rates.attention
    compute = (compute + tokens * moved / rates.passes) * rates.gaps / world_size
    within = waits = 0.0
    if rates.link is not None and world_size > 1:
        within = _within_layers(args, config, sum(lengths)) / rates.link
        waits = _of_step(args, config, memory, world_size, compute, rates.link)
    updated = memory.trained
    if args.use_distributed_optimizer:
        updated /= _copies(config, world_size)
    return StepTime(
        compute=compute,
        bubble=(compute + within) * bubble(args, config),
        messages=within + waits,
        update=updated / rates.update,
        flops=work.flops(tokens, squares),
    )


def _copies(config, world_size: int) -> float:
    """Ranks that reduce a gradient."""
    return world_size / (config.tensor_model_parallel_size * config.pipeline_model_parallel_size)


def _within_layers(args, config, sample: int) -> float:
    """Bytes that a rank sends in a step for tensor, context, expert and pipeline parallelism."""
    w = config.params_dtype.itemsize
    h = config.hidden_size
    tp = config.tensor_model_parallel_size
    pp = config.pipeline_model_parallel_size
    cp = config.context_parallel_size
    ep = config.expert_model_parallel_size
    sp = tp if config.sequence_parallel else 1
    micro_batches = args.gradient_accumulation_steps or 1
    layers = config.num_layers / pp
    tokens = args.micro_batch_size * sample / cp
    passes = 3 if config.recompute_granularity == "full" else 2
    # attention and MLP, each pass; inputs are gathered again for their weights' gradients
    reductions = 2 * passes + (1 if config.sequence_parallel else 0)
    sent = 2 * (tp - 1) / tp * tokens * h * w * (layers * reductions + 2)
    groups = config.num_query_groups or config.num_attention_heads
    keys = 2 * max(groups / tp, 1) * config.kv_channels * w
    sent += (cp - 1) * tokens * keys * layers * passes
    if config.num_moe_experts:
        there_and_back = 2 * passes * tokens / sp * config.moe_router_topk * h * w
        sent += there_and_back * (ep - 1) / ep * layers
    if pp > 1:
        chunks = config.virtual_pipeline_model_parallel_size or 1
        sent += 2 * chunks * tokens / sp * h * w
    return sent * micro_batches


def _of_step(args, config, memory, world_size: int, compute: float, link: float) -> float:
    """Seconds that a step waits for gradients and parameters."""
    copies = _copies(config, world_size)
    share = (copies - 1) / copies
    of_batch = compute / (args.gradient_accumulation_steps or 1)
    reduce = 2 * share * memory.gradients / link
    gather = 0.0
    if args.use_distributed_optimizer:  # a half of the all-reduce, then updated parameters
        reduce = reduce / 2
        gather = share * memory.trained * config.params_dtype.itemsize / link
    if args.overlap_grad_reduce:
        reduce = max(0.0, reduce - of_batch * 2 / 3)
    if args.overlap_param_gather:
        gather = max(0.0, gather - of_batch / 3)
    return reduce + gather


# -- the command

DOES_NOT_FIT = 3
_GIB = 2**30
_HEADROOM = 0.94  # of a GPU: the rest is CUDA's context, libraries, gaps between blocks
_MAX_SHOWN = 8
_LONG = 8192  # tokens of a row, from which on context parallelism is tried
_NONE_FITS = "\nno layout fits: more GPUs, a lower cutoff_len or finetuning_type=lora may"
_OF_FP8 = (
    "fp8",
    "fp8_recipe",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
)
_LOCAL = ("transformer_impl=local", *(f"{key}=null" for key in _OF_FP8))


def main(words: list[str]) -> int:
    """Plan as the words say -> exit code."""
    parser = parser_of("plan", __doc__)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="ranks of the run (1)")
    parser.add_argument("--memory", type=float, metavar="G", help="GiB of each GPU")
    parser.add_argument("--gpu", choices=RATES, help="for the time of a step")
    parser.add_argument(
        "--link", type=float, metavar="B", help="GB/s between GPUs, as doctor says: for messages"
    )
    options, words = parser.parse_known_args(words)
    return finish(_plan, words, options)


def _plan(words: list[str], options) -> int:
    numbers = (options.gpus, options.memory, options.link)
    if not all(number is None or 0 < number < math.inf for number in numbers):
        raise ValueError("--gpus, --memory and --link: expected numbers above 0")
    with world.planned_world(options.gpus):
        return _planned(words, options)


def _planned(words: list[str], options) -> int:
    words, note = _of_local_layers(words)
    arguments = parse_args(words)
    if not arguments.backend.use_mca:
        refuse("use_mca", False, "layouts are megatron-core's", "use_mca: true")
    from .plan_memory import ModelOfRun

    model = ModelOfRun(arguments)
    layout = _Layout(arguments, model, options)
    for line in (*_memory_lines(layout), *note, *_run_lines(layout)):
        print(line)
    if options.memory is None:
        return 0
    budget = options.memory * _HEADROOM
    need = layout.memory.total / _GIB
    verdict = "fits" if need <= budget else "does not fit"
    print(f"\n{verdict}: {need:.2f} GiB, and {budget:.2f} of {options.memory:g} GiB can be used")
    found = sorted(_layouts(words, layout, options), key=_Layout.rank)
    gpus = "1 GPU" if options.gpus == 1 else f"{options.gpus} GPUs"
    print(f"\nlayouts of {gpus} that fit, best first, and their keys:" if found else _NONE_FITS)
    for one in found[:_MAX_SHOWN]:
        print(f"  {one.memory.total / _GIB:6.1f} GiB{one.time_words()}  {one.keys_beside(layout)}")
    if len(found) > _MAX_SHOWN:
        print(f"  ... and {len(found) - _MAX_SHOWN} more")
    return 0 if need <= budget else DOES_NOT_FIT


def _of_local_layers(words: list[str]) -> tuple[list[str], list[str]]:
    """(words, a note) of a run on Transformer Engine, which need not be here to plan it: it is
    planned as local layers in bf16, whose memory was measured to be about the same."""
    try:
        keys = parse_args(words).training
        if keys.fp8 is None and keys.transformer_impl != "transformer_engine":
            return words, []
    except ConfigError as error:
        if not {"fp8", "transformer_impl"} & {problem.key for problem in error.problems}:
            raise
    note = (
        "note: planned as local layers in bf16; Transformer Engine's of 1.5B held as much on one "
    )
    note += "H200, and 3 % less with FP8, whose copies of weights take less than its inputs save"
    return [*words, *_LOCAL], [note]


class _Layout:
    """A run in one layout: what its fullest rank holds, and how long a step takes."""

    def __init__(self, arguments, model, options):
        self.arguments = arguments
        self.model = model
        self.options = options
        self.args = arguments.training
        self.config = model.config_of(arguments)
        self.stage, self.memory = model.fullest_rank(
            self.args, self.config, options.gpus, on_gpu=True
        )
        self.global_batch_size = self.args.train_global_batch_size
        self.time = None
        if options.gpu is not None:
            rates = RATES[options.gpu]
            if options.link is not None:
                rates = rates._replace(link=options.link * 1e9)
            self.time = step_time(
                *(self.args, self.config, self.memory, model.lengths, options.gpus, rates),
                frozen=model.tensors.spec is not None,
                reference=model.reference is not None,
            )

    def rank(self) -> tuple:
        """Sorts layouts: the fastest, then the one with the fewest messages, then the smallest."""
        args = self.args
        again = 4 / 3 if self.config.recompute_granularity == "full" else 1
        return (
            (1 + bubble(args, self.config)) * again if self.time is None else self.time.total,
            args.tensor_model_parallel_size
            * args.context_parallel_size
            * args.expert_model_parallel_size,
            args.pipeline_model_parallel_size,
            self.memory.total,
        )

    def keys_beside(self, other: "_Layout") -> str:
        """The words that make this layout of another."""
        own = {key: getattr(self.args, key) for key in _KEYS}
        changed = {k: value for k, value in own.items() if value != getattr(other.args, k)}
        return " ".join(_words(changed)) or "as it is"

    def time_words(self) -> str:
        if self.time is None:
            return ""
        from .log import peak_flops

        peak = peak_flops(self.options.gpu) * self.options.gpus
        return (
            f"  {self.time.total:6.2f} s a step, MFU {self.time.flops / peak / self.time.total:.0%}"
        )


def _memory_lines(layout: _Layout) -> list[str]:
    from .plan_memory import PARTS

    memory = layout.memory
    args = layout.args
    total = layout.model.tensors.total(layout.config)
    where = ""
    if args.pipeline_model_parallel_size > 1:
        where = f" (pipeline stage {layout.stage})"
    lines = [
        f"model          {total:,} parameters",
        f"fullest rank   {memory.parameters:,} parameters, {memory.trained:,} trained{where}",
    ]
    lines += [f"  {name:12} {show_size(getattr(memory, name)):>12}" for name in PARTS]
    lines.append(f"  {'total':12} {show_size(memory.total):>12}")
    if hasattr(layout.config, "kv_lora_rank"):
        lines.append("note: of multi-latent attention only a CPU's activations were measured")
    return lines


def _run_lines(layout: _Layout) -> list[str]:
    """Steps, tokens, evaluations, checkpoints. Reads the data unless max_steps says how many."""
    from .args_rules_training import plan_schedule
    from .tables import OPTIMIZERS

    args = layout.args
    arguments = layout.arguments
    lines = []
    of_epoch = 0
    if not arguments.data.dataset:
        return ["steps          0: there is no dataset to train on"]
    if args.max_steps <= 0:
        data = _data(arguments)
        of_epoch = math.ceil(len(data.train) / layout.global_batch_size)
        lines.append(
            f"data           {len(data.train):,} samples, {data.train.num_tokens:,} tokens"
        )
    else:
        lines.append("data           not read, since max_steps is given")
    steps = args.steps_of_run(of_epoch)
    rows = steps * layout.global_batch_size
    lines.append(f"steps          {steps:,} of {layout.global_batch_size} samples, {rows:,} in all")
    most = rows * sum(layout.model.lengths)
    lines.append(f"tokens         at most {most:,}, rows of {sum(layout.model.lengths)}")
    lines.append(f"warm-up        {show_count(plan_schedule(args, steps).warmup, 'step')}")
    for what in ("eval", "save"):
        strategy = getattr(args, f"{what}_strategy")
        every = getattr(args, f"{what}_steps")
        count = {"no": 0, "epoch": math.ceil(args.num_train_epochs)}.get(strategy)
        if count is None:
            count = steps // every
        lines.append(f"{'evaluations' if what == 'eval' else 'checkpoints':15}{count}")
    total = layout.model.tensors.total(layout.config)
    width = layout.config.params_dtype.itemsize
    lines.append(f"model on disk  {show_size(total * width)}")
    states = 0 if args.save_only_model else 4 * len(OPTIMIZERS[args.optim].states)
    size = total * (width + states + (4 if width < 4 and states else 0))  # float32 masters
    if layout.model.tensors.spec is not None:  # the adapters alone are kept, in float32
        ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
        size = layout.memory.trained * ranks * (4 + states)
    lines.append(f"a checkpoint   {show_size(size)}")
    if layout.time is not None:
        time = layout.time
        messages = "messages between GPUs not counted: --link"
        if layout.options.link is not None:
            messages = f"{time.messages:.2f} s of it messages, {time.bubble:.2f} s the pipeline's"
        hours = time.total * steps / 3600
        lines.append(f"time{layout.time_words()}, {hours:.1f} h; {messages}")
    return lines


def _data(arguments):
    from .data import load_datasets
    from .run import load_tokenizer

    keys = arguments.model
    stage = arguments.finetuning.stage
    tokenizer = load_tokenizer(keys.model_name_or_path, keys.trust_remote_code)
    return load_datasets(arguments.data, stage, tokenizer, arguments.training.order_seed)


# keys of a layout, in the order in which they are shown
_KEYS = (
    *("tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"),
    *("context_parallel_size", "expert_model_parallel_size", "use_distributed_optimizer"),
    *("recompute_granularity", "per_device_train_batch_size", "gradient_accumulation_steps"),
)


def _layouts(words: list[str], base: _Layout, options):
    """Every layout of powers of two that the rules accept and that fits, with the same global
    batch: as fast as it can be, since smaller micro-batches, then recomputation are tried last."""
    powers = [2**i for i in range(options.gpus.bit_length())]
    experts = powers
    long = powers
    if not base.config.num_moe_experts:
        experts = [1]
    if sum(base.model.lengths) < _LONG:
        long = [base.args.context_parallel_size]
    micro_batches = sorted({base.args.per_device_train_batch_size, 1}, reverse=True)
    slower = list(itertools.product((False, True), micro_batches))
    for tp, pp, cp, ep in itertools.product(powers, powers, long, experts):
        if tp > 8 or options.gpus % (tp * pp * cp):
            continue  # tensor parallelism stays on a node
        keys = {
            "tensor_model_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
            "global_batch_size": base.global_batch_size,
            "gradient_accumulation_steps": None,
        }
        if pp != base.args.pipeline_model_parallel_size:
            keys |= {"virtual_pipeline_model_parallel_size": None}
            keys |= {"pipeline_model_parallel_layout": None}
        if options.gpus > tp * pp:
            keys["use_distributed_optimizer"] = True
        for again, micro_batch in slower:
            keys["recompute_granularity"] = "full" if again else None
            keys["per_device_train_batch_size"] = micro_batch
            with contextlib.suppress(ConfigError):
                arguments = parse_args([*words, *_words(keys)])
                one = _Layout(arguments, base.model, options)
                if one.memory.total <= options.memory * _HEADROOM * _GIB:
                    yield one
                    break


def _words(keys: dict) -> list[str]:
    """The words of a command line, in a shell too."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in keys.items()}
    return [f"{key}={shlex.quote(text)}" for key, text in texts.items()]
