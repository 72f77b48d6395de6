"""Keys and rules of adapters, for finetuning_type: lora."""

from dataclasses import dataclass

from .args_rules_training import Need, harmless_need
from .args_values import ArgumentGroup, amount, arg, count, flag, optional
from .errors import Rule
from .tables import FINETUNING, register_keys

ON_ADAPTERS = "it is not supported together with adapters"


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
    use_rslora: bool = flag("scale adapters by alpha / sqrt(rank)")
    modules_to_save: list[str] | None = optional(
        "modules trained in full beside the adapters, such as lm_head"
    )
    adapter_name_or_path: str | None = optional("folder of a PEFT adapter to train further")
    save_merged_model: bool = flag("also export the merged model, to output_dir/merged")


_RULES = (
    Rule(
        "adapter_name_or_path !finetuning_type=lora",
        "finetuning_type is not lora, and the adapter would not be used",
        "finetuning_type: lora",
    ),
    Rule("!lora_target finetuning_type=lora", "it names no layer", "lora_target: all"),
    Rule("mtp_num_layers finetuning_type=lora", ON_ADAPTERS, "mtp_num_layers: 0"),
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
        "modules_to_save save_merged_model", "finetuning_type=lora", "finetuning_type: lora"
    ),
    harmless_need(
        "lora_rank lora_alpha lora_target use_rslora modules_to_save",
        "!adapter_name_or_path|!finetuning_type=lora",
        "adapter_name_or_path:",
    ),
)

register_keys("lora", LoraArguments, rules=_RULES, needs=_NEEDS)
FINETUNING["lora"] = "part_lora:Lora"
