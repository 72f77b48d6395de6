"""Freezing: loss, gradient norm and exported weights are those of plain torch with requires_grad
False, in every layout.
"""

import json
import re

import pytest

from mca_lite.finetuning import lowest_layer
from tests.shared import rm_tools, tiny, tiny_moe, world
from tests.shared.cells import cell, shared_worlds, thinned
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.frozen import by_keys, by_pattern
from tests.shared.layouts import (
    CP2,
    DIST_OPT,
    EP2,
    FULL,
    ONE_ROW,
    OVERLAP,
    PACKED,
    PP2,
    TP2,
    TP2_SP,
    TWO_ROWS,
    VPP2,
)
from tests.shared.small_runs import save_all, train_by_words
from tests.shared.training import (
    BRIEF,
    assert_same_curve,
    read_log,
    refusal,
    train,
    whole_and_resumed,
)

FREEZE = dict(finetuning_type="freeze")
LAYOUTS = {
    "one": (1, {}),
    "dp2_dist_opt": (2, {**DIST_OPT, **ONE_ROW}),
    "dp2_overlap": (2, {**OVERLAP, **ONE_ROW}),
    "tp2": (2, TP2),
    "tp2_sp": (2, TP2_SP),
    "pp2": (2, PP2),
    "pp2_vpp2": (2, {**PP2, **VPP2}),
    "pp2_full_recompute": (2, {**PP2, **FULL}),
    "full_recompute": (1, FULL),
    "cp2_packed": (2, {**CP2, **PACKED}),
    "pp2dp2_overlap": (4, {**PP2, **OVERLAP, **ONE_ROW}),
    "tp2sp_pp2_vpp2_dist_opt": (4, {**TP2_SP, **PP2, **VPP2, **DIST_OPT}),
    "torch": (1, dict(backend="torch")),
    "torch_dp2": (2, dict(backend="torch", **ONE_ROW)),
    "torch_packed": (1, {**PACKED, "backend": "torch"}),
    "ep2": (2, {**EP2, **DIST_OPT}),
}
# {case: (family, keys of finetuning, pattern of the parameters in training)}
CASES = {
    "last": ("llama", {}, r"\.layers\.[23]\."),
    "first": ("llama", dict(freeze_trainable_layers=-1), r"\.layers\.0\."),
    "mlp_of_all": (
        "qwen2",
        dict(freeze_trainable_layers=4, freeze_trainable_modules="mlp"),
        r"\.mlp\.",
    ),
    "tied": (
        "qwen3",
        dict(freeze_trainable_layers=-2, freeze_extra_modules="embed_tokens"),
        r"\.layers\.[01]\.|embed_tokens",
    ),
    "head": (
        "llama",
        dict(
            freeze_trainable_layers=1,
            freeze_trainable_modules="self_attn,input_layernorm",
            freeze_extra_modules="norm,lm_head",
        ),
        r"\.layers\.3\.(self_attn|input_layernorm)\.|model\.norm\.|lm_head",
    ),
    "outside": (
        "llama",
        dict(freeze_trainable_layers=0, freeze_extra_modules="all"),
        r"embed_tokens|model\.norm\.|lm_head",
    ),
    "experts": ("qwen3_moe", dict(freeze_trainable_layers=1), r"\.layers\.3\."),
}


def train_case(path: str, out: str, keys: dict, **more):
    return train(path, out, adapt=by_keys(FREEZE | keys), **more)


def train_in_plain_torch(paths: dict, folder: str) -> dict:
    return {
        case: train(
            paths[family],
            f"{folder}/{case}",
            backend="torch",
            adapt=by_pattern(pattern),
            export=True,
            **BRIEF,
        )
        for case, (family, _, pattern) in CASES.items()
    }


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """({family: folder of its model}, folder of the exports, {case: curve})"""
    folder = tmp_path_factory.mktemp("plain")
    families = {family for family, _, _ in CASES.values()}
    paths = {
        family: (tiny_moe if family.endswith("moe") else tiny).save_model(folder / family, family)
        for family in sorted(families)
    }
    [curves] = world.run(train_in_plain_torch, 1, paths, str(folder))
    return paths, folder, curves


@pytest.fixture(scope="module")
def trained(request, references, tmp_path_factory):
    def of(case: str):
        family, keys, _ = CASES[case]
        return (references[0][family], keys), {}

    return shared_worlds(
        request, tmp_path_factory, LAYOUTS, of, run=train_case, **BRIEF, **TWO_ROWS
    )


DENSE = [name for name in LAYOUTS if name != "ep2"]
FEW = ["pp2", "torch"]


