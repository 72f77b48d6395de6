"""Pictures of conversations, from the files of a dataset to the columns of a batch. The oracles are
transformers' image processor and get_rope_index, and chat templates with blocks."""

import base64
import functools
import importlib.util
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

from mca_lite.args import parse_args
from mca_lite.data_batches import BatchPlan, Collator, Limits, check_batch, make_loader
from mca_lite.files import IGNORE_INDEX, read_json
from mca_lite.part_pictures_data import Picture
from tests.shared.chats import assistant, conversation, user, write_records
from tests.shared.picture_files import (
    TEMPLATE,
    TOKENS,
    draw,
    load,
    picture_tokenizer,
    vision_of,
    write_model,
)
from tests.shared.toy_tokenizer import QWEN3, byte_tokenizer

ROOT = Path(__file__).parents[1]


@functools.cache
def rope_model():
    """transformers' model, for its get_rope_index."""
    config = AutoConfig.for_model("qwen2_vl")
    config.vision_config.spatial_merge_size = 2
    config.vision_config.depth = config.text_config.num_hidden_layers = 1
    config.text_config.vocab_size = 8
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config).model


def expected(folder, tokenizer, messages, pictures) -> dict:
    """The columns of a conversation with pictures by transformers' own parts."""
    processor = AutoImageProcessor.from_pretrained(folder / "model", backend="pil")
    columns = processor(images=pictures, return_tensors="pt")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    first, *rest = text.split(TOKENS[1])
    for grid, after in zip(columns["image_grid_thw"], rest, strict=True):
        first += TOKENS[1] * (int(grid.prod()) // 4) + after
    ids = torch.tensor(tokenizer(first, add_special_tokens=False)["input_ids"])[:-1]
    is_image = (ids == tokenizer.convert_tokens_to_ids(TOKENS[1]))[None]
    positions, _ = rope_model().get_rope_index(
        ids[None], is_image.int(), image_grid_thw=columns["image_grid_thw"]
    )
    rope = dict(zip(("rope_t", "rope_h", "rope_w"), positions[:, 0], strict=True))
    return {**columns, **rope, "input_ids": ids}


def check(document: dict, right: dict) -> None:
    for name, column in right.items():
        torch.testing.assert_close(torch.as_tensor(document[name]), column, msg=name)


def blocks(*parts) -> list[dict]:
    """Blocks of text, and of pictures for None."""
    return [{"type": "image"} if p is None else {"type": "text", "text": p} for p in parts]


def trained_text(document: dict, tokenizer) -> str:
    labels = document["labels"]
    return tokenizer.decode(labels[labels != IGNORE_INDEX].tolist())


def test_marks_blocks_bytes_and_urls_give_what_transformers_gives(tmp_path):
    names = [draw(tmp_path / "a.png", 16, 8), draw(tmp_path / "b.jpg", 30, 44, seed=1)]
    files = [(tmp_path / name).read_bytes() for name in names]
    encoded = [base64.b64encode(data).decode() for data in files]
    url = f"data:image/png;base64,{encoded[0]}"
    question = [user("x <image> or <image>?"), assistant("b")]
    here = [str(tmp_path / name) for name in names]

    def with_blocks(*pictures):
        first, second = pictures
        content = [{"type": "text", "text": "x "}, first, {"type": "text", "text": " or "}, second]
        content.append({"type": "text", "text": "?", "image": None})
        return {"messages": [user(content), assistant("b")]}

    turns = [{"from": "human", "value": "x <image> or <image>?"}, {"from": "gpt", "value": "b"}]
    of_path = {"type": "image", "path": names[1]}
    records = [
        {"messages": question, "images": names},
        {"conversations": turns, "images": here},
        {"instruction": "x <image> or <image>?", "output": "b", "images": names},
        with_blocks({"type": "image", "image": names[0]}, of_path),
        with_blocks({"type": "image", "base64": encoded[0]}, {"type": "image", "url": here[1]}),
        with_blocks({"type": "image_url", "image_url": {"url": url}}, of_path),
        {**with_blocks({"type": "image"}, of_path), "images": names[:1]},
    ]
    paths = [write_records(tmp_path / f"{n}.jsonl", r) for n, r in enumerate(records)]
    data, tokenizer = load(tmp_path, *paths)
    messages = [user(blocks("x ", None, " or ", None, "?")), assistant("b")]
    right = expected(tmp_path, tokenizer, messages, [Image.open(path) for path in here])
    assert len(data.train) == len(records)
    for [document] in data.train:
        check(document, right)
        assert trained_text(document, tokenizer) == "b<|im_end|>"
    sizes = [right["image_grid_thw"].prod(1) // 4, data.train.lengths]
    assert sizes[0].tolist() == [2, 12] and set(sizes[1].tolist()) == {len(right["input_ids"])}


def test_bytes_of_parquet_and_the_first_question_of_trl(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    draw(tmp_path / "a.png", 40, 20)
    stored = {"bytes": (tmp_path / "a.png").read_bytes(), "path": "gone.png"}
    of_path = {"bytes": None, "path": "a.png"}
    rows = [{"images": [stored]}, {"images": [of_path]}]
    table = pa.Table.from_pylist([row | conversation("why?", "so") for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    alone = write_records(tmp_path / "b.jsonl", {**conversation("why?", "so"), "image": "a.png"})
    data, tokenizer = load(tmp_path, tmp_path / "a.parquet", alone)
    messages = [user(blocks(None, "why?")), assistant("so")]
    right = expected(tmp_path, tokenizer, messages, [Image.open(tmp_path / "a.png")])
    assert len(data.train) == 3
    for [document] in data.train:
        check(document, right)


def test_texts_of_a_model_with_pictures_have_positions_alone(tmp_path):
    path = write_records(tmp_path / "a.jsonl", conversation("a", "b"))
    [[document]] = load(tmp_path, path)[0].train
    count = len(document["input_ids"])
    assert document.keys() == {"input_ids", "labels", "rope_t", "rope_h", "rope_w"}
    assert all(document[name].tolist() == list(range(count)) for name in document if "rope" in name)
    (tmp_path / "b.txt").write_text("a text\nand another\n")
    rows = load(tmp_path, tmp_path / "b.txt", stage="pt", cutoff_len=6)[0].train
    assert [rows[0][0]["rope_h"].tolist(), len(rows) > 2] == [list(range(6)), True]


@pytest.fixture(scope="module")
def unfit(tmp_path_factory) -> Path:
    """A folder of a picture, and of others that cannot be taken."""
    folder = tmp_path_factory.mktemp("unfit")
    draw(folder / "a.png")
    draw(folder / "thin.png", 201, 1)
    (folder / "text.png").write_text("no picture")
    Image.new("I;16", (9, 9)).save(folder / "deep.png")
    Image.new("1", (10_000, 9_999)).save(folder / "huge.png")
    Image.new("1", (20_000, 20_000)).save(folder / "bomb.png")
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "film.gif", save_all=True, append_images=frames[1:])
    (folder / "a.svg").write_text("<svg/>")
    return folder


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"images": ["a.png"]}, "0 <image> marks.* and 1 pictures in the column images"),
        ({"images": ["a.png"], "text": "<image><image>"}, "2 <image> marks.* and 1 pictures"),
        ({"text": "<image>"}, "1 <image> marks.* and 0 pictures"),
        ({"images": ["b.png"], "text": "<image>"}, "no picture '.*b.png': paths are relative"),
        ({"images": ["http://x/a.png"], "text": "<image>"}, "nothing is fetched over the network"),
        ({"images": ["data:image/png,abc"], "text": "<image>"}, "a data: URL: expected base64"),
        ({"images": ["data:;base64,?"], "text": "<image>"}, "base64 cannot be decoded"),
        ({"images": ["A" * 5000], "text": "<image>"}, "there is no picture '.*AAA"),
        ({"images": ["a\0.png"], "text": "<image>"}, "there is no picture"),
        ({"images": [7], "text": "<image>"}, "expected a path, bytes or a data: URL, got 7"),
        ({"images": ["text.png"], "text": "<image>"}, "text.png cannot be read as one of BMP, "),
        ({"images": ["thin.png"], "text": "<image>"}, "201 x 1: .*ratio must be smaller than 200"),
        ({"images": ["deep.png"], "text": "<image>"}, "I;16 has more than 8 bits a channel"),
        ({"images": ["huge.png"], "text": "<image>"}, "10000 x 9999.* expected at most 89,478,485"),
        ({"images": ["bomb.png"], "text": "<image>"}, "bomb.png: expected at most 89,478,485"),
        ({"images": ["film.gif"], "text": "<image>"}, "film.gif: 2 frames, and a picture has one"),
        ({"images": ["a.svg"], "text": "<image>"}, "a.svg cannot be read as one of BMP, "),
        ({"text": f"see {TOKENS[1]}"}, r"a text has <\|image_pad\|>, the token of a picture"),
        ({"text": "see \ufdd0", "images": ["a.png"]}, "the token of a picture, or U.FDD0"),
        (
            {"text": [{"type": "text", "text": "\ufdd0"}, {"type": "image", "path": "a.png"}]},
            "the token of a picture, or U.FDD0",
        ),
        ({"videos": ["a.mp4"]}, "does not read the column 'videos'"),
        ({"audios": ["a.mp3"]}, "does not read the column 'audios'"),
        ({"video": "a.mp4"}, "does not read the column 'video'"),
        ({"audio": {"path": "a.mp3"}}, "does not read the column 'audio'"),
        ({"text": "<video>What happens?"}, "the text has <video>, .* another text"),
        ({"text": "<audio>What is said?"}, "the text has <audio>, "),
        ({"text": [{"type": "text", "text": "<|video_pad|>"}]}, r"text has <\|video_pad\|>, "),
        (
            {"text": [{"type": "video", "path": "a"}]},
            "a block of type video: this model reads text and pictures",
        ),
    ],
)
def test_a_record_that_cannot_be_is_refused_with_file_and_line(unfit, tmp_path, record, said):
    shutil.copytree(unfit, tmp_path, dirs_exist_ok=True)
    record = dict(record)
    content = record.pop("text", "why?")
    # not TRL's names, whose pictures may stand without a mark
    turns = [{"from": "human", "value": content}, {"from": "gpt", "value": "b"}]
    path = write_records(tmp_path / "a.jsonl", {"conversations": turns, **record})
    with pytest.raises(ValueError, match=rf"a.jsonl:1: .*{said}"):
        load(tmp_path, path)


