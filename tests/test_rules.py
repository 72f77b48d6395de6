"""Each rule stands once: files and constructors refuse the same configurations with the same
Problems.
"""

import shutil
from pathlib import Path

import pytest

from mca_lite import args_rules_model
from mca_lite.args import DataArguments, TrainingArguments, check_together, parse_args
from mca_lite.args_rules_training import NEEDS
from mca_lite.errors import ConfigError, Judge, Rule
from mca_lite.model_config import AutoConfig, load_hf_config
from mca_lite.part_scores import objective_keys
from tests.shared import tiny, tiny_moe


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: a folder with config.json alone}"""
    out = {}
    for name, config in {
        "dense": tiny.hf_config("qwen3", num_hidden_layers=6),
        "experts": tiny_moe.hf_config("qwen3_moe"),
    }.items():
        out[name] = tmp_path_factory.mktemp(name)
        config.save_pretrained(out[name])
    return out


def refused(call) -> list[tuple[str, str]]:
    """(key, reason) of each Problem that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call()
    return [(problem.key, problem.reason) for problem in caught.value.problems]


def parsed(model, tmp_path, values):
    """parse_args on a YAML file with half of the values, and the rest as key=value."""
    words = [f"{key}={value}" for key, value in values.items()]
    file = tmp_path / "run.yaml"
    lines = [f"model_name_or_path: {model}", "dataset: train.jsonl", f"output_dir: {tmp_path}/out"]
    lines += [word.replace("=", ": ", 1) for word in words[::2]]
    file.write_text("\n".join(lines))
    return refused(lambda: parse_args([str(file), *words[1::2]], needs_world=False))


