"""Cards of models (tests/tools/cards.py), of small ones on a CPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.tools import cards

ROOT = cards.FOLDER.parents[1]


def lines_of(*words: str) -> dict[str, dict]:
    """{part: what a card says of it} of a model of a few layers."""
    command = [sys.executable, "-m", "tests.tools.cards", *words]
    keys = dict(os.environ, TINY="1", OUT="")
    found = subprocess.run(command, cwd=ROOT, env=keys, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    return {line["part"]: line for line in lines}


def check(lines: dict[str, dict]) -> None:
    come_back = lines["round trip"]
    assert come_back["tensors"] > 30
    assert not come_back["wrong"] + come_back["missing"]
    for part in "resume", "resume, LoRA":
        if part in lines:
            assert lines[part]["same_bits"]
    for part in "training", "LoRA":
        if part in lines:
            assert lines[part]["losses"][-1] < lines[part]["losses"][0]
    if "log-probabilities" in lines:
        ours, theirs = (lines["log-probabilities"][f"{x}, bf16"] for x in trainers)
        assert ours[0] <= 1.1 * theirs[0]


trainers = "mca_lite", "transformers"


@pytest.mark.full
def test_a_card_finds_its_tensors_again():
    check(lines_of("gpt-oss-20b", "round trip", "resume, LoRA"))


@pytest.mark.full
@pytest.mark.parametrize("model", cards.SHAPES)
def test_a_small_card_of_each_model(model):
    check(lines_of(model))


def test_a_page_of_a_card_has_a_row_for_each_part():
    page = cards.page("Qwen3-8B", {"resume": dict(layers=2, same_bits=True, seconds=1.5)})
    assert "| resume | layers 2; same bits True; seconds 1.5 |" in page


def test_further_words_replace_rows_of_a_page_and_keep_the_rest():
    first = cards.page("Qwen3-8B", {"training": dict(layers=10), "resume": dict(failed="no room")})
    again = cards.page("Qwen3-8B", {"resume": dict(layers=2)}, first)
    assert again == first.replace("failed no room", "layers 2")
    elsewhere = first.replace("; torch ", " 2; torch ")  # of another device
    row = next(line for line in first.splitlines() if "; torch " in line).rstrip(".")
    again = cards.page("Qwen3-8B", {"resume": dict(layers=2)}, elsewhere)
    assert f"| resume | layers 2; {row} |" in again
    assert "| training | layers 10 |" in again
