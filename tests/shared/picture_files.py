"""Pictures, and a folder of a model for them: config.json and image processor, no weights."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import AutoModelForImageTextToText

from mca_lite.files import read_json
from mca_lite.part_pictures_data import Vision
from mca_lite.part_pictures_keys import PicturesArguments
from tests.shared.chats import load_by_keys
from tests.shared.toy_tokenizer import byte_tokenizer

TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")

# as the templates of Qwen2-VL write a content that is a text, and one of blocks
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "{% if add_vision_id %}Picture: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 64,
    "max_pixels": 1024,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
}


def picture_tokenizer(template: str | None = TEMPLATE):
    """A token a byte, and one for each token of pictures."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in TOKENS])
    return tokenizer


def write_model(folder: Path, tokenizer, model_type: str = "qwen2_vl", **changes) -> Path:
    """Write what Vision reads of a model's folder. changes: of the image processor."""
    folder.mkdir(parents=True, exist_ok=True)
    start, image, end = tokenizer.convert_tokens_to_ids(list(TOKENS))
    of = "image" if model_type == "glm4v" else "vision"
    config = {
        "model_type": model_type,
        "vision_config": {"spatial_merge_size": 2, "patch_size": 4, "model_type": model_type},
        f"{of}_start_token_id": start,
        "image_token_id": image,
        f"{of}_end_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **changes}))
    return folder


def vision_of(folder: Path, tokenizer, **keys) -> Vision:
    config = read_json(folder / "config.json")
    return Vision.of(folder, config, tokenizer, PicturesArguments(**keys))


def draw(path: Path, width: int = 16, height: int = 8, seed: int = 0, mode="RGB", **options) -> str:
    """Write a picture of random colours -> its name."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path, **options)
    return path.name


def load(folder: Path, *dataset, template=TEMPLATE, stage="sft", **keys):
    """(the datasets of a model in folder/model, its tokenizer); the cache is in `folder`."""
    tokenizer = picture_tokenizer(template)
    model = folder / "model"
    if not model.exists():
        write_model(model, tokenizer)
    keys = {"dataset": list(map(str, dataset)), "cache_dir": str(folder / "cache"), **keys}
    names = {item.name for item in fields(PicturesArguments)} & keys.keys()
    vision = vision_of(model, tokenizer, **{name: keys.pop(name) for name in names})
    return load_by_keys(keys, stage, tokenizer, media=vision), tokenizer


def save_whole_model(folder: Path, family: str = "qwen2_5_vl", **of_text):
    """Save a tiny model with random weights, its tokenizer and image processor -> the tokenizer.
    of_text: changes of the text's config; its width is the tower's too."""
    from tests.shared import pictures

    tokenizer = picture_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(list(TOKENS))
    of_text = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, **of_text}
    config = pictures.hf_config(family, **of_text)
    if "hidden_size" in of_text:
        width = "hidden_size" if family == "qwen2_vl" else "out_hidden_size"
        setattr(config.vision_config, width, of_text["hidden_size"])
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    for name, number in zip(names, ids, strict=True):
        setattr(config, name, number)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    patch = {"patch_size": config.vision_config.patch_size, "max_pixels": 256, "min_pixels": 16}
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **patch}))
    tokenizer.save_pretrained(folder)
    return tokenizer
