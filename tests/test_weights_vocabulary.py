"""New tokens: embedding and head grow alike in every layout and on both backends, are trained,
exported, merged, resumed.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.shared import tiny, world
from tests.shared.commands import convert, error_of
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.layouts import DIST_OPT, PP2, SAVE, SP, TP2, VPP2
from tests.shared.lora_tools import (
    adapter_of,
    logits,
    peft_model,
    train_from_adapter,
    train_with_peft,
)
from tests.shared.toy_tokenizer import word_tokenizer
from tests.shared.training import BRIEF, arguments, assert_same_curve, read_log, train

GROWN = tiny.VOCAB + 2  # odd: tensor parallelism has to pad it
LAYOUTS = {
    "one": (1, {}),
    "tp2_sp_dist_opt": (2, {**TP2, **SP, **DIST_OPT}),
    "pp2_vpp2": (2, {**PP2, **VPP2}),
    "torch": (2, dict(backend="torch")),
}
BOTH = ("embed_tokens", "lm_head")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """{family: (model folder, the folder of the same model grown by transformers)}: mistral's head
    is its own, qwen3's the embedding.
    """
    made = {}
    for family in ("mistral", "qwen3"):
        folder = tmp_path_factory.mktemp(family)
        path = tiny.save_model(folder / "model", family)
        made[family] = path, grown_by_hand(path, folder / "grown")
    return made


def grown_by_hand(path: str, folder: Path) -> str:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    old = {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if name in (EMBEDDING, HEAD)
    }
    model.resize_token_embeddings(GROWN, mean_resizing=False)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in old:
                tensor[tiny.VOCAB :] = old[name].double().mean(0).float()
    model.save_pretrained(folder)
    return str(folder)


def loaded(path: str, out: str, backend="megatron", **keys) -> None:
    """A grown model, exported as it is loaded."""
    from mca_lite.args import TrainingArguments
    from mca_lite.model import AutoModel, load_torch_model

    if backend == "torch":
        load_torch_model(path, vocab_size=GROWN).save_pretrained(out)
    else:
        args = TrainingArguments(output_dir="unused", global_batch_size=8, **keys)
        AutoModel.from_pretrained(path, args, vocab_size=GROWN).save_pretrained(out)


@pytest.mark.parametrize(
    "family, layout",
    [
        ("mistral", "tp2_sp_dist_opt"),
        ("mistral", "torch"),
        ("qwen3", "pp2_vpp2"),
        ("qwen3", "torch"),
    ],
)
def test_new_rows_begin_as_the_mean_of_the_old_ones_in_every_layout(
    bases, family, layout, tmp_path
):
    from transformers import AutoModelForCausalLM

    path, by_hand = bases[family]
    ranks, keys = LAYOUTS[layout]
    ranks = 1 if layout == "torch" else ranks
    world.run(loaded, ranks, path, str(tmp_path), **keys)
    got, wanted = tensors(tmp_path), tensors(by_hand)
    assert got.keys() == wanted.keys() and all(
        torch.equal(got[name], wanted[name]) for name in wanted
    )
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == GROWN
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path).get_input_embeddings().weight.shape[0]
        == GROWN
    )


def test_a_bf16_model_grows_by_rows_of_its_own_precision(tmp_path):
    path = tiny.save_model(tmp_path / "model", "mistral", dtype=torch.bfloat16)
    for backend in ("megatron", "torch"):
        world.run(loaded, 1, path, str(tmp_path / backend), backend)
        for name in (EMBEDDING, HEAD):
            mean = tensors(path)[name].double().mean(0).bfloat16().float()
            assert all(
                torch.equal(row.float(), mean)
                for row in tensors(tmp_path / backend)[name][tiny.VOCAB :]
            )


@pytest.mark.parametrize(
    "family, layouts",
    [("mistral", ("one", "pp2_vpp2", "torch")), ("qwen3", ("tp2_sp_dist_opt", "pp2_vpp2"))],
)
def test_a_grown_model_trains_in_every_layout_as_the_one_grown_by_hand(
    bases, family, layouts, tmp_path
):
    path, by_hand = bases[family]
    keys = dict(BRIEF, export=True, adam_epsilon=1e-4)
    [curve] = world.run(from_grown, 1, by_hand, str(tmp_path / "torch"), **keys)
    wanted = tensors(tmp_path / "torch")
    before = tensors(by_hand)[EMBEDDING][tiny.VOCAB :]
    assert (wanted[EMBEDDING][tiny.VOCAB :] - before).abs().max() > 1e-3, (
        "the new rows were not trained"
    )
    for layout in layouts:
        out, (ranks, changes) = tmp_path / layout, LAYOUTS[layout]
        for got in world.run(train, ranks, path, str(out), vocab_size=GROWN, **keys, **changes):
            assert_same_curve(got, curve)
        for name, tensor in tensors(out).items():
            torch.testing.assert_close(
                tensor, wanted[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def from_grown(path: str, out: str, **keys) -> list:
    """Plain torch on a model that has the new rows already."""
    tiny.VOCAB = GROWN
    return train(path, out, backend="torch", **keys)


def test_a_grown_run_resumes_in_another_layout_and_its_checkpoint_converts(bases, tmp_path):
    path, run = bases["mistral"][0], tmp_path / "run"
    keys = {**SAVE, "steps": 4, "vocab_size": GROWN, "adam_epsilon": 1e-4}
    whole = world.run(train, 2, path, str(run), **keys, **TP2)[0]
    shutil.rmtree(run / "checkpoint-4")
    got = world.run(
        train,
        2,
        path,
        str(run),
        **keys,
        **PP2,
        **DIST_OPT,
        export=True,
        resume_from_checkpoint="auto",
    )[0]
    assert_same_curve(got, whole, 5e-6)
    code, _, error = convert(run / "checkpoint-4", tmp_path / "hf", "--verify")
    assert code == 0, error
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == GROWN
    assert all(
        torch.equal(tensor, tensors(run)[name]) for name, tensor in tensors(tmp_path / "hf").items()
    )
    [error] = world.run(refused, 1, str(run / "checkpoint-4"), GROWN + 1)
    assert f"a checkpoint of a model of {GROWN} tokens" in error and "mca_lite convert" in error
    [error] = world.run(refused, 1, path, GROWN - 10)
    assert "cannot lose any" in error


def refused(path: str, vocab_size: int) -> str:
    from mca_lite.model import AutoModel

    return error_of(AutoModel.from_pretrained, path, arguments(), vocab_size=vocab_size)


# -- with adapters ---------------------------------------------------------------------------------


def peft_on_grown(path: str, folder: str) -> list:
    tiny.VOCAB = GROWN
    return train_with_peft(
        path, folder, targets=("q_proj", "down_proj"), modules_to_save=list(BOTH)
    )


@pytest.fixture(scope="module")
def reference(bases, tmp_path_factory):
    """(folder of peft's adapters on the model grown by hand, their curve)"""
    folder = tmp_path_factory.mktemp("peft")
    return folder, world.run(peft_on_grown, 1, bases["mistral"][1], str(folder))[0]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_new_tokens_are_trained_beside_adapters_as_with_peft(bases, reference, layout, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path, (folder, curve) = bases["mistral"][0], reference
    ranks, keys = LAYOUTS[layout]
    start = str(folder / "start")
    keys = {**BRIEF, **keys, "vocab_size": GROWN}
    for got in world.run(train_from_adapter, ranks, path, str(tmp_path), start, **keys):
        assert_same_curve(got, curve)
    ours, theirs = adapter_of(tmp_path), adapter_of(folder / "end")
    assert_same_tensors(ours, theirs)
    assert ours[f"base_model.model.{EMBEDDING}"].shape[0] == GROWN
    base = AutoModelForCausalLM.from_pretrained(path)
    base.resize_token_embeddings(GROWN, mean_resizing=False)  # peft demands it of its users
    model = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    own = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(bases["mistral"][1]), str(folder / "end")
    ).eval()
    tokens = torch.arange(GROWN)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, own(tokens).logits, rtol=0, atol=1e-4)


