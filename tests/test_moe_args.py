"""Keys of mixtures of experts: what does not fit is named before anything starts; and their work is
counted.
"""

import json
import re

import pytest
import torch

from mca_lite.args import TrainingArguments, parse_args
from mca_lite.log import model_sizes
from mca_lite.model_config import McaModelConfig, from_hf_config
from tests.shared import tiny, tiny_moe, world
from tests.shared.commands import keys_of
from tests.shared.layouts import AUX, BIAS, EP2, ETP1, TP2_SP


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: a folder with config.json alone}"""
    out = {}
    for name, config in {
        "moe": tiny_moe.hf_config(
            "qwen3_moe", num_experts=6, num_attention_heads=8, num_key_value_heads=8
        ),
        "gated": tiny_moe.hf_config("qwen2_moe"),
        "dense": tiny.hf_config("qwen3", num_attention_heads=8, num_key_value_heads=8),
    }.items():
        out[name] = tmp_path_factory.mktemp(name)
        (out[name] / "config.json").write_text(json.dumps(config.to_dict()))
    return out


ERRORS = """
    moe   4 expert_model_parallel_size     6 experts.*: 2        expert_model_parallel_size=4
    moe   2 sequence_parallel              parallel: true        tensor_model_parallel_size=2
    moe   4 expert_model_parallel_size     3 x 2 ranks           tensor_model_parallel_size=2 \
sequence_parallel=true expert_model_parallel_size=3
    moe   2 expert_model_parallel_size     1 x 4 ranks           expert_tensor_parallel_size=4
    moe   1 moe_expert_capacity_factor     every token reaches   moe_expert_capacity_factor=1.5
    moe   1 moe_router_topk                config.json           moe_router_topk=4
    moe   1 num_experts                    config.json           num_experts=4
    moe   1 moe_aux_loss_coeff             no effect             moe_aux_loss_coeff=0.1 \
moe_router_load_balancing_type=none
    moe   1 moe_token_dispatcher_type      alltoall              variable_seq_lengths=true \
moe_token_dispatcher_type=allgather
    moe   1 moe_shared_expert_overlap      alltoall              moe_shared_expert_overlap=true \
moe_token_dispatcher_type=allgather
    moe   1 moe_router_bias_update_rate    frozen routers        moe_router_bias_update_rate=0.1 \
finetuning_type=lora
    gated 2 ddp_bucket_size                32 parameters.*: 33   ddp_bucket_size=32 \
moe_shared_expert_overlap=true overlap_param_gather=true overlap_grad_reduce=true \
use_distributed_optimizer=true
    dense 2 expert_model_parallel_size     no experts            expert_model_parallel_size=2
    dense 1 moe_aux_loss_coeff             no experts            moe_aux_loss_coeff=0.1
    dense 1 moe_z_loss_coeff               no experts            moe_z_loss_coeff=0.1
"""
LINES = [
    re.fullmatch(r" *(\w+) +(\d) (\w+) +(.+?)  +(.+)", line).groups()
    for line in ERRORS.strip("\n").splitlines()
]


def test_buckets_that_hold_more_than_the_gate_of_shared_experts_are_taken(
    folders, monkeypatch, tmp_path
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = LINES[[line[0] for line in LINES].index("gated")][-1].replace("=32", "=33")
    base = [f"model_name_or_path={folders['gated']}", "dataset=data.jsonl"]
    parse_args([*base, f"output_dir={tmp_path}", *words.split()])


@pytest.mark.parametrize("model, world_size, key, text, words", LINES)
def test_what_does_not_fit_is_an_error_of_its_key(
    model, world_size, key, text, words, folders, monkeypatch, tmp_path
):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    base = [f"model_name_or_path={folders[model]}", "dataset=data.jsonl", f"output_dir={tmp_path}"]
    problems = keys_of(parse_args, base + words.split())
    assert set(problems) == {key}
    problem = problems[key]
    assert re.search(text, f"{problem.reason}; set {problem.suggestion}")


def test_a_llama_factory_file_for_experts_is_taken(folders, monkeypatch, tmp_path):
    """The keys of its examples for mixtures of experts, and their values."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    file = tmp_path / "moe.yaml"
    lines = f"""model_name_or_path: {folders["moe"]}
dataset: data.jsonl
output_dir: {tmp_path}/out
stage: sft
finetuning_type: full
tensor_model_parallel_size: 1
sequence_parallel: false
pipeline_model_parallel_size: 2
expert_model_parallel_size: 2
bias_activation_fusion: true
moe_grouped_gemm: true
moe_token_dispatcher_type: alltoall
use_distributed_optimizer: true
overlap_param_gather: true
overlap_grad_reduce: true
recompute_granularity: full
"""
    file.write_text(lines)
    run = parse_args([str(file)])
    assert run.training.moe_grouped_gemm and run.training.expert_model_parallel_size == 2


