"""Pictures in a language model: transformers' module for them, and their features in place of
embeddings.

The tower is whole on each tensor- and context-parallel rank of the first pipeline stage. All of
these run the same pictures, and each takes the features at its places. Under sequence parallelism
a rank's gradient of the tower is that of its places: a partial sum, and marked so for megatron.
Letters: n features, h hidden size, s, b as elsewhere.
"""

import functools
import json
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .errors import expect
from .model_attention import Rope
from .model_config import McaModelConfig, tower_on_meta
from .parallel import to_device

# -- positions


def frequency_axes(count: int, sections: list[int], in_turns: bool) -> list[int]:
    """The axis of positions for each of `count` rotary frequencies: 0 time, 1 height, 2 width.

    sections: the number of frequencies of each. in_turns: time, height, width, time and so on,
    until a section is full, and time for the rest; else one section after the other. ValueError
    for sections that do not fill the frequencies then.
    """
    if in_turns:
        return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(count)]
    expect(
        sum(sections) == count,
        f"mrope_section {sections} in config.json: expected numbers of {count} frequencies, half "
        "the channels of a head, in all",
    )
    return [axis for axis, of_axis in enumerate(sections) for _ in range(of_axis)]


class AxialRope:
    """Rotary tables of positions along time, height and width."""

    def __init__(self, config: McaModelConfig):
        self.rope = Rope.of(config)
        of_sections = config.mrope_section, config.mrope_in_turns
        self.axes = torch.tensor(frequency_axes(len(self.rope.inv_freq), *of_sections))

    def tables(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [s, b, 1, rotary_dim] of positions [3, b, s]."""
        inv_freq = to_device(torch.tensor(self.rope.inv_freq), positions.device)
        axes = to_device(self.axes, positions.device)
        of_frequency = positions.permute(2, 1, 0)[..., axes].float()  # [s, b, rotary_dim / 2]
        return self.rope.tables((of_frequency * inv_freq)[:, :, None], dtype)


# -- features


def empty_picture(vision_config, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(pixel_values, image_grid_thw) of the smallest picture: zeros, for one feature."""
    size = vision_config.spatial_merge_size
    patch = vision_config.patch_size
    channels = vision_config.in_channels * vision_config.temporal_patch_size * patch * patch
    pixels = torch.zeros(size * size, channels, device=device)
    return pixels, torch.tensor([[1, size, size]], device=device)


class PlacedFeatures(NamedTuple):
    """Features of pictures at this rank's places.

    is_image: bool [s, b, 1], or [s / tp, b, 1] under sequence parallelism. embedded: [s, b, h], 0
    for text. deepstack: one of the same shape for each of the first layers, added to its output.
    """

    is_image: torch.Tensor
    embedded: torch.Tensor
    deepstack: list[torch.Tensor]

    @classmethod
    def of(cls, features: list[torch.Tensor], image_slot: torch.Tensor) -> "PlacedFeatures":
        """The Tower's features at the places image_slot [b, s], -1 for text."""
        places = image_slot.t().contiguous() + 1  # 0 of text, a row of zeros without a gradient
        embedded, *deepstack = (F.embedding(places, x, padding_idx=0) for x in features)
        return cls((places > 0)[..., None], embedded, deepstack)

    def into(self, hidden: torch.Tensor) -> torch.Tensor:
        """The embeddings [s, b, h] with features in the places of pictures."""
        return torch.where(self.is_image, self.embedded.to(hidden.dtype), hidden)


# transformers gives a kernel with such a name the borders of pictures, and calls any other once for
# each picture, or window of one
_VARLEN = "flash_varlen"


def varlen_attention(
    module, query, key, value, scaling=None, cu_seq_lens_q=None, max_length_q=None, **unused
):
    """Attention for transformers by torch's varlen kernel: query, key, value [1, n, t, d] of
    pictures, or windows of them, end to end -> ([1, t, n, d], None)."""
    from torch.nn.attention.varlen import varlen_attn

    heads = (x[0].transpose(0, 1) for x in (query, key, value))
    longest = int(max_length_q)
    out = varlen_attn(*heads, cu_seq_lens_q, cu_seq_lens_q, longest, longest, scale=scaling)
    return out[None], None


def _product_of_patches(convolution, patches):
    """A convolution of one place a patch [n, ...] as the product that it is: cuDNN's rounds float32
    to tf32, and takes long in bf16."""
    return F.linear(patches.flatten(1), convolution.weight.flatten(1), convolution.bias)


class Tower(torch.nn.Module):
    """transformers' module for pictures, as its family has it."""

    def __init__(self, config: McaModelConfig):
        from transformers import AttentionInterface
        from transformers.initialization import no_init_weights

        super().__init__()
        kind = type(tower_on_meta(json.dumps(config.hf_config, sort_keys=True)))
        with no_init_weights():
            self.module = kind(config.vision_config)
        patches = self.module.patch_embed.proj
        patches.forward = functools.partial(_product_of_patches, patches)
        if torch.cuda.is_available() and config.params_dtype != torch.float32:
            AttentionInterface.register(_VARLEN, varlen_attention)
            self.module.config._attn_implementation = _VARLEN
        if config.recompute_granularity == "full":
            self.module.gradient_checkpointing_enable()
        for parameter in self.module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
            parameter.of_tower = True  # see ckpt_megatron.is_of_tower
        self.vision_config = config.vision_config

    def _apply(self, fn, recurse=True):
        """Keep the frequencies of positions in float32 whatever the weights' dtype, as transformers
        does."""
        before = {name: buffer for name, buffer in self.named_buffers()}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            path, _, last = name.rpartition(".")
            owner = self.get_submodule(path)
            moved = getattr(owner, last)
            setattr(owner, last, buffer.to(moved.device))
        return self

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def forward(self, pixel_values, image_grid_thw) -> list[torch.Tensor] | None:
        """Features of the pictures of a micro-batch: the embedded ones and those of deepstack, each
        [n + 1, h] with zeros first.

        pixel_values [patches, values of a patch] and image_grid_thw [pictures, 3], or None: then
        a trained tower runs on an empty picture without a place, so that each rank has a gradient
        for every bucket; None is the answer otherwise.
        """
        weight = next(self.parameters())
        if pixel_values is None:
            if not (self.is_trained and torch.is_grad_enabled()):
                return None
            pixel_values, image_grid_thw = empty_picture(self.vision_config, weight.device)
        output = self.module(pixel_values.to(weight.dtype), grid_thw=image_grid_thw)
        features = [output.pooler_output, *getattr(output, "deepstack_features", ())]
        return [F.pad(x, (0, 0, 1, 0)) for x in features]
