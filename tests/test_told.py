"""A run's words about itself, each once: on the way, in its summary, in --help and on the page for
those who move in. Words of libraries on each rank are not among them.
"""

import logging
import re
import warnings

from mca_lite import cli
from mca_lite.args import format_help, key_fields
from mca_lite.log import connections
from tests.shared import world
from tests.shared.chats import conversation, write_records
from tests.shared.commands import ROOT, SHORT, run_script, run_train

SHARDED = "sequence_parallel=true use_distributed_optimizer=true overlap_grad_reduce=true "
SHARDED += "overlap_param_gather=true tensor_model_parallel_size=2"


def run_with_warnings(words: list[str]) -> tuple[int, str, str]:
    """train.py in a process whose libraries may warn: the fork server's may not."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)  # as Python does
    return run_train(words)


def test_libraries_warn_no_rank_of_collectives_connections_or_checkpoints(tmp_path):
    words = f"configs/sft.yaml {SHORT} {SHARDED} max_samples=40 warmup_ratio=0"
    words += f" output_dir={tmp_path}/out cache_dir={tmp_path}/cache disable_tqdm=true"
    words += " save_strategy=steps save_steps=1 lr_scheduler_type=constant"
    words += " resume_from_checkpoint=auto"
    for steps in (1, 2):  # the second run reads what the first one saved
        given = [*words.split(), f"max_steps={steps}"]
        ranks = world.run(run_with_warnings, 2, given, timeout_s=240)
        assert [(code, error) for code, _, error in ranks] == [(0, ""), (0, "")]
    assert re.search(r"\n  from step +1\n", ranks[0][1])


def test_a_run_says_once_what_a_row_is_and_which_schedule_and_weights_it_trains(tmp_path):
    words = f"configs/sft.yaml {SHORT} packing=true lr_scheduler_type=constant max_samples=40"
    shown = run_script(f"{words} output_dir={tmp_path}", tmp_path).stdout
    for once in (
        r"\n  global batch +8 packs = micro-batch 2 x accumulation 4 x data parallel 1\n",
        r"\n  steps +3 \(2 an epoch of \d+ packs\)\n",
        r"\n  training +\d+ packs of 40 samples,",
        r"\n  learning rate +0.003, constant, 0 steps of warm-up\n",
        r"warmup_ratio: no effect, since lr_scheduler_type is constant\n",
        r"\n  finetuning +full: every weight is trained\n",
    ):
        assert len(re.findall(once, shown)) == 1, once
    assert "sequence_packing joins" not in shown


def test_names_and_warnings_do_not_steer_the_terminal_and_keys_of_pictures_get_a_note(tmp_path):
    data = write_records(tmp_path / "a\x1b[2Jb.jsonl", *[conversation("q", "a")] * 40)
    words = ["configs/sft.yaml", *SHORT.split(), f"dataset={data}", "image_max_pixels=9"]
    words += [f"output_dir={tmp_path}", f"cache_dir={tmp_path}/cache"]
    [(code, out, error)] = world.run(run_with_warnings, 1, words, timeout_s=240)
    assert code == 0, error
    assert "a\ufffd[2Jb.jsonl" in out and "\x1b" not in out + error
    assert out.count("image_max_pixels: no effect, since the model reads text alone") == 1


def test_warnings_of_libraries_do_not_steer_the_terminal(monkeypatch, capsys):
    def train(*args) -> int:
        library = logging.Logger("library")
        library.addHandler(logging.StreamHandler())  # as transformers does when it is imported
        library.warning("rope_type\x1b[2J")
        return 0

    monkeypatch.setattr(cli, "finish", train)
    assert cli.main(["a.yaml"]) == 0
    assert capsys.readouterr().err == "rope_type\ufffd[2J\n"


def test_sequence_packing_alone_is_told_from_packing(tmp_path):
    words = f"configs/sft.yaml {SHORT} sequence_packing=true max_samples=40 max_steps=1"
    shown = run_script(f"{words} warmup_ratio=0 output_dir={tmp_path}", tmp_path).stdout
    said = "sequence_packing joins the samples of a micro-batch, 2 of them: packing: true fills"
    assert shown.count(said) == 1
    assert re.search(r"global batch +8 samples ", shown)


def test_help_says_what_counts_as_a_sample_and_what_other_trainers_do():
    shown = format_help()
    assert re.search(r"global_batch_size \(null\): .*packs of them with packing", shown)
    assert re.search(r'finetuning_type \("full"\): .*LLaMA-Factory\'s default', shown)
    assert re.search(r"lr_scheduler_type .*constant_with_warmup has", shown)
    assert re.search(r"sequence_packing .*packing fills rows of cutoff_len", shown)


def test_the_page_for_those_who_move_in_says_them():
    names = ("MIGRATION", "MCORE_ADAPTER")
    page = "".join((ROOT / f"configs/{name}.md").read_text() for name in names)
    for key in ("finetuning_type", "sequence_packing", "global_batch_size"):
        assert key in key_fields() and re.search(rf"^\|.*`{key}", page, re.MULTILINE), key
    assert "`constant_with_warmup` has one" in page


def test_the_summary_names_what_megatron_recommends_for_a_gpu_alone(monkeypatch):
    from mca_lite import TrainingArguments

    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = TrainingArguments(output_dir="out", tensor_model_parallel_size=2)
    assert connections(args, "cuda") and connections(args, "cpu") is None
    monkeypatch.setenv(name, "1")
    assert connections(args, "cuda") is None
