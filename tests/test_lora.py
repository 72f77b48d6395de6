"""LoRA is PEFT's LoRA in every layout: loss, gradient norm and adapters of a peft-wrapped model in plain torch."""

import pytest

from tests.shared import tiny, world
from tests.shared.files import assert_same_tensors
from tests.shared.layouts import CP2, DIST_OPT, FULL, OVERLAP, PACKED, PP2, SP, TP2, VPP2
from tests.shared.lora_tools import adapter_of, train_from_adapter, train_with_peft
from tests.shared.training import assert_same_curve

SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2_dist_opt": (2, DIST_OPT),
    "dp2_overlap": (2, OVERLAP),
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
    "pp2dp2_overlap": (4, {**PP2, **OVERLAP}),
    "tp2sp_cp2_packed": (4, {**TP2, **SP, **CP2, **PACKED}),
}
FEW = ("one", "tp2_sp", "pp2_vpp2", "dp2_overlap")


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """{family: (model folder, folder of peft's adapters, curve of peft)}, each made when it is first asked for."""

    class References(dict):
        def __missing__(self, key):
            family, *config = key if isinstance(key, tuple) else (key,)
            folder = tmp_path_factory.mktemp(family)
            path = tiny.save_model(folder / "model", family)
            [curve] = world.run(train_with_peft, 1, path, str(folder), **dict(config))
            self[key] = path, folder, curve
            return self[key]

    return References()


def check(reference, tmp_path, ranks, keys):
    path, folder, curve = reference
    for got in world.run(
        train_from_adapter, ranks, path, str(tmp_path), str(folder / "start"), **keys
    ):
        assert_same_curve(got, curve)
    assert_same_tensors(adapter_of(tmp_path), adapter_of(folder / "end"))


@pytest.mark.parametrize(
    "family, layout",
    [(f, name) for f in tiny.FAMILY_KEYS for name in (LAYOUTS if f in ("llama", "qwen3") else FEW)],
)
def test_adapters_train_as_with_peft(family, layout, references, tmp_path):
    check(references[family], tmp_path, *LAYOUTS[layout])


SUBSETS = {
    "q_and_v": ("q_proj", "v_proj"),
    "gate_and_o": ("gate_proj", "o_proj"),
    "embedding": ("embed_tokens", "down_proj"),
    "head": ("lm_head", "k_proj"),
    "embedding_and_head": ("embed_tokens", "lm_head"),
}
SUBSET_LAYOUTS = ("one", "tp2_sp", "pp2")
VOCABULARY_LAYOUTS = (*SUBSET_LAYOUTS, "tp2", "pp2_vpp2_full_recompute", "dp2_overlap")


@pytest.mark.parametrize(
    "subset, layout",
    [
        (s, name)
        for s in SUBSETS
        for name in (VOCABULARY_LAYOUTS if s == "embedding_and_head" else SUBSET_LAYOUTS)
    ],
)
def test_some_modules_alone_train_as_with_peft(subset, layout, references, tmp_path):
    """A part of a fused matrix; the embedding and the head, whose vocabulary is padded by tensor parallelism."""
    check(references["llama", ("targets", SUBSETS[subset])], tmp_path, *LAYOUTS[layout])


@pytest.mark.parametrize("layout", ("selective_recompute", "full_recompute"))
def test_recomputation_finds_gradients_behind_frozen_modules(layout, references, tmp_path):
    """Nothing in front of the first layer's MLP needs a gradient, and what is recomputed there has to."""
    check(references["llama", ("targets", ("layers.0.mlp.down_proj",))], tmp_path, *LAYOUTS[layout])


@pytest.mark.parametrize("layout", ("one", "tp2_sp", "pp2", "pp2_vpp2"))
def test_embedding_and_head_of_a_tied_model_have_adapters_of_their_own(
    layout, references, tmp_path
):
    reference = references["qwen3", ("targets", ("embed_tokens", "lm_head", "v_proj"))]
    check(reference, tmp_path, *LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout", ("one", "pp2", "pp2_vpp2", "pp2_vpp2_full_recompute", "dp2_overlap")
)
def test_stages_without_adapters_train_as_with_peft(layout, references, tmp_path):
    check(
        references["llama", ("targets", ("layers.0.self_attn.q_proj",))], tmp_path, *LAYOUTS[layout]
    )


@pytest.mark.parametrize("layout", ("one", "tp2_sp", "pp2", "dp2_overlap"))
def test_modules_to_save_train_as_with_peft(layout, references, tmp_path):
    saved = ("modules_to_save", ("lm_head", "model.norm", "embed_tokens"))
    check(references["llama", ("targets", ("q_proj",)), saved], tmp_path, *LAYOUTS[layout])


def test_rank_stabilised_adapters_train_as_with_peft(references, tmp_path):
    check(
        references["llama", ("use_rslora", True), ("lora_alpha", 3)], tmp_path, *LAYOUTS["tp2_sp"]
    )


@pytest.mark.parametrize("ranks, keys", [(1, {}), (2, {}), (1, PACKED)])
@pytest.mark.parametrize(
    "family, targets",
    [("llama", ("q_proj", "up_proj", "embed_tokens", "lm_head")), ("qwen3", None)],
)
def test_the_torch_backend_trains_as_with_peft(family, targets, ranks, keys, references, tmp_path):
    reference = references[family] if targets is None else references[family, ("targets", targets)]
    check(reference, tmp_path, ranks, {**keys, "backend": "torch"})
