"""Videos in conversations: which frames are taken, when they are shown, their pixels.

A video is a file, which PyAV reads, a folder of pictures, or a list of pictures. From a file, as in
LLaMA-Factory, video_fps frames per second are taken, at most video_maxlen, evenly from the first to
the last. All pictures of a folder or list are frames, shown at video_fps per second. Each two
frames make one step of the patch grid along time; the last of an odd number is taken twice. Frames
are resized by torch's bicubic interpolation, as in transformers' video processors, which need
torchvision. Qwen3-VL and Qwen3.5 write the time of each two frames as text before their tokens,
GLM-4V after them; Qwen2.5-VL and Qwen3-Omni count positions along time in proportion to seconds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from .args_values import as_list
from .errors import expect
from .files import describe_error, json_if_there
from .inputs import Media
from .part_pictures_data import (
    COLUMNS_OF,
    Picture,
    PictureFile,
    Placed,
    Vision,
    as_rgb,
    opened,
    read_picture,
    upright_size,
)

if TYPE_CHECKING:
    import torch

# families whose videos are read; True: the times of frames are text
_WRITES_TIMES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_omni_moe_thinker"), False),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v"), True),
}
# no playlists, and nothing over the network
_OPTIONS = {
    "protocol_whitelist": "file",
    "format_whitelist": "asf,avi,flv,gif,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mpeg,mpegts,ogg",
}
_GLM_AROUND = ("video_start_token_id", "video_end_token_id")
_SETTINGS = ("processor_config.json", "video_preprocessor_config.json")
# settings that both processors of a model must share
_SHARED = "patch_size merge_size temporal_patch_size image_mean image_std resample".split()


class OfColumn(NamedTuple):
    """A value from a record's column of videos, wrapped so that it can be told from an image."""

    value: Any


@dataclass(frozen=True)
class Video:
    """A video of a record: its frames that are trained on.

    frames: if `indices` is empty, these frames, a picture each; otherwise a single item, the video
    file. indices: which frames of that file are taken. seconds: the time at which each taken frame
    is shown. fps: frames taken per second. size: (height, width)."""

    kind: ClassVar[str] = "video"
    frames: tuple[Picture, ...] = field(repr=False)
    indices: tuple[int, ...] = field(repr=False)
    seconds: tuple[float, ...] = field(repr=False)
    fps: float
    size: tuple[int, int]

    def __str__(self) -> str:
        return f"video {self.frames[0]}, {len(self.seconds)} frames"

    @property
    def num_bytes(self) -> int:
        """Size of the video's files, or of its encoded pictures, in bytes."""
        return sum(frame.num_bytes for frame in self.frames)

    @property
    def modified(self) -> int:
        """Time of the last change to the video's files, in nanoseconds since 1970; 0 without
        files."""
        return max(frame.modified for frame in self.frames)

    @property
    def num_times(self) -> int:
        """The length of the video's patch grid along time: two frames make one step, the last of an
        odd number makes one alone."""
        return (len(self.seconds) + 1) // 2

    def read(self, where: str) -> Iterator[np.ndarray]:
        """Yield the frames that are trained on, decoded, each uint8 [height, width, 3]. If a video
        file has fewer frames than its header says, the last one is repeated. ValueError for a
        broken file; `where` names the record in its message."""
        if not self.indices:
            for picture in self.frames:
                with opened(picture, where) as image:
                    yield np.array(as_rgb(image))
            return
        with _opened_video(self.frames[0].path, where) as (container, stream):
            stream.thread_type = "AUTO"
            frames = container.decode(stream)
            last: Any = None
            wanted = set(self.indices)
            for index in range(self.indices[-1] + 1):
                if frame := next(frames, None):
                    last = frame
                expect(last, "no frame can be decoded")
                if index in wanted:
                    yield last.to_ndarray(format="rgb24")


@contextlib.contextmanager
def _opened_video(path: str, where: str) -> Iterator[tuple[Any, Any]]:
    """Context manager that opens a video file -> (PyAV's container, its first video stream). Any
    error inside becomes a ValueError, as does a missing PyAV. where: names the video's record in
    the message."""
    expect(
        importlib.util.find_spec("av"),
        f"{where}: video files take PyAV: pip install 'mca-lite[video]'; videos that are lists or "
        "folders of pictures do not",
    )
    import av  # an extra, for video files alone

    try:
        with av.open(path, options=_OPTIONS) as container:
            yield container, container.streams.video[0]
    except Exception as error:  # PyAV raises many types for broken files
        raise ValueError(f"{where}: video {path} cannot be read: {describe_error(error)}") from None


