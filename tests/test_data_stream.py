"""Datasets that are tokenised as they are read: the same samples as without streaming, in every
layout, from every position on.
"""

import dataclasses
import functools
import gzip
import itertools
import json
import pickle
import random

import numpy as np
import pytest

from mca_lite import data_encode, data_files
from mca_lite.args import parse_args
from mca_lite.data_batches import BatchPlan
from mca_lite.errors import ConfigError
from mca_lite.part_stream import Position
from tests.shared.chats import load_files
from tests.shared.commands import assert_names

SFT = ({}, dict(packing=True))
PT = dict(stage="pt", packing=True)
load_short = functools.partial(load_files, cutoff_len=64)


def write_uneven(path, count: int, seed: int = 0, bad: int = 0) -> str:
    """Write conversations of unequal length, each with a text; every eighth has no answer."""
    draw = random.Random(seed)
    lines = []
    for i in range(count):
        answer = f"{path.stem}{i}-" + "x" * draw.randrange(30)
        if i % 8 == 5:
            answer = ""
        roles = ("user", "alien" if i < bad else "assistant")
        turns = [
            {"role": role, "content": text} for role, text in zip(roles, ("q", answer), strict=True)
        ]
        lines.append(json.dumps({"messages": turns, "text": answer + "\n"}))
    text = "\n\n".join(lines) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def stream(tmp_path, *files, **keys):
    return load_short(tmp_path, *files, streaming=True, **keys).train


def as_lists(row) -> list:
    return [(d["input_ids"].tolist(), d["labels"].tolist()) for d in row]


def with_states(train, count: int, state: dict | None = None) -> list[tuple[list, dict]]:
    """(row, the position behind it as a checkpoint keeps it) of rows from a kept position on."""
    rows = itertools.islice(train.rows(Position(**state or {})), count)
    return [(as_lists(row), json.loads(json.dumps(dataclasses.asdict(at)))) for row, at in rows]


def take(train, count: int, position=None) -> list:
    return [as_lists(row) for row, _ in itertools.islice(train.rows(position), count)]


# -- the same samples as without


@pytest.mark.parametrize("strategy", ["concat", "interleave_over", "interleave_once"])
@pytest.mark.parametrize("weights", [None, [3.0, 1.0]])
def test_a_stream_has_the_samples_of_the_dataset_in_its_order(tmp_path, strategy, weights):
    files = (
        write_uneven(tmp_path / "a.jsonl", 230),
        write_uneven(tmp_path / "b.jsonl.gz", 90, seed=1),
    )
    keys = dict(disable_shuffling=True, mix_strategy=strategy, mix_weights=weights)
    if strategy == "concat":
        keys["mix_weights"] = None
    # texts, of which none is left out: in a stream a record that is takes its dataset's turn
    keys |= dict(stage="pt", packing=False, cutoff_len=9)
    whole = [as_lists(row) for row in load_short(tmp_path, *files, **keys).train]
    got = take(stream(tmp_path, *files, **keys), len(whole) + 3)
    assert got == whole + whole[:3]  # then from the beginning again


@pytest.mark.parametrize("stage, packing", [("sft", False), ("pt", False), ("pt", True)])
def test_what_is_left_out_and_joined_is_that_of_the_dataset(tmp_path, stage, packing):
    keys = dict(stage=stage, packing=packing, cutoff_len=64, disable_shuffling=True)
    file = write_uneven(tmp_path / "a.jsonl", 230)
    whole = [as_lists(row) for row in load_short(tmp_path, file, **keys).train]
    got = take(stream(tmp_path, file, **keys), len(whole) - 1)
    assert got == whole[:-1]  # the last row of joined documents goes on with the first one


def test_packs_are_filled_in_the_order_of_the_stream(tmp_path):
    file = write_uneven(tmp_path / "a.jsonl", 230)
    keys = dict(disable_shuffling=True, cutoff_len=150)
    samples = [as_lists(row)[0] for row in load_short(tmp_path, file, **keys).train]
    packs = take(stream(tmp_path, file, packing=True, **keys), 40)
    assert list(itertools.chain(*packs)) == samples[: sum(map(len, packs))]
    assert len({len(pack) for pack in packs}) > 1
    for pack, after in itertools.pairwise(packs):
        used = sum(len(ids) for ids, _ in pack)
        assert used <= 150 < used + len(after[0][0])


