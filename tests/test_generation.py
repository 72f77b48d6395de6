"""Answers of trained models: loaded from what a run or PEFT wrote, and generated in batches as
transformers generates them one by one.
"""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from mca_lite import tool_generation
from mca_lite.errors import ConfigError
from mca_lite.tool_convert import merge
from mca_lite.tool_generation import Decoding, load_for_generation
from tests.shared import tiny, tiny_moe, world
from tests.shared.lora_tools import EVERYTHING, TARGETS, peft_model, save_start
from tests.shared.small_runs import save_tokenizer, train_by_words, write_data

PROMPTS = [[7, 9, 12], [5], [8, 30, 31, 32, 33, 4, 6], [11, 2]]

SHORT = Decoding(max_new_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def llama_with_tokenizer(tmp_path_factory):
    path = tiny.save_model(tmp_path_factory.mktemp("generation") / "model", "llama")
    save_tokenizer(path)
    return path


def greedy_by_transformers(model, prompt: list[int], **keys) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **keys)
    return output[0, len(prompt) :].tolist()


def test_greedy_batches_are_what_transformers_generates_from_each_prompt(llama_with_tokenizer):
    from transformers import AutoModelForCausalLM

    model, tokenizer = load_for_generation(llama_with_tokenizer)
    oracle = AutoModelForCausalLM.from_pretrained(llama_with_tokenizer)
    wanted = [
        greedy_by_transformers(
            oracle, prompt, do_sample=False, max_new_tokens=12, eos_token_id=None
        )
        for prompt in PROMPTS
    ]
    for size in (1, 3, 32):
        assert tool_generation.continuations(model, PROMPTS, [], SHORT, size) == wanted
    stop = [wanted[0][5], wanted[2][3]]
    ended = [
        row[: min([row.index(token) for token in stop if token in row], default=12)]
        for row in wanted
    ]
    assert tool_generation.continuations(model, PROMPTS, stop, SHORT, 3) == ended
    assert sorted(map(len, ended))[0] < 12
    texts = [tokenizer.decode(row) for row in wanted]
    found = tool_generation.answers(model, tokenizer, PROMPTS, SHORT)
    assert all(text.startswith(answer) for text, answer in zip(texts, found, strict=True))


