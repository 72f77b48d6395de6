"""Files of other trainers by `mca-lite migrate`, then planned, or trained two steps, with tiny
models and data: python -m tests.tools.migrated [--train] [--minutes N] FOLDER ...

FOLDER has their examples: YAML, TOML, shell scripts, and Python scripts whose docstrings have
commands (axolotl's examples/, ms-swift's examples/train and examples/megatron, TRL's trl/scripts
and examples/scripts, mcore_adapter's examples/, NeMo Automodel's and torchtitan's recipes).

Printed are each file of text or pictures with its form, stage and family and what became of it, and
the counts. A file is left out as "another method" or "another model" where those are not here, by
name. Models, data and paths are replaced by tiny ones, and sizes of the machine and of batches by
those of one rank; layers for multi-token prediction, which tiny models lack, are left out. All
other keys stay as they are migrated.
"""

import argparse
import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mca_lite import tool_migrate
from mca_lite.args import parse_args
from mca_lite.args_values import read_config_file
from mca_lite.errors import ConfigError
from tests.shared import pictures, tiny, tiny_moe, world
from tests.shared.foreign_examples import write_demo_data
from tests.shared.picture_files import save_whole_model
from tests.shared.small_runs import save_tokenizer
from tests.shared.toy_tokenizer import CHATML, byte_tokenizer
from tests.shared.training import read_log

METHODS = ("method", "rl", "rlhf_type", "task_type", "tuner_type", "adapter", "cached_dataset")
METHODS += ("recipe", "process_reward_model", "dataset.paths")
# replaced: model, data and paths
OURS = set(
    "dataset eval_dataset model_name_or_path teacher_model_name_or_path output_dir val_size "
    "adapter_name_or_path model_revision chat_template cache_dir default_system dataset_dir "
    "template max_samples mix_weights".split()
)
# replaced in training: sizes of the machine, of batches and of the run, and what needs a GPU
SIZES = set(
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "virtual_pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
    "sequence_parallel gradient_accumulation_steps num_train_epochs warmup_steps eval_strategy "
    "eval_steps save_steps save_strategy save_total_limit load_best_model_at_end report_to fp8 "
    "preprocessing_num_workers dataloader_num_workers resume_from_checkpoint torch_compile "
    "fp8_recipe early_stopping_patience do_eval eval_on_start pipeline_model_parallel_layout "
    "overlap_param_gather overlap_grad_reduce moe_permute_fusion metric_for_best_model "
    "greater_is_better mtp_num_layers".split()
)
BRIEF = {
    "max_steps": 2,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
MOST = {"cutoff_len": 128, "per_device_train_batch_size": 2, "lora_rank": 8}
# pattern of a model's name -> its family here; the first counts, and - stands for none
FAMILIES = """
omni|audio|voxtral|embedding|reranker|gme-|gte-|internvl|pixtral|smolvlm|llava|paddleocr: -
lfm2|emu3: -
nemotron-?(3|nano)|nemotron-mini|falcon|mamba|jamba|dbrx|stablelm|starcoder|pythia|gpt-j|gpt2: -
cerebras|btlm|mpt|replit|xgen|redpajama|qwen-7b|phi-(1|2|4)|granite-4|apertus|c4ai|mimo: -
kimi|trinity|llama-4|vision|gemma-3n|glm-5|deepseek-v[34]|bert|mistral-(small|medium): -
magistral-small-2509|devstral-small-2512|gemma-7b|gemma-4-(26b|e2b|e4b): -
qwen2-vl: qwen2_vl
qwen2\\.5-vl: qwen2_5_vl
qwen3-vl-\\d+b-a: qwen3_vl_moe
qwen3-vl: qwen3_vl
qwen3\\.5-\\d+b-a: qwen3_5_moe
qwen3\\.5: qwen3_5
glm-4\\.(1|6)v: glm4v
qwen3-next: qwen3_next
qwen3-(coder-)?\\d+b-a: qwen3_moe
qwen1\\.5-moe: qwen2_moe
deepseek-r1-0528-qwen3|qwen3|plano: qwen3
deepseek-r1-distill-qwen|qwen(1\\.5|2|2\\.5)?-|qwq|deepcoder|cogito-v1-preview-qwen: qwen2
deepseek-v2: deepseek_v2
moonlight: deepseek_v3
mixtral: mixtral
ministral-3-: ministral3
mistral|magistral|devstral: mistral
gemma-4: gemma4_text
gemma-3: gemma3_text
gemma-2: gemma2
gpt-oss: gpt_oss
glm-4\\.7-flash: glm4_moe_lite
glm-4\\.5: glm4_moe
glm-4: glm4
phi-3: phi3
afm: arcee
olmo-3: olmo3
seed-oss: seed_oss
hunyuan: hunyuan_v1_dense
minimax-m2: minimax_m2
llama|yi-|smollm|cogito|orpheus: llama
"""
SETS = {"pt": "c4_demo", "dpo": "dpo_en_demo", "rm": "dpo_en_demo", "kto": "kto_en_demo"}
OF_PICTURES = {"sft": "mllm_demo", "distill": "mllm_demo", "dpo": "rlhf_v", "rm": "rlhf_v"}
# sizes that blocks of 64 quantised weights divide
WIDE = {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 8, "intermediate_size": 64}
WIDE |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
OF_LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 8, "num_key_value_heads": 8}
OF_DELTA = {"linear_value_head_dim": 8, "head_dim": 16}
CHUNK = 20  # files in one world


