"""`mca-lite migrate`: files of other trainers in this package's keys. Those of
tests/shared/foreign_files.py are written for these tests; numbers of defaults are those of axolotl
0.19.0, ms-swift 4.6.0 and TRL 1.16.0.
"""

import re

import pytest

from mca_lite import cli, tool_migrate
from mca_lite.__main__ import main
from mca_lite.args import key_fields, known_keys
from mca_lite.args_values import read_config_file
from mca_lite.errors import ConfigError
from mca_lite.tool_migrate_tables import ROWS
from tests.shared import tiny, world
from tests.shared.foreign_files import FILES
from tests.shared.foreign_keys import AXOLOTL, MS_SWIFT
from tests.shared.small_runs import save_tokenizer, write_data
from tests.shared.training import read_log
from tests.tools import migrated, migration_page


@pytest.fixture
def folder(tmp_path):
    for name, (text, _, _) in FILES.items():
        (tmp_path / name).write_text(text.replace("{folder}", str(tmp_path)))
    return tmp_path


def migrate(path, capsys) -> tuple[int, str, dict]:
    """(exit code, what is written, its keys), which have no problems."""
    code = main(["migrate", str(path)])
    shown = capsys.readouterr().out
    (path.parent / "ours.yaml").write_text(shown)
    values = read_config_file(path.parent / "ours.yaml")
    problems: list = []
    keys, notes = known_keys(values, problems)
    assert (problems, notes) == ([], []) and keys == values
    return code, shown, values


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_ours_with_a_reason_for_every_key_that_goes(folder, name, capsys):
    _, wanted, comments = FILES[name]
    code, shown, values = migrate(folder / name, capsys)
    for word in wanted.replace("{folder}", str(folder)).split():
        key, _, value = word.partition("=")
        given = values[key]
        shown_value = f"[{','.join(given)}]" if isinstance(given, list) else given
        assert (key, shown_value) == (key, value)
    left = re.findall(r"(?m)^# (\S+): .*  -> (.+)$", shown)
    for key, fate in comments.items():
        assert dict(left)[key].startswith(fate)
    assert {key for key, fate in left if not fate.startswith("without")} <= comments.keys()
    has_more_to_do = any(not fate.startswith("without") for _, fate in left)
    assert code == (tool_migrate.LEFT if has_more_to_do else 0)


def test_each_line_names_the_key_that_it_comes_from(folder, capsys):
    _, shown, _ = migrate(folder / "swift.sh", capsys)
    assert "# torchrun --nproc_per_node 4 train.py" in shown
    assert "\ncutoff_len: 4096  # max_length; of prompt and answer together\n" in shown
    assert "\nlora_alpha: 32  # lora_alpha: left out; ms-swift's default\n" in shown
    assert "max_samples: 500, of each set, for org/set alone there" in shown
    _, shown, _ = migrate(folder / "axolotl_lora.yml", capsys)
    assert "set in dataset_info.json: name" in shown


def trained(words: str) -> int:
    return cli.main(words.split())


def test_a_migrated_file_trains(folder, capsys):
    tiny.save_model(folder / "model", "qwen3", vocab_size=100)
    save_tokenizer(folder / "model")
    write_data(folder)
    migrate(folder / "axolotl.yaml", capsys)
    words = f"{folder}/ours.yaml cache_dir={folder}/cache disable_tqdm=true save_strategy=no"
    assert world.run(trained, 1, words) == [0]
    lines = [line for line in read_log(folder / "out") if "loss" in line]
    # the schedule of axolotl is a cosine from the rate given: half of it after one of two steps
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-2, 5e-3])
    assert lines[0]["consumed_samples"] == 4


@pytest.mark.parametrize("name", ["axolotl.yaml", "swift.yaml", "automodel.yaml"])
def test_training_from_another_form_names_the_command_alone(folder, name):
    from mca_lite.args import parse_args

    with pytest.raises(ConfigError, match="python -m mca_lite migrate FILE") as caught:
        parse_args([str(folder / name), "output_dir=x"])
    assert len(caught.value.problems) == 1
    with pytest.raises(ConfigError, match="mca-lite migrate FILE"):
        parse_args([str(folder / "swift.sh")])


@pytest.mark.parametrize(
    "name, text, words",
    (
        ("other.sh", "echo hello", "no command of ms-swift, TRL or mcore_adapter"),
        ("empty.yaml", "", "no keys: expected another trainer's configuration"),
        ("open.sh", "swift sft --model 'a", "expected the end of the quotation that begins in"),
    ),
)
def test_a_file_without_a_command_or_keys_is_refused(folder, capsys, name, text, words):
    (folder / name).write_text(f"{text}\n")
    assert main(["migrate", str(folder / name)]) == cli.USER_ERROR
    assert words in capsys.readouterr().err


def test_an_option_of_a_script_with_an_empty_value_is_left_out(folder):
    script = folder / "empty.sh"
    script.write_text("swift sft --model m --report_to= --system '' --streaming\n")
    _, values, _ = tool_migrate.read(script)
    assert values == {"method": "swift sft", "model": "m", "streaming": "true"}


@pytest.mark.parametrize("form", ROWS)
def test_every_row_names_keys_of_this_package_or_a_reason(form):
    text = ROWS[form]
    rows = [tool_migrate.Row(*found) for found in tool_migrate.ROW.findall(text)]
    assert len(rows) == len([line for line in text.splitlines() if line])
    for row in rows:
        first, *more = row.words.split()
        if first in ("-", "!"):
            assert row.note and not more, row
        elif first == "datasets":
            assert set(more) <= {"dataset", "eval_dataset", "pt"}
        else:
            assert {word.partition("=")[0] for word in (first, *more)} <= key_fields().keys(), row


ARGUMENTS = {"axolotl": AXOLOTL, "ms-swift": MS_SWIFT}


@pytest.mark.parametrize("form", ARGUMENTS)
def test_every_argument_of_the_newest_release_has_a_fate(form):
    keys = [word.partition("=")[0] for word in ARGUMENTS[form].split()]
    assert len(keys) > 350
    method = {"method": "megatron sft"} if form == "ms-swift" else {}
    lines = tool_migrate.migrated(form, dict.fromkeys(keys, "true") | method)
    assert len(lines) >= len(keys)
    assert [line for line in lines if line.fate == "unknown"] == []


@pytest.mark.full
def test_examples_in_a_folder_train_two_steps(tmp_path, capsys):
    kto, grpo = FILES["axolotl_kto.yaml"][0], FILES["swift_grpo.sh"][0]
    (tmp_path / "kto.yaml").write_text(kto.replace("org/model", "Qwen/Qwen3-8B"))
    (tmp_path / "grpo.sh").write_text(grpo)
    command = "python dpo.py --model_name_or_path Qwen/Qwen3-8B \\\n  --dataset_name a"
    (tmp_path / "dpo.py").write_text(f'"""\n{command}\n"""\n')
    assert migrated.main(["--train", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for fate in ("axolotl: trained", "TRL: trained", "ms-swift: another method"):
        assert f"   1  {fate}\n" in shown


def test_the_page_is_written_from_the_tables():
    text = migration_page.PAGE.read_text()
    assert migration_page.page_with_sections(text) == text
    assert all(len(migration_page.section_of(origin).splitlines()) < 45 for origin in ARGUMENTS)
