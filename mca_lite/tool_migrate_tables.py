"""Keys of other trainers' files in words of this package, for `mca-lite migrate`.

A row is [@TAGS ]KEY[=VALUES]: WORDS [| NOTE]. KEY and VALUES are patterns, separated by commas. Of
the rows that match a key of a file and its value, the first one counts; a key that no row matches
is looked up among this package's keys, aliases and known keys of other trainers. VALUES `absent`:
the row is for a file without the key.

WORDS are keys of this package, which get the same value, and key=value, where {} stands for the
file's value and {0}, {1} for the items of a list; or one of: `datasets`, with the key and the stage
to set for a list of datasets; -, for a key without effect, with the reason in NOTE; !, for a
refused key, with the remedy in NOTE.

TAGS are alternatives, separated by commas: words that the file must have, joined by +. A file has
the keys that are not false or 0, its values, and the words of `method`, a script's command; without
a command, the trainer's name (swift for ms-swift). For `absent` rows it also has the values that
earlier rows have set."""

# trainer -> patterns of its keys; a file is that of the first trainer of which it has a key
SIGNS = {
    "axolotl": "base_model",
    "NeMo Automodel": "step_scheduler.* model._target_",
    "torchtitan": "job.* parallelism.* training.seq_len",
    "ms-swift": "tuner_type train_type rlhf_type split_dataset_ratio torch_dtype",
    "TRL": "dataset_name use_peft",
    "Hugging Face": "*",
}

_REINFORCED = (
    "answers are generated elsewhere: stage: grpo trains on such rollouts, a Session in a loop"
)
# keys of trainers that sample answers while they train
_ROLLOUT = """\
use_vllm,vllm*,reward_funcs,reward_weights,reward_model*,num_generations*,log_completions,epsilon*,\
overlong_filter,steps_per_generation,importance_sampling_level,multi_turn_scheduler,max_turns,\
dynamic_sample,scale_rewards,offload_*,use_gym_env,gym_env,async_generate,advantage_estimator,\
kl_in_reward,num_iterations,tau_*,log_rollout*,max_completion_length,teacher_model_server,ebft.*,\
trl.*,diffusion.*,sync_ref_model,generation_batch_size,num_completions_to_print"""
_IMAGES = """
freeze_mm_modules: freeze_vision_tower freeze_multi_modal_projector
freeze_vit: freeze_vision_tower
freeze_aligner: freeze_multi_modal_projector
freeze_llm: freeze_language_model
max_pixels: image_max_pixels
"""
_SHARE = """
warmup_steps=0.*: warmup_ratio | a share of the steps
"""
_DISTILLED = """
@gkd beta=0,0.0: distill_loss=forward_kl | 0 is forward KL
@gkd beta=1,1.0: distill_loss=reverse_kl | 1 is reverse KL
@gkd beta: distill_loss=jsd distill_jsd_mix
@gkd beta=absent: distill_loss=jsd distill_jsd_mix=0.5 | its default
@gkd lmbda=absent: ! | 0.5 is the default there, half of the answers by the student; here all \
answers are the data's
@gkd sft_alpha=0,0.0: - | it is 0
@gkd sft_alpha: ! | distill_ce_weight: w, for (1 - w) divergence + w cross entropy
"""

TRL = f"""
method=*sft: stage=sft
method=*online_dpo: ! | {_REINFORCED}
method=*dpo,*mpo: stage=dpo
method=*kto: stage=kto
method=*reward*: stage=rm
method=*orpo: stage=dpo pref_loss=orpo
method=*cpo: stage=dpo
method=*gkd: stage=distill
method: ! | {_REINFORCED}
{_ROLLOUT}: ! | {_REINFORCED}
@cpo loss_type=absent: pref_loss=cpo | CPO's default
@cpo loss_type=sigmoid: pref_loss=cpo
@cpo loss_type=simpo: pref_loss
@cpo loss_type: ! | pref_loss: cpo or simpo
@simpo cpo_alpha=0,0.0: - | it is 0
@simpo cpo_alpha=absent: ! | pref_loss: [simpo, sft]: the likelihood counts there
@simpo cpo_alpha: ! | pref_loss: [simpo, sft], and pref_loss_weights: [1, {{}}]
max_length: cutoff_len | of prompt and answer together
max_seq_length: cutoff_len | of prompt and answer together
max_length=absent: cutoff_len=1024 | TRL's default
{_DISTILLED}
@gkd temperature: - | of sampled answers alone: the divergence is at 1
beta: pref_beta
@sft loss_type=nll: - | it is the loss of stage sft
@sft assistant_only_loss=absent: ! | train_on_prompt: true for conversations, of which all tokens \
are trained there; of prompt and completion the completion is
@kto loss_type=kto: - | it is the loss of stage kto
load_in_8bit=true: quantization_bit=8
load_in_4bit=true: quantization_bit=4
load_in_8bit,load_in_4bit: - | it is off
use_peft: finetuning_type=lora
@use_peft lora_r=absent: lora_rank=16 | TRL's default
@use_peft lora_alpha=absent: lora_alpha=32 | TRL's default
@use_peft lora_dropout=absent: lora_dropout=0.05 | TRL's default
@use_peft lora_target_modules=absent: lora_target=q_proj,v_proj | PEFT's default, for most families
lora_target_modules=all-linear: lora_target=all
lora_task_type: - | the stage decides it
dtype=auto,bfloat16,torch.bfloat16,float32: - | bf16 decides it; master weights are float32
dtype=float16: ! | fp16: true, and bf16: false
@fp16 bf16=absent: bf16=false
bf16=absent: bf16=true | TRL's default
gradient_checkpointing=absent: recompute_granularity=full | TRL's default
per_device_train_batch_size=absent: per_device_train_batch_size=8 | Trainer's default
@sft,gkd learning_rate=absent: learning_rate=2e-5 | TRL's default
@reward learning_rate=absent: learning_rate=1e-4 | TRL's default
learning_rate=absent: learning_rate=1e-6 | TRL's default
output_dir=absent: output_dir=trainer_output | Trainer's default
@kto train_sampling_strategy=absent: disable_shuffling=true | TRL's default for KTO
num_processes: - | torchrun decides it
eval_strategy=no: eval_strategy
@test_split_size eval_strategy: eval_strategy
@test_split_size eval_steps: eval_steps
eval_strategy,eval_steps: ! | eval_dataset: <the set's test split>, and this key
{_SHARE}"""

