"""The rules of the learning rate's schedule, and its steps."""

from __future__ import annotations

import math
import re
from typing import Any, Literal, NamedTuple

from .args_values import Judge, cast

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
    kind, wsd = a.lr_scheduler_type, a.lr_scheduler_type == "warmup_stable_decay"
    if kind not in SCHEDULES:
        remedy = f"lr_scheduler_type: {', '.join(SCHEDULES)}"
        judge.refuse("lr_scheduler_type", "no such schedule", remedy)
        return
    given, values, before = dict(a.lr_scheduler_kwargs), {}, len(judge.problems)
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
        _check_schedule_steps(a, schedule_steps(a, a.max_steps), judge)


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


def schedule_steps(a: Any, num_training_steps: int) -> ScheduleSteps:
    """The steps of the schedule of TrainingArguments over so many optimizer steps."""
    kwargs, warmup = a.lr_scheduler_kwargs or {}, warmup_steps(a, num_training_steps)
    if a.lr_scheduler_type == "constant":
        warmup = 0
    stable, decay = kwargs.get("num_stable_steps"), kwargs.get("num_decay_steps")
    if SCHEDULES[a.lr_scheduler_type] != "WSD":
        return ScheduleSteps(warmup, num_training_steps if decay is None else decay, None)
    end = num_training_steps
    if stable is not None:
        rest = max(num_training_steps - warmup - stable, 1)
        end = warmup + stable + (rest if decay is None else decay)
    if decay is None:
        decay = max(end - warmup - (stable or 0), 1)
    return ScheduleSteps(warmup, end, decay)


def warmup_steps(a: Any, num_training_steps: int) -> int:
    """Warm-up in steps, rounded up: warmup_steps, or the share warmup_ratio of all steps."""
    share = a.warmup_ratio
    if 0 < a.warmup_steps < 1:  # a share too, as in transformers 5
        share = a.warmup_steps
    elif a.warmup_steps:
        return int(a.warmup_steps)
    # a share leaves a step to decay in
    return min(math.ceil(share * num_training_steps), max(num_training_steps - 1, 0))


def _check_schedule_steps(a: Any, steps: ScheduleSteps, judge: Judge) -> None:
    warmup, end, decay = steps
    if warmup >= end and SCHEDULES[a.lr_scheduler_type] != "constant":
        reason = f"{warmup} warm-up steps leave nothing of the {end} steps to decay in"
        judge.refuse("warmup_steps lr_scheduler_kwargs", reason, "warmup_ratio: 0.1", warmup)
    elif decay is not None and not 0 <= decay <= end - warmup:
        reason = f"it is not between 0 and the {end - warmup} steps that {warmup} warm-up steps "
        reason += f"leave of {end}"
        name = "lr_scheduler_kwargs.num_decay_steps"
        judge.refuse("lr_scheduler_kwargs", reason, f"num_decay_steps: {end - warmup}", decay, name)


def plan_schedule(a: Any, num_training_steps: int) -> ScheduleSteps:
    """schedule_steps() of a run of that length. ConfigError where they do not fit together."""
    judge, steps = Judge(a), schedule_steps(a, num_training_steps)
    _check_schedule_steps(a, steps, judge)
    judge.close()
    return steps
