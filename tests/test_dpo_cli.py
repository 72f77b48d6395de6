"""Stage dpo as a user runs it: train.py on the embedded pairs, and what is refused before anything
starts.
"""

import json
import math
import re
from types import SimpleNamespace

import pytest

from mca_lite.args import parse_args
from mca_lite.errors import ConfigError
from tests.shared import tiny, world
from tests.shared.commands import ROOT, run_script
from tests.shared.small_runs import save_all, save_tokenizer, train_by_words, write_data
from tests.shared.training import read_log

MODEL = "model_name_or_path=configs/tiny/model train_from_scratch=true"
SHORT = (
    f"{MODEL} max_steps=3 logging_steps=1 eval_steps=3 global_batch_size=8 "
    "per_device_train_batch_size=2 max_samples=40"
)
SMALL = SHORT.replace("max_samples=40", "max_samples=16").replace("size=8", "size=4")


def test_the_example_gives_the_same_numbers_in_two_layouts_with_two_references(tmp_path):
    layout = (
        "pipeline_model_parallel_size=2 metric_for_best_model=rewards/accuracies "
        "save_strategy=steps save_steps=3"
    )
    layout += " load_best_model_at_end=true"
    shown = run_script(
        f"configs/dpo.yaml {SMALL} {layout} output_dir={tmp_path / 'pp2'}", tmp_path, nproc=2
    ).stdout
    torch = run_script(
        f"configs/dpo.yaml {SMALL} use_mca=false ref_model=model output_dir={tmp_path / 'torch'}",
        tmp_path,
    ).stdout
    ours, theirs = read_log(tmp_path / "pp2"), read_log(tmp_path / "torch")
    assert len(ours) == len(theirs) == 4, "three steps and an evaluation"
    for a, b in zip(ours, theirs, strict=True):
        keys = [
            k
            for k in b
            if re.search("loss|rewards/(chosen|rejected|margins)|logps|grad_norm|consumed", k)
        ]
        assert len(keys) >= 7
        for key in keys:
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-5), key
    for words in (
        "16 pairs",
        "first chosen",
        "dpo, pref_loss sigmoid, beta 0.1",
        "reference model: 16 of 16 pairs",
        "checkpoint-3",
    ):
        assert words in shown, words
    assert "warning" not in shown + torch and "reference model:" not in torch
    again = run_script(
        f"configs/dpo.yaml {SMALL} eval_strategy=no output_dir={tmp_path / 'again'}", tmp_path
    ).stdout
    assert "reference model: 16 of 16 pairs in" in again
    assert "reference model: 0 of" not in again, "what one layout computed another one reads"


