"""Pages and code agree: built-in chat templates, callbacks' events and flags, words of other
trainers. And tables have short cells.
"""

import re

import pytest
from transformers import TrainerCallback as TheirCallback

from mca_lite import parts
from mca_lite.callbacks import FLAGS, TrainerCallback, TrainerState
from mca_lite.tables import BUILT_IN_FOR, TEMPLATES
from tests.shared.commands import ROOT
from tests.shared.toy_tokenizer import word_tokenizer


def rows(page: str, heading: str = "") -> list[list[str]]:
    """The cells of the page's tables, or of those below a heading, without their headers."""
    text = (ROOT / "configs" / page).read_text()
    if heading:
        text = text.split(f"\n## {heading}")[1].split("\n## ")[0]
    text = re.sub(r"^\|.*\|\n\| --- .*\n", "", text, flags=re.MULTILINE)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


FOLDERS = (ROOT, ROOT / "configs", ROOT / "mca_lite", ROOT / "tests")
WRITTEN = [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]
LARGEST = {"README.md": 11_000, "CHANGELOG.md": 100_000}  # bytes; a log grows


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_cell_of_a_table_is_longer_than_250_characters(page):
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for line in lines for cell in re.split(r"(?<!\\)\|", line)]
    assert not [cell for cell in cells if len(cell) > 250]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_answers_one_question_and_is_read_in_a_sitting(page):
    largest = LARGEST.get(str(page.relative_to(ROOT)), 20_000)
    assert page.stat().st_size <= largest, "cut it in two by its reader's question"


def test_every_template_stands_on_its_page_with_its_names_and_what_it_writes():
    turns = [("system", "S"), ("user", "Q"), ("assistant", "A")]
    turns = [{"role": role, "content": content} for role, content in turns]
    tokenizer = word_tokenizer()
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    wanted = []
    parts.load("_migration")  # other trainers' names of templates
    for ours, template in TEMPLATES.items():
        theirs = ", ".join(f"`{name}`" for name, own in BUILT_IN_FOR.items() if own == ours)
        text = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
        text = text.replace("\n", "\\n").replace("|", "\\|")
        wanted.append([f"`{ours}`", theirs, f"`{text}`"])
    assert rows("TEMPLATES.md") == wanted


def test_every_event_of_a_callback_stands_on_its_page_as_its_docstring_says():
    own = {name: hook for name, hook in vars(TrainerCallback).items() if name.startswith("on_")}
    wanted = [[f"`{name}`", " ".join(hook.__doc__.split())] for name, hook in own.items()]
    assert rows("CALLBACKS.md", "Events") == wanted
    theirs = {name for name in vars(TheirCallback) if name.startswith("on_")}
    never = re.findall(r"Never called: (.+?), since", (ROOT / "configs/CALLBACKS.md").read_text())
    assert {f"`{name}`" for name in theirs - own.keys()} == set(never[0].split(", "))


def test_every_flag_and_state_of_callbacks_stands_on_their_page():
    assert [flag for flag, _ in rows("CALLBACKS.md", "Flags")] == [f"`{flag}`" for flag in FLAGS]
    named = [re.findall(r"`(\w+)`", cells[0]) for cells in rows("CALLBACKS.md", "State")]
    assert {name for names in named for name in names} == set(TrainerState.__dataclass_fields__)


def test_the_page_for_those_who_move_in_has_two_columns_for_each_of_five_origins():
    text = (ROOT / "configs/MIGRATION.md").read_text()
    headings = re.findall(r"^## From (.+)$", text, re.MULTILINE)
    others = ["LLaMA-Factory", "Hugging Face's Trainer", "TRL"]
    assert headings == ["axolotl", "ms-swift", *others]
    for heading in headings:
        found = rows("MIGRATION.md", f"From {heading}")
        assert len(found) > 5 and all(len(cells) == 2 and all(cells) for cells in found)
