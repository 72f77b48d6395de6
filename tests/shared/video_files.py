"""Records with videos, and a folder of a model for them."""

import json
from pathlib import Path

from tokenizers import AddedToken

from tests.shared.picture_files import PROCESSOR, TOKENS, picture_tokenizer
from tests.shared.toy_tokenizer import byte_tokenizer

VIDEO = "<|video_pad|>"
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
# as the templates of Qwen write a picture and a video
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif c['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM_TOKENS = "begin_of_image image end_of_image begin_of_video video end_of_video".split()
GLM_TEMPLATE = TEMPLATE.replace(
    "<|vision_start|><|image_pad|><|vision_end|>", "<|begin_of_image|><|image|><|end_of_image|>"
).replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<|begin_of_video|><|video|><|end_of_video|>"
)
KEYS = dict(
    image_min_pixels=None,
    image_max_pixels=None,
    media_dir=None,
    video_fps=2.0,
    video_maxlen=8,
    video_min_pixels=64,
    video_max_pixels=1024,
)
TURNS = ("what is <image> and <video>(?", "so <video> again")


def video_tokenizer(template: str = TEMPLATE):
    """A token a byte, and one for each token of pictures and videos."""
    tokenizer = picture_tokenizer(template)
    tokenizer.add_tokens([AddedToken(VIDEO, special=True, normalized=False)])
    return tokenizer


def glm_tokenizer():
    """The same with the tokens of GLM-4V."""
    tokenizer = byte_tokenizer(GLM_TEMPLATE)
    tokens = [AddedToken(f"<|{t}|>", special=True, normalized=False) for t in GLM_TOKENS]
    tokenizer.add_tokens(tokens)
    return tokenizer


def write_glm_model(folder: Path, tokenizer) -> Path:
    """Write a folder of GLM-4V without weights."""
    names = "image_start image image_end video_start video video_end".split()
    ids = tokenizer.convert_tokens_to_ids([f"<|{t}|>" for t in GLM_TOKENS])
    ids = dict(zip((f"{name}_token_id" for name in names), ids, strict=True))
    write_video_model(folder, tokenizer, "glm4v", ids)
    values = {k: v for k, v in PROCESSOR.items() if k not in ("min_pixels", "max_pixels")}
    values |= {"image_processor_type": "Glm4vImageProcessor"}
    values |= {"size": {"shortest_edge": 128, "longest_edge": 2048}}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    return folder


def token_ids(tokenizer) -> dict[str, int]:
    """The keys of a config.json for the tokens."""
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    ids = tokenizer.convert_tokens_to_ids([*TOKENS, VIDEO])
    return dict(zip(names, ids, strict=True))


def write_processors(folder: Path, family: str, patch: int = 4, **changes) -> None:
    """Write the settings of both processors, that of videos as the family has it."""
    values = {**PROCESSOR, "patch_size": patch}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    if family.startswith("qwen3"):
        values |= {"size": {"shortest_edge": 1024, "longest_edge": 4096}}
        values = {k: v for k, v in values.items() if k not in ("min_pixels", "max_pixels")}
        values["video_processor_type"] = "Qwen3VLVideoProcessor"
        (folder / "video_preprocessor_config.json").write_text(json.dumps({**values, **changes}))


def write_video_model(folder: Path, tokenizer, family: str, ids: dict | None = None) -> Path:
    """Write a model's folder without weights. ids: keys of config.json for the tokens."""
    from tests.shared import pictures

    config = pictures.hf_config(family, vocab_size=len(tokenizer)).to_dict()
    config |= ids or token_ids(tokenizer)
    config["vision_config"]["patch_size"] = 4
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_processors(folder, family)
    return folder


def chat() -> list[dict]:
    """The conversation of TURNS as blocks."""
    kinds = {"<image>": {"type": "image"}, "<video>": {"type": "video"}}
    messages = []
    for turn in TURNS:
        for mark in kinds:
            turn = turn.replace(mark, f"|{mark}|")
        pieces = [kinds.get(p, {"type": "text", "text": p}) for p in turn.split("|") if p]
        messages += [dict(role="user", content=pieces), dict(role="assistant", content="yes")]
    return messages


def columns_of(vision, tokenizer, folder: Path, values: list) -> tuple[list[int], dict]:
    """(token ids, columns) of TURNS with a picture and two videos, through all steps of data."""
    messages = []
    for turn in TURNS:
        messages += [dict(role="user", content=turn), dict(role="assistant", content="yes")]
    picture, *videos = values
    videos = [
        [str(v) for v in video] if isinstance(video, list) else str(video) for video in videos
    ]
    record = {"images": [picture], "videos": videos}
    of_columns = vision.of_columns(record, {})
    items = vision.take(messages, of_columns, False, f"{folder / 'a.jsonl'}:1")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    vision.check_rendered(text, messages)

    def render(turns):
        return tokenizer.apply_chat_template(turns, tokenize=False)

    vision.check_template(tokenizer.chat_template, render, messages)
    import numpy as np

    placed = vision.placed(text, items, "a.jsonl:1")
    stored = vision.store(folder)
    start, stop = stored.end, stored.add(placed)
    assert vision.store(folder).read(start, stop) == list(placed)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    document = vision.expand(np.array(ids, dtype=np.int32), placed)
    tokens = np.maximum(document, ~document).astype(np.int64)
    for name in ("pictures.jsonl", "pictures.bin"):
        (folder / name).unlink()
    return tokens.tolist(), vision.columns(tokens, placed)


def save_whole_model(folder: Path, family: str):
    """Save a tiny model with random weights, its tokenizer and processors -> the tokenizer."""
    import torch
    from transformers import AutoModelForImageTextToText

    from tests.shared import pictures

    tokenizer = video_tokenizer()
    config = pictures.hf_config(family, vocab_size=len(tokenizer), max_position_embeddings=512)
    for name, number in token_ids(tokenizer).items():
        setattr(config, name, number)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    write_processors(folder, family, config.vision_config.patch_size)
    tokenizer.save_pretrained(folder)
    return tokenizer
