"""Whole runs of tiny models in a test's world: data for every stage, a tokenizer, and the command
line's own doors.
"""

import json
from pathlib import Path

from tests.shared import tiny
from tests.shared.toy_tokenizer import CHATML, word_tokenizer
from tests.shared.training import NUMBERS

DATA = {
    "pt": "chat",
    "sft": "chat",
    "dpo": "pairs",
    "kto": "labelled",
    "rm": "pairs",
    "distill": "chat",
}  # {stage: its file of write_data}
# how numbers of the log begin that a run of the same keys repeats
REPEATED = (
    *("loss", "grad_norm", "learning_rate", "consumed", "rewards", "logps", "sft_loss", "mtp_loss"),
    *("kl", "kd_loss", "eval_kl", "eval_kd_loss"),
    *("eval_loss", "eval_rewards/chosen", "eval_rewards/margins", "eval_mtp_loss", *NUMBERS),
)


def save_tokenizer(folder) -> None:
    """word_tokenizer with a chat template whose marks are words."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = CHATML.replace("<|im_", " <|im_").replace("|>", "|> ")
    tokenizer.save_pretrained(folder)


def write_data(folder: Path, chats: int = 12, pairs: int = 12) -> None:
    """chat.jsonl and other.jsonl (conversations, with a text for stage pt), labelled.jsonl and
    pairs.jsonl, all of unequal length.
    """

    def turn(role: str, *numbers: int) -> dict:
        return {"role": role, "content": " " + " ".join(f"w{n % 56}" for n in numbers) + " "}

    def chat(i: int) -> list:
        first = [turn("user", i, i + 1), turn("assistant", *range(i, i + 2 + i % 5))]
        return first + [turn("user", 2 * i), turn("assistant", 3 * i, 5, 4 * i)] * (i % 3)

    for name, start in (("chat", 0), ("other", 30)):
        text = " ".join(f"w{n}" for n in range(30))
        lines = [json.dumps({"messages": chat(start + i), "text": text}) for i in range(chats)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    lines = [{"messages": chat(i), "label": i % 3 > 0} for i in range(chats)]
    (folder / "labelled.jsonl").write_text("\n".join(map(json.dumps, lines)))
    lines = [
        {
            "prompt": [turn("user", i)],
            "chosen": turn("assistant", i, *[7] * (1 + i // 12)),
            "rejected": turn("assistant", 9),
            "trust": 0.5 + i % 3,
        }
        for i in range(pairs)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))


def save_all(folder: Path, family: str, **changes) -> None:
    """A run's files: folder/model, a tiny model with its tokenizer, and those of write_data."""
    tiny.save_model(folder / "model", family, **changes)
    save_tokenizer(folder / "model")
    write_data(folder)


def words_of(keys: dict) -> list[str]:
    """The words of a command line: JSON is YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def train_by_words(keys: dict) -> None:
    """Train as the command line does with `keys`, on this rank; its errors are raised."""
    from mca_lite import run, tool_generation
    from mca_lite.args import parse_args

    run.train(run.make_plan(parse_args(words_of(keys))), [tool_generation.Answers()])


def curve(lines: list[dict]) -> list[dict]:
    """Of the lines of a log, what another run of the same keys has to repeat."""
    return [{k: v for k, v in line.items() if k.startswith(REPEATED)} for line in lines]
