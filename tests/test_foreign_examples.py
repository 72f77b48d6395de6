"""Examples of LLaMA-Factory and mcore_adapter: run after model, data and paths are replaced and
nothing else.
"""

import pytest

from mca_lite.args import parse_args
from tests.shared import tiny, tiny_moe, world
from tests.shared.commands import run_train
from tests.shared.foreign_examples import LLAMA_FACTORY, ROLL, write_demo_data
from tests.shared.picture_files import save_whole_model
from tests.shared.small_runs import save_tokenizer

EXAMPLES = {**LLAMA_FACTORY, **ROLL}
VISION = {"Qwen2-VL": "qwen2_vl", "Qwen2.5-VL": "qwen2_5_vl", "Qwen3-VL": "qwen3_vl"}


@pytest.fixture(scope="module")
def example_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    tiny.save_model(folder / "dense", "qwen3")
    tiny_moe.save_model(folder / "moe", "qwen3_moe")
    for name in ("dense", "moe"):
        save_tokenizer(folder / name)
    for family in VISION.values():
        save_whole_model(folder / family, family)
    write_demo_data(folder)
    return folder


def replaced(words: str, place, name: str) -> list[str]:
    """The words with other paths, model and data, and nothing else."""
    dense = next((family for name, family in VISION.items() if name in words), "dense")
    model = place / ("moe" if "moe" in words else dense)
    changes = dict(model_name_or_path=model, dataset_dir=place, cache_dir=place / "cache")
    changes["output_dir"] = place / name.replace("/", "-")
    return [*words.split(), *(f"{key}={value}" for key, value in changes.items())]


def ranks_of(words: str) -> int:
    """The GPUs of an example's machine."""
    return 8 if "model_parallel_size=4" in words else 2


def fewer_ranks(words: list[str]) -> list[str]:
    """The words with half of the tensor parallelism, of 4 ranks."""
    size = "tensor_model_parallel_size="
    return [word.replace(f"{size}4", f"{size}2") for word in words]


TRAINED = [
    "train_lora/qwen3_lora_sft.sh",
    "train_lora/qwen3_lora_dpo",
    "train_lora/qwen3vl_lora_dpo",
    "megatron/qwen2_vl_full",
    "run_sft_train.sh",
    "run_qwen_vl_sft.sh",
]
# of the others, those unlike any that is trained
PLANNED = ["train_lora/qwen3_lora_pretrain", "train_lora/qwen3_lora_reward"]
PLANNED += ["train_lora/qwen3_lora_kto", "megatron/qwen3_moe_full"]


@pytest.mark.parametrize(
    "name",
    [name if name in PLANNED else pytest.param(name, marks=pytest.mark.full) for name in EXAMPLES],
)
def test_an_example_is_planned(example_folder, monkeypatch, name):
    from mca_lite.run import make_plan

    words = EXAMPLES[name]
    monkeypatch.setenv("WORLD_SIZE", str(ranks_of(words)))
    plan = make_plan(parse_args(replaced(words, example_folder, name)))
    assert len(plan.data.train) > 0 and plan.objective.stage in words


LIKE_ANOTHER = "train_lora/qwen3_lora_dpo"  # with pictures it is trained too


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if n == LIKE_ANOTHER else n for n in TRAINED]
)
def test_an_example_trains(example_folder, name):
    words = fewer_ranks(replaced(EXAMPLES[name], example_folder, f"trained-{name}"))
    ranks = 4 if name.startswith("megatron") else 2
    for code, out, error in world.run(run_train, ranks, words, timeout_s=240):
        assert code == 0, out + error
