"""Keys of others' examples of training, as words key=value: LLaMA-Factory 0.9.5's
examples/train_full, train_lora and megatron; and the scripts of
mcore_adapter (ROLL), as far as they are known. And demo data as those examples name and declare it.
"""

import json
from pathlib import Path

from tests.shared.picture_files import draw

_OUTPUT = (
    "logging_steps=10 save_steps=500 plot_loss=true overwrite_output_dir=true "
    "save_only_model=false report_to=none "
)
_TRAIN = (
    "per_device_train_batch_size=1 num_train_epochs=3.0 lr_scheduler_type=cosine warmup_ratio=0.1 "
    "bf16=true ddp_timeout=180000000 resume_from_checkpoint=null "
)
_DATA = "cutoff_len=2048 max_samples=1000 preprocessing_num_workers=16 "
_QWEN3 = "model_name_or_path=Qwen/Qwen3-4B-Instruct-2507 trust_remote_code=true do_train=true "
_QWEN3_VL = (
    "model_name_or_path=Qwen/Qwen3-VL-4B-Instruct trust_remote_code=true do_train=true "
    "image_max_pixels=262144 video_max_pixels=16384 template=qwen3_vl_nothink "
)
_LORA = "finetuning_type=lora lora_rank=8 lora_target=all "
_REST = f"{_DATA}dataloader_num_workers=4 {_OUTPUT}{_TRAIN}"
_DEMO = "dataset=identity,alpaca_en_demo template=qwen3_nothink "
_DS3 = "deepspeed=examples/deepspeed/ds_z3_config.json "
_MEGATRON = (
    "do_train=true stage=sft finetuning_type=full preprocessing_num_workers=8 cutoff_len=4096 "
    "per_device_train_batch_size=1 num_train_epochs=2 logging_steps=1 save_steps=100 bf16=true "
    "bias_activation_fusion=true apply_rope_fusion=true use_distributed_optimizer=true "
)

