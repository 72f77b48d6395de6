"""What cannot be adapted, loaded, merged or resumed is refused with what to set; targets and their
names.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from mca_lite.errors import ConfigError
from tests.shared import tiny, tiny_moe, world
from tests.shared.commands import assert_names
from tests.shared.layouts import PP2, SAVE, TP2, TP2_SP
from tests.shared.lora_tools import RANK, load, make, peft_model, train_from_adapter
from tests.shared.training import refusal, train


@pytest.fixture(scope="module")
def adapted_qwen3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora_errors")
    path = tiny.save_model(folder / "model", "qwen3")
    peft_model(path).save_pretrained(folder / "adapter")
    return path, str(folder / "adapter")


def specified(path: str, output_dir: str, backend="megatron", then=None, **spec):
    """The complete spec of fresh adapters, or what refused them."""
    from mca_lite import part_lora, part_lora_files

    model, _ = make(path, output_dir, backend)
    try:
        part_lora.inject(model, part_lora.LoraSpec(**spec))
        if then == "merge":
            part_lora_files.merger(model)
    except ValueError as error:
        return str(error)
    return part_lora.spec_of(model).modules, part_lora_files.target_modules(model)


ALL = [f"model.layers.{i}.{m}" for i in range(4) for m in
       [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up",
           "down")]]  # fmt: skip
MEANT = {
    ("all",): (ALL, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    ("all-linear", "lm_head"): (
        [*ALL, "lm_head"],
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
    ),
    ("linear_qkv",): (
        [n for n in ALL if n[-6:] in ("q_proj", "k_proj", "v_proj")],
        ["q_proj", "k_proj", "v_proj"],
    ),
    ("v_proj", "linear_fc2"): (
        [n for n in ALL if n.endswith(("v_proj", "down_proj"))],
        ["v_proj", "down_proj"],
    ),
    ("*.layers.[01].*.o_proj",): (ALL[3:11:7], ALL[3:11:7]),
    (r".*\.(2|3)\..*linear_fc1",): (
        [n for n in ALL if n.endswith(("gate_proj", "up_proj")) and n[13] in "23"],
        [f"model.layers.{i}.mlp.{x}_proj" for x in ("gate", "up") for i in (2, 3)],
    ),
    ("layers.1.self_attn.q_proj",): ([ALL[7]], [ALL[7]]),
}


@pytest.mark.parametrize("backend", ["megatron", "torch"])
@pytest.mark.parametrize("targets", MEANT)
def test_targets_mean_these_modules(adapted_qwen3, tmp_path, targets, backend):
    [(modules, for_peft)] = world.run(
        specified, 1, adapted_qwen3[0], str(tmp_path), backend, targets=targets
    )
    assert (list(modules), for_peft) == MEANT[targets]


@pytest.mark.parametrize("backend", ["megatron", "torch"])
@pytest.mark.parametrize(
    "spec, words",
    [
        (
            dict(targets=("q_porj",)),
            ("lora_target: 'q_porj'", "means no layer", "try: all, some of", "linear_qkv"),
        ),
        (dict(targets=("*.layers.7.*",)), ("means no layer", "pattern")),
        (dict(rank=0), ("lora_rank: 0", "lora_rank: 8")),
        (dict(modules_to_save=("lm_hed",)), ("modules_to_save: 'lm_hed'",)),
        (dict(modules_to_save=("embed_tokens",)), ("modules_to_save", "embedding is", "head")),
        (dict(modules_to_save=("o_proj",)), ("modules_to_save", "it is in lora_target too")),
        (
            dict(targets=("embed_tokens",), then="merge"),
            ("save_merged_model", "take it out of lora_target"),
        ),
    ],
)
def test_adapters_that_cannot_be_are_refused(adapted_qwen3, tmp_path, spec, words, backend):
    [error] = world.run(specified, 1, adapted_qwen3[0], str(tmp_path), backend, **spec)
    assert isinstance(error, str) and all(word in error for word in words), error


def test_adapters_on_some_experts_of_a_layer_are_refused(tmp_path):
    from mca_lite import AutoConfig, TrainingArguments, part_lora

    path = tiny_moe.save_model(tmp_path / "model", "qwen3_moe")
    config = AutoConfig.from_pretrained(path, TrainingArguments(output_dir="unused"))
    with pytest.raises(ValueError, match="(?s)and not .*experts.1.gate_proj.*all experts"):
        part_lora.plan(config, part_lora.LoraSpec(targets=("experts.0.gate_proj",)))
    assert part_lora.plan(config, part_lora.LoraSpec(targets=("gate_proj",))).modules


def test_half_of_a_fused_matrix_cannot_be_saved_whole(adapted_qwen3, tmp_path):
    [error] = world.run(
        specified,
        1,
        adapted_qwen3[0],
        str(tmp_path),
        targets=("o_proj",),
        modules_to_save=("k_proj",),
    )
    assert "are one matrix" in error and "q_proj" in error


def make_and_load(path: str, output_dir: str, adapter: str, **keys) -> None:
    model, _ = make(path, output_dir, **keys)
    load(adapter, model)


def with_config(adapter: str, folder, **values) -> str:
    """A copy of an adapter whose config says something else."""
    shutil.copytree(adapter, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **values}))
    return str(folder)


@pytest.mark.parametrize("ranks, keys", [(1, {}), (2, PP2), (2, TP2), (1, {"backend": "torch"})])
def test_an_adapter_of_another_model_is_refused_on_every_rank(adapted_qwen3, tmp_path, ranks, keys):
    wider = tiny.save_model(tmp_path / "wider", "qwen3", intermediate_size=64)
    for error in world.run(
        refusal, ranks, make_and_load, wider, str(tmp_path), adapted_qwen3[1], **keys
    ):
        assert "has shape" in error and "another model" in error and "adapter_name_or_path" in error
    shallow = tiny.save_model(tmp_path / "shallow", "qwen3", num_hidden_layers=2)
    for error in world.run(
        refusal, ranks, make_and_load, shallow, str(tmp_path), adapted_qwen3[1], **keys
    ):
        assert "another model" in error and "lacks 14, such as model.layers.2" in error


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(use_dora=True), ("use_dora is True", "merge that adapter")),
        (dict(rank_pattern={"q_proj": 0}), ("rank_pattern is {'q_proj': 0}",)),
        (dict(init_lora_weights="pissa"), ("init_lora_weights is 'pissa'",)),
        (dict(alora_invocation_tokens=[5, 6]), ("alora_invocation_tokens is [5, 6]",)),
        (dict(peft_type="IA3"), ("peft_type is 'IA3'",)),
        (dict(bias="all"), ("bias is 'all'",)),
        (dict(use_qalora=True), ("use_qalora is True",)),
        (dict(lora_bias=True), ("lora_bias is True",)),
        (dict(alpha_pattern={"(q": 64}), ("alpha_pattern is {'(q': 64}",)),
        (dict(fan_in_fan_out=True), ("fan_in_fan_out is True",)),
        (dict(target_parameters=[["down_proj"]]), ("target_parameters is",)),
        (dict(trainable_token_indices=[3]), ("trainable_token_indices is [3]",)),
        (dict(layer_replication=[[0, 2], [1, 4]]), ("layer_replication is",)),
        (dict(arrow_config={"top_k": 2}), ("arrow_config is",)),
        (dict(kasa_config={"beta": 1}), ("kasa_config is",)),
        (dict(monteclora_config={"n": 4}), ("monteclora_config is",)),
        (dict(use_bdlora={"nblocks": 2}), ("use_bdlora is",)),
    ],
)
def test_an_adapter_of_another_kind_is_refused(adapted_qwen3, tmp_path, values, words):
    from mca_lite.part_lora_files import read_adapter

    with pytest.raises(ValueError) as refused:
        read_adapter(with_config(adapted_qwen3[1], tmp_path / "changed", **values))
    assert all(word in str(refused.value) for word in words), refused.value


def load_where_rank_1_lacks_it(path: str, output_dir: str, adapter: str) -> None:
    model, _ = make(path, output_dir)
    load(f"{adapter}-lost" if dist.get_rank() else adapter, model)


def test_an_adapter_that_one_rank_cannot_read_is_refused_on_every_rank(adapted_qwen3, tmp_path):
    errors = world.run(
        refusal, 2, load_where_rank_1_lacks_it, adapted_qwen3[0], str(tmp_path), adapted_qwen3[1]
    )
    assert "rank 1 cannot load" in errors[0] and "holds no adapter_config.json" in errors[1]


def test_a_damaged_adapter_is_refused(adapted_qwen3, tmp_path):
    adapter = with_config(adapted_qwen3[1], tmp_path / "damaged")
    file = tmp_path / "damaged" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up_proj.lora_B" not in k}, file)
    [error] = world.run(refusal, 1, make_and_load, adapted_qwen3[0], str(tmp_path), adapter)
    assert "lacks" in error and "layers.1.mlp.up_proj.lora_B" in error
    [error] = world.run(
        refusal, 1, make_and_load, adapted_qwen3[0], str(tmp_path), str(tmp_path / "nowhere")
    )
    assert "holds no adapter_config.json" in error


@pytest.mark.parametrize("ranks, keys", [(2, TP2), (1, {"backend": "torch"})])
def test_an_adapter_that_lacks_a_weight_of_its_modules_to_save_is_refused(
    adapted_qwen3, tmp_path, ranks, keys
):
    adapter = with_config(adapted_qwen3[1], tmp_path / "lacks", modules_to_save=["model.norm"])
    for error in world.run(
        refusal, ranks, make_and_load, adapted_qwen3[0], str(tmp_path), adapter, **keys
    ):
        assert f"{adapter} lacks base_model.model.model.norm.weight" in error


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_a_checkpoint_with_other_adapters_is_not_resumed_from(adapted_qwen3, tmp_path, backend):
    path, adapter = adapted_qwen3
    keys = {**SAVE, "backend": backend}
    world.run(train_from_adapter, 1, path, str(tmp_path / "lora"), adapter, **{**keys, "steps": 2})
    world.run(train, 1, path, str(tmp_path / "full"), **{**keys, "steps": 2})
    keys["resume_from_checkpoint"] = "auto"
    [error] = world.run(refusal, 1, train, path, str(tmp_path / "lora"), **keys)
    assert "holds adapters, and this run has none" in error and "finetuning_type: lora" in error
    [error] = world.run(
        refusal, 1, train_from_adapter, path, str(tmp_path / "full"), adapter, **keys
    )
    assert "holds no adapters" in error and "finetuning_type: full" in error
    peft_model(path, r=2 * RANK).save_pretrained(tmp_path / "other")
    [error] = world.run(
        refusal,
        1,
        train_from_adapter,
        path,
        str(tmp_path / "lora"),
        str(tmp_path / "other"),
        **keys,
    )
    assert_names(error, f"r {RANK}", f"has {2 * RANK}")
    scaled = with_config(adapter, tmp_path / "scaled", use_rslora=True)
    [error] = world.run(
        refusal, 1, train_from_adapter, path, str(tmp_path / "lora"), scaled, **keys
    )
    assert_names(error, "use_rslora False", "has True")


def resumed_with_modules_in_another_order(path: str, folder, adapter: str) -> None:
    from mca_lite import part_lora_files

    model = load(adapter, make(path, str(folder), "torch")[0])
    part_lora_files.save_adapter(model, folder / "saved")
    modules = part_lora_files.target_modules(model)
    with_config(str(folder / "saved"), folder / "other", target_modules=modules[::-1])
    part_lora_files.check_checkpoint(model, folder / "other")


def test_the_order_of_the_modules_may_differ(adapted_qwen3, tmp_path):
    path, adapter = adapted_qwen3
    world.run(resumed_with_modules_in_another_order, 1, path, tmp_path, adapter)


@pytest.mark.parametrize(
    "ranks, keys, resumed", [(4, {**TP2, **PP2}, {}), (1, dict(backend="torch"), dict(bf16=True))]
)
def test_adapters_are_not_resumed_on_another_base_of_the_same_shape(
    adapted_qwen3, tmp_path, ranks, keys, resumed
):
    path, adapter = adapted_qwen3
    other = tiny.save_model(tmp_path / "other", "qwen3", seed=5)
    keys, out = {**SAVE, **keys}, str(tmp_path / "run")
    world.run(train_from_adapter, ranks, path, out, adapter, **{**keys, "steps": 2})
    keys["resume_from_checkpoint"] = "auto"
    for error in world.run(refusal, ranks, train_from_adapter, other, out, adapter, **keys):
        assert "trained on another base model" in error and "model_name_or_path" in error
    if resumed == {}:  # in another layout
        keys = {**SAVE, "resume_from_checkpoint": "auto"}
    assert world.run(refusal, 1, train_from_adapter, path, out, adapter, **{**keys, **resumed}) == [
        ""
    ]


def test_a_checkpoint_is_an_adapter_that_peft_loads(adapted_qwen3, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path, adapter = adapted_qwen3
    world.run(train_from_adapter, 2, path, str(tmp_path), adapter, **{**SAVE, **TP2, "steps": 2})
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path), str(tmp_path / "checkpoint-2")
    )
    saved = load_file(tmp_path / "adapter_model.safetensors")
    got = {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora_" in n}
    assert got.keys() == saved.keys() and all(torch.equal(got[n].detach(), saved[n]) for n in saved)


def finetuning(**keys):
    """LoraArguments of a run with these keys."""
    from mca_lite.args import parse_args

    words = ["configs/sft_lora.yaml", "finetuning_type=null"]
    words += [f"{key}=null" for key in ("lora_rank", "lora_alpha", "lora_target", "lora_dropout")]
    words += [f"{key}={value}" for key, value in keys.items() if value is not None]
    return parse_args(words).parts["lora"]


def test_the_keys_are_those_of_llama_factory():
    from mca_lite.args import known_keys
    from mca_lite.errors import Judge
    from mca_lite.part_lora_keys import LoraArguments

    values = dict(
        finetuning_type="lora",
        lora_target="q_proj,v_proj",
        lora_alpha=32,
        additional_target="lm_head",
    )
    got = LoraArguments.read(known_keys(values, [])[0], Judge(None))
    assert (got.lora_rank, got.lora_alpha, got.lora_target) == (8, 32.0, ["q_proj", "v_proj"])
    assert got.modules_to_save == ["lm_head"]


@pytest.mark.parametrize(
    "keys, words",
    [
        (dict(finetuning_type="lora", lora_rank=0), "lora_rank"),
        (dict(finetuning_type="lora", lora_alpha=0), "lora_alpha"),
        (dict(finetuning_type="lora", lora_dropout=1), "lora_dropout"),
        (dict(finetuning_type="lora", lora_target=[]), "lora_target: all"),
        (dict(adapter_name_or_path="somewhere"), "finetuning_type: lora"),
    ],
)
def test_keys_that_do_not_work_are_errors(keys, words):
    with pytest.raises(ValueError, match=words):
        finetuning(**keys)


def test_a_given_dropout_counts_for_an_adapter_too(adapted_qwen3, tmp_path):
    from mca_lite.part_lora_files import adapter_of_keys

    dropping = with_config(adapted_qwen3[1], tmp_path / "dropping", lora_dropout=0.25)
    found = {}
    for given in (None, 0.0, 0.5):
        found[given] = [
            adapter_of_keys(finetuning(finetuning_type="lora", lora_dropout=given, **more))[
                0
            ].dropout
            for more in ({}, dict(adapter_name_or_path=dropping))
        ]
    assert found == {None: [0.0, 0.25], 0.0: [0.0, 0.0], 0.5: [0.5, 0.5]}


@pytest.mark.parametrize(
    "key, value", [("lora_rank", 16), ("lora_alpha", 8), ("lora_dropout", 0.1)]
)
def test_a_key_of_adapters_on_a_run_of_all_weights_is_refused(key, value):
    with pytest.raises(ConfigError) as caught:
        finetuning(**{key: value})
    [problem] = caught.value.problems
    assert problem.key == key and problem.reason == "no effect, since finetuning_type is full"
    assert problem.suggestion == f"finetuning_type: lora, or {key} left out"


def test_keys_without_effect_are_named():
    notes = finetuning(
        finetuning_type="lora", adapter_name_or_path="somewhere", lora_rank=16, lora_alpha=8
    ).notes
    assert [note.split(":")[0] for note in notes] == ["lora_rank", "lora_alpha"]


@pytest.mark.parametrize("family", ["phi3", "glm4"])
def test_adapters_on_fused_projections_are_refused_before_ranks_meet(tmp_path, family):
    from mca_lite import AutoConfig, TrainingArguments, part_lora

    path = tiny.save_model(tmp_path / "model", family)
    config = AutoConfig.from_pretrained(path, TrainingArguments(output_dir="unused"))
    with pytest.raises(ValueError, match="(?s)several projections in one tensor.*use_mca: false"):
        part_lora.plan(config, part_lora.LoraSpec())
    assert part_lora.plan(config, part_lora.LoraSpec(targets=("o_proj",))).modules


def test_adapters_of_experts_that_ranks_share_are_refused_with_dropout_before_ranks_meet(tmp_path):
    from mca_lite import AutoConfig, TrainingArguments, part_lora

    path = tiny_moe.save_model(tmp_path / "model", "mixtral")
    args = TrainingArguments(output_dir="unused", **TP2_SP)
    config = AutoConfig.from_pretrained(path, args)
    assert part_lora.plan(config, part_lora.LoraSpec(dropout=0.1, targets=("q_proj",))).modules
    with pytest.raises(ValueError, match="expert_tensor_parallel_size: 1, or lora_dropout: 0"):
        part_lora.plan(config, part_lora.LoraSpec(dropout=0.1, targets=("w2",)))


@pytest.mark.parametrize(
    "key", ["model_type", "hf_model_type"]
)  # a checkpoint's config has another
def test_adapters_on_mlps_beside_experts_have_a_note(key):
    from mca_lite import part_lora

    spec = part_lora.LoraSpec(modules=("model.layers.0.mlp.gate_proj",))
    for kind, count in (("qwen3_moe", 1), ("qwen3", 0)):
        arguments = SimpleNamespace(model_config={key: kind})
        assert len(part_lora.Lora(spec).notes(arguments)) == count
