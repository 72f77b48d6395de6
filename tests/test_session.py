"""A Session: gradients of any number of calls before an update, and log-probabilities, beside
formulas on whole logits in plain transformers, in every layout.
"""

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.shared import session_tools, tiny, world
from tests.shared.session_tools import LAYOUTS, MORE_LAYOUTS, log_probs_of

TOKENS = 28  # with a label, of all samples


def weighted_sum(samples, logps):
    """A loss that couples all samples: no sum over them."""
    means = torch.stack([values.sum() for values in logps])
    return torch.logsumexp(means / 10, 0), {"largest": float(means.detach().max())}


def cross_entropy(model, samples, temperature=1.0, weighted=False):
    total = 0.0
    for sample in samples:
        logps, _ = log_probs_of(model, sample, temperature)
        weights = torch.tensor(sample["sampler_weight"]) if weighted else 1.0
        total = total - (logps * weights).sum()
    return total


def mean_cross_entropy(model, samples, **keys):
    return cross_entropy(model, samples, **keys) / TOKENS


def custom(model, samples):
    return weighted_sum(samples, [log_probs_of(model, sample)[0] for sample in samples])[0]


def given(numbers=None, **more):
    return dict(loss="cross_entropy", columns=(), numbers=numbers or {}, denominator=TOKENS, **more)


