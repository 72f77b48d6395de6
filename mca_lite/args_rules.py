"""The rules of what must agree with what, within a group of arguments, and with the world, the model and the data.

Every check returns Problems instead of raising. It is given `bad`, the keys that have a problem already: their values
were put back to the default, and a rule that involves one of them says nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from .args_keys import unsupported_problem
from .args_pipeline import balanced_layout, layout_defect, layout_stages
from .args_rules_experts import check_expert_world, check_experts
from .args_values import Problem, cast, default_of
from .objectives import OBJECTIVES, all_metrics
from .optimizers import OPTIMIZER_ALIASES, OPTIMIZERS

REPORTERS = ("tensorboard", "wandb")
SCHEDULERS = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "inverse_sqrt",
    "warmup_stable_decay",
)
DECAY_TYPES = ("linear", "cosine", "exponential", "minus_sqrt")
SCHEDULER_KWARGS: dict[str, Any] = {
    "min_lr": float,
    "min_lr_rate": float,
    "num_decay_steps": int,
    "num_stable_steps": int,
    "decay_type": Literal[DECAY_TYPES],
}
SCHEDULER_KWARG_ALIASES = {"min_lr_ratio": "min_lr_rate"}
RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe", "shared_experts")


# ---- TrainingArguments: normalise, then consistency


class Rule(NamedTuple):
    """A combination that does not work: the keys it involves (the first bears the problem), the test, what is wrong and
    what would work. `a` stands for the arguments in the texts too."""

    keys: str
    broken: Callable[[Any], bool]
    reason: str
    suggestion: str


_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_NOT_FULL = (
    "it belongs to full recomputation, and recompute_granularity is {a.recompute_granularity}"
)
TRAINING_RULES = (
    Rule("bf16 fp16", lambda a: a.bf16 and a.fp16, "fp16 is on too", "bf16: true and fp16: false"),
    Rule("max_steps", lambda a: a.max_steps == 0, "no step would be taken", "max_steps: -1"),
    Rule(
        f"{_VPP} {_PP} pipeline_model_parallel_layout",
        lambda a: (
            a.virtual_pipeline_model_parallel_size is not None
            and a.pipeline_model_parallel_size == 1
        ),
        f"virtual stages need a pipeline, and {_PP} is 1",
        f"{_PP}: 2, or {_VPP} left out",
    ),
    Rule(
        f"gradient_accumulation_steps global_batch_size {_VPP} {_PP}",
        lambda a: (
            a.virtual_pipeline_model_parallel_size
            and a.gradient_accumulation_steps % a.pipeline_model_parallel_size
        ),
        "with virtual stages micro-batches run in groups of {a.pipeline_model_parallel_size}, the pipeline's size",
        "a multiple of {a.pipeline_model_parallel_size} micro-batches a step",
    ),
    Rule(
        "overlap_param_gather use_distributed_optimizer overlap_grad_reduce",
        lambda a: (
            a.overlap_param_gather and not (a.use_distributed_optimizer and a.overlap_grad_reduce)
        ),
        "it needs the distributed optimizer and overlap_grad_reduce",
        "use_distributed_optimizer: true and overlap_grad_reduce: true",
    ),
    Rule(
        "optim use_distributed_optimizer",
        lambda a: a.use_distributed_optimizer and not OPTIMIZERS[a.optim].distributed,
        "megatron's distributed optimizer knows Adam only",
        "use_distributed_optimizer: false, or optim: adam",
    ),
    Rule(
        "optimizer_cpu_offload optim",
        lambda a: a.optimizer_cpu_offload and not OPTIMIZERS[a.optim].offloads,
        "megatron keeps no state of optim {a.optim} on the CPU",
        "optimizer_cpu_offload: false, or optim: adam",
    ),
    Rule(
        "expert_model_parallel_size tensor_model_parallel_size sequence_parallel",
        lambda a: (
            min(a.expert_model_parallel_size, a.tensor_model_parallel_size) > 1
            and not a.sequence_parallel
        ),
        "experts on several ranks together with tensor parallelism need sequence parallelism",
        "sequence_parallel: true",
    ),
    Rule(
        "moe_token_dispatcher_type variable_seq_lengths",
        lambda a: a.moe_token_dispatcher_type == "allgather" and a.variable_seq_lengths,
        "it gathers rows of one length, and variable_seq_lengths lets them differ",
        "moe_token_dispatcher_type: alltoall",
    ),
    Rule(
        "moe_shared_expert_overlap moe_token_dispatcher_type",
        lambda a: a.moe_shared_expert_overlap and a.moe_token_dispatcher_type != "alltoall",
        "shared experts run beside an all-to-all alone",
        "moe_token_dispatcher_type: alltoall",
    ),
    Rule(
        "moe_aux_loss_coeff moe_router_load_balancing_type",
        lambda a: a.moe_aux_loss_coeff > 0 and a.moe_router_load_balancing_type == "none",
        "moe_router_load_balancing_type is none, and it would weigh nothing",
        "moe_router_load_balancing_type: aux_loss",
    ),
    Rule(
        "warmup_steps max_steps lr_scheduler_type",
        lambda a: (
            0 < a.max_steps <= a.warmup_steps and not a.lr_scheduler_type.startswith("constant")
        ),
        "the rate would still grow when the run of max_steps {a.max_steps} ends",
        "warmup_ratio: 0.1 in place of warmup_steps",
    ),
    Rule(
        "metric_for_best_model eval_strategy",
        lambda a: (
            a.eval_strategy != "no"
            and a.metric_for_best_model.removeprefix("eval_") not in all_metrics()
        ),
        "an evaluation gives eval_loss, and with stage dpo its metrics",
        "metric_for_best_model: loss",
    ),
    Rule(
        "load_best_model_at_end eval_strategy",
        lambda a: a.load_best_model_at_end and a.eval_strategy == "no",
        "without evaluation no checkpoint is the best one",
        "eval_strategy: steps and save_strategy: steps",
    ),
    Rule(
        "load_best_model_at_end eval_strategy save_strategy",
        lambda a: a.load_best_model_at_end and a.eval_strategy != a.save_strategy,
        "each checkpoint must be evaluated, but eval_strategy is {a.eval_strategy} and save_strategy {a.save_strategy}",
        "save_strategy: {a.eval_strategy}",
    ),
    Rule(
        "load_best_model_at_end eval_strategy eval_steps save_steps logging_steps",
        lambda a: (
            a.load_best_model_at_end and a.eval_strategy == "steps" and a.save_steps % a.eval_steps
        ),
        "each checkpoint must be evaluated, but save_steps {a.save_steps} is no multiple of eval_steps {a.eval_steps}",
        "eval_steps: {a.save_steps}, or save_steps: {a.eval_steps}",
    ),
    Rule(
        "early_stopping_patience eval_strategy",
        lambda a: a.early_stopping_patience is not None and a.eval_strategy == "no",
        "it counts evaluations, and eval_strategy is no",
        "eval_strategy: steps, or early_stopping_patience left out",
    ),
    Rule(
        "recompute_method recompute_granularity",
        lambda a: a.recompute_method is not None and a.recompute_granularity != "full",
        _NOT_FULL,
        "recompute_granularity: full, or recompute_method left out",
    ),
    Rule(
        "recompute_num_layers recompute_granularity",
        lambda a: a.recompute_num_layers is not None and a.recompute_granularity != "full",
        _NOT_FULL,
        "recompute_granularity: full, or recompute_num_layers left out",
    ),
    Rule(
        "recompute_modules recompute_granularity",
        lambda a: a.recompute_modules is not None and a.recompute_granularity != "selective",
        "it belongs to selective recomputation, and recompute_granularity is {a.recompute_granularity}",
        "recompute_granularity: selective, or recompute_modules left out",
    ),
    Rule(
        "recompute_modules",
        lambda a: not set(a.recompute_modules or ()) <= set(RECOMPUTE_MODULES),
        "expected parts of a layer",
        f"recompute_modules: any of {', '.join(RECOMPUTE_MODULES)}",
    ),
    Rule(
        "distribute_saved_activations recompute_granularity",
        lambda a: a.distribute_saved_activations and a.recompute_granularity != "full",
        "it shares what full recomputation saves, and recompute_granularity is {a.recompute_granularity}",
        "recompute_granularity: full, or distribute_saved_activations: false",
    ),
    Rule(
        "distribute_saved_activations sequence_parallel",
        lambda a: a.distribute_saved_activations and a.sequence_parallel,
        "with sequence_parallel the activations are shared already",
        "distribute_saved_activations: false",
    ),
    Rule(
        "min_loss_scale initial_loss_scale",
        lambda a: a.min_loss_scale > a.initial_loss_scale,
        "it is above initial_loss_scale, {a.initial_loss_scale}",
        "min_loss_scale: 1.0",
    ),
    Rule(
        "max_shard_size",
        lambda a: not re.fullmatch(r"\d+(\.\d+)?\s*([KMGT]I?)?B?", a.max_shard_size, re.IGNORECASE),
        "expected a number of bytes with an optional unit",
        "max_shard_size: 5GB",
    ),
)


def normalise_training(args: Any, bad: set[str]) -> list[Problem]:
    """Fills what follows from other fields and replaces aliases, in place; `args.notes` says what was switched off."""
    problems = []
    for name in args.report_to:
        if name not in (*REPORTERS, "none", "all"):
            suggestion = f"report_to: none, {', '.join(REPORTERS)}"
            problems.append(Problem("report_to", name, "no such place to report to", suggestion))
    args.report_to = [
        name for name in REPORTERS if name in args.report_to or "all" in args.report_to
    ]
    args.optim = OPTIMIZER_ALIASES.get(args.optim, args.optim)
    if args.optim not in OPTIMIZERS:
        names = ", ".join([*OPTIMIZERS, *OPTIMIZER_ALIASES])
        problems.append(Problem("optim", args.optim, "no such optimizer", f"optim: {names}"))
        args.optim = "adam"
    if 0 < args.warmup_steps < 1 and args.warmup_ratio == 0:
        args.warmup_steps, args.warmup_ratio = 0, args.warmup_steps
    if not float(args.warmup_steps).is_integer():
        reason = "expected whole steps, or a fraction of all steps without warmup_ratio"
        problems.append(Problem("warmup_steps", args.warmup_steps, reason, "warmup_ratio: 0.1"))
    args.warmup_steps = int(args.warmup_steps)
    if args.warmup_steps > 0 and args.warmup_ratio > 0:
        args.notes.append(
            f"warmup_ratio {args.warmup_ratio} is not used: warmup_steps is {args.warmup_steps}"
        )
        args.warmup_ratio = 0.0
    args.per_device_eval_batch_size = (
        args.per_device_eval_batch_size or args.per_device_train_batch_size
    )
    if args.eval_strategy == "steps":
        args.eval_steps = args.eval_steps or args.logging_steps
    if args.recompute_granularity == "full":
        args.recompute_method = args.recompute_method or "uniform"
        args.recompute_num_layers = args.recompute_num_layers or 1
    if (
        args.sequence_parallel
        and args.tensor_model_parallel_size == 1
        and "tensor_model_parallel_size" not in bad
    ):
        args.sequence_parallel = False
        args.notes.append("sequence_parallel is switched off: tensor_model_parallel_size is 1")
    return problems + _normalise_layout(args, bad) + _check_additional_configs(args, bad)


def _normalise_layout(args: Any, bad: set[str]) -> list[Problem]:
    key, vpp_key = "pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size"
    problems = []
    if args.pipeline_model_parallel_layout is not None and not bad & {
        key,
        vpp_key,
        "pipeline_model_parallel_size",
    }:
        layout, pp = (
            args.pipeline_model_parallel_layout.replace(" ", ""),
            args.pipeline_model_parallel_size,
        )
        reason = layout_defect(layout, pp)
        if reason:
            suggestion = f"{key}: Et*3|t*4|t*4|t*3L (14 layers on 4 pipeline ranks)"
            problems.append(Problem(key, layout, reason, suggestion))
            layout = None
        else:
            stages, given = len(layout_stages(layout)), args.virtual_pipeline_model_parallel_size
            if given not in (None, stages // pp):
                reason = f"the layout has {stages} stages for {pp} pipeline ranks"
                problems.append(Problem(vpp_key, given, reason, f"{vpp_key}: {stages // pp}"))
            args.virtual_pipeline_model_parallel_size = stages // pp
        args.pipeline_model_parallel_layout = layout
    if args.virtual_pipeline_model_parallel_size == 1:  # megatron's word for it is None
        args.virtual_pipeline_model_parallel_size = None
    return problems


def _check_additional_configs(args: Any, bad: set[str]) -> list[Problem]:
    own = {item.name for item in dataclasses.fields(args)}
    problems = []
    for name, value in args.additional_configs.items():
        problem = unsupported_problem(name, value)
        if name in own:
            problems.append(
                Problem(
                    f"additional_configs.{name}",
                    value,
                    "it has a key of its own",
                    f"{name}: {value}",
                )
            )
        elif problem:
            problems.append(problem._replace(key=f"additional_configs.{name}"))
    return problems


def check_world(args: Any, bad: set[str]) -> list[Problem]:
    """The parallel degrees against the number of processes."""
    degrees = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    )
    world, product = args.world_size, args.model_parallel_size
    if bad & set(degrees):
        return []
    if world % product == 0:
        return check_expert_world(args, bad)
    fitting, rest = [], world
    for name in degrees:
        fitting.append(math.gcd(getattr(args, name), rest))
        rest //= fitting[-1]
    sizes = " x ".join(f"{name.split('_')[0]} {getattr(args, name)}" for name in degrees)
    changes = [
        (name, size)
        for name, size in zip(degrees, fitting, strict=True)
        if size != getattr(args, name)
    ]
    name = next(name for name in degrees if getattr(args, name) > 1)
    reason = f"a copy of the model takes {sizes} = {product} ranks, and the number of processes, {world}, is no multiple"
    lower = ", ".join(f"{name}: {size}" for name, size in changes)
    suggestion = (
        f"a multiple of {product} processes (torchrun --nproc_per_node {product}), or {lower}"
    )
    return [Problem(name, getattr(args, name), reason, suggestion)]


def resolve_batches(args: Any, bad: set[str]) -> list[Problem]:
    """Sets gradient_accumulation_steps, from global_batch_size where that is given."""
    given = args.gradient_accumulation_steps
    args.gradient_accumulation_steps = given or 1
    sizes = {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "context_parallel_size",
    }
    sizes |= {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
    if args.global_batch_size is None or bad & sizes:
        return []
    micro, dp, total = (
        args.per_device_train_batch_size,
        args.data_parallel_size,
        args.global_batch_size,
    )
    unit = micro * dp
    what = f"micro-batch {micro} (per_device_train_batch_size) x data parallel {dp}"
    if total % unit != 0:
        nearest = " or ".join(
            str(count * unit) for count in (total // unit, total // unit + 1) if count > 0
        )
        reason = f"it is no multiple of {what} = {unit}"
        return [Problem("global_batch_size", total, reason, f"global_batch_size: {nearest}")]
    args.gradient_accumulation_steps = total // unit
    if given not in (None, total // unit):
        reason = f"global_batch_size {total} = {what} x {total // unit}, not x {given}"
        suggestion = f"gradient_accumulation_steps left out or {total // unit}, or global_batch_size: {unit * given}"
        return [Problem("gradient_accumulation_steps", given, reason, suggestion)]
    return []


def check_training(args: Any, bad: set[str]) -> list[Problem]:
    """Batches, TRAINING_RULES and the schedule, in this order; sets what follows from them."""
    problems = resolve_batches(args, bad)
    bad = bad | {problem.key for problem in problems}
    for rule in TRAINING_RULES:
        keys = rule.keys.split()
        if not bad & set(keys) and rule.broken(args):
            value = getattr(args, keys[0])
            problems.append(
                Problem(keys[0], value, rule.reason.format(a=args), rule.suggestion.format(a=args))
            )
            bad = bad | {keys[0]}
    return problems + check_scheduler(args, bad)


def check_scheduler(args: Any, bad: set[str]) -> list[Problem]:
    """lr_scheduler_type and its kwargs: names, types, limits; casts the kwargs in place."""
    kind = args.lr_scheduler_type
    if kind not in SCHEDULERS and "lr_scheduler_type" not in bad:
        return [
            Problem(
                "lr_scheduler_type",
                kind,
                "no such schedule",
                f"lr_scheduler_type: {', '.join(SCHEDULERS)}",
            )
        ]
    problems, values, wsd = [], {}, kind == "warmup_stable_decay"

    def refuse(name: str, reason: str, suggestion: str) -> None:
        problems.append(
            Problem(
                f"lr_scheduler_kwargs.{name}",
                args.lr_scheduler_kwargs.get(name),
                reason,
                suggestion,
            )
        )

    for name, value in args.lr_scheduler_kwargs.items():
        key = SCHEDULER_KWARG_ALIASES.get(name, name)
        if key not in SCHEDULER_KWARGS:
            refuse(name, "no schedule takes it", f"any of {', '.join(SCHEDULER_KWARGS)}")
        elif kind.startswith("constant") or (key in ("decay_type", "num_stable_steps") and not wsd):
            refuse(name, f"it has no effect on lr_scheduler_type {kind}", "the key left out")
        elif value is not None:
            try:
                values[key] = cast(
                    "minus_sqrt" if value == "1-sqrt" else value, SCHEDULER_KWARGS[key]
                )
            except ValueError as error:
                refuse(name, str(error), "0" if key != "decay_type" else ", ".join(DECAY_TYPES))
    limits = {"min_lr": args.learning_rate, "min_lr_rate": 1.0}
    for key, value in values.items():
        if key != "decay_type" and not 0 <= value <= limits.get(key, value):
            refuse(
                key,
                f"it must be at least 0{f' and at most {limits[key]}' if key in limits else ''}",
                f"{key}: 0",
            )
    if {"min_lr", "min_lr_rate"} <= set(values):
        refuse("min_lr_rate", "min_lr is given too", "one of the two")
    if wsd and not {"num_decay_steps", "num_stable_steps"} & set(values):
        refuse(
            "num_decay_steps",
            "the schedule must know when decay begins",
            'lr_scheduler_kwargs: {"num_decay_steps": 100}',
        )
    args.lr_scheduler_kwargs = values
    return problems


# ---- the model and the run as a whole


def check_model(numbers: dict[str, Any], args: Any) -> list[Problem]:
    """A config.json's numbers (or those of an mca_config.json) against the parallel degrees of TrainingArguments."""

    def number(*names: str) -> int | None:
        return next((numbers[name] for name in names if isinstance(numbers.get(name), int)), None)

    heads = number("num_attention_heads")
    shared = {
        "attention heads": heads,
        "query groups": number("num_key_value_heads", "num_query_groups") or heads,
        "MLP columns": number("intermediate_size", "ffn_hidden_size"),
    }
    shared = {what: count for what, count in shared.items() if count}
    tp = args.tensor_model_parallel_size
    problems = []
    uneven = [f"{count} {what}" for what, count in shared.items() if count % tp != 0]
    if uneven:
        best = max(
            size
            for size in range(1, min(tp, *shared.values()) + 1)
            if tp % size == 0 and all(n % size == 0 for n in shared.values())
        )
        key = "tensor_model_parallel_size"
        problems.append(
            Problem(
                key,
                tp,
                f"the model has {' and '.join(uneven)}: no multiple of {tp}",
                f"{key}: {best}",
            )
        )
    problems += check_experts(
        number("num_moe_experts", "num_local_experts", "num_experts", "n_routed_experts"),
        number,
        args,
    )
    layers = number("num_hidden_layers", "num_layers")
    return problems + (_check_layers(layers, args) if layers else [])


