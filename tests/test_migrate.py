"""`mca-lite migrate`: files of other trainers in this package's keys. The files below are written
for these tests; numbers of defaults are those of axolotl 0.19.0, ms-swift 4.6.0 and TRL 1.16.0.
"""

import re

import pytest

from mca_lite import cli, tool_migrate
from mca_lite.__main__ import main
from mca_lite.args import key_fields, known_keys
from mca_lite.args_values import read_config_file
from mca_lite.errors import ConfigError
from mca_lite.tool_migrate_tables import ROWS
from tests.shared import tiny, world
from tests.shared.commands import ROOT
from tests.shared.foreign_keys import AXOLOTL as AXOLOTL_KEYS
from tests.shared.foreign_keys import MS_SWIFT
from tests.shared.small_runs import save_tokenizer, write_data
from tests.shared.training import read_log

AXOLOTL = """
base_model: {folder}/model
datasets:
  - path: {folder}/chat.jsonl
    type: chat_template
    split: train
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 2
optimizer: adamw_torch_fused
learning_rate: 1e-2
logging_steps: 1
bf16: false
output_dir: {folder}/out
"""
# name of a file -> (its text, keys that it becomes, keys that stay as comments with their fate)
FILES = {
    "axolotl.yaml": (
        AXOLOTL,
        "dataset=[{folder}/chat.jsonl] cutoff_len=64 per_device_train_batch_size=2 optim=adam "
        "lr_scheduler_type=cosine num_train_epochs=1 bf16=false",
        {},
    ),
    "axolotl_lora.yml": (
        "base_model: org/model\nadapter: qlora\nload_in_4bit: true\nlora_r: 16\nlora_alpha: 32\n"
        "lora_target_linear: true\nlora_target_modules: [q_proj]\nflash_attention: true\n"
        "datasets: [{path: org/set, type: alpaca, name: en}]\nval_set_size: 0.1\n"
        "sample_packing: true\nevals_per_epoch: 4\nsaves_per_epoch: 1\nsequence_lenn: 3\n"
        "gradient_checkpointing_kwargs: {use_reentrant: false}\nlearning_rate: 2e-4\n"
        "special_tokens: {pad_token: <pad>}\nwandb_project:\n",
        "finetuning_type=lora lora_rank=16 lora_target=all quantization_bit=4 packing=true "
        "save_strategy=epoch "
        "val_size=0.1 bf16=true cutoff_len=512 dataset=[org/set]",
        {
            "evals_per_epoch": "refused: eval_strategy: steps, and eval_steps: steps of an epoch",
            "lora_target_modules": "without effect: lora_target: all",
            "flash_attention": "without effect: transformer_impl",
            "gradient_checkpointing_kwargs.use_reentrant": "without effect",
            "special_tokens.pad_token": "without effect: the model's folder",
            "sequence_lenn": "unknown: near: sequence_parallel",
        },
    ),
    "axolotl_dpo.yaml": (
        "base_model: org/model\nrl: dpo\nrl_beta: 0.2\nchat_template: llama3\nfp16: true\n"
        "datasets: [{path: json, data_files: [a.jsonl, b.jsonl]}]\nlearning_rate: 1e-6\n"
        "optimizer: adamw_bnb_8bit\nlr_scheduler: constant\nbf16: false\nnum_epochs: 2\n",
        "stage=dpo pref_loss=sigmoid pref_beta=0.2 chat_template=llama3 dataset=[a.jsonl,b.jsonl] "
        "optim=adam lr_scheduler_type=constant num_train_epochs=2 fp16=true",
        {},
    ),
    "axolotl_grpo.yaml": (
        "base_model: org/model\nrl: grpo\ntrl: {num_generations: 4}\nlearning_rate: 1e-6\n",
        "model_name_or_path=org/model",
        {"rl": "refused: answers are generated elsewhere", "trl.num_generations": "refused"},
    ),
    "swift.sh": (
        "# adapters\nNPROC=4\nNPROC_PER_NODE=$NPROC \\\nswift sft \\\n  --model org/model \\\n"
        "  --dataset 'org/set#500' more.jsonl \\\n  --split_dataset_ratio 0.01 \\\n"
        "  --gradient_accumulation_steps $(expr 16 / $NPROC) --max_length 4096 \\\n"
        "  --target_modules all-linear --attn_impl flash_attn --save_steps 50 --freeze_vit true\n",
        "stage=sft finetuning_type=lora lora_target=all lora_alpha=32 lora_dropout=0.05 "
        "learning_rate=1e-4 gradient_accumulation_steps=4 cutoff_len=4096 weight_decay=0.1 "
        "adam_beta2=0.95 lr_scheduler_type=cosine val_size=0.01 eval_strategy=steps "
        "recompute_granularity=full dataset=[org/set,more.jsonl] freeze_vision_tower=true",
        {"attn_impl": "without effect", "eval_steps": "refused: eval_steps: <save_steps>"},
    ),
    "swift_megatron.sh": (
        "megatron rlhf --rlhf_type dpo --model org/model --dataset pairs.jsonl --lr 1e-5 \\\n"
        "  --min_lr 1e-6 --lr_warmup_fraction 0.05 --micro_batch_size 2 --global_batch_size 64 \\\n"
        "  --train_iters 100 --tensor_model_parallel_size 2 --sequence_parallel true \\\n"
        "  --beta 0.3 --max_length 2048 --no_save_optim true --finetune true \\\n"
        "  --torch_dtype bfloat16\n",
        "stage=dpo pref_beta=0.3 learning_rate=1e-5 warmup_ratio=0.05 max_steps=100 bf16=true "
        "per_device_train_batch_size=2 global_batch_size=64 tensor_model_parallel_size=2 "
        "lr_scheduler_type=cosine_with_min_lr use_distributed_optimizer=true save_only_model=true",
        {"finetune": "without effect"},
    ),
    "swift.yaml": (
        "model: org/model\ntuner_type: full\ndataset: [a.jsonl]\ntorch_dtype: bfloat16\n"
        "packing: true\nmax_length: 1024\nloss_scale: last_round\ndeepspeed: zero3\n",
        "finetuning_type=full learning_rate=1e-5 global_batch_size=16 mask_history=true",
        {"deepspeed": "without effect: torchrun and the parallel keys"},
    ),
    "swift_grpo.sh": (
        "swift rlhf --rlhf_type grpo --model org/model --dataset a.jsonl --use_vllm true\n",
        "model_name_or_path=org/model",
        {
            "rlhf_type": "refused: answers are generated",
            "use_vllm": "refused: answers are generated",
            "max_length": "refused: cutoff_len",
        },
    ),
    "trl_sft.sh": (
        "accelerate launch --num_processes 8 trl/scripts/sft.py \\\n"
        "  --model_name_or_path org/model --dataset_name org/set --use_peft --packing \\\n"
        "  --lora_target_modules all-linear --no_remove_unused_columns --output_dir out\n",
        "stage=sft dataset=org/set finetuning_type=lora lora_rank=16 lora_alpha=32 "
        "lora_target=all lora_dropout=0.05 learning_rate=2e-5 cutoff_len=1024 packing=true "
        "per_device_train_batch_size=8 recompute_granularity=full bf16=true",
        {"remove_unused_columns": "without effect"},
    ),
    "trl_gkd.sh": (
        "python gkd.py --model_name_or_path org/model --teacher_model_name_or_path org/large \\\n"
        "  --dataset_name org/set --beta 0.5 --lmbda 0 --temperature 0.9\n",
        "stage=distill distill_loss=jsd distill_jsd_mix=0.5 distill_temperature=0.9 "
        "teacher_model_name_or_path=org/large",
        {"lmbda": "without effect"},
    ),
    "trl_dpo.sh": (
        "trl dpo --config trl.yaml --beta=0.2 --push_to_hub --loss_type sigmoid hinge\n",
        "stage=dpo pref_beta=0.2 pref_loss=[sigmoid,hinge] model_name_or_path=org/model "
        "learning_rate=1e-6 cutoff_len=512",
        {"push_to_hub": "refused"},
    ),
    "trl.yaml": (
        "model_name_or_path: org/model\ndataset_name: org/set\nmax_length: 512\nmax_steps: 10\n",
        "dataset=org/set cutoff_len=512 max_steps=10 per_device_train_batch_size=8",
        {},
    ),
    "automodel.yaml": (
        "step_scheduler: {global_batch_size: 64, local_batch_size: 8, max_steps: 50}\n"
        "model: {_target_: nemo, pretrained_model_name_or_path: org/model}\n"
        "optimizer: {_target_: torch.optim.Adam, lr: 1e-5, betas: [0.9, 0.99]}\n"
        "peft: {dim: 8, alpha: 32, match_all_linear: true}\n"
        "distributed: {tp_size: 2, dp_size: 4}\n"
        "dataset: {_target_: x, path_or_dataset: org/set, split: 'train[:64]'}\n",
        "global_batch_size=64 per_device_train_batch_size=8 max_steps=50 learning_rate=1e-5 "
        "finetuning_type=lora lora_rank=8 lora_target=all tensor_model_parallel_size=2",
        {
            "model._target_": "without effect",
            "optimizer.betas": "refused: adam_beta1 and adam_beta2",
            "dataset.split": "refused: the set's entry",
        },
    ),
    "torchtitan.toml": (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\n'
        "seq_len = 8192\nsteps = 1000\n[optimizer]\nlr = 3e-4\n"
        "[parallelism]\ntensor_parallel_degree = 8\ndata_parallel_shard_degree = -1\n",
        "per_device_train_batch_size=2 cutoff_len=8192 stage=pt max_steps=1000 warmup_steps=200 "
        "learning_rate=0.0003 tensor_model_parallel_size=8 train_from_scratch=true",
        {
            "model.name": "refused: model_name_or_path",
            "model.flavor": "refused",
            "parallelism.data_parallel_shard_degree": "without effect",
        },
    ),
    "run_train.sh": (
        "torchrun --nproc_per_node=2 examples/run_train.py --model_name_or_path org/model \\\n"
        "  --tensor_model_parallel_size 2 --optimizer adam --dataset a --moe_layer_recompute\n",
        "model_name_or_path=org/model tensor_model_parallel_size=2 optim=adam",
        {"moe_layer_recompute": "refused"},
    ),
}


