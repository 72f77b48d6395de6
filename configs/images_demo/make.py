"""Draw the pictures of `make images`, and write the tiny model that learns from them.

python configs/images_demo/make.py [folder]

Each picture has one to five squares of one colour, and the answer is their number and colour.
folder/model gets config.json, tokenizer and image processor, and no weights.
"""

import json
import random
import sys
from pathlib import Path

import transformers
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (235, 205, 40),
    "black": (20, 20, 20),
}
NUMBERS = ("one", "two", "three", "four", "five")
QUESTION = "how many squares and what colour"
ANSWER = "{number} {colour}"
SIDE, CELL = 48, 8  # pixels: a square stands in a cell, one patch of the model
TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
TOKENS += ("<|video_pad|>",)
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %} <|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant "
    "{% endif %}"
)


def draw(rng: random.Random) -> tuple[Image.Image, str]:
    """A picture and its answer."""
    number = rng.randrange(len(NUMBERS))
    colour = rng.choice(list(COLOURS))
    shade = rng.randint(215, 255)
    picture = Image.new("RGB", (SIDE, SIDE), (shade, shade, shade))
    pen = ImageDraw.Draw(picture)
    cells = [(x, y) for x in range(0, SIDE, CELL) for y in range(0, SIDE, CELL)]
    for x, y in rng.sample(cells, number + 1):
        size = rng.randint(CELL - 3, CELL - 1)
        left = x + rng.randint(0, CELL - 1 - size)
        top = y + rng.randint(0, CELL - 1 - size)
        pen.rectangle((left, top, left + size, top + size), fill=COLOURS[colour])
    return picture, ANSWER.format(number=NUMBERS[number], colour=colour)


def write_set(folder: Path, name: str, count: int, seed: int) -> None:
    """folder/<name>.jsonl, a conversation a line, and its pictures."""
    rng = random.Random(seed)
    (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        picture, answer = draw(rng)
        path = f"{name}/{number}.png"
        picture.save(folder / path)
        messages = [
            {"role": "user", "content": f"<image> {QUESTION}"},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages, "images": [path]}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines))


def write_model(folder: Path) -> None:
    """A Qwen2.5-VL of some 200,000 parameters: config, tokenizer, image processor."""
    words = ["<|pad|>", "user", "assistant", *QUESTION.split(), *NUMBERS, *COLOURS]
    vocabulary = {word: number for number, word in enumerate((*words, *TOKENS))}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(TOKENS),
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    text = dict(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=vocabulary["<|im_end|>"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    )
    vision = dict(
        depth=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        out_hidden_size=64,
        patch_size=CELL,
        spatial_merge_size=2,
        window_size=4 * CELL,
        fullatt_block_indexes=[1],
    )
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        vision_start_token_id=vocabulary["<|vision_start|>"],
        image_token_id=vocabulary["<|image_pad|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
        video_token_id=vocabulary["<|video_pad|>"],
    )
    config.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": CELL,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": CELL * CELL,
        "max_pixels": SIDE * SIDE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def main() -> None:
    folder = Path(*sys.argv[1:2] or ["output/images_demo"])
    write_set(folder, "train", 6000, seed=1)
    write_set(folder, "heldout", 200, seed=2)
    write_model(folder / "model")


if __name__ == "__main__":
    main()
