"""First losses of TRL's trainers beside those of this package, from TRL's own command lines:
python -m tests.tools.first_losses FOLDER [STAGE ...], where TRL is installed.

FOLDER is a copy of TRL's repository, whose scripts' docstrings have the commands. TRL's parser and
trainer take a command as it is, and `mca-lite migrate` rewrites it; in both, model, records and
batch are replaced by the same tiny ones: float32, four records in one micro-batch, no packing.
Printed are both losses and their difference; exit code 1 if one is above TOLERANCE. ORPO is left
out: the likelihood beside its odds is that of prompt and answer there, of the answer here.
"""

import contextlib
import importlib
import io
import json
import sys
import tempfile
from pathlib import Path

from mca_lite import tool_migrate
from tests.shared import rm_tools, tiny, world
from tests.shared.small_runs import save_tokenizer, train_by_words
from tests.shared.training import read_log
from tests.tools.migrated import BRIEF, OURS, SIZES, commands_of

TOLERANCE = 1e-5
# stage -> script, number of its command, more words, module of TRL's trainer, its name
CASES = {
    "sft": ("trl/scripts/sft.py", 0, "", "trl", "SFT"),
    "lora": ("trl/scripts/sft.py", 1, "", "trl", "SFT"),
    "dpo": ("trl/scripts/dpo.py", 0, "--loss_type ipo", "trl", "DPO"),
    "kto": ("trl/scripts/kto.py", 0, "", "trl", "KTO"),
    "simpo": (
        "examples/scripts/cpo.py",
        0,
        "--loss_type simpo --cpo_alpha 0",
        "trl.experimental.cpo",
        "CPO",
    ),
    "rm": ("examples/scripts/reward_modeling.py", 0, "", "trl", "Reward"),
    "distill": ("examples/scripts/gkd.py", 0, "--lmbda 0", "trl.experimental.gkd", "GKD"),
}
SWITCHES = {"--push_to_hub", "--packing", "--logging_first_step"}
ALIKE = (
    "--max_steps 1 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 "
    "--logging_steps 1 --report_to none --save_strategy no --eval_strategy no --use_cpu "
    "--bf16 false --gradient_checkpointing false --warmup_steps 0 --dtype float32"
)


def records(stage: str) -> list[dict]:
    """Four records of the stage, of unequal length."""

    def turn(role: str, *numbers: int) -> dict:
        return {"role": role, "content": " " + " ".join(f"w{n}" for n in numbers) + " "}

    found = []
    for i in range(4):
        asks, answers = turn("user", i, i + 9), turn("assistant", *range(20 + i, 24 + 2 * i))
        other = turn("assistant", *range(40, 43 + i))
        if stage in ("sft", "lora", "distill"):
            found.append({"messages": [asks, answers]})
        elif stage == "kto":
            found.append({"prompt": [asks], "completion": [answers], "label": i % 2 == 0})
        elif stage == "rm":
            found.append({"chosen": [asks, answers], "rejected": [asks, other]})
        else:
            found.append({"prompt": [asks], "chosen": [answers], "rejected": [other]})
    return found


def end_with_turns(folder: Path) -> None:
    """Make the end token that of a turn, as in models for chats; CPOTrainer adds it else."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "eos_token": "<|im_end|>"}))


def first_of_trl(words: list[str], home: str, name: str, folder: Path, stage: str) -> float:
    """The loss of TRL's first step, by its own parser and trainer."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    module = importlib.import_module(home)
    trainer_class, config_class = (getattr(module, name + kind) for kind in ("Trainer", "Config"))
    losses: list[float] = []

    class Recorded(trainer_class):
        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            losses.append(float(result[0] if isinstance(result, tuple) else result))
            return result

    parser = trl.TrlParser((trl.ScriptArguments, config_class, trl.ModelConfig))
    _, options, model_options = parser.parse_args_and_config(words)
    kind = AutoModelForSequenceClassification if stage == "rm" else AutoModelForCausalLM
    model = kind.from_pretrained(f"{folder}/{'scorer' if stage == 'rm' else 'model'}")
    more = {}
    if stage == "distill":
        more["teacher_model"] = AutoModelForCausalLM.from_pretrained(f"{folder}/teacher")
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model")
    trainer = Recorded(
        model=model,
        args=options,
        train_dataset=Dataset.from_list(records(stage)),
        processing_class=tokenizer,
        peft_config=trl.get_peft_config(model_options),
        **more,
    )
    trainer.train()
    return losses[0]


def first_of_ours(keys: dict, out: str) -> float:
    """The loss of this package's first step."""
    with contextlib.redirect_stdout(io.StringIO()):
        train_by_words(keys)
    return next(line["loss"] for line in read_log(out) if "loss" in line)


def words_of(file: Path) -> list[str]:
    """The options of a command, without SWITCHES."""
    import shlex

    words = shlex.split(file.read_text().replace("\\\n", " "))
    return [word for word in words[2:] if word not in SWITCHES]


def compared(stage: str, root: Path, folder: Path) -> tuple[float, float]:
    """(the loss of TRL, ours) of a case."""
    script, number, more, home, name = CASES[stage]
    file = commands_of(root / script, folder)[number]
    words = [*words_of(file), *more.split()]
    out = f"{folder}/{stage}"
    (folder / f"{stage}.jsonl").write_text("\n".join(map(json.dumps, records(stage))))
    model = f"{folder}/{'scorer' if stage == 'rm' else 'model'}"
    alike = [*words, *ALIKE.split(), "--output_dir", f"{out}-trl", "--model_name_or_path", model]
    [theirs] = world.run(first_of_trl, 1, alike, home, name, folder, stage, timeout_s=200)
    file.write_text(f"{file.read_text().rstrip()} {more}")
    form, values, _ = tool_migrate.read(file)
    lines = tool_migrate.migrated(form, values)
    keys = {key: value for line in lines for key, value in line.keys.items()}
    keys = {key: value for key, value in keys.items() if key not in OURS | SIZES}
    keys |= {**BRIEF, "max_steps": 1, "bf16": False, "packing": False, "output_dir": out}
    keys |= {"per_device_train_batch_size": 4, "global_batch_size": 4, "cutoff_len": 128}
    keys |= {"model_name_or_path": model, "dataset": f"{folder}/{stage}.jsonl"}
    keys |= {"teacher_model_name_or_path": f"{folder}/teacher"} if stage == "distill" else {}
    if any("train_on_prompt: true" in line.note for line in lines):
        keys["train_on_prompt"] = True  # as the comment says for conversations
    [ours] = world.run(first_of_ours, 1, keys | {"cache_dir": f"{out}-cache"}, out, timeout_s=200)
    return theirs, ours


def main(words: list[str]) -> int:
    """Print both losses of each case -> 1 if some differ."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.save_model(folder / "model", "qwen3")
        tiny.save_model(folder / "teacher", "qwen3", seed=1)
        rm_tools.save_model(folder / "scorer")
        for of_model in ("model", "teacher", "scorer"):
            save_tokenizer(folder / of_model)
            end_with_turns(folder / of_model)
        for stage in words[1:] or CASES:
            theirs, ours = compared(stage, Path(words[0]), folder)
            worst = max(worst, abs(theirs - ours))
            print(f"{stage}: TRL {theirs:.7f}, here {ours:.7f}, {abs(theirs - ours):.1e} apart")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
