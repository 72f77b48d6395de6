"""The first step of a run in its layout, compared with the same step in plain torch.

The oracle is a transformers model on global rank 0. It runs the micro-batches of all ranks one
after another, in float32 for a bf16 layout and in float64 for a float32 layout. The bound comes
from rounding: the same model runs once more in the layout's precision, and its distance from the
oracle is the noise. The layout's distance may be FACTOR times the noise, plus EXACT. Letters: s
tokens in a row, h hidden size, V vocabulary.

A tensor's name has two parts: ("outputs", "layer 0 mlp"), ("gradients", Hugging Face's or PEFT's
name), ("losses", "micro-batch 0").
"""

import dataclasses
import functools
import gc
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from . import cpu, model_config, parallel, run
from .args import TrainingArguments, UseMcaArguments
from .backend_torch import TorchBackend
from .batch import Batch, zigzag
from .errors import refuse
from .families import values_of
from .mcore import mpu
from .model import VirtualModels
from .step import compute_gradients
from .tables import TEACHER_KEY
from .weights_files import generator_of

# tiny models of 24 families reached 1.5 times the noise, because sums have another order
FACTOR = 3.0
EXACT = 1e-4  # relative, allowed in addition to the noise
_LOSS = 1e-3  # relative, the least noise of a loss, because errors in a mean cancel by chance
_FLOOR = 1e-2  # a gradient that is nearly 0 is compared with this share of a usual one of its size
_LOGITS = 256  # how many positions of the row have their logits compared

Name = tuple[str, str]


class Row(NamedTuple):
    """The comparison of one tensor of a training step, such as a layer's output, between a parallel
    layout and plain torch. kind: "outputs", "losses" or "gradients". size: norm of the exact
    tensor. distance: error of the layout's tensor. noise: error that rounding alone gives in plain
    torch. bound: the largest distance allowed. distance, noise and bound are relative to size (for
    a gradient near 0, to a share of a usual gradient)."""

    kind: str
    name: str
    size: float
    distance: float
    noise: float
    bound: float

    @property
    def differs(self) -> bool:
        return not self.distance <= self.bound  # NaN does too

    @property
    def group(self) -> str:
        """The tensors that share a bound with this one have the same group: the name with * for
        each number, such as a layer's, an expert's or a micro-batch's. An output's group is its own
        name."""
        return self.name if self.kind == "outputs" else re.sub(r"\d+", "*", self.name)


class _Share(NamedTuple):
    """One rank's part of the compared step, sent to all ranks. replica: its data-parallel rank.
    index: positions in the row of the tokens whose layer outputs it has. places: positions whose
    logits are compared. batches: micro-batches that it sends. losses: from _run()."""

    replica: int
    index: torch.Tensor
    places: torch.Tensor
    batches: list[Batch]
    losses: list[list[float]]


def compare(plan: run.Plan) -> list[Row]:
    """Run a plan's first training step in its parallel layout and in plain torch -> a Row (the
    comparison) per tensor in the order of a step, on global rank 0; [] on other ranks.

    Dropout must be off in the layout. Adapters that would start at 0 get small values. Memory of
    rank 0, besides its share of the layout: 8 bytes per parameter of the whole model (16 in
    float32), 4 in host memory, and the outputs of all layers for one row. Raises ValueError, on
    every rank, for a model that rank 0 cannot run. Collective."""
    if not plan.arguments.backend.use_mca:
        refuse("use_mca", False, "layouts are compared with plain torch", "use_mca: true")
    if TEACHER_KEY in plan.objective.keys:
        reason = "a teacher's part of the loss is not compared"
        refuse("stage", plan.objective.stage, reason, "stage: sft, which has the same layout")
    if plan.objective.scores:
        reason = "outputs, logits and gradients are compared, and a reward model has no logits"
        refuse("stage", plan.objective.stage, reason, "stage: dpo, with its base model")
    args = plan.arguments.training
    parallel.initialize(args, True)
    args.eval_strategy = "no"
    args.predict_with_generate = False
    trainer = run.build_trainer(plan)
    plan.data.media.is_read = True  # the oracle's batches come from the last stage
    _fill_adapters(trainer.model, plan)
    trainer.create_optimizer()
    if getattr(trainer, "reference", None) == "cached":
        trainer.reference = "adapter"  # the same model, for these pairs alone
    loader = iter(trainer.get_train_dataloader())
    batches, _, _ = trainer.read_step(loader, trainer.plan_batches(trainer.train_dataset), 0)
    batches = trainer.prepared(batches)  # with the log-probabilities of a reference
    part = _Part(trainer, batches[0])
    shares = parallel.gather(part.share(batches, _run(trainer, batches)))
    sent = part.outputs_and_logits()
    plain: list[dict[Name, Any]] = []  # on rank 0: the oracle, its noise, the least noise
    parallel.on_main(lambda: plain.extend(_oracle_and_noise(plan, trainer, shares)), ValueError)
    if not plain:
        plain = [{}, {}, {}]
    tensors = itertools.chain(
        _joined(parallel.send_to_main(sent), shares),
        _losses(_over_ranks(shares)).items(),
        _named("gradients", trainer.backend.gradients()),
    )
    return compared_rows(*plain, _distances(tensors, plain[0]))


