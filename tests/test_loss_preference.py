"""The preference losses against numbers derived by hand."""

import math

import pytest
import torch

from mca_lite import DPOConfig
from mca_lite.errors import ConfigError
from mca_lite.part_dpo_keys import LOSSES
from mca_lite.part_dpo_losses import Responses, log1mexp, orpo, rewards, scores, sigmoid
from mca_lite.tables import function_of


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


# -- numbers worked out by hand: chosen answers of 4 and 2 tokens, rejected ones of 2 and 5

LN2, LN3 = math.log(2), math.log(3)


def pair(chosen, rejected, reference_chosen=0.0, reference_rejected=0.0, lens=(4, 2), **more):
    columns = (t(chosen), t(rejected), *map(t, lens), t(reference_chosen), t(reference_rejected))
    return Responses(*columns, whole_chosen=t(chosen), **more)


# c = LN3 - 0 = log 3 and r = -log 3 at beta 1: s(c) = 3/4, s(r) = 1/4; d = 2 log 3: s(d) = 9/10
BY_HAND = {
    "sigmoid": -math.log(0.9),
    "sigmoid_norm": math.log(1 + math.exp(-(LN3 / 4 + LN3 / 2))),
    "hinge": 0.0,  # 1 - 2.197 is below 0
    "ipo": (LN3 / 4 + LN3 / 2 - 0.5) ** 2,
    "nca_pair": -math.log(0.75) - 0.5 * math.log(0.25) - 0.5 * math.log(0.75),
    "bco_pair_unshifted": -2 * math.log(0.75),
    "sppo_hard": 2 * (LN3 - 0.5) ** 2,
    "apo_zero": 0.25 + 0.25,
    "apo_down": 0.75 + 0.1,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_loss_by_hand(name):
    losses = loss_of(name, pair(LN3, -LN3), DPOConfig(1.0, name))
    assert losses.item() == pytest.approx(BY_HAND[name], abs=1e-12)


def loss_of(name, responses, config):
    return function_of(LOSSES[name].formula)(responses, config)


def test_losses_with_numbers_of_their_own_by_hand():
    # s(d) = 0.9, e = 0.2: (-0.8 log 0.9 + 0.2 log 0.1) / 0.6
    config = DPOConfig(1.0, "robust", 0.2)
    wanted = (-0.8 * math.log(0.9) + 0.2 * math.log(0.1)) / 0.6
    assert loss_of("robust", pair(LN3, -LN3), config).item() == pytest.approx(wanted)
    # KL((0.9, 0.1) || (0.8, 0.2)) = 0.9 log(9/8) + 0.1 log(1/2)
    config = DPOConfig(1.0, "exo_pair", 0.2)
    wanted = 0.9 * math.log(9 / 8) - 0.1 * LN2
    assert loss_of("exo_pair", pair(LN3, -LN3), config).item() == pytest.approx(wanted)
    # d / tau = 2 log 3 / 2: a share of 3/4 of exp(-d) = 1/9, 1/4 of -log 0.9
    config = DPOConfig(1.0, "discopop", discopop_tau=2.0)
    wanted = 0.75 / 9 - 0.25 * math.log(0.9)
    assert loss_of("discopop", pair(LN3, -LN3), config).item() == pytest.approx(wanted)
    # means -log(2) and -3 log(2) of a token, beta 1: d = 2 log 2, gamma = log 2: s(log 2) = 2/3
    config = DPOConfig(1.0, "simpo", simpo_gamma=LN2)
    responses = pair(-4 * LN2, -6 * LN2)
    assert loss_of("simpo", responses, config).item() == pytest.approx(math.log(1.5))
    # a margin of log 3 leaves d = log 3
    config = DPOConfig(1.0, "sigmoid")
    responses = pair(LN3, -LN3, margin=t(LN3))
    assert loss_of("sigmoid", responses, config).item() == pytest.approx(-math.log(0.75))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (dict(f_divergence_type="forward_kl"), (1 - 1 / 3) - (1 - 3)),  # 1 - 1/u of 3 and 1/3
        (dict(f_divergence_type="js_divergence"), math.log(1.5) - math.log(0.5)),
        (
            dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=3.0),
            (9 - 1) / 2 - (1 / 9 - 1) / 2,
        ),
        (dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=1.0), 2 * LN3),
    ],
)
def test_divergences_by_hand(changes, wanted):
    of_chosen, of_rejected = scores(pair(LN3, -LN3), DPOConfig(1.0, **changes))
    assert (of_chosen - of_rejected).item() == pytest.approx(wanted)


def of_batch(name, every, memory=None):
    """(losses, numbers of the batch) of all pairs of a batch."""
    config = DPOConfig(1.0, name)
    numbers = function_of(LOSSES[name].of_batch)(every, config, {} if memory is None else memory)
    columns = [torch.as_tensor(x, dtype=torch.float64).expand(2) for x in numbers]
    every = every.with_numbers(torch.stack(columns, -1))
    return loss_of(name, every, config).tolist(), [column.tolist() for column in columns]


