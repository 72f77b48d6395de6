"""Keys and rules of images: their files and sizes, and which parts of the model are trained."""

import math
import os
from dataclasses import dataclass
from typing import Any

from .args_values import ArgumentGroup, arg, count, flag, optional
from .errors import Judge, Rule
from .tables import register_keys

_FROZEN = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
_WITHOUT_TOWER = tuple(
    Rule(f"{wrong}{key}", "the model has no vision tower", f"{key} left out")
    for wrong, key in zip(("!", "!", ""), _FROZEN, strict=True)
)


@dataclass(kw_only=True)
class PicturesArguments(ArgumentGroup):
    """Pictures.

    The configuration keys for images in the data, and for the vision modules to train.
    """

    media_dir: str | None = optional("folder of pictures (None: that of the dataset's file)")
    image_max_pixels: int | None = count(
        None, "larger pictures are made smaller (None: as the model's image processor says)"
    )
    image_min_pixels: int | None = count(
        None, "smaller pictures are made larger (None: as the model's image processor says)"
    )
    freeze_vision_tower: bool = arg(True, "models with images: do not train the vision tower")
    freeze_multi_modal_projector: bool = arg(
        True, "models with images: do not train the projector behind the tower"
    )
    freeze_language_model: bool = flag(
        "models with images: do not train the language model and its head"
    )

    def check(self, judge: Judge) -> None:
        """Check the keys of this group: Problems are added to `judge` (which collects them) if
        media_dir is no folder or the pixel limits contradict each other. In a run whose model has
        no vision tower, also for freeze keys whose values need one; other keys of this group that
        are set get a note there."""
        judge.expect(
            os.path.isdir(self.media_dir or "."),
            "media_dir",
            "it is no folder",
            "the folder of the pictures that records name",
        )
        judge.expect(
            (self.image_min_pixels or 0) <= (self.image_max_pixels or math.inf),
            "image_min_pixels image_max_pixels",
            f"it is above image_max_pixels, {self.image_max_pixels}",
            "a lower one",
        )
        config = getattr(judge.arguments, "model_config", None)
        if config is not None:  # the keys belong to a run
            self._check_run(config, judge)

    def _check_run(self, config: dict[str, Any], judge: Judge) -> None:
        """For a model without a vision tower, add Problems to `judge` (which collects them) for
        freeze keys whose values need a tower. Other keys of this group that are set have no effect,
        and get a note. config: the contents of the model's config.json or mca_config.json, {} if
        neither was read."""
        config = config.get("hf_config") or config  # of a checkpoint
        if config and "vision_config" not in config:
            judge.apply(_WITHOUT_TOWER)
            unused = [key for key in self.changed if key not in _FROZEN]
            self.notes += [f"{key}: no effect, since the model reads text alone" for key in unused]


register_keys("pictures", PicturesArguments, fixed=_FROZEN)
