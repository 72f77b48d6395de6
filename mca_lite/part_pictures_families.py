"""Families of models with pictures, a language model of the table beside transformers' module for
pictures; the columns of their batches."""

import re
from dataclasses import replace
from typing import Any

from .families import FAMILIES
from .families_rows import Family, Row
from .tables import COLUMNS, Column

_TOWER_ROW = Row("vision_model.module.*", ("model.visual.*",), "module")
_VISION_PARTS = {
    "vision_tower": (
        "visual.patch_embed",
        "visual.pos_embed",
        "visual.blocks",
        "visual.deepstack_merger_list",
    ),
    "multi_modal_projector": ("visual.merger",),
}


def _with_pictures(text: Family, **changes) -> Family:
    """The family of a model with pictures, with the language model of another."""
    rows = []
    for row in text.rows:
        hf = tuple(re.sub("^model[.]", "model.language_model.", name) for name in row.hf)
        rows.append(replace(row, hf=hf))
    rows.append(_TOWER_ROW)
    changes["vision_parts"] = _VISION_PARTS
    return replace(text, rows=tuple(rows), inputs="pictures", **changes)


def _sections(hf, default: tuple[int, ...]) -> dict[str, Any]:
    """The numbers of rotary frequencies along time, height and width. default: transformers'."""
    return {"mrope_section": list(hf.rope_parameters.get("mrope_section", default))}


def _qwen2_vl(hf) -> dict[str, Any]:
    """Fields of Qwen2-VL, which ignores head_dim."""
    return {"kv_channels": hf.hidden_size // hf.num_attention_heads, **_sections(hf, (16, 24, 24))}


for _name in ("qwen2_vl", "qwen2_5_vl"):
    FAMILIES[_name] = _with_pictures(FAMILIES["qwen2"], derived=_qwen2_vl, older_names=True)
FAMILIES["qwen3_vl"] = _with_pictures(
    FAMILIES["qwen3"],
    constants={"qk_layernorm": True, "mrope_in_turns": True},
    has_windows=False,
    derived=lambda hf: _sections(hf, (24, 20, 20)),
)
for _name in ("qwen3_5", "qwen3_5_moe"):
    _text = FAMILIES[f"{_name}_text"]
    FAMILIES[_name] = _with_pictures(
        _text,
        constants={**_text.constants, "mrope_in_turns": True},
        derived=lambda hf, text=_text: {**text.derived(hf), **_sections(hf, (11, 11, 10))},
    )

_GIVEN = ("sample", "collator")
COLUMNS |= {
    # positions along time, height and width (part_pictures_data.rope_positions)
    "rope_t": Column("token", "int64", to_model=True, given_by=_GIVEN),
    "rope_h": Column("token", "int64", to_model=True, given_by=_GIVEN),
    "rope_w": Column("token", "int64", to_model=True, given_by=_GIVEN),
    # [patches, values of a patch], and [pictures, 3]: patches along time, height and width
    "pixel_values": Column("input", to_model=True, given_by=_GIVEN),
    "image_grid_thw": Column("input", "int64", to_model=True, given_by=_GIVEN),
    # number of each place's feature in the micro-batch (with_image_slots), -1 for text
    "image_slot": Column("token", "int64", -1, to_model=True, given_by=()),
}
