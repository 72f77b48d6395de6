"""Policy losses: gradients of every row, by one call and by two, beside formulas written
by hand on whole logits in plain transformers, in every layout.
"""

import functools

import pytest
import torch

from tests.shared import session_tools, tiny_moe, world
from tests.shared.layouts import FULL, PP2
from tests.shared.session_tools import LAYOUTS, MORE_LAYOUTS, log_probs_of
from tests.shared.training import refusal

CP2_PACKED = LAYOUTS["cp2_packed"]
TOKENS, ANSWERS = 28, 7  # with a label; samples with such a token
COLUMNS = ("advantage", "old_logp")


def tokens_of(model, sample, temperature=1.0) -> tuple:
    """(log p, o, q, A, sampler_weight, entropy) of the trained tokens of a sample."""
    logps, entropy = log_probs_of(model, sample, temperature)
    kept = torch.tensor(sample["labels"]) != -100
    columns = [torch.tensor(sample[name]) for name in ("old_logp", "ref_logp", "advantage")]
    columns = [column.expand(len(kept))[kept] for column in columns]
    return logps[kept], *columns, torch.tensor(sample["sampler_weight"])[kept], entropy[kept]


def surrogate(r, a, low=0.2, high=0.2):
    return -torch.minimum(r * a, torch.clamp(r, 1 - low, 1 + high) * a)


def ppo(p, o, q, a, w, h):
    return surrogate((p - o).exp(), a)


def ppo_dual(p, o, q, a, w, h):
    r = (p - o).exp()
    terms = -torch.minimum(r.clamp(max=1.5) * a, r.clamp(0.9, 1.1) * a)
    return w * torch.where(a < 0, torch.minimum(terms, -1.2 * a), terms)


def grpo_k3(p, o, q, a, w, h):
    r = (p - o).exp()
    return w * surrogate(r, a) + 0.1 * ((q - p).exp() - (q - p) - 1) * r


def dapo(p, o, q, a, w, h):
    return surrogate((p - o).exp(), a, 0.2, 0.28)


def dr_grpo_k2(p, o, q, a, w, h):
    return surrogate((p - o).exp(), a) + 0.1 * (q - p) ** 2 / 2


def cispo(p, o, q, a, w, h):
    return -(p - o).exp().detach().clamp(max=1.1) * a * p


def gspo(p, o, q, a, w, h):
    # the gradient of a token is that of its ratio, as in the paper's GSPO-token
    s = (p - o).mean().exp().detach() * (p - p.detach()).exp()
    return surrogate(s, a, 0.03, 0.04)


def sapo(p, o, q, a, w, h):
    r = (p - o).exp()
    tau = torch.where(a > 0, 1.0, 1.05)
    return -4 / tau * a / (1 + torch.exp(-tau * (r - 1)))


def reinforce_k1(p, o, q, a, w, h):
    return -a * p - 0.1 * (q - p) - 0.05 * h


def importance_sampling(p, o, q, a, w, h):
    return -(p - o).exp() * a


def opd(p, o, q, a, w, h):
    return -(p - o).exp() * (a + 0.5 * (q - o))


def on_policy(p, o, q, a, w, h):
    return surrogate((p - p.detach()).exp(), a)


def whole_loss(model, samples, formula, denominator, is_mean=False, temperature=1.0):
    total = 0.0
    for sample in samples:
        columns = tokens_of(model, sample, temperature)
        if len(columns[0]):
            terms = formula(*columns)
            total = total + (terms.mean() if is_mean else terms.sum())
    return total / denominator


def row(loss, formula, denominator, is_mean=False, columns=COLUMNS, **numbers) -> tuple:
    call = dict(loss=loss, columns=columns, numbers=numbers, denominator=float(denominator))
    more = dict(denominator=denominator, is_mean=is_mean)
    temperature = numbers.get("temperature", 1.0)
    return call, functools.partial(whole_loss, formula=formula, temperature=temperature, **more)


