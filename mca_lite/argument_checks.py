"""The rules that arguments must keep: types, limits, names, and what must agree with what.

Every check returns Problems instead of raising, so that all of a run's problems are shown at once. A check is given
`bad`, the keys that have a problem already: their values were put back to the default, and a rule that involves one of
them says nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import os
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import yaml

# Other people's names for our keys.
ALIASES = {
    "interleave_probs": "mix_weights",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "evaluation_strategy": "eval_strategy",
}

# Keys that are known, and what this version takes for them: (values, what the other values would need). A name that
# ends in * stands for all keys that begin so. A version that learns one of them deletes its row.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "stage": (("pt", "sft"), "preference training"),
    "finetuning_type": (("full",), "training of adapters"),
    "adapter_name_or_path": ((None,), "training of adapters"),
    "neat_packing": ((False,), "packing of samples"),
    "sequence_packing": ((False,), "packing of samples"),
    "context_parallel_size": ((1,), "context parallelism"),
    "expert_model_parallel_size": ((1,), "mixture-of-experts models"),
    "expert_tensor_parallel_size": ((None, 1), "mixture-of-experts models"),
    "num_experts": ((None,), "mixture-of-experts models"),
    "num_moe_experts": ((None,), "mixture-of-experts models"),
    "moe_*": ((None, False), "mixture-of-experts models"),
    "mtp_num_layers": ((None, 0), "multi-token prediction"),
    "multi_latent_attention": ((False,), "multi-latent attention"),
    "quantization_bit": ((None,), "quantised weights"),
    "rope_scaling": ((None,), "rope scaling other than that of the model's config.json"),
    "label_smoothing_factor": ((0, None), "label smoothing"),
    "neftune_noise_alpha": ((None,), "noise on embeddings"),
    "streaming": ((False, None), "data sets that are never read as a whole"),
}

# Keys of LLaMA-Factory and Hugging Face that have no meaning here, and why.
_IGNORED_BY_REASON = {
    "the tokenizer's own chat template is used": "template tool_format",
    "the tokenizer's own is used": "use_fast_tokenizer resize_vocab",
    "training is what train.py does": "do_train",
    "eval_strategy decides it": "do_eval eval_on_start",
    "there is no prediction stage": "do_predict predict_with_generate",
    "transformer_impl decides it": "flash_attn use_unsloth upcast_layernorm torch_compile",
    "loss_chunk_size keeps the logits small": "enable_liger_kernel use_liger_kernel",
    "set recompute_granularity: full": "gradient_checkpointing gradient_checkpointing_kwargs",
    "recompute_granularity decides it": "disable_gradient_checkpointing",
    "torchrun and the parallel keys decide it": "deepspeed fsdp fsdp_config local_rank",
    "nccl with CUDA, gloo without": "ddp_backend use_cpu",
    "every parameter is used in every step": "ddp_find_unused_parameters",
    "there are no buffers to send": "ddp_broadcast_buffers",
    "set ddp_bucket_size, in parameters": "ddp_bucket_cap_mb",
    "chosen by virtual_pipeline_model_parallel_size": "overlap_p2p_comm",
    "calculate_per_token_loss does it": "average_tokens_across_devices",
    "mix_weights decides it": "mix_strategy",
    "cache_dir holds tokenised data": "tokenized_path",
    "one process tokenises for all": "data_shared_file_system preprocessing_batch_size buffer_size",
    "no sample is dropped": "dataloader_drop_last",
    "the data is mapped into memory": "dataloader_prefetch_factor dataloader_persistent_workers dataloader_pin_memory",
    "batches are filled in the order of the data": "group_by_length",
    "logging_steps decides it": "logging_strategy logging_first_step",
    "everything is written to output_dir": "logging_dir",
    "the log shows what was computed": "logging_nan_inf_filter log_level print_param_status",
    "checkpoints go to a file system that all nodes share": "save_on_each_node",
    "no logits are kept": "prediction_loss_only eval_accumulation_steps compute_accuracy",
    "it is always so": "remove_unused_columns save_safetensors include_num_input_tokens_seen ignore_pad_token_for_loss",
    "torch's default holds": "tf32",
    "nothing is generated in training": "use_cache",
    "nothing is uploaded": "push_to_hub push_to_hub_* hub_* hf_hub_token",
    "no stage or finetuning_type of this version reads it": "lora_* pref_* dpo_* ref_model freeze_*",
    "models are text only": "image_* video_* audio_* media_dir train_mm_proj_only",
}
IGNORED_KEYS = {key: reason for reason, keys in _IGNORED_BY_REASON.items() for key in keys.split()}

# What to say about keys that are no keys here although they read like some.
HINTS = {
    "num_layers_per_virtual_pipeline_stage": "virtual_pipeline_model_parallel_size: <layers / (pipeline size x this)>",
    "micro_batch_size": "per_device_train_batch_size",
    "train_iters": "max_steps",
    "lr": "learning_rate",
    "max_length": "cutoff_len",
    "max_seq_length": "cutoff_len",
}

OPTIMIZERS = {"adam": "adam", "adamw_torch": "adam", "adamw_torch_fused": "adam", "sgd": "sgd"}
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
RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm")


class Problem(NamedTuple):
    """One thing that is wrong: the key, the value that came, why it does not work, and what would."""

    key: str
    value: Any
    reason: str
    suggestion: str

    def __str__(self) -> str:
        came = str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)
        return f"{self.key}{'' if self.value is None else f': {came}'}\n    {self.reason}\n    try: {self.suggestion}"


class ConfigError(ValueError):
    """All `problems` of a configuration; its text shows each with key, value, reason and a value that works."""

    def __init__(self, problems: list[Problem]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''} in the configuration:"
        super().__init__("\n\n".join([count, *map(str, self.problems)]))


class ConfigLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice, and reads 1e-5 as a number and 2024-01-31 as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        check_duplicates(node)
        return super().construct_mapping(node, deep)


ConfigLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if not tag.endswith(":timestamp")]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def check_duplicates(node: yaml.MappingNode) -> None:
    """Raises yaml.MarkedYAMLError where a mapping has the same key twice: YAML would take the last without a word."""
    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in seen:
            raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is written twice", problem_mark=key.start_mark)
        seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))


def loads_yaml(text: str) -> Any:
    """A YAML text's value. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=ConfigLoader)


