"""A loss on the logits: cross entropy and 1e-4 (log Z)^2, which keeps logits small (PaLM).

    torchrun --nproc_per_node 2 configs/examples/z_loss.py configs/sft.yaml stage=sft_z \
        tensor_model_parallel_size=2 output_dir=output/z_loss
"""

import sys

import torch

from mca_lite import McaTrainer, cli, register_objective

WEIGHT = 1e-4


class ZLossTrainer(McaTrainer):
    metrics_keys = ["loss", "log_z_squared"]

    def _loss_of_logits(self, logits):
        """Two losses of each token, [n, 2]. A chunk of the logits is there at a time."""
        return torch.stack([logits.cross_entropy(), logits.logsumexp().square()], -1)

    def _post_compute_loss(self, labels, losses):
        """What is minimised, and a second number for the log. losses: [b, s, 2]."""
        cross_entropy, squares = losses.unbind(-1)
        loss, count, metrics = super()._post_compute_loss(labels, cross_entropy + WEIGHT * squares)
        tokens = metrics["loss"][1]
        metrics["log_z_squared"] = torch.stack([squares.detach().sum(), tokens])
        return loss, count, metrics


def main(words):
    register_objective(
        "sft_z",
        records="conversations",
        trainer=ZLossTrainer,
        describe=lambda keys: f"with a z loss of {WEIGHT:g}",
    )
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
