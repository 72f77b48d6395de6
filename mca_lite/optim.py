"""Optimizers and the learning-rate schedule, shared by both backends.

After n steps, with w warm-up steps, D = lr_decay_steps, rho = (n - w) / (D - w), high = the maximum
and low = the minimum, the learning rate is high n / w during warm-up; then it depends on the style:

    constant             high
    linear               low + (high - low) (1 - rho)
    cosine               low + (high - low) (1 + cos(pi rho)) / 2
    inverse-square-root  max(low, high sqrt(max(w, 1)) / sqrt(max(n, 1)))
    WSD                  high until D - wsd_decay_steps, then down to low: linear, cosine,
                         exponential or minus_sqrt

After D it is low, except for constant. The first update uses n = 0.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import parallel
from .args import TrainingArguments
from .args_rules_training import SCHEDULES, plan_schedule
from .cpu import l2_norm
from .errors import expect
from .kernels import AdamW
from .mcore import (
    ConstantGradScaler,
    DynamicGradScaler,
    FP32Optimizer,
    MegatronOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    get_megatron_optimizer,
    of_minor,
)
from .tables import OPTIMIZERS, ParamGroups, function_of


class MegatronLRScheduler(OptimizerParamScheduler):
    """megatron's scheduler of learning rate and weight decay, for any optimizer with param_groups;
    get_last_lr() is added for the log. A group's weight_decay is set to its wd_mult times the run's
    weight decay, or times its own start_wd if it has one."""

    def step(self, increment: int = 1) -> None:
        """Count `increment` more steps, and set each group's learning rate and weight decay."""
        super().step(increment)

    def get_last_lr(self) -> list[float]:
        """The current learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]


def get_megatron_lr_scheduler(
    args: TrainingArguments, num_training_steps: int, optimizer: Any
) -> MegatronLRScheduler:
    """The learning-rate schedule of `args` over num_training_steps optimizer steps.

    lr_scheduler_kwargs: min_lr, or min_lr_rate (a fraction of learning_rate), not both.
    warmup_stable_decay also takes num_decay_steps, num_stable_steps and decay_type (default cosine,
    as in transformers). For other schedules num_decay_steps is the step at which the decay ends.
    ConfigError if the numbers of steps do not fit.
    """
    kwargs = args.lr_scheduler_kwargs
    warmup, end, decay = plan_schedule(args, num_training_steps)
    return MegatronLRScheduler(
        optimizer,
        init_lr=0.0 if warmup else args.learning_rate,
        max_lr=args.learning_rate,
        min_lr=kwargs.get("min_lr", kwargs.get("min_lr_rate", 0.0) * args.learning_rate),
        lr_warmup_steps=warmup,
        lr_decay_steps=max(end, warmup + 1),
        lr_decay_style=SCHEDULES[args.lr_scheduler_type],
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=max(num_training_steps, 1),
        wd_incr_style="constant",
        wsd_decay_steps=decay,
        lr_wsd_decay_style=kwargs.get("decay_type", "cosine"),
    )


def decays(name: str, parameter: torch.nn.Parameter) -> bool:
    """True if a parameter gets weight decay: it is not a vector, and its name does not end in
    "bias". So biases get none, not even the stacked ones of experts, nor do norms whose weight is
    a vector."""
    return parameter.dim() != 1 and not name.endswith("bias")


@dataclass
class NamedOptimizerConfig(OptimizerConfig):
    """megatron's OptimizerConfig plus `optim`, the name of the optimizer in the table OPTIMIZERS.
    Checkpoints read the names of the optimizer's states, such as exp_avg, from that table."""

    optim: str = "adam"


def get_optimizer_config(
    args: TrainingArguments, params_dtype: torch.dtype, splits: bool = False
) -> NamedOptimizerConfig:
    """Make megatron's OptimizerConfig from the training arguments. params_dtype: the weights'
    dtype. splits: True if the optimizer is a SplitMasterOptimizer, which makes the float32 masters
    of bf16 weights itself."""
    own = dict(
        optim=args.optim,
        # megatron-core has two optimizers; SGD, stateless so far, stands in for any other
        optimizer=OPTIMIZERS[args.optim].megatron or "sgd",
        min_lr=0.0,  # the scheduler reads it from each group, and None breaks it
        fp16=params_dtype == torch.float16,
        bf16=params_dtype == torch.bfloat16 and not splits,  # if true, megatron makes masters
        params_dtype=params_dtype,
        # an infinite limit never clips, but megatron still measures the norm
        clip_grad=args.max_grad_norm or float("inf"),
    )
    return NamedOptimizerConfig(**{**args.fields_of("optimizer"), **own})


