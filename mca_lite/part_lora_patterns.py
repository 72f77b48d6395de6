"""Settings of adapters, and PEFT's patterns: ranks and alphas of some modules, and adapters of
experts' stacked parameters.

transformers keeps a layer's experts in two parameters, gate_up_proj [E, 2 f, h] and down_proj
[E, h, f], or both transposed. PEFT's target_parameters can put one adapter on each; gate and up
then share A:

    <layer>.mlp.experts.base_layer.lora_A.weight [E r, h]    of gate_up_proj, expert after expert
    <layer>.mlp.experts.base_layer.lora_B.weight [2 f, r E]  the expert is the last axis
    <layer>.mlp.experts.lora_A.weight, .lora_B.weight        of down_proj

If only one of the two has an adapter, its names have no base_layer. In memory, and in merging,
experts' matrices have names of their own; joined() and singles() translate. Sources: PEFT's
tuners/lora/layer.py, ParamWrapper; utils/other.py, get_pattern_key.

Letters: E experts, r rank, h hidden size, f columns per expert.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from .args_values import check_keys
from .errors import ConfigError, Judge, expect
from .families import LANGUAGE_MODEL
from .finetuning import finetuning_of
from .part_lora_keys import LoraArguments

GATE_UP = "gate_up_proj"
DOWN = "down_proj"
# a single expert's projection -> (transformers' parameter, its place among the parameter's halves)
_PLACES = dict.fromkeys(("gate_proj", "w1"), (GATE_UP, 0))
_PLACES |= dict.fromkeys(("up_proj", "w3"), (GATE_UP, 1))
_PLACES |= dict.fromkeys(("down_proj", "w2"), (DOWN, 0))
_EXPERT = re.compile(r"(.*)\.\w+\.experts\.(\d+)\.(\w+)")
_JOINED = re.compile(r".*\.experts(\.base_layer)?\.lora_[AB]\.weight")
_Value = TypeVar("_Value")


class Place(NamedTuple):
    """The place of one expert's projection in transformers' model, which stacks the matrices of all
    experts of a layer. parameter: the stacked parameter, such as
    "model.layers.0.mlp.experts.gate_up_proj". expert: the expert's index. half: 1 for up; 0 for
    gate and down."""

    parameter: str
    expert: int
    half: int


@functools.cache
def place_of(module: str) -> Place | None:
    """Find a module in transformers' stacked experts: the Place (parameter, expert, half) of a
    Hugging Face module such as "model.layers.0.mlp.experts.3.up_proj"; None for a module that is no
    expert's projection."""
    match = _EXPERT.fullmatch(module)
    if match is None or match[3] not in _PLACES:
        return None
    parameter, half = _PLACES[match[3]]
    return Place(f"{match[1]}.mlp.experts.{parameter}", int(match[2]), half)


def is_named(parameter: str, targets: Iterable[str]) -> bool:
    """True if a parameter's name, or its end after a dot, is one of the names in `targets` (PEFT's
    target_parameters)."""
    return any(f".{parameter}".endswith(f".{target}") for target in targets)


