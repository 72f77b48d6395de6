"""The vocab-parallel loss on 2 and 4 ranks against cross entropy on one, and what recomputation
saves.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.shared import tiny, world

TOLERANCE = 1e-6


def problem(vocab: int, tied_rows: bool = False):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 13, 24, generator=generator)
    weight = torch.randn(vocab, 24, generator=generator) / 5
    labels = torch.randint(0, vocab, (2, 13), generator=generator)
    labels[:, ::4] = -100
    return hidden, weight, labels, torch.randn(2, 13, generator=generator)


def sharded_losses(vocab: int, chunk_size: int) -> dict:
    """Losses, d hidden and d weight of all ranks together, on every rank."""
    import torch.distributed as dist

    from mca_lite.loss_tokens import token_losses

    hidden, weight, labels, grad = problem(vocab)
    size, rank = dist.get_world_size(), dist.get_rank()
    padded = F.pad(weight, (0, 0, 0, -vocab % size))
    mine = padded.chunk(size)[rank].clone().requires_grad_()
    hidden.requires_grad_()
    losses = token_losses(hidden, mine, labels, dist.group.WORLD, vocab, chunk_size)
    losses.backward(grad)
    dist.all_reduce(hidden.grad)  # what megatron's mapping before the head does
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine.grad)
    return dict(
        losses=losses.tolist(),
        d_hidden=hidden.grad.tolist(),
        d_weight=torch.cat(parts)[:vocab].tolist(),
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("chunk_size", [5, 1024])
def test_vocab_parallel_loss_equals_cross_entropy(ranks, chunk_size):
    vocab = 61  # no multiple of 2 or 4
    hidden, weight, labels, grad = problem(vocab)
    hidden.requires_grad_(), weight.requires_grad_()
    losses = F.cross_entropy(
        (hidden @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none"
    ).view(labels.shape)
    losses.backward(grad)
    for got in world.run(sharded_losses, ranks, vocab, chunk_size):
        for name, wanted in (
            ("losses", losses),
            ("d_hidden", hidden.grad),
            ("d_weight", weight.grad),
        ):
            torch.testing.assert_close(
                torch.tensor(got[name]), wanted.detach(), rtol=0, atol=2 * TOLERANCE
            )


def peak_rise_mib(path: str, **keys) -> float:
    """MiB that one forward and backward pass adds to this process's resident memory at its peak."""
    from mca_lite import AutoModel, McaTrainer, TrainingArguments

    args = TrainingArguments(output_dir="unused", **keys)
    trainer = McaTrainer(AutoModel.from_pretrained(path, args), args)
    trainer.create_optimizer()
    row = {
        "input_ids": torch.ones(8, 512, dtype=torch.long),
        "labels": torch.ones(8, 512, dtype=torch.long),
    }

    def peak(rows: int) -> float:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak so far
        batch = {k: v[:rows] for k, v in row.items()}
        trainer.backend.forward_backward(trainer.forward_step, [batch], 512)
        status = open("/proc/self/status").read()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    small = peak(1)
    return peak(8) - small


def test_recomputation_lowers_the_peak(tmp_path):
    """Eight layers, 4,096 tokens: what is kept of each layer makes most of the peak."""
    keys = dict(
        num_hidden_layers=8, hidden_size=64, intermediate_size=256, max_position_embeddings=512
    )
    path = tiny.save_model(
        tmp_path / "model",
        "llama",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **keys,
    )
    plain = world.run(peak_rise_mib, 1, path)[0]
    full = world.run(peak_rise_mib, 1, path, recompute_granularity="full")[0]
    mlp = world.run(
        peak_rise_mib, 1, path, recompute_granularity="selective", recompute_modules=["mlp"]
    )[0]
    assert full < 0.5 * plain, f"{full:.0f} MiB with full recomputation, {plain:.0f} without"
    assert full < mlp < 0.9 * plain, f"{mlp:.0f} MiB with mlp recomputed, {plain:.0f} without"
