"""Quantised folders as they are published, from their keys to adapters and merged models; what plan
and doctor say of quantised bases.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mca_lite import tool_convert, tool_doctor, tool_plan
from mca_lite.args import parse_args
from mca_lite.run import make_plan
from tests.shared import commands, quantised_tools, world
from tests.shared.layouts import EP2, PACKED, TP2_SP
from tests.shared.lora_tools import adapter_of
from tests.shared.quantised_tools import NF4_KEYS, keys_of
from tests.shared.small_runs import save_tokenizer, train_by_words, words_of, write_data
from tests.shared.training import read_log

MXFP4_KEYS = dict(quantization_bit=4)  # the files say of which form


def of_run(folder: Path, out: Path, ranks: int = 1, **keys) -> tuple[list, dict]:
    """(loss and norm of each step, tensors of the adapter) of a run by keys."""
    world.run(train_by_words, ranks, keys_of(folder, out, **keys))
    lines = [line for line in read_log(str(out)) if "loss" in line]
    return [(line["loss"], line["grad_norm"]) for line in lines], adapter_of(out)


def check_equal(one: tuple[list, dict], other: tuple[list, dict]) -> None:
    assert one[0] == other[0] and len(one[0]) == 2
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """gpt_oss: its bf16 weights, rounded to nf4, in Unsloth's nf4, in MXFP4, and MXFP4 in bf16;
    qwen3 in bf16 and in bitsandbytes' nf4."""
    made = tmp_path_factory.mktemp("published")
    write_data(made)
    bases = quantised_tools.save_bases(made / "gpt_oss", "gpt_oss", ("nf4",), torch.bfloat16)
    shutil.copytree(bases["nf4"], made / "rounded")
    quantised_tools.save_as_bitsandbytes(bases["plain"], made / "unsloth")
    quantised_tools.save_as_mxfp4(bases["plain"], made / "mxfp4")
    quantised_tools.save_in_bf16(made / "mxfp4", made / "whole")
    bases = quantised_tools.save_bases(made / "qwen3", "qwen3", (), torch.bfloat16)
    shutil.copytree(bases["plain"], made / "plain")
    quantised_tools.save_as_bitsandbytes(bases["plain"], made / "nf4")
    for name in ("rounded", "unsloth", "mxfp4", "whole", "plain", "nf4"):
        save_tokenizer(made / name)
    return made


LAYOUTS = {"packed": (1, PACKED), "ep2": (2, EP2), "tp2_sp": (2, TP2_SP)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "quantised, form, keys", [("mxfp4", "whole", MXFP4_KEYS), ("unsloth", "rounded", NF4_KEYS)]
)
def test_a_folder_of_gpt_oss_in_four_bits_trains_as_its_numbers(
    quantised, form, keys, layout, folder, tmp_path
):
    ranks, more = LAYOUTS[layout]
    runs = ((quantised, keys), (form, {}))
    ours, theirs = (
        of_run(folder, tmp_path / name, ranks, model_name_or_path=f"{folder}/{name}", **more, **own)
        for name, own in runs
    )
    check_equal(ours, theirs)


def kept(path: str, form: str) -> list[str]:
    """Names of the quantised weights whose values are not those of the files, and of the files'
    quantised weights that are not kept quantised."""
    from mca_lite import part_quantised, weights_convert
    from mca_lite.model import AutoModel, build_chunks
    from mca_lite.weights_files import SafetensorsSource
    from tests.shared.training import arguments

    models = AutoModel.from_pretrained(path, arguments(bf16=True))
    assert part_quantised.choose(models.config) == form
    models = build_chunks(models.config)
    source = SafetensorsSource(path)
    weights_convert.fill(models, source)
    names = {
        hf.format(layer)
        for row, layer in part_quantised.quantised_layers(models.config)
        for hf in row.hf
    }
    exported = dict(weights_convert.iter_hf_tensors(models))
    wrong = [name for name in names if not torch.equal(exported[name], source.read(name))]
    held = sum(
        p.numel() for p in models.parameters() if isinstance(p.data, part_quantised.Quantised)
    )
    assert held == sum(exported[name].numel() for name in names)
    return wrong


def test_mxfp4_is_kept_in_its_own_four_bits(folder):
    assert world.run(kept, 1, str(folder / "mxfp4"), "mxfp4") == [[]]


# -- merging


