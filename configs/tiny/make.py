"""Writes the embedded example beside this file: a tiny Qwen3-style model directory and a few small
data sets.

    python configs/tiny/make.py [directory]

The task is to rewrite dates: "Write 7 March 1999 as an ISO date." -> "1999-03-07". The model starts
from random weights (train_from_scratch: true), so no weights are written. Everything is seeded: a
second run writes the same bytes.

The preference pairs are about dates that can be read in two ways: of 03 04 1999, 1999-04-03 is
chosen (the day comes first) and 1999-03-04 rejected. Nothing in the other data says which one is
meant.
"""

import calendar
import datetime
import json
import random
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20240229
NUM_TRAIN, NUM_HELDOUT, NUM_DOCUMENTS = 4000, 200, 500
NUM_PAIRS, NUM_HELDOUT_PAIRS = 2000, 200
VOCAB_SIZE = 512
ONE_DAY = datetime.timedelta(days=1)
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": True,
}

# What stands between the generation marks is what the assistant says: the text that carries the
# loss.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}"
    "{{- message['content'] + '<|im_end|>' -}}"
    "{%- endif -%}"
    "{{- '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

REQUESTS = (
    "Write {} as an ISO date.",
    "What is {} as an ISO date?",
    "Please give me the ISO date of {}.",
    "{} in ISO form?",
    "Convert {} to ISO.",
    "ISO date: {}",
)


def spellings(date: datetime.date) -> list[str]:
    """The ways in which people write a date."""
    month = calendar.month_name[date.month]
    return [
        f"{date.day} {month} {date.year}",
        f"{month} {date.day}, {date.year}",
        f"{date.day} {month[:3]} {date.year}",
        f"{date.day}. {month}, {date.year}",
    ]


def turn(date: datetime.date, rng: random.Random) -> list[dict]:
    question = rng.choice(REQUESTS).format(rng.choice(spellings(date)))
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": date.isoformat()},
    ]


def document(date: datetime.date, rng: random.Random) -> str:
    """A few sentences about one day, for pre-training."""
    names = spellings(date)
    rng.shuffle(names)
    tomorrow = date + ONE_DAY
    return (
        f"{names[0]} was a {calendar.day_name[date.weekday()]}. As an ISO date it is "
        f"{date.isoformat()}. "
        f"The day after {names[1]} was {tomorrow.isoformat()}, a "
        f"{calendar.day_name[tomorrow.weekday()]}. "
        f"{calendar.month_name[date.month]} {date.year} had "
        f"{calendar.monthrange(date.year, date.month)[1]} days."
    )


def make_data() -> tuple[list[dict], list[dict], list[dict]]:
    """Returns the records of sft, heldout and pt; no date of heldout occurs in the other two."""
    rng = random.Random(SEED)
    first, last = datetime.date(1900, 1, 1).toordinal(), datetime.date(2099, 12, 31).toordinal()
    days = rng.sample(range(first, last), NUM_HELDOUT + 2 * NUM_TRAIN + 2 * NUM_DOCUMENTS)
    dates = [datetime.date.fromordinal(day) for day in days]
    hidden = {dates[-1 - index] for index in range(NUM_HELDOUT)}
    heldout = [{"messages": turn(dates.pop(), rng)} for _ in range(NUM_HELDOUT)]
    sft = []
    for index in range(NUM_TRAIN):
        messages = turn(dates.pop(), rng)
        if (
            index % 10 == 0
        ):  # some conversations of two turns, so that the mask has to find both answers
            messages += turn(dates.pop(), rng)
        sft.append({"messages": messages})
    told = [
        date for date in dates if date + ONE_DAY not in hidden
    ]  # a document names the next day too
    return sft, heldout, [{"text": document(date, rng)} for date in told[:NUM_DOCUMENTS]]


def make_pairs() -> tuple[list[dict], list[dict]]:
    """Returns the preference records of training and of heldout, which have no date in common."""
    rng = random.Random(SEED + 1)
    ambiguous = [
        (d, m, y) for d in range(1, 13) for m in range(1, 13) for y in range(1900, 2100) if d != m
    ]
    records = []
    for day, month, year in rng.sample(ambiguous, NUM_PAIRS + NUM_HELDOUT_PAIRS):
        question = rng.choice(REQUESTS).format(f"{day:02} {month:02} {year}")
        chosen, rejected = f"{year}-{month:02}-{day:02}", f"{year}-{day:02}-{month:02}"
        records.append({"prompt": question, "chosen": chosen, "rejected": rejected})
    return records[NUM_HELDOUT_PAIRS:], records[:NUM_HELDOUT_PAIRS]


def labelled(pairs: list[dict]) -> list[dict]:
    """Returns one answer of each pair with its label: the chosen one of every second pair."""
    sides = [("chosen", "rejected")[number % 2] for number in range(len(pairs))]
    return [
        {"prompt": pair["prompt"], "response": pair[side], "label": side == "chosen"}
        for pair, side in zip(pairs, sides, strict=True)
    ]


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """Returns a byte-level BPE tokenizer like Qwen's: any text can be encoded, and each digit is
    one token.
    """
    tokenizer = Tokenizer(models.BPE())
    words = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    return tokenizer


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )


def main(directory: Path) -> None:
    sft, heldout, pt = make_data()
    directory.mkdir(parents=True, exist_ok=True)
    write_lines(directory / "sft.jsonl", sft)
    write_lines(directory / "heldout.jsonl", heldout)
    write_lines(directory / "pt.jsonl", pt)
    pairs, heldout_pairs = make_pairs()
    write_lines(directory / "pairs.jsonl", pairs)
    write_lines(directory / "heldout_pairs.jsonl", heldout_pairs)
    write_lines(directory / "answers.jsonl", labelled(pairs))
    write_lines(directory / "heldout_answers.jsonl", labelled(heldout_pairs))

    roles = [
        "system\n",
        "user\n",
        "assistant\n",
    ]  # as they stand in the template: each becomes one token
    texts = (
        roles
        + [m["content"] for record in sft for m in record["messages"]]
        + [record["text"] for record in pt]
    )
    tokenizer = make_tokenizer(texts)
    write_model(directory / "model", CONFIG, tokenizer)
    write_model(directory / "student", {**CONFIG, "num_hidden_layers": 2}, tokenizer)


def write_model(folder: Path, config: dict, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tokenizer.json", json.loads(tokenizer.to_str()))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_json(folder / "config.json", config)
    stop = {
        "bos_token_id": 0,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "do_sample": False,
        "max_new_tokens": 32,
    }
    write_json(folder / "generation_config.json", stop)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
