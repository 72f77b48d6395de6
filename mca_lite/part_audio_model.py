"""Audio in a language model: transformers' audio module beside the one for images. A step updates
each of the two only if it has inputs for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from .families import InputTensors
from .inputs import InputWork, Media
from .model_config import McaModelConfig
from .part_audio import Hearing
from .part_pictures_model import Pictures, Tower, tensors_of

_COLUMNS = ("input_features", "audio_lengths", "audio_grid")


def heard(module: Any, spectra: torch.Tensor | None, lengths: Any) -> torch.Tensor:
    """Run the audio module on spectra -> its features [n, h] for all audios. spectra: log-mel
    spectra of the audios one after another, [frames, bins]; None: one chunk of zeros is used.
    lengths: int64 [audios], frames of each audio."""
    weight = module.conv_out.weight
    if spectra is None:  # bf16 convolutions of a frame or two have gradients that are NaN on CPUs
        spectra = weight.new_zeros(2 * module.n_window, module.num_mel_bins)
        lengths = torch.tensor([len(spectra)], device=weight.device)
    return module(spectra.t().to(weight.dtype), feature_lens=lengths).last_hidden_state


def for_thinker(columns: dict[str, Any]) -> dict[str, Any]:
    """Turn columns of a batch into keyword arguments of transformers' model for text, images and
    audio (its "thinker"). Spectra, stored one after another, become [audios, bins, frames], padded
    to one length, with a mask of their frames."""
    named = {name: column for name, column in columns.items() if name not in _COLUMNS}
    if (seconds := named.pop("second_per_grid_ts", None)) is not None:
        named["video_second_per_grid"] = seconds
    if "input_features" in columns:
        lengths = columns["audio_lengths"]
        padded = pad_sequence(columns["input_features"].split(lengths.tolist()), batch_first=True)
        named["input_features"] = padded.mT
        places = torch.arange(padded.shape[1], device=lengths.device)
        named["feature_attention_mask"] = places < lengths[:, None]
    return named


class Towers(Tower):
    """transformers' vision module (for images and videos) and audio module, as one module."""

    def __init__(self, config: McaModelConfig):
        super().__init__(config)
        inputs: Any = config.inputs
        audio = self.made(type(inputs.on_meta.audio_tower), inputs.whole.audio_config, config, 2)
        self.module = torch.nn.ModuleDict({"visual": self.module, "audio_tower": audio})

    def forward(
        self,
        pixel_values: torch.Tensor | None,
        image_grid_thw: torch.Tensor | None,
        input_features: torch.Tensor | None = None,
        audio_lengths: torch.Tensor | None = None,
        audio_grid: Any = None,
    ) -> list[torch.Tensor] | None:
        """Compute the features of a micro-batch's images and audios -> [embedded, *deepstack], each
        [n + 1, h]: a row of zeros, then the features of images, then those of audios (zeros in
        deepstack). None if neither module runs.

        With autograd, if either module is trained, both run: one without input in the micro-batch
        runs on zeros, and its features come last. input_features: [frames, bins], spectra one after
        another. audio_lengths: frames of each audio. audio_grid is not used."""
        is_idle = not (self.is_trained and torch.is_grad_enabled())
        found: list[tuple[bool, list[torch.Tensor]]] = []
        if pixel_values is not None or not is_idle:
            images = self.features_of(self.module["visual"], pixel_values, image_grid_thw)
            found.append((pixel_values is None, images))
        if input_features is not None or not is_idle:
            audio = heard(self.module["audio_tower"], input_features, audio_lengths)
            nothing = [torch.zeros_like(audio)] * self.num_deepstack
            found.append((input_features is None, [audio, *nothing]))
        if not found:
            return None
        found.sort(key=lambda pair: pair[0])  # no token has the index of a feature without input
        features = zip(*(of_kind for _, of_kind in found), strict=True)
        return [F.pad(torch.cat(of_layer), (0, 0, 1, 0)) for of_layer in features]