def lookup(table: dict[str, Any], key: str) -> Any:
    """The table's row for a key, exact or by a prefix that ends in *; None where there is none."""
    if key in table:
        return table[key]
    return next((row for name, row in table.items() if name.endswith("*") and key.startswith(name[:-1])), None)


# ---- types and limits of single values


def cast(value: Any, hint: Any) -> Any:
    """`value` as the annotation `hint` wants it: text is read as a number, a truth value, a list (by commas) or a dict
    (JSON or YAML). Raises ValueError with what was expected."""
    if isinstance(value, enum.Enum):
        value = value.value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return None if value is None else cast(value, next(kind for kind in args if kind is not type(None)))
    if origin is Literal:
        # YAML reads a bare no as false, and eval_strategy: no is what everybody writes.
        text = "no" if value is False else str(value).strip().lower()
        if text not in args:
            raise ValueError(f"expected one of {', '.join(args)}")
        return text
    if origin is list:
        return _cast_list(value, args[0])
    if origin is dict:
        return _cast_dict(value)
    return {bool: _cast_bool, int: _cast_int, float: _cast_float, str: _cast_str}[hint](value)


def _cast_list(value: Any, kind: Any) -> list:
    if isinstance(value, str) and value.strip().startswith("["):
        value = _parse(value)
    elif isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    elif not isinstance(value, (list, tuple)):
        value = [value]
    return [cast(item, kind) for item in value]


def _cast_dict(value: Any) -> dict:
    value = _parse(value) if isinstance(value, str) else value
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError('expected a mapping, as YAML or as JSON text such as {"key": 1}')
    return dict(value)


def _parse(text: str) -> Any:
    try:
        return loads_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"expected JSON or YAML text ({error})") from None


def _cast_bool(value: Any) -> bool:
    text = str(value).strip().lower()
    if text in ("true", "yes", "on", "1"):
        return True
    if text in ("false", "no", "off", "0"):
        return False
    raise ValueError("expected true or false")


def _cast_int(value: Any) -> int:
    try:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d+\s*", value):
            return int(value)
        number = _cast_float(value)
    except ValueError:
        raise ValueError("expected a whole number") from None
    if not number.is_integer():
        raise ValueError("expected a whole number")
    return int(number)


def _cast_float(value: Any) -> float:
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError("expected a finite number")


