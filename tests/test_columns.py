"""Columns that a script registers, from samples to the loss hooks. The values are by hand."""

import json

import numpy as np
import pytest
import torch

from mca_lite import DataArguments, load_datasets, register_column
from mca_lite.batch import join, pack, pad, real_documents, split, to_rank, zigzag
from mca_lite.data_batches import BatchPlan, Collator, Limits, check_batch, make_loader
from mca_lite.part_pictures_model import with_image_slots
from mca_lite.tables import COLUMNS
from tests.shared.toy_tokenizer import byte_tokenizer

CHOSEN = {"input_ids": [1, 2, 3], "labels": [2, 3, 4], "score": 0.5}
REJECTED = {"input_ids": [5, 6], "labels": [6, 7], "score": 0.25, "weight": [1, 3]}
PAIR = {"chosen": CHOSEN, "rejected": REJECTED, "trust": 7, "weight": 2}


@pytest.fixture(autouse=True)
def columns():
    """A weight per token, a score per document, the trust in a pair."""
    known = set(COLUMNS)
    register_column("weight", padding=-1)
    register_column("score", per="document", default=0.125)
    register_column("trust", per="sample", dtype="int64", default=1)
    yield
    for name in set(COLUMNS) - known:
        del COLUMNS[name]


def collated(*samples) -> dict:
    return check_batch(Collator(pad_token_id=9)(list(samples)), True, Limits())


def filled(batch: dict) -> dict:
    """With a row of padding alone at its end, as the last batch of an epoch has."""
    nothing = {"attention_mask": 0, "labels": -100}
    return {k: torch.cat([v, nothing.get(k, 1) * v[:1]]) for k, v in batch.items()}


def test_columns_of_pairs_are_those_of_documents_and_samples_in_a_packed_row():
    packed = pack(filled(collated(PAIR, PAIR)), document_multiple=4, documents_per_sample=2)
    assert packed["cu_seqlens"] == (0, 4, 8, 12, 16)
    assert packed["weight"].tolist() == [[2, 2, 2, -1, 1, 3, -1, -1] * 2]
    assert packed["score"].tolist() == [0.5, 0.25] * 2 and packed["trust"].tolist() == [7, 7]
    longer = pad(packed, 20, 9)
    assert longer["weight"][0, 16:].tolist() == [-1] * 4 and longer["score"].shape == (4,)
    assert real_documents(longer).tolist() == [True] * 4 + [False]
    places = zigzag(packed["cu_seqlens"], 2, 0)  # of every 4 tokens the first and the last
    of_rank = to_rank(packed, ["weight", "score"], places, torch.device("cpu"))
    assert of_rank["weight"].tolist() == [[2, -1, 1, -1] * 2] and of_rank["score"].shape == (4,)


def test_a_column_of_several_numbers_per_token_is_padded_as_a_whole():
    register_column("colours", more_dims=1, padding=-1)
    long, short = ({**CHOSEN, "weight": 1}, {**REJECTED, "score": 0.0})
    batch = Collator(9)([long | {"colours": [[1, 2]] * 3}, short | {"colours": [[3, 4]] * 2}])
    packed = pack(batch, document_multiple=3)
    assert packed["colours"].tolist() == [[[1, 2]] * 3 + [[3, 4]] * 2 + [[-1, -1]]]
    assert split(filled(batch))["colours"][2].tolist() == [[-1, -1]] * 3


def test_columns_of_pairs_in_rows_leave_out_the_rows_that_fill():
    rows = split(filled(collated(PAIR)), 2, 9)
    assert rows["weight"].tolist() == [[2, 2, 2], [1, 3, -1], [-1] * 3, [-1] * 3]
    assert rows["score"].tolist() == [0.5, 0.25] and rows["trust"].tolist() == [7]
    assert real_documents(rows).tolist() == [True, True, False, False]


