"""Aliases, unsupported keys and ignored keys; keys that have an effect are fields in args.py."""

from __future__ import annotations

from typing import Any

# Other people's names for our keys.
ALIASES = {
    "interleave_probs": "mix_weights",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "evaluation_strategy": "eval_strategy",
    "additional_target": "modules_to_save",
    "early_stopping_steps": "early_stopping_patience",
}

# Keys that are known, and what this version takes for them: (values, what others would need). A
# name that ends in * stands for all keys that begin so. A version that learns one deletes its row.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "ref_model_*": ((None,), "a reference with adapters of its own or quantised weights"),
    "pref_bco_weight": ((None, 0, "0.0"), "the loss of a binary classifier"),
    "create_new_adapter": ((None, False), "an adapter on top of another"),
    "use_dora": ((None, False), "weight-decomposed adapters"),
    "pissa_*": ((None, False), "adapters that change the base weights"),
    "loraplus_*": ((None,), "learning rates for each matrix"),
    "num_experts": ((None,), "experts other than those of the model's config.json"),
    "num_moe_experts": ((None,), "experts other than those of the model's config.json"),
    "moe_expert_capacity_factor": (
        (None,),
        "a limit on an expert's tokens: every token reaches its experts",
    ),
    "moe_*": ((None, False), "routing other than that of the model's config.json"),
    "fp8_param": ((None, False), "weights kept in 8 bits: a checkpoint would hold rounded ones"),
    "fp8_dot_product_attention": ((None, False), "attention in 8 bits"),
    "fp8_multi_head_attention": ((None, False), "attention in 8 bits"),
    "fp4*": ((None, False), "4-bit products"),
    "quantization_bit": ((None,), "quantised weights"),
    "rope_scaling": ((None,), "rope scaling other than that of the model's config.json"),
    "label_smoothing_factor": ((0, None), "label smoothing"),
    "neftune_noise_alpha": ((None,), "noise on embeddings"),
    "eval_on_each_dataset": ((None, False), "a loss for each of several evaluation datasets"),
    "new_special_tokens_config": ((None,), "tokens in a file: add_special_tokens lists them"),
    "streaming": ((False, None), "data sets that are never read as a whole"),
}

# Keys of LLaMA-Factory and Hugging Face that have no meaning here, and why.
_IGNORED_BY_REASON = {
    "the model's config.json decides it": "multi_latent_attention",
    "the chat template decides it": "tool_format",
    "the tokenizer's own is used": "use_fast_tokenizer",
    "training is what train.py does": "do_train",
    "eval_strategy decides it": "do_eval eval_on_start",
    "there is no prediction stage": "do_predict predict_with_generate",
    "transformer_impl decides it": "flash_attn use_unsloth upcast_layernorm",
    "loss_chunk_size keeps the logits small": "enable_liger_kernel use_liger_kernel",
    "set recompute_granularity: full": "gradient_checkpointing gradient_checkpointing_kwargs",
    "recompute_granularity decides it": "disable_gradient_checkpointing",
    "torchrun and the parallel keys decide it": "deepspeed fsdp fsdp_config local_rank",
    "nccl with CUDA, gloo without": "ddp_backend use_cpu",
    "every parameter is used in every step": "ddp_find_unused_parameters",
    "there are no buffers to send": "ddp_broadcast_buffers",
    "set ddp_bucket_size, in parameters": "ddp_bucket_cap_mb",
    "chosen by virtual_pipeline_model_parallel_size": "overlap_p2p_comm",
    "calculate_per_token_loss does it": "average_tokens_across_devices",
    "mix_weights decides it": "mix_strategy",
    "cache_dir holds tokenised data": "tokenized_path",
    "one process tokenises for all": "data_shared_file_system preprocessing_batch_size buffer_size",
    "no sample is dropped": "dataloader_drop_last",
    "the data is mapped into memory": "dataloader_prefetch_factor dataloader_persistent_workers "
    "dataloader_pin_memory",
    "batches are filled in the order of the data": "group_by_length",
    "logging_steps decides it": "logging_strategy logging_first_step",
    "everything is written to output_dir": "logging_dir",
    "the log shows what was computed": "logging_nan_inf_filter log_level print_param_status",
    "checkpoints go to a file system that all nodes share": "save_on_each_node",
    "no logits are kept": "prediction_loss_only eval_accumulation_steps compute_accuracy",
    "it is always so": "remove_unused_columns save_safetensors include_num_input_tokens_seen "
    "ignore_pad_token_for_loss",
    "torch's default holds": "tf32",
    "nothing is generated in training": "use_cache",
    "nothing is uploaded": "push_to_hub push_to_hub_* hub_* hf_hub_token",
    "no stage or finetuning_type of this version reads it": "simpo_gamma freeze_*",
    "models are text only": "image_* video_* audio_* media_dir train_mm_proj_only",
}
IGNORED_KEYS = {key: reason for reason, keys in _IGNORED_BY_REASON.items() for key in keys.split()}

# What to say about keys that are no keys here although they read like some.
HINTS = {
    "num_layers_per_virtual_pipeline_stage": "virtual_pipeline_model_parallel_size: "
    "<layers / (pipeline size x this)>",
    "micro_batch_size": "per_device_train_batch_size",
    "train_iters": "max_steps",
    "lr": "learning_rate",
    "max_length": "cutoff_len",
    "max_seq_length": "cutoff_len",
}


def lookup(table: dict[str, Any], key: str) -> Any:
    """The table's row for a key, exact or by a prefix that ends in *; None where there is none."""
    if key in table:
        return table[key]
    return next(
        (row for name, row in table.items() if name.endswith("*") and key.startswith(name[:-1])),
        None,
    )


def unsupported(key: str, value: Any) -> tuple[str, str] | None:
    """Why this version does not take a value for a key, and what to write; None where it does."""
    row = lookup(UNSUPPORTED, key)
    if row is None or value in row[0]:
        return None
    choices = " or ".join(str(choice).lower() for choice in row[0] if choice is not None)
    suggestion = "the key left out" if row[0][0] is None else f"{key}: {choices}"
    return f"not in this version: {row[1]}", suggestion
