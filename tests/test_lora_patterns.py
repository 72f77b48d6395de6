"""PEFT's target_parameters, rank_pattern and alpha_pattern: PEFT's numbers, and files that PEFT
loads.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mca_lite.errors import ConfigError
from tests.shared import tiny, tiny_moe, world
from tests.shared.commands import convert
from tests.shared.files import assert_same_tensors, load_hf, tensors
from tests.shared.fixtures import beside_peft
from tests.shared.layouts import CP2, EP2, ETP1, OVERLAP, PACKED, PP2, SAVE, TP2_SP, TWO_ROWS, VPP2
from tests.shared.lora_tools import (
    adapter_of,
    load,
    make,
    train_cases_with_peft,
    train_from_adapter,
)
from tests.shared.training import BRIEF, assert_same_curve

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
PATTERNS = dict(
    rank_pattern={"q_proj": 2, r"layers\.[12]\.mlp\.down_proj": 7, "up_proj": 3},
    alpha_pattern={"v_proj": 20, "layers.0.self_attn.q_proj": 5.5, "up_proj": 1},
)
# {case: (model, PEFT's configuration)}
CASES = {
    "patterns": ("llama", PATTERNS),
    "patterns_of_all": (
        "llama",
        dict(
            targets=("q_proj", "embed_tokens", "lm_head"),
            rank_pattern={"embed_tokens": 3, "lm_head": 5},
            alpha_pattern={"lm_head": 3, "embed_tokens": 9},
            use_rslora=True,
        ),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        dict(
            targets=("q_proj", "o_proj"),
            target_parameters=EXPERTS,
            rank_pattern={r"experts\.down_proj": 3, "o_proj": 6},
            alpha_pattern={"gate_up_proj": 5},
        ),
    ),
    "mixtral": ("mixtral", dict(targets=[], target_parameters=EXPERTS[:1], use_rslora=True)),
    "olmoe": ("olmoe", dict(targets=["v_proj"], target_parameters=["layers.1." + EXPERTS[1]])),
    "gpt_oss": ("gpt_oss", dict(targets=("k_proj",), target_parameters=EXPERTS)),
}
LAYOUTS = {
    "one": (1, {}),
    "tp2_sp_packed": (2, {**TP2_SP, **PACKED}),
    "pp2_vpp2": (2, {**PP2, **VPP2}),
    "cp2": (2, CP2),
    "dp2_overlap": (2, OVERLAP),
    "torch": (1, dict(backend="torch")),
}
OF_EXPERTS = {
    "one": LAYOUTS["one"],
    "ep2": (2, {**EP2, "use_distributed_optimizer": True}),
    "ep2tp2_etp1": (2, {**EP2, **TP2_SP, **ETP1}),
    "tp2_packed": (2, {**TP2_SP, **PACKED}),
    "ep2pp2": (4, {**EP2, **PP2}),
    "torch": LAYOUTS["torch"],
}
DENSE = [case for case, (model, _) in CASES.items() if model in tiny.FAMILY_KEYS]
SPARSE = [case for case in CASES if case not in DENSE]


def save_model(folder, name: str) -> str:
    if name in tiny.FAMILY_KEYS:
        return tiny.save_model(folder, name)
    return str(tiny_moe.save_model(folder, name, num_hidden_layers=2))


@pytest.fixture(scope="module")
def peft_references(tmp_path_factory):
    """{case: (model folder, folder of PEFT's adapters at start and end, PEFT's curve)}"""
    folder = tmp_path_factory.mktemp("references")
    configs = {
        case: (save_model(folder / case / "model", model), config)
        for case, (model, config) in CASES.items()
    }
    [curves] = world.run(train_cases_with_peft, 1, str(folder), configs)
    return {case: (path, folder / case, curves[case]) for case, (path, _) in configs.items()}


assert_as_peft = beside_peft({**LAYOUTS, **OF_EXPERTS})


@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_patterns_of_linears_train_as_with_peft(case, layout, assert_as_peft):
    assert_as_peft(case, layout)


@pytest.mark.parametrize("case", SPARSE)
@pytest.mark.parametrize("layout", OF_EXPERTS)
def test_stacked_parameters_train_as_with_peft(case, layout, assert_as_peft):
    assert_as_peft(case, layout)


def in_half(*args, **keys) -> list:
    """train_from_adapter, whose adapters are added in products, as they are in half precision."""
    from mca_lite.part_lora_layers import Adapter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adapter, "adds_in_product", lambda self, weight: self.enabled)
        return train_from_adapter(*args, **keys)


@pytest.mark.parametrize(
    "case, layout", [("patterns", "tp2_sp_packed"), ("qwen3_moe", "ep2"), ("qwen3_moe", "one")]
)
def test_they_are_added_in_products_too(case, layout, peft_references, tmp_path):
    path, folder, curve = peft_references[case]
    ranks, keys = {**LAYOUTS, **OF_EXPERTS}[layout]
    keys = {**BRIEF, **TWO_ROWS, **keys}
    for got in world.run(in_half, ranks, path, str(tmp_path), str(folder / "start"), **keys):
        assert_same_curve(got, curve)
    assert_same_tensors(adapter_of(tmp_path), adapter_of(folder / "end"))


# -- files


def in_and_out(path: str, adapter: str, out: str, **keys) -> None:
    model, backend = make(path, out, **keys)
    backend = backend(load(adapter, model))
    backend.export_hf(out, "20KB")
    backend.export_merged(f"{out}/merged", "20KB")


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(48).reshape(2, 24) % tiny.VOCAB).logits


@pytest.mark.parametrize(
    "case, layout",
    [
        ("patterns", "tp2_sp_packed"),
        ("qwen3_moe", "ep2tp2_etp1"),
        ("mixtral", "ep2pp2"),
        ("olmoe", "torch"),
        ("gpt_oss", "ep2"),
    ],
)
def test_peft_loads_what_comes_out_of_a_layout(case, layout, peft_references, tmp_path):
    from peft import PeftModel

    path, folder, _ = peft_references[case]
    ranks, keys = {**LAYOUTS, **OF_EXPERTS}[layout]
    out = tmp_path / "out"
    world.run(in_and_out, ranks, path, str(folder / "start"), str(out), **keys)
    theirs, ours = adapter_of(folder / "start"), adapter_of(out)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    config = json.loads((out / "adapter_config.json").read_text())
    for key in ("rank_pattern", "alpha_pattern"):
        assert config.get(key, {}) == CASES[case][1].get(key, {})
    wanted = logits_of(PeftModel.from_pretrained(load_hf(path), folder / "start"))
    loaded = PeftModel.from_pretrained(load_hf(path), out)
    assert torch.equal(logits_of(loaded), wanted)
    torch.testing.assert_close(logits_of(load_hf(out / "merged")), wanted, rtol=0, atol=1e-5)
    assert (logits_of(load_hf(path)) - wanted).abs().max() > 1e-3, "the adapter changes nothing"
    code, _, error = convert(path, tmp_path / "files", "--merge", out, "--verify")
    assert code == 0, error
    from_files = tensors(tmp_path / "files")
    for name, tensor in tensors(out / "merged").items():
        torch.testing.assert_close(from_files[name], tensor, rtol=0, atol=1e-6)


def fresh(path: str, out: str, spec: dict, **keys) -> tuple:
    """Save fresh adapters -> (the trained numbers by our account, those of the model)"""
    from mca_lite import part_lora, part_lora_files
    from mca_lite.part_lora_layers import LoraSpec
    from mca_lite.part_lora_sites import adapters_of

    model, _ = make(path, out, **keys)
    part_lora.inject(model, LoraSpec(**spec))
    part_lora_files.save_adapter(model, out)
    return sum(p.numel() for adapter in adapters_of(model) for p in adapter.parameters())


OF_ALL = dict(targets=("all",), target_parameters=EXPERTS, rank_pattern={"down_proj": 3})


def test_fresh_adapters_are_the_same_in_every_layout(tmp_path):
    path = save_model(tmp_path / "model", "qwen3_moe")
    [count] = world.run(fresh, 1, path, str(tmp_path / "one"), OF_ALL)
    wanted = adapter_of(tmp_path / "one")
    assert count == sum(tensor.numel() for tensor in wanted.values())
    assert all(tensor.any() == ("lora_A" in name) for name, tensor in wanted.items())
    for layout in ("ep2tp2_etp1", "tp2_packed", "torch"):
        ranks, keys = OF_EXPERTS[layout]
        world.run(fresh, ranks, path, str(tmp_path / layout), OF_ALL, **keys)
        ours = adapter_of(tmp_path / layout)
        assert ours.keys() == wanted.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in wanted.items())


def test_all_leaves_the_experts_to_target_parameters(tmp_path):
    """all would put an adapter on each expert; PEFT's shapes are those of r rows an expert."""
    path = save_model(tmp_path / "model", "qwen3_moe")
    world.run(fresh, 1, path, str(tmp_path / "out"), OF_ALL)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_parameters"] == list(EXPERTS)
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter_of(tmp_path / "out").items()}
    experts = "base_model.model.model.layers.1.mlp.experts"
    of_experts = {n: s for n, s in shapes.items() if n.startswith(experts)}
    assert of_experts == {
        f"{experts}.base_layer.lora_A.weight": (4 * 8, 32),
        f"{experts}.base_layer.lora_B.weight": (2 * 16, 4 * 8),
        f"{experts}.lora_A.weight": (4 * 3, 16),
        f"{experts}.lora_B.weight": (32, 4 * 3),
    }