@pytest.mark.parametrize(
    "case, layout",
    thinned(["last"], DENSE, ["last"], [])
    + thinned(["head", "tied"], DENSE, [], ["tp2_sp", "pp2_vpp2", "torch"])
    + thinned(["first", "mlp_of_all", "outside"], DENSE, [], FEW)
    + [cell("experts", "ep2"), cell("experts", "torch")],
)
def test_frozen_models_train_as_in_plain_torch(case, layout, references, trained):
    paths, folder, curves = references
    got, out = trained(layout)
    for of_rank in got:
        assert_same_curve(of_rank[case], curves[case])
    assert_same_tensors(tensors(out / case), tensors(folder / case))
    start, end = tensors(paths[CASES[case][0]]), tensors(out / case)
    changed = {name for name in start if not start[name].equal(end[name])}
    assert changed == {name for name in start if re.search(CASES[case][2], name)}


def died_and_resumed(path: str, out: str, backend: str, **keys) -> tuple:
    """Curves of a run and of one that died, then the words of a resume with other frozen layers."""

    freeze = by_keys(FREEZE)
    keys = dict(keys, backend=backend, adapt=freeze, save_hf_checkpoints=True)
    return whole_and_resumed(path, out, **keys)


@pytest.mark.parametrize(
    "backend, ranks, keys",
    [("torch", 1, {}), ("megatron", 2, PP2), ("megatron", 2, OVERLAP)],
    ids=["torch", "pp2", "dp2_overlap"],
)
def test_a_frozen_run_resumes_bit_for_bit(tmp_path, backend, ranks, keys):
    path = tiny.save_model(tmp_path / "model", "llama")
    curves = world.run(died_and_resumed, ranks, path, str(tmp_path / "out"), backend, **keys)
    for whole, resumed in curves:
        assert resumed == whole
    start = tensors(path)
    exported = tensors(tmp_path / "out" / "checkpoint-2" / "hf")
    changed = {name for name in start if not start[name].equal(exported[name])}
    assert changed == {name for name in start if re.search(r"\.layers\.[23]\.", name)}


def run_words(folder: str, **keys) -> str:
    """The words of the error of a run of save_all's files, "" without one."""
    base = dict(
        model_name_or_path=f"{folder}/model",
        dataset=f"{folder}/chat.jsonl",
        cache_dir=f"{folder}/cache",
        output_dir=f"{folder}/out",
        cutoff_len=40,
        global_batch_size=2,
        max_steps=2,
        logging_steps=1,
        save_steps=1,
        disable_tqdm=True,
        finetuning_type="freeze",
    )
    from mca_lite.errors import UserError

    try:
        train_by_words({**base, **keys})
    except (UserError, ValueError) as error:
        return str(error)
    return ""


def runs_and_refusals(folder: str, use_mca: bool) -> list[str]:
    def run(**keys):
        return run_words(folder, use_mca=use_mca, **keys)

    return [
        run(freeze_trainable_layers=1),
        run(resume_from_checkpoint="auto", freeze_trainable_layers=2),
        run(freeze_trainable_layers=5),
        run(freeze_trainable_modules="q"),
        run(freeze_extra_modules="layers"),
        run(freeze_trainable_layers=0),
        run(add_tokens="w97,w98"),
        run(freeze_vision_tower=False),
        run(finetuning_type="full", freeze_trainable_layers=1),
        run(moe_router_bias_update_rate=0.1),
    ]


@pytest.mark.parametrize("use_mca", [True, False], ids=["megatron", "torch"])
def test_what_cannot_be_frozen_is_refused_in_words(tmp_path, use_mca):
    save_all(tmp_path, "llama")
    [words] = world.run(runs_and_refusals, 1, str(tmp_path), use_mca)
    trained, *refused = words
    assert trained == ""
    expected = [
        "freeze_trainable_layers 1, and this run has 2",
        "the model has 4 layers",
        "try: some of",
        "try: some of",
        "every weight of the model would be frozen",
        "embed_tokens, lm_head is frozen",
        "the model has no vision tower",
        "no effect, since finetuning_type is full",
        "frozen routers keep their bias",
    ]
    for text, part in zip(refused, expected, strict=True):
        assert part in text
    summary = json.loads((tmp_path / "out" / "run_summary.json").read_text())["sections"]
    weights = {k: v.numel() for k, v in tensors(tmp_path / "model").items()}
    trained = sum(n for name, n in weights.items() if ".layers.3." in name)
    assert f"({trained:,} trained)" in summary["model"]["parameters on this rank"]
    assert [line["step"] for line in read_log(tmp_path / "out")][-1] == 2


