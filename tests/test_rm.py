"""Reward models in every layout train as transformers' models for sequence classification do: loss,
metrics and gradient norm of whole curves, files, scores.
"""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mca_lite.args import parse_args
from mca_lite.data_batches import Collator
from mca_lite.files import read_json
from mca_lite.part_lora_files import read_adapter
from mca_lite.part_pictures_data import ROPE_COLUMNS
from mca_lite.run import make_plan
from mca_lite.tool_generation import load_for_generation
from tests.shared import tiny, tiny_moe, world
from tests.shared.answers import (
    OF_PACKS,
    STEPS,
    assert_every_rank_has,
    assert_resumed_bit_for_bit,
    cells_of_layouts,
    curve_of_run,
    packs_of,
    wrong_of_layout,
)
from tests.shared.chats import load_files, write_records
from tests.shared.commands import error_of, run_script
from tests.shared.dpo_tools import curve_of, differences
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.layouts import CP2, EP2, PACKED, PP2, SP, TP2, TP2_SP, VPP2
from tests.shared.rm_tools import (
    PAD,
    SIDES,
    Ending,
    Rated,
    load,
    make_oracles,
    numbers_of,
    oracle_curve,
    padded_scores,
    rm_run,
    save_model,
    score,
)
from tests.shared.small_runs import save_all, save_tokenizer, train_by_words, write_data
from tests.shared.toy_tokenizer import CHATML, byte_tokenizer

USUAL = {
    "one": ("full padded", "lora packed"),
    "tp2pp2": ("full padded", "lora packed"),
    "cp2": ("full packed",),
    "torch": ("lora padded",),
    "tp2sp": ("full packed",),
}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    """(model folder, folder of the adapter to start from, {kind: curve})"""
    folder = tmp_path_factory.mktemp("rm")
    path = save_model(folder / "model")
    [curves] = world.run(make_oracles, 1, path, str(folder), STEPS, timeout_s=120)
    return path, f"{folder}/start", curves


@pytest.mark.parametrize("layout, cells", cells_of_layouts(USUAL))
def test_a_reward_model_trains_as_plain_torch(layout, cells, oracles, tmp_path):
    wrong = wrong_of_layout(rm_run, layout, cells, oracles, tmp_path)
    assert not wrong, wrong


# -- families, and experts

FAMILIES = "llama qwen2 gemma2 phi3 deepseek_v2".split()
OF_EXPERTS = {"ep2": (2, EP2), "ep2tp2": (4, {**EP2, **TP2_SP}), "cp2ep2": (2, {**CP2, **EP2})}


def oracle_of(path) -> list:
    return oracle_curve(load(path))


@pytest.mark.parametrize(
    "family, ranks, keys",
    [pytest.param(family, 2, TP2_SP, marks=pytest.mark.full) for family in FAMILIES]
    + [
        pytest.param("qwen3_moe", *layout, marks=pytest.mark.full, id=name)
        for name, layout in OF_EXPERTS.items()
    ],
)
def test_families_and_experts_train_as_plain_torch(family, ranks, keys, tmp_path):
    path = save_model(tmp_path / "model", family, num_hidden_layers=2)
    [wanted] = world.run(oracle_of, 1, path)
    for rows in PACKED, dict(per_device_train_batch_size=2):
        assert_every_rank_has(wanted, ranks, rm_run, path, tmp_path / "run", {**keys, **rows})


# -- packs, evaluations, predictions, resume


def oracle_of_packs(path) -> list:
    return oracle_curve(load(path), packs=packs_of(Rated()))


@pytest.mark.parametrize(
    "keys", [pytest.param({**PP2, **VPP2}, marks=pytest.mark.full), dict(backend="torch")]
)
def test_packs_weigh_every_pair_alike(oracles, tmp_path, keys):
    [wanted] = world.run(oracle_of_packs, 1, oracles[0])
    assert_every_rank_has(wanted, 2, rm_run, oracles[0], tmp_path, {**keys, **OF_PACKS})


def scored(path, out, keys) -> tuple:
    """(metrics of an evaluation, predictions, metrics of these), of a model after a step; its
    folder has the model."""
    data = dict(eval_dataset=Rated(5, seed=4), per_device_eval_batch_size=2)
    trainer = rm_run(path, out, **{**keys, **data, "max_steps": 1})
    assert [note for note in trainer.args.notes if "no pad_token" in note]
    found = trainer.evaluate(), *trainer.predict(trainer.eval_dataset)
    trainer.save_model()
    return found


