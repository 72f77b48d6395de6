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
    "Logits": "loss_tokens",
    "McaGPTModel": "model",
    "McaModelConfig": "model_config",
    "McaTrainer": "trainer",
    "MegatronLRScheduler": "optim",
    "MLAMcaModelConfig": "model_config",
    "Seq2SeqTrainingArguments": "args",
    "TrainerCallback": "callbacks",
    "TrainingArguments": "args",
    "VirtualModels": "model",
    "check_pack_seq_aligned": "batch",
    "get_ltor_masks_and_position_ids": "batch",
    "get_megatron_lr_scheduler": "optim",
    "get_seqlens_in_batch": "batch",
    "load_datasets": "data",
    "register_column": "tables",
    "register_loss": "tables",
    "register_objective": "tables",
    "register_optimizer": "tables",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return __all__


# -- the module paths of mcore_adapter, under this package's name

_MOVED = frozenset(
    "adapters checkpointing initialize models models.auto models.auto.config_auto "
    "models.auto.modeling_auto models.converter models.converter.model_converter "
    "models.converter.post_converter models.model_config models.model_factory parallel_functions "
    "patcher trainer.dpo_config trainer.dpo_trainer trainer.trainer trainer.utils training_args "
    "utils".split()
)
_RENAMED = {"initialize_megatron": ("parallel", "initialize")}  # name there -> module, name here
_ADAPTERS = "finetuning_type: lora, or in Python lora.inject(model, lora_layers.LoraSpec())"
_FILES = "trainer.save_model(), AutoModel.from_pretrained(), and checkpoints are those of train()"
_CONVERT = "python -m mca_lite convert SRC DST"
_NO_PATCHES = "nothing: checkpoints need no patches"
_INSTEAD = {
    "apply_megatron_lora": _ADAPTERS,
    "find_all_embedding_modules": _ADAPTERS,
    "find_all_linear_modules": _ADAPTERS,
    "find_all_router_modules": _ADAPTERS,
    "set_linear_is_expert": _ADAPTERS,
    "generate_model_state_dict": _FILES,
    "get_checkpoint_dir": _FILES,
    "load_state_dict_from_checkpoint": _FILES,
    "build_sharded_state_dict_metadata": _NO_PATCHES,
    "patch_torch_find_nd_overlapping_shards": _NO_PATCHES,
    "patch_torch_validate_global_plan": _NO_PATCHES,
    "convert_checkpoint_to_hf": _CONVERT,
    "convert_checkpoint_to_mca": _CONVERT,
    "ModelConverter": _CONVERT,
    "context_parallel_gather": "the trainer's backend.whole_logits()",
    "vocab_parallel_logprobs": "trainer.predict(), or loss_tokens.token_losses()",
    "DistributingParallelArguments": "TrainingArguments, which has its fields",
    "get_logger": "logging.getLogger(__name__)",
}


def _moved(name: str):
    """A name of mcore_adapter's modules. ImportError with what takes its place, where it is not
    here."""
    if name in _INSTEAD:
        raise ImportError(f"{name} of mcore_adapter is not in {__name__}: {_INSTEAD[name]}")
    if name in _RENAMED:
        home, name = _RENAMED[name]
        return getattr(import_module(f".{home}", __name__), name)
    return __getattr__(name)


class _MovedModules(Loader):
    """Finds the modules of _MOVED, which hold the public names."""

    def find_spec(self, name, path=None, target=None):
        path = name.removeprefix(f"{__name__}.")
        is_moved = path in _MOVED and path != name
        return ModuleSpec(name, self, is_package=True) if is_moved else None

    def exec_module(self, module) -> None:
        vars(module)["__getattr__"] = _moved


sys.meta_path.append(_MovedModules())
