"""The parallel layouts that tests train in: keys to be joined, and named layouts as
(ranks, keys).
"""

TP2 = dict(tensor_model_parallel_size=2)
SP = dict(sequence_parallel=True)
TP2_SP = {**TP2, **SP}
PP2 = dict(pipeline_model_parallel_size=2)
PP4 = dict(pipeline_model_parallel_size=4)
VPP2 = dict(virtual_pipeline_model_parallel_size=2)
CP2 = dict(context_parallel_size=2)
CP4 = dict(context_parallel_size=4)
EP2 = dict(expert_model_parallel_size=2)
EP4 = dict(expert_model_parallel_size=4)
ETP1 = dict(expert_tensor_parallel_size=1)
DIST_OPT = dict(use_distributed_optimizer=True)
DIST_OVERLAP = dict(DIST_OPT, overlap_grad_reduce=True, overlap_param_gather=True)
OVERLAP = dict(DIST_OVERLAP, ddp_bucket_size=2000)  # several buckets of a tiny model
FULL = dict(recompute_granularity="full")
PACKED = dict(sequence_packing=True, per_device_train_batch_size=2)
# rows of unequal length in a micro-batch, and half as many micro-batches; one where data parallel
# ranks would have nothing to accumulate
TWO_ROWS, ONE_ROW = dict(per_device_train_batch_size=2), dict(per_device_train_batch_size=1)

# balancing of experts, and how they are computed and reached: a run on plain torch does not know of
# the last
AUX = dict(moe_aux_loss_coeff=0.05, moe_z_loss_coeff=0.01)
BIAS = dict(moe_router_bias_update_rate=0.01)
LOOP = dict(moe_grouped_gemm=False, moe_token_dispatcher_type="allgather")

SAVE = dict(save_strategy="steps", save_steps=2, num_train_epochs=5)

DENSE = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2_dist_opt": (2, DIST_OPT),
    "dp2_overlap": (2, OVERLAP),
    "dp2_micro2": (2, dict(per_device_train_batch_size=2)),
    "tp2": (2, TP2),
    "tp2_sp": (2, {**TP2, **SP}),
    "tp2_sp_overlap": (2, {**TP2, **SP, "tp_comm_overlap": True}),
    "pp2": (2, PP2),
    "pp2_variable": (2, {**PP2, "variable_seq_lengths": True}),
    "pp2_vpp2": (2, {**PP2, **VPP2}),
    "tp2pp2": (4, {**TP2, **PP2}),
    "tp2sp_pp2_vpp2": (4, {**TP2, **SP, **PP2, **VPP2}),
    "tp2dp2": (4, TP2),
    "tp2sp_dp2_dist_opt": (4, {**TP2, **SP, **DIST_OPT}),
    "pp2dp2_overlap": (4, {**PP2, **OVERLAP}),
}

CUT = {
    "cp2": (2, CP2),
    "cp4": (4, CP4),
    "cp2tp2": (4, {**CP2, **TP2}),
    "cp2tp2_sp": (4, {**CP2, **TP2, **SP}),
    "cp2pp2": (4, {**CP2, **PP2}),
    "cp2dp2": (4, {**CP2, **DIST_OPT}),
}

PACKED_LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, TP2),
    "tp2_sp": (2, {**TP2, **SP}),
    "pp2": (2, PP2),
    "pp2_variable": (2, {**PP2, "variable_seq_lengths": True}),
    "pp4": (4, PP4),
    "pp2_vpp2": (2, {**PP2, **VPP2}),
    "pp2_vpp2_variable": (2, {**PP2, **VPP2, "variable_seq_lengths": True}),
    "tp2sp_pp2": (4, {**TP2, **SP, **PP2}),
    "dp2_overlap": (2, OVERLAP),
    **CUT,
    "cp2pp2_variable": (4, {**CP2, **PP2, "variable_seq_lengths": True}),
    "cp2pp2_vpp2": (4, {**CP2, **PP2, **VPP2}),
}

VISION = {
    "one": (1, TWO_ROWS),
    "one_packed": (1, PACKED),
    "one_recomputed": (1, {**TWO_ROWS, **FULL}),
    # in its first step one rank has a micro-batch with a picture, the other has none
    "dp2_overlap": (2, {**OVERLAP, **ONE_ROW}),
    "dp2": (2, TWO_ROWS),
    "tp2": (2, {**TP2, **TWO_ROWS}),
    "tp2_sp": (2, {**TP2, **SP, **DIST_OPT, **TWO_ROWS}),
    "tp2_sp_packed": (2, {**TP2, **SP, **PACKED, **FULL}),
    "pp2": (2, {**PP2, **TWO_ROWS}),
    "pp2_vpp2": (2, {**PP2, **VPP2, **ONE_ROW}),
    "cp2": (2, {**CP2, **TWO_ROWS}),
    "cp2_packed": (2, {**CP2, **PACKED}),
    "tp2pp2": (4, {**TP2, **PP2, **TWO_ROWS}),
    "tp2sp_pp2_packed": (4, {**TP2, **SP, **PP2, **PACKED}),
    "cp2tp2_sp": (4, {**CP2, **TP2, **SP, **TWO_ROWS}),
    "ep2": (2, {**EP2, **DIST_OPT, **ONE_ROW}),
}

EXPERTS = {
    "ep2": (2, {**EP2, **DIST_OPT}),
    "ep4": (4, EP4),
    "tp2": (2, TP2_SP),
    "pp2": (2, PP2),
    "ep2tp2": (4, {**EP2, **TP2_SP}),
    "ep2pp2": (4, {**EP2, **PP2}),
    "cp2ep2": (2, {**CP2, **EP2}),
}
