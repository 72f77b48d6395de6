"""`profile_steps`, and what a run that is out of memory is told."""

import gzip
import json

import pytest
import torch

from mca_lite import TrainingArguments, cli
from mca_lite.errors import ConfigError
from tests.shared import commands, tiny, world
from tests.shared.layouts import TP2_SP
from tests.shared.small_runs import save_all
from tests.shared.training import attempt


@pytest.mark.parametrize("backend, ranks", [("megatron", 2), ("torch", 1)])
def test_steps_are_profiled_on_every_rank(tmp_path, backend, ranks):
    out = tmp_path / "out"
    model = tiny.save_model(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    layout = TP2_SP if ranks == 2 else {}
    keys = dict(backend=backend, profile_steps="2-3", steps=4, **layout)
    errors, printed, _ = zip(*world.run(attempt, ranks, model, str(out), **keys), strict=True)
    assert not any(errors)
    assert "profile of steps 2 to 3" in printed[0]
    assert (
        printed[0].index("step 1/4") < printed[0].index("profile of") < printed[0].index("step 4")
    )
    files = sorted(path.name for path in (out / "profile").iterdir())
    assert files == [f"trace_rank{rank}.json.gz" for rank in range(ranks)]
    for name in files:
        with gzip.open(out / "profile" / name, "rt") as file:
            events = json.load(file)["traceEvents"]
        # two updates: the other steps are not in the window
        assert sum("Optimizer.step" in str(event.get("name")) for event in events) == 2


def test_a_run_that_ends_in_the_window_has_its_trace(tmp_path):
    out = tmp_path / "out"
    model = tiny.save_model(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    keys = dict(backend="torch", profile_steps=2, steps=1)
    error = world.run(attempt, 1, model, str(out), **keys)[0][0]
    assert "profile_steps" in error and "1 steps" in error
    keys.update(profile_steps="2-9", steps=3)
    assert "profile of steps 2 to 3" in world.run(attempt, 1, model, str(out), **keys)[0][1]


@pytest.mark.parametrize("steps", ["12-10", "0", "-3", "a", "3-", "1-2-3"])
def test_what_are_no_steps_is_refused(steps):
    with pytest.raises(ConfigError, match="profile_steps"):
        TrainingArguments(output_dir="unused", profile_steps=steps)


# -- out of memory


def words_of(folder, more: str = "") -> list[str]:
    words = f"configs/sft.yaml model_name_or_path={folder}/model dataset={folder}/chat.jsonl "
    words += f"output_dir={folder}/out cache_dir={folder}/cache {commands.SHORT} "
    return f"{words} {more}".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    save_all(folder, "qwen3")
    return folder


def run_out_of_memory(words: list[str]) -> tuple[int, str, str]:
    from mca_lite.backend_megatron import MegatronBackend

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    MegatronBackend.forward_backward = full
    return commands.ended(cli.main, words)


def test_a_run_out_of_memory_names_the_command_that_plans(folder):
    words = words_of(folder, "cutoff_len=32")
    code, _, error = world.run(run_out_of_memory, 1, words)[0]
    assert code == 2 and error.startswith("error: CUDA out of memory. Tried to")
    assert "python -m mca_lite plan CONFIG --memory" in error
