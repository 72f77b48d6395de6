"""The token cache, datasets, mixing, collating, the order of micro-batches. Tokens are bytes,
counted by hand.
"""

import copy
import errno
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mca_lite import data, data_encode, data_files
from mca_lite.args import DataArguments
from mca_lite.data import load_datasets, show_document
from mca_lite.data_batches import (
    FILLER,
    BatchPlan,
    Collator,
    Limits,
    check_batch,
    make_loader,
    samples_of,
)
from mca_lite.data_encode import Encoder
from mca_lite.data_files import build_once
from mca_lite.files import IGNORE_INDEX
from mca_lite.part_dpo import WithReference
from mca_lite.trainer import McaTrainer
from tests.shared.chats import load_by_keys, trained_texts, write_answers
from tests.shared.commands import assert_names

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = len(
    "SuserNaENSassistantN"
)  # tokens of <|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE(vocab={piece: number for number, piece in enumerate(alphabet)}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t in ("</s>", "<|im_start|>", "<|im_end|>")
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MCA_LITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data_files, "POLL_S", 0.01)


def load_stage(tokenizer, stage, *dataset, seed=42, **options):
    return load_by_keys({"dataset": list(dataset), **options}, stage, tokenizer, seed)


# --------------------------------------------------------------------------------------------------
# ----------- sft, pt


def test_sft_samples_are_shifted_and_only_the_answer_has_labels(tokenizer, tmp_path):
    bundle = load_stage(tokenizer, "sft", write_answers(tmp_path / "a.jsonl", "bc", "d"))
    [sample] = bundle.train[0]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    b, c = tokenizer.convert_tokens_to_ids(["b", "c"])
    # inputs end with <|im_end|>, whose target, the newline, is not trained
    assert sample["labels"].tolist() == [IGNORE_INDEX] * (QUESTION - 1) + [b, c, end, IGNORE_INDEX]
    assert sample["input_ids"][-3:].tolist() == [b, c, end]
    assert sample["input_ids"].dtype == np.int64
    assert bundle.train.lengths.tolist() == [QUESTION + 3, QUESTION + 2]
    assert (bundle.train.num_tokens, bundle.train.num_trained_tokens) == (2 * QUESTION + 5, 3 + 2)
    assert f"{tmp_path}/a.jsonl: openai records" in bundle.report
    assert any("assistant\\n«bc<|im_end|>»'" in line for line in bundle.report)


def test_samples_too_long_or_without_labels_are_counted_with_the_first_place(tokenizer, tmp_path):
    file = write_answers(tmp_path / "a.jsonl", "bc", "bcdefgh", "b" * 99)
    bundle = load_stage(tokenizer, "sft", file, cutoff_len=QUESTION + 3)
    assert trained_texts(tokenizer, bundle.train) == ["bc<|im_end|>", "bcde", "bbbb"]
    [line] = [line for line in bundle.report if "warning" in line]
    assert_names(line, "2 samples", f"cutoff_len {QUESTION + 3}", f"{file}:2")
    with pytest.raises(ValueError, match=r"no sample is left(.|\n)*3 samples .*a\.jsonl:1"):
        load_stage(tokenizer, "sft", file, cutoff_len=QUESTION - 1)