def expected(trained) -> tuple:
    """The same by transformers on what was exported, one document after another."""
    pairs = Rated(5, seed=4).pairs
    model = load(trained)
    with torch.no_grad():
        scores = [[float(score(model, pair[side])) for side in SIDES] for pair in pairs]
        return numbers_of(model, pairs)[1], scores


@pytest.mark.parametrize(
    "ranks, keys",
    [
        (4, {**TP2, **PP2, **PACKED}),
        pytest.param(1, dict(backend="torch"), marks=pytest.mark.full),
        pytest.param(2, CP2, marks=pytest.mark.full),
        pytest.param(2, {**TP2, **SP}, marks=pytest.mark.full),
    ],
)
def test_an_export_gives_transformers_the_scores_of_a_prediction(oracles, tmp_path, ranks, keys):
    found = world.run(scored, ranks, oracles[0], str(tmp_path), keys)[0]
    evaluated, predictions, _, of_predictions = found
    [(wanted, scores)] = world.run(expected, 1, str(tmp_path))
    for key, value in wanted.items():
        assert evaluated[f"eval_{key}"] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    assert predictions == pytest.approx(np.array(scores), rel=1e-5, abs=1e-6)
    name = "rewards/accuracies"
    assert of_predictions[f"test_{name}"] == pytest.approx(wanted[name])


# -- the pad token in answers


def run_with_pads(path, out, of_config: bool, keys) -> tuple:
    """(curve, scores of a prediction) of a run; its folder has the model. of_config: the config
    names the token that pads, and no tokenizer is given."""
    tokenizer = SimpleNamespace(pad_token_id=PAD, save_pretrained=str)
    given = dict(train_dataset=Ending(), tokenizer=None if of_config else tokenizer)
    trainer = rm_run(path, out, **keys, **given)
    assert not [note for note in trainer.args.notes if "no pad_token" in note]
    trainer.save_model()
    return curve_of(trainer), trainer.predict(Ending()).predictions


def oracle_with_pads(path, of_config: bool) -> list:
    """A pad token of the config has no gradient in the embedding, one of the tokenizer has."""
    return oracle_curve(load(path, None if of_config else PAD), data=Ending())


def scores_with_pads(trained) -> dict:
    """{side of the padding: scores of all pairs} by transformers on what was exported."""
    model = load(trained)
    assert model.config.get_text_config().pad_token_id == PAD
    documents = [pair[side] for pair in Ending().pairs for side in SIDES]
    return {side: padded_scores(model, documents, side) for side in ("left", "right")}


@pytest.mark.parametrize(
    "ranks, keys, of_config",
    [
        (2, {**CP2, **PACKED}, True),
        (1, dict(backend="torch", per_device_train_batch_size=2), False),
        pytest.param(4, {**TP2, **PP2}, False, marks=pytest.mark.full),
        pytest.param(2, {**PP2, **PACKED}, False, marks=pytest.mark.full),
    ],
)
def test_answers_that_hold_the_pad_token_are_scored_as_by_transformers(
    oracles, tmp_path, ranks, keys, of_config
):
    path = shutil.copytree(oracles[0], tmp_path / "model")
    if of_config:
        config = read_json(path / "config.json")
        (path / "config.json").write_text(json.dumps({**config, "pad_token_id": PAD}))
    out = str(tmp_path / "run")
    curve, predictions = world.run(run_with_pads, ranks, str(path), out, of_config, keys)[0]
    [wanted] = world.run(oracle_with_pads, 1, str(path), of_config)
    assert not differences(curve, wanted)
    [scores] = world.run(scores_with_pads, 1, out)
    for of_side in scores.values():
        assert predictions.flatten() == pytest.approx(of_side, rel=1e-5, abs=1e-6)


def run_of_a_model_with_a_tower(path, out, keys) -> list:
    """Scores of a prediction; the run's folder has the model."""
    data = Ending()
    for pair in data.pairs:
        for side in SIDES:
            positions = torch.arange(len(pair[side]["input_ids"]))
            pair[side].update(dict.fromkeys(ROPE_COLUMNS, positions))
    tokenizer = SimpleNamespace(pad_token_id=PAD, save_pretrained=str)
    trainer = rm_run(path, out, train_dataset=data, tokenizer=tokenizer, max_steps=1, **keys)
    trainer.save_model()
    return trainer.predict(data).predictions