def test_the_plan_counts_a_shared_matrix_once(tmp_path):
    from mca_lite import AutoConfig, TrainingArguments
    from mca_lite.part_lora import Lora
    from mca_lite.part_lora_layers import LoraSpec
    from mca_lite.part_lora_sites import plan
    from mca_lite.weights_files import SafetensorsSource

    path = save_model(tmp_path / "model", "qwen3_moe")
    [count] = world.run(fresh, 1, path, str(tmp_path / "out"), OF_ALL)
    config = AutoConfig.from_pretrained(path, TrainingArguments(output_dir="unused"))
    lora = Lora(plan(config, LoraSpec(**OF_ALL)))
    numbers = work = 0
    source = SafetensorsSource(path)
    for module in lora.spec.modules:
        shape = source.shape(f"{module}.weight")
        shapes = lora.shapes_beside(module, list(shape), False)
        numbers += sum(rows * columns for rows, columns in shapes.values())
        work += lora.work_beside(module, 1.0, shape)
    assert numbers == work == count


@pytest.mark.parametrize(
    "case, before, after",
    [
        ("qwen3_moe", "ep2", "ep2"),
        ("qwen3_moe", "ep2", "ep2tp2_etp1"),
        ("qwen3_moe", "torch", "torch"),
        ("patterns", "tp2_sp_packed", "pp2_vpp2"),
    ],
)
def test_checkpoints_go_on_in_other_layouts(case, before, after, peft_references, tmp_path):
    path, folder, _ = peft_references[case]
    layouts = {**LAYOUTS, **OF_EXPERTS}
    (ranks, keys), (others, other) = layouts[before], layouts[after]
    save = dict(SAVE, steps=3, **TWO_ROWS)
    args = path, str(tmp_path / "first"), str(folder / "start")
    [wanted, *_] = world.run(train_from_adapter, ranks, *args, **{**save, **keys})
    again = {**save, **other, "resume_from_checkpoint": str(tmp_path / "first" / "checkpoint-2")}
    args = path, str(tmp_path / "then"), str(folder / "start")
    [got, *_] = world.run(train_from_adapter, others, *args, **again)
    if before == after:
        assert got == wanted
    assert_same_curve(got, wanted, 5e-6)
    assert_same_tensors(adapter_of(tmp_path / "then"), adapter_of(tmp_path / "first"))