WEIGHTED = (*COLUMNS, "sampler_weight")
ALL = (*WEIGHTED, "ref_logp")
ROWS = {
    "ppo": row("ppo", ppo, TOKENS),
    "ppo dual": row(
        "ppo", ppo_dual, TOKENS, columns=WEIGHTED, clip_low=0.1, dual_clip=1.2, delta=1.5
    ),
    "grpo": row("grpo", grpo_k3, ANSWERS, True, ALL, kl_coef=0.1, kl_unbiased=True),
    "dapo at 0.7": row("dapo", dapo, TOKENS, clip_high=0.28, temperature=0.7),
    "dr_grpo": row(
        "dr_grpo", dr_grpo_k2, ANSWERS * 16, False, (*COLUMNS, "ref_logp"), constant=16,
        kl_coef=0.1, kl="k2",
    ),
    "cispo": row("cispo", cispo, TOKENS, cispo_max=1.1),
    "gspo": row("gspo", gspo, ANSWERS, True, clip_low=0.03, clip_high=0.04),
    "sapo": row("sapo", sapo, ANSWERS, True),
    "reinforce": row(
        "reinforce", reinforce_k1, TOKENS, False, (*COLUMNS, "ref_logp"), kl_coef=0.1, kl="k1",
        entropy_coef=0.05,
    ),
    "importance_sampling": row("importance_sampling", importance_sampling, 1),
    "opd": row("opd", opd, TOKENS, columns=(*COLUMNS, "ref_logp"), teacher_coef=0.5),
    "on policy": row("ppo", on_policy, TOKENS, columns=("advantage",)),
}  # fmt: skip
CALLS = {name: call for name, (call, _) in ROWS.items()}


def bounded(d, sign):
    """The smaller of d and its clipped value, in the direction of the advantage."""
    return sign * torch.minimum(sign * d, sign * d.clamp(-0.2, 0.3))


def gmpo(tokens, numbers):
    """Geometric mean of an answer's ratios (Zhao et al., 2025), of its mean advantage: the value
    and gradient of the whole answer, spread over its tokens."""
    advantage = tokens.mean_of_answer(tokens.advantage)
    x = bounded(tokens.log_ratio, advantage.sign())
    return -advantage * tokens.mean_of_answer(x).exp() * (1 + x - x.detach())


def gmpo_of_answer(p, o, q, a, w, h):
    return -a.mean() * bounded(p - o, a.mean().sign()).mean().exp()


GMPO = row("gmpo", gmpo_of_answer, ANSWERS, True)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    losses = {name: loss for name, (_, loss) in (ROWS | {"gmpo": GMPO}).items()}
    return session_tools.make_oracle(tmp_path_factory.mktemp("policy"), losses)


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_LAYOUTS)]
)
def test_gradients_of_every_row_are_those_of_whole_logits(oracle, layout):
    assert not session_tools.wrong_of(oracle, CALLS, layout)


def errors_of_gmpo(folder: str, keys: dict) -> dict:
    from mca_lite import register_policy_loss

    register_policy_loss("gmpo", gmpo, counts="answers", is_mean=True)
    return session_tools.errors_of(folder, {"gmpo": GMPO[0]}, keys)


@pytest.mark.parametrize(
    "ranks, keys", [CP2_PACKED, pytest.param(1, dict(backend="torch"), marks=pytest.mark.full)]
)
def test_a_registered_formula_reads_means_of_answers_on_other_ranks(oracle, ranks, keys):
    for errors in world.run(errors_of_gmpo, ranks, oracle, keys):
        assert not {what: error for what, error in errors.items() if not error <= 1e-5}


def squared(tokens, numbers):
    return tokens.log_ratio.square() * numbers.clip_low