def value_of(patterns: Mapping[str, _Value], name: str, default: _Value) -> _Value:
    """Look up a module's or parameter's name in {regular expression: value}, such as rank_pattern,
    as PEFT does: the value of the first pattern that matches the whole name, or its end after a
    dot. `default` if none matches."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


# -- settings


@dataclass(frozen=True)
class LoraSpec:
    """Settings of a model's LoRA adapters. ConfigError for a rank, alpha, dropout or pattern that
    the keys in LoraArguments would refuse.

    alpha: None means 2 * rank. use_rslora: scale by alpha / sqrt(rank), not alpha / rank.
    targets: module names or patterns, as in the configuration key lora_target.
    modules_to_save: ends of names of modules that are trained whole beside the adapters.
    modules: Hugging Face names of the modules with adapters; part_lora_sites.plan fills them in.
    base_model: name or folder of the frozen model.
    parts: in a model that also reads images, the parts (such as the language model) in which
    targets may match; a target that is a module's whole name matches in any part.
    target_parameters (ends of names of stacked experts' parameters), rank_pattern and alpha_pattern
    ({pattern of names: value}): as in PEFT.
    in_turns: True if rows of gate and up alternate in the experts' parameters, as in gpt_oss;
    part_lora_sites.plan sets it.
    """

    rank: int = 8
    alpha: Any = None  # float; None: 2 * rank
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all",)
    use_rslora: bool = False
    modules_to_save: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    base_model: str | None = None
    parts: tuple[str, ...] = (LANGUAGE_MODEL,)
    target_parameters: tuple[str, ...] = ()
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    in_turns: bool = False

    def __post_init__(self) -> None:
        keys = dict(lora_rank=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout)
        keys |= dict(rank_pattern=self.rank_pattern, alpha_pattern=self.alpha_pattern)
        if problems := check_keys(LoraArguments, **keys):
            raise ConfigError(problems)
        if self.alpha is None:
            object.__setattr__(self, "alpha", 2 * self.rank)

    def __str__(self) -> str:
        modules = self.modules or ("",)
        ranks = ", ".join(map(str, sorted(set(map(self.rank_of, modules)))))
        scales = ", ".join(f"{scale:g}" for scale in sorted(set(map(self.scale_of, modules))))
        return f"LoRA of rank {ranks} on {len(self.modules)} modules, scale {scales}"

    def stacks(self, module: str) -> bool:
        """True if a module is a single expert's projection, and PEFT would put its adapter on the
        parameter that stacks all experts, because target_parameters names that parameter."""
        if not self.target_parameters:
            return False
        place = place_of(module)
        return place is not None and is_named(place.parameter, self.target_parameters)

    def name_in_peft(self, module: str) -> str:
        """The name of a module that PEFT compares with rank_pattern and alpha_pattern: that of the
        stacked parameter if stacks() is True, otherwise the module's own."""
        place = place_of(module)
        return place.parameter if place and self.stacks(module) else module

    def rank_of(self, module: str) -> int:
        """Rank of a module's adapter, by its Hugging Face name."""
        if not self.rank_pattern:
            return self.rank
        return value_of(self.rank_pattern, self.name_in_peft(module), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor on B A x in a module's adapter: alpha / rank, or with use_rslora alpha /
        sqrt(rank), with the module's own alpha and rank."""
        alpha = self.alpha
        if self.alpha_pattern:
            alpha = value_of(self.alpha_pattern, self.name_in_peft(module), alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def spec_of(model: Any) -> Any:
    """The LoraSpec of a model with LoRA adapters; None for other models."""
    return getattr(finetuning_of(model), "spec", None)


def is_saved(module: str, spec: LoraSpec) -> bool:
    """True if this Hugging Face module is trained whole, because its name ends with a name in the
    spec's modules_to_save, as in PEFT.
    """
    return module.endswith(tuple(spec.modules_to_save))


# -- files


def is_joined(name: str) -> bool:
    """True for the name of a tensor in PEFT's files that joins the LoRA matrices of a layer's
    experts."""
    return _JOINED.fullmatch(name) is not None


def _file_names(spec: LoraSpec, modules: Iterable[str]) -> dict[str, str]:
    """The module names that PEFT's file uses for adapters of stacked parameters (those of all
    experts of a layer): {parameter: module name}. modules: Hugging Face modules; single experts'
    projections among them decide which parameters."""
    places = [place_of(module) for module in modules if spec.stacks(module)]
    parameters = dict.fromkeys(place.parameter for place in places if place)
    names = {}
    for parameter in parameters:
        prefix, _, last = parameter.rpartition(".")
        is_inner = last == GATE_UP and f"{prefix}.{DOWN}" in parameters
        names[parameter] = prefix + ".base_layer" * is_inner
    return names


def joined(tensors: Mapping[str, torch.Tensor], spec: LoraSpec) -> dict[str, torch.Tensor]:
    """Convert LoRA matrices from this package's names, one per expert, to PEFT's file, in which the
    matrices of stacked experts are joined -> {name: tensor}. Other matrices keep their names. spec:
    the model's LoraSpec."""
    found = {}
    parts: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    names = _file_names(spec, spec.modules)
    for key, tensor in tensors.items():
        module, _, matrix = key.partition(".lora_")
        place = place_of(module)
        if place is None or not spec.stacks(module):
            found[key] = tensor
            continue
        name = f"{names[place.parameter]}.lora_{matrix}"
        parts.setdefault(name, {})[place.expert, place.half] = tensor
    for name, of_experts in parts.items():
        experts = range(1 + max(expert for expert, _ in of_experts))
        if "lora_A" in name:
            found[name] = torch.cat([of_experts[expert, 0] for expert in experts])
            continue
        whole = []
        for expert in experts:
            halves = [of_experts[key] for key in ((expert, 0), (expert, 1)) if key in of_experts]
            whole.append(torch.stack(halves, int(spec.in_turns)).flatten(0, 1))
        found[name] = torch.stack(whole, -1).flatten(1)
    return found


@functools.lru_cache(maxsize=2)
def _read(slices: Any) -> torch.Tensor:
    return slices[:]


@dataclass(frozen=True)
class _Single:
    """One expert's LoRA matrix, read from the joined matrix of all experts when it is indexed, like
    a safetensors slice. joined: slice of the joined matrix. experts: number of experts. expert:
    index of this one. rows: the outputs to take of a matrix B; None for a matrix A."""

    joined: Any
    experts: int
    expert: int
    rows: slice | None

    def get_shape(self) -> list[int]:
        outputs, inputs = self.joined.get_shape()
        if self.rows is None:
            return [outputs // self.experts, inputs]
        return [len(range(outputs)[self.rows]), inputs // self.experts]

    def __getitem__(self, part: Any) -> torch.Tensor:
        if self.rows is None:
            rank, _ = self.get_shape()
            return self.joined[self.expert * rank : (self.expert + 1) * rank][part]
        return _read(self.joined)[self.rows].unflatten(1, (-1, self.experts))[..., self.expert][
            part
        ]


def singles(slices: Mapping[str, Any], spec: LoraSpec, folder: Any) -> dict[str, Any]:
    """The opposite of joined(): read PEFT's file, in which the LoRA matrices of stacked experts are
    joined, under names with one matrix per expert. slices: {name: slice of the file}; the result
    has the same form. ValueError, naming the folder, if the file's joined matrices are not those
    that the spec's modules need."""
    names = _file_names(spec, spec.modules)
    counts: dict[str, int] = {}
    for one in filter(None, map(place_of, spec.modules)):
        counts[one.parameter] = max(counts.get(one.parameter, 0), one.expert + 1)
    wanted = {f"{name}.lora_{m}.weight" for name in names.values() for m in "AB"}
    differing = wanted ^ set(filter(is_joined, slices))
    expect(
        not differing,
        f"{folder}: {min(differing, default='')} is in the file or in the model, not in both: it "
        "is damaged, or of another model",
    )
    found = {name: stored for name, stored in slices.items() if not is_joined(name)}
    for module in spec.modules:
        place = place_of(module)
        if place is None or place.parameter not in names:
            continue
        a, b = (slices[f"{names[place.parameter]}.lora_{m}.weight"] for m in "AB")
        rows = slice(None)
        outputs, _ = b.get_shape()
        if place.parameter.endswith(GATE_UP) and spec.in_turns:
            rows = slice(place.half, None, 2)
        elif place.parameter.endswith(GATE_UP):
            rows = slice(place.half * outputs // 2, (place.half + 1) * outputs // 2)
        experts = counts[place.parameter]
        found[f"{module}.lora_A.weight"] = _Single(a, experts, place.expert, None)
        found[f"{module}.lora_B.weight"] = _Single(b, experts, place.expert, rows)
    return found


# -- rules


def check_stacked(spec: LoraSpec, modules: Iterable[str], judge: Judge) -> None:
    """Check adapters of experts: add Problems (errors for the user) to `judge` if a name in the
    spec's target_parameters is no experts' parameter of the model, or does not go with other
    settings. Also for settings with which PEFT would apply adapters of single experts in another
    way than this package. modules: Hugging Face modules that can have an adapter."""
    places = [place for place in map(place_of, modules) if place]
    parameters = dict.fromkeys(place.parameter for place in places)
    known = dict.fromkeys(f"mlp.experts.{name.rpartition('.')[2]}" for name in parameters)
    for target in spec.target_parameters:
        judge.expect(
            any(is_named(parameter, [target]) for parameter in parameters),
            "target_parameters",
            "it is no stacked parameter of this model's experts",
            f"{', '.join(known)}, the ends of transformers' names"
            if known
            else "lora_target, which takes linear layers",
            target,
        )
    judge.expect(
        not spec.target_parameters or not spec.dropout,
        "lora_dropout",
        "adapters of parameters, which target_parameters names, have none in PEFT",
        "lora_dropout: 0",
        spec.dropout,
    )
    single = [m for m in spec.modules if place_of(m) and not spec.stacks(m)]
    judge.expect(
        not spec.target_parameters or not single,
        "lora_target",
        f"it means {min(single, default='')}, and target_parameters says which experts' parameters "
        "have adapters",
        "lora_target without experts, or no target_parameters",
        list(spec.targets),
    )
    for key in ("rank_pattern", "alpha_pattern"):
        meant = [m for m in single if value_of(dict.fromkeys(getattr(spec, key), True), m, False)]
        judge.expect(
            not meant,
            key,
            f"it means single experts such as {min(meant, default='')}, whose gate and up PEFT "
            "joins under another name",
            f"target_parameters: mlp.experts.{GATE_UP}, and {key} for {GATE_UP}",
            getattr(spec, key),
        )
    judge.expect(
        not single or not spec.use_rslora or not (spec.rank_pattern or spec.alpha_pattern),
        "use_rslora",
        "PEFT scales adapters of single experts otherwise beside rank_pattern or alpha_pattern",
        "use_rslora: false, or target_parameters for the experts",
        True,
    )


def check_patterns(spec: LoraSpec, judge: Judge) -> None:
    """Add a Problem (an error for the user) to `judge` if a pattern in the spec's rank_pattern or
    alpha_pattern matches no module with an adapter."""
    names = {spec.name_in_peft(module) for module in spec.modules}
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(spec, key):
            judge.expect(
                any(value_of({pattern: True}, name, False) for name in names),
                key,
                "it means no module with an adapter",
                "the end of a module's name such as q_proj, or a regular expression over names",
                pattern,
            )
