"""The vocab-parallel loss on 2 and 4 ranks against cross entropy on one, and what recomputation
saves.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.shared import tiny, world
from tests.shared.losses import draw_head, losses_of_cut_head

TOLERANCE = 1e-6


def cut_head_losses(vocab: int, chunk_size: int, rows: int) -> list:
    return losses_of_cut_head(*draw_head(vocab, (2, 13)), chunk_size, rows)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("chunk_size", [5, 1024])
def test_vocab_parallel_loss_equals_cross_entropy(ranks, chunk_size):
    vocab = 61  # no multiple of 2 or 4
    hidden, weight, labels, grad = draw_head(vocab, (2, 13))
    hidden.requires_grad_(), weight.requires_grad_()
    losses = F.cross_entropy(
        (hidden @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none"
    ).view(labels.shape)
    losses.backward(grad)
    for got in world.run(cut_head_losses, ranks, vocab, chunk_size, -(-vocab // ranks)):
        for ours, wanted in zip(got, (losses, hidden.grad, weight.grad), strict=True):
            torch.testing.assert_close(
                torch.tensor(ours), wanted.detach(), rtol=0, atol=2 * TOLERANCE
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
        "padding_mask": torch.zeros(8, 512, dtype=torch.bool),
    }

    def peak(rows: int) -> float:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak so far
        batch = {k: v[:rows] for k, v in row.items()}
        trainer.backend.forward_backward(trainer.forward_step, [batch])
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
