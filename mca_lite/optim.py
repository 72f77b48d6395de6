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

import torch
import torch.distributed as dist

from . import parallel
from .args_rules_training import SCHEDULES, plan_schedule
from .cpu import l2_norm
from .kernels import AdamW
from .mcore import (
    ConstantGradScaler,
    DynamicGradScaler,
    FP32Optimizer,
    MegatronOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    get_megatron_optimizer,
)
from .tables import OPTIMIZERS


class MegatronLRScheduler(OptimizerParamScheduler):
    """megatron's scheduler with the get_last_lr() that training loops log.

    Works on any optimizer with param_groups; sets lr, and weight_decay times the group's wd_mult.
    """

    _last_lr: list[float]  # the constructor makes step 0

    def get_lr(self, param_group: dict) -> float:
        return float(super().get_lr(param_group))

    def step(self, increment: int = 1) -> None:
        """Count `increment` finished steps and set every group's rate and decay."""
        super().step(increment)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """The rate in force, one of each group."""
        return self._last_lr


def get_megatron_lr_scheduler(args, num_training_steps: int, optimizer) -> MegatronLRScheduler:
    """The schedule that `args` (TrainingArguments) names, over num_training_steps optimizer steps.

    lr_scheduler_kwargs: min_lr or min_lr_rate (a fraction of the rate), not both; num_decay_steps,
    num_stable_steps and decay_type (cosine, as in transformers, where it is not given) for
    warmup_stable_decay; for other schedules num_decay_steps is the step at which min is reached.
    Raises ConfigError for a number of steps that does not fit.
    """
    kwargs = args.lr_scheduler_kwargs
    style = SCHEDULES[args.lr_scheduler_type]
    warmup, end, decay = plan_schedule(args, num_training_steps)
    min_lr = kwargs.get("min_lr")
    if min_lr is None:
        min_lr = kwargs.get("min_lr_rate", 0.0) * args.learning_rate
    return MegatronLRScheduler(
        optimizer,
        init_lr=0.0 if warmup else args.learning_rate,
        max_lr=args.learning_rate,
        min_lr=min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(end, warmup + 1),
        lr_decay_style=style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=max(num_training_steps, 1),
        wd_incr_style="constant",
        wsd_decay_steps=decay,
        lr_wsd_decay_style=kwargs.get("decay_type", "cosine") if style == "WSD" else None,
    )


def decays(parameter: torch.nn.Parameter) -> bool:
    """Weight decay is for matrices: norms and biases, of one dimension, have none."""
    return parameter.dim() != 1


def get_optimizer_config(args, params_dtype: torch.dtype) -> OptimizerConfig:
    """megatron's OptimizerConfig of `args` (TrainingArguments)."""
    own = dict(
        # megatron-core knows two: an SGD, which has no state yet, keeps the place of any other
        optimizer=OPTIMIZERS[args.optim].megatron or "sgd",
        min_lr=0.0,  # None would break the scheduler, which reads it from each group
        fp16=params_dtype == torch.float16,
        bf16=params_dtype == torch.bfloat16,
        params_dtype=params_dtype,
        # never clipping still measures the norm
        clip_grad=args.max_grad_norm or float("inf"),
    )
    return OptimizerConfig(**{**args.fields_of("optimizer"), **own})


def gradient_norm(optimizer: MegatronOptimizer) -> torch.Tensor:
    """The float64 norm of all gradients of megatron's optimizer, as its get_grad_norm() has it: a
    tensor, for which nothing waits yet. Collective."""
    parts = parts_of(optimizer)
    gradients = [part.get_main_grads_for_grad_norm() for part in parts]
    groups = [part.get_grad_stats_parallel_group() for part in parts]
    if len(parts) > 1 and optimizer.grads_states_parallel_group_is_shared():
        gradients = [sum(gradients, [])]
        groups = groups[:1]
    squares = []
    for of_part, group in zip(gradients, groups, strict=True):
        squares.append(l2_norm(of_part).to(parallel.device()).square())
        dist.all_reduce(squares[-1], group=group)
    return torch.stack(squares).double().sum().sqrt()


class SplitMasterOptimizer(FP32Optimizer):
    """megatron's wrapper of optim_adam.AdamW, whose bf16 parameters are half of their masters.
    Their gradients are DDP's, in place."""

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

    def multiply(self, factor, grad_norm: torch.Tensor, only_finite: bool) -> None:
        """The next update takes gradients times `factor`, with which their norm is grad_norm,
        and clips them. only_finite: it changes nothing where the norm is not finite. Nothing waits
        for these float64 tensors of one number."""
        shrink = (self.config.clip_grad / (grad_norm + 1e-6)).clamp(max=1).nan_to_num(1.0)
        if only_finite:
            shrink = shrink.where(grad_norm.isfinite(), float("nan"))
        self.optimizer.factor = factor * shrink

    def reload_model_params(self, state_dict=None) -> None:
        self.optimizer.forget_masters()


