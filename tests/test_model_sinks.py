"""Attention sinks: each path of attention against a softmax of plain torch with one more score, and
whole runs in what only some layouts compute.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.utils.flop_counter  # before its operators have stand-ins

from mca_lite.batch import packed_row
from mca_lite.families import values_of
from mca_lite.model_attention import CoreAttention
from mca_lite.part_sinks import FlashWithSinks
from tests.shared import tiny_moe, world
from tests.shared.cells import train_all
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.layouts import EP2, ETP1, LOOP, OVERLAP, TP2_SP
from tests.shared.training import BRIEF, assert_same_curve

HEADS, GROUPS, SIZE, SCALE = 4, 2, 8, 0.4


def core_attention(window=None, cap=None):
    """Core attention of 4 heads with sinks and 2 query groups of 8 channels."""
    config = SimpleNamespace(
        layer_type=lambda number: "sliding_attention",
        sliding_window=window,
        attn_logit_softcapping=cap,
        attention_sinks=True,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        softmax_scale=SCALE,
        recompute_granularity=None,
        rows_are_packed=False,
        params_dtype=torch.float32,
    )
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    core = CoreAttention(config, 1, SimpleNamespace(cp=alone, tp=alone))
    with torch.no_grad():
        core.sinks.copy_(torch.tensor([-1.0, 0.0, 1.0, 3.0]))
    return core


def drawn(tokens: int, rows: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, rows, n, SIZE) for n in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]


def plain(query, key, value, sinks, borders, window=None, cap=None):
    """[s, b, n * d]: each query of each document by itself, one more exponential in its sum."""
    out = torch.zeros(*query.shape, dtype=query.dtype)
    for start, stop in pairwise(borders):
        for t in range(start, stop):
            first = max(start, t + 1 - window) if window else start
            for head in range(HEADS):
                group = head * GROUPS // HEADS
                scores = SCALE * (key[first : t + 1, :, group] * query[t, :, head]).sum(-1)
                if cap is not None:
                    scores = cap * torch.tanh(scores / cap)
                weights = scores.exp()
                total = weights.sum(0) + sinks[head].exp()
                values = value[first : t + 1, :, group]
                out[t, :, head] = (weights[..., None] * values).sum(0) / total[:, None]
    return out.flatten(2)


def assert_same(got, wanted, core, inputs):
    """Outputs, and gradients of queries, keys, values and sinks."""
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    of = [*inputs, core.sinks]
    ours = torch.autograd.grad(got, of, grad)
    for a, b in zip(ours, torch.autograd.grad(wanted, of, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        assert b.abs().max() > 1e-2


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 3])
def test_rows_with_sinks_equal_plain_torch(window, cap):
    core = core_attention(window, cap)
    inputs = drawn(7, rows=2)
    wanted = plain(*inputs, core.sinks, (0, 7), window, cap)
    assert_same(core(*inputs), wanted, core, inputs)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("borders", [(0, 5, 7, 12), (0, 4, 8, 12)], ids=["unequal", "equal"])
def test_packed_rows_with_sinks_equal_plain_torch(borders, window):
    core = core_attention(window)
    inputs = drawn(12)
    row = packed_row(borders, 1, 0, torch.device("cpu"))
    wanted = plain(*inputs, core.sinks, borders, window)
    assert_same(core(*inputs, packed_seq_params=row), wanted, core, inputs)


# -- the path of a GPU, with stand-ins for torch's flash kernels that have their formulas


def scores_of(q, k, cu_q, cu_k, scale, left):
    """[n, T, T], -inf where a query does not see a key."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = scale * torch.einsum("tnd,snd->nts", q, k)
    seen = torch.zeros(scores.shape[1:], dtype=torch.bool)
    of_documents = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    for (q0, q1), (k0, k1) in of_documents:
        visible = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - q1 + q0)
        if left >= 0:
            visible = visible.triu(k1 - k0 - q1 + q0 - left)
        seen[q0:q1, k0:k1] = visible
    return scores.masked_fill(~seen, float("-inf"))


def flash_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, scale, **window
):  # as aten::_flash_attention_forward of packed rows
    left, right = window["window_size_left"], window["window_size_right"]
    assert right == 0 and dropout == 0.0 and is_causal == (left == -1)
    scores = scores_of(q, k, cu_q, cu_k, scale, left)
    lse = scores.logsumexp(-1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    out = torch.einsum("nts,snd->tnd", (scores - lse[..., None]).exp(), v)
    return out, lse, torch.zeros(2), torch.zeros(0), torch.zeros(0)


def flash_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, state, unused, scale,
    **window,
):  # fmt: skip
    """FlashAttention-2's backward pass: the probabilities again by lse, and dS = P (dP - D) with
    D the sums of dO O.
    """
    groups = v.shape[1]
    scores = scores_of(q, k, cu_q, cu_k, scale, window["window_size_left"])
    p = (scores - lse[..., None]).exp()
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // groups, 1) for x in (k, v))
    d_p = torch.einsum("tnd,snd->nts", grad, wide_v)
    d_s = scale * p * (d_p - (grad * out).sum(-1).t()[..., None])
    d_q = torch.einsum("nts,snd->tnd", d_s, wide_k)
    d_k = torch.einsum("nts,tnd->snd", d_s, q).unflatten(1, (groups, -1)).sum(2)
    d_v = torch.einsum("nts,tnd->snd", p, grad).unflatten(1, (groups, -1)).sum(2)
    return d_q, d_k, d_v


@pytest.mark.parametrize("window", [None, 3])
def test_the_kernels_of_a_gpu_get_what_gives_the_gradients_with_sinks(window, monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    core = core_attention()
    inputs = drawn(12)
    wanted = plain(*inputs, core.sinks, (0, 5, 7, 12), window)
    cu = torch.tensor([0, 5, 7, 12], dtype=torch.int32)
    rows = cu, cu, 5, 5, SCALE, window
    got = FlashWithSinks.apply(*(x[:, 0] for x in inputs), core.sinks, *rows)
    assert_same(got.flatten(1)[:, None], wanted, core, inputs)


# -- whole runs of what the table of families has not

RUNS = {
    "recompute": dict(recompute_granularity="selective", recompute_modules=["core_attn", "moe"]),
    "loop": LOOP,
    "overlap": OVERLAP,
}


def test_a_config_of_older_transformers_has_the_limit_of_the_activation():
    config = tiny_moe.hf_config("gpt_oss")
    del config.swiglu_limit
    assert values_of(config)["activation_func_clamp_value"] == 7.0
    config.swiglu_limit = 5.0
    assert values_of(config)["activation_func_clamp_value"] == 5.0


def test_runs_of_gpt_oss_train_as_torch(tmp_path):
    path = tiny_moe.save_model(tmp_path / "model", "gpt_oss", num_hidden_layers=2)
    runs = {"torch": ((path,), {})}
    [curves] = world.run(train_all, 1, runs, str(tmp_path), backend="torch", **BRIEF)
    runs = {name: ((path,), keys) for name, keys in RUNS.items()}
    keys = {**BRIEF, **EP2, **TP2_SP, **ETP1}
    for got in world.run(train_all, 2, runs, str(tmp_path), **keys):
        for name in RUNS:
            assert_same_curve(got[name], curves["torch"])
            assert_same_tensors(tensors(tmp_path / name), tensors(tmp_path / "torch"))