MS_SWIFT = f"""
method=*sft: stage=sft
method=*pt: stage=pt
method=*rlhf: - | rlhf_type decides it
method: ! | commands sft, pt and rlhf are read
rlhf_type=dpo,kto,rm: stage
rlhf_type=orpo,simpo,cpo: stage=dpo pref_loss
rlhf_type=gkd: stage=distill
rlhf_type: ! | {_REINFORCED}
{_ROLLOUT}: ! | {_REINFORCED}
@rlhf rlhf_type=absent: stage=dpo | ms-swift's default
model: model_name_or_path | a folder, or of the Hugging Face hub: ModelScope is not asked
adapters: adapter_name_or_path
teacher_model: teacher_model_name_or_path
tuner_type=full: finetuning_type=full
tuner_type=lora,lora_llm: finetuning_type=lora
tuner_type: ! | finetuning_type: lora, freeze or full
train_type=full,lora: finetuning_type
train_type: ! | finetuning_type: lora, freeze or full
@swift tuner_type=absent: finetuning_type=lora | ms-swift's default
torch_dtype=bfloat16: bf16=true
torch_dtype=float16: fp16=true
torch_dtype=float32: bf16=false
torch_dtype=absent: bf16=true | there the dtype of config.json, most often this one
dataset: datasets
val_dataset: datasets eval_dataset
cached_dataset,cached_val_dataset: ! | dataset: <its source>; cache_dir keeps what was tokenised
split_dataset_ratio: val_size
max_length: cutoff_len | of prompt and answer together
max_length=absent: ! | cutoff_len: <tokens>: the model's maximum there, 2048 here
truncation_strategy=right: - | samples are cut at the end
truncation_strategy: ! | samples are cut at the end, and counted
sequence_parallel_size: context_parallel_size
interleave_prob: mix_weights
shuffle_buffer_size: buffer_size
dataset_shuffle=false: disable_shuffling=true
train_dataloader_shuffle=false: disable_shuffling=true
system: default_system
use_chat_template=true: - | it is always so
use_chat_template: ! | records with prompt and completion as texts, or stage: pt
template: - | the tokenizer's own chat template is used; chat_template names another
agent_template: - | the tokenizer's own chat template is used
loss_scale=default: - | answers are trained
loss_scale=last_round: mask_history=true
loss_scale=all: train_on_prompt=true
loss_scale=ignore_empty_think: ! | enable_thinking: false, or thinking in the records
loss_scale: ! | a column of the batch, as configs/examples/token_weights.py has it
@rlhf loss_scale=absent: - | the last answer is trained
target_modules=all-linear: lora_target=all
target_modules: lora_target
@lora target_modules=absent: lora_target=all | ms-swift's default
@full learning_rate=absent: learning_rate=1e-5 | ms-swift's default
@swift learning_rate=absent: learning_rate=1e-4 | ms-swift's default for adapters
@lora lr=absent: learning_rate=1e-4 | ms-swift's default for adapters
@megatron lr=absent: learning_rate=1e-5 | ms-swift's default
@lora lora_alpha=absent: lora_alpha=32 | ms-swift's default
@lora lora_dropout=absent: lora_dropout=0.05 | ms-swift's default
weight_decay=absent: weight_decay=0.1 | ms-swift's default
adam_beta2=absent: adam_beta2=0.95 | ms-swift's default
logging_steps=absent: logging_steps=5 | ms-swift's default
@swift lr_scheduler_type=absent: lr_scheduler_type=cosine | ms-swift's default
@swift gradient_accumulation_steps=absent: global_batch_size=16 | ms-swift's default
@swift gradient_checkpointing=absent: recompute_granularity=full | ms-swift's default
@split_dataset_ratio,val_dataset eval_strategy=absent: eval_strategy=steps | ms-swift's default
@split_dataset_ratio,val_dataset eval_steps=absent: ! | eval_steps: <save_steps>, the default there
output_dir=absent: output_dir=output | ms-swift's default
max_epochs: num_train_epochs
micro_batch_size: per_device_train_batch_size | of a device, in one forward pass
global_batch_size: global_batch_size | of all devices, per update
@megatron global_batch_size=absent: global_batch_size=16 | ms-swift's default
lr: learning_rate
lr_warmup_fraction: warmup_ratio
lr_warmup_iters: warmup_steps
min_lr: lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs={{"min_lr":{{}}}}
@min_lr lr_decay_style=cosine: - | min_lr decides it
lr_decay_style=inverse-square-root: lr_scheduler_type=inverse_sqrt
lr_decay_style=wsd: lr_scheduler_type=warmup_stable_decay
lr_decay_style: lr_scheduler_type
@megatron lr_decay_style=absent: lr_scheduler_type=cosine | ms-swift's default
train_iters: max_steps
clip_grad: max_grad_norm
adam_eps: adam_epsilon
optimizer=dist_muon: optim=muon
finetune=true: - | training begins at step 0 without resume_from_checkpoint
finetune: ! | resume_from_checkpoint: <the checkpoint>
no_save_optim=true: save_only_model=true
no_save_optim,no_save_rng,no_load_optim,no_load_rng: - | save_only_model decides it
attention_backend: - | transformer_impl decides it
attn_impl: - | transformer_impl decides it
use_precision_aware_optimizer: - | exp_avg_dtype and exp_avg_sq_dtype decide it
merge_lora: save_merged_model
fp8_format: fp8
fp8_recipe=delayed,blockwise,tensorwise: fp8_recipe
fp8_param_gather,gradient_accumulation_fusion: - | a switch for memory or speed of that engine
decoder_first_pipeline_num_layers,decoder_last_pipeline_num_layers: ! | \
pipeline_model_parallel_layout, such as Ett|tttL
@megatron recompute_granularity=absent: recompute_granularity=selective | ms-swift's default
recompute_granularity=none: - | it is the default
moe_shared_expert_overlap: - | a switch for speed, for models with shared experts
metric_for_best_model=rouge-l: metric_for_best_model=rouge_l
@dist_muon use_distributed_optimizer=absent: use_distributed_optimizer=false | Muon's states are \
whole
@megatron use_distributed_optimizer=absent: use_distributed_optimizer=true | ms-swift's default
save: output_dir
load: model_name_or_path
save_interval: save_steps
save_total_limit=-1: - | all are kept
eval_interval: eval_steps
log_interval: logging_steps
eval_iters: ! | max_samples in the entry of the set, or a smaller val_size
task_type=causal_lm: - | the stage decides it
task_type=seq_cls,embedding,reranker,generative_reranker: ! | stage: rm is the one with a score
load_from_cache_file: - | overwrite_cache decides it
lazy_tokenize: - | streaming decides it
model_author,model_name: - | of the set swift/self-cognition alone
{_IMAGES}{_SHARE}
{_DISTILLED}
@gkd temperature: distill_temperature | the loss is multiplied by its square here
@gkd temperature=absent: distill_temperature=0.9 | its default; the loss is multiplied by its square
@simpo beta=absent: pref_beta=2.0 | ms-swift's default
@simpo simpo_gamma=absent: simpo_gamma=1.0 | ms-swift's default
beta: pref_beta
quant_bits: quantization_bit
quant_method=bnb: - | quantization_bit decides it
quant_method: ! | quantization_bit: 4, or 8
columns: ! | columns in the entry of the set in dataset_info.json
external_plugins,custom_register_path: ! | register_ functions, in a script that ends with \
mca_lite.cli.main()
new_special_tokens: add_special_tokens
use_hf,hub_token,load_data_args,use_logits_to_keep,add_version,create_checkpoint_symlink,\
sleep_level,padding_free: - | of that \
program alone
vit_lr,aligner_lr: ! | learning_rate, of all weights
model_kwargs: ! | image_max_pixels, for pictures
init_weights=true: - | it is always so
init_weights: ! | use_rslora: true
teacher_deepspeed: - | the teacher has the student's layout
early_stop_interval: early_stopping_patience
dataset_shuffle,train_dataloader_shuffle: - | it is always so
task_type: ! | stage: rm is the one with a score
tuner_backend,vit_gradient_checkpointing*,safe_serialization,check_model,\
ds3_gather_for_generation,eval_use_evalscope,use_flash_ckpt,model_type,experts_impl,max_memory,\
local_repo_path,init_strategy,padding_side,template_backend,is_binary_loss_scale,download_mode,\
strict,enable_npu_model_patch,load_args,packing_length,packing_num_proc,ignore_args_error,\
use_swift_lora,stream,zero_hpz_partition_size,use_ray,masked_softmax_fusion,\
cross_entropy_fusion_impl,optimizer_cuda_graph,manual_gc*,data_sharding,te_rng_tracker,\
data_parallel_random_init,mlp_padding_free,use_cpu_initialization,perform_initialization,\
use_persistent_ckpt_worker,dist_ckpt_*,use_megatron_fsdp,strict_fsdp_dtensor_load,\
data_parallel_sharding_strategy,batch_p2p_comm,align_*,cp_comm_type,cp_partition_mode,\
sequence_packing_scheduler,overlap_param_gather_with_optimizer_step,nccl_comm_warmup,\
microbatch_group_size_per_vp_stage,tensorboard_*,wandb_project,wandb_exp_name,fp8_amax_*,\
attention_softmax_in_fp32,apply_query_key_layer_scaling,bridge_backend,save_missing_weights,\
vit_attn_impl,skip_megatron_init,mtp_decoder*,mtp_shared*,language_model_only,main_grads_dtype,main_params_dtype,\
resume_only_model,_*,teacher_tag_key,val_dataset_shuffle,stopping_strategy: \
- | of that program alone
enable_dft_loss,enable_channel_loss,acc_strategy,mrl_dims,eval_metric,callbacks,eval_dataset*,\
eval_generation_config,eval_limit,extra_eval_args,lisa_*,num_labels,problem_type,max_model_len,norm_bbox,response_prefix,\
add_non_thinking_prefix,disable_ignore_empty_think,disable_auto_column_mapping,\
custom_dataset_info,decision_*,hqq_axis,stop_words,logprobs,top_logprobs,structured_*,\
freeze_parameters*,trainable_parameters*,target_regex,lora_bias,lora_dtype,\
lorap_lr_ratio,lora_ga_*,fourier_*,boft_*,vera_*,adapter_*,adalora_*,llamapro_*,reft_*,\
deepspeed_autotp_size,reward_*,num_ppo_epochs,whiten_rewards,cliprange*,vf_coef,gamma,lam,\
num_mini_batches,local_rollout_forward_batch_size,num_sample_generations,response_length,\
missing_eos_penalty,teacher_*,ref_adapters,gkd_logits_topk,mcore_*,reference_free,calculate_KL,\
real_tau,fipo_*,cosine_*,repetition_*,soft_*,max_resample_times,wandb_log_unique_prompts,\
rollout_*,off_policy_*,log_entropy,top_entropy_quantile,router_replay_mode,move_model_batches,\
completion_length_limit_scope,lr_warmup_init,lr_decay_iters,lr_wsd_*,weight_decay_incr_style,\
start_weight_decay,end_weight_decay,muon_scalar_optimizer,muon_lr,muon_min_lr,engram_*,dsa_*,\
csa_*,apply_dsa*,apply_wd*,use_fused_mhc,mhc_*,megatron_extra_kwargs,linear_decoupled_in_proj,\
sft_alpha: ! | the key left out: there is nothing like it here
"""

