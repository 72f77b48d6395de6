"""Experts from Hugging Face's files and back: the same bytes and logits in every layout, fused or
drawn from a seed.
"""

import functools
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from tests.shared import tiny_moe, world
from tests.shared.files import SEED, TOKENS, assert_same_bytes, changed, load_hf, make_args, tensors
from tests.shared.layouts import CP2, DIST_OPT, EP2, EP4, ETP1, EXPERTS, PP2, TP2_SP, VPP2
from tests.shared.training import BRIEF, train, whole_and_resumed

ALL = {
    "one": (1, {}),
    **EXPERTS,
    "tp2_etp1": (2, {**TP2_SP, **ETP1}),
    "ep2tp2_etp1": (2, {**TP2_SP, **EP2, **ETP1}),
    "ep2pp2vpp2": (4, {**EP2, **PP2, **VPP2}),
    "ep4cp2": (4, {**EP4, **CP2}),
}
# Shared experts with a gate; groups and a bias that chooses. A family's rows know nothing of a
# layout: the other families go through every way to cut an expert, and through virtual stages.
EVERYWHERE = ("qwen2_moe", "glm4_moe")
FEW = ("one", "ep2tp2", "ep2pp2vpp2")
LIMIT = 7000
SHARDED = ("glm4_moe", "glm4_moe-bf16")  # what is cut into files has no family
ROUTER = ".mlp.gate.weight"  # transformers 5.24 keeps it float32 in a bf16 model, as in its files


def through_every_family(sources: dict, out: str, keys: dict) -> dict:
    """Export each model as it came, in one file and some in several -> logits on one stage."""
    from mca_lite.model import AutoModel

    logits = {}
    for name, path in sources.items():
        args = make_args(bf16=name.endswith("bf16"), **keys)
        models = AutoModel.from_pretrained(path, args).eval()
        models.save_pretrained(f"{out}/{name}")
        if name in SHARDED:
            models.save_pretrained(f"{out}/{name}-shards", max_shard_size=LIMIT)
        if args.pipeline_model_parallel_size * args.context_parallel_size == 1 and not args.bf16:
            with torch.no_grad():
                logits[name] = models.gather_logits(models(torch.tensor(TOKENS))).tolist()
    return logits


def draw_from_a_seed(sources: dict, out: str, keys: dict) -> None:
    from mca_lite.model import AutoModel
    from mca_lite.model_config import AutoConfig

    args = make_args(**keys)
    for name, path in sources.items():
        drawn = AutoModel.from_config(AutoConfig.from_pretrained(path, args), args, SEED)
        drawn.save_pretrained(f"{out}/{name}-seed")


def fuse(path: str, folder, model_type: str) -> str:
    """The same model in the form in which transformers 5 holds it in memory."""
    shutil.copytree(path, folder)
    model = load_hf(path)
    persistent = model.state_dict()
    (folder / "model.safetensors").unlink()
    save_file(
        {k: v.clone() for k, v in persistent.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return str(folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    made = {name: tiny_moe.save_model(folder / name, name) for name in tiny_moe.MODELS}
    made["glm4_moe-bf16"] = str(folder / "bf16")
    load_hf(made["glm4_moe"], dtype=torch.bfloat16).save_pretrained(made["glm4_moe-bf16"])
    exact = tensors(made["glm4_moe"])

    def with_routers(dtype, values: dict) -> None:
        values |= {name: exact[name].to(dtype) for name in values if name.endswith(ROUTER)}

    for name, dtype in (("routers-bf16", torch.float32), ("all-bf16", torch.bfloat16)):
        change = functools.partial(with_routers, dtype)
        made[name] = changed(made["glm4_moe-bf16"], folder / name, change)
    return made


@pytest.fixture(scope="module")
def logits(sources):
    with torch.no_grad():
        return {
            name: load_hf(path)(torch.tensor(TOKENS)).logits
            for name, path in sources.items()
            if "bf16" not in name
        }


def check_round_trip(layout, names, sources, logits, out):
    ranks, keys = ALL[layout]
    chosen = {name: sources[name] for name in names}
    for answer in world.run(through_every_family, ranks, chosen, str(out), keys):
        for name, values in answer.items():
            torch.testing.assert_close(torch.tensor(values), logits[name], rtol=0, atol=1e-5)
    for name, path in chosen.items():
        for export in (name, *([f"{name}-shards"] if name in SHARDED else [])):
            assert_same_bytes(tensors(out / export), tensors(path))


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.full] if n == "ep4cp2" else []) for n in ALL]
)
def test_round_trip_gives_the_same_bytes_and_logits(layout, sources, logits, tmp_path):
    names = sources if layout in FEW else EVERYWHERE
    check_round_trip(layout, names, sources, logits, tmp_path)
    shards = tmp_path / "glm4_moe-shards"
    assert len(list(shards.glob("*.safetensors"))) > 5
    assert json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.full
@pytest.mark.parametrize("layout", [layout for layout in ALL if layout not in FEW])
def test_round_trip_of_more_families_gives_the_same_bytes(layout, sources, logits, tmp_path):
    names = [name for name in sources if name not in EVERYWHERE]
    check_round_trip(layout, names, sources, logits, tmp_path)


