"""A stage with a key of its own: PolyLoss (Leng and others, 2022), cross entropy and
poly_epsilon (1 - p) of each token.

    python configs/examples/own_keys.py configs/sft.yaml stage=poly poly_epsilon=2 \
        output_dir=output/poly
"""

import sys
from dataclasses import dataclass

import torch

from mca_lite import (
    ArgumentGroup,
    McaTrainer,
    Need,
    Rule,
    arg,
    cli,
    register_keys,
    register_objective,
)


@dataclass(kw_only=True)
class PolyArguments(ArgumentGroup):
    """PolyLoss."""

    poly_epsilon: float = arg(1.0, "stage poly: weight of 1 - p beside cross entropy", low=-1)


class PolyTrainer(McaTrainer):
    def __init__(self, *args, epsilon=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.epsilon = epsilon

    @classmethod
    def own_keywords(cls, arguments, second_model):
        return {"epsilon": arguments.poly_epsilon}

    def _post_compute_loss(self, labels, losses):
        """losses [b, s]: cross entropy, 0 without a label."""
        return super()._post_compute_loss(labels, losses - self.epsilon * torch.expm1(-losses))


def main(words):
    register_keys(
        "poly",
        PolyArguments,
        rules=[Rule("poly_epsilon=0.0 stage=poly", "it is stage sft then", "stage: sft")],
        needs=[Need("poly_epsilon", "stage=poly", "stage: poly")],
        fixed=["poly_epsilon"],
    )
    register_objective("poly", records="conversations", trainer=PolyTrainer)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
