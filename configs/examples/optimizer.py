"""An optimizer of one's own: torch's RAdam, with float32 master weights on megatron-core.

python configs/examples/optimizer.py configs/sft.yaml optim=radam \
    output_dir=output/radam
"""

import sys

import torch

from mca_lite import cli, register_optimizer


def radam(groups, args):
    """Groups of parameters and TrainingArguments -> a torch optimizer; decay is decoupled."""
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.RAdam(
        groups, lr=args.learning_rate, betas=betas, decoupled_weight_decay=True
    )


def main(words):
    register_optimizer("radam", radam, states=("exp_avg", "exp_avg_sq"), counts_steps=True)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