ROOT = Path(__file__).parents[1]
PP2 = dict(pipeline_model_parallel_size=2)
DPO = dict(stage="dpo")
FP8 = dict(bf16=True, fp8="hybrid")
LORA = dict(finetuning_type="lora")
# the group that judges it, keys, the key that is refused
OF_GROUPS = [
    (TrainingArguments, dict(bf16=True, fp16=True), "bf16"),
    (TrainingArguments, dict(fp8="hybrid"), "fp8"),
    (TrainingArguments, dict(fp8="fp8"), "fp8"),
    (TrainingArguments, dict(fp8_recipe="delayed"), "fp8_recipe"),
    (TrainingArguments, dict(FP8, fp8_recipe="mxfp8"), "fp8_recipe"),
    (TrainingArguments, dict(first_last_layers_bf16=True), "first_last_layers_bf16"),
    (
        TrainingArguments,
        dict(FP8, fp8_recipe="delayed", first_last_layers_bf16=True),
        "first_last_layers_bf16",
    ),
    (
        TrainingArguments,
        dict(
            FP8,
            fp8_recipe="delayed",
            recompute_granularity="selective",
            recompute_modules="layernorm",
        ),
        "recompute_modules",
    ),
    (
        TrainingArguments,
        dict(FP8, additional_configs={"fp8_param": True}),
        "additional_configs.fp8_param",
    ),
    (
        TrainingArguments,
        dict(FP8, additional_configs={"fp8_dot_product_attention": True}),
        "additional_configs.fp8_dot_product_attention",
    ),
    (TrainingArguments, dict(additional_configs={"fp4": "e2m1"}), "additional_configs.fp4"),
    (TrainingArguments, dict(additional_configs={"fp8": "hybrid"}), "additional_configs.fp8"),
    (
        TrainingArguments,
        dict(additional_configs={"window_size": [4, 0]}),
        "additional_configs.window_size",
    ),
    (
        TrainingArguments,
        dict(additional_configs={"gradient_accumulation_fusion": True}),
        "additional_configs.gradient_accumulation_fusion",
    ),
    (TrainingArguments, dict(max_steps=0), "max_steps"),
    (TrainingArguments, dict(optim="lion"), "optim"),
    (TrainingArguments, dict(report_to="mlflow"), "report_to"),
    (TrainingArguments, dict(warmup_steps=1.5), "warmup_steps"),
    (TrainingArguments, dict(warmup_steps=10, max_steps=10), "warmup_steps"),
    (TrainingArguments, dict(max_shard_size="5XB"), "max_shard_size"),
    (TrainingArguments, dict(recompute_num_layers=2), "recompute_num_layers"),
    (TrainingArguments, dict(recompute_method="block"), "recompute_method"),
    (TrainingArguments, dict(recompute_modules="mlp"), "recompute_modules"),
    (
        TrainingArguments,
        dict(recompute_granularity="selective", recompute_modules="mpl"),
        "recompute_modules",
    ),
    (TrainingArguments, dict(overlap_param_gather=True), "overlap_param_gather"),
    (
        TrainingArguments,
        dict(nan_policy="skip", check_for_nan_in_loss_and_grad=False),
        "nan_policy",
    ),
    (TrainingArguments, dict(optim="sgd", use_distributed_optimizer=True), "optim"),
    (TrainingArguments, dict(optim="muon", use_distributed_optimizer=True), "optim"),
    (TrainingArguments, dict(optim="muon", optimizer_cpu_offload=True), "optim"),
    (TrainingArguments, dict(optim="sgd", exp_avg_dtype="bf16"), "exp_avg_dtype"),
    (TrainingArguments, dict(optim="sgd", exp_avg_sq_dtype="bf16"), "exp_avg_sq_dtype"),
    (
        TrainingArguments,
        dict(optimizer_cpu_offload=True, exp_avg_sq_dtype="bf16"),
        "exp_avg_sq_dtype",
    ),
    (
        TrainingArguments,
        dict(moe_token_dispatcher_type="allgather", variable_seq_lengths=True),
        "moe_token_dispatcher_type",
    ),
    (
        TrainingArguments,
        dict(moe_token_dispatcher_type="allgather", moe_shared_expert_overlap=True),
        "moe_shared_expert_overlap",
    ),
    (
        TrainingArguments,
        dict(virtual_pipeline_model_parallel_size=2),
        "virtual_pipeline_model_parallel_size",
    ),
    (
        TrainingArguments,
        dict(**PP2, pipeline_model_parallel_layout="tt|tL"),
        "pipeline_model_parallel_layout",
    ),
    (TrainingArguments, dict(load_best_model_at_end=True), "load_best_model_at_end"),
    (TrainingArguments, dict(early_stopping_patience=1), "early_stopping_patience"),
    (TrainingArguments, dict(initial_loss_scale=1, min_loss_scale=2), "min_loss_scale"),
    (TrainingArguments, dict(lr_scheduler_type="cosin"), "lr_scheduler_type"),
    (TrainingArguments, dict(lr_scheduler_kwargs={"min_lr": 1.0}), "lr_scheduler_kwargs.min_lr"),
    (
        TrainingArguments,
        dict(additional_configs={"layernorm_epsilom": 1}),
        "additional_configs.layernorm_epsilom",
    ),
    (
        TrainingArguments,
        dict(additional_configs={"hidden_size": 8}),
        "additional_configs.hidden_size",
    ),
    (DataArguments, dict(val_size=1.5), "val_size"),
    (DataArguments, dict(mix_weights=[1, 2]), "mix_weights"),
    (DataArguments, dict(train_on_prompt=True, mask_history=True), "mask_history"),
    (objective_keys, dict(DPO, pref_loss="orpo", ref_model="cached"), "ref_model"),
    (objective_keys, dict(DPO, ref_model="adapter"), "ref_model"),
    (objective_keys, dict(DPO, pref_loss="orpo", dpo_label_smoothing=0.1), "dpo_label_smoothing"),
]
REQUIRED = {TrainingArguments: dict(output_dir="out"), DataArguments: dict(dataset=["a"])}


@pytest.mark.parametrize("group, values, key", OF_GROUPS)
def test_a_rule_of_a_group_is_the_same_in_a_file_and_in_the_constructor(
    group, values, key, models, tmp_path
):
    made = refused(lambda: group(**{**REQUIRED.get(group, {}), **values}))
    assert [found for found, _ in made] == [key]
    assert set(made) <= set(parsed(models["dense"], tmp_path, values))


EVALUATED = dict(eval_strategy="steps")
FULL, SELECTIVE = dict(recompute_granularity="full"), dict(recompute_granularity="selective")
# keys that count beside another one alone -> a value, and with which other keys it counts
BESIDE = {
    "nan_skip_limit": (3, dict(nan_policy="skip")),
    "nan_policy": ("skip", {}),
    "grad_norm_skip_threshold": (2.0, {}),
    "early_stopping_threshold": (0.1, dict(EVALUATED, early_stopping_patience=1)),
    "early_stopping_patience": (1, EVALUATED),
    "greater_is_better": (True, EVALUATED),
    "max_new_tokens": (5, dict(predict_with_generate=True)),
    "generation_num_samples": (5, dict(predict_with_generate=True)),
    "optimizer_offload_fraction": (0.5, dict(optimizer_cpu_offload=True)),
    "fp8_recipe": ("blockwise", FP8),
    "first_last_layers_bf16": (True, FP8),
    "num_layers_at_start_in_bf16": (2, dict(FP8, first_last_layers_bf16=True)),
    "num_layers_at_end_in_bf16": (2, dict(FP8, first_last_layers_bf16=True)),
    "recompute_modules": (["mlp"], SELECTIVE),
    "recompute_method": ("block", FULL),
    "recompute_num_layers": (2, FULL),
    "recompute_keep": ("core_attn", FULL),
    "activation_offloading": (True, FULL),
}
# where that other key counts by default: how it is switched off
OFF = dict.fromkeys(
    ("nan_policy", "grad_norm_skip_threshold"), dict(check_for_nan_in_loss_and_grad=False)
)


