"""The sections of configs/MIGRATION.md for axolotl and ms-swift, from `mca-lite migrate`'s tables:
python -m tests.tools.migration_page writes them anew, and a test compares.

A row names keys of theirs, as `key` or `key: value`, and what the tables make of them; the last
rows have the defaults that differ.
"""

import re
import sys
from pathlib import Path

from mca_lite import tool_migrate
from mca_lite.tool_migrate_tables import ROWS
from tests.shared.foreign_keys import VERSIONS

PAGE = Path(__file__).parents[2] / "configs/MIGRATION.md"
SECTION = r"(?s)(\n## From {}\n\n)(.+?)(?=\n## )"
INTROS = {
    "axolotl": "`datasets` becomes a list of files or names of the hub; formats are read from the "
    "records.",
    "ms-swift": "`swift sft | pt | rlhf` and `megatron sft | pt | rlhf`. There the newline after "
    "the token that\nends an answer is trained too; here an answer ends with that token.",
}
KEYS = {
    "axolotl": """
base_model
sequence_len
micro_batch_size
num_epochs
adapter: lora, adapter: qlora
lora_r, lora_target_linear
load_in_4bit: true, load_in_8bit: true
datasets, test_datasets, val_set_size
pretraining_dataset
sample_packing
train_on_inputs
saves_per_epoch: 1, evals_per_epoch: 4
optimizer: adamw_torch_fused, optimizer: adamw_bnb_8bit
lr_scheduler, cosine_min_lr_ratio
gradient_checkpointing: true
rl: dpo, rl: orpo, rl: kto
rl_beta, orpo_alpha
rl: grpo
chat_template: chatml
eot_tokens
context_parallel_size, tensor_parallel_size
fsdp_config, deepspeed
flash_attention
liger_rope, plugins
wandb_project
""",
    "ms-swift": """
model
tuner_type: lora, tuner_type: full
rlhf_type: dpo, rlhf_type: kto, rlhf_type: rm
rlhf_type: simpo, rlhf_type: orpo, rlhf_type: cpo
rlhf_type: gkd
rlhf_type: grpo
dataset, val_dataset, split_dataset_ratio
max_length
torch_dtype: bfloat16
target_modules: all-linear
sequence_parallel_size
loss_scale: last_round, loss_scale: all
system
freeze_vit, freeze_aligner, freeze_llm
micro_batch_size
global_batch_size
lr, min_lr, lr_warmup_fraction
train_iters, clip_grad
no_save_optim: true
attn_impl, attention_backend
template
quant_bits
external_plugins
""",
}
FILES = ("", "swift", "lora", "full", "megatron")  # tags of files whose defaults are shown
SAMPLES = ("true", "1", "0.5", "lora", "cosine")  # values of a key that is named alone


def line_of(origin: str, word: str) -> tuple[tool_migrate.Line, str]:
    """(the Line of `key` or `key: value`, its value): without a value that of the first sample that
    is not refused."""
    method = {"method": "megatron sft"} if origin == "ms-swift" else {}
    key, _, value = word.partition(": ")
    found = [
        (tool_migrate.migrated(origin, {key: given, **method})[0], given)
        for given in ([value] if value else SAMPLES)
    ]
    return next((one for one in found if one[0].fate != "refused"), found[0])


def fate_of(origin: str, word: str) -> str:
    """Words of the page for what becomes of `key` or `key: value`."""
    line, given = line_of(origin, word)
    if line.fate != "taken":
        return f"{line.fate.replace('without', 'no')}: {line.note}".replace("<", "\\<")
    has_value = ": " in word
    keys = [
        f"`{key}`" if not has_value and given in str(value) else f"`{key}: {value}`"
        for key, value in line.keys.items()
    ]
    return f"{', '.join(keys)}; {line.note}" if line.note else ", ".join(keys)


def defaults_of(origin: str) -> dict[str, list[str]]:
    """{tags of a file: keys that are written out where a key of theirs is left out}"""
    found: dict[str, list[str]] = {}
    for found_row in tool_migrate.ROW.findall(ROWS[origin]):
        row = tool_migrate.Row(*found_row)
        words = row.words.split()
        if row.values == "absent" and words[0] not in "!-" and row.tags in FILES:
            found.setdefault(row.tags, []).extend(f"`{w.replace('=', ': ')}`" for w in words)
    return found


def section_of(origin: str) -> str:
    """The text of a trainer's section, after its heading."""
    lines = [
        f"{origin} {VERSIONS[origin]}. {INTROS[origin]}",
        "",
        "| there | here |",
        "| --- | --- |",
    ]
    for row in KEYS[origin].strip().splitlines():
        words = row.split(", ")
        fates = dict.fromkeys(fate_of(origin, word) for word in words)
        lines.append(f"| {', '.join(f'`{word}`' for word in words)} | {'; '.join(fates)} |")
    for tags, keys in defaults_of(origin).items():
        where = " or ".join(f"`{tag}`" for tag in tags.split(","))
        lines.append(f"| defaults{f' with {where}' if tags else ''} | {', '.join(keys)} |")
    return "\n".join(lines) + "\n"


def page_with_sections(text: str) -> str:
    """The page with its two sections as the tables have them."""
    for origin in KEYS:
        heading, old = re.search(SECTION.format(origin), text).groups()
        text = text.replace(heading + old, heading + section_of(origin))
    return text


def main() -> int:
    PAGE.write_text(page_with_sections(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
