"""Keys and names of other trainers: aliases, ignored keys, refused keys, chat templates."""

import json

from .tables import (
    ALIASES,
    BUILT_IN_FOR,
    FOREIGN_KEYS,
    MEANINGS,
    NOT_OF_TRAINING,
    ForeignKey,
    refuse_taken,
)

# another trainer's key=this package's key
_SAME = """
interleave_probs=mix_weights
accumulate_allreduce_grads_in_fp32=grad_reduce_in_fp32
evaluation_strategy=eval_strategy
additional_target=modules_to_save
early_stopping_steps=early_stopping_patience
moe_aux_loss_coef=moe_aux_loss_coeff
router_aux_loss_coef=moe_aux_loss_coeff
optimizer=optim
muon_num_ns_steps=muon_ns_steps
muon_use_nesterov=muon_nesterov
full_determinism=deterministic
loss_type=pref_loss
loss_weights=pref_loss_weights
rpo_alpha=pref_ftx
desirable_weight=kto_chosen_weight
undesirable_weight=kto_rejected_weight
deterministic_mode=deterministic
gradient_checkpointing=recompute_granularity
activation_checkpointing=recompute_granularity
lora_r=lora_rank
load_in_4bit=quantization_bit
bnb_4bit_quant_type=quantization_type
lora_target_modules=lora_target
lora_target_parameters=target_parameters
lora_rank_pattern=rank_pattern
lora_alpha_pattern=alpha_pattern
lora_modules_to_save=modules_to_save
label_smoothing=dpo_label_smoothing
dataset_name=dataset
dataset_num_proc=preprocessing_num_workers
dataset_streaming=streaming
test_split_size=val_size
chat_template_path=chat_template
""".split()
ALIASES.update(dict(pair.split("=") for pair in _SAME))

