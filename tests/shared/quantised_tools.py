"""Quantised bases in tests: the same runs as LoRA on a folder of the rounded weights."""

import functools
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.shared import pictures, tiny, tiny_moe
from tests.shared.lora_tools import draw_by_name
from tests.shared.training import train

WIDE = dict(hidden_size=128, intermediate_size=256, head_dim=32)


def save_bases(
    folder: Path, family: str, forms: tuple[str, ...], dtype=torch.float32, ahead: int = 0
) -> dict:
    """{form, and "plain": folder of a model}: the weights of linears and experts rounded to it.
    ahead: layers for multi-token prediction in the files."""
    from mca_lite.part_quantised import FORMS, dequantise, quantise

    is_moe = family in tiny_moe.MODELS
    keys = {**WIDE, **(dict(moe_intermediate_size=128) if "moe" in family else {})}
    if family == "gpt_oss":
        keys["intermediate_size"] = 128
    if family in pictures.FAMILIES:
        tower = dict(out_hidden_size=WIDE["hidden_size"])
        if family == "qwen2_5_vl":
            rope = {**pictures.ROPE, "mrope_section": [4, 6, 6]}
            keys = {**keys, "rope_parameters": rope}
        made = pictures.save_model(folder / "plain", family, dtype=dtype, tower=tower, **keys)
    elif ahead:
        made = save_with_extra_layers(folder / "plain", family, ahead, dtype, keys)
    else:
        save = (tiny_moe if is_moe else tiny).save_model
        made = save(folder / "plain", family, dtype=dtype, **keys)
    bases = {"plain": str(made)}
    for form in forms:
        bases[form] = str(shutil.copytree(made, folder / form))
        for file in Path(bases[form]).glob("*.safetensors"):
            tensors = load_file(file)
            for name, weight in tensors.items():
                if not is_rounded(name, form, is_moe):
                    continue
                flips = family == "gpt_oss" and ".experts." in name  # [in, out]
                rows = weight.mT.contiguous() if flips else weight
                rows = dequantise(*quantise(rows, FORMS[form]), FORMS[form]).to(dtype)
                tensors[name] = (rows.mT if flips else rows).contiguous()
            save_file(tensors, file, metadata={"format": "pt"})
    return bases


def is_rounded(name: str, form: str, is_moe: bool) -> bool:
    is_matrix = (
        ".layers." in name and "proj" in name and not name.endswith(("bias", "eh_proj.weight"))
    )
    return is_matrix and (form != "mxfp4" or not is_moe or ".experts." in name)


def with_format(path: str, form: str | None, models):
    """The models of `path` with base weights in a form, made anew: as a run makes them."""
    from mca_lite import part_quantised, weights_convert
    from mca_lite.model import build_chunks
    from mca_lite.weights_files import SafetensorsSource

    if form is None:
        return models
    bits, kind = (8, None) if form == "int8" else (4, form)
    part_quantised.choose(models.config, bits, kind)
    models = build_chunks(models.config)
    weights_convert.fill(models, SafetensorsSource(path))
    return models


def adapted(path: str, form: str | None, spec: dict, models):
    """with_format(), with drawn adapters."""
    from mca_lite import part_lora

    models = with_format(path, form, models)
    part_lora.inject(models, part_lora.LoraSpec(**{"rank": 4, **spec}))
    part_lora.fill_adapters(models, draw_by_name)
    return models


def run(path: str, out: str, form: str | None, spec=None, **keys) -> list:
    """The curve of a run with drawn adapters on all linears, of two steps."""
    adapt = functools.partial(adapted, path, form, spec or {})
    return train(path, out, adapt=adapt, **{"steps": 2, "count": 7, "warmup_steps": 0, **keys})


def run_both(plain: str, rounded: str, out: str, form: str, **keys) -> tuple[list, list]:
    """(curve of the quantised base, that of LoRA on the rounded folder)"""
    return run(plain, out, form, **keys), run(rounded, out, None, **keys)


def save_with_extra_layers(folder: Path, family: str, count: int, dtype, keys: dict) -> str:
    """A mixture with drawn layers for multi-token prediction after its decoder."""
    from mca_lite import part_mtp, weights_files

    key = {"glm4_moe": "num_mtp_layers"}[family]
    made = tiny_moe.save_model(folder, family, dtype=dtype, **{**keys, key: count})
    config = Path(made, "config.json").read_text()
    hf, shapes = weights_files.shapes_of(config)
    [file] = Path(made).glob("*.safetensors")
    tensors = load_file(file)
    for name, shape in part_mtp.initial_shapes(hf, shapes, count).items():
        drawn = draw_by_name(name, shape)
        tensors[name] = (drawn + (len(shape) == 1 and "bias" not in name)).to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return made


# -- folders as they are published


