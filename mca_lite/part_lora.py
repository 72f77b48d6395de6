"""LoRA as a way to finetune: plan adapters from the keys, put them on a model, read and write them.

`model` is VirtualModels or a transformers model, as in hosts.py.
"""

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from . import parallel, part_lora_files
from .errors import Judge, expect
from .families import FAMILIES, LANGUAGE_MODEL, vision_parts_of
from .files import PathLike, first_of
from .finetuning import Finetuning, Request
from .hosts import host_of, module_of
from .part_lora_files import VALUE_HEAD, AdapterSource, read_adapter
from .part_lora_layers import attach
from .part_lora_patterns import LoraSpec, check_patterns, is_saved, place_of, spec_of
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
    """Finetuning with LoRA adapters beside frozen weights: decides which modules get adapters, and
    puts them on the model.

    spec: a LoraSpec (the adapters' settings); once planned, it names the modules with adapters.
    source: a saved adapter whose tensors place() loads; None: fresh adapters.
    merges: True if the run also exports the merged model at its end."""

    kind = "lora"
    is_whole = False

    def __init__(
        self,
        spec: LoraSpec,
        source: AdapterSource | None = None,
        merges: bool = False,
        base: str = "",
    ):
        """base: text about the frozen weights' format, such as 4-bit, for the start summary; "" for
        none. spec, source, merges: described with the class."""
        self.trained = None
        self.spec = spec
        self.source = source
        self.saved = spec.modules_to_save
        self.merges = merges
        self.base = base

    @classmethod
    def plan(cls, request: Request, judge: Judge) -> "Lora":
        """Decide from a run's configuration which modules get adapters. Returns the Lora, whose
        place() later puts the adapters on the model. No collectives.

        request: the run's arguments and its model. judge: a Judge (collects Problems of the
        configuration); it gets those of adapters that this model cannot have.
        ConfigError or ValueError if adapter_name_or_path has no intact, supported PEFT adapter."""
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
        if source is None:
            check_patterns(spec, judge)
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
        """For a run that adds tokens: train whole the modules with a row per token (embed_tokens,
        and lm_head if the model gives logits), by setting the key modules_to_save. arguments: the
        run's, changed in place. Returns text for the report. If modules_to_save or
        adapter_name_or_path is given, nothing changes, and the text is ""."""
        keys = arguments.parts["lora"]
        if keys.modules_to_save or keys.adapter_name_or_path:
            return ""
        keys.modules_to_save = list(OBJECTIVES[arguments.stage].vocabulary)
        return f"; modules_to_save is {', '.join(keys.modules_to_save)}, which trains them"

    def __str__(self) -> str:
        return f"{self.spec}{self.base}"

    def notes(self, arguments: Any) -> list[str]:
        """Report lines about a run's adapters. arguments: the run's.

        If the run exports a merged model: a line if there is something to say about it, such as for
        a quantised base. Otherwise: a warning that PEFT may ignore some adapters, if the model's
        row in FAMILIES has experts and adapters are on MLPs. PEFT recognises stacked experts by
        module name alone, and so may take dense layers and shared experts for stacked ones."""
        config = arguments.model_config
        family = FAMILIES.get(str(config.get("model_type", config.get("hf_model_type"))))
        has_experts = family is not None and any("[]" in row.mca for row in family.rows)
        is_lost = has_experts and any(map(_OF_MLPS.fullmatch, self.spec.modules))
        if not self.merges:
            return [_EXPERTS_IN_PEFT] * is_lost
        words = part_lora_files.merged_into(config, self.base)
        return [f"save_merged_model: {words}"] * bool(words)

    def place(self, model: Any, seed: int = 42, dtype: torch.dtype = torch.float32) -> Any:
        """Put the planned adapters on a model, in place: freeze its weights, except
        modules_to_save, and add adapters, fresh or from `source`. Returns the model. Collective if
        a saved adapter is loaded.

        seed: for the first values of fresh adapters. dtype: for the frozen weights of a
        transformers model."""
        if self.source is not None:
            return place_adapter(model, self.spec, self.source, dtype)
        return inject(model, self.spec, seed, dtype)

    def trains(self, module: str) -> bool:
        """True if modules_to_save names this module, which is then trained whole. module: its
        Hugging Face name."""
        return is_saved(module, self.spec)

    def without(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Context manager that switches the model's adapters off; its value is the model. Modules
        in modules_to_save keep their trained weights."""
        return without_adapters(model)

    def work_beside(self, module: str, uses: float, shape: tuple[int, ...]) -> float:
        """Multiply-adds per token that a module's LoRA matrices take, to count FLOPs; 0 if the
        module has no adapter.

        module: its Hugging Face name. uses: how often a token is multiplied by the module's weight;
        0 for an embedding, which looks rows up. shape: the weight's, (out, in)."""
        if module not in self.spec.modules:
            return 0.0
        out, into = shape
        if self._shares_a(module):
            into = 0
        # an embedding's A is looked up, not multiplied
        return self.spec.rank_of(module) * (uses * (out + into) if uses else into)

    def _shares_a(self, module: str) -> bool:
        """True for the up projection of an expert if its adapter shares the matrix A with the
        expert's gate projection, because target_parameters names both as one parameter. module:
        Hugging Face name."""
        place = place_of(module)
        return place is not None and place.half == 1 and self.spec.stacks(module)

    def shapes_beside(
        self, module: str, shape: list[int], is_embedding: bool
    ) -> dict[str, tuple[int, int]]:
        """Shapes of a module's own LoRA matrices, by the end of their names: {"lora_A.weight": (r,
        in), "lora_B.weight": (out, r)}, for an embedding {"lora_embedding_A": (r, V / tp),
        "lora_embedding_B": (h, r)}. B alone if A belongs to another module (_shares_a); {} without
        an adapter.

        shape: of the module's weight on this rank, [out, in], for an embedding [V / tp, h]."""
        if module not in self.spec.modules:
            return {}
        rank = self.spec.rank_of(module)
        out, into = shape
        if is_embedding:
            return {"lora_embedding_A": (rank, out), "lora_embedding_B": (into, rank)}
        b = {"lora_B.weight": (out, rank)}
        return b if self._shares_a(module) else {"lora_A.weight": (rank, into), **b}

    def trained_tensors(self, model: Any) -> dict[str, torch.Tensor]:
        return part_lora_files.trained_tensors(model)

    def export_beside(self, model: Any, folder: PathLike) -> list[str]:
        return part_lora_files.save_adapter(model, folder)

    def merger(self, model: Any) -> Change:
        merge = part_lora_files.merger(model)
        if getattr(model.config, "weight_format", None) is None:
            return merge
        read = function_of("part_quantised:base_weights")(model.config)
        return lambda name, weight: merge(name, read(name, weight)).to(weight.dtype)

    def fill_fresh(self, model: Any, source: Callable[..., torch.Tensor]) -> None:
        if self.source is None:
            fill_adapters(model, source)

    def sharded_state(self, chunk: Any) -> dict[str, Any]:
        return sharded_state(chunk)

    def check_checkpoint(self, model: Any, folder: PathLike) -> None:
        part_lora_files.check_checkpoint(model, folder)

    def base_sample(self) -> dict[str, list[float]]:
        """A sample of the frozen base model's weights, by which a resumed run can notice another
        base model: {name: up to 127 values, evenly spaced} of one weight with an adapter, read from
        the base model's files. {} if the files or such a weight are missing."""
        source = original_of(self.spec.base_model)
        if source is not None:
            for name in map("{}.weight".format, self.spec.modules):
                if name in source.names():
                    weight = source.read(name).flatten()
                    return {name: weight[:: max(weight.numel() // 64, 1)].tolist()}
        return {}


def _with_value_head(spec: LoraSpec) -> LoraSpec:
    """A copy of a LoraSpec (the adapters' settings) with the value head among the modules that are
    trained whole, as PEFT has it for task type SEQ_CLS."""
    saved = dict.fromkeys((*spec.modules_to_save, VALUE_HEAD))
    return replace(spec, modules_to_save=tuple(saved))


# -- placing


def inject(model: Any, spec: LoraSpec, seed: int = 42, dtype: torch.dtype = torch.float32) -> Any:
    """Freeze a model, except modules_to_save, and put LoRA adapters on it, in place. Returns the
    model; its attribute `finetuning` is then a Lora.

    Adapters start with PEFT's default distributions. Their values are drawn from `seed` and their
    names, so they are the same in every parallel layout and on both backends. Call inject after
    loading weights and before making a trainer.
    spec: if it has no `modules` yet, they are planned first, with ConfigError for adapters that
    this model cannot have. dtype: for a transformers model's frozen weights. No collectives.
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


def load_adapter(model: Any, folder: PathLike, dropout: float | None = None) -> Any:
    """Put a saved PEFT adapter on a model of either backend, to train it further. Returns the
    model. Collective: call it on every rank.

    dropout: replaces the adapter's dropout; None keeps it. If a rank cannot read the adapter, or if
    it belongs to another model, that rank raises its own error, and the others ValueError.
    """
    problem = None
    try:
        spec, source = read_adapter(folder, dropout)
        judge = Judge(None)
        check_other_model(folder, spec, candidates_of(host_of(model)), judge)
        judge.close()
    except Exception as error:  # raised below, when the other ranks know of it
        problem = error
    answers = parallel.gather(problem is not None)
    if problem:
        raise problem
    failed = [str(rank) for rank, has_failed in enumerate(answers) if has_failed]
    expect(not failed, f"rank {first_of(failed, 8)} cannot load {folder}: see its own error")
    return place_adapter(model, spec, source)


def place_adapter(
    model: Any, spec: LoraSpec, source: AdapterSource, dtype: torch.dtype = torch.float32
) -> Any:
    """Put a saved adapter on a model, in place, and fill it with the saved weights. Returns the
    model. Collective.

    spec: the adapter's settings, already checked. source: reads its files. dtype: for the frozen
    weights of a transformers model. ValueError, on every rank, if the weights do not fit on some
    rank, or if the files have whole weights that are not in modules_to_save."""
    lost = [n for n in sorted(source.whole_weights()) if not is_saved(module_of(n), spec)]
    if lost:  # PEFT stores embedding and head after the vocabulary was resized
        raise ValueError(
            f"{source.folder} contains {lost[0]}, which is not among its modules_to_save and would "
            "be lost in training: merge the adapter into its base first, python -m mca_lite "
            "convert BASE DST --merge"
        )
    inject(model, spec, dtype=dtype)
    host = host_of(model)
    words = f"{source.folder} cannot be loaded"
    parallel.on_all(lambda: source.unjoin(spec_of(model)), ValueError, words)
    parallel.on_all(lambda: fill_adapters(model, source), ValueError, words)
    parallel.on_all(lambda: host.fill(saved_keys(host, spec), source), ValueError, words)
    return model
