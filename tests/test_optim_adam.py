"""Adam with split masters and bf16 moments: its arithmetic against torch's, and what a run and its
checkpoints make of it.
"""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from mca_lite.kernels import AdamW, join, round_by_chance, split_into
from tests.shared import world
from tests.shared.fixtures import saved_model
from tests.shared.layouts import DIST_OPT
from tests.shared.lora_tools import with_drawn_adapters
from tests.shared.training import assert_same_curve, train, whole_and_resumed

BF16 = dict(bf16=True)
BF16_MOMENTS = dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
HYPER = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8)


def draw(*shape, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- masters


def awkward_numbers() -> torch.Tensor:
    """Ties and their neighbours, denormals, the largest and the smallest, all with both signs."""
    tie = torch.tensor(0x3F808000, dtype=torch.int32)  # half of bf16's last bit above 1
    bits = [tie - 1, tie, tie + 1, tie + 0x10000, 1, 0x7FFF, 0x8000, 0x8001, 0x7FFFFF, 0x800000]
    bits += [0, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000]  # the last one is infinity
    numbers = torch.tensor([int(b) for b in bits], dtype=torch.int32).view(torch.float32)
    return torch.cat([numbers, -numbers, draw(1000), draw(1000, seed=1) * 1e-30])


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.empty(master.shape, dtype=torch.bfloat16)
    low = torch.empty(master.shape, dtype=torch.int16)
    split_into(master, weight, low)
    return weight, low


def test_a_weight_and_its_low_bits_are_the_master_bit_for_bit():
    masters = awkward_numbers()
    joined = join(*split(masters))
    assert torch.equal(joined.view(torch.int32), masters.view(torch.int32))


def test_the_weight_is_the_nearest_bf16_and_of_two_the_one_away_from_zero():
    masters = awkward_numbers()
    weight, _ = split(masters)
    is_tie = masters.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(weight[~is_tie], masters[~is_tie].bfloat16())
    assert is_tie.sum() >= 6
    assert (weight[is_tie].float().abs() > masters[is_tie].abs()).all()


def test_weights_that_somebody_else_sets_are_their_own_masters():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW([weight], **HYPER)
    weight.grad = draw(4).bfloat16()
    optimizer.step()
    assert not torch.equal(optimizer.master(weight), weight.detach().float())
    with torch.no_grad():
        weight.fill_(3.0)
    optimizer.forget_masters()
    assert torch.equal(optimizer.master(weight), torch.full((4,), 3.0))


@pytest.mark.parametrize("halves", [("exp_avg",), ("exp_avg", "exp_avg_sq")])
def test_moments_of_a_checkpoint_are_kept_as_the_run_asks(halves):
    weight = torch.nn.Parameter(draw(4))
    weight.grad = draw(4, seed=1)
    before, after = AdamW([weight], **HYPER), AdamW([weight], **HYPER, halves=halves)
    before.step()
    after.load_state_dict(before.state_dict())
    after.step()
    kept = {name: after.state[weight][name].dtype for name in ("exp_avg", "exp_avg_sq")}
    assert kept == {n: torch.bfloat16 if n in halves else torch.float32 for n in kept}


# -- updates


def gradients(steps: int = 50) -> list[torch.Tensor]:
    return [draw(8, 6, seed=i) * 10.0 ** (i % 3 - 1) for i in range(steps)]


def torchs(parameter: torch.Tensor, grads: list[torch.Tensor]) -> torch.optim.Optimizer:
    """torch's AdamW behind those updates of a float32 parameter."""
    optimizer = torch.optim.AdamW([parameter], **HYPER, weight_decay=0.1)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return optimizer


def ours(parameter: torch.Tensor, grads: list[torch.Tensor], factor=1.0, halves=()) -> AdamW:
    optimizer = AdamW([dict(params=[parameter], weight_decay=0.1)], **HYPER, halves=halves)
    optimizer.factor = factor
    for grad in grads:
        parameter.decoupled_grad = grad
        optimizer.step()
    return optimizer


def test_50_steps_in_float32_equal_torchs():
    mine, reference = (torch.nn.Parameter(draw(8, 6, seed=99)) for _ in range(2))
    inner, wanted = ours(mine, gradients()), torchs(reference, gradients())
    torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        state, expected = inner.state[mine][name], wanted.state[reference][name]
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)
    assert int(inner.state[mine]["step"]) == 50


