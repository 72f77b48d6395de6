"""train.py as a user runs it: one real torchrun, the same on test ranks, one of them without a
launcher, and its errors.
"""

import json

import pytest
import yaml

from mca_lite import cli
from tests.shared import world
from tests.shared.commands import ROOT, SHORT, alone, run_script, run_train, run_under_torchrun
from tests.shared.training import read_log


# the ranks of torchrun's own agent are forked in test_chaos, and a real torchrun starts them in
# test_cli_errors
@pytest.mark.parametrize(
    "start",
    [run_script, pytest.param(run_under_torchrun, marks=pytest.mark.full)],
    ids=["", "torchrun"],
)
def test_the_example_gives_the_same_numbers_on_two_ranks_and_on_plain_torch(start, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    layout = "tensor_model_parallel_size=2 sequence_parallel=true"
    shown = start(
        f"configs/sft.yaml {SHORT} {layout} output_dir={tmp_path / 'tp2'}", tmp_path, nproc=2
    )
    run_script(f"configs/sft.yaml {SHORT} use_mca=false output_dir={tmp_path / 'torch'}", tmp_path)
    ours, theirs = read_log(tmp_path / "tp2"), read_log(tmp_path / "torch")
    assert [line["step"] for line in ours] == [1, 2, 3]
    for a, b in zip(ours, theirs, strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "consumed_samples", "consumed_tokens"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
    needed = (
        "step epoch loss grad_norm learning_rate consumed_samples consumed_tokens "
        "tokens_per_second skipped_iter"
    )
    needed += (
        " tokens_per_second_per_device padding_fraction tflops_per_device step_time_s "
        "peak_memory_gib"
    )
    assert set(needed.split()) <= ours[0].keys()
    layout = "tensor x pipeline x context x data  2 x 1 x 1 x 1"
    for words in ("trained tokens in «»", layout, "parameters on this rank", "step 3/3"):
        assert words in shown.stdout, words
    assert shown.stdout.count("step 3/3") == 1, "only rank 0 speaks"
    AutoModelForCausalLM.from_pretrained(tmp_path / "tp2")
    assert AutoTokenizer.from_pretrained(tmp_path / "tp2").chat_template
    saved = yaml.safe_load((tmp_path / "tp2" / "config.yaml").read_text())
    assert saved["learning_rate"] == 3e-3 and saved["tensor_model_parallel_size"] == 2


def test_the_saved_config_reproduces_the_run(tmp_path):
    run_script(
        f"configs/pt.yaml {SHORT} warmup_steps=1 use_mca=false output_dir={tmp_path / 'a'}",
        tmp_path,
    )
    run_script(f"{tmp_path / 'a' / 'config.yaml'} output_dir={tmp_path / 'b'}", tmp_path)
    first, again = ([(x["loss"], x["grad_norm"]) for x in read_log(tmp_path / n)] for n in "ab")
    assert first == again


def test_all_errors_are_shown_at_once_without_a_traceback(tmp_path):
    result = run_script(
        "configs/sft.yaml learning_rat=1 bf16=maybe tensor_model_parallel_size=3 "
        "eval_strategy=never",
        tmp_path,
        code=2,
    )
    for words in ("learning_rate", "bf16", "tensor_model_parallel_size", "eval_strategy", "epoch"):
        assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_data_that_is_not_there_is_named(tmp_path):
    result = run_script("configs/sft.yaml dataset=nowhere.jsonl", tmp_path, code=2)
    assert "nowhere.jsonl" in result.stderr and "Traceback" not in result.stderr


def test_a_model_that_cannot_be_honoured_is_refused(tmp_path):
    import shutil

    shutil.copytree(ROOT / "configs/tiny/model", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(
        json.dumps({**config, "hidden_act": "gelu", "attention_bias": True})
    )
    result = run_script(
        f"configs/sft.yaml model_name_or_path={tmp_path / 'model'}", tmp_path, code=2
    )
    assert "hidden_act" in result.stderr and "attention_bias" in result.stderr


def test_what_shows_only_with_data_or_folders_is_told_before_anything_starts(tmp_path):
    result = run_script("configs/sft.yaml report_to=nowhere", tmp_path, code=2)
    assert "nowhere" in result.stderr and "Traceback" not in result.stderr
    result = run_script(
        "configs/sft.yaml max_steps=-1 num_train_epochs=0.1 warmup_steps=500", tmp_path, code=2
    )
    assert "warm-up" in result.stderr and "Traceback" not in result.stderr
    result = run_script("configs/sft.yaml output_dir=configs/tiny/model", tmp_path, code=2)
    assert "overwrite the one that it starts from" in result.stderr
    result = run_script(
        "configs/sft.yaml eval_strategy=steps metric_for_best_model=accuracy", tmp_path, code=2
    )
    assert "metric_for_best_model: loss" in result.stderr


def test_one_step_with_a_warm_up_share_and_tes_rope_kernel_run(tmp_path):
    words = (
        f"configs/sft.yaml {SHORT} max_steps=1 apply_rope_fusion=true cache_dir={tmp_path}/cache"
    )
    words = [*words.split(), f"output_dir={tmp_path / 'one'}"]
    [(code, out, error)] = world.run(alone, 1, run_train, *words)
    assert code == 0, out + error
    assert len(read_log(tmp_path / "one")) == 1


def test_help_lists_the_keys(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert "tensor_model_parallel_size" in capsys.readouterr().out


def test_a_run_goes_on_only_with_its_own_data_and_a_refused_one_leaves_its_config(tmp_path):
    out = tmp_path / "run"
    words = (
        f"configs/sft.yaml {SHORT} use_mca=false save_strategy=steps save_steps=2 output_dir={out}"
    )
    words += " overwrite_output_dir=false"
    run_script(f"{words} max_samples=200", tmp_path)
    before = (out / "config.yaml").read_text()
    refused = run_script(f"{words} max_samples=200 learning_rate=1", tmp_path, code=2)
    assert "overwrite_output_dir" in refused.stderr and (out / "config.yaml").read_text() == before
    other = (
        "dataset=configs/tiny/heldout.jsonl max_samples=200 resume_from_checkpoint=auto max_steps=5"
    )
    assert "saved with dataset" in run_script(f"{words} {other}", tmp_path, code=2).stderr
    run_script(f"{words} max_samples=200 resume_from_checkpoint=auto max_steps=5", tmp_path)
    assert [line["step"] for line in read_log(out)] == [1, 2, 3, 4, 5]


LLAMA_FACTORY = """
model_name_or_path: configs/tiny/model
do_train: true
stage: sft
finetuning_type: full
dataset: dates
dataset_dir: {folder}
preprocessing_num_workers: 2
cutoff_len: 128
template: qwen3_nothink
overwrite_output_dir: true
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
num_train_epochs: 2
learning_rate: 3e-6
logging_steps: 1
save_steps: 100
lr_scheduler_type: constant
bf16: true
tensor_model_parallel_size: 1
sequence_parallel: false
pipeline_model_parallel_size: 2
bias_activation_fusion: true
apply_rope_fusion: true
use_distributed_optimizer: true
overlap_param_gather: true
overlap_grad_reduce: true
recompute_granularity: full
"""


def test_a_llama_factory_mca_file_runs_after_its_paths_are_changed(tmp_path):
    info = {"dates": {"file_name": str(ROOT / "configs/tiny/sft.jsonl"), "formatting": "sharegpt"}}
    info["dates"]["columns"] = {"messages": "messages"}
    info["dates"]["tags"] = dict(
        role_tag="role", content_tag="content", user_tag="user", assistant_tag="assistant"
    )
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "mca.yaml").write_text(LLAMA_FACTORY.format(folder=tmp_path))
    words = (
        f"{tmp_path / 'mca.yaml'} train_from_scratch=true max_samples=40 max_steps=2 "
        f"output_dir={tmp_path / 'out'}"
    )
    result = run_script(words, tmp_path, nproc=2)
    assert len(read_log(tmp_path / "out")) == 2
    assert "template" in result.stdout, "keys without meaning are named"