def sampled(total: int, seconds: float, fps: float, most: int) -> list[int]:
    """The indices of frames to take from a video of `total` frames that lasts `seconds`, evenly
    from the first to the last: `fps` frames per second, but at least one, and at most `most` or
    `total`. As in LLaMA-Factory."""
    count = min(total, most, max(1, math.floor(seconds * fps)))
    return [int(number) for number in np.linspace(0, total - 1, count)]


def video_of_file(file: Picture, fps: float, most: int, where: str) -> Video:
    """Make the Video for a file: choose its frames by sampled(), without decoding any. If the
    file's header lacks the number of frames, they are counted. fps: frames to take per second.
    most: the most frames to take. ValueError if the file cannot be read; `where` names its record
    in the message."""
    with _opened_video(file.path, where) as (container, stream):
        # some formats do not say how many frames they have, or how long they take
        total = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        expect(total, "it has no frames")
        rate = float(stream.average_rate or fps)
        duration = float((stream.duration or 0) * stream.time_base) or total / rate
        indices = sampled(total, duration, fps, most)
        seconds = tuple(index / rate for index in indices)
        size = stream.height, stream.width
        return Video((file,), tuple(indices), seconds, len(indices) / duration, size)


def _numbers_as_numbers(file: Path) -> list[Any]:
    """Sort key for a file's name in which numbers count by their value: 9.png is before 10.png."""
    pieces = re.split(r"(\d+)", file.name)
    return [int(piece) if piece.isdecimal() else piece for piece in pieces]


# -- the videos of a model


