"""A sampler's experts replayed in a Session, in every layout: beside transformers' model with these
experts in its routers, and without a change of a bit where they are the model's own.
"""

import base64
import functools
import re

import pytest
import torch

from mca_lite import TrainerCallback
from tests.shared import policy_tools, session_tools, tiny, tiny_moe, world
from tests.shared.layouts import CP2, DIST_OPT, EP2, PP2, TP2_SP, VPP2
from tests.shared.session_tools import PACKED, log_probs_of

RECOMPUTED = dict(recompute_granularity="full", recompute_num_layers=1)
LAYOUTS = {
    "packed, recomputed": (1, {**RECOMPUTED, **PACKED}),
    "tp2, packed": (2, {**TP2_SP, **PACKED}),
    "pp2, recomputed": (2, {**PP2, **RECOMPUTED}),
    "ep2": (2, {**EP2, **DIST_OPT}),
    "cp2, packed, recomputed": (2, {**CP2, **PACKED, **RECOMPUTED}),
    "one": (1, {}),
    "gathered": (1, dict(moe_token_dispatcher_type="allgather")),
    "tp2": (2, TP2_SP),
    "pp2, vpp2": (2, {**PP2, **VPP2, "gradient_accumulation_steps": 2}),
    "cp2": (2, CP2),
}
USUAL = [*LAYOUTS][:5]
OTHERS = [*LAYOUTS][5:]
LAYERS, K = 3, 2  # of the model: its first of four layers is dense


def documents() -> list[dict]:
    return [{name: list(one[name]) for name in ("input_ids", "labels")} for one in tiny.samples(7)]


