"""Several datasets in one epoch, as LLaMA-Factory's mix_strategy has them; text files by line or as
a whole.
"""

import numpy as np
import pytest

from mca_lite.data_batches import Turns
from mca_lite.errors import ConfigError
from tests.shared.chats import load_files, trained_answers, write_answers
from tests.shared.toy_tokenizer import byte_tokenizer

SHARES = [0.7, 0.2, 0.1]
# What the documentation of Hugging Face's datasets prints for interleave_datasets, of datasets that
# count from 0, 10 and 20, with seed 42: (their lengths, our strategy, probabilities) -> the order
DOCUMENTED = [
    ((3, 3, 3), "interleave_under", SHARES, [10, 0, 11, 1, 2]),
    (
        (3, 3, 3),
        "interleave_over",
        SHARES,
        [10, 0, 11, 1, 2, 20, 12, 10, 0, 1, 2, 21, 0, 11, 1, 2, 0, 1, 12, 2, 10, 0, 22],
    ),
    ((3, 4, 5), "interleave_under", None, [0, 10, 20, 1, 11, 21, 2, 12, 22]),
    ((3, 4, 5), "interleave_over", None, [0, 10, 20, 1, 11, 21, 2, 12, 22, 0, 13, 23, 1, 10, 24]),
]


def write_counting(folder, lengths) -> list[str]:
    """Write files of conversations whose answers count from 0, from 10, from 20, ..."""
    return [
        write_answers(
            folder / f"set-{number}.jsonl", *(str(10 * number + i) for i in range(length))
        )
        for number, length in enumerate(lengths)
    ]


def trained_numbers(dataset) -> list[int]:
    return list(map(int, trained_answers(dataset)))


@pytest.mark.parametrize("lengths, strategy, shares, wanted", DOCUMENTED)
def test_interleaving_is_what_the_documentation_of_datasets_prints(
    tmp_path, lengths, strategy, shares, wanted
):
    files = write_counting(tmp_path, lengths)
    bundle = load_files(tmp_path, *files, mix_strategy=strategy, mix_weights=shares)
    assert trained_numbers(bundle.train) == wanted
    share = f"mix: {strategy}: {sum(n < 10 for n in wanted)} samples an epoch from the 3 of dataset"
    assert f"{share} 1" in bundle.report


def interleaved(lengths, shares, seed, strategy) -> list[int]:
    """The documented meaning, the long way round: all draws first, then what each of them takes."""
    draws = np.random.default_rng(seed)
    drawn = [int(k) for _ in range(9) for k in draws.choice(len(lengths), size=1000, p=shares)]
    order, taken = [], [0] * len(lengths)
    for k in drawn:
        if strategy == "interleave_once" and taken[k] == lengths[k]:
            continue
        order.append(10 * k + taken[k] % lengths[k])
        taken[k] += 1
        used_up = [taken[i] >= length for i, length in enumerate(lengths)]
        if any(used_up) if strategy == "interleave_under" else all(used_up):
            return order
    raise AssertionError("more draws are needed")


@pytest.mark.parametrize("strategy", ["interleave_under", "interleave_over", "interleave_once"])
@pytest.mark.parametrize("seed", [1, 2])
def test_draws_follow_the_weights_and_the_seed(tmp_path, strategy, seed):
    files = write_counting(tmp_path, (3, 9, 5))
    shares = [0.5, 0.3, 0.2]
    weights = [5.0, 3.0, 2.0]  # relative: they need not sum to one
    bundle = load_files(tmp_path, *files, mix_strategy=strategy, mix_weights=weights, seed=seed)
    assert trained_numbers(bundle.train) == interleaved((3, 9, 5), shares, seed, strategy)


def test_a_rate_too_small_for_one_block_of_draws_goes_on_with_the_next(tmp_path):
    files, weights = write_counting(tmp_path, (3, 3)), [0.9995, 0.0005]
    order = trained_numbers(
        load_files(tmp_path, *files, mix_strategy="interleave_over", mix_weights=weights).train
    )
    assert len(order) > 1000 and order == interleaved((3, 3), weights, 42, "interleave_over")


def test_once_takes_every_sample_once_in_turns(tmp_path):
    bundle = load_files(
        tmp_path, *write_counting(tmp_path, (1, 4, 2)), mix_strategy="interleave_once"
    )
    assert trained_numbers(bundle.train) == [0, 10, 20, 11, 21, 12, 13]


def test_turns_go_on_where_they_were():
    whole = Turns(2, "interleave_over", [0.5, 0.5], seed=3)
    first = [next(iter(whole)) for _ in range(1500)]
    rest = [next(iter(whole)) for _ in range(50)]
    again = Turns(2, "interleave_over", [0.5, 0.5], seed=3, taken=1500)
    assert [next(iter(again)) for _ in range(50)] == rest and whole.taken == 1550
    assert 600 < sum(first) < 900


def test_what_is_split_off_for_evaluation_is_not_interleaved(tmp_path):
    files = write_counting(tmp_path, (3, 9))
    bundle = load_files(tmp_path, *files, mix_strategy="interleave_over", val_size=4)
    held = trained_numbers(bundle.eval)
    assert len(held) == len(set(held)) == 4
    assert set(trained_numbers(bundle.train)) == {0, 1, 2, *range(10, 19)} - set(held)
    with pytest.raises(ConfigError, match="it leaves no sample of a dataset to mix"):
        load_files(
            tmp_path, *write_counting(tmp_path, (1, 9)), mix_strategy="interleave_over", val_size=9
        )


# -- text files


def test_a_text_file_is_a_document_a_line_or_as_a_whole(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("ab\n\ncd\n")
    (texts / "b.txt").write_text("e")
    found = {}
    for sample_by in ("line", "document"):
        keys = dict(stage="pt", packing=False, sample_by=sample_by)
        bundle = load_files(tmp_path, texts, **keys)
        tokenizer = byte_tokenizer()
        found[sample_by] = [tokenizer.decode(d["input_ids"].tolist()) for [d] in bundle.train]
    assert found == {"line": ["ab", "cd", "e"], "document": ["ab\n\ncd", "e"]}


def test_a_text_file_that_cannot_be_read_is_left_out_as_a_whole(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(10):
        (texts / f"{number}.txt").write_text("" if number == 3 else "ab\ncd")
    (texts / "bad.txt").write_bytes(b"ab\n\xff")
    keys = dict(stage="pt", packing=False, sample_by="document")
    with pytest.raises(ValueError, match="bad.txt:1: expected UTF-8"):
        load_files(tmp_path, texts, **keys)
    bundle = load_files(tmp_path, texts, on_bad_record="skip", **keys)
    assert len(bundle.train) == 9
    assert any("1 records cannot be used" in line for line in bundle.report)
