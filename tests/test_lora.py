"""LoRA is PEFT's LoRA in every layout: loss, gradient norm and adapters of a peft-wrapped model in
plain torch.
"""

import pytest

from tests.shared import tiny, world
from tests.shared.cells import asked_for, cell, thinned
from tests.shared.fixtures import beside_peft
from tests.shared.layouts import CP2, DIST_OPT, FULL, ONE_ROW, OVERLAP, PACKED, PP2, SP, TP2, VPP2
from tests.shared.lora_tools import train_cases_with_peft

SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, ONE_ROW),
    "dp2_dist_opt": (2, {**DIST_OPT, **ONE_ROW}),
    "dp2_overlap": (2, {**OVERLAP, **ONE_ROW}),
    "tp2": (2, TP2),
    "tp2_sp": (2, {**TP2, **SP}),
    "tp2_sp_packed": (2, {**TP2, **SP, **PACKED}),
    "pp2": (2, PP2),
    "pp2_vpp2": (2, {**PP2, **VPP2}),
    "pp2_vpp2_full_recompute": (2, {**PP2, **VPP2, **FULL}),
    "cp2": (2, CP2),
    "cp2_packed": (2, {**CP2, **PACKED}),
    "full_recompute": (1, FULL),
    "selective_recompute": (1, SELECTIVE),
    "tp2_sp_full_recompute": (2, {**TP2, **SP, **FULL}),
    "tp2sp_pp2_vpp2_dist_opt": (4, {**TP2, **SP, **PP2, **VPP2, **DIST_OPT}),
    "pp2dp2_overlap": (4, {**PP2, **OVERLAP, **ONE_ROW}),
    "tp2sp_cp2_packed": (4, {**TP2, **SP, **CP2, **PACKED}),
}
ON_TORCH = {
    "torch": (1, dict(backend="torch")),
    "torch_dp2": (2, dict(backend="torch", **ONE_ROW)),
    "torch_packed": (1, {**PACKED, "backend": "torch"}),
}
# {case: (family, what peft's configuration says besides)}
CASES = {
    **{family: (family, {}) for family in tiny.FAMILY_KEYS},
    "q_and_v": ("llama", dict(targets=("q_proj", "v_proj"))),
    "gate_and_o": ("llama", dict(targets=("gate_proj", "o_proj"))),
    "embedding": ("llama", dict(targets=("embed_tokens", "down_proj"))),
    "head": ("llama", dict(targets=("lm_head", "k_proj"))),
    "embedding_and_head": ("llama", dict(targets=("embed_tokens", "lm_head"))),
    "tied": ("qwen3", dict(targets=("embed_tokens", "lm_head", "v_proj"))),
    "first_mlp": ("llama", dict(targets=("layers.0.mlp.down_proj",))),
    "first_stage": ("llama", dict(targets=("layers.0.self_attn.q_proj",))),
    "saved": ("llama", dict(targets=("q_proj",),
                            modules_to_save=("lm_head", "model.norm", "embed_tokens"))),
    "rank_stabilised": ("llama", dict(use_rslora=True, lora_alpha=3)),
    "torch_targets": ("llama", dict(targets=("q_proj", "up_proj", "embed_tokens", "lm_head"))),
}  # fmt: skip


@pytest.fixture(scope="module")
def peft_references(request, tmp_path_factory):
    """{case: (model folder, folder of peft's adapters, curve of peft)} of the cases that are asked
    for.
    """
    folder, cases = tmp_path_factory.mktemp("references"), asked_for(request)
    paths = {f: tiny.save_model(folder / "models" / f, f) for f in tiny.FAMILY_KEYS}
    configs = {case: (paths[CASES[case][0]], CASES[case][1]) for case in cases}
    [curves] = world.run(train_cases_with_peft, 1, str(folder), configs)
    return {case: (configs[case][0], folder / case, curves[case]) for case in cases}


assert_as_peft = beside_peft({**LAYOUTS, **ON_TORCH})


FEW = ("one", "tp2_sp", "pp2_vpp2", "dp2_overlap")
# With overlap the optimizer is distributed too, and stages without any adapter train there; whole
# models train at pp2dp2_overlap in test_parity. Other plain layouts stand here with packed rows or
# recomputation.
PRODUCTS = ("dp2_dist_opt", "pp2dp2_overlap", "dp2", "pp2", "pp2_vpp2", "cp2")


@pytest.mark.parametrize(
    "case, layout",
    thinned(["llama"], [n for n in LAYOUTS if n not in PRODUCTS], ["llama"], [])
    + thinned(["llama"], PRODUCTS, [], [])
    + thinned(["qwen3"], LAYOUTS, [], ["tp2_sp"])
    + thinned(["mistral", "qwen2"], FEW, [], ["tp2_sp"]),
)
def test_adapters_train_as_with_peft(case, layout, assert_as_peft):
    assert_as_peft(case, layout)


@pytest.mark.parametrize(
    "case, layout",
    thinned(["q_and_v", "gate_and_o"], ["one", "tp2_sp", "pp2"], [], ["tp2_sp"])
    + thinned(
        ["embedding", "head", "embedding_and_head"],
        ["one", "tp2_sp", "pp2"],
        ["embedding_and_head"],
        [],
    )
    + [
        cell("embedding_and_head", layout)
        for layout in ("tp2", "pp2_vpp2_full_recompute", "dp2_overlap")
    ],
)
def test_some_modules_alone_train_as_with_peft(case, layout, assert_as_peft):
    """A part of a fused matrix; the embedding and the head, whose vocabulary is padded by tensor
    parallelism.
    """
    assert_as_peft(case, layout)


@pytest.mark.parametrize("case", ["first_mlp"])
@pytest.mark.parametrize("layout", ["selective_recompute", "full_recompute"])
def test_recomputation_finds_gradients_behind_frozen_modules(case, layout, assert_as_peft):
    """Nothing in front of the first layer's MLP needs a gradient, and what is recomputed there has
    to.
    """
    assert_as_peft(case, layout)


@pytest.mark.parametrize("case", ["tied"])
@pytest.mark.parametrize("layout", ["one", "tp2_sp", "pp2", "pp2_vpp2"])
def test_embedding_and_head_of_a_tied_model_have_adapters_of_their_own(
    case, layout, assert_as_peft
):
    assert_as_peft(case, layout)


@pytest.mark.parametrize("case", ["first_stage"])
@pytest.mark.parametrize(
    "layout", ["one", "pp2", "pp2_vpp2", "pp2_vpp2_full_recompute", "dp2_overlap"]
)
def test_stages_without_adapters_train_as_with_peft(case, layout, assert_as_peft):
    assert_as_peft(case, layout)


@pytest.mark.parametrize("case", ["saved"])
@pytest.mark.parametrize("layout", ["one", "tp2_sp", "pp2", "dp2_overlap"])
def test_modules_to_save_train_as_with_peft(case, layout, assert_as_peft):
    assert_as_peft(case, layout)


@pytest.mark.parametrize("case, layout", [("rank_stabilised", "tp2_sp")])
def test_rank_stabilised_adapters_train_as_with_peft(case, layout, assert_as_peft):
    assert_as_peft(case, layout)


@pytest.mark.parametrize("case", ["torch_targets", "qwen3"])
@pytest.mark.parametrize("layout", ON_TORCH)
def test_the_torch_backend_trains_as_with_peft(case, layout, assert_as_peft):
    assert_as_peft(case, layout)
