"""Videos of conversations: their frames, tokens, pixels and positions, and models that train on
them, against transformers' own classes. tests/tools/video_oracle.py compares with its processors,
which need torchvision, and reads files with PyAV.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

from mca_lite import part_video
from mca_lite.args import parse_args
from mca_lite.part_pictures_data import ROPE_COLUMNS, Vision
from mca_lite.part_video import VideoVision, sampled
from mca_lite.run import make_plan
from tests.shared import pictures, video_files
from tests.shared.cells import asked_for, cell, shared_worlds
from tests.shared.chats import conversation, write_records
from tests.shared.commands import error_of, run_script
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.frozen import by_keys, by_pattern
from tests.shared.layouts import PACKED, TWO_ROWS, VISION
from tests.shared.picture_files import draw, vision_of
from tests.shared.training import assert_same_curve, read_log
from tests.shared.video_files import VIDEO, columns_of, video_tokenizer, write_video_model

# -- which frames


def test_frames_are_those_of_llama_factory():
    # a video of 10 s and 30 frames a second; a second has at least one
    assert sampled(300, 10.0, 2.0, 128) == [int(299 * i / 19) for i in range(20)]
    assert sampled(300, 10.0, 2.0, 4) == [0, 99, 199, 299]
    assert sampled(300, 0.3, 2.0, 128) == [0]
    assert sampled(3, 10.0, 2.0, 128) == [0, 1, 2]


# -- tokens, pixels, positions


@pytest.fixture(scope="module")
def frames(tmp_path_factory) -> tuple[Path, list[str], str]:
    """(folder, frames, a picture), whose sides are multiples of 8."""
    folder = tmp_path_factory.mktemp("frames")
    names = [draw(folder / "film" / f"{n}.png", 32, 24, seed=n) for n in range(5)]
    return folder, [f"film/{name}" for name in names], draw(folder / "picture.png", 16, 24)


def video_vision(folder: Path, family: str, **keys) -> VideoVision:
    tokenizer = video_tokenizer()
    write_video_model(folder, tokenizer, family)
    config = pictures.hf_config(family).to_dict() | json.loads((folder / "config.json").read_text())
    keys = SimpleNamespace(**{**video_files.KEYS, "video_max_pixels": 1024, **keys})
    return VideoVision.of(folder, config, tokenizer, keys)


def glm_vision(folder: Path):
    tokenizer = video_files.glm_tokenizer()
    video_files.write_glm_model(folder, tokenizer)
    config = json.loads((folder / "config.json").read_text())
    keys = SimpleNamespace(**video_files.KEYS)
    return VideoVision.of(folder, config, tokenizer, keys), tokenizer


def test_a_video_of_glm4v_has_the_tokens_and_pixels_of_transformers(frames, tmp_path):
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
    from transformers.video_utils import VideoMetadata

    folder, names, picture = frames
    vision, tokenizer = glm_vision(tmp_path)
    ids, columns = columns_of(vision, tokenizer, folder, [picture, names[:4], names])
    image = "<|image|>"
    processor = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2), image_token=image)
    processor.replace_frame_token_id = lambda seconds, num_image_tokens: (
        Glm4vProcessor.replace_frame_token_id(processor, seconds, num_image_tokens)
    )
    texts = []
    for shown in ([0, 1, 2, 3], [0, 1, 2, 3, 4, 4]):
        grid = torch.tensor([[len(shown) // 2, 6, 8]])
        told = VideoMetadata(total_num_frames=5, fps=2.0, frames_indices=shown)
        inputs = {"video_grid_thw": grid, "video_metadata": [told]}
        text = Glm4vProcessor.replace_video_token(processor, inputs, 0)
        texts.append(f"<|begin_of_video|>{text}<|end_of_video|>")
    assert texts[1].endswith("<|end_of_image|>2<|end_of_video|>")
    a_picture = f"<|begin_of_image|>{image * 6}<|end_of_image|>"
    turns = [f"what is {a_picture} and {texts[0]}(?", f"so {texts[1]} again"]
    text = "".join(
        f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        for turn in turns
    )
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    wanted = pixels_of(folder, tmp_path, [*names[:4], *names, names[-1]])
    got = columns["pixel_values"]
    torch.testing.assert_close(got[24:], wanted, atol=1e-6, rtol=0)
    assert columns["image_grid_thw"].tolist() == [[1, 6, 4], *[[1, 6, 8]] * 5]
    # transformers' positions: of pictures or videos, which a document may have there
    kinds = vision.kinds_of(np.array(ids))
    assert kinds == ["image"] * 6 + ["video"] * 60
    types = iter({"image": 1, "video": 2}[kind] for kind in kinds)
    row = torch.tensor([ids])
    types = torch.tensor([[next(types) if i in vision.token_ids else 0 for i in ids]])
    grids = torch.tensor([[1, 6, 4]]), torch.tensor([[2, 6, 8], [3, 6, 8]])
    config = AutoConfig.for_model(**json.loads((tmp_path / "config.json").read_text()))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    positions = model.get_rope_index(row, types, *grids)[0][:, 0]
    assert torch.equal(torch.stack([columns[name] for name in ROPE_COLUMNS]), positions)


def test_a_video_of_glm4v_is_cut_whole(frames, tmp_path):
    folder, names, picture = frames
    vision, tokenizer = glm_vision(tmp_path)
    start, end = tokenizer.convert_tokens_to_ids(["<|begin_of_video|>", "<|end_of_video|>"])
    video = vision.read_input("video", names, folder, "a.jsonl:1", None)
    ids = tokenizer(f"ab{vision.text_of(video)}cd", add_special_tokens=False)["input_ids"]
    placed = vision.placed(tokenizer.decode(ids), [video], "a.jsonl:1")
    document = vision.expand(np.array(ids, dtype=np.int32), placed)
    whole, kept = vision.fit(document, placed, 0, len(document) - 3)
    assert whole == slice(0, 2) and kept == []
    whole, kept = vision.fit(document, placed, 0, len(document) - 2)
    assert len(kept) == 1 and document[whole][-1] == end and start in ids
    # a pair's answer without a video beside one with it
    assert vision.fit(np.arange(9, dtype=np.int32), [], 0, 4) == (slice(0, 4), [])


def pixels_of(folder: Path, model: Path, names: list[str]) -> torch.Tensor:
    """Pixel values of frames by transformers' processor of pictures, which repeats each."""
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    found = []
    for name in names:
        picture = Image.open(folder / name)
        values = processor(images=picture, do_resize=False, return_tensors="pt")["pixel_values"]
        found.append(values.view(-1, 3, 2, 16)[:, :, 0])
    pairs = zip(found[::2], found[1::2], strict=True)
    return torch.cat([torch.stack(pair, dim=2).flatten(1) for pair in pairs])