def test_50_steps_of_a_bf16_weight_are_those_of_its_float32_master():
    start = draw(8, 6, seed=99).bfloat16()
    mine, reference = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    inner = ours(mine, gradients())
    torchs(reference, gradients())
    torch.testing.assert_close(inner.master(mine), reference.detach(), rtol=1e-6, atol=1e-6)
    alone = ours(other := torch.nn.Parameter(start.float()), gradients())
    assert torch.equal(inner.master(mine), alone.master(other))  # the bits that float32 has


def test_a_factor_is_as_if_gradients_had_been_multiplied():
    mine, reference = (torch.nn.Parameter(draw(8, 6, seed=99)) for _ in range(2))
    ours(mine, gradients(8), factor=0.25)
    ours(reference, [0.25 * grad for grad in gradients(8)])
    assert torch.equal(mine, reference)


def test_a_factor_that_is_nan_updates_nothing_and_is_taken_back():
    mine, reference = (torch.nn.Parameter(draw(8, 6, seed=99)) for _ in range(2))
    inner, wanted = ours(mine, gradients(2)), ours(reference, gradients(2))
    inner.factor = torch.tensor(float("nan"), dtype=torch.float64)
    mine.decoupled_grad = draw(8, 6)
    inner.step()
    inner.take_back()
    assert torch.equal(mine, reference)
    for name, value in wanted.state[reference].items():
        assert torch.equal(inner.state[mine][name], value)


def test_bf16_moments_stay_close_to_float32_ones():
    mine, reference = (torch.nn.Parameter(draw(8, 6, seed=99)) for _ in range(2))
    halves = ours(mine, gradients(), halves=("exp_avg", "exp_avg_sq")).state[mine]
    whole = ours(reference, gradients()).state[reference]
    assert halves["exp_avg"].dtype == halves["exp_avg_sq"].dtype == torch.bfloat16
    last_bit = 2.0**-7
    largest = whole["exp_avg"].abs().max()
    assert (halves["exp_avg"].float() - whole["exp_avg"]).abs().max() < 2 * last_bit * largest
    torch.testing.assert_close(
        halves["exp_avg_sq"].float(), whole["exp_avg_sq"], rtol=6 * last_bit, atol=0
    )
    moved = (reference - draw(8, 6, seed=99)).abs().mean()
    assert (mine - reference).abs().mean() < 2 * last_bit * moved


def test_a_second_moment_in_bf16_falls_though_a_step_is_less_than_its_last_bit():
    parameter = torch.nn.Parameter(torch.ones(4096))
    optimizer = AdamW([parameter], lr=0.0, betas=(0.9, 0.999), eps=1e-8, halves=("exp_avg_sq",))
    optimizer.state_of(parameter)["exp_avg_sq"].fill_(1.0)
    assert torch.tensor(0.999).bfloat16() == 1.0  # what the nearest would be
    for _ in range(200):
        parameter.grad = torch.zeros(4096)
        optimizer.step()
    mean = optimizer.state[parameter]["exp_avg_sq"].double().mean()
    assert float(mean) == pytest.approx(0.999**200, rel=2e-3)


def test_the_chance_is_in_proportion_and_the_same_for_replicas():
    low, high = torch.tensor([1.0, 1.0078125]).bfloat16()
    x = torch.full((2**16,), 1.0 + 0.25 * 0.0078125)
    rounded = round_by_chance(x, seed=7)
    assert set(rounded.unique().tolist()) == {float(low), float(high)}
    assert float((rounded == high).double().mean()) == pytest.approx(0.25, abs=0.01)
    assert torch.equal(rounded, round_by_chance(x.clone(), seed=7))
    assert not torch.equal(rounded, round_by_chance(x, seed=8))
    exact = draw(100).abs().bfloat16()
    assert torch.equal(round_by_chance(exact.float(), seed=3), exact)