LLAMA_FACTORY = {
    "train_full/qwen3_full_sft": f"{_QWEN3}stage=sft finetuning_type=full {_DS3}{_DEMO}{_REST}"
    "output_dir=saves/qwen3-4b/full/sft gradient_accumulation_steps=2 learning_rate=1.0e-5",
    "train_lora/qwen3_lora_sft": f"{_QWEN3}stage=sft {_LORA}{_DEMO}{_REST}"
    "output_dir=saves/qwen3-4b/lora/sft gradient_accumulation_steps=8 learning_rate=1.0e-4",
    "train_lora/qwen3_lora_sft_ds3": f"{_QWEN3}stage=sft {_LORA}{_DS3}{_DEMO}{_REST}"
    "output_dir=saves/qwen3-4b/lora/sft gradient_accumulation_steps=2 learning_rate=1.0e-4",
    "train_lora/qwen3_lora_sft_ray": f"{_QWEN3}stage=sft {_LORA}{_DEMO}{_REST}"
    "dataset_dir=REMOTE:llamafactory/demo_data output_dir=tmp_dir ray_num_workers=4 "
    "gradient_accumulation_steps=8 learning_rate=1.0e-4",
    "train_lora/qwen3_lora_pretrain": f"{_QWEN3}stage=pt {_LORA}dataset=c4_demo {_REST}"
    "output_dir=saves/qwen3-4b/lora/pretrain gradient_accumulation_steps=8 learning_rate=1.0e-4",
    "train_lora/qwen3_lora_dpo": f"{_QWEN3}stage=dpo {_LORA}pref_beta=0.1 pref_loss=sigmoid "
    f"dataset=dpo_en_demo template=qwen3_nothink {_REST}output_dir=saves/qwen3-4b/lora/dpo "
    "gradient_accumulation_steps=8 learning_rate=5.0e-6",
    "train_lora/qwen3_preprocess": f"{_QWEN3}stage=sft {_LORA}{_DEMO}{_DATA}"
    "tokenized_path=saves/qwen3-4b/dataset/sft output_dir=saves/qwen3-4b/lora/sft "
    "overwrite_output_dir=true",
    # a shell script: --key value, and --key alone
    "train_lora/qwen3_lora_sft.sh": "--model_name_or_path Qwen/Qwen3-4B-Instruct-2507 "
    "--trust_remote_code --stage sft --do_train --finetuning_type lora --lora_rank 8 "
    "--lora_target all --dataset identity,alpaca_en_demo --template qwen3_nothink "
    "--cutoff_len 2048 --max_samples 1000 --preprocessing_num_workers 16 "
    "--dataloader_num_workers 4 --output_dir saves/qwen3-4b/lora/sft --logging_steps 10 "
    "--save_steps 500 --plot_loss --overwrite_output_dir --save_only_model false --report_to none "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 8 --learning_rate 1e-4 "
    "--num_train_epochs 3.0 --lr_scheduler_type cosine --warmup_ratio 0.1 --bf16 "
    "--ddp_timeout 180000000",
    "megatron/qwen3_moe_full": f"{_MEGATRON}model_name_or_path=Qwen/Qwen3-30B-A3B-Instruct-2507 "
    "dataset=alpaca_en_demo template=qwen3_nothink output_dir=saves/mca/qwen3_moe_full "
    "gradient_accumulation_steps=8 learning_rate=3e-6 lr_scheduler_type=constant "
    "tensor_model_parallel_size=1 sequence_parallel=false pipeline_model_parallel_size=4 "
    "overlap_param_gather=true overlap_grad_reduce=true moe_grouped_gemm=true "
    "moe_token_dispatcher_type=alltoall expert_model_parallel_size=2 recompute_granularity=full",
    "train_lora/qwen3_lora_kto": f"{_QWEN3}stage=kto {_LORA}pref_beta=0.1 dataset=kto_en_demo "
    f"template=qwen3_nothink {_REST}output_dir=saves/qwen3-4b/lora/kto "
    "gradient_accumulation_steps=8 learning_rate=5.0e-6",
    "train_lora/qwen3_lora_reward": f"{_QWEN3}stage=rm {_LORA}dataset=dpo_en_demo "
    f"template=qwen3_nothink {_REST}output_dir=saves/qwen3-4b/lora/reward "
    "gradient_accumulation_steps=8 learning_rate=1.0e-4",
    "train_full/qwen3vl_full_sft": f"{_QWEN3_VL}stage=sft finetuning_type=full {_DS3}{_REST}"
    "freeze_vision_tower=true freeze_multi_modal_projector=true freeze_language_model=false "
    "dataset=mllm_demo,identity,alpaca_en_demo output_dir=saves/qwen3-vl-4b/full/sft "
    "gradient_accumulation_steps=2 learning_rate=1.0e-5",
    "train_lora/qwen3vl_lora_sft": f"{_QWEN3_VL}stage=sft {_LORA}{_REST}"
    "dataset=mllm_demo,identity,alpaca_en_demo output_dir=saves/qwen3-vl-4b/lora/sft "
    "gradient_accumulation_steps=8 learning_rate=1.0e-4",
    "train_lora/qwen3vl_lora_dpo": f"{_QWEN3_VL}stage=dpo {_LORA}pref_beta=0.1 pref_loss=sigmoid "
    f"{_REST}dataset=rlhf_v output_dir=saves/qwen3-vl-4b/lora/dpo gradient_accumulation_steps=8 "
    "learning_rate=5.0e-6",
    "megatron/qwen2_vl_full": f"{_MEGATRON}model_name_or_path=Qwen/Qwen2-VL-7B-Instruct "
    "image_max_pixels=262144 video_max_pixels=16384 dataset=llava_1k_en template=qwen2_vl "
    "learning_rate=2e-5 output_dir=saves/mca/qwen2_vl_full gradient_accumulation_steps=2 "
    "lr_scheduler_type=cosine tensor_model_parallel_size=4 sequence_parallel=true "
    "pipeline_model_parallel_size=2",
}

