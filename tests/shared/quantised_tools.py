"""Quantised bases in tests: the same runs as LoRA on a folder of the rounded weights."""

import functools
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.shared import tiny, tiny_moe
from tests.shared.lora_tools import draw_by_name
from tests.shared.training import train

WIDE = dict(hidden_size=128, intermediate_size=256, head_dim=32)


def save_bases(folder: Path, family: str, forms: tuple[str, ...], dtype=torch.float32) -> dict:
    """{form, and "plain": folder of a model}: the weights of linears and experts rounded to it."""
    from mca_lite.part_quantised import FORMS, dequantise, quantise

    is_moe = family in tiny_moe.MODELS
    keys = {**WIDE, **(dict(moe_intermediate_size=128) if "moe" in family else {})}
    if family == "gpt_oss":
        keys["intermediate_size"] = 128
    made = (tiny_moe if is_moe else tiny).save_model(folder / "plain", family, dtype=dtype, **keys)
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
    is_matrix = ".layers." in name and "proj" in name and not name.endswith("bias")
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
