"""log_each_dataset: the loss of each dataset by hand on plain torch, and in every layout."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mca_lite.args import parse_args
from mca_lite.part_datasets import EachDataset
from mca_lite.tool_page import RunFolder, figures, page
from mca_lite.tool_watch import frame
from tests.shared import world
from tests.shared.commands import error_of
from tests.shared.layouts import CP2, PP2, TP2_SP
from tests.shared.policy_tools import rollouts, write_rollouts
from tests.shared.small_runs import save_all
from tests.shared.training import TOLERANCE, read_log

# the weights stay as they are: each loss of an epoch is that of the model in the folder
BASE = (
    "model_name_or_path={folder}/model cutoff_len=40 num_train_epochs=1 logging_steps=99 "
    "learning_rate=1e-30 global_batch_size=4 save_strategy=no save_hf_model=false bf16=false "
    "disable_tqdm=true overwrite_output_dir=true cache_dir={folder}/cache log_each_dataset=true "
    "output_dir={folder}/out-{name}"
)
CHATS = "dataset={folder}/chat.jsonl,{folder}/other.jsonl"
PAIRS = "dataset={folder}/pairs.jsonl,{folder}/more.jsonl ref_model={folder}/second"
RUNS = {
    "sft": CHATS,
    "packed": f"{CHATS} neat_packing=true per_device_train_batch_size=2",
    "mixed": f"{CHATS} mix_strategy=interleave_under val_size=2 eval_strategy=epoch",
    "streamed": f"{CHATS} streaming=true max_steps=6",
    "pt": "stage=pt dataset={folder}/chat.jsonl,{folder}/texts.jsonl",
    "dpo": f"stage=dpo {PAIRS}",
    "dpo packed": f"stage=dpo {PAIRS} neat_packing=true ref_model=cached",
    "kto": "stage=kto dataset={folder}/labelled.jsonl,{folder}/answers.jsonl "
    "ref_model={folder}/second",
    "rm": f"stage=rm {PAIRS.split(' ')[0]}",
    "grpo": "stage=grpo dataset={folder}/rollouts.jsonl,{folder}/tries.jsonl",
    "distill": f"stage=distill {CHATS} teacher_model_name_or_path={{folder}}/second",
}
LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2_sp": (2, TP2_SP),
    "pp2": (2, PP2),
    "cp2": (2, CP2),
    "torch": (1, dict(use_mca=False)),
}
# on plain torch rows are not cut
USUAL = ("sft", "packed", "dpo", "kto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    save_all(folder, "llama", num_hidden_layers=2)
    save_all(folder / "second", "llama", num_hidden_layers=2, seed=1)
    (folder / "second" / "model").rename(folder / "moved")
    for file in (folder / "moved").iterdir():
        file.rename(folder / "second" / file.name)
    texts = [json.dumps({"text": " ".join(f"w{n}" for n in range(i, 30))}) for i in range(12)]
    (folder / "texts.jsonl").write_text("\n".join(texts))
    for source, name in (("pairs", "more"), ("labelled", "answers")):
        lines = (folder / f"{source}.jsonl").read_text().splitlines()
        (folder / f"{name}.jsonl").write_text("\n".join(lines[3:10]))
    write_rollouts(folder / "rollouts.jsonl")
    write_rollouts(folder / "tries.jsonl", rollouts()[2:])
    return folder


def logged(folder: str, names: list[str], keys: dict) -> dict:
    """{run: its last line of training} on this rank, {} on others."""
    from mca_lite import cli, parallel

    parallel.shutdown = world.leave_layout  # the next run is of the same world
    lines = {}
    for name in names:
        words = f"{BASE} {RUNS[name]}".format(folder=folder, name=name.replace(" ", "-")).split()
        words += [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        last = {word.partition("=")[0]: word for word in words}
        assert cli.main(list(last.values())) == 0, name
        out = Path(last["output_dir"].partition("=")[2])
        lines[name] = [line for line in read_log(out) if "loss" in line][-1]
    return lines


def model_of(folder: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logps_of(model, document) -> torch.Tensor:
    """The log-probability of each trained token of a document."""
    ids, labels = (torch.as_tensor(document[name]).long() for name in ("input_ids", "labels"))
    logps = model(ids[None]).logits[0].log_softmax(-1)
    return logps[labels != -100, labels[labels != -100]]


@torch.no_grad()
def by_hand(folder: str) -> dict:
    """{run: [(sum, count) of each dataset]}, from plain transformers; without sums for the losses
    that take more than a line.
    """
    from mca_lite.data_batches import samples_of
    from mca_lite.run import make_plan

    model, second = (model_of(f"{folder}/{name}") for name in ("model", "second"))
    found = {}
    for name in ("sft", "packed", "pt", "dpo", "dpo packed", "kto", "rm", "grpo"):
        words = f"{BASE} {RUNS[name]}".format(folder=folder, name="hand").split()
        last = {word.partition("=")[0]: word for word in words}
        shards = samples_of(make_plan(parse_args(list(last.values()))).data.train).shards
        sets = [[shard.documents(row) for row in range(len(shard))] for shard in shards]
        found[name] = []
        for samples in sets:
            if name in ("kto", "rm", "grpo"):
                found[name].append((None, len(samples)))
                continue
            if name.startswith("dpo"):
                margins = [
                    sum(sign * logps_of(one, document).sum() for one, document, sign in (
                        (model, chosen, 1), (second, chosen, -1),
                        (model, rejected, -1), (second, rejected, 1),
                    ))
                    for chosen, rejected in samples
                ]  # fmt: skip
                if "cached" in RUNS[name]:  # the model itself
                    margins = [0 * margin for margin in margins]
                terms = -torch.nn.functional.logsigmoid(0.1 * torch.stack(margins))
            else:
                terms = -torch.cat([logps_of(model, document) for [document] in samples])
            found[name].append((float(terms.sum()), len(terms)))
    found["streamed"] = found["sft"]
    return found


@pytest.fixture(scope="module")
def wanted(folder):
    [found] = world.run(by_hand, 1, str(folder))
    return found


@pytest.fixture(scope="module")
def alone(folder):
    """{run: its line} on one rank."""
    [lines] = world.run(logged, 1, str(folder), list(RUNS), {}, timeout_s=240)
    return lines


def losses_of(line: dict) -> dict:
    return {key: value for key, value in line.items() if key.split("/")[0] == "loss"}


def test_each_loss_is_that_of_its_dataset_by_hand(alone, wanted):
    for name, of_sets in wanted.items():
        whole, *each = losses_of(alone[name]).values()
        counts = [count for _, count in of_sets]
        mean = sum(loss * count for loss, count in zip(each, counts, strict=True)) / sum(counts)
        assert whole == pytest.approx(mean, rel=TOLERANCE), name
        for loss, (total, count) in zip(each, of_sets, strict=True):
            assert total is None or loss == pytest.approx(total / count, rel=TOLERANCE), name
        assert each[0] != each[1] or name == "dpo packed", name
    names = {key for line in alone.values() for key in losses_of(line)}
    assert {"loss/chat", "loss/other", "loss/pairs", "loss/more", "loss/tries"} <= names


@pytest.mark.parametrize(
    "layout, name",
    [
        pytest.param(layout, name, marks=[] if name in USUAL else [pytest.mark.full])
        for layout in list(LAYOUTS)[1:]
        for name in RUNS
    ],
)
def test_each_loss_is_the_same_in_every_layout(layout, name, alone, in_layouts):
    got = losses_of(in_layouts[layout][name])
    assert got == pytest.approx(losses_of(alone[name]), rel=TOLERANCE)


def test_watch_and_the_page_show_each_loss(alone, folder):
    run = RunFolder(folder / "out-sft")
    loss = alone["sft"]["loss/chat"]
    assert figures(run)["loss/chat"] == f"{loss:.4f}"
    assert any(line.startswith("loss/other ") for line in frame([run], 80))
    assert ">loss/other" in page([run])


def test_what_has_no_terms_of_one_dataset_is_refused(folder):
    words = f"{BASE} {RUNS['pt']} streaming=true max_steps=2".format(folder=folder, name="refused")
    assert "log_each_dataset" in error_of(parse_args, words.split())
    data = SimpleNamespace(train=None)
    trainer = SimpleNamespace(metrics_keys=["loss"], terms=None)
    EachDataset(data, ["a/b.jsonl", "c"]).on_init_end(None, None, None, trainer)
    assert trainer.metrics_keys == ["loss", "loss/b", "loss/c"]
    with pytest.raises(ValueError, match="_post_compute_loss of SimpleNamespace does not call"):
        trainer.around_loss({}, lambda output: (0, 0, {}), None)
    EachDataset(data, ["a/b.jsonl", "c/b.jsonl"]).on_init_end(None, None, None, trainer)
    assert trainer.metrics_keys[3:] == ["loss/a/b.jsonl", "loss/c/b.jsonl"]


@pytest.fixture(scope="module")
def in_layouts(request, folder):
    asked = {}
    for item in request.session.items:
        values = getattr(item, "callspec", None) and item.callspec.params
        if item.module is request.module and values and "layout" in values:
            asked.setdefault(values["layout"], []).append(values["name"])
    found = {}
    for layout, names in asked.items():
        ranks, keys = LAYOUTS[layout]
        found[layout], *_ = world.run(logged, ranks, str(folder), names, keys, timeout_s=240)
    return found