class Hears(Pictures):
    """The input modules, for images, videos and audio, of a model that reads all of them."""

    tower = Towers
    exact_times = True
    more_columns = _COLUMNS
    grids = (*Pictures.grids, ("audio_grid",))

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*super().token_ids, self.whole.audio_token_id)

    @property
    def tensors(self) -> InputTensors:
        audio = tensors_of(self.on_meta.audio_tower)
        return (
            *((f"visual.{name}", is_linear) for name, is_linear in super().tensors),
            *((f"audio_tower.{name}", is_linear) for name, is_linear in audio),
        )

    def owns(self, name: str) -> bool:
        return super().owns(name) or name.startswith("model.audio_tower.")

    def media(self, folder: Path, tokenizer: Any, keys: Any) -> Media:
        return Hearing.of(folder, self.whole.to_dict(), tokenizer, keys)

    def for_transformers(
        self, batch: dict[str, Any], inputs: dict[str, Any], positions: Any, is_padding: Any
    ) -> tuple[dict[str, Any], Any]:
        inputs, positions = super().for_transformers(batch, inputs, positions, is_padding)
        inputs = for_thinker(inputs)
        inputs.pop("video_second_per_grid", None)  # positions are given
        return inputs, positions

    def work(self, model: Any) -> InputWork:
        """FLOPs of the input modules: those of Pictures.work for images and videos, and the audio
        module's per frame of spectrum. The audio module's chunks and attention windows count as if
        they were full. model: tells which modules are trained."""
        audio = self.whole.audio_config
        chunk = 2 * audio.n_window
        width = audio.d_model
        rows = audio.num_mel_bins
        frames = chunk
        channels = 1
        of_chunk = 0.0
        for _ in range(3):  # convolutions of 3 x 3, with stride 2
            rows, frames = (rows + 1) // 2, (frames + 1) // 2
            of_chunk += 2 * 9 * channels * audio.downsample_hidden_size * rows * frames
            channels = audio.downsample_hidden_size
        in_window = frames * audio.n_window_infer // chunk
        of_layer = 4 * width + 2 * audio.encoder_ffn_dim
        weights = channels * rows + audio.encoder_layers * of_layer + width + audio.output_dim
        of_chunk += frames * width * (2 * weights + 4 * audio.encoder_layers * in_window)
        trained = any("audio" in name and p.requires_grad for name, p in model.named_parameters())
        passes = 3 if trained else 1
        vision = super().work(model)
        return InputWork(vision.of_unit, vision.of_square, passes * of_chunk / chunk)

    def bytes_of_token(self, trained: Iterable[str], width: int) -> float:
        names = list(trained)
        of_pictures = super().bytes_of_token(names, width)
        if not any(".audio_tower." in name for name in names):
            return of_pictures
        audio = self.whole.audio_config
        rows, frames, values = audio.num_mel_bins, 2 * audio.n_window, 0.0
        for _ in range(3):  # each convolution's output is kept before and after its GELU
            rows, frames = (rows + 1) // 2, (frames + 1) // 2
            values += 2 * audio.downsample_hidden_size * rows * frames
        # values that a layer saves per frame, as counted for pictures (part_pictures_model._KEPT)
        layer = 11 * audio.d_model + 2 * audio.encoder_ffn_dim
        kept = audio.encoder_layers * layer
        if self.config.recompute_granularity == "full":
            kept = audio.encoder_layers * audio.d_model + layer
        return max(of_pictures, float(width * (values / frames + kept)))

    def parameters_of(self, model: Any) -> list[list[torch.nn.Parameter]]:
        return [*super().parameters_of(model), list(model.base_model.audio_tower.parameters())]

    def unused(self, model: Any, columns: dict[str, Any]) -> Any:
        unheard: Any = 0.0
        if "input_features" not in columns:
            unheard = heard(model.base_model.audio_tower, None, None).sum() * 0
        return super().unused(model, columns) + unheard