@pytest.mark.parametrize("family", video_files.FAMILIES)
def test_a_video_of_frames_has_the_tokens_pixels_and_positions_of_transformers(
    frames, family, tmp_path
):
    folder, names, picture = frames
    vision = video_vision(tmp_path, family)
    tokenizer = video_tokenizer()
    ids, columns = columns_of(vision, tokenizer, folder, [picture, names[:4], names])
    start, image, end = (f"<|{name}|>" for name in ("vision_start", "image_pad", "vision_end"))
    piece = f"{start}{VIDEO * 12}{end}"
    if "qwen3" in family:  # frames at 0, 0.5, 1, ... seconds; the fifth is there twice
        short = f"{start}<0.2 seconds>{piece}<1.2 seconds>{piece}{end}"
        long = f"{short[: -len(end)]}<2.0 seconds>{piece}{end}"
    else:
        short, long = (f"{start}{VIDEO * 12 * times}{end}" for times in (2, 3))
    turns = [f"what is {start}{image * 6}{end} and {short}(?", f"so {long} again"]
    text = "".join(
        f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        for turn in turns
    )
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    wanted = pixels_of(folder, tmp_path, [*names[:4], *names, names[-1]])
    torch.testing.assert_close(columns["pixel_values_videos"], wanted, atol=1e-6, rtol=0)
    assert columns["video_grid_thw"].tolist() == [[2, 6, 8], [3, 6, 8]]
    assert columns["image_grid_thw"].tolist() == [[1, 6, 4]]
    got = torch.stack([columns[name] for name in ROPE_COLUMNS])
    assert torch.equal(got, positions_of(family, vision, ids, columns))


