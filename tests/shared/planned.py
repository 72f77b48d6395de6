"""Steps that two H200 of one host took, over nccl, bf16: rows of a layout for `plan`.

torch 2.11.0+cu130, nccl 2.28.9, megatron-core 0.16.1, transformers 5.17, without Transformer
Engine; the median of steps 5 to 8.
"""

from typing import NamedTuple

from transformers import AutoConfig

from tests.shared.layouts import CP2, EP2, PP2, TP2, TP2_SP, VPP2

OVERLAP = dict(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)


class Step(NamedTuple):
    """shape: of hf_config(); rows: of a step, of `length` tokens; peak_gib: of torch's memory."""

    shape: str
    gpus: int
    micro_batch: int
    rows: int
    milliseconds: float
    keys: dict = {}
    length: int = 4096
    peak_gib: float = 0.0


STEPS = {
    "1.5B": Step("1.5B", 1, 4, 8, 630, peak_gib=56.6),
    "1.5B dp2 overlap": Step("1.5B", 2, 4, 16, 651, OVERLAP, peak_gib=50.8),
    "1.5B tp2": Step("1.5B", 2, 4, 16, 746, TP2),
    "1.5B tp2 sp": Step(
        "1.5B", 2, 4, 16, 863, TP2_SP, peak_gib=28.5
    ),  # CUDA_DEVICE_MAX_CONNECTIONS=1
    "1.5B pp2": Step("1.5B", 2, 2, 16, 837, PP2),
    "1.5B pp2 vpp2": Step("1.5B", 2, 2, 16, 794, {**PP2, **VPP2}),
    "1.5B pp2 of 16 and 12 layers": Step(
        "1.5B", 2, 1, 16, 1276, {**PP2, "pipeline_model_parallel_layout": "Et*16|t*12L"}
    ),
    "1.5B cp2": Step("1.5B", 2, 4, 16, 776, CP2, peak_gib=41.7),
    "1.5B, rows of 16,384": Step("1.5B", 1, 1, 2, 838, {}, 16384),
    "1.5B cp2, rows of 16,384": Step("1.5B", 2, 1, 4, 1027, CP2, 16384, peak_gib=41.7),
    "1.5B, rows of 32,768": Step("1.5B", 1, 1, 1, 1117, {}, 32768, peak_gib=88.1),
    "1.5B cp2, rows of 32,768": Step("1.5B", 2, 1, 2, 1282, CP2, 32768, peak_gib=58.4),
    "4B": Step("4B", 1, 2, 8, 1658, peak_gib=93.5),
    "4B dp2 overlap": Step("4B", 2, 2, 16, 1697, OVERLAP, peak_gib=78.6),
    "4B tp2 sp": Step("4B", 2, 2, 16, 2077, TP2_SP, peak_gib=47.0),
    "8B tp2 sp": Step("8B", 2, 1, 8, 1818, TP2_SP),
    "experts": Step("experts", 1, 4, 8, 372, peak_gib=78.6),
    "experts dp2 overlap": Step("experts", 2, 4, 16, 407, OVERLAP),
    "experts ep2 overlap": Step("experts", 2, 4, 16, 459, {**EP2, **OVERLAP}, peak_gib=52.4),
}


def published(shape: str, gpus: int, micro_batch: int, rows: int, rate: float, keys, length=4096):
    """A Step of `rate` tokens/s of each GPU."""
    return Step(shape, gpus, micro_batch, rows, 1e3 * rows * length / gpus / rate, keys, length)


# runs of other trainers on H100, with the layout where it was published, else the fastest planned:
# tokens/s of each GPU (of the first, from 527.6 TFLOP/s with 49.1 GFLOP a token)
PUBLISHED = {
    "Megatron-Bridge, Qwen3-8B": published("Qwen3-8B", 16, 1, 256, 10_750, OVERLAP),
    "Megatron-Bridge, Qwen3-8B SFT, tp4": published(
        "Qwen3-8B", 4, 2, 32, 8_080, {**TP2_SP, "tensor_model_parallel_size": 4}
    ),
    "Megatron-Bridge, Qwen3-8B LoRA, rows of 8,192": published(
        "Qwen3-8B", 1, 1, 8, 15_146, {"lora_rank": 8}, 8192
    ),
    "Megatron-Bridge, Qwen3-30B-A3B": published(
        "Qwen3-30B-A3B", 16, 2, 256, 13_011, {**OVERLAP, "expert_model_parallel_size": 8}
    ),
    "NeMo Automodel, Qwen3-30B-A3B": published(
        "Qwen3-30B-A3B", 8, 2, 256, 12_040, {**OVERLAP, "expert_model_parallel_size": 8}
    ),
}
_QWEN3 = dict(vocab_size=151936, num_attention_heads=32, head_dim=128, tie_word_embeddings=False)
SHAPES = {
    "Qwen3-8B": (
        "qwen3",
        dict(
            hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8
        ),
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        dict(
            hidden_size=2048,
            num_hidden_layers=48,
            num_key_value_heads=4,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
    ),
}


def hf_config(shape: str):
    """transformers' config of a shape, here or of bench_gpu."""
    from tests.tools import bench_gpu

    if shape not in SHAPES:
        return bench_gpu.hf_config(shape)
    kind, keys = SHAPES[shape]
    return AutoConfig.for_model(kind, max_position_embeddings=32768, **_QWEN3, **keys)
