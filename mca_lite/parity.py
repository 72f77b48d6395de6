"""The first step of a run in the configured layout, beside the same step of plain torch.

The oracle is transformers' model on global rank 0, which runs the micro-batches of all ranks one
after another: in float32 for a layout in bf16, in float64 for one in float32. The layout is judged
by what rounding does: the same model runs once more there in the layout's precision, and its
distance from the oracle is the noise, of which the layout's may be FACTOR times as much. Letters:
s tokens of a row, h hidden size, V vocabulary.

What is compared has a name of two words: ("outputs", "layer 0 mlp"), ("gradients", Hugging Face's
or PEFT's name), ("losses", "micro-batch 0").
"""

import copy
import dataclasses
import functools
import gc
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from . import cpu, lora, model_config, parallel, run
from .args import TrainingArguments, UseMcaArguments
from .backend_torch import TorchBackend
from .batch import zigzag
from .families import FAMILIES
from .model import VirtualModels
from .weights_files import generator_of

# another order of sums is as far again: tiny models of 24 kinds came to 1.5 times the noise
FACTOR = 3.0
EXACT = 1e-4  # relative: no less is asked of any
_LOSS = 1e-3  # relative, the least noise of a loss: in a mean errors cancel more or less by chance
_FLOOR = 1e-2  # of a usual gradient of as many numbers: it measures one that is nearly 0
_LOGITS = 256  # places of the row whose logits are compared

Name = tuple[str, str]


class Row(NamedTuple):
    """What both sides have. size: the oracle's norm. distance, noise, bound: relative to it."""

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
        """The name without numbers of layers, experts and micro-batches. Outputs stand alone."""
        return self.name if self.kind == "outputs" else re.sub(r"\d+", "*", self.name)


class _Told(NamedTuple):
    """What a rank tells the others of the step. index, places: where its outputs and its logits
    stand in the row. losses: (sum, count) of each micro-batch."""

    replica: int
    index: torch.Tensor
    places: torch.Tensor
    batches: list[dict]
    losses: list[list[float]]


def compare(plan: run.Plan) -> list[Row]:
    """Run the first step of a plan both ways -> what came of it in the order of a step, on global
    rank 0; [] elsewhere.

    Dropout is off in transformers' models, and has to be in others. Adapters that would begin at 0
    get small values. Memory of rank 0: beside its part of the layout 8 bytes for each parameter of
    the whole model (16 in float32), and 4 in host memory, where the outputs of all layers for one
    row are too.
    Collective. ValueError, on every rank, for what rank 0 cannot run.
    """
    args = plan.arguments.training
    parallel.initialize(args, plan.arguments.backend.use_mca)
    args.eval_strategy = "no"
    args.predict_with_generate = False
    if not plan.arguments.backend.use_mca:
        plan.model.config = _hf_config(plan)
    trainer = run.build_trainer(plan)
    _wake_adapters(trainer.model, plan)
    trainer.create_optimizer()
    if getattr(trainer, "reference", None) == "cached":
        trainer.reference = "adapter"  # the same model, which is asked for these pairs alone
    batches, length = _first_step(trainer)
    part = _Part(trainer, batches[0])
    told = parallel.gather(part.tell(batches, _run(trainer, batches, length)))
    sent = part.outputs_and_logits(batches[0])
    plain: list[dict] = []  # on rank 0: the oracle, and its noise
    parallel.on_main(lambda: plain.extend(_oracle_and_noise(plan, trainer, told)), ValueError)
    oracle = plain[0] if plain else {}
    found = _errors(_joined(parallel.send_to_main(sent), told), oracle)
    found |= _errors(_losses(_over_ranks(told)).items(), oracle)
    found |= _errors(_named("gradients", trainer.backend.gradients()), oracle)
    return _rows(*plain, found) if plain else []


# -- the layout's side -----------------------------------------------------------------------------


def _wake_adapters(model, plan: run.Plan) -> None:
    """An adapter begins with a matrix of zeros, and the other one has no gradient: all get small
    values, the same on both sides."""
    if plan.model.adapters is None or plan.model.adapter_source is not None:
        return

    def draw(key, shape):
        generator = generator_of(plan.arguments.training.seed, key)
        return torch.empty(shape).normal_(0, 0.02, generator=generator)

    lora.fill_adapters(model, draw)


