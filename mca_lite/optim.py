"""Optimizers and the learning-rate schedule, the same for both backends.

With n finished steps, w warm-up steps, D = lr_decay_steps and rho = (n - w) / (D - w), the rate is
max * n / w in the warm-up, then by style:

    constant             max
    linear               min + (max - min) (1 - rho)
    cosine               min + (max - min) (1 + cos(pi rho)) / 2
    inverse-square-root  max(min, max sqrt(max(w, 1)) / sqrt(n))
    WSD                  max until D - wsd_decay_steps, then linear, cosine, exponential or
                         minus_sqrt down to min

and min after D. The first update uses the rate of n = 0.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from . import parallel
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
from .tables import OPTIMIZERS, function_of


class MegatronLRScheduler(OptimizerParamScheduler):
    """megatron's scheduler with get_last_lr(), for the log.

    Works on any optimizer with param_groups; sets lr, and weight_decay times the group's wd_mult.
    """

    def step(self, increment: int = 1) -> None:
        """Count `increment` finished steps and set every group's rate and decay."""
        super().step(increment)

    def get_last_lr(self) -> list[float]:
        """The rate in force, one of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]


def get_megatron_lr_scheduler(args, num_training_steps: int, optimizer) -> MegatronLRScheduler:
    """The schedule of `args` (TrainingArguments) over num_training_steps optimizer steps.

    lr_scheduler_kwargs: min_lr or min_lr_rate (a fraction of the rate), not both; num_decay_steps,
    num_stable_steps and decay_type (default: cosine, as in transformers) for warmup_stable_decay;
    for other schedules num_decay_steps is the step of min.
    Raises: ConfigError for numbers of steps that do not fit.
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
    """Weight decay is for matrices: norms and biases have none, nor the biases of several experts
    in one tensor."""
    return parameter.dim() != 1 and not name.endswith("bias")


@dataclass
class NamedOptimizerConfig(OptimizerConfig):
    """megatron's, and the row of OPTIMIZERS: checkpoints read the names of its states."""

    optim: str = "adam"


def get_optimizer_config(
    args, params_dtype: torch.dtype, splits: bool = False
) -> NamedOptimizerConfig:
    """megatron's OptimizerConfig of `args` (TrainingArguments). splits: see splits_masters."""
    own = dict(
        optim=args.optim,
        # megatron-core knows two: an SGD, without a state yet, stands in for any other
        optimizer=OPTIMIZERS[args.optim].megatron or "sgd",
        min_lr=0.0,  # None would break the scheduler, which reads it from each group
        fp16=params_dtype == torch.float16,
        bf16=params_dtype == torch.bfloat16 and not splits,  # true: megatron makes masters
        params_dtype=params_dtype,
        # never clipping still measures the norm
        clip_grad=args.max_grad_norm or float("inf"),
    )
    return NamedOptimizerConfig(**{**args.fields_of("optimizer"), **own})


def gradient_norm(optimizer: MegatronOptimizer) -> torch.Tensor:
    """The float64 norm of all gradients of megatron's optimizer, as by its get_grad_norm(): a
    tensor, without a synchronisation. Collective."""
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
    """The Hugging Face matrices in a parameter [rows, columns], or of experts [n, ..., columns].

    sizes: rows of each matrix in a group of rows. groups: groups in the whole parameter, with a
    share of every matrix each. group: the ranks with its parts, cut along an axis of [n, rows,
    columns]; None: it is whole.
    """

    sizes: Sequence[int]
    groups: int = 1
    group: dist.ProcessGroup | None = None
    axis: int = 1

    def apply(self, change: Callable, part: torch.Tensor) -> torch.Tensor:
        """change([n, rows, columns] of each whole matrix), cut and joined like this rank's part.
        Collective over the ranks with the other parts."""
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
    """megatron's wrapper of kernels.AdamW, whose bf16 parameters hold the upper 16 bits of the
    float32 masters. Gradients are DDP's, in place."""

    def __init__(self, part: FP32Optimizer, inner: AdamW):
        super().__init__(inner, part.config, part.init_state_fn)
        self.grad_stats_parallel_group = part.grad_stats_parallel_group
        self.tp_group = part.tp_group
        # norm and zeros of decoupled_grad, as of Transformer Engine's Adam
        part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True

    def prepare_grads(self) -> bool:
        for parameter in self.get_parameters():
            parameter.decoupled_grad = parameter.main_grad.float()  # the same tensor, mostly
        return False

    def multiply(self, factor, grad_norm: torch.Tensor, largest: float | None) -> None:
        """Multiply gradients by `factor` in the next update, which clips by their norm then,
        grad_norm. largest: the update changes nothing if the norm is above it or NaN. Both are
        float64 tensors of one number; no synchronisation."""
        shrink = (self.config.clip_grad / (grad_norm + 1e-6)).clamp(max=1).nan_to_num(1.0)
        if largest is not None:
            shrink = shrink.where(grad_norm.le(largest), float("nan"))
        self.optimizer.factor = factor * shrink

    def reload_model_params(self, state_dict=None) -> None:
        self.optimizer.forget_masters()


