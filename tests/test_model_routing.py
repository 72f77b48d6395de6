"""Routing against transformers' own routers, and the balancing losses by hand."""

from types import SimpleNamespace

import pytest
import torch

from mca_lite.args import TrainingArguments
from mca_lite.backend import Backend, count_real_micro_batches
from mca_lite.backend_torch import updated_bias
from mca_lite.model_moe import (
    BalancingLosses,
    RouterStatistics,
    balancing_parts,
    choose_experts,
    count_choices,
    counted,
    scores_of,
)
from tests.shared import tiny_moe

H, E, T = 32, 8, 50


def their_router(name: str, **changes):
    """(a router of transformers with random weights, its answer for random tokens)"""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
        DeepseekV2Config,
        DeepseekV2TopkRouter,
    )
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    torch.manual_seed(0)
    kinds = {
        "qwen3_moe": Qwen3MoeTopKRouter,
        "mixtral": MixtralTopKRouter,
        "glm4_moe": Glm4MoeTopkRouter,
    }
    if name == "deepseek_v2":
        keys = dict(
            hidden_size=H,
            n_routed_experts=E,
            num_experts=E,
            num_experts_per_tok=3,
            routed_scaling_factor=1.5,
            n_group=4,
            topk_group=2,
        )
        router = DeepseekV2TopkRouter(DeepseekV2Config(**{**keys, **changes}))
    else:
        router = kinds[name](tiny_moe.hf_config(name, **changes))
    with torch.no_grad():
        router.weight.normal_()
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.uniform_(0, 0.5)
        return router, router(torch.randn(T, H))


@pytest.mark.parametrize(
    "name, changes, keys",
    [
        ("qwen3_moe", dict(num_experts=E), dict(topk=2)),
        ("qwen3_moe", dict(num_experts=E, norm_topk_prob=False), dict(topk=2, normalise=False)),
        ("mixtral", dict(num_local_experts=E), dict(topk=2)),
        ("glm4_moe", dict(), dict(topk=3, scaling=1.7, num_groups=4, group_topk=2)),
        (
            "glm4_moe",
            dict(num_experts_per_tok=4),
            dict(topk=4, scaling=1.7, num_groups=4, group_topk=2),
        ),
        (
            "glm4_moe",
            dict(num_experts_per_tok=2),
            dict(topk=2, scaling=1.7, num_groups=4, group_topk=2),
        ),
        (  # groups of four, of which the two best count
            "glm4_moe",
            dict(n_routed_experts=16),
            dict(topk=3, scaling=1.7, num_groups=4, group_topk=2),
        ),
        (
            "glm4_moe",
            dict(norm_topk_prob=False, n_group=1, topk_group=1),
            dict(topk=3, scaling=1.7, normalise=False),
        ),
        ("deepseek_v2", dict(topk_method="greedy"), dict(topk=3, scaling=1.5, normalise=False)),
        (
            "deepseek_v2",
            dict(topk_method="group_limited_greedy"),
            dict(
                topk=3, scaling=1.5, normalise=False, num_groups=4, group_topk=2, group_score="max"
            ),
        ),
        (
            "deepseek_v2",
            dict(topk_method="group_limited_greedy", n_routed_experts=16, num_experts=16),
            dict(
                topk=3, scaling=1.5, normalise=False, num_groups=4, group_topk=2, group_score="max"
            ),
        ),
    ],
)
def test_choices_and_weights_are_those_of_transformers(name, changes, keys):
    router, (logits, weights, experts) = their_router(name, **changes)
    if name == "glm4_moe":
        keys = dict(keys, score_function="sigmoid", bias=router.e_score_correction_bias)
    scores = scores_of(logits, keys.get("score_function", "softmax"))
    ours, chosen = choose_experts(scores, **keys)
    wanted = torch.zeros_like(logits).scatter(1, experts, weights)
    torch.testing.assert_close(
        torch.zeros_like(logits).scatter(1, chosen, ours), wanted, rtol=0, atol=1e-6
    )


def test_a_bias_that_is_the_same_for_all_experts_changes_no_choice():
    """However low it is: experts of closed groups stay behind those with negative scores."""
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(3))
    keys = dict(topk=3, score_function="sigmoid", num_groups=4, group_topk=2)
    (_, chosen), (_, biased) = (
        choose_experts(logits.sigmoid(), bias=torch.full((E,), bias), **keys)
        for bias in (0.0, -2.0)
    )
    assert torch.equal(biased, chosen)


def by_hand(logits, real, topk, score_function):
    """(aux loss, z loss) of one pool of tokens [T, E], loop by loop."""
    num_experts, tokens = logits.shape[1], [t for t in range(len(logits)) if real[t]]
    choices, mass, z = [0] * num_experts, [0.0] * num_experts, 0.0
    for t in tokens:
        if score_function == "softmax":
            scores = torch.softmax(logits[t], -1)
        else:
            scores = torch.sigmoid(logits[t]) / torch.sigmoid(logits[t]).sum()
        for e in scores.argsort(descending=True)[:topk].tolist():
            choices[e] += 1
        for e in range(num_experts):
            mass[e] += scores[e]
        z += torch.log(torch.exp(logits[t]).sum()) ** 2
    n = len(tokens)
    return num_experts * sum(
        c / (n * topk) * m / n for c, m in zip(choices, mass, strict=True)
    ), z / n


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_balancing_losses_and_their_gradients_are_the_formulas(score_function):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 3, 4, generator=generator).requires_grad_()
    real = torch.ones(6, 3, dtype=torch.bool)
    real[4:, 0], real[2:, 1] = False, False
    pool, seq = (
        balancing_parts(BalancingLosses(kind, 0.1, 0.1), None, logits, real, 2, score_function)
        for kind in ("aux_loss", "seq_aux_loss")
    )
    aux, z = by_hand(logits.flatten(0, 1), real.flatten(), 2, score_function)
    rows = [by_hand(logits[:, b], real[:, b], 2, score_function)[0] for b in range(3)]
    assert pool[2] == 12
    for ours, wanted in ((pool[0], aux), (pool[1], z), (seq[0], sum(rows) / 3), (seq[1], z)):
        torch.testing.assert_close(ours, wanted)
        one, other = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (ours, wanted))
        torch.testing.assert_close(one, other)


