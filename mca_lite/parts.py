"""The parts of the package: capabilities whose files can be deleted while the rest still trains.

A part may add keys, rules, table rows and trainers. No import statement of the core names a part:
load() imports the modules that register them, such as those ending in _keys. If a part's files are
deleted, its keys are refused by name, unless their values need no part, and so are its values.
"""

import functools
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .errors import Problem, UserError


class Part(NamedTuple):
    """An optional part of the package, whose files may be deleted: one row of PARTS. Each field is
    a text of words separated by spaces.

    modules: its files without ".py"; first those that register keys, rules and table rows when they
    are imported.
    keys: its configuration keys, and key=value for values that it adds to core keys.
    defaults: key:value for the values of its keys that may be set without the part, besides None.
    provides: its rows in CORE_ATTENTIONS, LAYER_TYPES, TENSOR_FORMATS, INPUTS and FAMILIES.
    needs: the parts that it imports."""

    modules: str
    keys: str = ""
    defaults: str = ""
    provides: str = ""
    needs: str = ""


PARTS = {
    # its families are the language models of some with pictures
    "delta": Part(
        "part_delta_families part_delta",
        provides="linear_attention qwen3_next qwen3_5_text qwen3_5_moe_text",
    ),
    "pictures": Part(
        "part_pictures_keys part_pictures_families part_pictures_data part_pictures_model",
        "media_dir image_max_pixels image_min_pixels freeze_vision_tower "
        "freeze_multi_modal_projector freeze_language_model",
        "freeze_vision_tower:true freeze_multi_modal_projector:true freeze_language_model:false",
        provides="pictures qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe glm4v",
    ),
    "video": Part(
        "part_video_keys part_video",
        "video_fps video_maxlen video_max_pixels video_min_pixels",
        "video_fps:2.0 video_maxlen:128 video_max_pixels:65536 video_min_pixels:256",
        needs="pictures",
    ),
    "audio": Part(
        "part_audio_rows part_audio part_audio_model",
        "",
        provides="audio qwen3_omni_moe_thinker",
        needs="video pictures",
    ),
    "freeze": Part(
        "part_freeze_keys part_freeze",
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules "
        "finetuning_type=freeze",
        "freeze_trainable_layers:2 freeze_trainable_modules:all",
    ),
    "lora": Part(
        "part_lora_keys part_lora_patterns part_lora part_lora_files part_lora_rules "
        "part_lora_sites part_lora_layers part_lora_product",
        "lora_rank lora_alpha lora_dropout lora_target use_rslora modules_to_save "
        "adapter_name_or_path save_merged_model target_parameters rank_pattern alpha_pattern "
        "finetuning_type=lora",
        "lora_rank:8 lora_target:all use_rslora:false save_merged_model:false",
    ),
    "quantised": Part(
        "part_quantised_keys part_quantised part_quantised_files part_quantised_adam",
        "quantization_bit quantization_type exp_avg_dtype=8bit exp_avg_sq_dtype=8bit",
        needs="lora",
    ),
    "mtp": Part(
        "part_mtp_rows part_mtp",
        "mtp_num_layers mtp_loss_scaling_factor",
        "mtp_num_layers:0 mtp_loss_scaling_factor:0.1",
    ),
    "transformer_engine": Part(
        "part_transformer_engine_rules part_transformer_engine",
        "fp8 transformer_impl=transformer_engine",
    ),
    "sinks": Part("part_sinks", provides="sinks"),
    "muon": Part("part_muon", "optim=muon"),
    "offload": Part("part_offload", "optimizer_cpu_offload=true"),
    "overlap": Part("part_overlap", "tp_comm_overlap=true"),
    "long": Part(
        "part_long part_long_auto part_long_costs",
        "recompute_granularity=auto recompute_keep=core_attn activation_offloading=true "
        "mlp_chunk_size",
        needs="cudnn",
    ),
    "rope": Part("part_rope_keys", "rope_scaling"),
    "stream": Part(
        "part_stream_keys part_stream", "streaming buffer_size", "streaming:false buffer_size:16384"
    ),
    "stacked": Part("part_stacked", provides="stacked_experts"),
    "scores": Part("part_scores_keys part_scores", "pref_beta ref_model", "pref_beta:0.1"),
    "dpo": Part(
        "part_dpo_keys part_dpo_losses part_dpo",
        "pref_loss pref_loss_weights pref_ftx dpo_label_smoothing simpo_gamma cpo_alpha "
        "discopop_tau f_divergence_type f_alpha_divergence_coef ld_alpha use_weighting stage=dpo",
        "pref_loss:sigmoid pref_ftx:0.0 dpo_label_smoothing:0.0 simpo_gamma:0.5 cpo_alpha:1.0 "
        "discopop_tau:0.05 f_divergence_type:reverse_kl f_alpha_divergence_coef:0.5 "
        "use_weighting:false",
        needs="scores",
    ),
    "kto": Part(
        "part_kto_keys part_kto",
        "kto_chosen_weight kto_rejected_weight stage=kto",
        "kto_chosen_weight:1.0 kto_rejected_weight:1.0",
        needs="dpo scores",
    ),
    "rm": Part(
        "part_rm_keys part_rm",
        "center_rewards_coefficient stage=rm",
        "center_rewards_coefficient:0.0",
        needs="dpo scores",
    ),
    "distill": Part(
        "part_distill_keys part_distill_kernels part_distill",
        "teacher_model_name_or_path teacher_top_k teacher_cache teacher_cache_dtype distill_loss "
        "distill_jsd_mix distill_temperature distill_ce_weight stage=distill",
        "teacher_cache_dtype:float32 distill_loss:forward_kl distill_jsd_mix:0.5 "
        "distill_temperature:1.0 distill_ce_weight:0.0",
        needs="scores",
    ),
    "session": Part("part_session part_session_loss part_session_weights"),
    "policy": Part(
        "part_policy_keys part_policy part_policy_data part_policy_trainer",
        "policy_loss clip_low clip_high dual_clip delta cispo_max tau_pos tau_neg constant kl_coef "
        "kl kl_unbiased entropy_coef with_entropy temperature teacher_coef off_policy_max "
        "scale_rewards sampler_correction sampler_max sampler_min stage=policy stage=grpo "
        "stage=ppo",
        "clip_low:0.2 tau_pos:1.0 tau_neg:1.05 kl_coef:0.0 kl:k3 kl_unbiased:false "
        "entropy_coef:0.0 with_entropy:true temperature:1.0 teacher_coef:1.0 scale_rewards:false "
        "sampler_max:3.0 sampler_min:0.0",
        needs="scores session",
    ),
    "sleep": Part("part_sleep"),
    "triton": Part("part_triton part_triton_moe"),
    "routes": Part("part_routes"),
    "recorder": Part("part_recorder"),
    "cudnn": Part("part_cudnn"),
    "callbacks": Part(
        "part_callbacks",
        "early_stopping_patience profile_steps report_to",
        "report_to: report_to:none",
    ),
    "metrics": Part("part_metrics"),
    "datasets": Part(
        "part_datasets_keys part_datasets", "log_each_dataset", "log_each_dataset:false"
    ),
    "migration": Part("part_migration part_migration_paths"),
}


