"""Stage policy: whole steps beside formulas on whole logits, in every layout; columns
computed before training; runs that are resumed.
"""

import pytest
import torch

from tests.shared import tiny, tiny_moe, world
from tests.shared.layouts import CP2, DIST_OPT, EP2, OVERLAP, PACKED, PP2, TP2_SP, VPP2
from tests.shared.policy_tools import METRICS, oracle_run, policy_run, samples_of


def surrogate(r, a, high=0.2):
    return -torch.minimum(r * a, torch.clamp(r, 0.8, 1 + high) * a)


def grpo(p, o, q, a, w, h):
    r = (p - o).exp()
    return w * surrogate(r, a) + 0.1 * ((q - p).exp() - (q - p) - 1)


def dr_grpo(p, o, q, a, w, h):
    # a sample whose tokens moved away by more than 0.1 on average, and has A < 0, has no part
    drift = (o - p).mean().detach()
    return w * surrogate((p - o).exp(), a).masked_fill((a < 0) & (drift > 0.1), 0.0)


def dapo(p, o, q, a, w, h):
    return w * surrogate((p - o).exp(), a, 0.28)


def importance_sampling(p, o, q, a, w, h):
    return -w * (p - o).exp() * a


def opd(p, o, q, a, w, h):
    return -w * (p - o).exp() * (a + 0.5 * (q - o))


# {name: (keys of PolicyConfig, formula, divisor(tokens, answers), mean of answers, count logged)}
ROWS = {
    "grpo": (dict(kl_coef=0.1), grpo, lambda tokens, answers: answers, True),
    "dr_grpo": (
        dict(constant=16, off_policy_max=0.1), dr_grpo, lambda tokens, answers: 16 * answers, False
    ),
    "dapo": (dict(clip_high=0.28, temperature=0.7), dapo, lambda tokens, answers: tokens, False),
    "importance_sampling": (dict(), importance_sampling, lambda tokens, answers: 1, False),
    "opd": (dict(teacher_coef=0.5), opd, lambda tokens, answers: tokens, False),
}  # fmt: skip
USUAL = {
    "one": (1, {}),
    "torch": (1, dict(backend="torch")),
    "tp2": (2, TP2_SP),
    "pp2": (2, PP2),
    "cp2_packed": (2, {**CP2, **PACKED}),
    "dp2": (2, DIST_OPT),
}
MORE = {
    "packed": (1, PACKED),
    "cp2": (2, CP2),
    "dp2_overlap": (2, OVERLAP),
    "torch_packed_dp2": (2, dict(backend="torch", **PACKED)),
    "pp2_vpp2": (2, {**PP2, **VPP2}),
    "tp2pp2_packed": (4, {**TP2_SP, **PP2, **PACKED}),
}


def make_oracle(path: str) -> tuple[list[dict], dict]:
    """(samples, {row: lines of its steps})"""
    from mca_lite.model import load_torch_model

    with torch.no_grad():
        samples = samples_of(load_torch_model(path))
    lines = {}
    for name, (config, formula, divisor, is_mean) in ROWS.items():
        more = dict(is_mean=is_mean, temperature=config.get("temperature", 1.0))
        lines[name] = oracle_run(load_torch_model(path), samples, formula, divisor, **more)
        for line in lines[name]:
            line["loss"] = line.pop("total") / line.pop("counts")[name in ("grpo", "dr_grpo")]
    return samples, lines


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    path = tiny.save_model(tmp_path_factory.mktemp("policy") / "model", "qwen3")
    [(samples, lines)] = world.run(make_oracle, 1, path)
    return path, samples, lines


def runs_of(path: str, out: str, samples: list[dict], keys: dict) -> dict:
    return {
        name: policy_run(path, f"{out}/{name}", samples, dict(name=name, **config), **keys)
        for name, (config, *_) in ROWS.items()
    }


def wrong_of(found: dict, wanted: dict) -> list[str]:
    return [
        f"{row}, step {step}, {name}: {line[name]} instead of {right[name]}"
        for row, lines in found.items()
        for step, (line, right) in enumerate(zip(lines, wanted[row], strict=True))
        for name in METRICS
        if abs(line[name] - right[name]) > 1e-5 * max(1, abs(right[name]))
        # clipped ratios of other temperatures and bounds are those of other numbers
        if not (row == "dapo" and name == "clipped")
    ]


@pytest.mark.parametrize(
    "layout", [*USUAL, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]
)
def test_steps_are_those_of_formulas_on_whole_logits(oracle, tmp_path, layout):
    path, samples, wanted = oracle
    ranks, keys = (USUAL | MORE)[layout]
    [found, *_] = world.run(runs_of, ranks, path, str(tmp_path), samples, keys, timeout_s=120)
    assert not wrong_of(found, wanted)


@pytest.mark.full
@pytest.mark.parametrize("keys", [EP2, {**CP2, **EP2}, {**EP2, **PACKED}])
def test_steps_of_experts_are_those_of_formulas(tmp_path, keys):
    path = tiny_moe.save_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)
    [(samples, wanted)] = world.run(make_oracle, 1, path)
    [found, *_] = world.run(runs_of, 2, path, str(tmp_path), samples, keys, timeout_s=120)
    assert not wrong_of(found, wanted)