def gradient_norm(optimizer: MegatronOptimizer) -> torch.Tensor:
    """Norm of all gradients in megatron's optimizer, a float64 tensor. The value is that of
    get_grad_norm() up to rounding, without a device sync. Collective."""
    parts = parts_of(optimizer)
    gradients = [getattr(part, of_minor("gradients_for_norm"))() for part in parts]
    groups = [part.get_grad_stats_parallel_group() for part in parts]
    if len(parts) > 1 and optimizer.grads_states_parallel_group_is_shared():
        gradients = [sum(gradients, [])]
        groups = groups[:1]
    squares = []
    for of_part, group in zip(gradients, groups, strict=True):
        squares.append(l2_norm(of_part).to(parallel.device()).square())
        dist.all_reduce(squares[-1], group=group)
    return torch.stack(squares).double().sum().sqrt()


class Matrices(NamedTuple):
    """Tells Muon how to take a parameter apart into the matrices that it updates separately: those
    of Hugging Face, such as q, k and v in a fused weight. A parameter is [rows, columns], or has
    stacked experts [n, ..., columns].

    groups: number of equally large groups of rows in the whole parameter, such as query groups.
    Each group has some rows of every matrix. sizes: rows of each matrix in one group. group: the
    ranks among which the parameter is sharded; None: it is not. axis: the axis of [n, rows,
    columns] along which it is sharded."""

    sizes: Sequence[int]
    groups: int = 1
    group: dist.ProcessGroup | None = None
    axis: int = 1

    def apply(
        self, change: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor
    ) -> torch.Tensor:
        """Replace each matrix by change(matrix [n, rows, columns]) -> this rank's shard of the
        results, shaped like `part`. part: this rank's shard of a tensor laid out like the
        parameter. Collective over `group`, if there is one, to gather the shards first."""
        blocks = part.reshape(len(part) if part.dim() > 2 else 1, -1, part.shape[-1])
        if self.group:
            blocks = parallel.whole(blocks, self.axis, self.group)
        pieces = blocks.unflatten(1, (self.groups, -1)).split(self.sizes, 2)
        changed = [change(piece.flatten(1, 2)).view(piece.shape) for piece in pieces]
        blocks = torch.cat(changed, 2).flatten(1, 2)
        if self.group:
            blocks = blocks.chunk(self.group.size(), self.axis)[self.group.rank()]
        return blocks.reshape(part.shape)


