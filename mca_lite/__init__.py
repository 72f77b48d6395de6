"""mca_lite: train Hugging Face models on megatron-core, from one YAML file.

The public names are imported at their first use: `import mca_lite` takes no time.
"""

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec

__version__ = "0.1.0"

_HOME = {
    "ArgumentGroup": "args_values",
    "AutoConfig": "model_config",
    "AutoModel": "model",
    "DataArguments": "args",
    "DistillConfig": "trainer_distill",
    "DistillTrainer": "trainer_distill",
    "DPOConfig": "trainer_dpo",
    "DPOTrainer": "trainer_dpo",
    "KTOConfig": "trainer_kto",
    "KTOTrainer": "trainer_kto",
    "Logits": "loss_tokens",
    "McaGPTModel": "model",
    "McaModelConfig": "model_config",
    "McaTrainer": "trainer",
    "MegatronLRScheduler": "optim",
    "MLAMcaModelConfig": "model_config",
    "RewardConfig": "trainer_rm",
    "RewardTrainer": "trainer_rm",
    "Need": "args_rules_training",
    "Rule": "errors",
    "Seq2SeqTrainingArguments": "args",
    "TrainerCallback": "callbacks",
    "TrainingArguments": "args",
    "VirtualModels": "model",
    "arg": "args_values",
    "check_pack_seq_aligned": "batch",
    "get_ltor_masks_and_position_ids": "batch",
    "get_megatron_lr_scheduler": "optim",
    "get_seqlens_in_batch": "batch",
    "load_datasets": "data",
    "register_column": "tables",
    "register_keys": "tables",
    "register_loss": "part_dpo_keys",
    "register_objective": "tables",
    "register_optimizer": "tables",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.startswith("register_"):
        import_module(".args", __name__)  # parts have the first choice of names
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return __all__


# -- the module paths of mcore_adapter, under this package's name, and its names without a successor

_PATHS = (
    "adapters checkpointing initialize models models.auto models.auto.config_auto "
    "models.auto.modeling_auto models.converter models.converter.model_converter "
    "models.converter.post_converter models.model_config models.model_factory parallel_functions "
    "patcher trainer.dpo_config trainer.dpo_trainer trainer.trainer trainer.utils training_args "
    "utils"
).split()
_REMEDIES = {  # names by spaces -> replacement
    "apply_megatron_lora find_all_embedding_modules find_all_linear_modules "
    "find_all_router_modules set_linear_is_expert": (
        "finetuning_type: lora, or in Python lora.inject(model, lora_layers.LoraSpec())"
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
    "get_logger": "logging.getLogger(__name__)",
}


def _moved(name: str):
    """A name of mcore_adapter's modules. ImportError with its replacement, if it is not here."""
    if name == "initialize_megatron":
        return import_module(".parallel", __name__).initialize
    for names, remedy in _REMEDIES.items():
        if name in names.split():
            raise ImportError(f"{name} of mcore_adapter is not in {__name__}: {remedy}")
    return __getattr__(name)


class _MovedModules(Loader):
    """Finder and loader of the modules of _PATHS, with the public names as attributes."""

    def find_spec(self, name, path=None, target=None):
        is_moved = name in [f"{__name__}.{moved}" for moved in _PATHS]
        return ModuleSpec(name, self, is_package=True) if is_moved else None

    def exec_module(self, module) -> None:
        vars(module)["__getattr__"] = _moved


sys.meta_path.append(_MovedModules())
