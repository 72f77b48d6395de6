"""Keys and rules of quantised base weights and of 8-bit optimizer states."""

from dataclasses import dataclass
from typing import Literal

from .args_rules_training import Need
from .args_values import ArgumentGroup, optional
from .errors import Judge, Rule
from .tables import MEANINGS, register_keys


@dataclass(kw_only=True)
class QuantisedArguments(ArgumentGroup):
    """Configuration keys for quantised base weights: the frozen weights are kept in 4 or 8 bits
    while adapters are trained."""

    quantization_bit: Literal["4", "8"] | None = optional(
        "keep the frozen weights of linears and experts in 4 or 8 bits, beside adapters",
        words={"true": "4", "false": None},  # values of other trainers' load_in_4bit
    )
    quantization_type: Literal["nf4", "mxfp4"] | None = optional(
        "form of 4 bits; mxfp4: of the experts alone, if there are some (None: mxfp4 if the files "
        "have it, else nf4)"
    )

    def resolve(self, judge: Judge) -> None:
        """Choose layers that can hold quantised weights: if quantization_bit is set, change
        transformer_impl from auto to local. `judge` has the run's arguments, and collects errors.
        """
        super().resolve(judge)
        training = getattr(judge.arguments, "training", None)
        if self.quantization_bit and training and training.transformer_impl == "auto":
            training.transformer_impl = "local"  # only their linears hold quantised weights


_RULES = (
    Rule(
        "quantization_bit !finetuning_type=lora",
        "quantised weights are frozen, and finetuning_type is not lora",
        "finetuning_type: lora",
    ),
    Rule(
        "quantization_bit !use_mca",
        "plain torch has no quantised weights",
        "use_mca: true, or quantization_bit left out",
    ),
    Rule(
        "quantization_bit transformer_impl=transformer_engine|fp8",
        "Transformer Engine's linears cannot hold quantised weights",
        "transformer_impl: local, and fp8 left out",
    ),
    Rule(
        "exp_avg_dtype=8bit|exp_avg_sq_dtype=8bit !use_mca",
        "plain torch's checkpoints have no moments in 8 bits",
        "use_mca: true, or bf16",
    ),
    Rule(
        "quantization_bit=8 quantization_type",
        "it is a form of 4 bits",
        "quantization_bit: 4, or quantization_type left out",
    ),
)

_8BIT = {"optim": "adam", "exp_avg_dtype": "8bit", "exp_avg_sq_dtype": "8bit"}
# transformers' names of 8-bit optimizers
_NAMES = "adamw_8bit adamw_bnb_8bit adamw_torch_8bit paged_adamw_8bit"
MEANINGS.update((f"optim={name}", _8BIT) for name in _NAMES.split())
MEANINGS["load_in_8bit=true"] = {"quantization_bit": 8}
# axolotl's key for adapters on a quantised base
MEANINGS["adapter=qlora"] = {"finetuning_type": "lora", "quantization_bit": 4}
register_keys(
    "quantised",
    QuantisedArguments,
    rules=_RULES,
    needs=(Need("quantization_type", "quantization_bit", "quantization_bit: 4"),),
    fixed=("quantization_bit", "quantization_type"),
)