# -- order


def test_blocks_are_shuffled_and_every_pass_otherwise(tmp_path):
    file = write_uneven(tmp_path / "a.jsonl", 40)
    in_order = take(stream(tmp_path, file, disable_shuffling=True), 35)
    train = stream(tmp_path, file, buffer_size=8)
    two = take(train, 70)
    for begin in range(0, 35, 7):  # of eight records one has no answer
        block = two[begin : begin + 7]
        assert sorted(block) == sorted(in_order[begin : begin + 7])
    assert sorted(two[:35]) == sorted(two[35:]) == sorted(in_order)
    assert two[:35] != two[35:] and two[:35] != in_order
    assert take(stream(tmp_path, file, buffer_size=8), 70) == two
    assert take(stream(tmp_path, file, buffer_size=8, seed=7), 70) != two


def micro_batches(train, ranks: int, rank: int, size: int, steps: int, state=None) -> list:
    """(position behind, rows) of each micro-batch of a rank; 8 rows a step over all ranks."""
    plan = BatchPlan(8 * steps, size, 8 // ranks // size, rank, ranks, 0, shuffle=False)
    loader = train.loader(lambda rows: {"rows": rows}, plan, state, 0, False)
    count = steps * 8 // ranks // size
    return [
        (batch["data_position"], [as_lists(row) for row in batch["rows"]])
        for batch in itertools.islice(loader, count)
    ]


@pytest.mark.parametrize("keys", [*SFT, PT])
def test_each_rank_has_its_own_rows_of_the_same_step(tmp_path, keys):
    train = stream(tmp_path, write_uneven(tmp_path / "a.jsonl", 230), buffer_size=50, **keys)
    alone = [row for _, rows in micro_batches(train, 1, 0, 8, steps=3) for row in rows]
    assert alone == take(train, 24)
    both = [micro_batches(train, 2, rank, 2, steps=3) for rank in range(2)]
    dealt = [row for pair in zip(*both, strict=True) for _, rows in pair for row in rows]
    assert dealt == alone
    # data parallel ranks of every layout go on at the same position
    assert [at for at, _ in both[0]] == [at for at, _ in both[1]]


@pytest.mark.parametrize("keys", [*SFT, PT])
@pytest.mark.parametrize("strategy", ["concat", "interleave_under", "interleave_over"])
def test_a_run_goes_on_at_every_position(tmp_path, keys, strategy):
    files = (
        write_uneven(tmp_path / "a.jsonl", 130),
        write_uneven(tmp_path / "b.jsonl.gz", 60, seed=1),
    )
    keys = dict(keys, buffer_size=70, mix_strategy=strategy)
    if strategy != "concat":
        keys["mix_weights"] = [0.6, 0.4]
    train = stream(tmp_path, *files, **keys)
    rows = with_states(train, 250)
    assert rows[-1][1]["passes"] > 0
    for number in range(0, 240, 29):
        again = stream(tmp_path, *files, **keys)
        # positions too: a run that goes on is stopped again
        assert with_states(again, 9, rows[number][1]) == rows[number + 1 : number + 10]


def test_going_on_reads_one_block_again_and_tokenises_one_chunk(tmp_path, monkeypatch):
    file = write_uneven(tmp_path / "a.jsonl", 3000)
    train = stream(tmp_path, file, buffer_size=400)
    *_, (_, position) = itertools.islice(train.rows(), 2000)
    read, tokenised = [], []
    records, encode = data_encode.read_records, train.encoder.encode
    monkeypatch.setattr(
        data_encode, "read_records", lambda *a: (read.append(r) or r for r in records(*a))
    )
    monkeypatch.setattr(
        train.encoder, "encode", lambda chunk: (tokenised.extend(chunk), encode(chunk))[1]
    )
    next(train.rows(position))
    assert len(read) <= 402 and len(tokenised) <= 200
    number = [int(where.rpartition(":")[2]) for where, _ in read[1:]]
    assert min(number) > 3000  # lines; every second one is blank


def test_a_bounded_number_of_records_is_read_ahead(tmp_path, monkeypatch):
    """A file without end: what has been read is never more than a block and a record of each
    dataset ahead of what is tokenised.
    """
    ahead = []

    def endless(file, kind, skip, cursor=None):
        cursor = cursor or data_files.Cursor()
        for number in itertools.count(cursor.number + 1):
            cursor.number = number
            ahead.append(None)
            yield f"{file}:{cursor.number}", {"text": f"text {cursor.number}"}

    monkeypatch.setattr(data_encode, "read_records", endless)
    files = write_uneven(tmp_path / "a.jsonl", 1), write_uneven(tmp_path / "b.jsonl", 1)
    keys = dict(stage="pt", packing=False, buffer_size=300, mix_strategy="interleave_over")
    rows = stream(tmp_path, *files, **keys).rows()
    ahead.clear()
    for number in range(2000):
        next(rows)
        assert len(ahead) - number <= 300 + 2 * 2  # a record shows the format of its file
    assert len(ahead) > 1800


def test_a_stream_can_be_sent_to_another_process(tmp_path):
    for keys in (*SFT, PT):
        train = stream(tmp_path, write_uneven(tmp_path / "a.jsonl", 30), **keys)
        again = pickle.loads(pickle.dumps(train))
        assert take(again, 5) == take(train, 5)


# -- several kinds of files, evaluation, bad records


def test_every_kind_of_file_is_streamed(tmp_path):
    records = [{"instruction": f"q{i}", "output": f"a{i}"} for i in range(30)]
    rows = {}
    for name in ("a.json", "a.jsonl", "a.jsonl.gz"):
        text = "\n".join(map(json.dumps, records))
        if name == "a.json":
            text = json.dumps(records)
        data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
        (tmp_path / name).write_bytes(data)
        bundle = load_short(tmp_path, str(tmp_path / name), streaming=True, buffer_size=7)
        train = bundle.train
        found = list(itertools.islice(train.rows(), 40))
        rows[name] = [as_lists(row) for row, _ in found]
        assert take(train, 5, found[20][1]) == rows[name][21:26]
    assert rows["a.json"] == rows["a.jsonl"] == rows["a.jsonl.gz"]
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(9):
        (folder / f"{i}.txt").write_text(f"one {i}\n\ntwo")
    for sample_by, count in (("line", 18), ("document", 9)):
        keys = dict(stage="pt", packing=False, disable_shuffling=True, sample_by=sample_by)
        train = stream(tmp_path, str(folder), **keys)
        whole = [as_lists(row) for row in load_short(tmp_path, str(folder), **keys).train]
        found = list(itertools.islice(train.rows(), count))
        assert [as_lists(row) for row, _ in found] == whole and len(whole) == count
        assert take(train, 2, found[3][1]) == whole[4:6]


def test_max_samples_ends_a_pass(tmp_path):
    train = stream(tmp_path, write_uneven(tmp_path / "a.jsonl", 40), max_samples=4)
    rows = take(train, 8)
    assert sorted(rows[:4]) == sorted(rows[4:])


def test_records_that_cannot_be_used_stop_or_are_said_and_left_out(tmp_path, capsys):
    good, bad = (
        write_uneven(tmp_path / "a.jsonl", 300),
        write_uneven(tmp_path / "b.jsonl", 20, bad=12),
    )
    with pytest.raises(ValueError, match="b.jsonl:1: message 2: unknown role 'alien'"):
        stream(tmp_path, good, bad)
    train = stream(tmp_path, good, bad, on_bad_record="skip", disable_shuffling=True)
    plan = BatchPlan(800, 8, 1, 0, 1, 0, shuffle=False)
    loader = train.loader(lambda rows: {"rows": rows}, plan, None, 0, True)
    list(itertools.islice(loader, 36))
    said = capsys.readouterr().out.splitlines()
    [line] = [line for line in said if "unknown role 'alien'" in line]
    assert line.startswith("stream: ") and "b.jsonl" in line
    assert [line for line in said if "samples have an empty answer and were left out" in line]
    worse = write_uneven(tmp_path / "c.jsonl", 400, bad=150)
    with pytest.raises(
        ValueError, match="(?s)of 200 records cannot be used.* at most 10 %.*c.jsonl"
    ):
        take(stream(tmp_path, worse, on_bad_record="skip", disable_shuffling=True), 200)


def test_the_first_records_that_cannot_be_used_are_left_out_too(tmp_path):
    """The format of a file is that of its first record that shows one."""
    rows, reports = [], []
    file = write_uneven(tmp_path / "a.jsonl", 30)
    with open(file) as records:
        text = records.read()
    (tmp_path / "a.jsonl").write_text('{"none": 1}\n{\n' + text)
    for streaming in (False, True):
        keys = dict(streaming=streaming, on_bad_record="skip", disable_shuffling=True)
        bundle = load_short(tmp_path, file, **keys)
        train = bundle.train
        rows.append(take(train, 26) if streaming else [as_lists(row) for row in train])
        reports.append(bundle.report[0])
    assert rows[0] == rows[1] and len(rows[0]) == 26
    assert reports == [f"{file}: openai records"] * 2
    (tmp_path / "a.jsonl").write_text('{"none": 1}\n' * 1000)
    words = "(?s)200 of 200 records cannot be used.* .*a.jsonl:1$"
    with pytest.raises(ValueError, match=words):
        take(stream(tmp_path, file, on_bad_record="skip", disable_shuffling=True), 1)


def test_data_that_gives_nothing_to_train_on_ends(tmp_path):
    file = write_uneven(tmp_path / "a.jsonl", 9)
    with pytest.raises(ValueError, match="no record of the datasets gives a sample"):
        take(stream(tmp_path, file, cutoff_len=3), 1)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ValueError, match="empty.jsonl: there is no record to train on"):
        stream(tmp_path, str(empty))