def positions_of(family: str, vision, ids: list[int], columns: dict) -> torch.Tensor:
    """Positions [3, n] by transformers' model."""
    config = AutoConfig.for_model(**json.loads((vision.folder / "config.json").read_text()))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    ids = torch.tensor([ids])
    of_picture, of_video = vision.token_ids
    types = (ids == of_picture).int() + 2 * (ids == of_video).int()
    grids = columns["image_grid_thw"], columns["video_grid_thw"]
    times = {k: v for k, v in columns.items() if k == "second_per_grid_ts"}
    assert bool(times) == (family == "qwen2_5_vl")
    return model.get_rope_index(ids, types, *grids, **times)[0][:, 0]


def test_frames_are_resized_as_pictures_are(frames, tmp_path):
    """Torch's bicubic resizing, of which transformers' processors of videos make use, and Pillow's
    differ by rounding.
    """
    folder, names, picture = frames
    vision = video_vision(tmp_path, "qwen2_vl", video_max_pixels=400)
    ids, columns = columns_of(vision, video_tokenizer(), folder, [picture, names[:2], names[:2]])
    assert columns["video_grid_thw"].tolist() == [[1, 4, 4]] * 2
    small = [Image.open(folder / name).resize((16, 16), 3) for name in names[:2]]
    for number, image in enumerate(small):
        image.save(tmp_path / f"{number}.png")
    wanted = pixels_of(tmp_path, tmp_path, ["0.png", "1.png"])
    level = 1 / 255 / 0.25  # of a channel, in the processor's numbers
    assert (columns["pixel_values_videos"][:16] - wanted).abs().max() < 2.5 * level


SPELLINGS = {
    "a list of one": {"videos": [["film/0.png", "film/1.png"]], "text": "<video>what?"},
    "a single one": {"video": ["film/0.png", "film/1.png"], "text": "<video>what?"},
    "dicts": {"videos": [[{"path": "film/0.png"}, {"path": "film/1.png"}]], "text": "<video>what?"},
    "a folder": {"videos": ["two"], "text": "<video>what?"},
    "a folder alone": {"videos": "two", "text": "<video>what?"},
    "a block": {
        "text": [
            {"type": "video", "video": ["film/0.png", "film/1.png"]},
            {"type": "text", "text": "what?"},
        ]
    },
    "a block of the column": {
        "videos": [["film/0.png", "film/1.png"]],
        "text": [{"type": "video"}, {"type": "text", "text": "what?"}],
    },
}


