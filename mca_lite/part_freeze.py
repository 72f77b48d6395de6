"""finetuning_type: freeze trains some layers and modules of the language model."""

import re
from collections.abc import Iterable

from .errors import Judge, Keys
from .families_rows import VALUE_HEAD
from .finetuning import IN_LAYER, Finetuning
from .hosts import Weight, last_of, module_of


class Freeze(Finetuning):
    """finetuning_type freeze: train the language model's layers and modules that the keys freeze_*
    name, as in LLaMA-Factory, and a value head, if the model has one. Modules are named as in
    Hugging Face models."""

    @classmethod
    def trained_of_language(
        cls, weights: list[Weight], num_layers: int, keys: Keys, judge: Judge
    ) -> set[str]:
        """Choose the language model's modules to train, as the run's keys freeze_* say -> their
        names. A value head, if there is one, is always among them, since it starts from random
        weights. weights: the language model's. num_layers: its number of layers. Keys that do not
        fit the model become Problems in `judge`, which collects the errors of a configuration."""
        named = _named(weights, keys, num_layers, judge)
        # a value head starts from random weights: train it always
        head = module_of(VALUE_HEAD)
        if any(head in weight.modules for weight in weights):
            named.add(head)
        return named


def _named(weights: list[Weight], keys: Keys, num_layers: int, judge: Judge) -> set[str]:
    """Find the language model's modules that the keys freeze_* name -> their full names. If one of
    two modules with a tied weight is named, both are returned. weights: the language model's. Names
    and layer counts that do not fit the model become Problems in `judge`, which collects the errors
    of a configuration."""
    count = keys.freeze_trainable_layers
    judge.expect(
        abs(count) <= num_layers,
        "freeze_trainable_layers",
        f"the model has {num_layers} layers",
        f"freeze_trainable_layers: {num_layers}, or fewer",
    )
    layers = range(num_layers - count, num_layers) if count > 0 else range(-count)
    inner: dict[str, tuple[int, str]] = {}  # module -> (its layer, its name in the layer)
    outer: dict[str, str] = {}
    for module in (module for weight in weights for module in weight.modules):
        match = IN_LAYER.fullmatch(module)
        if match is None:
            outer[module] = last_of(module)
        else:
            inner[module] = (int(match[1]), match[2])
    in_layers = [name for _, name in inner.values()]
    wanted = keys.freeze_trainable_modules
    extras = keys.freeze_extra_modules or []
    _check_names("freeze_trainable_modules", wanted, in_layers, judge)
    _check_names("freeze_extra_modules", extras, outer.values(), judge)
    is_ahead = any(layer >= num_layers for layer, _ in inner.values())
    judge.expect(
        not is_ahead and not any(module.startswith("mtp.") for module in inner),
        "mtp_num_layers",
        "it is not supported together with frozen layers",
        "mtp_num_layers: 0",
    )
    named = {m for m, name in outer.items() if any(_fits(name, wish) for wish in extras)}
    for module, (layer, name) in inner.items():
        if layer in layers and any(_fits(name, wish) for wish in wanted):
            named.add(module)
    tied = {module for weight in weights if weight.is_tied for module in weight.modules}
    if tied & named:  # both names stand for one matrix
        named |= tied
    for weight in weights:
        judge.expect(
            len(named.intersection(weight.modules)) in (0, len(set(weight.modules))),
            "freeze_trainable_modules",
            f"{', '.join(weight.modules)} are one matrix on megatron-core: all of them or none",
            "modules such as self_attn and mlp, or use_mca: false",
        )
    return named


def _fits(name: str, wish: str) -> bool:
    """True if the user's text `wish` means the module `name`, or a module around it: "mlp" means
    "mlp" and "mlp.up_proj". "all" means every module. name: the module's name within its layer; for
    a module outside the layers, the last part of its name."""
    return wish == "all" or f"{name}.".startswith(f"{wish}.")


def _check_names(key: str, wanted: Iterable[str], names: Iterable[str], judge: Judge) -> None:
    """Check that the model has the modules that the user named in a key, and that no name contains
    an index, such as an expert's. For the first wrong one a Problem is added to `judge`, which
    collects the errors of a configuration. key: the configuration key. wanted: the names in it.
    names: the model's modules."""
    names = list(names)
    known = dict.fromkeys(name.partition(".")[0] for name in names)
    for wish in wanted:
        judge.expect(
            any(_fits(name, wish) for name in names) and not re.search(r"\.\d", wish),
            key,
            "the model has no such module in this place",
            f"some of {', '.join(known)}",
            wish,
        )