@pytest.mark.parametrize("state", [{"pass": 1}, [1]])
def test_a_position_of_something_else_is_refused(tmp_path, state):
    train = stream(tmp_path, write_uneven(tmp_path / "a.jsonl", 9))
    with pytest.raises(ValueError, match="data_position .*: no position of this stream"):
        train.loader(list, BatchPlan(8, 8, 1, 0, 1, 0, shuffle=False), state, 0, False)


def words_of(folder, **keys: str) -> list[str]:
    """The words of a run of three steps."""
    (folder / "config.json").write_text('{"model_type": "llama"}')
    places = {"model_name_or_path": str(folder), "output_dir": f"{folder}/out", "dataset": "a"}
    keys = {**places, "train_from_scratch": "true", "max_steps": "3", **keys}
    return [f"{key}={value}" for key, value in keys.items()]


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (dict(val_size="0.1"), "val_size"),
        (dict(val_size="10"), "val_size"),
        (dict(dataset="a,b", mix_weights="1,2"), "mix_weights"),
    ],
)
def test_what_cannot_be_streamed_is_refused(keys, key, tmp_path):
    with pytest.raises(ConfigError) as refused:
        parse_args(words_of(tmp_path, streaming="true", **keys))
    assert [problem.key for problem in refused.value.problems] == [key]


def test_keys_without_effect_are_said(tmp_path):
    streamed = words_of(tmp_path, streaming="true", preprocessing_num_workers="2")
    [note] = parse_args(streamed).parts["stream"].notes
    assert_names(note, "preprocessing_num_workers: no effect", "streaming is true")
    [note] = parse_args(words_of(tmp_path, buffer_size="2")).parts["stream"].notes
    assert_names(note, "buffer_size: no effect", "streaming is false")


def test_the_identity_names_files_and_order(tmp_path):
    file = write_uneven(tmp_path / "a.jsonl", 9)
    found = [stream(tmp_path, file).identity for _ in range(2)]
    found.append(stream(tmp_path, file, buffer_size=3).identity)
    found.append(stream(tmp_path, file, seed=1).identity)
    found.append(stream(tmp_path, file, cutoff_len=8).identity)
    with open(file, "a") as more:
        more.write("\n")
    found.append(stream(tmp_path, file).identity)
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text.replace("a0-", "b0-"))  # as long as before
    found.append(stream(tmp_path, file).identity)
    assert found[0] == found[1] and len(set(found)) == 6
    assert np.char.startswith(found, "streamed-").all()
