"""Greedy tokens after the same prompts: of our models by whole forward passes, and of transformers'
classes by generate(), with its caches.
"""

import contextlib
import io

import torch

from tests.shared import pictures
from tests.shared.files import TOKENS, make_args

COUNT = 8  # new tokens of a prompt
NO_STOP = -1  # no token has this id


def prompt_with_picture() -> dict:
    """A document of pictures.document with a picture between its tokens."""
    return pictures.document(torch.Generator().manual_seed(4), 4, (2, 3), 5)


def of_ours(paths: dict[str, str]) -> dict[str, list]:
    """{name: new tokens [prompts, COUNT]} of model folders read by our AutoModel, on one rank."""
    from mca_lite import AutoModel

    found = {}
    for name, path in paths.items():
        models = AutoModel.from_pretrained(path, make_args()).eval()
        has_tower = bool(models.config.input_tensors)
        ids = torch.tensor(TOKENS)
        if has_tower:
            ids = prompt_with_picture()["input_ids"][None]
        for _ in range(COUNT):
            more = columns_of_pictures(ids) if has_tower else {}
            with torch.no_grad():
                logits = models.gather_logits(models(ids, **more))
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
        found[name] = ids[:, -COUNT:].tolist()
    return found


def columns_of_pictures(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The columns of a batch for prompt_with_picture and new tokens `ids` [1, s]: these count on
    along all axes, and are text whatever their ids."""
    document = prompt_with_picture()
    prompt = document["input_ids"]
    later = torch.arange(1, ids.shape[1] - len(prompt) + 1)
    columns = {}
    for name in ("rope_t", "rope_h", "rope_w"):
        column = document[name]
        columns[name] = torch.cat((column, column.max() + later))[None]
    is_image = prompt == pictures.IMAGE
    slots = (is_image.cumsum(0) - 1).masked_fill(~is_image, -1)
    columns["image_slot"] = torch.cat((slots, torch.full_like(later, -1)))[None]
    return columns | {name: document[name] for name in ("pixel_values", "image_grid_thw")}


def of_transformers(path: str) -> list:
    """New tokens [prompts, COUNT] of transformers' class of a folder. AssertionError if keys are
    missing, unexpected or of another shape."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    has_tower = AutoConfig.from_pretrained(path).model_type in pictures.FAMILIES
    kind = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
    with contextlib.redirect_stderr(io.StringIO()):
        model, info = kind.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), f"{path}: {info}"
    ids = torch.tensor(TOKENS)
    more = {}
    if has_tower:
        document = prompt_with_picture()
        ids = document["input_ids"][None]
        more = {name: document[name] for name in ("pixel_values", "image_grid_thw")}
        if not hasattr(model.config, "audio_config"):
            more["mm_token_type_ids"] = (ids == pictures.IMAGE).int()
    out = model.eval().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=COUNT,
        eos_token_id=NO_STOP,
        pad_token_id=0,
        **more,
    )
    return out[:, ids.shape[1] :].tolist()