def two_pairs(chosen, rejected, reference_chosen=(0, 0), reference_rejected=(0, 0)):
    columns = (t(*chosen), t(*rejected), t(4, 2), t(2, 5), t(*reference_chosen))
    return Responses(*columns, t(*reference_rejected), whole_chosen=t(*chosen))


def test_numbers_of_a_batch_by_hand():
    # BCO: means 1.0, then 0.5: the shift is 1.0, then 0.75
    memory = {}
    _, numbers = of_batch("bco_pair", two_pairs((3, 1), (1, -1)), memory)
    assert numbers[0] == [1.0, 1.0]
    losses, numbers = of_batch("bco_pair", two_pairs((0.75, 1.25), (0.75, -0.75)), memory)
    assert numbers[0] == [0.75, 0.75] and memory == {"bco_steps": 2, "bco_mean": 0.75}
    assert losses[0] == pytest.approx(2 * LN2)  # both answers of the first pair are at the shift
    # KTO: mean log-ratios 2 and -1, at least 0: (s(0 - c) + s(r - 2)) / 2
    losses, numbers = of_batch("kto_pair", two_pairs((LN3, 4 - LN3), (2 - LN3, LN3 - 4)))
    assert numbers == [[0, 0], [2, 2]]
    assert losses[0] == pytest.approx((0.25 + 0.25) / 2)
    # CPO: d = 2 log 3 and 0; the mean over pairs of its second term is that of 6 tokens, and the
    # answers of 4 and 2 tokens lose log 3 and 1: (log 3 + 1) / 6
    losses, numbers = of_batch("cpo", two_pairs((-LN3, -1), (-3 * LN3, -1)))
    assert numbers[0] == pytest.approx([1 / 3, 1 / 3])
    assert losses == pytest.approx([-math.log(0.9) + LN3 / 3, LN2 + 1 / 3])
    losses, _ = of_batch("sft", two_pairs((-LN3, -1), (-3 * LN3, -1)))
    assert sum(losses) / 2 == pytest.approx((LN3 + 1) / 6)
    # AOT: margins 5 and 1 of the policy beside 0 and 3 of the reference, sorted: 5 - 3 and 1 - 0
    losses, numbers = of_batch("aot", two_pairs((5, 1), (0, 0), (0, 3), (0, 0)))
    assert numbers[0] == [3, 0]
    assert losses == pytest.approx([math.log(1 + math.exp(-2)), math.log(1 + math.exp(-1))])
    # unpaired: chosen 2 and 0, rejected 1 and 5 sorted: 2 beside 5, 0 beside 1
    losses, numbers = of_batch("aot_unpaired", two_pairs((2, 0), (1, 5)))
    assert numbers == [[5, 1], [0, 2]]
    assert losses == pytest.approx([math.log(1 + math.exp(3)), math.log(1 + math.exp(1))])
    # 6 tokens of two chosen answers: their losses 3 and 9 have the mean 12 / 6 over tokens
    losses, _ = of_batch("sft", two_pairs((-3, -9), (0, 0)))
    assert sum(losses) / 2 == pytest.approx(2.0)


def test_the_running_mean_forgets_a_step_that_is_not_finite():
    memory = {"bco_steps": 1, "bco_mean": 0.5}
    of_batch("bco_pair", two_pairs((math.inf, 1), (1, 1)), memory)
    assert memory == {"bco_steps": 1, "bco_mean": 0.5}


REFUSED = [
    (dict(pref_loss="apo_zero", label_smoothing=0.1), "dpo_label_smoothing"),
    (dict(pref_loss="hinge", simpo_gamma=0.1), "simpo_gamma"),
    (dict(pref_loss="exo_pair"), "dpo_label_smoothing"),
    (dict(pref_loss="nca_pair", f_divergence_type="js_divergence"), "f_divergence_type"),
    (dict(f_alpha_divergence_coef=0.3), "f_alpha_divergence_coef"),
    (dict(pref_loss=["sigmoid", "sft"], use_weighting=True), "use_weighting"),
    (dict(pref_loss="orpo", ld_alpha=0.5), "ld_alpha"),
    (dict(pref_loss="orpo", ld_alpha=0.0), "ld_alpha"),
    (dict(pref_loss=["sigmoid", "sft"], pref_loss_weights=[1.0]), "pref_loss_weights"),
    (dict(pref_loss=["sigmoid", "sigmoid"]), "pref_loss"),
    (dict(pref_loss=[]), "pref_loss"),
]


@pytest.mark.parametrize(("keys", "refused"), REFUSED)
def test_a_key_that_no_loss_reads_is_refused_by_its_name(keys, refused):
    with pytest.raises(ConfigError) as error:
        DPOConfig(**keys)
    assert [problem.key for problem in error.value.problems] == [refused]
