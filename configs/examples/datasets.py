"""The data of a run, without the run: what load_datasets makes of files.

    python configs/examples/datasets.py configs/tiny/model dataset=configs/tiny/sft.jsonl \
        cutoff_len=128 val_size=0.1 cache_dir=output/cache
"""

import sys

from transformers import AutoTokenizer

from mca_lite import DataArguments, load_datasets


def main(words):
    folder, *keys = words
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arguments = DataArguments(**dict(word.split("=", 1) for word in keys))
    data = load_datasets(arguments, "sft", tokenizer, seed=42)
    print("\n".join(data.report))
    for sample in (data.train[0], data.train[len(data.train) - 1]):
        for document in sample:  # a pair of answers would be two
            labels = document["labels"]
            trained = labels[labels != -100].tolist()
            print(f"{len(labels)} tokens, of which are trained: {tokenizer.decode(trained)!r}")
    print(f"{len(data.train)} samples to train on, {len(data.eval)} to evaluate on")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
