"""Short files of other trainers: what `mca-lite migrate` makes of them. {folder} stands for the
folder that they are in.
"""

AXOLOTL = """
base_model: {folder}/model
datasets:
  - path: {folder}/chat.jsonl
    type: chat_template
    split: train
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 2
optimizer: adamw_torch_fused
learning_rate: 1e-2
logging_steps: 1
bf16: false
output_dir: {folder}/out
"""
# name of a file -> (its text, keys that it becomes, keys that stay as comments with their fate)
FILES = {
    "axolotl.yaml": (
        AXOLOTL,
        "dataset=[{folder}/chat.jsonl] cutoff_len=64 per_device_train_batch_size=2 optim=adam "
        "lr_scheduler_type=cosine num_train_epochs=1 bf16=false",
        {},
    ),
    "axolotl_lora.yml": (
        "base_model: org/model\nadapter: qlora\nload_in_4bit: true\nlora_r: 16\nlora_alpha: 32\n"
        "lora_target_linear: true\nlora_target_modules: [q_proj]\nflash_attention: true\n"
        "datasets: [{path: org/set, type: alpaca, name: en}]\nval_set_size: 0.1\n"
        "sample_packing: true\nevals_per_epoch: 4\nsaves_per_epoch: 1\nsequence_lenn: 3\n"
        "gradient_checkpointing_kwargs: {use_reentrant: false}\nlearning_rate: 2e-4\n"
        "special_tokens: {pad_token: <pad>}\nwandb_project:\n",
        "finetuning_type=lora lora_rank=16 lora_target=all quantization_bit=4 packing=true "
        "save_strategy=epoch "
        "val_size=0.1 bf16=true cutoff_len=512 dataset=[org/set]",
        {
            "evals_per_epoch": "refused: eval_strategy: steps, and eval_steps: steps of an epoch",
            "lora_target_modules": "without effect: lora_target: all",
            "flash_attention": "without effect: transformer_impl",
            "gradient_checkpointing_kwargs.use_reentrant": "without effect",
            "special_tokens.pad_token": "without effect: the model's folder",
            "sequence_lenn": "unknown: near: sequence_parallel",
        },
    ),
    "axolotl_dpo.yaml": (
        "base_model: org/model\nrl: dpo\nrl_beta: 0.2\nchat_template: llama3\nfp16: true\n"
        "datasets: [{path: json, data_files: [a.jsonl, b.jsonl]}]\nlearning_rate: 1e-6\n"
        "optimizer: adamw_bnb_8bit\nlr_scheduler: constant\nbf16: false\nnum_epochs: 2\n",
        "stage=dpo pref_loss=sigmoid pref_beta=0.2 chat_template=llama3 dataset=[a.jsonl,b.jsonl] "
        "optim=adam lr_scheduler_type=constant num_train_epochs=2 fp16=true",
        {},
    ),
    "axolotl_grpo.yaml": (
        "base_model: org/model\nrl: grpo\ntrl: {num_generations: 4}\nlearning_rate: 1e-6\n",
        "model_name_or_path=org/model",
        {"rl": "refused: answers are generated elsewhere", "trl.num_generations": "refused"},
    ),
    "swift.sh": (
        "# adapters\nNPROC=4\nNPROC_PER_NODE=$NPROC \\\nswift sft \\\n  --model org/model \\\n"
        "  --dataset 'org/set#500' more.jsonl \\\n  --split_dataset_ratio 0.01 \\\n"
        "  --gradient_accumulation_steps $(expr 16 / $NPROC) --max_length 4096 \\\n"
        "  --target_modules all-linear --attn_impl flash_attn --save_steps 50 --freeze_vit true\n",
        "stage=sft finetuning_type=lora lora_target=all lora_alpha=32 lora_dropout=0.05 "
        "learning_rate=1e-4 gradient_accumulation_steps=4 cutoff_len=4096 weight_decay=0.1 "
        "adam_beta2=0.95 lr_scheduler_type=cosine val_size=0.01 eval_strategy=steps "
        "recompute_granularity=full dataset=[org/set,more.jsonl] freeze_vision_tower=true",
        {"attn_impl": "without effect", "eval_steps": "refused: eval_steps: <save_steps>"},
    ),
    "swift_megatron.sh": (
        "megatron rlhf --rlhf_type dpo --model org/model --dataset pairs.jsonl --lr 1e-5 \\\n"
        "  --min_lr 1e-6 --lr_warmup_fraction 0.05 --micro_batch_size 2 --global_batch_size 64 \\\n"
        "  --train_iters 100 --tensor_model_parallel_size 2 --sequence_parallel true \\\n"
        "  --beta 0.3 --max_length 2048 --no_save_optim true --finetune true \\\n"
        "  --torch_dtype bfloat16\n",
        "stage=dpo pref_beta=0.3 learning_rate=1e-5 warmup_ratio=0.05 max_steps=100 bf16=true "
        "per_device_train_batch_size=2 global_batch_size=64 tensor_model_parallel_size=2 "
        "lr_scheduler_type=cosine_with_min_lr use_distributed_optimizer=true save_only_model=true",
        {"finetune": "without effect"},
    ),
    "swift.yaml": (
        "model: org/model\ntuner_type: full\ndataset: [a.jsonl]\ntorch_dtype: bfloat16\n"
        "packing: true\nmax_length: 1024\nloss_scale: last_round\ndeepspeed: zero3\n",
        "finetuning_type=full learning_rate=1e-5 global_batch_size=16 mask_history=true",
        {"deepspeed": "without effect: torchrun and the parallel keys"},
    ),
    "swift_grpo.sh": (
        "swift rlhf --rlhf_type grpo --model org/model --dataset a.jsonl --use_vllm true\n",
        "model_name_or_path=org/model",
        {
            "rlhf_type": "refused: answers are generated",
            "use_vllm": "refused: answers are generated",
            "max_length": "refused: cutoff_len",
        },
    ),
    "trl_sft.sh": (
        "accelerate launch --num_processes 8 trl/scripts/sft.py \\\n"
        "  --model_name_or_path org/model --dataset_name org/set --use_peft --packing \\\n"
        "  --lora_target_modules all-linear --no_remove_unused_columns --output_dir out\n",
        "stage=sft dataset=org/set finetuning_type=lora lora_rank=16 lora_alpha=32 "
        "lora_target=all lora_dropout=0.05 learning_rate=2e-5 cutoff_len=1024 packing=true "
        "per_device_train_batch_size=8 recompute_granularity=full bf16=true",
        {
            "remove_unused_columns": "without effect",
            "assistant_only_loss": "refused: train_on_prompt: true for conversations",
        },
    ),
    "trl_gkd.sh": (
        "python gkd.py --model_name_or_path org/model --teacher_model_name_or_path org/large \\\n"
        "  --dataset_name org/set --beta 0.5 --lmbda 0 --temperature 0.9\n",
        "stage=distill distill_loss=jsd distill_jsd_mix=0.5 teacher_model_name_or_path=org/large",
        {"lmbda": "without effect", "temperature": "without effect: of sampled answers"},
    ),
    "trl_dpo.sh": (
        "trl dpo --config trl.yaml --beta=0.2 --push_to_hub --loss_type sigmoid hinge\n",
        "stage=dpo pref_beta=0.2 pref_loss=[sigmoid,hinge] model_name_or_path=org/model "
        "learning_rate=1e-6 cutoff_len=512",
        {"push_to_hub": "refused"},
    ),
    "trl.yaml": (
        "model_name_or_path: org/model\ndataset_name: org/set\nmax_length: 512\nmax_steps: 10\n",
        "dataset=org/set cutoff_len=512 max_steps=10 per_device_train_batch_size=8",
        {},
    ),
    "automodel.yaml": (
        "step_scheduler: {global_batch_size: 64, local_batch_size: 8, max_steps: 50}\n"
        "model: {_target_: nemo, pretrained_model_name_or_path: org/model}\n"
        "optimizer: {_target_: torch.optim.Adam, lr: 1e-5, betas: [0.9, 0.99]}\n"
        "peft: {dim: 8, alpha: 32, match_all_linear: true}\n"
        "distributed: {tp_size: 2, dp_size: 4}\n"
        "dataset: {_target_: x, path_or_dataset: org/set, split: 'train[:64]'}\n",
        "global_batch_size=64 per_device_train_batch_size=8 max_steps=50 learning_rate=1e-5 "
        "finetuning_type=lora lora_rank=8 lora_target=all tensor_model_parallel_size=2 "
        "adam_beta1=0.9 adam_beta2=0.99 lr_scheduler_type=constant bf16=true",
        {"model._target_": "without effect", "dataset.split": "refused: the set's entry"},
    ),
    "torchtitan.toml": (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\n'
        "seq_len = 8192\nsteps = 1000\n[optimizer]\nlr = 3e-4\n"
        "[parallelism]\ntensor_parallel_degree = 8\ndata_parallel_shard_degree = -1\n",
        "per_device_train_batch_size=2 cutoff_len=8192 stage=pt max_steps=1000 warmup_steps=200 "
        "learning_rate=0.0003 tensor_model_parallel_size=8 train_from_scratch=true",
        {
            "model.name": "refused: model_name_or_path",
            "model.flavor": "refused",
            "parallelism.data_parallel_shard_degree": "without effect",
        },
    ),
    "run_train.sh": (
        "torchrun --nproc_per_node=2 examples/run_train.py --model_name_or_path org/model \\\n"
        "  --tensor_model_parallel_size 2 --optimizer adam --dataset a --moe_layer_recompute\n",
        "model_name_or_path=org/model tensor_model_parallel_size=2 optim=adam",
        {"moe_layer_recompute": "refused"},
    ),
    "axolotl_more.yaml": (
        "base_model: org/model\nreward_model: true\nnum_labels: 1\nlearning_rate: 1e-5\n"
        "datasets: [{path: pairs.jsonl}]\nnum_epochs: 1\noptimizer: adamw_torch\n",
        "stage=rm optim=adam dataset=[pairs.jsonl] num_train_epochs=1",
        {},
    ),
    "axolotl_pt.yaml": (
        "base_model: org/model\npretraining_dataset: [{path: org/texts}]\nsequence_len: 4096\n"
        "max_steps: 100\nlr_scheduler: cosine\nlearning_rate: 1e-4\ngradient_checkpointing: true\n",
        "stage=pt dataset=[org/texts] cutoff_len=4096 max_steps=100 recompute_granularity=full",
        {},
    ),
    "axolotl_orpo.yaml": (
        "base_model: org/model\nrl: orpo\norpo_alpha: 0.1\nchat_template: tokenizer_default\n"
        "datasets: [{path: pairs.jsonl, type: chat_template.argilla}]\nlearning_rate: 1e-6\n",
        "stage=dpo pref_loss=orpo pref_beta=0.1",
        {},
    ),
    "axolotl_kto.yaml": (
        "base_model: org/model\nrl: kto\nrl_beta: 0.5\nkto_desirable_weight: 0.2\n"
        "datasets: [{path: labelled.jsonl}]\nremove_unused_columns: false\nlearning_rate: 1e-6\n",
        "stage=kto pref_beta=0.5 kto_chosen_weight=0.2",
        {},
    ),
    "axolotl_simpo.yaml": (
        "base_model: org/model\nrl: simpo\nrl_beta: 2.0\ndatasets: [{path: pairs.jsonl}]\n"
        "learning_rate: 1e-6\nbatch_size: 32\nmicro_batch_size: 1\n",
        "pref_loss=simpo pref_beta=2.0 global_batch_size=32",
        {},
    ),
    "axolotl_ranks.yaml": (
        "base_model: org/model\ncontext_parallel_size: 2\ntensor_parallel_size: 2\n"
        "fsdp_config: {offload_params: false}\ndeepspeed: zero3.json\nexpert_parallel_size: 2\n"
        "datasets: [{path: a.jsonl}]\nplugins: [axolotl.integrations.liger.LigerPlugin]\n",
        "context_parallel_size=2 tensor_model_parallel_size=2 expert_model_parallel_size=2",
        {"deepspeed": "without effect: torchrun", "plugins": "without effect: fused kernels"},
    ),
    "axolotl_pictures.yaml": (
        "base_model: Qwen/Qwen2.5-VL-7B-Instruct\nprocessor_type: AutoProcessor\n"
        "skip_prepare_dataset: true\nremove_unused_columns: false\nfreeze_mm_modules: true\n"
        "sample_packing: false\ndatasets: [{path: org/pictures, type: chat_template}]\n",
        "freeze_vision_tower=true freeze_multi_modal_projector=true packing=false",
        {"processor_type": "without effect: the model's folder"},
    ),
    "axolotl_steps.yaml": (
        "base_model: org/model\ndatasets: [{path: a.jsonl}]\nval_set_size: 0.05\nsave_steps: 50\n"
        "eval_steps: 50\nsave_total_limit: 2\nwarmup_ratio: 0.1\nweight_decay: 0.01\n"
        "cosine_min_lr_ratio: 0.1\nactivation_offloading: legacy\n",
        "val_size=0.05 save_steps=50 eval_steps=50 lr_scheduler_type=cosine_with_min_lr "
        "activation_offloading=true warmup_ratio=0.1",
        {},
    ),
    "swift_kto.sh": (
        "swift rlhf --rlhf_type kto --model org/model --dataset a.jsonl --tuner_type full \\\n"
        "  --max_length 1024 --desirable_weight 0.5 --beta 0.2 --report_to swanlab\n",
        "stage=kto finetuning_type=full kto_chosen_weight=0.5 pref_beta=0.2 learning_rate=1e-5",
        {"report_to": "refused: expected one of none, all, tensorboard, wandb"},
    ),
    "swift_rm.sh": (
        "swift rlhf --rlhf_type rm --model org/model --dataset a.jsonl --max_length 1024 \\\n"
        "  --eval_steps 50 --save_total_limit -1 --split_dataset_ratio 0.01\n",
        "stage=rm finetuning_type=lora eval_steps=50 eval_strategy=steps val_size=0.01",
        {"save_total_limit": "without effect: all are kept"},
    ),
    "swift_simpo.sh": (
        "swift rlhf --rlhf_type simpo --model org/model --dataset a.jsonl --max_length 512 \\\n"
        "  --gradient_accumulation_steps $(expr 32 / 4 / 2) --warmup_steps 0.05\n",
        "stage=dpo pref_loss=simpo pref_beta=2.0 simpo_gamma=1.0 gradient_accumulation_steps=4 "
        "warmup_ratio=0.05",
        {},
    ),
    "swift_gkd.sh": (
        "swift rlhf --rlhf_type gkd --model org/model --teacher_model org/large --lmbda 0 \\\n"
        "  --dataset a.jsonl --max_length 1024 --beta 1 --sft_alpha 0\n",
        "stage=distill distill_loss=reverse_kl teacher_model_name_or_path=org/large",
        {},
    ),
    "swift_pt.sh": (
        "NPROC_PER_NODE=8 swift pt --model org/model --dataset org/texts --tuner_type full \\\n"
        "  --max_length 8192 --streaming true --max_steps 100 --packing true\n",
        "stage=pt finetuning_type=full streaming=true packing=true max_steps=100",
        {},
    ),
    "swift_json.sh": (
        "# a quotation over two lines, and an apostrophe's\nswift sft --model org/model \\\n"
        "  --dataset a.jsonl --max_length 512 --model_kwargs '{\n\"max_pixels\": 9}' \\\n"
        "  --freeze_aligner false --lora_rank 4\n",
        "lora_rank=4 freeze_multi_modal_projector=false",
        {"model_kwargs": "refused: image_max_pixels"},
    ),
    "swift_experts.sh": (
        "megatron sft --model org/model --dataset a.jsonl --expert_model_parallel_size 8 \\\n"
        "  --moe_permute_fusion true --moe_grouped_gemm true --moe_aux_loss_coeff 1e-6 \\\n"
        "  --mtp_num_layers 1 --eval_steps 200 --save_steps 200 --max_length 2048 \\\n"
        "  --fp8_recipe blockwise --fp8_format e4m3 --num_train_epochs 1 --packing true\n",
        "expert_model_parallel_size=8 mtp_num_layers=1 eval_steps=200 fp8=e4m3 "
        "fp8_recipe=blockwise",
        {},
    ),
    "swift_export.sh": (
        "swift export --model org/model --quant_bits 4 --dataset a.jsonl\n",
        "quantization_bit=4",
        {"method": "refused: commands sft, pt and rlhf are read", "max_length": "refused"},
    ),
    "trl_kto.sh": (
        "trl kto --model_name_or_path org/model --dataset_name org/set --warmup_steps 0.1 \\\n"
        "  --desirable_weight 1.2 --max_length 512\n",
        "stage=kto warmup_ratio=0.1 kto_chosen_weight=1.2 learning_rate=1e-6 "
        "disable_shuffling=true",
        {},
    ),
    "trl_reward.sh": (
        "python examples/scripts/reward_modeling.py --model_name_or_path org/model \\\n"
        "  --dataset_name org/set --center_rewards_coefficient 0.01 --max_length 2048\n",
        "stage=rm learning_rate=1e-4 cutoff_len=2048 center_rewards_coefficient=0.01",
        {},
    ),
    "trl_orpo.sh": (
        "python examples/scripts/orpo.py --model_name_or_path=org/model --dataset_name org/set \\\n"
        "  --beta 0.1 --use_peft --lora_r=16 --lora_alpha=16\n",
        "stage=dpo pref_loss=orpo pref_beta=0.1 lora_rank=16 lora_target=q_proj,v_proj",
        {},
    ),
    "trl_cpo.sh": (
        "python examples/scripts/cpo.py --model_name_or_path=org/model --dataset_name org/set \\\n"
        "  --loss_type sigmoid --bf16 false\n",
        "stage=dpo pref_loss=cpo bf16=false",
        {},
    ),
    "trl_simpo.sh": (
        "python examples/scripts/cpo.py --model_name_or_path=org/model --dataset_name org/set \\\n"
        "  --loss_type simpo --cpo_alpha 0\n",
        "stage=dpo pref_loss=simpo",
        {"cpo_alpha": "without effect: it is 0"},
    ),
    "trl_mpo.sh": (
        "accelerate launch examples/scripts/mpo_vlm.py --model_name_or_path org/model \\\n"
        "  --dataset_name org/set --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0\n",
        "stage=dpo pref_loss_weights=[0.8,0.2,1.0]",
        {},
    ),
    "trl_vlm.sh": (
        "accelerate launch examples/scripts/sft_vlm.py --model_name_or_path org/model \\\n"
        "  --dataset_name org/set --dtype bfloat16 --output_dir out --assistant_only_loss\n",
        "stage=sft bf16=true output_dir=out dataset=org/set",
        {"dtype": "without effect: bf16 decides it"},
    ),
    "trl_qlora.sh": (
        "trl sft --model_name_or_path org/model --dataset_name org/set --use_peft \\\n"
        "  --load_in_4bit --lora_r 8 --no_gradient_checkpointing --assistant_only_loss\n",
        "quantization_bit=4 lora_rank=8",
        {},
    ),
    "trl_grpo.sh": (
        "trl grpo --model_name_or_path org/model --dataset_name org/set --num_generations 8\n",
        "model_name_or_path=org/model",
        {"method": "refused: answers are generated", "num_generations": "refused"},
    ),
    "automodel_kd.yaml": (
        "recipe: KnowledgeDistillationRecipeForNextTokenPrediction\nkd_ratio: 0.5\n"
        "step_scheduler: {global_batch_size: 8, local_batch_size: 1, num_epochs: 2}\n"
        "model: {_target_: x, pretrained_model_name_or_path: org/model, torch_dtype: bf16}\n"
        "teacher_model: {_target_: x, pretrained_model_name_or_path: org/large}\n"
        "kd_loss_fn: {_target_: x, temperature: 2.0, ignore_index: -100}\n"
        "dataset: {_target_: x, dataset_name: org/set, split: train}\n",
        "stage=distill distill_ce_weight=0.5 distill_temperature=2.0 bf16=true num_train_epochs=2 "
        "teacher_model_name_or_path=org/large lr_scheduler_type=constant",
        {},
    ),
    "automodel_pt.yaml": (
        "step_scheduler: {global_batch_size: 8, local_batch_size: 1, max_steps: 5, num_epochs: 1}\n"
        "model: {_target_: x, config: {_target_: y, pretrained_model_name_or_path: org/model}}\n"
        "dataset: {_target_: a.MegatronPretraining, paths: a*, seq_length: 1024, seed: 3}\n"
        "distributed: {activation_checkpointing: true, pp_size: 2, dp_size: none}\n",
        "stage=pt train_from_scratch=true cutoff_len=1024 data_seed=3 recompute_granularity=full",
        {
            "dataset.paths": "refused: dataset: <files of texts>",
            "step_scheduler.num_epochs": "refused: max_steps alone",
        },
    ),
    "automodel_vlm.yaml": (
        "recipe: FinetuneRecipeForVLM\nstep_scheduler: {global_batch_size: 8, val_every_steps: 9}\n"
        "model: {_target_: x, pretrained_model_name_or_path: org/model, trust_remote_code: true}\n"
        "processor: {_target_: y, pretrained_model_name_or_path: org/model, max_pixels: 99}\n"
        "freeze_config: {freeze_vision_tower: true, freeze_embeddings: false}\n"
        "dataset: {_target_: z, path_or_dataset: org/set, split: 'train[:9]'}\n"
        "optimizer: {_target_: torch.optim.AdamW, lr: 1e-4, betas: [0.9, 0.95]}\n"
        "lr_scheduler: {lr_decay_style: cosine, min_lr: 1e-6}\nci: {time: 9}\n",
        "freeze_vision_tower=true image_max_pixels=99 adam_beta2=0.95 trust_remote_code=true "
        "lr_scheduler_type=cosine_with_min_lr warmup_ratio=0.1",
        {"dataset.split": "refused: the set's entry"},
    ),
    "automodel_qlora.yaml": (
        "step_scheduler: {global_batch_size: 8, max_steps: 9}\n"
        "model: {_target_: x, pretrained_model_name_or_path: org/model, torch_dtype: float32}\n"
        "peft: {_target_: y, target_modules: '*_proj', exclude_modules: ['*.out_proj']}\n"
        "quantization: {load_in_4bit: true, bnb_4bit_quant_type: nf4}\n"
        "packed_sequence: {packed_sequence_size: 4096}\n"
        "dataset: {_target_: z, path_or_dataset_id: org/set, seq_length: 4096}\n",
        "quantization_bit=4 quantization_type=nf4 lora_rank=8 lora_alpha=32 lora_target=all "
        "packing=true cutoff_len=4096 bf16=false",
        {"peft.exclude_modules": "refused: lora_target"},
    ),
    "titan_valid.toml": (
        "[model]\nname = 'qwen3'\nflavor = '0.6B'\nhf_assets_path = 'assets/qwen3'\n"
        "[training]\nseq_len = 4096\ndataset = 'c4'\ndataset_path = 'a.jsonl'\n"
        "[lr_scheduler]\ndecay_type = 'cosine'\nmin_lr_factor = 0.1\nwarmup_steps = 2\n"
        "[validation]\nenable = true\nfreq = 5\nsteps = 10\ndataset_path = 'b.jsonl'\n",
        "model_name_or_path=assets/qwen3 dataset=[a.jsonl] eval_dataset=[b.jsonl] eval_steps=5 "
        "eval_strategy=steps lr_scheduler_type=cosine_with_min_lr adam_beta2=0.95",
        {"validation.steps": "refused: max_samples", "model.flavor": "without effect"},
    ),
    "titan_decay.toml": (
        "[training]\nseq_len = 2048\ndataset = 'c4_test'\n[debug]\nseed = 7\n"
        "[lr_scheduler]\ndecay_ratio = 0.8\ndecay_type = 'linear'\nmin_lr_factor = 0.0\n"
        "[validation]\nenable = false\nfreq = 5\n[checkpoint]\nkeep_latest_k = 0\n",
        "seed=7 lr_scheduler_type=linear weight_decay=0.1",
        {
            "training.dataset": "refused: dataset",
            "lr_scheduler.decay_ratio": "refused: lr_scheduler_type: warmup_stable_decay",
            "validation.freq": "without effect: validation.enable is off",
        },
    ),
    "run_branches.sh": (
        'TP=2\nUSE_MCA=true\nmore=" \\\n --tensor_model_parallel_size ${TP} \\\n --use_mca"\n'
        'options=" \\\n --stage=dpo --pref_loss=sigmoid \\\n --model_name_or_path=org/model"\n'
        'if [ "$USE_MCA" = true ]; then\n  options="$options $more"\nelse\n'
        '  options="$options --use_mca=false --deepspeed=a.json"\nfi\n'
        "torchrun --nproc_per_node=8 run_train.py $options --bf16\n",
        "stage=dpo pref_loss=sigmoid tensor_model_parallel_size=2 use_mca=true bf16=true",
        {},
    ),
}