def _first_step(trainer) -> tuple[list[dict], int]:
    """(this rank's micro-batches of the first step, with a reference's numbers; their length)"""
    plan = trainer.plan_batches(trainer.train_dataset)
    loader = iter(trainer._train_loader(plan, 0, 0))
    batches, length, _ = trainer._get_step_iterator_and_seq_length(loader, plan, 0)
    return trainer._prepare_micro_batches(batches, length), length


def _run(trainer, batches: list[dict], length: int) -> list[list[float]]:
    """(sum, count) of each micro-batch's loss, [] before the last pipeline stage; the gradients are
    left in the backend."""
    trainer.backend.train_mode(True)
    trainer.backend.weigh_router_losses(batches, trainer._count_of_loss)
    metrics = trainer.backend.forward_backward(trainer.forward_step, batches, length)
    return [of[trainer.metrics_keys[0]].tolist() for of in metrics]


class _Part:
    """What this rank has of the first row of the first micro-batch, which its hooks keep."""

    def __init__(self, trainer, batch: dict):
        self.trainer = trainer
        self.backend = trainer.backend
        model = trainer.backend.model
        self.is_mca = isinstance(model, VirtualModels)
        self.tp_rank = 0
        borders = batch.get("cu_seqlens", (0, batch["input_ids"].shape[1]))
        self.cuts = [zigzag(borders, *self.backend.context_parallel)]  # of tensor-parallel ranks
        if self.is_mca:
            from .mcore import mpu

            self.tp_rank = mpu.get_tensor_model_parallel_rank()
            if model.config.sequence_parallel:
                self.cuts = self.cuts[0].chunk(model.config.tensor_model_parallel_size)
        self.every = math.ceil(borders[-1] / _LOGITS)
        self.outputs = {}
        if self.backend.dp_rank == 0:
            modules = _megatron_modules(model) if self.is_mca else _torch_modules(model)
            _keep_outputs(modules, int(self.is_mca), self.outputs)

    @property
    def places(self) -> torch.Tensor:
        return torch.cat([cut[:: self.every] for cut in self.cuts])

    def tell(self, batches: list[dict], losses: list[list[float]]) -> _Told:
        """What the others need of this rank. Batches and losses come from one rank of those that
        have the same."""
        if self.tp_rank > 0:
            losses = []
        if not losses or self.backend.context_parallel[1] > 0:
            batches = []
        on_cpu = [
            {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            for batch in batches
        ]
        index = self.cuts[self.tp_rank % len(self.cuts)]
        return _Told(self.backend.dp_rank, index, self.places, on_cpu, losses)

    def outputs_and_logits(self, batch: dict) -> dict[str, torch.Tensor]:
        """This rank's share of the outputs and the logits, none of which another rank gives too.
        Collective over tensor-parallel ranks of the last stage."""
        sent = self.outputs if self.tp_rank < len(self.cuts) else {}
        if not self.is_mca and self.backend.dp_rank == 0:
            return {**sent, "logits": _plain_logits(self.trainer, batch, self.places)}
        if "final norm" not in self.outputs or not self.is_mca:
            return sent
        models = self.backend.model
        with torch.no_grad():
            rows = self.outputs["final norm"][:: self.every, None].to(parallel.device())
            logits = models.gather_logits(models[len(models) - 1]._postprocess(rows))[0]
        return {**sent, "logits": logits} if self.tp_rank == 0 else sent


def _megatron_modules(models: VirtualModels) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    """(name, module, whether its input is compared and not its output) of this rank."""
    for chunk in models:
        if chunk.pre_process:
            yield "embedding", chunk.embedding, False
        for layer in chunk.decoder.layers:
            name = f"layer {layer.layer_number - 1}"
            yield f"{name} attention", layer.self_attention, False
            yield f"{name} mlp", layer.mlp, False
            yield name, layer, False
        if chunk.post_process:
            yield "final norm", chunk.output_layer, True


def _torch_modules(model) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    """The same places of a transformers model; none of one that is built in another way."""
    decoder = model.base_model
    layers = getattr(decoder, "layers", [])
    for i, layer in enumerate(layers):
        if i == 0:
            yield "embedding", layer, True
        for part, module in (("attention", "self_attn"), ("mlp", "mlp")):
            if hasattr(layer, module):
                yield f"layer {i} {part}", getattr(layer, module), False
        yield f"layer {i}", layer, False
    if layers and hasattr(decoder, "norm"):
        yield "final norm", decoder.norm, False


def _keep_outputs(modules, axis: int, outputs: dict[str, torch.Tensor]) -> None:
    """Let hooks put the first output of each module into `outputs`, [s, h] on the CPU, of the row
    that is first on `axis`: recomputation and later micro-batches come after it."""

    def keep(name, module, args, output=None):
        value = args if output is None else output
        value = value[0] if isinstance(value, tuple) else value
        if name not in outputs:
            outputs[name] = value.detach().select(axis, 0).to("cpu", copy=True)

    for name, module, is_input in modules:
        hook = functools.partial(keep, name)
        (module.register_forward_pre_hook if is_input else module.register_forward_hook)(hook)


# -- what ranks told -------------------------------------------------------------------------------


def _over_ranks(told: list[_Told]) -> list[list[float]]:
    """(sum, count) of each micro-batch of each replica, over context-parallel ranks."""
    of_replica: dict[int, list[torch.Tensor]] = {}
    for one in told:
        if one.losses:
            of_replica.setdefault(one.replica, []).append(torch.tensor(one.losses))
    return [pair for key in sorted(of_replica) for pair in sum(of_replica[key]).tolist()]


def _losses(pairs: list[list[float]]) -> dict[Name, torch.Tensor]:
    return {
        ("losses", f"micro-batch {i}"): torch.tensor(total / count)
        for i, (total, count) in enumerate(pairs)
        if count
    }


def _named(kind: str, pairs: Iterable[tuple[str, torch.Tensor]]):
    return (((kind, name), tensor) for name, tensor in pairs)


def _joined(sent, told: list[_Told]) -> Iterator[tuple[Name, torch.Tensor]]:
    """The parts of ranks as whole outputs, in the order of the row; logits as ranks have them."""
    for name, parts in sent:
        whole = torch.cat(list(parts.values()))
        if name != "logits":
            whole = whole[torch.cat([told[rank].index for rank in parts]).argsort()]
        yield ("outputs", name), whole


# -- plain torch, on rank 0 ------------------------------------------------------------------------


def _oracle_and_noise(plan: run.Plan, trainer, told: list[_Told]) -> list[dict]:
    """[the oracle's tensors by name, how far from them the same is in the layout's precision, and
    the least that is taken for rounding]"""
    batches = [batch for one in sorted(told, key=lambda one: one.replica) for batch in one.batches]
    places = torch.cat([one.places for one in told if one.replica == 0 and one.losses])
    bf16 = plan.arguments.training.bf16
    exact = torch.float64
    usual = torch.float32
    if bf16:
        exact = torch.float32
        usual = torch.bfloat16
    with parallel.alone():
        oracle = dict(_plain_step(plan, trainer, batches, places, exact))
        gc.collect()  # the first model goes before the second one comes
        noise = _errors(_plain_step(plan, trainer, batches, places, usual), oracle)
    least = {}
    if bf16:
        least = _shares_of_a_token(plan, batches, oracle)
        least |= {name: _LOSS for name in oracle if name[0] == "losses"}
    return [oracle, noise, least]


def _shares_of_a_token(plan: run.Plan, batches: list[dict], oracle: dict) -> dict[Name, float]:
    """Rounding may send a token to another expert: what its part is of a norm over all tokens."""
    config = _hf_config(plan)
    shares = {}
    values = FAMILIES[config.model_type].values(config) if config.model_type in FAMILIES else {}
    if not values.get("num_moe_experts"):
        return {}
    for (kind, name), tensor in oracle.items():
        count = sum(batch["input_ids"].numel() for batch in batches)
        if kind == "outputs":
            count = len(tensor)
        elif ".experts." in name:
            count *= values["moe_router_topk"] / values["num_moe_experts"]
        shares[kind, name] = 1 / math.sqrt(max(count, 1))
    return shares


def _hf_config(plan: run.Plan):
    """transformers' config of the model, without dropout."""
    keys = plan.arguments.model
    values = plan.arguments.model_config
    config = model_config.load_hf_config(str(plan.model.folder), keys.trust_remote_code, values)
    for key in config.to_dict():
        if key.endswith(("dropout", "pdrop")):
            setattr(config, key, 0.0)
    return config


def _plain_step(plan: run.Plan, trainer, batches: list[dict], places, dtype: torch.dtype):
    """(name, tensor on the CPU) of what a transformers model on this rank makes of the step."""
    arguments = plan.arguments
    planned = plan.model
    args = plan.arguments.training
    fields = dataclasses.fields(TrainingArguments)
    values = {of.name: getattr(args, of.name) for of in fields if of.metadata.get("torch", True)}
    bf16 = dtype == torch.bfloat16
    values |= dict(bf16=bf16, global_batch_size=None, gradient_accumulation_steps=None)
    keys = dict(training=TrainingArguments(**values), backend=UseMcaArguments(use_mca=False))
    arguments = dataclasses.replace(arguments, **keys)
    planned = dataclasses.replace(planned, config=_hf_config(plan))
    model = run.build_model(dataclasses.replace(plan, arguments=arguments, model=planned))
    _wake_adapters(model, plan)
    other = copy.copy(trainer)  # the same objective
    other.model = model
    other.backend = TorchBackend(model, arguments.training)
    # after the backend tried in float32 whether packed documents see each other; buffers stay as
    # they are, since rotary frequencies are float32 in every precision
    if not bf16 or planned.adapters is None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products know no float64
    other.backend.expect_weighted_losses()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    other.backend.optimizer = torch.optim.SGD(trained)  # empties gradients, and updates nothing
    outputs: dict[str, torch.Tensor] = {}
    _keep_outputs(_torch_modules(model), 0, outputs)
    losses = _losses(_run(other, batches, 0))
    outputs["logits"] = _plain_logits(other, batches[0], places)
    yield from _named("outputs", outputs.items())
    yield from losses.items()
    yield from _named("gradients", other.backend.gradients())


@torch.no_grad()
def _plain_logits(trainer, batch: dict, places: torch.Tensor) -> torch.Tensor:
    """[places, V] of the first row, on the CPU."""
    inputs = trainer._prepare_train_inputs(iter([batch]))
    device = parallel.device()
    ids = inputs["input_ids"][:1]
    positions = inputs["position_ids"][:1]
    with trainer.backend.autocast():
        model = trainer.backend.loss_model
        mask = inputs["attention_mask"]
        return model(ids, positions, mask, places=places.to(device))[0].cpu()


# -- both beside each other ------------------------------------------------------------------------


def _errors(found: Iterable[tuple[Name, torch.Tensor]], wanted: dict) -> dict[Name, float]:
    """The norm of each difference from what is wanted; goes to the end of `found`, which may be
    collective."""
    return {name: _norm(tensor.float() - wanted[name]) for name, tensor in found if name in wanted}


def _norm(*tensors: torch.Tensor) -> float:
    return float(cpu.l2_norm(tensors))


def _rows(oracle: dict, noise: dict, least: dict, found: dict) -> list[Row]:
    gradients = [tensor for (kind, _), tensor in oracle.items() if kind == "gradients"]
    count = sum(tensor.numel() for tensor in gradients)
    usual = _FLOOR * _norm(*gradients) / math.sqrt(max(count, 1))
    rows, worst = [], {}  # worst: noise of a group, since few numbers may be near by chance
    for name, tensor in oracle.items():
        row = Row(*name, _norm(tensor), 0.0, 0.0, 0.0)
        scale = row.size
        if row.kind == "gradients":
            scale = max(scale, usual * math.sqrt(tensor.numel()))
        scale = max(scale, 1e-30)
        distance = found.get(name, math.inf) / scale
        moved = noise.get(name, 0.0) / scale
        rows.append(row._replace(distance=distance, noise=moved))
        worst[row.group] = max(worst.get(row.group, 0.0), moved, least.get(name, 0.0))
    return [row._replace(bound=EXACT + FACTOR * worst[row.group]) for row in rows]