_ROLL = (
    "--do_train --model_name_or_path=Qwen/Qwen2.5-7B-Instruct --finetuning_type=full "
    "--template=qwen --preprocessing_num_workers=8 --cutoff_len=1024 --output_dir=./output "
    "--overwrite_output_dir --overwrite_cache --per_device_train_batch_size=1 "
    "--gradient_accumulation_steps=4 --num_train_epochs=1 --lr_scheduler_type=cosine "
    "--warmup_ratio=0.1 --logging_steps=1 --save_steps=100 --save_strategy=steps --bf16 "
)
_ROLL_MCA = (
    "--use_mca --tensor_model_parallel_size=2 --sequence_parallel --pipeline_model_parallel_size=1 "
    "--use_distributed_optimizer --bias_activation_fusion --apply_rope_fusion "
    "--overlap_param_gather --overlap_grad_reduce "
)
_ROLL_TORCH = "--use_mca=false --deepspeed=ds_zero3.json --flash_attn=fa2 --gradient_checkpointing "
ROLL = {
    "run_qwen_vl_sft.sh": f"{_ROLL}--stage=sft --dataset=llava_1k_en --learning_rate=2e-5 "
    "--model_name_or_path=Qwen/Qwen2.5-VL-7B-Instruct --template=qwen2_vl --use_mca "
    "--tensor_model_parallel_size=2 --sequence_parallel --pipeline_model_parallel_size=1 "
    "--use_distributed_optimizer --bias_activation_fusion --apply_rope_fusion "
    "--freeze_vision_tower --calculate_per_token_loss",
    "run_sft_train.sh": f"{_ROLL}--stage=sft --dataset=belle_2m --learning_rate=2e-5 {_ROLL_MCA}"
    "--calculate_per_token_loss",
    "run_sft_train.sh with USE_MCA=false": f"{_ROLL}--stage=sft --dataset=belle_2m "
    f"--learning_rate=2e-5 {_ROLL_TORCH}",
    "run_dpo_train.sh": f"{_ROLL}--stage=dpo --dataset=ultrafeedback --learning_rate=1e-6 "
    f"--pref_loss=sigmoid --pref_beta=0.1 {_ROLL_MCA}",
}


def write_demo_data(folder: Path) -> None:
    """The demo data of those examples, declared as LLaMA-Factory does, with texts that
    word_tokenizer reads."""
    words = [f"w{i} w{i + 1} w{i + 2}" for i in range(50)]
    says = [{"from": "human", "value": words[0]}, {"from": "gpt", "value": words[1]}]
    alpaca = [{"instruction": w, "input": "", "output": w} for w in words[:10]]
    pair = {"conversations": says[:1], "chosen": says[1]}
    pairs = [{**pair, "rejected": {"from": "gpt", "value": w}} for w in words[2:12]]
    draw(folder / "a.png")
    asks = {**says[0], "value": f"<image>{says[0]['value']}"}
    seen = [{"messages": [asks, says[1]], "images": ["a.png"]}] * 12
    ranking = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    sharegpt = {"formatting": "sharegpt"}
    sets = {
        "identity": (alpaca[:4], {}),
        "alpaca_en_demo": (alpaca, {}),
        "belle_2m": (alpaca, {}),
        "c4_demo": ([{"text": w * 9} for w in words], {"columns": {"prompt": "text"}}),
        "dpo_en_demo": (pairs, {**sharegpt, "ranking": True, "columns": ranking}),
        "ultrafeedback": (pairs, {**sharegpt, "ranking": True, "columns": ranking}),
        "kto_en_demo": (
            [{"messages": says, "label": i % 2 == 0} for i in range(16)],
            {**sharegpt, "columns": {"messages": "messages", "kto_tag": "label"}},
        ),
    }
    images = {"messages": "messages", "images": "images"}
    for name in ("mllm_demo", "llava_1k_en"):
        sets[name] = (seen, {**sharegpt, "columns": images})
    sets["rlhf_v"] = (
        [{**pair, "conversations": [asks], "images": ["a.png"]} for pair in pairs],
        {**sharegpt, "ranking": True, "columns": {**ranking, "images": "images"}},
    )
    for name, (records, _) in sets.items():
        (folder / f"{name}.json").write_text(json.dumps(records))
    info = {name: {"file_name": f"{name}.json", **keys} for name, (_, keys) in sets.items()}
    (folder / "dataset_info.json").write_text(json.dumps(info))
