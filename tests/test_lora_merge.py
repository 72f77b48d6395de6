"""`python -m mca_lite convert SRC DST --merge ADAPTER`: what peft's own merge gives, from files
alone.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mca_lite.args import parse_args
from mca_lite.errors import ConfigError
from tests.shared import tiny, tiny_moe, world
from tests.shared.commands import convert
from tests.shared.files import changed, flip_bit, tensors
from tests.shared.layouts import DIST_OPT, SAVE, TP2
from tests.shared.lora_tools import (
    EVERYTHING,
    TARGETS,
    load,
    logits,
    make,
    peft_model,
    save_start,
    train_from_adapter,
)

BF16_ROUNDING = 2**-8 * 1.001  # half of the last of eight binary digits, and float32's own rounding


@pytest.fixture(scope="module")
def sharded_base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merge")
    path = tiny.save_model(folder / "model", "llama", max_shard_size="40KB")
    (Path(path) / "tokenizer.json").write_text('{"of": "the base"}')
    peft_model(path, EVERYTHING).save_pretrained(folder / "adapter")
    return path, str(folder / "adapter")


def test_merged_from_files_is_what_peft_merges(sharded_base, tmp_path):
    from transformers import AutoModelForCausalLM

    path, adapter = sharded_base
    code, out, error = convert(
        path, tmp_path / "out", "--merge", adapter, "--verify", "--max-shard-size", "30KB"
    )
    assert code == 0 and "verified: the logits differ by at most" in out, error
    model = peft_model(path, EVERYTHING)
    wanted = logits(model)
    merged = model.merge_and_unload().state_dict()
    got = tensors(tmp_path / "out")
    assert got.keys() == tensors(path).keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), wanted, rtol=0, atol=1e-5
    )
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2  # streamed in shards
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        Path(path) / "tokenizer.json"
    ).read_bytes()


def test_a_bf16_base_is_merged_in_float32_and_rounded_once(tmp_path):
    path = tiny.save_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    config = dict(use_rslora=True, lora_alpha=3)
    peft_model(path, TARGETS, **config).save_pretrained(tmp_path / "adapter")
    code, _, error = convert(path, tmp_path / "out", "--merge", tmp_path / "adapter", "--verify")
    assert code == 0, error
    exact = (
        peft_model(path, TARGETS, **config).merge_and_unload().state_dict()
    )  # of the base in float32
    for name, tensor in tensors(tmp_path / "out").items():
        assert tensor.dtype == torch.bfloat16
        assert ((tensor.float() - exact[name]).abs() <= exact[name].abs() * BF16_ROUNDING).all(), (
            name
        )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def merged_by_us(path: str, adapter: str, output_dir: str) -> None:
    model, backend = make(path, output_dir)
    backend(load(adapter, model)).export_merged(output_dir, "5GB")


def test_modules_to_save_take_the_place_of_the_base_s(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = tiny.save_model(tmp_path / "model", "mistral")
    model = peft_model(path, ["q_proj", "down_proj"], modules_to_save=["lm_head", "embed_tokens"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
    model.save_pretrained(tmp_path / "adapter")
    code, _, error = convert(path, tmp_path / "out", "--merge", tmp_path / "adapter", "--verify")
    assert code == 0, error
    wanted = logits(
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), tmp_path / "adapter")
    )
    got = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    world.run(merged_by_us, 1, path, str(tmp_path / "adapter"), str(tmp_path / "trained"))
    for name, tensor in tensors(
        tmp_path / "trained"
    ).items():  # from a model in training: the same numbers
        torch.testing.assert_close(tensors(tmp_path / "out")[name], tensor, rtol=0, atol=1e-7)


@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head"])
def test_one_side_of_a_tied_embedding_is_not_merged_into_both(saved, tmp_path):
    """PEFT trains a copy for one of the two, unless the adapter keeps both the same."""
    from transformers import AutoModelForCausalLM

    path = tiny.save_model(tmp_path / "model", "llama", tie_word_embeddings=True)
    for is_tied in (False, True):
        keys = dict(modules_to_save=[saved], ensure_weight_tying=is_tied)
        model = peft_model(path, ["o_proj"], **keys)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "modules_to_save" in name and parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / f"adapter{is_tied}")
    code, _, error = convert(path, tmp_path / "one", "--merge", tmp_path / "adapterFalse")
    assert code == 2 and "the embedding is also the head" in error
    code, _, error = convert(path, tmp_path / "both", "--merge", tmp_path / "adapterTrue")
    assert code == 0, error
    got = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "both"))
    torch.testing.assert_close(got, logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("keys", [{**TP2, **DIST_OPT}, dict(backend="torch")])
def test_a_checkpoint_with_adapters_is_merged_as_training_merges(sharded_base, tmp_path, keys):
    path, adapter = sharded_base
    world.run(
        train_from_adapter, 2, path, str(tmp_path / "run"), adapter, **{**SAVE, **keys, "steps": 2}
    )
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert convert(path, tmp_path / "a", "--merge", checkpoint, "--verify")[0] == 0
    assert (
        convert(path, tmp_path / "b", "--merge", tmp_path / "run")[0] == 0
    )  # the exported adapter
    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert not torch.equal(a["lm_head.weight"], tensors(path)["lm_head.weight"])
    flip_bit(checkpoint / "adapter_model.safetensors")
    code, _, error = convert(path, tmp_path / "c", "--merge", checkpoint)
    assert code == 2 and "is damaged" in error and "adapter_model.safetensors" in error
    assert not (tmp_path / "c").exists()


def test_adapters_alone_are_no_model(sharded_base, tmp_path):
    path, adapter = sharded_base
    world.run(train_from_adapter, 1, path, str(tmp_path / "run"), adapter, **{**SAVE, "steps": 2})
    checkpoint = tmp_path / "run" / "checkpoint-2"
    code, _, error = convert(checkpoint, tmp_path / "out")
    assert code == 2 and "--merge" in error and "a checkpoint of adapters" in error, error
    for folder in (checkpoint, adapter):
        with pytest.raises(ConfigError, match=f"adapter_name_or_path: {folder}"):
            parse_args([f"model_name_or_path={folder}", "dataset=x.jsonl", "output_dir=out"])


def change(adapter: Path, how) -> None:
    """Change the tensors of an adapter's file."""
    found = load_file(adapter / "adapter_model.safetensors")
    how(found)
    save_file(found, adapter / "adapter_model.safetensors")