def test_conditions_of_a_rule_are_met_as_they_are_written():
    given = DataArguments(dataset=["a", "b"], eval_dataset=[], val_size=0.0)
    judge = Judge(given)
    for (
        condition
    ) in "dataset dataset=b !dataset=c !val_size val_size=0.0 eval_dataset|dataset".split():
        assert judge.holds(condition), condition
    for condition in "!dataset dataset=c val_size eval_dataset|val_size".split():
        assert not judge.holds(condition), condition
    judge.apply([Rule("!val_size dataset=a", "a reason", "a remedy")])
    assert judge.problems == [("val_size", 0.0, "a reason", "a remedy")]
    with pytest.raises(AttributeError):
        judge.apply([Rule("val_size data_set", "", "")])


def test_each_key_beside_another_is_in_the_table():
    keys = {key for row in NEEDS for key in row.keys.split()}
    assert BESIDE.keys() | NOTED.keys() == keys


@pytest.mark.parametrize("key", BESIDE)
def test_a_key_without_the_one_that_it_needs_is_refused_with_what_to_set(key):
    value, others = BESIDE[key]
    args = TrainingArguments(output_dir="out", **{key: value}, **others)
    assert getattr(args, key) == value and args.notes == []
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(output_dir="out", **{key: value}, **OFF.get(key, {}))
    [problem] = caught.value.problems
    assert problem.key == key and problem.reason.startswith("no effect, since ")
    switch = next(row.setting for row in NEEDS if key in row.keys.split())
    assert problem.suggestion == f"{switch}, or {key} left out"


# the same, where no result would be missed -> a value, keys with which it has no effect, and has
SGD, MUON, FP16 = dict(optim="sgd"), dict(optim="muon"), dict(fp16=True)
NOTED = {
    "tp_comm_overlap": (
        True,
        {},
        dict(tensor_model_parallel_size=2, sequence_parallel=True),
        "sequence_parallel is false",
    ),
    "sgd_momentum": (0.5, {}, SGD, "optim is adam"),
    "muon_momentum": (0.5, {}, MUON, "optim is adam"),
    "muon_nesterov": (False, {}, MUON, "optim is adam"),
    "muon_ns_steps": (3, {}, MUON, "optim is adam"),
    "muon_adjust_lr": ("original", {}, MUON, "optim is adam"),
    "adam_beta1": (0.5, SGD, {}, "optim is sgd"),
    "adam_beta2": (0.5, SGD, {}, "optim is sgd"),
    "adam_epsilon": (0.5, SGD, {}, "optim is sgd"),
    "loss_scale": (2.0, {}, FP16, "fp16 is false"),
    "initial_loss_scale": (2.0, {}, FP16, "fp16 is false"),
    "min_loss_scale": (2.0, {}, FP16, "fp16 is false"),
    "loss_scale_window": (2, {}, FP16, "fp16 is false"),
    "hysteresis": (3, {}, FP16, "fp16 is false"),
    "mtp_loss_scaling_factor": (0.5, dict(mtp_num_layers=0), {}, "mtp_num_layers is 0"),
    "run_name": ("a", {}, dict(report_to="wandb"), "report_to is not set"),
    "metric_for_best_model": ("eval_loss", {}, EVALUATED, "eval_strategy is no"),
    "sequence_parallel": (
        True,
        {},
        dict(tensor_model_parallel_size=2),
        "tensor_model_parallel_size is 1",
    ),
    "num_train_epochs": (2, dict(max_steps=5), {}, "max_steps is 5"),
    "warmup_ratio": (0.5, dict(lr_scheduler_type="constant"), {}, "lr_scheduler_type is constant"),
    "warmup_steps": (5, dict(lr_scheduler_type="constant"), {}, "lr_scheduler_type is constant"),
}


