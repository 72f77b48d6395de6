"""The optimizers: one table, OPTIMIZERS, by the names that the key `optim` takes.

The rules of configuration keys read the table too, so torch is imported in the functions: a typing
error must not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Optimizer(NamedTuple):
    """One row of OPTIMIZERS.

    make(groups, args) -> the torch optimizer of parameter groups (dicts with "params"); args:
    TrainingArguments. Both backends set each group's lr and weight_decay before every step, so that
    decay should be decoupled. states: the names of its tensors that have a parameter's shape, which
    checkpoints keep. counts_steps: whether it keeps the number of updates as a tensor "step" beside
    them. megatron: its name in megatron-core, which then makes it on that backend; None: make()
    does there too. distributed: whether megatron-core's distributed optimizer can cut its states.
    halves: makes the one for bf16 weights that are half of their masters, where there is one.
    """

    make: Callable[[list[dict], Any], Any]
    states: tuple[str, ...]
    counts_steps: bool = False
    megatron: str | None = None
    distributed: bool = False
    halves: Callable[[list[dict], Any], Any] | None = None


OPTIMIZERS: dict[str, Optimizer] = {}
OPTIMIZER_ALIASES: dict[str, str] = {}  # other people's names


def register_optimizer(
    name: str,
    make: Callable[[list[dict], Any], Any],
    *,
    states: tuple[str, ...],
    counts_steps: bool = False,
    aliases: tuple[str, ...] = (),
) -> None:
    """Let `optim: <name>` train with what `make` returns (see Optimizer), on both backends, with
    float32 master weights under megatron-core. ValueError for a name that is taken. Call it before
    the configuration is parsed, on every rank. TypeError for a `make` that is no function.
    """
    if not callable(make):
        raise TypeError(f"optim {name}: expected a function of (groups, args), got {make!r}")
    for taken in {name, *aliases} & {*OPTIMIZERS, *OPTIMIZER_ALIASES}:
        raise ValueError(f"optim {taken} is registered already: choose another name")
    OPTIMIZERS[name] = Optimizer(make, tuple(states), counts_steps)
    OPTIMIZER_ALIASES.update(dict.fromkeys(aliases, name))


def _adam(groups: list[dict], args):
    import torch

    if "bf16" in (args.exp_avg_dtype, args.exp_avg_sq_dtype):
        return _adam_of_halves(groups, args)
    # fused: one kernel for the whole update
    return torch.optim.AdamW(groups, **_numbers_of_adam(args), fused=True)


def _adam_of_halves(groups: list[dict], args):
    from .optim_adam import AdamW

    moments = ("exp_avg", "exp_avg_sq")
    halves = {name for name in moments if getattr(args, f"{name}_dtype") == "bf16"}
    return AdamW(groups, **_numbers_of_adam(args), halves=halves)


def _numbers_of_adam(args) -> dict:
    betas = args.adam_beta1, args.adam_beta2
    return dict(lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)


def _sgd(groups: list[dict], args):
    import torch

    return torch.optim.SGD(groups, lr=args.learning_rate, momentum=args.sgd_momentum)


OPTIMIZERS["adam"] = Optimizer(
    _adam,
    states=("exp_avg", "exp_avg_sq"),
    counts_steps=True,
    megatron="adam",
    distributed=True,
    halves=_adam_of_halves,
)
OPTIMIZERS["sgd"] = Optimizer(_sgd, states=("momentum_buffer",), megatron="sgd")
OPTIMIZER_ALIASES |= dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adam")
