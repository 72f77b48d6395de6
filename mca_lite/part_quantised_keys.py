"""Keys and rules of quantised base weights: quantization_bit."""

from dataclasses import dataclass
from typing import Literal

from .args_rules_training import Need
from .args_values import ArgumentGroup, optional
from .errors import Rule
from .tables import register_keys


@dataclass(kw_only=True)
class QuantisedArguments(ArgumentGroup):
    """Quantised base weights."""

    quantization_bit: Literal["4", "8"] | None = optional(
        "keep the frozen weights of linears and experts in 4 or 8 bits, beside adapters",
        words={"true": "4", "false": None},  # values of other trainers' load_in_4bit
    )
    quantization_type: Literal["nf4", "mxfp4"] | None = optional(
        "form of 4 bits; mxfp4: of the experts alone, if there are some (None: mxfp4 if the files "
        "have it, else nf4)"
    )


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
        "quantization_bit=8 quantization_type",
        "it is a form of 4 bits",
        "quantization_bit: 4, or quantization_type left out",
    ),
)

register_keys(
    "quantised",
    QuantisedArguments,
    rules=_RULES,
    needs=(Need("quantization_type", "quantization_bit", "quantization_bit: 4"),),
    fixed=("quantization_bit", "quantization_type"),
)
