"""A loss weight per dataset: the loss of each token counts as much as its dataset says, by
"values": {"weight": 0.25} in configs/tiny/dataset_info.json.

    python configs/examples/dataset_weights.py configs/sft.yaml stage=sft_weighted \
        dataset_dir=configs/tiny dataset=chats,others output_dir=output/weighted
"""

import sys

from mca_lite import McaTrainer, cli, register_column, register_objective


class WeightedTrainer(McaTrainer):
    def _pre_compute_loss(self, batch, inputs, *more):
        """batch["weight"]: [b, s], as the losses of this rank are."""
        finish = super()._pre_compute_loss(batch, inputs, *more)
        return lambda losses: finish(losses * batch["weight"])


def main(words):
    register_column("weight", default=1.0)
    register_objective("sft_weighted", records="conversations", trainer=WeightedTrainer)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