def test_an_adapter_with_new_tokens_is_merged_into_its_smaller_base(bases, reference, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    (path, by_hand), (folder, _) = bases["mistral"], reference
    shutil.copytree(folder / "end", tmp_path / "adapter")
    (tmp_path / "adapter" / "tokenizer.json").write_text('{"of": "the adapter"}')
    code, _, error = convert(path, tmp_path / "out", "--merge", tmp_path / "adapter", "--verify")
    assert code == 0, error
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (
        merged.config.vocab_size == GROWN
        and "adapter" in (tmp_path / "out" / "tokenizer.json").read_text()
    )
    own = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(by_hand), str(folder / "end")
    ).merge_and_unload()
    for name, tensor in tensors(tmp_path / "out").items():
        torch.testing.assert_close(tensor, own.state_dict()[name], rtol=0, atol=1e-6)


def loads(path: str, adapter: str, backend: str) -> str:
    from mca_lite.args import TrainingArguments
    from mca_lite.model import AutoModel, load_torch_model
    from tests.shared.lora_tools import load

    args = TrainingArguments(output_dir="unused")
    try:
        load(
            adapter,
            load_torch_model(path) if backend == "torch" else AutoModel.from_pretrained(path, args),
        )
    except ValueError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_an_embedding_that_peft_writes_beside_an_adapter_is_not_lost(bases, family, tmp_path):
    from transformers import AutoModelForCausalLM

    path, model = bases[family][0], peft_model(bases[family][0], ["q_proj"])
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    model.save_pretrained(tmp_path / "other", save_embedding_layers=True)
    for backend in ("megatron", "torch"):
        [error] = world.run(loads, 1, path, str(tmp_path / "other"), backend)
        assert HEAD in error and "--merge" in error
    code, _, error = convert(path, tmp_path / "out", "--merge", tmp_path / "other", "--verify")
    assert code == 0, error
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)