@pytest.mark.full
@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_a_text_config_has_the_pad_token_of_exports(tmp_path, backend):
    path = save_model(tmp_path / "model", "qwen3_5")
    out = str(tmp_path / "run")
    keys = dict(backend=backend)
    [predictions] = world.run(run_of_a_model_with_a_tower, 1, path, out, keys)
    [scores] = world.run(scores_with_pads, 1, out)
    for of_side in scores.values():
        assert predictions.flatten() == pytest.approx(of_side, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.full), "lora"])
def test_resume_is_bit_for_bit(oracles, tmp_path, kind):
    path, adapter, _ = oracles
    keys = dict(adapter=adapter if kind == "lora" else None)
    assert_resumed_bit_for_bit(rm_run, path, tmp_path, keys)


def resumed_elsewhere(path, out, keys) -> list:
    """The curve of a run that goes on from out/parts/checkpoint-2 in another layout."""
    checkpoint = f"{out}/parts/checkpoint-2"
    return curve_of(rm_run(path, f"{out}/more", resume_from_checkpoint=checkpoint, **keys))


@pytest.mark.full
def test_a_checkpoint_goes_on_in_another_layout(oracles, tmp_path):
    path, _, curves = oracles
    saving = dict(save_strategy="steps", save_steps=2, max_steps=2)
    world.run(curve_of_run, 2, rm_run, path, str(tmp_path / "parts"), {**TP2, **SP, **saving})
    keys = {**PP2, "max_steps": STEPS}
    *_, got = world.run(resumed_elsewhere, 2, path, str(tmp_path), keys)
    assert not differences(got[-1:], curves["full"][-1:])


def adapter_of_run(path, out, adapter) -> dict:
    from mca_lite.part_lora_files import trained_tensors

    trainer = rm_run(path, out, adapter, max_steps=1, **TP2)
    trainer.save_model()
    return {name: tensor.shape for name, tensor in trained_tensors(trainer.model).items()}


def peft_reads(path, out) -> tuple[list, bool]:
    from peft import PeftModel
    from safetensors.torch import load_file

    model = PeftModel.from_pretrained(load(path), out).eval()
    head = load_file(f"{out}/adapter_model.safetensors")["base_model.model.score.weight"]
    with torch.no_grad():
        scores = [float(score(model, pair["chosen"])) for pair in Rated(3, seed=4).pairs]
    return scores, torch.equal(model.base_model.model.score.weight, head)


