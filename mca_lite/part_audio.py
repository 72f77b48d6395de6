"""Audio in conversations, and transformers' audio module in a model: WAV files, or others with
soundfile; their log-mel spectra, whose features stand for placeholder tokens.

Tokens of audio have the positions of text. A spectrum has 100 frames of a second.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import math
import re
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .errors import expect
from .files import describe_error, read_json
from .inputs import Media
from .part_pictures_data import Picture, PictureFile, Placed, Vision, read_picture

if TYPE_CHECKING:
    import torch

_RATE = 16_000  # samples of a second that the model hears
_TOKENS = ("audio_bos_token", "audio_token", "audio_eos_token")  # attributes of the tokenizer
_SETTINGS = ("processor_config.json", "preprocessor_config.json")


class OfColumn(tuple[Any]):
    """A value of a record's column of audios."""


@dataclass(frozen=True)
class Audio(Picture):
    """An encoded audio: a file's path, or else its bytes in `data`."""

    kind: ClassVar[str] = "audio"

    def __str__(self) -> str:
        return self.path or "an audio within the record"


# -- sound


def read_sound(audio: Audio, where: str, frames: bool = True) -> tuple[np.ndarray, int, int]:
    """Read an audio file -> (waveform float32 [n], its channels averaged; n; sampling rate in Hz).
    frames: False reads the header alone, and the waveform is empty. ValueError that names `where`
    for a file that cannot be read.
    """
    file: Any = audio.path if audio.data is None else io.BytesIO(audio.data)
    try:
        with wave.open(file) as sound:
            expect(sound.getsampwidth() == 2, "its samples have other than 16 bits")
            count, rate = sound.getnframes(), sound.getframerate()
            data = np.frombuffer(sound.readframes(count if frames else 0), dtype="<i2")
            samples = data.reshape(-1, sound.getnchannels()) / np.float32(32768)
    except Exception as error:  # another format, or a broken file
        expect(
            importlib.util.find_spec("soundfile"),
            f"{where}: {audio} is no WAV file of 16 bits ({describe_error(error)}): others take "
            "soundfile: pip install 'mca-lite[audio]'",
        )
        import soundfile  # an extra, for audio alone

        if audio.data is not None:
            file.seek(0)
        try:
            with soundfile.SoundFile(file) as sound:
                count, rate = sound.frames, sound.samplerate
                samples = sound.read(-1 if frames else 0, dtype="float32", always_2d=True)
        except Exception as unread:  # soundfile raises several types
            raise ValueError(f"{where}: {audio} cannot be read: {describe_error(unread)}") from None
    return samples.mean(1), count, rate


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """The samples at 16,000 of a second, ceil(n * 16000 / rate) of them: a windowed sinc, as
    torchaudio's."""
    if rate == _RATE:
        return samples
    import torch
    import torch.nn.functional as F

    common = math.gcd(rate, _RATE)
    old, new = rate // common, _RATE // common
    cutoff = min(old, new) * 0.99
    width = math.ceil(6 * old / cutoff)
    places = torch.arange(-width, width + old, dtype=torch.float64) / old
    times = (places - torch.arange(new).double()[:, None] / new) * cutoff
    times = times.clamp(-6, 6)
    kernels = torch.sinc(times) * torch.cos(times * math.pi / 12) ** 2 * cutoff / old
    padded = F.pad(torch.from_numpy(samples)[None, None], (width, width + old))
    out = F.conv1d(padded, kernels.float()[:, None], stride=old)[0].t().flatten()
    return out[: math.ceil(len(samples) * new / old)].numpy()


def num_tokens(frames: int, window: int) -> int:
    """Features of an audio of so many frames, in chunks of 2 * window. Source: transformers."""
    chunks, rest = divmod(frames, 2 * window)
    for _ in range(3):  # convolutions of stride 2
        rest = (rest + 1) // 2
    return rest + 13 * chunks


# -- the audios of a model


