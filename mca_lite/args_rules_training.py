"""The rules within TrainingArguments, and the steps of the learning rate's schedule.

check_training is asked by the constructor as by parse_args, with a Judge (args_values.py) and the
arguments `a`; where it also fills in what follows from other keys, it says so.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from . import world
from .args_keys import IGNORED_KEYS, UNSUPPORTED, lookup
from .args_rules_model import CP, LAYOUT, PP, TP, VPP, layout_defect, layout_stages
from .args_values import cast, show_count
from .errors import Judge
from .families import config_keys
from .tables import OPTIMIZER_ALIASES, OPTIMIZERS

REPORTERS = ("tensorboard", "wandb")  # that report_to may name: packages, and our extras too
RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe", "shared_experts")
# fields of megatron's config that additional_configs may set, and their types: they change how a
# step is computed, never what
ADDITIONAL_FIELDS: dict[str, Any] = {
    "attention_backend": Literal["auto", "flash", "fused", "unfused", "local"],
    "batch_p2p_sync": bool,
    "clone_scatter_output_in_embedding": bool,
    "deallocate_pipeline_outputs": bool,
    "disable_bf16_reduced_precision_matmul": bool,
}
# fields that follow from other keys
DERIVED_FIELDS = (
    "params_dtype pipeline_dtype overlap_p2p_comm batch_p2p_comm use_cpu_initialization "
    "use_te_activation_func gradient_accumulation_fusion"
)


class _Beside(NamedTuple):
    """Keys, or fields of additional_configs, that count only where another key has some value."""

    keys: str
    count: Callable[[Any], Any]
    setting: str  # with which they do
    is_harmless: bool = False  # without it: no result would be missed, and a note is enough


_BESIDE = (
    _Beside("nan_skip_limit", lambda a: a.nan_policy == "skip", "nan_policy: skip"),
    _Beside(
        "nan_policy",
        lambda a: a.check_for_nan_in_loss_and_grad,
        "check_for_nan_in_loss_and_grad: true",
    ),
    _Beside(
        "early_stopping_threshold",
        lambda a: a.early_stopping_patience,
        "early_stopping_patience: 3",
    ),
    _Beside(
        "early_stopping_patience greater_is_better",
        lambda a: a.eval_strategy != "no",
        "eval_strategy: steps",
    ),
    _Beside(
        "max_new_tokens generation_num_samples",
        lambda a: a.predict_with_generate,
        "predict_with_generate: true",
    ),
    _Beside("run_name", lambda a: "wandb" in a.report_to, "report_to: wandb", True),
    # a registered optimizer may read any of them
    _Beside("sgd_momentum", lambda a: a.optim != "adam", "optim: sgd", True),
    _Beside("adam_beta1 adam_beta2 adam_epsilon", lambda a: a.optim != "sgd", "optim: adam", True),
    _Beside(
        "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        lambda a: a.fp16,
        "fp16: true",
        True,
    ),
    _Beside(
        "optimizer_offload_fraction",
        lambda a: a.optimizer_cpu_offload or a.optimizer_offload_fraction == 0,
        "optimizer_cpu_offload: true",
    ),
    _Beside("disable_bf16_reduced_precision_matmul", lambda a: a.bf16, "bf16: true"),
    _Beside("fp8_recipe first_last_layers_bf16", lambda a: a.fp8, "fp8: hybrid"),
    _Beside(
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        lambda a: a.first_last_layers_bf16,
        "first_last_layers_bf16: true",
    ),
    _Beside(
        "recompute_modules",
        lambda a: a.recompute_granularity == "selective",
        "recompute_granularity: selective",
    ),
    _Beside(
        "recompute_method recompute_num_layers distribute_saved_activations",
        lambda a: a.recompute_granularity == "full",
        "recompute_granularity: full",
    ),
    _Beside("mtp_loss_scaling_factor", lambda a: a.mtp_num_layers != 0, "mtp_num_layers: 1", True),
    _Beside(
        "batch_p2p_sync deallocate_pipeline_outputs",
        lambda a: a.pipeline_model_parallel_size > 1,
        f"{PP}: 2",
    ),
    _Beside(
        "clone_scatter_output_in_embedding",
        lambda a: a.sequence_parallel,
        "sequence_parallel: true",
    ),
)


def check_training(a: Any, judge: Judge) -> None:
    """Every rule of TrainingArguments; fills in what follows from other keys."""
    _normalise_training(a, judge)
    # Without torchrun the arguments may be made for a world that is not there: parse_args decides
    # then.
    if world.current().is_given:
        check_world(a, judge)
    _resolve_batches(a, judge)
    _check_layout(a, judge)
    _check_cadence(a, judge)
    _check_memory(a, judge)
    _check_precision(a, judge)
    check_additional_configs(a, judge)
    _check_beside(a, judge)
    check_schedule(a, judge)


def _normalise_training(a: Any, judge: Judge) -> None:
    """Replace aliases and fill in what follows; `a.notes` says what was switched off."""
    unknown = [name for name in a.report_to if name not in (*REPORTERS, "none", "all")]
    if unknown:
        choices = f"report_to: none, {', '.join(REPORTERS)}"
        judge.refuse("report_to", "no such place to report to", choices, ", ".join(unknown))
    a.report_to = [name for name in REPORTERS if name in a.report_to or "all" in a.report_to]
    a.optim = OPTIMIZER_ALIASES.get(a.optim, a.optim)
    if a.optim not in OPTIMIZERS:
        names = ", ".join([*OPTIMIZERS, *OPTIMIZER_ALIASES])
        judge.refuse("optim", "no such optimizer", f"optim: {names}")
        a.optim = "adam"
    if 0 < a.warmup_steps < 1 and a.warmup_ratio == 0:
        a.warmup_steps, a.warmup_ratio = 0, a.warmup_steps
    if not float(a.warmup_steps).is_integer():
        reason = "expected whole steps, or a fraction of all steps without warmup_ratio"
        judge.refuse("warmup_steps", reason, "warmup_ratio: 0.1")
    a.warmup_steps = int(a.warmup_steps)
    if a.warmup_steps > 0 and a.warmup_ratio > 0:
        a.notes.append(
            f"warmup_ratio {a.warmup_ratio} is not used: warmup_steps is {a.warmup_steps}"
        )
        a.warmup_ratio = 0.0
    if a.lr_scheduler_type == "constant" and (a.warmup_steps or a.warmup_ratio):
        a.notes.append("the schedule constant has no warm-up: constant_with_warmup has one")
    a.per_device_eval_batch_size = a.per_device_eval_batch_size or a.per_device_train_batch_size
    if a.eval_strategy == "steps":
        a.eval_steps = a.eval_steps or a.logging_steps
    if a.recompute_granularity == "full":
        a.recompute_method = a.recompute_method or "uniform"
        a.recompute_num_layers = a.recompute_num_layers or 1
    if a.fp8:
        a.fp8_recipe = a.fp8_recipe or "tensorwise"
    if a.sequence_parallel and a.tensor_model_parallel_size == 1 and TP not in judge.bad:
        a.sequence_parallel = False
        a.notes.append(f"sequence_parallel is switched off: {TP} is 1")
    _normalise_layout(a, judge)


def _normalise_layout(a: Any, judge: Judge) -> None:
    layout = a.pipeline_model_parallel_layout
    pp = a.pipeline_model_parallel_size
    if layout is not None and judge.bad.isdisjoint({LAYOUT, VPP, PP}):
        layout = layout.replace(" ", "")
        if reason := layout_defect(layout, pp):
            example = f"{LAYOUT}: Et*3|t*4|t*4|t*3L (14 layers on 4 pipeline ranks)"
            judge.refuse(LAYOUT, reason, example, layout)
            layout = None
        else:
            stages = len(layout_stages(layout))
            if a.virtual_pipeline_model_parallel_size not in (None, stages // pp):
                reason = f"the layout has {stages} stages for {pp} pipeline ranks"
                judge.refuse(VPP, reason, f"{VPP}: {stages // pp}")
            a.virtual_pipeline_model_parallel_size = stages // pp
        a.pipeline_model_parallel_layout = layout
    if a.virtual_pipeline_model_parallel_size == 1:  # megatron's word for it is None
        a.virtual_pipeline_model_parallel_size = None


def check_world(a: Any, judge: Judge) -> None:
    """The parallel degrees against the number of processes."""
    world = a.world_size
    product = a.model_parallel_size
    degrees = (TP, PP, CP)
    if world % product == 0:
        if judge.bad.isdisjoint(degrees):
            _check_expert_world(a, judge)
        return
    fitting = {}
    rest = world
    for name in degrees:
        fitting[name] = math.gcd(getattr(a, name), rest)
        rest //= fitting[name]
    sizes = " x ".join(f"{name.split('_')[0]} {getattr(a, name)}" for name in degrees)
    lower = ", ".join(f"{k}: {size}" for k, size in fitting.items() if size != getattr(a, k))
    first = next(name for name in degrees if getattr(a, name) > 1)
    reason = f"a copy of the model takes {sizes} = {product} ranks, and the number of processes, "
    reason += f"{world}, is no multiple"
    remedy = f"a multiple of {product} processes (torchrun --nproc_per_node {product}; of plan and "
    remedy += f"inspect --gpus {product}), or {lower}"
    judge.refuse(" ".join([first, *degrees]), reason, remedy)


def _check_expert_world(a: Any, judge: Judge) -> None:
    """Experts are spread over all ranks of a pipeline stage, those of data and context too."""
    key = "expert_model_parallel_size"
    ep = a.expert_model_parallel_size
    etp = a.expert_tensor_parallel_size or a.tensor_model_parallel_size
    stage = a.world_size // a.pipeline_model_parallel_size
    if stage % (ep * etp):
        fits = math.gcd(ep, max(1, stage // etp))
        lower = f"{key}: {fits}" if stage % (fits * etp) == 0 else "expert_tensor_parallel_size: 1"
        reason = f"the experts take {ep} x {etp} ranks (expert x expert tensor parallel), and a "
        reason += f"pipeline stage has {stage}"
        remedy = f"a multiple of {ep * etp} processes a stage, or {lower}"
        judge.refuse(f"{key} expert_tensor_parallel_size", reason, remedy)


def _resolve_batches(a: Any, judge: Judge) -> None:
    given = a.gradient_accumulation_steps
    total = a.global_batch_size
    a.gradient_accumulation_steps = given or 1
    sizes = {"per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size"}
    sizes |= {TP, PP, CP}
    if total is None or not judge.bad.isdisjoint(sizes):
        return
    micro = a.per_device_train_batch_size
    dp = a.data_parallel_size
    unit = micro * dp
    what = f"micro-batch {micro} (per_device_train_batch_size) x data parallel {dp}"
    count = total // unit
    if total % unit:
        nearest = " or ".join(str(n * unit) for n in (count, count + 1) if n > 0)
        reason = f"it is no multiple of {what} = {unit}"
        judge.refuse("global_batch_size", reason, f"global_batch_size: {nearest}")
        return
    a.gradient_accumulation_steps = count
    if given not in (None, count):
        reason = f"global_batch_size {total} = {what} x {count}, not x {given}"
        remedy = f"gradient_accumulation_steps left out or {count}, "
        remedy += f"or global_batch_size: {unit * given}"
        judge.refuse("gradient_accumulation_steps", reason, remedy, given)


def _check_layout(a: Any, judge: Judge) -> None:
    pp = a.pipeline_model_parallel_size
    vpp = a.virtual_pipeline_model_parallel_size
    check_virtual_stages(a, judge)
    if vpp and a.gradient_accumulation_steps % pp:
        keys = f"gradient_accumulation_steps global_batch_size {VPP} {PP}"
        reason = f"with virtual stages micro-batches run in groups of {pp}, the pipeline's size"
        judge.refuse(keys, reason, f"a multiple of {pp} micro-batches a step")
    both = a.use_distributed_optimizer and a.overlap_grad_reduce
    if a.overlap_param_gather and not both:
        keys = "overlap_param_gather use_distributed_optimizer overlap_grad_reduce"
        remedy = "use_distributed_optimizer: true and overlap_grad_reduce: true"
        judge.refuse(keys, "it needs the distributed optimizer and overlap_grad_reduce", remedy)
    if a.use_distributed_optimizer and not OPTIMIZERS[a.optim].distributed:
        reason = "megatron's distributed optimizer knows Adam only"
        remedy = "use_distributed_optimizer: false, or optim: adam"
        judge.refuse("optim use_distributed_optimizer", reason, remedy)
    halves = [key for key in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(a, key) == "bf16"]
    if halves and (not OPTIMIZERS[a.optim].halves or a.optimizer_cpu_offload):
        reason = "only Adam's moments on the GPU can be in bf16"
        remedy = "fp32, or optim: adam and optimizer_cpu_offload: false"
        judge.refuse(" ".join([*halves, "optim optimizer_cpu_offload"]), reason, remedy)
    dispatcher = "moe_token_dispatcher_type"
    alltoall = "moe_token_dispatcher_type: alltoall"
    if a.moe_token_dispatcher_type == "allgather" and a.variable_seq_lengths:
        reason = "it gathers rows of one length, and variable_seq_lengths lets them differ"
        judge.refuse(f"{dispatcher} variable_seq_lengths", reason, alltoall)
    if a.moe_shared_expert_overlap and a.moe_token_dispatcher_type != "alltoall":
        reason = "shared experts run beside an all-to-all alone"
        judge.refuse(f"moe_shared_expert_overlap {dispatcher}", reason, alltoall)
    if a.moe_aux_loss_coeff and a.moe_router_load_balancing_type == "none":
        keys = "moe_aux_loss_coeff moe_router_load_balancing_type"
        reason = "moe_router_load_balancing_type is none, and it would weigh nothing"
        judge.refuse(keys, reason, "moe_router_load_balancing_type: aux_loss")


def check_virtual_stages(a: Any, judge: Judge) -> None:
    """Virtual stages are those of a pipeline."""
    if a.virtual_pipeline_model_parallel_size and a.pipeline_model_parallel_size == 1:
        reason = f"virtual stages need a pipeline, and {PP} is 1"
        judge.refuse(f"{VPP} {PP} {LAYOUT}", reason, f"{PP}: 2, or {VPP} left out")


def _check_cadence(a: Any, judge: Judge) -> None:
    if a.max_steps == 0:
        judge.refuse("max_steps", "no step would be taken", "max_steps: -1")
    if a.profile_steps and 0 < a.max_steps < parse_steps(a.profile_steps)[0]:
        remedy = f"profile_steps: {a.max_steps}"
        judge.refuse("profile_steps", f"the run has {show_count(a.max_steps, 'step')}", remedy)
    if a.load_best_model_at_end:
        _check_best_model(a, judge)
    for name in a.report_to:
        _check_installed("report_to", name, name, judge, name)
    if a.plot_loss:
        _check_installed("plot_loss", "matplotlib", "plot", judge, True)


def _check_best_model(a: Any, judge: Judge) -> None:
    keys = "load_best_model_at_end eval_strategy"
    but = "each checkpoint must be evaluated, but"
    if a.eval_strategy == "no":
        remedy = "eval_strategy: steps and save_strategy: steps"
        judge.refuse(keys, "without evaluation no checkpoint is the best one", remedy)
    elif a.eval_strategy != a.save_strategy:
        reason = f"{but} eval_strategy is {a.eval_strategy} and save_strategy {a.save_strategy}"
        judge.refuse(f"{keys} save_strategy", reason, f"save_strategy: {a.eval_strategy}")
    elif a.eval_strategy == "steps" and a.save_steps % a.eval_steps:
        reason = f"{but} save_steps {a.save_steps} is no multiple of eval_steps {a.eval_steps}"
        remedy = f"eval_steps: {a.save_steps}, or save_steps: {a.eval_steps}"
        judge.refuse(f"{keys} eval_steps save_steps logging_steps", reason, remedy)


def _check_installed(key: str, package: str, extra: str, judge: Judge, value: Any) -> None:
    if importlib.util.find_spec(package) is None:
        remedy = f"pip install 'mca-lite[{extra}]', or {key} left out"
        judge.refuse(key, f"it needs {package}, which is not installed", remedy, value)


def _check_memory(a: Any, judge: Judge) -> None:
    if not set(a.recompute_modules or ()) <= set(RECOMPUTE_MODULES):
        remedy = f"recompute_modules: any of {', '.join(RECOMPUTE_MODULES)}"
        judge.refuse("recompute_modules", "expected parts of a layer", remedy)
    if a.distribute_saved_activations and a.sequence_parallel:
        reason = "with sequence_parallel the activations are shared already"
        remedy = "distribute_saved_activations: false"
        judge.refuse("distribute_saved_activations sequence_parallel", reason, remedy)


def _check_precision(a: Any, judge: Judge) -> None:
    if a.bf16 and a.fp16:
        judge.refuse("bf16 fp16", "fp16 is on too", "bf16: true and fp16: false")
    if a.fp8 and not a.bf16:
        reason = "Transformer Engine rounds bf16 tensors to 8 bits, and bf16 is false"
        judge.refuse("fp8 bf16", reason, "bf16: true")
    if a.first_last_layers_bf16 and a.fp8_recipe == "delayed":
        reason = "the scales of fp8_recipe: delayed are kept for all layers together"
        judge.refuse("first_last_layers_bf16 fp8_recipe", reason, "fp8_recipe: tensorwise")
    if a.fp8_recipe == "delayed" and "layernorm" in (a.recompute_modules or ()):
        reason = "fp8_recipe: delayed knows no norms that are computed again"
        judge.refuse("recompute_modules fp8_recipe", reason, "fp8_recipe: tensorwise")
    if a.min_loss_scale > a.initial_loss_scale:
        reason = f"it is above initial_loss_scale, {a.initial_loss_scale}"
        judge.refuse("min_loss_scale initial_loss_scale", reason, "min_loss_scale: 1.0")


def _check_beside(a: Any, judge: Judge) -> None:
    """Keys without effect, since the one that they need is off."""
    for row in _BESIDE:
        switch = row.setting.partition(":")[0]
        for key in () if row.count(a) else row.keys.split():
            value = getattr(a, switch)
            state = "not set" if value in (None, []) else str(value).lower()
            reason = f"no effect, since {switch} is {state}"
            remedy = f"{row.setting}, or {key} left out"
            if key in a.additional_configs:
                name = f"additional_configs.{key}"
                value = a.additional_configs[key]
                judge.refuse(f"additional_configs {switch}", reason, remedy, value, name)
            elif key in a.changed and row.is_harmless:
                a.notes.append(f"{key}: {reason}")
            elif key in a.changed:
                judge.refuse(f"{key} {switch}", reason, remedy)


def check_additional_configs(a: Any, judge: Judge) -> None:
    """additional_configs sets ADDITIONAL_FIELDS alone; casts its values in place."""
    key = "additional_configs"
    for name, value in list(a.additional_configs.items()):
        if name in ADDITIONAL_FIELDS:
            try:
                given = getattr(value, "name", value)  # AttnBackend.flash
                a.additional_configs[name] = cast(given, ADDITIONAL_FIELDS[name])
                continue
            except ValueError as error:
                reason = str(error)
                remedy = f"{name} left out"
        else:
            reason, remedy = _what_decides(name, value, a)
        judge.refuse(key, reason, remedy, value, f"{key}.{name}")


def _what_decides(name: str, value: Any, a: Any) -> tuple[str, str]:
    """Why additional_configs sets no field of this name, and what to set."""
    left_out = f"{name} left out"
    of_model = config_keys()
    if name in a.__dataclass_fields__:
        return "it has a key of its own", f"{name}: {value}"
    if row := lookup(UNSUPPORTED, name):
        return f"not in this version: {row.reason}", row.remedy or left_out
    if name in of_model:
        theirs = of_model[name]
        remedy = f"{theirs} in the model's config.json" if theirs else left_out
        return "the model's config.json decides it", remedy
    if reason := lookup(IGNORED_KEYS, name):
        return reason, left_out
    if name in DERIVED_FIELDS.split():
        return "it follows from other keys", left_out
    return "it would change what the model computes, or has no effect here", left_out


# ---- the schedule of the learning rate

# Hugging Face's names -> megatron's
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "inverse_sqrt": "inverse-square-root",
    "warmup_stable_decay": "WSD",
}
DECAY_TYPES = ("linear", "cosine", "exponential", "minus_sqrt")
SCHEDULE_KWARGS: dict[str, Any] = {
    "min_lr": float,
    "min_lr_rate": float,
    "num_decay_steps": int,
    "num_stable_steps": int,
    "decay_type": Literal[DECAY_TYPES],
}
# megatron's and other spellings -> Hugging Face's; of the first row, only without a stable phase
OTHER_SPELLINGS = {
    "lr_decay_steps": "num_decay_steps",
    "wsd_decay_steps": "num_decay_steps",
    "lr_wsd_decay_style": "decay_type",
    "min_lr_ratio": "min_lr_rate",
}


def parse_steps(text: str) -> tuple[int, int]:
    """(first, last) of "10-12", or of "10". Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    first, last = (int(number or match[1]) for number in match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"{text!r} are no steps, expected something like 10-12 or 10")
    return first, last


