"""Images in conversations: their files or bytes, their positions among the tokens, their pixels.

Tokenising reads only an image's header, for its size; pixels are computed when a sample is read. An
image's grid is its number of patches along time (1), height and width. The image takes prod(grid) /
merge_size ** 2 placeholder tokens (image_token_id), one per feature of the vision tower. Pillow is
an optional dependency, imported only to read images."""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError

from .errors import expect
from .files import describe_error, lies_in, read_json, snapshot_of
from .inputs import BLOCKS, MARK, Media
from .tables import is_of_inputs

if TYPE_CHECKING:
    import torch

# keys of config.json: token before an image, placeholder for its features, token after it
TOKEN_KEYS = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
_GLM_TOKEN_KEYS = ("image_start_token_id", "image_token_id", "image_end_token_id")
_MOST_PIXELS = 89_478_485  # Pillow's limit for untrusted files, MAX_IMAGE_PIXELS
# formats that Pillow reads without running another program
_FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_ORIENTATION = 0x0112  # the EXIF tag
_ON_ITS_SIDE = (5, 6, 7, 8)  # orientations that swap width and height
_THUMBNAIL = (240, 240)
_PROCESSOR_NAMES = ("processor_config.json", "preprocessor_config.json")
# transformers' image processors; Qwen3-VL uses the first, with other sizes
_PROCESSORS = ("Qwen2VLImageProcessor", "Glm4vImageProcessor")
# keys under which a message block may contain its image
_SOURCES = (*BLOCKS, "path", "url", "base64", "value")
# fields of a block that qwen_vl_utils reads; here configuration keys say the same for all records
_UNREAD = "fps nframes min_frames max_frames min_pixels max_pixels total_pixels resized_height "
_UNREAD += "resized_width video_start video_end"
_TEMPORAL = 1  # an image's patches along time
_NOUNS = {"image": "picture", "video": "video", "audio": "audio"}
ROPE_COLUMNS = ("rope_t", "rope_h", "rope_w")
# columns of pixels and of grids, for pictures and for videos
COLUMNS_OF = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}


# -- where a picture is


@dataclass(frozen=True)
class Picture:
    """An image, or the file of a video: its path; or, with path "", encoded bytes in `data`."""

    kind: ClassVar[str] = "image"
    path: str
    data: bytes | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.path or "a picture within the record"

    @property
    def num_bytes(self) -> int:
        """Size of the file, or of `data`, in bytes."""
        return os.path.getsize(self.path) if self.data is None else len(self.data)

    @property
    def modified(self) -> int:
        """Time of the last change to the file, in nanoseconds since 1970; 0 without a file."""
        return os.stat(self.path).st_mtime_ns if self.data is None else 0


class Placed(NamedTuple):
    """A picture (or video, or audio) of a document, with facts read when the document was
    tokenised. picture: a Picture, Video or Audio. grid: number of patches along time, height and
    width; an audio has one line of features. num_bytes, modified: those of `picture` at that time
    (size, and time of the last change). where: names the record in errors, such as "file:line"."""

    picture: Any
    grid: tuple[int, int, int]
    num_bytes: int
    modified: int
    where: str


def read_picture(value: Any, folder: Path, where: str, home: str | Path | None = None) -> Picture:
    """Make a Picture (the path or the bytes of an image) of a value in a record; the image is not
    opened. value: a path (relative to `folder`), a file:// URL, bytes, a data: URL, or a dict with
    one of them (keys path, url and bytes) or with base64 text (key base64).

    home: the folder in which files must lie, as files.lies_in decides; None: anywhere. Raises
    ValueError, naming `where`, for any other value, and for a file that does not exist or lies
    elsewhere. Nothing is downloaded."""
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


def plural(kind: str) -> str:
    """The plural of a kind of input, for messages: "pictures" for "image"."""
    return f"{_NOUNS[kind]}s"