@dataclass(kw_only=True)
class VideoVision(Vision):
    """Reads the images and videos of records for one model, and says which tokens stand for them.

    around: the text that stands for a video in a conversation, with "{}" at its placeholder.
    video_token: that placeholder. start_id, end_id: the tokens before and after it. writes_times:
    True if the text has the times of frames beside their placeholders; the pattern `timed` then
    matches all times and placeholders of a video. per_second: position numbers along time per
    second; None: one for each two frames, unless their times are text. keys: the values of
    video_fps, video_maxlen, video_min_pixels and video_max_pixels."""

    around: str
    video_token: str
    start_id: int
    end_id: int
    writes_times: bool
    timed: re.Pattern[str]
    per_second: float | None
    keys: tuple[float, int, int, int]
    marks: ClassVar[dict[str, str]] = {**Vision.marks, "<video>": "video"}
    unread = ("audios", "audio")
    unread_marks = re.compile(r"<audio>|<\|audio_pad\|>")

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any], tokenizer: Any, keys: Any) -> Media:
        """Make the VideoVision of a model. If this module does not know how the model or its
        tokenizer writes videos, return what Vision.of returns, which reads no videos. folder: the
        model's folder. config: the contents of its config.json. keys: the run's arguments, with
        video_fps and the other video keys."""
        vision = Vision.of(folder, config, tokenizer, keys)
        kind, video_id = config.get("model_type"), config.get("video_token_id")
        if not isinstance(vision, Vision) or kind not in _WRITES_TIMES or video_id is None:
            return vision
        token = tokenizer.decode([video_id])
        around = vision.block.replace(next(iter(vision.tokens)), "{}")
        token_ids = *vision.token_ids, video_id
        is_glm = kind == "glm4v"
        if is_glm:
            cls = GlmVideoVision
            token_ids = vision.token_ids
            around = "{}".join(tokenizer.decode([config[key]]) for key in _GLM_AROUND)
        block = around.format(token)
        ids = tokenizer(block, add_special_tokens=False)["input_ids"]
        if ids[1:2] != [video_id] or token in vision.block or len(ids) != 3:
            return vision
        timed = f"(?:<[0-9.]+ seconds>{re.escape(block)})+"
        if is_glm:
            timed = f"(?:{re.escape(vision.block)}[0-9]+)+"
        per_second = config["vision_config"].get("tokens_per_second")
        texts = map(re.escape, (vision.block, block, around))
        blocks = "|".join(texts).replace(re.escape("{}"), timed)
        values = {
            **vars(vision),
            "tokens": {**vision.tokens, token: "video"},
            "token_ids": token_ids,
            "blocks": re.compile(f"({blocks})"),
        }
        return cls(
            **values,
            around=around,
            video_token=token,
            start_id=ids[0],
            end_id=ids[2],
            writes_times=_WRITES_TIMES[kind],
            timed=re.compile(timed),
            per_second=config.get("position_id_per_seconds", per_second),
            keys=(keys.video_fps, keys.video_maxlen, keys.video_min_pixels, keys.video_max_pixels),
        )

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "video": [self.keys, self.writes_times]}

    # -- in a record

    def of_columns(self, record: dict[str, Any], columns: dict[str, Any]) -> list[Any]:
        videos = record.get(columns.get("videos", "videos")) or []
        if not videos and record.get("video"):
            videos = [record["video"]]
        return [*super().of_columns(record, columns), *map(OfColumn, as_list(videos))]

    def by_kind(self, of_columns: list[Any]) -> dict[str, list[Any]]:
        videos = [one.value for one in of_columns if isinstance(one, OfColumn)]
        return {**super().by_kind(of_columns[: len(of_columns) - len(videos)]), "video": videos}

    def read_input(self, kind: str, value: Any, *place: Any) -> Any:
        if kind == "image":
            return super().read_input(kind, value, *place)
        folder, where, _ = place
        fps, most, *_ = self.keys
        if isinstance(value, str) and os.path.isdir(folder / value):
            files = sorted((folder / value).iterdir(), key=_numbers_as_numbers)
            value = [str(file.absolute()) for file in files]
        if not isinstance(value, list):
            file = read_picture(value, *place)
            expect(file.path, f"{where}: a video: expected a path, or a list of pictures")
            return video_of_file(file, fps, most, where)
        frames = tuple(read_picture(each, *place) for each in value)
        sizes = set()
        for frame in frames:
            with opened(frame, where) as image:
                sizes.add(upright_size(image))
        expect(
            len(sizes) == 1,
            f"{where}: a video has {len(frames)} frames, of sizes {sizes or 'unknown'} (height, "
            "width): expected frames of one size",
        )
        return Video(frames, (), tuple(n / fps for n in range(len(frames))), fps, sizes.pop())

    def text_of(self, item: Any) -> str:
        if item.kind == "image":
            return self.block
        text = self.video_token
        if self.writes_times:
            times = (*item.seconds, item.seconds[-1])
            pairs = zip(times[:-1:2], times[1::2], strict=True)
            text = "".join(self.timed_text(a, b) for a, b in pairs)
        return self.around.format(text)

    def enlarges(self) -> bool:
        """True if frames lower or narrower than the pixels of one token are enlarged before their
        size is rounded."""
        return self.writes_times

    def timed_text(self, first: float, second: float) -> str:
        """The text that stands for two frames of a video, with their time. first, second: when they
        are shown, in seconds."""
        return f"<{(first + second) / 2:.1f} seconds>{self.around.format(self.video_token)}"

    def shortened(self, content: str) -> str:
        return self.timed.sub(self.video_token, content)

    # -- among the tokens

    def place(self, picture: Any, where: str) -> Placed:
        if picture.kind == "image":
            return super().place(picture, where)
        height, width = picture.size
        factor = self.patch_size * self.merge_size
        scale = max(1, factor / height, factor / width) if self.enlarges() else 1
        try:
            _, *sides = self.grid(int(height * scale), int(width * scale), *self.keys[2:])
        except ValueError as error:
            raise ValueError(f"{where}: {picture}: {error}") from None
        grid = picture.num_times, *sides
        return Placed(picture, grid, picture.num_bytes, picture.modified, where)

    @functools.cached_property
    def frame_processor(self) -> Any:
        """transformers' image processor of the model, also used for frames of videos. ValueError if
        the model's files give videos a setting in _SHARED, such as patch_size, that the image
        processor's files lack or give another value."""
        own = self._settings()
        for name in _SETTINGS:
            path = self.folder / name
            values = json_if_there(path)
            values = values.get("video_processor", values)
            differ = [key for key in _SHARED if values.get(key, own.get(key)) != own.get(key)]
            expect(
                not differ,
                f"{path}: {', '.join(differ)} differ from those of pictures: videos here have the "
                "same",
            )
        return self.processor

    def pixels(self, placed: Placed) -> torch.Tensor:
        video = placed.picture
        if video.kind == "image":
            return super().pixels(placed)
        import torch
        import torch.nn.functional as F

        expect(
            (video.num_bytes, video.modified) == (placed.num_bytes, placed.modified),
            f"{placed.where}: {video}: a file has changed since it was tokenised: set "
            "overwrite_cache: true",
        )
        _, rows, columns = placed.grid
        size = rows * self.patch_size, columns * self.patch_size
        frames = []
        for frame in video.read(placed.where):
            image = torch.from_numpy(frame).permute(2, 0, 1)[None].contiguous()
            image = F.interpolate(image, size, mode="bicubic", antialias=True)[0].numpy()
            pixels = self.frame_processor(images=image, do_resize=False, return_tensors="pt")
            # the processor repeats a single picture along time: keep one of the two
            frames.append(pixels["pixel_values"].view(rows * columns, 3, 2, -1)[:, :, 0])
        frames += frames[-1:] * (len(frames) % 2)
        pairs = torch.stack(frames).unflatten(0, (-1, 2))  # [times, 2, patches, 3, values]
        return pairs.permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(1)

    def runs(self, placed: Placed) -> list[tuple[int, int, int]]:
        times, rows, columns = placed.grid
        return [(1, rows, columns)] * times if self.writes_times else [placed.grid]

    def steps(self, inputs: Sequence[Placed]) -> list[float] | None:
        if self.per_second is None:
            return None
        return [self.per_second * 2 / getattr(placed.picture, "fps", 1) for placed in inputs]

    def unit(self, tokens: np.ndarray, placed: Placed, first: int, last: int) -> tuple[int, int]:
        start, stop = super().unit(tokens, placed, first, last)
        if self.writes_times and placed.picture.kind == "video":
            # all times and frames stand between two tokens of their own
            start = int(np.flatnonzero(tokens[:start] == self.start_id)[-1])
            return start, last + 3 + int(np.flatnonzero(tokens[last + 2 :] == self.end_id)[0])
        return start, stop

    def columns(self, ids: np.ndarray, inputs: Sequence[Placed]) -> dict[str, torch.Tensor]:
        import torch

        columns = super().columns(ids, inputs)
        fps = [placed.picture.fps for placed in inputs if placed.picture.kind == "video"]
        if fps and self.per_second is not None:
            columns["second_per_grid_ts"] = 2 / torch.tensor(fps)
        return columns

    def image_of(self, placed: Placed) -> Any:
        if placed.picture.kind == "image":
            return super().image_of(placed)
        from PIL import Image

        return Image.fromarray(next(placed.picture.read(placed.where)))

    def store(self, folder: Path) -> VideoStore:
        return VideoStore(folder)