def check_schedule(a: Any, judge: Judge) -> None:
    """lr_scheduler_type and its kwargs: names, types, limits; casts the kwargs in place."""
    kind = a.lr_scheduler_type
    wsd = a.lr_scheduler_type == "warmup_stable_decay"
    if kind not in SCHEDULES:
        remedy = f"lr_scheduler_type: {', '.join(SCHEDULES)}"
        judge.refuse("lr_scheduler_type", "no such schedule", remedy)
        return
    given = dict(a.lr_scheduler_kwargs)
    values = {}
    before = len(judge.problems)
    # what they take is what every schedule here has
    always = {"max_lr": a.learning_rate, "init_lr": 0, "warmup_type": "linear", "num_cycles": 0.5}

    def refuse(name: str, reason: str, remedy: str) -> None:
        key = "lr_scheduler_kwargs"
        judge.refuse(key, reason, remedy, given.get(name), f"{key}.{name}")

    for name, value in given.items():
        key = OTHER_SPELLINGS.get(name, name)
        if name in always:
            if str(value) != str(always[name]) and not _equal(value, always[name]):
                remedy = f"learning_rate: {value}" if name == "max_lr" else f"{name} left out"
                refuse(name, f"it is {always[name]} in every schedule here", remedy)
        elif wsd and name == "lr_decay_steps":
            refuse(name, "a stable schedule ends with the run", "max_steps")
        elif key in values:
            refuse(name, f"{key} is given too, and means the same", "one of the two")
        elif key not in SCHEDULE_KWARGS:
            refuse(name, "no schedule takes it", f"any of {', '.join(SCHEDULE_KWARGS)}")
        elif kind.startswith("constant") or (key in ("decay_type", "num_stable_steps") and not wsd):
            refuse(name, f"it has no effect on lr_scheduler_type {kind}", "the key left out")
        elif value is not None:
            value = "minus_sqrt" if value == "1-sqrt" else value  # Hugging Face's name
            try:
                values[key] = cast(value, SCHEDULE_KWARGS[key])
            except ValueError as error:
                refuse(name, str(error), "0" if key != "decay_type" else ", ".join(DECAY_TYPES))
    limits = {"min_lr": a.learning_rate, "min_lr_rate": 1.0}
    for key, value in values.items():
        if key != "decay_type" and not 0 <= value <= limits.get(key, value):
            most = f" and at most {limits[key]}" if key in limits else ""
            refuse(key, f"it must be at least 0{most}", f"{key}: 0")
    if {"min_lr", "min_lr_rate"} <= set(values):
        refuse("min_lr_rate", "min_lr is given too", "one of the two")
    if wsd and not {"num_decay_steps", "num_stable_steps"} & set(values):
        remedy = 'lr_scheduler_kwargs: {"num_decay_steps": 100}'
        refuse("num_decay_steps", "the schedule must know when decay begins", remedy)
    a.lr_scheduler_kwargs = values
    fits = len(judge.problems) == before and judge.bad.isdisjoint({"max_steps", "warmup_steps"})
    if fits and a.max_steps > 0:
        _schedule_steps(a, a.max_steps, judge)