def test_a_prompt_near_the_last_position_cuts_no_other_answer(llama_with_tokenizer):
    """Each prompt has the model's 128 positions for itself, whichever share its batch."""
    model, _ = load_for_generation(llama_with_tokenizer)
    long = torch.randint(4, 60, (128,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [[7, 9, 12], long[:120], long, long[:123], [5]]
    sizes = [12, 8, 1, 5, 12]
    wanted = [
        greedy_by_transformers(
            model, prompt, do_sample=False, max_new_tokens=size, eos_token_id=None
        )
        for prompt, size in zip(prompts, sizes, strict=True)
    ]
    for size in (1, 2, 32):
        assert tool_generation.continuations(model, prompts, [], SHORT, size) == wanted


def test_greedy_answers_of_a_model_that_samples_give_no_warning(llama_with_tokenizer, monkeypatch):
    model, _ = load_for_generation(llama_with_tokenizer)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_k=20)
    said = []
    for name in ("warning", "warning_once"):
        there = f"transformers.generation.configuration_utils.logger.{name}"
        monkeypatch.setattr(there, lambda text, *args: said.append(text))
    found = tool_generation.continuations(model, [[5, 6]], [], SHORT)
    assert said == []
    assert found == [
        greedy_by_transformers(model, [5, 6], max_new_tokens=12, do_sample=False, eos_token_id=None)
    ]
    config = GenerationConfig(do_sample=False, max_new_tokens=12)  # whose None is the model's value
    assert found == [greedy_by_transformers(model, [5, 6], generation_config=config)]
    assert "temperature" in str(said)


def test_sampling_is_transformers_own_with_the_same_seed(llama_with_tokenizer):
    model, _ = load_for_generation(llama_with_tokenizer)
    model.generation_config.update(
        do_sample=True, top_k=7, max_new_tokens=9, repetition_penalty=1.3
    )
    for given in (dict(temperature=1.7, top_p=0.8), dict(temperature=0.4), dict(top_p=0.5), {}):
        torch.manual_seed(3)
        wanted = greedy_by_transformers(
            model, PROMPTS[2], eos_token_id=None, do_sample=True, **given
        )
        torch.manual_seed(3)
        found = tool_generation.continuations(model, PROMPTS[2:3], [], Decoding(**given))
        assert found == [wanted] and len(wanted) == 9
    greedy = tool_generation.continuations(model, PROMPTS[2:3], [])
    assert greedy == [greedy_by_transformers(model, PROMPTS[2], eos_token_id=None, do_sample=False)]


def test_an_answer_ends_where_config_tokenizer_or_template_end_it(llama_with_tokenizer):
    model, tokenizer = load_for_generation(llama_with_tokenizer)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == 0
    assert tool_generation.stop_ids(model, tokenizer) == [0, tokenizer.eos_token_id, end_of_turn]
    tokenizer.chat_template = None
    assert tool_generation.stop_ids(model, tokenizer) == [0, tokenizer.eos_token_id]
    assert tool_generation.prompt_ids(tokenizer, [{"role": "user", "content": "w3 w4"}]) == [7, 8]


def weights_for_generation(path, base=None, before=False) -> dict[str, torch.Tensor]:
    return load_for_generation(path, base, before)[0].state_dict()


def are_equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["dense", "bf16", "saved", "experts"])
def test_an_adapter_is_loaded_as_its_merged_export_is(kind, tmp_path):
    path, adapter, merged = (str(tmp_path / name) for name in ("model", "adapter", "merged"))
    if kind == "experts":
        tiny_moe.save_model(path, "qwen3_moe", num_hidden_layers=2)
        save_start(path, adapter, ("all", "all-router"))
    else:
        tiny.save_model(path, "llama", dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
        keys = dict(targets=EVERYTHING)
        if kind == "saved":
            keys = dict(targets=TARGETS, modules_to_save=["lm_head", "embed_tokens"])
        peft_model(path, **keys).save_pretrained(adapter)
    save_tokenizer(path)
    merge(path, Path(adapter), Path(merged))
    assert are_equal(weights_for_generation(adapter, path), weights_for_generation(merged))
    model, tokenizer = load_for_generation(adapter)  # it names its base
    assert model.dtype == (torch.bfloat16 if kind == "bf16" else torch.float32)
    found = tool_generation.answers(model, tokenizer, PROMPTS, SHORT)
    assert found == tool_generation.answers(*load_for_generation(merged), PROMPTS, SHORT)
    assert found != tool_generation.answers(
        *load_for_generation(adapter, before=True), PROMPTS, SHORT
    )
    assert are_equal(weights_for_generation(adapter, before=True), weights_for_generation(path))


@pytest.fixture(scope="module")
def adapter_runs(tmp_path_factory):
    """The folders of a run of LoRA on random weights, with new tokens, and of one that leaves the
    weights as they are."""
    folder = tmp_path_factory.mktemp("run")
    path = tiny.save_model(folder / "model", "llama")
    save_tokenizer(path)
    write_data(folder)
    keys = dict(
        model_name_or_path=path, train_from_scratch=True, seed=5, add_tokens=["new", "newer"],
        finetuning_type="lora", lora_rank=4, save_merged_model=True, stage="sft",
        dataset=str(folder / "chat.jsonl"), cutoff_len=64, cache_dir=str(folder / "cache"),
        default_system=" w9 ", max_steps=2, learning_rate=0.1, global_batch_size=4,
        save_strategy="no", disable_tqdm=True, output_dir=str(folder / "out"),
    )  # fmt: skip
    world.run(train_by_words, 1, keys)
    keys |= dict(finetuning_type="full", learning_rate=1e-30, output_dir=str(folder / "start"))
    keys = {key: value for key, value in keys.items() if not key.startswith(("lora", "save_m"))}
    world.run(train_by_words, 1, keys)
    return folder


def test_a_run_says_what_was_before_it(adapter_runs):
    """Weights that were drawn are drawn again: as a run exports them whose steps change nothing."""
    start = weights_for_generation(adapter_runs / "start")
    assert start["model.embed_tokens.weight"].shape[0] == tiny.VOCAB + 1
    for folder in ("start", "out", "out/merged"):
        assert are_equal(weights_for_generation(adapter_runs / folder, before=True), start)
    assert are_equal(
        weights_for_generation(adapter_runs / "out"),
        weights_for_generation(adapter_runs / "out" / "merged"),
    )
    assert not are_equal(weights_for_generation(adapter_runs / "out"), start)
    keys = tool_generation.keys_of_run(
        adapter_runs / "out" / "merged", "default_system enable_thinking"
    )
    assert keys.default_system == " w9 " and keys.enable_thinking is None
    assert not keys.model_name_or_path, "no other key is taken"


def test_a_base_that_has_moved_is_asked_for(adapter_runs, tmp_path):
    shutil.copytree(adapter_runs / "out", tmp_path / "out")
    config = tmp_path / "out" / "config.yaml"
    config.write_text(
        config.read_text().replace(str(adapter_runs / "model"), str(tmp_path / "gone"))
    )
    with pytest.raises(ConfigError, match="was trained from it: .*gone(.|\n)*--base M"):
        load_for_generation(tmp_path / "out")
    base = str(adapter_runs / "start")
    assert are_equal(
        weights_for_generation(tmp_path / "out", base), weights_for_generation(adapter_runs / "out")
    )