def test_a_model_without_a_tower_refuses_pictures(tmp_path):
    from tests.shared.chats import load_files

    draw(tmp_path / "a.png")
    picture = {"type": "image", "path": "a.png"}
    for n, record in enumerate(
        (
            {**conversation("a", "b"), "images": ["a.png"]},
            {**conversation("a", "b"), "image": {"path": "a.png"}},
            {"messages": [user([picture]), assistant("b")]},
        )
    ):
        path = write_records(tmp_path / f"{n}.jsonl", record)
        with pytest.raises(ValueError, match=r"jsonl:1: .*no vision_config"):
            load_files(tmp_path, path)
    text = write_records(tmp_path / "text.jsonl", {"text": "a", "images": ["a.png"]})
    with pytest.raises(ValueError, match=r"jsonl:1: .*stage pt does not train"):
        load_files(tmp_path, text, stage="pt")
    film = write_records(tmp_path / "film.jsonl", {"text": "a", "videos": ["a.mp4"]})
    with pytest.raises(ValueError, match=r"jsonl:1: .* stage does not read the column 'videos'"):
        load_files(tmp_path, film, stage="pt")
    texts = {**conversation("an <image> tag", "b"), "text": "a", "image": "nginx", "images": []}
    plain = write_records(tmp_path / "plain.jsonl", texts)
    assert len(load_files(tmp_path, plain).train) == 1
    assert len(load_files(tmp_path, plain, stage="pt").train) == 1
    column = torch.ones(1, 2, dtype=torch.long)
    batch = {"input_ids": column, "labels": column, "pixel_values": torch.ones(4, 3)}
    with pytest.raises(ValueError, match="a batch has pixel_values .*no vision_config"):
        check_batch(batch, False, Limits.of({"vocab_size": 9}))


