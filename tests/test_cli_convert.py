"""`python -m mca_lite convert`, and the Hugging Face folders that checkpoints hold."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mca_lite.args import parse_args
from mca_lite.errors import ConfigError
from mca_lite.files import lies_in
from mca_lite.model_config import AutoConfig
from tests.shared import tiny, tiny_moe, world
from tests.shared.chats import conversation, write_records
from tests.shared.commands import convert, run_script
from tests.shared.files import assert_same_bytes, flip_bit, tensors
from tests.shared.layouts import DIST_OPT, PP2, TP2
from tests.shared.small_runs import save_all
from tests.shared.toy_tokenizer import CHATML, byte_tokenizer
from tests.shared.training import train


def command(words: list[str]) -> int:
    from mca_lite.tool_convert import main

    return main(words)


@pytest.mark.parametrize("family, dtype", [("qwen3", torch.float32), ("llama", torch.bfloat16)])
def test_a_round_trip_gives_the_same_bytes(tmp_path, family, dtype):
    source = tiny.save_model(tmp_path / "hf", family, dtype=dtype)
    (tmp_path / "hf" / "modeling_own.py").write_text("# code of the model's own\n")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    assert world.run(command, 1, [source, str(tmp_path / "mca"), "--verify"]) == [0]
    assert (tmp_path / "mca" / "dist" / "index.json").is_file()
    assert (tmp_path / "mca" / "mca_config.json").is_file()
    assert world.run(command, 1, [str(tmp_path / "mca"), str(tmp_path / "back"), "--verify"]) == [0]
    assert_same_bytes(tensors(tmp_path / "back"), tensors(tmp_path / "hf"))
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.glob("mca/*.py")) and not list(tmp_path.glob("back/*.py"))


def test_files_beside_a_model_are_copied_by_name_and_from_within_its_folder(tmp_path):
    source = tiny.save_model(tmp_path / "hf", "llama")
    assert world.run(command, 1, [source, str(tmp_path / "mca")]) == [0]
    named = tmp_path / "hf"  # the checkpoint names it, whatever lies there later
    secret = tmp_path / "secret"
    secret.write_text('{"auths": "secret"}')
    for name in ("config.json", "tokenizer.json", "tokenizer_secret.json", "vocabulary", "a.model"):
        (named / name).write_text(secret.read_text())
    (named / "credentials.py").write_text("token = 'secret'")
    (named / "vocab.json").symlink_to(secret)
    for folder in (named, tmp_path / "mca"):
        (folder / "generation_config.json").unlink()
    (named / "generation_config.json").symlink_to(secret)
    (named / "merges.txt").symlink_to("vocabulary")
    (tmp_path / "mca" / "vocab.txt").symlink_to("/dev/null")
    code, out, error = convert(tmp_path / "mca", tmp_path / "dst")
    assert code == 0, error
    names = {"config.json", "model.safetensors", "tokenizer.json", "merges.txt"}
    assert {path.name for path in (tmp_path / "dst").iterdir()} == names
    assert "secret" not in (tmp_path / "dst" / "config.json").read_text()


def test_the_links_of_the_hubs_cache_lie_in_its_snapshot(tmp_path):
    snapshot = tmp_path / "models--a" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a" / "blobs").mkdir()
    (tmp_path / "models--a" / "blobs" / "abc").touch()
    (tmp_path / "other").touch()
    links = {"blob": "../../blobs/abc", "out": "../../../other", "loop": "loop", "gone": "nothing"}
    for name, target in links.items():
        (snapshot / name).symlink_to(target)
    assert [name for name in links if lies_in(snapshot / name, snapshot)] == ["blob"]


def test_a_type_that_transformers_does_not_know_is_verified_too(tmp_path):
    source = tiny_moe.save_model(tmp_path / "hf", "deepseek_v3", num_hidden_layers=2)
    text = (
        (tmp_path / "hf/config.json")
        .read_text()
        .replace('"model_type": "deepseek_v3"', '"model_type": "kimi_k2"')
    )
    (tmp_path / "hf/config.json").write_text(text)
    assert world.run(command, 1, [source, str(tmp_path / "mca"), "--verify"]) == [0]
    assert "kimi_k2" in text


def test_a_checkpoint_of_any_layout_becomes_the_model_that_training_exports(tmp_path):
    source = tiny.save_model(tmp_path / "hf", "qwen2")
    keys = dict(
        save_strategy="steps", save_steps=2, save_hf_checkpoints=True, **PP2, **TP2, **DIST_OPT
    )
    world.run(train, 4, source, str(tmp_path / "run"), steps=2, export=True, **keys)
    folder = tmp_path / "run" / "checkpoint-2"
    code, out, error = convert(folder, tmp_path / "out", "--verify")
    assert code == 0 and "verified" in out and "its tokenizer is that of" in out, out + error
    wanted = tensors(tmp_path / "run")
    assert_same_bytes(tensors(tmp_path / "out"), wanted)
    assert_same_bytes(tensors(folder / "hf"), wanted)
    flip_bit(folder / "dist" / "__2_0.distcp")
    assert world.run(command, 1, [str(folder), str(tmp_path / "again")]) == [2]


def test_training_starts_from_a_converted_checkpoint_as_from_the_model(tmp_path):
    source = tiny.save_model(tmp_path / "hf", "mistral")
    world.run(command, 1, [source, str(tmp_path / "mca")])
    wanted = world.run(train, 2, source, str(tmp_path / "a"), steps=2, **TP2)
    assert world.run(train, 2, str(tmp_path / "mca"), str(tmp_path / "b"), steps=2, **TP2) == wanted


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_the_torch_backend_and_megatron_put_the_model_into_checkpoints_as_asked(tmp_path, backend):
    source = tiny.save_model(tmp_path / "hf", "qwen3")
    keys = dict(
        save_strategy="steps",
        save_steps=2,
        save_hf_checkpoints=True,
        save_only_model=True,
        async_save=True,
    )
    world.run(
        train, 2, source, str(tmp_path / "run"), steps=2, export=True, backend=backend, **keys
    )
    folder = tmp_path / "run" / "checkpoint-2"
    assert_same_bytes(tensors(folder / "hf"), tensors(tmp_path / "run"))
    assert not (folder / "optimizer.safetensors").exists()
    assert '"hf/config.json"' in (folder / "manifest.json").read_text()


def run_with_hf_folders(folder: str) -> int:
    from mca_lite import cli

    words = "save_strategy=steps save_steps=1 save_hf_checkpoints=true max_steps=1 bf16=false"
    words += f" model_name_or_path={folder}/model dataset={folder}/chat.jsonl cutoff_len=40"
    return cli.main([*words.split(), f"output_dir={folder}/out", f"cache_dir={folder}/cache"])


def test_the_models_of_checkpoints_have_the_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    save_all(tmp_path, "llama", num_hidden_layers=2)
    assert world.run(run_with_hf_folders, 1, str(tmp_path)) == [0]
    folder = tmp_path / "out" / "checkpoint-1"
    got, wanted = (AutoTokenizer.from_pretrained(x) for x in (folder / "hf", tmp_path / "model"))
    assert got.get_vocab() == wanted.get_vocab() and got.chat_template == wanted.chat_template
    assert '"hf/tokenizer.json"' in (folder / "manifest.json").read_text()


def test_tensors_that_no_model_reads_are_carried_over(tmp_path):
    source = tiny.save_model(tmp_path / "hf", "llama")
    path = tmp_path / "hf" / "model.safetensors"
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(4.0)}
    save_file({**load_file(path), **extra}, path, metadata={"format": "pt"})
    world.run(train, 2, source, str(tmp_path / "run"), steps=2, export=True, **TP2)
    assert torch.equal(tensors(tmp_path / "run")[next(iter(extra))], extra[next(iter(extra))])


def mcore_adapters_folder(folder: Path) -> Path:
    """Weights and config.json of Hugging Face's beside mcore_adapter's own configuration."""
    source = Path(tiny.save_model(folder, "qwen3", dtype=torch.bfloat16))
    fields = {
        "hf_model_type": "qwen3",
        "hf_config_json": (source / "config.json").read_text(),
        "name_or_path": "/elsewhere/model",
        "padded_vocab_size": 64,
        "swiglu": True,
        "tensor_model_parallel_size": 2,
        "num_layers": 4,
        "bf16": True,
    }
    (source / "mca_config.json").write_text(json.dumps(fields))
    return source


def test_a_folder_of_mcore_adapter_is_read_as_the_model_beside_its_configuration(tmp_path):
    source = mcore_adapters_folder(tmp_path / "hf")
    words = [f"model_name_or_path={source}", "dataset=d.jsonl", f"output_dir={tmp_path}/out"]
    run = parse_args(words)
    config = AutoConfig.from_pretrained(str(source), run.training)
    assert (config.num_layers, config.vocab_size) == (4, tiny.VOCAB)
    assert config.tensor_model_parallel_size == 1
    assert world.run(command, 1, [str(source), str(tmp_path / "mca"), "--verify"]) == [0]
    assert world.run(command, 1, [str(tmp_path / "mca"), str(tmp_path / "back")]) == [0]
    assert_same_bytes(tensors(tmp_path / "back"), tensors(source))


@pytest.mark.parametrize("inside", ["", "/iter_0000001"])
def test_a_checkpoint_in_mcore_adapters_own_format_is_refused_with_its_export(
    tmp_path, inside, capsys
):
    source = mcore_adapters_folder(tmp_path / "mcore")
    (source / "model.safetensors").unlink()
    (source / "iter_0000001/mp_rank_00").mkdir(parents=True)
    (source / "latest_checkpointed_iteration.txt").write_text("1")
    named, export = f"{source}{inside}", f"--checkpoint_path {source} --output_path DST"
    words = [f"model_name_or_path={named}", "dataset=d.jsonl", f"output_dir={tmp_path}/out"]
    for call in (lambda: parse_args(words), lambda: AutoConfig.from_pretrained(named)):
        with pytest.raises(ConfigError) as error:
            call()
        (problem,) = error.value.problems
        assert "mcore_adapter's own format" in problem.reason and export in problem.suggestion
    assert command([named, str(tmp_path / "dst")]) and export in capsys.readouterr().err


def test_a_checkpoint_brings_the_tokenizer_of_its_run(tmp_path):
    """Its weights have rows of new tokens, which the model before training does not know; here the
    run left checkpoints alone. Named chat templates are files in a folder of their own."""
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer({"default": CHATML, "tool_use": f"{CHATML}<tools>"})
    path = tiny.save_model(tmp_path / "model", "llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(path)
    data = write_records(tmp_path / "data.jsonl", *[conversation("a<new>", "b")] * 4)
    words = f"model_name_or_path={path} dataset={data} output_dir={tmp_path / 'out'} cutoff_len=64"
    words += " add_tokens=<new> max_steps=1 save_steps=1 global_batch_size=4 save_hf_model=false"
    run_script(words, tmp_path)
    code, _, error = convert(tmp_path / "out" / "checkpoint-1", tmp_path / "hf")
    assert code == 0, error
    (tmp_path / "out" / "checkpoint-1").rename(tmp_path / "out" / "set-aside-checkpoint-1")
    code, _, error = convert(tmp_path / "out" / "set-aside-checkpoint-1", tmp_path / "aside")
    assert code == 0 and (tmp_path / "aside" / "tokenizer.json").is_file(), error
    found = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert found("<new>")["input_ids"] == [len(tokenizer)]
    assert found.chat_template == tokenizer.chat_template
    for src, dst in (("hf", "mca"), ("mca", "back")):
        code, _, error = convert(tmp_path / src, tmp_path / dst)
        assert code == 0, error
    back = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert back.chat_template == tokenizer.chat_template and len(back) == len(found)