def splits_masters(args, params_dtype: torch.dtype, has_adapters: bool) -> bool:
    """Whether SplitMasterOptimizer updates a model of this dtype, the same on all ranks. Adapters
    are float32 themselves; the distributed and the offloaded optimizer have masters elsewhere.
    """
    elsewhere = args.use_distributed_optimizer or args.optimizer_cpu_offload
    is_half = params_dtype == torch.bfloat16 and not has_adapters
    return is_half and OPTIMIZERS[args.optim].halves is not None and not elsewhere


def create_megatron_optimizer(
    args, chunks: list, params_dtype: torch.dtype, has_adapters: bool = False
) -> MegatronOptimizer:
    """megatron's optimizer over DDP-wrapped chunks, plain or distributed, with float32 masters of
    16-bit weights. has_adapters: only those of LoRA, and what is saved with them, are trained.
    """
    row = OPTIMIZERS[args.optim]
    split = splits_masters(args, params_dtype, has_adapters)
    config = get_optimizer_config(args, params_dtype)
    config.bf16 = config.bf16 and not split  # megatron makes no masters then
    # float32 pieces are views of weights: with a gradient function they would keep the node that
    # DDP's hook is on, and it the model, for good
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
            fraction = args.optimizer_offload_fraction
            part.optimizer = OffloadedOptimizer(
                part.optimizer, fraction, lambda groups: row.make(groups, args)
            )
    for group in optimizer.param_groups:
        # the scheduler has limits of its own, for every group
        group.pop("min_lr", None)
        group.pop("max_lr", None)
    config.optimizer = args.optim  # checkpoints find the names of the states by it
    return optimizer


def parts_of(optimizer: MegatronOptimizer | None) -> list:
    """The optimizers that megatron has chained, or the only one; of a chain its own list."""
    return [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])


def _made_here(part: MegatronOptimizer, args) -> torch.optim.Optimizer:
    """The torch optimizer of a part of megatron's: its own, if that is what `args` ask for."""
    row = OPTIMIZERS[args.optim]
    inner = part.optimizer
    if row.megatron is None or "bf16" in (args.exp_avg_dtype, args.exp_avg_sq_dtype):
        return row.make(_groups_without_defaults(inner), args)
    for group in inner.param_groups if isinstance(inner, torch.optim.AdamW) else ():
        group["foreach"], group["fused"] = False, True  # one kernel for the whole update
    return inner


class OffloadedOptimizer:
    """An optimizer that keeps the states of a share of its parameters in host memory, and updates
    these there: the first ones that make up `fraction` of all elements.

    The weights stay on their device: an update takes them and their gradients to the host and back.
    In place of megatron's own, which crashes in bf16 without its distributed optimizer and in
    float32 with it, and whose copies of the weights no loaded checkpoint reaches.
    """

    def __init__(self, inner: torch.optim.Optimizer, fraction: float, make):
        """make(groups) -> an optimizer of the same kind as `inner`."""
        self.inner = inner
        parameters = [p for group in inner.param_groups for p in group["params"]]
        left = fraction * sum(p.numel() for p in parameters)
        # an update on the host is one of stand-ins, which are given their tensors for it alone
        self._stand_ins: dict[torch.Tensor, torch.nn.Parameter] = {}
        for parameter in parameters:
            if left > 0:
                self._stand_ins[parameter] = torch.nn.Parameter(torch.empty(0, device="cpu"))
            left -= parameter.numel()
        self._host = make([{"params": [torch.nn.Parameter(torch.empty(0, device="cpu"))]}])

    def _host_groups(self) -> list[dict]:
        groups = []
        for group in self.param_groups:
            held = [self._stand_ins[p] for p in group["params"] if p in self._stand_ins]
            groups.append({**group, "params": held})
        return groups

    @property
    def param_groups(self) -> list[dict]:
        return self.inner.param_groups

    @property
    def state(self) -> dict:
        """Of each parameter; those of parameters on the host are CPU tensors."""
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def settle(self, parameter: torch.Tensor) -> None:
        """Move a parameter's states to where it is updated: after a checkpoint put them in."""
        if parameter in self._stand_ins:
            states = self.state[parameter]
            self.state[parameter] = {name: value.cpu() for name, value in states.items()}

    @torch.no_grad()
    def step(self) -> None:
        gradients = {p: p.grad for p in self._stand_ins if p.grad is not None}
        for parameter in gradients:
            parameter.grad = None
        self.inner.step()  # of all others
        self._host.param_groups = self._host_groups()
        for parameter, gradient in gradients.items():
            stand_in = self._stand_ins[parameter]
            stand_in.data = _to_host(parameter)
            stand_in.grad = _to_host(gradient)
            self._host.state[stand_in] = self.state.get(parameter, {})
        if gradients and next(iter(gradients)).is_cuda:
            torch.cuda.synchronize()  # the copies are there
        self._host.step()
        for parameter, gradient in gradients.items():
            stand_in = self._stand_ins[parameter]
            parameter.copy_(stand_in, non_blocking=True)
            parameter.grad = gradient
            self.state[parameter] = self._host.state.pop(stand_in)
            stand_in.data = torch.empty(0, device="cpu")
            stand_in.grad = None


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, under way."""
    pinned = tensor.is_cuda
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return copy.copy_(tensor, non_blocking=True)


def _groups_without_defaults(optimizer: torch.optim.Optimizer) -> list[dict]:
    """The parameter groups of an optimizer that has not stepped, without what only its own kind
    reads.
    """
    kept = ("lr", "weight_decay")
    return [
        {key: value for key, value in group.items() if key in kept or key not in optimizer.defaults}
        for group in optimizer.param_groups
    ]


def create_torch_optimizer(args, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer for a plain torch model, with megatron's groups and their key wd_mult."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        dict(params=[p for p in parameters if decays(p)], wd_mult=1.0),
        dict(params=[p for p in parameters if not decays(p)], wd_mult=0.0),
    ]
    groups = [group for group in groups if group["params"]]
    return OPTIMIZERS[args.optim].make(groups, args)


class GivenScheduler:
    """A torch scheduler that the user made, as the loop and checkpoints call it."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler):
        self.scheduler = scheduler
        self.num_steps = 0

    def step(self, increment: int = 1) -> None:
        """Count finished steps. A resumed run counts a new scheduler to where it was."""
        for _ in range(increment):
            self.scheduler.step()
        self.num_steps += increment

    def get_last_lr(self) -> list[float]:
        return self.scheduler.get_last_lr()