def random_routes(samples: list[dict]) -> list[torch.Tensor]:
    """Random experts of each token; every fifth token chooses its own in the first layer."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for sample in samples:
        scores = torch.rand(len(sample["labels"]), LAYERS, tiny_moe.EXPERTS, generator=generator)
        routes = scores.topk(K).indices.to(torch.int16)
        routes[::5, 0] = -1
        found.append(routes)
    found[2][:] = -1
    return found


def with_routes(samples: list[dict], routes: list) -> list[dict]:
    return [dict(a, routes=b) for a, b in zip(samples, routes, strict=True)]


def oracle_of(path: str) -> tuple:
    """(log-probabilities of each document, {name in a file: gradient}) of transformers' model with
    random_routes in its routers."""
    from mca_lite.model import load_torch_model
    from mca_lite.weights_files import file_tensors

    model = load_torch_model(path)
    samples = documents()
    replaying(model, samples, random_routes(samples))
    logps = [log_probs_of(model, sample)[0] for sample in samples]
    count = sum(label != -100 for sample in samples for label in sample["labels"])
    (-torch.cat(logps).sum() / count).backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    gradients = {name: view.clone() for name, _, view in file_tensors(model)}
    return [x.detach() for x in logps], gradients


def replaying(model, samples: list[dict], routes: list) -> None:
    """Make a transformers model use these experts for the tokens of these samples."""
    pairs = zip(samples, routes, strict=True)
    routes_of = {tuple(map(int, sample["input_ids"])): of_sample for sample, of_sample in pairs}
    given = {}

    def choose(module, inputs, keywords):
        ids = inputs[0] if inputs else keywords["input_ids"]
        given["routes"] = routes_of[tuple(ids[0].tolist())]

    model.register_forward_pre_hook(choose, with_kwargs=True)

    def replay(index, module, inputs, output):
        logits, weights, experts = output
        routes = given["routes"][:, index].long()
        experts = torch.where(routes >= 0, routes, experts)
        return logits, logits.float().softmax(-1).gather(1, experts), experts

    for name, module in model.named_modules():
        if type(module).__name__.endswith("TopKRouter"):
            index = int(re.search(r"layers\.(\d+)", name)[1]) - 1
            module.register_forward_hook(lambda *args, index=index: replay(index, *args))


def loads_of(samples: list[dict], routes: list) -> torch.Tensor:
    """Choices of each expert in each layer, without those that routers made here."""
    counts = torch.zeros(LAYERS, tiny_moe.EXPERTS)
    for one in routes:
        for layer in range(LAYERS):
            ids = one[:, layer].flatten().long()
            counts[layer] += torch.bincount(ids[ids >= 0], minlength=tiny_moe.EXPERTS)
    return counts


def wrong_of(folder: str, keys: dict) -> dict:
    """{what: error} of a layout."""
    logps, gradients = torch.load(f"{folder}/oracle.pt", weights_only=False)
    samples = documents()
    keys = dict(keys, moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="aux_loss")
    session = session_tools.new_session(folder, **keys)
    found = {}
    seen = []
    session.forward_backward(samples, "cross_entropy")  # makes the optimizer
    session.discard()
    own = session.routes(samples)
    for given in samples, with_routes(samples, own):
        session.backend.router_statistics()
        session.forward_backward(given, "cross_entropy")
        load = session.backend.router_statistics()
        norm = session.optim_step(**session_tools.STILL).grad_norm
        seen.append((norm, load, torch.cat(session.log_probs(given)).tolist()))
    found["own routes"] = float(seen[0] != seen[1])
    assert all(
        routes.shape == (len(s["labels"]), LAYERS, K)
        for routes, s in zip(own, samples, strict=True)
    )

    keys["moe_aux_loss_coeff"] = 0.0
    session = session_tools.new_session(folder, **keys)
    routes = random_routes(samples)
    others = with_routes(samples, routes)
    others[2].pop("routes")  # as -1 everywhere
    ours = session.log_probs(others)
    found["log_probs"] = max(float((a - b).abs().max()) for a, b in zip(ours, logps, strict=True))
    for part in others[:4], others[4:]:
        session.forward_backward(part, "cross_entropy")
    load = session.backend.router_statistics()["expert_load"]
    session.optim_step(**session_tools.STILL)
    ours = session_tools.gradients_of(session)
    found["gradients"] = session_tools.largest_error(ours, gradients)
    routes = session.routes(samples[:3])  # the hooks are gone: the same as before
    found["afterwards"] = float(
        any(not torch.equal(a, b) for a, b in zip(routes, own[:3], strict=True))
    )
    counts = loads_of(samples, random_routes(samples))[1:]  # layers where all but one are given
    mine = session.routes([samples[2]])[0][:, 1:]
    for layer in range(LAYERS - 1):
        counts[layer] += torch.bincount(mine[:, layer].flatten().long(), minlength=4)
    wanted = counts / counts.mean(-1, keepdim=True)
    found["loads"] = float((torch.tensor(load)[1:] - wanted).abs().max()) * 1e-3
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("routes")
    path = tiny_moe.save_model(out / "model", "qwen3_moe_dense_layers")
    torch.save(oracle_of(path), out / "oracle.pt")
    torch.save(oracle_of_stage(path), out / "stage.pt")
    return str(out)


@pytest.mark.parametrize(
    "layout", [*USUAL, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
)
def test_replayed_experts_are_those_of_transformers_and_own_ones_change_nothing(folder, layout):
    ranks, keys = LAYOUTS[layout]
    for errors in world.run(wrong_of, ranks, folder, keys):
        assert not {what: error for what, error in errors.items() if not error <= 1e-5}


# -- stage policy

OF_STAGE = {
    "ep2": (2, {**EP2, **DIST_OPT}),
    "pp2": (2, PP2),
    "packed, recomputed": (1, {**PACKED, **RECOMPUTED}),
    "tp2": (2, TP2_SP),
    "cp2, packed": (2, {**CP2, **PACKED}),
    "pp2, vpp2": (2, {**PP2, **VPP2}),
}


def oracle_of_stage(path: str) -> tuple:
    """(samples, lines of the steps of transformers' model with random_routes in its routers)."""
    from mca_lite.model import load_torch_model

    with torch.no_grad():
        samples = policy_tools.samples_of(load_torch_model(path))[:8]  # two steps
    model = load_torch_model(path)
    replaying(model, samples, random_routes(samples))

    def ppo(p, o, q, a, w, h):
        r = (p - o).exp()
        return -w * torch.minimum(r * a, r.clamp(0.8, 1.2) * a)

    return samples, policy_tools.oracle_run(model, samples, ppo, lambda tokens, answers: tokens)


def runs_of_stage(folder: str, out: str, samples: list, keys: dict) -> list:
    """Numbers of steps with random experts; numbers of steps of rate 0, and predictions, without
    routes and with the model's own."""
    path = f"{folder}/model"
    run = functools.partial(policy_tools.policy_run, path, config=dict(name="ppo"), steps=2, **keys)
    lines = run(f"{out}/random", samples=with_routes(samples, random_routes(samples)))
    session = session_tools.new_session(folder, **{**keys, "global_batch_size": 4})
    own = session.routes([{k: one[k] for k in ("input_ids", "labels")} for one in samples])
    found = [lines]
    for name, given in {"none": samples, "own": with_routes(samples, own)}.items():
        after = Predictions(given)
        more = dict(learning_rate=0.0, moe_router_load_balancing_type="aux_loss", callbacks=[after])
        numbers = run(f"{out}/{name}", samples=given, moe_aux_loss_coeff=0.1, **more)
        found.append((numbers, after.found))
    return found


class Predictions(TrainerCallback):
    """Predictions and metrics of an evaluation after training."""

    def __init__(self, samples: list):
        self.samples = samples
        self.found: list = []

    def on_train_end(self, args, state, control, trainer=None, **kwargs):
        predictions, _, metrics = trainer.predict(self.samples)
        self.found = [predictions.tolist(), metrics, trainer.evaluate(self.samples)]


@pytest.mark.parametrize(
    "layout",
    [*OF_STAGE][:3] + [pytest.param(name, marks=pytest.mark.full) for name in [*OF_STAGE][3:]],
)
def test_stage_policy_replays_routes_and_own_ones_change_no_bit(folder, tmp_path, layout):
    ranks, keys = OF_STAGE[layout]
    samples, wanted = torch.load(f"{folder}/stage.pt", weights_only=False)
    [(lines, without, own), *_] = world.run(
        runs_of_stage, ranks, folder, str(tmp_path), samples, keys, timeout_s=120
    )
    assert without == own and len(without[0]) == 2
    for line, right in zip(lines, wanted, strict=True):
        right = right | dict(loss=right["total"] / right["counts"][False])
        wrong = {name: (line[name], right[name]) for name in policy_tools.METRICS if name in line}
        assert not {k: pair for k, pair in wrong.items() if pair[0] != pytest.approx(pair[1], 1e-5)}


ALONE = dict(per_device_train_batch_size=1)


def runs_of_some(folder: str, out: str, samples: list) -> list:
    """Numbers of a step: the first sample without routes, and with the model's own."""
    given = with_routes(samples, random_routes(samples))
    session = session_tools.new_session(folder, global_batch_size=4)
    [own] = session.routes([{k: samples[0][k] for k in ("input_ids", "labels")}])
    run = functools.partial(policy_tools.policy_run, f"{folder}/model", config=dict(name="ppo"))
    firsts = samples[0], dict(samples[0], routes=own), given[0]
    return [
        run(f"{out}/{n}", samples=[x, *given[1:]], steps=1, **ALONE) for n, x in enumerate(firsts)
    ]


def test_samples_of_a_data_set_without_routes_stand_before_those_with(folder, tmp_path):
    samples, _ = torch.load(f"{folder}/stage.pt", weights_only=False)
    [[without, own, other]] = world.run(runs_of_some, 1, folder, str(tmp_path), samples)
    assert without == own != other


def same_bits(folder: str) -> list:
    """Log-probabilities and gradient norms without routes and with the model's own."""
    keys = dict(moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="aux_loss")
    session = session_tools.new_session(folder, **keys)
    samples = documents()
    found = []
    for given in samples, with_routes(samples, session.routes(samples)):
        session.forward_backward(given, "cross_entropy")
        norm = session.optim_step(**session_tools.STILL).grad_norm
        found.append((norm, torch.cat(session.log_probs(given)).tolist()))
    return found


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v2", "gpt_oss"])
def test_own_routes_change_no_bit_with_groups_and_a_bias(tmp_path, family):
    tiny_moe.save_model(tmp_path / "model", family)
    [[without, with_own]] = world.run(same_bits, 1, str(tmp_path))
    assert without == with_own


def refusals(folder: str, dense: str) -> dict:
    session = session_tools.new_session(folder)
    [sample, *_] = documents()
    n = len(sample["labels"])
    good = torch.tensor([0, 1]).expand(n, LAYERS, K)

    def with_values(values, call=session.log_probs):
        return session_tools.refusal(call, [sample, dict(sample, routes=values)])

    changed = good.clone()
    changed[1, 1, 0] = -1
    plain = session_tools.new_session(dense)
    torchs = session_tools.new_session(folder, backend="torch")
    return {
        "shape": with_values(good[1:]),
        "numbers": with_values(good + 0.5),
        "dims": with_values(good[:, 0]),
        "layers": with_values(good[:, :2]),
        "expert": with_values(good + 3),
        "half": with_values(changed),
        "twice": with_values(torch.ones_like(good)),
        "dense": with_values(good, plain.log_probs),
        "recorded": session_tools.refusal(plain.routes, [sample]),
        "torch": with_values(good, torchs.log_probs),
    }


def test_wrong_routes_are_refused_in_words(folder, tmp_path):
    tiny.save_model(tmp_path / "model", "qwen3")
    [found] = world.run(refusals, 1, folder, str(tmp_path))
    words = {
        "shape": "sample 1 of the call: routes of a sample: expected int16 [",
        "numbers": "got torch.float32 of shape [",
        "dims": "sample 1 of the call: routes of a sample: expected int16 [",
        "layers": "expected integers [tokens, 3 layers with experts, 2 experts per token]",
        "expert": "routes from 3 to 4: expected experts 0 to 3, or -1",
        "half": "-1 for some experts of a token in a layer",
        "twice": "an expert twice for a token in a layer",
        "dense": "routes: qwen3 has no experts: remove the column",
        "recorded": "routes: qwen3 has no experts",
        "torch": "routes on plain torch: set use_mca: true",
    }
    assert found.keys() == words.keys()
    assert not {name: found[name] for name in words if words[name] not in found[name]}


def test_routes_are_read_from_base64_with_a_shape():
    from mca_lite.part_policy_data import read_routes

    data = base64.b64encode(bytes([1, 0, 255, 255, 0, 1, 2, 0])).decode()
    wanted = [[[1, -1]], [[256, 2]]]
    assert read_routes({"data": data, "shape": [2, 1, 2]}).tolist() == wanted
    assert read_routes(wanted).tolist() == wanted
    for wrong in (
        data,
        [[1, 2]],
        [[[1.5]]],
        [[[70_000]]],
        {"data": data},
        {"data": data, "shape": [3, 1, 2]},
        {"data": "?", "shape": []},
    ):
        with pytest.raises(ValueError, match="routes: expected"):
            read_routes(wrong)


def weights_after_a_trainer(folder: str) -> tuple[int, int]:
    """(weights of router losses by micro-batch after a Session's call, after a trainer's steps)."""
    from mca_lite import McaTrainer

    session = session_tools.new_session(folder, moe_aux_loss_coeff=0.1, max_steps=1)
    session.forward_backward(documents(), "cross_entropy")
    session.optim_step(**session_tools.STILL)
    weights = session.backend.statistics_of_routers.weights
    before = len(weights)
    session.args.output_dir = f"{folder}/out"
    given = dict(train_dataset=documents(), backend=session.backend)
    McaTrainer(session.model, session.args, **given).train()
    return before, len(weights)


def test_a_trainer_forgets_the_weights_of_router_losses_of_a_session(tmp_path):
    tiny_moe.save_model(tmp_path / "model", "qwen3_moe")
    [(before, after)] = world.run(weights_after_a_trainer, 1, str(tmp_path))
    assert before and not after
