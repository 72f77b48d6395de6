"""Images in a language model: transformers' vision module (the tower), whose features replace
embeddings.

On megatron-core the tower is replicated on the tensor- and context-parallel ranks of the first
pipeline stage. They all process the same images, and each uses the features for its tokens. Under
sequence parallelism a rank's gradient of the tower covers its tokens only: a partial sum, marked so
that megatron sums it.
Letters: n features, h hidden size, s sequence, b batch.
"""

import copy
import functools
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .batch import Batch
from .ckpt_megatron import may_rest
from .errors import expect, refuse
from .families import LANGUAGE_MODEL, InputTensors, part_of, vision_parts_of
from .hosts import host_of
from .inputs import Inputs, InputWork, Media
from .mcore import mpu
from .model_attention import Rope
from .model_config import McaModelConfig
from .parallel import largest, to_device
from .part_pictures_data import COLUMNS_OF, ROPE_COLUMNS, Vision, merged_grids
from .parts import module_of
from .tables import is_of_inputs
from .weights_files import InitSource

_GRIDS = (*(grid for _, grid in COLUMNS_OF.values()), "audio_grid")

# -- positions


def frequency_axes(count: int, sections: list[int], in_turns: bool) -> list[int]:
    """Choose for each of `count` rotary frequencies the position axis that it encodes: 0 time, 1
    height, 2 width.

    sections: number of frequencies per axis. in_turns True: axes alternate (time, height, width,
    time, ...) until an axis has its number of frequencies; the rest are time. in_turns False: one
    section after another; ValueError if the sections do not sum to `count`."""
    if in_turns:
        return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(count)]
    expect(
        sum(sections) == count,
        f"mrope_section {sections} in config.json: expected a sum of {count} frequencies, half "
        "the channels of a head",
    )
    return [axis for axis, of_axis in enumerate(sections) for _ in range(of_axis)]


