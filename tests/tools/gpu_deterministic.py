"""deterministic: true on GPUs, `make gpu ARGS=deterministic`: two runs of 20 steps, each in
processes of its own, and one that goes on from the checkpoint of step 10, agree bit for bit in
losses, gradient norms and exported weights.

Plain and packed rows on one GPU, in bf16 and float32, a mixture of experts, Muon, and with two GPUs
tensor parallelism over nccl. "free" is the same run without the key: it may agree by chance, and
decides nothing.
"""

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from tests.shared import tiny, tiny_moe

STEPS, SAVED_AT = 20, 10
VOCAB = 1024
SIZES = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, vocab_size=VOCAB)
SIZES |= dict(num_hidden_layers=2, max_position_embeddings=1024)
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
    "bf16, muon": ("qwen3", 1, dict(HALF, optim="muon")),
    "torch, packed": ("qwen3", 1, dict(HALF, **PACKED, backend="torch")),
    "tp2": ("qwen3", 2, {**HALF, **TP2}),
    "tp2, packed": ("qwen3", 2, {**HALF, **PACKED, **TP2}),
}


def samples() -> list[dict]:
    """96 samples of 100 to 700 tokens."""
    generator = np.random.default_rng(1)
    made = []
    for length in generator.integers(100, 700, 96):
        ids = generator.integers(0, VOCAB, length + 1)
        made.append({"input_ids": ids[:-1], "labels": ids[1:]})
    return made


def train(path: str, out: str, keys: dict) -> None:
    """Train on this rank, and write the numbers of each step to out/steps.json."""
    from mca_lite import AutoModel, McaTrainer, TrainingArguments, parallel
    from mca_lite.model import load_torch_model

    base = dict(
        output_dir=out,
        max_steps=STEPS,
        global_batch_size=8,
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=1e-3,
        save_steps=SAVED_AT,
        disable_tqdm=True,
    )
    is_torch = keys.pop("backend", "") == "torch"
    args = TrainingArguments(**{**base, **keys})
    parallel.initialize(args, use_mca=not is_torch)
    model = load_torch_model(path) if is_torch else AutoModel.from_pretrained(path, args)
    trainer = McaTrainer(model, args, train_dataset=samples())
    trainer.train()
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
        raise RuntimeError(f"{out}: {done.stderr[-2000:]}")
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
    good = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            try:
                good.append(agrees(name, folder))
            except Exception as error:
                print(f"{name:24} FAIL {error}", flush=True)
                good.append(False)
    return int(not all(good))


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        train(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
