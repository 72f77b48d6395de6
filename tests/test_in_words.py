"""What would train something else than its user thinks: refused, or said, in words."""

import pytest
import torch

from mca_lite.batch import IGNORE_INDEX
from mca_lite.data_batches import Limits, check_batch
from tests.shared import tiny, world
from tests.shared.training import refusal, train

IDS = [5, 6, 7, 7, 8]


# -- labels in Hugging Face's form


def words_for(labels: list, ids: list = IDS, mask=None, packs=False) -> str:
    """The refusal of a batch of one row."""
    batch = {"input_ids": [ids], "labels": [labels]}
    if mask is not None:
        batch["attention_mask"] = [mask]
    return refusal(check_batch, batch, packs, Limits())


@pytest.mark.parametrize("masked", [0, 2, 3])
def test_labels_that_equal_the_input_are_refused(masked):
    labels = masked * [IGNORE_INDEX] + IDS[masked:]
    words = words_for(labels)
    assert "labels equal input_ids wherever they are not -100" in words
    assert "input_ids[:-1] with labels[1:]" in words
    assert words_for([*labels, IGNORE_INDEX], [*IDS, 0], [1] * 5 + [0])  # padded


def test_shifted_labels_that_happen_to_equal_the_input_are_taken():
    assert not words_for([6, 7, 7, 8, 9])
    assert not words_for([7] * 5, [7] * 5)  # one token again and again
    nothing = [IGNORE_INDEX] * 4
    assert not words_for([*nothing, 8])  # the last label has no next input to be compared with
    assert not words_for(nothing + nothing[:1])
    # documents of a packed row: a label at a border is not the next document's first token
    assert not words_for([7, 7, 7, 8, 8], [7, 7, 7, 8, 8], [1, 1, 1, 2, 2], packs=True)


def in_hugging_faces_form() -> list[dict]:
    return [{"input_ids": s["input_ids"], "labels": s["input_ids"]} for s in tiny.samples(8)]


def refusals_of_unshifted(path: str, out: str) -> list[str]:
    from mca_lite.trainer import McaTrainer

    def with_collator(*args, **given):
        def collate(samples):
            ids = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], True)
            return {"input_ids": ids, "labels": ids}

        return McaTrainer(*args, **given, data_collator=collate)

    given = dict(data=in_hugging_faces_form(), steps=1, warmup_steps=0)
    return [
        refusal(train, path, f"{out}/a", **given),
        refusal(train, path, f"{out}/b", trainer_class=with_collator, steps=1, warmup_steps=0),
    ]


def test_a_trainer_refuses_samples_and_batches_in_hugging_faces_form(tmp_path):
    path = tiny.save_model(tmp_path / "model", "qwen3")
    for words in world.run(refusals_of_unshifted, 1, path, str(tmp_path))[0]:
        assert "labels equal input_ids" in words