def test_packs_and_adapters_train_from_the_command_line(tmp_path):
    lora = (
        "finetuning_type=lora lora_rank=4 packing=true cutoff_len=100 "
        "per_device_train_batch_size=1 global_batch_size=2"
    )
    shown = run_script(
        f"configs/dpo.yaml {SHORT} {lora} ref_model=adapter output_dir={tmp_path}",
        tmp_path,
        nproc=2,
    ).stdout
    assert re.search(r"packed into \d+ rows of at most 200 tokens", shown) and re.search(
        r"training +\d+ packs of 40 pairs", shown
    )
    assert (
        read_log(tmp_path)[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
        and "warning" not in shown
    )
    assert (tmp_path / "adapter_model.safetensors").is_file() and "reference model:" not in shown


def problems(*words) -> dict:
    with pytest.raises(ConfigError) as error:
        parse_args(["configs/dpo.yaml", "model_name_or_path=configs/tiny/model", *words])
    return {
        problem.key: f"{problem.reason} -> {problem.suggestion}" for problem in error.value.problems
    }


def test_keys_that_do_not_fit_together_are_refused(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert "sigmoid" in problems("pref_loss=ranked")["pref_loss"]
    assert "no reference model" in problems("pref_loss=orpo")["ref_model"]
    assert (
        "since pref_loss is orpo"
        in problems("pref_loss=orpo", "dpo_label_smoothing=0.1")["dpo_label_smoothing"]
    )
    assert "no adapters" in problems("ref_model=adapter")["ref_model"]
    lora = ("finetuning_type=lora", "modules_to_save=norm", "ref_model=adapter")
    assert "ref_model: cached" in problems(*lora)["ref_model"]
    assert "no folder" in problems("ref_model=nowhere")["ref_model"]
    assert (
        "pairs of the global batch"
        in problems("calculate_per_token_loss=false")["calculate_per_token_loss"]
    )
    assert "no part in a preference loss" in problems("mtp_num_layers=1")["mtp_num_layers"]
    assert "of other trainers" in problems("ref_model_adapters=x")["ref_model_adapters"]
    assert "pref_loss: [sigmoid, bco_pair]" in problems("pref_bco_weight=0.1")["pref_bco_weight"]
    assert {"pref_beta", "dpo_label_smoothing"} <= problems(
        "pref_beta=-1", "dpo_label_smoothing=0.6"
    ).keys()
    of_dpo = problems("stage=sft", "metric_for_best_model=sft_loss")
    assert "an evaluation gives loss" in of_dpo["metric_for_best_model"]
    assert "an evaluation" not in str(problems("metric_for_best_model=sft_loss", "pref_beta=-1"))


def test_keys_of_preferences_on_another_stage_are_named(monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["configs/sft.yaml", "pref_loss=orpo", "pref_beta=0.2"]
    of_stage = [note for note in parse_args(words).warnings if "since stage is sft" in note]
    assert [note.partition(":")[0] for note in of_stage] == ["pref_beta", "pref_loss"]


def test_what_cannot_be_trained_on_is_told_before_anything_starts(tmp_path, monkeypatch, capsys):
    from mca_lite import cli

    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {**json.loads((ROOT / "configs/tiny/model/config.json").read_text()), "vocab_size": 300}
        )
    )
    for words, wanted in {
        "dataset=configs/tiny/sft.jsonl": "stage dpo expects pairs",
        "pref_loss=ranked": "pref_loss",
        f"ref_model={tmp_path}": "vocabulary of 300 tokens",
    }.items():
        argv = [
            *f"configs/dpo.yaml {SHORT}".split(),
            words,
            f"output_dir={tmp_path / 'out'}",
            f"cache_dir={tmp_path / 'c'}",
        ]
        assert cli.main(argv) == cli.USER_ERROR
        assert wanted in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_an_adapter_that_changes_the_model_has_no_reference_in_it(tmp_path, monkeypatch):
    from mca_lite.part_dpo import DPOTrainer
    from mca_lite.part_lora import Lora, LoraSpec

    monkeypatch.chdir(ROOT)
    words = [
        "configs/dpo.yaml",
        *SHORT.split(),
        "finetuning_type=lora",
        f"adapter_name_or_path={tmp_path}",
    ]
    adapters = Lora(LoraSpec(modules_to_save=("lm_head",)))  # as the folder's file has it
    planned = SimpleNamespace(folder=ROOT, finetuning=adapters)
    folder_of = DPOTrainer.second_model_folder
    with pytest.raises(ConfigError, match="try: ref_model: model"):
        folder_of(parse_args(words), planned)
    assert folder_of(parse_args([*words, "ref_model=model"]), planned) == ROOT
    new_tokens = parse_args([*words[:-1], "ref_model=adapter"])
    new_tokens.parts["lora"].modules_to_save = ["embed_tokens"]  # as new tokens make it
    with pytest.raises(ValueError, match="try: ref_model: cached"):
        folder_of(new_tokens, planned)


def test_a_run_says_that_its_reference_lacks_the_adapter_it_begins_with(tmp_path):
    from mca_lite import run
    from tests.shared.lora_tools import peft_model

    save_all(tmp_path, "llama", num_hidden_layers=2)
    peft_model(str(tmp_path / "model")).save_pretrained(tmp_path / "adapter")
    keys = {
        "model_name_or_path": tmp_path / "model",
        "stage": "dpo",
        "dataset": tmp_path / "pairs.jsonl",
        "finetuning_type": "lora",
        "adapter_name_or_path": tmp_path / "adapter",
        "cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "out",
        "max_steps": 1,
    }

    def is_told(**changes) -> bool:
        words = [f"{key}={value}" for key, value in (keys | changes).items()]
        plan = run.make_plan(parse_args(words))
        return any("rewards do not begin at 0" in line for line in plan.data.report)

    assert is_told() and is_told(ref_model="model") and is_told(ref_model="cached")
    assert not is_told(ref_model=tmp_path / "model")  # asked for by its name
    assert not is_told(pref_loss="orpo") and not is_told(adapter_name_or_path="null")


def test_a_line_of_the_log_has_the_pairs_of_all_its_steps_after_a_restart(tmp_path):
    """Context-parallel ranks have the same pairs: steps made by two of them would count twice."""
    tiny.save_model(tmp_path / "model", "llama")
    save_tokenizer(tmp_path / "model")
    write_data(tmp_path)
    keys = dict(model_name_or_path=f"{tmp_path}/model", dataset=f"{tmp_path}/pairs.jsonl")
    keys.update(stage="dpo", cutoff_len=32, cache_dir=f"{tmp_path}/cache", disable_tqdm=True)
    keys.update(max_steps=3, logging_steps=3, save_steps=1, global_batch_size=2, learning_rate=1e-2)
    world.run(train_by_words, 1, {**keys, "output_dir": f"{tmp_path}/whole"})
    resume = dict(resume_from_checkpoint=f"{tmp_path}/whole/checkpoint-1")
    cp2 = dict(keys, output_dir=f"{tmp_path}/parts", context_parallel_size=2, **resume)
    world.run(train_by_words, 2, cp2)
    [whole], [parts] = read_log(f"{tmp_path}/whole"), read_log(f"{tmp_path}/parts")
    for key in ("loss", "rewards/margins", "logps/chosen", "sft_loss"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-5), key