# -- runs


model_path = saved_model("qwen3", num_hidden_layers=2)


def curves(path: str, out: str) -> dict:
    """{name: (curve, curve of the run that was resumed)}, and the curves below two limits of the
    norm."""
    cases = {
        "split": ({}, {}),
        "bf16 moments": (BF16_MOMENTS, BF16_MOMENTS),
        "to distributed": ({}, DIST_OPT),
        "from distributed": (DIST_OPT, {}),
    }
    found = {
        name: whole_and_resumed(path, f"{out}/{name}", *keys, **BF16)
        for name, keys in cases.items()
    }
    for name, keys in {"below": {}, "below, distributed": DIST_OPT}.items():
        limits = (dict(keys, max_grad_norm=limit) for limit in (50.0, 5000.0))
        found[name] = [train(path, f"{out}/{name}", **BF16, **limit) for limit in limits]
    return found


@pytest.fixture(scope="module")
def runs(model_path, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("runs"))
    return world.run(curves, 2, model_path, out, timeout_s=200)[0]


@pytest.mark.parametrize("name", ["split", "bf16 moments"])
def test_a_run_in_bf16_resumes_bit_for_bit(runs, name):
    whole, parts = runs[name]
    assert parts == whole


@pytest.mark.parametrize("name", ["below", "below, distributed"])
def test_gradients_below_the_limit_of_their_norm_are_left_as_they_are(runs, name):
    near, far = runs[name]
    assert near == far and all(1.0 < norm < 50.0 for _, norm in near)


def test_split_masters_train_as_the_distributed_optimizers(runs):
    assert_same_curve(runs["split"][0], runs["from distributed"][0], 1e-4)


@pytest.mark.parametrize("name", ["to distributed", "from distributed"])
def test_a_run_goes_on_with_the_other_kind_of_masters(runs, name):
    whole, parts = runs[name]
    assert_same_curve(parts, whole, 1e-4)


def what_updates_wait_for(path: str, out: str) -> list[str]:
    """Events of a run in bf16 around its updates, in order."""
    from mca_lite import parallel

    events, update = [], AdamW.step

    class Copy(parallel.HostCopy):
        def __init__(self, tensor):
            events.append("copied")
            super().__init__(tensor)

        def wait(self):
            events.append("read")
            return super().wait()

    def noted(self, closure=None):
        events.append("updated")
        update(self)

    AdamW.step, parallel.HostCopy = noted, Copy
    train(path, out, steps=2, **BF16)
    return events


def test_a_split_masters_update_is_on_its_way_before_numbers_copied_before_it_are_read(
    model_path, tmp_path
):
    [events] = world.run(what_updates_wait_for, 1, model_path, str(tmp_path))
    # those of the step, and the norm of its gradients
    assert events == ["copied", "copied", "updated", "read", "read"] * 2


def counts_behind_a_skipped_step(path: str, out: str) -> list[int]:
    """The updates that a run in bf16 has counted, of whose four steps one is left out."""
    from mca_lite.callbacks import TrainerCallback
    from mca_lite.optim import parts_of

    counts = set()

    class Spoil(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, trainer, **kwargs):
            if state.global_step == 1:
                next(trainer.models[0].parameters()).main_grad.fill_(float("nan"))

        def on_train_end(self, args, state, control, trainer, **kwargs):
            for part in parts_of(trainer.optimizer):
                counts.update(int(of["step"]) for of in part.optimizer.state.values())

    train(path, out, callbacks=[Spoil()], nan_policy="skip", nan_skip_limit=1, **BF16)
    return sorted(counts)