def test_joined_batches_have_the_columns_of_both():
    packed = [pad(pack(collated(PAIR), 1, 9, 2), 8, 9)] * 2
    joined = join(packed)
    assert joined["cu_seqlens"] == (0, 3, 5, 8, 10)
    assert joined["weight"].tolist() == [[2, 2, 2, 1, 3] * 2]
    assert joined["score"].tolist() == [0.5, 0.25] * 2 and joined["trust"].tolist() == [7, 7]
    rows = join([split(collated(PAIR), 2, 9)] * 2)
    assert rows["weight"].shape == (4, 3) and rows["score"].shape == (4,)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "weight of a sample: expected numbers, got None: set them, or"),
        ({"weight": [1, 2]}, r"weight of a sample: .*float32 \[3\].*\[2\]"),
        ({"weight": "much"}, "weight of a sample: expected numbers, got 'much'"),
        ({"weight": 1, "score": [1, 2, 3]}, r"score of a sample: expected float32 \[1\]"),
        ({"weight": 1e300}, r"weight of a sample: expected float32"),
        ({"weight": 1, "audio": [0.5]}, "a sample has 'audio', .*register_column"),
    ],
)
def test_a_column_that_cannot_be_is_refused_by_name(changes, said):
    document = {"input_ids": [1, 2, 3], "labels": [2, 3, 4], **changes}
    with pytest.raises(ValueError, match=said):
        collated(document)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_may_be_unsigned_as_in_files_of_other_programs(dtype):
    row = np.array([1, 2, 3, 2**16 - 1], dtype)
    batch = collated({"input_ids": row[:-1], "labels": row[1:], "weight": row[:1].repeat(3)})
    assert batch["labels"].tolist() == [[2, 3, 65535]] and batch["labels"].dtype == torch.int64
    assert batch["weight"].tolist() == [[1.0, 1.0, 1.0]]
    with pytest.raises(ValueError, match="labels of a sample: expected int64"):
        huge = np.array([2, 3, 2**64 - 1], "uint64")
        collated({"input_ids": row[:-1], "labels": huge, "weight": 1})


LACKING = {"chosen": CHOSEN, "rejected": REJECTED, "weight": 1}


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([PAIR, {**PAIR, "pair_weight": 2}], r"samples at \[0\] of .* no pair_weight"),
        ([{**PAIR, "pair_margin": 2}, PAIR], r"samples at \[1\] of .* no pair_margin"),
        ([[PAIR, {**PAIR, "pair_weight": 2}]], r"pair_weight in some .* not in those at \[0, 1\]"),
        ([{**PAIR, "chosen": {**CHOSEN, "reference": 1.0}}], r"reference in some .* at \[1\]"),
        ([LACKING, {**LACKING, "answer_label": 1}], r"samples at \[0\] .* no answer_label"),
        ([LACKING, {**LACKING, "rope_t": 0}], r"samples at \[0\] .* no rope_t"),
        ([{1: 2, "a": 3}], "this one has .*'1', 'a'"),
    ],
)
def test_a_column_of_some_samples_is_not_lost(samples, said):
    with pytest.raises(ValueError, match=said):
        collated(*samples)
    plan = BatchPlan(len(samples), len(samples), 1, 0, 1, seed=0, shuffle=False)
    numbers = rf"\(samples \{list(range(len(samples)))} of the data set\)"
    with pytest.raises(ValueError, match=f"{said}.*{numbers}"):
        next(iter(make_loader(samples, Collator(0), plan)))


def test_documents_of_a_sample_have_one_number_for_it():
    pair = [{**CHOSEN, "weight": 1, "trust": 2}, {**REJECTED, "trust": 3}]
    for arrange in pack, split:
        with pytest.raises(ValueError, match="different numbers in trust"):
            arrange(collated(pair), documents_per_sample=2)


def test_a_collator_may_leave_out_what_has_a_default_and_nothing_else():
    ids = torch.tensor([[1, 2, 3]])
    batch = {"input_ids": ids, "labels": ids + 1, "weight": [[1, 2, 3]]}
    checked = check_batch(batch, False, Limits())
    assert checked["score"].tolist() == [[0.125]] and checked["weight"].dtype == torch.float32
    assert check_batch({**batch, "weight": [4]}, False, Limits())["weight"].tolist() == [[4] * 3]
    with pytest.raises(ValueError, match=r"weight of a batch, .* expected \[1, 3\], got \[1, 2\]"):
        check_batch({**batch, "weight": torch.ones(1, 2)}, False, Limits())
    del batch["weight"]
    with pytest.raises(ValueError, match=r"weight of a batch, .* expected \[1, 3\], got .None"):
        check_batch(batch, False, Limits())


