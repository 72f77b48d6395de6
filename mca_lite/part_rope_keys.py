"""The key rope_scaling: another rotary scaling than config.json's, mostly for rows longer than the
model's positions.
"""

import math
from dataclasses import dataclass
from typing import Any

from .args_values import ArgumentGroup, cast, optional
from .errors import Judge, expect
from .families import needs_file
from .files import text_values
from .tables import register_keys

BEFORE, POSITIONS = "original_max_position_embeddings", "max_position_embeddings"
# rotary type -> the fields that it may have; if the type changes, the model's fields in _KEPT stay
_FIELDS = {
    "linear": "factor rope_theta",
    "llama3": f"factor rope_theta {BEFORE} low_freq_factor high_freq_factor",
    "yarn": f"factor rope_theta {BEFORE} attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim truncate",
    "longrope": f"factor rope_theta {BEFORE} attention_factor short_factor long_factor",
}
_ONE_LENGTH = ("!pipeline_model_parallel_size=1", "!variable_seq_lengths")
_LISTS = ("short_factor", "long_factor")  # of longrope: a factor for each frequency
_KEPT = "rope_theta partial_rotary_factor mrope_section mrope_interleaved llama_4_scaling_beta"
_DEFAULTS = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}
_KINDS: dict[str, Any] = {"truncate": bool, BEFORE: int}
_KINDS |= dict.fromkeys(_LISTS, list[float])


def scale(given: Any, config: dict[str, Any], length: int) -> dict[str, Any]:
    """Change the rotary scaling in the contents of a config.json, in place -> the new rope_type and
    the fields of that type. Except for type linear, max_position_embeddings becomes the scaled
    number of positions, if that is larger.

    given: a mapping like transformers' rope_parameters, or only the name of a type. With only a
    name, the factor is `length` (the number of positions wanted) divided by the model's positions,
    rounded up, and at least 1.
    If the type stays the same, fields that `given` lacks keep the model's values; if it changes,
    only the fields in _KEPT do. _DEFAULTS fill in what is still missing. ValueError for a wrong
    scaling, and for models whose config.json must contain it."""
    text = text_values(config)
    own = text.get("rope_parameters") or text.get("rope_scaling") or {}
    expect(isinstance(own, dict), f"expected a mapping in config.json, got {own!r}")
    own = {name: value for name, value in own.items() if value is not None}
    before = own.pop("type", "default")
    before = own.pop("rope_type", before)
    before = "longrope" if before == "su" else before  # the name in older files of Phi
    why = "the model's config.json has to say it: transformers reads the file itself"
    expect("model_class" not in config and not needs_file(config), why)
    why = "the model's config.json has to say it: kinds of layers differ in their rotary parameters"
    several = any(isinstance(value, dict) for value in own.values())
    expect(not several and "rope_local_base_freq" not in text, why)
    positions = own.get(BEFORE) or text.get(BEFORE) or text.get(POSITIONS) or 0
    if given in (*_FIELDS,):
        why = "the model is scaled already: expected a mapping, with the factor meant"
        expect(before in ("default", "mrope"), why)
        expect(positions, f"config.json has no {POSITIONS}: expected a mapping")
        given = {"rope_type": given, "factor": max(1, math.ceil(length / positions))}
    given = cast(given, dict[str, Any])
    kind = given.pop("type", None)
    kind = given.pop("rope_type", kind)
    expect(kind in (*_FIELDS,), f"expected rope_type {', '.join(_FIELDS)}, got {kind!r}")
    fields = {}
    for name, value in given.items():
        expect(name in _FIELDS[kind].split(), f"{kind} has no {name}, but {_FIELDS[kind]}")
        try:
            fields[name] = cast(value, _KINDS.get(name, float))
        except ValueError as error:
            raise ValueError(f"{name}: {error}, got {value!r}") from None
        least = 1 if name in ("factor", BEFORE) else 0
        numbers = fields[name] if name in _LISTS else [fields[name]]
        expect(
            min(numbers, default=least) >= least,
            f"{name}: expected at least {least}, got {value!r}",
        )
    why = "transformers reads any scaling of phi3 as longrope: expected rope_type longrope, with "
    why += "short_factor and long_factor"
    expect(kind == "longrope" or text.get("model_type") != "phi3", why)
    kept = own if before == kind else {name: own[name] for name in _KEPT.split() if name in own}
    rope = {**_DEFAULTS.get(kind, {}), **kept, **fields, "rope_type": kind}
    if kind == "longrope":
        _check_longrope(rope, text)
    expect("factor" in rope, "expected a factor")
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        wanted = "expected 0 < low_freq_factor < high_freq_factor"
        expect(0 < low < high, f"{wanted}, got {low} and {high}")
    if kind != "linear":  # its factor counts from max_position_embeddings
        original = rope.setdefault(BEFORE, positions)
        expect(original, f"config.json has no {POSITIONS}: expected {BEFORE}")
        text[POSITIONS] = max(text.get(POSITIONS) or 0, int(original * rope["factor"]))
        if BEFORE in text:  # transformers prefers it
            text[BEFORE] = original
    text.pop("rope_scaling", None)
    text["rope_parameters"] = rope
    return {name: rope[name] for name in ("rope_type", *_FIELDS[kind].split()) if name in rope}


