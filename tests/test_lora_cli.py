"""LoRA as a user runs it: the example on both backends, an adapter trained further, and errors
before anything starts.
"""

import pytest
import torch

from tests.shared import world
from tests.shared.commands import SHORT, run_script
from tests.shared.lora_tools import adapter_of
from tests.shared.training import read_log

LORA = f"configs/sft_lora.yaml {SHORT}"


def test_the_example_gives_the_same_numbers_on_two_ranks_and_on_plain_torch(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    layout = "tensor_model_parallel_size=2 sequence_parallel=true"
    run_script(f"{LORA} {layout} output_dir={tmp_path / 'tp2'}", tmp_path, nproc=2)
    shown = run_script(f"{LORA} use_mca=false output_dir={tmp_path / 'torch'}", tmp_path)
    ours, theirs = read_log(tmp_path / "tp2"), read_log(tmp_path / "torch")
    for a, b in zip(ours, theirs, strict=True):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
    assert "LoRA of rank 32 on 28 modules" in shown.stdout
    mine, yours = adapter_of(tmp_path / "tp2"), adapter_of(tmp_path / "torch")
    assert mine.keys() == yours.keys()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "tp2" / "merged").eval()
    assert AutoTokenizer.from_pretrained(tmp_path / "tp2" / "merged").chat_template
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "torch" / "merged").eval()
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        difference = merged(tokens).logits - base(tokens).logits
    assert (
        difference.abs().max() < 1e-2
    )  # Adam turns the rounding of tiny gradients into whole steps
    # further from there, on the merged model of the same architecture: PEFT and a second run both
    # take the adapter
    PeftModel.from_pretrained(base, str(tmp_path / "tp2"))
    words = (
        f"{LORA} adapter_name_or_path={tmp_path / 'tp2'} use_mca=false "
        f"output_dir={tmp_path / 'further'}"
    )
    assert "since adapter_name_or_path is" in run_script(words, tmp_path).stdout
    assert read_log(tmp_path / "further")[0]["loss"] < theirs[0]["loss"]


@pytest.mark.parametrize("backend", ["use_mca=true", "use_mca=false"])
def test_adapters_that_cannot_be_are_told_before_anything_starts(tmp_path, backend, capsys):
    from mca_lite import cli

    for words, wanted in {
        "lora_target=q_porj": "it means no layer of this model",
        "lora_rank=0": "lora_rank: 0",
        "lora_target=lm_head": "save_merged_model",
        "modules_to_save=embed_tokens": "modules_to_save",
        f"adapter_name_or_path={tmp_path / 'nowhere'}": "holds no adapter_config.json",
    }.items():
        argv = [
            *LORA.split(),
            backend,
            words,
            f"output_dir={tmp_path / 'out'}",
            f"cache_dir={tmp_path / 'cache'}",
        ]
        assert cli.main(argv) == cli.USER_ERROR
        assert wanted in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def pretrain(backend: str, out: str, *more: str) -> int:
    from mca_lite import cli

    words = (
        "configs/pt.yaml finetuning_type=lora lora_rank=4 max_steps=2 logging_steps=1 "
        "global_batch_size=2 cutoff_len=64"
    )
    words += (
        " warmup_steps=0 per_device_train_batch_size=1 eval_strategy=no val_size=0 "
        "save_strategy=no disable_tqdm=true"
    )
    return cli.main(
        [*words.split(), backend, *more, f"output_dir={out}/{backend}", f"cache_dir={out}/cache"]
    )


def test_pretraining_takes_adapters_too_with_the_same_numbers_on_both_backends(tmp_path):
    for backend in ("use_mca=true", "use_mca=false"):
        assert world.run(pretrain, 1, backend, str(tmp_path)) == [0]
    ours, theirs = (read_log(tmp_path / f"use_mca={value}") for value in ("true", "false"))
    for a, b in zip(ours, theirs, strict=True):
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]), rel=1e-5)
    assert (
        adapter_of(tmp_path / "use_mca=true").keys()
        == adapter_of(tmp_path / "use_mca=false").keys()
    )


def adapters_read(backend: str, adapter: str, out: str) -> list[str]:
    from mca_lite import part_lora_files

    read, make = [], part_lora_files.AdapterSource.__init__

    def count(self, folder):
        read.append(str(folder))
        make(self, folder)

    part_lora_files.AdapterSource.__init__ = count
    assert pretrain(backend, out, f"adapter_name_or_path={adapter}") == 0
    return read


@pytest.mark.parametrize("backend", ["use_mca=true", "use_mca=false"])
def test_a_run_reads_its_adapter_once(tmp_path, backend):
    world.run(pretrain, 1, backend, str(tmp_path))
    adapter = str(tmp_path / backend)
    [read] = world.run(adapters_read, 1, backend, adapter, str(tmp_path / "further"))
    assert read == [adapter]