def given_optimizers(optimizers: tuple, model, is_megatron: bool) -> tuple:
    """(optimizer or None, GivenScheduler or None) from the `optimizers` of transformers' Trainer.

    Without a scheduler each group keeps its weight decay, and has its own rate as the highest one
    of the schedule of lr_scheduler_type. ValueError for what would not update the model.
    """
    optimizer, scheduler = optimizers
    if optimizer is None and scheduler is None:
        return None, None
    if is_megatron:
        raise ValueError(
            "optimizers: expected (None, None) under megatron-core, which updates float32 copies "
            "that it makes from the wrapped model, and an optimizer made before would update "
            "nothing: register_optimizer adds one for optim, and lr_scheduler_type with "
            "lr_scheduler_kwargs chooses the schedule"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizers: expected a torch optimizer first, got {optimizer!r}")
    held = {p for group in optimizer.param_groups for p in group["params"]}
    trained = {p for p in model.parameters() if p.requires_grad}
    if held != trained:
        raise ValueError(
            f"optimizers: the optimizer lacks {len(trained - held)} of the model's "
            f"{len(trained)} trained parameters, and has {len(held - trained)} others: make it of "
            "those of this model that require a gradient"
        )
    if scheduler is None:
        for group in optimizer.param_groups:  # MegatronLRScheduler reads them
            group.setdefault("max_lr", group["lr"])
            group["start_wd"] = group["end_wd"] = group.get("weight_decay", 0.0)
        return optimizer, None
    kinds = torch.optim.lr_scheduler
    steps_alone = not isinstance(scheduler, kinds.ReduceLROnPlateau)
    if not (isinstance(scheduler, kinds.LRScheduler) and steps_alone):
        raise ValueError(f"optimizers: expected a scheduler that counts steps, got {scheduler!r}")
    if scheduler.optimizer is not optimizer:
        raise ValueError("optimizers: the scheduler is another optimizer's")
    return optimizer, GivenScheduler(scheduler)


def create_grad_scaler(args):
    """megatron's loss scaler of fp16 for the plain torch backend: constant with loss_scale, else it
    adapts.
    """
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
    """What loss scalers that adapt know, as JSON takes it: the scale, and how far they are on the
    way to the next one.
    """
    return [
        {k: float(v) if torch.is_tensor(v) else v for k, v in scaler.state_dict().items()}
        for scaler in scalers
    ]


def load_scaler_states(scalers: list, states: list[dict]) -> None:
    """Put scalers where scaler_states() found them. A constant one stays as it is; where a layout
    has another number of parts, all of which follow the same overflows, the last one's state stands
    for the rest."""
    for i, scaler in enumerate(scalers):
        state = states[min(i, len(states) - 1)] if states else {}
        if state and isinstance(scaler, DynamicGradScaler):
            scaler.load_state_dict(
                {**state, "scale": torch.tensor([state["scale"]], dtype=torch.float32)}
            )
