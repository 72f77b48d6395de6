"""LoRA as a way to finetune: plan adapters from the keys, put them on a model, read and write them.

`model` is VirtualModels or a transformers model, as in hosts.py.
"""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from . import parallel, part_lora_files
from .errors import Judge
from .families import FAMILIES, LANGUAGE_MODEL, vision_parts_of
from .finetuning import Finetuning, Request
from .hosts import host_of, module_of
from .part_lora_files import VALUE_HEAD, AdapterSource, read_adapter
from .part_lora_layers import LoraSpec, attach, is_saved, spec_of
from .part_lora_rules import check_mergeable, check_new_rows, check_other_model
from .part_lora_sites import (
    candidates_of,
    fill_adapters,
    init_source,
    plan,
    saved_keys,
    sharded_state,
    sites_of,
    without_adapters,
)
from .tables import OBJECTIVES, function_of
from .weights_convert import Change
from .weights_files import original_of

_EXPERTS_IN_PEFT = (
    "note: in families with experts PEFT may pass over adapters of MLPs, or others beside them, "
    "without an error: save_merged_model: true writes whole weights for other programs"
)
_OF_MLPS = re.compile(r".*\.(experts\..*|gate_proj|up_proj|down_proj)")


class Lora(Finetuning):
    """Adapters beside frozen weights.

    spec: the LoraSpec, with its modules. source: tensors of an adapter to train further; None:
    fresh adapters. merges: also export the merged model at the end.
    """

    kind = "lora"
    is_whole = False

    def __init__(
        self,
        spec: LoraSpec,
        source: AdapterSource | None = None,
        merges: bool = False,
        base: str = "",
    ):
        """base: words about the frozen weights' format, for the start summary."""
        self.trained = None
        self.spec = spec
        self.source = source
        self.saved = spec.modules_to_save
        self.merges = merges
        self.base = base

    @classmethod
    def plan(cls, request: Request, judge: Judge) -> "Lora":
        """Plan a run's adapters from its keys; `judge` collects what the model cannot have."""
        arguments = request.arguments
        keys = arguments.parts["lora"]
        objective = OBJECTIVES[arguments.stage]
        host_model = request.host()
        host = host_of(host_model)
        spec, source = part_lora_files.adapter_of_keys(keys)
        if parts := vision_parts_of(host.model_type):
            every = (*parts, LANGUAGE_MODEL)
            free = tuple(part for part in every if not getattr(arguments, f"freeze_{part}"))
            spec = replace(spec, parts=free)
        if objective.scores:
            with_head = _with_value_head(spec)
            judge.expect(
                spec == with_head or not keys.adapter_name_or_path,
                "adapter_name_or_path",
                "it has no value head, so that one drawn at random would stay as it is",
                "model_name_or_path: the model with the adapter in its weights (python -m mca_lite "
                "convert BASE DST --merge)",
            )
            spec = with_head
        if request.num_new:
            ends = objective.vocabulary
            check_new_rows(spec.modules_to_save, request.num_new, ends, host.is_tied, judge)
        if keys.adapter_name_or_path:
            check_other_model(keys.adapter_name_or_path, spec, candidates_of(host), judge)
            if judge.problems:
                return cls(spec, source)
        spec = plan(host_model, spec, judge)
        if keys.save_merged_model:
            check_mergeable(spec, host.is_tied, judge)
        if arguments.predict_with_generate and arguments.use_mca:
            check_mergeable(spec, host.is_tied, judge, "predict_with_generate")
        base = ""
        if arguments.quantization_bit is not None:
            base = function_of("part_quantised:plan_base")(request, spec, judge)
        return cls(spec, source, keys.save_merged_model, base)

    @classmethod
    def take_new_tokens(cls, arguments: Any) -> str:
        """Set modules_to_save, unless it is given, to the modules with one row per token: new rows
        would otherwise stay untrained. -> words for the report.
        """
        keys = arguments.parts["lora"]
        if keys.modules_to_save or keys.adapter_name_or_path:
            return ""
        keys.modules_to_save = list(OBJECTIVES[arguments.stage].vocabulary)
        return f"; modules_to_save is {', '.join(keys.modules_to_save)}, which trains them"

    def __str__(self) -> str:
        return f"{self.spec}{self.base}"

    def notes(self, arguments: Any) -> list[str]:
        """A note that PEFT may ignore some adapters, if the family has experts and adapters are on
        MLPs.

        PEFT recognises stacked experts by module name alone, and then also takes dense layers and
        shared experts for them.
        """
        family = FAMILIES.get(str(arguments.model_config.get("model_type")))
        has_experts = family is not None and any("[]" in row.mca for row in family.rows)
        is_lost = has_experts and any(map(_OF_MLPS.fullmatch, self.spec.modules))
        return [_EXPERTS_IN_PEFT] if is_lost and not self.merges else []

    def place(self, model: Any, seed: int = 42, dtype: torch.dtype = torch.float32) -> Any:
        """Freeze the model and put the planned adapters on it -> the model. seed: for fresh
        adapters. dtype: of a transformers model's frozen weights.
        """
        if self.source is not None:
            return place_adapter(model, self.spec, self.source, dtype)
        return inject(model, self.spec, seed, dtype)

    def trains(self, module: str) -> bool:
        """True if the module's whole weights are trained (modules_to_save)."""
        return is_saved(module, self.spec)

    def without(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Context in which the adapters are off."""
        return without_adapters(model)

    def work_beside(self, module: str, uses: float, shape: tuple[int, ...]) -> float:
        """Multiplications per token for the module's adapter matrices. uses: how often the module's
        weight multiplies each token; 0: rows are looked up. shape: the weight's.
        """
        if module not in self.spec.modules:
            return 0.0
        # an embedding's A is looked up, not multiplied
        return self.spec.rank * (uses * sum(shape) if uses else shape[1])

    def shapes_beside(
        self, module: str, shape: list[int], is_embedding: bool
    ) -> dict[str, tuple[int, int]]:
        """{name ending: shape} of the module's adapter matrices. shape: this rank's shard of the
        matrix.
        """
        if module not in self.spec.modules:
            return {}
        rank = self.spec.rank
        out, into = shape
        if is_embedding:
            return {"lora_embedding_A": (rank, out), "lora_embedding_B": (into, rank)}
        return {"lora_A.weight": (rank, into), "lora_B.weight": (out, rank)}

    def trained_tensors(self, model: Any) -> dict[str, torch.Tensor]:
        return part_lora_files.trained_tensors(model)

    def export_beside(self, model: Any, folder: str | os.PathLike[str]) -> list[str]:
        return part_lora_files.save_adapter(model, folder)

    def merger(self, model: Any) -> Change:
        merge = part_lora_files.merger(model)
        if getattr(model.config, "weight_format", None) is None:
            return merge
        read = function_of("part_quantised:base_weights")(model.config)
        return lambda name, weight: merge(name, read(name, weight))

    def fill_fresh(self, model: Any, source: Callable[..., torch.Tensor]) -> None:
        if self.source is None:
            fill_adapters(model, source)

    def sharded_state(self, chunk: Any) -> dict[str, Any]:
        return sharded_state(chunk)

    def check_checkpoint(self, model: Any, folder: str | os.PathLike[str]) -> None:
        part_lora_files.check_checkpoint(model, folder)

    def base_sample(self) -> dict[str, list[float]]:
        """{weight: some of its values} for the first module with an adapter, from the base's files;
        {} if these are gone.
        """
        source = original_of(self.spec.base_model)
        if source is not None:
            for name in map("{}.weight".format, self.spec.modules):
                if name in source.names():
                    weight = source.read(name).flatten()
                    return {name: weight[:: max(weight.numel() // 64, 1)].tolist()}
        return {}


def _with_value_head(spec: LoraSpec) -> LoraSpec:
    """The spec with the value head added to modules_to_save, as PEFT does for SEQ_CLS."""
    saved = dict.fromkeys((*spec.modules_to_save, VALUE_HEAD))
    return replace(spec, modules_to_save=tuple(saved))


# -- placing


def inject(model: Any, spec: LoraSpec, seed: int = 42, dtype: torch.dtype = torch.float32) -> Any:
    """Freeze a model and put adapters on it -> the model, whose `finetuning` is then a Lora.

    Adapters start as in PEFT, drawn from `seed` and their names: the same in every layout and on
    both backends. Call it after loading weights and before making a trainer. A spec from plan() is
    used as it is; any other is planned first.
    dtype: of a transformers model's frozen weights. No collectives. ConfigError as in plan();
    ValueError if the model already has adapters.
    """
    if spec_of(model) is not None:
        raise ValueError("this model has adapters already: load it anew to give it others")
    host = host_of(model)
    if not spec.modules:
        spec = plan(model, spec)
    spec = replace(spec, base_model=host.base_model)
    host.freeze(saved_keys(host, spec), dtype)
    chosen = set(spec.modules)
    for site in sites_of(host):
        names = tuple(of_one if chosen.issuperset(of_one) else () for of_one in site.names)
        if any(names):
            attach(site.module, site.kind(spec, names, **site.arguments), site.way)
    model.finetuning = Lora(spec)
    fill_adapters(model, init_source(seed))
    return model


def load_adapter(model: Any, folder: str | os.PathLike[str], dropout: float | None = None) -> Any:
    """Put a saved adapter on a model of either backend, to train it further -> the model.

    dropout: replaces the adapter's; None keeps it. Every rank must call it. Collective. ValueError,
    on every rank, if the adapter belongs to another model.
    """
    spec, source = read_adapter(folder, dropout)
    judge = Judge(None)
    check_other_model(folder, spec, candidates_of(host_of(model)), judge)
    judge.close()
    return place_adapter(model, spec, source)


def place_adapter(
    model: Any, spec: LoraSpec, source: AdapterSource, dtype: torch.dtype = torch.float32
) -> Any:
    """Put a checked adapter on a model -> the model. dtype: of a transformers model's frozen
    weights. Collective. ValueError, on every rank, if the adapter's weights do not fit.
    """
    lost = [n for n in sorted(source.whole_weights()) if not is_saved(module_of(n), spec)]
    if lost:  # PEFT stores embedding and head after the vocabulary was resized
        raise ValueError(
            f"{source.folder} brings its own {lost[0]}, which is not among its modules_to_save: it "
            "would be lost in training; put the adapter into its base first, python -m mca_lite "
            "convert BASE DST --merge"
        )
    inject(model, spec, dtype=dtype)
    host = host_of(model)
    words = f"{source.folder} cannot be loaded"
    parallel.on_all(lambda: fill_adapters(model, source), ValueError, words)
    parallel.on_all(lambda: host.fill(saved_keys(host, spec), source), ValueError, words)
    return model