class Example(NamedTuple):
    """A file: its trainer, name and family; the keys of its run, or why there is none."""

    form: str
    name: str
    family: str
    keys: dict
    reason: str


COMMAND = re.compile(r"(?m)^(?:python|accelerate|trl) (?:.*\\\n)*.*")


def commands_of(path: Path, folder: Path) -> list[Path]:
    """The file itself; of a Python script one shell script for each command of its docstring."""
    if path.suffix != ".py":
        return [path]
    texts = [text for text in COMMAND.findall(path.read_text()) if " --" in text]
    found = [folder / f"{path.stem}-{number}.sh" for number in range(len(texts))]
    for file, text in zip(found, texts, strict=True):
        file.write_text(text)
    return found


def family_of(name: str) -> str:
    """The family of a model by its name; "-" if there is none here."""
    for row in FAMILIES.strip().splitlines():
        pattern, _, family = row.rpartition(": ")
        if re.search(pattern, name.lower()):
            return family
    return "-"


def example_of(path: Path, folder: Path) -> Example:
    """A file, migrated, with the data and the model of `folder` in place of its own."""
    name = str(path)
    try:
        form, values, _ = tool_migrate.read(path)
        lines = tool_migrate.migrated(form, values)
    except Exception as error:
        return Example("none", name, "", {}, f"unread: {str(error).replace(name, 'FILE')[:100]}")
    (folder / "migrated.yaml").write_text("\n".join(line.text() for line in lines))
    keys = read_config_file(folder / "migrated.yaml")
    refused = [f"{line.key} {line.value}" for line in lines if line.fate == "refused"]
    refused = [text for text in refused if text.split()[0] in METHODS]
    if refused or (form == "Hugging Face" and "stage" not in keys):
        return Example(form, name, "", {}, f"another method: {', '.join(refused) or path.stem}")
    model = str(keys.get("model_name_or_path", "none"))
    family, stage = family_of(model), str(keys.get("stage", "sft"))
    if family == "-":
        return Example(form, name, "", {}, f"another model: {model}")
    kept = {key: value for key, value in keys.items() if key not in OURS}
    if "quantization_bit" in keys:
        family += "-wide"
    places = {"model_name_or_path": f"{folder}/{family}", "output_dir": f"{folder}/out"}
    has_pictures = family.removesuffix("-wide") in pictures.FAMILIES
    sets = {**SETS, **(OF_PICTURES if has_pictures else {})}
    places |= {"dataset": sets.get(stage, "alpaca_en_demo"), "dataset_dir": str(folder)}
    if "eval_dataset" in keys or "val_size" in keys:
        places["eval_dataset"] = places["dataset"]
    if stage == "distill":
        places["teacher_model_name_or_path"] = places["model_name_or_path"]
    return Example(form, name, family, two_steps(kept | places, folder), "")


def save_family(name: str, folder: Path) -> None:
    """folder/name: a tiny model of a family with its tokenizer; of "<family>-wide" one whose
    weights can be quantised."""
    place, family = folder / name, name.removesuffix("-wide")
    has_pictures = family in pictures.FAMILIES
    of = tiny_moe if family in tiny_moe.MODELS else tiny
    sizes: dict = {"vocab_size": 320 if has_pictures or family == "qwen2" else 100}
    if family in ("qwen2", "qwen3"):
        sizes["tie_word_embeddings"] = False  # as in all but their smallest models
    if name != family:
        text = pictures.FAMILIES[family][0] if has_pictures else of.hf_config(family).to_dict()
        sizes |= {key: size for key, size in WIDE.items() if key in {**tiny.SIZES, **text}}
        sizes |= OF_LATENT if text.get("kv_lora_rank") else {}
        sizes |= OF_DELTA if text.get("linear_value_head_dim") else {}
        if not text.get("q_lora_rank"):
            sizes.pop("q_lora_rank", None)
    if has_pictures:
        save_whole_model(place, family, **sizes)
        return
    of.save_model(place, family, **sizes)
    if family == "qwen2":  # transformers reads its tokenizers as byte-level ones
        byte_tokenizer(CHATML).save_pretrained(place)
    else:
        save_tokenizer(place)