AXOLOTL = f"""
base_model: model_name_or_path
base_model_config,cls_model_config: ! | one folder with config.json and weights
model_type,tokenizer_type,processor_type,is_*_derived_model,tokenizer_use_fast,tokenizer_legacy,\
tokenizer_use_mistral_common,processor_kwargs: - | the model's folder decides it
tokenizer_config: ! | a folder with the model and that tokenizer
revision_of_model: model_revision
adapter=lora: finetuning_type=lora
adapter=qlora: finetuning_type=lora | load_in_4bit decides the base
adapter: ! | finetuning_type: lora
load_in_8bit=true: quantization_bit=8
load_in_4bit=true: quantization_bit=4
load_in_8bit,load_in_4bit: - | it is off
lora_model_dir: adapter_name_or_path
lora_target_linear=true: lora_target=all
lora_target_linear: - | lora_target decides it
@lora_target_linear lora_target_modules: - | lora_target: all has them
lora_target_modules: lora_target
@adapter lora_alpha=absent: ! | lora_alpha: <number>
peft_use_rslora: use_rslora
peft_use_dora: ! | use_rslora: true
lora_fan_in_fan_out,lora_*_kernel,qlora_sharded_model_loading,bnb_config_kwargs.*: - | \
a switch for memory or speed of that engine
unfrozen_parameters: ! | finetuning_type: freeze, with freeze_trainable_layers and modules
merge_lora: save_merged_model
rl=dpo: stage=dpo pref_loss=sigmoid
rl=ipo,orpo,simpo: stage=dpo pref_loss
rl=kto: stage=kto
rl: ! | {_REINFORCED}
reward_model=true: stage=rm
process_reward_model=true: ! | stage: rm scores whole answers
num_labels=1: - | stage: rm has one score
rl_beta: pref_beta
dpo_beta: pref_beta
trl.beta: pref_beta
{_ROLLOUT}: ! | {_REINFORCED}
orpo_alpha: pref_beta
dpo_loss_type: pref_loss
dpo_loss_weights: pref_loss_weights
dpo_use_weighting: use_weighting
dpo_padding_free,dpo_use_logits_to_keep,dpo_use_liger_kernel: - | rows of packing have no padding
kto_desirable_weight: kto_chosen_weight
kto_undesirable_weight: kto_rejected_weight
datasets: datasets
test_datasets: datasets eval_dataset
pretraining_dataset: datasets dataset pt
dataset_prepared_path: cache_dir
dataset_processes: preprocessing_num_workers
val_set_size: val_size
shuffle_merged_datasets=true: - | it is always so
shuffle_merged_datasets: disable_shuffling=true
dataset_exact_deduplication=true: ! | python -m mca_lite inspect names duplicates
skip_prepare_dataset: - | pictures are read when a sample is
sequence_len: cutoff_len | of prompt and answer together
sequence_len=absent: cutoff_len=512 | axolotl's default
excess_length_strategy: - | samples are cut at the end, and counted
sample_packing: packing
pad_to_sequence_len,eval_sample_packing,sample_packing_*,batch_flattening,\
multipack_real_batches,pretrain_multipack_*: - | packing decides it
train_on_inputs: train_on_prompt
chat_template=tokenizer_default*: - | it is always so
chat_template=chatml,llama3,gemma: chat_template | in place of the tokenizer's own
chat_template: ! | the tokenizer's own is used; chat_template: <a jinja file> for another
chat_template_jinja: chat_template
default_system_message: default_system
eot_tokens: ! | answers end as the chat template ends them; end_of_answer where it writes nothing
special_tokens.pad_token,special_tokens.bos_token,special_tokens.unk_token: - | the model's folder \
decides it
special_tokens.eos_token: ! | end_of_answer, or the tokenizer's files
special_tokens.additional_special_tokens: add_special_tokens
tokens.*: ! | the tokenizer's files
tokens: add_tokens
resize_token_embeddings_to_32x: - | tensor parallelism pads the embedding
micro_batch_size: per_device_train_batch_size | of a device, in one forward pass
eval_batch_size: per_device_eval_batch_size
batch_size: global_batch_size | of all devices, per update
num_epochs: num_train_epochs
num_epochs=absent: num_train_epochs=1 | axolotl's default
optimizer=adamw_torch,adamw_torch_fused,adamw_hf: optim=adam
optimizer=adamw_*,ao_adamw_*,paged_adamw*: optim=adam | states of 32 bits; of 8 or 16 \
by exp_avg_dtype and exp_avg_sq_dtype
optimizer=muon,sgd: optim
optimizer: ! | optim: adam, muon, sgd, or register_optimizer
optimizer=absent: optim=adam
adam_eps: adam_epsilon
lr_scheduler: lr_scheduler_type
lr_scheduler=absent: lr_scheduler_type=cosine | axolotl's default
cosine_min_lr_ratio: lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs=\
{{"min_lr_rate":{{}}}}
saves_per_epoch=1: save_strategy=epoch
saves_per_epoch: ! | save_steps: steps of an epoch / {{}}
evals_per_epoch=0: eval_strategy=no
@val_set_size,test_datasets evals_per_epoch=1: eval_strategy=epoch
evals_per_epoch=1: - | there is nothing to evaluate on
evals_per_epoch: ! | eval_strategy: steps, and eval_steps: steps of an epoch / {{}}
bf16=auto: bf16=true
bf16=absent: bf16=true | axolotl's default, auto
bfloat16: bf16
float16: fp16
tf32,float32: - | bf16 decides it: float32 products keep their precision
fp8=true: fp8=hybrid
gradient_checkpointing=offload: recompute_granularity=full activation_offloading=true
gradient_checkpointing=true: recompute_granularity=full
activation_offloading=legacy,disk: activation_offloading=true
use_reentrant: - | recompute_granularity decides it
attn_implementation,flash_attention,sdp_attention,xformers_attention,flex_attention,\
eager_attention,flash_attn_*,flash_optimum,s2_attention,fused_attn_kernel,flex_attn_*,\
gemma4_hybrid_attn_impl,use_kernels,experts_implementation,use_scattermoe,use_sonicmoe,\
experimental_*: - | transformer_impl decides it
liger_*,cut_cross_entropy,chunked_cross_entropy*,tiled_mlp*: - | fused kernels and loss_chunk_size \
are always in effect
plugins: - | fused kernels and loss_chunk_size are always in effect
fsdp*,deepspeed*,ddp,dp_shard_size,dp_replicate_size,device_map,low_cpu_mem_usage,torchdistx_path,\
world_size: - | torchrun and the parallel keys decide it; use_distributed_optimizer shards its state
tensor_parallel_size: tensor_model_parallel_size
sequence_parallel_degree: context_parallel_size
expert_parallel_size: expert_model_parallel_size
wandb_project=*: report_to=wandb | its project: WANDB_PROJECT in the environment
wandb_name: run_name
wandb_*,mlflow_*,comet_*,trackio_*,swanlab_*,hub_*,use_wandb: - | report_to, and the tracker's \
variables in the environment
use_tensorboard=true: report_to=tensorboard
quantize_moe_experts: - | quantization_bit decides it
gptq*,model_quantization_*,qat.*: ! | finetuning_type: lora in bf16, or fp8
llama4_linearized_experts,use_onebitllms: - | of that program alone
cosine_constant_lr_ratio,lr_quadratic_warmup: ! | lr_scheduler_type: cosine or linear
eta_min: ! | lr_scheduler_type: cosine_with_min_lr, and lr_scheduler_kwargs: {{min_lr: {{}}}}
auto_resume_from_checkpoints=true: resume_from_checkpoint=auto
loss_watchdog_*: - | a loss that is not finite stops the run
model_config.output_router_logits=true: - | moe_aux_loss_coeff decides it
strict,debug,hf_use_auth_token,save_safetensors,remove_unused_columns,group_by_length,gc_steps,\
include_tkps: - | of that program alone
use_tensorboard,lora_target_linear,auto_resume_from_checkpoints,process_reward_model,\
dataset_exact_deduplication: - | it is off
gradio_*,use_otel_metrics,otel_*,use_trackio,use_comet,use_mlflow,hf_mlflow_*,\
tokenizer_save_jinja_files,gc_collect_steps,dataset_keep_in_memory,dataset_shard*,\
num_dataset_shards*,device,max_memory,gpu_memory_limit,is_preprocess,preprocess_iterable,\
total_*,axolotl_config_path,sage_attention,large_head_attention,sdpa_varlen,heads_k_stride,\
ring_attn_func,deepcompile,use_ray,include_tokens_per_second,merge_method,lora_on_cpu,\
peft_autocast_adapter_dtype,embeddings_skip_upcast,fp32_norm*,generat*,num_generation_samples,\
ple_cpu_offload,layer_offloading,selective_checkpointing*,streaming_multipack_buffer_size,\
image_resize_algorithm,role_boundaries,eval_table_size,eval_max_new_tokens,save_first_step,\
fix_untrained_tokens,mean_resizing_embeddings,shrink_embeddings: - | of that program alone
noisy_embedding_alpha,dpo_generate_during_eval,dpo_norm_loss,overrides_*,type_of_model,\
image_size,lisa_*,embedding_lr*,lr_div_factor,lr_groups,adam_epsilon2,adam_beta3,dion_*,\
qgalore_*,jagged_*,relora*,lora_*_pattern,peft*,trainer_cls,dynamic_checkpoint*,shuffle_before*,\
push_dataset_to_hub,do_*_eval,eval_causal*,bench_*,fp8_config*,eval_sequence_len,min_sample_len,\
max_prompt_len,curriculum_sampling,use_pose,pose_*,pretraining_sample_concatenation,\
scaling_softmax*,use_eaft,eaft_*,added_tokens_overrides*,chat_template_kwargs*,reinit_weights,\
num_labels,quantization*,bnb_config_kwargs,ebft,trl,qat,special_tokens,max_packed_sequence_len: \
! | the key left out: there is nothing like it here
output_dir=absent: output_dir=model-out | axolotl's default
{_IMAGES}
"""