# Known keys without support. Each paragraph: the missing feature, the nearest way, the keys. None
# is accepted, and so is the other trainer's default, written after =; without = a value of _OFF.
# A * at the end matches every ending.
_REFUSED = """\
an adapter on top of another
adapter_name_or_path trains one further
create_new_adapter

adapters in a folder inside of the adapter's
adapter_name_or_path: <that folder>
adapter_folder

weight-decomposed adapters
use_rslora: true
use_dora

a limit on an expert's tokens: every token reaches its experts
the key left out
moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy=probs

a switch for one module, which has become a list
recompute_granularity: selective, and recompute_modules: moe
moe_layer_recompute

weights and attention in 8 bits, and products in 4
fp8: hybrid
fp8_param fp8_dot_product_attention fp8_multi_head_attention fp4*

another split of the layers
pipeline_model_parallel_layout, such as Ett|tttL
account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage

a weight w of the BCO loss by this name
pref_loss: [sigmoid, bco_pair], and pref_loss_weights: [1 / (1 + w), w / (1 + w)]
pref_bco_weight

weights of another library
quantization_method: bnb, or quantised files of Hugging Face in nf4 or mxfp4
quantization_method=bnb

a switch for 8 bits
quantization_bit: 8
load_in_8bit

a dtype by this name
bf16: true, or fp16: true
dtype=float32 torch_dtype mixed_precision=no

a switch for adapters
finetuning_type: lora
use_peft

a number with several meanings
pref_beta with stage: dpo or kto; with stage: distill distill_jsd_mix, for 0 distill_loss: \
forward_kl, for 1 distill_loss: reverse_kl
beta=none

answers of student or teacher while the student trains
lmbda: 0, with stage: distill on the data's answers; python -m mca_lite generate writes a \
teacher's before
lmbda seq_kd

parts of data sets by this key
dataset: <names in dataset_info.json>, with subset, split and columns in their entries
datasets dataset_config dataset_train_split=train dataset_test_split=test dataset_text_field=text

a length of prompts or answers alone
cutoff_len, of both together
max_completion_length max_prompt_length max_seq_length

a file in the form of axolotl, ms-swift or NeMo Automodel
python -m mca_lite migrate FILE > config.yaml, which writes it in the keys of this package
base_model tuner_type train_type rlhf_type split_dataset_ratio step_scheduler

a key for the file
the file alone, as a word without a key
config

values other than those of the model's config.json
config.json
num_experts num_moe_experts moe_*

label smoothing of tokens (dpo_label_smoothing is that of pairs)
register_objective, with a loss on the logits
label_smoothing_factor

uploads and model cards
hf upload <repository> <output_dir>, after the run
push_to_hub create_model_card

a choice of the device: CUDA is used where it is there
CUDA_VISIBLE_DEVICES= in the environment, which hides GPUs
use_cpu

accuracy of tokens
predict_with_generate: true, for exact_match
compute_accuracy

an export, which trains nothing
python -m mca_lite convert BASE DST --merge ADAPTER, where BASE is model_name_or_path, DST \
export_dir and ADAPTER adapter_name_or_path
export_dir

LLaMA-Factory's profiler
profile_steps: 10-12
enable_torch_profiler profile_modules

a reference that follows the model
ref_model: model
sync_ref_model ref_model_mixup_alpha=0.6 ref_model_sync_steps=512

MLPs in tiles by a switch
mlp_chunk_size: 8192
tiled_mlp

answers during an evaluation of pairs
predict_with_generate: true with stage: sft
generate_during_eval

tokens in a file
add_special_tokens: <the tokens>
new_special_tokens_config

optimizers that are not in the table
optim: adam, or register_optimizer
use_galore use_apollo use_badam use_adam_mini optim_args optim_target_modules

a switch of earlier days
freeze_vision_tower, freeze_language_model
train_mm_proj_only

a switch for an optimizer
optim: muon
use_muon

weights and optimizer in 16 bits alone
bf16: true, exp_avg_dtype: bf16
pure_bf16

losses of tokens with weights of their own
register_objective
use_dft_loss use_asft_loss use_eaft_loss

SwanLab
report_to: tensorboard or wandb
use_swanlab

a resume that begins the data anew
model_name_or_path: <the checkpoint>
ignore_data_skip

samples in another order
disable_shuffling: true for that of the file
train_sampling_strategy=random sortish_sampler

a length by this name: TRL's is that of a sample, LLaMA-Factory's that of an answer
cutoff_len for samples, max_new_tokens for answers
max_length

a length of prompt and answer together
max_new_tokens
generation_max_length

it is a feature of other trainers or engines
the key left out
ref_model_* pissa_init pissa_convert pissa_iter=16 cuda_graph_impl=none cuda_graph_*
enable_cuda_graph external_cuda_graph lora_task_type=causal_lm is_encoder_decoder
neftune_noise_alpha preserve_thinking split_special_tokens shift_attn mixture_of_depths
use_llama_pro debug loraplus_lr_ratio loraplus_lr_embedding=1e-06 truncation_mode=keep_start
model_init_kwargs teacher_model_init_kwargs alpha dataset_kwargs
use_megatron_bridge use_hyper_parallel use_kt use_v1_kernels auto_find_batch_size eval_delay
"""
# reason -> keys of other trainers that have no effect here
_IGNORED = {
    "the model's folder decides it": "multi_latent_attention tool_format use_fast_tokenizer "
    "disable_dropout eos_token pad_token",
    "eval_strategy decides it": "eval_on_start",
    "transformer_impl decides it": "flash_attn attn_implementation use_unsloth upcast_layernorm "
    "fp8_backend",
    "loss_chunk_size keeps the logits small": "enable_liger_kernel use_liger_kernel "
    "liger_kernel_config cross_entropy_loss_fusion",
    "recompute_granularity decides it": "gradient_checkpointing_kwargs use_unsloth_gc "
    "activation_checkpointing_kwargs disable_gradient_checkpointing use_reentrant_gc",
    "torchrun and the parallel keys decide it": "ray_* placement_strategy resources_per_worker "
    "master_addr master_port deepspeed fsdp fsdp_config local_rank accelerate_config "
    "accelerator_config parallelism_config device_map offload_folder low_cpu_mem_usage "
    "fp8_enable_fsdp_float8_all_gather",
    "ref_model decides it": "precompute_ref_log_probs",
    "disable_shuffling decides it": "shuffle_dataset",
    "packing decides it": "packing_strategy eval_packing padding_free",
    "answers are trained, and with train_on_prompt: true all tokens": (
        "completion_only_loss assistant_only_loss"
    ),
    "profile_steps decides it": "profiler_*",
    "overlap_grad_reduce decides it": "delay_grad_reduce",
    "checkpoints have one format for every layout": "ckpt_format ckpt_d2h_non_blocking "
    "distrib_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient",
    "of a stage, adapter, optimizer or backend that is not in this version": "compile_warmup ppo_* "
    "reward_model* module_dropout oft_* asft_alpha eaft_alpha galore_* apollo_* badam_* "
    "megatron_bridge_args hyper_parallel_* kt_*",
    "muon_adjust_lr decides it": "muon_scale_mode muon_extra_scale_factor",
    "Muon updates whole matrices of Hugging Face's, in bf16, as torch.optim.Muon": "muon_tp_mode "
    "muon_split_qkv muon_fp32_matmul_prec muon_coefficient_type",
    "quantization_bit decides it": "quantization_device_map bnb_4bit_compute_dtype "
    "bnb_4bit_quant_storage quantize_moe_experts",
    "scales of quantised weights stay float32, the same in every layout": "double_quantization "
    "bnb_4bit_use_double_quant use_bnb_nested_quant",
    "bf16, fp16 and fp8 decide the precision": "upcast_lmhead_output bf16_full_eval fp16_full_eval "
    "compute_dtype tf32",
    "a new row begins as the mean of the old ones": "init_special_tokens",
    "cutoff_len decides it": "model_max_length",
    "neat_packing decides it": "block_diag_attn",
    "torch_compile decides it": "torch_compile_*",
    "report_to decides it": "project trackio_* swanlab_*",
    "python -m mca_lite convert exports": "export_size export_device export_quantization_* "
    "export_legacy_format export_hub_model_id",
    "nccl with CUDA, gloo without": "ddp_backend",
    "set ddp_bucket_size, in parameters": "ddp_bucket_cap_mb",
    "chosen by virtual_pipeline_model_parallel_size": "overlap_p2p_comm",
    "calculate_per_token_loss does it": "average_tokens_across_devices ddp_average_in_collective",
    "cache_dir holds tokenised data, and training follows": "tokenized_path",
    "the data is mapped into memory, whole and in its order": "dataloader_drop_last "
    "data_shared_file_system preprocessing_batch_size dataloader_prefetch_factor "
    "dataloader_persistent_workers dataloader_pin_memory dataloader_multiprocessing_context "
    "dataloader_in_order group_by_length length_column_name",
    "logging_steps decides it": "logging_strategy logging_first_step",
    "everything is written to output_dir, which all nodes share": "logging_dir save_on_each_node",
    "the log shows what was computed": "logging_nan_inf_filter log_level log_level_replica "
    "print_param_status log_on_each_node skip_memory_metrics",
    "compute_metrics sees what is kept of a whole set": "prediction_loss_only "
    "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object include_for_metrics "
    "batch_eval_metrics",
    "it is always so": "remove_unused_columns save_safetensors include_num_input_tokens_seen "
    "ignore_pad_token_for_loss include_effective_tokens_per_second label_names "
    "torch_empty_cache_steps enable_jit_checkpoint restore_callback_states_from_checkpoint "
    "ddp_find_unused_parameters ddp_static_graph ddp_broadcast_buffers ignore_bias_buffers",
    "padding carries no loss": "padding_value pad_to_multiple_of",
    "per_device_eval_batch_size decides it": "precompute_ref_batch_size",
    "answers are generated greedily, by transformers": "use_cache use_kv_cache generation_config "
    "generation_num_beams do_sample top_p top_k num_beams eval_num_beams "
    "repetition_penalty length_penalty skip_special_tokens infer_backend infer_dtype vllm_* "
    "sglang_*",
    "push_to_hub decides it": "push_to_hub_* hub_*",
    "downloads read HF_TOKEN in the environment": "hf_hub_token",
    "models come from folders and the Hugging Face hub": "ms_hub_token om_hub_token",
    "audio is read beside text, not from videos": "audio_* use_audio_in_video",
    "the image processor of the model decides it": "image_resize_algo crop_to_patches "
    "image_do_pan_and_scan",
}

