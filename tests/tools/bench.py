"""Speed and memory on this machine: `make bench`, or `make bench ARGS="loss packing"` for some of
it.

Everything is measured side by side in one run; quote the ratios, not the seconds. See each function
for what it compares.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.shared import world


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_mib() -> float:
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def resident_mib() -> float:
    status = open("/proc/self/status").read()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


# -- the loss at a vocabulary of 151,936


def loss_run(
    kind: str, chunk_size: int, tokens: int, hidden_size: int = 896, vocab: int = 151936
) -> tuple[float, float]:
    """(MiB above the start at the peak, seconds) of forward and backward of the head and its loss,
    bf16.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from mca_lite import cpu
    from mca_lite.loss_tokens import token_losses

    cpu.apply()
    mpu.initialize_model_parallel()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(vocab, hidden_size, generator=generator) / 30).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)

    def run(rows):
        if kind == "chunked":
            return token_losses(hidden[:rows], weight, labels[:rows], chunk_size=chunk_size).sum()
        logits = (hidden[:rows] @ weight.t())[:, None].float()
        return vocab_parallel_cross_entropy(logits, labels[:rows, None]).sum()

    run(8).backward()
    hidden.grad = weight.grad = None
    reset_peak()
    before, started = resident_mib(), time.perf_counter()
    run(tokens).backward()
    return peak_mib() - before, time.perf_counter() - started


def loss() -> None:
    """The chunked loss against linear + megatron's vocab_parallel_cross_entropy: memory above the
    inputs, and time.
    """
    print("hidden 896, vocabulary 151,936, bf16, one thread")
    print(f"  {'':36} {'peak MiB':>9} {'ratio':>6} {'seconds':>8}")
    for tokens in (2048, 8192):
        own = world.run(loss_run, 1, "megatron", 0, tokens, timeout_s=300)[0]
        print(
            f"  {f'{tokens:,} tokens, megatron, whole logits':36} {own[0]:9.0f} "
            f"{1.0:6.2f} {own[1]:8.1f}"
        )
        for chunk_size in (256, 1024):
            mib, seconds = world.run(loss_run, 1, "chunked", chunk_size, tokens, timeout_s=300)[0]
            print(
                f"  {f'{tokens:,} tokens, chunks of {chunk_size}':36} {mib:9.0f} "
                f"{mib / own[0]:6.2f} {seconds:8.1f}"
            )


# -- packed against padded


def train_run(model: str, out: str, packs: bool, seed: int = 0, **keys) -> tuple[float, float]:
    """(real tokens a second, padding fraction) of four steps after a warm-up step over
    conversations of unequal length.
    """
    import numpy as np

    from mca_lite import AutoModel, McaTrainer, TrainingArguments
    from mca_lite.data_batches import best_fit

    random = np.random.default_rng(seed)
    lengths = np.clip(
        random.lognormal(4.9, 0.7, 160).astype(int), 16, 512
    )  # the shape of instruction data
    samples = [
        {"input_ids": random.integers(0, 1024, n), "labels": random.integers(0, 1024, n)}
        for n in lengths
    ]

    def joined(pack):
        numbers = np.concatenate([np.full(lengths[j], n + 1) for n, j in enumerate(pack)])
        both = {k: np.concatenate([samples[j][k] for j in pack]) for k in ("input_ids", "labels")}
        return {**both, "attention_mask": numbers}

    data = [joined(pack) for pack in best_fit(lengths, 512)] if packs else samples
    rows = 4 if packs else 16  # about as many tokens a step
    args = TrainingArguments(
        output_dir=out, max_steps=5, logging_steps=1, per_device_train_batch_size=rows,
        sequence_packing=packs,
        save_strategy="no", disable_tqdm=True, **keys,
    )  # fmt: skip
    trainer = McaTrainer(AutoModel.from_pretrained(model, args), args, train_dataset=data)
    trainer.train()
    log = [h for h in trainer.state.log_history if "loss" in h][1:]
    seconds = sum(h["step_time_s"] for h in log)
    tokens = sum(h["tokens_per_second"] * h["step_time_s"] for h in log)
    return tokens / seconds, statistics.mean(h["padding_fraction"] for h in log)