def _check_layers(layers: int, args: Any) -> list[Problem]:
    pp, vpp = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    layout, layout_key = args.pipeline_model_parallel_layout, "pipeline_model_parallel_layout"
    stages = pp * (vpp or 1)
    proposal = f"{layout_key}: {balanced_layout(layers, pp, vpp)}" if layers >= stages else ""
    if layout is not None:
        held = "".join(layout_stages(layout)).count("t")
        if held == layers:
            return []
        reason = f"it holds {held} layers, and the model has {layers}"
        return [
            Problem(
                layout_key,
                layout,
                reason,
                proposal or f"{layout_key}: <a layout of {layers} layers>",
            )
        ]
    if pp == 1 or (layers >= stages and layers % stages == 0):
        return []
    if layers >= stages:
        key = (
            "virtual_pipeline_model_parallel_size"
            if vpp and layers % pp == 0
            else "pipeline_model_parallel_size"
        )
        reason = f"the model's {layers} layers cannot be shared evenly by {pp} x {vpp or 1} = {stages} stages"
        return [Problem(key, getattr(args, key), reason, proposal)]
    if vpp and layers >= pp:
        key = "virtual_pipeline_model_parallel_size"
        reason = f"it counts chunks on each rank, not layers in a chunk: {pp} x {vpp} stages are more than {layers} layers"
        fits = [chunks for chunks in range(1, min(vpp, layers + 1)) if layers % (chunks * pp) == 0]
        suggestion = (
            f"{key}: {fits[-1]}"
            if fits
            else f"{layout_key}: {balanced_layout(layers, pp)} instead of {key}"
        )
        return [Problem(key, vpp, reason, suggestion)]
    key = "pipeline_model_parallel_size"
    return [
        Problem(
            key, pp, f"there are more stages than the model's {layers} layers", f"{key}: {layers}"
        )
    ]