def test_peft_reads_adapters_with_their_value_head(oracles, tmp_path):
    path, adapter, _ = oracles
    shapes = world.run(adapter_of_run, 2, path, str(tmp_path), adapter)[0]
    assert shapes["score.weight"] == (1, 32)
    [(scores, has_head)] = world.run(peft_reads, 1, path, str(tmp_path))
    assert has_head and len(set(scores)) == 3
    values = read_json(tmp_path / "adapter_config.json")
    assert values["task_type"] == "SEQ_CLS"
    del values["modules_to_save"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    assert read_adapter(tmp_path)[0].modules_to_save in ((), [])


# -- a run of the command line


def test_a_causal_model_gets_a_value_head_the_same_in_two_layouts_and_on_torch(tmp_path):
    save_all(tmp_path, "qwen3", num_hidden_layers=2)
    short = (
        f"stage=rm model_name_or_path={tmp_path}/model dataset={tmp_path}/pairs.jsonl "
        f"eval_dataset={tmp_path}/pairs.jsonl max_steps=2 logging_steps=1 global_batch_size=4 "
        "learning_rate=1e-3 do_predict=true do_eval=true save_strategy=no "
        "center_rewards_coefficient=0.01 cutoff_len=64"
    )
    runs = {
        "tp2": (2, "tensor_model_parallel_size=2 packing=true"),
        "pp2": (2, "pipeline_model_parallel_size=2 per_device_train_batch_size=2"),
        "torch": (1, "use_mca=false per_device_train_batch_size=2"),
    }
    lines = {}
    for name, (ranks, keys) in runs.items():
        shown = run_script(f"{short} {keys} output_dir={tmp_path / name}", tmp_path, ranks).stdout
        assert "rm, center_rewards_coefficient 0.01" in shown and "warning" not in shown
        text = (tmp_path / name / "predictions.jsonl").read_text()
        lines[name] = [json.loads(line) for line in text.splitlines()]
        assert lines[name][0].keys() == {"index", *SIDES} and len(lines[name]) == 12
    for ours, theirs in zip(lines["pp2"], lines["torch"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    config = read_json(tmp_path / "pp2" / "config.json")
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"} and isinstance(config["pad_token_id"], int)
    [found] = world.run(scores_of_a_file, 1, str(tmp_path / "pp2"), str(tmp_path / "pairs.jsonl"))
    for line, scores in zip(lines["pp2"], found, strict=True):
        assert [line[side] for side in SIDES] == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize(
    "keys",
    [
        dict(finetuning_type="lora", lora_rank=2),
        dict(finetuning_type="freeze", freeze_extra_modules="embed_tokens"),
    ],
)
def test_rows_of_new_tokens_train_in_the_embedding_alone(keys, tmp_path):
    """A reward model has no head with a row a token, even if its embedding was one."""
    save_all(tmp_path, "qwen3", num_hidden_layers=2)
    keys = dict(
        keys,
        stage="rm",
        model_name_or_path=f"{tmp_path}/model",
        dataset=f"{tmp_path}/pairs.jsonl",
        cache_dir=f"{tmp_path}/cache",
        add_tokens=["new1", "new2"],
        max_steps=2,
        learning_rate=1e-3,
        adam_epsilon=1e-5,
        save_strategy="no",
        preprocessing_num_workers=1,
    )
    world.run(train_by_words, 2, {**keys, **TP2, "output_dir": f"{tmp_path}/tp2"})
    world.run(train_by_words, 1, {**keys, "use_mca": False, "output_dir": f"{tmp_path}/torch"})
    got = tensors(tmp_path / "tp2")
    assert_same_tensors(got, tensors(tmp_path / "torch"))
    [rows] = [tensor for name, tensor in got.items() if name.endswith("embed_tokens.weight")]
    assert len(rows) == tiny.VOCAB + 1


def converted(words: list[str]) -> int:
    from mca_lite import tool_convert

    return tool_convert.main([*words, "--verify"])


def scores_of_both(base, adapter, merged) -> list:
    """Scores of an answer by PEFT on the causal base, and by transformers on the merged model."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification as Scores

    models = [Scores.from_pretrained(base, num_labels=1), Scores.from_pretrained(merged)]
    models[0] = PeftModel.from_pretrained(models[0], adapter)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        return [float(model.eval()(ids).logits) for model in models]


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_an_adapter_with_its_value_head_is_merged_into_a_causal_model(family, tmp_path):
    """By `convert --merge`; --verify reads scores of whole models and of checkpoints too."""
    tables = tiny_moe if family in tiny_moe.MODELS else tiny
    base = tables.save_model(tmp_path / "model", family, num_hidden_layers=2)
    save_tokenizer(base)
    write_data(tmp_path)
    keys = dict(
        stage="rm",
        finetuning_type="lora",
        lora_target="q_proj,o_proj",
        model_name_or_path=base,
        dataset=f"{tmp_path}/pairs.jsonl",
        cache_dir=f"{tmp_path}/cache",
        output_dir=f"{tmp_path}/run",
        max_steps=2,
        learning_rate=1e-2,
        save_strategy="no",
        preprocessing_num_workers=1,
    )
    world.run(train_by_words, 1, keys)
    run, merged = str(tmp_path / "run"), str(tmp_path / "merged")
    assert world.run(converted, 1, [base, merged, "--merge", run]) == [0]
    [(wanted, got)] = world.run(scores_of_both, 1, base, run, merged)
    assert got == pytest.approx(wanted, abs=1e-6)
    assert world.run(converted, 1, [merged, str(tmp_path / "checkpoint")]) == [0]
    assert "lm_head.weight" not in tensors(merged)


def scores_of_a_file(folder, file) -> list:
    """As one who has transformers alone scores conversations, in a padded batch."""
    from pathlib import Path

    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for line in Path(file).read_text().splitlines():
        record = json.loads(line)
        texts = [
            tokenizer.apply_chat_template([*record["prompt"], record[side]], tokenize=False)
            for side in SIDES
        ]
        inputs = tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            found.append(model(**inputs).logits[:, 0].tolist())
    return found


def test_documents_of_files_are_whole_and_have_margins_and_weights(tmp_path):
    pair = {"prompt": "a", "chosen": "good", "rejected": "bad", "gap": 0.5, "trust": 2}
    path = write_records(tmp_path / "a.jsonl", pair, {**pair, "gap": 0})
    keys = dict(stage="rm", pair_margin="gap", pair_weight="trust")
    dataset = load_files(tmp_path, path, **keys).train
    batch = Collator(0)(list(dataset))
    assert batch["pair_margin"].tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert batch["pair_weight"].tolist() == [[2.0, 2.0]] * 2
    tokenizer = byte_tokenizer(CHATML)
    prompt = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    texts = [tokenizer.decode(side["input_ids"]) for side in dataset[0]]
    assert texts == [f"{prompt}{answer}<|im_end|>\n" for answer in ("good", "bad")]
    cut = load_files(tmp_path, path, cutoff_len=10, **keys).train
    assert [len(side["input_ids"]) for side in cut[0]] == [10, 9]
    path = write_records(tmp_path / "b.jsonl", pair, {**pair, "gap": None})
    assert "gap" in error_of(load_files, tmp_path, path, **keys)


def test_a_margin_of_records_is_subtracted_by_its_key_or_refused(tmp_path):
    pair = {"prompt": "a", "chosen": "good", "rejected": "bad", "margin": 0.5}
    path = write_records(tmp_path / "a.jsonl", pair, {**pair, "margin": 0})
    said = error_of(load_files, tmp_path, path, stage="rm")
    assert "a.jsonl:1: the column 'margin'" in said and "pair_margin: margin" in said
    dataset = load_files(tmp_path, path, stage="rm", pair_margin="margin").train
    assert Collator(0)(list(dataset))["pair_margin"].tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert len(load_files(tmp_path, path, stage="dpo").train) == 2


def test_margins_are_refused_where_no_pair_is(tmp_path):
    path = write_records(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b", "label": 1})
    said = error_of(load_files, tmp_path, path, stage="kto", pair_margin="gap")
    assert "stage kto has no pairs" in said


# -- what is refused


def refusals(path, causal, out) -> list[str]:
    half = [{**pair} for pair in Rated().pairs[:4]]
    half[1].pop("pair_margin")
    ids = torch.full_like(half[0]["chosen"]["input_ids"], PAD)
    pads = {**half[0], "chosen": {**half[0]["chosen"], "input_ids": ids}}
    tokenizer = SimpleNamespace(pad_token_id=PAD, save_pretrained=print)
    cases = [
        (causal, {}),
        (path, dict(train_dataset=half, per_device_train_batch_size=4)),
        (path, dict(train_dataset=[{**half[0], "answer_label": 1}] * 4)),
        (path, dict(train_dataset=[pads] * 4, tokenizer=tokenizer)),
        (path, dict(calculate_per_token_loss=False)),
    ]
    return [error_of(rm_run, p, f"{out}/{n}", **keys) for n, (p, keys) in enumerate(cases)]


def test_what_cannot_be_trained_is_refused(oracles, tmp_path):
    causal = tiny.save_model(tmp_path / "causal", "qwen3", num_hidden_layers=2)
    [said] = world.run(refusals, 1, oracles[0], causal, str(tmp_path))
    words = [
        "has a value head",
        "have no pair_margin",
        "the samples have answer_label, without an effect",
        "another pad_token",
        "calculate_per_token_loss",
    ]
    for text, expected_words in zip(said, words, strict=True):
        assert expected_words in text


def test_models_of_another_stage_are_refused_before_ranks_meet(oracles, tmp_path):
    save_tokenizer(oracles[0])
    write_data(tmp_path)

    def planned(path, *words) -> str:
        files = [f"output_dir={tmp_path}/out", f"cache_dir={tmp_path}/cache"]
        given = [f"model_name_or_path={path}", *files, *words]
        return error_of(lambda: make_plan(parse_args(given)))

    chat = f"dataset={tmp_path}/chat.jsonl"
    pairs = f"dataset={tmp_path}/pairs.jsonl"
    assert "reward model" in planned(oracles[0], "stage=sft", chat)
    assert "reward model" in planned(oracles[0], "stage=sft", chat, "use_mca=false")
    assert "reward model" in error_of(load_for_generation, oracles[0])
    path = tiny.save_model(tmp_path / "granite", "granite")
    save_tokenizer(path)
    assert "sequence classification" in planned(path, "stage=rm", pairs)
    path = tiny.save_model(tmp_path / "trl", "qwen3")
    save_tokenizer(path)
    (tmp_path / "trl" / "value_head.safetensors").write_bytes(b"")
    for backend in "true", "false":
        words = ("stage=rm", pairs, f"use_mca={backend}")
        assert "v_head.summary.weight" in planned(path, *words)
