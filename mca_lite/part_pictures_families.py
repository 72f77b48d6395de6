"""Model families with images: a language model from the table plus transformers' vision module; and
the columns of their batches.
"""

import re
from dataclasses import replace
from typing import Any

from .families import FAMILIES, OLDER_PREFIXES
from .families_rows import Family, Row
from .parts import load
from .tables import COLUMNS, Column

_TOWER_ROW = Row("vision_model.module.*", ("model.visual.*",), "module")
_VISION_PARTS = {
    "vision_tower": (
        "visual.patch_embed",
        "visual.pos_embed",
        "visual.blocks",
        "visual.deepstack_merger_list",
        # glm4v's modules have names of their own
        "visual.embeddings",
        "visual.post_conv_layernorm",
        "visual.post_layernorm",
        "visual.downsample",
    ),
    "multi_modal_projector": ("visual.merger",),
}


def _with_pictures(text: Family, **changes: Any) -> Family:
    """Make the Family (how a model type maps to megatron's model) of a vision-language model from
    that of its language model, `text`. In Hugging Face's tensor names "model." at the beginning
    becomes "model.language_model.", and a vision tower is added. changes: other fields of Family to
    replace."""
    rows = []
    for row in text.rows:
        hf = tuple(re.sub("^model[.]", "model.language_model.", name) for name in row.hf)
        rows.append(replace(row, hf=hf))
    rows.append(_TOWER_ROW)
    changes["vision_parts"] = _VISION_PARTS
    return replace(text, rows=tuple(rows), inputs="pictures", **changes)


def _sections(hf: Any, default: tuple[int, ...]) -> dict[str, Any]:
    """Read the field mrope_section from a config.json -> {"mrope_section": [numbers]}: how many
    rotary frequencies encode time, height and width. hf: the transformers config. default: the
    numbers that transformers takes for a config.json without the field."""
    return {"mrope_section": list(hf.rope_parameters.get("mrope_section", default))}


def _without_head_dim(hf: Any) -> dict[str, Any]:
    """Compute the config field kv_channels (channels per head) for a family that ignores head_dim
    in config.json -> {"kv_channels": hidden size / number of heads}. hf: the transformers config.
    """
    return {"kv_channels": hf.hidden_size // hf.num_attention_heads}


def _qwen2_vl(hf: Any) -> dict[str, Any]:
    return {**_without_head_dim(hf), **_sections(hf, (16, 24, 24))}


for _name in ("qwen2_vl", "qwen2_5_vl"):
    FAMILIES[_name] = _with_pictures(FAMILIES["qwen2"], derived=_qwen2_vl, prefixes=OLDER_PREFIXES)
FAMILIES["qwen3_vl"] = _with_pictures(
    FAMILIES["qwen3"],
    constants={"qk_layernorm": True, "mrope_in_turns": True},
    has_windows=False,
    derived=lambda hf: _sections(hf, (24, 20, 20)),
)
_EXPERTS = FAMILIES["qwen3_moe"]
FAMILIES["qwen3_vl_moe"] = _with_pictures(
    _EXPERTS,
    constants={
        **_EXPERTS.constants,
        **FAMILIES["qwen3_vl"].constants,
        "moe_router_norm_topk_prob": True,
    },
    has_windows=False,
    derived=lambda hf: {**_EXPERTS.derived(hf), **_sections(hf, (24, 20, 20))},
    stacked_experts="rows",
)
FAMILIES["glm4v"] = _with_pictures(
    FAMILIES["glm4"],
    config={},
    constants={**FAMILIES["glm4"].constants, "add_qkv_bias": True},
    derived=lambda hf: {**_without_head_dim(hf), **_sections(hf, (8, 12, 12))},
)
for _name in ("qwen3_5", "qwen3_5_moe"):
    if _text := FAMILIES.get(f"{_name}_text"):  # None without part delta
        FAMILIES[_name] = _with_pictures(
            _text,
            constants={**_text.constants, "mrope_in_turns": True},
            derived=lambda hf, text=_text: {**text.derived(hf), **_sections(hf, (11, 11, 10))},
        )

GIVEN = ("sample", "collator")
COLUMNS |= {
    # positions along time, height and width (part_pictures_data.rope_positions), which may be
    # fractions in Qwen3-Omni
    "rope_t": Column("token", to_model=True, given_by=GIVEN),
    "rope_h": Column("token", to_model=True, given_by=GIVEN),
    "rope_w": Column("token", to_model=True, given_by=GIVEN),
    # pixel_values [patches, values per patch]; image_grid_thw [images, 3], the numbers of patches
    # along time, height and width
    "pixel_values": Column("input", to_model=True, given_by=GIVEN),
    "image_grid_thw": Column("input", "int64", to_model=True, given_by=GIVEN),
    # pixels and grids of videos; only generation reads the seconds between a video's features
    "second_per_grid_ts": Column("input", to_model=True, given_by=GIVEN),
    "pixel_values_videos": Column("input", to_model=True, given_by=GIVEN),
    "video_grid_thw": Column("input", "int64", to_model=True, given_by=GIVEN),
    # index of each token's image feature in the micro-batch (with_image_slots), -1 for text
    "image_slot": Column("token", "int64", -1, to_model=True, given_by=()),
}

load("part_audio_rows")  # its family extends one of these
