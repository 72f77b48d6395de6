"""The preference losses against numbers derived by hand."""

import math

import pytest
import torch

from mca_lite import DPOConfig
from mca_lite.loss_preference import Responses, log1mexp, orpo, rewards, sigmoid


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, **config):
    responses = Responses(chosen, rejected, None, None, reference_chosen, reference_rejected)
    config = DPOConfig(**config)
    return sigmoid(responses, config), *rewards(responses.ratios, config)


def odds_ratio_loss(*responses, beta):
    responses = Responses(*responses)
    config = DPOConfig(beta, "orpo")
    return orpo(responses, config), *rewards(responses.means, config)


def test_dpo_by_hand():
    # pair 1: D = (-10 + 12) - (-11 + 11) = 2, beta D = 1: -log(1 / (1 + 1/e)) = log(1 + e^-1) =
    # 0.31326169
    # pair 2: D = (-5 + 4) - (-4 + 6) = -3, beta D = -1.5: log(1 + e^1.5) = 1.70141328
    losses, chosen, rejected = dpo_loss(t(-10, -5), t(-12, -4), t(-11, -4), t(-11, -6), beta=0.5)
    assert losses.tolist() == pytest.approx([0.31326169, 1.70141328], abs=1e-8)
    assert chosen.tolist() == [0.5, -0.5] and rejected.tolist() == [-0.5, 1.0]


def test_dpo_with_label_smoothing_by_hand():
    # beta D = 1, e = 0.1: 0.9 log(1 + e^-1) + 0.1 log(1 + e) = 0.9 * 0.31326169 + 0.1 * 1.31326169
    losses, *_ = dpo_loss(t(-10), t(-12), t(-11), t(-11), beta=0.5, label_smoothing=0.1)
    assert losses.item() == pytest.approx(0.41326169, abs=1e-8)
    same, *_ = dpo_loss(t(-3), t(-9), t(-3), t(-9), beta=0.5, label_smoothing=0.3)
    assert same.item() == pytest.approx(math.log(2), abs=1e-12)


def test_dpo_gradient_by_hand():
    # dL/d pi_c = -beta sigmoid(-beta D) = -0.5 / (1 + e); of pi_r the opposite
    policy = t(-10, -12).requires_grad_()
    losses, chosen, _ = dpo_loss(policy[:1], policy[1:], t(-11), t(-11), beta=0.5)
    losses.sum().backward()
    assert policy.grad.tolist() == pytest.approx(
        [-0.5 / (1 + math.e), 0.5 / (1 + math.e)], abs=1e-12
    )
    assert not chosen.requires_grad


def test_odds_ratio_by_hand():
    # a_c = log(1/2) (4 tokens), a_r = log(1/4) (2 tokens): odds 1 and 1/3, log odds ratio log 3
    # L = log 2 + beta log(1 + 1/3) = 0.69314718 + 0.2 * 0.28768207
    chosen, rejected = t(4 * math.log(0.5)), t(2 * math.log(0.25))
    losses, chosen_rewards, rejected_rewards = odds_ratio_loss(
        chosen, rejected, t(4), t(2), beta=0.2
    )
    assert losses.item() == pytest.approx(0.75068360, abs=1e-8)
    assert chosen_rewards.item() == pytest.approx(0.2 * math.log(0.5))
    assert rejected_rewards.item() == pytest.approx(0.2 * math.log(0.25))


@pytest.mark.parametrize(
    "x, expected",
    [
        (-1e-5, math.log(1e-5) - 5e-6),  # log(1 - e^x) = log(-x) + x / 2 + ...
        (-1e-3, math.log(1e-3) - 5e-4 + 1e-6 / 24),
        (-math.log(2), math.log(0.5)),
        (-1.0, math.log(1 - 1 / math.e)),
        (-30.0, -math.exp(-30)),  # log(1 - y) = -y - ...
    ],
)
def test_log1mexp_keeps_its_digits_in_float32(x, expected):
    assert log1mexp(torch.tensor(x)).item() == pytest.approx(expected, rel=2e-6)


def test_certain_responses_give_finite_losses_and_gradients():
    logps = torch.tensor([0.0, -1e-12, -1e-6, -200.0], requires_grad=True)
    losses, *_ = odds_ratio_loss(
        logps[:2], logps[2:], torch.tensor([3.0, 2.0]), torch.tensor([3.0, 0.0]), beta=0.1
    )
    losses.sum().backward()
    assert losses.isfinite().all() and logps.grad.isfinite().all()


@pytest.mark.parametrize(
    "pref_loss, method", [("sigmoid", "dpo_loss"), ("orpo", "odds_ratio_loss")]
)
def test_a_subclass_may_override_the_seeds_methods(pref_loss, method):
    from mca_lite import DPOTrainer

    formula = {"sigmoid": sigmoid, "orpo": orpo}[pref_loss]
    trainer = object.__new__(DPOTrainer)
    trainer.train_config = config = DPOConfig(pref_loss=pref_loss)
    one = torch.tensor([-1.5])
    responses = Responses(one, 2 * one, one / one * 4, one / one * 5, 3 * one, 4 * one)
    numbers = responses.means if pref_loss == "orpo" else responses.ratios
    wanted = (formula(responses, config), *rewards(numbers, config))
    for got, number in zip(trainer.preference_loss(responses), wanted, strict=True):
        assert torch.equal(got, number)
    setattr(trainer, method, lambda *args: (7.0, len(args), 0))
    assert trainer.preference_loss(responses)[0] == 7.0
