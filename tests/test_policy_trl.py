"""The gradients of a Session's policy losses beside those of TRL's own GRPOTrainer._compute_loss on
whole logits, taken from the installed source: its trainer needs more than it. gspo is left out: the
two forms of its ratio differ for advantages of single tokens.
"""

import ast
import functools
import importlib.util
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.shared import session_tools
from tests.shared.session_tools import padded_columns

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="TRL is not installed"),
]
TOKENS, ANSWERS, ALL = 28, 7, 8  # of the samples of session_tools, one of which has no token
ALWAYS = ("advantage", "old_logp")


def loss_of_trl():
    folder = Path(importlib.util.find_spec("trl").origin).parent
    tree = ast.parse((folder / "trainer/grpo_trainer.py").read_text())
    [trainer] = [x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "GRPOTrainer"]
    wanted = ("_compute_loss", "get_off_policy_mask")
    functions = [x for x in trainer.body if getattr(x, "name", "") in wanted]
    names = {"torch": torch, "math": math, "nanmin": torch.min, "nanmax": torch.max}
    exec(compile(ast.Module(functions, []), "grpo_trainer.py", "exec"), names)
    return names["_compute_loss"], names["get_off_policy_mask"]


def whole_loss(model, samples, loss_type, temperature=1.0, scale=1.0, **numbers):
    """The loss of all samples as one micro-batch, times scale."""
    compute, off_policy_mask = loss_of_trl()
    p, h, mask, o, q, w, a = padded_columns(model, samples, temperature)
    args = SimpleNamespace(
        delta=None, use_bias_correction_kl=True, sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05, steps_per_generation=1,
    )  # fmt: skip
    accelerator = SimpleNamespace(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x)
    given = dict(
        _get_per_token_logps_and_entropies=lambda *_, **__: (p, h, None),
        get_off_policy_mask=off_policy_mask, aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0, args=args,
        loss_type=loss_type, epsilon_low=0.2, epsilon_high=0.2, use_vllm=False,
        vllm_importance_sampling_correction=True, model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1, max_completion_length=16,
        _entropy_bonus_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=accelerator,
    )  # fmt: skip
    me = SimpleNamespace(**given | numbers)
    ones = torch.ones(len(p), 1)
    inputs = dict(
        prompt_ids=ones.long(), prompt_mask=ones, completion_ids=mask.long(), completion_mask=mask,
        advantages=a, old_per_token_logps=o, ref_per_token_logps=q, importance_sampling_ratio=w,
        num_items_in_batch=mask.sum(),
    )  # fmt: skip
    return compute(me, me.model, inputs) * scale


def row(loss, loss_type, denominator, numbers, columns=ALWAYS, scale=1.0, **theirs):
    call = dict(loss=loss, columns=columns, numbers=numbers, denominator=float(denominator))
    return call, functools.partial(whole_loss, loss_type=loss_type, scale=scale, **theirs)


# TRL counts the answer without a trained token too
OF_ANSWERS = dict(scale=ALL / ANSWERS)
WITH_KL = (*ALWAYS, "ref_logp")
WEIGHTED = (*ALWAYS, "sampler_weight")
ROWS = {
    "grpo": row(
        "grpo", "grpo", ANSWERS, dict(kl_coef=0.1, kl_unbiased=True), WITH_KL, beta=0.1,
        **OF_ANSWERS,
    ),
    "dapo": row("dapo", "dapo", TOKENS, dict(clip_high=0.28), WEIGHTED, use_vllm=True,
                epsilon_high=0.28),
    "dr_grpo": row("dr_grpo", "dr_grpo", ANSWERS * 16, dict(constant=16), **OF_ANSWERS),
    "cispo": row("cispo", "cispo", TOKENS, dict(cispo_max=1.1), epsilon_high=1.1),
    "sapo": row("sapo", "sapo", ANSWERS, {}, **OF_ANSWERS),
    "off policy": row("ppo", "dapo", TOKENS, dict(off_policy_max=0.05),
                      off_policy_mask_threshold=0.05),
    "at 0.7": row("dapo", "dapo", TOKENS, dict(temperature=0.7), temperature=0.7),
}  # fmt: skip
CALLS = {name: call for name, (call, _) in ROWS.items()}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    losses = {name: loss for name, (_, loss) in ROWS.items()}
    return session_tools.make_oracle(tmp_path_factory.mktemp("trl"), losses)


@pytest.mark.parametrize("layout", ["torch", "tp2", "pp2", "cp2_packed", "dp2"])
def test_gradients_are_those_of_trl(oracle, layout):
    assert not session_tools.wrong_of(oracle, CALLS, layout)