def check_data(args: Any, bad: set[str]) -> list[Problem]:
    """DataArguments: what its fields must agree on; a val_size that counts samples becomes an int."""
    weights, problems = args.mix_weights, []
    if not args.dataset and "dataset" not in bad:
        problems.append(
            Problem("dataset", args.dataset, "it names no data", "dataset: <files or names>")
        )
    if args.eval_dataset and args.val_size > 0:
        reason = "eval_dataset is given too, and one of them would not be used"
        problems.append(
            Problem("val_size", args.val_size, reason, "val_size: 0, or eval_dataset left out")
        )
    elif args.val_size > 1 and not args.val_size.is_integer():
        reason = "expected a fraction below 1 or a whole number of samples"
        problems.append(Problem("val_size", args.val_size, reason, "val_size: 0.05"))
    elif args.val_size >= 1:
        args.val_size = int(args.val_size)
    if args.train_on_prompt and args.mask_history:
        problems.append(
            Problem("mask_history", True, "train_on_prompt is on too", "one of the two")
        )
    if weights is None or {"mix_weights", "dataset"} & bad:
        return problems
    if min(weights, default=0) <= 0:
        reason = "each rate must be above 0: leave out a dataset that is not wanted"
        problems.append(
            Problem("mix_weights", weights, reason, f"mix_weights: {[1.0] * len(args.dataset)}")
        )
    elif len(weights) != len(args.dataset):
        reason = f"{len(weights)} rates for {len(args.dataset)} datasets"
        problems.append(
            Problem("mix_weights", weights, reason, f"mix_weights: {[1.0] * len(args.dataset)}")
        )
    return problems


