"""Mixtures of experts on GPUs, for gpu.py: differences from the torch backend on one of them."""

from tests import tiny_moe

EP2 = dict(expert_model_parallel_size=2)
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
AUX = dict(moe_aux_loss_coeff=0.05, moe_z_loss_coeff=0.01)
PACKED = dict(sequence_packing=True, per_device_train_batch_size=2)
LOOP = dict(moe_grouped_gemm=False, moe_token_dispatcher_type="allgather")
ONE = {
    "grouped": {},
    "loop": LOOP,
    "recomputed": dict(recompute_granularity="full"),
    "shared expert beside": dict(moe_shared_expert_overlap=True),
}
LAYOUTS = {
    "dp2": {},
    "ep2": EP2,
    "ep2, loop, allgather": {**EP2, **LOOP},
    "ep2, distributed optimizer": dict(
        EP2, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    ),
    "tp2": TP2,
    "ep2tp2_etp1": {**EP2, **TP2, "expert_tensor_parallel_size": 1},
    "pp2": dict(pipeline_model_parallel_size=2),
    "cp2ep2": dict(EP2, context_parallel_size=2),
}
# torch's grouped product on CUDA wants bf16 or rows of 16 bytes: every width here is a multiple of 8
MODELS = ("qwen3_moe", "qwen2_moe", "glm4_moe")


def save_models(folder: str) -> dict[str, str]:
    return {name: tiny_moe.save_model(f"{folder}/{name}", name) for name in MODELS}
