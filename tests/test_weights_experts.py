"""Files with the experts of a layer in one tensor, those of gpt_oss: in bf16 and in MXFP4 read by
slices, and written as transformers has them.
"""

import json
import shutil

import pytest
import torch

from tests.shared import tiny_moe, world
from tests.shared.cells import train_all
from tests.shared.files import (
    TOKENS,
    assert_same_bytes,
    assert_same_tensors,
    changed,
    load_hf,
    tensors,
)
from tests.shared.layouts import EP2, PP2, SP, TP2
from tests.shared.quantised_tools import save_as_mxfp4
from tests.shared.training import BRIEF, assert_same_curve

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2)  # of blocks of 32


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("plain")
    return tiny_moe.save_model(folder, "gpt_oss", dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def quantised(plain, tmp_path_factory) -> str:
    return save_as_mxfp4(plain, tmp_path_factory.mktemp("mxfp4") / "model")


def dequantised(path: str, **keys):
    """transformers' model with its experts out of MXFP4."""
    from transformers import Mxfp4Config

    return load_hf(path, quantization_config=Mxfp4Config(dequantize=True), **keys)


def single_experts(model) -> dict[str, torch.Tensor]:
    """transformers' matrices and biases by the names of single experts, by hand."""
    out = {}
    for layer, block in enumerate(model.model.layers):
        experts = block.mlp.experts
        for e in range(len(experts.gate_up_proj)):
            name = f"model.layers.{layer}.mlp.experts.{e}."
            for i, part in enumerate(("gate_proj", "up_proj")):
                out[f"{name}{part}.weight"] = experts.gate_up_proj[e].t()[i::2]
                out[f"{name}{part}.bias"] = experts.gate_up_proj_bias[e][i::2]
            out[f"{name}down_proj.weight"] = experts.down_proj[e].t()
            out[f"{name}down_proj.bias"] = experts.down_proj_bias[e]
    return {name: tensor.detach() for name, tensor in out.items()}


@pytest.mark.parametrize("kind", ["plain", "quantised", "extreme"])
def test_single_experts_are_read_as_transformers_has_them(kind, plain, quantised, tmp_path):
    from mca_lite.weights_files import SafetensorsSource

    path = {"plain": plain, "quantised": quantised}.get(kind)
    path = path or save_as_mxfp4(plain, tmp_path / "model", extreme=True)
    source = SafetensorsSource(path)
    load = load_hf if kind == "plain" else dequantised
    wanted = single_experts(load(path, dtype=torch.bfloat16))
    assert wanted.keys() == {name for name in source.names() if ".experts." in name}
    for name, value in wanted.items():
        assert source.shape(name) == tuple(value.shape)
        got = source.read(name)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got.contiguous().view(torch.int16), value.contiguous().view(torch.int16))
        part = (slice(5, 40), slice(7, 50))[: value.dim()]
        assert torch.equal(source.read(name, part).nan_to_num(), value[part].nan_to_num())


def exported(paths: dict, out: str, keys: dict) -> dict:
    """Each model read and written again -> their origins, for the start summary."""
    from mca_lite import AutoModel, TrainingArguments

    origins = {}
    for name, path in paths.items():
        args = TrainingArguments(output_dir="unused", bf16=True, **keys)
        models = AutoModel.from_pretrained(path, args)
        models.save_pretrained(f"{out}/{name}")
        origins[name] = models.weights_from
    return origins


