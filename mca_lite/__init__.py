"""mca_lite: train Hugging Face models on megatron-core, from one YAML file.

The public names are imported at their first use: `import mca_lite` takes no time.
"""

from importlib import import_module

from .parts import check_module, missing_modules

__version__ = "0.2.0"

_HOME = {
    "ArgumentGroup": "args_values",
    "AutoConfig": "model_config",
    "AutoModel": "model",
    "DataArguments": "args",
    "DistillConfig": "part_distill",
    "DistillTrainer": "part_distill",
    "DPOConfig": "part_dpo",
    "DPOTrainer": "part_dpo",
    "KTOConfig": "part_kto",
    "KTOTrainer": "part_kto",
    "Logits": "loss_tokens",
    "McaGPTModel": "model",
    "McaModelConfig": "model_config",
    "McaTrainer": "trainer",
    "MegatronLRScheduler": "optim",
    "MLAMcaModelConfig": "model_config",
    "PolicyConfig": "part_policy_trainer",
    "PolicyTrainer": "part_policy_trainer",
    "RewardConfig": "part_rm",
    "RewardTrainer": "part_rm",
    "Need": "args_rules_training",
    "Rule": "errors",
    "Seq2SeqTrainingArguments": "args",
    "Session": "part_session",
    "TrainerCallback": "callbacks",
    "TrainingArguments": "args",
    "VirtualModels": "model",
    "arg": "args_values",
    "check_pack_seq_aligned": "batch",
    "get_ltor_masks_and_position_ids": "batch",
    "get_megatron_lr_scheduler": "optim",
    "get_seqlens_in_batch": "batch",
    "group_advantages": "part_policy",
    "load_datasets": "data",
    "register_column": "tables",
    "register_keys": "tables",
    "register_loss": "part_dpo_keys",
    "register_objective": "tables",
    "register_optimizer": "tables",
    "register_policy_loss": "part_policy",
    "sampler_weights": "part_policy",
}
__all__ = sorted(name for name, home in _HOME.items() if home not in missing_modules())


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.startswith("register_"):
        import_module(".args", __name__)  # parts have the first choice of names
    check_module(_HOME[name])
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return __all__


if "part_migration_paths" not in missing_modules():
    import_module(".part_migration_paths", __package__)