def test_a_checkpoint_of_a_model_with_a_tower_can_train_it(tmp_path):
    hf_config = {"model_type": "qwen2_vl", "vision_config": {}}
    values = {"model_class": "McaModelConfig", "hf_config": hf_config}
    (tmp_path / "mca_config.json").write_text(json.dumps(values))
    words = [f"model_name_or_path={tmp_path}", "dataset=a.jsonl", f"output_dir={tmp_path / 'out'}"]
    assert not parse_args([*words, "freeze_vision_tower=false"]).freeze_vision_tower


# -- pictures of all kinds


def pixels_of(tmp_path, name: str, **keys) -> dict:
    path = write_records(
        tmp_path / f"{name}.jsonl", {**conversation("<image>", "b"), "images": [name]}
    )
    [[document]] = load(tmp_path, path, **keys)[0].train
    return document


def processed(tmp_path, image) -> torch.Tensor:
    processor = AutoImageProcessor.from_pretrained(tmp_path / "model", backend="pil")
    return processor(images=image, return_tensors="pt")["pixel_values"]


def test_a_rotated_picture_is_upright_and_its_size_is_that(tmp_path):
    draw(tmp_path / "plain.png", 24, 8)
    plain = Image.open(tmp_path / "plain.png")
    for suffix in ("png", "webp", "tif"):
        exif = Image.Exif()
        exif[0x0112] = 6  # a viewer turns it by 90 degrees clockwise
        name = f"turned.{suffix}"
        turned = plain.rotate(90, expand=True)
        turned.save(tmp_path / name, exif=exif, lossless=True)
        document = pixels_of(tmp_path, name)
        assert document["image_grid_thw"].tolist() == [[1, 2, 6]]
        assert document["pixel_values"].equal(processed(tmp_path, plain))


def test_an_orientation_after_the_pixels_does_not_distort_a_picture(tmp_path):
    draw(tmp_path / "plain.png", 24, 8)
    plain = (tmp_path / "plain.png").read_bytes()
    exif = Image.Exif()
    exif[0x0112] = 6
    chunk = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (tmp_path / "late.png").write_bytes(plain[:-12] + chunk + plain[-12:])  # before IEND
    late, early = (pixels_of(tmp_path, name) for name in ("late.png", "plain.png"))
    assert late["image_grid_thw"].tolist() == [[1, 2, 6]]
    assert late["pixel_values"].equal(early["pixel_values"])


def test_transparency_is_white_and_other_modes_are_what_they_show(tmp_path):
    white = Image.new("RGB", (8, 8), "white")
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("LA", (8, 8), (0, 0)).save(tmp_path / "grey.png")
    palette = Image.new("P", (8, 8))
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.save(tmp_path / "palette.png", transparency=0)
    half = Image.new("RGBA", (8, 8), (0, 0, 0, 51))
    half.save(tmp_path / "half.png")  # a fifth black
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "red.jpg", quality=100)
    shown = {"clear.png": white, "grey.png": white, "palette.png": white}
    shown["half.png"] = Image.new("RGB", (8, 8), (204, 204, 204))
    shown["red.jpg"] = Image.new("RGB", (8, 8), "red")
    for name, image in shown.items():
        pixels = pixels_of(tmp_path, name)["pixel_values"]
        # values are 4 * (colour / 255 - 0.5); JPEG rounds by 2 of 255
        torch.testing.assert_close(pixels, processed(tmp_path, image), atol=0.032, rtol=0, msg=name)