_OFF = "false no 0 0.0 [] {}"  # values that switch a key off


def _add(key: str, row: ForeignKey) -> None:
    """Add another trainer's configuration key to the table FOREIGN_KEYS. row: tells whether the key
    is ignored or refused here, and why. ValueError if FOREIGN_KEYS or ALIASES already has the key.
    """
    refuse_taken("key", key, {*FOREIGN_KEYS, *ALIASES})
    FOREIGN_KEYS[key] = row


for _reason, _keys in _IGNORED.items():
    for _key in _keys.split():
        _add(_key, ForeignKey(_reason))
for _reason, _remedy, *_lines in map(str.splitlines, _REFUSED.split("\n\n")):
    for _word in " ".join(_lines).split():
        _key, _, _default = _word.partition("=")
        _off = ("", "none", "null", *(_default or _OFF).split())
        _add(_key, ForeignKey(f"not in this version: {_reason}", _remedy, _off))
# axolotl's and transformers' spellings of activation_offloading, in YAML and as words
MEANINGS["recompute_granularity=offload"] = {
    "recompute_granularity": "full",
    "activation_offloading": True,
}
for _more in ({}, {"use_reentrant": True}, {"use_reentrant": False}):
    for _given in ({"offload": True, **_more}, {**_more, "offload": True}):
        for _text in (str(_given).lower(), json.dumps(_given)):
            for _key in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
                MEANINGS[f"{_key}={_text}"] = {"activation_offloading": True}
NOT_OF_TRAINING.update(
    "export_dir base_model tuner_type train_type rlhf_type step_scheduler".split()
)

# built-in chat template -> LLaMA-Factory's names for it
_TEMPLATES = {
    "chatml": "chatml chatml_de qwen yi intern2 smollm smollm2",
    "llama3": "llama3",
    "mistral": "mistral ministral",
    "deepseek": "deepseek3 deepseekr1",
    "gemma": "gemma gemma2 gemma3",
    "plain": "default",
    "qwen3": "qwen3 qwen3_nothink",
}
BUILT_IN_FOR.update(
    (name, built_in) for built_in, names in _TEMPLATES.items() for name in names.split()
)