def test_frames_of_a_folder_are_in_the_order_of_their_numbers(tmp_path):
    vision = video_vision(tmp_path / "model", "qwen2_vl", video_maxlen=99)
    for n in (10, 9, 1, 2):
        draw(tmp_path / "film" / f"frame{n}.png", 16, 8, seed=n)
    video = vision.read_input("video", "film", tmp_path, "a.jsonl:1", None)
    assert [Path(frame.path).stem[5:] for frame in video.frames] == ["1", "2", "9", "10"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(a model with weights, its tokenizer, folder of frames)"""
    folder = tmp_path_factory.mktemp("whole")
    for n in range(4):
        draw(folder / "film" / f"{n}.png", 16, 8, seed=n)
        if n < 2:
            draw(folder / "two" / f"{n}.png", 16, 8, seed=n)
    draw(folder / "picture.png", 8, 8)
    return folder, video_files.save_whole_model(folder / "model", "qwen3_vl")


def words_of(folder: Path, data, out: Path, *more: str) -> list[str]:
    return [
        f"model_name_or_path={folder / 'model'}",
        f"dataset={data}",
        f"media_dir={folder}",
        f"output_dir={out}",
        f"cache_dir={out}",
        "max_steps=1",
        "cutoff_len=128",
        "video_min_pixels=16",
        *more,
    ]


@pytest.mark.parametrize("name", SPELLINGS)
def test_records_spell_a_video_in_many_ways(whole, tmp_path, name):
    folder, _ = whole
    record = dict(SPELLINGS[name])
    data = write_records(
        tmp_path / "a.jsonl", {**conversation(record.pop("text"), "yes"), **record}
    )
    plan = make_plan(parse_args(words_of(folder, data, tmp_path, "video_fps=1")))
    [document] = plan.data.train[0]
    # 16 x 8 pixels in patches of 2, four of which are a token, and two frames at 0 and 1 seconds
    assert document["video_grid_thw"].tolist() == [[1, 4, 8]]
    text = "".join(plan.data.report)
    assert f"<|vision_start|><0.5 seconds><|vision_start|>{VIDEO} x 8<|vision_end|>" in text


def test_keys_choose_frames_and_their_sizes(whole, tmp_path):
    folder, _ = whole
    data = write_records(tmp_path / "a.jsonl", {**conversation("<video>", "b"), "videos": ["film"]})
    keys = "video_fps=4 video_maxlen=3 video_max_pixels=64"
    plan = make_plan(parse_args(words_of(folder, data, tmp_path, *keys.split())))
    assert plan.data.media.keys == (4, 3, 16, 64)
    [document] = plan.data.train[0]
    assert document["video_grid_thw"].tolist() == [[2, 2, 4]]  # 4 x 8 pixels of 8 x 16
    assert "<0.1 seconds>" in "".join(plan.data.report)
    said = error_of(lambda: parse_args(words_of(folder, data, tmp_path, "video_max_pixels=9")))
    assert "video_min_pixels: 16" in said and "above video_max_pixels, 9" in said


@pytest.mark.parametrize(
    "record, said",
    [
        ({"videos": ["gone.mp4"]}, "there is no picture .*gone.mp4"),
        ({"videos": [[]]}, "a video has 0 frames, of sizes unknown"),
        ({"videos": [3]}, "a picture: expected a path, bytes or a data: URL, got 3"),
        ({"videos": ["http://a/b.mp4"]}, "nothing is fetched over the network"),
        (
            {"videos": [["film/0.png", "picture.png"]]},
            "a video has 2 frames, of sizes {.*: expected frames of one size",
        ),
        ({"videos": ["film", "film"]}, "1 <video> marks, .* and 2 videos in the column videos"),
        ({"images": ["picture.png"]}, "0 <image> marks, or .* and 1 pictures"),
        (
            {"text": [{"type": "video", "video": "film", "fps": 1}]},
            "a block has fps, without effect",
        ),
        ({"audios": ["a.wav"], "videos": ["film"]}, "does not read the column 'audios'"),
        ({"videos": ["film"], "text": f"<video> and {VIDEO}"}, r"a text has .*video_pad"),
        ({"videos": ["film"], "text": "<video> and <audio>"}, "the text has <audio>"),
        ({"videos": ["a.mp4"]}, r"video files take PyAV: pip install 'mca-lite\[video\]'"),
    ],
)
def test_a_record_that_cannot_be_is_refused(whole, tmp_path, monkeypatch, record, said):
    folder, _ = whole
    (folder / "a.mp4").touch()
    found = importlib_find_spec()
    monkeypatch.setattr(
        part_video.importlib.util, "find_spec", lambda name: name != "av" and found(name)
    )
    record = {"text": "<video>what?", **record}
    data = write_records(tmp_path / "a.jsonl", {**conversation(record.pop("text"), "b"), **record})
    error = error_of(lambda: make_plan(parse_args(words_of(folder, data, tmp_path))))
    assert re.search(said, error), error


def importlib_find_spec():
    import importlib.util

    return importlib.util.find_spec


def test_a_sample_ends_before_a_video_that_does_not_fit(whole, tmp_path):
    folder, _ = whole
    record = {
        "messages": [
            *conversation("what?", "yes")["messages"],
            *conversation("<video>and now?", "no")["messages"],
        ],
        "videos": ["film"],
    }
    data = write_records(tmp_path / "a.jsonl", record)
    plan = make_plan(parse_args(words_of(folder, data, tmp_path, "cutoff_len=80")))
    [document] = plan.data.train[0]
    tokens = plan.tokenizer.decode(document["input_ids"].tolist())
    assert tokens.endswith("<|im_start|>user") and "video_grid_thw" not in document
    assert "1 samples lost pictures" in "".join(plan.data.report)


def test_models_without_videos_read_pictures_as_before(tmp_path):
    tokenizer = video_tokenizer()
    write_video_model(tmp_path, tokenizer, "qwen2_vl")
    config = json.loads((tmp_path / "config.json").read_text())
    config["video_token_id"] = config["vision_end_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(vision_of(tmp_path, tokenizer)) is Vision


# -- a run


@torch.no_grad()
def answer_loss(folder: Path, tokenizer, model, names: list[str], answer: str) -> torch.Tensor:
    """Losses of the answer's tokens, by transformers' model."""
    start, end = "<|vision_start|>", "<|vision_end|>"
    times = [(2 * n + 0.5) / 2 for n in range(len(names) // 2)]
    frames = "".join(f"<{time:.1f} seconds>{start}{VIDEO * 8}{end}" for time in times)
    content = f"{start}{frames}{end}what?" if names else "what?"
    prompt = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    texts = (f"{prompt}{answer}<|im_end|>", prompt)
    ids, before = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    ids = torch.tensor([ids])
    columns = {}
    if names:
        processor = AutoImageProcessor.from_pretrained(folder / "model", backend="pil")
        values = [
            processor(images=Image.open(folder / name), do_resize=False, return_tensors="pt")
            for name in names
        ]
        halves = [each["pixel_values"].view(-1, 3, 2, 4)[:, :, 0] for each in values]
        pairs = zip(halves[::2], halves[1::2], strict=True)
        columns["pixel_values_videos"] = torch.cat([torch.stack(p, 2).flatten(1) for p in pairs])
        columns["video_grid_thw"] = torch.tensor([[len(times), 4, 8]])
    types = 2 * (ids == tokenizer.convert_tokens_to_ids(VIDEO)).int()
    logits = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **columns).logits[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    return losses[len(before) - 1 :]


RUNS = {
    "tp2_packed": (2, "tensor_model_parallel_size=2 packing=true global_batch_size=2"),
    "torch": (1, "use_mca=false global_batch_size=3 per_device_train_batch_size=3"),
}


@pytest.mark.parametrize("layout", RUNS)
def test_the_first_loss_of_a_run_is_that_of_transformers(whole, tmp_path, layout):
    folder, tokenizer = whole
    film = [f"film/{n}.png" for n in range(4)]
    records = [(film, "yes"), ([], "no"), (film[2:], "maybe")]
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    data = write_records(
        tmp_path / "a.jsonl",
        *(
            {
                **conversation("<video>" * bool(names) + "what?", answer),
                "videos": [names] * bool(names),
            }
            for names, answer in records
        ),
    )
    losses = [answer_loss(folder, tokenizer, model, *record) for record in records]
    ranks, more = RUNS[layout]
    words = words_of(folder, data, tmp_path / "out", *more.split(), "logging_steps=1")
    run_script(" ".join([*words, "save_strategy=no"]), tmp_path, nproc=ranks)
    [line] = read_log(tmp_path / "out")
    count = line["loss"]
    assert count == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_pairs_have_the_log_probabilities_of_transformers(whole, tmp_path):
    folder, tokenizer = whole
    film = [f"film/{n}.png" for n in range(4)]
    records = [(film, "yes", "no"), ([], "no", "maybe"), (film[2:], "maybe", "y")]
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    data = write_records(
        tmp_path / "a.jsonl",
        *(
            {
                "messages": [dict(role="user", content="<video>" * bool(names) + "what?")],
                **{side: dict(role="assistant", content=answer) for side, answer in pair.items()},
                "videos": [names] * bool(names),
            }
            for names, *both in records
            for pair in [dict(zip(("chosen", "rejected"), both, strict=True))]
        ),
    )
    words = words_of(folder, data, tmp_path / "out", "stage=dpo", "pipeline_model_parallel_size=2")
    words += ["logging_steps=1", "global_batch_size=3", "save_strategy=no"]
    run_script(" ".join(words), tmp_path, nproc=2)
    [line] = read_log(tmp_path / "out")
    for number, side in enumerate(("chosen", "rejected"), 1):
        sums = [-answer_loss(folder, tokenizer, model, r[0], r[number]).sum() for r in records]
        wanted = torch.stack(sums).mean().item()
        assert line[f"logps/{side}"] == pytest.approx(wanted, rel=1e-5)


# -- answers


def test_answers_about_pictures_and_videos_are_those_of_transformers(frames, tmp_path):
    from mca_lite.tool_generation import Decoding, continuations, pictures_before

    folder, names, picture = frames
    tokenizer = video_files.save_whole_model(tmp_path, "qwen2_5_vl")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    keys = SimpleNamespace(**{**video_files.KEYS, "video_fps": 0.5})
    vision = VideoVision.of(tmp_path, model.config.to_dict(), tokenizer, keys)
    rows, seen, alone = [], [], []
    for record in {"images": [picture]}, {"videos": [names]}, {"videos": [names[:2]]}:
        messages = [dict(role="user", content="<image>" if "images" in record else "so <video>")]
        record = {
            k: [str(v) if isinstance(v, str) else list(v) for v in x] for k, x in record.items()
        }
        items = vision.take(messages, vision.of_columns(record, {}), False, f"{folder}/a.jsonl:1")
        ids, columns = vision.prompt(tokenizer.encode(messages[0]["content"]), items, "a")
        document = {**columns, "labels": ids}
        assert pictures_before(document, ids, model).keys() == columns.keys()
        assert pictures_before(document, ids[:2], model) == {}
        rows.append(ids)
        seen.append(columns)
        row = torch.tensor([ids])
        of_picture, of_video = vision.token_ids
        types = (row == of_picture).int() + 2 * (row == of_video).int()
        more = dict(mm_token_type_ids=types, max_new_tokens=6, do_sample=False, eos_token_id=None)
        alone.append(model.generate(row, **columns, **more)[0, len(ids) :].tolist())
    assert seen[1]["second_per_grid_ts"].tolist() == [4.0]
    got = continuations(model, rows, [], Decoding(6, temperature=0.0), pictures=seen)
    assert got == alone


# -- training in every layout

# the first micro-batch of two has a video and the second none, or each some; step 2 has none
SHAPES = [
    [(3, (2, 2, 2), 5), (7, (1, 3), 4), (9,), (6,)],
    [((3, 1, 2), 4), (3, (2, 1), 2, (5, 1, 1), 5), (2, (2, 2, 1), (1, 2, 2), 6), (8,)],
    [(7,), (5,), (11,), (9,)],
    [(5,), (6, (2, 2, 2), 3), (4, (3, 1, 1), 3, (1, 1), 4), (5, (2, 2), 3)],
    [(4, (2, 2), (2, 2, 1), 3), (9,), (3, (1, 2, 1), 4), (2, (2, 1, 3), 5)],
]
FAMILIES = list(pictures.FAMILIES)
LAYOUTS = {
    **VISION,
    "torch": (1, {"backend": "torch", **TWO_ROWS}),
    "torch_packed": (1, {"backend": "torch", **PACKED}),
}
FROZEN = dict(freeze_vision_tower=True, freeze_multi_modal_projector=True)
CASES = {family: (family, {}) for family in FAMILIES}
CASES |= {f"{family}-frozen": (family, FROZEN) for family in ("qwen2_5_vl", "qwen3_vl")}
FEW = [*((case, "tp2_sp_packed") for case in CASES if "moe" not in case), ("qwen2_5_vl", "torch")]
FEW += [(pictures.HEARS, "tp2_sp_packed"), (pictures.GLM, "torch")]


def cannot_be(case: str, layout: str) -> bool:
    """True for a cell that the package refuses, as it does with pictures."""
    return (
        (case.startswith(("qwen3_vl", "qwen3_omni")) and layout == "pp2_vpp2")
        or ("moe" in case and layout in ("tp2", "tp2pp2"))
        or ("moe" not in case and layout == "ep2")
        or (case.startswith("qwen3_5") and layout == "torch_packed")
    )


CELLS = [
    cell(case, layout, full=(case, layout) not in FEW)
    for case in CASES
    for layout in LAYOUTS
    if not cannot_be(case, layout)
]


def data_of(family: str) -> list[dict]:
    shapes = SHAPES
    if family == pictures.HEARS:  # some with audio, before a video or behind it
        shapes = [[(*first, 20.0, 3), (8.0, *second), *rest] for first, second, *rest in SHAPES]
    if family == pictures.GLM:  # transformers takes pictures or videos there
        shapes = [[of_one_kind(pieces) for pieces in step] for step in SHAPES]
    return pictures.samples(shapes=shapes, **pictures.of_videos(family))


def of_one_kind(pieces: tuple) -> tuple:
    """The pieces of a document, without its pictures if it has videos."""
    sizes = [len(piece) for piece in pieces if isinstance(piece, tuple)]
    return tuple(p for p in pieces if not isinstance(p, tuple) or len(p) == max(sizes))


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: pictures.save_model(folder / name, name) for name in FAMILIES}


@pytest.fixture(scope="module")
def wanted(request, paths, tmp_path_factory):
    """transformers' models in plain torch: ({case: curve}, folder of what they became)"""
    out = tmp_path_factory.mktemp("plain")
    curves = {}
    for case in asked_for(request):
        family, frozen = CASES[case]
        adapt = by_pattern("language_model|lm_head" if frozen else ".")
        data = data_of(family)
        curves[case] = pictures.train_plain(paths[family], str(out / case), adapt, data=data)
    return curves, out


def train_video(path: str, out: str, family: str, keys: dict, **more) -> list:
    return pictures.train_ours(path, out, adapt=by_keys(keys), data=data_of(family), **more)


@pytest.fixture(scope="module")
def trained(request, paths, tmp_path_factory):
    open_keys = dict.fromkeys(FROZEN, False)

    def of(case: str):
        family, frozen = CASES[case]
        return (paths[family], family, {**open_keys, **frozen}), {}

    return shared_worlds(request, tmp_path_factory, LAYOUTS, of, run=train_video)


@pytest.mark.parametrize("case, layout", CELLS)
def test_a_family_trains_on_videos_as_transformers_does(case, layout, wanted, trained):
    (curves, folder), (ranks, out) = wanted, trained(layout)
    for got in ranks:
        assert_same_curve(got[case], curves[case])
    assert_same_tensors(tensors(out / case), tensors(folder / case))