def test_the_smallest_picture_and_a_thin_one_take_what_the_processor_says(tmp_path):
    for width, height in ((1, 1), (1, 199), (199, 1), (3, 3)):
        name = draw(tmp_path / f"{width}-{height}.png", width, height)
        document = pixels_of(tmp_path, name)
        right = processed(tmp_path, Image.open(tmp_path / name))
        assert document["pixel_values"].equal(right)
        assert document["image_grid_thw"].prod() == len(right)


GLM4V = dict(image_processor_type="Glm4vImageProcessor", min_pixels=None, max_pixels=None)


def test_glm4v_counts_the_pixels_of_two_frames(tmp_path):
    """Its processor's limits are those of two frames, and the keys' those of a picture."""
    from transformers import Glm4vImageProcessorPil

    tokenizer = picture_tokenizer()
    size = {"shortest_edge": 512, "longest_edge": 2048}
    folder = write_model(tmp_path / "model", tokenizer, "glm4v", **GLM4V, size=size)
    processor = Glm4vImageProcessorPil.from_pretrained(folder)
    for width, height in ((16, 8), (33, 70), (8, 8), (3, 200), (100, 60)):
        picture = Picture(str(tmp_path / draw(tmp_path / f"{width}.png", width, height)))
        right = processor(images=Image.open(picture.path), return_tensors="pt")
        vision = vision_of(folder, tokenizer)
        placed = vision.place(picture, "here")
        assert [list(placed.grid)] == right["image_grid_thw"].tolist()
        assert vision.pixels(placed).equal(right["pixel_values"])
    vision = vision_of(folder, tokenizer, image_max_pixels=256)
    assert vision.place(picture, "here").grid == (1, 2, 4)


