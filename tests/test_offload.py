"""optimizer_cpu_offload: the same numbers as on the device, and a resumed run is the run that never
stopped.
"""

import pytest
import torch

from tests.shared import world
from tests.shared.fixtures import saved_model
from tests.shared.layouts import DIST_OPT
from tests.shared.training import train, whole_and_resumed

OFFLOAD = dict(optimizer_cpu_offload=True)
CASES = {
    "float32": {},
    "float32, distributed": DIST_OPT,
    "bf16": dict(bf16=True),
    "bf16, half of it": dict(bf16=True, optimizer_offload_fraction=0.5),
    "bf16, distributed": dict(bf16=True, **DIST_OPT),
    "sgd": dict(optim="sgd", bf16=True),
}


model_path = saved_model("qwen3", num_hidden_layers=2)


def whole_and_parts(path: str, out: str, cases: dict) -> dict:
    """{case: (curve on the device, curve offloaded, curve of a run that died after its second
    step)}
    """
    curves = {}
    for name, keys in cases.items():
        plain = {k: v for k, v in keys.items() if k != "optimizer_offload_fraction"}
        folder, keys = f"{out}/{name}", {**keys, **OFFLOAD}
        on_device = train(path, f"{folder}/device", steps=4, **plain)
        curves[name] = on_device, *whole_and_resumed(path, f"{folder}/parts", **keys)
    return curves


@pytest.fixture(scope="module")
def curves(model_path, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("runs"))
    return world.run(whole_and_parts, 2, model_path, out, CASES, timeout_s=200)[0]


@pytest.mark.parametrize("case", CASES)
def test_an_offloaded_optimizer_trains_as_one_on_the_device(case, curves):
    on_device, offloaded, _ = curves[case]  # optimizer_cpu_offload: false, and true
    if case.startswith("bf16") and "distributed" not in case:
        # bf16 weights on the device are half of their masters: the same formula, rounded elsewhere
        assert [loss for loss, _ in offloaded] == pytest.approx([x for x, _ in on_device], rel=1e-4)
        assert [norm for _, norm in offloaded] == pytest.approx([x for _, x in on_device], rel=1e-2)
    else:
        assert offloaded == on_device


@pytest.mark.parametrize("case", CASES)
def test_an_offloaded_run_resumes_bit_for_bit(case, curves):
    _, whole, parts = curves[case]
    assert parts == whole


@pytest.mark.parametrize("fraction, on_host", [(0.0, 0), (0.1, 1), (0.3, 2), (1.0, 3)])
def test_a_fraction_of_the_elements_is_on_the_host(fraction, on_host):
    """optimizer_offload_fraction counts elements: of 2, 4 and 10 the first one makes up 0.1 of
    them, two 0.3.
    """
    from mca_lite.part_offload import OffloadedOptimizer

    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (2, 4, 10)]
    inner = torch.optim.AdamW(parameters, lr=0.1)
    offloaded = OffloadedOptimizer(
        inner, fraction, lambda groups: torch.optim.AdamW(groups, lr=0.1)
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    offloaded.step()
    assert offloaded.on_host == set(parameters[:on_host])
    assert all(float(p[0]) == pytest.approx(0.899, abs=1e-6) for p in parameters)
    assert all(int(offloaded.state[p]["step"]) == 1 for p in parameters)
