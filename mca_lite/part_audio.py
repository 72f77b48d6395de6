"""Audio in conversations: reading files, computing spectra, placing placeholder tokens.

Python reads WAV files with 16-bit samples; other formats need soundfile. The audio module, in
part_audio_model, turns an audio's log-mel spectrum into features, one per placeholder token. These
tokens have rotary positions like text."""

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
from .part_pictures_data import Picture, PictureFile, Placed, read_picture
from .part_video import VideoStore, VideoVision

if TYPE_CHECKING:
    import torch

_RATE = 16_000  # the sampling rate in Hz that the models expect
_TOKENS = ("audio_bos_token", "audio_token", "audio_eos_token")  # attributes of the tokenizer
_SETTINGS = ("processor_config.json", "preprocessor_config.json")


class OfColumn(tuple[Any]):
    """A tuple of one value, from a record's column of audios. The type marks it as an audio,
    because values of image columns stand in the same list."""


@dataclass(frozen=True)
class Audio(Picture):
    """An audio file: its path; or, with path "", its encoded bytes in `data`."""

    kind: ClassVar[str] = "audio"

    def __str__(self) -> str:
        return self.path or "an audio within the record"


# -- sound


def read_sound(audio: Audio, where: str, frames: bool = True) -> tuple[np.ndarray, int, int]:
    """Read an audio file -> (waveform float32 [n], the mean of its channels; its length in samples
    as the header says; sampling rate in Hz). frames: if False, only the header is read, and the
    waveform is empty. ValueError, naming `where`, for a file that cannot be read, or that needs
    soundfile if soundfile is missing."""
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
    """Resample a waveform from `rate` Hz to 16 kHz -> [ceil(n * 16000 / rate)], with a windowed
    sinc filter as in torchaudio."""
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
    """The number of placeholder tokens for an audio: one per feature that the audio module
    computes. The module encodes the audio's spectrum in chunks of 2 * window frames. frames: length
    of the spectrum. window: n_window in the module's config. A full chunk has 13 tokens, as in
    transformers, which fits a window of 50."""
    chunks, rest = divmod(frames, 2 * window)
    for _ in range(3):  # convolutions of stride 2
        rest = (rest + 1) // 2
    return rest + 13 * chunks


# -- the audios of a model


@dataclass(kw_only=True)
class Hearing(VideoVision):
    """Reads the images, videos and audio of records for one model, and places them among the
    tokens.

    sound: the text that stands for an audio in a conversation; it contains the placeholder once.
    audio_id: the placeholder's token id. window: half the frames of a chunk that the audio module
    encodes (its config's n_window).
    """

    sound: str
    audio_id: int
    window: int
    marks: ClassVar[dict[str, str]] = {**VideoVision.marks, "<audio>": "audio"}
    unread = ()  # type: ignore[assignment]  # an annotation would make it a field
    unread_marks = re.compile("(?!)")
    exact_times = True

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any], tokenizer: Any, keys: Any) -> Media:
        vision: Any = VideoVision.of(folder, config, tokenizer, keys)
        expect(
            isinstance(vision, VideoVision),
            f"{folder}: the tokenizer has no token of videos, video_token_id in config.json: it is "
            "another model's",
        )
        tokens = [getattr(tokenizer, name, None) for name in _TOKENS]
        text = "".join(map(str, tokens))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expect(
            ids[1:2] == [config["audio_token_id"]] and len(ids) == 3,
            f"{folder}: the tokenizer's {', '.join(_TOKENS)} are {tokens}, and audio_token_id in "
            f"config.json is {config['audio_token_id']}: it is another model's",
        )
        values = {
            **vars(vision),
            "tokens": {**vision.tokens, tokens[1]: "audio"},
            "token_ids": (*vision.token_ids, ids[1]),
            "blocks": re.compile(f"{vision.blocks.pattern[:-1]}|{re.escape(text)})"),
        }
        window = config["audio_config"]["n_window"]
        return cls(**values, sound=text, audio_id=ids[1], window=window)

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "audio": [self.sound, self.window, self._audio_settings]}

    @functools.cached_property
    def _audio_settings(self) -> dict[str, Any]:
        """The feature extractor's settings from the model's folder; {} if the folder has none."""
        files = (self.folder / name for name in _SETTINGS)
        found = [read_json(file) for file in files if file.is_file()]
        return next((f for v in found if "n_fft" in (f := v.get("feature_extractor", v))), {})

    @functools.cached_property
    def extractor(self) -> Any:
        """transformers' WhisperFeatureExtractor with the model's settings. ValueError if the
        model's folder has no such settings, or if their sampling rate is not 16 kHz."""
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
        if kind != "audio":
            return super().read_input(kind, value, *place)
        item = read_picture(value, *place)
        return Audio(item.path, item.data)

    def text_of(self, item: Any) -> str:
        return self.sound if item.kind == "audio" else super().text_of(item)

    # -- among the tokens

    def _frames(self, audio: Audio, where: str) -> int:
        """The number of frames that an audio's spectrum will have, computed from the file's header
        alone. ValueError, naming the record by `where`, if the audio is too short."""
        _, count, rate = read_sound(audio, where, frames=False)
        samples, least = math.ceil(count * _RATE / rate), self.extractor.n_fft // 2 + 1
        expect(
            samples >= least,
            f"{where}: {audio} takes {samples / _RATE:.4f} seconds: expected at least "
            f"{least / _RATE:.4f}",
        )
        return samples // int(self.extractor.hop_length)

    def place(self, picture: Any, where: str) -> Placed:
        if picture.kind != "audio":
            return super().place(picture, where)
        tokens = num_tokens(self._frames(picture, where), self.window)
        grid = 1, self.merge_size, self.merge_size * tokens  # a line of features
        return Placed(picture, grid, picture.num_bytes, picture.modified, where)

    def pixels(self, placed: Placed) -> torch.Tensor:
        """The contents of an input for the model. placed: a Placed, the input with the facts that
        were read when it was tokenised. For an audio, its log-mel spectrum [frames, bins];
        ValueError if its file has changed since. For images and videos, the pixel values that
        VideoVision.pixels returns."""
        audio = placed.picture
        if audio.kind != "audio":
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

        pictures = [placed for placed in inputs if placed.picture.kind != "audio"]
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
        return super().shown([placed for placed in inputs if placed.picture.kind != "audio"])

    def store(self, folder: Path) -> VideoStore:
        return AudioStore(folder)


class AudioStore(VideoStore):
    """Stores the images, videos and audios of a token-cache shard. For an audio, the stored record
    is a list: the record of an image with "audio" added as the last item. The rest is VideoStore's.
    """

    def write(self, picture: Any, data: Any) -> Any:
        if picture.kind != "audio":
            return super().write(picture, data)
        return [*PictureFile.write(self, picture, data), picture.kind]

    def load(self, record: Any) -> Any:
        if len(record) != 4:  # a dict for a video has more
            return super().load(record)
        item = super().load(record[:3])
        return Audio(item.path, item.data)
