"""The short form of tests/tools/fuzz.py, and that it sees what it is there to see."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.shared import world
from tests.tools import fuzz


@pytest.mark.full
def test_random_configurations_train_as_on_torch_or_are_refused_in_time(tmp_path):
    found = fuzz.run(40, seed=0, folder=tmp_path)
    assert fuzz.FAILED not in found and found[fuzz.SAME] + found[fuzz.ONE] > 15


def test_a_seed_and_a_number_decide_a_configuration():
    cases = [fuzz.Draw(1, number).case for number in range(400)]
    assert cases == [fuzz.Draw(1, number).case for number in range(400)]
    assert cases[0] != fuzz.Draw(2, 0).case
    drawn = {name for case in cases for name, value in (case.keys | case.layout).items() if value}
    for name in "tensor_model pipeline_model virtual_pipeline_model context expert_model".split():
        assert f"{name}_parallel_size" in drawn
    assert {"packing", "neat_packing", "ref_model", "recompute_modules"} <= drawn
    assert {"recompute_keep", "activation_offloading", "mlp_chunk_size", "use_weighting"} <= drawn
    of_adapters = "rank_pattern alpha_pattern modules_to_save target_parameters quantization_bit"
    assert {"mtp_num_layers", "freeze_extra_modules", *of_adapters.split()} <= drawn
    assert {case.keys["stage"] for case in cases} == {*fuzz.STAGES}
    assert {case.model for case in cases} == {*fuzz.DENSE, *fuzz.EXPERTS}


def test_differences_of_logs_and_weights_are_found(tmp_path):
    def write(name: str, off: float = 0.0, weight: float = 0.5, **more) -> None:
        (tmp_path / name).mkdir()
        line = {"step": 1, "loss": 2.0 + off, "grad_norm": 1.0, "tokens_per_second": off, **more}
        (tmp_path / name / "trainer_log.jsonl").write_text(json.dumps(line))
        save_file({"w": torch.full((3,), weight)}, tmp_path / name / "model.safetensors")

    wanted = {
        "same": dict(off=1e-5),
        "loss": dict(off=1e-4),
        "weight": dict(weight=0.5001),
        "nan": dict(weight=float("nan")),
        "more": dict(z_loss=1.0),
    }
    write("torch")
    for name, keys in wanted.items():
        write(name, **keys)
    found = {name: fuzz.compare(tmp_path / name, tmp_path / "torch") for name in wanted}
    assert found["same"] == [] and "loss 2.0001" in found["loss"][0]
    assert "./w is off by 1.0e-04" in found["weight"][0] and "nan" in found["nan"][0]
    assert "z_loss" in found["more"][0]


def test_a_late_refusal_and_one_that_not_all_ranks_have_are_failures(tmp_path, monkeypatch):
    def answer(function, ranks, keys, timeout_s):
        if said == "late":
            raise AssertionError("attempt: rank 1 failed: ValueError: too late")
        return [*[""] * (ranks - 1), said]

    case = next(case for n in range(9) if (case := fuzz.Draw(0, n).case).ranks == 2)
    monkeypatch.setattr(world, "run", answer)
    monkeypatch.setattr(
        fuzz, "save_model", lambda case, folder: folder.mkdir(parents=True, exist_ok=True)
    )
    runs, found = fuzz.Runs(tmp_path), {}
    for said in ("late", "no"):
        found[said] = runs.judge(case)
    assert found["late"][0] == found["no"][0] == fuzz.FAILED
    assert "too late" in found["late"][1] and "some ranks refuse" in found["no"][1]
