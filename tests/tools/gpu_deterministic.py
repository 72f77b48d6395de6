"""deterministic: true on GPUs, `make gpu ARGS=deterministic`: two runs of 20 steps, each in
processes of its own, and one that goes on from the checkpoint of step 10, agree bit for bit in
losses, gradient norms and exported weights.

Plain and packed rows on one GPU, in bf16 and float32, a mixture of experts, gated delta nets, Muon,
every objective, and with two GPUs tensor parallelism over nccl. "free" is the same run without the
key: it may agree by chance, and decides nothing.
"""

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from tests.shared import distilling, tiny, tiny_moe
from tests.shared.dpo_tools import our_run
from tests.shared.kto_tools import Answers, kto_run, raw_answers
from tests.shared.rm_tools import rm_run
from tests.shared.rm_tools import save_model as save_value_model
from tests.tools.gpu_compiled import SCALE, LongPairs, LongRated

STEPS, SAVED_AT = 20, 10
AT_ONCE = 6  # cases that share a GPU
VOCAB = 1024
SIZES = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, vocab_size=VOCAB)
SIZES |= dict(num_hidden_layers=2, max_position_embeddings=2048)
HALF = dict(bf16=True)
PACKED = dict(sequence_packing=True, per_device_train_batch_size=4)
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
# {name: (model, GPUs, keys)}
CASES = {
    "bf16": ("qwen3", 1, HALF),
    "bf16, packed": ("qwen3", 1, {**HALF, **PACKED}),
    "float32": ("qwen3", 1, {}),
    "bf16, packed, windows": ("gemma3_text", 1, {**HALF, **PACKED}),
    "bf16, capped scores": ("gemma2", 1, HALF),
    "bf16, packed, latent": ("deepseek_v3", 1, {**HALF, **PACKED}),
    "bf16, packed, experts": ("qwen3_moe", 1, {**HALF, **PACKED}),
    "bf16, packed, delta": ("qwen3_5_text", 1, {**HALF, **PACKED}),
    "bf16, packed, delta and experts": ("qwen3_next", 1, {**HALF, **PACKED}),
    "pt, packed": ("qwen3", 1, dict(HALF, **PACKED, stage="pt")),
    "dpo": ("qwen3", 1, dict(HALF, stage="dpo")),
    "dpo, packed": ("qwen3", 1, dict(HALF, **PACKED, stage="dpo")),
    "orpo": ("qwen3", 1, dict(HALF, stage="orpo")),
    "kto": ("qwen3", 1, dict(HALF, stage="kto")),
    "rm": ("qwen3", 1, dict(HALF, stage="rm")),
    "rm, packed": ("qwen3", 1, dict(HALF, **PACKED, stage="rm")),
    "rm, torch": ("qwen3", 1, dict(HALF, stage="rm", backend="torch")),
    "distill": ("qwen3", 1, dict(HALF, stage="distill")),
    "bf16, muon": ("qwen3", 1, dict(HALF, optim="muon")),
    "torch, packed": ("qwen3", 1, dict(HALF, **PACKED, backend="torch")),
    "tp2": ("qwen3", 2, {**HALF, **TP2}),
    "tp2, packed": ("qwen3", 2, {**HALF, **PACKED, **TP2}),
}


def samples(masks: bool = True) -> list[dict]:
    """96 samples of 100 to 700 tokens. masks: the first ones have no label."""
    generator = np.random.default_rng(1)
    made = []
    for length in generator.integers(100, 700, 96):
        ids = generator.integers(0, VOCAB, length + 1)
        labels = ids[1:].copy()
        labels[: masks * 20] = -100
        made.append({"input_ids": ids[:-1], "labels": labels})
    return made


def trainer_of(path: str, out: str, stage: str, keys: dict):
    """The trainer of an objective after its run."""
    if stage in ("dpo", "orpo"):
        loss = dict(pref_loss="sigmoid" if stage == "dpo" else stage, beta=0.1)
        return our_run(path, out, loss, train_dataset=LongPairs(96), **keys)
    if stage == "kto":
        answers = Answers(raw_answers(96, scale=SCALE))
        return kto_run(path, out, train_dataset=answers, **keys)
    if stage == "rm":
        return rm_run(path, out, train_dataset=LongRated(96), **keys)
    backend = keys.pop("backend", "megatron")
    return _with_samples(path, out, stage, backend, keys)