@pytest.fixture
def folder(tmp_path):
    for name, (text, _, _) in FILES.items():
        (tmp_path / name).write_text(text.replace("{folder}", str(tmp_path)))
    return tmp_path


def migrate(path, capsys) -> tuple[int, str, dict]:
    """(exit code, what is written, its keys), which have no problems."""
    code = main(["migrate", str(path)])
    shown = capsys.readouterr().out
    (path.parent / "ours.yaml").write_text(shown)
    values = read_config_file(path.parent / "ours.yaml")
    problems: list = []
    keys, notes = known_keys(values, problems)
    assert (problems, notes) == ([], []) and keys == values
    return code, shown, values


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_ours_with_a_reason_for_every_key_that_goes(folder, name, capsys):
    _, wanted, comments = FILES[name]
    code, shown, values = migrate(folder / name, capsys)
    for word in wanted.replace("{folder}", str(folder)).split():
        key, _, value = word.partition("=")
        given = values[key]
        shown_value = f"[{','.join(given)}]" if isinstance(given, list) else given
        assert (key, shown_value) == (key, value)
    left = re.findall(r"(?m)^# (\S+): .*  -> (.+)$", shown)
    for key, fate in comments.items():
        assert dict(left)[key].startswith(fate)
    assert {key for key, fate in left if not fate.startswith("without")} <= comments.keys()
    has_more_to_do = any(not fate.startswith("without") for _, fate in left)
    assert code == (tool_migrate.LEFT if has_more_to_do else 0)


