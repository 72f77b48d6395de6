"""The model family with audio: the thinker of qwen3_omni_moe. Exports copy the talker and code2wav,
which are not trained, from the source if it is still there. Also the columns of audio in batches.
"""

from dataclasses import replace

from .families import FAMILIES, OLDER_PREFIXES
from .part_pictures_families import GIVEN
from .tables import COLUMNS, Column

_FAMILY = FAMILIES["qwen3_vl_moe"]
_PARTS = _FAMILY.vision_parts
FAMILIES["qwen3_omni_moe_thinker"] = replace(
    _FAMILY,
    # both towers are one module, with transformers' names within
    rows=tuple(
        replace(row, hf=("model.*",)) if row.kind == "module" else row for row in _FAMILY.rows
    ),
    constants={
        key: value
        for key, value in _FAMILY.constants.items()
        if key != "moe_router_norm_topk_prob"  # config.json has a value for it
    },
    vision_parts={
        **_PARTS,
        "vision_tower": (*_PARTS["vision_tower"], "visual.merger_list", "audio_tower"),
    },
    inputs="audio",
    stacked_experts="",
    prefixes=OLDER_PREFIXES,
    unused=(r"^(talker|code2wav)\.",),
)

COLUMNS |= {
    # log-mel spectra [frames, bins] of audios end to end, and how many frames each has
    "input_features": Column("input", to_model=True, given_by=GIVEN),
    "audio_lengths": Column("input", "int64", to_model=True, given_by=GIVEN),
    # grids like those of image_grid_thw, in which an audio is one line of features
    "audio_grid": Column("input", "int64", to_model=True, given_by=GIVEN),
}