AUTOMODEL = """
recipe=knowledgedistillation*: stage=distill
recipe=trainfinetune*nexttoken*,finetunerecipeforvlm,benchmarking*: - | stage: sft is the default
recipe: ! | stage: sft, pt or distill
ci.*,benchmark.*,nvtx,skypilot.*,slurm.*,wandb.*,mlflow.*,comet.*,dist_env.*,rng.ranked,\
moe_metrics.*: - | of that program alone
model.pretrained_model_name_or_path: model_name_or_path
model.config,model.config.pretrained_model_name_or_path,model.config.name_or_path: \
model_name_or_path train_from_scratch=true
teacher_model.pretrained_model_name_or_path: teacher_model_name_or_path
teacher_*,separate_meshes,offload_teacher_model: - | the teacher has the student's layout
model.torch_dtype=bfloat16,torch.bfloat16,bf16: bf16=true
model.torch_dtype=*float32,fp32: bf16=false
model.torch_dtype=auto,absent: bf16=true | Automodel's default
model.trust_remote_code,model.config.trust_remote_code: trust_remote_code
model.mtp_loss_scaling_factor: mtp_loss_scaling_factor
model.num_nextn_predict_layers: mtp_num_layers
model.attn_implementation,model.backend.*,model.use_*,model.force_hf,model.text_config.use_cache,\
model.text_config.output_hidden_states,model.output_hidden_states: - | transformer_impl decides it
model*_target_: - | of that program alone
model.config.*,model.text_config.*: ! | config.json in model_name_or_path
step_scheduler.global_batch_size: global_batch_size | of all devices, per update
step_scheduler.local_batch_size: per_device_train_batch_size | of a device, in one forward pass
@step_scheduler.max_steps step_scheduler.num_epochs: ! | max_steps alone counts here, there what \
is reached first
step_scheduler.num_epochs: num_train_epochs
step_scheduler.max_steps: max_steps
step_scheduler.ckpt_every_steps: save_steps
@validation_dataset.path_or_dataset,validation_dataset.path_or_dataset_id,\
validation_dataset.dataset_name step_scheduler.val_every_steps: eval_strategy=steps eval_steps
step_scheduler.val_every_steps: - | there is nothing to evaluate on
step_scheduler.*: - | of that program alone
rng.seed: seed
optimizer._target_=*adam,*adamw: optim=adam | weight decay is AdamW's
optimizer._target_=*muon: optim=muon
optimizer._target_: ! | optim: adam, muon, sgd, or register_optimizer
optimizer.lr: learning_rate
optimizer.betas: adam_beta1={0} adam_beta2={1}
optimizer.eps: adam_epsilon
optimizer.weight_decay: weight_decay
optimizer.exp_avg_dtype=*bfloat16: exp_avg_dtype=bf16
optimizer.exp_avg_sq_dtype=*bfloat16: exp_avg_sq_dtype=bf16
optimizer.*: - | one kernel updates all, with states and masters in float32
lr_scheduler.lr_decay_style=cosine: lr_scheduler_type=cosine_with_min_lr
lr_scheduler.lr_decay_style=wsd: lr_scheduler_type=warmup_stable_decay
lr_scheduler.lr_decay_style: lr_scheduler_type
lr_scheduler.lr_warmup_steps: warmup_steps
@lr_scheduler.lr_decay_style,lr_scheduler.min_lr lr_scheduler.lr_warmup_steps=absent: \
warmup_ratio=0.1 | Automodel's default, there from a tenth of the rate and of 1,000 steps at most
@constant lr_scheduler.min_lr: - | the rate is constant
@linear lr_scheduler.min_lr: ! | lr_scheduler_type: cosine_with_min_lr has one
lr_scheduler.min_lr: lr_scheduler_kwargs={"min_lr":{}}
@cosine lr_scheduler.min_lr=absent: lr_scheduler_kwargs={"min_lr_rate":0.01} | Automodel's default
@lr_scheduler.min_lr,lr_scheduler.lr_warmup_steps lr_scheduler.lr_decay_style=absent: \
lr_scheduler_type=cosine_with_min_lr | Automodel's default
lr_scheduler.lr_decay_style=absent: lr_scheduler_type=constant | there is no schedule
distributed.activation_checkpointing=true: recompute_granularity=full
distributed.activation_checkpointing=selective: recompute_granularity=selective
parallelizer.activation_checkpointing=true: recompute_granularity=full
distributed.*_size=none: - | torchrun and the other sizes decide it
distributed.tp_size: tensor_model_parallel_size
distributed.pp_size: pipeline_model_parallel_size
distributed.cp_size: context_parallel_size
distributed.ep_size: expert_model_parallel_size
distributed.sequence_parallel: sequence_parallel
distributed.*,distributed_config.*,parallelizer.*,autopipeline.*: - | torchrun and the parallel \
keys decide it
peft.dim: finetuning_type=lora lora_rank
peft.alpha: lora_alpha
peft.dropout: lora_dropout
@peft._target_ peft.dim=absent: finetuning_type=lora lora_rank=8 | Automodel's default
@peft._target_ peft.alpha=absent: lora_alpha=32 | Automodel's default
peft.match_all_linear=true: lora_target=all
peft.target_modules=[*]_proj: lora_target=all
peft.target_modules: lora_target
peft.exclude_modules: ! | lora_target: <the names without them>
peft.use_dora=true: ! | use_rslora: true
peft.*: - | of that program alone
quantization.load_in_4bit=true: quantization_bit=4
quantization.load_in_8bit=true: quantization_bit=8
quantization.bnb_4bit_quant_type: quantization_type
quantization.*: - | quantization_bit decides it
packed_sequence.packed_sequence_size=0: packing=false
packed_sequence.packed_sequence_size: packing=true cutoff_len
packed_sequence.*: - | packing decides it
dataset._target_=*megatronpretraining,*nanogptdataset: stage=pt
dataset._target_=*mock*: ! | dataset: <files>; tokens are random there
dataset.paths,dataset.file_pattern: ! | dataset: <files of texts>: indexed ones are not read
dataset.path_or_dataset,dataset.path_or_dataset_id,dataset.dataset_name: datasets
dataset.seq_length,dataset.seq_len,dataset.max_length: cutoff_len
dataset.limit_dataset_samples,dataset.num_samples_limit: max_samples | of each set
dataset.seed,dataset.shuffle_seed: data_seed
dataset.answer_only_loss_mask=false: train_on_prompt=true
validation_dataset.path_or_dataset,validation_dataset.path_or_dataset_id,\
validation_dataset.dataset_name: datasets eval_dataset
validation_dataset.seq_length,validation_dataset.max_length: - | cutoff_len decides it
*dataset.chat_template: chat_template
*dataset.split=train: - | it is the default
*dataset.tokenizer*,*dataset.processor*,tokenizer.*: - | the model's folder decides it
*dataset._target_,*dataset.padding,*dataset.trunc*,*dataset.pad_to_*,*dataset.answer_only_*,\
*dataset.shuffle*: - | records show their format, and samples are cut at the end
*dataset.*: ! | the set's entry in dataset_info.json, with subset, split and columns
dataloader.*,validation_dataloader.*,loss_fn.*: - | the stage decides it
kd_ratio=1,1.0: - | it is the divergence alone
kd_ratio=0.5: distill_ce_weight
kd_ratio: ! | distill_ce_weight: 1 - {}
@teacher_model.pretrained_model_name_or_path kd_ratio=absent: distill_ce_weight=0.5 | \
Automodel's default
kd_loss_fn.temperature: distill_temperature
kd_loss_fn.*: - | distill_loss: forward_kl is the default
processor.min_pixels: image_min_pixels
processor.max_pixels: image_max_pixels
processor.*: - | the model's folder decides it
freeze_config.freeze_vision_tower: freeze_vision_tower
freeze_config.freeze_language_model: freeze_language_model
freeze_config.freeze_audio_tower: - | pictures and videos are read beside text
freeze_config.*=false: - | it is off
freeze_config.*: ! | finetuning_type: freeze, with freeze_trainable_layers and modules
compile.enabled: torch_compile
compile.*: - | torch_compile decides it
fp8.enabled=true: fp8=hybrid
fp8.*: - | fp8 decides it
checkpoint.checkpoint_dir: output_dir
checkpoint.*: - | save_hf_model and save_hf_checkpoints decide it
checkpoint.checkpoint_dir=absent: output_dir=checkpoints | Automodel's default
clip_grad_norm.max_norm: max_grad_norm
*._target_,*._partial_: - | of that program alone
"""

