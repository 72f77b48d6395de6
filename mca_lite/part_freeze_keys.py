"""Keys of finetuning_type: freeze."""

from dataclasses import dataclass

from .args_rules_training import Need
from .args_values import ArgumentGroup, arg, optional
from .tables import FINETUNING, register_keys


@dataclass(kw_only=True)
class FreezeArguments(ArgumentGroup):
    """Configuration keys that choose the layers and modules to train."""

    freeze_trainable_layers: int = arg(
        2, "freeze: layers in training: the last n, or -n: the first n"
    )
    freeze_trainable_modules: list[str] = arg(
        ["all"], "freeze: modules of these layers in training, such as self_attn, mlp"
    )
    freeze_extra_modules: list[str] | None = optional(
        "freeze: modules outside of layers in training: embed_tokens, norm, lm_head"
    )


_KEYS = "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules"
_NEEDS = (Need(_KEYS, "finetuning_type=freeze", "finetuning_type: freeze"),)

register_keys("freeze", FreezeArguments, needs=_NEEDS, fixed=_KEYS.split())
FINETUNING["freeze"] = "part_freeze:Freeze"
