"""The rules for experts: their ranks against the world, and their numbers against the parallel degrees."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .args_values import Problem


def check_expert_world(args: Any, bad: set[str]) -> list[Problem]:
    """Experts are spread over the ranks of a pipeline stage: over all that attention uses for data, context and tensors."""
    ep, etp = (
        args.expert_model_parallel_size,
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    )
    stage = args.world_size // args.pipeline_model_parallel_size
    if (
        bad & {"expert_model_parallel_size", "expert_tensor_parallel_size"}
        or stage % (ep * etp) == 0
    ):
        return []
    key, fits = "expert_model_parallel_size", math.gcd(ep, max(1, stage // etp))
    reason = f"the experts take {ep} x {etp} ranks (expert x expert tensor parallel), and a pipeline stage has {stage}"
    lower = f"{key}: {fits}" if stage % (fits * etp) == 0 else "expert_tensor_parallel_size: 1"
    return [Problem(key, ep, reason, f"a multiple of {ep * etp} processes a stage, or {lower}")]


def check_frozen_bias(run: Any, bad: set[str]) -> list[Problem]:
    """An adapter's file has no place for a router's bias."""
    key, rate = "moe_router_bias_update_rate", run.training.moe_router_bias_update_rate
    if not rate or run.finetuning.finetuning_type == "full" or bad & {key, "finetuning_type"}:
        return []
    return [
        Problem(
            key, rate, "adapters leave the base model as it is, the routers' bias too", f"{key}: 0"
        )
    ]


def check_experts(
    experts: int | None, number: Callable[..., int | None], args: Any
) -> list[Problem]:
    ep, tp = args.expert_model_parallel_size, args.tensor_model_parallel_size
    key = "expert_model_parallel_size"
    if not experts:
        ours = {
            key: 1,
            "moe_aux_loss_coeff": 0.0,
            "moe_z_loss_coeff": None,
            "moe_router_bias_update_rate": 0.0,
        }
        given = {
            name: getattr(args, name)
            for name in ours
            if (getattr(args, name) or None) != (ours[name] or None)
        }
        return [
            Problem(n, value, "the model has no experts", f"{n} left out")
            for n, value in given.items()
        ]
    problems = []
    if experts % ep:
        reason = f"the model's {experts} experts cannot be shared evenly by {ep} ranks"
        problems.append(Problem(key, ep, reason, f"{key}: {math.gcd(experts, ep)}"))
    if tp > 1 and not args.sequence_parallel:
        reason = "experts and tensor parallelism need sequence parallelism"
        problems.append(Problem("sequence_parallel", False, reason, "sequence_parallel: true"))
    columns = number("moe_ffn_hidden_size", "moe_intermediate_size", "intermediate_size")
    if columns and columns % (args.expert_tensor_parallel_size or tp):
        key, value = "expert_tensor_parallel_size", args.expert_tensor_parallel_size or tp
        problems.append(
            Problem(
                key, value, f"an expert has {columns} columns: no multiple of {value}", f"{key}: 1"
            )
        )
    return problems