class AxialRope:
    """Rotary embedding of models that see images (M-RoPE): a token has positions along time, height
    and width, and each rotary frequency encodes one of the three."""

    def __init__(self, config: McaModelConfig):
        self.rope = Rope.of(config)
        of_sections = config.mrope_section, config.mrope_in_turns
        self.axes = torch.tensor(frequency_axes(len(self.rope.inv_freq), *of_sections))

    def tables(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the rotary tables (cos, sin), [s, b, 1, rotary_dim] each, by which queries and
        keys are rotated. positions: [3, b, s], the tokens' positions along time, height and width.
        dtype: of the result."""
        inv_freq = to_device(torch.tensor(self.rope.inv_freq), positions.device)
        axes = to_device(self.axes, positions.device)
        of_frequency = positions.permute(2, 1, 0)[..., axes].float()  # [s, b, rotary_dim / 2]
        return self.rope.tables((of_frequency * inv_freq)[:, :, None], dtype)


# -- in batches


def with_image_slots(batch: Batch, *token_ids: int) -> Batch:
    """A copy of the batch with the column "image_slot" [b, s] added: the index of each placeholder
    token's image feature in the micro-batch; -1 for text and padding. token_ids: ids of the
    placeholder tokens, in the order in which their features are concatenated (images before
    videos)."""
    slots, count = batch["input_ids"].new_full(batch["input_ids"].shape, -1), 0
    for token_id in token_ids:
        is_input = (batch["input_ids"] == token_id) & ~batch["padding_mask"]
        numbers = is_input.flatten().cumsum(0).view(is_input.shape) - 1 + count
        slots = numbers.where(is_input, slots)
        count += int(is_input.sum())
    return {**batch, "image_slot": slots}


def has_pictures(batch: Batch) -> bool:
    """True if the batch has images or other inputs than text, and is not a filler batch of padding
    only."""
    return any(name in batch for name in _GRIDS) and not bool(batch["padding_mask"].all())


def check_slots(batch: Batch, merge_size: int) -> None:
    """Check that a batch with "image_slot" (from with_image_slots) has as many placeholder tokens
    as its images and other inputs have features, and that it has the columns of rope positions.
    ValueError if not. In a batch of padding alone, the numbers may differ. merge_size: patches per
    side that the vision tower merges into one feature."""
    lacking = [name for name in ROPE_COLUMNS if name not in batch]
    expect(
        not lacking,
        f"a batch of a model with pictures lacks {', '.join(lacking)}: rope_positions gives them "
        "for a document",
    )
    count = int(batch["image_slot"].max()) + 1
    grids = [batch[name] for name in _GRIDS if name in batch]
    features = sum(int(merged_grids(grid, merge_size).prod(1).sum()) for grid in grids)
    expect(
        count == features or batch["padding_mask"].all(),
        f"a batch has {count} image tokens, and its pictures {features} features: expected an "
        "image token for each feature, and image_grid_thw of every picture (of videos the token "
        "and video_grid_thw)",
    )


# -- features


def empty_picture(vision_config: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the smallest image that a vision tower takes, all zeros, which gives one feature ->
    (pixel_values [patches, values per patch], image_grid_thw [1, 3]). vision_config: transformers'
    config of the tower."""
    size = vision_config.spatial_merge_size
    patch = vision_config.patch_size
    channels = vision_config.in_channels * vision_config.temporal_patch_size * patch * patch
    pixels = torch.zeros(size * size, channels, device=device)
    return pixels, torch.tensor([[1, size, size]], device=device)


class PlacedFeatures(NamedTuple):
    """Image features put at the places of this rank's tokens, to be merged with the text's
    embeddings. [s, b, ...] is [s / tp, b, ...] under sequence parallelism.

    is_image: bool [s, b, 1], True at image tokens.
    embedded: [s, b, h], features that replace image tokens' embeddings; 0 for text.
    deepstack: tensors of embedded's shape, to add to the outputs of the model's first layers."""

    is_image: torch.Tensor
    embedded: torch.Tensor
    deepstack: list[torch.Tensor]

    @classmethod
    def of(cls, features: list[torch.Tensor], image_slot: torch.Tensor) -> "PlacedFeatures":
        """Put image features at the places of this rank's tokens. features: from the Tower (the
        vision module), each [n + 1, h]: a row of zeros, then n features. image_slot: int [b, s],
        the feature index of each of this rank's tokens, -1 for text."""
        places = image_slot.t().contiguous() + 1  # text reads row 0: zeros without a gradient
        embedded, *deepstack = (F.embedding(places, x, padding_idx=0) for x in features)
        return cls((places > 0)[..., None], embedded, deepstack)

    def into(self, hidden: torch.Tensor) -> torch.Tensor:
        """Replace image tokens' embeddings by their features. hidden: embeddings [s, b, h], or [s /
        tp, b, h] under sequence parallelism -> a new tensor of this shape."""
        return torch.where(self.is_image, self.embedded.to(hidden.dtype), hidden)


# transformers passes the borders of images to an attention with such a name; others it calls once
# for each image, or window of an image
_VARLEN = "flash_varlen"


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: Any = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers' vision modules, by torch's varlen kernel, which takes many images
    of different sizes in one call.

    query, key, value: [1, heads, t, d], the patches of all images (or of windows of images) one
    after another -> ([1, t, heads, d], None). cu_seq_lens_q: int [number + 1], index at which each
    image or window begins, then t. max_length_q: number of patches in the largest. scaling: factor
    on the scores."""
    from torch.nn.attention.varlen import varlen_attn

    heads = (x[0].transpose(0, 1) for x in (query, key, value))
    longest = int(max_length_q)
    out = varlen_attn(*heads, cu_seq_lens_q, cu_seq_lens_q, longest, longest, scale=scaling)
    return out[None], None


def _product_of_patches(convolution: torch.nn.Module, patches: torch.Tensor) -> torch.Tensor:
    """Apply a convolution whose kernel covers exactly one patch, as a matmul: patches [n, ...] ->
    [n, out]. A matmul keeps float32 precision; cuDNN's convolution would by default round to tf32.
    """
    return F.linear(patches.flatten(1), convolution.weight.flatten(1), convolution.bias)


def whole_config(hf_config: dict[str, Any]) -> Any:
    """transformers' config object, vision part included, for a config.json's contents."""
    import transformers

    return transformers.AutoConfig.for_model(**copy.deepcopy(hf_config))


@functools.lru_cache(4)
def modules_on_meta(hf_config: str) -> Any:
    """Build transformers' model without its head on the meta device (shapes without memory), to
    look modules up. Its language model has one layer. hf_config: a config.json's text. Cached."""
    import transformers

    hf = whole_config(json.loads(hf_config))
    hf.get_text_config().num_hidden_layers = 1
    with torch.device("meta"):
        return transformers.AutoModelForImageTextToText.from_config(hf).model


def tensors_of(tower: torch.nn.Module) -> InputTensors:
    """List a module's parameters as (name, True if it is the weight matrix of a linear)."""
    linears = {
        f"{name}.weight"
        for name, module in tower.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    return tuple((name, name in linears) for name, _ in tower.named_parameters())


class Tower(torch.nn.Module):
    """The vision module of the model, as transformers implements it: it turns image patches into
    features."""

    def __init__(self, config: McaModelConfig):
        from transformers import AttentionInterface

        super().__init__()
        inputs: Any = config.inputs
        self.vision_config = inputs.vision_config
        self.num_deepstack = inputs.num_deepstack
        self.module = self.made(type(inputs.on_meta.visual), self.vision_config, config, 1)
        for name, module in self.module.named_modules():
            if name in ("patch_embed.proj", "downsample"):
                module.forward = functools.partial(_product_of_patches, module)
        if torch.cuda.is_available() and config.params_dtype != torch.float32:
            AttentionInterface.register(_VARLEN, varlen_attention)
            self.module.config._attn_implementation = _VARLEN

    def made(self, of: Any, hf_config: Any, config: McaModelConfig, kind: int) -> Any:
        """Build one input module of the model (such as the vision tower), without initialising its
        weights, and set it up for the model's recomputation and sequence parallelism. of: its class
        in transformers. hf_config: its transformers config. config: the whole model's
        McaModelConfig. kind: number of its kind of input (1 images, 2 audio); the optimizer skips
        its weights in steps without such inputs."""
        from transformers.initialization import no_init_weights

        with no_init_weights():
            module = of(hf_config)
        if config.recompute_granularity == "full":
            module.gradient_checkpointing_enable()
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
            parameter.may_rest = kind
        return module

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Tower":
        """Apply fn to the module's tensors, as torch's Module._apply does for .to(), .half() and
        others. Weights change as fn says; buffers (position frequencies) only change their device
        and keep their dtype, float32, as in transformers."""
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
        """True if any weight of the tower is trained."""
        return any(parameter.requires_grad for parameter in self.parameters())

    def forward(
        self, pixel_values: torch.Tensor | None, image_grid_thw: torch.Tensor | None
    ) -> list[torch.Tensor] | None:
        """Compute the n features of a micro-batch's images -> [embedded, *deepstack], each [n + 1,
        h] with a row of zeros first. embedded: features that replace embeddings. deepstack:
        features to add to the outputs of the model's first layers.

        pixel_values: [patches, values per patch]. image_grid_thw: [images, 3]. For a micro-batch
        without images both are None. The result is then None, unless the tower is trained and
        autograd is on: every rank needs a gradient for every DDP bucket, so the tower runs on an
        empty image, whose feature no token uses."""
        if pixel_values is None and not (self.is_trained and torch.is_grad_enabled()):
            return None
        features = self.features_of(self.module, pixel_values, image_grid_thw)
        return [F.pad(x, (0, 0, 1, 0)) for x in features]

    def features_of(self, module: Any, pixel_values: Any, image_grid_thw: Any) -> Any:
        """Run a vision module on images -> [embedded, *deepstack], each [n, h]: features that
        replace embeddings, and features to add to the first layers' outputs. pixel_values:
        [patches, values per patch], or None for an empty image. image_grid_thw: [images, 3]."""
        weight = next(module.parameters())
        if pixel_values is None:
            pixel_values, image_grid_thw = empty_picture(self.vision_config, weight.device)
        output = module(pixel_values.to(weight.dtype), grid_thw=image_grid_thw)
        return [output.pooler_output, *getattr(output, "deepstack_features", ())]


# -- the inputs of a model

# activation function -> values that a vision layer saves per patch for the backward pass, (per
# channel, per MLP column); counted from the saved storages
_KEPT = {"quick_gelu": (11, 3), "gelu_pytorch_tanh": (11, 2), "silu": (15, 4)}


# why pictures with multi-token prediction are refused on several pipeline stages
_NOT_AHEAD = (
    "layers for multi-token prediction, on the last pipeline stage, do not get the features of "
    "pictures from the first"
)
_REMEDY_AHEAD = "pipeline_model_parallel_size: 1, mtp_num_layers: 0, or data of text"


class Pictures(Inputs):
    """The image inputs of a model. With megatron-core, the first pipeline stage has a Tower (the
    vision module). Methods without a docstring here are described in the base class Inputs.

    tower: the class of the tower.
    more_columns: batch columns that the tower takes beside pixels and grids.
    grids: for each kind of input a tuple of column names; a batch has inputs of that kind if it has
    one of these columns."""

    tower: type[Tower] = Tower
    exact_times = False  # True: positions may be fractions
    more_columns: tuple[str, ...] = ()
    grids: tuple[tuple[str, ...], ...] = (tuple(grid for _, grid in COLUMNS_OF.values()),)

    @property
    def on_meta(self) -> Any:
        """transformers' model without its head, on the meta device (shapes without memory), from
        modules_on_meta()."""
        return modules_on_meta(json.dumps(self.hf_config, sort_keys=True))

    @functools.cached_property
    def whole(self) -> Any:
        """transformers' config of the whole model, language model and vision module."""
        is_hf = hasattr(self.config, "vision_config")
        return self.config if is_hf else whole_config(self.config.hf_config)

    @functools.cached_property
    def hf_config(self) -> dict[str, Any]:
        """The model's Hugging Face config as a dict."""
        return getattr(self.config, "hf_config", None) or self.config.to_dict()

    @property
    def vision_config(self) -> Any:
        """transformers' config of the vision module."""
        return self.whole.vision_config

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Placeholder token ids of (images, videos); -1 for videos if the model has none. In glm4v
        frames of videos have the token of images."""
        return self.whole.image_token_id, getattr(self.whole, "video_token_id", -1)

    @property
    def tensors(self) -> InputTensors:
        return tensors_of(self.on_meta.visual)

    @property
    def num_deepstack(self) -> int:
        return len(getattr(self.vision_config, "deepstack_visual_indexes", ()))

    def owns(self, name: str) -> bool:
        return name.startswith("model.visual.")

    def media(self, folder: Path, tokenizer: Any, keys: Any) -> Media:
        kind = getattr(module_of("part_video"), "VideoVision", Vision)  # the part may be gone
        return kind.of(folder, self.whole.to_dict(), tokenizer, keys)

    def notes(self, args: Any) -> list[str]:
        ahead = getattr(self.config, "mtp_num_layers", None)
        if ahead and args.pipeline_model_parallel_size > 1:
            refuse("mtp_num_layers", ahead, _NOT_AHEAD, _REMEDY_AHEAD)
        if args.dataloader_num_workers:
            return []
        remedy = "dataloader_num_workers: 4 does it beside them"
        return [f"note: pictures are decoded between the steps: {remedy}"]

    def build(self, model: Any) -> None:
        self.axial_rope = AxialRope(self.config)
        if model.pre_process:
            model.vision_model = self.tower(self.config)

    def embed(  # type: ignore[override]
        self, model: Any, hidden: torch.Tensor, shared: dict[str, Any], rope_t: torch.Tensor,
        rope_h: torch.Tensor, rope_w: torch.Tensor,
        image_slot: Any = None, pixel_values: Any = None, image_grid_thw: Any = None, **more: Any,
    ) -> tuple[Any, list[Any], Callable[..., Any] | None]:  # fmt: skip
        """Replace the embeddings of placeholder tokens by image features, on the first pipeline
        stage -> (hidden, deepstack, replace). deepstack: features to add to the outputs of the
        first layers. replace(embeddings, slots): does the same for other embeddings; None if there
        are no features on this rank.

        On every stage, the rotary tables for this rank's positions are added to `shared`. rope_t,
        rope_h, rope_w: [b, s], positions along time, height and width. image_slot: [b, s], the
        feature index of each token, -1 for text. more: other columns that the tower takes."""
        positions = torch.stack((rope_t, rope_h, rope_w))
        shared["rope_tables"] = self.axial_rope.tables(positions, self.config.params_dtype)
        if not model.pre_process:
            return hidden, [], None
        features = model.vision_model(pixel_values, image_grid_thw, **more)
        if features is None:
            return hidden, [], None

        def placed(image_slot: torch.Tensor) -> PlacedFeatures:
            """Put the image features at this rank's tokens. image_slot: [b, s], the feature index
            of each token, -1 for text; under sequence parallelism this rank's part of it is taken.
            """
            if self.config.sequence_parallel:
                image_slot = image_slot.chunk(model.tp_group.size(), 1)[model.tp_group.rank()]
            return PlacedFeatures.of(features, image_slot)

        here = placed(image_slot)
        return here.into(hidden), here.deepstack, lambda ahead, slots: placed(slots).into(ahead)

    def arrange(self, batch: Batch) -> Batch:
        """Make a batch ready for the model: add "image_slot" (the index of each token's image
        feature), and concatenate videos after images, because one tower takes both.

        Only the first pipeline stage keeps pixels and other columns of inputs, and there a batch of
        padding alone loses them. ValueError if check_slots refuses the batch, and for images with
        multi-token prediction on several pipeline stages."""
        config = self.config
        is_cut = config.pipeline_model_parallel_size > 1
        expect(
            not (is_cut and config.mtp_num_layers and has_pictures(batch)),
            f"a batch has pictures: {_NOT_AHEAD}: set {_REMEDY_AHEAD}",
        )
        batch = self._with_slots(batch)
        if not (mpu.is_pipeline_first_stage(ignore_virtual=True) and has_pictures(batch)):
            return _without_pictures(batch)
        joined = _without_pictures(batch)
        for names in zip(*COLUMNS_OF.values(), strict=True):
            if found := [batch[name] for name in names if name in batch]:
                joined[names[0]] = torch.cat(found)
        return joined | {name: batch[name] for name in self.more_columns if name in batch}

    def _with_slots(self, batch: Batch) -> Batch:
        """A copy of the batch with "image_slot" [b, s] added: the index of each token's image
        feature, -1 for others. ValueError if check_slots refuses the batch."""
        batch = with_image_slots(batch, *self.token_ids)
        check_slots(batch, self.vision_config.spatial_merge_size)
        return batch

    def trains(self, model: Any) -> bool:
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        [trains] = largest(int(any(map(may_rest, trained))))
        return bool(trains)

    def for_transformers(
        self, batch: Batch, inputs: dict[str, Any], positions: Any, is_padding: torch.Tensor
    ) -> tuple[dict[str, Any], Any]:
        self._with_slots(batch)
        ids = inputs["input_ids"]
        # filler rows contain image tokens without images: replace these tokens
        token_ids = torch.tensor(self.token_ids, device=ids.device)
        other = next(number for number in range(3) if number not in self.token_ids)
        unseen = is_padding & torch.isin(ids, token_ids)
        inputs["input_ids"] = ids.masked_fill(unseen, other)
        positions = torch.stack([inputs.pop(name) for name in ROPE_COLUMNS])
        if not self.exact_times:
            positions = positions.long()
        return inputs if has_pictures(batch) else _without_pictures(inputs), positions

    def parameters_of(self, model: Any) -> list[list[torch.nn.Parameter]]:
        return [list(model.base_model.visual.parameters())]

    def unused(self, model: Any, columns: dict[str, Any]) -> Any:
        if any(pixels in columns for pixels, _ in COLUMNS_OF.values()):
            return 0.0
        weight = next(model.parameters())
        pixels, grid = empty_picture(self.vision_config, weight.device)
        output = model.base_model.visual(pixels, grid_thw=grid)
        features = [output.pooler_output, *getattr(output, "deepstack_features", ())]
        return sum(feature.sum() for feature in features) * 0

    def rests(self, micro_batches: list[Batch]) -> set[int]:
        seen = [batch for batch in micro_batches if has_pictures(batch)]
        found = [any(name in batch for batch in seen for name in names) for names in self.grids]
        return {kind for kind, is_seen in enumerate(largest(*map(int, found)), 1) if not is_seen}

    def work(self, model: Any) -> InputWork:
        """Estimate the vision tower's training FLOPs per image patch, as an InputWork: the forward
        pass, and the backward pass if any of the tower's weights is trained. Weights that work on
        merged patches count once per feature, not per patch. Windows of attention count as if all
        had their full size."""
        vision = self.vision_config
        source = InitSource(self.hf_config, 0)
        weights = 0.0
        for name in filter(re.compile("model.visual.").match, source.names()):
            shape = source.shape(name)
            if len(shape) > 1 and "pos" not in name:  # no table of positions
                is_merged = "merger" in name or "downsample" in name
                uses = vision.spatial_merge_size**-2 if is_merged else 1.0
                weights += uses * math.prod(shape)
        windows = 0
        if hasattr(vision, "fullatt_block_indexes"):
            windows = vision.depth - len(vision.fullatt_block_indexes)
        in_window = (getattr(vision, "window_size", 0) // vision.patch_size) ** 2
        width = getattr(vision, "embed_dim", vision.hidden_size)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        # megatron's names for an audio tower begin with vision_model too
        is_trained = any("vis" in name and "audio_tower" not in name for name in trained)
        passes = 3 if is_trained else 1
        of_patch = 2 * weights + 4 * width * windows * in_window
        return InputWork(passes * of_patch, passes * 4 * width * (vision.depth - windows))

    def parts_summary(self, model: Any) -> str:
        host = host_of(model)
        parts = {w.key: part_of(host.model_type, w.modules[0]) for w in host.weights()}
        totals = dict.fromkeys((*vision_parts_of(host.model_type), LANGUAGE_MODEL), 0)
        trained = dict(totals)
        for key, tensor, is_trained in host.parameters():
            if key in parts:
                totals[parts[key]] += tensor.numel()
                trained[parts[key]] += tensor.numel() * is_trained
        return ", ".join(f"{part} {trained[part]:,} of {total:,}" for part, total in totals.items())

    def bytes_of_token(self, trained: Iterable[str], width: int) -> float:
        """Estimate the memory that the vision tower keeps for the backward pass, in bytes per image
        token; 0 if all its blocks are frozen. trained: names of the trained parameters. width:
        bytes per value."""
        if not any("vis" in name and ".blocks." in name for name in trained):
            return 0.0
        vision = self.vision_config
        channels = getattr(vision, "embed_dim", vision.hidden_size)
        mlp = self.on_meta.visual.blocks[0].mlp
        columns = max(max(matrix.shape) for matrix in mlp.parameters())
        of_channel, of_column = _KEPT.get(vision.hidden_act, _KEPT["silu"])
        layer = width * (of_channel * channels + of_column * columns)
        kept = vision.depth * layer
        if self.config.recompute_granularity == "full":
            kept = vision.depth * width * channels + layer
        return kept * vision.spatial_merge_size**2


def _without_pictures(columns: dict[str, Any]) -> dict[str, Any]:
    """A copy of a batch's columns {name: column} without those of inputs other than text, such as
    pixels and their grids."""
    return {name: column for name, column in columns.items() if not is_of_inputs(name)}