def test_packed_documents_lose_no_target(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(
        "abc\nd\n\nefg\n"
    )  # abc. d. efg. with . for the end token: 10 tokens, 9 targets
    bundle = load_stage(tokenizer, "pt", str(tmp_path / "a.txt"), cutoff_len=4)
    pairs = [
        tuple(tokenizer.decode(sample[k].tolist()) for k in ("input_ids", "labels"))
        for [sample] in bundle.train
    ]
    assert [(x.replace("</s>", "."), y.replace("</s>", ".")) for x, y in pairs] == [
        ("abc.", "bc.d"),
        ("d.ef", ".efg"),
        ("g", "."),
    ]
    assert bundle.train.num_trained_tokens == 9


def test_unpacked_documents_keep_a_row_each(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abcdef"}\n{"text": ""}\n{"text": "g"}\n')
    bundle = load_stage(tokenizer, "pt", str(tmp_path / "a.jsonl"), cutoff_len=3, packing=False)
    assert [tokenizer.decode(document["input_ids"].tolist()) for [document] in bundle.train] == [
        "abc",
        "g",
    ]
    assert trained_texts(tokenizer, bundle.train) == ["bcd", "</s>"]
    warnings = [line for line in bundle.report if "warning" in line]
    assert (
        len(warnings) == 2
        and warnings[0].endswith("a.jsonl:1")
        and warnings[1].endswith("a.jsonl:2")
    )


def test_bad_sets_of_files_are_errors(tokenizer, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: there is no record to train on"):
        load_stage(tokenizer, "sft", str(empty))
    nothing = DataArguments(dataset=["x"])
    nothing.dataset = []
    with pytest.raises(ValueError, match="it names no data"):
        load_datasets(nothing, "sft", tokenizer)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(open(write_answers(tmp_path / "a.jsonl", "b")).read() + "{\n")
    with pytest.raises(ValueError, match=r"broken\.jsonl:2: not valid JSON"):
        load_stage(tokenizer, "sft", str(broken))


def test_max_samples_takes_the_first_of_each_dataset(tokenizer, tmp_path):
    files = (
        write_answers(tmp_path / "a.jsonl", "b", "c", "d"),
        write_answers(tmp_path / "b.jsonl", "e", "f", "g"),
    )
    train = load_stage(tokenizer, "sft", *files, max_samples=2).train
    assert [text[0] for text in trained_texts(tokenizer, train)] == ["b", "c", "e", "f"]


def test_the_split_is_seeded_disjoint_and_complete(tokenizer, tmp_path):
    file = write_answers(tmp_path / "a.jsonl", *"bcdefghijk")
    parts = [
        load_stage(tokenizer, "sft", file, val_size=size, seed=seed)
        for size, seed in ((0.3, 1), (3, 1), (3, 2))
    ]
    read = [
        (trained_texts(tokenizer, part.train), trained_texts(tokenizer, part.eval))
        for part in parts
    ]
    assert read[0] == read[1] != read[2]
    assert len(read[0][1]) == 3
    assert sorted(read[0][0] + read[0][1]) == [f"{c}<|im_end|>" for c in "bcdefghijk"]
    with pytest.raises(ValueError, match="(?s)val_size: 10.*it takes 10 of 10"):
        load_stage(tokenizer, "sft", file, val_size=10)


def test_mix_weights_are_rates_of_interleaving(tokenizer, tmp_path):
    files = (
        write_answers(tmp_path / "a.jsonl", "b", "c"),
        write_answers(tmp_path / "b.jsonl", *"defghijklm"),
    )
    for wrong in ({"mix_strategy": "concat"}, {"mix_weights": [1.0]}, {"mix_weights": [1.0, -1.0]}):
        keys = {"mix_strategy": "interleave_over", "mix_weights": [3.0, 1.0], **wrong}
        with pytest.raises(ValueError, match="(?s)mix_weights.*rate"):
            load_stage(tokenizer, "sft", *files, **keys)


def test_subsets_of_several_shards_give_the_samples_asked_for(tokenizer, tmp_path):
    a = load_stage(tokenizer, "sft", write_answers(tmp_path / "a.jsonl", "b", "c")).train
    d = load_stage(tokenizer, "sft", write_answers(tmp_path / "b.jsonl", "d", "ef")).train
    both = data.TokenDataset([*a.shards, *d.shards]).subset([1, 3, 2, 3])
    assert [text.removesuffix("<|im_end|>") for text in trained_texts(tokenizer, both)] == [
        "c",
        "ef",
        "d",
        "ef",
    ]
    assert (both.lengths - QUESTION).tolist() == [2, 3, 2, 3]


def test_a_shown_sample_marks_what_is_trained(tokenizer):
    ids = tokenizer("abcd")["input_ids"]
    labels = [ids[1], IGNORE_INDEX, ids[3]]
    assert (
        show_document({"input_ids": np.array(ids[:3]), "labels": np.array(labels)}, tokenizer)
        == "'a«b»c«d»'"
    )


# --------------------------------------------------------------------------------------------------
# ------------- cache


def test_a_second_load_reads_the_cache_unless_anything_that_matters_changed(
    tokenizer, tmp_path, monkeypatch
):
    file, calls = write_answers(tmp_path / "a.jsonl", "b", "c"), []
    encode = Encoder.encode
    monkeypatch.setattr(
        Encoder, "encode", lambda self, chunk: (calls.append(len(chunk)), encode(self, chunk))[1]
    )
    first = load_stage(tokenizer, "sft", file)
    assert load_stage(tokenizer, "sft", file).report == first.report and calls == [2]
    load_stage(tokenizer, "sft", file, val_size=1)  # chosen from the cache
    assert calls == [2]
    load_stage(tokenizer, "sft", file, mask_history=True)
    load_stage(tokenizer, "sft", file, ignore_message_keys=["score"])
    load_stage(tokenizer, "sft", write_answers(tmp_path / "a.jsonl", "b", "c", "d"))
    assert calls == [2, 2, 2, 3]
    moved = str(tmp_path / "moved.jsonl")
    os.rename(file, moved)
    assert f"{moved}: openai records" in load_stage(tokenizer, "sft", moved).report
    assert calls == [2, 2, 2, 3]
    text = Path(moved).read_text().replace('"content": "c"', '"content": "c", "weight": 0')
    Path(moved).write_text(text)
    assert trained_texts(tokenizer, load_stage(tokenizer, "sft", moved).train) == [
        "b<|im_end|>",
        "d<|im_end|>",
    ]


@pytest.mark.parametrize("keys", [{}, {"packing": True}, {"streaming": True}])
def test_weights_of_messages_are_masks_however_the_data_is_read(tokenizer, tmp_path, keys):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text} for role, text in turns]
    messages[1]["weight"] = 0
    messages[3]["weight"] = 1
    masked = {"messages": [messages[0], {**messages[1], "train": False}]}
    lines = [{"messages": messages}, masked]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    bundle = load_stage(tokenizer, "sft", str(tmp_path / "a.jsonl"), **keys)
    if keys.get("streaming"):
        row, _ = next(bundle.train.rows())
    else:
        assert len(bundle.train) == 1
        row = bundle.train[0]
        what = "1 samples have no token to train on and were left out"
        assert any(what in line for line in bundle.report)
    assert trained_texts(tokenizer, [row[:1]]) == ["d<|im_end|>"]


@pytest.mark.parametrize("packing", [False, True])
def test_other_code_tokenises_again_and_the_data_of_a_checkpoint_is_the_same(
    tokenizer, tmp_path, monkeypatch, packing
):
    file = write_answers(tmp_path / "a.jsonl", "b", "c")
    first = load_stage(tokenizer, "sft", file, packing=packing).train
    monkeypatch.setattr(data_encode, "inspect", SimpleNamespace(getsource=lambda module: "edited"))
    again = load_stage(tokenizer, "sft", file, packing=packing).train
    assert samples_of(again).fingerprint != samples_of(first).fingerprint
    assert again.identity == first.identity
    assert WithReference(again, np.zeros((0, 2))).identity == first.identity
    others = [dict(mask_history=True), dict(cutoff_len=QUESTION + 2), dict(max_samples=1)]
    others += [dict(default_system="d"), dict(train_on_prompt=True), dict(enable_thinking=False)]
    other = [load_stage(tokenizer, "sft", file, packing=packing, **keys).train for keys in others]
    write_answers(tmp_path / "a.jsonl", "b", "d")
    other.append(load_stage(tokenizer, "sft", file, packing=packing).train)
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = CHATML.replace("\n", "#")
    other.append(load_stage(changed, "sft", file, packing=packing).train)
    assert len({first.identity, *(dataset.identity for dataset in other)}) == 9


def test_a_tokenizer_that_cuts_special_tokens_is_another_one(tokenizer):
    changed = copy.deepcopy(tokenizer)
    changed.split_special_tokens = True
    text = f"b{tokenizer.eos_token}"
    assert changed.encode(text) != tokenizer.encode(text)
    assert data_encode.tokenizer_identity(changed) != data_encode.tokenizer_identity(tokenizer)


def test_a_tokenizer_in_python_is_refused(tokenizer, tmp_path):
    slow = SimpleNamespace(is_fast=False, eos_token_id=1)
    (tmp_path / "a.txt").write_text("abc\n")
    for bad in (slow, SimpleNamespace(is_fast=True, eos_token_id=None)):
        with pytest.raises(ValueError, match="stage pt .* eos_token: .* expected a fast tokenizer"):
            load_stage(bad, "pt", str(tmp_path / "a.txt"))


def test_another_template_or_another_column_is_not_read_from_the_cache(tokenizer, tmp_path):
    first = load_stage(tokenizer, "sft", write_answers(tmp_path / "a.jsonl", "b"))
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = CHATML.replace("\n", "#")
    again = load_stage(changed, "sft", str(tmp_path / "a.jsonl"))
    assert first.train.num_tokens == again.train.num_tokens
    assert trained_texts(tokenizer, first.train) == ["b<|im_end|>"]
    [one], [other] = first.train[0], again.train[0]
    assert one["input_ids"].tolist() != other["input_ids"].tolist()

    turns = {
        name: [{"role": "user", "content": "a"}, {"role": "assistant", "content": name}]
        for name in "bc"
    }
    (tmp_path / "both.jsonl").write_text(json.dumps(turns))
    tags = dict(role_tag="role", content_tag="content", user_tag="user", assistant_tag="assistant")
    for column in "bc":
        info = {"both": {"file_name": "both.jsonl", "formatting": "sharegpt", "tags": tags}}
        info["both"]["columns"] = {"messages": column}
        (tmp_path / "dataset_info.json").write_text(json.dumps(info))
        bundle = load_stage(tokenizer, "sft", "both", dataset_dir=str(tmp_path))
        assert trained_texts(tokenizer, bundle.train) == [f"{column}<|im_end|>"]


def test_a_large_file_is_hashed_again_where_its_time_has_changed(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(data_encode, "HASH_DIRECTLY_BELOW_BYTES", 0)
    for answer, written_at in (("b", 1_000_000), ("c", 2_000_000)):  # of one size
        file = write_answers(tmp_path / "a.jsonl", answer)
        os.utime(file, (written_at, written_at))
        for _ in range(2):
            bundle = load_stage(tokenizer, "sft", file, cache_dir=str(tmp_path / "cache"))
            assert trained_texts(tokenizer, bundle.train) == [f"{answer}<|im_end|>"]
    assert len([*(tmp_path / "cache" / "hashes").glob("*[0-9a-f]")]) == 2


def test_overwrite_cache_writes_again_what_an_earlier_run_wrote(tokenizer, tmp_path):
    file = write_answers(tmp_path / "a.jsonl", "b")
    folder = load_stage(tokenizer, "sft", file).train.shards[0].folder
    times = []
    for again in (False, True, True):  # the last as the other ranks of a run do
        if not times:
            os.utime(folder / "meta.json", (1_000_000, 1_000_000))
        load_stage(tokenizer, "sft", file, overwrite_cache=again)
        times.append((folder / "meta.json").stat().st_mtime)
    assert times[0] == 1_000_000 < times[1] == times[2]


def test_several_processes_give_the_same_files_as_one(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(data_encode, "CHUNK_RECORDS", 2)
    file = write_answers(tmp_path / "a.jsonl", *"bcdefgh", "x" * 50)
    options = {"cutoff_len": 40, "preprocessing_num_workers": 2}
    two = load_stage(tokenizer, "sft", file, cache_dir=str(tmp_path / "two"), **options)
    one = load_stage(
        tokenizer,
        "sft",
        file,
        cache_dir=str(tmp_path / "one"),
        **options | {"preprocessing_num_workers": 1},
    )
    assert one.report == two.report and len(two.train) == 8
    for name in ("ids.bin", "index.npz"):
        contents = [(bundle.train.shards[0].folder / name).read_bytes() for bundle in (one, two)]
        assert contents[0] == contents[1]


def in_threads(function, count=4) -> list:
    """What each of several callers got, or the text of its error."""
    results = []

    def call():
        try:
            results.append(function())
        except Exception as error:
            results.append((type(error), str(error)))

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    return results


def test_one_builds_and_the_others_wait(tmp_path):
    target, built = tmp_path / "deep" / "target", []

    def build(temporary, progress):
        built.append(1)
        progress("half way")
        time.sleep(0.2)
        temporary.write_text("done")

    def call():
        build_once(target, build, "building")
        return target.read_text()

    assert in_threads(call) == ["done"] * 4
    assert built == [1]
    assert names_in(target.parent) == ["target"]


def names_in(folder) -> list[str]:
    """What stands in a folder, without the locks' files, which stay."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))


def test_an_error_is_met_by_all_and_leaves_nothing(tmp_path):
    built = []

    def build(temporary, progress):
        built.append(1)
        temporary.mkdir()
        raise ValueError("a.jsonl:3: wrong")

    results = in_threads(lambda: build_once(tmp_path / "target", build, "building"))
    assert results == [(ValueError, "a.jsonl:3: wrong")] * 4 and len(built) == 4
    assert names_in(tmp_path) == []

    def better(temporary, progress):
        temporary.write_text("")

    build_once(tmp_path / "target", better, "building")
    assert names_in(tmp_path) == ["target"]


def hold_the_lock(target: str) -> None:
    """Build for ever."""

    def build(temporary, progress):
        temporary.mkdir()
        (temporary / "half").write_text("half")
        progress("half way")
        print("building", flush=True)
        time.sleep(600)

    build_once(Path(target), build, "building")


@pytest.fixture
def another_process(tmp_path):
    """A process in the middle of building tmp_path/target."""
    script = (
        f"from tests.test_data import hold_the_lock; hold_the_lock({str(tmp_path / 'target')!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]
    )
    assert process.stdout.readline() == b"building\n"
    yield process
    process.kill()
    process.wait()


def test_a_dead_writer_blocks_nobody_and_leaves_nothing(tmp_path, another_process):
    another_process.kill()
    another_process.wait()
    # its number may be another's by now, but its temporary folder is known by it
    left = [name for name in names_in(tmp_path) if name.endswith(".tmp")]
    assert left == [f"target.{socket.gethostname()}-{another_process.pid}.tmp"]
    build_once(
        tmp_path / "target", lambda temporary, progress: temporary.write_text("mine"), "building"
    )
    assert names_in(tmp_path) == ["target"]


def test_a_waiting_process_prints_so_and_goes_on_when_the_other_dies(
    tmp_path, monkeypatch, another_process, capsys
):
    monkeypatch.setattr(data_files, "SAY_EVERY_S", 0.2)
    waiting = threading.Thread(
        target=build_once,
        args=(tmp_path / "target", lambda temporary, progress: temporary.mkdir(), "building"),
    )
    waiting.start()
    time.sleep(0.7)
    assert waiting.is_alive()
    assert "waiting for another process, building\n" in capsys.readouterr().err
    another_process.kill()
    waiting.join(timeout=10)
    assert names_in(tmp_path) == ["target"]


def test_a_cache_folder_that_cannot_be_written_is_an_error_that_says_what_to_set(
    tokenizer, tmp_path, monkeypatch
):
    file = write_answers(tmp_path / "a.jsonl", "b")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(
            ValueError, match=r"cannot be written.* Not a directory: .*: set cache_dir"
        ):
            load_stage(tokenizer, "sft", file, cache_dir=str(folder))

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(data_encode, "sync", full)
    with pytest.raises(ValueError, match=r"cannot be written.* No space left.*set cache_dir"):
        load_stage(tokenizer, "sft", file)
    with pytest.raises(ValueError, match="the data not read .*missing"):
        build_once(tmp_path / "x", lambda *_: open(tmp_path.parent / "missing"), "building")


# --------------------------------------------------------------------------------------------------
# --------- integrity


def contents(dataset) -> list:
    return [
        [(d["input_ids"].tolist(), d["labels"].tolist()) for d in documents]
        for documents in dataset
    ]


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "empty ids": ("ids.bin", lambda path: path.write_bytes(b""), "ids.bin has other content"),
    "half of ids": (
        "ids.bin",
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "ids.bin has other content",
    ),
    "flipped ids": ("ids.bin", flip, "ids.bin has other content"),
    "flipped index": ("index.npz", flip, "index.npz has other content"),
    "no ids": ("ids.bin", lambda path: path.unlink(), "cannot be read"),
    "half of meta": ("meta.json", lambda path: path.write_text(path.read_text()[:40]), "cannot be"),
    "other meta": ("meta.json", lambda path: path.write_text("{}"), "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_shard_is_tokenised_anew_with_one_line(
    tokenizer, tmp_path, monkeypatch, capsys, name
):
    file = write_answers(tmp_path / "a.jsonl", "bc", "def", "g")
    train = load_stage(tokenizer, "sft", file).train
    wanted, folder = contents(train), train.shards[0].folder
    monkeypatch.setattr(data_encode, "checked_files", set())  # another process
    part, harm, line = DAMAGE[name]
    harm(folder / part)
    capsys.readouterr()
    again = load_stage(tokenizer, "sft", file)
    assert contents(again.train) == wanted and again.train.num_trained_tokens == 9
    said = [text for text in capsys.readouterr().err.splitlines() if str(folder) in text]
    assert len(said) == 1 and line in said[0] and said[0].endswith(f"tokenising {file} anew")
    load_stage(tokenizer, "sft", file)
    assert str(folder) not in capsys.readouterr().err


def test_checksums_are_compared_once_in_a_process(tokenizer, tmp_path, monkeypatch):
    file, read = write_answers(tmp_path / "a.jsonl", "b"), []
    checksum = data_encode.checksum
    monkeypatch.setattr(
        data_encode, "checksum", lambda path: (read.append(path.name), checksum(path))[1]
    )
    load_stage(tokenizer, "sft", file)
    read.clear()  # of writing
    for _ in range(2):
        load_stage(tokenizer, "sft", file)
    assert sorted(read) == ["ids.bin", "index.npz"]


# --------------------------------------------------------------------------------------------------
# ----- micro-batches


def test_the_collator_pads_on_the_right():
    samples = [
        {"input_ids": np.array([1, 2, 3]), "labels": np.array([2, 3, 4])},
        {"input_ids": [5], "labels": [6]},
    ]
    batch = Collator(pad_token_id=9)(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, 9, 9]]
    assert batch["labels"].tolist() == [[2, 3, 4], [6, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_the_collator_numbers_the_documents_of_a_row():
    one, other = ({"input_ids": ids, "labels": ids} for ids in ([1, 2], [3]))
    some = {**one, "attention_mask": [1, 1]}
    batch = Collator(pad_token_id=9)([[one, other, some], [other]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 1, 2], [3, 9, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 2, 3, 3], [1, 0, 0, 0, 0]]


ROW = {"input_ids": [1, 2, 3], "labels": [2, 3, 4]}


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({**ROW, "images": ["a.jpg"]}, "'images'"),
        ({**ROW, "audio": "a.wav"}, "'audio'"),
        ({**ROW, "loss_weights": [0.0, 1.0, 1.0]}, "'loss_weights'"),
        ({"chosen": ROW, "rejected": ROW, "images": ["a.jpg"]}, "'images'"),
        ([ROW, {**ROW, "videos": ["a.mp4"]}], "'videos'"),
        ({"chosen": "a text", "rejected": "another"}, "this one has <class .str.>"),
        ({**ROW, "input_ids": [1.5, 2.0, 3.0]}, r"expected int64 \[3\], .* got torch.float64"),
        ({**ROW, "labels": np.array([1.0, 2.5, 3.0])}, "labels of a sample: expected int64"),
        ({**ROW, "input_ids": [[1, 2, 3]]}, r"got torch.int64 of shape \[1, 3\]"),
        ({**ROW, "input_ids": ["a", "b", "c"]}, "input_ids of a sample: expected numbers"),
        ({**ROW, "input_ids": [1, None, 3]}, "input_ids of a sample: expected numbers"),
        ({**ROW, "input_ids": [1, 2**70, 3]}, "input_ids of a sample: expected numbers"),
        ({"input_ids": [], "labels": []}, r"documents of \[0\] tokens: expected"),
        ([], r"documents of \[\] tokens: expected"),
        ({**ROW, "attention_mask": [1, 1]}, r"attention_mask of a sample: expected int64 \[3\]"),
        ({**ROW, "attention_mask": np.ones((1, 3, 3))}, r"got .* of shape \[1, 3, 3\]"),
        ([ROW, {**ROW, "attention_mask": [1, 1, 0]}], r"attention_mask \[1, 1, 1, 1, 1, 0\]: exp"),
        ([{**ROW, "attention_mask": [1, 2, 2]}] * 2, "as one document"),
    ],
)  # fmt: skip
def test_the_collator_refuses_what_would_be_dropped_or_cut(sample, said):
    with pytest.raises(ValueError, match=said):
        Collator(pad_token_id=0)([sample, ROW])


def test_columns_without_content_or_without_meaning_for_the_model_pass():
    more = dict(images=None, videos=[], audios=(), token_type_ids=[0, 0, 0], length=3, text="a b c")
    collate = Collator(pad_token_id=0)
    for sample in ({**ROW, **more}, [{**ROW, **more}], {**ROW, "attention_mask": None}):
        assert collate([sample])["input_ids"].tolist() == [[1, 2, 3]]
    batch = {name: torch.tensor([values]) for name, values in ROW.items()}
    batch["token_type_ids"] = torch.zeros(1, 3)
    checked = check_batch({**batch, "images": []}, False, Limits())
    assert sorted(checked) == ["attention_mask", "input_ids", "labels"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"attention_mask": torch.ones(1, 1, 3, 3)},
            r"3\], \[1, 1, 3, 3\]\]: expected .rows, posi",
        ),
        ({"input_ids": torch.ones(3).long(), "labels": torch.ones(3).long()}, r"shapes \[\[3\]"),
        ({"input_ids": torch.ones(1, 0), "labels": torch.ones(1, 0)}, r"shapes \[\[1, 0\]"),
        ({"input_ids": torch.ones(1, 3)}, "input_ids of a batch are torch.float32"),
        ({"labels": torch.ones(1, 3)}, "labels of a batch are torch.float32"),
        ({"input_ids": torch.tensor([[1, 2, 9]])}, "input_ids from 1 to 9: expected 0 to 8"),
        ({"input_ids": torch.tensor([[1, -2, 8]])}, "input_ids from -2 to 8: expected 0 to 8"),
        ({"labels": torch.tensor([[-100, 9, 3]])}, "labels from 3 to 9: expected 0 to 8"),
        ({"labels": torch.tensor([[-1, 3, -100]])}, "labels from -1 to 3: expected 0 to 8"),
        ({name: torch.ones(2, 5).long() for name in ROW}, "of 5 tokens: the model has 4 positions"),
        ({"loss_mask": torch.ones(1, 3)}, "a batch of the data collator has 'loss_mask'"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "labels where attention_mask is 0"),
        ({"input_ids": None}, r"expected \['input_ids'\] too"),
    ],
)
def test_a_batch_that_the_model_cannot_take_is_refused(changes, said):
    batch = {name: torch.tensor([values]) for name, values in ROW.items()}
    with pytest.raises(ValueError, match=said):
        check_batch({**batch, **changes}, True, LIMITS)


LIMITS = Limits(vocab_size=9, positions=4)


def test_ids_and_documents_up_to_the_limits_pass():
    ids = torch.tensor([[0, 8, 1, 2, 3, 4]])
    numbered = {
        "input_ids": ids,
        "labels": ids.roll(-1),
        "attention_mask": torch.tensor([[1, 1, 2, 2, 2, 2]]),
    }
    assert check_batch(numbered, True, LIMITS)["input_ids"] is ids
    unlabelled = {**numbered, "labels": torch.full_like(ids, -100)}
    assert check_batch(unlabelled, True, LIMITS)["labels"].eq(-100).all()
    for nothing in (None, [1, 2]):
        with pytest.raises(ValueError, match="expected a mapping of columns"):
            check_batch(nothing, True, LIMITS)


def test_a_dataset_of_documents_that_are_too_long_is_refused_before_it_is_read():
    dataset = SimpleNamespace(document_lengths=np.array([[3, 4], [5, 1]]), __len__=None)
    args = SimpleNamespace(per_device_eval_batch_size=1)
    trainer = SimpleNamespace(args=args, backend=None, limits=LIMITS)
    with pytest.raises(ValueError, match="a document of 5 tokens: the model has 4 positions"):
        McaTrainer.plan_batches(trainer, dataset, training=False)


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        ({}, (math.inf, math.inf)),
        (dict(vocab_size=9, max_position_embeddings=4), (9, 4)),
        (dict(text_config=dict(vocab_size=9, max_position_embeddings=4)), (9, 4)),
        # Qwen2.5's page: positions before scaling stay in the config; DeepSeek's holds both
        (dict(max_position_embeddings=32, rope_scaling=dict(factor=4.0, rope_type="yarn",
              original_max_position_embeddings=32)), (math.inf, 128)),
        (dict(max_position_embeddings=160, rope_parameters=dict(factor=40,
              original_max_position_embeddings=4)), (math.inf, 160)),
        (dict(max_position_embeddings=8, rope_parameters=dict(factor=2.0, rope_type="linear")),
         (math.inf, 16)),
        (dict(max_position_embeddings=8, rope_parameters=None), (math.inf, 8)),
        (dict(max_position_embeddings=8, rope_parameters=dict(sliding=dict(factor=2.0))),
         (math.inf, 8)),
    ],
)  # fmt: skip
def test_the_limits_of_a_model_are_those_of_its_config(config, limits):
    assert Limits.of(config)[:2] == limits


@pytest.mark.parametrize(
    ("micro", "accumulation", "dp"),
    [(1, 12, 1), (2, 6, 1), (2, 2, 3), (3, 1, 4), (1, 3, 4), (12, 1, 1)],
)
def test_every_layout_trains_the_same_samples_in_a_step(micro, accumulation, dp):
    plans = [BatchPlan(29, micro, accumulation, rank, dp, seed=7) for rank in range(dp)]
    reference = BatchPlan(29, 12, 1, 0, 1, seed=7)
    seen = []
    for epoch, i in [(0, 0), (0, 1), (0, 2), (1, 0)]:
        ranks = [plan.step(epoch, i) for plan in plans]
        assert {len(batches) for batches in ranks} == {plans[0].num_micro_batches(i)}
        assert all(len(batch) == micro for batches in ranks for batch in batches)
        samples = [n for batches in ranks for batch in batches for n in batch if n != FILLER]
        assert sorted(samples) == sorted(n for n in reference.step(epoch, i)[0] if n != FILLER)
        seen += samples if epoch == 0 else []
    assert sorted(seen) == list(range(29))  # 12 + 12 + 5: nothing is lost


def test_micro_batches_are_dealt_in_the_order_of_the_epoch():
    plans = [BatchPlan(11, 2, 2, rank, 2, seed=0, shuffle=False) for rank in range(2)]
    assert [plan.steps_per_epoch for plan in plans] == [2, 2]
    assert plans[0].step(5, 0) == [[0, 1], [4, 5]] and plans[1].step(5, 0) == [[2, 3], [6, 7]]
    assert plans[0].step(0, 1) == [[8, 9]] and plans[1].step(0, 1) == [[10, FILLER]]
    assert BatchPlan(13, 2, 2, 1, 2, seed=0, shuffle=False).step(0, 1) == [
        [10, 11],
        [FILLER, FILLER],
    ]
    assert (plans[0].num_micro_batches(1), plans[0].num_samples_of(1)) == (1, 3)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [
        BatchPlan(50, 1, 1, 0, 1, seed).order(epoch).tolist()
        for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(50)) for order in orders)


def batch_of(samples: list[int]) -> dict:
    ids = torch.tensor(samples)[:, None]
    return {"input_ids": ids, "labels": ids}


def test_a_filler_is_sample_0_without_labels():
    plan = BatchPlan(5, 2, 1, 1, 2, seed=0, shuffle=False)
    batches = list(make_loader([10, 11, 12, 13, 14], batch_of, plan, num_epochs=1))
    assert [batch["input_ids"].flatten().tolist() for batch in batches] == [[12, 13], [10, 10]]
    assert [batch["labels"].flatten().tolist() for batch in batches] == [[12, 13], [-100, -100]]
    without = lambda samples: {**batch_of(samples), "attention_mask": None}  # noqa: E731
    [_, last] = make_loader([10, 11, 12, 13, 14], without, plan, num_epochs=1)
    assert last["labels"].flatten().tolist() == [-100, -100]


def test_a_loader_started_later_goes_on_where_the_other_was():
    numbers = list(range(100, 111))
    plan = BatchPlan(11, 2, 2, 0, 1, seed=3)
    read = [
        batch["labels"].tolist() for batch in make_loader(numbers, batch_of, plan, num_epochs=3)
    ]
    before = sum(
        plan.num_micro_batches(i) for i in range(plan.steps_per_epoch)
    ) + plan.num_micro_batches(0)
    later = make_loader(numbers, batch_of, plan, start_epoch=1, start_step=1, num_epochs=3)
    assert [batch["labels"].tolist() for batch in later] == read[before:]


def test_a_loader_leaves_the_global_random_state_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    next(
        iter(make_loader([1, 2], batch_of, BatchPlan(2, 1, 1, 0, 1, seed=0)))
    )  # without num_epochs it never ends
    assert torch.equal(before, torch.get_rng_state())


def test_what_cannot_be_planned_is_an_error():
    plan = BatchPlan(3, 2, 1, 0, 1, seed=0)
    with pytest.raises(ValueError, match="generator has no __len__"):
        make_loader((n for n in range(3)), batch_of, plan)
    with pytest.raises(ValueError, match='"labels" of 2 rows'):
        list(make_loader([1, 2, 3], lambda samples: {"labels": [[1]]}, plan, num_epochs=1))
    with pytest.raises(ValueError, match="0 samples"):
        BatchPlan(0, 1, 1, 0, 1, seed=0)


def test_samples_of_a_step_are_dealt_by_cost_and_stay_in_their_step():
    costs = np.array([9.0, 1, 8, 2, 7, 3, 6, 4])
    plans = [BatchPlan(8, 1, 4, rank, 2, seed=0, shuffle=False, costs=costs) for rank in range(2)]
    taken = [[batch[0] for batch in plan.step(0, 0)] for plan in plans]
    # by falling cost 0 2 | 4 6 | 7 5 | 3 1, the dearer one to the rank with the lower sum so far
    assert taken == [[0, 6, 7, 1], [2, 4, 5, 3]]
    assert [sum(costs[taken[r]]) for r in range(2)] == [20, 20]


def test_a_rank_with_one_dear_sample_gets_the_cheap_ones_after_it():
    costs = np.array([1.0, 10, 4, 5, 1, 5, 1, 4])
    plans = [BatchPlan(8, 1, 4, rank, 2, seed=0, shuffle=False, costs=costs) for rank in range(2)]
    taken = [[batch[0] for batch in plan.step(0, 0)] for plan in plans]
    # 10 5 | 5 4 | 4 1 | 1 1 by hand: taking turns would give 19 and 12
    assert [costs[numbers].tolist() for numbers in taken] == [[10, 4, 1, 1], [5, 5, 4, 1]]
    assert sorted(taken[0] + taken[1]) == list(range(8))


def test_fillers_fill_the_last_micro_batches_of_samples_dealt_by_cost():
    costs = np.array([3.0, 1, 2, 5, 4])
    plans = [BatchPlan(5, 2, 2, rank, 2, seed=0, shuffle=False, costs=costs) for rank in range(2)]
    steps = [plan.step(0, 0) for plan in plans]
    # 3 4 | 0 2 go first, by 9 and 5; the second rank has less, and gets the last sample
    assert steps == [[[3, 4], [-1, -1]], [[0, 2], [1, -1]]]


def test_packed_samples_keep_their_borders_and_their_labels(tmp_path, tokenizer):
    records = [
        {"messages": [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}]}
        for n in range(1, 9)
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = dict(dataset=[str(file)], cutoff_len=64, cache_dir=str(tmp_path / "cache"))
    plain = load_datasets(DataArguments(**arguments), "sft", tokenizer).train
    packed = load_datasets(DataArguments(**arguments, packing=True), "sft", tokenizer)
    assert "packed into" in packed.report[-1] and "% padding" in packed.report[-1]
    seen, alone = (
        sorted((d["input_ids"].tolist(), d["labels"].tolist()) for row in rows for d in row)
        for rows in (packed.train, plain)
    )
    assert seen == alone
    assert all(sum(len(d["input_ids"]) for d in row) <= 64 for row in packed.train)
    lengths = plain.lengths
    assert packed.train.work.tolist() == [
        [lengths[pack].sum(), (lengths[pack] ** 2).sum()] for pack in packed.train.packs
    ]