def test_the_bias_that_chooses_experts_stays_float32_in_a_bf16_model(sources):
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert tensors(sources["glm4_moe-bf16"])[name].dtype == torch.float32


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_a_run_in_bf16_leaves_the_bias_that_chooses_experts_as_it_was(sources, tmp_path, backend):
    path, out = sources["glm4_moe-bf16"], str(tmp_path / "out")
    world.run(train, 1, path, out, backend=backend, bf16=True, export=True, **BRIEF)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    before, after = tensors(path)[name], tensors(out)[name]
    assert not before.equal(before.bfloat16().float()), "the rounding would not be seen"
    assert_same_bytes({name: after}, {name: before})


def train_and_resume(path: str, out: str, keys: dict) -> tuple[list, list]:
    return whole_and_resumed(path, out, bf16=True, export=True, **keys)


@pytest.mark.parametrize(
    "keys",
    [pytest.param(DIST_OPT, id="dp2"), pytest.param(TP2_SP, id="tp2sp", marks=pytest.mark.full)],
)
def test_routers_that_files_keep_in_float32_are_trained_and_resumed_so(keys, sources, tmp_path):
    path, out = sources["routers-bf16"], str(tmp_path / "out")
    for whole, resumed in world.run(train_and_resume, 2, path, out, keys):
        assert whole == resumed
    before, after = tensors(path), tensors(out)
    assert {name: t.dtype for name, t in after.items()} == {n: t.dtype for n, t in before.items()}
    weight = after["model.layers.1" + ROUTER]
    assert not weight.equal(before["model.layers.1" + ROUTER])
    assert not weight.equal(weight.bfloat16().float())


def drawn_by_torch(sources: dict) -> dict:
    from mca_lite.model import load_torch_model

    out = {}
    for name, path in sources.items():
        model = load_torch_model(path, train_from_scratch=True, seed=SEED)
        out[name] = model(torch.tensor(TOKENS)).logits.tolist()
    return out


def test_both_backends_draw_the_same_weights(sources, tmp_path):
    chosen = {name: sources[name] for name in ("mixtral", "glm4_moe", "flint")}
    world.run(draw_from_a_seed, 2, chosen, str(tmp_path), EP2)
    [wanted] = world.run(drawn_by_torch, 1, chosen)
    for name, values in wanted.items():
        with torch.no_grad():
            ours = load_hf(tmp_path / f"{name}-seed")(torch.tensor(TOKENS)).logits
        torch.testing.assert_close(ours, torch.tensor(values), rtol=0, atol=1e-6)
    sinks = tensors(tmp_path / "flint-seed")["model.layers.1.self_attn.softmax_offset"]
    assert 0.001 < sinks.std() < 0.1


def there_and_back(path: str, out: str) -> None:
    from pathlib import Path

    from mca_lite.tool_convert import convert

    convert(path, Path(f"{out}/checkpoint"))
    convert(f"{out}/checkpoint", Path(f"{out}/back"))


@pytest.mark.parametrize("name", ["glm4_moe", "routers-bf16"])
def test_the_convert_command_goes_to_a_checkpoint_and_back(name, sources, tmp_path):
    world.run(there_and_back, 1, sources[name], str(tmp_path))
    assert_same_bytes(tensors(tmp_path / "back"), tensors(sources[name]))


MODULE = ("model.layers.1.mlp.experts.gate_up_proj", (2, 16, 8))


def test_names_of_experts_in_files_are_those_of_the_familys_rows():
    from mca_lite.families import FAMILIES
    from mca_lite.weights_files import file_parts

    families = [
        name for name, family in FAMILIES.items() if any("[]" in r.mca for r in family.rows)
    ]
    assert len(families) >= 7
    for name in families:
        if FAMILIES[name].stacked_experts:  # test_weights_experts.py
            continue
        block, gate, up = ("block_sparse_moe", "w1", "w3")
        if name not in ("mixtral", "minimax_m2"):
            block, gate, up = ("mlp", "gate_proj", "up_proj")
        prefix = f"model.layers.1.{block}.experts"
        assert file_parts(name, *MODULE) == [
            (f"{prefix}.{e}.{part}.weight", (e, rows))
            for e in (0, 1)
            for part, rows in ((gate, slice(0, 8)), (up, slice(8, 16)))
        ]


def test_a_family_renames_parts_of_its_modules_names(monkeypatch):
    from mca_lite.families import FAMILIES
    from mca_lite.weights_files import file_parts

    renamed = replace(FAMILIES["glm4_moe"], renamed={"mlp.gate.bias": "mlp.bias"})
    monkeypatch.setitem(FAMILIES, "glm4_moe", renamed)
    name = "model.layers.1.mlp.gate.bias"
    assert file_parts("glm4_moe", name, (8,)) == [("model.layers.1.mlp.bias", ())]
    assert file_parts("dots1", name, (8,)) == [(name, ())]


def test_fused_experts_that_the_rows_do_not_name_are_refused():
    from mca_lite.weights_files import file_parts

    with pytest.raises(ValueError, match="llama holds the experts of a layer.*add moe_rows"):
        file_parts("llama", *MODULE)
    with pytest.raises(ValueError, match="mixtral holds the experts"):
        file_parts("mixtral", MODULE[0].replace("gate_up", "up_gate"), MODULE[1])
    # transformers' own form of a family that is not in the table: it loads that again
    assert file_parts("granitemoe", *MODULE) == [(MODULE[0], ())]
