"""Images in conversations: their files or bytes, their positions among the tokens, their pixels.

Tokenising reads only an image's header, for its size; pixels are computed when a sample is read. An
image's grid is its number of patches along time (1), height and width. It takes prod(grid) /
merge_size ** 2 placeholder tokens (image_token_id), one per feature of the vision tower. Pillow is
an optional dependency, imported only for images.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError

from .errors import Judge, expect
from .files import describe_error, lies_in, read_json, snapshot_of
from .inputs import MARK, Media
from .tables import is_of_inputs

if TYPE_CHECKING:
    import torch

# keys of config.json: token before an image, placeholder for its features, token after it
TOKEN_KEYS = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
_GLM_TOKEN_KEYS = ("image_start_token_id", "image_token_id", "image_end_token_id")
_MARK = "<image>"  # LLaMA-Factory's mark for an image in a text
_MOST_PIXELS = 89_478_485  # Pillow's limit for untrusted files, MAX_IMAGE_PIXELS
# formats that Pillow reads without running another program
_FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_ORIENTATION = 0x0112  # the EXIF tag
_ON_ITS_SIDE = (5, 6, 7, 8)  # orientations that swap width and height
_THUMBNAIL = (240, 240)
_PROCESSOR_NAMES = ("processor_config.json", "preprocessor_config.json")
# image processors; Qwen3-VL has the first with other sizes
_PROCESSORS = ("Qwen2VLImageProcessor", "Glm4vImageProcessor")
# keys under which a message block may contain its image
_SOURCES = ("image", "image_url", "path", "url", "base64", "value")
_TEMPORAL = 1  # an image's patches along time
ROPE_COLUMNS = ("rope_t", "rope_h", "rope_w")


# -- where a picture is


@dataclass(frozen=True)
class Picture:
    """An encoded image: a file's path, or else its bytes in `data`."""

    path: str
    data: bytes | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.path or "a picture within the record"

    @property
    def num_bytes(self) -> int:
        """Size of the encoded image in bytes."""
        return os.path.getsize(self.path) if self.data is None else len(self.data)

    @property
    def modified(self) -> int:
        """Time of the last change to the file, in nanoseconds since 1970; 0 without a file."""
        return os.stat(self.path).st_mtime_ns if self.data is None else 0


class Placed(NamedTuple):
    """An image of a document, with its grid. where: "file:line" of its record. num_bytes, modified:
    the file's state when it was tokenised.
    """

    picture: Picture
    grid: tuple[int, int, int]
    num_bytes: int
    modified: int
    where: str


def read_picture(value: Any, folder: Path, where: str, home: str | Path | None = None) -> Picture:
    """The Picture for a value in a record: a path (relative to `folder`), bytes, a data: URL, or a
    dict with one of them.

    home: only files in this folder are allowed, after following links; None: any file. ValueError,
    naming `where`, for anything else. Nothing is downloaded.
    """
    match value:
        case bytes():
            return Picture("", value)
        case {"bytes": bytes(data)}:
            return Picture("", data)
        case {"base64": str(text)}:
            return Picture("", _decoded(text, where))
        case {"path": str(text)} | {"url": str(text)} | str(text):
            pass
        case _:
            raise ValueError(
                f"{where}: a picture: expected a path, bytes or a data: URL, got {value!r:.80}"
            )
    if text.startswith("data:"):
        kind, _, encoded = text.partition(",")
        expect(kind.endswith(";base64"), f"{where}: a data: URL: expected base64, got {kind!r:.60}")
        return Picture("", _decoded(encoded, where))
    expect(
        "://" not in text or text.startswith("file://"),
        f"{where}: picture {text!r:.80}: nothing is fetched over the network: download it, and "
        "write its path",
    )
    path = folder / text.removeprefix("file://")
    expect(
        os.path.isfile(path),  # False for invalid names too
        f"{where}: there is no picture {str(path)!r:.300}: paths are relative to media_dir, or "
        "without that key to the folder of the dataset's file",
    )
    expect(
        home is None or lies_in(path, Path(home)),
        f"{where}: picture {str(path)!r:.300} lies outside of {home}: with media_dir, or data of "
        "the hub, only files of that folder are read",
    )
    return Picture(str(path.absolute()))