def test_a_name_that_is_taken_and_another_kind_are_refused():
    with pytest.raises(ValueError, match="column labels is registered already"):
        register_column("labels")
    with pytest.raises(ValueError, match="column pixels: expected per token, document or sample"):
        register_column("pixels", per="image")


def test_a_mismatched_answer_of_kto_has_the_columns_of_its_tokens():
    from mca_lite.part_kto import Mismatched

    register_column("colour", default=0.5, to_model=True)
    more = {"answer_label": 1, "attention_mask": 1}
    first = {"input_ids": [0, 1, 2], "labels": [-100, 2, 3], "weight": [1, 2, 3], "colour": 0.25}
    second = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 8, 9], "weight": 4}
    view = Mismatched([{**first, **more}, {**second, **more}], 2)
    batch = Collator(pad_token_id=9)([view[0], view[1]])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 0, 1, 8, 9, 9], [5, 6, 7, 8, 5, 6, 7, 2]]
    assert batch["weight"].tolist() == [[1, 2, 3, 1, 2, 4, -1, -1], [4, 4, 4, 4, 4, 4, 4, 3]]
    assert batch["colour"].tolist() == [[0.25] * 5 + [0.5, 0, 0], [0.5] * 8]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 2, 2, 2, 0, 0], [1] * 4 + [2] * 4]


def test_a_column_for_the_model_is_one_of_its_arguments():
    from types import SimpleNamespace

    from mca_lite.backend_torch import TorchBackend
    from mca_lite.inputs import Inputs

    register_column("colour", default=0.5, to_model=True)
    batch = split(collated({"input_ids": [1, 2], "labels": [2, 3], "weight": 1}))
    routers = SimpleNamespace(expect=lambda mask: None)
    backend = SimpleNamespace(routers=routers, inputs=Inputs(None))
    inputs = TorchBackend.model_inputs(backend, batch)
    assert inputs["colour"].tolist() == [[0.5, 0.5]] and "weight" not in inputs


def weights_of_texts(folder, **keys) -> list:
    (folder / "a.jsonl").write_text('{"text": "ab", "weight": 2}\n{"text": "abc"}\n')
    keys = dict(dataset=[str(folder / "a.jsonl")], cache_dir=str(folder / "cache"), **keys)
    data = load_datasets(DataArguments(cutoff_len=8, **keys), "pt", byte_tokenizer())
    return [document.get("weight") for [document] in data.train]