@pytest.mark.parametrize("keys", [{**TP2, **SP, **PP2}, {**EP2, **TP2, **SP}])
def test_exports_have_stacked_experts_in_bf16(keys, plain, quantised, tmp_path):
    paths = {"plain": plain, "mxfp4": quantised}
    [origins, *_] = world.run(exported, 4, paths, str(tmp_path), keys)
    assert_same_bytes(tensors(tmp_path / "plain"), tensors(plain))
    theirs = dequantised(quantised, dtype=torch.bfloat16)
    wanted = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    kept = tensors(quantised)  # transformers makes norms float32
    wanted |= {name: kept[name] for name in wanted.keys() & kept.keys()}
    assert_same_bytes(tensors(tmp_path / "mxfp4"), wanted)
    config = json.loads((tmp_path / "mxfp4/config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert "quantised weights" in origins["mxfp4"] and "quantised" not in origins["plain"]
    again = load_hf(tmp_path / "mxfp4")
    with torch.no_grad():
        logits = again(torch.tensor(TOKENS)).logits
        assert torch.equal(logits, theirs(torch.tensor(TOKENS)).logits)


def convert(words: list[str]) -> int:
    from mca_lite.tool_convert import main

    return main(words)


def test_a_model_in_mxfp4_without_a_dtype_is_converted_in_bf16(quantised, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(quantised, source)
    values = json.loads((source / "config.json").read_text())
    values.pop("dtype")
    (source / "config.json").write_text(json.dumps(values))
    for src, dst in (("source", "checkpoint"), ("checkpoint", "back")):
        assert world.run(convert, 1, [str(tmp_path / src), str(tmp_path / dst)]) == [0]
    got = tensors(tmp_path / "back")
    assert {tensor.dtype for tensor in got.values()} == {torch.bfloat16}
    theirs = dequantised(quantised, dtype=torch.bfloat16)
    experts = {n: t.detach() for n, t in theirs.state_dict().items() if ".experts." in n}
    assert experts
    assert_same_bytes({name: got[name] for name in experts}, experts)


def test_a_model_in_mxfp4_trains_as_torch(quantised, tmp_path):
    runs = {"torch": ((quantised,), dict(backend="torch")), "ours": ((quantised,), {})}
    [curves] = world.run(train_all, 1, runs, str(tmp_path), **BRIEF)
    assert_same_curve(curves["ours"], curves["torch"])
    assert_same_tensors(tensors(tmp_path / "ours"), tensors(tmp_path / "torch"))


SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda values: values.pop(SCALES), f"down_proj_blocks is there without {SCALES}"),
        (
            lambda values: values.update({SCALES: values[SCALES][:, :5].clone()}),
            "that of its blocks",
        ),
    ],
)
def test_blocks_without_their_scales_are_refused(change, words, quantised, tmp_path):
    from mca_lite.weights_files import SafetensorsSource

    with pytest.raises(ValueError, match=words):
        SafetensorsSource(changed(quantised, tmp_path / "model", change))


def drawn(path: str, out: str, keys: dict) -> None:
    """The model of a folder's config.json, drawn from a seed, as its files."""
    from mca_lite import AutoModel, TrainingArguments
    from mca_lite.model_config import AutoConfig

    args = TrainingArguments(output_dir="unused", **keys)
    AutoModel.from_config(AutoConfig.from_pretrained(path, args), args, 5).save_pretrained(out)


def drawn_by_torch(path: str, out: str) -> None:
    from mca_lite.model import load_torch_model

    load_torch_model(path, train_from_scratch=True, seed=5).save_pretrained(out)


def test_drawn_weights_are_the_same_on_both_backends(plain, tmp_path):
    world.run(drawn, 2, plain, str(tmp_path / "ours"), EP2)
    world.run(drawn_by_torch, 1, plain, str(tmp_path / "torch"))
    ours = tensors(tmp_path / "ours")
    assert_same_bytes(ours, tensors(tmp_path / "torch"))
    sinks = ours["model.layers.1.self_attn.sinks"]
    assert 0.001 < sinks.std() < 0.1


def test_plan_and_flops_count_what_transformers_has():
    from transformers import AutoModelForCausalLM

    from mca_lite.log import model_sizes
    from mca_lite.model_config import from_hf_config
    from mca_lite.tool_plan_memory import ModelTensors

    hf = tiny_moe.hf_config("gpt_oss")
    numbers = {
        name: parameter.numel()
        for name, parameter in AutoModelForCausalLM.from_config(hf).named_parameters()
    }
    assert ModelTensors(from_hf_config(hf)).total == sum(numbers.values())

    def count(*ends: str) -> int:
        return sum(n for name, n in numbers.items() if name.endswith(ends))

    products = count("proj.weight", "router.weight", "lm_head.weight")
    of_experts = count("experts.gate_up_proj", "experts.down_proj")
    for config in (hf, from_hf_config(hf)):
        assert model_sizes(config).weights == products + of_experts * 2 / 4


def test_other_quantised_files_of_gpt_oss_are_refused():
    from mca_lite.model_config import from_hf_config

    with pytest.raises(ValueError, match="quantization_config"):
        from_hf_config(tiny_moe.hf_config("gpt_oss", quantization_config={"quant_method": "awq"}))