def resume_with(path: str, out: str, spec: dict) -> None:
    from mca_lite import part_lora
    from mca_lite.part_lora_files import check_checkpoint
    from mca_lite.part_lora_layers import LoraSpec

    model, _ = make(path, out)
    check_checkpoint(part_lora.inject(model, LoraSpec(**spec)), out)


def refused(path: str, out: str, spec: dict) -> str:
    try:
        resume_with(path, out, spec)
    except ValueError as error:
        return str(error)
    return "taken"


def test_other_patterns_are_not_resumed(tmp_path):
    path, out = save_model(tmp_path / "model", "llama"), str(tmp_path / "out")
    spec = dict(targets=("q_proj", "o_proj"), rank_pattern={"q_proj": 2})
    world.run(fresh, 1, path, out, spec)
    assert world.run(refused, 1, path, out, spec) == ["taken"]
    [error] = world.run(refused, 1, path, out, {**spec, "alpha_pattern": {"q_proj": 3}})
    assert "alpha_pattern None" in error and "has {'q_proj': 3" in error, error


# -- refusals


@pytest.mark.parametrize(
    "model, spec, words",
    [
        (
            "qwen3_moe",
            dict(target_parameters=("mlp.gate.weight",)),
            "try: mlp.experts.gate_up_proj",
        ),
        ("llama", dict(target_parameters=EXPERTS), "try: lora_target, which takes linear layers"),
        (
            "qwen3_moe",
            dict(target_parameters=EXPERTS, targets=("q_proj",), dropout=0.1),
            "lora_dropout: 0.1",
        ),
        (
            "qwen3_moe",
            dict(target_parameters=EXPERTS[:1], targets=("q_proj", "*.experts.*.down_proj")),
            "try: lora_target without experts",
        ),
        (
            "qwen3_moe",
            dict(targets=("all",), use_rslora=True, rank_pattern={"q_proj": 2}),
            "use_rslora: true",
        ),
    ],
)
def test_what_peft_cannot_have_is_refused(model, spec, words, tmp_path):
    from mca_lite import AutoConfig, TrainingArguments, part_lora
    from mca_lite.part_lora_layers import LoraSpec

    path = save_model(tmp_path / "model", model)
    config = AutoConfig.from_pretrained(path, TrainingArguments(output_dir="unused"))
    with pytest.raises(ConfigError) as error:
        part_lora.plan(config, LoraSpec(**spec))
    assert words in str(error.value), error.value


