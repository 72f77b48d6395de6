"""A checkpoint or layout that does not fit a model is refused, and the message names what does not
fit.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mca_lite import part_lora, part_lora_files, weights_files
from mca_lite.args import TrainingArguments
from mca_lite.weights_files import SafetensorsSource, write_safetensors
from tests.shared import tiny, tiny_moe, world
from tests.shared.commands import ROOT, error_of
from tests.shared.files import EMBEDDING, changed, make_args
from tests.shared.layouts import PP2, TP2

LAYER = "model.layers.1."


def load_error(path: str, keys: dict) -> str:
    """The text of the ValueError with which a model is refused."""
    from mca_lite.model import AutoModel

    return error_of(AutoModel.from_pretrained, path, make_args(**keys))


def load_errors(paths: dict, keys: dict) -> dict:
    return {name: load_error(path, keys) for name, path in paths.items()}


def cut(name: str, *shape: int):
    """A change that gives a tensor another shape, larger or smaller."""
    return lambda values: values.update({name: torch.zeros(shape)})


def drop(name: str):
    return lambda values: values.pop(name)


def add(name: str):
    return lambda values: values.update({name: torch.zeros(2)})


BROKEN = {
    "missing": (drop(LAYER + "mlp.up_proj.weight"), [LAYER + "mlp.up_proj.weight", "lacks"]),
    "missing head": (drop("lm_head.weight"), ["lm_head.weight", "tie_word_embeddings"]),
    "unknown": (add(LAYER + "mlp.extra.weight"), [LAYER + "mlp.extra.weight", "llama",
                                                  "model_type"]),
    "unknown bias": (add(LAYER + "self_attn.q_proj.bias"), [LAYER + "self_attn.q_proj.bias",
                                                            "model_type"]),
    "one layer more": (add("model.layers.4.input_layernorm.weight"), ["model.layers.4.",
        "num_hidden_layers"]),
    "copy": (cut("model.norm.weight", 31), ["model.norm.weight", "(31,)", "(32,)", "config.json"]),
    "row": (
        cut(LAYER + "mlp.down_proj.weight", 32, 40),
        [LAYER + "mlp.down_proj.weight", "(32, 40)", "(32, 48)"],
    ),
    "gated": (
        cut(LAYER + "mlp.gate_proj.weight", 50, 32),
        [LAYER + "mlp.gate_proj.weight", "(50, 32)", "(48, 32)"],
    ),
    "gated, even in sum": (
        lambda values: [cut(LAYER + f"mlp.{x}_proj.weight", n, 32)(values) for x, n in (("gate",
            50), ("up", 46))],
        [LAYER + "mlp.gate_proj.weight", "(50, 32)"],
    ),
    "more queries": (cut(LAYER + "self_attn.q_proj.weight", 48, 32),
                     [LAYER + "self_attn.q_proj.weight", "(48, 32)"]),
    "fewer keys": (cut(LAYER + "self_attn.k_proj.weight", 8, 32),
                   [LAYER + "self_attn.k_proj.weight", "(8, 32)"]),
    "narrow values": (cut(LAYER + "self_attn.v_proj.weight", 16, 31),
                      [LAYER + "self_attn.v_proj.weight", "(16, 31)"]),
    "vocabulary": (cut(EMBEDDING, 60, 32), [EMBEDDING, "60", "vocab_size", "61"]),
    "vocabulary of the head": (cut("lm_head.weight", 64, 32), ["lm_head.weight", "64",
        "vocab_size", "61"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    return tiny.save_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="module")
def errors(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    paths = {name: changed(llama, folder / name, change) for name, (change, _) in BROKEN.items()}
    paths["none"] = str(folder / "none")
    Path(paths["none"]).mkdir()
    shutil.copy(f"{llama}/config.json", paths["none"])
    paths["shard gone"] = tiny.save_model(folder / "shard gone", "llama", max_shard_size="10KB")
    next(Path(paths["shard gone"]).glob("model-00002-of-*.safetensors")).unlink()
    return world.run(load_errors, 1, paths, {})[0]


@pytest.mark.parametrize("name", BROKEN)
def test_checkpoint_that_does_not_fit_is_refused_by_name(name, errors):
    for part in BROKEN[name][1]:
        assert part in errors[name], errors[name]


def test_folder_without_weights_says_what_was_expected(errors):
    for part in (
        "model.safetensors",
        "model.safetensors.index.json",
        "save_pretrained",
        "train_from_scratch: true",
    ):
        assert part in errors["none"], errors["none"]


def test_shard_that_is_gone_is_named(errors):
    for part in ("model-00002-of-", "No such file", "copy or download it again"):
        assert part in errors["shard gone"], errors["shard gone"]


def test_every_pipeline_rank_refuses_what_one_of_them_lacks(llama, tmp_path):
    """Else the others would wait for it in their next collective."""
    path = changed(llama, tmp_path / "in", drop("model.layers.3.mlp.up_proj.weight"))
    for error in world.run(load_error, 2, path, PP2):
        assert "lacks" in error and "model.layers.3.mlp.up_proj.weight" in error, error


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            dict(num_attention_heads=3, num_key_value_heads=3, hidden_size=36),
            ["3 attention heads", "tensor_model_parallel_size: 2"],
        ),
        (dict(intermediate_size=49), ["49", "tensor_model_parallel_size", "2"]),
    ],
    ids=["heads", "columns"],
)
def test_tensor_parallel_size_that_does_not_divide_is_refused(changes, parts, tmp_path):
    path = tiny.save_model(tmp_path / "model", "llama", **changes)
    for error in world.run(load_error, 2, path, TP2):
        assert all(part in error for part in parts), error


# files that are damaged

FIRST_SHARD = "model-00001-of-00002.safetensors"


def header_length(data: bytes, length: int) -> bytes:
    return length.to_bytes(8, "little") + data[8:]


DAMAGED = {
    "empty": lambda data: b"",
    "cut in its header": lambda data: data[:40],
    "cut by a byte": lambda data: data[:-1],
    "cut by half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
    "text": lambda data: b"version https://git-lfs.github.com/spec/v1\n",
    "header too long": lambda data: header_length(data, 1 << 62),
    "header no json": lambda data: data[:8] + b"x" + data[9:],
}


@pytest.mark.parametrize("name", ["model.safetensors", FIRST_SHARD])
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_weight_file_is_named(tmp_path, kind, name):
    values = {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4)}
    size = "1MB" if name == "model.safetensors" else 64
    write_safetensors(values.items(), tmp_path, size)
    path = tmp_path / name
    assert SafetensorsSource(str(tmp_path)).names() == set(values)
    path.write_bytes(DAMAGED[kind](path.read_bytes()))
    with pytest.raises(ValueError, match=f"{name} is damaged or cut") as caught:
        SafetensorsSource(str(tmp_path))
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "{}",
        "[1]",
        "[" * 100_000,
        '{"weight_map": {"a.weight": 3}}',
        '{"weight_map": []}',
    ]
    + [f'{{"weight_map": {{"a.weight": "../{FIRST_SHARD}"}}}}']
    + [f'{{"weight_map": {{"c.weight": "{FIRST_SHARD}"}}}}'],
)
def test_a_damaged_index_is_named(tmp_path, text):
    values = {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4)}
    write_safetensors(values.items(), tmp_path, 64)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        SafetensorsSource(str(tmp_path))


ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 100_000]
    + [
        json.dumps(ADAPTER | change)
        for change in (
            dict(r=None),
            dict(r="4"),
            dict(lora_alpha=[8]),
            dict(lora_dropout="much"),
            dict(modules_to_save="lm_head"),
            dict(bias={"a": 1}),
        )
    ],
)
def test_a_damaged_adapter_config_is_named(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        part_lora_files.read_adapter(tmp_path)


def test_an_adapter_that_is_damaged_or_lacks_a_matrix_is_named(tmp_path):
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    values = {f"{module}.lora_A.weight": torch.ones(4, 8)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    save_file(values, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=f"lacks {module}.lora_B.weight"):
        part_lora_files.read_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="adapter_model.safetensors is damaged or cut"):
        part_lora_files.read_adapter(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "mca_config.json"])
@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 100_000, '{"model_type": []}', '{"hidden_size": "x"}']
)
def test_a_damaged_model_config_is_named(llama, tmp_path, name, text):
    from mca_lite.model_config import AutoConfig

    shutil.copy(f"{llama}/config.json", tmp_path)
    if name == "mca_config.json":  # without it the file is mcore_adapter's, and passed over
        text = text.replace("{", '{"model_class": "McaModelConfig", ', 1)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        AutoConfig.from_pretrained(str(tmp_path))


def test_a_deepseek_without_experts_takes_adapters_on_the_torch_backend():
    import transformers

    with torch.device("meta"):
        config = tiny.hf_config("deepseek_v3", first_k_dense_replace=4)
        model = transformers.AutoModelForCausalLM.from_config(config)
    spec = part_lora.plan(model, part_lora.LoraSpec(rank=2, targets=("q_a_proj", "down_proj")))
    assert "model.layers.0.mlp.down_proj" in spec.modules


def plan_error(model: str, out, *words: str) -> str:
    """The text of the ValueError with which a run is refused before ranks meet."""
    from mca_lite import run
    from mca_lite.args import parse_args

    keys = [f"model_name_or_path={model}", "train_from_scratch=false", f"output_dir={out}", *words]
    with pytest.raises(ValueError) as caught:
        run.make_plan(parse_args([str(ROOT / "configs/sft.yaml"), *keys]))
    assert not torch.distributed.is_initialized() and not Path(out).exists()
    return str(caught.value)


@pytest.mark.parametrize("name", BROKEN)
def test_weights_that_do_not_fit_config_json_are_refused_before_ranks_meet(llama, tmp_path, name):
    change, parts = BROKEN[name]
    path = changed(llama, tmp_path / "in", change)
    has_shape = any("(" in part or part.isdigit() for part in parts)
    for words in (["use_mca=true"], ["use_mca=false"])[: 1 + has_shape]:
        text = plan_error(path, tmp_path / "out", *words)
        assert parts[0] in text and (not has_shape or "has shape" in text), text


def test_plain_torch_draws_no_weight_that_the_files_lack(llama, tmp_path):
    from mca_lite.model import load_torch_model

    path = changed(llama, tmp_path / "in", drop(LAYER + "mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=f"the checkpoint lacks {LAYER}mlp.up_proj.weight"):
        load_torch_model(path)
    path = changed(llama, tmp_path / "cut", cut("model.norm.weight", 31))
    with pytest.raises(ValueError, match=r"model.norm.weight of shape \(31,\) instead of \(32,\)"):
        load_torch_model(path)


@pytest.mark.parametrize("text", ["", "null", "[" * 100_000, "[1]", '{"model": 3}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_named(tmp_path, name, text):
    from mca_lite.run import load_tokenizer

    shutil.copytree(ROOT / "configs/tiny/model", tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    with pytest.raises(ValueError, match=f"(?s){tmp_path}/model.*no tokenizer could be loaded"):
        load_tokenizer(tmp_path / "model", False)


def test_a_damaged_generation_config_is_named(llama, tmp_path):
    path = changed(llama, tmp_path / "in", lambda values: None)
    Path(path, "generation_config.json").write_text("null")
    assert "generation_config.json: expected a JSON object" in plan_error(path, tmp_path / "out")


ALL = [(tiny, name) for name in (*tiny.FAMILY_KEYS, *tiny.MORE_KEYS)]
ALL += [(tiny_moe, name) for name in tiny_moe.MODELS]


@pytest.mark.parametrize("maker, name", ALL, ids=lambda value: getattr(value, "__name__", value))
def test_the_files_of_every_family_fit_their_config_json(tmp_path, maker, name):
    from mca_lite import model_config, run
    from mca_lite.model import load_torch_model

    path = maker.save_model(tmp_path / "model", name)
    args = TrainingArguments(output_dir="unused")
    for config in (
        model_config.AutoConfig.from_pretrained(path, args),
        load_torch_model(path).config,
    ):
        planned = run.PlannedModel(Path(path), config, config.vocab_size, config.vocab_size)
        run.open_source(planned)
        assert planned.source.names()


def test_shapes_of_a_class_that_is_not_transformers_own_are_not_kept(tmp_path, monkeypatch):
    import transformers

    monkeypatch.setenv("MCA_LITE_CACHE", str(tmp_path))
    hf_config = tiny.hf_config("llama").to_dict()

    class Mine(transformers.LlamaConfig):
        pass

    with monkeypatch.context() as patch:
        make = lambda **keys: Mine(**keys)  # noqa: E731
        patch.setattr(transformers.AutoConfig, "for_model", make)
        patch.setattr(weights_files, "model_class", lambda hf: Whole)
        weights_files.shapes_of.__wrapped__(json.dumps(hf_config))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(transformers, "__version__", "5.99.0.dev0")
    weights_files.shapes_of.__wrapped__(json.dumps(hf_config))
    assert not list(tmp_path.iterdir())


class Whole:
    """In place of an auto class."""

    @staticmethod
    def from_config(hf):
        import transformers

        return transformers.LlamaForCausalLM(hf)


def test_shapes_of_a_model_are_kept_for_later_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("MCA_LITE_CACHE", str(tmp_path))
    hf_config = json.dumps(tiny.hf_config("llama").to_dict())
    shapes = weights_files.shapes_of.__wrapped__(hf_config)[1]
    (file,) = (tmp_path / "shapes").iterdir()
    written = file.stat().st_mtime_ns

    def none(hf):
        raise AssertionError("transformers' class was asked for")

    with monkeypatch.context() as patch:
        patch.setattr(weights_files, "model_class", none)
        assert weights_files.shapes_of.__wrapped__(hf_config)[1] == shapes
        with pytest.raises(ValueError, match="transformers makes no model"):
            weights_files.shapes_of.__wrapped__(hf_config.replace("llama", "mistral"))
        kept = file.read_text()
        for text in (kept[:-9], kept.replace("[32]", "[33]", 1), "", "[]", "{}", '{"a": 5}'):
            file.write_text(text)
            with pytest.raises(ValueError, match="class was asked for"):
                weights_files.shapes_of.__wrapped__(hf_config)
    assert weights_files.shapes_of.__wrapped__(hf_config)[1] == shapes
    assert file.stat().st_mtime_ns > written and list((tmp_path / "shapes").iterdir()) == [file]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_a_device_in_place_of_kept_shapes_is_replaced(tmp_path, monkeypatch, make):
    monkeypatch.setenv("MCA_LITE_CACHE", str(tmp_path))
    hf_config = json.dumps(tiny.hf_config("llama").to_dict())
    shapes = weights_files.shapes_of.__wrapped__(hf_config)[1]
    (file,) = (tmp_path / "shapes").iterdir()
    kept = file.read_bytes()
    file.unlink()
    make(file)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
        assert weights_files.shapes_of.__wrapped__(hf_config)[1] == shapes
    assert not file.is_symlink() and file.read_bytes() == kept


@pytest.mark.parametrize("folder", ["file", "~nobody_of_this_name/cache"])
def test_a_cache_that_cannot_be_written_keeps_no_shapes(tmp_path, monkeypatch, folder):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MCA_LITE_CACHE", folder)
    hf_config = json.dumps(tiny.hf_config("llama").to_dict())
    assert weights_files.shapes_of.__wrapped__(hf_config)[1]["model.norm.weight"] == (32,)


def test_a_folder_without_a_tokenizers_vocabulary_is_called_one(tmp_path):
    from mca_lite.model_config import load_tokenizer

    tiny.hf_config("llama").save_pretrained(tmp_path)
    for kind in (None, "LlamaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"):
        if kind:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
        with pytest.raises(ValueError, match="no tokenizer could be loaded.*it has no vocabulary"):
            load_tokenizer(tmp_path, False)
