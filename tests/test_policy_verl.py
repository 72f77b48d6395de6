"""The gradients of a Session's policy losses beside those of verl's core_algos on whole logits, put
together as in its workers/utils/losses.py. cispo has no lower bound here: verl's is at 0.
"""

import functools
import importlib.util

import pytest

from tests.shared import session_tools
from tests.shared.session_tools import padded_columns

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not importlib.util.find_spec("verl"), reason="verl is not installed"),
]
TOKENS, ANSWERS = 28, 7  # of the samples of session_tools, one of which has no token
ALWAYS = ("advantage", "old_logp")


def whole_loss(model, samples, mode, by, weighted=False, entropy=0.0, kl=(0.0, "k3"), **numbers):
    """The loss of all samples as one micro-batch of one replica."""
    from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
    from verl.workers.config import ActorConfig

    facts = dict(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode=by)
    config = ActorConfig(**facts, **numbers)
    config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor
    p, h, mask, o, q, w, a = padded_columns(model, samples)
    is_trained = mask.bool()
    loss, _ = get_policy_loss_fn(mode)(o, p, a, is_trained, by, config, w if weighted else None)
    info = config.global_batch_info
    coef, form = kl
    for values, share in (h, -entropy), (kl_penalty(p, q, form), coef):
        loss = loss + share * agg_loss(values, is_trained, by, **info)
    return loss


def row(loss, mode, by, denominator, numbers, columns=ALWAYS, **theirs):
    call = dict(loss=loss, columns=columns, numbers=numbers, denominator=float(denominator))
    return call, functools.partial(whole_loss, mode=mode, by=by, **theirs)


BY_TOKEN, BY_ANSWER = "token-mean", "seq-mean-token-mean"
WITH_KL = (*ALWAYS, "ref_logp")
WEIGHTED = (*ALWAYS, "sampler_weight")
ROWS = {
    "ppo": row(
        "ppo", "vanilla", BY_TOKEN, TOKENS, dict(clip_low=0.1, dual_clip=1.2), WEIGHTED,
        weighted=True, clip_ratio_low=0.1, clip_ratio_high=0.1, clip_ratio_c=1.2,
    ),
    "grpo": row(
        "grpo", "vanilla", BY_ANSWER, ANSWERS, dict(dual_clip=3.0, kl_coef=0.1), WITH_KL,
        kl=(0.1, "low_var_kl"),
    ),
    "dapo": row(
        "dapo", "vanilla", BY_TOKEN, TOKENS,
        dict(dual_clip=3.0, clip_high=0.28, kl_coef=0.1, kl="k2"), WITH_KL,
        kl=(0.1, "k2"), clip_ratio_high=0.28,
    ),
    "dr_grpo": row(
        "dr_grpo", "vanilla", "seq-mean-token-sum-norm", ANSWERS * 16,
        dict(dual_clip=3.0, constant=16), loss_scale_factor=16,
    ),
    "gspo": row(
        "gspo", "gspo", BY_ANSWER, ANSWERS, dict(clip_low=0.03, clip_high=0.04),
        clip_ratio_low=0.03, clip_ratio_high=0.04,
    ),
    "sapo": row("sapo", "sapo", BY_ANSWER, ANSWERS, {}),
    "cispo": row(
        "cispo", "cispo", BY_TOKEN, TOKENS, dict(cispo_max=1.1), clip_ratio_low=1.0,
        clip_ratio_high=0.1,
    ),
    "reinforce": row(
        "reinforce", "gpg", BY_TOKEN, TOKENS, dict(kl_coef=0.1, kl="k1", entropy_coef=0.05),
        WITH_KL, kl=(0.1, "k1"), entropy=0.05,
    ),
}  # fmt: skip
CALLS = {name: call for name, (call, _) in ROWS.items()}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    losses = {name: loss for name, (_, loss) in ROWS.items()}
    return session_tools.make_oracle(tmp_path_factory.mktemp("verl"), losses)


@pytest.mark.parametrize("layout", ["torch", "tp2", "pp2", "cp2_packed", "dp2"])
def test_gradients_are_those_of_verl(oracle, layout):
    assert not session_tools.wrong_of(oracle, CALLS, layout)
