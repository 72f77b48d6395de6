"""Aliases, unsupported keys and ignored keys; keys that have an effect are fields in args.py."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

# Other people's names for our keys.
ALIASES = {
    "interleave_probs": "mix_weights",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "evaluation_strategy": "eval_strategy",
    "additional_target": "modules_to_save",
    "early_stopping_steps": "early_stopping_patience",
    "moe_aux_loss_coef": "moe_aux_loss_coeff",
    "router_aux_loss_coef": "moe_aux_loss_coeff",
    "optimizer": "optim",
}

# Switches of other trainers -> the key that each one sets where it is true, and its value.
SWITCHES = dict.fromkeys(
    ("gradient_checkpointing", "activation_checkpointing"), ("recompute_granularity", "full")
)

# Keys that are known and not in this version: (what they would need, the nearest way; "" for the
# key left out) -> the keys. A key takes None, and the value behind its =, which is its default
# elsewhere; without one it takes false, 0 and nothing. A name that ends in * stands for all keys
# that begin so. A version that learns a key takes it out.
_REFUSED_BY_REASON = {
    ("a reference with adapters of its own or quantised weights", ""): "ref_model_*",
    ("the loss of a binary classifier", ""): "pref_bco_weight",
    ("an adapter on top of another", "adapter_name_or_path trains one further"): (
        "create_new_adapter"
    ),
    ("adapters in a folder inside of the adapter's", "adapter_name_or_path: <that folder>"): (
        "adapter_folder"
    ),
    ("weight-decomposed adapters", "use_rslora: true"): "use_dora",
    ("adapters that change the base weights", ""): "pissa_init pissa_convert pissa_iter=16",
    ("learning rates for each matrix", "a higher learning_rate"): (
        "loraplus_lr_ratio loraplus_lr_embedding=1e-6"
    ),
    ("experts other than those of the model's config.json", ""): "num_experts num_moe_experts",
    ("a limit on an expert's tokens: every token reaches its experts", ""): (
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy=probs"
    ),
    (
        "a switch for one module, which has become a list",
        "recompute_granularity: selective, and recompute_modules: moe",
    ): "moe_layer_recompute",
    ("the experts that another engine chose", ""): "moe_enable_routing_replay",
    ("routing other than that of the model's config.json", ""): "moe_*",
    ("weights kept in 8 bits: a checkpoint would hold rounded ones", "fp8: hybrid"): "fp8_param",
    ("attention in 8 bits", "fp8: hybrid"): "fp8_dot_product_attention fp8_multi_head_attention",
    ("4-bit products", "fp8: hybrid"): "fp4*",
    ("another split of the layers", "pipeline_model_parallel_layout, such as Ett|tttL"): (
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage"
    ),
    ("CUDA graphs", ""): "cuda_graph_impl=none cuda_graph_* enable_cuda_graph external_cuda_graph",
    ("quantised weights", "fp8, or finetuning_type: lora in bf16"): "quantization_bit",
    ("rope scaling other than that of the model's config.json", "config.json"): "rope_scaling",
    (
        "label smoothing of tokens (dpo_label_smoothing is that of pairs)",
        "register_objective, with a loss on the logits",
    ): "label_smoothing_factor",
    ("uploads", "hf upload <repository> <output_dir>, after the run"): "push_to_hub",
    (
        "a choice of the device: CUDA is used where it is there",
        "CUDA_VISIBLE_DEVICES= in the environment, which hides GPUs",
    ): "use_cpu",
    ("accuracy of tokens", "predict_with_generate: true, for exact_match"): "compute_accuracy",
    (
        "an export, which trains nothing",
        "python -m mca_lite convert BASE DST --merge ADAPTER, where BASE is model_name_or_path, "
        "DST export_dir and ADAPTER adapter_name_or_path",
    ): "export_dir",
    ("LLaMA-Factory's profiler", "profile_steps: 10-12"): "enable_torch_profiler profile_modules",
    ("a model's divergences other than DPO's", "pref_loss: sigmoid"): (
        "f_divergence_type=reverse_kl f_alpha_divergence_coef=0.5 discopop_tau=0.05 "
        "use_weighting loss_weights"
    ),
    ("a reference that follows the model", "ref_model: model"): (
        "sync_ref_model ref_model_mixup_alpha=0.6 ref_model_sync_steps=512"
    ),
    ("activations in host memory", "recompute_granularity: full"): "activation_offloading",
    ("samples cut at their beginning", "a higher cutoff_len"): "truncation_mode=keep_start",
    ("models and adapters for other tasks", ""): "lora_task_type=causal_lm is_encoder_decoder",
    ("options of other loaders", "the keys that --help lists"): "model_init_kwargs dataset_kwargs",
    ("answers during an evaluation of pairs", "predict_with_generate: true with stage: sft"): (
        "generate_during_eval"
    ),
    ("noise on embeddings", ""): "neftune_noise_alpha",
    ("chat templates with options of their own", ""): "preserve_thinking",
    ("tokens in a file", "add_special_tokens: <the tokens>"): "new_special_tokens_config",
    ("texts cut at special tokens", ""): "split_special_tokens",
    ("layers that transformers does not have so", ""): "shift_attn mixture_of_depths use_llama_pro",
    ("optimizers that are not in the table", "optim: adam, or register_optimizer"): (
        "use_galore use_apollo use_badam use_adam_mini use_muon optim_args optim_target_modules"
    ),
    ("weights and optimizer in 16 bits alone", "bf16: true, exp_avg_dtype: bf16"): "pure_bf16",
    ("losses of tokens with weights of their own", "register_objective"): (
        "use_dft_loss use_asft_loss use_eaft_loss"
    ),
    ("responses weighed by their length", ""): "ld_alpha",
    ("another backend", "use_mca: true, or false for plain torch"): (
        "use_megatron_bridge use_hyper_parallel use_kt use_v1_kernels"
    ),
    ("SwanLab", "report_to: tensorboard or wandb"): "use_swanlab",
    ("batches that are tried out", "a smaller per_device_train_batch_size"): "auto_find_batch_size",
    ("evaluation that begins later", "eval_steps"): "eval_delay",
    ("a resume that begins the data anew", "model_name_or_path: <the checkpoint>"): (
        "ignore_data_skip"
    ),
    ("slow kernels that repeat themselves bit for bit", ""): "full_determinism",
    ("samples in another order", "disable_shuffling: true for that of the file"): (
        "train_sampling_strategy=random sortish_sampler"
    ),
    (
        "a length by this name: TRL's is that of a sample, LLaMA-Factory's that of an answer",
        "cutoff_len for samples, max_new_tokens for answers",
    ): "max_length",
    ("a length of prompt and answer together", "max_new_tokens"): "generation_max_length",
    ("debugging aids of transformers", ""): "debug",
}
# Keys of files that train nothing: what training needs is not asked of these.
NOT_OF_TRAINING = ("export_dir",)


class Refused(NamedTuple):
    """Why a key is not taken, what to write instead, and its default where that is not "off"."""

    reason: str
    remedy: str
    default: str | None


def _refused_keys() -> dict[str, Refused]:
    rows = {}
    for (reason, remedy), keys in _REFUSED_BY_REASON.items():
        for word in keys.split():
            key, equals, default = word.partition("=")
            rows[key] = Refused(reason, remedy, default if equals else None)
    return rows


UNSUPPORTED = _refused_keys()

# Keys of LLaMA-Factory and Hugging Face that have no meaning here, and why.
_IGNORED_BY_REASON = {
    "the model's config.json decides it": "multi_latent_attention",
    "the chat template decides it": "tool_format",
    "the tokenizer's own is used": "use_fast_tokenizer",
    "eval_strategy decides it": "eval_on_start",
    "transformer_impl decides it": "flash_attn use_unsloth upcast_layernorm",
    "loss_chunk_size keeps the logits small": "enable_liger_kernel use_liger_kernel "
    "liger_kernel_config cross_entropy_loss_fusion",
    "recompute_granularity decides it": "gradient_checkpointing_kwargs use_unsloth_gc "
    "activation_checkpointing_kwargs disable_gradient_checkpointing use_reentrant_gc",
    "torchrun starts the ranks": "ray_* placement_strategy resources_per_worker master_addr "
    "master_port",
    "torchrun and the parallel keys decide it": "deepspeed fsdp fsdp_config local_rank "
    "accelerator_config parallelism_config device_map offload_folder low_cpu_mem_usage "
    "fp8_enable_fsdp_float8_all_gather",
    "Transformer Engine computes in 8 bits": "fp8_backend",
    "profile_steps decides it": "profiler_*",
    "overlap_grad_reduce decides it": "delay_grad_reduce",
    "gradients are summed, and divided by the tokens": "ddp_average_in_collective",
    "checkpoints have one format for every layout": "ckpt_format ckpt_d2h_non_blocking "
    "distrib_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient",
    "of reinforcement learning": "compile_warmup ppo_* reward_model*",
    "of stages or adapters that are not in this version": "kto_* module_dropout oft_* asft_alpha "
    "eaft_alpha",
    "of an optimizer that is not in this version": "galore_* apollo_* badam_*",
    "of a backend that is not in this version": "megatron_bridge_args hyper_parallel_* kt_*",
    "quantization_bit decides it": "quantization_method quantization_type "
    "quantization_device_map double_quantization bnb_4bit_* use_bnb_nested_quant",
    "the loss is computed in float32": "upcast_lmhead_output",
    "evaluation has training's precision": "bf16_full_eval fp16_full_eval compute_dtype",
    "a new row begins as the mean of the old ones": "init_special_tokens",
    "cutoff_len decides it": "model_max_length",
    "neat_packing decides it": "block_diag_attn",
    "torch_compile decides it": "torch_compile_*",
    "the allocator keeps its blocks": "torch_empty_cache_steps",
    "report_to decides it": "project trackio_* swanlab_*",
    "a signal saves a checkpoint": "enable_jit_checkpoint",
    "callbacks that keep a state get it back": "restore_callback_states_from_checkpoint",
    "python -m mca_lite convert exports": "export_size export_device export_quantization_* "
    "export_legacy_format export_hub_model_id",
    "nccl with CUDA, gloo without": "ddp_backend",
    "every parameter is used in every step": "ddp_find_unused_parameters ddp_static_graph",
    "there are no buffers to send": "ddp_broadcast_buffers ignore_bias_buffers",
    "set ddp_bucket_size, in parameters": "ddp_bucket_cap_mb",
    "chosen by virtual_pipeline_model_parallel_size": "overlap_p2p_comm",
    "calculate_per_token_loss does it": "average_tokens_across_devices",
    "cache_dir holds tokenised data, and training follows": "tokenized_path",
    "one process tokenises for all": "data_shared_file_system preprocessing_batch_size",
    "no sample is dropped": "dataloader_drop_last",
    "the data is mapped into memory": "dataloader_prefetch_factor dataloader_persistent_workers "
    "dataloader_pin_memory dataloader_multiprocessing_context dataloader_in_order",
    "batches are filled in the order of the data": "group_by_length length_column_name",
    "logging_steps decides it": "logging_strategy logging_first_step",
    "everything is written to output_dir": "logging_dir",
    "the log shows what was computed": "logging_nan_inf_filter log_level log_level_replica "
    "print_param_status log_on_each_node skip_memory_metrics",
    "checkpoints go to a file system that all nodes share": "save_on_each_node",
    "compute_metrics sees what is kept of a whole set": "prediction_loss_only "
    "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object include_for_metrics "
    "batch_eval_metrics",
    "it is always so": "remove_unused_columns save_safetensors include_num_input_tokens_seen "
    "ignore_pad_token_for_loss include_effective_tokens_per_second label_names",
    "float32 products keep their precision: bf16 is faster": "tf32",
    "padding carries no loss": "padding_value pad_to_multiple_of",
    "per_device_eval_batch_size decides it": "precompute_ref_batch_size",
    "answers are generated greedily, by transformers": "use_cache use_kv_cache generation_config "
    "generation_num_beams do_sample temperature top_p top_k num_beams eval_num_beams "
    "repetition_penalty length_penalty skip_special_tokens infer_backend infer_dtype vllm_* "
    "sglang_*",
    "push_to_hub decides it": "push_to_hub_* hub_*",
    "downloads read HF_TOKEN in the environment": "hf_hub_token",
    "models come from folders and the Hugging Face hub": "ms_hub_token om_hub_token",
    "no stage or finetuning_type of this version reads it": "simpo_gamma freeze_*",
    "models are text only": "image_* video_* audio_* media_dir train_mm_proj_only crop_to_patches "
    "use_audio_in_video",
}
IGNORED_KEYS = {key: reason for reason, keys in _IGNORED_BY_REASON.items() for key in keys.split()}

# Values of other trainers that a key does not take: why, and what to write.
FOREIGN_VALUES = {
    "stage": {
        "rm": (
            "a reward model, with a head of its own, is not trained",
            "stage: dpo, which learns from the same pairs without one",
        ),
        "ppo": (
            "reinforcement learning is not in this version",
            "stage: dpo, with pairs of answers",
        ),
        "kto": (
            "KTO, the loss of answers with a label each, is not in this version",
            "stage: dpo, with pairs of answers",
        ),
    },
    "finetuning_type": {
        "freeze": (
            "training some layers alone is not in this version",
            "finetuning_type: lora, with lora_target",
        ),
        "oft": ("orthogonal adapters are not in this version", "finetuning_type: lora"),
    },
    "pref_loss": dict.fromkeys(
        ("simpo", "ipo", "hinge", "kto_pair"),
        ("not in this version", "pref_loss: sigmoid, or register_loss, which adds one"),
    ),
}

_OF_THE_MODEL = "model_name_or_path: <a folder>, whose config.json decides it"
_OF_THE_TOKENIZER = "model_name_or_path: <a folder>, whose tokenizer decides it"
_OF_THE_DATASET = "dataset_dir: <a folder>, whose dataset_info.json has "

# What to say about keys that are no keys here although they read like some.
HINTS = {
    "num_layers_per_virtual_pipeline_stage": "virtual_pipeline_model_parallel_size: "
    "<layers / (pipeline size x this)>",
    "micro_batch_size": "per_device_train_batch_size",
    "train_iters": "max_steps",
    "lr": "learning_rate",
    "use_ref_model": "ref_model",
    # TRL's
    "beta": "pref_beta",
    "loss_type": "pref_loss",
    "label_smoothing": "dpo_label_smoothing",
    "precompute_ref_log_probs": "ref_model: cached",
    "completion_only_loss": "train_on_prompt: false, which is the default",
    "assistant_only_loss": "train_on_prompt: false, which is the default",
    "dataset_name": "dataset",
    "use_peft": "finetuning_type: lora",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_target",
    "lora_modules_to_save": "modules_to_save",
    "rpo_alpha": "pref_ftx",
    "max_prompt_length": "cutoff_len",
    "max_completion_length": "cutoff_len",
    "dataset_num_proc": "preprocessing_num_workers",
    "chat_template_path": "chat_template",
    "dataset_text_field": _OF_THE_DATASET + "columns",
    "packing_strategy": "packing",
    "padding_free": "packing",
    "use_packed_sequences": "packing",
    "dataset_config": _OF_THE_DATASET + "subset",
    "dataset_train_split": _OF_THE_DATASET + "split",
    "dataset_test_split": "eval_dataset: <a name>, with split in dataset_info.json",
    "dataset_streaming": "streaming: true",
    "shuffle_dataset": "disable_shuffling: false, which is the default",
    "lora_target_parameters": "lora_target",
    "eval_packing": "packing",
    "eos_token": _OF_THE_TOKENIZER,
    "pad_token": _OF_THE_TOKENIZER,
    "disable_dropout": "hidden_dropout: 0, attention_dropout: 0",
    "attn_implementation": "transformer_impl",
    "load_in_4bit": "finetuning_type: lora, and bf16: true",
    "load_in_8bit": "finetuning_type: lora, and bf16: true",
    # transformers' run_clm.py
    "train_file": "dataset",
    "validation_file": "eval_dataset",
    "validation_split_percentage": "val_size: 0.05",
    "block_size": "cutoff_len",
    "torch_dtype": "bf16: true",
    "mixed_precision": "bf16: true",
    "dtype": "bf16: true",
    "max_train_samples": "max_samples",
    "max_eval_samples": "max_samples",
    "model_type": _OF_THE_MODEL,
    "config_name": _OF_THE_MODEL,
    "tokenizer_name": _OF_THE_TOKENIZER,
    "dataset_config_name": _OF_THE_DATASET + "subset",
    # megatron's
    "min_lr": "lr_scheduler_kwargs: {min_lr: 1e-6}",
    "lr_decay_style": "lr_scheduler_type",
    "lr_warmup_fraction": "warmup_ratio",
    "lr_warmup_iters": "warmup_steps",
    "seq_length": "cutoff_len",
    "load": "model_name_or_path",
    "save": "output_dir",
    "data_path": "dataset",
    "clip_grad": "max_grad_norm",
    "log_interval": "logging_steps",
    "recompute_activations": "recompute_granularity: selective",
    "use_flash_attn": "transformer_impl",
    "save_interval": "save_steps",
    "eval_interval": "eval_steps",
    "tokenizer_type": _OF_THE_TOKENIZER,
    "num_layers": _OF_THE_MODEL,
    "hidden_size": _OF_THE_MODEL,
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
    text = "" if value is None else str(value).strip().lower()
    if row is None or text in ("", "none", "null", "[]", "{}", row.default):
        return None
    with contextlib.suppress(ValueError):
        if float({"true": 1, "false": 0, "no": 0}.get(text, text)) == float(row.default or 0):
            return None
    return f"not in this version: {row.reason}", row.remedy or "the key left out"
