"""rope_scaling trains the model that transformers makes of a config.json with the same numbers."""

import json
import shutil

import pytest

from mca_lite.part_rope_keys import scale
from tests.shared import small_runs, world
from tests.shared.layouts import TP2
from tests.shared.training import assert_same_curve, read_log

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(rope_type="llama3", factor=4.0, original_max_position_embeddings=16)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
# name -> (family, the key, what config.json says of it, its positions)
CASES = {
    "yarn": ("qwen3", {**YARN, "beta_fast": 16}, {**YARN, "beta_fast": 16.0}, 64),
    "yarn by name": ("qwen3", "yarn", {**YARN, "factor": 3}, 48),
    "llama3": ("qwen3", {"type": "llama3", "factor": "4"}, LLAMA3, 64),
    "linear": ("mistral", "linear", dict(rope_type="linear", factor=3), 16),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("rope")
    for family in {case[0] for case in CASES.values()}:
        (made / family).mkdir()
        small_runs.save_all(made / family, family, max_position_embeddings=16)
    return made


def run(folder, out, ranks=1, **changes) -> list:
    """The log's (loss, gradient norm) of a run on rows of up to 40 tokens."""
    keys = dict(model_name_or_path=f"{folder}/model", dataset=f"{folder}/chat.jsonl")
    keys |= dict(cache_dir=f"{folder}/cache", output_dir=str(out), cutoff_len=40, max_steps=2)
    keys |= dict(packing=True, learning_rate=1e-2, adam_epsilon=1e-5, logging_steps=1)
    keys |= dict(global_batch_size=2, per_device_train_batch_size=1, bf16=False)
    keys |= dict(save_strategy="no", disable_tqdm=True, html_report=False, plot_loss=False)
    world.run(small_runs.train_by_words, ranks, {**keys, **changes})
    return [(line["loss"], line["grad_norm"]) for line in read_log(str(out)) if "loss" in line]


@pytest.mark.parametrize("case", CASES)
def test_the_key_trains_as_a_config_json_with_its_numbers(case, folders, tmp_path):
    family, key, numbers, positions = CASES[case]
    folder = folders / family
    written = tmp_path / "written"
    shutil.copytree(folder, written)
    config = json.loads((written / "model/config.json").read_text())
    theta = config["rope_parameters"]["rope_theta"]
    wanted = {"rope_theta": theta, **numbers}
    config |= dict(rope_parameters=wanted, max_position_embeddings=positions)
    (written / "model/config.json").write_text(json.dumps(config))
    theirs = run(written, tmp_path / "theirs", use_mca=False)
    other = run(written, tmp_path / "unscaled", rope_scaling=dict(rope_type="linear", factor=9))
    assert abs(other[0][0] - theirs[0][0]) > 1e-4
    layouts = {"one": (1, {}), "tp2": (2, TP2), "torch": (1, dict(use_mca=False))}
    for name, (ranks, more) in layouts.items():
        ours = run(folder, tmp_path / name, ranks, rope_scaling=key, **more)
        assert_same_curve(ours, theirs)
        saved = json.loads((tmp_path / name / "config.json").read_text())
        assert saved["rope_parameters"] == wanted
        assert saved["max_position_embeddings"] == positions


def test_a_run_goes_on_with_its_scaling_alone(folders, tmp_path):
    keys = dict(rope_scaling="yarn", save_strategy="steps", save_steps=1)
    run(folders / "qwen3", tmp_path, **keys, max_steps=1)
    keys["resume_from_checkpoint"] = "auto"
    with pytest.raises(AssertionError, match="saved with rope_scaling"):
        run(folders / "qwen3", tmp_path, **{**keys, "rope_scaling": "linear"})
    assert len(run(folders / "qwen3", tmp_path, **keys)) == 2


def test_rows_longer_than_the_positions_name_the_key(folders, tmp_path):
    long = tmp_path / "long.jsonl"
    turns = [(role, " w1 " * 9) for role in ("user", "assistant")]
    messages = [{"role": role, "content": text} for role, text in turns]
    long.write_text(json.dumps({"messages": messages}))
    with pytest.raises(AssertionError, match=r"scale them \(rope_scaling\)"):
        run(folders / "qwen3", tmp_path, dataset=str(long), packing=False)


PLAIN = dict(model_type="qwen3", max_position_embeddings=16, rope_theta=100.0)
OWN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4, mscale=0.5)


def test_numbers_that_are_not_given_are_the_model_s():
    config = dict(PLAIN, rope_scaling={"type": "yarn", **OWN})
    key = scale({"rope_type": "yarn", "factor": 8}, config, 40)
    assert key == config["rope_parameters"] == {**OWN, "factor": 8.0}
    assert config["max_position_embeddings"] == 32 and "rope_scaling" not in config
    assert scale(key, dict(config), 1) == key
    config = dict(PLAIN, rope_scaling={"type": "mrope", "mrope_section": [1, 1]})
    scale("yarn", dict(model_type="qwen2_vl", text_config=config), 40)
    assert config["rope_parameters"]["mrope_section"] == [1, 1]


@pytest.mark.parametrize(
    "key, config, wanted",
    [
        ("dynamic", {}, "expected a mapping"),
        (4, {}, "expected a mapping"),
        ({"factor": 2}, {}, "expected rope_type linear, llama3, yarn"),
        ({"rope_type": "longrope"}, {}, "got 'longrope'"),
        ({"rope_type": "yarn"}, {}, "expected a factor"),
        ({"rope_type": "yarn", "factor": 0.5}, {}, "factor: expected at least 1"),
        ({"rope_type": "yarn", "factor": "x"}, {}, "factor: expected a finite number, got 'x'"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 1}, {}, "linear has no beta_fast"),
        ({"rope_type": "llama3", "factor": 2, "low_freq_factor": 4}, {}, "low_freq_factor <"),
        ("yarn", {"rope_parameters": OWN}, "scaled already"),
        ("yarn", {"max_position_embeddings": None}, "config.json has no max_position"),
        ("yarn", {"rope_parameters": {"full_attention": OWN}}, "kinds of layers"),
        ("yarn", {"model_type": "unknown"}, "transformers reads the file"),
        ("yarn", {"model_class": "McaModelConfig"}, "the model's config.json has to say it"),
    ],
)
def test_what_cannot_be_scaled_is_refused_in_words(key, config, wanted):
    with pytest.raises(ValueError, match=wanted):
        scale(key, {**PLAIN, **config}, 40)