def test_what_cannot_be_merged_is_refused(sharded_base, tmp_path):
    path, adapter = sharded_base
    wider = tiny.save_model(tmp_path / "wider", "llama", intermediate_size=64)
    shallow = tiny.save_model(tmp_path / "shallow", "llama", num_hidden_layers=2)
    tied = tiny.save_model(tmp_path / "tied", "qwen3")
    peft_model(tied, ["embed_tokens"]).save_pretrained(tmp_path / "one_sided")
    by_default = Path(tiny.save_model(tmp_path / "by_default", "gemma2"))
    peft_model(str(by_default), ["embed_tokens"]).save_pretrained(tmp_path / "one_sided_too")
    config = json.loads((by_default / "config.json").read_text())
    assert config.pop("tie_word_embeddings"), "what gemma2 is without the key"
    (by_default / "config.json").write_text(json.dumps(config))
    parted = peft_model(tied, modules_to_save=["embed_tokens", "lm_head"])
    parted.save_pretrained(tmp_path / "parted")
    change(tmp_path / "parted", lambda found: found["base_model.model.lm_head.weight"].add_(1))
    shutil.copytree(adapter, tmp_path / "cut")
    gone = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    change(tmp_path / "cut", lambda found: found.pop(gone))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    cases = [
        (wider, "out1", adapter, "the adapter belongs to another model"),
        (shallow, "out2", adapter, "another model: it is for 30 weights"),
        (tied, "out3", tmp_path / "one_sided", "embedding is the head"),
        (by_default, "out6", tmp_path / "one_sided_too", "embedding is the head"),
        (tied, "out7", tmp_path / "parted", "the embedding is also the head"),
        (path, "out4", tmp_path / "nowhere", "holds no adapter_config.json"),
        (path, "out5", tmp_path / "cut", f"lacks {gone}"),
        (path, "full", adapter, "is not empty"),
    ]
    for source, out, which, words in cases:
        code, _, error = convert(source, tmp_path / out, "--merge", which)
        assert code == 2 and words in error, (out, error)
        assert out == "full" or not (tmp_path / out).exists()


def test_a_merge_that_went_wrong_is_found_out(sharded_base, tmp_path):
    path, adapter = sharded_base
    assert convert(path, tmp_path / "out", "--merge", adapter)[0] == 0
    [error] = world.run(verified, 1, path, path, adapter)  # the base, as if it were merged
    assert "differ by" in error and "do not use" in error
    spoiled = changed(
        str(tmp_path / "out"), tmp_path / "nan", lambda of: of["model.norm.weight"].fill_(math.nan)
    )
    assert "differ by nan" in world.run(verified, 1, path, spoiled, adapter)[0]
    assert world.run(verified, 1, path, str(tmp_path / "out"), adapter)[0].startswith("verified")


def verified(src: str, dst: str, adapter: str) -> str:
    from mca_lite.tool_convert import verify

    try:
        return verify(src, dst, adapter)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "name, targets", [("mixtral", ("w1", "w2", "q_proj")), ("qwen3_moe", ("all", "all-router"))]
)
def test_adapters_of_experts_are_merged_from_files_as_from_a_model(name, targets, tmp_path):
    path = tiny_moe.save_model(tmp_path / "model", name, num_hidden_layers=2)
    world.run(save_start, 1, path, str(tmp_path / "adapter"), targets)
    code, _, error = convert(path, tmp_path / "out", "--merge", tmp_path / "adapter", "--verify")
    assert code == 0, error
    world.run(merged_by_us, 1, path, str(tmp_path / "adapter"), str(tmp_path / "trained"))
    wanted, before = tensors(tmp_path / "trained"), tensors(path)
    got = tensors(tmp_path / "out")
    assert got.keys() == wanted.keys()
    for tensor_name, tensor in got.items():
        torch.testing.assert_close(tensor, wanted[tensor_name], rtol=0, atol=1e-6)
    assert any(".experts.1." in n and not torch.equal(got[n], before[n]) for n in got), (
        "no expert has changed"
    )
