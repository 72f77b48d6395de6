"""mca_lite: train Hugging Face models on megatron-core, from one YAML file.

The public names are imported when they are first used, so that `import mca_lite` takes no time.
"""

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec

__version__ = "0.1.0"

_HOME = {
    "AutoConfig": "model_config",
    "AutoModel": "model",
    "DataArguments": "args",
    "DPOConfig": "trainer_dpo",
    "DPOTrainer": "trainer_dpo",
    "Logits": "loss_logits",
    "McaGPTModel": "model",
    "McaModelConfig": "model_config",
    "McaTrainer": "trainer",
    "MegatronLRScheduler": "optim",
    "MLAMcaModelConfig": "model_config",
    "Seq2SeqTrainingArguments": "args",
    "TrainerCallback": "trainer_callbacks",
    "TrainingArguments": "args",
    "VirtualModels": "model",
    "check_pack_seq_aligned": "packed_rows",
    "get_ltor_masks_and_position_ids": "packed_rows",
    "get_megatron_lr_scheduler": "optim",
    "get_seqlens_in_batch": "packed_rows",
    "load_datasets": "data",
    "register_loss": "loss_preference",
    "register_objective": "objectives",
    "register_optimizer": "optimizers",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return __all__


# -- the module paths of mcore_adapter, under this package's name

_MOVED = {"models", "training_args", "trainer.trainer", "trainer.utils"}
_MOVED |= {"trainer.dpo_config", "trainer.dpo_trainer"}


class _MovedModules(Loader):
    """Finds the modules of _MOVED, which hold the public names."""

    def find_spec(self, name, path=None, target=None):
        path = name.removeprefix(f"{__name__}.")
        return ModuleSpec(name, self) if path in _MOVED and path != name else None

    def exec_module(self, module) -> None:
        vars(module)["__getattr__"] = __getattr__


sys.meta_path.append(_MovedModules())