def _check_longrope(rope: dict[str, Any], text: dict[str, Any]) -> None:
    """Check the fields of a longrope scaling: ValueError if one of its lists of factors is missing,
    or does not have a number for each of the model's rotary frequencies. If `rope` lacks the field
    factor, it is added, in place: the model's positions divided by its original ones, if both are
    known.

    rope: the scaling's fields. text: the config.json's values for the language model."""
    for name in _LISTS:
        expect(rope.get(name), f"longrope: expected {name}, a number for each frequency")
    rotary = text.get("qk_rope_head_dim")  # of latent attention
    if not rotary:
        head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        part = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0
        rotary = int(head * part)
    count = rotary // 2
    for name in _LISTS:
        got = len(rope[name])
        expect(got == count, f"{name}: expected {count} numbers, one a frequency, got {got}")
    before = rope.get(BEFORE) or text.get(BEFORE)
    if "factor" not in rope and before and text.get(POSITIONS):
        rope["factor"] = text[POSITIONS] / before


@dataclass(kw_only=True)
class RopeArguments(ArgumentGroup):
    """Rotary scaling: the configuration key that replaces the one in the model's config.json."""

    rope_scaling: Any = optional(
        "rotary scaling in place of the model's, saved in exports' config.json: a mapping "
        "{rope_type: yarn, factor: 4.0, ...}, or linear, llama3 or yarn alone, with the factor of "
        "cutoff_len (longrope: with short_factor and long_factor); a reference or teacher in "
        "another folder keeps its own"
    )

    def resolve(self, judge: Judge) -> None:
        """Apply the key rope_scaling, if it is given: write it into the loaded contents of the
        model's config.json, and set the key to the resulting fields. A value that does not suit the
        model is reported to `judge`, which collects configuration errors."""
        super().resolve(judge)
        run = judge.arguments
        config = getattr(run, "model_config", None)
        if not config:
            return
        text = text_values(config)
        given = self.rope_scaling or text.get("rope_parameters") or text.get("rope_scaling")
        if "longrope" in str(given) and all(map(judge.holds, _ONE_LENGTH)):
            self.notes.append(
                "longrope: a pipeline pads all rows of a step to one length, so that one above "
                f"{BEFORE} gives all the long factors: variable_seq_lengths: true avoids it"
            )
        if self.rope_scaling is None:
            return
        try:
            self.rope_scaling = scale(self.rope_scaling, run.model_config, run.cutoff_len)
        except ValueError as error:
            remedy = "rope_scaling: yarn, or a mapping {rope_type: yarn, factor: 4.0}"
            judge.refuse("rope_scaling", str(error), remedy)
            return
        if run.finetuning_type == "lora":
            self.notes.append(
                "rope_scaling: an adapter's files do not hold it: set the same in the config.json "
                "of the base wherever they are used"
            )


register_keys("rope", RopeArguments, fixed=("rope_scaling",))