def metrics_and_refusals(folder: str) -> dict:
    from mca_lite import register_policy_loss
    from mca_lite.part_policy import Policy
    from mca_lite.part_policy_trainer import PolicyConfig, PolicyTrainer

    register_policy_loss("squared", squared, counts="answers", is_mean=True)
    oracle = torch.load(f"{folder}/oracle.pt", weights_only=False)
    session = session_tools.new_session(folder)
    samples = oracle["samples"]
    found = {
        "metrics": session.forward(samples, "grpo", with_entropy=True).metrics,
        "squared": session.forward(samples, "squared", clip_low=0.5).metrics["loss"],
    }
    call = session.forward_backward
    short = [dict(input_ids=[1, 2], labels=[2, 3])]
    found["advantage"] = refusal(call, short, "grpo")
    short[0]["advantage"] = 1.0
    found["ref_logp"] = refusal(call, short, "ppo", kl_coef=0.1)
    found["cispo"] = refusal(call, short, "cispo")
    found["kl"] = refusal(call, short, "ppo", kl="k4")
    found["name"] = refusal(Policy, name="gpro")
    found["taken"] = refusal(register_policy_loss, "ppo", squared)
    found["counts"] = refusal(register_policy_loss, "other", squared, counts="samples")
    call(short, "ppo")
    call(short, "grpo")
    found["two"] = refusal(session.optim_step)
    session.discard()
    dropping = session_tools.new_session(folder, attention_dropout=0.1)
    found["dropout"] = refusal(dropping.forward_backward, short, "ppo")
    for name, more in (("dropout of a run", dict(old_logp=-1.0)), ("one pass", {})):
        data = [short[0] | more] * 2
        run = PolicyTrainer(
            dropping.model, PolicyConfig(name="ppo"), dropping.args, train_dataset=data
        )
        found[name] = refusal(run.get_train_dataloader)
    return found


def test_metrics_a_registered_row_and_refusals(oracle):
    from mca_lite.model import load_torch_model

    [found] = world.run(metrics_and_refusals, 1, oracle)
    model = load_torch_model(f"{oracle}/model")
    samples = torch.load(f"{oracle}/oracle.pt", weights_only=False)["samples"]
    with torch.no_grad():
        of_samples = [tokens_of(model, sample) for sample in samples]
    p, o, q, a, _, h = (torch.cat(parts) for parts in zip(*of_samples, strict=True))
    r = (p - o).exp()
    k3 = (q - p).exp() - (q - p) - 1
    is_clipped = torch.where(a > 0, r > 1.2, r < 0.8)
    wanted = dict(ratio=r, clipped=is_clipped.float(), kl=k3, entropy=h)
    for name, values in wanted.items():
        assert found["metrics"][name] == pytest.approx(float(values.mean()), abs=1e-5), name
    kept = [one for one in of_samples if len(one[0])]
    means = [0.5 * (one[4] * (one[0] - one[1]).square()).mean() for one in kept]
    assert found["squared"] == pytest.approx(float(sum(means)) / ANSWERS, rel=1e-4)
    words = {
        "advantage": "grpo needs advantage",
        "ref_logp": "ppo needs ref_logp",
        "cispo": "cispo needs cispo_max",
        "kl": "kl 'k4': expected one of k1, k2, k3",
        "name": "name 'gpro': expected one of ppo, grpo",
        "taken": "loss ppo is registered already",
        "counts": "counts 'samples': expected one of tokens, answers, one",
        "two": "one update has one denominator",
        "dropout": "attention_dropout 0.1: ppo compares log-probabilities of two passes",
        "dropout of a run": "attention_dropout 0.1: ppo compares log-probabilities of two passes",
    }
    assert not {name: found[name] for name in words if words[name] not in found[name]}
    assert found["one pass"] == ""


def norms_of_balancing(folder: str) -> dict[str, list[float]]:
    """{batch size: gradient norms of ppo, of dr_grpo by two constants, of importance_sampling}.
    Advantages of 0 leave the gradient of the routers' balancing losses alone."""
    ids = [[1, 2, 3, 4 + n] for n in range(4)]
    samples = [dict(input_ids=row, labels=[*row[1:], 5], advantage=0.0) for row in ids]
    losses = ("ppo", {}), ("dr_grpo", dict(constant=1)), ("dr_grpo", dict(constant=16))
    norms: dict = {}
    for size in (1, 4):
        for name, numbers in (*losses, ("importance_sampling", {})):
            keys = dict(moe_aux_loss_coeff=0.5, per_device_train_batch_size=size)
            session = session_tools.new_session(folder, **keys)
            session.forward_backward(samples, name, **numbers)
            norms.setdefault(size, []).append(session.optim_step(lr=0.0).grad_norm)
    return norms


def test_balancing_losses_are_weighed_alike_by_all_denominators(tmp_path):
    tiny_moe.save_model(tmp_path / "model", "qwen3_moe")
    [found] = world.run(norms_of_balancing, 1, str(tmp_path))
    for first, *others in found.values():
        assert first > 1e-3 and others == pytest.approx(3 * [first], rel=1e-5)


