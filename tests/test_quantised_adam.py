"""Adam's moments in 8 bits: their codes, their updates beside float32's, and checkpoints."""

import pytest
import torch

from mca_lite.args import known_keys
from mca_lite.part_quantised_adam import (
    BLOCK,
    LEAST,
    BlockAdamW,
    Moment,
    dynamic_map,
    from_blocks,
    to_blocks,
)
from tests.shared import tiny, world
from tests.shared.layouts import DIST_OPT, TP2
from tests.shared.training import train, whole_and_resumed

EIGHT = dict(exp_avg_dtype="8bit", exp_avg_sq_dtype="8bit")
BOTH = ("exp_avg", "exp_avg_sq")
HYPER = dict(betas=(0.9, 0.999), eps=1e-8)
CPU = torch.device("cpu")


def heavy(n: int, signed: bool) -> torch.Tensor:
    """Numbers over many decades, the largest of some blocks negative."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(n, generator=generator) * torch.rand(n, generator=generator).pow(6)
    return numbers if signed else numbers.square()


# some of bitsandbytes 0.50.2's functional.create_dynamic_map, by index
GOLDEN = {
    True: {0: -0.992968738079071, 1: -0.9789062738418579, 127: 0.0, 254: 0.992968738079071},
    False: {0: 0.0, 1: 3.2500000542313501e-07, 2: 7.750000117084710e-07, 254: 0.996484398841858},
}


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_that_of_bitsandbytes(signed):
    table = dynamic_map(signed, CPU)
    assert len(table) == 256 and table[255] == 1 and (table.diff() > 0).all()
    for index, number in GOLDEN[signed].items():
        assert float(table[index]) == pytest.approx(number, rel=1e-7)


@pytest.mark.parametrize("signed", [True, False])
def test_each_number_has_the_nearest_code_and_is_stored_again_as_it_is(signed):
    numbers = heavy(10 * BLOCK + 5, signed)
    numbers[BLOCK : 2 * BLOCK] = 0
    codes, scales = to_blocks(numbers, signed)
    got = from_blocks(codes, scales, signed)
    assert torch.equal(from_blocks(*to_blocks(got, signed), signed), got)
    table = dynamic_map(signed, CPU).double()
    of_block = scales.double().repeat_interleave(BLOCK)[: len(numbers)]
    nearest = (numbers.double().unsqueeze(1) - table * of_block.unsqueeze(1)).abs().amin(1)
    far = (numbers - got).abs().double() - nearest
    is_raised = (codes == 1) & (not signed)
    assert far[~is_raised].abs().max() < 1e-6
    assert signed or ((got > 0) == (numbers > 0)).all()


def problem(size_of_moments: str | None, steps: int = 300) -> tuple[float, float]:
    """(the objective at the end, the largest update) of least squares with scales over four
    decades and noisy gradients."""
    torch.manual_seed(1)
    n = 1 << 13
    weight = torch.nn.Parameter(torch.zeros(n))
    target = torch.randn(n)
    scale = torch.logspace(-4, 0, n)[torch.randperm(n)]
    groups = [{"params": [weight]}]
    optimizer = BlockAdamW(groups, BOTH if size_of_moments else (), lr=1e-2, **HYPER)
    largest = 0.0
    for _ in range(steps):
        before = weight.detach().clone()
        noise = 0.01 * scale * torch.randn(n)
        weight.grad = scale * (before - target) + noise
        optimizer.step()
        largest = max(largest, float((weight.detach() - before).abs().max()))
    return float((scale * (weight.detach() - target).square()).sum()), largest


def test_updates_of_four_decades_stay_small():
    """A second moment that rounds to 0 makes updates of 300 here."""
    wanted, largest = problem(None)
    got, largest_of_8 = problem("8bit")
    assert largest < 0.011 and largest_of_8 < 0.03
    assert got == pytest.approx(wanted, rel=0.2)  # 399 with a second moment of 0


def test_an_update_in_pieces_is_that_of_the_whole(monkeypatch):
    results = []
    for chunk in (1 << 24, 10 * BLOCK):
        monkeypatch.setattr("mca_lite.part_quantised_adam.CHUNK", chunk)
        weight = torch.nn.Parameter(heavy(LEAST + 37, True).bfloat16())
        optimizer = BlockAdamW([{"params": [weight]}], BOTH, lr=1e-2, halves=(), **HYPER)
        for step in range(3):
            weight.grad = heavy(weight.numel(), True).roll(step).bfloat16()
            optimizer.step()
        state = optimizer.state[weight]
        assert isinstance(state["exp_avg"], Moment) and int(state["step"]) == 3
        assert [*optimizer.state] == [weight]
        results.append([optimizer.master(weight), *(state[name].read() for name in BOTH)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) and one.any()


def test_zero_gradients_change_nothing_and_small_tensors_stay_float32():
    large, small = (torch.nn.Parameter(torch.ones(n)) for n in (LEAST, LEAST - 1))
    optimizer = BlockAdamW([{"params": [large, small]}], BOTH, lr=1e-2, **HYPER)
    for parameter in (large, small):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(large.detach(), torch.ones(LEAST))
    assert not isinstance(optimizer.state[small]["exp_avg"], Moment)


# -- runs


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """A model whose matrices have at least LEAST numbers, at tp2 too."""
    keys = dict(hidden_size=128, intermediate_size=256, head_dim=32, num_hidden_layers=2)
    return str(tiny.save_model(tmp_path_factory.mktemp("model"), "qwen3", **keys))


def curves(path: str, out: str) -> list:
    keys = dict(steps=200, count=40, learning_rate=1e-3, logging_steps=10, num_train_epochs=20)
    return [train(path, f"{out}/{i}", **keys, **more) for i, more in enumerate(({}, EIGHT))]


@pytest.mark.full
def test_200_steps_are_those_of_float32_moments_but_for_rounding(path, tmp_path):
    """Below a loss of 0.3 the samples are known by heart, and rounding decides."""
    [(wanted, got)] = world.run(curves, 1, path, str(tmp_path), timeout_s=300)
    assert wanted != got and wanted[-1][0] < wanted[0][0] - 0.5
    for (ours, _), (theirs, _) in zip(got, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=0.004, abs=0.04 * (theirs < 0.3))


LAYOUTS = {
    "one_bf16": (1, dict(bf16=True)),
    "bf16_gradients": (1, dict(bf16=True, grad_reduce_in_fp32=False)),
    "tp2": (2, TP2),
    "dp2_distributed": (2, {**DIST_OPT, "bf16": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_the_whole_one_to_the_bit(layout, path, tmp_path):
    ranks, keys = LAYOUTS[layout]
    for whole, resumed in world.run(resume, ranks, path, str(tmp_path), keys):
        assert whole[2:] == resumed and len(resumed) == 2


def resume(path: str, out: str, keys: dict) -> tuple[list, list]:
    whole, resumed = whole_and_resumed(path, out, **keys, **EIGHT)
    return whole, resumed[-2:]


def test_a_checkpoint_of_tp2_goes_on_alone_and_with_float32_moments(path, tmp_path):
    [(whole, _), _] = world.run(resume, 2, path, str(tmp_path), TP2)
    for keys in ({}, dict(exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32")):
        [got] = world.run(go_on, 1, path, str(tmp_path), keys)
        for (loss, _), (wanted, _) in zip(got[-2:], whole[2:], strict=True):
            assert loss == pytest.approx(wanted, rel=1e-3)


def go_on(path: str, out: str, keys: dict) -> list:
    import shutil
    from pathlib import Path

    for folder in Path(out).glob("checkpoint-*"):
        if folder.name != "checkpoint-2":
            shutil.rmtree(folder)
    more = {**EIGHT, **keys}
    return train(path, out, steps=4, save_strategy="no", num_train_epochs=5,
                 resume_from_checkpoint="auto", **more)  # fmt: skip


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"])
def test_names_of_transformers_mean_both_moments(name):
    problems: list = []
    keys, _ = known_keys({"optim": name, "exp_avg_dtype": "fp32"}, problems)
    assert not problems
    assert keys == {"optim": "adam", "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "8bit"}