def check_finetuning(args: Any, bad: set[str]) -> list[Problem]:
    """FinetuningArguments: keys of adapters have no effect on a full fine-tuning, and an adapter brings its own sizes."""
    of_objectives = {key for objective in OBJECTIVES.values() for key in objective.keys}
    own = [
        f
        for f in dataclasses.fields(args)
        if f.name not in {"stage", "finetuning_type", *of_objectives}
    ]
    given = [f.name for f in own if getattr(args, f.name) != default_of(f)]
    problems = []
    if args.finetuning_type == "full":
        if args.adapter_name_or_path and not bad & {"finetuning_type", "adapter_name_or_path"}:
            reason = "finetuning_type is full, and the adapter would not be used"
            problems.append(
                Problem(
                    "adapter_name_or_path",
                    args.adapter_name_or_path,
                    reason,
                    "finetuning_type: lora",
                )
            )
        elif given:
            args.notes.append(f"{', '.join(given)}: no effect, since finetuning_type is full")
    elif not args.lora_target and "lora_target" not in bad:
        problems.append(
            Problem("lora_target", args.lora_target, "it names no layer", "lora_target: all")
        )
    elif args.adapter_name_or_path:
        shaped = {"lora_rank", "lora_alpha", "lora_target", "use_rslora", "modules_to_save"} & set(
            given
        )
        for key in sorted(shaped):
            args.notes.append(
                f"{key} is not used: the adapter in {args.adapter_name_or_path} decides it"
            )
    return problems