SHAPE = dict(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    vocab_size=1024,
    max_position_embeddings=512,
)


def packing() -> None:
    """Real tokens a second of packed against padded rows, one rank and cp2."""
    from tests.shared import tiny

    with tempfile.TemporaryDirectory() as folder:
        model = tiny.save_model(Path(folder) / "model", "qwen3", head_dim=64, **SHAPE)
        print("4 layers of hidden 256, 512 tokens a row, lengths as in instruction data")
        print(f"  {'':20} {'padding':>8} {'real tokens/s':>14} {'ratio':>6}")
        for name, ranks, keys in (("one rank", 1, {}), ("cp2", 2, dict(context_parallel_size=2))):
            results = [
                world.run(train_run, ranks, model, folder, packs, timeout_s=300, **keys)[0]
                for packs in (False, True)
            ]
            for what, (rate, padding) in zip(("padded", "packed"), results, strict=True):
                print(
                    f"  {name + ', ' + what:20} {100 * padding:7.1f}% {rate:14,.0f} "
                    f"{rate / results[0][0]:6.2f}"
                )


# -- the two backends


def backend_run(model: str, out: str, backend: str, **keys) -> float:
    """Tokens a second of five steps after a warm-up step on full rows."""
    from mca_lite import AutoModel, McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model

    args = TrainingArguments(
        output_dir=out, max_steps=6, logging_steps=1, global_batch_size=8,
        per_device_train_batch_size=2,
        save_strategy="no", disable_tqdm=True, **keys,
    )  # fmt: skip
    row = torch.arange(256) % 1000
    model = (
        AutoModel.from_pretrained(model, args) if backend == "megatron" else load_torch_model(model)
    )
    trainer = McaTrainer(model, args, train_dataset=[{"input_ids": row, "labels": row}] * 8)
    trainer.train()
    return statistics.median(
        h["tokens_per_second"] for h in trainer.state.log_history[1:] if "loss" in h
    )


def layouts() -> None:
    """Tokens a second of two ranks in each layout against torch DDP on two ranks."""
    from tests.shared import tiny
    from tests.shared.layouts import DIST_OPT, PP2, SP, TP2

    with tempfile.TemporaryDirectory() as folder:
        model = tiny.save_model(Path(folder) / "model", "qwen3", head_dim=64, **SHAPE)
        base = world.run(backend_run, 2, model, folder, "torch", timeout_s=300)[0]
        print("4 layers of hidden 256, 8 rows of 256 tokens a step, two ranks of one thread")
        print(f"  {'torch DDP':20} {base:10,.0f} tokens/s {1.0:6.2f}")
        for name, keys in (
            ("dp2", {}),
            ("dp2, dist. optimizer", DIST_OPT),
            ("tp2", TP2),
            ("tp2 + sp", {**TP2, **SP}),
            ("pp2", PP2),
        ):
            rate = world.run(backend_run, 2, model, folder, "megatron", timeout_s=300, **keys)[0]
            print(f"  {name:20} {rate:10,.0f} tokens/s {rate / base:6.2f}")


def lora() -> None:
    """Gradient and optimizer memory of full fine-tuning against LoRA."""
    from tests.tools import bench_lora

    bench_lora.main()


def moe() -> None:
    """Experts in one grouped matrix product against one after another, and steps against the torch
    backend.
    """
    from tests.tools import bench_moe

    bench_moe.main()


def trainers() -> None:
    """Tokens a second of this project, on both backends, beside Hugging Face's Trainer, TRL with
    packing, and peft.
    """
    from tests.tools import bench_trainers

    bench_trainers.main()


def checkpoints() -> None:
    """Saving and loading checkpoints against a plain write and read of the same bytes."""
    from tests.tools import bench_checkpoint

    bench_checkpoint.main()


ALL = {
    "loss": loss,
    "packing": packing,
    "layouts": layouts,
    "lora": lora,
    "moe": moe,
    "trainers": trainers,
    "checkpoints": checkpoints,
}


def main() -> None:
    for name in sys.argv[1:] or ALL:
        print(f"== {name}: {' '.join((ALL[name].__doc__ or '').split())}")
        ALL[name]()


if __name__ == "__main__":
    main()
