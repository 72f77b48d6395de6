"""cutoff_rule: proportion cuts prompts and answers as LLaMA-Factory does. A token is a byte."""

import functools

import numpy as np
import pytest

from mca_lite.data_chat import kept_of_turn
from tests.shared.chats import conversation, load_files, write_records
from tests.shared.commands import assert_names

PROPORTION = dict(cutoff_rule="proportion")


def infer_seqlen(source_len: int, target_len: int, cutoff_len: int) -> tuple[int, int]:
    """LLaMA-Factory 0.9.5, data/processor/processor_utils.py, as it stands there."""
    if target_len * 2 < cutoff_len:  # truncate source
        max_target_len = cutoff_len
    elif source_len * 2 < cutoff_len:  # truncate target
        max_target_len = cutoff_len - source_len
    else:  # truncate both
        max_target_len = int(cutoff_len * (target_len / (source_len + target_len)))

    new_target_len = min(max_target_len, target_len)
    max_source_len = max(cutoff_len - new_target_len, 0)
    new_source_len = min(max_source_len, source_len)
    return new_source_len, new_target_len


def test_lengths_are_those_of_llama_factory():
    lengths = [*range(1, 40), 99, 1000, 12345]
    for limit in (1, 2, 3, 7, 16, 33, 100, 2048):
        for prompt in (0, *lengths):
            for answer in lengths:
                wanted = infer_seqlen(prompt, answer, limit)
                assert kept_of_turn(prompt, answer, limit) == wanted, (prompt, answer, limit)


def unshifted(document) -> list[tuple[int, bool]]:
    """[(token, whether it is trained)] of a document with shifted labels."""
    labels = document["labels"]
    tokens = np.append(document["input_ids"], labels[-1:])
    trained = np.append(False, labels != -100)
    pairs = list(zip(tokens.tolist(), trained.tolist(), strict=True))
    return pairs if trained[-1] else pairs[:-1]


def cut(document: list, limit: int) -> list:
    """A document turn by turn, as SupervisedDatasetProcessor._encode_data_example goes."""
    turns = [([], [])]
    for token, is_trained in document:
        if not is_trained and turns[-1][1]:
            turns.append(([], []))
        turns[-1][is_trained].append((token, is_trained))
    kept = []
    for source, target in turns:
        if len(kept) >= limit:
            break
        source_len, target_len = infer_seqlen(len(source), len(target), limit - len(kept))
        kept += source[:source_len] + target[:target_len]
    return kept


TALKS = [
    conversation("q" * 30, "abcdefghij"),
    conversation("q", "a" * 90),
    conversation("q" * 200, "b" * 100),
    conversation("q" * 20, "a" * 20, "r" * 40, "b" * 30, "s", "c" * 50),
]


@pytest.mark.parametrize("limit", [40, 60, 101])
def test_conversations_are_cut_turn_by_turn(tmp_path, limit):
    file = write_records(tmp_path / "a.jsonl", *TALKS)
    load = functools.partial(load_files, tmp_path, file)
    whole = load(cutoff_len=4096).train
    bundle = load(cutoff_len=limit - 1, **PROPORTION)
    for [document], [of_whole] in zip(bundle.train, whole, strict=True):
        wanted = cut(unshifted(of_whole), limit)
        got = unshifted(document)
        assert got[: len(wanted)] == wanted[: len(got)]
        # an untrained last token is a target of nothing, and no input either
        assert len(wanted) - len(got) in (0, 1) and not any(t for _, t in wanted[len(got) :])
    [line] = [line for line in bundle.report if "warning" in line]
    assert_names(line, f"cutoff_len {limit - 1}", "in proportion")


def test_pairs_are_cut_by_the_longer_answer(tmp_path):
    record = {"prompt": "p" * 60, "chosen": "c" * 40, "rejected": "r" * 10}
    file = write_records(tmp_path / "a.jsonl", record)
    load = functools.partial(load_files, tmp_path, file, stage="dpo")
    wholes = [unshifted(document) for document in load(cutoff_len=4096).train[0]]
    pair = [unshifted(document) for document in load(cutoff_len=59, **PROPORTION).train[0]]
    prompt = [is_trained for _, is_trained in wholes[0]].index(True)
    longest = len(wholes[0]) + 1  # with the newline behind the answer, which is no target
    source_len, target_len = infer_seqlen(prompt, longest - prompt, 60)
    assert source_len < prompt and target_len < 40
    for whole, got in zip(wholes, pair, strict=True):
        wanted = whole[:source_len] + whole[prompt : prompt + target_len]
        assert got == wanted[: len(got)] and len(wanted) - len(got) in (0, 1)