# -- the layout's side


def _fill_adapters(model: Any, plan: run.Plan) -> None:
    """Give new LoRA adapters small values, the same in the layout and in plain torch. With a zero
    matrix, as they usually start, the other matrix would have no gradient to compare."""

    def draw(key: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = generator_of(plan.arguments.training.seed, key)
        return torch.empty(shape).normal_(0, 0.02, generator=generator)

    plan.model.finetuning.fill_fresh(model, draw)


def _run(trainer: Any, batches: list[Batch]) -> list[list[float]]:
    """Run the forward and backward passes of a step, without an update -> the loss of each
    micro-batch as a pair, [sum, count] or [mean, 1]; [] except on the last pipeline stage.
    Gradients stay in trainer.backend."""
    metrics = compute_gradients(trainer.backend, trainer, trainer.forward_step, batches)
    return [of_batch[trainer.metrics_keys[0]].tolist() for of_batch in metrics]


class _Part:
    """Collects this rank's part of the layers' outputs during the step, by hooks. Outputs are kept
    for the first row of the first micro-batch, on data-parallel rank 0 only. batch: the first
    micro-batch."""

    def __init__(self, trainer: Any, batch: Batch) -> None:
        self.backend = trainer.backend
        self.models = trainer.backend.model
        self.tp_rank = mpu.get_tensor_model_parallel_rank()
        borders = batch.get("cu_seqlens", (0, batch["input_ids"].shape[1]))
        cut = zigzag(borders, *self.backend.context_parallel)
        self.cuts = [cut]  # one per tensor-parallel rank with other tokens
        if self.models.config.sequence_parallel:
            self.cuts = cut.chunk(self.models.config.tensor_model_parallel_size)
        self.every = math.ceil(borders[-1] / _LOGITS)
        self.outputs: dict[str, torch.Tensor] = {}
        if self.backend.dp_rank == 0:
            _keep_outputs(_megatron_modules(self.models), 1, self.outputs)

    @property
    def places(self) -> torch.Tensor:
        return torch.cat([cut[:: self.every] for cut in self.cuts])

    def share(self, batches: list[Batch], losses: list[list[float]]) -> _Share:
        """This rank's _Share (its part of the step, for all ranks). Losses are in it only on
        tensor-parallel rank 0 of the last pipeline stage; micro-batches only on those of these
        ranks that are context-parallel rank 0. So no data is sent twice.

        batches, losses: this rank's micro-batches and their losses."""
        if self.tp_rank > 0:
            losses = []
        if not losses or self.backend.context_parallel[1] > 0:
            batches = []
        index = self.cuts[self.tp_rank % len(self.cuts)]
        on_cpu = [{k: getattr(v, "cpu", lambda v=v: v)() for k, v in b.items()} for b in batches]
        return _Share(self.backend.dp_rank, index, self.places, on_cpu, losses)

    def outputs_and_logits(self) -> dict[str, torch.Tensor]:
        """The tensors that this rank sends for comparison, {name: tensor}: its part of the layers'
        outputs and, on tensor-parallel rank 0 of the last stage, of the logits. {} except on
        data-parallel rank 0. No data is sent by two ranks. Collective over that replica's
        tensor-parallel ranks of the last stage."""
        sent = dict(self.outputs)
        if self.tp_rank >= len(self.cuts):
            sent = {}
        if "final norm" in self.outputs:
            rows = self.outputs["final norm"][:: self.every, None].to(parallel.device())
            last = self.models[len(self.models) - 1]
            with torch.no_grad():
                logits = self.models.gather_logits(last.logits(rows))[0]
            if self.tp_rank == 0:
                sent["logits"] = logits
        return sent


def _megatron_modules(models: VirtualModels) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    """Find the modules of this rank's model whose outputs are compared: embedding, layers and final
    norm. Yields (name, module, True to compare its input instead of its output)."""
    for chunk in models:
        if chunk.pre_process:
            yield "embedding", chunk.decoder, True  # with the features of pictures
        for layer in chunk.decoder.layers:
            name = f"layer {layer.layer_number - 1}"
            yield f"{name} attention", layer.self_attention, False
            yield f"{name} mlp", layer.mlp, False
            yield name, layer, False
        if chunk.post_process:
            yield "final norm", chunk.output_layer or chunk.score, True


def _torch_modules(model: Any) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    """Find the modules of a transformers model whose outputs are compared, with the names of
    _megatron_modules. Yields (name, module, True to compare its input instead of its output)."""
    decoder = getattr(model.base_model, "language_model", model.base_model)
    yield "embedding", decoder.layers[0], True
    for i, layer in enumerate(decoder.layers):
        attention = getattr(layer, "linear_attn", None) or layer.self_attn
        yield f"layer {i} attention", attention, False
        yield f"layer {i} mlp", layer.mlp, False
        yield f"layer {i}", layer, False
    yield "final norm", decoder.norm, False


def _keep_outputs(
    modules: Iterable[tuple[str, torch.nn.Module, bool]],
    axis: int,
    outputs: dict[str, torch.Tensor],
) -> None:
    """Add hooks that store each module's first output (or input) in `outputs`, by name, as [s, h]
    on the CPU. modules: (name, module, True to store its input). axis: the batch axis; only index 0
    along it is stored. Later calls of a module are ignored."""

    def keep(name: str, module: Any, args: Any, output: Any = None) -> None:
        value = args if output is None else output
        if isinstance(value, tuple):
            value, *more = value
            biases = (x for x in more if isinstance(x, torch.Tensor) and x.dim() == 1)
            value = value + next(biases, 0)  # megatron returns the bias separately
        if name not in outputs:
            outputs[name] = value.detach().select(axis, 0).to("cpu", copy=True)

    for name, module, is_input in modules:
        hook = functools.partial(keep, name)
        (module.register_forward_pre_hook if is_input else module.register_forward_hook)(hook)


# -- parts of ranks


def _over_ranks(shares: list[_Share]) -> list[list[float]]:
    """Join the losses that all ranks sent: a pair per micro-batch, as _run() returns them, summed
    over context-parallel ranks. The micro-batches of data-parallel replicas follow one another.
    shares: the _Share of each rank."""
    of_replica: dict[int, torch.Tensor] = {}
    for share in sorted(shares, key=lambda share: share.replica):
        if share.losses:
            earlier = of_replica.get(share.replica, 0.0)
            of_replica[share.replica] = earlier + torch.tensor(share.losses)
    return torch.cat([*of_replica.values()]).tolist()


def _losses(pairs: list[list[float]]) -> dict[Name, torch.Tensor]:
    return {
        ("losses", f"micro-batch {i}"): torch.tensor(total / count)
        for i, (total, count) in enumerate(pairs)
        if count
    }


def _named(
    kind: str, pairs: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[Name, torch.Tensor]]:
    return (((kind, name), tensor) for name, tensor in pairs)


def _joined(
    sent: Iterable[tuple[str, Any]], shares: list[_Share]
) -> Iterator[tuple[Name, torch.Tensor]]:
    """Yield (name, tensor) for each compared output of the whole row: the ranks' tensors
    concatenated along the token axis. Tokens are put into the row's order; only those of "logits"
    stay in the order of the ranks. sent: (output name, {rank: tensor}). shares: the _Share of each
    rank, with its tokens' positions."""
    for name, parts in sent:
        whole = torch.cat(list(parts.values()))
        if name != "logits":
            whole = whole[torch.cat([shares[rank].index for rank in parts]).argsort()]
        yield ("outputs", name), whole


# -- plain torch, on rank 0


def _oracle_and_noise(plan: run.Plan, trainer: Any, shares: list[_Share]) -> list[dict[str, Any]]:
    """Compute a training step in a transformers model on this rank, once exactly and once rounded
    -> [oracle, noise, least noise], each a dict by tensor name.

    The oracle has the tensors of the exact step, computed in float64, or float32 if the run trains
    in bf16. noise: norm of the difference between the rounded step (float32, or bf16) and the
    oracle. least noise: the least relative difference that counts as noise; empty if
    the run does not train in bf16.
    """
    by_replica = sorted(shares, key=lambda share: share.replica)
    batches = [batch for share in by_replica for batch in share.batches]
    places = torch.cat([share.places for share in shares if share.replica == 0 and share.losses])
    exact = torch.float64
    rounded = torch.float32
    if plan.arguments.training.bf16:
        exact = torch.float32
        rounded = torch.bfloat16
    with parallel.alone():
        oracle = dict(_plain_step(plan, trainer, batches, places, exact))
        gc.collect()  # free the first model before the second is built
        noise = _distances(_plain_step(plan, trainer, batches, places, rounded), oracle)
    least: dict[Name, float] = {}
    if plan.arguments.training.bf16:
        least = _least_noise(plan, batches, oracle)
    return [oracle, noise, least]


def _least_noise(plan: run.Plan, batches: list[Batch], oracle: dict[str, Any]) -> dict[Name, float]:
    """The least relative noise that is assumed in a bf16 run, {tensor's name: number}. A loss gets
    _LOSS.

    In a model with experts rounding may send one token to another expert. So outputs and gradients
    get one token's share of a norm there, 1 / sqrt(n). n is the length of an output; for an
    expert's gradient the mean number of tokens per expert; for other gradients the number of
    tokens."""
    values = values_of(_hf_config(plan))
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    least = {name: _LOSS for name in oracle if name[0] == "losses"}
    for name in oracle.keys() - least.keys() if values.get("num_moe_experts") else ():
        count = tokens
        if name[0] == "outputs":
            count = len(oracle[name])
        elif ".experts." in name[1]:
            count *= values["moe_router_topk"] / values["num_moe_experts"]
        least[name] = 1 / math.sqrt(count)
    return least


def _hf_config(plan: run.Plan) -> Any:
    """The model's transformers config, with the dropout rates at its top level set to 0."""
    keys = plan.arguments.model
    values = plan.arguments.model_config
    config = model_config.load_hf_config(str(plan.model.folder), keys.trust_remote_code, values)
    for key in config.to_dict():
        if key.endswith(("dropout", "pdrop")):
            setattr(config, key, 0.0)
    return config


def _plain_trainer(plan: run.Plan, trainer: Any, bf16: bool) -> Any:
    """A plain torch trainer on this rank with the same objective, for a new transformers model.
    trainer: the trainer in the layout. bf16: True to round as a bf16 run does."""
    args = trainer.args
    fields = dataclasses.fields(TrainingArguments)
    values = {of.name: getattr(args, of.name) for of in fields if of.metadata.get("torch", True)}
    values |= dict(bf16=bf16, global_batch_size=None, gradient_accumulation_steps=None)
    arguments = dataclasses.replace(
        # the batches have the reference's log-probabilities already
        plan.arguments.with_keys(ref_model=None),
        training=TrainingArguments(**values),
        backend=UseMcaArguments(use_mca=False),
    )
    planned = dataclasses.replace(plan.model, config=_hf_config(plan))
    model = run.build_model(dataclasses.replace(plan, arguments=arguments, model=planned))
    _fill_adapters(model, plan)
    make = type(trainer)
    plain = make(
        model=model,
        args=args,
        tokenizer=trainer.tokenizer,
        backend=TorchBackend(model, arguments.training),
        **make.own_keywords(arguments, None),
    )
    plain.backend.micro_batch_weight = trainer.backend.micro_batch_weight
    plain.backend.expect_weighted_losses()
    return plain


def _plain_step(
    plan: run.Plan, trainer: Any, batches: list[Batch], places: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[Name, torch.Tensor]]:
    """Run the step in a transformers model on this rank; yield (name, CPU tensor) for its outputs,
    losses and gradients. trainer: the trainer in the layout. batches: the micro-batches of all
    ranks. places: positions in the row whose logits are compared. dtype: of the model's weights; if
    it is bf16 and adapters are trained, the weights are not cast to it here."""
    bf16 = dtype == torch.bfloat16
    plain = _plain_trainer(plan, trainer, bf16)
    model = plain.model
    # cast after the backend is made, which tests its head in float32; buffers are not cast, because
    # rotary frequencies are float32 in every precision
    if not bf16 or plan.model.finetuning.is_whole:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # grouped GEMMs do not support float64
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain.backend.optimizer = torch.optim.SGD(
        trained
    )  # it only clears gradients; no update is made
    outputs: dict[str, torch.Tensor] = {}
    _keep_outputs(_torch_modules(model), 0, outputs)
    losses = _losses(_run(plain, batches))
    outputs["logits"] = _plain_logits(plain, batches[0], places)
    yield from _named("outputs", outputs.items())
    yield from losses.items()
    yield from _named("gradients", plain.backend.gradients())


@torch.no_grad()
def _plain_logits(trainer: Any, batch: Batch, places: torch.Tensor) -> torch.Tensor:
    """Logits [places, V] of the batch's first row at `places`, on the CPU."""
    inputs = {**trainer.inputs_of(batch), "labels": None}
    with trainer.backend.autocast():
        return trainer.backend.loss_model(**inputs, places=places.to(parallel.device()))[0].cpu()


# -- both beside each other


def _distances(
    tensors: Iterable[tuple[Name, torch.Tensor]], oracle: dict[str, Any]
) -> dict[Name, float]:
    """Compare tensors with the exact ones in `oracle` -> {name: norm of the difference}, for the
    names that the oracle has. Iterates `tensors` to the end, which may be collective."""
    pairs = ((name, tensor.float()) for name, tensor in tensors if name in oracle)
    return {name: _norm(tensor - oracle[name]) for name, tensor in pairs}


def _norm(*tensors: torch.Tensor) -> float:
    return float(cpu.l2_norm(tensors))


def compared_rows(
    oracle: dict[str, Any], noise: dict[str, Any], least: dict[str, Any], distances: dict[str, Any]
) -> list[Row]:
    """Judge each tensor of the oracle (the exact step) -> a Row per tensor, with its distance, and
    a bound that follows from the largest noise in its group.

    noise, distances: norms of the differences from the oracle, by name: of rounding in plain torch,
    and of the layout. least: the least relative noise by name. A tensor without a distance counts
    as different."""
    gradients = [tensor for (kind, _), tensor in oracle.items() if kind == "gradients"]
    count = sum(tensor.numel() for tensor in gradients)
    usual = _FLOOR * _norm(*gradients) / math.sqrt(max(count, 1))
    rows = []
    worst: dict[str, float] = {}  # by group, because a few values may agree by chance
    for name, tensor in oracle.items():
        size = _norm(tensor)
        scale = max(size, 1e-30)
        if name[0] == "gradients":
            scale = max(scale, usual * math.sqrt(tensor.numel()))
        distance = distances.get(name, math.inf) / scale
        row = Row(*name, size, distance, noise.get(name, 0.0) / scale, 0.0)
        rows.append(row)
        worst[row.group] = max(worst.get(row.group, 0.0), row.noise, least.get(name, 0.0))
    return [row._replace(bound=EXACT + FACTOR * worst[row.group]) for row in rows]
