"""deterministic: true gives the same bits in two runs and in a resumed one. On a GPU:
`make gpu ARGS=deterministic`.
"""

import shutil

import pytest

from tests.shared import distilling, rm_tools, tiny, tiny_moe, world
from tests.shared.dpo_tools import OBJECTIVES, curve_of, our_run
from tests.shared.files import tensors
from tests.shared.kto_tools import kto_run
from tests.shared.layouts import EP2, PACKED, SAVE, TP2
from tests.shared.training import train

STEPS = 6
CASES = {
    "tp2": (2, TP2),
    "tp2, packed": (2, {**TP2, **PACKED}),
    "ep2": (2, EP2),
    "torch": (2, dict(backend="torch")),
}


def deterministic(path: str, out: str, **keys) -> list:
    """The curve of a run; its weights are left in `out`."""
    more = dict(deterministic=True, hidden_dropout=0.1) if "backend" not in keys else {}
    keys = {**SAVE, "save_steps": 3, "deterministic": True, **more, **keys}
    return train(path, out, steps=STEPS, export=True, **keys)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.full if "tp2" in name else ()) for name in CASES]
)
def test_two_runs_and_a_resumed_one_have_the_same_bits(tmp_path, case):
    ranks, keys = CASES[case]
    path = tiny.save_model(tmp_path / "model", "qwen2")
    if keys is EP2:
        path = tiny_moe.save_model(tmp_path / "model", "qwen3_moe")
    curves = []
    for run in ("a", "b"):
        out = str(tmp_path / run)
        curves.append(world.run(deterministic, ranks, path, out, **keys)[0])
    shutil.rmtree(tmp_path / "b/checkpoint-6")
    keys = dict(keys, resume_from_checkpoint=str(tmp_path / "b/checkpoint-3"))
    curves.append(world.run(deterministic, ranks, path, str(tmp_path / "c"), **keys)[0])
    assert curves[0] == curves[1] and curves[0][3:] == curves[2][-3:]
    weights = tensors(tmp_path / "a")
    for other in ("b", "c"):
        again = tensors(tmp_path / other)
        assert all((tensor == again[name]).all() for name, tensor in weights.items())


def curves_of_objectives(folder: str, rows: dict, backends: dict) -> dict:
    """{(objective, backend): curves of two runs} with the key. backends: {objective: names}."""

    def curve(objective: str, out: str, keys: dict) -> list:
        if objective == "distill":
            models = f"{folder}/student", f"{folder}/teacher"
            return distilling.our_curve(*models, out, distilling.PLAIN, steps=2, **keys)
        if objective == "rm":
            return curve_of(rm_tools.rm_run(f"{folder}/rm", out, **keys))
        if objective == "kto":
            return curve_of(kto_run(f"{folder}/student", out, **keys))
        return curve_of(our_run(f"{folder}/student", out, OBJECTIVES["sigmoid"], **keys))

    return {
        (objective, backend): [
            curve(objective, f"{folder}/{run}", dict(rows, backend=backend, deterministic=True))
            for run in ("a", "b")
        ]
        for objective, names in backends.items()
        for backend in names
    }


BOTH = ("megatron", "torch")
IN_SUITE = dict.fromkeys(("dpo", "kto", "distill"), BOTH[:1]) | {"rm": BOTH}


@pytest.mark.parametrize(
    ("rows", "backends"),
    [(PACKED, IN_SUITE), pytest.param({}, dict.fromkeys(IN_SUITE, BOTH), marks=pytest.mark.full)],
    ids=("packed", "rows"),
)
def test_each_objective_has_the_same_bits_twice(tmp_path, rows, backends):
    distilling.save_models(tmp_path, num_hidden_layers=2)
    rm_tools.save_model(tmp_path / "rm", num_hidden_layers=2)
    [curves] = world.run(curves_of_objectives, 1, str(tmp_path), rows, backends)
    for cell, (first, second) in curves.items():
        assert len(first) == 2 and first == second, cell


def settings() -> dict:
    """The settings of libraries after the start of a world with the key."""
    import os

    import torch

    from mca_lite import TrainingArguments, parallel

    before = torch.are_deterministic_algorithms_enabled()
    parallel.initialize(TrainingArguments(output_dir="out", deterministic=True))
    names = "CUBLAS_WORKSPACE_CONFIG NVTE_ALLOW_NONDETERMINISTIC_ALGO NCCL_ALGO".split()
    return dict(
        before=before,
        after=torch.are_deterministic_algorithms_enabled(),
        cudnn=torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark,
        names=[os.environ[name] for name in names],
    )


def test_every_library_takes_its_deterministic_path():
    [found] = world.run(settings, 1)
    wanted = [":4096:8", "0", "Ring,Tree"]
    assert found == dict(before=False, after=True, cudnn=True, names=wanted)


@pytest.mark.parametrize("value", ["NVLS", "Ring,nvlstree"])
def test_adding_in_the_switch_is_refused(value, monkeypatch):
    from mca_lite import parallel

    monkeypatch.setenv("NCCL_ALGO", value)
    with pytest.raises(ValueError, match=f"got {value}: set NCCL_ALGO=Ring,Tree"):
        parallel.make_deterministic()


def test_the_torch_backend_of_a_script_is_deterministic_too(tmp_path):
    path = tiny.save_model(tmp_path / "model", "llama")
    keys = dict(backend="torch", deterministic=True)
    assert world.run(is_on_in_the_end, 1, path, str(tmp_path / "out"), **keys) == [True]


def is_on_in_the_end(path: str, out: str, **keys) -> bool:
    import torch

    train(path, out, steps=2, **keys)
    return torch.are_deterministic_algorithms_enabled()


def test_megatrons_modules_get_the_key(tmp_path):
    from mca_lite import AutoConfig, TrainingArguments

    path = tiny.save_model(tmp_path / "model", "llama")
    for value in (True, False):
        args = TrainingArguments(output_dir="out", deterministic=value)
        assert AutoConfig.from_pretrained(path, args).deterministic_mode is value


def order_of_kernels() -> list[list[str]]:
    """torch's attention kernels on CUDA in their order, without and with the key."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    import torch
    import torch.nn.attention

    from mca_lite import model_attention, parallel

    asked = []

    def sdpa_kernel(order, set_priority):
        asked.append([kernel.name for kernel in order])
        return nullcontext()

    torch.nn.attention.sdpa_kernel = sdpa_kernel
    query = SimpleNamespace(is_cuda=True)
    model_attention.sdpa_order(query, None)
    parallel.make_deterministic()
    model_attention.sdpa_order(query, None)
    return asked


def test_cudnns_attention_is_left_out():
    [(free, fixed)] = world.run(order_of_kernels, 1)
    assert free == ["CUDNN_ATTENTION", *fixed] and fixed[0] == "FLASH_ATTENTION"


def test_no_kernel_of_ours_adds_in_the_order_of_arrival():
    from pathlib import Path

    import mca_lite

    for path in Path(mca_lite.__file__).parent.glob("*.py"):
        assert "tl.atomic" not in path.read_text(), path