def test_a_step_that_is_left_out_is_not_counted(model_path, tmp_path):
    assert world.run(counts_behind_a_skipped_step, 1, model_path, str(tmp_path)) == [[3]]


def states_of(backend) -> dict:
    """{parameter.state: float32, flat}, and each parameter itself and its updates."""
    from mca_lite.ckpt_megatron import owned_parameters, state_names, state_piece

    models, optimizer, states = backend.model, backend.optimizer, {}
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    for inner, parameter, main, cut in owned_parameters(optimizer, models):
        name = names[id(parameter)]
        for state in state_names(optimizer, parameter):
            states[f"{name}.{state}"] = state_piece(inner, main, cut, state).numpy().copy()
        states[f"{name}.weight"] = parameter.detach().float().view(-1).numpy()
        states[f"{name}.step"] = float(inner.state[main]["step"])
    return states


def there_and_back(path: str, out: str) -> list[dict]:
    """The states of optimizers that load each other's checkpoints: split, distributed, split."""
    from mca_lite import TrainingArguments
    from mca_lite.backend_megatron import MegatronBackend
    from mca_lite.ckpt_megatron import owned_parameters
    from mca_lite.model import AutoModel

    found = []
    for i, keys in enumerate(({}, DIST_OPT, {})):
        args = TrainingArguments(output_dir=out, **BF16, **keys)
        backend = MegatronBackend(AutoModel.from_pretrained(path, args=args), args)
        optimizer = backend.create_optimizer()
        if i:
            backend.load_state(Path(out, str(i - 1)))
        else:
            for inner, parameter, main, _ in owned_parameters(optimizer, backend.model):
                noise = [draw(*parameter.shape, seed=7 + k) for k in range(3)]
                moments = dict(exp_avg=noise[1], exp_avg_sq=noise[2].square())
                master = parameter.detach().float() * (1 + 1e-3 * noise[0])
                inner.fill(main, dict(step=3, master=master, **moments))
        found.append(states_of(backend))
        folder = Path(out, str(i))
        folder.mkdir(parents=True)
        snapshot = backend.snapshot_of(backend.model, backend.optimizer)
        snapshot.finish(folder, [snapshot.write(folder)[1]])
    backend.load_state(Path(out, "0"), with_optimizer=False)  # weights that somebody else sets
    for inner, parameter, main, _ in owned_parameters(optimizer, backend.model):
        assert torch.equal(inner.master(main), parameter.detach().float())
    return found


def test_masters_and_moments_are_the_same_bits_in_the_distributed_optimizer_and_back(
    model_path, tmp_path
):
    [(first, *others)] = world.run(there_and_back, 1, model_path, str(tmp_path / "out"))
    assert {name.rsplit(".")[-1] for name in first} == {
        *("exp_avg", "exp_avg_sq", "master", "weight", "step")
    }
    for other in others:
        assert other.keys() == first.keys()
        for name, value in first.items():
            assert np.array_equal(other[name], value), name


def lora_run(path: str, out: str) -> tuple[list, list, str]:
    """(curve of adapters in a bf16 run, the same with the distributed optimizer, the kind of
    optimizer of the first one)"""
    from mca_lite.optim import parts_of
    from mca_lite.trainer import McaTrainer

    kinds = []

    class Trainer(McaTrainer):
        def train(self):
            super().train()
            kinds.append(type(parts_of(self.backend.optimizer)[0].optimizer).__name__)

    same = dict(adapt=functools.partial(with_drawn_adapters, rank=4), trainer_class=Trainer, **BF16)
    curves = [train(path, f"{out}/{i}", **same, **keys) for i, keys in enumerate(({}, DIST_OPT))]
    return *curves, kinds[0]


def test_adapters_which_are_float32_train_in_a_bf16_run_as_ever(model_path, tmp_path):
    plain, distributed, kind = world.run(lora_run, 1, model_path, str(tmp_path))[0]
    assert_same_curve(plain, distributed, 1e-5)
    assert plain[-1][0] != plain[0][0] and kind == "AdamW"