def test_a_part_of_a_fused_matrix_is_refused_on_megatron_alone(tmp_path):
    path = tiny.save_model(tmp_path / "model", "llama")
    keys = dict(freeze_trainable_modules="self_attn.q_proj")
    words = world.run(refusal_of, 1, path, keys)[0]
    assert "are one matrix on megatron-core" in words["megatron"]
    assert words["torch"] == ""


def weights_in_training(path: str) -> list[list[str]]:
    """Of megatron-core's model and of plain torch's."""
    from mca_lite.model import AutoModel, load_torch_model
    from tests.shared.files import make_args

    models = AutoModel.from_pretrained(path, make_args()), load_torch_model(path)
    frozen = map(by_keys(dict(FREEZE, stage="rm")), models)
    return [[n for n, p in model.named_parameters() if p.requires_grad] for model in frozen]


def test_the_value_head_of_a_frozen_reward_model_trains(tmp_path):
    path = rm_tools.save_model(tmp_path / "model")
    [found] = world.run(weights_in_training, 1, path)
    for names in found:
        outside = [name for name in names if not re.search(r"\.layers\.[23]\.", name)]
        assert [name.split(".")[-2:] for name in outside] == [["score", "weight"]]
        assert len(names) > 1


def refusal_of(path: str, keys: dict) -> dict:
    from mca_lite.model import AutoModel, load_torch_model
    from tests.shared.files import make_args

    words = {}
    for backend, model in (
        ("torch", load_torch_model(path)),
        ("megatron", AutoModel.from_pretrained(path, make_args())),
    ):
        words[backend] = refusal(by_keys(FREEZE | keys), model)
    return words


def test_plan_counts_gradients_and_states_of_trained_weights_alone(tmp_path):
    from mca_lite.args import parse_args
    from mca_lite.tool_plan_memory import ModelOfRun

    save_all(tmp_path, "llama")
    words = [f"model_name_or_path={tmp_path}/model", "output_dir=unused", "dataset=unused"]
    weights = {k: v.numel() for k, v in tensors(tmp_path / "model").items()}
    trained = sum(n for name, n in weights.items() if re.search(r"\.layers\.[23]\.", name))
    memory = {}
    for kind in ("full", "freeze"):
        run = parse_args([*words, f"finetuning_type={kind}"], needs_world=False)
        model = ModelOfRun(run)
        config = model.config_of(run)
        memory[kind] = model.fullest_rank(run.training, config, 1, on_gpu=True)[1]
    assert memory["freeze"].trained == trained
    assert memory["freeze"].gradients == 4 * trained
    assert memory["freeze"].optimizer == 8 * trained
    assert memory["freeze"].weights == memory["full"].weights
    assert memory["freeze"].activations < memory["full"].activations


@pytest.mark.parametrize("trained, wanted", [("model.norm", 4), ("model.layers.2.norm", 2)])
def test_the_last_norm_alone_comes_after_the_layers(trained, wanted):
    for head in ("lm_head", "score"):
        assert lowest_layer([trained, head], 4) == wanted


def test_layers_below_every_trained_weight_have_no_backward_flops():
    """2 FLOPs a weight and token below, 4 if frozen above, 6 if trained; the head is above."""
    from mca_lite.log import model_sizes, partial_work

    config = tiny.hf_config("llama")
    sizes = model_sizes(config)
    head = config.hidden_size * config.vocab_size
    layer = (sizes.weights - head) / 4
    trained = {
        f"model.layers.{i}.mlp.{name}_proj" for i in (2, 3) for name in ("gate", "up", "down")
    }
    mlp = 3 * config.hidden_size * config.intermediate_size
    work = partial_work(config, trained, None)
    weights = 2 * 2 * layer + 4 * (2 * (layer - mlp) + head) + 6 * 2 * mlp
    assert work.flops(10, 0) == pytest.approx(10 * weights)
    assert work.flops(0, 100) == pytest.approx(100 * (6 + 2) * sizes.core / 2)


def zeros_of_run(path: str, out: str, **keys) -> list[int]:
    train(path, out, adapt=by_keys(FREEZE), log_num_zeros_in_grad=True, **keys)
    return [line["num_zeros_in_grad"] for line in read_log(out)]


def test_zeros_of_the_gradient_are_counted_without_a_frozen_embedding(tmp_path):
    """Its padded rows are in no gradient."""
    path = tiny.save_model(tmp_path / "model", "llama")
    [plain] = world.run(zeros_of_run, 1, path, str(tmp_path / "torch"), backend="torch", **BRIEF)
    for of_rank in world.run(zeros_of_run, 2, path, str(tmp_path / "tp2"), **BRIEF, **TP2):
        assert of_rank == plain