@pytest.mark.parametrize("key", NOTED)
def test_a_harmless_key_without_the_one_that_it_needs_is_named(key, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)  # wandb
    value, without, others, reason = NOTED[key]
    args = TrainingArguments(output_dir="out", **{key: value}, **without)
    assert args.notes == [f"{key}: no effect, since {reason}"]
    assert TrainingArguments(output_dir="out", **{key: value}, **others).notes == []


# the model, keys, the key that is refused
OF_MODELS = [
    ("dense", dict(tensor_model_parallel_size=3), "tensor_model_parallel_size"),
    ("dense", dict(pipeline_model_parallel_size=4), "pipeline_model_parallel_size"),
    ("dense", dict(pipeline_model_parallel_size=8), "pipeline_model_parallel_size"),
    (
        "dense",
        dict(**PP2, pipeline_model_parallel_layout="Et|tL"),
        "pipeline_model_parallel_layout",
    ),
    ("dense", dict(recompute_granularity="full", recompute_num_layers=4), "recompute_num_layers"),
    (
        "dense",
        dict(
            **PP2,
            pipeline_model_parallel_layout="Et*4|ttL",
            recompute_granularity="full",
            recompute_num_layers=4,
        ),
        "recompute_num_layers",
    ),
    ("dense", dict(expert_model_parallel_size=2), "expert_model_parallel_size"),
    ("dense", dict(FP8, transformer_impl="local"), "fp8"),
    ("dense", dict(moe_z_loss_coeff=0.1), "moe_z_loss_coeff"),
    ("dense", dict(moe_aux_loss_coeff=0.1), "moe_aux_loss_coeff"),
    ("dense", dict(moe_router_bias_update_rate=0.1), "moe_router_bias_update_rate"),
    (
        "dense",
        dict(moe_router_load_balancing_type="seq_aux_loss"),
        "moe_router_load_balancing_type",
    ),
    ("dense", dict(moe_router_dtype="fp64"), "moe_router_dtype"),
    ("dense", dict(moe_grouped_gemm=False), "moe_grouped_gemm"),
    ("dense", dict(moe_token_dispatcher_type="allgather"), "moe_token_dispatcher_type"),
    ("dense", dict(moe_shared_expert_overlap=True), "moe_shared_expert_overlap"),
    ("dense", dict(moe_permute_fusion=True), "moe_permute_fusion"),
    ("dense", dict(mtp_loss_scaling_factor=0.5), "mtp_loss_scaling_factor"),
    ("experts", dict(moe_shared_expert_overlap=True), "moe_shared_expert_overlap"),
    ("experts", dict(expert_model_parallel_size=3), "expert_model_parallel_size"),
    ("experts", dict(tensor_model_parallel_size=2), "sequence_parallel"),
    ("experts", dict(expert_tensor_parallel_size=3), "expert_tensor_parallel_size"),
]


@pytest.mark.parametrize("model, values, key", OF_MODELS)
def test_a_rule_of_a_model_is_the_same_in_a_file_and_in_its_config(
    model, values, key, models, tmp_path
):
    args = TrainingArguments(output_dir="out", **values)
    made = refused(lambda: AutoConfig.from_pretrained(str(models[model]), args))
    assert [found for found, _ in made] == [key]
    assert made == parsed(models[model], tmp_path, values)


@pytest.mark.parametrize(
    "training, others, key",
    [
        (dict(mtp_num_layers=1), dict(use_mca=False), "mtp_num_layers"),
        (dict(mtp_num_layers=1), DPO, "mtp_num_layers"),
        (dict(moe_router_bias_update_rate=0.1), LORA, "moe_router_bias_update_rate"),
        (dict(calculate_per_token_loss=False), DPO, "calculate_per_token_loss"),
    ],
)
def test_a_rule_between_groups_is_the_same_for_a_trainer(training, others, key, models, tmp_path):
    args = TrainingArguments(output_dir="out", **training)
    made = refused(lambda: check_together(args, **others))
    assert [found for found, _ in made] == [key]
    assert made == parsed(models["dense"], tmp_path, {**training, **others})


def test_packed_rows_of_a_windowed_model_on_plain_torch_are_refused_from_its_config(tmp_path):
    """By the command line before ranks start, and by the torch backend in its constructor."""
    tiny.hf_config("mistral", sliding_window=4).save_pretrained(tmp_path)
    judge = Judge(None)
    args_rules_model.check_torch_packing(load_hf_config(str(tmp_path)), judge)
    assert [problem.key for problem in judge.problems] == ["packing"]
    tiny.hf_config("mistral", sliding_window=None).save_pretrained(tmp_path)
    judge = Judge(None)
    args_rules_model.check_torch_packing(load_hf_config(str(tmp_path)), judge)
    assert judge.problems == []