def unweighed_balancing(folder: str) -> dict[str, str]:
    """{calls: what optim_step says} where the balancing losses' weight depends on the calls."""
    samples = [dict(input_ids=[1, 2], labels=[2, 3], advantage=1.0)] * 2
    session = session_tools.new_session(folder, moe_aux_loss_coeff=0.5)

    def said(*names: str, **numbers) -> str:
        for name in names:
            session.forward_backward(samples, name)
        words = refusal(session.optim_step, **numbers)
        session.discard()
        return words

    return {
        "two sums": said("importance_sampling", "importance_sampling"),
        "a sum with a denominator": said("importance_sampling", denominator=4),
        "two kinds": said("ppo", "grpo", denominator=1),
        "one of each, as always": said("ppo", "ppo", denominator=4) + said("importance_sampling"),
    }


def test_balancing_losses_without_a_weight_of_their_own_are_refused(tmp_path):
    tiny_moe.save_model(tmp_path / "model", "qwen3_moe")
    *refused, usual = world.run(unweighed_balancing, 1, str(tmp_path))[0].values()
    assert all("balancing losses have no weight" in words for words in refused) and not usual


def norms_in_a_pipeline(folder: str) -> list[float]:
    """Gradient norms without and with recomputation: a stage recomputes a micro-batch after later
    ones, of other numbers of labels, have run forward."""
    ids = [1, 2, 3, 4, 5, 6]
    samples = [dict(input_ids=ids, labels=[-100] * (6 - n) + [7] * n) for n in (1, 6, 2, 5)]
    norms = []
    for keys in ({}, FULL):
        keys = dict(PP2, moe_aux_loss_coeff=0.5, per_device_train_batch_size=1, **keys)
        session = session_tools.new_session(folder, **keys)
        session.forward_backward(samples, "cross_entropy")
        norms.append(session.optim_step(lr=0.0).grad_norm)
    return norms


def test_balancing_losses_weigh_the_same_where_a_pipeline_recomputes(tmp_path):
    tiny_moe.save_model(tmp_path / "model", "qwen3_moe")
    for plain, recomputed in world.run(norms_in_a_pipeline, 2, str(tmp_path)):
        assert recomputed == pytest.approx(plain, rel=1e-5)


def biases_after(folder: str, backend: str) -> list:
    """The biases that choose experts after an update, without and with discarded calls."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 60, (8, 9), generator=generator)
    samples = [dict(input_ids=row[:-1].tolist(), labels=row[1:].tolist()) for row in ids]
    found = []
    for discards in (False, True):
        keys = dict(backend=backend, moe_router_bias_update_rate=0.01)
        session = session_tools.new_session(folder, **keys)
        if discards:
            session.forward_backward(samples[:6], "cross_entropy")
            session.discard()
        session.forward_backward(samples[6:], "cross_entropy")
        session.optim_step(**session_tools.STILL)
        ends = ("expert_bias", "correction_bias")
        buffers = session.model.named_buffers()
        found.append([b.tolist() for name, b in buffers if name.endswith(ends)])
    return found


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_discarded_calls_do_not_move_the_biases_that_choose_experts(tmp_path, backend):
    tiny_moe.save_model(tmp_path / "model", "deepseek_v3")
    [(without, with_discarded)] = world.run(biases_after, 1, str(tmp_path), backend)
    assert without and without == with_discarded


def words_for_a_mean(folder: str) -> str:
    from mca_lite import register_policy_loss

    register_policy_loss("mean_of_all", lambda tokens, numbers: tokens.log_ratio.mean())
    session = session_tools.new_session(folder)
    sample = dict(input_ids=[1, 2], labels=[2, 3], advantage=1.0)
    return session_tools.refusal(session.forward_backward, [sample], "mean_of_all")


def test_a_formula_that_gives_no_term_for_each_token_is_refused(oracle):
    [words] = world.run(words_for_a_mean, 1, oracle)
    assert "mean_of_all gave" in words and "expected a term for each token" in words


@pytest.mark.parametrize(
    "numbers",
    [dict(constant=-1), dict(constant=8, clip_low=float("nan")), dict(constant=8, delta=-1.0)],
)
def test_numbers_of_a_loss_outside_their_range_are_refused(numbers):
    from mca_lite.part_session_loss import loss_of

    with pytest.raises(ValueError, match="expected a number"):
        loss_of("dr_grpo", numbers)
