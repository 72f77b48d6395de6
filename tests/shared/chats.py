"""Conversations in tests: turns and records, files of them, datasets read from files, and the texts
that carry labels.
"""

import json

from mca_lite.args import DataArguments
from mca_lite.data import load_datasets
from mca_lite.files import IGNORE_INDEX
from mca_lite.inputs import TEXT
from mca_lite.part_stream_keys import StreamArguments
from tests.shared.toy_tokenizer import CHATML, byte_tokenizer


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def conversation(*texts: str, system: str | None = None) -> dict:
    """A record of turns by user and assistant, in turn."""
    turns = [(user, assistant)[i % 2](text) for i, text in enumerate(texts)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + turns}


def write_records(path, *records) -> str:
    """Write records as lines of JSON, and texts as lines -> the path as a text."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def write_answers(path, *answers: str) -> str:
    """Write conversations of one question each -> the path as a text."""
    return write_records(path, *(conversation("a", answer) for answer in answers))


def load_files(folder, *dataset, template=CHATML, stage="sft", seed=42, **keys):
    """load_datasets with a token a byte and a cache in `folder`."""
    keys |= {"dataset": list(map(str, dataset)), "cache_dir": str(folder / "cache")}
    return load_by_keys(keys, stage, byte_tokenizer(template), seed)


def load_by_keys(keys: dict, stage: str, tokenizer, seed: int = 42, media=TEXT):
    """load_datasets by the keys of DataArguments and StreamArguments."""
    of_stream = {key: keys[key] for key in ("streaming", "buffer_size") if key in keys}
    of_data = {key: value for key, value in keys.items() if key not in of_stream}
    stream = StreamArguments(**of_stream)
    return load_datasets(DataArguments(**of_data), stage, tokenizer, seed, media, stream)


def trained_texts(tokenizer, dataset) -> list[str]:
    """The text with labels of each sample, which has one document."""
    labels = [document["labels"] for [document] in dataset]
    return [tokenizer.decode(row[row != IGNORE_INDEX].tolist()) for row in labels]


def trained_answers(dataset) -> list[str]:
    """trained_texts of load_files, without the end of the turn."""
    texts = trained_texts(byte_tokenizer(CHATML), dataset)
    return [text.removesuffix("<|im_end|>") for text in texts]