@functools.cache
def missing() -> dict[str, dict[str, str]]:
    """The optional parts that cannot be used, and why: {part: {the same part, or parts that it
    needs: their missing files, comma-separated}}. Cached."""
    # look into this folder: an import could find a deleted file in another installation
    files = {path.stem for path in Path(__file__).parent.glob("*.py")}
    gone = {}
    for name, part in PARTS.items():
        if lacking := [f"{module}.py" for module in part.modules.split() if module not in files]:
            gone[name] = ", ".join(lacking)
    found = {}
    for name in PARTS:
        if lacking_parts := {part: gone[part] for part in with_needs(name) if part in gone}:
            found[name] = lacking_parts
    return found


def with_needs(name: str) -> list[str]:
    """The name of a part and of all parts that it needs, directly or indirectly."""
    found = [name]
    for part in found:
        found += [need for need in PARTS[part].needs.split() if need not in found]
    return found


def load(*endings: str) -> list[ModuleType]:
    """Import modules of optional parts, which registers their keys, rules and table rows -> the
    modules. endings: modules whose name ends with one of these are imported: "_keys", or a module's
    full name. Parts that cannot be used because files are missing are left out."""
    there = [part for name, part in PARTS.items() if name not in missing()]
    names = [module for part in there for module in part.modules.split()]
    return [import_module(f".{name}", __package__) for name in names if name.endswith(endings)]