@pytest.mark.parametrize(
    "name, changes, text",
    [
        ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise"),
        ("olmoe", dict(clip_qkv=8.0), "clip_qkv"),
        ("qwen3_moe", dict(attention_bias=True), "attention_bias"),
        ("deepseek_v2", dict(norm_topk_prob=True), "norm_topk_prob"),
        ("deepseek_v2", dict(scoring_func="sigmoid"), "scoring_func.*softmax"),
        ("deepseek_v2", dict(moe_layer_freq=2), "moe_layer_freq"),
        ("deepseek_v3", dict(scoring_func="softmax"), "scoring_func.*sigmoid"),
        ("deepseek_v3", dict(topk_method="greedy"), "topk_method.*noaux_tc"),
        ("deepseek_v3", dict(moe_layer_freq=2), "moe_layer_freq"),
        ("qwen3_moe", dict(hidden_act="gelu"), "hidden_act"),
        (
            "qwen3_moe",
            dict(
                rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
            ),
            "partial",
        ),
    ],
)
def test_what_a_model_asks_for_and_is_not_built_is_refused(name, changes, text):
    with pytest.raises(ValueError, match=f"(?s){text}"):
        from_hf_config(tiny_moe.hf_config(name, **changes))


@pytest.mark.parametrize(
    "keys, text",
    [
        (TP2_SP | dict(sequence_parallel=False), "sequence_parallel: true"),
        (dict(EP2, expert_model_parallel_size=3), "cannot be shared evenly by 3 ranks"),
        (dict(expert_tensor_parallel_size=3), "expert_tensor_parallel_size: 1"),
        (BIAS, "no bias to update"),
        (dict(moe_permute_fusion=True), "Transformer Engine"),
        (
            dict(recompute_granularity="selective", recompute_modules=["layernorm"]),
            "layernorm needs Transformer Engine",
        ),
    ],
)
def test_a_config_that_does_not_fit_says_what_to_set(keys, text):
    with pytest.raises(ValueError, match=text):
        from_hf_config(
            tiny_moe.hf_config("qwen3_moe"), TrainingArguments(output_dir="unused", **keys)
        )


def test_saved_settings_of_a_run_do_not_outlive_it(tmp_path):
    first = TrainingArguments(output_dir="unused", moe_grouped_gemm=False, **AUX, **EP2, **ETP1)
    from_hf_config(tiny_moe.hf_config("qwen3_moe"), first).save_pretrained(tmp_path)
    now = McaModelConfig.from_pretrained(str(tmp_path), TrainingArguments(output_dir="unused"))
    assert (now.moe_aux_loss_coeff, now.moe_z_loss_coeff, now.moe_grouped_gemm) == (0.0, None, True)
    assert (
        now.expert_model_parallel_size,
        now.expert_tensor_parallel_size,
        now.num_moe_experts,
    ) == (1, 1, 4)
    assert [now.is_moe_layer(i) for i in range(4)] == [True] * 4


def balancing_of_a_dense_model(path: str, out: str) -> str:
    from mca_lite.model import load_torch_model
    from mca_lite.trainer import McaTrainer

    try:
        McaTrainer(load_torch_model(path), TrainingArguments(output_dir=out, **AUX))
    except ValueError as error:
        return str(error)
    return "taken"


def test_plain_torch_refuses_balancing_losses_where_it_knows_no_routers(tmp_path):
    path = tiny.save_model(tmp_path / "model", "qwen3")
    assert "has no routers" in world.run(balancing_of_a_dense_model, 1, path, str(tmp_path))[0]


@pytest.mark.parametrize("name", ["qwen3_moe_dense_layers", "qwen2_moe", "mixtral", "glm4_moe"])
def test_flops_are_six_per_active_weight(name):
    """Counted on transformers' model: of the routed experts a token has its share, of everything
    else the whole.
    """
    from transformers import AutoModelForCausalLM

    hf = tiny_moe.hf_config(name)
    active = 0.0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    for key, parameter in model.named_parameters():
        if parameter.dim() == 3:
            active += parameter.numel() / parameter.shape[0] * hf.num_experts_per_tok
        elif parameter.dim() == 2 and "embed_tokens" not in key:
            active += parameter.numel()
    if hf.tie_word_embeddings:
        active += hf.vocab_size * hf.hidden_size
    for config in (hf, from_hf_config(hf)):
        assert model_sizes(config).weights == pytest.approx(active)
