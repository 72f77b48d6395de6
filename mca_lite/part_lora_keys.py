"""Keys and rules of adapters, for finetuning_type: lora."""

import re
from dataclasses import dataclass
from typing import Any

from .args_rules_training import Need, harmless_need
from .args_values import ArgumentGroup, amount, arg, count, flag, optional
from .errors import Rule, expect
from .tables import FINETUNING, register_keys

# megatron's names of the modules with a row per token -> those of Hugging Face
_OF_MEGATRON = {"word_embeddings": "embed_tokens", "output_layer": "lm_head"}
PATTERN_KEYS = ("target_parameters", "rank_pattern", "alpha_pattern")


def _check_patterns(patterns: dict[str, Any]) -> None:
    """Check the value of rank_pattern or alpha_pattern, {pattern: number}. ValueError for a pattern
    that is no regular expression, or whose number is not positive."""
    for pattern, number in patterns.items():
        expect(number > 0, f"{pattern}: expected a number above 0, got {number}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern} is no regular expression: {error}") from None


@dataclass(kw_only=True)
class LoraArguments(ArgumentGroup):
    """Configuration keys of LoRA adapters."""

    lora_rank: int = count(8, "rank of the adapters", high=65_536)
    lora_alpha: float | None = optional(
        "adapters are scaled by alpha / rank (None: twice the rank)", above=0
    )
    lora_dropout: float | None = amount(
        None, "dropout on adapters' input (None: 0, or the loaded adapter's)", below=1
    )
    lora_target: list[str] = arg(
        ["all"],
        "all (every linear layer except the head), module names, or patterns",
        words={"all-linear": "all"},  # PEFT's word
    )
    target_parameters: list[str] | None = optional(
        "stacked parameters of experts with one adapter each, such as mlp.experts.gate_up_proj"
    )
    rank_pattern: dict[str, int] | None = optional(
        "another rank for modules, such as {q_proj: 16}: ends of names, or regular expressions",
        check=_check_patterns,
    )
    alpha_pattern: dict[str, float] | None = optional(
        "another alpha for modules, in the form of rank_pattern", check=_check_patterns
    )
    use_rslora: bool = flag("scale adapters by alpha / sqrt(rank)")
    modules_to_save: list[str] | None = optional(
        "modules trained in full beside the adapters, such as lm_head"
    )
    adapter_name_or_path: str | None = optional("folder of a PEFT adapter to train further")
    save_merged_model: bool = flag("also export the merged model, to output_dir/merged")

    def normalise(self) -> None:
        """Rename the embedding and the output layer in modules_to_save, if they have megatron's
        names, to those in Hugging Face's files (embed_tokens, lm_head)."""
        super().normalise()
        if self.modules_to_save:
            ends = [name.rpartition(".")[2] for name in self.modules_to_save]
            pairs = zip(self.modules_to_save, ends, strict=True)
            self.modules_to_save = [_OF_MEGATRON.get(end, name) for name, end in pairs]


_RULES = (
    Rule(
        "adapter_name_or_path !finetuning_type=lora",
        "finetuning_type is not lora, and the adapter would not be used",
        "finetuning_type: lora",
    ),
    Rule(
        "!lora_target !target_parameters finetuning_type=lora",
        "it names no layer",
        "lora_target: all",
    ),
    Rule(
        "optim=muon finetuning_type=lora",
        "Muon makes updates of whole matrices orthogonal, and adapters are factors of them",
        "optim: adam",
    ),
)
_NEEDS = (
    Need(
        "lora_rank lora_alpha lora_target use_rslora lora_dropout",
        "finetuning_type=lora",
        "finetuning_type: lora",
    ),
    harmless_need(
        "modules_to_save save_merged_model target_parameters rank_pattern alpha_pattern",
        "finetuning_type=lora",
        "finetuning_type: lora",
    ),
    harmless_need(
        "lora_rank lora_alpha lora_target use_rslora modules_to_save target_parameters "
        "rank_pattern alpha_pattern",
        "!adapter_name_or_path|!finetuning_type=lora",
        "adapter_name_or_path:",
    ),
)

register_keys("lora", LoraArguments, rules=_RULES, needs=_NEEDS)
FINETUNING["lora"] = "part_lora:Lora"