def merged_by_hand(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """The base's numbers in float32 with the adapter, rounded once to bf16; others as they are."""
    from mca_lite.weights_files import SafetensorsSource

    source = SafetensorsSource(str(folder))
    adapter = adapter_of(out)
    found = {}
    for name in source.names():
        weight = source.read(name)
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight"
        if key.format("A") in adapter:
            a, b = (adapter[key.format(x)] for x in "AB")
            weight = (weight.float() + 2 * (b @ a)).to(torch.bfloat16)
        found[name] = weight
    return found


@pytest.mark.parametrize("name, keys", [("nf4", NF4_KEYS), ("nf4", {}), ("plain", NF4_KEYS)])
def test_merged_models_are_in_bf16_and_their_report_says_what_they_are(
    name, keys, folder, tmp_path
):
    words = dict(model_name_or_path=f"{folder}/{name}", save_merged_model=True, **keys)
    of_run(folder, tmp_path / "out", **words)
    again = keys_of(folder, tmp_path / "again", **words)
    said = "\n".join(make_plan(parse_args(words_of(again))).data.report)
    report = tool_convert.merge(f"{folder}/{name}", tmp_path / "out", tmp_path / "merged")
    by_hand = merged_by_hand(folder / name, tmp_path / "out")
    paths = [tmp_path / "merged"]
    if keys:  # without them the run has the base's weights in bf16 alone
        paths.append(tmp_path / "out/merged")
    for path in paths:
        tensors = load_file(path / "model.safetensors")
        assert tensors.keys() == by_hand.keys()
        assert all(torch.equal(tensor, by_hand[name]) for name, tensor in tensors.items())
    is_quantised = name == "nf4"
    assert ("have its weights in nf4 alone" in report) is is_quantised
    assert ("have its weights in nf4 alone" in said) is is_quantised
    assert ("trained beside their rounded values, base in nf4" in said) is not is_quantised


def test_a_model_in_mxfp4_is_merged_in_bf16(folder, tmp_path):
    path = f"{folder}/mxfp4"
    of_run(folder, tmp_path / "out", model_name_or_path=path, **MXFP4_KEYS)
    report = tool_convert.merge(path, tmp_path / "out", tmp_path / "merged")
    assert "have its weights in mxfp4 alone" in report
    dtypes = {tensor.dtype for tensor in load_file(tmp_path / "merged/model.safetensors").values()}
    assert dtypes == {torch.bfloat16}
    assert "verified" in tool_convert.verify(path, str(tmp_path / "merged"), str(tmp_path / "out"))


# -- plan and doctor


@pytest.mark.parametrize(
    "keys, wanted",
    [
        (NF4_KEYS, "frozen base    nf4, 4.5 bits a number"),
        (dict(quantization_bit=8), "frozen base    int8, 8.5 bits a number"),
        ({}, None),
    ],
)
def test_a_plan_names_the_form_of_the_frozen_weights(keys, wanted, folder, tmp_path):
    code, said, error = commands.ended(tool_plan.main, words_of(keys_of(folder, tmp_path, **keys)))
    assert code == 0, error
    assert ("frozen base" in said) is (wanted is not None) and (wanted or "") in said


SHAPES = {  # of Qwen2.5-1.5B, Llama-3-8B and Qwen3-32B
    "1.5B": ("qwen2", 151936, True, 1536, 8960, 28, 12, 2, None),
    "8B": ("llama", 128256, False, 4096, 14336, 32, 32, 8, None),
    "32B": ("qwen3", 151936, False, 5120, 25600, 64, 64, 8, 128),
}
_SIZES = "vocab_size tie_word_embeddings hidden_size intermediate_size num_hidden_layers "
_SIZES += "num_attention_heads num_key_value_heads head_dim"
WAYS = {
    "in full": {},
    "in full with moments in 8 bits": dict(
        exp_avg_dtype="8bit", exp_avg_sq_dtype="8bit", grad_reduce_in_fp32=False
    ),
    "with adapters": {},
    "with adapters on nf4": {},
}


@pytest.mark.parametrize("model", SHAPES)
def test_the_needs_that_doctor_knows_are_those_of_plan(model):
    from transformers import AutoConfig

    from mca_lite import TrainingArguments, part_lora, part_quantised, tool_plan_memory
    from mca_lite.model_config import from_hf_config

    kind, *sizes = SHAPES[model]
    known = {key: size for key, size in zip(_SIZES.split(), sizes, strict=True) if size is not None}
    hf = AutoConfig.for_model(kind, max_position_embeddings=8192, **known)
    for way, keys in WAYS.items():
        told = tool_doctor.NEEDS[way].get(model)
        if told is None:
            continue
        shared = dict(per_device_train_batch_size=1, gradient_accumulation_steps=4)
        shared |= dict(bf16=True, transformer_impl="local", recompute_granularity="full")
        args = TrainingArguments(output_dir="unused", **shared, **keys)
        config, finetuning = from_hf_config(hf, args), None
        if "nf4" in way:
            part_quantised.choose(config)
        if "adapters" in way:
            spec = part_lora.plan(config, part_lora.LoraSpec(rank=16))
            finetuning = part_lora.Lora(spec)
        tensors = tool_plan_memory.ModelTensors(config, finetuning)
        memory = tool_plan_memory.rank_memory(args, config, tensors, 0, 4096, 1, True)
        assert memory.total / 2**30 == pytest.approx(told, rel=0.02), way


def test_doctor_says_which_models_a_gpu_trains():
    def largest(gib: float) -> dict[str, str]:
        """{way: model}"""
        found = tool_doctor.models_of(gib * 2**30).partition(" (")[0].split(", ")
        return {way: model for model, _, way in (one.partition(" ") for one in found)}

    assert largest(139.8) == {
        "in full": "8B",
        "in full with moments in 8 bits": "14B",
        "with adapters": "32B",
        "with adapters on nf4": "gpt-oss-120b",
    }
    assert largest(23.6)["with adapters on nf4"] == "gpt-oss-20b"
    assert "none of the models" in tool_doctor.models_of(2**30)
