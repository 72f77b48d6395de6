"""A stage of one's own: answers weigh by how uncertain the model is of each of their tokens
(focal loss: (1 - p)^2 of cross entropy), and the share of tokens that it is certain of is logged.

    python configs/examples/objective.py configs/sft.yaml stage=focal output_dir=output/focal
"""

import math
import sys

import torch

from mca_lite import McaTrainer, cli, register_objective


class FocalTrainer(McaTrainer):
    metrics_keys = ["loss", "certain"]  # of _post_compute_loss, "loss" first

    def _post_compute_loss(self, labels, losses):
        """losses [b, s]: cross entropy, 0 without a label -> (sum, count, metrics). A metric is a
        pair of a sum and a count, so that every layout shows the same number."""
        doubt = -torch.expm1(-losses)  # 1 - p
        loss, count, metrics = super()._post_compute_loss(labels, doubt.square() * losses)
        certain = ((losses < math.log(2)) & (labels != -100)).sum()
        metrics["certain"] = torch.stack([certain.float(), metrics["loss"][1]])
        return loss, count, metrics


def main(words):
    register_objective(
        "focal", records="conversations", trainer=FocalTrainer, describe=lambda keys: "focal loss"
    )
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