class SplitMasterOptimizer(FP32Optimizer):
    """megatron's wrapper around kernels.AdamW, which stores a float32 master weight in two halves:
    the bf16 parameter is the upper one. It reads DDP's gradients without copying them."""

    def __init__(self, part: FP32Optimizer, inner: AdamW):
        super().__init__(inner, part.config, part.init_state_fn)
        self.grad_stats_parallel_group = part.grad_stats_parallel_group
        self.tp_group = part.tp_group
        # makes megatron take norm and zeros from decoupled_grad, as for Transformer Engine's Adam
        part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True

    def prepare_grads(self) -> bool:
        """Let the update read DDP's gradient buffers directly. Returns False, because without an
        fp16 loss scale nothing can overflow."""
        for parameter in self.get_parameters():
            parameter.decoupled_grad = parameter.main_grad  # the update reads bf16 as it is
        return False

    def multiply(
        self, factor: float | torch.Tensor, grad_norm: torch.Tensor, largest: float | None
    ) -> None:
        """Prepare the next update: it will scale gradients by `factor` and clip them.

        grad_norm: the norm after scaling, a float64 scalar tensor.
        largest: if grad_norm is above it or NaN, the update changes step counts only; None: no
        limit. No device sync."""
        shrink = (self.config.clip_grad / (grad_norm + 1e-6)).clamp(max=1).nan_to_num(1.0)
        if largest is not None:
            shrink = shrink.where(grad_norm.le(largest), float("nan"))
        self.optimizer.factor = factor * shrink

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Set the float32 masters to the bf16 weights, after something else changed the weights."""
        self.optimizer.forget_masters()


def splits_masters(args: TrainingArguments, params_dtype: torch.dtype, is_whole: bool) -> bool:
    """True if the run uses SplitMasterOptimizer; the same on all ranks.

    It is used if the optimizer supports it (see OPTIMIZERS), weights are bf16, and whole weights
    are trained rather than adapters (is_whole). It is not used with the distributed optimizer or
    with optimizer_cpu_offload, which store master weights themselves.
    """
    elsewhere = args.use_distributed_optimizer or args.optimizer_cpu_offload
    is_half = params_dtype == torch.bfloat16 and is_whole
    return is_half and OPTIMIZERS[args.optim].halves is not None and not elsewhere


def create_megatron_optimizer(
    args: TrainingArguments,
    chunks: list[torch.nn.Module],
    params_dtype: torch.dtype,
    is_whole: bool = True,
) -> MegatronOptimizer:
    """Create megatron's optimizer, plain or distributed, over DDP-wrapped chunks. It has float32
    masters for 16-bit weights.

    params_dtype: the weights' dtype. is_whole: False if adapters are trained instead of whole
    weights (Finetuning.is_whole).
    """
    row = OPTIMIZERS[args.optim]
    split = splits_masters(args, params_dtype, is_whole)
    config = get_optimizer_config(args, params_dtype, split)
    # megatron makes float32 views of weights: with autograd on, these would keep the nodes of
    # DDP's hooks alive, and those the model
    with torch.no_grad():
        optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    parts = parts_of(optimizer)
    for i, part in enumerate(parts):
        if getattr(part, "optimizer", None) is None:
            continue  # this rank trains nothing
        if split and row.halves:
            groups = _groups_without_defaults(part.optimizer)
            parts[i] = SplitMasterOptimizer(part, row.halves(groups, args))
            continue
        part.optimizer = _made_here(part, args)
        if args.optimizer_cpu_offload:
            offloaded = function_of("part_offload:OffloadedOptimizer")
            fraction = args.optimizer_offload_fraction
            make = functools.partial(row.new, args=args)
            part.optimizer = offloaded(part.optimizer, fraction, make)
    for group in optimizer.param_groups:
        # in a group these would override the scheduler's limits
        group.pop("min_lr", None)
        group.pop("max_lr", None)
    return optimizer


def parts_of(optimizer: MegatronOptimizer | None) -> list[Any]:
    """The optimizers that megatron chains, such as one for experts, as a list: [optimizer] if
    nothing is chained, [] for None. For chained ones it is the chain's own list: a caller that
    changes it changes the chain."""
    return [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])


def _made_here(part: MegatronOptimizer, args: TrainingArguments) -> torch.optim.Optimizer:
    """Choose the torch optimizer inside `part`, one of megatron's optimizers. If megatron lacks
    args.optim, or moments are in 16 or 8 bits, it is made from the optimizer's row in OPTIMIZERS.
    Otherwise it is the one that megatron made, with one fused kernel per update if it is torch's
    AdamW."""
    row = OPTIMIZERS[args.optim]
    inner = part.optimizer
    if row.megatron is None or {"bf16", "8bit"} & {args.exp_avg_dtype, args.exp_avg_sq_dtype}:
        return row.new(_groups_without_defaults(inner), args)
    for group in inner.param_groups if isinstance(inner, torch.optim.AdamW) else ():
        group["foreach"] = False
        group["fused"] = True  # one kernel for the whole update
    return inner


def _groups_without_defaults(optimizer: torch.optim.Optimizer) -> ParamGroups:
    """Copies of an optimizer's parameter groups, to build another optimizer from: lr and
    weight_decay are kept, other settings with a default, such as betas, are left out."""
    kept = ("lr", "weight_decay")
    return [
        {key: value for key, value in group.items() if key in kept or key not in optimizer.defaults}
        for group in optimizer.param_groups
    ]


def create_torch_optimizer(
    args: TrainingArguments, model: torch.nn.Module
) -> torch.optim.Optimizer:
    """Create the optimizer for a plain torch model, over its trained parameters. Its parameter
    groups have megatron's key wd_mult: 1 for weights with weight decay, 0 for weights without."""
    groups: ParamGroups = [{"params": [], "wd_mult": 1.0}, {"params": [], "wd_mult": 0.0}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[not decays(name, parameter)]["params"].append(parameter)
    groups = [group for group in groups if group["params"]]
    return OPTIMIZERS[args.optim].new(groups, args)


class GivenScheduler:
    """Gives a user's torch scheduler the methods that the training loop and checkpoints call."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler):
        self.scheduler = scheduler
        self.num_steps = 0

    def step(self, increment: int = 1) -> None:
        """Count `increment` steps, and call scheduler.step() for each: a resumed run advances a new
        scheduler to its step."""
        for _ in range(increment):
            self.scheduler.step()
        self.num_steps += increment

    def get_last_lr(self) -> list[float]:
        return self.scheduler.get_last_lr()


def given_optimizers(
    optimizers: tuple[Any, Any], model: torch.nn.Module, is_megatron: bool
) -> tuple[Any, Any]:
    """Check the argument `optimizers` of a trainer, (torch optimizer, its scheduler or None) as in
    transformers -> (optimizer, GivenScheduler or None). (None, None) stays as it is.

    Without a scheduler, lr_scheduler_type applies: each group keeps its weight decay, and its
    learning rate is the schedule's maximum. ValueError for an optimizer that is not torch's, or
    does not update exactly the model's trained parameters; for a scheduler of another optimizer, or
    one that does not count steps (ReduceLROnPlateau); with is_megatron for any but (None, None)."""
    if optimizers == (None, None):
        return optimizers
    optimizer, scheduler = optimizers
    expect(
        not is_megatron,
        "optimizers: expected (None, None) under megatron-core, which updates float32 copies "
        "that it makes from the wrapped model, and an optimizer made before would update "
        "nothing: register_optimizer adds one for optim, and lr_scheduler_type with "
        "lr_scheduler_kwargs chooses the schedule",
    )
    expect(
        isinstance(optimizer, torch.optim.Optimizer),
        f"optimizers: expected a torch optimizer first, got {optimizer!r}",
    )
    updated = set(itertools.chain(*(group["params"] for group in optimizer.param_groups)))
    trained = {p for p in model.parameters() if p.requires_grad}
    expect(
        updated == trained,
        f"optimizers: the optimizer lacks {len(trained - updated)} of the model's "
        f"{len(trained)} trained parameters, and has {len(updated - trained)} others: make it "
        "of those of this model that require a gradient",
    )
    if scheduler is None:
        for group in optimizer.param_groups:  # MegatronLRScheduler reads them
            group.setdefault("max_lr", group["lr"])
            group["start_wd"] = group["end_wd"] = group.get("weight_decay", 0.0)
        return optimizer, None
    counts_steps = isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) and not isinstance(
        scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
    )
    expect(
        counts_steps and scheduler.optimizer is optimizer,
        f"optimizers: expected a scheduler of this optimizer that counts steps, got {scheduler!r}",
    )
    return optimizer, GivenScheduler(scheduler)


def create_grad_scaler(args: TrainingArguments) -> ConstantGradScaler | DynamicGradScaler:
    """megatron's fp16 loss scaler for the torch backend: constant if loss_scale is set, otherwise
    dynamic."""
    if args.loss_scale is not None:
        return ConstantGradScaler(args.loss_scale)
    return DynamicGradScaler(
        initial_scale=args.initial_loss_scale,
        min_scale=args.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=args.loss_scale_window,
        hysteresis=args.hysteresis,
    )


def scaler_states(scalers: list[Any]) -> list[dict[str, Any]]:
    """States of fp16 loss scalers as JSON values: the scale, and the progress to its next change.
    Constant scalers have no state and are left out."""
    states = [scaler.state_dict() for scaler in scalers]
    return [{**state, "scale": float(state["scale"])} for state in states if state]


def load_scaler_states(scalers: list[Any], states: list[dict[str, Any]]) -> None:
    """Restore fp16 loss scalers. states: from scaler_states(). Constant scalers are not changed. If
    the parallel layout changed and there are more scalers than states, the remaining scalers take
    the last state, because all scalers see the same overflows."""
    for scaler, state in zip(scalers, states + states[-1:] * len(scalers), strict=False):
        if isinstance(scaler, DynamicGradScaler):
            scale = torch.tensor([state["scale"]], dtype=torch.float32)
            scaler.load_state_dict({**state, "scale": scale})