def _equal(value: Any, number: Any) -> bool:
    try:
        return float(value) == float(number)
    except (TypeError, ValueError):
        return False


class ScheduleSteps(NamedTuple):
    """Steps of warm-up, the step of the lowest rate, and steps of decay (None: all between)."""

    warmup: int
    end: int
    decay: int | None


def plan_schedule(a: Any, num_training_steps: int) -> ScheduleSteps:
    """The steps of the schedule of TrainingArguments over so many optimizer steps. ConfigError
    where they do not fit together."""
    judge = Judge(a)
    steps = _schedule_steps(a, num_training_steps, judge)
    judge.close()
    return steps


def warmup_steps(a: Any, num_training_steps: int) -> int:
    """Warm-up in steps: warmup_steps, or the share warmup_ratio of all steps, rounded up."""
    if a.lr_scheduler_type == "constant":
        return 0
    share = math.ceil(a.warmup_ratio * num_training_steps)
    # a share leaves a step to decay in
    return a.warmup_steps or min(share, max(num_training_steps - 1, 0))


def _schedule_steps(a: Any, num_training_steps: int, judge: Judge) -> ScheduleSteps:
    kwargs = a.lr_scheduler_kwargs
    style = SCHEDULES[a.lr_scheduler_type]
    end = num_training_steps
    warmup = warmup_steps(a, num_training_steps)
    stable = kwargs.get("num_stable_steps")
    decay = kwargs.get("num_decay_steps")
    if style != "WSD":
        end = end if decay is None else decay
        decay = None
    else:
        if stable is not None:
            rest = max(end - warmup - stable, 1)
            end = warmup + stable + (rest if decay is None else decay)
        if decay is None:
            decay = max(end - warmup - (stable or 0), 1)
    if warmup >= end and style != "constant":
        reason = f"{warmup} warm-up steps leave nothing of the {end} steps to decay in"
        remedy = "warmup_steps: 0.1, a share of all steps"
        judge.refuse("warmup_steps lr_scheduler_kwargs", reason, remedy, warmup)
    elif decay is not None and not 0 <= decay <= end - warmup:
        reason = f"it is not between 0 and the {end - warmup} steps that {warmup} warm-up steps "
        reason += f"leave of {end}"
        name = "lr_scheduler_kwargs.num_decay_steps"
        judge.refuse("lr_scheduler_kwargs", reason, f"num_decay_steps: {end - warmup}", decay, name)
    return ScheduleSteps(warmup, end, decay)