@functools.cache
def module_of(name: str) -> ModuleType | None:
    """Import a module of an optional part, such as "part_mtp_rows". None if its part cannot be used
    because files are missing. Cached."""
    return next(iter(load(name)), None)


def need_of(name: str, what: str = "it needs") -> tuple[str, str]:
    """Texts for an error message, if an optional part cannot be used because files are missing ->
    (the reason, the remedy). name: the part. what: the words with which the reason begins, before
    the part's name."""
    lacking = missing()[name]
    files = ", ".join(lacking.values())
    verb = "are" if "," in files else "is"
    reason = f"{what} part {name}, and {files} {verb} not in {Path(__file__).parent}"
    return reason, f"copy {' and '.join(lacking)}'s files from mca_lite"


def missing_modules() -> dict[str, str]:
    """{module of this package: name of its part}, for the parts that cannot be used because files
    of the part, or of a part that it needs, were deleted.
    """
    return {module: name for name in missing() for module in PARTS[name].modules.split()}


def check_module(module: str) -> None:
    """Raise UserError if a module belongs to an optional part that cannot be used because files are
    missing. Without this check an import could find the module in another installation."""
    if module in missing_modules():
        reason, remedy = need_of(missing_modules()[module])
        raise UserError(f"{module}.py: {reason}: {remedy}")


def absent_rows() -> dict[str, str]:
    """Find the rows of tables, such as model families, that are missing because files of the
    optional part that provides them are -> {name of a row: name of its part}. A part is missing too
    if files of a part that it needs are."""
    return {row: name for name in missing() for row in PARTS[name].provides.split()}


def absent_keys() -> dict[str, str]:
    """Find the configuration keys that are missing because files of their optional part, or of a
    part that it needs, are -> {key: name of its part}. Leaves out core keys to which such a part
    only adds values."""
    words = {word: name for name in missing() for word in PARTS[name].keys.split()}
    return {word: name for word, name in words.items() if "=" not in word}


def needed(values: Mapping[str, Any]) -> dict[str, str]:
    """Find the configuration keys in `values` that cannot be used, because they need an optional
    part that is missing -> {key: name of the part}.

    A key needs a part in two cases: the key is the part's, and its value is neither None nor among
    the part's defaults; or the part adds this value to a core key. A part is missing if its files,
    or those of a part that it needs, are not there. values: as written in the configuration, not
    converted, because the missing part may define the types.
    """
    found = {}
    for name in missing():
        defaults = PARTS[name].defaults.split()
        for word in PARTS[name].keys.split():
            key, equals, wanted = word.partition("=")
            names = re.findall(r"[\w.-]+", str(values.get(key)).lower())
            is_set = values.get(key) is not None and f"{key}:{' '.join(names)}" not in defaults
            if wanted in names if equals else is_set:
                found[key] = name
    return found


def absent(values: Mapping[str, Any]) -> list[Problem]:
    """List the configuration keys in `values` that need an optional part whose files are missing ->
    a Problem for each (key, value, reason, remedy), for an error message. See needed()."""
    problems = []
    for key, name in needed(values).items():
        reason, remedy = need_of(name)
        problems.append(Problem(key, values[key], reason, f"{remedy}, or leave the key out"))
    return problems