def test_an_empty_micro_batch_has_no_losses_and_rows_of_padding_do_not_dilute():
    logits = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(2))
    nothing = torch.zeros(4, 2, dtype=torch.bool)
    losses = BalancingLosses("aux_loss", 0.1, 0.1)
    assert [float(x) for x in balancing_parts(losses, None, logits, nothing, 2, "softmax")] == [
        0,
        0,
        0,
    ]
    first = nothing.clone()
    first[:, 0] = True
    losses = losses._replace(kind="seq_aux_loss")
    alone = balancing_parts(losses, None, logits[:, :1], first[:, :1], 2, "softmax")
    torch.testing.assert_close(balancing_parts(losses, None, logits, first, 2, "softmax"), alone)


def test_even_loads_have_an_aux_loss_of_one():
    logits = torch.zeros(4, 1, 4) + 5 * torch.eye(4)[:, None]
    losses = BalancingLosses("aux_loss", 0.1)
    real = torch.ones(4, 1, dtype=torch.bool)
    balance, z, _ = balancing_parts(losses, None, logits, real, 1, "softmax")
    assert float(balance) == pytest.approx(1.0)
    assert float(z) == 0, "without a coefficient"


def test_losses_count_as_the_keys_say():
    keys = dict(moe_aux_loss_coeff=0.05, moe_z_loss_coeff=0.02)
    losses = BalancingLosses.of(TrainingArguments(output_dir="unused", **keys))
    assert losses == ("aux_loss", 0.05, 0.02)


@pytest.mark.parametrize("per_token", [True, False])
def test_a_step_has_the_mean_of_balancing_losses_over_real_micro_batches(per_token):
    """Both backends take the same weight, so that none of them shows what it has to be."""
    trained = (3, 5, 0)  # tokens of this rank's micro-batches; the last one only fills the step
    batches = [{"padding_mask": torch.tensor([[n == 0]]), "trained": n} for n in trained]
    statistics = RouterStatistics(1, E)
    backend = SimpleNamespace(
        statistics_of_routers=statistics,
        losses_of_routers=BalancingLosses("aux_loss", 0.1),
        args=SimpleNamespace(calculate_per_token_loss=per_token),
        dp_size=2,
        _sum_over_data_parallel=lambda own: 2 * own,  # the other rank has as many
    )
    Backend.weigh_router_losses(backend, batches, lambda batch: batch["trained"])
    # what the sum over all micro-batches is divided by: trained tokens, or micro-batches
    divisor = 2 * (3 + 5 if per_token else 3)
    assert float(statistics.loss_weight) / divisor == pytest.approx(1 / 4)


def test_padding_is_not_counted():
    experts, real = torch.tensor([[0, 1], [1, 2], [3, 1]]), torch.tensor([True, True, False])
    statistics = RouterStatistics(1, 4)
    assert count_choices(experts, real[:, None], 4).tolist() == [[1, 2, 1, 0, 2]]
    off = BalancingLosses()
    found = counted(off, None, torch.zeros(3, 1, 4), real[:, None], 2, "softmax", experts)
    assert float(statistics.add(0, off, *found)) == 0
    assert statistics.rows.tolist() == [[1, 2, 1, 0, 0, 0, 0]]
    masks = [torch.tensor([[True, True]]), torch.tensor([[False, True]])]
    assert count_real_micro_batches([{"padding_mask": mask} for mask in masks]) == 1


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_scores_and_counts_that_a_caller_has_give_the_same_losses(score_function):
    logits = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(4)).double()
    real = torch.rand(6, 3, generator=torch.Generator().manual_seed(4)) < 0.7
    args = BalancingLosses("seq_aux_loss", 0.1, 0.1), None, logits, real, 2, score_function
    scores = scores_of(logits, score_function)
    _, chosen = choose_experts(scores.flatten(0, 1), 2, score_function)
    alone = balancing_parts(*args)
    shared = balancing_parts(*args, scores, count_choices(chosen, real, 4))
    for one, other in zip(alone, shared, strict=True):
        assert one.dtype == torch.float64 or one is alone[1]
        assert torch.equal(one, other)


def test_the_bias_of_idle_experts_grows():
    bias, counts = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([4.0, 0.0, 1.0, 7.0])
    assert updated_bias(bias, counts, 0.5).tolist() == [-0.5, 1.5, 2.5, 2.5]


def test_statistics_average_over_mixtures_and_micro_batches_of_the_whole_window():
    statistics = RouterStatistics(num_layers=3, num_experts=2)  # the first layer is dense
    one = torch.tensor(1.0)
    for choices, balance in (([1, 3], 2.0), ([3, 5], 4.0)):
        for layer in (1, 2):
            row = torch.tensor([*choices, balance * layer, 1.0, 1.0])
            statistics.add(layer, BalancingLosses(), row, one, one)
    losses = BalancingLosses("aux_loss", 0.1, 0.1)
    got = statistics.take(losses)
    assert got.pop("expert_load") == [[0.667, 1.333]] * 2, "a layer each, an expert each"
    assert got == {
        "expert_load_max": 8 / 6,
        "expert_load_min": 4 / 6,
        "load_balancing_loss": 18 / 4,
        "z_loss": 1.0,
    }
    assert statistics.take(losses) == {}, "a new window starts"