def write_method(folder: Path, **method) -> None:
    """Write quantization_config into a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = method
    (folder / "config.json").write_text(json.dumps(config))


def packed_as_bitsandbytes(name: str, weight: torch.Tensor, nested: bool = False) -> dict:
    """The tensors of one weight in nf4, as bitsandbytes' save_pretrained writes them, by its
    published layout."""
    from mca_lite.part_quantised import FORMS, NF4, quantise

    codes, scales = quantise(weight.flatten(), FORMS["nf4"])
    state: dict = dict(quant_type="nf4", blocksize=64, dtype="bfloat16")
    state["shape"] = list(weight.shape)
    of_weight = {"absmax": scales, "quant_map": torch.tensor(NF4)}
    if nested:
        table = torch.linspace(-1, 1, 256)
        offset = float(scales.mean())
        blocks = (scales - offset).view(-1, min(256, len(scales)))
        most = blocks.abs().amax(1)
        nearest = (blocks / most[:, None]).unsqueeze(-1) - table
        of_weight["absmax"] = nearest.abs().argmin(-1).to(torch.uint8).flatten()
        of_weight |= {"nested_absmax": most, "nested_quant_map": table}
        state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=offset)
    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    of_weight["quant_state.bitsandbytes__nf4"] = text
    packed = {f"{name}.{key}": value for key, value in of_weight.items()}
    return {name: codes.view(-1, 1), **packed}


def save_as_bitsandbytes(source: str, folder: Path, nested: bool = False) -> None:
    """A folder's weights of linears in bitsandbytes' nf4; experts of gpt_oss one by one, under
    Unsloth's names."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    method = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    write_method(folder, **method)
    tensors = {}
    for file in Path(source).glob("*.safetensors"):
        for name, weight in load_file(file).items():
            for single, part in singled(name, weight):
                if is_rounded(single, "nf4", False):
                    tensors |= packed_as_bitsandbytes(single, part, nested)
                else:
                    tensors[single] = part.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def singled(name: str, tensor: torch.Tensor):
    """Yield (name, tensor) as Unsloth's 4-bit folders of gpt_oss have a tensor of the original
    ones."""
    stack = re.fullmatch(r"(.*mlp\.experts\.)(gate_up_proj|down_proj)(_bias)?", name)
    if ".mlp.router." in name:
        yield name.replace("router.", "router.linear."), tensor
    elif stack is None:
        yield name, tensor
    else:
        kind = "bias" if stack[3] else "weight"
        for expert, part in enumerate(tensor):
            single = part.mT if kind == "weight" else part
            yield f"{stack[1]}{stack[2]}s.{expert}.{kind}", single.contiguous()


METHOD_OF_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def random_blocks(shape: tuple, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of a stacked matrix [E, in, out]: any four bits, small exponents."""
    experts, inputs, outputs = shape
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator)
    scales = torch.randint(120, 124, (experts, outputs, inputs // 32), generator=generator)
    return blocks.to(torch.uint8), scales.to(torch.uint8)


def save_as_mxfp4(source: str, folder: Path, extreme=False) -> str:
    """A copy of a model with random experts in MXFP4. extreme: with every scale that there is."""
    shutil.copytree(source, folder)
    [file] = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(3)
    values = load_file(file)
    for name in [n for n in values if n.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = random_blocks(values.pop(name).shape, generator)
        if extreme:
            scales = torch.arange(scales.numel()).to(torch.uint8).view(scales.shape)
        values |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(values, file, metadata={"format": "pt"})
    write_method(folder, **METHOD_OF_MXFP4)
    return str(folder)


def save_in_bf16(source: Path, folder: Path) -> None:
    """A folder in MXFP4 with its experts in bf16, as gpt_oss has them before quantisation."""
    from mca_lite.part_stacked import from_mxfp4

    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    [file] = folder.glob("*.safetensors")
    values = load_file(file)
    for name in [name.rpartition("_")[0] for name in values if name.endswith("proj_blocks")]:
        numbers = from_mxfp4(values.pop(f"{name}_blocks"), values.pop(f"{name}_scales"))
        values[name] = numbers.mT.contiguous()
    save_file(values, file, metadata={"format": "pt"})


# -- runs by keys

NF4_KEYS = dict(quantization_bit=4, quantization_type="nf4")


def keys_of(folder: Path, out: Path, **changes) -> dict:
    """The keys of a run of two steps with adapters, on folder/plain and folder/chat.jsonl."""
    return {
        **dict(model_name_or_path=f"{folder}/plain", dataset=f"{folder}/chat.jsonl"),
        **dict(output_dir=str(out), cache_dir=f"{folder}/cache", cutoff_len=40, max_steps=2),
        **dict(finetuning_type="lora", lora_rank=4, bf16=True, learning_rate=1e-2),
        **dict(logging_steps=1, global_batch_size=4, per_device_train_batch_size=2),
        **dict(save_strategy="no", disable_tqdm=True, html_report=False, plot_loss=False),
        **changes,
    }
