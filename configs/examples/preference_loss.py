"""A preference loss of one's own: SLiC's hinge on the mean log-probability of a token.

    python configs/examples/preference_loss.py configs/dpo.yaml pref_loss=hinge pref_beta=0.5 \
        ref_model=null output_dir=output/hinge
"""

import sys

from mca_lite import cli, register_loss


def hinge(responses, config):
    """Responses and DPOConfig -> losses max(0, beta - (chosen - rejected)), and the rewards of
    chosen and of rejected answers, each [pairs]."""
    chosen = responses.chosen / responses.chosen_lens.clamp(min=1)
    rejected = responses.rejected / responses.rejected_lens.clamp(min=1)
    losses = (config.beta - (chosen - rejected)).clamp(min=0)
    return losses, chosen.detach(), rejected.detach()


def main(words):
    register_loss("hinge", hinge, has_reference=False)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
