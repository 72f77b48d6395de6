"""Records with a label: TRL's and LLaMA-Factory's, a stage of a script with them, and what is
refused. A token is a byte.
"""

import json
from pathlib import Path

import pytest

from mca_lite import tables
from mca_lite.data_batches import Collator
from mca_lite.errors import ConfigError
from tests.shared import world
from tests.shared.chats import assistant, load_files, trained_answers, user, write_records
from tests.shared.commands import error_of
from tests.shared.small_runs import save_all, train_by_words
from tests.shared.training import read_log

TURNS = [user("a"), assistant("old"), user("b"), assistant("good")]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "good"}]
FORMS = {
    "trl": {"prompt": [user("a")], "completion": [assistant("good")], "label": True},
    "messages": {"messages": TURNS, "kto_tag": True},
    "sharegpt": {"conversations": SHAREGPT, "kto_tag": 1},
    "alpaca": {"instruction": "a", "output": "good", "label": 1.0},
}


def labels_of(dataset) -> list[float]:
    return [document["answer_label"] for [document] in dataset]


@pytest.mark.parametrize("form", FORMS)
def test_a_record_has_its_last_answer_and_its_label(tmp_path, form):
    record = FORMS[form]
    name = "label" if "label" in record else "kto_tag"
    path = write_records(tmp_path / "a.jsonl", record, {**record, name: False})
    dataset = load_files(tmp_path, path, stage="kto").train
    assert trained_answers(dataset) == ["good", "good"]
    assert labels_of(dataset) == [1.0, 0.0]


def test_texts_of_trl_are_trained_without_a_template(tmp_path):
    record = {"prompt": "What?", "completion": " That.", "label": False}
    path = write_records(tmp_path / "a.jsonl", record, {**record, "label": True})
    dataset = load_files(tmp_path, path, stage="kto").train
    assert labels_of(dataset) == [0.0, 1.0]
    assert trained_answers(dataset) == [" That.</s>"] * 2


def test_dataset_info_names_the_label_and_packs_keep_it(tmp_path):
    records = [{"messages": TURNS, "liked": i % 2 == 0} for i in range(5)]
    (tmp_path / "a.json").write_text(json.dumps(records))
    columns = {"messages": "messages", "kto_tag": "liked"}
    info = {"mine": {"file_name": "a.json", "formatting": "sharegpt", "columns": columns}}
    info["mine"]["tags"] = {"role_tag": "role", "content_tag": "content"}
    info["mine"]["tags"] |= {"user_tag": "user", "assistant_tag": "assistant"}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    keys = dict(stage="kto", dataset_dir=str(tmp_path), packing=True, cutoff_len=300)
    packed = load_files(tmp_path, "mine", **keys).train
    batch = Collator(0)([packed[0]])
    wanted = [float(number % 2 == 0) for number in packed.packs[0]]
    assert len(wanted) > 1
    assert batch["answer_label"].tolist() == [wanted]
    assert "kto_tag" in error_of(load_files, tmp_path, "mine", dataset_dir=str(tmp_path))


def test_a_stage_of_a_script_takes_records_with_scores(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "OBJECTIVES", dict(tables.OBJECTIVES))
    row = tables.register_objective("scored", records="labelled")
    assert row.has_labels and not row.has_pairs
    path = write_records(tmp_path / "a.jsonl", {"messages": TURNS, "label": -2.5})
    assert labels_of(load_files(tmp_path, path, stage="scored").train) == [-2.5]


def loss_of_label(folder, label, layout) -> float:
    """The loss of a first step, with a stage whose loss is the label times cross entropy."""
    from mca_lite import McaTrainer

    class ScoredTrainer(McaTrainer):
        def _pre_compute_loss(self, batch, inputs, *more):
            finish = super()._pre_compute_loss(batch, inputs, *more)
            [label] = set(batch["answer_label"].tolist())
            return lambda losses: finish(losses * label)

    tables.register_objective("scored", records="labelled", trainer=ScoredTrainer)
    keys = dict(layout, stage="scored", model_name_or_path=f"{folder}/model", max_steps=1)
    keys |= dict(logging_steps=1, global_batch_size=4, save_strategy="no", cutoff_len=64)
    keys |= {name: f"{folder}/{name}{label}" for name in ("cache_dir", "output_dir")}
    train_by_words({**keys, "dataset": f"{folder}/labels{label}.jsonl"})
    return read_log(Path(keys["output_dir"]))[0]["loss"]


def test_a_trainer_of_a_script_gets_the_labels(tmp_path):
    save_all(tmp_path, "qwen3", num_hidden_layers=2)
    records = [json.loads(line) for line in (tmp_path / "labelled.jsonl").read_text().splitlines()]
    for label in (1, 3):
        given = [{**record, "label": label} for record in records]
        write_records(tmp_path / f"labels{label}.jsonl", *given)
    layout = dict(context_parallel_size=2, packing=True)
    one, three = (world.run(loss_of_label, 2, str(tmp_path), n, layout)[0] for n in (1, 3))
    assert three == pytest.approx(3 * one, rel=1e-6)


@pytest.mark.parametrize(
    "record, words",
    [
        ({"messages": TURNS}, ("a.jsonl:1", "label")),
        ({"messages": TURNS, "label": "good"}, ("a.jsonl:1", "label")),
        ({"messages": TURNS, "label": 0.5}, ("a.jsonl:1", "'label' is 0.5", "true or 1")),
        ({"messages": TURNS, "label": float("nan")}, ("a.jsonl:1", "'label' is nan", "finite")),
        ({"messages": TURNS[:1], "label": True}, ("a.jsonl:1", "ends after user")),
        ({"text": "a", "label": True}, ("a.jsonl:1", "stage kto expects samples")),
    ],
)
def test_records_without_a_label_or_an_answer_are_refused(tmp_path, record, words):
    said = error_of(load_files, tmp_path, write_records(tmp_path / "a.jsonl", record), stage="kto")
    assert all(word in said for word in words), said


@pytest.mark.parametrize("name, keys", [("train", dict(max_samples=1)), ("eval", dict(val_size=1))])
def test_a_set_of_kto_with_one_sample_is_refused(tmp_path, name, keys):
    """Its mismatched answer would be its own one."""
    path = write_records(tmp_path / "a.jsonl", *[FORMS["messages"]] * 4)
    said = error_of(load_files, tmp_path, path, stage="kto", **keys)
    assert f"samples of {name}: stage kto compares 2 or more" in said, said


def test_keys_without_a_meaning_for_labels_are_refused(tmp_path):
    path = write_records(tmp_path / "a.jsonl", FORMS["messages"])
    for key in ("train_on_prompt", "streaming"):
        with pytest.raises(ConfigError, match=f"{key}: true"):
            load_files(tmp_path, path, stage="kto", **{key: True})


@pytest.mark.parametrize("tag", [True, False, 1, 0, 0.0])
def test_other_stages_refuse_records_with_a_label(tmp_path, tag):
    path = write_records(tmp_path / "a.jsonl", {"messages": TURNS, "kto_tag": tag})
    assert "set stage: kto" in error_of(load_files, tmp_path, path)


def test_a_number_in_a_column_label_may_be_a_class(tmp_path):
    path = write_records(tmp_path / "a.jsonl", {"messages": TURNS, "label": 0})
    assert len(load_files(tmp_path, path).train) == 1
