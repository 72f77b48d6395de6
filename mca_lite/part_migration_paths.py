"""mcore_adapter's module paths, under this package's name, and its names that have no successor.

`import mca_lite` imports this module, because its finder must be installed before such a path is
imported.
"""

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PATHS = (
    "adapters checkpointing constants initialize models models.auto models.auto.config_auto "
    "models.auto.modeling_auto models.converter models.converter.model_converter "
    "models.converter.post_converter models.model_config models.model_factory parallel_functions "
    "patcher platforms trainer.dpo_config trainer.dpo_trainer trainer.trainer trainer.utils "
    "training_args utils"
).split()
_REMEDIES = {  # names by spaces -> replacement
    "apply_megatron_lora find_all_embedding_modules find_all_linear_modules "
    "find_all_router_modules set_linear_is_expert": (
        "finetuning_type: lora, or in Python part_lora.inject(model, part_lora.LoraSpec())"
    ),
    "generate_model_state_dict get_checkpoint_dir load_state_dict_from_checkpoint": (
        "trainer.save_model(), AutoModel.from_pretrained(), and checkpoints are those of train()"
    ),
    "build_sharded_state_dict_metadata patch_torch_find_nd_overlapping_shards "
    "patch_torch_validate_global_plan": "nothing: checkpoints need no patches",
    "convert_checkpoint_to_hf convert_checkpoint_to_mca ModelConverter": (
        "python -m mca_lite convert SRC DST"
    ),
    "context_parallel_gather": "the trainer's backend.whole_logits()",
    "vocab_parallel_logprobs": "trainer.predict(), or loss_tokens.token_losses()",
    "DistributingParallelArguments": "TrainingArguments, which has its fields",
    "current_platform": "torch's own functions: GPUs with CUDA, or the CPU where there is none",
    "TRACKER_FILENAME DIST_MODEL_DIR DIST_OPTIMIZER_DIR": (
        "nothing: checkpoint-N/dist, in one format for every layout"
    ),
    "get_logger": "logging.getLogger(__name__)",
}


_CONSTANTS = ("ADAPTER_CONFIG_NAME", "IGNORE_INDEX", "MCA_CONFIG_NAME")


def _moved(name: str) -> Any:
    """Look up a name that code written for mcore_adapter takes from one of its modules -> this
    package's object. ImportError, with the replacement, for a name in _REMEDIES, which this package
    does not have; AttributeError for other unknown names."""
    if name == "initialize_megatron":
        return import_module(".parallel", __package__).initialize
    for names, remedy in _REMEDIES.items():
        if name in names.split():
            raise ImportError(f"{name} of mcore_adapter is not in {__package__}: {remedy}")
    home = f"{__package__}.files" if name in _CONSTANTS else __package__
    return getattr(import_module(home), name)


class _MovedModules(Loader):
    """Import finder and loader that lets code import mcore_adapter's module paths, such as
    "models.auto", from this package. Attributes of these modules are looked up by _moved()."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_moved = name in [f"{__package__}.{moved}" for moved in _PATHS]
        return ModuleSpec(name, self, is_package=True) if is_moved else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = _moved


sys.meta_path.append(_MovedModules())