def check_run(run: Any, bad: set[str]) -> list[Problem]:
    """What the groups must agree on: stage, data and evaluation."""
    data, strategy, problems = run.data, run.training.eval_strategy, []
    has_data = data.eval_dataset or data.val_size > 0
    if (
        strategy != "no"
        and not has_data
        and not bad & {"eval_strategy", "eval_dataset", "val_size"}
    ):
        suggestion = "val_size: 0.05, or eval_dataset: <files>, or eval_strategy: no"
        problems.append(
            Problem("eval_strategy", strategy, "there is nothing to evaluate on", suggestion)
        )
    if not bad & {"output_dir", "model_name_or_path"} and os.path.isdir(
        run.model.model_name_or_path or ""
    ):
        if os.path.realpath(run.model.model_name_or_path) == os.path.realpath(
            run.training.output_dir
        ):
            reason = "the trained model would overwrite the one that it starts from"
            problems.append(
                Problem(
                    "output_dir",
                    run.training.output_dir,
                    reason,
                    f"output_dir: {run.training.output_dir}-sft",
                )
            )
    for used, reason in (
        (not run.backend.use_mca, "plain torch has no layers for multi-token prediction"),
        (
            run.finetuning.finetuning_type == "lora",
            "adapters beside layers for multi-token prediction are not built",
        ),
    ):
        if used and run.training.mtp_num_layers and "mtp_num_layers" not in bad:
            problems.append(
                Problem("mtp_num_layers", run.training.mtp_num_layers, reason, "mtp_num_layers: 0")
            )
    return problems