def splits_masters(args, params_dtype: torch.dtype, is_whole: bool) -> bool:
    """True if SplitMasterOptimizer updates a model of this dtype, on all ranks alike. Tensors
    beside frozen weights (is_whole False) are float32; the distributed and the offloaded optimizer
    keep masters elsewhere."""
    elsewhere = args.use_distributed_optimizer or args.optimizer_cpu_offload
    is_half = params_dtype == torch.bfloat16 and is_whole
    return is_half and OPTIMIZERS[args.optim].halves is not None and not elsewhere


def create_megatron_optimizer(
    args, chunks: list, params_dtype: torch.dtype, is_whole: bool = True
) -> MegatronOptimizer:
    """megatron's optimizer over DDP-wrapped chunks, plain or distributed, with float32 masters of
    16-bit weights. is_whole: Finetuning.is_whole."""
    row = OPTIMIZERS[args.optim]
    split = splits_masters(args, params_dtype, is_whole)
    config = get_optimizer_config(args, params_dtype, split)
    # float32 pieces are views of weights: with a gradient function they would keep the node of
    # DDP's hook, and with it the model
    with torch.no_grad():
        optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    parts = parts_of(optimizer)
    for i, part in enumerate(parts):
        if getattr(part, "optimizer", None) is None:
            continue  # nothing to train on this rank
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
        # they would override the scheduler's limits
        group.pop("min_lr", None)
        group.pop("max_lr", None)
    return optimizer


def parts_of(optimizer: MegatronOptimizer | None) -> list:
    """The optimizers in megatron's chain (its list itself), or the only one."""
    return [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])


def _made_here(part: MegatronOptimizer, args) -> torch.optim.Optimizer:
    """The torch optimizer of a part of megatron's: megatron's Adam, or another row's."""
    row = OPTIMIZERS[args.optim]
    inner = part.optimizer
    if row.megatron is None or "bf16" in (args.exp_avg_dtype, args.exp_avg_sq_dtype):
        return row.new(_groups_without_defaults(inner), args)
    for group in inner.param_groups if isinstance(inner, torch.optim.AdamW) else ():
        group["foreach"], group["fused"] = False, True  # one kernel for the whole update
    return inner


def _groups_without_defaults(optimizer: torch.optim.Optimizer) -> list[dict]:
    """The parameter groups of an optimizer before its first step, without keys of its kind."""
    kept = ("lr", "weight_decay")
    return [
        {key: value for key, value in group.items() if key in kept or key not in optimizer.defaults}
        for group in optimizer.param_groups
    ]


def create_torch_optimizer(args, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer for a plain torch model, with megatron's groups and their key wd_mult."""
    groups: list[dict] = [{"params": [], "wd_mult": 1.0}, {"params": [], "wd_mult": 0.0}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[not decays(name, parameter)]["params"].append(parameter)
    groups = [group for group in groups if group["params"]]
    return OPTIMIZERS[args.optim].new(groups, args)


class GivenScheduler:
    """Adapter of a user's torch scheduler to the interface of loop and checkpoints."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler):
        self.scheduler = scheduler
        self.num_steps = 0

    def step(self, increment: int = 1) -> None:
        """Count finished steps. A resumed run steps a new scheduler as often as before."""
        for _ in range(increment):
            self.scheduler.step()
        self.num_steps += increment

    def get_last_lr(self) -> list[float]:
        return self.scheduler.get_last_lr()


def given_optimizers(optimizers: tuple, model, is_megatron: bool) -> tuple:
    """(optimizer or None, GivenScheduler or None) from the `optimizers` of transformers' Trainer.

    Without a scheduler each group keeps its weight decay, and its rate is the highest of the
    schedule of lr_scheduler_type. ValueError for optimizers that would not update the model.
    """
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


def create_grad_scaler(args):
    """megatron's loss scaler of fp16 for the torch backend: constant with loss_scale, else
    adaptive."""
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


def scaler_states(scalers: list) -> list[dict]:
    """The states of loss scalers for JSON: the scale, and the progress to the next one."""
    states = [scaler.state_dict() for scaler in scalers]
    return [{**state, "scale": float(state["scale"])} for state in states if state]


def load_scaler_states(scalers: list, states: list[dict]) -> None:
    """Restore scalers from scaler_states(); a constant one is not changed. With another number of
    parts in this layout the last state is that of the rest: all follow the same overflows."""
    for scaler, state in zip(scalers, states + states[-1:] * len(scalers), strict=False):
        if isinstance(scaler, DynamicGradScaler):
            scale = torch.tensor([state["scale"]], dtype=torch.float32)
            scaler.load_state_dict({**state, "scale": scale})