TORCHTITAN = """
job.dump_folder: output_dir
job.dump_folder=absent: output_dir=outputs | torchtitan's default
training.seed,debug.seed: seed
job.*,profiling.*,metrics.*,comm.*,experimental.*,debug.*,fault_tolerance.*: - | of that program \
alone
model.hf_assets_path,hf_transformers.model: model_name_or_path | a folder with config.json and \
weights
model.converters=*float8*: fp8=hybrid
model.converters: ! | fp8: hybrid
@model.hf_assets_path,hf_transformers.model model.name,model.flavor: - | config.json decides it
model.name,model.flavor,model.*: ! | model_name_or_path: <a folder with config.json>, and \
train_from_scratch: true for random weights
encoder.*,inference.*,data.*: ! | the key left out: text alone is trained so
checkpoint.initial_load_in_hf=true: train_from_scratch=false
checkpoint.initial_load_in_hf=absent: train_from_scratch=true | weights are random there
checkpoint.enable,checkpoint.folder: - | save_strategy and output_dir decide it
checkpoint.interval: save_steps
checkpoint.async_mode=disabled: async_save=false
checkpoint.async_mode: async_save=true
checkpoint.keep_latest_k=0: - | all are kept
checkpoint.keep_latest_k: save_total_limit
checkpoint.*: - | of that program alone
training.local_batch_size: per_device_train_batch_size | of a device, in one forward pass
training.global_batch_size=-1: - | one micro-batch per update
training.global_batch_size: global_batch_size | of all devices, per update
training.seq_len: cutoff_len stage=pt | tokens of a row, which documents fill
training.steps: max_steps
training.max_norm: max_grad_norm
training.local_batch_size=absent: per_device_train_batch_size=8 | torchtitan's default
training.steps=absent: max_steps=10000 | torchtitan's default
training.dataset_path: datasets
@training.dataset_path training.dataset: - | the files decide it
training.dataset: ! | dataset: <files, or a set of the hub>
training.mixed_precision_param=bfloat16: bf16=true
training.mixed_precision_param=float32: bf16=false
training.mixed_precision_param=absent: bf16=true | torchtitan's default
training.*: - | of that program alone
optimizer.name=adam,adamw: optim=adam
optimizer.name: ! | optim: adam, muon, sgd, or register_optimizer
optimizer.lr: learning_rate
optimizer.lr=absent: learning_rate=8e-4 | torchtitan's default
optimizer.beta1: adam_beta1
optimizer.beta2: adam_beta2
optimizer.beta2=absent: adam_beta2=0.95 | torchtitan's default
optimizer.eps: adam_epsilon
optimizer.weight_decay: weight_decay
optimizer.weight_decay=absent: weight_decay=0.1 | torchtitan's default
optimizer.*: - | one kernel updates all, in every step
lr_scheduler.warmup_steps: warmup_steps
lr_scheduler.warmup_steps=absent: warmup_steps=200 | torchtitan's default
@lr_scheduler.min_lr_factor lr_scheduler.decay_type=cosine: - | min_lr_factor decides it
lr_scheduler.decay_type: lr_scheduler_type
lr_scheduler.min_lr_factor=0,0.0: - | it is the default
@cosine lr_scheduler.min_lr_factor: lr_scheduler_type=cosine_with_min_lr \
lr_scheduler_kwargs={"min_lr_rate":{}}
lr_scheduler.min_lr_factor: ! | lr_scheduler_type: cosine_with_min_lr has one
lr_scheduler.decay_ratio=0,0.0: ! | lr_scheduler_type: constant_with_warmup
lr_scheduler.decay_ratio: ! | lr_scheduler_type: warmup_stable_decay, and lr_scheduler_kwargs: \
{num_decay_steps: <{} of max_steps>, decay_type: linear}
parallelism.tensor_parallel_degree: tensor_model_parallel_size
parallelism.pipeline_parallel_degree: pipeline_model_parallel_size
parallelism.context_parallel_degree: context_parallel_size
parallelism.expert_parallel_degree: expert_model_parallel_size
parallelism.expert_tensor_parallel_degree: expert_tensor_parallel_size
parallelism.*: - | torchrun and the parallel keys decide it
activation_checkpoint.mode=none: - | it is the default
activation_checkpoint.mode: recompute_granularity
activation_checkpoint.*: - | recompute_granularity decides it
compile.enable: torch_compile
compile.*,float8.*,quantize.*: - | fp8 and torch_compile decide it
@validation.enable validation.enable: eval_strategy=steps
@validation.enable validation.freq: eval_steps
@validation.enable validation.dataset_path: datasets eval_dataset
@validation.enable+validation.dataset_path validation.dataset: - | the files decide it
@validation.enable validation.dataset: ! | eval_dataset: <files, or a set of the hub>
@validation.enable validation.local_batch_size: per_device_eval_batch_size
@validation.enable validation.*: ! | max_samples in the set's entry of dataset_info.json
validation.*: - | validation.enable is off
"""

# "Hugging Face": files of mcore_adapter, LLaMA-Factory and Trainer, whose keys are this package's
# or aliases of them, so that only `method` needs a row
ROWS = {
    "axolotl": AXOLOTL,
    "ms-swift": MS_SWIFT,
    "TRL": TRL,
    "NeMo Automodel": AUTOMODEL,
    "torchtitan": TORCHTITAN,
    "Hugging Face": f"method: - | the stage decides it{_SHARE}",
}
