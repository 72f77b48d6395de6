"""Records that cannot be used and are left out, compressed files, and datasets
of the Hugging Face hub in its cache.
"""

import gzip
import json
import os

import pytest
from huggingface_hub import constants

from mca_lite.args import DataArguments
from mca_lite.data_files import read_records, resolve
from mca_lite.tables import OBJECTIVES
from tests.shared.chats import assistant, load_files, trained_answers, user
from tests.shared.commands import assert_names


def chat_line(answer: str, role="user") -> str:
    return json.dumps({"messages": [user("Hi") | {"role": role}, assistant(answer)]})


def spec_of(entry: str, folder):
    arguments = DataArguments(dataset=[entry], dataset_dir=str(folder))
    [spec] = resolve([entry], arguments, OBJECTIVES["sft"])
    return spec


def test_bad_records_are_left_out_counted_by_reason_and_listed(tmp_path):
    good = [chat_line(f"a{n}") for n in range(120)]
    picture = json.dumps({**json.loads(chat_line("b")), "images": ["x"]})
    bad = ["{", *[chat_line("b", role="alien")] * 9, picture]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join([bad[0], *good[:60], *bad[1:], *good[60:]]))
    with pytest.raises(ValueError, match="a.jsonl:1: not valid JSON"):
        load_files(tmp_path, file)
    bundle = load_files(tmp_path, file, on_bad_record="skip")
    assert trained_answers(bundle.train) == [f"a{n}" for n in range(120)]
    bad = [line for line in bundle.report if "records cannot be used" in line]
    assert_names(bad[1], "  warning: 9 ", "message N", "'alien'", "expected user, assistant")
    for line, place in zip(bad, (1, 62, 71), strict=True):
        assert line.endswith(f" {file}:{place}")
    assert (
        load_files(tmp_path, file, on_bad_record="skip").report == bundle.report
    )  # from the cache


def test_too_many_bad_records_stop_the_run(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join([chat_line("a")] * 8 + [chat_line("b", role="alien")]))
    with pytest.raises(ValueError, match=r"1 of 9 records cannot be used.* 10 %(.|\n)*a.jsonl:9"):
        load_files(tmp_path, file, on_bad_record="skip")


def test_bad_texts_are_left_out_of_joined_rows(tmp_path):
    file = tmp_path / "a.jsonl"
    good = ['{"text": "ab"}'] * 10
    file.write_text("\n".join([*good, *good, '{"body": "x"}', "[5]"]))
    bundle = load_files(tmp_path, file, stage="pt", on_bad_record="skip", cutoff_len=59)
    assert bundle.train.num_tokens == 59 and len(bundle.train) == 1
    bad = [line for line in bundle.report if "1 records cannot be used" in line]
    assert len(bad) == 2 and "expected an object" in bad[1]


# -- files


def test_compressed_files_are_read_as_what_they_hold(tmp_path):
    for name, text in {
        "a.jsonl": '{"n": 1}\n\n{"n": 2}\n',
        "b.json": '[{"n": 1},\n\n{"n": 2}]',
        "c.txt": "one\n\ntwo\n",
    }.items():
        path, packed = tmp_path / name, tmp_path / f"{name}.gz"
        path.write_text(text)
        packed.write_bytes(gzip.compress(text.encode()))
        records = list(read_records(str(path)))
        assert len(records) == 2
        moved = [(place.replace(str(path), str(packed)), value) for place, value in records]
        assert list(read_records(str(packed))) == moved
    assert len(spec_of(str(tmp_path), tmp_path / "data").files) == 6
    (tmp_path / "e.jsonl.gz").write_bytes((tmp_path / "a.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(ValueError, match="e.jsonl.gz: it cannot be decompressed"):
        list(read_records(str(tmp_path / "e.jsonl.gz")))


# -- the hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache as huggingface_hub writes it, with one dataset, and no network."""
    repository = tmp_path / "hub/datasets--some--chats"
    for name, answer in {
        "data/train-00000-of-00002.jsonl": "a",
        "data/train-00001-of-00002.jsonl": "b",
        "data/test-00000-of-00001.jsonl": "c",
        "other/all.jsonl": "d",
    }.items():
        path = repository / "snapshots/0123" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(chat_line(answer))
    (repository / "snapshots/0123/dataset_infos.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_dataset_of_the_hub_is_read_from_its_cache_without_a_network(tmp_path, hub):
    assert trained_answers(load_files(tmp_path, "some/chats").train) == ["a", "b"]
    info = {
        "mine": {"hf_hub_url": "some/chats", "ms_hub_url": "other/name", "split": "test"},
        "folder": {"hf_hub_url": "some/chats", "folder": "other"},
        "subset": {"hf_hub_url": "some/chats", "subset": "data", "file_name": "not used"},
        "half": {"hf_hub_url": "some/chats", "split": "train[:50%]"},
        "gone": {"hf_hub_url": "some/others"},
        "number": {"hf_hub_url": "some/chats", "split": 3},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    for name, wanted in {"mine": ["c"], "folder": ["d"], "subset": ["a", "b"]}.items():
        assert (
            trained_answers(load_files(tmp_path, name, dataset_dir=str(tmp_path)).train) == wanted
        )
    for name, message in {
        "half": r"dataset 'half': some/chats .*'split': 'train\[:50%\]'.*0123",
        "gone": "dataset 'gone': some/others .*hf download some/others.*ms_hub_url and",
        "number": "'split': expected a text, got 3",
    }.items():
        with pytest.raises(ValueError, match=message):
            spec_of(name, tmp_path)


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path, hub):
    with pytest.raises(ValueError, match="expected a file, a folder, or a name in"):
        spec_of(os.path.join("some", "chats.jsonl"), tmp_path)
