"""The settings that a checkpoint keeps: which may be others when a run goes on; what is said."""

import json
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from .args_run import FIELDS
from .args_values import default_of, read_config_file
from .ckpt_folder import CheckpointError
from .constants import RUN_CONFIG_NAME

_OF_A_START = {"resume_from_checkpoint", "overwrite_output_dir", "output_dir"}


def settings_of(args) -> dict[str, Any]:
    """The TrainingArguments of a trainer that is made without a file, by their keys."""
    settings = args.to_dict()
    if args.global_batch_size is not None:
        del settings["gradient_accumulation_steps"]  # it follows from the world
    return json.loads(json.dumps(settings, default=str))  # additional_configs may hold objects


def settings_before(record: dict, folder: Path) -> dict[str, Any]:
    """The settings of the run that wrote a checkpoint, {} where nothing tells them. record: its
    training.json; older ones have none, and the run's config.yaml is beside the checkpoint."""
    config = folder.parent / RUN_CONFIG_NAME
    if "settings" in record or not config.is_file():
        return record.get("settings") or {}
    return read_config_file(config)


def refuse_changes(before: dict, now: dict, keys: str, folder: Path) -> None:
    """CheckpointError where one of the keys (by spaces) has another value than before; a key that
    was not kept is passed over."""
    for key in keys.split():
        if key in before and _text(before[key]) != _text(now.get(key)):
            raise CheckpointError(
                f"{folder} was saved with {key} {before[key]}, and this run has {now.get(key)}: "
                "set it back to go on"
            )


def refuse_other_states(before: dict, now: dict, backend: str, folder: Path) -> None:
    """CheckpointError for settings with which the optimizer would not have the states that are
    stored. before, now: settings. backend: megatron or torch."""
    keys = "optim"
    if backend == "torch":
        keys += " exp_avg_dtype exp_avg_sq_dtype"  # of tensors that are taken as they are
    elif before.get("finetuning_type") != "lora":  # whose adapters are float32 in any precision
        if not any(_text(before.get(key)) == "true" for key in ("bf16", "fp16")):
            keys += " bf16 fp16"  # there are no float32 weights beside the model's
    refuse_changes(before, now, keys, folder)


def say_changes(before: dict, now: dict) -> str:
    """A line about the settings that are others than before, "" where none is."""
    changed = []
    for key in sorted((before.keys() | now.keys()) - _OF_A_START if before else ()):
        default = default_of(FIELDS[key]) if key in FIELDS else None
        values = [_text(settings.get(key, default)) for settings in (before, now)]
        if default is not MISSING and values[0] != values[1]:
            changed.append(f"{key} {values[0]} -> {values[1]}")
    if not changed:
        return ""
    return f"note: other values than before, taken from here on: {', '.join(changed)}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
