"""Tensors of a Session leave the device between updates and come back with the same bits."""

import pytest
import torch

from tests.shared import session_tools, tiny, world
from tests.shared.layouts import DIST_OPT, OVERLAP, PP2, TP2

KINDS = ("model", "optimizer", "grad")
LAYOUTS = {
    "torch": (1, dict(backend="torch")),
    "torch_dp2": (2, dict(backend="torch")),
    "split masters": (1, dict(bf16=True)),
    "masters": (2, dict(bf16=True, **DIST_OPT)),
    "tp2": (2, TP2),
    "overlap": (2, OVERLAP),
    "8 bits": (1, dict(exp_avg_dtype="8bit", exp_avg_sq_dtype="8bit")),
    "pp2 offloaded": (2, dict(PP2, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)),
}


def whole(model):
    """A model whose weights are in memory of their own, not in that of a mapped file."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def with_whole_adapters(model):
    return session_tools.with_adapters(whole(model))


def tensors_of(session) -> dict[str, list]:
    """The tensors of each kind, read from the model and megatron's optimizers."""
    parameters = list(session.model.parameters())
    states = []
    for part in getattr(session.backend.optimizer, "chained_optimizers", None) or [
        session.backend.optimizer
    ]:
        inner = getattr(part, "optimizer", part)
        moments = [state["exp_avg"] for state in inner.state.values()]
        states += moments + [p for p in inner.param_groups[0]["params"] if part is not inner]
    states = [part for x in states for part in getattr(x, "parts", (x,))]
    weights = {p.untyped_storage().data_ptr() for p in parameters}
    states = [x for x in states if x.untyped_storage().data_ptr() not in weights]
    gradients = [p.main_grad for p in parameters if hasattr(p, "main_grad")]
    return {"model": parameters, "optimizer": states, "grad": gradients}


def sizes_of(session) -> dict[str, int]:
    return {
        kind: sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        for kind, tensors in tensors_of(session).items()
    }


def slept(folder: str, keys: dict) -> list:
    """[(norm, log-probabilities) after an update of a session that left, of one that stayed], for
    a whole model and for adapters."""
    from mca_lite import part_sleep

    samples = [{name: one[name] for name in ("input_ids", "labels")} for one in tiny.samples(7)]
    found = []
    for adapt in whole, with_whole_adapters:
        pair = []
        for leaves in True, False:
            session = session_tools.new_session(folder, adapt=adapt, **keys)
            session.forward_backward(samples, "cross_entropy")
            session.optim_step(**session_tools.UPDATE)
            full = sizes_of(session)
            assert full["model"] and full["optimizer"]
            for kinds in (KINDS, ("optimizer", "grad"), ("model",)) if leaves else ():
                part_sleep.leave(session.backend, kinds)
                part_sleep.leave(session.backend, kinds)  # nothing is left to move
                assert sizes_of(session) == {k: (k not in kinds) * full[k] for k in full}
                if "model" not in kinds:
                    session.log_probs(samples)
                session.to("cpu")  # this rank's device: they come back
                assert sizes_of(session) == full
            session.forward_backward(samples[3:], "cross_entropy")
            norm = session.optim_step(**session_tools.UPDATE).grad_norm
            pair.append((norm, torch.cat(session.log_probs(samples)).tolist()))
        found.append(pair)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_session_that_left_the_device_goes_on_bit_for_bit(folder, layout):
    ranks, keys = LAYOUTS[layout]
    for pairs in world.run(slept, ranks, folder, keys):
        for one, other in pairs:
            assert one == other


def refusals(folder: str) -> dict:
    from mca_lite import part_sleep

    samples = [{name: one[name] for name in ("input_ids", "labels")} for one in tiny.samples(3)]
    session = session_tools.new_session(folder)
    weights = session.weights()
    session.forward_backward(samples, "cross_entropy")
    found = {"pending": session_tools.refusal(session.to, "cpu"), "device": ""}
    session.optim_step()
    found["device"] = session_tools.refusal(session.to, "meta")
    part_sleep.leave(session.backend, ["optimizer"])
    found["training"] = session_tools.refusal(session.forward_backward, samples, "cross_entropy")
    found["save"] = session_tools.refusal(session.save, "nowhere")
    found["load"] = session_tools.refusal(session.load, "nowhere")
    session.to("cpu", optimizer=False)
    part_sleep.leave(session.backend, ["model"])
    found["log_probs"] = session_tools.refusal(session.log_probs, samples)
    assert weights.metadata()
    found["weights"] = session_tools.refusal(list, weights)
    return found


def test_calls_that_need_what_is_away_are_refused_in_words(folder):
    [found] = world.run(refusals, 1, folder)
    words = {
        "pending": "call optim_step or discard first",
        "device": "to('meta'): expected \"cpu\", or the device of this rank",
        "training": "a pass with optimizer in host memory: call to(device) first",
        "save": "save with optimizer",
        "load": "load with optimizer",
        "log_probs": "a pass with model in host memory",
        "weights": "weights with model",
    }
    assert found.keys() == words.keys()
    assert not {name: found[name] for name in words if words[name] not in found[name]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("sleep")
    tiny.save_model(out / "model", "qwen3")
    return str(out)