def test_a_records_column_is_in_the_cache_and_a_changed_one_is_read_again(tmp_path):
    for value in (5.0, 6.0, None):
        del COLUMNS["weight"]
        register_column("weight", of_dataset=lambda spec, keys, value=value: value)
        for _ in range(2):  # written, then read
            assert weights_of_texts(tmp_path, packing=False) == [2.0, value]
    with pytest.raises(ValueError, match="a.jsonl:1: .*weight.*texts are joined: set packing"):
        weights_of_texts(tmp_path)
    entry = {"file_name": "a.jsonl", "values": {"weight": 7}}  # before of_dataset, after a record
    (tmp_path / "dataset_info.json").write_text(json.dumps({"a": entry}))
    keys = dict(dataset_dir=str(tmp_path), cache_dir=str(tmp_path), packing=False)
    data = load_datasets(DataArguments(dataset=["a"], **keys), "pt", byte_tokenizer())
    assert [document["weight"] for [document] in data.train] == [2.0, 7.0]
    (tmp_path / "dataset_info.json").write_text(json.dumps({"a": {**entry, "values": {"w": 7}}}))
    with pytest.raises(ValueError, match="dataset 'a': values {'w': 7}: expected registered"):
        load_datasets(DataArguments(dataset=["a"], **keys), "pt", byte_tokenizer())
    info = {"a": {**entry, "values": {"weight": [7]}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl:1: 'weight' is \[7\]: expected a finite number"):
        load_datasets(DataArguments(dataset=["a"], **keys), "pt", byte_tokenizer())
    wrong = {
        '"much"': "b.jsonl:1: .*'weight': expected a number, got 'much'",
        "NaN": "b.jsonl:1: .*'weight' is nan: expected a finite number",  # the cache's "no value"
    }
    keys = dict(dataset=[str(tmp_path / "b.jsonl")], cache_dir=str(tmp_path), packing=False)
    for value, words in wrong.items():
        (tmp_path / "b.jsonl").write_text(f'{{"text": "ab", "weight": {value}}}\n')
        with pytest.raises(ValueError, match=words):
            load_datasets(DataArguments(**keys), "pt", byte_tokenizer())


def test_pictures_stand_in_the_order_of_the_documents_packed_joined_and_without_fillers():
    def document(*pictures, image=7):
        ids = torch.tensor([1] + [image] * len(pictures))
        columns = {"input_ids": ids, "labels": ids + 1, "weight": 1}
        if pictures:
            columns["pixel_values"] = torch.tensor(pictures, dtype=torch.float)[:, None]
            columns["image_grid_thw"] = torch.ones(len(pictures), 3, dtype=torch.long)
        return columns

    data = [[document(1, 2)], [document()], [document(3), document(4, 5)]]
    plan = BatchPlan(3, 2, 2, dp_rank=0, dp_size=1, shuffle=False, seed=0)
    first, second = make_loader(data, Collator(9), plan, num_epochs=1)
    assert first["pixel_values"].flatten().tolist() == [1, 2]
    assert second["pixel_values"].flatten().tolist() == [3, 4, 5]  # not the filler's
    packs = [pack(check_batch(batch, True, Limits()), 4, 9) for batch in (first, second)]
    joined = with_image_slots(join(packs), 7)
    assert joined["pixel_values"].flatten().tolist() == [1, 2, 3, 4, 5]
    assert joined["image_grid_thw"].shape == (5, 3)
    slots = joined["image_slot"][0]
    assert slots[slots >= 0].tolist() == [0, 1, 2, 3, 4]
    assert (slots >= 0).equal(joined["input_ids"][0] == 7)
    later = join([pack(collated([document()]), 4, 9), packs[1]])
    assert later["pixel_values"].flatten().tolist() == [3, 4, 5]
    text = collated([document()])
    assert "pixel_values" not in text and (with_image_slots(split(text), 7)["image_slot"] < 0).all()


def test_margins_and_weights_of_pairs_are_fields_of_records(tmp_path):
    file = tmp_path / "a.jsonl"
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "gap": 0.5, "trust": 2}
    file.write_text(json.dumps(pair))
    register_column("more", default=1.0)  # a script's column beside them
    names = dict(pair_margin="gap", pair_weight="trust")
    keys = dict(dataset=[str(file)], cache_dir=str(tmp_path), cutoff_len=64, chat_template="plain")
    for _ in range(2):  # written, then read
        data = load_datasets(DataArguments(**keys, **names), "dpo", byte_tokenizer())
        documents = data.train[0]
        assert [(d["pair_margin"], d["pair_weight"]) for d in documents] == [(0.5, 2.0)] * 2
    data = load_datasets(DataArguments(**keys), "dpo", byte_tokenizer())
    assert "pair_margin" not in data.train[0][0]
    file.write_text(f"{json.dumps(pair)}\n{json.dumps({**pair, 'gap': None})}")
    with pytest.raises(ValueError, match="a.jsonl:2: 'gap' is missing or null"):
        load_datasets(DataArguments(**keys, **names), "dpo", byte_tokenizer())
    for weight in (-1, True):
        file.write_text(json.dumps({**pair, "trust": weight}))
        with pytest.raises(ValueError, match=f"a.jsonl:1: 'trust' is {weight}: expected a weight"):
            load_datasets(DataArguments(**keys, **names), "dpo", byte_tokenizer())
    with pytest.raises(ValueError, match="(?s)pair_margin: 'gap'.*stage sft has no pairs"):
        load_datasets(DataArguments(**keys, **names), "sft", byte_tokenizer())
