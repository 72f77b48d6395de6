"""Rules and derived values of TrainingArguments, and the learning rate schedule's steps.

normalise_training fills in derived values; check_training changes no key. `a` has the keys as
attributes; the Judge (errors.py) collects problems.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from . import world
from .args_rules_model import CP, LAYOUT, PP, TP, VPP, num_stages
from .args_values import cast, show_count
from .errors import Judge, Keys, Rule
from .tables import ALIASES

REPORTERS = ("tensorboard", "wandb")  # values of report_to: packages, and extras of this one
# The fields of megatron's config that additional_configs may set, with their types: each changes
# how a step is computed, not its result.
ADDITIONAL_FIELDS: dict[str, Any] = {
    "attention_backend": Literal["auto", "flash", "fused", "unfused", "local"],
    "batch_p2p_sync": bool,
    "clone_scatter_output_in_embedding": bool,
    "deallocate_pipeline_outputs": bool,
    "disable_bf16_reduced_precision_matmul": bool,
}
VIRTUAL_STAGES = (
    Rule(
        f"{VPP} {PP}=1",
        f"virtual stages need a pipeline, and {PP} is 1",
        f"{PP}: 2, or {VPP} left out",
    ),
)
_HALVES = (
    "only Adam's moments on the GPU can be in bf16 or 8 bits",
    "fp32, or optim: adam and optimizer_cpu_offload: false",
)
_RULES = (
    *VIRTUAL_STAGES,
    Rule(
        "overlap_param_gather !use_distributed_optimizer|!overlap_grad_reduce",
        "it needs the distributed optimizer and overlap_grad_reduce",
        "use_distributed_optimizer: true and overlap_grad_reduce: true",
    ),
    Rule(
        "moe_token_dispatcher_type=allgather variable_seq_lengths",
        "it gathers rows of one length, and variable_seq_lengths lets them differ",
        "moe_token_dispatcher_type: alltoall",
    ),
    Rule(
        "moe_shared_expert_overlap !moe_token_dispatcher_type=alltoall",
        "shared experts overlap with an all-to-all only",
        "moe_token_dispatcher_type: alltoall",
    ),
    Rule(
        "moe_aux_loss_coeff moe_router_load_balancing_type=none",
        "no effect, since moe_router_load_balancing_type is none",
        "moe_router_load_balancing_type: aux_loss",
    ),
    Rule(
        "!optim=adam use_distributed_optimizer",
        "megatron's distributed optimizer supports Adam only",
        "use_distributed_optimizer: false, or optim: adam",
    ),
    Rule(
        "optim=muon optimizer_cpu_offload",
        "ranks join the matrices of Muon on their devices",
        "optimizer_cpu_offload: false, or optim: adam",
    ),
    Rule("exp_avg_dtype !exp_avg_dtype=fp32 !optim=adam|optimizer_cpu_offload", *_HALVES),
    Rule("exp_avg_sq_dtype !exp_avg_sq_dtype=fp32 !optim=adam|optimizer_cpu_offload", *_HALVES),
    Rule("max_steps=0", "expected at least one step", "max_steps: -1"),
    Rule("bf16 fp16", "fp16 is on too", "bf16: true and fp16: false"),
    Rule(
        "fp8 !bf16",
        "Transformer Engine rounds bf16 tensors to 8 bits, and bf16 is false",
        "bf16: true",
    ),
    Rule(
        "first_last_layers_bf16 fp8_recipe=delayed",
        "fp8_recipe: delayed has one set of scales for all layers",
        "fp8_recipe: tensorwise",
    ),
    Rule(
        "recompute_modules=layernorm fp8_recipe=delayed",
        "fp8_recipe: delayed does not support recomputed norms",
        "fp8_recipe: tensorwise",
    ),
)


class Need(NamedTuple):
    """Configuration keys that have no effect unless a condition holds.

    keys: separated by spaces. condition: values of keys, such as "optim=adam", written like one of
    the conditions in Rule.when. setting: a line such as "bf16: true" that fulfils it.
    is_harmless: True if setting such keys only gives a note; otherwise they are refused."""

    keys: str
    condition: str
    setting: str
    is_harmless: bool = False


# a note is enough: the run still does what the user wants
harmless_need = functools.partial(Need, is_harmless=True)
NEEDS = (
    Need("nan_skip_limit", "nan_policy=skip|grad_norm_skip_threshold", "nan_policy: skip"),
    Need(
        "nan_policy grad_norm_skip_threshold",
        "check_for_nan_in_loss_and_grad",
        "check_for_nan_in_loss_and_grad: true",
    ),
    Need("early_stopping_threshold", "early_stopping_patience", "early_stopping_patience: 3"),
    Need("early_stopping_patience greater_is_better", "!eval_strategy=no", "eval_strategy: steps"),
    Need(
        "max_new_tokens generation_num_samples",
        "predict_with_generate",
        "predict_with_generate: true",
    ),
    harmless_need("sequence_parallel", f"!{TP}=1", f"{TP}: 2"),
    harmless_need("tp_comm_overlap", "sequence_parallel", "sequence_parallel: true"),
    harmless_need("num_train_epochs", "max_steps=-1", "max_steps: -1"),
    harmless_need("warmup_ratio", "!warmup_steps", "warmup_steps: 0"),
    harmless_need(
        "warmup_steps warmup_ratio",
        "!lr_scheduler_type=constant",
        "lr_scheduler_type: constant_with_warmup",
    ),
    harmless_need("run_name", "report_to=wandb", "report_to: wandb"),
    harmless_need("metric_for_best_model", "!eval_strategy=no", "eval_strategy: steps"),
    # a registered optimizer may read any of them
    harmless_need("sgd_momentum", "!optim=adam", "optim: sgd"),
    harmless_need(
        "muon_momentum muon_nesterov muon_ns_steps muon_adjust_lr", "!optim=adam", "optim: muon"
    ),
    harmless_need("adam_beta1 adam_beta2 adam_epsilon", "!optim=sgd", "optim: adam"),
    harmless_need(
        "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        "fp16",
        "fp16: true",
    ),
    Need(
        "optimizer_offload_fraction",
        "optimizer_cpu_offload|!optimizer_offload_fraction",
        "optimizer_cpu_offload: true",
    ),
    Need("fp8_recipe first_last_layers_bf16", "fp8", "fp8: hybrid"),
    Need(
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        "first_last_layers_bf16",
        "first_last_layers_bf16: true",
    ),
    Need(
        "recompute_modules", "recompute_granularity=selective", "recompute_granularity: selective"
    ),
    Need(
        "recompute_method recompute_num_layers",
        "recompute_granularity=full",
        "recompute_granularity: full",
    ),
    Need(
        "recompute_keep activation_offloading",
        "recompute_granularity=full|recompute_granularity=auto",
        "recompute_granularity: full",
    ),
    harmless_need("mtp_loss_scaling_factor", "!mtp_num_layers=0", "mtp_num_layers: 1"),
)


def check_needs(needs: Iterable[Need], a: Keys, judge: Judge) -> None:
    """Refuse keys that have no effect: those that were changed from their default although their
    condition in `needs` does not hold. Problems are added to `judge` (which collects them); a
    harmless key gives a line in a.notes instead."""
    for need in needs:
        if judge.holds(need.condition):
            continue
        switch = need.setting.partition(":")[0]
        value = getattr(judge.arguments, switch)
        state = "not set" if value in (None, []) else str(value)
        if isinstance(value, bool):
            state = state.lower()
        reason = f"no effect, since {switch} is {state}"
        for key in [key for key in need.keys.split() if key in judge.arguments.changed]:
            if need.is_harmless:
                a.notes.append(f"{key}: {reason}")
            else:
                judge.refuse(f"{key} {switch}", reason, f"{need.setting}, or {key} left out")


# -- derived values


def normalise_training(a: Keys) -> None:
    """Complete TrainingArguments, in place: fill in values that are None and follow from other
    arguments, such as gradient_accumulation_steps from global_batch_size, and bring others, such as
    report_to and warmup_steps, to one form."""
    a.report_to = [name for name in REPORTERS if {name, "all"}.intersection(a.report_to)]
    if 0 < a.warmup_steps < 1 and not a.warmup_ratio:
        a.warmup_ratio = a.warmup_steps
        a.warmup_steps = 0
    if float(a.warmup_steps).is_integer():
        a.warmup_steps = int(a.warmup_steps)
    normalise_additional_configs(a)
    _normalise_schedule(a)
    a.sequence_parallel &= a.tensor_model_parallel_size > 1
    layout = (a.pipeline_model_parallel_layout or "").replace(" ", "")
    a.pipeline_model_parallel_layout = layout or None
    derived = {
        "per_device_eval_batch_size": a.per_device_train_batch_size,
        "gradient_accumulation_steps": max(1, (a.global_batch_size or 0) // _samples_at_once(a)),
        "eval_steps": a.logging_steps,
        VPP: num_stages(layout) // a.pipeline_model_parallel_size,
    }
    if a.recompute_granularity == "full":
        derived |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if a.fp8:
        derived["fp8_recipe"] = "tensorwise"
    for key, value in derived.items():
        if getattr(a, key) is None:
            setattr(a, key, value)
    if a.virtual_pipeline_model_parallel_size in (0, 1):  # megatron takes None
        a.virtual_pipeline_model_parallel_size = None


def _samples_at_once(a: Keys) -> int:
    """Samples in one micro-batch, summed over all data-parallel ranks; with packing, a packed row
    counts as one. a: TrainingArguments."""
    return a.per_device_train_batch_size * a.data_parallel_size


def normalise_additional_configs(a: Keys) -> None:
    """Cast the values of additional_configs, in place, to the types in ADDITIONAL_FIELDS. A value
    that cannot be cast is kept, for check_additional_configs to refuse."""
    # an enum value such as AttnBackend.flash stands for its name, flash
    values = {key: getattr(value, "name", value) for key, value in a.additional_configs.items()}
    a.additional_configs = _cast_values(values, ADDITIONAL_FIELDS)


def _cast_values(values: dict[str, Any], types: dict[str, Any]) -> dict[str, Any]:
    """Cast the values of a mapping to the types in `types` (by name) -> {name: value}. A value that
    cannot be cast, or whose name has no type there, is kept as it is."""
    return {key: _try_cast(value, types.get(key, Any))[0] for key, value in values.items()}


def _try_cast(value: object, hint: object) -> tuple[Any, str]:
    """Cast `value` to the type `hint` -> (cast value, ""); if it cannot be cast, (the value itself,
    a message with the expected type)."""
    try:
        return cast(value, hint), ""
    except ValueError as error:
        return value, str(error)


# -- rules


def check_training(a: Keys, judge: Judge) -> None:
    """Check training arguments against each other, and under a launcher such as torchrun against
    the number of processes. Problems are added to `judge` (which collects them); harmless keys
    without effect give lines in a.notes."""
    # without torchrun only parse_args knows the number of processes
    if world.current().is_given:
        check_world(a, judge)
    judge.apply(_RULES)
    _check_batches(a, judge)
    _check_layout(a, judge)
    judge.expect(
        a.min_loss_scale <= a.initial_loss_scale,
        "min_loss_scale initial_loss_scale",
        f"it is above initial_loss_scale, {a.initial_loss_scale}",
        "min_loss_scale: 1.0",
    )
    _check_cadence(a, judge)
    check_additional_configs(a, judge)
    check_needs(NEEDS, a, judge)
    _check_schedule(a, judge)


def check_world(a: Keys, judge: Judge) -> None:
    """Check that the parallel sizes fit the number of processes. The number must be a multiple of
    tensor x pipeline x context parallel size, and expert x expert tensor parallel size must divide
    the number of ranks of a pipeline stage. Problems are added to `judge` (which collects them)."""
    size = a.world_size
    product = a.model_parallel_size
    if size % product == 0:
        _check_expert_world(a, judge)
        return
    degrees = {name: getattr(a, name) for name in (TP, PP, CP) if getattr(a, name) > 1}
    sizes = " x ".join(f"{name.split('_')[0]} {degree}" for name, degree in degrees.items())
    judge.refuse(
        " ".join(degrees),
        f"a copy of the model takes {sizes} = {product} ranks, and the number of processes, "
        f"{size}, is no multiple",
        f"a multiple of {product} processes (torchrun --nproc_per_node {product}; of plan and "
        f"inspect --gpus {product}), or a product that divides {size}",
    )


def _check_expert_world(a: Keys, judge: Judge) -> None:
    # experts are spread over all ranks of a pipeline stage, those of data and context too
    key = "expert_model_parallel_size"
    ep = a.expert_model_parallel_size
    etp = a.expert_tensor_parallel_size or a.tensor_model_parallel_size
    stage = a.world_size // a.pipeline_model_parallel_size
    judge.expect(
        stage % (ep * etp) == 0,
        f"{key} expert_tensor_parallel_size {TP} {PP} {CP}",
        f"the experts take {ep} x {etp} ranks (expert x expert tensor parallel), and a "
        f"pipeline stage has {stage}",
        f"a multiple of {ep * etp} processes a stage, or {key}: {math.gcd(ep, stage)} and "
        "expert_tensor_parallel_size: 1",
    )


def _check_batches(a: Keys, judge: Judge) -> None:
    steps = a.gradient_accumulation_steps
    unit = _samples_at_once(a)
    total = a.global_batch_size or unit * steps
    count = total // unit
    product = f"{unit}, which is per_device_train_batch_size x data parallel size"
    sizes = f"per_device_train_batch_size {TP} {PP} {CP}"
    judge.expect(
        total % unit == 0,
        f"global_batch_size gradient_accumulation_steps {sizes}",
        f"it is no multiple of {product}",
        f"global_batch_size: {max(count, 1) * unit} or {(max(count, 1) + 1) * unit}",
    )
    judge.expect(
        count == steps,
        f"gradient_accumulation_steps global_batch_size {sizes}",
        f"global_batch_size {total} is {count}, not {steps} times {product}",
        f"gradient_accumulation_steps left out or {count}, or global_batch_size: {unit * steps}",
    )


def _check_layout(a: Keys, judge: Judge) -> None:
    pp = a.pipeline_model_parallel_size
    vpp = a.virtual_pipeline_model_parallel_size or 1
    layout = a.pipeline_model_parallel_layout
    stages = num_stages(layout) or pp * vpp
    judge.expect(
        stages % pp == 0,
        f"{LAYOUT} {VPP} {PP}",
        f"its {stages} stages cannot be split evenly over {pp} pipeline ranks",
        f"{LAYOUT}: Et*3|t*4|t*4|t*3L (14 layers on 4 pipeline ranks)",
    )
    judge.expect(
        stages == pp * vpp,
        f"{VPP} {LAYOUT} {PP}",
        f"the layout has {stages} stages for {pp} pipeline ranks",
        f"{VPP}: {stages // pp}",
    )
    judge.expect(
        vpp == 1 or a.gradient_accumulation_steps % pp == 0,
        f"gradient_accumulation_steps global_batch_size {VPP} {PP} {LAYOUT}",
        f"with virtual stages micro-batches run in groups of {pp}, the pipeline's size",
        f"a multiple of {pp} micro-batches a step",
    )


def _check_cadence(a: Keys, judge: Judge) -> None:
    first = parse_steps(a.profile_steps or "1")[0]
    judge.expect(
        a.max_steps <= 0 or first <= a.max_steps,
        "profile_steps",
        f"the run has {show_count(a.max_steps, 'step')}",
        f"profile_steps: {a.max_steps}",
    )
    if a.load_best_model_at_end:
        _check_best_model(a, judge)
    for name in a.report_to:
        check_installed("report_to", name, name, judge)
    if a.plot_loss:
        check_installed("plot_loss", "matplotlib", "plot", judge)


def _check_best_model(a: Keys, judge: Judge) -> None:
    keys = "load_best_model_at_end eval_strategy save_strategy"
    but = "each checkpoint must be evaluated, but"
    judge.expect(
        a.save_strategy == a.eval_strategy != "no",
        keys,
        f"{but} eval_strategy is {a.eval_strategy} and save_strategy {a.save_strategy}",
        "eval_strategy: steps and save_strategy: steps",
    )
    judge.expect(
        a.eval_strategy != "steps" or a.save_steps % a.eval_steps == 0,
        f"{keys} eval_steps save_steps logging_steps",
        f"{but} save_steps {a.save_steps} is no multiple of eval_steps {a.eval_steps}",
        f"eval_steps: {a.save_steps}, or save_steps: {a.eval_steps}",
    )


def check_installed(key: str, package: str, extra: str, judge: Judge) -> None:
    """Check that a Python package which the configuration key `key` needs is installed; if not, add
    a Problem to `judge` (which collects them). extra: the pip extra of mca-lite that installs it.
    """
    judge.expect(
        importlib.util.find_spec(package),
        key,
        f"it needs {package}, which is not installed",
        f"pip install 'mca-lite[{extra}]', or {key} left out",
    )


def check_additional_configs(a: Keys, judge: Judge) -> None:
    """Check the entries of the key additional_configs: add a Problem to `judge` (which collects
    them) for each name that is not in ADDITIONAL_FIELDS, and each value that cannot be cast to the
    type given there."""
    key = "additional_configs"
    takes = f"{key} takes {', '.join(ADDITIONAL_FIELDS)}: config.json and keys decide the rest"
    for name, value in a.additional_configs.items():
        defect = _defect(name, value, ADDITIONAL_FIELDS, takes)
        remedy = f"{name} left out"
        field = ALIASES.get(name, name)
        if hasattr(a, field):
            remedy = f"{field}: {str(value).lower()}, beside {key}"
        judge.expect(not defect, key, defect, remedy, value, f"{key}.{name}")


def _defect(name: str, value: object, types: dict[str, Any], takes: str) -> str:
    """Say why an entry {name: value} of a mapping key, such as lr_scheduler_kwargs, is refused; ""
    if it is right. types: {allowed name: type}. takes: the reason to give for a name that is not
    allowed."""
    return _try_cast(value, types[name])[1] if name in types else takes


# -- the schedule of the learning rate

STABLE = "warmup_stable_decay"
# Hugging Face's names -> megatron's
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "inverse_sqrt": "inverse-square-root",
    STABLE: "WSD",
}
# the types of lr_scheduler_kwargs, for schedules that decay and for the one with a stable phase
_OF_DECAY: dict[str, Any] = {"min_lr": float, "min_lr_rate": float, "num_decay_steps": int}
_OF_STABLE = _OF_DECAY | {
    "num_stable_steps": int,
    "decay_type": Literal["linear", "cosine", "exponential", "minus_sqrt"],
}
_OTHER_SPELLINGS = {"min_lr_ratio": "min_lr_rate", "1-sqrt": "minus_sqrt"}  # Hugging Face's


def parse_steps(text: str) -> tuple[int, int]:
    """Read a range of steps: (first, last) from text such as "10-12"; "10" gives (10, 10). Raises
    ValueError for other text."""
    with contextlib.suppress(ValueError):
        first, last = map(int, text.split("-") if "-" in text else (text, text))
        if 1 <= first <= last:
            return first, last
    raise ValueError(f"{text!r} is not a range of steps: expected 10-12 or 10, for example")


def _kwargs_of(schedule: str) -> dict[str, Any]:
    """The names and types of the lr_scheduler_kwargs that a learning rate schedule takes."""
    return {"constant": {}, "WSD": _OF_STABLE}.get(SCHEDULES[schedule], _OF_DECAY)


def _normalise_schedule(a: Keys) -> None:
    """Bring lr_scheduler_kwargs to one form, in place: other spellings of names and values are
    replaced (min_lr_ratio becomes min_lr_rate), values are cast to their types if possible, and
    known names with the value None are dropped."""
    types = _kwargs_of(a.lr_scheduler_type)
    values: dict[str, Any] = {}
    for name, value in a.lr_scheduler_kwargs.items():
        key = _OTHER_SPELLINGS.get(name, name)
        if value is not None or key not in types:
            values[key] = _OTHER_SPELLINGS.get(str(value), value)
    a.lr_scheduler_kwargs = _cast_values(values, types)


def _check_schedule(a: Keys, judge: Judge) -> None:
    """Check the names, types and limits of lr_scheduler_kwargs, and that warmup_steps is a whole
    number; Problems are added to `judge` (which collects them). If it adds none and max_steps is
    set, check too that the warm-up leaves enough steps for the decay."""
    key = "lr_scheduler_kwargs"
    kwargs = a.lr_scheduler_kwargs
    types = _kwargs_of(a.lr_scheduler_type)
    most = {"min_lr": a.learning_rate, "min_lr_rate": 1.0}
    before = len(judge.problems)
    judge.expect(
        isinstance(a.warmup_steps, int),
        "warmup_steps",
        "expected whole steps, or a fraction of all steps without warmup_ratio",
        "warmup_ratio: 0.1",
    )

    def expect(holds: object, name: str, reason: str, remedy: str = "the key left out") -> None:
        value = kwargs.get(name)
        keys = f"{key} lr_scheduler_type"
        judge.expect(holds, keys, reason, remedy, value, f"{key}.{name}")

    for name, value in kwargs.items():
        takes = f"{a.lr_scheduler_type} takes {', '.join(types) or 'none'}"
        defect = _defect(name, value, types, takes)
        expect(not defect, name, defect)
        number = value if isinstance(value, (int, float)) and not defect else 0
        limit = most.get(name, math.inf)
        expect(0 <= number <= limit, name, f"expected a number from 0 to {limit}", f"{name}: 0")
    expect(len(kwargs.keys() & most) < 2, "min_lr_rate", "min_lr is given too", "one of the two")
    expect(
        a.lr_scheduler_type != STABLE or {"num_decay_steps", "num_stable_steps"} & kwargs.keys(),
        "num_decay_steps",
        "the schedule must know when decay begins",
        'lr_scheduler_kwargs: {"num_decay_steps": 100}',
    )
    if len(judge.problems) == before and a.max_steps > 0:
        _schedule_steps(a, a.max_steps, judge)


class ScheduleSteps(NamedTuple):
    """Optimizer steps of a learning rate schedule. warmup: length of the warm-up. end: the step at
    which decay ends. decay: length of the decay in warmup_stable_decay; None in other schedules."""

    warmup: int
    end: int
    decay: int | None


def plan_schedule(a: Keys, num_training_steps: int) -> ScheduleSteps:
    """Warm-up and decay steps of the learning rate for a run of num_training_steps optimizer steps.

    Raises ConfigError if the warm-up leaves too few steps for the decay.
    """
    judge = Judge(a)
    steps = _schedule_steps(a, num_training_steps, judge)
    judge.close()
    return steps


def warmup_steps(a: Keys, num_training_steps: int) -> int:
    """Number of warm-up steps in a run of num_training_steps: the key warmup_steps or, if that is
    0, warmup_ratio x num_training_steps, rounded up. The ratio leaves one step for the decay. 0 for
    the schedule "constant". a: TrainingArguments."""
    if a.lr_scheduler_type == "constant":
        return 0
    share = math.ceil(a.warmup_ratio * num_training_steps)
    # one step is left for the decay
    return a.warmup_steps or min(share, max(num_training_steps - 1, 0))


def _schedule_steps(a: Keys, num_training_steps: int, judge: Judge) -> ScheduleSteps:
    kwargs = a.lr_scheduler_kwargs
    end = num_training_steps
    warmup = warmup_steps(a, num_training_steps)
    decay = None
    if a.lr_scheduler_type != STABLE:
        end = kwargs.get("num_decay_steps", end)
    else:
        stable = kwargs.get("num_stable_steps", 0)
        decay = kwargs.get("num_decay_steps", max(end - warmup - stable, 1))
        if "num_stable_steps" in kwargs:
            end = warmup + stable + decay
    judge.expect(
        warmup < end or SCHEDULES[a.lr_scheduler_type] == "constant",
        "warmup_steps lr_scheduler_kwargs max_steps",
        f"{warmup} warm-up steps leave nothing of the {end} steps to decay in",
        "warmup_steps: 0.1, a share of all steps",
        warmup,
    )
    judge.expect(
        decay is None or decay <= end - warmup,
        "lr_scheduler_kwargs warmup_steps max_steps",
        f"it is more than the {end - warmup} steps that {warmup} warm-up steps leave of {end}",
        f"num_decay_steps: {end - warmup}",
        decay,
        "lr_scheduler_kwargs.num_decay_steps",
    )
    return ScheduleSteps(warmup, end, decay)