def config_of(keys: dict, folder: Path) -> str:
    """Write a configuration -> its path."""
    text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in keys.items())
    (folder / "config.yaml").write_text(text)
    return f"{folder}/config.yaml"


def planned(keys: dict, folder: Path) -> str:
    """ "fits", or what does not fit together in a configuration."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            parse_args([config_of(keys, folder)], needs_world=False)
    except ConfigError as error:
        return "; ".join(f"{one.key}: {one.reason}" for one in error.problems)
    return "fits"


def two_steps(keys: dict, folder: Path) -> dict:
    """The keys of a run of two steps on one rank."""
    kept = {key: value for key, value in keys.items() if key not in SIZES}
    kept.pop("eval_dataset", None)
    for key, most in MOST.items():
        if key in kept:
            kept[key] = min(int(kept[key]), most)
    batch = 2 * kept.get("per_device_train_batch_size", 1)
    kept |= {"global_batch_size": batch, "cutoff_len": kept.get("cutoff_len", 128)}
    if kept.get("fp16") in (True, "true"):
        kept["initial_loss_scale"] = 1024  # the default is too high for the first two steps
    return kept | BRIEF | {"cache_dir": f"{folder}/cache", "output_dir": f"{folder}/out"}


def train_each(runs: list[dict], folder: Path) -> list[str]:
    """Train each run on this rank -> its losses, or its error, for each."""
    from mca_lite import run, tool_generation

    found = []
    for keys in runs:
        shutil.rmtree(folder / "out", ignore_errors=True)
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                plan = run.make_plan(parse_args([config_of(keys, folder)]))
                run.train(plan, [tool_generation.Answers()])
            losses = [line["loss"] for line in read_log(folder / "out") if "loss" in line]
            shown = " ".join(f"{loss:.4f}" for loss in losses)
            found.append(f"trained {shown}" if len(losses) == 2 else f"failed: losses {shown}")
        except Exception as error:
            text = str(error)
            if isinstance(error, ConfigError):
                text = "; ".join(f"{one.key}: {one.reason}" for one in error.problems)
            found.append(f"failed: {type(error).__name__}: {' '.join(text.split())[:200]}")
        world.leave_layout()
    return found


def train(examples: list[Example], folder: Path, minutes: float) -> Iterator[tuple[Example, str]]:
    """Train examples until the minutes are over -> each, with what came of it."""
    end = time.monotonic() + 60 * minutes
    for start in range(0, len(examples), CHUNK):
        chunk = examples[start : start + CHUNK]
        left = end - time.monotonic()
        found = ["not run: no time was left"] * len(chunk)
        if left > 0:
            try:
                keys = [one.keys for one in chunk]
                [found] = world.run(train_each, 1, keys, folder, timeout_s=left)
            except (AssertionError, RuntimeError, TimeoutError) as error:
                found = [f"failed: {str(error).splitlines()[-1][:200]}"] * len(chunk)
        yield from zip(chunk, found, strict=True)


def fates_of(
    examples: list[Example], folder: Path, minutes: float
) -> Iterator[tuple[Example, str]]:
    """Plan examples, and train them in so many minutes if there are any -> each, with its fate."""
    fitting = []
    for one in examples:
        fate = one.reason or planned(one.keys, folder)
        if fate == "fits" and minutes:
            fitting.append(one)
        else:
            yield one, fate
    yield from train(fitting, folder, minutes)


def main(words: list[str]) -> int:
    """Print each file and the counts -> 1 if some file of a method and model of this package does
    not fit or train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true", help="two steps of each, on this CPU")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("folder", nargs="+", type=Path)
    options = parser.parse_args(words)
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_demo_data(folder)
        (folder / "scripts").mkdir()
        paths = [path for root in options.folder for path in sorted(root.rglob("*"))]
        paths = [path for path in paths if path.suffix in (".yaml", ".yml", ".toml", ".sh", ".py")]
        files = [file for path in paths for file in commands_of(path, folder / "scripts")]
        examples = [example_of(file, folder) for file in files]
        for family in sorted({one.family for one in examples if one.family}):
            save_family(family, folder)
        for one, fate in fates_of(examples, folder, options.minutes if options.train else 0):
            is_here = bool(one.family)
            counts[
                is_here,
                f"{one.form}: {re.split('[: ]', fate)[0] if is_here else fate.partition(':')[0]}",
            ] += 1
            print(f"{one.form}: {one.name}: {one.keys.get('stage', 'sft')} {one.family}: {fate}")
    for (_, fate), count in sorted(counts.items()):
        print(f"{count:4}  {fate}")
    return int(
        any(is_here and not re.search(": (fits|trained)$", fate) for is_here, fate in counts)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
