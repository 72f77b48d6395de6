"""Compare videos, as part_video.py reads them, with transformers' own processors and positions.

python -m tests.tools.video_oracle

It needs torchvision and PyAV, which the tests do without: token ids, pixel values and positions
must be the same, byte for byte, for frames in pictures and for files that PyAV reads.
"""

import json
import tempfile
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto import processing_auto

from mca_lite.part_video import VideoVision
from tests.shared.picture_files import draw
from tests.shared.video_files import (
    FAMILIES,
    KEYS,
    chat,
    columns_of,
    video_tokenizer,
    write_video_model,
)


def write_film(path: Path, frames: int, rate: Fraction, size=(40, 24), codec="mpeg4") -> Path:
    """A video file of random, slowly changing frames."""
    import av

    rng = np.random.default_rng(frames)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p" if codec != "gif" else "rgb8"
        base = rng.integers(0, 200, (size[1], size[0], 3))
        for number in range(frames):
            picture = (base + 3 * number).clip(0, 255).astype(np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def decoded(path: Path, indices) -> list:
    """The frames of a file that LLaMA-Factory takes, by its own loop."""
    import av

    container = av.open(str(path), "r")
    stream = next(stream for stream in container.streams if stream.type == "video")
    container.seek(0)
    return [f.to_image() for n, f in enumerate(container.decode(stream)) if n in indices]


def expected_of(path: Path, fps: float, most: int) -> tuple:
    """(frames, indices, fps, seconds) of a file, by LLaMA-Factory's formulas."""
    import av

    container = av.open(str(path), "r")
    stream = container.streams.video[0]
    seconds = float(stream.duration * stream.time_base)
    count = min(stream.frames, most, max(1, int(np.floor(seconds * fps))))
    indices = np.linspace(0, stream.frames - 1, count).astype(np.int32)
    return decoded(path, indices), indices.tolist(), float(stream.average_rate), seconds


def processor_of(family: str, folder: Path, tokenizer):
    """transformers' processor of a family, with the files of the folder."""
    name = processing_auto.PROCESSOR_MAPPING_NAMES[family]
    import transformers

    image = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    kind = "Qwen3VL" if "qwen3" in family else "Qwen2VL"
    video = getattr(transformers, f"{kind}VideoProcessor").from_pretrained(folder)
    template = tokenizer.chat_template
    return getattr(transformers, name)(image, tokenizer, video, chat_template=template)


def compare(family: str, folder: Path) -> None:
    """Raise AssertionError where a family's tokens, pixels or positions differ."""
    tokenizer = video_tokenizer()
    write_video_model(folder / "model", tokenizer, family)
    processor = processor_of(family, folder / "model", tokenizer)
    config = json.loads((folder / "model" / "config.json").read_text())
    hf = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(hf).model
    names = [draw(folder / f"{n}.png", 30, 21, seed=n) for n in range(5)]
    picture = draw(folder / "picture.png", 16, 24, seed=9)
    cases = [names, names[:2], names[:1]]
    cases += [write_film(folder / f"{n}.mp4", n, Fraction(rate)) for n, rate in ((30, 10), (7, 3))]
    cases += [write_film(folder / "long.avi", 400, Fraction(25))]
    furthest = 0.0
    for limits in (64, 300), (64, 3000), (1200, 3000):
        keys = SimpleNamespace(**{**KEYS, "video_min_pixels": limits[0]})
        keys.video_max_pixels = limits[1]
        vision = VideoVision.of(folder / "model", hf.to_dict(), tokenizer, keys)
        assert isinstance(vision, VideoVision)
        for case in cases:
            is_list = isinstance(case, list)
            value = case if is_list else case.name
            ids, ours = columns_of(vision, tokenizer, folder, [picture, value, case])
            if is_list:
                from PIL import Image

                frames = [Image.open(folder / name) for name in case]
                rate, indices = keys.video_fps, list(range(len(case)))
                fps = rate
            else:
                frames, indices, rate, seconds = expected_of(
                    case, keys.video_fps, keys.video_maxlen
                )
                fps = len(indices) / seconds
            if len(frames) % 2:
                frames.append(frames[-1])
            per = len(frames) if "qwen3" in family else 1
            size = {"shortest_edge": limits[0] * per, "longest_edge": limits[1] * per}
            found = expected(processor, tokenizer, folder, picture, frames, rate, indices, size)
            assert found["input_ids"][0].tolist() == ids, (family, case)
            for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
                furthest = max(furthest, (found[name] - ours[name]).abs().max().item())
            more = {}
            if family == "qwen2_5_vl":
                more["second_per_grid_ts"] = torch.tensor([2 / fps] * 2)
                assert ours["second_per_grid_ts"].allclose(more["second_per_grid_ts"])
            positions, _ = model.get_rope_index(
                found["input_ids"],
                found["mm_token_type_ids"],
                found["image_grid_thw"],
                found["video_grid_thw"],
                **more,
            )
            rope = torch.stack([ours[name] for name in ("rope_t", "rope_h", "rope_w")])
            assert torch.equal(positions[:, 0], rope), (family, case)
    assert furthest < 1e-6, furthest
    print(
        f"{family}: {len(cases)} videos, 3 limits: tokens and positions are the same, pixel values "
        f"to {furthest:.1e}"
    )


def expected(processor, tokenizer, folder, picture, frames, rate, indices, size) -> dict:
    """The inputs by transformers for a picture and twice the same video."""
    from PIL import Image

    metadata = {"fps": rate, "total_num_frames": indices[-1] + 1, "frames_indices": indices}
    videos_kwargs = {
        "do_sample_frames": False,
        "video_metadata": [dict(metadata), dict(metadata)],
        "size": size,
    }
    text = tokenizer.apply_chat_template(chat(), tokenize=False)
    return processor(
        text=[text],
        images=[Image.open(folder / picture)],
        videos=[frames, frames],
        return_tensors="pt",
        videos_kwargs=videos_kwargs,
    )


if __name__ == "__main__":
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            compare(family, Path(folder))