# -- by keys ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(bases, tmp_path_factory):
    """A folder with mistral/ and qwen3/, of 61 tokens with a tokenizer of 60, and data that speaks
    of two new words.
    """
    folder = tmp_path_factory.mktemp("keys")
    for family, (path, _) in bases.items():
        shutil.copytree(path, folder / family)
        tokenizer = word_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}<|im_start|> {{ m['content'] }} <|im_end|> {% endfor %}"
        )
        tokenizer.save_pretrained(folder / family)
    turns = [[f"w{i} new w{i + 1}", f"w{i + 2} newer <special> w{i}"] for i in range(16)]
    lines = [
        {
            "messages": [
                {"role": r, "content": t} for r, t in zip(("user", "assistant"), pair, strict=True)
            ]
        }
        for pair in turns
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


NEW = "add_tokens=new,newer add_special_tokens=<special>"


def main(place: str, family: str, out: str, words: str = NEW) -> tuple[int, str]:
    """(exit code, everything that was printed) of a run by keys."""
    import contextlib
    import io

    from mca_lite import cli

    common = (
        f"model_name_or_path={place}/{family} stage=sft dataset={place}/data.jsonl "
        f"cache_dir={place}/cache cutoff_len=32"
    )
    common += (
        " global_batch_size=4 max_steps=3 logging_steps=1 save_strategy=no "
        "learning_rate=1e-2 adam_epsilon=1e-4"
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = cli.main([*common.split(), *words.split(), f"output_dir={out}"])
    return code, printed.getvalue()


OF_MEGATRON = "modules_to_save=word_embeddings,output_layer"  # its names of the same modules


@pytest.mark.parametrize(
    ("kind", "keys"), [("full", ""), ("lora", "lora_rank=4"), ("lora", OF_MEGATRON)]
)
def test_keys_add_tokens_and_both_backends_agree(place, kind, keys, tmp_path):
    from transformers import AutoTokenizer

    words = f"{NEW} finetuning_type={kind} {keys}"
    for name, ranks, layout in (
        ("tp2", 2, "tensor_model_parallel_size=2"),
        ("torch", 1, "use_mca=false"),
    ):
        code, shown = world.run(
            main, ranks, str(place), "mistral", str(tmp_path / name), f"{words} {layout}"
        )[0]
        assert code == 0, shown
        assert "vocabulary: 3 new tokens, 61 -> 63 rows" in shown
        assert ("modules_to_save is embed_tokens, lm_head" in shown) == (keys == "lora_rank=4")
    ours, theirs = read_log(tmp_path / "tp2"), read_log(tmp_path / "torch")
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["grad_norm"] == pytest.approx(
            b["grad_norm"], rel=1e-5
        )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tp2")
    assert tokenizer("w0 newer <special>")["input_ids"] == [4, 61, 62] and len(tokenizer) == 63
    assert tokenizer.decode([4, 61, 62], skip_special_tokens=True).split() == ["w0", "newer"]
    if kind == "full":
        config = json.loads((tmp_path / "tp2" / "config.json").read_text())
        assert config["vocab_size"] == tensors(tmp_path / "tp2")[EMBEDDING].shape[0] == 63
    else:
        adapter = load_file(tmp_path / "tp2" / "adapter_model.safetensors")
        assert adapter[f"base_model.model.{HEAD}"].shape[0] == 63
        saved = json.loads((tmp_path / "tp2" / "adapter_config.json").read_text())
        assert saved["modules_to_save"] == [*BOTH]
        assert "modules_to_save" in (tmp_path / "tp2" / "config.yaml").read_text()


def test_new_tokens_that_would_stay_untrained_or_unknown_are_refused(place, tmp_path):
    cases = [
        (
            "qwen3",
            f"{NEW} finetuning_type=lora",
            "model's embedding is its head\n    try: finetuning_type: full",
        ),
        (
            "mistral",
            f"{NEW} finetuning_type=lora modules_to_save=lm_head",
            "3 new tokens would not be trained: embed_tokens",
        ),
        ("mistral", f"{NEW} finetuning_type=lora lora_target=lm_head", "it is in lora_target too"),
    ]
    larger = tmp_path / "larger"
    shutil.copytree(place / "mistral", larger)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (place / "mistral" / "chat_template.jinja").read_text()
    tokenizer.add_tokens(["new", "newer", "<special>"])
    tokenizer.save_pretrained(larger)
    cases.append((str(larger), "", "the tokenizer has 63 tokens, and the model's vocab_size is 61"))
    for model, words, wanted in cases:
        words += "" if "/" not in model else f" model_name_or_path={model}"
        code, shown = world.run(main, 1, str(place), model, str(tmp_path / "out"), words)[0]
        assert code == 2 and wanted in shown, shown
        assert not (tmp_path / "out").exists()
    words = f"model_name_or_path={larger} resize_vocab=true use_mca=false"
    code, shown = world.run(main, 1, str(place), "mistral", str(tmp_path / "out"), words)[0]
    assert code == 0 and "vocabulary: 2 new tokens, 61 -> 63 rows" in shown, shown


def test_tokens_for_which_there_are_rows_already_leave_them_as_they_are(place, tmp_path):
    code, shown = world.run(
        main, 1, str(place), "mistral", str(tmp_path), "add_tokens=new learning_rate=1e-9"
    )[0]
    assert code == 0 and "vocabulary: 1 new token\n" in shown, shown
    torch.testing.assert_close(
        tensors(tmp_path)[EMBEDDING], tensors(place / "mistral")[EMBEDDING], rtol=0, atol=1e-6
    )
    code, shown = world.run(
        main, 1, str(place), "mistral", str(tmp_path / "known"), "add_tokens=w3 max_steps=1"
    )[0]
    assert code == 0 and "new token" not in shown
