"""A preference loss of one's own: SLiC's hinge on the mean log-probability of a token.

    python configs/examples/preference_loss.py configs/dpo.yaml pref_loss=slic pref_beta=0.5 \
        ref_model=null output_dir=output/slic
"""

import sys

from mca_lite import cli, register_loss


def slic(responses, config):
    """part_dpo_losses.Responses, DPOConfig -> losses max(0, beta - (chosen - rejected)), [pairs].
    Rewards left out are beta times the means."""
    chosen, rejected = responses.means
    return (config.beta - (chosen - rejected)).clamp(min=0)


def main(words):
    register_loss("slic", slic, has_reference=False)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