def _with_samples(path: str, out: str, stage: str, backend: str, keys: dict):
    """The same of those that train on samples."""
    from mca_lite import AutoModel, McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model

    args = TrainingArguments(out, **keys)
    if backend == "torch":
        model = load_torch_model(path)
    else:
        model = AutoModel.from_pretrained(path, args)
    make = McaTrainer
    if stage == "distill":
        make = distilling.maker(f"{path}-teacher", distilling.PLAIN, backend)
    trainer = make(model=model, args=args, train_dataset=samples(masks=stage != "pt"))
    trainer.train()
    return trainer


def train(path: str, out: str, keys: dict) -> None:
    """Train on this rank, and write the numbers of each step to out/steps.json."""
    from mca_lite import TrainingArguments, parallel

    base = dict(
        max_steps=STEPS,
        global_batch_size=8,
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=SAVED_AT,
        disable_tqdm=True,
    )
    stage, keys = keys.pop("stage", "sft"), {**base, **keys}
    own = {name: value for name, value in keys.items() if name != "backend"}
    use_mca = keys.get("backend") != "torch"
    parallel.initialize(TrainingArguments(out, **own), use_mca=use_mca)
    trainer = trainer_of(path, out, stage, keys)
    trainer.save_model()
    if parallel.is_main():
        lines = [line for line in trainer.state.log_history if "loss" in line]
        steps = [(line["loss"], line["grad_norm"]) for line in lines]
        Path(out, "steps.json").write_text(json.dumps(steps))
    parallel.shutdown()


def run(path: str, out: str, gpus: int, keys: dict) -> tuple[list, str]:
    """(numbers of the steps, digest of the exported weights) of a run in processes of its own."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc_per_node", str(gpus), "-m", "tests.tools.gpu_deterministic"]
    words += [path, out, json.dumps(keys)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if done.returncode:
        of_rank = [line for line in done.stderr.splitlines() if line.startswith("[rank0]")]
        raise RuntimeError(f"{out}: {' '.join(of_rank[-3:])}")
    digest = hashlib.sha256()
    for file in sorted(Path(out).glob("*.safetensors")):
        digest.update(file.read_bytes())
    return json.loads(Path(out, "steps.json").read_text()), digest.hexdigest()


def agrees(name: str, folder: str) -> bool:
    """Print a line on the runs of a case -> True if they have the same bits."""
    family, gpus, keys = CASES[name]
    start = time.time()
    save = tiny_moe.save_model if family in tiny_moe.MODELS else tiny.save_model
    heads = dict(num_key_value_heads=4, head_dim=64)
    if family == "deepseek_v3":  # its heads have parts of their own sizes
        heads = dict(num_key_value_heads=8)
    path = save(f"{folder}/{name}/model", family, **SIZES, **heads)
    stage = keys.get("stage")
    if stage == "rm":
        path = save_value_model(f"{folder}/{name}/scores", family, **SIZES, **heads)
    if stage == "distill":
        tiny.save_model(f"{path}-teacher", family, seed=5, **SIZES, **heads)
    kept = dict(keys, deterministic=True)
    first = run(path, f"{folder}/{name}/a", gpus, kept)
    second = run(path, f"{folder}/{name}/b", gpus, kept)
    checkpoint = f"{folder}/{name}/a/checkpoint-{SAVED_AT}"
    resumed = run(path, f"{folder}/{name}/c", gpus, dict(kept, resume_from_checkpoint=checkpoint))
    free = run(path, f"{folder}/{name}/d", gpus, keys) == run(
        path, f"{folder}/{name}/e", gpus, keys
    )
    rest = STEPS - SAVED_AT
    goes_on = (first[0][-rest:], first[1]) == (resumed[0][-rest:], resumed[1])
    words = f"two runs {first == second}, resumed {goes_on}, free {free}"
    print(f"{name:24} {gpus} GPUs  {words}  {time.time() - start:.0f} s", flush=True)
    return first == second and goes_on


def main(words: list[str] | None = None) -> int:
    """The cases that fit the GPUs; words: parts of the names of some -> 0 if all agree."""
    fits = [name for name, (_, gpus, _) in CASES.items() if gpus <= torch.cuda.device_count()]
    chosen = [name for name in fits if not words or any(word in name for word in words)]
    with tempfile.TemporaryDirectory() as folder:

        def is_good(name: str) -> bool:
            try:
                return agrees(name, folder)
            except Exception as error:
                print(f"{name:24} FAIL {error}", flush=True)
                return False

        good = []
        for is_single, at_once in (True, AT_ONCE), (False, 1):
            names = [name for name in chosen if (CASES[name][1] == 1) == is_single]
            with ThreadPoolExecutor(at_once) as pool:
                good += pool.map(is_good, names)
    return int(not all(good))


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        train(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
