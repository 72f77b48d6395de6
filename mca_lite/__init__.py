"""mca_lite: train Hugging Face models on megatron-core, from one YAML file.

The public names are imported at their first use, so that `import mca_lite` loads no torch."""

from importlib import import_module

from .parts import check_module, missing_modules

__version__ = "0.2.0"

_PUBLIC = {  # module -> its public names
    "args": "DataArguments Seq2SeqTrainingArguments TrainingArguments",
    "args_rules_training": "Need",
    "args_values": "ArgumentGroup arg",
    "batch": "check_pack_seq_aligned get_ltor_masks_and_position_ids get_seqlens_in_batch",
    "callbacks": "TrainerCallback",
    "data": "load_datasets",
    "errors": "Rule",
    "loss_tokens": "Logits",
    "model": "AutoModel McaGPTModel VirtualModels",
    "model_config": "AutoConfig MLAMcaModelConfig McaModelConfig",
    "optim": "MegatronLRScheduler get_megatron_lr_scheduler",
    "part_distill": "DistillConfig DistillTrainer",
    "part_dpo": "DPOConfig DPOTrainer",
    "part_dpo_keys": "register_loss",
    "part_kto": "KTOConfig KTOTrainer",
    "part_policy": "group_advantages register_policy_loss sampler_weights",
    "part_policy_trainer": "PolicyConfig PolicyTrainer",
    "part_rm": "RewardConfig RewardTrainer",
    "part_session": "Session",
    "tables": "register_column register_keys register_objective register_optimizer",
    "trainer": "McaTrainer",
}
_HOME = {name: home for home, names in _PUBLIC.items() for name in names.split()}
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