def picture_of_block(block: dict[str, Any]) -> Any:
    """The value of the image, video or audio in a message block, such as a path; None if the block
    has none, and so stands for the next value in the record's column."""
    found: Any = next((block[key] for key in _SOURCES if block.get(key) is not None), None)
    if isinstance(found, str) and found == block.get("base64"):
        return {"base64": found}
    return found


# -- with Pillow


@contextlib.contextmanager
def opened(picture: Picture, where: str) -> Iterator[Any]:
    """Context with Pillow's image object for an image; the header is read, pixels are not decoded.
    Any error inside the context becomes a ValueError that names `where`, as does a missing
    Pillow."""
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
    """Raised inside opened() for an image that Pillow can read but that cannot be trained on;
    opened() makes it a ValueError."""


def upright_size(image: Any) -> tuple[int, int]:
    """(height, width) of an image as displayed, by its header. Raises _Unusable for an image that
    is too large, has several frames (except MPO), or more than 8 bits a channel in Pillow."""
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


def as_rgb(image: Any, *resize: Any) -> Any:
    """The image upright, by its header, and in RGB, transparency rendered on white. `image` itself
    may be turned in place. resize: arguments for Pillow's resize, the new size first.

    White is what people see, and what vLLM and qwen_vl_utils use. transformers' processors drop
    transparency and show the colour under it."""
    from PIL import Image, ImageOps

    # an image takes up to 360 MB: avoid copies where nothing changes
    if Image.Image.getexif(image).get(_ORIENTATION):  # not one that a PNG has after its pixels
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


def thumbnail(image: Any) -> str:
    """The image as a data: URL of at most 240 x 240 pixels. Shrinks Pillow's image in place."""
    image.thumbnail(_THUMBNAIL)
    png = io.BytesIO()
    image.save(png, "PNG")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


# -- the pictures of a model