@pytest.mark.parametrize(
    "keys, words",
    [
        ("rank_pattern={q_porj: 4}", "it means no module with an adapter"),
        ("alpha_pattern={gate_proj: 4}", "try: target_parameters: mlp.experts.gate_up_proj"),
        ("rank_pattern={q_proj: 0}", "expected a number above 0"),
        ('rank_pattern={"(q": 2}', "is no regular expression"),
        ("rank_pattern={q_proj: many}", "expected a whole number"),
        ("lora_target=[]", "it names no layer"),
    ],
)
def test_keys_without_sense_are_refused_before_ranks_meet(keys, words, tmp_path):
    from mca_lite.args import parse_args
    from mca_lite.run import make_plan
    from tests.shared.small_runs import save_tokenizer, write_data

    path = save_model(tmp_path / "model", "qwen3_moe")
    save_tokenizer(path)
    write_data(tmp_path)
    given = f"model_name_or_path={path} dataset={tmp_path}/chat.jsonl output_dir={tmp_path}/out"
    given += f" cache_dir={tmp_path}/cache stage=sft finetuning_type=lora"
    with pytest.raises(ConfigError) as error:
        make_plan(parse_args([*given.split(), keys]))
    assert words in str(error.value), error.value


@pytest.mark.parametrize("lost", ["base_layer.lora_B", "rank_pattern", "target_parameters"])
def test_a_damaged_file_is_refused(lost, peft_references, tmp_path):
    from safetensors.torch import save_file

    path, folder, _ = peft_references["qwen3_moe"]
    adapter = tmp_path / "adapter"
    shutil.copytree(folder / "start", adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, lost: None}))
    found = load_file(adapter / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in found.items() if lost not in name}
    save_file(kept, adapter / "adapter_model.safetensors")
    with pytest.raises(Exception, match="is damaged, or of another model|another model: set"):
        world.run(in_and_out, 1, path, str(adapter), str(tmp_path / "out"))
