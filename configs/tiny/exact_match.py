"""Asks a trained model the held-out prompts of the embedded example and counts the answers that are
exactly right.

    python configs/tiny/exact_match.py MODEL_DIR [heldout.jsonl]

MODEL_DIR is a Hugging Face export; decoding is greedy. The same prompts go to the architecture with
random weights too.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

BATCH_SIZE, MAX_NEW_TOKENS = 100, 16


@torch.inference_mode()
def count_matches(model, tokenizer, records: list[dict]) -> int:
    """Returns for how many of `records` (messages) the model's answer to the first prompt is the
    record's own.
    """
    matches = 0
    for start in range(0, len(records), BATCH_SIZE):
        batch = [record["messages"] for record in records[start : start + BATCH_SIZE]]
        prompts = [
            tokenizer.apply_chat_template(m[:1], tokenize=False, add_generation_prompt=True)
            for m in batch
        ]
        # Padding on the left: generation continues where the row ends.
        inputs = tokenizer(
            prompts,
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        )
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
        answers = tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        matches += sum(
            answer.strip() == m[1]["content"] for answer, m in zip(answers, batch, strict=True)
        )
    return matches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_dir")
    parser.add_argument("heldout", nargs="?", default=Path(__file__).parent / "heldout.jsonl")
    args = parser.parse_args()
    logging.disable_progress_bar()

    records = [
        json.loads(line) for line in Path(args.heldout).read_text(encoding="utf-8").splitlines()
    ]
    tokenizer = AutoTokenizer.from_pretrained(args.model_dir)
    trained = AutoModelForCausalLM.from_pretrained(args.model_dir, dtype=torch.float32).eval()
    torch.manual_seed(0)
    untrained = (
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model_dir)).float().eval()
    )

    after, before = (count_matches(model, tokenizer, records) for model in (trained, untrained))
    print(
        f"exact match: {100 * after / len(records):.1f} % ({after} of {len(records)} "
        "held-out prompts), "
        f"before training: {100 * before / len(records):.1f} %"
    )


if __name__ == "__main__":
    main()
