"""The schedule against its formulas written out again, and the optimizer against AdamW written out
by hand.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers

from mca_lite.args import TrainingArguments
from mca_lite.args_rules_training import warmup_steps
from mca_lite.errors import ConfigError
from mca_lite.optim import (
    create_grad_scaler,
    create_torch_optimizer,
    decays,
    get_megatron_lr_scheduler,
    get_optimizer_config,
    load_scaler_states,
    scaler_states,
)
from tests.shared import tiny, world
from tests.shared.layouts import DENSE
from tests.shared.training import read_log, train

MAX = 0.4


def arguments(**values):
    return TrainingArguments(**{"output_dir": "out", "learning_rate": MAX, **values})


def unchecked(name="linear", warmup=0, **kwargs):
    """The arguments as a scheduler reads them, without the checks of TrainingArguments."""
    return SimpleNamespace(
        lr_scheduler_type=name,
        lr_scheduler_kwargs=kwargs,
        learning_rate=MAX,
        warmup_steps=warmup,
        warmup_ratio=0.0,
        weight_decay=0.0,
    )


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=123.0)


def zeros_of_steps(path: str, out: str, ranks: int, keys: dict) -> list[int]:
    world.run(train, ranks, path, out, steps=2, log_num_zeros_in_grad=True, **keys)
    return [line["num_zeros_in_grad"] for line in read_log(out)]


@pytest.fixture(scope="module")
def odd_models(tmp_path_factory):
    """tied -> (a model with a vocabulary that tensor parallelism pads, its zeros in plain torch)"""
    models = {}
    for tied in (True, False):
        folder, keys = tmp_path_factory.mktemp("odd"), dict(backend="torch")
        tiny.save_model(folder / "m", "llama", num_hidden_layers=2, tie_word_embeddings=tied)
        path = str(folder / "m")
        models[tied] = path, zeros_of_steps(path, str(folder / "torch"), 1, keys)
    return models


# ranks, stages and copies by themselves; the products of them are coupled by nothing
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "layout",
    [
        "tp2",
        "pp2",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("tp2_sp", "pp2dp2_overlap", "tp2sp_dp2_dist_opt")
        ),
    ],
)
def test_zeros_of_the_gradient_are_those_of_the_model_without_padding(
    odd_models, layout, tied, tmp_path
):
    """Of an untied embedding the rows of tokens that a step does not have are zero."""
    path, wanted = odd_models[tied]
    ranks, keys = DENSE[layout]
    assert zeros_of_steps(path, str(tmp_path), ranks, keys) == wanted and len(wanted) == 2
    assert all(number % 32 == 0 for number in wanted) and any(wanted) == (not tied)


def rates(args, steps, extra=0):
    """The rate of each update: that of step 0 first; `extra` more behind the last one."""
    scheduler = get_megatron_lr_scheduler(args, steps, optimizer())
    found = []
    for _ in range(steps + extra):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == [found[-1]]
        scheduler.step()
    return found


# The formulas: n finished steps, w of warm-up, D at which the decay ends, low the smallest rate.


def warm(n, w):
    return MAX * n / w


def linear(n, w, D, low):
    return low + (MAX - low) * (1 - (n - w) / (D - w))


def cosine(n, w, D, low):
    return low + (MAX - low) * (1 + math.cos(math.pi * (n - w) / (D - w))) / 2


def inverse_sqrt(n, w, D, low):
    return max(low, MAX * math.sqrt(max(w, 1)) / math.sqrt(max(n, 1)))


def constant(n, w, D, low):
    return MAX


def expected(shape, steps, w, D=None, low=0.0, extra=0):
    D = steps if D is None else D
    out = []
    for n in range(steps + extra):
        if n < w:
            out.append(warm(n, w))
        else:
            out.append(low if n > D and shape is not constant else shape(n, w, D, low))
    return pytest.approx(out, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("w", [0, 3])
@pytest.mark.parametrize(
    "name, shape, kwargs, low",
    [
        ("constant_with_warmup", constant, {}, 0.0),
        ("linear", linear, {}, 0.0),
        ("linear", linear, {"min_lr": 0.05}, 0.05),
        ("cosine", cosine, {}, 0.0),
        ("cosine", cosine, {"min_lr_rate": 0.25}, 0.1),
        ("cosine_with_min_lr", cosine, {"min_lr": 0.1}, 0.1),
        ("cosine_with_min_lr", cosine, {"min_lr_rate": 0.25}, 0.1),
        ("cosine_warmup_with_min_lr", cosine, {"min_lr": 0.1}, 0.1),
        ("inverse_sqrt", inverse_sqrt, {}, 0.0),
        ("inverse_sqrt", inverse_sqrt, {"min_lr": 0.3}, 0.3),
    ],
)
def test_schedule_follows_its_formula(name, shape, kwargs, low, w):
    args = arguments(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, warmup_steps=w)
    assert rates(args, 11, extra=3) == expected(shape, 11, w, low=low, extra=3)


def test_constant_has_no_warmup_whatever_is_asked_for():
    assert rates(arguments(lr_scheduler_type="constant", warmup_steps=3), 6) == [MAX] * 6


def test_first_update_uses_the_rate_of_step_0():
    scheduler = get_megatron_lr_scheduler(arguments(warmup_steps=4), 10, optimizer())
    assert scheduler.get_last_lr() == [0.0] and scheduler.optimizer.param_groups[0]["lr"] == 0.0
    scheduler = get_megatron_lr_scheduler(arguments(), 10, optimizer())
    assert scheduler.get_last_lr() == [MAX]
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([MAX * 0.9])


@pytest.mark.parametrize("name, shape", [("linear", linear), ("cosine", cosine)])
@pytest.mark.parametrize("D", [7, 30])
def test_num_decay_steps_is_where_the_minimum_is_reached(name, shape, D):
    kwargs = {"num_decay_steps": D, "min_lr": 0.1}
    args = arguments(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, warmup_steps=2)
    found = rates(args, 12)
    assert found == expected(shape, 12, 2, D=D, low=0.1)
    if D == 7:
        assert found[7:] == pytest.approx([0.1] * 5)
    else:
        assert found[-1] > 0.2


WSD_SHAPES = {
    "linear": lambda r: 1 - r,
    "cosine": lambda r: (1 + math.cos(math.pi * r)) / 2,
    "exponential": lambda r: 2 * 0.5**r - 1,
    "minus_sqrt": lambda r: 1 - math.sqrt(r),
}


def wsd(style, steps, w, stable, decay, low=0.0):
    out = []
    for n in range(steps):
        r = (n - w - stable) / decay
        flat = MAX if r <= 0 else low + (MAX - low) * WSD_SHAPES[style](min(r, 1))
        out.append(warm(n, w) if n < w else flat)
    return pytest.approx(out, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("style", WSD_SHAPES)
@pytest.mark.parametrize("kwargs", [{"num_decay_steps": 5}, {"num_stable_steps": 4}])
def test_warmup_stable_decay_in_each_style(style, kwargs):
    args = arguments(
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={**kwargs, "decay_type": style, "min_lr_rate": 0.1},
        warmup_steps=3,
    )
    assert rates(args, 12) == wsd(style, 12, 3, 4, 5, low=0.1 * MAX)


def test_warmup_stable_decay_that_ends_before_the_run_stays_at_the_minimum():
    kwargs = {"num_stable_steps": 3, "num_decay_steps": 2, "min_lr": 0.1}
    args = arguments(
        lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=kwargs, warmup_steps=2
    )
    assert rates(args, 10) == wsd("linear", 10, 2, 3, 2, low=0.1)


def test_the_stable_schedule_decays_as_transformers_where_no_type_is_given():
    kwargs = {"num_decay_steps": 6}
    args = arguments(lr_scheduler_type=STABLE, lr_scheduler_kwargs=kwargs, warmup_steps=2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=MAX)
    theirs = transformers.get_wsd_schedule(optimizer, 2, 6, 12)
    wanted = []
    for _ in range(12):
        wanted.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rates(args, 12) == pytest.approx(wanted)


def test_a_decay_of_no_steps_drops_at_once():
    args = unchecked("warmup_stable_decay", num_stable_steps=3, num_decay_steps=0)
    assert rates(args, 6) == [MAX, MAX, MAX, MAX, 0.0, 0.0]
    args = unchecked("warmup_stable_decay", num_decay_steps=0)
    assert rates(args, 4) == [MAX] * 4


def test_warmup_ratio_is_rounded_up_as_transformers_does():
    assert warmup_steps(arguments(warmup_ratio=0.25), 10) == 3
    assert (
        warmup_steps(arguments(warmup_steps=0.25), 10) == 3
    )  # a fraction, as transformers 5 spells it
    assert warmup_steps(arguments(warmup_steps=2, warmup_ratio=0.25), 10) == 2
    assert warmup_steps(arguments(warmup_steps=1), 10) == 1
    assert warmup_steps(arguments(), 10) == 0
    assert rates(arguments(warmup_ratio=0.25), 10) == expected(linear, 10, 3)


def test_a_run_of_one_step_trains_at_the_full_rate():
    assert rates(arguments(), 1) == [MAX]


STABLE = "warmup_stable_decay"


@pytest.mark.parametrize(
    "kind, kwargs, key, reason",
    [
        ("polynomial", {}, "lr_scheduler_type", "expected one of constant"),
        ("linear", {"power": 2}, "power", "linear takes min_lr"),
        ("cosine", {"decay_type": "linear"}, "decay_type", "cosine takes min_lr"),
        ("linear", {"num_stable_steps": 2}, "num_stable_steps", "linear takes min_lr"),
        (STABLE, {"num_decay_steps": 2, "warmup_type": "cosine"}, "warmup_type", "takes min_lr"),
        (STABLE, {"num_decay_steps": 2, "decay_type": "step"}, "decay_type", "expected one of"),
        (STABLE, {"num_decay_steps": -1}, "num_decay_steps", "from 0 to inf"),
        ("cosine", {"min_lr": 0.1, "min_lr_rate": 0.1}, "min_lr_rate", "min_lr is given too"),
        ("cosine", {"min_lr": 0.5}, "min_lr", "from 0 to 0.4"),
        ("cosine", {"min_lr": -0.1}, "min_lr", "from 0 to"),
    ],
)
def test_what_no_schedule_can_do_is_refused_with_the_arguments(kind, kwargs, key, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        arguments(lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs)
    assert [problem.key.rsplit(".")[-1] for problem in caught.value.problems] == [key]


@pytest.mark.parametrize(
    "kind, warmup, kwargs, reason",
    [
        (STABLE, 4, {"num_decay_steps": 7}, "it is more than the 6 steps"),
        ("linear", 10, {}, "10 warm-up steps leave nothing of the 10 steps"),
        ("linear", 0, {"num_decay_steps": 0}, "0 warm-up steps leave nothing of the 0 steps"),
    ],
)
def test_a_schedule_longer_than_the_run_is_refused_as_soon_as_its_length_is_known(
    kind, warmup, kwargs, reason
):
    values = dict(lr_scheduler_type=kind, warmup_steps=warmup, lr_scheduler_kwargs=kwargs)
    with pytest.raises(ConfigError, match=reason) as caught:
        arguments(**values, max_steps=10)
    if warmup == 10:  # what is advised is taken in place of it
        assert "warmup_steps: 0.1" in str(caught.value)
        arguments(**values | {"warmup_steps": 0.1}, max_steps=10)
    args = arguments(**values)
    with pytest.raises(ConfigError, match=reason):
        get_megatron_lr_scheduler(args, 10, optimizer())


def test_a_warmup_as_long_as_the_run_is_fine_for_a_constant_rate():
    args = arguments(lr_scheduler_type="constant_with_warmup", warmup_steps=10)
    assert rates(args, 4) == expected(constant, 4, 10)


# ---- groups and updates


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(7, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.linear = torch.nn.Linear(6, 4)
        self.frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)

    def forward(self, x):
        return self.linear(self.norm(self.embed(x))).pow(2).mean()


MATRICES = {"embed.weight", "linear.weight"}


def test_decay_is_for_matrices_and_every_trained_parameter_is_in_one_group():
    net = Net()
    groups = create_torch_optimizer(arguments(weight_decay=0.1), net).param_groups
    names = {id(p): n for n, p in net.named_parameters()}
    assert [{names[id(p)] for p in g["params"]} for g in groups] == [
        MATRICES,
        {"norm.weight", "norm.bias", "linear.bias"},
    ]
    assert [g["wd_mult"] for g in groups] == [1.0, 0.0]
    assert {n for n, p in net.named_parameters() if decays(n, p)} == MATRICES | {"frozen"}


def test_scheduler_sets_decay_by_group_and_keeps_it():
    args = arguments(weight_decay=0.1, warmup_steps=2)
    optimizer = create_torch_optimizer(args, Net())
    scheduler = get_megatron_lr_scheduler(args, 6, optimizer)
    for _ in range(8):  # beyond the last step too
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
        scheduler.step()


def test_a_model_of_one_kind_of_parameter_has_one_group():
    assert (
        len(create_torch_optimizer(arguments(), torch.nn.Linear(2, 2, bias=False)).param_groups)
        == 1
    )


def test_five_steps_equal_adamw_written_out_by_hand():
    args = arguments(
        learning_rate=0.05,
        weight_decay=0.3,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_epsilon=1e-6,
        warmup_steps=2,
    )
    net, by_hand = Net(), Net()
    optimizer = create_torch_optimizer(args, net)
    scheduler = get_megatron_lr_scheduler(args, 8, optimizer)
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in by_hand.named_parameters()}
    x = torch.arange(7)
    for t, rate in enumerate([0.0, 0.025, 0.05, 0.05 * 5 / 6, 0.05 * 4 / 6], start=1):
        optimizer.zero_grad()
        net(x).backward()
        optimizer.step()
        scheduler.step()
        by_hand.zero_grad()
        by_hand(x).backward()
        with torch.no_grad():
            for name, p in by_hand.named_parameters():
                if p.grad is None:
                    continue
                m, v = moments[name]
                m.mul_(0.8).add_(0.2 * p.grad)
                v.mul_(0.95).add_(0.05 * p.grad**2)
                if name in MATRICES:
                    p.mul_(1 - rate * 0.3)
                p.sub_(rate * (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-6))
        for (name, mine), reference in zip(
            net.named_parameters(), by_hand.parameters(), strict=True
        ):
            torch.testing.assert_close(
                mine, reference, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert not torch.equal(net.embed.weight, Net().embed.weight)
    assert torch.equal(net.frozen, torch.ones(2, 2))


def test_sgd_with_momentum_takes_the_same_groups():
    args = arguments(optim="sgd", sgd_momentum=0.5, weight_decay=0.1, learning_rate=0.1)
    p = torch.nn.Parameter(torch.ones(1, 1))
    net = torch.nn.Module()
    net.p = p
    optimizer = create_torch_optimizer(args, net)
    get_megatron_lr_scheduler(args, 10, optimizer)
    p.grad = torch.full((1, 1), 2.0)
    optimizer.step()
    assert p.item() == pytest.approx(
        1 - 0.1 * (2 + 0.1)
    )  # torch's SGD adds the decay to the gradient
    p.grad = torch.zeros(1, 1)
    optimizer.step()
    assert p.item() == pytest.approx(0.79 - 0.1 * (0.5 * 2.1 + 0.1 * 0.79))


def test_megatron_gets_the_same_numbers():
    args = arguments(
        weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, max_grad_norm=0
    )
    config = get_optimizer_config(args, torch.bfloat16)
    assert (config.lr, config.weight_decay, config.adam_eps) == (MAX, 0.3, 1e-6)
    assert (config.adam_beta1, config.adam_beta2) == (0.8, 0.95)
    assert config.bf16 and not config.fp16 and config.params_dtype == torch.bfloat16
    assert config.clip_grad == math.inf  # never clips, and measures the norm all the same
    assert config.optimizer == "adam" and config.decoupled_weight_decay


def test_every_part_of_an_optimizer_gets_its_loss_scale_back():
    """Of a checkpoint of fewer parts, too: the last one's is that of the rest."""
    args = arguments(fp16=True)
    saved, resumed = ([create_grad_scaler(args) for _ in range(count)] for count in (2, 3))
    for overflows, scaler in enumerate(saved, 1):
        for _ in range(overflows * args.hysteresis):
            scaler.update(True)
    load_scaler_states(resumed, scaler_states(saved))
    scales = [float(scaler.scale) for scaler in saved]
    assert len({*scales, args.initial_loss_scale}) == 3
    assert [float(scaler.scale) for scaler in resumed] == [*scales, scales[-1]]