def test_each_line_names_the_key_that_it_comes_from(folder, capsys):
    _, shown, _ = migrate(folder / "swift.sh", capsys)
    assert "# torchrun --nproc_per_node 4 train.py" in shown
    assert "\ncutoff_len: 4096  # max_length; of prompt and answer together\n" in shown
    assert "\nlora_alpha: 32  # lora_alpha: left out; ms-swift's default\n" in shown
    assert "max_samples: 500, of each set, for org/set alone there" in shown
    _, shown, _ = migrate(folder / "axolotl_lora.yml", capsys)
    assert "set in dataset_info.json: name" in shown


def trained(words: str) -> int:
    return cli.main(words.split())


def test_a_migrated_file_trains(folder, capsys):
    tiny.save_model(folder / "model", "qwen3", vocab_size=100)
    save_tokenizer(folder / "model")
    write_data(folder)
    migrate(folder / "axolotl.yaml", capsys)
    words = f"{folder}/ours.yaml cache_dir={folder}/cache disable_tqdm=true save_strategy=no"
    assert world.run(trained, 1, words) == [0]
    lines = [line for line in read_log(folder / "out") if "loss" in line]
    # the schedule of axolotl is a cosine from the rate given: half of it after one of two steps
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-2, 5e-3])
    assert lines[0]["consumed_samples"] == 4


