"""Counts the held-out pairs of the embedded example in which a model gives the chosen answer more
than the rejected one.

    python configs/tiny/preference.py MODEL_DIR BEFORE_DIR [heldout_pairs.jsonl]

Both are Hugging Face exports: the model after preference training, and the one that it started
from.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

BATCH_SIZE = 100


def conversation(record: dict, side: str) -> list[dict]:
    return [
        {"role": "user", "content": record["prompt"]},
        {"role": "assistant", "content": record[side]},
    ]


@torch.inference_mode()
def answer_logps(model, tokenizer, conversations: list[list[dict]]) -> torch.Tensor:
    """Returns the log-probability of each conversation's last message, float32 [conversations]."""
    scores = []
    for start in range(0, len(conversations), BATCH_SIZE):
        batch = conversations[start : start + BATCH_SIZE]
        texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in batch]
        prompts = [
            tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
            for messages in batch
        ]
        inputs = tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        ids, mask = inputs["input_ids"], inputs["attention_mask"].clone()
        for row, prompt in enumerate(prompts):
            mask[row, : len(tokenizer(prompt, add_special_tokens=False)["input_ids"])] = 0
        logits = (
            model(input_ids=ids, attention_mask=inputs["attention_mask"]).logits[:, :-1].float()
        )
        of_tokens = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        scores.append((of_tokens * mask[:, 1:]).sum(1))
    return torch.cat(scores)


def count_preferred(model_dir: str, records: list[dict]) -> int:
    """Returns in how many records the model in `model_dir` prefers the chosen answer."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    chosen, rejected = (
        answer_logps(model, tokenizer, [conversation(record, side) for record in records])
        for side in ("chosen", "rejected")
    )
    return int((chosen > rejected).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_dir")
    parser.add_argument("before_dir")
    parser.add_argument("heldout", nargs="?", default=Path(__file__).parent / "heldout_pairs.jsonl")
    args = parser.parse_args()
    logging.disable_progress_bar()

    records = [
        json.loads(line) for line in Path(args.heldout).read_text(encoding="utf-8").splitlines()
    ]
    after, before = (
        count_preferred(folder, records) for folder in (args.model_dir, args.before_dir)
    )
    print(
        f"preference accuracy: {100 * after / len(records):.1f} % ({after} of "
        f"{len(records)} held-out pairs), "
        f"before training: {100 * before / len(records):.1f} %"
    )


if __name__ == "__main__":
    main()
