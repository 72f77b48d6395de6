"""A loss weight per dataset: the loss of each token counts as much as its dataset says.

    python configs/examples/dataset_weights.py configs/sft.yaml stage=sft_weighted \
        dataset=configs/tiny/sft.jsonl,configs/tiny/heldout.jsonl output_dir=output/weighted
"""

import sys

from mca_lite import McaTrainer, cli, register_column, register_objective

WEIGHTS = {"configs/tiny/sft.jsonl": 1.0, "configs/tiny/heldout.jsonl": 0.25}


class WeightedTrainer(McaTrainer):
    def _pre_compute_loss(self, batch, inputs):
        """batch["weight"]: [b, s], as the losses of this rank are."""
        finish = super()._pre_compute_loss(batch, inputs)
        return lambda losses: finish(losses * batch["weight"])


def main(words):
    register_column("weight", default=1.0, of_dataset=WEIGHTS.get)
    register_objective("sft_weighted", records="conversations", trainer=WeightedTrainer)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