# the family, keys of the run, the spec of the same adapters, the key that is refused
OF_ADAPTERS = [
    ("qwen3", dict(lora_target="q_porj"), dict(targets=("q_porj",)), "lora_target"),
    ("qwen3", dict(modules_to_save="lm_hed"), dict(modules_to_save=("lm_hed",)), "modules_to_save"),
    ("qwen3", dict(lora_rank=0), dict(rank=0), "lora_rank"),
    ("qwen3", dict(lora_dropout=1), dict(dropout=1.0), "lora_dropout"),
    ("phi3", {}, {}, "lora_target"),
    (
        "mixtral",
        dict(
            lora_dropout=0.1, lora_target="w2", sequence_parallel=True, tensor_model_parallel_size=2
        ),
        dict(dropout=0.1, targets=("w2",)),
        "lora_dropout",
    ),
]


@pytest.mark.parametrize("family, values, spec, key", OF_ADAPTERS)
def test_a_rule_of_adapters_is_the_same_for_a_run_and_for_lora_plan(
    family, values, spec, key, tmp_path, monkeypatch
):
    """A run is refused while it is planned, before ranks meet and before data is read."""
    from mca_lite import part_lora, run

    module = tiny_moe if family == "mixtral" else tiny
    module.hf_config(family, vocab_size=512).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "configs/tiny/model" / name, tmp_path / "model")
    keys = {**values, **LORA, "train_from_scratch": True, "dataset": "none.jsonl"}
    keys |= dict(model_name_or_path=tmp_path / "model", output_dir=tmp_path / "out")
    words = [f"{name}={value}" for name, value in keys.items()]
    told = refused(lambda: run.make_plan(parse_args(words, needs_world=False)))
    layout = {name: values[name] for name in values if "parallel" in name}
    config = AutoConfig.from_pretrained(
        str(tmp_path / "model"), TrainingArguments(output_dir="out", **layout)
    )
    assert refused(lambda: part_lora.plan(config, part_lora.LoraSpec(**spec))) == told
    assert [found for found, _ in told] == [key]


def test_what_a_config_json_asks_for_is_refused_alike_for_a_run_and_for_auto_config(tmp_path):
    from mca_lite import run

    hf = tiny.hf_config("llama", hidden_act="gelu", mlp_bias=True)
    hf.save_pretrained(tmp_path)
    words = [f"model_name_or_path={tmp_path}", "dataset=none.jsonl", f"output_dir={tmp_path}/out"]
    told = refused(lambda: run.make_plan(parse_args(words)))
    assert told == refused(lambda: AutoConfig.from_pretrained(str(tmp_path)))
    assert [key.split()[0] for key, _ in told] == ["hidden_act", "mlp_bias"]


def test_a_backend_asks_the_rules_of_adapters_for_a_model_that_has_some():
    from types import SimpleNamespace

    from mca_lite.backend_torch import TorchBackend
    from mca_lite.part_lora import Lora, LoraSpec

    args = TrainingArguments(output_dir="out", moe_router_bias_update_rate=0.1)
    model = SimpleNamespace(finetuning=Lora(LoraSpec()))
    [(key, _)] = refused(lambda: TorchBackend(model, args))
    assert key == "moe_router_bias_update_rate"


def test_an_alias_of_megatrons_key_counts_as_the_key_on_plain_torch(models, tmp_path):
    words = [f"model_name_or_path={models['dense']}", "dataset=a.jsonl", f"output_dir={tmp_path}"]
    words += ["use_mca=false", "accumulate_allreduce_grads_in_fp32=false"]
    run = parse_args(words)
    assert run.training.grad_reduce_in_fp32 is True
    assert any(line.startswith("grad_reduce_in_fp32: no effect") for line in run.warnings)


def test_all_that_adapters_cannot_be_is_said_at_once(models):
    from mca_lite import part_lora

    config = AutoConfig.from_pretrained(str(models["dense"]))
    spec = part_lora.LoraSpec(targets=("q_porj", "o_proj"), modules_to_save=("lm_hed",))
    told = refused(lambda: part_lora.plan(config, spec))
    assert [key for key, _ in told] == ["lora_target", "modules_to_save"]