def _decoded(text: str, where: str) -> bytes:
    """Decode base64 text. ValueError, naming `where`, if it is invalid."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where}: a picture in base64 cannot be decoded: {error}") from None


def picture_of_block(block: dict[str, Any]) -> Any:
    """The image inside a message block; None if the block refers to the images column."""
    found: Any = next((block[key] for key in _SOURCES if block.get(key) is not None), None)
    if isinstance(found, str) and found == block.get("base64"):
        return {"base64": found}
    return found


# -- with Pillow


@contextlib.contextmanager
def _opened(picture: Picture, where: str) -> Iterator[Any]:
    """Context with Pillow's image object, header read, pixels not decoded. Any error of Pillow
    inside the context becomes a ValueError that names `where`.
    """
    expect(
        importlib.util.find_spec("PIL"),
        f"{where}: pictures take Pillow: pip install 'mca-lite[images]'",
    )
    from PIL import Image  # an extra, for pictures alone

    file = picture.path if picture.data is None else io.BytesIO(picture.data)
    try:
        with Image.open(file, formats=_FORMATS) as image:
            yield image
    except _Unusable as error:
        raise ValueError(f"{where}: {picture}: {error}") from None
    except Image.DecompressionBombError:
        reason = f"expected at most {_MOST_PIXELS:,} pixels: make it smaller"
        raise ValueError(f"{where}: {picture}: {reason}") from None
    except Exception as error:  # Pillow raises many types for broken files
        raise ValueError(
            f"{where}: {picture} cannot be read as one of {', '.join(_FORMATS)}: "
            f"{describe_error(error)}"
        ) from None


class _Unusable(Exception):
    """Raised inside _opened for an image that cannot be trained on."""


def _upright_size(image: Any) -> tuple[int, int]:
    """(height, width) of the image as displayed, from its header. Raises _Unusable."""
    from PIL import Image

    width, height = image.size
    if width * height > _MOST_PIXELS:
        raise _Unusable(
            f"{width} x {height} pixels: expected at most {_MOST_PIXELS:,}: make it smaller"
        )
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        raise _Unusable(
            f"{image.mode} has more than 8 bits a channel, and would become white: convert it"
        )
    # the frames of an MPO file are one image in several sizes
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise _Unusable(f"{image.n_frames} frames, and a picture has one: save that one alone")
    if image.format == "TIFF":  # Pillow already gives the upright size
        return height, width
    # PngImageFile.getexif would decode the image
    if Image.Image.getexif(image).get(_ORIENTATION) in _ON_ITS_SIDE:
        return width, height
    return height, width


def _as_rgb(image: Any, *resize: Any) -> Any:
    """The image upright and in RGB, transparency rendered on white. resize: arguments for Pillow's
    resize, the new size first.

    White is what people see, and what vLLM and qwen_vl_utils use. transformers' processors drop
    transparency and show the colour under it, mostly black.
    """
    from PIL import Image, ImageOps

    # an image takes up to 360 MB: avoid copies where nothing changes
    ImageOps.exif_transpose(image, in_place=True)
    if image.has_transparency_data:
        picture = image.convert("RGBA")
        image = Image.new("RGBA", image.size, "white")
        image.alpha_composite(picture)
    if image.mode not in ("RGB", "L"):
        image = image.convert("RGB")
    if resize:
        image = image.resize(*resize)
    return image.convert("RGB")


def thumbnail(placed: Placed) -> str:
    """A small version of the image, as a data: URL."""
    with _opened(placed.picture, placed.where) as image:
        small = _as_rgb(image)
        small.thumbnail(_THUMBNAIL)
        png = io.BytesIO()
        small.save(png, "PNG")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


# -- the pictures of a model


@dataclass(kw_only=True)
class Vision(Media):
    """Sizes, tokens and pixels of images for one model. Picklable. Methods are described in Media.

    folder: the model's, with its image processor's settings.
    block: the text that stands for an image in a conversation; contains image_token once.
    limits: of pixels, by the image processor's names, if the keys set them.
    """

    folder: Path
    token_id: int
    merge_size: int
    patch_size: int
    image_token: str
    block: str
    limits: dict[str, int]
    media_dir: str | None = None
    is_read: bool = True
    kinds = (bytes, dict, str)  # a str in the images column is a path

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any], tokenizer: Any, keys: Any) -> Media:
        """Read it from a config.json's contents; Media() if the model has no images, or another
        kind of them. ValueError if the tokenizer lacks the image tokens.
        """
        tower = config.get("vision_config") or {}
        sizes: list[Any] = [tower.get(key) for key in ("spatial_merge_size", "patch_size")]
        token_keys = _GLM_TOKEN_KEYS if _GLM_TOKEN_KEYS[0] in config else TOKEN_KEYS
        ids: list[Any] = [config.get(key) for key in token_keys]
        if None in (*sizes, *ids):
            return Media()
        tokens = [tokenizer.decode([number]) for number in ids]
        expect(
            tokenizer("".join(tokens), add_special_tokens=False)["input_ids"] == ids,
            f"{folder}: the tokens of {', '.join(token_keys)} are {tokens}, which the tokenizer "
            "reads otherwise: it is another model's",
        )
        limits = {"shortest_edge": keys.image_min_pixels, "longest_edge": keys.image_max_pixels}
        return cls(
            folder=folder,
            token_id=ids[1],
            merge_size=sizes[0],
            patch_size=sizes[1],
            image_token=tokens[1],
            block="".join(tokens),
            limits={key: value for key, value in limits.items() if value is not None},
            media_dir=keys.media_dir,
        )

    @property
    def options(self) -> dict[str, Any]:
        identity = {
            "block": [self.block, self.token_id, self.merge_size],
            "limits": self.limits,
            "processor": self._settings(),
        }
        return {"vision": identity}

    def folders(self, files: Iterable[str]) -> dict[str, Any]:
        return {"folders": [self.media_dir, *(Path(file).absolute() for file in files)]}

    def check_keys(self, judge: Judge) -> None:
        judge.expect(
            not judge.arguments.streaming,
            "streaming",
            "the samples of a model with pictures are tokenised beforehand",
            "streaming: false",
        )

    def check_mark(self, mark: str, where: str) -> None:
        raise ValueError(
            f"{where}: the text has {mark}, a mark of video or audio, and models here "
            "read text and pictures: leave the record out, or write another text"
        )

    def _settings(self) -> dict[str, Any]:
        """The image processor's settings; {} if the folder has none."""
        settings: dict[str, Any] = {}
        for name in _PROCESSOR_NAMES:
            if (self.folder / name).is_file():
                values = read_json(self.folder / name)
                settings |= values.get("image_processor", values)
        return settings

    @functools.cached_property
    def processor(self) -> Any:
        """transformers' image processor on Pillow, without torchvision.

        ValueError if the folder has no settings for it, or they contradict config.json.
        """
        import transformers  # imported late: its image processors need Pillow

        settings = self._settings()
        expect(
            settings,
            f"{self.folder}: expected {' or '.join(_PROCESSOR_NAMES)} for the pictures of the "
            "data: copy it from the model",
        )
        # AutoImageProcessor would need torchvision in some versions (5.17)
        name = settings.get("image_processor_type", _PROCESSORS[0]).removesuffix("Fast")
        expect(
            name in _PROCESSORS,
            f"{self.folder}: image_processor_type {name}: expected {' or '.join(_PROCESSORS)}",
        )
        kind = getattr(transformers, f"{name}Pil")
        processor = kind.from_pretrained(self.folder, local_files_only=True)
        for edge, limit in self.limits.items():
            setattr(processor.size, edge, limit * _frames_of(processor))
        given = [processor.do_resize, processor.merge_size, processor.patch_size]
        expect(
            given == [True, self.merge_size, self.patch_size],
            f"{self.folder}: {name} has do_resize, merge_size and patch_size {given}: expected "
            f"true, and {self.merge_size} and {self.patch_size} as in config.json",
        )
        low = processor.size["shortest_edge"]
        high = processor.size["longest_edge"]
        expect(low <= high, f"image_min_pixels {low} is above image_max_pixels {high}")
        return processor

    def _grid(self, height: int, width: int) -> tuple[int, int, int]:
        """The grid of an image of this size. ValueError if it is too narrow."""
        processor = self.processor
        resize = sys.modules[type(processor).__module__].smart_resize  # the processor's version
        frames = _frames_of(processor)
        sizes = resize(
            height=height,
            width=width,
            factor=self.patch_size * self.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
            **({"num_frames": frames, "temporal_factor": frames} if frames > 1 else {}),
        )
        rows, columns = (size // self.patch_size for size in sizes)
        return _TEMPORAL, rows, columns

    def place(self, picture: Picture, where: str) -> Placed:
        """The picture with its patch grid, whose size comes from the image header: no pixel is
        decoded. where: "file:line" of its record. ValueError, with `where`, for an unusable image.
        """
        with _opened(picture, where) as image:
            height, width = _upright_size(image)
        try:
            grid = self._grid(height, width)
        except ValueError as error:
            raise ValueError(f"{where}: {picture}: {width} x {height}: {error}") from None
        return Placed(picture, grid, picture.num_bytes, picture.modified, where)

    def pixels(self, placed: Placed) -> torch.Tensor:
        """Pixel values, float32 [patches, values per patch]. ValueError if the file changed since
        tokenising, or is broken.
        """
        picture = placed.picture
        processor = self.processor
        with _opened(picture, placed.where) as image:
            if (picture.num_bytes, picture.modified) != (placed.num_bytes, placed.modified):
                raise _Unusable(
                    f"its file has changed since it was tokenised ({picture.num_bytes:,} bytes, "
                    f"and {placed.num_bytes:,} then): set overwrite_cache: true"
                )
            grid = self._grid(*_upright_size(image))
            if grid != placed.grid:
                raise _Unusable(
                    f"a grid of {grid} patches, and {placed.grid} when it was tokenised: set "
                    "overwrite_cache: true"
                )
            _, rows, columns = grid
            size = columns * self.patch_size, rows * self.patch_size
            image = _as_rgb(image, size, processor.resample)
        # already resized, with the processor's method: it would first convert the full-size image
        return processor(images=image, do_resize=False, return_tensors="pt")["pixel_values"]

    def read(self, path: str, where: str) -> Picture:
        picture = read_picture(path, Path.cwd(), where)
        self.place(picture, where)  # checks the header
        return picture

    # -- in a record

    def take(
        self, messages: list[dict[str, Any]], of_columns: list[Any], may_lead: bool, where: str
    ) -> tuple[Picture, ...]:
        of_blocks = [message.pop("media", None) for message in messages]
        for message, blocks in zip(messages, of_blocks, strict=True):
            is_free = blocks is not None or MARK not in message["content"]
            expect(
                is_free and self.image_token not in message["content"],
                f"{where}: a text has {self.image_token}, the token of a picture, or U+FDD0, "
                f"without one: write {_MARK} for a picture of the column images, or another text",
            )
        is_marked = any(of_blocks) or any(_MARK in message["content"] for message in messages)
        leads = may_lead and not is_marked
        values: list[Any] = []
        for message, blocks in zip(messages, of_blocks, strict=True):
            if leads and message["role"] == "user":
                message["content"] = MARK * len(of_columns) + message["content"]
                leads = False
            if blocks is None:
                message["content"] = message["content"].replace(_MARK, MARK)
                blocks = [{}] * message["content"].count(MARK)
            message["content"] = message["content"].replace(MARK, self.block)
            values += map(picture_of_block, blocks)
        count = values.count(None)
        expect(
            count == len(of_columns),
            f"{where}: {count} {_MARK} marks, or blocks without a picture, and {len(of_columns)} "
            "pictures in the column images: expected as many",
        )
        rest = iter(of_columns)
        file = Path(where.rpartition(":")[0])
        folder = Path(self.media_dir or file.parent)
        home = self.media_dir or snapshot_of(file)
        values = [next(rest) if value is None else value for value in values]
        return tuple(read_picture(value, folder, where, home) for value in values)

    # -- in a chat template

    def check_template(
        self, template: str, render: Callable[..., str], messages: list[dict[str, Any]]
    ) -> None:
        if "image" not in template:  # a template for text copies `block` unchanged
            return
        blocks = [
            message | {"content": self._as_blocks(message["content"])} for message in messages
        ]
        try:
            text = render(blocks)
        except TemplateError:  # the template only supports text
            return
        expect(
            text == render(messages),
            f"the chat template does not write a picture as {self.block}, or changes the rest of "
            "its message: set chat_template to one that does neither, and leave out "
            "chat_template_kwargs of pictures",
        )

    def _as_blocks(self, content: str) -> str | list[dict[str, str]]:
        """The content as a list of text and image blocks, if it contains images; otherwise
        unchanged.
        """
        first, *texts = content.split(self.block)
        if not texts:
            return content
        blocks = [{"type": "text", "text": first}]
        for text in texts:
            blocks += [{"type": "image"}, {"type": "text", "text": text}]
        return [block for block in blocks if block != {"type": "text", "text": ""}]

    def check_rendered(self, text: str, messages: list[dict[str, Any]]) -> None:
        count = sum(message["content"].count(self.block) for message in messages)
        expect(  # otherwise later images would get the wrong pixels
            text.count(self.block) == count,
            f"the chat template leaves out some of {count} pictures, as it does with the "
            "thinking of earlier answers: move them out of it",
        )

    # -- among the tokens

    def placed(self, text: str, inputs: Sequence[Picture], where: str) -> tuple[Placed, ...]:
        count = text.count(self.image_token)
        expect(
            count <= len(inputs),
            f"{where}: the text has {count} tokens {self.image_token}, and the record "
            f"{len(inputs)} pictures: expected this token for pictures alone",
        )
        return tuple(self.place(picture, where) for picture in inputs[:count])

    def count(self, pictures: Sequence[Placed]) -> np.ndarray:
        """Number of placeholder tokens of each image, int64 [images]."""
        grids = np.array([placed.grid for placed in pictures], dtype=np.int64).reshape(-1, 3)
        return grids.prod(axis=1) // self.merge_size**2

    def expand(self, document: np.ndarray, inputs: Sequence[Placed]) -> np.ndarray:
        """The document (data_encode.Document) with one placeholder per feature, instead of one per
        image. Placeholders are never trained on.

        ValueError if the number of placeholders is not the number of images.
        """
        is_image = np.maximum(document, ~document) == self.token_id
        expect(
            is_image.sum() == len(inputs),
            f"the text has {is_image.sum()} tokens {self.image_token}, and the record "
            f"{len(inputs)} pictures: expected the token for pictures alone",
        )
        repeats = np.ones(len(document), dtype=np.int64)
        repeats[is_image] = self.count(inputs)
        document = np.where(is_image, ~np.int32(self.token_id), document)
        return document.repeat(repeats)

    def prompt(
        self, ids: list[int], inputs: Sequence[Picture], where: str
    ) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Prompt tokens with one placeholder per image -> (tokens with all placeholders,
        {pixel_values, image_grid_thw}).

        ValueError if the number of placeholders is not the number of images, or an image is
        unusable.
        """
        placed = [self.place(picture, where) for picture in inputs]
        document = self.expand(np.array(ids, dtype=np.int32), placed)
        tokens = np.maximum(document, ~document).astype(np.int64)
        columns = self.columns(tokens, placed)
        return tokens.tolist(), {name: x for name, x in columns.items() if is_of_inputs(name)}

    def fit(
        self, document: np.ndarray, inputs: Sequence[Placed], start: int, stop: int
    ) -> tuple[slice, list[Placed]]:
        """(slice, its images) for the document's tokens from `start` to `stop`, shortened so that
        no image is cut.
        """
        places = np.flatnonzero(np.maximum(document, ~document) == self.token_id)
        ends = self.count(inputs).cumsum()
        starts = np.append(0, ends[:-1])
        # each image includes the token before and the token after it
        units = [(places[a] - 1, places[b - 1] + 2) for a, b in zip(starts, ends, strict=True)]
        start = next((last for first, last in units if first < start < last), start)
        stop = next((first for first, last in units if first < stop < last), stop)
        kept = zip(inputs, units, strict=True)
        return slice(start, stop), [
            placed for placed, (first, last) in kept if start <= first and last <= stop
        ]

    def columns(self, ids: np.ndarray, inputs: Sequence[Placed]) -> dict[str, torch.Tensor]:
        """Model columns of a document with tokens ids [n]: rope_t, rope_h and rope_w; with images
        also image_grid_thw, and pixel_values unless is_read is False.
        """
        import torch  # imported late: reading records needs no torch

        grids = torch.tensor([placed.grid for placed in inputs], dtype=torch.int64).view(-1, 3)
        positions = rope_positions(torch.as_tensor(ids), grids, self.token_id, self.merge_size)
        columns = dict(zip(ROPE_COLUMNS, positions, strict=True))
        if inputs:
            columns["image_grid_thw"] = grids
        if inputs and self.is_read:
            columns["pixel_values"] = torch.cat([self.pixels(placed) for placed in inputs])
        return columns

    def lost(self, units: str, cutoff_len: int) -> str:
        what = f"{units} lost pictures, or all of them, to cutoff_len {cutoff_len}: "
        return f"{what}pictures take less with a lower image_max_pixels"

    def shown(self, inputs: Sequence[Placed]) -> list[tuple[str, str]]:
        counts = self.count(inputs).tolist()
        return [
            (thumbnail(placed), f"{placed.picture}: {count:,} tokens, {placed.grid} patches")
            for placed, count in zip(inputs, counts, strict=True)
        ]

    def store(self, folder: Path) -> PictureFile:
        return PictureFile(folder)


def _frames_of(processor: Any) -> int:
    """The frames of a picture whose pixels a processor's limits count."""
    is_glm = type(processor).__name__.startswith("Glm4v")
    return int(processor.temporal_patch_size) if is_glm else 1


# -- in batches


def with_image_slots(batch: dict[str, Any], image_token_id: int) -> dict[str, Any]:
    """The batch with "image_slot" [b, s] added: the index of each token's image feature in the
    micro-batch, -1 for text and padding.
    """
    is_image = (batch["input_ids"] == image_token_id) & ~batch["padding_mask"]
    numbers = is_image.flatten().cumsum(0).view(is_image.shape) - 1
    return {**batch, "image_slot": numbers.masked_fill(~is_image, -1)}


def has_pictures(batch: dict[str, Any]) -> bool:
    """True if the batch has images, and is no filler batch of padding."""
    return "image_grid_thw" in batch and not bool(batch["padding_mask"].all())


def merged_grids(grids: torch.Tensor, merge_size: int) -> torch.Tensor:
    """Number of features along time, height and width, [images, 3], from numbers of patches
    `grids`: merge_size x merge_size patches form one feature.
    """
    return grids // grids.new_tensor([1, merge_size, merge_size])


def rope_positions(
    ids: torch.Tensor, grids: torch.Tensor, image_token_id: int, merge_size: int
) -> torch.Tensor:
    """Rotary positions int64 [3, n], along time, height and width, for a document's token ids [n].

    For text all three count upwards. An image's features count along each axis from the position
    after the preceding token; text after an image continues after its longer side. grids: see
    merged_grids. ValueError if the number of image tokens is not the number of features. Source:
    Qwen2-VL.
    """
    import torch

    grids = merged_grids(grids.view(-1, 3), merge_size)
    counts = grids.prod(1)
    [places] = torch.nonzero(ids == image_token_id, as_tuple=True)
    total = int(counts.sum())
    expect(
        len(places) == total,
        f"a document has {len(places)} image tokens, and its {len(grids)} pictures {total} "
        "features: expected an image token for each feature",
    )
    firsts = counts.cumsum(0) - counts  # index of each image's first feature
    steps = torch.ones_like(ids)
    steps[places] = 0
    steps[places[firsts]] = grids[:, 1:].amax(1)
    starts = steps.cumsum(0) - steps
    number = torch.arange(len(grids)).repeat_interleave(counts)
    inside = torch.arange(total) - firsts[number]
    _, height, width = grids[number].T
    along = (inside // (height * width), inside // width % height, inside % width)
    positions = starts.expand(3, -1).clone()
    positions[:, places] = starts[places[firsts]][number] + torch.stack(along)
    return positions


def check_slots(batch: dict[str, Any], merge_size: int) -> None:
    """Raise ValueError if a batch's image tokens and features differ in number, or positions are
    missing. Filler batches of padding may have images.
    """
    lacking = [name for name in ROPE_COLUMNS if name not in batch]
    expect(
        not lacking,
        f"a batch of a model with pictures lacks {', '.join(lacking)}: rope_positions gives them "
        "for a document",
    )
    count = int(batch["image_slot"].max()) + 1
    features = 0
    if "image_grid_thw" in batch:
        features = int(merged_grids(batch["image_grid_thw"], merge_size).prod(1).sum())
    expect(
        count == features or batch["padding_mask"].all(),
        f"a batch has {count} image tokens, and its pictures {features} features: expected an "
        "image token for each feature, and image_grid_thw of every picture",
    )


# -- in the token cache


class PictureFile:
    """The images of a token-cache shard: pictures.jsonl has a line per document with images,
    pictures.bin the bytes of images without a file.
    """

    NAME = "pictures.jsonl"
    DATA_NAME = "pictures.bin"

    def __init__(self, folder: Path):
        self.folder = folder
        self.end = 0  # size of pictures.jsonl so far

    def add(self, pictures: Sequence[Placed]) -> int:
        """Append a document's images, if it has any -> the new size of pictures.jsonl."""
        if not pictures:
            return self.end
        records = []
        with (
            open(self.folder / self.NAME, "ab") as lines,
            open(self.folder / self.DATA_NAME, "ab") as data,
        ):
            for placed in pictures:
                record = {**placed._asdict(), "picture": placed.picture.path, "start": data.tell()}
                data.write(placed.picture.data or b"")
                records.append(record)
            lines.write(json.dumps(records).encode())
            self.end = lines.tell()
        return self.end

    def read(self, start: int, stop: int) -> list[Placed]:
        """The images in the line between two sizes returned by add()."""
        if start == stop:
            return []
        return [self._placed(**record) for record in json.loads(self._read(self.NAME, start, stop))]

    def _placed(self, picture: str, grid: list[int], start: int, **facts: Any) -> Placed:
        """An image from its record. picture: its path, or "" if its bytes are at `start` in
        pictures.bin.
        """
        data = None
        if not picture:
            data = self._read(self.DATA_NAME, start, start + facts["num_bytes"])
        frames, rows, columns = grid
        return Placed(Picture(picture, data), (frames, rows, columns), **facts)

    def _read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a file in the folder."""
        with open(self.folder / name, "rb") as file:
            file.seek(start)
            return file.read(stop - start)
