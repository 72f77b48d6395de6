"""rope_scaling trains the model that transformers makes of a config.json with the same numbers."""

import functools
import json
import shutil

import pytest

from mca_lite.args import parse_args
from mca_lite.part_rope_keys import scale
from tests.shared import small_runs, world
from tests.shared.layouts import CP2, PP2, TP2
from tests.shared.training import assert_same_curve, read_log

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(rope_type="llama3", factor=4.0, original_max_position_embeddings=16)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
# of heads of 8 channels, half of which phi3 rotates
LONG = dict(rope_type="longrope", short_factor=[1.0, 1.5], long_factor=[2.0, 4.0])
LONG |= dict(original_max_position_embeddings=16)
WHOLE = dict(LONG, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 3.0, 4.0, 5.0])
# name -> (family, the key, what config.json says of it, its positions)
CASES = {
    "longrope": ("qwen3", {**WHOLE, "factor": 4}, {**WHOLE, "factor": 4.0}, 64),
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


def write_phi3(folder, **changes) -> None:
    """A model of phi3 whose config.json has longrope, as Phi's long checkpoints."""
    (folder).mkdir()
    small_runs.save_all(folder, "phi3", max_position_embeddings=64, sliding_window=None)
    path = folder / "model/config.json"
    config = json.loads(path.read_text())
    rope = {**LONG, "rope_theta": 100.0, "partial_rotary_factor": 0.5, **changes}
    before = LONG["original_max_position_embeddings"]
    config |= dict(rope_parameters=rope, original_max_position_embeddings=before)
    path.write_text(json.dumps(config))


def rows_of(folder, out, length: int, ranks=1, **more) -> list:
    keys = dict(cutoff_len=length, streaming=False, seed=3)
    return run(folder, out, ranks, **{**keys, **more})


LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "cp2": (2, CP2),
    "packed": (1, dict(sequence_packing=True)),
    "cp2, packed": (2, dict(CP2, sequence_packing=True)),
    "recomputed": (1, dict(recompute_granularity="full")),
    "a factor of attention": (1, {}),
}


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    made = tmp_path_factory.mktemp("phi3")
    write_phi3(made / "plain")
    write_phi3(made / "factor", attention_factor=1.7)
    return made


@functools.cache
def of_transformers(folder, length: int, tmp_path) -> list:
    return rows_of(folder, tmp_path / f"theirs{length}", length, use_mca=False)


@pytest.mark.parametrize("layout, length", [("one", 16), *((name, 40) for name in LAYOUTS)])
def test_longrope_of_a_file_trains_as_in_transformers(layout, length, phi3, tmp_path):
    ranks, more = LAYOUTS[layout]
    name = "factor" if "factor" in layout else "plain"
    theirs = of_transformers(phi3 / name, length, phi3 / f"of_{name}")
    folder = phi3 / name
    assert_same_curve(rows_of(folder, tmp_path / "ours", length, ranks, **more), theirs)
    if layout == "one":
        ours, before = (path / "config.json" for path in (tmp_path / "ours", folder / "model"))
        names = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings")
        got, wanted = (json.loads(path.read_text()) for path in (ours, before))
        assert [got[name] for name in names] == [wanted[name] for name in names]
        files = (tmp_path / "ours", folder / "model")
        assert {*headers(files[0])} == {*headers(files[1])}


def headers(folder) -> list[str]:
    from safetensors import safe_open

    [path] = folder.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        return list(file.keys())


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
SIZES = dict(hidden_size=16, num_attention_heads=4)
TWO = dict(short_factor=[1.0, 1.5], long_factor=[2.0, 4.0])
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
    own = {"type": "longrope", **TWO, "factor": None}
    config = dict(PLAIN, **SIZES, rope_scaling=own, original_max_position_embeddings=8)
    assert scale({"rope_type": "longrope"}, config, 40)["factor"] == 2
    latent = dict(PLAIN, hidden_size=64, num_attention_heads=2, qk_rope_head_dim=4)
    latent["original_max_position_embeddings"] = 8
    assert scale({"rope_type": "longrope", **TWO}, latent, 40)["long_factor"] == [2.0, 4.0]


@pytest.mark.parametrize(
    "key, config, wanted",
    [
        ("dynamic", {}, "expected a mapping"),
        (4, {}, "expected a mapping"),
        ({"factor": 2}, {}, "expected rope_type linear, llama3, yarn"),
        ({"rope_type": "dynamic"}, {}, "got 'dynamic'"),
        ({"rope_type": "longrope"}, SIZES, "longrope: expected short_factor"),
        ({"rope_type": "longrope", **TWO, "short_factor": []}, SIZES, "longrope: expected short"),
        ({"rope_type": "longrope", **TWO, "long_factor": [2]}, SIZES, "expected 2 numbers, .* got"),
        ({"rope_type": "longrope", **TWO, "short_factor": [0, "x"]}, SIZES, "short_factor: exp"),
        ({"rope_type": "yarn"}, {}, "expected a factor"),
        ({"rope_type": "yarn", "factor": 0.5}, {}, "factor: expected at least 1"),
        ({"rope_type": "yarn", "factor": "x"}, {}, "factor: expected a finite number, got 'x'"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 1}, {}, "linear has no beta_fast"),
        ({"rope_type": "llama3", "factor": 2, "low_freq_factor": 4}, {}, "low_freq_factor <"),
        ("yarn", {"rope_parameters": OWN}, "scaled already"),
        ("yarn", {"max_position_embeddings": None}, "config.json has no max_position"),
        ("yarn", {"rope_parameters": {"full_attention": OWN}}, "kinds of layers"),
        ("yarn", {"model_type": "unknown"}, "transformers reads the file"),
        ("yarn", {"model_type": "phi3"}, "any scaling of phi3 as longrope"),
        ({"rope_type": "linear", "factor": 2}, {"model_type": "phi3"}, "with short_factor"),
        ("yarn", {"model_class": "McaModelConfig"}, "the model's config.json has to say it"),
    ],
)
def test_what_cannot_be_scaled_is_refused_in_words(key, config, wanted):
    with pytest.raises(ValueError, match=wanted):
        scale(key, {**PLAIN, **config}, 40)


def test_rows_that_a_pipeline_pads_to_one_length_are_noted_for_longrope(
    phi3, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = f"model_name_or_path={phi3}/plain/model dataset=a.jsonl output_dir={tmp_path}"
    words += " max_steps=1 pipeline_model_parallel_size=2"

    def notes(more: str = "") -> list[str]:
        return parse_args([*words.split(), *more.split()]).parts["rope"].notes

    assert ["longrope: a pipeline" in note for note in notes()] == [True]
    assert notes("variable_seq_lengths=true") == notes("pipeline_model_parallel_size=1") == []
