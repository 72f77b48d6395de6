"""`chat` and `generate` with pictures: the answers of transformers' generate() to the same prompt,
one at a time.
"""

import io
import json
import shutil
import sys

import pytest
import torch
from PIL import Image

from mca_lite import run, tool_generate
from mca_lite.args import parse_args
from mca_lite.files import printable
from mca_lite.tool_generation import load_for_generation
from tests.shared.commands import ended, run_script
from tests.shared.picture_files import TOKENS, draw, save_whole_model

LENGTH = 5
GREEDY = ["--temperature", "0", "--max-new-tokens", str(LENGTH)]
SIZES = {"a.png": (16, 8), "b.png": (8, 8), "c.png": (12, 20)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with tokenizer and image processor in folder/model, pictures beside it."""
    folder = tmp_path_factory.mktemp("pictures")
    save_whole_model(folder / "model")
    shutil.copytree(folder / "model", folder / "trained")
    for seed, (name, size) in enumerate(SIZES.items()):
        draw(folder / name, *size, seed=seed)
    return folder


class Plain:
    """transformers' own classes."""

    def __init__(self, folder):
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        self.model = AutoModelForImageTextToText.from_pretrained(folder / "model")
        self.processor = AutoImageProcessor.from_pretrained(folder / "model", backend="pil")

    def answer(self, messages: list[dict], names: list[str]) -> str:
        """The answer to messages whose texts have <image> for each picture."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        more = {}
        if names:
            images = [Image.open(self.folder / name).convert("RGB") for name in names]
            more = dict(self.processor(images=images, return_tensors="pt"))
            for grid in more["image_grid_thw"]:
                marks = TOKENS[0] + TOKENS[1] * (int(grid.prod()) // 4) + TOKENS[2]
                text = text.replace("<image>", marks, 1)
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        if names:
            image = self.tokenizer.convert_tokens_to_ids(TOKENS[1])
            more["mm_token_type_ids"] = (ids == image).int()
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=LENGTH,
            pad_token_id=end,
            eos_token_id=end,
            **more,
        )
        return self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def records() -> list[tuple[list[dict], list[str]]]:
    """(messages, pictures) of several prompts: one picture, two, none, one before an answer."""

    def user(text: str) -> dict:
        return {"role": "user", "content": text}

    return [
        ([user("<image>one")], ["a.png"]),
        ([user("two <image>, <image>?")], ["b.png", "c.png"]),
        ([user("text alone")], []),
        ([user("<image>more"), {"role": "assistant", "content": "x"}, user("why")], ["c.png"]),
    ]


def write(path, answer: str | None) -> str:
    lines = []
    for messages, names in records():
        last = [] if answer is None else [{"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages + last, "images": names}))
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("kind", ["eval_dataset", "file"])
def test_pictures_of_prompts_are_answered_as_by_transformers(folder, kind):
    file = write(folder / f"{kind}.jsonl", "yes" if kind == "eval_dataset" else None)
    words = [
        f"model_name_or_path={folder}/model",
        f"output_dir={folder}/trained",
        f"cache_dir={folder}/cache",
        "dataset=unused",
        *GREEDY,
    ]
    if kind == "eval_dataset":
        words.append(f"eval_dataset={file}")
    else:
        words += ["--file", file]
    code, _, error = ended(tool_generate.main, words)
    assert code == 0, error
    rows = [json.loads(line) for line in open(folder / "trained" / "generations.jsonl")]
    plain = Plain(folder)
    wanted = [plain.answer(messages, names) for messages, names in records()]
    assert [row["answer"] for row in rows] == wanted
    assert len(set(wanted)) > 1


def test_a_dtype_that_config_json_names_for_the_text_alone_is_the_models(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())  # as the hub's Qwen3-VL
    config["text_config"]["dtype"] = "bfloat16"
    del config["dtype"]
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    assert load_for_generation(tmp_path / "model")[0].dtype == torch.bfloat16
    dataset = write(folder / "noted.jsonl", "yes")
    words = [f"{tmp_path}/model", f"dataset={dataset}", f"output_dir={tmp_path}/out"]
    plan = run.make_plan(parse_args([f"model_name_or_path={words[0]}", *words[1:]]))
    assert "files are in bfloat16, and bf16 is false" in "\n".join(plan.data.report)


def test_a_picture_is_shown_in_a_chat(folder, monkeypatch):
    lines = [f"/image {folder}/a.png", "one", "why", "/new", "/image nowhere.png", "text"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    code, out, error = ended(tool_generate.main_chat, [f"{folder}/model", *GREEDY])
    assert code == 0, error
    plain = Plain(folder)
    first = [{"role": "user", "content": "<image>one"}]
    answer = plain.answer(first, ["a.png"])
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "why"}]
    expected = [answer, plain.answer(second, ["a.png"])]
    expected.append(plain.answer([{"role": "user", "content": "text"}], []))
    shown = [line.rstrip() for line in out.splitlines()]
    assert [line for line in shown if "nowhere.png" not in line] == [
        line.rstrip() for text in expected for line in printable(text).splitlines() or [""]
    ]
    assert "there is no picture" in out


EVALUATED = {
    "pp2": (2, "pipeline_model_parallel_size=2"),
    "torch": (1, "use_mca=false"),
    "tp2_packed": (2, "tensor_model_parallel_size=2 packing=true"),
}


@pytest.mark.parametrize(
    "layout",
    ["pp2", *(pytest.param(name, marks=pytest.mark.full) for name in EVALUATED if name != "pp2")],
)
def test_answers_of_an_evaluation_are_those_of_transformers(folder, layout, tmp_path):
    file = write(folder / f"{layout}.jsonl", "yes")
    ranks, keys = EVALUATED[layout]
    words = (
        f"model_name_or_path={folder}/model eval_dataset={file} output_dir={tmp_path}/out {keys}"
    )
    words += f" do_predict=true do_train=false predict_with_generate=true max_new_tokens={LENGTH}"
    run_script(f"{words} cache_dir={folder}/cache cutoff_len=256", tmp_path, nproc=ranks)
    rows = [json.loads(line) for line in open(tmp_path / "out" / "generations.jsonl")]
    plain = Plain(folder)
    wanted = [plain.answer(messages, names).strip() for messages, names in records()]
    assert [row["answer"] for row in rows] == wanted
