"""How long a step takes, from the configs and a table of measured rates.

    seconds = (products + attention + passes) x gaps x (1 + bubble) + messages not hidden + update

products and attention are FLOPs (log_speed.py has the formulas), passes the bytes of what is
elementwise. bubble: (pp - 1) / (micro-batches x virtual stages). Messages of a collective over n
ranks send (n - 1) / n of its bytes, twice for an all-reduce. Those of gradients and parameters can
hide behind the last micro-batch's backward and the first one's forward pass; all others wait.
Stages, experts and documents are taken as even, rows as full.
"""

from typing import NamedTuple

# bytes that passes of bf16 move for a token and layer: SwiGLU's of a column of the MLP, forward and
# backward, are counted; those of a channel (norms, rotary embedding, residuals) and of the loss a
# column of the vocabulary follow from their times on one H200
_OF_COLUMN, _OF_CHANNEL, _OF_VOCABULARY = 16, 94, 9


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
    from .log_speed import ModelWork, model_sizes  # with torch

    sizes = model_sizes(config)
    if sizes is None:
        return None
    again = config.recompute_granularity == "full"
    samples = args.train_global_batch_size
    tokens, squares = samples * sum(lengths), samples * sum(n**2 for n in lengths)
    beside = ModelWork(sizes.weights, 0.0, sizes.core) if reference else None
    # adapters are less than a percent
    work = ModelWork(sizes.weights * frozen, sizes.weights * (not frozen), sizes.core, beside)
    passed = 1 + (again + reference) / 3  # forward and backward, and forward passes beside
    head = sizes.hidden_size * sizes.vocab_size
    products = work.flops(tokens, 0) + 2 * again * (sizes.weights - head) * tokens
    attention = work.flops(0, squares) + 2 * again * sizes.core * squares
    columns, channels = sizes.mlp_weights / 3 / sizes.hidden_size, sizes.hidden_size
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
    w, h, tp = config.params_dtype.itemsize, config.hidden_size, config.tensor_model_parallel_size
    pp, cp, ep = (
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
        config.expert_model_parallel_size,
    )
    sp = tp if config.sequence_parallel else 1
    micro_batches, layers = args.gradient_accumulation_steps or 1, config.num_layers / pp
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
    share, of_batch = (copies - 1) / copies, compute / (args.gradient_accumulation_steps or 1)
    reduce, gather = 2 * share * memory.gradients / link, 0.0
    if args.use_distributed_optimizer:  # a half of the all-reduce, then updated parameters
        reduce, gather = reduce / 2, share * memory.trained * config.params_dtype.itemsize / link
    if args.overlap_grad_reduce:
        reduce = max(0.0, reduce - of_batch * 2 / 3)
    if args.overlap_param_gather:
        gather = max(0.0, gather - of_batch / 3)
    return reduce + gather