@dataclass(kw_only=True)
class Hearing(Vision):
    """Vision that reads audios beside pictures.

    around: the text of an audio. window: n_window of the audio module.
    """

    around: str
    audio_id: int
    window: int
    marks: ClassVar[dict[str, str]] = {**Vision.marks, "<audio>": "audio"}
    unread = ("videos", "video")
    unread_marks = re.compile(r"<video>|<\|video_pad\|>")

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any], tokenizer: Any, keys: Any) -> Media:
        vision: Any = Vision.of(folder, config, tokenizer, keys)
        tokens = [getattr(tokenizer, name, None) for name in _TOKENS]
        text = "".join(map(str, tokens))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expect(
            isinstance(vision, Vision) and ids[1:2] == [config["audio_token_id"]] and len(ids) == 3,
            f"{folder}: the tokenizer's {', '.join(_TOKENS)} are {tokens}, and audio_token_id in "
            f"config.json is {config['audio_token_id']}: it is another model's",
        )
        values = {
            **vars(vision),
            "tokens": {**vision.tokens, tokens[1]: "audio"},
            "token_ids": (*vision.token_ids, ids[1]),
            "blocks": re.compile(f"({re.escape(vision.block)}|{re.escape(text)})"),
        }
        window = config["audio_config"]["n_window"]
        return cls(**values, around=text, audio_id=ids[1], window=window)

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "audio": [self.around, self.window, self._audio_settings]}

    @functools.cached_property
    def _audio_settings(self) -> dict[str, Any]:
        """The feature extractor's settings; {} if the folder has none."""
        files = (self.folder / name for name in _SETTINGS)
        found = [read_json(file) for file in files if file.is_file()]
        return next((f for v in found if "n_fft" in (f := v.get("feature_extractor", v))), {})

    @functools.cached_property
    def extractor(self) -> Any:
        """transformers' WhisperFeatureExtractor."""
        import transformers

        settings = self._audio_settings
        expect(
            settings,
            f"{self.folder}: expected a WhisperFeatureExtractor in {' or '.join(_SETTINGS)} for "
            "the audio of the data: copy it from the model",
        )
        extractor = transformers.WhisperFeatureExtractor.from_dict(settings)
        expect(
            extractor.sampling_rate == _RATE,
            f"{self.folder}: sampling_rate {extractor.sampling_rate}: expected {_RATE}",
        )
        return extractor

    # -- in a record

    def of_columns(self, record: dict[str, Any], columns: dict[str, Any]) -> list[Any]:
        found = record.get(columns.get("audios", "audios")) or record.get("audio") or []
        audios = found if isinstance(found, list) else [found]
        return [*super().of_columns(record, columns), *(OfColumn([one]) for one in audios)]

    def by_kind(self, of_columns: list[Any]) -> dict[str, list[Any]]:
        audios = [one[0] for one in of_columns if isinstance(one, OfColumn)]
        return {**super().by_kind(of_columns[: len(of_columns) - len(audios)]), "audio": audios}

    def read_input(self, kind: str, value: Any, *place: Any) -> Any:
        item = read_picture(value, *place)
        return item if kind == "image" else Audio(item.path, item.data)

    def text_of(self, item: Any) -> str:
        return self.block if item.kind == "image" else self.around

    # -- among the tokens

    def _frames(self, audio: Audio, where: str) -> int:
        """Frames of an audio's spectrum, from its header."""
        _, count, rate = read_sound(audio, where, frames=False)
        samples, least = math.ceil(count * _RATE / rate), self.extractor.n_fft // 2 + 1
        expect(
            samples >= least,
            f"{where}: {audio} takes {samples / _RATE:.4f} seconds: expected at least "
            f"{least / _RATE:.4f}",
        )
        return samples // int(self.extractor.hop_length)

    def place(self, picture: Any, where: str) -> Placed:
        if picture.kind == "image":
            return super().place(picture, where)
        tokens = num_tokens(self._frames(picture, where), self.window)
        grid = 1, self.merge_size, self.merge_size * tokens  # a line of features
        return Placed(picture, grid, picture.num_bytes, picture.modified, where)

    def pixels(self, placed: Placed) -> torch.Tensor:
        """Of an audio, its spectrum [frames, bins]."""
        audio = placed.picture
        if audio.kind == "image":
            return super().pixels(placed)
        expect(
            (audio.num_bytes, audio.modified) == (placed.num_bytes, placed.modified),
            f"{placed.where}: {audio}: its file has changed since it was tokenised: set "
            "overwrite_cache: true",
        )
        samples, _, rate = read_sound(audio, placed.where)
        values = self.extractor(
            resampled(samples, rate),
            sampling_rate=_RATE,
            padding=True,
            truncation=False,
            return_tensors="pt",
        )["input_features"][0]
        return values[:, : self._frames(audio, placed.where)].t()

    def columns(self, ids: np.ndarray, inputs: Sequence[Placed]) -> dict[str, torch.Tensor]:
        import torch

        pictures = [placed for placed in inputs if placed.picture.kind == "image"]
        audios = [placed for placed in inputs if placed.picture.kind == "audio"]
        columns = super().columns(np.where(ids == self.audio_id, -1, ids), pictures)
        if audios:
            lengths = [self._frames(placed.picture, placed.where) for placed in audios]
            columns["audio_lengths"] = torch.tensor(lengths)
            columns["audio_grid"] = torch.tensor([placed.grid for placed in audios])
        if audios and self.is_read:
            columns["input_features"] = torch.cat([self.pixels(placed) for placed in audios])
        return columns

    def shown(self, inputs: Sequence[Placed]) -> list[tuple[str, str]]:
        return super().shown([placed for placed in inputs if placed.picture.kind == "image"])

    def store(self, folder: Path) -> PictureFile:
        return AudioStore(folder)


class AudioStore(PictureFile):
    """The pictures and audios of a token-cache shard."""

    def write(self, picture: Any, data: Any) -> Any:
        return [picture.kind, *super().write(picture, data)]

    def load(self, record: Any) -> Any:
        kind, *record = record
        item = super().load(record)
        return item if kind == "image" else Audio(item.path, item.data)