@dataclass(kw_only=True)
class Vision(Media):
    """Reads the images of records, their sizes and pixels, and places them among the tokens, for
    one model. Picklable. Media describes those of its methods that have no docstring here.

    folder: the model's, with its image processor's settings.
    block: the text that stands for an image in a conversation; contains its placeholder once.
    tokens: {placeholder: kind of its input}. blocks: matches the text of one input, as a group.
    marks: {mark in a text: kind of its input}, LLaMA-Factory's marks.
    limits: {"shortest_edge": image_min_pixels, "longest_edge": image_max_pixels}, those that are
    set. merge_size: merge_size x merge_size patches form one feature. patch_size: side of a patch
    in pixels. media_dir: folder of relative paths; None: the folder of the dataset's file."""

    folder: Path
    token_ids: tuple[int, ...]
    merge_size: int
    patch_size: int
    tokens: dict[str, str]
    blocks: re.Pattern[str]
    block: str
    limits: dict[str, int]
    media_dir: str | None = None
    is_read: bool = True
    kinds = (bytes, dict, str)  # a str in the images column is a path
    # kind of input -> its columns of pixels and of grids
    columns_of: ClassVar[dict[str, tuple[str, str]]] = COLUMNS_OF
    exact_times: ClassVar[bool] = False  # of rope_positions
    marks: ClassVar[dict[str, str]] = {"<image>": "image"}

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any], tokenizer: Any, keys: Any) -> Media:
        """Make the Vision of a model; or a Media(), which refuses images, if config.json lacks the
        image tokens or the vision tower's patch sizes. folder: the model's. config: the contents of
        config.json. keys: the run's keys. ValueError if the tokenizer lacks the image tokens."""
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
            token_ids=(ids[1],),
            merge_size=sizes[0],
            patch_size=sizes[1],
            tokens={tokens[1]: "image"},
            block="".join(tokens),
            blocks=re.compile(f"({re.escape(''.join(tokens))})"),
            limits={key: value for key, value in limits.items() if value is not None},
            media_dir=keys.media_dir,
        )

    @property
    def options(self) -> dict[str, Any]:
        identity = {
            "block": [self.block, self.token_ids, self.merge_size],
            "limits": self.limits,
            "processor": self._settings(),
        }
        return {"vision": identity}

    def folders(self, files: Iterable[str]) -> dict[str, Any]:
        return {"folders": [self.media_dir, *(Path(file).absolute() for file in files)]}

    def check_mark(self, mark: str, where: str) -> None:
        raise ValueError(
            f"{where}: the text has {mark}, the mark of an input that this model does not read: "
            "leave the record out, or write another text"
        )

    def _settings(self) -> dict[str, Any]:
        """The image processor's settings in the model's folder; {} if it has neither
        processor_config.json nor preprocessor_config.json."""
        settings: dict[str, Any] = {}
        for name in _PROCESSOR_NAMES:
            if (self.folder / name).is_file():
                values = read_json(self.folder / name)
                settings |= values.get("image_processor", values)
        return settings

    @functools.cached_property
    def processor(self) -> Any:
        """transformers' image processor on Pillow, without torchvision.

        ValueError if the model's folder has no file of settings, or these name another processor,
        or do not fit config.json or the keys."""
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

    def grid(
        self, height: int, width: int, least: int | None = None, most: int | None = None
    ) -> tuple[int, int, int]:
        """The grid of patches (1, rows, columns) that an image of height x width pixels gets after
        the image processor's resizing. least, most: limits on the number of pixels; None: the
        processor's. ValueError if one side is too long for the other."""
        processor = self.processor
        resize = sys.modules[type(processor).__module__].smart_resize  # the processor's version
        frames = _frames_of(processor)
        sizes = resize(
            height=height,
            width=width,
            factor=self.patch_size * self.merge_size,
            min_pixels=frames * least if least else processor.size["shortest_edge"],
            max_pixels=frames * most if most else processor.size["longest_edge"],
            **({"num_frames": frames, "temporal_factor": frames} if frames > 1 else {}),
        )
        rows, columns = (size // self.patch_size for size in sizes)
        return _TEMPORAL, rows, columns

    def place(self, picture: Picture, where: str) -> Placed:
        """Read an image's size and compute its patch grid -> a Placed (the picture with its grid
        and the facts of its file). The size comes from the image header: no pixel is decoded.
        where: names the record in errors. ValueError, with `where`, for an unusable image."""
        with opened(picture, where) as image:
            height, width = upright_size(image)
        try:
            grid = self.grid(height, width)
        except ValueError as error:
            raise ValueError(f"{where}: {picture}: {width} x {height}: {error}") from None
        return Placed(picture, grid, picture.num_bytes, picture.modified, where)

    def pixels(self, placed: Placed) -> torch.Tensor:
        """An image's pixel values as the vision tower takes them, float32 [patches, values per
        patch]. ValueError if the file is broken, or if its size, time of change or patch grid is
        another than when it was tokenised."""
        picture = placed.picture
        processor = self.processor
        with opened(picture, placed.where) as image:
            if (picture.num_bytes, picture.modified) != (placed.num_bytes, placed.modified):
                raise _Unusable(
                    f"its file has changed since it was tokenised ({picture.num_bytes:,} bytes, "
                    f"and {placed.num_bytes:,} then): set overwrite_cache: true"
                )
            grid = self.grid(*upright_size(image))
            if grid != placed.grid:
                raise _Unusable(
                    f"a grid of {grid} patches, and {placed.grid} when it was tokenised: set "
                    "overwrite_cache: true"
                )
            _, rows, columns = grid
            size = columns * self.patch_size, rows * self.patch_size
            image = as_rgb(image, size, processor.resample)
        # already resized, with the processor's method: it would first convert the full-size image
        return processor(images=image, do_resize=False, return_tensors="pt")["pixel_values"]

    def read(self, path: str, where: str) -> Picture:
        picture = read_picture(path, Path.cwd(), where)
        self.place(picture, where)  # checks the header
        return picture

    # -- in a record

    def by_kind(self, of_columns: list[Any]) -> dict[str, list[Any]]:
        """Sort a record's inputs by kind -> {"image": values}; subclasses add "video" or "audio".
        of_columns: the values (such as paths) that of_columns() found in the record's columns."""
        return {"image": of_columns}

    def read_input(self, kind: str, value: Any, *place: Any) -> Any:
        """The Picture (path or bytes of an image) for an input's value in a record, such as a path.
        kind: "image". place: the arguments of read_picture after `value`."""
        return read_picture(value, *place)

    def text_of(self, item: Any) -> str:
        """The text that stands for an input in a conversation: `block` for an image."""
        return self.block

    def take(
        self, messages: list[dict[str, Any]], of_columns: list[Any], may_lead: bool, where: str
    ) -> tuple[Any, ...]:
        rest = self.by_kind(of_columns)
        blocks_of = self._blocks_of(messages, rest, may_lead, where)
        given = {key for blocks in blocks_of for block in blocks for key in block}
        ignored = [key for key in _UNREAD.split() if key in given]
        expect(
            not ignored,
            f"{where}: a block has {', '.join(ignored)}, without effect here: leave it out, and "
            "set video_fps, video_max_pixels, image_max_pixels and alike, which all records share",
        )
        found = [
            (block["type"].removesuffix("_url"), picture_of_block(block))
            for blocks in blocks_of
            for block in blocks
        ]
        unread = [kind for kind, _ in found if kind not in rest]
        expect(not unread, f"{where}: a block of type {', '.join(unread)}: this model reads text "
               f"and {' and '.join(map(plural, rest))}")  # fmt: skip
        for kind, values in rest.items():
            count = found.count((kind, None))
            expect(
                count == len(values),
                f"{where}: {count} <{kind}> marks, or blocks without a {_NOUNS[kind]}, and "
                f"{len(values)} {plural(kind)} in the column {kind}s: expected as many",
            )
        place = self._place_of(where)
        columns = {kind: iter(values) for kind, values in rest.items()}
        items = tuple(
            self.read_input(kind, next(columns[kind]) if value is None else value, *place)
            for kind, value in found
        )
        texts = map(self.text_of, items)
        for message in messages:
            message["content"] = re.sub(MARK, lambda _: next(texts), message["content"])
        return items

    def _blocks_of(
        self, messages: list[dict[str, Any]], rest: dict[str, list[Any]], may_lead: bool, where: str
    ) -> list[list[dict[str, Any]]]:
        """For each message a list of blocks, one per input, such as an image: its "media", which is
        removed, or one block for each mark in its text; MARK replaces the marks in place. rest:
        {kind: values in the record's columns}. may_lead: if no message has marks or blocks, the
        columns' inputs stand at the start of the first user message. ValueError for a text with a
        placeholder token, or with MARK of its own."""
        of_blocks = [message.pop("media", None) for message in messages]
        for message, blocks in zip(messages, of_blocks, strict=True):
            content = message["content"]
            expect(
                content.count(MARK) == len(blocks or ())
                and not any(token in content for token in self.tokens),
                f"{where}: a text has {' or '.join(self.tokens)}, the token of a picture, or "
                f"U+FDD0, without one: write {' or '.join(self.marks)} for one of a column, or "
                "another text",
            )
        marks = re.compile("|".join(self.marks))
        is_marked = any(of_blocks) or any(marks.search(each["content"]) for each in messages)
        led = [{"type": kind} for kind, values in rest.items() for _ in values]
        if not may_lead or is_marked:
            led = []
        found = []
        for message, blocks in zip(messages, of_blocks, strict=True):
            if blocks is None:
                blocks = [{"type": self.marks[m]} for m in marks.findall(message["content"])]
                message["content"] = marks.sub(MARK, message["content"])
            if message["role"] == "user":
                message["content"] = MARK * len(led) + message["content"]
                blocks, led = led + blocks, []
            found.append(blocks)
        return found

    def _place_of(self, where: str) -> tuple[Any, ...]:
        """Arguments for read_picture after the value: (folder of relative paths, where, allowed
        folder or None). where: "file:line" of the record."""
        file = Path(where.rpartition(":")[0])
        return Path(self.media_dir or file.parent), where, self.media_dir or snapshot_of(file)

    def of_tokens(self, ids: np.ndarray, values: list[Any], where: str) -> tuple[Placed, ...]:
        place = self._place_of(where)
        kinds = self.kinds_of(ids)
        token_of = {kind: token for token, kind in self.tokens.items()}
        waiting = {}
        for kind, of_kind in self.by_kind(values).items():
            placed = [self.place(self.read_input(kind, one, *place), where) for one in of_kind]
            features = int(self.count(placed).sum())
            count = kinds.count(kind)
            expect(
                count == features,
                f"{where}: {count} tokens {token_of[kind]}, and the {len(placed)} {plural(kind)} "
                f"of {kind}s have {features} features: expected a token for each feature",
            )
            waiting[kind] = iter(placed)
        inputs: list[Placed] = []
        while kinds:  # inputs stand in the order of their tokens
            inputs.append(next(waiting[kinds[0]]))
            count = int(self.count(inputs[-1:])[0])
            expect(
                len({*kinds[:count]}) == 1,
                f"{where}: {inputs[-1].picture} has {count} features, and fewer tokens stand "
                "together: expected inputs in the order of their tokens",
            )
            kinds = kinds[count:]
        return tuple(inputs)

    def kinds_of(self, ids: np.ndarray) -> list[str]:
        """The kind of input of each placeholder among the tokens `ids`, in their order."""
        kinds = dict(zip(self.token_ids, self.tokens.values(), strict=False))
        return [kinds[number] for number in ids.tolist() if number in kinds]

    # -- in a chat template

    def check_template(
        self, template: str, render: Callable[..., str], messages: list[dict[str, Any]]
    ) -> None:
        if "image" not in template:  # a template for text copies `block` unchanged
            return
        messages = [
            message | {"content": self.shortened(message["content"])} for message in messages
        ]
        blocks = [
            message | {"content": self._as_blocks(message["content"])} for message in messages
        ]
        try:
            text = render(blocks)
        except TemplateError:  # the template only supports text
            return
        expect(
            text == render(messages),
            f"the chat template does not write a picture as {self.block} (or a video likewise), "
            "or changes the rest of its message: set chat_template to one that does neither, and "
            "leave out chat_template_kwargs of pictures",
        )

    def shortened(self, content: str) -> str:
        """The content of a message with each input's text as chat templates write it: VideoVision
        writes one placeholder in place of a video's times and frames. For images: unchanged."""
        return content

    def _as_blocks(self, content: str) -> str | list[dict[str, str]]:
        """The content as a list of blocks, of text and of inputs, if it contains inputs; otherwise
        unchanged."""
        pieces = self.blocks.split(content)
        if len(pieces) == 1:
            return content
        blocks = [{"type": "text", "text": piece} for piece in pieces]
        for number, piece in enumerate(pieces[1::2]):
            [kind] = {kind for token, kind in self.tokens.items() if token in piece}
            blocks[2 * number + 1] = {"type": kind}
        return [block for block in blocks if block != {"type": "text", "text": ""}]

    def check_rendered(self, text: str, messages: list[dict[str, Any]]) -> None:
        count = sum(len(self.blocks.findall(message["content"])) for message in messages)
        expect(  # otherwise later images would get the wrong pixels
            len(self.blocks.findall(text)) == count,
            f"the chat template leaves out some of {count} pictures, as it does with the "
            "thinking of earlier answers: move them out of it",
        )

    # -- among the tokens

    def placed(self, text: str, inputs: Sequence[Any], where: str) -> tuple[Placed, ...]:
        inputs = inputs[: len(self.blocks.findall(text))]
        count = self._num_tokens(text)
        expect(
            count == sum(self._num_tokens(self.text_of(item)) for item in inputs),
            f"{where}: the text has {count} tokens {' or '.join(self.tokens)}, and the record "
            f"{len(inputs)} pictures: expected this token for pictures alone",
        )
        return tuple(self.place(picture, where) for picture in inputs)

    def _num_tokens(self, text: str) -> int:
        """The number of placeholder tokens in a text, before they are repeated."""
        return sum(map(text.count, self.tokens))

    def runs(self, placed: Placed) -> list[tuple[int, int, int]]:
        """[(time, height, width)], in patches, for each run of placeholder tokens of an input: an
        image has one run."""
        return [placed.grid]

    def _runs(self, inputs: Sequence[Placed]) -> np.ndarray:
        """int64 [runs, 3]: the grids of all runs of placeholder tokens of some inputs."""
        grids = [run for placed in inputs for run in self.runs(placed)]
        return np.array(grids, dtype=np.int64).reshape(-1, 3)

    def count(self, pictures: Sequence[Placed]) -> np.ndarray:
        """int64 [inputs]: the number of placeholder tokens that each input takes. There is one per
        feature that the input's tower (its encoder) computes."""
        grids = np.array([placed.grid for placed in pictures], dtype=np.int64).reshape(-1, 3)
        return grids.prod(axis=1) // self.merge_size**2

    def expand(self, document: np.ndarray, inputs: Sequence[Placed]) -> np.ndarray:
        """Repeat each placeholder token of a document, once for each feature that it stands for.
        document: int32 [n], token ids; ~id for a token without loss. The placeholders have no loss.

        ValueError unless the document has one placeholder for each of the inputs' runs (an image
        has one)."""
        tokens = np.maximum(document, ~document)
        is_input = np.isin(tokens, self.token_ids)
        counts = self._runs(inputs).prod(axis=1) // self.merge_size**2
        expect(
            is_input.sum() == len(counts),
            f"the text has {is_input.sum()} tokens {' or '.join(self.tokens)}, and the record "
            f"{len(inputs)} pictures: expected the token for pictures alone",
        )
        repeats = np.ones(len(document), dtype=np.int64)
        repeats[is_input] = counts
        return np.where(is_input, ~tokens, document).repeat(repeats)

    def prompt(
        self, ids: list[int], inputs: Sequence[Any], where: str
    ) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Prompt tokens with one placeholder for each run (see runs) -> (tokens with all
        placeholders, {pixel_values, image_grid_thw, ...}).

        ValueError for another number of placeholders, or an unusable input."""
        placed = [self.place(picture, where) for picture in inputs]
        document = self.expand(np.array(ids, dtype=np.int32), placed)
        tokens = np.maximum(document, ~document).astype(np.int64)
        columns = self.columns(tokens, placed)
        return tokens.tolist(), {name: x for name, x in columns.items() if is_of_inputs(name)}

    def fit(
        self, document: np.ndarray, inputs: Sequence[Placed], start: int, stop: int
    ) -> tuple[slice, list[Placed]]:
        """Cut a document to tokens start:stop without cutting an input in two -> (the slice,
        shortened if an end of it lies within an input; the inputs inside the slice). document:
        token ids with all placeholders; ~id for a token without loss."""
        tokens = np.maximum(document, ~document)
        places = np.flatnonzero(np.isin(tokens, self.token_ids))
        counts = self.count(inputs)
        ends = counts.cumsum()
        starts = ends - counts
        units = [
            self.unit(tokens, placed, places[a], places[b - 1])
            for placed, a, b in zip(inputs, starts, ends, strict=True)
        ]
        start = next((last for first, last in units if first < start < last), start)
        stop = next((first for first, last in units if first < stop < last), stop)
        kept = zip(inputs, units, strict=True)
        return slice(start, stop), [
            placed for placed, (first, last) in kept if start <= first and last <= stop
        ]

    def unit(self, tokens: np.ndarray, placed: Placed, first: int, last: int) -> tuple[int, int]:
        """(start, stop) of the tokens that belong to one input: its placeholders, from index
        `first` to `last`, and the tokens around them that mark its start and end. tokens: the
        document's ids."""
        return max(first - 1, 0), last + 2

    def steps(self, inputs: Sequence[Placed]) -> list[float] | None:
        """For each run of placeholders the distance along time between its features, as a
        difference of rotary positions. None means 1 in every run, as for images."""
        return None

    def columns(self, ids: np.ndarray, inputs: Sequence[Placed]) -> dict[str, torch.Tensor]:
        """The columns that the model needs for a document beside its tokens: the rotary positions
        rope_t, rope_h and rope_w [n]. With inputs also their grids and, unless is_read is False,
        their pixels, under the names in columns_of, such as image_grid_thw and pixel_values. ids:
        [n], the document's tokens with all placeholders."""
        import torch  # imported late: reading records needs no torch

        positions = rope_positions(
            torch.as_tensor(ids),
            torch.as_tensor(self._runs(inputs)),
            self.token_ids,
            self.merge_size,
            self.steps(inputs),
            self.exact_times,
        )
        columns = dict(zip(ROPE_COLUMNS, positions, strict=True))
        for names in dict.fromkeys(self.columns_of.values()):
            alike = [one for one in inputs if self.columns_of[one.picture.kind] == names]
            pixels, grids = names
            if alike:
                of_each = [grid for placed in alike for grid in self.grids_of(placed)]
                columns[grids] = torch.tensor(of_each)
            if alike and self.is_read:
                columns[pixels] = torch.cat([self.pixels(placed) for placed in alike])
        return columns

    def grids_of(self, placed: Placed) -> list[tuple[int, int, int]]:
        """The grids (patches along time, height and width) that an input has in the model's column
        of grids, such as image_grid_thw. Here it has one, its own."""
        return [placed.grid]

    def lost(self, units: str, cutoff_len: int) -> str:
        what = f"{units} lost pictures, or all of them, to cutoff_len {cutoff_len}: "
        return (
            f"{what}pictures take less with a lower image_max_pixels, videos with a lower "
            "video_max_pixels or video_maxlen"
        )

    def shown(self, inputs: Sequence[Placed]) -> list[tuple[str, str]]:
        counts = self.count(inputs).tolist()
        return [
            (
                thumbnail(self.image_of(placed)),
                f"{placed.picture}: {count:,} tokens, {placed.grid} patches",
            )
            for placed, count in zip(inputs, counts, strict=True)
        ]

    def image_of(self, placed: Placed) -> Any:
        """The image that a report shows for an input, as Pillow's image in RGB."""
        with opened(placed.picture, placed.where) as image:
            return as_rgb(image)

    def store(self, folder: Path) -> PictureFile:
        return PictureFile(folder)


def _frames_of(processor: Any) -> int:
    """The number of equal frames that an image counts as under the processor's pixel limits:
    temporal_patch_size for GLM-4V's processor, otherwise 1."""
    is_glm = type(processor).__name__.startswith("Glm4v")
    return int(processor.temporal_patch_size) if is_glm else 1


# -- positions


def merged_grids(grids: torch.Tensor, merge_size: int) -> torch.Tensor:
    """Convert grids of patches into grids of features, [images, 3] along time, height and width.
    merge_size x merge_size patches form one feature."""
    return grids // grids.new_tensor([1, merge_size, merge_size])


def rope_positions(
    ids: torch.Tensor,
    grids: torch.Tensor,
    token_ids: int | tuple[int, ...],
    merge_size: int,
    steps: Sequence[float] | None = None,
    exact_times: bool = False,
) -> torch.Tensor:
    """Rotary positions int64 [3, n], along time, height and width, for a document's token ids [n].
    exact_times: with steps, float32 positions as in Qwen3-Omni, where positions along time are not
    rounded, and text continues after the last of them if a video is longer than its sides.

    A text token has the same position on all axes, one after a text token before it. The features
    of an image (a run of placeholders) start at the next position and count from there along each
    axis; along time in distances of the run's `steps` (None: 1), rounded down. The text after an
    image starts after its longer side. grids: [runs, 3], patches of each run along time, height and
    width; merge_size x merge_size patches form one feature. token_ids: the placeholders. ValueError
    if their number is not the number of features. Source: transformers' Qwen2-VL."""
    import torch

    grids = merged_grids(grids.view(-1, 3), merge_size)
    counts = grids.prod(1)
    [places] = torch.nonzero(torch.isin(ids, torch.as_tensor(token_ids)), as_tuple=True)
    total = int(counts.sum())
    expect(
        len(places) == total,
        f"a document has {len(places)} image tokens, and its {len(grids)} pictures {total} "
        "features: expected an image token for each feature",
    )
    firsts = counts.cumsum(0) - counts  # index of each image's first feature
    going_on = torch.ones_like(ids)
    going_on[places] = 0
    going_on[places[firsts]] = grids[:, 1:].amax(1)
    starts = going_on.cumsum(0) - going_on
    if exact_times and steps is not None:
        last = (grids[:, 0] - 1) * torch.tensor(steps, dtype=torch.float64) + 1
        going_on = going_on.double()
        going_on[places[firsts]] = torch.maximum(going_on[places[firsts]], last)
        starts = (going_on.cumsum(0) - going_on).float()
    number = torch.arange(len(grids)).repeat_interleave(counts)
    inside = torch.arange(total) - firsts[number]
    _, height, width = grids[number].T
    time = inside // (height * width)
    if steps is not None:
        time = time * torch.tensor(steps, dtype=torch.float32)[number]
        time = time if exact_times else time.long()
    positions = starts.expand(3, -1).clone()
    positions[:, places] = starts[places[firsts]][number] + torch.stack(
        (time, inside // width % height, inside % width)
    )
    return positions


# -- in the token cache


class PictureFile:
    """Stores the images of a token-cache shard (a folder of tokenised documents), one document at a
    time. pictures.jsonl has a record per document with images, pictures.bin the bytes of images
    that have no file."""

    NAME = "pictures.jsonl"
    DATA_NAME = "pictures.bin"

    def __init__(self, folder: Path):
        self.folder = folder
        self.end = 0  # size of pictures.jsonl so far

    def add(self, pictures: Sequence[Placed]) -> int:
        """Append a document's images to the shard's files -> the size of pictures.jsonl afterwards,
        in bytes. Without images nothing is written."""
        if not pictures:
            return self.end
        records = []
        with (
            open(self.folder / self.NAME, "ab") as lines,
            open(self.folder / self.DATA_NAME, "ab") as data,
        ):
            for placed in pictures:
                record = self.write(placed.picture, data)
                records.append({**placed._asdict(), "picture": record})
            lines.write(json.dumps(records).encode())
            self.end = lines.tell()
        return self.end

    def write(self, picture: Any, data: Any) -> Any:
        """Make an image's record for pictures.jsonl: (path, start, stop). If the image has no file,
        its bytes are appended to the open file `data`, where they take bytes start to stop."""
        start = data.tell()
        data.write(picture.data or b"")
        return picture.path, start, data.tell()

    def load(self, record: Any) -> Any:
        """The inverse of write(): the Picture for a record that write() returned."""
        path, *span = record
        return Picture(path, None if path else self._read(self.DATA_NAME, *span))

    def read(self, start: int, stop: int) -> list[Placed]:
        """The images of one document. start, stop: sizes of pictures.jsonl, as add() returned them
        before and after the document."""
        if start == stop:
            return []
        placed = []
        for record in json.loads(self._read(self.NAME, start, stop)):
            record |= {"picture": self.load(record["picture"]), "grid": tuple(record["grid"])}
            placed.append(Placed(**record))
        return placed

    def _read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of the shard's file `name`."""
        with open(self.folder / name, "rb") as file:
            file.seek(start)
            return file.read(stop - start)