@pytest.mark.parametrize("name", ["axolotl.yaml", "swift.yaml", "automodel.yaml"])
def test_training_from_another_form_names_the_command_alone(folder, name):
    from mca_lite.args import parse_args

    with pytest.raises(ConfigError, match="python -m mca_lite migrate FILE") as caught:
        parse_args([str(folder / name), "output_dir=x"])
    assert len(caught.value.problems) == 1
    with pytest.raises(ConfigError, match="mca-lite migrate FILE"):
        parse_args([str(folder / "swift.sh")])


@pytest.mark.parametrize(
    "name, text, words",
    (
        ("other.sh", "echo hello", "no command of ms-swift, TRL or mcore_adapter"),
        ("empty.yaml", "", "no keys: expected another trainer's configuration"),
    ),
)
def test_a_file_without_a_command_or_keys_is_refused(folder, capsys, name, text, words):
    (folder / name).write_text(f"{text}\n")
    assert main(["migrate", str(folder / name)]) == cli.USER_ERROR
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("form", ROWS)
def test_every_row_names_keys_of_this_package_or_a_reason(form):
    text = ROWS[form]
    rows = [tool_migrate.Row(*found) for found in tool_migrate.ROW.findall(text)]
    assert len(rows) == len([line for line in text.splitlines() if line])
    for row in rows:
        first, *more = row.words.split()
        if first in ("-", "!"):
            assert row.note and not more, row
        elif first == "datasets":
            assert set(more) <= {"dataset", "eval_dataset", "pt"}
        else:
            assert {word.partition("=")[0] for word in (first, *more)} <= key_fields().keys(), row


ARGUMENTS = {"axolotl": AXOLOTL_KEYS, "ms-swift": MS_SWIFT}


@pytest.mark.parametrize("form", ARGUMENTS)
def test_every_argument_of_the_newest_release_has_a_fate(form):
    keys = [word.partition("=")[0] for word in ARGUMENTS[form].split()]
    assert len(keys) > 350
    method = {"method": "megatron sft"} if form == "ms-swift" else {}
    lines = tool_migrate.migrated(form, dict.fromkeys(keys, "true") | method)
    assert len(lines) >= len(keys)
    assert [line for line in lines if line.fate == "unknown"] == []


SECTION = r"(?s)\n## From {}\n(.+?)\n## "
NO_KEYS = {"swift", "megatron", "megatron sft | pt | rlhf"}


def cells_of(origin: str) -> list[tuple[list[str], str]]:
    """(keys or `key: value` that the left cell names, the right cell) of the page's rows."""
    page = (ROOT / "configs/MIGRATION.md").read_text()
    [section] = re.findall(SECTION.format(origin), page)
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", there), here) for there, here in rows]


def line_of(origin: str, key: str, values: list[str]) -> tool_migrate.Line:
    """The Line of a key with the first of the values that is not refused."""
    method = {"method": "megatron sft"} if origin == "ms-swift" else {}
    lines = [tool_migrate.migrated(origin, {key: value, **method})[0] for value in values]
    return next((line for line in lines if line.fate != "refused"), lines[0])


@pytest.mark.parametrize("origin", ["axolotl", "ms-swift"])
def test_the_page_has_the_words_of_the_tables(origin):
    rows = cells_of(origin)
    assert len(rows) > 15
    for there, here in rows:
        fates = set()
        for word in set(there) - NO_KEYS:
            key, _, value = word.partition(": ")
            line = line_of(
                origin, key, [value] if value else ["true", "1", "0.5", "lora", "cosine"]
            )
            fates.add(line.fate)
            assert not line.keys or any(f"`{name}" in here for name in line.keys), (word, here)
        words = {"refused": "refused: ", "without effect": "no effect: ", "taken": "`"}
        assert len(fates) > 1 or words[fates.pop()] in here, (there, here)
