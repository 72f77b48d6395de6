"""A token-weighted loss: the first token of each answer weighs four times as much as the others.

    python configs/examples/token_weights.py configs/sft.yaml stage=sft_first_token \
        output_dir=output/token_weights
"""

import sys

from mca_lite import McaTrainer, cli, register_column, register_objective


class FirstTokenTrainer(McaTrainer):
    def _prepare_micro_batches(self, micro_batches, seq_length):
        """Adds a column to whole rows, before context parallelism cuts them."""
        batches = super()._prepare_micro_batches(micro_batches, seq_length)
        for batch in batches:
            is_trained = batch["labels"] != -100
            is_first = is_trained & ~is_trained.roll(1, -1)  # no row begins with an answer
            batch["weight"] = 1 + 3.0 * is_first
        return batches

    def _pre_compute_loss(self, batch, inputs, *more):
        """batch["weight"]: [b, s], as the losses of this rank are."""
        finish = super()._pre_compute_loss(batch, inputs, *more)
        return lambda losses: finish(losses * batch["weight"])


def main(words):
    register_column("weight", default=1.0)
    register_objective("sft_first_token", records="conversations", trainer=FirstTokenTrainer)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