def _cast_str(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ValueError("expected text")


@functools.cache
def type_hints(group_class: type) -> dict[str, Any]:
    """Field name -> annotation, as an object."""
    return typing.get_type_hints(group_class)


def default_of(item: dataclasses.Field) -> Any:
    """A field's default, dataclasses.MISSING where it has none."""
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default


def example(key: str, default: Any, help_text: str) -> str:
    """What to write instead: the key with its default, or what it is where the default is no value."""
    if isinstance(default, bool):
        default = str(default).lower()
    return f"{key}: {default}" if isinstance(default, (str, int, float)) else f"{key}: <{help_text}>"


def cast_fields(group: Any, bad: set[str]) -> list[Problem]:
    """Casts each field of a dataclass object in place; None, and a value that cannot be cast, become the default."""
    problems = []
    hints = type_hints(type(group))
    for item in dataclasses.fields(group):
        if item.name in bad:
            continue
        value, default = getattr(group, item.name), default_of(item)
        if value is None and default is not dataclasses.MISSING:
            value = default
        try:
            setattr(group, item.name, cast(value, hints[item.name]))
        except ValueError as error:
            hint = example(item.name, default, item.metadata.get("help", ""))
            problems.append(Problem(item.name, value, str(error), hint))
            setattr(group, item.name, default)
    return problems


def check_ranges(group: Any, bad: set[str]) -> list[Problem]:
    """Fields against the limits in their metadata (see arguments.arg); a value outside is put back to its default."""
    words = {
        "low": ("at least", lambda value, limit: value >= limit),
        "above": ("more than", lambda value, limit: value > limit),
        "high": ("at most", lambda value, limit: value <= limit),
        "below": ("less than", lambda value, limit: value < limit),
    }
    problems = []
    for item in dataclasses.fields(group):
        value = getattr(group, item.name)
        limits = {name: item.metadata[name] for name in words if name in item.metadata}
        if item.name in bad or value is None or all(words[name][1](value, limit) for name, limit in limits.items()):
            continue
        wanted = " and ".join(f"{words[name][0]} {limit}" for name, limit in limits.items())
        default = default_of(item)
        suggestion = example(item.name, limits.get("low") if default is None else default, item.metadata["help"])
        problems.append(Problem(item.name, value, f"it must be {wanted}", suggestion))
        setattr(group, item.name, default)
    return problems


def unsupported_problem(key: str, value: Any) -> Problem | None:
    """The Problem of a value that this version does not take for a key, None where it does."""
    row = lookup(UNSUPPORTED, key)
    if row is None or value in row[0]:
        return None
    choices = " or ".join(str(choice).lower() for choice in row[0] if choice is not None)
    suggestion = "the key left out" if row[0][0] is None else f"{key}: {choices}"
    return Problem(key, value, f"not in this version: {row[1]}", suggestion)


def check_unsupported(group: Any, bad: set[str]) -> list[Problem]:
    """Fields against UNSUPPORTED; a value that is not taken is put back to its default."""
    problems = []
    for item in dataclasses.fields(group):
        problem = None if item.name in bad else unsupported_problem(item.name, getattr(group, item.name))
        if problem:
            problems.append(problem)
            setattr(group, item.name, default_of(item))
    return problems


# ---- TrainingArguments: normalise, then consistency


class Rule(NamedTuple):
    """A combination that does not work: the keys it involves (the first bears the problem), the test, what is wrong and
    what would work. `a` stands for the arguments in the texts too."""

    keys: str
    broken: Callable[[Any], bool]
    reason: str
    suggestion: str


_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_NOT_FULL = "it belongs to full recomputation, and recompute_granularity is {a.recompute_granularity}"
TRAINING_RULES = (
    Rule("bf16 fp16", lambda a: a.bf16 and a.fp16, "fp16 is on too", "bf16: true and fp16: false"),
    Rule("max_steps", lambda a: a.max_steps == 0, "no step would be taken", "max_steps: -1"),
    Rule(
        f"{_VPP} {_PP} pipeline_model_parallel_layout",
        lambda a: a.virtual_pipeline_model_parallel_size is not None and a.pipeline_model_parallel_size == 1,
        f"virtual stages need a pipeline, and {_PP} is 1",
        f"{_PP}: 2, or {_VPP} left out",
    ),
    Rule(
        f"gradient_accumulation_steps global_batch_size {_VPP} {_PP}",
        lambda a: (
            a.virtual_pipeline_model_parallel_size and a.gradient_accumulation_steps % a.pipeline_model_parallel_size
        ),
        "with virtual stages micro-batches run in groups of {a.pipeline_model_parallel_size}, the pipeline's size",
        "a multiple of {a.pipeline_model_parallel_size} micro-batches a step",
    ),
    Rule(
        "overlap_param_gather use_distributed_optimizer overlap_grad_reduce",
        lambda a: a.overlap_param_gather and not (a.use_distributed_optimizer and a.overlap_grad_reduce),
        "it needs the distributed optimizer and overlap_grad_reduce",
        "use_distributed_optimizer: true and overlap_grad_reduce: true",
    ),
    Rule(
        "expert_model_parallel_size tensor_model_parallel_size sequence_parallel",
        lambda a: min(a.expert_model_parallel_size, a.tensor_model_parallel_size) > 1 and not a.sequence_parallel,
        "experts on several ranks together with tensor parallelism need sequence parallelism",
        "sequence_parallel: true",
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
        lambda a: a.load_best_model_at_end and a.eval_strategy == "steps" and a.save_steps % a.eval_steps,
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
        "only parts of a dense layer can be named",
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
    args.report_to = [name for name in REPORTERS if name in args.report_to or "all" in args.report_to]
    if args.optim not in OPTIMIZERS:
        problems.append(Problem("optim", args.optim, "no such optimizer", f"optim: {', '.join(OPTIMIZERS)}"))
    args.optim = OPTIMIZERS.get(args.optim, "adam")
    if 0 < args.warmup_steps < 1 and args.warmup_ratio == 0:
        args.warmup_steps, args.warmup_ratio = 0, args.warmup_steps
    if not float(args.warmup_steps).is_integer():
        reason = "expected whole steps, or a fraction of all steps without warmup_ratio"
        problems.append(Problem("warmup_steps", args.warmup_steps, reason, "warmup_ratio: 0.1"))
    args.warmup_steps = int(args.warmup_steps)
    if args.warmup_steps > 0 and args.warmup_ratio > 0:
        args.notes.append(f"warmup_ratio {args.warmup_ratio} is not used: warmup_steps is {args.warmup_steps}")
        args.warmup_ratio = 0.0
    args.per_device_eval_batch_size = args.per_device_eval_batch_size or args.per_device_train_batch_size
    if args.eval_strategy == "steps":
        args.eval_steps = args.eval_steps or args.logging_steps
    if args.recompute_granularity == "full":
        args.recompute_method = args.recompute_method or "uniform"
        args.recompute_num_layers = args.recompute_num_layers or 1
    if args.sequence_parallel and args.tensor_model_parallel_size == 1 and "tensor_model_parallel_size" not in bad:
        args.sequence_parallel = False
        args.notes.append("sequence_parallel is switched off: tensor_model_parallel_size is 1")
    return problems + _normalise_layout(args, bad) + _check_additional_configs(args, bad)


def _normalise_layout(args: Any, bad: set[str]) -> list[Problem]:
    key, vpp_key = "pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size"
    problems = []
    if args.pipeline_model_parallel_layout is not None and not bad & {key, vpp_key, "pipeline_model_parallel_size"}:
        layout, pp = args.pipeline_model_parallel_layout.replace(" ", ""), args.pipeline_model_parallel_size
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
        if problem:
            problems.append(problem._replace(key=f"additional_configs.{name}"))
        elif name in own:
            problems.append(Problem(f"additional_configs.{name}", value, "it has a key of its own", f"{name}: {value}"))
    return problems


def check_world(args: Any, bad: set[str]) -> list[Problem]:
    """The parallel degrees against the number of processes."""
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    world, product = args.world_size, args.model_parallel_size
    if world % product == 0 or bad & set(degrees):
        return []
    fitting, rest = [], world
    for name in degrees:
        fitting.append(math.gcd(getattr(args, name), rest))
        rest //= fitting[-1]
    sizes = " x ".join(f"{name.split('_')[0]} {getattr(args, name)}" for name in degrees)
    changes = [(name, size) for name, size in zip(degrees, fitting, strict=True) if size != getattr(args, name)]
    name = next(name for name in degrees if getattr(args, name) > 1)
    reason = (
        f"a copy of the model takes {sizes} = {product} ranks, and the number of processes, {world}, is no multiple"
    )
    lower = ", ".join(f"{name}: {size}" for name, size in changes)
    suggestion = f"a multiple of {product} processes (torchrun --nproc_per_node {product}), or {lower}"
    return [Problem(name, getattr(args, name), reason, suggestion)]


def resolve_batches(args: Any, bad: set[str]) -> list[Problem]:
    """Sets gradient_accumulation_steps, from global_batch_size where that is given."""
    given = args.gradient_accumulation_steps
    args.gradient_accumulation_steps = given or 1
    sizes = {"per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size", "context_parallel_size"}
    sizes |= {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
    if args.global_batch_size is None or bad & sizes:
        return []
    micro, dp, total = args.per_device_train_batch_size, args.data_parallel_size, args.global_batch_size
    unit = micro * dp
    what = f"micro-batch {micro} (per_device_train_batch_size) x data parallel {dp}"
    if total % unit != 0:
        nearest = " or ".join(str(count * unit) for count in (total // unit, total // unit + 1) if count > 0)
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
            problems.append(Problem(keys[0], value, rule.reason.format(a=args), rule.suggestion.format(a=args)))
            bad = bad | {keys[0]}
    return problems + check_scheduler(args, bad)


def check_scheduler(args: Any, bad: set[str]) -> list[Problem]:
    """lr_scheduler_type and its kwargs: names, types, limits; casts the kwargs in place."""
    kind = args.lr_scheduler_type
    if kind not in SCHEDULERS and "lr_scheduler_type" not in bad:
        return [Problem("lr_scheduler_type", kind, "no such schedule", f"lr_scheduler_type: {', '.join(SCHEDULERS)}")]
    problems, values, wsd = [], {}, kind == "warmup_stable_decay"

    def refuse(name: str, reason: str, suggestion: str) -> None:
        problems.append(Problem(f"lr_scheduler_kwargs.{name}", args.lr_scheduler_kwargs.get(name), reason, suggestion))

    for name, value in args.lr_scheduler_kwargs.items():
        key = SCHEDULER_KWARG_ALIASES.get(name, name)
        if key not in SCHEDULER_KWARGS:
            refuse(name, "no schedule takes it", f"any of {', '.join(SCHEDULER_KWARGS)}")
        elif kind.startswith("constant") or (key in ("decay_type", "num_stable_steps") and not wsd):
            refuse(name, f"it has no effect on lr_scheduler_type {kind}", "the key left out")
        elif value is not None:
            try:
                values[key] = cast("minus_sqrt" if value == "1-sqrt" else value, SCHEDULER_KWARGS[key])
            except ValueError as error:
                refuse(name, str(error), "0" if key != "decay_type" else ", ".join(DECAY_TYPES))
    limits = {"min_lr": args.learning_rate, "min_lr_rate": 1.0}
    for key, value in values.items():
        if key != "decay_type" and not 0 <= value <= limits.get(key, value):
            refuse(key, f"it must be at least 0{f' and at most {limits[key]}' if key in limits else ''}", f"{key}: 0")
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


# ---- the pipeline's layout


def layout_stages(layout: str) -> list[str]:
    """The stages of a layout in megatron's syntax, repeats written out: "Et*2|tL" -> ["Ett", "tL"]."""
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):  # groups before single letters, as megatron does
        text = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), text)
    return text.split("|")


def layout_defect(layout: str, pp: int) -> str | None:
    """Why a layout does not work for pp pipeline ranks, whatever the model; None where it does."""
    stages = layout_stages(layout)
    letters = "".join(stages)
    if set(letters) - set("EtL"):
        return (
            f"unknown letters {''.join(sorted(set(letters) - set('EtL')))!r}: E is the embedding, t a layer, L the loss"
        )
    if letters.count("E") != 1 or letters.count("L") != 1 or not letters.startswith("E") or not letters.endswith("L"):
        return "it must begin with the embedding E and end with the loss L, once each"
    if len(stages) % pp != 0:
        return f"its {len(stages)} stages cannot be shared evenly by {pp} pipeline ranks"
    return None


def balanced_layout(num_layers: int, pp: int, vpp: int | None = None) -> str:
    """A layout of pp x vpp stages in megatron's syntax that holds every layer: stages differ by one at most, ranks
    too, and those of the embedding and the loss are the last to get one more. Stage s lies on rank s % pp.

    Raises ValueError where there are fewer layers than stages.
    """
    stages = pp * (vpp or 1)
    if num_layers < stages:
        raise ValueError(
            f"{num_layers} layers cannot fill {stages} stages: set pipeline sizes whose product is at most that"
        )
    counts = [num_layers // stages] * stages
    extra_on_rank = [0] * pp
    free = list(range(stages))

    def cost(stage: int) -> tuple:
        rank = stage % pp
        return extra_on_rank[rank], rank == pp - 1, rank == 0, stage == stages - 1, stage == 0, stage

    for _ in range(num_layers % stages):
        best = min(free, key=cost)
        free.remove(best)
        counts[best] += 1
        extra_on_rank[best % pp] += 1
    texts = ["t" if count == 1 else f"t*{count}" for count in counts]
    return "E" + "|".join(texts) + "L"


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
            Problem(key, tp, f"the model has {' and '.join(uneven)}: no multiple of {tp}", f"{key}: {best}")
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
        return [Problem(layout_key, layout, reason, proposal or f"{layout_key}: <a layout of {layers} layers>")]
    if pp == 1 or (layers >= stages and layers % stages == 0):
        return []
    if layers >= stages:
        key = "virtual_pipeline_model_parallel_size" if vpp and layers % pp == 0 else "pipeline_model_parallel_size"
        reason = f"the model's {layers} layers cannot be shared evenly by {pp} x {vpp or 1} = {stages} stages"
        return [Problem(key, getattr(args, key), reason, proposal)]
    if vpp and layers >= pp:
        key = "virtual_pipeline_model_parallel_size"
        reason = (
            f"it counts chunks on each rank, not layers in a chunk: {pp} x {vpp} stages are more than {layers} layers"
        )
        fits = [chunks for chunks in range(1, min(vpp, layers + 1)) if layers % (chunks * pp) == 0]
        suggestion = f"{key}: {fits[-1]}" if fits else f"{layout_key}: {balanced_layout(layers, pp)} instead of {key}"
        return [Problem(key, vpp, reason, suggestion)]
    key = "pipeline_model_parallel_size"
    return [Problem(key, pp, f"there are more stages than the model's {layers} layers", f"{key}: {layers}")]


def check_data(args: Any, bad: set[str]) -> list[Problem]:
    """DataArguments: what its fields must agree on; a val_size that counts samples becomes an int."""
    weights, problems = args.mix_weights, []
    if not args.dataset and "dataset" not in bad:
        problems.append(Problem("dataset", args.dataset, "it names no data", "dataset: <files or names>"))
    if args.eval_dataset and args.val_size > 0:
        reason = "eval_dataset is given too, and one of them would not be used"
        problems.append(Problem("val_size", args.val_size, reason, "val_size: 0, or eval_dataset left out"))
    elif args.val_size > 1 and not args.val_size.is_integer():
        reason = "expected a fraction below 1 or a whole number of samples"
        problems.append(Problem("val_size", args.val_size, reason, "val_size: 0.05"))
    elif args.val_size >= 1:
        args.val_size = int(args.val_size)
    if args.train_on_prompt and args.mask_history:
        problems.append(Problem("mask_history", True, "train_on_prompt is on too", "one of the two"))
    if weights is None or {"mix_weights", "dataset"} & bad:
        return problems
    if min(weights, default=0) < 0 or not sum(weights):
        reason = "rates must not be negative, and one must be above 0"
        problems.append(Problem("mix_weights", weights, reason, f"mix_weights: {[1.0] * len(args.dataset)}"))
    elif len(weights) != len(args.dataset):
        reason = f"{len(weights)} rates for {len(args.dataset)} datasets"
        problems.append(Problem("mix_weights", weights, reason, f"mix_weights: {[1.0] * len(args.dataset)}"))
    return problems


def check_run(run: Any, bad: set[str]) -> list[Problem]:
    """What the groups must agree on: stage, data and evaluation."""
    data, strategy, problems = run.data, run.training.eval_strategy, []
    if run.finetuning.stage != "pt" and data.packing and not bad & {"packing", "stage"}:
        problems.append(Problem("packing", True, "not in this version: packing for sft", "packing: false"))
    has_data = data.eval_dataset or data.val_size > 0
    if strategy != "no" and not has_data and not bad & {"eval_strategy", "eval_dataset", "val_size"}:
        suggestion = "val_size: 0.05, or eval_dataset: <files>, or eval_strategy: no"
        problems.append(Problem("eval_strategy", strategy, "there is nothing to evaluate on", suggestion))
    return problems