CALLS = {
    "cross_entropy": given(),
    "weighted": {**given(), "columns": ("sampler_weight",)},
    "temperature": given(dict(temperature=0.7)),
    "sum": {**given(step=dict(denominator=4.0)), "denominator": 4.0},
    "custom": dict(function=weighted_sum, denominator=1.0, cuts=(8,)),
}
ORACLES = {
    "cross_entropy": mean_cross_entropy,
    "weighted": functools.partial(mean_cross_entropy, weighted=True),
    "temperature": functools.partial(mean_cross_entropy, temperature=0.7),
    "sum": lambda model, samples: cross_entropy(model, samples) / 4,
    "custom": custom,
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return session_tools.make_oracle(tmp_path_factory.mktemp("session"), ORACLES)


# test_policy.py has the others
USUAL = ("torch", "overlap")
OTHERS = [name for name in (*LAYOUTS, *MORE_LAYOUTS) if name not in USUAL]


@pytest.mark.parametrize(
    "layout", [*USUAL, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
)
def test_gradients_of_one_call_and_of_two_are_those_of_whole_logits(oracle, layout):
    assert not session_tools.wrong_of(oracle, CALLS, layout)


def refusals(folder: str) -> dict:
    session = session_tools.new_session(folder)
    good = dict(input_ids=[1, 2, 3], labels=[-100, 3, 4])
    nan = float("nan")

    def add(loss="cross_entropy", numbers=None, last=False, **changes):
        return session_tools.refusal(
            session.forward_backward, [good, good | changes], loss, last, **numbers or {}
        )

    found = {
        "loss": add("entropy"),
        "number": add(numbers={"clip": 0.2}),
        "column": add(advantages=1.0),
        "unread": add(advantage=1.0),
        "some": add(sampler_weight=[1.0, 1.0, 1.0]),
        "lengths": add(labels=[-100, 3]),
        "column's length": add(sampler_weight=[1.0, 1.0]),
        "NaN": add(sampler_weight=[nan, 1.0, nan]),
        "vocabulary": add(input_ids=[1, 2, 61]),
        "label": add(labels=[-100, 3, 61]),
        "shift": add(labels=[1, 2, 3]),
        "none": session_tools.refusal(session.log_probs, []),
        "base": session_tools.refusal(session.log_probs, [good], base=True),
        "function": session_tools.refusal(
            session.forward_backward_custom, [good], lambda samples, logps: (1.0, {})
        ),
        "update": session_tools.refusal(session.optim_step),
    }
    session.forward_backward([good], "cross_entropy")
    found["denominator"] = session_tools.refusal(session.optim_step, denominator=0.0)
    found["betas"] = session_tools.refusal(session.optim_step, betas=(0.9, 1.0))
    endless = dict(lr=math.inf, max_grad_norm=math.inf)
    found["lr"] = session_tools.refusal(session.optim_step, **endless)
    found["a text"] = session_tools.refusal(session.optim_step, lr="1e-4")
    found["numpy"] = session_tools.refusal(session.optim_step, lr=np.float32(-1))
    session.forward_backward_custom([good], weighted_sum, last=True)
    found["after the last"] = add()
    found["denominators"] = session_tools.refusal(session.optim_step)
    session.discard()
    found["discarded"] = session_tools.refusal(session.optim_step)
    return found


def test_wrong_calls_are_refused_in_words(oracle):
    [found] = world.run(refusals, 1, oracle)
    words = {
        "loss": "loss 'entropy': expected one of cross_entropy",
        "number": "cross_entropy has no clip: expected temperature",
        "column": "sample 1 of the call: a sample has 'advantages'",
        "unread": "sample 1 of the call: advantage has no effect on the loss cross_entropy",
        "some": "sampler_weight: samples [0] of the call have none",
        "lengths": "labels of a sample: expected int64 [3]",
        "column's length": "sampler_weight of a sample: expected float32 [3]",
        "NaN": "sampler_weight is [nan] at position [2], which has a label",
        "vocabulary": "input_ids from 1 to 61: expected 0 to 60",
        "label": "labels from 3 to 61: expected 0 to 60",
        "shift": "Expected labels[t] to be the target of position t",
        "none": "the call has no samples",
        "base": "call log_probs() before the first update",
        "function": "expected a tensor of one number",
        "update": "call forward_backward first",
        "denominator": "expected a number above 0, got 0.0",
        "betas": "betas: expected two numbers from 0 to below 1, got (0.9, 1.0)",
        "lr": "lr: expected a number of 0 or more, got inf",
        "a text": "lr: expected a number of 0 or more, got '1e-4'",
        "numpy": "lr: expected a number of 0 or more, got np.float32(-1.0)",
        "after the last": "forward_backward after last=True",
        "denominators": "one update has one denominator",
        "discarded": "call forward_backward first",
    }
    assert found.keys() == words.keys()
    wrong = {name: found[name] for name in words if words[name] not in found[name]}
    assert not wrong


def with_other_samples(folder: str) -> str:
    session = session_tools.new_session(folder)
    sample = dict(input_ids=[1, 2 + torch.distributed.get_rank()], labels=[-100, 4])
    return session_tools.refusal(session.log_probs, [sample])


def test_ranks_with_different_samples_are_refused(oracle):
    for words in world.run(with_other_samples, 2, oracle):
        assert "the ranks were given different samples" in words


def with_a_wrong_share(folder: str) -> tuple:
    """(words on a rank where the other's sample is wrong, and where their losses differ)."""
    rank = torch.distributed.get_rank()
    session = session_tools.new_session(folder)
    sample = dict(input_ids=[1, 2 + 90 * rank], labels=[-100, 4])
    refusal = session_tools.refusal
    wrong = refusal(session.log_probs, [sample], own=True)
    good = dict(input_ids=[1, 2 + rank], labels=[-100, 4])
    other = refusal(session.log_probs, [good], temperature=1.0 + rank, own=True)
    session.forward_backward([good], "cross_entropy", own=True)
    return wrong, other, refusal(session.optim_step, denominator=1 + rank)


def test_a_wrong_share_of_one_rank_is_refused_on_all(oracle):
    for wrong, other, divisor in world.run(with_a_wrong_share, 2, oracle):
        assert "(rank 1: sample 0 of the call: input_ids from 1 to 92: expected 0 to 60" in wrong
        assert "the ranks were given different samples, or another loss" in other
        assert "another rank was given other arguments" in divisor


def rows_of_calls(folder: str) -> list:
    """[borders of a packed row] without cutoff_len, and with one; words for a longer sample."""
    samples = [dict(input_ids=[1] * n, labels=[2] * n) for n in (7, 9, 3, 11, 5)]
    session = session_tools.new_session(folder, sequence_packing=True)
    run = session.backend.forward
    rows = []

    def recorded(step, batches, *more, **given):
        rows.append([batch["cu_seqlens"] for batch in batches])
        return run(step, batches, *more, **given)

    session.backend.forward = recorded
    lengths = []
    for cutoff_len in None, 12:
        session.cutoff_len = cutoff_len
        lengths.append([len(x) for x in session.log_probs(samples)])
    session.cutoff_len = 10
    return [rows, lengths, session_tools.refusal(session.log_probs, samples)]


def test_packing_fills_rows_of_cutoff_len_by_best_fit(oracle):
    [(rows, lengths, words)] = world.run(rows_of_calls, 1, oracle)
    assert lengths == 2 * [[7, 9, 3, 11, 5]]  # in the order given
    # two samples a micro-batch; then two rows of 9 + 3 and 7 + 5, and one of 11
    assert rows == [[(0, 11, 20), (0, 7, 12), (0, 3)], [(0, 9, 12, 19, 24), (0, 11)]]
    assert "sample 3 of 11 tokens does not fit into a pack of 10: raise cutoff_len" in words


def last_calls(folder: str, keys: dict) -> tuple:
    """(norm of an update by two calls, the same with last=True, of one after a discarded last one,
    of one after a failed call, metrics of a forward pass, of a training pass)."""
    samples = [{name: one[name] for name in ("input_ids", "labels")} for one in tiny.samples(7)]
    session = session_tools.new_session(folder, **keys)
    norms = []
    for last in False, True, True:
        session.forward_backward(samples[:3], "cross_entropy")
        found = session.forward_backward(samples[3:], "cross_entropy", last=last)
        norms.append(session.optim_step(**session_tools.STILL).grad_norm)
    session.forward_backward(samples, "cross_entropy", last=True)
    session.discard()
    session.forward_backward(samples, "cross_entropy", last=True)
    norms.append(session.optim_step(**session_tools.STILL).grad_norm)
    fails = iter((None, RuntimeError))  # in the second micro-batch

    def fail(*_):
        if error := next(fails):
            raise error

    session.forward_backward(samples[:3], "cross_entropy")
    with session.backend.chunks[0].register_forward_hook(fail), pytest.raises(RuntimeError):
        session.forward_backward(samples, "cross_entropy")
    refused = session_tools.refusal(session.forward_backward, samples, "cross_entropy")
    assert "after a call that failed" in refused
    assert "without gradients" in session_tools.refusal(session.optim_step)
    session.discard()
    session.forward_backward(samples, "cross_entropy", last=True)
    norms.append(session.optim_step(**session_tools.STILL).grad_norm)
    return norms, session.forward(samples[3:]).sums["loss"], found.sums["loss"]


@pytest.mark.parametrize("layout", ["overlap", "torch_dp2"])
def test_a_last_call_reduces_once(oracle, layout):
    ranks, keys = LAYOUTS[layout]
    for norms, measured, trained in world.run(last_calls, ranks, oracle, keys):
        assert norms == pytest.approx([norms[0]] * 5, rel=1e-6)
        assert measured == pytest.approx(trained, rel=1e-6)


def calls_with_lists(folder: str) -> tuple:
    """Numbers of results for samples that are lists of one document; words for a model with
    dropout in its language model's part of the config."""
    listed = [[{k: one[k] for k in ("input_ids", "labels")}] for one in tiny.samples(7)]
    session = session_tools.new_session(folder, "torch")
    custom = session.forward_backward_custom(listed, weighted_sum)
    counts = [len(custom.logps), len(session.log_probs(listed))]
    session.model.config.text_config = SimpleNamespace(attention_dropout=0.1)
    call = session.forward_backward_custom
    return counts, session_tools.refusal(call, listed, weighted_sum)


def test_samples_may_be_lists_of_one_document(oracle):
    [(counts, words)] = world.run(calls_with_lists, 1, oracle)
    assert counts == [7, 7]
    assert "attention_dropout 0.1: custom compares log-probabilities" in words


def weights_of(folder: str, keys: dict) -> dict:
    """{what: the tensors of weights() on the main rank}, whose metadata agree on every rank."""
    samples = torch.load(f"{folder}/oracle.pt", weights_only=False)["samples"]
    documents = [{name: one[name] for name in ("input_ids", "labels")} for one in samples]
    found = {}
    for adapt in None, session_tools.with_adapters:
        session = session_tools.new_session(folder, adapt=adapt, **keys)
        session.forward_backward(documents, "cross_entropy")
        session.optim_step(lr=1e-2)
        for kind in ("merged", "without", "only") if adapt else ("merged",):
            source = session.weights(kind)
            metadata = [tuple(one) for one in source.metadata()]
            for _ in range(2):
                tensors = dict(source)
                forms = [(name, x.dtype, tuple(x.shape)) for name, x in tensors.items()]
                assert forms == (metadata if torch.distributed.get_rank() == 0 else [])
            name = f"lora {kind}" if adapt else kind
            logps = torch.cat(session.log_probs(documents, base=kind == "without"))
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            found[name] = arrays, logps.numpy()  # tensors would die with this process
    return found


@pytest.mark.parametrize("layout", ["torch", "tp2", "pp2", "overlap"])
def test_weights_loaded_into_transformers_give_the_same_log_probabilities(oracle, layout):
    from mca_lite.model import load_torch_model

    ranks, keys = LAYOUTS[layout]
    found, *_ = world.run(weights_of, ranks, oracle, keys)
    samples = torch.load(f"{oracle}/oracle.pt", weights_only=False)["samples"]
    adapters, _ = found.pop("lora only")
    assert adapters and all("lora_" in name for name in adapters)
    for kind, (arrays, wanted) in found.items():
        model = load_torch_model(f"{oracle}/model")
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        lost = model.load_state_dict(tensors, strict=False)
        assert not lost.unexpected_keys and not {*lost.missing_keys} - {"lm_head.weight"}
        with torch.no_grad():
            logps = torch.cat([log_probs_of(model, sample)[0] for sample in samples])
        assert float((logps - torch.from_numpy(wanted)).abs().max()) < 2e-6, kind


def continued(folder: str, out: str, keys: dict) -> list:
    """[(norm, log-probabilities) after an update of a session, of one that loaded its state before
    the update], for a whole model and for adapters; log-probabilities of one that loaded adapters
    alone."""
    samples = [{name: one[name] for name in ("input_ids", "labels")} for one in tiny.samples(7)]
    found = []
    for adapt in None, session_tools.with_adapters:
        saved = f"{out}/{adapt is None}"
        sessions = [session_tools.new_session(folder, adapt=adapt, **keys) for _ in range(2)]
        first, second = sessions
        first.forward_backward(samples, "cross_entropy")
        first.optim_step(**session_tools.UPDATE)
        first.save(saved)
        second.forward_backward(samples[:2], "cross_entropy")  # load discards it
        second.load(saved)
        pair = []
        for session in sessions:
            session.forward_backward(samples[3:], "cross_entropy")
            norm = session.optim_step(**session_tools.UPDATE).grad_norm
            pair.append((norm, torch.cat(session.log_probs(samples)).tolist()))
        found.append(pair)
    first.save(f"{out}/weights", with_optimizer=False)
    assert "pass with_optimizer=False" in session_tools.refusal(second.load, f"{out}/weights")
    second.forward_backward(samples, "cross_entropy")
    second.optim_step(**session_tools.UPDATE)
    second.load(f"{out}/weights", with_optimizer=False)
    found.append([torch.cat(session.log_probs(samples)).tolist() for session in sessions])
    return found


@pytest.mark.parametrize("layout", ["torch", "dist_opt_packed"])
def test_a_loaded_session_goes_on_bit_for_bit(oracle, tmp_path, layout):
    ranks, keys = LAYOUTS[layout]
    for pairs in world.run(continued, ranks, oracle, str(tmp_path), keys):
        for one, other in pairs:
            assert one == other
