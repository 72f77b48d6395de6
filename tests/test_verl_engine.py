"""The engine for verl of configs/examples, on stand-ins with the members that the base classes of
verl 0.9.1 have: gradients of a loss in verl's form beside the same formula in plain transformers.
"""

import sys
import types
from types import SimpleNamespace

import pytest
import torch

from tests.shared import session_tools, tiny, world
from tests.shared.examples import example
from tests.shared.layouts import CP2, PP2, TP2_SP

LAYOUTS = {"one": (1, {}), "dp2": (2, {}), "tp2": (2, TP2_SP), "pp2": (2, PP2), "cp2": (2, CP2)}
ADVANTAGES = (1.0, -0.5, 0.7, -1.2, 0.3)
CLIP = 0.2


class BaseEngine:
    def to(self, device, model=True, optimizer=True, grad=True):
        assert model or not grad

    def train_batch(self, data, loss_function):
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        grad_norm = self.optimizer_step()
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"]["grad_norm"] = grad_norm
        return outputs


class BaseEngineCtx:
    def __init__(self, engine, mode, **kwargs):
        self.engine, self.mode = engine, mode
        self.zero_grad_on_exit = kwargs.pop("zero_grad_on_exit", True)

    def __enter__(self):
        self.engine.mode = self.mode

    def __exit__(self, *error):
        self.engine.to(device="cpu", model=True, optimizer=True, grad=True)
        self.engine.mode = None


class EngineRegistry:
    engines: dict = {}

    @classmethod
    def register(cls, model_type, backend, device):
        def keep(engine):
            cls.engines[model_type, backend] = engine
            return engine

        return keep


def engine_of(folder: str, layout: dict):
    """An initialised engine of the module as verl finds it."""
    base = types.ModuleType("verl.workers.engine.base")
    for part in (BaseEngine, BaseEngineCtx, EngineRegistry):
        setattr(base, part.__name__, part)
    utils = types.ModuleType("verl.utils.tensordict_utils")
    utils.assign_non_tensor = lambda data, **values: data.update(values)
    for name in ("verl", "verl.utils", "verl.workers", "verl.workers.engine"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules |= {base.__name__: base, utils.__name__: utils}
    example("verl_engine")
    config = dict(layout, dtype="float32", micro_batch_size_per_gpu=2)
    config |= dict(param_offload=False, optimizer_offload=False, strategy="mca_lite")
    optimizer = dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, clip_grad=1.0)
    optimizer |= dict(lr_warmup_steps=0, total_training_steps=10)
    engine = EngineRegistry.engines["language_model", "mca_lite"](
        SimpleNamespace(local_path=f"{folder}/model"),
        SimpleNamespace(**config),
        SimpleNamespace(**optimizer),
        None,
    )
    engine.initialize()
    return engine


def samples() -> list[tuple]:
    """(ids, mask of its answer, log-probabilities of the sampler, advantage) of five samples."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for i, advantage in enumerate(ADVANTAGES):
        ids = torch.randint(1, tiny.VOCAB, (7 + i,), generator=generator)
        mask = torch.zeros(7 + i, dtype=torch.long)
        mask[3:] = 1
        mask[4] = i % 2  # of a tool, in some
        old = -4 + 0.4 * torch.randn(7 + i, generator=generator)
        found.append((ids, mask, old, advantage))
    return found


def ppo_loss(model_output, data, dp_group=None):
    """The clipped loss in verl's form: the mean over the tokens of all replicas, times dp_size."""
    logps = model_output["log_probs"].values()
    mask = data["loss_mask"].values().roll(-1)
    ratios = (logps - data["old"].values()).exp()
    advantages = data["advantages"].values()
    losses = -torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
    total = (losses * mask).sum() / data["batch_num_tokens"] * data["dp_size"]
    if "entropy" in model_output:
        total = total - data["coefficient"] * (model_output["entropy"].values() * mask).mean()
    return total, {"pg_loss": float(total.detach())}


def batch_of(given: list[tuple], **more) -> dict:
    def jagged(rows):
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    ids, masks, old, advantages = zip(*given, strict=True)
    return dict(
        input_ids=jagged(ids),
        loss_mask=jagged(masks),
        old=jagged(old),
        advantages=jagged(torch.full((len(x),), a) for x, a in zip(ids, advantages, strict=True)),
        **more,
    )


def by_formula(path: str) -> tuple:
    """(loss, norm of its gradient, log-probabilities of each sample) in plain transformers."""
    from mca_lite.model import load_torch_model

    model = load_torch_model(path)
    total, count, rows = 0.0, 0, []
    for ids, mask, old, advantage in samples():
        labels = ids[1:].masked_fill(mask[1:] == 0, -100)
        sample = dict(input_ids=ids[:-1].tolist(), labels=labels.tolist())
        logps, _ = session_tools.log_probs_of(model, sample)
        rows.append([*logps.tolist(), 0.0])
        ratios = (logps - old[:-1]).exp()
        clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
        losses = -torch.minimum(ratios * advantage, clipped * advantage)
        total = total + (losses * (mask[1:] != 0)).sum()
        count += int(mask.sum())
    (total / count).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return float(total.detach() / count), float(torch.stack(norms).norm()), rows


def by_engine(folder: str, layout: dict) -> tuple:
    """(outputs of a training batch, log-probabilities of its samples, numbers of its samples, names
    of weights, the rate, words of a refusal)."""
    engine = engine_of(folder, layout)
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    mine = list(range(len(ADVANTAGES)))[rank::size]
    given = [samples()[i] for i in mine]
    with engine.eval_mode():
        asked = batch_of(given, calculate_entropy=True, coefficient=0.0)
        seen = engine.forward_backward_batch(asked, None, forward_only=True)
    with engine.train_mode():
        asked = batch_of(given, calculate_entropy=True, coefficient=0.5)
        words = session_tools.refusal(engine.forward_backward_batch, asked, ppo_loss)
    with engine.train_mode():
        out = engine.train_batch(batch_of(given), ppo_loss)
        rate = engine.lr_scheduler_step()
    rows = []
    if seen:
        rows = [row.tolist() for row in seen["model_output"]["log_probs"].unbind()]
        assert (seen["model_output"]["entropy"].values() >= 0).all()
        out.pop("model_output")
    tensors, peft = engine.get_per_tensor_param()
    names = [name for name, _ in tensors]
    assert peft is None
    return out, rows, mine, names, rate, words


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_verl_has_the_gradient_of_its_loss(tmp_path, layout):
    path = tiny.save_model(tmp_path / "model", "qwen3")
    ranks, keys = LAYOUTS[layout]
    [(loss, norm, wanted)] = world.run(by_formula, 1, path)
    found = world.run(by_engine, ranks, str(tmp_path), keys)
    with_outputs = [one for one in found if one[0]]
    replicas = 2 if layout == "dp2" else 1
    assert len(with_outputs) == replicas
    assert sum(out["loss"][0] for out, *_ in with_outputs) / replicas == pytest.approx(loss, 1e-5)
    for out, rows, mine, _, rate, words in with_outputs:
        assert out["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert out["metrics"]["pg_loss"] == out["loss"]
        assert rate == pytest.approx(1e-2)
        assert "entropy_coeff" in words
        for row, number in zip(rows, mine, strict=True):
            assert row == pytest.approx(wanted[number], abs=1e-5)
    assert "model.norm.weight" in found[0][3] and not any(one[3] for one in found[1:])