# peaks of a process, in KiB, after each of some pictures
PEAKS = """
import resource, sys
from pathlib import Path
from mca_lite.part_pictures_data import Picture
from tests.shared.picture_files import picture_tokenizer, vision_of
folder = Path(sys.argv[1])
vision = vision_of(folder / "model", picture_tokenizer())
for name in sys.argv[2:]:
    vision.pixels(vision.place(Picture(str(folder / name)), name))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.full
def test_a_large_picture_is_in_memory_once(tmp_path):
    write_model(tmp_path / "model", picture_tokenizer())
    names = [draw(tmp_path / "small.png")]
    bytes_of_pixel = {"L": 1, "RGB": 4}  # in Pillow
    for mode in bytes_of_pixel:
        names.append(f"{mode}.png")
        Image.new(mode, (9400, 9400)).save(tmp_path / names[-1], compress_level=1)
    command = [sys.executable, "-c", PEAKS, str(tmp_path), *names]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    small, *peaks = (int(line) / 1024 for line in ended.stdout.split())
    for peak, count in zip(peaks, bytes_of_pixel.values(), strict=True):
        assert peak - small < count * 9400**2 / 2**20 + 40


def test_keys_bound_the_pixels_and_are_read_again(tmp_path):
    name = draw(tmp_path / "a.png", 64, 64)
    sizes = [
        pixels_of(tmp_path, name, **keys)["image_grid_thw"].tolist()
        for keys in (
            {},
            {"image_max_pixels": 256},
            {"image_min_pixels": 8192, "image_max_pixels": 9999},
        )
    ]
    assert sizes == [[[1, 8, 8]], [[1, 4, 4]], [[1, 24, 24]]]
    with pytest.raises(ValueError, match="image_min_pixels: 99\n.*above image_max_pixels, 9"):
        pixels_of(tmp_path, name, image_min_pixels=99, image_max_pixels=9)
    with pytest.raises(ValueError, match="image_min_pixels 5000 is above image_max_pixels 1024"):
        pixels_of(tmp_path, name, image_min_pixels=5000)
    with pytest.raises(ValueError, match="media_dir: 'nowhere'\n.*no folder"):
        pixels_of(tmp_path, name, media_dir="nowhere")


def test_a_picture_that_changed_or_went_is_named_and_not_trained(tmp_path):
    name = draw(tmp_path / "a.png", 16, 8)
    path = write_records(tmp_path / "a.jsonl", {**conversation("<image>", "b"), "images": [name]})
    train = load(tmp_path, path)[0].train
    draw(tmp_path / "a.png", 17, 8, seed=2)
    with pytest.raises(ValueError, match=r"a.jsonl:1: .*a.png: .*overwrite_cache: true"):
        train[0]
    (tmp_path / "a.png").unlink()
    with pytest.raises(ValueError, match=r"a.jsonl:1: .*a.png cannot be read"):
        train[0]
    draw(tmp_path / "big.bmp", 16, 8)
    path = write_records(
        tmp_path / "b.jsonl", {**conversation("<image>", "b"), "images": ["big.bmp"]}
    )
    train = load(tmp_path, path)[0].train
    times = (tmp_path / "big.bmp").stat()
    draw(tmp_path / "big.bmp", 16, 8, seed=3)  # as many bytes, other pixels
    with pytest.raises(ValueError, match=r"b.jsonl:1: .*its file has changed since it was tok"):
        train[0]
    draw(tmp_path / "big.bmp", 8, 16)
    os.utime(tmp_path / "big.bmp", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ValueError, match=r"b.jsonl:1: .*\(1, 4, 2\) patches, and \(1, 2, 4\)"):
        train[0]
    whole = (tmp_path / "big.bmp").read_bytes()
    (tmp_path / "half.bmp").write_bytes(whole[: len(whole) // 2])
    document = {**conversation("<image>", "b"), "images": ["half.bmp"]}
    train = load(tmp_path, write_records(tmp_path / "c.jsonl", document))[0].train
    with pytest.raises(ValueError, match=r"c.jsonl:1: .*half.bmp cannot be read.* truncated"):
        train[0]


# -- templates and masks


def test_placeholders_are_never_targets(tmp_path):
    draw(tmp_path / "a.png")
    content = "see <image> there"
    record = {**conversation(content, content), "images": ["a.png", "a.png"]}
    path = write_records(tmp_path / "a.jsonl", record)
    [[document]], tokenizer = (load(tmp_path, path)[0].train, picture_tokenizer())
    assert trained_text(document, tokenizer) == f"see {TOKENS[0]}{TOKENS[2]} there<|im_end|>"
    [[document]] = load(tmp_path, path, train_on_prompt=True)[0].train
    text = trained_text(document, tokenizer)
    assert text.count("see") == 2 and TOKENS[1] not in text
    assert int((document["input_ids"] == tokenizer.convert_tokens_to_ids(TOKENS[1])).sum()) == 4


def test_a_template_of_texts_writes_the_tokens_of_the_config(tmp_path):
    draw(tmp_path / "a.png")
    path = write_records(
        tmp_path / "a.jsonl", {**conversation("<image>why", "b"), "images": ["a.png"]}
    )
    [[document]] = load(tmp_path, path, template=None, chat_template="chatml")[0].train
    text = picture_tokenizer().decode(document["input_ids"].tolist())
    pads = TOKENS[0] + 2 * TOKENS[1] + TOKENS[2]
    assert text.startswith(f"<|im_start|>user\n{pads}why<|im_end|>\n<|im_start|>assistant\nb")


def test_a_template_that_writes_more_of_a_picture_is_refused(tmp_path):
    draw(tmp_path / "a.png")
    record = {**conversation("<image>", "b"), "images": ["a.png"]}
    record["chat_template_kwargs"] = {"add_vision_id": True}
    path = write_records(tmp_path / "a.jsonl", record)
    with pytest.raises(ValueError, match="a.jsonl:1: .*does not write a picture as"):
        load(tmp_path, path)
    twice = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['content'] }}")
    path = write_records(
        tmp_path / "b.jsonl", {**conversation("<image>", "b"), "images": ["a.png"]}
    )
    with pytest.raises(ValueError, match="b.jsonl:1: "):
        load(tmp_path, path, template=twice)


def test_a_token_of_pictures_in_other_texts_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"the token {TOKENS[1]}"}) + "\n")
    with pytest.raises(ValueError, match=r"a.jsonl:1: the text has 1 tokens .* 0 pictures"):
        load(tmp_path, tmp_path / "a.jsonl", stage="pt")
    tool = {"name": "draw", "description": TOKENS[1]}
    path = write_records(tmp_path / "b.jsonl", {**conversation("a", "b"), "tools": [tool]})
    with pytest.raises(ValueError, match=r"b.jsonl:1: the text has 1 tokens .* 0 pictures"):
        load(tmp_path, path)


def test_samples_of_a_conversation_with_stripped_thinking_have_their_own_pictures(tmp_path):
    draw(tmp_path / "a.png", 8, 8)
    draw(tmp_path / "b.png", 16, 8)
    texts = ("<image>", "<think>\nx\n</think>\n\nc", "<image>?", "<think>\ny\n</think>\n\nd")
    record = {**conversation(*texts), "images": ["a.png", "b.png"]}
    data, _ = load(tmp_path, write_records(tmp_path / "a.jsonl", record), template=QWEN3)
    grids = [document["image_grid_thw"].tolist() for [document] in data.train]
    assert grids == [[[1, 2, 2]], [[1, 2, 2], [1, 2, 4]]]


def test_a_picture_in_thinking_that_the_template_leaves_out_is_refused(tmp_path):
    draw(tmp_path / "a.png")
    draw(tmp_path / "b.png", seed=1)
    texts = ("q", "<think>\n<image>\n</think>\n\nc", "<image>?", "<think>\ny\n</think>\n\nd")
    record = {**conversation(*texts), "images": ["a.png", "b.png"]}
    path = write_records(tmp_path / "a.jsonl", record)
    for keys in ({}, {"train_on_prompt": True}):
        with pytest.raises(ValueError, match="a.jsonl:1: .*leaves out some of 2 pictures"):
            load(tmp_path, path, template=QWEN3, **keys)


# -- cutting


def test_no_length_cuts_a_picture(tmp_path):
    draw(tmp_path / "a.png", 16, 16)  # 4 placeholders
    record = {**conversation("<image>", "x<image>y<image>z"), "images": 3 * ["a.png"]}
    path = write_records(tmp_path / "a.jsonl", record)
    [[whole]], tokenizer = (load(tmp_path, path)[0].train, picture_tokenizer())
    image = tokenizer.convert_tokens_to_ids(TOKENS[1])
    ids = torch.as_tensor(whole["input_ids"])
    lengths = {}
    for cutoff in range(1, len(ids) + 1):
        try:
            data, _ = load(tmp_path, path, cutoff_len=cutoff)
        except ValueError as error:
            assert "no token to train on and were left out" in str(error)
            continue
        [[document]] = data.train
        count = len(document["input_ids"])
        lengths[cutoff] = count
        pictures = len(document.get("image_grid_thw", ()))
        assert ids[:count].equal(torch.as_tensor(document["input_ids"]))
        assert int((ids[:count] == image).sum()) == 4 * pictures
        assert len(document.get("pixel_values", ())) == 16 * pictures
        assert pictures == 3 or "lost pictures, or all of them, to cutoff_len" in str(data.report)
        assert pictures == 3 or "a lower image_max_pixels" in str(data.report)
        last = int(document["labels"][-1])  # its next token, of a picture that is not cut
        assert last not in (image, tokenizer.convert_tokens_to_ids(TOKENS[0]))
        if pictures:
            check(document, {name: whole[name][:count] for name in ("rope_t", "rope_h", "rope_w")})
    # the second picture, with its marks, is 6 tokens, so that 6 lengths end before it
    assert max(list(lengths.values()).count(n) for n in lengths.values()) == 6
    assert min(lengths) == len("<user\n[....]>\n<assistant\nx") - 1 and lengths[len(ids)] == len(
        ids
    )


def pair(question: str, chosen: str, rejected: str, images: list) -> dict:
    return {
        "messages": [user(question)],
        "chosen": assistant(chosen),
        "rejected": assistant(rejected),
        "images": images,
    }


def test_pairs_bring_their_pictures_and_lose_the_first_on_both_sides(tmp_path):
    draw(tmp_path / "a.png", 16, 16)
    draw(tmp_path / "b.png", 16, 8)
    record = pair("a<image>b<image>c", "yes", "not at all", ["a.png", "b.png"])
    path = write_records(tmp_path / "a.jsonl", record)
    [sides], tokenizer = (load(tmp_path, path, stage="dpo")[0].train, picture_tokenizer())
    for document, answer in zip(sides, ("yes", "not at all"), strict=True):
        messages = [user(blocks("a", None, "b", None, "c")), assistant(answer)]
        images = [Image.open(tmp_path / name) for name in ("a.png", "b.png")]
        check(document, expected(tmp_path, tokenizer, messages, images))
    longest = len(sides[1]["input_ids"])
    before = sides[0]["input_ids"].tolist().index(tokenizer.convert_tokens_to_ids(TOKENS[0]))
    for cutoff in range(longest - before - 6, longest - before):  # the beginning is in the picture
        [sides] = load(tmp_path, path, stage="dpo", cutoff_len=cutoff)[0].train
        for document in sides:
            assert document["image_grid_thw"].tolist() == [[1, 2, 4]]
            text = tokenizer.decode(document["input_ids"].tolist())
            assert text.startswith(f"b{TOKENS[0]}{TOKENS[1]}")
    other = pair("<image>", "yes", "no <image>", ["a.png"])
    with pytest.raises(ValueError, match="b.jsonl:1: rejected: 2 <image> marks.* 1 pictures"):
        load(tmp_path, write_records(tmp_path / "b.jsonl", other), stage="dpo")


# -- cache, packs, loaders


def test_the_cache_knows_the_folder_of_relative_paths_and_bad_records_are_left_out(tmp_path):
    grids = []
    for folder, width in (("one", 16), ("two", 24)):
        draw(tmp_path / folder / "a.png", width, 8)
        records = [{**conversation("<image>", f"b{n}"), "images": ["a.png"]} for n in range(12)]
        records[3]["images"] = ["gone.png"]
        path = write_records(tmp_path / folder / "a.jsonl", *records)
        with pytest.raises(ValueError, match="a.jsonl:4: there is no picture"):
            load(tmp_path, path)
        data, _ = load(tmp_path, path, on_bad_record="skip")
        assert len(data.train) == 11 and "a.jsonl:4" in "".join(data.report)
        grids.append(data.train[0][0]["image_grid_thw"].tolist())
    assert grids == [[[1, 2, 4]], [[1, 2, 6]]]
    moved = write_records(tmp_path / "b.jsonl", records[0])
    data, _ = load(tmp_path, moved, media_dir=str(tmp_path / "two"))
    assert data.train[0][0]["image_grid_thw"].tolist() == [[1, 2, 6]]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """A folder of pictures, one beside it, and a snapshot of the hub whose files are links."""
    root = tmp_path_factory.mktemp("places")
    draw(root / "secret.png")
    draw(root / "media" / "in.png")
    (root / "media" / "link.png").symlink_to(root / "secret.png")
    draw(root / "hub" / "blobs" / "1f", format="PNG")
    snapshot = root / "hub" / "snapshots" / "abc"
    (snapshot / "data").mkdir(parents=True)
    (snapshot / "in.png").symlink_to(root / "hub" / "blobs" / "1f")
    (snapshot / "link.png").symlink_to(root / "secret.png")
    return root


@pytest.mark.parametrize(
    "path, is_inside",
    [("{home}/in.png", True), ("file://{home}/in.png", True), ("{up}in.png", True)]
    + [("{root}/secret.png", False), ("file://{root}/secret.png", False)]
    + [("{up}{out}secret.png", False), ("{home}/link.png", False)],
)
@pytest.mark.parametrize("home", ["media", "hub/snapshots/abc"])
def test_with_media_dir_or_data_of_the_hub_pictures_lie_inside(places, path, is_inside, home):
    is_hub = home.startswith("hub")
    up, out = ("../", "../../../") if is_hub else ("", "../")
    keys = {} if is_hub else {"media_dir": str(places / home)}
    path = path.format(home=places / home, root=places, up=up, out=out)
    record = {**conversation("<image>", "b"), "images": [path]}
    of_data = f"{home}/data" if is_hub else "."
    data = write_records(places / of_data / "a.jsonl", record)
    if is_inside:
        assert "pixel_values" in load(places, data, **keys)[0].train[0][0]
        return
    with pytest.raises(ValueError, match="a.jsonl:1: .* lies outside of"):
        load(places, data, **keys)


def test_a_folder_in_a_snapshot_may_be_media_dir_and_other_data_opens_any(places):
    home = places / "hub/snapshots/abc"
    record = {**conversation("<image>", "b"), "images": ["in.png"]}
    data = write_records(places / "b.jsonl", record)
    assert len(load(places, data, media_dir=str(home))[0].train) == 1
    record["images"] = [str(places / "secret.png")]
    assert len(load(places, write_records(places / "c.jsonl", record))[0].train) == 1


def test_pictures_stored_in_one_record_keep_their_order(tmp_path):
    names = [draw(tmp_path / f"{n}.png", 8 * n, 8, seed=n) for n in (1, 2, 3)]
    encoded = [base64.b64encode((tmp_path / name).read_bytes()).decode() for name in names]
    images = [f"data:image/png;base64,{text}" for text in encoded]
    turns = conversation("<image><image><image>", "b")
    paths = [
        write_records(tmp_path / "stored.jsonl", {**turns, "images": images}),
        write_records(tmp_path / "named.jsonl", {**turns, "images": names}),
    ]
    stored, named = load(tmp_path, *paths)[0].train
    assert stored[0]["image_grid_thw"].prod(1).tolist() == [4, 8, 12]
    assert stored[0]["pixel_values"].equal(named[0]["pixel_values"])


def test_packed_rows_and_several_processes_give_the_same_documents(tmp_path):
    records = []
    for n in range(6):
        draw(tmp_path / f"{n}.png", 8 + 8 * n, 8, seed=n)
        images = [f"{n}.png"] * (n % 3)
        records.append({**conversation("<image>" * (n % 3) + "a", "b" * n + "c"), "images": images})
    path = write_records(tmp_path / "a.jsonl", *records)
    plain, _ = load(tmp_path, path)
    packed, _ = load(tmp_path, path, packing=True, cutoff_len=99)
    assert sum(map(len, packed.train)) == 6 and len(packed.train) < 6
    by_length = {len(d["input_ids"]): d for row in packed.train for d in row}
    for [document] in plain.train:
        other = by_length[len(document["input_ids"])]
        assert document.keys() == other.keys()
        check(other, {name: torch.as_tensor(value) for name, value in document.items()})
    plan = BatchPlan(len(packed.train), 1, 1, dp_rank=0, dp_size=1, shuffle=False, seed=0)
    limits = Limits.of(read_json(tmp_path / "model" / "config.json"))
    loaders = [
        make_loader(packed.train, Collator(0), plan, num_epochs=1, num_workers=n) for n in (0, 2)
    ]
    plain_again = pickle.loads(pickle.dumps(plain.train))
    for [document], [other] in zip(plain.train, plain_again, strict=True):
        check(other, {name: torch.as_tensor(value) for name, value in document.items()})
    for batch, other in zip(*loaders, strict=True):
        batch = check_batch(batch, True, limits)
        check(other, batch)


def test_a_rank_without_the_tower_makes_no_pixels(tmp_path):
    draw(tmp_path / "a.png")
    path = write_records(
        tmp_path / "a.jsonl", {**conversation("<image>", "b"), "images": ["a.png"]}
    )
    data, _ = load(tmp_path, path)
    [with_pixels] = data.train[0]
    data.media.is_read = False
    (tmp_path / "a.png").unlink()
    [without] = data.train[0]
    assert with_pixels.keys() - without.keys() == {"pixel_values"}


def test_a_stream_has_the_documents_of_a_data_set(tmp_path):
    draw(tmp_path / "a.png")
    draw(tmp_path / "b.png", 12, 20, seed=1)
    records = [
        {**conversation("<image>one <image>", "yes"), "images": ["a.png", "b.png"]},
        conversation("two", "no"),
        {**conversation("three <image>", "no"), "images": ["b.png"]},
    ]
    path = write_records(tmp_path / "chats.jsonl", *records)
    data = load(tmp_path, path)[0].train
    stream = load(tmp_path, path, streaming=True, disable_shuffling=True)[0].train
    assert stream.has_media
    rows = stream.rows()
    for wanted in data:
        [document], [kept] = wanted, stream.with_inputs(next(rows)[0])
        assert document.keys() == kept.keys()
        assert all(
            torch.equal(torch.as_tensor(document[name]), torch.as_tensor(kept[name]))
            for name in document
        )


def test_rollouts_bring_the_pictures_that_their_tokens_stand_for(tmp_path):
    tokenizer = picture_tokenizer()
    start, image, end = tokenizer.convert_tokens_to_ids(list(TOKENS))
    draw(tmp_path / "a.png")  # 16 x 8: 2 features
    ids = [3, start, image, image, end, 4, 5, 6]
    good = dict(ids=ids, mask=[0] * 6 + [1] * 2, advantages=1.0, images=["a.png"])
    path = write_records(tmp_path / "rollouts.jsonl", good)
    [document] = load(tmp_path, path, stage="policy")[0].train[0]
    assert document["input_ids"].tolist() == ids[:-1]
    assert document["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert document["rope_t"].tolist() == [0, 1, 2, 2, 4, 5, 6]
    [cut] = load(tmp_path, path, stage="policy", cutoff_len=7)[0].train[0]
    assert len(cut["advantage"]) == len(cut["labels"]) == 7 and "pixel_values" in cut
    wrong = {
        "2 tokens <|image_pad|>, and the 2 pictures of images have 4": dict(images=["a.png"] * 2),
        "2 tokens <|image_pad|>, and the 0 pictures of images have 0": dict(images=[]),
        "'mask' has 1 at 2, a token of a picture: expected 0 there": dict(mask=[1] * 8),
        "there is no picture": dict(images=["b.png"]),
    }
    for number, (words, change) in enumerate(wrong.items()):
        path = write_records(tmp_path / f"wrong{number}.jsonl", good | change)
        with pytest.raises(ValueError, match=re.escape(words)):
            load(tmp_path, path, stage="policy")


def test_a_folder_without_a_processor_is_refused(tmp_path):
    draw(tmp_path / "a.png")
    path = write_records(
        tmp_path / "a.jsonl", {**conversation("<image>", "b"), "images": ["a.png"]}
    )
    load(tmp_path, path)
    settings = tmp_path / "model" / "preprocessor_config.json"
    nested = {"image_processor": json.loads(settings.read_text()), "processor_class": "Qwen2VL"}
    [[before]] = load(tmp_path, path)[0].train
    settings.unlink()
    (tmp_path / "model" / "processor_config.json").write_text(json.dumps(nested))
    [[document]] = load(tmp_path, path)[0].train
    assert document["pixel_values"].equal(before["pixel_values"])
    nested["image_processor"]["image_processor_type"] = "CLIPImageProcessor"
    (tmp_path / "model" / "processor_config.json").write_text(json.dumps(nested))
    with pytest.raises(
        ValueError, match="CLIPImageProcessor: expected Qwen2VLImageProcessor or Glm4v"
    ):
        load(tmp_path, path)
    (tmp_path / "model" / "processor_config.json").unlink()
    with pytest.raises(ValueError, match="expected processor_config.json or preprocessor_config"):
        load(tmp_path, path)
    tokenizer = picture_tokenizer()
    for changes, shown in (({"merge_size": 4}, "True, 4, 4"), ({"patch_size": 8}, "True, 2, 8")):
        write_model(tmp_path / "other", tokenizer, **changes)
        with pytest.raises(ValueError, match=rf"\[{shown}\]: expected true, and 2 and 4 as in"):
            _ = vision_of(tmp_path / "other", tokenizer).processor
    with pytest.raises(ValueError, match="vision_start_token_id.* it is another model's"):
        vision_of(tmp_path / "other", byte_tokenizer(TEMPLATE))


def test_pictures_alone_take_pillow(tmp_path, monkeypatch):
    draw(tmp_path / "a.png")
    path = write_records(
        tmp_path / "a.jsonl", {**conversation("<image>", "b"), "images": ["a.png"]}
    )
    text = write_records(tmp_path / "b.jsonl", conversation("a", "b"))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "PIL" else found(n))
    assert len(load(tmp_path, text)[0].train) == 1
    with pytest.raises(ValueError, match=r"a.jsonl:1: pictures take Pillow: pip install 'mca-lite"):
        load(tmp_path, path)