class GlmVideoVision(VideoVision):
    """Reads the images and videos of records for GLM-4V. This model takes each two frames of a
    video as an image, followed by their time in whole seconds."""

    columns_of: ClassVar[dict[str, tuple[str, str]]] = dict.fromkeys(
        COLUMNS_OF, COLUMNS_OF["image"]
    )

    def enlarges(self) -> bool:
        return False  # its function that rounds does so

    def timed_text(self, first: float, second: float) -> str:
        return f"{self.block}{int(first)}"

    def grids_of(self, placed: Placed) -> list[tuple[int, int, int]]:
        return self.runs(placed)

    def kinds_of(self, ids: np.ndarray) -> list[str]:
        is_video = (ids == self.start_id).cumsum() > (ids == self.end_id).cumsum()
        return ["video" if x else "image" for x in is_video[np.isin(ids, self.token_ids)]]


class VideoStore(PictureFile):
    """The images and videos of a token-cache shard: a PictureFile whose records can also be videos,
    with their frames."""

    def write(self, picture: Any, data: Any) -> Any:
        if picture.kind == "image":
            return super().write(picture, data)
        return {**vars(picture), "frames": [self.write(frame, data) for frame in picture.frames]}

    def load(self, record: Any) -> Any:
        if isinstance(record, list):
            return super().load(record)
        values = {key: tuple(value) for key, value in record.items() if key != "fps"}
        return Video(
            **{**values, "fps": record["fps"], "frames": tuple(map(self.load, values["frames"]))}
        )
